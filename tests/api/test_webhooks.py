"""Webhooks: signed, at least once and in order over restarts, and harmless whatever the receiver does."""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import http.server
import io
import json
import logging
import operator
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.events import sender, webhooks
from holdfast.api.events.addresses import ForbiddenAddressError, connect, is_forbidden
from holdfast.api.events.delivery import RETRY_MS_MAX, TRIES_OF_A_BAD_EVENT_MAX, Delivery, Outcome, Then, outcome_of, sign
from holdfast.api.events.follower import Told
from holdfast.api.events.webhook_file import Webhook, read_webhooks
from holdfast.api.events.webhooks import Webhooks, read_places, store_places
from holdfast.api.logs import writing_log
from holdfast.api.server.main import serve
from holdfast.api.settings import server_settings
from holdfast.api.tls.authority import draw_authority
from holdfast.coordinator.history.feed import HistoryFeed
from holdfast.coordinator.history.records import HistoryEntry, Position
from holdfast.statebackends.errors import InvalidConfigError, NotLeaderError
from holdfast.statebackends.layout import is_directory_file, webhook_places
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFiles, PutIfAbsent, run_flow
from tests.api.fakes import JOB, FakeCoordinator, serving
from tests.api.test_events import AT_MS, history_of, publish
from tests.api.test_protocol import eventually

KEY = b"k" * 32
SECRET = "whsec_" + base64.b64encode(KEY).decode()


# --------------------------------------------------------------------------------------------------------------- the core


def test_signatures_are_those_of_the_specification() -> None:
    """The example of Standard Webhooks' own libraries."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.DELIVERED),
        (204, Outcome.DELIVERED),
        (301, Outcome.REDIRECTS),
        (308, Outcome.REDIRECTS),
        (400, Outcome.BAD_EVENT),
        (413, Outcome.BAD_EVENT),
        (401, Outcome.REFUSED),
        (410, Outcome.REFUSED),
        (429, Outcome.REFUSED),
        (500, Outcome.UNAVAILABLE),
        (100, Outcome.UNAVAILABLE),
    ],
)
def test_what_an_answer_means(status: int, outcome: Outcome) -> None:
    assert outcome_of(status) is outcome


@pytest.mark.parametrize("outcome", [each for each in Outcome if each not in (Outcome.DELIVERED, Outcome.BAD_EVENT)])
def test_a_failure_is_tried_again_without_end_and_with_pauses_that_have_a_bound(outcome: Outcome) -> None:
    delivery, now_ms, pauses = Delivery(random.Random(1)), 0, []
    for _ in range(100):
        assert delivery.ended(outcome, now_ms) is Then.AGAIN
        pauses.append(delivery.due_ms - now_ms)
        now_ms = delivery.due_ms
    assert 500 <= pauses[0] <= 1_000
    assert all(RETRY_MS_MAX / 2 <= pause <= RETRY_MS_MAX for pause in pauses[20:])
    assert delivery.failing_since_ms == 0
    assert delivery.ended(Outcome.DELIVERED, now_ms) is Then.NEXT
    assert (delivery.failing_since_ms, delivery.tries, delivery.due_ms) == (None, 0, now_ms)


def test_an_event_that_the_receiver_finds_bad_is_given_up() -> None:
    delivery = Delivery(random.Random(1))
    answers = [delivery.ended(Outcome.BAD_EVENT, 0) for _ in range(TRIES_OF_A_BAD_EVENT_MAX)]
    assert answers == [Then.AGAIN] * (TRIES_OF_A_BAD_EVENT_MAX - 1) + [Then.GIVE_UP]
    assert delivery.counts == {"bad_event": TRIES_OF_A_BAD_EVENT_MAX, "given_up": 1}


# -------------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.0.1",
        "100.100.100.200",
        "192.0.0.192",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "::",
        "ff02::1",
        "::ffff:169.254.169.254",
        "::169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "no address",
        "",
    ],
)
def test_addresses_that_nothing_is_sent_to(address: str) -> None:
    assert is_forbidden(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.0.0.7", "192.168.1.1", "203.0.113.9", "fd12::1", "::ffff:10.0.0.7"])
def test_addresses_that_receivers_may_have(address: str) -> None:
    assert not is_forbidden(address)


def test_a_name_is_judged_by_the_addresses_that_it_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it led to before: there is one look-up, and each of its addresses is judged."""
    asked: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.1", "169.254.169.254")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ForbiddenAddressError, match=r"169\.254\.169\.254"):
        connect("rebinding.example", 80, 1.0)
    assert asked == ["rebinding.example"]


# --------------------------------------------------------------------------------------------------------------- the file


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_webhooks(tmp_path: Path) -> None:
    write(tmp_path / "secret", SECRET + "\n")
    text = '[[webhook]]\nname = "pager"\nurl = "https://example.com/a?b=c"\nsecret_file = "secret"\n'
    text += 'kinds = ["state"]\njobs = ["flights"]\n'
    (found,) = read_webhooks(write(tmp_path / "webhooks.toml", text, 0o644))
    assert (found.name, found.url, found.key) == ("pager", "https://example.com/a?b=c", KEY)
    asked = (("state", JOB, "flights"), ("state", JOB, "x"), ("leader", JOB, "flights"))
    assert [found.wants(*each) for each in asked] == [True, False, False]
    assert "k" * 8 not in repr(found)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[webhook]", "no TOML"),
        ("other = 1", "nothing else"),
        ("webhook = 1", "nothing else"),
        ('[[webhook]]\nname = "A b"', "name"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "S"\ncolour = 1', "colour"),
        ('[[webhook]]\nname = "a"\nsecret = "S"', "url"),
        ('[[webhook]]\nname = "a"\nurl = "ftp://x/"\nsecret = "S"', "https://host"),
        ('[[webhook]]\nname = "a"\nurl = "http://x/"\nsecret = "S"', "insecure_http"),
        ('[[webhook]]\nname = "a"\nurl = "https://u:p@x/"\nsecret = "S"', "password"),
        ('[[webhook]]\nname = "a"\nurl = "https://x:99999/"\nsecret = "S"', "no URL"),
        ('[[webhook]]\nname = "a"\nurl = "https://%HOST%/"\nsecret = "S"', "no URL"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"', "secret_file"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "plain"', "whsec_"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "whsec_!!"', "base64"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "whsec_AAAA"', "bytes"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "S"\nkinds = ["explosion"]', "explosion"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "S"\njobs = "flights"', "jobs"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret_file = "nowhere"', "webhook a: its secret_file "),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret_file = "nowhere"', "/nowhere can't be read: No such file"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "S"\nca_file = "nowhere"', "ca_file .*/nowhere can't be used"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "S"\nca_file = "webhooks.toml"', "ca_file .*toml can't be used"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "S"\nca_file = 7', "ca_file is no path"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "S"\n' * 2, "two webhooks"),
        ('[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "S"\n' * 17, "at most 16"),
    ],
)
def test_a_file_with_a_fault_is_refused_and_no_secret_is_told(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path / "webhooks.toml", text.replace('"S"', f'"{SECRET}"'))
    with pytest.raises(InvalidConfigError, match=named) as caught:
        read_webhooks(path)
    assert SECRET.removeprefix("whsec_") not in str(caught.value)


def test_places_in_the_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "own-ca.pem").write_bytes(draw_authority(datetime.datetime.now(datetime.UTC)).certificate_pem)
    write(folder / "secret", SECRET)
    text = '[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret_file = "secret"\nca_file = "own-ca.pem"\n'
    monkeypatch.chdir(tmp_path)  # a service begins in `/`, or wherever its unit says
    (found,) = read_webhooks(write(folder / "webhooks.toml", text))
    assert found.ca_file == str(folder / "own-ca.pem")


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    text = f'[[webhook]]\nname = "a"\nurl = "https://x/"\nsecret = "{SECRET}"'
    with pytest.raises(InvalidConfigError, match="chmod 600"):
        read_webhooks(write(tmp_path / "webhooks.toml", text, 0o644))


# ----------------------------------------------------------------------------------------------------------------- places


def test_places_survive_and_old_files_go(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert run_flow(read_places("pager"), storage) == (-1, None)
    number = -1
    for at in range(1, 6):
        number = run_flow(store_places("pager", number, {JOB: Position(1, at)}), storage)
    assert run_flow(read_places("pager"), storage) == (4, {JOB: Position(1, 5)})
    files = storage.execute(ListFiles("_service"))
    assert files == [webhook_places("pager", 3), webhook_places("pager", 4)]
    assert all(is_directory_file(path) for path in files)


def test_a_damaged_file_of_places_is_passed_over(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    run_flow(store_places("pager", -1, {JOB: Position(1, 5)}), storage)
    for number, content in ((1, b"{"), (2, b'{"version": 9, "positions": {}}'), (3, b'{"version": 1, "positions": {"a": "x"}}')):
        storage.execute(PutIfAbsent(webhook_places("pager", number), content))
    assert run_flow(read_places("pager"), storage) == (0, {JOB: Position(1, 5)})
    assert run_flow(store_places("pager", 0, {JOB: Position(1, 6)}), storage) == 4, "behind whatever is there"
    assert run_flow(read_places("pager"), storage) == (4, {JOB: Position(1, 6)})


# --------------------------------------------------------------------------------------------------------------- receivers


class Receiver:
    """An HTTP server that answers as it is told, and keeps what it took."""

    def __init__(self) -> None:
        self.answers: list[int | Callable[[http.server.BaseHTTPRequestHandler], None]] = []
        """For the next requests; then 200."""
        self.asked: list[dict[str, Any]] = []
        self.taken: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                event = json.loads(body)
                outer.asked.append({"headers": dict(self.headers), "body": body, "event": event, "path": self.path})
                answer = outer.answers.pop(0) if outer.answers else 200
                if callable(answer):
                    answer(self)
                    return
                if answer == 200:
                    outer.taken.append(event["id"])
                self.send_response(answer)
                if 300 <= answer < 400:
                    self.send_header("Location", f"http://127.0.0.1:{outer.port}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr("holdfast.api.events.delivery.RETRY_MS", 10)
    monkeypatch.setattr(webhooks, "IDLE_S", 0.05)
    monkeypatch.setattr(webhooks, "PAUSE_S", 0.05)
    found = Receiver()
    yield found
    found.close()


@contextlib.contextmanager
def running(service: FakeCoordinator, receiver: Receiver, location: Path, **options: Any) -> Iterator[Webhooks]:
    """Webhooks that have begun."""
    url = options.pop("url", f"http://127.0.0.1:{receiver.port}/holdfast?a=b")
    started = Webhooks((Webhook("pager", url, KEY, **options),), service, str(location))
    started.start()
    try:
        eventually("it has begun", lambda: open_storage(str(location)).execute(ListFiles("_service/webhooks")))
        yield started
    finally:
        started.close()


def test_events_are_signed_and_come_in_order(coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path) -> None:
    publish(coordinator, 1)
    with running(coordinator, receiver, tmp_path) as started:
        for number in range(2, 8):
            publish(coordinator, number, state="RUNNING")
        eventually("all are taken", lambda: len(receiver.taken) >= 6)
        eventually("all are counted", lambda: started.numbers() == [("pager", {"delivered": 6}, 0.0)])
    assert receiver.taken == [f"7-{number}" for number in range(2, 8)], "what was before it began is not sent"
    for asked in receiver.asked:
        headers = {name.lower(): value for name, value in asked["headers"].items()}
        assert headers["webhook-id"] == f"{JOB}-{asked['event']['id']}"
        assert headers["webhook-signature"] == sign(KEY, headers["webhook-id"], int(headers["webhook-timestamp"]), asked["body"])
        assert (asked["path"], headers["content-type"]) == ("/holdfast?a=b", "application/cloudevents+json")


def test_only_what_it_wants_is_sent(coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path) -> None:
    with running(coordinator, receiver, tmp_path, kinds=frozenset({"failure"})):
        for number, kind in enumerate(("state", "failure", "state", "failure"), 1):
            publish(coordinator, number, kind=kind)
        eventually("both are taken", lambda: receiver.taken == ["7-2", "7-4"])


@pytest.mark.parametrize("status", [302, 401, 500, 429])
def test_what_fails_is_sent_again_before_anything_else(
    coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [status, status, status]
    caplog.set_level(logging.INFO, "holdfast.webhooks")
    with running(coordinator, receiver, tmp_path) as started:
        publish(coordinator, 1)
        publish(coordinator, 2)
        eventually("both are taken", lambda: receiver.taken == ["7-1", "7-2"])
        eventually("it is well", lambda: started.numbers()[0][2] == 0.0)
    assert [each["event"]["id"] for each in receiver.asked] == ["7-1"] * 4 + ["7-2"]
    assert {each["path"] for each in receiver.asked} == {"/holdfast?a=b"}, "a redirect is not followed"
    told = [record.message for record in caplog.records]
    assert len(told) == 2, "the trouble once, and its end"
    assert str(status) in told[0]


def test_a_bad_event_is_given_up_and_the_next_ones_go_on(
    coordinator: FakeCoordinator,
    receiver: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("holdfast.api.events.delivery.TRIES_OF_A_BAD_EVENT_MAX", 3)
    receiver.answers = [422] * 3
    with running(coordinator, receiver, tmp_path) as started:
        publish(coordinator, 1)
        publish(coordinator, 2)
        eventually("the second is taken", lambda: receiver.taken == ["7-2"])
        eventually("both are counted", lambda: started.numbers()[0][1] == {"bad_event": 3, "given_up": 1, "delivered": 1})
    assert any("7-1" in record.message and "given up" in record.message for record in caplog.records)


def test_the_next_coordinator_goes_on_where_the_last_one_ended(
    coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(coordinator, receiver, tmp_path):
        publish(coordinator, 1)
        publish(coordinator, 2)
        eventually("both are taken", lambda: len(receiver.taken) == 2)
    entries = [HistoryEntry(7, number, AT_MS, "state", {}) for number in range(1, 5)]
    successor = FakeCoordinator()
    monkeypatch.setattr(successor, "history", history_of(entries))
    publish(successor, 1, epoch=8)
    with running(successor, receiver, tmp_path):
        eventually("the rest is taken", lambda: len(receiver.taken) >= 5)
    assert receiver.taken == ["7-1", "7-2", "7-3", "7-4", "8-1"]


def test_after_a_crash_what_was_not_stored_comes_again(
    coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks._Runner, "_store", lambda self: None)
    storage = open_storage(str(tmp_path))
    run_flow(store_places("pager", -1, {JOB: Position(7, 1)}), storage)
    entries = [HistoryEntry(7, number, AT_MS, "state", {}) for number in range(1, 4)]
    monkeypatch.setattr(coordinator, "history", history_of(entries))
    for times in (1, 2):
        with running(coordinator, receiver, tmp_path):
            eventually("both are taken", functools.partial(operator.eq, receiver.taken, ["7-2", "7-3"] * times))


def test_a_receiver_that_hangs_or_dribbles_is_left_in_time(
    coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr(sender, "TOTAL_TIMEOUT_S", 0.6)
    ended = threading.Event()

    def hang(_: http.server.BaseHTTPRequestHandler) -> None:
        ended.wait(20)

    def dribble(handler: http.server.BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.1):
                handler.wfile.write(b"H")
                handler.wfile.flush()

    receiver.answers = [hang, dribble]
    with running(coordinator, receiver, tmp_path) as started:
        publish(coordinator, 1)
        publish(coordinator, 2)
        eventually("both are taken", lambda: receiver.taken == ["7-1", "7-2"])
        ended.set()
        eventually("both are counted", lambda: started.numbers()[0][1] == {"timed_out": 2, "delivered": 2})


def test_a_receiver_whose_name_takes_long_has_no_more_time_for_it(
    coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "TOTAL_TIMEOUT_S", 0.1)

    def connect_late(*arguments: Any) -> socket.socket:
        sock = connect(*arguments)
        assert was_cut.wait(20)
        return sock

    was_cut = threading.Event()

    class Timer(threading.Timer):
        def __init__(self, after_s: float, cut: Callable[[], None]) -> None:
            was_cut.clear()

            def both() -> None:
                cut()
                was_cut.set()

            super().__init__(after_s, both)

    monkeypatch.setattr(sender, "connect", connect_late)
    monkeypatch.setattr(threading, "Timer", Timer)
    with running(coordinator, receiver, tmp_path) as started:
        publish(coordinator, 1)
        eventually("it is late", lambda: started.numbers()[0][1].get("timed_out", 0) > 0)
    assert receiver.asked == []


def test_no_more_jobs_are_remembered_than_are_stored(
    coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "JOBS_MAX", 3)
    runner = webhooks._Runner(Webhook("pager", "http://127.0.0.1:1/", KEY), coordinator, str(tmp_path))
    for number in range(1, 6):
        entry = HistoryEntry(7, number, AT_MS, "state", {})
        runner._pass(Told(f"{number:032x}", "job", entry))
    assert list(runner._done) == [f"{number:032x}" for number in (3, 4, 5)]


def has_failed(started: Webhooks, outcome: str) -> bool:
    ((_, counts, failing_s),) = started.numbers()
    return counts.get(outcome, 0) >= 2 and failing_s > 0


def test_a_forbidden_address_and_a_closed_port_are_failures_with_names(
    coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path
) -> None:
    for url, outcome in (("http://169.254.169.254/latest", "forbidden_address"), ("http://127.0.0.1:1/", "unreachable")):
        with running(coordinator, receiver, tmp_path, url=url) as started:
            publish(coordinator, 1, epoch=coordinator.feed.end + 8)
            eventually(outcome, functools.partial(has_failed, started, outcome))
    assert receiver.asked == []


def test_a_service_sends_what_its_file_says_and_shows_no_secret(
    coordinator: FakeCoordinator, receiver: Receiver, tmp_path: Path
) -> None:
    text = f'[[webhook]]\nname = "pager"\nurl = "http://127.0.0.1:{receiver.port}/"\ninsecure_http = true\nsecret = "{SECRET}"\n'
    path = write(tmp_path / "webhooks.toml", text)
    receiver.answers = [500]
    stream = io.StringIO()
    secrets = tuple(each for webhook in read_webhooks(path) for each in webhook.secret_texts)
    with writing_log("debug", "json", stream=stream, secrets=secrets), serving(coordinator, tmp_path, webhooks=path) as served:
        eventually("it has begun", lambda: open_storage(str(tmp_path)).execute(ListFiles("_service/webhooks")))
        publish(coordinator, 1, reason=f"a user wrote {SECRET}")
        eventually("it is taken", lambda: receiver.taken == ["7-1"])
        logging.getLogger("holdfast.api").info("canary %s", SECRET)
        shown = served.request("GET", "/metrics").data.decode()
    assert 'holdfast_webhook_events_total{outcome="unavailable",webhook="pager"} 1.0' in shown
    assert SECRET.removeprefix("whsec_") not in stream.getvalue() + shown
    assert '"webhook": "pager"' in stream.getvalue()


def test_a_start_with_a_wrong_file_of_webhooks_is_refused(tmp_path: Path) -> None:
    settings = server_settings({}, state_dir=tmp_path / "state", webhooks=write(tmp_path / "webhooks.toml", "x"))
    with pytest.raises(InvalidConfigError, match="no TOML"):
        serve(settings, announce=lambda text: None)


class Member(FakeCoordinator):
    """One that leads, or stands by."""

    leads = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("feed", "jobs", "history") and not object.__getattribute__(self, "leads"):
            raise NotLeaderError("it stands by")
        return object.__getattribute__(self, name)


def test_a_member_sends_while_it_leads_and_what_it_missed_when_it_leads_again(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = Member()
    object.__setattr__(member, "history", history_of([]))
    with contextlib.ExitStack() as stack:
        started = Webhooks((Webhook("pager", f"http://127.0.0.1:{receiver.port}/", KEY),), member, str(tmp_path))
        stack.callback(started.close)
        started.start()
        member.leads = True
        eventually("it has begun", lambda: open_storage(str(tmp_path)).execute(ListFiles("_service/webhooks")))
        publish(member, 1)
        eventually("it is taken", lambda: receiver.taken == ["7-1"])
        member.leads = False
        eventually("it stands by", lambda: started._runners[0]._feed is None)
        object.__setattr__(member, "history", history_of([HistoryEntry(7, number, AT_MS, "state", {}) for number in (1, 2, 3)]))
        member.feed = HistoryFeed()
        member.leads = True
        publish(member, 1, epoch=9)
        eventually("all are taken", lambda: receiver.taken[-1:] == ["9-1"])
    assert list(dict.fromkeys(receiver.taken)) == ["7-1", "7-2", "7-3", "9-1"], "in order; some may come twice"
    assert not caplog.records, "standing by is no trouble"
