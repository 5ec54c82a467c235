"""Tasks are told of checkpoints that are off (I30): no task waits for a barrier, or stores state, that nobody wants any more.

Who is not told goes on with the asynchronous part of the snapshot, which holds a copy of its state, and keeps the channels of an
alignment blocked until the next barrier comes, if one does. A leader that aborts a checkpoint of the attempt that runs tells each
of its workers at once; what the network makes of that is not its fault. A worker without a session is told when it registers, one
whose command stream broke when it has another, and one that runs nothing of that attempt, since it has just replaced another, need
not be told at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from holdfast.barriers.messages import CancelTasks, FinishTasks, NotifyCheckpointAborted, Registered, TriggerCheckpoint
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, Decided, EpochTaken, JobLedger, ResultRecorded
from holdfast.chaos.checkers.observations import Answered, Commanded, Lifecycle, Observation, Report, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario

NOTICE_MS_MAX = 200
"""How long a leader that is awake may take to tell a worker that it can tell of a stored decision."""


@dataclass(slots=True)
class _Due:
    """A notice that is to be given to whoever runs tasks of an attempt, as long as that lasts."""

    aborted_ms: int
    leader: str
    """The process that has to tell."""
    attempt: int
    told: set[int] = field(default_factory=set)
    """Slots whose workers know it: by a command, or by what they were answered when they registered."""
    tellable: dict[tuple[int, str], int] = field(default_factory=dict)
    """(slot, session) of who is not told and can be -> since when, as far as was looked."""


class NoticesChecker(Checker):
    """Remembers the aborted checkpoints of the attempt that runs, and who has been told of each."""

    invariants: ClassVar[tuple[str, ...]] = ("I30",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Commanded, Answered, Lifecycle)

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
                said = f"checkpoint {number} was aborted at {due.aborted_ms} ms, and {due.leader} has told no task"
                self.report("I30", f"{said} in slot {late[0]} of it")

    def _tellable(self, number: int, due: _Due) -> list[tuple[int, str]]:
        """(slot, session) of whoever is not told, has tasks of the attempt and an open command stream, if the leader knows that the
        abort is stored: else a notice waits."""
        hosts = [host for host in self.world.coordinators() if host.process.name == due.leader]
        masters = [service._master for host in hosts for service in host.services]
        if all(master.coordinator.attempt is None for master in masters):
            return []  # it has given up the attempt, and the next one is not on record yet: its tasks are all cancelled
        if any(each.checkpoint_id == number for master in masters for each in master.coordinator.pending):
            return []  # storage did not say clearly whether it is stored
        sessions = {slot.session for master in masters for slot in master.slot_pool.slots if slot.connected}
        untold = [host for host in self.world.workers() if host.slot not in due.told and _runs(host, due.attempt)]
        open_here = [host for host in untold if host.session.session in sessions and host.hears_commands]
        return [(host.slot, host.session.session) for host in open_here]


def slot_of(worker: str) -> int:
    """From the name of its process, `worker-<slot>.<number>`."""
    return int(worker.removeprefix("worker-").partition(".")[0])


def _runs(host: Any, attempt: int) -> bool:
    """Whether a worker (holdfast.chaos.cluster.worker_host.WorkerHost) has tasks of an attempt."""
    return any(each.subtask.attempt == attempt for each in host.subtasks())
