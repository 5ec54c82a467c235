"""Labels pin snapshots (ADR 105): a label beats a deletion that has not begun, or is refused, whoever dies or sleeps where."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.checkpoints.actions import DropCheckpoint
from holdfast.coordinator.checkpoints.events import CheckpointDropped, CheckpointKept, DropFailed
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.dispatcher.submit import Starter, clear_ended
from holdfast.coordinator.ha.records import (
    AbortRecord,
    ClaimRecord,
    LabelRecord,
    LeaderRecord,
    OwnerRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    encode_record,
)
from holdfast.coordinator.ha.store import drop_checkpoint, read_job
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.ownership.claims import claim_snapshot, dispose_snapshot, holds_claim, release_snapshot
from holdfast.coordinator.ownership.files import FileStatus
from holdfast.coordinator.ownership.fsck import FsckRequest, check_directory
from holdfast.coordinator.ownership.labels import (
    LABELS_MAX,
    LABELS_OF_ONE_MAX,
    Mark,
    add_label,
    begin_deletion,
    check_label,
    read_labels,
    read_register,
    remove_label,
)
from holdfast.coordinator.restore.resolve import resolve_snapshot
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    NotFoundError,
    SnapshotLabelledError,
)
from holdfast.statebackends.layout import JobPaths, label_path
from holdfast.statebackends.snapshot.metadata import encode_metadata
from holdfast.statebackends.storage.port import Flow, PutIfAbsent, run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.ownership.test_claims import contents
from tests.coordinator.shared_world import SharedWorld
from tests.coordinator.test_crashes import live, settle
from tests.coordinator.test_shared_crashes import check_end
from tests.coordinator.world import JOB, DictStorage, Steps
from tests.examples import seeds

PATHS = JobPaths(JOB)
SAVEPOINT = "/savepoints/savepoint-3"
GRAPH = word_count(retained_checkpoints=1)


def mark(name: str = "user") -> Mark:
    return Mark(name, 1_000)


def claim_of(number: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT, folder: str = "") -> bytes:
    return encode_record(ClaimRecord(number, 1, 1, 1, kind, folder or PATHS.checkpoint(number), "n"))


def put_checkpoint(storage: DictStorage, number: int) -> None:
    metadata = contents(checkpoint_id=number, kind="checkpoint", job_id=JOB)
    storage.files[PATHS.claim(number)] = claim_of(number)
    storage.files[PATHS.decision(number)] = encode_metadata(metadata)
    storage.files[f"{PATHS.checkpoint(number)}/source-0"] = b"a"


def put_savepoint(storage: DictStorage, number: int, folder: str = SAVEPOINT) -> None:
    record = SavepointRecord(number, folder, CheckpointKind.SAVEPOINT, 1, 1, "n")
    storage.files[PATHS.claim(number)] = claim_of(number, CheckpointKind.SAVEPOINT, folder)
    storage.files[PATHS.decision(number)] = encode_record(record)
    storage.files[f"{folder}/_metadata"] = encode_metadata(contents(checkpoint_id=number, job_id=JOB))
    storage.files[f"{folder}/source-0"] = b"a"


@pytest.fixture
def storage() -> DictStorage:
    return stored_job()


def stored_job() -> DictStorage:
    """A job with checkpoints 1, 2 and 4, the savepoint 3, and 5, which was aborted."""
    found = DictStorage()
    found.files["_holdfast"] = b"directory"
    found.files[PATHS.leader(1)] = encode_record(LeaderRecord(1, "n"))
    record = SubmissionRecord(1, 1, submission(GRAPH, job_id=JOB), None, 1, "n")
    found.files[PATHS.submission(1)] = encode_record(record)
    for number in (1, 2, 4):
        put_checkpoint(found, number)
    put_savepoint(found, 3)
    found.files[PATHS.claim(5)] = claim_of(5)
    found.files[PATHS.decision(5)] = encode_record(AbortRecord(5, FailureReason.EXPIRED, 1, "n"))
    return found


def copied(storage: DictStorage) -> DictStorage:
    other = DictStorage()
    other.files = dict(storage.files)
    return other


def ended(storage: DictStorage, state: str = "FINISHED") -> DictStorage:
    storage.files[PATHS.result(1)] = encode_record(ResultRecord(1, state, 1, "n", last_checkpoint_id=5, newest_completed=4))
    return storage


def effects(nonce: str = "leader", epoch: int = 1) -> StorageEffects:
    return StorageEffects(Identity(JOB, epoch, nonce, 1, GRAPH), lambda: 2_000)


def dropping(number: int, **more: Any) -> Flow[Any]:
    return effects().flow(DropCheckpoint(number, PATHS.checkpoint(number), **more))


def labels(storage: DictStorage) -> dict[str, int]:
    return {view.label: view.checkpoint_id for view in run_flow(read_labels(PATHS), storage).labels}


def is_whole(storage: DictStorage, number: int) -> bool:
    return {PATHS.claim(number), PATHS.decision(number), f"{PATHS.checkpoint(number)}/source-0"} <= set(storage.files)


def outcome(steps: Steps) -> Any:
    """What a flow gives, or its error."""
    try:
        return steps.run()
    except HoldfastError as error:
        return error


# ------------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["a", "before-upgrade", "v1.2_3", "0", "A" * 64])
def test_names_that_are_labels(name: str) -> None:
    assert check_label(name) == name


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "../x", "..", ".a", "-a", "_a", "<b>x</b>", "a\n", "a\0", "ü", "a" * 65, "label:x", "%2e", "a\\b"]
)
def test_names_that_are_none_change_nothing(storage: DictStorage, name: str) -> None:
    before = dict(storage.files)
    with pytest.raises(InvalidConfigError, match="a label has 1 to 64"):
        run_flow(add_label(PATHS, 1, name, mark()), storage)
    with pytest.raises(InvalidConfigError, match="a label has 1 to 64"):
        run_flow(remove_label(PATHS, name, mark()), storage)
    assert storage.files == before


@pytest.mark.parametrize(
    ("number", "why"), [(7, "there is no such checkpoint"), (5, "it was aborted"), (6, "not complete yet"), (8, "can't be read")]
)
def test_only_a_complete_snapshot_gets_a_label(storage: DictStorage, number: int, why: str) -> None:
    storage.files[PATHS.claim(6)] = claim_of(6)
    storage.files[PATHS.claim(8)], storage.files[PATHS.decision(8)] = claim_of(8), b"{"
    before = dict(storage.files)
    with pytest.raises(NotFoundError, match=why) as caught:
        run_flow(add_label(PATHS, number, "x", mark()), storage)
    assert caught.value.fields["checkpoint"] == number
    assert storage.files == before


def test_a_savepoint_that_was_deleted_gets_no_label(storage: DictStorage) -> None:
    run_flow(dispose_snapshot(SAVEPOINT, "d", 1_000), storage)
    with pytest.raises(NotFoundError, match="was deleted or moved"):
        run_flow(add_label(PATHS, 3, "x", mark()), storage)


# ----------------------------------------------------------------------------------------------------------- life of a label


def test_labels_are_listed_kept_and_removed(storage: DictStorage) -> None:
    view = run_flow(add_label(PATHS, 1, "before", mark()), storage)
    assert (view.label, view.checkpoint_id, view.folder, view.created_ms) == ("before", 1, PATHS.checkpoint(1), 1_000)
    run_flow(add_label(PATHS, 1, "audit", mark()), storage)
    run_flow(add_label(PATHS, 3, "kept", mark()), storage)
    assert labels(storage) == {"audit": 1, "before": 1, "kept": 3}
    assert run_flow(dropping(1), storage) == CheckpointKept(1)
    run_flow(remove_label(PATHS, "before", mark()), storage)
    assert run_flow(dropping(1), storage) == CheckpointKept(1), "one is left"
    run_flow(remove_label(PATHS, "audit", mark()), storage)
    assert run_flow(dropping(1), storage) == CheckpointDropped(1)
    assert not [path for path in storage.files if path.startswith(f"{PATHS.checkpoint(1)}/")]
    assert labels(storage) == {"kept": 3}
    with pytest.raises(NotFoundError, match="has no label 'before'; it has kept"):
        run_flow(remove_label(PATHS, "before", mark()), storage)
    with pytest.raises(NotFoundError, match="has no label 'kept': it is that of 3"):
        run_flow(remove_label(PATHS, "kept", mark(), 2), storage)


def test_giving_a_label_again_writes_nothing(storage: DictStorage) -> None:
    first = run_flow(add_label(PATHS, 1, "x", mark()), storage)
    before = dict(storage.files)
    assert run_flow(add_label(PATHS, 1, "x", Mark("other", 2_000)), storage).created_ms == first.created_ms
    assert storage.files == before


def test_each_label_keeps_the_time_at_which_it_was_given(storage: DictStorage) -> None:
    for label, now_ms in (("before-upgrade", 1_000), ("x2", 2_000), ("audit", 3_000)):
        run_flow(add_label(PATHS, 1, label, Mark("user", now_ms)), storage)
    run_flow(remove_label(PATHS, "audit", Mark("user", 4_000)), storage)
    given = {view.label: view.created_ms for view in run_flow(read_labels(PATHS), storage).labels}
    assert given == {"before-upgrade": 1_000, "x2": 2_000}


def test_labels_of_an_older_version_keep_the_time_of_its_last_change(storage: DictStorage) -> None:
    folder = PATHS.checkpoint(1)
    storage.files[PATHS.labelled(1)] = b"\n"
    content = {"number": 1, "labels": ["a", "b"], "nonce": "n", "folder": folder, "created_ms": 500, "version": 1}
    storage.files[label_path(folder, 1)] = msgspec.json.encode(content)
    run_flow(add_label(PATHS, 1, "x", mark()), storage)
    given = {view.label: view.created_ms for view in run_flow(read_labels(PATHS), storage).labels}
    assert given == {"a": 500, "b": 500, "x": 1_000}


def test_a_label_is_that_of_one_snapshot(storage: DictStorage) -> None:
    run_flow(add_label(PATHS, 1, "x", mark()), storage)
    with pytest.raises(SnapshotLabelledError, match="label 'x' is that of checkpoint 1"):
        run_flow(add_label(PATHS, 2, "x", mark()), storage)
    assert labels(storage) == {"x": 1}
    assert run_flow(dropping(2), storage) == CheckpointDropped(2)


def test_labels_of_a_deleted_checkpoint_are_forgotten_with_the_next_one(storage: DictStorage) -> None:
    run_flow(add_label(PATHS, 1, "x", mark()), storage)
    run_flow(remove_label(PATHS, "x", mark()), storage)
    run_flow(dropping(1), storage)
    assert PATHS.labelled(1) in storage.files
    run_flow(add_label(PATHS, 2, "x", mark()), storage)
    assert PATHS.labelled(1) not in storage.files
    assert labels(storage) == {"x": 2}


def test_labels_are_bounded(storage: DictStorage) -> None:
    for number in range(10, 10 + LABELS_MAX):
        put_checkpoint(storage, number)
    for index in range(LABELS_OF_ONE_MAX):
        run_flow(add_label(PATHS, 10, f"one-{index}", mark()), storage)
    with pytest.raises(InvalidConfigError, match="too many labels"):
        run_flow(add_label(PATHS, 10, "more", mark()), storage)
    for index in range(LABELS_OF_ONE_MAX, LABELS_MAX):
        run_flow(add_label(PATHS, 10 + index, f"x-{index}", mark()), storage)
    with pytest.raises(InvalidConfigError, match=f"has {LABELS_MAX} labels"):
        run_flow(add_label(PATHS, 11, "more", mark()), storage)
    for passing in ("forgetting0123456789abcdef", "drilling0123456789abcdef"):
        run_flow(add_label(PATHS, 11, passing, mark()), storage)
        run_flow(remove_label(PATHS, passing, mark()), storage)
    run_flow(remove_label(PATHS, "one-0", mark()), storage)
    run_flow(add_label(PATHS, 12, "drilling0123456789abcdef", mark()), storage)  # takes nobody's room
    run_flow(add_label(PATHS, 11, "more", mark()), storage)


def test_a_register_that_changed_too_often_can_still_be_emptied(storage: DictStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.coordinator.ownership.labels.RECORDS_MAX", 110)
    for _ in range(5):
        run_flow(add_label(PATHS, 1, "x", mark()), storage)
        run_flow(remove_label(PATHS, "x", mark()), storage)
    with pytest.raises(InvalidConfigError, match="changed them too often"):
        run_flow(add_label(PATHS, 1, "x", mark()), storage)
    assert run_flow(dropping(1), storage) == CheckpointDropped(1)


# ------------------------------------------------------------------------------------------------ against each other


def interleaved(
    first: Callable[[], Flow[Any]], second: Callable[[], Flow[Any]], storage: DictStorage, orders: int
) -> Iterator[tuple[Any, ...]]:
    """Storage and the outcomes of two flows, for so many orders of their operations."""
    for seed in range(orders):
        rng, shared = random.Random(seed), copied(storage)
        share = rng.uniform(0.15, 0.85)
        flows = [Steps(first(), shared), Steps(second(), shared)]
        results: list[Any] = [None, None]
        while None in results:
            turn = int(rng.random() < share)
            if results[turn] is not None:
                continue
            try:
                if not flows[turn].done:
                    flows[turn].step()
            except HoldfastError as error:
                results[turn] = error
            else:
                if flows[turn].done:
                    results[turn] = flows[turn].value if flows[turn].value is not None else "done"
        yield (shared, *results)


def test_a_label_and_a_drop_in_many_orders(storage: DictStorage) -> None:
    kept = refused = 0
    for shared, given, dropped in interleaved(lambda: add_label(PATHS, 1, "x", mark()), lambda: dropping(1), storage, 400):
        if isinstance(given, HoldfastError):
            refused += 1
            assert isinstance(given, SnapshotLabelledError | NotFoundError)
            assert dropped == CheckpointDropped(1)
            assert not [path for path in shared.files if path.startswith(f"{PATHS.checkpoint(1)}/")]
            assert labels(shared) == {}
        else:
            kept += 1
            assert dropped == CheckpointKept(1)
            assert is_whole(shared, 1)
            assert labels(shared) == {"x": 1}
    assert kept > 40
    assert refused > 40


def test_a_label_and_a_disposal_in_many_orders(storage: DictStorage) -> None:
    seen = set()
    for shared, given, disposed in interleaved(
        lambda: add_label(PATHS, 3, "x", mark()), lambda: dispose_snapshot(SAVEPOINT, "d", 1_000), storage, 300
    ):
        is_there = f"{SAVEPOINT}/_metadata" in shared.files
        assert isinstance(given, HoldfastError) is not isinstance(disposed, HoldfastError)
        assert is_there is isinstance(disposed, SnapshotLabelledError)
        assert labels(shared) == ({"x": 3} if is_there else {})
        seen.add(is_there)
    assert seen == {True, False}


def test_two_who_give_one_label_at_once_do_not_both_have_it(storage: DictStorage) -> None:
    for seed in range(150):
        rng, shared = random.Random(seed), copied(storage)
        flows = {number: Steps(add_label(PATHS, number, "x", mark(str(number))), shared) for number in (1, 2)}
        given: list[int] = []
        while flows:
            number = rng.choice(sorted(flows))
            try:
                flows[number].step()
            except SnapshotLabelledError:
                del flows[number]
            else:
                if flows[number].done:
                    given.append(number)
                    del flows[number]
        assert len(given) <= 1
        assert labels(shared) == ({"x": given[0]} if given else {})


def test_a_label_whose_giver_died_anywhere_is_there_or_is_not(storage: DictStorage) -> None:
    cuts = 0
    while True:
        shared = copied(storage)
        dead = Steps(add_label(PATHS, 1, "x", mark("dead")), shared)
        for _ in range(cuts):
            if dead.done:
                return
            dead.step()
        cuts += 1
        assert cuts < 60
        after_drop = copied(shared)
        told = run_flow(dropping(1), after_drop)
        assert told == (CheckpointKept(1) if labels(shared) else CheckpointDropped(1))
        run_flow(add_label(PATHS, 1, "x", mark("again")), shared)
        assert labels(shared) == {"x": 1}
        assert run_flow(dropping(1), shared) == CheckpointKept(1)


def test_a_drop_that_died_anywhere_is_ended_by_the_next_leader_and_takes_no_label(storage: DictStorage) -> None:
    cuts = 0
    while True:
        shared = copied(storage)
        dead = Steps(dropping(1), shared)
        for _ in range(cuts):
            if dead.done:
                return
            dead.step()
        cuts += 1
        assert cuts < 60
        given = outcome(Steps(add_label(PATHS, 1, "x", mark()), shared))
        told = run_flow(effects("next").flow(DropCheckpoint(1, PATHS.checkpoint(1))), shared)
        if isinstance(given, HoldfastError):
            assert told == CheckpointDropped(1)
            assert not [path for path in shared.files if path.startswith(f"{PATHS.checkpoint(1)}/")]
        else:
            assert told == CheckpointKept(1)
            assert is_whole(shared, 1)


@pytest.mark.parametrize("seed", seeds(40))
def test_labels_among_leaders_that_die_and_sleep(seed: int) -> None:
    """What was labelled by an answered call stays whole, with the files that it shares, under leaders killed between any two
    operations, zombies and increments, until it is taken back; then nothing is left behind."""
    world = LabelWorld(seed, retained_checkpoints=1 + seed % 2, max_concurrent_checkpoints=1 + seed % 2)
    for _ in range(4):
        for _ in range(25):
            live(world, world.random.choice([*world.leaders[-2:], world.leaders[-1]]), 5)
            world.use_labels()
        if world.random.random() < 0.5:
            world.leaders[-1].flows.clear()
        while not world.take_over(steps=world.random.choice([None, None, 8, 25])):
            pass
    while world.users:
        world.step_user()
    settle(world)
    assert world.labelled or world.taken_back or not world.given
    world.take_back_all()
    settle(world)
    world.take_over()
    while world.leaders[-1].flows:
        world.step_flow(world.leaders[-1])
    world.take_over()
    check_end(world)
    recorded = run_flow(read_job(PATHS), world.storage)
    assert len(world.storage.completed(JOB)) <= 1 + seed % 2, "what has no label any more is deleted"
    assert not [number for number, each in recorded.checkpoints.items() if each.claim is None]


class LabelWorld(SharedWorld):
    """Users who label checkpoints, step by step, beside the leaders."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.labelled: set[int] = set()
        """Ids whose label an answered call gave, and nobody began to take back."""
        self.taken_back = self.given = 0
        self.users: list[tuple[int, bool, Steps]] = []
        super().__init__(seed, **settings)

    def use_labels(self) -> None:
        chance = self.random.random()
        busy = {number for number, _, _ in self.users}  # what one adds and another removes at once may be either
        numbers, labelled = sorted({*self.storage.completed(JOB)} - busy), sorted(self.labelled - busy)
        if chance < 0.15 and numbers:
            number = self.random.choice(numbers)
            self.users.append((number, True, Steps(add_label(PATHS, number, f"l-{number}", self.mark()), self.storage)))
        elif chance < 0.2 and labelled:
            number = self.random.choice(labelled)
            self.labelled.discard(number)
            self.users.append((number, False, Steps(remove_label(PATHS, f"l-{number}", self.mark()), self.storage)))
        for _ in range(self.random.randrange(6)):
            self.step_user()
        if self.users and self.random.random() < 0.1:  # a user's process dies
            del self.users[self.random.randrange(len(self.users))]

    def mark(self) -> Mark:
        return Mark(f"{self.random.getrandbits(64):x}", self.now)

    def step_user(self) -> None:
        if not self.users:
            return
        user = self.random.choice(self.users)
        number, adds, steps = user
        try:
            if not steps.done:
                steps.step()
        except (SnapshotLabelledError, NotFoundError):
            self.users.remove(user)
        else:
            if steps.done:
                self.users.remove(user)
                self.given += adds
                self.taken_back += not adds
                if adds:
                    self.labelled.add(number)
                if self.random.random() < 0.7:
                    event = job_events.LabelNoted(number, f"l-{number}", removed=not adds, labelled=adds)
                    self.feed(self.leaders[-1], event)
        self.check()

    def take_back_all(self) -> None:
        """Also what users left who died behind their write."""
        self.labelled.clear()
        for view in run_flow(read_labels(PATHS), self.storage).labels:
            run_flow(remove_label(PATHS, view.label, self.mark(), view.checkpoint_id), self.storage)

    def check(self) -> None:
        super().check()
        lost = self.labelled.difference(self.storage.completed(JOB))
        assert not lost, f"labelled checkpoints {sorted(lost)} were deleted"


# ------------------------------------------------------------------------------------------- shared files, other deletions


def test_files_that_a_labelled_checkpoint_shares_stay_when_those_that_share_them_go(storage: DictStorage) -> None:
    shared = f"{PATHS.shared}/1-1-count-0-n-1.sst"
    storage.files[shared] = b"s"
    run_flow(add_label(PATHS, 1, "x", mark()), storage)
    assert run_flow(dropping(2, shared=("1-1-count-0-n-1.sst",), after=(1,)), storage) == CheckpointDropped(2)
    assert shared in storage.files
    assert is_whole(storage, 1)
    run_flow(remove_label(PATHS, "x", mark()), storage)
    assert run_flow(dropping(1, shared=("1-1-count-0-n-1.sst",)), storage) == CheckpointDropped(1)
    assert shared not in storage.files


def test_a_drop_begins_no_register_in_a_folder_that_is_gone(storage: DictStorage) -> None:
    shared = f"{PATHS.shared}/1-1-count-0-n-1.sst"
    storage.files[shared] = b"s"
    assert run_flow(dropping(1), storage) == CheckpointDropped(1)
    assert run_flow(dropping(2, shared=("1-1-count-0-n-1.sst",), after=(1,)), storage) == CheckpointDropped(2)
    assert not [path for path in storage.files if path.startswith((f"{PATHS.checkpoint(1)}/", f"{PATHS.checkpoint(2)}/"))]
    assert shared not in storage.files, "none of them is kept"


def test_an_ended_job_keeps_what_is_labelled_until_the_label_goes(storage: DictStorage) -> None:
    run_flow(add_label(PATHS, 2, "x", mark()), ended(storage))
    run_flow(clear_ended(JOB, Starter("a", "", "directory", 0)), storage)
    assert is_whole(storage, 2)
    assert [number for number in (1, 4) if is_whole(storage, number)] == []
    before = dict(storage.files)
    run_flow(clear_ended(JOB, Starter("b", "", "directory", 0)), storage)
    assert storage.files == before, "no leader is needed for what stays"
    run_flow(remove_label(PATHS, "x", mark()), storage)
    run_flow(clear_ended(JOB, Starter("c", "", "directory", 0)), storage)
    assert not is_whole(storage, 2)


def test_a_label_given_while_an_ended_job_is_cleared_holds_or_is_refused(storage: DictStorage) -> None:
    ended(storage)
    for seed in range(150):
        rng, shared = random.Random(seed), copied(storage)
        clearing = Steps(clear_ended(JOB, Starter("a", "", "directory", 0)), shared)
        giving = Steps(add_label(PATHS, 2, "x", mark()), shared)
        given: Any = None
        while not (clearing.done and given is not None):
            if rng.random() < 0.4 and given is None:
                try:
                    giving.step()
                except (SnapshotLabelledError, NotFoundError) as error:
                    given = error
                else:
                    given = giving.value if giving.done else None
            elif not clearing.done:
                clearing.step()
        assert is_whole(shared, 2) is not isinstance(given, HoldfastError)
        assert labels(shared) == ({} if isinstance(given, HoldfastError) else {"x": 2})


def test_a_claimed_savepoint_with_a_label_is_released_when_the_label_is_gone(storage: DictStorage) -> None:
    claim = run_flow(
        claim_snapshot(RestorePoint(3, SAVEPOINT, 1, explicit=True), OwnerRecord("cd" * 16, "directory", "c", 0, folder=SAVEPOINT)),
        storage,
    )
    run_flow(add_label(PATHS, 3, "x", mark()), storage)
    run_flow(release_snapshot(SAVEPOINT, claim, 2_000), storage)
    assert f"{SAVEPOINT}/_metadata" in storage.files
    assert not run_flow(holds_claim(SAVEPOINT, claim), storage), "its owner has nothing to do for it"
    run_flow(remove_label(PATHS, "x", mark()), storage)
    assert run_flow(holds_claim(SAVEPOINT, claim), storage)
    run_flow(release_snapshot(SAVEPOINT, claim, 2_000), storage)
    assert not [path for path in storage.files if path.startswith(SAVEPOINT)]


def test_a_disposal_names_the_label(storage: DictStorage) -> None:
    run_flow(add_label(PATHS, 3, "audit", mark()), storage)
    with pytest.raises(SnapshotLabelledError, match="kept by its label 'audit'") as caught:
        run_flow(dispose_snapshot(SAVEPOINT, "d", 1_000), storage)
    assert caught.value.labels == ["audit"]
    assert f"{SAVEPOINT}/_owner" not in storage.files


def test_the_labels_of_a_copied_folder_are_not_the_copys(storage: DictStorage) -> None:
    run_flow(add_label(PATHS, 3, "x", mark()), storage)
    copy = "/savepoints/copy"
    for path in [path for path in storage.files if path.startswith(f"{SAVEPOINT}/")]:
        storage.files[f"{copy}/{path.rpartition('/')[2]}"] = storage.files[path]
    run_flow(dispose_snapshot(copy, "d", 1_000), storage)
    assert not [path for path in storage.files if path.startswith(copy)]
    assert labels(storage) == {"x": 3}


# ---------------------------------------------------------------------------------------------------------- bad registers


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"number": 2, "labels": [], "nonce": "n", "folder": ""}',
        b'{"number": 1, "labels": ["../x"], "nonce": "n", "folder": ""}',
        b'{"number": 1, "labels": ["x"], "nonce": "n", "folder": "", "deleting": true}',
        b'{"number": 1, "labels": ["x"], "nonce": "n", "folder": "", "given_ms": [1, 2]}',
        b'{"number": 1, "labels": ' + b'["x' + b'","x'.join(b"%d" % n for n in range(30)) + b'"], "nonce": "n", "folder": ""}',
    ],
)
def test_a_register_that_cant_be_read_keeps_its_checkpoint(storage: DictStorage, content: bytes) -> None:
    storage.files[f"{PATHS.checkpoint(1)}/_label-1"] = content
    storage.files[PATHS.labelled(1)] = b"\n"
    told = run_flow(dropping(1), storage)
    assert isinstance(told, DropFailed)
    assert "_label-1" in told.message
    assert is_whole(storage, 1)
    found = run_flow(read_labels(PATHS), storage)
    assert found.labels == ()
    assert "_label-1" in found.damage[0]
    with pytest.raises(CorruptStateError, match="_label-1"):
        run_flow(add_label(PATHS, 1, "x", mark()), storage)
    run_flow(add_label(PATHS, 2, "y", mark()), storage)
    run_flow(clear_ended(JOB, Starter("a", "", "directory", 0)), ended(storage))
    assert is_whole(storage, 1)


def test_a_drop_whose_register_is_ambiguous_deletes_nothing(storage: DictStorage) -> None:
    class Unsure(DictStorage):
        def execute(self, operation: Any) -> Any:
            if isinstance(operation, PutIfAbsent) and "_label" in operation.path:
                raise AmbiguousWriteError("who knows", path=operation.path)
            return super().execute(operation)

    unsure = Unsure()
    unsure.files = storage.files
    assert isinstance(run_flow(dropping(1), unsure), DropFailed)
    assert is_whole(storage, 1)


# ---------------------------------------------------------------------------------------------------------- restore, fsck


def resolved(storage: DictStorage, restore: str) -> Any:
    job = run_flow(read_job(PATHS), storage)
    return run_flow(resolve_snapshot(job, submission(GRAPH, job_id=JOB, restore=restore)), storage).base


def test_restore_by_label(storage: DictStorage) -> None:
    run_flow(add_label(PATHS, 2, "x", mark()), storage)
    run_flow(add_label(PATHS, 3, "saved", mark()), storage)
    assert resolved(storage, "label:x").checkpoint_id == 2
    assert resolved(storage, "label:saved").folder == SAVEPOINT
    with pytest.raises(NotFoundError, match="has no label 'y'; it has saved, x"):
        resolved(storage, "label:y")
    with pytest.raises(InvalidConfigError, match="a label has 1 to 64"):
        resolved(storage, "label:../chk-1")


def test_an_ended_job_is_restored_from_what_it_keeps_for_a_label_alone(storage: DictStorage) -> None:
    run_flow(add_label(PATHS, 2, "x", mark()), ended(storage))
    assert resolved(storage, "label:x").checkpoint_id == resolved(storage, "2").checkpoint_id == 2
    with pytest.raises(NotFoundError):
        resolved(storage, "1")


def test_one_label_on_two_checkpoints_is_refused_until_one_is_removed(storage: DictStorage) -> None:
    """Both givers died behind their writes."""
    for number in (1, 2):
        storage.files[PATHS.labelled(number)] = b"\n"
        record = LabelRecord(1, ("x",), "n", PATHS.checkpoint(number))
        storage.files[f"{PATHS.checkpoint(number)}/_label-1"] = encode_record(record)
    with pytest.raises(InvalidConfigError, match="is that of checkpoints 1, 2"):
        resolved(storage, "label:x")
    run_flow(remove_label(PATHS, "x", mark(), 1), storage)
    assert resolved(storage, "label:x").checkpoint_id == 2


def test_fsck_knows_whose_the_files_of_labels_are(storage: DictStorage) -> None:
    run_flow(add_label(PATHS, 1, "x", mark()), storage)
    storage.files[PATHS.labelled(99)] = b"\n"
    storage.files = {path: content for path, content in storage.files.items() if path.startswith(f"{JOB}/")}
    report = run_flow(check_directory(FsckRequest(safety_age_ms=1), "memory", 1_000_000), storage)
    assert [each.path for each in report.orphans if "label" in each.path] == [PATHS.labelled(99)]
    assert not [each for each in report.unknown if "label" in each.path]
    assert all(each.status is FileStatus.ORPHAN for each in report.orphans)


def test_what_a_drill_leaves_behind_a_deleted_checkpoint_is_no_orphan_and_goes_with_the_next_label(storage: DictStorage) -> None:
    """A checkpoint that was drilled, and that retention deleted since."""
    drilled = f"drilling{'0f' * 8}"
    run_flow(add_label(PATHS, 1, drilled, mark()), storage)
    run_flow(remove_label(PATHS, drilled, mark()), storage)
    assert run_flow(begin_deletion(PATHS.checkpoint(1), mark("leader")), storage) == ()
    run_flow(drop_checkpoint(PATHS, 1), storage)
    assert PATHS.labelled(1) in storage.files
    report = run_flow(check_directory(FsckRequest(job_id=JOB, safety_age_ms=1), "memory", 1_000_000), storage)
    assert [each.path for each in report.orphans if "label" in each.path] == []
    assert not [each for each in report.unknown if "label" in each.path]
    run_flow(add_label(PATHS, 2, drilled, mark()), storage)
    assert PATHS.labelled(1) not in storage.files


def test_begin_deletion_is_repeated_by_whoever_comes_next(storage: DictStorage) -> None:
    folder = PATHS.checkpoint(1)
    assert run_flow(begin_deletion(folder, mark("a")), storage) == ()
    assert run_flow(begin_deletion(folder, mark("b")), storage) == ()
    with pytest.raises(SnapshotLabelledError, match="its deletion has begun"):
        run_flow(add_label(PATHS, 1, "x", mark()), storage)


@pytest.mark.parametrize("changes", [1, 3, 4, 5, 8, 9, 31, 450])
def test_a_register_of_many_changes_is_read_by_halves(storage: DictStorage, changes: int) -> None:
    """Whoever reads it finds the last record, and reads few of those before it."""
    folder = PATHS.checkpoint(1)
    storage.files[PATHS.labelled(1)] = b"\n"
    for number in range(1, 2 * changes):
        kept = ("x",) if number % 2 else ()
        storage.files[label_path(folder, number)] = encode_record(LabelRecord(number, kept, "user", folder, created_ms=number))
    newest = run_flow(read_register(folder), storage)
    assert newest is not None
    assert newest.number == 2 * changes - 1
    for flow in (lambda: read_register(folder), lambda: begin_deletion(folder, mark("leader"))):
        steps = Steps(flow(), storage)
        count = 0
        while not steps.done:
            steps.step()
            count += 1
        assert count <= 25
        assert isinstance(steps.value, LabelRecord) or steps.value == ("x",)
    run_flow(remove_label(PATHS, "x", mark()), storage)
    assert run_flow(begin_deletion(folder, mark("leader")), storage) == ()
    last = run_flow(read_register(folder), storage)
    assert last is not None
    assert (last.number, last.deleting) == (2 * changes + 1, True)
