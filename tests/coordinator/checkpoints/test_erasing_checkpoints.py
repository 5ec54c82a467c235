"""A checkpoint at whose cut a key is erased: what it builds on, what builds on it, and what goes when it is complete."""

from __future__ import annotations

from typing import Any

from holdfast.barriers.erasure import Erasure
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from tests.coordinator.bench import Bench, of

ERASURE = Erasure("secret", (("op", "*"),))


def bench(**settings: Any) -> Bench:
    made = Bench(states=(), state_backend="filesystem", retained_checkpoints=5, **settings)
    for number in (1, 2):
        made.trigger()
        made.ack_all(number)
    assert made.completed == [1, 2]
    return made


def trigger_of(out: list[actions.Action]) -> actions.SendTriggers:
    [found] = of(out, actions.SendTriggers)
    return found


def dropped(out: list[actions.Action]) -> list[int]:
    return [drop.checkpoint_id for drop in of(out, actions.DropCheckpoint) if drop.folder]


def test_it_builds_on_no_checkpoint_and_never_overtakes() -> None:
    made = bench()
    assert trigger_of(made.trigger()).base == 2
    erasing = trigger_of(made.request(erasure=ERASURE))
    assert (erasing.base, erasing.unaligned, erasing.request.erasure) == (None, False, ERASURE)
    unaligned = bench(unaligned_checkpoints=True)
    assert not trigger_of(unaligned.request(erasure=ERASURE)).unaligned
    unaligned.ack_all(3)
    assert trigger_of(unaligned.trigger()).unaligned


def test_none_behind_it_builds_on_one_before_it_whatever_becomes_of_it() -> None:
    made = bench()
    made.request(erasure=ERASURE)
    assert trigger_of(made.trigger()).base is None, "2 is the newest, and has the key"
    made.decline(made.tasks[0], 3)
    assert trigger_of(made.trigger()).base is None, "the live state lacks the key: a delta on 2 would name it"
    made.ack_all(5)
    assert trigger_of(made.trigger()).base == 5


def test_all_before_it_are_dropped_when_it_is_complete_and_not_before() -> None:
    made = bench()
    assert dropped(made.request(erasure=ERASURE)) == []
    assert dropped(made.ack_all(3)) == [1, 2]
    assert made.completed == [3]


def test_a_checkpoint_that_fails_drops_nothing() -> None:
    made = bench()
    made.request(erasure=ERASURE)
    assert dropped(made.decline(made.tasks[0], 3)) == []
    assert made.completed == [1, 2]
    [outcome] = made.all(actions.CompleteRequest)
    assert (outcome.checkpoint_id, outcome.failure) == (3, "declined")


def test_savepoints_that_began_before_are_aborted_and_later_ones_go_on() -> None:
    made = bench()
    made.request(CheckpointKind.SAVEPOINT, "before")
    made.request(erasure=ERASURE)
    made.request(CheckpointKind.SAVEPOINT, "behind")
    made.ack_all(4)
    assert made.reasons[3] == "subsumed"
    assert made.pending == [5]
    made.ack_all(5)
    assert [each.checkpoint_id for each in made.all(actions.CompleteRequest) if each.failure is None] == [4, 5]


def test_a_base_goes_when_the_increment_on_it_is_decided() -> None:
    made = bench()
    made.trigger()  # 3, on 2
    made.held = {actions.WriteAborted}
    made.request(erasure=ERASURE)
    assert dropped(made.ack_all(4)) == [1], "3 is being aborted"
    made.held = set()
    assert dropped(made.handle(events.AbortWritten(3))) == [2]
    assert made.completed == [4]


def test_a_label_keeps_an_older_one_until_it_is_removed() -> None:
    store = CompletedCheckpointStore(5)
    for number in (1, 2, 3):
        store.add(CompletedCheckpoint(number, CheckpointKind.CHECKPOINT, f"job/chk-{number}", 0))
    store.note_labels(2, labelled=True)
    store.erased(3)
    assert [drop.checkpoint_id for drop in store.take_drops()] == [1]
    assert store.take_drops() == []
    store.note_labels(2, labelled=False)
    assert [drop.checkpoint_id for drop in store.take_drops()] == [2]
    assert [entry.checkpoint_id for entry in store.retained] == [3]


def checkpoints(*numbers: int) -> list[CompletedCheckpoint]:
    return [CompletedCheckpoint(number, CheckpointKind.CHECKPOINT, f"job/chk-{number}", 0) for number in numbers]


def test_the_next_leader_drops_what_the_one_that_died_has_left() -> None:
    store = CompletedCheckpointStore(5, checkpoints(1, 2, 3, 4), erased_below=3)
    assert [drop.checkpoint_id for drop in store.take_drops()] == [1, 2]
    assert [entry.checkpoint_id for entry in store.retained] == [3, 4]


def test_what_the_next_leader_was_restored_from_stays_until_it_has_a_newer_one() -> None:
    """A user who starts from an older snapshot behind an erasure brings the key back, and must not lose what the job runs on."""
    store = CompletedCheckpointStore(5, checkpoints(1, 2, 3), erased_below=3, restored_id=2, first_checkpoint_id=4)
    assert [drop.checkpoint_id for drop in store.take_drops()] == [1]
    store.add(*checkpoints(4))
    assert [drop.checkpoint_id for drop in store.take_drops()] == [2]


def test_the_next_leader_builds_on_none_before_an_erasure_that_failed() -> None:
    made = Bench(states=(), state_backend="filesystem", completed=tuple(checkpoints(1)), next_id=3, newest_erasure=2)
    assert trigger_of(made.trigger()).base is None


def test_no_text_shows_the_key() -> None:
    made = bench()
    assert "secret" not in repr(made.request(erasure=ERASURE))
    assert "secret" not in f"{ERASURE} {ERASURE!r} {(ERASURE,)}"
