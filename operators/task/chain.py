"""A chain of operators that share a subtask: a tree with direct calls, head first.

It decides the order of calls (data order, head to tail) and what a batch, a watermark and the end of data touch. It knows
nothing of gates, checkpoints in flight or the life of the subtask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from holdfast.barriers.elements import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    Batch,
    ElementEvent,
    LatencyMarker,
    Watermark,
    WatermarkStatus,
)
from holdfast.barriers.messages import OPERATORS_MAX, OperatorMetrics
from holdfast.barriers.watermark_alignment import alignment_of
from holdfast.operators.base import Operator
from holdfast.operators.task.context import RuntimeContext
from holdfast.operators.task.inflight import EdgeLog
from holdfast.operators.task.user_failures import task_failure
from holdfast.statebackends.backend import KeyedStateBackend
from holdfast.statebackends.errors import InvalidRowError, InvariantError


class ResultPort(Protocol):
    """One output edge of the subtask."""

    def emit(self, batch: Batch) -> None:
        """Partition and enqueue; may overshoot the high-water mark."""

    def broadcast(self, event: ElementEvent) -> None:
        """Flush what is buffered, then the event, to every channel."""

    def forward_marker(self, marker: LatencyMarker) -> None:
        """The marker to one channel, behind what is buffered for it."""

    @property
    def is_available(self) -> bool:
        """Every channel is below its high-water mark."""

    def overtaken(self, checkpoint_id: int) -> EdgeLog | None:
        """What the barrier of an id has overtaken here. None: it is queued, and may yet overtake."""

    def forget(self, checkpoint_id: int) -> None:
        """The barrier of an id overtakes nothing any more, and what it has overtaken is forgotten."""

    @property
    def room_bytes(self) -> int:
        """What the fullest channel may get before it is at its mark; 0 where one is."""

    @property
    def dealt_bytes_max(self) -> int:
        """Bytes that one channel got, at most, since the attempt began."""

    @property
    def pending_bytes(self) -> int:
        """What waits here to be sent."""

    @property
    def is_leaving(self) -> bool:
        """Something of what waits here leaves with the next frames; the rest needs credit of a consumer, or that it begins."""

    @property
    def bytes_out(self) -> int: ...


class ChainNode:
    """One operator, its context, and where its outputs go: records of the main and of each side output, events to all."""

    __slots__ = (
        "children", "context", "idle", "operator", "own_idle", "own_watermark_ms", "partitions", "readers", "watermark_ms",
    )

    def __init__(self, operator: Operator, context: RuntimeContext) -> None:
        self.operator = operator
        self.context = context
        self.children: list[ChainNode] = []
        """Operators behind this one in the chain, of whatever output."""
        self.partitions: list[ResultPort] = []
        """Output edges, of whatever output."""
        self.readers: dict[str | None, list[ChainNode | ResultPort]] = {}
        """Tag of an output, None for the main one -> who takes its records."""
        self.own_watermark_ms: int | None = None
        self.own_idle = False
        """It goes idle behind that watermark."""
        self.watermark_ms = MIN_WATERMARK
        """The last one that it has passed on."""
        self.idle = False
        """The last status that it has passed on."""

    def attach(self, partition: ResultPort, tag: str | None = None) -> None:
        """An output edge, fed by the main output or by a side output."""
        self.partitions.append(partition)
        self.readers.setdefault(tag, []).append(partition)

    def chain(self, child: ChainNode, tag: str | None = None) -> None:
        """An operator that is called directly, with the records of the main output or of a side output."""
        self.children.append(child)
        self.readers.setdefault(tag, []).append(child)

    @property
    def uid(self) -> str:
        return self.context.uid


class _Branch:
    """Who takes the records of one output: direct calls to the operators behind it, and the partitions that it feeds."""

    __slots__ = ("_children", "_is_shared", "_partitions", "_uid")

    def __init__(self, node: ChainNode, tag: str | None) -> None:
        readers = node.readers.get(tag, [])
        self._uid = node.uid
        """Of the operator whose output it is."""
        nodes = [reader for reader in readers if isinstance(reader, ChainNode)]
        self._children = tuple((child.context.counters, child.operator.process_batch, child.uid) for child in nodes)
        self._partitions = tuple(reader.emit for reader in readers if not isinstance(reader, ChainNode))
        self._is_shared = len(readers) > 1 or len(node.readers) > 1
        """Somebody else may have the same rows: an operator may emit one to several of its outputs."""

    def send(self, batch: Batch, count: int) -> None:
        for counters, process, uid in self._children:
            counters.records_in += count
            own = self._own(batch) if self._is_shared else batch
            try:
                process(own, 0)
            except InvalidRowError as error:
                raise _of_operator(error, uid) from error.__cause__
        for emit in self._partitions:
            emit(self._own(batch) if self._is_shared else batch)

    def _own(self, batch: Batch) -> Batch:
        try:
            return batch.unshared()
        except InvalidRowError as error:
            raise _of_operator(error, self._uid) from error.__cause__


def _of_operator(error: InvalidRowError, uid: str) -> InvalidRowError:
    """The error of a row that an operator could not read, or that could not be copied for those behind it: it knows no operator."""
    if error.operator is not None:
        return error
    return InvalidRowError.of(f"operator {uid!r}: {error.message}", {**error.fields, "operator": uid, "frames": ""})


class ChainOutput:
    """Outputs of one operator: the main one, and side outputs by their tags."""

    __slots__ = ("_chain", "_counters", "_node", "_send", "_sides")

    def __init__(self, chain: OperatorChain, node: ChainNode) -> None:
        self._chain = chain
        self._node = node
        self._counters = node.context.counters
        self._send = _Branch(node, None).send
        self._sides = {tag: _Branch(node, tag).send for tag in node.readers if tag is not None}

    def collect(self, batch: Batch) -> None:
        self._collect(batch, self._send)

    def collect_side(self, tag: str, batch: Batch) -> None:
        send = self._sides.get(tag)
        if send is not None:
            self._collect(batch, send)

    def _collect(self, batch: Batch, send: Callable[[Batch, int], None]) -> None:
        count = batch.num_rows
        if count == 0:
            return
        if self._chain.sealed:
            raise InvariantError(f"operator {self._node.uid} emits between the barrier and the end of the synchronous snapshot")
        self._counters.records_out += count
        send(batch, count)

    def has_readers(self, tag: str) -> bool:
        return tag in self._sides

    def emit_watermark(self, timestamp_ms: int) -> None:
        node = self._node
        if node.own_watermark_ms is None or timestamp_ms > node.own_watermark_ms:
            node.own_watermark_ms = timestamp_ms
        self._chain.has_own_watermarks = True

    def emit_watermark_now(self, timestamp_ms: int) -> None:
        node = self._node
        waiting_ms, node.own_watermark_ms = node.own_watermark_ms, None
        highest_ms = timestamp_ms if waiting_ms is None else max(timestamp_ms, waiting_ms)
        for _ in self._chain._forward(node, highest_ms):
            pass

    def emit_status(self, *, idle: bool) -> None:
        node = self._node
        if idle and node.own_watermark_ms is not None:
            node.own_idle = True
            return
        node.own_idle = False
        self._chain.pass_status(node, idle=idle)


class OperatorChain:
    """The operators of one subtask. `nodes` are in data order; `nodes[0]` is the head."""

    def __init__(
        self, nodes: Sequence[ChainNode], edges: Sequence[tuple[str, str]] = (), tags: Mapping[str, str] | None = None
    ) -> None:
        """`edges`: (uid, uid of the one behind it). `tags`: uid of one that a side output feeds -> its tag."""
        by_uid = {node.uid: node for node in nodes}
        if len(by_uid) != len(nodes) or not nodes:
            raise InvariantError(f"a chain needs operators with distinct uids, got {[node.uid for node in nodes]}")
        for source, target in edges:
            by_uid[source].chain(by_uid[target], tags.get(target) if tags else None)
        self.nodes = tuple(nodes)
        self.head = nodes[0]
        self.has_own_watermarks = False
        self.keeps_maximum = False
        """The maximum watermark is not for those behind this chain."""
        self.sealed = False
        """True between the barrier and the end of the synchronous snapshot: nothing may be emitted (K06)."""
        self._opened: list[ChainNode] = []
        self._timed: tuple[RuntimeContext, ...] = ()
        self._behind: tuple[KeyedStateBackend, ...] = ()
        self._timer_nodes = tuple(node for node in nodes if overrides(node.operator, "next_processing_time_ms"))
        self._silence_nodes: tuple[ChainNode, ...] = ()
        alignments = ((alignment_of(node.uid, node.context.properties), node) for node in nodes)
        self.aligned = tuple((alignment.group, node) for alignment, node in alignments if alignment is not None)
        """(watermark group, operator) of those that are in one."""

    def node(self, uid: str) -> ChainNode:
        return next(node for node in self.nodes if node.uid == uid)

    def metrics(self) -> tuple[OperatorMetrics, ...]:
        """Counters of each operator, now."""
        return tuple(node.context.counters.metrics(node.uid) for node in self.nodes[:OPERATORS_MAX])

    @property
    def output_watermark_ms(self) -> int:
        """The least watermark that the last operators have passed on."""
        return min(node.watermark_ms for node in self._last())

    @property
    def is_idle(self) -> bool:
        """Whether all that the last operators have passed on last is that they are idle."""
        return all(node.idle for node in self._last())

    def _last(self) -> list[ChainNode]:
        """Those behind which the chain ends, or has an output edge."""
        return [node for node in self.nodes if node.partitions or not node.children]

    def partitions(self) -> tuple[ResultPort, ...]:
        return tuple(partition for node in self.nodes for partition in node.partitions)

    # ---------------------------------------------------------------------------------------------------------- life

    def setup(self) -> None:
        """Give each operator its context and output; partitions are attached by now."""
        for node in self.nodes:
            node.operator.setup(node.context, ChainOutput(self, node))

    def open(self) -> None:
        """State of every operator first, head to tail; then open, tail to head, so that nobody emits into a closed one."""
        contexts = [node.context for node in self.nodes]
        self._timed = tuple(c for c in contexts if c.keyed_backend is not None and c.keyed_backend.uses_processing_time)
        backends = [context.keyed_backend for context in contexts]
        self._behind = tuple(backend for backend in backends if backend is not None and backend.writes_behind)
        self.set_processing_time()
        for node in self.nodes:
            node.operator.initialize_state()
        for node in reversed(self.nodes):
            self._opened.append(node)
            node.operator.open()
        self._timer_nodes = tuple(node for node in self._timer_nodes if node.operator.uses_processing_time)
        self._silence_nodes = tuple(node for node in self.nodes if node.operator.watches_silence)

    def close(self) -> list[BaseException]:
        """Close every operator that `open` was called on, head to tail, whatever happens; the errors it met."""
        errors: list[BaseException] = []
        for node in self.nodes:
            node.context.closed = True
        for node in reversed(self._opened):
            try:
                node.operator.close()
            except BaseException as error:
                errors.append(task_failure(error))
        self._opened.clear()
        return errors

    # ---------------------------------------------------------------------------------------------------------- data

    def set_processing_time(self) -> None:
        """Set the processing time of states with a TTL, before each unit of work."""
        for context in self._timed:
            context.keyed_state.set_processing_time(context.now_ms())

    def process(self, batch: Batch, input_index: int) -> None:
        self.head.context.counters.records_in += batch.num_rows
        try:
            self.head.operator.process_batch(batch, input_index)
        except InvalidRowError as error:
            raise _of_operator(error, self.head.uid) from error.__cause__

    def end_input(self, input_index: int) -> Iterator[None]:
        """One of several inputs of the head has ended."""
        return self.head.operator.end_input(input_index)

    def advance_watermark(self, timestamp_ms: int) -> Iterator[None]:
        """Apply a watermark of the head's inputs: each operator fires what is due, then the next one; partitions last.

        The head is told at once, the firing is the iterator's."""
        return self._advance(self.head, timestamp_ms)

    def own_watermarks(self) -> Iterator[None]:
        """Pass on the watermarks that operators emitted themselves, upstream ones first."""
        while self.has_own_watermarks:
            self.has_own_watermarks = False
            for node in self.nodes:
                if node.own_watermark_ms is not None:
                    timestamp_ms, node.own_watermark_ms = node.own_watermark_ms, None
                    idle, node.own_idle = node.own_idle, False
                    yield from self._forward(node, timestamp_ms)
                    if idle:
                        self.pass_status(node, idle=True)

    def process_status(self, *, idle: bool) -> None:
        """The head's inputs went idle, or came back."""
        if self.head.operator.forwards_statuses:
            self.pass_status(self.head, idle=idle)

    def pass_status(self, node: ChainNode, *, idle: bool) -> None:
        """A status to those behind an operator, once per change. Who has watermarks of its own has a status of its own."""
        if node.idle == idle:
            return
        node.idle = idle
        for child in node.children:
            if child.operator.forwards_statuses:
                self.pass_status(child, idle=idle)
        for partition in node.partitions:
            partition.broadcast(WatermarkStatus(idle))

    def _advance(self, node: ChainNode, timestamp_ms: int) -> Iterator[None]:
        return self._fire(node, timestamp_ms, node.operator.process_watermark(timestamp_ms))

    def _fire(self, node: ChainNode, timestamp_ms: int, slices: Iterator[None]) -> Iterator[None]:
        yield from slices
        if timestamp_ms == MAX_WATERMARK:
            node.own_watermark_ms, node.own_idle = None, False
            yield from self._forward(node, timestamp_ms)
        elif node.operator.forwards_watermarks:
            yield from self._forward(node, timestamp_ms)

    def _forward(self, node: ChainNode, timestamp_ms: int) -> Iterator[None]:
        node.watermark_ms = timestamp_ms
        if node.idle:  # an idle channel's watermarks would be dropped
            self.pass_status(node, idle=False)
        for child in node.children:
            yield from self._advance(child, timestamp_ms)
        if timestamp_ms == MAX_WATERMARK and self.keeps_maximum:
            return  # each reader comes to it by itself, when all of its channels have ended
        for partition in node.partitions:
            partition.broadcast(Watermark(timestamp_ms))

    def finish(self) -> Iterator[None]:
        """Flush what is buffered, head to tail, after the end of data."""
        for node in self.nodes:
            yield from node.operator.finish()
            yield from self.own_watermarks()

    def broadcast(self, event: ElementEvent) -> None:
        """An event to every channel of every partition."""
        for node in self.nodes:
            for partition in node.partitions:
                partition.broadcast(event)

    def forward_marker(self, marker: LatencyMarker) -> None:
        """A latency marker to one channel of every partition."""
        for node in self.nodes:
            for partition in node.partitions:
                partition.forward_marker(marker)

    # --------------------------------------------------------------------------------------------- processing time

    def next_processing_time_ms(self) -> int | None:
        """Wall-clock time of the earliest processing-time timer of any operator."""
        if not self._timer_nodes:
            return None
        earliest: int | None = None
        for node in self._timer_nodes:  # asked around every unit of work
            time_ms = node.operator.next_processing_time_ms()
            if time_ms is not None and (earliest is None or time_ms < earliest):
                earliest = time_ms
        return earliest

    def fire_processing_time_timers(self, wall_ms: int) -> Iterator[None]:
        for node in self._timer_nodes:
            due = node.operator.next_processing_time_ms()
            if due is not None and due <= wall_ms:
                yield from node.operator.process_processing_time(wall_ms)

    # ------------------------------------------------------------------------------------------------------- silence

    @property
    def watches_silence(self) -> bool:
        """Whether an operator has something to say in silence."""
        return bool(self._silence_nodes)

    def next_silence_ms(self) -> int | None:
        """Reading time at which an operator has something to say if nothing is read before."""
        times = [node.operator.next_silence_ms() for node in self._silence_nodes]
        return min([time_ms for time_ms in times if time_ms is not None], default=None)

    def process_silence(self, reading_ms: int) -> bool:
        """Nothing was read up to this reading time. Whether an operator had something due."""
        due = False
        for node in self._silence_nodes:
            time_ms = node.operator.next_silence_ms()
            if time_ms is not None and time_ms <= reading_ms:
                due = True
                node.operator.process_silence(reading_ms)
        return due

    # --------------------------------------------------------------------------------------------------- checkpoints

    def prepare_snapshot(self, checkpoint_id: int) -> Iterator[None]:
        """Pre-barrier hooks, head to tail. It yields where one has not ended yet: what is behind it comes later."""
        for node in self.nodes:
            node.operator.prepare_snapshot(checkpoint_id)
            while node.operator.is_preparing():
                yield

    def notify_complete(self, checkpoint_id: int) -> None:
        for node in self.nodes:
            if node.context.keyed_backend is not None:
                node.context.keyed_backend.notify_checkpoint_complete(checkpoint_id)
            node.operator.notify_checkpoint_complete(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        for node in self.nodes:
            if node.context.keyed_backend is not None:
                node.context.keyed_backend.notify_checkpoint_aborted(checkpoint_id)
            node.operator.notify_checkpoint_aborted(checkpoint_id)

    def has_pending_work(self) -> bool:
        return any(node.operator.has_pending_work() for node in self.nodes)

    def write_behind(self) -> bool:
        """Nothing else is to be done: one keyed backend writes a little of what changed. Whether there may be more."""
        return any(backend.write_behind() for backend in self._behind)

    def dispose(self) -> list[BaseException]:
        """Release the keyed backends; the errors it met."""
        errors: list[BaseException] = []
        for node in self.nodes:
            backend, node.context.keyed_backend = node.context.keyed_backend, None
            self._timed = self._behind = ()
            try:
                if backend is not None:
                    backend.dispose()
            except BaseException as error:
                errors.append(task_failure(error))
        return errors


def overrides(operator: Operator, method: str) -> bool:
    return getattr(type(operator), method) is not getattr(Operator, method)
