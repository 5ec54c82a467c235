"""SHELL: uvicorn's HTTP/1.1 protocol with a connection budget: reports the events of h11 to the core, closes what the core returns.

uvicorn alone bounds nothing but idle connections: a head may take any time, and silent connections fill its limit. h11 and not
httptools, which buffers a head of any length. h11 itself bounds what waits for its end alone: a head that came whole may have any
length, so it gets what came in pieces. One event loop and its thread own all of this."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from http import HTTPStatus
from typing import Any, Protocol, cast

import h11
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from holdfast.api.errors import HeadTooLargeError, encode_error
from holdfast.api.http.connection_budget import (
    Accepted,
    BodyBudget,
    BodyReceived,
    CallerKind,
    Closed,
    CloseReason,
    ConnectionBudget,
    ConnectionLimits,
    DeadlineReached,
    Event,
    Phase,
    PhaseEntered,
    Proved,
    SendingResumed,
    SendingStopped,
)
from holdfast.api.http.joining import JoinedTransport
from holdfast.api.http.page_headers import API_HEADERS
from holdfast.api.http.request_ids import HEADER, new_id
from holdfast.statebackends.errors import HoldfastError, ProtocolError

log = logging.getLogger("holdfast.api")

TICK_S = 0.25
"""Seconds between two checks of the deadlines, by which a connection may exceed its own."""

REPORT_S = 10.0
"""Seconds between two log lines about closed connections: a flood must not fill the log."""

HEAD_BYTES_MAX = 16 * 1024
"""Of the head of a request, its first line and the empty one at its end included."""

_CONNECTION = "holdfast.connection"
_ANSWERED = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)
_HEARD = (h11.IDLE, h11.SEND_BODY, h11.MUST_CLOSE)
"""States of a caller whose bytes h11 looks at: a request that is complete has to be answered before it looks at the next one."""

_quiet = logging.getLogger("holdfast.api.http")
"""Replaces uvicorn's logger, which writes a line for each malformed request."""
_quiet.setLevel(logging.ERROR)


class Guarded(Protocol):
    """A connection that can be closed."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport


class ConnectionGuard:
    """The budgets of one server, and its open connections."""

    def __init__(self, limits: ConnectionLimits, bodies: BodyBudget) -> None:
        self.limits = limits
        self.budget = ConnectionBudget(limits)
        self.bodies = bodies
        self.malformed = 0
        """Requests that were not HTTP, or had too large a head, since the start."""
        self._protocols: dict[int, Guarded] = {}
        self._unsent: dict[int, int] = {}
        """Connection whose socket is full -> bytes that waited for it at the last check."""
        self._accepted = 0
        self._ticking: asyncio.TimerHandle | None = None
        self._reported: Counter[CloseReason] = Counter()
        self._reported_s = 0.0

    def adopt(self, protocol: GuardedProtocol) -> None:
        """Hand a registered connection over to the protocol that its handshake led to."""
        self._protocols[protocol.number] = protocol

    def accept(self, protocol: Guarded, address: str) -> int:
        """Register a new connection and return its number."""
        self._accepted += 1
        number = self._accepted
        self._protocols[number] = protocol
        if self._ticking is None:
            self._ticking = protocol.loop.call_later(TICK_S, self._tick, protocol.loop)
        self.handle(Accepted(number, address), protocol.loop)
        return number

    def handle(self, event: Event, loop: asyncio.AbstractEventLoop) -> None:
        for action in self.budget.handle(event, now_ms=int(loop.time() * 1000)):
            self._protocols[action.connection].transport.abort()

    def forget(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.handle(Closed(number), loop)
        self._protocols.pop(number, None)
        self._unsent.pop(number, None)

    def stop_sending(self, protocol: GuardedProtocol) -> None:
        self._unsent[protocol.number] = protocol.transport.get_write_buffer_size()
        self.handle(SendingStopped(protocol.number), protocol.loop)

    def resume_sending(self, protocol: GuardedProtocol) -> None:
        self._unsent.pop(protocol.number, None)
        self.handle(SendingResumed(protocol.number), protocol.loop)

    def _check_readers(self) -> None:
        """Restart the time of a connection that was read from, however slowly."""
        for number, before in list(self._unsent.items()):
            protocol = cast(GuardedProtocol, self._protocols[number])  # what has no request yet is sent nothing
            if protocol.transport.get_write_buffer_size() < before:
                self.stop_sending(protocol)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._check_readers()
        self.handle(DeadlineReached(), loop)
        self._report(loop.time())
        self._ticking = loop.call_later(TICK_S, self._tick, loop) if self._protocols else None

    def _report(self, now_s: float) -> None:
        new = self.budget.closed - self._reported
        if not new or now_s < self._reported_s + REPORT_S:
            return
        self._reported, self._reported_s = Counter(self.budget.closed), now_s
        crowded = any(reason in new for reason in _CAPS)
        causes = ", ".join(f"{reason.value} {count}" for reason, count in sorted(new.items()))
        log.log(
            logging.WARNING if crowded else logging.INFO,
            "closed %d connections (%s); %d are open, %d of them without a request that was taken",
            new.total(),
            causes,
            len(self.budget),
            self.budget.count(CallerKind.UNKNOWN),
        )


_CAPS = (CloseReason.ADDRESS_CAP, CloseReason.UNKNOWN_CAP, CloseReason.CONNECTIONS_CAP)


class GuardedProtocol(H11Protocol):
    """One connection. Requests find it in their scope: see `connection_of`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        guard: ConnectionGuard,
    ) -> None:
        super().__init__(config, server_state, {**app_state, _CONNECTION: self}, _loop)
        self.logger = _quiet
        self.conn = h11.Connection(h11.SERVER, HEAD_BYTES_MAX - 1)  # so many may wait for their end: one more byte has to be it
        self.guard = guard
        self.caller = CallerKind.UNKNOWN
        self.number = 0
        """0: not registered yet; behind a TLS handshake it is."""
        self.is_made = False
        self.below: asyncio.Transport | None = None
        """Of a connection with TLS: what carries its bytes."""
        self._phase = Phase.HEAD
        self._has_answered = False
        self._unparsed = bytearray()
        """What has come, and h11 has not been given yet."""
        self._is_refused = False
        """What came was no request, and that was answered: what else comes is dropped."""

    def prove(self, caller: CallerKind) -> None:
        """Note that the caller is at least of this kind."""
        if caller > self.caller:
            self.caller = caller
            self.guard.handle(Proved(self.number, caller), self.loop)

    # ------------------------------------------------------------------------------------------- asyncio and uvicorn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = JoinedTransport(transport, self.loop)
        self.is_made = True
        if self.number:
            self.guard.adopt(self)
        else:
            self.number = self.guard.accept(self, self.client[0] if self.client else "")

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        was = self._phase
        self._unset_keepalive_if_required()
        self._unparsed += data
        self._parse()
        self._check_phase()
        if was is Phase.BODY and self._phase is Phase.BODY:
            self.guard.handle(BodyReceived(self.number, len(data)), self.loop)

    def handle_events(self) -> None:
        """uvicorn calls it when the turn of the next request has come."""
        super().handle_events()
        self._parse()

    def _parse(self) -> None:
        """Give h11 what has come, never more than the head of one request may have: what it has without an end, it refuses."""
        while self._unparsed and self.conn.their_state in _HEARD and not self.transport.is_closing():
            room = HEAD_BYTES_MAX - len(self.conn.trailing_data[0])
            self.conn.receive_data(bytes(self._unparsed[:room]))
            del self._unparsed[:room]
            super().handle_events()
        if self._unparsed:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        self._has_answered = True
        if isinstance(self.transport, JoinedTransport):
            self.transport.flush()
        super().on_response_complete()
        self._check_phase()

    def shutdown(self) -> None:
        """The service stops. A TLS connection that has sent all waits for no goodbye of its peer: idle ones never read it."""
        is_idle = self.cycle is None or self.cycle.response_complete
        super().shutdown()
        if is_idle and self.below is not None and self.below.get_write_buffer_size() == 0:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.guard.stop_sending(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.guard.resume_sending(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.guard.forget(self.number, self.loop)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it while it handles the error of h11. Send no second answer: the request may have been answered already, or
        be about to; nothing is logged about it."""
        self.guard.malformed += 1
        self._unparsed.clear()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(_described(sys.exception()))
        else:
            self.transport.close()

    def _refuse(self, error: HoldfastError) -> None:
        """Answer, and say no more. The other side may still be sending, and bytes that nobody reads would reset the connection
        before it has read the answer: so they are read and dropped, as long as the drain of a body may take."""
        wire = encode_error(error)
        headers = [*self.server_state.default_headers, *API_HEADERS, (HEADER, new_id()), (b"Connection", b"close")]
        headers += [(name.encode(), value.encode()) for name, value in wire.headers.items()]
        headers.append((b"Content-Length", str(len(wire.body)).encode()))
        reason = HTTPStatus(wire.status).phrase.encode()
        answer = h11.Response(status_code=wire.status, headers=headers, reason=reason)
        for event in (answer, h11.Data(wire.body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        if self.transport.can_write_eof():  # TLS can't: its client knows by the length that this was all
            self.transport.write_eof()
        self.flow.resume_reading()

    # -------------------------------------------------------------------------------------------------------- phases

    def _check_phase(self) -> None:
        phase = self._found()
        if phase is not self._phase:
            self._phase = phase
            self.guard.handle(PhaseEntered(self.number, phase), self.loop)

    def _found(self) -> Phase:
        answered = self.conn.our_state in _ANSWERED
        if self.conn.their_state is h11.IDLE:
            return Phase.IDLE if self._has_answered and not self.conn.trailing_data[0] else Phase.HEAD
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.DRAINING if answered else Phase.BODY
        return Phase.DRAINING if answered else Phase.ANSWERING


def _described(error: BaseException | None) -> HoldfastError:
    """What h11 says of a request, as an error of the service."""
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        return HeadTooLargeError(f"the request's head is larger than {HEAD_BYTES_MAX} bytes", size_max=HEAD_BYTES_MAX)
    return ProtocolError(f"it is no request of HTTP/1.1: {error}")


def connection_of(scope: Scope) -> GuardedProtocol | None:
    """Connection that a request came on; None outside a server (an application under test)."""
    found = scope.get("state", {}).get(_CONNECTION)
    return found if isinstance(found, GuardedProtocol) else None


def prove(scope: Scope, caller: CallerKind) -> None:
    """Note that the caller of this request is at least of this kind."""
    connection = connection_of(scope)
    if connection is not None:
        connection.prove(caller)
