"""Retention by itself: what is let go at which moment, also where there is nothing to count."""

from __future__ import annotations

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.checkpoints.actions import DropCheckpoint
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.checkpoints.completed import DROP_RETRY_MS, CompletedCheckpointStore


def completed(checkpoint_id: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> CompletedCheckpoint:
    return CompletedCheckpoint(checkpoint_id, kind, f"job/chk-{checkpoint_id}", 0, 0, ())


def ids(drops: list[DropCheckpoint]) -> list[int]:
    return [drop.checkpoint_id for drop in drops]


def test_aborted_ids_go_with_the_next_completed_one_though_no_checkpoint_is_too_many() -> None:
    retained = CompletedCheckpointStore(3)
    assert retained.take_drops() == []
    retained.aborted(1)
    assert retained.take_drops() == []
    retained.add(completed(2))
    retained.aborted(3)
    assert ids(retained.take_drops()) == [1]
    retained.add(completed(4, CheckpointKind.STOP_SAVEPOINT))
    assert ids(retained.take_drops()) == [3]
    assert retained.take_drops() == []


def test_the_newest_is_the_later_one_of_checkpoint_and_stop_savepoint() -> None:
    retained = CompletedCheckpointStore(2)
    assert retained.newest is None
    retained.add(completed(1, CheckpointKind.STOP_SAVEPOINT))
    assert retained.newest == completed(1, CheckpointKind.STOP_SAVEPOINT)
    retained.add(completed(2))
    assert retained.newest == completed(2)
    retained.add(completed(3, CheckpointKind.STOP_SAVEPOINT))
    assert retained.newest == completed(3, CheckpointKind.STOP_SAVEPOINT)


def test_behind_the_end_of_a_job_its_own_stop_savepoint_or_what_a_label_keeps_is_left() -> None:
    earlier = completed(2, CheckpointKind.STOP_SAVEPOINT)
    retained = CompletedCheckpointStore(2, [completed(1), earlier], first_checkpoint_id=3)
    retained.note_labels(1, labelled=True)
    retained.add(completed(3))
    retained.take_all()
    assert retained.newest_left == completed(1), "an earlier submission's stop-savepoint is behind this one's output"
    retained.add(completed(4, CheckpointKind.STOP_SAVEPOINT))
    assert retained.newest_left == completed(4, CheckpointKind.STOP_SAVEPOINT)
    assert CompletedCheckpointStore(2, [earlier], first_checkpoint_id=3).newest_left is None


def test_a_deletion_that_failed_is_due_again_later_and_once() -> None:
    retained = CompletedCheckpointStore(1)
    assert retained.take_retries(0) == []
    for number in (1, 2):
        retained.add(completed(number))
    [drop] = retained.take_drops()
    retained.drop_failed(drop.checkpoint_id, 10)
    assert retained.next_retry_ms() == 10 + DROP_RETRY_MS
    assert retained.take_retries(9 + DROP_RETRY_MS) == []
    assert retained.take_retries(10 + DROP_RETRY_MS) == [drop]
    assert retained.take_retries(10 + DROP_RETRY_MS) == []
