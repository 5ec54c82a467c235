"""Checks of external files, which a snapshot needs outside its folder: staged files of a sink, a source's sealed input.

An entry of `external` in `_metadata` is a path alone. Its file is checked as far as more is known: an input's manifest has length
and checksum of each of its files; a staged Parquet file must begin and end as one. The flows run on a storage that also reaches
absolute paths. A file that can't be checked is reported with the reason, and is no problem of the snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    ObjectMissingError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import FileHandle, external_places
from holdfast.statebackends.layout import is_input_manifest
from holdfast.statebackends.snapshot.parts import (
    VERIFY_BYTES,
    FileEnds,
    ProblemKind,
    SnapshotProblem,
    batches,
    file_problem,
    wrong_format,
)
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow, InParallel, ReadFile, StatFile

INPUT_VERSION = 1
"""Highest version of an input's manifest that this code understands."""

_END_BYTES = 16
"""Bytes read at each end of a Parquet file, more than its magic bytes."""


@dataclass(frozen=True, slots=True)
class UncheckedFile:
    """An external file that was not checked, and why."""

    path: str
    """As in `_metadata`."""
    reason: str
    error: HoldfastError | None = field(default=None, compare=False)
    """The error of storage, if that is the reason."""

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ExternalReport:
    problems: tuple[SnapshotProblem, ...]
    unchecked: tuple[UncheckedFile, ...]


class InputFile(msgspec.Struct, frozen=True):
    name: str
    """Relative to the manifest's folder."""
    length: int
    checksum: str


class InputFiles(msgspec.Struct, frozen=True):
    """The files of an input, and the version, in its manifest."""

    files: tuple[InputFile, ...]
    version: int


def decode_input(content: bytes) -> InputFiles:
    """The files in an input's manifest, whose version may be above INPUT_VERSION. Raises one of UNDECODABLE."""
    return decode_json(content, InputFiles)


@dataclass(frozen=True, slots=True)
class _Found:
    """An external file that exists: the entry that names it, and its path."""

    entry: str
    path: str


FindReplaced: TypeAlias = Callable[[Sequence[str]], Flow[frozenset[str]]]
"""Of entries whose file is missing, those that need none: the file was committed, and others have its rows."""

_Look: TypeAlias = SnapshotProblem | UncheckedFile | _Found
NO_DIRECTORY = "relative to the state directory of its job, which a savepoint does not name"


def check_external(
    entries: Iterable[str], *, relative: bool = True, contents: bool = True, find_replaced: FindReplaced | None = None
) -> Flow[ExternalReport]:
    """Check the entries, several at one time. `relative`: paths that are not absolute can be looked up in this storage. `contents`:
    False checks only that files exist. `find_replaced`: asked about files that are missing."""
    problems: list[SnapshotProblem] = []
    unchecked: list[UncheckedFile] = []
    for batch in batches(list(dict.fromkeys(entries))):
        flows = [_look(entry, relative=relative, contents=contents) for entry in batch]
        looks: list[_Look] = yield InParallel(flows, [0] * len(batch))
        for look in looks:
            if isinstance(look, _Found):
                found = (yield from _check_input(look)) if contents else []
            else:
                found = [look]
            problems += (each for each in found if isinstance(each, SnapshotProblem))
            unchecked += (each for each in found if isinstance(each, UncheckedFile))
    missing = [each.path for each in problems if each.kind is ProblemKind.MISSING]
    if missing and find_replaced is not None:
        replaced = yield from find_replaced(missing)
        problems = [each for each in problems if each.kind is not ProblemKind.MISSING or each.path not in replaced]
    return ExternalReport(tuple(problems), tuple(unchecked))


def _look(entry: str, *, relative: bool, contents: bool) -> Flow[_Look]:
    """Look for the file of an entry at each of its places. If one can't be looked at and the others lack it, it is unchecked."""
    reason = ""
    refused: HoldfastError | None = None
    for place in external_places(entry):
        if not place or "\0" in place or any(name in (".", "..") for name in place.split("/")):
            return SnapshotProblem(ProblemKind.PATH, "", -1, entry, "no path of a file: a restore would refuse it")
        if not relative and not is_absolute_folder(place):
            reason = NO_DIRECTORY
            continue
        try:
            size: int | None = yield StatFile(place)
            if size is not None:
                detail = (yield from _wrong_ends(place, size)) if contents and place.endswith(".parquet") else ""
                return SnapshotProblem(ProblemKind.FORMAT, "", -1, place, detail) if detail else _Found(entry, place)
        except ObjectMissingError:
            continue  # the file has moved to its next place
        except (InvalidConfigError, StorageUnavailableError) as error:
            reason, refused = error.message, error
    if reason:
        return UncheckedFile(entry, reason, refused)
    return SnapshotProblem(ProblemKind.MISSING, "", -1, entry, "the external file is missing")


def _wrong_ends(path: str, size: int) -> Flow[str]:
    """Why a staged file of `size` bytes is not a whole Parquet file; "" if it may be one."""
    ends = FileEnds()
    for offset in (0, max(0, size - _END_BYTES)):
        ends.add((yield ReadFile(path, offset, _END_BYTES)))
    return "it does not begin and end as a Parquet file does: it was cut" if wrong_format("parquet", ends) else ""


def _check_input(found: _Found) -> Flow[list[SnapshotProblem | UncheckedFile]]:
    """Check the files of a source's input against its manifest; returns nothing for other external files."""
    if not is_input_manifest(found.path):
        return []
    try:
        manifest = decode_input((yield from read_whole(found.path)))
    except StorageUnavailableError as error:
        return [UncheckedFile(found.entry, error.message)]
    except ObjectMissingError:
        return [SnapshotProblem(ProblemKind.MISSING, "", -1, found.entry, "the external file is missing")]
    except (*UNDECODABLE, CorruptStateError) as error:
        return [SnapshotProblem(ProblemKind.FORMAT, "", -1, found.path, f"not an input manifest: {error}")]
    if manifest.version > INPUT_VERSION:
        reason = f"input manifest version {manifest.version}, this Holdfast reads {INPUT_VERSION}"
        return [UncheckedFile(found.entry, reason)]
    folder = found.path.rpartition("/")[0]
    results: list[SnapshotProblem | UncheckedFile] = []
    for batch in batches(manifest.files):
        handles = [FileHandle(file.name, file.length, file.checksum) for file in batch]
        sizes = [min(max(handle.length, 0), VERIFY_BYTES) for handle in handles]
        answers = yield InParallel([_check_file(handle, folder) for handle in handles], sizes)
        results += (answer for answer in answers if answer is not None)
    return results


def _check_file(handle: FileHandle, folder: str) -> Flow[SnapshotProblem | UncheckedFile | None]:
    try:
        return (yield from file_problem(handle, folder, "", -1))
    except StorageUnavailableError as error:
        return UncheckedFile(f"{folder}/{handle.path}", error.message)
