"""Window joins and cogroups of two sources, and lookups of one: each pair once in each window, each record of a window once.

Windows fire in slices of a few rows, so that barriers fall between them, and between the partners of one record: rows that are
emitted twice, or that leave the state before they are emitted, give other rows at a cut or at the end. Where many records come
too late, which of them do depends on the order of arrival: each is then looked for by its number."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, in_segments, joined_row, no_states
from holdfast.chaos.workloads.lookups import make as make_lookups
from holdfast.chaos.workloads.scenario import (
    AccountsExpectation,
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
from holdfast.operators.functions.joins.output import How
from holdfast.operators.functions.joins.windowed import JoinWindows, WindowedOperator
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.bounds import TimeWindow
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH = "/out/window-joins"
SIDES = ("left", "right")
STATES = (*SIDES, "begun")
SLICES_MAX = 300
"""Of one window: records behind its watermark wait for all of them, and so does a barrier behind those, which in some of these jobs
has 2 s. A firing that takes longer keeps a job from ever completing a checkpoint, as in Flink: a restored job begins it anew."""
NUMBERS = {"key": int, "start": int, "end": int, "left": str, "right": str}


class Group(NamedTuple):
    """The records of one key and window, as indices in their feeds."""

    key: int
    start: int
    end: int
    records: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Windowed:
    """Both sources, and how they are joined."""

    feeds: tuple[Feed, Feed]
    window: JoinWindows
    how: How
    """Of a cogroup "full"."""
    is_grouped: bool
    late_outputs: tuple[bool, bool] = (False, False)
    bound_ms: int = 0
    """How far records may come behind others without being late, ms."""

    def keeps(self, side: int) -> bool:
        return self.how in (SIDES[side], "full")


def make(rng: random.Random) -> Scenario:
    kind = rng.choice(("exact", "exact", "exact", "late", "lookup"))
    if kind == "lookup":
        return make_lookups(rng)
    return _late(rng) if kind == "late" else _exact(rng)


def numbers(key: int, window: TimeWindow, left: list[dict[str, int]], right: list[dict[str, int]]) -> Iterator[dict[str, Any]]:
    """Whose records a window has."""
    texts = (" ".join(map(str, sorted(row["i"] for row in side))) for side in (left, right))
    yield dict(zip(NUMBERS, (key, window.start, window.end, *texts), strict=True))


# -------------------------------------------------------------------------------------------------------- nothing is late


def _exact(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, of which one is ahead of the other."""
    keys, disorder_ms, step_ms = rng.choice((1, 4, 12)), rng.choice((0, 3, 15, 60)), rng.choice((1, 1, 2, 4))
    starts_ms = 10_000, 10_000 + rng.choice((-100, 0, 50))
    feeds = (
        Feed("left-in", rng.randint(50, 140), keys, 0, starts_ms[0], step_ms, disorder_ms),
        Feed("right-in", rng.randint(50, 140), keys, 1_000_000, starts_ms[1], step_ms, disorder_ms),
    )
    size_ms = rng.choice((7, 20, 50))
    windows: tuple[JoinWindows, ...] = (
        Tumbling(size_ms),
        Sliding(size_ms, max(1, size_ms // 3)),
        Sliding(size_ms, size_ms + 5),
        Session(rng.choice((1, 2, 4)) * keys * step_ms),
        Session(rng.choice((1, 2, 4)) * keys * step_ms),
    )
    hows: tuple[How, ...] = ("inner", "left", "right", "full", "full")
    is_grouped = rng.random() < 0.3
    joined = Windowed(feeds, rng.choice(windows), "full" if is_grouped else rng.choice(hows), is_grouped, bound_ms=disorder_ms)
    drawn = _Drawn.of(rng, joined)
    uids, rows = tuple(feed.uid for feed in feeds), partial(_rows, joined)
    emitted = Emitted("joined", STATES[:2] if is_grouped else STATES, partial(_emitted_at, joined))
    return Scenario(
        plan=partial(_plan, joined, drawn),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "joined-out", rows, after_drains=rows, emitted=emitted),),
        operators=("joined",),
        cuts=(CutExpectation(uids, "joined", partial(no_states, feeds)),),
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    paces: tuple[tuple[float, int], ...]
    slice_rows: int
    parallelism: int
    settings: dict[str, Any]

    @staticmethod
    def of(rng: random.Random, joined: Windowed) -> _Drawn:
        paces = tuple(draw_pace(rng, feed.rows) for feed in joined.feeds)
        slice_rows = max(rng.choice((1, 2, 5, 8192)), math.ceil(_results_max(joined) / SLICES_MAX))
        return _Drawn(paces, slice_rows, rng.randint(1, PARALLELISM_MAX), draw_settings(rng))


def _results_max(joined: Windowed) -> int:
    """Of one window, over all keys, if no record is late."""
    of_end: Counter[int] = Counter()
    for group in _groups(joined, {feed.uid: range(feed.rows) for feed in joined.feeds}):
        of_end[group.end] += len(_of_group(joined, group))
    return max(of_end.values(), default=0)


def _plan(joined: Windowed, drawn: _Drawn, parallelism: int | None) -> JobPlan:
    environment = Environment("window-joins", parallelism=parallelism or drawn.parallelism, **drawn.settings)
    left, right = (_timed(environment, joined, feed, pace) for feed, pace in zip(joined.feeds, drawn.paces, strict=True))
    tags = {f"late_{side}": side for side, is_read in zip(SIDES, joined.late_outputs, strict=True) if is_read}
    if joined.is_grouped:
        found = left.cogroup(right, numbers, on="key", window=joined.window, returns=NUMBERS, **tags)
    else:
        names = ("", "_right")
        found = left.window_join(right, on="key", window=joined.window, how=joined.how, suffixes=names, **tags)
    found.uid("joined").sink_to(ParquetSink(PATH), uid="joined-out")
    for tag in tags.values():
        found.side_output(tag).sink_to(ParquetSink(f"{PATH}-{tag}"), uid=tag)
    plan = environment.build()
    for operator in plan.operators.values():
        if isinstance(operator, WindowedOperator):
            operator.rows_per_slice_max = drawn.slice_rows
    return plan


def _timed(environment: Environment, joined: Windowed, feed: Feed, pace: tuple[float, int]) -> Stream:
    source = environment.from_source(feed.source(*pace)).uid(feed.uid)
    return source.assign_timestamps("at", max_out_of_orderness_ms=joined.bound_ms).uid(f"{feed.uid}-times")


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _rows(joined: Windowed, drained: Drained = ()) -> Counter[Row]:
    """A drain fires all windows: what is read behind it finds nothing of what was before."""
    rows: Counter[Row] = Counter()
    for segment in in_segments(joined.feeds, drained):
        for group in _groups(joined, segment):
            rows.update(_of_group(joined, group))
    return rows


def _groups(joined: Windowed, indices: Mapping[str, Iterable[int]]) -> list[Group]:
    found: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    of_key: dict[int, list[tuple[int, int, int]]] = {}
    for side, feed in enumerate(joined.feeds):
        for index in indices[feed.uid]:
            of_key.setdefault(feed.key(index), []).append((feed.at(index), side, index))
    for key, records in of_key.items():
        for start, end, (_, side, index) in _windows(joined.window, sorted(records)):
            found.setdefault((key, start, end), ([], []))[side].append(index)
    return [Group(*bounds, (tuple(left), tuple(right))) for bounds, (left, right) in found.items()]


def _windows(
    window: JoinWindows, records: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """(start, end, record) for each window of each record of a key; they are given by time."""
    if not isinstance(window, Session):
        slide_ms = window.slide_ms if isinstance(window, Sliding) else window.size_ms
        for record in records:
            for start in range(record[0] - record[0] % slide_ms, record[0] - window.size_ms, -slide_ms):
                yield start, start + window.size_ms, record
        return
    cuts = [place for place in range(1, len(records)) if records[place][0] - records[place - 1][0] > window.gap_ms]
    for first, behind in zip([0, *cuts], [*cuts, len(records)], strict=True):
        for record in records[first:behind]:
            yield records[first][0], records[behind - 1][0] + window.gap_ms, record


def _of_group(joined: Windowed, group: Group) -> list[Row]:
    lefts, rights = group.records
    if joined.is_grouped:
        return [_numbers(joined, group)]
    if lefts and rights:
        return [joined_row(joined.feeds, left, right) for left in lefts for right in rights]
    return [joined_row(joined.feeds, *lone) for side in (0, 1) if joined.keeps(side) for lone in _lone(side, group.records[side])]


def _lone(side: int, indices: Iterable[int]) -> list[tuple[int | None, int | None]]:
    return [(None, index) if side else (index, None) for index in indices]


def _numbers(joined: Windowed, group: Group) -> Row:
    texts = (
        " ".join(str(feed.first + index) for index in sorted(indices))
        for feed, indices in zip(joined.feeds, group.records, strict=True)
    )
    return (group.key, group.start, group.end, *texts)


def _emitted_at(joined: Windowed, positions: Positions, drained: Drained, held: CutStates) -> Counter[Row]:
    """All of what is in front of a cut, but of windows what their state still has."""
    *before, last = in_segments(joined.feeds, drained, positions)
    rows: Counter[Row] = Counter()
    for segment in before:
        for group in _groups(joined, segment):
            rows.update(_of_group(joined, group))
    kept = [_kept(joined, side, held) for side in (0, 1)]
    begun = {(key, end): row["after"] for (key, end, _), row in held.get("begun", {}).items()}
    for group in _groups(joined, last):
        rows.update(_emitted_of(joined, group, kept, begun))
    return rows


def _kept(joined: Windowed, side: int, held: CutStates) -> dict[tuple[int, int], dict[int, int]]:
    """(key, end of the window, or 0 for all sessions) -> records of a side that the state has -> their order."""
    is_session, first = isinstance(joined.window, Session), joined.feeds[side].first
    found: dict[tuple[int, int], dict[int, int]] = {}
    for (key, end, order), row in held.get(SIDES[side], {}).items():
        found.setdefault((key, 0 if is_session else end), {})[row["i"] - first] = order
    return found


def _emitted_of(
    joined: Windowed,
    group: Group,
    kept: Sequence[Mapping[tuple[int, int], Mapping[int, int]]],
    begun: Mapping[tuple[int, int], int],
) -> list[Row]:
    where = group.key, 0 if isinstance(joined.window, Session) else group.end
    left, right = (
        {index: of_side.get(where, {})[index] for index in indices if index in of_side.get(where, {})}
        for of_side, indices in zip(kept, group.records, strict=True)
    )
    lefts, rights = group.records
    if joined.is_grouped:
        return [] if left or right else [_numbers(joined, group)]
    if not lefts or not rights:
        gone = ([index for index in lefts if index not in left], [index for index in rights if index not in right])
        return [joined_row(joined.feeds, *lone) for side in (0, 1) if joined.keeps(side) for lone in _lone(side, gone[side])]
    rows = [joined_row(joined.feeds, index, partner) for index in lefts if index not in left for partner in rights]
    if left and (after := begun.get((group.key, group.end))) is not None:
        first = min(left, key=lambda index: left[index])
        rows += [joined_row(joined.feeds, first, partner) for partner in rights if right.get(partner, after) <= after]
    return rows


# ---------------------------------------------------------------------------------------------------------- many are late


def _late(rng: random.Random) -> Scenario:
    """More disorder than watermarks allow for."""
    keys, disorder_ms, step_ms = rng.choice((1, 4)), rng.choice((60, 150)), rng.choice((1, 2))
    feeds = (
        Feed("left-in", rng.randint(50, 140), keys, 0, 10_000, step_ms, disorder_ms),
        Feed("right-in", rng.randint(50, 140), keys, 1_000_000, 10_000, step_ms, disorder_ms),
    )
    is_grouped = rng.random() < 0.5
    window = rng.choice((Tumbling(10), Tumbling(30), Session(3 * keys)) if is_grouped else (Tumbling(10), Tumbling(30)))
    outputs = rng.random() < 0.7, rng.random() < 0.7
    joined = Windowed(feeds, window, "full", is_grouped, outputs, bound_ms=rng.choice((0, 5, 20)))
    drawn = _Drawn.of(rng, joined)
    late = [SinkExpectation(f"{PATH}-{side}", side, None) for side, is_read in zip(SIDES, outputs, strict=True) if is_read]
    return Scenario(
        plan=partial(_plan, joined, drawn),
        records=sum(feed.rows for feed in feeds),
        sinks=(SinkExpectation(PATH, "joined-out", None), *late),
        operators=("joined",),
        cuts=(CutExpectation(tuple(feed.uid for feed in feeds), "joined", partial(no_states, feeds)),),
        accounts=AccountsExpectation("joined", partial(_problem, joined)),
        may_rescale_in_flight=False,
        may_drain=False,
    )


def _problem(joined: Windowed, rows: Mapping[str, Sequence[Row]], dropped: int) -> str | None:
    """Each record is in one place, and a window has all pairs of its records."""
    found: Counter[int] = Counter()
    if joined.is_grouped:
        for *_, left, right in rows["joined-out"]:
            found.update(int(number) for number in f"{left} {right}".split())
    else:
        problem = _missing_pairs(joined, rows["joined-out"])
        if problem is not None:
            return problem
        found.update({number for row in rows["joined-out"] for number in (row[1], row[4]) if number is not None})
    found.update(row[0] for side in SIDES for row in rows.get(side, ()))
    doubled = sorted(number for number, count in found.items() if count > 1)
    if doubled:
        return f"the records {doubled[:10]} are in two results, or in one and in the late output"
    missing = {feed.first + index for feed in joined.feeds for index in range(feed.rows)} - found.keys()
    if len(missing) != dropped:
        return f"{len(missing)} records are nowhere ({sorted(missing)[:10]}); {dropped} are counted as late"
    return None


def _missing_pairs(joined: Windowed, rows: Sequence[Row]) -> str | None:
    assert isinstance(joined.window, Tumbling)
    windows: dict[tuple[int, int], Counter[tuple[int | None, int | None]]] = {}
    for key, left, _, left_at, right, _, right_at in rows:
        at = right_at if left_at is None else left_at
        windows.setdefault((key, at // joined.window.size_ms), Counter())[left, right] += 1
    for where, pairs in windows.items():
        lefts, rights = ({pair[side] for pair in pairs} for side in (0, 1))
        if pairs != Counter((left, right) for left in lefts for right in rights):
            return f"the pairs of key and window {where} are {sorted(pairs.items(), key=str)[:10]}"
    return None


WORKLOAD = Workload("window_joins", "joins two sources by windows, groups them, or looks up what is known of a key", make)
