"""What the runtime gives to one operator of one subtask: its context, the mailbox, and the ports behind them: clock, pool.

The mailbox is the only door into a subtask: mails are put by any thread and taken by the loop thread between two slices. One put
after `close` is dropped, and its sender is answered so. The context passes calls on and counts the work under way. Neither decides
anything. The keyed backend and the timers are attached when the state has been restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from holdfast.barriers.alignment.valve import MultiInputValve
from holdfast.barriers.messages import (
    AlignWatermarks,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    TriggerCheckpoint,
)
from holdfast.operators.base import OperatorCounters, TimerService, UserCall
from holdfast.statebackends.backend import KeyedStateBackend, OperatorStateBackend
from holdfast.statebackends.errors import InvariantError, UndeclaredStateError
from holdfast.statebackends.storage.port import Flow, Storage


class PoolOutcome(msgspec.Struct, frozen=True):
    """Blocking work ended on the pool; `done(result, error)` runs on the loop thread."""

    done: Callable[[Any, BaseException | None], None]
    result: Any = None
    error: BaseException | None = None


class CancelSubtask(msgspec.Struct, frozen=True):
    """Stop at the next step; nothing more is emitted."""


class FailSubtask(msgspec.Struct, frozen=True):
    """Something outside the operators broke the attempt (a lost peer, a gap in a channel)."""

    error: BaseException


class SourceReady(msgspec.Struct, frozen=True):
    """A source that had nothing has something now; a subtask that is none takes a step."""


class SplitsRequested(msgspec.Struct, frozen=True):
    """A reader has asked the enumerator for so many splits since the attempt began; may come twice, and early."""

    subtask: int
    total: int


Mail: TypeAlias = (
    TriggerCheckpoint
    | NotifyCheckpointComplete
    | NotifyCheckpointAborted
    | FinishTasks
    | AlignWatermarks
    | CancelSubtask
    | FailSubtask
    | PoolOutcome
    | SourceReady
    | SplitsRequested
)


class Mailbox:
    """A queue with many writers and one reader. Order is that of `put`; a mail is taken once.

    `deque.append` and `popleft` are atomic, so no lock is needed: a mail that races with `close` is dropped by the reader."""

    __slots__ = ("_closed", "_mails", "_wake")

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._mails: deque[Mail] = deque()
        self._wake = wake
        self._closed = False

    def put(self, mail: Mail) -> bool:
        """Add a mail and wake the loop; False if the mailbox is closed. Any thread."""
        if self._closed:
            return False
        self._mails.append(mail)
        if self._wake is not None:
            self._wake()
        return True

    def take(self) -> Mail | None:
        """The oldest mail, or None. Loop thread only."""
        return self._mails.popleft() if self._mails else None

    def close(self) -> None:
        """Refuse further mails and forget those not taken."""
        self._closed = True
        self._mails.clear()

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        return len(self._mails)


Done = Callable[[Any, BaseException | None], None]


class Clock(Protocol):
    """All the time that a worker sees."""

    def monotonic_ms(self) -> int: ...

    def wall_ms(self) -> int:
        """ms since the epoch, UTC."""

    def seconds(self) -> float:
        """Monotonic, of the highest resolution there is; measures the cost of a slice."""


class CancelToken:
    """Set by the loop thread, read by the pool between two operations of a flow."""

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FlowCancelledError(InvariantError):
    """A flow was stopped between two of its operations, because its token was cancelled."""


class PoolThread(Protocol):
    """Runs blocking calls one after the other, always on the same thread."""

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        """Call `work` behind the calls in front of it, then `ended(result, error)` there."""

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        """Drive a flow behind the calls in front of it; else as `Pool.run_flow`."""

    def close(self) -> None:
        """End the thread behind the calls so far. Does not wait."""


class Pool(Protocol):
    """Where blocking work runs: threads in production, the simulator's scheduler in a test."""

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        """Call `work` on a pool thread, then `ended(result, error)` there."""

    def run_call(self, call: UserCall, ended: Done) -> None:
        """Make a user's call, on no thread that `run` and `run_flow` need; then `ended`, which may be never."""

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        """Drive a flow; a cancelled token closes it between two operations, and the error is FlowCancelledError."""

    def open_thread(self, name: str) -> PoolThread:
        """A thread of its own, for a blocking client."""


class CallsInOrder:
    """PoolThread without a thread: calls run where those of a pool do, each when the one before has ended. For schedules that own
    the order of things."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: deque[tuple[Callable[[Done], None], Done]] = deque()
        self._is_running = False

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        self._add(partial(self._pool.run, work), ended)

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        self._add(partial(self._pool.run_flow, flow, storage, token), ended)

    def _add(self, start: Callable[[Done], None], ended: Done) -> None:
        self._waiting.append((start, ended))
        self._begin()

    def close(self) -> None:
        return

    def _begin(self) -> None:
        if self._is_running or not self._waiting:
            return
        self._is_running = True
        start, ended = self._waiting.popleft()

        def next_one(result: Any, error: BaseException | None) -> None:
            self._is_running = False
            ended(result, error)
            self._begin()

        start(next_one)


class SubtaskPool:
    """One subtask's view of the pool: outcomes become mails, and what is under way is counted.

    A subtask's state may be disposed of only when nothing is under way (K11)."""

    def __init__(self, pool: Pool, mailbox: Mailbox) -> None:
        self._pool = pool
        self._mailbox = mailbox
        self._under_way = 0
        self._tokens: set[CancelToken] = set()
        self._ending: set[SubtaskThread] = set()

    @property
    def under_way(self) -> int:
        return self._under_way

    @property
    def threads_ending(self) -> int:
        """Threads whose end is awaited."""
        return len(self._ending)

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        self._under_way += 1
        self._pool.run(work, self._ended(done, None))

    def submit_call(self, call: UserCall, done: Done) -> None:
        """Not counted as under way: it touches no state, and may never end."""

        def post(result: Any, error: BaseException | None) -> None:
            self._mailbox.put(PoolOutcome(done, result, error))

        self._pool.run_call(call, post)

    def open_thread(self, name: str) -> SubtaskThread:
        """Its calls are not counted as under way: they touch no state, and may block for long."""
        return SubtaskThread(self._pool.open_thread(name), self._mailbox, self._ending)

    def submit_flow(self, flow: Flow[Any], storage: Storage, done: Done, token: CancelToken | None = None) -> None:
        token = token or CancelToken()
        self._under_way += 1
        self._tokens.add(token)
        self._pool.run_flow(flow, storage, token, self._ended(done, token))

    def cancel_flows(self) -> None:
        """Stop every flow at its next operation; their outcomes still come."""
        for token in self._tokens:
            token.cancel()

    def _ended(self, done: Done, token: CancelToken | None) -> Done:
        def account(result: Any, error: BaseException | None) -> None:
            self._under_way -= 1
            if token is not None:
                self._tokens.discard(token)
            done(result, error)

        def post(result: Any, error: BaseException | None) -> None:
            self._mailbox.put(PoolOutcome(account, result, error))

        return post


class SubtaskThread:
    """One subtask's view of a thread: outcomes become mails. What is under way when it closes is let go, unless it is awaited."""

    def __init__(self, thread: PoolThread, mailbox: Mailbox, ending: set[SubtaskThread] | None = None) -> None:
        """`ending`: it is in there from an awaited `close` to the end of its calls."""
        self._thread = thread
        self._mailbox = mailbox
        self._tokens: set[CancelToken] = set()
        self._ending: set[SubtaskThread] = set() if ending is None else ending

    def run(self, work: Callable[[], Any], done: Done) -> None:
        self._thread.run(work, self._posting(done))

    def run_flow(self, flow: Flow[Any], storage: Storage, done: Done) -> None:
        token = CancelToken()
        self._tokens.add(token)

        def ended(result: Any, error: BaseException | None) -> None:
            self._tokens.discard(token)
            done(result, error)

        self._thread.run_flow(flow, storage, token, self._posting(ended))

    def _posting(self, done: Done) -> Done:
        def post(result: Any, error: BaseException | None) -> None:
            self._mailbox.put(PoolOutcome(done, result, error))

        return post

    def close(self, *, awaited: bool = False) -> None:
        """Flows end at their next operation, and the thread behind the calls so far."""
        for token in self._tokens:
            token.cancel()
        if awaited:
            self._ending.add(self)
            self.run(lambda: None, lambda result, error: self._ending.discard(self))
        self._thread.close()


@dataclass
class RuntimeContext:
    """OperatorContext of one operator of one subtask."""

    job_id: str
    uid: str
    name: str
    subtask: int
    parallelism: int
    max_parallelism: int
    attempt: int
    nonce: str
    restored_checkpoint_id: int
    storage: Storage
    clock: Clock
    pool: SubtaskPool
    mailbox: Mailbox
    counters: OperatorCounters = field(default_factory=OperatorCounters)
    skipped_rows_max: int | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    keyed_backend: KeyedStateBackend | None = None
    operator_backend: OperatorStateBackend | None = None
    timer_service: TimerService | None = None
    job_name: str = ""
    auto_watermark_interval_ms: int = 0
    reading: Callable[[], int] = lambda: 0
    """The subtask's reading time."""
    running: Callable[[], int] = lambda: 0
    """The subtask's running time."""
    valve: MultiInputValve | None = None
    """Of the head of a chain that has input channels."""
    closed: bool = False
    """The operator was closed: outcomes of its work are dropped."""
    restores_in_flight: bool = False

    @property
    def keyed_state(self) -> KeyedStateBackend:
        if self.keyed_backend is None:
            raise UndeclaredStateError(f"operator {self.uid} is not on a keyed stream, so it has no keyed state", operator=self.uid)
        return self.keyed_backend

    @property
    def operator_state(self) -> OperatorStateBackend:
        if self.operator_backend is None:
            raise InvariantError(f"operator {self.uid}: state is asked for before it was restored")
        return self.operator_backend

    @property
    def timers(self) -> TimerService:
        if self.timer_service is None:
            raise UndeclaredStateError(f"operator {self.uid} is not on a keyed stream, so it has no timers", operator=self.uid)
        return self.timer_service

    def input_watermark_ms(self, input_index: int) -> int:
        if self.valve is None or not 0 <= input_index < self.valve.input_count:
            raise InvariantError(f"operator {self.uid} has no input {input_index} of its own")
        return self.valve.input_watermark_ms(input_index)

    def now_ms(self) -> int:
        return self.clock.wall_ms()

    def monotonic_ms(self) -> int:
        return self.clock.monotonic_ms()

    def reading_ms(self) -> int:
        return self.reading()

    def running_ms(self) -> int:
        return self.running()

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        self.pool.submit(work, self._unless_closed(done))

    def submit_call(self, call: UserCall, done: Done) -> None:
        self.pool.submit_call(call, self._unless_closed(done))

    def submit_flow(self, flow: Flow[Any], storage: Storage, done: Done) -> None:
        self.pool.submit_flow(flow, storage, self._unless_closed(done))

    def _unless_closed(self, done: Done) -> Done:
        def call(result: Any, error: BaseException | None) -> None:
            if not self.closed:
                done(result, error)

        return call

    def open_thread(self, name: str) -> SubtaskThread:
        return self.pool.open_thread(name)

    def source_is_ready(self) -> None:
        self.mailbox.put(SourceReady())

    def fail(self, error: BaseException) -> None:
        self.mailbox.put(FailSubtask(error))
