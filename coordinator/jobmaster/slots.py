"""CORE: who holds each slot of a job. Registration, sessions, leases, and what is on its way to each worker.

A slot's holder is a process: same nonce, a reconnect; a higher (submission, spawn, task attempt), a successor; a lower one is
refused. Where there is a launch key, the launcher vouches for the first two; within one spawn Spark may run the task again, and
numbers its attempts. It knows nothing of tasks or checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from holdfast.barriers.messages import INT_MAX, NumberedCommand, RegisterWorker, WorkerCommand
from holdfast.coordinator.jobmaster.outbox import Outbox


class Verdict(StrEnum):
    """What a registration means for its slot."""

    FIRST = "first"
    """The slot was empty."""
    RECONNECT = "reconnect"
    """The same process."""
    SUCCESSOR = "successor"
    """A newer process: the older one is superseded, whether it is dead or not."""
    STALE = "stale"
    """An older process than the one that holds the slot."""


def judge_registration(current: RegisterWorker | None, message: RegisterWorker, *, connected: bool) -> Verdict:
    """Compare a registration with the holder of its slot. Equal numbers: the later one wins only a slot that is not connected."""
    if current is None:
        return Verdict.FIRST
    if message.nonce == current.nonce:
        return Verdict.RECONNECT
    mine = (message.submission, message.spawn, message.task_attempt)
    theirs = (current.submission, current.spawn, current.task_attempt)
    if mine == theirs:
        return Verdict.STALE if connected else Verdict.SUCCESSOR
    return Verdict.SUCCESSOR if mine > theirs else Verdict.STALE


@dataclass(slots=True)
class Slot:
    """One slot. `holder` is None until a process registers, and again when its lease ran out."""

    index: int
    holder: RegisterWorker | None = None
    outbox: Outbox | None = None
    connected: bool = False
    """A command stream of the current session is open."""
    stream: int = 0
    """Ticket of the newest stream."""
    last_holder: RegisterWorker | None = None
    """Who held it last: an older process than that is refused although the slot is empty."""
    last_seen_ms: int = 0
    last_seen_wall_ms: int = 0
    lost_at_ms: int | None = None
    """When the lease of a worker without a stream runs out."""
    heard: bool = False
    """Something came from the current process since the last failover: it is alive."""
    reported_attempt: int = 0
    """Highest attempt that this process reported a task state of."""
    timed_out: bool = False
    """Its last holder was given up because nothing was heard from it, although its connection was never closed: it hangs, or its
    host does. A process that dies, or is told to go, closes it."""
    frames_refused: int = 0
    """Frames that the data ports of all processes of this slot have dropped as nobody's of this job; at most INT_MAX."""
    _refused_by_holder: int = 0

    @property
    def session(self) -> str:
        return self.outbox.session if self.outbox is not None else ""

    @property
    def is_ready(self) -> bool:
        """A live process can be given an attempt."""
        return self.holder is not None and self.lost_at_ms is None

    def send(self, command: WorkerCommand) -> NumberedCommand | None:
        """Number a command for the current session; None without one: registration gives the full state instead."""
        return self.outbox.append(command) if self.outbox is not None else None

    def take(self, message: RegisterWorker, session: str, epoch: int) -> None:
        """A process holds the slot from now on, in a new session."""
        if self.holder is None or self.holder.nonce != message.nonce:
            self.reported_attempt = self._refused_by_holder = 0
        # What it reports besides was taken already, and may hold megabytes.
        self.holder = self.last_holder = msgspec.structs.replace(message, subtasks=(), unanswered=())
        self.outbox = Outbox(epoch, session)
        self.connected = False
        self.lost_at_ms = None
        self.timed_out = False
        self.heard = True

    def touch(self, now_ms: int, wall_ms: int) -> None:
        """A message of the current session came."""
        self.last_seen_ms, self.last_seen_wall_ms, self.heard = now_ms, wall_ms, True

    def count_refused(self, frames: int) -> None:
        """What the holder has dropped since its process began; a count that falls is an older message."""
        if frames > self._refused_by_holder:
            self.frames_refused = min(INT_MAX, self.frames_refused + frames - self._refused_by_holder)
            self._refused_by_holder = frames

    def release(self) -> None:
        """The lease ran out: the slot is free for whoever registers."""
        self.timed_out = self.lost_at_ms is None
        self.holder = None
        self.outbox = None
        self.connected = False
        self.lost_at_ms = None
