"""Every file of a snapshot against its length and checksum: all problems, not the first one.

A file that can't be read is a problem like a damaged one; the others are still checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from statebackends.errors import CorruptStateError, StorageUnavailableError
from statebackends.handles import FileHandle
from statebackends.snapshot import ProblemKind, SnapshotProblem, external_exists, file_problem, formatted_files
from statebackends.snapshots.contents import StoredSnapshot
from statebackends.storage.operations import Flow


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and what is wrong."""

    files: int
    """Checked, `_metadata` included; a file that is named twice counts once."""
    size: int
    """Bytes of state that the snapshot names in them."""
    problems: tuple[SnapshotProblem, ...]
    unchecked: tuple[str, ...]
    """Files outside a savepoint's folder: where its job's state directory is can't be known."""

    @property
    def is_sound(self) -> bool:
        return not self.problems


def _ignore(problem: SnapshotProblem) -> None:
    pass


def verify_files(snapshot: StoredSnapshot, found: Callable[[SnapshotProblem], None] = _ignore) -> Flow[VerifyReport]:
    """Reads all files, in pieces of 2 MiB; `found` hears of each problem at once."""
    problems: list[SnapshotProblem] = []
    seen: set[tuple[FileHandle, str]] = set()

    def note(problem: SnapshotProblem | None) -> None:
        if problem is not None:
            problems.append(problem)
            found(problem)

    for operator in snapshot.metadata.operators:
        for subtask, state in enumerate(operator.subtasks):
            for handle, table_format in formatted_files(state):
                if (handle, table_format) not in seen:
                    seen.add((handle, table_format))
                    note((yield from _check(snapshot, handle, table_format, operator.uid, subtask)))
    external, unchecked = snapshot.metadata.external, ()
    if snapshot.is_self_contained:
        external, unchecked = (), external
    for entry in external:
        if not (yield from external_exists(entry)):
            note(SnapshotProblem(ProblemKind.MISSING, "", -1, entry, "the external file is missing"))
    handles = {handle for handle, _ in seen}
    paths = {handle.path for handle in handles}
    return VerifyReport(1 + len(paths), sum(handle.length for handle in handles), tuple(problems), unchecked)


def _check(
    snapshot: StoredSnapshot, handle: FileHandle, table_format: str, operator: str, subtask: int
) -> Flow[SnapshotProblem | None]:
    try:
        path = snapshot.path_of(handle.path)
    except CorruptStateError as error:
        return SnapshotProblem(ProblemKind.PATH, operator, subtask, handle.path, error.message)
    try:
        return (yield from file_problem(handle, snapshot.folder, operator, subtask, table_format))
    except StorageUnavailableError as error:
        return SnapshotProblem(ProblemKind.UNREADABLE, operator, subtask, path, error.message)
