"""Roles: which request each may make, tokens that are issued, expire and are revoked, and tokens of workers."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import urllib3
from typer.testing import CliRunner

from holdfast.api.access import authenticator as authenticators
from holdfast.api.access import issued, worker_tokens
from holdfast.api.access.audit_log import read_audit
from holdfast.api.access.authenticator import Authenticator
from holdfast.api.access.roles import ANY_JOB, Access, Caller, Role, classify
from holdfast.api.cli.main import app
from holdfast.api.http.auth import OPEN_PATHS, check_request
from holdfast.api.server.app import create_app
from holdfast.api.server.server import connection_guard
from holdfast.api.settings import ServerSettings
from holdfast.coordinator.ha.records import derive_job_id
from holdfast.statebackends.errors import (
    AccessDeniedError,
    AuthenticationError,
    CorruptStateError,
    InvalidConfigError,
    NotFoundError,
    RecoveringError,
)
from holdfast.statebackends.layout import TOKENS_FOLDER, WORKER_KEY_FILE, is_directory_file, token_path
from tests.api.fakes import JOB, NAME, TOKEN, FakeCoordinator, Served, make_graph, serving

OTHER_JOB = "f" * 32
HEX = {"jobid": JOB, "vertexid": "a" * 32, "triggerid": "c" * 32, "checkpointid": "7", "slot": "0"}
HEX |= {"tokenid": "d" * 16}


def all_requests() -> list[tuple[str, str]]:
    """Method and path template of every route that OpenAPI describes."""
    settings = ServerSettings(state_dir=Path("/nowhere"), token=TOKEN, port=0)
    paths: dict[str, Any] = create_app(FakeCoordinator(), settings, connection_guard(settings)).openapi()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods if path not in OPEN_PATHS]


def filled(path: str) -> str:
    return re.sub(r"{(\w+)}", lambda match: HEX.get(match[1], "x"), path)


def test_every_route_is_classified() -> None:
    """A new route needs a rule in roles.py; until then it is for administrators alone."""
    unclassified = [f"{method} {path}" for method, path in all_requests() if classify(method, filled(path)) is None]
    assert unclassified == []


def test_a_route_with_a_job_confines_to_it() -> None:
    for method, path in all_requests():
        found = classify(method, filled(path))
        assert found is not None
        assert found.job_id == (JOB if "{jobid}" in path else ANY_JOB), path


@pytest.mark.parametrize("prefix", ["", "/v1", "/flink"])
def test_the_dialect_is_classified_with_and_without_its_prefix(prefix: str) -> None:
    assert classify("POST", f"{prefix}/jobs/{JOB}/stop") == (Access.OPERATE, JOB, False)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nothing"),
        ("PUT", f"/v1/jobs/{JOB}"),
        ("GET", "/v1/v1/jobs"),
        ("GET", "/v1//jobs"),
        ("GET", "/v1/jobs/"),
        ("get", "/v1/jobs"),
        ("HEAD", "/v1/jobs"),
    ],
)
def test_what_no_rule_names_is_for_administrators_alone(method: str, path: str) -> None:
    assert classify(method, path) is None
    check_request(Caller(Role.ADMIN), method, path)
    for role in (Role.VIEWER, Role.OPERATOR, Role.WORKER):
        with pytest.raises(AccessDeniedError):
            check_request(Caller(role), method, path)


@pytest.mark.parametrize("path", ["", "*", "jobs", "@10.0.0.1/overview", "@10.0.0.1/v1/jobs", "http:/jobs/overview"])
def test_what_does_not_begin_as_a_path_is_one_for_nobody(path: str) -> None:
    assert classify("GET", path) is None
    for role in Role:
        with pytest.raises(NotFoundError):
            check_request(Caller(role), "GET", path)


MATRIX = {
    Role.VIEWER: {Access.VIEW, Access.IDENTIFY},
    Role.OPERATOR: {Access.VIEW, Access.OPERATE, Access.IDENTIFY},
    Role.ADMIN: {Access.VIEW, Access.OPERATE, Access.ADMINISTER, Access.WORK, Access.IDENTIFY},
    Role.WORKER: {Access.WORK},
}


@pytest.mark.parametrize("role", list(Role))
def test_roles_and_routes(role: Role) -> None:
    for method, path in all_requests():
        found = classify(method, filled(path))
        assert found is not None
        if found.access in MATRIX[role]:
            check_request(Caller(role), method, filled(path))
        else:
            with pytest.raises(AccessDeniedError) as refused:
                check_request(Caller(role), method, filled(path))
            assert refused.value.needed == found.access


def test_requests_that_change_something_are_for_nobody_who_may_only_look() -> None:
    harmless = {"/v1/snapshots/verify", "/ui/logout"}
    for method, path in all_requests():
        if (method != "GET" and path not in harmless) or path.endswith("yarn-cancel"):
            with pytest.raises(AccessDeniedError):
                check_request(Caller(Role.VIEWER), method, filled(path))


CHANGES = {
    "add_label", "cancel", "change_settings", "drill", "erase_key", "lead", "leader_unreachable", "leave", "note_verified",
    "remove_label", "request_checkpoint", "request_savepoint", "stop", "submit",
}  # fmt: skip
"""What a coordinator is asked for that is more than a look."""


def test_no_get_but_that_of_yarn_changes_anything(tmp_path: Path) -> None:
    coordinator, asked = FakeCoordinator(), set[str]()
    endless = ("/events", "/commands")
    with serving(coordinator, tmp_path) as served:
        for path in (path for method, path in all_requests() if method == "GET" and not path.endswith(endless)):
            coordinator.calls.clear()
            answer = served.request("GET", filled(path))
            assert answer.status < 500 or answer.status in (501, 503), path
            done = {call[0] for call in coordinator.calls}
            assert done & CHANGES == ({"cancel"} if path.endswith("yarn-cancel") else set()), path
            asked |= done
    assert {"cancel", "history", "labels", "drills", "cost", "health"} <= asked, "what was asked for got there"


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR, Role.WORKER])
def test_a_confined_caller_asks_for_its_job_alone(role: Role) -> None:
    caller = Caller(role, OTHER_JOB)
    for method, path in all_requests():
        found = classify(method, filled(path))
        assert found is not None
        if not found.is_job_in_body:
            with pytest.raises(AccessDeniedError):
                check_request(caller, method, filled(path))


# ------------------------------------------------------------------------------------------------------- over HTTP


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def service(state_dir: Path) -> Iterator[Served]:
    state_dir.mkdir()
    with serving(FakeCoordinator(), state_dir) as running:
        yield running


def issue(served: Served, role: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = served.json("POST", "/v1/tokens", {"role": role, **more}, status=201)
    return found


def status(served: Served, method: str, path: str, token: str, body: Any = None) -> int:
    return served.request(method, path, body, token=token).status


def test_each_role_over_http(service: Served) -> None:
    tokens = {role: issue(service, role)["token"] for role in ("viewer", "operator", "admin")}
    wanted = {
        ("GET", "/v1/jobs"): {"viewer": 200, "operator": 200, "admin": 200},
        ("POST", f"/v1/jobs/{JOB}/stop"): {"viewer": 403, "operator": 202, "admin": 202},
        ("GET", "/v1/tokens"): {"viewer": 403, "operator": 403, "admin": 200},
        ("POST", f"/v1/jobs/{JOB}/workers/0/heartbeat"): {"viewer": 403, "operator": 403, "admin": 400},
        ("GET", "/nothing"): {"viewer": 403, "operator": 403, "admin": 404},
    }
    for (method, path), by_role in wanted.items():
        body: Any = {} if method == "POST" else None
        assert {role: status(service, method, path, token, body) for role, token in tokens.items()} == by_role, path


def test_what_is_refused_is_typed_and_named(service: Served) -> None:
    answer = service.request("POST", f"/v1/jobs/{JOB}/stop", {}, token=issue(service, "viewer")["token"])
    assert answer.status == 403
    assert answer.headers["X-Holdfast-Error"] == "AccessDeniedError"
    assert answer.json() == {"errors": [f"a token of role viewer may not operate: POST /v1/jobs/{JOB}/stop"]}
    assert json.loads(answer.headers["X-Holdfast-Fields"]) == {"needed": "operate", "role": "viewer"}


def test_a_body_of_a_refused_request_is_not_read(service: Served) -> None:
    """A viewer announces a body and sends none of it: the answer comes all the same."""
    token = issue(service, "viewer")["token"]
    answer = service.request("POST", "/v1/jobs", b"", token=token, headers={"Content-Length": "1000000"})
    assert answer.status == 403


def test_token_of_one_job(service: Served) -> None:
    mine = issue(service, "operator", job=NAME)
    assert mine["job"] == derive_job_id(NAME)
    token = issue(service, "operator", job=JOB)["token"]
    assert status(service, "GET", f"/v1/jobs/{JOB}", token) == 200
    assert status(service, "POST", f"/v1/jobs/{JOB}/stop", token, {}) == 202
    for path in ("/v1/jobs", "/v1/jobs/overview", "/metrics", "/v1/totals", f"/v1/jobs/{OTHER_JOB}", "/v1/snapshots?path=x"):
        assert status(service, "GET", path, token) == 403, path


def test_a_confined_operator_submits_and_checks_its_job_alone(service: Served) -> None:
    token = issue(service, "operator", job=NAME)["token"]
    mine = msgspec.json.encode({"graph": msgspec.to_builtins(make_graph(NAME))})
    foreign = msgspec.json.encode({"graph": msgspec.to_builtins(make_graph("other"))})
    disguised = msgspec.json.encode({"graph": msgspec.to_builtins(make_graph(NAME)), "job_id": OTHER_JOB})
    for path in ("/v1/jobs", "/v1/preflight"):
        assert status(service, "POST", path, token, mine) in (200, 202)
        assert status(service, "POST", path, token, foreign) == 403
        assert status(service, "POST", path, token, disguised) == 403


def test_a_confined_operator_restores_what_is_in_the_folder_of_its_job(service: Served, state_dir: Path) -> None:
    job_id, graph = derive_job_id(NAME), msgspec.to_builtins(make_graph(NAME))
    token = issue(service, "operator", job=NAME)["token"]
    own, foreign = state_dir / job_id / "chk-7", state_dir / OTHER_JOB / "chk-7"
    for folder in (own, foreign):
        folder.mkdir(parents=True)
    (own.parent / "chk-8").symlink_to(foreign)
    wanted = {
        None: 202,
        "latest": 202,
        "latest-readable": 202,
        "7": 202,
        str(own): 202,
        str(foreign): 403,
        f"{own}/../../{OTHER_JOB}/chk-7": 403,
        str(own.parent / "chk-8"): 403,
        str(state_dir): 403,
        "/etc": 403,
        "s3://bucket/other": 403,
        "": 403,
    }
    for restore, answer in wanted.items():
        body = msgspec.json.encode({"graph": graph, "restore": restore})
        assert status(service, "POST", "/v1/jobs", token, body) == answer, restore
        assert status(service, "POST", "/v1/preflight", token, body) == (200 if answer == 202 else 403), restore


def test_a_confined_operator_begins_no_branch_with_a_snapshot_of_its_parent(service: Served) -> None:
    """The token is for the branch, and the parent is another job."""
    graph = msgspec.to_builtins(make_graph(f"{NAME}@trial"))
    token = issue(service, "operator", job=f"{NAME}@trial")["token"]
    for restore, answer in ((None, 202), ("latest", 403), ("7", 403), ("label:x", 403)):
        body = msgspec.json.encode({"graph": graph, "restore": restore, "branch": "trial"})
        assert status(service, "POST", "/v1/jobs", token, body) == answer, restore
        assert status(service, "POST", "/v1/preflight", token, body) == (200 if answer == 202 else 403), restore


def test_list_and_revoke(service: Served) -> None:
    kept, gone = issue(service, "viewer", name="grafana"), issue(service, "operator", name="ci", expires_in_ms=60_000)
    listed = service.json("GET", "/v1/tokens")["tokens"]
    assert [(each["id"], each["name"], each["role"]) for each in listed] == [
        (kept["id"], "grafana", "viewer"),
        (gone["id"], "ci", "operator"),
    ]
    assert listed[0]["expires"] == -1
    assert listed[1]["expires"] == listed[1]["created"] + 60_000
    assert all("token" not in each for each in listed)
    assert status(service, "GET", "/v1/jobs", gone["token"]) == 200
    assert service.json("DELETE", f"/v1/tokens/{gone['id']}") == {}
    assert status(service, "GET", "/v1/jobs", gone["token"]) == 401
    assert status(service, "GET", "/v1/jobs", kept["token"]) == 200
    assert service.request("DELETE", f"/v1/tokens/{gone['id']}").status == 404


def test_only_a_hash_is_stored_and_others_can_not_read_it(service: Served, state_dir: Path) -> None:
    found = issue(service, "viewer")
    path = state_dir / token_path(found["id"])
    secret = found["token"].split("_", 2)[2]
    assert found["token"] not in path.read_text()
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert is_directory_file(token_path(found["id"]))
    assert is_directory_file(WORKER_KEY_FILE)


def test_a_token_for_a_job_that_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = FakeCoordinator()
    with serving(coordinator, tmp_path) as served:
        assert issue(served, "viewer", job=JOB)["job_exists"]
        assert issue(served, "viewer")["job_exists"]
        coordinator.error = NotFoundError("no such job")
        found = issue(served, "viewer", job="nosuch")
        assert (found["job_exists"], found["job"]) == (False, derive_job_id("nosuch"))
        monkeypatch.setenv("HOLDFAST_TOKEN", str(served.token))
        said = CliRunner().invoke(app, ["token", "create", "--role", "viewer", "--job", "nosuch", "--url", served.url])
        assert said.exit_code == 0
        assert f"viewer of nosuch ({derive_job_id('nosuch')}) until it is revoked" in said.stderr
        assert "there is no job 'nosuch' yet" in said.stderr
        coordinator.error = RecoveringError("it begins")
        assert issue(served, "viewer", job="nosuch")["job_exists"], "not known: nothing is said"
    subjects = [line.subject for line in read_audit(str(tmp_path)) if line.request == "issue a token"]
    assert subjects[2].endswith("of role viewer for job nosuch")


@pytest.mark.parametrize("life", ["100000d", "0s"])
def test_a_life_out_of_bounds_is_refused_in_words(service: Served, monkeypatch: pytest.MonkeyPatch, life: str) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", str(service.token))
    said = CliRunner().invoke(app, ["token", "create", "--role", "viewer", "--expires", life, "--url", service.url])
    assert (said.exit_code, said.stdout) == (2, "")
    assert f"--expires {life}: a token expires after 1 ms at the least, 3,660 days at the most" in said.stderr


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "role"),
        ({"role": "root"}, "role"),
        ({"role": "worker"}, "role"),
        ({"role": "viewer", "expires_in_ms": 0}, "expires_in_ms"),
        ({"role": "viewer", "expires_in_ms": -1}, "expires_in_ms"),
        ({"role": "viewer", "expires_in_ms": 2**63}, "expires_in_ms"),
        ({"role": "viewer", "expires_in_ms": True}, "expires_in_ms"),
        ({"role": "viewer", "name": "x" * 65}, "name"),
        ({"role": "viewer", "name": "a\nb"}, "name"),
        ({"role": "viewer", "job": ""}, "job"),
        ({"role": "viewer", "job": "a\nb"}, "job"),
        ({"role": "admin", "job": JOB}, "job"),
        ({"role": "viewer", "more": 1}, "more"),
    ],
)
def test_bad_requests_for_tokens_are_named_and_issue_none(service: Served, body: dict[str, Any], named: str) -> None:
    answer = service.request("POST", "/v1/tokens", body)
    assert answer.status == 400
    assert named in answer.json()["errors"][0]
    assert service.json("GET", "/v1/tokens") == {"tokens": []}


@pytest.mark.parametrize("token_id", ["x", "D" * 16, "..%2f..%2f_holdfast", "d" * 17])
def test_no_other_file_is_revoked(service: Served, state_dir: Path, token_id: str) -> None:
    before = sorted(path for path in state_dir.rglob("*"))
    assert service.request("DELETE", f"/v1/tokens/{token_id}").status in (400, 404)
    assert sorted(path for path in state_dir.rglob("*")) == before


@pytest.mark.parametrize("token_id", ["NOT-AN-ID", "D" * 16, "d" * 17])
def test_what_is_no_id_is_said_in_plain_words(service: Served, token_id: str) -> None:
    answer = service.request("DELETE", f"/v1/tokens/{token_id}")
    (error,) = answer.json()["errors"]
    assert answer.status == 400
    assert "16 digits 0-9 and a-f, as `holdfast token list` shows it" in error
    assert repr(token_id) in error
    assert "pattern" not in error
    assert "^" not in error


def test_a_token_in_place_of_its_id_is_not_shown_again(service: Served) -> None:
    found = issue(service, "viewer")
    secret = found["token"].split("_", 2)[2]
    error = service.request("DELETE", f"/v1/tokens/{found['token']}").json()["errors"][0]
    assert f"between the underlines ({found['id']})" in error
    assert secret not in error
    assert service.json("GET", "/v1/tokens")["tokens"], "nothing was revoked"


def test_null_means_the_default(service: Served) -> None:
    assert issue(service, "viewer", job=None, name=None, expires_in_ms=None)["expires"] == -1


def test_basic_password_is_a_token(service: Served) -> None:
    """Clients that know no bearer tokens send a user and a password."""
    token = issue(service, "viewer")["token"]
    for secret, wanted in ((TOKEN, 200), (token, 200), ("wrong", 401)):
        header = "Basic " + base64.b64encode(f"anybody:{secret}".encode()).decode()
        answer = urllib3.request("GET", service.url + "/v1/jobs", headers={"Authorization": header}, retries=False)
        assert answer.status == wanted


def test_a_service_without_a_token_issues_none(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path, token=None) as served:
        answer = served.request("POST", "/v1/tokens", {"role": "viewer"})
        assert answer.status == 400
        assert "--no-token" in answer.json()["errors"][0]


def test_a_submission_is_answered_with_a_token_for_its_workers(service: Served) -> None:
    accepted = service.json("POST", "/v1/jobs", msgspec.json.encode({"graph": msgspec.to_builtins(make_graph(NAME))}), status=202)
    token, job_id = accepted["worker_token"], accepted["job_id"]
    assert token != TOKEN
    assert status(service, "POST", f"/v1/jobs/{job_id}/workers/0/heartbeat", token, {}) == 400  # taken, and no heartbeat
    for method, path in (
        ("GET", "/v1/jobs"),
        ("GET", f"/v1/jobs/{job_id}"),
        ("POST", f"/v1/jobs/{job_id}/stop"),
        ("POST", f"/v1/jobs/{OTHER_JOB}/workers/0/heartbeat"),
        ("POST", "/v1/tokens"),
    ):
        assert status(service, method, path, token, {} if method == "POST" else None) == 403, path


# --------------------------------------------------------------------------------------------------- several services


def test_a_token_revoked_elsewhere_ends_here(service: Served, state_dir: Path) -> None:
    clock = [0.0]
    here = Authenticator(str(state_dir), TOKEN, monotonic_s=lambda: clock[0])
    there = Authenticator(str(state_dir), TOKEN)
    token, record = there.issue("viewer", name="")

    async def ask() -> Role | None:
        try:
            return (await here.caller_of(f"Bearer {token}".encode())).role
        except AuthenticationError:
            return None

    assert asyncio.run(ask()) is Role.VIEWER
    there.revoke(record.token_id)
    clock[0] += authenticators.READ_EVERY_S
    assert asyncio.run(ask()) is None


def test_workers_of_one_coordinator_are_known_to_the_next(state_dir: Path) -> None:
    state_dir.mkdir()
    token = Authenticator(str(state_dir), TOKEN).worker_token(JOB, 3)
    later = Authenticator(str(state_dir), "another-token-than-before")

    caller = asyncio.run(later.caller_of(f"Bearer {token}".encode()))
    assert (caller.role, caller.job_id) == (Role.WORKER, JOB)


@pytest.mark.parametrize(
    "forged",
    [
        "hfw_",
        f"hfw_{JOB}_1_",
        f"hfw_{JOB}_1_{'0' * 64}",
        f"hfw_{JOB}_x_{'0' * 64}",
        f"hfw_{JOB}_{'9' * 5000}_{'0' * 64}",
        f"hfw_{JOB}_²_{'0' * 64}",
        f"hfw_{JOB}",
        "hfw_../../x_1_2",
    ],
)
def test_forged_worker_tokens(forged: str) -> None:
    assert worker_tokens.read_worker_token("ab" * 32, forged) is None


def test_a_worker_token_is_for_one_job_and_submission() -> None:
    key = "ab" * 32
    good = worker_tokens.worker_token(key, JOB, 1)
    assert worker_tokens.read_worker_token(key, good) == Caller(Role.WORKER, JOB, "worker token of submission 1", 1)
    assert worker_tokens.read_worker_token("cd" * 32, good) is None
    assert worker_tokens.read_worker_token(key, good.replace(JOB, OTHER_JOB)) is None
    assert worker_tokens.read_worker_token(key, good.replace("_1_", "_2_")) is None


# ------------------------------------------------------------------------------------------------------------ records


def test_an_expired_token(state_dir: Path) -> None:
    state_dir.mkdir()
    known = Authenticator(str(state_dir), TOKEN)
    token, record = known.issue("viewer", name="night", life_ms=1)
    assert record.is_expired(record.created_ms + 1)
    assert not record.is_expired(record.created_ms)

    async def ask() -> None:
        while True:  # its millisecond may not be over yet
            await known.caller_of(f"Bearer {token}".encode())

    with pytest.raises(AuthenticationError, match="the token night has expired"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"{}" * 5_000, b'{"token_id": "../x"}', b"[" * 100_000],
)
def test_damaged_records_let_nobody_in(content: bytes) -> None:
    with pytest.raises(CorruptStateError):
        issued.decode_token(content, token_path("d" * 16))


def test_a_record_under_another_name_lets_nobody_in() -> None:
    _, record = issued.draw_token("viewer", name="", job_id=ANY_JOB, life_ms=None, now_ms=1)
    content = msgspec.json.encode(record)
    assert issued.decode_token(content, token_path(record.token_id)) == record
    for path in (token_path("d" * 16), f"{TOKENS_FOLDER}/x"):
        with pytest.raises(CorruptStateError, match="another token"):
            issued.decode_token(content, path)
    later = msgspec.json.encode(msgspec.structs.replace(record, version=2))
    with pytest.raises(CorruptStateError, match="another version"):
        issued.decode_token(later, token_path(record.token_id))


def test_a_damaged_record_is_named_and_others_count(service: Served, state_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = issue(service, "viewer")
    (state_dir / TOKENS_FOLDER / "junk.json").write_bytes(b"junk")
    assert [each["id"] for each in service.json("GET", "/v1/tokens")["tokens"]] == [good["id"]]
    assert "junk.json is no record of a token" in caplog.text
    assert status(service, "GET", "/v1/jobs", good["token"]) == 200


def test_no_more_tokens_than_may_be(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state_dir.mkdir()
    monkeypatch.setattr(issued, "TOKENS_MAX", 2)
    known = Authenticator(str(state_dir), TOKEN)
    for _ in range(2):
        known.issue("viewer", name="")
    with pytest.raises(InvalidConfigError, match="revoke some"):
        known.issue("viewer", name="")


def test_a_key_that_is_none_is_refused(state_dir: Path) -> None:
    (state_dir / "_service").mkdir(parents=True)
    (state_dir / WORKER_KEY_FILE).write_text("short")
    with pytest.raises(CorruptStateError, match="holds no key"):
        Authenticator(str(state_dir), TOKEN).worker_token(JOB, 1)
