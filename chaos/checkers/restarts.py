"""How long a job waits before it is started again, as its restart strategy says (of I16; ADR 37).

A failure of the user's code is told by the worker whose task failed, and the next attempt is not deployed before the pause is over:
it doubles with each such failure, and a completed checkpoint takes it back to the first. When a leader learned of a checkpoint or
of a failure can't be seen from outside: there is a number of failures that it counts at least, and one that it counts at most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.messages import Deploy, NotifyCheckpointComplete, SubtaskStatus, TaskState
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, Decided, JobLedger
from holdfast.chaos.checkers.observations import Commanded, Led, Observation, Report, Reported, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.records import AttemptRecord
from holdfast.coordinator.jobmaster.failover import is_of_user_code


@dataclass(slots=True)
class _Restarts:
    """Those of one submission under one leader, since the last completed checkpoint."""

    strategy: RestartStrategy
    at_least: int = 0
    """Failures of the user's code alone: others may be merged, or restart at once."""
    at_most: int = 0
    attempt: int = 0
    """The newest on record."""
    told: set[int] = field(default_factory=set)
    """Completed ids that workers were told of: their leader knows."""
    earliest_ms: dict[int, int] = field(default_factory=dict)
    """Attempt -> when it may be deployed."""

    def pause_ms(self, failures: int) -> int:
        if self.strategy.kind == "fixed_delay":
            return self.strategy.delay_ms
        return min(self.strategy.delay_max_ms, self.strategy.delay_ms << failures)


class RestartsChecker(Checker):
    """Judges each attempt behind a failure, when it is on record and when it is deployed."""

    invariants: ClassVar[tuple[str, ...]] = ("I16",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Reported, Commanded, Led)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._leaders: dict[tuple[int, int], _Restarts] = {}
        """By epoch and submission."""
        self._failed: dict[tuple[int, str], int] = {}
        """(attempt, error) -> when a task first failed with it, ms; of the user's code."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored(added=()):
                pass
            case Stored():
                for change in self.ledger.changes(observation):
                    if isinstance(change, Decided) and change.snapshot is not None:
                        self._completed()
                    elif isinstance(change, AttemptRecorded):
                        self._recorded(change.record, observation.at_ms)
            case Reported(item=SubtaskStatus(state=TaskState.FAILED) as status):
                if is_of_user_code(status.error):
                    self._failed.setdefault((status.attempt, status.error), observation.at_ms)
            case Commanded(command=NotifyCheckpointComplete() as notice, epoch=epoch):
                self._told(notice, epoch)
            case Commanded(command=Deploy(deployment=deployment), epoch=epoch):
                self._deployed(deployment.attempt, epoch, observation.at_ms)
            case Led(epoch=epoch, submission=submission, graph=graph):
                self._leaders[epoch, submission] = _Restarts(graph.config.restart)
            case _:
                pass

    def _completed(self) -> None:
        """From now on a leader may know."""
        for restarts in self._leaders.values():
            restarts.at_least = 0

    def _told(self, notice: NotifyCheckpointComplete, epoch: int) -> None:
        for (leader, _), restarts in self._leaders.items():
            if leader != epoch:
                continue
            restarts.at_least = 0
            if notice.attempt == restarts.attempt and notice.checkpoint_id not in restarts.told:  # it failed no more since
                restarts.at_most = 0
                restarts.told.add(notice.checkpoint_id)

    def _recorded(self, record: AttemptRecord, at_ms: int) -> None:
        """It is on record before the pause is over, a moment after its predecessor was given up."""
        restarts, master = self._leaders.get((record.epoch, record.submission)), self.master_of(record.epoch)
        if restarts is None:
            return
        restarts.attempt = record.attempt
        failure = None if master is None else master.lifecycle.exceptions.newest
        if failure is None:
            return  # the first of the submission or of its leader; or the leader is gone
        pause_ms, longest_ms = master.lifecycle._restart_at_ms - at_ms, restarts.pause_ms(restarts.at_most)
        if pause_ms > longest_ms:
            self.report(
                "I16",
                f"attempt {record.attempt} is to wait {pause_ms} ms more, behind {restarts.at_most + 1} failures at most since the "
                f"last completed checkpoint; the restart strategy says {longest_ms} ms",
            )
        restarts.at_most += 1
        failed_ms = self._failed.get((record.attempt - 1, failure.error))
        if failed_ms is not None:
            restarts.earliest_ms[record.attempt] = failed_ms + restarts.pause_ms(restarts.at_least)
            restarts.at_least += 1

    def _deployed(self, attempt: int, epoch: int, at_ms: int) -> None:
        for (leader, _), restarts in self._leaders.items():
            earliest_ms = restarts.earliest_ms.pop(attempt, None) if leader == epoch else None
            if earliest_ms is not None and at_ms < earliest_ms:
                self.report(
                    "I16",
                    f"attempt {attempt} is deployed {earliest_ms - at_ms} ms before the end of the pause that follows a failure of "
                    "the user's code",
                )
