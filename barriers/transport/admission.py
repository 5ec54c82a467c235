"""CORE: decides by its header whether a received frame is admitted; the payload is not read.

The transport says who sent a message: `identity`, the public key that its connection proved. A frame counts if that peer is in
the attempt, the attempt is the one that runs here, and the frame's channel leads from the peer to this worker. What fits
nothing is dropped and counted: neither a stranger nor a worker of an older attempt can fail a job, or have a byte decoded.
Whether an admitted frame is the next of its channel is the channel's to say (channels.py): a gap or a repeat fails the attempt."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from holdfast.barriers.exchange.frames import CONTROL_BYTES_MAX, AnyFrame, ChannelId, EncodedFrame, FrameKind
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError

log = logging.getLogger("holdfast.data")

EARLY_FRAMES_MAX = 10_000
"""Frames of a later attempt kept until this worker is deployed; only credit can come that early, one frame a channel."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Address of the worker of a slot, and the key by which it is identified."""

    address: str
    """As the worker registered it: `tcp://host:port`."""
    key: str = ""
    """Public CURVE key, Z85: the identity of its process."""
    socket: str = ""
    """Path of its unix socket; empty: it has none."""


@dataclass(frozen=True, slots=True)
class AttemptPeers:
    """An attempt, as the data plane of one worker sees it."""

    attempt: int
    peers: Mapping[int, Peer]
    """Slot -> worker; its own slot included or not."""
    channels: frozenset[ChannelId]
    """All that begin or end in this worker."""
    secret: str = field(default="", repr=False)
    """Known to the workers of this attempt alone."""

    @property
    def slots(self) -> dict[str, int]:
        """Identity -> slot."""
        return {peer.key: slot for slot, peer in self.peers.items() if peer.key}


class Refusal(StrEnum):
    """Why a frame was dropped."""

    UNKNOWN_PEER = "its sender is no worker of this attempt"
    BAD_HEADER = "its header can't be read"
    OVER = "it belongs to an attempt that is over"
    UNKNOWN_ATTEMPT = "it belongs to an attempt that has not begun here"
    WRONG_CHANNEL = "its channel does not lead from its sender to this worker"


class Admission:
    """The door of one worker's data port.

    A peer that was deployed first opens its channels before this worker knows of the attempt; were that credit lost, the
    channel would never start. It waits, and is checked again when the attempt begins."""

    def __init__(self, slot: int, *, early_frames_max: int = EARLY_FRAMES_MAX) -> None:
        self._slot = slot
        self._early_frames_max = early_frames_max
        self.attempt = 0
        self._running = False
        self._slots: Mapping[str, int] = {}
        """Identity -> slot, of the peers of the attempt."""
        self._former: frozenset[str] = frozenset()
        """Those of the attempt before."""
        self._channels: frozenset[ChannelId] = frozenset()
        self._early: list[tuple[str, AnyFrame]] = []
        self.refused: dict[Refusal, int] = {}
        """Frames dropped since the process began. Those of an attempt that is over are usual at a failover."""

    @property
    def refused_count(self) -> int:
        """Frames that no worker of this job had a reason to send: all dropped ones but those that came too late."""
        return sum(count for why, count in self.refused.items() if why is not Refusal.OVER)

    def start(self, peers: AttemptPeers) -> list[AnyFrame]:
        """Begin an attempt; returns its frames that came early. Raises InvalidConfigError unless it is a later one."""
        if peers.attempt <= self.attempt:
            raise InvalidConfigError(f"attempt {peers.attempt} does not follow attempt {self.attempt}")
        self.attempt = peers.attempt
        self._former = frozenset(self._slots)
        self._slots = peers.slots
        self._channels = peers.channels
        self._running = True
        early, self._early = self._early, []
        return [frame for identity, frame in early if self.admits(identity, frame)]

    def stop(self) -> None:
        """The attempt is over here; its frames are dropped from now on."""
        self._running = False

    def is_current(self, frame: AnyFrame) -> bool:
        """Whether a frame of this worker to itself still counts."""
        return self._running and frame.attempt == self.attempt

    def read(self, identity: str, parts: Sequence[Any]) -> EncodedFrame | None:
        """The frame of a message that came, if it counts now; its payload unread. Raises ProtocolError as `admits`."""
        if identity not in self._slots:
            self._refuse_stranger(identity)
            return None
        try:
            frame = EncodedFrame.of(parts)
        except ProtocolError as error:
            self._refuse(Refusal.BAD_HEADER, f"slot {self._slots[identity]}: {error}")
            return None
        return frame if self.admits(identity, frame) else None

    def admits(self, identity: str, frame: AnyFrame) -> bool:
        """Whether a frame counts now. Raises ProtocolError when too many of an attempt's own peers came early."""
        slot = self._slots.get(identity)
        if slot is None:
            self._refuse_stranger(identity)
        elif frame.attempt > self.attempt:
            self._keep(identity, frame)
        elif frame.attempt < self.attempt or not self._running:
            self._refuse(Refusal.OVER, f"slot {slot}, attempt {frame.attempt}")
        elif frame.channel not in self._channels or not self._joins(slot, frame):
            self._refuse(Refusal.WRONG_CHANNEL, f"slot {slot}, channel {tuple(frame.channel)}")
        else:
            return True
        return False

    def _refuse_stranger(self, identity: str) -> None:
        """Drop a frame of an unknown peer. Frames of a worker that was replaced just now are usual."""
        self._refuse(Refusal.OVER if identity in self._former else Refusal.UNKNOWN_PEER, repr(identity))

    def _joins(self, slot: int, frame: AnyFrame) -> bool:
        """Subtask i of every vertex runs in slot i; credit travels against the channel."""
        _, producer, consumer = frame.channel
        source, target = (consumer, producer) if frame.to_producer else (producer, consumer)
        return source == slot and target == self._slot

    def _keep(self, identity: str, frame: AnyFrame) -> None:
        if not frame.to_producer or not _is_small(frame):
            self._refuse(Refusal.UNKNOWN_ATTEMPT, f"slot {self._slots[identity]}, attempt {frame.attempt}")
            return
        if len(self._early) >= self._early_frames_max:
            raise ProtocolError(f"more than {self._early_frames_max} frames came before attempt {frame.attempt} began here")
        self._early.append((identity, frame))

    def _refuse(self, why: Refusal, what: str) -> None:
        count = self.refused[why] = self.refused.get(why, 0) + 1
        if count == 1:
            level = logging.DEBUG if why is Refusal.OVER else logging.WARNING
            log.log(level, "a frame was dropped on the data port, and more of its kind will be, unsaid: %s (%s)", why, what[:200])


def _is_small(frame: AnyFrame) -> bool:
    if not isinstance(frame, EncodedFrame):
        return True
    sizes = [memoryview(getattr(part, "buffer", part)).nbytes for part in frame.parts]
    return frame.kind is FrameKind.CREDIT and sum(sizes) <= CONTROL_BYTES_MAX
