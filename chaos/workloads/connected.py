"""Two sources connected by key: each record of one meets the newest record of the other as of its event time.

What it meets is decided by a timer, when both sources have passed that time: event time that runs ahead with one of them, or a cut
that is not the same of both, gives other rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, in_segments, read_before
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    Drained,
    Emitted,
    Positions,
    Possibly,
    Scenario,
    SinkExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.chaos.workloads.windows import Paces, watermark_bound
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.connected import KeyedCoProcessFunction
from holdfast.operators.functions.process import Collector, ProcessContext
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.task.timers import EVENT_TIMERS
from holdfast.statebackends.state import MapStateDescriptor

PATH = "/out/connected"

Sides = tuple[Feed, Feed]
"""What asks, and what is asked for."""


class Versions(KeyedCoProcessFunction):
    """Records of the first stream wait for their time, and take the newest of the second as of then."""

    waiting = MapStateDescriptor("waiting", int, list[int])
    """Event time -> `i` of its records, in order."""
    versions = MapStateDescriptor("versions", int, list[int])
    """Event time -> `i` and value of its last record: the one with the greatest `i`, whichever came first."""
    states = (waiting, versions)
    returns = dict.fromkeys(("key", "at", "i", "found", "value"), int)

    def process_element1(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        waiting = ctx.state(self.waiting)
        waiting.put(row["at"], sorted([*(waiting.get(row["at"]) or []), row["i"]]))
        ctx.timers.register_event_time_timer(row["at"])

    def process_element2(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        versions = ctx.state(self.versions)
        known = versions.get(row["at"])
        if known is None or known[0] < row["i"]:
            versions.put(row["at"], [row["i"], row["value"]])

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        waiting = ctx.state(self.waiting)
        passed = [(at, found) for at, found in ctx.state(self.versions).items() if at <= timestamp_ms]
        found, value = max(passed)[1] if passed else (-1, -1)
        for i in waiting.get(timestamp_ms) or [-1]:  # -1: it has fired before
            out({"key": ctx.key, "at": timestamp_ms, "i": i, "found": found, "value": value})
        waiting.remove(timestamp_ms)


def make(rng: random.Random) -> Scenario:
    """Two feeds over about the same event time, of which one is ahead of the other."""
    keys, disorder_ms = rng.choice((1, 4, 12)), rng.choice((0, 15, 60))
    start_ms = 10_000 + rng.choice((-400, 0, 300))
    sides = (
        Feed("asking", rng.randint(100, 300), keys, 0, 10_000, rng.randint(1, 4), disorder_ms),
        Feed("asked", rng.randint(40, 120), keys, 1_000_000, start_ms, rng.randint(2, 8), disorder_ms),
    )
    paces = tuple(draw_pace(rng, feed.rows) for feed in sides)
    parallelism, uneven = rng.randint(1, PARALLELISM_MAX), rng.choice((None, None, 1, 3))
    settings = draw_settings(rng)
    uids, rows, states_at = tuple(feed.uid for feed in sides), partial(_rows, sides), partial(_states_at, sides)
    emitted = Emitted("versions", ("waiting",), partial(_emitted_at, sides))
    return Scenario(
        plan=partial(_plan, sides, paces, uneven, parallelism, settings),
        records=sum(feed.rows for feed in sides),
        sinks=(SinkExpectation(PATH, "found", rows, after_drains=rows, emitted=emitted),),
        operators=("versions",),
        cuts=(CutExpectation(uids, "versions", states_at, after_drains=states_at),),
    )


def _plan(
    sides: Sides, paces: Paces, uneven: int | None, drawn: int, settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("connected", parallelism=parallelism or drawn, **settings)
    asking, asked = (
        _timed(environment, feed, pace, own) for feed, pace, own in zip(sides, paces, (None, uneven), strict=True)
    )
    found = asking.connect(asked).key_by("key", "key").process(Versions()).uid("versions")
    found.sink_to(ParquetSink(PATH), uid="found")
    return environment.build()


def _timed(environment: Environment, feed: Feed, pace: tuple[float, int], parallelism: int | None) -> Stream:
    """The feed with its event times; records reach an assigner from one subtask, so that none is late."""
    source = environment.from_source(feed.source(*pace)).uid(feed.uid)
    timed = source.assign_timestamps("at", max_out_of_orderness_ms=feed.disorder_ms).uid(f"{feed.uid}-times")
    if parallelism is not None:
        for each in (source, timed):
            each.set_parallelism(parallelism)
    return timed


# ------------------------------------------------------------------------------------------ the same, one record at a time


def _rows(sides: Sides, drained: Drained = ()) -> Counter[Row]:
    """A drain asks for all that waits, and what is read behind it is not known then."""
    return Counter(row for segment in _asked_in(sides, in_segments(sides, drained)) for row in segment)


def _emitted_at(sides: Sides, positions: Positions, drained: Drained, held: CutStates) -> Counter[Row]:
    """All that was asked in front of a cut but what waits in its state."""
    *before, last = _asked_in(sides, in_segments(sides, drained, positions))
    rows = Counter(row for segment in before for row in segment)
    rows.update(row for row in last if (row[0], row[1]) not in held["waiting"])
    return rows


def _asked_in(sides: Sides, segments: list[dict[str, list[int]]]) -> Iterator[list[Row]]:
    """Rows of each segment, with the versions of it and of those before."""
    asking, asked = sides
    known: dict[int, list[tuple[int, int, int]]] = {}
    for segment in segments:
        for index in segment[asked.uid]:
            known.setdefault(asked.key(index), []).append((asked.at(index), asked.first + index, asked.value(index)))
        yield [_found(asking, index, known.get(asking.key(index), [])) for index in segment[asking.uid]]


def _found(asking: Feed, index: int, known: list[tuple[int, int, int]]) -> Row:
    at = asking.at(index)
    _, found, value = max((version for version in known if version[0] <= at), default=(0, -1, -1))
    return asking.key(index), at, asking.first + index, found, value


def _states_at(sides: Sides, positions: Positions, drained: Drained = ()) -> CutStates:
    """What waits, with its timers: where the watermark may have passed, possibly; and every version in front of the cut."""
    asking, asked = sides
    before = {feed.uid: list(read_before(positions[feed.uid], feed.rows)) for feed in sides}
    passed = watermark_bound(sides, before, positions)
    waiting: dict[Any, list[int]] = {}
    for index in sorted(in_segments(sides, drained, positions)[-1][asking.uid]):
        waiting.setdefault((asking.key(index), asking.at(index)), []).append(asking.first + index)
    versions: dict[Any, list[int]] = {}
    for index in sorted(before[asked.uid]):
        versions[(asked.key(index), asked.at(index))] = [asked.first + index, asked.value(index)]
    fired = {timer for timer in waiting if passed is None or timer[1] <= passed}
    return {
        "waiting": {timer: Possibly(numbers) if timer in fired else numbers for timer, numbers in waiting.items()},
        "versions": versions,
        EVENT_TIMERS: {timer: Possibly(None) if timer in fired else None for timer in waiting},
    }


WORKLOAD = Workload("connected", "connects two sources by key: each record finds the other's newest as of its time", make)
