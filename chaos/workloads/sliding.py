"""Two sources whose event times are skewed, a union, and sliding windows: of one pane a window fires while others are open."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import in_segments, read_before
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    Drained,
    Positions,
    Possibly,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.chaos.workloads.windows import (
    Feeds,
    Paces,
    draw_skewed_feeds,
    timed_streams,
    watermark_bound,
    with_waiting_watermarks,
)
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.windows.assigners import Sliding
from holdfast.operators.functions.windows.columnar import FIRED_ROWS_PER_SLICE_MAX
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/sliding"


def make(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, of which one is ahead of the other; nothing is ever late."""
    feeds, paces = draw_skewed_feeds(rng)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    windows = Sliding(*rng.choice(((100, 20), (250, 100), (60, 60), (40, 100), (90, 60))))
    settings = draw_settings(rng)
    slice_rows = rng.choice((1, 2, 5, FIRED_ROWS_PER_SLICE_MAX))
    uids, rows, states_at = tuple(feed.uid for feed in feeds), partial(_rows, feeds, windows), partial(_states_at, feeds, windows)
    return Scenario(
        plan=partial(_plan, feeds, paces, windows, slice_rows, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "windowed", rows, after_drains=rows),),
        operators=("window",),
        cuts=(CutExpectation(uids, "window", states_at, after_drains=states_at),),
    )


def _plan(
    feeds: Feeds, paces: Paces, windows: Sliding, slice_rows: int, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("sliding", parallelism=parallelism or drawn, **settings)
    windowed = timed_streams(environment, feeds, paces).key_by("key").window(windows)
    sets = {"values": aggregates.count_distinct("value")} if _has_sets(feeds) else {}
    counts = windowed.aggregate(n=aggregates.count(), total=aggregates.sum("value"), most=aggregates.max("value"), **sets)
    counts.uid("window").sink_to(ParquetSink(PATH), uid="windowed")
    plan = environment.build()
    for operator in plan.operators.values():
        if isinstance(operator, SlidingWindowOperator):
            operator.rows_per_slice_max = slice_rows
    return with_waiting_watermarks(plan)


def _has_sets(feeds: Feeds) -> bool:
    """Whether an aggregate keeps sets of values: with one, records are not combined before the exchange."""
    return feeds[0].rows % 2 == 0  # not a draw of its own, so that older seeds keep their meaning


class _Different:
    """A set of values, which a state holds as a list in order of arrival."""

    def __init__(self, values: Iterable[int]) -> None:
        self._values = sorted(set(values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and sorted(other) == self._values

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    def __repr__(self) -> str:
        return f"{self._values} in any order"


def _values(feeds: Feeds, windows: Sliding, size_ms: int, slide_ms: int, indices: Mapping[str, Iterable[int]]) -> Any:
    """(key, start) -> values of these records, over all stretches of time of this size that begin at multiples of the slide."""
    found: dict[tuple[int, int], list[int]] = {}
    for feed in feeds:
        for index in indices[feed.uid]:
            at = feed.at(index)
            if (at - windows.offset_ms) % windows.slide_ms >= windows.size_ms:
                continue  # between two windows
            start = at - at % slide_ms
            while start > at - size_ms:
                found.setdefault((feed.key(index), start), []).append(feed.value(index))
                start -= slide_ms
    return found


def _rows(feeds: Feeds, windows: Sliding, drained: Drained = ()) -> Counter[Row]:
    """A drain fires what it finds: a window that it cuts in two gives two rows."""
    rows: Counter[Row] = Counter()
    size_ms, slide_ms = windows.size_ms, windows.slide_ms
    for segment in in_segments(feeds, drained):
        for (key, start), values in _values(feeds, windows, size_ms, slide_ms, segment).items():
            row = (key, start * 1_000, (start + size_ms) * 1_000, len(values), sum(values), max(values))
            rows[(*row, len(set(values))) if _has_sets(feeds) else row] += 1
    return rows


def _states_at(feeds: Feeds, windows: Sliding, positions: Positions, drained: Drained = ()) -> CutStates:
    """Panes that hold records in front of the cut; those whose last window the watermark may have passed are possibly gone."""
    segment = in_segments(feeds, drained, positions)[-1]
    passed = watermark_bound(feeds, {feed.uid: list(read_before(positions[feed.uid], feed.rows)) for feed in feeds}, positions)
    states: dict[Any, Any] = {}
    value: dict[str, Any]
    for (key, pane), values in _values(feeds, windows, windows.pane_ms, windows.pane_ms, segment).items():
        value = {"n": len(values), "total": sum(values), "most": max(values)}
        if _has_sets(feeds):
            value["values"] = _Different(values)
        last = pane - pane % windows.slide_ms
        states[(key, pane)] = Possibly(value) if passed is None or last + windows.size_ms - 1 <= passed else value
    return {"windows": states}


WORKLOAD = Workload("sliding", "unites two skewed sources and aggregates sliding windows, which are merged from panes", make)
