"""Sources that end while others run: checkpoints continue with finished subtasks, one of them finished from the start.

Records of a short source set timers by the clock, some of which are pending when it ends: these never fire."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.counting import COUNTED_COMPARED, COUNTED_KEY_AND_SEQ, Count, counted_rows, counted_states
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, CutStates, Positions, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.sinks.simple import Blackhole
from holdfast.statebackends.state import ValueStateDescriptor

LEDGER, LONGEST = "/out/ends", "/out/longest"

Feeds = tuple[Feed, ...]


class Remind(ProcessFunction):
    """A row for each key, a while after each of its records."""

    newest = ValueStateDescriptor("newest", int)
    states = (newest,)
    returns = {"i": int}  # noqa: RUF012 - the contract's class attribute

    def __init__(self, after_ms: int) -> None:
        self.after_ms = after_ms

    def process_element(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        ctx.state(self.newest).update(row["i"])
        ctx.timers.register_processing_time_timer(ctx.timers.current_processing_time + self.after_ms)

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        out({"i": ctx.state(self.newest).value()})


def make(rng: random.Random) -> Scenario:
    """Feeds of no, few, some and many records, at about one rate, with different parallelisms."""
    lengths = [0, rng.randint(1, 5), rng.randint(20, 120), rng.randint(250, 500)][rng.randint(0, 1) :]
    keys = rng.choice((2, 15))
    feeds = tuple(Feed(f"feed-{n}", rows, keys, first=n * 100_000) for n, rows in enumerate(lengths))
    rate = max(lengths) / rng.uniform(0.8, 1.6)
    paces = tuple((rate, rng.choice((5, 15, 40))) for _ in feeds)
    parallelisms = tuple(rng.choice((None, None, 1, 3)) for _ in feeds)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    settings = draw_settings(rng)
    uids = tuple(feed.uid for feed in feeds)
    remind_ms = rng.choice((100, 400, 1_000))
    return Scenario(
        plan=partial(_plan, feeds, paces, parallelisms, parallelism, remind_ms, settings),
        records=sum(lengths),
        sinks=(
            SinkExpectation(
                LEDGER,
                "ledger",
                partial(_rows, feeds),
                ordered_by=COUNTED_KEY_AND_SEQ,
                steps_by_one=True,
                compared=COUNTED_COMPARED,
                at_cut=partial(_rows_at, feeds),
            ),
            SinkExpectation(LONGEST, "longest", partial(_longest, feeds[-1])),
        ),
        operators=("count",),
        cuts=(CutExpectation(uids, "count", partial(_states_at, feeds)),),
    )


def _plan(
    feeds: Feeds,
    paces: tuple[tuple[float, int], ...],
    parallelisms: tuple[int | None, ...],
    drawn: int,
    remind_ms: int,
    settings: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("ends", parallelism=parallelism or drawn, **settings)
    streams = []
    for feed, pace, own in zip(feeds, paces, parallelisms, strict=True):
        stream = environment.from_source(feed.source(*pace)).uid(feed.uid)
        streams.append(stream if own is None else stream.set_parallelism(own))
    streams[-1].sink_to(ParquetSink(LONGEST), uid="longest")
    counted = streams[0].union(*streams[1:]).key_by("key").process(Count()).uid("count")
    counted.sink_to(ParquetSink(LEDGER), uid="ledger")
    streams[-2].key_by("key").process(Remind(remind_ms)).uid("remind").sink_to(Blackhole(), uid="reminded")
    return environment.build()


def _records(feeds: Feeds, positions: Positions | None = None) -> Iterator[tuple[int, int, int]]:
    """Records of all feeds in front of a cut, or all."""
    for feed in feeds:
        for index in range(feed.rows) if positions is None else read_before(positions[feed.uid], feed.rows):
            yield feed.first + index, feed.key(index), feed.value(index)


def _rows(feeds: Feeds) -> Counter[Row]:
    return counted_rows(_records(feeds))


def _rows_at(feeds: Feeds, positions: Positions) -> Counter[Row]:
    return counted_rows(_records(feeds, positions))


def _states_at(feeds: Feeds, positions: Positions) -> CutStates:
    return counted_states(list(_records(feeds, positions)))


def _longest(feed: Feed) -> Counter[Row]:
    return Counter(_records((feed,)))


WORKLOAD = Workload("ends", "counts the records of sources that end one after the other", make)
