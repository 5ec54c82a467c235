"""Verification of a snapshot: all files against length and checksum, external files included.

It finds all problems, not only the first: an unreadable file is a problem like a damaged one. The check of a file is in
snapshot/parts.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.layout import part_path
from holdfast.statebackends.snapshot.parts import ProblemKind, SnapshotProblem, file_problem, named_files, verify_snapshot
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.external import FindReplaced, UncheckedFile, check_external
from holdfast.statebackends.state_processor.progress import note
from holdfast.statebackends.storage.port import Flow


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification."""

    files: int
    """Files checked, `_metadata` included; a file that several handles name counts once."""
    size: int
    """Bytes of state and records in flight, as handles say: in these files, and in `_metadata` itself, as small parts are."""
    problems: tuple[SnapshotProblem, ...]
    unchecked: tuple[UncheckedFile, ...]
    """External files that could not be checked, such as those of a savepoint relative to its job's state directory, which it does
    not name."""

    @property
    def is_sound(self) -> bool:
        return not self.problems


def _ignore(problem: SnapshotProblem) -> None:
    pass


def verify_files(
    snapshot: StoredSnapshot, found: Callable[[SnapshotProblem], None] = _ignore, find_replaced: FindReplaced | None = None
) -> Flow[VerifyReport]:
    """`verify_snapshot`, external files included. `found` is called with each problem, in order, after each group of files.

    Run it on the snapshot's storage; on one that also reaches absolute paths, external files at those are checked too;
    `find_replaced` is asked about those that are missing."""

    def look(handle: FileHandle, operator: str, subtask: int, table_format: str) -> Flow[SnapshotProblem | None]:
        try:
            problem = yield from file_problem(handle, snapshot.folder, operator, subtask, table_format)
        except StorageUnavailableError as error:
            path = part_path(snapshot.folder, handle.path)
            return SnapshotProblem(ProblemKind.UNREADABLE, operator, subtask, path, error.message)
        note(size=max(handle.length, 0))
        return problem

    metadata = snapshot.metadata
    problems = yield from verify_snapshot(metadata, snapshot.folder, look=look, found=found)
    external = yield from check_external(metadata.external, relative=not snapshot.is_self_contained, find_replaced=find_replaced)
    for problem in external.problems:
        found(problem)
    paths = {handle.path for handle, *_ in named_files(metadata)}
    return VerifyReport(1 + len(paths), metadata.size_in_flight_too, (*problems, *external.problems), external.unchecked)
