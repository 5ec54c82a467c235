"""A whole job in one process, on one thread: real workers over a local network, a pool and a clock moved by hand.

The schedule is drawn from a seed: which worker runs a round, which piece of pool work performs its next operation, when time
passes.
`ScriptedCoordinator` is the least that a job needs: it deploys, triggers, completes and ends. No call blocks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    Answerable,
    CheckpointKind,
    DeclineCheckpoint,
    Deploy,
    Deployment,
    FinishTasks,
    InFlightRestore,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    SubtaskDeployment,
    SubtaskKey,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.barriers.transport.port import LocalNetwork, LocalTransport
from holdfast.coordinator.restore.in_flight import assign_in_flight
from holdfast.operators.base import JobPlan, UserCall
from holdfast.operators.task.calls import call_and_wait
from holdfast.operators.task.context import CallsInOrder, CancelToken, Done, FlowCancelledError
from holdfast.operators.worker.deploy import SubtaskBuilder, WorkerPorts
from holdfast.operators.worker.loop import Worker
from holdfast.operators.worker.main import pickle_plan
from holdfast.statebackends.handles import ChannelState, OperatorSubtaskState
from holdfast.statebackends.storage.port import Flow, Operation, Storage, one_by_one

States = dict[SubtaskKey, dict[str, OperatorSubtaskState]]


class VirtualClock:
    """Both clocks and the stopwatch; time passes by the cluster's calls, and a little at each read of the stopwatch."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_ms = 1_000_000
        self._tick_s = tick_s
        self._ticks = 0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def seconds(self) -> float:
        self._ticks += 1
        return self.now_ms / 1000 + self._ticks * self._tick_s


class KilledError(BaseException):
    """The process died between two operations of the store."""


@dataclass
class _Task:
    """Pool work: a call, or a flow that performs one operation a step."""

    work: Callable[[], Any] | None
    ended: Done
    flow: Flow[Any] | None = None
    storage: Storage | None = None
    token: CancelToken | None = None
    operation: Any = None


class StepPool:
    """Implements `context.Pool`: any waiting task may perform its next operation next."""

    def __init__(self, before_operation: Callable[[Operation], None] = lambda operation: None) -> None:
        self.tasks: list[_Task] = []
        self._before_operation = before_operation

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        self.tasks.append(_Task(work, ended))

    def run_call(self, call: UserCall, ended: Done) -> None:
        self.tasks.append(_Task(lambda: call_and_wait(call), ended))

    def open_thread(self, name: str) -> CallsInOrder:
        return CallsInOrder(self)

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        self.tasks.append(_Task(None, ended, one_by_one(flow), storage, token))

    def step(self, index: int) -> None:
        task = self.tasks[index]
        try:
            done, result = self._advance(task)
        except Exception as error:
            self.tasks.remove(task)
            task.ended(None, error)
            return
        if done:
            self.tasks.remove(task)
            task.ended(result, None)

    def _advance(self, task: _Task) -> tuple[bool, Any]:
        if task.flow is None:
            assert task.work is not None
            return True, task.work()
        assert task.storage is not None
        assert task.token is not None
        if task.token.cancelled:
            task.flow.close()
            raise FlowCancelledError("cancelled")
        try:
            if task.operation is None:
                task.operation = next(task.flow)
                return False, None
            self._before_operation(task.operation)
            try:
                result = task.storage.execute(task.operation)
            except Exception as error:
                task.operation = task.flow.throw(error)
            else:
                task.operation = task.flow.send(result)
        except StopIteration as stop:
            return True, stop.value
        return False, None


@dataclass
class Completed:
    """A completed checkpoint."""

    checkpoint_id: int
    folder: str
    states: States
    channels: tuple[ChannelState, ...] = ()


@dataclass
class _Pending:
    checkpoint_id: int
    kind: CheckpointKind
    folder: str
    drain: bool
    awaited: set[SubtaskKey]
    states: States = field(default_factory=dict)
    channels: list[ChannelState] = field(default_factory=list)


class ScriptedCoordinator:
    """One job, one checkpoint at a time. `completed` outlives a crash, as storage would."""

    def __init__(self, graph: JobGraph, job_id: str = "job") -> None:
        self.graph = graph
        self.job_id = job_id
        self.attempt = 0
        self.next_id = 1
        self.completed: list[Completed] = []
        self.statuses: dict[SubtaskKey, SubtaskStatus] = {}
        self.pending: _Pending | None = None
        self.declined: list[DeclineCheckpoint] = []
        self.stop_id = 0
        self.aligned_timeout_ms: int | None = None
        """Of checkpoints whose barriers may overtake; None: none may."""
        self.outbox: list[tuple[int, WorkerCommand]] = []

    @property
    def keys(self) -> list[SubtaskKey]:
        return [SubtaskKey(vertex.vertex_id, index) for vertex in self.graph.vertices for index in range(vertex.parallelism)]

    def broadcast(self, command: WorkerCommand) -> None:
        self.outbox += [(slot, command) for slot in range(self.graph.slots_required)]

    def deploy(self) -> None:
        """Start the next attempt from the newest completed checkpoint."""
        self.attempt += 1
        self.pending = None
        self.statuses.clear()
        self.outbox.clear()
        newest = self.completed[-1] if self.completed else None
        in_flight = assign_in_flight(newest.channels, msgspec.to_builtins(self.graph), self.graph) if newest else {}
        slots = self.graph.slots_required
        addresses = {slot: f"local://{slot}" for slot in range(slots)}
        for slot in range(slots):
            wanted = tuple(
                SubtaskDeployment(
                    key.vertex,
                    key.subtask,
                    newest.states.get(key, {}) if newest else {},
                    in_flight=in_flight.get(key, InFlightRestore()),
                )
                for key in self.keys
                if key.subtask == slot
            )
            deployment = Deployment(
                self.attempt,
                self.graph,
                wanted,
                addresses,
                newest.checkpoint_id if newest else 0,
                newest.folder if newest else "",
            )
            self.outbox.append((slot, Deploy(deployment)))

    @property
    def all_running(self) -> bool:
        return len(self.statuses) == len(self.keys) and all(status.state is TaskState.RUNNING for status in self.statuses.values())

    @property
    def all_drained(self) -> bool:
        return self.all_running and all(status.drained for status in self.statuses.values())

    @property
    def all_finished(self) -> bool:
        return len(self.statuses) == len(self.keys) and all(status.state is TaskState.FINISHED for status in self.statuses.values())

    @property
    def failure(self) -> str:
        return next((status.error for status in self.statuses.values() if status.state is TaskState.FAILED), "")

    def trigger(self, kind: CheckpointKind, now_ms: int, *, drain: bool = False, native: bool = False) -> None:
        assert self.pending is None
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        folder = f"{self.job_id}/chk-{checkpoint_id}"
        self.pending = _Pending(checkpoint_id, kind, folder, drain, set(self.keys))
        unaligned = self.aligned_timeout_ms is not None and kind is CheckpointKind.CHECKPOINT
        timeout_ms = self.aligned_timeout_ms if unaligned else None
        trigger = TriggerCheckpoint(self.attempt, checkpoint_id, now_ms, kind, folder, drain, None, native, unaligned, timeout_ms)
        self.broadcast(trigger)

    def receive(self, item: SubtaskStatus | Answerable) -> None:
        if item.attempt != self.attempt:
            return
        if isinstance(item, SubtaskStatus):
            self.statuses[SubtaskKey(item.vertex, item.subtask)] = item
            return
        pending = self.pending
        if pending is None or item.checkpoint_id != pending.checkpoint_id:
            return
        if isinstance(item, AcknowledgeCheckpoint):
            key = SubtaskKey(item.vertex, item.subtask)
            pending.awaited.discard(key)
            pending.states[key] = item.states
            pending.channels += item.in_flight
            if not pending.awaited:
                self._complete(pending)
        else:
            self.declined.append(item)
            self.pending = None
            self.broadcast(NotifyCheckpointAborted(self.attempt, item.checkpoint_id))

    def _complete(self, pending: _Pending) -> None:
        self.pending = None
        self.completed.append(Completed(pending.checkpoint_id, pending.folder, pending.states, tuple(pending.channels)))
        self.broadcast(NotifyCheckpointComplete(self.attempt, pending.checkpoint_id, 0))
        if pending.kind in (CheckpointKind.FINAL, CheckpointKind.STOP_SAVEPOINT):
            self.stop_id = pending.checkpoint_id
            self.broadcast(FinishTasks(self.attempt, pending.checkpoint_id))


class MiniCluster:
    """A job's workers. `crash` kills every process at once; `deploy` starts new ones from the newest checkpoint."""

    def __init__(
        self,
        plan: JobPlan,
        storage: Storage,
        *,
        local_directory: str,
        seed: int = 0,
        tick_s: float = 0.0,
        before_operation: Callable[[Operation], None] = lambda operation: None,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock(tick_s)
        self.storage = storage
        self.coordinator = ScriptedCoordinator(plan.graph)
        self._plan = pickle_plan(plan)
        self._local_directory = local_directory
        self._before_operation = before_operation
        self._nonces = 0
        self.reports: deque[SubtaskStatus | Answerable] = deque()
        self.workers: list[Worker] = []
        self.pool = StepPool()
        self.seen: list[SubtaskStatus | Answerable] = []
        self._start_processes()

    def _new_nonce(self) -> str:
        self._nonces += 1
        return f"n{self._nonces}"

    def _start_processes(self) -> None:
        network = LocalNetwork()
        self.pool = StepPool(self._before_operation)
        self.reports = deque()
        self.workers = []
        for slot in range(self.coordinator.graph.slots_required):
            transport = LocalTransport(network, slot)
            ports = WorkerPorts(
                job_id=self.coordinator.job_id,
                storage=self.storage,
                clock=self.clock,
                pool=self.pool,
                wake=transport.wake,
                report=self.reports.append,
                new_nonce=self._new_nonce,
                local_directory=self._local_directory,
            )
            self.workers.append(Worker(slot, transport, self.clock, SubtaskBuilder(self._plan, ports), self.reports.append))

    def deploy(self) -> None:
        self.coordinator.deploy()

    def crash(self) -> None:
        """Kill every process: what was not in storage is gone."""
        self._start_processes()

    # -------------------------------------------------------------------------------------------------------- schedule

    def step(self) -> bool:
        """Run one event of the schedule; False if it moved nothing."""
        choice = self.random.random()
        if self.coordinator.outbox and choice < 0.3:
            slot, command = self.coordinator.outbox.pop(0)
            self.workers[slot].post(command)
            return True
        if self.reports and choice < 0.5:
            item = self.reports.popleft()
            self.seen.append(item)
            self.coordinator.receive(item)
            return True
        if self.pool.tasks and choice < 0.75:
            self.pool.step(self.random.randrange(len(self.pool.tasks)))
            return True
        return self.random.choice(self.workers).run_once(0)

    def settle_once(self) -> bool:
        """Run one of everything that can move; False if nothing can."""
        moved = False
        while self.coordinator.outbox:
            slot, command = self.coordinator.outbox.pop(0)
            self.workers[slot].post(command)
            moved = True
        while self.reports:
            item = self.reports.popleft()
            self.seen.append(item)
            self.coordinator.receive(item)
            moved = True
        if self.pool.tasks:
            self.pool.step(self.random.randrange(len(self.pool.tasks)))
            moved = True
        for worker in self.workers:
            moved = worker.run_once(0) or moved
        return moved

    def run_until(self, condition: Callable[[], bool], steps_max: int = 200_000) -> None:
        """Follow the schedule until the condition holds. Fails when a subtask does, or when nothing can move any more."""
        for _ in range(steps_max):
            if condition():
                return
            if self.coordinator.failure:
                raise AssertionError(f"a subtask failed: {self.coordinator.failure}")
            if not self.step() and not self.settle_once():
                self._pass_time()
        raise AssertionError(f"not reached in {steps_max} steps: {self.coordinator.statuses}")

    def _pass_time(self) -> None:
        """Nothing can move: flush idle outputs, then let time pass to the next wakeup."""
        for worker in self.workers:
            worker.prepare_wait()
            worker.run_once()
        self.clock.now_ms += 1

    def run_to_end(self) -> None:
        """A bounded job: drain, final checkpoint, finish."""
        coordinator = self.coordinator
        self.run_until(lambda: coordinator.all_drained or coordinator.all_finished)
        if coordinator.all_finished:
            return
        if coordinator.pending is not None:
            self.run_until(lambda: coordinator.pending is None)
        coordinator.trigger(CheckpointKind.FINAL, self.clock.now_ms)
        self.run_until(lambda: coordinator.all_finished)
