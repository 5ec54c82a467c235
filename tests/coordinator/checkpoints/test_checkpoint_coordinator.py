"""The checkpoint coordinator, requirement by requirement (scenarios F): trigger, acknowledge, complete, abort, expire."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import AckStatus, CheckpointKind, DeclineCheckpoint, FailureReason, SubtaskKey, TaskState
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.ha.recorded_job import Completed
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord
from holdfast.statebackends.errors import InvariantError
from tests.coordinator.bench import JOB, A, B, Bench, answers, needs_several, of, path

SAVEPOINT, STOP, FINAL = CheckpointKind.SAVEPOINT, CheckpointKind.STOP_SAVEPOINT, CheckpointKind.FINAL


@needs_several
def test_f01_trigger_takes_an_id_and_tells_everybody_the_same_time() -> None:
    bench = Bench()
    claim, triggers = bench.trigger()
    assert isinstance(triggers, actions.SendTriggers)
    assert claim == actions.WriteClaim(1, triggers.request, f"{JOB}/chk-1", 1)
    assert triggers == actions.SendTriggers(1, 1, triggers.request, f"{JOB}/chk-1", 1_000_000)
    assert bench.machine.next_checkpoint_id == 2
    assert (bench.pending, bench.completed) == ([1], [])


def test_f01_no_trigger_is_sent_before_the_claim_is_stored() -> None:
    bench = Bench()
    bench.held = {actions.WriteClaim}
    assert [type(action) for action in bench.trigger()] == [actions.WriteClaim]
    assert bench.machine.next_checkpoint_id == 1
    assert of(bench.handle(events.ClaimWritten(1)), actions.SendTriggers)


def test_f02_all_acknowledgements_complete_it_once() -> None:
    bench = Bench()
    bench.trigger()
    assert answers(bench.ack(A, 1)) == [AckStatus.SUCCESS]
    assert (bench.pending, len(bench.machine.pending[0].acks)) == ([1], 1)
    last = bench.ack(B, 1)
    assert [type(action) for action in last] == [actions.WriteMetadata, actions.AnswerAcks, actions.NotifyComplete]
    assert (bench.pending, bench.completed, bench.done) == ([], [1], [1])
    assert bench.machine.next_deadline_ms() is None


def test_f02_done_is_sent_only_after_the_record_is_stored() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.ack_all(1)
    assert bench.done == []
    bench.handle(events.MetadataWritten(1))
    assert bench.done == [1]


def test_f03_decline_aborts_discards_and_notifies() -> None:
    bench = Bench()
    bench.trigger()
    bench.ack(A, 1, "a")
    out = bench.decline(B, 1)
    assert [type(action) for action in out][:2] == [actions.WriteAborted, actions.AnswerAcks]
    assert of(out, actions.NotifyAborted) == [actions.NotifyAborted(1, 1, 0)]
    assert of(out, actions.DiscardState) == [actions.DiscardState(1, f"{JOB}/chk-1")]
    assert (bench.pending, bench.completed) == ([], [])
    assert bench.machine.next_deadline_ms() is None
    assert bench.reasons == {1: "declined"}


def test_f03_nothing_is_told_or_deleted_before_aborted_is_stored() -> None:
    bench = Bench()
    bench.held = {actions.WriteAborted}
    bench.trigger()
    bench.ack(A, 1, "a")
    bench.decline(B, 1)
    assert not bench.all(actions.NotifyAborted)
    assert not bench.all(actions.DiscardState)
    assert bench.pending == [1]
    bench.handle(events.AbortWritten(1))
    assert bench.aborts == [1]


def test_f04_further_declines_change_nothing() -> None:
    bench = Bench(tolerable_failed_checkpoints=1)
    bench.trigger()
    bench.decline(B, 1)
    for task in (B, A):
        assert of(bench.decline(task, 1), actions.AnswerAcks)[0].answers == (AckStatus.DISCARDED,)
    assert bench.machine.failures.count == 1
    assert not bench.all(actions.FailJob)


def test_a_decline_for_a_reason_that_is_the_coordinators_counts_as_one_of_a_task() -> None:
    bench = Bench(tolerable_failed_checkpoints=1)
    bench.trigger()
    bench.decline(A, 1, FailureReason.JOB_FAILOVER)
    assert (bench.reasons, bench.machine.failures.count) == ({1: "declined"}, 1)


def test_f05_state_of_a_late_acknowledgement_is_discarded() -> None:
    bench = Bench()
    bench.trigger()
    bench.decline(A, 1)
    out = bench.ack(B, 1, "late")
    assert of(out, actions.DiscardState) == [actions.DiscardState(1, f"{JOB}/chk-1", (path("late", B),))]
    assert answers(out) == [AckStatus.DISCARDED]


def test_f06_duplicate_acknowledgement_counts_once_and_deletes_nothing() -> None:
    bench = Bench()
    bench.trigger()
    bench.ack(A, 1, "s1")
    out = bench.ack(A, 1, "s1-again")
    assert answers(out) == [AckStatus.DUPLICATE]
    assert not of(out, actions.DiscardState)
    assert bench.pending == [1]


def test_f06_duplicate_after_completion_deletes_nothing() -> None:
    bench = Bench()
    bench.trigger()
    bench.ack(A, 1, "s1")
    bench.ack(B, 1, "s2")
    out = bench.ack(A, 1, "s1")
    assert answers(out) == [AckStatus.DUPLICATE]
    assert not of(out, actions.DiscardState)


def test_f07_decline_of_one_leaves_the_other_pending() -> None:
    bench = Bench(max_concurrent_checkpoints=2)
    bench.trigger()
    bench.trigger()
    bench.decline(A, 1)
    assert bench.pending == [2]
    bench.ack_all(2)
    assert bench.completed == [2]


def test_f08_newer_completion_subsumes_older_pending() -> None:
    bench = Bench(max_concurrent_checkpoints=2)
    bench.trigger()
    bench.trigger()
    bench.ack(A, 1, "old")
    bench.ack_all(2)
    assert (bench.pending, bench.completed, bench.done) == ([], [2], [2])
    assert bench.reasons == {1: "subsumed"}
    assert actions.DiscardState(1, f"{JOB}/chk-1") in bench.actions


def test_f09_acknowledgement_of_a_subsumed_one_is_discarded() -> None:
    bench = Bench(max_concurrent_checkpoints=2)
    bench.trigger()
    bench.trigger()
    bench.ack(A, 1)
    bench.ack_all(2)
    out = bench.ack(B, 1, "late")
    assert [type(action) for action in out] == [actions.DiscardState, actions.AnswerAcks]


@needs_several
def test_newer_checkpoint_with_a_shorter_timeout_is_the_first_to_expire() -> None:
    bench = Bench(max_concurrent_checkpoints=3, checkpoint_timeout_ms=60_000)
    assert bench.machine.first_to_expire is None
    bench.trigger()
    assert bench.machine.first_to_expire == (1, 1, 60_000)
    bench.handle(events.SettingsChanged(replace(bench.config, checkpoint_timeout_ms=10_000)))
    bench.trigger()
    assert bench.machine.first_to_expire == (2, 1, 10_000)
    bench.decline(A, 2)
    assert bench.machine.first_to_expire == (1, 1, 60_000)


def test_f10_two_complete_in_order_and_retention_keeps_one() -> None:
    bench = Bench(max_concurrent_checkpoints=2)
    bench.trigger()
    bench.trigger()
    bench.ack(B, 2)
    bench.ack(A, 1)
    bench.ack(B, 1)
    assert bench.completed == [1]
    out = bench.ack(A, 2)
    assert (bench.completed, bench.done) == ([2], [1, 2])
    assert of(out, actions.DropCheckpoint) == [actions.DropCheckpoint(1, f"{JOB}/chk-1")]


@needs_several
def test_f10_metadata_is_written_in_the_order_of_completion() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.trigger()
    bench.ack_all(1)
    bench.ack_all(2)
    assert [action.checkpoint_id for action in bench.all(actions.WriteMetadata)] == [1]
    bench.handle(events.MetadataWritten(1))
    bench.handle(events.MetadataWritten(2))
    assert bench.done == [1, 2]


def test_f11_expiry_aborts_counts_and_discards_late_state() -> None:
    bench = Bench(checkpoint_timeout_ms=100, tolerable_failed_checkpoints=5)
    bench.trigger()
    bench.advance(100)
    assert (bench.pending, bench.done, bench.aborts) == ([], [], [1])
    assert bench.reasons == {1: "expired"}
    assert bench.machine.failures.count == 1
    assert of(bench.ack(A, 1, "late"), actions.DiscardState)[0].files == (path("late"),)


def test_f13_unknown_task_is_discarded_and_the_checkpoint_stays_pending() -> None:
    bench = Bench()
    bench.run_tasks(B, state=TaskState.FINISHED)
    bench.trigger()
    out = bench.ack(B, 1, "stray")
    assert answers(out) == [AckStatus.UNKNOWN]
    assert of(out, actions.DiscardState)[0].files == (path("stray", B),)
    assert bench.pending == [1]


def test_a_task_that_the_job_does_not_have_deletes_nothing() -> None:
    bench = Bench()
    bench.trigger()
    for task in (SubtaskKey("C", 0), SubtaskKey("A", 7), SubtaskKey("A", -1)):
        out = bench.ack(task, 1, "stray")
        assert answers(out) == [AckStatus.UNKNOWN]
        assert not of(out, actions.DiscardState)
    assert bench.pending == [1]


def test_f14_id_never_issued_is_ignored_and_its_state_discarded() -> None:
    """The shell asks first whether this leader still leads: a successor may have issued and completed it."""
    bench = Bench()
    out = bench.ack(A, 99, "stray")
    assert answers(out) == [AckStatus.UNKNOWN]
    assert of(out, actions.DiscardState)[0].files == (path("stray"),)
    assert answers(bench.decline(A, 99)) == [AckStatus.UNKNOWN]
    with pytest.raises(TypeError):
        DeclineCheckpoint(attempt=1, vertex="A", subtask=0, reason=FailureReason.DECLINED)  # type: ignore[call-arg]


def test_state_of_an_id_of_an_older_submission_is_left() -> None:
    """What that one completed another job may have claimed, and this job knows nothing of it any more."""
    bench = Bench(next_id=8, first_checkpoint_id=7)
    assert not of(bench.ack(A, 6, "older"), actions.DiscardState)
    assert of(bench.ack(A, 7, "own"), actions.DiscardState)[0].files == (path("own"),)


def test_f15_request_is_refused_while_a_task_does_not_run_and_takes_no_id() -> None:
    bench = Bench(running=False)
    bench.run_tasks(A)
    out = bench.request()
    (refused,) = out
    assert isinstance(refused, actions.CompleteRequest)
    assert refused.failure is FailureReason.NOT_ALL_TASKS_RUNNING
    assert bench.machine.next_checkpoint_id == 1


def test_f16_next_tick_after_the_task_runs_triggers_the_first_id() -> None:
    bench = Bench(running=False, checkpoint_interval_ms=10)
    bench.run_tasks(A)
    bench.start_scheduler()
    bench.advance(25)
    assert bench.pending == []
    bench.run_tasks(B)
    bench.advance(35)
    assert [action.checkpoint_id for action in bench.all(actions.SendTriggers)] == [1]


@needs_several
def test_f17_one_trigger_per_interval_with_rising_ids_and_times() -> None:
    bench = Bench(checkpoint_interval_ms=10)
    bench.start_scheduler()
    first = bench.machine.next_deadline_ms()
    assert first is not None
    assert 0 <= first <= 10
    bench.advance(55)
    triggers = bench.all(actions.SendTriggers)
    assert len(triggers) in (5, 6)
    assert [trigger.checkpoint_id for trigger in triggers] == list(range(1, len(triggers) + 1))
    times = [trigger.timestamp_ms for trigger in triggers]
    assert times == sorted(times)
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {10}


def test_f18_stopped_scheduler_aborts_pending_and_ids_go_on() -> None:
    bench = Bench(checkpoint_interval_ms=10, max_concurrent_checkpoints=1)
    bench.start_scheduler()
    bench.advance(15)
    assert bench.pending == [1]
    bench.handle(events.SchedulerStopped())
    assert bench.reasons == {1: "suspended"}
    bench.advance(500)
    assert bench.pending == []
    bench.start_scheduler()
    bench.advance(511)
    assert bench.pending == [2]


def test_f19_pause_is_measured_from_completion() -> None:
    bench = Bench(checkpoint_interval_ms=10, min_pause_ms=30)
    bench.request()
    bench.start_scheduler()
    bench.now = 7
    bench.ack_all(1)
    bench.advance(36)
    assert len(bench.all(actions.SendTriggers)) == 1
    bench.advance(37)
    assert [trigger.timestamp_ms for trigger in bench.all(actions.SendTriggers)][1:] == [1_000_037]


def test_f20_failed_checkpoint_does_not_extend_the_pause() -> None:
    bench = Bench(checkpoint_interval_ms=10, min_pause_ms=30, tolerable_failed_checkpoints=9)
    bench.request()
    bench.now = 2
    bench.ack_all(1)
    bench.start_scheduler()
    bench.request()
    bench.now = 7
    bench.decline(A, 2)
    bench.advance(45)
    assert [trigger.timestamp_ms - 1_000_000 for trigger in bench.all(actions.SendTriggers)][2:] == [32]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_f21_exactly_as_many_as_allowed_are_pending(limit: int) -> None:
    bench = Bench(checkpoint_interval_ms=10, max_concurrent_checkpoints=limit, tolerable_failed_checkpoints=99)
    bench.start_scheduler()
    bench.advance(200)
    assert bench.pending == list(range(1, limit + 1))
    bench.decline(A, 1)
    assert bench.pending == list(range(2, limit + 2))


def test_f22_completion_that_subsumes_frees_two_places() -> None:
    bench = Bench(checkpoint_interval_ms=10, max_concurrent_checkpoints=2)
    bench.start_scheduler()
    bench.advance(35)
    assert bench.pending == [1, 2]
    bench.ack_all(2)
    bench.advance(45)
    assert bench.pending == [3, 4]


def test_f23_savepoints_of_users_are_not_limited() -> None:
    bench = Bench(checkpoint_interval_ms=10, min_pause_ms=1000)
    bench.request()
    for number in range(5):
        bench.request(SAVEPOINT, f"s{number}")
    assert bench.pending == [1, 2, 3, 4, 5, 6]


@needs_several
def test_f24_newer_checkpoint_leaves_a_pending_savepoint_alone() -> None:
    bench = Bench()
    bench.trigger()
    bench.request(SAVEPOINT)
    bench.trigger()
    bench.ack_all(3)
    assert bench.pending == [2]
    bench.ack_all(2)
    assert of(bench.actions, actions.CompleteRequest)[-1].completed is not None


@pytest.mark.parametrize("kind", [CheckpointKind.CHECKPOINT, SAVEPOINT, STOP, FINAL])
def test_only_checkpoints_are_told_that_they_may_overtake(kind: CheckpointKind) -> None:
    bench = Bench(max_concurrent_checkpoints=1, unaligned_checkpoints=True, aligned_checkpoint_timeout_ms=40)
    (trigger,) = of(bench.request(kind), actions.SendTriggers)
    may = kind is CheckpointKind.CHECKPOINT
    assert (trigger.unaligned, trigger.aligned_timeout_ms) == (may, 40 if may else None)


@pytest.mark.parametrize("by_settings", [True, False])
@pytest.mark.parametrize(
    ("own", "sent"),
    [
        ({"unaligned": True}, (True, 40)),
        ({"unaligned": True, "aligned_timeout_ms": 0}, (True, 0)),
        ({"unaligned": False}, (False, None)),
        ({"unaligned": False, "aligned_timeout_ms": 9}, (False, None)),
    ],
)
def test_a_request_s_own_mode_is_for_it_alone(
    own: dict[str, Any], sent: tuple[bool, int | None], *, by_settings: bool
) -> None:
    bench = Bench(max_concurrent_checkpoints=1, unaligned_checkpoints=by_settings, aligned_checkpoint_timeout_ms=40)
    (trigger,) = of(bench.request(**own), actions.SendTriggers)
    assert (trigger.unaligned, trigger.aligned_timeout_ms) == sent
    bench.ack_all(1)
    (after,) = of(bench.trigger(), actions.SendTriggers)
    assert (after.unaligned, after.aligned_timeout_ms) == (by_settings, 40 if by_settings else None)


def test_nothing_that_may_overtake_is_triggered_beside_another_or_beside_a_savepoint() -> None:
    bench = Bench(max_concurrent_checkpoints=1, unaligned_checkpoints=True, checkpoint_interval_ms=10)
    bench.request()
    bench.request(SAVEPOINT)
    bench.advance(100)
    bench.request(name="again")
    assert bench.pending == [1, 2]
    bench.ack_all(1)
    assert bench.pending == [2]
    bench.ack_all(2)
    assert (bench.pending, of(bench.actions, actions.SendTriggers)[-1].unaligned) == ([3], True)


def test_f25_plain_savepoint_subsumes_nothing() -> None:
    bench = Bench()
    bench.trigger()
    bench.request(SAVEPOINT)
    bench.ack_all(2)
    assert bench.pending == [1]


def test_f25_stop_with_savepoint_subsumes_older_checkpoints() -> None:
    bench = Bench()
    bench.trigger()
    bench.request(SAVEPOINT, "plain")
    bench.request(STOP, "stop")
    bench.ack_all(3)
    assert bench.pending == [2]
    assert bench.reasons == {1: "subsumed"}


def test_f26_savepoint_yields_its_place_and_is_no_recovery_point() -> None:
    bench = Bench()
    bench.request(SAVEPOINT, "s")
    out = bench.ack_all(1)
    outcome = of(out, actions.CompleteRequest)[0]
    assert outcome.completed == CompletedCheckpoint(1, SAVEPOINT, "/savepoints/savepoint-s", 1_000_000, 6)
    assert (bench.completed, bench.done, bench.machine.newest) == ([], [], None)


def test_f26_stop_with_savepoint_is_announced_and_recovers() -> None:
    bench = Bench()
    bench.request(STOP, "s", drain=True)
    bench.ack_all(1)
    assert (bench.done, bench.completed) == ([1], [])
    assert bench.machine.newest is not None
    assert bench.machine.newest.kind is STOP


def test_f27_failed_stop_with_savepoint_fails_the_job_over() -> None:
    bench = Bench(tolerable_failed_checkpoints=100)
    bench.request(STOP)
    out = bench.decline(A, 1, FailureReason.TASK_NOT_READY)
    assert [action.checkpoint_id for action in of(out, actions.FailJob)] == [1]


def test_f28_finalisation_that_throws_discards_and_completes_nothing() -> None:
    bench = Bench()
    bench.trigger()
    bench.ack_all(1)
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.ack_all(2)
    out = bench.handle(events.MetadataFailed(2, FailureReason.FINALIZE_FAILURE, "boom"))
    assert actions.DiscardState(2, f"{JOB}/chk-2") in out
    assert (bench.completed, bench.done) == ([1], [1])
    assert bench.reasons == {2: "finalize_failure"}
    assert not bench.all(actions.FailJob)


def test_f29_ambiguous_write_deletes_nothing_until_it_is_decided() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata, actions.WriteAborted}
    bench.trigger()
    bench.ack_all(1)
    out = bench.handle(events.MetadataAmbiguous(1, "timeout"))
    assert [type(action) for action in out] == [actions.WriteAborted]
    assert bench.handle(events.AbortFailed(1, "timeout")) == []
    assert not bench.machine.is_quiet
    assert of(bench.advance(600), actions.WriteAborted)
    assert not bench.all(actions.DiscardState)
    assert bench.done == []


def test_f29_ambiguous_write_that_had_succeeded_completes() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata, actions.WriteAborted}
    bench.trigger()
    bench.ack_all(1)
    bench.handle(events.MetadataAmbiguous(1, "timeout"))
    bench.handle(events.AbortLost(1, Completed(1, 1_000_000)))
    assert (bench.completed, bench.done, bench.aborts) == ([1], [1], [])
    assert not bench.all(actions.DiscardState)


def test_f29_ambiguous_write_that_had_failed_is_aborted() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.ack_all(1)
    bench.handle(events.MetadataAmbiguous(1, "timeout"))
    assert (bench.completed, bench.done, bench.aborts) == ([], [], [1])


def test_f30_storage_error_aborts_and_counts() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.ack_all(1)
    out = bench.handle(events.MetadataFailed(1, FailureReason.IO_EXCEPTION, "disk full"))
    assert of(out, actions.DiscardState)
    assert of(out, actions.FailJob)[0].message == "disk full"


@needs_several
def test_f31_job_failure_aborts_all_and_ids_go_on() -> None:
    bench = Bench(next_id=3)
    bench.trigger()
    bench.trigger()
    bench.handle(events.JobFailing("task failed"))
    assert bench.reasons == {3: "job_failure", 4: "job_failure"}
    assert bench.machine.is_quiet
    bench.restart(2)
    bench.trigger()
    assert bench.pending == [5]


def test_f31_restart_waits_until_a_write_under_way_is_decided() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.ack_all(1)
    bench.handle(events.JobFailing("task failed"))
    assert not bench.machine.is_quiet
    bench.handle(events.MetadataWritten(1))
    assert bench.machine.is_quiet
    assert (bench.completed, bench.done) == ([1], [])


@needs_several
def test_f35_retention_keeps_the_newest_and_drops_aside() -> None:
    bench = Bench(retained_checkpoints=3)
    bench.held = {actions.DropCheckpoint}
    for number in range(1, 6):
        bench.trigger()
        bench.ack_all(number)
    assert bench.completed == [3, 4, 5]
    assert [action.checkpoint_id for action in bench.all(actions.DropCheckpoint)] == [1, 2]
    bench.trigger()
    assert bench.pending == [6]


@pytest.mark.parametrize(
    ("setting", "job_state", "kept"),
    [
        ("retain", "CANCELED", True),
        ("retain", "FAILED", True),
        ("retain", "FINISHED", False),
        ("delete", "CANCELED", False),
        ("delete", "FAILED", True),
        ("delete", "FINISHED", False),
        ("finish", "CANCELED", False),
        ("finish", "FAILED", True),
        ("finish", "FINISHED", True),
    ],
)
def test_f36_f38_what_the_end_of_the_job_leaves(setting: str, job_state: str, kept: bool) -> None:
    on_cancel = "delete" if setting == "finish" else setting
    bench = Bench(retention_on_cancel=on_cancel, retain_on_finish=setting == "finish", retained_checkpoints=2)
    for number in (1, 2):
        bench.trigger()
        bench.ack_all(number)
    bench.handle(events.ShutDown())
    bench.handle(events.JobTerminated(job_state))
    assert (bench.completed == [1, 2]) is kept
    assert ([action.checkpoint_id for action in bench.all(actions.DropCheckpoint)] == [1, 2]) is not kept


def test_f37_suspended_job_keeps_its_checkpoints() -> None:
    bench = Bench()
    bench.trigger()
    bench.ack_all(1)
    bench.handle(events.ShutDown(FailureReason.SUSPENDED))
    assert bench.completed == [1]


def test_f39_finished_task_is_not_asked_and_is_recorded() -> None:
    bench = Bench()
    bench.run_tasks(A, state=TaskState.FINISHED)
    bench.trigger()
    out = bench.ack(B, 1)
    assert of(out, actions.WriteMetadata)[0].finished == (A,)
    assert bench.completed == [1]


def test_f39_task_that_acknowledges_as_finished_is_recorded_and_the_notice_names_it() -> None:
    bench = Bench()
    bench.trigger()
    bench.ack(A, 1)
    out = bench.ack(B, 1, finished=True)
    assert of(out, actions.WriteMetadata)[0].finished == (B,)
    assert of(out, actions.NotifyComplete)[0].finished == (B,)


def test_f40_acknowledgement_before_finishing_counts() -> None:
    bench = Bench()
    bench.trigger()
    bench.ack(A, 1)
    bench.run_tasks(A, state=TaskState.FINISHED)
    bench.ack(B, 1)
    assert bench.completed == [1]


def test_f40_task_that_finishes_without_acknowledging_aborts() -> None:
    bench = Bench()
    bench.trigger()
    bench.run_tasks(A, state=TaskState.FINISHED)
    assert bench.reasons == {1: "end_of_input"}


def test_f41_late_write_of_an_old_leader_loses_and_changes_nothing() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.ack(A, 1, "a")
    bench.ack(B, 1, "b")
    aborted = AbortRecord(1, FailureReason.LEADER_CHANGED, epoch=2, nonce="theirs")
    out = bench.handle(events.MetadataLost(1, aborted))
    assert [type(action) for action in out] == [actions.LoseLeadership]
    assert bench.machine.is_fenced
    assert bench.ack(A, 1, "a") == []
    assert not bench.all(actions.DiscardState)


def test_f42_second_leader_meets_the_first_one_at_its_claim() -> None:
    bench = Bench()
    bench.held = {actions.WriteClaim}
    bench.trigger()
    theirs = ClaimRecord(1, 2, 1, 1, CheckpointKind.CHECKPOINT, f"{JOB}/chk-1", "theirs")
    assert bench.handle(events.ClaimTaken(1, theirs)) == [actions.LoseLeadership("epoch 2 claimed checkpoint 1", 2)]


def test_f43_empty_state_counts() -> None:
    bench = Bench()
    bench.trigger()
    bench.ack(A, 1)
    bench.ack(B, 1)
    assert bench.completed == [1]


def test_f44_a_thousand_tasks_three_times_complete_once() -> None:
    tasks = [SubtaskKey("V", index) for index in range(1000)]
    bench = Bench(tasks=tasks)
    bench.trigger()
    given = [answer for _ in range(3) for task in tasks for answer in answers(bench.ack(task, 1))]
    assert (given.count(AckStatus.SUCCESS), given.count(AckStatus.DUPLICATE)) == (1000, 2000)
    assert (bench.completed, bench.done) == ([1], [1])
    assert bench.machine.stats.view().counts.completed == 1


def test_f45_last_acknowledgement_first_means_completed() -> None:
    bench = Bench(checkpoint_timeout_ms=100)
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.now = 100
    bench.ack_all(1)
    bench.handle(events.DeadlineReached())
    bench.handle(events.MetadataWritten(1))
    assert (bench.done, bench.aborts) == ([1], [])


def test_f45_expiry_first_means_expired() -> None:
    bench = Bench(checkpoint_timeout_ms=100)
    bench.held = {actions.WriteAborted}
    bench.trigger()
    bench.ack(A, 1)
    bench.advance(100)
    assert answers(bench.ack(B, 1)) == [AckStatus.DISCARDED]
    bench.handle(events.AbortWritten(1))
    assert (bench.done, bench.aborts) == ([], [1])


def test_acknowledgement_of_an_older_attempt_never_counts() -> None:
    bench = Bench()
    bench.handle(events.JobFailing())
    bench.restart(2)
    bench.trigger()
    out = bench.ack(A, 1, "zombie", attempt=1)
    assert answers(out) == [AckStatus.UNKNOWN]
    assert of(out, actions.DiscardState)[0].files == (path("zombie"),)


def test_final_checkpoint_is_not_held_back_and_nothing_follows_it() -> None:
    bench = Bench(checkpoint_interval_ms=10, max_concurrent_checkpoints=1)
    bench.start_scheduler()
    bench.advance(10)
    bench.request(FINAL, "")
    assert bench.pending == [1, 2]
    bench.ack_all(2)
    assert bench.done == [2]
    bench.advance(100)
    assert bench.pending == []
    assert of(bench.request(), actions.CompleteRequest)[0].failure is FailureReason.JOB_FINISHING


def test_l06_all_tasks_finished_is_answered_as_finishing() -> None:
    bench = Bench()
    bench.run_tasks(state=TaskState.FINISHED)
    assert of(bench.request(), actions.CompleteRequest)[0].failure is FailureReason.JOB_FINISHING


def test_attempt_can_not_start_while_an_older_one_is_undecided() -> None:
    bench = Bench()
    bench.held = {actions.WriteAborted}
    bench.trigger()
    bench.handle(events.JobFailing())
    with pytest.raises(InvariantError):
        bench.handle(events.AttemptStarted(2, frozenset({A, B})))
