"""Every kind of error: its status, its body, and its way back to a typed error."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.api.client import RestClient
from holdfast.api.errors import BodyTooLargeError, ConnectionLostError, RemoteError, decode_error, encode_error, status_of
from holdfast.statebackends import errors as kinds
from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    NotLeaderError,
    SnapshotClaimedError,
)
from tests.api.fakes import JOB, FakeCoordinator, Served
from tests.examples import examples

ALL_KINDS = sorted(
    (kind for kind in vars(kinds).values() if isinstance(kind, type) and issubclass(kind, HoldfastError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_kind_survives_the_wire(kind: type[HoldfastError]) -> None:
    error = kind.of("it broke: ü", {"path": "a/ü", "count": 3, "nested": {"a": [1, None]}})
    wire = encode_error(error)
    back = decode_error(wire.status, wire.body, wire.headers)
    assert type(back) is kind
    assert (back.message, back.fields) == (error.message, error.fields)
    assert pickle.loads(pickle.dumps(back)).fields == error.fields


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("InvalidConfigError", 400),
        ("GraphError", 400),
        ("ProtocolError", 400),
        ("UnclaimedStateError", 400),
        ("CorruptStateError", 400),
        ("UnsupportedVersionError", 400),
        ("AuthenticationError", 401),
        ("AccessDeniedError", 403),
        ("NotFoundError", 404),
        ("FencedError", 409),
        ("JobExistsError", 409),
        ("InvariantError", 500),
        ("JobFailedError", 500),
        ("StorageUnavailableError", 503),
        ("AmbiguousWriteError", 503),
        ("StorageAccessError", 503),
        ("StorageThrottledError", 503),
        ("OutOfSpaceError", 503),
        ("TooManyFilesError", 503),
        ("PermissionDeniedError", 503),
        ("InputOutputError", 503),
    ],
)
def test_status(name: str, status: int) -> None:
    assert status_of(getattr(kinds, name)("x")) == status


def test_own_kinds_survive_too() -> None:
    for error in (BodyTooLargeError("x", size_max=1), NotLeaderError("x"), ConnectionLostError("x"), RemoteError("x", status=500)):
        wire = encode_error(error)
        assert type(decode_error(wire.status, wire.body, wire.headers)) is type(error)


def test_a_declared_field_is_an_attribute_and_only_what_was_given_travels() -> None:
    error = CorruptStateError("x", path="a/b", reason="missing")
    assert (error.path, error.reason, error.operator) == ("a/b", "missing", None)
    assert error.fields == {"path": "a/b", "reason": "missing"}
    error.operator = "op"
    assert error.fields == {"path": "a/b", "reason": "missing", "operator": "op"}
    assert pickle.loads(pickle.dumps(error)).operator == "op"


def test_a_field_that_only_a_newer_coordinator_knows_stays_one_of_the_fields() -> None:
    wire = encode_error(JobExistsError.of("x", {"state": "FAILED", "since": 5}))
    back = decode_error(wire.status, wire.body, wire.headers)
    assert isinstance(back, JobExistsError)
    assert (back.fields, back.state) == ({"state": "FAILED", "since": 5}, "FAILED")
    assert not hasattr(back, "since")


def test_a_required_field_that_the_wire_left_out_says_so() -> None:
    error = encode_error(SnapshotClaimedError("x", path="p" * 10_000, owner="job"))
    back = decode_error(error.status, error.body, error.headers)
    assert isinstance(back, SnapshotClaimedError)
    assert back.owner == "job"
    with pytest.raises(AttributeError, match="came without its field 'path'"):
        _ = back.path


def test_large_fields_are_left_out_before_small_ones() -> None:
    wire = encode_error(InvalidConfigError.of("x", {"big": "b" * 10_000, "small": "s"}))
    assert decode_error(400, wire.body, wire.headers).fields == {"small": "s"}


@settings(max_examples=examples(40), deadline=None)
@given(
    message=st.text(max_size=200),
    fields=st.dictionaries(
        st.text(min_size=1, max_size=20) | st.sampled_from(["message", "self", "args", "fields", "with_traceback", "__class__"]),
        st.none() | st.integers() | st.text(max_size=50) | st.lists(st.text(max_size=5), max_size=3),
        max_size=5,
    ),
)
def test_any_message_and_fields_travel(message: str, fields: dict[str, Any]) -> None:
    wire = encode_error(NotFoundError.of(message or "x", fields))
    assert all(value.isascii() and "\n" not in value and "\r" not in value for value in wire.headers.values())
    back = decode_error(wire.status, wire.body, wire.headers)
    assert (back.message, back.fields) == (message or "x", fields)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, b"", kinds.AuthenticationError),
        (404, b'{"errors": ["gone"]}', NotFoundError),
        (409, b"<html>", RemoteError),
        (422, b'{"errors": "x"}', InvalidConfigError),
        (500, b'{"errors": ["a", "b"]}', RemoteError),
        (502, b"\xff\xfe", RemoteError),
        (503, b"[]", NotLeaderError),
    ],
)
def test_answers_of_others_get_the_nearest_kind(status: int, body: bytes, kind: type[HoldfastError]) -> None:
    error = decode_error(status, body, {"X-Holdfast-Error": "NoSuchKind", "X-Holdfast-Fields": "{"})
    assert type(error) is kind
    assert error.message


@pytest.mark.parametrize("kind", ["FencedError", "JobExistsError", "StorageUnavailableError", "RestoreError"])
def test_the_client_raises_what_the_service_raised(served: Served, coordinator: FakeCoordinator, kind: str) -> None:
    coordinator.error = getattr(kinds, kind)("no", job=JOB)
    client = RestClient(served.url, served.token, reconnect_timeout_s=0)
    with pytest.raises(getattr(kinds, kind)) as caught:
        client.job(JOB)
    assert caught.value.fields == {"job": JOB}


def test_a_bug_is_500_and_tells_nothing_of_its_inside(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.error = RuntimeError("the secret")
    response = served.request("GET", f"/v1/jobs/{JOB}")
    assert (response.status, response.json()) == (500, {"errors": ["internal error: RuntimeError"]})
