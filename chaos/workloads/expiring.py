"""A keyed count over state with a TTL beside one without: expired state is never shown, and unexpired state never lost.

When state expires depends on when it was written, which no expectation knows: the function itself compares with notes in state
without a TTL, and emits its findings in a column that must be zero."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.counting import COUNTED_KEY_AND_SEQ, Counted, counted_states
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, CutStates, Positions, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.statebackends.state import ListStateDescriptor, MapStateDescriptor, Ttl, ValueStateDescriptor

LEDGER = "/out/expiring"
LASTING_MS = 10**9
"""Longer than any run."""


class CountExpiring(ProcessFunction):
    """Numbers the records of each key; `wrong` counts states shown after they expired, or missing before."""

    returns = {"key": int, "seq": int, "i": int, "wrong": int}  # noqa: RUF012 - the contract's class attribute

    def __init__(self, ttl_ms: int, cleanup_entries: int) -> None:
        self._ttl_ms = ttl_ms
        self._own: dict[int, int] = {}
        """Key -> when this instance last wrote its brief states."""
        self._newest_ms = 0
        """Latest time that it has seen."""
        brief = Ttl(ttl_ms, cleanup_entries=cleanup_entries)
        lasting = Ttl(LASTING_MS, update="read", cleanup_entries=cleanup_entries)
        self.counted = ValueStateDescriptor("counted", Counted)
        self.written = ValueStateDescriptor("written", int)
        """When the brief states were last written, by the clock of their TTL."""
        self.value = ValueStateDescriptor("value", int, brief)
        self.entries = MapStateDescriptor("entries", int, int, brief)
        self.elements = ListStateDescriptor("elements", int, brief)
        self.kept = ValueStateDescriptor("kept", int, lasting)
        self.kept_entries = MapStateDescriptor("kept_entries", int, int, lasting)
        self.states = (self.counted, self.written, self.value, self.entries, self.elements, self.kept, self.kept_entries)  # type: ignore[misc]

    def process_element(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        counted, written = ctx.state(self.counted), ctx.state(self.written)
        value, entries, elements = ctx.state(self.value), ctx.state(self.entries), ctx.state(self.elements)
        kept, kept_entries = ctx.state(self.kept), ctx.state(self.kept_entries)
        before = counted.value(Counted(0, 0))
        now_ms = ctx._backend._clock.now_ms  # type: ignore[union-attr]
        seq = before.count + 1
        shown = [value.value() is not None, entries.get(0) is not None, bool(elements.get())]
        stamp_ms = written.value()
        has_expired = stamp_ms is not None and now_ms - stamp_ms >= self._ttl_ms
        if has_expired or stamp_ms is None:
            wrong = sum(shown)
        elif self._own.get(row["key"]) == stamp_ms and now_ms >= self._newest_ms:
            wrong = len(shown) - sum(shown)
        else:  # a clock that was ahead, here or where the state was before, may have cleaned it up
            wrong = 0
        self._newest_ms = max(self._newest_ms, now_ms)
        wrong += kept.value(0) != before.count
        wrong += kept_entries.get(0, 0) != before.count
        if seq % 3 == 1 or not shown[0]:  # else what is there grows old
            written.update(now_ms)
            self._own[row["key"]] = now_ms
            value.update(seq)
            entries.put(0, seq)
            elements.update([seq])
        kept.update(seq)
        kept_entries.put(0, seq)
        counted.update(Counted(seq, before.total + row["value"]))
        out({"key": row["key"], "seq": seq, "i": row["i"], "wrong": wrong})


def make(rng: random.Random) -> Scenario:
    """Some hundred records; those of a key come about as often as its state expires."""
    keys = rng.choice((3, 10, 40))
    feed = Feed("numbers", rng.randint(200, 500), keys, first=rng.randrange(1_000))
    pace = draw_pace(rng, feed.rows)
    ttl_ms, cleanup_entries = rng.choice((20, 60, 200)), rng.choice((0, 1, 5))
    parallelism = rng.randint(1, PARALLELISM_MAX)
    settings = draw_settings(rng)
    return Scenario(
        plan=partial(_plan, feed, pace, (ttl_ms, cleanup_entries), parallelism, settings),
        records=feed.rows,
        sinks=(
            SinkExpectation(
                LEDGER,
                "expiring",
                partial(_rows, feed),
                ordered_by=COUNTED_KEY_AND_SEQ,
                steps_by_one=True,
                compared=(0, 2, 3),
                at_cut=partial(_rows_at, feed),
            ),
        ),
        operators=("count",),
        cuts=(CutExpectation((feed.uid,), "count", partial(_states_at, feed)),),
    )


def _plan(
    feed: Feed,
    pace: tuple[float, int],
    ttl: tuple[int, int],
    drawn: int,
    settings: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("expiring", parallelism=parallelism or drawn, **settings)
    records = environment.from_source(feed.source(*pace)).uid(feed.uid)
    records.key_by("key").process(CountExpiring(*ttl)).uid("count").sink_to(ParquetSink(LEDGER), uid="expiring")
    return environment.build()


def _records(feed: Feed, positions: Positions | None = None) -> list[tuple[int, int, int]]:
    """Records in front of a cut, or all."""
    indices = range(feed.rows) if positions is None else read_before(positions[feed.uid], feed.rows)
    return [(feed.first + index, feed.key(index), feed.value(index)) for index in indices]


def _rows(feed: Feed) -> Counter[Row]:
    return Counter((key, i, 0) for i, key, _ in _records(feed))


def _rows_at(feed: Feed, positions: Positions) -> Counter[Row]:
    return Counter((key, i, 0) for i, key, _ in _records(feed, positions))


def _states_at(feed: Feed, positions: Positions) -> CutStates:
    return counted_states(_records(feed, positions))


WORKLOAD = Workload("expiring", "counts, and looks whether state with a TTL shows what has expired or lacks what has not", make)
