"""What a function emits of its state stays as it was, and the state as it is, whoever changes either of them later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast as hf

ROWS = {"key": str, "value": int}
SEEN = {"key": str, "values": list[int]}


@dataclass
class Total:
    key: str
    total: int


TOTAL: hf.ValueStateDescriptor[Any] = hf.ValueStateDescriptor("total", Total)
LAST: hf.ValueStateDescriptor[Any] = hf.ValueStateDescriptor("last", dict[str, int])
LIMITS: hf.MapStateDescriptor[str, Any] = hf.MapStateDescriptor("limits", str, dict[str, int])
SIDE = hf.OutputTag("side", Total)


def added(value: Any, ctx: Any) -> Total:
    """The total of the key, changed in place."""
    total = ctx.state(TOTAL).value() or Total(ctx.key, 0)
    total.total += value["value"]
    ctx.state(TOTAL).update(total)
    return total


class Totals(hf.ProcessFunction):
    states = (TOTAL,)
    side_outputs = (SIDE,)
    returns = Total

    def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        total = added(value, ctx)
        ctx.output(SIDE, total)
        out(total)
        for moment in (100, 200):
            ctx.timers.register_event_time_timer(moment)

    def on_timer(self, timestamp_ms: int, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        out(added({"value": 1_000}, ctx))


class Undeclared(hf.ProcessFunction):
    states = (LAST,)

    def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        last = ctx.state(LAST).value() or {"total": 0}
        last["total"] += value["value"]
        ctx.state(LAST).update(last)
        out(last)
        out(value["value"])


class CoTotals(hf.KeyedCoProcessFunction):
    states = (TOTAL,)
    returns = Total

    def process_element1(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        out(added(value, ctx))

    process_element2 = process_element1


class Limited(hf.KeyedBroadcastProcessFunction):
    returns = {"value": int}  # noqa: RUF012 - the contract's class attribute

    def process_element(self, value: Any, ctx: Any, out: hf.Collector) -> None: ...

    def process_broadcast_element(self, value: Any, ctx: Any, out: hf.Collector) -> None:
        limits = ctx.broadcast_state(LIMITS)
        limit = limits.get("all") or {"value": 0}
        limit["value"] += value["value"]
        limits.put("all", limit)
        out(limit)


class Appended:
    def create_accumulator(self) -> list[int]:
        return []

    def add(self, value: int, accumulator: list[int]) -> list[int]:
        accumulator.append(value)
        return accumulator

    def get_result(self, accumulator: list[int]) -> list[int]:
        return accumulator

    def merge(self, left: list[int], right: list[int]) -> list[int]:
        return left + right


class Values(hf.ProcessFunction):
    seen = hf.AggregatingStateDescriptor("seen", list[int], Appended())
    states = (seen,)
    returns = SEEN

    def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
        ctx.state(self.seen).add(value["value"])
        out({"key": ctx.key, "values": ctx.state(self.seen).get()})


class Firings(hf.ProcessWindowFunction):
    states = (TOTAL,)
    returns = Total

    def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        out(added({"value": len(elements)}, ctx))


@pytest.fixture(params=[1, 65_536])
def job(request: pytest.FixtureRequest) -> Iterator[hf.testing.Job]:
    """Results depend on where batches end if rows of one batch are one object."""
    with hf.testing.Job(batch_rows=request.param) as job:
        yield job


def fed(job: hf.testing.Job, make: Any, *outputs: Any) -> list[list[Any]]:
    """What comes out of `make(rows)`, and of its side outputs, for the values 1, 2 and 3 of one key."""
    feed = job.input("rows", ROWS)
    made = make(feed.stream).uid("function")
    outs = [job.output(made), *(job.output(made.side_output(tag), "side-out") for tag in outputs)]
    job.start()
    feed.add([{"key": "a", "value": value} for value in (1, 2, 3)], at=[1, 2, 3])
    feed.end()
    return [out.rows() for out in outs]


def test_a_value_that_is_emitted_and_changed_at_the_next_call(job: hf.testing.Job) -> None:
    totals, side = fed(job, lambda rows: rows.key_by("key").process(Totals()), SIDE)
    assert [row.total for row in totals] == [1, 3, 6, 1_006, 2_006]
    assert [row.total for row in side] == [1, 3, 6]


def test_rows_without_declared_columns(job: hf.testing.Job) -> None:
    (found,) = fed(job, lambda rows: rows.key_by("key").process(Undeclared()))
    assert found == [{"total": 1}, 1, {"total": 3}, 2, {"total": 6}, 3]


def test_two_inputs(job: hf.testing.Job) -> None:
    (found,) = fed(job, lambda rows: rows.connect(rows.filter(lambda row: False)).key_by("key", "key").process(CoTotals()))
    assert [row.total for row in found] == [1, 3, 6]


def test_broadcast_state(job: hf.testing.Job) -> None:
    (found,) = fed(job, lambda rows: rows.key_by("key").connect(rows.broadcast(LIMITS)).process(Limited()))
    assert found == [{"value": 1}, {"value": 3}, {"value": 6}]


def test_a_result_that_is_the_accumulator(job: hf.testing.Job) -> None:
    (found,) = fed(job, lambda rows: rows.key_by("key").process(Values()))
    assert [row["values"] for row in found] == [[1], [1, 2], [1, 2, 3]]


def test_state_of_a_window_function(job: hf.testing.Job) -> None:
    (found,) = fed(job, lambda rows: rows.key_by("key").window(hf.Tumbling(1)).process(Firings()))
    assert [row.total for row in found] == [1, 2, 3]


def test_who_changes_a_row_does_not_change_the_state_that_it_was_emitted_from(job: hf.testing.Job) -> None:
    def doubled(row: Total) -> Total:
        row.total *= 2
        return row

    (found,) = fed(job, lambda rows: rows.key_by("key").process(Totals()).uid("totals").map(doubled, returns=Total))
    assert [row.total for row in found] == [2, 6, 12, 2_012, 4_012]


def test_a_row_that_does_not_fit_names_its_column_though_it_can_not_be_copied(job: hf.testing.Job) -> None:
    class Generated(Values):
        def process_element(self, value: Any, ctx: hf.ProcessContext, out: hf.Collector) -> None:
            out({"key": ctx.key, "values": (each for each in [1])})

    with pytest.raises(hf.SchemaMismatchError, match="'values'"):
        fed(job, lambda rows: rows.key_by("key").process(Generated()))
