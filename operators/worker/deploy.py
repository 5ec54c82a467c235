"""From a deployment to subtasks that can run: operators, chain, channels, state. One attempt's wiring of one worker.

It decides nothing about when anything runs (loop.py) and builds each subtask from a fresh copy of the user's code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import cloudpickle

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import InputGate
from holdfast.barriers.alignment.handler import BarrierHandler
from holdfast.barriers.alignment.tracker import BarrierTracker
from holdfast.barriers.alignment.valve import MultiInputValve
from holdfast.barriers.elements import Batch, CheckpointBarrier, ElementEvent, LatencyMarker, may_overtake, overtakes_at_ms
from holdfast.barriers.exchange.channels import InputChannel, OutputGate, OutputSettings
from holdfast.barriers.exchange.credits import ReceiverCredit
from holdfast.barriers.exchange.debloat import ChannelBudget, DebloatSettings
from holdfast.barriers.exchange.frames import ChannelId
from holdfast.barriers.exchange.guarantee import AT_LEAST_ONCE, stays_aligned
from holdfast.barriers.exchange.partition import Combiner, EdgeTarget, KeySelector, Partitioner, partitioner_of
from holdfast.barriers.exchange.wiring import InputPlan, OutputPlan, derive_inputs, derive_outputs
from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex
from holdfast.barriers.messages import Deployment, SubtaskDeployment, SubtaskKey
from holdfast.operators.base import JobPlan, Operator
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator
from holdfast.operators.sources.split_source import SplitSource
from holdfast.operators.task.chain import ChainNode, OperatorChain
from holdfast.operators.task.context import Clock, Mailbox, Pool, RuntimeContext, SubtaskPool
from holdfast.operators.task.inflight import EdgeLog, SubtaskEdges
from holdfast.operators.task.input import GateInputs, never_delayed
from holdfast.operators.task.restore import StateLoader
from holdfast.operators.task.restored_channels import ChannelLoader
from holdfast.operators.task.rollback import StateKeeper
from holdfast.operators.task.snapshots import SubtaskCheckpointCoordinator
from holdfast.operators.task.source_operator import DEAD_LETTERS_TAG, SourceOperator
from holdfast.operators.task.subtask import UNITS_MAX, Report, Subtask, SubtaskPorts
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.local_recovery.copies import LocalCopies, LocalRecovery
from holdfast.statebackends.settings import StateBackendSettings
from holdfast.statebackends.storage.port import Storage


class EdgeOutput:
    """Implements `chain.ResultPort` over one output edge."""

    __slots__ = ("_clock", "gate")

    def __init__(self, gate: OutputGate, clock: Clock) -> None:
        self.gate = gate
        self._clock = clock

    def emit(self, batch: Batch) -> None:
        self.gate.emit(batch, now_ms=self._clock.monotonic_ms())

    def broadcast(self, event: ElementEvent) -> None:
        self.gate.broadcast_event(event)
        if isinstance(event, CheckpointBarrier) and may_overtake(event):
            now_ms = self._clock.monotonic_ms()
            due_ms = overtakes_at_ms(event, now_ms=now_ms, wall_ms=self._clock.wall_ms())
            self.gate.let_overtake(event.checkpoint_id, due_ms, now_ms=now_ms)

    def forward_marker(self, marker: LatencyMarker) -> None:
        self.gate.forward_marker(marker)

    def overtaken(self, checkpoint_id: int) -> EdgeLog | None:
        channels = self.gate.overtaken(checkpoint_id)
        return None if channels is None else EdgeLog(self.gate.edge_id, "output", channels)

    def forget(self, checkpoint_id: int) -> None:
        self.gate.forget(checkpoint_id)

    @property
    def is_available(self) -> bool:
        return self.gate.is_available

    @property
    def room_bytes(self) -> int:
        return self.gate.room_bytes

    @property
    def dealt_bytes_max(self) -> int:
        return self.gate.dealt_bytes_max

    @property
    def pending_bytes(self) -> int:
        return self.gate.pending_bytes

    @property
    def is_leaving(self) -> bool:
        return self.gate.is_leaving

    @property
    def bytes_out(self) -> int:
        return self.gate.bytes_out


@dataclass(frozen=True, slots=True, eq=False)
class DeployedSubtask:
    """A subtask with its channels."""

    subtask: Subtask
    gate: InputGate | None
    inputs: tuple[InputChannel, ...]
    """By index in the gate."""
    outputs: tuple[OutputGate, ...]


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """What all subtasks of a worker share."""

    job_id: str
    storage: Storage
    clock: Clock
    pool: Pool
    wake: Callable[[], None]
    """Ends the loop's wait; any thread."""
    report: Report
    new_nonce: Callable[[], str]
    local_directory: str
    """Of this process alone; working state that does not fit in memory goes below it."""
    backend_settings: StateBackendSettings = field(default_factory=StateBackendSettings)
    """Of the process; what a job says for itself takes the place of the same here."""
    recovery: LocalRecovery | None = None
    """Copies of stored files on this host; None: none are kept, and none are looked for."""
    proven_rows: int = 0
    """Rows that a slice may have before any was measured; more than 0 where the clock measures nothing."""
    units_max: int = UNITS_MAX
    """Units of work in one step of a subtask, whatever the clock says."""
    delayed_s: Callable[[], float] = never_delayed
    """Seconds that the loop's thread has waited for a CPU so far."""


class SubtaskBuilder:
    """Builds the subtasks of one worker from the job's plan as it travelled: pickled."""

    def __init__(self, plan: bytes, ports: WorkerPorts) -> None:
        self._plan = plan
        self._ports = ports
        self._keeper = StateKeeper(ports.pool)

    def begin(self, deployment: Deployment) -> None:
        """In front of the first `build` of a deployment: nothing of the one before runs any more."""
        self._keeper.deployed(deployment)

    def build(self, deployment: Deployment, wanted: SubtaskDeployment) -> DeployedSubtask:
        """Raises what unpickling user code raises, and GraphError when plan and graph disagree."""
        ports = self._ports
        graph = deployment.graph
        plan = self._load(self._plan)
        vertex = graph.vertex(wanted.vertex)
        mailbox = Mailbox(ports.wake)
        pool = SubtaskPool(ports.pool, mailbox)
        nonce = ports.new_nonce()
        nodes = self._nodes(plan, deployment, wanted, mailbox, pool, nonce)
        chain = OperatorChain(nodes, vertex.chain_edges, vertex.chain_side_outputs or {})
        _keep_times_by_split(chain)
        key = SubtaskKey(wanted.vertex, wanted.subtask)
        outputs = self._outputs(graph, plan, deployment.attempt, key, chain)
        copies = self._copies(graph.config, key, deployment.attempt, nonce)
        gate, inputs, gate_inputs = self._inputs(graph, deployment.attempt, key)
        if gate_inputs is not None:
            chain.head.context.valve = gate_inputs.valve
        checkpoints = self._checkpoints(deployment, key, chain, pool, nonce, copies)
        loader = StateLoader(
            chain,
            vertex,
            wanted,
            deployment,
            storage=ports.storage,
            local_directory=ports.local_directory,
            settings=ports.backend_settings,
            copies=copies,
            claims=self._keeper.claims(key, wanted.restore),
            channels=None if gate is None else ChannelLoader(wanted, deployment, _selectors(plan, vertex)),
            gate=gate,
        )
        subtask_ports = SubtaskPorts(
            chain, mailbox, pool, ports.clock, checkpoints, ports.report, gate_inputs, loader.load, loader.restored
        )
        subtask = Subtask(
            key,
            deployment.attempt,
            subtask_ports,
            step_budget_ms=graph.config.step_budget_ms,
            batch_rows_max=graph.config.batch_rows_max,
            proven_rows=ports.proven_rows,
            units_max=ports.units_max,
            latency_interval_ms=graph.config.latency_tracking_interval_ms,
            delayed_s=ports.delayed_s,
            begins_finished=wanted.finished,
        )
        return DeployedSubtask(subtask, gate, inputs, outputs)

    def _checkpoints(
        self,
        deployment: Deployment,
        key: SubtaskKey,
        chain: OperatorChain,
        pool: SubtaskPool,
        nonce: str,
        copies: LocalCopies | None,
    ) -> SubtaskCheckpointCoordinator:
        ports, graph = self._ports, deployment.graph
        return SubtaskCheckpointCoordinator(
            key,
            deployment.attempt,
            chain,
            pool=pool,
            storage=ports.storage,
            clock=ports.clock,
            nonce=nonce,
            inline_threshold=graph.config.inline_threshold,
            pack_threshold=graph.config.pack_threshold,
            report=ports.report,
            copies=copies,
            keeper=self._keeper.of(key, deployment.attempt) if graph.config.local_recovery else None,
            edges=SubtaskEdges(graph, key),
            inflight_bytes_max=graph.config.inflight_bytes_max,
        )

    def _nodes(
        self, plan: JobPlan, deployment: Deployment, wanted: SubtaskDeployment, mailbox: Mailbox, pool: SubtaskPool, nonce: str
    ) -> list[ChainNode]:
        """The operators of the subtask's vertex, each with what it is told of its surroundings."""
        ports, graph = self._ports, deployment.graph
        vertex = graph.vertex(wanted.vertex)
        return [
            ChainNode(
                _operator(plan, description.uid, restored=description.uid in wanted.restore),
                RuntimeContext(
                    job_id=ports.job_id,
                    job_name=graph.name,
                    uid=description.uid,
                    name=description.name,
                    subtask=wanted.subtask,
                    parallelism=vertex.parallelism,
                    max_parallelism=vertex.max_parallelism,
                    attempt=deployment.attempt,
                    nonce=nonce,
                    restored_checkpoint_id=deployment.restored_checkpoint_id,
                    restores_in_flight=deployment.restores_in_flight,
                    storage=ports.storage,
                    clock=ports.clock,
                    pool=pool,
                    mailbox=mailbox,
                    skipped_rows_max=graph.config.skipped_rows_max,
                    properties=description.properties,
                    auto_watermark_interval_ms=graph.config.auto_watermark_interval_ms,
                ),
            )
            for description in vertex.operators
        ]

    def _load(self, plan: bytes) -> JobPlan:
        """A fresh copy of the user's code."""
        return cast(JobPlan, cloudpickle.loads(plan))

    def _copies(self, config: JobConfig, key: SubtaskKey, attempt: int, nonce: str) -> LocalCopies | None:
        recovery = self._ports.recovery
        if recovery is None or not config.local_recovery:
            return None
        return recovery.copies(key.vertex, key.subtask, attempt, nonce, directory=config.local_recovery_directory)

    def _outputs(
        self, graph: JobGraph, plan: JobPlan, attempt: int, key: SubtaskKey, chain: OperatorChain
    ) -> tuple[OutputGate, ...]:
        settings = OutputSettings.of(graph.config)
        gates = []
        for output in derive_outputs(graph, key.vertex, key.subtask):
            gate = OutputGate(
                attempt=attempt,
                edge_id=output.edge.edge_id,
                producer=key.subtask,
                consumers=output.consumers,
                partitioner=_partitioner(plan, output, graph.vertex(output.edge.target), key.subtask),
                settings=settings,
                columns=plan.columns.get(output.edge.edge_id),
                overtakable=output.edge.overtakable,
                combiner=_combiner(plan, output, graph.vertex(output.edge.target)),
            )
            chain.node(output.edge.source_operator).attach(EdgeOutput(gate, self._ports.clock), output.edge.tag)
            gates.append(gate)
        return tuple(gates)

    def _inputs(
        self, graph: JobGraph, attempt: int, key: SubtaskKey
    ) -> tuple[InputGate | None, tuple[InputChannel, ...], GateInputs | None]:
        plan = derive_inputs(graph, key.vertex, key.subtask)
        if not plan:
            return None, (), None
        config = graph.config
        debloating = DebloatSettings.of(config)
        credits = [
            ReceiverCredit(
                allocated_bytes=config.channel_credit_bytes,
                allocated_batches=config.channel_credit_batches,
                budget=None if debloating is None else ChannelBudget(debloating),
            )
            for _ in plan
        ]
        overtakable = all(edge.overtakable for edge in graph.inputs(key.vertex))
        handler = _barrier_handler(graph, plan)
        gate = InputGate(handler, credits=credits, seconds=self._ports.clock.seconds, overtakable=overtakable)
        channels = tuple(InputChannel(each.channel, attempt=attempt) for each in plan)
        indexes = tuple(each.input_index for each in plan)
        return gate, channels, GateInputs(gate, MultiInputValve(indexes), indexes)


def _barrier_handler(graph: JobGraph, plan: tuple[InputPlan, ...]) -> BarrierHandler:
    """What decides when a subtask with these channels snapshots. Where all of them stay aligned, or there is one alone, both kinds
    of handlers would do the same."""
    edges = {edge.edge_id: edge for edge in graph.edges}
    aligned = frozenset(index for index, each in enumerate(plan) if stays_aligned(graph, edges[each.channel.edge]))
    if graph.config.checkpointing_mode != AT_LEAST_ONCE or len(aligned) == len(plan):
        return Aligner(len(plan))
    return BarrierTracker(len(plan), aligned=aligned)


def _operator(plan: JobPlan, uid: str, *, restored: bool) -> Operator:
    source = plan.sources.get(uid)
    if source is not None:
        operator = SourceOperator(source)
        operator.is_restored = restored
        operator.has_splits = isinstance(source, SplitSource)
        return operator
    template = plan.operators.get(uid)
    if template is None:
        raise GraphError(f"the plan has no operator {uid!r}, which the graph names", operator=uid)
    return template


def _keep_times_by_split(chain: OperatorChain) -> None:
    """Of a source with splits: the operator right behind it, if it gives event times. A strategy that was given with the source
    has its side outputs, too."""
    head, readers = chain.head.operator, chain.head.readers
    if not isinstance(head, SourceOperator) or not isinstance(head.source, SplitSource) or len(readers.get(None, ())) != 1:
        return
    (reader,) = readers[None]
    behind = reader.operator if isinstance(reader, ChainNode) else None
    if not isinstance(behind, TimestampsOperator):
        return
    if behind.keeps_splits:
        head.times = behind
    if DEAD_LETTERS_TAG not in readers:
        head.side_output = lambda: behind.output


def _partitioner(plan: JobPlan, output: OutputPlan, target: JobVertex, producer: int) -> Partitioner:
    edge, head = output.edge, target.operators[0].uid
    return partitioner_of(
        edge,
        EdgeTarget(head, target.parallelism, target.max_parallelism, producer, len(output.consumers)),
        selector=plan.selectors.get((head, edge.input_index)),
        function=plan.partitionings.get(edge.edge_id),
    )


def _selectors(plan: JobPlan, vertex: JobVertex) -> dict[int, KeySelector]:
    """Of the head, by input."""
    head = vertex.operators[0].uid
    return {index: selector for (uid, index), selector in plan.selectors.items() if uid == head}


def _combiner(plan: JobPlan, output: OutputPlan, target: JobVertex) -> Combiner | None:
    combining = plan.combinings.get(output.edge.edge_id)
    if combining is None:
        return None
    return combining.combiner(max_parallelism=target.max_parallelism, operator=target.operators[0].uid)


Route = tuple[DeployedSubtask, int]
"""A subtask, and the index of one of its channels in its gate."""


class Wiring:
    """Where a frame goes: channel -> subtask and gate index; (edge, producer) -> subtask and output."""

    def __init__(self, deployed: tuple[DeployedSubtask, ...]) -> None:
        self.inputs: dict[ChannelId, Route] = {}
        self.outputs: dict[tuple[int, int], tuple[DeployedSubtask, OutputGate]] = {}
        for each in deployed:
            for index, channel in enumerate(each.inputs):
                self.inputs[channel.channel] = (each, index)
            for output in each.outputs:
                self.outputs[(output.edge_id, output.producer)] = (each, output)
