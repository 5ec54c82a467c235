"""What a query of Nexmark is: a pipeline over the three streams, the same in SQL, and how the two are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from holdfast.api.nexmark.events import NUMBERS, Nexmark, count_of, indices_of, numbered, source
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.sources.generator import GeneratorSource

Judged = Literal["rows", "last", "totals"]


@dataclass(frozen=True)
class Auctions:
    """The streams of an auction house, as sources of one job."""

    environment: Environment
    events: int
    """Of all kinds together."""
    events_per_second: int = 100_000
    """Of event time."""
    rate: float | None = None
    """Events made per second, of all kinds together; None: as fast as they are taken."""
    seed: int = 0

    def persons(self, *columns: str) -> Stream:
        return self.read("person", columns)

    def auctions(self, *columns: str) -> Stream:
        return self.read("auction", columns)

    def bids(self, *columns: str) -> Stream:
        return self.read("bid", columns)

    def read(self, kind: str, columns: Sequence[str]) -> Stream:
        """The events of a kind with these columns, from a source of their own."""
        rate = None if self.rate is None else self.rate * count_of(kind, self.events) / max(1, self.events)
        made = source(
            kind,
            self.events,
            columns=columns,
            rows_per_second=rate or None,
            seed=self.seed,
            events_per_second=self.events_per_second,
        )
        return self._timed(kind, self.environment.from_source(made).uid(f"{kind}s"))

    def together(self, **columns: Sequence[str]) -> list[Stream]:
        """The events of several kinds, as {kind: columns}, in this order, from one source: none is read ahead of the others, so
        that what a join or a window keeps of one until the other comes is little."""
        numbers = GeneratorSource(numbered, self.events, NUMBERS, rows_per_second=self.rate, name="events")
        events = self.environment.from_source(numbers).uid("events")
        streams = []
        for kind, names in columns.items():
            make = Nexmark(kind, tuple(names), self.seed, self.events_per_second)
            streams.append(self._timed(kind, events.map_batches(OfKind(make), returns=make.schema).uid(f"{kind}s")))
        return streams

    def _timed(self, kind: str, stream: Stream) -> Stream:
        """With event times if `dateTime` is among the columns."""
        assert stream.schema is not None
        has_times = "dateTime" in stream.schema.names
        return stream.assign_timestamps("dateTime", 0).uid(f"{kind}-times") if has_times else stream


@dataclass(frozen=True)
class OfKind:
    """Event numbers -> the events among them that are of one kind: a `map_batches`."""

    make: Nexmark

    def __call__(self, numbers: pa.RecordBatch) -> pa.RecordBatch:
        return self.make(indices_of(self.make.kind, numbers.column("number").to_numpy()))


@dataclass(frozen=True)
class Picked:
    """Columns of a batch, under other names or cast to other types: a `map_batches` that needs no SQL."""

    columns: tuple[str, ...]
    schema: pa.Schema

    def __call__(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [_as_type(rows.column(name), field.type) for name, field in zip(self.columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in another type. The days of UTC times need no look at the time zone for each, which costs ten times as much."""
    if pa.types.is_date(kind) and pa.types.is_timestamp(array.type) and array.type.tz == "UTC":
        array = array.view(pa.timestamp(array.type.unit))
    return array.cast(kind)


def picked(stream: Stream, *columns: str, **others: str | tuple[str, pa.DataType]) -> Stream:
    """These columns as they are, then others: name=column, or name=(column, type)."""
    assert stream.schema is not None
    found = [(name, name, stream.schema.field(name).type) for name in columns]
    for name, given in others.items():
        column, data_type = (given, stream.schema.field(given).type) if isinstance(given, str) else given
        found.append((name, column, data_type))
    schema = pa.schema([(name, data_type) for name, _, data_type in found])
    return stream.map_batches(Picked(tuple(column for _, column, _ in found), schema), returns=schema)


@dataclass(frozen=True)
class Query:
    """One of Nexmark's queries."""

    name: str
    meaning: str
    build: Callable[[Auctions], Stream]
    sql: str
    """In DuckDB's dialect, over the tables `person`, `auction` and `bid`. Its columns are those that are compared."""
    kinds: tuple[str, ...] = ("bid",)
    """Streams that it reads."""
    judged: Judged = "rows"
    """What has to be equal: all rows; the last row of each key, where a newer row replaces one; or a sum for each key."""
    key: tuple[str, ...] = ()
    """Of `last` and `totals`."""
    partition_by: tuple[str, ...] = ()
    """Columns by whose values its rows are written to folders of files; without any, where they go is not the query's."""
