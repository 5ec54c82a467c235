"""Tasks are told of checkpoints that are off (I30): no task waits for a barrier, or stores state, that nobody wants any more.

Who is not told goes on with the asynchronous part of the snapshot, which holds a copy of its state, and keeps the channels of an
alignment blocked until the next barrier comes, if one does. A leader that aborts a checkpoint of the attempt that runs tells its
workers at once; what the network makes of that is not its fault. A worker without a session is told when it registers, and one
that runs nothing of that attempt, since it has just replaced another, need not be told at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from barriers.messages import CancelTasks, FinishTasks, NotifyCheckpointAborted, TriggerCheckpoint
from chaos.checkers.base import Checker
from chaos.checkers.ledger import AttemptRecorded, Decided, EpochTaken, JobLedger, ResultRecorded
from chaos.observations import Commanded, Lifecycle, Observation, Report, Stored, WorldView
from chaos.scenario import Scenario

NOTICE_MS_MAX = 200
"""How long a leader that is awake may take from the stored decision to its notice."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A notice that is to be given."""

    at_ms: int
    """Since when: first the time of the decision."""
    leader: str
    """The process that has to tell."""
    attempt: int


class NoticesChecker(Checker):
    """Remembers the aborted checkpoints of which nobody has been told yet."""

    invariants: ClassVar[tuple[str, ...]] = ("I30",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Commanded, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._triggered: dict[int, str] = {}
        """Undecided id -> the coordinator that triggered it."""
        self._cancelled = 0
        """Highest attempt that tasks were told to give up, or to end."""
        self._due: dict[int, _Due] = {}
        """By aborted id."""

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Stored):  # most of what there is to hear
            if observation.added:
                self._stored(observation)
            return
        match observation:
            case Commanded(command=TriggerCheckpoint(checkpoint_id=number), actor=actor):
                self._triggered.setdefault(number, actor)
            case Commanded(command=NotifyCheckpointAborted(checkpoint_id=number)):
                self._due.pop(number, None)
            case Commanded(command=CancelTasks(attempt=attempt) | FinishTasks(attempt=attempt)):
                self._cancelled = max(self._cancelled, attempt)
                self._due.clear()
            case Lifecycle(change="killed" | "paused", actor=actor):
                self._due = {number: due for number, due in self._due.items() if due.leader != actor}
            case Lifecycle(change="power_loss"):
                self._due.clear()
            case _:
                pass

    def _stored(self, fact: Stored) -> None:
        for change in self.ledger.changes(fact):
            match change:
                case Decided(checkpoint_id=number, claim=claim):
                    leader = self._triggered.pop(number, None)
                    record = self.ledger.abort_record(number)
                    mine = claim is not None and record is not None and record.epoch == claim.epoch == self.ledger.newest_epoch
                    if leader is not None and mine and claim is not None and claim.attempt > self._cancelled:
                        self._due[number] = _Due(fact.at_ms, leader, claim.attempt)
                case AttemptRecorded() | EpochTaken() | ResultRecorded():
                    self._due.clear()
                case _:
                    pass

    def look(self) -> None:
        for number, due in list(self._due.items()):
            if self.world.now_ms - due.at_ms <= NOTICE_MS_MAX:
                continue
            if self._can_tell(number, due):
                del self._due[number]
                said = f"checkpoint {number} was aborted at {due.at_ms} ms, and {due.leader} has told no task of it"
                self.report("I30", said)
            else:
                self._due[number] = replace(due, at_ms=self.world.now_ms)

    def _can_tell(self, number: int, due: _Due) -> bool:
        """The leader knows that the abort is stored, and the command stream of somebody who has tasks of the attempt is open: else
        a notice waits."""
        hosts = [host for host in self.world.coordinators() if host.process.name == due.leader]
        masters = [service._master for host in hosts for service in host.services]
        if all(master.coordinator.attempt is None for master in masters):
            return False  # it has given up the attempt, and the next one is not on record yet: its tasks are all cancelled
        if any(each.checkpoint_id == number for master in masters for each in master.coordinator.pending):
            return False  # storage did not say clearly whether it is stored
        sessions = {slot.session for master in masters for slot in master.workforce.slots if slot.connected}
        return any(host.session.session in sessions for host in self.world.workers() if _runs(host, due.attempt))


def _runs(host: Any, attempt: int) -> bool:
    """Whether a worker (chaos.workerhost.WorkerHost) has tasks of an attempt."""
    return any(each.subtask.attempt == attempt for each in host.subtasks())
