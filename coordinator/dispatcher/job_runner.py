"""SHELL: the runner of one job master. The job's thread takes turns; all others post to its bounded inbox and get a Future. No post
waits: threads of requests and of storage are those of all jobs, and a turn may hang.

It decides nothing: a turn hands one event to the core and performs the actions. It has no thread or clock of its own: a `JobThread`
takes the turns, and a `FlowRunner` drives the storage flows, whose outcomes come back as events."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

from holdfast.barriers.messages import NumberedCommand
from holdfast.barriers.processes import AskProcess, has_ended
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.config import VIEW_INTERVAL_MS
from holdfast.coordinator.dispatcher.command_stream import Subscription
from holdfast.coordinator.dispatcher.hook_calls import call_of, outcome_of
from holdfast.coordinator.dispatcher.job_explanations import Explainer
from holdfast.coordinator.dispatcher.job_history import JobHistory
from holdfast.coordinator.dispatcher.job_log import JobLog, about
from holdfast.coordinator.dispatcher.published import JobPublisher, Look, PublishedJob
from holdfast.coordinator.dispatcher.storage_effects import StorageAction, StorageEffects
from holdfast.coordinator.dispatcher.threads import Clock, FlowRunner, JobThread
from holdfast.coordinator.explain.records import Explanation
from holdfast.coordinator.ha.lead_check import LeadCheck, LeadVerdict
from holdfast.coordinator.ha.leadership import check_leadership
from holdfast.coordinator.history.feed import HistoryFeed
from holdfast.coordinator.hooks.calls import HookPort, HookReply, HookVerdict
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.jobmaster.releases import Release
from holdfast.coordinator.notes import StateChanged
from holdfast.coordinator.views import JobOverviewView
from holdfast.statebackends.errors import FencedError, HoldfastError, NotLeaderError, TooManyRequestsError
from holdfast.statebackends.layout import JobPaths

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NOTHING = object()
_STOP = object()

FULL_RETRY_MS = 1_000
"""When a request may be repeated that found the inbox full."""

_OF_USERS = frozenset(
    {
        job_events.SnapshotRequested,
        job_events.SettingsRequested,
        job_events.ConfigWritten,
        job_events.CancelRequested,
        job_events.DriverLeft,
        job_events.SuspendRequested,
    }
)
"""Events by which a user's request is answered: readers who come after the answer must see it. Looked up by the very class: to ask
`isinstance` of each cost every event 2 us."""


class JobMasterRunner:
    """Runs one job master. Start it once; `close` ends its turns without ending the job."""

    def __init__(
        self,
        master: JobMaster,
        effects: StorageEffects,
        *,
        clock: Clock,
        runner: FlowRunner,
        job_thread: JobThread,
        inbox_events_max: int,
        view_interval_ms: int = VIEW_INTERVAL_MS,
        history: bool = False,
        feed: HistoryFeed | None = None,
        hooks: HookPort | None = None,
        has_ended: AskProcess = has_ended,
        explainer: Explainer | None = None,
    ) -> None:
        """`history`: record what happens in the job's directory; `feed` gets each record as well, and `explainer` explains
        checkpoints for it. `hooks`: its master hooks; None: it names none. `has_ended`: of a process that was seen on this host."""
        self._master = master
        self._has_ended = has_ended
        self._publisher = JobPublisher(clock, view_interval_ms)
        self._log = JobLog(master.setup.job_id, master.setup.graph.name)
        self._effects = effects
        self._clock = clock
        self._runner = runner
        self._job_thread = job_thread
        self._inbox: deque[Any] = deque()
        """What waits for its turn: requests up to `inbox_events_max`, and beyond that what can't be refused, and is bounded by what
        is under way: outcomes of actions, streams that close, labels and drills."""
        self._inbox_events_max = inbox_events_max
        self._own: deque[job_events.Event] = deque()
        """Events from within a turn, handled in front of the inbox."""
        self._has_begun = False
        """Its first event is handled."""
        self._lead = LeadCheck()
        self._is_stopping = False
        self._turning: int | None = None
        """Id of the thread that is taking a turn; None between turns."""
        self._lock = threading.Lock()
        self._closed = False
        self._tickets = 0
        self._calls: dict[int, Future[Any]] = {}
        self._queries: dict[int, _Query] = {}
        self._opening: dict[int, Subscription] = {}
        self._streams: dict[int, Subscription] = {}
        self._ended = threading.Event()
        self._failed = False
        self._hooks = hooks
        self._history = (
            JobHistory(master.setup, runner, clock, self._post_call, self._offer_call, feed, explainer) if history else None
        )

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
    def drill_interval_ms(self) -> int | None:
        return self._master.setup.graph.config.drill_interval_ms

    @property
    def epoch(self) -> int:
        return self._master.setup.epoch

    @property
    def ended(self) -> threading.Event:
        """Set in a terminal state, and once this process no longer leads the job."""
        return self._ended

    @property
    def suspended(self) -> bool:
        """This process leads the job no more, and the job has not ended: another process may lead it."""
        return self._ended.is_set() and not self._master.state.is_terminal

    @property
    def failed(self) -> bool:
        """It ended by an unexpected error, which would come again."""
        return self._failed

    @property
    def closed(self) -> bool:
        """No turn follows: calls are refused, queries answered at once."""
        return self._closed

    def start(self) -> None:
        self._log.taken(self._master.setup)
        if self._history is not None:
            self._history.led()
        self._inbox.append(job_events.JobStarted())
        self._job_thread.start(self)

    def post(self, event: job_events.Event) -> None:
        """Post an event without an answer, which is handled however full the inbox is. Never blocks; from any thread."""
        if not self._closed:
            self._put(event)

    def call(self, make: Callable[[int], job_events.Event]) -> Future[Any]:
        """Post an event with a new ticket; the Future gets its answer or its error: TooManyRequestsError if the inbox is full."""
        future: Future[Any] = Future()

        def admit(ticket: int) -> job_events.Event:
            self._calls[ticket] = future
            return make(ticket)

        self._admit(future, admit)
        return future

    def subscribe(self, slot: int, session: str, after: int) -> tuple[Subscription, Future[Any]]:
        """Request a command stream; it is open once the Future has its answer. Refused as a call."""
        subscription = Subscription(self.epoch, slot, session, after, on_close=self._stream_closed)
        future: Future[Any] = Future()

        def admit(ticket: int) -> job_events.Event:
            subscription.number = ticket
            self._calls[ticket], self._opening[ticket] = future, subscription
            return job_events.StreamOpened(ticket, slot, session, after)

        self._admit(future, admit)
        return subscription, future

    def check_room(self) -> None:
        """Raise TooManyRequestsError where a call would find the inbox full: for requests that post an event once they are done."""
        if len(self._inbox) >= self._inbox_events_max:
            raise self._full()

    @property
    def state(self) -> str:
        """Of the job, read beside its thread."""
        return self._master.state.value

    def bare_overview(self) -> JobOverviewView:
        """What is known of the job without a view of it: in a list of all jobs it must not be missing."""
        setup = self._master.setup
        since_ms, slots = setup.started_ms, setup.graph.slots_required
        return JobOverviewView(setup.job_id, setup.graph.name, self.state, since_ms, -1, since_ms, {}, slots, 0)

    def look(self) -> tuple[Look | None, Future[PublishedJob] | None]:
        """The newest view of the job, and the Future of the next one if that is too old. Takes no turn."""
        found = self._publisher.look()
        if found[1] is not None:
            self._job_thread.wake()
        return found

    def explanation(self, checkpoint_id: int) -> Explanation | None:
        """Of a checkpoint, from when it ended, if that was kept. Takes no turn."""
        return self._history.explanation(checkpoint_id) if self._history is not None else None

    def query(self, read: Callable[[JobMaster], T]) -> Future[T]:
        """Read the core in a turn, or on this thread if no turn follows. Refused as a call."""
        query = _Query(read, Future())

        def admit(ticket: int) -> _QueryPosted:
            self._queries[ticket] = query
            return _QueryPosted(ticket)

        if not self._admit(query.future, admit, refuses_closed=False):
            query.answer(self._master)
        return query.future

    def stop(self, reason: str) -> None:
        """As `close`, without waiting for the turns in front of it."""
        if not self._closed:
            self._is_stopping = True
            self._put(job_events.LeadershipEnded(reason))
            self._put(_STOP)

    def close(self, reason: str) -> None:
        """Stop leading and end the turns; returns at once if called within a turn. Idempotent."""
        self.stop(reason)
        if self._turning != threading.get_ident():
            self._job_thread.join()

    def _put(self, item: Any) -> None:
        self._inbox.append(item)
        self._job_thread.wake()

    def _post_call(self, act: Callable[[], None]) -> None:
        if not self._closed:
            self._put(_Call(act))

    def _offer_call(self, act: Callable[[], None]) -> None:
        """As `_post_call`, of what is not missed where the inbox is full."""
        if len(self._inbox) < self._inbox_events_max:
            self._post_call(act)

    def _admit(self, future: Future[Any], admit: Callable[[int], Any], *, refuses_closed: bool = True) -> bool:
        """Put what `admit` makes of a ticket into the inbox; where there is no room, or no turn follows, the Future fails instead.
        False: no turn follows."""
        with self._lock:
            is_closed, is_full = self._closed, len(self._inbox) >= self._inbox_events_max
            if not is_closed and not is_full:
                self._tickets += 1
                self._inbox.append(admit(self._tickets))
        if is_closed:
            if refuses_closed:
                future.set_exception(self._gone())
            return False
        if is_full:
            future.set_exception(self._full())
        else:
            self._job_thread.wake()
        return True

    def _stream_closed(self, subscription: Subscription) -> None:
        self.post(job_events.StreamClosed(subscription.slot, subscription.session, subscription.number))

    def _gone(self) -> NotLeaderError:
        return NotLeaderError(f"this coordinator leads job {self.job_id} no more", job=self.job_id)

    def _full(self) -> TooManyRequestsError:
        text = f"{self._inbox_events_max} requests wait for job {self.job_id}, which takes none of them: ask again later"
        return TooManyRequestsError(text, job=self.job_id, retry_after_ms=FULL_RETRY_MS)

    # ----------------------------------------------------------------------------------------- turns of the job thread

    @property
    def has_waiting(self) -> bool:
        """An event or query waits for the next turn."""
        return bool(self._own or self._inbox)

    def next_deadline_ms(self) -> int | None:
        """When the next turn is due if no event comes before, monotonic ms; None for never."""
        if self._closed:
            return None
        if (until_ms := self._lead.deadline_ms) is not None:
            return until_ms
        of_history = self._history.next_deadline_ms() if self._history is not None else None
        due = [time for time in (self._master.next_deadline_ms(), of_history) if time is not None]
        return min(due, default=None)

    def turn(self) -> bool:
        """Capture the job for readers who wait, once its first event is handled: before, a recovered job would be shown as one that
        was only just made. Handle one waiting item, or a passed deadline, and perform the actions. False if
        nothing was due."""
        if self._closed:
            return False
        self._turning = threading.get_ident()
        try:
            is_wanted = self._publisher.is_wanted and (self._has_begun or not self.has_waiting)
            if is_wanted:
                self._publisher.publish(self._master)
            if self._waits_for_lead():
                return is_wanted
            item = self._take()
            self._handle(item)
            writes = self._history is not None and not self._closed and self._history.advance(self._master)
        except Exception:  # the end of a process, simulated or real, passes through
            text = "job %s: the core failed; this coordinator leads the job no more"
            logger.critical(text, self.job_id, exc_info=True, extra=about(self.job_id))
            self._fail()
            return True
        finally:
            self._turning = None
        return is_wanted or writes or item is not _NOTHING

    def _waits_for_lead(self) -> bool:
        """Whether the turn waits for storage to say who leads. A leader that is to stop takes no deadline, and need not."""
        if self._is_stopping:
            return False
        verdict = self._lead.judge(self._clock.monotonic_ms(), self._master.next_deadline_ms())
        if verdict is LeadVerdict.ASK:
            self._runner.run(check_leadership(JobPaths(self.job_id), self.epoch), self._lead_checked, cleanup=False)
        return verdict is not LeadVerdict.GO_ON

    def _lead_checked(self, _: None, error: BaseException | None) -> None:
        """From any thread."""
        if isinstance(error, FencedError):
            self._own.append(job_events.LeadershipEnded(f"another coordinator leads: {error}"))
        self._lead.known(self._clock.monotonic_ms())
        self._job_thread.wake()

    def _take(self) -> Any:
        if self._own:
            return self._own.popleft()
        if self._inbox:
            return self._inbox.popleft()
        deadline = self._master.next_deadline_ms()
        due = deadline is not None and self._clock.monotonic_ms() >= deadline
        return events.DeadlineReached() if due else _NOTHING

    def _handle(self, item: Any) -> None:
        if item is _NOTHING:
            return
        self._has_begun = True
        if item is _STOP:
            self._shut()
        elif isinstance(item, _Call):
            item.act()
        elif isinstance(item, _QueryPosted):
            self._publisher.outdate()
            self._queries.pop(item.ticket).answer(self._master)
        else:
            self._publisher.changed()
            now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
            out = self._master.handle(item, now_ms=now_ms, wall_ms=wall_ms)
            self._note()
            if type(item) in _OF_USERS or any(isinstance(note, StateChanged) for note in self._master.notes):
                self._publisher.outdate()
            for action in out:
                self._perform(action)

    def _note(self, *, known: int = 0) -> None:
        """Log and record what the newest event brought, without the first `known` notes of it."""
        notes = self._master.notes[known:]
        self._log.write(notes)
        if self._history is not None:
            self._history.event_handled(self._master, notes)

    def _perform(self, action: job_actions.Action) -> None:
        match action:
            case job_actions.Answer():  # first: one for every call, and each class that it is not takes time to tell
                self._answer(action)
            case actions.DiscardState() | actions.DropCheckpoint() | Release():
                self._store(action, cleanup=True)
            case actions.WriteClaim() | actions.WriteMetadata() | actions.WriteAborted():
                self._store(action, cleanup=False)
            case job_actions.PrepareAttempt() | job_actions.WriteResult() | job_actions.WriteConfig():
                self._store(action, cleanup=False)
            case actions.TriggerHook() | job_actions.RestoreHook():
                self._call_hook(action)
            case job_actions.Deliver():
                self._deliver(action)
            case job_actions.CloseStream():
                stream = self._streams.get(action.slot)
                if stream is not None and stream.session == action.session:
                    del self._streams[action.slot]
                    stream.end()
            case job_actions.LookForProcess():
                if self._has_ended(action.pid, action.fingerprint):
                    self._own.append(job_events.ProcessEnded(action.slot, action.session))
                    self._job_thread.wake()
            case job_actions.Refuse():
                self._opening.pop(action.ticket, None)
                future = self._calls.pop(action.ticket, None)
                if future is not None:
                    _settle(future, lambda: _raise(action.error))
            case job_actions.JobEnded():
                self._ended.set()
                self._close_hooks()
            case _:
                assert_never(action)

    def _store(self, action: StorageAction, *, cleanup: bool) -> None:
        self._runner.run(
            self._effects.flow(action),
            lambda outcome, error: self._stored(type(action).__name__, outcome, error),
            cleanup=cleanup,
        )

    def _stored(self, name: str, outcome: job_events.Event | None, error: BaseException | None) -> None:
        """A flow has ended with its outcome, or with an unexpected error. From any thread."""
        if error is not None:
            self._failed = True
            logger.critical("job %s: %s failed unexpectedly", self.job_id, name, exc_info=error, extra=about(self.job_id))
            outcome = job_events.LeadershipEnded(f"{name} failed unexpectedly; the coordinator's log has the error")
        if outcome is not None:
            self.post(outcome)

    def _call_hook(self, action: actions.TriggerHook | job_actions.RestoreHook) -> None:
        """Have a master hook do its part, beside the job's thread; without a port, or a thread for the hook, it can't."""

        def ended(reply: HookReply) -> None:
            """From any thread, this job's own included."""
            self.post(outcome_of(action, reply))

        if self._hooks is None:
            ended(HookReply(HookVerdict.FAILED, message="this coordinator has no master hooks"))
            return
        try:
            self._hooks.call(call_of(action), ended)
        except RuntimeError as error:  # the system has no more threads
            ended(HookReply(HookVerdict.FAILED, message=f"it can't be called now: {error}"))

    def _close_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.close()

    def _deliver(self, action: job_actions.Deliver) -> None:
        stream = self._streams.get(action.slot)
        if stream is not None and stream.session == action.session and not stream.push(action.commands):
            del self._streams[action.slot]
            self._own.append(job_events.StreamClosed(action.slot, action.session, stream.number))
            self._job_thread.wake()

    def _answer(self, action: job_actions.Answer) -> None:
        subscription = self._opening.pop(action.ticket, None)
        if subscription is not None:
            self._open(subscription, action.value)
        future = self._calls.pop(action.ticket, None)
        if future is not None:
            _settle(future, lambda: action.value)

    def _open(self, subscription: Subscription, commands: tuple[NumberedCommand, ...]) -> None:
        """Open a stream; it replaces an older one of the slot."""
        older = self._streams.get(subscription.slot)
        self._streams[subscription.slot] = subscription
        if older is not None:
            older.end()
        subscription.push(commands)

    def _fail(self) -> None:
        self._failed = True
        known = len(self._master.notes)
        try:
            self._master.lifecycle.stop_leading("the coordinator failed; its log has the error")
            self._note(known=known)
        finally:
            self._shut()

    def _shut(self) -> None:
        """End all that waits for a turn: streams end, calls fail, queries are answered."""
        with self._lock:
            self._closed = True
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()
        self._inbox.clear()
        if self._history is not None:
            self._history.close()
        for ticket in list(self._calls):
            _settle(self._calls.pop(ticket), lambda: _raise(self._gone()))
        for ticket in list(self._queries):
            self._queries.pop(ticket).answer(self._master)
        self._publisher.publish(self._master, last=True)
        self._ended.set()
        self._close_hooks()


@dataclass(frozen=True, slots=True)
class _Query:
    read: Callable[[JobMaster], Any]
    future: Future[Any]

    def answer(self, master: JobMaster) -> None:
        _settle(self.future, lambda: self.read(master))


@dataclass(frozen=True, slots=True)
class _Call:
    """To be called in a turn; it changes nothing of the job."""

    act: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _QueryPosted:
    ticket: int


def _raise(error: HoldfastError) -> Any:
    raise error


def _settle(future: Future[Any], produce: Callable[[], Any]) -> None:
    """Complete a Future, unless its caller cancelled it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = produce()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)
