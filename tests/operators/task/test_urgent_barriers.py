"""Barriers that overtake, at one subtask: what is in hand, half-fired timers, full outputs; when it acknowledges, and what it gives
up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from msgspec import UNSET

from holdfast.barriers.alignment.inflight import ELEMENT_BYTES, decode
from holdfast.barriers.elements import Batch, CancelMarker, CheckpointBarrier, Element, Watermark, WatermarkStatus
from holdfast.barriers.messages import AcknowledgeCheckpoint, DeclineCheckpoint, FailureReason, NotifyCheckpointAborted
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.handles import FileHandle, InlineHandle
from holdfast.statebackends.storage.port import Operation, WriteFile
from tests.operators.ports import DictStorage
from tests.operators.runtime import Bench, Recording

SCHEMA = pa.schema([pa.field("n", pa.int64())])


def barrier(checkpoint_id: int, timeout_ms: int | None = 0, **fields: Any) -> CheckpointBarrier:
    folder = f"chk-{checkpoint_id}"
    return CheckpointBarrier(checkpoint_id, 0, folder=folder, unaligned=True, aligned_timeout_ms=timeout_ms, **fields)


def batch(*numbers: int) -> Batch:
    return Batch(columns=pa.RecordBatch.from_pylist([{"n": number} for number in numbers], SCHEMA))


class RefusingStorage(DictStorage):
    """Takes no file of in-flight data."""

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, WriteFile) and "inflight" in operation.path:
            raise StorageUnavailableError("no")
        return super().execute(operation)


def bench_of(channels: int = 1, *, units_max: int = 256, **fields: Any) -> Bench:
    log: list[str] = []
    bench = Bench([Recording("a", log)], channels, log=log, **fields).started()
    bench.subtask._units_max = units_max
    return bench


def offer(bench: Bench, channel: int, *elements: Element) -> None:
    for element in elements:
        bench.gate.offer(channel, element, element.size if isinstance(element, Batch) else 0)


def serve(bench: Bench) -> bool:
    return bench.subtask.serve_urgent(bench.clock.now_ms)


def stored(bench: Bench, checkpoint_id: int) -> dict[tuple[str, int], list[Any]]:
    """(side, peer) -> numbers and events of the only acknowledgement, as they are in the store."""
    (ack,) = [each for each in bench.answers() if isinstance(each, AcknowledgeCheckpoint)]
    assert ack.checkpoint_id == checkpoint_id
    found: dict[tuple[str, int], list[Any]] = {}
    for channel in ack.in_flight:
        assert (channel.source, channel.target, channel.subtask) == ("up", "op0", 0)
        part = channel.part
        if isinstance(part, FileHandle):
            data = bench.storage.files[f"chk-{checkpoint_id}/{part.path}"][part.offset : part.offset + part.length]
        else:
            assert isinstance(part, InlineHandle)
            data = part.data
        for piece in channel.pieces:
            for element in decode(data[piece.offset : piece.offset + piece.length], rows=piece.rows):
                into = found.setdefault((channel.side, piece.peer), [])
                into += [row["n"] for row in element.rows()] if isinstance(element, Batch) else [element]
    return found


def numbers(bench: Bench) -> list[Any]:
    return [each["n"] if isinstance(each, dict) else each for each in bench.port.take()]


def test_the_rest_of_the_batch_in_hand_is_in_flight_in_front_of_what_is_queued() -> None:
    bench = bench_of(2, rows_max=2, units_max=1)
    offer(bench, 0, batch(1, 2, 3, 4, 5))
    offer(bench, 1, batch(10))
    bench.subtask.step(0)
    offer(bench, 0, batch(6), Watermark(7), barrier(1), batch(8))
    assert not serve(bench)
    offer(bench, 1, batch(11), barrier(1), batch(12))
    serve(bench)
    processed = [line for line in bench.log if "process" in line]
    bench.settle()
    assert len(processed) == 1, "nothing was processed before the snapshot"
    assert stored(bench, 1) == {("input", 0): [2, 3, 4, 5, 6, Watermark(7)], ("input", 1): [10, 11]} or stored(bench, 1) == {
        ("input", 0): [3, 4, 5, 6, Watermark(7)],
        ("input", 1): [10, 11],
    }
    rows = [each for each in numbers(bench) if isinstance(each, int)]
    assert sorted(rows) == [1, 2, 3, 4, 5, 6, 8, 10, 11, 12]
    (told,) = [each for each in bench.reports if isinstance(each, AcknowledgeCheckpoint)]
    lengths = [piece.length for channel in told.in_flight for piece in channel.pieces]
    assert (told.metrics.unaligned, told.metrics.bytes_persisted_during_alignment) == (True, sum(lengths))
    states = told.states.values()
    assert told.metrics.checkpointed_size == sum(each.new_size for each in states) + sum(lengths), "all that was written"
    assert told.metrics.state_size == sum(each.size for each in states) + sum(lengths)


def test_timers_that_a_barrier_interrupts_go_on_and_their_watermark_leaves_behind_them() -> None:
    bench = bench_of(1, units_max=1)

    def fire(watermark_ms: int) -> Iterator[None]:
        for number in (100, 101, 102):
            bench.operators[0].output.collect(batch(number))
            yield

    recording = bench.operators[0]
    assert isinstance(recording, Recording)
    recording.fire = fire
    offer(bench, 0, Watermark(5), batch(1))
    for _ in range(3):
        bench.subtask.step(0)
    before = numbers(bench)
    assert before[-1:] in ([100], [101])
    offer(bench, 0, barrier(1))
    serve(bench)
    assert [type(each) for each in bench.port.take()] == [CheckpointBarrier]
    bench.settle()
    rest = numbers(bench)
    assert rest[-2:] == [Watermark(5), 1]
    assert [*before, *rest[:-2]] == [100, 101, 102]
    assert stored(bench, 1) == {("input", 0): [1]}


def test_however_many_barriers_come_timers_fire_alarms_do_and_the_watermark_leaves() -> None:
    """FLINK-20217, 40101, 39898: long timers held barriers up; barriers held the watermark up, and alarms starved."""
    bench = bench_of(1, units_max=1)
    fired: list[int] = []

    def fire(watermark_ms: int) -> Iterator[None]:
        for number in range(30):
            fired.append(number)
            yield

    recording = bench.operators[0]
    assert isinstance(recording, Recording)
    recording.fire = fire
    offer(bench, 0, Watermark(5), batch(1))
    bench.subtask.step(0)
    for number in range(1, 41):
        before = len(fired)
        offer(bench, 0, barrier(number))
        serve(bench)
        assert [each.checkpoint_id for each in bench.port.take() if isinstance(each, CheckpointBarrier)] == [number], "at once"
        assert len(fired) == before
        bench.subtask.step(0)
        if Watermark(5) in bench.port.elements:
            break
    assert (fired, bench.port.take()[-1]) == (list(range(30)), Watermark(5)), "a slice between two of them"
    bench.settle()
    assert len({each.checkpoint_id for each in bench.answers() if isinstance(each, AcknowledgeCheckpoint)}) == number


def test_a_full_output_holds_no_barrier_up() -> None:
    bench = bench_of(1)
    bench.port.is_available = False
    offer(bench, 0, batch(1), barrier(1))
    bench.run()
    assert bench.port.take() == []
    serve(bench)
    assert [each.checkpoint_id for each in bench.port.take()] == [1]
    bench.settle()
    assert stored(bench, 1) == {("input", 0): [1]}


def test_barriers_of_two_checkpoints_leave_a_turn_to_others() -> None:
    bench = bench_of(2)
    offer(bench, 0, barrier(1), barrier(2))
    assert serve(bench), "the second one waits"
    assert [each.checkpoint_id for each in bench.port.take()] == [1]
    assert serve(bench)
    assert bench.port.take() == []
    bench.subtask.step(0)
    bench.port.take()
    assert not serve(bench)
    offer(bench, 1, barrier(2))
    serve(bench)
    bench.settle()
    assert [type(each) for each in bench.answers()] == [DeclineCheckpoint, AcknowledgeCheckpoint]
    declined = bench.answers()[0]
    assert isinstance(declined, DeclineCheckpoint)
    assert (declined.checkpoint_id, declined.reason) == (1, FailureReason.SUBSUMED)


def test_it_acknowledges_once_the_state_the_last_barrier_and_the_outputs_are_through() -> None:
    bench = bench_of(2)
    bench.port.queued = {1}
    bench.port.overtook = ((0, (batch(7, 8),)),)
    offer(bench, 0, batch(1), barrier(1))
    serve(bench)
    bench.settle()
    assert bench.answers() == []
    offer(bench, 1, batch(2), barrier(1))
    serve(bench)
    bench.settle()
    assert bench.answers() == []
    bench.port.queued = set()
    bench.subtask.outputs_moved()
    assert bench.answers() == []
    bench.settle()
    assert stored(bench, 1) == {("input", 0): [1], ("input", 1): [2], ("output", 0): [7, 8]}


def test_an_aligned_snapshot_in_time_holds_nothing_of_the_input() -> None:
    bench = bench_of(1)
    offer(bench, 0, batch(1), barrier(1, timeout_ms=50_000))
    serve(bench)
    bench.settle()
    assert stored(bench, 1) == {}
    (told,) = [each for each in bench.reports if isinstance(each, AcknowledgeCheckpoint)]
    assert (told.metrics.unaligned, told.metrics.bytes_persisted_during_alignment) == (UNSET, UNSET)


@pytest.mark.parametrize("when", ["collecting", "writing"])
def test_an_abort_forgets_what_was_collected_and_the_next_checkpoint_is_clean(when: str) -> None:
    bench = bench_of(2)
    offer(bench, 0, batch(1), barrier(1))
    serve(bench)
    if when == "writing":
        offer(bench, 1, barrier(1))
        serve(bench)
    files = len(bench.storage.files)
    bench.mailbox.put(NotifyCheckpointAborted(1, 1))
    bench.settle()
    assert bench.answers() == []
    assert len(bench.storage.files) == files
    offer(bench, 0, batch(3), barrier(2))
    serve(bench)
    offer(bench, 1, *([barrier(1)] if when == "collecting" else []), batch(4), barrier(2))
    while serve(bench):
        bench.subtask.step(0)
    bench.settle()
    assert stored(bench, 2) == {("input", 0): [3], ("input", 1): [4]}


class LongHook(Recording):
    """Its hook ends when the test says so."""

    has_ended = False

    def is_preparing(self) -> bool:
        return not self.has_ended


def hooked() -> tuple[Bench, LongHook]:
    log: list[str] = []
    hook = LongHook("a", log)
    return Bench([hook], 2, log=log).started(), hook


def test_what_comes_while_a_hook_runs_is_in_flight_and_nothing_is_processed() -> None:
    bench, hook = hooked()
    offer(bench, 0, batch(1), barrier(1))
    serve(bench)
    offer(bench, 1, batch(2), barrier(1), batch(3))
    serve(bench)
    bench.settle()
    assert (bench.answers(), numbers(bench)) == ([], []), "the barrier waits for the hook, and input for the barrier"
    hook.has_ended = True
    bench.settle()
    assert stored(bench, 1) == {("input", 0): [1], ("input", 1): [2]}
    assert bench.log.index("a snapshot 1") < bench.log.index("a process {'n': 1}")


@pytest.mark.parametrize("why", ["newer barrier", "notice"])
def test_a_checkpoint_that_is_given_up_while_its_hook_runs_is_answered_once(why: str) -> None:
    bench, hook = hooked()
    offer(bench, 0, batch(1), barrier(1))
    serve(bench)
    if why == "notice":
        bench.mailbox.put(NotifyCheckpointAborted(1, 1))
    else:
        offer(bench, 1, barrier(2))
    while serve(bench):
        bench.subtask.step(0)
    hook.has_ended = True
    bench.settle()
    declined = [] if why == "notice" else [1]
    assert [each.checkpoint_id for each in bench.answers()] == declined
    assert "a snapshot 1" not in bench.log
    sent = [each for each in bench.port.take() if isinstance(each, CancelMarker | CheckpointBarrier)]
    assert CancelMarker(1) in sent
    assert 1 not in [each.checkpoint_id for each in sent if isinstance(each, CheckpointBarrier)]


def test_an_abort_behind_the_acknowledgement_leaves_the_next_checkpoint_clean() -> None:
    bench = bench_of(2)
    offer(bench, 0, batch(1), barrier(1))
    offer(bench, 1, barrier(1))
    serve(bench)
    bench.settle()
    assert stored(bench, 1) == {("input", 0): [1]}
    bench.reports.clear()
    bench.mailbox.put(NotifyCheckpointAborted(1, 1))
    bench.settle()
    assert bench.answers() == []
    offer(bench, 0, barrier(2))
    offer(bench, 1, batch(2), barrier(2))
    serve(bench)
    bench.settle()
    assert stored(bench, 2) == {("input", 1): [2]}


def test_more_in_flight_than_allowed_is_declined_with_subtask_and_bytes() -> None:
    bench = bench_of(2, inflight_bytes_max=600)
    offer(bench, 0, batch(*range(10)), barrier(1))
    serve(bench)
    bench.subtask.outputs_moved()
    assert bench.answers() == []
    offer(bench, 1, batch(*range(10)))
    bench.subtask.outputs_moved()
    bench.settle()
    (declined,) = bench.answers()
    assert isinstance(declined, DeclineCheckpoint)
    assert declined.reason is FailureReason.IN_FLIGHT_LIMIT
    assert declined.message == "672 bytes are in flight at subtask 0, of 600 that may be"
    assert CancelMarker(1) in bench.port.take()
    offer(bench, 1, barrier(1))
    offer(bench, 0, barrier(2))
    serve(bench)
    offer(bench, 1, barrier(2))
    serve(bench)
    bench.settle()
    assert [each.checkpoint_id for each in bench.answers() if isinstance(each, AcknowledgeCheckpoint)] == [2]


def test_events_and_the_heads_of_small_batches_count_for_what_may_be_in_flight() -> None:
    """A producer whose barrier doesn't come sends statuses without end, and batches of a few bytes: they are read at once, so that
    neither the queue nor the credit bounds them."""
    for element in (WatermarkStatus(idle=True), batch(1)):
        bench = bench_of(2, inflight_bytes_max=100 * ELEMENT_BYTES)
        offer(bench, 0, barrier(1))
        serve(bench)
        for _ in range(101):
            offer(bench, 1, element)
            bench.settle()
            bench.subtask.outputs_moved()
        bench.settle()
        (declined,) = bench.answers()
        assert isinstance(declined, DeclineCheckpoint)
        assert declined.reason is FailureReason.IN_FLIGHT_LIMIT
        assert bench.gate.in_flight_bytes == 0


def test_in_flight_data_that_can_not_be_written_declines_once() -> None:
    bench = bench_of(2, storage=RefusingStorage())
    offer(bench, 0, batch(*range(100)), barrier(1))
    serve(bench)
    bench.settle()
    offer(bench, 1, barrier(1))
    serve(bench)
    bench.settle()
    (declined,) = bench.answers()
    assert isinstance(declined, DeclineCheckpoint)
    assert (declined.reason, declined.message) == (FailureReason.ASYNC_EXCEPTION, "StorageUnavailableError: no")
    assert all(keyed.frozen == 0 for keyed in bench.keyed)


class FullStorage(DictStorage):
    """Takes no file at all."""

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, WriteFile):
            raise StorageUnavailableError("no")
        return super().execute(operation)


def test_a_barrier_of_a_declined_checkpoint_does_not_overtake_in_the_outputs_any_more() -> None:
    """State could not be written while the barrier still waits for its age in an output queue."""
    bench = bench_of(1, storage=FullStorage())
    bench.port.queued.add(1)
    offer(bench, 0, batch(1), barrier(1, 1_000))
    bench.run()
    bench.settle()
    (declined,) = bench.answers()
    assert isinstance(declined, DeclineCheckpoint)
    assert bench.port.forgotten == [1]
