"""Counting per key, with keys that are easily confused or hard to encode: negative and wide numbers, texts that look alike, bytes
with zeros, dates before the calendar's usual ones, and tuples of such."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.feeds import SCHEMA, Feed, read_before
from holdfast.chaos.workloads.scenario import CutExpectation, CutStates, Positions, Scenario, SinkExpectation, Workload
from holdfast.chaos.workloads.settings import PARALLELISM_MAX, draw_pace, draw_settings
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.statebackends.state import MapStateDescriptor, ValueStateDescriptor

PATH = "/out/keys"

_EDGES = tuple(sign * 2**bits + step for bits in (8, 31, 32, 62) for sign in (1, -1) for step in (-1, 0))
NUMBERS = (0, 1, -1, *_EDGES, 2**63 - 1, -(2**63))
_PLAIN = ("", " ", "\0", "a", "A", "a\0", "a\0\0", "\xe4", "a\u0308")
TEXTS = (*_PLAIN, "\u00c5", "\u212b", "\uffff", "\U00010000", "\U0001f600", "\u4e2d", "a" * 300)
BYTES = (b"", b"\0", b"\0\0", b"\0\xff", b"\xff", b"\xff\0", b"a", b"a\0b", bytes(range(256)))
FLOATS = (0.0, -1.5, 1.5, 5e-324, -5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), 0.1 + 0.2, 0.3)
_UNSCALED = (0, 1, -1, 2**64, -(2**64), 2**64 + 1, 10**38 - 1, 1 - 10**38)
DECIMALS = tuple(Decimal(f"{number}E-9") for number in _UNSCALED)
DATES = (date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(1970, 1, 2), date(2024, 2, 29), date(9999, 12, 31))
_LAST = datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
TIMES = (datetime(1, 1, 1, tzinfo=UTC), _LAST, datetime(1970, 1, 1, tzinfo=UTC), datetime(2262, 4, 12, tzinfo=UTC))

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of keys."""

    types: tuple[pa.DataType, ...]
    """Types of its fields; several make a tuple."""
    keys: tuple[Key, ...]


def _single(data_type: pa.DataType, values: Iterable[Any]) -> Kind:
    return Kind((data_type,), tuple((value,) for value in values))


_UTC = pa.timestamp("us", "UTC")
KINDS: dict[str, Kind] = {
    "int64": _single(pa.int64(), NUMBERS),
    "utf8": _single(pa.string(), TEXTS),
    "binary": _single(pa.binary(), BYTES),
    "float64": _single(pa.float64(), FLOATS),
    "decimal": _single(pa.decimal128(38, 9), DECIMALS),
    "date": _single(pa.date32(), DATES),
    "timestamp": _single(_UTC, TIMES),
    "bool": _single(pa.bool_(), (False, True)),
    "text and number": Kind((pa.string(), pa.int64()), tuple((text, n) for text in TEXTS[:8] for n in (-1, 0, 2**63 - 1))),
    "bytes twice": Kind((pa.binary(), pa.binary()), tuple((one, two) for one in BYTES[:6] for two in BYTES[:4])),
    "five fields": Kind(
        (pa.bool_(), pa.string(), pa.decimal128(38, 9), pa.binary(), _UTC),
        tuple((n % 2 == 0, TEXTS[n % 9], DECIMALS[n % 7], BYTES[n % 5], TIMES[n % 4]) for n in range(20)),
    ),
}
MAP_KEYS: dict[str, tuple[Any, ...]] = {"texts": TEXTS, "numbers": NUMBERS, "bytes": BYTES}


@dataclass(frozen=True, slots=True)
class KeyedFeed(Feed):
    """Column `key` has the number of a record's key among those of the kind; the key itself is in the columns `key_0`, `key_1`
    ..."""

    kind: str = ""

    @property
    def names(self) -> list[str]:
        return [f"key_{index}" for index in range(len(KINDS[self.kind].types))]

    @property
    def schema(self) -> pa.Schema:
        fields = zip(self.names, KINDS[self.kind].types, strict=True)
        return pa.schema([*SCHEMA, *(pa.field(name, data_type, nullable=False) for name, data_type in fields)])

    def of(self, index: int) -> Key:
        return KINDS[self.kind].keys[self.key(index)]

    def make_batch(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        mixed = (indices + (self.first + 1)) * 2_654_435_761 & 0xFFFF_FFFF
        plain = [indices + self.first, (mixed >> 12) % self.keys, (mixed >> 5) % 1_000]
        keys = [self.of(int(index)) for index in indices]
        types = KINDS[self.kind].types
        columns = [pa.array([key[place] for key in keys], data_type) for place, data_type in enumerate(types)]
        return pa.RecordBatch.from_arrays([*(pa.array(column) for column in plain), *columns], schema=self.schema)


class CountKeys(ProcessFunction):
    """Numbers the records of each key, and counts them by a text that each has."""

    map_keys = "texts"
    count = ValueStateDescriptor("count", int)
    seen: Any = MapStateDescriptor("seen", str, int)
    states = (count, seen)

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def process_element(self, row: dict[str, Any], ctx: ProcessContext, out: Collector) -> None:
        count, seen = ctx.state(self.count), ctx.state(self.seen)
        count.update(count.value(0) + 1)
        map_key = map_key_of(self.map_keys, row["value"])
        seen.put(map_key, (seen.get(map_key) or 0) + 1)
        out({"number": row["key"], "seq": count.value(), "i": row["i"], **{name: row[name] for name in self.names}})


class CountNumbers(CountKeys):
    """By numbers."""

    map_keys = "numbers"
    seen = MapStateDescriptor("seen", int, int)
    states = (CountKeys.count, seen)


class CountBytes(CountKeys):
    """By bytes."""

    map_keys = "bytes"
    seen = MapStateDescriptor("seen", bytes, int)
    states = (CountKeys.count, seen)


_COUNTS = {each.map_keys: each for each in (CountKeys, CountNumbers, CountBytes)}


def map_key_of(map_keys: str, value: int) -> Any:
    keys = MAP_KEYS[map_keys]
    return keys[value % len(keys)]


def make(rng: random.Random) -> Scenario:
    """One feed, with keys of one kind."""
    kind, map_keys = rng.choice(tuple(KINDS)), rng.choice(tuple(MAP_KEYS))
    feed = KeyedFeed("records", rng.randint(150, 500), len(KINDS[kind].keys), first=rng.randrange(1_000), kind=kind)
    parallelism = rng.randint(1, PARALLELISM_MAX)
    pace = draw_pace(rng, feed.rows)
    settings = draw_settings(rng)
    sink = SinkExpectation(
        PATH,
        "counted",
        partial(_rows, feed),
        ordered_by=(0, 1),
        steps_by_one=True,
        compared=(0, 2, *range(3, 3 + len(feed.names))),
        at_cut=partial(_rows_at, feed),
    )
    return Scenario(
        plan=partial(_plan, feed, map_keys, parallelism, pace, settings),
        records=feed.rows,
        sinks=(sink,),
        operators=("count",),
        cuts=(CutExpectation((feed.uid,), "count", partial(_states_at, feed, map_keys)),),
    )


def _plan(
    feed: KeyedFeed, map_keys: str, drawn: int, pace: tuple[float, int], settings: dict[str, Any], parallelism: int | None
) -> JobPlan:
    environment = Environment("keys", parallelism=parallelism or drawn, **settings)
    keys = feed.names
    fields = [pa.field(name, pa.int64(), nullable=False) for name in ("number", "seq", "i")]
    returns = pa.schema([*fields, *(feed.schema.field(name) for name in keys)])
    keyed = environment.from_source(feed.source(*pace)).uid(feed.uid).key_by(keys[0] if len(keys) == 1 else keys)
    keyed.process(_COUNTS[map_keys](tuple(keys)), returns=returns).uid("count").sink_to(ParquetSink(PATH), uid="counted")
    return environment.build()


def _row(feed: KeyedFeed, index: int) -> Row:
    """A row as Parquet returns it: timestamps as microseconds."""
    return (feed.key(index), feed.first + index, *map(_stored, feed.of(index)))


def _stored(value: Any) -> Any:
    if not isinstance(value, datetime):
        return value
    since = value - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _rows(feed: KeyedFeed) -> Counter[Row]:
    return Counter(_row(feed, index) for index in range(feed.rows))


def _rows_at(feed: KeyedFeed, positions: Positions) -> Counter[Row]:
    return Counter(_row(feed, index) for index in read_before(positions[feed.uid], feed.rows))


def _states_at(feed: KeyedFeed, map_keys: str, positions: Positions) -> CutStates:
    counts: Counter[Any] = Counter()
    seen: Counter[Any] = Counter()
    for index in read_before(positions[feed.uid], feed.rows):
        fields = feed.of(index)
        key = fields if len(fields) > 1 else fields[0]
        counts[key] += 1
        seen[key, map_key_of(map_keys, feed.value(index))] += 1
    return {"count": dict(counts), "seen": dict(seen)}


WORKLOAD = Workload("keys", "counts by keys that are hard to tell apart: negative, wide, of several fields, of any text", make)
