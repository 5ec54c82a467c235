"""A worker that waits for a slot: the core of its questions to the coordinator, and the shell around it.

CORE (`Waiting`): when it asks, and when it stops. It knows no clock and no HTTP; the simulator drives it too.

SHELL (`await_order`): meanwhile the process loads what Arrow loads on first use, and its plan with the modules of the user's
functions, so that a slot finds it ready."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from holdfast.barriers.messages import ProcessLook, ShutdownWorker, StandBy, StandbyOrder
from holdfast.barriers.processes import AskProcess, fingerprint_of, has_ended, sight
from holdfast.operators.worker.gateway import CoordinatorAddress, CoordinatorHttp, RefusedError, RejectedError
from holdfast.operators.worker.session import BACKOFF_MIN_MS, refused_for_good
from holdfast.operators.worker.session_events import BACKOFF_MAX_MS, refuse_registration
from holdfast.statebackends.errors import HoldfastError


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the question, `delay_ms` from now."""

    message: StandBy
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Look:
    """Look which of these processes have ended: every `LOOK_MS`, for `LOOKING_MS` or until one has."""

    looks: tuple[ProcessLook, ...]


Step: TypeAlias = Ask | Look | StandbyOrder | ShutdownWorker
"""What comes next: ask, look for processes, take the slot of the order, or leave."""

LOOK_MS = 10
"""Time between two looks: a process closes its files some time before it has ended."""
LOOKING_MS = 200
"""How long it looks before it asks again, where it may be given another slot meanwhile."""


class Waiting:
    """The questions of one worker, one at a time."""

    def __init__(self, message: StandBy, rng: random.Random, *, has_slot: bool = False) -> None:
        """`has_slot`: its seat is that of a slot."""
        self._has_slot = has_slot
        self._message = message
        self._rng = rng
        self._backoff_ms = BACKOFF_MIN_MS
        self.unreachable_since_ms: int | None = None
        """Since when no coordinator has answered; None: the last question was answered."""

    def begin(self) -> Ask:
        return Ask(self._message, 0)

    def answered(self, order: StandbyOrder) -> Step:
        self.unreachable_since_ms, self._backoff_ms = None, BACKOFF_MIN_MS
        if order.shutdown is not None:
            return order.shutdown
        if order.slot >= 0:
            return order
        return Look(order.looks) if order.looks else Ask(self._message, 0)

    def looked(self, ended: Sequence[str]) -> Ask:
        """`ended`: fingerprints of the processes of a Look that have ended. Said once: if it gets lost, it is asked again."""
        return Ask(msgspec.structs.replace(self._message, ended=tuple(ended)), 0)

    def unknown(self, now_ms: int) -> Step:
        """The coordinator answered 404: it does not know the job, or is too old to know of workers that stand by. Who has a slot
        registers for it, which settles that."""
        message = self._message
        if not self._has_slot:
            return self.failed(now_ms)
        return StandbyOrder(0, message.seat, message.spawn, message.task_attempt, message.launch_token)

    def refused(self, message: str, fields: dict[str, object], now_ms: int) -> Step:
        """The coordinator answered 409."""
        left = refused_for_good(refuse_registration(message, fields, submission=self._message.submission))
        return left if left is not None else self.failed(now_ms)

    def failed(self, now_ms: int) -> Ask:
        """No answer, or one that a repetition may improve: it asks again, after a pause of random length."""
        if self.unreachable_since_ms is None:
            self.unreachable_since_ms = now_ms
        delay_ms = int(self._backoff_ms * (0.5 + self._rng.random() / 2))
        self._backoff_ms = min(BACKOFF_MAX_MS, self._backoff_ms * 2)
        return Ask(self._message, delay_ms)


def await_order(
    message: StandBy,
    address: CoordinatorAddress,
    *,
    has_slot: bool,
    lease_timeout_ms: int,
    is_orphan: Callable[[], bool],
) -> StandbyOrder | ShutdownWorker | None:
    """Wait until the coordinator orders this process to take a slot, or to leave. None: nobody has answered for `lease_timeout_ms`,
    or the parent is gone. Raises what the coordinator will refuse for ever, such as a wrong token."""
    http = CoordinatorHttp(address, message.job_id, message.seat)
    waiting = Waiting(message, random.Random(), has_slot=has_slot)
    step: Step = waiting.begin()
    try:
        while isinstance(step, Ask | Look):
            if isinstance(step, Look):
                step = waiting.looked(look_for(step.looks))
            time.sleep(step.delay_ms / 1000)
            since_ms = waiting.unreachable_since_ms
            if is_orphan() or (since_ms is not None and _now_ms() - since_ms > lease_timeout_ms):
                return None
            step = _ask(http, waiting, step.message)
        return step
    finally:
        http.close()


def look_for(looks: Sequence[ProcessLook], has_ended: AskProcess = has_ended) -> list[str]:
    """Fingerprints of the processes that have ended, as soon as one has; none after LOOKING_MS."""
    until_ms = _now_ms() + LOOKING_MS
    while True:
        ended = [look.fingerprint for look in looks if has_ended(look.pid, look.fingerprint)]
        if ended or _now_ms() >= until_ms:
            return ended
        time.sleep(LOOK_MS / 1000)


def _ask(http: CoordinatorHttp, waiting: Waiting, message: StandBy) -> Step:
    target = http.target
    try:
        order = http.post("/standby", message, StandbyOrder)
        assert order is not None
        return waiting.answered(order)
    except RefusedError as error:
        now_ms = _now_ms()
        step = waiting.refused(error.message, error.named, now_ms) if error.fenced else waiting.unknown(now_ms)
        if isinstance(step, Ask):
            http.failed(error, target)
        return step
    except RejectedError as error:
        raise error.error from error
    except HoldfastError as error:
        http.failed(error, target)
        return waiting.failed(_now_ms())


def message_of(job_id: str, seat: int, submission: int, task_attempt: int, host: str, spawn: int, launch_token: str) -> StandBy:
    """The question of this process."""
    pid = os.getpid()
    nonce = uuid.uuid4().hex[:16]
    return StandBy(
        job_id, seat, submission, task_attempt, nonce, pid, host, spawn, launch_token, fingerprint_of(pid), sight()
    )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
