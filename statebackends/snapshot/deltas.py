"""Deltas of keyed state: the parts of a snapshot that make up a state, and the merge of a base and its deltas. Pure.

A delta is a table of the rows that changed since a base, with the columns of the base and `tombstone`. It has all rows of each
changed key (all elements of a list, all entries of a map), or one row with a tombstone if the key has none left. Of the sets of
columnar state it has what they gained; the schema's metadata lists their columns. A timer is its own key: it is present, or has a
tombstone; so is a row of a row table, which its order tells from others. Columnar state and row tables drop whole namespaces: the
schema's metadata lists those whose earlier rows are dropped. Which files hold a base and its deltas is for increments.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.columnar.key_index import distinct_codes
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import (
    DELTA_FORMAT,
    DELTA_FORMATS,
    NATIVE_FORMAT,
    SET_DELTA_FORMAT,
    TABLE_FORMATS,
    KeyedStateHandle,
    KeyGroupRange,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.layout import KEY_GROUP, NAMESPACE, ORDER, TIME
from holdfast.statebackends.serialization.key_hash import Hashes
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import ROW_TABLE_KIND, TIMERS_KIND
from holdfast.statebackends.snapshot.sorting import is_sorted, stable_order
from holdfast.statebackends.snapshot.tables import sort_by_key_group

DELTAS_MAX = 32
"""Deltas on one base."""
BATCH_BYTES_MAX = 16 << 20
"""Bytes of tables that are read at one time; a larger table is read alone, with its deltas."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One keyed state's share of one old subtask: a table and its deltas, or rows in native files."""

    handle: KeyedStateHandle
    index: int
    """The state's position in the handle's states."""
    deltas: tuple[StateHandle, ...] = ()
    """Oldest first."""
    subtask: int = -1
    """The old subtask; -1: not known."""

    @property
    def meta(self) -> StateMeta:
        return self.handle.states[self.index]

    @property
    def key_groups(self) -> KeyGroupRange:
        return self.handle.key_groups

    @property
    def is_native(self) -> bool:
        return self.handle.format == NATIVE_FORMAT

    @property
    def base(self) -> StateHandle:
        """The table. Not for native files."""
        return self.handle.parts[self.index]

    @property
    def tables(self) -> tuple[StateHandle, ...]:
        """The base, then its deltas. Not for native files."""
        return self.base, *self.deltas

    @property
    def size(self) -> int:
        """Bytes; -1 for native files, which hold all states of the operator."""
        return -1 if self.is_native else sum(max(part.length, 0) for part in self.tables)


def state_parts(handles: Iterable[KeyedStateHandle], *, operator: str, subtask: int = -1) -> list[StatePart]:
    """The keyed states in handles of one or more old subtasks, in the order of the handles. `subtask`: of all handles, if known.

    Raises CorruptStateError for a delta without its table."""
    found: list[tuple[KeyedStateHandle, int]] = []
    bases: dict[tuple[KeyGroupRange, str], StateMeta] = {}
    deltas: dict[tuple[KeyGroupRange, str], list[StateHandle]] = {}
    for handle in handles:
        for index, meta in enumerate(handle.states):
            place = (handle.key_groups, meta.name)
            if handle.format not in DELTA_FORMATS:
                found.append((handle, index))
                if handle.format in TABLE_FORMATS:
                    bases[place] = meta
            elif bases.get(place) != meta:
                raise CorruptStateError(
                    f"operator {operator!r}: state {meta.name!r} has a delta and no such table before it",
                    operator=operator,
                    state=meta.name,
                    reason="contents",
                )
            else:
                deltas.setdefault(place, []).append(handle.parts[index])
    parts = []
    for handle, index in found:
        own = deltas.get((handle.key_groups, handle.states[index].name), ()) if handle.format in TABLE_FORMATS else ()
        parts.append(StatePart(handle, index, tuple(own), subtask))
    return parts


def part_batches(parts: Sequence[StatePart]) -> Iterator[Sequence[StatePart]]:
    """The parts in order, in batches whose tables are read at one time and held in memory."""
    start, size = 0, 0
    for position, part in enumerate(parts):
        if position > start and size + part.size > BATCH_BYTES_MAX:
            yield parts[start:position]
            start, size = position, 0
        size += part.size
    if start < len(parts):
        yield parts[start:]


TOMBSTONE_COLUMN = "tombstone"
REPLACED_METADATA = b"holdfast.replaced"
"""Key in the schema's metadata: a JSON list of namespaces."""
ADDED_METADATA = b"holdfast.added"
"""Key in the schema's metadata: a JSON list of columns, whose lists are added to those of the row before."""

_BUCKETS = 1 << 20
_BATCH_ROWS = 1 << 17
"""Rows of the base that `newest_rows` merges at a time: few beside a large table, and enough that steps are rare. A step that
releases the interpreter lock may wait 5 ms to get it back from a busy loop."""
_BATCH_BUCKETS = 1 << 18
_TOGETHER_BYTES_MAX = 1 << 30
LIST_VALUES_MAX = 1 << 29
"""Values in the lists of one array, from which on another is begun: Arrow can't number those beyond 2**31."""
_OWN_IDENTITY = (pa.int64(), pa.utf8(), pa.binary(), pa.date32(), pa.timestamp("us", "UTC"))
"""Types of keys whose identity is Arrow's equality."""
_Rows = npt.NDArray[np.int64]


def own_keys_of(kind: str) -> tuple[str, ...]:
    """Columns that are part of a row's identity beside key and namespace, where a delta replaces single rows."""
    return {TIMERS_KIND: (TIME,), ROW_TABLE_KIND: (ORDER,)}.get(kind, ())


def delta_schema(base: pa.Schema) -> pa.Schema:
    """Schema of a delta on a table of this schema."""
    return base.append(pa.field(TOMBSTONE_COLUMN, pa.bool_(), nullable=False))


def delta_format(meta: StateMeta) -> str:
    """Format of a handle with deltas on tables of a state."""
    return SET_DELTA_FORMAT if meta.kind == "columnar" and "=count_distinct(" in meta.value_type else DELTA_FORMAT


def delta_table(
    changed: pa.Table, removed: Sequence[pa.Array], replaced: Sequence[int] = (), added: Sequence[str] = ()
) -> pa.Table:
    """A delta, sorted by key group. `changed`: rows of changed keys; `removed`: the first columns of removed ones (key group, key
    fields, namespace, and a timer's time); `replaced`: namespaces whose earlier rows are dropped; `added`: columns with what lists
    gained."""
    schema = delta_schema(changed.schema)
    for name, values in ((REPLACED_METADATA, replaced), (ADDED_METADATA, added)):
        if values:
            schema = schema.with_metadata({**(schema.metadata or {}), name: msgspec.json.encode(list(values))})
    shown = changed.append_column(schema.field(TOMBSTONE_COLUMN), pa.repeat(pa.scalar(False), changed.num_rows))
    tables = [pa.Table.from_arrays(shown.columns, schema=schema)]
    count = len(removed[0]) if removed else 0
    if count:
        blank = [_blank(field, count) for field in list(changed.schema)[len(removed) :]]
        tables.append(pa.Table.from_arrays([*removed, *blank, pa.repeat(pa.scalar(True), count)], schema=schema))
    return sort_by_key_group(pa.concat_tables(tables))


def merged_deltas(
    base: pa.Table,
    deltas: Sequence[pa.Table],
    key_type: KeyType,
    max_parallelism: int,
    *,
    own_keys: Sequence[str] = (),
    in_order: bool = True,
) -> pa.Table:
    """The rows of a base after its deltas (oldest first), as one table like the base; sorted by key group if `in_order`, which
    takes as long again.

    All tables may be cut to the same key groups. `own_keys`: columns of a row's identity in addition to key and namespace.
    Raises KeyError, ValueError or pyarrow's errors for tables that are not a base and its deltas."""
    tables = [base, *deltas]
    names = [*key_columns(key_type), NAMESPACE, *own_keys]
    hashes = [_hashes(table, key_type, max_parallelism) for table in tables]
    touched = np.zeros(_BUCKETS, np.bool_)
    for of_delta in hashes[1:]:
        touched[of_delta % _BUCKETS] = True
    alive = [np.ones(len(table), np.bool_) for table in tables]
    for position, delta in enumerate(tables[1:], 1):
        _forget(tables[:position], alive[:position], replaced_by(delta.schema))
        alive[position] &= ~tombstones(delta)
    there = [of_table.copy() for of_table in alive]
    # Only rows that share a bucket with a changed key are compared: all rows of deltas, and few of the base.
    looked_at = [np.flatnonzero(touched[of_table % _BUCKETS]) for of_table in hashes]
    picked = [table.select(names).take(pa.array(rows)) for table, rows in zip(tables, looked_at, strict=True)]
    codes, count = row_codes(picked, key_type, max_parallelism, own_keys)
    sources = np.repeat(np.arange(len(tables)), [len(rows) for rows in looked_at])
    newest = np.zeros(count, np.int64)
    newest[codes] = sources  # sources ascend, and the last assignment stays
    start = 0
    for rows, of_table in zip(looked_at, alive, strict=True):
        stop = start + len(rows)
        of_table[rows] &= sources[start:stop] == newest[codes[start:stop]]
        start = stop
    live = [table.filter(pa.array(of_table)) for table, of_table in zip(tables, alive, strict=True)]
    if any(added_by(delta.schema) for delta in deltas):
        live = _added_up(tables, live, looked_at, there, alive, codes)
    merged = pa.concat_tables(_like(table, base.schema) for table in live)
    if not in_order:
        return merged
    return merged.combine_chunks().take(pa.array(stable_order(merged.column(KEY_GROUP).to_numpy())))


def newest_rows(base: pa.Table, deltas: Sequence[pa.Table], key_type: KeyType, max_parallelism: int) -> Iterator[pa.Table]:
    """`merged_deltas` of a state with one row per key, in batches of whole key groups, about `_BATCH_ROWS` rows of the base each.

    Loading the batches one by one makes no value that a delta replaces, and copies one batch at a time. Raises as
    `merged_deltas`."""
    groups = _groups(base)
    parts = [batch for delta in deltas for batch in delta.to_batches() if batch.num_rows]
    keys = [_groups(part) for part in parts]
    is_alike = all(part.schema.equals(parts[0].schema) for part in parts)
    if not parts or not is_alike or not all(map(is_sorted, (groups, *keys))):  # another tool has reordered rows
        yield merged_deltas(base, deltas, key_type, max_parallelism, in_order=False)
        return
    # A batch ends behind the key group of its last row; the last batch also covers key groups without rows in the base.
    ends = np.unique(groups[_BATCH_ROWS - 1 :: _BATCH_ROWS])
    bounds = [[0, *np.searchsorted(key, ends, side="right").tolist(), len(key)] for key in (groups, *keys)]
    for (start, stop), *changed in zip(*map(pairwise, bounds), strict=True):
        some = [part.slice(first, last - first) for part, (first, last) in zip(parts, changed, strict=True) if first < last]
        rows = base.slice(start, stop - start)
        if some:
            # Arrow can't number the bytes of a column beyond 2 GiB.
            together = [pa.concat_batches(some)] if sum(part.nbytes for part in some) <= _TOGETHER_BYTES_MAX else some
            yield from _newest(rows, pa.Table.from_batches(together), key_type, max_parallelism)
        else:
            yield rows


def _newest(base: pa.Table, changed: pa.Table, key_type: KeyType, max_parallelism: int) -> Iterator[pa.Table]:
    """The rows of a base whose keys have no row in `changed`; then the last row of each key in `changed`, which is oldest first."""
    gone = tombstones(changed)
    touched = np.zeros(_BATCH_BUCKETS, np.bool_)
    touched[_hashes(changed, key_type, max_parallelism) % _BATCH_BUCKETS] = True
    looked_at = np.flatnonzero(touched[_hashes(base, key_type, max_parallelism) % _BATCH_BUCKETS])
    names = [*key_columns(key_type), NAMESPACE]
    picked = [base.select(names).take(pa.array(looked_at)), changed.select(names)]
    codes, count = row_codes(picked, key_type, max_parallelism, ())
    last = np.empty(count, np.int64)
    last[codes] = np.arange(len(codes))  # positions ascend, and the last assignment stays
    is_last = last[codes] == np.arange(len(codes))
    kept = np.ones(len(base), np.bool_)
    kept[looked_at] = is_last[: len(looked_at)]
    yield base.filter(pa.array(kept))
    yield changed.select(base.schema.names).filter(pa.array(is_last[len(looked_at) :] & ~gone))


def _added_up(
    tables: Sequence[pa.Table],
    live: Sequence[pa.Table],
    looked_at: Sequence[_Rows],
    there: Sequence[npt.NDArray[np.bool_]],
    alive: Sequence[npt.NDArray[np.bool_]],
    codes: _Rows,
) -> list[pa.Table]:
    """The live rows of each table, with all values of a key in columns whose lists deltas added to.

    `looked_at`: rows of each table that have a code, all of a delta's; `there`: rows that no later delta drops, and that are no
    tombstones; `alive`: the newest of these, which are `live`. One of the base has all of its values itself."""
    sources = np.repeat(np.arange(len(tables)), [len(rows) for rows in looked_at])
    rows = np.concatenate(looked_at)
    is_there, is_live = (
        np.concatenate([of_table[some] for of_table, some in zip(each, looked_at, strict=True)]) for each in (there, alive)
    )
    joined = codes[is_live & (sources > 0)]  # a code once, in the order of the live rows
    numbers = np.full(codes.max(initial=-1) + 1, -1, np.int64)
    numbers[joined] = np.arange(len(joined))
    found = list(live)
    for name in sorted({name for table in tables[1:] for name in added_by(table.schema)}):
        columns = [table.column(name) for table in tables]
        if not pa.types.is_list(columns[0].type):
            raise ValueError(f"{ADDED_METADATA.decode()}: column {name!r} is not one of lists")
        adds = np.array([name in added_by(table.schema) for table in tables])
        since = np.zeros(len(numbers), np.int64)  # the first table whose values the newest row has
        afresh = ~(adds[sources] & is_there)
        since[codes[afresh]] = sources[afresh]  # sources ascend, and the last assignment stays
        counted = np.flatnonzero(is_there & (numbers[codes] >= 0) & (sources >= since[codes]))
        counted = counted[np.argsort(numbers[codes[counted]], kind="stable")]
        whole = _joined_lists(columns, sources[counted], rows[counted], numbers[codes[counted]], len(joined))
        first = 0
        for position, table in enumerate(found[1:], 1):
            index = table.schema.get_field_index(name)
            found[position] = table.set_column(index, table.field(index), whole.slice(first, len(table)))
            first += len(table)
    return found


def _joined_lists(
    columns: Sequence[pa.ChunkedArray], sources: _Rows, rows: _Rows, numbers: _Rows, count: int
) -> pa.ChunkedArray:
    """One list for each number below `count`: those in these rows of these columns whose number it is, which ascends, one after
    the other. Each number has a row."""
    arrays = [_whole(column) for column in columns]
    lengths = np.zeros(len(rows), np.int64)
    for source, array in enumerate(arrays):
        own = sources == source
        lengths[own] = array.value_lengths().fill_null(0).to_numpy()[rows[own]]
    totals = np.zeros(count, np.int64)
    np.add.at(totals, numbers, lengths)
    pieces = (np.cumsum(totals) - totals) // LIST_VALUES_MAX
    firsts = np.flatnonzero(np.diff(pieces, prepend=-1))
    chunks = []
    for first, stop in pairwise([*firsts.tolist(), count] if count else []):
        some = slice(*np.searchsorted(numbers, [first, stop]).tolist())
        order = np.argsort(sources[some], kind="stable")
        of_tables = [array.take(pa.array(rows[some][sources[some] == source])) for source, array in enumerate(arrays)]
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        values = pa.concat_arrays(of_tables).take(pa.array(back)).flatten()
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(totals[first:stop])])
        chunks.append(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=columns[0].type))
    return pa.chunked_array(chunks, columns[0].type)


def of_few_values(table: pa.Table) -> Iterator[pa.Table]:
    """The table, or, where its lists have more values than Arrow can number in one array, its chunks."""
    lists = [column for column in table.columns if pa.types.is_list(column.type)]
    if all(sum(len(chunk.flatten()) for chunk in column.chunks) <= 2 * LIST_VALUES_MAX for column in lists):
        yield table
        return
    for batch in table.to_batches():
        yield pa.Table.from_batches([batch])


def replaced_by(schema: pa.Schema) -> list[int]:
    """Namespaces whose earlier rows a delta of this schema drops. Raises ValueError."""
    stored = (schema.metadata or {}).get(REPLACED_METADATA, b"[]")
    try:
        return msgspec.json.decode(stored, type=list[int])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{REPLACED_METADATA.decode()}: {error}") from error


def added_by(schema: pa.Schema) -> list[str]:
    """Columns in which a delta of this schema has what lists gained. Raises ValueError."""
    stored = (schema.metadata or {}).get(ADDED_METADATA, b"[]")
    try:
        return msgspec.json.decode(stored, type=list[str])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{ADDED_METADATA.decode()}: {error}") from error


def tombstones(delta: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows of a delta are tombstones. Raises KeyError, ValueError."""
    column = delta.column(TOMBSTONE_COLUMN)
    if column.null_count or column.type != pa.bool_():
        raise ValueError(f"column {TOMBSTONE_COLUMN!r} holds nulls or is not a bool")
    found: npt.NDArray[np.bool_] = column.to_numpy()
    return found


def _forget(tables: Sequence[pa.Table], alive: Sequence[npt.NDArray[np.bool_]], namespaces: list[int]) -> None:
    if namespaces:
        for table, of_table in zip(tables, alive, strict=True):
            found = pc.is_in(table.column(NAMESPACE), value_set=pa.array(namespaces, pa.int64()))
            of_table &= ~found.to_numpy()


def row_codes(tables: Sequence[pa.Table], key_type: KeyType, max_parallelism: int, own_keys: Sequence[str]) -> tuple[_Rows, int]:
    """(a number for each row of all tables, equal for rows of equal key, namespace and own keys; count of different numbers)."""
    names = key_columns(key_type)
    if len(names) == 1 and key_type.arrow_types[0] in _OWN_IDENTITY:
        keys = pa.concat_arrays([_whole(table.column(names[0])) for table in tables])
    else:
        encoded: list[bytes] = []
        for table in tables:
            arrays = [table.column(name) for name in names]
            encoded += key_type.column(arrays, max_parallelism=max_parallelism).encoded()
        keys = pa.array(encoded, pa.binary())
    codes, count = distinct_codes(keys)
    for name in (NAMESPACE, *own_keys):
        more, more_count = distinct_codes(pa.concat_arrays([_whole(table.column(name)) for table in tables]))
        if more_count > 1:
            codes, count = distinct_codes(pa.array(codes * more_count + more))  # below rows squared: fits int64
    return codes, count


def _hashes(table: pa.Table, key_type: KeyType, max_parallelism: int) -> Hashes:
    return key_type.column([table.column(name) for name in key_columns(key_type)], max_parallelism=max_parallelism).hashes()


def _groups(rows: pa.Table | pa.RecordBatch) -> npt.NDArray[np.int32]:
    groups: npt.NDArray[np.int32] = rows.column(KEY_GROUP).to_numpy()
    return groups


def _like(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns: list[Any] = [table.column(name) for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _blank(field: pa.Field, count: int) -> pa.Array:
    """Values beside tombstones, which are never read: nulls, or zeros where the base allows no nulls."""
    if field.nullable:
        return pa.nulls(count, field.type)
    return pa.array(np.zeros(count, np.int64)).cast(field.type)
