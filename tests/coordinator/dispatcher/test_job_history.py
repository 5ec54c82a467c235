"""What a job's leaders record of it, and that no trouble with it is the job's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import AcknowledgeCheckpoint, Heartbeat, OperatorMetrics, SubtaskMetrics
from holdfast.coordinator.dispatcher import job_history
from holdfast.coordinator.dispatcher.job_history import JobHistory
from holdfast.coordinator.history.feed import FedRecord, HistoryFeed
from holdfast.coordinator.history.records import HistoryPage, describe_checkpoint
from holdfast.coordinator.history.store import HistoryQuery, HistoryWriter, read_history
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import HISTORY_FOLDER, JobPaths
from holdfast.statebackends.storage.port import Operation, path_of, run_flow
from tests.coordinator.dispatcher.test_dispatcher import JOB, deployed, register, submitted
from tests.coordinator.rig import Rig
from tests.coordinator.stepping import Process, SteppedClock
from tests.coordinator.world import DictStorage


class Storage(DictStorage):
    """Refuses operations on histories while `is_down`."""

    is_down = False
    refused = 0

    def execute(self, operation: Operation) -> Any:
        if self.is_down and f"/{HISTORY_FOLDER}" in path_of(operation):
            self.refused += 1
            raise StorageUnavailableError("the bucket of histories is away")
        return super().execute(operation)


def history(storage: DictStorage) -> HistoryPage:
    return run_flow(read_history(JobPaths(JOB), HistoryQuery(limit=1_000), 0), storage)


def told(storage: DictStorage) -> list[tuple[int, str, str]]:
    """Epoch, kind, and the state or error of each record."""
    named = [(each, str(each.facts.get("state") or each.facts.get("error", ""))) for each in history(storage).entries]
    return [(each.epoch, each.kind, text.partition(":")[0]) for each, text in named]


def running(storage: DictStorage) -> Process:
    process = Process(storage).begin()
    process.submit(submitted())
    assert deployed(process) == [1, 1]
    return process


def test_what_happens_is_on_record_within_five_seconds() -> None:
    storage = Storage()
    process = running(storage)
    assert told(storage) == []
    process.pass_time(5_000)
    assert told(storage) == [(1, "leader", ""), (1, "restart", ""), (1, "state", "RUNNING")]
    assert history(storage).gaps == ()


def test_end_of_a_leader_is_on_record_at_once_and_the_next_one_goes_on() -> None:
    storage = Storage()
    process = running(storage)
    process.service(JOB).close("the coordinator stops")
    process.settle()
    assert told(storage)[-1] == (1, "state", "SUSPENDED")
    Process(storage, seed=2).begin().pass_time(5_000)
    led = next(each for each in history(storage).entries if each.epoch == 2)
    assert (led.number, led.kind, led.facts["took_over"]) == (1, "leader", True)
    assert history(storage).gaps == ()


def test_leader_that_was_killed_leaves_a_gap() -> None:
    storage = Storage()
    running(storage).pass_time(5_000)  # and is never heard of again
    later = Process(storage, seed=2).begin()
    later.pass_time(5_000)
    gaps = history(storage).gaps
    assert [(gap.epoch, gap.before, gap.missing) for gap in gaps] == [(1, None, None)]


def test_failure_and_restart_say_what_is_read_again() -> None:
    rig = Rig().run()
    source = rig.graph.vertices[0]
    counts = (OperatorMetrics(source.operators[0].uid, records_out=70),)
    rig.heartbeat(0, metrics=(SubtaskMetrics(source.vertex_id, 0, records_out=70, operators=counts),))
    assert rig.master.lifecycle._replayed() == 70


def test_storage_that_is_down_costs_history_alone() -> None:
    storage = Storage()
    storage.is_down = True
    process = running(storage)
    session = register(process, 0).session
    for _ in range(60):
        process.pass_time(1_000)
        for _ in range(2):
            process.call(JOB, lambda ticket: job_events.HeartbeatReceived(ticket, Heartbeat(0, session, 1, ())))
    assert not process.service(JOB).ended.is_set()
    assert 2 <= storage.refused <= 20  # with growing pauses
    storage.is_down = False
    for _ in range(3):
        process.pass_time(60_000)
    assert told(storage)[:4] == [(1, "leader", ""), (1, "restart", ""), (1, "state", "RUNNING"), (1, "failure", "WorkerLost")]
    assert history(storage).gaps == ()


def test_job_that_ended_gives_its_history_up_and_sleeps() -> None:
    storage = Storage()
    storage.is_down = True
    process = running(storage)
    process.call(JOB, job_events.CancelRequested)
    for _ in range(5):
        process.pass_time(120_000)
    assert process.service(JOB).ended.is_set()
    assert process.service(JOB).next_deadline_ms() is None
    before = storage.refused
    process.pass_time(600_000)
    assert storage.refused == before


def test_unexpected_errors_end_the_recording_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("a bug")

    storage = Storage()
    with monkeypatch.context() as patched:
        patched.setattr(job_history, "describe_note", broken)
        process = running(storage)
        process.pass_time(10_000)
    assert not process.service(JOB).failed
    assert process.service(JOB).next_deadline_ms() is None or not process.service(JOB).ended.is_set()
    assert told(storage) in ([], [(1, "leader", "")])


def test_recording_that_broke_says_so_once_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(job_history, "describe_note", broken)
    process = running(Storage())
    recorder = process.service(JOB)._history._recorder  # type: ignore[union-attr]
    kept = recorder._next_number
    monkeypatch.undo()
    process.call(JOB, job_events.CancelRequested)
    process.pass_time(10_000)
    assert caplog.text.count("its history is recorded no more") == 1
    assert recorder._next_number == kept


def test_unexpected_error_of_a_write_is_not_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("a bug")
        yield

    storage = Storage()
    with monkeypatch.context() as patched:
        patched.setattr(HistoryWriter, "_prune", broken)
        process = running(storage)
        process.pass_time(5_000)
    assert not process.service(JOB).failed
    process.call(JOB, job_events.CancelRequested)
    process.pass_time(30_000)
    assert told(storage)[-1] == (1, "state", "CANCELED")


def test_checkpoints_are_described_by_vertex_and_slowest_subtasks() -> None:
    rig = Rig().run()
    rig.checkpoint()
    taken = rig.master.coordinator.stats.take_finished()
    assert list(taken) == [1]
    assert rig.master.coordinator.stats.take_finished() == {}
    facts = describe_checkpoint(taken[1], {0: "host-a", 1: "host-b"})
    assert (facts["id"], facts["status"], facts["subtasks"], facts["acknowledged"]) == (1, "COMPLETED", 4, 4)
    assert [each["vertex"] for each in facts["vertices"]] == sorted((each.vertex_id for each in rig.graph.vertices), reverse=True)
    assert {each["host"] for each in facts["slowest"]} == {"host-a", "host-b"}
    assert "missing" not in facts
    assert facts["decide_ms"] == taken[1].decide_ms >= 0
    phases = {"start_delay_ms", "alignment_ms", "sync_ms", "async_ms", "store_ms", "acknowledge_ms"}
    assert all(phases <= each.keys() for each in (*facts["vertices"], *facts["slowest"]))
    subtasks = {
        (name, each.subtask): each.acknowledge_ms for name, vertex in taken[1].vertices.items() for each in vertex.subtasks
    }
    assert all(each["acknowledge_ms"] == subtasks[each["vertex"], each["subtask"]] for each in facts["slowest"])


def test_record_of_a_checkpoint_says_when_all_subtasks_knew_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Feed:
        facts: ClassVar[list[dict[str, Any]]] = []

        def publish(self, record: FedRecord) -> None:
            self.facts.append(msgspec.json.decode(record.line)["facts"])

    rig = Rig().run()
    def now(act: Callable[[], None]) -> None:
        act()

    kept = JobHistory(rig.setup, cast(Any, None), SteppedClock(), now, now, cast(HistoryFeed, Feed()))
    rig.checkpoint()
    kept.event_handled(rig.master, [])
    silent = rig.acks

    def telling(slot: int, attempt: int, number: int) -> tuple[Any, ...]:
        told = [each for each in silent(slot, attempt, number) if isinstance(each, AcknowledgeCheckpoint)]
        return tuple(replace(each, metrics=replace(each.metrics, notified_checkpoint=1, notified_after_ms=0.0)) for each in told)

    monkeypatch.setattr(rig, "acks", telling)
    rig.checkpoint()
    kept.event_handled(rig.master, [])
    assert [(each["id"], each.get("notified")) for each in Feed.facts] == [(1, None), (2, [{"id": 1, "notify_ms": 0}])]
