"""Copy-on-write table of one (state, namespace) over a RocksDB database, with a bounded read cache in between.

Reads look into active, immutable, cached and stored rows, in this order. When immutable layers are written is for write_buffer.py.
For the loop thread only, but for `write_batches`, which reads a frozen layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.statebackends.heap.map_table import CopyOnWriteMapTable
from holdfast.statebackends.heap.state_table import MISSING, TOMBSTONE, CopyOnWriteStateTable, Layer, MapLayer
from holdfast.statebackends.heap.states import KeyContext
from holdfast.statebackends.heap.ttl import StateTtl
from holdfast.statebackends.rocksdb.database import WRITE_ROWS, RocksStore
from holdfast.statebackends.rocksdb.row_keys import Row, row_key, row_keys, write_order
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot.rows import unexpired

GroupsOf = Callable[[Sequence[bytes]], npt.NDArray[np.int32]]
"""Key groups of encoded keys."""

WriteBatch = tuple[list[bytes], list[bytes | None]]
"""(row keys, encoded values), at most WRITE_ROWS rows; None deletes the row."""

_ENTRY_BYTES = 200
"""Estimate for one entry of a dict, with its key bytes and value object."""
_SAMPLE = 32


class ReadCache:
    """Cache of values below the oldest immutable layer, in two halves: when the younger is full, it replaces the older."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: Layer = {}
        self._old: Layer = {}

    def get(self, key: Any) -> Any:
        """The cached value; TOMBSTONE for a key known to be absent, MISSING for one that is not cached."""
        found = self._young.get(key, MISSING)
        if found is MISSING and self._old:
            found = self._old.get(key, MISSING)
            if found is not MISSING:
                self._young[key] = found
        return found

    def put(self, key: Any, value: Any) -> None:
        self._young[key] = value

    def absorb(self, written: Layer) -> None:
        """Add rows just written to the database, which are newer than cached ones."""
        self._young.update(written)

    def clear(self) -> None:
        self._young, self._old = {}, {}

    def shrink(self, bytes_max: int) -> None:
        """Drop the older half when the younger has more than half of `bytes_max`."""
        if weight(self._young) > bytes_max // 2:
            self._young, self._old = {}, self._young

    def size(self) -> int:
        return weight(self._young) + weight(self._old)


class RocksDBStateTable(CopyOnWriteStateTable):
    """CopyOnWriteStateTable with a database below."""

    __slots__ = ("_context", "_encode_one", "_store", "cache", "namespace", "serializer", "state_id")

    def __init__(
        self,
        context: KeyContext,
        store: RocksStore,
        serializer: StateSerializer,
        namespace: bytes,
        state_ttl: StateTtl | None = None,
    ) -> None:
        super().__init__()
        encode_one = None if state_ttl is None else _unexpired_encoder(serializer, state_ttl)
        self._encode_one: Callable[[Any], bytes | None] | None = encode_one
        self._context = context
        self._store = store
        self.serializer = serializer
        self.namespace = namespace
        self.state_id = store.state_id(serializer.name)
        self.cache = ReadCache()
        self.layered = self.deleted = self.pinned = True

    def find_below(self, key: Any) -> Any:
        found = self.cache.get(key)
        if found is MISSING:
            stored = self._store.get(row_key(self._context.key_group, self.state_id, key, self.namespace))
            found = TOMBSTONE if stored is None else self.serializer.decode(stored)
            self.cache.put(key, found)
        return MISSING if found is TOMBSTONE else found

    def _may_be_below(self, key: Any) -> bool:
        return bool(self.immutable) or self.cache.get(key) is not TOMBSTONE

    def freeze_layer(self) -> Layer:
        """Freeze the active layer, which must not be empty, and return it."""
        frozen = self.active
        self.immutable = (frozen, *self.immutable)
        self.active = {}
        return frozen

    def unfreeze_layer(self, frozen: Layer) -> None:
        """Undo the newest `freeze_layer`: merge the active layer into `frozen`, O(changed since), and make that active."""
        self._merge_into(frozen, self.active, lowest=False)
        self.active = frozen
        self.immutable = self.immutable[1:]

    def drop_oldest(self, written: Layer, cache_bytes_max: int) -> None:
        """Drop the oldest layer, `written` to the database by now; its rows go to the cache if they fit."""
        self.immutable = self.immutable[:-1]
        if weight(written) > cache_bytes_max // 2:
            self.cache.clear()  # its values of these keys are outdated
        else:
            self.cache.absorb(written)
            self.cache.shrink(cache_bytes_max)

    def write_batches(self, layer: Layer, groups_of: GroupsOf, sorted_rows: int) -> Iterator[WriteBatch]:
        """Batches of rows to write for a frozen layer; `sorted_rows`: how many rows at a time are put into write order."""
        for keys, values in _batches(layer, sorted_rows):
            groups = groups_of(keys)
            order = write_order(groups, keys)
            for start in range(0, len(order), WRITE_ROWS):
                rows = order[start : start + WRITE_ROWS]
                indices = rows.tolist()
                encoded = self._encoded([values[index] for index in indices])
                yield row_keys(groups[rows], self.state_id, [keys[index] for index in indices], self.namespace), encoded

    def _encoded(self, values: list[Any]) -> list[bytes | None]:
        if self._encode_one is not None:
            encode = self._encode_one
            return [None if value is TOMBSTONE else encode(value) for value in values]
        there = [value is not TOMBSTONE for value in values]
        if all(there):
            return list(self.serializer.encode_all(values))
        encoded = iter(self.serializer.encode_all(list(compress(values, there))))
        return [next(encoded) if is_there else None for is_there in there]


class RocksDBMapTable(RocksDBStateTable, CopyOnWriteMapTable):
    """RocksDBStateTable of map state: every entry is a row."""

    __slots__ = ()

    def find_entry_below(self, key: Any, entry: Any) -> Any:
        cached = (key, entry)
        found = self.cache.get(cached)
        if found is MISSING:
            stored = self._store.get(self._prefix(key) + self.serializer.encode_entry(entry))
            found = TOMBSTONE if stored is None else self.serializer.decode(stored)
            self.cache.put(cached, found)
        return MISSING if found is TOMBSTONE else found

    def entries_below(self, key: Any) -> Layer:
        prefix = self._prefix(key)
        decode_entry, decode = self.serializer.decode_entry, self.serializer.decode
        return {decode_entry(stored[len(prefix) :]): decode(value) for stored, value in self._store.rows(prefix)}

    def entries_of(self, key: bytes, key_group: int) -> tuple[Layer, set[Any]]:
        """`entries` of a key other than the current one."""
        own, self._context = self._context, KeyContext()
        self._context.key, self._context.key_group = key, key_group
        try:
            return self.entries(key)
        finally:
            self._context = own

    def remove(self, key: Any) -> None:
        self.active[key] = MapLayer(cleared=True)

    def drop_oldest(self, written: Layer, cache_bytes_max: int) -> None:
        self.immutable = self.immutable[:-1]
        if weight(written) > cache_bytes_max // 2 or any(entries.cleared for entries in written.values()):
            self.cache.clear()
            return
        for key, entries in written.items():
            for entry, value in entries.items():
                self.cache.put((key, entry), value)
        self.cache.shrink(cache_bytes_max)

    def write_batches(self, layer: Layer, groups_of: GroupsOf, sorted_rows: int) -> Iterator[WriteBatch]:
        rows = self._rows(layer, groups_of)  # the deletions of a cleared map come before its new entries
        while batch := list(islice(rows, WRITE_ROWS)):
            yield [key for key, _ in batch], [value for _, value in batch]

    def _rows(self, layer: Layer, groups_of: GroupsOf) -> Iterator[Row]:
        encode = self.serializer.encode if self._encode_one is None else self._encode_one
        for keys, maps in _batches(layer, WRITE_ROWS):
            for key, entries, group in zip(keys, maps, groups_of(keys).tolist(), strict=True):
                prefix = row_key(group, self.state_id, key, self.namespace)
                if entries.cleared:
                    yield from self._deletions(prefix)
                for entry, value in entries.items():
                    yield prefix + self.serializer.encode_entry(entry), None if value is TOMBSTONE else encode(value)

    def _deletions(self, prefix: bytes) -> Iterator[Row]:
        """Deletions of all stored entries of a map, looked up WRITE_ROWS at a time."""
        after: bytes | None = None
        while stored := [key for key, _ in islice(self._store.rows(prefix, after), WRITE_ROWS)]:
            yield from ((key, None) for key in stored)
            after = stored[-1]

    def _prefix(self, key: bytes) -> bytes:
        return row_key(self._context.key_group, self.state_id, key, self.namespace)


def _unexpired_encoder(serializer: StateSerializer, state_ttl: StateTtl) -> Callable[[Any], bytes | None]:
    """An encoder that gives None for a value that had expired at the newest freeze, so that its row is deleted."""
    kind = "value" if serializer.kind == "map" else serializer.kind  # a row is one entry

    def encode(value: Any) -> bytes | None:
        kept = unexpired(kind, value, state_ttl.barrier_horizon_ms)
        return None if kept is None else serializer.encode(kept)

    return encode


def weight(layer: Layer) -> int:
    """Bytes of a layer, estimated from its newest entries."""
    if not layer:
        return 0
    sample = list(islice(reversed(layer.values()), _SAMPLE))
    return len(layer) * (_ENTRY_BYTES + sum(map(_value_bytes, sample)) // len(sample))


def _value_bytes(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, MapLayer):
        return len(value) * _ENTRY_BYTES
    if isinstance(value, tuple) and len(value) == 2:  # a value with its TTL stamp, or as good an estimate for any pair
        return _ENTRY_BYTES // 2 + _value_bytes(value[1])
    if isinstance(value, list | tuple | set | dict):
        return len(value) * _ENTRY_BYTES // 2
    return 0


def _batches(layer: Layer, rows: int) -> Iterator[tuple[list[bytes], list[Any]]]:
    keys_left, values_left = iter(layer), iter(layer.values())
    while keys := list(islice(keys_left, rows)):
        yield keys, list(islice(values_left, rows))
