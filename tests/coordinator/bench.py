"""Drives the checkpoint coordinator by hand: tasks A and B, a clock, and storage whose answers can be held back or spoilt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    AckStatus,
    CheckpointKind,
    DeclineCheckpoint,
    FailureReason,
    SubtaskKey,
    TaskState,
)
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.actions import Action
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.checkpoints.events import Event
from holdfast.statebackends.handles import FileHandle, InlineHandle, OperatorListHandle, OperatorSubtaskState, StateMeta
from holdfast.statebackends.keygroups import operator_id

JOB = "0123456789abcdef0123456789abcdef"
A, B = SubtaskKey("A", 0), SubtaskKey("B", 0)
NEVER = 10**15

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., None])


ENTRIES = StateMeta("s", "operator_list", "bytes")


def path(name: str, task: SubtaskKey = A, attempt: int = 1) -> str:
    """Of a file that a task writes into the folder of a checkpoint."""
    return f"op-{task.subtask}-{attempt}-n0-{name}"


def state(name: str, task: SubtaskKey = A, attempt: int = 1) -> dict[str, OperatorSubtaskState]:
    """State of a task: in one file of that name, or inline."""
    part = FileHandle(path(name, task, attempt), 10, "xxh3_128:" + "0" * 32) if name else InlineHandle(b"\x91\xc4\x00")
    return {"op": OperatorSubtaskState(operator=(OperatorListHandle(ENTRIES, part, 1),))}


def graph_of(tasks: Iterable[SubtaskKey], config: JobConfig, states: tuple[StateMeta, ...] = (ENTRIES,)) -> JobGraph:
    """One vertex with the keyed operator `op` for each name of a task."""
    parallelism: dict[str, int] = {}
    for task in tasks:
        parallelism[task.vertex] = max(parallelism.get(task.vertex, 1), task.subtask + 1)
    operator = OperatorDescription("op", operator_id("op"), "op", "process", states, "utf8")
    vertices = (JobVertex(name, name, count, max(8, count), (operator,)) for name, count in sorted(parallelism.items()))
    return JobGraph("bench", tuple(vertices), (), config)


def needs_several(test: Test) -> Test:
    """Mark a test that has several checkpoints pending, or compares with triggers that may not overtake."""
    test.needs_several = True  # type: ignore[attr-defined]
    return test


class Bench:
    """Writes succeed at once unless their kind is in `held`: then `actions` has them and the test answers."""

    mode: ClassVar[Mapping[str, Any]] = {}
    """Settings of the job that a test leaves as they are."""

    def __init__(self, *, tasks: Iterable[SubtaskKey] = (A, B), running: bool = True, next_id: int = 1, **settings: Any) -> None:
        completed: Iterable[CompletedCheckpoint] = settings.pop("completed", ())
        settings = {**self.mode, **settings}
        one_at_once = settings.get("min_pause_ms") or settings.get("unaligned_checkpoints")
        settings.setdefault("max_concurrent_checkpoints", 1 if one_at_once else 1000)
        states = settings.pop("states", (ENTRIES,))
        first = settings.pop("first_checkpoint_id", 1)
        erasure: int = settings.pop("newest_erasure", 0)
        self.config = JobConfig(**settings)
        self.tasks = tuple(tasks)
        graph = graph_of(self.tasks, self.config, states)
        self.stateless = not states
        store = CompletedCheckpointStore(self.config.retained_checkpoints, completed, first_checkpoint_id=first)
        self.machine = CheckpointCoordinator(
            JOB, graph, rng=random.Random(7), completed=store, next_checkpoint_id=next_id, newest_erasure=erasure
        )
        self.now = 0
        self.held: set[type[Any]] = set()
        self.actions: list[Action] = []
        self.attempt = 1
        self.handle(events.AttemptStarted(1, frozenset(self.tasks)))
        if running:
            self.run_tasks()

    # -- events

    def handle(self, event: Event) -> list[Action]:
        """Handle an event, answer the writes that are not held, and return every action of the whole reaction."""
        seen: list[Action] = []
        queue: list[Event] = [event]
        while queue:
            for action in self.machine.handle(queue.pop(0), now_ms=self.now, wall_ms=1_000_000 + self.now):
                seen.append(action)
                answer = None if type(action) in self.held else self._answer(action)
                if answer is not None:
                    queue.append(answer)
        self.actions.extend(seen)
        return seen

    @staticmethod
    def _answer(action: Action) -> Event | None:
        match action:
            case actions.WriteClaim():
                return events.ClaimWritten(action.checkpoint_id)
            case actions.WriteMetadata():
                return events.MetadataWritten(action.checkpoint_id)
            case actions.WriteAborted():
                return events.AbortWritten(action.checkpoint_id)
            case actions.DropCheckpoint():
                return events.CheckpointDropped(action.checkpoint_id)
            case _:
                return None

    def run_tasks(self, *tasks: SubtaskKey, state: TaskState = TaskState.RUNNING) -> list[Action]:
        chosen = tasks or self.tasks
        return self.handle(events.TaskStatesChanged(self.attempt, tuple((task, state) for task in chosen)))

    def request(self, kind: CheckpointKind = CheckpointKind.CHECKPOINT, name: str = "user", **options: Any) -> list[Action]:
        savepoint = kind in (CheckpointKind.SAVEPOINT, CheckpointKind.STOP_SAVEPOINT)
        folder = f"/savepoints/savepoint-{name}" if savepoint else None
        return self.handle(events.CheckpointRequested(CheckpointRequest(kind, name, folder=folder, **options)))

    def trigger(self) -> list[Action]:
        """As the periodic timer does it."""
        return self.handle(events.CheckpointRequested(CheckpointRequest(periodic=True)))

    def ack(
        self, task: SubtaskKey, number: int, name: str = "", attempt: int | None = None, *, finished: bool = False
    ) -> list[Action]:
        attempt = self.attempt if attempt is None else attempt
        states = {"op": OperatorSubtaskState()} if self.stateless else state(name, task, attempt)
        ack = AcknowledgeCheckpoint(attempt, number, task.vertex, task.subtask, states, finished=finished)
        return self.handle(events.AcksReceived((ack,), task.subtask))

    def ack_all(self, number: int) -> list[Action]:
        return [action for task in self.tasks for action in self.ack(task, number)]

    def decline(self, task: SubtaskKey, number: int, reason: FailureReason = FailureReason.DECLINED) -> list[Action]:
        decline = DeclineCheckpoint(self.attempt, number, task.vertex, task.subtask, reason)
        return self.handle(events.AcksReceived((decline,), task.subtask))

    def start_scheduler(self) -> list[Action]:
        return self.handle(events.SchedulerStarted())

    def advance(self, to_ms: int) -> list[Action]:
        """Let time pass, deadline by deadline."""
        seen: list[Action] = []
        while (deadline := self.machine.next_deadline_ms()) is not None and deadline <= to_ms:
            self.now = max(self.now, deadline)
            seen += self.handle(events.DeadlineReached())
        self.now = to_ms
        return seen

    def restart(self, attempt: int) -> None:
        self.attempt = attempt
        self.handle(events.AttemptStarted(attempt, frozenset(self.tasks)))
        self.run_tasks()

    # -- what is known

    @property
    def pending(self) -> list[int]:
        return [pending.checkpoint_id for pending in self.machine.pending]

    @property
    def completed(self) -> list[int]:
        return [entry.checkpoint_id for entry in self.machine.retained]

    def all(self, kind: type[T]) -> list[T]:
        return of(self.actions, kind)

    @property
    def done(self) -> list[int]:
        return [action.checkpoint_id for action in self.all(actions.NotifyComplete)]

    @property
    def aborts(self) -> list[int]:
        return [action.checkpoint_id for action in self.all(actions.NotifyAborted)]

    @property
    def reasons(self) -> dict[int, str | None]:
        """Failed id -> reason, from the history."""
        return {view.checkpoint_id: view.failure_reason for view in self.machine.stats.view().history if view.status == "FAILED"}


def of(out: Iterable[Any], kind: type[T]) -> list[T]:
    return [action for action in out if isinstance(action, kind)]


def answers(out: Iterable[Any]) -> list[AckStatus]:
    return [answer for action in of(out, actions.AnswerAcks) for answer in action.answers]
