"""One keyed operator whose records leave by its main output, or by one of its side outputs: to a sink, or through an exchange to
timers that put them in order, for which event times, watermarks and barriers must come along."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import TIMED_SCHEMA, in_segments, read_before
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    Drained,
    Emitted,
    Positions,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.chaos.workloads.timers import Reorder, numbered, ordered_records, waiting_states
from holdfast.chaos.workloads.windows import Feeds, Paces, draw_skewed_feeds, timed_streams, watermark_bound
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.functions.side_outputs import OutputTag
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.statebackends.state import ValueStateDescriptor

MAIN, ASIDE, ORDERED = "/out/side-main", "/out/side-aside", "/out/side-ordered"
OUTPUTS = 3
"""Which output a record leaves by is the remainder of its value."""


class Route(ProcessFunction):
    """Counts the records of each key, and deals them out."""

    count = ValueStateDescriptor("count", int)
    aside, ordered, unread = (OutputTag(name, TIMED_SCHEMA) for name in ("aside", "ordered", "unread"))
    states = (count,)
    side_outputs = (aside, ordered, unread)
    returns = TIMED_SCHEMA

    def process_element(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        count = ctx.state(self.count)
        count.update(count.value(0) + 1)
        ctx.output(self.unread, row)
        match row["value"] % OUTPUTS:
            case 0:
                out(row)
            case 1:
                ctx.output(self.aside, row)
            case _:
                ctx.output("ordered", row)


def make(rng: random.Random) -> Scenario:
    """Two skewed feeds and three sinks, of which one may share the subtask of the operator."""
    feeds, paces = draw_skewed_feeds(rng)
    parallelism, chaining, dealt = rng.randint(1, PARALLELISM_MAX), rng.random() < 0.7, rng.random() < 0.5
    settings = draw_settings(rng)
    uids, counts_at, states_at = tuple(feed.uid for feed in feeds), partial(_counts_at, feeds), partial(_states_at, feeds)
    rows, emitted = partial(_ordered, feeds), Emitted("reorder", ("waiting",), partial(_emitted_at, feeds))
    plain = tuple(
        SinkExpectation(path, sink_id, partial(_all, feeds, output), at_cut=partial(_at_cut, feeds, output))
        for output, (path, sink_id) in enumerate(((MAIN, "main"), (ASIDE, "aside")))
    )
    ordered = SinkExpectation(ORDERED, "ordered", rows, ordered_by=(0, 1), steps_by_one=True, after_drains=rows, emitted=emitted)
    return Scenario(
        plan=partial(_plan, feeds, paces, (chaining, dealt), parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(*plain, ordered),
        operators=("route", "reorder"),
        cuts=(
            CutExpectation(uids, "route", counts_at),
            CutExpectation(uids, "reorder", states_at, after_drains=states_at),
        ),
    )


def _plan(
    feeds: Feeds, paces: Paces, shape: tuple[bool, bool], drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    chaining, dealt = shape
    environment = Environment("sideoutputs", parallelism=parallelism or drawn, chaining=chaining, **settings)
    routed = timed_streams(environment, feeds, paces).key_by("key").process(Route()).uid("route")
    routed.sink_to(ParquetSink(MAIN), uid="main")
    aside = routed.side_output(Route.aside)
    (aside.rebalance() if dealt else aside).sink_to(ParquetSink(ASIDE), uid="aside")
    ordered = routed.side_output("ordered").key_by("key").process(Reorder()).uid("reorder")
    ordered.sink_to(ParquetSink(ORDERED), uid="ordered")
    return environment.build()


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _leaving(feeds: Feeds, output: int, indices: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Of these records of each feed, those that leave by this output."""
    return {feed.uid: [index for index in indices[feed.uid] if feed.value(index) % OUTPUTS == output] for feed in feeds}


def _before(feeds: Feeds, positions: Positions) -> dict[str, list[int]]:
    return {feed.uid: list(read_before(positions[feed.uid], feed.rows)) for feed in feeds}


def _all(feeds: Feeds, output: int) -> Counter[Row]:
    return _plain(feeds, _leaving(feeds, output, {feed.uid: range(feed.rows) for feed in feeds}))


def _at_cut(feeds: Feeds, output: int, positions: Positions) -> Counter[Row]:
    return _plain(feeds, _leaving(feeds, output, _before(feeds, positions)))


def _plain(feeds: Feeds, indices: Mapping[str, list[int]]) -> Counter[Row]:
    return Counter(
        (feed.first + index, feed.key(index), feed.value(index), feed.at(index)) for feed in feeds for index in indices[feed.uid]
    )


def _counts_at(feeds: Feeds, positions: Positions) -> CutStates:
    before = _before(feeds, positions)
    return {"count": dict(Counter(feed.key(index) for feed in feeds for index in before[feed.uid]))}


def _ordered(feeds: Feeds, drained: Drained = ()) -> Counter[Row]:
    return Counter(numbered(_in_order(feeds, drained, None)))


def _in_order(feeds: Feeds, drained: Drained, positions: Positions | None) -> list[list[tuple[int, int, int, int]]]:
    """What reaches the timers in each segment, in turn."""
    last = OUTPUTS - 1
    return [ordered_records(feeds, _leaving(feeds, last, segment)) for segment in in_segments(feeds, drained, positions)]


def _emitted_at(feeds: Feeds, positions: Positions, drained: Drained, held: CutStates) -> Counter[Row]:
    *before, last = _in_order(feeds, drained, positions)
    return Counter(numbered([*before, [record for record in last if (record[2], record[0]) not in held["waiting"]]]))


def _states_at(feeds: Feeds, positions: Positions, drained: Drained = ()) -> CutStates:
    passed = watermark_bound(feeds, _before(feeds, positions), positions)
    return waiting_states(_in_order(feeds, drained, positions)[-1], passed)


WORKLOAD = Workload("sideoutputs", "deals records out to a main output and to side outputs, of which one is put in order", make)
