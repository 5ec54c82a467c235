"""Snapshots between a directory and S3: copied there and back, compared, exported, verified where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from statebackends.errors import CorruptStateError, InvalidConfigError, NotFoundError
from statebackends.storage.operations import DeleteFile, ListFiles, PutIfAbsent
from statebackends.storage.s3 import S3Storage
from statebackends.storage.s3_connection import S3Connection
from tests.s3_server import CREDENTIALS, S3Server, connect
from tests.statebackends.snapshot_harness import SOME, UID, files_below, write


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": server.url}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def connection(server: S3Server) -> Iterator[S3Connection]:
    connection = connect(server)
    yield connection
    connection.close()


@pytest.fixture
def bucket(server: S3Server, connection: S3Connection) -> str:
    return f"s3://{server.new_bucket(connection)}"


@pytest.mark.parametrize("kind", ["filesystem", "rocksdb"])
def test_there_and_back(tmp_path: Path, bucket: str, kind: str) -> None:
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
