"""Every file of a snapshot against its length and checksum: all problems, not the first one.

A file that can't be read is a problem like a damaged one; the others are still checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.layout import part_path
from holdfast.statebackends.snapshot.parts import ProblemKind, SnapshotProblem, file_problem, named_files, verify_snapshot
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.external import UncheckedFile, check_external
from holdfast.statebackends.state_processor.progress import note
from holdfast.statebackends.storage.port import Flow


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and what is wrong."""

    files: int
    """Checked, `_metadata` included; a file that is named twice counts once."""
    size: int
    """Bytes of state that the snapshot names in them."""
    problems: tuple[SnapshotProblem, ...]
    unchecked: tuple[UncheckedFile, ...]
    """Files outside the snapshot's folder that could not be asked for, such as those that a savepoint names relative to the state
    directory of its job: where that is can't be known."""

    @property
    def is_sound(self) -> bool:
        return not self.problems


def _ignore(problem: SnapshotProblem) -> None:
    pass


def verify_files(snapshot: StoredSnapshot, found: Callable[[SnapshotProblem], None] = _ignore) -> Flow[VerifyReport]:
    """As `verify_snapshot`, external files included; `found` hears of each problem soon, in their order.

    To be run on the snapshot's storage, or on one that goes where an absolute path points, too: else what lies elsewhere is
    unchecked."""

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
    external = yield from check_external(metadata.external, relative=not snapshot.is_self_contained)
    for problem in external.problems:
        found(problem)
    handles = {handle for handle, *_ in named_files(metadata)}
    paths = {handle.path for handle in handles}
    size = sum(handle.length for handle in handles)
    return VerifyReport(1 + len(paths), size, (*problems, *external.problems), external.unchecked)
