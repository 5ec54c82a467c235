"""Events as a stream of server-sent events: who may have one open, how long, and from where it goes on.

A stream reads by itself from the feed and the history: one that is read slowly holds nothing back, and one that is not read at all
ends after SEND_TIMEOUT_S. The reader resumes with `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.api.errors import BusyError
from holdfast.api.events.cloudevents import encode_event, kind_of
from holdfast.api.events.follower import Follower, ReadHistory, Told
from holdfast.coordinator.history.feed import HistoryFeed
from holdfast.coordinator.history.records import HistoryEntry, HistoryPage
from holdfast.coordinator.history.store import parse_position
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, NotLeaderError

MEDIA_TYPE = "text/event-stream"
STREAMS_MAX = 64
STREAMS_OF_ONE_MAX = 16
"""Open streams of one service, and of one credential."""
SEND_TIMEOUT_S = 30.0
"""Seconds that a reader may leave a full socket unread before its stream ends."""
KEEP_ALIVE_S = 15.0
RECHECK_S = 4.0
"""Seconds after which the credential of a stream is looked at again: one that was revoked ends within five."""
RETRY_MS = 2_000
"""Time after which a browser opens its stream again."""
OVERLAP_MS = 10_000
"""How far behind a time a stream of all jobs goes back: clocks of coordinators differ, and records of one moment have no order."""

Recheck = Callable[[], Awaitable[object]]
"""Raises HoldfastError where the caller may not see this any more."""


@dataclass(slots=True)
class EventStreams:
    """The open streams of one service. For its event loop alone."""

    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    """Names this process in the ids of a stream of all jobs: places in its feed mean nothing to another one."""
    closed: Counter[str] = field(default_factory=Counter)
    """Ended streams by reason: reader, slow, access, leader, storage, stopping."""
    _open: dict[int, asyncio.Event] = field(default_factory=dict)
    _by_credential: Counter[str] = field(default_factory=Counter)
    _number: int = 0
    is_closing: bool = False

    @property
    def count(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def opened(self, credential: str, ready: asyncio.Event) -> Iterator[None]:
        """Count a stream until the block ends. Raises BusyError."""
        if self.is_closing or self.count >= STREAMS_MAX or self._by_credential[credential] >= STREAMS_OF_ONE_MAX:
            text = f"{self.count} event streams are open, {self._by_credential[credential]} of this credential: close some first"
            raise BusyError(text, size=0)
        self._number += 1
        number = self._number
        self._open[number] = ready
        self._by_credential[credential] += 1
        try:
            yield
        finally:
            del self._open[number]
            self._by_credential[credential] -= 1

    def close(self) -> None:
        """End all streams; no further one is opened."""
        self.is_closing = True
        for ready in self._open.values():
            ready.set()


def global_id(boot: str, told: Told) -> str:
    """Id of an event in the stream of all jobs; empty where a reader goes on from the one before."""
    if told.place < 0 or not isinstance(told.what, HistoryEntry):
        return ""
    return f"{boot}-{told.place + 1}-{told.what.at_ms}"


def job_id_of(boot: str, told: Told) -> str:
    """Id of an event in the stream of one job: its place in the history."""
    return f"{told.what.epoch}-{told.what.number}" if isinstance(told.what, HistoryEntry) else ""


def begin_at(follower: Follower, boot: str, last: str, names: Callable[[int], Mapping[str, str]]) -> None:
    """Have a follower of all jobs go on behind the event of an id. `names`: id and name of the jobs to which anything may have
    happened since a time. Raises InvalidConfigError."""
    if not last:
        return
    parts = last.split("-")
    if len(last) > 80 or len(parts) != 3 or not all(part.isalnum() and part.isascii() for part in parts):
        raise InvalidConfigError(f"{last[:40]!r} is no id of an event of this stream", setting="Last-Event-ID")
    if not (parts[1].isdecimal() and parts[2].isdecimal()):
        raise InvalidConfigError(f"{last[:40]!r} is no id of an event of this stream", setting="Last-Event-ID")
    if parts[0] != boot or not follower.resume(int(parts[1])):
        since_ms = int(parts[2]) - OVERLAP_MS
        follower.go_back(since_ms, names(since_ms))


def begin_at_job(follower: Follower, job_id: str, last: str, name: str) -> None:
    """Have a follower of one job go on behind a place in its history. Raises InvalidConfigError."""
    if (position := parse_position(last)) is not None:
        follower.go_on({job_id: position}, {job_id: name})


class EventStream(Response):
    """One open stream."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        streams: EventStreams,
        credential: str,
        feed: HistoryFeed,
        follower: Follower,
        name_event: Callable[[str, Told], str],
        read: Callable[[ReadHistory], Awaitable[HistoryPage | None]],
        recheck: Recheck,
        kinds: frozenset[str] = frozenset(),
    ) -> None:
        """`name_event`: id of an event. `read`: a page of a history; None: the job has none. `kinds`: told alone; all if empty."""
        self._streams = streams
        self._feed = feed
        self._follower = follower
        self._name_event = name_event
        self._read = read
        self._recheck = recheck
        self._kinds = kinds
        self._passed = ""
        """Id of the newest event that was not told, behind the newest one that was; empty: none."""
        self._ready = asyncio.Event()
        self._checked_s = time.monotonic()
        self._credential = credential
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._ready.set)

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._streams.opened(self._credential, self._ready))  # raises before anything is sent
            stack.callback(self._feed.listen(wake))
            await self._run(receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            done = sending.done() and not sending.cancelled()
            for task in (sending, leaving):
                task.cancel()
            outcome, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
            self._streams.closed[outcome if done and isinstance(outcome, str) else "reader"] += 1

    async def _send_all(self, send: Send) -> str:
        """Why the stream ended."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for block in self._blocks():
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": block, "more_body": True})
        except TimeoutError:
            return "slow"
        except _EndedError as error:
            await send({"type": "http.response.body", "body": self._place(), "more_body": False})
            return error.reason
        return "stopping"

    async def _blocks(self) -> AsyncIterator[bytes]:
        yield f"retry: {RETRY_MS}\n\n".encode()
        quiet_s = time.monotonic()
        while True:
            await self._check()
            self._ready.clear()
            told = await self._next()
            for each in told:
                if self._kinds and kind_of(each) not in self._kinds:
                    self._passed = self._name_event(self._streams.boot, each) or self._passed
                    continue
                await self._check()  # a slow reader may take minutes for a batch
                self._passed = ""
                yield self._encode(each)
                quiet_s = time.monotonic()
            if told:
                await asyncio.sleep(0)  # others have their turn, also where a stream tells nothing of thousands of events
            elif self._follower.wants() is None:
                if time.monotonic() - quiet_s >= KEEP_ALIVE_S:
                    quiet_s = time.monotonic()
                    yield self._place() or b":\n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S / 2):
                        await self._ready.wait()

    def _place(self) -> bytes:
        """An id alone, which a browser keeps and shows nobody: who asks for kinds that are rare has a place to go on from, though
        it was told nothing yet. Empty if the newest event was told."""
        passed, self._passed = self._passed, ""
        return f"id: {passed}\n\n".encode() if passed else b""

    async def _next(self) -> list[Told]:
        wanted = self._follower.wants()
        if wanted is None:
            return self._follower.take()
        try:
            return self._follower.read(await self._read(wanted))
        except HoldfastError as error:
            raise _EndedError("storage") from error

    async def _check(self) -> None:
        """Raise _EndedError if it is to end now."""
        if self._streams.is_closing:
            raise _EndedError("stopping")
        if time.monotonic() - self._checked_s < RECHECK_S:
            return
        try:
            await self._recheck()
        except NotLeaderError as error:
            raise _EndedError("leader") from error
        except HoldfastError as error:
            raise _EndedError("access") from error
        self._checked_s = time.monotonic()

    def _encode(self, told: Told) -> bytes:
        name = self._name_event(self._streams.boot, told)
        return (f"id: {name}\n".encode() if name else b"") + b"data: " + encode_event(told) + b"\n\n"


class _EndedError(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
