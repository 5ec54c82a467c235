"""A stop with a savepoint that a failover cuts off: it is tried again under its trigger id, by this leader and by the next one."""

from __future__ import annotations

import pytest

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.messages import (
    AckBatch,
    CheckpointKind,
    DeclineCheckpoint,
    FailureReason,
    FinishTasks,
    TaskState,
    TriggerCheckpoint,
)
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.stopping import STOP_RETRY_MS, STOP_TRIES_MAX, StopIntent, StopRetries
from holdfast.coordinator.notes import Note, RequestEnded
from holdfast.coordinator.views import TriggerView
from tests.coordinator.rig import Rig
from tests.coordinator.test_jobmaster import restarted
from tests.coordinator.world import JOB


def stopping(*, drain: bool = False, native: bool = False) -> Rig:
    """A stop is asked for, and its triggers are sent. Restarts wait a second, however often the job fails."""
    rig = Rig(restart=RestartStrategy("fixed_delay")).run()
    rig.checkpoint()
    stop(rig, "s", drain=drain, native=native)
    return rig


def stop(rig: Rig, trigger_id: str, *, drain: bool = False, native: bool = False) -> str:
    kind = CheckpointKind.STOP_SAVEPOINT
    answer: str = rig.call(
        lambda ticket: job_events.SnapshotRequested(ticket, kind, trigger_id, "/savepoints", drain=drain, native=native)
    )
    return answer


def seen(rig: Rig, trigger_id: str = "s") -> TriggerView:
    view = rig.master.triggers.get(trigger_id)
    assert view is not None
    return view


def fail(rig: Rig, attempt: int) -> None:
    """A task fails; its worker is there for the next attempt."""
    rig.report(0, attempt, TaskState.FAILED, "PeerLostError: the worker in slot 1 is gone")
    rig.pass_time(2_000)


def run_again(rig: Rig, attempt: int) -> None:
    for slot in (0, 1):
        rig.heartbeat(slot, attempt)
    for slot in (0, 1):
        rig.report(slot, attempt, TaskState.RUNNING)


def stops_sent(rig: Rig) -> list[TriggerCheckpoint]:
    return [each for each in rig.commands(0, TriggerCheckpoint) if each.kind is CheckpointKind.STOP_SAVEPOINT]


def test_a_stop_that_a_failover_cuts_off_is_tried_again_with_a_new_id_and_ends_the_job() -> None:
    rig = stopping(drain=True)
    fail(rig, 1)
    assert seen(rig).in_progress
    run_again(rig, 2)
    first, second = stops_sent(rig)
    assert (first.checkpoint_id, second.checkpoint_id, second.attempt) == (2, 3, 2)
    assert second.drain
    assert first.folder != second.folder, "what the first one left behind is nobody's"
    for slot in (0, 1):
        rig.acknowledge(slot, 2, 3)
    view = seen(rig)
    assert (view.in_progress, view.checkpoint_id, view.location, view.failure) == (False, 3, second.folder, None)
    assert rig.commands(0, FinishTasks)[0].checkpoint_id == 3


@pytest.mark.parametrize("leader", ["the same", "another"])
def test_the_next_try_is_of_the_same_kind(leader: str) -> None:
    rig = stopping(drain=True, native=True)
    rig.report(0, 1, TaskState.FAILED, "OSError: x")
    if leader == "another":
        restarted(rig)
        for slot in (0, 1):
            rig.register(slot, attempt=1)
    rig.pass_time(2_000)
    run_again(rig, rig.master.lifecycle.attempt)
    again = stops_sent(rig)[-1]
    assert again.attempt == rig.master.lifecycle.attempt
    assert (again.drain, again.native) == (True, True)


def test_nothing_is_asked_for_until_every_task_runs() -> None:
    rig = stopping()
    fail(rig, 1)
    rig.heartbeat(0, 2)
    rig.report(0, 2, TaskState.RUNNING)
    assert len(stops_sent(rig)) == 1


def test_a_repeated_request_is_the_same_stop_between_its_tries() -> None:
    rig = stopping()
    fail(rig, 1)
    assert stop(rig, "s") == "s"
    run_again(rig, 2)
    assert len(stops_sent(rig)) == 2


def test_a_savepoint_that_fails_for_a_reason_of_its_own_is_not_tried_again() -> None:
    rig = stopping()
    vertex = rig.graph.vertices[0].vertex_id
    full = DeclineCheckpoint(1, 2, vertex, 0, FailureReason.IO_EXCEPTION, "No space left on device")
    rig.call(lambda ticket: job_events.AckBatchReceived(ticket, AckBatch(rig.setup.epoch, 0, rig.sessions[0], (full,))))
    assert seen(rig).failure_reason == "io_exception"
    rig.pass_time(2_000)
    run_again(rig, 2)
    assert len(stops_sent(rig)) == 1, "the attempt failed over all the same"


def test_tries_are_bounded_and_the_user_is_told_how_many_there_were() -> None:
    rig = stopping()
    for attempt in range(1, STOP_TRIES_MAX + 1):
        assert seen(rig).in_progress
        fail(rig, attempt)
        run_again(rig, attempt + 1)
    view = seen(rig)
    assert (view.in_progress, view.failure_reason) == (False, "job_failure")
    assert view.tries == STOP_TRIES_MAX
    assert len(stops_sent(rig)) == STOP_TRIES_MAX


def test_time_is_bounded_when_the_workers_do_not_come_back() -> None:
    rig = stopping()
    rig.report(0, 1, TaskState.FAILED, "OSError: x")
    rig.pass_time(STOP_RETRY_MS + 1_000)
    assert rig.state == "RESTARTING"
    assert seen(rig).failure_reason == "job_failure"


def test_a_job_that_is_cancelled_meanwhile_is_not_stopped() -> None:
    rig = stopping()
    fail(rig, 1)
    rig.call(job_events.CancelRequested)
    assert seen(rig).failure_reason == "job_failure"


def test_a_stop_that_is_given_up_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = stopping()
    fail(rig, 1)
    notes: list[Note] = []
    handle = rig.master.handle

    def noted(event: job_events.Event, *, now_ms: int, wall_ms: int) -> list[job_actions.Action]:
        actions = handle(event, now_ms=now_ms, wall_ms=wall_ms)
        notes.extend(rig.master.notes)
        return actions

    monkeypatch.setattr(rig.master, "handle", noted)
    rig.pass_time(STOP_RETRY_MS + 1_000)
    rig.call(job_events.CancelRequested)
    (note,) = [each for each in notes if isinstance(each, RequestEnded)]
    assert (note.trigger_id, note.reason, note.tries) == ("s", FailureReason.JOB_FAILOVER, 1)


def test_a_job_that_may_not_restart_fails_with_its_stop() -> None:
    rig = Rig(restart=RestartStrategy("none")).run()
    stop(rig, "s")
    rig.report(0, 1, TaskState.FAILED, "OSError: x")
    assert rig.state in ("FAILING", "FAILED")
    assert seen(rig).failure_reason == "job_failure"


def test_a_job_whose_workers_never_came_is_not_stopped_later() -> None:
    rig = Rig()
    stop(rig, "s")
    assert seen(rig).failure_reason == "not_all_required_tasks_running"


@pytest.mark.parametrize("moment", ["undecided", "between two tries"])
def test_the_next_leader_goes_on_with_a_stop_that_was_cut_off(moment: str) -> None:
    rig = stopping(drain=True)
    attempt = 1
    if moment == "between two tries":
        rig.report(0, 1, TaskState.FAILED, "OSError: x")
    restarted(rig)
    assert seen(rig).in_progress
    for slot in (0, 1):
        rig.register(slot, attempt=attempt)
    rig.pass_time(2_000)
    attempt = rig.master.lifecycle.attempt
    run_again(rig, attempt)
    (again,) = stops_sent(rig)
    assert (again.attempt, again.drain) == (attempt, True)
    assert again.folder.startswith(f"/savepoints/savepoint-{JOB[:6]}-")
    for slot in (0, 1):
        rig.acknowledge(slot, attempt, again.checkpoint_id)
    assert seen(rig).location == again.folder


def test_the_next_leader_leaves_a_stop_alone_whose_time_is_over() -> None:
    stops = StopRetries()
    stops.resume(StopIntent("s", "/savepoints", False, False, asked_ms=1_000, tries=1), now_ms=5, wall_ms=1_000 + STOP_RETRY_MS)
    (outcome,) = stops.take_hopeless(now_ms=5, is_ending=False)
    assert outcome.failure is FailureReason.LEADER_CHANGED
    assert stops.take_due(is_up=True) == []


def test_a_wall_clock_that_was_set_back_lengthens_no_time() -> None:
    stops = StopRetries()
    stops.resume(StopIntent("s", "/savepoints", False, False, asked_ms=3_600_000, tries=1), now_ms=5, wall_ms=0)
    assert stops.next_deadline_ms() == 5 + STOP_RETRY_MS
