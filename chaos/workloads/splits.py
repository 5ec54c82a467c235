"""A source with splits in front of the keyed counter: parts of the input, found one discovery after the other, each in one place.

Its connector has what any has: an enumerator, and readers that fetch, some of whose fetches fail. What a checkpoint has of a split
is read here from its bytes, without the product's code."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.counting import COUNTED_COMPARED, COUNTED_KEY_AND_SEQ, Count, counted_rows, counted_states
from holdfast.chaos.workloads.feeds import Feed, without_rows
from holdfast.chaos.workloads.scenario import (
    CutExpectation,
    CutStates,
    InFlightRows,
    Positions,
    Scenario,
    SinkExpectation,
    SplitsExpectation,
    Workload,
)
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.sources.splits import (
    AssignedSplit,
    Position,
    ReaderContext,
    Source,
    SourceSplit,
    SplitEnumerator,
    SplitReader,
    SplitRecords,
)

PATH = "/out/splits"
ENUMERATOR_SUFFIX = "-enumerator"


@dataclass(frozen=True, slots=True)
class Parts:
    """How the input is cut, found and read."""

    sizes: tuple[int, ...]
    """Records of each split; a split may be empty."""
    found_at_once: int
    """Splits that one discovery finds."""
    discovery_interval_ms: int
    owned: bool
    """A split goes to the reader of its number, and not to one that asks."""
    splits_per_reader: int
    fetch_rows: int
    fetch_ms: int
    """Least time between two fetches of a reader."""

    def first(self, split: int) -> int:
        """Index of its first record."""
        return sum(self.sizes[:split])


class FetchFailedError(Exception):
    """The broker did not answer, this once."""


class Broker:
    """Where the records come from, beyond the job: it outlives all processes."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self._failing = failing
        self._fetches = 0
        self.told: list[tuple[str, int]] = []
        """Split and position, in the order in which readers told that all in front of it may go."""

    def fetch(self) -> None:
        """Some of all readers' fetches fail, by their number. Raises FetchFailedError."""
        self._fetches += 1
        if self._fetches in self._failing:
            raise FetchFailedError(f"fetch {self._fetches} has no answer")

    def heal(self) -> None:
        """No further fetch fails."""
        self._failing = frozenset()


_BROKERS: weakref.WeakValueDictionary[str, Broker] = weakref.WeakValueDictionary()
"""By the token in the sources of a run."""


class Part(SourceSplit, frozen=True):
    """Records [first, first + rows) of the feed."""

    number: int
    first: int
    rows: int


class PartEnumerator(SplitEnumerator[Part]):
    """Finds splits in their order, and known ones again and again."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.discovery_interval_ms = parts.discovery_interval_ms

    @property
    def finds_more(self) -> bool:
        return len(self._known) < len(self._parts.sizes)

    def discover(self) -> list[Part]:
        parts = self._parts
        count = min(len(parts.sizes), len(self._known) + parts.found_at_once)
        return [Part(f"part-{number}", number, parts.first(number), parts.sizes[number]) for number in range(count)]

    def owner_of(self, split: Part, parallelism: int) -> int | None:
        return split.number % parallelism if self._parts.owned else None

    def handle_split_request(self, subtask: int, splits: Sequence[Part]) -> int | None:
        return subtask % len(splits)


class PartReader(SplitReader[Part]):
    """Gives a few records of each of its splits, by turns."""

    def __init__(self, feed: Feed, parts: Parts, broker: Broker, context: ReaderContext) -> None:
        self._feed = feed
        self._broker = broker
        self._parts = parts
        self._context = context
        self._due_ms = 0
        self._reading: list[tuple[Part, int]] = []

    def add_splits(self, splits: Sequence[AssignedSplit[Part]]) -> None:
        self._reading += [(each.split, each.position[0] if each.position else 0) for each in splits]

    def fetch(self) -> Sequence[SplitRecords]:
        now_ms = self._context.monotonic_ms()
        if now_ms < self._due_ms:
            return ()
        self._due_ms = now_ms + self._parts.fetch_ms
        split, read = self._reading.pop(0)
        stop = min(split.rows, read + self._parts.fetch_rows)
        if stop < split.rows:
            self._reading.append((split, stop))
        self._broker.fetch()  # as other clients, it has gone on behind what it then does not give
        columns, positions = None, None
        if stop > read:
            numbers = np.arange(read, stop, dtype=np.int64)
            columns, positions = self._feed.make_batch(numbers + split.first), numbers + 1
        return (SplitRecords(split.split_id, columns, positions, finished=stop == split.rows),)

    def notify_checkpoint_complete(self, positions: Mapping[str, Position]) -> None:
        self._broker.told += [(split_id, position[0]) for split_id, position in positions.items()]


@dataclass(frozen=True)
class PartSource(Source[Part]):
    """The feed as parts."""

    feed: Feed
    parts: Parts
    token: str
    """Of the broker."""
    split_type = Part

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.feed.uid

    @property
    def schema(self) -> pa.Schema:
        return self.feed.schema

    @property
    def splits_per_reader(self) -> int:  # type: ignore[override]
        return self.parts.splits_per_reader

    def create_enumerator(self) -> PartEnumerator:
        return PartEnumerator(self.parts)

    def create_split_reader(self, context: ReaderContext) -> PartReader:
        return PartReader(self.feed, self.parts, _BROKERS[self.token], context)


# ------------------------------------------------------------------------------------------------------- what is stored


def decode_entry(entry: bytes) -> tuple[str, int] | set[str]:
    """Of a split its id and the records in front of its position, of an enumerator's own entry the ids of what it has found."""
    kind, _, *fields = msgspec.msgpack.decode(entry)
    if kind == "enumerator":
        return set(msgspec.msgpack.decode(fields[1]))
    position = fields[1]
    return msgspec.msgpack.decode(fields[0])["split_id"], position[0] if position else 0


def splits_before(entries: Iterable[bytes], enumerator: Iterable[bytes], parts: Parts) -> Iterator[int]:
    """Indices of the records in front of a cut. Raises ValueError for a split in two places."""
    known: set[str] = set()
    places: dict[str, int] = {}
    for entry in (*entries, *enumerator):
        found = decode_entry(entry)
        if isinstance(found, set):
            known |= found
        elif found[0] in places:
            raise ValueError(f"split {found[0]} is in two places")
        else:
            places[found[0]] = found[1]
    if not known >= set(places):
        raise ValueError(f"splits {sorted(set(places) - known)} were never found")
    for number, rows in enumerate(parts.sizes):
        split_id, first = f"part-{number}", parts.first(number)
        if split_id in known:  # in no place: it is finished
            yield from range(first, first + places.get(split_id, rows))


# ------------------------------------------------------------------------------------------------------------- scenario


@dataclass
class _Ledger:
    """Expected rows and states."""

    feed: Feed
    parts: Parts

    def __post_init__(self) -> None:
        feed = self.feed
        self._all = [(feed.first + index, feed.key(index), feed.value(index)) for index in range(feed.rows)]

    def rows(self) -> Counter[Row]:
        return counted_rows(self._all)

    def rows_at(self, positions: Positions) -> Counter[Row]:
        return counted_rows(self._before(positions))

    def states_at(self, positions: Positions) -> CutStates:
        return counted_states(self._before(positions))

    def states_beside(self, positions: Positions, in_flight: InFlightRows) -> CutStates:
        return counted_states(without_rows(self._before(positions), in_flight[0]))

    def _before(self, positions: Positions) -> list[tuple[int, int, int]]:
        uid = self.feed.uid
        before = splits_before(positions[uid], positions[uid + ENUMERATOR_SUFFIX], self.parts)
        return [self._all[index] for index in before]


def make(rng: random.Random) -> Scenario:
    """Some splits, read in about a second."""
    sizes = tuple(rng.choice((0, 1, 7, 30, 60)) for _ in range(rng.randint(1, 14)))
    feed = Feed("parts", sum(sizes), rng.choice((1, 5, 20)), first=rng.randrange(1_000))
    parallelism, fetch_rows = rng.randint(1, PARALLELISM_MAX), rng.choice((3, 10, 25))
    fetches = sum(-(-size // fetch_rows) or 1 for size in sizes)
    parts = Parts(
        sizes,
        found_at_once=rng.choice((1, 2, 3, 20)),
        discovery_interval_ms=rng.choice((20, 60, 150)),
        owned=rng.random() < 0.4,
        splits_per_reader=rng.choice((1, 2, 4)),
        fetch_rows=fetch_rows,
        fetch_ms=min(60, 1_000 * parallelism // fetches),
    )
    settings = draw_settings(rng)
    token = f"{rng.getrandbits(64):016x}"
    broker = _BROKERS[token] = Broker(frozenset(rng.sample(range(2, max(4, fetches + fetches // 2)), rng.choice((0, 0, 1, 2)))))
    ledger = _Ledger(feed, parts)
    return Scenario(
        plan=partial(_plan, PartSource(feed, parts, token), parallelism, settings),
        records=feed.rows,
        sinks=(
            SinkExpectation(
                PATH,
                "counted",
                ledger.rows,
                ordered_by=COUNTED_KEY_AND_SEQ,
                steps_by_one=True,
                compared=COUNTED_COMPARED,
                at_cut=ledger.rows_at,
            ),
        ),
        operators=("count",),
        cuts=(
            CutExpectation(
                (feed.uid, feed.uid + ENUMERATOR_SUFFIX), "count", ledger.states_at, beside=ledger.states_beside
            ),
        ),
        splits=(SplitsExpectation(feed.uid, broker),),
    )


def _plan(source: PartSource, drawn: int, settings: dict[str, Any], parallelism: int | None) -> JobPlan:
    environment = Environment("splits", parallelism=parallelism or drawn, **settings)
    records = environment.from_source(source).uid(source.feed.uid)
    records.key_by("key").process(Count()).uid("count").sink_to(ParquetSink(PATH), uid="counted")
    return environment.build()


WORKLOAD = Workload("splits", "splits that an enumerator finds and hands to readers, whose fetches fail at times", make)
