"""A job master with storage in a dict that answers at once, driven event by event."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.launches import draw_secret
from holdfast.barriers.messages import (
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    Answerable,
    CheckpointKind,
    Deployment,
    Heartbeat,
    NumberedCommand,
    Registered,
    RegisterWorker,
    StatusBatch,
    SubtaskKey,
    SubtaskStatus,
    TaskState,
    WorkerCommand,
)
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.dispatcher.hook_calls import call_of, outcome_of
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.dispatcher.submit import Starter, start_submission
from holdfast.coordinator.hooks.calls import HookCall, HookReply
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import stored_states, submission, word_count
from tests.coordinator.world import JOB, DictStorage


class Rig:
    """`held` storage actions wait in `waiting` until the test performs them."""

    def __init__(self, graph: JobGraph | None = None, *, storage: DictStorage | None = None, **settings: Any) -> None:
        self.storage = storage or DictStorage()
        self.graph = graph or word_count(**settings)
        self.hooks: Callable[[HookCall], Sequence[HookReply]] = lambda _call: [HookReply()]
        """Replies of master hooks; none: the hook hangs."""
        starter = Starter("starter", "", "directory", 0)
        setup = run_flow(start_submission(JOB, submission(self.graph, job_id=JOB), starter), self.storage)
        self.open(setup)

    def open(self, setup: JobSetup, *, wall_ms: int = 1_000) -> None:
        """`wall_ms`: the wall clock when the monotonic one stands at 0."""
        self._wall_ms = wall_ms
        self.setup = setup
        self.master = JobMaster(setup, rng=random.Random(1), draw_secret=draw_secret)
        self.effects = StorageEffects(Identity(JOB, setup.epoch, f"leader-{setup.epoch}", setup.submission, setup.graph), lambda: 0)
        self.now = 0
        self.held: set[type[Any]] = set()
        self.waiting: list[Any] = []
        self.actions: list[Any] = []
        self.answers: dict[int, Any] = {}
        self.tickets = 0
        self.sessions: dict[int, str] = {}
        self.streams: dict[int, int] = {}
        self.sent: dict[int, list[WorkerCommand]] = {}
        self.feed(job_events.JobStarted())

    # -- events

    @property
    def wall_ms(self) -> int:
        return self._wall_ms + self.now

    def feed(self, event: job_events.Event) -> None:
        queue: list[job_events.Event] = [event]
        while queue:
            for action in self.master.handle(queue.pop(0), now_ms=self.now, wall_ms=self.wall_ms):
                self.actions.append(action)
                match action:
                    case job_actions.Answer():
                        self.answers[action.ticket] = action.value
                    case job_actions.Refuse():
                        self.answers[action.ticket] = action.error
                    case job_actions.Deliver():
                        self.note(action.slot, action.commands)
                    case job_actions.CloseStream() | job_actions.LookForProcess() | job_actions.JobEnded():
                        pass
                    case actions.TriggerHook() | job_actions.RestoreHook():
                        queue += [outcome_of(action, reply) for reply in self.hooks(call_of(action))]
                    case _ if type(action) in self.held:
                        self.waiting.append(action)
                    case _:
                        outcome = run_flow(self.effects.flow(action), self.storage)
                        if outcome is not None:
                            queue.append(outcome)

    def perform_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            outcome = run_flow(self.effects.flow(action), self.storage)
            if outcome is not None:
                self.feed(outcome)

    def call(self, make: Any) -> Any:
        """The answer; raises the refusal."""
        self.tickets += 1
        ticket = self.tickets
        self.feed(make(ticket))
        answer = self.answers.get(ticket)
        if isinstance(answer, HoldfastError):
            raise answer
        return answer

    def note(self, slot: int, commands: tuple[NumberedCommand, ...]) -> None:
        self.sent.setdefault(slot, []).extend(numbered.command for numbered in commands if numbered.command is not None)

    def pass_time(self, by_ms: int) -> None:
        """Deadline by deadline."""
        end = self.now + by_ms
        while (deadline := self.master.next_deadline_ms()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.feed(events.DeadlineReached())
        self.now = end

    # -- a worker's calls

    def register(self, slot: int, *, attempt: int = 0, task_attempt: int = 0, nonce: str = "", **fields: Any) -> Registered:
        is_near = fields.pop("is_near", False)
        fields.setdefault("submission", 1)
        fields.setdefault("directory_nonce", "directory")
        fields.setdefault("pid", 1)
        fields.setdefault("data_address", f"tcp://{slot}-{task_attempt}:1")
        fields.setdefault("subtasks", self.statuses(slot, attempt, TaskState.RUNNING) if attempt else ())
        message = RegisterWorker(
            job_id=JOB,
            slot=slot,
            task_attempt=task_attempt,
            nonce=nonce or f"{slot}-{task_attempt}",
            host="host",
            attempt=attempt,
            **fields,
        )
        registered: Registered = self.call(lambda ticket: job_events.RegistrationReceived(ticket, message, is_near))
        self.sessions[slot] = registered.session
        self.sent[slot] = []
        self.note(slot, self.open_stream(slot))
        return registered

    def open_stream(self, slot: int, after: int = 0) -> tuple[NumberedCommand, ...]:
        commands: tuple[NumberedCommand, ...] = self.call(
            lambda ticket: job_events.StreamOpened(ticket, slot, self.sessions[slot], after)
        )
        self.streams[slot] = self.tickets
        return commands

    def close_stream(self, slot: int, stream: int | None = None) -> None:
        self.feed(job_events.StreamClosed(slot, self.sessions[slot], self.streams[slot] if stream is None else stream))

    def statuses(
        self, slot: int, attempt: int, state: TaskState, error: str = "", *, drained: bool = False
    ) -> tuple[SubtaskStatus, ...]:
        return tuple(
            SubtaskStatus(attempt, vertex.vertex_id, slot, state, error=error, drained=drained)
            for vertex in self.graph.vertices
            if slot < vertex.parallelism
        )

    def report(self, slot: int, attempt: int, state: TaskState, error: str = "", *, drained: bool = False) -> None:
        statuses = self.statuses(slot, attempt, state, error, drained=drained)
        batch = StatusBatch(self.setup.epoch, slot, self.sessions[slot], statuses)
        self.call(lambda ticket: job_events.StatesReceived(ticket, batch))

    def heartbeat(self, slot: int, attempt: int = 1, **fields: Any) -> int:
        message = Heartbeat(slot, self.sessions[slot], attempt, **fields)
        epoch: int = self.call(lambda ticket: job_events.HeartbeatReceived(ticket, message))
        return epoch

    def acks(self, slot: int, attempt: int, number: int) -> tuple[Answerable, ...]:
        pending = {each.checkpoint_id: each for each in self.master.coordinator.pending}.get(number)
        savepoint = pending is not None and pending.request.is_savepoint
        return tuple(
            AcknowledgeCheckpoint(
                attempt,
                number,
                vertex.vertex_id,
                slot,
                stored_states(self.graph, SubtaskKey(vertex.vertex_id, slot), savepoint=savepoint),
            )
            for vertex in self.graph.vertices
            if slot < vertex.parallelism
        )

    def acknowledge(self, slot: int, attempt: int, number: int) -> tuple[AckStatus, ...]:
        batch = AckBatch(self.setup.epoch, slot, self.sessions[slot], self.acks(slot, attempt, number))
        answers: tuple[AckStatus, ...] = self.call(lambda ticket: job_events.AckBatchReceived(ticket, batch)).answers
        return answers

    # -- short cuts

    def run(self) -> Rig:
        """Both slots registered, attempt 1 deployed and running."""
        for slot in range(self.graph.slots_required):
            self.register(slot)
        for slot in range(self.graph.slots_required):
            self.report(slot, 1, TaskState.RUNNING)
        return self

    def checkpoint(self, attempt: int = 1) -> int:
        """One checkpoint, completed."""
        number = self.master.coordinator.next_checkpoint_id
        self.feed_request()
        for slot in range(self.graph.slots_required):
            self.acknowledge(slot, attempt, number)
        return number

    def feed_request(self) -> None:
        self.call(lambda ticket: job_events.SnapshotRequested(ticket, CheckpointKind.CHECKPOINT, f"t{ticket}"))

    def commands(self, slot: int, kind: type[Any]) -> list[Any]:
        return [command for command in self.sent[slot] if isinstance(command, kind)]

    @property
    def state(self) -> str:
        return self.master.state.value

    @property
    def restarts(self) -> int:
        return self.master.lifecycle.backoff.restarts

    def deployment(self, slot: int) -> Deployment:
        return self.master.lifecycle.next.deployments[slot]

    def key(self, vertex: int, slot: int) -> SubtaskKey:
        return SubtaskKey(self.graph.vertices[vertex].vertex_id, slot)
