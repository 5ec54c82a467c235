"""SHELL: the ports of a job runner and their system implementations: a clock, threads for turns, pools for flows.

They decide nothing. The simulator has its own implementations, all on one thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast.statebackends.storage.port import Flow, Storage, run_flow

logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_MS = 20
"""How long jobs wait for a turn before one more thread takes turns: longer than any usual turn."""

IDLE_S = 10.0
"""A shared thread beyond the first ends after this time without a turn."""

TURNS_MAX = 32
"""Turns of one job in a row while others wait."""

FAILED_PAUSE_S = 0.1
"""How long the thread of the alarms waits behind an unexpected error: one that comes again must not fill the log."""


class Clock(Protocol):
    """The clock of a coordinator."""

    def monotonic_ms(self) -> int: ...

    def wall_ms(self) -> int:
        """ms since the epoch, UTC."""


class FlowRunner(Protocol):
    """Drives storage flows, each on its own, in any order."""

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        """Start a flow; never blocks. `ended(result, None)` or `ended(None, error)` follows once, from any thread, unless the
        process dies before. `cleanup` marks deletions: no decision may wait for them."""

    def record(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        """As `run`, for what nothing waits for. No deletion may wait for it either: behind late deletions no periodic checkpoint
        is taken."""


class Turns(Protocol):
    """Turns that a job thread takes: those of `JobMasterRunner`."""

    @property
    def job_id(self) -> str: ...

    @property
    def closed(self) -> bool:
        """Turns have no effect any more."""

    def turn(self) -> bool:
        """Handle one item that is due; False if none was."""

    @property
    def has_waiting(self) -> bool:
        """An event or query waits for the next turn."""

    def next_deadline_ms(self) -> int | None:
        """When the next turn is due if no event comes before, monotonic ms; None for never."""


class JobThread(Protocol):
    """Takes the turns of one runner, one after the other: until nothing is due, then at the next wake or deadline."""

    def start(self, service: Turns) -> None:
        """Start; a turn is due."""

    def wake(self) -> None:
        """A turn is due. Called from any thread, also during a turn; must not take the turn itself."""

    def join(self) -> None:
        """Return once the runner is closed. Never called during one of its turns."""


class SystemClock:
    """Implements `Clock`."""

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class SharedThreads:
    """Threads that take the turns of all jobs of a coordinator: one, and further ones while jobs wait behind turns that last.

    A turn is short and waits for nothing, as a rule: one thread then takes turn after turn, where a thread for each job would have
    to be woken for nearly each event, and all of them fight for one interpreter. But a turn may last (a large job is deployed) or
    hang (in a log handler, say), and must hold up its own job alone: behind STALL_MS without a turn begun while jobs wait, another
    thread helps, until as many turns last as there are jobs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready: queue.SimpleQueue[SharedJobThread | None] = queue.SimpleQueue()
        """Jobs with a turn due, each at most once. None ends one thread."""
        self._lock = threading.Lock()
        self._helpers: tuple[_Helper, ...] = ()
        self._numbers = itertools.count(1)
        self._alarms = JobAlarms(clock, self._help)
        self._begun = -1
        """Jobs that had been taken at the last look; -1: none waited."""
        self._is_short = False
        """The last thread that was to help could not be started, and the log has it."""
        self._closed = False

    def new_thread(self) -> SharedJobThread:
        """For one more job."""
        return SharedJobThread(self, self._clock)

    def close(self) -> None:
        """End the threads, once the jobs are closed. Idempotent; waits for no turn."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._helpers:
                self._ready.put(None)
        self._alarms.close()

    def begin(self) -> None:
        """Start the thread of the alarms and the first one that takes turns, unless that was done. Raises RuntimeError where the
        system has no thread for the alarms; one for turns is then tried again while jobs wait."""
        self._alarms.begin()
        if not self._helpers:
            self._add()

    def put(self, job: SharedJobThread) -> None:
        """A turn of a job is due. From any thread."""
        self._ready.put(job)
        self._watch()

    def wake_at(self, job: SharedJobThread, due_ms: int) -> None:
        """Wake a job at a time, monotonic ms."""
        self._alarms.set(job, due_ms)

    def _watch(self) -> None:
        """See to it that the waiting jobs get their turns, however long those last that are being taken."""
        if all(helper.is_busy for helper in self._helpers):
            self._alarms.look_soon()

    def _help(self) -> bool:
        """Add a thread if jobs wait and no turn was begun since the last look; False once none waits."""
        begun = sum(helper.begun for helper in self._helpers)
        if self._ready.empty():
            self._begun = -1
            return False
        if begun == self._begun:
            self._add()
        self._begun = begun
        return True

    def _add(self) -> None:
        with self._lock:
            if self._closed:
                return
            helper = _Helper(f"jobs-{next(self._numbers)}")
            try:
                threading.Thread(target=self._run, args=(helper,), name=helper.name, daemon=True).start()
            except RuntimeError as error:  # the system has no more threads: the next look tries again
                self._tell_shortage(error)
                return
            self._helpers = (*self._helpers, helper)  # one that never started would seem idle, and nobody would help any more
            self._is_short = False

    def _tell_shortage(self, error: RuntimeError) -> None:
        """Log it once: a look comes every STALL_MS."""
        if not self._is_short:
            self._is_short = True
            text = "jobs wait behind turns that last, and no thread can be started beside the %d that take turns: %s"
            logger.error(text, len(self._helpers), error)

    def _leave(self, helper: _Helper) -> bool:
        """Whether a thread that had nothing to do may end: not the last one."""
        with self._lock:
            if len(self._helpers) > 1:
                self._helpers = tuple(each for each in self._helpers if each is not helper)
                return True
        return False

    def _run(self, helper: _Helper) -> None:
        while True:
            helper.is_busy = False
            try:
                job = self._ready.get(timeout=IDLE_S)
            except queue.Empty:
                helper.is_busy = True
                if self._leave(helper):
                    if not self._ready.empty():  # whoever put it saw this thread idle
                        self._watch()
                    return
                continue
            if job is None:
                return
            helper.is_busy = True
            helper.begun += 1
            if not self._ready.empty():  # what came before this thread was busy asked for no look
                self._watch()
            job.take_turns()


@dataclass(slots=True)
class _Helper:
    """One of the shared threads; written by itself alone."""

    name: str
    is_busy: bool = False
    begun: int = 0


class JobAlarms:
    """Wakes jobs at their deadlines, on a thread of its own, and looks after the shared threads. Other threads set alarms without
    waiting for a lock, and wake it for those alone that come before all others."""

    def __init__(self, clock: Clock, look: Callable[[], bool]) -> None:
        """`look`: called every STALL_MS after `look_soon`, until it is False."""
        self._clock = clock
        self._look = look
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._new: deque[tuple[int, SharedJobThread]] = deque()
        self._heap: list[tuple[int, int, SharedJobThread]] = []
        self._numbers = itertools.count()
        self._wakes_ms: float = -math.inf
        """When the thread wakes if it is asleep. -inf: it is awake, and sees what was set before it sleeps."""
        self._is_looking = False
        self._look_ms: float = math.inf
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def begin(self) -> None:
        """Raises RuntimeError where the system has no more threads; the next call tries again."""
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="jobs-alarms", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._bell.put(None)

    def set(self, job: SharedJobThread, due_ms: int) -> None:
        job.alarm_ms = due_ms
        self._new.append((due_ms, job))
        if due_ms < self._wakes_ms:
            self._bell.put(None)

    def look_soon(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._look_ms = self._clock.monotonic_ms() + STALL_MS
            if self._look_ms < self._wakes_ms:
                self._bell.put(None)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._wake_and_wait()
            except Exception:  # without this thread no lease of any job expires, and no checkpoint is due
                logger.critical("the alarms of jobs failed in a way that no record describes", exc_info=True)
                time.sleep(FAILED_PAUSE_S)
                self.look_soon()

    def _wake_and_wait(self) -> None:
        self._sort()
        self._wake_due(self._clock.monotonic_ms())
        self._wakes_ms = min(self._look_ms, self._heap[0][0] if self._heap else math.inf)
        if self._new or self._look_ms < self._wakes_ms:  # set since: whoever set it saw no sleeper to wake
            self._wakes_ms = -math.inf
            return
        wait_s = max(0.0, self._wakes_ms - self._clock.monotonic_ms()) / 1000
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=min(wait_s, threading.TIMEOUT_MAX))  # "never" may be any number of ms
        self._wakes_ms = -math.inf

    def _sort(self) -> None:
        while self._new:
            due_ms, job = self._new.popleft()
            heapq.heappush(self._heap, (due_ms, next(self._numbers), job))

    def _wake_due(self, now_ms: int) -> None:
        if self._look_ms <= now_ms:
            self._look_ms = math.inf
            self._is_looking = False  # before the look: who puts a job behind it asks for another one
            if self._look():
                self.look_soon()
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, _, job = heapq.heappop(self._heap)
            if job.alarm_ms != due_ms:
                continue  # an earlier one was set since
            job.alarm_ms = None
            deadline_ms = job.deadline_ms  # read behind the write above: a deadline that is set after it sets an alarm, too
            if deadline_ms is None or deadline_ms <= now_ms:
                job.wake()
            else:
                self.set(job, deadline_ms)


class SharedJobThread:
    """Implements `JobThread` with the shared threads: the turns of one job are taken one at a time, on one thread or another."""

    def __init__(self, threads: SharedThreads, clock: Clock) -> None:
        self._threads = threads
        self._clock = clock
        self._service: Turns | None = None
        self._held = threading.Lock()
        """Held while the job is among the ready ones or takes turns, by whoever took it without waiting."""
        self._again = False
        """A turn is due since the last one began."""
        self._ended = threading.Event()
        self.deadline_ms: int | None = None
        """When a turn is due if nothing wakes the job; written between its turns."""
        self.alarm_ms: int | None = None
        """When an alarm is set; None: none is."""

    def start(self, service: Turns) -> None:
        self._threads.begin()
        self._service = service
        self.wake()

    def wake(self) -> None:
        self._again = True
        if self._service is not None and self._held.acquire(blocking=False):
            self._threads.put(self)

    def join(self) -> None:
        if self._service is not None:
            self._ended.wait()

    def take_turns(self) -> None:
        """On one of the shared threads: all turns that are due, up to TURNS_MAX, so that other jobs get theirs."""
        service = self._service
        assert service is not None
        try:
            for _ in range(TURNS_MAX):
                if service.closed:
                    self._ended.set()  # and never ready again: it stays held
                    return
                self._again = False  # before the turn: what is posted after its look into the inbox wakes again
                if not service.turn():
                    break
            else:
                self._threads.put(self)
                return
            self._sleep_until(service.next_deadline_ms())
        except BaseException:  # the thread is the other jobs', too
            logger.critical("job %s takes no more turns", service.job_id, exc_info=True)
            self._ended.set()
            return
        self._held.release()
        if self._again and self._held.acquire(blocking=False):
            self._threads.put(self)

    def _sleep_until(self, deadline_ms: int | None) -> None:
        self.deadline_ms = deadline_ms  # first: an alarm that goes off from here on sees it
        alarm_ms = self.alarm_ms
        if deadline_ms is not None and (alarm_ms is None or deadline_ms < alarm_ms):
            self._threads.wake_at(self, deadline_ms)


class PoolRunner:
    """Implements `FlowRunner` with three thread pools over one storage."""

    def __init__(self, storage: Storage, *, decision_threads: int, cleanup_threads: int, record_threads: int) -> None:
        self._storage = storage
        self._decisions = ThreadPoolExecutor(decision_threads, thread_name_prefix="storage")
        self._cleanup = ThreadPoolExecutor(cleanup_threads, thread_name_prefix="cleanup")
        self._records = ThreadPoolExecutor(record_threads, thread_name_prefix="history")
        self._sizes = {self._decisions: decision_threads, self._cleanup: cleanup_threads, self._records: record_threads}

    def begin(self) -> None:
        """Start all threads, before any flow runs: an executor that finds no thread for a flow keeps the flow and raises. Raises
        RuntimeError where the system has not so many."""
        go = threading.Event()
        try:
            for pool, threads in self._sizes.items():
                for _ in range(threads):
                    pool.submit(go.wait)  # each holds a thread, so that the next one starts another
        finally:
            go.set()

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        (self._cleanup if cleanup else self._decisions).submit(self._drive, flow, ended)

    def record(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        self._records.submit(self._drive, flow, ended)

    def close(self) -> None:
        """Returns when every flow has ended."""
        self._decisions.shutdown()
        self._cleanup.shutdown()
        self._records.shutdown()

    def _drive(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        try:
            result = run_flow(flow, self._storage)
        except BaseException as error:
            ended(None, error)
        else:
            ended(result, None)
