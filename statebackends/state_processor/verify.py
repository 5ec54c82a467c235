"""Every file of a snapshot against its length and checksum: all problems, not the first one.

A file that can't be read is a problem like a damaged one; the others are still checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.statebackends.errors import CorruptStateError, StorageUnavailableError
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.snapshot.parts import VERIFY_BYTES, ProblemKind, SnapshotProblem, file_problem, formatted_files
from holdfast.statebackends.state_processor import progress as work
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.external import UncheckedFile, batches, check_external
from holdfast.statebackends.storage.port import Flow, InParallel


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
    """Reads all files, several at one time, in pieces of 2 MiB; `found` hears of each problem soon, in their order.

    To be run on the snapshot's storage, or on one that goes where an absolute path points, too: else what lies elsewhere is
    unchecked."""
    problems: list[SnapshotProblem] = []
    seen: dict[tuple[FileHandle, str], tuple[str, int]] = {}
    """With the first operator and subtask that names it."""
    for operator in snapshot.metadata.operators:
        for subtask, state in enumerate(operator.subtasks):
            for place in formatted_files(state):
                seen.setdefault(place, (operator.uid, subtask))

    def note(problem: SnapshotProblem | None) -> None:
        if problem is not None:
            problems.append(problem)
            found(problem)

    for batch in batches(list(seen.items())):
        looks = [_check(snapshot, handle, table_format, *owner) for (handle, table_format), owner in batch]
        sizes = [min(max(handle.length, 0), VERIFY_BYTES) for (handle, _), _ in batch]
        for problem in (yield InParallel(looks, sizes)):
            note(problem)
    external = yield from check_external(snapshot.metadata.external, relative=not snapshot.is_self_contained)
    for problem in external.problems:
        note(problem)
    handles = {handle for handle, _ in seen}
    paths = {handle.path for handle in handles}
    return VerifyReport(1 + len(paths), sum(handle.length for handle in handles), tuple(problems), external.unchecked)


def _check(
    snapshot: StoredSnapshot, handle: FileHandle, table_format: str, operator: str, subtask: int
) -> Flow[SnapshotProblem | None]:
    try:
        path = snapshot.path_of(handle.path)
    except CorruptStateError as error:
        return SnapshotProblem(ProblemKind.PATH, operator, subtask, handle.path, error.message)
    try:
        problem = yield from file_problem(handle, snapshot.folder, operator, subtask, table_format)
    except StorageUnavailableError as error:
        return SnapshotProblem(ProblemKind.UNREADABLE, operator, subtask, path, error.message)
    work.note(size=max(handle.length, 0))
    return problem
