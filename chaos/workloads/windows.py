"""Two sources with skewed event times, a union, and event-time windows: the slower source holds windows of the other open."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, in_segments, is_at_end, read_before
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
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.combining import ColumnarCombining
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.functions.windows.columnar import FIRED_ROWS_PER_SLICE_MAX, TumblingWindowOperator
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/windows"

Feeds = tuple[Feed, ...]
Paces = tuple[tuple[float, int], ...]
"""(rows per second, rows per step) of each feed."""


def make(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, one ahead of the other; no record is ever late."""
    feeds, paces = draw_skewed_feeds(rng)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    size_ms = rng.choice((40, 100, 250))
    settings = draw_settings(rng)
    slice_rows = rng.choice((1, 2, 5, FIRED_ROWS_PER_SLICE_MAX))
    uids, states_at = tuple(feed.uid for feed in feeds), partial(_states_at, feeds, size_ms)
    rows = partial(_rows, feeds, size_ms)
    emitted = Emitted("window", ("windows",), partial(_emitted_at, feeds, size_ms))
    return Scenario(
        plan=partial(_plan, feeds, paces, size_ms, slice_rows, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "windowed", rows, after_drains=rows, emitted=emitted),),
        operators=("window",),
        cuts=(CutExpectation(uids, "window", states_at, after_drains=states_at),),
    )


def draw_skewed_feeds(rng: random.Random) -> tuple[Feeds, Paces]:
    """Two feeds that differ in rate, in the event time of their first record and in the distance of their records."""
    keys, disorder_ms = rng.choice((1, 4, 12)), rng.choice((0, 15, 60))
    rows, skewed = rng.randint(150, 500), rng.randint(60, 300)
    feeds = (
        Feed("east", rows, keys, 0, 10_000, rng.randint(1, 3), disorder_ms),
        Feed("west", skewed, keys, 1_000_000, 10_000 + rng.choice((-400, 0, 300, 2_000)), rng.randint(1, 6), disorder_ms),
    )
    return feeds, tuple(draw_pace(rng, feed.rows) for feed in feeds)


def timed_streams(environment: Environment, feeds: Feeds, paces: Paces) -> Stream:
    """The union of the feeds. Each gets its own timestamps: one assigner behind the union would follow the faster feed."""
    streams = [
        environment.from_source(feed.source(*pace))
        .uid(feed.uid)
        .assign_timestamps("at", max_out_of_orderness_ms=feed.disorder_ms)
        .uid(f"{feed.uid}-times")
        for feed, pace in zip(feeds, paces, strict=True)
    ]
    return streams[0].union(*streams[1:])


def _plan(
    feeds: Feeds, paces: Paces, size_ms: int, slice_rows: int, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("windows", parallelism=parallelism or drawn, **settings)
    windowed = timed_streams(environment, feeds, paces).key_by("key").window(Tumbling(milliseconds=size_ms))
    counts = windowed.aggregate(n=aggregates.count(), total=aggregates.sum("value"), mean=aggregates.mean("value"))
    counts.uid("window").sink_to(ParquetSink(PATH), uid="windowed")
    plan = environment.build()
    for operator in plan.operators.values():
        if isinstance(operator, TumblingWindowOperator):
            operator.rows_per_slice_max = slice_rows
    return with_waiting_watermarks(plan)


def with_waiting_watermarks(plan: JobPlan) -> JobPlan:
    """Watermarks wait with records that are combined, however few these are."""
    combinings = dict(plan.combinings)
    for edge, each in combinings.items():
        if isinstance(each, ColumnarCombining):
            combinings[edge] = replace(each, waited_for_min=1)
    return replace(plan, combinings=combinings)


def _windows(feeds: Feeds, size_ms: int, indices: Mapping[str, Iterable[int]]) -> dict[tuple[int, int], list[int]]:
    """(key, start of the window) -> [n, total] over these records of each feed."""
    windows: dict[tuple[int, int], list[int]] = {}
    for feed in feeds:
        for index in indices[feed.uid]:
            at = feed.at(index)
            found = windows.setdefault((feed.key(index), at - at % size_ms), [0, 0])
            found[:] = found[0] + 1, found[1] + feed.value(index)
    return windows


def _rows(feeds: Feeds, size_ms: int, drained: Drained = ()) -> Counter[Row]:
    """Expected rows. A drain fires open windows: a window cut in two gives two rows."""
    rows: Counter[Row] = Counter()
    for segment in in_segments(feeds, drained):
        rows.update(_fired(_windows(feeds, size_ms, segment), size_ms))
    return rows


def _fired(windows: Mapping[tuple[int, int], list[int]], size_ms: int) -> Iterator[Row]:
    for (key, start), (n, total) in windows.items():
        yield key, start * 1_000, (start + size_ms) * 1_000, n, total, total / n


def _emitted_at(feeds: Feeds, size_ms: int, positions: Positions, drained: Drained, held: CutStates) -> Counter[Row]:
    """All windows in front of a cut except those in its state."""
    *before, last = (_windows(feeds, size_ms, segment) for segment in in_segments(feeds, drained, positions))
    left = {window: value for window, value in last.items() if window not in held["windows"]}
    return Counter(row for windows in (*before, left) for row in _fired(windows, size_ms))


def _states_at(feeds: Feeds, size_ms: int, positions: Positions, drained: Drained = ()) -> CutStates:
    """Windows with records in front of the cut; those that the watermark may have passed have possibly fired."""
    segment = in_segments(feeds, drained, positions)[-1]
    passed = watermark_bound(feeds, {feed.uid: list(read_before(positions[feed.uid], feed.rows)) for feed in feeds}, positions)
    states: dict[Any, Any] = {}
    for (key, start), (n, total) in _windows(feeds, size_ms, segment).items():
        value = {"n": n, "total": total, "mean.sum": total, "mean.count": n}
        states[(key, start)] = Possibly(value) if passed is None or start + size_ms - 1 <= passed else value
    return {"windows": states}


def watermark_bound(feeds: Feeds, before: Mapping[str, list[int]], positions: Positions) -> int | None:
    """Upper bound of the watermark at the cut; None when every feed is at its end, where it may be the maximum.

    A watermark is that of the slowest subtask of the slowest feed, and starts again with each attempt: positions alone determine
    only a bound."""
    going = [feed for feed in feeds if not is_at_end(positions[feed.uid], feed.rows)]
    if not going:
        return None
    return min(max((feed.at(index) for index in before[feed.uid]), default=-(2**62)) - feed.disorder_ms - 1 for feed in going)


WORKLOAD = Workload("windows", "unites two skewed sources and aggregates event-time windows", make)
