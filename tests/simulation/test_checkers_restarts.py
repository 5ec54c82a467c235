"""The pauses before restarts: what the checker says, and what it must not, since nobody could have known."""

from __future__ import annotations

import pytest

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.messages import SubtaskStatus, TaskState
from holdfast.chaos.checkers.observations import Reported
from holdfast.coordinator.jobmaster.failover import Failure
from tests.simulation.test_checkers_pacing import Job

USER, LOST = "UserFunctionError: operator 'count': no", "WorkerLost: slot 0"
STRATEGY = RestartStrategy(delay_ms=100, delay_max_ms=300)


class Restarting(Job):
    """A job that fails, and is deployed again after a pause."""

    def __init__(self, strategy: RestartStrategy = STRATEGY) -> None:
        super().__init__(restart=strategy)

    def fail_and_wait(self, pause_ms: int, error: str = USER, restored: int = 0, planned_ms: int | None = None) -> None:
        """`planned_ms`: what the leader means to wait, if it is not `pause_ms`."""
        if error == USER:
            status = SubtaskStatus(self.attempt, "count" * 6, 0, TaskState.FAILED, error=error)
            self.tell(Reported(self.now_ms, "worker-0.1", 0, status))
        self.master.lifecycle.exceptions.newest = Failure(error)
        failed_ms = self.now_ms
        self.master.lifecycle._restart_at_ms = failed_ms + (pause_ms if planned_ms is None else planned_ms)
        self.record_attempt(restored)
        self.now_ms = failed_ms + pause_ms
        self.deploy(restored)

    def complete(self, number: int, *, told: bool = True) -> None:  # type: ignore[override]
        self.take(number)
        self.make_durable(number)
        if told:
            self.notify(number)


def test_pauses_that_double_up_to_the_longest_and_begin_anew_after_a_checkpoint() -> None:
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
    assert "is to wait 2" in job.violations[0][1]


def test_a_pause_longer_than_the_longest() -> None:
    job = Restarting(RestartStrategy("fixed_delay", delay_ms=50))
    job.fail_and_wait(50)
    job.fail_and_wait(51)
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


def test_a_deployment_that_has_to_wait_for_workers_is_not_too_late() -> None:
    job = Restarting()
    job.fail_and_wait(5_000, planned_ms=100)
    assert job.violations == []


def test_a_new_leader_begins_with_the_first_pause() -> None:
    job = Restarting()
    job.fail_and_wait(100)
    job.fail_and_wait(200)
    job.lead()
    job.submit(2)
    job.lead_alive()
    job.master.lifecycle.exceptions.newest = None
    job.record_attempt(0)
    job.deploy()
    job.fail_and_wait(100)
    assert job.violations == []
