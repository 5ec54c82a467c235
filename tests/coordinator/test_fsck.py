"""A repair killed anywhere, repeated, beside leaders that live: no retained snapshot loses a file (J20, I23-I25)."""

from __future__ import annotations

import copy
import functools

import pytest

from holdfast.coordinator.ha.records import OwnerRecord, VoidRecord, encode_record
from holdfast.coordinator.ownership.files import OwnerKind, claimed_paths
from holdfast.coordinator.ownership.fsck import FsckReport, FsckRequest, check_directory
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import decode_metadata
from tests.coordinator.shared_world import SharedWorld
from tests.coordinator.test_crashes import live, settle
from tests.coordinator.world import JOB, DictStorage, Steps, World
from tests.examples import seeds

HOUR = 3_600_000
SEEDS = seeds(24)


def needed(storage: DictStorage) -> set[str]:
    """Every file that a retained checkpoint of the job names."""
    folders = storage.completed(JOB).values()
    return {path for folder in folders for path in claimed_by(storage.files[f"{folder}/_metadata"], folder)}


@functools.lru_cache(10_000)
def claimed_by(metadata: bytes, folder: str) -> frozenset[str]:
    """Asked after every step."""
    return frozenset(claimed_paths(decode_metadata(metadata, folder), folder))


def request(*, repair: bool = True, doubt: str = "", age_ms: int = HOUR) -> FsckRequest:
    return FsckRequest(safety_age_ms=age_ms, repair=repair, leader_may_live=doubt, nonce="n")


def check(storage: DictStorage, request: FsckRequest) -> FsckReport:
    report: FsckReport = Steps(check_directory(request, "memory", storage.now_ms), storage).run()
    return report


def crowded(seed: int) -> World:
    """A job that several leaders led and left in the middle of something, hours ago."""
    world = SharedWorld(seed, deaths=0.1)
    for _ in range(3):
        live(world, world.leaders[-1], world.random.randint(60, 200))
        world.leaders[-1].flows.clear()
        while not world.take_over(steps=world.random.choice([None, 8, 15, 25])):
            pass
    live(world, world.leaders[-1], 120)
    number = max(world.storage.completed(JOB), default=1)
    world.storage.files[f"{JOB}/chk-{number}/late-of-nobody"] = b"x"
    if number > 1:
        world.storage.files[f"{JOB}/chk-{number - 1}/dropped"] = b"x"  # behind the claim that is gone
        world.storage.files.pop(f"{JOB}/chk-{number - 1}/_claim", None)
    world.storage.now_ms = 5 * HOUR
    return world


def assert_nothing_is_missing(storage: DictStorage) -> None:
    missing = needed(storage) - storage.files.keys()
    assert not missing, f"retained checkpoints lost {sorted(missing)} (I23)"


@pytest.mark.parametrize("seed", SEEDS)
def test_repair_killed_after_any_operation_and_repeated_leaves_what_is_needed(seed: int) -> None:
    world = crowded(seed)
    world.leaders[-1].flows.clear()
    before = copy.deepcopy(world.storage.files)
    found = check(world.storage, request(repair=False))
    assert any(file.path.endswith("late-of-nobody") for file in found.orphans)
    assert world.storage.files == before, "a report changes nothing"
    count = 0
    while True:
        world.storage.files = copy.deepcopy(before)
        flow = Steps(check_directory(request(), "memory", world.storage.now_ms), world.storage)
        for _ in range(count):
            if not flow.done:
                flow.step()
        assert_nothing_is_missing(world.storage)
        if flow.done:
            break
        if count % 5 == seed % 5:  # the next one goes on where it was
            report = check(world.storage, request())
            assert (report.orphans, report.refused) == ((), {})
            assert_nothing_is_missing(world.storage)
            world.storage.now_ms += 2 * HOUR
            assert check(world.storage, request()).is_clean, "no orphan older than the safety age is left (I24)"
            assert not world.storage.files.keys() - before.keys()
            world.storage.now_ms -= 2 * HOUR
        count += 1
    shared = {path for path in world.storage.files if "/shared/" in path}
    pending = any(path.endswith("/_claim") and path.replace("_claim", "_metadata") not in before for path in before)
    assert pending or shared == {path for path in needed(world.storage) if "/shared/" in path}
    settle(world)
    assert_nothing_is_missing(world.storage)
    world.leaders[-1].flows.clear()
    assert world.take_over(), "what is left can be led on"


@pytest.mark.parametrize("seed", SEEDS)
def test_repair_beside_a_leader_that_nobody_saw_deletes_nothing_that_it_needs(seed: int) -> None:
    """The guard is a courtesy: a leader on another machine, that no lock shows, loses nothing either."""
    world = crowded(seed)
    deleted = 0
    for _ in range(20):
        flow = Steps(check_directory(request(age_ms=0), "memory", world.storage.now_ms), world.storage)
        while not flow.done:
            flow.step()
            assert_nothing_is_missing(world.storage)
            if world.random.random() < 0.04:  # registers that never rest are left alone, and prove nothing
                live(world, world.leaders[-1], 30)
        deleted += len(flow.value.deleted)
        live(world, world.leaders[-1], 40)
        assert_nothing_is_missing(world.storage)
        if world.random.random() < 0.4:
            world.leaders[-1].flows.clear()
            while not world.take_over():
                pass
    settle(world)
    assert_nothing_is_missing(world.storage)
    assert deleted > 0


def test_repair_refuses_a_live_job_whose_leader_may_be_alive() -> None:
    world = crowded(1)
    before = copy.deepcopy(world.storage.files)
    report = check(world.storage, request(doubt="the lock is held"))
    assert report.refused == {JOB: "its leader may be alive: the lock is held"}
    assert report.orphans
    assert report.deleted == ()
    assert world.storage.files == before


def test_repair_stops_when_somebody_begins_to_lead() -> None:
    world = crowded(2)
    world.leaders[-1].flows.clear()
    flow = Steps(check_directory(request(), "memory", world.storage.now_ms), world.storage)
    count = len(world.storage.files)
    while not flow.done and len(world.storage.files) >= count:
        flow.step()
    assert world.take_over()
    report = flow.run()
    assert "a coordinator began to lead it" in report.refused[JOB]
    assert len(report.deleted) == 1
    assert_nothing_is_missing(world.storage)


def test_young_files_are_told_apart_and_stay() -> None:
    world = crowded(3)
    world.leaders[-1].flows.clear()
    number = max(world.storage.completed(JOB))
    path = f"{JOB}/chk-{number}/late"
    world.storage.files[path] = b"xy"
    world.storage.modified_ms[path] = world.storage.now_ms - HOUR + 1
    report = check(world.storage, request())
    assert [(file.path, file.size) for file in report.young] == [(path, 2)]
    assert path in world.storage.files
    world.storage.now_ms += 1
    assert [file.path for file in check(world.storage, request()).deleted] == [path]


def test_a_clock_of_ours_that_is_ahead_makes_nothing_an_orphan() -> None:
    world = crowded(4)
    world.leaders[-1].flows.clear()
    for path in world.storage.files:
        world.storage.modified_ms[path] = world.storage.now_ms - 1
    flow = Steps(check_directory(request(), "memory", world.storage.now_ms + 100 * HOUR), world.storage)
    assert flow.run().deleted == ()


def test_an_unreadable_snapshot_protects_whatever_it_may_name() -> None:
    world = crowded(5)
    world.leaders[-1].flows.clear()
    number = max(world.storage.completed(JOB))
    decision = JobPaths(JOB).decision(number)
    world.storage.files[decision] = world.storage.files[decision][:-9]
    mine = {path for path in world.storage.files if "/shared/" in path or f"/chk-{number}/" in path}
    report = check(world.storage, request())
    assert mine <= world.storage.files.keys()
    assert not {file.path for file in report.deleted} & mine


def test_a_damaged_record_makes_the_whole_job_untouchable() -> None:
    world = crowded(6)
    world.leaders[-1].flows.clear()
    world.storage.files[JobPaths(JOB).submission(1)] = b"{"
    before = copy.deepcopy(world.storage.files)
    report = check(world.storage, request())
    assert list(report.damaged_jobs) == [JOB]
    assert not report.is_clean
    assert world.storage.files == before


def test_missing_and_short_files_of_retained_checkpoints_are_named() -> None:
    world = crowded(7)
    world.leaders[-1].flows.clear()
    first, second = sorted(path for path in needed(world.storage) if "/shared/" in path)[:2]
    del world.storage.files[first]
    world.storage.files[second] += b"more"
    found = check(world.storage, request(repair=False)).problems
    assert {(problem.kind.value, problem.path, problem.operator) for problem in found} == {
        ("missing", first, "count"),
        ("length", second, "count"),
    }
    world.storage.files[second] = bytes(len(world.storage.files[second]) - 4)
    kinds = [problem.kind.value for problem in check(world.storage, request(repair=False)).problems]
    assert set(kinds) == {"missing"}
    deep = FsckRequest(checksums=True)
    assert {problem.kind.value for problem in check(world.storage, deep).problems} == {"missing", "checksum"}


def test_costs_add_up_to_everything_that_is_there() -> None:
    world = crowded(8)
    world.storage.files["_holdfast"] = b"n"
    world.storage.files["sinks/out/_holdfast/s/staged/part-1.parquet"] = bytes(200_000)
    world.storage.files["sinks/out/part-1.parquet"] = b"1"
    world.storage.files["notes.txt"] = b"mine"
    report = check(world.storage, request(repair=False))
    assert sum(cost.files for cost in report.costs) == len(world.storage.files)
    assert sum(cost.size for cost in report.costs) == sum(map(len, world.storage.files.values()))
    sinks = next(cost for cost in report.costs if cost.kind is OwnerKind.SINKS)
    assert (sinks.files, sinks.small_files, sinks.size) == (2, 1, 200_001)
    assert [file.path for file in report.unknown] == ["notes.txt"]
    assert {cost.job_id for cost in report.costs} == {JOB, ""}


@pytest.mark.parametrize("seed", [10, 11, 12])
def test_a_checkpoint_that_another_job_claimed_keeps_all_that_it_names(seed: int) -> None:
    """I25: whose job no longer has it is as much in the way of a deletion as whose job has."""
    world = crowded(seed)
    world.leaders[-1].flows.clear()
    number = max(world.storage.completed(JOB))
    mine = needed(world.storage)
    assert any("/shared/" in path for path in mine)
    owner = OwnerRecord("cd" * 16, "directory", "n")
    last = max(int(path.rpartition("/")[2].removesuffix(".json")) for path in world.storage.files if "/submissions/" in path)
    record = VoidRecord(last + 1, 9, "n", given=number, owner=owner)
    world.storage.files[JobPaths(JOB).submission(last + 1)] = encode_record(record)
    report = check(world.storage, request())
    assert mine <= world.storage.files.keys()
    assert report.problems == ()
    assert any(f"/chk-{number}/late-of-nobody" in path for path in world.storage.files), "not ours to tidy up"
