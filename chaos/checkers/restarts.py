"""Whether and when a failed job restarts, as its restart strategy says (of I16, docs/invariants.md; ADR 37 and 57).

The checker computes pauses and counts from the strategy and from the failures that it has seen. When a leader learned of a
checkpoint or of a failure can't be seen from outside: there is a number of failures that it counts at least, and one that it counts
at most. An attempt is not deployed before the shortest pause is over, nor later than the longest one once it is prepared and its
slots are ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.messages import Deploy, NotifyCheckpointComplete, SubtaskStatus, TaskState
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, Decided, JobLedger, ResultRecorded
from holdfast.chaos.checkers.observations import (
    Commanded,
    FaultBegan,
    Led,
    Lifecycle,
    Observation,
    Report,
    Reported,
    Stored,
    WorldView,
)
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.records import AttemptRecord, ResultRecord
from holdfast.coordinator.jobmaster.failover import is_final, is_of_user_code
from holdfast.coordinator.jobmaster.job import JobState

LATE_MS = 20
"""Time in which a leader that is awake deploys an attempt that waits for nothing."""
UNSURE_MS = 50
"""A pause that ends so soon around a change of leaders may count as over or not."""


@dataclass(slots=True)
class _Pauses:
    """The pauses that a strategy allows, computed from its fields."""

    strategy: RestartStrategy

    def _exact_ms(self, pauses: int) -> int:
        """Without jitter, behind so many pauses since the last reset."""
        strategy, pause_ms = self.strategy, float(self.strategy.delay_ms)
        if strategy.kind != "exponential_delay":
            return strategy.delay_ms
        for _ in range(pauses):
            if pause_ms >= strategy.delay_max_ms:
                break
            pause_ms *= strategy.backoff_multiplier
        return int(min(pause_ms, strategy.delay_max_ms))

    def shortest_ms(self, pauses: int) -> int:
        exact_ms = self._exact_ms(pauses)
        return exact_ms - self._jitter_ms(exact_ms)

    def longest_ms(self, pauses: int) -> int:
        exact_ms = self._exact_ms(pauses)
        return min(exact_ms + self._jitter_ms(exact_ms), max(exact_ms, self.strategy.delay_max_ms))

    def _jitter_ms(self, exact_ms: int) -> int:
        return int(exact_ms * self.strategy.jitter_factor) if self.strategy.kind == "exponential_delay" else 0


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure that counts for the strategy: the attempt behind it is on record."""

    earliest_ms: int
    """The attempt that failed was deployed then."""
    latest_ms: int
    is_certain: bool
    """Its leader was the newest one. A former leader's failure counts only for one that continues from its record."""


@dataclass(frozen=True, slots=True)
class _Resumed:
    """A pause on record, jitter included, and its end in virtual time."""

    pause_ms: int
    until_ms: int


@dataclass(slots=True)
class _Restarts:
    """Those of one submission under one leader."""

    pauses: _Pauses
    at_least: int = 0
    """Pauses since the last reset that its leader certainly counts: behind failures of the user's code, since others may be merged,
    or restart at once."""
    at_most: int = 0
    attempt: int = 0
    """Newest attempt on record."""
    told: set[int] = field(default_factory=set)
    """Completed ids whose notices were sent: the leader knows of them."""
    earliest_ms: dict[int, int] = field(default_factory=dict)
    """Attempt -> earliest time of its deployment."""
    over_ms: tuple[int, int] | None = None
    """Earliest and latest end of the newest pause."""
    resumed: _Resumed | None = None
    """A pause that a former leader began, and for whose rest the next attempt waits."""

    @property
    def threshold_ms(self) -> int | None:
        strategy = self.pauses.strategy
        return strategy.reset_backoff_threshold_ms if strategy.kind == "exponential_delay" else None


@dataclass(slots=True)
class _Awaited:
    """An attempt that is on record and not deployed."""

    attempt: int
    due_ms: int
    """Latest end of its pause."""
    ready_ms: int | None = None
    """Since when it waits for nothing else, as far as was looked."""


class RestartsChecker(Checker):
    """Judges each attempt behind a failure, when it is on record and when it is deployed, and the end of a job by a failure."""

    invariants: ClassVar[tuple[str, ...]] = ("I16",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Reported, Commanded, Led, Lifecycle, FaultBegan)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._leaders: dict[tuple[int, int], _Restarts] = {}
        """By epoch and submission."""
        self._failed: dict[tuple[int, str], int] = {}
        """(attempt, error) -> when a task first failed with it, ms; of the user's code."""
        self._deployed_ms: dict[int, int] = {}
        """Attempt -> when it was first deployed."""
        self._failures: dict[int, list[_Failure]] = {}
        """By submission, under all its leaders."""
        self._awaited: dict[int, _Awaited] = {}
        """By epoch."""
        self._behind: dict[int, int] = {}
        """Attempt -> newest epoch when it came on record: its leader may have read the records before."""
        self._is_unsure = False
        """A fault began since the last look: its leader may not know yet what it did."""
        self._clocks_jumped = False
        """Failures under a former leader may count for longer or shorter: their times are on record in wall-clock time."""

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
                    elif isinstance(change, ResultRecorded):
                        self._ended(change.record, observation.at_ms)
            case Reported(item=SubtaskStatus(state=TaskState.FAILED) as status):
                if is_of_user_code(status.error):
                    self._failed.setdefault((status.attempt, status.error), observation.at_ms)
            case Commanded(command=NotifyCheckpointComplete() as notice, epoch=epoch):
                self._told(notice, epoch)
            case Commanded(command=Deploy(deployment=deployment), epoch=epoch):
                self._deployed(deployment.attempt, epoch, observation.at_ms)
            case Led():
                self._led(observation)
            case Lifecycle() | FaultBegan():
                self._is_unsure = True
                for awaited in self._awaited.values():
                    awaited.ready_ms = None  # its leader, or a worker or its stream, may be away, and back before the next look
                self._clocks_jumped |= isinstance(observation, FaultBegan) and observation.kind == "clock_jump"
            case _:
                pass

    # ----------------------------------------------------------------------------------------------------------- resets

    def _completed(self) -> None:
        """From now on a leader may know."""
        for restarts in self._leaders.values():
            if restarts.threshold_ms is None:
                restarts.at_least = 0

    def _told(self, notice: NotifyCheckpointComplete, epoch: int) -> None:
        for (leader, _), restarts in self._leaders.items():
            if leader != epoch or restarts.threshold_ms is not None:
                continue
            restarts.at_least = 0
            if notice.attempt == restarts.attempt and notice.checkpoint_id not in restarts.told:  # it failed no more since
                restarts.at_most = 0
                restarts.told.add(notice.checkpoint_id)

    def _expire(self, restarts: _Restarts, earliest_ms: int, latest_ms: int) -> None:
        """A failure came between these times: was the threshold without a failure over?"""
        threshold_ms, over_ms = restarts.threshold_ms, restarts.over_ms
        if threshold_ms is None or over_ms is None:
            return
        if latest_ms - over_ms[0] >= threshold_ms:
            restarts.at_least = 0
        if earliest_ms - over_ms[1] >= threshold_ms:
            restarts.at_most = 0

    def _led(self, led: Led) -> None:
        """A strategy that outlasts its leader goes on with the pauses on record; any other one begins with the first."""
        strategy = led.graph.config.restart
        restarts = self._leaders[led.epoch, led.submission] = _Restarts(_Pauses(strategy))
        records = self._may_continue(led) if strategy.is_lasting else []
        writers = [self._leaders[each.epoch, each.submission] for each in records if (each.epoch, each.submission) in self._leaders]
        if not writers:
            return
        restarts.at_most = max(each.at_most for each in writers)
        ends_ms = [each.over_ms for each in writers if each.over_ms is not None]
        restarts.over_ms = (min(first for first, _ in ends_ms), max(last for _, last in ends_ms)) if ends_ms else None
        if len(records) == 1:  # else it is not known from which one its leader goes on
            restarts.at_least = writers[0].at_least
            self._continue(restarts, records[0], led)

    def _may_continue(self, led: Led) -> list[AttemptRecord]:
        """The record from which a leader goes on: the newest one, whoever wrote it, if only a former leader that woke too late.

        One that came when the leader had its epoch already may be unknown to it: then those before it are given as well."""
        found = []
        for number in sorted(self.ledger.attempts, reverse=True):
            record = self.ledger.attempts[number]
            if record.submission != led.submission:
                break
            found.append(record)
            if self._behind.get(number, 0) < led.epoch:
                break
        return found

    def _continue(self, restarts: _Restarts, record: AttemptRecord, led: Led) -> None:
        """The pause on record goes on, if it is not over."""
        if record.backoff is None or record.attempt in self._deployed_ms:
            return
        left_ms = min(record.backoff.until_ms - led.wall_ms, record.backoff.pause_ms)
        if left_ms > UNSURE_MS:
            restarts.resumed = _Resumed(record.backoff.pause_ms, led.at_ms + left_ms)
        elif left_ms > -UNSURE_MS:
            restarts.at_least = 0

    # --------------------------------------------------------------------------------------------------------- attempts

    def _recorded(self, record: AttemptRecord, at_ms: int) -> None:
        """It is on record before the pause is over, a moment after its predecessor was given up."""
        self._behind[record.attempt] = self.ledger.newest_epoch
        restarts, master = self._leaders.get((record.epoch, record.submission)), self.master_of(record.epoch)
        if restarts is None:
            return
        restarts.attempt = record.attempt
        resumed, restarts.resumed = restarts.resumed, None
        failure = None if master is None else master.lifecycle.exceptions.newest
        if failure is None:  # the first of the submission or of its leader; or the leader is gone
            restarts.at_most += 1 if master is None and record.restarts > 0 else 0
        elif resumed is not None:
            self._resume(record, restarts, resumed, at_ms)
        else:
            self._count(record, restarts, self._failed.get((record.attempt - 1, failure.error)), at_ms)

    def _resume(self, record: AttemptRecord, restarts: _Restarts, resumed: _Resumed, at_ms: int) -> None:
        """The attempt on record was never deployed: the next one waits for the rest of its pause."""
        pause_ms = None if record.backoff is None else record.backoff.pause_ms
        if pause_ms != resumed.pause_ms:
            text = f"attempt {record.attempt} has a pause of {pause_ms} ms on record"
            self.report("I16", f"{text}; its predecessor, which was never deployed, had one of {resumed.pause_ms} ms")
        restarts.earliest_ms[record.attempt] = resumed.until_ms
        self._awaited[record.epoch] = _Awaited(record.attempt, max(at_ms, resumed.until_ms))

    def _count(self, record: AttemptRecord, restarts: _Restarts, failed_ms: int | None, at_ms: int) -> None:
        """`failed_ms`: when the user's code failed, if that was it."""
        earliest_ms = failed_ms if failed_ms is not None else self._deployed_ms.get(record.attempt - 1, 0)
        self._expire(restarts, earliest_ms, at_ms)
        shortest_ms = restarts.pauses.shortest_ms(restarts.at_least) if failed_ms is not None else 0
        longest_ms = restarts.pauses.longest_ms(restarts.at_most)
        if record.backoff is not None and not shortest_ms <= record.backoff.pause_ms <= longest_ms:
            pause = f"attempt {record.attempt} has a pause of {record.backoff.pause_ms} ms on record"
            self.report("I16", f"{pause}; the restart strategy says {shortest_ms} to {longest_ms} ms")
        self._check_limits(record, restarts, at_ms)
        restarts.over_ms = (earliest_ms + shortest_ms, at_ms + longest_ms)
        restarts.at_most += 1
        self._awaited[record.epoch] = _Awaited(record.attempt, at_ms + longest_ms)
        if failed_ms is not None:
            restarts.earliest_ms[record.attempt] = failed_ms + shortest_ms
            restarts.at_least += 1
        failure = _Failure(earliest_ms, at_ms, record.epoch == self.ledger.newest_epoch)
        self._failures.setdefault(record.submission, []).append(failure)

    def _check_limits(self, record: AttemptRecord, restarts: _Restarts, at_ms: int) -> None:
        """The strategy allows the attempt."""
        strategy = restarts.pauses.strategy
        before = self.ledger.attempts.get(record.attempt - 1)
        if before is None or record.restarts == before.restarts:
            return  # it is not counted
        which = f"attempt {record.attempt} is restart {record.restarts}"
        if strategy.kind == "none" or record.restarts > strategy.attempts_max:
            self.report("I16", f"{which}; {strategy.describe()}")
        elif strategy.kind == "exponential_delay" and restarts.at_least >= strategy.attempts_before_reset_max:
            self.report("I16", f"{which}, behind {restarts.at_least} pauses without a reset; {strategy.describe()}")
        elif strategy.kind == "failure_rate" and not self._clocks_jumped:
            since_ms = at_ms - strategy.failure_rate_interval_ms
            failures = self._failures.get(record.submission, ())
            certain = sum(each.is_certain and each.earliest_ms >= since_ms for each in failures)
            if certain >= strategy.failures_per_interval_max:
                self.report("I16", f"{which}, behind {certain} others within the interval; {strategy.describe()}")

    def _ended(self, record: ResultRecord, at_ms: int) -> None:
        """A failure of the user's code ends a job only when its strategy allows no restart."""
        restarts = self._leaders.get((record.epoch, record.submission))
        attempts = [each for each in self.ledger.attempts.values() if each.submission == record.submission]
        if record.state != "FAILED" or restarts is None or not attempts or is_final(record.cause):
            return
        newest = max(attempts, key=lambda each: each.attempt)
        failed_ms = self._failed.get((newest.attempt, record.cause))
        strategy = restarts.pauses.strategy
        if failed_ms is None or strategy.kind == "none" or newest.restarts >= strategy.attempts_max:
            return
        if strategy.kind == "failure_rate":
            since_ms = failed_ms - strategy.failure_rate_interval_ms
            possible = sum(each.latest_ms >= since_ms for each in self._failures.get(record.submission, ()))
            is_due = possible >= strategy.failures_per_interval_max or self._clocks_jumped
        else:
            possible = restarts.at_most
            is_due = strategy.kind == "exponential_delay" and possible >= strategy.attempts_before_reset_max
        if not is_due:
            self.report("I16", f"the job ended by a failure, behind {possible} others that count at most; {strategy.describe()}")

    # ------------------------------------------------------------------------------------------------------- deployments

    def _deployed(self, attempt: int, epoch: int, at_ms: int) -> None:
        self._deployed_ms.setdefault(attempt, at_ms)
        for (leader, _), restarts in self._leaders.items():
            earliest_ms = restarts.earliest_ms.pop(attempt, None) if leader == epoch else None
            if earliest_ms is not None and at_ms < earliest_ms:
                early = f"attempt {attempt} is deployed {earliest_ms - at_ms} ms before the end of the pause"
                self.report("I16", f"{early} that follows a failure")
        awaited = self._awaited.get(epoch)
        if awaited is not None and awaited.attempt == attempt:
            self._check_late(awaited, at_ms)
            del self._awaited[epoch]

    def look(self) -> None:
        now_ms = self.world.now_ms
        hosts = self.world.coordinators() if self._awaited else []
        asleep = {service.epoch for host in hosts if host.process.paused for service in host.services}
        is_sure, self._is_unsure = not self._is_unsure, False
        for epoch, awaited in list(self._awaited.items()):
            if is_sure and epoch not in asleep and self._waits_for_nothing(self.master_of(epoch), awaited.attempt):
                awaited.ready_ms = now_ms if awaited.ready_ms is None else awaited.ready_ms
                if self._check_late(awaited, now_ms):
                    del self._awaited[epoch]
            else:
                awaited.ready_ms = None

    def _check_late(self, awaited: _Awaited, at_ms: int) -> bool:
        late_ms = 0 if awaited.ready_ms is None else at_ms - max(awaited.ready_ms, awaited.due_ms)
        if late_ms > LATE_MS:
            late = f"attempt {awaited.attempt} waits {late_ms} ms beyond the longest pause"
            self.report("I16", f"{late} that the restart strategy allows")
        return late_ms > LATE_MS

    def _waits_for_nothing(self, master: Any, attempt: int) -> bool:
        """Its pause is all that keeps a leader from deploying an attempt."""
        if master is None or master.lifecycle.attempt != attempt or master.state is not JobState.RESTARTING:
            return False
        is_quiet: bool = master.coordinator.is_quiet and master.lifecycle.next.is_prepared and master.slot_pool.all_ready()
        return is_quiet and not master.lifecycle.is_ending
