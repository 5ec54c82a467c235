"""Counting failed checkpoints (scenarios H), and pending and retained ones on their own (scenarios J)."""

from __future__ import annotations

import re

import pytest

from holdfast.barriers.messages import AcknowledgeCheckpoint, AckStatus, CheckpointKind, FailureReason
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.checkpoints.completed import DROP_RETRY_MS, DROP_TRIES_MAX, CompletedCheckpointStore
from holdfast.coordinator.checkpoints.failures import CheckpointFailureManager
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint
from holdfast.coordinator.totals import Tally
from holdfast.statebackends.errors import InvariantError
from tests.coordinator.bench import JOB, A, B, Bench, answers, of
from tests.coordinator.doubles import word_count

REASONS = {
    "D": FailureReason.DECLINED,
    "X": FailureReason.EXPIRED,
    "I": FailureReason.IO_EXCEPTION,
    "Y": FailureReason.ASYNC_EXCEPTION,
    "s": FailureReason.SUBSUMED,
    "t": FailureReason.TRIGGER_FAILURE,
    "r": FailureReason.TASK_NOT_READY,
    "j": FailureReason.JOB_FAILOVER,
    "f": FailureReason.FINALIZE_FAILURE,
}


@pytest.mark.parametrize(
    ("row", "tolerable", "sequence", "failed_at"),
    [
        ("H01", 0, "D1", ["D1"]),
        ("H02", 2, "X1 X2", []),
        ("H03", 2, "D1 X2 Y3", ["Y3"]),
        ("H04", 1, "D1 ✓2 D3", []),
        ("H05", 1, "D1 ✓2 D3 I4", ["I4"]),
        ("H06", 0, "s1 t2 r3 j4 f5", []),
        ("H07", 1, "D1 D1 D1", []),
        ("H08", 0, "✓5 X3", []),
        ("H09", 1, "D1 D2 D3", ["D2"]),
        ("H10", 2**31, " ".join(f"X{number}" for number in range(1, 1001)), []),
    ],
)
def test_h01_to_h10_when_the_job_fails(row: str, tolerable: int, sequence: str, failed_at: list[str]) -> None:
    counter = CheckpointFailureManager(tolerable)
    failed: list[str] = []
    for step in sequence.split():
        match = re.fullmatch(r"(.)(\d+)", step)
        assert match is not None
        sign, number = match[1], int(match[2])
        if sign == "✓":
            counter.completed(number)
        elif counter.failed(number, REASONS[sign]):
            failed.append(step)
    assert failed == failed_at, row
    if row == "H09":
        assert counter.count == 1


def test_more_in_flight_than_allowed_aborts_the_checkpoint_and_the_job_runs_on() -> None:
    """However often: a job that is that far behind would be further behind after a restart."""
    bench = Bench(tolerable_failed_checkpoints=0)
    for number in (1, 2, 3):
        bench.trigger()
        bench.decline(A, number, FailureReason.IN_FLIGHT_LIMIT)
        assert bench.reasons[number] == "in_flight_limit"
    assert not bench.all(actions.FailJob)
    bench.trigger()
    bench.ack_all(4)
    assert bench.completed == [4]


def test_h11_savepoint_that_fails_in_the_coordinator_is_its_requesters_affair() -> None:
    bench = Bench()
    bench.held = {actions.WriteMetadata}
    bench.request(CheckpointKind.SAVEPOINT)
    bench.ack_all(1)
    bench.handle(events.MetadataFailed(1, FailureReason.IO_EXCEPTION, "read-only"))
    assert not bench.all(actions.FailJob)


def test_h12_stop_with_savepoint_that_fails_at_a_task_always_fails_the_job() -> None:
    bench = Bench(tolerable_failed_checkpoints=1000)
    bench.request(CheckpointKind.STOP_SAVEPOINT)
    bench.decline(B, 1)
    assert len(bench.all(actions.FailJob)) == 1


def test_h14_savepoint_declined_by_a_task_counts_like_any_decline() -> None:
    bench = Bench()
    bench.request(CheckpointKind.SAVEPOINT)
    bench.decline(B, 1)
    assert len(bench.all(actions.FailJob)) == 1


def test_failures_of_an_attempt_that_is_over_do_not_fail_the_next_one() -> None:
    bench = Bench()
    bench.held = {actions.WriteAborted}
    bench.trigger()
    bench.decline(A, 1)
    bench.handle(events.JobFailing())
    bench.handle(events.AbortWritten(1))
    assert not bench.all(actions.FailJob)


# ------------------------------------------------------------------------------------------------------------- pending


def pending(request: CheckpointRequest | None = None) -> PendingCheckpoint:
    checkpoint = PendingCheckpoint(
        1,
        request or CheckpointRequest(),
        attempt=1,
        folder=f"{JOB}/chk-1",
        tasks=frozenset({A, B}),
        finished=(),
        started_ms=0,
        deadline_ms=100,
    )
    checkpoint.trigger(1)
    return checkpoint


def test_j01_savepoint_is_never_subsumed() -> None:
    bench = Bench()
    bench.request(CheckpointKind.SAVEPOINT)
    bench.request(CheckpointKind.STOP_SAVEPOINT)
    bench.ack_all(2)
    assert bench.pending == [1]


def test_j02_completing_with_acknowledgements_missing_or_twice_is_an_error() -> None:
    checkpoint = pending()
    tally = Tally(word_count(), {})
    with pytest.raises(InvariantError):
        checkpoint.begin_complete({}, tally)
    for task in (A, B):
        assert checkpoint.acknowledge(AcknowledgeCheckpoint(1, 1, task.vertex, 0)) is AckStatus.SUCCESS
    checkpoint.begin_complete({A: {}, B: {}}, tally)
    with pytest.raises(InvariantError):
        checkpoint.begin_complete({}, tally)


def test_j03_abort_answers_its_requester_discards_and_later_acks_hear_so() -> None:
    bench = Bench(tolerable_failed_checkpoints=1)
    bench.request(name="mine")
    bench.ack(A, 1, "a")
    out = bench.decline(B, 1)
    outcome = of(out, actions.CompleteRequest)[0]
    assert (outcome.request.trigger_id, outcome.failure) == ("mine", FailureReason.DECLINED)
    assert of(out, actions.DiscardState)
    assert answers(bench.ack(B, 1)) == [AckStatus.DISCARDED]


def test_j04_one_that_is_disposed_of_has_nothing_left_to_expire() -> None:
    checkpoint = pending()
    assert checkpoint.deadline_ms == 100
    checkpoint.abort_with(FailureReason.DECLINED, "")
    assert checkpoint.deadline_ms is None


def test_j05_complete_only_when_every_participant_acknowledged() -> None:
    checkpoint = pending()
    checkpoint.acknowledge(AcknowledgeCheckpoint(1, 1, "A", 0))
    assert not checkpoint.is_complete
    assert list(checkpoint.missing()) == [B]


# ------------------------------------------------------------------------------------------------------------ retained


def completed(number: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> CompletedCheckpoint:
    return CompletedCheckpoint(number, kind, f"{JOB}/chk-{number}", number)


def test_j06_oldest_goes_only_when_its_successor_is_durable() -> None:
    bench = Bench(retained_checkpoints=2)
    for number in (1, 2):
        bench.trigger()
        bench.ack_all(number)
    bench.held = {actions.WriteMetadata}
    bench.trigger()
    bench.ack_all(3)
    assert not bench.all(actions.DropCheckpoint)
    bench.handle(events.MetadataWritten(3))
    assert bench.completed == [2, 3]
    assert [action.checkpoint_id for action in bench.all(actions.DropCheckpoint)] == [1]


def test_j07_failed_deletion_is_tried_again_and_blocks_nothing() -> None:
    bench = Bench()
    bench.held = {actions.DropCheckpoint}
    for number in (1, 2):
        bench.trigger()
        bench.ack_all(number)
    for _ in range(DROP_TRIES_MAX - 1):
        bench.handle(events.DropFailed(1, "busy"))
        assert of(bench.advance(bench.now + DROP_RETRY_MS), actions.DropCheckpoint)
    bench.handle(events.DropFailed(1, "busy"))
    assert not of(bench.advance(bench.now + DROP_RETRY_MS), actions.DropCheckpoint)
    assert bench.completed == [2]
    bench.trigger()
    assert bench.pending == [3]


def test_aborted_ids_keep_their_claims_until_a_higher_one_completes() -> None:
    retained = CompletedCheckpointStore(1)
    retained.aborted(1)
    assert retained.take_drops() == []
    retained.add(completed(2))
    retained.aborted(3)
    assert [drop.checkpoint_id for drop in retained.take_drops()] == [1]


def test_restored_checkpoint_stays_until_a_newer_one_completes() -> None:
    retained = CompletedCheckpointStore(1, [completed(3), completed(4), completed(5)], restored_id=3, first_checkpoint_id=6)
    assert [drop.checkpoint_id for drop in retained.take_drops()] == [4]
    retained.check()
    retained.add(completed(6))
    assert [drop.checkpoint_id for drop in retained.take_drops()] == [3, 5]
    assert [entry.checkpoint_id for entry in retained.retained] == [6]


def test_a_leader_counts_the_restored_checkpoint_behind_one_that_its_predecessor_completed() -> None:
    def leader(*known: CompletedCheckpoint) -> CompletedCheckpointStore:
        return CompletedCheckpointStore(2, [completed(2), completed(3), *known], restored_id=3, first_checkpoint_id=4)

    assert leader(completed(4, CheckpointKind.SAVEPOINT)).take_drops() == []
    assert [drop.checkpoint_id for drop in leader(completed(5, CheckpointKind.FINAL)).take_drops()] == [2]


def test_savepoints_are_remembered_and_never_counted() -> None:
    retained = CompletedCheckpointStore(1, [completed(1), completed(2, CheckpointKind.SAVEPOINT)])
    assert retained.take_drops() == []
    assert retained.is_completed(2)
    assert retained.newest == completed(1)
    with pytest.raises(InvariantError):
        retained.add(completed(1))
