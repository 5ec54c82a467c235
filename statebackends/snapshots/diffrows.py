"""The rows of one keyed state, taken apart for comparison and handed out one unit at a time.

A unit is a key group where both sides have the same number of them; else a share of the keys by a hash of their own, and the
state is read once for every unit. Either way a key is in the same unit on both sides, whatever parallelism or backend."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from statebackends.errors import CorruptStateError, InvalidKeyError
from statebackends.keyedtables import KEY_GROUP, MAP_KEY, NAMESPACE, POSITION, key_columns
from statebackends.snapshots.contents import StoredState
from statebackends.snapshots.parts import PartReader
from statebackends.snapshots.rows import state_batches, state_schema
from statebackends.snapshots.values import Comparer, named, stored_codec
from statebackends.statecodec import TIMERS_KIND
from statebackends.tablesources import TIME

UNIT_ROWS_MAX = 1 << 20
"""Rows of a unit that isn't a key group."""


Identity: TypeAlias = tuple[bytes, Any, Any]
"""What a row is about, in the order of keys: (canonical key; namespace, bytes or int; encoded key of a map's entry, or time of a
timer, or b""). A plain tuple, since there is one for every row."""

Unit = dict[Identity, bytes]
"""Identity -> encoded value; a list's elements are one value."""


class DiffRows:
    """One side of a comparison of keyed state."""

    def __init__(self, reader: PartReader, state: StoredState) -> None:
        """Raises CorruptStateError."""
        self._reader, self._state = reader, state
        self._key_type = state.key_type()
        self._schema = state_schema(reader, state)
        self._comparer = Comparer(state.meta)
        codec = stored_codec(state)
        self._codec = codec
        self._map_key = None if codec is None else codec.map_key
        self._is_list = state.meta.kind == "list"
        taken = {KEY_GROUP, NAMESPACE, MAP_KEY, POSITION, *key_columns(self._key_type)}
        if state.meta.kind == TIMERS_KIND:
            taken.add(TIME)
        self._value_columns = [name for name in self._schema.names if name not in taken]

    def count(self) -> int:
        """Rows, all read for it."""
        return sum(batch.num_rows for batch in self._batches())

    def by_key_group(self) -> Iterator[tuple[int, Unit]]:
        """Key groups that have rows, ascending."""
        group, unit = -1, _UnitBuilder(self._state, is_list=self._is_list)
        for batch in self._batches():
            groups = batch.column(0).to_numpy()
            bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
            identities, positions, values = self._rows(batch)
            for start, stop in pairwise(bounds):
                if groups[start] != group:
                    if unit.rows:
                        yield group, unit.build()
                    group, unit = int(groups[start]), _UnitBuilder(self._state, is_list=self._is_list)
                unit.add(identities[start:stop], positions[start:stop], values[start:stop])
        if unit.rows:
            yield group, unit.build()

    def by_hash(self, units: int) -> Iterator[tuple[int, Unit]]:
        """`units` shares of the keys, each with a whole pass over the state."""
        for number in range(units):
            unit = _UnitBuilder(self._state, is_list=self._is_list)
            for batch in self._batches():
                identities, positions, values = self._rows(batch)
                ours = [row for row, each in enumerate(identities) if xxhash.xxh3_64_intdigest(each[0]) % units == number]
                unit.add([identities[row] for row in ours], [positions[row] for row in ours], [values[row] for row in ours])
            yield number, unit.build()

    def shown(self, identity: Identity) -> tuple[Any, Any]:
        """(key, map key or time) as plain values."""
        key, _, rest = identity
        if self._map_key is not None:
            rest = self._map_key.decode(rest)
        elif rest == b"":
            rest = None
        return self._key_type.decode(key), rest

    def _batches(self) -> Iterator[pa.RecordBatch]:
        return state_batches(self._reader, self._state, self._schema)

    def _rows(self, batch: pa.RecordBatch) -> tuple[list[Identity], list[int], list[bytes]]:
        """(identity, position in a list, encoded value) of each row."""
        count = batch.num_rows
        try:
            arrays = [batch.column(name) for name in key_columns(self._key_type)]
            keys = self._key_type.column(arrays, max_parallelism=self._state.operator.max_parallelism).encoded()
            rest: list[Any] = [b""] * count
            if self._map_key is not None:
                rest = self._entries(batch.column(MAP_KEY))
            elif self._state.meta.kind == TIMERS_KIND:
                rest = batch.column(TIME).to_pylist()
            columns = [batch.column(name).to_pylist() for name in self._value_columns]
            values = self._comparer.encode(columns) if columns else [b""] * count
        except (CorruptStateError, InvalidKeyError) as error:
            raise named(error, self._state) from error
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise self._state.corrupt(f"rows that can't be read: {error}") from error
        positions = batch.column(POSITION).to_pylist() if self._is_list else [0] * count
        return list(zip(keys, batch.column(NAMESPACE).to_pylist(), rest, strict=True)), positions, values


    def _entries(self, column: pa.Array) -> list[bytes]:
        """A map's keys, one encoding for equal ones: backends differ in which of them they keep."""
        assert self._codec is not None
        assert self._map_key is not None
        return [self._codec.encode_entry(each) for each in self._map_key.from_arrow(column)]


class _UnitBuilder:
    """Rows of one unit."""

    def __init__(self, state: StoredState, *, is_list: bool) -> None:
        self.rows = 0
        self._state = state
        self._unit: Unit = {}
        self._elements: dict[Identity, list[tuple[int, bytes]]] | None = {} if is_list else None

    def add(self, identities: list[Identity], positions: list[int], values: list[bytes]) -> None:
        self.rows += len(identities)
        if self._elements is None:
            self._unit.update(zip(identities, values, strict=True))
            return
        for identity, position, value in zip(identities, positions, values, strict=True):
            self._elements.setdefault(identity, []).append((position, value))

    def build(self) -> Unit:
        """Raises CorruptStateError if a key is there twice."""
        if self._elements is not None:
            return {each: _joined(elements) for each, elements in self._elements.items()}
        if len(self._unit) != self.rows:
            raise self._state.corrupt(f"{self.rows - len(self._unit)} keys are there twice")
        return self._unit


def _joined(elements: list[tuple[int, bytes]]) -> bytes:
    """A list's elements as one msgpack array."""
    elements.sort(key=lambda element: element[0])
    count = len(elements)
    head = bytes([0x90 | count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(value for _, value in elements)
