"""The job master, event by event: registrations, failovers, restarts, ends."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.barriers.messages import (
    AckBatch,
    AckStatus,
    CancelTasks,
    CheckpointKind,
    Deploy,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    ShutdownWorker,
    StatusBatch,
    TaskState,
    TriggerCheckpoint,
)
from holdfast.coordinator.checkpoints import actions
from holdfast.coordinator.dispatcher.submit import Starter, resume_submission
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.lifecycle import LEFT
from holdfast.coordinator.jobmaster.slots import (
    LIVENESS_GRACE_MS,
    OUTBOX_COMMANDS_MAX,
    STREAM_GRACE_MS,
    Outbox,
    Verdict,
    compare_registration,
)
from holdfast.statebackends.errors import FencedError, NotFoundError, NotLeaderError, StateDirectoryNotSharedError
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB


def restarted(rig: Rig) -> Rig:
    """Another leader over the same directory."""
    setup = run_flow(resume_submission(JOB, Starter("second", "", "directory", 0)), rig.storage)
    rig.open(setup)
    return rig


# -------------------------------------------------------------------------------------------------------- registration


def test_job_is_deployed_when_the_last_slot_registers() -> None:
    rig = Rig()
    first = rig.register(0)
    assert (first.attempt, first.deployment, rig.state) == (1, None, "CREATED")
    second = rig.register(1)
    assert second.deployment is not None
    assert [subtask.subtask for subtask in second.deployment.subtasks] == [1, 1]
    assert second.deployment.addresses == {0: "tcp://0-0:1", 1: "tcp://1-0:1"}
    assert len(rig.commands(0, Deploy)) == 1
    assert rig.state == "RUNNING"
    assert f"{JOB}/attempts/1.json" in rig.storage.files


def test_workers_are_told_how_to_reach_and_to_know_each_other_and_a_secret_of_the_attempt() -> None:
    rig = Rig()
    rig.register(0, data_key="0" * 40, data_socket="/run/0")
    rig.register(1, data_key="1" * 40)
    first, other = rig.deployment(0), rig.deployment(1)
    assert (first.data_keys, first.data_sockets) == ({0: "0" * 40, 1: "1" * 40}, {0: "/run/0"})
    assert first.data_secret == other.data_secret
    assert len(first.data_secret) == 64
    rig.register(1, task_attempt=1, data_key="2" * 40, data_socket="/run/1")
    rig.pass_time(5_000)
    second = rig.deployment(0)
    assert second.attempt == 2
    assert (second.data_keys[1], second.data_sockets) == ("2" * 40, {0: "/run/0", 1: "/run/1"})
    assert second.data_secret != first.data_secret


def test_frames_that_data_ports_refused_are_counted_over_the_processes_of_a_slot() -> None:
    rig = Rig()
    rig.register(0)
    rig.register(1)
    for count in (3, 5, 4):  # the last one is an older message
        rig.heartbeat(1, frames_refused=count)
    rig.register(1, task_attempt=1)
    rig.heartbeat(1, frames_refused=2)
    assert [view.frames_refused for view in rig.master.slot_pool.views()] == [0, 7]


def test_attempt_is_on_record_before_anything_is_deployed() -> None:
    rig = Rig()
    rig.held = {job_actions.PrepareAttempt}
    rig.open(rig.setup)
    rig.held = {job_actions.PrepareAttempt}
    rig.register(0)
    assert rig.state == "CREATED"


@pytest.mark.parametrize(
    ("task_attempt", "nonce", "connected", "verdict"),
    [
        (5, "n5", True, Verdict.RECONNECT),
        (6, "n6", True, Verdict.SUCCESSOR),
        (4, "n4", False, Verdict.STALE),
        (5, "other", True, Verdict.STALE),
        (5, "other", False, Verdict.SUCCESSOR),
    ],
)
def test_who_may_hold_a_slot(task_attempt: int, nonce: str, connected: bool, verdict: Verdict) -> None:
    rig = Rig()
    rig.register(0, task_attempt=5, nonce="n5")
    current = rig.master.slot_pool.slots[0].holder
    assert current is not None
    message = msgspec.structs.replace(current, task_attempt=task_attempt, nonce=nonce)
    assert compare_registration(current, message, connected=connected) is verdict
    assert compare_registration(None, message, connected=connected) is Verdict.FIRST


def test_registrations_that_are_refused_change_nothing() -> None:
    rig = Rig().run()
    with pytest.raises(NotFoundError):
        rig.register(2)
    with pytest.raises(FencedError):
        rig.register(0, submission=0, nonce="older submission")
    with pytest.raises(StateDirectoryNotSharedError):
        rig.register(0, task_attempt=1, directory_nonce="another")
    with pytest.raises(NotLeaderError):
        rig.register(0, attempt=9)
    assert (rig.state, rig.restarts, rig.heartbeat(0)) == ("RUNNING", 0, 1)


def test_process_that_lost_the_slot_stays_refused_when_the_slot_is_empty() -> None:
    rig = Rig().run()
    rig.register(1, task_attempt=1)
    rig.close_stream(1)
    rig.pass_time(STREAM_GRACE_MS)
    with pytest.raises(FencedError):
        rig.register(1, task_attempt=0)


def test_reconnect_repeats_a_deployment_that_was_lost_on_the_way() -> None:
    rig = Rig()
    rig.register(0)
    rig.register(1)
    again = rig.register(0, attempt=0)
    assert again.deployment == rig.deployment(0)
    assert (rig.state, rig.restarts) == ("RUNNING", 0)


def test_reconnect_repeats_triggers_and_answers_what_was_unanswered() -> None:
    rig = Rig().run()
    rig.feed_request()
    registered = rig.register(0, attempt=1, unanswered=rig.acks(0, 1, 1))
    assert registered.answers == (AckStatus.SUCCESS, AckStatus.SUCCESS)
    assert registered.live_checkpoints == (1,)
    assert [command.checkpoint_id for command in rig.commands(0, TriggerCheckpoint)] == [1]


def test_reconnect_tells_of_aborted_ids_until_a_newer_one_has_completed() -> None:
    """Their barriers come from other workers, to one that the notice did not reach or that an older leader had told nothing."""
    rig = Rig(checkpoint_timeout_ms=50, tolerable_failed_checkpoints=100).run()

    def told_anew() -> list[int]:
        rig.register(0, attempt=1)
        return [command.checkpoint_id for command in rig.commands(0, NotifyCheckpointAborted)]

    assert told_anew() == []
    for _ in range(2):
        rig.feed_request()
        rig.pass_time(100)
    assert told_anew() == told_anew() == [1, 2]
    assert rig.checkpoint() == 3
    assert told_anew() == []


def test_session_that_is_over_and_epochs_of_others_are_refused() -> None:
    rig = Rig().run()
    stale = rig.sessions[0]
    rig.register(0, attempt=1)
    current, rig.sessions[0] = rig.sessions[0], stale
    for attempt in (lambda: rig.heartbeat(0), lambda: rig.open_stream(0), lambda: rig.acknowledge(0, 1, 1)):
        with pytest.raises(FencedError):
            attempt()
    for batch in (AckBatch(2, 0, current, ()), AckBatch(0, 0, current, ())):
        with pytest.raises(FencedError):
            rig.call(lambda ticket, batch=batch: job_events.AckBatchReceived(ticket, batch))
    with pytest.raises(FencedError):
        rig.call(lambda ticket: job_events.StatesReceived(ticket, StatusBatch(7, 0, current, ())))


def test_stream_resumes_behind_a_number_and_closes_when_commands_are_gone() -> None:
    outbox = Outbox(1, "s", commands_max=3)
    for attempt in range(5):
        outbox.append(CancelTasks(attempt))
    resumed = outbox.resume(2)
    assert resumed is not None
    assert [numbered.number for numbered in resumed] == [3, 4, 5]
    assert outbox.resume(1) is None
    assert outbox.resume(5) == ()
    assert outbox.resume(6) is None


def test_two_deployments_are_kept_and_no_command_before_them() -> None:
    """Each holds the handles that its subtasks restore: those of many restarts would fill the memory."""
    outbox, deployment = Outbox(1, "s"), Deploy(Rig().run().deployment(0))
    for attempt in range(1, 5):
        outbox.append(CancelTasks(attempt))
        outbox.append(deployment)
    assert outbox.resume(4) is None
    resumed = outbox.resume(5)
    assert resumed is not None
    assert [numbered.number for numbered in resumed] == [6, 7, 8]
    assert [numbered.command for numbered in resumed] == [deployment, CancelTasks(4), deployment]
    assert outbox.resume(8) == ()


def test_a_worker_that_lacks_commands_before_two_deployments_registers_again() -> None:
    rig = Rig().run()
    for attempt in (1, 2, 3):
        rig.register(1, task_attempt=attempt)
        rig.report(0, attempt, TaskState.CANCELED)
        rig.pass_time(5_000)
        assert rig.state == "RUNNING"
    with pytest.raises(FencedError, match="register again"):
        rig.open_stream(0)
    deployment = rig.register(0).deployment
    assert deployment is not None
    assert deployment.attempt == 4


def test_late_end_of_a_replaced_stream_ends_nothing() -> None:
    """A broken connection is often noticed after its worker has opened the next stream, in the same session."""
    rig = Rig().run()
    older = rig.streams[0]
    rig.open_stream(0)
    rig.close_stream(0, older)
    rig.feed_request()
    assert [command.checkpoint_id for command in rig.commands(0, TriggerCheckpoint)] == [1]
    rig.pass_time(STREAM_GRACE_MS)
    assert (rig.state, rig.restarts) == ("RUNNING", 0)


def test_overflowing_outbox_makes_the_worker_register_again() -> None:
    rig = Rig().run()
    rig.close_stream(0)
    slot = rig.master.slot_pool.slots[0]
    for number in range(OUTBOX_COMMANDS_MAX + 5):
        rig.master.slot_pool.send(slot, CancelTasks(number))
    with pytest.raises(FencedError):
        rig.open_stream(0)


# ------------------------------------------------------------------------------------------------------------ failover


def test_superseded_worker_fails_the_job_over_at_once() -> None:
    rig = Rig().run()
    rig.checkpoint()
    registered = rig.register(1, task_attempt=1)
    assert registered.deployment is None
    assert (rig.state, rig.commands(0, CancelTasks)) == ("RESTARTING", [CancelTasks(1)])
    rig.report(0, 1, TaskState.CANCELED)
    assert rig.state == "RUNNING"
    assert rig.commands(0, Deploy)[-1].deployment.restored_checkpoint_id == 1
    assert rig.commands(1, Deploy)[0].deployment.attempt == 2
    assert rig.deployment(0).addresses[1] == "tcp://1-1:1"


def test_next_attempt_waits_for_a_sign_of_life_but_not_for_ever() -> None:
    rig = Rig().run()
    rig.report(0, 1, TaskState.FAILED, "E: peer lost")
    assert rig.state == "RESTARTING"
    rig.heartbeat(0)
    assert rig.state == "RESTARTING", "slot 1 may be the dead one"
    rig.pass_time(LIVENESS_GRACE_MS)
    assert rig.state == "RUNNING"


def test_the_peer_that_reports_a_death_is_alive_itself() -> None:
    """All its tasks have failed with the connection: it has nothing to say to the failover, and nobody waits for that."""
    rig = Rig().run()
    rig.report(1, 1, TaskState.FAILED, "PeerLostError: the worker in slot 0 is gone")
    assert rig.state == "RESTARTING"
    rig.register(0, task_attempt=1)
    assert rig.state == "RUNNING"
    assert rig.master.lifecycle.attempt == 2


def test_a_peer_that_dies_behind_its_report_is_waited_for() -> None:
    rig = Rig().run()
    rig.report(1, 1, TaskState.FAILED, "PeerLostError: the worker in slot 0 is gone")
    rig.close_stream(1)
    rig.register(0, task_attempt=1)
    assert rig.state == "RESTARTING"
    rig.register(1, task_attempt=1)
    assert rig.state == "RUNNING"


def test_every_failure_of_a_fenced_attempt_is_one_failover() -> None:
    rig = Rig().run()
    rig.report(0, 1, TaskState.FAILED, "ProtocolError: peer lost")
    rig.close_stream(1)
    rig.pass_time(STREAM_GRACE_MS)
    rig.register(1, task_attempt=1)
    rig.report(0, 1, TaskState.FAILED, "again")
    assert (rig.state, rig.restarts, rig.master.lifecycle.attempt) == ("RUNNING", 1, 2)


def test_process_that_dies_before_it_reported_the_new_attempt_is_the_same_incident_once() -> None:
    rig = Rig(restart=RestartStrategy("fixed_delay", 1)).run()
    rig.report(0, 1, TaskState.FAILED, "ProtocolError: peer lost")
    rig.heartbeat(0)
    rig.heartbeat(1)
    assert rig.master.lifecycle.attempt == 2
    rig.register(1, task_attempt=1)
    rig.heartbeat(0)
    assert (rig.state, rig.restarts, rig.master.lifecycle.attempt) == ("RUNNING", 1, 3)
    rig.register(1, task_attempt=2)
    assert rig.state == "FAILING"


def test_restart_strategy_bounds_the_attempts_and_delays_them() -> None:
    rig = Rig(restart=RestartStrategy("fixed_delay", 1, delay_ms=300, immediate_first=False)).run()
    rig.report(0, 1, TaskState.FAILED, "E: one")
    rig.heartbeat(0)
    rig.heartbeat(1)
    assert rig.state == "RESTARTING"
    rig.pass_time(299)
    assert rig.state == "RESTARTING"
    rig.pass_time(1)
    assert rig.state == "RUNNING"
    rig.report(0, 2, TaskState.RUNNING)
    rig.report(1, 2, TaskState.RUNNING)
    rig.report(1, 2, TaskState.FAILED, "E: two")
    assert rig.state == "FAILING"
    rig.report(0, 2, TaskState.CANCELED)
    assert rig.state == "FAILED"
    assert rig.master.lifecycle.failure == "E: two"


def test_first_restart_after_progress_is_immediate_and_fruitless_ones_are_delayed() -> None:
    rig = Rig(restart=RestartStrategy(delay_ms=300)).run()

    def fail(attempt: int) -> str:
        rig.report(0, attempt, TaskState.FAILED, "E: boom")
        rig.heartbeat(0)
        rig.heartbeat(1)
        return rig.state

    assert fail(1) == "RUNNING"
    assert fail(2) == "RESTARTING"
    rig.pass_time(300)
    for slot in (0, 1):
        rig.report(slot, 3, TaskState.RUNNING)
    rig.checkpoint(3)
    assert fail(3) == "RUNNING"


def test_new_attempt_waits_until_every_checkpoint_is_decided() -> None:
    rig = Rig().run()
    rig.feed_request()
    rig.held = {actions.WriteAborted}
    rig.register(1, task_attempt=1)
    rig.heartbeat(0)
    assert rig.state == "RESTARTING"
    assert not [action for action in rig.actions if isinstance(action, job_actions.PrepareAttempt) and action.attempt == 2]
    rig.held = set()
    rig.perform_waiting()
    assert rig.state == "RUNNING"


def test_checkpoint_completed_while_failing_over_is_what_is_restored() -> None:
    rig = Rig().run()
    rig.feed_request()
    rig.held = {actions.WriteMetadata}
    rig.acknowledge(0, 1, 1)
    rig.acknowledge(1, 1, 1)
    rig.register(1, task_attempt=1)
    rig.heartbeat(0)
    rig.held = set()
    rig.perform_waiting()
    assert rig.deployment(0).restored_checkpoint_id == 1


def test_heartbeats_keep_a_worker_whose_stream_is_down() -> None:
    rig = Rig().run()
    rig.close_stream(0)
    for _ in range(5):
        rig.pass_time(STREAM_GRACE_MS - 10)
        rig.heartbeat(0)
    assert rig.state == "RUNNING"
    rig.pass_time(STREAM_GRACE_MS)
    assert rig.state == "RESTARTING"


def test_silent_worker_is_lost_after_the_heartbeat_timeout() -> None:
    rig = Rig(heartbeat_timeout_ms=5_000).run()
    rig.pass_time(4_999)
    rig.heartbeat(0)
    assert rig.state == "RUNNING"
    rig.pass_time(1)
    assert rig.state == "RESTARTING"
    assert rig.master.slot_pool.missing() == [1]


def test_too_many_failed_checkpoints_fail_the_attempt_over() -> None:
    rig = Rig(checkpoint_timeout_ms=100).run()
    rig.feed_request()
    rig.pass_time(100)
    assert rig.state == "RESTARTING"
    assert "expired" in (rig.master.lifecycle.failure or "")


def test_task_that_ends_without_being_told_fails_over() -> None:
    rig = Rig().run()
    rig.report(0, 1, TaskState.FINISHED)
    assert rig.state == "RESTARTING"


def test_damaged_snapshot_fails_the_job_and_is_named() -> None:
    rig = Rig().run()
    rig.checkpoint()
    rig.effects._newest = None
    path = f"{JOB}/chk-1/_metadata"
    rig.storage.files[path] = rig.storage.files[path][:-20]
    rig.register(1, task_attempt=1)
    assert rig.state == "FAILING"
    assert "corrupt at" in (rig.master.lifecycle.failure or "")


def test_storage_that_is_away_delays_the_attempt() -> None:
    rig = Rig().run()
    rig.held = {job_actions.PrepareAttempt}
    rig.register(1, task_attempt=1)
    rig.heartbeat(0)
    rig.feed(job_events.AttemptDelayed(2, "storage is away"))
    assert rig.state == "RESTARTING"
    rig.held = set()
    rig.pass_time(500)
    assert rig.state == "RUNNING"


# --------------------------------------------------------------------------------------------------------------- ends


def test_final_checkpoint_follows_at_once_when_everything_is_drained() -> None:
    rig = Rig().run()
    rig.report(0, 1, TaskState.RUNNING, drained=True)
    assert not rig.commands(0, TriggerCheckpoint)
    rig.report(1, 1, TaskState.RUNNING, drained=True)
    assert [command.kind for command in rig.commands(0, TriggerCheckpoint)] == [CheckpointKind.FINAL]
    rig.acknowledge(0, 1, 1)
    rig.acknowledge(1, 1, 1)
    assert [type(command) for command in rig.sent[1]][-3:] == [NotifyCheckpointComplete, NotifyCheckpointComplete, FinishTasks]
    rig.report(0, 1, TaskState.FINISHED)
    assert rig.state == "RUNNING"
    rig.report(1, 1, TaskState.FINISHED)
    assert rig.state == "FINISHED"
    assert rig.commands(0, ShutdownWorker)
    assert f"{JOB}/results/1.json" in rig.storage.files
    assert not [path for path in rig.storage.files if "/chk-" in path]


def test_result_is_stored_before_any_checkpoint_is_dropped() -> None:
    rig = Rig().run()
    rig.checkpoint()
    rig.held = {job_actions.WriteResult}
    rig.call(job_events.CancelRequested)
    assert f"{JOB}/chk-1/_metadata" in rig.storage.files
    rig.held = set()
    rig.perform_waiting()
    assert f"{JOB}/chk-1/_metadata" not in rig.storage.files


def test_failed_final_checkpoint_is_asked_for_again() -> None:
    rig = Rig(checkpoint_timeout_ms=50, tolerable_failed_checkpoints=5).run()
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.RUNNING, drained=True)
    rig.pass_time(260)
    assert [command.checkpoint_id for command in rig.commands(0, TriggerCheckpoint)] == [1, 2]


def test_finish_waits_for_a_savepoint_under_way() -> None:
    rig = Rig().run()
    rig.call(lambda ticket: job_events.SnapshotRequested(ticket, CheckpointKind.SAVEPOINT, "s", "/savepoints"))
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.RUNNING, drained=True)
        rig.acknowledge(slot, 1, 2)
    for slot in (0, 1):
        rig.acknowledge(slot, 1, 2)
    assert not rig.commands(0, FinishTasks)
    for slot in (0, 1):
        rig.acknowledge(slot, 1, 1)
    assert rig.commands(0, FinishTasks)


def test_failure_behind_the_last_checkpoint_restores_it_and_finishes() -> None:
    rig = Rig().run()
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.RUNNING, drained=True)
    for slot in (0, 1):
        rig.acknowledge(slot, 1, 1)
    rig.register(1, task_attempt=1)
    rig.heartbeat(0)
    assert rig.deployment(1).restored_checkpoint_id == 1
    for slot in (0, 1):
        rig.report(slot, 2, TaskState.RUNNING)
    assert rig.commands(1, FinishTasks) == [FinishTasks(2, 1)]
    assert not rig.commands(1, TriggerCheckpoint)
    for slot in (0, 1):
        rig.report(slot, 2, TaskState.FINISHED)
    assert rig.state == "FINISHED"


def test_failed_stop_with_savepoint_leaves_nothing_half_stopped() -> None:
    rig = Rig(checkpoint_timeout_ms=50, tolerable_failed_checkpoints=100).run()
    rig.call(lambda ticket: job_events.SnapshotRequested(ticket, CheckpointKind.STOP_SAVEPOINT, "s", "/savepoints"))
    rig.pass_time(60)
    assert (rig.state, rig.master.lifecycle.attempt) == ("RESTARTING", 2)
    view = rig.master.triggers.get("s")
    assert view is not None
    assert view.failure_reason == "expired"


def test_cancel_does_not_wait_for_ever_for_a_task_that_hangs() -> None:
    rig = Rig(cancellation_timeout_ms=2_000).run()
    rig.call(job_events.CancelRequested)
    rig.report(0, 1, TaskState.CANCELED)
    assert rig.state == "CANCELLING"
    for _ in range(20):
        rig.pass_time(100)
    assert rig.state == "CANCELED"


def test_worker_that_reconnects_to_a_cancelling_job_is_told_to_cancel() -> None:
    rig = Rig().run()
    rig.call(job_events.CancelRequested)
    rig.register(0, attempt=1)
    assert rig.commands(0, CancelTasks) == [CancelTasks(1)]
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.CANCELED)
    assert rig.state == "CANCELED"
    with pytest.raises(FencedError):
        rig.register(0, attempt=1)


def test_cancel_of_a_job_without_workers_is_immediate() -> None:
    rig = Rig()
    rig.call(job_events.CancelRequested)
    assert rig.state == "CANCELED"


def test_suspended_job_answers_that_it_is_led_elsewhere() -> None:
    rig = Rig().run()
    rig.feed(job_events.LeadershipEnded("the coordinator stops"))
    with pytest.raises(NotLeaderError):
        rig.register(0, attempt=1)
    assert rig.master.next_deadline_ms() is None


# ------------------------------------------------------------------------------------------- restart of the coordinator


def test_reconciled_job_runs_on_without_a_deployment() -> None:
    rig = Rig().run()
    rig.checkpoint()
    restarted(rig)
    assert rig.state == "RECONCILING"
    first = rig.register(0, attempt=1)
    assert (first.epoch, first.attempt, first.deployment, first.newest_completed) == (2, 1, None, 1)
    rig.register(1, attempt=1)
    assert (rig.state, rig.restarts) == ("RUNNING", 0)
    assert rig.checkpoint() == 3, "the takeover fenced id 2"


def test_pending_checkpoint_of_the_old_leader_is_answered_as_dead() -> None:
    rig = Rig().run()
    rig.feed_request()
    restarted(rig)
    registered = rig.register(0, attempt=1, unanswered=rig.acks(0, 1, 1))
    assert registered.answers == (AckStatus.DISCARDED, AckStatus.DISCARDED)
    assert registered.live_checkpoints == ()


def test_restarts_are_remembered_over_a_change_of_leaders() -> None:
    rig = Rig().run()
    rig.register(1, task_attempt=1)
    rig.heartbeat(0)
    restarted(rig)
    assert (rig.restarts, rig.master.lifecycle.attempt) == (1, 2)


def test_undecided_stop_with_savepoint_is_aborted_and_the_job_fails_over() -> None:
    rig = Rig().run()
    rig.checkpoint()
    rig.call(lambda ticket: job_events.SnapshotRequested(ticket, CheckpointKind.STOP_SAVEPOINT, "s", "/savepoints"))
    restarted(rig)
    assert (rig.state, rig.master.lifecycle.attempt) == ("RESTARTING", 2)
    view = rig.master.triggers.get("s")
    assert view is not None
    assert view.in_progress, "the new leader tries again"
    rig.register(0, attempt=1)
    registered = rig.register(1, attempt=1)
    assert registered.deployment is not None
    assert registered.deployment.restored_checkpoint_id == 1
    restarted(rig)
    assert rig.state == "RECONCILING", "once is enough"


def test_completed_stop_with_savepoint_is_finished_by_the_next_leader() -> None:
    rig = Rig().run()
    rig.call(lambda ticket: job_events.SnapshotRequested(ticket, CheckpointKind.STOP_SAVEPOINT, "s", "/savepoints"))
    rig.acknowledge(0, 1, 1)
    rig.acknowledge(1, 1, 1)
    assert rig.commands(0, FinishTasks)
    restarted(rig)
    rig.register(0, attempt=1)
    registered = rig.register(1, attempt=1)
    assert registered.newest_completed == 1
    assert rig.commands(0, FinishTasks) == [FinishTasks(1, 1)]
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.FINISHED)
    assert rig.state == "FINISHED"


def test_next_leader_finishes_the_tasks_that_the_one_before_did_not_reach() -> None:
    """Some had been told to finish and did; waiting until all run would wait for ever."""
    rig = Rig().run()
    rig.call(lambda ticket: job_events.SnapshotRequested(ticket, CheckpointKind.STOP_SAVEPOINT, "s", "/savepoints"))
    rig.acknowledge(0, 1, 1)
    rig.acknowledge(1, 1, 1)
    restarted(rig)
    rig.register(0, attempt=1, subtasks=rig.statuses(0, 1, TaskState.FINISHED))
    rig.register(1, attempt=1)
    assert rig.commands(1, FinishTasks) == [FinishTasks(1, 1)]
    rig.report(1, 1, TaskState.FINISHED)
    assert rig.state == "FINISHED"


def test_reconnect_during_the_end_is_told_to_finish() -> None:
    rig = Rig().run()
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.RUNNING, drained=True)
    for slot in (0, 1):
        rig.acknowledge(slot, 1, 1)
    assert rig.register(0, attempt=1).finish == 1


# ------------------------------------------------------------------------------------------------------- a driver that leaves


@pytest.mark.parametrize("restart", ["none", "fixed_delay"])
def test_workers_that_go_with_their_driver_are_no_failure(restart: str) -> None:
    rig = Rig(restart=RestartStrategy.of(restart)).run()
    rig.checkpoint()
    rig.call(lambda ticket: job_events.DriverLeft(ticket, 1))
    assert rig.state == "RUNNING", "until they are gone"
    rig.close_stream(0)
    rig.pass_time(120_000)
    assert (rig.state, rig.restarts, rig.master.lifecycle.restarts_at_ms) == ("RESTARTING", 0, -1)
    assert rig.master.lifecycle.exceptions.views() == ()
    assert f"{JOB}/chk-1/_metadata" in rig.storage.files
    deployed = len(rig.commands(1, Deploy))
    rig.register(0, task_attempt=1)
    rig.register(1, task_attempt=1)
    assert (rig.state, len(rig.commands(1, Deploy))) == ("RESTARTING", 0 if deployed else deployed), "no attempt follows"


def test_a_task_that_fails_as_its_peers_go_is_no_failure_either() -> None:
    rig = Rig(restart=RestartStrategy.of("none")).run()
    rig.call(lambda ticket: job_events.DriverLeft(ticket, 1))
    rig.report(0, 1, TaskState.FAILED, "PeerLostError: slot 1")
    assert (rig.state, rig.master.lifecycle.failure) == ("RESTARTING", LEFT)


def test_a_failure_of_user_code_is_shown_though_the_driver_has_left() -> None:
    rig = Rig(restart=RestartStrategy.of("none")).run()
    rig.call(lambda ticket: job_events.DriverLeft(ticket, 1))
    rig.report(0, 1, TaskState.FAILED, "UserFunctionError: no")
    assert (rig.state, rig.master.lifecycle.failure) == ("RESTARTING", LEFT)
    assert [view.error for view in rig.master.lifecycle.exceptions.views()] == ["UserFunctionError: no"]


def test_a_driver_that_leaves_in_the_pause_before_a_restart_leaves_none_to_wait_for() -> None:
    rig = Rig(restart=RestartStrategy.of("fixed_delay")).run()
    rig.report(0, 1, TaskState.FAILED, "UserFunctionError: no")
    assert (rig.state, rig.master.lifecycle.restarts_at_ms > 0) == ("RESTARTING", True)
    rig.call(lambda ticket: job_events.DriverLeft(ticket, 1))
    assert (rig.state, rig.master.lifecycle.restarts_at_ms, rig.master.lifecycle.failure) == ("RESTARTING", -1, LEFT)


def test_a_driver_that_the_job_has_another_one_since_changes_nothing() -> None:
    rig = Rig(restart=RestartStrategy.of("none")).run()
    with pytest.raises(FencedError):
        rig.call(lambda ticket: job_events.DriverLeft(ticket, 2))
    rig.report(0, 1, TaskState.FAILED, "UserFunctionError: no")
    assert rig.state == "FAILING"


def test_a_job_that_is_left_at_its_end_comes_to_it() -> None:
    rig = Rig(restart=RestartStrategy.of("none")).run()
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.RUNNING, drained=True)
    rig.acknowledge(0, 1, 1)
    rig.acknowledge(1, 1, 1)
    rig.call(lambda ticket: job_events.DriverLeft(ticket, 1))
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.FINISHED)
    assert rig.state == "FINISHED"
