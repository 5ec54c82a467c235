"""Tools ask storage for several files at one time, within bounds on what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.statebackends.errors import CorruptStateError, StorageUnavailableError
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.state_processor import reading as parts
from holdfast.statebackends.state_processor.contents import StoredSnapshot, states_of
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.export import export_snapshot
from holdfast.statebackends.state_processor.reading import fetch_windows
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DownloadFile,
    Operation,
    ReadFile,
    StatFile,
    Storage,
    UploadFile,
    path_of,
    run_flow,
    transfers_between,
)
from holdfast.statebackends.storage.transfers import ONE_BY_ONE, TransferPool
from tests.statebackends.snapshot_harness import SOME, UID, Contents, write

MANY = Contents(
    count={f"key-{number}": number for number in range(40)},
    seen={f"key-{number}": ["a", "b"] for number in range(40)},
    positions=[[f"{number}.parquet", number] for number in range(16)],
)


class Groups(TransferPool):
    """Notes how many calls each group has."""

    def __init__(self, transfers_max: int) -> None:
        super().__init__(transfers_max, 1 << 30, 1 << 20)
        self.sizes: list[int] = []

    def run(self, calls: Sequence[Callable[[], Any]], *arguments: Any) -> list[Any]:
        self.sizes.append(len(calls))
        return super().run(calls, *arguments)


class Together:
    """Operations of some kinds end once so many of them are under way at one time: it takes a group to get on."""

    def __init__(self, storage: Storage, until: int, *kinds: type[Operation]) -> None:
        self.transfers = Groups(until)
        self.root = storage.root
        self.now = self.most = 0
        self.seen: list[Operation] = []
        self._storage, self._kinds = storage, kinds
        self._barrier = threading.Barrier(until, timeout=20)
        self._lock = threading.Lock()

    def at(self, location: str) -> Storage:
        raise NotImplementedError

    def execute(self, operation: Operation) -> Any:
        with self._lock:
            self.seen.append(operation)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if isinstance(operation, self._kinds):
                self._barrier.wait()
            return self._storage.execute(operation)
        finally:
            with self._lock:
                self.now -= 1


def many(tmp_path: Path, **options: Any) -> StoredSnapshot:
    """A snapshot of four subtasks: a multiple of four files of each state."""
    return write(tmp_path, "savepoints/sp", MANY, parallelism=4, canonical=True, **options)


def watched(source: StoredSnapshot, *kinds: type[Operation]) -> tuple[StoredSnapshot, Together]:
    storage = Together(source.storage, 4, *kinds)
    return replace(source, storage=storage), storage


def test_files_are_copied_at_one_time_and_few_lie_in_the_scratch_folder(tmp_path: Path) -> None:
    source, storage = watched(many(tmp_path), DownloadFile)
    target = Together(LocalStorage(tmp_path / "elsewhere"), 4, UploadFile)
    copied = copy_snapshot(source, target, "sp")
    assert storage.most == target.most == 4
    assert run_flow(verify_files(copied), LocalStorage(tmp_path / "elsewhere")).is_sound
    downloads = [operation.local_path for operation in storage.seen if isinstance(operation, DownloadFile)]
    uploads = [operation.local_path for operation in target.seen if isinstance(operation, UploadFile)]
    assert sorted(downloads) == sorted(uploads)
    assert len(downloads) % 4 == 0
    assert not any(map(Path.exists, map(Path, downloads)))


def test_a_copy_that_fails_half_way_deletes_what_it_wrote_at_one_time(tmp_path: Path) -> None:
    class Fails(Together):
        def execute(self, operation: Operation) -> Any:
            if isinstance(operation, UploadFile) and sum(isinstance(each, UploadFile) for each in self.seen) >= 8:
                raise StorageUnavailableError("the cable is cut", path="p")
            return super().execute(operation)

    source = many(tmp_path)
    target = Fails(LocalStorage(tmp_path / "elsewhere"), 4)
    with pytest.raises(StorageUnavailableError, match="the cable is cut"):
        copy_snapshot(replace(source, storage=Together(source.storage, 4)), target, "sp")
    assert not [path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()]
    deleted = [path_of(operation) for operation in target.seen if isinstance(operation, DeleteFile)]
    assert deleted[-1] == "sp/_unfinished"
    assert len(deleted) >= 9


def test_only_storages_that_both_take_several_are_asked_for_several(tmp_path: Path) -> None:
    class Plain:
        root = ""

        def at(self, location: str) -> Storage:
            raise NotImplementedError

        def execute(self, operation: Operation) -> Any:
            raise NotImplementedError

    few, more = Together(LocalStorage(tmp_path), 2), Together(LocalStorage(tmp_path), 3)
    assert transfers_between(few, more) is transfers_between(more, few) is more.transfers
    assert transfers_between(few, Plain()) is transfers_between(Plain(), few) is ONE_BY_ONE


def test_parts_are_read_at_one_time_by_export_and_uploaded_so(tmp_path: Path) -> None:
    source = many(tmp_path)
    states = list(states_of(source.metadata.operators[0]).values())
    plain = export_snapshot(source, states, LocalStorage(tmp_path / "plain"), "out")
    source, storage = watched(source)
    target = Together(LocalStorage(tmp_path / "elsewhere"), len(states), UploadFile)
    found = export_snapshot(source, states, target, "out")
    assert found.states == plain.states
    assert storage.transfers.sizes == [1, 2, 1] * len(states)
    assert target.most == len(states)


def test_a_difference_reads_several_parts_of_each_side_at_one_time(tmp_path: Path) -> None:
    before, old = watched(many(tmp_path))
    after, new = watched(write(tmp_path, "savepoints/other", SOME, parallelism=4, canonical=True))
    found = diff_snapshots(before, after)
    assert found == diff_snapshots(replace(before, storage=old._storage), replace(after, storage=new._storage))
    assert set(old.transfers.sizes) == set(new.transfers.sizes) == {1, 2}


def test_native_files_are_cloned_at_one_time(tmp_path: Path) -> None:
    source, storage = watched(write(tmp_path, "job/chk-7", MANY, kind="rocksdb"), StatFile)
    handle = next(keyed for keyed in source.metadata.operators[0].subtasks[0].keyed if keyed.format == "rocksdb")
    files = [part for part in handle.parts if isinstance(part, FileHandle)][:4]
    assert len(files) == 4
    some = msgspec.structs.replace(handle, parts=tuple(files), names=tuple("abcd"))
    with source.reader() as reader:
        folder = reader.clone(some, operator=UID, subtask=0)
        assert sorted(path.name for path in Path(folder).iterdir()) == list("abcd")
    assert storage.most == 4


def test_what_is_fetched_is_bounded_and_begins_small() -> None:
    assert [len(some) for some in fetch_windows(range(200), lambda _: 1)] == [1, 2, 4, 8, 16, 32, 64, 64, 9]
    half = parts.FETCH_BYTES_MAX // 2
    assert [len(some) for some in fetch_windows(range(7), lambda _: half)] == [1, 2, 2, 2]
    assert [len(some) for some in fetch_windows(range(3), lambda _: 3 * half)] == [1, 1, 1]
    assert list(fetch_windows([], lambda _: 1)) == []


def test_damage_is_told_when_its_turn_comes_and_nothing_is_held_after(tmp_path: Path) -> None:
    source, storage = watched(many(tmp_path))
    state = source.state(UID, "count")
    last = state.keyed[3].handle.parts[state.keyed[3].index]
    assert isinstance(last, FileHandle)
    path = Path(storage.root) / source.path_of(last.path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    rows: list[int] = []
    with source.reader() as reader:
        batches = state_batches(reader, state, state_schema(reader, state))
        with pytest.raises(CorruptStateError, match=r"subtask 3: .*checksum"):
            rows.extend(batch.num_rows for batch in batches)
        assert 0 < sum(rows) < 40
        assert reader._fetched == {}


def test_few_rows_need_few_files(tmp_path: Path) -> None:
    source, storage = watched(many(tmp_path))
    state = source.state(UID, "count")
    with source.reader() as reader:
        next(state_batches(reader, state, state_schema(reader, state)))
    assert sum(isinstance(operation, ReadFile) for operation in storage.seen) == 1
