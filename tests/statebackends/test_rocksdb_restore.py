"""Native RocksDB files at another parallelism: clones that are cut, sorted tables that are taken in (O, P; I26, I28)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.backends.keyed import KeyedBackendBase
from holdfast.statebackends.errors import CorruptStateError, StorageUnavailableError
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle, KeyGroupRange
from holdfast.statebackends.rocksdb import database as rocksdb_store
from holdfast.statebackends.rocksdb.backend import RocksKeyedBackend
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.row_keys import parse_row_key, parse_row_keys, row_key
from holdfast.statebackends.state import ListStateDescriptor, MapStateDescriptor, StateDescriptor, ValueStateDescriptor
from holdfast.statebackends.storage.checksums import checksum_of
from tests.examples import examples
from tests.statebackends.backend_harness import COUNT, KEY, MAX_PARALLELISM, SEEN, TAGS, Cluster, owner, use

STATES: tuple[StateDescriptor, ...] = (COUNT, SEEN, TAGS)
SMALL: dict[str, Any] = {"write_buffer_bytes": 1 << 20, "block_cache_bytes": 1 << 20}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, "rocksdb")
    yield cluster
    cluster.close()


def put(backend: KeyedBackendBase, state: StateDescriptor, value: int) -> None:
    """Under the current key, and a part of it in a namespace."""
    for namespace in (b"", b"ns"):
        target = backend.get_state(state, namespace)
        if state is COUNT:
            target.update(value)
        elif state is SEEN:
            target.add(str(value))
        else:
            target.put(f"t{value % 3}", value)


def read(backends: list[KeyedBackendBase]) -> dict[tuple[str, bytes, str], Any]:
    found: dict[tuple[str, bytes, str], Any] = {}
    for backend in backends:
        for state in STATES:
            for namespace in (b"", b"ns"):
                for encoded in list(backend.keys(state.name, namespace)):
                    key = KEY.decode(encoded)
                    use(backend, key)
                    assert backend.current_key[1] in backend.key_groups
                    held = backend.get_state(state, namespace)
                    place = state.name, namespace, key
                    assert place not in found, "one subtask owns a key group"
                    found[place] = held.value() if state is COUNT else list(held.get()) if state is SEEN else dict(held.items())
    return found


def stored_rows(backend: KeyedBackendBase) -> list[tuple[bytes, bytes]]:
    assert isinstance(backend, RocksKeyedBackend)
    return list(backend.write_buffer.store.group_rows(KeyGroupRange(0, MAX_PARALLELISM)))


def mixed_ids(cluster: Cluster, parallelism: int) -> list[KeyedBackendBase]:
    """Each subtask uses its states in another order, so each database gives them other ids."""
    backends = [cluster.backend(STATES, parallelism=parallelism, subtask=subtask) for subtask in range(parallelism)]
    for number in range(60):
        backend = owner(backends, f"key{number}")
        turn = backends.index(backend)
        for state in (*STATES[turn % 3 :], *STATES[: turn % 3]):
            put(backend, state, number)
    return backends


@pytest.mark.parametrize("parallelisms", [(2, 3), (3, 2), (3, 1), (1, 4), (4, 5, 2, 4)])
def test_state_ids_may_differ_between_the_databases(cluster: Cluster, parallelisms: tuple[int, ...]) -> None:
    backends = mixed_ids(cluster, parallelisms[0])
    before = read(backends)
    for parallelism in parallelisms[1:]:
        backends = cluster.rescaled(backends, parallelism)
        assert read(backends) == before
        for backend in backends:
            keys = [key for key, _ in stored_rows(backend)]
            assert keys == sorted(set(keys))
            assert {parse_row_key(key).key_group in backend.key_groups for key in keys} <= {True}


@pytest.mark.parametrize(("table_bytes", "tables"), [(1, range(20, 80)), (500, range(6, 30)), (32 << 20, range(1, 4))])
def test_many_tables_are_taken_in_as_one_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, table_bytes: int, tables: range
) -> None:
    monkeypatch.setattr(rocksdb_store, "INGEST_TABLE_BYTES", table_bytes)
    monkeypatch.setattr(rocksdb_store, "WRITE_ROWS", 7)
    backends = [cluster.backend(STATES, parallelism=2, subtask=subtask) for subtask in range(2)]
    for number in range(80):
        for state in STATES:
            put(owner(backends, f"key{number}"), state, number)
    before = read(backends)
    (restored,) = backends = cluster.rescaled(backends, 1)
    assert read(backends) == before
    assert isinstance(restored, RocksKeyedBackend)
    assert len([name for name in os.listdir(restored.write_buffer.store.folder) if name.endswith(".sst")]) in tables
    assert read(cluster.rescaled(backends, 2)) == before


def test_what_was_taken_in_is_overwritten_deleted_and_stored_like_any_other_row(cluster: Cluster) -> None:
    backends = cluster.rescaled(mixed_ids(cluster, 2), 1)
    for number in range(0, 60, 2):
        owner(backends, f"key{number}").get_state(COUNT).clear()
    for number in range(1, 60, 2):
        owner(backends, f"key{number}").get_state(COUNT).update(-number)
    changed = read(backends)
    assert {changed["count", b"", key] for _, namespace, key in changed if (_, namespace) == ("count", b"")} == {
        -number for number in range(1, 60, 2)
    }
    assert read(cluster.rescaled(backends, 3)) == changed


def test_older_types_are_rewritten_and_undeclared_states_left_out_while_they_are_taken_in(cluster: Cluster) -> None:
    old: list[StateDescriptor] = [
        ValueStateDescriptor("gone", str),
        ValueStateDescriptor("v", int),
        ListStateDescriptor("l", int),
        MapStateDescriptor("m", str, int),
    ]
    new: list[StateDescriptor] = [
        ValueStateDescriptor("v", float),
        ListStateDescriptor("l", float),
        MapStateDescriptor("m", str, float),
    ]
    backends = [cluster.backend(old, parallelism=2, subtask=subtask) for subtask in range(2)]
    for number in range(40):
        backend = owner(backends, f"key{number}")
        backend.get_state(old[0]).update("x")
        backend.get_state(old[1]).update(number)
        backend.get_state(old[2]).add_all([number, 2])
        backend.get_state(old[3]).put("e", number)
    handles: list[KeyedStateHandle] = []
    target = cluster.target()
    for backend in backends:
        taken, folder = cluster.take(backend)
        handles += taken
        shutil.copytree(cluster.root / "state" / folder, cluster.root / "state" / target.folder, dirs_exist_ok=True)
    restored = cluster.restored((handles, target.folder), new, allow_unclaimed_state=True)
    for number in range(40):
        use(restored, f"key{number}")
        assert restored.get_state(new[0]).value() == float(number)
        assert restored.get_state(new[1]).get() == [float(number), 2.0]
        assert dict(restored.get_state(new[2]).items()) == {"e": float(number)}
    assert len(stored_rows(restored)) == 3 * 40


@settings(max_examples=examples(6), deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2), st.integers(-5, 5)), max_size=60),
    parallelisms=st.lists(st.integers(1, 5), min_size=2, max_size=4),
)
def test_there_and_back_again_nothing_changes(rows: list[tuple[int, int, int]], parallelisms: list[int]) -> None:
    folder = tempfile.mkdtemp()
    cluster = Cluster(Path(folder), "rocksdb")
    try:
        first = parallelisms[0]
        backends = [cluster.backend(STATES, parallelism=first, subtask=subtask) for subtask in range(first)]
        for number, state, value in rows:
            put(owner(backends, f"key{number}"), STATES[state], value)
        before = read(backends)
        for parallelism in (*parallelisms[1:], first):
            backends = cluster.rescaled(backends, parallelism)
            assert read(backends) == before
    finally:
        cluster.close()
        shutil.rmtree(folder)


# -------------------------------------------------------------------------------------------------------------- bad input


def filled_store(folder: Path) -> RocksStore:
    store = RocksStore(str(folder), **SMALL)
    state_id = store.state_id("s")
    store.write((row_key(group, state_id, b"%04d" % number, b""), os.urandom(50)) for group in range(8) for number in range(500))
    return store


def test_a_damaged_table_is_an_error_and_not_an_early_end(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "db")
    store.link_copy(str(tmp_path / "copy"))
    store.close()
    table = max((tmp_path / "copy").glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 0xFF
    table.unlink()
    table.write_bytes(content)
    damaged = RocksStore(str(tmp_path / "copy"), read_only=True, **SMALL)
    with pytest.raises(CorruptStateError, match="checksum mismatch") as caught:
        list(damaged.group_rows(KeyGroupRange(0, 8)))
    assert caught.value.fields["path"] == str(tmp_path / "copy")
    with pytest.raises(CorruptStateError, match="checksum mismatch"):
        list(damaged.state_rows(0, KeyGroupRange(0, 8)))
    with pytest.raises(CorruptStateError, match="checksum mismatch"):
        list(damaged.state_chunks(0, KeyGroupRange(0, 8), 100))
    with pytest.raises(CorruptStateError, match="checksum mismatch"):
        RocksStore(str(tmp_path / "other"), **SMALL).ingest(damaged.group_rows(KeyGroupRange(0, 8)), str(tmp_path))
    damaged.close()


def test_a_table_that_was_damaged_before_it_was_stored_is_damage_and_no_missing_file(cluster: Cluster) -> None:
    """RocksDB has recovered the database by then, and has deleted the journal that was downloaded with it."""
    backend = cluster.backend((COUNT,))
    use(backend, "key")
    backend.get_state(COUNT).update(1)
    (handle,), folder = cluster.take(backend)
    parts = dict(zip(handle.names, handle.parts, strict=True))
    name = next(name for name in parts if name.endswith(".sst"))
    table = parts[name]
    assert isinstance(table, FileHandle)
    path = cluster.root / "state" / folder / table.path
    content = bytearray(path.read_bytes())
    content[3] ^= 0xFF
    path.write_bytes(content)
    parts[name] = msgspec.structs.replace(table, checksum=checksum_of(bytes(content)))
    damaged = msgspec.structs.replace(handle, parts=tuple(parts.values()))
    with pytest.raises(CorruptStateError, match="checksum mismatch"):
        cluster.restored(((damaged,), folder), (COUNT,))


@pytest.mark.parametrize("rows", [1, 7, 500, 100_000])
def test_chunks_are_the_rows_of_one_state_in_the_key_groups(tmp_path: Path, rows: int) -> None:
    store = filled_store(tmp_path / "db")
    other = store.state_id("t")
    store.write([(row_key(group, other, b"k" * group, b"n" * group, b"m" * group), b"v") for group in range(0, 8, 2)])
    every = KeyGroupRange(0, 8)
    for state_id, groups in ((0, every), (0, KeyGroupRange(3, 5)), (other, KeyGroupRange(1, 8)), (7, every)):
        chunks = list(store.state_chunks(state_id, groups, rows))
        assert all(len(chunk) == rows for chunk in chunks[:-1])
        found = [row for chunk in chunks for row in chunk]
        assert [(parse_row_key(key), value) for key, value in found] == list(store.state_rows(state_id, groups))
        if found:
            columns = parse_row_keys([key for key, _ in found])
            parts = zip(columns.key_groups.tolist(), columns.keys, columns.namespaces, columns.map_keys, strict=True)
            assert [(group, state_id, *rest) for group, *rest in parts] == [tuple(parse_row_key(key)) for key, _ in found]
    store.close()


def test_a_row_key_that_is_cut_off_is_refused_among_whole_ones() -> None:
    whole = row_key(1, 0, b"key", b"namespace")
    for end in (3, 11, len(whole) - 1):
        with pytest.raises(ValueError, match=r"row key|buffer size"):
            parse_row_keys([whole, whole[:end]])


def test_tables_that_the_disk_does_not_take_are_a_storage_error(tmp_path: Path) -> None:
    source = filled_store(tmp_path / "db")
    target = RocksStore(str(tmp_path / "other"), **SMALL)
    with pytest.raises(StorageUnavailableError, match=r"nowhere/ingest-0\.sst"):
        target.ingest(source.group_rows(KeyGroupRange(2, 5)), str(tmp_path / "nowhere"))
    assert list(target.group_rows(KeyGroupRange(0, 8))) == []
    target.ingest(source.group_rows(KeyGroupRange(2, 5)), str(tmp_path))
    assert list(target.group_rows(KeyGroupRange(0, 8))) == list(source.group_rows(KeyGroupRange(2, 5)))
    assert not list(tmp_path.glob("ingest-*")), "moved, not copied"
    target.ingest(iter(()), str(tmp_path / "nowhere"))
    source.close()
    target.close()
