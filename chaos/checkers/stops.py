"""Stops with a savepoint that a failure interrupted are tried again (of I30, docs/invariants.md).

The user of a stop gets a stopped job with its savepoint, or an error. That a job continues without its stop shows in its claims: a
leader claims no id before every task runs, and a user's request goes in front of its own. So it may claim one id for a checkpoint
that was already on its way when the tasks run again, and no second one before the stop's. The answer to the user is the leader's,
asked at that moment.
The bounds are those of docs/rest.md. The possible number of tries is derived from outside: an interrupted one takes its attempt
with it, so there are no more than attempts and leaders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from holdfast.barriers.messages import CheckpointKind, Deploy, Deployment, FailureReason, Registered
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, Claimed, Decided, EpochTaken, JobLedger
from holdfast.chaos.checkers.observations import (
    Answered,
    Commanded,
    FaultBegan,
    Led,
    Lifecycle,
    Observation,
    Report,
    Requested,
    Stored,
    WorldView,
)
from holdfast.chaos.workloads.scenario import Scenario

TRIES_MAX = 5
"""Bound in docs/rest.md."""
RETRY_MS = 300_000
"""Bound in docs/rest.md, ms."""
PASSED_MAX = 1
"""Checkpoints that may be claimed before a stop that is to be tried again."""

_CUT_OFF = frozenset(
    {
        FailureReason.JOB_FAILOVER,
        FailureReason.NOT_ALL_TASKS_RUNNING,
        FailureReason.TASK_NOT_READY,
        FailureReason.LEADER_CHANGED,
    }
)
"""Failures of the job or of its leader, with nothing wrong with the savepoint. Other checkers judge whether they are true."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """A stop that a user has requested."""

    submission: int
    asked_ms: int
    waits: bool
    """Its newest try was interrupted, or none has begun."""
    attempt: int
    """Attempt of its newest try; 0 for none. Claims of this attempt prove nothing."""
    epoch: int
    """Epoch of the leader that accepted it and holds it in memory alone; 0 once an id records it."""
    chances: int = 1
    """Upper bound of its tries so far."""
    passed: int = 0
    """Checkpoints claimed while it waits, by this leader in this attempt."""


class StopsChecker(Checker):
    """Follows each stop from its request, or from its first claim."""

    invariants: ClassVar[tuple[str, ...]] = ("I30",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Requested, Answered, Commanded, Led, FaultBegan, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._stops: dict[str, _Stop] = {}
        """Trigger id -> its stop."""
        self._wanted: set[str] = set()
        """Trigger ids of the stops that users requested."""
        self._asked: set[tuple[int, str]] = set()
        """Stops that a leader was asked for, by its epoch: its later answers are about the same stop, which may be over by then."""
        self._leads: dict[str, int] = {}
        """Process -> highest epoch in which it leads."""
        self._deployed: set[int] = set()
        """Submissions with a deployed task: before that nothing runs that could be interrupted."""
        self._clocks_jumped = False
        """A clock has jumped: a leader may take the time of a stop for over."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored(added=()):
                pass
            case Stored():
                self._stored(observation)
            case Requested(request="wish", body=body):
                if body.kind is CheckpointKind.STOP_SAVEPOINT:
                    self._wanted.add(body.trigger_id)
            case Answered(request="wish", answer=str() as trigger_id) if trigger_id in self._wanted:
                self._accepted(trigger_id, observation)
            case (
                Commanded(command=Deploy(deployment=deployment))
                | Answered(answer=Registered(deployment=Deployment() as deployment))
            ):
                record = self.ledger.attempts.get(deployment.attempt)
                self._deployed.update(() if record is None else (record.submission,))
            case Led(actor=actor, epoch=epoch):
                self._leads[actor] = max(epoch, self._leads.get(actor, 0))
            case FaultBegan(kind="clock_jump"):
                self._clocks_jumped = True
            case Lifecycle(change="power_loss"):
                self._stops.clear()  # what was claimed may be gone
                self._asked.clear()
            case _:
                pass

    def _accepted(self, trigger_id: str, fact: Answered) -> None:
        epoch, submission = self._leads.get(fact.actor, 0), max(self.ledger.submissions, default=0)
        if (epoch, trigger_id) in self._asked:
            return
        self._asked.add((epoch, trigger_id))
        if trigger_id not in self._stops and epoch == self.ledger.newest_epoch and submission in self._deployed:
            self._stops[trigger_id] = _Stop(submission, fact.at_ms, waits=True, attempt=0, epoch=epoch)

    def _stored(self, fact: Stored) -> None:
        for change in self.ledger.changes(fact):
            match change:
                case Claimed():
                    self._claimed(change, fact.at_ms)
                case Decided(claim=claim) if claim is not None and claim.trigger_id in self._stops:
                    self._decided(change, claim.trigger_id)
                case AttemptRecorded() | EpochTaken():
                    more = {name: replace(stop, chances=stop.chances + 1, passed=0) for name, stop in self._stops.items()}
                    self._stops = more
                case _:
                    pass

    def _claimed(self, change: Claimed, at_ms: int) -> None:
        claim = change.record
        if change.before is not None or claim.epoch != self.ledger.newest_epoch:
            return
        known = self._stops.get(claim.trigger_id)
        if claim.kind is CheckpointKind.STOP_SAVEPOINT and claim.trigger_id:
            chances, asked_ms = (known.chances, known.asked_ms) if known is not None else (1, at_ms)
            self._stops[claim.trigger_id] = _Stop(
                claim.submission, asked_ms, waits=False, attempt=claim.attempt, epoch=0, chances=chances
            )
        elif claim.kind is CheckpointKind.CHECKPOINT and claim.attempt == self.ledger.newest_attempt:
            for trigger_id, stop in list(self._stops.items()):
                if stop.waits and stop.submission == claim.submission and stop.attempt < claim.attempt:
                    self._pass(trigger_id, replace(stop, passed=stop.passed + 1), at_ms)

    def _decided(self, change: Decided, trigger_id: str) -> None:
        stop, claim = self._stops[trigger_id], change.claim
        record = self.ledger.abort_record(change.checkpoint_id)
        assert claim is not None
        if record is not None and record.reason in _CUT_OFF:
            self._stops[trigger_id] = replace(stop, waits=True, attempt=claim.attempt, passed=0)
        else:
            del self._stops[trigger_id]  # it is complete, or failed for a reason of its own

    # ----------------------------------------------------------------------------------------------------------- judging

    def _pass(self, trigger_id: str, stop: _Stop, at_ms: int) -> None:
        """The job continues with its checkpoints: the stop has ended for a good reason, or was forgotten."""
        self._stops[trigger_id] = stop
        master = self.master_of(self.ledger.newest_epoch)
        if stop.passed <= PASSED_MAX or master is None:
            return
        del self._stops[trigger_id]
        if stop.epoch and stop.epoch != self.ledger.newest_epoch:
            return  # the leader that accepted it died before it could claim an id: no process knows of it
        view = master.triggers.get(trigger_id)
        problem = self._problem(view, stop, at_ms)
        if problem is not None:
            self.report("I30", f"stop {trigger_id} was cut off, the job has gone on with {stop.passed} checkpoints, and {problem}")

    def _problem(self, view: Any, stop: _Stop, at_ms: int) -> str | None:
        """The problem in the leader's answer about a stop that it did not try again; None without one."""
        if view is None:
            return "its leader does not know of it"
        if view.in_progress:
            return "no leader tries it again"
        if view.failure_reason is None:
            return f"its leader takes it for ended, at {view.location}"
        is_over = stop.chances >= TRIES_MAX or at_ms - stop.asked_ms >= RETRY_MS or self._clocks_jumped
        if view.failure_reason in _CUT_OFF and not is_over:
            return f"it was given up as {view.failure_reason}, with tries and time left"
        return None

    def at_end(self) -> None:
        """No stop of an ended job is still waited for."""
        master = self.master_of(self.ledger.newest_epoch)
        for trigger_id in self._stops if master is not None else ():
            view = master.triggers.get(trigger_id)
            if view is not None and view.in_progress:
                self.report("I30", f"the job is over, and stop {trigger_id} still in progress")
