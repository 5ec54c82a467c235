"""A temporal join of two sources: each record of one takes the version of its key, of the other, that is valid at its event time.

Which one that is, is decided when both sources have passed the record's time: a version that is dropped while a record that
needs it waits, event time that runs ahead with one input, or a cut that is not the same of both gives other rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, in_segments, no_states
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
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.joins.temporal import ROWS_PER_SLICE_MAX, TemporalJoinOperator
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/versions"

Sides = tuple[Feed, Feed]
"""What asks, and its versions."""


def make(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, of which one is ahead of the other; nothing is late.

    No two versions have one event time: which of them holds would be a matter of arrival."""
    keys, disorder_ms = rng.choice((1, 4, 12)), rng.choice((0, 15, 60))
    start_ms, step_ms = 10_000 + rng.choice((-400, 0, 300)), rng.randint(2, 16)
    sides = (
        Feed("asking", rng.randint(100, 300), keys, 0, 10_000, rng.randint(1, 4), disorder_ms),
        Feed("asked", rng.randint(40, 120), keys, 1_000_000, start_ms, step_ms, min(disorder_ms, step_ms - 1)),
    )
    paces = tuple(draw_pace(rng, feed.rows) for feed in sides)
    parallelism, how = rng.randint(1, PARALLELISM_MAX), rng.choice(("inner", "left"))
    slice_rows = rng.choice((1, 2, 5, ROWS_PER_SLICE_MAX))
    settings = draw_settings(rng)
    uids, rows = tuple(feed.uid for feed in sides), partial(_rows, sides, how)
    emitted = Emitted("versions", ("waiting",), partial(_emitted_at, sides, how))
    return Scenario(
        plan=partial(_plan, sides, paces, how, slice_rows, parallelism, settings),
        records=sum(feed.rows for feed in sides),
        sinks=(SinkExpectation(PATH, "found", rows, after_drains=rows, emitted=emitted),),
        operators=("versions",),
        cuts=(CutExpectation(uids, "versions", partial(no_states, sides)),),
    )


def _plan(
    sides: Sides, paces: Any, how: Any, slice_rows: int, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("versions", parallelism=parallelism or drawn, **settings)
    asking, asked = (_timed(environment, feed, pace) for feed, pace in zip(sides, paces, strict=True))
    found = asking.temporal_join(asked, on="key", how=how, suffixes=("", "_found")).uid("versions")
    found.sink_to(ParquetSink(PATH), uid="found")
    plan = environment.build()
    for operator in plan.operators.values():
        if isinstance(operator, TemporalJoinOperator):
            operator.rows_per_slice_max = slice_rows
    return plan


def _timed(environment: Environment, feed: Feed, pace: tuple[float, int]) -> Stream:
    source = environment.from_source(feed.source(*pace)).uid(feed.uid)
    return source.assign_timestamps("at", max_out_of_orderness_ms=feed.disorder_ms).uid(f"{feed.uid}-times")


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _rows(sides: Sides, how: str, drained: Drained = ()) -> Counter[Row]:
    """A drain asks for all that waits, and what is read behind it is not known then."""
    return Counter(row for segment in _found_in(sides, how, in_segments(sides, drained)) for row in segment.values() if row)


def _emitted_at(sides: Sides, how: str, positions: Positions, drained: Drained, held: CutStates) -> Counter[Row]:
    """All that was asked in front of a cut but what waits in its state."""
    *before, last = _found_in(sides, how, in_segments(sides, drained, positions))
    rows = Counter(row for segment in before for row in segment.values() if row)
    waiting = {stored["i"] for stored in held["waiting"].values()}
    rows.update(row for i, row in last.items() if row and i not in waiting)
    return rows


def _found_in(sides: Sides, how: str, segments: list[dict[str, list[int]]]) -> Iterator[dict[int, Row | None]]:
    """Of each segment `i` of what asks -> its row, if it has one, with the versions of it and of those before."""
    asking, asked = sides
    known: dict[int, list[tuple[int, int]]] = {}
    for segment in segments:
        for index in segment[asked.uid]:
            known.setdefault(asked.key(index), []).append((asked.at(index), index))
        yield {asking.first + index: _found(sides, how, index, known) for index in segment[asking.uid]}


def _found(sides: Sides, how: str, index: int, known: Mapping[int, list[tuple[int, int]]]) -> Row | None:
    asking, asked = sides
    at = asking.at(index)
    own = (asking.key(index), asking.first + index, asking.value(index), at)
    passed = [version for version in known.get(asking.key(index), []) if version[0] <= at]
    if not passed:
        return (*own, None, None, None) if how == "left" else None
    found_at, found = max(passed)
    return (*own, asked.first + found, asked.value(found), found_at)


WORKLOAD = Workload("versions", "joins two sources by key: each record with the other's version that is valid at its time", make)
