"""CORE: which connections may stay: deadlines for heads and bodies, a cap per address, and places reserved for known callers.

Events in, actions out; the shell (`protocol.py`) owns the sockets and reports what HTTP made of their bytes. The core does not know
what a request is about; a caller's identity is a `CallerKind`.

A flood may come from the address of the workers (a local Spark, a proxy), and refusing newcomers would lock out legitimate callers.
So a newcomer is always accepted, and replaces an unproven connection: the oldest one that waits for its caller, either for bytes or
for the reading of an answer. The only answers without proof are those of open paths."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import assert_never

from holdfast.statebackends.errors import InvariantError


class CallerKind(IntEnum):
    """Proof that the caller of a connection has given. It only rises while the connection lives."""

    UNKNOWN = 0
    CLIENT = 1
    """A request with the token was accepted."""
    WORKER = 2
    """A request of the worker protocol was answered as one of a slot's own process."""


class Phase(StrEnum):
    """Phase of a connection between two requests."""

    HEAD = "head"
    """New, or the first bytes of a request have arrived: its head is not complete."""
    BODY = "body"
    """The head is complete, the body is not."""
    ANSWERING = "answering"
    """The request is complete, the answer is not: a command stream stays here."""
    DRAINING = "draining"
    """Answered before its body was complete; the rest is read and dropped, so that the caller reads the answer and no reset."""
    IDLE = "idle"
    """Answered; no byte of a next request has arrived."""


class CloseReason(StrEnum):
    """Why this side closed a connection."""

    HEAD_DEADLINE = "head_deadline"
    BODY_DEADLINE = "body_deadline"
    SEND_DEADLINE = "send_deadline"
    DRAIN_DEADLINE = "drain_deadline"
    ADDRESS_CAP = "address_cap"
    UNKNOWN_CAP = "unknown_cap"
    CONNECTIONS_CAP = "connections_cap"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds; each is at least 1."""

    connections_max: int = 8_192
    """Connections of all callers together."""
    unknown_max: int = 2_048
    """Connections of unproven callers: the rest of `connections_max` is reserved for proven ones."""
    unknown_per_address_max: int = 1_024
    """Connections of unproven callers from one address. A server accepts far fewer before it reads what the accepted ones sent;
    otherwise it would close a caller with a token unread."""
    head_timeout_ms: int = 5_000
    """Time from the accept, or from the first byte of a later request, to the end of its head."""
    body_timeout_ms: int = 30_000
    """Time from the end of the head to the end of the body, if it arrives at less than `body_bytes_per_s_min`."""
    body_bytes_per_s_min: int = 128 * 1024
    """Each such number of bytes extends the time by a second, so that a large body that moves may take longer."""
    drain_timeout_ms: int = 5_000
    send_timeout_ms: int = 30_000
    """Time that a caller may leave a full socket unread; reading some of it restarts the time."""
    answer_timeout_ms: int = 60_000
    """Time from the end of a request until its answer is read, for an unproven caller: slow reading does not extend it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    connection: int
    """Number of the connection, never reused."""
    address: str


@dataclass(frozen=True, slots=True)
class PhaseEntered:
    connection: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class BodyReceived:
    connection: int
    size: int


@dataclass(frozen=True, slots=True)
class Proved:
    connection: int
    caller: CallerKind


@dataclass(frozen=True, slots=True)
class SendingStopped:
    """The socket is full. Repeated when its reader has read some."""

    connection: int


@dataclass(frozen=True, slots=True)
class SendingResumed:
    connection: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Closed by either side; also sent for connections that this core had closed."""

    connection: int


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    pass


Event = Accepted | PhaseEntered | BodyReceived | Proved | SendingStopped | SendingResumed | Closed | DeadlineReached


@dataclass(frozen=True, slots=True)
class CloseConnection:
    connection: int
    reason: CloseReason


class _Connection:
    __slots__ = ("address", "answer_ms", "blocked_ms", "caller", "deadline_ms", "phase", "received", "was_blocked")

    def __init__(self, address: str) -> None:
        self.address = address
        self.phase = Phase.HEAD
        self.caller = CallerKind.UNKNOWN
        self.deadline_ms: int | None = None
        self.blocked_ms: int | None = None
        """Time at which a full socket has been left unread for too long."""
        self.answer_ms: int | None = None
        """Time at which an unproven caller must have read its answer."""
        self.was_blocked = False
        """The answer of this phase did not fit into the socket. Reading a little of it does not restore the place in the order."""
        self.received = 0

    @property
    def makes_room(self) -> bool:
        """Whether closing it breaks no request of a legitimate caller."""
        return self.phase in _WAITING or (self.caller is CallerKind.UNKNOWN and self.was_blocked)

    @property
    def first_deadline_ms(self) -> int | None:
        """The earlier of the deadlines for sending."""
        return min((each for each in (self.blocked_ms, self.answer_ms) if each is not None), default=None)


_WAITING = frozenset({Phase.HEAD, Phase.DRAINING, Phase.IDLE})
"""Phases of a connection that waits only for bytes of its caller: closing it breaks no accepted request."""

Waiting = OrderedDict[int, None]


class ConnectionBudget:
    """All connections of one service. Constant time per event, except for a deadline, which checks each connection that has one."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._connections: dict[int, _Connection] = {}
        self._timed: set[int] = set()
        """Connections with a deadline."""
        self._unknown: Counter[str] = Counter()
        """Address -> connections of unproven callers."""
        self._callers: Counter[CallerKind] = Counter()
        self._waiting: dict[CallerKind, Waiting] = {caller: OrderedDict() for caller in CallerKind}
        """In the order in which they began to wait."""
        self._waiting_at: dict[str, Waiting] = {}
        """Address -> waiting connections of unproven callers."""
        self.closed: Counter[CloseReason] = Counter()
        """Connections closed by this side since the start."""

    # ----------------------------------------------------------------------------------------------------- interface

    def handle(self, event: Event, *, now_ms: int) -> list[CloseConnection]:
        """Handle one event; connections to be closed count as closed from here on."""
        closing = self._digest(event, now_ms)
        self.check_invariants()
        return closing

    def check_invariants(self) -> None:
        """Raise InvariantError if the counts disagree; runs after every event, in constant time."""
        unknown, waiting = self._callers[CallerKind.UNKNOWN], len(self._waiting[CallerKind.UNKNOWN])
        if self._callers.total() != len(self._connections) or not waiting <= unknown:
            raise InvariantError(f"{dict(self._callers)} of {len(self._connections)} connections, {waiting} unknown ones wait")

    def check_lists(self) -> None:
        """Raise InvariantError if the lists of connections disagree with one another. Checks every connection: for tests."""
        unknown = Counter(each.address for each in self._connections.values() if each.caller is CallerKind.UNKNOWN)
        listed = {address: set(waiting) for address, waiting in self._waiting_at.items()}
        room = {number: each for number, each in self._connections.items() if each.makes_room}
        if self._unknown != unknown or not self._timed <= self._connections.keys():
            raise InvariantError(f"{dict(self._unknown)} are counted, {dict(unknown)} are open")
        for caller, waiting in self._waiting.items():
            if set(waiting) != {number for number, each in room.items() if each.caller is caller}:
                raise InvariantError(f"{list(waiting)} of caller {caller} make room, and not all of them")
        if set().union(*listed.values()) != set(self._waiting[CallerKind.UNKNOWN]) or not all(listed.values()):
            raise InvariantError(f"{listed} are listed by address, {list(self._waiting[CallerKind.UNKNOWN])} in all")

    def _digest(self, event: Event, now_ms: int) -> list[CloseConnection]:
        match event:
            case Accepted():
                return self._accept(event, now_ms)
            case PhaseEntered():
                self._enter(event.connection, event.phase, now_ms)
            case BodyReceived():
                self._receive(event)
            case Proved():
                self._prove(event)
            case SendingStopped():
                self._block(event.connection, now_ms)
            case SendingResumed():
                self._unblock(event.connection)
            case Closed():
                self._forget(event.connection)
            case DeadlineReached():
                return self._expire(now_ms)
            case _:
                assert_never(event)
        return []

    def count(self, caller: CallerKind) -> int:
        """Connections whose callers are of exactly this kind."""
        return self._callers[caller]

    def __len__(self) -> int:
        return len(self._connections)

    def __contains__(self, connection: int) -> bool:
        return connection in self._connections

    # --------------------------------------------------------------------------------------------------------- steps

    def _accept(self, event: Accepted, now_ms: int) -> list[CloseConnection]:
        if event.connection in self._connections:
            raise InvariantError(f"connection {event.connection} was accepted twice")
        self._connections[event.connection] = _Connection(event.address)
        self._unknown[event.address] += 1
        self._callers[CallerKind.UNKNOWN] += 1
        self._enter(event.connection, Phase.HEAD, now_ms)
        limits = self._limits
        closing = []
        if self._unknown[event.address] > limits.unknown_per_address_max:
            closing.append(self._evict(self._waiting_at[event.address], CloseReason.ADDRESS_CAP))
        if self._callers[CallerKind.UNKNOWN] > limits.unknown_max:
            closing.append(self._evict(self._waiting[CallerKind.UNKNOWN], CloseReason.UNKNOWN_CAP))
        if len(self._connections) > limits.connections_max:
            closing.append(self._evict(self._least(event.connection), CloseReason.CONNECTIONS_CAP))
        return closing

    def _least(self, newcomer: int) -> Waiting:
        """Connections to close when all places are taken: unproven callers before clients, and no worker.

        The newcomer is among the unproven ones. It began to wait last, so it is closed only if no other is."""
        unknown, clients = self._waiting[CallerKind.UNKNOWN], self._waiting[CallerKind.CLIENT]
        return clients if clients and next(iter(unknown)) == newcomer else unknown

    def _evict(self, waiting: Waiting, reason: CloseReason) -> CloseConnection:
        return self._close(next(iter(waiting)), reason)

    def _enter(self, number: int, phase: Phase, now_ms: int) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        self._unlist(number, connection)
        connection.phase, connection.received = phase, 0
        timeouts = {
            Phase.HEAD: self._limits.head_timeout_ms,
            Phase.BODY: self._limits.body_timeout_ms,
            Phase.DRAINING: self._limits.drain_timeout_ms,
        }
        timeout_ms = timeouts.get(phase)
        connection.deadline_ms = None if timeout_ms is None else now_ms + timeout_ms
        connection.was_blocked = connection.blocked_ms is not None
        if phase is Phase.ANSWERING and connection.caller is CallerKind.UNKNOWN:
            connection.answer_ms = now_ms + self._limits.answer_timeout_ms
        elif not connection.was_blocked:
            connection.answer_ms = None
        self._list(number, connection)

    def _receive(self, event: BodyReceived) -> None:
        connection = self._connections.get(event.connection)
        if connection is None or connection.phase is not Phase.BODY or connection.deadline_ms is None:
            return
        rate = self._limits.body_bytes_per_s_min
        before_ms = connection.received * 1000 // rate
        connection.received += event.size
        connection.deadline_ms += connection.received * 1000 // rate - before_ms

    def _prove(self, event: Proved) -> None:
        connection = self._connections.get(event.connection)
        if connection is None or event.caller <= connection.caller:
            return
        self._unlist(event.connection, connection)
        if connection.caller is CallerKind.UNKNOWN:
            self._no_longer_unknown(connection)
        self._callers[connection.caller] -= 1
        connection.caller = event.caller
        connection.answer_ms = None
        self._callers[connection.caller] += 1
        self._list(event.connection, connection)

    def _block(self, number: int, now_ms: int) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        connection.blocked_ms = now_ms + self._limits.send_timeout_ms
        if connection.caller is CallerKind.UNKNOWN and connection.answer_ms is None:
            connection.answer_ms = now_ms + self._limits.answer_timeout_ms
        if connection.was_blocked:
            self._time(number, connection)  # its place in the order stays: reading a little makes no connection younger
            return
        self._unlist(number, connection)
        connection.was_blocked = True
        self._list(number, connection)

    def _unblock(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        connection.blocked_ms = None
        if connection.phase not in (Phase.ANSWERING, Phase.BODY):
            connection.answer_ms = None
        self._time(number, connection)

    def _expire(self, now_ms: int) -> list[CloseConnection]:
        closing = []
        for number in sorted(self._timed):
            connection = self._connections[number]
            if connection.deadline_ms is not None and now_ms >= connection.deadline_ms:
                closing.append(self._close(number, _DEADLINES[connection.phase]))
            elif (sending_ms := connection.first_deadline_ms) is not None and now_ms >= sending_ms:
                closing.append(self._close(number, CloseReason.SEND_DEADLINE))
        return closing

    # --------------------------------------------------------------------------------------------------- bookkeeping

    def _close(self, number: int, reason: CloseReason) -> CloseConnection:
        self.closed[reason] += 1
        self._forget(number)
        return CloseConnection(number, reason)

    def _forget(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        self._unlist(number, connection)
        self._timed.discard(number)
        self._callers[connection.caller] -= 1
        if connection.caller is CallerKind.UNKNOWN:
            self._no_longer_unknown(connection)

    def _no_longer_unknown(self, connection: _Connection) -> None:
        self._unknown[connection.address] -= 1
        if self._unknown[connection.address] == 0:
            del self._unknown[connection.address]

    def _list(self, number: int, connection: _Connection) -> None:
        self._time(number, connection)
        if connection.makes_room:
            self._waiting[connection.caller][number] = None
            if connection.caller is CallerKind.UNKNOWN:
                self._waiting_at.setdefault(connection.address, OrderedDict())[number] = None

    def _unlist(self, number: int, connection: _Connection) -> None:
        self._waiting[connection.caller].pop(number, None)
        at_address = self._waiting_at.get(connection.address)
        if at_address is not None:
            at_address.pop(number, None)
            if not at_address:
                del self._waiting_at[connection.address]

    def _time(self, number: int, connection: _Connection) -> None:
        if connection.deadline_ms is None and connection.first_deadline_ms is None:
            self._timed.discard(number)
        else:
            self._timed.add(number)


_DEADLINES = {
    Phase.HEAD: CloseReason.HEAD_DEADLINE,
    Phase.BODY: CloseReason.BODY_DEADLINE,
    Phase.DRAINING: CloseReason.DRAIN_DEADLINE,
}


class BodyBudget:
    """Bytes of request bodies held at one time; a part of them is reserved for workers.

    A refused caller asks again later: an acknowledgement must not wait behind bodies that may never be complete."""

    def __init__(self, bytes_max: int, *, kept_for_workers: int) -> None:
        """`kept_for_workers`: bytes, of `bytes_max`."""
        self._bytes_max = {CallerKind.WORKER: bytes_max, CallerKind.CLIENT: bytes_max - kept_for_workers}
        self._held: dict[int, int] = {}
        self.held = 0
        """Bytes."""
        self.refused = 0
        """Refused requests since the start."""

    def take(self, request: int, size: int, caller: CallerKind) -> bool:
        """Hold `size` bytes more for a request; False if there is no room. Unproven callers may send no body."""
        if self.held + size > self._bytes_max.get(caller, 0):
            self.refused += 1
            return False
        self._held[request] = self._held.get(request, 0) + size
        self.held += size
        return True

    def give_back(self, request: int) -> None:
        """Release all bytes of a request. Idempotent."""
        self.held -= self._held.pop(request, 0)
