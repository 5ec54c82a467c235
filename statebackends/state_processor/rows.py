"""Rows of one state as a stream of Arrow batches, from any format: tables, native files, operator lists.

Keyed rows come in key-group order, at most BATCH_ROWS at a time, and follow the rules that a restore applies (row_rules.py). Values
are judged batch by batch. Identities are judged for whole key groups (up to JUDGED_ROWS or JUDGED_BYTES), before their rows are
given out; of a larger key group, rows are given out earlier, and only their identities are held until its end. Tables with deltas
are merged a slice of key groups at a time. Native files are opened as a local clone, since opening a database writes into its
folder, and RocksDB needs its own file names. Checks of files are in reading.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.statebackends.backends.operator import decode_entries
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, InvalidKeyError, StateValueError
from holdfast.statebackends.handles import FileHandle, KeyGroupRange, StateHandle
from holdfast.statebackends.layout import KEY_GROUP, POSITION, STATE_METADATA, VALUE
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.row_keys import parse_row_keys
from holdfast.statebackends.serialization.state_serializer import TIMERS_KIND, StateSerializer
from holdfast.statebackends.snapshot.deltas import StatePart, merged_deltas, own_keys_of
from holdfast.statebackends.snapshot.row_rules import RowRules
from holdfast.statebackends.snapshot.table_file import BATCH_ROWS, TableFile, conform
from holdfast.statebackends.state_processor.contents import StoredState
from holdfast.statebackends.state_processor.progress import note
from holdfast.statebackends.state_processor.reading import PartReader, fetch_windows
from holdfast.statebackends.state_processor.values import entry_json, named, stored_serializer
from holdfast.statebackends.storage.failures import refusal

JUDGED_ROWS = 1 << 17
"""Rows that are judged together; more only if they are of one key group."""
JUDGED_BYTES = 32 << 20
"""Bytes of rows, beside one batch, that are held back until they are judged."""
SUBTASK = "subtask"
JSON = "json"
"""Column with the JSON text of an operator's list entry; null unless it is msgpack of a value that JSON has."""

_TABLE_ERRORS = (pa.ArrowException, InvalidKeyError, ValueError, TypeError, KeyError, OSError, OverflowError)
_MEMORY_BYTES = 8 << 20
"""Block cache: one pass, no reuse."""

_ELEMENTS = msgspec.msgpack.Decoder(list[bytes])

Opened: TypeAlias = Callable[[StatePart, pa.Schema], None]
"""Told of a part and the columns of its table."""


def state_schema(reader: PartReader, state: StoredState) -> pa.Schema:
    """Schema of a state's rows. Opens a file only for kinds with columns of their own. Raises CorruptStateError."""
    if not state.is_keyed:
        metadata = {STATE_METADATA: msgspec.json.encode(state.meta)}
        fields = [(SUBTASK, pa.int32()), (POSITION, pa.int32()), (VALUE, pa.binary()), (JSON, pa.utf8())]
        return pa.schema([pa.field(name, kind, nullable=name == JSON) for name, kind in fields], metadata=metadata)
    key_type, max_parallelism = state.key_type(), state.operator.max_parallelism
    if stored_serializer(state) is not None or state.meta.kind == TIMERS_KIND:
        return RowRules.of(state.meta, key_type, max_parallelism).schema
    first = state.keyed[0]
    if first.is_native:
        raise state.corrupt(f"{state.meta.kind} state in native files")
    with _opened(reader, state, first) as file:
        return RowRules.of(state.meta, key_type, max_parallelism, file.schema).schema


def choose_columns(state: StoredState, schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """The schema with these columns alone. Raises InvalidConfigError naming the columns of the state."""
    for name in columns:
        if name not in schema.names or columns.count(name) > 1:
            known = ", ".join(schema.names)
            raise InvalidConfigError(
                f"operator {state.operator.uid!r}, state {state.meta.name!r}: no column {name!r}, or twice; it has: {known}",
                operator=state.operator.uid,
                state=state.meta.name,
                column=name,
            )
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def state_batches(
    reader: PartReader,
    state: StoredState,
    schema: pa.Schema,
    key_groups: KeyGroupRange | None = None,
    *,
    columns: Sequence[str] | None = None,
    opened: Opened | None = None,
) -> Iterator[pa.RecordBatch]:
    """All rows, or those of some key groups, with all columns of the state's `schema`, or those in `columns`: only they are read
    from tables. `opened`: told of each table without deltas before its rows, with its columns as they are stored.

    Raises CorruptStateError, StorageUnavailableError, InvalidConfigError."""
    wanted = schema if columns is None else choose_columns(state, schema, columns)
    what = f"{state.operator.uid}.{state.meta.name}"
    for batch in _batches(reader, state, schema, wanted, key_groups, opened):
        note(rows=batch.num_rows, what=what)
        yield batch if columns is None else batch.select(wanted.names)


def _batches(
    reader: PartReader,
    state: StoredState,
    schema: pa.Schema,
    wanted_schema: pa.Schema,
    key_groups: KeyGroupRange | None,
    opened: Opened | None,
) -> Iterator[pa.RecordBatch]:
    if not state.is_keyed:
        if key_groups is not None:
            raise InvalidConfigError(f"operator state {state.meta.name!r} has no key groups", state=state.meta.name)
        yield from _list_batches(reader, state, schema)
        return
    for part, wanted in _fetched_parts(reader, state, key_groups):
        if part.is_native:
            serializer = stored_serializer(state)
            if serializer is None:
                continue  # native files hold no such state
            clone = reader.clone(part.handle, operator=state.operator.uid, subtask=part.subtask)
            rows = native_batches(clone, state, serializer, schema, wanted)
            with _told(state, part, "native files"):
                for batch in judged_rows(rows, _rules(state, schema), wanted_schema.names):
                    yield conform(batch, schema)
        else:
            yield from _table_batches(reader, state, part, schema, wanted_schema, wanted, opened)


def _fetched_parts(
    reader: PartReader, state: StoredState, key_groups: KeyGroupRange | None
) -> Iterator[tuple[StatePart, KeyGroupRange]]:
    """(part, its key groups among the wanted ones) of each part that has some; small files are read several at one time."""
    parts = []
    for part in state.keyed:
        wanted = part.key_groups if key_groups is None else part.key_groups.intersection(key_groups)
        if len(wanted):
            parts.append((part, wanted))
    for some in fetch_windows(parts, lambda each: max(each[0].size, 0)):
        tables = [(table, part.subtask) for part, _ in some if not part.is_native for table in part.tables]
        reader.fetch(tables, operator=state.operator.uid)
        yield from some


def fetched_lists(reader: PartReader, state: StoredState) -> Iterator[tuple[int, list[bytes]]]:
    """(subtask, entries) of each part of operator state."""
    uid = state.operator.uid
    for some in fetch_windows(state.lists, lambda part: max(part.handle.part.length, 0)):
        reader.fetch([(part.handle.part, part.subtask) for part in some], operator=uid)
        for part in some:
            data = reader.read(part.handle.part, operator=uid, subtask=part.subtask)
            yield part.subtask, decode_entries(part.handle, data, operator=uid)


@contextmanager
def _opened(reader: PartReader, state: StoredState, part: StatePart, delta: StateHandle | None = None) -> Iterator[TableFile]:
    """A part's base, or a delta, as an open table. Errors of its content within name it."""
    table = part.base if delta is None else delta
    source = reader.open(table, operator=state.operator.uid, subtask=part.subtask)
    with _told(state, part, table.path if isinstance(table, FileHandle) else "inline"):
        yield TableFile.open(source, part.handle.format if delta is None else "arrow", part.key_groups)


@contextmanager
def _told(state: StoredState, part: StatePart, path: str) -> Iterator[None]:
    """Errors of a part's rows within name it."""
    try:
        yield
    except CorruptStateError as error:
        if error.operator is not None:
            raise  # an error of a file, which names it
        raise _not_a_table(state, part, path, error) from error
    except _TABLE_ERRORS as error:
        if (refused := refusal(error, path, path=path)) is not None:
            raise refused from error
        raise _not_a_table(state, part, path, error) from error


def _not_a_table(state: StoredState, part: StatePart, path: str, error: Exception) -> CorruptStateError:
    return state.corrupt(f"subtask {part.subtask}: not a table of keyed state: {error}", path)


def _rules(state: StoredState, schema: pa.Schema) -> RowRules:
    return RowRules(state.key_type(), state.operator.max_parallelism, state.meta, stored_serializer(state), schema)


def _table_batches(
    reader: PartReader,
    state: StoredState,
    part: StatePart,
    schema: pa.Schema,
    wanted: pa.Schema,
    groups: KeyGroupRange,
    opened: Opened | None,
) -> Iterator[pa.RecordBatch]:
    """`schema`: all columns of the state; `wanted`: those to read."""
    rules = _rules(state, schema)
    with ExitStack() as files:
        base = files.enter_context(_opened(reader, state, part))
        deltas = [files.enter_context(_opened(reader, state, part, delta)) for delta in part.deltas]
        if deltas:
            batches = _merged_batches(rules, base, deltas, groups)
        else:
            if opened is not None:
                opened(part, base.schema)
            batches = judged_rows(base.sorted_batches(groups, [*wanted.names, *rules.identity]), rules, wanted.names)
        for batch in batches:
            yield conform(batch, wanted)


def _merged_batches(
    rules: RowRules, base: TableFile, deltas: Sequence[TableFile], groups: KeyGroupRange
) -> Iterator[pa.RecordBatch]:
    """Rows of a base and its deltas, merged a slice of key groups at a time; each table is judged by itself."""
    own_keys = own_keys_of(rules.meta.kind)
    for some in base.slices(groups):
        tables = [rules.judged(pa.Table.from_batches(list(file.sorted_batches(some)), file.schema)) for file in (base, *deltas)]
        merged = merged_deltas(tables[0], tables[1:], rules.key_type, rules.max_parallelism, own_keys=own_keys)
        yield from merged.to_batches(max_chunksize=BATCH_ROWS)


def _list_batches(reader: PartReader, state: StoredState, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for subtask, entries in fetched_lists(reader, state):
        for start in range(0, len(entries), BATCH_ROWS):
            some = entries[start : start + BATCH_ROWS]
            columns = [
                pa.array(np.full(len(some), subtask, np.int32)),
                pa.array(np.arange(start, start + len(some), dtype=np.int32)),
                pa.array(some, pa.binary()),
                pa.array([entry_json(entry) for entry in some], pa.utf8()),
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def judged_rows(batches: Iterable[pa.RecordBatch], rules: RowRules, names: Collection[str]) -> Iterator[pa.RecordBatch]:
    """Batches in key-group order with the columns in `names` and `rules.identity` in their canonical types, judged by `rules`.

    Raises as `RowRules` does; for a repeated identity, in a large key group, only after its rows were given out."""
    wanted = {*names, *rules.identity}
    held: list[pa.RecordBatch] = []
    identities: list[pa.Table] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        table = rules.canonical(batch, wanted)
        rules.judge_values(table, wanted)
        identities.append(_copy(table.select(rules.identity)))
        held += table.to_batches()
        size += table.nbytes
        if size >= JUDGED_BYTES or sum(map(len, identities)) >= JUDGED_ROWS:
            identities = _judge_whole_groups(identities, rules)
            yield from held
            held, size = [], 0
    if identities:
        rules.judge_identities(pa.concat_tables(identities))
    yield from held


def _copy(table: pa.Table) -> pa.Table:
    """A copy of a slice, which would keep all values of its batch in memory."""
    return table.take(pa.array(np.arange(len(table))))


def _judge_whole_groups(held: list[pa.Table], rules: RowRules) -> list[pa.Table]:
    """Judge all key groups but the last, of which more rows may come; returns the last one's identities."""
    newest = held[-1].column(KEY_GROUP)[-1].as_py()
    if held[0].column(KEY_GROUP)[0].as_py() == newest:
        return held
    table = pa.concat_tables(held)
    cut = int(np.searchsorted(table.column(KEY_GROUP).to_numpy(), newest))
    rules.judge_identities(table.slice(0, cut))
    return [_copy(table.slice(cut))]


def native_batches(
    clone: str, state: StoredState, serializer: StateSerializer, schema: pa.Schema, groups: KeyGroupRange
) -> Iterator[pa.RecordBatch]:
    """Rows of one state in the database at `clone`, for some key groups and in their order. Raises CorruptStateError."""
    try:
        store = RocksStore(clone, write_buffer_bytes=_MEMORY_BYTES, block_cache_bytes=_MEMORY_BYTES, read_only=True)
    except CorruptStateError as error:
        raise named(error, state) from error
    try:
        state_id = store.state_ids.get(state.meta.name)
        if state_id is None:
            return
        for some in store.state_chunks(state_id, groups, BATCH_ROWS):
            try:
                batch = _batch(state, serializer, schema, some)
            except (CorruptStateError, StateValueError) as error:
                raise named(error, state) from error
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)
    finally:
        store.close()


def _batch(state: StoredState, serializer: StateSerializer, schema: pa.Schema, rows: list[tuple[bytes, bytes]]) -> pa.RecordBatch:
    keys = parse_row_keys([key for key, _ in rows])
    values = [value for _, value in rows]
    columns = [
        pa.array(keys.key_groups),
        *state.key_type().arrays_of_encoded(keys.keys),
        pa.array(keys.namespaces, pa.binary()) if any(keys.namespaces) else _empty_bytes(len(rows)),
    ]
    decoded: list[Any] = []
    if serializer.kind == "list":
        owners: list[int] = []
        positions: list[int] = []
        for row, value in enumerate(values):
            elements = _elements(value)
            owners += [row] * len(elements)
            positions += range(len(elements))
            decoded += serializer.decode_values(elements)
        columns = [column.take(pa.array(owners, pa.int64())) for column in columns]
        columns.append(pa.array(positions, pa.int32()))
    else:
        decoded = serializer.decode_values(values)
    if serializer.map_key is not None:
        columns.append(serializer.map_key.to_arrow(serializer.map_key.decode_all(keys.map_keys)))
    columns += serializer.to_arrays(decoded)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _empty_bytes(count: int) -> pa.Array:
    """So many values of no bytes."""
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(np.zeros(count + 1, np.int32)), pa.py_buffer(b"")])


def _elements(value: bytes) -> list[bytes]:
    try:
        return _ELEMENTS.decode(value)
    except msgspec.MsgspecError as error:
        raise CorruptStateError(f"not a list: {error}", reason="value encoding") from error
