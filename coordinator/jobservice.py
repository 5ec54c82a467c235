"""SHELL: one job. A thread owns its job master; everybody else posts to its bounded inbox and gets a Future.

It decides nothing: it waits until the next deadline, hands events to the core and performs the actions. Storage runs on
pools, whose outcomes come back as events."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from barriers.messages import NumberedCommand
from coordinator import events as on
from coordinator import jobevents as job
from coordinator.effects import StorageAction, StorageEffects
from coordinator.jobmaster import JobMaster
from coordinator.subscription import Subscription
from statebackends.errors import HoldfastError, StorageUnavailableError
from statebackends.storage.operations import Storage, run_flow

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STOP = object()


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class JobService:
    """Start it once; `close` ends the thread without ending the job."""

    def __init__(
        self,
        master: JobMaster,
        effects: StorageEffects,
        storage: Storage,
        *,
        decisions: Executor,
        cleanup: Executor,
        inbox_events_max: int,
    ) -> None:
        self._master = master
        self._effects = effects
        self._storage = storage
        self._decisions = decisions
        self._cleanup = cleanup
        self._inbox: queue.Queue[Any] = queue.Queue(inbox_events_max)
        self._own: deque[job.Event] = deque()
        """Events of the owner thread itself: it must not wait for room in its own inbox."""
        self._lock = threading.Lock()
        self._closed = False
        self._tickets = 0
        self._calls: dict[int, Future[Any]] = {}
        self._queries: dict[int, _Query] = {}
        self._opening: dict[int, Subscription] = {}
        self._streams: dict[int, Subscription] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"job-{master.setup.job_id[:8]}", daemon=True)

    # ----------------------------------------------------------------------------------------------- from any thread

    @property
    def job_id(self) -> str:
        return self._master.setup.job_id

    @property
    def submission(self) -> int:
        return self._master.setup.submission

    @property
    def slots(self) -> int:
        return self._master.setup.graph.slots_required

    @property
    def epoch(self) -> int:
        return self._master.setup.epoch

    @property
    def ended(self) -> threading.Event:
        """Set in a terminal state, and when this process does not lead the job any more."""
        return self._ended

    def start(self) -> None:
        self.post(job.JobStarted())
        self._thread.start()

    def post(self, event: job.Event) -> None:
        """An event nobody waits for."""
        if not self._closed:
            self._inbox.put(event)

    def call(self, make: Callable[[int], job.Event]) -> Future[Any]:
        """Post an event with a new ticket; the Future gets its answer or its error."""
        future: Future[Any] = Future()
        ticket = self._admit(future, None)
        if ticket:
            self._inbox.put(make(ticket))
        return future

    def subscribe(self, slot: int, session: str, after: int) -> tuple[Subscription, Future[Any]]:
        """Ask for a command stream; it is open once the Future has its answer."""
        subscription = Subscription(self.epoch, slot, session, after, on_close=self._stream_closed)
        future: Future[Any] = Future()
        ticket = self._admit(future, subscription)
        if ticket:
            self._inbox.put(job.StreamOpened(ticket, slot, session, after))
        return subscription, future

    def query(self, read: Callable[[JobMaster], T]) -> Future[T]:
        """Read the core on its own thread, or here when that has ended."""
        query = _Query(read, Future())
        with self._lock:
            closed = self._closed
            if not closed:
                self._tickets += 1
                ticket = self._tickets
                self._queries[ticket] = query
        if closed:
            query.answer(self._master)
        else:
            self._inbox.put(_Asked(ticket))
        return query.future

    def close(self, reason: str) -> None:
        """Stop leading and end the thread. Idempotent."""
        self.post(job.LeadershipEnded(reason))
        self._inbox.put(_STOP)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _admit(self, future: Future[Any], subscription: Subscription | None) -> int:
        """A ticket for a call, or 0 with the Future failed when the thread has ended."""
        with self._lock:
            if not self._closed:
                self._tickets += 1
                self._calls[self._tickets] = future
                if subscription is not None:
                    self._opening[self._tickets] = subscription
                return self._tickets
        future.set_exception(self._gone())
        return 0

    def _stream_closed(self, subscription: Subscription) -> None:
        self.post(job.StreamClosed(subscription.slot, subscription.session))

    def _gone(self) -> StorageUnavailableError:
        return StorageUnavailableError(f"job {self.job_id} is not led from here any more", job=self.job_id)

    # -------------------------------------------------------------------------------------------------- owner thread

    def _run(self) -> None:
        try:
            while (item := self._take()) is not _STOP:
                if isinstance(item, _Asked):
                    self._queries.pop(item.ticket).answer(self._master)
                    continue
                for action in self._master.handle(item, now_ms=monotonic_ms(), wall_ms=wall_clock_ms()):
                    self._perform(action)
        except BaseException:
            logger.critical("job %s: the core failed; the job is not led from here any more", self.job_id, exc_info=True)
            self._master.lifecycle.stop_leading("the coordinator failed; its log has the error")
        finally:
            self._shut()

    def _take(self) -> Any:
        """The next item, or DeadlineReached when time runs out first."""
        if self._own:
            return self._own.popleft()
        deadline = self._master.next_deadline_ms()
        if deadline is None:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=max(0, deadline - monotonic_ms()) / 1000)
        except queue.Empty:
            return on.DeadlineReached()

    def _perform(self, action: job.Action) -> None:
        match action:
            case on.DiscardState() | on.DropCheckpoint():
                self._cleanup.submit(self._store, action)
            case on.WriteClaim() | on.WriteMetadata() | on.WriteAborted() | job.PrepareAttempt() | job.WriteResult():
                self._decisions.submit(self._store, action)
            case job.Deliver():
                self._deliver(action)
            case job.CloseStream():
                stream = self._streams.get(action.slot)
                if stream is not None and stream.session == action.session:
                    del self._streams[action.slot]
                    stream.end()
            case job.Answer():
                self._answer(action)
            case job.Refuse():
                self._opening.pop(action.ticket, None)
                future = self._calls.pop(action.ticket, None)
                if future is not None:
                    _settle(future, lambda: _raise(action.error))
            case job.JobEnded():
                logger.info("job %s: %s %s", self.job_id, action.state.value, action.reason)
                self._ended.set()

    def _store(self, action: StorageAction) -> None:
        """On a pool thread: run the flow, post its outcome."""
        try:
            outcome = run_flow(self._effects.flow(action), self._storage)
        except BaseException:
            name = type(action).__name__
            logger.critical("job %s: %s failed in a way that no outcome describes", self.job_id, name, exc_info=True)
            outcome = job.LeadershipEnded(f"{name} failed unexpectedly; the coordinator's log has the error")
        if outcome is not None:
            self.post(outcome)

    def _deliver(self, action: job.Deliver) -> None:
        stream = self._streams.get(action.slot)
        if stream is not None and stream.session == action.session and not stream.push(action.commands):
            del self._streams[action.slot]
            self._own.append(job.StreamClosed(action.slot, action.session))

    def _answer(self, action: job.Answer) -> None:
        subscription = self._opening.pop(action.ticket, None)
        if subscription is not None:
            self._open(subscription, action.value)
        future = self._calls.pop(action.ticket, None)
        if future is not None:
            _settle(future, lambda: action.value)

    def _open(self, subscription: Subscription, commands: tuple[NumberedCommand, ...]) -> None:
        """The newest stream of a slot wins."""
        older = self._streams.get(subscription.slot)
        self._streams[subscription.slot] = subscription
        if older is not None:
            older.end()
        subscription.push(commands)

    def _shut(self) -> None:
        """Nobody waits for this thread any more: streams end, calls fail, queries are answered."""
        with self._lock:
            self._closed = True
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()
        while not self._inbox.empty():
            self._inbox.get_nowait()
        for ticket in list(self._calls):
            _settle(self._calls.pop(ticket), lambda: _raise(self._gone()))
        for ticket in list(self._queries):
            self._queries.pop(ticket).answer(self._master)
        self._ended.set()


@dataclass(frozen=True, slots=True)
class _Query:
    read: Callable[[JobMaster], Any]
    future: Future[Any]

    def answer(self, master: JobMaster) -> None:
        _settle(self.future, lambda: self.read(master))


@dataclass(frozen=True, slots=True)
class _Asked:
    ticket: int


def _raise(error: HoldfastError) -> Any:
    raise error


def _settle(future: Future[Any], produce: Callable[[], Any]) -> None:
    """Give a Future its value or error, unless its caller gave up."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = produce()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)
