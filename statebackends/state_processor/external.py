"""Files that a snapshot needs outside its folder (`external` in `_metadata`): staged files of a sink, a source's sealed input.

An entry is a path alone. What else is known of such a file is looked at: an input's manifest says length and checksum of each of
its files; of a staged Parquet file only how it has to begin and end. Absolute paths are asked of the storage that they name, so
these flows run on one that goes where a path points; what can't be asked is told with the reason, and is no problem of the
snapshot."""

from __future__ import annotations

from collections.abc import Iterable
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
"""More than what marks either end of a Parquet file."""


@dataclass(frozen=True, slots=True)
class UncheckedFile:
    """A file that a snapshot needs, and why nobody has looked at it."""

    path: str
    """As `_metadata` names it."""
    reason: str
    error: HoldfastError | None = field(default=None, compare=False)
    """What storage raised, where that is the reason."""

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
    """As much of an input's manifest as says what its files are."""

    files: tuple[InputFile, ...]
    version: int


def decode_input(content: bytes) -> InputFiles:
    """Of a version that may be newer than INPUT_VERSION. Raises one of UNDECODABLE."""
    return decode_json(content, InputFiles)


@dataclass(frozen=True, slots=True)
class _Found:
    """A file that there is."""

    entry: str
    path: str


_Look: TypeAlias = SnapshotProblem | UncheckedFile | _Found
NO_DIRECTORY = "relative to the state directory of its job, which a savepoint does not name"


def check_external(entries: Iterable[str], *, relative: bool = True, contents: bool = True) -> Flow[ExternalReport]:
    """Look at each entry, several at one time. `relative`: paths that are not absolute can be looked up. `contents`: without, it is
    enough that a file is there."""
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
    return ExternalReport(tuple(problems), tuple(unchecked))


def _look(entry: str, *, relative: bool, contents: bool) -> Flow[_Look]:
    """The first of the places where there is a file; one that can't be asked is no answer about the others."""
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
            continue  # it has moved on
        except (InvalidConfigError, StorageUnavailableError) as error:
            reason, refused = error.message, error
    if reason:
        return UncheckedFile(entry, reason, refused)
    return SnapshotProblem(ProblemKind.MISSING, "", -1, entry, "the external file is missing")


def _wrong_ends(path: str, size: int) -> Flow[str]:
    """Why a staged file of so many bytes is no whole Parquet file; empty if it may be one."""
    ends = FileEnds()
    for offset in (0, max(0, size - _END_BYTES)):
        ends.add((yield ReadFile(path, offset, _END_BYTES)))
    return "it does not begin and end as a Parquet file does: it was cut" if wrong_format("parquet", ends) else ""


def _check_input(found: _Found) -> Flow[list[SnapshotProblem | UncheckedFile]]:
    """The files of a source's input against what its manifest says of them; nothing for any other file."""
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
