"""A key erased from a snapshot: tables without it are the source's, byte for byte, and what is there restores on any backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.factory import create_keyed_backend
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.snapshot.parts import write_part
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.erase import Erased, count_rows, erase_key, is_tables
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.statebackends.snapshot_harness import COUNT, DESCRIPTORS, KEY, KINDS, UID, Contents, files_below, write

GONE = "forget-me"
KEYS = [GONE, *(f"k{number}" for number in range(40))]
MANY = Contents(
    count={key: number for number, key in enumerate(KEYS)},
    labels={key: {"x": {"b"}} for key in KEYS},
    seen={key: ["x", "y"] for key in KEYS},
    tags={key: {"t": 1} for key in KEYS},
    windows={(key, 60): 5 for key in KEYS},
    timers={(key, 1_000) for key in KEYS},
)
STATES = [(UID, "*")]
MAX_PARALLELISM, PARALLELISM = 8, 4
OWNER = next(
    number for number in range(PARALLELISM) if KEY.key_group(GONE, 8) in assign_key_groups(MAX_PARALLELISM, PARALLELISM, number)
)
"""The subtask that has the key."""


def source_of(root: Path, kind: Any, *, canonical: bool = False) -> StoredSnapshot:
    return write(root, "job/chk-7", MANY, kind=kind, canonical=canonical, parallelism=PARALLELISM)


def erased(root: Path, source: StoredSnapshot) -> Erased:
    (root / "out").mkdir(exist_ok=True)
    return erase_key(source, STATES, GONE, LocalStorage(root / "out"), "without")


def handles(snapshot: StoredSnapshot) -> Iterator[tuple[int, KeyedStateHandle]]:
    for subtask, state in enumerate(snapshot.operator(UID).subtasks):
        for handle in state.keyed:
            yield subtask, handle


def checksums(snapshot: StoredSnapshot, subtask: int) -> list[str]:
    parts = [part for number, handle in handles(snapshot) if number == subtask for part in handle.parts]
    return sorted(part.checksum for part in parts if isinstance(part, FileHandle))


def replaced(source: StoredSnapshot, subtask: int, change: Any) -> StoredSnapshot:
    """The snapshot with another table of the state `count` of a subtask: what `change` makes of its rows."""
    operator = source.operator(UID)
    subtasks = list(operator.subtasks)
    kept = []
    for handle in subtasks[subtask].keyed:
        parts = list(handle.parts)
        for index, meta in enumerate(handle.states):
            part = parts[index]
            if meta.name != COUNT.name or not isinstance(part, FileHandle):
                continue
            table = pa.ipc.open_file(str(Path(source.storage.root) / source.path_of(part.path))).read_all()
            sink = pa.BufferOutputStream()
            table = change(table)
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            target = SnapshotTarget(7, source.folder, "changed", False, 0)
            parts[index] = run_flow(write_part(sink.getvalue().to_pybytes(), "changed.arrow", target), source.storage)
        kept.append(msgspec.structs.replace(handle, parts=tuple(parts)))
    subtasks[subtask] = msgspec.structs.replace(subtasks[subtask], keyed=tuple(kept))
    changed = msgspec.structs.replace(operator, subtasks=tuple(subtasks))
    return StoredSnapshot(msgspec.structs.replace(source.metadata, operators=(changed,)), source.storage, source.folder)


@pytest.mark.parametrize(("kind", "canonical"), [("filesystem", False), ("filesystem", True), ("rocksdb", True)])
def test_tables_without_the_key_are_the_sources_byte_for_byte(tmp_path: Path, kind: Any, canonical: bool) -> None:
    source = source_of(tmp_path, kind, canonical=canonical)
    stored = "parquet" if canonical else "arrow"
    found = erased(tmp_path, source)
    for subtask, handle in handles(found.snapshot):
        assert handle.format == ("parquet" if subtask == OWNER else stored)
    for subtask in range(PARALLELISM):
        is_same = checksums(found.snapshot, subtask) == checksums(source, subtask)
        assert is_same == (subtask != OWNER)
    assert is_tables(found.snapshot.operator(UID))
    assert {rows for rows, _ in found.before.values()} == {1, 2}, "two elements of its list"
    states = [state for state in found.snapshot.states() if state.is_keyed]
    read = count_rows(found.snapshot, states, GONE)
    assert read == count_rows(found.snapshot, states, GONE, found.known), "what was found in the source is what is in its copy"
    assert read == {which: (0, total - rows) for which, (rows, total) in found.before.items()}
    assert hf.Snapshot(found.snapshot.location).verify().is_sound
    assert not any(GONE.encode() in content for content in files_below(tmp_path / "out").values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("onto", ["filesystem", "rocksdb"])
def test_what_is_left_restores_on_each_backend_at_another_parallelism(tmp_path: Path, kind: Any, onto: Any) -> None:
    found = erased(tmp_path, source_of(tmp_path, kind)).snapshot
    stored = [handle for _, handle in handles(found)]
    values = {}
    for subtask in range(3):
        groups = assign_key_groups(MAX_PARALLELISM, 3, subtask)
        backend = create_keyed_backend(
            onto,
            descriptors=DESCRIPTORS,
            key_type=KEY,
            key_groups=groups,
            max_parallelism=MAX_PARALLELISM,
            operator=UID,
            subtask=subtask,
            local_dir=str(tmp_path / f"restored-{subtask}"),
        )
        backend.register_timers("_timers", TimerRows(CopyOnWriteStateTable(), lambda rows: None))
        own = [handle for handle in stored if handle.key_groups.intersection(groups)]
        backend.restore(own, found.storage, found.folder)
        for key in KEYS:
            if KEY.key_group(key, MAX_PARALLELISM) in groups:
                backend.set_current_key(KEY.encode(key), KEY.key_group(key, MAX_PARALLELISM))
                values[key] = backend.get_state(COUNT).value()
        backend.dispose()
    assert values == {**MANY.count, GONE: None}


def with_column(table: pa.Table) -> pa.Table:
    return table.append_column("note", pa.array([GONE] * len(table)))


def with_dictionary(table: pa.Table) -> pa.Table:
    """Its keys in a dictionary that still has the one that no row has."""
    at = table.schema.get_field_index("key")
    codes = pa.DictionaryArray.from_arrays(
        pa.array(range(len(table)), pa.int32()), pa.array([*table.column("key").to_pylist(), GONE])
    )
    return table.set_column(at, "key", codes)


def with_metadata(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({**table.schema.metadata, "note": GONE})


@pytest.mark.parametrize("change", [with_column, with_dictionary, with_metadata])
def test_a_table_that_quotes_the_key_beside_its_rows_is_no_copy(tmp_path: Path, change: Any) -> None:
    other = (OWNER + 1) % PARALLELISM
    source = replaced(source_of(tmp_path, "filesystem"), other, change)
    found = erased(tmp_path, source)
    assert not any(GONE.encode() in content for content in files_below(tmp_path / "out").values())
    formats = [handle.format for subtask, handle in handles(found.snapshot) if subtask == other]
    assert sorted(formats) == ["arrow", "parquet"], "its other states are copies"
    assert hf.Snapshot(found.snapshot.location).verify().is_sound
    tables = [pq.read_table(path) for path in (tmp_path / "out").rglob("*count.parquet")]
    assert all(table.column_names == ["key_group", "key", "namespace", "value"] for table in tables)


def test_a_row_of_the_key_in_anothers_table_is_damage_and_no_copy(tmp_path: Path) -> None:
    """A key group says where a key is only because rows that deny it are refused."""
    other = (OWNER + 1) % PARALLELISM

    def misplaced(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index("key")
        keys = [GONE, *table.column("key").to_pylist()[1:]]
        return table.set_column(at, table.schema.field(at), pa.array(keys, pa.utf8()))

    source = replaced(source_of(tmp_path, "filesystem"), other, misplaced)
    with pytest.raises(hf.HoldfastError, match="key_group"):
        erased(tmp_path, source)
    assert files_below(tmp_path / "out") == {}


def test_a_table_with_more_in_it_than_rows_is_told(tmp_path: Path) -> None:
    """Another tool may have left the key in a dictionary, or in a column of its own: no row has it, and the file does."""
    source = source_of(tmp_path, "filesystem")
    states = [state for state in source.states() if state.is_keyed]
    further: set[tuple[str, str]] = set()
    count_rows(source, states, GONE, {}, further)
    assert further == set()
    quoting = replaced(source, 0, lambda table: table.append_column("note", pa.array([GONE] * table.num_rows)))
    count_rows(quoting, [state for state in quoting.states() if state.is_keyed], GONE, {}, further)
    assert further == {(UID, COUNT.name)}
