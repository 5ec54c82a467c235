"""SHELL: moves frames between the workers of a job. It decides nothing about them but whom they are for.

One interface, two ways: `LocalTransport` between workers of one process (batches are handed on as objects), and `ZmqTransport`
(zmq_transport.py) between processes. A worker waits for input, mails and peers in one call, `poll`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from barriers.frames import Frame
from statebackends.errors import InvalidConfigError, ProtocolError

EARLY_FRAMES_MAX = 10_000
"""Frames of a later attempt kept until this worker is deployed; only credit can come that early, one frame a channel."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a peer broke: fail the attempt."""

    slot: int
    reason: str


Received: TypeAlias = Frame | PeerLost


class Transport(Protocol):
    """One worker's way to its peers. All calls from the worker's loop thread, except `wake`."""

    @property
    def address(self) -> str:
        """What peers connect to; goes into the worker's registration."""

    def start(self, attempt: int, addresses: Mapping[int, str], keys: Mapping[int, str] | None = None) -> None:
        """Begin an attempt: connect to the peers (slot -> address). Frames of lower attempts are dropped from now on.

        `keys`: the peers' public keys by slot, where the data plane is encrypted."""

    def send(self, frame: Frame) -> None:
        """Hand a frame to its target slot, never blocking. Credit bounds what is in flight."""

    def poll(self, timeout_ms: int) -> list[Received]:
        """What came, in order per peer. Waits up to timeout_ms for the first; returns early, and empty, when woken."""

    def wake(self) -> None:
        """End the current or the next wait of `poll`. From any thread."""

    def stop(self) -> None:
        """End the attempt: disconnect from the peers and drop what is on its way.

        A job that ends well stops only when all its subtasks have finished, so that no end of partition is dropped."""

    def close(self) -> None:
        """Stop and release everything. Idempotent."""


class AttemptFence:
    """Sorts frames by attempt: lower ones are dropped, higher ones wait until this worker begins that attempt.

    A peer that was deployed first opens its channels before this worker knows of the attempt; were that credit lost, the
    channel would never start."""

    def __init__(self, early_frames_max: int = EARLY_FRAMES_MAX) -> None:
        self.attempt = 0
        self._running = False
        self._early: list[tuple[int, Frame]] = []
        self._early_frames_max = early_frames_max

    def start(self, attempt: int) -> list[Frame]:
        """Begin an attempt; returns its frames that came early."""
        if attempt <= self.attempt:
            raise InvalidConfigError(f"attempt {attempt} does not follow attempt {self.attempt}")
        self.attempt = attempt
        self._running = True
        ready = [frame for number, frame in self._early if number == attempt]
        self._early = [entry for entry in self._early if entry[0] > attempt]
        return ready

    def stop(self) -> None:
        """The attempt is over here; its frames are dropped from now on."""
        self._running = False

    def admits(self, frame: Frame) -> bool:
        """True for a frame of the current attempt. Raises ProtocolError when too many came early."""
        if frame.attempt == self.attempt:
            return self._running
        if frame.attempt > self.attempt:
            if len(self._early) >= self._early_frames_max:
                raise ProtocolError(f"more than {self._early_frames_max} frames came before attempt {frame.attempt} began here")
            self._early.append((frame.attempt, frame))
        return False


class LocalNetwork:
    """The workers of one process, by slot."""

    def __init__(self) -> None:
        self._transports: dict[int, LocalTransport] = {}
        self._lock = threading.Lock()

    def join(self, slot: int, transport: LocalTransport) -> None:
        with self._lock:
            self._transports[slot] = transport

    def leave(self, slot: int, transport: LocalTransport) -> None:
        """The worker of a slot is gone: its peers are told."""
        with self._lock:
            if self._transports.get(slot) is not transport:
                return
            del self._transports[slot]
            others = list(self._transports.values())
        for other in others:
            other.peer_left(slot)

    def find(self, slot: int) -> LocalTransport | None:
        return self._transports.get(slot)


class LocalTransport:
    """Frames between workers of one process, as objects, over one deque per worker."""

    def __init__(self, network: LocalNetwork, slot: int) -> None:
        self._network = network
        self._slot = slot
        self._inbox: deque[Received] = deque()
        self._woken = threading.Event()
        self._fence = AttemptFence()
        self._ready: list[Received] = []
        self._peers: frozenset[int] = frozenset()
        self._lost: set[int] = set()
        self._closed = False
        network.join(slot, self)

    @property
    def address(self) -> str:
        return f"local://{self._slot}"

    def start(self, attempt: int, addresses: Mapping[int, str], keys: Mapping[int, str] | None = None) -> None:
        self._ready = list(self._fence.start(attempt))
        self._peers = frozenset(addresses) - {self._slot}
        self._lost = set()
        for slot in sorted(self._peers):
            if self._network.find(slot) is None:
                self._lose(slot, "no such worker in this process")

    def send(self, frame: Frame) -> None:
        target = self._network.find(frame.target_slot)
        if target is None:
            self._lose(frame.target_slot, "the worker left")
            return
        target._deliver(frame)

    def _lose(self, slot: int, reason: str) -> None:
        if slot not in self._lost:
            self._lost.add(slot)
            self._ready.append(PeerLost(slot, reason))

    def _deliver(self, received: Received) -> None:
        self._inbox.append(received)
        self._woken.set()

    def peer_left(self, slot: int) -> None:
        """From the thread of the worker that leaves."""
        self._deliver(PeerLost(slot, "the worker left"))

    def poll(self, timeout_ms: int) -> list[Received]:
        if not self._ready and not self._inbox and timeout_ms > 0:
            self._woken.wait(timeout_ms / 1000)
        self._woken.clear()
        received, self._ready = self._ready, []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, PeerLost):
                if item.slot in self._peers and item.slot not in self._lost:
                    self._lost.add(item.slot)
                    received.append(item)
            elif self._fence.admits(item):
                received.append(item)
        return received

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._fence.stop()
        self._ready = []
        self._peers = frozenset()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stop()
            self._network.leave(self._slot, self)
