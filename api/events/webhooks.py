"""SHELL: the webhooks of one coordinator: a thread each, that follows histories, sends, and remembers how far it has got.

A receiver that hangs holds up its own thread alone. Nothing of a job waits for any of this, and no error here is a job's."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast.api.events.cloudevents import event_id
from holdfast.api.events.delivery import Delivery, Outcome, Then
from holdfast.api.events.follower import JOBS_MAX, Follower, ReadHistory, Told
from holdfast.api.events.sender import Sender
from holdfast.api.events.webhook_file import Webhook
from holdfast.coordinator.history.feed import RECORDS_MAX, HistoryFeed
from holdfast.coordinator.history.records import HistoryEntry, HistoryPage, Position
from holdfast.coordinator.history.store import HistoryQuery, parse_position
from holdfast.coordinator.interface import Coordinator
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import (
    HoldfastError,
    InvalidConfigError,
    NotFoundError,
    NotLeaderError,
    ObjectMissingError,
    RecoveringError,
)
from holdfast.statebackends.layout import parse_webhook_places, webhook_folder, webhook_places
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import DeleteFile, Flow, ListFolder, PutIfAbsent, ReadFile, Storage, run_flow

log = logging.getLogger("holdfast.webhooks")

STORE_EVERY_S = 5.0
"""Longest that a place waits until it is stored: what was sent since is sent again behind a crash."""
IDLE_S = 1.0
PAUSE_S = 5.0
"""Until storage that failed is asked again."""
STOP_TIMEOUT_S = 2.0
FILE_BYTES_MAX = 1024 * 1024
KEPT_FILES = 2
"""Newest files of places that are kept; older ones are deleted."""


class _Places(msgspec.Struct, frozen=True):
    """How far a webhook has got, as it is stored."""

    version: int
    positions: dict[str, str]
    """Job id -> `<epoch>-<number>`."""


def read_places(name: str) -> Flow[tuple[int, Mapping[str, Position] | None]]:
    """Number of the newest file and what it holds; None: there is none that can be read."""
    names: list[str] = yield ListFolder(webhook_folder(name))
    for number in sorted((parse_webhook_places(each) for each in names), reverse=True):
        if number < 0:
            break
        try:
            content: bytes = yield ReadFile(webhook_places(name, number), 0, FILE_BYTES_MAX + 1)
            found = decode_json(content, _Places)
            positions = {job: at for job, text in found.positions.items() if (at := parse_position(text)) is not None}
        except (ObjectMissingError, InvalidConfigError, *UNDECODABLE):
            continue  # damaged, or deleted by another coordinator: one further back says where to go on, and some come twice
        if found.version == 1:
            return number, positions
    return max((parse_webhook_places(each) for each in names), default=-1), None


def store_places(name: str, number: int, positions: Mapping[str, Position]) -> Flow[int]:
    """Store places behind file `number`; returns the number of the file. Another coordinator's files are gone around."""
    newest = dict(list(positions.items())[-JOBS_MAX:])
    content = msgspec.json.encode(_Places(1, {job: str(at) for job, at in newest.items()}))
    number += 1
    while not (yield PutIfAbsent(webhook_places(name, number), content)):
        number += 1
    names: list[str] = yield ListFolder(webhook_folder(name))
    for old in sorted(found for found in map(parse_webhook_places, names) if found >= 0)[:-KEPT_FILES]:
        yield DeleteFile(webhook_places(name, old))
    return number


class _Runner:
    """One webhook. All but `stop` and the numbers run on its thread."""

    def __init__(self, webhook: Webhook, service: Coordinator, location: str) -> None:
        self.webhook = webhook
        self.delivery = Delivery(random.Random())
        self._service = service
        self._location = location
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._sender = Sender(webhook)
        self._feed: HistoryFeed | None = None
        """Of the leadership that this follows; None: it has not begun, or this process leads no more."""
        self._follower = Follower(HistoryFeed())
        self._leave: Callable[[], None] = _nothing
        self._waiting: deque[Told] = deque()
        self._done: dict[str, Position] = {}
        """Job -> the last event that needs no more sending."""
        self._number = -1
        self._stored_s = 0.0
        self._is_unstored = False
        self._storage: Storage | None = None
        self._told = ""
        self.thread = threading.Thread(target=self._run, name=f"holdfast-webhook-{webhook.name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._ready.set()

    @property
    def failing_s(self) -> float:
        since_ms = self.delivery.failing_since_ms
        return 0.0 if since_ms is None else max(0.0, (_now_ms() - since_ms) / 1000)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._feed is None:
                if not self._attempt(self._begin):
                    self._stopping.wait(IDLE_S)
            elif not self._attempt(self._turn):
                self._stopping.wait(PAUSE_S)
        if self._is_unstored:
            self._attempt(self._store)
        self._leave()

    def _attempt(self, act: Callable[[], bool]) -> bool:
        """Whether it went through; whatever fails is tried again, as nothing else starts this thread anew."""
        try:
            return act()
        except (NotLeaderError, RecoveringError):
            self._end()
        except HoldfastError as error:
            self._tell(f"storage or service fails, and is asked again: {error.message}")
        except Exception:
            log.critical("webhook %s failed in a way that no record describes", self.webhook.name, exc_info=True)
        return False

    def _tell(self, text: str) -> None:
        """Once, until it changes."""
        if text != self._told:
            self._told = text
            fields = {"event": "webhook", "webhook": self.webhook.name}
            log.warning("webhook %s: %s", self.webhook.name, text, extra={"fields": fields})

    def _begin(self) -> bool:
        """Go on where the last leader ended; a new webhook begins with what happens from now on. False: too early. Raises
        NotLeaderError in a process that stands by."""
        feed = self._service.feed
        if not self._service.ready:
            return False
        self._storage = self._storage or open_storage(self._location)
        self._number, found = run_flow(read_places(self.webhook.name), self._storage)
        names = {job.job_id: job.name for job in self._service.jobs()}
        if found is None:
            self._done = {job_id: self._newest(job_id) for job_id in names}
            for record in feed.read(0, RECORDS_MAX).records:  # some may be in no file yet
                at = Position(record.epoch, record.number)
                self._done[record.job_id] = max(at, self._done.get(record.job_id, at))
            found = self._done
            self._store()
        self._done = dict(found)
        self._waiting.clear()
        self._follower = Follower(feed)
        self._follower.go_on(found, names)
        self._leave = feed.listen(self._ready.set)
        self._feed = feed
        return True

    def _end(self) -> None:
        """This process leads no more: whoever does goes on from what is stored."""
        self._leave()
        self._leave, self._feed = _nothing, None

    def _newest(self, job_id: str) -> Position:
        page = self._service.history(job_id, HistoryQuery(limit=1, newest=True))
        return max((Position(each.epoch, each.number) for each in page.entries), default=Position(0, 0))

    def _turn(self) -> bool:
        if self._service.feed is not self._feed:
            self._end()
            return True
        if not self._waiting:
            self._fetch()
        if self._is_unstored and time.monotonic() - self._stored_s >= STORE_EVERY_S:
            self._store()
        if not self._waiting:
            self._ready.wait(IDLE_S)
            self._ready.clear()
            return True
        if (early_ms := self.delivery.due_ms - _now_ms()) > 0:
            self._stopping.wait(min(early_ms / 1000, IDLE_S))
            return True
        self._send(self._waiting[0])
        return True

    def _fetch(self) -> None:
        wanted = self._follower.wants()
        told = self._follower.take() if wanted is None else self._follower.read(self._page(wanted))
        for each in told:
            kind = each.what.kind if isinstance(each.what, HistoryEntry) else "gap"
            if self.webhook.wants(kind, each.job_id, each.job_name):
                self._waiting.append(each)
            elif not self._waiting:
                self._pass(each)

    def _page(self, wanted: ReadHistory) -> HistoryPage | None:
        try:
            return self._service.history(wanted.job_id, wanted.query)
        except NotFoundError:
            return None

    def _send(self, told: Told) -> None:
        outcome, why = self._sender.send(told)
        then = self.delivery.ended(outcome, _now_ms())
        if then is Then.AGAIN:
            self._tell(f"{outcome.value.replace('_', ' ')}: {why}; it is tried again, and events wait")
            return
        if then is Then.GIVE_UP:
            self._told = ""
            self._tell(f"event {event_id(told)} of job {told.job_id} is given up: {why}")
        elif self._told and outcome is Outcome.DELIVERED:
            self._told = ""
            log.info("webhook %s takes events again", self.webhook.name)
        self._pass(self._waiting.popleft())

    def _pass(self, told: Told) -> None:
        if isinstance(told.what, HistoryEntry):
            at = Position(told.what.epoch, told.what.number)
            if at > self._done.get(told.job_id, Position(0, 0)):
                self._done.pop(told.job_id, None)
                self._done[told.job_id] = at
                if len(self._done) > JOBS_MAX:
                    del self._done[next(iter(self._done))]
                self._is_unstored = True

    def _store(self) -> bool:
        self._storage = self._storage or open_storage(self._location)
        self._number = run_flow(store_places(self.webhook.name, self._number, self._done), self._storage)
        self._stored_s, self._is_unstored = time.monotonic(), False
        return True


class Webhooks:
    """All webhooks of one coordinator."""

    def __init__(self, webhooks: Sequence[Webhook], service: Coordinator, location: str) -> None:
        """`location`: the state directory."""
        self._runners = tuple(_Runner(webhook, service, location) for webhook in webhooks)

    def start(self) -> None:
        for runner in self._runners:
            runner.start()

    def close(self) -> None:
        """Stop, for STOP_TIMEOUT_S at most; one that waits for a receiver is left behind. Idempotent."""
        for runner in self._runners:
            runner.stop()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for runner in self._runners:
            if runner.thread.is_alive():
                runner.thread.join(max(0.0, deadline_s - time.monotonic()))

    def numbers(self) -> list[tuple[str, dict[str, int], float]]:
        """Name, tries by outcome, and seconds of its trouble, of each webhook."""
        return [(each.webhook.name, dict(each.delivery.counts), each.failing_s) for each in self._runners]


def _nothing() -> None:
    pass


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
