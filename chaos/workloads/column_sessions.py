"""Two sources whose event times are skewed, a union, and sessions of each key, of panes that are folded as event time goes on."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import in_segments
from holdfast.chaos.workloads.scenario import Drained, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.chaos.workloads.windows import Feeds, Paces, draw_skewed_feeds, timed_streams
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions import aggregates
from holdfast.operators.functions.windows.assigners import Session
from holdfast.operators.functions.windows.columnar import FIRED_ROWS_PER_SLICE_MAX
from holdfast.operators.functions.windows.columnar_sessions import SessionWindowOperator
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/column_sessions"


def make(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, and gaps with many sessions or few; nothing is ever late."""
    feeds, paces = draw_skewed_feeds(rng)
    parallelism, gap_ms = rng.randint(1, PARALLELISM_MAX), rng.choice((3, 10, 30, 80))
    settings, slice_rows = draw_settings(rng), rng.choice((1, 2, 5, FIRED_ROWS_PER_SLICE_MAX))
    rows = partial(_rows, feeds, gap_ms)
    return Scenario(
        plan=partial(_plan, feeds, paces, gap_ms, slice_rows, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "windowed", rows, after_drains=rows),),
        operators=("window",),
    )


def _plan(
    feeds: Feeds, paces: Paces, gap_ms: int, slice_rows: int, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("column_sessions", parallelism=parallelism or drawn, **settings)
    windowed = timed_streams(environment, feeds, paces).key_by("key").window(Session(gap_ms))
    counts = windowed.aggregate(
        n=aggregates.count(), total=aggregates.sum("value"), most=aggregates.max("value"), values=aggregates.count_distinct("value")
    )
    counts.uid("window").sink_to(ParquetSink(PATH), uid="windowed")
    plan = environment.build()
    for operator in plan.operators.values():
        if isinstance(operator, SessionWindowOperator):
            operator.rows_per_slice_max = slice_rows
    return plan


def _rows(feeds: Feeds, gap_ms: int, drained: Drained = ()) -> Counter[Row]:
    """A drain fires what it finds: a session that it cuts in two gives two rows."""
    rows: Counter[Row] = Counter()
    for segment in in_segments(feeds, drained):
        records: dict[int, list[tuple[int, int]]] = {}
        for feed in feeds:
            for index in segment[feed.uid]:
                records.setdefault(feed.key(index), []).append((feed.at(index), feed.value(index)))
        for key, found in records.items():
            session: list[tuple[int, int]] = []
            for record in [*sorted(found), None]:
                if session and (record is None or record[0] - session[-1][0] > gap_ms):
                    rows[_row(key, session, gap_ms)] += 1
                    session = []
                if record is not None:
                    session.append(record)
    return rows


def _row(key: int, session: list[tuple[int, int]], gap_ms: int) -> Row:
    values = [value for _, value in session]
    start, end = session[0][0], session[-1][0] + gap_ms
    return key, start * 1_000, end * 1_000, len(values), sum(values), max(values), len(set(values))


WORKLOAD = Workload("column_sessions", "unites two skewed sources and aggregates sessions, which are merged from panes", make)
