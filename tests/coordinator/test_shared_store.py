"""Shared files on storage: deleted behind the claims that need them, swept by a recovery, never on a guess (J15, J20, I23, I24)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.dispatcher.submit import Starter, clear_ended
from holdfast.coordinator.ha.recorded_job import CheckpointFact, derive_shared_garbage
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, ResultRecord, SubmissionRecord, encode_record
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.snapshots import check_files, load_snapshot
from holdfast.coordinator.ha.store import drop_checkpoint, read_job, write_result, write_submission
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle, KeyGroupRange, OperatorState, OperatorSubtaskState
from holdfast.statebackends.layout import JobPaths, is_checkpoint_folder, shared_name, writer_of
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage import resolve_folder, split_folder
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Flow, WriteFile, run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.world import DictStorage, Steps

JOB = "ab" * 16
PATHS = JobPaths(JOB)
TAKEOVER = Takeover(2, "two", 0)


def snapshot(number: int, *names: str) -> bytes:
    parts = tuple(FileHandle(f"../shared/{name}", 1, checksum_of(b"x")) for name in names)
    local = tuple(f"{index:06}.sst" for index in range(len(parts)))
    state = OperatorSubtaskState(keyed=(KeyedStateHandle(KeyGroupRange(0, 8), "rocksdb", (), parts, local),))
    return encode_metadata(
        SnapshotMetadata(
            job_id=JOB,
            job_name="j",
            checkpoint_id=number,
            kind="checkpoint",
            attempt=1,
            epoch=1,
            trigger_timestamp_ms=number,
            completion_timestamp_ms=number,
            operators=(OperatorState("op", "f" * 32, "op", 1, 8, (state,)),),
        )
    )


class Disk(DictStorage):
    """A job's directory, put together by hand."""

    def claim(self, number: int) -> None:
        record = ClaimRecord(number, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(number), "one")
        self.files[PATHS.claim(number)] = encode_record(record)

    def complete(self, number: int, *names: str) -> None:
        """Refers to these shared files; those that it wrote itself are made."""
        self.claim(number)
        self.share(*(name for name in names if writer_of(name) == number))
        self.files[PATHS.decision(number)] = snapshot(number, *names)

    def abort(self, number: int) -> None:
        self.claim(number)
        self.files[PATHS.decision(number)] = encode_record(AbortRecord(number, FailureReason.EXPIRED, 1, "one"))

    def share(self, *names: str) -> None:
        for name in names:
            self.files[f"{PATHS.shared}/{name}"] = b"x"

    @property
    def shared(self) -> set[str]:
        return {path.rpartition("/")[2] for path in self.files if path.startswith(f"{PATHS.shared}/")}

    def holes(self) -> list[int]:
        """Completed checkpoints with a file missing."""
        job = run_flow(read_job(PATHS), self)
        return [
            entry.checkpoint_id
            for entry in job.with_fact(CheckpointFact.COMPLETED)
            if any(shared_name(handle.path) not in self.shared for handle in getattr(entry.decision, "shared", ()))
        ]

    def settle(self) -> None:
        run_flow(recover_job(PATHS, TAKEOVER), self)


@pytest.fixture
def disk() -> Disk:
    disk = Disk()
    disk.files[PATHS.leader(1)] = b"{}"
    return disk


def killed(flow: Flow[Any], disk: Disk, steps: int) -> bool:
    """Run some operations of a flow; True if it ended before."""
    run = Steps(flow, disk)
    for _ in range(steps):
        if run.done:
            return True
        run.step()
    return run.done


@pytest.mark.parametrize("steps", range(8))
def test_j20_a_deletion_that_dies_anywhere_leaves_orphans_and_no_hole(steps: int) -> None:
    disk = Disk()
    disk.files[PATHS.leader(1)] = b"{}"
    disk.complete(1, "1-a-s1", "1-a-s2")
    disk.complete(2, "1-a-s2", "2-a-s3")
    disk.complete(3, "2-a-s3", "3-a-s4")
    killed(drop_checkpoint(PATHS, 2, ("1-a-s1", "1-a-s2"), (1,)), disk, steps)
    assert disk.holes() == []
    disk.settle()
    assert disk.holes() == []
    known = run_flow(read_job(PATHS), disk)
    needed = {shared_name(handle.path) for entry in known.checkpoints.values() for handle in getattr(entry.decision, "shared", ())}
    assert disk.shared == needed, "nothing is left over, nothing is missing"


def test_a_recovery_sweeps_what_aborted_and_forgotten_ids_wrote(disk: Disk) -> None:
    disk.complete(2, "1-a-s1", "2-a-s1")
    disk.abort(3)
    disk.claim(4)
    disk.share("1-a-s1", "1-a-s9", "3-a-s1", "4-a-s1", "5-a-s1", "9-a-s1", "foreign", "-x", "007-a")
    disk.settle()
    job = run_flow(read_job(PATHS), disk)
    assert job.last_checkpoint_id == 5, "4 is aborted, 5 fences what came before"
    assert disk.shared == {"1-a-s1", "2-a-s1", "9-a-s1", "foreign", "-x", "007-a"}
    disk.settle()
    assert derive_shared_garbage(run_flow(read_job(PATHS), disk)) == ()


def test_an_undecided_id_keeps_what_it_and_later_ones_write(disk: Disk) -> None:
    disk.complete(2, "2-a-s1")
    disk.claim(4)
    disk.share("1-a-s1", "3-a-s1", "4-a-s1", "5-a-s1")
    assert derive_shared_garbage(run_flow(read_job(PATHS), disk)) == ("1-a-s1", "3-a-s1")


def test_no_file_goes_that_an_unreadable_checkpoint_may_refer_to(disk: Disk) -> None:
    disk.share("1-a-s1", "2-a-s1")
    disk.claim(2)
    disk.files[PATHS.decision(2)] = snapshot(2, "1-a-s1")[:-9]
    disk.complete(3, "3-a-s1")
    disk.abort(4)
    disk.share("4-a-s1")
    disk.settle()
    assert disk.shared == {"1-a-s1", "2-a-s1", "3-a-s1"}, "of 4 it can't know"


@pytest.mark.parametrize("steps", range(60))
def test_a_recovery_that_dies_anywhere_sweeps_nothing_that_is_needed(steps: int) -> None:
    disk = Disk()
    disk.files[PATHS.leader(1)] = b"{}"
    disk.complete(1, "1-a-s1", "1-a-s2")
    disk.complete(3, "1-a-s2", "3-a-s1")
    disk.abort(2)
    disk.claim(4)
    disk.share("2-a-s1", "4-a-s1")
    killed(recover_job(PATHS, TAKEOVER), disk, steps)
    assert disk.holes() == []
    disk.settle()
    assert disk.holes() == []
    assert disk.shared == {"1-a-s1", "1-a-s2", "3-a-s1"}


@pytest.mark.parametrize("steps", [*range(0, 50, 3), None])
def test_an_ended_job_keeps_no_shared_file_whenever_its_deletion_died(disk: Disk, steps: int | None) -> None:
    graph = word_count(state_backend="rocksdb")
    record = SubmissionRecord(1, 1, submission(graph, job_id=JOB), None, 1, "one")
    run_flow(write_submission(PATHS, record), disk)
    disk.complete(1, "1-a-s1", "1-a-s2")
    disk.complete(2, "1-a-s2", "2-a-s1")
    disk.share("3-a-s1", "8-a-s1")
    run_flow(write_result(PATHS, ResultRecord(1, "FINISHED", 1, "one", 3, 2)), disk)
    if steps is not None:
        killed(clear_ended(JOB, Starter("b", "", "directory", 0)), disk, steps)
        assert disk.holes() == []
    run_flow(clear_ended(JOB, Starter("c", "", "directory", 0)), disk)
    assert disk.shared == {"8-a-s1"}, "an id above those of the result belongs to a submission that is beginning"
    run_flow(clear_ended(JOB, Starter("d", "", "directory", 0)), disk)
    epochs = {path for path in disk.files if path.startswith(PATHS.leaders)}
    run_flow(clear_ended(JOB, Starter("e", "", "directory", 0)), disk)
    assert {path for path in disk.files if path.startswith(PATHS.leaders)} == epochs, "nobody leads for nothing"


def effects() -> StorageEffects:
    return StorageEffects(Identity(JOB, 1, "one", 1, word_count(state_backend="rocksdb")), lambda: 0)


def test_what_an_aborted_id_shared_goes_with_it_and_nothing_else(disk: Disk) -> None:
    disk.abort(3)
    disk.share("3-a-s1", "33-a-s1", "2-a-s1")
    run_flow(effects().flow(actions.DiscardState(3, PATHS.checkpoint(3))), disk)
    assert disk.shared == {"33-a-s1", "2-a-s1"}
    disk.share("3-a-s2")  # written late
    disk.files[PATHS.leader(1)] = b'{"epoch":1,"nonce":"one","url":"","created_ms":0}'
    outcome = run_flow(effects().flow(actions.DropCheckpoint(3, "")), disk)
    assert outcome == events.CheckpointDropped(3)
    assert disk.shared == {"33-a-s1", "2-a-s1"}


def test_who_is_not_the_newest_leader_deletes_no_file_of_a_late_acknowledgement(disk: Disk) -> None:
    disk.files[PATHS.leader(2)] = b'{"epoch":2,"nonce":"two","url":"","created_ms":0}'
    disk.share("3-a-s1")
    disk.files[f"{PATHS.checkpoint(3)}/own"] = b"x"
    outcome = run_flow(effects().flow(actions.DiscardState(3, PATHS.checkpoint(3), ("own", "../shared/3-a-s1"))), disk)
    assert isinstance(outcome, job_events.LeadershipEnded)
    assert (disk.shared, f"{PATHS.checkpoint(3)}/own" in disk.files) == ({"3-a-s1"}, True)


def test_a_late_acknowledgement_loses_exactly_its_files(disk: Disk) -> None:
    disk.share("3-a-s1", "3-a-s2")
    disk.files[f"{PATHS.checkpoint(3)}/own"] = b"x"
    files = ("own", "../shared/3-a-s1", "../../x", "/etc/passwd")
    run_flow(effects().flow(actions.DiscardState(3, PATHS.checkpoint(3), files)), disk)
    assert disk.shared == {"3-a-s2"}
    assert f"{PATHS.checkpoint(3)}/own" not in disk.files


def test_a_checkpoint_is_found_wherever_its_job_lies(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")
    storage.execute(WriteFile(f"{PATHS.shared}/1-a-s1", (b"x",)))
    storage.execute(WriteFile(PATHS.decision(1), (snapshot(1, "1-a-s1"),)))
    elsewhere = RoutedStorage(LocalStorage(tmp_path / "other"))
    folder = str(tmp_path / "state" / PATHS.checkpoint(1))
    metadata = run_flow(load_snapshot(folder), elsewhere)
    run_flow(check_files(metadata, folder, checksums=True), elsewhere)
    where, relative = resolve_folder(folder, elsewhere)
    assert (where.root, relative) == (str(tmp_path / "state"), PATHS.checkpoint(1))


@pytest.mark.parametrize(
    ("location", "split"),
    [
        ("/state/job/chk-1", ("/state", "job/chk-1")),
        ("/state/job/chk-1/", ("/state", "job/chk-1")),
        ("/job/chk-1", ("", "job/chk-1")),
        ("/chk-1", ("", "chk-1")),
        ("/state/savepoint-1", ("/state", "savepoint-1")),
        ("/state/job/chk-x", ("/state/job", "chk-x")),
        ("s3://bucket/job/chk-1", ("s3://bucket", "job/chk-1")),
        ("s3://bucket/chk-1", ("s3://bucket", "chk-1")),
        ("file:///state/job/chk-1", ("file:///state", "job/chk-1")),
    ],
)
def test_the_storage_of_a_checkpoint_reaches_what_it_shares(location: str, split: tuple[str, str]) -> None:
    assert split_folder(location) == split


def test_names() -> None:
    assert shared_name("../shared/1-2-op-0-n-000001.sst") == "1-2-op-0-n-000001.sst"
    assert writer_of("12-2-op-0-n-000001.sst") == 12
    assert [writer_of(name) for name in ("x", "0-a", "-1-a", "1", "١-a", "01-a", "1" * 40 + "-a")] == [None] * 7
    assert [is_checkpoint_folder(name) for name in ("chk-1", "a/chk-12", "chk-", "chk-1/x", "chk-1\n", "xchk-1")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
