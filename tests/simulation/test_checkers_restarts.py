"""Restarts: what the checker says of pauses, limits and new leaders, and what it must not, since no leader could have known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.messages import SubtaskStatus, TaskState
from holdfast.chaos.checkers.observations import FaultBegan, Lifecycle, Reported
from holdfast.chaos.checkers.restarts import RestartsChecker
from holdfast.coordinator.ha.records import BackoffRecord, ResultRecord, encode_record
from holdfast.coordinator.jobmaster.failover import Failure
from holdfast.coordinator.jobmaster.job import JobState
from tests.simulation.checker_world import JOB
from tests.simulation.test_checkers_pacing import Job

USER, LOST = "UserFunctionError: operator 'count': no", "WorkerLost: slot 0"
STRATEGY = RestartStrategy(delay_ms=100, delay_max_ms=300)
THRESHOLD = RestartStrategy(delay_ms=100, delay_max_ms=400, reset_backoff_threshold_ms=1_000)
JITTER = RestartStrategy(delay_ms=100, delay_max_ms=1_000, backoff_multiplier=3, jitter_factor=0.2)
RATE = RestartStrategy("failure_rate", delay_ms=50, failures_per_interval_max=2, failure_rate_interval_ms=1_000)


class Restarting(Job):
    """A job that fails, and is deployed again after a pause. What it waits for is there at once, unless a test says otherwise."""

    def __init__(self, strategy: RestartStrategy = STRATEGY) -> None:
        self.is_ready = True
        super().__init__(restart=strategy)
        self.master.state = JobState.RESTARTING
        self.master.coordinator.is_quiet = True
        self.master.slot_pool = SimpleNamespace(all_ready=lambda: self.is_ready)
        self.master.lifecycle.next = SimpleNamespace(is_prepared=True)
        self.master.lifecycle.is_ending = False

    def fail(self, error: str = USER) -> None:  # type: ignore[override]
        if error == USER:
            status = SubtaskStatus(self.attempt, "count" * 6, 0, TaskState.FAILED, error=error)
            self.tell(Reported(self.now_ms, "worker-0.1", 0, status))
        self.master.lifecycle.exceptions.newest = Failure(error)

    def wait(self, until_ms: int) -> None:
        """The checker looks every 10 ms."""
        self.master.lifecycle.attempt = self.attempt
        (checker,) = [each for each in self.checkers if isinstance(each, RestartsChecker)]
        while self.now_ms < until_ms:
            checker.look()
            self.now_ms = min(self.now_ms + 10, until_ms)

    def fail_and_wait(self, pause_ms: int, error: str = USER, restored: int = 0, backoff: BackoffRecord | None = None) -> None:
        failed_ms = self.now_ms
        self.fail(error)
        self.record_attempt(restored, backoff=backoff)
        self.wait(failed_ms + pause_ms)
        self.deploy(restored)

    def complete(self, number: int, *, told: bool = True) -> None:  # type: ignore[override]
        self.take(number)
        self.make_durable(number)
        if told:
            self.notify(number)

    def change_leader(self) -> None:
        """Another leader takes over the submission."""
        self.lead()
        self.tell_led()
        self.lead_alive()

    def end(self, cause: str) -> None:  # type: ignore[override]
        record = ResultRecord(self.submission, "FAILED", self.epoch, "n", 0, 0, cause)
        self.put(f"{JOB}/results/{self.submission}.json", encode_record(record))


def test_pauses_that_double_up_to_the_longest_and_are_the_first_again_after_a_checkpoint() -> None:
    job = Restarting()
    for pause_ms in (100, 200, 300, 300):
        job.fail_and_wait(pause_ms)
    job.complete(1)
    job.fail_and_wait(100, restored=1)
    job.fail_and_wait(200, restored=1)
    assert job.violations == []


def test_a_job_that_user_code_fails_restarts_at_once() -> None:
    job = Restarting()
    job.fail_and_wait(20)
    assert job.broken == ["I16"]
    assert " ms before the end of the pause" in job.violations[0][1]


def test_a_second_pause_as_short_as_the_first() -> None:
    job = Restarting()
    job.fail_and_wait(100)
    job.fail_and_wait(100)
    assert job.broken == ["I16"]


def test_a_pause_that_a_checkpoint_did_not_take_back() -> None:
    job = Restarting()
    job.fail_and_wait(100)
    job.complete(1)
    job.fail_and_wait(200, restored=1)
    assert job.broken == ["I16"]
    assert "ms beyond the longest pause" in job.violations[0][1]


def test_a_pause_longer_than_the_longest() -> None:
    job = Restarting(RestartStrategy("fixed_delay", delay_ms=50))
    job.fail_and_wait(50)
    job.fail_and_wait(90)
    assert job.broken == ["I16"]


@pytest.mark.parametrize("pause_ms", [100, 200])
def test_a_leader_may_not_know_yet_of_a_durable_checkpoint(pause_ms: int) -> None:
    job = Restarting()
    job.fail_and_wait(100)
    job.complete(1, told=False)
    job.fail_and_wait(pause_ms, restored=1)
    assert job.violations == []


@pytest.mark.parametrize("pause_ms", [0, 100])
def test_what_is_not_the_users_may_restart_at_once(pause_ms: int) -> None:
    job = Restarting()
    job.fail_and_wait(pause_ms, LOST)
    job.fail_and_wait(100)
    assert job.violations == []


@pytest.mark.parametrize(
    "wait",
    ["workers", "preparation", "an undecided id", "its process", "a stream", "a stream that seems open", "a leader that sleeps"],
)
def test_a_deployment_that_has_to_wait_is_not_too_late(wait: str) -> None:
    job = Restarting()
    job.is_ready = wait != "workers"
    job.master.lifecycle.next.is_prepared = wait != "preparation"
    job.master.coordinator.is_quiet = wait != "an undecided id"
    job.live_coordinators[0].process.paused = wait == "a leader that sleeps"
    job.fail()
    job.record_attempt(0)
    if wait == "its process":
        job.wait(100)
        job.now_ms = 5_000
        job.tell(Lifecycle(job.now_ms, "coordinator-1", "coordinator", "resumed"))
    elif wait == "a stream":  # it is open again before the checker looks
        job.wait(90)
        job.tell(FaultBegan(job.now_ms, 0, "break_stream"))
        job.now_ms = 130
    elif wait == "a stream that seems open":  # its leader learns of its end behind the checker's look
        job.wait(90)
        job.tell(FaultBegan(job.now_ms, 0, "break_stream"))
        job.wait(100)
        job.now_ms = 150
    else:
        job.wait(5_000)
    job.deploy()
    assert job.violations == []


def test_a_new_leader_begins_with_the_first_pause() -> None:
    job = Restarting()
    job.fail_and_wait(100)
    job.fail_and_wait(200)
    job.change_leader()
    job.master.lifecycle.exceptions.newest = None
    job.record_attempt(0)
    job.deploy()
    job.fail_and_wait(100)
    assert job.violations == []


# --------------------------------------------------------------------------------------------------- other strategies


@pytest.mark.parametrize(("second_ms", "broken"), [(300, []), (100, ["I16"]), (400, ["I16"])])
def test_a_multiplier(second_ms: int, broken: list[str]) -> None:
    job = Restarting(RestartStrategy(delay_ms=100, backoff_multiplier=3))
    job.fail_and_wait(100)
    job.fail_and_wait(second_ms)
    assert job.broken == broken


@pytest.mark.parametrize(("pause_ms", "broken"), [(80, []), (120, []), (70, ["I16"]), (160, ["I16"])])
def test_jitter_has_bounds(pause_ms: int, broken: list[str]) -> None:
    job = Restarting(JITTER)
    job.fail_and_wait(pause_ms)
    assert job.broken == broken


@pytest.mark.parametrize(("pause_ms", "broken"), [(80, []), (120, []), (79, ["I16"]), (121, ["I16"])])
def test_the_pause_on_record_has_the_same_bounds(pause_ms: int, broken: list[str]) -> None:
    job = Restarting(JITTER)
    job.fail_and_wait(100, backoff=BackoffRecord(pause_ms, 0))
    assert job.broken == broken


@pytest.mark.parametrize(
    ("quiet_ms", "pause_ms", "broken"), [(500, 200, []), (500, 100, ["I16"]), (1_500, 100, []), (1_500, 200, ["I16"])]
)
def test_time_without_a_failure_resets_the_pause_and_a_checkpoint_does_not(quiet_ms: int, pause_ms: int, broken: list[str]) -> None:
    job = Restarting(THRESHOLD)
    job.fail_and_wait(100)
    job.complete(1)
    job.now_ms += quiet_ms
    job.fail_and_wait(pause_ms, restored=1)
    assert job.broken == broken


@pytest.mark.parametrize(("apart_ms", "broken"), [(100, ["I16"]), (600, [])])
def test_a_rate_that_is_exceeded(apart_ms: int, broken: list[str]) -> None:
    job = Restarting(RATE)
    for _ in range(3):
        job.fail_and_wait(50)
        job.now_ms += apart_ms
    assert job.broken == broken


def test_failures_under_a_former_leader_count_for_the_rate_as_long_as_clocks_agree() -> None:
    for jumped in (False, True):
        job = Restarting(RATE)
        job.fail_and_wait(50)
        job.fail_and_wait(50)
        job.change_leader()
        if jumped:
            job.tell(FaultBegan(job.now_ms, 0, "clock_jump"))
        job.fail_and_wait(50)
        assert job.broken == ([] if jumped else ["I16"])


def test_restarts_beyond_their_number() -> None:
    job = Restarting(RestartStrategy(delay_ms=100, attempts_max=1))
    job.fail_and_wait(100)
    job.fail_and_wait(200)
    assert job.broken == ["I16"]
    assert "at most 1 restarts in all" in job.violations[0][1]


def test_restarts_beyond_their_number_without_a_reset() -> None:
    job = Restarting(RestartStrategy(delay_ms=100, attempts_before_reset_max=1))
    job.fail_and_wait(100)
    job.complete(1)
    job.fail_and_wait(100, restored=1)
    assert job.violations == []
    job.fail_and_wait(200, restored=1)
    assert job.broken == ["I16"]


@pytest.mark.parametrize(
    ("strategy", "failures", "broken"),
    [
        (STRATEGY, 3, ["I16"]),
        (RATE, 1, ["I16"]),
        (RATE, 2, []),
        (RestartStrategy("none"), 0, []),
        (RestartStrategy("fixed_delay", 1, 50), 1, []),
        (RestartStrategy("fixed_delay", 2, 50), 1, ["I16"]),
        (RestartStrategy(delay_ms=50, backoff_multiplier=1, attempts_before_reset_max=1), 1, []),
        (RestartStrategy(delay_ms=50, backoff_multiplier=1, attempts_before_reset_max=2), 1, ["I16"]),
    ],
)
def test_a_job_ends_only_when_its_strategy_allows_no_restart(strategy: RestartStrategy, failures: int, broken: list[str]) -> None:
    job = Restarting(strategy)
    for pause_ms in (100, 200, 300)[:failures]:
        job.fail_and_wait(50 if strategy is not STRATEGY else pause_ms)
    job.fail()
    job.end(USER)
    assert job.broken == broken


def test_a_failure_that_no_restart_mends_ends_a_job() -> None:
    job = Restarting()
    job.fail()
    job.end("CorruptStateError: chk-1/_metadata is damaged")
    assert job.violations == []


# -------------------------------------------------------------------------------------------------------- new leaders


@pytest.mark.parametrize(
    ("pause_ms", "waited_ms", "broken"),
    [
        (110, 110, []),
        (110, 150, ["I16"]),  # as on record, and too late
        (110, 60, ["I16"]),
        (90, 110, ["I16"]),  # drawn again
    ],
)
def test_a_new_leader_continues_the_pause_on_record(pause_ms: int, waited_ms: int, broken: list[str]) -> None:
    job = Restarting(JITTER)
    failed_ms = job.now_ms
    job.fail()
    job.record_attempt(0, backoff=BackoffRecord(110, failed_ms + 110))
    job.now_ms = failed_ms + 30
    job.change_leader()
    job.fail(LOST)
    job.record_attempt(0, restarts=job.restarts[1], backoff=BackoffRecord(pause_ms, failed_ms + pause_ms))
    job.wait(failed_ms + waited_ms)
    job.deploy()
    assert job.broken == broken


@pytest.mark.parametrize(("pause_ms", "broken"), [(300, []), (100, ["I16"])])
def test_a_new_leader_counts_pauses_on(pause_ms: int, broken: list[str]) -> None:
    job = Restarting(RestartStrategy(delay_ms=100, backoff_multiplier=3, attempts_before_reset_max=9))
    job.fail_and_wait(100, backoff=BackoffRecord(100, 0))
    job.change_leader()
    job.fail_and_wait(pause_ms)
    assert job.broken == broken


class FormerLeader(Restarting):
    """A former leader wakes, and puts on record the attempt behind a failure that it counts."""

    def __init__(self, strategy: RestartStrategy) -> None:
        super().__init__(strategy)
        self.live_former = self.live_coordinators

    def wake(self, backoff: BackoffRecord) -> None:
        newest, self.epoch = self.epoch, self.epoch - 1
        live, self.live_coordinators = self.live_coordinators, self.live_former
        self.fail()
        self.record_attempt(0, backoff=backoff)
        self.epoch, self.live_coordinators = newest, live
        self.master.lifecycle.exceptions.newest = None

    def resume(self, backoff: BackoffRecord) -> None:
        """The newest leader finds nobody running the attempt on record, and waits for the rest of its pause."""
        self.fail(LOST)
        self.record_attempt(0, restarts=self.restarts[self.submission], backoff=backoff)
        self.wait(backoff.until_ms + 1)
        self.deploy()


LASTING = RestartStrategy(delay_ms=100, backoff_multiplier=3, attempts_before_reset_max=9)


@pytest.mark.parametrize(("pause_ms", "broken"), [(300, []), (100, ["I16"]), (900, ["I16"])])
def test_a_leader_goes_on_from_the_record_of_one_that_woke_behind_its_successor(pause_ms: int, broken: list[str]) -> None:
    """The successor, whose attempt was not on record, counts for nothing."""
    job = FormerLeader(LASTING)
    job.change_leader()
    backoff = BackoffRecord(100, job.now_ms + 100)
    job.wake(backoff)
    job.change_leader()
    job.resume(backoff)
    job.fail_and_wait(pause_ms, backoff=BackoffRecord(pause_ms, 0))
    assert job.broken[:1] == broken


@pytest.mark.parametrize(("pause_ms", "broken"), [(100, []), (300, []), (2_700, ["I16"])])
def test_a_leader_may_not_have_read_a_record_that_came_behind_its_epoch(pause_ms: int, broken: list[str]) -> None:
    job = FormerLeader(LASTING)
    job.lead()
    backoff = BackoffRecord(100, job.now_ms + 100)
    job.wake(backoff)
    job.tell_led()
    job.lead_alive()
    job.resume(backoff)
    job.fail_and_wait(pause_ms, backoff=BackoffRecord(pause_ms, 0))
    assert job.broken[:1] == broken


@pytest.mark.parametrize(("woke", "broken"), [(True, []), (False, ["I16"])])
def test_a_failure_that_a_former_leader_put_on_record_may_end_a_job(woke: bool, broken: list[str]) -> None:
    job = FormerLeader(RestartStrategy("failure_rate", delay_ms=100, failures_per_interval_max=2, failure_rate_interval_ms=2_000))
    job.fail_and_wait(100)
    job.change_leader()
    if woke:
        backoff = BackoffRecord(100, job.now_ms + 100)
        job.wake(backoff)
        job.change_leader()
        job.resume(backoff)
    job.fail()
    job.end(USER)
    assert job.broken == broken
