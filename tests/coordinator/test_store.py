"""The job's directory: write-once records, what they mean, and the order of deletions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.ha.leadership import become_leader, check_leadership, open_directory
from holdfast.coordinator.ha.recorded_job import (
    CheckpointFact,
    Completed,
    RecordedCheckpoint,
    RecordedJob,
    Unreadable,
    decode_decision,
    derive_checkpoint,
    derive_garbage,
    derive_latest,
    derive_recovery_point,
)
from holdfast.coordinator.ha.records import (
    AbortRecord,
    ClaimRecord,
    LeaderRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    decode_record,
    derive_job_id,
    encode_record,
)
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.store import (
    abort_checkpoint,
    claim_checkpoint,
    complete_savepoint,
    decide_checkpoint,
    discard_folder,
    drop_checkpoint,
    put_once,
    sweep_checkpoints,
)
from holdfast.coordinator.restore.plan import plan_submission
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CorruptStateError,
    FencedError,
    InvalidConfigError,
    StorageUnavailableError,
    UnsupportedVersionError,
)
from holdfast.statebackends.layout import JobPaths, parse_checkpoint_name
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage import resolve_folder
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, PutIfAbsent, ReadFile, WriteFile, run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.world import DictStorage

JOB = "ef" * 16
PATHS = JobPaths(JOB)


def claim(number: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT, nonce: str = "mine") -> ClaimRecord:
    return ClaimRecord(number, 1, 1, 1, kind, f"{JOB}/chk-{number}", nonce)


def snapshot(number: int) -> bytes:
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
        )
    )


def aborted(number: int) -> AbortRecord:
    return AbortRecord(number, FailureReason.EXPIRED, 1, "mine")


def recorded(
    decisions: dict[int, tuple[CheckpointKind, bytes | None]], *, unclaimed: Sequence[int] = (), **fields: Any
) -> RecordedJob:
    checkpoints = {
        number: derive_checkpoint(number, None if number in unclaimed else claim(number, kind), content)
        for number, (kind, content) in decisions.items()
    }
    record = SubmissionRecord(1, 1, submission(word_count()), None, fields.pop("first", 1), "n")
    defaults: dict[str, Any] = {"submissions": {1: record}, "attempts": {}, "results": {}}
    return RecordedJob(JOB, (1,), checkpoints=checkpoints, **{**defaults, **fields})


PLAIN = CheckpointKind.CHECKPOINT


# ------------------------------------------------------------------------------------------------------------ register


def test_first_writer_of_an_id_wins_and_the_loser_reads() -> None:
    storage = DictStorage()
    assert run_flow(claim_checkpoint(PATHS, claim(1)), storage).nonce == "mine"
    assert run_flow(claim_checkpoint(PATHS, claim(1, nonce="theirs")), storage).nonce == "mine"
    assert run_flow(decide_checkpoint(PATHS, 1, snapshot(1)), storage) is None
    assert run_flow(abort_checkpoint(PATHS, aborted(1)), storage) == Completed(1, 1)


class Ambiguous(DictStorage):
    """So many conditional writes answer ambiguously; `lands` says whether they happened."""

    def __init__(self, times: int, *, lands: bool) -> None:
        super().__init__()
        self.times = times
        self.lands = lands

    def execute(self, operation: Any) -> Any:
        if isinstance(operation, PutIfAbsent):
            self.times -= 1
            if self.times >= 0:
                if self.lands:
                    super().execute(operation)
                raise AmbiguousWriteError("timeout", path=operation.path)
        return super().execute(operation)


@pytest.mark.parametrize("lands", [True, False])
def test_ambiguous_write_is_asked_for_again(*, lands: bool) -> None:
    assert run_flow(put_once("a", b"x"), Ambiguous(1, lands=lands)) == b"x"
    with pytest.raises(AmbiguousWriteError):
        run_flow(put_once("a", b"x"), Ambiguous(2, lands=lands))


class Away(DictStorage):
    """The first conditional write lands and answers ambiguously; from then on nothing answers for so many operations."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.writes = 0

    def execute(self, operation: Any) -> Any:
        if isinstance(operation, PutIfAbsent):
            self.writes += 1
            if self.writes == 1:
                super().execute(operation)
                raise AmbiguousWriteError("timeout", path=operation.path)
        if self.reads == isinstance(operation, ReadFile):
            raise StorageUnavailableError("away", path="a")
        return super().execute(operation)


@pytest.mark.parametrize("reads", [True, False])
def test_write_that_may_have_happened_is_never_called_one_that_has_not(*, reads: bool) -> None:
    """A disk that fails to sync a name fails again when it is asked again: the name is there all the same."""
    storage = Away(reads=reads)
    with pytest.raises(AmbiguousWriteError):
        run_flow(put_once("a", b"x"), storage)
    assert storage.files == {"a": b"x"}


def test_savepoint_is_written_before_the_pointer_that_makes_it_one() -> None:
    record = SavepointRecord(3, "/sp/savepoint-1", CheckpointKind.SAVEPOINT, 1, 1, "mine")
    flow = complete_savepoint(PATHS, record, b"snapshot")
    first = next(flow)
    assert first == PutIfAbsent("/sp/savepoint-1/_metadata", b"snapshot")
    assert flow.send(True) == PutIfAbsent(f"{JOB}/chk-3/_metadata", encode_record(record))


def test_deletion_removes_the_claim_first() -> None:
    flow = drop_checkpoint(PATHS, 4)
    assert next(flow) == DeleteFile(f"{JOB}/chk-4/_claim")
    assert flow.send(True) == DeleteFolder(f"{JOB}/chk-4")


class Unnamed(DictStorage):
    """No storage has folders of such a name any more."""

    def execute(self, operation: Any) -> Any:
        if operation == DeleteFolder("file:///sp#1/savepoint-1"):
            raise InvalidConfigError("not a location", url=operation.prefix)
        return super().execute(operation)


def test_a_savepoint_folder_that_can_t_be_named_is_no_reason_to_refuse_a_recovery() -> None:
    claim = ClaimRecord(3, 1, 1, 1, CheckpointKind.SAVEPOINT, "file:///sp#1/savepoint-1", "mine")
    run_flow(sweep_checkpoints(PATHS, [RecordedCheckpoint(3, claim, None)]), Unnamed())


def test_discarding_keeps_claim_and_decision() -> None:
    storage = DictStorage()
    for name in ("_claim", "_metadata", "op-0", "op-1"):
        storage.execute(WriteFile(f"{JOB}/chk-1/{name}", [b"x"]))
    assert run_flow(discard_folder(f"{JOB}/chk-1"), storage) == 2
    assert sorted(storage.files) == [f"{JOB}/chk-1/_claim", f"{JOB}/chk-1/_metadata"]


# ------------------------------------------------------------------------------------------------------------- meaning


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (None, CheckpointFact.UNDECIDED),
        (snapshot(1), CheckpointFact.COMPLETED),
        (encode_record(aborted(1)), CheckpointFact.ABORTED),
        (snapshot(1)[:-3], CheckpointFact.COMPLETED),
        (b"\0garbage", CheckpointFact.COMPLETED),
    ],
)
def test_what_the_register_says(content: bytes | None, fact: CheckpointFact) -> None:
    assert derive_checkpoint(1, claim(1), content).fact is fact
    assert derive_checkpoint(1, None, content).fact is CheckpointFact.ORPHANED


def test_decision_is_told_apart_by_what_stands_in_it() -> None:
    savepoint = SavepointRecord(1, "/sp/savepoint-1", CheckpointKind.SAVEPOINT, 1, 1, "n")
    assert decode_decision(encode_record(savepoint)) == savepoint
    assert decode_decision(encode_record(aborted(1))) == aborted(1)
    assert isinstance(decode_decision(b"{}"), Unreadable)
    assert isinstance(decode_decision(b""), Unreadable)


def test_recovery_takes_the_newest_completed_and_never_a_plain_savepoint() -> None:
    pointer = encode_record(SavepointRecord(4, "/sp/s", CheckpointKind.SAVEPOINT, 1, 1, "n"))
    job = recorded(
        {
            2: (PLAIN, snapshot(2)),
            3: (PLAIN, snapshot(3)),
            4: (CheckpointKind.SAVEPOINT, pointer),
            5: (PLAIN, encode_record(aborted(5))),
            6: (PLAIN, None),
        }
    )
    point = derive_recovery_point(job, job.submissions[1])
    assert point is not None
    assert (point.checkpoint_id, job.newest_completed, job.last_checkpoint_id) == (3, 3, 6)


def test_recovery_ignores_checkpoints_from_before_the_submission() -> None:
    job = recorded({2: (PLAIN, snapshot(2))}, first=3)
    assert derive_recovery_point(job, job.submissions[1]) is None


def test_j08_unreadable_newest_checkpoint_is_reported_with_the_fallback() -> None:
    job = recorded({4: (PLAIN, snapshot(4)), 5: (PLAIN, snapshot(5)[:50])})
    with pytest.raises(CorruptStateError, match="checkpoint 5 is unreadable"):
        derive_latest(job)
    flow = plan_submission(job, submission(word_count(), restore="latest"))
    with pytest.raises(CorruptStateError, match="restore='latest-readable' with allow_output_repeat=True"):
        next(flow)


def test_latest_of_a_job_that_kept_nothing_is_not_where_it_began() -> None:
    """It went on from 2, completed up to 9, and ended without keeping any of it: from 2 it would write all that again."""
    base = RestorePoint(2, f"{JOB}/chk-2", 0, PLAIN)
    record = SubmissionRecord(2, 2, submission(word_count()), base, 3, "n")
    over = recorded({}, submissions={2: record}, results={2: ResultRecord(2, "FINISHED", 2, "n", 9, 9)})
    assert derive_latest(over) is None
    nothing_new = recorded({}, submissions={2: record}, results={2: ResultRecord(2, "FAILED", 2, "n", 2, 2)})
    assert derive_latest(nothing_new) == base
    live = recorded({}, submissions={2: record})
    assert derive_latest(live) == base


def test_only_orphans_and_aborted_ids_below_the_newest_completed_one_may_go() -> None:
    job = recorded(
        {
            1: (PLAIN, encode_record(aborted(1))),
            2: (PLAIN, snapshot(2)),
            3: (PLAIN, encode_record(aborted(3))),
            4: (PLAIN, snapshot(4)),
        },
        unclaimed=[4],
    )
    assert [entry.checkpoint_id for entry in derive_garbage(job)] == [1, 4]


def test_ids_go_on_behind_a_result_although_all_files_are_gone() -> None:
    result = ResultRecord(1, "FINISHED", 1, "n", last_checkpoint_id=41, newest_completed=40)
    job = recorded({}, results={1: result})
    assert (job.last_checkpoint_id, job.newest_completed, job.is_live) == (41, 40, False)


# ----------------------------------------------------------------------------------------------------- leaders, records


def test_epochs_rise_and_the_higher_one_is_seen() -> None:
    storage = DictStorage()
    for epoch, nonce in ((1, "a"), (2, "b"), (3, "c")):
        assert run_flow(become_leader(PATHS, LeaderRecord(1, nonce)), storage) == epoch
    run_flow(check_leadership(PATHS, 3), storage)
    with pytest.raises(FencedError):
        run_flow(check_leadership(PATHS, 2), storage)


def test_ambiguous_epoch_is_ours_if_it_is() -> None:
    assert run_flow(become_leader(PATHS, LeaderRecord(1, "a")), Ambiguous(1, lands=True)) == 1


def test_directory_nonce_is_the_first_one_for_ever() -> None:
    storage = DictStorage()
    assert run_flow(open_directory("one"), storage) == "one"
    assert run_flow(open_directory("two"), storage) == "one"


def test_records_of_newer_versions_and_damaged_ones_are_refused_by_path() -> None:
    newer = encode_record(msgspec.structs.replace(claim(1), version=2))
    with pytest.raises(UnsupportedVersionError, match="chk-1/_claim has version 2"):
        decode_record(ClaimRecord, newer, PATHS.claim(1))
    with pytest.raises(CorruptStateError, match="chk-1/_claim"):
        decode_record(ClaimRecord, newer[:-9], PATHS.claim(1))


def test_names_give_the_same_job_id_for_ever() -> None:
    assert derive_job_id("flights") == derive_job_id("flights")
    assert len(derive_job_id("flights")) == 32
    assert derive_job_id("flights") != derive_job_id("Flights")
    assert [parse_checkpoint_name(name) for name in ("chk-42/", "chk-7", "chk-x", "shared/")] == [42, 7, None, None]


# -------------------------------------------------------------------------------------------------------------- places


def test_snapshot_folders_are_found_wherever_they_lie(tmp_path: Path) -> None:
    default = LocalStorage(tmp_path / "state")
    assert resolve_folder(f"{JOB}/chk-1", default) == (default, f"{JOB}/chk-1")
    for form in ("{}", "file://{}"):
        storage, folder = resolve_folder(form.format(tmp_path / "sp" / "savepoint-1"), default)
        assert (storage.root, folder) == (str(tmp_path / "sp"), "savepoint-1")


def test_absolute_paths_go_to_a_storage_of_their_own(tmp_path: Path) -> None:
    routed = RoutedStorage(LocalStorage(tmp_path / "state"))
    place = f"{tmp_path}/sp/savepoint-1"
    assert routed.execute(PutIfAbsent(f"{place}/_metadata", b"x"))
    assert routed.execute(PutIfAbsent(f"{JOB}/leader/1", b"y"))
    assert routed.execute(ReadFile(f"{place}/_metadata")) == b"x"
    assert (tmp_path / "sp" / "savepoint-1" / "_metadata").read_bytes() == b"x"
    assert (tmp_path / "state" / JOB / "leader" / "1").exists()
    assert routed.execute(DeleteFolder(place)) == 1
