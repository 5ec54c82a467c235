"""The operator contract: what the runtime calls on an operator, and what an operator may ask of the runtime.

All calls come from the worker's loop thread. An operator emits through its output only; blocking work goes through
`OperatorContext.submit` and comes back as a mail. Nothing may be emitted from `snapshot_state` on (K06)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from holdfast.barriers.elements import MIN_WATERMARK, Batch
from holdfast.barriers.messages import INT_MAX, OperatorMetrics
from holdfast.statebackends.backend import KeyedStateBackend, OperatorStateBackend
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.state import StateDescriptor

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.barriers.exchange.partition import Combining, KeySelector, SubtaskFunction
    from holdfast.barriers.jobgraph import JobGraph
    from holdfast.statebackends.storage.port import Flow, Storage

OVERDUE_MS = MIN_WATERMARK
"""A time of the clock that has always passed: `next_processing_time_ms` of what is due at once, whatever the clock reads."""


class Output(Protocol):
    """Where an operator emits: the next operator of the chain, or the subtask's result partition."""

    def collect(self, batch: Batch) -> None: ...

    def collect_side(self, tag: str, batch: Batch) -> None:
        """To a declared side output. What nobody reads is dropped."""

    def has_readers(self, tag: str) -> bool:
        """Whether the job reads this side output: rows for one without readers need not be made."""

    def emit_watermark(self, timestamp_ms: int) -> None:
        """A watermark of the operator's own (an assigner's), behind all that it has collected so far.

        Operators further down the chain see it when the call in progress has returned, in slices; only the highest of
        one call counts. Never called from `snapshot_state` on."""

    def emit_watermark_now(self, timestamp_ms: int) -> None:
        """As `emit_watermark`, and in front of what is collected next: it is passed on at once, and all that it fires in one go."""

    def emit_status(self, *, idle: bool) -> None:
        """The operator goes idle, behind the watermarks that it has emitted, or comes back, in front of what it collects next.

        A status that those behind it have changes nothing. A watermark brings an idle operator back."""


class TimerService(Protocol):
    """Event-time and processing-time timers of the current key. Identity: (key, namespace, time)."""

    def register_event_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None: ...
    def delete_event_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None: ...
    def register_processing_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None: ...
    def delete_processing_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None: ...

    @property
    def current_watermark(self) -> int: ...

    @property
    def current_processing_time(self) -> int:
        """Wall clock, ms."""


@dataclass(slots=True)
class OperatorCounters:
    """Counters that operators bump; the subtask reports them. What each means: `OperatorMetrics`."""

    late_dropped: int = 0
    late_ms_max: int = 0
    rows_skipped: int = 0
    first_skipped: str = ""
    records_in: int = 0
    records_out: int = 0
    named: dict[str, int] = field(default_factory=dict)
    """An operator's own, such as a sink's commits; not reported."""
    user: dict[str, Counter] = field(default_factory=dict)
    """Those of the user's function, by name."""
    emit_lag_ms: int | None = None
    """Wall clock less event time of the last record that a source, or what gives records their event times, emitted."""

    def metrics(self, operator: str) -> OperatorMetrics:
        counters = {name: counter.count for name, counter in self.user.items()}
        return OperatorMetrics(
            operator,
            records_in=self.records_in,
            records_out=self.records_out,
            late_dropped=self.late_dropped,
            late_ms_max=min(INT_MAX, self.late_ms_max),
            counters=counters,
            rows_skipped=self.rows_skipped,
            first_skipped=self.first_skipped,
        )


class Counter:
    """A counter of a user's function, on one subtask: `inc()`. It only rises, and is not state: the runtime takes it along at each
    checkpoint, so that over all subtasks and restarts it counts each record once."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
        """Since the subtask was deployed."""

    def inc(self, count: int = 1) -> None:
        """Raises ValueError for what is no whole number from 0 on, which the runtime tells with operator and record."""
        if type(count) is not int or count < 0:
            raise ValueError(f"a counter goes up by whole numbers, not by {count!r}")
        self.count = min(INT_MAX, self.count + count)


class UserCall:
    """A call of a user's function that waits for others, such as a request: it may take as long as it likes, or never return."""

    __slots__ = ("argument", "function", "is_abandoned", "is_coroutine", "on_abandon")

    def __init__(self, function: Callable[[Any], Any], argument: Any, *, is_coroutine: bool) -> None:
        self.function = function
        self.argument = argument
        self.is_coroutine = is_coroutine
        self.is_abandoned = False
        self.on_abandon: Callable[[], Any] | None = None
        """Set by what runs it: stops it, if that can be done."""

    def abandon(self) -> None:
        """Its answer is of no use any more."""
        self.is_abandoned = True
        if self.on_abandon is not None:
            self.on_abandon()


class CallThread(Protocol):
    """Runs blocking calls one after the other, always on the same thread; outcomes come back as mails."""

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Call `work` behind the calls so far; `done(result, error)` is called later on the loop thread."""

    def run_flow(self, flow: Flow[Any], storage: Storage, done: Callable[[Any, BaseException | None], None]) -> None:
        """Drive a flow behind the calls so far; `done` as in `run`."""

    def close(self, *, awaited: bool = False) -> None:
        """End the thread behind the calls so far, and flows at their next operation. Does not wait; where it is `awaited` the
        attempt does, for a while, before the next one begins."""


class OperatorContext(Protocol):
    """What the runtime gives to one operator of one subtask."""

    job_id: str
    job_name: str
    uid: str
    name: str
    subtask: int
    parallelism: int
    max_parallelism: int
    attempt: int
    nonce: str
    """Drawn once per subtask deployment; part of every file name that the operator chooses."""
    restored_checkpoint_id: int
    """0 when the job started empty."""
    restores_in_flight: bool
    """The restored snapshot holds records in flight: its subtasks had come to different event times."""
    counters: OperatorCounters
    skipped_rows_max: int | None
    """Of JobConfig."""
    properties: Mapping[str, Any]
    """Of the operator, in the job graph as it was accepted."""
    auto_watermark_interval_ms: int
    """Of JobConfig."""

    @property
    def keyed_state(self) -> KeyedStateBackend:
        """Raises UndeclaredStateError on a non-keyed operator."""

    @property
    def operator_state(self) -> OperatorStateBackend: ...

    @property
    def timers(self) -> TimerService:
        """Only on keyed operators."""

    @property
    def storage(self) -> Storage:
        """The state directory."""

    def input_watermark_ms(self, input_index: int) -> int:
        """Event time of one input; the operator's own (`process_watermark`) is the least of those that are not idle.

        MIN_WATERMARK before the first. Raises InvariantError for an input that the operator doesn't have."""

    def now_ms(self) -> int:
        """Wall clock."""

    def monotonic_ms(self) -> int: ...

    def reading_ms(self) -> int:
        """Reading time: ms since the attempt began in which the subtask could read, and found nothing."""

    def running_ms(self) -> int:
        """Running time: ms since the attempt began in which the subtask could read, whether it found something or not."""

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run blocking `work` on the pool; `done(result, error)` is called later on the loop thread, as a mail."""

    def submit_call(self, call: UserCall, done: Callable[[Any, BaseException | None], None]) -> None:
        """Run a user's call beside the pool's own work, which it can't hold up; `done` as in submit, late or never."""

    def open_thread(self, name: str) -> CallThread:
        """A thread of its own, for a blocking client that belongs to one thread."""

    def source_is_ready(self) -> None:
        """The source has something, whatever time it named: it is polled again. From a mail."""

    def submit_flow(self, flow: Flow[Any], storage: Storage, done: Callable[[Any, BaseException | None], None]) -> None:
        """Drive a storage flow on the pool (or by the simulator); `done` as in submit."""

    def fail(self, error: BaseException) -> None:
        """Fail the subtask, from any mail."""


class Operator:
    """Base of all operators; a template instance is pickled into the closure and copied per subtask before `setup`."""

    context: OperatorContext
    output: Output

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        """Every state the operator will ask for; listed in the graph's JSON."""
        return ()

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        """Columns of its only input that it reads, or passes on, to make these columns of its output. None: all, of both.

        Others may be missing in the batches that it gets, whatever the declared columns are."""
        return None

    def combining(self) -> Combining | str | None:
        """How the rows of its first input can be combined before an exchange, which it then takes as well as the rows themselves.

        A text says why they can't; None: there is nothing in them that could be."""
        return None

    def setup(self, context: OperatorContext, output: Output) -> None:
        self.context = context
        self.output = output

    def initialize_state(self) -> None:
        """State backends are restored; read operator lists here. Before any `open` of the chain's other operators."""

    def open(self) -> None:
        """Called tail to head; afterwards records and timers may come."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        """Handle one slice of input; emit through `self.output`. A source operator is never called here."""
        raise InvariantError(f"{type(self).__name__} takes no input")

    def remaining_output(self) -> Iterator[None] | None:
        """Output of the batches so far that `process_batch` did not get to, in slices that leave nothing; None: nothing is left.

        Asked for behind each call of it, of the head of a chain. The operator then gets the rest of its batch, too, before the
        first slice, so that a barrier may fall between two: its state must cover what it has not emitted."""
        return None

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        """Event time advanced (all inputs combined). Each `yield` ends a slice, so that mail and barriers get in.

        The runtime forwards the watermark after the last slice, unless `forwards_watermarks` is False."""
        return iter(())

    def end_input(self, input_index: int) -> Iterator[None]:
        """No more records on one of several inputs; behind its maximum watermark, in slices, once in each attempt.

        Every input ends before `finish`. When a job is stopped with a drain, and may go on later, all end together: none is ended
        while another one is read. Not called on an operator with one input, whose end is `finish`."""
        return iter(())

    uses_timers: bool = False
    """True for a keyed operator that registers timers: they are part of its keyed state."""

    forwards_watermarks: bool = True
    """False for a watermark assigner: it swallows upstream watermarks except the maximum and emits its own."""

    forwards_statuses: bool = True
    """False for a watermark assigner: it has a status of its own, and swallows that of its inputs."""

    @property
    def uses_processing_time(self) -> bool:
        """False for an operator that will have no processing-time timer; read when it has been opened."""
        return True

    def next_processing_time_ms(self) -> int | None:
        """Wall-clock time of the earliest processing-time timer, or None; the runtime waits for that one alone."""
        return None

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        """Fire processing-time timers due at now_ms, in slices."""
        return iter(())

    @property
    def watches_silence(self) -> bool:
        """Whether `next_silence_ms` is asked for; read when the operator has been opened."""
        return False

    def next_silence_ms(self) -> int | None:
        """Reading time at which `process_silence` is due, if nothing is read before; None: not before something is read."""
        return None

    def process_silence(self, reading_ms: int) -> None:
        """Nothing was read up to this reading time: emit what follows, watermarks and a status."""

    def takes_input(self) -> bool:
        """False while the operator is full: its subtask takes no further batch, but events and mails."""
        return True

    def has_requests(self) -> bool:
        """True while answers are awaited that the end of event time, and of the data, must not overtake. Of the head of a chain."""
        return False

    def finish(self) -> Iterator[None]:
        """End of data on all inputs (after the maximum watermark, when draining): flush what is buffered, in slices."""
        return iter(())

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        """Pre-barrier hook: may emit; what is emitted is before the cut."""

    def is_preparing(self) -> bool:
        """True while what the pre-barrier hook began on a thread has not ended, with what it emits: the barrier waits for it, and
        with the barrier all further input."""
        return False

    def snapshot_state(self, checkpoint_id: int) -> None:
        """Update operator list states; keyed state is frozen by the runtime right after. Must not emit or block."""

    def snapshot_work(self, checkpoint_id: int) -> Flow[Any] | None:
        """Further asynchronous work whose end the acknowledgement waits for (a sink making staged bytes durable)."""
        return None

    def snapshot_thread(self) -> CallThread | None:
        """The thread that the flow of `snapshot_work` runs on, if it calls a user's object; None: it runs on the pool."""
        return None

    def snapshot_storage(self) -> Storage | None:
        """The storage that the flow of `snapshot_work` is about; None: the state directory."""
        return None

    def external_files(self, checkpoint_id: int) -> tuple[str, ...]:
        """Files outside the snapshot that the snapshot needs; listed in `_metadata`."""
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None: ...

    def has_pending_work(self) -> bool:
        """True while commits or other pool work must end before the subtask may finish."""
        return False

    def commit_backlog(self) -> CommitBacklog | None:
        """Of what commits output: how far that is behind the checkpoints. None: it commits nothing."""
        return None

    def close(self) -> None:
        """Always called, also after a failure."""


@dataclass(frozen=True, slots=True)
class CommitBacklog:
    """What is of complete checkpoints, and not known to be committed."""

    checkpoints: int
    committables: int
    """Things to commit, of all of them: of sinks that stage rows, files."""
    lag_ms: int
    """Since the oldest of them was complete, as far as this attempt knows; 0: there is none."""
    rows: int | None = None
    """Staged rows of all of them; None: its committables don't say."""


NEVER_MS = 1 << 52
"""Of `Poll.ready_at_ms`: only `source_is_ready` says that there is something."""


class Poll(msgspec.Struct, frozen=True):
    """What a source reader gave: at most one of batch and wait. Behind the batch come the watermark, then the status."""

    batch: Batch | None = None
    ready_at_ms: int | None = None
    """Monotonic time before which polling again is useless, unless a SourceReady comes; None: poll again at once."""
    watermark_ms: int | None = None
    """A watermark of the source's own; one that is not above the last changes nothing."""
    idle: bool | None = None
    """The source goes idle (True), or comes back."""
    finished: bool = False
    split: str = ""
    """Id of the split that the records are of; empty: of a source without splits of its own."""
    ended_split: str = ""
    """Id of the split that ends behind them."""
    dead_letters: Batch | None = None
    """Records among them that can't be read."""


class SplitTimes(Protocol):
    """Who keeps event time by split: the operator that gives the records of a source their event times."""

    def add_split(self, split_id: str) -> None:
        """Event time waits for it, from now on."""

    def enter_split(self, split_id: str) -> None:
        """The records that follow are of it."""

    def leave_split(self, split_id: str) -> None:
        """It has ended."""

    def has_no_splits(self) -> None:
        """There is nothing to wait for, until one is added."""

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        """Some are not read for now, others are again: those that are paused are not silent."""

    def split_watermarks_ms(self) -> Mapping[str, int]:
        """Event time of each split."""

    def idle_splits(self) -> Collection[str]:
        """Those of them that are not waited for."""


class SourceReader(Protocol):
    """One subtask's reader of a rewindable source. Its position is split operator state."""

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        """`entries`: restored splits and positions for this subtask; None when the job starts empty."""

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        """Up to rows_max records, in order. Must not block for long (tens of ms)."""

    def snapshot(self) -> list[bytes]:
        """Positions after the last polled record, one entry per split."""

    def external_files(self) -> tuple[str, ...]: ...

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def close(self) -> None: ...


class SplitInput(SourceReader, Protocol):
    """A reader whose splits come from an enumerator, over an input channel of its subtask."""

    def add_splits(self, entries: list[bytes]) -> None:
        """Encoded splits, each handed to this reader alone."""

    @property
    def reads_in_turn(self) -> bool:
        """Whether splits are read one behind the other: event time does not wait for those that were not begun."""

    def no_more_splits(self) -> None:
        """The enumerator has handed out its last one: the reader finishes with those that it has."""

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        """Read no further in some splits for now, and again in others."""

    @property
    def splits(self) -> Collection[str]:
        """Ids of those that are not finished."""

    def pending_records(self) -> int | None:
        """Records that are known to wait outside; None: that is not known."""

    @property
    def pending_by_split(self) -> Mapping[str, int]:
        """The same of each split of which it is known."""

    @property
    def splits_requested(self) -> int:
        """Splits that the reader wants to have been given since the attempt began."""


@runtime_checkable
class SnapshotsById(Protocol):
    """A reader that keeps apart what it said in each checkpoint."""

    def snapshot_of(self, checkpoint_id: int) -> list[bytes]:
        """In place of `snapshot`."""


@runtime_checkable
class CutsAtBoundaries(Protocol):
    """A reader whose barriers fall only where it says so."""

    @property
    def may_cut(self) -> bool:
        """Whether a barrier may come now. It waits for a poll behind which this is true, and counts against the checkpoint's
        timeout meanwhile."""


@runtime_checkable
class TellsBacklog(Protocol):
    """A reader that tells whether it works off a backlog; one that does not tell never does."""

    @property
    def is_processing_backlog(self) -> bool:
        """See `SourceReader` of sources/splits.py. Asked before the first poll and behind each slice of them; must not block."""


class SplitRequests(SourceReader, Protocol):
    """The enumerator, as the reader of a source whose records are splits."""

    def split_requested(self, subtask: int, total: int) -> None:
        """A reader wants to have been given so many splits since the attempt began. Repeated, late and early calls do no harm."""


class Source(Protocol):
    """A rewindable source: picklable, made into one reader per subtask."""

    name: str

    @property
    def schema(self) -> pa.Schema | None:
        """Columns, known when the graph is built; None for rows of undeclared type."""

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> SourceReader: ...


@dataclass(frozen=True)
class JobPlan:
    """The job as it travels to the workers: the graph plus user code, keyed by uid and edge."""

    graph: JobGraph
    operators: dict[str, Operator]
    """uid -> template, copied (pickle round trip) per subtask."""
    sources: dict[str, Source]
    """uid of a source operator -> source."""
    selectors: dict[tuple[str, int], KeySelector]
    """(uid of a keyed operator, input index) -> the selector of that input; also used by HASH edges into its vertex."""
    schemas: dict[int, Any]
    """edge id -> pa.Schema or None."""
    partitionings: dict[int, SubtaskFunction] = field(default_factory=dict)
    """edge id -> the user's function of a CUSTOM edge."""
    combinings: dict[int, Combining] = field(default_factory=dict)
    """edge id -> how its rows are combined before they travel."""
    columns: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """edge id -> the columns that are sent, where not all of them are read."""
