"""What the runtime gives to one operator of one subtask: its context, the mailbox, and the ports behind them: clock, pool.

The mailbox is the only door into a subtask: mails are put by any thread and taken by the loop thread between two slices. One put
after `close` is dropped, and its sender is answered so. The context passes calls on and counts the work under way. Neither decides
anything. The keyed backend and the timers are attached when the state has been restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec

from holdfast.barriers.messages import (
    AlignWatermarks,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    TriggerCheckpoint,
)
from holdfast.barriers.valve import MultiInputValve
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


class Pool(Protocol):
    """Where blocking work runs: threads in production, the simulator's scheduler in a test."""

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        """Call `work` on a pool thread, then `ended(result, error)` there."""

    def run_call(self, call: UserCall, ended: Done) -> None:
        """Make a user's call, on no thread that `run` and `run_flow` need; then `ended`, which may be never."""

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        """Drive a flow; a cancelled token closes it between two operations, and the error is FlowCancelledError."""


class SubtaskPool:
    """One subtask's view of the pool: outcomes become mails, and what is under way is counted.

    A subtask's state may be disposed of only when nothing is under way (K11)."""

    def __init__(self, pool: Pool, mailbox: Mailbox) -> None:
        self._pool = pool
        self._mailbox = mailbox
        self._under_way = 0
        self._tokens: set[CancelToken] = set()

    @property
    def under_way(self) -> int:
        return self._under_way

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        self._under_way += 1
        self._pool.run(work, self._ended(done, None))

    def submit_call(self, call: UserCall, done: Done) -> None:
        """Not counted as under way: it touches no state, and may never end."""

        def post(result: Any, error: BaseException | None) -> None:
            self._mailbox.put(PoolOutcome(done, result, error))

        self._pool.run_call(call, post)

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
    valve: MultiInputValve | None = None
    """Of the head of a chain that has input channels."""
    closed: bool = False
    """The operator was closed: outcomes of its work are dropped."""

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

    def fail(self, error: BaseException) -> None:
        self.mailbox.put(FailSubtask(error))
