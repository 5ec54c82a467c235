"""Which staged files nothing can refer to any more, and their deletion: a courtesy, never needed for correctness.

A file is deleted only if it is of this sink and job, of a lower attempt, not in the restored committables, and no snapshot
other than the restored one can name it. The last is read from the write-once registers of the job: only a snapshot taken by
the file's own attempt, with an id not below the file's, could have it in its committables before a later attempt either
committed it or never knew it. An id that is undecided or unreadable protects the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from holdfast.barriers.sinklog import SinkPaths
from holdfast.operators.base import OperatorContext
from holdfast.operators.sinks.manifest import FileName, job_tag, parse_name
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.storage.flows import delete_files, read_whole
from holdfast.statebackends.storage.port import Flow, ListFolder, Storage

R = TypeVar("R")

_CHECKPOINT_PREFIX = "chk-"


class _Claim(msgspec.Struct):
    attempt: int


class _Decision(msgspec.Struct):
    decision: str | None = None


class Orphans:
    """One sweep: three flows, on the sink's storage, on the state directory, and on the sink's storage again."""

    def __init__(self, context: OperatorContext, paths: SinkPaths, storage: Storage, kept: frozenset[str]) -> None:
        self._context = context
        self._paths = paths
        self._storage = storage
        self._kept = kept

    def sweep(self) -> None:
        tag, attempt = job_tag(self._context.job_id), self._context.attempt
        flow = candidates_flow(self._paths, tag, attempt, self._kept)
        self._context.submit_flow(flow, self._storage, self._found)

    def _found(self, candidates: dict[str, FileName] | None, error: BaseException | None) -> None:
        # A failed sweep is tried again by the next attempt; the job goes on.
        if error is not None or not candidates:
            return
        first = min(name.first_checkpoint for name in candidates.values())
        flow = living_snapshots_flow(self._context.job_id, first, self._context.restored_checkpoint_id)

        def looked(living: list[tuple[int, int | None]] | None, error: BaseException | None) -> None:
            if error is None and living is not None:
                doomed = [path for path, name in candidates.items() if not is_protected(name, living)]
                self._context.submit_flow(delete_flow(self._paths, doomed), self._storage, lambda result, error: None)

        self._context.submit_flow(flow, self._context.storage, looked)


def candidates_flow(paths: SinkPaths, tag: str, attempt: int, kept: frozenset[str]) -> Flow[dict[str, FileName]]:
    """Staged files of lower attempts of this job that the restored state does not hold."""
    found = {}
    for text in (yield ListFolder(paths.staged_folder)):
        name = parse_name(text)
        if name is not None and name.job == tag and name.attempt < attempt and text not in kept:
            found[text] = name
    return found


def living_snapshots_flow(job_id: str, first: int, restored: int) -> Flow[list[tuple[int, int | None]]]:
    """(id, attempt that took it, or None if unknown) of every snapshot from `first` on that is not ABORTED, except the restored."""
    living: list[tuple[int, int | None]] = []
    for folder in (yield ListFolder(job_id)):
        number = folder.removeprefix(_CHECKPOINT_PREFIX).rstrip("/")
        if not folder.startswith(_CHECKPOINT_PREFIX) or not number.isdecimal() or int(number) < first or int(number) == restored:
            continue
        decision = yield from _read(f"{job_id}/{folder.rstrip('/')}/_metadata", _Decision, read_metadata_file)
        if decision is not None and decision.decision == "aborted":
            continue
        claim = yield from _read(f"{job_id}/{folder.rstrip('/')}/_claim", _Claim)
        living.append((int(number), None if claim is None else claim.attempt))
    return living


def _read(path: str, kind: type[R], read: Callable[[str], Flow[bytes]] = read_whole) -> Flow[R | None]:
    """A record, or None when it is missing or can't be read."""
    try:
        return decode_json((yield from read(path)), kind)
    except (ObjectMissingError, CorruptStateError, *UNDECODABLE):
        return None


def is_protected(name: FileName, living: Iterable[tuple[int, int | None]]) -> bool:
    """Can one of these snapshots name the file?"""
    return any(number >= name.first_checkpoint and attempt in (None, name.attempt) for number, attempt in living)


def delete_flow(paths: SinkPaths, names: Iterable[str]) -> Flow[int]:
    """Files deleted."""
    return delete_files(paths.staged(name) for name in names)
