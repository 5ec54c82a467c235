"""The task side of a checkpoint (scenarios K), the life of a subtask, and slices with barriers in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from msgspec import UNSET

from holdfast.barriers.alignment.tracker import BarrierTracker
from holdfast.barriers.elements import (
    MAX_WATERMARK,
    Batch,
    CancelMarker,
    CheckpointBarrier,
    ElementEvent,
    EndOfData,
    EndOfPartition,
    Watermark,
    WatermarkStatus,
)
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    CheckpointKind,
    DeclineCheckpoint,
    FailureReason,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
)
from holdfast.operators.base import Operator, Poll
from holdfast.operators.task.context import CancelSubtask, FailSubtask, SourceReady
from holdfast.operators.task.source_operator import SourceOperator
from holdfast.statebackends.errors import StorageUnavailableError, UserFunctionError
from tests.operators.ports import DictStorage
from tests.operators.runtime import Bench, ListReader, ListSource, ManualClock, Recording

MODES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "unaligned": {"unaligned": True, "aligned_timeout_ms": 0},
    "timeout": {"unaligned": True, "aligned_timeout_ms": 60_000},
    "at_least_once": {},
}


FIELDS: dict[str, Any] = {}
"""Of the barriers and triggers of a test, if it has no others."""
CHANNELS = {"channels": 1}
"""Of a subtask that is no source, if its test says no other number."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Group K in each mode."""
    if metafunc.function.__name__.startswith("test_k"):
        metafunc.fixturenames.append("mode")
        metafunc.parametrize("mode", MODES, indirect=True)


@pytest.fixture
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Barriers, triggers and the gate are of a mode; the worker lets urgent ones in before each step."""
    run, name = Bench.run, str(request.param)

    def run_urgent(bench: Bench) -> None:
        bench.subtask.serve_urgent(bench.clock.now_ms)
        run(bench)

    monkeypatch.setattr(Bench, "run", run_urgent)
    if name == "at_least_once":
        monkeypatch.setattr(Bench, "barriers", BarrierTracker)
        monkeypatch.setattr(Bench, "events", to_all_channels)
        monkeypatch.setitem(CHANNELS, "channels", 2)
    for field, value in MODES[name].items():
        monkeypatch.setitem(FIELDS, field, value)
    return name


def to_all_channels(bench: Bench, channel: int, *events: ElementEvent) -> None:
    """Barriers come over each channel, one behind the other."""
    for each in range(bench.channels):
        for event in events:
            bench.gate.offer(each, event)


def barrier(checkpoint_id: int, **fields: Any) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0, folder=f"chk-{checkpoint_id}", **{**FIELDS, **fields})


def trigger(checkpoint_id: int, **fields: Any) -> TriggerCheckpoint:
    kind = fields.pop("kind", CheckpointKind.CHECKPOINT)
    return TriggerCheckpoint(1, checkpoint_id, 0, kind, f"chk-{checkpoint_id}", **{**FIELDS, **fields})


def aborted(checkpoint_id: int) -> NotifyCheckpointAborted:
    return NotifyCheckpointAborted(1, checkpoint_id)


def recordings(count: int, channels: int | None = None, **fields: Any) -> Bench:
    log: list[str] = []
    operators: list[Operator] = [Recording("abcdef"[index], log) for index in range(count)]
    return Bench(operators, channels or CHANNELS["channels"], log=log, **fields).started()


def source(rows: int = 5, **fields: Any) -> Bench:
    log: list[str] = []
    operators: list[Operator] = [SourceOperator(ListSource(list(range(rows)))), Recording("a", log)]
    bench = Bench(operators, log=log, **fields)
    bench.subtask.start()
    bench.log.clear()
    bench.reports.clear()
    return bench


def ids(bench: Bench, kind: type) -> list[int]:
    return [item.checkpoint_id for item in bench.answers() if isinstance(item, kind)]


def test_states_with_a_ttl_are_told_the_time_before_each_unit_of_work() -> None:
    log: list[str] = []
    bench = Bench([Recording("a", log), Recording("b", log)], channels=1, log=log, rows_max=2)
    bench.keyed[1].uses_processing_time = True
    bench.clock.now_ms = 5
    bench.subtask.start()
    assert log == ["time 5", "a initialize", "b initialize", "b open", "a open"]
    log.clear()
    bench.rows(0, 1, 2, 3)
    bench.clock.now_ms = 7
    bench.run()
    assert log[:6] == ["time 7", "a process 1", "b process 1", "time 7", "a process 2 3", "b process 2 3"]
    log.clear()
    bench.clock.now_ms = 9
    bench.mailbox.put(NotifyCheckpointComplete(1, 1, 0))
    bench.subtask.step(9)
    assert log[:2] == ["time 9", "a complete 1"]


# ------------------------------------------------------------------------------------------------------------- K table


def test_k01_abort_before_the_trigger_snapshots_nothing_and_cancels_downstream() -> None:
    bench = source(1_000)
    bench.mailbox.put(aborted(6))
    bench.mailbox.put(trigger(6))
    bench.subtask.step(0)
    assert [item for item in bench.port.take() if not isinstance(item, int)] == [CancelMarker(6)]
    assert not any("snapshot" in line for line in bench.log)
    assert bench.answers() == []


def test_k01_abort_before_the_barrier_snapshots_nothing_and_cancels_downstream() -> None:
    bench = recordings(1)
    bench.mailbox.put(aborted(6))
    bench.run()
    bench.events(0, barrier(6))
    bench.settle()
    assert bench.port.take() == [CancelMarker(6)]
    assert bench.log == ["a aborted 6"]
    assert bench.answers() == []


def test_k02_aborts_that_never_arrive_take_bounded_memory() -> None:
    bench = source()
    for checkpoint_id in range(1, 2_000):
        bench.mailbox.put(aborted(checkpoint_id))
    bench.run()
    assert len(bench.snapshots._aborted) <= 128
    bench.mailbox.put(trigger(1_999))
    bench.settle()
    assert len(bench.snapshots._aborted) == 0


def test_k03_abort_during_the_asynchronous_part_stops_it_unanswered() -> None:
    bench = recordings(2)
    bench.events(0, barrier(6))
    bench.run()
    assert len(bench.pool.waiting) == 1
    bench.mailbox.put(aborted(6))
    bench.settle()
    assert bench.answers() == []
    assert bench.storage.files == {}
    assert [line for line in bench.log if "aborted" in line] == ["a aborted 6", "b aborted 6"]
    assert all(backend.frozen == 0 for backend in bench.keyed)
    assert bench.subtask.state is TaskState.RUNNING


def test_k04_abort_after_the_ack_is_only_a_notice() -> None:
    bench = recordings(1)
    bench.events(0, barrier(6))
    bench.settle()
    bench.port.take()
    bench.mailbox.put(aborted(6))
    bench.settle()
    assert ids(bench, AcknowledgeCheckpoint) == [6]
    assert bench.port.take() == []
    assert bench.log[-1] == "a aborted 6"


def test_k05_trigger_of_a_restoring_task_is_declined_and_cancelled_downstream() -> None:
    bench = Bench([SourceOperator(ListSource([]))])
    bench.mailbox.put(trigger(6))
    bench.subtask.step(0)
    (answer,) = bench.answers()
    assert isinstance(answer, DeclineCheckpoint)
    assert answer.reason is FailureReason.TASK_NOT_READY
    assert bench.port.take() == [CancelMarker(6)]


def test_k06_hooks_barrier_synchronous_parts_asynchronous_part_ack() -> None:
    bench = recordings(3)
    bench.operators[0].emits_before_snapshot = ["late"]  # type: ignore[attr-defined]
    bench.events(0, barrier(6))
    bench.run()
    assert bench.port.take() == ["late", barrier(6)], "what a hook emits is before the cut"
    assert bench.log == [
        "a prepare 6",
        "b process late",
        "c process late",
        "b prepare 6",
        "c prepare 6",
        "a snapshot 6",
        "keyed 6",
        "b snapshot 6",
        "keyed 6",
        "c snapshot 6",
        "keyed 6",
    ]
    assert bench.answers() == [], "no ack before the bytes are durable"
    bench.settle()
    (answer,) = bench.answers()
    assert isinstance(answer, AcknowledgeCheckpoint)
    assert list(answer.states) == ["op0", "op1", "op2"]
    assert sorted(path.split("/")[0] for path in bench.storage.files) == ["chk-6"] * 3 + ["work"] * 3


def test_k06_emitting_behind_the_barrier_fails_the_task() -> None:
    class Emits(Recording):
        def snapshot_state(self, checkpoint_id: int) -> None:
            self.output.collect(Batch(rows=[1]))

    bench = Bench([Emits("a", [])], 1).started()
    bench.events(0, barrier(6))
    bench.settle()
    assert bench.subtask.state is TaskState.FAILED


def test_k07_failure_of_a_synchronous_part_releases_what_was_taken_and_fails_the_task() -> None:
    bench = recordings(3)
    bench.operators[1].raises["snapshot"] = ValueError("no")  # type: ignore[attr-defined]
    bench.events(0, barrier(6))
    bench.settle()
    assert bench.subtask.state is TaskState.FAILED
    assert bench.answers() == []
    assert bench.storage.files == {}
    assert [backend.disposed for backend in bench.keyed] == [1, 1, 1]
    (status,) = [item for item in bench.reports if isinstance(item, SubtaskStatus)]
    assert status.error == "ValueError: no"
    assert "snapshot_state" in status.traceback


class FullDisk(DictStorage):
    def execute(self, operation: Any) -> Any:
        if "op1" in getattr(operation, "path", ""):
            raise StorageUnavailableError("disk full")
        return super().execute(operation)


def test_k08_failed_upload_declines_and_the_task_goes_on() -> None:
    bench = recordings(3, storage=FullDisk())
    bench.events(0, barrier(6))
    bench.settle()
    (answer,) = bench.answers()
    assert isinstance(answer, DeclineCheckpoint)
    assert answer.reason is FailureReason.ASYNC_EXCEPTION
    assert answer.message == "StorageUnavailableError: disk full"
    assert bench.subtask.state is TaskState.RUNNING
    assert all(backend.frozen == 0 for backend in bench.keyed)


def test_k09_completion_reaches_every_operator_head_to_tail_once() -> None:
    bench = recordings(2)
    bench.mailbox.put(NotifyCheckpointComplete(1, 5, 0))
    bench.mailbox.put(NotifyCheckpointComplete(1, 5, 0))
    bench.mailbox.put(NotifyCheckpointComplete(1, 4, 0))
    bench.settle()
    assert bench.log == ["a complete 5", "b complete 5"]


def test_k10_two_asynchronous_parts_may_end_in_any_order() -> None:
    bench = recordings(1)
    bench.events(0, barrier(1), barrier(2))
    bench.run()
    first, second = bench.pool.waiting
    second()
    first()
    bench.pool.waiting.clear()
    bench.settle()
    assert ids(bench, AcknowledgeCheckpoint) == [2, 1]


def test_k11_cancel_during_the_asynchronous_part_acks_nothing_and_holds_nothing() -> None:
    bench = recordings(1)
    bench.events(0, barrier(6))
    bench.run()
    bench.mailbox.put(CancelSubtask())
    bench.run()
    assert bench.subtask.state is TaskState.CANCELING, "state is released only when the pool holds nothing of it"
    assert not bench.subtask.is_disposed
    bench.settle()
    assert bench.subtask.state is TaskState.CANCELED
    assert bench.subtask.is_disposed
    assert bench.answers() == []
    assert bench.keyed[0].disposed == 1


def test_k12_same_id_twice_snapshots_once() -> None:
    bench = source()
    bench.mailbox.put(trigger(6))
    bench.mailbox.put(trigger(6))
    bench.settle()
    assert ids(bench, AcknowledgeCheckpoint) == [6]


def test_k13_lower_id_is_never_a_snapshot() -> None:
    bench = source()
    bench.mailbox.put(trigger(6))
    bench.mailbox.put(trigger(5))
    bench.settle()
    assert ids(bench, AcknowledgeCheckpoint) == [6]
    assert bench.answers() == [item for item in bench.answers() if item.checkpoint_id == 6]


# ---------------------------------------------------------------------------------------------------------------- life


def test_open_is_tail_to_head_behind_every_initialization() -> None:
    log: list[str] = []
    bench = Bench([Recording("a", log), Recording("b", log)], 1, log=log)
    bench.subtask.start()
    assert log == ["a initialize", "b initialize", "b open", "a open"]
    assert bench.states() == [TaskState.INITIALIZING, TaskState.RUNNING]


def test_failure_in_open_closes_what_was_opened() -> None:
    log: list[str] = []
    bench = Bench([Recording("a", log), Recording("b", log)], 1, log=log)
    bench.operators[0].raises["open"] = ValueError("no")  # type: ignore[attr-defined]
    bench.subtask.start()
    assert log[-2:] == ["a close", "b close"]
    assert bench.states() == [TaskState.INITIALIZING, TaskState.FAILED]


def test_exception_of_user_code_fails_the_subtask_with_its_text() -> None:
    bench = recordings(1)
    bench.operators[0].raises["process"] = UserFunctionError("operator 'a' raised on record 1", operator="a")  # type: ignore[attr-defined]
    bench.rows(0, 1)
    bench.run()
    (status,) = bench.reports
    assert isinstance(status, SubtaskStatus)
    assert status.state is TaskState.FAILED
    assert status.error == status.traceback == "UserFunctionError: operator 'a' raised on record 1", "no frames of ours"
    bench.mailbox.put(CancelSubtask())
    bench.run()
    assert bench.subtask.state is TaskState.FAILED, "FAILED is terminal"


@pytest.mark.parametrize("where", ["process", "close"])
@pytest.mark.parametrize("end", [SystemExit(2), GeneratorExit()])
def test_an_exit_that_user_code_asks_for_fails_the_subtask_and_ends_no_worker(where: str, end: BaseException) -> None:
    """Parsers of arguments do that, for one."""
    bench = recordings(1)
    bench.operators[0].raises[where] = end  # type: ignore[attr-defined]
    bench.rows(0, 1)
    bench.run()
    if where == "close":
        bench.mailbox.put(FailSubtask(ValueError("peer lost")))
        bench.run()
    told = [status.error for status in bench.reports if isinstance(status, SubtaskStatus) and status.state is TaskState.FAILED]
    if where == "close":
        assert told == ["ValueError: peer lost"]
    else:
        assert told[0].startswith(f"UserFunctionError: operator 'op0', subtask 0: {type(end).__name__}({end}) would end the worker")
    assert bench.subtask.is_disposed


def test_an_exit_on_a_thread_of_a_client_fails_the_subtask() -> None:
    bench = recordings(1)
    bench.mailbox.put(FailSubtask(SystemExit(3)))
    bench.run()
    (status,) = (item for item in bench.reports if isinstance(item, SubtaskStatus))
    assert status.error.startswith("UserFunctionError: operator 'op0', subtask 0: SystemExit(3) would end the worker")


def test_an_interrupt_is_no_failure() -> None:
    bench = recordings(1)
    bench.operators[0].raises["process"] = KeyboardInterrupt()  # type: ignore[attr-defined]
    bench.rows(0, 1)
    with pytest.raises(KeyboardInterrupt):
        bench.run()


def test_loss_of_the_attempt_fails_once() -> None:
    bench = recordings(1)
    bench.mailbox.put(FailSubtask(ValueError("peer lost")))
    bench.mailbox.put(FailSubtask(ValueError("another")))
    bench.run()
    assert [item.error for item in bench.reports if isinstance(item, SubtaskStatus)] == ["ValueError: peer lost"]


def test_notices_during_restore_wait_for_running() -> None:
    log: list[str] = []
    bench = Bench([Recording("a", log)], 1, log=log)
    bench.mailbox.put(NotifyCheckpointComplete(1, 3, 0))
    bench.run()
    bench.subtask.start()
    assert log[-1] == "a complete 3"


def test_nothing_is_taken_while_an_output_is_above_its_mark() -> None:
    bench = recordings(1)
    bench.port.is_available = False
    bench.rows(0, 1)
    bench.mailbox.put(NotifyCheckpointComplete(1, 3, 0))
    assert bench.subtask.step(0).backpressured
    assert bench.log == ["a complete 3"], "mail is served all the same"
    bench.port.is_available = True
    bench.run()
    assert bench.port.take() == [1]


def test_its_last_second_is_told_while_it_runs() -> None:
    clock = ManualClock(0)
    bench = recordings(1, clock=clock)
    bench.port.is_available, bench.port.pending_bytes = False, 70
    bench.rows(0, 1)
    bench.subtask.step(0)
    for at_ms, due_s in ((600, None), (900, 0.8)):
        clock.now_ms = at_ms
        if due_s is not None:
            bench.port.is_available = True
        bench.subtask.step(at_ms, due_s)
    clock.now_ms = 1_000
    told = bench.subtask.metrics()
    assert (told.busy_ms_per_second, told.idle_ms_per_second, told.backpressured_ms_per_second) == (100, 100, 800)
    assert (told.busy_ms, told.idle_ms, told.backpressured_ms) == (100, 100, 800)
    assert (told.queued_in_bytes, told.queued_out_bytes) == (0, 70)
    bench.mailbox.put(FailSubtask(ValueError("over")))
    bench.run()
    assert bench.subtask.metrics().busy_ms_per_second is UNSET, "nothing of what was is shown as of now"


def test_bounded_source_ends_with_the_maximum_watermark_and_stays_running() -> None:
    bench = source(2)
    bench.settle()
    assert bench.port.take() == [0, 1, Watermark(MAX_WATERMARK), EndOfData(True)]
    assert bench.log == ["a process 0", "a process 1", f"a watermark {MAX_WATERMARK}", "a finish"]
    (status,) = bench.reports
    assert isinstance(status, SubtaskStatus)
    assert status.drained
    assert status.state is TaskState.RUNNING
    bench.mailbox.put(trigger(1, kind=CheckpointKind.FINAL))
    bench.settle()
    assert ids(bench, AcknowledgeCheckpoint) == [1]


def test_finish_waits_for_commits() -> None:
    bench = source(0)
    bench.settle()
    bench.port.take()
    operator = bench.operators[1]
    assert isinstance(operator, Recording)
    operator.pending = True
    bench.mailbox.put(FinishTasks(1, 4))
    bench.settle()
    assert bench.log[-1] == "a complete 4"
    assert bench.subtask.state is TaskState.RUNNING
    operator.pending = False
    bench.settle()
    assert bench.subtask.state is TaskState.FINISHED
    assert bench.port.take() == [EndOfPartition()]
    assert bench.log[-1] == "a close"
    assert bench.subtask.is_disposed


def test_attempt_that_only_commits_the_last_checkpoint_ends_its_data_too() -> None:
    """Restored from a stop-with-savepoint, it is told to finish before its source has come to an end: who reads must not wonder."""
    bench = source(1_000)
    bench.subtask.step(0)
    bench.port.take()
    bench.mailbox.put(FinishTasks(1, 4))
    bench.subtask.step(0)
    assert bench.subtask.state is TaskState.FINISHED
    assert bench.port.take()[-2:] == [EndOfData(False), EndOfPartition()]


def test_such_an_attempt_ends_with_a_full_output_and_work_in_hand() -> None:
    """Whoever reads has ended: the output stays full for ever."""
    bench = source(1_000)
    bench.subtask.step(0)
    bench.subtask._input.add_work(iter([None, None]))
    bench.port.is_available = False
    bench.mailbox.put(FinishTasks(1, 4))
    bench.subtask.step(0)
    assert bench.subtask.state is TaskState.FINISHED


def test_a_subtask_ends_only_when_what_can_leave_its_outputs_has_left() -> None:
    bench = source(3)
    bench.settle()
    bench.port.take()
    bench.port.is_leaving = True
    bench.mailbox.put(FinishTasks(1, 4))
    for _ in range(3):
        assert bench.subtask.step(0).has_more
        assert bench.subtask.state is TaskState.RUNNING
    assert bench.port.take() == [EndOfPartition()], "said once"
    bench.port.is_leaving = False
    bench.subtask.step(0)
    assert (bench.subtask.state, bench.port.take()) == (TaskState.FINISHED, [])


class QuarterReader(ListReader):
    """Barriers fall behind every fourth row."""

    @property
    def may_cut(self) -> bool:
        return self.position % 4 == 0


class QuarterSource(ListSource):
    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> ListReader:
        return QuarterReader(self.rows, self.rows_per_poll)


def quarters(rows: int, read: int) -> Bench:
    """A source in the middle of its rows."""
    log: list[str] = []
    bench = Bench([SourceOperator(QuarterSource(list(range(rows)))), Recording("a", log)], log=log)
    bench.subtask.start()
    while cast(Any, bench.operators[0]).reader.position < read:
        bench.subtask._run_input(0, 0.0)
    bench.log.clear()
    return bench


@pytest.mark.parametrize(("read", "cut"), [(4, 4), (5, 8), (7, 8), (9, 10)])
def test_a_barrier_waits_for_the_next_boundary_of_its_source_or_its_end(read: int, cut: int) -> None:
    bench = quarters(10, read)
    bench.mailbox.put(trigger(6))
    bench.settle()
    sent = bench.port.take()
    barriers = [item for item in sent if isinstance(item, CheckpointBarrier)]
    assert [barrier.checkpoint_id for barrier in barriers] == [6]
    assert sum(isinstance(item, int) for item in sent[: sent.index(barriers[0])]) == cut
    assert ids(bench, AcknowledgeCheckpoint) == [6]


def test_an_aborted_barrier_that_waits_is_cancelled_downstream() -> None:
    bench = quarters(10, 5)
    bench.mailbox.put(trigger(6))
    bench.mailbox.put(aborted(6))
    bench.settle()
    assert [item for item in bench.port.take() if isinstance(item, (CancelMarker, CheckpointBarrier))] == [CancelMarker(6)]
    assert bench.answers() == []


def test_a_stop_waits_for_the_boundary_too() -> None:
    bench = quarters(100, 5)
    bench.mailbox.put(trigger(6, kind=CheckpointKind.STOP_SAVEPOINT))
    bench.settle()
    assert sum(isinstance(item, int) for item in bench.port.take()) == 8


class BacklogReader(ListReader):
    """Rows below 20, and those of 60 to 79, are a backlog."""

    @property
    def is_processing_backlog(self) -> bool:
        return self.position < 20 or 60 <= self.position < 80


class BacklogSource(ListSource):
    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> ListReader:
        return BacklogReader(self.rows, self.rows_per_poll)


@pytest.mark.parametrize(("rows", "told"), [(100, [1, 2, 3, 4]), (70, [1, 2, 3, 4]), (10, [1, 2])])
def test_a_source_reports_each_beginning_and_end_of_a_backlog(rows: int, told: list[int]) -> None:
    """The first with the state that lets checkpoints begin; one that ends within a backlog is over it with its end."""
    log: list[str] = []
    bench = Bench([SourceOperator(BacklogSource(list(range(rows)), 10)), Recording("a", log)], log=log)
    bench.subtask._units_max = 1
    bench.subtask.start()
    bench.settle()
    running = [each for each in bench.reports if isinstance(each, SubtaskStatus) and each.state is TaskState.RUNNING]
    assert [each.backlog for each in running if not each.drained] == told[: len(running) - 1]
    assert running[0].backlog == 1
    assert max(each.backlog for each in running) == told[-1]


def test_stop_without_drain_ends_behind_the_barrier_with_windows_open() -> None:
    bench = source(1_000)
    bench.subtask.step(0)
    bench.port.take()
    bench.mailbox.put(trigger(1, kind=CheckpointKind.STOP_SAVEPOINT))
    bench.settle()
    stop = CheckpointBarrier(1, 0, "stop_savepoint", False, "chk-1", None)
    assert bench.port.take() == [stop, EndOfData(False)]
    assert not any("finish" in line or "watermark" in line for line in bench.log)


def test_stop_with_drain_fires_and_finishes_before_the_snapshot() -> None:
    log: list[str] = []
    bench = Bench([SourceOperator(ListSource(list(range(50_000)), 10)), Recording("a", log)], log=log)
    bench.subtask.start()
    bench.subtask.step(0)
    assert not bench.subtask.is_drained
    bench.port.take()
    bench.log.clear()
    bench.mailbox.put(trigger(1, kind=CheckpointKind.STOP_SAVEPOINT, drain=True))
    bench.settle()
    stop = CheckpointBarrier(1, 0, "stop_savepoint", True, "chk-1", None)
    assert bench.port.take() == [EndOfData(True, stopped=True), stop]
    assert bench.log == [f"a watermark {MAX_WATERMARK}", "a finish", "a prepare 1", "a snapshot 1", "keyed 1"]


def test_a_drain_that_was_ordered_ends_event_time_when_all_inputs_have_ended() -> None:
    bench = recordings(1, 2)
    bench.events(1, Watermark(90))
    bench.events(0, Watermark(10), EndOfData(True, stopped=True))
    bench.settle()
    assert bench.port.take() == [Watermark(10)]
    bench.events(1, EndOfData(True, stopped=True))
    bench.settle()
    assert bench.port.take() == [EndOfData(True, stopped=True)]
    assert [line for line in bench.log if "watermark" in line] == ["a watermark 10", f"a watermark {MAX_WATERMARK}"]
    assert bench.log.count("a finish") == 1


def test_an_input_that_ended_by_itself_lets_the_others_go_on_until_they_are_drained() -> None:
    bench = recordings(1, 2)
    bench.events(0, Watermark(MAX_WATERMARK), EndOfData(True))
    bench.events(1, Watermark(90), EndOfData(True, stopped=True))
    bench.settle()
    assert bench.port.take() == [Watermark(90), EndOfData(True, stopped=True)]
    assert [line for line in bench.log if "watermark" in line] == ["a watermark 90", f"a watermark {MAX_WATERMARK}"]


def test_the_tables_of_a_savepoint_are_files_however_small() -> None:
    log: list[str] = []
    bench = Bench([SourceOperator(ListSource(list(range(50_000)), 10)), Recording("a", log)], log=log)
    bench.subtask.start()
    for checkpoint_id, kind in enumerate((CheckpointKind.CHECKPOINT, CheckpointKind.SAVEPOINT), 1):
        bench.mailbox.put(trigger(checkpoint_id, kind=kind))
        bench.settle()
    assert bench.keyed[0].inline_thresholds == [100, 0]


def test_inputs_that_all_end_drain_the_subtask_once() -> None:
    bench = recordings(1, 2)
    bench.events(0, Watermark(MAX_WATERMARK), EndOfData(True))
    bench.settle()
    assert bench.port.take() == []
    bench.events(1, WatermarkStatus(True), EndOfData(True))
    bench.settle()
    assert bench.port.take()[-2:] == [Watermark(MAX_WATERMARK), EndOfData(True)]
    assert bench.log.count("a finish") == 1
    assert bench.log.count(f"a watermark {MAX_WATERMARK}") == 1


def test_one_stopped_input_keeps_windows_open() -> None:
    bench = recordings(1, 2)
    bench.events(0, Watermark(MAX_WATERMARK), EndOfData(True))
    bench.events(1, EndOfData(False))
    bench.settle()
    assert bench.port.take() == [EndOfData(False)]
    assert "a finish" not in bench.log


# -------------------------------------------------------------------------------------------------------------- slices


def fire_in_slices(bench: Bench, rows: list[Any]) -> list[Any]:
    """Let the first operator fire `rows`, one a slice; what has not fired stays in the list, as a timer would."""
    operator = bench.operators[0]
    assert isinstance(operator, Recording)
    waiting = list(rows)

    def fire(watermark_ms: int) -> Iterator[None]:
        while waiting:
            operator.output.collect(Batch(rows=[waiting.pop(0)]))
            yield

    operator.fire = fire
    return waiting


def test_barrier_gets_in_between_two_firings() -> None:
    bench = recordings(1)
    fire_in_slices(bench, ["t1", "t2", "t3"])
    bench.events(0, Watermark(10), barrier(1))
    bench.rows(0, "after")
    bench.settle()
    assert bench.port.take() == [barrier(1), "t1", "t2", "t3", Watermark(10), "after"]


class Reaching(Recording):
    """Knows at once how far event time has come, and fires later."""

    reached = 0

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        self.reached = watermark_ms
        return super().process_watermark(watermark_ms)

    def snapshot_state(self, checkpoint_id: int) -> None:
        self._note("snapshot", checkpoint_id, "at", self.reached)


def test_barrier_right_behind_a_watermark_finds_it_reached() -> None:
    """What was late in front of the crash must be late behind it: the watermark left the channel in front of the barrier."""
    log: list[str] = []
    bench = Bench([Reaching("a", log)], 1, log=log).started()
    bench.events(0, Watermark(10), barrier(1))
    bench.settle()
    assert [line for line in log if "snapshot" in line] == ["a snapshot 1 at 10"]


def test_input_behind_a_watermark_waits_for_the_last_firing() -> None:
    bench = recordings(1)
    fire_in_slices(bench, ["t1", "t2"])
    bench.events(0, Watermark(10))
    bench.rows(0, "after")
    bench.events(0, Watermark(20), barrier(1))
    bench.settle()
    assert bench.port.take() == ["t1", "t2", Watermark(10), "after", barrier(1), Watermark(20)]


def test_barrier_behind_the_end_of_data_gets_in_between_two_firings() -> None:
    """The last firing of a bounded input may take longer than a checkpoint may: waiting for it, none would complete."""
    bench = recordings(1)
    fire_in_slices(bench, ["t1", "t2"])
    bench.events(0, Watermark(MAX_WATERMARK), EndOfData(True), barrier(1))
    bench.settle()
    assert bench.port.take() == ["t1", barrier(1), "t2", Watermark(MAX_WATERMARK), EndOfData(True)]


def test_the_end_of_one_of_two_inputs_lets_barriers_pass_a_firing() -> None:
    bench = recordings(1, 2)
    fire_in_slices(bench, ["t1", "t2"])
    bench.events(0, Watermark(10), barrier(1))
    bench.events(1, Watermark(10), EndOfData(True), barrier(1))
    bench.settle()
    assert bench.port.take() == ["t1", barrier(1), "t2", Watermark(10)]


def test_draining_barrier_waits_for_the_last_firing() -> None:
    bench = recordings(1)
    fire_in_slices(bench, ["t1", "t2"])
    stop = barrier(1, kind="stop_savepoint", drain=True)
    bench.events(0, Watermark(MAX_WATERMARK), EndOfData(True), stop)
    bench.settle()
    assert bench.port.take() == ["t1", "t2", Watermark(MAX_WATERMARK), EndOfData(True), stop]


def test_rows_of_a_batch_are_in_front_of_its_barrier_whatever_the_slices() -> None:
    bench = recordings(1, clock=ManualClock(tick_s=0.004))
    bench.rows(0, *range(40))
    bench.events(0, barrier(1))
    steps = 0
    while bench.subtask.step(bench.clock.now_ms).progress:
        steps += 1
    assert steps > 5, "the slices were cut by the budget"
    assert bench.port.take() == [*range(40), barrier(1)]


def test_output_that_is_left_lets_a_barrier_in_and_nothing_else() -> None:
    """The operator has the whole batch before the first slice, and another batch waits until all slices are done."""

    class Doubles(Recording):
        def process_batch(self, batch: Batch, input_index: int) -> None:
            self.left = [*getattr(self, "left", []), *batch.rows()]

        def remaining_output(self) -> Iterator[None] | None:
            return self.slices() if self.left else None

        def slices(self) -> Iterator[None]:
            while self.left:
                self.output.collect(Batch(rows=[self.left.pop(0)]))
                yield

    log: list[str] = []
    bench = Bench([Doubles("a", log)], 1, log=log).started()
    bench.rows(0, *range(10))
    bench.events(0, barrier(1), Watermark(5))
    bench.rows(0, 77)
    bench.run()
    taken = bench.port.take()
    assert [each for each in taken if isinstance(each, int)] == [*range(10), 77]
    assert taken.index(barrier(1)) < taken.index(9)
    assert taken.index(9) < taken.index(Watermark(5)) < taken.index(77)


def test_mail_is_served_between_slices() -> None:
    bench = recordings(1, clock=ManualClock(tick_s=0.004))
    bench.rows(0, *range(40))
    bench.subtask.step(bench.clock.now_ms)
    bench.mailbox.put(NotifyCheckpointComplete(1, 3, 0))
    bench.run()
    rows_before = bench.log.index("a complete 3")
    assert 0 < rows_before < len(bench.log) - 1


@pytest.mark.parametrize("forwards", [True, False])
def test_own_watermarks_follow_the_records_of_their_call(forwards: bool) -> None:
    class Assigner(Operator):
        forwards_watermarks = forwards

        def process_batch(self, batch: Batch, input_index: int) -> None:
            self.output.collect(batch)
            self.output.emit_watermark(max(batch.rows()))

    log: list[str] = []
    bench = Bench([Assigner(), Recording("b", log)], 1, log=log).started()
    bench.rows(0, 7)
    bench.events(0, Watermark(3))
    bench.events(0, Watermark(MAX_WATERMARK))
    bench.settle()
    expected: list[Any] = [7, Watermark(7), *([Watermark(3)] if forwards else []), Watermark(MAX_WATERMARK)]
    if forwards:
        expected = [7, Watermark(7), Watermark(MAX_WATERMARK)]  # the gate keeps the last of a run of watermarks
    assert bench.port.take() == expected


class SignalsReader(ListReader):
    """Gives what a list says, one a poll; then it has nothing until it is woken."""

    def __init__(self, polls: list[Poll]) -> None:
        super().__init__([], 1)
        self.polls = polls

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        return self.polls.pop(0) if self.polls else Poll(ready_at_ms=2**62)


def signalling(polls: list[Poll]) -> tuple[Bench, SignalsReader]:
    reader = SignalsReader(polls)
    source_of = ListSource([])
    source_of.create_reader = lambda *_: reader  # type: ignore[method-assign]
    log: list[str] = []
    bench = Bench([SourceOperator(source_of), Recording("a", log)], log=log)
    bench.subtask.start()
    return bench, reader


def test_a_sources_own_watermarks_and_silence_follow_its_rows_in_order() -> None:
    row = Batch(rows=["row"])
    first = Poll(batch=row, watermark_ms=7, idle=True)
    bench, _ = signalling([first, Poll(idle=False), Poll(watermark_ms=9), Poll(watermark_ms=8)])
    bench.run()
    taken = bench.port.take()
    assert taken[1:] == [Watermark(7), WatermarkStatus(True), WatermarkStatus(False), Watermark(9)]
    assert [node.watermark_ms for node in bench.subtask.chain.nodes] == [9, 9]


def test_a_source_that_had_nothing_is_polled_again_when_it_is_woken() -> None:
    bench, reader = signalling([])
    bench.run()
    reader.polls.append(Poll(watermark_ms=3))
    bench.run()
    assert bench.port.take() == []
    bench.subtask.mailbox.put(SourceReady())
    bench.run()
    assert bench.port.take() == [Watermark(3)]


def test_a_failed_subtask_keeps_the_error_itself() -> None:
    bench = recordings(1)
    error = StorageUnavailableError("gone")
    assert bench.subtask.failure is None
    bench.subtask.mailbox.put(FailSubtask(error))
    bench.run()
    assert (bench.subtask.state, bench.subtask.failure) == (TaskState.FAILED, error)
