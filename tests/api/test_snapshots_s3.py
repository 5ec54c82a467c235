"""Snapshots between a directory and S3: copied there and back, compared, exported, verified where they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.records import ClaimRecord, SubmissionRecord, derive_job_id, encode_record
from holdfast.coordinator.ownership.fsck import FsckRequest, check_directory
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, NotFoundError
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import DeleteFile, ListFiles, PutIfAbsent, run_flow
from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import S3Connection
from tests.coordinator.doubles import submission, word_count
from tests.s3_server import bucket as bucket
from tests.s3_server import connection as connection
from tests.s3_server import server as server
from tests.statebackends.snapshot_harness import SOME, UID, files_below, write


@pytest.mark.parametrize("kind", ["filesystem", "rocksdb"])
def test_there_and_back(tmp_path: Path, bucket: str, kind: BackendKind) -> None:
    source = hf.Snapshot(write(tmp_path, "job/chk-7", SOME, kind=kind, parallelism=2).location)
    there = source.copy(f"{bucket}/archive/one")
    assert there.location == f"{bucket}/archive/one"
    again = hf.Snapshot(f"{bucket}/archive/one/_metadata")
    assert again.verify().is_sound
    assert again.diff(source).is_same
    assert again.table(UID, "count").read_all().num_rows == 3
    back = again.copy(tmp_path / "back")
    assert back.metadata == again.metadata
    assert files_below(tmp_path / "back").keys() == files_below(Path(source.location)).keys()
    with pytest.raises(InvalidConfigError, match="holds a snapshot: nothing is overwritten"):
        source.copy(f"{bucket}/archive/one/")
    with pytest.raises(InvalidConfigError, match="lies in the snapshot itself"):
        again.export(f"{bucket}/archive/one/new")
    with pytest.raises(NotFoundError, match=f"{bucket}/archive/two holds no snapshot"):
        hf.Snapshot(f"{bucket}/archive/two")


def test_damage_there_is_found_and_a_failed_copy_leaves_nothing(tmp_path: Path, bucket: str, connection: S3Connection) -> None:
    savepoint = write(tmp_path, "savepoint-7", SOME, canonical=True)
    there = hf.Snapshot(savepoint.location).copy(f"{bucket}/one")
    storage = S3Storage(bucket, connection)
    path = "one/totals-0-1-n-count.parquet"
    storage.execute(DeleteFile(path))
    storage.execute(PutIfAbsent(path, b"something else"))
    (problem,) = there.verify().problems
    assert (problem.kind, problem.operator, problem.path) == ("length", UID, path)
    before = storage.execute(ListFiles(""))
    for write_to in (there.copy, there.export):
        with pytest.raises(CorruptStateError, match="14 bytes instead of"):
            write_to(f"{bucket}/two")
    assert storage.execute(ListFiles("")) == before


def test_an_export_goes_there(tmp_path: Path, bucket: str, connection: S3Connection) -> None:
    report = hf.Snapshot(write(tmp_path, "job/chk-7", SOME).location).export(f"{bucket}/exported", uid=UID, state="count")
    assert report.location == f"{bucket}/exported"
    files = S3Storage(bucket, connection).execute(ListFiles(""))
    assert files == ["exported/_export.json", "exported/totals/count/part-00000.parquet"]


def test_fsck_of_a_state_directory_there(bucket: str, connection: S3Connection, tmp_path: Path) -> None:
    storage = S3Storage(f"{bucket}/state", connection)
    storage.execute(PutIfAbsent("_holdfast", b"nonce"))
    paths = JobPaths(derive_job_id("word count"))
    write(tmp_path, paths.checkpoint(7), SOME, kind="filesystem", storage=storage)
    claim = ClaimRecord(7, 1, 1, 1, CheckpointKind.CHECKPOINT, paths.checkpoint(7), "n")
    record = SubmissionRecord(1, 1, submission(word_count()), None, 1, "n")
    storage.execute(PutIfAbsent(paths.claim(7), encode_record(claim)))
    storage.execute(PutIfAbsent(paths.submission(1), encode_record(record)))
    storage.execute(PutIfAbsent(f"{paths.checkpoint(6)}/left", b"x"))
    before = storage.execute(ListFiles(""))
    report = hf.fsck(f"{bucket}/state", safety_age_ms=0)
    assert [file.path for file in report.orphans] == [f"{paths.checkpoint(6)}/left"]
    assert sum(cost.files for cost in report.costs) == len(before)
    assert report.problems == ()
    assert len(hf.fsck(f"{bucket}/state").young) == 1
    request = FsckRequest(safety_age_ms=0, repair=True, nonce="n", leader_may_live="who knows")
    held = run_flow(check_directory(request, storage.root, 1 << 60), storage)
    assert held.refused == {paths.job_id: "its leader may be alive: who knows"}
    done = run_flow(check_directory(replace(request, leader_may_live=""), storage.root, 1 << 60), storage)
    assert [file.path for file in done.deleted] == [f"{paths.checkpoint(6)}/left"]
    assert storage.execute(ListFiles("")) == [path for path in before if "/chk-6/" not in path]
