"""Windows over columns with allowed lateness: of some records all windows have fired, and fire again; others come when that time
has passed, too.

Which ones depends on positions alone, as in `late`: the distances are chosen so that no lost watermark and no batch's end matters.
How often a window fires does depend on them; its last row does not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import is_at_end, read_before
from holdfast.chaos.workloads.late import LOST_BATCHES_MAX, LateFeed
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
from holdfast.operators.functions.windows.assigners import Sliding
from holdfast.operators.functions.windows.columnar import FIRED_ROWS_PER_SLICE_MAX
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH, LATE_PATH = "/out/late-windows", "/out/late-windows-late"
REVIVING_EVERY = 3
_KEY_MS = 1 << 40
"""Above each window's start."""
UPDATES = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("window", "n", "total")])


@dataclass(frozen=True, slots=True)
class RevivingFeed(LateFeed):
    """Some records come so late that their windows have fired, but not so late that these are gone."""

    slide_ms: int = 1

    @property
    def lateness_ms(self) -> int:
        """Of the windows: what revives them lies that much behind its turn at most."""
        return self.fired_lag_ms + 1

    @property
    def lag_ms(self) -> int:
        """Distance of a late record from its turn: its windows have fired, and their lateness has passed."""
        return self.lateness_ms + self.fired_lag_ms

    def revives(self, index: int) -> bool:
        return index >= self.first_late and not self.is_late(index) and self._mixed(index) % REVIVING_EVERY == 0

    def at(self, index: int) -> int:
        if self.revives(index):
            return self.start_ms + index * self.step_ms - self.lateness_ms + 1
        return LateFeed.at(self, index)

    def panes(self, index: int, pane_ms: int, until_ms: int = 0) -> list[int]:
        """Starts of the stretches of `until_ms` that hold a record and begin at multiples of `pane_ms`."""
        at = self.at(index)
        return list(range(at - at % pane_ms, at - max(until_ms, pane_ms), -pane_ms))


def make(rng: random.Random) -> Scenario:
    """One feed, windows that tumble or slide, and any parallelism behind the source. Late records are counted or have a sink."""
    rows, batch_rows = rng.randint(200, 500), rng.choice((3, 5, 10))
    size_ms, slide_ms = rng.choice(((20, 20), (60, 20), (50, 20), (120, 120)))
    disorder_ms, step_ms = rng.choice((0, 10, 40)), rng.randint(2, 6)
    keys, pace, parallelism = rng.choice((1, 4, 12)), rows / rng.uniform(0.7, 1.5), rng.randint(1, PARALLELISM_MAX)
    feed = RevivingFeed(
        "readings", rows, keys, 0, 10_000, step_ms, disorder_ms, size_ms=size_ms, batch_rows=batch_rows, slide_ms=slide_ms
    )
    settings, slice_rows, is_counted = draw_settings(rng), rng.choice((1, 3, FIRED_ROWS_PER_SLICE_MAX)), rng.random() < 0.5
    updates = SinkExpectation(PATH, "updates", partial(_rows, feed), ordered_by=(0, 1), last_of_key=True)
    late = SinkExpectation(LATE_PATH, "late", partial(_late_rows, feed))
    return Scenario(
        plan=partial(_plan, feed, pace, (slice_rows, is_counted), parallelism, settings),
        records=rows,
        sinks=(updates,) if is_counted else (updates, late),
        operators=("window",),
        cuts=(CutExpectation((feed.uid,), "window", partial(_states_at, feed)),),
        late=LateExpectation((feed.uid,), "window", feed.late_behind) if is_counted else None,
        may_rescale_in_flight=False,
        may_drain=False,
    )


def _plan(
    feed: RevivingFeed, pace: float, shape: tuple[int, bool], drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    slice_rows, is_counted = shape
    environment = Environment("late-windows", parallelism=parallelism or drawn, **settings)
    source = environment.from_source(feed.source(pace, feed.batch_rows)).uid(feed.uid).set_parallelism(1)
    timed = source.assign_timestamps("at", max_out_of_orderness_ms=feed.disorder_ms).uid("times").set_parallelism(1)
    windowed = timed.key_by("key").window(Sliding(feed.size_ms, feed.slide_ms)).allowed_lateness(feed.lateness_ms)
    sums = {"n": aggregates.count(), "total": aggregates.sum("value")}
    counts = (windowed if is_counted else windowed.side_output_late("late")).aggregate(**sums).uid("window")
    counts.map_batches(_numbered, returns=UPDATES).uid("numbered").sink_to(ParquetSink(PATH), uid="updates")
    if not is_counted:
        counts.side_output("late").sink_to(ParquetSink(LATE_PATH), uid="late")
    plan = environment.build()
    for operator in plan.operators.values():
        if isinstance(operator, SlidingWindowOperator):
            operator.rows_per_slice_max = slice_rows
    return plan


def _numbered(columns: pa.RecordBatch) -> pa.RecordBatch:
    """Key and window as one number, by which rows replace one another."""
    start_ms = pc.divide(columns.column("window_start").cast(pa.int64()), 1_000)
    window = pc.add(pc.multiply(columns.column("key"), _KEY_MS), start_ms)
    return pa.RecordBatch.from_arrays([window, columns.column("n"), columns.column("total")], schema=UPDATES)


def _sums(feed: RevivingFeed, pane_ms: int, until_ms: int, indices: Iterable[int]) -> dict[tuple[int, int], list[int]]:
    """(key, start) -> [n, total] over those of these records that are not late."""
    sums: dict[tuple[int, int], list[int]] = {}
    for index in indices:
        if not feed.is_late(index):
            for start in feed.panes(index, pane_ms, until_ms):
                found = sums.setdefault((feed.key(index), start), [0, 0])
                found[:] = found[0] + 1, found[1] + feed.value(index)
    return sums


def _rows(feed: RevivingFeed) -> Counter[Row]:
    sums = _sums(feed, feed.slide_ms, feed.size_ms, range(feed.rows))
    return Counter((key * _KEY_MS + start, n, total) for (key, start), (n, total) in sums.items())


def _late_rows(feed: RevivingFeed) -> Counter[Row]:
    late = (index for index in range(feed.rows) if feed.is_late(index))
    return Counter((feed.first + index, feed.key(index), feed.value(index), feed.at(index)) for index in late)


def _states_at(feed: RevivingFeed, positions: Positions) -> CutStates:
    """Panes with records in front of the cut. Those whose lateness the last watermarks may have passed are possibly gone; where an
    earlier one has passed it they are gone."""
    before = sorted(read_before(positions[feed.uid], feed.rows))
    passed = feed.watermark_behind(before)
    long_passed = feed.watermark_behind(before[: -LOST_BATCHES_MAX * feed.batch_rows])
    at_end = is_at_end(positions[feed.uid], feed.rows)
    windows = Sliding(feed.size_ms, feed.slide_ms)
    states: dict[Any, Any] = {}
    for (key, start), (n, total) in _sums(feed, windows.pane_ms, 0, before).items():
        gone_ms = start - start % feed.slide_ms + feed.size_ms - 1 + feed.lateness_ms
        if gone_ms > long_passed:
            value = {"n": n, "total": total}
            states[(key, start)] = Possibly(value) if at_end or gone_ms <= passed else value
    return {"windows": states}


WORKLOAD = Workload("late_windows", "aggregates windows that late records fire again, until their lateness has passed", make)
