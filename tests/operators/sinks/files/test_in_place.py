"""Files staged where readers find them, on stores whose links are copies: what each commit asks for, and what a sweep may take."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from holdfast.barriers.sinks.log import SinkPaths
from holdfast.operators.sinks.files.parquet import committed_files, read_committed
from holdfast.statebackends.errors import CommittableLostError
from holdfast.statebackends.storage.port import DeleteFile, ListFiles, copies_links
from holdfast.statebackends.storage.s3 import S3Storage
from tests.operators.ports import DictStorage
from tests.operators.sinks.files.minijob import ROOT, MiniJob, MortalStorage
from tests.s3_server import S3Server
from tests.statebackends.s3_fixtures import clock, connection, first, server, storage

__all__ = ["clock", "connection", "first", "server", "storage"]

PATHS = SinkPaths("out", in_place=True)


def rows_in(storage: Any) -> list[int]:
    rows: list[int] = read_committed(ROOT, "out", open_storage=lambda url: storage).column("i").to_pylist()
    return rows


def job_on(storage: Any) -> MiniJob:
    return MiniJob(storage, DictStorage())


def test_rows_are_copied_once_on_their_way_to_readers_of_s3(storage: S3Storage, server: S3Server) -> None:
    job = job_on(storage)
    job.start()
    job.emit(1)
    job.checkpoint()  # asks whether the bucket is there, once
    job.emit(2)
    server.names()
    job.checkpoint()
    requests = list(server.requests)
    asked = Counter(server.names())
    assert asked == {
        "PUT": 3,  # the marker, the rows, the entry of the log
        "HEAD": 6,  # of two links, and of two deletions
        "POST uploads": 1,
        "PUT partNumber": 1,  # the one copy, for plain readers
        "POST uploadId": 1,
        "DELETE": 1,  # of the marker
    }
    assert [request.path.rpartition("/")[2][:5] for request in requests if request.name == "PUT partNumber"] == ["part-"]
    assert rows_in(storage) == [0, 1, 2]
    names = [file.rpartition("/")[2] for file in committed_files(storage, "out")]
    assert [path for path in storage.execute(ListFiles("")) if path.startswith("part-")] == sorted(names)
    assert [path for path in storage.execute(ListFiles("")) if "/staged/" in path] == []


def test_what_an_older_version_staged_is_committed(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_on(storage)
    with monkeypatch.context() as older:
        older.setattr(S3Storage, "copies_links", False)
        job.start()
        job.emit(3)
        job.decide(job.snapshot())
    job.start()
    job.emit(2)
    job.checkpoint()
    assert rows_in(storage) == [0, 1, 2, 3, 4]
    assert [path for path in storage.execute(ListFiles("")) if "/staged/" in path] == []


def in_place() -> MortalStorage:
    storage = MortalStorage({})
    storage.copies_links = True
    assert copies_links(storage)
    return storage


def kept(storage: MortalStorage) -> tuple[int, int]:
    """Files in `data`, and markers."""
    return sum("/data/" in path for path in storage.files), sum("/staged/" in path for path in storage.files)


def test_a_sweep_takes_what_was_never_committed_and_its_marker() -> None:
    storage = in_place()
    job = job_on(storage)
    job.start()
    job.emit(3)
    job.checkpoint()
    job.emit(3)
    job.abort(job.snapshot())
    assert kept(storage) == (2, 1)
    job.start()
    assert kept(storage) == (1, 0)
    assert rows_in(storage) == [0, 1, 2]


def test_a_sweep_leaves_committed_rows_whose_marker_is_left() -> None:
    """The markers of two commits come back: the job goes on from a state that knows nothing of these files any more."""
    storage = in_place()
    job = job_on(storage)
    job.start()
    left: dict[str, bytes] = {}
    for _ in range(3):
        job.emit(3)
        snapshot = job.snapshot()
        left |= {path: data for path, data in storage.files.items() if "/staged/" in path}
        job.decide(snapshot)
        job.notify(snapshot.checkpoint_id)
    job.checkpoint()
    for number in range(1, 4):  # retention; else these checkpoints protect their files
        job.state.execute(DeleteFile(f"job-a/chk-{number}/_claim"))
        job.state.execute(DeleteFile(f"job-a/chk-{number}/_metadata"))
    storage.files |= left
    assert kept(storage) == (3, 3)
    job.start()
    assert kept(storage) == (3, 0)
    assert rows_in(storage) == list(range(9))


def test_a_savepoint_protects_what_is_staged_in_place() -> None:
    storage = in_place()
    job = job_on(storage)
    job.start()
    job.emit(3)
    job.decide(job.snapshot(), savepoint=True)
    job.start()
    assert kept(storage) == (1, 1)


def test_rows_that_are_gone_are_no_empty_file() -> None:
    """The marker is left, and is no source of a link."""
    storage = in_place()
    job = job_on(storage)
    job.start()
    job.emit(3)
    snapshot = job.snapshot()
    job.decide(snapshot)
    for path in [path for path in storage.files if "/data/" in path]:
        del storage.files[path]
    with pytest.raises(CommittableLostError):
        job.notify(snapshot.checkpoint_id)
