"""The busy end of backpressure: which subtask bounds a job's speed, and in what way. Pure.

It reads the shares of the last second that subtasks tell; a subtask that does not run tells nothing."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from holdfast.coordinator.explain.facts import Facts, Load, median_of
from holdfast.coordinator.explain.records import Cause, CauseKind, Place
from holdfast.coordinator.figures import duration_text, share_text

LOW_ABOVE = 0.1
"""A subtask is backpressured beyond this share of its time."""
BUSY_ABOVE = 0.5
"""Below this share the end of backpressure does not work, but waits."""
ALONE_BELOW = 0.5
"""A subtask is busy alone if its siblings' median is below this part of its share."""
SKEW_FACTOR = 2.0
"""Its records are skewed if it has so many times the median of its siblings'."""
STANDS_MS = 10_000
"""A call from which a worker's loop has not come back for so long is no work: nothing of that worker moves meanwhile."""
STANDS_SHARE = 0.5
"""Of the age of a pending checkpoint: a call that has lasted so long of it holds it up, though it be a shorter one."""
STANDS_MS_MIN = 2_000
CHAIN_MAX = 100
"""Vertices that a chain of backpressure names at most."""

_busy, _backpressured = attrgetter("busy"), attrgetter("backpressured")


class Bottleneck(msgspec.Struct, frozen=True):
    """Where backpressure ends."""

    vertex_id: str
    kind: CauseKind
    """BUSY_VERTEX, BUSY_SUBTASK, SKEW or OUTSIDE."""
    place: Place
    busy: float
    path: tuple[Place, ...]
    """Vertices that wait for it, from where the search began; empty if the search began at it."""
    text: str

    def causes(self) -> tuple[Cause, ...]:
        """The chain of them."""
        waiting = [
            Cause(CauseKind.BACKPRESSURE, f"{place} waits at its outputs: what is behind it is slower", place)
            for place in self.path
        ]
        return (*waiting[:3], Cause(self.kind, self.text, self.place))


class LongCall(msgspec.Struct, frozen=True):
    """A call that has not come back: of a function, or of what it waits for."""

    vertex_id: str
    place: Place
    subtask: int
    lasts_ms: int
    busy: float

    @property
    def cause(self) -> Cause:
        lasts = f"{self.place} has not returned for {duration_text(self.lasts_ms)}"
        return Cause(CauseKind.LONG_CALL, f"{lasts}, and no record has been read in its worker meanwhile", self.place)


def longest_call(facts: Facts) -> LongCall | None:
    """The one that has lasted longest, if that is long enough to hold up whatever waits: barriers can't overtake within a call."""
    checkpoint, needed_ms = facts.situation.checkpoint, STANDS_MS
    if checkpoint is not None and checkpoint.status == "IN_PROGRESS":
        age_ms = facts.job.now_ms - checkpoint.trigger_ms
        needed_ms = min(STANDS_MS, max(STANDS_MS_MIN, int(STANDS_SHARE * age_ms)))
    told = [
        (load.view.metrics.step_ms or 0, vertex, load)
        for vertex in facts.order
        for load in facts.loads(vertex)
        if load.view.metrics.step_ms
    ]
    lasts_ms, vertex, load = max(told, key=lambda each: each[0], default=(0, "", None))
    if load is None or lasts_ms < needed_ms:
        return None
    number = load.view.subtask
    return LongCall(vertex, facts.place(vertex, number), number, lasts_ms, load.busy)


def worst_backpressure(facts: Facts, vertex_id: str) -> Load | None:
    """Of the running subtask that is backpressured most; None if none has told."""
    return max(facts.loads(vertex_id), key=_backpressured, default=None)


def find_bottleneck(facts: Facts, start: str) -> Bottleneck | None:
    """Follow backpressure from a vertex downstream to its end; None if a vertex on the way has told nothing."""
    current, path, seen = start, list[Place](), {start}
    while True:
        worst = worst_backpressure(facts, current)
        if worst is None:
            return None
        behind = [each for each in facts.outputs[current] if each not in seen]
        if worst.backpressured <= LOW_ABOVE or not behind or len(path) >= CHAIN_MAX:
            return _judge(facts, current, tuple(path))
        path.append(facts.place(current, worst.view.subtask))
        current = max(behind, key=lambda each: _load(facts, each))
        seen.add(current)


def busiest_start(facts: Facts) -> str | None:
    """The vertex that is backpressured most, where a search for the bottleneck begins; without one, the busiest vertex.

    None if nothing has told its shares."""
    told = [
        (worst.backpressured, -index, vertex)
        for vertex, index in facts.order.items()
        if (worst := worst_backpressure(facts, vertex))
    ]
    if not told:
        return None
    share, _, vertex = max(told)
    return vertex if share > LOW_ABOVE else max(facts.order, key=lambda each: _load(facts, each))


def _load(facts: Facts, vertex_id: str) -> float:
    """How near to its limit the worst subtask of a vertex is."""
    return max((each.nearness for each in facts.loads(vertex_id)), default=-1.0)


def _judge(facts: Facts, vertex_id: str, path: tuple[Place, ...]) -> Bottleneck:
    loads = facts.loads(vertex_id)
    busiest = max(loads, key=_busy)
    busy, others = busiest.busy, [each for each in loads if each is not busiest]
    alone = bool(others) and median_of([each.busy for each in others]) < ALONE_BELOW * busy
    place, share = facts.place(vertex_id, busiest.view.subtask), share_text(busy)
    if busy < BUSY_ABOVE:
        whole = facts.place(vertex_id)
        text = f"{whole} works {share} of its time at most, and waits for something outside, such as a target or a service"
        return Bottleneck(vertex_id, CauseKind.OUTSIDE, whole, busy, path, text)
    if not alone:
        whole = facts.place(vertex_id)
        text = f"{whole} is the bottleneck: its subtasks work all the time, the busiest {share}"
        return Bottleneck(vertex_id, CauseKind.BUSY_VERTEX, whole, busy, path, text)
    usual = median_of([each.view.metrics.records_in for each in others])
    records = busiest.view.metrics.records_in
    if usual >= 0 and records > SKEW_FACTOR * usual:
        text = f"{place} alone is busy ({share}): its keys have {records:,} records, the median of its siblings is {usual:,.0f}"
        return Bottleneck(vertex_id, CauseKind.SKEW, place, busy, path, text)
    text = f"{place} alone is busy ({share}), with as many records as its siblings: its rows are dearer, or its host is slow"
    return Bottleneck(vertex_id, CauseKind.BUSY_SUBTASK, place, busy, path, text)
