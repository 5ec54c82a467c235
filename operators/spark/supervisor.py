"""CORE: the worker slots of one submission, seen from the driver: decides which worker to start or cancel, when, and when to give
up.

A worker that dies is started again in its slot, alone, for as long as the job lives: the restart strategy belongs to the
coordinator. One that hangs never ends by itself: it is cancelled, and gets a successor whether or not it then ends. The core knows
nothing of Spark, threads or HTTP; `slots.py` performs its actions and reports outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, assert_never

from holdfast.barriers.jobgraph import JobConfig
from holdfast.statebackends.errors import InvariantError

QUICK_RESPAWNS = 2
"""Deaths in a row after which a worker is started again at once; further ones wait for a backoff."""

BACKOFF_FIRST_MS = 100
BACKOFF_MAX_MS = 10_000

START_FAILURES_MAX = 5
"""Failures in a row of a worker that never registered, after which the launch is given up: it is not going to work."""

COOPERATIVE_STOP_MS = 10_000
"""At the end of a job the coordinator asks its workers to leave; those that still run after this time are cancelled."""

CANCEL_WAIT_MS = 6_000
"""A cancelled Spark task's process lives up to about 5 s more; after this time the driver no longer waits for it."""

LOSS_GRACE_MS = 400
"""How long the coordinator must report a worker as silent before it is cancelled. A live worker that only the coordinator's own
pause made silent reports again within a tenth of that."""

ABSENCE_MS_MIN = 30_000
ABSENCE_MS_MAX = 600_000
"""Longest time that a worker may be unregistered at a coordinator that answers, until it is cancelled: it hangs before it
registers, its host stands still, or the coordinator that knew it has gone. The time is doubled with each cancellation in a row, up
to this bound: a cluster may be slow to give a slot."""

ABSENCE_MARGIN_MS = 10_000
"""Time beyond the coordinator's own wait for the workers of a job, so that it fails the job over first, and notifies them."""

ABSENCE_FIRST_MS = 90_000
"""Least time for the first worker of a slot, which may have to fetch and load everything."""

POLL_GAP_MS = 5_000
"""A coordinator that leaves a poll unanswered for longer was away, and no absence counts. Between two polls at most this much
counts: the driver may have stood still, and everything that it watches, too."""

GAP_SILENCE_MS = LOSS_GRACE_MS // 2
"""Added to a worker's silence after such a long gap: a live worker reports again at one of the next polls."""


class SlotState(StrEnum):
    RUNNING = "running"
    """A worker was started and has not ended."""
    CANCELLING = "cancelling"
    """The worker is lost and was cancelled; its successor waits for its end, for a limited time."""
    BACKING_OFF = "backing_off"
    ENDED = "ended"


class WorkerEnd(StrEnum):
    """End of a worker's task."""

    LEFT = "left"
    """The job is over, or the worker was asked to leave."""
    SUPERSEDED = "superseded"
    """A newer submission runs this job: another driver's."""
    RESPAWN = "respawn"
    """The worker asks for a new process in its slot: another process took it, perhaps one that no driver of the job started."""
    DIED = "died"
    """Process or executor lost."""
    RAISED = "raised"
    """The task raised in Python."""


def derive_end(*, respawn: bool, superseded: bool) -> WorkerEnd:
    """End of a worker that left by itself, from the coordinator's order. The text of the order is not parsed: it may contain
    foreign text."""
    if superseded:
        return WorkerEnd.SUPERSEDED
    return WorkerEnd.RESPAWN if respawn else WorkerEnd.LEFT


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
class SeenWorker:
    """One slot as the coordinator reports it."""

    slot: int
    spawn: int
    """Spawn of the process that holds the slot, or held it last; 0: unknown."""
    registered: bool
    timed_out: bool = False
    """The process was given up because its heartbeats stopped, although its connection was never closed."""
    pid: int = 0
    fingerprint: str = ""
    """Identity of the process with this `pid`: see worker/working_folders.py."""
    stands_by: bool = False
    """It has no slot of the job."""


def in_seats(holders: tuple[SeenWorker, ...], standbys: tuple[SeenWorker, ...]) -> tuple[SeenWorker, ...]:
    """One worker a seat: the one with the highest spawn. A seat whose worker died in another's slot has a successor that waits."""
    found: dict[int, SeenWorker] = {}
    for each in (*holders, *standbys):
        known = found.get(each.slot)
        if known is None or (each.spawn, each.registered) > (known.spawn, known.registered):
            found[each.slot] = each
    return tuple(found[seat] for seat in sorted(found))


@dataclass(frozen=True, slots=True)
class WorkersSeen:
    """Answer to a poll: the submission's slots as the coordinator reports them now."""

    workers: tuple[SeenWorker, ...]
    unanswered_ms: int = 0
    """Time since the coordinator was first asked for it: see `Question`."""


@dataclass(slots=True)
class Question:
    """Measures how long the coordinator leaves the poll for a job's workers unanswered, failures and repetitions included, and
    other requests and the driver's own pauses excluded."""

    _asked_at_ms: int | None = None

    def ask(self, now_ms: int) -> None:
        self._asked_at_ms = now_ms if self._asked_at_ms is None else self._asked_at_ms

    def answered(self, now_ms: int) -> int:
        """Milliseconds since the first `ask`. Not to be called for an answer about another submission, which does not count as
        one."""
        asked_at_ms, self._asked_at_ms = self._asked_at_ms, None
        return 0 if asked_at_ms is None else now_ms - asked_at_ms


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job reached a terminal state, or belongs to another driver."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The driver leaves a job that is not over. Workers get no notice: all their state is crash-only."""


@dataclass(frozen=True, slots=True)
class StandbysReleased:
    """Another job needs the Spark slots of the workers that stand by."""


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    pass


Event: TypeAlias = Launch | WorkerEnded | WorkersSeen | JobEnded | StopRequested | StandbysReleased | DeadlineReached


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    slot: int
    spawn: int
    """1, 2, 3 ... per slot."""


@dataclass(frozen=True, slots=True)
class CancelWorker:
    """End a worker's task; `process` too, if it can be reached from here: the task's end may take seconds."""

    slot: int
    spawn: int
    process: SeenWorker | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job can't start: cancel it and report the reason to the user."""

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
    process: SeenWorker | None = None
    """The current worker as last seen registered."""
    silent_ms: int | None = None
    """Time for which polls have found it silent; None: at the newest poll it was not."""
    absent_ms: int | None = None
    absences: int = 0
    """Workers in a row that were cancelled because the coordinator did not know them."""
    abandon_at_ms: int = 0
    """Time at which the successor of a cancelled worker stops waiting."""
    abandoned: set[int] = field(default_factory=set)
    """Spawns that were cancelled and did not end in time; they may still run, fenced by their successor's registration."""

    @property
    def is_alive(self) -> bool:
        return self.state in (SlotState.RUNNING, SlotState.CANCELLING)


@dataclass
class SlotSupervisor:
    """Supervises all seats of one submission: 0..slot_count-1 for the slots, and behind them those that stand by."""

    slot_count: int
    absence_ms_min: int = ABSENCE_MS_MIN
    """Least time that a worker may be unregistered."""
    standby_count: int = 0
    """Seats beyond the slots, for workers that stand by: nothing depends on them."""
    _slots: list[_Slot] = field(init=False)
    _launched: bool = False
    _stopping_at_ms: int | None = None
    _cancelled_at_ms: int | None = None
    _polled_at_ms: int | None = None
    _over: bool = False

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.slot_count + self.standby_count)]

    @classmethod
    def of(cls, slot_count: int, config: JobConfig, standby_count: int = 0) -> SlotSupervisor:
        """Supervisor with limits that never give up a worker for which the job's coordinator still waits."""
        absence_ms_min = max(ABSENCE_MS_MIN, config.reconcile_timeout_ms + ABSENCE_MARGIN_MS, config.heartbeat_timeout_ms)
        return cls(slot_count, absence_ms_min, standby_count)

    def handle(self, event: Event, *, now_ms: int) -> list[Action]:
        if self._over:
            return []
        match event:
            case Launch():
                self._launched = True
                actions = self._spawn_due(now_ms)
            case WorkerEnded():
                actions = self._ended(event, now_ms)
            case WorkersSeen():
                actions = self._polled(event, now_ms)
            case JobEnded():
                actions = self._stop(now_ms)
            case StopRequested():
                actions = self._stop(now_ms) + self._cancel(now_ms)
            case StandbysReleased():
                actions = self._release_standbys()
            case DeadlineReached():
                self._abandon_due(now_ms)
                actions = self._spawn_due(now_ms) + self._overdue(now_ms)
            case _:
                assert_never(event)
        actions += self._finish()
        self.check_invariants()
        return actions

    def next_deadline_ms(self) -> int | None:
        """Time at which DeadlineReached is due, or None."""
        if self._over or not self._launched:
            return None
        if self._cancelled_at_ms is not None:
            return self._cancelled_at_ms + CANCEL_WAIT_MS
        if self._stopping_at_ms is not None:
            return self._stopping_at_ms + COOPERATIVE_STOP_MS
        times = [slot.retry_at_ms for slot in self._slots if slot.state is SlotState.BACKING_OFF]
        times += [slot.abandon_at_ms for slot in self._slots if slot.state is SlotState.CANCELLING]
        return min(times, default=None)

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(index for index, slot in enumerate(self._slots) if slot.is_alive)

    @property
    def respawns(self) -> int:
        """Workers started beyond the first of each slot."""
        return sum(max(0, slot.spawn - 1) for slot in self._slots)

    @property
    def last_errors(self) -> dict[int, str]:
        """slot -> why its last worker ended, for those that failed."""
        return {index: slot.last_error for index, slot in enumerate(self._slots) if slot.last_error}

    def _spawn_due(self, now_ms: int) -> list[Action]:
        if self._stopping_at_ms is not None:
            return []
        actions: list[Action] = []
        for index, slot in enumerate(self._slots):
            if slot.state is SlotState.BACKING_OFF and slot.retry_at_ms <= now_ms:
                slot.state = SlotState.RUNNING
                slot.spawn += 1
                slot.process = slot.silent_ms = slot.absent_ms = None
                actions.append(SpawnWorker(index, slot.spawn))
        return actions

    def _ended(self, event: WorkerEnded, now_ms: int) -> list[Action]:
        slot = self._slots[event.slot]
        slot.abandoned.discard(event.spawn)
        if not slot.is_alive or slot.spawn != event.spawn:
            return []
        was_cancelled = slot.state is SlotState.CANCELLING and event.end in (WorkerEnd.DIED, WorkerEnd.RAISED)
        slot.last_error = slot.last_error if was_cancelled else event.error
        slot.state = SlotState.ENDED
        if self._stopping_at_ms is not None or event.end is WorkerEnd.LEFT:
            return []
        if event.end is WorkerEnd.SUPERSEDED:
            return self._stop(now_ms)
        if was_cancelled:
            slot.state, slot.retry_at_ms = SlotState.BACKING_OFF, now_ms
            return self._spawn_due(now_ms)
        if event.end is WorkerEnd.RAISED and not slot.ever_registered and slot.failures + 1 >= START_FAILURES_MAX:
            if event.slot >= self.slot_count:
                return []  # the job does without it
            return [GiveUp(event.slot, event.error), *self._stop(now_ms)]
        slot.failures += 1
        slot.state = SlotState.BACKING_OFF
        slot.retry_at_ms = now_ms + _backoff_ms(slot.failures)
        return self._spawn_due(now_ms)

    def _polled(self, event: WorkersSeen, now_ms: int) -> list[Action]:
        """Note registered workers; cancel those that are silent, or absent for too long. A report of an older spawn counts as
        absence."""
        was_away = self._polled_at_ms is None or event.unanswered_ms > POLL_GAP_MS
        between_ms = 0 if self._polled_at_ms is None else now_ms - self._polled_at_ms
        self._polled_at_ms = now_ms
        if self._stopping_at_ms is not None:
            return []
        seen = {worker.slot: worker for worker in event.workers}
        actions: list[Action] = []
        for index, slot in enumerate(self._slots):
            if slot.state is not SlotState.RUNNING:
                continue
            if was_away:
                slot.silent_ms = slot.absent_ms = None
            worker = seen.get(index)
            if worker is not None and worker.registered and worker.spawn in (0, slot.spawn):
                _register(slot, worker)
            else:
                is_silent = worker is not None and worker.timed_out and worker.spawn == slot.spawn
                actions += self._miss(index, now_ms, between_ms, is_silent=is_silent)
        return actions

    def _miss(self, index: int, now_ms: int, between_ms: int, *, is_silent: bool) -> list[Action]:
        """The worker of a slot is absent or silent. Deaths are not handled here: the task's end reports them."""
        slot = self._slots[index]
        absent_ms = slot.absent_ms = 0 if slot.absent_ms is None else slot.absent_ms + min(between_ms, POLL_GAP_MS)
        if not is_silent:
            slot.silent_ms = None
        elif slot.silent_ms is None:
            slot.silent_ms = 0
        else:
            slot.silent_ms += between_ms if between_ms <= POLL_GAP_MS else GAP_SILENCE_MS
        if slot.silent_ms is not None and slot.silent_ms >= LOSS_GRACE_MS:
            slot.last_error = "it sent no heartbeat within the timeout: it hung, and was cancelled"
        elif absent_ms >= self._absence_ms_max(slot):
            slot.last_error = f"it was not registered for {absent_ms / 1000:.0f} s, and was cancelled"
            slot.absences += 1
        else:
            return []
        slot.state, slot.abandon_at_ms = SlotState.CANCELLING, now_ms + CANCEL_WAIT_MS
        return [CancelWorker(index, slot.spawn, slot.process)]

    def _absence_ms_max(self, slot: _Slot) -> int:
        least_ms = self.absence_ms_min if slot.ever_registered else max(ABSENCE_FIRST_MS, self.absence_ms_min)
        return int(max(least_ms, min(ABSENCE_MS_MAX, least_ms * 2 ** min(slot.absences, 30))))

    def _release_standbys(self) -> list[Action]:
        """End as many seats as there are for standing by: those whose worker was seen to stand by, and else those beyond the slots.
        One that has been given a slot in this moment is lost with it, as a worker that dies."""
        count, self.standby_count = self.standby_count, 0
        if self._stopping_at_ms is not None:
            return []
        alive = [index for index, slot in enumerate(self._slots) if slot.state is not SlotState.ENDED]
        order = sorted(alive, key=lambda index: (not self._stands_by(index), -index))
        actions: list[Action] = []
        for index in order[: min(count, len(alive) - self.slot_count)]:
            slot = self._slots[index]
            if slot.is_alive:
                actions.append(CancelWorker(index, slot.spawn, slot.process))
            slot.state = SlotState.ENDED
        return actions

    def _stands_by(self, index: int) -> bool:
        process = self._slots[index].process
        return process is not None and process.stands_by

    def _abandon_due(self, now_ms: int) -> None:
        """Give up cancelled workers that did not end in time: their successors wait no longer."""
        for slot in self._slots:
            if slot.state is SlotState.CANCELLING and slot.abandon_at_ms <= now_ms and self._stopping_at_ms is None:
                slot.abandoned.add(slot.spawn)
                slot.state, slot.retry_at_ms = SlotState.BACKING_OFF, now_ms

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
        alive = [(index, slot, {slot.spawn} if slot.is_alive else set()) for index, slot in enumerate(self._slots)]
        return [CancelWorker(index, spawn) for index, slot, now in alive for spawn in sorted(slot.abandoned | now)]

    def _overdue(self, now_ms: int) -> list[Action]:
        if self._stopping_at_ms is None:
            return []
        if self._cancelled_at_ms is None and now_ms < self._stopping_at_ms + COOPERATIVE_STOP_MS:
            return []
        if self._cancelled_at_ms is None:
            return self._cancel(now_ms)
        if now_ms < self._cancelled_at_ms + CANCEL_WAIT_MS:
            return []
        for index in self.running:
            self._slots[index].abandoned.add(self._slots[index].spawn)
            self._slots[index].state = SlotState.ENDED
        return self._finish()

    def _finish(self) -> list[Action]:
        if self._over or not self._launched or any(slot.state is not SlotState.ENDED for slot in self._slots):
            return []
        self._over = True
        return [AllEnded(tuple(index for index, slot in enumerate(self._slots) if slot.abandoned))]

    def check_invariants(self) -> None:
        if self._stopping_at_ms is not None and any(slot.state is SlotState.BACKING_OFF for slot in self._slots):
            raise InvariantError("a slot would be started again although the job is over")
        if any(spawn >= slot.spawn for slot in self._slots if slot.is_alive for spawn in slot.abandoned):
            raise InvariantError("a worker that was abandoned has no successor")


def _register(slot: _Slot, worker: SeenWorker) -> None:
    """Note that the slot's worker is registered."""
    slot.failures = slot.absences = 0
    slot.ever_registered = True
    slot.silent_ms = slot.absent_ms = None
    slot.process = worker if worker.spawn == slot.spawn else None


def _backoff_ms(failures: int) -> int:
    """Delay before the next worker of a slot after this many deaths in a row."""
    late = failures - QUICK_RESPAWNS
    return 0 if late <= 0 else int(min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2 ** min(late - 1, 30)))
