"""What people and programs are told when S3 refuses: errors that name bucket and key."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    InvalidConfigError,
    InvariantError,
    ObjectMissingError,
    OutOfSpaceError,
    StorageAccessError,
    StorageThrottledError,
    StorageUnavailableError,
)
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import PART_BYTES_MIN, S3Connection, S3Settings, failure_of
from tests.s3_server import App, S3Server, SimClock, Start, answer, connect, read_body
from tests.statebackends.s3_fixtures import clock, connection, first, server, storage
from tests.statebackends.storage_contract import DATA, PATH
from tests.statebackends.test_s3_faults import PUT, SLOW_DOWN, bucket_of

__all__ = ["clock", "connection", "first", "server", "storage"]


def all_operations(tmp_path: Path) -> list[ops.Operation]:
    local = tmp_path / "local"
    local.write_bytes(DATA)
    return [
        PUT,
        ops.WriteFile(PATH, [DATA]),
        ops.UploadFile(str(local), PATH),
        ops.DownloadFile(PATH, str(tmp_path / "down")),
        ops.ReadFile(PATH),
        ops.ReadFile(PATH, 0, 0),
        ops.StatFile(PATH),
        ops.ListFiles("job"),
        ops.ListFolder("job"),
        ops.LinkFile("a", PATH),
        ops.DeleteFile(PATH),
        ops.DeleteFolder("job"),
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("InvalidAccessKeyId", "credentials"),
        ("SignatureDoesNotMatch", "credentials"),
        ("ExpiredToken", "credentials"),
        ("RequestTimeTooSkewed", "credentials"),
        ("AccessDenied", "denied"),
        ("AccountProblem", "denied"),
    ],
)
def test_refused_access_is_told_at_once_by_every_operation(
    storage: S3Storage, server: S3Server, clock: SimClock, tmp_path: Path, code: str, reason: str
) -> None:
    for operation in all_operations(tmp_path):
        server.fail(answer(403, code), times=-1)
        with pytest.raises(StorageAccessError, match=code) as caught:
            storage.execute(operation)
        error = caught.value
        assert (error.reason, error.bucket) == (reason, bucket_of(storage))
        assert error.key == f"state/{ops.path_of(operation)}"
        assert bucket_of(storage) in str(error)
        assert ops.path_of(operation) in str(error)
        assert type(pickle.loads(pickle.dumps(error))) is StorageAccessError
        server.heal()
    assert clock.sleeps == []


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (507, "InsufficientStorage"),
        (507, "XMinioStorageFull"),
        (507, "Anything"),
        (403, "QuotaExceeded"),
        (503, "InsufficientCapacity"),
    ],
)
def test_a_full_store_is_told_by_its_name_and_not_asked_again(
    storage: S3Storage, server: S3Server, clock: SimClock, status: int, code: str
) -> None:
    storage.execute(PUT)  # that conditions work is known
    server.fail(answer(status, code), on="PUT", times=-1)
    for operation in (ops.WriteFile("other", [DATA]), ops.PutIfAbsent("other", DATA)):
        with pytest.raises(OutOfSpaceError, match=code) as caught:
            storage.execute(operation)
        assert caught.value.fields["key"] == "state/other"
    assert clock.sleeps == []
    server.fail(answer(503, "ServiceUnavailable"), on="HEAD", times=-1)
    with pytest.raises(AmbiguousWriteError):  # some of its disks may have it, and nobody knows
        storage.execute(ops.PutIfAbsent("other", DATA))


def test_a_missing_bucket_is_told_by_every_operation(connection: S3Connection, clock: SimClock, tmp_path: Path) -> None:
    storage = S3Storage("s3://no-such-bucket/state", connection)
    for operation in all_operations(tmp_path):
        with pytest.raises(StorageAccessError, match="no bucket 'no-such-bucket'") as caught:
            storage.execute(operation)
        assert caught.value.reason == "bucket"
    assert clock.sleeps == []


def test_throttling_until_the_deadline_is_told_by_every_operation(storage: S3Storage, server: S3Server, tmp_path: Path) -> None:
    server.fail(SLOW_DOWN, times=-1)
    for operation in all_operations(tmp_path):
        with pytest.raises(StorageThrottledError) as caught:
            storage.execute(operation)
        assert caught.value.path == f"{storage.root}/{ops.path_of(operation)}"


def test_a_bucket_that_may_not_be_looked_at_is_none_that_is_missing(storage: S3Storage, server: S3Server) -> None:
    server.fail(answer(403, "AccessDenied"), on="HEAD", key=f"/{bucket_of(storage)}", times=-1)
    assert storage.execute(ops.StatFile("none")) is None


def test_missing_objects_are_named(storage: S3Storage) -> None:
    for operation in (ops.ReadFile("x/y"), ops.DownloadFile("x/y", "/none"), ops.LinkFile("x/y", "z"), ops.ReadFile("x/y", 0, 0)):
        with pytest.raises(ObjectMissingError) as caught:
            storage.execute(operation)
        assert caught.value.path.startswith(f"{storage.root}/")


def test_no_credentials_at_all(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    connection = connect(server)
    with pytest.raises(StorageAccessError, match="credentials") as caught:
        S3Storage("s3://bucket/state", connection).execute(ops.ReadFile("a"))
    assert caught.value.reason == "credentials"
    connection.close()


def test_nobody_listens(first: S3Connection) -> None:
    clock = SimClock()
    connection = S3Connection(S3Settings(endpoint_url="http://127.0.0.1:9"), clock=clock, sleep=clock.sleep)
    storage = S3Storage("s3://bucket/state", connection)
    connection.once("conditions", "bucket", lambda: None)
    with pytest.raises(StorageUnavailableError, match="Could not connect") as caught:
        storage.execute(PUT)
    assert type(caught.value) is StorageUnavailableError, "nothing was sent: that is no ambiguity"
    assert 20 < clock.now <= 30
    connection.close()


def test_settings_that_no_client_takes(server: S3Server) -> None:
    for settings in ({"endpoint_url": "no url"}, {"region": "not a region"}):
        connection = S3Connection(S3Settings(**settings))  # type: ignore[arg-type]
        with pytest.raises(InvalidConfigError):
            S3Storage("s3://bucket/state", connection).execute(ops.ReadFile("a"))


def test_a_bug_is_no_failure_of_storage() -> None:
    with pytest.raises(ZeroDivisionError):
        failure_of(ZeroDivisionError())


def test_a_name_used_twice_is_told_with_its_place(storage: S3Storage) -> None:
    storage.execute(ops.WriteFile(PATH, [DATA]))
    with pytest.raises(InvariantError, match=f"{storage.root}/{PATH}"):
        storage.execute(ops.WriteFile(PATH, [b"other"]))


def page(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
    """Something on the way answers with a page of its own, and says that all is well."""
    read_body(environ)
    body = b"<html>please log in</html>"
    start("200 OK", [("Content-Type", "text/html"), ("Content-Length", str(len(body)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def test_a_page_of_a_proxy_is_taken_for_no_answer(storage: S3Storage, server: S3Server, tmp_path: Path) -> None:
    """Not for a write that was done, nor for a folder without files: a coordinator would take a job for a new one."""
    server.fail(page, times=-1)
    for operation in all_operations(tmp_path):
        with pytest.raises(StorageUnavailableError):
            storage.execute(operation)
    server.heal()
    assert storage.execute(ops.ListFiles("job")) == []


@pytest.mark.parametrize("length", [len(DATA), PART_BYTES_MIN + 1])
def test_after_a_page_of_a_proxy_the_request_is_repeated(storage: S3Storage, server: S3Server, length: int) -> None:
    data = bytes(length)
    for name in ("PUT", "POST", "HEAD", "GET"):
        server.fail(page, on=name)
    assert storage.execute(ops.PutIfAbsent(PATH, DATA)) is True
    storage.execute(ops.WriteFile("job/big", [data]))
    assert storage.execute(ops.ListFiles("job")) == sorted(["job/big", PATH])
    assert storage.execute(ops.ReadFile("job/big")) == data
    assert (storage.execute(ops.StatFile(PATH)), storage.execute(ops.ReadFile(PATH))) == (len(DATA), DATA)
