"""Sessions of row functions over a source of which some records come too late for any session, and some just in time for one.

Which ones depends on positions alone. The source has one subtask, so that each key's records come in turn, and a watermark reaches
a session at its place among them. How far event time is at a record depends on the path to it: a barrier between a batch and its
watermark cuts the watermark off, once in each attempt. A record is given such a time that its session takes it, or refuses it,
both for the lowest and for the highest watermark that there may be: late ones lie far behind, tardy ones in a session that can't be
gone, some of them by a single ms."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.chaos.pipelines.judging import LOST, REPEATED, Problem
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.late import LOST_BATCHES_MAX
from holdfast.chaos.workloads.scenario import CutExpectation, CutStates, Positions, Possibly, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector
from holdfast.operators.functions.windows.assigners import Session
from holdfast.operators.functions.windows.row_functions import ProcessWindowFunction, WindowContext
from holdfast.operators.functions.windows.triggers import CountTrigger
from holdfast.operators.sinks.files.parquet import ParquetSink

PATH, LATE_PATH = "/out/sessions", "/out/sessions-late"

LATE_EVERY, TARDY_EVERY = 9, 3
LATE_TRIES = 40
"""Distances behind its turn that are tried for a late record."""


class Span(NamedTuple):
    """A session of one key: [start, end), and of its records how many and their total."""

    start: int
    end: int
    n: int
    total: int


@dataclass(frozen=True, slots=True)
class SessionFeed(Feed):
    """Times of its records are worked out one by one when it is made."""

    gap_ms: int = 1
    lateness_ms: int = 0
    batch_rows: int = 1
    """Most records between two watermarks."""
    times: tuple[int, ...] = ()
    late: frozenset[int] = frozenset()
    """Records that no session takes."""

    def at(self, index: int) -> int:
        return self.times[index]

    def make_batch(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        batch = Feed.make_batch(self, indices)
        times = pa.array([self.times[int(index)] for index in indices], pa.int64())
        return batch.set_column(batch.schema.get_field_index("at"), batch.schema.field("at"), times)

    def cleanup(self, end: int) -> int:
        """Watermark at which the state of a session goes."""
        return end - 1 + self.lateness_ms


def spans(feed: SessionFeed, indices: Iterable[int]) -> dict[int, list[Span]]:
    """Key -> its sessions over these records, by start. In which order they come makes no difference."""
    found: dict[int, list[Span]] = {}
    for index in indices:
        if index not in feed.late:
            own = Span(feed.at(index), feed.at(index) + feed.gap_ms, 1, feed.value(index))
            found[feed.key(index)] = _with(found.get(feed.key(index), []), own)
    return found


def _touching(some: Iterable[Span], start: int, end: int) -> list[Span]:
    """Of sessions that are apart from each other, those that [start, end) makes one."""
    return [span for span in some if span.start <= end and span.end >= start]


def _with(some: list[Span], own: Span) -> list[Span]:
    inside = [*_touching(some, own.start, own.end), own]
    merged = Span(
        min(span.start for span in inside),
        max(span.end for span in inside),
        sum(span.n for span in inside),
        sum(span.total for span in inside),
    )
    return sorted([*(span for span in some if span not in inside), merged])


# --------------------------------------------------------------------------------------------------------- the source's times


@dataclass
class _Timing:
    """Gives each record its time, in turn."""

    feed: SessionFeed
    times: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)
    """Watermark behind each record, at most."""

    def give(self, index: int, roll: int) -> None:
        feed = self.feed
        turn = feed.start_ms + index * feed.step_ms
        high = self.passed[-1] if self.passed else -(2**62)
        low_index = index - (LOST_BATCHES_MAX + 1) * feed.batch_rows
        low = self.passed[low_index] if low_index >= 0 else -(2**62)
        at = self._chosen(feed.key(index), index, turn, roll, (low, high))
        if at is None:  # in turn
            at = turn + (roll >> 9) % (feed.disorder_ms + 1)
        if index not in self.late:
            own = Span(at, at + feed.gap_ms, 1, 0)
            self.spans[feed.key(index)] = _with(self.spans.get(feed.key(index), []), own)
        self.times.append(at)
        self.passed.append(max(high, at - feed.disorder_ms - 1))

    def _chosen(self, key: int, index: int, turn: int, roll: int, bounds: tuple[int, int]) -> int | None:
        feed, (low, high) = self.feed, bounds
        if roll % LATE_EVERY == 0:
            for tried in range(LATE_TRIES):
                at = turn - feed.gap_ms - feed.lateness_ms - (roll >> 7) % 50 - tried * feed.gap_ms
                if feed.cleanup(self._end(key, at)) <= low:
                    self.late.add(index)
                    return at
        if roll % TARDY_EVERY == 0 and high > 0:
            just_in_time = high + 2 - feed.gap_ms - feed.lateness_ms
            deep = turn - (roll >> 6) % (4 * feed.gap_ms)
            for at in (just_in_time, deep) if index % feed.batch_rows == 0 else (deep, just_in_time):
                if at <= turn and self._is_taken(key, at, high):
                    return at
        return None

    def _end(self, key: int, at: int) -> int:
        return max([at + self.feed.gap_ms, *(span.end for span in self._touched(key, at))])

    def _touched(self, key: int, at: int) -> list[Span]:
        return _touching(self.spans.get(key, []), at, at + self.feed.gap_ms)

    def _is_taken(self, key: int, at: int, high: int) -> bool:
        """A record at this time is in time, and no session that it touches can be gone."""
        ends = [self._end(key, at), *(span.end for span in self._touched(key, at))]
        return all(self.feed.cleanup(end) > high for end in ends)


def session_feed(rng: random.Random) -> SessionFeed:
    rows, batch_rows, keys, step_ms = rng.randint(200, 450), rng.choice((3, 5, 10)), rng.choice((1, 3, 8)), rng.randint(2, 5)
    disorder_ms, lateness_ms = rng.choice((0, 8, 25)), rng.choice((0, 0, 15, 60))
    gap_ms = rng.choice((1, 2, 4)) * keys * step_ms
    empty = SessionFeed(
        *("visits", rows, keys, 0, 10_000, step_ms, disorder_ms),
        gap_ms=gap_ms, lateness_ms=lateness_ms, batch_rows=batch_rows,
    )  # fmt: skip
    timing = _Timing(empty)
    for index in range(rows):
        timing.give(index, rng.getrandbits(24))
    made = {name: getattr(empty, name) for name in SessionFeed.__dataclass_fields__}
    return SessionFeed(**{**made, "times": tuple(timing.times), "late": frozenset(timing.late)})


# ------------------------------------------------------------------------------------------------------------------ the job


class Totals(ProcessWindowFunction):
    """Bounds, number and total of a session's records."""

    returns = {"key": int, "start": int, "end": int, "n": int, "total": int}  # noqa: RUF012 - the contract's class attribute

    def process(self, key: int, ctx: WindowContext, elements: list[Any], out: Collector) -> None:
        n, total = len(elements), sum(row["value"] for row in elements)
        out({"key": key, "start": ctx.window.start, "end": ctx.window.end, "n": n, "total": total})


class Summed(Totals):
    """The same of what NumberAndTotal has made of them."""

    def process(self, key: int, ctx: WindowContext, elements: list[Any], out: Collector) -> None:
        n, total = elements[0]
        out({"key": key, "start": ctx.window.start, "end": ctx.window.end, "n": n, "total": total})


class NumberAndTotal:
    """An AggregateFunction."""

    def create_accumulator(self) -> tuple[int, int]:
        return 0, 0

    def add(self, value: dict[str, int], accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator[0] + 1, accumulator[1] + value["value"]

    def get_result(self, accumulator: tuple[int, int]) -> tuple[int, int]:
        return accumulator

    def merge(self, left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        return left[0] + right[0], left[1] + right[1]


def make(rng: random.Random) -> Scenario:
    """One feed; sessions that fire at their end, again for tardy records if there is lateness, or by a count."""
    feed = session_feed(rng)
    count = rng.choice((0, 0, 0, 2, 5))
    pace, parallelism, aggregates = feed.rows / rng.uniform(0.7, 1.5), rng.randint(1, PARALLELISM_MAX), rng.random() < 0.4
    settings = draw_settings(rng)
    late = partial(_late, feed, range(feed.rows))
    return Scenario(
        plan=partial(_plan, feed, pace, count, aggregates, parallelism, settings),
        records=feed.rows,
        sinks=(_fired(feed, count), SinkExpectation(LATE_PATH, "late", late, at_cut=partial(_late_at_cut, feed))),
        operators=("sessions",),
        cuts=(CutExpectation((feed.uid,), "sessions", partial(_states_at, feed)),),
        may_drain=False,
    )


def _fired(feed: SessionFeed, count: int) -> SinkExpectation:
    """With lateness, which rows come before the last one of a session depends on event time at its records."""
    if count:
        return SinkExpectation(PATH, "totals", partial(_by_count, feed, count))
    if feed.lateness_ms:
        return SinkExpectation(PATH, "totals", None, judge=partial(problem, feed))
    return SinkExpectation(PATH, "totals", partial(_at_their_end, feed))


def _plan(
    feed: SessionFeed, pace: float, count: int, aggregates: bool, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("sessions", parallelism=parallelism or drawn, **settings)
    source = environment.from_source(feed.source(pace, feed.batch_rows)).uid(feed.uid).set_parallelism(1)
    timed = source.assign_timestamps("at", max_out_of_orderness_ms=feed.disorder_ms).uid("times").set_parallelism(1)
    windowed = timed.key_by("key").window(Session(feed.gap_ms)).allowed_lateness(feed.lateness_ms).side_output_late("late")
    if count:
        windowed = windowed.trigger(CountTrigger(count))
    made = (
        windowed.aggregate(NumberAndTotal(), accumulator_type=tuple[int, int], window_function=Summed())
        if aggregates
        else windowed.process(Totals())
    )
    made = made.uid("sessions")
    made.sink_to(ParquetSink(PATH), uid="totals")
    made.side_output("late").sink_to(ParquetSink(LATE_PATH), uid="late")
    return environment.build()


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _at_their_end(feed: SessionFeed) -> Counter[Row]:
    return Counter((key, *span) for key, some in spans(feed, range(feed.rows)).items() for span in some)


def _by_count(feed: SessionFeed, count: int) -> Counter[Row]:
    """A session fires with the record that brings its count there; counts of merged ones are added."""
    rows: Counter[Row] = Counter()
    found: dict[int, list[Span]] = {}
    counted: dict[tuple[int, int], int] = {}
    for index in range(feed.rows):
        if index in feed.late:
            continue
        key, at = feed.key(index), feed.at(index)
        before = found.get(key, [])
        found[key] = _with(before, Span(at, at + feed.gap_ms, 1, feed.value(index)))
        seen = 1 + sum(counted.pop((key, span.start)) for span in _touching(before, at, at + feed.gap_ms))
        session = next(span for span in found[key] if span.start <= at < span.end)
        if seen >= count:
            rows[key, *session] += 1
            seen = 0
        counted[key, session.start] = seen
    return rows


def problem(feed: SessionFeed, rows: Sequence[Row]) -> Problem | None:
    """Of sessions that may fire for each record: their last rows are complete, no row comes twice, and none is of other bounds."""
    expected = spans(feed, range(feed.rows))
    last: dict[tuple[Any, int], Row] = {}
    seen: set[Row] = set()
    for place, row in enumerate(rows):
        key, start, end, _, _ = row
        session = next((span for span in expected.get(key, ()) if span.start <= start and end <= span.end), None)
        if session is None or row in seen:
            what = "is in no session" if session is None else "comes twice"
            return Problem(REPEATED, f"sink totals: the row {row} {what}", place)
        seen.add(row)
        last[key, session.start] = row
    for key, some in expected.items():
        for span in some:
            if last.get((key, span.start)) != (key, *span):
                return Problem(LOST, f"sink totals: the last row of {(key, *span)} is {last.get((key, span.start))}")
    return None


def _late(feed: SessionFeed, indices: Iterable[int]) -> Counter[Row]:
    return Counter(
        (feed.first + index, feed.key(index), feed.value(index), feed.at(index)) for index in indices if index in feed.late
    )


def _late_at_cut(feed: SessionFeed, positions: Positions) -> Counter[Row]:
    return _late(feed, read_before(positions[feed.uid], feed.rows))


class Held:
    """The sessions that a key's state names: these, and perhaps some of those. Where it keeps their contents is its own affair."""

    def __init__(self, surely: Iterable[Span], perhaps: Iterable[Span]) -> None:
        self._surely = {(span.start, span.end) for span in surely}
        self._perhaps = {(span.start, span.end) for span in perhaps}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list):
            return False
        found = set(zip(other[::4], other[1::4], strict=True))
        return self._surely <= found <= self._surely | self._perhaps

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._surely)))

    def __repr__(self) -> str:
        return f"sessions {sorted(self._surely)} and perhaps {sorted(self._perhaps)}"


def _states_at(feed: SessionFeed, positions: Positions) -> CutStates:
    """A session is there while no watermark can have passed its cleanup, and gone when all that may have come have."""
    before = sorted(read_before(positions[feed.uid], feed.rows))
    high = _watermark(feed, before)
    low = _watermark(feed, before[: -(LOST_BATCHES_MAX + 1) * feed.batch_rows])
    states: dict[Any, Any] = {}
    for key, some in spans(feed, before).items():
        there = [span for span in some if feed.cleanup(span.end) > low]
        surely = [span for span in there if feed.cleanup(span.end) > high and len(before) < feed.rows]
        held = Held(surely, [span for span in there if span not in surely])
        if there:
            states[key] = held if surely else Possibly(held)
    return {"window_sessions": states}


def _watermark(feed: SessionFeed, indices: Sequence[int]) -> int:
    return max((feed.at(index) for index in indices), default=-(2**62)) - feed.disorder_ms - 1


WORKLOAD = Workload("sessions", "merges sessions of row functions; late records go aside, tardy ones come just in time", make)
