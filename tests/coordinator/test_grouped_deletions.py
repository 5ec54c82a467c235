"""What is deleted several at one time keeps the orders that crash safety relies on, however its operations are interleaved; and
it does go several at one time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.dispatcher.submit import Starter, clear_ended
from holdfast.coordinator.ha.leadership import check_leadership
from holdfast.coordinator.ha.recorded_job import CheckpointFact, decode_decision
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, OwnerRecord, ResultRecord, encode_record
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.store import drop_checkpoint, read_job
from holdfast.coordinator.ownership.claims import delete_owned, dispose_snapshot
from holdfast.coordinator.ownership.fsck import FsckRequest, check_directory
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import METADATA_NAME, OWNER_NAME, JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    Flow,
    InParallel,
    Operation,
    PutIfAbsent,
    one_by_one,
    run_flow,
)
from tests.coordinator.test_crashes import settle
from tests.coordinator.world import JOB, DictStorage, World

PATHS = JobPaths(JOB)
HOUR = 3_600_000
FILES = 40


class Watched(DictStorage):
    """Keeps the paths of what it deleted, and what it created."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []
        self.created: dict[str, bytes] = {}
        self.log: list[str] = []
        """Paths of both, in order."""

    def execute(self, operation: Operation) -> Any:
        match operation:
            case PutIfAbsent(path, data) if path not in self.files:
                self.created[path] = data
                self.log.append(path)
            case DeleteFile(path):
                self.deleted.append(path)
                self.log.append(path)
            case DeleteFolder(folder):
                self.deleted.append(f"{folder}/")
                self.log.append(f"{folder}/")
        return super().execute(operation)


def interleaved(flow: Flow[Any], storage: DictStorage, seed: int) -> Any:
    """Groups in an order that the seed draws."""
    steps = one_by_one(flow, random.Random(seed).randrange)
    return perform(steps, storage, None)[0]


def waves(flow: Flow[Any], storage: DictStorage) -> int:
    """How often one waits for storage, if it takes any number of operations of a group at one time."""
    return perform(flow, storage, None)[1]


def perform(flow: Flow[Any], storage: DictStorage, error: HoldfastError | None) -> tuple[Any, int]:
    count = 0
    resume: Callable[[], Any] = partial(next, flow)
    while True:
        try:
            wanted = resume()
        except StopIteration as stop:
            return stop.value, count
        if isinstance(wanted, InParallel):
            done = [perform(each, storage, None) for each in wanted.flows]
            count += max((each for _, each in done), default=0)
            resume = partial(flow.send, [result for result, _ in done])
            continue
        count += 1
        try:
            result = storage.execute(wanted)
        except HoldfastError as caught:
            resume = partial(flow.throw, caught)
        else:
            resume = partial(flow.send, result)


def savepoint(folder: str = "sp") -> Watched:
    storage = Watched()
    metadata = SnapshotMetadata(
        job_id="j", job_name="n", checkpoint_id=1, kind="savepoint", attempt=1, epoch=1, trigger_timestamp_ms=1,
        completion_timestamp_ms=1,
    )  # fmt: skip
    storage.files[f"{folder}/{METADATA_NAME}"] = encode_metadata(metadata)
    storage.files |= {f"{folder}/part-{number}": b"x" for number in range(FILES)}
    return storage


def left_job() -> Watched:
    """A job whose leader died, with litter of ids that nobody completed, some hours ago."""
    world = World(seed=3)
    settle(world)
    storage = Watched()
    storage.files = dict(world.storage.files)
    claim = ClaimRecord(
        checkpoint_id=990, epoch=1, submission=1, attempt=1, kind=CheckpointKind.CHECKPOINT, folder=PATHS.checkpoint(990), nonce="n"
    )
    storage.files[PATHS.claim(990)] = encode_record(claim)  # the ids below it have been taken
    storage.files[PATHS.decision(990)] = encode_record(AbortRecord(990, FailureReason.EXPIRED, 1, "n"))
    for number in range(FILES):
        storage.files[f"{JOB}/chk-{900 + number}/left"] = b"x"
        storage.files[f"{JOB}/chk-{900 + number}/{METADATA_NAME}"] = b"x"
        storage.files[f"{JOB}/shared/7-{number}-a.sst"] = b"x"
    storage.now_ms = 5 * HOUR
    return storage


def ended_job() -> Watched:
    storage = left_job()
    result = ResultRecord(1, "FINISHED", 2, "n", last_checkpoint_id=990, newest_completed=1)
    storage.files[PATHS.result(1)] = encode_record(result)
    return storage


def repair(storage: DictStorage) -> Flow[Any]:
    return check_directory(FsckRequest(repair=True, nonce="n"), "memory", storage.now_ms)


@pytest.mark.parametrize("seed", range(6))
def test_metadata_goes_first_and_the_owner_last(seed: int) -> None:
    storage = savepoint()
    storage.files[f"sp/{OWNER_NAME}"] = encode_record(OwnerRecord("", "", "n", 1))
    interleaved(delete_owned("sp"), storage, seed)
    assert (storage.deleted[0], storage.deleted[-1]) == (f"sp/{METADATA_NAME}", "sp/")
    assert f"sp/{OWNER_NAME}" not in storage.deleted, "it goes with the folder"
    assert len(storage.deleted) == FILES + 2
    assert storage.files == {}


@pytest.mark.parametrize("seed", range(6))
def test_a_claim_goes_first_and_shared_files_last(seed: int) -> None:
    storage = Watched()
    names = [f"1-{number}-a.sst" for number in range(FILES)]
    storage.files = dict.fromkeys((PATHS.claim(1), PATHS.claim(2), PATHS.decision(1)), b"")
    storage.files |= {f"{PATHS.shared}/{name}": b"" for name in names}
    interleaved(drop_checkpoint(PATHS, 1, names, (2,)), storage, seed)
    assert storage.deleted[:3] == [PATHS.claim(1), f"{PATHS.checkpoint(1)}/", PATHS.claim(2)]
    assert sorted(storage.deleted[3:]) == sorted(f"{PATHS.shared}/{name}" for name in names)


@pytest.mark.parametrize("seed", range(6))
def test_a_repair_deletes_decisions_last_and_looks_before_each_deletion(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, looks = left_job(), []

    def look(*arguments: Any) -> Flow[None]:
        looks.append(len(storage.deleted))
        yield from check_leadership(*arguments)

    monkeypatch.setattr("holdfast.coordinator.ownership.fsck.check_leadership", look)
    report = interleaved(repair(storage), storage, seed)
    files = [path for path in storage.deleted if not path.endswith("/") and "_fsck" not in path]
    decisions = [path for path in files if path.endswith(f"/{METADATA_NAME}")]
    assert len(decisions) == FILES
    assert files[-FILES:] == decisions
    assert len(files) == len(report.deleted) == len(looks) - FILES >= 2 * FILES
    assert [file.path for file in report.deleted] == sorted(files)


@pytest.mark.parametrize("seed", range(6))
def test_an_id_that_a_stale_leader_wrote_behind_the_end_is_decided_before_it_goes(seed: int) -> None:
    """Its writer may be about to complete it: what it finds is an aborted id, or none."""
    storage = ended_job()
    late = (985, 986)
    for number in late:
        claim = ClaimRecord(number, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(number), "late")
        storage.files[PATHS.claim(number)] = encode_record(claim)
        storage.files[f"{JOB}/chk-{number}/left"] = b"x"
    undecided = run_flow(read_job(PATHS), storage).with_fact(CheckpointFact.UNDECIDED)
    assert [checkpoint.checkpoint_id for checkpoint in undecided] == list(late)
    interleaved(clear_ended(JOB, Starter("n", "", "directory", 1)), storage, seed)
    for number in late:
        record = decode_decision(storage.created[PATHS.decision(number)])
        assert (record.reason, record.nonce) == (FailureReason.LEADER_CHANGED, "n")  # type: ignore[union-attr]
        steps = [path for path in storage.log if path.startswith(f"{JOB}/chk-{number}/")]
        assert steps[:2] == [PATHS.decision(number), PATHS.claim(number)]
    assert not [path for path in storage.files if any(f"/chk-{number}/" in path for number in late)]


def test_no_deletion_touches_the_files_of_tasks() -> None:
    """`taskowned`, beside `shared`: a subsumed checkpoint, a new leader, the job's end and a repair all delete around it."""
    storage = ended_job()
    names = [f"{JOB}/taskowned/{name}" for name in ("1-1-count-0-n-a.sst", "7-0-a.sst", "deep/er", METADATA_NAME)]
    storage.files |= dict.fromkeys(names, b"x")
    number = min(storage.completed(JOB))
    interleaved(drop_checkpoint(PATHS, number, ("7-0-a.sst",)), storage, 1)
    interleaved(recover_job(PATHS, Takeover(9, "n", 1)), storage, 2)
    interleaved(clear_ended(JOB, Starter("n", "", "directory", 1)), storage, 3)
    storage.files[f"{JOB}/chk-5/left"] = b"x"
    interleaved(repair(storage), storage, 4)
    left = {path for path in storage.files if path.startswith((f"{JOB}/chk-", PATHS.shared))}
    assert left == {PATHS.claim(991), PATHS.decision(991)}, "of a fence that stays"
    assert [path for path in names if path not in storage.files] == []


def test_no_deletion_touches_an_epoch_or_a_number_of_a_submission() -> None:
    """They refuse whoever was asleep, for any time (ADR 26)."""
    storage = ended_job()
    for turn in range(4):
        storage.files[f"{JOB}/chk-{turn + 5}/left"] = b"x"
        interleaved(clear_ended(JOB, Starter(f"n{turn}", "", "directory", 1)), storage, turn)
        interleaved(recover_job(PATHS, Takeover(9, "n", 1)), storage, turn)
        interleaved(repair(storage), storage, turn)
    fences = [path for path in storage.created if path.startswith((f"{PATHS.leaders}/", f"{JOB}/submissions/"))]
    assert len([path for path in fences if path.startswith(PATHS.leaders)]) >= 2
    assert [path for path in fences if path not in storage.files] == []
    assert [path for path in storage.deleted if path.startswith((PATHS.leaders, f"{JOB}/submissions"))] == []


@pytest.mark.parametrize(
    ("make", "run", "most"),
    [
        (savepoint, lambda storage: dispose_snapshot("sp", "user", 1), 13),
        (left_job, lambda storage: recover_job(PATHS, Takeover(9, "n", 1)), 60),
        (ended_job, lambda storage: clear_ended(JOB, Starter("n", "", "directory", 1)), 40),
        (left_job, repair, 60),
    ],
    ids=["dispose", "takeover", "clear", "repair"],
)
def test_as_many_files_more_cost_no_more_waiting(
    make: Callable[[], Watched], run: Callable[[Watched], Flow[Any]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = make()
    many = waves(run(storage), storage)
    assert len(storage.deleted) >= FILES
    monkeypatch.setattr("tests.coordinator.test_grouped_deletions.FILES", 4)
    storage = make()
    assert many == waves(run(storage), storage) <= most
