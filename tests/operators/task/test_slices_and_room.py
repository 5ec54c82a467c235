"""Slices and what bounds them: rows that their output has room for; and credit, which goes back as their rows are processed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from holdfast.barriers.elements import Batch, Watermark
from holdfast.barriers.exchange.credits import CreditAnnouncement, ReceiverCredit
from holdfast.barriers.exchange.debloat import ChannelBudget, DebloatSettings
from holdfast.operators.base import Operator
from holdfast.operators.task.input import OutputRoom
from tests.operators.runtime import Bench, ManualClock, Port


@dataclass
class Output(Port):
    """An output with a mark: what it got waits in front of it."""

    mark_bytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.waiting_bytes = 0
        self.sizes: list[int] = []

    @property
    def room_bytes(self) -> int:
        return max(0, self.mark_bytes - self.waiting_bytes)

    def emit(self, batch: Batch) -> None:
        super().emit(batch)
        self.waiting_bytes += batch.size
        self.sizes.append(batch.num_rows)


class Triples(Operator):
    """Three rows for each row, and a thousand for each watermark."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self.output.collect(Batch(rows=[row for row in batch.rows() for _ in range(3)]))

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        self.output.collect(Batch(rows=["fired"] * 1_000))
        yield


def slices_of(operator: Operator, mark_bytes: int, rows: int = 10_000) -> list[int]:
    """Rows out of each slice, while the output empties whenever it is full."""
    port = Output(mark_bytes)
    bench = Bench([operator], 1, port=port).started()
    bench.rows(0, *range(rows))
    for _ in range(1_000):
        bench.run()
        if not port.waiting_bytes:
            break
        port.waiting_bytes = 0
    assert len(port.elements) == 3 * rows, "all of it, however little room there is"
    return port.sizes


def test_a_slice_has_no_more_rows_than_its_output_has_room_for() -> None:
    sizes = slices_of(Triples(), 64 * 300)
    assert sizes[0] == 3, "of the first one nothing is known"
    assert max(sizes) == 300
    assert sum(size == 300 for size in sizes) > 80, "and no fewer, either"


def test_a_slice_has_at_least_one_row_whatever_the_room() -> None:
    assert set(slices_of(Triples(), 1, rows=50)) == {3}


def test_what_a_firing_puts_out_makes_slices_no_smaller() -> None:
    port = Output(64 * 300)
    bench = Bench([Triples()], 1, port=port).started()
    bench.rows(0, *range(100))
    for index in range(20):
        bench.run()
        port.waiting_bytes = 0
        bench.events(0, Watermark(index))
        bench.run()
        port.waiting_bytes = 0
        port.sizes.clear()
        bench.rows(0, *range(100))
    bench.run()
    assert port.sizes[:1] == [300]


def test_of_several_outputs_the_one_with_the_least_room_counts() -> None:
    outputs = [Output(10_000), Output(1_000), Output(0)]
    room = OutputRoom(outputs)
    assert not room.look(), "one has none"
    outputs[2].mark_bytes = 50
    assert room.look()
    assert room.rows(7) == 7
    outputs[0].dealt_bytes_max += 400
    outputs[1].dealt_bytes_max += 100
    room.measured(10)
    assert room.rows(1_000) == 100
    outputs[0].mark_bytes = 2_000
    assert room.look()
    assert room.rows(1_000) == 50
    assert room.rows(3) == 3


def test_credit_goes_back_with_each_slice() -> None:
    credit = ReceiverCredit(allocated_bytes=6_400, allocated_batches=4)
    bench = Bench([Triples()], 1, clock=ManualClock(tick_s=0.004), credits=(credit,)).started()
    bench.gate.take_announcements()
    bench.rows(0, *range(100))
    held = []
    while bench.subtask.step(bench.clock.now_ms).progress:
        held.append((credit.bytes_held, 64 * (100 - len(bench.port.elements) // 3)))
    assert len(held) > 5, "the slices were cut by the budget"
    assert all(bytes_held == unread for bytes_held, unread in held)
    assert bench.gate.take_announcements() == [(0, CreditAnnouncement(6_400, 4, 6_400, 1))]


@pytest.mark.parametrize(("row_s", "allocated"), [(0.01, 4_096), (0.001, 6_400), (0.0001, 64_000)])
def test_what_a_channel_may_have_in_flight_follows_the_cost_of_its_rows(row_s: float, allocated: int) -> None:
    """A consumer that takes so long for a row of 64 bytes gets what it does in 100 ms, however it cuts its slices."""
    clock = ManualClock()

    class Slow(Operator):
        def process_batch(self, batch: Batch, input_index: int) -> None:
            clock._extra_s += row_s * batch.num_rows

    settings = DebloatSettings(target_s=0.2, period_s=0.2, start_bytes=65_536, max_bytes=2**22)
    credit = ReceiverCredit(allocated_bytes=1, allocated_batches=1_000, budget=ChannelBudget(settings))
    bench = Bench([Slow()], 1, clock=clock, credits=(credit,)).started()
    bench.gate.take_announcements()
    began_s = clock.seconds()
    while clock.seconds() < began_s + 3:
        while credit.bytes_held_max - credit.bytes_held >= 640:
            bench.rows(0, *range(10))
        bench.subtask.step(clock.now_ms)
        bench.gate.take_announcements()
    assert credit.allocated_bytes == pytest.approx(allocated, rel=0.25)
    assert credit.time_to_consume_ms == pytest.approx(1_000 * row_s * credit.bytes_held / 64, rel=0.1, abs=1)
