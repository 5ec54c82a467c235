"""Parts of a snapshot: written, read, checked and verified by flows over storage operations.

A part is inline, a file, or a segment of a file that several parts share. Small tables share files, since on an object store each
file costs a request, whatever its size. Files of a database don't: they come and go one by one, and local copies of them are links.
A part gets its name and handle when the parts collected so far are stored. A name is written once; files of a failed snapshot are
left to the coordinator.

All bytes read are checked against their handle here, by `check`: restores, local recovery and the tools call it. The content of a
part is for the backends and tables.py."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TypeAlias, TypeVar

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.errors import CorruptStateError, InvariantError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.handles import (
    DELTA_FORMATS,
    SEGMENT_BYTES_MAX,
    TABLE_FORMATS,
    FileHandle,
    InlineHandle,
    OperatorSubtaskState,
    PlaceholderHandle,
    SegmentHandle,
    StateHandle,
)
from holdfast.statebackends.layout import (
    METADATA_NAME,
    PATH_REASON,
    file_name,
    is_checkpoint_folder,
    metadata_path,
    part_path,
    shared_name,
    shared_path,
)
from holdfast.statebackends.snapshot.in_flight import storing_uid
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata, promised_length
from holdfast.statebackends.storage.checksums import Digest, checksum_of
from holdfast.statebackends.storage.flows import FIRST_BYTES
from holdfast.statebackends.storage.port import (
    LINKED,
    Buffer,
    DownloadFile,
    Flow,
    InParallel,
    ReadFile,
    StatFile,
    UploadFile,
    WriteFile,
)

VERIFY_BYTES = 2 << 20
"""Bytes read at a time of a file that is verified; several files are read at one time."""
FILES_AT_ONCE = 64
"""Files verified in one group; their problems are reported after each group."""
SPARE_MAX = 2
"""A read of several segments has at most so many times their bytes."""
HELD_BYTES_MAX = 16 << 20
"""Bytes of encoded parts above which they are stored."""
PACK_BYTES_MAX = 8 << 20
"""Bytes of one file with several parts: one request on S3."""
LINK_DETAIL = "a symbolic link, or in one: a savepoint's files are its own"
_ENDS_BYTES = 6
_NAMES = {**dict.fromkeys(("arrow", *DELTA_FORMATS), "an Arrow IPC file"), "parquet": "a Parquet file"}
_MARKS = {**dict.fromkeys(("arrow", *DELTA_FORMATS), b"ARROW1"), "parquet": b"PAR1"}
"""Format -> magic bytes at both ends of a table. Native files have none."""

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------------------- problems


class ProblemKind(StrEnum):
    """What is wrong with a file of a snapshot."""

    MISSING = "missing"
    LENGTH = "length"
    CHECKSUM = "checksum"
    PATH = PATH_REASON
    FORMAT = "format"
    """A table is not in the format of its handle."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class SnapshotProblem:
    """One file on which a restore would fail."""

    kind: ProblemKind
    operator: str
    """Uid; empty for a file of the snapshot as a whole."""
    subtask: int
    """-1 for a file of the snapshot as a whole."""
    path: str
    detail: str

    def __str__(self) -> str:
        owner = f"operator {self.operator!r} subtask {self.subtask}: " if self.operator else ""
        return f"{owner}{self.path}: {self.detail}"

    def error(self) -> CorruptStateError:
        return CorruptStateError(str(self), path=self.path, operator=self.operator or None, reason=self.kind.value)


def damaged(kind: ProblemKind, path: str, detail: str, operator: str | None, subtask: int | None = None) -> CorruptStateError:
    """The error for a part that does not match its handle."""
    if subtask is None:
        owner = f"operator {operator!r}: " if operator else ""
        return CorruptStateError(f"{owner}{path}: {detail}", path=path, operator=operator, reason=kind.value)
    message = f"operator {operator!r} subtask {subtask}: {path}: {detail}"
    return CorruptStateError(message, path=path, operator=operator, subtask=subtask, reason=kind.value)


def missing(path: str, operator: str | None, subtask: int | None = None) -> CorruptStateError:
    """The error for a missing file."""
    return damaged(ProblemKind.MISSING, path, "the file is missing", operator, subtask)


def unresolved(handle: PlaceholderHandle, operator: str | None) -> CorruptStateError:
    """The error for a placeholder in a snapshot, which says nothing about its bytes."""
    return damaged(ProblemKind.PATH, handle.path, "a placeholder that was never resolved", operator)


def of_operator(error: StorageUnavailableError, operator: str, subtask: int) -> StorageUnavailableError:
    """The same error, naming the operator and subtask whose file could not be read."""
    fields = {**error.fields, "operator": operator, "subtask": subtask}
    return type(error).of(f"operator {operator!r} subtask {subtask}: {error.message}", fields)


def outside_detail(handle: SegmentHandle) -> str:
    """What is wrong with a segment that is not `is_inside` its file."""
    if SEGMENT_BYTES_MAX < handle.length <= handle.file_length:
        return f"a segment of {handle.length} bytes; none has more than {SEGMENT_BYTES_MAX}"
    return f"a segment of {handle.length} bytes at {handle.offset} is not in a file of {handle.file_length}"


def _length_detail(found: int, expected: int) -> str:
    return f"{found} bytes instead of {expected}"


# ---------------------------------------------------------------------------------------------------------------------- names


def own_names(joined: str, path: str) -> int:
    """How many names at the end of a part's `path` (`joined` in its storage) belong to the snapshot and must be no symbolic links.

    A savepoint's folder may be a link. In it there must be none: its target would not move with the savepoint, and might change.
    0 for files in a job's directory, which the coordinator owns."""
    names = posixpath.normpath(path).split("/")
    folder = "/".join(joined.split("/")[: -len(names)])
    return 0 if names[0] == ".." or is_checkpoint_folder(folder) else len(names)


# -------------------------------------------------------------------------------------------------------------------- reading


def mismatch(part: FileHandle, length: int, checksum: str) -> tuple[ProblemKind, str] | None:
    """How bytes of this length and checksum differ from a part's: the kind and a sentence; None if they don't."""
    if length != part.length:
        return ProblemKind.LENGTH, _length_detail(length, part.length)
    if checksum != part.checksum:
        return ProblemKind.CHECKSUM, "the checksum does not match"
    return None


def is_intact(part: FileHandle, data: Buffer) -> bool:
    """Whether these are the bytes of a part."""
    return mismatch(part, len(data), checksum_of(data)) is None


def check(part: FileHandle, found: tuple[int, str], path: str, operator: str | None, subtask: int | None = None) -> None:
    """Raises CorruptStateError unless (length, checksum) of what was read from `path` are the part's."""
    wrong = mismatch(part, *found)
    if wrong is not None:
        raise damaged(wrong[0], path, wrong[1], operator, subtask)


def read_part(handle: StateHandle, folder: str, *, operator: str | None = None) -> Flow[bytes]:
    """The bytes of one part, checked. Raises CorruptStateError naming file and operator."""
    if isinstance(handle, InlineHandle):
        return handle.data
    path = part_path(folder, handle.path, operator=operator)
    if isinstance(handle, PlaceholderHandle):
        raise unresolved(handle, operator)
    return (yield from read_file(handle, path, operator))


def read_file(part: FileHandle, path: str, operator: str | None, subtask: int | None = None) -> Flow[bytes]:
    """The bytes of a file or segment at the storage path `path`, checked. Raises CorruptStateError naming file and owner."""
    spare = 1  # one byte too many shows that a file is too long, however long it is
    if isinstance(part, SegmentHandle):
        spare = 0  # the file may go on behind a segment
        if not part.is_inside:
            raise damaged(ProblemKind.LENGTH, path, outside_detail(part), operator, subtask)
    try:
        data: bytes = yield ReadFile(path, part.offset, max(part.length, 0) + spare)
        length: int | None = len(data)
        if len(data) > part.length:
            length = yield StatFile(path)
    except ObjectMissingError as error:
        raise missing(path, operator, subtask) from error
    check(part, (len(data) if length is None else length, checksum_of(data)), path, operator, subtask)
    return data


def download_part(handle: StateHandle, folder: str, local_path: str, *, operator: str | None = None) -> Flow[None]:
    """One part as a local file, which must not exist; checked. Raises CorruptStateError naming file and operator, and OSError."""
    if isinstance(handle, InlineHandle):
        with open(local_path, "xb") as file:
            file.write(handle.data)
        return
    path = part_path(folder, handle.path, operator=operator)
    if isinstance(handle, PlaceholderHandle):
        raise unresolved(handle, operator)
    yield from download_file(handle, path, local_path, operator)


def download_file(
    part: FileHandle, path: str, local_path: str, operator: str | None, subtask: int | None = None
) -> Flow[None]:
    """As `read_file`, into a local file, which must not exist. Also raises OSError."""
    if isinstance(part, SegmentHandle):
        data = yield from read_file(part, path, operator, subtask)
        with open(local_path, "xb") as file:
            file.write(data)
        return
    try:
        found: tuple[int, str] = yield DownloadFile(path, local_path)
    except ObjectMissingError as error:
        raise missing(path, operator, subtask) from error
    check(part, found, path, operator, subtask)


def read_parts(parts: Sequence[StateHandle], folder: str, *, operator: str | None = None) -> Flow[list[bytes]]:
    """The bytes of parts, in their order, each checked. Raises CorruptStateError naming file and operator."""
    spans = list(_spans(parts))
    flows = [_read_span([parts[index] for index in span], folder, operator) for span in spans]
    read = yield InParallel(flows, [sum(parts[index].length for index in span) for span in spans])
    found: dict[int, bytes] = {}
    for span, contents in zip(spans, read, strict=True):
        found.update(zip(span, contents, strict=True))
    return [found[index] for index in range(len(parts))]


def _spans(parts: Sequence[StateHandle]) -> Iterator[list[int]]:
    """Positions of parts for one read each: the segments of one file in order, unless they lie far apart, or one other part."""
    segments: dict[str, list[tuple[int, int, int]]] = {}
    for index, part in enumerate(parts):
        if isinstance(part, SegmentHandle) and part.is_inside:
            segments.setdefault(part.path, []).append((part.offset, part.length, index))
        else:
            yield [index]
    for places in segments.values():
        places.sort()
        start, stop = places[0][0], max(offset + length for offset, length, _ in places)
        if stop - start <= SPARE_MAX * sum(length for _, length, _ in places):
            yield [index for *_, index in places]
        else:
            yield from ([index] for *_, index in places)


def _read_span(parts: Sequence[StateHandle], folder: str, operator: str | None) -> Flow[list[bytes]]:
    if len(parts) == 1:
        return [(yield from read_part(parts[0], folder, operator=operator))]
    segments = [part for part in parts if isinstance(part, SegmentHandle)]  # all of them: see _spans
    path = part_path(folder, segments[0].path, operator=operator)
    start, stop = segments[0].offset, max(segment.offset + segment.length for segment in segments)
    try:
        data: bytes = yield ReadFile(path, start, stop - start)
    except ObjectMissingError as error:
        raise missing(path, operator) from error
    read = [data[segment.offset - start : segment.offset - start + segment.length] for segment in segments]
    for segment, content in zip(segments, read, strict=True):
        check(segment, (len(content), checksum_of(content)), path, operator)
    return read


def read_metadata(folder: str) -> Flow[SnapshotMetadata]:
    """The snapshot in a folder. Raises CorruptStateError, UnsupportedVersionError; ObjectMissingError if there is none."""
    path = metadata_path(folder) if folder else METADATA_NAME
    return decode_metadata((yield from read_metadata_file(path)), path)


def read_metadata_file(path: str) -> Flow[bytes]:
    """The bytes of an untrusted `_metadata`: at most as many as its header promises, and one more.

    Raises ObjectMissingError."""
    head: bytes = yield ReadFile(path, 0, FIRST_BYTES)
    wanted = promised_length(head) + 1
    if len(head) < FIRST_BYTES or wanted <= FIRST_BYTES:
        return head[:wanted]
    rest: bytes = yield ReadFile(path, FIRST_BYTES, wanted - FIRST_BYTES)
    return head + rest


# ------------------------------------------------------------------------------------------------------------------ verifying


Look: TypeAlias = Callable[[FileHandle, str, int, str], Flow[SnapshotProblem | None]]
"""(handle, operator, subtask, table format) -> what is wrong with the file; None: nothing."""


def verify_snapshot(
    metadata: SnapshotMetadata,
    folder: str,
    *,
    checksums: bool = True,
    look: Look | None = None,
    found: Callable[[SnapshotProblem], None] | None = None,
) -> Flow[list[SnapshotProblem]]:
    """Problems of all files of a snapshot: missing, of another length, checksum or table format. External files are not checked.

    checksums=False compares lengths only, and reads no data. `look` checks one file (default: `verify_file`); `found` is called
    with each problem in the order of the files, after each FILES_AT_ONCE of them. Each file is read once, VERIFY_BYTES at a time.
    Raises StorageUnavailableError."""
    is_own = metadata.kind != "checkpoint"

    def outcome(handle: FileHandle, operator: str, subtask: int, table_format: str) -> Flow[SnapshotProblem | None]:
        if is_own and shared_name(handle.path) is not None:
            return SnapshotProblem(ProblemKind.PATH, operator, subtask, handle.path, "leaves the folder of the savepoint")
        if look is not None:
            return (yield from look(handle, operator, subtask, table_format))
        return (yield from verify_file(handle, folder, operator, subtask, table_format, checksums=checksums))

    problems: list[SnapshotProblem] = []
    files = list(named_files(metadata))
    for batch in [files] if found is None else batches(files):
        sizes = [min(max(handle.length, 0), VERIFY_BYTES) if checksums else 0 for handle, *_ in batch]
        for problem in (yield InParallel([outcome(*each) for each in batch], sizes)):
            if problem is not None:
                problems.append(problem)
                if found is not None:
                    found(problem)
    return problems


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items in batches of FILES_AT_ONCE."""
    return (items[start : start + FILES_AT_ONCE] for start in range(0, len(items), FILES_AT_ONCE))


def named_files(metadata: SnapshotMetadata) -> Iterator[tuple[FileHandle, str, int, str]]:
    """Each file or segment of a snapshot, once for each table format that handles give it: (handle, uid of the first operator that
    names it, its subtask, format as in `formatted_files`)."""
    seen: set[tuple[FileHandle, str]] = set()
    for operator in metadata.operators:
        for subtask, state in enumerate(operator.subtasks):
            for handle, table_format in formatted_files(state):
                if (handle, table_format) not in seen:
                    seen.add((handle, table_format))
                    yield handle, operator.uid, subtask, table_format
    for handle, uid, subtask in _in_flight_files(metadata):
        if (handle, "") not in seen:
            seen.add((handle, ""))
            yield handle, uid, subtask, ""


def snapshot_files(metadata: SnapshotMetadata) -> Iterator[tuple[FileHandle, str, int]]:
    """Files and segments of a snapshot, state and in-flight data, as often as they are named: (handle, uid of the operator that
    names it, its subtask)."""
    for operator in metadata.operators:
        for subtask, state in enumerate(operator.subtasks):
            yield from ((handle, operator.uid, subtask) for handle in file_handles(state))
    yield from _in_flight_files(metadata)


def _in_flight_files(metadata: SnapshotMetadata) -> Iterator[tuple[FileHandle, str, int]]:
    for channel in metadata.in_flight:
        if isinstance(channel.part, FileHandle):
            yield channel.part, storing_uid(channel), channel.subtask


def file_handles(state: OperatorSubtaskState) -> Iterator[FileHandle]:
    """Files and segments of one subtask's state, without inline parts."""
    return (handle for handle, _ in formatted_files(state))


def formatted_files(state: OperatorSubtaskState) -> Iterator[tuple[FileHandle, str]]:
    """As `file_handles`, each with the format of the table in it; "" for a file without a table."""
    for keyed in state.keyed:
        table_format = keyed.format if keyed.format in (*TABLE_FORMATS, *DELTA_FORMATS) else ""
        for part in keyed.parts:
            if isinstance(part, FileHandle):
                yield part, table_format
    for listed in state.operator:
        if isinstance(listed.part, FileHandle):
            yield listed.part, ""


def verify_file(
    handle: FileHandle, folder: str, operator: str, subtask: int, table_format: str = "", *, checksums: bool = True
) -> Flow[SnapshotProblem | None]:
    """What is wrong with one file of a subtask; None if nothing is. Raises StorageUnavailableError naming the operator."""
    try:
        return (yield from file_problem(handle, folder, operator, subtask, table_format, checksums=checksums))
    except StorageUnavailableError as error:
        raise of_operator(error, operator, subtask) from error


def file_problem(
    handle: FileHandle, folder: str, operator: str, subtask: int, table_format: str = "", *, checksums: bool = True
) -> Flow[SnapshotProblem | None]:
    """As `verify_file`; raises StorageUnavailableError as storage does."""
    try:
        path = part_path(folder, handle.path)
    except CorruptStateError as error:
        return SnapshotProblem(ProblemKind.PATH, operator, subtask, handle.path, str(error))
    problem = yield from length_problem(handle, path, operator, subtask)
    if problem is not None:
        return problem
    if not checksums:
        return None
    ends = FileEnds()
    if (yield from _checksum(path, handle.offset, handle.length, ends)) != handle.checksum:
        return SnapshotProblem(ProblemKind.CHECKSUM, operator, subtask, path, "the checksum does not match")
    if detail := wrong_format(table_format, ends):
        return SnapshotProblem(ProblemKind.FORMAT, operator, subtask, path, detail)
    return None


def length_problem(handle: FileHandle, path: str, operator: str, subtask: int) -> Flow[SnapshotProblem | None]:
    """What is wrong with a file as far as its name and length say; None if nothing is."""
    size: int | None = yield StatFile(path, own_names(path, handle.path))
    if size is None:
        return SnapshotProblem(ProblemKind.MISSING, operator, subtask, path, "the file is missing")
    if size == LINKED:
        return SnapshotProblem(ProblemKind.PATH, operator, subtask, path, LINK_DETAIL)
    if size != handle.file_length:
        return SnapshotProblem(ProblemKind.LENGTH, operator, subtask, path, _length_detail(size, handle.file_length))
    if isinstance(handle, SegmentHandle) and not handle.is_inside:
        return SnapshotProblem(ProblemKind.LENGTH, operator, subtask, path, outside_detail(handle))
    return None


def _checksum(path: str, start: int, length: int, ends: FileEnds) -> Flow[str | None]:
    """Checksum of a range of a file, whose first and last bytes go to `ends`; None if the file vanished meanwhile."""
    digest = Digest()
    for offset in range(start, start + length, VERIFY_BYTES):
        try:
            block: bytes = yield ReadFile(path, offset, min(VERIFY_BYTES, start + length - offset))
        except ObjectMissingError:
            return None
        digest.add(block)
        ends.add(block)
    return digest.checksum


class FileEnds:
    """The first and last bytes of a file whose blocks are added in order."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first = self.last = b""

    def add(self, block: Buffer) -> None:
        view = memoryview(block).cast("B")
        self.first += bytes(view[: _ENDS_BYTES - len(self.first)])
        self.last = (self.last + bytes(view[-_ENDS_BYTES:]))[-_ENDS_BYTES:]


def wrong_format(table_format: str, ends: FileEnds) -> str:
    """Why a file with these ends is not a table in `table_format`, that of its handle; "" if it may be one."""
    marked = [known for known, mark in _MARKS.items() if ends.first.startswith(mark) and ends.last.endswith(mark)]
    if table_format not in _MARKS or table_format in marked:
        return ""
    found = _NAMES[marked[0]] if marked else "neither an Arrow nor a Parquet file"
    return f"{found}, which a table in the format {table_format!r} is not"


# -------------------------------------------------------------------------------------------------------------------- writing


class PartsWriter:
    """Writer of the parts of one operator's subtask at one barrier. Their names must differ; they are escaped for paths.

    Of the writers of one target each that merges parts into files has names of its own for these."""

    def __init__(self, target: SnapshotTarget, *, pack_name: str = "pack") -> None:
        """`pack_name`: how the names of merged files begin."""
        self._target = target
        self._pack_name = pack_name
        self._waiting: list[_Waiting] = []
        self._held_bytes = 0
        self._packs = 0

    def add(
        self, data: Buffer, name: str, *, is_shared: bool = False, packs: bool = True, inline_threshold: int | None = None
    ) -> WrittenPart:
        """Add a part of bytes: inline below the threshold (default: the target's), else a file, which later checkpoints may share
        with `is_shared`. With `packs` it may be a segment of a file. It is stored by the next `store`."""
        return self.add_pieces([data], name, is_shared=is_shared, packs=packs, inline_threshold=inline_threshold)

    def add_pieces(
        self,
        pieces: Sequence[Buffer],
        name: str,
        *,
        is_shared: bool = False,
        packs: bool = True,
        inline_threshold: int | None = None,
    ) -> WrittenPart:
        """As `add`, of bytes one piece behind the other, none of which may change until they are stored."""
        length = size_of(pieces)
        if length < (self._target.inline_threshold if inline_threshold is None else inline_threshold):
            return WrittenPart(InlineHandle(b"".join(pieces)))
        self._held_bytes += length
        packs = packs and length < self._target.pack_threshold
        self._waiting.append(_Waiting(WrittenPart(), name, is_shared, packs, length, pieces))
        return self._waiting[-1].part

    def add_file(self, local_path: str, name: str, *, is_shared: bool = False) -> WrittenPart:
        """As `add`, from a local file, which must not change until it is stored; never a segment. Raises OSError."""
        length = os.path.getsize(local_path)
        if length < self._target.inline_threshold:
            with open(local_path, "rb") as file:
                return WrittenPart(InlineHandle(file.read()))
        self._waiting.append(_Waiting(WrittenPart(), name, is_shared, False, length, (), local_path))
        return self._waiting[-1].part

    @property
    def is_full(self) -> bool:
        """Whether the waiting parts should be stored before more are encoded."""
        return self._held_bytes > HELD_BYTES_MAX

    def store(self) -> Flow[None]:
        """Make all parts added so far durable, and set their handles."""
        waiting, self._waiting, self._held_bytes = self._waiting, [], 0
        if not waiting:
            return
        files = list(_files(waiting))
        flows = [self._flow(file) for file in files]
        stored = yield InParallel(flows, [sum(each.length for each in file) for file in files])
        for file, handles in zip(files, stored, strict=True):
            for each, handle in zip(file, handles, strict=True):
                each.part._handle = handle

    def _flow(self, file: list[_Waiting]) -> Flow[list[FileHandle]]:
        first = file[0]
        if len(file) == 1:
            path = self._path(first.name, is_shared=first.is_shared)
            return _upload(first.local_path, path, self._target) if first.local_path else _write(first.pieces, path, self._target)
        self._packs += 1
        path = self._path(f"{self._pack_name}-{self._packs}", is_shared=first.is_shared)
        return _write_pack([each.pieces for each in file], path, self._target)

    def _path(self, name: str, *, is_shared: bool) -> str:
        target = self._target
        return shared_path(f"{target.shared_prefix}-{file_name(name)}") if is_shared else f"{target.file_prefix}-{file_name(name)}"


def write_part(data: Buffer, name: str, target: SnapshotTarget) -> Flow[StateHandle]:
    """Write one part that shares no file with others (`PartsWriter.add`). It is durable when the flow ends."""
    writer = PartsWriter(target)
    part = writer.add(data, name, packs=False)
    yield from writer.store()
    return part.handle


@dataclass(eq=False, slots=True)
class WrittenPart:
    """A part that was added to a PartsWriter."""

    _handle: StateHandle | None = None

    @property
    def is_inline(self) -> bool:
        return isinstance(self._handle, InlineHandle)

    @property
    def handle(self) -> StateHandle:
        """Raises InvariantError before the part is stored."""
        if self._handle is None:
            raise InvariantError("a part of a snapshot was not stored")
        return self._handle


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A part that the next `store` writes; its bytes are `pieces`, or in the file `local_path`."""

    part: WrittenPart
    name: str
    is_shared: bool
    packs: bool
    length: int
    pieces: Sequence[Buffer]
    local_path: str = ""


def _files(waiting: Iterable[_Waiting]) -> Iterator[list[_Waiting]]:
    """Parts of one file each: those that pack together (shared and exclusive ones apart), and each of the others alone."""
    packs: dict[bool, list[_Waiting]] = {}
    for each in waiting:
        if not each.packs:
            yield [each]
            continue
        pack = packs.setdefault(each.is_shared, [])
        if pack and sum(other.length for other in pack) + each.length > PACK_BYTES_MAX:
            yield pack
            pack = packs[each.is_shared] = []
        pack.append(each)
    yield from packs.values()


def size_of(pieces: Sequence[Buffer]) -> int:
    """Bytes of all pieces."""
    return sum(memoryview(piece).nbytes for piece in pieces)


def _write(pieces: Sequence[Buffer], path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    yield WriteFile(part_path(target.folder, path), pieces)
    return [FileHandle(path, size_of(pieces), checksum_of(*pieces))]


def _upload(local_path: str, path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    length, checksum = yield UploadFile(local_path, part_path(target.folder, path))
    return [FileHandle(path, length, checksum)]


def _write_pack(contents: list[Sequence[Buffer]], path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    yield WriteFile(part_path(target.folder, path), list(chain.from_iterable(contents)))
    lengths = [size_of(content) for content in contents]
    handles: list[FileHandle] = []
    offset = 0
    for content, length in zip(contents, lengths, strict=True):
        handles.append(SegmentHandle(path, length, checksum_of(*content), offset, sum(lengths)))
        offset += length
    return handles
