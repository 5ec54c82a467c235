"""Event-time windows over three sources: one that goes on, one that falls silent and returns, one that never has a record.

Nothing is ever late, wherever attempts begin: before its silence the second source holds event time with its own records, which
come faster than it can go idle; behind it its records lie far ahead. So the output says that nothing is lost, and a checker (I33)
that silence is told in time, and not before."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, PacedReader, PacedSource, in_segments, is_at_end, read_before
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    Positions,
    Possibly,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.operators.base import JobPlan, OperatorContext, Poll
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.event_time.watermarks import WatermarkStrategy
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/idle"

LEAP_MS = 10_000_000
"""How far ahead the records lie that come behind the silence: no clock follows so far in one run."""
RECORDS_PER_SECOND = 300
"""Of the source before its silence: at most 80 ms lie between two steps of a subtask, at any parallelism."""
STEP_ROWS_MAX = 3


@dataclass(frozen=True, slots=True)
class RestingFeed(Feed):
    """Behind `before` records comes a silence, and what follows lies far ahead, at one time: subtasks return when they can."""

    before: int = 0
    rest_ms: int = 0

    def at(self, index: int) -> int:
        return Feed.at(self, index) if index < self.before else self.start_ms + LEAP_MS

    def make_batch(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        batch = Feed.make_batch(self, indices)
        times = pa.array([self.at(int(index)) for index in indices], pa.int64())
        return batch.set_column(batch.schema.get_field_index("at"), batch.schema.field("at"), times)

    def resting_source(self, step_rows: int) -> RestingSource:
        source = RestingSource(self.make_batch, self.rows, self.schema, RECORDS_PER_SECOND, step_rows, name=self.uid)
        source.before, source.rest_ms = self.before, self.rest_ms
        return source


class RestingSource(PacedSource):
    """Each subtask rests when it has given its share of the first `before` records, in each attempt that gives some of them.

    Where an attempt begins behind them it returns at once: in a rest, event time may go on by the clock (`advance_when_idle`) from
    where a record far ahead had brought it, and those of other subtasks would be late."""

    before: int = 0
    rest_ms: int = 0

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> RestingReader:
        return RestingReader(self, subtask, parallelism, max_parallelism)


class RestingReader(PacedReader):
    def __init__(self, source: RestingSource, subtask: int, parallelism: int, max_parallelism: int) -> None:
        super().__init__(source, subtask, parallelism, max_parallelism)
        self._resting = source
        self._until_ms: int | None = None
        self._has_rested = False
        self._is_restored = False

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        super().open(context, entries)
        self._is_restored = bool(entries)
        self._cursor.set_total(self._resting.before)

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self._has_rested:
            return super().poll(rows_max, now_ms)
        if self._until_ms is None:
            polled = super().poll(rows_max, now_ms)
            if not polled.finished:
                return polled
            returns = self._is_restored and self._given == 0 and self._resting.before < self._resting.rows
            self._until_ms = now_ms if returns else now_ms + self._resting.rest_ms
        if now_ms < self._until_ms:
            return Poll(ready_at_ms=self._until_ms)
        self._has_rested = True
        self._cursor.set_total(self._resting.rows)
        self._began_ms, self._given = now_ms, 0
        return super().poll(rows_max, now_ms)


@dataclass(frozen=True, slots=True)
class Feeds:
    """The three sources."""

    steady: Feed
    resting: RestingFeed
    silent: RestingFeed

    @property
    def all(self) -> tuple[Feed, ...]:
        return self.steady, self.resting, self.silent


@dataclass(frozen=True, slots=True)
class Times:
    """What the strategies say."""

    idle_ms: int
    advance_ms: int | None
    drift_ms: int | None
    """Of the watermark group of all three; None: there is none."""


def make(rng: random.Random) -> Scenario:
    """A silence longer than its timeout, in each attempt."""
    keys, disorder_ms = rng.choice((1, 4, 12)), rng.choice((0, 15, 60))
    rows, before, after = rng.randint(150, 400), rng.randint(0, 40), rng.randint(0, 20)
    rest_ms = rng.randint(600, 1_500)
    feeds = Feeds(
        Feed("steady", rows, keys, 0, 10_000, rng.randint(1, 3), disorder_ms),
        RestingFeed("resting", before + after, keys, 1_000_000, 10_000, 2, 0, before=before, rest_ms=rest_ms),
        RestingFeed("silent", 0, keys, 2_000_000, 10_000, 2, 0, rest_ms=rest_ms + 300),
    )
    pace = (rows / rng.uniform(0.7, 1.5), rng.choice((5, 10, 25)))
    times = Times(rng.randint(150, 300), rng.choice((None, 250)), rng.choice((None, 20, 100)))
    size_ms, parallelism, settings = rng.choice((40, 100, 250)), rng.randint(1, PARALLELISM_MAX), draw_settings(rng)
    settings["auto_watermark_interval_ms"] = rng.choice((0, 0, 150))
    return Scenario(
        plan=partial(_plan, feeds, pace, rng.randint(1, STEP_ROWS_MAX), times, size_ms, parallelism, settings),
        records=rows + before + after,
        sinks=(SinkExpectation(PATH, "windowed", partial(_rows, feeds, size_ms)),),
        operators=("window",),
        cuts=(CutExpectation(tuple(feed.uid for feed in feeds.all), "window", partial(_states_at, feeds, size_ms)),),
        may_drain=False,
    )


def _plan(
    feeds: Feeds,
    pace: tuple[float, int],
    step_rows: int,
    times: Times,
    size_ms: int,
    drawn: int,
    settings: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("idle", parallelism=parallelism or drawn, **settings)
    bounded = WatermarkStrategy.for_bounded_out_of_orderness(feeds.steady.disorder_ms).with_timestamp_assigner("at")
    if times.drift_ms is not None:
        bounded = bounded.with_watermark_alignment("sources", times.drift_ms, 50)
    silent = bounded.with_idleness(times.idle_ms)
    if times.advance_ms is not None:
        silent = silent.advance_when_idle(times.advance_ms)
    sources = (feeds.steady.source(*pace), feeds.resting.resting_source(step_rows), feeds.silent.resting_source(step_rows))
    streams = [
        environment.from_source(source).uid(feed.uid).assign_timestamps_and_watermarks(strategy).uid(f"{feed.uid}-times")
        for feed, source, strategy in zip(feeds.all, sources, (bounded, silent, silent), strict=True)
    ]
    windowed = streams[0].union(*streams[1:]).key_by("key").window(Tumbling(milliseconds=size_ms))
    counts = windowed.aggregate(n=aggregates.count(), total=aggregates.sum("value"))
    counts.uid("window").sink_to(ParquetSink(PATH), uid="windowed")
    return environment.build()


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _windows(feeds: Feeds, size_ms: int, indices: dict[str, list[int]]) -> dict[tuple[int, int], list[int]]:
    """(key, start of the window) -> [n, total] over these records of each source."""
    windows: dict[tuple[int, int], list[int]] = {}
    for feed in feeds.all:
        for index in indices[feed.uid]:
            at = feed.at(index)
            found = windows.setdefault((feed.key(index), at - at % size_ms), [0, 0])
            found[:] = found[0] + 1, found[1] + feed.value(index)
    return windows


def _rows(feeds: Feeds, size_ms: int) -> Counter[Row]:
    windows = _windows(feeds, size_ms, {feed.uid: list(range(feed.rows)) for feed in feeds.all})
    return Counter((key, start * 1_000, (start + size_ms) * 1_000, n, total) for (key, start), (n, total) in windows.items())


def _states_at(feeds: Feeds, size_ms: int, positions: Positions) -> CutStates:
    """Windows with records in front of the cut; those that the steady source has passed have possibly fired."""
    steady = feeds.steady
    passed = None
    if not is_at_end(positions[steady.uid], steady.rows):
        read = read_before(positions[steady.uid], steady.rows)
        passed = max((steady.at(index) for index in read), default=-(2**62)) - steady.disorder_ms - 1
    segment = in_segments(feeds.all, (), positions)[-1]
    states: dict[Any, Any] = {}
    for (key, start), (n, total) in _windows(feeds, size_ms, segment).items():
        value = {"n": n, "total": total}
        states[(key, start)] = Possibly(value) if passed is None or start + size_ms - 1 <= passed else value
    return {"windows": states}


WORKLOAD = Workload("idle", "aggregates windows over sources that fall silent, return, or never have a record", make)
