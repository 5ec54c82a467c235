"""Which request goes next (scenarios G)."""

from __future__ import annotations

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason, TaskState
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.checkpoints.requests import CheckpointRequestDecider, Execute, Load, Refused, TooEarly
from holdfast.coordinator.jobmaster.jobmaster import TriggerRegister
from tests.coordinator.bench import A, Bench, needs_several, of

PERIODIC = CheckpointRequest(periodic=True)
USER = CheckpointRequest(trigger_id="user")
SAVEPOINT = CheckpointRequest(CheckpointKind.SAVEPOINT, "savepoint", folder="/s")
IDLE = Load(preparing=False, pending=0, deleting=0, pause_until_ms=0)
FULL = Load(preparing=False, pending=1, deleting=0, pause_until_ms=0)


def queue_of(*requests: CheckpointRequest, size_max: int = 1000) -> CheckpointRequestDecider:
    queue = CheckpointRequestDecider(1, size_max=size_max)
    for request in requests:
        assert queue.add(request) is None
    return queue


def test_g01_periodic_request_goes_at_once_when_nothing_is_pending() -> None:
    assert queue_of(PERIODIC).next(IDLE, 0) == Execute(PERIODIC)


@needs_several
def test_g02_request_waits_while_another_is_being_prepared() -> None:
    bench = Bench()
    bench.held = {actions.WriteClaim}
    bench.request()
    assert bench.request() == []
    out = bench.handle(events.ClaimWritten(1))
    assert [type(action) for action in out] == [actions.SendTriggers, actions.WriteClaim]


def test_g03_periodic_request_waits_for_a_free_place() -> None:
    queue = queue_of(PERIODIC)
    assert queue.next(FULL, 0) is None
    assert queue.next(IDLE, 0) == Execute(PERIODIC)


def test_g04_savepoint_does_not_wait_for_a_place() -> None:
    assert queue_of(SAVEPOINT).next(FULL, 0) == Execute(SAVEPOINT)


def test_g05_user_before_periodic_savepoint_before_checkpoint_then_by_time() -> None:
    later = CheckpointRequest(trigger_id="later")
    queue = queue_of(PERIODIC, USER, SAVEPOINT, later)
    order = [queue.next(IDLE, 0) for _ in range(4)]
    assert order == [Execute(SAVEPOINT), Execute(USER), Execute(later), Execute(PERIODIC)]


def test_g06_full_queue_drops_the_lowest_rank() -> None:
    queue = queue_of(PERIODIC, USER, size_max=2)
    assert queue.add(SAVEPOINT) == Refused(PERIODIC, FailureReason.TOO_MANY_REQUESTS)
    assert queue.add(PERIODIC) == Refused(PERIODIC, FailureReason.TOO_MANY_REQUESTS)
    assert len(queue) == 2


def test_g07_periodic_requests_wait_until_deletions_catch_up_users_do_not() -> None:
    bench = Bench(max_concurrent_checkpoints=1)
    bench.held = {actions.DropCheckpoint}
    for number in (1, 2, 3):
        bench.request()
        bench.ack_all(number)
    bench.trigger()
    assert bench.pending == []
    bench.request()
    assert bench.pending == [4]
    bench.ack_all(4)
    for number in (1, 2, 3):
        bench.handle(events.CheckpointDropped(number))
    assert bench.pending == [5]


def test_g08_periodic_request_inside_the_pause_is_dropped_and_its_tick_moved() -> None:
    queue = queue_of(PERIODIC)
    paused = Load(preparing=False, pending=0, deleting=0, pause_until_ms=30)
    assert queue.next(paused, 29) == TooEarly(PERIODIC)
    assert len(queue) == 0


def test_g09_manual_checkpoint_ignores_the_pause() -> None:
    bench = Bench(min_pause_ms=1000)
    bench.request()
    bench.ack_all(1)
    bench.request()
    assert bench.pending == [2]


def test_g10_stopped_scheduler_drops_periodic_and_executes_manual_requests() -> None:
    bench = Bench(checkpoint_interval_ms=10)
    bench.start_scheduler()
    bench.handle(events.SchedulerStopped())
    bench.advance(1000)
    assert bench.pending == []
    bench.request()
    assert bench.pending == [1]


def test_g11_nothing_goes_after_the_shutdown() -> None:
    bench = Bench()
    bench.handle(events.ShutDown())
    assert of(bench.request(), actions.CompleteRequest)[0].failure is FailureReason.COORDINATOR_SHUTDOWN


@needs_several
def test_g12_failed_claim_fails_one_request_and_the_others_go_on() -> None:
    bench = Bench()
    bench.held = {actions.WriteClaim}
    for name in ("one", "two", "three"):
        bench.request(name=name)
    failed = bench.handle(events.ClaimFailed(1, "counter throws", ambiguous=False))
    assert of(failed, actions.CompleteRequest)[0].failure is FailureReason.TRIGGER_FAILURE
    bench.handle(events.ClaimWritten(1))
    bench.handle(events.ClaimWritten(2))
    assert bench.pending == [1, 2]


def test_g12_ambiguous_claim_uses_the_id_up() -> None:
    bench = Bench()
    bench.held = {actions.WriteClaim}
    bench.request()
    out = bench.handle(events.ClaimFailed(1, "timeout", ambiguous=True))
    assert of(out, actions.WriteAborted)[0].checkpoint_id == 1
    assert of(out, actions.CompleteRequest)[0].failure is FailureReason.TRIGGER_FAILURE
    bench.request()
    assert bench.all(actions.WriteClaim)[-1].checkpoint_id == 2


def test_g13_expiry_while_the_claim_is_written_triggers_nobody() -> None:
    bench = Bench(checkpoint_timeout_ms=100, tolerable_failed_checkpoints=1)
    bench.held = {actions.WriteClaim}
    bench.request()
    bench.now = 150
    out = bench.handle(events.ClaimWritten(1))
    assert not of(out, actions.SendTriggers)
    assert of(out, actions.CompleteRequest)[0].failure is FailureReason.EXPIRED


def test_g14_task_that_stops_running_meanwhile_refuses_and_triggers_nobody() -> None:
    bench = Bench()
    bench.held = {actions.WriteClaim}
    bench.request()
    bench.run_tasks(A, state=TaskState.CANCELING)
    out = bench.handle(events.ClaimWritten(1))
    assert not of(out, actions.SendTriggers)
    assert not of(out, actions.NotifyAborted)
    assert of(out, actions.CompleteRequest)[0].failure is FailureReason.NOT_ALL_TASKS_RUNNING
    assert bench.pending == []


def test_g14_job_that_fails_meanwhile_aborts_the_claimed_id() -> None:
    bench = Bench()
    bench.held = {actions.WriteClaim}
    bench.request()
    bench.handle(events.JobFailing())
    assert not bench.machine.is_quiet
    out = bench.handle(events.ClaimWritten(1))
    assert of(out, actions.WriteAborted)[0].reason is FailureReason.JOB_FAILOVER
    assert bench.machine.is_quiet


def test_g15_trigger_id_posted_twice_is_one_request() -> None:
    register = TriggerRegister()
    assert register.begin("t", CheckpointKind.SAVEPOINT)
    assert not register.begin("t", CheckpointKind.SAVEPOINT)
    register.end(actions.CompleteRequest(CheckpointRequest(trigger_id="t"), None, failure=FailureReason.EXPIRED))
    view = register.get("t")
    assert view is not None
    assert (view.in_progress, view.failure_reason) == (False, "expired")
    assert not register.begin("t", CheckpointKind.SAVEPOINT)


@needs_several
@pytest.mark.parametrize("ending", [CheckpointKind.STOP_SAVEPOINT, CheckpointKind.FINAL])
def test_nothing_but_savepoints_joins_the_checkpoint_that_ends_the_job(ending: CheckpointKind) -> None:
    bench = Bench(tolerable_failed_checkpoints=9)
    bench.request(ending)
    assert of(bench.request(name="u"), actions.CompleteRequest)[0].failure is FailureReason.JOB_FINISHING
    bench.request(CheckpointKind.SAVEPOINT, "s")
    assert bench.pending == [1, 2]
    bench.decline(A, 1)
    bench.request(name="after")
    assert bench.pending == [2, 3]


@needs_several
def test_nothing_is_taken_behind_a_drain_before_it_is_decided() -> None:
    bench = Bench(tolerable_failed_checkpoints=9)
    bench.request(CheckpointKind.STOP_SAVEPOINT, "drain", drain=True)
    refused = bench.request(CheckpointKind.SAVEPOINT, "s")
    assert of(refused, actions.CompleteRequest)[0].failure is FailureReason.JOB_FINISHING
    assert bench.pending == [1]
    bench.decline(A, 1)
    bench.request(CheckpointKind.SAVEPOINT, "after")
    assert bench.pending == [2]
