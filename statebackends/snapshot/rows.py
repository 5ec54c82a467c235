"""Conversion of keyed rows to tables and back, in bulk: no Python call per row but those of serializers.

Which rows there are is for the backends, and the columns of a table for tables.py. A pool thread converts rows, holding the
interpreter lock, and `Throttle` leaves most of the interpreter to the task loop. A million Python objects take a few tenths of a
second; in one go they would halve the speed of a busy loop meanwhile, spread out they take a tenth to a fifth of it, and more of
it the older the checkpoint is. Without contention there are no pauses."""

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
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot.sorting import BATCH_ROWS, GroupSort, RowStream, bytes_of
from holdfast.statebackends.snapshot.tables import keyed_table_schema

T = TypeVar("T")

SHARE = 1 / 12
"""Fraction of the time that one thread converts, while others want the interpreter and the checkpoint is young."""
SHARE_MAX = 1 / 2
"""The same, when it is old."""
RISE_S = 0.2
"""Seconds of a checkpoint's age after each of which the fraction is twice as large, up to SHARE_MAX."""
PAUSES_S_MAX = 30.0
"""Seconds of pauses for one table; for each, if a checkpoint has many large ones."""
_TURN_S = 0.002
"""Seconds of processor time after which a pause is considered. Most tables are small, and never pause."""
_CONTENDED = 1.5
"""Ratio of time passed to processor time above which the thread had to wait, for the interpreter or for a processor."""


class Throttle:
    """Throttle of one pool thread that converts one table.

    A small table is done before anybody notices. A large one would take a dozen times as long as its conversion, and checkpoints
    that come more often than that would not complete: so its share rises with time."""

    def __init__(
        self,
        share: float = SHARE,
        *,
        began_s: float | None = None,
        rise_s: float = RISE_S,
        wall_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`began_s`: when the checkpoint began, by `wall_s`; None: now. `share` is that of its first `rise_s` seconds."""
        self._share, self._rise_s = share, rise_s
        self._began_s = wall_s() if began_s is None else began_s
        self._wall_s, self._cpu_s, self._sleep = wall_s, cpu_s, sleep
        self._passed_s = self._used_s = 0.0
        self._left_s = PAUSES_S_MAX

    def run(self, work: Callable[[], T]) -> T:
        """Do a few milliseconds of work that needs the interpreter alone. Then pause, if others wanted it meanwhile, until the work
        is this thread's share of the time."""
        wall, cpu = self._wall_s(), self._cpu_s()
        result = work()
        self._passed_s += self._wall_s() - wall
        self._used_s += self._cpu_s() - cpu
        if self._used_s >= _TURN_S:
            if self._passed_s > _CONTENDED * self._used_s:
                self._pause(self._used_s / self._share_now() - self._passed_s)
            self._passed_s = self._used_s = 0.0
        return result

    def _share_now(self) -> float:
        doublings = min(64, int((self._wall_s() - self._began_s) / self._rise_s))  # no more than a float holds
        return max(self._share, min(SHARE_MAX, self._share * 2.0**doublings))

    def _pause(self, seconds: float) -> None:
        seconds = min(seconds, self._left_s)
        if seconds > 0:
            self._left_s -= seconds
            self._sleep(seconds)


ROWS_PER_BATCH = 1 << 15
"""Values converted at a time, which takes a few milliseconds under the interpreter lock."""
KEYS_PER_BATCH = 4 * ROWS_PER_BATCH
"""Keys taken at a time where each has one value. A step that releases the interpreter lock waits 5 ms until a busy loop gives it
back, and each switch costs the loop half a millisecond: few large steps cost both less than many small ones."""
ROWS_AT_HAND = 1 << 10
"""Values converted in one step: it visits all objects several times, for their types and for what they hold, and from the first
visit on they are in the processor's cache. Tuples take a fourth of the time that they take by ROWS_PER_BATCH."""
_BATCH_BYTES = 64 << 20
"""Bytes of a batch's values above which it is given out in batches of ROWS_PER_BATCH."""

Groups = npt.NDArray[np.int32]
Keys = list[bytes] | ArrowKeyColumn
"""Encoded keys, or their columns."""
KeyBatch = tuple[bytes, Keys, Sequence[Any]]
"""(namespace, keys, value of each key: one value, a list, or a dict of map entries)."""
ColumnBatch = tuple[ArrowKeyColumn, list[pa.Array]]
"""(keys, columns of their values) without a namespace."""
EncodedBatch = tuple[bytes, list[bytes], list[Any]]
"""A KeyBatch of encoded keys."""


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """Reader and writer of the rows of one operator's keyed state."""

    key_type: KeyType
    max_parallelism: int
    operator: str

    def groups_of(self, encoded: Sequence[bytes]) -> Groups:
        """Key groups of encoded keys."""
        arrays = self.key_type.arrays_of_encoded(encoded)
        return self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator).key_groups

    def stream(
        self,
        serializer: StateSerializer,
        batches: Iterable[KeyBatch],
        began_s: float | None = None,
        converted: Callable[[Throttle], Iterable[ColumnBatch]] | None = None,
    ) -> RowStream:
        """One state's table, sorted by key group; batches may come in any order, and are converted here. Raises StateValueError.

        `began_s`: when the checkpoint began, by `time.perf_counter`. `converted` gives further rows, without a namespace."""
        schema = self.schema(serializer)
        rows = GroupSort(KEY_GROUP)
        throttle = Throttle(began_s=began_s)
        try:
            for keys, namespaces, values in _joined(batches):
                for batch in self._record_batches(schema, serializer, keys, namespaces, values, throttle):
                    rows.add(batch)
            for column, arrays in () if converted is None else converted(throttle):
                columns = [pa.array(column.key_groups), *column.arrays, _repeated([b""], [len(column)]), *arrays]
                rows.add(pa.RecordBatch.from_arrays(columns, schema=schema))
        except StateValueError as error:
            raise self.named(error, serializer.name) from error
        return RowStream(schema, rows.size, lambda: rows.batches(BATCH_ROWS))

    def table(self, serializer: StateSerializer, batches: Iterable[KeyBatch], began_s: float | None = None) -> pa.Table:
        """`stream` as one table."""
        return self.stream(serializer, batches, began_s).table()

    def key_columns_of(self, keys: Iterable[tuple[bytes, Keys]]) -> list[pa.Array]:
        """The first columns of a table (key group, key fields, namespace) for keys given as (namespace, keys)."""
        encoded: list[bytes] = []
        columns: list[list[pa.Array]] = []
        namespaces: list[pa.Array] = []
        of_columns: list[pa.Array] = []
        for namespace, some in keys:
            repeated = pa.repeat(pa.scalar(namespace, pa.binary()), len(some))
            if isinstance(some, ArrowKeyColumn):
                columns.append(list(some.arrays))
                of_columns.append(repeated)
            else:
                encoded += some
                namespaces.append(repeated)
        columns.insert(0, self.key_type.arrays_of_encoded(encoded))
        arrays = [pa.concat_arrays(fields) for fields in zip(*columns, strict=True)]
        groups = self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator).key_groups
        return [pa.array(groups), *arrays, pa.concat_arrays([pa.array([], pa.binary()), *namespaces, *of_columns])]

    def named(self, error: StateValueError, state: str) -> StateValueError:
        """The same error, naming operator and state."""
        fields = {**error.fields, "operator": self.operator, "state": state}
        return StateValueError(f"operator {self.operator!r}, state {state!r}: {error}", **fields)

    def schema(self, serializer: StateSerializer) -> pa.Schema:
        map_key = None if serializer.map_key is None else serializer.map_key.arrow_type
        return keyed_table_schema(self.key_type, serializer.meta, serializer.value_fields, map_key=map_key)

    def _record_batches(
        self,
        schema: pa.Schema,
        serializer: StateSerializer,
        keys: Keys,
        namespaces: pa.Array,
        values: Sequence[Any],
        throttle: Throttle,
    ) -> Iterator[pa.RecordBatch]:
        """The rows as one batch, or as several if the values are large."""
        if isinstance(keys, ArrowKeyColumn):
            column, arrays = keys, list(keys.arrays)
        else:
            arrays = throttle.run(partial(self.key_type.arrays_of_encoded, keys))
            column = self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator)
        columns = [pa.array(column.key_groups), *arrays, namespaces]
        if serializer.kind in ("list", "map"):
            elements = throttle.run(lambda: _elements(serializer, values))
            yield pa.RecordBatch.from_arrays([*_repeated_rows(columns, values), *elements], schema=schema)
            return
        converted: list[list[pa.Array]] = []
        for start in range(0, len(values), ROWS_PER_BATCH):
            some_values = values[start : start + ROWS_PER_BATCH]
            converted.append(throttle.run(partial(arrays_of, serializer, some_values)))
        if len(converted) == 1:
            yield pa.RecordBatch.from_arrays([*columns, *converted[0]], schema=schema)
        elif sum(bytes_of(array) for some in converted for array in some) <= _BATCH_BYTES:
            joined = [pa.concat_arrays(each) for each in zip(*converted, strict=True)]
            yield pa.RecordBatch.from_arrays([*columns, *joined], schema=schema)
        else:
            for number, some in enumerate(converted):
                sliced = [column.slice(number * ROWS_PER_BATCH, len(some[0])) for column in columns]
                yield pa.RecordBatch.from_arrays([*sliced, *some], schema=schema)

    def key_batches(
        self, serializer: StateSerializer, table: pa.Table
    ) -> Iterator[tuple[bytes, list[bytes], Groups, list[Any]]]:
        """(namespace, encoded keys, key groups, value of each key) of a table that decode_keyed_table read; list state also went
        through `in_list_order`.

        `serializer` may be that of a newer, compatible type. A list or map may come in several. Raises CorruptStateError."""
        for batch in table.to_batches(max_chunksize=ROWS_PER_BATCH):
            keys, groups = self._keys_of(batch).encoded(), batch.column(KEY_GROUP).to_numpy()
            values = serializer.from_columns(batch)
            map_keys = None if serializer.map_key is None else serializer.map_key.from_arrow(batch.column(MAP_KEY))
            for namespace, rows in _by_namespace(batch.column(NAMESPACE)):
                if rows is None:
                    yield namespace, *_grouped(serializer, keys, groups, values, map_keys)
                else:
                    own_map_keys = None if map_keys is None else _picked(map_keys, rows)
                    yield namespace, *_grouped(serializer, _picked(keys, rows), groups[rows], _picked(values, rows), own_map_keys)

    def column_batches(self, serializer: StateSerializer, table: pa.Table) -> Iterator[tuple[bytes, ArrowKeyColumn, list[Any]]]:
        """(namespace, keys, value of each key) of a table as of `key_batches`, of a state with one value per key."""
        for batch in table.to_batches(max_chunksize=ROWS_PER_BATCH):
            keys, values = self._keys_of(batch), serializer.from_columns(batch)
            for namespace, rows in _by_namespace(batch.column(NAMESPACE)):
                yield namespace, keys if rows is None else keys.take(rows), values if rows is None else _picked(values, rows)

    def _keys_of(self, batch: pa.RecordBatch) -> ArrowKeyColumn:
        arrays = [batch.column(name) for name in key_columns(self.key_type)]
        return self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator)


def arrays_of(serializer: StateSerializer, values: Sequence[Any]) -> list[pa.Array]:
    """`serializer.to_arrays`, a few values at a time."""
    if len(values) <= ROWS_AT_HAND:
        return serializer.to_arrays(values)
    some = [serializer.to_arrays(values[start : start + ROWS_AT_HAND]) for start in range(0, len(values), ROWS_AT_HAND)]
    return [pa.concat_arrays(each) for each in zip(*some, strict=True)]


def _repeated_rows(columns: list[pa.Array], values: Sequence[Any]) -> list[pa.Array]:
    """The columns of keys, each repeated for every element of its key."""
    owners = pa.array(np.repeat(np.arange(len(values)), np.fromiter(map(len, values), np.int64, len(values))))
    return [column.take(owners) for column in columns]


def _elements(serializer: StateSerializer, values: Sequence[Any]) -> list[pa.Array]:
    """Columns of list elements, or of map entries; a few lists or maps at a time."""
    if len(values) > ROWS_AT_HAND:
        some = [_elements(serializer, values[start : start + ROWS_AT_HAND]) for start in range(0, len(values), ROWS_AT_HAND)]
        return [pa.concat_arrays(each) for each in zip(*some, strict=True)]
    if serializer.map_key is not None:
        map_keys = serializer.map_key.to_arrow(list(chain.from_iterable(values)))
        return [map_keys, *arrays_of(serializer, [value for entries in values for value in entries.values()])]
    counts = np.fromiter(map(len, values), np.int64, len(values))
    starts = np.cumsum(counts) - counts
    positions = pa.array((np.arange(counts.sum()) - np.repeat(starts, counts)).astype(np.int32))
    return [positions, *arrays_of(serializer, list(chain.from_iterable(values)))]


def _joined(batches: Iterable[KeyBatch]) -> Iterator[tuple[Keys, pa.Array, Sequence[Any]]]:
    """(keys, namespaces, values) with small batches of encoded keys joined to about ROWS_PER_BATCH keys."""
    keys: list[bytes] = []
    values: list[Any] = []
    names: list[bytes] = []
    counts: list[int] = []
    for namespace, some_keys, some_values in batches:
        if not len(some_keys):
            continue
        if isinstance(some_keys, ArrowKeyColumn) or (not keys and len(some_keys) > ROWS_PER_BATCH // 2):  # given out without a copy
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
    serializer: StateSerializer, keys: list[bytes], groups: Groups, values: list[Any], map_keys: list[Any] | None
) -> tuple[list[bytes], Groups, list[Any]]:
    """(keys, key groups, values) with the list elements or map entries of each key collected."""
    if serializer.kind not in ("list", "map"):
        return keys, groups, values
    collected: dict[bytes, Any] = {}
    firsts: list[int] = []
    for row, key in enumerate(keys):
        if key not in collected:
            collected[key] = [] if serializer.kind == "list" else {}
            firsts.append(row)
        if serializer.kind == "list":
            collected[key].append(values[row])
        elif map_keys is not None:
            collected[key][map_keys[row]] = values[row]
    return list(collected), groups[firsts], list(collected.values())


def _picked(values: list[Any], rows: npt.NDArray[np.int64]) -> list[Any]:
    return [values[row] for row in rows.tolist()]


def _by_namespace(column: pa.Array) -> Iterator[tuple[bytes, npt.NDArray[np.int64] | None]]:
    """(namespace, indices of its rows); None: all rows."""
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


def unexpired_batches(kind: str, batches: Iterable[EncodedBatch], horizon_ms: int) -> Iterator[EncodedBatch]:
    """The rows of a state with a TTL that have not expired: stamped after `horizon_ms`."""
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
    """A key's value without expired elements or entries (stamped at or before `horizon_ms`); None if nothing is left.

    Doesn't change the value."""
    if kind == "list":
        return [element for element in value if element[0] > horizon_ms] or None
    if kind == "map":
        return {entry: stamped for entry, stamped in value.items() if stamped[0] > horizon_ms} or None
    return value if value[0] > horizon_ms else None


def unexpired_rows(table: pa.Table, horizon_ms: int) -> pa.Table:
    """The rows of a stored table stamped after `horizon_ms`. Raises CorruptStateError; KeyError without a column of stamps."""
    stamps = table.column(TTL_STAMP)
    if stamps.null_count or not pa.types.is_integer(stamps.type):
        raise CorruptStateError(f"column {TTL_STAMP!r} holds nulls or is not an integer", reason="column type")
    shown = pc.greater(stamps, pa.scalar(horizon_ms, pa.int64()))
    return table if pc.all(shown).as_py() in (True, None) else table.filter(shown)


def stamped_rows(table: pa.Table, now_ms: int) -> pa.Table:
    """Rows that were stored without stamps, stamped with the time of the restore."""
    stamps = pa.repeat(pa.scalar(now_ms, pa.int64()), table.num_rows)
    return table.append_column(pa.field(TTL_STAMP, pa.int64(), nullable=False), stamps)
