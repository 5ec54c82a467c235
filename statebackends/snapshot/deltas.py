"""Deltas of keyed state: which parts of a snapshot make up a state, and a base with its deltas as one table.

A delta is a table of what changed since a base: its columns are those of the base, and `tombstone`. It has all rows of every key
that changed (the elements of a list and the entries of a map as a whole), or one row with a tombstone if nothing is left of it; a
timer, whose key is all of its row, is there or has a tombstone. Columnar state loses whole namespaces at a time: the schema's
metadata names those of which everything before is dropped. Pure; which files hold a base and its deltas is for increments.py."""

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
    NATIVE_FORMAT,
    TABLE_FORMATS,
    KeyedStateHandle,
    KeyGroupRange,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.layout import KEY_GROUP, NAMESPACE
from holdfast.statebackends.serialization.key_hash import Hashes
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.snapshot.sorting import is_sorted, stable_order
from holdfast.statebackends.snapshot.tables import sort_by_key_group

RUNS_MAX = 32
"""Deltas upon one base."""
BATCH_BYTES_MAX = 16 << 20
"""Tables are read at one time up to this sum; a larger one alone, with its deltas."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One keyed state's share of one old subtask: a table and the deltas upon it, or rows in native files."""

    handle: KeyedStateHandle
    index: int
    """The state's position in the handle's states."""
    deltas: tuple[StateHandle, ...] = ()
    """Oldest first."""
    subtask: int = -1
    """The old subtask; -1 where it does not matter, and the handles of several came together."""

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
        """The table; not of native files."""
        return self.handle.parts[self.index]

    @property
    def tables(self) -> tuple[StateHandle, ...]:
        """The base, then its deltas; not of native files."""
        return self.base, *self.deltas

    @property
    def size(self) -> int:
        """Bytes; -1 for native files, which hold all states of the operator."""
        return -1 if self.is_native else sum(max(part.length, 0) for part in self.tables)


def state_parts(handles: Iterable[KeyedStateHandle], *, operator: str, subtask: int = -1) -> list[StatePart]:
    """The keyed states in some handles, of one old subtask or several, in the order of the handles.

    Raises CorruptStateError for a delta without its table."""
    found: list[tuple[KeyedStateHandle, int]] = []
    bases: dict[tuple[KeyGroupRange, str], StateMeta] = {}
    deltas: dict[tuple[KeyGroupRange, str], list[StateHandle]] = {}
    for handle in handles:
        for index, meta in enumerate(handle.states):
            place = (handle.key_groups, meta.name)
            if handle.format != DELTA_FORMAT:
                found.append((handle, index))
                if handle.format in TABLE_FORMATS:
                    bases[place] = meta
            elif bases.get(place) != meta:
                raise CorruptStateError(
                    f"operator {operator!r}: state {meta.name!r} has a delta run and no such table before it",
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
    """The same tables in order, in batches to be read at one time and held in memory."""
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

_BUCKETS = 1 << 20
_BATCH_ROWS = 1 << 17
"""So few that a batch is small beside its table, and so many that a busy loop is rarely waited for: a step that lets go of
the interpreter lock may wait 5 ms to get it back."""
_BATCH_BUCKETS = 1 << 18
_TOGETHER_BYTES_MAX = 1 << 30
_OWN_IDENTITY = (pa.int64(), pa.utf8(), pa.binary(), pa.date32(), pa.timestamp("us", "UTC"))
"""Types of keys that are equal just where Arrow says so."""
_Rows = npt.NDArray[np.int64]


def run_schema(base: pa.Schema) -> pa.Schema:
    """Schema of a run on a base of this schema."""
    return base.append(pa.field(TOMBSTONE_COLUMN, pa.bool_(), nullable=False))


def delta_run(changed: pa.Table, removed: Sequence[pa.Array], replaced: Sequence[int] = ()) -> pa.Table:
    """A run of the rows of changed keys, of removed ones (key group, key fields, namespace, and a timer's time: the first columns
    of `changed`) and of namespaces to be forgotten; sorted by key group."""
    schema = run_schema(changed.schema)
    if replaced:
        schema = schema.with_metadata({**(schema.metadata or {}), REPLACED_METADATA: msgspec.json.encode(list(replaced))})
    shown = changed.append_column(schema.field(TOMBSTONE_COLUMN), pa.repeat(pa.scalar(False), changed.num_rows))
    tables = [pa.Table.from_arrays(shown.columns, schema=schema)]
    count = len(removed[0]) if removed else 0
    if count:
        blank = [_blank(field, count) for field in list(changed.schema)[len(removed) :]]
        tables.append(pa.Table.from_arrays([*removed, *blank, pa.repeat(pa.scalar(True), count)], schema=schema))
    return sort_by_key_group(pa.concat_tables(tables))


def merged_runs(
    base: pa.Table,
    runs: Sequence[pa.Table],
    key_type: KeyType,
    max_parallelism: int,
    *,
    own_keys: Sequence[str] = (),
    in_order: bool = True,
) -> pa.Table:
    """The rows of a base and of its runs, oldest first, as one table like the base; sorted by key group if `in_order`, which costs
    as much again.

    All may be cut to the same key groups. `own_keys`: columns that are part of a row's identity beside key and namespace.
    Raises KeyError, ValueError or pyarrow's errors for tables that are not a base and its runs."""
    tables = [base, *runs]
    names = [*key_columns(key_type), NAMESPACE, *own_keys]
    hashes = [_hashes(table, key_type, max_parallelism) for table in tables]
    touched = np.zeros(_BUCKETS, np.bool_)
    for of_run in hashes[1:]:
        touched[of_run % _BUCKETS] = True
    alive = [np.ones(len(table), np.bool_) for table in tables]
    for position, run in enumerate(tables[1:], 1):
        _forget(tables[:position], alive[:position], replaced_by(run.schema))
        alive[position] &= ~tombstones(run)
    # Only rows that share a bucket with a changed key need a closer look: all rows of runs, and few of the base.
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
    if not in_order:
        return pa.concat_tables(
            _like(table, base.schema).filter(pa.array(of_table)) for table, of_table in zip(tables, alive, strict=True)
        )
    everything = pa.concat_tables([_like(table, base.schema) for table in tables]).combine_chunks()
    kept = np.flatnonzero(np.concatenate(alive))
    return everything.take(pa.array(kept[stable_order(everything.column(KEY_GROUP).to_numpy()[kept])]))


def newest_rows(base: pa.Table, runs: Sequence[pa.Table], key_type: KeyType, max_parallelism: int) -> Iterator[pa.Table]:
    """As `merged_runs` of a state with one row per key, in batches: whole key groups of about `_BATCH_ROWS` rows of the base.

    Loading them one by one makes no value that is replaced, and copies no more than a batch. Raises as `merged_runs`."""
    groups = _groups(base)
    parts = [batch for run in runs for batch in run.to_batches() if batch.num_rows]
    keys = [_groups(part) for part in parts]
    is_alike = all(part.schema.equals(parts[0].schema) for part in parts)
    if not parts or not is_alike or not all(map(is_sorted, (groups, *keys))):  # another tool has moved rows
        yield merged_runs(base, runs, key_type, max_parallelism, in_order=False)
        return
    # A batch ends behind the key group that the last of its rows is of; the last one also has key groups without any row.
    ends = np.unique(groups[_BATCH_ROWS - 1 :: _BATCH_ROWS])
    bounds = [[0, *np.searchsorted(key, ends, side="right").tolist(), len(key)] for key in (groups, *keys)]
    for (start, stop), *changed in zip(*map(pairwise, bounds), strict=True):
        some = [part.slice(first, last - first) for part, (first, last) in zip(parts, changed, strict=True) if first < last]
        rows = base.slice(start, stop - start)
        if some:
            # Beyond 2 GiB Arrow could not number the bytes of a column.
            together = [pa.concat_batches(some)] if sum(part.nbytes for part in some) <= _TOGETHER_BYTES_MAX else some
            yield from _newest(rows, pa.Table.from_batches(together), key_type, max_parallelism)
        else:
            yield rows


def _newest(base: pa.Table, changed: pa.Table, key_type: KeyType, max_parallelism: int) -> Iterator[pa.Table]:
    """Rows of a base that none of `changed` replaces, and of these, oldest first, the last of each key."""
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


def replaced_by(schema: pa.Schema) -> list[int]:
    """Namespaces of which a run replaces what came before. Raises ValueError."""
    stored = (schema.metadata or {}).get(REPLACED_METADATA)
    if stored is None:
        return []
    try:
        return msgspec.json.decode(stored, type=list[int])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{REPLACED_METADATA.decode()}: {error}") from error


def tombstones(run: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows of a run say that nothing is left of their key. Raises KeyError, ValueError."""
    column = run.column(TOMBSTONE_COLUMN)
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
    """A number for each row: equal for equal keys, namespaces and own keys."""
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
    """Values that nobody reads: nulls, or zeros where the base allows none."""
    if field.nullable:
        return pa.nulls(count, field.type)
    return pa.array(np.zeros(count, np.int64)).cast(field.type)
