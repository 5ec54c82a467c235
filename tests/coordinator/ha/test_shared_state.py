"""Files that checkpoints share: who refers to which, what goes with one, what a placeholder stands for (J09-J16, J18, I23)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.barriers.messages import AcknowledgeCheckpoint, CheckpointKind, FailureReason, SubtaskKey
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.ha.recorded_job import Completed, decode_decision
from holdfast.coordinator.ha.shared_state import SharedStateRegistry
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorState,
    OperatorSubtaskState,
    PlaceholderHandle,
    StateHandle,
)
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from tests.coordinator.bench import JOB, A, B, Bench, of

CHECKSUM = "xxh3_128:" + "0" * 32


def file(name: str, length: int = 10) -> FileHandle:
    return FileHandle(f"../shared/{name}", length, CHECKSUM)


def placeholder(name: str, length: int = 10) -> PlaceholderHandle:
    return PlaceholderHandle(f"../shared/{name}", length)


def keyed(*parts: StateHandle) -> OperatorSubtaskState:
    names = tuple(f"{number:06}.sst" for number in range(len(parts)))
    own = (InlineHandle(b"x\n"), InlineHandle(b""))
    handle = KeyedStateHandle(KeyGroupRange(0, 8), "rocksdb", (), (*parts, *own), (*names, "CURRENT", "x"))
    return OperatorSubtaskState(keyed=(handle,))


def states(*parts: StateHandle, task: SubtaskKey = A) -> dict[SubtaskKey, dict[str, OperatorSubtaskState]]:
    return {task: {"op": keyed(*parts)}}


def completed(number: int, *names: str, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> CompletedCheckpoint:
    return CompletedCheckpoint(number, kind, f"{JOB}/chk-{number}", number, 0, tuple(file(name) for name in names))


class Job(Bench):
    """A job with increments; task A alone has state."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(state_backend="rocksdb", states=(), **settings)

    def checkpoint(self, number: int, *parts: StateHandle) -> list[Any]:
        """One checkpoint with these parts, as far as it goes."""
        out = self.trigger()
        return out + self.acknowledge(number, *parts)

    def acknowledge(self, number: int, *parts: StateHandle) -> list[Any]:
        ack = AcknowledgeCheckpoint(self.attempt, number, A.vertex, A.subtask, {"op": keyed(*parts)})
        return [*self.handle(events.AcksReceived((ack,), 0)), *self.ack(B, number)]

    def bases(self) -> list[int | None]:
        return [action.base for action in self.all(actions.SendTriggers)]

    def deleted(self) -> dict[int, tuple[str, ...]]:
        """Dropped id -> shared files that went with it."""
        return {action.checkpoint_id: action.shared for action in self.all(actions.DropCheckpoint)}


# -------------------------------------------------------------------------------------------------------------- the tables


def test_j09_a_file_goes_with_the_last_checkpoint_that_refers_to_it() -> None:
    job = Job()
    job.checkpoint(1, file("1-1-op-0-a-s1"), file("1-1-op-0-a-s2"))
    job.checkpoint(2, placeholder("1-1-op-0-a-s2"), file("2-1-op-0-a-s3"))
    assert job.deleted() == {1: ("1-1-op-0-a-s1",)}
    job.checkpoint(3, placeholder("2-1-op-0-a-s3"), file("3-1-op-0-a-s4"))
    assert job.deleted() == {1: ("1-1-op-0-a-s1",), 2: ("1-1-op-0-a-s2",)}
    assert job.bases() == [None, 1, 2]
    assert job.machine.retained[0].shared == (file("2-1-op-0-a-s3"), file("3-1-op-0-a-s4"))


def test_j10_an_aborted_increment_takes_only_its_own_files_with_it() -> None:
    job = Job(tolerable_failed_checkpoints=3)
    job.checkpoint(1, file("1-1-op-0-a-s1"), file("1-1-op-0-a-s2"))
    job.trigger()
    job.handle(
        events.AcksReceived(
            (AcknowledgeCheckpoint(1, 2, A.vertex, 0, {"op": keyed(placeholder("1-1-op-0-a-s2"), file("2-1-op-0-a-s3"))}),),
            0,
        )
    )
    out = job.decline(B, 2)
    assert of(out, actions.DiscardState) == [actions.DiscardState(2, f"{JOB}/chk-2")]
    assert job.deleted() == {}
    job.checkpoint(3, placeholder("1-1-op-0-a-s2"), file("3-1-op-0-a-s3"))
    assert job.bases() == [None, 1, 1]
    assert job.deleted() == {1: ("1-1-op-0-a-s1",), 2: ()}


def test_j11_a_placeholder_is_replaced_by_the_registered_file() -> None:
    job = Job()
    job.checkpoint(1, file("1-1-op-0-a-s1"), file("1-1-op-0-a-s2", 77))
    (write,) = of(job.checkpoint(2, placeholder("1-1-op-0-a-s2", 77), file("2-1-op-0-a-s3")), actions.WriteMetadata)
    assert write.states == {A: {"op": keyed(file("1-1-op-0-a-s2", 77), file("2-1-op-0-a-s3"))}, B: {"op": OperatorSubtaskState()}}
    assert job.machine.retained[0].size == 89


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (placeholder("1-1-op-0-a-missing"), "which its base 1 does not have"),
        (placeholder("1-1-op-0-a-s1", 11), "the base has it with 10"),
        (PlaceholderHandle("chk-1/1-1-op-0-a-s1", 10), "which its base 1 does not have"),
        (file("1-1-op-0-a-s1"), "is not the name of a file that this task writes for this checkpoint"),
        (file("7-1-op-0-a-s1"), "is not the name of a file that this task writes for this checkpoint"),
        (file("nobody"), "is not the name of a file that this task writes for this checkpoint"),
    ],
)
def test_j12_what_the_base_does_not_have_fails_the_checkpoint(part: StateHandle, reason: str) -> None:
    job = Job(tolerable_failed_checkpoints=3)
    job.checkpoint(1, file("1-1-op-0-a-s1"))
    out = job.checkpoint(2, part)
    assert not of(out, actions.WriteMetadata)
    (write,) = of(out, actions.WriteAborted)
    assert (write.reason, reason in write.message) == (FailureReason.DECLINED, True), write.message
    assert job.completed == [1]


def test_j12_a_first_checkpoint_has_no_base_to_refer_to() -> None:
    job = Job(tolerable_failed_checkpoints=3)
    assert not of(job.checkpoint(1, placeholder("1-1-op-0-a-s1")), actions.WriteMetadata)


@pytest.mark.parametrize("part", [placeholder("1-1-op-0-a-s1"), file("1-1-op-0-a-s1"), file("2-1-op-0-a-s2")])
def test_j12_a_savepoint_shares_nothing(part: StateHandle) -> None:
    job = Job(tolerable_failed_checkpoints=3)
    job.checkpoint(1, file("1-1-op-0-a-s1"))
    job.request(CheckpointKind.SAVEPOINT)
    assert job.bases() == [None, None]
    out = job.acknowledge(2, part)
    assert not of(out, actions.WriteMetadata)
    (decision,) = of(out, actions.WriteAborted)
    assert decision.checkpoint_id == 2, "it is declined by the acknowledgement itself"


def test_j13_what_was_registered_first_stays() -> None:
    shared = SharedStateRegistry()
    shared.register(1, [file("1-1-op-0-a-s1", 10)])
    shared.register(2, [file("1-1-op-0-a-s1", 20)])
    assert shared.resolve(3, 2, states(placeholder("1-1-op-0-a-s1", 10))) == states(file("1-1-op-0-a-s1", 10))
    assert shared.release(1).names == ()
    assert shared.release(2).names == ("1-1-op-0-a-s1",)


def test_j14_a_file_of_two_stays_until_both_are_gone() -> None:
    job = Job(retained_checkpoints=2)
    job.checkpoint(1, file("1-1-op-0-a-s1"), file("1-1-op-0-a-s2"))
    job.checkpoint(2, placeholder("1-1-op-0-a-s2"), file("2-1-op-0-a-s3"))
    job.checkpoint(3, file("3-1-op-0-a-s4"))
    assert job.deleted() == {1: ("1-1-op-0-a-s1",)}
    job.checkpoint(4, file("4-1-op-0-a-s5"))
    assert job.deleted()[2] == ("1-1-op-0-a-s2", "2-1-op-0-a-s3")


def test_j15_a_restart_rebuilds_the_same_counts_from_metadata() -> None:
    job = Job(retained_checkpoints=2)
    job.checkpoint(1, file("1-1-op-0-a-s1"), file("1-1-op-0-a-s2"))
    job.checkpoint(2, placeholder("1-1-op-0-a-s2"), file("2-1-op-0-a-s3"))
    third = job.checkpoint(3, placeholder("2-1-op-0-a-s3"), file("3-1-op-0-a-s4"))
    (write,) = of(third, actions.WriteMetadata)
    operator = OperatorState("op", "f" * 32, "op", 1, 8, (write.states[A]["op"],))
    metadata = SnapshotMetadata(
        job_id=JOB, job_name="j", checkpoint_id=3, kind="checkpoint", attempt=1, epoch=1, trigger_timestamp_ms=0,
        completion_timestamp_ms=0, operators=(operator,),
    )  # fmt: skip
    decision = decode_decision(encode_metadata(metadata))
    assert isinstance(decision, Completed)
    assert (decision.size, decision.new_size) == (22, 12)
    newest = CompletedCheckpoint(3, CheckpointKind.CHECKPOINT, "x", 3, 20, decision.shared)
    kept = [completed(2, "1-1-op-0-a-s2", "2-1-op-0-a-s3"), newest]
    again = CompletedCheckpointStore(2, kept)
    assert again.shared_state.counts() == job.machine._completed.shared_state.counts()
    assert again.shared_state.counts() == {"1-1-op-0-a-s2": (2,), "2-1-op-0-a-s3": (2, 3), "3-1-op-0-a-s4": (3,)}


def test_j16_an_increment_builds_on_what_is_completed_and_nothing_else() -> None:
    job = Job(tolerable_failed_checkpoints=9)
    job.held = {actions.WriteMetadata}
    job.checkpoint(1, file("1-1-op-0-a-s1"))
    job.trigger()
    assert job.bases() == [None, None], "1 is acknowledged and not completed"
    job.handle(events.MetadataWritten(1))
    job.trigger()
    assert job.bases() == [None, None, 1]
    assert not of(job.acknowledge(3, placeholder("2-1-op-0-a-s1")), actions.WriteMetadata), "2 was never completed"


def test_the_base_of_a_pending_increment_stays_whatever_completes_meanwhile() -> None:
    job = Job()
    job.checkpoint(1, file("1-1-op-0-a-s1"))
    job.held = {actions.WriteAborted}
    job.trigger()
    job.checkpoint(3, file("3-1-op-0-a-s2"))
    assert job.completed == [1, 3], "2 is subsumed, and that is not stored yet"
    job.handle(events.AbortWritten(2))
    assert job.completed == [3]
    assert job.deleted()[1] == ("1-1-op-0-a-s1",)


@pytest.mark.parametrize(
    ("increment_base", "first", "newest", "base"),
    [
        (0, 1, completed(5), 5),
        (0, 6, completed(5), None),
        (5, 6, completed(5), 5),
        (4, 6, completed(5), None),
        (0, 1, completed(5, kind=CheckpointKind.STOP_SAVEPOINT), None),
        (5, 6, completed(5, kind=CheckpointKind.STOP_SAVEPOINT), None),
        (0, 1, CompletedCheckpoint(5, CheckpointKind.CHECKPOINT, "x", 0, 0, None), None),
    ],
    ids=["own", "of another submission", "restored", "restored from an older one", "stop", "restored stop", "unreadable"],
)
def test_j18_only_what_tasks_have_can_be_built_upon(
    increment_base: int, first: int, newest: CompletedCheckpoint, base: int | None
) -> None:
    retained = CompletedCheckpointStore(3, [completed(3), newest], increment_base=increment_base, first_checkpoint_id=first)
    assert retained.base == base


def test_increments_can_be_switched_off() -> None:
    job = Job(incremental_checkpoints=False)
    job.checkpoint(1)
    job.checkpoint(2)
    assert job.bases() == [None, None]


def test_a_repeated_trigger_names_the_same_base() -> None:
    job = Job()
    job.checkpoint(1, file("1-1-op-0-a-s1"))
    job.trigger()
    assert [trigger.base for trigger in job.machine.triggers_to_repeat()] == [1]


# -------------------------------------------------------------------------------------------------------- late and unreadable


def test_a_late_acknowledgement_never_takes_away_what_others_share() -> None:
    job = Job(next_id=6)
    job.acknowledge(5, file("5-1-op-0-a-s1"))  # an id that was aborted: what it names is nobody's
    assert of(job.actions, actions.DiscardState) == [actions.DiscardState(5, f"{JOB}/chk-5", ("../shared/5-1-op-0-a-s1",))]
    kept = Bench(state_backend="rocksdb", completed=[completed(7, "3-1-op-0-a-s1")], next_id=8)
    parts = (file("3-1-op-0-a-s1"), file("3-1-op-0-a-s2"), placeholder("2-1-op-0-a-s1"))
    ack = AcknowledgeCheckpoint(1, 3, A.vertex, 0, {"op": keyed(*parts)})
    (discard,) = of(kept.handle(events.AcksReceived((ack,), 0)), actions.DiscardState)
    assert discard.files == ("../shared/3-1-op-0-a-s2",), "3 was completed and dropped; 7 has its file"


def test_what_an_unreadable_checkpoint_may_refer_to_stays() -> None:
    shared = SharedStateRegistry()
    shared.register(1, [file("1-1-op-0-a-s1")])
    shared.register(2, None)
    shared.register(3, [file("3-1-op-0-a-s1")])
    assert shared.release(1).names == ()
    assert shared.is_needed("1-1-op-0-a-s9")
    assert shared.release(3).names == ("3-1-op-0-a-s1",), "written after it"
    assert shared.release(2).names == ("1-1-op-0-a-s1",)
    assert not shared.is_needed("1-1-op-0-a-s9")


def test_a_file_goes_behind_every_claim_that_still_needs_it() -> None:
    shared = SharedStateRegistry()
    for number in (1, 2, 3):
        shared.register(number, [file("1-1-op-0-a-s1")])
    assert shared.release(1).names == ()
    assert shared.release(2).names == ()
    shared.forget(1)
    released = shared.release(3)
    assert (released.names, released.after) == (("1-1-op-0-a-s1",), (2,))
    assert shared.is_needed("1-1-op-0-a-s1"), "it is there until the deletion is done"
    shared.forget(3)
    assert not shared.is_needed("1-1-op-0-a-s1")


def test_deletions_that_failed_are_repeated_with_their_files() -> None:
    job = Job()
    job.held = {actions.DropCheckpoint}
    job.checkpoint(1, file("1-1-op-0-a-s1"))
    job.checkpoint(2, file("2-1-op-0-a-s1"))
    job.handle(events.DropFailed(1, "busy"))
    (again,) = of(job.advance(job.now + 5_000), actions.DropCheckpoint)
    assert again == actions.DropCheckpoint(1, f"{JOB}/chk-1", ("1-1-op-0-a-s1",))


def test_the_end_of_a_job_deletes_all_its_files() -> None:
    job = Job(retained_checkpoints=2)
    job.checkpoint(1, file("1-1-op-0-a-s1"))
    job.checkpoint(2, placeholder("1-1-op-0-a-s1"), file("2-1-op-0-a-s2"))
    drops = of(job.handle(events.JobTerminated("FINISHED")), actions.DropCheckpoint)
    assert [(drop.checkpoint_id, drop.shared, drop.after) for drop in drops] == [
        (1, (), ()),
        (2, ("1-1-op-0-a-s1", "2-1-op-0-a-s2"), (1,)),
    ]


# ------------------------------------------------------------------------------------------------------------------ model


class Registry(RuleBasedStateMachine):
    """Against a dict of sets: nothing is released that anything refers to, and everything is, once."""

    @initialize()
    def begin(self) -> None:
        self.shared = SharedStateRegistry()
        self.model: dict[int, set[str]] = {}
        self.unreadable: set[int] = set()
        self.leaving: dict[int, set[str]] = {}
        self.released: set[str] = set()
        self.next = 1

    @rule(new=st.integers(0, 3), chosen=st.randoms(use_true_random=False), damaged=st.integers(0, 9))
    def complete(self, new: int, chosen: random.Random, damaged: int) -> None:
        number, self.next = self.next, self.next + 1
        base = max(self.model, default=None)
        kept = {name for name in self.model.get(base or 0, ()) if chosen.random() < 0.7}
        names = kept | {f"{number}-1-op-0-a-{index}" for index in range(new)}
        if damaged == 0:
            self.unreadable.add(number)
            self.shared.register(number, None)
            return
        parts = [placeholder(name) if name in kept else file(name) for name in sorted(names)]
        resolved = self.shared.resolve(number, base, states(*parts))
        assert resolved == states(*(file(name) for name in sorted(names)))
        self.shared.register(number, [file(name) for name in sorted(names)])
        self.model[number] = names

    @rule(chosen=st.randoms(use_true_random=False))
    def drop(self, chosen: random.Random) -> None:
        known = sorted({*self.model, *self.unreadable})
        if not known:
            return
        number = chosen.choice(known)
        names = self.model.pop(number, set())
        self.unreadable.discard(number)
        released = self.shared.release(number)
        self.leaving[number] = names
        for name in released.names:
            assert name not in self.released
            assert all(name not in others for others in self.model.values()), "something refers to it"
            assert all(int(name.partition("-")[0]) > other for other in self.unreadable), "something may refer to it"
            need = {other for other, theirs in self.leaving.items() if name in theirs and other != number}
            assert need <= set(released.after)
        self.released |= set(released.names)

    @rule(chosen=st.randoms(use_true_random=False))
    def deleted(self, chosen: random.Random) -> None:
        if self.leaving:
            number = chosen.choice(sorted(self.leaving))
            del self.leaving[number]
            self.shared.forget(number)

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        counts = {name: set(ids) for name, ids in self.shared.counts().items() if ids}
        wanted: dict[str, set[int]] = {}
        for number, names in self.model.items():
            for name in names:
                wanted.setdefault(name, set()).add(number)
        assert counts == wanted
        if not self.unreadable:
            assert set(self.shared.counts()) == set(wanted), "a file that nobody refers to was not released"


TestRegistry = Registry.TestCase


@given(st.lists(st.sets(st.sampled_from("abcdef"), max_size=4), max_size=6))
def test_rebuilding_in_any_order_gives_the_same(checkpoints: list[set[str]]) -> None:
    entries = [completed(number, *(f"1-{name}" for name in sorted(names))) for number, names in enumerate(checkpoints, 1)]
    forwards, backwards = CompletedCheckpointStore(9, entries), CompletedCheckpointStore(9, reversed(entries))
    assert forwards.shared_state.counts() == backwards.shared_state.counts()
