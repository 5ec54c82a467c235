"""Doubles for tests of the coordinator: small graphs, and workers that speak the message records without any runtime."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.barriers.jobgraph import (
    JobConfig,
    JobEdge,
    JobGraph,
    JobVertex,
    OperatorDescription,
    Partitioning,
    RestartStrategy,
    Submission,
)
from holdfast.barriers.messages import (
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    Answerable,
    CancelTasks,
    CheckpointMetrics,
    Deploy,
    Deployment,
    FinishTasks,
    Heartbeat,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskKey,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.interface import CommandSubscription, Coordinator
from holdfast.coordinator.service import CoordinatorService
from holdfast.statebackends.errors import FencedError
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, OperatorListHandle, OperatorSubtaskState, StateMeta
from holdfast.statebackends.keygroups import assign_key_groups, operator_id
from holdfast.statebackends.storage.port import Storage

COUNTS = StateMeta("counts", "value", "int", "utf8")
OFFSETS = StateMeta("offsets", "operator_list", "bytes")
MAX_PARALLELISM = 128
WAIT_S = 10.0
"""Time in which the coordinator answers."""


def operator(uid: str, kind: str, *states: StateMeta, key_type: str | None = None) -> OperatorDescription:
    return OperatorDescription(uid, operator_id(uid), uid, kind, states=states, key_type=key_type)


def vertex(*operators: OperatorDescription, parallelism: int = 2, max_parallelism: int = MAX_PARALLELISM) -> JobVertex:
    return JobVertex(operators[0].operator_id, operators[0].name, parallelism, max_parallelism, operators)


def word_count(parallelism: int = 2, name: str = "word count", max_parallelism: int = MAX_PARALLELISM, **settings: Any) -> JobGraph:
    """source -> (hash) -> count."""
    source = vertex(operator("source", "source", OFFSETS), parallelism=parallelism, max_parallelism=max_parallelism)
    count = vertex(operator("count", "process", COUNTS, key_type="utf8"), parallelism=parallelism, max_parallelism=max_parallelism)
    edge = JobEdge(0, source.vertex_id, "source", count.vertex_id, 0, Partitioning.HASH, ("word",), "utf8")
    return JobGraph(name, (source, count), (edge,), JobConfig(**settings))


ARROW, PARQUET = b"ARROW1\0\0ARROW1", b"PAR1"
"""They begin and end as such files do."""


def stored_states(graph: JobGraph, key: SubtaskKey, *, savepoint: bool = False) -> dict[str, OperatorSubtaskState]:
    """What a task of the graph acknowledges: every declared state, inline, with nothing in it."""
    vertex = graph.vertex(key.vertex)
    groups = assign_key_groups(vertex.max_parallelism, vertex.parallelism, key.subtask)
    table, content = ("parquet", PARQUET) if savepoint else ("arrow", ARROW)
    states = {}
    for each in vertex.operators:
        lists = tuple(meta for meta in each.states if meta.kind.startswith("operator_"))
        tables = tuple(meta for meta in each.states if meta not in lists)
        keyed = KeyedStateHandle(groups, table, tables, (InlineHandle(content),) * len(tables))
        states[each.uid] = OperatorSubtaskState(
            keyed=(keyed,) if tables else (),
            operator=tuple(OperatorListHandle(meta, InlineHandle(b"\x90"), 0) for meta in lists),
        )
    return states


def submission(graph: JobGraph, **options: Any) -> Submission:
    return Submission(graph, **options)


NO_RESTARTS = RestartStrategy("none")


def leading(config: ServiceConfig, storage: Storage | None = None) -> CoordinatorService:
    """A coordinator that leads every job of its state directory."""
    service = CoordinatorService(config, storage)
    service.lead()
    wait_until(lambda: service.ready, lambda: None, timeout_s=30, what="the recovery of its jobs")
    return service


def wait_until(condition: Callable[[], bool], pump: Callable[[], None], *, timeout_s: float = 10.0, what: str = "") -> None:
    """Pump until the condition holds; fails with what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out waiting for {what or condition}")
        pump()


class FakeWorker:
    """One process in one slot: registers, follows its commands when pumped, remembers everything."""

    def __init__(
        self, service: Coordinator, job_id: str, slot: int, *, submission: int = 1, task_attempt: int = 0, nonce: str = ""
    ) -> None:
        self.service = service
        self.job_id = job_id
        self.slot = slot
        self.submission = submission
        self.task_attempt = task_attempt
        self.nonce = nonce or f"nonce-{submission}-{slot}-{task_attempt}"
        self.attempt = 0
        self.deployment: Deployment | None = None
        self.deployed: list[int] = []
        self.statuses: dict[SubtaskKey, SubtaskStatus] = {}
        self.completed: list[int] = []
        self.aborted: list[int] = []
        self.triggered: list[TriggerCheckpoint] = []
        self.answers: list[AckStatus] = []
        self.unanswered: tuple[Answerable, ...] = ()
        self.shutdown: str | None = None
        self.acknowledges = True
        self.positions = 0
        self.registered: Registered | None = None
        self.stream: CommandSubscription | None = None

    # -- protocol

    def registration(self) -> RegisterWorker:
        return RegisterWorker(
            job_id=self.job_id,
            slot=self.slot,
            submission=self.submission,
            task_attempt=self.task_attempt,
            nonce=self.nonce,
            pid=1000 + self.slot,
            host="localhost",
            data_address=f"tcp://localhost:{7000 + self.slot}",
            directory_nonce=self.service.directory_nonce,
            attempt=self.attempt,
            subtasks=tuple(self.statuses.values()),
            unanswered=self.unanswered,
        )

    def register(self) -> Registered:
        """Register and open the command stream."""
        registered = self.registered = self.service.register_async(self.registration()).result(WAIT_S)
        self.unanswered = ()
        self.answers.extend(registered.answers)
        if self.attempt and registered.attempt > self.attempt:
            self._follow(CancelTasks(registered.attempt - 1))
        if registered.deployment is not None:
            self._follow(Deploy(registered.deployment))
        elif registered.attempt == self.attempt and registered.newest_completed:
            self.completed.append(registered.newest_completed)
        if registered.finish:
            self._follow(FinishTasks(registered.attempt, registered.finish))
        self.stream = self.service.commands(self.job_id, self.slot, registered.session, 0)
        return registered

    def pump(self, timeout_s: float = 0.005) -> None:
        """Follow what has come."""
        if self.stream is None:
            return
        numbered = self.stream.get(timeout_s)
        while numbered is not None:
            assert numbered.command is not None
            self._follow(numbered.command)
            numbered = self.stream.get(0)

    def heartbeat(self) -> int:
        assert self.registered is not None
        return self.service.heartbeat_async(self.job_id, Heartbeat(self.slot, self.registered.session, self.attempt)).result(WAIT_S)

    def die(self) -> None:
        """kill -9: nothing more comes, the socket closes."""
        stream, self.stream = self.stream, None
        assert stream is not None
        stream.close()

    def report(self, state: TaskState, *, drained: bool = False, error: str = "") -> None:
        """All subtasks enter a state."""
        for key in self.statuses:
            self.statuses[key] = SubtaskStatus(self.attempt, key.vertex, key.subtask, state, drained, error)
        self._send(tuple(self.statuses.values()))

    def fail(self, error: str = "ValueError: boom") -> None:
        key = next(iter(self.statuses))
        self.statuses[key] = SubtaskStatus(self.attempt, key.vertex, key.subtask, TaskState.FAILED, error=error)
        self._send((self.statuses[key],))

    def acknowledge(self, checkpoint_id: int, attempt: int | None = None) -> tuple[AckStatus, ...]:
        savepoints = {trigger.checkpoint_id for trigger in self.triggered if trigger.kind.is_savepoint and not trigger.native}
        items = tuple(
            AcknowledgeCheckpoint(
                self.attempt if attempt is None else attempt,
                checkpoint_id,
                key.vertex,
                key.subtask,
                self._states(key, savepoint=checkpoint_id in savepoints),
                CheckpointMetrics(checkpointed_size=10, state_size=10),
            )
            for key in sorted(self.statuses)
        )
        assert self.registered is not None
        batch = AckBatch(self.registered.epoch, self.slot, self.registered.session, items)
        answers = self.service.acks_async(self.job_id, batch).result(WAIT_S).answers
        self.answers.extend(answers)
        return answers

    # -- inside

    def _send(self, statuses: tuple[SubtaskStatus, ...]) -> None:
        assert self.registered is not None
        batch = StatusBatch(self.registered.epoch, self.slot, self.registered.session, statuses)
        self.service.states_async(self.job_id, batch).result(WAIT_S)

    def _follow(self, command: WorkerCommand) -> None:
        match command:
            case Deploy(deployment=deployment):
                if deployment.attempt > self.attempt:
                    self._deploy(deployment)
            case CancelTasks(attempt=attempt):
                if self.attempt and self.attempt <= attempt and self.stream is not None:
                    with contextlib.suppress(FencedError):  # a zombie is told to cancel by a session that is over
                        self.report(TaskState.CANCELED)
            case TriggerCheckpoint():
                if command.attempt == self.attempt:
                    self.triggered.append(command)
                    if self.acknowledges:
                        with contextlib.suppress(FencedError):  # the attempt was fenced while the trigger was on its way
                            self.acknowledge(command.checkpoint_id)
            case NotifyCheckpointComplete():
                self.completed.append(command.checkpoint_id)
            case NotifyCheckpointAborted():
                self.aborted.append(command.checkpoint_id)
            case FinishTasks():
                if command.attempt == self.attempt:
                    self.report(TaskState.FINISHED)
            case ShutdownWorker():
                self.shutdown = command.reason

    def _deploy(self, deployment: Deployment) -> None:
        self.attempt = deployment.attempt
        self.deployment = deployment
        self.deployed.append(deployment.attempt)
        self.statuses = {
            SubtaskKey(subtask.vertex, subtask.subtask): SubtaskStatus(
                deployment.attempt, subtask.vertex, subtask.subtask, TaskState.RUNNING
            )
            for subtask in deployment.subtasks
        }
        self._send(tuple(self.statuses.values()))

    def _states(self, key: SubtaskKey, *, savepoint: bool = False) -> dict[str, OperatorSubtaskState]:
        assert self.deployment is not None
        states = stored_states(self.deployment.graph, key, savepoint=savepoint)
        if "source" in states:
            entries = [f"{key.subtask}:{position}".encode() for position in range(2)]
            part = InlineHandle(msgspec.msgpack.encode(entries))
            states["source"] = OperatorSubtaskState(operator=(OperatorListHandle(OFFSETS, part, len(entries)),))
        return states


class Crew:
    """Every worker of a job, pumped together."""

    def __init__(self, service: Coordinator, job_id: str, count: int, *, submission: int = 1) -> None:
        self.service = service
        self.job_id = job_id
        self.workers = [FakeWorker(service, job_id, slot, submission=submission) for slot in range(count)]

    def register(self) -> None:
        for worker in self.workers:
            worker.register()

    def pump(self) -> None:
        for worker in self.workers:
            worker.pump()

    def until(self, condition: Callable[[], bool], what: str = "", timeout_s: float = 10.0) -> None:
        wait_until(condition, self.pump, what=what, timeout_s=timeout_s)

    def until_state(self, state: str) -> None:
        self.until(lambda: self.service.job(self.job_id).overview.state == state, what=f"{state}")

    def until_completed(self, count: int) -> None:
        self.until(lambda: self.service.checkpoints(self.job_id).counts.completed >= count, what=f"{count} checkpoints")

    def replace(self, slot: int) -> FakeWorker:
        """The slot's process dies and Spark starts its successor."""
        older = self.workers[slot]
        older.die()
        self.workers[slot] = FakeWorker(
            self.service, self.job_id, slot, submission=older.submission, task_attempt=older.task_attempt + 1
        )
        return self.workers[slot]

    def report(self, state: TaskState, *, drained: bool = False) -> None:
        for worker in self.workers:
            worker.report(state, drained=drained)

    def states(self) -> Sequence[int]:
        return [worker.attempt for worker in self.workers]
