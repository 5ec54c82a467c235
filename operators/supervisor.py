"""CORE: the slots of one submission, seen from the driver: which worker to start, when, and when to give up.

A worker that dies is started again in its slot, alone, for as long as the job lives: the restart strategy belongs to the
coordinator. It knows nothing of Spark, threads or HTTP; `spark.py` performs its actions and reports what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, assert_never

from statebackends.errors import InvariantError

QUICK_RESPAWNS = 2
"""Deaths in a row that are answered at once; from the next on with backoff."""

BACKOFF_FIRST_MS = 100
BACKOFF_MAX_MS = 10_000

START_FAILURES_MAX = 5
"""Times in a row that a worker which never registered may raise before the launch is given up: it is not going to work."""

COOPERATIVE_STOP_MS = 10_000
"""At the end of a job the coordinator tells its workers to leave; those still there after this are cancelled."""

CANCEL_WAIT_MS = 6_000
"""A cancelled Spark task's process lives up to about 5 s more; then the driver no longer waits for it."""


class SlotState(StrEnum):
    RUNNING = "running"
    """A worker was started and has not ended."""
    BACKING_OFF = "backing_off"
    ENDED = "ended"


class WorkerEnd(StrEnum):
    """How a worker's task ended."""

    LEFT = "left"
    """The job is over, or the worker was told to go."""
    SUPERSEDED = "superseded"
    """Another driver runs this job now."""
    RESPAWN = "respawn"
    """The worker asks for a fresh process in its slot."""
    DIED = "died"
    """Process or executor lost."""
    RAISED = "raised"
    """The task raised in Python."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start all slots."""


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    slot: int
    spawn: int
    end: WorkerEnd
    error: str = ""


@dataclass(frozen=True, slots=True)
class WorkersRegistered:
    """What the coordinator says of this submission: slots whose worker is registered now."""

    slots: frozenset[int]


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job reached a terminal state, or belongs to another driver."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The driver is leaving a job that is not over: nobody tells the workers, and all their state is crash-only."""


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    pass


Event: TypeAlias = Launch | WorkerEnded | WorkersRegistered | JobEnded | StopRequested | DeadlineReached


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    slot: int
    spawn: int
    """1, 2, 3 ... per slot."""


@dataclass(frozen=True, slots=True)
class CancelWorker:
    slot: int
    spawn: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job can't start: cancel it and tell the user why."""

    slot: int
    error: str


@dataclass(frozen=True, slots=True)
class AllEnded:
    """No slot runs or will run again. Slots in `abandoned` did not answer their cancellation in time."""

    abandoned: tuple[int, ...] = ()


Action: TypeAlias = SpawnWorker | CancelWorker | GiveUp | AllEnded


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.BACKING_OFF
    spawn: int = 0
    failures: int = 0
    """Deaths in a row without a registration between them."""
    ever_registered: bool = False
    retry_at_ms: int = 0
    last_error: str = ""


@dataclass
class SlotSupervisor:
    """All slots of one submission, 0..slot_count-1."""

    slot_count: int
    _slots: list[_Slot] = field(init=False)
    _launched: bool = False
    _stopping_at_ms: int | None = None
    _cancelled_at_ms: int | None = None
    _over: bool = False

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.slot_count)]

    def handle(self, event: Event, *, now_ms: int) -> list[Action]:
        if self._over:
            return []
        match event:
            case Launch():
                self._launched = True
                actions = self._spawn_due(now_ms)
            case WorkerEnded():
                actions = self._ended(event, now_ms)
            case WorkersRegistered():
                actions = self._registered(event)
            case JobEnded():
                actions = self._stop(now_ms)
            case StopRequested():
                actions = self._stop(now_ms) + self._cancel(now_ms)
            case DeadlineReached():
                actions = self._spawn_due(now_ms) + self._overdue(now_ms)
            case _:
                assert_never(event)
        actions += self._finish()
        self.check_invariants()
        return actions

    def next_deadline_ms(self) -> int | None:
        """When DeadlineReached is due, or None."""
        if self._over or not self._launched:
            return None
        if self._cancelled_at_ms is not None:
            return self._cancelled_at_ms + CANCEL_WAIT_MS
        if self._stopping_at_ms is not None:
            return self._stopping_at_ms + COOPERATIVE_STOP_MS
        return min((slot.retry_at_ms for slot in self._slots if slot.state is SlotState.BACKING_OFF), default=None)

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(index for index, slot in enumerate(self._slots) if slot.state is SlotState.RUNNING)

    @property
    def respawns(self) -> int:
        """Workers started beyond the first of each slot."""
        return sum(max(0, slot.spawn - 1) for slot in self._slots)

    @property
    def last_errors(self) -> dict[int, str]:
        """slot -> why its last worker ended, for those that ended badly."""
        return {index: slot.last_error for index, slot in enumerate(self._slots) if slot.last_error}

    def _spawn_due(self, now_ms: int) -> list[Action]:
        if self._stopping_at_ms is not None:
            return []
        actions: list[Action] = []
        for index, slot in enumerate(self._slots):
            if slot.state is SlotState.BACKING_OFF and slot.retry_at_ms <= now_ms:
                slot.state = SlotState.RUNNING
                slot.spawn += 1
                actions.append(SpawnWorker(index, slot.spawn))
        return actions

    def _ended(self, event: WorkerEnded, now_ms: int) -> list[Action]:
        slot = self._slots[event.slot]
        if slot.state is not SlotState.RUNNING or slot.spawn != event.spawn:
            return []
        slot.last_error = event.error
        slot.state = SlotState.ENDED
        if self._stopping_at_ms is not None or event.end is WorkerEnd.LEFT:
            return []
        if event.end is WorkerEnd.SUPERSEDED:
            return self._stop(now_ms)
        if event.end is WorkerEnd.RAISED and not slot.ever_registered and slot.failures + 1 >= START_FAILURES_MAX:
            return [GiveUp(event.slot, event.error), *self._stop(now_ms)]
        if event.end is not WorkerEnd.RESPAWN:
            slot.failures += 1
        slot.state = SlotState.BACKING_OFF
        slot.retry_at_ms = now_ms + _backoff_ms(slot.failures)
        return self._spawn_due(now_ms)

    def _registered(self, event: WorkersRegistered) -> list[Action]:
        for index in sorted(event.slots):
            if index < self.slot_count and self._slots[index].state is SlotState.RUNNING:
                self._slots[index].failures = 0
                self._slots[index].ever_registered = True
        return []

    def _stop(self, now_ms: int) -> list[Action]:
        if self._stopping_at_ms is None:
            self._stopping_at_ms = now_ms
            for slot in self._slots:
                if slot.state is SlotState.BACKING_OFF:
                    slot.state = SlotState.ENDED
        return []

    def _cancel(self, now_ms: int) -> list[Action]:
        if self._cancelled_at_ms is not None:
            return []
        self._cancelled_at_ms = now_ms
        return [CancelWorker(index, self._slots[index].spawn) for index in self.running]

    def _overdue(self, now_ms: int) -> list[Action]:
        if self._stopping_at_ms is None:
            return []
        if self._cancelled_at_ms is None and now_ms < self._stopping_at_ms + COOPERATIVE_STOP_MS:
            return []
        if self._cancelled_at_ms is None:
            return self._cancel(now_ms)
        if now_ms < self._cancelled_at_ms + CANCEL_WAIT_MS:
            return []
        abandoned = self.running
        for index in abandoned:
            self._slots[index].state = SlotState.ENDED
        self._over = True
        return [AllEnded(abandoned)]

    def _finish(self) -> list[Action]:
        if self._over or not self._launched or any(slot.state is not SlotState.ENDED for slot in self._slots):
            return []
        self._over = True
        return [AllEnded()]

    def check_invariants(self) -> None:
        if self._stopping_at_ms is not None and any(slot.state is SlotState.BACKING_OFF for slot in self._slots):
            raise InvariantError("a slot would be started again although the job is over")


def _backoff_ms(failures: int) -> int:
    """Delay before the next worker of a slot after that many deaths in a row."""
    late = failures - QUICK_RESPAWNS
    return 0 if late <= 0 else int(min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** min(late - 1, 30)))
