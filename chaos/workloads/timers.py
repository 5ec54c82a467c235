"""Event-time timers that sort records: each record waits for its time, and a forgotten timer is a lost record."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import in_segments, read_before
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    Drained,
    Emitted,
    Positions,
    Possibly,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.chaos.workloads.windows import Feeds, Paces, draw_skewed_feeds, timed_streams, watermark_bound
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.task.timers import EVENT_TIMERS
from holdfast.statebackends.state import MapStateDescriptor, ValueStateDescriptor

PATH = "/out/timers"


class Reorder(ProcessFunction):
    """The records of each key in the order of event time, numbered, with a running total."""

    waiting = MapStateDescriptor("waiting", int, list[int])
    """Event time -> i and value of its records, in turn, sorted by `i`: the order of arrival is undefined."""
    seq = ValueStateDescriptor("seq", int)
    total = ValueStateDescriptor("total", int)
    states = (waiting, seq, total)
    returns = {"key": int, "seq": int, "at": int, "i": int, "total": int}  # noqa: RUF012 - the contract's class attribute

    def process_element(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        waiting = ctx.state(self.waiting)
        held = waiting.get(row["at"]) or []
        pairs = sorted([*zip(held[::2], held[1::2], strict=True), (row["i"], row["value"])])
        waiting.put(row["at"], [number for pair in pairs for number in pair])
        ctx.timers.register_event_time_timer(row["at"])

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        waiting, seq, total = ctx.state(self.waiting), ctx.state(self.seq), ctx.state(self.total)
        held = waiting.get(timestamp_ms) or []
        if not held:  # it has fired before
            out({"key": ctx.key, "seq": seq.value(0), "at": timestamp_ms, "i": -1, "total": total.value(0)})
        for i, value in zip(held[::2], held[1::2], strict=True):
            seq.update(seq.value(0) + 1)
            total.update(total.value(0) + value)
            out({"key": ctx.key, "seq": seq.value(), "at": timestamp_ms, "i": i, "total": total.value()})
        waiting.remove(timestamp_ms)


def make(rng: random.Random) -> Scenario:
    """Two skewed feeds, merged in the order of event time."""
    feeds, paces = draw_skewed_feeds(rng)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    settings = draw_settings(rng)
    uids, rows, states_at = tuple(feed.uid for feed in feeds), partial(_rows, feeds), partial(_states_at, feeds)
    emitted = Emitted("reorder", ("waiting",), partial(_emitted_at, feeds))
    return Scenario(
        plan=partial(_plan, feeds, paces, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "ordered", rows, ordered_by=(0, 1), steps_by_one=True, after_drains=rows, emitted=emitted),),
        operators=("reorder",),
        cuts=(CutExpectation(uids, "reorder", states_at, after_drains=states_at),),
    )


def _plan(feeds: Feeds, paces: Paces, drawn: int, settings: dict[str, Any], parallelism: int | None) -> JobPlan:
    environment = Environment("timers", parallelism=parallelism or drawn, **settings)
    keyed = timed_streams(environment, feeds, paces).key_by("key")
    keyed.process(Reorder()).uid("reorder").sink_to(ParquetSink(PATH), uid="ordered")
    return environment.build()


def _rows(feeds: Feeds, drained: Drained = ()) -> Counter[Row]:
    """Expected rows. A drain emits all waiting records: those behind it are sorted by themselves."""
    return Counter(numbered([ordered_records(feeds, segment) for segment in in_segments(feeds, drained)]))


def ordered_records(feeds: Feeds, segment: Mapping[str, Iterable[int]]) -> list[tuple[int, int, int, int]]:
    """(at, i, key, value) of these records, in turn."""
    return sorted(
        (feed.at(index), feed.first + index, feed.key(index), feed.value(index)) for feed in feeds for index in segment[feed.uid]
    )


def _emitted_at(feeds: Feeds, positions: Positions, drained: Drained, held: CutStates) -> Counter[Row]:
    """All records in front of a cut except those that wait in its state."""
    *before, last = (ordered_records(feeds, segment) for segment in in_segments(feeds, drained, positions))
    waiting = held["waiting"]
    return Counter(numbered([*before, [record for record in last if (record[2], record[0]) not in waiting]]))


def numbered(segments: list[list[tuple[int, int, int, int]]]) -> Iterator[Row]:
    seqs: dict[int, int] = {}
    totals: dict[int, int] = {}
    for at, i, key, value in chain.from_iterable(segments):
        seqs[key] = seqs.get(key, 0) + 1
        totals[key] = totals.get(key, 0) + value
        yield key, seqs[key], at, i, totals[key]


def _states_at(feeds: Feeds, positions: Positions, drained: Drained = ()) -> CutStates:
    before = {feed.uid: list(read_before(positions[feed.uid], feed.rows)) for feed in feeds}
    passed = watermark_bound(feeds, before, positions)
    return waiting_states(ordered_records(feeds, in_segments(feeds, drained, positions)[-1]), passed)


def waiting_states(records: Iterable[tuple[int, int, int, int]], passed: int | None) -> CutStates:
    """Of Reorder: records (at, i, key, value) in front of the cut and their timers; those that the watermark may have passed
    have possibly fired. `passed`: no watermark is higher; None: it may be the maximum."""
    waiting: dict[Any, list[tuple[int, int]]] = {}
    for at, i, key, value in records:
        waiting.setdefault((key, at), []).append((i, value))
    held = {timer: [number for pair in sorted(pairs) for number in pair] for timer, pairs in waiting.items()}
    fired = {timer for timer in held if passed is None or timer[1] <= passed}
    return {
        "waiting": {timer: Possibly(records) if timer in fired else records for timer, records in held.items()},
        EVENT_TIMERS: {timer: Possibly(None) if timer in fired else None for timer in held},
    }


WORKLOAD = Workload("timers", "puts records in the order of event time with a timer for each", make)
