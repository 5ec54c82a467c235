"""Copies and exports of whole snapshots: every failure and every crash between two operations."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.api.snapshots.snapshot import open_snapshot
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    NotFoundError,
    ObjectMissingError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import FileHandle, KeyGroupRange
from holdfast.statebackends.layout import UNFINISHED_NAME
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.export import export_snapshot
from holdfast.statebackends.state_processor.verify import VerifyReport, verify_files
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.filesystem import OsFileSystem
from holdfast.statebackends.storage.port import Buffer, Operation, PutIfAbsent, ReadFile, Storage, UploadFile, WriteFile, run_flow
from tests.statebackends.snapshot_harness import SOME, Contents, files_below, write
from tests.statebackends.test_snapshot_rows import handle, with_keyed

FORMS: list[tuple[Any, int, bool]] = [("filesystem", 2, False), ("filesystem", 2, True), ("rocksdb", 1, False)]
Write = Callable[[StoredSnapshot, Storage, str], object]


def export_all(source: StoredSnapshot, storage: Storage, folder: str) -> object:
    return export_snapshot(source, list(source.states()), storage, folder)


WRITERS = pytest.mark.parametrize(("writer", "last"), [(copy_snapshot, "_metadata"), (export_all, "_export.json")])


def snapshot(tmp_path: Path, form: tuple[Any, int, bool] = ("filesystem", 1, False), contents: Contents = SOME) -> StoredSnapshot:
    kind, parallelism, canonical = form
    folder = "savepoint-7" if canonical else "job/chk-7"
    return write(tmp_path, folder, contents, kind=kind, parallelism=parallelism, canonical=canonical)


def verified(found: StoredSnapshot) -> VerifyReport:
    return run_flow(verify_files(found), found.storage)


# -------------------------------------------------------------------------------------------------------------------- copy


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_a_savepoint_with_the_same_content(tmp_path: Path, form: Any) -> None:
    source = snapshot(tmp_path, form)
    before = files_below(Path(source.location))
    copied = copy_snapshot(source, LocalStorage(tmp_path / "elsewhere"), "sp")
    assert files_below(Path(source.location)) == before
    names = set(files_below(tmp_path / "elsewhere/sp"))
    assert names == set(before)
    again = open_snapshot(tmp_path / "elsewhere/sp")
    assert again.metadata == copied.metadata
    assert (again.metadata.kind, again.is_self_contained) == ("savepoint", True)
    assert verified(again).is_sound
    assert diff_snapshots(source, again).is_same
    assert open_snapshot(copy_snapshot(again, LocalStorage(tmp_path / "third"), "sp").location).metadata == again.metadata


def test_files_shared_by_checkpoints_come_into_the_folder(tmp_path: Path) -> None:
    source = snapshot(tmp_path)
    shared = tmp_path / "state/job/shared"
    shared.mkdir()
    moves = {}
    for path in Path(source.location).iterdir():
        if path.name != "_metadata" and "count" in path.name:
            path.rename(shared / path.name)
            moves[path.name] = f"../shared/{path.name}"
    (shared / "_metadata").write_bytes(b"a state file of an unlucky name")
    operator = source.metadata.operators[0]
    (subtask,) = operator.subtasks
    parts = [
        msgspec.structs.replace(part, path=moves.get(part.path, part.path)) if isinstance(part, FileHandle) else part
        for part in subtask.keyed[0].parts
    ]
    unlucky = FileHandle("../shared/_metadata", 31, checksum_of(b"a state file of an unlucky name"))
    keyed = msgspec.structs.replace(subtask.keyed[0], parts=tuple(parts))
    native = handle(parts=(unlucky,), states=(), key_groups=KeyGroupRange(0, 0))
    found = with_keyed(source, keyed, native)
    copied = copy_snapshot(found, LocalStorage(tmp_path / "elsewhere"), "sp")
    assert verified(open_snapshot(copied.location)).is_sound
    assert diff_snapshots(found, open_snapshot(copied.location)).is_same
    assert set(files_below(tmp_path / "elsewhere/sp")) >= {"2-_metadata", *moves}


def test_a_file_with_two_checksums_is_refused(tmp_path: Path) -> None:
    source = snapshot(tmp_path)
    part = FileHandle("f", 1, checksum_of(b"x"))
    found = with_keyed(source, handle(parts=(part, FileHandle("./f", 1, checksum_of(b"y"))), names=("a", "b")))
    with pytest.raises(CorruptStateError, match="is named with two checksums"):
        copy_snapshot(found, LocalStorage(tmp_path / "elsewhere"), "sp")


@WRITERS
@pytest.mark.parametrize("there", ["_metadata", UNFINISHED_NAME, "something", "folder/file"])
def test_nothing_is_overwritten(tmp_path: Path, writer: Write, last: str, there: str) -> None:
    source = snapshot(tmp_path)
    file = tmp_path / "target/new" / there
    file.parent.mkdir(parents=True)
    file.write_bytes(b"precious")
    with pytest.raises(InvalidConfigError, match="target/new"):
        writer(source, LocalStorage(tmp_path / "target"), "new")
    assert files_below(tmp_path / "target") == {f"new/{there}": b"precious"}


@WRITERS
def test_a_file_where_the_folder_should_be(tmp_path: Path, writer: Write, last: str) -> None:
    source = snapshot(tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "target/new").write_bytes(b"precious")
    with pytest.raises(StorageUnavailableError, match="new"):
        writer(source, LocalStorage(tmp_path / "target"), "new")
    assert files_below(tmp_path / "target") == {"new": b"precious"}


class ReadOnly(OsFileSystem):
    """Every write is refused."""

    def create(self, path: str) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def mkdir(self, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


class Full(OsFileSystem):
    """No space for more than a few bytes."""

    def __init__(self, size: int) -> None:
        self.left = size

    def write(self, descriptor: int, data: Buffer) -> int:
        if self.left < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= len(data)
        return super().write(descriptor, data)


@WRITERS
def test_a_read_only_or_full_target_is_named_and_left_as_it_was(tmp_path: Path, writer: Write, last: str) -> None:
    source = snapshot(tmp_path)
    for number, (file_system, words) in enumerate(((ReadOnly(), "Read-only"), (Full(10), "No space"), (Full(3_000), "No space"))):
        with pytest.raises(StorageUnavailableError, match=words):
            writer(source, LocalStorage(tmp_path / "target", file_system=file_system), f"new-{number}")
        assert files_below(tmp_path / "target") == {}


# ------------------------------------------------------------------------------------------- failures and crashes everywhere


class Crash(BaseException):
    """The process is gone."""


class Failing:
    """A storage whose n-th operation (counted over all that share `plan`) goes wrong."""

    def __init__(self, storage: Storage, plan: Plan) -> None:
        self._storage, self._plan, self.root = storage, plan, storage.root

    def at(self, location: str) -> Storage:
        raise NotImplementedError

    def execute(self, operation: Operation) -> Any:
        how = self._plan.next(operation)
        if how in ("crash", "error", "lost"):
            self._plan.raise_error(how, operation)
        result = self._storage.execute(operation)
        if how is not None:
            self._plan.raise_error(how, operation)
        return result


class Plan:
    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how
        self.count = 0
        self.applied = False
        self.operations: list[Operation] = []

    def next(self, operation: Operation) -> str | None:
        self.count += 1
        self.operations.append(operation)
        if self.applied and self.how.startswith("crash"):
            return "crash"
        if self.count - 1 != self.at:
            return None
        if self.how in ("done", "lost") and not isinstance(operation, PutIfAbsent):
            return None
        self.applied = True
        return self.how

    def raise_error(self, how: str, operation: Operation) -> None:
        if how.startswith("crash"):
            raise Crash
        if how in ("done", "lost"):
            raise AmbiguousWriteError(f"{operation}: timed out", path="p")
        raise StorageUnavailableError(f"{type(operation).__name__}: failed", path="p")


def attempt(tmp_path: Path, source: StoredSnapshot, writer: Write, at: int, how: str) -> tuple[Plan, BaseException | None, Path]:
    plan = Plan(at, how)
    root = tmp_path / f"target-{how}-{at}"
    watched = replace(source, storage=Failing(source.storage, plan))
    try:
        writer(watched, Failing(LocalStorage(root), plan), "new")
    except (HoldfastError, Crash) as error:
        return plan, error, root
    return plan, None, root


@WRITERS
@pytest.mark.parametrize("how", ["error", "error after", "crash", "crash after", "done", "lost"])
def test_failures_and_crashes_at_every_operation(tmp_path: Path, writer: Write, last: str, how: str) -> None:
    """`done` and `lost` are conditional creates of which storage can't tell whether they happened."""
    source = snapshot(tmp_path, ("filesystem", 2, False))
    before = files_below(tmp_path / "state")
    plan, nothing, root = attempt(tmp_path, source, writer, -1, "none")
    assert nothing is None
    whole = set(files_below(root / "new"))
    assert last in whole
    assert UNFINISHED_NAME not in whole
    moments = [n for n, each in enumerate(plan.operations) if how not in ("done", "lost") or isinstance(each, PutIfAbsent)]
    for at in moments:
        plan, error, root = attempt(tmp_path, source, writer, at, how)
        assert plan.applied
        assert files_below(tmp_path / "state") == before
        found = set(files_below(root / "new"))
        if error is None or last in found:
            assert found == whole
        elif isinstance(error, Crash):
            assert found <= whole - {last} | {UNFINISHED_NAME}
            _means_nothing(writer, source, root, found)
        elif at == moments[-1] and how == "lost":
            assert found == whole - {last}  # it may still arrive, so that nothing is deleted
            _means_nothing(writer, source, root, found)
        else:
            assert not (root / "new").exists()


def _means_nothing(writer: Write, source: StoredSnapshot, root: Path, found: set[str]) -> None:
    """What a writer that died left is no snapshot, and nobody writes into it."""
    with pytest.raises(NotFoundError):
        open_snapshot(root / "new")
    if found:
        with pytest.raises(InvalidConfigError):
            writer(source, LocalStorage(root), "new")


@WRITERS
def test_what_cannot_be_deleted_again_is_named(tmp_path: Path, writer: Write, last: str) -> None:
    source = snapshot(tmp_path)

    class Dying:
        root = str(tmp_path / "target")
        uploads = 0

        def at(self, location: str) -> Storage:
            raise NotImplementedError

        def execute(self, operation: Operation) -> Any:
            self.uploads += isinstance(operation, UploadFile | WriteFile)
            if self.uploads > 1:
                raise StorageUnavailableError("the cable is cut", path="p")
            return LocalStorage(self.root).execute(operation)

    with pytest.raises(StorageUnavailableError, match=r"the cable is cut; and .*/target/new could not be emptied again"):
        writer(source, Dying(), "new")


def test_two_copies_into_one_folder(tmp_path: Path) -> None:
    """One that starts while the other is under way is refused, and takes nothing away when it goes."""
    source = snapshot(tmp_path)
    target = LocalStorage(tmp_path / "target")

    class Meddled:
        root = target.root
        tried = 0

        def at(self, location: str) -> Storage:
            raise NotImplementedError

        def execute(self, operation: Operation) -> Any:
            result = target.execute(operation)
            self.tried += 1
            if self.tried > 1:  # from the claim on
                with pytest.raises(InvalidConfigError):
                    copy_snapshot(source, target, "new")
            return result

    copied = copy_snapshot(source, Meddled(), "new")
    assert verified(open_snapshot(copied.location)).is_sound


def test_a_source_that_vanishes_meanwhile(tmp_path: Path) -> None:
    source = snapshot(tmp_path)
    for path in Path(source.location).iterdir():
        path.unlink()
    for writer in (copy_snapshot, export_all):
        with pytest.raises(CorruptStateError, match=r"operator 'totals' subtask 0: .*: the file is missing"):
            writer(source, LocalStorage(tmp_path / "target"), "new")
    assert files_below(tmp_path / "target") == {}
    with pytest.raises(ObjectMissingError):
        source.storage.execute(ReadFile(source.metadata_path))


# ------------------------------------------------------------------------------------------------------------------ export


def test_an_export_lists_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.statebackends.state_processor.export.FILE_ROWS_MAX", 10)
    monkeypatch.setattr("holdfast.statebackends.state_processor.export._GROUP_ROWS", 4)
    monkeypatch.setattr("holdfast.statebackends.snapshot.table_file.BATCH_ROWS", 3)
    contents = replace(SOME, count={f"k{n}": n for n in range(35)}, tags={})
    source = snapshot(tmp_path, ("filesystem", 2, True), contents)
    report = export_snapshot(source, list(source.states()), LocalStorage(tmp_path / "target"), "new")
    listed = json.loads((tmp_path / "target/new/_export.json").read_bytes())
    assert (listed["format"], listed["version"], listed["snapshot"]["job_name"]) == ("holdfast-export", 1, "flights")
    assert listed["states"] == json.loads(msgspec.json.encode(report.states))
    found = set(files_below(tmp_path / "target/new")) - {"_export.json"}
    assert found == {f"{state.folder}/{name}" for state in report.states for name in state.files}
    states = {state.state: state for state in report.states}
    assert states["count"].rows == 35
    assert len(states["count"].files) > 3
    assert (states["tags"].rows, states["tags"].files) == (0, ("part-00000.parquet",))
    assert states["count"].columns == {"key_group": "int32", "key": "string", "namespace": "binary", "value": "int64"}


def test_names_become_safe_folders(tmp_path: Path) -> None:
    source = snapshot(tmp_path)
    operator = msgspec.structs.replace(source.metadata.operators[0], uid="../a b/ü")
    source = replace(source, metadata=msgspec.structs.replace(source.metadata, operators=(operator,)))
    report = export_snapshot(source, list(source.states()), LocalStorage(tmp_path / "target"), "new")
    assert report.states[0].folder == "%2E.%2Fa%20b%2F%C3%BC/_timers"
    assert {path.name for path in (tmp_path / "target/new").iterdir()} == {"%2E.%2Fa%20b%2F%C3%BC", "_export.json"}
