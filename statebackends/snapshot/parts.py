"""Parts of a snapshot: how they are written, read, checked and verified; all as flows over storage operations.

A part is inline, a file, or a piece of a file that several share. Small tables share one: on an object store each file costs a
request and its wait, whatever its size. Files of a database never do: they come and go one by one, and this host's copies of them
are links. A part is named, and gets its handle, when what was collected is stored. Nothing is written under a name twice, and what
a snapshot that fails has written is left to the coordinator.

Every byte that is read is checked against its handle here, by `check`: restores, local recovery and the tools call it. What the
bytes mean is for the backends and tables.py."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.errors import CorruptStateError, InvariantError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.handles import (
    DELTA_FORMAT,
    PIECE_BYTES_MAX,
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
"""Read at once of a file that is verified, as much as a transfer may hold: several files are read at one time."""
FILES_AT_ONCE = 64
"""Verified before what was found of them is told."""
SPARE_MAX = 2
"""A read of several pieces may be this many times as long as they are."""
HELD_BYTES_MAX = 16 << 20
"""Encoded parts wait in memory for each other up to this sum, and for the one that exceeds it."""
PACK_BYTES_MAX = 8 << 20
"""Of one file with several parts: one request on S3."""
LINK_DETAIL = "a symbolic link, or in one: a savepoint's files are its own"
_ENDS_BYTES = 6
_NAMES = {"arrow": "an Arrow IPC file", DELTA_FORMAT: "an Arrow IPC file", "parquet": "a Parquet file"}
_MARKS = {"arrow": b"ARROW1", DELTA_FORMAT: b"ARROW1", "parquet": b"PAR1"}
"""At both ends. Native files have none that we know of."""

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------------------------- problems


class ProblemKind(StrEnum):
    """What is wrong with a file of a snapshot."""

    MISSING = "missing"
    LENGTH = "length"
    CHECKSUM = "checksum"
    PATH = PATH_REASON
    FORMAT = "format"
    """A table is not in the format that its handle says."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class SnapshotProblem:
    """One file that a restore would fail on."""

    kind: ProblemKind
    operator: str
    """Uid; empty for a file that the snapshot as a whole needs."""
    subtask: int
    """-1 for a file that the snapshot as a whole needs."""
    path: str
    detail: str

    def __str__(self) -> str:
        owner = f"operator {self.operator!r} subtask {self.subtask}: " if self.operator else ""
        return f"{owner}{self.path}: {self.detail}"

    def error(self) -> CorruptStateError:
        return CorruptStateError(str(self), path=self.path, operator=self.operator or None, reason=self.kind.value)


def damaged(kind: ProblemKind, path: str, detail: str, operator: str | None, subtask: int | None = None) -> CorruptStateError:
    """The error for a part that is not what its handle says."""
    if subtask is None:
        owner = f"operator {operator!r}: " if operator else ""
        return CorruptStateError(f"{owner}{path}: {detail}", path=path, operator=operator, reason=kind.value)
    message = f"operator {operator!r} subtask {subtask}: {path}: {detail}"
    return CorruptStateError(message, path=path, operator=operator, subtask=subtask, reason=kind.value)


def missing(path: str, operator: str | None, subtask: int | None = None) -> CorruptStateError:
    """The error for a file that is not there."""
    return damaged(ProblemKind.MISSING, path, "the file is missing", operator, subtask)


def unresolved(handle: PlaceholderHandle, operator: str | None) -> CorruptStateError:
    """The error for a placeholder in a snapshot: nothing says which bytes it stands for."""
    return damaged(ProblemKind.PATH, handle.path, "a placeholder that was never resolved", operator)


def of_operator(error: StorageUnavailableError, operator: str, subtask: int) -> StorageUnavailableError:
    """The same error, saying whose file could not be read."""
    fields = {**error.fields, "operator": operator, "subtask": subtask}
    return type(error).of(f"operator {operator!r} subtask {subtask}: {error.message}", fields)


def outside_detail(handle: SegmentHandle) -> str:
    """What is wrong with a piece that can't be in its file."""
    if PIECE_BYTES_MAX < handle.length <= handle.file_length:
        return f"a piece of {handle.length} bytes; none has more than {PIECE_BYTES_MAX}"
    return f"a piece of {handle.length} bytes at {handle.offset} is not in a file of {handle.file_length}"


def _length_detail(found: int, expected: int) -> str:
    return f"{found} bytes instead of {expected}"

# ---------------------------------------------------------------------------------------------------------------------- names


def own_names(joined: str, path: str) -> int:
    """Of a part's `path`, which is `joined` in its storage: how many names at the end of it belong to the snapshot alone.

    A folder of savepoints may be a link, but nothing in one, which would not come along when it is moved, and may change under it.
    What lies in a job's directory is the coordinator's."""
    names = posixpath.normpath(path).split("/")
    folder = "/".join(joined.split("/")[: -len(names)])
    return 0 if names[0] == ".." or is_checkpoint_folder(folder) else len(names)

# -------------------------------------------------------------------------------------------------------------------- reading


def mismatch(part: FileHandle, length: int, checksum: str) -> tuple[ProblemKind, str] | None:
    """What tells bytes of this length and checksum from those of a part: the kind and a sentence; None if they are its bytes."""
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
    """The bytes of a file, or of a piece of one, that is at `path`; checked. Raises CorruptStateError naming file and owner."""
    spare = 1  # of a whole file not more than one byte too many, however long it is now
    if isinstance(part, SegmentHandle):
        spare = 0  # its file may go on behind it
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
    for span, pieces in zip(spans, read, strict=True):
        found.update(zip(span, pieces, strict=True))
    return [found[index] for index in range(len(parts))]


def _spans(parts: Sequence[StateHandle]) -> Iterator[list[int]]:
    """Positions of parts that are read at once: those of pieces of one file by their offsets, and of every other part alone."""
    pieces: dict[str, list[tuple[int, int, int]]] = {}
    for index, part in enumerate(parts):
        if isinstance(part, SegmentHandle) and part.is_inside:
            pieces.setdefault(part.path, []).append((part.offset, part.length, index))
        else:
            yield [index]
    for places in pieces.values():
        places.sort()
        start, stop = places[0][0], max(offset + length for offset, length, _ in places)
        if stop - start <= SPARE_MAX * sum(length for _, length, _ in places):
            yield [index for *_, index in places]
        else:
            yield from ([index] for *_, index in places)


def _read_span(parts: Sequence[StateHandle], folder: str, operator: str | None) -> Flow[list[bytes]]:
    if len(parts) == 1:
        return [(yield from read_part(parts[0], folder, operator=operator))]
    pieces = [part for part in parts if isinstance(part, SegmentHandle)]  # all of them: see _spans
    path = part_path(folder, pieces[0].path, operator=operator)
    start, stop = pieces[0].offset, max(piece.offset + piece.length for piece in pieces)
    try:
        data: bytes = yield ReadFile(path, start, stop - start)
    except ObjectMissingError as error:
        raise missing(path, operator) from error
    read = [data[piece.offset - start : piece.offset - start + piece.length] for piece in pieces]
    for piece, content in zip(pieces, read, strict=True):
        check(piece, (len(content), checksum_of(content)), path, operator)
    return read


def read_metadata(folder: str) -> Flow[SnapshotMetadata]:
    """The snapshot in a folder. Raises CorruptStateError, UnsupportedVersionError; ObjectMissingError if there is none."""
    path = metadata_path(folder) if folder else METADATA_NAME
    return decode_metadata((yield from read_metadata_file(path)), path)


def read_metadata_file(path: str) -> Flow[bytes]:
    """The bytes of a `_metadata` that anybody may have put there: no more of them than its header promises, and one.

    Raises ObjectMissingError."""
    head: bytes = yield ReadFile(path, 0, FIRST_BYTES)
    wanted = promised_length(head) + 1
    if len(head) < FIRST_BYTES or wanted <= FIRST_BYTES:
        return head[:wanted]
    rest: bytes = yield ReadFile(path, FIRST_BYTES, wanted - FIRST_BYTES)
    return head + rest

# ------------------------------------------------------------------------------------------------------------------ verifying


Look: TypeAlias = Callable[[FileHandle, str, int, str], Flow[SnapshotProblem | None]]
"""What is wrong with one file, of the first operator and subtask that name it, and the format of the table in it."""


def verify_snapshot(
    metadata: SnapshotMetadata,
    folder: str,
    *,
    checksums: bool = True,
    look: Look | None = None,
    found: Callable[[SnapshotProblem], None] | None = None,
) -> Flow[list[SnapshotProblem]]:
    """Every file that is missing, of the wrong length or with the wrong checksum; external ones are not looked at.

    checksums=False reads no data: lengths only. Files are read in pieces of 2 MiB, each file once, and tables have
    to begin and end as those of their format do. `look` looks at one file, as `verify_file` does unless given; `found` hears of
    each problem soon, in the order of the files."""
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
    """So many that what is found of them is told soon."""
    return (items[start : start + FILES_AT_ONCE] for start in range(0, len(items), FILES_AT_ONCE))


def named_files(metadata: SnapshotMetadata) -> Iterator[tuple[FileHandle, str, int, str]]:
    """Every file of a snapshot, or piece of one, once for each format that is said of it: with the first operator (its uid) and
    subtask that name it, and the format of the table in it, as `formatted_files` gives it."""
    seen: set[tuple[FileHandle, str]] = set()
    for operator in metadata.operators:
        for subtask, state in enumerate(operator.subtasks):
            for handle, table_format in formatted_files(state):
                if (handle, table_format) not in seen:
                    seen.add((handle, table_format))
                    yield handle, operator.uid, subtask, table_format


def file_handles(state: OperatorSubtaskState) -> Iterator[FileHandle]:
    """Files of one subtask's state; inline parts are left out."""
    return (handle for handle, _ in formatted_files(state))


def formatted_files(state: OperatorSubtaskState) -> Iterator[tuple[FileHandle, str]]:
    """As `file_handles`, each with the format of the table in it; empty for what is no table."""
    for keyed in state.keyed:
        table_format = keyed.format if keyed.format in (*TABLE_FORMATS, DELTA_FORMAT) else ""
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
    problem = yield from piece_problem(handle, path, operator, subtask)
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


def piece_problem(handle: FileHandle, path: str, operator: str, subtask: int) -> Flow[SnapshotProblem | None]:
    """What is wrong with the length of a file, without looking at its content."""
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
    """Checksum of a piece of a file, and how it begins and ends; None if it vanished meanwhile."""
    digest = Digest()
    for offset in range(start, start + length, VERIFY_BYTES):
        try:
            piece: bytes = yield ReadFile(path, offset, min(VERIFY_BYTES, start + length - offset))
        except ObjectMissingError:
            return None
        digest.add(piece)
        ends.add(piece)
    return digest.checksum


class FileEnds:
    """The first and last bytes of chunks that pass."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first = self.last = b""

    def add(self, chunk: Buffer) -> None:
        view = memoryview(chunk).cast("B")
        self.first += bytes(view[: _ENDS_BYTES - len(self.first)])
        self.last = (self.last + bytes(view[-_ENDS_BYTES:]))[-_ENDS_BYTES:]


def wrong_format(table_format: str, ends: FileEnds) -> str:
    """Why a file that begins and ends so is no table of the format of its handle; empty if it may be one."""
    marked = [known for known, mark in _MARKS.items() if ends.first.startswith(mark) and ends.last.endswith(mark)]
    if table_format not in _MARKS or table_format in marked:
        return ""
    found = _NAMES[marked[0]] if marked else "neither an Arrow nor a Parquet file"
    return f"{found}, which a table in the format {table_format!r} is not"

# -------------------------------------------------------------------------------------------------------------------- writing


class PartsWriter:
    """Of one operator of one subtask at one barrier. Names are unique among its parts, and are escaped.

    Only one writer of a target may pack."""

    def __init__(self, target: SnapshotTarget) -> None:
        self._target = target
        self._waiting: list[_Waiting] = []
        self._held_bytes = 0
        self._packs = 0

    def add(
        self, data: Buffer, name: str, *, is_shared: bool = False, packs: bool = True, inline_threshold: int | None = None
    ) -> WrittenPart:
        """A part of bytes: inline below the threshold (the target's unless given), else a file, one that is shared if asked for.

        It may be a piece of one unless `packs` is false."""
        length = memoryview(data).nbytes
        if length < (self._target.inline_threshold if inline_threshold is None else inline_threshold):
            return WrittenPart(InlineHandle(bytes(data)))
        self._held_bytes += length
        packs = packs and length < self._target.pack_threshold
        self._waiting.append(_Waiting(WrittenPart(), name, is_shared, packs, length, data))
        return self._waiting[-1].part

    def add_file(self, local_path: str, name: str, *, is_shared: bool = False) -> WrittenPart:
        """As `add`, of a local file that nobody changes until it is stored, and that becomes a file. Raises OSError."""
        length = os.path.getsize(local_path)
        if length < self._target.inline_threshold:
            with open(local_path, "rb") as file:
                return WrittenPart(InlineHandle(file.read()))
        self._waiting.append(_Waiting(WrittenPart(), name, is_shared, False, length, None, local_path))
        return self._waiting[-1].part

    @property
    def is_full(self) -> bool:
        """What waits should be stored before more is encoded."""
        return self._held_bytes > HELD_BYTES_MAX

    def store(self) -> Flow[None]:
        """Make all parts added so far durable; they have handles then."""
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
            return _upload(first.local_path, path, self._target) if first.data is None else _write(first.data, path, self._target)
        self._packs += 1
        path = self._path(f"pack-{self._packs}", is_shared=first.is_shared)
        return _write_pack([each.data for each in file if each.data is not None], path, self._target)

    def _path(self, name: str, *, is_shared: bool) -> str:
        target = self._target
        return shared_path(f"{target.shared_prefix}-{file_name(name)}") if is_shared else f"{target.file_prefix}-{file_name(name)}"


def write_part(data: Buffer, name: str, target: SnapshotTarget) -> Flow[StateHandle]:
    """One part that shares no file with others: see `PartsWriter.add`. It is durable when the flow ends."""
    writer = PartsWriter(target)
    part = writer.add(data, name, packs=False)
    yield from writer.store()
    return part.handle


@dataclass(eq=False, slots=True)
class WrittenPart:
    """One part that was added."""

    _handle: StateHandle | None = None

    @property
    def is_inline(self) -> bool:
        return isinstance(self._handle, InlineHandle)

    @property
    def handle(self) -> StateHandle:
        """Once it is stored."""
        if self._handle is None:
            raise InvariantError("a part of a snapshot was not stored")
        return self._handle


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A part to be stored."""

    part: WrittenPart
    name: str
    is_shared: bool
    packs: bool
    length: int
    data: Buffer | None
    local_path: str = ""


def _files(waiting: Iterable[_Waiting]) -> Iterator[list[_Waiting]]:
    """What goes into one file: those that pack, shared ones and others apart, and each of the rest alone."""
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


def _write(data: Buffer, path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    yield WriteFile(part_path(target.folder, path), [data])
    return [FileHandle(path, memoryview(data).nbytes, checksum_of(data))]


def _upload(local_path: str, path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    length, checksum = yield UploadFile(local_path, part_path(target.folder, path))
    return [FileHandle(path, length, checksum)]


def _write_pack(pieces: list[Buffer], path: str, target: SnapshotTarget) -> Flow[list[FileHandle]]:
    yield WriteFile(part_path(target.folder, path), pieces)
    lengths = [memoryview(piece).nbytes for piece in pieces]
    handles: list[FileHandle] = []
    offset = 0
    for piece, length in zip(pieces, lengths, strict=True):
        handles.append(SegmentHandle(path, length, checksum_of(piece), offset, sum(lengths)))
        offset += length
    return handles
