"""What a subtask tells of the phases of a checkpoint: storage within the asynchronous part, new files, and when it was told."""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import pytest
from msgspec import UNSET

from holdfast.barriers import codec
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    CheckpointKind,
    CheckpointMetrics,
    FinishTasks,
    NotifyCheckpointComplete,
    TriggerCheckpoint,
)
from holdfast.operators.base import Operator
from holdfast.operators.task.snapshots import _StoreTime
from holdfast.operators.task.source_operator import SourceOperator
from holdfast.statebackends.storage.port import ReadFile, WriteFile
from tests.operators.runtime import Bench, DictStorage, ListSource, ManualClock, PendingKeyed, Recording


class SlowStorage(DictStorage):
    """Each operation takes 40 ms of a test's clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def execute(self, operation: Any) -> Any:
        self._clock.now_ms += 40
        return super().execute(operation)


def bench() -> Bench:
    clock, log = ManualClock(10_000), list[str]()
    operators: list[Operator] = [SourceOperator(ListSource([])), Recording("a", log)]
    made = Bench(operators, log=log, clock=clock, storage=SlowStorage(clock)).started()
    made.settle()
    return made


def take(made: Bench, checkpoint_id: int, *, trigger_ms: int = 9_900) -> CheckpointMetrics:
    made.mailbox.put(TriggerCheckpoint(1, checkpoint_id, trigger_ms, CheckpointKind.CHECKPOINT, f"chk-{checkpoint_id}"))
    made.run()
    made.clock.now_ms += 7  # between the synchronous part and the first operation: encoding, or the queue of the pool
    made.settle()
    (ack,) = [item for item in made.answers() if isinstance(item, AcknowledgeCheckpoint) and item.checkpoint_id == checkpoint_id]
    return ack.metrics


def test_the_asynchronous_part_is_told_with_its_time_in_storage() -> None:
    made = bench()
    metrics = take(made, 1)
    written = len(made.storage.log)
    assert written > 1
    assert metrics.start_delay_ms == 100
    assert metrics.store_duration_ms == pytest.approx(40 * written)
    assert metrics.async_duration_ms == pytest.approx(40 * written + 7)
    assert metrics.new_files == 1, "the rest of what it wrote is inline in its handles"


@pytest.mark.parametrize("stalled_s", [0.0, 0.005, 3_600.0])
def test_time_that_state_waited_for_room_is_told_up_to_that_of_the_asynchronous_part(
    monkeypatch: pytest.MonkeyPatch, stalled_s: float
) -> None:
    made = bench()
    monkeypatch.setattr(PendingKeyed, "stalled_s", stalled_s)
    monkeypatch.setattr(PendingKeyed, "__init__", lambda self, backend: setattr(self, "backend", backend))
    metrics = take(made, 1)
    told = pytest.approx(min(stalled_s * 1000, metrics.async_duration_ms)) if stalled_s else UNSET
    assert metrics.stalled_duration_ms == told


def test_when_a_subtask_was_told_is_told_with_its_next_acknowledgement() -> None:
    made = bench()
    assert take(made, 1).notified_checkpoint is UNSET
    made.mailbox.put(NotifyCheckpointComplete(1, 1, 9_900))
    made.run()
    told_ms = made.clock.now_ms
    metrics = take(made, 2)
    assert (metrics.notified_checkpoint, metrics.notified_after_ms) == (1, told_ms - 9_900)


@pytest.mark.parametrize("notice", [NotifyCheckpointComplete(1, 1, 0), FinishTasks(1, 1)])
def test_a_notice_without_its_trigger_s_time_tells_nothing(notice: NotifyCheckpointComplete | FinishTasks) -> None:
    """A worker that reconnects has it from its registration, which names the id alone."""
    made = bench()
    take(made, 1)
    made.mailbox.put(notice)
    made.run()
    assert made.snapshots._notified is None


def test_acknowledgements_of_older_workers_are_understood_and_those_of_newer_ones_by_older_coordinators() -> None:
    old = b'{"alignment_duration_ms":0,"start_delay_ms":1,"sync_duration_ms":2,"async_duration_ms":3}'
    metrics = codec.decode(old, CheckpointMetrics)
    assert (metrics.store_duration_ms, metrics.new_files, metrics.notified_checkpoint) == (UNSET, UNSET, UNSET)
    assert metrics.stalled_duration_ms is UNSET
    assert b"store_duration_ms" not in codec.encode(metrics)
    assert b"stalled" not in codec.encode(metrics)
    later = codec.decode(old[:-1] + b',"a_number_of_a_later_version":4}', CheckpointMetrics)
    assert later == metrics, "a coordinator passes over what it does not know"


# ------------------------------------------------------------------------------------------------- the measured flow


def three() -> Generator[Any, Any, str]:
    assert (yield WriteFile("a", [])) == "one"
    try:
        yield WriteFile("b", [])
    except OSError:
        yield ReadFile("c")
    return "done"


def test_a_measured_flow_is_the_same_flow() -> None:
    clock, store = ManualClock(0), _StoreTime()
    flow = store.measure(three(), clock)
    assert next(flow) == WriteFile("a", [])
    clock.now_ms += 30
    assert flow.send("one") == WriteFile("b", [])
    clock.now_ms += 20
    assert flow.throw(OSError("full")) == ReadFile("c")
    clock.now_ms += 10
    with pytest.raises(StopIteration) as ended:
        flow.send(b"")
    assert ended.value.value == "done"
    assert store.seconds == pytest.approx(0.060)


def test_the_error_of_a_measured_flow_is_its_own() -> None:
    flow = _StoreTime().measure(three(), ManualClock(0))
    next(flow)
    with pytest.raises(AssertionError):
        flow.send("two")


def test_closing_a_measured_flow_closes_the_flow() -> None:
    closed: list[str] = []

    def held() -> Generator[Any, Any, None]:
        try:
            yield WriteFile("a", [])
        finally:
            closed.append("closed")

    flow = _StoreTime().measure(held(), ManualClock(0))
    next(flow)
    flow.close()
    assert closed == ["closed"]
    unbegun = _StoreTime().measure(held(), ManualClock(0))
    unbegun.close()
    del unbegun
    gc.collect()
    assert closed == ["closed"], "one that never began holds nothing"
