"""Event-time windows over a source of which some records come too late, some for their window and some only for the watermark.

Which ones depends on positions alone. The source has one subtask, so that a watermark reaches every window at its place among the
records;
and a record is either so far behind that its window has fired long ago, wherever batches end and whichever watermark was lost with
an attempt, or in a window that no watermark can have passed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, is_at_end, read_before
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    LateExpectation,
    Positions,
    Possibly,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/late"

LOST_BATCHES_MAX = 6
"""Batches whose watermarks a window may lack at its next record: a barrier between a batch and its watermark cuts the watermark
off, once in each attempt."""
LATE_EVERY, TARDY_EVERY = 7, 5


@dataclass(frozen=True, slots=True)
class LateFeed(Feed):
    """Some records are late: their window has fired. Others are tardy: behind the watermark, in an open window."""

    size_ms: int = 1
    """Size of the windows."""
    batch_rows: int = 1
    """Most records between two watermarks."""

    @property
    def first_late(self) -> int:
        """Before this record there may be no watermark yet."""
        return (LOST_BATCHES_MAX + 1) * self.batch_rows

    @property
    def lag_ms(self) -> int:
        """Distance of a late record from its turn."""
        return self.fired_lag_ms

    @property
    def fired_lag_ms(self) -> int:
        """So far behind its turn a record's window has fired: the watermark of so many batches before lies behind its end."""
        behind = LOST_BATCHES_MAX * self.batch_rows + LATE_EVERY + TARDY_EVERY
        return behind * self.step_ms + 2 * self.disorder_ms + 2 * self.size_ms

    def is_late(self, index: int) -> bool:
        return index >= self.first_late and self._mixed(index) % LATE_EVERY == 0

    def is_tardy(self, index: int) -> bool:
        return not self.is_late(index) and self._mixed(index) % TARDY_EVERY == 0

    def at(self, index: int) -> int:
        turn = self.start_ms + index * self.step_ms
        if self.is_late(index):
            return turn - self.lag_ms
        # the watermark lies before the turn of the next record, so the window of that turn is open
        return turn - turn % self.size_ms if self.is_tardy(index) else turn + (self._mixed(index) >> 9) % (self.disorder_ms + 1)

    def window(self, index: int) -> tuple[int, int]:
        """Key, and start of the window."""
        at = self.at(index)
        return self.key(index), at - at % self.size_ms

    def late_behind(self, positions: Positions | None) -> int:
        """Late records for an attempt that starts at these positions, or at the start."""
        before = set() if positions is None else set(read_before(positions[self.uid], self.rows))
        return sum(self.is_late(index) for index in range(self.rows) if index not in before)

    def watermark_behind(self, indices: Iterable[int]) -> int:
        """Watermark after these records, if each of their watermarks arrives."""
        return max((self.at(index) for index in indices), default=-(2**62)) - self.disorder_ms - 1

    def make_batch(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        batch = Feed.make_batch(self, indices)
        times = pa.array([self.at(int(index)) for index in indices], pa.int64())
        return batch.set_column(batch.schema.get_field_index("at"), batch.schema.field("at"), times)


def make(rng: random.Random) -> Scenario:
    """One feed, windows with many records or few, and any parallelism behind the source."""
    rows, batch_rows = rng.randint(200, 500), rng.choice((3, 5, 10))
    size_ms = rng.choice((20, 50, 120))
    disorder_ms, step_ms = rng.choice((0, 10, 40)), rng.randint(2, 6)
    feed = LateFeed(
        "readings", rows, rng.choice((1, 4, 12)), 0, 10_000, step_ms, disorder_ms, size_ms=size_ms, batch_rows=batch_rows
    )
    pace = rows / rng.uniform(0.7, 1.5)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    settings = draw_settings(rng)
    return Scenario(
        plan=partial(_plan, feed, pace, parallelism, settings),
        records=rows,
        sinks=(SinkExpectation(PATH, "windowed", partial(_rows, feed)),),
        operators=("window",),
        cuts=(CutExpectation((feed.uid,), "window", partial(_states_at, feed)),),
        late=LateExpectation((feed.uid,), "window", feed.late_behind),
        may_drain=False,
        may_rescale_in_flight=False,
    )


def _plan(feed: LateFeed, pace: float, drawn: int, settings: dict[str, Any], parallelism: int | None) -> JobPlan:
    environment = Environment("late", parallelism=parallelism or drawn, **settings)
    source = environment.from_source(feed.source(pace, feed.batch_rows)).uid(feed.uid).set_parallelism(1)
    timed = source.assign_timestamps("at", max_out_of_orderness_ms=feed.disorder_ms).uid("times").set_parallelism(1)
    windowed = timed.key_by("key").window(Tumbling(milliseconds=feed.size_ms))
    counts = windowed.aggregate(n=aggregates.count(), total=aggregates.sum("value"))
    counts.uid("window").sink_to(ParquetSink(PATH), uid="windowed")
    return environment.build()


def _windows(feed: LateFeed, indices: Iterable[int]) -> dict[tuple[int, int], list[int]]:
    """(key, start of the window) -> [n, total] over those of these records that are not late."""
    windows: dict[tuple[int, int], list[int]] = {}
    for index in indices:
        if not feed.is_late(index):
            found = windows.setdefault(feed.window(index), [0, 0])
            found[:] = found[0] + 1, found[1] + feed.value(index)
    return windows


def _rows(feed: LateFeed) -> Counter[Row]:
    windows = _windows(feed, range(feed.rows))
    size_ms = feed.size_ms
    return Counter((key, start * 1_000, (start + size_ms) * 1_000, n, total) for (key, start), (n, total) in windows.items())


def _states_at(feed: LateFeed, positions: Positions) -> CutStates:
    """Windows with records in front of the cut. Windows that the last watermarks may have passed have possibly fired; windows that
    an earlier one has passed are gone."""
    before = sorted(read_before(positions[feed.uid], feed.rows))
    passed = feed.watermark_behind(before)
    long_passed = feed.watermark_behind(before[: -LOST_BATCHES_MAX * feed.batch_rows])
    at_end = is_at_end(positions[feed.uid], feed.rows)
    states: dict[Any, Any] = {}
    for (key, start), (n, total) in _windows(feed, before).items():
        last_ms = start + feed.size_ms - 1
        if last_ms > long_passed:
            value = {"n": n, "total": total}
            states[(key, start)] = Possibly(value) if at_end or last_ms <= passed else value
    return {"windows": states}


WORKLOAD = Workload("late", "aggregates event-time windows of a source that gives records behind the watermark", make)
