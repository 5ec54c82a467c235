"""Reads from several members of which one hangs: the first answer counts, and nothing but reads is sent twice."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.api import hedged
from holdfast.api.cli import connections
from holdfast.api.cli.main import app
from holdfast.api.client import RestClient
from holdfast.api.errors import ConnectionLostError
from holdfast.api.hedged import HEDGED_MAX, ask_first
from holdfast.api.members import known
from holdfast.api.members.known import known_members, known_members_in
from holdfast.api.settings import local_folder
from holdfast.barriers.run_record import RunRecord, read_small_file, write_run_record
from holdfast.coordinator.standby.records import SignOfLife
from holdfast.coordinator.standby.store import give_sign
from holdfast.statebackends.errors import (
    NotFoundError,
    NotLeaderError,
    RecoveringError,
    StorageUnavailableError,
    TooManyRequestsError,
)
from holdfast.statebackends.layout import MEMBERS_FOLDER, sign_path
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import WriteFile, run_flow
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, Served
from tests.s3_server import S3Server
from tests.s3_server import bucket as bucket
from tests.s3_server import connection as connection
from tests.s3_server import server as server

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedged, "HEDGE_AFTER_S", 0.05)


@contextlib.contextmanager
def hung() -> Iterator[str]:
    """Takes connections, as the kernel does for a process that was stopped, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_read_is_answered_by_the_member_that_does_not_hang(served: Served, coordinator: FakeCoordinator) -> None:
    with hung() as url:
        client = RestClient(f"{url},{served.url}", TOKEN, reconnect_timeout_s=0)
        began = time.monotonic()
        assert client.job_state(JOB) == "RUNNING"
        client.cancel(JOB)
        assert time.monotonic() - began < WAIT_S
        client.close()
    *reads, last = [call[0] for call in coordinator.calls]
    assert (set(reads), last) == ({"job"}, "cancel"), "what follows goes there at once"


def test_an_error_is_an_answer_too(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.error = NotFoundError("no such job", job=JOB)
    with hung() as url:
        client = RestClient(f"{url},{served.url}", TOKEN, reconnect_timeout_s=0)
        with pytest.raises(NotFoundError, match="no such job"):
            client.job_state(JOB)
        client.close()


class Members:
    """Answers by URL; those of `hangs` wait until the end."""

    def __init__(self, hangs: set[str], lost: set[str]) -> None:
        self.asked: list[str] = []
        self.end = threading.Event()
        self._hangs, self._lost = hangs, lost

    def ask(self, url: str) -> str:
        self.asked.append(url)
        if url in self._hangs:
            self.end.wait(WAIT_S)
        if url in self._lost or url in self._hangs:
            raise ConnectionLostError(f"can't reach {url}", url=url)
        return f"answer of {url}"


def test_whoever_answers_in_time_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedged, "HEDGE_AFTER_S", WAIT_S)
    members = Members(set(), set())
    url, answer = ask_first(("a", "b"), members.ask)
    assert (url, answer.result(), members.asked) == ("a", "answer of a", ["a"])


def test_a_member_that_is_lost_at_once_is_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedged, "HEDGE_AFTER_S", WAIT_S)
    members = Members(set(), {"a"})
    url, answer = ask_first(("a", "b"), members.ask)
    assert (url, members.asked) == ("a", ["a"])
    with pytest.raises(ConnectionLostError):
        answer.result()


def test_a_member_that_passed_the_request_on_in_vain_is_asked_again() -> None:
    """It stood by when it was asked first, and leads by now."""
    members, turns = Members({"a"}, set()), iter((True, False))

    def ask(url: str) -> str:
        if url == "b" and next(turns):
            members.end.wait(WAIT_S)
        return members.ask(url)

    url, answer = ask_first(("a", "b"), ask)
    assert (url, answer.result()) == ("b", "answer of b")
    members.end.set()


def test_no_more_than_so_many_requests_wait_at_a_time() -> None:
    members = Members({"a", "b"}, set())
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(ask_first(("a", "b"), members.ask)[0]))
    asking.start()
    deadline = time.monotonic() + WAIT_S
    while len(members.asked) < HEDGED_MAX:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert asking.is_alive()
    members.end.set()
    asking.join(WAIT_S)
    assert (len(found), members.asked) == (1, ["a", "b"] * (HEDGED_MAX // 2))


def test_a_member_that_is_lost_beside_one_that_hangs_is_not_asked_again() -> None:
    members = Members({"a"}, {"b"})

    def ask(url: str) -> str:
        if url == "b":  # "a" answers when there was time to ask again
            threading.Timer(10 * hedged.HEDGE_AFTER_S, members.end.set).start()
        return members.ask(url)

    url, answer = ask_first(("a", "b"), ask)
    assert isinstance(answer.exception(), ConnectionLostError)
    assert (url, members.asked) == ("a", ["a", "b"])


@pytest.mark.parametrize("kind", [StorageUnavailableError, NotLeaderError, RecoveringError, TooManyRequestsError])
def test_an_error_of_a_members_own_does_not_come_before_the_leaders_answer(kind: Any) -> None:
    asked, is_answered = [], threading.Event()

    def ask(url: str) -> str:
        asked.append(url)
        if url == "b":
            threading.Timer(4 * hedged.HEDGE_AFTER_S, is_answered.set).start()
            raise kind("not now")
        assert is_answered.wait(WAIT_S)
        return f"answer of {url}"

    url, answer = ask_first(("a", "b"), ask)
    assert (url, answer.result(), asked[:2]) == ("a", "answer of a", ["a", "b"])
    assert len(asked) <= HEDGED_MAX


def test_an_error_of_a_members_own_is_told_where_nobody_answers() -> None:
    def ask(url: str) -> str:
        raise StorageUnavailableError(f"storage of {url} is away")

    _, answer = ask_first(("a", "b"), ask)
    with pytest.raises(StorageUnavailableError, match="storage of a is away"):
        answer.result()


@pytest.mark.parametrize("is_first", [True, False])
def test_without_a_thread_the_first_is_asked_alone(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    members = Members(set() if is_first else {"a"}, set())
    start, count = threading.Thread.start, iter(range(100))

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "holdfast-read" and next(count) >= (0 if is_first else 1):
            raise RuntimeError("can't start new thread")
        start(thread)

    timer = threading.Timer(0.3, members.end.set)
    timer.start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    url, answer = ask_first(("a", "b"), members.ask)
    timer.join()
    assert (url, members.asked, answer.exception() is None) == ("a", ["a"], is_first)


def test_changes_are_sent_to_one_member_alone(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("it would be done twice")

    monkeypatch.setattr("holdfast.api.client.ask_first", refused)
    client = RestClient(f"{served.url},http://127.0.0.1:9", TOKEN, reconnect_timeout_s=0)
    client.cancel(JOB)
    client.change_settings(JOB, {"checkpoint_interval_ms": None})
    with pytest.raises(AssertionError, match="twice"):
        client.job_state(JOB)
    client.close()
    assert ("cancel", JOB) in coordinator.calls


def test_further_members_are_looked_for_once_none_has_answered_in_time() -> None:
    members, looks = Members({"a"}, set()), []

    def further() -> tuple[str, ...]:
        looks.append(tuple(members.asked))
        return ("a", "b")

    url, answer = ask_first(("a",), members.ask, further)
    assert (url, answer.result(), members.asked, looks) == ("b", "answer of b", ["a", "b"], [("a",)])
    members.end.set()


def test_nobody_is_looked_for_while_the_first_answers_and_once_it_is_lost_all_ask_the_others(
    served: Served, coordinator: FakeCoordinator
) -> None:
    looks: list[int] = []

    def further() -> tuple[str, ...]:
        looks.append(len(coordinator.calls))
        return (served.url,)

    client = RestClient(served.url, TOKEN, reconnect_timeout_s=0, further=further)
    assert (client.job_state(JOB), looks) == ("RUNNING", [])
    client.close()
    lost = RestClient("http://127.0.0.1:9", TOKEN, reconnect_timeout_s=0, further=further)
    lost.cancel(JOB)
    assert (lost.job_state(JOB), len(looks)) == ("RUNNING", 1)
    lost.close()
    alone = RestClient("http://127.0.0.1:9", TOKEN, reconnect_timeout_s=0, further=lambda: ())
    with pytest.raises(ConnectionLostError, match="can't reach"):
        alone.job_state(JOB)
    alone.close()


# ------------------------------------------------------------------------------------------- members of a state directory

FIRST = "http://127.0.0.1:7070"


def signed(folder: Path, *signs: SignOfLife) -> None:
    storage = open_storage(str(folder))
    for number, sign in enumerate(signs):
        run_flow(give_sign(sign), storage)
        at_s = time.time() - len(signs) + number
        os.utime(folder / sign_path(sign.member, sign.beat), (at_s, at_s))


def sign(number: int, url: str, **fields: Any) -> SignOfLife:
    return SignOfLife(f"{number:032x}", fields.pop("beat", 1), url, **fields)


def test_members_are_known_by_their_signs_the_newest_first(tmp_path: Path) -> None:
    assert known_members(tmp_path, FIRST) == ()
    signed(tmp_path, sign(1, FIRST), sign(2, "http://127.0.0.1:7071/"), sign(3, "http://127.0.0.1:7072"))
    assert known_members(tmp_path, FIRST) == ("http://127.0.0.1:7072", "http://127.0.0.1:7071")


def test_members_that_died_soon_hide_none_that_was_seen_since(tmp_path: Path) -> None:
    signed(tmp_path, *(sign(number, f"http://127.0.0.1:{8_000 + number}") for number in range(100)))
    for each in (tmp_path / MEMBERS_FOLDER).iterdir():
        os.utime(each, (time.time() - 60, time.time() - 60))
    signed(tmp_path, sign(500, "http://127.0.0.1:7071"))
    assert known_members(tmp_path, FIRST)[0] == "http://127.0.0.1:7071"


def test_a_sign_that_goes_while_the_directory_is_read_hides_no_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sign takes the place of the one before."""
    signed(tmp_path, sign(1, "http://127.0.0.1:7071"), sign(2, "http://127.0.0.1:7072"))
    read = read_small_file

    def replaced(path: str) -> bytes:
        monkeypatch.setattr(known, "read_small_file", read)
        os.unlink(path)
        signed(tmp_path, sign(1, "http://127.0.0.1:7071", beat=2), sign(2, "http://127.0.0.1:7072", beat=2))
        return read(path)

    monkeypatch.setattr(known, "read_small_file", replaced)
    assert set(known_members(tmp_path, FIRST)) == {"http://127.0.0.1:7071", "http://127.0.0.1:7072"}


def test_no_token_goes_to_who_left_or_is_gone_or_is_no_member(tmp_path: Path) -> None:
    """Another program may listen at the port of one that is gone."""
    safe = "https://10.0.0.1:7070"
    gone, *_ = signs = [
        sign(1, "https://10.0.0.2:7070"),
        sign(2, "https://10.0.0.3:7070", is_leaving=True),
        sign(3, "http://10.0.0.4:7070"),
        sign(4, "https://127.0.0.1:7070"),
        sign(5, "https://10.0.0.5:7070,https://10.0.0.6:7070"),
        sign(6, "file:///etc/passwd"),
        sign(7, "https://10.0.0.7:7070"),
    ]
    signed(tmp_path, *signs)
    os.utime(tmp_path / sign_path(gone.member, 1), (1_000.0, 1_000.0))
    for number, content in ((8, b"{"), (9, b"x" * 100_000)):
        (tmp_path / sign_path(f"{number:032x}", 1)).write_bytes(content)
    os.mkfifo(tmp_path / sign_path("a" * 32, 1))
    assert known_members(tmp_path, safe) == ("https://10.0.0.7:7070",)


def test_a_command_that_knows_the_state_directory_asks_the_member_that_does_not_hang(
    tmp_path: Path, served: Served, coordinator: FakeCoordinator
) -> None:
    with hung() as url:
        write_run_record(tmp_path, RunRecord(url, 1, "here", 1))
        signed(tmp_path, sign(1, served.url), sign(2, url))
        shown = CliRunner().invoke(app, ["checkpoints", JOB, "--state-dir", str(tmp_path)], env={"HOLDFAST_TOKEN": TOKEN})
    assert shown.exit_code == 0, shown.output
    assert "2 completed, 1 failed" in shown.stdout
    assert shown.stderr == ""


# ------------------------------------------------------------------------------------------------------------- in a bucket


def test_members_in_a_bucket_are_known_by_their_signs_too(bucket: str) -> None:
    storage = open_storage(f"{bucket}/state")
    assert known_members_in(storage, FIRST) == ()
    signs = [
        sign(1, FIRST),
        sign(2, "http://127.0.0.1:7071/", beat=9),
        sign(2, "http://127.0.0.1:7072", beat=10),
        sign(3, "http://127.0.0.1:7073", is_leaving=True),
        sign(4, "ftp://127.0.0.1:7074"),
    ]
    for each in signs:
        storage.execute(WriteFile(sign_path(each.member, each.beat), [msgspec.json.encode(each)]))
    for number, content in ((5, b"{"), (6, b"x" * 100_000)):
        storage.execute(WriteFile(sign_path(f"{number:032x}", 1), [content]))
    assert known_members_in(storage, FIRST) == ("http://127.0.0.1:7072",)


def test_a_sign_in_a_bucket_that_is_old_counts_for_nothing(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"{bucket}/state")
    run_flow(give_sign(sign(1, "http://127.0.0.1:7071")), storage)
    monkeypatch.setattr(known, "FRESH_S", -60.0)
    assert known_members_in(storage, FIRST) == ()


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_command_finds_the_member_that_lives_by_the_bucket(
    tmp_path: Path,
    served: Served,
    coordinator: FakeCoordinator,
    bucket: str,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    is_dead: bool,
) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_DIR", str(tmp_path))
    state, env = f"{bucket}/state", {"HOLDFAST_TOKEN": TOKEN}
    run_flow(give_sign(sign(1, served.url)), open_storage(state))
    folder = local_folder(state, os.environ)
    folder.mkdir(mode=0o700)
    write_run_record(folder, RunRecord(served.url, 1, "here", 1))
    before = len(server.requests)
    assert CliRunner().invoke(app, ["cancel", JOB, "--no-wait", "--state-dir", state], env=env).exit_code == 0
    assert len(server.requests) == before, "a coordinator that answers is all that a command asks"
    with hung() as url:
        write_run_record(folder, RunRecord("http://127.0.0.1:9" if is_dead else url, 1, "here", 1))
        shown = CliRunner().invoke(app, ["checkpoints", JOB, "--state-dir", state], env=env)
    assert shown.exit_code == 0, shown.output
    assert "2 completed, 1 failed" in shown.stdout
    assert shown.stderr == ""


def test_a_bucket_that_does_not_answer_holds_no_command_up(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_DIR", str(tmp_path))
    monkeypatch.setattr(connections, "LOOK_S", 0.05)
    ended = threading.Event()
    monkeypatch.setattr(connections, "known_members_in", lambda *_: ended.wait(WAIT_S))
    folder = local_folder(bucket, os.environ)
    folder.mkdir(mode=0o700)
    write_run_record(folder, RunRecord("http://127.0.0.1:9", 1, "here", 1))
    shown = CliRunner().invoke(app, ["cancel", JOB, "--state-dir", bucket], env={"HOLDFAST_TOKEN": TOKEN})
    ended.set()
    assert (shown.exit_code, "can't reach the coordinator at http://127.0.0.1:9" in shown.stderr) == (1, True)
