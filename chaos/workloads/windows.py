"""Two sources whose event times are skewed, a union, and event-time windows: the slower one holds windows of the other open."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from chaos.scenario import CutExpectation, CutStates, Positions, Possibly, Row, Scenario, SinkExpectation, Workload
from chaos.workloads.feeds import Feed, is_at_end, read_before
from chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from operators.base import JobPlan
from operators.environment import Environment
from operators.functions import aggregates
from operators.sinks.parquet import ParquetSink
from operators.stream import Stream
from operators.time import Tumbling

PATH = "/out/windows"

Feeds = tuple[Feed, ...]
Paces = tuple[tuple[float, int], ...]
"""(rows per second, rows per step) of each feed."""


def make(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, of which one is ahead of the other; nothing is ever late."""
    feeds, paces = draw_skewed_feeds(rng)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    size_ms = rng.choice((40, 100, 250))
    settings = draw_settings(rng)
    return Scenario(
        plan=partial(_plan, feeds, paces, size_ms, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "windowed", partial(_rows, feeds, size_ms)),),
        operators=("window",),
        cuts=(CutExpectation(tuple(feed.uid for feed in feeds), "window", partial(_states_at, feeds, size_ms)),),
        may_drain=False,
    )


def draw_skewed_feeds(rng: random.Random) -> tuple[Feeds, Paces]:
    """Two feeds that differ in rate, in the event time of their first record and in how far apart their records are."""
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
    feeds: Feeds, paces: Paces, size_ms: int, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("windows", parallelism=parallelism or drawn, **settings)
    windowed = timed_streams(environment, feeds, paces).key_by("key").window(Tumbling(milliseconds=size_ms))
    counts = windowed.aggregate(n=aggregates.count(), total=aggregates.sum("value"), mean=aggregates.mean("value"))
    counts.uid("window").sink_to(ParquetSink(PATH), uid="windowed")
    return environment.build()


def _windows(feeds: Feeds, size_ms: int, indices: Mapping[str, Iterable[int]]) -> dict[tuple[int, int], list[int]]:
    """(key, start of the window) -> [n, total] over these records of each feed."""
    windows: dict[tuple[int, int], list[int]] = {}
    for feed in feeds:
        for index in indices[feed.uid]:
            at = feed.at(index)
            found = windows.setdefault((feed.key(index), at - at % size_ms), [0, 0])
            found[:] = found[0] + 1, found[1] + feed.value(index)
    return windows


def _rows(feeds: Feeds, size_ms: int) -> Counter[Row]:
    windows = _windows(feeds, size_ms, {feed.uid: range(feed.rows) for feed in feeds})
    return Counter(
        (key, start * 1_000, (start + size_ms) * 1_000, n, total, total / n) for (key, start), (n, total) in windows.items()
    )


def _states_at(feeds: Feeds, size_ms: int, positions: Positions) -> CutStates:
    """Windows that hold records in front of the cut; those that the watermark may have passed have possibly fired."""
    before = {feed.uid: list(read_before(positions[feed.uid], feed.rows)) for feed in feeds}
    passed = watermark_bound(feeds, before, positions)
    states: dict[Any, Any] = {}
    for (key, start), (n, total) in _windows(feeds, size_ms, before).items():
        value = {"n": n, "total": total, "mean.sum": total, "mean.count": n}
        states[(key, start)] = Possibly(value) if passed is None or start + size_ms - 1 <= passed else value
    return {"windows": states}


def watermark_bound(feeds: Feeds, before: Mapping[str, list[int]], positions: Positions) -> int | None:
    """No watermark at the cut is higher than this; None when every feed is at its end, where it may be the maximum.

    A watermark is that of the slowest subtask of the slowest feed, and begins anew with each attempt: the bound is all that
    positions alone tell."""
    going = [feed for feed in feeds if not is_at_end(positions[feed.uid], feed.rows)]
    if not going:
        return None
    return min(max((feed.at(index) for index in before[feed.uid]), default=-(2**62)) - feed.disorder_ms - 1 for feed in going)


WORKLOAD = Workload("windows", "unites two skewed sources and aggregates event-time windows", make)
