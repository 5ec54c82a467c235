"""The two storage ports of local recovery: one that also keeps here what is stored, one that asks the copies here first.

Storage stays the authority: a copy is used only if it has the length and the checksum that the snapshot says, and what is
missing or damaged here is read from storage as if there were no copies."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.statebackends.handles import FileHandle, OperatorSubtaskState, PlaceholderHandle, SegmentHandle
from holdfast.statebackends.layout import TABLE_SUFFIX, part_path
from holdfast.statebackends.local_recovery.copies import LocalCopies, bring, name_of
from holdfast.statebackends.snapshot.parts import file_handles, is_intact, mismatch
from holdfast.statebackends.storage.checksums import Digest
from holdfast.statebackends.storage.port import DownloadFile, Operation, ReadFile, Storage, UploadFile, WriteFile, transfers_of
from holdfast.statebackends.storage.transfers import TransferPool

log = logging.getLogger("holdfast.localrecovery")

_READ_BYTES = 1 << 20


@dataclass(slots=True)
class RestoredBytes:
    """Where the state of one subtask came from; bytes of whole files. Any thread may add."""

    local: int = 0
    remote: int = 0
    damaged: int = 0
    """Copies that had another length or checksum, or could not be read."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, local: int = 0, remote: int = 0, damaged: int = 0) -> None:
        with self._lock:
            self.local += local
            self.remote += remote
            self.damaged += damaged


class KeepingStorage:
    """Storage for the files of one checkpoint of one subtask: what is stored is kept here, too."""

    def __init__(self, storage: Storage, copies: LocalCopies, checkpoint_id: int) -> None:
        self._storage = storage
        self._copies = copies
        self._checkpoint_id = checkpoint_id

    def at(self, location: str) -> Storage:
        return self._storage.at(location)

    @property
    def root(self) -> str:
        return self._storage.root

    @property
    def transfers(self) -> TransferPool:
        return transfers_of(self._storage)

    def execute(self, operation: Operation) -> Any:
        result = self._storage.execute(operation)
        match operation:
            case UploadFile(local_path, path):
                self._copies.keep_file(self._checkpoint_id, path, local_path)
            case WriteFile(path, chunks):
                self._copies.keep_bytes(self._checkpoint_id, path, chunks)
        return result


class RecoveringStorage:
    """Storage for one restore of one subtask."""

    def __init__(
        self,
        storage: Storage,
        wanted: StoredFiles,
        restored: RestoredBytes,
        copies: LocalCopies | None = None,
        keep_for: int | None = None,
    ) -> None:
        """`wanted`: what the snapshot says of its files. `keep_for`: checkpoint whose files become the copies' own."""
        self._storage = storage
        self._wanted = wanted
        self._pieces: dict[str, list[SegmentHandle]] = {}
        for (path, _), handle in sorted(wanted.items()):
            if isinstance(handle, SegmentHandle):
                self._pieces.setdefault(path, []).append(handle)
        self._restored = restored
        self._copies = copies
        self._keep_for = keep_for
        self._found = {} if copies is None else copies.find()

    def at(self, location: str) -> Storage:
        return self._storage.at(location)

    @property
    def root(self) -> str:
        return self._storage.root

    @property
    def transfers(self) -> TransferPool:
        return transfers_of(self._storage)

    def execute(self, operation: Operation) -> Any:
        match operation:
            case DownloadFile(path) if (whole := self._whole(path)):
                return self._download(operation, whole)
            case ReadFile(path, 0, length) if (whole := self._whole(path)) and (length is None or length > whole.length):
                return self._read(operation, whole)
            case ReadFile(path, offset, length) if length is not None and (pieces := self._pieces_within(path, offset, length)):
                return self._read_pieces(operation, pieces)
        return self._storage.execute(operation)

    def _whole(self, path: str) -> FileHandle | None:
        found = self._wanted.get((path, 0))
        return None if isinstance(found, SegmentHandle) else found

    def _pieces_within(self, path: str, offset: int, length: int) -> list[SegmentHandle]:
        """Pieces of a file that a read from the first one's begin to the last one's end gets."""
        stop = offset + length
        pieces = [each for each in self._pieces.get(path, ()) if offset <= each.offset and each.offset + each.length <= stop]
        reaches = pieces and pieces[0].offset == offset and max(each.offset + each.length for each in pieces) == stop
        return pieces if reaches else []

    def _read_pieces(self, operation: ReadFile, pieces: Sequence[SegmentHandle]) -> bytes:
        """As `_read`; a file that is read from begin to end is kept."""
        found = self._from_copy(operation.path, lambda copy: _pieces_content(copy, pieces))
        data: bytes = found[1] if found is not None else self._storage.execute(operation)
        self._restored.add(**{"remote" if found is None else "local": len(data)})
        if self._copies is not None and self._keep_for is not None:
            if found is not None:
                self._copies.adopt(self._keep_for, operation.path, found[0])
            elif len(data) == pieces[0].file_length and _are_intact(data, operation.offset, pieces):
                self._copies.keep_bytes(self._keep_for, operation.path, [data])
        return data

    def _download(self, operation: DownloadFile, handle: FileHandle) -> tuple[int, str]:
        result = (handle.length, handle.checksum)
        if self._from_copy(operation.path, lambda copy: _place(copy, operation.local_path, handle)) is not None:
            self._restored.add(local=handle.length)
        else:
            result = self._storage.execute(operation)
            self._restored.add(remote=result[0])
        if mismatch(handle, *result) is None and self._copies is not None and self._keep_for is not None:
            self._copies.keep_file(self._keep_for, operation.path, operation.local_path)
        return result

    def _read(self, operation: ReadFile, handle: FileHandle) -> bytes:
        found = self._from_copy(operation.path, lambda copy: _content(copy, handle))
        if found is not None:
            copy, content = found
            self._restored.add(local=len(content))
            if self._copies is not None and self._keep_for is not None:
                self._copies.adopt(self._keep_for, operation.path, copy)
            return content
        data: bytes = self._storage.execute(operation)
        self._restored.add(remote=len(data))
        if self._copies is not None and self._keep_for is not None and is_intact(handle, data):
            self._copies.keep_bytes(self._keep_for, operation.path, [data])
        return data

    def _from_copy(self, path: str, take: Callable[[str], bytes | None]) -> tuple[str, bytes] | None:
        """The first good copy, and what it gives; None if there is none."""
        for copy in self._found.get(name_of(path), ()):
            try:
                taken = take(copy)
            except FileNotFoundError:
                continue  # its owner gave it up meanwhile
            except OSError as error:
                self._damaged(path, copy, str(error))
                continue
            if taken is not None:
                return copy, taken
            self._damaged(path, copy, "length or checksum differ")
        return None

    def _damaged(self, path: str, copy: str, reason: str) -> None:
        self._restored.add(damaged=1)
        log.warning("%s, the copy of %s on this host, is not used: %s", copy, path, reason)


def _place(copy: str, local_path: str, handle: FileHandle) -> bytes | None:
    """Bring a copy to `local_path` and check it there; nothing is left there if it isn't the stored file."""
    if os.path.getsize(copy) != handle.length:
        return None
    with contextlib.suppress(FileNotFoundError):
        os.unlink(local_path)
    try:
        bring(copy, local_path, link=local_path.endswith(TABLE_SUFFIX))
        if mismatch(handle, *_checksum(local_path)) is None:
            return b""
    except BaseException:
        _discard(local_path)
        raise
    _discard(local_path)
    return None


def _discard(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _pieces_content(copy: str, pieces: Sequence[SegmentHandle]) -> bytes | None:
    """From the first piece's begin to the last one's end."""
    start, stop = pieces[0].offset, max(piece.offset + piece.length for piece in pieces)
    if os.path.getsize(copy) != pieces[0].file_length or start < 0:
        return None
    with open(copy, "rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    return data if _are_intact(data, start, pieces) else None


def _are_intact(data: bytes, start: int, pieces: Sequence[SegmentHandle]) -> bool:
    """Whether bytes of a file from `start` on hold all these pieces of it."""
    found = [data[piece.offset - start : piece.offset - start + piece.length] for piece in pieces]
    return all(is_intact(piece, each) for piece, each in zip(pieces, found, strict=True))


def _content(copy: str, handle: FileHandle) -> bytes | None:
    if os.path.getsize(copy) != handle.length:
        return None
    with open(copy, "rb") as file:
        data = file.read()
    return data if is_intact(handle, data) else None


def _checksum(path: str) -> tuple[int, str]:
    digest = Digest()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.add(chunk)
    return digest.length, digest.checksum


# ------------------------------------------------------------------------------------------------------------------ names


StoredFiles: TypeAlias = dict[tuple[str, int], FileHandle]
"""(stored path, offset in the file) -> what a snapshot says of it."""


def stored_files(state: OperatorSubtaskState, folder: str, operator: str) -> StoredFiles:
    """Every file of an operator's state, and every piece of one. Raises CorruptStateError for a path that leads elsewhere."""
    return {(part_path(folder, handle.path, operator=operator), handle.offset): handle for handle in file_handles(state)}


def held_paths(states: Iterable[OperatorSubtaskState], folder: str) -> set[str]:
    """Stored paths of an acknowledged state, those that its base has included."""
    parts = (handle for state in states for handle in _parts(state))
    return {part_path(folder, handle.path) for handle in parts if isinstance(handle, FileHandle | PlaceholderHandle)}


def _parts(state: OperatorSubtaskState) -> Iterable[Any]:
    for keyed in state.keyed:
        yield from keyed.parts
    for listed in state.operator:
        yield listed.part
