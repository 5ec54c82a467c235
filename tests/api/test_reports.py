"""What workers post does not pass through FastAPI: it is judged, answered and counted as if it did."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fastapi.routing import APIRoute

from holdfast.api.access.audit_log import read_audit
from holdfast.api.access.authenticator import Authenticator
from holdfast.api.access.roles import Access, classify
from holdfast.api.routes import workers
from holdfast.api.routes.reports import ENDPOINTS, ROUTES, Reports
from holdfast.barriers import codec
from holdfast.barriers.messages import AckBatch, DeclineCheckpoint, FailureReason, Heartbeat
from holdfast.statebackends.errors import FencedError, NotLeaderError, RecoveringError
from tests.api.fakes import JOB, SOURCE, TOKEN, FakeCoordinator, Served, serving

WORKERS = f"/v1/jobs/{JOB}/workers"
ACKS = codec.encode(AckBatch(1, 0, "s1", (DeclineCheckpoint(1, 6, SOURCE, 0, FailureReason.DECLINED, "no"),)))
PACKED = codec.encode_msgpack(AckBatch(1, 0, "s1", (DeclineCheckpoint(1, 6, SOURCE, 0, FailureReason.DECLINED, "no"),))) or b""
AS_MSGPACK = {"Content-Type": codec.MSGPACK_TYPE}
BEAT = codec.encode(Heartbeat(0, "s1", 1))
STATES = b'{"epoch":1,"slot":0,"session":"s1","states":[]}'


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


class Asked(NamedTuple):
    """One request; the path is below that of the job's workers, or whole."""

    path: str
    body: bytes = ACKS
    token: str | None = TOKEN
    headers: dict[str, str] = {}  # noqa: RUF012
    error: BaseException | None = None
    method: str = "POST"


def requests(worker: str, foreign: str, viewer: str) -> dict[str, Asked]:
    """By what is peculiar about each."""
    return {
        "acks": Asked("/0/acks"),
        "heartbeat": Asked("/0/heartbeat", BEAT),
        "states": Asked("/0/states", STATES),
        "an answer to nothing": Asked("/0/answers", b"{}"),
        "its own id": Asked("/0/acks", headers={"X-Request-Id": "mine-1"}),
        "of a worker": Asked("/0/acks", token=worker),
        "of a foreign worker": Asked("/0/acks", token=foreign),
        "of a viewer": Asked("/0/acks", token=viewer),
        "no token": Asked("/0/acks", token=None),
        "a wrong token": Asked("/0/acks", token="x"),
        "a forged token": Asked("/0/acks", token=worker[:-1] + ("0" if worker[-1] != "0" else "1")),
        "a password": Asked("/0/acks", token=None, headers={"Authorization": basic(TOKEN)}),
        "a password from elsewhere": Asked(
            "/0/acks", token=None, headers={"Authorization": basic(TOKEN), "Origin": "http://evil.example"}
        ),
        "a cookie": Asked("/0/acks", token=None, headers={"Cookie": "holdfast-1=x", "Origin": "http://evil.example"}),
        "packed": Asked("/0/acks", PACKED, headers=AS_MSGPACK),
        "packed, with a parameter": Asked("/0/acks", PACKED, headers={"Content-Type": "Application/MsgPack; v=1"}),
        "json, with a charset": Asked("/0/acks", headers={"Content-Type": "application/json; charset=utf-8"}),
        "another type": Asked("/0/acks", headers={"Content-Type": "text/plain"}),
        "form data": Asked("/0/acks", headers={"Content-Type": "application/x-www-form-urlencoded"}),
        "packed for another slot": Asked("/1/acks", PACKED, headers=AS_MSGPACK),
        "packed, cut off": Asked("/0/acks", PACKED[:-1], headers=AS_MSGPACK),
        "malformed": Asked("/0/acks", b"{"),
        "deep": Asked("/0/acks", b"[" * 100_000),
        "too large": Asked("/0/acks", b" " * 200_001),
        "another slot": Asked("/1/acks"),
        "a slot beyond": Asked("/32768/acks"),
        "a slot of zeros": Asked("/00/acks"),
        "a negative slot": Asked("/-1/acks"),
        "another job": Asked(f"/v1/jobs/{'d' * 32}/workers/0/acks"),
        "no job": Asked("/v1/jobs/d/workers/0/acks"),
        "a line break": Asked("/0/acks%0A"),
        "encoded": Asked("/0/%61cks"),
        "a query": Asked("/0/acks?x=1"),
        "a slash more": Asked("/0/acks/"),
        "another method": Asked("/0/acks", method="PUT"),
        "fenced": Asked("/0/acks", error=FencedError("attempt 1 is over", attempt=1)),
        "recovering": Asked("/0/acks", error=RecoveringError("not yet", job=JOB)),
        "led elsewhere": Asked("/0/acks", error=NotLeaderError("elsewhere", job=JOB, epoch=3)),
        "a bug": Asked("/0/acks", error=ZeroDivisionError("no")),
    }


CASES = tuple(requests("hfw_x", "hfw_y", "z"))


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeCoordinator, Served, dict[str, Asked]]]:
    folder, coordinator = tmp_path_factory.mktemp("reports"), FakeCoordinator()
    with serving(coordinator, folder, body_bytes_max=200_000) as served:
        viewer = served.json("POST", "/v1/tokens", {"role": "viewer"}, status=201)["token"]
        minting = Authenticator(str(folder), TOKEN)
        tokens = minting.worker_token(JOB, 1), minting.worker_token("d" * 32, 1), viewer
        yield coordinator, served, requests(*tokens)


def ask(coordinator: FakeCoordinator, served: Served, asked: Asked) -> tuple[int, dict[str, str], bytes, list[Any]]:
    coordinator.reset()
    coordinator.error = asked.error
    path = asked.path if asked.path.startswith("/v1") else WORKERS + asked.path
    headers = {**asked.headers, **({"Authorization": f"Bearer {asked.token}"} if asked.token else {})}
    answer = served.http.request(asked.method, served.url + path, body=asked.body, headers=headers)
    told = {name.lower(): value for name, value in answer.headers.items() if name.lower() != "date"}
    named = told.pop("x-request-id")
    assert named == asked.headers.get("X-Request-Id", named)
    return answer.status, told, answer.data, coordinator.calls


@pytest.mark.parametrize("case", CASES)
def test_a_report_is_answered_as_fastapi_would(
    limited: tuple[FakeCoordinator, Served, dict[str, Asked]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Status, headers, body, and what reaches the coordinator."""
    coordinator, served, asked = limited
    directly = ask(coordinator, served, asked[case])
    monkeypatch.setattr(Reports, "takes", lambda self, scope: False)
    assert ask(coordinator, served, asked[case]) == directly
    assert directly[0] != 404 or case in ("no job", "a line break", "a slash more", "another job")


def test_what_workers_post_again_and_again_is_served_directly(
    limited: tuple[FakeCoordinator, Served, dict[str, Asked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side of the comparison: without it both sides could be FastAPI's."""
    coordinator, served, asked = limited
    passed = list[str]()
    fastapi_handles = APIRoute.handle

    async def handle(route: APIRoute, *arguments: Any) -> None:
        passed.append(route.path)
        await fastapi_handles(route, *arguments)

    monkeypatch.setattr(APIRoute, "handle", handle)
    for case in ("acks", "heartbeat", "states", "of a worker", "malformed", "a query", "encoded"):
        ask(coordinator, served, asked[case])
    assert passed == []
    ask(coordinator, served, asked["a slot of zeros"])
    assert len(passed) == 1


UNKNOWN = b"\xa1x"
"""A field that the record does not have, whose value is skipped."""

REFUSED: dict[str, tuple[str | None, bytes, int, str]] = {
    "a type of its own": ("application/x-holdfast", ACKS, 415, "application/x-holdfast"),
    "form data": ("application/x-www-form-urlencoded", ACKS, 415, "form"),
    "an empty type": ("", ACKS, 415, "content type"),
    "two types": ("application/json, application/msgpack", ACKS, 415, "content type"),
    "a long type": ("x" * 5_000, ACKS, 415, "content type"),
    "an unknown type before its body": ("text/plain", b"[" * 150_000, 415, "text/plain"),
    "json as msgpack": (codec.MSGPACK_TYPE, ACKS, 400, "AckBatch"),
    "msgpack as json": (codec.JSON_TYPE, PACKED, 400, "AckBatch"),
    "msgpack without a type": (None, PACKED, 400, "AckBatch"),
    "nothing": (codec.MSGPACK_TYPE, b"", 400, "AckBatch"),
    "cut off": (codec.MSGPACK_TYPE, PACKED[:-1], 400, "AckBatch"),
    "more behind it": (codec.MSGPACK_TYPE, PACKED + b"\x00", 400, "AckBatch"),
    "no record": (codec.MSGPACK_TYPE, b"\x90", 400, "AckBatch"),
    "no text": (codec.MSGPACK_TYPE, PACKED.replace(b"\xa2s1", b"\xa2\xff\xff"), 400, "AckBatch"),
    "an unknown tag": (codec.MSGPACK_TYPE, PACKED.replace(b"decline", b"declinf", 1), 400, "items[0]"),
    "an array of four milliards": (codec.MSGPACK_TYPE, b"\x81\xa5items\xdd" + b"\xff" * 4, 400, "AckBatch"),
    "bytes of four milliards": (codec.MSGPACK_TYPE, b"\x81" + UNKNOWN + b"\xc6" + b"\xff" * 4, 400, "AckBatch"),
    "a map of four milliards": (codec.MSGPACK_TYPE, b"\xdf" + b"\xff" * 4, 400, "AckBatch"),
    "deep": (codec.MSGPACK_TYPE, b"\x81" + UNKNOWN + b"\x91" * 100_000, 400, "AckBatch"),
    "too large": (codec.MSGPACK_TYPE, b"\x90" * 200_001, 413, "200000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_acknowledgement_is_named_and_reaches_nobody(
    limited: tuple[FakeCoordinator, Served, dict[str, Asked]], case: str
) -> None:
    """And the next one on the same connection is taken."""
    coordinator, served, _ = limited
    content_type, body, status, named = REFUSED[case]
    headers = {} if content_type is None else {"Content-Type": content_type}
    answered, told, data, calls = ask(coordinator, served, Asked("/0/acks", body, headers=headers))
    kind = {400: "ProtocolError", 413: "BodyTooLargeError", 415: "UnsupportedMediaTypeError"}[status]
    assert (answered, told["x-holdfast-error"], calls) == (status, kind, [])
    assert named in json.loads(data)["errors"][0]
    assert ask(coordinator, served, Asked("/0/acks", PACKED, headers=AS_MSGPACK))[0] == 200


def test_both_encodings_reach_the_coordinator_as_one_and_the_same(
    limited: tuple[FakeCoordinator, Served, dict[str, Asked]],
) -> None:
    coordinator, served, _ = limited
    packed = ask(coordinator, served, Asked("/0/acks", PACKED, headers=AS_MSGPACK))
    assert packed[0] == 200
    reached = list(packed[3])
    assert reached
    assert reached == ask(coordinator, served, Asked("/0/acks", ACKS))[3]


def test_direct_routes_are_the_described_ones() -> None:
    """So that OpenAPI, the rules of access and their tests tell of them: what is served directly is a described POST of workers."""
    described = {route.path: route.endpoint for route in workers.router.routes if isinstance(route, APIRoute)}
    assert {ROUTES[name]: endpoint for name, endpoint in ENDPOINTS.items()}.items() <= described.items()
    for name in ENDPOINTS:
        assert classify("POST", f"{WORKERS}/0/{name}") == (Access.WORK, JOB, False)
    posted = {path for path in described if path.endswith(tuple(ENDPOINTS)) or "{slot}" in path}
    assert posted - {*ROUTES.values()} == {f"{workers.router.prefix}/{{slot}}/commands"}


def test_reports_are_counted_by_route(served: Served) -> None:
    served.request("POST", f"{WORKERS}/0/heartbeat", BEAT)
    label = 'method="POST",route="/v1/jobs/{jobid}/workers/{slot}/heartbeat",status="200"'
    assert label in served.request("GET", "/metrics").data.decode()


def test_a_refused_report_is_in_the_audit_log(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        assert served.request("POST", f"{WORKERS}/0/acks", ACKS, token="x").status == 401
    assert [line.request for line in read_audit(str(tmp_path)) if line.kind == "refused"] == [f"POST {WORKERS}/0/acks"]


@pytest.mark.parametrize(("header", "value"), [("Host", "evil.example"), ("Origin", "http://evil.example")])
def test_without_a_token_pages_from_elsewhere_report_nothing(tmp_path: Path, header: str, value: str) -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator, tmp_path, token=None) as served:
        assert served.request("POST", f"{WORKERS}/0/acks", ACKS).status == 200
        refused = served.request("POST", f"{WORKERS}/0/acks", ACKS, headers={header: value})
    assert (refused.status, len(coordinator.calls)) == (401, 1)
    assert json.loads(refused.data)["errors"]
