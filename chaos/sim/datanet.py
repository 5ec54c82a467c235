"""The data plane in virtual time: frames between worker processes as bytes, in order per connection, with the losses of TCP.

A connection delivers everything in order or breaks; each end notices a break once, as from ZeroMQ's socket monitor in production.
Frames on their way when a process dies still arrive; those of a broken connection do not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from hashlib import sha1
from itertools import count
from typing import Any

from holdfast.barriers.exchange.frames import Frame, FrameEncoder
from holdfast.barriers.transport.admission import Admission, AttemptPeers
from holdfast.barriers.transport.authentication import HELD_TIMEOUT_MS, Handshake, HandshakeAnswer, PeerAuthentication
from holdfast.barriers.transport.port import PeerLost, Received
from holdfast.chaos.sim.forgery import forge_messages
from holdfast.chaos.sim.injector import Injector
from holdfast.chaos.sim.kernel import Kernel, Process
from holdfast.statebackends.errors import InvariantError

WAY_US = (50, 900)
"""Least and most time of a frame between two workers."""

_SCHEME = "tcp://"


class _Connection:
    """One direction between two processes, of one attempt. Frames wait until the target admits the connection."""

    __slots__ = ("last_us", "let_in", "open", "slot", "source", "target", "waiting")

    def __init__(self, source: SimTransport, target: SimTransport, slot: int) -> None:
        self.source = source
        self.target = target
        self.slot = slot
        """Slot of the target."""
        self.open = True
        self.let_in = False
        self.waiting: list[list[Any]] = []
        self.last_us = 0

    def arrive(self, parts: list[Any]) -> None:
        """A frame arrives at the target."""
        if not self.open:
            return
        if self.let_in:
            self.target.take(self.source.key, parts)
        else:
            self.waiting.append(parts)

    def admit(self) -> None:
        """The handshake is complete: deliver what waits."""
        self.let_in = True
        waiting, self.waiting = self.waiting, []
        for parts in waiting:
            self.arrive(parts)


class DataNetwork:
    """Data ports of all workers, by address."""

    def __init__(self, kernel: Kernel, injector: Injector) -> None:
        self.kernel = kernel
        self.injector = injector
        self.random = kernel.streams.of("data network")
        self.ports: dict[str, SimTransport] = {}
        self.keys: list[str] = []
        """Keys of all processes so far."""

    def open(self, process: Process, slot: int, wake: Callable[[], None]) -> SimTransport:
        """Open the data port of a new worker process."""
        transport = SimTransport(self, process, slot, wake)
        self.ports[transport.address] = transport
        self.keys.append(transport.key)
        return transport

    def close(self, transport: SimTransport) -> None:
        """Close the port of a dead process: its peers notice."""
        if self.ports.pop(transport.address, None) is None:
            return
        for other in list(self.ports.values()):
            other.peer_gone(transport, "disconnected")

    def forge(self, process: Process, rng: random.Random) -> bool:
        """Send frames that no process of the attempt sent to a worker's port; False if the worker runs none."""
        target = next((transport for transport in self.ports.values() if transport.is_of(process)), None)
        return target is not None and target.take_forged(rng, self.keys)

    def cut(self, one: int, other: int) -> bool:
        """Break the connections between the workers of two slots; false if there were none."""
        broken = False
        for transport in list(self.ports.values()):
            if transport.slot in (one, other):
                broken = transport.cut_from(other if transport.slot == one else one) or broken
        return broken


class SimTransport:
    """Implements `holdfast.barriers.transport.port.Transport` for one simulated worker process. `poll` never waits."""

    def __init__(self, network: DataNetwork, process: Process, slot: int, wake: Callable[[], None]) -> None:
        self._network = network
        self._process = process
        self.slot = slot
        self._wake = wake
        self._admission = Admission(slot)
        self._authentication = PeerAuthentication()
        self._asking: dict[int, _Connection] = {}
        """Ticket -> connection whose handshake waits."""
        self._tickets = count(1)
        self._peers: AttemptPeers | None = None
        self._encoder = FrameEncoder()
        self._own: deque[Received] = deque()
        self._inbox: deque[tuple[str, list[Any]]] = deque()
        """(sender as the connection proved it, frame)."""
        self._losses: deque[PeerLost] = deque()
        self._connections: dict[int, _Connection] = {}
        self._lost: set[int] = set()

    @property
    def address(self) -> str:
        return f"{_SCHEME}{self._process.name}:1"

    @property
    def key(self) -> str:
        """Identity of this process for its peers; in production the public key that a handshake proves."""
        return sha1(self._process.name.encode(), usedforsecurity=False).hexdigest()

    @property
    def refused_count(self) -> int:
        return self._admission.refused_count

    def start(self, peers: AttemptPeers) -> None:
        early = self._admission.start(peers)
        self._peers = peers
        self._encoder = FrameEncoder()
        self._own.clear()
        self._own.extend(early)
        self._losses.clear()
        self._lost.clear()
        self._connections.clear()
        self._answer(self._authentication.allow(frozenset(peers.slots), peers.secret))
        for slot, peer in sorted(peers.peers.items()):
            if slot == self.slot:
                continue
            target = self._network.ports.get(peer.address)
            if target is None:
                self._lose_soon(slot, "connect retried")
            else:
                self._connections[slot] = connection = _Connection(self, target, slot)
                target.asked(connection)

    def send(self, frame: Frame) -> None:
        slot = frame.target_slot
        if slot == self.slot:
            self._own.append(frame)
            return
        connection = self._connections.get(slot)
        if connection is None:
            if slot in self._lost or self._network.kernel.current is not self._process:
                return
            self._lose_soon(slot, "not connected")
            return
        parts = [bytes(part) for part in self._encoder.encode(frame)]
        kernel = self._network.kernel
        delay_us = self._network.random.between(*WAY_US) + self._network.injector.link_delay_us(self.slot, slot)
        connection.last_us = max(connection.last_us + 1, kernel.now_us + delay_us)
        kernel.after(connection.last_us - kernel.now_us, lambda: connection.arrive(parts))

    def asked(self, connection: _Connection) -> None:
        """A peer connects: it is admitted, or waits until this worker knows of its attempt."""
        kernel = self._network.kernel
        ticket = next(self._tickets)
        self._asking[ticket] = connection
        self._answer(self._authentication.ask(Handshake(ticket, connection.source.key), now_ms=kernel.now_ms))
        if ticket in self._asking:
            kernel.after(HELD_TIMEOUT_MS * 1000, self._expire, self._process)

    def _expire(self) -> None:
        self._answer(self._authentication.expire(now_ms=self._network.kernel.now_ms))

    def _answer(self, answers: list[HandshakeAnswer]) -> None:
        for each in answers:
            connection = self._asking.pop(each.ticket)
            if each.let_in:
                connection.admit()
            else:
                connection.source.turned_away(connection)

    def turned_away(self, connection: _Connection) -> None:
        """A peer refused the connection."""
        connection.open = False
        if self._connections.get(connection.slot) is connection:
            del self._connections[connection.slot]
            self._lose_soon(connection.slot, "handshake failed auth")

    def take(self, identity: str, parts: list[Any]) -> None:
        """Frames arrived; they wait in the socket until the loop polls."""
        self._inbox.append((identity, parts))
        self._wake()

    def is_of(self, process: Process) -> bool:
        return self._process is process

    def take_forged(self, rng: random.Random, keys: list[str]) -> bool:
        """Take forged frames of a stranger, of replaced processes, and of peers on channels that are not theirs. False without an
        attempt."""
        peers = self._peers
        if peers is None:
            return False
        known = sorted(peers.slots)
        replaced = [key for key in keys if key not in (*known, self.key)]
        strangers = ["", "a stranger", *replaced[-3:]]
        forged = forge_messages(
            rng, slot=self.slot, attempt=peers.attempt, channels=peers.channels, strangers=strangers, peers=known
        )
        for identity, parts in forged:
            self.take(identity, parts)
        return True

    def peer_gone(self, peer: SimTransport, reason: str) -> None:
        """A connected process is gone; frames that it sent before are delivered first."""
        for slot, connection in sorted(self._connections.items()):
            if connection.target is peer:
                del self._connections[slot]
                self._lose_soon(slot, reason)

    def cut_from(self, slot: int) -> bool:
        """Break the connection to a slot, with all frames on their way."""
        connection = self._connections.pop(slot, None)
        if connection is None:
            return False
        connection.open = False
        self._lose_soon(slot, "disconnected")
        return True

    def _lose_soon(self, slot: int, reason: str) -> None:
        if slot in self._lost:
            return
        self._lost.add(slot)
        attempt = self._admission.attempt
        kernel = self._network.kernel

        def tell() -> None:
            if self._admission.attempt == attempt:
                self._losses.append(PeerLost(slot, reason))
                self._wake()

        kernel.after(WAY_US[1] + self._network.random.between(*WAY_US), tell)

    def poll(self, timeout_ms: int) -> list[Received]:
        own, self._own = self._own, deque()
        received: list[Received] = [item for item in own if isinstance(item, PeerLost) or self._admission.is_current(item)]
        while self._inbox:
            frame = self._admission.read(*self._inbox.popleft())
            if frame is not None:
                received.append(frame)
        received.extend(self._losses)
        self._losses.clear()
        return received

    @property
    def has_input(self) -> bool:
        """Whether a poll would return something."""
        return bool(self._own or self._inbox or self._losses)

    def wake(self) -> None:
        self._wake()

    def stop(self) -> None:
        self._admission.stop()
        self._own.clear()
        self._connections.clear()

    def close(self) -> None:
        self.stop()
        self._network.close(self)


def slot_of(target: str) -> tuple[int, int]:
    """The two slots in a link's name, such as `0-1`. Raises InvariantError for anything else."""
    one, dash, other = target.partition("-")
    if not dash or not one.isdigit() or not other.isdigit():
        raise InvariantError(f"{target!r} is not a link such as 0-1")
    return int(one), int(other)
