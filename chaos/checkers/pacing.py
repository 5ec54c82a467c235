"""The pace of checkpoints and the number of tolerated failures, as the job is configured (of I16, docs/invariants.md).

A periodic checkpoint begins no sooner than the minimum pause allows; as many failures in a row as are tolerated change nothing, and
the next one fails the attempt. The coordinator's knowledge at a moment is bounded here from what is durable and what it has
announced, so that nothing is reported that it could not have known."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import (
    CheckpointKind,
    FailureReason,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    TriggerCheckpoint,
)
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, Decided, JobLedger
from holdfast.chaos.checkers.observations import Commanded, Led, Observation, Report, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.records import AttemptRecord

_COUNTED = (FailureReason.DECLINED, FailureReason.EXPIRED, FailureReason.ASYNC_EXCEPTION, FailureReason.IO_EXCEPTION)
_CHECKPOINT_FAILED = re.compile(r"CheckpointFailed: checkpoint (\d+): ")
"""Error of an attempt that failed because a checkpoint failed."""


@dataclass(slots=True)
class _Leader:
    """Observed acts of one leader."""

    submission: int
    submitted: JobConfig
    stored: dict[int, int] = field(default_factory=dict)
    """Completed id -> when it became durable, ms."""
    told: dict[int, int] = field(default_factory=dict)
    """Completed id -> when a worker first received its notice, ms: from then on the leader knows."""
    newest_told: int = 0
    told_aborted: set[int] = field(default_factory=set)
    aborted: dict[int, FailureReason] = field(default_factory=dict)
    """Aborted id -> reason, of failures that count, in the order in which they became durable."""
    of_former: set[int] = field(default_factory=set)
    """Aborted ids of attempts before the newest one. Its workers hear of them, too, and none counts against it."""
    at_most: list[tuple[int, int]] = field(default_factory=list)
    """(id, completed ids durable before) of every failure that the leader may count."""
    at_least: int = 0
    """Failures in a row that the leader certainly counts."""
    is_unsure: bool = False
    """A savepoint is durable: its leader resets the count when it learns of that, which sends no notice."""
    exceeded: dict[int, int] = field(default_factory=dict)
    """Attempt -> when the tolerated number was exceeded, ms."""


class PacingChecker(Checker):
    """Checks each first trigger of an id, and each new attempt."""

    invariants: ClassVar[tuple[str, ...]] = ("I16",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Commanded, Led)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._leaders: dict[int, _Leader] = {}
        """Epoch -> its leader."""
        self._triggered: set[int] = set()

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored(added=()):
                pass
            case Stored():
                for change in self.ledger.changes(observation):
                    if isinstance(change, Decided):
                        self._decided(change, observation.at_ms)
                    elif isinstance(change, AttemptRecorded):
                        self._began(change.record)
            case Commanded(command=TriggerCheckpoint() as trigger):
                if trigger.checkpoint_id not in self._triggered:
                    self._triggered.add(trigger.checkpoint_id)
                    self._check_trigger(trigger, observation)
            case Commanded(command=NotifyCheckpointComplete(checkpoint_id=number), epoch=epoch):
                self._told(number, epoch, observation.at_ms)
            case Commanded(command=NotifyCheckpointAborted() as notice, epoch=epoch):
                self._told_aborted(notice, epoch, observation.at_ms)
            case Led(epoch=epoch, graph=graph, submission=submission):
                self._leaders[epoch] = _Leader(submission, graph.config)
            case _:
                pass

    # --------------------------------------------------------------------------------------------------------- decisions

    def _decided(self, change: Decided, at_ms: int) -> None:
        number, claim = change.checkpoint_id, change.claim
        if claim is None:
            return
        if change.snapshot is not None:
            leader = self._leaders.get(change.snapshot.metadata.epoch)
            if leader is not None:
                leader.stored[number] = at_ms
                leader.at_least = 0
                leader.is_unsure = leader.is_unsure or not change.snapshot.is_recovery_point
            return
        record = self.ledger.abort_record(number)
        leader = self._leaders.get(record.epoch) if record is not None else None
        if record is None or leader is None or record.reason not in _COUNTED:
            return
        if record.reason is FailureReason.IO_EXCEPTION and claim.kind.is_savepoint:
            return
        leader.aborted[number] = record.reason
        leader.at_most.append((number, len(leader.stored)))

    def _told(self, number: int, epoch: int, at_ms: int) -> None:
        """The leader has counted a success, and forgets failures of lower ids."""
        leader = self._leaders.get(epoch)
        if leader is None or number in leader.told or number not in leader.stored:
            return
        leader.told[number] = at_ms
        leader.newest_told = max(leader.newest_told, number)
        leader.at_least, leader.is_unsure = 0, False
        place = list(leader.stored).index(number)
        leader.at_most = [(failed, before) for failed, before in leader.at_most if failed > number or before > place]

    def _told_aborted(self, notice: NotifyCheckpointAborted, epoch: int, at_ms: int) -> None:
        leader, number = self._leaders.get(epoch), notice.checkpoint_id
        if leader is None or number in leader.told_aborted:
            return
        leader.told_aborted.add(number)
        if number not in leader.aborted or number in leader.of_former or leader.is_unsure:
            return
        if number <= max(leader.stored, default=0):
            return
        leader.at_least += 1
        if leader.at_least > max(each.tolerable_failed_checkpoints for each in self._configs(leader)):
            leader.exceeded[notice.attempt] = at_ms
            leader.at_least = 0

    # ----------------------------------------------------------------------------------------------------------- judging

    def _check_trigger(self, trigger: TriggerCheckpoint, fact: Commanded) -> None:
        leader, master = self._leaders.get(fact.epoch), self.master_of(fact.epoch)
        if leader is None or master is None:
            return
        pending = next((each for each in master.coordinator.pending if each.checkpoint_id == trigger.checkpoint_id), None)
        if pending is None:
            return
        began_ms, number = pending.started_ms, trigger.checkpoint_id
        failed_ms = leader.exceeded.get(trigger.attempt)
        if failed_ms is not None and began_ms > failed_ms:
            tolerable = max(each.tolerable_failed_checkpoints for each in self._configs(leader))
            self.report("I16", f"attempt {trigger.attempt} takes checkpoint {number} after {tolerable + 1} failed in a row")
        pause_least_ms = min(each.min_pause_ms for each in self._configs(leader))
        if not pending.request.periodic or not pause_least_ms:
            return
        for other in reversed(leader.told):
            if leader.told[other] < began_ms:
                pause_ms = began_ms - leader.stored[other]
                if pause_ms < pause_least_ms:
                    message = f"checkpoint {number} began {pause_ms} ms after {other} was complete"
                    self.report("I16", f"{message}; the pause is {pause_least_ms} ms")
                return

    def _configs(self, leader: _Leader) -> Collection[JobConfig]:
        """Settings that may hold, those included that a user has changed: the checks are as lenient as any of them."""
        return self.ledger.configs_of(leader.submission, leader.submitted).values()

    def _began(self, record: AttemptRecord) -> None:
        """An attempt fails because of checkpoints only after too many failures in a row."""
        leader, master = self._leaders.get(record.epoch), self.master_of(record.epoch)
        if leader is not None:
            leader.at_least = 0  # it may have counted more failures than are seen, and counts from zero again
            leader.of_former.update(leader.aborted)
        if leader is None or master is None:
            return
        failure = master.lifecycle.exceptions.newest
        found = None if failure is None else _CHECKPOINT_FAILED.match(failure.error)
        if found is None:
            return
        claim = self.ledger.first_claims.get(int(found[1]))
        if claim is None or claim.kind is CheckpointKind.STOP_SAVEPOINT:  # sources may have stopped: always fails the attempt
            return
        failures, tolerable = len(leader.at_most), min(each.tolerable_failed_checkpoints for each in self._configs(leader))
        if failures <= tolerable:
            who = f"attempt {record.attempt} follows one that was given up after {failures} failed checkpoints in a row"
            self.report("I16", f"{who}; {tolerable} are tolerable")
