"""Rules of the rows of keyed state, which restores and all tools apply to every table.

A row's key group is that of its key, and one of its handle's. Its identity is unique: key and namespace, and a map's entry, a
list's position or a timer's time. Its values decode (docs/snapshot-format.md, "What a row must be"). Rows are judged column by
column, without a Python call per row but for msgpack."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.columnar.accumulators import part_columns_of_text
from holdfast.statebackends.columnar.key_index import distinct_codes
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.layout import KEY_GROUP, MAP_KEY, NAMESPACE, ORDER, POSITION, TIME, VALUE
from holdfast.statebackends.row_tables.table import ORDER_MAX
from holdfast.statebackends.row_tables.type_text import fields_of_text, stored_fields
from holdfast.statebackends.serialization.column_types import fitted
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import (
    ROW_TABLE_KIND,
    TIMERS_KIND,
    StateSerializer,
    serializer_of_meta,
)
from holdfast.statebackends.serialization.value_types import OptionalType, ScalarType, ValueType
from holdfast.statebackends.snapshot.deltas import TOMBSTONE_COLUMN, own_keys_of, row_codes, tombstones
from holdfast.statebackends.snapshot.list_order import in_list_order, positions_of
from holdfast.statebackends.snapshot.tables import keyed_table_schema

_BUCKETS = 1 << 20
_GOLDEN = np.uint32(0x9E3779B1)
_ENTRY = "entry"
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowRules:
    """Rules for the rows of one state of one operator.

    Methods raise ValueError, CorruptStateError, InvalidKeyError and pyarrow's errors; the caller names file and operator."""

    key_type: KeyType
    max_parallelism: int
    meta: StateMeta
    serializer: StateSerializer | None
    """Serializer of the stored type; None: a state with columns of its own."""
    schema: pa.Schema
    """Columns that a row must have, in their canonical types."""

    @staticmethod
    def of(meta: StateMeta, key_type: KeyType, max_parallelism: int, found: pa.Schema | None = None) -> RowRules:
        """Rules of a stored state. `found`: schema of one of its tables, for the columns of columnar state.

        Raises InvalidConfigError for a type that can't be read."""
        serializer = serializer_of_meta(meta)
        if serializer is not None:
            map_key = None if serializer.map_key is None else serializer.map_key.arrow_type
            schema = keyed_table_schema(key_type, meta, serializer.value_fields, map_key=map_key)
            return RowRules(key_type, max_parallelism, meta, serializer, schema)
        if meta.kind == TIMERS_KIND:
            own: Sequence[pa.Field] = [pa.field(TIME, pa.int64(), nullable=False)]
            return RowRules(key_type, max_parallelism, meta, None, keyed_table_schema(key_type, meta, own))
        if meta.kind == ROW_TABLE_KIND:
            own = _row_table_fields(meta, key_type, found)
        else:
            own = _columnar_fields(meta, key_type, found)
        schema = keyed_table_schema(key_type, meta, own, namespace=pa.int64())
        return RowRules(key_type, max_parallelism, meta, None, schema)

    @property
    def identity(self) -> list[str]:
        """Columns of a row's identity, the key group first."""
        own = {"map": [MAP_KEY], "list": [POSITION]}.get(self.meta.kind, own_keys_of(self.meta.kind))
        return [KEY_GROUP, *key_columns(self.key_type), NAMESPACE, *own]

    def canonical(self, rows: pa.Table | pa.RecordBatch, names: Collection[str] | None = None) -> pa.Table:
        """The rows with the state's columns (or those in `names`) in their canonical types; other columns stay as they are.

        In a delta, values beside a tombstone mean nothing, and may be null."""
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        for field in self.schema:
            if names is not None and field.name not in names:
                continue
            index = table.schema.get_field_index(field.name)
            if index < 0:
                raise ValueError(f"no column {field.name!r}, or twice")
            column = table.column(index)
            # A position that is not an integer is left to `positions_of`, which refuses it.
            if column.type != field.type and not (field.name == POSITION and not pa.types.is_integer(column.type)):
                is_nullable = field.nullable or column.null_count > 0  # beside tombstones; judged later
                table = table.set_column(index, field.with_nullable(is_nullable), self._fitted(column, field))
        return table

    def judged(self, table: pa.Table) -> pa.Table:
        """`canonical` rows of whole key groups, after `judge`."""
        table = self.canonical(table)
        self.judge(table)
        return table

    def judge(self, table: pa.Table) -> None:
        """Apply all rules to rows of whole key groups, as `canonical` gives them: of a table or of a delta."""
        if TOMBSTONE_COLUMN in table.schema.names:
            present = ~tombstones(table)
            self.judge_values(table if present.all() else table.filter(pa.array(present)))
            if self.meta.kind in ("map", "list"):  # a tombstone stands for all rows of its key
                self.judge_identities(table.filter(pa.array(present)))
                return
        else:
            self.judge_values(table)
        self.judge_identities(table)

    def judge_values(self, table: pa.Table, names: Collection[str] | None = None) -> None:
        """Apply the rules of single values to all columns, or to `names`: no nulls where there must be none, values that decode."""
        for field in self.schema:
            if names is not None and field.name not in names:
                continue
            if field.name == POSITION:
                if len(table):
                    positions_of(table)
                continue
            column = table.column(field.name)
            if not field.nullable and column.null_count:
                raise ValueError(f"null in column {field.name!r}")
            if field.name == ORDER and self.meta.kind == ROW_TABLE_KIND:
                _judge_orders(column)
            value_type = self._value_type(field.name)
            for chunk in column.chunks:
                try:
                    chunk.validate(full=True)
                    if value_type is not None:
                        value_type.check_column(chunk)
                except (ValueError, CorruptStateError) as error:
                    raise ValueError(f"column {field.name!r}: {error}") from error

    def judge_identities(self, table: pa.Table) -> None:
        """Apply the rules of identities: key groups are those of the keys, and identities unique. The table must hold all rows of
        each of its keys."""
        if not len(table):
            return
        keys = self._keys(table)
        given = table.column(KEY_GROUP).to_numpy()
        wrong = np.flatnonzero(keys.key_groups != given)
        if len(wrong):
            row = int(wrong[0])
            key, group = keys.take([row]).values()[0], keys.key_groups[row]
            raise ValueError(f"{len(wrong)} rows have a wrong {KEY_GROUP}: that of key {key!r} is {group}")
        if self.meta.kind == "list":
            in_list_order(table.select(self.identity), self.key_type, self.max_parallelism)
            return
        twice = self.repeated(table, keys)
        if twice is not None:
            raise ValueError(f"two rows have {twice}")

    def repeated(self, table: pa.Table, keys: ArrowKeyColumn | None = None) -> dict[str, Any] | None:
        """The identity of two rows that have the same, column -> value; None: there are no such rows.

        The table must hold all rows of each of its keys."""
        if len(table) < 2:
            return None
        entries = self._entries(table)
        suspects = _suspects(self._hashes(table, keys or self._keys(table), entries))
        if not len(suspects):
            return None
        names = [*key_columns(self.key_type), NAMESPACE]
        picked = table.select(names).take(pa.array(suspects)).combine_chunks()
        if entries is not None:
            picked = picked.append_column(_ENTRY, pa.array(entries[suspects]))
        codes, _ = row_codes([picked], self.key_type, self.max_parallelism, () if entries is None else (_ENTRY,))
        order = np.argsort(codes, kind="stable")
        for place in np.flatnonzero(codes[order][1:] == codes[order][:-1]).tolist():
            first, second = (int(suspects[order[place + step]]) for step in (0, 1))
            if self._are_equal(table, first, second):
                return {name: table.column(name)[second].as_py() for name in self.identity[1:]}
        return None

    def _fitted(self, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
        try:
            chunks = [fitted(chunk, field.type, self._value_type(field.name)) for chunk in column.chunks]
        except (ValueError, pa.ArrowException) as error:
            raise ValueError(f"column {field.name!r}: {error}") from error
        return pa.chunked_array(chunks, field.type)

    def _value_type(self, column: str) -> ValueType | None:
        if self.serializer is None:
            return None
        serializer = self.serializer.value if column == VALUE else self.serializer.map_key if column == MAP_KEY else None
        return None if serializer is None else serializer.value_type

    def _keys(self, table: pa.Table) -> ArrowKeyColumn:
        arrays = [table.column(name) for name in key_columns(self.key_type)]
        return self.key_type.column(arrays, max_parallelism=self.max_parallelism)

    def _hashes(self, table: pa.Table, keys: ArrowKeyColumn, entries: _Rows | None) -> npt.NDArray[np.uint32]:
        hashes = keys.hashes().astype(np.uint32)
        namespaces = table.column(NAMESPACE)
        if pc.any(pc.not_equal(namespaces, namespaces[0])).as_py():
            codes, _ = distinct_codes(namespaces.combine_chunks())
            hashes = hashes * np.uint32(31) ^ (codes.astype(np.uint32) * _GOLDEN)
        if entries is not None:
            numbers = entries.view(np.uint64)
            hashes = hashes * np.uint32(31) ^ ((numbers ^ (numbers >> np.uint64(32))).astype(np.uint32) * _GOLDEN)
        return hashes

    def _entries(self, table: pa.Table) -> _Rows | None:
        """A number for the rest of each row's identity, which tells rows of one key apart; None where a key has one row."""
        if self.meta.kind == "list":
            positions: _Rows = table.column(POSITION).to_numpy().astype(np.int64)
            return positions
        for name in own_keys_of(self.meta.kind):
            numbers: _Rows = table.column(name).to_numpy().astype(np.int64)
            return numbers
        if self.serializer is None or self.serializer.map_key is None:
            return None
        return _codes_of_map_keys(self.serializer, table.column(MAP_KEY).combine_chunks())

    def _are_equal(self, table: pa.Table, first: int, second: int) -> bool:
        """Whether two rows have equal map keys for Python: a NaN does not equal another one, though their bytes do."""
        if self.serializer is None or self.serializer.map_key is None:
            return True
        column = table.column(MAP_KEY)
        keys = [self.serializer.map_key.from_arrow(column.slice(row, 1).combine_chunks())[0] for row in (first, second)]
        try:
            return bool(keys[0] == keys[1])
        except ArithmeticError:  # a signalling NaN
            return False


def _codes_of_map_keys(serializer: StateSerializer, column: pa.Array) -> _Rows:
    """A number for each map key, equal for equal keys in any encoding."""
    assert serializer.map_key is not None
    value_type = serializer.map_key.value_type
    inner = value_type.inner if isinstance(value_type, OptionalType) else value_type
    numbers: _Rows = np.arange(len(column))
    if not pa.types.is_nested(column.type):
        encoded = column.dictionary_encode(null_encoding="encode")
        numbers, column = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary
        if isinstance(inner, ScalarType):
            return numbers
    codes: dict[bytes, int] = {}
    spelt = [codes.setdefault(serializer.encode_entry(key), len(codes)) for key in serializer.map_key.from_arrow(column)]
    return np.asarray(spelt, np.int64)[numbers] if spelt else numbers


def _suspects(hashes: npt.NDArray[np.uint32]) -> _Rows:
    """Rows that may equal another one: those with equal hashes, and few others."""
    ordered = np.sort(hashes)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return np.empty(0, np.int64)
    touched = np.zeros(_BUCKETS, np.bool_)
    touched[again % _BUCKETS] = True
    return np.flatnonzero(touched[hashes % _BUCKETS])


def _columnar_fields(meta: StateMeta, key_type: KeyType, found: pa.Schema | None) -> list[pa.Field]:
    if found is None:
        return []
    own = [field for field in found if field.name not in (KEY_GROUP, NAMESPACE, TOMBSTONE_COLUMN, *key_columns(key_type))]
    known = part_columns_of_text(meta.value_type, [field.name for field in own])
    return own if known is None else known


def _judge_orders(column: pa.ChunkedArray) -> None:
    found = pc.min_max(column)
    if column.length() and not 0 <= found["min"].as_py() <= found["max"].as_py() < ORDER_MAX:
        raise ValueError(f"column {ORDER!r} has a number that is not 0..{ORDER_MAX - 1}")


def _row_table_fields(meta: StateMeta, key_type: KeyType, found: pa.Schema | None) -> list[pa.Field]:
    """As the text says; where it says of a type that is not known here, as found."""
    known = fields_of_text(meta.value_type)
    if known is not None:
        return stored_fields(known)
    taken = (KEY_GROUP, NAMESPACE, ORDER, TIME, TOMBSTONE_COLUMN, *key_columns(key_type))
    return stored_fields([]) + [field.with_nullable(True) for field in found or () if field.name not in taken]
