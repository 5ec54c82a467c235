"""Flows that read and check a snapshot at any location: in a job's directory, or in a savepoint's own folder.

They check files, not jobs: whether a snapshot fits a graph is decided in the room `restore`."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from holdfast.barriers.sinks.reading import find_replaced
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, ObjectMissingError
from holdfast.statebackends.handles import OperatorState
from holdfast.statebackends.layout import metadata_path
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata
from holdfast.statebackends.snapshot.parts import ProblemKind, SnapshotProblem, read_metadata_file, snapshot_files, verify_snapshot
from holdfast.statebackends.state_processor.contents import check_described
from holdfast.statebackends.state_processor.external import check_external
from holdfast.statebackends.storage import is_absolute_folder, split_folder
from holdfast.statebackends.storage.port import (
    DeleteFolder,
    DescribeFiles,
    Flow,
    InParallel,
    LinkFile,
    ListFiles,
    ListFolder,
    Operation,
)

T = TypeVar("T")

PROBLEMS_SHOWN_MAX = 20
"""Damaged files that an error's message names; its field `problems` has all of them."""


def rebase(flow: Flow[T], parent: str) -> Flow[T]:
    """Run a flow whose paths are relative to `parent`, an absolute location."""
    operation = _next(flow, None)
    while not isinstance(operation, _Done):
        moved = _move(operation, parent)
        try:
            result = yield moved
        except HoldfastError as error:
            operation = _throw(flow, error)
        else:
            operation = _next(flow, result)
    value: T = operation.value
    return value


@dataclass(frozen=True, slots=True)
class _Done:
    value: Any


def _next(flow: Flow[Any], result: Any) -> Operation | InParallel | _Done:
    try:
        return flow.send(result)
    except StopIteration as stop:
        return _Done(stop.value)


def _throw(flow: Flow[Any], error: HoldfastError) -> Operation | InParallel | _Done:
    try:
        return flow.throw(error)
    except StopIteration as stop:
        return _Done(stop.value)


def _move(operation: Operation | InParallel, parent: str) -> Operation | InParallel:
    if isinstance(operation, InParallel):
        return InParallel([rebase(flow, parent) for flow in operation.flows], operation.sizes)
    if isinstance(operation, ListFiles | DescribeFiles | ListFolder | DeleteFolder):
        return msgspec.structs.replace(operation, prefix=f"{parent}/{operation.prefix}")
    if isinstance(operation, LinkFile):
        return msgspec.structs.replace(operation, source=f"{parent}/{operation.source}", target=f"{parent}/{operation.target}")
    return msgspec.structs.replace(operation, path=f"{parent}/{operation.path}")


def in_folder(folder: str, make: Callable[[str], Flow[T]]) -> Flow[T]:
    """Run a flow over a snapshot's folder at any location: `make` gets the folder relative to its storage."""
    if not is_absolute_folder(folder):
        return (yield from make(folder))
    parent, relative = split_folder(folder)
    return (yield from rebase(make(relative), parent))


def load_snapshot(folder: str) -> Flow[SnapshotMetadata]:
    """Metadata of the snapshot in a folder. Raises CorruptStateError if it is damaged, or missing (reason `missing`)."""
    path = metadata_path(folder)
    try:
        content = yield from read_metadata_file(path)
    except ObjectMissingError as error:
        raise CorruptStateError(f"{path} does not exist", path=path, operator=None, reason="missing") from error
    metadata = decode_metadata(content, path)
    check_described(metadata, path)
    return metadata


def check_files(
    metadata: SnapshotMetadata, folder: str, *, checksums: bool, forgone: Container[str] = frozenset()
) -> Flow[None]:
    """Raise CorruptStateError naming every file that a restore would fail on. External files are in the state directory.

    `forgone`: external files that the job does not need."""
    problems = yield from find_problems(metadata, folder, checksums=checksums, forgone=forgone)
    if problems:
        raise damage_error(folder, problems)


def find_problems(
    metadata: SnapshotMetadata,
    folder: str,
    *,
    checksums: bool,
    external: bool = True,
    forgone: Container[str] = frozenset(),
) -> Flow[list[SnapshotProblem]]:
    """Every file that a restore would fail on. No path that leaves the snapshot's folder, or its job's, is read.

    `external`: files outside the snapshot are checked, too, in the state directory, but for those `forgone`."""
    problems = list(_path_problems(metadata, folder))
    if not problems:
        found: list[SnapshotProblem] = yield from in_folder(
            folder, lambda relative: verify_snapshot(metadata, relative, checksums=checksums)
        )
        above = f"{split_folder(folder)[0].rstrip('/')}/" if is_absolute_folder(folder) else ""
        problems += [replace(problem, path=above + problem.path) for problem in found]
    if external:
        problems += yield from find_missing_external(entry for entry in metadata.external if entry not in forgone)
    return problems


def find_missing_external(entries: Iterable[str]) -> Flow[list[SnapshotProblem]]:
    """A snapshot's external files that are missing at all of their places, or have no allowed place; their content is not read.

    Raises the storage's error if it can't tell."""
    report = yield from check_external(entries, contents=False, find_replaced=find_replaced)
    for file in report.unchecked:
        if file.error is not None:
            raise file.error
    return list(report.problems)


def _path_problems(metadata: SnapshotMetadata, folder: str) -> Iterator[SnapshotProblem]:
    """Paths that leave the snapshot: a savepoint's files are in its folder, a checkpoint's in its job's."""
    inside = folder.rstrip("/") if metadata.kind != "checkpoint" else folder.rstrip("/").rpartition("/")[0]
    for handle, uid, subtask in snapshot_files(metadata):
        joined = posixpath.normpath(posixpath.join(folder, handle.path))
        if handle.path.startswith("/") or "\0" in handle.path or not joined.startswith(f"{posixpath.normpath(inside)}/"):
            yield SnapshotProblem(ProblemKind.PATH, uid, subtask, handle.path, f"the path leaves {inside}")


def damage_error(folder: str, problems: Sequence[SnapshotProblem], hint: str = "") -> CorruptStateError:
    """One error for all problems; the first one's file and operator are its fields."""
    texts = [str(problem) for problem in problems]
    more = f"; and {len(texts) - PROBLEMS_SHOWN_MAX} more" if len(texts) > PROBLEMS_SHOWN_MAX else ""
    first = problems[0]
    return CorruptStateError(
        f"snapshot {folder} can't be restored: {'; '.join(texts[:PROBLEMS_SHOWN_MAX])}{more}" + (f". {hint}" if hint else ""),
        path=first.path,
        operator=first.operator or None,
        reason=first.kind.value,
        problems=texts,
    )


def read_lists(operator: OperatorState, name: str, folder: str) -> Flow[list[list[bytes]]]:
    """Entries of one list state, per old subtask."""

    def read(relative: str) -> Flow[list[list[bytes]]]:
        entries: list[list[bytes]] = []
        for subtask in operator.subtasks:
            found: list[bytes] = []
            for handle in subtask.operator:
                if handle.state.name == name:
                    found += yield from read_entries(handle, relative, operator=operator.uid)
            entries.append(found)
        return entries

    return (yield from in_folder(folder, read))
