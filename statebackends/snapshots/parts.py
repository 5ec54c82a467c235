"""The bytes of a snapshot's parts, checked before anybody looks at them: small ones in memory, large ones in a scratch folder.

What was checked is what is read: a file is copied once, against its length and checksum, and only the copy is opened."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

import pyarrow as pa

from statebackends.errors import CorruptStateError, ObjectMissingError, StorageUnavailableError
from statebackends.handles import FileHandle, InlineHandle, KeyedStateHandle, PlaceholderHandle, SegmentHandle, StateHandle
from statebackends.snapshot import ProblemKind, of_operator, piece_problem, unresolved
from statebackends.storage.checksums import checksum_of
from statebackends.storage.operations import DownloadFile, ReadFile, StatFile, Storage, run_flow

MEMORY_BYTES_MAX = 4 << 20
"""Files up to this length are read into memory; larger ones are copied."""


class PathOf(Protocol):
    """Storage path of a file that a handle names."""

    def __call__(self, path: str, *, operator: str) -> str:
        """Raises CorruptStateError if the snapshot may not name it."""


class PartReader:
    """Parts of one snapshot; a context manager that deletes its copies. One thread."""

    def __init__(self, storage: Storage, path_of: PathOf) -> None:
        self._storage = storage
        self._path_of = path_of
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0
        self._clones: dict[KeyedStateHandle, str] = {}

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.forget()

    def forget(self) -> None:
        """Delete all copies. Idempotent."""
        self._clones.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def open(self, part: StateHandle, *, operator: str, subtask: int) -> pa.NativeFile:
        """A part as a file that can be read at any position. Raises CorruptStateError naming file, operator and subtask."""
        if isinstance(part, InlineHandle):
            return pa.BufferReader(pa.py_buffer(part.data))
        if isinstance(part, PlaceholderHandle):
            raise unresolved(part, operator)
        if part.length <= MEMORY_BYTES_MAX or isinstance(part, SegmentHandle):
            return pa.BufferReader(pa.py_buffer(self.read(part, operator=operator, subtask=subtask)))
        return pa.OSFile(self.copy(part, operator=operator, subtask=subtask))  # pages of a map would stay in memory, all of them

    def read(self, part: StateHandle, *, operator: str, subtask: int) -> bytes:
        """All bytes of a part. Raises CorruptStateError."""
        if isinstance(part, InlineHandle):
            return part.data
        if isinstance(part, PlaceholderHandle):
            raise unresolved(part, operator)
        path = self._path_of(part.path, operator=operator)
        if isinstance(part, SegmentHandle):
            return self._read_piece(part, path, operator, subtask)
        try:
            data: bytes = self._storage.execute(ReadFile(path, 0, max(part.length, 0) + 1))  # not more, however long it is now
        except ObjectMissingError as error:
            raise damaged(ProblemKind.MISSING, path, "the file is missing", operator, subtask) from error
        except StorageUnavailableError as error:
            raise of_operator(error, operator, subtask) from error
        size = len(data) if len(data) <= part.length else self._storage.execute(StatFile(path))
        check_part(part, (len(data) if size is None else size, checksum_of(data)), path, operator, subtask)
        return data

    def _read_piece(self, part: SegmentHandle, path: str, operator: str, subtask: int) -> bytes:
        problem, data = None, b""
        try:
            problem = run_flow(piece_problem(part, path, operator, subtask), self._storage)
            if problem is None:
                data = self._storage.execute(ReadFile(path, part.offset, part.length))
        except ObjectMissingError as error:
            raise damaged(ProblemKind.MISSING, path, "the file is missing", operator, subtask) from error
        except StorageUnavailableError as error:
            raise of_operator(error, operator, subtask) from error
        if problem is not None:
            raise damaged(problem.kind, path, problem.detail, operator, subtask)
        check_part(part, (len(data), checksum_of(data)), path, operator, subtask)
        return data

    def copy(self, part: FileHandle, *, operator: str, subtask: int, target: str | None = None) -> str:
        """Local path of a checked copy: `target`, or one of the reader's own. Raises CorruptStateError."""
        path = self._path_of(part.path, operator=operator)
        local = target or self.new_path("part")
        if isinstance(part, SegmentHandle):
            data = self._read_piece(part, path, operator, subtask)
            with scratch_errors(local), open(local, "xb") as file:
                file.write(data)
            return local
        try:
            size: int | None = self._storage.execute(StatFile(path))
            if size is not None and size != part.length:  # before it fills the disk
                check_part(part, (size, part.checksum), path, operator, subtask)
            found = self._storage.execute(DownloadFile(path, local))
        except ObjectMissingError as error:
            raise damaged(ProblemKind.MISSING, path, "the file is missing", operator, subtask) from error
        except StorageUnavailableError as error:
            raise of_operator(error, operator, subtask) from error
        check_part(part, found, path, operator, subtask)
        return local

    def clone(self, handle: KeyedStateHandle, *, operator: str, subtask: int) -> str:
        """Folder with a native handle's files under their own names, copied once. Raises CorruptStateError."""
        folder = self._clones.get(handle)
        if folder is None:
            folder = self.new_path("native")
            with scratch_errors(folder):
                os.mkdir(folder)
            for part, name in zip(handle.parts, handle.names, strict=True):
                local = os.path.join(folder, name)
                if isinstance(part, FileHandle):
                    self.copy(part, operator=operator, subtask=subtask, target=local)
                    continue
                data = self.read(part, operator=operator, subtask=subtask)
                with scratch_errors(local), open(local, "wb") as file:
                    file.write(data)
            self._clones[handle] = folder
        return folder

    def discard(self, local: str) -> None:
        """Delete one copy that `copy` made."""
        os.unlink(local)

    def new_path(self, kind: str) -> str:
        """A path in the scratch folder that nobody has used."""
        if self._scratch is None:
            with scratch_errors(tempfile.gettempdir()):
                self._scratch = tempfile.TemporaryDirectory(prefix="holdfast-snapshot-")
        self._count += 1
        return os.path.join(self._scratch.name, f"{kind}-{self._count}")


@contextmanager
def scratch_errors(path: str) -> Iterator[None]:
    """I/O errors of local scratch files as StorageUnavailableError."""
    try:
        yield
    except OSError as error:
        raise StorageUnavailableError(f"scratch space {path}: {error.strerror or error}", path=path) from error


def check_part(part: FileHandle, found: tuple[int, str], path: str, operator: str, subtask: int) -> None:
    """Raises CorruptStateError unless length and checksum are those of the handle."""
    if found[0] != part.length:
        raise damaged(ProblemKind.LENGTH, path, f"{found[0]} bytes instead of {part.length}", operator, subtask)
    if found[1] != part.checksum:
        raise damaged(ProblemKind.CHECKSUM, path, "the checksum does not match", operator, subtask)


def damaged(kind: ProblemKind, path: str, detail: str, operator: str, subtask: int) -> CorruptStateError:
    return CorruptStateError(
        f"operator {operator!r} subtask {subtask}: {path}: {detail}",
        path=path,
        operator=operator,
        subtask=subtask,
        reason=kind.value,
    )
