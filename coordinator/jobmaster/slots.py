"""CORE, part of the job master: the slots of a job. It decides which process holds each, and keeps session, lease and commands.

A registration with the holder's nonce is a reconnect; a higher (submission, spawn, task attempt) is a successor; a lower one is
refused. With a launch key, the launcher proves the first two numbers; the third is Spark's, which may run a task again within one
spawn. Commands are numbered 1, 2, 3 ... per (epoch, session) and kept, so that a broken stream can be resumed. If a needed command
has fallen out of the bound, the worker registers again.

It knows nothing of tasks or checkpoints, and decides no command."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec

from holdfast.barriers.launches import is_launched
from holdfast.barriers.messages import (
    INT_MAX,
    SOCKET_PATH_BYTES_MAX,
    TEXT_BYTES_MAX,
    Deploy,
    NumberedCommand,
    RegisterWorker,
    ShutdownWorker,
    WorkerCommand,
    clip,
    has_control_characters,
)
from holdfast.barriers.transport.authentication import is_data_address, is_data_key
from holdfast.coordinator.jobmaster.actions import Action, CloseStream, Deliver
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.notes import Turn
from holdfast.coordinator.views import StandbyView, WorkerView
from holdfast.statebackends.errors import (
    AuthenticationError,
    FencedError,
    NotFoundError,
    ProtocolError,
    StateDirectoryNotSharedError,
)

OUTBOX_COMMANDS_MAX = 1_000
"""Newest commands of a session that are kept for a stream that is resumed; none before the last deployment but one."""


class Outbox:
    """Commands of one session; `session` is drawn at registration."""

    def __init__(self, epoch: int, session: str, *, commands_max: int = OUTBOX_COMMANDS_MAX) -> None:
        self.epoch = epoch
        self.session = session
        self._commands: deque[WorkerCommand] = deque(maxlen=commands_max)
        """Without their numbers: most are one object for all slots, of which a large job has thousands."""
        self._last_number = 0
        self._deployed = 0
        """Number of the newest deployment."""

    @property
    def last_number(self) -> int:
        return self._last_number

    def append(self, command: WorkerCommand) -> NumberedCommand:
        """Number a command and keep it. A deployment may hold megabytes: two are kept, and nothing before them."""
        self._last_number += 1
        self._commands.append(command)
        if isinstance(command, Deploy):
            while self._commands and self._last_number - len(self._commands) + 1 < self._deployed:
                self._commands.popleft()
            self._deployed = self._last_number
        return self._numbered(self._last_number, command)

    def resume(self, after: int) -> tuple[NumberedCommand, ...] | None:
        """Commands after number `after`; None if some of them are no longer kept, or `after` was never sent."""
        if after > self._last_number or after < 0:
            return None
        missed = self._last_number - after
        if missed > len(self._commands):
            return None
        newest = itertools.islice(self._commands, len(self._commands) - missed, None)
        return tuple(self._numbered(number, command) for number, command in enumerate(newest, after + 1))

    def _numbered(self, number: int, command: WorkerCommand) -> NumberedCommand:
        return NumberedCommand(self.epoch, self.session, number, command)


class Verdict(StrEnum):
    """Relation of a registering process to the holder of its slot."""

    FIRST = "first"
    """The slot was empty."""
    RECONNECT = "reconnect"
    """The same process."""
    SUCCESSOR = "successor"
    """A newer process: the older one is superseded, dead or alive."""
    STALE = "stale"
    """An older process than the holder: it is refused."""


def compare_registration(current: RegisterWorker | None, message: RegisterWorker, *, connected: bool) -> Verdict:
    """Compare a registration with the holder of its slot. With equal numbers it takes the slot only if that is not connected."""
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
    """One slot. `holder` is None until a process registers, and again once its lease has run out."""

    index: int
    holder: RegisterWorker | None = None
    outbox: Outbox | None = None
    connected: bool = False
    """A command stream of the current session is open."""
    stream: int = 0
    """Ticket of the newest stream."""
    last_holder: RegisterWorker | None = None
    """The last holder: an older process is refused although the slot is empty."""
    last_seen_ms: int = 0
    last_seen_wall_ms: int = 0
    lost_at_ms: int | None = None
    """When the lease of a worker without a stream runs out."""
    heard: bool = False
    """A message came from the current process since the last failover: it is alive."""
    reported_attempt: int = 0
    """Highest attempt of which this process reported a task state."""
    timed_out: bool = False
    """The last holder's lease ran out although its connection was open: the process or its host hangs. A process that dies or is
    shut down closes its connection."""
    is_near: bool = False
    """The coordinator has seen the holder's process on its own host, and would see its end."""
    frames_refused: int = 0
    """Frames that the data ports of all processes of this slot dropped, since no sender of this job had a reason to send them; at
    most INT_MAX."""
    _refused_by_holder: int = 0

    @property
    def session(self) -> str:
        return self.outbox.session if self.outbox is not None else ""

    @property
    def is_ready(self) -> bool:
        """A live process holds the slot: it can be given an attempt."""
        return self.holder is not None and self.lost_at_ms is None

    def send(self, command: WorkerCommand) -> NumberedCommand | None:
        """Number a command for the current session; None without one: a registration is answered with the full state."""
        return self.outbox.append(command) if self.outbox is not None else None

    def take(self, message: RegisterWorker, session: str, epoch: int, *, is_near: bool = False) -> None:
        """Give the slot to a process, in a new session."""
        self.is_near = is_near
        if self.holder is None or self.holder.nonce != message.nonce:
            self.reported_attempt = self._refused_by_holder = 0
        # Its reports are applied elsewhere, and may hold megabytes.
        self.holder = self.last_holder = msgspec.structs.replace(message, subtasks=(), unanswered=())
        self.outbox = Outbox(epoch, session)
        self.connected = False
        self.lost_at_ms = None
        self.timed_out = False
        self.heard = True

    def touch(self, now_ms: int, wall_ms: int) -> None:
        """Note a message of the current session."""
        self.last_seen_ms, self.last_seen_wall_ms, self.heard = now_ms, wall_ms, True

    def count_refused(self, frames: int) -> None:
        """Add the frames that the holder has dropped since its process began. A lower count is that of an older message."""
        if frames > self._refused_by_holder:
            self.frames_refused = min(INT_MAX, self.frames_refused + frames - self._refused_by_holder)
            self._refused_by_holder = frames

    def release(self) -> None:
        """The lease ran out: the slot is free."""
        self.timed_out = self.lost_at_ms is None
        self.holder = None
        self.outbox = None
        self.connected = False
        self.lost_at_ms = None


PID_MAX = 2**31 - 1
"""Highest process id of any supported system."""

STREAM_GRACE_MS = 1_000
"""How long after its stream closed a worker may open the next one before it counts as lost."""

LIVENESS_GRACE_MS = 1_000
"""How long a failover waits for a sign of life from each holder: the stream of a dead process may still seem open."""


JobTurn: TypeAlias = Turn[Action]
"""The turn that the parts of one job master share."""


@dataclass(frozen=True, slots=True)
class DataPorts:
    """Data port of the process in each slot, for its peers; all by slot."""

    addresses: Mapping[int, str]
    keys: Mapping[int, str]
    """Public CURVE keys, of the processes that have one."""
    sockets: Mapping[int, str]
    """Paths of Unix sockets, of the processes that have one."""


class SlotPool:
    """The slots of one job, 0 .. count-1."""

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
        self.has_closed = False
        """A stream has closed since somebody set this back."""
        self._liveness_until_ms: int | None = None
        self._silent: dict[int, StandbyView] = {}
        """By seat: a worker that fell silent, and may still run while one of another seat has its slot. Its launcher ends it."""

    # --------------------------------------------------------------------------------------------------- registration

    def check_registration(self, message: RegisterWorker) -> Verdict:
        """Check that a process may hold its slot, and change nothing. Raises NotFoundError, FencedError, AuthenticationError,
        ProtocolError or StateDirectoryNotSharedError."""
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
        if message.seat >= 0 and slot.holder is not None and slot.holder.nonce != message.nonce:
            text = f"slot {message.slot}: a worker holds it, and none that stood by may take its place"
            raise FencedError(text, held=message.task_attempt, slot=message.slot)
        verdict = compare_registration(slot.holder or slot.last_holder, message, connected=slot.connected)
        if verdict is Verdict.STALE:
            raise FencedError(
                f"slot {message.slot}: a newer process than task attempt {message.task_attempt} holds it",
                held=message.task_attempt,
                slot=message.slot,
            )
        return Verdict.FIRST if slot.holder is None else verdict

    def _check_identity(self, message: RegisterWorker) -> None:
        """Raise unless the launcher started this process there, and its names and addresses are well-formed."""
        job_id, submission, slot, spawn = self._job_id, message.submission, message.slot, message.spawn
        if not is_launched(
            self._launch_key, message.launch_token, job_id=job_id, submission=submission, slot=slot, spawn=spawn
        ):
            raise AuthenticationError(
                f"slot {slot}: the process is not the worker {spawn} that the launcher of job {job_id} started there", slot=slot
            )
        if not -1 <= message.seat < 2 * len(self.slots) or not 0 <= message.seat_spawn <= INT_MAX:
            raise ProtocolError(f"slot {slot}: no worker of job {job_id} sits in seat {message.seat}", slot=slot)
        if not 0 <= message.pid <= PID_MAX:
            raise ProtocolError(f"slot {slot}: the pid of a worker is 0..{PID_MAX}", slot=slot)
        if not _is_socket_path(message.data_socket):
            raise ProtocolError(
                f"slot {slot}: the data_socket of a worker is an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes", slot=slot
            )
        if message.data_address and not is_data_address(message.data_address):
            raise ProtocolError(f"slot {slot}: the data_address of a worker is tcp://<host>:<port>", slot=slot)
        self._check_data_key(message)
        for name in ("nonce", "data_address", "fingerprint", "sight"):
            text: str = getattr(message, name)
            if len(text) > TEXT_BYTES_MAX or not (text.isascii() and text.isprintable()):
                raise ProtocolError(f"slot {slot}: the {name} of a worker is at most {TEXT_BYTES_MAX} ASCII characters", slot=slot)

    def _check_data_key(self, message: RegisterWorker) -> None:
        """Raise ProtocolError for a malformed key, or one of another slot: peers know each other by their keys alone."""
        key, slot = message.data_key, message.slot
        if not key:
            return
        if not is_data_key(key):
            raise ProtocolError(f"slot {slot}: the data_key of a worker is a CURVE key of 40 characters in Z85", slot=slot)
        for other in self.slots:
            if other.index != slot and other.holder is not None and other.holder.data_key == key:
                raise ProtocolError(f"slot {slot}: the data_key of the worker is that of slot {other.index}", slot=slot)

    def take(self, message: RegisterWorker, *, is_near: bool = False) -> Slot:
        """Give the slot to a process. The slot's session ends, and another process in it is shut down."""
        slot = self.slots[message.slot]
        if slot.outbox is not None:
            if slot.holder is not None and slot.holder.nonce != message.nonce:
                self.send(slot, ShutdownWorker("another process holds the same slot", respawn=True))
            self._turn.out.append(CloseStream(slot.index, slot.session))
        message = msgspec.structs.replace(message, host=clip(message.host))
        before, seat = slot.last_holder, _seat_of(message)
        if slot.timed_out and before is not None and _seat_of(before)[0] != seat[0]:
            self._silent[_seat_of(before)[0]] = StandbyView(*_seat_of(before), before.pid, before.host, before.fingerprint)
        self.heard_from_seat(*seat)
        slot.take(message, f"{self._rng.getrandbits(64):016x}", self._epoch, is_near=is_near)
        slot.touch(self._turn.now_ms, self._turn.wall_ms)
        return slot

    def heard_from_seat(self, seat: int, spawn: int) -> None:
        """A worker shows that it runs there: it is the one that was silent, or a successor."""
        silent = self._silent.get(seat)
        if silent is not None and silent.spawn <= spawn:
            del self._silent[seat]

    def silent_views(self) -> tuple[StandbyView, ...]:
        """Workers that fell silent, and whose slots those of other seats have."""
        return tuple(each for _, each in sorted(self._silent.items()))

    def current(self, index: int, session: str) -> Slot:
        """The slot of a session, which its message shows to be alive. Raises NotFoundError; FencedError if the session is over."""
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
        """Commands after number `after`. Raises FencedError if the session is over, or some of the commands are no longer kept."""
        slot = self.current(index, session)
        assert slot.outbox is not None
        commands = slot.outbox.resume(after)
        if commands is None:
            raise FencedError(f"commands after {after} of slot {index} are gone: register again", slot=index, session=session)
        slot.connected = True
        slot.stream = stream
        slot.lost_at_ms = None
        return commands

    def close_stream(self, index: int, session: str, stream: int) -> None:
        """The newest stream of a session ended: the worker has STREAM_GRACE_MS to open the next one."""
        slot = self.slots[index]
        if slot.session == session and slot.stream == stream and slot.holder is not None:
            slot.connected = False
            slot.lost_at_ms = self._turn.now_ms + STREAM_GRACE_MS
            self.has_closed = True

    def send(self, slot: Slot, command: WorkerCommand) -> None:
        """Number a command, and deliver it if a stream is open. Without a session it is dropped: registration gives all state."""
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
        """Release the slots whose lease has run out; returns them."""
        lost = [slot for slot in self.slots if slot.holder is not None and self._deadline_of(slot) <= self._turn.now_ms]
        for slot in lost:
            if slot.outbox is not None:
                self._turn.out.append(CloseStream(slot.index, slot.session))
            slot.release()
        return lost

    def process_ended(self, index: int, session: str) -> Slot | None:
        """Release the slot of a process that was seen to be gone; None if its session is over, or its stream open again."""
        slot = self.slots[index]
        if slot.session != session or slot.holder is None or slot.connected:
            return None
        self._turn.out.append(CloseStream(index, session))
        slot.release()
        return slot

    def forget_signs_of_life(self) -> None:
        """A failover began: a slot is ready again once a message comes from it, or LIVENESS_GRACE_MS has passed."""
        for slot in self.slots:
            slot.heard = False
        self._liveness_until_ms = self._turn.now_ms + LIVENESS_GRACE_MS

    def all_ready(self) -> bool:
        """Every slot is held by a live process that can be given an attempt."""
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


def _seat_of(message: RegisterWorker) -> tuple[int, int]:
    """Where its launcher started a worker, and which of its starts there it is."""
    return (message.slot, message.spawn) if message.seat < 0 else (message.seat, message.seat_spawn)


def _is_socket_path(text: str) -> bool:
    """Whether a text is an absolute path of a socket, in any script, that file systems can encode; or empty, for no socket."""
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
        seat=known.seat if known is not None else -1,
        seat_spawn=known.seat_spawn if known is not None else 0,
    )
