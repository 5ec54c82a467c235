"""A job's history over REST, with the client, and on the command line with and without a coordinator."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.api.cli import history
from holdfast.api.cli.history import describe
from holdfast.api.cli.main import app
from holdfast.api.client import RestClient
from holdfast.api.routes.threads import READERS_MAX
from holdfast.coordinator.history.records import (
    HistoryDamage,
    HistoryEntry,
    HistoryGap,
    HistoryPage,
    Position,
    RecordKind,
    encode_line,
)
from holdfast.coordinator.history.store import HistoryQuery, read_history
from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import PutIfAbsent, run_flow
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, Served
from tests.coordinator.world import DictStorage

STATE = {"state": "RUNNING", "previous": "CREATED", "reason": ""}
PAGE = HistoryPage(
    entries=(HistoryEntry(3, 7, 1_700_000_000_000, "state", STATE), HistoryEntry(3, 8, 1_700_000_001_000, "drill", {"ok": True})),
    gaps=(HistoryGap(2, 9, None, None), HistoryGap(3, 1, 7, 5)),
    damage=(HistoryDamage("j/history/3-1.jsonl", 2, "JSON is malformed"),),
    next="3-8",
    more=True,
    as_of_ms=5,
)


def test_page_is_answered_as_it_is_read(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.page = PAGE
    body = served.json("GET", f"/v1/jobs/{JOB}/history?after=3-6&kinds=state,%20drill,&limit=2")
    assert coordinator.calls[-1] == ("history", JOB, HistoryQuery(Position(3, 6), frozenset({"state", "drill"}), 2))
    assert [each["number"] for each in body["records"]] == [7, 8]
    assert body["records"][0] == {"epoch": 3, "number": 7, "at_ms": 1_700_000_000_000, "kind": "state", "facts": STATE}
    assert body["gaps"][0] == {"epoch": 2, "after": 9, "before": None, "missing": None}
    assert body["damage"] == [{"path": "j/history/3-1.jsonl", "line": 2, "reason": "JSON is malformed"}]
    assert (body["next"], body["more"], body["as_of_ms"]) == ("3-8", True, 5)


def test_a_page_of_the_newest_says_how_to_go_on(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.page = HistoryPage((), since="3-7")
    assert served.json("GET", f"/v1/jobs/{JOB}/history?newest=true&kinds=failure")["since"] == "3-7"
    served.json("GET", f"/v1/jobs/{JOB}/history?before=3-7&kinds=failure")
    assert coordinator.calls[-1] == ("history", JOB, HistoryQuery(None, frozenset({"failure"}), newest=True, before=Position(3, 7)))
    refused = served.request("GET", f"/v1/jobs/{JOB}/history?before=3-x")
    assert (refused.status, json.loads(refused.headers["X-Holdfast-Fields"])) == (400, {"setting": "before"})
    served.json("GET", f"/v1/jobs/{JOB}/history?before=3-7&after=1-1", status=400)


RESTART: dict[str, Any] = {"attempt": 2, "checkpoint_id": 41, "savepoint": False, "replayed": 8_204}
FAILURE: dict[str, Any] = {"attempt": 1, "error": "Boom: bang", "restarts": 1, "restart_in_ms": 250, "slot": 2}
FIRST: dict[str, Any] = {"attempt": 2, "since_deployed_ms": 700, "since_failure_ms": 1_200, "heartbeat_ms": 2_000}


def test_failures_are_one_number_in_rest_client_and_command_line(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = tuple(
        HistoryEntry(3, number, 1_700_000_000_000 + number, kind, facts)
        for number, (kind, facts) in enumerate([("failure", FAILURE), ("restart", RESTART), ("first_record", FIRST)], 7)
    )
    coordinator.page = HistoryPage(entries, as_of_ms=5)
    body = served.json("GET", f"/v1/jobs/{JOB}/failures?limit=2&before=3-20")
    kinds = frozenset({"failure", "restart", "first_record"})
    assert coordinator.calls[-1] == ("history", JOB, HistoryQuery(None, kinds, 6, newest=True, before=Position(3, 20)))
    (failure,) = body["failures"]
    assert (failure["position"], failure["restart"]["checkpoint_id"], failure["restart"]["gap_ms"]) == ("3-7", 41, 1_200)
    assert RestClient(served.url, served.token).failures(JOB) == body
    assert served.request("GET", f"/v1/jobs/{JOB}/failures?limit=1000").status == 400
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    shown = CliRunner().invoke(app, ["failures", JOB, "--url", served.url])
    assert shown.exit_code == 0, shown.output
    assert all(text in shown.output for text in ("Boom: bang", "41", "8,204", "1.2 s"))


def recorded(*kinds: str) -> DictStorage:
    """A history with one record of each kind, in one file."""
    facts = {"failure": FAILURE, "restart": RESTART, "first_record": FIRST}
    storage = DictStorage()
    content = b"".join(encode_line(number, 1_000 * number, kind, facts.get(kind, {})) for number, kind in enumerate(kinds, 1))
    assert storage.execute(PutIfAbsent(JobPaths(JOB).history(3, 1), content))
    return storage


BEGAN, FAILED = ("leader", "restart", "first_record"), ("failure", "restart", "first_record")


@pytest.mark.parametrize(
    ("limit", "since"), [(1, "3-10"), (2, "3-7"), (3, ""), (4, "")], ids=["two more", "one more", "all", "more than all"]
)
def test_a_page_of_failures_names_older_ones_only_where_there_are_some(
    limit: int, since: str, served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of the first attempt, in front of the oldest failure, are no failure."""
    storage = recorded(*BEGAN, *FAILED, *FAILED, *FAILED)
    read = lambda job_id, query: run_flow(read_history(JobPaths(job_id), query, 5), storage)  # noqa: E731
    monkeypatch.setattr(coordinator, "history", read)
    body = served.json("GET", f"/v1/jobs/{JOB}/failures?limit={limit}")
    assert [each["position"] for each in body["failures"]] == ["3-10", "3-7", "3-4"][:limit]
    assert body["since"] == since


@pytest.mark.parametrize(
    "query", ["after=x", "after=1-²", "limit=0", "limit=100000", f"kinds={'x' * 300}", "newest=perhaps", "kinds=state,foo"]
)
def test_malformed_query_is_refused(query: str, served: Served) -> None:
    assert served.request("GET", f"/v1/jobs/{JOB}/history?{query}").status == 400


def test_a_kind_that_there_is_not_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    shown = CliRunner().invoke(app, ["history", JOB, "--kinds", "state,foo", "--url", served.url])
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert f"kinds: there is no 'foo', only {', '.join(RecordKind)} [InvalidConfigError]" in shown.stderr


def test_every_kind_that_is_recorded_has_words() -> None:
    assert set(RecordKind) == set(history._WORDS)


def test_readers_of_histories_hold_nobody_else_up(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage may take long; forty readers would have all threads that open the streams of workers."""
    stuck, storage_answers, count = threading.Semaphore(0), threading.Event(), 60

    def read(job_id: str, query: HistoryQuery) -> HistoryPage:
        stuck.release()
        assert storage_answers.wait(30)
        return PAGE

    monkeypatch.setattr(coordinator, "history", read)
    with ThreadPoolExecutor(count) as readers:
        pages = [readers.submit(served.json, "GET", f"/v1/jobs/{JOB}/history") for _ in range(count)]
        try:
            assert all(stuck.acquire(timeout=10) for _ in range(READERS_MAX))
            assert served.request("GET", f"/v1/jobs/{JOB}/checkpoints", timeout=10, retries=False).status == 200
            assert not stuck.acquire(blocking=False)
        finally:
            storage_answers.set()
        assert all(page.result()["next"] == "3-8" for page in pages)


def test_client_reads_a_page(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.page = PAGE
    client = RestClient(served.url, served.token, reconnect_timeout_s=0)
    found = client.history(JOB, kinds=("state", "drill"), limit=7, newest=True)
    assert coordinator.calls[-1] == ("history", JOB, HistoryQuery(None, frozenset({"state", "drill"}), 7, newest=True))
    assert found["next"] == "3-8"
    with pytest.raises(NotFoundError):
        client.history("f" * 32)


def test_command_shows_records_gaps_and_damage(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.page = PAGE
    environment = {"HOLDFAST_URL": served.url, "HOLDFAST_TOKEN": served.token or "", "COLUMNS": "200"}
    shown = CliRunner().invoke(app, ["history", JOB, "--limit", "2"], env=environment)
    assert shown.exit_code == 0, shown.output
    assert "RUNNING, was CREATED" in shown.stdout
    assert "ok=True" in shown.stdout
    assert "5 records of epoch 3 are not there: those between 1 and 7" in shown.stderr
    assert "the leader of epoch 2 was cut off behind record 9" in shown.stderr
    assert "j/history/3-1.jsonl, line 2: JSON is malformed" in shown.stderr
    assert "--after 3-8" in shown.stderr
    as_json = CliRunner().invoke(app, ["history", JOB, "--json"], env=environment)
    assert json.loads(as_json.stdout)["next"] == "3-8"


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        (
            "leader",
            {"submission": 2, "took_over": True, "newest_checkpoint": 0},
            "submission 2, taken over; newest checkpoint none",
        ),
        (
            "failure",
            {"attempt": 1, "error": "E: x", "restarts": 1, "restart_in_ms": 20},
            "attempt 1 failed; restart 1 in 20 ms: E: x",
        ),
        (
            "restart",
            {"attempt": 2, "checkpoint_id": 9, "savepoint": False, "replayed": 1_200},
            "attempt 2 starts from checkpoint 9; 1,200 records are read again",
        ),
        ("restart", {"attempt": 1, "checkpoint_id": 0, "savepoint": False, "replayed": None}, "attempt 1 starts with empty state"),
        (
            "checkpoint",
            {"id": 4, "checkpoint_kind": "checkpoint", "status": "FAILED", "reason": "expired", "message": "", "missing_count": 3},
            "checkpoint 4 failed, expired, 3 subtasks did not acknowledge",
        ),
        (
            "request",
            {"request_kind": "stop_savepoint", "reason": None, "checkpoint_id": 5, "location": "/s"},
            "stop-savepoint is complete: id 5 at /s",
        ),
        (
            "request",
            {"request_kind": "stop_savepoint", "reason": "coordinator_shutdown", "message": ""},
            "stop-savepoint failed, the job was cancelled or has failed",
        ),
        (
            "request",
            {"request_kind": "savepoint", "reason": "declined", "message": "no room"},
            "savepoint failed, declined: no room",
        ),
        (
            "checkpoint",
            {"id": 4, "checkpoint_kind": "checkpoint", "status": "FAILED", "reason": "coordinator_shutdown", "message": ""},
            "checkpoint 4 failed, the job was cancelled or has failed",
        ),
        (
            "drill",
            {"checkpoint_id": 9, "kind": "stop_savepoint", "state": "passed", "error": "", "problems": [], "rows": 9, "states": 2},
            "drill of stop-savepoint 9 passed: 9 rows of 2 states",
        ),
        ("state", {"state": "RUNNING", "previous": "CREATED", "reason": ""}, "RUNNING, was CREATED"),
        (
            "state",
            {"state": "RECONCILING", "previous": "", "reason": "taken over by epoch 2"},
            "RECONCILING: taken over by epoch 2",
        ),
        ("state", {"unknown": 1}, "unknown=1"),
        ("checkpoint", {"id": 1, "checkpoint_kind": 5, "status": "COMPLETED"}, "id=1, checkpoint_kind=5, status=COMPLETED"),
        ("later kind", {"a": 1}, "a=1"),
    ],
)
def test_record_in_words(kind: str, facts: dict[str, object], words: str) -> None:
    assert describe(kind, facts) == words


def test_history_of_a_state_directory_without_a_coordinator(tmp_path: Path) -> None:
    from tests.coordinator.history.test_store import lines

    (tmp_path / "_holdfast").write_text("nonce")
    file = tmp_path / JobPaths(JOB).history(2, 1)
    file.parent.mkdir(parents=True)
    file.write_bytes(lines(1, 3))
    found = CliRunner().invoke(app, ["history", JOB, "--state-dir", str(tmp_path), "--offline", "--json"])
    assert found.exit_code == 0, found.output
    assert [each["number"] for each in json.loads(found.stdout)["records"]] == [1, 2, 3]
    missing = CliRunner().invoke(app, ["history", "f" * 32, "--state-dir", str(tmp_path), "--offline"])
    assert missing.exit_code == 1
    assert "NotFoundError" in missing.output
