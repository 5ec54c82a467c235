"""Tasks receive notice of aborted checkpoints (I30, docs/invariants.md).

A task without one continues its asynchronous part, which holds a copy of its state, and keeps channels of an alignment blocked
until the next barrier. A leader that aborts a checkpoint of the running attempt notifies each of its workers at once; losses of the
network are not its fault. A worker without a session is notified when it registers, one whose command stream broke on its next
stream, and one that runs nothing of the attempt, having just replaced another, needs no notice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from holdfast.barriers.messages import CancelTasks, FinishTasks, NotifyCheckpointAborted, Registered, TriggerCheckpoint
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, Decided, EpochTaken, JobLedger, ResultRecorded
from holdfast.chaos.checkers.observations import Answered, Commanded, Lifecycle, Observation, Report, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario

NOTICE_MS_MAX = 200
"""Time in which a leader that is awake must notify a reachable worker of a stored abort, ms."""


@dataclass(slots=True)
class _Due:
    """A notice due to every worker with tasks of the attempt, for as long as the attempt runs."""

    aborted_ms: int
    leader: str
    """Process that has to send it."""
    attempt: int
    told: set[int] = field(default_factory=set)
    """Slots whose workers know of it: by a command, or by the answer to their registration."""
    tellable: dict[tuple[int, str], int] = field(default_factory=dict)
    """(slot, session) of workers that are reachable and not notified -> since when, ms."""


class NoticesChecker(Checker):
    """Follows the aborted checkpoints of the running attempt, and the notices of each."""

    invariants: ClassVar[tuple[str, ...]] = ("I30",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Commanded, Answered, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._triggered: dict[int, str] = {}
        """Undecided id -> coordinator that triggered it."""
        self._cancelled = 0
        """Highest attempt whose tasks were commanded to cancel or to end."""
        self._due: dict[int, _Due] = {}
        """Aborted id -> its notice."""

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Stored):  # most of the observations
            if observation.added:
                self._stored(observation)
            return
        match observation:
            case Commanded(command=TriggerCheckpoint(checkpoint_id=number), actor=actor):
                self._triggered.setdefault(number, actor)
            case Commanded(command=NotifyCheckpointAborted(checkpoint_id=number), slot=slot):
                if number in self._due:
                    self._due[number].told.add(slot)
            case Answered(answer=Registered(live_checkpoints=live), actor=actor, receiver=receiver):
                for number, due in self._due.items():
                    if number not in live and due.leader == actor:
                        due.told.add(slot_of(receiver))
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
        now_ms = self.world.now_ms
        for number, due in list(self._due.items()):
            due.tellable = {each: due.tellable.get(each, now_ms) for each in self._tellable(number, due)}
            late = [slot for (slot, _), since_ms in due.tellable.items() if now_ms - since_ms > NOTICE_MS_MAX]
            if late:
                del self._due[number]
                said = f"checkpoint {number} was aborted at {due.aborted_ms} ms, and {due.leader} has sent no notice to a task"
                self.report("I30", f"{said} in slot {late[0]} of it")

    def _tellable(self, number: int, due: _Due) -> list[tuple[int, str]]:
        """(slot, session) of workers without the notice that have tasks of the attempt and an open command stream; none unless the
        leader knows that the abort is stored."""
        hosts = [host for host in self.world.coordinators() if host.process.name == due.leader]
        masters = [service._master for host in hosts for service in host.services]
        if all(master.coordinator.attempt is None for master in masters):
            return []  # it has given up the attempt, whose tasks are all cancelled; the next one is not on record yet
        if any(each.checkpoint_id == number for master in masters for each in master.coordinator.pending):
            return []  # the answer of storage was unclear
        sessions = {slot.session for master in masters for slot in master.slot_pool.slots if slot.connected}
        untold = [host for host in self.world.workers() if host.slot not in due.told and _runs(host, due.attempt)]
        open_here = [host for host in untold if host.session.session in sessions and host.hears_commands]
        return [(host.slot, host.session.session) for host in open_here]


def slot_of(worker: str) -> int:
    """Slot in the name of a process, `worker-<slot>.<number>`."""
    return int(worker.removeprefix("worker-").partition(".")[0])


def _runs(host: Any, attempt: int) -> bool:
    """Whether a worker (holdfast.chaos.cluster.worker_host.WorkerHost) has tasks of an attempt."""
    return any(each.subtask.attempt == attempt for each in host.subtasks())
