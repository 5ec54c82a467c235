"""The low-level interface of two-phase sinks (Flink's FLIP-143): `Sink`, `SinkWriter`, `Committer`, and their operators.

For outsides whose commit can be repeated without harm: the committer names what is committed, and is called again after a failure.
Where it can't, `CommitTarget` moves a position with the rows, and is the simpler way."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import CallThread, Operator, OperatorContext, Output
from holdfast.operators.functions.context import FunctionContext
from holdfast.operators.sinks.calls import TRIES, CallPort, call_flow, close_on, pause_flow
from holdfast.operators.sinks.committing import TwoPhaseCommitter
from holdfast.operators.sinks.files.writer import COMMITTABLE_SCHEMA
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    InvalidConfigError,
    InvalidRowError,
    StorageUnavailableError,
    UnsupportedVersionError,
)
from holdfast.statebackends.secrets import hide_resolved
from holdfast.statebackends.state import OperatorListStateDescriptor, StateDescriptor
from holdfast.statebackends.storage.port import Flow, Storage

REQUESTS = OperatorListStateDescriptor("commit_requests")
"""The committer's one list state: a `Requests` for each checkpoint."""

COMMITTABLES_MAX = 100_000
"""Of one writer for one checkpoint."""

HELD_BYTES_MAX = 4 << 20
"""Bytes of rows that wait for a writer; with more its subtask takes no further batch."""


class SinkWriter(ABC):
    """Writes the rows of one subtask. It is pickled into the job, one copy a subtask.

    Its methods are called one at a time, always on the same thread, which is its own: a call that blocks holds up the rows and the
    barriers behind it, and nothing else. A restart lets it go."""

    def open(self, ctx: FunctionContext) -> None:
        """Before the first row of an attempt."""
        return

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows, at least one. What it holds in memory must be bounded."""

    def prepare_commit(self) -> Sequence[bytes]:
        """At each barrier, and at the end: hand over all rows so far. Returns one committable for each thing that the committer has
        to commit when the checkpoint is complete; none without one, or without rows. Their format is the writer's."""
        return ()

    @abstractmethod
    def flush(self, *, end_of_input: bool) -> None:
        """Make durable all that was handed over so far; the checkpoint waits for it. What it raises fails the checkpoint, and the
        next one calls it again, behind `prepare_commit`. end_of_input: no more rows will come."""

    def close(self) -> None:
        """Release resources. Called once, behind the calls so far, also after a failure; never if the process dies, or a call never
        returns."""
        return


class Outcome(StrEnum):
    """Outcome of one commit request."""

    COMMITTED = "committed"
    ALREADY_COMMITTED = "already_committed"
    RETRY_LATER = "retry_later"
    FAILED_KNOWN = "failed_known"
    FAILED_UNKNOWN = "failed_unknown"


class CommitRequest:
    """One committable of a completed checkpoint. Unless its committer says otherwise, it is committed when `commit` returns.

    Source: Flink, Committer.CommitRequest."""

    __slots__ = ("checkpoint_id", "committable", "outcome", "reason", "tries")

    def __init__(self, committable: bytes, checkpoint_id: int, tries: int) -> None:
        self.committable = committable
        self.checkpoint_id = checkpoint_id
        self.tries = tries
        """Times that this attempt of the job has asked for it before."""
        self.outcome = Outcome.COMMITTED
        self.reason: BaseException | None = None

    def __repr__(self) -> str:
        return f"<CommitRequest of checkpoint {self.checkpoint_id}, {len(self.committable)} bytes: {self.outcome.value}>"

    def already_committed(self) -> None:
        """An earlier try took effect: a success."""
        self.outcome = Outcome.ALREADY_COMMITTED

    def retry_later(self) -> None:
        """Ask again when the next checkpoint is complete, or when the job ends."""
        self.outcome = Outcome.RETRY_LATER

    def failed(self, reason: BaseException, *, known: bool) -> None:
        """It is not committed. known: it never will be, for a reason that is understood; it is logged and counted
        (`commits_failed`), and the job goes on without it. Otherwise the job fails, and asks again when it is restored."""
        self.outcome = Outcome.FAILED_KNOWN if known else Outcome.FAILED_UNKNOWN
        self.reason = reason


class Committer(ABC):
    """Commits what all writers of a sink have staged. There is one; it is pickled into the job.

    Its methods are called one at a time, always on the same thread, which is its own: a call that blocks holds up neither
    checkpoints nor a restart, which lets it go."""

    def open(self, ctx: FunctionContext) -> None:
        """Before the first commit of an attempt."""
        return

    @abstractmethod
    def commit(self, requests: Sequence[CommitRequest]) -> None:
        """Commit requests of completed checkpoints, in their order. Each may have been committed before: by an attempt that died
        before it could tell. What it raises fails the job, which asks for all of them again when it is restored."""

    def close(self) -> None:
        """Release resources. As `SinkWriter.close`."""
        return


class Sink(Protocol):
    """A sink: picklable. Subclass it, or give a class of your own the same attributes."""

    name: str = "sink"
    sink_id: str = ""
    """Empty until the graph is built, which then gives it the uid of its operator."""
    needs_columns: bool = True
    """True: batches must have a schema, else building the graph is an error."""

    def create_writer(self, schema: pa.Schema | None) -> Operator | SinkWriter:
        """The writer that each subtask gets a copy of. An operator (of Holdfast's own) emits committables before the barrier."""
        ...

    def create_committer(self) -> Operator | Committer | None:
        """The committer, at parallelism 1; None for a sink without commits, which writes at least once."""
        return None


def writer_operator(writer: Operator | SinkWriter) -> Operator:
    """The operator that runs a writer."""
    return WriterOperator(writer) if isinstance(writer, SinkWriter) else writer


def committer_operator(committer: Operator | Committer | None) -> Operator | None:
    """The operator that runs a committer; None without one."""
    return CommitterOperator(committer) if isinstance(committer, Committer) else committer


class Requests(msgspec.Struct, frozen=True):
    """Committables of one checkpoint: of one writer on their way to the committer, or of all in its state."""

    version: int
    checkpoint_id: int
    committables: tuple[bytes, ...]


def _decode_requests(encoded: bytes, operator: str) -> Requests:
    try:
        found = decode_msgpack(encoded, Requests)
    except UNDECODABLE as error:
        raise CorruptStateError(
            f"sink {operator}: its commit requests can't be read: {error}", operator=operator, reason=str(error)
        ) from error
    if found.version != 1:
        raise UnsupportedVersionError(
            f"sink {operator}: commit requests of version {found.version}", version=found.version, supported=1
        )
    return found


class WriterOperator(Operator):
    """Operator kind `sink_writer`: runs a SinkWriter on a thread of its own, which gets rows, and says when it has taken them."""

    def __init__(self, writer: SinkWriter) -> None:
        self._writer = writer

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._port = CallPort(context.storage)
        self._path = f"{context.job_id}/sinks/{context.uid}/writer"
        self._thread: CallThread | None = None
        """None: nothing was called."""
        self._held: list[pa.RecordBatch] = []
        """Rows that the thread has not been given."""
        self._held_size = 0
        """Bytes of these and of those that it has not written."""
        self._is_writing = False
        self._preparing = 0
        """Barriers whose `prepare_commit` has not ended."""
        self._is_finished = False

    def open(self) -> None:
        self._thread = self.context.open_thread(f"holdfast-{self.context.uid}-{self.context.subtask}")
        context = FunctionContext(self.context)
        self._call(lambda: self._writer.open(context), lambda nothing: None)

    def _call(self, call: Callable[[], Any], ended: Callable[[Any], None]) -> None:
        """A call behind those so far. Its failure fails the subtask."""
        assert self._thread is not None

        def done(result: Any, error: BaseException | None) -> None:
            if self._thread is None:
                return
            if isinstance(error, InvalidRowError):
                error.operator = error.operator or self.context.uid
            if error is not None:
                self.context.fail(error)
            else:
                ended(result)

        self._thread.run_flow(call_flow(self._path, call), self._port, done)

    # ------------------------------------------------------------------------------------------------------------- rows

    def takes_input(self) -> bool:
        return self._held_size < HELD_BYTES_MAX

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if batch.num_rows == 0:
            return
        columns = batch.columns()
        self._held.append(columns)
        self._held_size += columns.nbytes
        if not self._is_writing:
            self._write_held()

    def _write_held(self) -> None:
        """Give the thread what there is; what comes meanwhile goes together."""
        held, self._held = self._held, []
        if not held:
            return
        self._is_writing = True

        def write() -> None:
            for columns in held:
                self._writer.write(columns)

        def written(nothing: None) -> None:
            self._is_writing = False
            self._held_size -= sum(columns.nbytes for columns in held)
            self._write_held()

        self._call(write, written)

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def finish(self) -> Iterator[None]:
        self._is_finished = True
        return iter(())

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._write_held()
        self._preparing += 1

        def prepared(committables: Sequence[bytes]) -> None:
            self._preparing -= 1
            self._emit(checkpoint_id, committables)

        self._call(self._writer.prepare_commit, prepared)

    def is_preparing(self) -> bool:
        return self._preparing > 0

    def _emit(self, checkpoint_id: int, given: Sequence[bytes]) -> None:
        is_list = isinstance(given, Sequence) and len(given) <= COMMITTABLES_MAX
        if not is_list or not all(isinstance(each, bytes) for each in given):
            raise InvalidConfigError(
                f"sink {self.context.uid}: prepare_commit() returns up to {COMMITTABLES_MAX} committables, each of bytes, in a "
                f"list or a tuple; it gave a {type(given).__name__}",
                operator=self.context.uid,
            )
        committables = tuple(given)
        if committables:
            column = pa.array([msgspec.msgpack.encode(Requests(1, checkpoint_id, committables))], pa.binary())
            self.output.collect(Batch(columns=pa.RecordBatch.from_arrays([column], schema=COMMITTABLE_SCHEMA)))

    def snapshot_work(self, checkpoint_id: int) -> Flow[None]:
        end_of_input = self._is_finished
        return call_flow(self._path, lambda: self._writer.flush(end_of_input=end_of_input))

    def snapshot_storage(self) -> Storage:
        return self._port

    def snapshot_thread(self) -> CallThread | None:
        return self._thread

    def has_pending_work(self) -> bool:
        return self._is_writing or bool(self._held) or self._preparing > 0

    def close(self) -> None:
        thread, self._thread = getattr(self, "_thread", None), None
        if thread is not None:
            close_on(thread, self._writer.close, f"sink {self.context.uid}: its writer")


class CommitterOperator(TwoPhaseCommitter[bytes]):
    """Operator kind `sink_committer`: runs a Committer."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (REQUESTS,)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._port = CallPort(context.storage)
        self._path = f"{context.job_id}/sinks/{context.uid}/committer"
        self._opened = False
        self._later: set[int] = set()
        """Ids whose requests wait for the next completed checkpoint."""
        self._tries: dict[int, int] = {}
        self._logger: logging.Logger = FunctionContext(context).logger
        self._thread: CallThread | None = None
        """The committer's own; None: it was never called."""

    @property
    def _is_open(self) -> bool:
        return self._opened

    def _decode(self, committable: bytes) -> tuple[int, tuple[bytes, ...]]:
        requests = _decode_requests(committable, self.context.uid)
        return requests.checkpoint_id, requests.committables

    def initialize_state(self) -> None:
        for entry in self.context.operator_state.list_state(REQUESTS.name).entries:
            requests = _decode_requests(entry, self.context.uid)
            self._pending.setdefault(requests.checkpoint_id, []).extend(requests.committables)

    def open(self) -> None:
        def opened(nothing: None) -> None:
            self._opened = True
            self._commit_next()

        context = FunctionContext(self.context)
        self._thread = self.context.open_thread(f"holdfast-{self.context.uid}")
        self._start(call_flow(self._path, lambda: self._committer.open(context)), self._port, opened)

    def _submit(self, flow: Flow[Any], storage: Storage, done: Callable[[Any, BaseException | None], None]) -> None:
        assert self._thread is not None
        self._thread.run_flow(flow, storage, done)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._later.clear()
        super().notify_checkpoint_complete(checkpoint_id)

    @property
    def _due(self) -> tuple[int, ...]:
        return tuple(number for number in super()._due if number not in self._later)

    def _commit(self, due: tuple[int, ...]) -> None:
        requests = [CommitRequest(each, number, self._tries.get(number, 0)) for number in due for each in self._pending[number]]

        def committed(nothing: None) -> None:
            self._settle(due, requests)
            self._commit_next()

        self._start(call_flow(self._path, lambda: self._committer.commit(requests)), self._port, committed)

    def _settle(self, due: tuple[int, ...], requests: list[CommitRequest]) -> None:
        """Take the outcomes in. Raises the reason of the first that is unknown: the job fails."""
        unknown = [each for each in requests if each.outcome is Outcome.FAILED_UNKNOWN]
        if unknown:
            reason = unknown[0].reason
            if isinstance(reason, HoldfastError):
                raise reason
            raise StorageUnavailableError(
                f"sink {self.context.uid}: {len(unknown)} of {len(requests)} commits failed, the first of checkpoint "
                f"{unknown[0].checkpoint_id}: {hide_resolved(f'{type(reason).__name__}: {reason}')}"
            ) from reason
        named = self.context.counters.named
        for request in requests:
            if request.outcome is Outcome.FAILED_KNOWN:
                named["commits_failed"] = named.get("commits_failed", 0) + 1
                why = hide_resolved(str(request.reason))
                self._logger.error("a commit of checkpoint %d failed for good: %s", request.checkpoint_id, why)
        for number in due:
            left = [each for each in requests if each.checkpoint_id == number and each.outcome is Outcome.RETRY_LATER]
            if left:
                self._pending[number] = [each.committable for each in left]
                self._tries[number] = self._tries.get(number, 0) + 1
                self._later.add(number)
            else:
                del self._pending[number]
                self._tries.pop(number, None)
        self._count_commit()

    def _sweep(self) -> None:
        """What a sink of a user's own has staged is its own to clean up."""

    def snapshot_state(self, checkpoint_id: int) -> None:
        entries = (Requests(1, number, tuple(some)) for number, some in sorted(self._pending.items()))
        self.context.operator_state.list_state(REQUESTS.name).update(msgspec.msgpack.encode(entry) for entry in entries)

    def has_pending_work(self) -> bool:
        """Asked when the subtask is about to finish: there is no next checkpoint that a request could wait for."""
        if self._later and not self._busy:
            self._try_last()
        return super().has_pending_work() or bool(self._later)

    def _try_last(self) -> None:
        tries = max(self._tries.get(number, 0) for number in self._later)
        if tries >= TRIES.attempts_max:
            number = min(self._later)
            self._later.clear()
            raise StorageUnavailableError(
                f"sink {self.context.uid}: commits of checkpoint {number} were put off {tries} times, and the job ends"
            )

        def waited(nothing: None) -> None:
            self._later.clear()
            self._commit_next()

        self._start(pause_flow(self._path, TRIES.pause_ms(max(tries, 1))), self._port, waited)

    def close(self) -> None:
        super().close()
        thread = getattr(self, "_thread", None)
        if thread is not None:
            self._port.end()
            close_on(thread, self._committer.close, f"sink {self.context.uid}: its committer")
