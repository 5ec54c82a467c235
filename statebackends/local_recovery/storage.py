"""Storage ports of local recovery: KeepingStorage also keeps local copies of stored files, RecoveringStorage reads copies first.

Checkpoint storage stays the authority: a copy is used only if it has the length and checksum of the snapshot's handle, and a
missing or damaged one is read from storage. Where copies lie, and how long, is for copies.py."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.statebackends.handles import ChannelState, FileHandle, OperatorSubtaskState, PlaceholderHandle, SegmentHandle
from holdfast.statebackends.layout import TABLE_SUFFIX, part_path
from holdfast.statebackends.local_recovery.copies import LocalCopies, bring, name_of
from holdfast.statebackends.snapshot.parts import file_handles, is_intact, mismatch
from holdfast.statebackends.storage.checksums import Digest
from holdfast.statebackends.storage.port import (
    DelegatingStorage,
    DownloadFile,
    Operation,
    ReadFile,
    Storage,
    UploadFile,
    WriteFile,
    transfers_of,
)
from holdfast.statebackends.storage.transfers import TransferPool

log = logging.getLogger("holdfast.localrecovery")

_READ_BYTES = 1 << 20


@dataclass(slots=True)
class RestoredBytes:
    """Bytes that one restore of a subtask read. Thread-safe."""

    local: int = 0
    """From copies on this host, or not read, since this process had it in memory."""
    remote: int = 0
    """From checkpoint storage."""
    damaged: int = 0
    """Number of copies with another length or checksum, or that could not be read."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, *, local: int = 0, remote: int = 0, damaged: int = 0) -> None:
        with self._lock:
            self.local += local
            self.remote += remote
            self.damaged += damaged


class KeepingStorage(DelegatingStorage):
    """Storage for one checkpoint of one subtask, which keeps a local copy of each file it stores."""

    def __init__(self, storage: Storage, copies: LocalCopies, checkpoint_id: int) -> None:
        super().__init__(storage)
        self._copies = copies
        self._checkpoint_id = checkpoint_id

    @property
    def transfers(self) -> TransferPool:
        return transfers_of(self._storage)

    def execute(self, operation: Operation) -> Any:
        result = super().execute(operation)
        match operation:
            case UploadFile(local_path, path):
                self._copies.keep_file(self._checkpoint_id, path, local_path)
            case WriteFile(path, chunks):
                self._copies.keep_bytes(self._checkpoint_id, path, chunks)
        return result


class RecoveringStorage(DelegatingStorage):
    """Storage for one restore of one subtask, which reads files from local copies where it can."""

    def __init__(
        self,
        storage: Storage,
        wanted: StoredFiles,
        restored: RestoredBytes,
        copies: LocalCopies | None = None,
        keep_for: int | None = None,
    ) -> None:
        """`wanted`: handles of the snapshot's files. `keep_for`: the restored checkpoint, whose files `copies` keeps, if given."""
        super().__init__(storage)
        self._wanted = wanted
        self._segments: dict[str, list[SegmentHandle]] = {}
        for (path, _), handle in sorted(wanted.items()):
            if isinstance(handle, SegmentHandle):
                self._segments.setdefault(path, []).append(handle)
        self._restored = restored
        self._copies = copies
        self._keep_for = keep_for
        self._found = {} if copies is None else copies.find()

    @property
    def transfers(self) -> TransferPool:
        return transfers_of(self._storage)

    def execute(self, operation: Operation) -> Any:
        match operation:
            case DownloadFile(path) if (whole := self._whole(path)):
                return self._download(operation, whole)
            case ReadFile(path, 0, length) if (whole := self._whole(path)) and (length is None or length > whole.length):
                return self._read(operation, whole)
            case ReadFile(path, offset, length) if length is not None and (segments := self._segments_within(path, offset, length)):
                return self._read_segments(operation, segments)
        return super().execute(operation)

    def _whole(self, path: str) -> FileHandle | None:
        found = self._wanted.get((path, 0))
        return None if isinstance(found, SegmentHandle) else found

    def _segments_within(self, path: str, offset: int, length: int) -> list[SegmentHandle]:
        """Segments of a file within [offset, offset + length), if they reach from its start to its end; else none."""
        stop = offset + length
        segments = [each for each in self._segments.get(path, ()) if offset <= each.offset and each.offset + each.length <= stop]
        reaches = segments and segments[0].offset == offset and max(each.offset + each.length for each in segments) == stop
        return segments if reaches else []

    def _read_segments(self, operation: ReadFile, segments: Sequence[SegmentHandle]) -> bytes:
        """`_read` of several segments; the file is kept if all of it was read."""
        found = self._from_copy(operation.path, lambda copy: _segments_content(copy, segments))
        data: bytes = found[1] if found is not None else self._storage.execute(operation)
        self._restored.add(**{"remote" if found is None else "local": len(data)})
        if self._copies is not None and self._keep_for is not None:
            if found is not None:
                self._copies.adopt(self._keep_for, operation.path, found[0])
            elif len(data) == segments[0].file_length and _are_intact(data, operation.offset, segments):
                self._copies.keep_bytes(self._keep_for, operation.path, [data])
        return data

    def _download(self, operation: DownloadFile, handle: FileHandle) -> tuple[int, str]:
        result = (handle.length, handle.checksum)
        if self._from_copy(operation.path, lambda copy: _place(copy, operation.local_path, handle)) is not None:
            self._restored.add(local=handle.length)
        else:
            result = super().execute(operation)
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
        """(first intact copy, what `take` gives for it); None if there is none."""
        for copy in self._found.get(name_of(path), ()):
            try:
                taken = take(copy)
            except FileNotFoundError:
                continue  # its owner deleted it meanwhile
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
    """Bring a copy to `local_path` and check it there. None, and no file there, if it isn't the stored file."""
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


def _segments_content(copy: str, segments: Sequence[SegmentHandle]) -> bytes | None:
    """Bytes from the first segment's start to the last one's end; None if a segment is not intact."""
    start, stop = segments[0].offset, max(segment.offset + segment.length for segment in segments)
    if os.path.getsize(copy) != segments[0].file_length or start < 0:
        return None
    with open(copy, "rb") as file:
        file.seek(start)
        data = file.read(stop - start)
    return data if _are_intact(data, start, segments) else None


def _are_intact(data: bytes, start: int, segments: Sequence[SegmentHandle]) -> bool:
    """Whether bytes of a file from `start` on hold these segments of it, intact."""
    found = [data[segment.offset - start : segment.offset - start + segment.length] for segment in segments]
    return all(is_intact(segment, each) for segment, each in zip(segments, found, strict=True))


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
"""(stored path, offset in the file) -> the snapshot's handle."""


def stored_files(state: OperatorSubtaskState, folder: str, operator: str) -> StoredFiles:
    """Files and segments of an operator's state. Raises CorruptStateError for a path that leaves the snapshot."""
    return {(part_path(folder, handle.path, operator=operator), handle.offset): handle for handle in file_handles(state)}


def held_paths(states: Iterable[OperatorSubtaskState], folder: str, channels: Iterable[ChannelState] = ()) -> set[str]:
    """Stored paths of the files of acknowledged state and in-flight data, including those that its base stored."""
    parts = [handle for state in states for handle in _parts(state)]
    parts += [channel.part for channel in channels]
    return {part_path(folder, handle.path) for handle in parts if isinstance(handle, FileHandle | PlaceholderHandle)}


def _parts(state: OperatorSubtaskState) -> Iterable[Any]:
    for keyed in state.keyed:
        yield from keyed.parts
    for listed in state.operator:
        yield listed.part
