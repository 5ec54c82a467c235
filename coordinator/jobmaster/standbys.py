"""CORE, part of the job master: workers that stand by, and which slot each is given.

A worker waits in its seat, which is where its launcher started it, until it is ordered to register for a slot. It may be given one
whose process is gone: the lease ran out, or the process was seen to have ended, by the coordinator or by a worker that stands by
and sees the same processes (`sight`). Never one that a process holds, except by a later worker of the same seat, which supersedes
its predecessor as ever. An order is no more than permission: registration decides (slots.py), with numbers above those of the dead
process and below those of any successor that the launcher starts in the slot's own seat, so that whichever of the two is first has
the slot, and the other one is refused.

Nothing is stored. A new leader learns of workers in slots by their registrations, and of those that stand by when they ask again.
It knows nothing of attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.barriers.launches import is_launched, launch_token
from holdfast.barriers.messages import (
    INT_MAX,
    LOOKS_MAX,
    TEXT_BYTES_MAX,
    ProcessLook,
    RegisterWorker,
    ShutdownWorker,
    StandBy,
    StandbyOrder,
    clip,
)
from holdfast.coordinator.jobmaster.actions import Answer, LookForProcess, Refuse
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.jobmaster.slots import PID_MAX, JobTurn, Slot, SlotPool
from holdfast.coordinator.views import StandbyView
from holdfast.statebackends.errors import AuthenticationError, FencedError, HoldfastError, NotFoundError, ProtocolError

WAIT_MS = 5_000
"""How long a worker waits for an answer; it asks again at once. Below the time in which it gives up a request."""

PROMISE_MS = 2_000
"""How long a slot is kept for a worker that was ordered to take it: it makes its ports and registers within a fraction of that."""

OWN_WAIT_MS = 500
"""How long it is kept from the launcher's own successor: whoever stood by may have died with the worker whose place it was to take,
as where an executor is lost."""

RETURN_MS = 2_000
"""How long a new leader waits for a worker in a slot before it gives the slot to one that was started there anew: the slot may have
a worker of another seat, which is on its way back. Workers come back within a second."""

LOOK_MS = 20
"""Time between two looks for a process whose stream has closed: it closes its files some time before it has ended."""


@dataclass(slots=True)
class _Waiting:
    """A worker that stands by. `ticket` is None between two of its requests."""

    message: StandBy
    ticket: int | None
    until_ms: int
    """When it is told to ask again; or, without a ticket, when it counts as gone."""


@dataclass(frozen=True, slots=True)
class _Promise:
    numbers: tuple[int, int]
    """Spawn and task attempt with which it is to register."""
    is_own: bool
    """It is the launcher's own successor."""
    own_from_ms: int
    """When the launcher's own successor may be ordered in its place."""
    until_ms: int


class Standbys:
    """The workers of one job that stand by, at most one a seat."""

    def __init__(self, setup: JobSetup, slots: SlotPool, turn: JobTurn) -> None:
        self._setup = setup
        self._slots = slots
        self._turn = turn
        self._waiting: dict[int, _Waiting] = {}
        """By seat."""
        self._promises: dict[int, _Promise] = {}
        """By slot."""
        self._reconciles_until_ms: int | None = None
        self._looks: dict[str, int] = {}
        """Session of a slot whose stream has closed -> when its process is looked for next."""

    # ------------------------------------------------------------------------------------------------------- requests

    def wait(self, ticket: int, message: StandBy) -> None:
        """A worker waits for a slot; `settle` answers it. Raises NotFoundError, FencedError, AuthenticationError, ProtocolError."""
        self._check(message)
        known = self._waiting.get(message.seat)
        if known is not None:
            if _order(message) < _order(known.message):
                raise FencedError(f"seat {message.seat}: a newer worker stands by there", held=known.message.spawn)
            self._answer(known, self._nothing())
        self._slots.heard_from_seat(message.seat, message.spawn)
        self._waiting[message.seat] = _Waiting(message, ticket, self._turn.now_ms + WAIT_MS)

    def _check(self, message: StandBy) -> None:
        setup, seat = self._setup, message.seat
        if message.submission != setup.submission:
            text = f"seat {seat}: submission {setup.submission} of job {setup.job_id} runs, not {message.submission}"
            raise FencedError(text, held=message.submission, newer=setup.submission)
        if not 0 <= seat < 2 * len(self._slots.slots):
            raise NotFoundError(f"job {setup.job_id} has no seat {seat}: at most one worker stands by for each slot", slot=seat)
        numbers = {"job_id": message.job_id, "submission": message.submission, "slot": seat, "spawn": message.spawn}
        if not is_launched(setup.launch_key, message.launch_token, **numbers):  # type: ignore[arg-type]
            raise AuthenticationError(f"seat {seat}: the process is not the worker {message.spawn} that the launcher started there")
        if not 0 <= message.pid <= PID_MAX or not 0 <= message.task_attempt < INT_MAX:
            raise ProtocolError(f"seat {seat}: the pid or the task attempt of a worker is out of bounds", slot=seat)
        for name in ("nonce", "fingerprint", "sight"):
            text = getattr(message, name)
            if len(text) > TEXT_BYTES_MAX or not (text.isascii() and text.isprintable()):
                raise ProtocolError(f"seat {seat}: the {name} of a worker is at most {TEXT_BYTES_MAX} ASCII characters", slot=seat)

    def ended(self, message: StandBy) -> list[Slot]:
        """Slots of the processes that have ended, as a worker tells that would see it. Their streams are closed."""
        found = []
        for slot in self._slots.slots if message.ended and message.sight else ():
            holder = slot.holder
            if holder is not None and slot.lost_at_ms is not None and holder.sight == message.sight:
                found += [slot] if holder.fingerprint in message.ended and holder.fingerprint else []
        return found

    def check_order(self, message: RegisterWorker) -> None:
        """Raise FencedError for a worker of another seat that comes late: the slot's own successor was ordered in its place, and
        would supersede it."""
        promise = self._promises.get(message.slot)
        if promise is None or not promise.is_own or self._turn.now_ms >= promise.until_ms:
            return
        if message.seat >= 0 and _order(message) <= promise.numbers:  # a task that Spark repeats may have the next number, too
            text = f"slot {message.slot}: a newer process was ordered to take it"
            raise FencedError(text, held=message.task_attempt, slot=message.slot)

    # -------------------------------------------------------------------------------------------------------- decisions

    def settle(self, *, replaces: bool, reconciles: bool) -> None:
        """Order workers to take slots that have none; send away, for a moment, those that have waited long enough. `replaces`:
        slots whose process is gone may be given to workers of other seats. `reconciles`: the leader is new, and workers are on
        their way back."""
        if not (self._waiting or self._promises):  # as a rule: each event of the job comes by here
            self._looks.clear()
            return
        self._forget()
        if reconciles and self._reconciles_until_ms is None:
            self._reconciles_until_ms = self._turn.now_ms + RETURN_MS
        if not reconciles or self._turn.now_ms >= (self._reconciles_until_ms or 0):
            for seat in sorted(self._waiting):
                self._give_own(seat)
        for slot in self._slots.slots if replaces else ():
            if slot.holder is None and slot.last_holder is not None and slot.index not in self._promises:
                self._give(slot, slot.last_holder)
        self._look_for_processes()

    def _forget(self) -> None:
        now_ms = self._turn.now_ms
        for index, promise in list(self._promises.items()):
            holder = self._slots.slots[index].holder
            is_kept = holder is not None and _order(holder) >= promise.numbers
            if is_kept or promise.until_ms <= now_ms:
                del self._promises[index]
        for seat, waiting in list(self._waiting.items()):
            if waiting.until_ms > now_ms:
                continue
            if waiting.ticket is None:
                del self._waiting[seat]
            else:
                self._answer(waiting, self._nothing())

    def _give_own(self, seat: int) -> None:
        """A worker that was started anew where the slot has no other worker: it takes its own."""
        waiting = self._waiting[seat]
        if waiting.ticket is None or seat >= len(self._slots.slots) or self._turn.now_ms < self._own_from_ms(seat):
            return
        slot, message = self._slots.slots[seat], waiting.message
        holder = slot.holder
        if holder is not None and (holder.seat >= 0 or _order(holder) >= _order(message)):
            return
        self._promise(slot, waiting, message.spawn, message.task_attempt, message.launch_token, is_own=True)

    def _own_from_ms(self, seat: int) -> int:
        promise = self._promises.get(seat)
        return 0 if promise is None else promise.own_from_ms

    def _give(self, slot: Slot, gone: RegisterWorker) -> None:
        """Order a worker, if there is one, of the same host first, to take a slot in the place of the process that held it."""
        ready = [each for _, each in sorted(self._waiting.items()) if each.ticket is not None]
        if not ready:
            return
        waiting = min(ready, key=lambda each: (clip(each.message.host) != gone.host, each.message.seat))
        setup = self._setup
        token = launch_token(setup.launch_key, job_id=setup.job_id, submission=setup.submission, slot=slot.index, spawn=gone.spawn)
        self._promise(slot, waiting, gone.spawn, gone.task_attempt + 1, token)

    def _promise(
        self, slot: Slot, waiting: _Waiting, spawn: int, task_attempt: int, token: str, *, is_own: bool = False
    ) -> None:
        order = StandbyOrder(self._setup.epoch, slot.index, spawn, task_attempt, token)
        now_ms = self._turn.now_ms
        self._promises[slot.index] = _Promise((spawn, task_attempt), is_own, now_ms + OWN_WAIT_MS, now_ms + PROMISE_MS)
        self._answer(waiting, order)
        del self._waiting[waiting.message.seat]

    def _answer(self, waiting: _Waiting, order: StandbyOrder) -> None:
        if waiting.ticket is not None:
            self._turn.out.append(Answer(waiting.ticket, order))
            waiting.ticket, waiting.until_ms = None, self._turn.now_ms + WAIT_MS

    def _nothing(self) -> StandbyOrder:
        return StandbyOrder(self._setup.epoch)

    def end(self, order: ShutdownWorker) -> None:
        """The job is over, or another submission's: all leave."""
        for waiting in self._waiting.values():
            self._answer(waiting, StandbyOrder(self._setup.epoch, shutdown=order))
        self._waiting.clear()

    def refuse(self, error: HoldfastError) -> None:
        """Another coordinator leads the job: they look for it."""
        self._turn.out += [Refuse(each.ticket, error) for each in self._waiting.values() if each.ticket is not None]
        self._waiting.clear()

    # ---------------------------------------------------------------------------------------------------------- deaths

    def _look_for_processes(self) -> None:
        """Where somebody could take the place: has the process behind a closed stream ended?"""
        now_ms = self._turn.now_ms
        missing: dict[str, Slot] = {}
        if self._slots.has_closed and self.is_ready:
            lost = [slot for slot in self._slots.slots if slot.lost_at_ms is not None]
            self._slots.has_closed = bool(lost)
            missing = {slot.session: slot for slot in lost if slot.is_near}
            self._ask_to_look([slot.holder for slot in lost if slot.holder is not None and not slot.is_near])
        self._looks = {session: due_ms for session, due_ms in self._looks.items() if session in missing}
        for session, slot in missing.items():
            if slot.holder is not None and self._looks.get(session, now_ms) <= now_ms:
                self._looks[session] = now_ms + LOOK_MS
                self._turn.out.append(LookForProcess(slot.index, session, slot.holder.pid, slot.holder.fingerprint))

    def _ask_to_look(self, lost: list[RegisterWorker]) -> None:
        """Ask workers that stand by where the coordinator does not see the process: one for each sight, which asks again."""
        for sight in sorted({holder.sight for holder in lost if holder.sight and holder.fingerprint}):
            ready = (each for _, each in sorted(self._waiting.items()) if each.ticket is not None and each.message.sight == sight)
            waiting = next(ready, None)
            if waiting is not None:
                looks = tuple(ProcessLook(each.pid, each.fingerprint) for each in lost if each.sight == sight)
                self._answer(waiting, StandbyOrder(self._setup.epoch, looks=looks[:LOOKS_MAX]))

    @property
    def is_ready(self) -> bool:
        """A worker waits for an order."""
        return any(each.ticket is not None for each in self._waiting.values())

    def next_deadline_ms(self) -> int | None:
        if not (self._waiting or self._promises or self._looks) and self._reconciles_until_ms is None:
            return None  # asked after each event, and few jobs have standbys
        return min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[int]:
        yield from (each.until_ms for each in self._waiting.values())
        yield from (each.until_ms for each in self._promises.values())
        own = (each.own_from_ms for slot, each in self._promises.items() if slot in self._waiting)
        yield from (due_ms for due_ms in own if due_ms > self._turn.now_ms)
        yield from self._looks.values()
        if self._reconciles_until_ms is not None and self._reconciles_until_ms > self._turn.now_ms:
            yield self._reconciles_until_ms

    def views(self) -> tuple[StandbyView, ...]:
        return tuple(
            StandbyView(seat, each.message.spawn, each.message.pid, clip(each.message.host), each.message.fingerprint)
            for seat, each in sorted(self._waiting.items())
        )


def _order(message: StandBy | RegisterWorker) -> tuple[int, int]:
    return message.spawn, message.task_attempt
