"""Rows as Kafka's records: what of a row is its key, value, headers, topic and time, and the columns that are staged of them.

Done in the writers: by columns as far as Arrow goes, and a row that Kafka would not take is refused there, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.operators.sinks.files.json_rows import check_json, is_bytes, is_text, json_objects
from holdfast.operators.sinks.refused_rows import shown_row
from holdfast.statebackends.errors import InvalidConfigError, InvalidRowError

_TOPIC = r"^(?:[a-zA-Z0-9._-]{3,249}|[a-zA-Z0-9_-][a-zA-Z0-9._-]?|\.[a-zA-Z0-9_-])$"
"""Legal names of topics: `.` and `..` are none."""

RECORD_OVERHEAD = 512
"""Bytes that a record may have beside key, value and headers, and its batch."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Which columns make a record. Column names; empty: none."""

    sink: str
    """Names it in errors: `KafkaSink of topic orders`."""
    topic: str
    """Of all rows; "" if `topic_column` says it."""
    topic_column: str
    key: tuple[str, ...]
    """One column as it is, or several as a JSON object."""
    null_keys: bool
    """Rows without a key are sent without one, and refused otherwise."""
    value: str | tuple[str, ...] | None
    """A column as it is; the columns of a JSON object; None: all that make nothing else of a record, keys among them."""
    headers: Mapping[str, str]
    """Name of a header -> its column."""
    timestamp: str
    bytes_max: int
    """Of key, value and headers of one record."""
    reserved: str = ""
    """A topic that no row goes to: that of positions."""

    def check(self, schema: pa.Schema) -> None:
        """Raises InvalidConfigError for a column that is missing, or of a type that makes no such part of a record."""
        for part, name in self._parts():
            if name not in schema.names:
                raise self._wrong(f"{part}={name!r} is no column of the rows: {schema.names}", name)
            kind = schema.field(name).type
            if part == "topic_column" and not is_text(kind):
                raise self._wrong(f"topic_column={name!r} holds {kind}, not text", name)
            if part == "timestamp" and not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind)):
                raise self._wrong(f"timestamp={name!r} holds {kind}, neither timestamps nor integers (ms since 1970)", name)
            if part == "value" and isinstance(self.value, str) and not (is_text(kind) or is_bytes(kind)):
                raise self._wrong(f"value={name!r} holds {kind}: give text or bytes, or a list of columns for JSON", name)
            if part == "key" and len(self.key) == 1 and not (is_text(kind) or is_bytes(kind) or pa.types.is_integer(kind)):
                raise self._wrong(f"key={name!r} holds {kind}, neither text nor bytes nor integers", name)
            if part == "headers" and not (is_text(kind) or is_bytes(kind) or pa.types.is_integer(kind)):
                raise self._wrong(f"the header from column {name!r} holds {kind}, neither text nor bytes nor integers", name)
        json_columns = [*self._json_columns(schema), *(self.key if len(self.key) > 1 else ())]
        check_json(self.sink, schema, json_columns)
        if not isinstance(self.value, str) and not self._json_columns(schema):
            raise self._wrong("no column is left for its values", None)

    def _parts(self) -> list[tuple[str, str]]:
        value = () if self.value is None else (self.value,) if isinstance(self.value, str) else self.value
        parts = [
            *(("key", name) for name in self.key),
            *(("value", name) for name in value),
            *(("headers", name) for name in self.headers.values()),
            ("topic_column", self.topic_column),
            ("timestamp", self.timestamp),
        ]
        return [(part, name) for part, name in parts if name]

    def _json_columns(self, schema: pa.Schema) -> list[str]:
        if isinstance(self.value, str):
            return []
        if self.value is not None:
            return list(self.value)
        apart = {self.topic_column, self.timestamp, *self.headers.values()}
        return [name for name in schema.names if name not in apart]

    def _wrong(self, reason: str, column: str | None) -> InvalidConfigError:
        return InvalidConfigError(f"{self.sink}: {reason}", column=column)

    # ----------------------------------------------------------------------------------------------------------------- staged

    @property
    def staged_schema(self) -> pa.Schema:
        """`value` and, where the format has them, `key`, `topic`, `timestamp` (ms since 1970) and `headers`."""
        fields = [pa.field("value", pa.binary())]
        if self.key:
            fields.append(pa.field("key", pa.binary()))
        if self.topic_column:
            fields.append(pa.field("topic", pa.string()))
        if self.timestamp:
            fields.append(pa.field("timestamp", pa.int64()))
        if self.headers:
            fields.append(pa.field("headers", pa.list_(pa.binary())))
        return pa.schema(fields)

    def encode(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """What is staged. Raises InvalidRowError for the first row that Kafka would not take."""
        made = {"value": self._value(rows)}
        if self.key:
            made["key"] = self._key(rows)
        if self.topic_column:
            made["topic"] = self._topics(rows)
        if self.timestamp:
            made["timestamp"] = self._timestamps(rows)
        if self.headers:
            made["headers"] = self._headers(rows)
        self._check_sizes(rows, made)
        schema = self.staged_schema
        return pa.RecordBatch.from_arrays([made[name] for name in schema.names], schema=schema)

    def _value(self, rows: pa.RecordBatch) -> pa.Array:
        if isinstance(self.value, str):
            return rows.column(self.value).cast(pa.binary())
        return json_objects(rows.select(self._json_columns(rows.schema)))

    def _key(self, rows: pa.RecordBatch) -> pa.Array:
        if len(self.key) > 1:
            return json_objects(rows.select(self.key))
        column = _as_bytes(rows.column(self.key[0]))
        if column.null_count and not self.null_keys:
            row = int(pc.index(column.is_null(), True).as_py())
            raise self._refused(rows, row, self.key[0], "its key is null; null_keys=True sends such rows without one")
        return column

    def _topics(self, rows: pa.RecordBatch) -> pa.Array:
        column = rows.column(self.topic_column).cast(pa.string())
        legal = pc.fill_null(pc.match_substring_regex(column, _TOPIC), False)
        if not pc.all(legal).as_py():
            row = int(pc.index(legal, False).as_py())
            raise self._refused(rows, row, self.topic_column, f"{column[row].as_py()!r} is no name of a topic")
        if (row := int(pc.index(column, self.reserved).as_py())) >= 0:
            raise self._refused(rows, row, self.topic_column, f"topic {self.reserved} has the positions of sinks, and no rows")
        return column

    def _timestamps(self, rows: pa.RecordBatch) -> pa.Array:
        column = rows.column(self.timestamp)
        if pa.types.is_timestamp(column.type):
            column = pc.floor_temporal(column, unit="millisecond").cast(pa.timestamp("ms", column.type.tz)).cast(pa.int64())
        column = column.cast(pa.int64())
        bad = pc.fill_null(pc.less(column, 1), True)
        if pc.any(bad).as_py():
            row = int(pc.index(bad, True).as_py())
            reason = f"{column[row].as_py()} is no time of a record: ms since 1970, from 1 on; a client takes 0 for no time at all"
            raise self._refused(rows, row, self.timestamp, reason)
        return column

    def _headers(self, rows: pa.RecordBatch) -> pa.Array:
        columns = [_as_bytes(rows.column(name)).to_pylist() for name in self.headers.values()]
        return pa.array(list(zip(*columns, strict=True)), pa.list_(pa.binary()))

    def _check_sizes(self, rows: pa.RecordBatch, made: Mapping[str, pa.Array]) -> None:
        sizes = pc.fill_null(pc.binary_length(made["value"]), 0).cast(pa.int64())
        if "key" in made:
            sizes = pc.add(sizes, pc.fill_null(pc.binary_length(made["key"]), 0).cast(pa.int64()))
        longest = pc.max(sizes).as_py() or 0
        if "headers" in made:
            lengths = [sum(len(name) + len(each or b"") for name, each in zip(self.headers, row, strict=True))
                       for row in made["headers"].to_pylist()]  # fmt: skip
            sizes = pc.add(sizes, pa.array(lengths, pa.int64()))
            longest = pc.max(sizes).as_py() or 0
        if longest > self.bytes_max:
            row = int(pc.index(sizes, longest).as_py())
            reason = f"its record has {longest} bytes, {self.bytes_max} are allowed; the setting message.max.bytes moves that"
            raise self._refused(rows, row, None, reason)

    def _refused(self, rows: pa.RecordBatch, row: int, column: str | None, reason: str) -> InvalidRowError:
        record = shown_row(rows, row)
        where = f"column {column!r} " if column else ""
        return InvalidRowError(f"{self.sink}: {where}of row {record}: {reason}", column=column, reason=reason, record=record)


def _as_bytes(column: pa.Array) -> pa.Array:
    """Text and bytes as they are, integers as decimal digits."""
    return (column.cast(pa.string()) if pa.types.is_integer(column.type) else column).cast(pa.binary())
