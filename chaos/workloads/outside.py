"""A counter whose rows go to a target outside: what is beyond the job is a port, too, whose answers come late, get lost or twice.

The outside outlives all processes. A request that its sender has given up may take effect later, also behind that one's death; what
took effect is in a journal, which checkers read."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.counting import Count, counted_rows, counted_states
from holdfast.chaos.workloads.feeds import Feed, read_before, without_rows
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    InFlightRows,
    OutsideExpectation,
    Positions,
    Scenario,
    Workload,
)
from holdfast.chaos.workloads.settings import draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import FencedError, HoldfastError

KEYS = 20
SINK = "orders"
LATE_CALLS_MAX = 6
"""Calls of anybody between a request that was given up and its effect."""


class LostAnswerError(Exception):
    """A request has no answer; whether it took effect is unknown."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The target was taken over."""

    owner: CommitOwner
    before: CommitPosition | None
    after: CommitPosition


@dataclass(frozen=True, slots=True)
class Applied:
    """Rows were committed."""

    before: CommitPosition
    after: CommitPosition
    rows: tuple[Row, ...]


@dataclass(slots=True)
class _Late:
    """A request on its way."""

    calls_left: int
    owner: CommitOwner | None
    """None: it applies rows."""
    rows: tuple[Row, ...] = ()
    expected: CommitPosition | None = None
    position: CommitPosition | None = None


class Outside:
    """One output, and the position beside it."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._stored: CommitPosition | None = None
        self._late: list[_Late] = []
        self.journal: list[Opened | Applied] = []
        """All that took effect, in this order."""

    def open(self, owner: CommitOwner) -> CommitPosition:
        self._arrive()
        fate = self._draw()
        if fate == "late":
            self._late.append(_Late(self._random.randint(1, LATE_CALLS_MAX), owner))
        if fate in ("late", "lost before"):
            raise LostAnswerError("open")
        taken = self._open(owner)
        if fate == "twice":
            self._open(owner)
        if fate == "lost behind":
            raise LostAnswerError("open")
        return taken

    def apply(self, rows: tuple[Row, ...], expected: CommitPosition, position: CommitPosition) -> None:
        self._arrive()
        fate = self._draw()
        if fate == "late":
            self._late.append(_Late(self._random.randint(1, LATE_CALLS_MAX), None, rows, expected, position))
        if fate in ("late", "lost before"):
            raise LostAnswerError("apply")
        self._apply(rows, expected, position)
        if fate == "twice":
            self._apply(rows, expected, position)  # the client repeats by itself, and tells of the conflict with its own success
        if fate == "lost behind":
            raise LostAnswerError("apply")

    def _draw(self) -> str:
        fate = self._random.randrange(20)
        return {0: "lost before", 1: "lost behind", 2: "lost behind", 3: "late", 4: "twice"}.get(fate, "answered")

    def _arrive(self) -> None:
        """Requests that were given up take effect, if they may."""
        for late in list(self._late):
            late.calls_left -= 1
            if late.calls_left:
                continue
            self._late.remove(late)
            try:
                if late.owner is not None:
                    self._open(late.owner)
                elif late.expected is not None and late.position is not None:
                    self._apply(late.rows, late.expected, late.position)
            except HoldfastError:
                continue  # nobody waits for the refusal

    def _open(self, owner: CommitOwner) -> CommitPosition:
        taken = owner.take(self._stored)
        self.journal.append(Opened(owner, self._stored, taken))
        self._stored = taken
        return taken

    def _apply(self, rows: tuple[Row, ...], expected: CommitPosition, position: CommitPosition) -> None:
        if self._stored != expected:
            raise FencedError(f"another owner has the output: {self._stored}", sink=position.sink_id)
        self.journal.append(Applied(expected, position, rows))
        self._stored = position


_OUTSIDES: weakref.WeakValueDictionary[str, Outside] = weakref.WeakValueDictionary()
"""By the token in the targets of a run."""


class OutsideTarget(CommitTarget):
    """The target of a simulated worker."""

    def __init__(self, token: str) -> None:
        self._token = token

    @property
    def place(self) -> str:
        return "outside"

    def open(self, owner: CommitOwner) -> CommitPosition:
        return _OUTSIDES[self._token].open(owner)

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        rows = tuple(tuple(row.values()) for batch in batches for row in batch.to_pylist())
        _OUTSIDES[self._token].apply(rows, expected, position)


@dataclass
class _Expected:
    """Expected rows, by record."""

    feed: Feed
    outside: Outside = field(repr=False)

    def __post_init__(self) -> None:
        feed = self.feed
        self._all = [(feed.first + index, feed.key(index), feed.value(index)) for index in range(feed.rows)]

    def _records(self, indices: Iterable[int]) -> list[tuple[int, int, int]]:
        return [self._all[index] for index in indices]

    def rows(self) -> Counter[Row]:
        return counted_rows(self._all)

    def rows_at(self, positions: Positions) -> Counter[Row]:
        return counted_rows(self._records(read_before(positions[self.feed.uid], self.feed.rows)))

    def states_at(self, positions: Positions) -> CutStates:
        return counted_states(self._records(read_before(positions[self.feed.uid], self.feed.rows)))

    def states_beside(self, positions: Positions, in_flight: InFlightRows) -> CutStates:
        before = self._records(read_before(positions[self.feed.uid], self.feed.rows))
        return counted_states(without_rows(before, in_flight[0]))


def make(rng: random.Random) -> Scenario:
    """About 600 records in a second, some eight checkpoints; now and then in steps, or several checkpoints in one."""
    feed = Feed("numbers", rng.randint(500, 700), KEYS, first=rng.randrange(1_000))
    parallelism = rng.choice((1, 1, 2))
    rows_per_second, step_rows = rng.randint(500, 700), rng.choice((40, 60, 80))
    settings = {**draw_settings(rng, interval_ms=(100, 150)), "batch_rows_max": 65_536}
    token = f"{rng.getrandbits(64):016x}"
    sink = {"rows_per_commit": rng.choice((None, None, 7, 50)), "commit_interval_ms": rng.choice((0, 0, 300))}
    outside = _OUTSIDES[token] = Outside(random.Random(rng.getrandbits(64)))
    expected = _Expected(feed, outside)
    return Scenario(
        plan=partial(_plan, feed, parallelism, rows_per_second, step_rows, settings, token, sink),
        records=feed.rows,
        sinks=(),
        operators=("count",),
        cuts=(CutExpectation((feed.uid,), "count", expected.states_at, beside=expected.states_beside),),
        outside=OutsideExpectation(SINK, outside, expected.rows, expected.rows_at, (0, 2), feed.uid),
    )


def _plan(
    feed: Feed,
    drawn: int,
    rows_per_second: float,
    step_rows: int,
    settings: dict[str, Any],
    token: str,
    sink: dict[str, Any],
    parallelism: int | None,
) -> JobPlan:
    environment = Environment("outside", parallelism=parallelism or drawn, **settings)
    numbers = environment.from_source(feed.source(rows_per_second, step_rows)).uid(feed.uid)
    counted = numbers.key_by("key").process(Count()).uid("count")
    counted.sink_to(StagedSink(OutsideTarget(token), SINK, **sink), uid="orders")
    return environment.build()


WORKLOAD = Workload("outside", "commits rows to a target outside, whose answers come late, get lost, or twice", make)
