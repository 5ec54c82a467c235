"""Which job of a driver is meant by who executes one again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.operators.datastream.launcher import LaunchOptions
from holdfast.operators.datastream.plan_digest import PlanDigest
from holdfast.operators.spark.running_jobs import Execution, RunningJob, RunningJobs, checkpoint_before_takeover
from holdfast.statebackends.errors import CheckpointFailedError, NotFoundError

DEADLINE_S = 10.0
HERE, THERE = "http://here", "http://there"


def execution(name: str = "job", job_id: str | None = None, code: str | None = "a", begins_with: str | None = None) -> Execution:
    return Execution(name, job_id, PlanDigest(JobGraph(name, (), (), JobConfig()), {"map": code}), begins_with)


class Handle:
    def __init__(self, job_id: str = "1", url: str = HERE, *, is_running: bool = True) -> None:
        self.job_id = job_id
        self.is_running = is_running
        self.worker_nonces = frozenset({"a", "b"})
        self.ends = False
        self.taken: list[str] = []
        self.client = SimpleNamespace(url=url, trigger_checkpoint=self._checkpoint)

    def await_ending(self) -> bool:
        return self.ends

    def _checkpoint(self, job_id: str, *, unaligned: bool, timeout_s: float) -> int:
        assert not unaligned, "the new plan may lack the exchange of records in flight"
        self.taken.append(job_id)
        raise CheckpointFailedError("declined", job_id=job_id, reason="DECLINED")


def jobs(*entries: tuple[Execution, Handle]) -> RunningJobs:
    found = RunningJobs()
    for each, handle in entries:
        found.add(each, handle)  # type: ignore[arg-type]
    return found


def find(running: RunningJobs, wanted: Execution, url: str = HERE, workers: tuple[str, ...] | None = None) -> Any:
    """`workers`: nonces of those that the coordinator asked knows; None: it does not know the job."""
    closed: list[str] = []

    def asked(job_id: str) -> dict[str, Any]:
        if workers is None:
            raise NotFoundError(f"there is no job {job_id}")
        return {"workers": [{"slot": slot, "nonce": nonce} for slot, nonce in enumerate(workers)]}

    connection = SimpleNamespace(client=SimpleNamespace(url=url, workers=asked), close=lambda: closed.append(url))
    found = running.find(wanted, lambda: connection)
    assert closed in ([], [url]), "a connection is closed once"
    return None if found is None else found.handle


def test_a_job_is_found_by_its_name_or_its_id_on_its_coordinator() -> None:
    named, numbered = Handle("1"), Handle("2")
    running = jobs((execution(), named), (execution(job_id="2"), numbered))
    assert find(running, execution()) is named
    assert find(running, execution(job_id="2")) is numbered
    assert find(running, execution(name="other", job_id="1")) is named
    assert find(running, execution(name="other")) is None
    assert find(running, execution(job_id="3")) is None
    assert find(running, execution(), THERE) is None


def test_a_coordinator_is_known_by_the_workers_of_the_job_whatever_its_address() -> None:
    """`http://localhost:8080` and `http://127.0.0.1:8080` were two of them, and the job was taken from its own driver."""
    handle = Handle()
    running = jobs((execution(), handle))
    assert find(running, execution(), THERE, workers=("", "b")) is handle, "the other worker is just being replaced"
    assert find(running, execution(), THERE, workers=("c", "d")) is None
    assert find(running, execution(), THERE, workers=("", "")) is None


def test_a_job_that_is_over_or_was_left_is_not_found() -> None:
    handle = Handle()
    running = jobs((execution(), handle))
    handle.is_running = False
    assert find(running, execution()) is None


def test_a_job_whose_end_was_waited_for_is_not_found() -> None:
    handle = Handle()
    running = jobs((execution(), handle))
    handle.ends = True
    assert find(running, execution()) is None


def test_the_same_plan_goes_on_unless_it_is_to_begin_elsewhere() -> None:
    job = RunningJob(execution(), Handle())  # type: ignore[arg-type]
    assert job.difference(execution()) is None
    assert job.difference(execution(begins_with="fresh=True")) == "fresh=True"
    assert job.difference(execution(code="b")) == "the code, or the data, of operator 'map'"
    assert job.difference(execution(code=None)) == "the code, or the data, of operator 'map'"


@pytest.mark.parametrize(
    ("options", "begins_with"),
    [
        (LaunchOptions(), None),
        (LaunchOptions(restore="latest"), None),
        (LaunchOptions(fresh=True), "fresh=True"),
        (LaunchOptions(restore="/sp/savepoint-1"), "restore='/sp/savepoint-1'"),
    ],
)
def test_only_latest_is_where_a_running_job_stands(options: LaunchOptions, begins_with: str | None) -> None:
    plan: Any = SimpleNamespace(graph=SimpleNamespace(name="job"), operators={}, sources={}, selectors={})
    assert Execution.of(plan, options).begins_with == begins_with


def test_a_takeover_begins_with_a_checkpoint_and_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    handle = Handle()
    job = RunningJob(execution(), handle)  # type: ignore[arg-type]
    checkpoint_before_takeover(job, execution(begins_with="fresh=True"))
    assert handle.taken == []
    checkpoint_before_takeover(job, execution(code="b"))
    assert handle.taken == ["1"]
    assert "job: its new plan begins with an older checkpoint: declined" in caplog.text


def test_two_threads_that_execute_one_job_take_turns_and_others_need_not_wait() -> None:
    running, order = RunningJobs(), []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with running.turn("job"):
            order.append("second")

    thread = threading.Thread(target=second, daemon=True)
    with running.turn("job"):
        thread.start()
        assert entered.wait(DEADLINE_S)
        with running.turn("other"):
            order.append("first")
    thread.join(DEADLINE_S)
    assert order == ["first", "second"]
