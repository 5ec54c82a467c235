"""The records in a job's directory, decoded once as they appear in the store: claims, decisions, attempts, epochs.

Shared by the checkers; it judges nothing. A decision counts only while its id is claimed: one that a stale leader writes into a
deleted register is an orphan."""

from __future__ import annotations

import functools
import posixpath
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec

from holdfast.barriers.jobgraph import ClaimMode, JobConfig, Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.tunable import apply_settings
from holdfast.chaos.checkers.observations import Lifecycle, Observation, Stored, StoreView, WorldView
from holdfast.coordinator.ha.recorded_job import Decision, decode_decision
from holdfast.coordinator.ha.records import (
    AbortRecord,
    AttemptRecord,
    ClaimRecord,
    ConfigRecord,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    decode_record,
    is_void,
)
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import CLAIM_NAME, METADATA_NAME, parse_checkpoint_name
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata
from holdfast.statebackends.storage import is_absolute_folder, split_folder
from holdfast.statebackends.storage.port import PutIfAbsent

R = TypeVar("R", bound=msgspec.Struct)


_decode_metadata = functools.lru_cache(maxsize=4)(decode_metadata)


@functools.lru_cache(maxsize=4)
def decision_in(content: bytes) -> Decision:
    """The decision in these bytes. Memoised: several checkers decode the same bytes at the same moment."""
    return decode_decision(content, METADATA_NAME, _decode_metadata)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A completed checkpoint or savepoint, as of its decision."""

    checkpoint_id: int
    claim: ClaimRecord
    metadata: SnapshotMetadata
    view: StoreView
    folder: str
    """Relative to the root of the view."""
    content: bytes
    """Content of its `_metadata`."""

    @property
    def kind(self) -> CheckpointKind:
        return self.claim.kind

    @property
    def is_recovery_point(self) -> bool:
        """A job recovers from it, and its notice releases output: any snapshot but a plain savepoint."""
        return self.kind is not CheckpointKind.SAVEPOINT

    def path(self, path: str) -> str:
        """Path in the view of a path relative to the snapshot's folder; shared files lie beside that folder."""
        return posixpath.normpath(join(self.folder, path))

    def location(self, path: str) -> str:
        """Absolute location of a path relative to the snapshot's folder."""
        return join(self.view.root, self.path(path))


@dataclass(frozen=True, slots=True)
class EpochTaken:
    """`leader/<epoch>` was created."""

    epoch: int
    newest: int
    """Highest epoch before it."""


@dataclass(frozen=True, slots=True)
class AttemptRecorded:
    record: AttemptRecord
    newest: int
    """Highest attempt before it."""


@dataclass(frozen=True, slots=True)
class ResultRecorded:
    record: ResultRecord


@dataclass(frozen=True, slots=True)
class Claimed:
    """An id was claimed."""

    checkpoint_id: int
    record: ClaimRecord
    before: ClaimRecord | None
    """First claim that the id ever had; None if this is the first."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision was stored; an orphan if `claim` is None."""

    checkpoint_id: int
    claim: ClaimRecord | None
    snapshot: Snapshot | None
    """The snapshot, of a readable COMPLETED decision that is no orphan."""
    problem: str = ""
    """Why a COMPLETED decision can't be read as a snapshot; empty otherwise."""


@dataclass(frozen=True, slots=True)
class ClaimDropped:
    """The claim of an id was deleted."""

    checkpoint_id: int
    claim: ClaimRecord
    snapshot: Snapshot | None
    """Its snapshot, if it was completed."""


@dataclass(frozen=True, slots=True)
class DecisionDropped:
    """A decision was deleted."""

    checkpoint_id: int
    claim: ClaimRecord | None
    """Claim of the id, which still exists."""


@dataclass(frozen=True, slots=True)
class PowerLost:
    """Storage lost what was not durable. `completed` ids are no longer complete."""

    lost: tuple[Snapshot, ...]


Change: TypeAlias = EpochTaken | AttemptRecorded | ResultRecorded | Claimed | Decided | ClaimDropped | DecisionDropped | PowerLost


def join(*parts: str) -> str:
    """One location from its parts."""
    return "/".join([part.rstrip("/") for part in parts if part])


def folder_asked(submission: Submission) -> str | None:
    """The folder of the snapshot that a submission names by its path."""
    restore = submission.restore
    return restore.rstrip("/").removesuffix(f"/{METADATA_NAME}") if restore is not None and "/" in restore else None


class JobLedger:
    """Records of one job, shared by the checkers of one run. The first checker that asks for an observation's changes makes the
    ledger apply it."""

    def __init__(self, world: WorldView) -> None:
        self._world = world
        self._root = world.state.root
        self._prefix = f"{world.job_id}/"
        self._last: Observation | None = None
        self._changes: tuple[Change, ...] = ()
        self.newest_epoch = 0
        self.newest_attempt = 0
        self.submissions: dict[int, SubmissionRecord] = {}
        self.attempts: dict[int, AttemptRecord] = {}
        self.results: dict[int, ResultRecord] = {}
        self.configs: dict[int, ConfigRecord] = {}
        """Changed settings, by number; one that came too late to count is among them."""
        self.claims: dict[int, ClaimRecord] = {}
        """Claims that exist, but for those in `_alone`."""
        self._alone: dict[int, ClaimRecord] = {}
        """Claims of dropped ids that came back without their decision: no checkpoint unless that comes back, too."""
        self.first_claims: dict[int, ClaimRecord] = {}
        """First claim of every id that was ever claimed."""
        self.completed: dict[int, Snapshot] = {}
        """Every completed id, in the order of decisions; never removed."""
        self.aborted: set[int] = set()
        """Every aborted id; never removed."""
        self.given: set[str] = set()
        """Folders of snapshots that a user asked the job to own (CLAIM); the job may have refused."""
        self._givers: dict[str, set[str]] = {}
        """Folder of `given` -> nonces of the drivers that asked."""
        self._decisions: dict[int, bytes] = {}
        """Decisions of ids that are claimed, or that were decided before their claim became visible."""

    def asked(self, submission: Submission) -> None:
        """Take a driver's request to submit."""
        folder = folder_asked(submission)
        if folder is not None and submission.claim_mode is ClaimMode.CLAIM:
            self.given.add(folder)
            self._givers.setdefault(folder, set()).add(submission.driver_nonce)

    # -------------------------------------------------------------------------------------------------------- questions

    def view_of(self, folder: str) -> tuple[StoreView, str]:
        """The store of a snapshot's folder, and the folder in it."""
        if not is_absolute_folder(folder):
            return self._world.state, folder
        parent, name = split_folder(folder)
        return self._world.store(parent or "/"), name

    def exists(self, location: str) -> bool:
        """Whether there is a file at a location: absolute, or relative to the state directory."""
        if not is_absolute_folder(location):
            return self._world.state.size(location) is not None
        parent, _, name = location.rpartition("/")
        return self._world.store(parent or "/").size(name) is not None

    def stands(self, number: int) -> bool:
        """Whether an id is completed and not dropped: claimed by its original claim, not by a stale leader's later one."""
        snapshot = self.completed.get(number)
        return snapshot is not None and self.claims.get(number) == snapshot.claim

    def is_subsumed(self, number: int) -> bool:
        """Whether a submission claimed a savepoint and has completed a checkpoint of its own since: the job may delete it."""
        snapshot = self.completed.get(number)
        if snapshot is None or snapshot.claim.folder not in self.given:
            return False
        bases = [(record.base, record.first_checkpoint_id) for record in self.submissions.values()]
        firsts = [first for base, first in bases if base is not None and base.claim and base.folder == snapshot.claim.folder]
        newest = max((other for other, each in self.completed.items() if each.is_recovery_point), default=0)
        return any(newest >= first for first in firsts)

    def took(self, folder: str) -> bool:
        """Whether a submission on record is of a user who gave this snapshot; a refused submission has no record."""
        nonces = {record.submission.driver_nonce for record in self.submissions.values()}
        return not nonces.isdisjoint(self._givers.get(folder, ()))

    def configs_of(self, submission: int, submitted: JobConfig) -> dict[int, JobConfig]:
        """Number of a record -> the settings that it makes hold for a submission; 0: as submitted. Which of them holds is not
        said."""
        found = {0: submitted}
        for number, record in self.configs.items():
            if record.submission == submission:
                found[number] = apply_settings(submitted, record.settings)
        return found

    def abort_record(self, number: int) -> AbortRecord | None:
        """Content of an aborted id's register; None if it is gone."""
        content = self._decisions.get(number)
        decision = None if content is None else decision_in(content)
        return decision if isinstance(decision, AbortRecord) else None

    @property
    def released(self) -> int:
        """Highest id whose output may be visible, 0 for none."""
        return max((number for number, each in self.completed.items() if each.is_recovery_point), default=0)

    def recovery_point(self, submission: int) -> int | None:
        """Id from which a submission must recover now; None if its record has not been seen."""
        record = self.submissions.get(submission)
        if record is None:
            return None
        own = [
            number
            for number, each in self.completed.items()
            if each.is_recovery_point and number >= record.first_checkpoint_id and self.stands(number)
        ]
        return max(own, default=record.base.checkpoint_id if record.base is not None else 0)

    # ---------------------------------------------------------------------------------------------------------- changes

    def changes(self, observation: Observation) -> tuple[Change, ...]:
        """Changes of the job's records by an observation; the same list for every checker that asks."""
        if observation is not self._last:  # a score of checkers ask about each, most of which change nothing
            self._last = observation
            self._changes = self._changes_by(observation)
        return self._changes

    def _changes_by(self, observation: Observation) -> tuple[Change, ...]:
        if isinstance(observation, Stored):
            touches = (observation.added or observation.removed) and observation.root == self._root
            return self._stored(observation) if touches else ()
        is_loss = isinstance(observation, Lifecycle) and observation.change == "power_loss"
        return (self._power_lost(),) if is_loss else ()

    def _stored(self, fact: Stored) -> tuple[Change, ...]:
        changes: list[Change] = []
        for path in sorted(fact.removed):  # a claim before its decision
            if path.startswith(self._prefix):
                self._removed(path, changes)
        for path in fact.added:
            if path.startswith(self._prefix):
                self._added(path, fact, changes)
        return tuple(changes)

    def _removed(self, path: str, changes: list[Change]) -> None:
        folder, _, name = path[len(self._prefix) :].partition("/")
        number = parse_checkpoint_name(folder)
        if number is None:
            return
        if name == CLAIM_NAME:
            claim = self.claims.pop(number, None)
            self._alone.pop(number, None)
            if claim is not None:
                completed = self.completed.get(number) if number in self._decisions else None
                changes.append(ClaimDropped(number, claim, completed))
        elif name == METADATA_NAME and self._decisions.pop(number, None) is not None:
            changes.append(DecisionDropped(number, self.claims.get(number)))

    def _added(self, path: str, fact: Stored, changes: list[Change]) -> None:
        folder, _, name = path[len(self._prefix) :].partition("/")
        number = parse_checkpoint_name(folder)
        if number is not None:
            if name == CLAIM_NAME:
                self._claimed(number, decode_record(ClaimRecord, self._content(path, fact), path), fact, changes)
            elif name == METADATA_NAME:
                self._decided(number, self._content(path, fact), changes)
            return
        stem = name.removesuffix(".json")
        if not stem.isdecimal():
            return
        match folder:
            case "leader":
                changes.append(EpochTaken(int(stem), self.newest_epoch))
                self.newest_epoch = max(self.newest_epoch, int(stem))
            case "attempts":
                attempt = decode_record(AttemptRecord, self._content(path, fact), path)
                changes.append(AttemptRecorded(attempt, self.newest_attempt))
                self.attempts[int(stem)] = attempt
                self.newest_attempt = max(self.newest_attempt, int(stem))
            case "submissions":
                if not is_void(content := self._content(path, fact)):
                    self.submissions[int(stem)] = decode_record(SubmissionRecord, content, path)
            case "config":
                self.configs[int(stem)] = decode_record(ConfigRecord, self._content(path, fact), path)
            case "results":
                self.results[int(stem)] = decode_record(ResultRecord, self._content(path, fact), path)
                changes.append(ResultRecorded(self.results[int(stem)]))

    def _content(self, path: str, fact: Stored) -> bytes:
        if isinstance(fact.operation, PutIfAbsent):
            return bytes(fact.operation.data)
        return self._world.state.peek(path) or b""

    def _claimed(self, number: int, record: ClaimRecord, fact: Stored, changes: list[Change]) -> None:
        before = self.first_claims.get(number)
        if before is not None and before.nonce == record.nonce:
            is_late = fact.fate == "late"
            if number not in self.claims and (is_late or (before == record and record.epoch < self.newest_epoch)):
                # of a leader that asked for it twice, and slept or was not heard in between: behind the deletion, an orphan
                if not self._is_completed(number):
                    self._alone[number] = record
                    return
                before = record
            if is_late:
                before = record
        self.first_claims.setdefault(number, record)
        self.claims[number] = record
        changes.append(Claimed(number, record, before))

    def _is_completed(self, number: int) -> bool:
        """Whether the register of an id that was completed holds a decision, and not one that a later leader wrote into it."""
        content = self._decisions.get(number)
        return number in self.completed and content is not None and not isinstance(decision_in(content), AbortRecord)

    def _decided(self, number: int, content: bytes, changes: list[Change]) -> None:
        self._decisions[number] = content
        decision = decision_in(content)
        if number in self._alone and not isinstance(decision, AbortRecord):
            self.claims[number] = self._alone.pop(number)
        claim = self.claims.get(number)
        if isinstance(decision, AbortRecord) and number not in self.completed:
            self.aborted.add(number)  # else an orphan, in a register that was deleted
        if isinstance(decision, AbortRecord) or claim is None:
            changes.append(Decided(number, claim, None))
            return
        try:
            snapshot = self._snapshot(number, claim, content, decision.folder if isinstance(decision, SavepointRecord) else None)
        except HoldfastError as error:
            changes.append(Decided(number, claim, None, str(error)))
            return
        self.completed[number] = snapshot
        changes.append(Decided(number, claim, snapshot))

    def _snapshot(self, number: int, claim: ClaimRecord, content: bytes, folder: str | None) -> Snapshot:
        """Decode a snapshot. Raises CorruptStateError and its subclasses."""
        view, relative = self.view_of(claim.folder if folder is None else folder)
        path = f"{relative}/{METADATA_NAME}"
        found = content if folder is None else view.peek(path) or b""
        return Snapshot(number, claim, _decode_metadata(found, METADATA_NAME if folder is None else path), view, relative, found)

    # ------------------------------------------------------------------------------------------------------- power loss

    def _power_lost(self) -> PowerLost:
        """Read every record again: names that were not durable may be gone."""
        view = self._world.state
        self._alone.clear()
        for number in list(self.claims):
            if view.size(f"{self._prefix}chk-{number}/{CLAIM_NAME}") is None:
                del self.claims[number]
                self.first_claims.pop(number, None)
        lost = []
        for number in list(self._decisions):
            if view.size(f"{self._prefix}chk-{number}/{METADATA_NAME}") is None:
                del self._decisions[number]
                self.aborted.discard(number)
                if number in self.completed:
                    lost.append(self.completed.pop(number))
        epochs = (path.rpartition("/")[2] for path in view.paths(f"{self._prefix}leader"))
        self.newest_epoch = max((int(name) for name in epochs if name.isdecimal()), default=0)
        self._forget(self.attempts, "attempts")
        self._forget(self.submissions, "submissions")
        self._forget(self.results, "results")
        self._forget(self.configs, "config")
        self.newest_attempt = max(self.attempts, default=0)
        self._come_back()
        return PowerLost(tuple(lost))

    def _forget(self, records: dict[int, R], folder: str) -> None:
        for number in list(records):
            if self._world.state.size(f"{self._prefix}{folder}/{number}.json") is None:
                del records[number]

    def _come_back(self) -> None:
        """A deletion that was not durable is undone: the id is claimed, or decided, as before."""
        view = self._world.state
        for number in self.first_claims:
            decision = view.peek(f"{self._prefix}chk-{number}/{METADATA_NAME}")
            if number not in self._decisions and decision is not None:
                self._decisions[number] = decision
            path = f"{self._prefix}chk-{number}/{CLAIM_NAME}"
            if number in self.claims or (content := view.peek(path)) is None:
                continue
            with suppress(HoldfastError):
                record = decode_record(ClaimRecord, content, path)
                # alone: of a request that came late, behind the deletion, whether or not a leader has aborted it since
                is_alone = number in self.completed and not self._is_completed(number)
                (self._alone if is_alone else self.claims)[number] = record
