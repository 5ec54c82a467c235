"""Reader of a snapshot's parts, for tools.

A part is checked against length and checksum before it is opened: a small one is held in memory, a larger one is copied into a
scratch folder once, and the copy is opened. What is in a table is for snapshot/table_file.py, what a row must be for
snapshot/row_rules.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError, StorageUnavailableError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    PlaceholderHandle,
    SegmentHandle,
    StateHandle,
)
from holdfast.statebackends.snapshot.parts import damaged, download_file, length_problem, of_operator, read_file, unresolved
from holdfast.statebackends.state_processor.progress import note
from holdfast.statebackends.storage.failures import unavailable
from holdfast.statebackends.storage.port import Flow, InParallel, Storage, perform, run_flow

MEMORY_BYTES_MAX = 4 << 20
"""Bytes up to which a file is read into memory; a larger one is copied into the scratch folder."""

FETCH_BYTES_MAX, FETCH_PARTS_MAX = 32 << 20, 64
"""Bytes and number of one state's parts that are read at one time; a single part may have more bytes."""

P = TypeVar("P")


class PathOf(Protocol):
    """Storage path of a file that a handle names."""

    def __call__(self, path: str, *, operator: str) -> str:
        """Raises CorruptStateError if the snapshot may not name it."""


class PartReader:
    """Reader of one snapshot's parts, and a context manager that deletes its copies. For one thread."""

    def __init__(self, storage: Storage, path_of: PathOf) -> None:
        self._storage = storage
        self._path_of = path_of
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0
        self._clones: dict[KeyedStateHandle, str] = {}
        self._fetched: dict[FileHandle, bytes] = {}
        self._opened: dict[FileHandle, str] = {}

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.forget()

    def forget(self) -> None:
        """Delete all copies. Idempotent."""
        self._clones.clear()
        self._fetched.clear()
        self._opened.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def open(self, part: StateHandle, *, operator: str, subtask: int) -> pa.NativeFile:
        """A part as a file that can be read at any position. Raises CorruptStateError naming file, operator and subtask."""
        if isinstance(part, InlineHandle):
            return pa.BufferReader(pa.py_buffer(part.data))
        if isinstance(part, PlaceholderHandle):
            raise unresolved(part, operator)
        if _is_small(part):
            return pa.BufferReader(pa.py_buffer(self.read(part, operator=operator, subtask=subtask)))
        if part not in self._opened:
            self._opened[part] = self.copy(part, operator=operator, subtask=subtask)
        return pa.OSFile(self._opened[part])  # pages of a map would stay in memory, all of them

    def opened(self, part: FileHandle) -> str | None:
        """Local path of the checked copy of a part that was opened, until `forget`; None: it was not, or is in memory."""
        return self._opened.get(part)

    def read(self, part: StateHandle, *, operator: str, subtask: int) -> bytes:
        """All bytes of a part. Raises CorruptStateError."""
        if isinstance(part, InlineHandle):
            return part.data
        if isinstance(part, PlaceholderHandle):
            raise unresolved(part, operator)
        fetched = self._fetched.pop(part, None)
        return run_flow(self._read(part, operator, subtask), self._storage) if fetched is None else fetched

    def fetch(self, parts: Iterable[tuple[StateHandle, int]], *, operator: str) -> None:
        """Read small parts, each given with its subtask, at one time, for the next `read` or `open`. The caller bounds their bytes.

        Raises StorageUnavailableError. A damaged part raises when it is read or opened."""
        wanted = [(part, subtask) for part, subtask in parts if isinstance(part, FileHandle) and _is_small(part)]
        flows = [self._unless_damaged(part, operator, subtask) for part, subtask in wanted]
        read = perform(InParallel(flows, [max(part.length, 0) for part, _ in wanted]), self._storage)
        self._fetched.update((part, data) for (part, _), data in zip(wanted, read, strict=True) if data is not None)

    def _unless_damaged(self, part: FileHandle, operator: str, subtask: int) -> Flow[bytes | None]:
        try:
            return (yield from self._read(part, operator, subtask))
        except CorruptStateError:
            return None

    def _read(self, part: FileHandle, operator: str, subtask: int) -> Flow[bytes]:
        path = self._path_of(part.path, operator=operator)
        with _of_owner(operator, subtask):
            if isinstance(part, SegmentHandle):
                yield from _look(part, path, operator, subtask)
            data = yield from read_file(part, path, operator, subtask)
        note(size=part.length)
        return data

    def copy(self, part: FileHandle, *, operator: str, subtask: int, target: str | None = None) -> str:
        """Local path of a checked copy: `target` (on any thread), or a path in the scratch folder. Raises CorruptStateError."""
        local = target or self.new_path("part")
        run_flow(self._copy(part, operator, subtask, local), self._storage)
        return local

    def _copy(self, part: FileHandle, operator: str, subtask: int, local: str) -> Flow[None]:
        path = self._path_of(part.path, operator=operator)
        with _of_owner(operator, subtask), scratch_errors(local):
            yield from _look(part, path, operator, subtask)  # before a file of another length fills the disk
            yield from download_file(part, path, local, operator, subtask)
        note(size=part.length)

    def clone(self, handle: KeyedStateHandle, *, operator: str, subtask: int) -> str:
        """Folder with a native handle's files under their local names, copied once. Raises CorruptStateError."""
        folder = self._clones.get(handle)
        if folder is None:
            folder = self.new_path("native")
            with scratch_errors(folder):
                os.mkdir(folder)
            copies: list[tuple[FileHandle, str]] = []
            for part, name in zip(handle.parts, handle.names, strict=True):
                local = os.path.join(folder, name)
                if isinstance(part, FileHandle):
                    copies.append((part, local))
                    continue
                data = self.read(part, operator=operator, subtask=subtask)
                with scratch_errors(local), open(local, "wb") as file:
                    file.write(data)
            flows = [self._copy(part, operator, subtask, local) for part, local in copies]
            perform(InParallel(flows, [max(part.length, 0) for part, _ in copies]), self._storage)
            self._clones[handle] = folder
        return folder

    def discard(self, local: str) -> None:
        """Delete one copy that `copy` made."""
        os.unlink(local)

    def new_path(self, kind: str) -> str:
        """A new path in the scratch folder."""
        if self._scratch is None:
            with scratch_errors(tempfile.gettempdir()):
                self._scratch = tempfile.TemporaryDirectory(prefix="holdfast-snapshot-")
        self._count += 1
        return os.path.join(self._scratch.name, f"{kind}-{self._count}")


def fetch_windows(parts: Sequence[P], size: Callable[[P], int]) -> Iterator[Sequence[P]]:
    """The parts in windows to fetch at one time: one, two, four ..., so that a caller who stops early has read little in vain."""
    start, count = 0, 1
    while start < len(parts):
        stop, bytes_ = start + 1, size(parts[start])
        while stop < min(start + count, len(parts)) and bytes_ + size(parts[stop]) <= FETCH_BYTES_MAX:
            bytes_ += size(parts[stop])
            stop += 1
        yield parts[start:stop]
        start, count = stop, min(2 * count, FETCH_PARTS_MAX)


def _is_small(part: FileHandle) -> bool:
    return part.length <= MEMORY_BYTES_MAX or isinstance(part, SegmentHandle)


@contextmanager
def scratch_errors(path: str) -> Iterator[None]:
    """Report OSErrors within as StorageUnavailableError of the scratch file `path`."""
    try:
        yield
    except OSError as error:
        raise unavailable(error, f"scratch space {path}", path=path) from error


@contextmanager
def _of_owner(operator: str, subtask: int) -> Iterator[None]:
    """Errors of storage within name the operator and subtask."""
    try:
        yield
    except StorageUnavailableError as error:
        raise of_operator(error, operator, subtask) from error


def _look(part: FileHandle, path: str, operator: str, subtask: int) -> Flow[None]:
    """Raises CorruptStateError for a file that is missing, or has another length."""
    problem = yield from length_problem(part, path, operator, subtask)
    if problem is not None:
        raise damaged(problem.kind, path, problem.detail, operator, subtask)
