"""Rows of keyed state to tables and back, in bulk: no Python call per row but the codecs' own.

The layout of a table is keyedtables.py's; which rows there are is the backends'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from statebackends.errors import StateValueError
from statebackends.keyedtables import KEY_GROUP, MAP_KEY, NAMESPACE, POSITION, key_columns, keyed_table_schema
from statebackends.keys import KeyType
from statebackends.statecodec import StateCodec

ROWS_PER_BATCH = 1 << 15
"""Keys converted at a time; conversions hold the interpreter lock for a few milliseconds."""

Groups = npt.NDArray[np.int32]
Chunk = tuple[bytes, list[bytes], list[Any]]
"""(namespace, encoded keys, what each key has: a value, a list, or a dict of map entries)."""


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """How the keys of one operator's tables are read and written."""

    key_type: KeyType
    max_parallelism: int
    operator: str

    def groups_of(self, encoded: Sequence[bytes]) -> Groups:
        """Key groups of encoded keys."""
        arrays = self.key_type.arrays_of_encoded(encoded)
        return self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator).key_groups

    def table(self, codec: StateCodec, chunks: Iterable[Chunk]) -> pa.Table:
        """Table of one state, sorted by key group; chunks come in any order. Raises StateValueError."""
        schema = self.schema(codec)
        rows = _Rows(self, chunks)
        try:
            batches = [self._batch(schema, codec, *part) for part in rows.sorted_parts()]
        except StateValueError as error:
            raise self.named(error, codec.name) from error
        return pa.Table.from_batches(batches, schema)

    def key_columns_of(self, keys: Iterable[tuple[bytes, Sequence[bytes]]]) -> list[pa.Array]:
        """The columns of a table before the state's own, for (namespace, encoded keys): key group, key fields, namespace."""
        encoded: list[bytes] = []
        namespaces: list[pa.Array] = []
        for namespace, some in keys:
            encoded += some
            namespaces.append(pa.repeat(pa.scalar(namespace, pa.binary()), len(some)))
        arrays = self.key_type.arrays_of_encoded(encoded)
        groups = self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator).key_groups
        return [pa.array(groups), *arrays, pa.concat_arrays(namespaces or [pa.array([], pa.binary())])]

    def named(self, error: StateValueError, state: str) -> StateValueError:
        """The same error, saying whose value it was."""
        fields = {**error.fields, "operator": self.operator, "state": state}
        return StateValueError(f"operator {self.operator!r}, state {state!r}: {error}", **fields)

    def schema(self, codec: StateCodec) -> pa.Schema:
        map_key = None if codec.map_key is None else codec.map_key.arrow_type
        return keyed_table_schema(self.key_type, codec.meta, codec.value_fields, map_key=map_key)

    def _batch(
        self, schema: pa.Schema, codec: StateCodec, groups: Groups, keys: list[bytes], namespaces: pa.Array, values: list[Any]
    ) -> pa.RecordBatch:
        columns = [pa.array(groups), *self.key_type.arrays_of_encoded(keys), namespaces]
        if codec.kind in ("list", "map"):
            counts = np.fromiter(map(len, values), np.int64, len(values))
            owners = pa.array(np.repeat(np.arange(len(values)), counts))
            columns = [column.take(owners) for column in columns]
        if codec.map_key is not None:
            columns.append(codec.map_key.to_arrow(list(chain.from_iterable(values))))
            columns += codec.to_arrays([value for entries in values for value in entries.values()])
        elif codec.kind == "list":
            starts = np.cumsum(counts) - counts
            columns.append(pa.array((np.arange(counts.sum()) - np.repeat(starts, counts)).astype(np.int32)))
            columns += codec.to_arrays(list(chain.from_iterable(values)))
        else:
            columns += codec.to_arrays(values)
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def chunks(self, codec: StateCodec, table: pa.Table) -> Iterator[tuple[bytes, list[bytes], Groups, list[Any]]]:
        """(namespace, encoded keys, key groups, what each has) of a table read by decode_keyed_table.

        `codec` may declare a newer, compatible type. A list or a map may come in several chunks. Raises CorruptStateError."""
        if codec.kind == "list":
            table = _in_order(table)
        for batch in table.to_batches(max_chunksize=ROWS_PER_BATCH):
            arrays = [batch.column(name) for name in key_columns(self.key_type)]
            column = self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator)
            keys, groups = column.encoded(), batch.column(KEY_GROUP).to_numpy()
            values = codec.from_columns(batch)
            map_keys = None if codec.map_key is None else codec.map_key.from_arrow(batch.column(MAP_KEY))
            for namespace, rows in _by_namespace(batch.column(NAMESPACE)):
                if rows is None:
                    yield namespace, *_grouped(codec, keys, groups, values, map_keys)
                else:
                    picked_map_keys = None if map_keys is None else _picked(map_keys, rows)
                    yield namespace, *_grouped(codec, _picked(keys, rows), groups[rows], _picked(values, rows), picked_map_keys)


class _Rows:
    """All rows of a state, to be given out in key-group order."""

    def __init__(self, layout: KeyedRows, chunks: Iterable[Chunk]) -> None:
        keys, values, groups, namespaces = [], [], [], []
        self._namespaces: list[bytes] = []
        for namespace, some_keys, some_values in chunks:
            if some_keys:
                if namespace not in self._namespaces[-1:]:
                    self._namespaces.append(namespace)
                keys.append(np.fromiter(some_keys, object, len(some_keys)))
                values.append(np.fromiter(some_values, object, len(some_values)))
                groups.append(layout.groups_of(some_keys))
                namespaces.append(np.full(len(some_keys), len(self._namespaces) - 1, np.int32))
        self._empty = not keys
        if keys:
            self._keys, self._values = np.concatenate(keys), np.concatenate(values)
            self._groups: Groups = np.concatenate(groups)
            self._namespace_of = np.concatenate(namespaces)

    def sorted_parts(self) -> Iterator[tuple[Groups, list[bytes], pa.Array, list[Any]]]:
        if self._empty:
            return
        order = np.argsort(self._groups.astype(np.uint16), kind="stable")
        names = pa.array(self._namespaces, pa.binary())
        for start in range(0, len(order), ROWS_PER_BATCH):
            part = order[start : start + ROWS_PER_BATCH]
            namespaces = names.take(pa.array(self._namespace_of[part]))
            yield self._groups[part], self._keys[part].tolist(), namespaces, self._values[part].tolist()


def _grouped(
    codec: StateCodec, keys: list[bytes], groups: Groups, values: list[Any], map_keys: list[Any] | None
) -> tuple[list[bytes], Groups, list[Any]]:
    """One entry per key: list elements and map entries are collected."""
    if codec.kind not in ("list", "map"):
        return keys, groups, values
    collected: dict[bytes, Any] = {}
    firsts: list[int] = []
    for row, key in enumerate(keys):
        if key not in collected:
            collected[key] = [] if codec.kind == "list" else {}
            firsts.append(row)
        if codec.kind == "list":
            collected[key].append(values[row])
        elif map_keys is not None:
            collected[key][map_keys[row]] = values[row]
    return list(collected), groups[firsts], list(collected.values())


def _picked(values: list[Any], rows: npt.NDArray[np.int64]) -> list[Any]:
    return [values[row] for row in rows.tolist()]


def _in_order(table: pa.Table) -> pa.Table:
    """List elements by position: as written, unless another tool has moved rows."""
    positions = table.column(POSITION).to_numpy()
    steps = np.diff(positions)
    if ((steps == 1) | (positions[1:] == 0)).all():
        return table
    return table.take(pa.array(np.argsort(positions, kind="stable")))


def _by_namespace(column: pa.Array) -> Iterator[tuple[bytes, npt.NDArray[np.int64] | None]]:
    """(namespace, its rows); None for all rows."""
    encoded = column.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], None
        return
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    for code, name in enumerate(names):
        yield name, np.flatnonzero(codes == code)
