"""One subtask's checkpoints from the barrier on: synchronous part, asynchronous part, acknowledgement or decline.

It decides which ids are dead here and how each outcome is answered. It does not know how barriers are aligned, and never deletes
what it wrote: the coordinator sweeps files of a checkpoint without acknowledgement. Numbers such as K12: docs/invariants.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.barriers.alignment.handler import AbortedIds, AlignmentMetrics
from holdfast.barriers.elements import CancelMarker, CheckpointBarrier, Element
from holdfast.barriers.erasure import Erasure
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    Answerable,
    CheckpointKind,
    CheckpointMetrics,
    DeclineCheckpoint,
    FailureReason,
    OperatorMetrics,
    SubtaskKey,
    clip,
)
from holdfast.operators.base import CallThread
from holdfast.operators.task.chain import ChainNode, OperatorChain
from holdfast.operators.task.context import CancelToken, Clock, SubtaskPool
from holdfast.operators.task.inflight import Elements, InFlight, SubtaskEdges
from holdfast.operators.task.rollback import SubtaskStateKeeper
from holdfast.statebackends.backend import (
    KeptState,
    KeyedStateBackend,
    PendingOperatorSnapshot,
    PendingSnapshot,
    SnapshotTarget,
)
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import ChannelState, FileHandle, OperatorSubtaskState, SegmentHandle
from holdfast.statebackends.layout import exclusive_prefix, shared_prefix
from holdfast.statebackends.local_recovery.copies import LocalCopies
from holdfast.statebackends.local_recovery.storage import KeepingStorage, held_paths
from holdfast.statebackends.secrets import hide_resolved
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.storage import resolve_folder
from holdfast.statebackends.storage.port import Flow, Storage

INFLIGHT_BYTES_MAX = 256 << 20
"""In-flight bytes that a checkpoint may hold, where nothing else is said."""

SAVEPOINT_KINDS = frozenset(kind for kind in CheckpointKind if kind.is_savepoint)

T = TypeVar("T")


class _StoreTime:
    """Time of one flow in operations of storage, s. Of the thread that drives the flow, then of the loop."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def measure(self, flow: Flow[T], clock: Clock) -> Flow[T]:
        """The same flow, measured: two readings of the clock an operation, or a group of them."""
        try:
            wanted = next(flow)
            while True:
                began = clock.seconds()
                try:
                    result = yield wanted
                except Exception as error:
                    self.seconds += clock.seconds() - began
                    wanted = flow.throw(error)
                else:
                    self.seconds += clock.seconds() - began
                    wanted = flow.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            flow.close()


class _OperatorPart(msgspec.Struct, frozen=True):
    """Result of one operator's synchronous part."""

    node: ChainNode
    keyed: PendingSnapshot | None
    lists: PendingOperatorSnapshot | None
    work: Flow[Any] | None
    external: tuple[str, ...]


class _RunningSnapshot(msgspec.Struct):
    """A checkpoint in its asynchronous part."""

    barrier: CheckpointBarrier
    parts: tuple[_OperatorPart, ...]
    alignment: AlignmentMetrics
    sync_duration_ms: float
    began_s: float
    counted: tuple[OperatorMetrics, ...]
    """Counters of the operators at the cut."""
    finished: bool
    states: dict[str, OperatorSubtaskState] | None = None
    """None: the state is not durable."""
    overtakes: bool = False
    """Its barrier has overtaken at the input."""
    channels: tuple[ChannelState, ...] | None = ()
    """In-flight data; None: it is not durable."""
    kept_folder: str | None = None
    """Folder of the checkpoint, if its files are also kept on this host."""
    is_on_own_thread: bool = False
    """It waits for a thread of an operator's own."""
    stores: list[_StoreTime] = msgspec.field(default_factory=list)
    """Of each flow that was begun."""
    has_ended: bool = False
    token: CancelToken = msgspec.field(default_factory=CancelToken)

    @property
    def checkpoint_id(self) -> int:
        return self.barrier.checkpoint_id


class _Work(NamedTuple):
    """A flow of a snapshot, and where it runs."""

    flow: Flow[Any]
    storage: Storage
    thread: CallThread | None = None
    """None: on the pool."""


class SubtaskCheckpointCoordinator:
    """Takes snapshots of one chain. Ids strictly increase: a lower or equal one is ignored (K12, K13)."""

    def __init__(
        self,
        key: SubtaskKey,
        attempt: int,
        chain: OperatorChain,
        *,
        pool: SubtaskPool,
        storage: Storage,
        clock: Clock,
        nonce: str,
        inline_threshold: int,
        pack_threshold: int = 0,
        report: Callable[[Answerable], None],
        copies: LocalCopies | None = None,
        keeper: SubtaskStateKeeper | None = None,
        edges: SubtaskEdges,
        inflight_bytes_max: int = INFLIGHT_BYTES_MAX,
    ) -> None:
        """`copies`: local copies of checkpoint files, on this host. `keeper`: keeps state for a rollback in place. `edges`: of the
        subtask. `inflight_bytes_max`: of what one checkpoint may hold in flight; one that needs more is declined."""
        self._edges = edges
        self._inflight_bytes_max = inflight_bytes_max
        self._copies = copies
        self._keeper = keeper
        self._key = key
        self._attempt = attempt
        self._chain = chain
        self._pool = pool
        self._storage = storage
        self._clock = clock
        self._nonce = nonce
        self._inline_threshold = inline_threshold
        self._pack_threshold = pack_threshold
        self._report = report
        self._newest_id = 0
        self._notified: tuple[int, int] | None = None  # newest checkpoint that it was told of, and how long after its trigger, ms
        self._aborted = AbortedIds()
        self._running: dict[int, _RunningSnapshot] = {}
        self._in_flight: dict[int, InFlight] = {}
        """Of checkpoints whose barriers may overtake, while they are collected."""
        self._preparing: list[tuple[int, Iterator[None]]] = []
        """(id, the rest of its synchronous part) of barriers whose hooks have not ended, in order."""

    @property
    def in_progress(self) -> tuple[int, ...]:
        """Ids in their asynchronous part."""
        return tuple(self._running)

    @property
    def newest_id(self) -> int:
        """Highest id that was performed, declined or found aborted here."""
        return self._newest_id

    # ------------------------------------------------------------------------------------------------------- barrier

    def admits(self, checkpoint_id: int) -> bool:
        """Claim an id for this subtask; False if it is old, repeated, or was aborted before its barrier (K01, K12, K13).

        For an id aborted before, the cancel marker is sent here, so that downstream subtasks don't wait for it."""
        if checkpoint_id <= self._newest_id:
            return False
        self._newest_id = checkpoint_id
        if self._aborted.take(checkpoint_id):
            self._chain.broadcast(CancelMarker(checkpoint_id))
            return False
        return True

    def perform(
        self,
        barrier: CheckpointBarrier,
        alignment: AlignmentMetrics,
        *,
        finished: bool = False,
        then: Callable[[], None] = lambda: None,
        held: Sequence[tuple[int, Element]] | None = None,
    ) -> None:
        """Run hooks, emit the barrier, take the synchronous part, then hand the rest to the pool (K06). An error fails the subtask
        (K07). `finished`: the input has ended, and not because the job stops. `then`: called behind the synchronous part.
        `held`: what is in hand, by channel, where the barrier overtook it; `collected` follows. None: it overtook nothing.

        Where a hook has not ended, `go_on` does the rest: no input may be taken before `is_preparing` is False."""
        if barrier.unaligned:
            self._in_flight[barrier.checkpoint_id] = InFlight(self._edges, held)
        self._preparing.append((barrier.checkpoint_id, self._perform(barrier, alignment, finished, then, held)))
        if len(self._preparing) == 1:
            self.go_on()

    @property
    def is_preparing(self) -> bool:
        """A barrier waits for a hook of an operator."""
        return bool(self._preparing)

    def go_on(self) -> bool:
        """Perform barriers that waited, as far as their hooks have ended; whether all are performed."""
        while self._preparing:
            current = self._preparing[0]
            for _ in current[1]:
                return False
            self._preparing.remove(current)
        return True

    def _perform(
        self,
        barrier: CheckpointBarrier,
        alignment: AlignmentMetrics,
        finished: bool,
        then: Callable[[], None],
        held: Sequence[tuple[int, Element]] | None,
    ) -> Iterator[None]:
        began = self._clock.seconds()
        chain = self._chain
        yield from chain.prepare_snapshot(barrier.checkpoint_id)
        # Those behind know by it that it has overtaken, and do not wait for its age.
        chain.broadcast(barrier if held is None else msgspec.structs.replace(barrier, aligned_timeout_ms=0))
        chain.sealed = True
        parts: list[_OperatorPart] = []
        try:
            for node in chain.nodes:
                parts.append(self._freeze(node, barrier))
            self._keep(barrier)
        except BaseException:
            _release(parts)
            raise
        finally:
            chain.sealed = False
        now = self._clock.seconds()
        counted = chain.metrics()  # as of the cut: no record was processed since
        sync_ms = max(0.0, (now - began) * 1000)
        running = _RunningSnapshot(barrier, tuple(parts), alignment, sync_ms, now, counted, finished)
        running.overtakes = held is not None
        running.channels = None if barrier.checkpoint_id in self._in_flight else ()
        self._running[barrier.checkpoint_id] = running
        self._store(running)
        self.outputs_moved()
        then()

    def _place(self, running: _RunningSnapshot) -> tuple[Storage, str]:
        """Where the files of a checkpoint go: storage, and folder in it."""
        barrier = running.barrier
        storage, folder = resolve_folder(barrier.folder, self._storage)
        if self._copies is not None and barrier.kind not in SAVEPOINT_KINDS:
            running.kept_folder = folder
            storage = KeepingStorage(storage, self._copies, barrier.checkpoint_id)
        return storage, folder

    def _store(self, running: _RunningSnapshot) -> None:
        """Queue the operators' own writes, storage by storage, then the state, which a savepoint keeps in a storage of its own."""
        storage, folder = self._place(running)
        works: list[_Work] = []
        for part in running.parts:
            if part.work is not None:
                operator = part.node.operator
                works.append(_Work(part.work, operator.snapshot_storage() or self._storage, operator.snapshot_thread()))
        works.append(_Work(self._state_flow(running, folder), storage))
        self._run_in_turn(running, works)

    def _run_in_turn(self, running: _RunningSnapshot, works: list[_Work]) -> None:
        """Run the flows one after the other; the result of the last is the states."""
        work, rest = works[0], works[1:]

        def done(result: Any, error: BaseException | None) -> None:
            running.is_on_own_thread = False
            if running.has_ended:
                return
            if rest and error is None and not running.token.cancelled:
                self._run_in_turn(running, rest)
            else:
                self._ended(running, None if rest else result, error)

        flow = self._measured(running, work.flow)
        if work.thread is None:
            self._pool.submit_flow(flow, work.storage, done, running.token)
        else:
            running.is_on_own_thread = True
            work.thread.run_flow(flow, work.storage, done)

    def _measured(self, running: _RunningSnapshot, flow: Flow[T]) -> Flow[T]:
        store = _StoreTime()
        running.stores.append(store)
        return store.measure(flow, self._clock)

    def _freeze(self, node: ChainNode, barrier: CheckpointBarrier) -> _OperatorPart:
        context, checkpoint_id = node.context, barrier.checkpoint_id
        node.operator.snapshot_state(checkpoint_id)
        if context.keyed_backend is not None and barrier.erasure is not msgspec.UNSET:
            _erase(node.uid, context.keyed_backend, barrier.erasure)
        keyed = None if context.keyed_backend is None else context.keyed_backend.snapshot(checkpoint_id)
        try:
            lists = None if context.operator_backend is None else context.operator_backend.snapshot(checkpoint_id)
            work = node.operator.snapshot_work(checkpoint_id)
            external = node.operator.external_files(checkpoint_id)
        except BaseException:
            if keyed is not None:
                keyed.release()
            raise
        return _OperatorPart(node, keyed, lists, work, external)

    def _keep(self, barrier: CheckpointBarrier) -> None:
        """Right behind the freeze: what is in memory of it, for a rollback in place."""
        if self._keeper is None or barrier.kind in SAVEPOINT_KINDS:
            return
        states: dict[str, KeptState] = {}
        for node in self._chain.nodes:
            keyed = node.context.keyed_backend
            if keyed is not None and (kept := keyed.keep()) is not None:
                states[node.uid] = kept
        self._keeper.froze(barrier.checkpoint_id, states)

    # ------------------------------------------------------------------------------------------- asynchronous part

    def _target(self, barrier: CheckpointBarrier, folder: str, index: int) -> SnapshotTarget:
        """For the operator with this index in the chain."""
        uid, subtask, attempt = self._chain.nodes[index].uid, self._key.subtask, self._attempt
        nonce = f"{self._nonce}{index}"
        is_savepoint = barrier.kind in SAVEPOINT_KINDS
        is_erased = _erases(barrier, uid)
        is_alone = is_savepoint or is_erased
        return SnapshotTarget(
            checkpoint_id=barrier.checkpoint_id,
            folder=folder,
            file_prefix=exclusive_prefix(uid, subtask, attempt) + nonce,
            canonical=(is_savepoint and not barrier.native) or is_erased,
            inline_threshold=self._inline_threshold,
            shared_prefix="" if is_alone else shared_prefix(barrier.checkpoint_id, uid, subtask, attempt) + nonce,
            pack_threshold=0 if is_alone else self._pack_threshold,
            base=barrier.base,
        )

    def _state_flow(self, running: _RunningSnapshot, folder: str) -> Flow[dict[str, OperatorSubtaskState]]:
        """Make every operator's state durable, in data order: keyed state, then lists."""
        states: dict[str, OperatorSubtaskState] = {}
        for index, part in enumerate(running.parts):
            uid = part.node.uid
            target = self._target(running.barrier, folder, index)
            is_savepoint = running.barrier.kind in SAVEPOINT_KINDS or _erases(running.barrier, uid)
            # Other tools read the tables of a savepoint, too: files, however small, never bytes within `_metadata`.
            tables = msgspec.structs.replace(target, inline_threshold=0) if is_savepoint else target
            keyed = () if part.keyed is None else (yield from part.keyed.flow(tables))
            lists = () if part.lists is None else (yield from part.lists.flow(target))
            states[uid] = OperatorSubtaskState(keyed=tuple(keyed), operator=tuple(lists), external=part.external)
        return states

    def _ended(
        self, running: _RunningSnapshot, states: dict[str, OperatorSubtaskState] | None, error: BaseException | None
    ) -> None:
        """The state's part on the pool has ended. An aborted checkpoint gets no answer (K03, K11)."""
        running.has_ended = True
        _release(running.parts)
        if running.token.cancelled:
            self._dropped(running)
        elif error is not None or states is None:
            self._failed(running, error)
        else:
            running.states = states
            self._acknowledge(running)

    def _dropped(self, running: _RunningSnapshot) -> None:
        """An aborted checkpoint has nothing under way any more but its in-flight data, which is given up at its next operation."""
        self._running.pop(running.checkpoint_id, None)
        self._in_flight.pop(running.checkpoint_id, None)
        for partition in self._chain.partitions():
            partition.forget(running.checkpoint_id)
        self._forget_copies(running.checkpoint_id)

    def _failed(self, running: _RunningSnapshot, error: BaseException | None) -> None:
        """A write failed: the checkpoint is declined, once."""
        running.token.cancel()
        if running.is_on_own_thread:
            self._ended(running, None, None)
        self._dropped(running)
        reason = FailureReason.ASYNC_EXCEPTION
        self._decline(running.checkpoint_id, reason, hide_resolved(f"{type(error).__name__}: {error}"))

    def _acknowledge(self, running: _RunningSnapshot) -> None:
        """Once state and in-flight data are durable."""
        states, channels = running.states, running.channels
        if states is None or channels is None:
            return
        self._running.pop(running.checkpoint_id, None)
        persisted = sum(channel.part.length for channel in channels)
        async_ms = max(0.0, (self._clock.seconds() - running.began_s) * 1000)
        stalled_s = sum(part.keyed.stalled_s for part in running.parts if part.keyed is not None)
        metrics = CheckpointMetrics(
            alignment_duration_ms=running.alignment.alignment_duration_ms,
            start_delay_ms=running.alignment.start_delay_ms,
            sync_duration_ms=running.sync_duration_ms,
            async_duration_ms=async_ms,
            bytes_processed_during_alignment=running.alignment.bytes_processed,
            checkpointed_size=sum(state.new_size for state in states.values()) + persisted,
            state_size=sum(state.size for state in states.values()) + persisted,
            operators=running.counted,
            bytes_persisted_during_alignment=persisted or msgspec.UNSET,
            unaligned=True if running.overtakes or persisted else msgspec.UNSET,
            store_duration_ms=min(async_ms, max(0.0, sum(store.seconds for store in running.stores) * 1000)),
            new_files=_count_files(states.values(), channels),
            notified_checkpoint=msgspec.UNSET if self._notified is None else self._notified[0],
            notified_after_ms=msgspec.UNSET if self._notified is None else self._notified[1],
            stalled_duration_ms=min(async_ms, stalled_s * 1000) if stalled_s > 0 else msgspec.UNSET,
        )
        if self._copies is not None and running.kept_folder is not None:
            self._copies.took(running.checkpoint_id, held_paths(states.values(), running.kept_folder, channels))
        if self._keeper is not None:
            self._keeper.acknowledged(running.checkpoint_id, states)
        key, number = self._key, running.checkpoint_id
        self._report(
            AcknowledgeCheckpoint(
                self._attempt, number, key.vertex, key.subtask, states, metrics, running.finished, channels or msgspec.UNSET
            )
        )

    # ------------------------------------------------------------------------------------------------- in-flight data

    @property
    def is_collecting(self) -> bool:
        """What is in flight of a checkpoint is not known yet: `outputs_moved` is to be called when something may have been sent."""
        return bool(self._in_flight)

    def collected(self, checkpoint_id: int, channels: Iterable[tuple[int, Elements]], alignment: AlignmentMetrics) -> None:
        """The last barrier has come: what was overtaken, by index of the channel in the gate, and how long that took."""
        in_flight = self._in_flight.get(checkpoint_id)
        if in_flight is not None:
            in_flight.take_inputs(channels)
            in_flight.alignment = alignment
            self._store_in_flight(checkpoint_id, in_flight)

    def outputs_moved(self, input_bytes: int = 0) -> int | None:
        """Take what barriers have overtaken in the outputs, of those that have left. `input_bytes`: what the gate refers to.

        Returns the id of a checkpoint that was declined since it holds too much."""
        for checkpoint_id, in_flight in list(self._in_flight.items()):
            if checkpoint_id not in self._running:
                continue
            if in_flight.size + input_bytes > self._inflight_bytes_max:
                self._refuse_size(checkpoint_id, in_flight.size + input_bytes)
                return checkpoint_id
            if not in_flight.awaits_outputs:
                continue
            logs = [partition.overtaken(checkpoint_id) for partition in self._chain.partitions()]
            known = [log for log in logs if log is not None]
            if len(known) == len(logs):
                in_flight.take_outputs(log for log in known if log.channels)
                for partition in self._chain.partitions():
                    partition.forget(checkpoint_id)
                self._store_in_flight(checkpoint_id, in_flight)
        return None

    def _refuse_size(self, checkpoint_id: int, size: int) -> None:
        message = f"{size} bytes are in flight at subtask {self._key.subtask}, of {self._inflight_bytes_max} that may be"
        self.abandon(checkpoint_id, FailureReason.IN_FLIGHT_LIMIT, message)

    def _store_in_flight(self, checkpoint_id: int, in_flight: InFlight) -> None:
        """Once all of it is known: one write."""
        running = self._running.get(checkpoint_id)
        if running is None or running.token.cancelled or not in_flight.is_complete:
            return
        del self._in_flight[checkpoint_id]
        running.alignment = in_flight.alignment or running.alignment
        if in_flight.size > self._inflight_bytes_max:
            self._refuse_size(checkpoint_id, in_flight.size)
            return
        if in_flight.is_empty:
            running.channels = ()
            self._acknowledge(running)
            return

        def done(channels: Any, error: BaseException | None) -> None:
            if running.token.cancelled:
                return
            if error is not None:
                self._failed(running, error)
                return
            running.channels = channels
            self._acknowledge(running)

        storage, folder = self._place(running)
        flow = self._measured(running, in_flight.flow(self._target(running.barrier, folder, 0)))
        self._pool.submit_flow(flow, storage, done, running.token)

    # --------------------------------------------------------------------------------------------------- dead ids

    def refuse(self, checkpoint_id: int, reason: FailureReason, message: str) -> None:
        """Decline: this subtask can't take part; downstream subtasks get the cancel marker (K05)."""
        if checkpoint_id <= self._newest_id:
            return
        self._newest_id = checkpoint_id
        self._chain.broadcast(CancelMarker(checkpoint_id))
        self._decline(checkpoint_id, reason, message)

    def abandon(self, checkpoint_id: int, reason: FailureReason | None, message: str) -> None:
        """Give up an id that the gate abandoned: cancel marker downstream, and a decline unless the coordinator knows already."""
        self._newest_id = max(self._newest_id, checkpoint_id)
        if not self._give_up(checkpoint_id):
            self._forget_preparing(checkpoint_id)
        self._chain.broadcast(CancelMarker(checkpoint_id))
        if reason is not None:
            self._decline(checkpoint_id, reason, message)

    def _give_up(self, checkpoint_id: int) -> bool:
        """Stop the asynchronous part of an id, and forget what was collected; whether there was one."""
        self._in_flight.pop(checkpoint_id, None)
        running = self._running.get(checkpoint_id)
        if running is None:
            return False
        for partition in self._chain.partitions():
            partition.forget(checkpoint_id)
        running.token.cancel()
        if running.states is not None:
            self._dropped(running)
        elif running.is_on_own_thread:  # a call that may never end holds no state
            self._ended(running, None, None)
        return True

    def abort(self, checkpoint_id: int, *, remember: bool) -> None:
        """ABORTED(id) is stored: stop its asynchronous part, and refuse its trigger if that is still to come (`remember`)."""
        if self._give_up(checkpoint_id):
            return
        if self._forget_preparing(checkpoint_id):
            self._chain.broadcast(CancelMarker(checkpoint_id))
            return
        self._forget_copies(checkpoint_id)
        if remember and checkpoint_id > self._newest_id:
            self._aborted.remember(checkpoint_id)

    def _forget_preparing(self, checkpoint_id: int) -> bool:
        """Drop a barrier that waits for a hook; whether there was one. What the hook emits goes to the next checkpoint."""
        found = [each for each in self._preparing if each[0] == checkpoint_id]
        for each in found:
            self._preparing.remove(each)
        return bool(found)

    # -------------------------------------------------------------------------------------------------------- copies

    def completed(self, checkpoint_id: int, timestamp_ms: int = 0) -> None:
        """COMPLETED(id) is stored: drop local copies that only older ones hold. `timestamp_ms`: of its trigger, 0 if not known."""
        if timestamp_ms > 0:
            self._notified = checkpoint_id, max(0, self._clock.wall_ms() - timestamp_ms)
        if self._copies is not None and self._copies.confirm(checkpoint_id):
            self._pool.submit(self._copies.sweep, _ignore)
        if self._keeper is not None:
            self._keeper.completed(checkpoint_id)

    def close(self) -> None:
        """Close when no snapshot runs or will run: local copies stay for the next restore."""
        for running in list(self._running.values()):  # of an operator's own thread, which nobody waits for
            running.has_ended = True
            _release(running.parts)
        self._running.clear()
        self._in_flight.clear()
        self._preparing.clear()
        if self._copies is not None:
            self._copies.close()

    def _forget_copies(self, checkpoint_id: int) -> None:
        if self._copies is not None and self._copies.forget(checkpoint_id):
            self._pool.submit(self._copies.sweep, _ignore)
        if self._keeper is not None:
            self._keeper.aborted(checkpoint_id)

    def _decline(self, checkpoint_id: int, reason: FailureReason, message: str) -> None:
        self._report(DeclineCheckpoint(self._attempt, checkpoint_id, self._key.vertex, self._key.subtask, reason, clip(message)))


def _erases(barrier: CheckpointBarrier, uid: str) -> bool:
    return barrier.erasure is not msgspec.UNSET and uid in barrier.erasure.uids


def _erase(uid: str, backend: KeyedStateBackend, erasure: Erasure) -> None:
    """A key that can't be one of the operator's is not in its state."""
    if uid not in erasure.uids:
        return
    try:
        key = KeyOf.parse(erasure.key, backend.key_type)
    except InvalidConfigError:
        return
    backend.erase(key, erasure.states_of(uid))


def _ignore(result: Any, error: BaseException | None) -> None:
    """Result of a sweep is ignored: a file that it could not delete is left to the next sweep, or to another worker's."""


def _count_files(states: Iterable[OperatorSubtaskState], channels: Iterable[ChannelState]) -> int:
    """Files that were written for a checkpoint; those of the base are placeholders."""
    parts = [part for state in states for keyed in state.keyed for part in keyed.parts]
    parts += [entry.part for state in states for entry in state.operator]
    parts += [channel.part for channel in channels]
    return len({part.path for part in parts if isinstance(part, FileHandle | SegmentHandle)})


def _release(parts: list[_OperatorPart] | tuple[_OperatorPart, ...]) -> None:
    for part in parts:
        if part.keyed is not None:
            part.keyed.release()
