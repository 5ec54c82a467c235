"""CORE, part of the job master: the slots of a job: which process holds each, its session and lease, and the commands on their way.

A slot's holder is a process: same nonce, a reconnect; a higher (submission, spawn, task attempt), a successor; a lower one is
refused. Where there is a launch key, the launcher vouches for the first two; within one spawn Spark may run the task again, and
numbers its attempts. Commands are numbered 1, 2, 3 ... per (epoch, session) and kept, so that a broken stream can be resumed; one
that needs what fell out of the bound can't be, and the worker registers again.

It knows nothing of tasks or checkpoints: what workers are told, it does not decide."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec

from holdfast.barriers.authentication import is_data_address, is_data_key
from holdfast.barriers.launches import is_launched
from holdfast.barriers.messages import (
    INT_MAX,
    SOCKET_PATH_BYTES_MAX,
    TEXT_BYTES_MAX,
    NumberedCommand,
    RegisterWorker,
    ShutdownWorker,
    WorkerCommand,
    clip,
    has_control_characters,
)
from holdfast.coordinator.jobmaster.actions import Action, CloseStream, Deliver
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.notes import Turn
from holdfast.coordinator.views import WorkerView
from holdfast.statebackends.errors import (
    AuthenticationError,
    FencedError,
    NotFoundError,
    ProtocolError,
    StateDirectoryNotSharedError,
)

OUTBOX_COMMANDS_MAX = 1_000


class Outbox:
    """Commands of one session; `session` is drawn at registration."""

    def __init__(self, epoch: int, session: str, *, commands_max: int = OUTBOX_COMMANDS_MAX) -> None:
        self.epoch = epoch
        self.session = session
        self._commands: deque[NumberedCommand] = deque(maxlen=commands_max)
        self._last_number = 0

    @property
    def last_number(self) -> int:
        return self._last_number

    def append(self, command: WorkerCommand) -> NumberedCommand:
        """Number a command and keep it."""
        self._last_number += 1
        numbered = NumberedCommand(self.epoch, self.session, self._last_number, command)
        self._commands.append(numbered)
        return numbered

    def resume(self, after: int) -> tuple[NumberedCommand, ...] | None:
        """Commands behind number `after`; None if some of them are gone or `after` was never sent."""
        if after > self._last_number or after < 0:
            return None
        kept = tuple(numbered for numbered in self._commands if numbered.number > after)
        return kept if len(kept) == self._last_number - after else None


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


def compare_registration(current: RegisterWorker | None, message: RegisterWorker, *, connected: bool) -> Verdict:
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


PID_MAX = 2**31 - 1
"""What any system calls a process by."""

STREAM_GRACE_MS = 1_000
"""How long a worker whose stream closed may take to come back before it counts as lost."""

LIVENESS_GRACE_MS = 1_000
"""How long a failover waits for a sign of life from a process that holds a slot: its stream may still seem open."""


JobTurn: TypeAlias = Turn[Action]
"""Shared by the parts of one job master."""


@dataclass(frozen=True, slots=True)
class DataPorts:
    """Slot -> how the process that holds it is reached by its peers, and known to them."""

    addresses: Mapping[int, str]
    keys: Mapping[int, str]
    sockets: Mapping[int, str]
    """Of those that have one."""


class SlotPool:
    """Slots 0 .. count-1."""

    def __init__(self, setup: JobSetup, rng: random.Random, turn: JobTurn) -> None:
        self._job_id = setup.job_id
        self._epoch = setup.epoch
        self._submission = setup.submission
        self._directory_nonce = setup.directory_nonce
        self._launch_key = setup.launch_key
        self._config = setup.graph.config
        self._rng = rng
        self._turn = turn
        self.slots = tuple(Slot(index) for index in range(setup.graph.slots_required))
        self._liveness_until_ms: int | None = None

    # --------------------------------------------------------------------------------------------------- registration

    def check_registration(self, message: RegisterWorker) -> Verdict:
        """Whether a process may hold its slot. Raises NotFoundError, FencedError, AuthenticationError, ProtocolError or
        StateDirectoryNotSharedError."""
        if not 0 <= message.slot < len(self.slots):
            raise NotFoundError(f"job {self._job_id} has slots 0..{len(self.slots) - 1}, not {message.slot}", slot=message.slot)
        slot = self.slots[message.slot]
        if message.submission != self._submission:
            raise FencedError(
                f"slot {message.slot}: submission {self._submission} of job {self._job_id} runs, not {message.submission}",
                held=message.submission,
                newer=self._submission,
            )
        self._check_identity(message)
        if message.directory_nonce.strip() != self._directory_nonce:
            raise StateDirectoryNotSharedError(
                f"the worker in slot {message.slot} on {clip(message.host)} does not see the coordinator's state directory",
                slot=message.slot,
                host=clip(message.host),
            )
        verdict = compare_registration(slot.holder or slot.last_holder, message, connected=slot.connected)
        if verdict is Verdict.STALE:
            raise FencedError(
                f"slot {message.slot}: a newer process than task attempt {message.task_attempt} holds it",
                held=message.task_attempt,
                slot=message.slot,
            )
        return Verdict.FIRST if slot.holder is None else verdict

    def _check_identity(self, message: RegisterWorker) -> None:
        """A process is who its launcher says, and its names are names."""
        job_id, submission, slot, spawn = self._job_id, message.submission, message.slot, message.spawn
        if not is_launched(
            self._launch_key, message.launch_token, job_id=job_id, submission=submission, slot=slot, spawn=spawn
        ):
            raise AuthenticationError(
                f"slot {slot}: the process is not the worker {spawn} that the launcher of job {job_id} started there", slot=slot
            )
        if not 0 <= message.pid <= PID_MAX:
            raise ProtocolError(f"slot {slot}: the pid of a worker is 0..{PID_MAX}", slot=slot)
        if not _is_socket_path(message.data_socket):
            raise ProtocolError(
                f"slot {slot}: the data_socket of a worker is an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes", slot=slot
            )
        if message.data_address and not is_data_address(message.data_address):
            raise ProtocolError(f"slot {slot}: the data_address of a worker is tcp://<host>:<port>", slot=slot)
        self._check_data_key(message)
        for name in ("nonce", "data_address", "fingerprint"):
            text: str = getattr(message, name)
            if len(text) > TEXT_BYTES_MAX or not (text.isascii() and text.isprintable()):
                raise ProtocolError(f"slot {slot}: the {name} of a worker is at most {TEXT_BYTES_MAX} ASCII characters", slot=slot)

    def _check_data_key(self, message: RegisterWorker) -> None:
        """Peers tell each other by their keys alone: two slots with one would take each other's frames for a stranger's."""
        key, slot = message.data_key, message.slot
        if not key:
            return
        if not is_data_key(key):
            raise ProtocolError(f"slot {slot}: the data_key of a worker is a CURVE key of 40 characters in Z85", slot=slot)
        for other in self.slots:
            if other.index != slot and other.holder is not None and other.holder.data_key == key:
                raise ProtocolError(f"slot {slot}: the data_key of the worker is that of slot {other.index}", slot=slot)

    def take(self, message: RegisterWorker) -> Slot:
        """Give the slot to a process; its older session ends, and an older process is told to leave."""
        slot = self.slots[message.slot]
        if slot.outbox is not None:
            if slot.holder is not None and slot.holder.nonce != message.nonce:
                self.send(slot, ShutdownWorker("another process holds the same slot", respawn=True))
            self._turn.out.append(CloseStream(slot.index, slot.session))
        message = msgspec.structs.replace(message, host=clip(message.host))
        slot.take(message, f"{self._rng.getrandbits(64):016x}", self._epoch)
        slot.touch(self._turn.now_ms, self._turn.wall_ms)
        return slot

    def current(self, index: int, session: str) -> Slot:
        """The slot of a session, noted as alive. Raises FencedError unless the session is the slot's current one."""
        if not 0 <= index < len(self.slots):
            raise NotFoundError(f"job {self._job_id} has no slot {index}", slot=index)
        slot = self.slots[index]
        if not session or slot.session != session:
            raise FencedError(f"session {session!r} of slot {index} is over: register again", slot=index, session=session)
        slot.touch(self._turn.now_ms, self._turn.wall_ms)
        if slot.lost_at_ms is not None:
            slot.lost_at_ms = self._turn.now_ms + STREAM_GRACE_MS
        return slot

    # -------------------------------------------------------------------------------------------------------- streams

    def open_stream(self, index: int, session: str, after: int, stream: int) -> tuple[NumberedCommand, ...]:
        """Commands behind number `after`. Raises FencedError when the session is over or lost commands."""
        slot = self.current(index, session)
        assert slot.outbox is not None
        commands = slot.outbox.resume(after)
        if commands is None:
            raise FencedError(f"commands behind {after} of slot {index} are gone: register again", slot=index, session=session)
        slot.connected = True
        slot.stream = stream
        slot.lost_at_ms = None
        return commands

    def close_stream(self, index: int, session: str, stream: int) -> None:
        """The newest stream of a session ended: the worker has a short time to come back."""
        slot = self.slots[index]
        if slot.session == session and slot.stream == stream and slot.holder is not None:
            slot.connected = False
            slot.lost_at_ms = self._turn.now_ms + STREAM_GRACE_MS

    def send(self, slot: Slot, command: WorkerCommand) -> None:
        """Number a command and put it on the open stream; without a session it is not needed: registration tells all."""
        numbered = slot.send(command)
        if numbered is not None and slot.connected:
            self._turn.out.append(Deliver(slot.index, slot.session, (numbered,)))

    def broadcast(self, command: WorkerCommand) -> None:
        for slot in self.slots:
            self.send(slot, command)

    def close_all(self) -> None:
        """End every session."""
        for slot in self.slots:
            if slot.outbox is not None:
                self._turn.out.append(CloseStream(slot.index, slot.session))

    # --------------------------------------------------------------------------------------------------------- leases

    def expire(self) -> list[Slot]:
        """Slots whose process counts as lost from now on."""
        lost = [slot for slot in self.slots if slot.holder is not None and self._deadline_of(slot) <= self._turn.now_ms]
        for slot in lost:
            if slot.outbox is not None:
                self._turn.out.append(CloseStream(slot.index, slot.session))
            slot.release()
        return lost

    def forget_signs_of_life(self) -> None:
        """A failover began: a slot serves the next attempt once something comes from it, or the grace is over."""
        for slot in self.slots:
            slot.heard = False
        self._liveness_until_ms = self._turn.now_ms + LIVENESS_GRACE_MS

    def all_ready(self) -> bool:
        """Every slot is held by a process that may be given an attempt."""
        waited = self._liveness_until_ms is None or self._turn.now_ms >= self._liveness_until_ms
        return all(slot.is_ready and (slot.heard or waited) for slot in self.slots)

    def missing(self) -> list[int]:
        return [slot.index for slot in self.slots if slot.holder is None]

    def next_deadline_ms(self) -> int | None:
        times = list(self._deadlines())
        return min(times, default=None)

    def _deadlines(self) -> Iterator[int]:
        for slot in self.slots:
            if slot.holder is not None:
                yield self._deadline_of(slot)
        if self._liveness_until_ms is not None:
            if self._turn.now_ms < self._liveness_until_ms:
                yield self._liveness_until_ms
            else:
                self._liveness_until_ms = None

    def _deadline_of(self, slot: Slot) -> int:
        lease = slot.last_seen_ms + self._config.heartbeat_timeout_ms
        return lease if slot.lost_at_ms is None else min(lease, slot.lost_at_ms)

    # ---------------------------------------------------------------------------------------------------------- views

    @property
    def registered(self) -> int:
        return sum(slot.holder is not None for slot in self.slots)

    def data_ports(self) -> DataPorts:
        holders = {slot.index: slot.holder for slot in self.slots if slot.holder is not None}
        return DataPorts(
            {index: holder.data_address for index, holder in holders.items()},
            {index: holder.data_key for index, holder in holders.items() if holder.data_key},
            {index: holder.data_socket for index, holder in holders.items() if holder.data_socket},
        )

    def hosts(self) -> dict[int, str]:
        return {slot.index: slot.last_holder.host for slot in self.slots if slot.last_holder is not None}

    def views(self) -> tuple[WorkerView, ...]:
        return tuple(_view(slot) for slot in self.slots)


def _is_socket_path(text: str) -> bool:
    """Below a folder that a user named, in whatever script; empty: there is no socket. One that the file system's encoding can't
    show is none either."""
    if not text:
        return True
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return False
    return text.startswith("/") and size <= SOCKET_PATH_BYTES_MAX and not has_control_characters(text)


def _view(slot: Slot) -> WorkerView:
    known = slot.holder or slot.last_holder
    return WorkerView(
        slot=slot.index,
        registered=slot.holder is not None,
        connected=slot.connected,
        pid=known.pid if known is not None else -1,
        host=known.host if known is not None else "",
        data_address=known.data_address if known is not None else "",
        nonce=known.nonce if known is not None else "",
        task_attempt=known.task_attempt if known is not None else -1,
        session=slot.session,
        spawn=known.spawn if known is not None else 0,
        timed_out=slot.timed_out,
        fingerprint=known.fingerprint if known is not None else "",
        last_seen_ms=slot.last_seen_wall_ms if known is not None else -1,
        frames_refused=slot.frames_refused,
    )
