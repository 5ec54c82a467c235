"""Requests to S3 that fail: who made an object is known whenever it can be known, and every error names bucket and key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    InvalidConfigError,
    StorageAccessError,
    StorageThrottledError,
    StorageUnavailableError,
)
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import PART_BYTES_MIN, S3Connection
from tests.s3_server import App, Fault, S3Server, Silence, SimClock, Start, after, answer, connect, read_body, reset, truncate
from tests.statebackends.s3_fixtures import clock, connection, first, server, storage
from tests.statebackends.storage_contract import DATA, PATH, read

__all__ = ["clock", "connection", "first", "server", "storage"]

PUT = ops.PutIfAbsent(PATH, DATA)
BIG = PART_BYTES_MIN + 1
SLOW_DOWN = answer(503, "SlowDown")
BROKEN = answer(500, "InternalError")


def bucket_of(storage: S3Storage) -> str:
    return storage.root.split("/")[2]


# --------------------------------------------------------------------------------------------------- conditional creates


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        (after(answer(412, "PreconditionFailed")), ["PUT", "HEAD"]),  # something on the way repeated it
        (after(reset), ["PUT", "PUT", "HEAD"]),
        (after(BROKEN), ["PUT", "PUT", "HEAD"]),
        (after(answer(504, "GatewayTimeout")), ["PUT", "PUT", "HEAD"]),
        (reset, ["PUT", "PUT"]),
        (BROKEN, ["PUT", "PUT"]),
        (SLOW_DOWN, ["PUT", "PUT"]),
        (answer(429, "TooManyRequests"), ["PUT", "PUT"]),
        (answer(409, "ConditionalRequestConflict"), ["PUT", "PUT"]),
        (answer(400, "RequestTimeout"), ["PUT", "PUT"]),
    ],
)
def test_a_create_that_failed_once_is_ours(storage: S3Storage, server: S3Server, fault: Fault, requests: list[str]) -> None:
    server.fail(fault, on="PUT")
    assert storage.execute(PUT) is True
    assert server.names() == requests
    assert read(storage) == DATA
    assert storage.execute(PUT) is False


@pytest.mark.parametrize("instead", [reset, BROKEN, SLOW_DOWN, answer(409, "ConditionalRequestConflict")])
@pytest.mark.parametrize("content", [DATA, b"other"])
def test_a_rival_that_came_between_wins_also_with_the_same_bytes(
    storage: S3Storage, server: S3Server, instead: Fault, content: bytes
) -> None:
    def rival(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
        assert storage.execute(ops.PutIfAbsent(PATH, content)) is True
        return instead(environ, start, app)

    server.fail(rival, on="PUT")
    assert storage.execute(PUT) is False
    assert read(storage) == content


@pytest.mark.parametrize("heads", ["answer", "fail"])
def test_a_create_without_any_answer_is_ambiguous(storage: S3Storage, server: S3Server, clock: SimClock, heads: str) -> None:
    server.fail(reset, on="PUT", times=-1)
    if heads == "fail":
        server.fail(reset, on="HEAD", times=-1)
    with pytest.raises(AmbiguousWriteError, match="may or may not") as caught:
        storage.execute(PUT)
    assert (caught.value.bucket, caught.value.key) == (bucket_of(storage), f"state/{PATH}")
    assert caught.value.path == f"{storage.root}/{PATH}"
    assert 20 < clock.now <= 30, "the deadline"
    server.heal()
    assert read(storage) is None


def test_whoever_made_it_is_looked_up_when_time_is_over(storage: S3Storage, server: S3Server) -> None:
    server.fail(after(reset), on="PUT", times=-1)
    assert storage.execute(PUT) is True, "each try was lost, and one did it"
    server.heal()
    server.fail(reset, on="PUT", times=-1)
    assert storage.execute(ops.PutIfAbsent(PATH, b"other")) is False, "somebody's, so that none of ours can land any more"


def test_what_exists_and_can_not_be_looked_at_is_ambiguous(storage: S3Storage, server: S3Server) -> None:
    server.fail(after(answer(412, "PreconditionFailed")), on="PUT")
    server.fail(BROKEN, on="HEAD", times=-1)
    with pytest.raises(AmbiguousWriteError):
        storage.execute(PUT)


def test_what_existed_and_is_gone_is_created_again(storage: S3Storage, server: S3Server) -> None:
    server.fail(answer(412, "PreconditionFailed"), on="PUT")
    assert storage.execute(PUT) is True
    assert [name for name in server.names() if name == "PUT"] == ["PUT", "PUT"]


def test_a_late_write_changes_nothing(storage: S3Storage, server: S3Server) -> None:
    silence = Silence()
    server.fail(silence, on="PUT")
    impatient = connect(server, read_timeout_ms=300)
    slow = S3Storage(storage.root, impatient)
    impatient.once("conditions", bucket_of(storage), lambda: None)
    assert slow.execute(PUT) is True, "the second try"
    assert storage.execute(ops.DeleteFile(PATH)) is True
    assert storage.execute(ops.PutIfAbsent(PATH, b"newer")) is True
    silence.released.set()
    assert silence.served.wait(30)
    assert read(storage) == b"newer"
    impatient.close()


def test_refusals_alone_are_no_ambiguity(storage: S3Storage, server: S3Server, clock: SimClock) -> None:
    server.fail(SLOW_DOWN, on="PUT", times=-1)
    with pytest.raises(StorageThrottledError, match="SlowDown") as caught:
        storage.execute(PUT)
    assert (caught.value.bucket, caught.value.key) == (bucket_of(storage), f"state/{PATH}")
    assert clock.now <= 30
    assert max(clock.sleeps) <= 5
    assert len(server.names()) < 60
    server.heal()
    assert storage.execute(PUT) is True


def test_a_store_that_ignores_conditions_is_refused(server: S3Server, connection: S3Connection) -> None:
    def ignoring(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return app(environ, start)

    storage = S3Storage(f"s3://{server.new_bucket(connection)}/state", connection)
    server.fail(ignoring, on="PUT", times=-1)
    for _ in range(2):
        with pytest.raises(InvalidConfigError, match="If-None-Match"):
            storage.execute(PUT)
    server.heal()
    assert read(storage) is None
    assert connection.call("list_objects_v2", Bucket=bucket_of(storage))["KeyCount"] == 0
    server.fail(answer(501, "NotImplemented"), on="PUT")
    with pytest.raises(InvalidConfigError, match="NotImplemented"):
        storage.execute(PUT)
    server.names()
    assert storage.execute(PUT) is True
    assert server.names() == ["PUT", "PUT", "HEAD", "DELETE", "PUT"]
    assert storage.execute(ops.PutIfAbsent("another", DATA)) is True
    assert server.names() == ["PUT"], "it was tried once"


# --------------------------------------------------------------------------------------------------- writes and links


WRITES: list[tuple[Callable[[], ops.Operation], str]] = [
    (lambda: ops.WriteFile("b", [DATA]), "PUT"),
    (lambda: ops.WriteFile("b", [bytes(BIG)]), "POST uploadId"),
    (lambda: ops.LinkFile("a", "b"), "POST uploadId"),
]


@pytest.mark.parametrize(("make", "request_name"), WRITES, ids=["small", "large", "link"])
@pytest.mark.parametrize("fault", [after(reset), reset, SLOW_DOWN, BROKEN, after(answer(412, "PreconditionFailed"))])
def test_other_creates_that_failed_once_are_ours_too(
    storage: S3Storage, server: S3Server, make: Callable[[], ops.Operation], request_name: str, fault: Fault
) -> None:
    storage.execute(ops.WriteFile("a", [DATA]))
    server.fail(fault, on=request_name)
    assert storage.execute(make()) in (len(DATA), BIG, True)
    assert storage.execute(ops.StatFile("b")) in (len(DATA), BIG)


@pytest.mark.parametrize(
    "fault",
    [after(answer(404, "NoSuchUpload")), answer(200, "InternalError"), after(answer(200, "InternalError"))],
    ids=["done before", "error inside", "error inside after success"],
)
def test_a_completion_that_is_told_wrongly(storage: S3Storage, server: S3Server, fault: Fault) -> None:
    server.fail(fault, on="POST uploadId")
    assert storage.execute(ops.WriteFile("b", [bytes(BIG)])) == BIG
    assert storage.execute(ops.StatFile("b")) == BIG


def test_an_upload_that_somebody_aborted_fails_and_may_be_tried_again(storage: S3Storage, server: S3Server) -> None:
    server.fail(answer(404, "NoSuchUpload"), on="POST uploadId")
    with pytest.raises(StorageUnavailableError, match="NoSuchUpload"):
        storage.execute(ops.WriteFile("b", [bytes(BIG)]))
    assert storage.execute(ops.WriteFile("b", [bytes(BIG)])) == BIG


@pytest.mark.parametrize(("make", "request_name"), WRITES, ids=["small", "large", "link"])
def test_other_creates_without_any_answer_are_ambiguous(
    storage: S3Storage, server: S3Server, connection: S3Connection, make: Callable[[], ops.Operation], request_name: str
) -> None:
    storage.execute(ops.WriteFile("a", [DATA]))
    server.fail(reset, on=request_name, times=-1)
    with pytest.raises(AmbiguousWriteError):
        storage.execute(make())
    server.heal()
    assert read(storage, "b") is None
    assert connection.call("list_multipart_uploads", Bucket=bucket_of(storage)).get("Uploads", []) == []


@pytest.mark.parametrize("name", ["PUT partNumber", "POST uploads"])
def test_parts_are_sent_again(storage: S3Storage, server: S3Server, name: str) -> None:
    for fault in (reset, SLOW_DOWN, after(BROKEN)):
        server.fail(fault, on=name)
    assert storage.execute(ops.WriteFile("b", [bytes(BIG)])) == BIG
    assert read(storage, "b") == bytes(BIG)


def test_an_upload_that_can_not_be_aborted_is_told(storage: S3Storage, server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    server.fail(answer(403, "AccessDenied"), on="PUT partNumber", times=-1)
    server.fail(answer(403, "AccessDenied"), on="DELETE uploadId", times=-1)
    with pytest.raises(StorageAccessError):
        storage.execute(ops.WriteFile("b", [bytes(BIG)]))
    assert "could not be aborted" in caplog.text


# ----------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("fault", [truncate, reset, SLOW_DOWN, BROKEN])
def test_reads_are_repeated(storage: S3Storage, server: S3Server, tmp_path: Path, fault: Fault) -> None:
    data = bytes(range(256)) * ((BIG + 99) // 256)
    storage.execute(ops.WriteFile("a", [data]))
    for _ in range(2):
        server.fail(fault, on="GET")
    assert storage.execute(ops.ReadFile("a")) == data
    for _ in range(2):
        server.fail(fault, on="GET")
    storage.execute(ops.DownloadFile("a", str(tmp_path / "a")))
    assert (tmp_path / "a").read_bytes() == data
    assert storage.execute(ops.ReadFile("a", 3, 4)) == data[3:7]


def test_a_body_that_always_ends_early_is_an_error_and_leaves_the_local_file(
    storage: S3Storage, server: S3Server, tmp_path: Path
) -> None:
    storage.execute(ops.WriteFile("a", [DATA]))
    (tmp_path / "a").write_bytes(b"before")
    server.fail(truncate, on="GET", times=-1)
    for operation in (ops.ReadFile("a"), ops.DownloadFile("a", str(tmp_path / "a"))):
        with pytest.raises(StorageUnavailableError) as caught:
            storage.execute(operation)
        assert type(caught.value) is StorageUnavailableError
    assert (tmp_path / "a").read_bytes() == b"before"


def test_a_whole_answer_with_too_little_in_it_is_asked_for_again(storage: S3Storage, server: S3Server) -> None:
    def short(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
        headers = [("Content-Range", f"bytes 0-{len(DATA) - 1}/{len(DATA)}"), ("Content-Length", "5"), ("ETag", '"x"')]
        start("206 Partial Content", headers)
        return [DATA[:5]]

    storage.execute(ops.WriteFile("a", [DATA]))
    server.fail(short, on="GET", times=2)
    assert storage.execute(ops.ReadFile("a")) == DATA


def test_a_store_that_ignores_ranges_is_read_all_the_same(storage: S3Storage, server: S3Server) -> None:
    def whole(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
        environ.pop("HTTP_RANGE", None)
        return app(environ, start)

    storage.execute(ops.WriteFile("a", [DATA]))
    server.fail(whole, on="GET", times=-1)
    assert storage.execute(ops.ReadFile("a", 2, 5)) == DATA[2:7]
    assert storage.execute(ops.ReadFile("a", 7)) == DATA[7:]
    assert storage.execute(ops.ReadFile("a", 99)) == b""


def test_pieces_of_two_versions_are_never_joined(storage: S3Storage, connection: S3Connection, server: S3Server) -> None:
    def replaced(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
        found = list(app(environ, start))
        connection.call("put_object", Bucket=bucket_of(storage), Key="state/a", Body=b"\1" * BIG)
        return found

    storage.execute(ops.WriteFile("a", [bytes(BIG)]))
    server.fail(replaced, on="GET")
    with pytest.raises(StorageUnavailableError, match="PreconditionFailed"):
        read(storage, "a")


# ---------------------------------------------------------------------------------------------------------- deleting


def test_objects_that_were_not_deleted_are_asked_for_again(storage: S3Storage, server: S3Server) -> None:
    for name in "abc":
        storage.execute(ops.WriteFile(f"job/{name}", [DATA]))

    def one_left(code: str) -> Fault:
        def fault(environ: dict[str, Any], start: Start, app: App) -> Iterable[bytes]:
            wanted = read_body(environ)
            asked.append(wanted.count(b"<Key>"))
            error = f"<Error><Key>state/job/b</Key><Code>{code}</Code><Message>later</Message></Error>"
            body = f"<?xml version='1.0'?><DeleteResult>{error}</DeleteResult>".encode()
            start("200 OK", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]

        return fault

    asked: list[int] = []
    server.fail(one_left("SlowDown"), on="POST delete")
    server.fail(one_left("InternalError"), on="POST delete")
    assert storage.execute(ops.DeleteFolder("job")) == 3
    assert asked == [3, 1]
    storage.execute(ops.WriteFile("job/b2", [DATA]))
    server.fail(one_left("AccessDenied"), on="POST delete")
    with pytest.raises(StorageAccessError, match="denied"):
        storage.execute(ops.DeleteFolder("job"))


@pytest.mark.parametrize("fault", [reset, after(reset), SLOW_DOWN, BROKEN])
def test_deletions_are_repeated(storage: S3Storage, server: S3Server, fault: Fault) -> None:
    storage.execute(ops.WriteFile("a", [DATA]))
    server.fail(fault, on="DELETE")
    assert storage.execute(ops.DeleteFile("a")) is True
    assert read(storage, "a") is None
