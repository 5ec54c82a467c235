"""Two skewed sources, a union, and the first rows of each key and window, tumbling or sliding: each window once, and final.

Windows fire in slices of a few rows, so that barriers fall between them: a window that is emitted twice, rows that stay behind it,
or that go before it fires, give other rows at a cut or at the end. Rows are compared by columns that tell all of them apart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import in_segments, no_states
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
from holdfast.chaos.workloads.windows import Feeds, Paces, draw_skewed_feeds, timed_streams
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.tables.window_top import ENTRIES_PER_SLICE_MAX, ROWS_PER_SLICE_MAX, WindowTopOperator
from holdfast.operators.functions.windows.assigners import Sliding, Tumbling
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/window-top"
_Record = tuple[int, int, int]
"""i, value, at."""
_Windows = dict[tuple[int, int], list[_Record]]
"""(key, end) -> records."""


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Both sources, and what is asked of them."""

    feeds: Feeds
    windows: Tumbling | Sliding
    n: int
    by: tuple[str, ...]
    descending: bool


def make(rng: random.Random) -> Scenario:
    """Nothing is late."""
    feeds, paces = draw_skewed_feeds(rng)
    windows = rng.choice((Tumbling(40), Tumbling(150), Sliding(60, 20), Sliding(50, 20), Sliding(120, 20), Sliding(20, 30)))
    ranked = _Ranked(feeds, windows, rng.choice((1, 3, 10)), rng.choice((("i",), ("value", "i"))), rng.random() < 0.5)
    parallelism, settings = rng.randint(1, PARALLELISM_MAX), draw_settings(rng)
    slices = rng.choice((1, 2, 5, ROWS_PER_SLICE_MAX)), rng.choice((1, 30, ENTRIES_PER_SLICE_MAX))
    uids, rows = tuple(feed.uid for feed in feeds), partial(_rows, ranked)
    emitted = Emitted("top", ("rows",), partial(_emitted_at, ranked))
    return Scenario(
        plan=partial(_plan, ranked, paces, slices, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "ranked", rows, after_drains=rows, emitted=emitted),),
        operators=("top",),
        cuts=(CutExpectation(uids, "top", partial(no_states, feeds)),),
    )


def _plan(
    ranked: _Ranked, paces: Paces, slices: tuple[int, int], drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("window-top", parallelism=parallelism or drawn, **settings)
    windowed = timed_streams(environment, ranked.feeds, paces).key_by("key").window(ranked.windows)
    top = windowed.top(ranked.n, by=ranked.by, descending=ranked.descending).uid("top")
    top.sink_to(ParquetSink(PATH), uid="ranked")
    plan = environment.build()
    for operator in plan.operators.values():
        if isinstance(operator, WindowTopOperator):
            operator.rows_per_slice_max, operator.entries_per_slice_max = slices
    return plan


def _windows(ranked: _Ranked, indices: Mapping[str, Iterable[int]]) -> _Windows:
    found: _Windows = {}
    size_ms = ranked.windows.size_ms
    slide_ms = ranked.windows.slide_ms if isinstance(ranked.windows, Sliding) else size_ms
    for feed in ranked.feeds:
        for index in indices[feed.uid]:
            at = feed.at(index)
            for start in range(at - at % slide_ms, at - size_ms, -slide_ms):
                found.setdefault((feed.key(index), start + size_ms), []).append((feed.first + index, feed.value(index), at))
    return found


def _fired(ranked: _Ranked, windows: _Windows) -> Counter[Row]:
    places = [("i", "value").index(name) for name in ranked.by]
    rows: Counter[Row] = Counter()
    for (key, end), records in windows.items():
        first = sorted(records, key=lambda record: [record[place] for place in places], reverse=ranked.descending)[: ranked.n]
        bounds = (end - ranked.windows.size_ms) * 1_000, end * 1_000
        rows.update((i, key, value, at, *bounds, rank) for rank, (i, value, at) in enumerate(first, 1))
    return rows


def _rows(ranked: _Ranked, drained: Drained = ()) -> Counter[Row]:
    """A drain fires what it finds: a window that it cuts in two has its first rows twice."""
    rows: Counter[Row] = Counter()
    for segment in in_segments(ranked.feeds, drained):
        rows.update(_fired(ranked, _windows(ranked, segment)))
    return rows


def _emitted_at(ranked: _Ranked, positions: Positions, drained: Drained, held: CutStates) -> Counter[Row]:
    """All windows in front of a cut but those whose rows the state has."""
    rows: Counter[Row] = Counter()
    *before, last = (_windows(ranked, segment) for segment in in_segments(ranked.feeds, drained, positions))
    waiting = {(key, end) for key, end, _ in held.get("rows", {})}
    for windows in (*before, {window: records for window, records in last.items() if window not in waiting}):
        rows.update(_fired(ranked, windows))
    return rows


WORKLOAD = Workload("window_top", "keeps the first rows of each key and window, tumbling or sliding, of two skewed sources", make)
