"""Storage on S3 against a real server: the contract, transfers in parts, and which requests an operation makes."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
import holdfast.statebackends.storage.s3 as s3
import holdfast.statebackends.storage.s3_transfer as s3_transfer
from holdfast.statebackends.errors import InvalidConfigError, InvariantError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage import resolve_folder, s3_connection
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.s3 import S3Storage, open_s3
from holdfast.statebackends.storage.s3_connection import PART_BYTES_MIN, S3Connection, S3Settings
from holdfast.statebackends.storage.s3_transfer import Transfers
from tests.s3_server import S3Server, answer, connect
from tests.simulation.test_objectstore import answer as outcome
from tests.simulation.test_objectstore import some_operation
from tests.statebackends.s3_fixtures import clock, connection, first, server, storage
from tests.statebackends.storage_contract import DATA, PATH, StorageContract, read

__all__ = ["clock", "connection", "first", "server", "storage"]


class TestContract(StorageContract):
    """On a prefix of a bucket."""


class TestContractOfWholeBucket(StorageContract):
    """Without a prefix."""

    @pytest.fixture
    def storage(self, server: S3Server, connection: S3Connection) -> S3Storage:
        return S3Storage(f"s3://{server.new_bucket(connection)}", connection)


@pytest.mark.parametrize("seed", range(3))
def test_bucket_and_directory_answer_alike(storage: S3Storage, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    directory = LocalStorage(tmp_path / "state")
    for _ in range(60):
        operation = some_operation(rng, tmp_path)
        assert outcome(storage, operation) == outcome(directory, operation), operation
    assert storage.execute(ops.ListFiles("")) == directory.execute(ops.ListFiles(""))


def test_put_if_absent_has_one_winner(storage: S3Storage) -> None:
    barrier, won = threading.Barrier(6), []

    def contend(index: int) -> None:
        barrier.wait()
        if storage.at(storage.root).execute(ops.PutIfAbsent(PATH, str(index).encode())):
            won.append(index)

    threads = [threading.Thread(target=contend, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert read(storage) == str(won[0]).encode()


# ------------------------------------------------------------------------------------------------------------ requests


def test_what_each_operation_asks_for(storage: S3Storage, server: S3Server, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(DATA)
    expected: list[tuple[ops.Operation, list[str]]] = [
        (ops.PutIfAbsent("a", DATA), ["PUT"]),
        (ops.PutIfAbsent("a", DATA), ["PUT", "HEAD"]),
        (ops.WriteFile("b", [DATA, DATA]), ["PUT"]),
        (ops.UploadFile(str(local), "c"), ["PUT"]),
        (ops.DownloadFile("c", str(local)), ["GET"]),
        (ops.ReadFile("c"), ["GET"]),
        (ops.ReadFile("c", 2, 3), ["GET"]),
        (ops.ReadFile("c", 0, 0), ["HEAD"]),
        (ops.StatFile("c"), ["HEAD"]),
        (ops.StatFile("none"), ["HEAD", "HEAD"]),  # the bucket's own, once
        (ops.StatFile("none"), ["HEAD"]),
        (ops.LinkFile("c", "d"), ["HEAD", "HEAD", "POST uploads", "PUT partNumber", "POST uploadId"]),
        (ops.DeleteFile("d"), ["HEAD", "DELETE"]),
        (ops.DeleteFile("d"), ["HEAD"]),
        (ops.ListFiles(""), ["GET list-type"]),
        (ops.ListFolder(""), ["GET list-type"]),
        (ops.DeleteFolder("none"), ["GET list-type"]),
    ]
    for operation, names in expected:
        storage.execute(operation)
        assert server.names() == names, operation


def test_lists_and_deletions_of_many_pages(storage: S3Storage, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [f"job/{folder}/{index}" for folder in "ab" for index in range(4)]
    for path in paths:
        storage.execute(ops.WriteFile(path, [b"x"]))
    storage.execute(ops.WriteFile("jobs", [b"x"]))
    monkeypatch.setattr(s3, "PAGE_KEYS_MAX", 3)
    server.names()
    assert storage.execute(ops.ListFiles("job")) == paths
    assert server.names() == ["GET list-type"] * 3
    assert storage.execute(ops.ListFolder("job")) == ["a/", "b/"]
    server.names()
    assert storage.execute(ops.DeleteFolder("job")) == 8
    assert server.names() == ["GET list-type", "POST delete"] * 3
    assert storage.execute(ops.ListFiles("")) == ["jobs"]


def test_what_is_not_ours_to_see_is_hidden_and_goes_with_its_folder(storage: S3Storage, connection: S3Connection) -> None:
    bucket = storage.root.split("/")[2]
    for key in ("state/.tmp/x", "state/job/", "state/job/a"):
        connection.call("put_object", Bucket=bucket, Key=key, Body=b"")
    assert storage.execute(ops.ListFiles("")) == ["job/a"]
    assert storage.execute(ops.ListFolder("")) == ["job/"]
    assert storage.execute(ops.ListFolder("job")) == ["a"]
    assert storage.execute(ops.DeleteFolder("job")) == 2
    assert storage.execute(ops.ListFolder("")) == []


# --------------------------------------------------------------------------------------------------------------- parts


BIG = 2 * PART_BYTES_MIN + 12_345


def uploads_left(storage: S3Storage, connection: S3Connection) -> list[Any]:
    return connection.call("list_multipart_uploads", Bucket=storage.root.split("/")[2]).get("Uploads", [])


def test_large_files_travel_in_parts(storage: S3Storage, connection: S3Connection, server: S3Server, tmp_path: Path) -> None:
    data = os.urandom(BIG)
    local, back = tmp_path / "local", tmp_path / "back"
    local.write_bytes(data)
    expected = (BIG, checksum_of(data))
    assert storage.execute(ops.UploadFile(str(local), "a")) == expected
    assert sorted(server.names()) == ["POST uploadId", "POST uploads", *["PUT partNumber"] * 3]
    assert storage.execute(ops.DownloadFile("a", str(back))) == expected
    assert back.read_bytes() == data
    assert server.names() == ["GET"] * 3
    assert storage.execute(ops.ReadFile("a", 5, PART_BYTES_MIN + 1)) == data[5 : PART_BYTES_MIN + 6]
    assert storage.execute(ops.ReadFile("a", PART_BYTES_MIN * 2)) == data[PART_BYTES_MIN * 2 :]
    chunks: list[bytes | bytearray | memoryview]
    chunks = [data[:7], memoryview(data)[7 : PART_BYTES_MIN + 9], bytearray(data[PART_BYTES_MIN + 9 :])]
    assert storage.execute(ops.WriteFile("b", chunks)) == BIG
    assert read(storage, "b") == data
    # again, and with other bytes, under names that exist
    assert storage.execute(ops.WriteFile("b", chunks)) == BIG
    assert storage.execute(ops.UploadFile(str(local), "a")) == expected
    local.write_bytes(data[:-1] + b"?" if data[-1:] != b"?" else data[:-1] + b"!")
    with pytest.raises(InvariantError, match="twice"):
        storage.execute(ops.UploadFile(str(local), "a"))
    assert read(storage, "a") == data
    assert uploads_left(storage, connection) == []


@pytest.mark.parametrize("size", [PART_BYTES_MIN - 1, PART_BYTES_MIN, PART_BYTES_MIN + 1, 2 * PART_BYTES_MIN])
def test_sizes_around_a_part(storage: S3Storage, tmp_path: Path, size: int) -> None:
    data = bytes(size)
    assert storage.execute(ops.WriteFile("a", [data])) == size
    assert read(storage, "a") == data
    assert storage.execute(ops.DownloadFile("a", str(tmp_path / "back"))) == (size, checksum_of(data))


def test_a_bounded_number_of_parts_is_held(storage: S3Storage, connection: S3Connection) -> None:
    transfers = Transfers(connection, storage.root.split("/")[2])
    sent = itertools.count(1)
    done = 0
    send, held = transfers._send_part, []

    def counting(upload: dict[str, str], number: int, block: Any) -> str:
        nonlocal done
        etag = send(upload, number, block)
        done = next(sent)
        return etag

    def blocks() -> Iterator[bytes]:
        for number in range(12):
            held.append(number + 1 - done)
            yield bytes([number]) * PART_BYTES_MIN

    transfers._send_part = counting  # type: ignore[method-assign]
    assert transfers.upload("a", blocks()) is True
    assert max(held) <= connection.settings.parts_in_flight_max + 1
    assert [piece[0] for piece in transfers.read("a")] == list(range(12))


def test_parts_grow_with_the_object_so_that_there_are_never_too_many(connection: S3Connection) -> None:
    transfers = Transfers(connection, "bucket")
    assert transfers.block_bytes(10) == PART_BYTES_MIN
    size = PART_BYTES_MIN * s3_transfer.PARTS_MAX + 1
    assert -(-size // transfers.block_bytes(size)) <= s3_transfer.PARTS_MAX
    with pytest.raises(InvalidConfigError, match="part_bytes"):
        S3Connection(S3Settings(part_bytes=1))


@pytest.mark.parametrize("code", ["SlowDown", "AccessDenied"])
def test_a_failed_upload_leaves_no_parts(storage: S3Storage, connection: S3Connection, server: S3Server, code: str) -> None:
    server.fail(answer(503 if code == "SlowDown" else 403, code), on="PUT partNumber", times=-1)
    with pytest.raises(StorageUnavailableError, match=code):
        storage.execute(ops.WriteFile("a", [bytes(BIG)]))
    server.heal()
    assert uploads_left(storage, connection) == []
    assert read(storage, "a") is None


def test_without_threads_for_parts_storage_is_unavailable_and_no_part_is_left(storage: S3Storage, connection: S3Connection) -> None:
    class NoThreads:
        def submit(self, action: Any) -> Any:
            raise RuntimeError("can't start new thread")

    connection._pool = NoThreads()  # type: ignore[assignment]
    with pytest.raises(StorageUnavailableError, match="can't start new thread"):
        storage.execute(ops.WriteFile("a", [bytes(BIG)]))
    connection._pool = None
    assert uploads_left(storage, connection) == []
    storage.execute(ops.WriteFile("a", [bytes(BIG)]))
    assert read(storage, "a") == bytes(BIG)


def test_a_local_file_that_fails_midway_leaves_no_parts(storage: S3Storage, connection: S3Connection) -> None:
    def blocks() -> Iterator[bytes]:
        yield bytes(PART_BYTES_MIN)
        yield bytes(PART_BYTES_MIN)
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input"):
        Transfers(connection, storage.root.split("/")[2]).upload("a", blocks())
    assert uploads_left(storage, connection) == []


def test_a_full_local_disk_is_told_with_the_systems_words(storage: S3Storage, tmp_path: Path) -> None:
    storage.execute(ops.WriteFile("a", [DATA]))
    with pytest.raises(StorageUnavailableError, match="No such file or directory"):
        storage.execute(ops.DownloadFile("a", str(tmp_path / "none" / "file")))
    with pytest.raises(StorageUnavailableError, match="directory"):
        storage.execute(ops.UploadFile(str(tmp_path), "b"))


# --------------------------------------------------------------------------------------------------------------- links


def test_links_of_empty_large_and_odd_files(
    storage: S3Storage, connection: S3Connection, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_transfer, "COPY_PART_BYTES", PART_BYTES_MIN)
    data = os.urandom(BIG)
    for path, content in (("empty", b""), ("big", data), ("odd ü+%2F name", DATA)):
        storage.execute(ops.WriteFile(path, [content]))
        assert storage.execute(ops.LinkFile(path, f"link/{path}")) is True
        assert read(storage, f"link/{path}") == content
        assert storage.execute(ops.LinkFile(path, f"link/{path}")) is False
    # the same bytes in one part have another tag
    connection.call("put_object", Bucket=storage.root.split("/")[2], Key="state/whole", Body=data)
    assert storage.execute(ops.LinkFile("whole", "link/big")) is False
    assert uploads_left(storage, connection) == []


def test_a_source_that_vanishes_is_missing(storage: S3Storage, connection: S3Connection, server: S3Server) -> None:
    storage.execute(ops.WriteFile("a", [DATA]))

    def vanish(environ: Any, start: Any, app: Any) -> Any:
        connection.call("delete_object", Bucket=storage.root.split("/")[2], Key="state/a")
        return answer(404, "NoSuchKey")(environ, start, app)

    server.fail(vanish, on="PUT partNumber")
    with pytest.raises(ObjectMissingError) as caught:
        storage.execute(ops.LinkFile("a", "b"))
    assert caught.value.path == f"{storage.root}/a"
    assert uploads_left(storage, connection) == []
    assert read(storage, "b") is None


def test_a_rival_that_links_first_wins(storage: S3Storage, server: S3Server) -> None:
    for path, content in (("a", DATA), ("b", DATA), ("c", b"other")):
        storage.execute(ops.WriteFile(path, [content]))

    def rival(source: str) -> Any:
        def first_served(environ: Any, start: Any, app: Any) -> Any:
            storage.execute(ops.WriteFile("link-" + source, [DATA if source == "b" else b"other"]))
            return app(environ, start)

        return first_served

    server.fail(rival("b"), on="POST uploadId")
    assert storage.execute(ops.LinkFile("a", "link-b")) is False
    server.fail(rival("c"), on="POST uploadId")
    with pytest.raises(InvariantError, match="other content"):
        storage.execute(ops.LinkFile("a", "link-c"))


# ----------------------------------------------------------------------------------------------------------- locations


def test_locations(tmp_path: Path) -> None:
    assert open_storage("s3://bucket/a/b/").root == "s3://bucket/a/b"
    assert open_storage("s3://bucket").root == open_storage("s3://bucket/").root == "s3://bucket"
    assert open_storage("s3://bucket/100%/ü").root == "s3://bucket/100%/ü"
    assert open_storage(str(tmp_path)).root == str(tmp_path)
    assert open_storage(f"file://{tmp_path}").root == str(tmp_path)
    for bad in ("s3://", "s3:///x", "s3://b/x", "s3://user@bucket/x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bu\0cket"):
        with pytest.raises(InvalidConfigError):
            open_storage(bad)
    with pytest.raises(InvalidConfigError, match="'gs'"):
        open_storage("gs://bucket/x")


def test_every_storage_reaches_every_other(storage: S3Storage, tmp_path: Path) -> None:
    local = open_storage(str(tmp_path / "state"))
    there = local.at("s3://bucket/savepoints")
    assert (type(there), there.root) == (S3Storage, "s3://bucket/savepoints")
    back = there.at(str(tmp_path / "savepoints"))
    assert (type(back), back.root) == (LocalStorage, str(tmp_path / "savepoints"))
    assert back.at("file:///x").at("s3://bucket").root == "s3://bucket"
    found, folder = resolve_folder("s3://bucket/savepoints/savepoint-1", local)
    assert (found.root, folder) == ("s3://bucket/savepoints", "savepoint-1")
    found, folder = resolve_folder("s3://bucket/savepoint-1", there)
    assert (found.root, folder) == ("s3://bucket", "savepoint-1")
    for location in ("s3://bucket", "gs://bucket/x/y"):
        with pytest.raises(InvalidConfigError):
            resolve_folder(location, local)
    assert storage.at("s3://another/x")._connection is storage._connection  # type: ignore[attr-defined]


def test_clients_share_what_they_read_and_it_does_not_grow_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    found = [s3_connection._make_client(S3Settings()) and list(s3_connection._descriptions(None).search_paths) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(found[0])


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidConfigError, match=r"pip install boto3") as caught:
        open_s3("s3://bucket/x")
    assert caught.value.package == "boto3"


def test_boto3_is_installed_with_holdfast_and_imported_when_a_bucket_is_first_named(tmp_path: Path) -> None:
    project = tomllib.loads((Path(hf.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert {"boto3", "botocore"} <= {re.split("[<>=]", needed)[0] for needed in project["dependencies"]}
    assert project["optional-dependencies"]["s3"] == []
    program = (
        "import sys, holdfast as hf\n"
        "from holdfast.statebackends.storage.locations import open_storage\n"
        "hf.Environment('job'), hf.Snapshot, hf.ParquetSink('out')\n"
        f"open_storage({str(tmp_path)!r})\n"
        "print('boto3' in sys.modules)\n"
        "open_storage('s3://bucket/folder')\n"
        "print('boto3' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_connection_may_be_used_again_after_it_was_closed(server: S3Server) -> None:
    connection = connect(server)
    storage = S3Storage(f"s3://{server.new_bucket(connection)}", connection)
    assert storage.execute(ops.PutIfAbsent(PATH, DATA)) is True
    connection.close()
    assert read(storage) == DATA
    connection.close()
