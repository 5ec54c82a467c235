"""The workers of a job under test: the real loop, session, operators, gates and state backends, all in the caller's thread.

Whose turn it is next is drawn from the seed. A job is at rest when a round in which every worker had a turn has moved nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import xxhash

from holdfast.api.testing.clock import ManualClock
from holdfast.api.testing.coordinator import InlinePool, LocalCoordinator, WorkQueue
from holdfast.api.testing.gateway import LocalGateway
from holdfast.barriers.elements import Batch
from holdfast.barriers.exchange.frames import EncodedFrame, Frame, FrameEncoder
from holdfast.barriers.jobgraph import SubmissionAccepted
from holdfast.barriers.messages import (
    Answerable,
    Deployment,
    SubtaskDeployment,
    SubtaskKey,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
)
from holdfast.barriers.transport.admission import AttemptPeers
from holdfast.barriers.transport.port import LocalNetwork, LocalTransport
from holdfast.operators.base import JobPlan
from holdfast.operators.task.chain import ChainNode
from holdfast.operators.task.context import FailSubtask, SourceReady
from holdfast.operators.worker.deploy import DeployedSubtask, SubtaskBuilder, WorkerPorts
from holdfast.operators.worker.loop import Worker
from holdfast.operators.worker.session_events import WorkerIdentity
from holdfast.statebackends.errors import StillMovingError
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings
from holdfast.statebackends.storage.port import Storage

Bind = Callable[[JobPlan], None]
"""Gives the kit's own sources and sinks in a plan, as a worker has unpickled it, what the test sees of them."""

_SETTINGS = StateBackendSettings(rocksdb=RocksDBConfig(background_compaction=False))
"""RocksDB merges its tables at checkpoints alone: a seed gives the same run twice."""


_UNITS_MAX = 8
"""Batches in one turn of a subtask: others have theirs soon, and a source that never ends is seen before it fills the memory."""


_FAILURES_MAX = 1_000
"""In one call: a restart strategy without a pause may restart a job for ever, and each failure holds its traceback."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Work in which one call has to come to rest."""

    rounds_max: int
    rows_max: int
    """That sources read."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A subtask that FAILED."""

    text: str
    """`ErrorClass: message`."""
    error: BaseException | None
    """None: it could not even be built."""
    is_ordered: bool
    """By `LocalWorkers.fail`."""


class _Transport(LocalTransport):
    """Between workers, as between processes, batches travel encoded: what can't be pickled, or made anew from a pickle, fails here,
    too, and at the same end."""

    def __init__(self, network: LocalNetwork, slot: int) -> None:
        super().__init__(network, slot)
        self._own_slot = slot
        self._encoder = FrameEncoder()

    def start(self, peers: AttemptPeers) -> None:
        super().start(peers)
        self._encoder = FrameEncoder()

    def send(self, frame: Frame) -> None:
        slot = frame.target_slot
        if slot != self._own_slot and isinstance(frame.payload, Batch):
            self._hand_over(slot, EncodedFrame.of(self._encoder.encode(frame)))
        else:
            self._hand_over(slot, frame)


class _Builder(SubtaskBuilder):
    """Builds subtasks as ever, and remembers those of the newest attempt."""

    def __init__(self, plan: bytes, ports: WorkerPorts, bind: Bind) -> None:
        super().__init__(plan, ports)
        self._bind = bind
        self._attempt = 0
        self.deployed: dict[SubtaskKey, DeployedSubtask] = {}

    def _load(self, plan: bytes) -> JobPlan:
        loaded = super()._load(plan)
        self._bind(loaded)
        return loaded

    def build(self, deployment: Deployment, wanted: SubtaskDeployment) -> DeployedSubtask:
        if deployment.attempt != self._attempt:
            self._attempt = deployment.attempt
            self.deployed.clear()
        deployed = super().build(deployment, wanted)
        self.deployed[deployed.subtask.key] = deployed
        return deployed


@dataclass(frozen=True, slots=True)
class _LocalWorker:
    """One slot."""

    worker: Worker
    gateway: LocalGateway
    builder: _Builder

    def step(self) -> bool:
        moved = self.gateway.step()
        return self.worker.run_once(0) or moved

    def kill(self) -> None:
        """As kill -9. Only real resources of its state are released (RocksDB's handles)."""
        self.gateway.close()
        for each in self.builder.deployed.values():
            if not each.subtask.is_disposed:
                each.subtask.chain.dispose()


@dataclass
class LocalWorkers:
    """The workers of one job."""

    storage: Storage
    local_directory: str
    clock: ManualClock
    coordinator: LocalCoordinator
    random: random.Random
    limits: Limits
    bind: Bind
    seed: int = 0
    """Of the job: part of every nonce, so that jobs of two seeds have none in common."""
    rides_out_failures: bool = False
    """True: the job's restart strategy decides about failures, and `settle` goes on."""
    failures: list[Failure] = field(default_factory=list)
    """Since the caller last emptied it."""

    def __post_init__(self) -> None:
        self._workers: list[_LocalWorker] = []
        self._queue = WorkQueue(self.random)
        self._nonces = 0
        self._has_beaten = True
        self._ordered: BaseException | None = None

    # ------------------------------------------------------------------------------------------------------------ life

    def start(self, plan: bytes, accepted: SubmissionAccepted) -> None:
        """One worker in each slot. Its processes are all new."""
        network = LocalNetwork()
        self._workers = [self._new_worker(slot, plan, network, accepted) for slot in range(accepted.slots)]

    def _new_worker(self, slot: int, plan: bytes, network: LocalNetwork, accepted: SubmissionAccepted) -> _LocalWorker:
        transport = _Transport(network, slot)
        ports = WorkerPorts(
            job_id=accepted.job_id,
            storage=self.storage,
            clock=self.clock,
            pool=InlinePool(self._queue),
            wake=transport.wake,
            report=lambda item: self._reported(item, builder, gateway),
            new_nonce=self._new_nonce,
            local_directory=self.local_directory,
            backend_settings=_SETTINGS,
            proven_rows=1 << 40,
            units_max=_UNITS_MAX,
        )
        builder = _Builder(plan, ports, self.bind)
        worker = Worker(slot, transport, self.clock, builder, ports.report)
        identity = WorkerIdentity(
            accepted.job_id,
            slot,
            accepted.submission,
            task_attempt=0,
            nonce=self._new_nonce(),
            pid=0,
            host="test",
            data_address="",
            directory_nonce=accepted.directory_nonce,
        )
        gateway = LocalGateway(
            identity,
            self.coordinator.calls,
            self.clock,
            random.Random(self.random.getrandbits(32)),
            deliver=worker.post,
            metrics=lambda attempt: _metrics(builder, attempt),
        )
        return _LocalWorker(worker, gateway, builder)

    def _new_nonce(self) -> str:
        """Never drawn twice, by no other job either: what they stage is told apart by it."""
        self._nonces += 1
        return f"n{xxhash.xxh3_64_hexdigest(self.local_directory.encode())[:8]}x{self._nonces}"

    def _reported(self, item: SubtaskStatus | Answerable, builder: _Builder, gateway: LocalGateway) -> None:
        if isinstance(item, SubtaskStatus) and item.state is TaskState.FAILED:
            deployed = builder.deployed.get(SubtaskKey(item.vertex, item.subtask))
            error = deployed.subtask.failure if deployed is not None else None
            self.failures.append(Failure(item.error, error, error is not None and error is self._ordered))
            self._has_beaten = False
        gateway.report(item)

    def kill(self) -> None:
        """Every process dies at once: what was not in storage is gone."""
        for each in self._workers:
            each.kill()
        self._workers = []
        self._queue.clear()
        self.failures.clear()

    def fail(self, error: BaseException) -> None:
        """One subtask fails with this error."""
        self._ordered = error
        victim = min((each.subtask for each in self._deployed()), key=lambda subtask: subtask.key)
        victim.mailbox.put(FailSubtask(error))

    # ------------------------------------------------------------------------------------------------------------ time

    def settle(self) -> None:
        """Run until nothing moves, or until a subtask fails. Raises StillMovingError."""
        before, rounds, rows = self._rows_read(), 0, 0
        while rounds < self.limits.rounds_max and rows <= self.limits.rows_max and len(self.failures) < _FAILURES_MAX:
            if not self.rides_out_failures and any(not failure.is_ordered for failure in self.failures):
                return
            if not self._round() and not self._flush():
                return
            rounds, rows = rounds + 1, self._rows_read() - before
        moving, failures = self._moving(), len(self.failures)
        del self.failures[:-1]
        why = f"It has failed {failures:,} times" if failures >= _FAILURES_MAX else "Does a source never end?"
        raise StillMovingError(
            f"after {rounds:,} rounds and {rows:,} rows the job still moves: {', '.join(moving)}. {why}",
            rounds=rounds,
            rows=rows,
            moving=moving,
        )

    def _rows_read(self) -> int:
        """By the sources of the newest attempt."""
        heads = [each.subtask.chain.head for each in self._deployed() if each.subtask.reads_source]
        return sum(head.context.counters.records_out for head in heads)

    def _round(self) -> bool:
        """A turn of everybody; False if nothing moved."""
        moved = self.coordinator.step()
        while self._queue.step():
            moved = True
        order = self.random.sample(self._workers, len(self._workers)) if len(self._workers) > 1 else self._workers
        for each in order:
            moved = each.step() or moved
        return moved

    def _flush(self) -> bool:
        """Nothing moved: small batches need not wait for company, nor a restart for signs of life."""
        if not self._has_beaten:
            self._has_beaten = True
            self.beat()
        is_due = [each.worker.prepare_wait() == 0 for each in self._workers]
        return self._round() or any(is_due)

    def beat(self) -> None:
        """The coordinator hears from every worker, and of its counters."""
        for each in self._workers:
            each.gateway.beat()

    def next_due_ms(self, until_ms: int) -> int | None:
        """Wall clock, behind now and at most `until_ms`: when something is due. None: nothing is.

        A worker wakes 1 ms behind a timer, since its two clocks need not tick together; here they do."""
        now_ms = self.clock.wall_ms()
        times = [due for each in self._workers if (due := each.gateway.next_deadline_ms()) is not None]
        due = self.coordinator.next_deadline_ms()
        dues = [self.clock.wall_of(time) for time in (*times, *(() if due is None else (due,)))]
        for each in self._workers:
            wakeup_ms = each.worker.next_wakeup_ms()
            if wakeup_ms is not None:
                at_ms = self.clock.wall_of(wakeup_ms)
                dues.append(at_ms - 1 if at_ms - 1 > now_ms else at_ms)
        return min((due for due in dues if now_ms < due <= until_ms), default=None)

    def wake(self) -> None:
        """The clock was moved, or a feed has rows: every subtask looks."""
        for each in self._deployed():
            if each.subtask.state is TaskState.RUNNING:
                each.subtask.mailbox.put(SourceReady())

    # ---------------------------------------------------------------------------------------------------------- queries

    def _deployed(self) -> Iterator[DeployedSubtask]:
        for each in self._workers:
            yield from each.builder.deployed.values()

    def nodes(self, uid: str) -> list[ChainNode]:
        """An operator on all of its subtasks, in their order; empty when none runs."""
        found = [
            (each.subtask.key.subtask, node) for each in self._deployed() for node in each.subtask.chain.nodes if node.uid == uid
        ]
        return [node for _, node in sorted(found, key=lambda pair: pair[0])]

    def _moving(self) -> list[str]:
        moving = [
            f"{each.subtask.chain.head.uid}[{each.subtask.key.subtask}]"
            for each in self._deployed()
            if each.subtask.last_step.progress
        ]
        return sorted(moving) or ["coordinator"]


def _metrics(builder: _Builder, attempt: int) -> tuple[SubtaskMetrics, ...]:
    return tuple(each.subtask.metrics() for each in builder.deployed.values() if each.subtask.attempt == attempt)
