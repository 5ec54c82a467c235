"""Stops with a savepoint that a failure cut off: they are tried again (of I30).

A user who asked for a stop gets a stopped job with its savepoint, or hears why not. Whether a job goes on as if nobody had asked
is seen at its claims: a leader takes no id before every task runs, and a user's request goes in front of its own. So it may take
one id for a checkpoint when the tasks run again, on whose way it was already, and no second one before the stop's. What a user is
told of a stop is what the leader would answer, asked now.

It knows the bounds that are documented, and derives from outside how many tries there can have been: one that is cut off takes its
attempt with it, so that there are no more than attempts and leaders."""

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
"""As docs/rest.md says."""
RETRY_MS = 300_000
"""As docs/rest.md says."""
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
"""A failure of the job or of its leader: nothing is wrong with the savepoint. Whether these reasons are true others check."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """A stop that a user wants."""

    submission: int
    asked_ms: int
    waits: bool
    """Its newest try was cut off, or none has begun."""
    attempt: int
    """Of its newest try; 0 for none. What is claimed in this attempt says nothing."""
    epoch: int
    """Who accepted it, while no id says so: it is in that leader's memory alone. 0: an id does."""
    chances: int = 1
    """Most tries that there can have been."""
    passed: int = 0
    """Checkpoints that were claimed while it waits, by this leader in this attempt."""


class StopsChecker(Checker):
    """Follows each stop from its request, or from its first claim."""

    invariants: ClassVar[tuple[str, ...]] = ("I30",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Requested, Answered, Commanded, Led, FaultBegan, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._stops: dict[str, _Stop] = {}
        """By trigger id."""
        self._wanted: set[str] = set()
        """Trigger ids of stops that users ask for."""
        self._leads: dict[str, int] = {}
        """Process -> highest epoch in which it leads."""
        self._deployed: set[int] = set()
        """Submissions of which a task was deployed: before that nothing runs that could be cut off."""
        self._clocks_jumped = False
        """Then a leader may take the time of a stop for over."""

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
            case _:
                pass

    def _accepted(self, trigger_id: str, fact: Answered) -> None:
        epoch, submission = self._leads.get(fact.actor, 0), max(self.ledger.submissions, default=0)
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
        """The job goes on with its checkpoints: the stop has ended for a good reason, or was forgotten."""
        self._stops[trigger_id] = stop
        master = self.master_of(self.ledger.newest_epoch)
        if stop.passed <= PASSED_MAX or master is None:
            return
        del self._stops[trigger_id]
        if stop.epoch and stop.epoch != self.ledger.newest_epoch:
            return  # who accepted it has died before it could take an id: its user finds nobody who knows of it
        view = master.triggers.get(trigger_id)
        problem = self._problem(view, stop, at_ms)
        if problem is not None:
            self.report("I30", f"stop {trigger_id} was cut off, the job has gone on with {stop.passed} checkpoints, and {problem}")

    def _problem(self, view: Any, stop: _Stop, at_ms: int) -> str | None:
        """What is wrong with what the leader tells of a stop that it did not try again; None if nothing is."""
        if view is None:
            return "its leader does not know of it"
        if view.in_progress:
            return "nobody tries it again"
        if view.failure_reason is None:
            return f"its leader takes it for ended, at {view.location}"
        is_over = stop.chances >= TRIES_MAX or at_ms - stop.asked_ms >= RETRY_MS or self._clocks_jumped
        if view.failure_reason in _CUT_OFF and not is_over:
            return f"it was given up as {view.failure_reason}, with tries and time left"
        return None

    def at_end(self) -> None:
        """Nobody waits for a stop of a job that is over."""
        master = self.master_of(self.ledger.newest_epoch)
        for trigger_id in self._stops if master is not None else ():
            view = master.triggers.get(trigger_id)
            if view is not None and view.in_progress:
                self.report("I30", f"the job is over, and stop {trigger_id} still in progress")
