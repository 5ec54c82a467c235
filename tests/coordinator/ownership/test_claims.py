"""Who owns a snapshot that a job was started from (R15, R16, J17, J18, I25, I29): claimed by conditional creates alone, deleted
once it is subsumed, whoever dies when; never touched otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

from holdfast.barriers.jobgraph import ClaimMode, Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.dispatcher.submit import Starter, clear_ended, preflight, resume_submission, start_submission
from holdfast.coordinator.ha.recorded_job import CheckpointFact, derive_latest
from holdfast.coordinator.ha.records import (
    ClaimRecord,
    OwnerRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    VoidRecord,
    decode_record,
    encode_record,
)
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.jobmaster.releases import Release
from holdfast.coordinator.ownership.claims import (
    STARTING_MS_MAX,
    claim_snapshot,
    derive_releases,
    dispose_snapshot,
    find_owner,
    newest_kept,
    release_snapshot,
)
from holdfast.statebackends.errors import (
    CorruptStateError,
    FencedError,
    HoldfastError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    ObjectMissingError,
    RestoreError,
    SnapshotClaimedError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import FileHandle, OperatorListHandle, OperatorSubtaskState
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import Flow, Operation, StatFile, run_flow
from tests.coordinator.doubles import OFFSETS, submission, word_count
from tests.coordinator.test_crashes import live, settle
from tests.coordinator.test_restore import snapshot, stored
from tests.coordinator.world import JOB, DictStorage, Steps, World

OTHER = "cd" * 16
SAVEPOINT = "/savepoints/savepoint-7"
NEIGHBOUR = "/savepoints/savepoint-8/_metadata"
ENTRIES = msgspec.msgpack.encode([b"a"])
CLAIM = {"restore": SAVEPOINT, "claim_mode": ClaimMode.CLAIM}


def contents(**changes: Any) -> SnapshotMetadata:
    """Source state of two subtasks, in files."""
    subtasks = tuple(
        OperatorSubtaskState(
            operator=(OperatorListHandle(OFFSETS, FileHandle(f"source-{index}", len(ENTRIES), checksum_of(ENTRIES)), 1),)
        )
        for index in range(2)
    )
    return snapshot(stored("source", subtasks), **changes)


def put_snapshot(storage: DictStorage, folder: str, **changes: Any) -> dict[str, bytes]:
    files = {f"{folder}/source-{index}": ENTRIES for index in range(2)}
    files[f"{folder}/_metadata"] = encode_metadata(contents(**changes))
    storage.files.update(files)
    return files


@pytest.fixture
def storage() -> DictStorage:
    found = DictStorage()
    found.files["_holdfast"] = b"directory"
    put_snapshot(found, SAVEPOINT)
    found.files[NEIGHBOUR] = b"another one"
    return found


def asked(job_id: str = JOB, **options: Any) -> Submission:
    return submission(word_count(), job_id=job_id, **options)


def starter(name: str = "s", directory: str = "directory") -> Starter:
    return Starter(name, "", directory, 0)


def in_folder(storage: DictStorage, folder: str = SAVEPOINT) -> list[str]:
    return sorted(path.removeprefix(f"{folder}/") for path in storage.files if path.startswith(f"{folder}/"))


def start(storage: DictStorage, job_id: str = JOB, name: str = "s", **options: Any) -> JobSetup:
    return run_flow(start_submission(job_id, asked(job_id, **options), starter(name)), storage)


def kill_at_each(storage: DictStorage, flow: Callable[[], Flow[Any]]) -> Iterator[tuple[int, DictStorage]]:
    """A copy of the storage for each operation that the flow is killed before."""
    for cut in range(500):
        copied = DictStorage()
        copied.files = dict(storage.files)
        steps = Steps(flow(), copied)
        for _ in range(cut):
            if steps.done:
                return
            steps.step()
        yield cut, copied
    raise AssertionError("the flow does not end")


# ------------------------------------------------------------------------------------------------------------------- claim


def test_no_claim_is_the_default_and_writes_nothing_into_the_snapshot(storage: DictStorage) -> None:
    before = {path: content for path, content in storage.files.items() if path.startswith("/")}
    setup = start(storage, restore=SAVEPOINT)
    assert setup.base is not None
    assert setup.base.claim == ""
    assert {path: content for path, content in storage.files.items() if path.startswith("/")} == before


def test_claim_writes_one_record_beside_the_snapshot_and_names_it_in_the_submission(storage: DictStorage) -> None:
    setup = start(storage, **CLAIM)
    owner = run_flow(find_owner(SAVEPOINT), storage)
    assert owner is not None
    assert setup.base is not None
    assert (owner.job_id, owner.directory, owner.nonce) == (JOB, "directory", setup.base.claim)
    assert in_folder(storage) == ["_metadata", "_owner", "source-0", "source-1"]


def test_r15_a_second_job_that_claims_is_refused_and_changes_nothing(storage: DictStorage) -> None:
    start(storage, **CLAIM)
    files = dict(storage.files)
    with pytest.raises(SnapshotClaimedError, match=f"was claimed by job {JOB}") as caught:
        run_flow(_judged(OTHER, **CLAIM), storage)
    assert (caught.value.owner, caught.value.path) == (JOB, SAVEPOINT)
    assert storage.files == files
    report = run_flow(preflight(OTHER, asked(OTHER, restore=SAVEPOINT)), storage)
    assert report.fits, "who claims nothing may start from it"
    assert [note for note in report.notes if JOB in note] == [f"job {JOB} owns the snapshot: it may be gone before it is restored"]


def _judged(job_id: str, **options: Any) -> Flow[None]:
    (yield from preflight(job_id, asked(job_id, **options))).check()


def test_the_same_job_id_in_another_state_directory_is_another_job(storage: DictStorage) -> None:
    run_flow(claim_snapshot(RestorePoint(7, SAVEPOINT, 1, explicit=True), OwnerRecord(JOB, "elsewhere", "n")), storage)
    storage.files["_holdfast"] = b"directory"
    with pytest.raises(SnapshotClaimedError):
        start(storage, **CLAIM)


@pytest.mark.parametrize("seed", range(40))
def test_of_two_jobs_that_claim_at_once_exactly_one_wins(storage: DictStorage, seed: int) -> None:
    rng = random.Random(seed)
    racing = {each: Steps(start_submission(each, asked(each, **CLAIM), starter(each)), storage) for each in (JOB, OTHER)}
    won: list[str] = []
    lost: list[str] = []
    while racing:
        name = rng.choice(sorted(racing))
        try:
            racing[name].step()
        except SnapshotClaimedError:
            del racing[name]
            lost.append(name)
        else:
            if racing[name].done:
                won.append(name)
                del racing[name]
    assert (len(won), len(lost)) == (1, 1)
    owner = run_flow(find_owner(SAVEPOINT), storage)
    assert owner is not None
    assert owner.job_id == won[0]


def test_i29_a_claim_that_was_cut_off_anywhere_is_taken_up_again(storage: DictStorage) -> None:
    cuts = 0
    for cut, left in kill_at_each(storage, lambda: start_submission(JOB, asked(**CLAIM), starter("dead"))):
        setup = start(left, name="next", **CLAIM)
        owner = run_flow(find_owner(SAVEPOINT), left)
        assert owner is not None
        assert setup.base is not None
        assert owner.nonce == setup.base.claim, f"killed before operation {cut}"
        assert in_folder(left) == ["_metadata", "_owner", "source-0", "source-1"]
        cuts = cut
    assert cuts > 10


def test_latest_goes_on_from_a_claimed_base_and_still_owns_it(storage: DictStorage) -> None:
    first = start(storage, **CLAIM)
    second = start(storage, name="t", restore="latest")
    assert second.base == first.base
    assert (second.submission, derive_releases(run_flow(read_job(JobPaths(JOB)), storage))) == (2, ())


@pytest.mark.parametrize("restore", [None, "latest", "7"])
def test_claim_is_for_a_path(storage: DictStorage, restore: str | None) -> None:
    with pytest.raises(InvalidConfigError, match="claim_mode=CLAIM is for restore=PATH"):
        start(storage, restore=restore, claim_mode=ClaimMode.CLAIM)


def test_a_snapshot_that_was_deleted_just_before_is_not_claimed(storage: DictStorage) -> None:
    flow = claim_snapshot(RestorePoint(7, SAVEPOINT, 1, explicit=True), OwnerRecord(JOB, "directory", "n"))
    storage.files = {NEIGHBOUR: b"another one"}
    with pytest.raises(CorruptStateError, match="the snapshot was deleted"):
        run_flow(flow, storage)
    assert list(storage.files) == [NEIGHBOUR]


def test_an_owner_record_that_can_not_be_read_is_refused_for_a_claim_and_noted_otherwise(storage: DictStorage) -> None:
    storage.files[f"{SAVEPOINT}/_owner"] = b"{"
    with pytest.raises(CorruptStateError, match="_owner can't be decoded"):
        start(storage, **CLAIM)
    report = run_flow(preflight(JOB, asked(restore=SAVEPOINT)), storage)
    assert report.fits
    assert any("_owner can't be decoded" in note for note in report.notes)


# ----------------------------------------------------------------------------------------------------------------- release


def claimed_world(seed: int, storage: DictStorage, **settings: Any) -> World:
    return World(seed, storage=storage, asked=CLAIM, **settings)


def run_until(world: World, condition: Callable[[], bool]) -> None:
    leader = world.leaders[-1]
    for worker in world.workers:
        world.register(leader, worker)
    for _ in range(4000):
        if condition():
            return
        world.step_flow(leader) if leader.flows else world.pass_time(leader, 5)
    raise AssertionError("it does not come about")


@pytest.mark.parametrize("retained", [1, 3])
def test_r15_the_original_is_deleted_when_it_is_subsumed_and_not_before(storage: DictStorage, retained: int) -> None:
    world = claimed_world(1, storage, retained_checkpoints=retained)
    seen: list[int] = []

    def gone() -> bool:
        completed = len(world.storage.completed(JOB))
        if in_folder(storage):
            seen.append(completed)
        return not in_folder(storage)

    run_until(world, gone)
    assert max(seen) <= retained + 1
    assert len(world.storage.completed(JOB)) >= retained
    assert f"{SAVEPOINT}/_metadata" not in storage.files
    assert storage.files[NEIGHBOUR] == b"another one", "nothing beside it"


def test_i25_without_a_claim_the_original_stays_as_it_was(storage: DictStorage) -> None:
    before = {path: content for path, content in storage.files.items() if path.startswith("/")}
    world = World(1, storage=storage, asked={"restore": SAVEPOINT})
    run_until(world, lambda: max(storage.completed(JOB), default=0) > 12)
    assert {path: content for path, content in storage.files.items() if path.startswith("/")} == before


def test_i29_a_deletion_that_was_cut_off_anywhere_is_ended_by_the_next_leader(storage: DictStorage) -> None:
    setup = start(storage, **CLAIM)
    assert setup.base is not None
    claim = setup.base.claim
    for cut, left in kill_at_each(storage, lambda: release_snapshot(SAVEPOINT, claim)):
        rest = in_folder(left)
        assert "_owner" in rest or not rest, f"killed before operation {cut}: what is left is owned"
        assert "_metadata" in rest or cut > 0
        run_flow(release_snapshot(SAVEPOINT, claim), left)
        assert in_folder(left) == []
        run_flow(release_snapshot(SAVEPOINT, claim), left)
        assert left.files[NEIGHBOUR] == b"another one"


def test_what_was_put_back_in_its_place_is_nobodys_to_delete(storage: DictStorage) -> None:
    setup = start(storage, **CLAIM)
    assert setup.base is not None
    run_flow(release_snapshot(SAVEPOINT, setup.base.claim), storage)
    put_snapshot(storage, SAVEPOINT)
    run_flow(release_snapshot(SAVEPOINT, setup.base.claim), storage)
    assert in_folder(storage) == ["_metadata", "source-0", "source-1"]
    again = start(storage, OTHER, name="o", **CLAIM)
    assert again.base is not None
    run_flow(release_snapshot(SAVEPOINT, setup.base.claim), storage)
    assert "_metadata" in in_folder(storage), "another claim, another owner"


@pytest.mark.parametrize("seed", range(40))
def test_leaders_killed_anywhere_delete_the_claimed_snapshot_in_the_end_and_never_while_it_is_needed(seed: int) -> None:
    storage = DictStorage()
    put_snapshot(storage, SAVEPOINT)
    world = claimed_world(seed, storage, retained_checkpoints=1 + seed % 2)
    for _ in range(4):
        live(world, world.leaders[-1], world.random.randint(1, 90))
        if not storage.completed(JOB) and f"{SAVEPOINT}/_metadata" not in storage.files:
            raise AssertionError("deleted while nothing else can be restored")
        world.leaders[-1].flows.clear()
        while not world.take_over(steps=world.random.choice([None, None, 3, 8, 15, 25])):
            pass
    settle(world)
    for _ in range(400):
        if not in_folder(storage):
            break
        world.step_flow(world.leaders[-1]) if world.leaders[-1].flows else world.pass_time(world.leaders[-1], 5)
    assert in_folder(storage) == []
    recorded = run_flow(read_job(JobPaths(JOB)), storage)
    assert [point.folder for point in derive_releases(recorded)] == [SAVEPOINT]


@pytest.mark.parametrize("seed", range(20))
def test_zombies_of_the_claiming_submission_delete_nothing_that_is_needed(seed: int) -> None:
    storage = DictStorage()
    put_snapshot(storage, SAVEPOINT)
    world = claimed_world(seed, storage)
    for _ in range(3):
        live(world, world.leaders[-1], world.random.randint(10, 80))
        zombies = list(world.leaders)
        world.take_over()
        for _ in range(40):
            live(world, world.random.choice([*zombies, world.leaders[-1]]), 2)
            assert storage.completed(JOB) or f"{SAVEPOINT}/_metadata" in storage.files


def test_storage_that_fails_is_tried_again_and_then_left_to_the_next_recovery(storage: DictStorage) -> None:
    world = claimed_world(1, storage)
    run_until(world, lambda: bool(world.leaders[-1].master.releases.base is None))
    leader = world.leaders[-1]
    leader.flows.clear()
    release = Release(SAVEPOINT, world.leaders[-1].master.setup.base.claim)  # type: ignore[union-attr]
    for tries in range(1, 4):
        world.feed(leader, job_events.ReleaseEnded(release, "disk full"))
        assert (leader.master.releases.next_deadline_ms() is None) == (tries == 3)
        world.pass_time(leader, 5_000)
    leader.flows.clear()
    assert in_folder(storage)
    assert world.take_over()
    while world.leaders[-1].flows:
        world.step_flow(world.leaders[-1])
    assert in_folder(storage) == []


def ended(storage: DictStorage, state: str, *, completed: bool = True, **settings: Any) -> None:
    """A job that claimed, perhaps has a checkpoint of its own, and is over; its last leader died before it deleted anything."""
    setup = run_flow(start_submission(JOB, submission(word_count(**settings), job_id=JOB, **CLAIM), starter()), storage)
    number = setup.first_checkpoint_id
    if completed:
        put_checkpoint(storage, JOB, number)
    result = ResultRecord(1, state, 1, "n", last_checkpoint_id=number, newest_completed=number if completed else 0)
    storage.files[JobPaths(JOB).result(1)] = encode_record(result)


def put_checkpoint(storage: DictStorage, job_id: str, number: int, **changes: Any) -> None:
    paths = JobPaths(job_id)
    claim = ClaimRecord(number, 1, 1, 1, CheckpointKind.CHECKPOINT, paths.checkpoint(number), "n")
    storage.files[paths.claim(number)] = encode_record(claim)
    put_snapshot(storage, paths.checkpoint(number), kind="checkpoint", job_id=job_id, checkpoint_id=number, **changes)


@pytest.mark.parametrize(
    ("state", "completed", "retention", "stays"),
    [
        ("FINISHED", True, "delete", False),
        ("CANCELED", True, "delete", False),
        ("CANCELED", True, "retain", False),
        ("FAILED", True, "delete", False),
        ("CANCELED", False, "delete", True),
        ("FAILED", False, "delete", True),
    ],
)
def test_what_the_end_of_a_job_left_is_deleted_by_the_next_recovery(
    storage: DictStorage, state: str, completed: bool, retention: str, stays: bool
) -> None:
    ended(storage, state, completed=completed, retention_on_cancel=retention)
    run_flow(clear_ended(JOB, starter("next")), storage)
    assert bool(in_folder(storage)) == stays, "the only snapshot of a job is never deleted"
    epochs = [path for path in storage.files if "/leader/" in path]
    run_flow(clear_ended(JOB, starter("next")), storage)
    assert [path for path in storage.files if "/leader/" in path] == epochs, "nothing to do, nothing written"


def test_a_claimed_snapshot_stays_while_the_checkpoint_that_replaces_it_can_not_be_read(storage: DictStorage) -> None:
    ended(storage, "FAILED")
    path = JobPaths(JOB).decision(8)
    storage.files[path] = storage.files[path][:-5]
    run_flow(clear_ended(JOB, starter("next")), storage)
    assert in_folder(storage) == ["_metadata", "_owner", "source-0", "source-1"]
    setup = start(storage, name="t", restore="latest-readable", allow_output_repeat=True)
    assert setup.base is not None
    assert (setup.base.folder, setup.base.claim) == (SAVEPOINT, "s")


def test_a_subsumed_snapshot_is_not_gone_on_from_though_it_is_still_there(storage: DictStorage) -> None:
    ended(storage, "FAILED")
    for mode in ClaimMode:
        with pytest.raises(SnapshotClaimedError, match="it is being deleted"):
            start(storage, name="t", restore=SAVEPOINT, claim_mode=mode, allow_output_repeat=True)
    assert start(storage, name="t", restore="latest").base is not None


def test_a_claim_that_nothing_subsumed_is_taken_up_by_the_next_submission(storage: DictStorage) -> None:
    ended(storage, "FAILED", completed=False)
    setup = start(storage, name="t", **CLAIM)
    assert setup.base is not None
    assert setup.base.claim == "s", "the record of the first one stands"


# ---------------------------------------------------------------------------------------------------- R16: no claim, gone


def test_r16_the_original_is_needed_until_the_first_checkpoint_and_its_absence_is_explained(storage: DictStorage) -> None:
    world = World(2, storage=storage, asked={"restore": SAVEPOINT})
    del storage.files[f"{SAVEPOINT}/_metadata"]
    leader = world.leaders[-1]
    while leader.flows:
        world.step_flow(leader)
    cause = leader.master.lifecycle.failure or ""
    assert f"{SAVEPOINT}/_metadata does not exist" in cause
    assert "has no completed checkpoint of its own yet: until then it needs that snapshot" in cause


def test_r16_a_crash_before_the_first_checkpoint_restores_from_the_original_again(storage: DictStorage) -> None:
    world = World(3, storage=storage, asked={"restore": SAVEPOINT})
    run_until(world, lambda: bool(world.workers[0].attempt))
    for worker in range(2):
        world.kill_worker(world.leaders[-1], worker)
    run_until(world, lambda: world.workers[0].attempt >= 2 and world.workers[1].attempt >= 2)
    assert world.deployed[max(world.deployed)] == 7
    run_until(world, lambda: bool(storage.completed(JOB)))
    for path in [path for path in storage.files if path.startswith(SAVEPOINT)]:
        del storage.files[path]
    world.kill_worker(world.leaders[-1], 0)
    attempt = max(world.deployed)
    run_until(world, lambda: max(world.deployed) > attempt)
    assert world.deployed[max(world.deployed)] > 7, "from its own checkpoint"


def test_j18_the_first_checkpoint_names_no_file_of_the_original(storage: DictStorage) -> None:
    world = World(4, storage=storage, asked={"restore": SAVEPOINT})
    run_until(world, lambda: bool(storage.completed(JOB)))
    for folder in storage.completed(JOB).values():
        text = storage.files[f"{folder}/_metadata"].decode()
        assert "savepoint-7" not in text
        assert '"../' not in text


# ------------------------------------------------------------------------------------------------ another job's checkpoints

STATE = "/other"
RETAINED = f"{STATE}/{OTHER}/chk-9"
TAKE = {"restore": RETAINED, "claim_mode": ClaimMode.CLAIM}


def put_job(storage: DictStorage, *, numbers: tuple[int, ...] = (9,), state: str = "CANCELED", **settings: Any) -> None:
    """Another job in a state directory of its own, which has ended and retains checkpoints."""
    inner = DictStorage()
    settings = {"retention_on_cancel": "retain", "retained_checkpoints": 2, **settings}
    record = SubmissionRecord(1, 1, submission(word_count(**settings), job_id=OTHER), None, 1, "n")
    inner.files[JobPaths(OTHER).submission(1)] = encode_record(record)
    inner.files[JobPaths(OTHER).leader(1)] = b"{}"
    for number in numbers:
        put_checkpoint(inner, OTHER, number)
    if state:
        result = ResultRecord(1, state, 1, "n", last_checkpoint_id=max(numbers), newest_completed=max(numbers))
        inner.files[JobPaths(OTHER).result(1)] = encode_record(result)
    inner.files["_holdfast"] = b"other directory"
    storage.files["_holdfast"] = b"directory"
    storage.files.update({f"{STATE}/{path}": content for path, content in inner.files.items()})


class Below:
    """The other state directory, as its own coordinator sees it."""

    def __init__(self, storage: DictStorage) -> None:
        self._storage = storage
        self.root = STATE

    def execute(self, operation: Any) -> Any:
        from holdfast.coordinator.ha.snapshots import _move

        result = self._storage.execute(cast(Operation, _move(operation, STATE)))
        return [path.removeprefix(f"{STATE}/") for path in result] if isinstance(result, list) else result


def test_a_retained_checkpoint_is_claimed_in_the_records_of_its_job_and_that_job_goes_on_without_it() -> None:
    storage = DictStorage()
    put_job(storage, numbers=(8, 9))
    setup = start(storage, **TAKE)
    assert setup.base is not None
    void = decode_record(VoidRecord, storage.files[f"{STATE}/{OTHER}/submissions/2.json"], "2.json")
    assert (void.given, void.owner and void.owner.job_id, void.owner and void.owner.nonce) == (9, JOB, setup.base.claim)
    assert f"{RETAINED}/_owner" not in storage.files, "its folder stays as its job made it"
    recorded = run_flow(read_job(JobPaths(OTHER)), Below(storage))  # type: ignore[arg-type]
    assert recorded.checkpoints[9].fact is CheckpointFact.CLAIMED
    for restore in ("latest", "9"):
        with pytest.raises(SnapshotClaimedError, match=f"checkpoint 9 was claimed by job {JOB}"):
            run_flow(_judged(OTHER, restore=restore), Below(storage))  # type: ignore[arg-type]
    run_flow(release_snapshot(RETAINED, setup.base.claim), storage)
    assert not in_folder(storage, RETAINED)
    assert in_folder(storage, f"{STATE}/{OTHER}/chk-8"), "nothing but its folder"
    run_flow(release_snapshot(RETAINED, setup.base.claim), storage)
    older = run_flow(
        start_submission(OTHER, asked(OTHER, restore="8", allow_output_repeat=True), starter("o", "other directory")),
        Below(storage),  # type: ignore[arg-type]
    )
    assert (older.submission, older.first_checkpoint_id) == (3, 11), "no id is used twice: 10 fences the older leader"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": ""}, "its job is running and owns it"),
        ({"numbers": (9, 10, 11)}, "its job does not retain it"),
        ({"retention_on_cancel": "delete"}, "its job does not retain it"),
        ({"state": "FINISHED"}, "its job does not retain it"),
    ],
)
def test_a_checkpoint_that_its_job_may_delete_is_not_given(changes: dict[str, Any], reason: str) -> None:
    storage = DictStorage()
    put_job(storage, **changes)
    files = {path for path in storage.files if path.startswith(STATE)}
    with pytest.raises(SnapshotClaimedError, match=reason):
        start(storage, **TAKE)
    assert {path for path in storage.files if path.startswith(STATE)} == files


def test_the_final_checkpoint_that_a_finished_job_retains_is_given_and_gone_on_from() -> None:
    storage = DictStorage()
    put_job(storage, state="FINISHED", retention_on_cancel="delete", retain_on_finish=True)
    below = Below(storage)
    run_flow(clear_ended(OTHER, starter("o", "other directory")), below)  # type: ignore[arg-type]
    assert in_folder(storage, RETAINED) == ["_claim", "_metadata", "source-0", "source-1"]
    with pytest.raises(JobExistsError, match=r"has ended \(FINISHED\). Give restore='latest'"):
        run_flow(_judged(OTHER), below)  # type: ignore[arg-type]
    run_flow(_judged(OTHER, restore="latest"), below)  # type: ignore[arg-type]
    setup = start(storage, **TAKE)
    assert setup.base is not None
    assert (setup.base.folder, bool(setup.base.claim)) == (RETAINED, True)


def test_a_checkpoint_that_shares_files_is_not_given() -> None:
    storage = DictStorage()
    put_job(storage)
    shared = msgspec.structs.replace(contents(kind="checkpoint", job_id=OTHER, checkpoint_id=9))
    part = FileHandle("../shared/9-1-source-0-x", len(ENTRIES), checksum_of(ENTRIES))
    subtask = OperatorSubtaskState(operator=(OperatorListHandle(OFFSETS, part, 1),))
    operators = (stored("source", (subtask, OperatorSubtaskState())),)
    storage.files[f"{RETAINED}/_metadata"] = encode_metadata(msgspec.structs.replace(shared, operators=operators))
    storage.files[f"{STATE}/{OTHER}/shared/9-1-source-0-x"] = ENTRIES
    with pytest.raises(SnapshotClaimedError, match="shares files with other checkpoints"):
        start(storage, **TAKE)
    assert start(storage, restore=RETAINED).base is not None


def test_a_checkpoint_of_this_very_job_is_its_own_by_whatever_name() -> None:
    storage = DictStorage()
    put_job(storage)
    storage.files["_holdfast"] = b"other directory"
    with pytest.raises(InvalidConfigError, match="which owns it: restore='9'"):
        run_flow(_judged(OTHER, **TAKE), storage)


@pytest.mark.parametrize("seed", range(60))
def test_a_claim_and_a_start_of_the_job_that_it_takes_from_never_both_succeed(seed: int) -> None:
    storage = DictStorage()
    put_job(storage)
    rng = random.Random(seed)
    below = Below(storage)
    racing = {
        "claim": Steps(start_submission(JOB, asked(**TAKE), starter("c")), storage),
        "start": Steps(start_submission(OTHER, asked(OTHER, restore="latest"), starter("o", "other directory")), below),
    }
    outcomes: dict[str, HoldfastError | None] = {}
    while racing:
        name = rng.choice(sorted(racing))
        try:
            racing[name].step()
        except (SnapshotClaimedError, FencedError) as error:
            outcomes[name] = error
            del racing[name]
        else:
            if racing[name].done:
                outcomes[name] = None
                del racing[name]
    assert None in outcomes.values()
    assert isinstance(outcomes["claim"], SnapshotClaimedError) or outcomes["start"] is not None, outcomes


def test_i29_a_claim_of_a_checkpoint_that_was_cut_off_anywhere_is_taken_up_again() -> None:
    storage = DictStorage()
    put_job(storage)
    for cut, left in kill_at_each(storage, lambda: start_submission(JOB, asked(**TAKE), starter("dead"))):
        setup = start(left, name="next", **TAKE)
        assert setup.base is not None
        recorded = run_flow(read_job(JobPaths(OTHER)), Below(left))  # type: ignore[arg-type]
        assert recorded.given[9].nonce == setup.base.claim, f"killed before operation {cut}"
        assert len([path for path in left.files if path.startswith(f"{STATE}/{OTHER}/submissions/")]) == 2


def test_a_folder_called_like_a_checkpoint_without_its_job_is_claimed_like_a_savepoint() -> None:
    storage = DictStorage()
    put_snapshot(storage, RETAINED, kind="checkpoint", job_id=OTHER, checkpoint_id=9)
    setup = start(storage, **TAKE)
    assert setup.base is not None
    assert f"{RETAINED}/_owner" in storage.files
    run_flow(release_snapshot(RETAINED, setup.base.claim), storage)
    assert in_folder(storage, RETAINED) == []


def test_i29_a_checkpoint_by_another_name_is_nobodys_to_take(storage: DictStorage) -> None:
    """A link to the folder of a job's checkpoint: its job does not look for an `_owner` in there, and goes on from it."""
    for folder in ("/links/newest", f"/elsewhere/{OTHER}/chk-9"):
        put_snapshot(storage, folder, kind="checkpoint", job_id=OTHER, checkpoint_id=9)
        storage.files[f"{folder}/_claim"] = encode_record(ClaimRecord(9, 1, 1, 1, CheckpointKind.CHECKPOINT, f"{OTHER}/chk-9", "n"))
        before = dict(storage.files)
        asked_for = asked(restore=folder, claim_mode=ClaimMode.CLAIM)
        report = run_flow(preflight(JOB, asked_for), storage)
        assert [refusal.kind for refusal in report.refusals] == ["SnapshotClaimedError"]
        with pytest.raises(SnapshotClaimedError, match="by another name"):
            run_flow(claim_snapshot(RestorePoint(9, folder, 1, explicit=True), OwnerRecord(JOB, "directory", "mine")), storage)
        with pytest.raises(SnapshotClaimedError, match="by another name"):
            run_flow(dispose_snapshot(folder, "user", 0), storage)
        assert storage.files == before
        assert run_flow(preflight(JOB, asked(restore=folder)), storage).refusals == ()


# ----------------------------------------------------------------------------------------------------------------- records


def test_records_of_before_mean_no_claim() -> None:
    point = msgspec.json.decode(b'{"checkpoint_id": 7, "folder": "/s", "timestamp_ms": 1, "explicit": true}', type=RestorePoint)
    assert point.claim == ""
    void = decode_record(VoidRecord, b'{"number": 2, "epoch": 1, "nonce": "n", "void": true, "version": 1}', "2.json")
    assert (void.given, void.owner) == (0, None)
    graph = msgspec.json.encode(asked())
    assert msgspec.json.decode(graph.replace(b'"claim_mode":"NO_CLAIM",', b""), type=Submission).claim_mode is ClaimMode.NO_CLAIM


def test_a_live_job_that_claimed_is_led_on_with_its_claim(storage: DictStorage) -> None:
    first = start(storage, **CLAIM)
    again = run_flow(resume_submission(JOB, starter("next")), storage)
    assert again.base == first.base
    assert again.subsumed == ()


# ---------------------------------------------------------------------------------------------------------- R21: dispose


def test_r21_a_savepoint_that_nobody_claims_is_deleted_and_nothing_beside_it(storage: DictStorage) -> None:
    run_flow(dispose_snapshot(SAVEPOINT, "user", 0), storage)
    assert in_folder(storage) == []
    assert storage.files[NEIGHBOUR] == b"another one"


def test_r21_a_claimed_savepoint_and_a_running_jobs_checkpoint_are_not_disposed_of(storage: DictStorage) -> None:
    start(storage, **CLAIM)
    put_job(storage, state="")
    files = dict(storage.files)
    for folder, owner in ((SAVEPOINT, JOB), (RETAINED, OTHER)):
        with pytest.raises(SnapshotClaimedError) as caught:
            run_flow(dispose_snapshot(folder, "user", 0), storage)
        assert (caught.value.owner, caught.value.path) == (owner, folder)
    assert storage.files == files


def test_r21_what_is_no_snapshot_is_not_deleted(storage: DictStorage) -> None:
    storage.files |= {"/home/me/thesis.txt": b"x", "/home/you/_metadata": b"not ours"}
    for folder in ("/home/me", "/home/you", "/nowhere"):
        with pytest.raises(NotFoundError, match="holds no snapshot"):
            run_flow(dispose_snapshot(folder, "user", 0), storage)
    assert {"/home/me/thesis.txt", "/home/you/_metadata"} < set(storage.files)


def test_r21_a_disposal_that_was_cut_off_anywhere_is_ended_by_the_next_and_no_job_starts_from_what_is_left(
    storage: DictStorage,
) -> None:
    for cut, left in kill_at_each(storage, lambda: dispose_snapshot(SAVEPOINT, "user", 0)):
        if f"{SAVEPOINT}/_owner" in left.files:
            with pytest.raises((SnapshotClaimedError, CorruptStateError, NotFoundError)):
                start(left, **CLAIM)
        if in_folder(left):
            run_flow(dispose_snapshot(SAVEPOINT, "again", 0), left)
        assert in_folder(left) == [], f"killed before operation {cut}"


@pytest.mark.parametrize("seed", range(30))
def test_r21_of_a_claim_and_a_disposal_at_once_one_wins(storage: DictStorage, seed: int) -> None:
    rng = random.Random(seed)
    racing = {
        "claim": Steps(claim_snapshot(RestorePoint(7, SAVEPOINT, 1, explicit=True), OwnerRecord(JOB, "directory", "n")), storage),
        "dispose": Steps(dispose_snapshot(SAVEPOINT, "user", 0), storage),
    }
    won = []
    while racing:
        name = rng.choice(sorted(racing))
        try:
            racing[name].step()
        except (SnapshotClaimedError, CorruptStateError):
            del racing[name]
        else:
            if racing[name].done:
                won.append(name)
                del racing[name]
    assert len(won) == 1
    assert (f"{SAVEPOINT}/_metadata" in storage.files) == (won == ["claim"])


# ---------------------------------------------------------------------------------------- a job's own stop-savepoint


def stopped_and_claimed(storage: DictStorage, *, ended: bool) -> Submission:
    """A job was stopped with a savepoint, started from it as its owner, has deleted it since, and has finished if asked to."""
    paths = JobPaths(JOB)
    start(storage)
    claim = ClaimRecord(
        checkpoint_id=7, epoch=1, submission=1, attempt=1, kind=CheckpointKind.STOP_SAVEPOINT, folder=SAVEPOINT, nonce="s"
    )
    pointer = SavepointRecord(7, SAVEPOINT, CheckpointKind.STOP_SAVEPOINT, 1, 1, "s")
    for path, record in ((paths.claim(7), claim), (paths.decision(7), pointer), (paths.result(1), _result(1, 7))):
        storage.files[path] = encode_record(record)
    setup = start(storage, name="again", **CLAIM)
    assert setup.base is not None
    number = setup.first_checkpoint_id
    own = ClaimRecord(
        checkpoint_id=number,
        epoch=setup.epoch,
        submission=2,
        attempt=1,
        kind=CheckpointKind.CHECKPOINT,
        folder=paths.checkpoint(number),
        nonce="again",
    )
    put_snapshot(storage, paths.checkpoint(number), checkpoint_id=number, kind="checkpoint")
    storage.files[paths.claim(number)] = encode_record(own)
    run_flow(release_snapshot(SAVEPOINT, setup.base.claim), storage)
    assert in_folder(storage) == []
    if ended:
        storage.files[paths.result(2)] = encode_record(_result(2, number))
        run_flow(clear_ended(JOB, starter("cleaner")), storage)
        assert not storage.files.keys() & {paths.claim(number), paths.decision(number)}
    assert paths.decision(7) in storage.files, "what its user asked for is still answered"
    return asked(restore="latest")


def _result(number: int, newest: int) -> ResultRecord:
    return ResultRecord(
        submission=number, state="FINISHED", epoch=1, nonce="s", last_checkpoint_id=newest, newest_completed=newest, cause=""
    )


def test_a_stop_savepoint_that_the_job_claimed_and_deleted_is_none_to_go_on_from(storage: DictStorage) -> None:
    latest = stopped_and_claimed(storage, ended=True)
    assert newest_kept(run_flow(read_job(JobPaths(JOB)), storage)) is None
    for restore in ("latest", "latest-readable"):
        with pytest.raises(RestoreError, match="has no completed checkpoint to restore: it is FINISHED"):
            run_flow(_judged(JOB, restore=restore), storage)
    with pytest.raises(NotFoundError, match=r"no completed checkpoint 7; it has \[\]"):
        run_flow(_judged(JOB, restore="7"), storage)
    with pytest.raises(JobExistsError, match="Give restore='PATH' to go on from a savepoint"):
        start(storage)
    with pytest.raises(SnapshotClaimedError, match="was claimed by this job, which deleted it"):
        run_flow(_judged(JOB, restore=SAVEPOINT), storage)
    assert latest.restore == "latest"


def test_while_it_has_checkpoints_of_its_own_those_are_the_latest(storage: DictStorage) -> None:
    stopped_and_claimed(storage, ended=False)
    setup = start(storage, name="third", restore="latest")
    assert setup.base is not None
    number = setup.base.checkpoint_id
    assert (number > 7, setup.base.folder) == (True, JobPaths(JOB).checkpoint(number))
    for wrong in ("7", "9" * 5000):  # more digits than Python makes a number of
        with pytest.raises(NotFoundError, match=rf"no completed checkpoint {wrong}; it has \[{number}\]"):
            run_flow(_judged(JOB, restore=wrong), storage)


def test_a_stop_savepoint_is_the_latest_as_long_as_the_job_has_not_subsumed_it(storage: DictStorage) -> None:
    paths = JobPaths(JOB)
    start(storage)
    claim = ClaimRecord(
        checkpoint_id=7, epoch=1, submission=1, attempt=1, kind=CheckpointKind.STOP_SAVEPOINT, folder=SAVEPOINT, nonce="s"
    )
    pointer = SavepointRecord(7, SAVEPOINT, CheckpointKind.STOP_SAVEPOINT, 1, 1, "s")
    for path, record in ((paths.claim(7), claim), (paths.decision(7), pointer), (paths.result(1), _result(1, 7))):
        storage.files[path] = encode_record(record)
    start(storage, name="again", **CLAIM)
    setup = start(storage, name="third", restore="latest")
    assert setup.base is not None
    assert (setup.base.checkpoint_id, setup.base.folder) == (7, SAVEPOINT)


# ---------------------------------------------------------------------------------------------- a claim that is given back


class Linked(DictStorage):
    """One folder has a second name."""

    def execute(self, operation: Any) -> Any:
        for name in ("path", "prefix"):
            value = getattr(operation, name, "")
            if value.startswith("/link"):
                operation = msgspec.structs.replace(operation, **{name: SAVEPOINT + value.removeprefix("/link")})
        return super().execute(operation)


@pytest.mark.parametrize("age_ms", [0, STARTING_MS_MAX - 1, STARTING_MS_MAX])
def test_a_preflight_and_the_start_say_the_same_of_a_claim_whose_submission_never_came(storage: DictStorage, age_ms: int) -> None:
    mine = OwnerRecord(JOB, "directory", "cut off", 1_000, folder=SAVEPOINT)
    run_flow(claim_snapshot(RestorePoint(7, SAVEPOINT, 1, explicit=True), mine), storage)
    now_ms = 1_000 + age_ms
    report = run_flow(preflight(OTHER, asked(OTHER, **CLAIM), now_ms=now_ms), storage)
    begins = start_submission(OTHER, asked(OTHER, **CLAIM), Starter("t", "", "directory", now_ms))
    if report.fits:
        assert run_flow(begins, storage).base is not None
    else:
        with pytest.raises(SnapshotClaimedError, match="may be starting just now"):
            run_flow(begins, storage)
    assert report.fits == (age_ms >= STARTING_MS_MAX)


def copy_folder(storage: DictStorage, source: str, target: str) -> None:
    """As `cp -r` does."""
    found = {path.replace(source, target, 1): content for path, content in storage.files.items() if path.startswith(f"{source}/")}
    storage.files.update(found)


@pytest.mark.parametrize("state", ["FAILED", "CANCELED"])
def test_a_job_that_ended_before_its_first_checkpoint_gives_back_what_it_claimed(storage: DictStorage, state: str) -> None:
    ended(storage, state, completed=False)
    report = run_flow(preflight(OTHER, asked(OTHER, **CLAIM)), storage)
    assert report.fits
    assert [note for note in report.notes if "it is given back" in note]
    setup = start(storage, OTHER, "t", **CLAIM)
    owner = run_flow(find_owner(SAVEPOINT), storage)
    assert setup.base is not None
    assert owner is not None
    assert (owner.job_id, owner.nonce) == (OTHER, setup.base.claim)
    assert in_folder(storage) == ["_metadata", "_owner", "_owner-2", "source-0", "source-1"]
    recorded = run_flow(read_job(JobPaths(JOB)), storage)
    assert (recorded.returned, derive_releases(recorded)) == ({"s"}, ())
    with pytest.raises(SnapshotClaimedError, match=f"was claimed by job {OTHER}.*its job runs"):
        start(storage, name="u", **CLAIM)
    again = start(storage, name="u", restore="latest")
    assert again.base is not None
    assert (again.base.folder, again.base.claim) == (SAVEPOINT, ""), "it may start from it as anybody may, and deletes nothing"
    run_flow(release_snapshot(SAVEPOINT, "s"), storage)
    assert len(in_folder(storage)) == 5
    run_flow(release_snapshot(SAVEPOINT, setup.base.claim), storage)
    assert in_folder(storage) == []


def test_what_a_failed_job_claimed_can_be_disposed_of(storage: DictStorage) -> None:
    ended(storage, "FAILED", completed=False)
    for cut, left in kill_at_each(storage, lambda: dispose_snapshot(SAVEPOINT, "user", 1)):
        if in_folder(left):
            run_flow(dispose_snapshot(SAVEPOINT, "again", 1), left)
        assert in_folder(left) == [], f"killed before operation {cut}"
        assert left.files[NEIGHBOUR] == b"another one"


def test_from_elsewhere_the_records_of_the_failed_job_are_found_where_it_wrote_down(storage: DictStorage) -> None:
    ended(storage, "FAILED", completed=False)
    moved = {path: storage.files.pop(path) for path in list(storage.files) if not path.startswith("/")}
    with pytest.raises(SnapshotClaimedError, match="where its records are is not written down"):
        run_flow(dispose_snapshot(SAVEPOINT, "user", 1), storage)
    record = decode_record(OwnerRecord, storage.files[f"{SAVEPOINT}/_owner"], "_owner")
    storage.files[f"{SAVEPOINT}/_owner"] = encode_record(msgspec.structs.replace(record, root="/there"))
    with pytest.raises(SnapshotClaimedError, match="its records are not at /there any more"):
        run_flow(dispose_snapshot(SAVEPOINT, "user", 1), storage)
    storage.files |= {f"/there/{path}": content for path, content in moved.items()}
    run_flow(dispose_snapshot(SAVEPOINT, "user", 1), storage)
    assert in_folder(storage) == []


def test_a_job_that_runs_or_has_a_checkpoint_since_gives_nothing_back(storage: DictStorage) -> None:
    start(storage, **CLAIM)
    with pytest.raises(SnapshotClaimedError, match="its job runs"):
        start(storage, OTHER, "t", **CLAIM)
    put_checkpoint(storage, JOB, 8)
    storage.files[JobPaths(JOB).result(1)] = encode_record(ResultRecord(1, "FAILED", 1, "n", 8, 8))
    files = dict(storage.files)
    for flow in (start_submission(OTHER, asked(OTHER, **CLAIM), starter("t")), dispose_snapshot(SAVEPOINT, "user", 1)):
        with pytest.raises(SnapshotClaimedError, match="has checkpoints of its own, which replace it"):
            run_flow(flow, storage)
    assert {path for path in files if not path.startswith(OTHER)} == {path for path in storage.files if not path.startswith(OTHER)}


def test_a_job_that_began_anew_gives_back_what_it_had_claimed_before(storage: DictStorage) -> None:
    ended(storage, "FAILED", completed=False)
    start(storage, name="t", fresh=True)
    assert start(storage, OTHER, "u", **CLAIM).base is not None


def test_a_claim_whose_submission_never_came_is_given_back_after_a_while(storage: DictStorage) -> None:
    mine = OwnerRecord(JOB, "directory", "cut off", 1_000, folder=SAVEPOINT)
    run_flow(claim_snapshot(RestorePoint(7, SAVEPOINT, 1, explicit=True), mine), storage)
    with pytest.raises(SnapshotClaimedError, match="may be starting just now"):
        run_flow(dispose_snapshot(SAVEPOINT, "user", 1_000 + STARTING_MS_MAX - 1), storage)
    late = Steps(start_submission(JOB, asked(JOB, **CLAIM), starter("slept")), storage)
    while JobPaths(JOB).leader(1) not in storage.files:
        late.step()
    run_flow(dispose_snapshot(SAVEPOINT, "user", 1_000 + STARTING_MS_MAX), storage)

    def go_on() -> None:
        while not late.done:
            late.step()

    with pytest.raises((FencedError, NotFoundError)):
        go_on()
    assert not run_flow(read_job(JobPaths(JOB)), storage).exists


@pytest.mark.parametrize("seed", range(60))
def test_of_two_claims_and_a_start_of_the_job_that_gives_back_one_owns_it(storage: DictStorage, seed: int) -> None:
    ended(storage, "FAILED", completed=False)
    rng = random.Random(seed)
    third = "12" * 16
    racing = {
        "first": Steps(start_submission(OTHER, asked(OTHER, **CLAIM), starter("first")), storage),
        "second": Steps(start_submission(third, asked(third, **CLAIM), starter("second")), storage),
        "start": Steps(start_submission(JOB, asked(JOB, restore="latest"), starter("start")), storage),
    }
    ended_so: dict[str, bool] = {}
    while racing:
        name = rng.choice(sorted(racing))
        try:
            racing[name].step()
        except (SnapshotClaimedError, FencedError):
            ended_so[name] = False
            del racing[name]
        else:
            if racing[name].done:
                ended_so[name] = True
                del racing[name]
    owners = []
    for job_id in (JOB, OTHER, third):
        recorded = run_flow(read_job(JobPaths(job_id)), storage)
        record = recorded.newest_submission
        base = derive_latest(recorded) if record is not None else None
        if base is not None and base.claim:
            owners.append((job_id, base.claim))
    owner = run_flow(find_owner(SAVEPOINT), storage)
    assert owner is not None
    assert owners == [(owner.job_id, owner.nonce)] or owners == [], (ended_so, owners)
    assert any(ended_so.values())


def test_a_claim_of_what_is_given_back_that_was_cut_off_anywhere_is_taken_up_or_free(storage: DictStorage) -> None:
    ended(storage, "FAILED", completed=False)
    for cut, left in kill_at_each(storage, lambda: start_submission(OTHER, asked(OTHER, **CLAIM), starter("dead"))):
        setup = start(left, OTHER, "next", **CLAIM)
        owner = run_flow(find_owner(SAVEPOINT), left)
        assert setup.base is not None
        assert owner is not None
        assert (owner.job_id, owner.nonce) == (OTHER, setup.base.claim), f"killed before operation {cut}"


def test_a_job_may_claim_again_what_it_gave_back_to_nobody(storage: DictStorage) -> None:
    ended(storage, "FAILED", completed=False)
    record = VoidRecord(2, 1, "dead", returned="s")
    storage.files[JobPaths(JOB).submission(2)] = encode_record(record)
    setup = start(storage, name="t", **CLAIM)
    assert setup.base is not None
    assert setup.base.claim == "t"


def test_a_copied_folder_carries_no_owner(storage: DictStorage) -> None:
    start(storage, **CLAIM)
    original = {path: content for path, content in storage.files.items() if path.startswith(SAVEPOINT)}
    for name, job_id in (("/copies/one", OTHER), ("/copies/two", "34" * 16)):
        copy_folder(storage, SAVEPOINT, name)
        if job_id == OTHER:
            assert run_flow(find_owner(name), storage) is None
            setup = start(storage, OTHER, "t", restore=name, claim_mode=ClaimMode.CLAIM)
            owner = run_flow(find_owner(name), storage)
            assert setup.base is not None
            assert owner is not None
            assert (owner.job_id, owner.nonce) == (OTHER, setup.base.claim)
        else:
            run_flow(dispose_snapshot(name, "user", 1), storage)
            assert in_folder(storage, name) == []
    assert {path: content for path, content in storage.files.items() if path.startswith(SAVEPOINT)} == original


def test_the_same_folder_by_another_name_is_no_copy() -> None:
    storage = Linked()
    storage.files["_holdfast"] = b"directory"
    put_snapshot(storage, SAVEPOINT)
    start(storage, **CLAIM)
    files = in_folder(storage)
    for flow in (
        start_submission(OTHER, asked(OTHER, restore="/link", claim_mode=ClaimMode.CLAIM), starter("t")),
        dispose_snapshot("/link", "user", 1),
    ):
        with pytest.raises(SnapshotClaimedError, match="its job runs"):
            run_flow(flow, storage)
    assert in_folder(storage) == files, "nothing of the probe is left"


@pytest.mark.parametrize("kind", [StorageUnavailableError, ObjectMissingError])
def test_storage_that_fails_makes_no_copy_of_a_folder(kind: type[HoldfastError]) -> None:
    """Whoever took it for one would take the snapshot from the job that needs it, or delete it."""

    class Hiccup(Linked):
        def execute(self, operation: Any) -> Any:
            if isinstance(operation, StatFile) and "_probe-" in operation.path:
                raise kind.of("no answer", {"path": operation.path})
            return super().execute(operation)

    storage = Hiccup()
    storage.files["_holdfast"] = b"directory"
    put_snapshot(storage, SAVEPOINT)
    start(storage, **CLAIM)
    files = in_folder(storage)
    with pytest.raises(kind):
        run_flow(dispose_snapshot("/link", "user", 1), storage)
    assert in_folder(storage) == files


def test_a_checkpoint_that_a_failed_job_had_claimed_is_given_back_too() -> None:
    storage = DictStorage()
    put_job(storage)
    setup = start(storage, **TAKE)
    with pytest.raises(SnapshotClaimedError, match="its job runs"):
        start(storage, "12" * 16, "t", **TAKE)
    storage.files[JobPaths(JOB).result(1)] = encode_record(ResultRecord(1, "FAILED", 1, "n", setup.first_checkpoint_id, 0))
    third = start(storage, "12" * 16, "t", **TAKE)
    owner = run_flow(find_owner(RETAINED), storage)
    assert third.base is not None
    assert owner is not None
    assert (owner.job_id, owner.nonce) == ("12" * 16, third.base.claim)


# ------------------------------------------------------------------------------- what an ended job retains, disposed of


def test_r21_a_checkpoint_that_an_ended_job_retains_is_disposed_of() -> None:
    storage = DictStorage()
    put_job(storage, numbers=(8, 9), state="FINISHED", retain_on_finish=True)
    for path in ("shared/9-1-source-0-x", "shared/8-1-source-0-x"):
        storage.files[f"{STATE}/{OTHER}/{path}"] = ENTRIES
    shared = FileHandle("../shared/9-1-source-0-x", len(ENTRIES), checksum_of(ENTRIES))
    subtask = OperatorSubtaskState(operator=(OperatorListHandle(OFFSETS, shared, 1),))
    operators = (stored("source", (subtask, OperatorSubtaskState())),)
    metadata = msgspec.structs.replace(contents(kind="checkpoint", job_id=OTHER, checkpoint_id=9), operators=operators)
    storage.files[f"{RETAINED}/_metadata"] = encode_metadata(metadata)
    for cut, left in kill_at_each(storage, lambda: dispose_snapshot(RETAINED, "user", 1)):
        if in_folder(left, RETAINED):
            run_flow(dispose_snapshot(RETAINED, "again", 1), left)
        assert in_folder(left, RETAINED) == [], f"killed before operation {cut}"
        assert f"{STATE}/{OTHER}/shared/8-1-source-0-x" in left.files, "only what it named"
        below = Below(left)
        run_flow(clear_ended(OTHER, starter("o", "other directory")), below)  # type: ignore[arg-type]
        recorded = run_flow(read_job(JobPaths(OTHER)), below)  # type: ignore[arg-type]
        assert [entry.checkpoint_id for entry in recorded.with_fact(CheckpointFact.COMPLETED)] == [8]
        assert f"{STATE}/{OTHER}/shared/9-1-source-0-x" not in left.files


@pytest.mark.parametrize("seed", range(40))
def test_r21_a_disposal_and_a_start_from_what_it_disposes_of_never_both_succeed(seed: int) -> None:
    storage = DictStorage()
    put_job(storage, state="FINISHED", retain_on_finish=True)
    rng = random.Random(seed)
    below = Below(storage)
    racing = {
        "dispose": Steps(dispose_snapshot(RETAINED, "user", 1), storage),
        "start": Steps(start_submission(OTHER, asked(OTHER, restore="latest"), starter("o", "other directory")), below),
    }
    done: set[str] = set()
    while racing:
        name = rng.choice(sorted(racing))
        try:
            racing[name].step()
        except (SnapshotClaimedError, FencedError, RestoreError, CorruptStateError, NotFoundError):
            del racing[name]
        else:
            if racing[name].done:
                done.add(name)
                del racing[name]
    assert len(done) == 1, done
    assert bool(in_folder(storage, RETAINED)) == (done == {"start"})
