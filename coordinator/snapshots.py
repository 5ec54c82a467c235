"""Flows that read a snapshot wherever it lies: in the job's directory, or in a savepoint's folder of its own.

They judge files, not jobs: whether a snapshot fits a graph is for `restore.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from statebackends.errors import CorruptStateError, HoldfastError, ObjectMissingError
from statebackends.handles import OperatorState
from statebackends.metadata import SnapshotMetadata
from statebackends.operator_state import read_entries
from statebackends.snapshot import SnapshotProblem, external_exists, read_metadata, verify_snapshot
from statebackends.storage import is_absolute_folder
from statebackends.storage.operations import DeleteFolder, DescribeFiles, Flow, LinkFile, ListFiles, ListFolder, Operation

T = TypeVar("T")


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


def _next(flow: Flow[Any], result: Any) -> Operation | _Done:
    try:
        return flow.send(result)
    except StopIteration as stop:
        return _Done(stop.value)


def _throw(flow: Flow[Any], error: HoldfastError) -> Operation | _Done:
    try:
        return flow.throw(error)
    except StopIteration as stop:
        return _Done(stop.value)


def _move(operation: Operation, parent: str) -> Operation:
    if isinstance(operation, ListFiles | DescribeFiles | ListFolder | DeleteFolder):
        return replace(operation, prefix=f"{parent}/{operation.prefix}")
    if isinstance(operation, LinkFile):
        return replace(operation, source=f"{parent}/{operation.source}", target=f"{parent}/{operation.target}")
    return replace(operation, path=f"{parent}/{operation.path}")


def in_folder(folder: str, make: Callable[[str], Flow[T]]) -> Flow[T]:
    """Run a flow over a snapshot's folder, wherever it lies: `make` gets the folder relative to its storage."""
    if not is_absolute_folder(folder):
        return (yield from make(folder))
    parent, _, name = folder.rstrip("/").rpartition("/")
    return (yield from rebase(make(name), parent))


def load_snapshot(folder: str) -> Flow[SnapshotMetadata]:
    """Metadata of the snapshot in a folder. Raises CorruptStateError when it is damaged or missing."""
    try:
        return (yield from in_folder(folder, read_metadata))
    except ObjectMissingError as error:
        path = f"{folder}/_metadata"
        raise CorruptStateError(f"{path} does not exist", path=path, operator=None, reason="missing") from error


def check_files(metadata: SnapshotMetadata, folder: str, *, checksums: bool) -> Flow[None]:
    """Raise CorruptStateError naming every file that a restore would fail on. External files are in the state directory."""
    own = msgspec.structs.replace(metadata, external=())
    problems: list[SnapshotProblem] = yield from in_folder(
        folder, lambda relative: verify_snapshot(own, relative, checksums=checksums)
    )
    texts = [str(problem) for problem in problems]
    for path in metadata.external:
        if not (yield from external_exists(path)):
            texts.append(f"{path}: the external file is missing")
    if not texts:
        return
    first = problems[0] if problems else None
    raise CorruptStateError(
        f"snapshot {folder} can't be restored: {'; '.join(texts[:20])}",
        path=first.path if first is not None else metadata.external[0],
        operator=first.operator if first is not None else None,
        reason=first.kind.value if first is not None else "missing",
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
