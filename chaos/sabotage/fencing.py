"""Mistakes of fencing: older attempts, older leaders, and reused ids."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

import holdfast.coordinator.dispatcher.storage_effects as effects_module
import holdfast.coordinator.ha.recovery as recovery_module
import holdfast.coordinator.ha.store as store_module
import holdfast.coordinator.jobmaster.slots as slots_module
import holdfast.coordinator.restore.resolve as resolve_module
from holdfast.barriers.messages import AckStatus, DeclineCheckpoint, FailureReason, RegisterWorker
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant, throughout
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.coordinator.checkpoints.pending import PendingStatus
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedCheckpoint, RecordedJob, derive_latest
from holdfast.coordinator.ha.records import AbortRecord, RestorePoint
from holdfast.coordinator.jobmaster.slots import SlotPool, Verdict
from holdfast.coordinator.jobmaster.standbys import Standbys
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow, PutIfAbsent


def _forgets_aborted(job: RecordedJob) -> tuple[RecordedCheckpoint, ...]:
    """Deletes every aborted id, those above the newest complete one, too: the next claim takes them for new."""
    return (*job.with_fact(CheckpointFact.ORPHANED), *job.with_fact(CheckpointFact.ABORTED))


def _leaves_old_attempt_pending(original: Any) -> Any:
    def abort_all(self: CheckpointCoordinator, reason: FailureReason, message: str) -> None:
        if reason is not FailureReason.JOB_FAILOVER:
            original(self, reason, message)

    return abort_all


def _does_not_wait(original: Any) -> Any:
    def is_quiet(self: CheckpointCoordinator) -> bool:
        aborting = any(pending.status is PendingStatus.ABORTING for pending in self.pending)
        return not aborting and self._preparing is None

    return property(is_quiet)


def _wins_always(path: str, content: bytes, read: Any = None) -> Flow[bytes]:
    yield PutIfAbsent(path, content)
    return content


def _writes_again(original: Any) -> Any:
    def make_durable(path: str, read: Any = read_whole) -> Flow[bytes]:
        content: bytes = yield from original(path, read)
        yield PutIfAbsent(path, content)
        return content

    return make_durable


def _looks_away(original: Any) -> Any:
    def check_leadership(paths: JobPaths, epoch: int) -> Flow[None]:
        yield from ()

    return check_leadership


def _decides_nothing(original: Any) -> Any:
    def abort_checkpoint(paths: JobPaths, record: AbortRecord) -> Flow[None]:
        yield from ()

    return abort_checkpoint


def _takes_any_decline(original: Any) -> Any:
    def decline(self: CheckpointCoordinator, decline: DeclineCheckpoint, slot: int) -> AckStatus:
        for pending in self.pending:
            if pending.status is PendingStatus.AWAITING_ACKS:
                decline = msgspec.structs.replace(decline, checkpoint_id=pending.checkpoint_id, attempt=pending.attempt)
        status: AckStatus = original(self, decline, slot)
        return status

    return decline


def _finds_the_newest(original: Any) -> Any:
    """Starts from the newest checkpoint of the job, if it has one, whatever path is named."""

    def resolve(job: RecordedJob, submission: Any) -> Flow[RestorePoint | None]:
        named: RestorePoint | None = yield from original(job, submission)
        return derive_latest(job) or named

    return resolve


def _forgets_who_was_started(original: Any) -> Any:
    """Accepts the proof of any worker of the submission: some slot and spawn fit it."""

    def is_launched(key: str, token: str, *, slot: int, spawn: int, **numbers: Any) -> bool:
        places = itertools.product(range(SLOTS_TRIED), range(spawn + 1))
        return any(original(key, token, slot=place, spawn=number, **numbers) for place, number in places)

    return is_launched


def _gives_away_what_is_held(original: Any) -> Any:
    def settle(self: Standbys, *, replaces: bool, reconciles: bool) -> None:
        original(self, replaces=replaces, reconciles=reconciles)
        for slot in self._slots.slots:
            if slot.holder is not None and slot.holder.seat < 0 and slot.index not in self._promises:
                self._give(slot, slot.holder)

    return settle


def _lets_in_what_stood_by(original: Any) -> Any:
    def check_registration(self: SlotPool, message: RegisterWorker) -> Verdict:
        return Verdict.RECONNECT if message.seat >= 0 else original(self, message)

    return check_registration


SLOTS_TRIED = 8
"""More slots than a simulated job has."""


_CLAIM_IS_DURABLE = "coordinator.recovering.SyncFile.claim.done"

SABOTAGES = (
    Sabotage(
        "trusted_registrations",
        "any process that registers for a worker's slot gets it",
        ("I15",),
        (Mutant(slots_module, "is_launched", constant(True)),),
        plan=(Fault("forged_registration", "workers", at_ms=400),),
    ),
    Sabotage(
        "borrowed_proof",
        "a launcher's proof of one worker holds for every slot and every later worker of its submission",
        ("I15",),
        (Mutant(slots_module, "is_launched", _forgets_who_was_started),),
        plan=(Fault("forged_registration", "workers", at_ms=400),),
    ),
    Sabotage(
        "standby_in_a_living_slot",
        "a worker that stood by takes the slot of one that lives, and gets its tasks",
        ("I15",),
        (
            Mutant(Standbys, "settle", _gives_away_what_is_held),
            Mutant(SlotPool, "check_registration", _lets_in_what_stood_by),
        ),
    ),
    Sabotage(
        "reused_id",
        "a new leader deletes the registers of aborted ids, and takes those ids again",
        ("I12",),
        (Mutant(recovery_module, "derive_garbage", lambda original: _forgets_aborted),),
        kinds=("crashes", "zombies", "power_loss"),
    ),
    Sabotage(
        "stale_acks",
        "acknowledgements of an attempt that was fenced still complete its checkpoint",
        ("I15", "I16"),
        (
            Mutant(CheckpointCoordinator, "_abort_all", _leaves_old_attempt_pending),
            Mutant(CheckpointCoordinator, "is_quiet", _does_not_wait),
        ),
        workloads=("windows",),
        plan=(
            throughout("delay", "acks", amount=400, probability=0.3),
            *(Fault("user_error", at_ms=ms) for ms in (400, 700, 1_000)),
        ),
    ),
    Sabotage(
        "foreign_decline",
        "a decline aborts the pending checkpoint, whatever checkpoint and attempt it is of",
        ("I15",),
        (Mutant(CheckpointCoordinator, "_decline", _takes_any_decline),),
        workloads=("windows", "timers", "aggregate", "fanout"),
        plan=(
            throughout("store_fails", "worker:WriteFile", probability=0.2),
            throughout("delay", "acks", amount=400, probability=0.3),
        ),
    ),
    Sabotage(
        "unnamed_base",
        "a job that is started from a savepoint by its path begins at the newest one that it has",
        ("I16",),
        (Mutant(resolve_module, "_resolve", _finds_the_newest),),
        kinds=("restore", "drain"),
    ),
    Sabotage(
        "loser_goes_on",
        "a leader that finds another decision in an id's register, or a newer leader, continues as if it had won",
        ("I12", "I14", "I15"),
        (
            Mutant(store_module, "put_once", lambda original: _wins_always),
            Mutant(effects_module, "check_leadership", _looks_away),
        ),
        kinds=("zombies",),
    ),
    Sabotage(
        "unsettled_takeover",
        "a new leader leaves the ids undecided that its predecessor had claimed",
        ("I13", "I15"),
        (Mutant(recovery_module, "abort_checkpoint", _decides_nothing),),
        kinds=("crashes", "zombies"),
    ),
    Sabotage(
        "found_written_again",
        "a new leader makes a record durable by writing what it read, also when the record was deleted meanwhile",
        ("I11",),
        (Mutant(recovery_module, "make_durable", _writes_again),),
        workloads=("counter",),
        plan=(
            Fault("kill_coordinator", at_ms=500, amount=1),
            Fault("second_coordinator", on=_CLAIM_IS_DURABLE, duration_ms=9_000),
            Fault("pause_coordinator", on=_CLAIM_IS_DURABLE, duration_ms=900),
            Fault("store_partial", "coordinator:DeleteFolder", at_ms=600, duration_ms=4_000),
        ),
        backend="filesystem",
    ),
)
