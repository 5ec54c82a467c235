"""When checkpoints begin and how many may fail: what the checker says, and what it must not, since nobody could have known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.jobmaster.failover import Failure
from tests.simulation.checker_world import Story, graph, process

PAUSE_MS = 50


class Job(Story):
    """A job whose leader can be looked into."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.graph = graph(1, **config)
        self.pending: list[SimpleNamespace] = []
        exceptions = SimpleNamespace(newest=None)
        self.master = SimpleNamespace(
            setup=SimpleNamespace(submission=1, graph=SimpleNamespace(config=SimpleNamespace(checkpoint_timeout_ms=0))),
            coordinator=SimpleNamespace(pending=self.pending),
            lifecycle=SimpleNamespace(exceptions=exceptions, attempt=0),
        )
        self.begin()
        self.lead_alive()

    def lead_alive(self) -> None:
        self.live_coordinators = [process("coordinator-1", services=[SimpleNamespace(epoch=self.epoch, _master=self.master)])]

    def take(self, number: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT, *, periodic: bool = True) -> None:
        """An id is claimed for a request that its leader took up just now, and triggered."""
        self.pending[:] = [
            SimpleNamespace(
                checkpoint_id=number, started_ms=self.now_ms, request=SimpleNamespace(periodic=periodic), is_undecided=False
            )
        ]
        self.claim(number, kind)
        self.trigger(number)

    def make_durable(self, number: int) -> None:
        self.decide(number, self.snapshot(number, self.acknowledge(number)))

    def fail(self, number: int, *, told: bool = True) -> None:
        """It is taken, and expires."""
        self.take(number)
        self.abort(number)
        if told:
            self.notify_aborted(number)

    def give_up(self, number: int, restored: int = 0) -> None:
        """The attempt ends for a checkpoint that failed."""
        self.master.lifecycle.exceptions.newest = Failure(f"CheckpointFailed: checkpoint {number}: expired: no answer")
        self.record_attempt(restored)


# -------------------------------------------------------------------------------------------------------------- pauses


def completed(job: Job) -> None:
    job.take(1)
    job.make_durable(1)
    job.notify(1)


def test_a_periodic_checkpoint_in_the_pause() -> None:
    job = Job(min_pause_ms=PAUSE_MS)
    completed(job)
    job.now_ms += 10
    job.take(2)
    assert job.broken == ["I16"]
    assert f"the pause is {PAUSE_MS} ms" in job.violations[0][1]


def test_one_behind_the_pause_and_one_that_a_user_asked_for() -> None:
    job = Job(min_pause_ms=PAUSE_MS)
    completed(job)
    job.take(2, periodic=False)
    job.make_durable(2)
    job.notify(2)
    job.now_ms += PAUSE_MS
    job.take(3)
    assert job.violations == []


def test_one_that_began_before_its_leader_knew_of_the_last() -> None:
    job = Job(min_pause_ms=PAUSE_MS)
    job.take(1)
    job.make_durable(1)  # the answer is on its way
    job.take(2)
    job.notify(1)
    assert job.violations == []


# ------------------------------------------------------------------------------------------------------------ failures


def test_too_many_failures_and_the_attempt_goes_on() -> None:
    job = Job(tolerable_failed_checkpoints=1)
    job.fail(1)
    job.fail(2)
    assert job.violations == []
    job.take(3)
    assert job.broken == ["I16"]
    assert "after 2 failed in a row" in job.violations[0][1]


@pytest.mark.parametrize("kind", [CheckpointKind.CHECKPOINT, CheckpointKind.SAVEPOINT])
def test_a_success_between_failures(kind: CheckpointKind) -> None:
    job = Job(tolerable_failed_checkpoints=1)
    job.fail(1)
    job.take(2, kind)
    job.make_durable(2)
    if kind is CheckpointKind.CHECKPOINT:
        job.notify(2)
    job.fail(3)
    job.take(4)
    assert job.violations == []


def test_an_attempt_that_is_given_up_too_early() -> None:
    job = Job(tolerable_failed_checkpoints=1)
    job.fail(1)
    job.take(2)
    job.make_durable(2)
    job.notify(2)
    job.fail(3)
    job.give_up(3, restored=2)
    assert job.broken == ["I16"]
    assert "after 1 failed checkpoints in a row; 1 are tolerable" in job.violations[0][1]


def test_an_attempt_that_is_given_up_in_time() -> None:
    job = Job(tolerable_failed_checkpoints=1)
    job.fail(1)
    job.fail(2)
    job.give_up(2)
    assert job.violations == []


def test_a_failure_that_its_leader_heard_of_before_an_earlier_success() -> None:
    job = Job(tolerable_failed_checkpoints=0)
    job.take(1)
    job.take(2)
    job.abort(2)
    job.make_durable(1)
    job.notify(1)
    job.give_up(2, restored=1)
    assert job.violations == []


def test_a_stop_that_failed_ends_the_attempt_whatever_is_tolerated() -> None:
    job = Job(tolerable_failed_checkpoints=5)
    job.take(1, CheckpointKind.STOP_SAVEPOINT)
    job.abort(1)
    job.give_up(1)
    assert job.violations == []


def test_a_new_leader_counts_anew() -> None:
    job = Job(tolerable_failed_checkpoints=1)
    job.fail(1)
    job.lead()
    job.submit(2)
    job.lead_alive()
    job.record_attempt(0)
    job.fail(2)
    job.take(3)
    assert job.violations == []


def test_a_failure_of_which_nobody_was_told_counts_for_its_leader() -> None:
    """It gives up an attempt earlier than the notices say, and counts anew."""
    job = Job(tolerable_failed_checkpoints=1)
    job.fail(1, told=False)
    job.fail(2)
    job.give_up(2)
    job.fail(3)
    job.take(4)
    assert job.violations == []


def test_a_failure_before_an_attempt_of_which_its_workers_are_told() -> None:
    """Workers that register hear of the newest aborted ids: those of the attempt before don't count against theirs."""
    job = Job(tolerable_failed_checkpoints=0)
    job.fail(1, told=False)
    job.give_up(1)
    job.notify_aborted(1)
    job.take(2)
    assert job.violations == []
    job.abort(2)
    job.notify_aborted(2)
    job.take(3)
    assert job.broken == ["I16"]


@pytest.mark.parametrize(("kind", "broken"), [(CheckpointKind.FINAL, []), (CheckpointKind.SAVEPOINT, ["I16"])])
def test_failing_storage_counts_unless_it_is_a_savepoint_that_it_failed(kind: CheckpointKind, broken: list[str]) -> None:
    job = Job(tolerable_failed_checkpoints=0)
    job.take(1, kind)
    job.fail_call("coordinator-1")
    job.abort(1, reason=FailureReason.IO_EXCEPTION)
    job.give_up(1)
    assert job.broken == broken
