"""Ports for tests of the task runtime: time and pool moved by hand, outputs that keep what they get, state in a list."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import InputGate
from holdfast.barriers.alignment.tracker import BarrierTracker
from holdfast.barriers.alignment.valve import MultiInputValve
from holdfast.barriers.elements import Batch, Element, ElementEvent, LatencyMarker
from holdfast.barriers.exchange.credits import ReceiverCredit
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, OperatorDescription, Partitioning
from holdfast.barriers.messages import Answerable, SubtaskKey, SubtaskStatus, TaskState
from holdfast.operators.base import Operator, Poll, UserCall
from holdfast.operators.task.chain import ChainNode, OperatorChain
from holdfast.operators.task.context import (
    CallsInOrder,
    CancelToken,
    Done,
    FlowCancelledError,
    Mailbox,
    RuntimeContext,
    SubtaskPool,
)
from holdfast.operators.task.inflight import EdgeLog, SubtaskEdges
from holdfast.operators.task.input import GateInputs
from holdfast.operators.task.snapshots import SubtaskCheckpointCoordinator
from holdfast.operators.task.source_operator import SourceOperator
from holdfast.operators.task.subtask import Subtask, SubtaskPorts
from holdfast.statebackends.backend import OperatorListState, SnapshotTarget
from holdfast.statebackends.handles import FileHandle, InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorListHandle, StateMeta
from holdfast.statebackends.local_recovery.copies import LocalCopies
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import Flow, WriteFile, one_by_one
from tests.operators.ports import DictStorage

KEY = SubtaskKey("v", 0)



def graph_of(channels: int) -> JobGraph:
    """One subtask of a vertex that reads all of another one."""
    operators = [OperatorDescription(uid, uid, uid, "test", (), None) for uid in ("up", "op0")]
    vertices = [
        JobVertex(name, name, parallelism, 128, (operator,), ())
        for name, parallelism, operator in zip("uv", (channels, 1), operators, strict=True)
    ]
    return JobGraph("job", tuple(vertices), (JobEdge(0, "u", "up", "v", 0, Partitioning.REBALANCE, overtakable=True),), JobConfig())


class ManualClock:
    """Time that a test moves; `tick_s` passes at each look at `seconds`, as if work took time."""

    def __init__(self, now_ms: int = 1_000, tick_s: float = 0.0) -> None:
        self.now_ms = now_ms
        self.tick_s = tick_s
        self._extra_s = 0.0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def seconds(self) -> float:
        self._extra_s += self.tick_s
        return self.now_ms / 1000 + self._extra_s


class ManualPool:
    """Work waits until `run` is called; a flow performs one operation per step."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self.calls: list[tuple[UserCall, Done]] = []

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        def call() -> None:
            try:
                result = work()
            except Exception as error:
                ended(None, error)
            else:
                ended(result, None)

        self.waiting.append(call)

    def run_call(self, call: UserCall, ended: Done) -> None:
        """Calls wait beside the work, in order; a test answers them in the order that it likes."""
        self.calls.append((call, ended))

    def run_flow(self, flow: Flow[Any], storage: Any, token: CancelToken, ended: Done) -> None:
        self.waiting.append(lambda: self._drive(one_by_one(flow), storage, token, ended))

    def open_thread(self, name: str) -> CallsInOrder:
        return CallsInOrder(self)

    @staticmethod
    def _drive(flow: Flow[Any], storage: Any, token: CancelToken, ended: Done) -> None:
        try:
            result: Any = None
            while True:
                if token.cancelled:
                    flow.close()
                    ended(None, FlowCancelledError("cancelled"))
                    return
                result = storage.execute(flow.send(result))
        except StopIteration as stop:
            ended(stop.value, None)
        except Exception as error:
            ended(None, error)

    def step(self) -> None:
        self.waiting.popleft()()

    def settle(self) -> None:
        while self.waiting:
            self.step()


class Port:
    """A result partition that keeps what it gets, rows one by one."""

    def __init__(self) -> None:
        self.elements: list[Any] = []
        self.is_available = True
        self.is_leaving = False
        self.bytes_out = 0
        self.pending_bytes = 0
        self.forgotten: list[int] = []
        self.queued: set[int] = set()
        """Ids whose barrier has not left."""
        self.overtook: tuple[tuple[int, tuple[Element, ...]], ...] = ()
        self.dealt_bytes_max = 0
        self.free_bytes = 2**62
        """Room while it is available."""

    @property
    def room_bytes(self) -> int:
        return self.free_bytes if self.is_available else 0

    def emit(self, batch: Batch) -> None:
        self.elements.extend(batch.rows())
        self.dealt_bytes_max += batch.size

    def broadcast(self, event: ElementEvent) -> None:
        self.elements.append(event)

    def forward_marker(self, marker: LatencyMarker) -> None:
        self.elements.append(marker)

    def overtaken(self, checkpoint_id: int) -> EdgeLog | None:
        return None if checkpoint_id in self.queued else EdgeLog(0, "output", self.overtook)

    def forget(self, checkpoint_id: int) -> None:
        self.forgotten.append(checkpoint_id)

    def take(self) -> list[Any]:
        taken, self.elements = self.elements, []
        return taken


class Lists:
    """OperatorStateBackend with lists in memory; its snapshot writes one file for each list."""

    def __init__(self) -> None:
        self.states: dict[str, OperatorListState] = {}

    def list_state(self, name: str) -> OperatorListState:
        return self.states.setdefault(name, OperatorListState(name))

    def restore(self, state: Any) -> None:
        for name, entries in state.lists.items():
            self.list_state(name).update(entries)

    def snapshot(self, checkpoint_id: int) -> PendingLists:
        return PendingLists({name: list(state.entries) for name, state in self.states.items()})


@dataclass
class PendingLists:
    entries: dict[str, list[bytes]]

    def flow(self, target: SnapshotTarget) -> Flow[tuple[OperatorListHandle, ...]]:
        handles = []
        for name, entries in sorted(self.entries.items()):
            data = b"\0".join(entries)
            yield WriteFile(f"{target.folder}/{target.file_prefix}-{name}", [data])
            handles.append(OperatorListHandle(StateMeta(name, "operator_list", "bytes"), InlineHandle(data), len(entries)))
        return tuple(handles)


class Keyed:
    """KeyedStateBackend as far as a snapshot goes; counts what is held."""

    key_groups = KeyGroupRange(0, 128)

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.frozen = 0
        self.inline_thresholds: list[int] = []
        self.disposed = 0
        self.uses_processing_time = False
        self.writes_behind = False

    def set_processing_time(self, now_ms: int) -> None:
        self.log.append(f"time {now_ms}")

    def snapshot(self, checkpoint_id: int) -> PendingKeyed:
        self.log.append(f"keyed {checkpoint_id}")
        self.frozen += 1
        return PendingKeyed(self)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None: ...

    def dispose(self) -> None:
        assert self.frozen == 0, "disposed of under a running snapshot"
        self.disposed += 1


@dataclass
class PendingKeyed:
    backend: Keyed
    stalled_s: float = 0.0

    def flow(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        self.backend.inline_thresholds.append(target.inline_threshold)
        yield WriteFile(f"{target.folder}/{target.file_prefix}-keyed", [b"k"])
        part = FileHandle(f"{target.file_prefix}-keyed", 1, checksum_of(b"k"))
        return (KeyedStateHandle(self.backend.key_groups, "arrow", (), (part,)),)

    def release(self) -> None:
        self.backend.frozen -= 1


class Recording(Operator):
    """Passes rows on and logs every call."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.fire: Callable[[int], Iterator[None]] | None = None
        self.pending = False
        self.raises: dict[str, Exception] = {}
        self.emits_before_snapshot: list[Any] = []

    def _note(self, what: str, *details: object) -> None:
        self.log.append(" ".join([self.name, what, *map(str, details)]))
        if what in self.raises:
            raise self.raises[what]

    def initialize_state(self) -> None:
        self._note("initialize")

    def open(self) -> None:
        self._note("open")

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self._note("process", *batch.rows())
        self.output.collect(batch)

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        self._note("watermark", watermark_ms)
        if self.fire is not None:
            yield from self.fire(watermark_ms)

    def finish(self) -> Iterator[None]:
        self._note("finish")
        yield

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._note("prepare", checkpoint_id)
        for row in self.emits_before_snapshot:
            self.output.collect(Batch(rows=[row]))

    def snapshot_state(self, checkpoint_id: int) -> None:
        self._note("snapshot", checkpoint_id)

    def snapshot_work(self, checkpoint_id: int) -> Flow[Any]:
        yield WriteFile(f"work/{self.name}-{checkpoint_id}", [b"w"])

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._note("complete", checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._note("aborted", checkpoint_id)

    def has_pending_work(self) -> bool:
        return self.pending

    def close(self) -> None:
        self._note("close")


class ListReader:
    """A source over a list; its position is one entry."""

    def __init__(self, rows: list[Any], rows_per_poll: int) -> None:
        self.rows = rows
        self.rows_per_poll = rows_per_poll
        self.position = 0

    def open(self, context: Any, entries: list[bytes] | None) -> None:
        self.position = int(entries[0]) if entries else 0

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        count = min(rows_max, self.rows_per_poll)
        rows = self.rows[self.position : self.position + count]
        self.position += len(rows)
        if not rows:
            return Poll(finished=True)
        return Poll(batch=Batch(rows=rows))

    def snapshot(self) -> list[bytes]:
        return [str(self.position).encode()]

    def external_files(self) -> tuple[str, ...]:
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class ListSource:
    rows: list[Any]
    rows_per_poll: int = 1
    name: str = "list"
    schema: Any = None

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> ListReader:
        return ListReader(self.rows, self.rows_per_poll)


@dataclass
class Bench:
    """One subtask with all its ports in reach."""

    operators: list[Operator]
    channels: int = 0
    """0: the head is a source."""
    inputs: tuple[int, ...] = ()
    clock: ManualClock = field(default_factory=ManualClock)
    storage: DictStorage = field(default_factory=DictStorage)
    pool: ManualPool = field(default_factory=ManualPool)
    port: Port = field(default_factory=Port)
    keyed: list[Keyed] = field(default_factory=list)
    reports: list[SubtaskStatus | Answerable] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    edges: tuple[tuple[str, str], ...] | None = None
    rows_max: int = 65_536
    copies: LocalCopies | None = None
    properties: dict[str, Any] = field(default_factory=dict)
    """Of the last operator."""
    latency_interval_ms: int = 0
    credits: tuple[ReceiverCredit, ...] = ()
    """Of the channels, one each; none: nothing bounds them."""
    inflight_bytes_max: int = 1 << 20
    barriers: ClassVar[type[Aligner | BarrierTracker]] = Aligner
    """What the gate does with barriers: holds channels up, or only counts them, as in a job at least once."""

    def __post_init__(self) -> None:
        self.mailbox = Mailbox()
        pool = SubtaskPool(self.pool, self.mailbox)
        nodes = []
        for index, operator in enumerate(self.operators):
            uid = f"op{index}"
            context = RuntimeContext(
                "job", uid, uid, 0, 1, 128, 1, "n", 0, self.storage, self.clock, pool, self.mailbox, operator_backend=Lists()
            )
            if not isinstance(operator, SourceOperator):
                self.keyed.append(Keyed(self.log))
                context.keyed_backend = self.keyed[-1]  # type: ignore[assignment]
            if index == len(self.operators) - 1:
                context.properties = self.properties
            nodes.append(ChainNode(operator, context))
        edges = self.edges if self.edges is not None else tuple((f"op{i}", f"op{i + 1}") for i in range(len(nodes) - 1))
        nodes[-1].attach(self.port)
        self.chain = OperatorChain(nodes, edges)
        self.snapshots = SubtaskCheckpointCoordinator(
            KEY,
            1,
            self.chain,
            pool=pool,
            storage=self.storage,
            clock=self.clock,
            nonce="n",
            inline_threshold=100,
            report=self.reports.append,
            copies=self.copies,
            edges=SubtaskEdges(graph_of(max(1, self.channels)), KEY),
            inflight_bytes_max=self.inflight_bytes_max,
        )
        inputs = None
        if self.channels:
            self.gate = InputGate(self.barriers(self.channels), credits=self.credits, seconds=self.clock.seconds, overtakable=True)
            indexes = self.inputs or (0,) * self.channels
            inputs = GateInputs(self.gate, MultiInputValve(indexes), indexes)
        ports = SubtaskPorts(self.chain, self.mailbox, pool, self.clock, self.snapshots, self.reports.append, inputs)
        self.subtask = Subtask(KEY, 1, ports, batch_rows_max=self.rows_max, latency_interval_ms=self.latency_interval_ms)

    def started(self) -> Bench:
        self.subtask.start()
        assert self.subtask.state is TaskState.RUNNING
        self.log.clear()
        self.reports.clear()
        return self

    def run(self, steps_max: int = 1_000) -> None:
        """Step until nothing moves; the pool does not run."""
        for _ in range(steps_max):
            if not self.subtask.step(self.clock.now_ms).progress:
                return
        raise AssertionError("the subtask does not come to rest")

    def settle(self) -> None:
        """Step and run the pool until nothing moves."""
        self.run()
        while self.pool.waiting:
            self.pool.settle()
            self.run()

    def rows(self, channel: int, *rows: Any) -> None:
        self.gate.offer(channel, Batch(rows=list(rows)), 64 * len(rows))

    def events(self, channel: int, *events: ElementEvent) -> None:
        for event in events:
            self.gate.offer(channel, event)

    def answers(self) -> list[Answerable]:
        return [item for item in self.reports if not isinstance(item, SubtaskStatus)]

    def states(self) -> list[TaskState]:
        return [item.state for item in self.reports if isinstance(item, SubtaskStatus)]
