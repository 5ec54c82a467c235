"""Parts of snapshots: the inline threshold, damage that is named, and folders that move."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.layout import file_name, part_path
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.snapshot.parts import ProblemKind, read_metadata, read_part, verify_snapshot, write_part
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import ReadFile, WriteFile, run_flow

DATA = b"0123456789" * 10
META = StateMeta("count", "value", "int", "utf8")


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "state")


def target(threshold: int = 0, folder: str = "job/chk-1") -> SnapshotTarget:
    return SnapshotTarget(1, folder, "window-0-1-nonce", False, threshold)


def snapshot_of(*parts: StateHandle, external: tuple[str, ...] = ()) -> SnapshotMetadata:
    keyed = KeyedStateHandle(KeyGroupRange(0, 128), "rocksdb", (META,) * len(parts), parts)
    listed = OperatorListHandle(StateMeta("o", "operator_list", "bytes"), parts[0], 1)
    subtask = OperatorSubtaskState(keyed=(keyed,), operator=(listed,))
    return SnapshotMetadata(
        job_id="j",
        job_name="n",
        checkpoint_id=1,
        kind="checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=0,
        completion_timestamp_ms=1,
        operators=(OperatorState("window", operator_id("window"), "Window", 1, 128, (subtask,)),),
        external=external,
    )


@pytest.mark.parametrize(("threshold", "inline"), [(0, False), (99, False), (100, False), (101, True)])
def test_s05_parts_below_the_threshold_are_inline(storage: LocalStorage, threshold: int, inline: bool) -> None:
    handle = run_flow(write_part(DATA, "count", target(threshold)), storage)
    assert isinstance(handle, InlineHandle) is inline
    assert handle.length == len(DATA)
    assert run_flow(read_part(handle, "job/chk-1"), storage) == DATA
    if not inline:
        assert storage.execute(ReadFile("job/chk-1/window-0-1-nonce-count")) == DATA


def test_s05_empty_part_at_threshold_zero_is_a_file(storage: LocalStorage) -> None:
    handle = run_flow(write_part(b"", "count", target(0)), storage)
    assert isinstance(handle, FileHandle)
    assert run_flow(read_part(handle, "job/chk-1"), storage) == b""


def test_chunks_are_one_part(storage: LocalStorage) -> None:
    chunks: list[bytes | bytearray | memoryview] = [DATA[:7], bytearray(DATA[7:50]), memoryview(DATA)[50:]]
    for threshold in (0, 1000):
        handle = run_flow(write_part(chunks, f"c{threshold}", target(threshold)), storage)
        assert run_flow(read_part(handle, "job/chk-1"), storage) == DATA


def damage_missing(path: Path) -> None:
    path.unlink()


def damage_length(path: Path) -> None:
    path.write_bytes(DATA[:-1])


def damage_checksum(path: Path) -> None:
    path.write_bytes(DATA[:-1] + b"x")


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (damage_missing, ProblemKind.MISSING),
        (damage_length, ProblemKind.LENGTH),
        (damage_checksum, ProblemKind.CHECKSUM),
    ],
)
def test_damaged_file_is_refused_naming_file_and_operator(storage: LocalStorage, damage: Any, kind: ProblemKind) -> None:
    handle = run_flow(write_part(DATA, "count", target()), storage)
    metadata = snapshot_of(handle)
    assert run_flow(verify_snapshot(metadata, "job/chk-1"), storage) == []
    damage(Path(storage.root, "job/chk-1/window-0-1-nonce-count"))
    with pytest.raises(CorruptStateError, match=r"'window': job/chk-1/window-0-1-nonce-count") as caught:
        run_flow(read_part(handle, "job/chk-1", operator="window"), storage)
    assert (caught.value.operator, caught.value.reason) == ("window", kind.value)
    problems = run_flow(verify_snapshot(metadata, "job/chk-1"), storage)
    assert [(p.kind, p.operator, p.subtask, p.path) for p in problems] == [
        (kind, "window", 0, "job/chk-1/window-0-1-nonce-count")
    ]
    assert problems[0].error().fields == caught.value.fields
    quick = run_flow(verify_snapshot(metadata, "job/chk-1", checksums=False), storage)
    assert len(quick) == (0 if kind is ProblemKind.CHECKSUM else 1)


def test_large_files_are_verified_in_pieces(storage: LocalStorage) -> None:
    data = os.urandom(9 << 20)
    handle = run_flow(write_part(data, "big", target()), storage)
    assert run_flow(verify_snapshot(snapshot_of(handle), "job/chk-1"), storage) == []


def test_moved_snapshot_is_whole(storage: LocalStorage) -> None:
    handle = run_flow(write_part(DATA, "count", target(folder="savepoint-1")), storage)
    storage.execute(WriteFile("savepoint-1/_metadata", [encode_metadata(snapshot_of(handle))]))
    shutil.move(Path(storage.root, "savepoint-1"), Path(storage.root, "elsewhere"))
    metadata = run_flow(read_metadata("elsewhere"), storage)
    assert metadata == snapshot_of(handle)
    assert run_flow(verify_snapshot(metadata, "elsewhere"), storage) == []
    with pytest.raises(ObjectMissingError):
        run_flow(read_metadata("savepoint-1"), storage)
    rooted = LocalStorage(Path(storage.root, "elsewhere"))
    assert run_flow(read_metadata(""), rooted) == metadata
    assert run_flow(verify_snapshot(metadata, ""), rooted) == []


def test_shared_files_are_found_beside_the_folder(storage: LocalStorage) -> None:
    storage.execute(WriteFile("job/shared/1", [DATA]))
    assert part_path("job/chk-2", "../shared/1") == "job/shared/1"
    handle = run_flow(write_part(DATA, "count", target()), storage)
    assert isinstance(handle, FileHandle)
    shared = FileHandle("../shared/1", handle.length, handle.checksum)
    assert run_flow(read_part(shared, "job/chk-2"), storage) == DATA


@pytest.mark.parametrize("path", ["/etc/passwd", "../../../x", "../../../etc/passwd", "../..", "a\0b"])
def test_path_that_leaves_the_root_is_corrupt(storage: LocalStorage, path: str) -> None:
    handle = FileHandle(path, 1, "c")
    with pytest.raises(CorruptStateError, match="leaves"):
        run_flow(read_part(handle, "job/chk-1"), storage)
    problems = run_flow(verify_snapshot(snapshot_of(handle), "job/chk-1"), storage)
    assert [p.kind for p in problems] == [ProblemKind.PATH]


def test_file_names_are_safe_and_distinct() -> None:
    texts = ["count", "a/b", "a%2Fb", "..", ".hidden", "grün", "x" * 500, "x" * 501, "a b", "", "A", "a"]
    names = [file_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert names[0] == "count"
    for name in names:
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name) < 150
