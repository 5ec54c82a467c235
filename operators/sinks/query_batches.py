"""CORE: batches of a stock Spark query, each committed to a target once: what is stored beside its checkpoint, and the flows.

    <checkpoint>/holdfast/<query id>/sinks/<sink id>/attempts/<n>.json     each start of the query; the highest may commit
                                                     /staged/<name>        rows that tasks wrote
                                                     /batches/<id>-<plan>-<attempt>.json   the staged files of a batch, sealed
                                                     /committed/<id>.json  position of the target behind a batch

Spark runs a batch again until it has stored that the batch is done: with the same records, but in other tasks, so that rows are in
other files and in another order. A batch of which a row is committed is therefore what its seal says: the position has the seal's
tag. What an attempt seals late, behind the start of its successor, is another file, and is never committed. Batch n is checkpoint
n + 1 of a job whose id is the query's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.barriers.sinklog import StagedFile
from holdfast.barriers.stagedsink import CommitMark, CommitPosition, StagedCheckpoint
from holdfast.operators.sinks.log import parse_name
from holdfast.operators.sinks.positions import CommitOwner
from holdfast.operators.sinks.staging import StagingPaths
from holdfast.operators.sinks.target import FindMissing
from holdfast.operators.sinks.target_committer import TargetFlows, begin_flow
from holdfast.statebackends.decoding import decode_versioned
from holdfast.statebackends.errors import AmbiguousWriteError, InvariantError, OutputMayRepeatError, StorageUnavailableError
from holdfast.statebackends.storage.flows import delete_files, read_whole
from holdfast.statebackends.storage.port import Flow, ListFolder, PutIfAbsent

BATCH_VERSION = 1
FOLDER = "holdfast"
"""Below a query's checkpoint folder."""
TRIES_MAX = 6
"""Ambiguous answers in a row to one write."""


class BatchSeal(msgspec.Struct, frozen=True):
    """The rows of a batch."""

    version: int
    batch_id: int
    plan: str
    """Digest of the offsets that Spark had stored for the batch, in hex: those of another batch with this id differ."""
    files: tuple[StagedFile, ...]


class BatchCommitted(msgspec.Struct, frozen=True):
    """A batch whose rows are committed, and how far the output had then got."""

    version: int
    batch_id: int
    position: CommitPosition


S = TypeVar("S", BatchSeal, BatchCommitted)


class SealName(NamedTuple):
    """Which seal it is."""

    batch_id: int
    plan: str
    attempt: int
    """That staged the rows."""


@dataclass(frozen=True, slots=True)
class QueryPaths(StagingPaths):
    """Paths of one sink of a query, relative to `<checkpoint>/holdfast`; the job id is the query's id."""

    def attempt(self, number: int) -> str:
        return f"{self.folder}/attempts/{number:012d}.json"

    @property
    def seals(self) -> str:
        return f"{self.folder}/batches"

    def seal(self, name: SealName) -> str:
        return f"{self.seals}/{name.batch_id:012d}-{name.plan}-{name.attempt:012d}.json"

    @property
    def commits(self) -> str:
        return f"{self.folder}/committed"

    def commit(self, batch_id: int) -> str:
        return f"{self.commits}/{batch_id:012d}.json"


def _put_flow(path: str, content: bytes) -> Flow[bytes]:
    """Put a file if absent; returns what is there, durable."""
    for attempt in range(1, TRIES_MAX + 1):
        try:
            if (yield PutIfAbsent(path, content)):
                return content
            return (yield from read_whole(path))
        except AmbiguousWriteError:
            if attempt == TRIES_MAX:
                raise
    raise AssertionError


def _numbers_flow(folder: str) -> Flow[list[int]]:
    names: list[str] = yield ListFolder(folder)
    return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal())


def _sealed_flow(paths: QueryPaths) -> Flow[list[SealName]]:
    """The seals that are there, by batch and attempt."""
    names: list[str] = yield ListFolder(paths.seals)
    parts = [name[:-5].split("-") for name in names if name.endswith(".json")]
    found = [SealName(int(part[0]), part[1], int(part[2])) for part in parts if len(part) == 3 and (part[0] + part[2]).isdecimal()]
    return sorted(found, key=lambda name: (name.batch_id, name.attempt))


def claim_attempt_flow(paths: QueryPaths, nonce: str) -> Flow[int]:
    """Number this start of the query: 1, 2, 3 ..., each given once."""
    content = msgspec.json.encode({"version": BATCH_VERSION, "nonce": nonce})
    numbers = yield from _numbers_flow(f"{paths.folder}/attempts")
    number = max(numbers, default=0) + 1
    while (yield from _put_flow(paths.attempt(number), content)) != content:
        number += 1
    return number


def _read_flow(path: str, kind: type[S]) -> Flow[S]:
    what = "a record of a query's batch"
    return decode_versioned((yield from read_whole(path)), kind, path, supported=BATCH_VERSION, what=what)


@dataclass(slots=True)
class QueryState:
    """What is stored of a query's sink, and is known of its target."""

    seals: dict[SealName, BatchSeal]
    """Of batches that may have to be committed, and of the last one that was."""
    known: CommitPosition | None


def read_state_flow(paths: QueryPaths) -> Flow[QueryState]:
    """What earlier attempts stored. Raises CorruptStateError, UnsupportedVersionError."""
    committed = yield from _numbers_flow(paths.commits)
    known = (yield from _read_flow(paths.commit(committed[-1]), BatchCommitted)).position if committed else None
    seals = {}
    for name in (yield from _sealed_flow(paths)):
        seals[name] = yield from _read_flow(paths.seal(name), BatchSeal)
    return QueryState(seals, known)


class QueryBatches:
    """One attempt of one query at one sink. Its flows run one at a time, on a port of the target."""

    def __init__(self, paths: QueryPaths, folder: str, nonce: str, place: str, rows_max: int | None) -> None:
        self.paths = paths
        self._folder = folder
        self._nonce = nonce
        self._place = place
        self._rows_max = rows_max
        self._state = QueryState({}, None)
        self._position: CommitPosition | None = None
        self._at_hand: SealName | None = None
        """Seal of the batch that is run; None: it has no rows, or none yet."""
        self.attempt = 0
        """0: it has not begun."""

    def begin(self) -> Flow[None]:
        """Take the target over from earlier attempts. Raises what `CommitOwner.take` does."""
        attempt = yield from claim_attempt_flow(self.paths, self._nonce)
        state = yield from read_state_flow(self.paths)
        flows = self._flows(attempt, state)
        self._position = yield from begin_flow(self.paths, flows, state.known)
        self._state, self.attempt = state, attempt

    def _flows(self, attempt: int, state: QueryState) -> TargetFlows:
        owner = CommitOwner(
            sink_id=self.paths.sink_id,
            job_id=self.paths.job_id,
            attempt=attempt,
            nonce=self._nonce,
            known=state.known,
            pending=tuple(_mark(self._staged(seal)) for _, seal in sorted(state.seals.items())),
            restored_checkpoint_id=max((name.batch_id + 1 for name in state.seals), default=0),
            place=self._place,
            line="" if self._position is None else self._position.line,
        )
        return TargetFlows(self.paths.target, owner)

    def _staged(self, seal: BatchSeal) -> StagedCheckpoint:
        return StagedCheckpoint(seal.batch_id + 1, self._folder, seal.files)

    def look_up(self, batch_id: int, plan: str) -> Flow[bool]:
        """Whether the batch has its rows already: they are committed, or sealed, and not to be staged once more.

        plan: as `BatchSeal.plan`. Raises OutputMayRepeatError for a batch whose id was committed with other records."""
        assert self._position is not None
        position, number = self._position, batch_id + 1
        self._at_hand = None
        named = [name for name in self._state.seals if (name.batch_id, name.plan) == (batch_id, plan)]
        if position.checkpoint_id >= number:
            began = [name for name in named if self._staged(self._state.seals[name]).tag == position.tag]
            if position.checkpoint_id > number or not began:
                raise self._may_repeat(batch_id, position)
            self._at_hand = began[0]
            return True
        for name in named:  # a seal whose rows are gone was put late: they were cleared away, and its attempt is fenced
            files = tuple(file.name for file in self._state.seals[name].files)
            missing: Any = FindMissing(self.paths.target, self._folder, files)
            if not (yield missing):
                self._at_hand = name
                return True
        return False

    def _may_repeat(self, batch_id: int, position: CommitPosition) -> OutputMayRepeatError:
        return OutputMayRepeatError(
            f"sink {self.paths.sink_id}: batch {batch_id} of query {self.paths.job_id} comes with other records than those "
            f"that are committed, up to batch {position.checkpoint_id - 1}. Was the query's checkpoint put back? Put it right, "
            "or start the query with a new checkpoint and another sink_id",
            sink=self.paths.sink_id,
            restored=batch_id,
            committed=position.checkpoint_id - 1,
        )

    def seal(self, batch_id: int, plan: str, files: tuple[StagedFile, ...]) -> Flow[None]:
        """Fix the rows of a batch that has none, before a row is committed. A batch without rows has no seal, and no commit."""
        if files:
            name = SealName(batch_id, plan, self.attempt)
            path, seal = self.paths.seal(name), BatchSeal(BATCH_VERSION, batch_id, plan, files)
            content = msgspec.json.encode(seal)
            if (yield from _put_flow(path, content)) != content:
                raise InvariantError(f"{path} exists with other content: attempts of a query are numbered once", path=path)
            self._state.seals[name] = seal
            self._at_hand = name

    def commit(self, batch_id: int) -> Flow[None]:
        """Commit the rows of the batch that was looked up, if any; then forget what is not needed any more."""
        if self._at_hand is not None:
            assert self._position is not None
            flows, staged = self._flows(self.attempt, self._state), self._staged(self._state.seals[self._at_hand])
            self._position = yield from flows.commit(self._position, [staged], self._rows_max)
            self._state.known = self._position
            content = msgspec.json.encode(BatchCommitted(BATCH_VERSION, batch_id, self._position))
            yield from _put_flow(self.paths.commit(batch_id), content)
        yield from self._forget(batch_id)

    def _forget(self, batch_id: int) -> Flow[None]:
        """Delete staged files of this attempt and of earlier ones, and records before the last that committed rows. What can't be
        deleted now is deleted behind a later batch."""
        later = {file.name for name, seal in self._state.seals.items() if name.batch_id > batch_id for file in seal.files}
        try:
            files: list[str] = yield ListFolder(self.paths.staged_folder)
            yield from delete_files(self.paths.staged(file) for file in files if self._is_over(file) and file not in later)
            old = self._old((yield from _sealed_flow(self.paths)), batch_id)
            yield from delete_files(self.paths.seal(name) for name in old)
            committed = (yield from _numbers_flow(self.paths.commits))[:-1]
            yield from delete_files(self.paths.commit(number) for number in committed if number < batch_id)
        except StorageUnavailableError:
            return
        for name in old:
            self._state.seals.pop(name, None)

    def _old(self, seals: Sequence[SealName], batch_id: int) -> list[SealName]:
        """Those of a batch that is done, but for the one that was committed, and those before it. Behind a batch without rows the
        last one before it stays."""
        last = max((name.batch_id for name in seals if name.batch_id < batch_id or name == self._at_hand), default=batch_id)
        return [name for name in seals if name.batch_id < last or (name.batch_id == batch_id and name != self._at_hand)]

    def _is_over(self, text: str) -> bool:
        name = parse_name(text)
        return name is not None and name.attempt <= self.attempt


def _mark(staged: StagedCheckpoint) -> CommitMark:
    return CommitMark(staged.checkpoint_id, tag=staged.tag)
