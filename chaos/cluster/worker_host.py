"""One simulated worker process: the real loop, session, pool work and operators, with ports of the simulated world.

A turn of the loop takes virtual time, more when an operator is slow. Production's threads (control thread, pool, watch) are series
of events of the same process."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from holdfast.barriers.elements import Batch
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    Answerable,
    Deployment,
    ShutdownWorker,
    SubtaskDeployment,
    SubtaskStatus,
    WorkerCommand,
)
from holdfast.chaos.checkers.observations import (
    AllocationMoved,
    ChannelEnded,
    DataEnded,
    Delivered,
    EmittedBehind,
    Forged,
    Observation,
    Remembered,
    Reported,
    SnapshotBegan,
    aborts_unread,
)
from holdfast.chaos.cluster.emitted import EmittedRows
from holdfast.chaos.cluster.forwarded import watch_watermarks
from holdfast.chaos.cluster.overtaking import watch_overtaking
from holdfast.chaos.pipelines.modules import running
from holdfast.chaos.pipelines.undeclared import Memory, changed, memory_of, memory_of_imports
from holdfast.chaos.sim.control import ControlNetwork, command_kind
from holdfast.chaos.sim.datanet import DataNetwork
from holdfast.chaos.sim.gateway import SimGateway
from holdfast.chaos.sim.injector import Injector
from holdfast.chaos.sim.kernel import Kernel, Process, ProcessClock
from holdfast.chaos.sim.pool import FlowPool
from holdfast.chaos.sim.stores import StoreClient
from holdfast.chaos.workloads.scenario import RowCost
from holdfast.operators.base import JobPlan, Operator, Poll
from holdfast.operators.functions.joins.interval import IntervalJoinOperator
from holdfast.operators.functions.process import KeyedFunctionOperator
from holdfast.operators.functions.windows.firing import FiringOperator
from holdfast.operators.task.pool import POOL_THREADS
from holdfast.operators.task.source_operator import SourceOperator
from holdfast.operators.task.subtask import Subtask
from holdfast.operators.worker.deploy import DeployedSubtask, SubtaskBuilder, WorkerPorts
from holdfast.operators.worker.loop import Worker
from holdfast.operators.worker.main import FLUSH_TIMEOUT_S, Watch, WorkerSpec, _directory_nonce, sweep_behind
from holdfast.operators.worker.session_events import WorkerIdentity
from holdfast.operators.worker.working_folders import WORKER_FOLDER, FolderSweep, OwnedFolder
from holdfast.statebackends.local_recovery.copies import LocalRecovery
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings

TURN_US = (500, 5_000)
"""Least and most time of one turn of the loop."""
SLICE_US = (100, 2_000)
"""Least and most time of one slice of a firing."""
WAIT_MIN_US = 100
HOLD_MS = 60_000
"""Until a source that is held is asked again, ms."""
WATCH_US = 500_000
FLUSH_LOOKS = 100

FIRING = (KeyedFunctionOperator, IntervalJoinOperator, FiringOperator)
"""Operators that emit in slices when a watermark arrives."""

_REPEATABLE: dict[str, Any] = {
    "background_compaction": False,
    "sorted_runs_max": 3,
    "write_behind_rows": 20,
    "write_buffers_bytes_max": 1 << 40,  # it would count the memory of other simulated workers
}
"""RocksDB compacts at every third checkpoint or so, and never by itself, so that a run is repeatable."""
BACKEND_SETTINGS = StateBackendSettings(memory_inline_bytes=2_048, rocksdb=RocksDBConfig(**_REPEATABLE))


def repeatable(config: RocksDBConfig) -> RocksDBConfig:
    """A job's own settings, which replace a worker's, except those under which a run would not be repeatable."""
    return msgspec.structs.replace(config, **_REPEATABLE)


@dataclass(frozen=True, slots=True)
class SimPorts:
    """Ports shared by all processes of a world."""

    kernel: Kernel
    injector: Injector
    control: ControlNetwork
    data: DataNetwork
    observe: Callable[[Observation], None]
    emitted: EmittedRows | None = None
    """Record of what each operator emits; None: no record."""
    row_costs: Mapping[str, RowCost] = field(default_factory=dict)
    """As of the scenario."""
    holds_sources: bool = False
    """No source gives a record, nor ends by itself."""
    living: set[str] = field(default_factory=set)
    """Names of the worker processes that run."""
    sees_processes: bool = False
    """Workers are on the coordinators' host."""
    sight: str = ""
    """Of all workers: see barriers/processes.py. Empty: none sees another one's end."""


Left = Callable[["WorkerHost", ShutdownWorker | None], None]
"""The process has ended by itself: by the command to leave, or (None) because its lease is over."""


class WorkerHost:
    """Runs one worker until it leaves, ends itself or is killed."""

    def __init__(
        self,
        ports: SimPorts,
        process: Process,
        spec: WorkerSpec,
        storage: StoreClient,
        nonce: str,
        left: Left,
        *,
        keeps_copies: bool = False,
    ) -> None:
        self.process = process
        self.spec = spec
        self.slot = spec.slot
        self._ports = ports
        self._kernel = ports.kernel
        self._left = left
        self.clock = ProcessClock(ports.kernel, process)
        self._random = ports.kernel.streams.of(f"worker/{process.name}")
        self._nonces = 0
        self.pool = FlowPool(ports.kernel, process, storage, ports.injector, threads=POOL_THREADS)
        self.transport = ports.data.open(process, spec.slot, self.wake)
        self.folder = self._open_folder(nonce)
        self._recovery = None
        if keeps_copies:
            self._recovery = LocalRecovery(
                spec.local_directory, job_id=spec.job_id, state_directory=spec.state_directory, storage=storage
            )
        builder = InstrumentedBuilder(spec.plan, self._worker_ports(storage, nonce), self)
        self.worker = Worker(spec.slot, self.transport, self.clock, builder, self._report)
        self.gateway = SimGateway(
            ports.kernel,
            process,
            ports.control,
            self._identity(storage, nonce),
            deliver=self._deliver,
            metrics=self.worker.metrics_of,
            frames_refused=lambda: self.worker.frames_refused,
            seed=self._random.getrandbits(32),
        )
        self._watch = Watch(spec, 0, self.worker, self.gateway, self.clock)  # type: ignore[arg-type]
        self._due_us: int | None = None
        self._busy_until_us = 0
        """End of the last turn: events meanwhile wait."""
        self._leaving = 0
        self._memories: dict[tuple[str, int], tuple[Operator, Memory]] = {}
        """(uid, identity of the operator) -> the user's function's memory when it was opened."""

    def _open_folder(self, nonce: str) -> OwnedFolder | None:
        """Open its folder on the disk of its host; None where runs have none. A process that was ordered into a slot has the number
        that another start may have, too; the nonce is its own."""
        spec = self.spec
        if not spec.local_directory:
            return None
        own = f"{'f' if nonce.startswith('o') else '0'}{int(nonce[1:], 16):015x}"
        folder = OwnedFolder(spec.local_directory, f"{spec.job_id}-{spec.slot}-{spec.task_attempt}-{own}")
        sweep_behind(self.pool, FolderSweep(spec.local_directory, WORKER_FOLDER))
        return folder

    def _worker_ports(self, storage: StoreClient, nonce: str) -> WorkerPorts:
        return WorkerPorts(
            job_id=self.spec.job_id,
            storage=storage,
            clock=self.clock,
            pool=self.pool,
            wake=self.wake,
            report=self._report,
            new_nonce=lambda: self._nonce(nonce),
            local_directory="" if self.folder is None else self.folder.path,
            backend_settings=BACKEND_SETTINGS,
            recovery=self._recovery,
        )

    @property
    def session(self) -> Any:
        return self.gateway.session

    @property
    def hears_commands(self) -> bool:
        return self.gateway.hears_commands

    def _identity(self, storage: StoreClient, nonce: str) -> WorkerIdentity:
        spec = self.spec
        seen = _directory_nonce(storage)
        address = self.transport.address
        numbers = (spec.job_id, spec.slot, spec.submission, spec.task_attempt)
        key, token = self.transport.key, spec.launch_token
        return WorkerIdentity(
            *numbers,
            nonce,
            1,
            "sim",
            address,
            seen,
            key,
            spawn=spec.spawn,
            launch_token=token,
            fingerprint=self.process.name,
            seat=spec.seat,
            seat_spawn=spec.seat_spawn,
            sight=self._ports.sight,
        )

    def _nonce(self, prefix: str) -> str:
        self._nonces += 1
        return f"{prefix}{self._nonces:02x}"

    def start(self) -> None:
        self.gateway.start()
        self._turn_after(0)
        self._kernel.after(WATCH_US, self._look, self.process)

    # ------------------------------------------------------------------------------------------------------------ loop

    def wake(self) -> None:
        """Schedule a turn of the loop."""
        self._turn_after(self._random.between(20, 300))

    def _turn_after(self, delay_us: int) -> None:
        now_us = self._kernel.now_us
        due_us = max(now_us + delay_us, self._busy_until_us)
        if self._due_us is not None and self._due_us <= due_us:
            return
        self._due_us = due_us
        self._kernel.after(due_us - now_us, lambda: self._turn(due_us), self.process)

    def _turn(self, due_us: int) -> None:
        if due_us != self._due_us:
            return  # an earlier one was scheduled meanwhile
        self._due_us = None
        if self._kernel.now_us < self._busy_until_us:
            self._turn_after(0)  # something in the last turn woke the loop, before it was known how long that turn takes
            return
        progress = self.worker.run_once()
        spent_us, self.clock.spent_us = self.clock.spent_us, 0
        self._busy_until_us = self._kernel.now_us + spent_us
        if self.worker.has_left:
            self._leave()
        elif progress:
            self._turn_after(spent_us + self._random.between(*TURN_US))
        else:
            self._turn_after(spent_us + max(WAIT_MIN_US, self.worker.prepare_wait() * 1000))

    def dispose(self) -> None:
        """Release real resources of its state (RocksDB's handles); the process is dead."""
        with running(self.process.modules):
            for uid, number in list(self._memories):
                self._look_back(uid, number)
        self.gateway.close()
        if self._recovery is not None:
            for copies in self._recovery._owned:  # the system releases a dead process's locks
                copies.close()
        if self.folder is not None:
            for each in self.subtasks():
                with running(self.process.modules):
                    each.subtask.chain.dispose()
            self.folder.close()

    def summary(self) -> str:
        """State of the session and of each subtask, as text."""
        states = ",".join(each.subtask.state.value.lower() for each in self.subtasks())
        return f"{self.session.state.value} a{self.session.attempt}: {states}"

    def subtasks(self) -> tuple[DeployedSubtask, ...]:
        """Subtasks that the loop runs now."""
        attempt = self.worker._attempt
        return attempt.subtasks if attempt is not None else ()

    def _leave(self) -> None:
        """Leave by command: reports are sent first, for a bounded time."""
        self._leaving += 1
        if not self.gateway.is_flushed and self._leaving < FLUSH_LOOKS:
            self._kernel.after(int(FLUSH_TIMEOUT_S * 1e6) // FLUSH_LOOKS, self._leave, self.process)
            return
        leaving = self.worker.leaving
        if self._recovery is not None and leaving is not None and leaving.job_over:
            self._recovery.end()
        if self.folder is not None:
            self.folder.delete()
        self._left(self, leaving)

    def _look(self) -> None:
        """Check the lease, as the watch thread."""
        if self._watch.verdict(self.clock.monotonic_ms()) is not None:
            self._left(self, None)
        else:
            self._kernel.after(WATCH_US, self._look, self.process)

    # ----------------------------------------------------------------------------------------------------------- ports

    def _deliver(self, command: WorkerCommand) -> None:
        kind = command_kind(command)
        self._ports.injector.point(f"worker.receive.{kind}", self.process)
        if not self.process.alive:
            return
        self._kernel.trace.add(self.process.name, f"takes {kind}", _describe(command))
        self._ports.observe(Delivered(self._kernel.now_ms, self.process.name, self.slot, command))
        self.worker.post(command)

    def _report(self, item: SubtaskStatus | Answerable) -> None:
        if not self.process.alive:
            return
        kind = (
            item.state.value.lower() if isinstance(item, SubtaskStatus) else type(item).__name__.removesuffix("Checkpoint").lower()
        )
        self._kernel.trace.add(self.process.name, f"reports {kind}", _describe(item))
        self._ports.observe(Reported(self._kernel.now_ms, self.process.name, self.slot, item))
        if not isinstance(item, AcknowledgeCheckpoint):
            self.gateway.report(item)
            return
        for each in self._ports.injector.acknowledgements(item, self.slot):
            if each is not item:
                self._kernel.trace.add(self.process.name, "forges ack", _describe(each))
                self._ports.observe(Forged(self._kernel.now_ms, self.process.name, self.slot, each, item))
            self.gateway.report(each)

    # ------------------------------------------------------------------------------------------------------- operators

    def instrument(self, deployed: DeployedSubtask) -> None:
        """Let faults hit the operators of a subtask: a wrapper on the instance replaces each method."""
        for node in deployed.subtask.chain.nodes:
            self._wrap(node.operator, node.context.uid)
            cost = self._ports.row_costs.get(node.context.uid)
            if cost is not None:
                self._slow_down(node.operator, cost.others_us if deployed.subtask.key.subtask else cost.first_us)
            if self._ports.holds_sources and isinstance(node.operator, SourceOperator):
                vars(node.operator)["poll"] = _nothing_yet
            if self._ports.emitted is not None:
                self._ports.emitted.watch(node.operator, node.context.uid)
            if self.process.modules is not None:
                self._remember(node.operator, node.context.uid)
        self._watch_head(deployed.subtask)
        watch_overtaking(deployed, partial(self._tell, deployed.subtask))
        watch_watermarks(deployed.subtask, partial(self._emitted_behind, deployed.subtask.key.subtask))

    def _tell(self, subtask: Subtask, kind: Callable[..., Observation], *fields: Any) -> None:
        """Observe a fact of one subtask."""
        if self.process.alive:
            key = subtask.key
            self._ports.observe(kind(self._kernel.now_ms, self.process.name, subtask.attempt, key.vertex, key.subtask, *fields))

    def _emitted_behind(self, subtask: int, uid: str, timestamp_ms: int, watermark_ms: int) -> None:
        if self.process.alive:
            at = (self._kernel.now_ms, self.process.name)
            self._ports.observe(EmittedBehind(*at, uid, subtask, timestamp_ms, watermark_ms))

    def _wrap(self, operator: Operator, uid: str) -> None:
        for method, what in (
            ("process_batch", "process"),
            ("initialize_state", "restore"),
            ("snapshot_state", "snapshot"),
            ("close", "close"),
        ):
            setattr(operator, method, self._hook(getattr(operator, method), f"worker.{what}.{uid}", uid))
        if isinstance(operator, FIRING):
            vars(operator)["process_watermark"] = self._in_slices(operator.process_watermark, f"worker.fire.{uid}", uid)
        if isinstance(operator, FiringOperator):  # what a barrier found due
            behind = self._in_slices(operator.process_processing_time, f"worker.fire.{uid}", uid)
            vars(operator)["process_processing_time"] = behind

    def _slow_down(self, operator: Operator, row_us: int) -> None:
        """Each row that it takes costs time."""
        original, clock = operator.process_batch, self.clock

        def process_batch(batch: Batch, *arguments: Any) -> Any:
            clock.spent_us += batch.num_rows * row_us
            return original(batch, *arguments)

        vars(operator)["process_batch"] = process_batch

    def _remember(self, operator: Operator, uid: str) -> None:
        """Record the memory of the user's function when it is opened, and at its end."""
        opened, closed = operator.open, operator.close

        def open_() -> None:
            opened()
            self._memories[uid, id(operator)] = (operator, self._memory(operator))

        def close() -> None:
            self._look_back(uid, id(operator))
            closed()

        vars(operator).update(open=open_, close=close)

    def _memory(self, operator: Operator) -> Memory:
        modules = self.process.modules
        return {} if modules is None else memory_of(operator, modules.imported, modules.names)

    def _look_back(self, uid: str, number: int) -> None:
        operator, before = self._memories.pop((uid, number), (None, {}))
        if operator is None:
            return
        after = self._memory(operator)
        modules = self.process.modules
        if modules is not None and modules.imported and after.keys() - before.keys():  # it may have imported since
            before = {**memory_of_imports(modules), **before}
        places = changed(before, after)
        if places:
            self._ports.observe(Remembered(self._kernel.now_ms, self.process.name, uid, tuple(places)))

    def _watch_head(self, subtask: Subtask) -> None:
        """Observe the head of a chain, which takes part in a checkpoint, and flushes, first."""
        head, key, attempt = subtask.chain.head.operator, subtask.key, subtask.attempt
        kernel, process, observe = self._kernel, self.process, self._ports.observe
        snapshot_state, finish = head.snapshot_state, head.finish

        def begin(checkpoint_id: int) -> None:
            if process.alive:
                unread = aborts_unread(subtask)
                where = (process.name, attempt, key.vertex, key.subtask)
                observe(SnapshotBegan(kernel.now_ms, *where, checkpoint_id, unread, _is_between_slices(subtask)))
            snapshot_state(checkpoint_id)

        def end() -> Iterator[None]:
            if process.alive:
                observe(DataEnded(kernel.now_ms, process.name, attempt, key.vertex, key.subtask))
            return finish()

        for name, watched in (("snapshot_state", begin), ("finish", end)):
            setattr(head, name, watched)
        if subtask._ports.inputs is not None:
            self._watch_channels(subtask._ports.inputs.gate)

    def _watch_channels(self, gate: Any) -> None:
        kernel, host, observe = self._kernel, self.process, self._ports.observe
        handler = gate._handler
        ended = handler._ended

        def end(channel: int, now_ms: int) -> Any:
            if host.alive:
                observe(ChannelEnded(kernel.now_ms, host.name, bool(handler.pending)))
            return ended(channel, now_ms)

        handler._ended = end
        processed = gate.processed

        def process(rows: int, *, rows_min: int = 0) -> None:
            before = [credit.allocated_bytes for credit in gate.credits]
            processed(rows, rows_min=rows_min)
            for was, credit in zip(before, gate.credits, strict=True):
                if was != credit.allocated_bytes and host.alive:
                    observe(AllocationMoved(kernel.now_ms, host.name, was, credit.allocated_bytes))

        gate.processed = process

    def _in_slices(self, original: Callable[[int], Iterator[None]], point: str, uid: str) -> Callable[[int], Iterator[None]]:
        """Each slice of a firing takes time, so that events may fall between two of them."""
        injector, process, clock, drawn = self._ports.injector, self.process, self.clock, self._random

        def slices(watermark_ms: int) -> Iterator[None]:
            firing = original(watermark_ms)  # at once: a barrier may be taken before the first slice

            def go_on() -> Iterator[None]:
                for _ in firing:
                    injector.point(point, process)
                    injector.operator(f"{uid}/firing", clock)
                    clock.spent_us += drawn.between(*SLICE_US)
                    yield

            return go_on()

        return slices

    def _hook(self, original: Callable[..., Any], point: str, uid: str) -> Callable[..., Any]:
        injector, process, clock = self._ports.injector, self.process, self.clock

        def call(*arguments: Any) -> Any:
            injector.point(point, process)
            injector.operator(uid, clock)
            return original(*arguments)

        return call


def _nothing_yet(rows_max: int, now_ms: int) -> Poll:
    """Of a source that is held."""
    return Poll(ready_at_ms=now_ms + HOLD_MS)


def _is_between_slices(subtask: Subtask) -> bool:
    """Whether work such as the firing of a watermark has begun and not ended."""
    work = subtask._input._work
    return bool(work) and isinstance(work[0], Generator) and inspect.getgeneratorstate(work[0]) == inspect.GEN_SUSPENDED


class InstrumentedBuilder(SubtaskBuilder):
    """Builds subtasks as in production, with faults on their operators."""

    def __init__(self, plan: bytes, ports: WorkerPorts, host: WorkerHost) -> None:
        super().__init__(plan, ports)
        self._host = host

    def _load(self, plan: bytes) -> JobPlan:
        modules = self._host.process.modules
        return super()._load(plan) if modules is None else modules.load(plan)

    def build(self, deployment: Deployment, wanted: SubtaskDeployment) -> DeployedSubtask:
        deployed = super().build(deployment, wanted)
        self._host.instrument(deployed)
        return deployed


LOCAL_PREFIX = "holdfast-sim-"
"""Of the real folder that is a run's local disks. Errors of RocksDB name it, and it has another name each time."""
_LOCAL = re.compile(rf"/\S*?/{LOCAL_PREFIX}[^/\s]+")


def _describe(item: Any) -> str:
    """The numbers of a message: attempt, id, subtask."""
    parts = []
    for name, short in (("attempt", "a"), ("checkpoint_id", "id"), ("vertex", ""), ("subtask", "/")):
        value = getattr(item, name, None)
        if value is not None:
            parts.append(f"{short}{value[:6] if isinstance(value, str) else value}")
    deployment = getattr(item, "deployment", None)
    if deployment is not None:
        parts.append(f"a{deployment.attempt} from {deployment.restored_checkpoint_id}")
    text = str(getattr(item, "error", "") or getattr(item, "reason", ""))
    return " ".join([*parts, _LOCAL.sub("<disk>", text)]) if text else " ".join(parts)
