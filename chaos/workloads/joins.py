"""An interval join of two sources: each pair once, each row without a partner once, whatever is cut between.

Pairs are made when the second row comes, rows without a partner come when none can follow: a buffer that is cleaned early, a pair
that is made on both sides of a cut, or event time that runs ahead with one input gives other rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, in_segments, joined_row, no_states
from holdfast.chaos.workloads.scenario import (
    Cleanup,
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
from holdfast.operators.functions.joins.interval import PAIRS_PER_SLICE_MAX, ROWS_PER_SLICE_MAX, IntervalJoinOperator
from holdfast.operators.functions.joins.output import How
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/joins"
SIDES = ("left", "right")
STATES = tuple(f"{side}{table}" for side in SIDES for table in ("", "_pending", "_unmatched"))
Indices = Mapping[str, Iterable[int]]


@dataclass(frozen=True, slots=True)
class Joined:
    """Both sources, and how they are joined."""

    feeds: tuple[Feed, Feed]
    lower_ms: int
    upper_ms: int
    how: How

    @property
    def partners(self) -> tuple[int, int]:
        """Of each side: how far behind a row its last partner may be, ms."""
        return self.upper_ms, -self.lower_ms

    def keeps(self, side: int) -> bool:
        return self.how in (SIDES[side], "full")


def make(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, of which one is ahead of the other; nothing is late."""
    keys, disorder_ms, step_ms = rng.choice((1, 4, 12)), rng.choice((1, 3, 15, 60)), rng.choice((1, 1, 2, 4))
    start_ms = 10_000 + rng.choice((-100, 0, 50))
    feeds = (
        Feed("left-in", rng.randint(60, 160), keys, 0, 10_000, step_ms, disorder_ms),
        Feed("right-in", rng.randint(60, 160), keys, 1_000_000, start_ms, step_ms, disorder_ms),
    )
    hows: tuple[How, ...] = ("inner", "left", "right", "full", "full")
    joined = Joined(feeds, *rng.choice(((0, 0), (-10, 20), (-30, -10), (10, 30), (0, 40))), rng.choice(hows))
    paces = tuple(draw_pace(rng, feed.rows) for feed in feeds)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    slices = rng.choice((8, 30, PAIRS_PER_SLICE_MAX)), rng.choice((1, 3, ROWS_PER_SLICE_MAX))
    settings = draw_settings(rng)
    uids, rows = tuple(feed.uid for feed in feeds), partial(_rows, joined)
    emitted = Emitted("joined", STATES, partial(_emitted_at, joined))
    cleanup = Cleanup(STATES, partial(_kept_too_long, joined))
    return Scenario(
        plan=partial(_plan, joined, paces, slices, parallelism, settings),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "pairs", rows, after_drains=rows, emitted=emitted),),
        operators=("joined",),
        cuts=(CutExpectation(uids, "joined", partial(no_states, feeds), cleanup=cleanup),),
    )


def _plan(
    joined: Joined, paces: Any, slices: tuple[int, int], drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("joins", parallelism=parallelism or drawn, **settings)
    left, right = (_timed(environment, feed, pace) for feed, pace in zip(joined.feeds, paces, strict=True))
    pairs = left.interval_join(
        right, on="key", lower=joined.lower_ms, upper=joined.upper_ms, how=joined.how, suffixes=("", "_right")
    )
    pairs.uid("joined").sink_to(ParquetSink(PATH), uid="pairs")
    plan = environment.build()
    for operator in plan.operators.values():
        if isinstance(operator, IntervalJoinOperator):
            operator.pairs_per_slice_max, operator.rows_per_slice_max = slices
    return plan


def _timed(environment: Environment, feed: Feed, pace: tuple[float, int]) -> Stream:
    source = environment.from_source(feed.source(*pace)).uid(feed.uid)
    # as exact as can be: a record may come when the watermark is 1 ms behind it
    bound_ms = max(0, feed.disorder_ms - feed.step_ms)
    return source.assign_timestamps("at", max_out_of_orderness_ms=bound_ms).uid(f"{feed.uid}-times")


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _rows(joined: Joined, drained: Drained = ()) -> Counter[Row]:
    """A drain lets out all that waits: what is read behind it finds nothing of what was before."""
    rows: Counter[Row] = Counter()
    for segment in in_segments(joined.feeds, drained):
        pairs = _pairs(joined, segment)
        rows.update(joined_row(joined.feeds, *pair) for pair in pairs)
        rows.update(joined_row(joined.feeds, *lone) for side in (0, 1) for lone in _without(joined, side, segment, pairs))
    return rows


def _pairs(joined: Joined, indices: Indices) -> set[tuple[int, int]]:
    left, right = joined.feeds
    of_key: dict[int, list[int]] = {}
    for index in indices[right.uid]:
        of_key.setdefault(right.key(index), []).append(index)
    return {
        (one, other)
        for one in indices[left.uid]
        for other in of_key.get(left.key(one), ())
        if joined.lower_ms <= right.at(other) - left.at(one) <= joined.upper_ms
    }


def _without(joined: Joined, side: int, indices: Indices, pairs: set[tuple[int, int]]) -> list[tuple[int | None, int | None]]:
    """Rows of a side that come out without a partner."""
    if not joined.keeps(side):
        return []
    matched = {pair[side] for pair in pairs}
    lone = [index for index in indices[joined.feeds[side].uid] if index not in matched]
    return [(None, index) if side else (index, None) for index in lone]


def _emitted_at(joined: Joined, positions: Positions, drained: Drained, held: CutStates) -> Counter[Row]:
    """All of what is in front of a cut, but pairs that wait to be made, and rows that wait for a partner."""
    *before, last = in_segments(joined.feeds, drained, positions)
    rows: Counter[Row] = Counter()
    for segment in before:
        pairs = _pairs(joined, segment)
        rows.update(joined_row(joined.feeds, *pair) for pair in pairs)
        rows.update(joined_row(joined.feeds, *lone) for side in (0, 1) for lone in _without(joined, side, segment, pairs))
    pairs = _pairs(joined, last)
    rows.update(joined_row(joined.feeds, *pair) for pair in pairs - _unmade(joined, held))
    for side in (0, 1):
        waiting = _waiting(joined, side, held)
        rows.update(joined_row(joined.feeds, *lone) for lone in _without(joined, side, last, pairs) if lone[side] not in waiting)
    return rows


def _unmade(joined: Joined, held: CutStates) -> set[tuple[int, int]]:
    """Pairs of rows that wait, with rows of the other buffer behind the order that they have come to, and with each other."""
    found: set[tuple[int, int]] = set()
    for side in (0, 1):
        other = joined.feeds[1 - side]
        for (key, *_), row in held.get(f"{SIDES[side]}_pending", {}).items():
            own = row["i"] - joined.feeds[side].first
            buffered = held.get(SIDES[1 - side], {}).items()
            partners = [each["i"] for (its, _, order), each in buffered if its == key and order > row["after"]]
            partners += [each["i"] for (its, *_), each in held.get(f"{SIDES[1 - side]}_pending", {}).items() if its == key]
            found.update((i - other.first, own) if side else (own, i - other.first) for i in partners)
    return found


def _waiting(joined: Joined, side: int, held: CutStates) -> set[int]:
    """Rows of a side that have no partner yet."""
    name, first = SIDES[side], joined.feeds[side].first
    orders = {(key, order) for key, _, order in held.get(f"{name}_unmatched", {})}
    found = {row["i"] - first for (key, _, order), row in held.get(name, {}).items() if (key, order) in orders}
    return found | {row["i"] - first for row in held.get(f"{name}_pending", {}).values()}


def _kept_too_long(joined: Joined, held: CutStates, watermark_ms: int) -> str | None:
    """While rows are being let out, or pairs made, cleaning waits."""
    dues = [watermark_ms - partners for partners in joined.partners]
    for name, due in zip(SIDES, dues, strict=True):
        unmatched = held.get(f"{name}_unmatched", {}).values()
        if held.get(f"{name}_pending") or any(row["time"] <= due for row in unmatched):
            return None
    for name, due in zip(SIDES, dues, strict=True):
        for row in held.get(name, {}).values():
            if row["time"] <= due:
                return f"{name} keeps {row}, for which no partner can follow since the watermark {watermark_ms}"
    return None


WORKLOAD = Workload("joins", "pairs the records of two sources whose times are close, and those without a partner", make)
