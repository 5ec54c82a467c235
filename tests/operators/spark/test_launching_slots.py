"""Slots of Spark, counted while several threads start jobs on one session: no job is counted twice, and none waits for another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.operators.datastream.launcher import LaunchOptions
from holdfast.operators.datastream.plan_digest import PlanDigest
from holdfast.operators.spark import access
from holdfast.operators.spark import launcher as spark
from holdfast.operators.spark import running_jobs as runningjobs
from holdfast.operators.spark import settings as spark_settings
from holdfast.operators.spark.launcher import SparkLauncher
from holdfast.operators.spark.supervisor import SlotSupervisor
from holdfast.statebackends.errors import NotEnoughSlotsError, OutputMayRepeatError

DEADLINE_S = 10.0


class Handle:
    """Of a job whose workers run until it is closed."""

    def __init__(self, job_id: str, client: Any, graph: Any, slots: int, **_: Any) -> None:
        self.job_id = job_id
        self.client = client
        self.attached = 0
        self.said: list[str] = []
        self.slots_held = self.standbys_held = 0
        self._slots, self._standbys = slots, _.get("standbys", 0)

    @property
    def is_running(self) -> bool:
        return self.slots_held > 0

    def start(self, runner: Any) -> None:
        self.standbys_held = self._standbys
        self.slots_held = self._slots + self._standbys

    def release_standbys(self) -> None:
        self.slots_held, self.standbys_held = self._slots, 0

    def await_ending(self) -> bool:
        return False

    def attach(self) -> None:
        self.attached += 1

    def say(self, line: str) -> None:
        self.said.append(line)

    def give_up(self, *_: Any) -> None: ...

    def wait_for_workers(self, timeout_s: float) -> None: ...

    def close(self) -> None:
        self.slots_held = self.standbys_held = 0


class Cluster:
    """A session without Spark; what a test looks at happens in `on_started`, when a job's workers have just been started."""

    def __init__(self, patch: pytest.MonkeyPatch, master: str, tasks: int) -> None:
        self.tasks = tasks
        self.asked = threading.Event()
        self.refusal: Exception | None = None
        self.on_started: Callable[[], object] = lambda: None
        context = SimpleNamespace(master=master)
        patch.setattr(spark_settings, "concurrent_tasks", self._concurrent_tasks)
        patch.setattr(spark, "_at_exit", lambda _: self.on_started())
        patch.setattr(spark, "SparkJobHandle", Handle)
        for name in ("apply_settings", "hide_progress_bar", "spare_workers", "ship_package", "RddBackend"):
            patch.setattr(access, name, lambda *_, **__: [])
        patch.setattr(access.ClassicAccess, "hosts", 1)
        patch.setattr(spark, "pickle_plan", lambda _: b"")
        patch.setattr(spark, "_submission", lambda plan, _: SimpleNamespace(graph=plan.graph, launch_key=""))
        patch.setattr(spark, "SlotRunner", lambda *_, **__: None)
        patch.setattr(SlotSupervisor, "of", lambda *_: None)
        client = SimpleNamespace(url="", token=None, authorities=None, submit=self._submit)
        connection = SimpleNamespace(client=client, close=lambda: None)
        self._launcher = SparkLauncher(SimpleNamespace(sparkContext=context), lambda _: connection)  # type: ignore[arg-type,return-value]

    def launch(self, slots: int, **wanted: Any) -> Any:
        vertex = JobVertex("a", "a", slots, 128, (OperatorDescription("a", "a", "a", "source"),))
        graph = JobGraph(f"job of {slots}", (vertex,), (), JobConfig())
        plan = SimpleNamespace(graph=graph, operators={}, sources={}, selectors={})
        return self._launcher.launch(plan, LaunchOptions(progress=False, **wanted))  # type: ignore[arg-type]

    def _concurrent_tasks(self, context: object) -> int:
        self.asked.set()
        return self.tasks

    def _submit(self, submission: Any) -> SimpleNamespace:
        if self.refusal is not None:
            raise self.refusal
        slots = submission.graph.slots_required
        named = {"job_id": "job", "submission": 1, "restored_checkpoint_id": 0, "directory": "", "directory_nonce": ""}
        return SimpleNamespace(notes=(), slots=slots, worker_token="", **named)


def test_a_job_whose_workers_are_just_starting_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, started = Cluster(monkeypatch, "local[4]", 4), []

    def second() -> None:
        cluster.on_started = lambda: None
        started.append(cluster.launch(2))

    cluster.on_started = second
    started.append(cluster.launch(1))
    assert [handle.slots_held for handle in started] == [2, 1], "what would stand by for the first makes room for the second"


def test_a_job_that_waits_for_slots_keeps_no_smaller_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, smaller = Cluster(monkeypatch, "yarn", 3), []
    large = threading.Thread(target=cluster.launch, args=(5,), daemon=True)
    large.start()
    assert cluster.asked.wait(DEADLINE_S)
    small = threading.Thread(target=lambda: smaller.append(cluster.launch(1)), daemon=True)
    small.start()
    small.join(DEADLINE_S)
    assert len(smaller) == 1
    smaller[0].close()
    cluster.tasks = 6
    large.join(DEADLINE_S)
    assert not large.is_alive()


def test_a_plan_that_is_long_to_look_into_keeps_no_other_job_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, small = Cluster(monkeypatch, "local[8]", 8), threading.Event()

    def start_small() -> None:
        cluster.launch(1)
        small.set()

    def digest(plan: Any) -> PlanDigest:
        if plan.graph.name == "job of 5":
            other = threading.Thread(target=start_small, daemon=True)
            other.start()
            other.join(DEADLINE_S)
        return PlanDigest(plan.graph, {})

    monkeypatch.setattr(runningjobs, "digest_plan", digest)
    cluster.launch(5)
    assert small.is_set()


def test_a_job_that_does_not_start_gives_its_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "local[4]", 4)

    def fail() -> None:
        cluster.on_started = lambda: None
        raise OSError("no more threads")

    cluster.on_started = fail
    with pytest.raises(OSError, match="no more threads"):
        cluster.launch(3)
    assert cluster.launch(3).slots_held == 3


def test_a_job_that_runs_here_already_is_attached_to_and_needs_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "local[4]", 4)
    first = cluster.launch(3)
    assert cluster.launch(3) is first
    assert (first.attached, first.slots_held) == (1, 3)


def test_a_job_that_was_left_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "local[4]", 4)
    first = cluster.launch(3)
    first.close()
    assert cluster.launch(3) is not first


def test_a_job_that_is_to_begin_anew_takes_the_slots_of_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "local[4]", 4)
    first = cluster.launch(3)
    second = cluster.launch(3, fresh=True)
    assert second is not first
    assert first.said == ["job of 3 runs already in this program, with another plan: fresh=True; the new plan takes over"]
    assert cluster.launch(3) is second


def test_a_takeover_that_is_refused_leaves_the_job_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "local[4]", 4)
    first = cluster.launch(3)
    cluster.refusal = OutputMayRepeatError("output may repeat", restored=1, committed=2)
    with pytest.raises(OutputMayRepeatError):
        cluster.launch(3, fresh=True)
    assert cluster.launch(3) is first
    first.close()
    cluster.refusal = None
    assert cluster.launch(3, fresh=True).slots_held == 3


def test_a_worker_stands_by_where_a_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "local[8]", 8)
    first, second = cluster.launch(4), cluster.launch(2)
    assert [each.slots_held for each in (first, second)] == [5, 2]


@pytest.mark.parametrize(("tasks", "told"), [(8, False), (3, True)])
def test_where_no_slot_is_free_for_one_to_stand_by_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tasks: int, told: bool
) -> None:
    with caplog.at_level(logging.INFO, "holdfast.spark"):
        launched = Cluster(monkeypatch, "local[8]", tasks).launch(2)
    assert launched.slots_held == (2 if told else 3)
    assert ("0 of 1 standby workers have a free Spark slot" in caplog.text) is told


def test_what_stands_by_makes_room_for_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, "local[8]", 8)
    first, second = cluster.launch(3), cluster.launch(2)
    assert [each.slots_held for each in (first, second)] == [4, 3]
    second.close()
    third = cluster.launch(4)
    assert (third.slots_held, first.slots_held) == (4, 3)
    with pytest.raises(NotEnoughSlotsError):
        cluster.launch(1)
