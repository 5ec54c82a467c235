"""Every kind of keyed state at once: lists in order, maps, nested values, reduced and aggregated ones.

Most has a TTL of years, and all of it is in the output and in every cut exactly as the records before it determine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import Feed, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, CutStates, Positions, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    Ttl,
    ValueStateDescriptor,
)

PATH = "/out/states"
YEARS_MS = 10 * 365 * 86_400_000
"""Further than any clock jumps."""
LOG_MAX, LOG_KEPT = 8, 3
_KINDS, _REMOVED = 5, 11

_WRITTEN = Ttl(YEARS_MS)
_READ = Ttl(YEARS_MS, update="read")


class Seen(msgspec.Struct, frozen=True):
    """A key's last record."""

    i: int
    name: str | None
    digits: list[int]


class Sum(msgspec.Struct, frozen=True):
    """An accumulator."""

    count: int
    total: int


class Mean:
    """An `AggregateFunction`: the mean, rounded down to a whole number."""

    def create_accumulator(self) -> Sum:
        return Sum(0, 0)

    def add(self, value: int, accumulator: Sum) -> Sum:
        return Sum(accumulator.count + 1, accumulator.total + value)

    def get_result(self, accumulator: Sum) -> int:
        return accumulator.total // accumulator.count

    def merge(self, left: Sum, right: Sum) -> Sum:
        return Sum(left.count + right.count, left.total + right.total)


class Remember(ProcessFunction):
    """Keeps each record in six ways, and emits what it then knows of the key."""

    log = ListStateDescriptor("log", int, _WRITTEN)
    kinds = MapStateDescriptor("kinds", str, int, _WRITTEN)
    last = ValueStateDescriptor("last", Seen, _READ)
    top = ReducingStateDescriptor("top", int, max)
    mean = AggregatingStateDescriptor("mean", Sum, Mean(), _WRITTEN)
    states = (log, kinds, last, top, mean)
    returns = dict.fromkeys(("key", "i", "before", "logged", "kinds", "top", "mean"), int)

    def process_element(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        i, value = row["i"], row["value"]
        log = ctx.state(self.log)
        log.add(i)
        logged = log.get()
        if len(logged) == LOG_MAX:
            log.update(logged[-LOG_KEPT:])
        kinds, kind = ctx.state(self.kinds), _kind(value)
        if value % _REMOVED == 0:
            kinds.remove(kind)
        else:
            kinds.put(kind, kinds.get(kind, 0) + 1)
        last = ctx.state(self.last)
        before = last.value()
        last.update(_seen(i, value))
        top, mean = ctx.state(self.top), ctx.state(self.mean)
        top.add(value)
        mean.add(value)
        out(
            {
                "key": row["key"],
                "i": i,
                "before": -1 if before is None else before.i,
                "logged": sum(logged),
                "kinds": sum(count for _, count in kinds.items()),
                "top": top.get(),
                "mean": mean.get(),
            }
        )


def _kind(value: int) -> str:
    return f"kind {value % _KINDS}"


def _seen(i: int, value: int) -> Seen:
    return Seen(i, None if value % 3 == 0 else f"record {i}", [int(digit) for digit in str(value)])


def make(rng: random.Random) -> Scenario:
    """One feed, read by one subtask: the records of a key arrive in their order."""
    feed = Feed("records", rng.randint(150, 600), rng.choice((1, 6, 30)), first=rng.randrange(1_000))
    parallelism = rng.randint(1, PARALLELISM_MAX)
    pace = draw_pace(rng, feed.rows)
    settings = draw_settings(rng)
    expected = _Expected(feed)
    return Scenario(
        plan=partial(_plan, feed, parallelism, pace, settings),
        records=feed.rows,
        sinks=(SinkExpectation(PATH, "remembered", expected.rows, ordered_by=(0, 1), at_cut=expected.rows_at),),
        operators=("remember",),
        cuts=(CutExpectation((feed.uid,), "remember", expected.states_at),),
    )


def _plan(feed: Feed, drawn: int, pace: tuple[float, int], settings: dict[str, Any], parallelism: int | None) -> JobPlan:
    environment = Environment("states", parallelism=parallelism or drawn, **settings)
    records = environment.from_source(feed.source(*pace)).uid(feed.uid).set_parallelism(1)
    records.key_by("key").process(Remember()).uid("remember").sink_to(ParquetSink(PATH), uid="remembered")
    return environment.build()


# ----------------------------------------------------------------------------------------------------------- expectation


@dataclass(slots=True)
class _Key:
    """Expected state of one key, in plain Python."""

    log: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    last: Seen | None = None
    values: list[int] = field(default_factory=list)

    def add(self, key: int, i: int, value: int) -> Row:
        """Add a record; returns the row that it makes."""
        before = -1 if self.last is None else self.last.i
        self.log.append(i)
        logged = sum(self.log)
        if len(self.log) == LOG_MAX:
            self.log = self.log[-LOG_KEPT:]
        if value % _REMOVED == 0:
            del self.kinds[_kind(value)]
        else:
            self.kinds[_kind(value)] += 1
        self.last = _seen(i, value)
        self.values.append(value)
        values = self.values
        return key, i, before, logged, self.kinds.total(), max(values), sum(values) // len(values)


class _Expected:
    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def _read(self, indices: Iterable[int], keys: dict[int, _Key]) -> Iterator[Row]:
        feed = self._feed
        for index in sorted(indices):
            key = feed.key(index)
            yield keys.setdefault(key, _Key()).add(key, feed.first + index, feed.value(index))

    def rows(self) -> Counter[Row]:
        return Counter(self._read(range(self._feed.rows), {}))

    def _before(self, positions: Positions) -> Iterator[int]:
        return read_before(positions[self._feed.uid], self._feed.rows)

    def rows_at(self, positions: Positions) -> Counter[Row]:
        return Counter(self._read(self._before(positions), {}))

    def states_at(self, positions: Positions) -> CutStates:
        keys: dict[int, _Key] = {}
        for _ in self._read(self._before(positions), keys):
            pass
        return {
            "log": {key: known.log for key, known in keys.items()},
            "kinds": {(key, kind): count for key, known in keys.items() for kind, count in known.kinds.items()},
            "last": {key: msgspec.structs.asdict(known.last) for key, known in keys.items() if known.last is not None},
            "top": {key: max(known.values) for key, known in keys.items()},
            "mean": {key: {"count": len(known.values), "total": sum(known.values)} for key, known in keys.items()},
        }


WORKLOAD = Workload("states", "keeps every kind of keyed state, lists element by element", make)
