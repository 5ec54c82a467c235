"""Bounds of the backends: what travels to the coordinator, what RocksDB keeps in memory, and what settings allow."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast.statebackends.errors import (
    CorruptStateError,
    InvalidConfigError,
    InvariantError,
    SnapshotTooLargeError,
    StateBackendError,
    StateValueError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import FileHandle, InlineHandle, KeyedStateHandle
from holdfast.statebackends.rocksdb.database import WRITE_ROWS, RocksStore
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings
from holdfast.statebackends.state import MapStateDescriptor, ValueStateDescriptor
from holdfast.statebackends.storage.port import Operation, Storage, UploadFile, one_by_one, run_flow
from tests.statebackends.backend_harness import ALL, COUNT, SEEN, TAGS, Cluster, contents, fill, smuggle, use

BLOB = ValueStateDescriptor("blob", bytes)
KEYS = [f"user-{number}" for number in range(40)]


@pytest.fixture
def rocks(tmp_path: Path) -> Iterator[Any]:
    cluster = Cluster(
        tmp_path, "rocksdb", StateBackendSettings(rocksdb=RocksDBConfig(front_tier_bytes_max=1 << 20, cache_bytes_max=200_000))
    )
    yield cluster
    cluster.close()


# --------------------------------------------------------------------------------------------------------------- settings


HEAP_SETTINGS = ("memory_snapshot_bytes_max", "memory_inline_bytes", "incremental")


@pytest.mark.parametrize("name", [*HEAP_SETTINGS, *RocksDBConfig.__struct_fields__])
@pytest.mark.parametrize("value", [-1, 1 << 60, True, 1.5, "5 MiB", None])
def test_settings_out_of_bounds_are_refused_by_name(name: str, value: Any) -> None:
    if value is True and name in ("incremental", "background_compaction"):
        value = 1
    is_rocksdb = name in RocksDBConfig.__struct_fields__
    given: dict[str, Any] = {"rocksdb": RocksDBConfig(**{name: value})} if is_rocksdb else {name: value}
    with pytest.raises(InvalidConfigError) as raised:
        StateBackendSettings(**given)
    assert raised.value.setting == (f"rocksdb_{name}" if is_rocksdb else name)


# ----------------------------------------------------------------------------------------------------------------- memory


def test_a_memory_checkpoint_above_the_limit_fails_and_says_what_to_change(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory", StateBackendSettings(memory_snapshot_bytes_max=10_000))
    backend = cluster.backend([BLOB])
    use(backend, "a")
    backend.get_state(BLOB).update(os.urandom(20_000))
    with pytest.raises(SnapshotTooLargeError) as raised:
        cluster.take(backend)
    assert raised.value.fields.items() >= {"operator": "op", "subtask": 0, "limit": 10_000}.items()
    assert raised.value.size > 20_000
    assert "memory_snapshot_bytes_max" in str(raised.value)
    assert pickle.loads(pickle.dumps(raised.value)).fields == raised.value.fields
    assert not list((tmp_path / "state").rglob("op-*"))
    backend.get_state(BLOB).update(b"small")
    handles, _ = cluster.take(backend)
    assert [type(part) for handle in handles for part in handle.parts] == [InlineHandle]


def test_a_memory_savepoint_is_files_of_any_size(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory", StateBackendSettings(memory_snapshot_bytes_max=10_000))
    backend = cluster.backend([BLOB])
    use(backend, "a")
    backend.get_state(BLOB).update(os.urandom(20_000))
    handles, _ = cluster.take(backend, canonical=True)
    assert [type(part) for handle in handles for part in handle.parts] == [FileHandle]


def test_a_large_table_of_memory_is_a_file_as_it_is_in_memory_and_a_small_one_is_inline(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory")
    backend = cluster.backend([BLOB, COUNT])
    for number, key in enumerate(KEYS):
        use(backend, key)
        backend.get_state(BLOB).update(bytes(5_000))
        backend.get_state(COUNT).update(number)
    (handle,), folder = cluster.take(backend)
    large, small = handle.parts
    assert isinstance(large, FileHandle)
    assert isinstance(small, InlineHandle)
    assert large.path.startswith("op-")  # one of the checkpoint's own, which goes with it
    assert large.length > len(KEYS) * 5_000
    path = tmp_path / "state" / folder / large.path
    table = pa.ipc.open_file(path).read_all()
    assert {len(value) for value in table.column("value").to_pylist()} == {5_000}
    restored = cluster.restored(((handle,), folder), [BLOB, COUNT])
    for number, key in enumerate(KEYS):
        use(restored, key)
        assert (restored.get_state(BLOB).value(), restored.get_state(COUNT).value()) == (bytes(5_000), number)


@pytest.mark.parametrize(("size", "kind"), [(50_000, InlineHandle), (70_000, FileHandle)])
def test_tables_of_memory_are_inline_below_64_kib(size: int, kind: type, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory")
    backend = cluster.backend([BLOB])
    use(backend, "a")
    backend.get_state(BLOB).update(bytes(size))
    for threshold in (0, 1 << 20):
        (handle,), _ = cluster.finish(backend.snapshot(threshold + 1), inline_threshold=threshold)
        assert [type(part) for part in handle.parts] == [kind]


def test_files_of_memory_do_not_count_for_what_travels_in_an_acknowledgement(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory", StateBackendSettings(memory_snapshot_bytes_max=10_000))
    backend = cluster.backend([BLOB])
    use(backend, "a")
    backend.get_state(BLOB).update(os.urandom(200_000))
    (handle,), _ = cluster.take(backend)
    assert [type(part) for part in handle.parts] == [FileHandle]


@pytest.mark.parametrize(("damage", "reason"), [("missing", "missing"), ("short", "length"), ("foreign", "checksum")])
def test_a_damaged_file_of_memory_is_named_with_its_operator(damage: str, reason: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "memory")
    backend = cluster.backend([BLOB])
    use(backend, "a")
    backend.get_state(BLOB).update(bytes(100_000))
    handles, folder = cluster.take(backend)
    path = tmp_path / "state" / folder / handles[0].parts[0].path  # type: ignore[union-attr]
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-1] if damage == "short" else bytes(len(content)))
    with pytest.raises(CorruptStateError, match=path.name) as raised:
        cluster.restored((handles, folder), [BLOB])
    assert (raised.value.operator, raised.value.reason) == ("op", reason)


def test_what_older_versions_kept_inline_restores_whatever_its_size(tmp_path: Path) -> None:
    older = Cluster(tmp_path / "older", "memory", StateBackendSettings(memory_inline_bytes=1 << 20))
    backend = older.backend([BLOB])
    use(backend, "a")
    backend.get_state(BLOB).update(bytes(500_000))
    handles, folder = older.take(backend)
    assert [type(part) for part in handles[0].parts] == [InlineHandle]
    restored = Cluster(tmp_path / "newer", "memory").restored((handles, folder), [BLOB])
    use(restored, "a")
    assert restored.get_state(BLOB).value() == bytes(500_000)


def test_a_threshold_of_zero_puts_nothing_inline_but_in_memory(tmp_path: Path) -> None:
    for kind, expected in (("memory", InlineHandle), ("filesystem", FileHandle), ("rocksdb", FileHandle)):
        cluster = Cluster(tmp_path / kind, kind)  # type: ignore[arg-type]
        backend = cluster.backend()
        fill([backend], KEYS[:2])
        handles, _ = cluster.finish(backend.snapshot(1), inline_threshold=0)
        assert {type(part) for handle in handles for part in handle.parts} == {expected}
        cluster.close()


# ---------------------------------------------------------------------------------------------------------------- rocksdb


def _write_blobs(backend: Any, numbers: range, size: int = 1000) -> None:
    state = backend.get_state(BLOB)
    for number in numbers:
        use(backend, f"k{number}")
        state.update(b"%06d" % number + bytes(size))


def _blob(backend: Any, number: int) -> Any:
    use(backend, f"k{number}")
    return backend.get_state(BLOB).value()


def test_a_savepoint_of_a_copy_that_rots_is_no_damage_of_a_snapshot(rocks: Cluster) -> None:
    """So that a restart mends it."""
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(300))
    pending = backend.snapshot(1)
    pending._flush()  # type: ignore[attr-defined]
    table = max(Path(pending._copy).glob("*.sst"), key=lambda path: path.stat().st_size)  # type: ignore[attr-defined]
    table.unlink()  # the database has it under another name
    table.write_bytes(os.urandom(1000))
    with pytest.raises(StateBackendError, match=r"operator 'op'.*Corruption"):
        rocks.finish(pending, canonical=True)


def test_state_beyond_the_budget_moves_to_the_database_and_is_read_back(rocks: Cluster) -> None:
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(8000))
    write_buffer = backend.write_buffer  # type: ignore[attr-defined]
    assert write_buffer.evictions >= 2
    assert write_buffer.size() < 3 << 20
    for number in range(0, 8000, 37):
        assert _blob(backend, number)[:6] == b"%06d" % number
    assert _blob(backend, 9000) is None
    restored = rocks.restored(rocks.take(backend), [BLOB])
    assert len(list(restored.keys("blob"))) == 8000
    assert _blob(restored, 77)[:6] == b"000077"


def test_the_read_cache_is_bounded(rocks: Cluster) -> None:
    backend = rocks.restored(_snapshot_of_blobs(rocks, 3000), [BLOB])
    for number in range(3000):
        assert _blob(backend, number) is not None
    assert backend.write_buffer.size() < 1_500_000  # type: ignore[attr-defined]


def _snapshot_of_blobs(cluster: Cluster, count: int) -> Any:
    backend = cluster.backend([BLOB])
    _write_blobs(backend, range(count))
    return cluster.take(backend)


def test_eviction_waits_for_a_snapshot_and_is_counted(rocks: Cluster) -> None:
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(100))
    pending = backend.snapshot(1)
    _write_blobs(backend, range(4000))
    write_buffer = backend.write_buffer  # type: ignore[attr-defined]
    assert write_buffer.eviction_waits > 0
    assert write_buffer.evictions == 0
    restored = rocks.restored(rocks.finish(pending), [BLOB])
    assert len(list(restored.keys("blob"))) == 100
    _write_blobs(backend, range(4000))
    assert write_buffer.evictions > 0


def test_a_barrier_in_the_middle_of_an_eviction_takes_everything(rocks: Cluster) -> None:
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(3000), size=10)
    write_buffer = backend.write_buffer  # type: ignore[attr-defined]
    write_buffer.freeze()
    write_buffer.maintain()
    _write_blobs(backend, range(10), size=20)
    restored = rocks.restored(rocks.take(backend), [BLOB])
    assert len(list(restored.keys("blob"))) == 3000
    assert len(_blob(restored, 5)) == 26
    assert len(_blob(restored, 500)) == 16


def test_a_value_that_can_t_be_encoded_is_named_by_an_eviction(rocks: Cluster) -> None:
    backend = rocks.backend([BLOB])
    use(backend, "bad")
    smuggle(backend.get_state(BLOB), "text")
    with pytest.raises(StateValueError) as raised:
        _write_blobs(backend, range(4000))
    assert (raised.value.operator, raised.value.state) == ("op", "blob")


def _idle(backend: Any) -> int:
    """Turns that found more to do."""
    turns = 0
    while backend.write_behind():
        turns += 1
    return turns


def test_what_changed_is_written_while_there_is_nothing_else_to_do(rocks: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = rocks.backend([BLOB])
    assert backend.writes_behind
    assert not backend.write_behind()
    _write_blobs(backend, range(RocksDBConfig().write_behind_rows - 1), size=10)
    assert not backend.write_behind(), "too little yet"
    _write_blobs(backend, range(3000), size=20)
    assert _idle(backend) == 3000 // WRITE_ROWS + 1
    written: list[int] = []
    write = RocksStore.write_batch

    def write_batch(store: RocksStore, keys: list[bytes], values: list[bytes | None]) -> None:
        written.append(len(keys))
        write(store, keys, values)

    monkeypatch.setattr(RocksStore, "write_batch", write_batch)
    _write_blobs(backend, range(7), size=30)
    restored = rocks.restored(rocks.take(backend), [BLOB])
    assert written == [7], "the barrier has only these left"
    assert [len(_blob(restored, number)) for number in (6, 7, 2999)] == [36, 26, 26]
    assert len(list(restored.keys("blob"))) == 3000


def test_a_memtable_with_much_in_it_becomes_a_table_before_the_barrier(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "rocksdb", StateBackendSettings(rocksdb=RocksDBConfig(write_buffer_bytes=16 << 20)))
    backend: Any = cluster.backend([BLOB])

    def tables() -> int:
        return sum(name.endswith(".sst") for name in os.listdir(backend.write_buffer.store.folder))

    _write_blobs(backend, range(2000), size=50)
    _idle(backend)
    assert tables() == 0
    _write_blobs(backend, range(2000, 6000), size=1000)
    _idle(backend)
    deadline = time.monotonic() + 30
    while tables() != 1:
        assert time.monotonic() < deadline, "the memtable is still no table"
        time.sleep(0.01)
    assert len(list(cluster.restored(cluster.take(backend), [BLOB]).keys("blob"))) == 6000
    cluster.close()


def test_nothing_is_written_behind_a_snapshot_that_is_not_stored_yet(rocks: Cluster) -> None:
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(3000), size=10)
    pending = backend.snapshot(1)
    _write_blobs(backend, range(3000), size=20)
    assert not backend.write_behind(), "it would be in the snapshot's files"
    assert len(_blob(rocks.restored(rocks.finish(pending), [BLOB]), 5)) == 16
    assert _idle(backend)
    assert len(_blob(rocks.restored(rocks.take(backend), [BLOB]), 5)) == 26


def test_a_value_that_can_t_be_encoded_is_left_to_the_barrier(rocks: Cluster) -> None:
    """It may be replaced until then."""
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(3000), size=10)
    use(backend, "k7")
    smuggle(backend.get_state(BLOB), "text")
    assert _idle(backend) < 3
    assert not backend.write_behind()
    pending = backend.snapshot(1)
    with pytest.raises(StateValueError, match="'blob'"):
        rocks.finish(pending)
    pending.release()
    _write_blobs(backend, range(7, 8), size=20)
    assert _idle(backend), "a barrier has passed"
    restored = rocks.restored(rocks.take(backend), [BLOB])
    assert [len(_blob(restored, number)) for number in (6, 7, 8)] == [16, 26, 16]


@pytest.mark.parametrize("error", [StorageUnavailableError("the disk is full"), RuntimeError("anything else")])
def test_what_fails_behind_is_tried_again_after_the_next_barrier(
    rocks: Cluster, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(3000), size=10)
    tried: list[int] = []

    def fail(store: RocksStore, keys: list[bytes], values: list[bytes | None]) -> None:
        tried.append(len(keys))
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(RocksStore, "write_batch", fail)
        assert [backend.write_behind() for _ in range(3)] == [False] * 3
    assert len(tried) == 1
    assert not backend.write_behind()
    assert len(_blob(rocks.restored(rocks.take(backend), [BLOB]), 2999)) == 16
    _write_blobs(backend, range(3000), size=20)
    assert _idle(backend)
    assert len(_blob(rocks.restored(rocks.take(backend), [BLOB]), 2999)) == 26


def _the_disk_is_full(store: RocksStore, keys: list[bytes], values: list[bytes | None]) -> None:
    raise StorageUnavailableError("the disk is full")


def _half_written(rocks: Cluster) -> Any:
    """A value of the wrong type lies behind the first piece of what is being written."""
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(2500), size=10)
    use(backend, "k7")
    smuggle(backend.get_state(BLOB), "text")
    write_buffer = backend.write_buffer  # type: ignore[attr-defined]
    groups = write_buffer._groups_of([backend.current_key[0]]).tolist()
    assert groups == [backend.current_key[1]]
    write_buffer.freeze(behind=True)
    return backend


def test_records_that_arrive_while_rows_are_written_behind_fail_for_none_of_them(rocks: Cluster) -> None:
    backend = _half_written(rocks)
    _write_blobs(backend, range(5000, 7000), size=10)
    assert backend.write_buffer.evictions == 0
    _write_blobs(backend, range(7, 8), size=20)
    restored = rocks.restored(rocks.take(backend), [BLOB])
    assert [len(_blob(restored, number)) for number in (6, 7, 6999)] == [16, 26, 16]


def test_a_barrier_behind_what_failed_to_be_written_is_told_and_the_next_one_is_well(rocks: Cluster) -> None:
    backend = _half_written(rocks)
    _write_blobs(backend, range(3000, 3010), size=10)
    pending = backend.snapshot(1)
    for _ in range(5):
        backend.write_behind()
    with pytest.raises(StateValueError, match="'blob'"):
        rocks.finish(pending)
    pending.release()
    _write_blobs(backend, range(7, 8), size=20)
    restored = rocks.restored(rocks.take(backend), [BLOB])
    assert len(list(restored.keys("blob"))) == 2510
    assert [len(_blob(restored, number)) for number in (6, 7, 3009)] == [16, 26, 16]


def test_a_disk_that_was_full_while_rows_were_written_behind_costs_no_barrier(
    rocks: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier's generation waits behind the one that failed, and is copied all the same."""
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(3000), size=10)
    assert backend.write_behind()
    _write_blobs(backend, range(3000, 3010), size=10)
    pending = backend.snapshot(1)

    with monkeypatch.context() as broken:
        broken.setattr(RocksStore, "write_batch", _the_disk_is_full)
        for _ in range(3):
            assert not backend.write_behind()
    restored = rocks.restored(rocks.finish(pending), [BLOB])
    assert len(list(restored.keys("blob"))) == 3010


def test_an_eviction_that_fails_while_there_is_nothing_to_do_is_told_when_there_is(
    rocks: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the wait for work, which belongs to all subtasks of the worker."""
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(3000), size=10)
    write_buffer = backend.write_buffer  # type: ignore[attr-defined]
    write_buffer.freeze()

    with monkeypatch.context() as broken:
        broken.setattr(RocksStore, "write_batch", _the_disk_is_full)
        assert [backend.write_behind() for _ in range(3)] == [False] * 3
        with pytest.raises(StorageUnavailableError, match="the disk is full"):
            write_buffer.maintain()
        pending = backend.snapshot(1)
        with pytest.raises(StorageUnavailableError, match="the disk is full"):
            rocks.finish(pending)
        pending.release()
        assert not backend.write_behind()
    restored = rocks.restored(rocks.take(backend), [BLOB])
    assert len(list(restored.keys("blob"))) == 3000


def test_a_map_that_was_cleared_is_written_behind_a_few_entries_at_a_time(rocks: Cluster) -> None:
    backend = rocks.backend([TAGS])
    tags = backend.get_state(TAGS)
    use(backend, "large")
    for number in range(2 * WRITE_ROWS + 500):
        tags.put(f"t{number}", number)
    rocks.take(backend)
    tags.clear()
    for number in range(3):
        tags.put(f"n{number}", number)
    backend.write_buffer.freeze(behind=True)  # type: ignore[attr-defined]
    turns = [backend.write_behind() for _ in range(6)]
    assert turns == [True] * 4 + [False] * 2, "three pieces, and one that finds no more"
    restored = rocks.restored(rocks.take(backend), [TAGS])
    use(restored, "large")
    assert dict(restored.get_state(TAGS).items()) == {f"n{number}": number for number in range(3)}


def test_rows_that_are_large_are_left_to_the_pool_thread(rocks: Cluster) -> None:
    cluster = Cluster(rocks.root / "large", "rocksdb", StateBackendSettings(rocksdb=RocksDBConfig(write_behind_rows=10)))
    backend = cluster.backend([BLOB])
    _write_blobs(backend, range(100), size=100_000)
    assert not backend.write_behind()
    cluster.close()


def test_a_native_snapshot_without_files_is_no_empty_state(rocks: Cluster) -> None:
    backend = rocks.backend([BLOB])
    _write_blobs(backend, range(10))
    handles, folder = rocks.take(backend)
    empty = tuple(msgspec.structs.replace(handle, parts=(), names=()) for handle in handles)
    with pytest.raises(CorruptStateError, match="no files"):
        rocks.restored((empty, folder), [BLOB])


@pytest.mark.parametrize("kind", ["memory", "filesystem"])
def test_state_in_memory_is_not_written_behind(kind: Any, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, kind)
    backend = cluster.backend([BLOB])
    _write_blobs(backend, range(3000), size=10)
    assert not backend.writes_behind
    assert not backend.write_behind()
    cluster.close()


def test_later_snapshots_write_what_an_earlier_flow_has_not(rocks: Cluster) -> None:
    backend = rocks.backend()
    fill([backend], KEYS)
    expected = contents(backend)
    first = backend.snapshot(1)
    fill([backend], KEYS[:5])
    second = backend.snapshot(2)
    rocks.finish(second)
    assert contents(rocks.restored(rocks.finish(first))) == expected


def test_local_copies_are_deleted_with_the_flow(rocks: Cluster) -> None:
    backend = rocks.backend()
    fill([backend], KEYS)
    rocks.take(backend)
    rocks.take(backend, canonical=True)
    flow = one_by_one(backend.snapshot(3).flow(rocks.target(inline_threshold=0)))
    assert isinstance(next(flow), UploadFile)
    assert [path.name for path in rocks.root.glob("local-1/*") if path.name != "db"] != []
    flow.close()
    assert [path.name for path in rocks.root.glob("local-1/*")] == ["db"]


def test_a_snapshot_after_disposal_fails_and_a_new_use_is_refused(rocks: Cluster) -> None:
    backend = rocks.backend()
    fill([backend], KEYS)
    pending = backend.snapshot(1)
    backend.dispose()
    with pytest.raises(StorageUnavailableError, match="closed"):
        rocks.finish(pending)
    pending.release()
    with pytest.raises(InvariantError):
        backend.get_state(COUNT)


def test_disposal_doesn_t_wait_for_a_long_write(rocks: Cluster) -> None:
    backend = rocks.backend([BLOB])
    write_buffer = backend.write_buffer  # type: ignore[attr-defined]
    _write_blobs(backend, range(3000), size=10)
    pending = backend.snapshot(1)
    commit, pieces = write_buffer.store._commit, []

    def commit_and_dispose(batch: Any, first: bytes) -> None:
        """The loop thread disposes of the backend while the pool thread is in its second piece."""
        pieces.append(batch)
        if len(pieces) == 2:
            write_buffer.store.refuse_writes()
        commit(batch, first)

    write_buffer.store._commit = commit_and_dispose
    with pytest.raises(StorageUnavailableError, match="being closed"):
        rocks.finish(pending)
    assert len(pieces) == 2
    backend.dispose()


def test_a_native_handle_whose_names_don_t_fit_is_corrupt(rocks: Cluster) -> None:
    backend = rocks.backend()
    fill([backend], KEYS)
    (native, tables), folder = rocks.take(backend)
    for names in (("../../evil", *native.names[1:]), native.names[1:]):
        broken = KeyedStateHandle(native.key_groups, native.format, native.states, native.parts, names)
        with pytest.raises(CorruptStateError):
            rocks.restored(((broken, tables), folder))


def test_columnar_state_and_timers_are_a_second_handle(rocks: Cluster) -> None:
    backend = rocks.backend()
    fill([backend], KEYS)
    handles, _ = rocks.take(backend)
    assert [(handle.format, [meta.name for meta in handle.states]) for handle in handles] == [
        ("rocksdb", ["count", "visit", "seen", "tags", "total", "mean"]),
        ("arrow", ["windows"]),
    ]
    assert len(handles[0].names) == len(handles[0].parts)


def test_a_changed_set_of_states_keeps_the_others(rocks: Cluster) -> None:
    backend = rocks.backend()
    fill([backend], KEYS)
    expected = {place: value for place, value in contents(backend).items() if place[0] in ("seen", "tags")}
    added = MapStateDescriptor("added", str, str)
    restored = rocks.restored(rocks.take(backend), [added, TAGS, SEEN], allow_unclaimed_state=True)
    use(restored, "user-3")
    restored.get_state(added).put("k", "v")
    again = rocks.restored(rocks.take(restored), [*ALL, added])
    assert contents(again) == expected
    use(again, "user-3")
    assert dict(again.get_state(added).items()) == {"k": "v"}


def test_every_operation_of_a_native_checkpoint_is_an_upload_of_the_hard_linked_copy(rocks: Cluster) -> None:
    backend = rocks.backend([COUNT])
    for number in range(100):
        use(backend, f"k{number}")
        backend.get_state(COUNT).update(number)
    flow = backend.snapshot(1).flow(rocks.target(inline_threshold=0))
    seen: list[Operation] = []

    class Recording:
        root = ""

        def at(self, location: str) -> Storage:
            return rocks.storage.at(location)

        def execute(self, operation: Operation) -> Any:
            seen.append(operation)
            return rocks.storage.execute(operation)

    run_flow(flow, Recording())
    assert {type(operation) for operation in seen} == {UploadFile}
    assert all("copy-1-1" in operation.local_path for operation in seen if isinstance(operation, UploadFile))
