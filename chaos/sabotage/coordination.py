"""Mistakes of the checkpoint coordinator between a trigger and its decision, and at the end of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

import holdfast.coordinator.dispatcher.storage_effects as storage_effects_module
import holdfast.coordinator.dispatcher.submit as submit_module
import holdfast.coordinator.ha.store as store_module
import holdfast.coordinator.restore.plan as plan_module
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    AckStatus,
    CheckpointKind,
    FailureReason,
    NotifyCheckpointAborted,
    Registered,
    SubtaskKey,
    WorkerCommand,
)
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import THROUGHOUT_MS, Mutant, Sabotage, constant, throughout
from holdfast.coordinator.checkpoints import actions
from holdfast.coordinator.checkpoints.acknowledgements import AcknowledgementValidator
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.coordinator.checkpoints.failures import CheckpointFailureManager
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint, list_files
from holdfast.coordinator.checkpoints.requests import CheckpointRequestDecider, Load, PeriodicSchedule
from holdfast.coordinator.dispatcher.dispatcher import Dispatcher, HostFlow
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import ConfigRecord, SubmissionRecord
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.jobmaster.lifecycle import Lifecycle
from holdfast.coordinator.jobmaster.slots import SlotPool
from holdfast.coordinator.jobmaster.stopping import StopRetries
from holdfast.operators.worker.session import Session
from holdfast.statebackends.errors import AmbiguousWriteError, ObjectMissingError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow, ListFolder, PutIfAbsent


def _notifies_at_once(original: Any) -> Any:
    """Sends notices once all have acknowledged, while the write begins."""

    def write_next(self: CheckpointCoordinator) -> None:
        told = len(self._turn.out)
        original(self)
        for action in self._turn.out[told:]:
            if isinstance(action, actions.WriteMetadata) and action.kind is not CheckpointKind.SAVEPOINT:
                self._turn.out.append(actions.NotifyComplete(action.checkpoint_id, action.attempt, action.timestamp_ms))

    return write_next


def _by_settings_alone(original: Any) -> Any:
    return lambda self, request: self._config.unaligned_checkpoints and request.kind is CheckpointKind.CHECKPOINT


def _lacks_one(original: Any) -> Any:
    return property(lambda self: len(self.acks) >= max(1, len(self.tasks) - 1))


def _counts(original: Any) -> Any:
    """Repeated acknowledgements of a task count for missing ones."""
    return property(lambda self: len(self.acks) + getattr(self, "repeated", 0) >= len(self.tasks))


def _counts_repeats(original: Any) -> Any:
    def acknowledge(self: PendingCheckpoint, ack: AcknowledgeCheckpoint) -> AckStatus:
        task = SubtaskKey(ack.vertex, ack.subtask)
        if self.is_undecided and not self.is_complete and task in self.acks:
            del self.acks[task]
            self.repeated = getattr(self, "repeated", 0) + 1  # type: ignore[attr-defined]
        status: AckStatus = original(self, ack)
        return status

    return acknowledge


def _names_all(self: AcknowledgementValidator, ack: AcknowledgeCheckpoint) -> tuple[str, ...]:
    return list_files(ack)


def _aborts_hastily(original: Any) -> Any:
    """Sends notices of the abort, and deletes the state, while the write begins."""

    def write_aborted(self: CheckpointCoordinator, pending: PendingCheckpoint, reason: Any, message: str) -> None:
        original(self, pending, reason, message)
        if pending.triggered and pending.attempt == self.attempt:
            newest = self.newest
            newest_id = newest.checkpoint_id if newest is not None else 0
            self._turn.out.append(actions.NotifyAborted(pending.checkpoint_id, pending.attempt, newest_id))
        if pending.triggered:
            self._turn.out.append(actions.DiscardState(pending.checkpoint_id, pending.folder))

    return write_aborted


def _takes_ambiguous_for_done(path: str, content: bytes, read: Callable[[str], Flow[bytes]] = read_whole) -> Flow[bytes]:
    try:
        created = yield PutIfAbsent(path, content)
    except AmbiguousWriteError:
        return content
    if created:
        return content
    try:
        return (yield from read(path))
    except ObjectMissingError as error:
        raise AmbiguousWriteError(f"{path} may or may not have been written", path=path) from error


def _subsumes_savepoints(original: Any) -> Any:
    def subsume_below(self: CheckpointCoordinator, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        for pending in self.pending:
            if pending.checkpoint_id < checkpoint_id and pending.is_undecided:
                self._abort(pending, FailureReason.SUBSUMED, f"checkpoint {checkpoint_id} completed")

    return subsume_below


def _notifies_savepoints(original: Any) -> Any:
    def complete(self: CheckpointCoordinator, pending: PendingCheckpoint) -> None:
        original(self, pending)
        if pending.request.kind is CheckpointKind.SAVEPOINT and pending.attempt == self.attempt:
            self._turn.out.append(actions.NotifyComplete(pending.checkpoint_id, pending.attempt, pending.timestamp_ms))

    return complete


def _only_remembers(original: Any) -> Any:
    def write_config(paths: JobPaths, record: ConfigRecord) -> Flow[ConfigRecord]:
        yield from ()
        return record

    return write_config


def _skips_the_final(original: Any) -> Any:
    """When the input has ended, the newest checkpoint, whatever its age, ends the job."""

    def run(self: Lifecycle) -> None:
        execution, point = self.execution, self.restore_point
        if execution is not None and execution.attempt == self.attempt and execution.all_drained and point is not None:
            self.finishing = self.finishing or point.checkpoint_id
        original(self)

    return run


def _keeps_aborts_to_itself(original: Any) -> Any:
    def broadcast(self: SlotPool, command: WorkerCommand) -> None:
        if not isinstance(command, NotifyCheckpointAborted):
            original(self, command)

    return broadcast


def _tells_one_of_aborts(original: Any) -> Any:
    def broadcast(self: SlotPool, command: WorkerCommand) -> None:
        if isinstance(command, NotifyCheckpointAborted):
            self.send(self.slots[0], command)
        else:
            original(self, command)

    return broadcast


def _hears_of_none_when_it_registers(original: Any) -> Any:
    def reconcile(self: Session, registered: Registered) -> Any:
        live = tuple(sorted({*registered.live_checkpoints, *self._open_triggers}))
        return original(self, msgspec.structs.replace(registered, live_checkpoints=live))

    return reconcile


def _knows_no_pause(original: Any) -> Any:
    def following(self: CheckpointRequestDecider, load: Load, now_ms: int) -> Any:
        return original(self, msgspec.structs.replace(load, pause_until_ms=0), now_ms)

    return following


def _forgets_restarts(original: Any) -> Any:
    def derive_setup(job: RecordedJob, record: SubmissionRecord, **options: Any) -> JobSetup:
        setup: JobSetup = original(job, record, **options)
        return msgspec.structs.replace(setup, restarts=0)

    return derive_setup


def _has_no_deadline(original: Any) -> Any:
    def init(self: PendingCheckpoint, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.deadline_ms = None

    return init


def _has_a_tenth_of_its_time(original: Any) -> Any:
    """Records a beginning long before the real one."""

    def init(self: PendingCheckpoint, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        assert self.deadline_ms is not None
        cut_ms = (self.deadline_ms - self.started_ms) * 9 // 10
        self.started_ms, self.deadline_ms = self.started_ms - cut_ms, self.deadline_ms - cut_ms

    return init


def _is_deaf_while_it_recovers(original: Any) -> Any:
    """Listens once every job is recovered: this one, whose clock runs from its recovery, and many others."""

    def open_directory(self: Dispatcher) -> HostFlow[None]:
        yield from original(self)
        yield from self.recover()
        for _ in range(OTHER_JOBS):
            yield ListFolder("")

    return open_directory


OTHER_JOBS = 40
"""Their recovery reads, at 100 ms each, take longer than the workers of a simulated job have to come back."""


SABOTAGES = (
    Sabotage(
        "early_notice",
        "tasks get notice of a complete checkpoint while it is still being written",
        ("I14",),
        (Mutant(CheckpointCoordinator, "_write_next", _notifies_at_once),),
    ),
    Sabotage(
        "missing_ack",
        "a checkpoint completes without the last acknowledgement",
        ("I11",),
        (Mutant(PendingCheckpoint, "is_complete", _lacks_one),),
    ),
    Sabotage(
        "counted_acks",
        "acknowledgements are counted, so that a repeated one stands in for a missing one",
        ("I11",),
        (Mutant(PendingCheckpoint, "is_complete", _counts), Mutant(PendingCheckpoint, "acknowledge", _counts_repeats)),
        kinds=("duplicate",),
    ),
    Sabotage(
        "hasty_abort",
        "notices of an abort are sent, and its files deleted, before it is stored",
        ("I14", "I13"),
        (Mutant(CheckpointCoordinator, "_write_aborted", _aborts_hastily),),
        kinds=("store_fails", "disk_full"),
    ),
    Sabotage(
        "ambiguous_is_done",
        "a write that may or may not have happened counts as done",
        ("I14", "I12", "I16"),
        (Mutant(store_module, "put_once", lambda original: _takes_ambiguous_for_done),),
        kinds=("store_late",),
    ),
    Sabotage(
        "no_subsume",
        "a checkpoint that is still pending when a newer one completes is not aborted",
        ("I13",),
        (Mutant(CheckpointCoordinator, "_subsume_below", constant(None)),),
        workloads=("counter", "windows", "timers", "fanout"),
        plan=(throughout("store_slow", "worker:", amount=400, probability=0.3),),
    ),
    Sabotage(
        "subsumed_savepoint",
        "a savepoint that is still pending when a newer checkpoint completes is aborted",
        ("I30",),
        (Mutant(CheckpointCoordinator, "_subsume_below", _subsumes_savepoints),),
        workloads=("counter", "windows", "timers", "fanout"),
        plan=(Fault("savepoint", at_ms=400), throughout("store_slow", "worker:all/savepoint-", amount=400)),
        seeds_max=40,
    ),
    Sabotage(
        "savepoint_commits",
        "a plain savepoint lets sinks commit",
        ("I21",),
        (Mutant(CheckpointCoordinator, "_complete", _notifies_savepoints),),
        kinds=("savepoint",),
    ),
    Sabotage(
        "untold_abort",
        "tasks never get notice of an aborted checkpoint",
        ("I30",),
        (
            Mutant(SlotPool, "broadcast", _keeps_aborts_to_itself),
            Mutant(Session, "_reconcile", _hears_of_none_when_it_registers),
        ),
        kinds=("store_fails", "disk_full"),
    ),
    Sabotage(
        "half_told_abort",
        "the tasks of one worker alone get notice of an aborted checkpoint",
        ("I30",),
        (Mutant(SlotPool, "broadcast", _tells_one_of_aborts),),
        kinds=("store_fails", "disk_full"),
        seeds_max=60,
    ),
    Sabotage(
        "ignored_pause",
        "periodic checkpoints don't wait for the pause after the last one",
        ("I16",),
        (Mutant(CheckpointRequestDecider, "next", _knows_no_pause),),
        seeds_max=120,
    ),
    Sabotage(
        "lasting_failures",
        "a completed checkpoint doesn't reset the count of failed ones",
        ("I16",),
        (Mutant(CheckpointFailureManager, "completed", constant(None)),),
        workloads=("windows", "counter"),
        plan=(throughout("store_fails", "worker:WriteFile", probability=0.15),),
    ),
    Sabotage(
        "tolerated_failures",
        "any number of failed checkpoints in a row is tolerated",
        ("I16",),
        (Mutant(CheckpointFailureManager, "failed", constant(False)),),
        kinds=("store_fails", "disk_full"),
        seeds_max=60,
    ),
    Sabotage(
        "skipped_final",
        "a job ends with its newest checkpoint instead of a final one",
        ("I14", "I1"),
        (Mutant(Lifecycle, "_run", _skips_the_final),),
    ),
    Sabotage(
        "no_deadline",
        "a checkpoint that does not complete is never aborted",
        ("I17",),
        (Mutant(PendingCheckpoint, "__init__", _has_no_deadline),),
        kinds=("store_slow", "slow_operator", "blocked_operator"),
        seeds_max=80,
    ),
    Sabotage(
        "hasty_expiry",
        "a checkpoint expires after a tenth of its timeout, with a beginning recorded as much earlier",
        ("I30",),
        (Mutant(PendingCheckpoint, "__init__", _has_a_tenth_of_its_time),),
        plan=(throughout("store_slow", "worker:", amount=400, probability=0.3),),
    ),
    Sabotage(
        "trusted_acks",
        "an acknowledgement of what a task can't have stored is accepted",
        ("I11",),
        (Mutant(AcknowledgementValidator, "problem", constant(None)),),
        plan=(throughout("forged_ack", "workers", probability=0.2),),
    ),
    Sabotage(
        "strays_delete",
        "all files named by an acknowledgement that comes too late, or from nowhere, are deleted",
        ("I11", "I12", "I13", "I16"),
        (Mutant(AcknowledgementValidator, "files_of_writer", lambda original: _names_all),),
        plan=(throughout("forged_ack", "workers", probability=0.5),),
        backend="filesystem",
    ),
    Sabotage(
        "deaf_recovery",
        "a coordinator listens only once every job is recovered, while the workers' time to reconcile runs out",
        ("I16",),
        (Mutant(Dispatcher, "open", _is_deaf_while_it_recovers),),
        workloads=("counter", "windows"),
        plan=(
            Fault("kill_coordinator", at_ms=400, amount=50),
            Fault("store_slow", "coordinator:ListFolder", at_ms=400, duration_ms=8_000, amount=100),
        ),
    ),
    Sabotage(
        "forgotten_restarts",
        "a new leader counts the restarts of a job from the beginning",
        ("I16",),
        (Mutant(submit_module, "derive_setup", _forgets_restarts),),
        workloads=("counter", "ends", "timers", "aggregate"),
        plan=(
            Fault("user_error", at_ms=350),
            Fault("kill_coordinator", at_ms=650, amount=1),
            Fault("user_error", at_ms=1_000),
        ),
    ),
    Sabotage(
        "ignored_backlog",
        "checkpoints begin at the job's normal interval while its source processes a backlog",
        ("I16",),
        (Mutant(PeriodicSchedule, "note_backlog", constant(None)),),
        workloads=("backlog",),
        plan=(),
    ),
    Sabotage(
        "unasked_hooks",
        "tasks are triggered without a job's master hooks",
        ("I11",),
        (Mutant(CheckpointCoordinator, "_call_hooks", lambda original: lambda self, pending: self._trigger_or_abort(pending)),),
        workloads=("hooked",),
        plan=(),
    ),
    Sabotage(
        "remembered_settings",
        "changed settings are in the leader's memory alone",
        ("I16",),
        (Mutant(storage_effects_module, "write_config", _only_remembers),),
        workloads=("counter", "backlog", "windows"),
        plan=(Fault("retune", at_ms=300), Fault("retune", at_ms=400), Fault("kill_coordinator", at_ms=600, amount=50)),
    ),
    Sabotage(
        "forgotten_mode",
        "a checkpoint by hand is taken as the job's settings say, whatever its user wants",
        ("I16",),
        (Mutant(CheckpointCoordinator, "_may_overtake", _by_settings_alone),),
        workloads=("counter", "windows"),
        plan=tuple(Fault("checkpoint", at_ms=at_ms) for at_ms in (200, 300, 400, 500, 600)),
    ),
    Sabotage(
        "overwritten_settings",
        "a new leader begins with the settings of the submission",
        ("I16",),
        (Mutant(plan_module, "derive_config", lambda original: lambda job, record: record.graph.config),),
        workloads=("counter", "backlog", "windows"),
        plan=(Fault("retune", at_ms=300), Fault("retune", at_ms=400), Fault("kill_coordinator", at_ms=600, amount=50)),
    ),
    Sabotage(
        "untried_stop",
        "a stop that a worker's death interrupted is in progress for ever, and never tried again",
        ("I30",),
        (Mutant(StopRetries, "take_due", constant([])),),
        workloads=("counter", "windows", "timers", "aggregate"),
        plan=(Fault("restore", at_ms=300), Fault("kill_worker", "workers", on="coordinator.send.trigger.stop_savepoint")),
    ),
    Sabotage(
        "forgotten_stop",
        "a new leader does not try a stop again that its predecessor's death interrupted",
        ("I30",),
        (Mutant(plan_module, "derive_cut_off_stops", constant(())),),
        workloads=("counter", "windows", "timers", "aggregate"),
        plan=(
            Fault("restore", at_ms=300),
            Fault("kill_coordinator", on="coordinator.send.trigger.stop_savepoint", amount=50),
        ),
    ),
    Sabotage(
        "unwaited_savepoint",
        "tasks end, and their channels with them, while a savepoint that joined the last checkpoint is undecided",
        ("I30",),
        (Mutant(CheckpointCoordinator, "savepoints_pending", lambda original: property(lambda self: 0)),),
        workloads=("windows", "ends", "aggregate", "counter"),
        plan=(
            Fault("savepoint", on="coordinator.send.trigger.final"),
            Fault(
                "slow_link", "all", on="coordinator.send.trigger.savepoint", duration_ms=THROUGHOUT_MS, amount=400, probability=0.5
            ),
        ),
        seeds_max=60,
    ),
)
