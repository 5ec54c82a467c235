"""CORE: batches of a stock Spark query, each committed to a sink once: what is stored beside its checkpoint, and the flows.

    <checkpoint>/holdfast/<query id>/sinks/<sink id>/attempts/<n>.json     each start of the query; the highest may commit
                                                     /staged/<name>        rows that tasks wrote, for a target
                                                     /batches/<id>-<plan>-<attempt>.json   the staged files of a batch, sealed
                                                     /committed/<id>.json  position of the output behind a batch

Spark runs a batch again until it has stored that the batch is done: with the same records, but in other tasks, so that rows are in
other files and in another order. A batch of which a row is committed is therefore what its seal says: the position has the seal's
tag. What an attempt seals late, behind the start of its successor, is another file, and is never committed. Batch n is checkpoint
n + 1 of a job whose id is the query's. Where the rows go is in `query_outputs`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from holdfast.barriers.sinks.log import LogPosition, StagedFile
from holdfast.barriers.sinks.staged import CommitPosition, StagedCheckpoint
from holdfast.operators.sinks.targets.staging import StagingPaths
from holdfast.statebackends.decoding import decode_versioned
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    FencedError,
    InputChangedError,
    InvariantError,
    ObjectMissingError,
    OutputMayRepeatError,
    StorageUnavailableError,
)
from holdfast.statebackends.storage.flows import delete_files, read_whole
from holdfast.statebackends.storage.port import Flow, ListFolder, PutIfAbsent

BATCH_VERSION = 1
FOLDER = "holdfast"
"""Below a query's checkpoint folder."""
TRIES_MAX = 6
"""Ambiguous answers in a row to one write; reads of records that another start changes meanwhile."""
ATTEMPTS_KEPT = 16
"""Numbers of starts that stay: a query that is started each minute starts often."""


class BatchSeal(msgspec.Struct, frozen=True):
    """The rows of a batch."""

    version: int
    batch_id: int
    plan: str
    """Digest of the offsets that Spark had stored for the batch, in hex: those of another batch with this id differ."""
    files: tuple[StagedFile, ...]

    def staged(self, folder: str) -> StagedCheckpoint:
        """`folder`: location of the files."""
        return StagedCheckpoint(self.batch_id + 1, folder, self.files)

    @property
    def tag(self) -> str:
        """As `CommitMark.tag`."""
        return self.staged("").tag


class BatchCommitted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A batch whose rows are committed, and how far the output had then got."""

    version: int
    batch_id: int
    position: CommitPosition
    log: LogPosition | None = None
    """Of a file sink: how far its log was known."""


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

    @property
    def attempts(self) -> str:
        return f"{self.folder}/attempts"

    def attempt(self, number: int) -> str:
        return f"{self.attempts}/{number:012d}.json"

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


def claim_attempt_flow(paths: QueryPaths, nonce: str, *, again: bool = False) -> Flow[int]:
    """Number this start of the query: 1, 2, 3 ..., each given once. again: it may have a number, which is its own if no later start
    has one: else FencedError. So it is for a number that was free because those around it are not kept any more."""
    content = msgspec.json.encode({"version": BATCH_VERSION, "nonce": nonce})
    numbers = yield from _numbers_flow(paths.attempts)
    number = 0
    for known in reversed(numbers[-ATTEMPTS_KEPT:] if again else []):
        if (yield from _content_flow(paths.attempt(known))) == content:
            number = known
            break
    if not number:
        number = max(numbers, default=0) + 1
        while (yield from _put_flow(paths.attempt(number), content)) != content:
            number += 1
    yield from check_newest_flow(paths, number)
    with contextlib.suppress(StorageUnavailableError):  # the next start does it
        yield from delete_files(paths.attempt(old) for old in numbers if old <= number - ATTEMPTS_KEPT)
    return number


def check_newest_flow(paths: QueryPaths, number: int) -> Flow[None]:
    """Raise FencedError if a later start has a number."""
    newest = max((yield from _numbers_flow(paths.attempts)), default=0)
    if newest > number:
        raise FencedError(
            f"sink {paths.sink_id}: start {number} of query {paths.job_id} was replaced by start {newest}",
            sink=paths.sink_id,
            owner=paths.job_id,
            job_id=paths.job_id,
            held=number,
            newer=newest,
        )


def _content_flow(path: str) -> Flow[bytes | None]:
    try:
        return (yield from read_whole(path))
    except ObjectMissingError:
        return None


def _read_flow(path: str, kind: type[S]) -> Flow[S]:
    what = "a record of a query's batch"
    return decode_versioned((yield from read_whole(path)), kind, path, supported=BATCH_VERSION, what=what)


@dataclass(slots=True)
class QueryState:
    """What is stored of a query's sink, and is known of its output."""

    seals: dict[SealName, BatchSeal]
    """Of batches that may have to be committed, and of the last one that was."""
    known: CommitPosition | None
    log: LogPosition | None = None

    @property
    def sealed(self) -> list[BatchSeal]:
        """By batch and attempt."""
        return [self.seals[name] for name in sorted(self.seals, key=lambda name: (name.batch_id, name.attempt))]


def read_state_flow(paths: QueryPaths) -> Flow[QueryState]:
    """What earlier attempts stored. Raises CorruptStateError, UnsupportedVersionError."""
    for attempt in range(1, TRIES_MAX + 1):
        try:
            return (yield from _state_flow(paths))
        except ObjectMissingError:  # an older start, which is not fenced yet, goes on and forgets
            if attempt == TRIES_MAX:
                raise
    raise AssertionError


def _state_flow(paths: QueryPaths) -> Flow[QueryState]:
    last = yield from _last_committed_flow(paths)
    seals = {}
    for name in (yield from _sealed_flow(paths)):
        seals[name] = yield from _read_flow(paths.seal(name), BatchSeal)
    return QueryState(seals, None, None) if last is None else QueryState(seals, last.position, last.log)


def _last_committed_flow(paths: QueryPaths) -> Flow[BatchCommitted | None]:
    committed = yield from _numbers_flow(paths.commits)
    return (yield from _read_flow(paths.commit(committed[-1]), BatchCommitted)) if committed else None


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a query."""

    attempt: int
    nonce: str


class BatchOutput(Protocol):
    """Where the rows of a query's batches go. Its flows run on a port of its own."""

    def begin(self, start: Start, state: QueryState) -> Flow[CommitPosition]:
        """Take the output over from earlier starts; how far it is committed. Raises FencedError, OutputMayRepeatError,
        CommitPositionLostError."""

    def commit(self, start: Start, state: QueryState, position: CommitPosition, seal: BatchSeal) -> Flow[CommitPosition]:
        """Commit all rows of a batch that are not committed, once, however often it is called; the position then."""

    def has_lost(self, seal: BatchSeal) -> Flow[bool]:
        """Whether a staged file of a batch that is not committed is gone."""

    def clear(self, start: Start, kept: frozenset[str], last: int | None) -> Flow[None]:
        """Delete files that this start and earlier ones of the query staged, except for these, and, with `last`, those of higher
        checkpoints."""

    @property
    def log(self) -> LogPosition | None:
        """How far the log of a file sink is known."""


class QueryBatches:
    """One attempt of one query at one sink. Its flows run one at a time, on a port of the output."""

    def __init__(self, paths: QueryPaths, nonce: str, output: BatchOutput, *, is_run: bool = False) -> None:
        """is_run: the nonce is Spark's id of the run, which may have begun in another process; tasks stage rows without knowing the
        number of their start."""
        self.paths = paths
        self._nonce = nonce
        self._output = output
        self._is_run = is_run
        self._state = QueryState({}, None)
        self._position: CommitPosition | None = None
        self._at_hand: SealName | None = None
        """Seal of the batch that is run; None: it has no rows, or none yet."""
        self.attempt = 0
        """0: it has not begun."""

    def begin(self, batch_id: int, plan: str) -> Flow[None]:
        """Take the output over from earlier attempts, to go on with this batch, as of `look_up`. One that comes with a batch that
        others have left behind takes nothing from them. Raises what `BatchOutput.begin` does, and InputChangedError where Spark has
        left a batch behind that was sealed, and is not committed."""
        self._check_new((yield from read_state_flow(self.paths)), batch_id, plan)
        attempt = yield from claim_attempt_flow(self.paths, self._nonce, again=self._is_run)
        start = Start(attempt, self._nonce)
        state = yield from read_state_flow(self.paths)
        position = yield from self._take(start, state)
        yield from self._check_skipped(self._state, position, batch_id)
        self._position, self.attempt = position, attempt

    def _take(self, start: Start, state: QueryState) -> Flow[CommitPosition]:
        """Take the output over, with what is stored then."""
        for tries in range(1, TRIES_MAX + 1):
            yield from check_newest_flow(self.paths, start.attempt)
            try:
                position = yield from self._output.begin(start, state)
            except OutputMayRepeatError:  # unless an older start has sealed and committed a batch since that was read
                before, state = state, (yield from read_state_flow(self.paths))
                if state == before or tries == TRIES_MAX:
                    raise
            else:
                self._state = state
                return position
        raise AssertionError

    def _check_new(self, state: QueryState, batch_id: int, plan: str) -> None:
        if state.known is not None:
            self._check_position(state, state.known, batch_id, plan)

    def is_current(self) -> Flow[bool]:
        """Whether no other process has committed a batch since."""
        last = yield from _last_committed_flow(self.paths)
        return (None if last is None else last.position) == self._state.known

    def look_up(self, batch_id: int, plan: str) -> Flow[bool]:
        """Whether the batch has its rows already: they are committed, or sealed, and not to be staged once more.

        plan: as `BatchSeal.plan`. Raises OutputMayRepeatError for a batch whose id was committed with other records."""
        assert self._position is not None
        self._at_hand = self._check_position(self._state, self._position, batch_id, plan)
        if self._at_hand is not None:
            return True
        for name in self._named(self._state, batch_id, plan):
            # A seal whose rows are gone was put late: they were cleared away, and its attempt is fenced.
            if not (yield from self._output.has_lost(self._state.seals[name])):
                self._at_hand = name
                return True
        return False

    @staticmethod
    def _named(state: QueryState, batch_id: int, plan: str) -> list[SealName]:
        return [name for name in state.seals if (name.batch_id, name.plan) == (batch_id, plan)]

    def _check_position(self, state: QueryState, position: CommitPosition, batch_id: int, plan: str) -> SealName | None:
        """The seal of a batch of which rows are committed; None: it has none there. Raises OutputMayRepeatError."""
        if position.checkpoint_id <= batch_id:
            return None
        began = [name for name in self._named(state, batch_id, plan) if state.seals[name].tag == position.tag]
        if position.checkpoint_id > batch_id + 1 or not began:
            raise self._may_repeat(batch_id, position)
        return began[0]

    def _check_skipped(self, state: QueryState, position: CommitPosition, batch_id: int) -> Flow[None]:
        """Rows of an earlier batch that was sealed would be forgotten."""
        for name, seal in state.seals.items():
            if name.batch_id < batch_id and not position.has_all_of(name.batch_id + 1):
                began = position.checkpoint_id == name.batch_id + 1
                if began or not (yield from self._output.has_lost(seal)):
                    path, reason = self.paths.seal(name), f"batch {name.batch_id} has rows that are not committed"
                    raise InputChangedError(
                        f"sink {self.paths.sink_id}: query {self.paths.job_id} comes with batch {batch_id}, and {reason} ({path}). "
                        "Has its checkpoint gone on with another sink? Put it back",
                        operator=self.paths.sink_id,
                        path=path,
                        reason=reason,
                    )

    def _may_repeat(self, batch_id: int, position: CommitPosition) -> OutputMayRepeatError:
        return OutputMayRepeatError(
            f"sink {self.paths.sink_id}: batch {batch_id} of query {self.paths.job_id} comes with other records than those "
            f"that are committed, up to batch {position.checkpoint_id - 1}. Was the query's checkpoint put back? Put it right, "
            "or start the query with a new checkpoint and another sink_id; does the query run elsewhere? It goes on there",
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
            seal = self._state.seals[self._at_hand]
            self._position = yield from self._output.commit(self._start, self._state, self._position, seal)
            self._state.known, self._state.log = self._position, self._output.log
            content = msgspec.json.encode(BatchCommitted(BATCH_VERSION, batch_id, self._position, self._state.log))
            yield from _put_flow(self.paths.commit(batch_id), content)
        yield from self._forget(batch_id)

    def _forget(self, batch_id: int) -> Flow[None]:
        """Delete staged files of this attempt and of earlier ones, and records before the last that committed rows. What can't be
        deleted now is deleted behind a later batch."""
        later = frozenset(file.name for name, seal in self._state.seals.items() if name.batch_id > batch_id for file in seal.files)
        try:
            yield from self._output.clear(self._start, later, batch_id + 1 if self._is_run else None)
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

    @property
    def _start(self) -> Start:
        return Start(self.attempt, self._nonce)
