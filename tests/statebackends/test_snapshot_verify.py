"""Whole snapshots checked: every file, every problem with its owner, every damaged bit."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.api.snapshots.snapshot import open_snapshot
from holdfast.statebackends.errors import CorruptStateError, StorageUnavailableError
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle
from holdfast.statebackends.snapshot.parts import ProblemKind
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.external import NO_DIRECTORY
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    DownloadFile,
    ListFiles,
    ListFolder,
    Operation,
    PutIfAbsent,
    ReadFile,
    StatFile,
    Storage,
    UploadFile,
    run_flow,
)
from tests.examples import FACTOR
from tests.statebackends.snapshot_harness import SOME, UID, Contents, files_below, write
from tests.statebackends.test_snapshot_copy import FORMS, export_all, snapshot, verified
from tests.statebackends.test_snapshot_rows import handle, with_keyed

# ------------------------------------------------------------------------------------------------------------------ verify


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_snapshot_has_no_problems(tmp_path: Path, form: Any) -> None:
    found = snapshot(tmp_path, form)
    files = files_below(Path(found.location))
    report = verified(found)
    assert report.is_sound
    assert (report.files, report.size) == (len(files), sum(len(d) for name, d in files.items() if name != "_metadata"))


@pytest.mark.parametrize("kind", ["memory", "filesystem"])
def test_parts_in_the_metadata_count_as_state(tmp_path: Path, kind: Any) -> None:
    found = write(tmp_path, "job/chk-7", SOME, kind=kind, inline_threshold=1 << 20)
    report = verified(found)
    assert (report.files, report.is_sound) == (1, True)
    assert report.size == found.metadata.size > 0, "as inspect tells it"


def test_every_problem_is_named_with_its_owner(tmp_path: Path) -> None:
    found = snapshot(tmp_path, ("filesystem", 2, False))
    damaged = sorted(path for path in Path(found.location).iterdir() if path.name != "_metadata")[::3][:4]
    wrong = dict(zip(damaged, ("missing", "length", "checksum", "unreadable"), strict=True))
    for path, kind in wrong.items():
        content = path.read_bytes()
        match kind:
            case "missing":
                path.unlink()
            case "length":
                path.write_bytes(content + b"!")
            case "checksum":
                path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    told: list[Any] = []
    unreadable = next(path for path, kind in wrong.items() if kind == "unreadable")
    storage = Unreadable(found.storage, unreadable.name)
    report = run_flow(verify_files(found, told.append), storage)
    assert {problem.path.rpartition("/")[2]: problem.kind for problem in report.problems} == {
        path.name: ProblemKind(kind) for path, kind in wrong.items()
    }
    assert told == list(report.problems)
    for problem in report.problems:
        assert problem.operator == UID
        assert f"-{problem.subtask}-1-n-" in problem.path


@pytest.mark.parametrize("form", [form for form in FORMS if form[0] == "filesystem"])
def test_tables_that_are_called_by_another_format_are_problems(tmp_path: Path, form: Any) -> None:
    """Their checksums are right, and the file that operator state is in has no format."""
    found = snapshot(tmp_path, form)
    swapped = {"arrow": "parquet", "parquet": "arrow"}

    def swap(keyed: KeyedStateHandle) -> KeyedStateHandle:
        return msgspec.structs.replace(keyed, format=swapped.get(keyed.format, keyed.format))

    operators = tuple(
        msgspec.structs.replace(
            operator,
            subtasks=tuple(msgspec.structs.replace(each, keyed=tuple(map(swap, each.keyed))) for each in operator.subtasks),
        )
        for operator in found.metadata.operators
    )
    other = replace(found, metadata=msgspec.structs.replace(found.metadata, operators=operators))
    parts = [part for each in operators[0].subtasks for keyed in each.keyed if keyed.format in swapped for part in keyed.parts]
    tables = {part.path for part in parts if isinstance(part, FileHandle)}
    report = verified(other)
    assert tables
    assert {problem.path.rpartition("/")[2] for problem in report.problems} == tables
    assert {(problem.kind, problem.operator) for problem in report.problems} == {(ProblemKind.FORMAT, UID)}
    assert (report.files, report.size) == (verified(found).files, verified(found).size)


class Unreadable:
    """A storage with a file that the disk can't read."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name, self.root = storage, name, storage.root

    def at(self, location: str) -> Storage:
        raise NotImplementedError

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, ReadFile) and operation.path.endswith(self._name):
            raise StorageUnavailableError(f"{operation.path}: {os.strerror(errno.EIO)}", path=operation.path)
        return self._storage.execute(operation)


def test_external_files_are_checked_beside_a_checkpoint_and_counted_beside_a_savepoint(tmp_path: Path) -> None:
    for canonical in (False, True):
        found = snapshot(tmp_path, ("memory", 1, canonical))
        found = replace(
            found, metadata=msgspec.structs.replace(found.metadata, external=("job/sources/x", "a|job/chk-7/_metadata"))
        )
        report = verified(found)
        if canonical:
            assert not report.problems
            assert [each.path for each in report.unchecked] == ["job/sources/x", "a|job/chk-7/_metadata"]
            assert {each.reason for each in report.unchecked} == {NO_DIRECTORY}
        else:
            assert [(problem.kind, problem.path) for problem in report.problems] == [(ProblemKind.MISSING, "job/sources/x")]


def test_a_path_out_of_the_snapshot_is_a_problem(tmp_path: Path) -> None:
    meta = snapshot(tmp_path, ("memory", 1, True)).state(UID, "count").meta
    for path in ("../job/chk-7/x", "../../x", "/etc/passwd"):
        part = FileHandle(path, 1, checksum_of(b"x"))
        found = with_keyed(
            open_snapshot(tmp_path / "state/savepoint-7"), handle(format="parquet", states=(meta,), parts=(part,), names=())
        )
        (problem,) = verified(found).problems
        assert (problem.kind, problem.operator, problem.subtask) == (ProblemKind.PATH, UID, 0)
        for writer in (copy_snapshot, export_all):
            with pytest.raises(CorruptStateError, match="leaves"):
                writer(found, LocalStorage(tmp_path / "target"), "new")
            assert files_below(tmp_path / "target") == {}


# ------------------------------------------------------------------------------------------------------- every damaged bit


class Files:
    """A storage in memory."""

    root = "memory"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def at(self, location: str) -> Storage:
        raise NotImplementedError

    def execute(self, operation: Operation) -> Any:
        match operation:
            case StatFile(path):
                return len(self.files[path]) if path in self.files else None
            case ReadFile(path, offset, length):
                content = self.files[path]
                return content[offset:] if length is None else content[offset : offset + length]
            case DownloadFile(path, local):
                Path(local).write_bytes(self.files[path])
                return len(self.files[path]), checksum_of(self.files[path])
            case UploadFile(local, path):
                self.files[path] = Path(local).read_bytes()
                return len(self.files[path]), checksum_of(self.files[path])
            case PutIfAbsent(path, data):
                return self.files.setdefault(path, data) is data
            case ListFolder(prefix) | ListFiles(prefix):
                return sorted(path.removeprefix(f"{prefix}/") for path in self.files if path.startswith(f"{prefix}/"))
            case DeleteFile(path):
                return self.files.pop(path, None) is not None
            case DeleteFolder():
                return 0
        raise NotImplementedError(type(operation).__name__)


STRIDE = max(1, 7 // FACTOR)
"""Bytes from one flip to the next: every seventh one, and each bit of a byte; every one with `make chaos`."""


@pytest.mark.parametrize("form", [("filesystem", 1, False), ("filesystem", 1, True), ("rocksdb", 1, False)])
def test_every_bit_flip_and_truncation_of_a_file_is_a_typed_error(tmp_path: Path, form: Any) -> None:
    """Flips over the whole length of every file of a small snapshot: found by verify, and neither copied nor exported."""
    on_disk = snapshot(tmp_path, form, Contents(count={"AA": 1}, positions=[1]))
    files = {f"{on_disk.folder}/{name}": content for name, content in files_below(Path(on_disk.location)).items()}
    storage, target = Files(dict(files)), Files({})
    found = StoredSnapshot(on_disk.metadata, storage, on_disk.folder)
    for path, content in files.items():
        if path.endswith("/_metadata"):
            continue
        for offset in range(0, len(content), STRIDE):
            for damaged in (_flipped(content, offset), content[:offset])[: 2 if offset % 16 < STRIDE else 1]:
                storage.files[path] = damaged
                (problem,) = verified(found).problems
                assert (problem.path, problem.operator, problem.subtask) == (path, UID, 0)
                for writer in (copy_snapshot, export_all) if offset % 64 < STRIDE else ():
                    with pytest.raises(CorruptStateError) as caught:
                        writer(found, target, "new")
                    assert (caught.value.operator, caught.value.path) == (UID, path)
        storage.files[path] = content
    assert verified(found).is_sound
    assert target.files == {}


def test_every_bit_flip_and_truncation_of_the_metadata_is_a_typed_error(tmp_path: Path) -> None:
    place = Path(snapshot(tmp_path, ("memory", 1, True)).location)
    file = place / "_metadata"
    content = file.read_bytes()
    for offset in range(len(content)):
        for damaged in (_flipped(content, offset), content[:offset])[: 2 if offset % 16 == 0 else 1]:
            file.write_bytes(damaged)
            with pytest.raises(CorruptStateError, match="_metadata"):
                open_snapshot(place)


def _flipped(content: bytes, offset: int) -> bytes:
    return content[:offset] + bytes([content[offset] ^ (1 << offset % 8)]) + content[offset + 1 :]
