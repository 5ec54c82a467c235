"""Aborted checkpoints: who may abort one, and that it stays aborted (of I13 and I15, docs/invariants.md).

A decline counts as the worker's loop gave it. A forged acknowledgement counts as a decline: no checkpoint completes with one in the
place of a task's own. A subtask knows of a notice once it has left its mailbox: one that waits there can't have stopped
anything."""

from __future__ import annotations

from typing import ClassVar

from holdfast.barriers.messages import (
    CheckpointKind,
    DeclineCheckpoint,
    FailureReason,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    TaskState,
)
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger
from holdfast.chaos.checkers.observations import (
    Commanded,
    Delivered,
    Forged,
    Observation,
    Report,
    Reported,
    SnapshotBegan,
    Stored,
    WorldView,
    aborts_unread,
)
from holdfast.chaos.workloads.scenario import Scenario

_OF_SUBTASKS = (FailureReason.DECLINED, FailureReason.ASYNC_EXCEPTION, FailureReason.TASK_NOT_READY)
"""Reasons for which only a subtask may abort a checkpoint."""


class AbortsChecker(Checker):
    """Checks each decision, and the beginning of each snapshot."""

    invariants: ClassVar[tuple[str, ...]] = ("I11", "I13", "I15")
    hears: ClassVar[tuple[type, ...]] = (Stored, Commanded, Delivered, Reported, Forged, SnapshotBegan)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._declined: set[tuple[int, int, FailureReason]] = set()
        """(attempt, id, reason) of every decline."""
        self._forged: set[tuple[int, int]] = set()
        """(attempt, id) of checkpoints with a forged acknowledgement and no genuine one of that task."""
        self._told: dict[str, set[tuple[int, int]]] = {}
        """Process -> (attempt, id) of every notice of an abort that it has."""
        self._noticed: set[tuple[int, int]] = set()
        """(epoch, id) of checkpoints with a notice of completion."""
        self._released: dict[int, int] = {}
        """Epoch -> highest id of a recovery point that its leader has announced as complete.

        Storage of the id is not enough: a leader without a clear answer does not know of it."""

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Stored):  # first: most observations are of stores and have no branch here
            for change in self.ledger.changes(observation) if observation.added else ():
                if isinstance(change, Decided) and change.claim is not None:
                    self._decided(change, is_late=observation.fate == "late")
            return
        match observation:
            case Reported(item=DeclineCheckpoint() as decline):
                self._declined.add((decline.attempt, decline.checkpoint_id, decline.reason))
            case Forged(item=item, real=real):
                if item.attempt == real.attempt:
                    self._declined.add((item.attempt, item.checkpoint_id, FailureReason.DECLINED))
                    self._forged.add((item.attempt, item.checkpoint_id))
            case Delivered(command=NotifyCheckpointAborted() as notice, actor=actor):
                self._told.setdefault(actor, set()).add((notice.attempt, notice.checkpoint_id))
            case Commanded(command=NotifyCheckpointComplete(checkpoint_id=number), epoch=epoch):
                if (epoch, number) not in self._noticed:
                    self._noticed.add((epoch, number))
                    self._released[epoch] = max(self._released.get(epoch, 0), number)
                    self._check_subsumed(number, epoch)
            case SnapshotBegan():
                self._began(observation)
            case _:
                pass

    # -------------------------------------------------------------------------------------------------------- at subtasks

    def _began(self, fact: SnapshotBegan) -> None:
        """A subtask remembers an aborted id, and accepts neither its barriers nor its trigger afterwards."""
        told = self._told.get(fact.actor)
        if told is not None and (fact.attempt, fact.checkpoint_id) in told and fact.checkpoint_id not in fact.aborts_unread:
            self._taken_up(fact.actor, fact.vertex, fact.subtask, fact.checkpoint_id)

    def look(self) -> None:
        """A subtask does not wait for barriers of an aborted id."""
        if not self._told:
            return
        for host in self.world.workers():
            told = self._told.get(host.process.name)
            if told is None or host.worker._commands:
                continue
            for each in host.subtasks():
                subtask = each.subtask
                if each.gate is None or subtask.state is not TaskState.RUNNING:
                    continue  # a failed subtask reads no more barriers, nor the notices that came with its end
                for number in each.gate.pending:
                    if (subtask.attempt, number) in told and number not in aborts_unread(subtask):
                        self._taken_up(host.process.name, subtask.key.vertex, subtask.key.subtask, number)

    def _taken_up(self, actor: str, vertex: str, subtask: int, number: int) -> None:
        """A stop with drain waits for the work in front of it. If it is aborted meanwhile it is still taken, and ends the
        attempt."""
        claim = self.ledger.first_claims.get(number)
        if claim is not None and claim.kind is not CheckpointKind.STOP_SAVEPOINT:
            self.report("I13", f"{vertex} ({subtask}) in {actor} takes checkpoint {number}, of whose abort it has notice")

    # --------------------------------------------------------------------------------------------------------- at leaders

    def _check_subsumed(self, number: int, epoch: int) -> None:
        """A leader that announces a checkpoint has aborted every older one, savepoints and ids whose metadata is being written
        excepted."""
        for host in self.world.coordinators():
            for service in host.services:
                pending = service._master.coordinator.pending if service.epoch == epoch else ()
                for other in (each.checkpoint_id for each in pending if each.is_undecided and each.checkpoint_id < number):
                    claim = self.ledger.first_claims.get(other)
                    if claim is not None and not claim.kind.is_savepoint:
                        self.report("I13", f"checkpoint {number} is complete, and epoch {epoch} continues checkpoint {other}")
                        return

    def _decided(self, change: Decided, *, is_late: bool) -> None:
        number, claim = change.checkpoint_id, change.claim
        assert claim is not None
        if change.snapshot is None:
            record = self.ledger.abort_record(number)
            if record is None or record.reason not in _OF_SUBTASKS:
                return
            if (claim.attempt, number, record.reason) not in self._declined:
                said = f"is aborted as {record.reason.value}, and no subtask of attempt {claim.attempt} said so"
                self.report("I15", f"checkpoint {number} {said}")
            return
        epoch = change.snapshot.metadata.epoch
        if (claim.attempt, number) in self._forged:
            self.report("I11", f"checkpoint {number} is complete with an acknowledgement that no task sends")
        if not change.snapshot.is_recovery_point:
            return
        newest = self._released.get(epoch, 0)
        if number < newest and not claim.kind.is_savepoint and not is_late:
            self.report("I13", f"checkpoint {number} completes after {newest}, which subsumes it")
