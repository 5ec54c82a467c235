"""Whose a file is, from what was seen: one line a case."""

from __future__ import annotations

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.ha.recorded_job import Completed, Decision, RecordedCheckpoint, RecordedJob, Unreadable
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, ResultRecord, SavepointRecord, SubmissionRecord
from holdfast.coordinator.ownership.files import (
    Ages,
    Claims,
    FileStatus,
    JobEvidence,
    OwnerKind,
    assign_directory,
    assign_owners,
    refusal,
)
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.storage.port import FileFacts
from tests.coordinator.doubles import submission, word_count

JOB = "ab" * 16
NOW, AGE = 10_000, 1_000
OLD = NOW - AGE
SNAPSHOT = SnapshotMetadata(
    job_id=JOB, job_name="n", checkpoint_id=5, kind="checkpoint", attempt=1, epoch=1, trigger_timestamp_ms=0,
    completion_timestamp_ms=0,
)  # fmt: skip


def claim(number: int) -> ClaimRecord:
    return ClaimRecord(number, 1, 1, 1, CheckpointKind.CHECKPOINT, f"{JOB}/chk-{number}", "n")


def recorded(number: int, decision: Decision | None, *, claimed: bool = True) -> RecordedCheckpoint:
    return RecordedCheckpoint(number, claim(number) if claimed else None, decision)


DONE = Completed(5, 0)
ABORTED = AbortRecord(4, FailureReason.EXPIRED, 1, "n")
SAVEPOINT = SavepointRecord(3, "/s/savepoint", CheckpointKind.SAVEPOINT, 0, 1, "n")


def job(*checkpoints: RecordedCheckpoint, ended: bool = False, submissions: int = 2) -> RecordedJob:
    records = {number: SubmissionRecord(number, 1, submission(word_count()), None, 1, "n") for number in range(1, submissions + 1)}
    results = {submissions: ResultRecord(submissions, "FINISHED", 1, "n", 7, 5)} if ended else {}
    return RecordedJob(JOB, (1,), records, {}, results, {each.checkpoint_id: each for each in checkpoints}, submissions)


ALL = job(
    recorded(1, None, claimed=False),
    recorded(2, Unreadable("damaged")),
    recorded(3, SAVEPOINT),
    recorded(4, ABORTED),
    recorded(5, DONE),
    recorded(6, None),
    recorded(9, DONE, claimed=False),
)
CLAIMS = Claims(frozenset({f"{JOB}/chk-5/a", f"{JOB}/shared/2-x", f"{JOB}/chk-1/borrowed"}), False)


def one(path: str, *, evidence: RecordedJob | None = ALL, claims: Claims = CLAIMS, modified_ms: int = OLD) -> tuple[str, str]:
    seen = JobEvidence(
        JOB,
        evidence,
        snapshots={5: SNAPSHOT},
        inputs={
            f"{JOB}/sources/s/000001": frozenset({f"{JOB}/sources/s/000001/w/0.arrow"}),
            f"{JOB}/sources/s/000002": None,
            f"{JOB}/sources/s/000003/batches/000000000004": frozenset({f"{JOB}/sources/s/000003/batches/000000000004/w/0.arrow"}),
        },
        files=(FileFacts(f"{JOB}/{path}", 1, modified_ms),),
    )
    (found,) = assign_owners(seen, claims, Ages(NOW, AGE))
    return found.kind.value, found.status.value


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        ("leader/3", "records", "owned"),
        ("submissions/1.json", "records", "owned"),
        ("history/2-17.jsonl", "history", "owned"),
        (f"drills/{NOW:015d}-{'d' * 32}.json", "history", "owned"),
        ("drills/notes.json", "unknown", "owned"),
        ("attempts/x.json", "unknown", "owned"),
        ("notes", "unknown", "owned"),
        ("chk-1", "unknown", "owned"),
        ("chk-1/a", "checkpoints", "orphan"),
        ("chk-1/_metadata", "checkpoints", "orphan"),
        ("chk-1/borrowed", "checkpoints", "owned"),
        ("chk-2/a", "checkpoints", "owned"),
        ("chk-3/_metadata", "checkpoints", "owned"),
        ("chk-3/a", "checkpoints", "orphan"),
        ("chk-4/_claim", "checkpoints", "owned"),
        ("chk-4/a", "checkpoints", "orphan"),
        ("chk-5/_claim", "checkpoints", "owned"),
        ("chk-5/a", "checkpoints", "owned"),
        ("chk-5/b", "checkpoints", "orphan"),
        ("chk-6/a", "checkpoints", "owned"),
        ("chk-8/a", "checkpoints", "owned"),
        ("chk-9/a", "checkpoints", "owned"),
        ("labels/1", "records", "owned"),
        ("labels/5", "records", "owned"),
        ("labels/6", "records", "owned"),
        ("labels/7", "records", "orphan"),
        ("labels/9", "records", "owned"),
        ("labels/99", "records", "orphan"),
        ("forgotten/3.json", "records", "owned"),
        ("forgotten/x.json", "unknown", "owned"),
        ("labels/x", "unknown", "owned"),
        ("shared/2-x", "shared", "owned"),
        ("shared/1-y", "shared", "owned"),
        ("taskowned/1-1-u-0-n", "taskowned", "owned"),
        ("taskowned/some/where/else", "taskowned", "owned"),
        ("taskowned", "unknown", "owned"),
        ("sources/s/000001/manifest.json", "sources", "owned"),
        ("sources/s/000001/w/0.arrow", "sources", "owned"),
        ("sources/s/000001/v/0.arrow", "sources", "orphan"),
        ("sources/s/000002/v/0.arrow", "sources", "owned"),
        ("sources/t/000001/v/0.arrow", "sources", "orphan"),
        ("sources/t/000002/v/0.arrow", "sources", "owned"),
        ("sources/s/000003/stream.json", "sources", "owned"),
        ("sources/s/000003/query/offsets/7", "sources", "owned"),
        ("sources/s/000003/owners/000001.json", "sources", "owned"),
        ("sources/s/000003/batches/000000000004/manifest.json", "sources", "owned"),
        ("sources/s/000003/batches/000000000004/w/0.arrow", "sources", "owned"),
        ("sources/s/000003/batches/000000000004/v/0.arrow", "sources", "orphan"),
        ("sources/s/000003/batches/000000000003/w/0.arrow", "sources", "orphan"),
        ("sources/s/000003/batches/000000000005/w/0.arrow", "sources", "owned"),
        ("sinks/s/owner", "sinks", "owned"),
    ],
)
def test_owner_of_a_file(path: str, kind: str, status: str) -> None:
    assert one(path) == (kind, status)
    if status == "orphan":
        assert one(path, modified_ms=OLD + 1) == (kind, "young")
    if kind != "unknown":
        assert one(path, evidence=None)[1] == "owned", "nothing is known of a job with a damaged record"


@pytest.mark.parametrize(
    ("name", "checkpoints", "claims", "status"),
    [
        ("5-1-u-0-n", (recorded(5, DONE),), CLAIMS, "orphan"),
        ("5-1-u-0-n", (recorded(5, DONE), recorded(6, None)), CLAIMS, "owned"),
        ("5-1-u-0-n", (recorded(5, DONE),), Claims(frozenset(), True), "owned"),
        ("5-1-u-0-n", (recorded(5, DONE),), Claims(frozenset({f"{JOB}/shared/5-1-u-0-n"}), False), "owned"),
        ("6-1-u-0-n", (recorded(5, DONE),), CLAIMS, "owned"),
        ("someone's", (recorded(5, DONE),), CLAIMS, "owned"),
    ],
)
def test_a_shared_file_is_an_orphan_only_if_nobody_may_name_it(
    name: str, checkpoints: tuple[RecordedCheckpoint, ...], claims: Claims, status: str
) -> None:
    assert one(f"shared/{name}", evidence=job(*checkpoints), claims=claims) == ("shared", status)


def test_an_orphaned_folder_with_the_highest_id_is_the_id_counter() -> None:
    orphan = recorded(9, None, claimed=False)
    assert one("chk-9/a", evidence=job(orphan))[1] == "owned"
    assert one("chk-9/a", evidence=job(orphan, recorded(10, None)))[1] == "orphan"
    higher = job(orphan, ended=True)
    assert one("chk-9/a", evidence=higher)[1] == "owned", "the result knows of 7 ids"
    assert one("chk-7/a", evidence=job(recorded(7, None, claimed=False), ended=True))[1] == "orphan"


@pytest.mark.parametrize(
    ("evidence", "settled", "doubt", "refused"),
    [
        (job(), True, "", ""),
        (job(), True, "lock", "leader may be alive: lock"),
        (job(submissions=0), True, "lock", "leader may be alive: lock"),
        (job(ended=True), True, "lock", ""),
        (job(ended=True), False, "", "it changed"),
        (None, True, "", "can't be read"),
    ],
)
def test_when_a_job_is_left_alone(evidence: RecordedJob | None, settled: bool, doubt: str, refused: str) -> None:
    reason = refusal(JobEvidence(JOB, evidence, "damage", is_settled=settled), doubt)
    assert refused in reason
    assert bool(reason) == bool(refused)


def test_files_of_no_job() -> None:
    paths = {
        "_holdfast": (OwnerKind.RECORDS, FileStatus.OWNED),
        "_coordinator.json": (OwnerKind.RECORDS, FileStatus.OWNED),
        "_fsck/n": (OwnerKind.RECORDS, FileStatus.ORPHAN),
        "keep/savepoint-1/_metadata": (OwnerKind.SAVEPOINTS, FileStatus.OWNED),
        "keep/savepoint-1/stray": (OwnerKind.SAVEPOINTS, FileStatus.OWNED),
        "keep/savepoint-2/begun": (OwnerKind.SAVEPOINTS, FileStatus.OWNED),
        "keep/other": (OwnerKind.UNKNOWN, FileStatus.OWNED),
        "_holdfast/s/log/000000000001.json": (OwnerKind.SINKS, FileStatus.OWNED),
        "part-s.parquet": (OwnerKind.SINKS, FileStatus.OWNED),
        "out/_holdfast/s/data/part-x.parquet": (OwnerKind.SINKS, FileStatus.OWNED),
        "out/part-x.parquet": (OwnerKind.SINKS, FileStatus.OWNED),
        "out/day=2026-01-01/n=1/part-x.csv": (OwnerKind.SINKS, FileStatus.OWNED),
        "out/other/part-x.csv": (OwnerKind.UNKNOWN, FileStatus.OWNED),
        "elsewhere/part-x.parquet": (OwnerKind.UNKNOWN, FileStatus.OWNED),
    }
    files = [FileFacts(path, 1, 0) for path in paths]
    found = assign_directory(files, {"keep/savepoint-1": SNAPSHOT}, ["keep/savepoint-2"], Ages(NOW, AGE))
    assert {file.path: (file.kind, file.status) for file in found} == paths
    assert {file.job_id for file in found if "savepoint-1" in file.path} == {JOB}
