"""SHELL: moves frames between the workers of a job, by the slot that each is for. It decides nothing else about them.

One interface, two ways: `LocalTransport` between workers of one process (batches are handed on as objects), and `ZmqTransport`
(zmq_transport.py) between processes. A worker waits for input, mails and peers in one call, `poll`."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from holdfast.barriers.exchange.frames import AnyFrame, Frame
from holdfast.barriers.transport.admission import EARLY_FRAMES_MAX, AttemptPeers
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a peer broke: fail the attempt."""

    slot: int
    reason: str


Received: TypeAlias = AnyFrame | PeerLost
"""Frames from other processes are still encoded: their headers alone were checked (admission.py)."""


class Transport(Protocol):
    """Transport of one worker to its peers. All calls are from the worker's loop thread, except `wake`."""

    @property
    def address(self) -> str:
        """What peers connect to; goes into the worker's registration."""

    def start(self, peers: AttemptPeers) -> None:
        """Start an attempt: connect to the peers. From now on only their frames of this attempt, on their channels, count."""

    def send(self, frame: Frame) -> None:
        """Hand a frame to its target slot, never blocking. Credit bounds what is in flight.

        Raises what FrameEncoder.encode does for a frame that can't travel: its sender has lost it."""

    def poll(self, timeout_ms: int) -> list[Received]:
        """Received frames, in order per peer. Waits up to timeout_ms for the first; returns early, and empty, when woken."""

    def wake(self) -> None:
        """End the current or the next wait of `poll`. From any thread."""

    def stop(self) -> None:
        """End the attempt: disconnect from the peers and drop frames that are on their way.

        A job that ends well stops only when all its subtasks have finished, so that no end of partition is dropped."""

    def close(self) -> None:
        """Stop and release everything. Idempotent."""

    @property
    def refused_count(self) -> int:
        """Frames dropped since no worker of this job had a reason to send them. From any thread."""


class LocalNetwork:
    """The workers of one process, by slot."""

    def __init__(self) -> None:
        self._transports: dict[int, LocalTransport] = {}
        self._lock = threading.Lock()

    def join(self, slot: int, transport: LocalTransport) -> None:
        with self._lock:
            self._transports[slot] = transport

    def leave(self, slot: int, transport: LocalTransport) -> None:
        """The worker of a slot is gone: notify its peers."""
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
        self._attempt = 0
        self._running = False
        self._early: list[AnyFrame] = []
        """Of an attempt that has not begun here."""
        self._ready: list[Received] = []
        self._peers: frozenset[int] = frozenset()
        self._lost: set[int] = set()
        self._closed = False
        network.join(slot, self)

    @property
    def address(self) -> str:
        return f"local://{self._slot}"

    @property
    def refused_count(self) -> int:
        """Within a process there are no strangers."""
        return 0

    def start(self, peers: AttemptPeers) -> None:
        if peers.attempt <= self._attempt:
            raise InvalidConfigError(f"attempt {peers.attempt} does not follow attempt {self._attempt}")
        self._attempt, self._running = peers.attempt, True
        early, self._early = self._early, []
        self._ready = [frame for frame in early if self._counts(frame)]
        self._peers = frozenset(peers.peers) - {self._slot}
        self._lost = set()
        for slot in sorted(self._peers):
            if self._network.find(slot) is None:
                self._lose(slot, "no such worker in this process")

    def send(self, frame: Frame) -> None:
        self._hand_over(frame.target_slot, frame)

    def _hand_over(self, slot: int, frame: AnyFrame) -> None:
        target = self._network.find(slot)
        if target is None:
            self._lose(slot, "the worker left")
            return
        target._deliver(frame)

    def _lose(self, slot: int, reason: str) -> None:
        if slot not in self._lost:
            self._lost.add(slot)
            self._ready.append(PeerLost(slot, reason))

    def _counts(self, frame: AnyFrame) -> bool:
        """A frame of the attempt that runs; one of a later attempt waits for it."""
        if frame.attempt > self._attempt:
            if len(self._early) >= EARLY_FRAMES_MAX:
                raise ProtocolError(f"more than {EARLY_FRAMES_MAX} frames came before attempt {frame.attempt} began here")
            self._early.append(frame)
        return self._running and frame.attempt == self._attempt

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
            elif self._counts(item):
                received.append(item)
        return received

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._running = False
        self._ready = []
        self._peers = frozenset()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stop()
            self._network.leave(self._slot, self)
