"""Rows of one state of a snapshot, as dicts, whatever the format: open tables, native RocksDB files, operator lists.

Types come from the snapshot; user classes are not needed and pickled values stay bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from statebackends.errors import CorruptStateError, ObjectMissingError
from statebackends.handles import FileHandle, KeyedStateHandle, OperatorState, StateMeta
from statebackends.keyedtables import KEY_GROUP, MAP_KEY, NAMESPACE, POSITION, VALUE, decode_keyed_table, key_columns
from statebackends.keys import KeyType
from statebackends.operator_state import read_entries
from statebackends.serializers import TypeSpec, split_map_text
from statebackends.snapshot import part_path, read_part
from statebackends.storage.operations import DownloadFile, Storage, run_flow

NATIVE = "rocksdb"

PICKLED = "pickled"

_ROCKSDB_BYTES = 8 * 1024 * 1024
"""Memory for reading a native snapshot: one pass, no reuse."""

Row = dict[str, Any]


def read_rows(operator: OperatorState, name: str, storage: Storage, folder: str, *, limit: int) -> list[Row]:
    """Up to `limit` rows of a state, subtask by subtask, key group by key group. Raises CorruptStateError."""
    return list(islice(_rows(operator, name, storage, folder), limit))


def _rows(operator: OperatorState, name: str, storage: Storage, folder: str) -> Iterator[Row]:
    for subtask, state in enumerate(operator.subtasks):
        for keyed in state.keyed:
            for index, meta in enumerate(keyed.states):
                if meta.name != name:
                    continue
                if keyed.format == NATIVE:
                    yield from _native_rows(keyed, meta, storage, folder, operator.uid)
                else:
                    yield from _table_rows(keyed, index, storage, folder, operator.uid)
        for listed in state.operator:
            if listed.state.name == name:
                entries = run_flow(read_entries(listed, folder, operator=operator.uid), storage)
                for position, entry in enumerate(entries):
                    yield {"subtask": subtask, POSITION: position, VALUE: _plain_entry(entry)}


def _plain_entry(entry: bytes) -> Any:
    """An operator's list entries are opaque; most are msgpack."""
    try:
        return msgspec.msgpack.decode(entry)
    except (msgspec.MsgspecError, ValueError):
        return entry


def _key_type(meta: StateMeta, operator: str) -> KeyType:
    if meta.key_type is None:
        raise CorruptStateError(f"operator {operator!r}: keyed state {meta.name!r} has no key type", operator=operator)
    return KeyType.parse(meta.key_type)


def _table_rows(keyed: KeyedStateHandle, index: int, storage: Storage, folder: str, operator: str) -> Iterator[Row]:
    part = keyed.parts[index]
    data = run_flow(read_part(part, folder, operator=operator), storage)
    path = part.path if isinstance(part, FileHandle) else "inline"
    key_type = _key_type(keyed.states[index], operator)
    table = decode_keyed_table(data, keyed.format, keyed.key_groups, key_type, path=path, operator=operator)
    for batch in table.to_batches(max_chunksize=1_024):
        yield from batch.to_pylist()


def _native_rows(keyed: KeyedStateHandle, meta: StateMeta, storage: Storage, folder: str, operator: str) -> Iterator[Row]:
    """Rows of a RocksDB database, opened read-only on a copy: opening one writes into its folder."""
    from statebackends.rocksdb_store import RocksStore

    with tempfile.TemporaryDirectory(prefix="holdfast-inspect-") as copy:
        for part, file_name in zip(keyed.parts, keyed.names, strict=True):
            local = Path(copy, Path(file_name).name)
            if isinstance(part, FileHandle):
                path = part_path(folder, part.path, operator=operator)
                _download(part, path, local, storage, operator)
            else:
                local.write_bytes(part.data)
        store = RocksStore(copy, write_buffer_bytes=_ROCKSDB_BYTES, block_cache_bytes=_ROCKSDB_BYTES, read_only=True)
        try:
            if meta.name in store.state_ids:
                key_type, expand = _key_type(meta, operator), _expander(meta)
                for row_key, value in store.state_rows(store.state_ids[meta.name], keyed.key_groups):
                    key = key_type.decode(row_key.key)
                    head = dict(zip(key_columns(key_type), key if key_type.is_tuple else (key,), strict=True))
                    for rest in expand(row_key.map_key, value):
                        yield {KEY_GROUP: row_key.key_group, **head, NAMESPACE: row_key.namespace, **rest}
        finally:
            store.close()


def _download(part: FileHandle, path: str, local: Path, storage: Storage, operator: str) -> None:
    try:
        found = storage.execute(DownloadFile(path, str(local)))
    except ObjectMissingError as error:
        raise CorruptStateError(f"operator {operator!r}: {path}: the file is missing", path=path, operator=operator) from error
    if found != (part.length, part.checksum):
        raise CorruptStateError(f"operator {operator!r}: {path}: length or checksum does not match", path=path, operator=operator)


def _expander(meta: StateMeta) -> Callable[[bytes, bytes], Sequence[Row]]:
    """How a stored value becomes rows, by kind of state."""
    if meta.kind == "map":
        key_decode, value_decode = (_decoder(text) for text in split_map_text(meta.value_type))
        return lambda map_key, value: [{MAP_KEY: key_decode(map_key), VALUE: value_decode(value)}]
    if meta.kind == "list":
        decode = _decoder(meta.value_type)
        elements = msgspec.msgpack.Decoder(list[bytes])
        return lambda _, value: [{POSITION: n, VALUE: decode(each)} for n, each in enumerate(elements.decode(value))]
    if meta.kind in ("value", "reducing", "aggregating"):
        decode = _decoder(meta.value_type)
        return lambda _, value: [{VALUE: decode(value)}]
    return lambda _, value: [{VALUE: _plain_entry(value)}]


def _decoder(type_text: str) -> Callable[[bytes], Any]:
    """Pickled values are shown as bytes: a snapshot from elsewhere must not run code here."""
    if type_text == PICKLED:
        return bytes
    return TypeSpec.parse(type_text).decode
