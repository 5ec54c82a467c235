"""Which subtasks the loop steps: one that it leaves out has nothing to do, whatever happened to it, and one in the midst of work is
due at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.barriers.elements import Batch, CheckpointBarrier, EndOfData, EndOfPartition, Watermark
from holdfast.barriers.messages import (
    CheckpointKind,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    TaskState,
    TriggerCheckpoint,
)
from holdfast.operators.base import Poll
from holdfast.operators.task.context import CancelSubtask
from holdfast.operators.task.source_operator import SourceOperator
from holdfast.operators.worker.deploy import DeployedSubtask
from holdfast.operators.worker.loop import _is_due
from tests.operators.runtime import Bench, ListReader, ListSource, ManualClock, Recording

ROWS = 40
CHANNELS = 2


class PausingReader(ListReader):
    """Has a batch every 20 ms."""

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        found = super().poll(rows_max, now_ms)
        return found if found.finished else Poll(batch=found.batch, ready_at_ms=now_ms + 20)


class PausingSource(ListSource):
    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> ListReader:
        return PausingReader(self.rows, self.rows_per_poll)


def make_bench(*, is_source: bool, tick_s: float, pauses: bool = True) -> Bench:
    log: list[str] = []
    last = Recording("b", log)

    def fire(watermark_ms: int) -> Iterator[None]:
        for number in range(4):
            last.output.collect(Batch(rows=[number]))
            yield

    last.fire = fire
    source = (PausingSource if pauses else ListSource)(list(range(ROWS)), rows_per_poll=3)
    head = SourceOperator(source) if is_source else Recording("a", log)
    bench = Bench([head, last], 0 if is_source else CHANNELS, log=log, clock=ManualClock(tick_s=tick_s), rows_max=4)
    bench.subtask.start()
    return bench


def is_due(bench: Bench) -> bool:
    each = SimpleNamespace(subtask=bench.subtask, gate=bench.gate if bench.channels else None)
    return _is_due(cast("DeployedSubtask", each), bench.clock.now_ms)


def done_so_far(bench: Bench) -> Any:
    return len(bench.log), len(bench.port.elements), len(bench.reports), bench.subtask.state, bench.subtask.is_disposed


class Events:
    """What may happen to a subtask between two rounds of its worker."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.checkpoint_id = 0
        self.barriers = [0] * CHANNELS
        self.ended: set[int] = set()

    def happen(self, what: int, where: int) -> None:
        bench, here = self.bench, where % CHANNELS
        both: tuple[Callable[[], Any], ...] = (
            lambda: setattr(bench.clock, "now_ms", bench.clock.now_ms + 1 + 7 * where),
            lambda: setattr(bench.port, "is_available", not bench.port.is_available),
            lambda: bench.pool.step() if bench.pool.waiting else None,
            lambda: bench.mailbox.put(NotifyCheckpointComplete(1, self.checkpoint_id, 0)),
            lambda: bench.mailbox.put(NotifyCheckpointAborted(1, self.checkpoint_id)),
            lambda: bench.mailbox.put(FinishTasks(1, self.checkpoint_id)) if where == 5 else None,
            lambda: bench.mailbox.put(CancelSubtask()) if where == 5 else None,
        )
        own = (
            (self._trigger,)
            if bench.subtask.is_source
            else (
                lambda: self._offer(here, Batch(rows=list(range(1 + where)))),
                lambda: self._offer(here, Watermark(bench.clock.now_ms)),
                lambda: self._barrier(here),
                lambda: self._end(here) if where > 3 else None,
            )
        )
        events = (*both, *own)
        events[what % len(events)]()

    def _trigger(self) -> None:
        self.checkpoint_id += 1
        folder = f"chk-{self.checkpoint_id}"
        self.bench.mailbox.put(TriggerCheckpoint(1, self.checkpoint_id, 0, CheckpointKind.CHECKPOINT, folder))

    def _offer(self, channel: int, element: Any) -> None:
        if channel not in self.ended and self.bench.gate.queued_bytes < 64 * 100:
            self.bench.gate.offer(channel, element, 64 * element.num_rows if isinstance(element, Batch) else 0)

    def _barrier(self, channel: int) -> None:
        if channel not in self.ended:
            self.barriers[channel] += 1
            self.checkpoint_id = max(self.barriers)
            self._offer(channel, CheckpointBarrier(self.barriers[channel], 0, folder=f"chk-{self.barriers[channel]}"))

    def _end(self, channel: int) -> None:
        self._offer(channel, EndOfData(drain=True))
        self._offer(channel, EndOfPartition())
        self.ended.add(channel)


@given(
    is_source=st.booleans(),
    tick_s=st.sampled_from([0.0, 0.001, 0.004]),
    events=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5), st.integers(0, 2)), max_size=60),
)
def test_what_is_not_due_has_nothing_to_do(*, is_source: bool, tick_s: float, events: list[tuple[int, int, int]]) -> None:
    bench = make_bench(is_source=is_source, tick_s=tick_s)
    world = Events(bench)
    for what, where, steps in [*events, (0, 0, 2)]:
        world.happen(what, where)
        for _ in range(steps):
            if is_due(bench):
                bench.subtask.step(bench.clock.now_ms)
                continue
            last = bench.subtask.last_step
            before = done_so_far(bench)
            if not bench.subtask.is_disposed:
                assert not bench.subtask.step(bench.clock.now_ms).progress, f"left out, though it had work: {last}"
            assert done_so_far(bench) == before
            bench.subtask.last_step = last


@given(is_source=st.booleans(), tick_s=st.sampled_from([0.0, 0.001, 0.006]))
@example(is_source=False, tick_s=0.006)
def test_work_in_hand_is_gone_on_with_at_once(*, is_source: bool, tick_s: float) -> None:
    """No time passes and nothing else happens: whoever stops in the midst of work must be due by itself."""
    bench = make_bench(is_source=is_source, tick_s=tick_s, pauses=False)
    if not is_source:
        for channel in range(CHANNELS):
            bench.rows(channel, *range(ROWS))
            bench.events(channel, Watermark(5), EndOfData(drain=True))
    rounds = 0
    while is_due(bench) and rounds < 1_000:
        bench.subtask.step(bench.clock.now_ms)
        rounds += 1
    assert bench.subtask.state is TaskState.RUNNING
    assert bench.subtask.is_drained
    assert rounds < 1_000, "it spins"
