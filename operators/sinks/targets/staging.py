"""CORE: rows that wait below the job's state directory until a committer applies them to a target: names, stored state, and the
steps in which they are applied. Pure.

    <state-dir>/<job>/sinks/<sink id>/staged/<name>     as the names of file sinks: never used twice
    <state-dir>/<job>/sinks/<sink id>/staging.json      created by the first committer, and never deleted

A staged file is deleted when it is applied, though a snapshot may name it: whether it is applied, the target alone knows. In a
snapshot it is therefore `<file>|<staging.json>`: a check of the snapshot finds that its state directory is there, and a committer
that finds a file missing raises CommittableLostError unless the target's position is behind its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.barriers.sinks.staged import ALL_ROWS, STAGED_CHECKPOINTS, CommitPosition, StagedCheckpoint
from holdfast.operators.sinks.targets.target import FileSlice
from holdfast.statebackends.decoding import decode_versioned
from holdfast.statebackends.errors import AmbiguousWriteError
from holdfast.statebackends.layout import SINKS_FOLDER, folder_name
from holdfast.statebackends.state import OperatorListStateDescriptor
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow, PutIfAbsent

MARKER_VERSION = 1
STAGED = OperatorListStateDescriptor(STAGED_CHECKPOINTS)
"""The committer's one list state, of one entry: `StagedState`."""


@dataclass(frozen=True, slots=True)
class StagingPaths:
    """Paths of one sink's staged rows, relative to the state directory."""

    job_id: str
    sink_id: str

    @property
    def folder(self) -> str:
        return f"{self.job_id}/{SINKS_FOLDER}/{folder_name(self.sink_id)}"

    @property
    def staged_folder(self) -> str:
        return f"{self.folder}/staged"

    def staged(self, name: str) -> str:
        return f"{self.staged_folder}/{name}"

    @property
    def marker(self) -> str:
        return f"{self.folder}/staging.json"

    @property
    def target(self) -> str:
        """Names the target's operations in traces."""
        return f"{self.folder}/target"


class Marker(msgspec.Struct, frozen=True):
    """Content of `staging.json`."""

    version: int
    sink_id: str
    line: str
    """As of `CommitPosition`: it lasts as long as the numbers of the job's attempts, beside which it stands."""


MARKER_TRIES_MAX = 6
"""Ambiguous answers in a row before the job fails over."""


def line_flow(paths: StagingPaths, nonce: str) -> Flow[str]:
    """The line of this job and sink in this state directory: the stored one, or `nonce` at its first use."""
    content = msgspec.json.encode(Marker(MARKER_VERSION, paths.sink_id, nonce))
    for attempt in range(1, MARKER_TRIES_MAX + 1):
        try:
            yield PutIfAbsent(paths.marker, content)
            break
        except AmbiguousWriteError:  # only a clear answer says that it is durable, and files are deleted only beside it
            if attempt == MARKER_TRIES_MAX:
                raise
    stored = yield from read_whole(paths.marker)
    return decode_versioned(stored, Marker, paths.marker, supported=MARKER_VERSION, what="the marker of staged rows").line


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that are applied at once, and how far the output has then got."""

    slices: tuple[FileSlice, ...]
    checkpoint_id: int
    row: int
    tag: str
    """Of the staged files of `checkpoint_id`."""


def next_step(position: CommitPosition, due: Sequence[StagedCheckpoint], rows_max: int | None) -> Step | None:
    """The rows that come next behind a position; None when all are committed. `due`: ascending ids.

    Whole checkpoints as far as rows_max goes. One with more rows than that is applied in several steps."""
    slices: list[FileSlice] = []
    checkpoint_id, tag, left = 0, "", rows_max
    for checkpoint in due:
        if position.has_all_of(checkpoint.checkpoint_id):
            continue
        done = position.rows_of(checkpoint.checkpoint_id)
        wanted = checkpoint.rows - done
        if left is not None and wanted > left:
            if slices:
                break
            return Step(_slices(checkpoint, done, done + left), checkpoint.checkpoint_id, done + left, checkpoint.tag)
        slices += _slices(checkpoint, done, checkpoint.rows)
        checkpoint_id, tag = checkpoint.checkpoint_id, checkpoint.tag
        left = None if left is None else left - wanted
    return Step(tuple(slices), checkpoint_id, ALL_ROWS, tag) if slices else None


def _slices(checkpoint: StagedCheckpoint, start: int, stop: int) -> tuple[FileSlice, ...]:
    """Rows [start, stop) of a checkpoint."""
    found, before = [], 0
    for file in checkpoint.files:
        first, last = max(start - before, 0), min(stop - before, file.rows)
        if first < last:
            found.append(FileSlice(checkpoint.folder, file.name, first, last))
        before += file.rows
    return tuple(found)
