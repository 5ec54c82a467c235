"""Rows of keyed state to tables and back, in bulk: no Python call per row but the serializers' own.

The columns of a table are tables.py's; which rows there are is the backends'. A pool thread converts them, and holds the
interpreter lock meanwhile: `Throttle` leaves most of it to the task loop. A million Python objects take a few tenths of a second of
the interpreter. A busy loop would lose them at once, half of its speed while they last; spread out, it loses a tenth to a fifth.
Where nothing else wants the interpreter, there are no pauses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import CorruptStateError, StateValueError
from holdfast.statebackends.layout import KEY_GROUP, MAP_KEY, NAMESPACE, TTL_STAMP
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot.sorting import BATCH_ROWS, GroupSort, RowStream, bytes_of
from holdfast.statebackends.snapshot.tables import keyed_table_schema

T = TypeVar("T")

SHARE = 1 / 12
"""Of the time that passes, for one thread, while others want the interpreter."""
PAUSES_S_MAX = 30.0
"""Of one table. A checkpoint of many large ones may wait as long for each."""
_TURN_S = 0.002
"""Of processor time: shorter turns count together. Most tables are small, and never pause."""
_CONTENDED = 1.5
"""Work that took so many times its own processor time had to wait: for the interpreter, or for a processor."""


class Throttle:
    """Of one pool thread that turns one table into columns."""

    def __init__(
        self,
        share: float = SHARE,
        *,
        wall_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share = share
        self._wall_s, self._cpu_s, self._sleep = wall_s, cpu_s, sleep
        self._passed_s = self._used_s = 0.0
        self._left_s = PAUSES_S_MAX

    def run(self, work: Callable[[], T]) -> T:
        """Do a few milliseconds of work that needs nothing but the interpreter; then pause, if others wanted it meanwhile and have
        had less than their part of it."""
        wall, cpu = self._wall_s(), self._cpu_s()
        result = work()
        self._passed_s += self._wall_s() - wall
        self._used_s += self._cpu_s() - cpu
        if self._used_s >= _TURN_S:
            if self._passed_s > _CONTENDED * self._used_s:
                self._pause(self._used_s / self._share - self._passed_s)
            self._passed_s = self._used_s = 0.0
        return result

    def _pause(self, seconds: float) -> None:
        seconds = min(seconds, self._left_s)
        if seconds > 0:
            self._left_s -= seconds
            self._sleep(seconds)


ROWS_PER_BATCH = 1 << 15
"""Values converted at a time; conversions hold the interpreter lock for a few milliseconds."""
KEYS_PER_BATCH = 4 * ROWS_PER_BATCH
"""Keys taken together where each has one value. A step that lets go of the interpreter lock waits 5 ms for a busy loop to give it
back, and the loop loses half a millisecond by each change of hands: few large steps cost both less than many small ones."""
_BATCH_BYTES = 64 << 20
"""Values of a batch above this stay in batches of ROWS_PER_BATCH."""

Groups = npt.NDArray[np.int32]
KeyBatch = tuple[bytes, list[bytes], list[Any]]
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

    def stream(self, codec: StateSerializer, batches: Iterable[KeyBatch]) -> RowStream:
        """Table of one state, sorted by key group; batches come in any order, and are converted here. Raises StateValueError."""
        schema = self.schema(codec)
        rows = GroupSort(KEY_GROUP)
        throttle = Throttle()
        try:
            for keys, namespaces, values in _joined(batches):
                for batch in self._record_batches(schema, codec, keys, namespaces, values, throttle):
                    rows.add(batch)
        except StateValueError as error:
            raise self.named(error, codec.name) from error
        return RowStream(schema, rows.size, lambda: rows.batches(BATCH_ROWS))

    def table(self, codec: StateSerializer, batches: Iterable[KeyBatch]) -> pa.Table:
        """The same, as a whole."""
        return self.stream(codec, batches).table()

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

    def schema(self, codec: StateSerializer) -> pa.Schema:
        map_key = None if codec.map_key is None else codec.map_key.arrow_type
        return keyed_table_schema(self.key_type, codec.meta, codec.value_fields, map_key=map_key)

    def _record_batches(
        self,
        schema: pa.Schema,
        codec: StateSerializer,
        keys: list[bytes],
        namespaces: pa.Array,
        values: list[Any],
        throttle: Throttle,
    ) -> Iterator[pa.RecordBatch]:
        """One batch, unless values are large."""
        arrays = throttle.run(lambda: self.key_type.arrays_of_encoded(keys))
        groups = self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator).key_groups
        columns = [pa.array(groups), *arrays, namespaces]
        if codec.kind in ("list", "map"):
            elements = throttle.run(lambda: _elements(codec, values))
            yield pa.RecordBatch.from_arrays([*_repeated_rows(columns, values), *elements], schema=schema)
            return
        converted: list[list[pa.Array]] = []
        for start in range(0, len(values), ROWS_PER_BATCH):
            some_values = values[start : start + ROWS_PER_BATCH]
            converted.append(throttle.run(partial(codec.to_arrays, some_values)))
        if len(converted) == 1:
            yield pa.RecordBatch.from_arrays([*columns, *converted[0]], schema=schema)
        elif sum(bytes_of(array) for some in converted for array in some) <= _BATCH_BYTES:
            joined = [pa.concat_arrays(each) for each in zip(*converted, strict=True)]
            yield pa.RecordBatch.from_arrays([*columns, *joined], schema=schema)
        else:
            for number, some in enumerate(converted):
                sliced = [column.slice(number * ROWS_PER_BATCH, len(some[0])) for column in columns]
                yield pa.RecordBatch.from_arrays([*sliced, *some], schema=schema)

    def key_batches(self, codec: StateSerializer, table: pa.Table) -> Iterator[tuple[bytes, list[bytes], Groups, list[Any]]]:
        """(namespace, encoded keys, key groups, what each has) of a table read by decode_keyed_table; lists by `in_list_order`.

        `codec` may declare a newer, compatible type. A list or a map may come in several batches. Raises CorruptStateError."""
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


def _repeated_rows(columns: list[pa.Array], values: list[Any]) -> list[pa.Array]:
    """The columns of keys with several elements each."""
    owners = pa.array(np.repeat(np.arange(len(values)), np.fromiter(map(len, values), np.int64, len(values))))
    return [column.take(owners) for column in columns]


def _elements(codec: StateSerializer, values: list[Any]) -> list[pa.Array]:
    """The columns of list elements, or of map entries."""
    if codec.map_key is not None:
        map_keys = codec.map_key.to_arrow(list(chain.from_iterable(values)))
        return [map_keys, *codec.to_arrays([value for entries in values for value in entries.values()])]
    counts = np.fromiter(map(len, values), np.int64, len(values))
    starts = np.cumsum(counts) - counts
    positions = pa.array((np.arange(counts.sum()) - np.repeat(starts, counts)).astype(np.int32))
    return [positions, *codec.to_arrays(list(chain.from_iterable(values)))]


def _joined(batches: Iterable[KeyBatch]) -> Iterator[tuple[list[bytes], pa.Array, list[Any]]]:
    """(encoded keys, namespaces, what each has) of batches, about ROWS_PER_BATCH keys at a time: they may be small, and many."""
    keys: list[bytes] = []
    values: list[Any] = []
    names: list[bytes] = []
    counts: list[int] = []
    for namespace, some_keys, some_values in batches:
        if not some_keys:
            continue
        if not keys and len(some_keys) > ROWS_PER_BATCH // 2:  # large enough as it is: nothing is copied
            yield some_keys, _repeated([namespace], [len(some_keys)]), some_values
            continue
        if keys and len(keys) + len(some_keys) > ROWS_PER_BATCH:
            yield keys, _repeated(names, counts), values
            keys, values, names, counts = [], [], [], []
        keys += some_keys
        values += some_values
        names.append(namespace)
        counts.append(len(some_keys))
    if keys:
        yield keys, _repeated(names, counts), values


def _repeated(names: list[bytes], counts: list[int]) -> pa.Array:
    if len(names) == 1:
        return pa.repeat(pa.scalar(names[0], pa.binary()), counts[0])
    return pa.array(names, pa.binary()).take(pa.array(np.repeat(np.arange(len(names)), counts)))


def _grouped(
    codec: StateSerializer, keys: list[bytes], groups: Groups, values: list[Any], map_keys: list[Any] | None
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


def _by_namespace(column: pa.Array) -> Iterator[tuple[bytes, npt.NDArray[np.int64] | None]]:
    """(namespace, its rows); None for all rows."""
    if len(column) and column.type == pa.binary() and not column.total_values_length:
        yield b"", None
        return
    encoded = column.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], None
        return
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    for code, name in enumerate(names):
        yield name, np.flatnonzero(codes == code)


def unexpired_batches(kind: str, batches: Iterable[KeyBatch], horizon_ms: int) -> Iterator[KeyBatch]:
    """Rows of a state without what has expired."""
    for namespace, keys, values in batches:
        kept = [unexpired(kind, value, horizon_ms) for value in values]
        shown = [value is not None for value in kept]
        if all(shown):
            yield namespace, keys, kept
        else:
            yield (
                namespace,
                [key for key, is_shown in zip(keys, shown, strict=True) if is_shown],
                [value for value in kept if value is not None],
            )


def unexpired(kind: str, value: Any, horizon_ms: int) -> Any:
    """What one key has, without what has expired; None if that is all of it. The value itself is not changed."""
    if kind == "list":
        return [element for element in value if element[0] > horizon_ms] or None
    if kind == "map":
        return {entry: stamped for entry, stamped in value.items() if stamped[0] > horizon_ms} or None
    return value if value[0] > horizon_ms else None


def unexpired_rows(table: pa.Table, horizon_ms: int) -> pa.Table:
    """The rows of a stored table that have not expired. Raises CorruptStateError, KeyError without a column of stamps."""
    stamps = table.column(TTL_STAMP)
    if stamps.null_count or not pa.types.is_integer(stamps.type):
        raise CorruptStateError(f"column {TTL_STAMP!r} holds nulls or is not an integer", reason="column type")
    shown = pc.greater(stamps, pa.scalar(horizon_ms, pa.int64()))
    return table if pc.all(shown).as_py() in (True, None) else table.filter(shown)


def stamped_rows(table: pa.Table, now_ms: int) -> pa.Table:
    """Rows that were stored without stamps: to a declaration with TTL they were written now."""
    stamps = pa.repeat(pa.scalar(now_ms, pa.int64()), table.num_rows)
    return table.append_column(pa.field(TTL_STAMP, pa.int64(), nullable=False), stamps)
