"""CORE: a pending checkpoint, from its claim to its decision: which tasks acknowledged, and which write is under way.

It knows nothing of other checkpoints; the checkpoint coordinator decides what is written when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from msgspec import UNSET

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import AcknowledgeCheckpoint, AckStatus, FailureReason, SubtaskKey
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.ha.shared_state import ResolvedStates, shared_handles
from holdfast.coordinator.totals import Tally, Totals
from holdfast.coordinator.views import HookFailureView
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import ChannelState, FileHandle, OperatorState, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import HookState


class PendingStatus(StrEnum):
    CLAIMING = "claiming"
    """The claim is being written; no task knows of the id. If the claim certainly failed, the id stays free."""
    CALLING_HOOKS = "calling_hooks"
    """Its claim is stored, and master hooks are being called; no task knows of the id."""
    AWAITING_ACKS = "awaiting_acks"
    READY = "ready"
    """Every task acknowledged; an older checkpoint's metadata is still being written."""
    WRITING_METADATA = "writing_metadata"
    """From here on only the write's outcome decides."""
    ABORTING = "aborting"
    """ABORTED is being written; from here on only the write's outcome decides."""
    COMPLETED = "completed"
    """Decided: COMPLETED is stored."""
    ABORTED = "aborted"
    """Decided: ABORTED is stored."""


TRANSITIONS: Mapping[PendingStatus, frozenset[PendingStatus]] = {
    PendingStatus.CLAIMING: frozenset({PendingStatus.CALLING_HOOKS, PendingStatus.AWAITING_ACKS, PendingStatus.ABORTING}),
    PendingStatus.CALLING_HOOKS: frozenset({PendingStatus.AWAITING_ACKS, PendingStatus.ABORTING}),
    PendingStatus.AWAITING_ACKS: frozenset({PendingStatus.READY, PendingStatus.ABORTING}),
    PendingStatus.READY: frozenset({PendingStatus.WRITING_METADATA, PendingStatus.ABORTING}),
    PendingStatus.WRITING_METADATA: frozenset({PendingStatus.COMPLETED, PendingStatus.ABORTING}),
    PendingStatus.ABORTING: frozenset({PendingStatus.ABORTING, PendingStatus.ABORTED, PendingStatus.COMPLETED}),
    PendingStatus.COMPLETED: frozenset(),
    PendingStatus.ABORTED: frozenset(),
}
"""Status -> statuses that may follow; any other step is an InvariantError.

ABORTING follows itself, since a failed write of ABORTED is repeated. COMPLETED follows ABORTING when our own write of COMPLETED,
whose outcome was unknown, turns out to be stored."""


_UNDECIDED = (PendingStatus.CLAIMING, PendingStatus.CALLING_HOOKS, PendingStatus.AWAITING_ACKS, PendingStatus.READY)


class PendingCheckpoint:
    """One claimed checkpoint. Acknowledgements are kept by task, never as a counter: each task counts once."""

    def __init__(
        self,
        checkpoint_id: int,
        request: CheckpointRequest,
        *,
        attempt: int,
        folder: str,
        tasks: Iterable[SubtaskKey],
        finished: tuple[SubtaskKey, ...],
        started_ms: int,
        deadline_ms: int,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.request = request
        self.attempt = attempt
        self.folder = folder
        self.ordered_tasks = tuple(sorted(tasks))
        self.tasks = frozenset(self.ordered_tasks)
        self.finished = finished
        """Tasks that had come to the end of their input at the cut: FINISHED before the trigger and, once its metadata is written,
        those that acknowledged so."""
        self.started_ms = started_ms
        self.deadline_ms: int | None = deadline_ms
        self.timestamp_ms = 0
        self.base: int | None = None
        """Checkpoint that increments may build on, set at the trigger; None: increments are not allowed."""
        self.may_share = True
        """Its files may be shared with other checkpoints; set at the trigger. If not, an acknowledgement that names such a file was
        refused, and nobody looks for them again."""
        self.unaligned = False
        """Its barriers may overtake; set at the trigger."""
        self.aligned_timeout_ms: int | None = None
        """As of TriggerCheckpoint."""
        self.resolved: ResolvedStates | None = None
        """Acknowledged state with the base's files in place of placeholders; set when its metadata is written."""
        self.totals: Totals = {}
        """Counts of the submission's operators at its cut; set when its metadata is written."""
        self.hooks: dict[str, HookState | None] = {}
        """Answers of its master hooks, by name."""
        self.hooks_missing: frozenset[str] = frozenset()
        """Master hooks that have not answered."""
        self.hooks_until_ms: int | None = None
        """When their time is up."""
        self.status = PendingStatus.CLAIMING
        self.triggered = False
        self.acks: dict[SubtaskKey, AcknowledgeCheckpoint] = {}
        self.abort_reason: FailureReason | None = None
        self.abort_message = ""
        self.hook_failure: HookFailureView | None = None
        """Master hooks that it is aborted for."""
        self.retry_ms: int | None = None
        """When a failed write of ABORTED is repeated."""

    @property
    def is_undecided(self) -> bool:
        """No write of a decision has begun: the checkpoint can still be acknowledged or aborted."""
        return self.status in _UNDECIDED

    @property
    def is_complete(self) -> bool:
        return len(self.acks) == len(self.tasks)

    def missing(self) -> Iterator[SubtaskKey]:
        return (task for task in self.ordered_tasks if task not in self.acks)

    def expects(self, task: SubtaskKey, attempt: int) -> bool:
        """Whether an acknowledgement of the task would count."""
        is_open = self.status is PendingStatus.AWAITING_ACKS and attempt == self.attempt
        return is_open and task in self.tasks and task not in self.acks

    def acknowledge(self, ack: AcknowledgeCheckpoint) -> AckStatus:
        """Take an acknowledgement: SUCCESS once per task, then DUPLICATE; UNKNOWN for a task or attempt without part in the
        checkpoint; DISCARDED once it is being aborted."""
        task = SubtaskKey(ack.vertex, ack.subtask)
        if task not in self.tasks or ack.attempt != self.attempt:
            return AckStatus.UNKNOWN
        if task in self.acks:
            return AckStatus.DUPLICATE
        if self.status is not PendingStatus.AWAITING_ACKS:
            return AckStatus.DISCARDED
        self.acks[task] = ack
        if self.is_complete:
            self._enter(PendingStatus.READY)
            self.deadline_ms = None
        return AckStatus.SUCCESS

    def call_hooks(self, names: Iterable[str], until_ms: int) -> None:
        """Master hooks are called; the trigger waits for their answers."""
        self._enter(PendingStatus.CALLING_HOOKS)
        self.hooks_missing, self.hooks_until_ms = frozenset(names), until_ms

    def hook_answered(self, name: str, state: HookState | None) -> bool:
        """Take a hook's answer, once; False if it is not awaited."""
        if self.status is not PendingStatus.CALLING_HOOKS or name not in self.hooks_missing:
            return False
        self.hooks[name] = state
        self.hooks_missing -= {name}
        return True

    def hook_states(self) -> tuple[HookState, ...]:
        """Of the stateful hooks, by name."""
        return tuple(state for _, state in sorted(self.hooks.items()) if state is not None)

    def trigger(
        self,
        timestamp_ms: int,
        base: int | None = None,
        *,
        may_share: bool = True,
        unaligned: bool = False,
        aligned_timeout_ms: int | None = None,
    ) -> None:
        """The trigger is sent; tasks may acknowledge from now on."""
        self._enter(PendingStatus.AWAITING_ACKS)
        self.hooks_until_ms = None
        self.unaligned, self.aligned_timeout_ms = unaligned, aligned_timeout_ms
        self.base, self.may_share = base, may_share
        self.triggered = True
        self.timestamp_ms = timestamp_ms

    def abort_with(self, reason: FailureReason, message: str) -> None:
        """ABORTED is being written, for the first time or again."""
        self._enter(PendingStatus.ABORTING)
        self.abort_reason = reason
        self.abort_message = message
        self.deadline_ms = self.hooks_until_ms = None
        self.retry_ms = None

    def begin_complete(self, resolved: ResolvedStates, tally: Tally) -> None:
        """COMPLETED is being written. `resolved`: the states without placeholders; `tally`: the attempt's counts, as it began.

        Raises InvariantError while acknowledgements are missing, and on a second call."""
        if self.status is not PendingStatus.READY or not self.is_complete:
            raise InvariantError(f"checkpoint {self.checkpoint_id} is {self.status.value} and can't be completed")
        self.resolved = resolved
        for task, ack in self.acks.items():
            if ack.metrics.operators:
                tally.add(task.vertex, task.subtask, ack.metrics.operators)
        ended = [task for task, ack in self.acks.items() if ack.finished]
        self.finished = tuple(sorted({*self.finished, *ended}))
        self.totals = tally.totals()
        self._enter(PendingStatus.WRITING_METADATA)

    def decided(self, status: PendingStatus) -> None:
        """COMPLETED or ABORTED is stored."""
        self._enter(status)

    def _enter(self, status: PendingStatus) -> None:
        if status not in TRANSITIONS[self.status]:
            raise InvariantError(f"checkpoint {self.checkpoint_id} is {self.status.value} and can't become {status.value}")
        self.status = status

    def states(self) -> dict[SubtaskKey, Mapping[str, OperatorSubtaskState]]:
        acks = self.acks
        return {task: acks[task].states for task in self.ordered_tasks if task in acks}

    def channels(self) -> tuple[ChannelState, ...]:
        """In-flight data of all tasks."""
        with_channels = sorted(task for task, ack in self.acks.items() if ack.channels is not UNSET)
        return tuple(channel for task in with_channels for channel in self.acks[task].in_flight)

    @property
    def size(self) -> int:
        """Bytes of the acknowledged state, those shared with the base included, and of in-flight data."""
        size = 0
        for ack in self.acks.values():
            for state in ack.states.values():
                size += state.size
            for channel in ack.in_flight:
                size += channel.part.length
        return size

    @property
    def shared(self) -> tuple[FileHandle, ...]:
        """Files that other checkpoints refer to, too, or may later."""
        if not self.may_share:
            return ()
        resolved = self.resolved or {}
        return shared_handles(state for states in resolved.values() for state in states.values())


def list_files(ack: AcknowledgeCheckpoint) -> tuple[str, ...]:
    """Paths of every file that an acknowledgement names, relative to the snapshot's folder; each once."""
    files = [channel.part.path for channel in ack.in_flight if isinstance(channel.part, FileHandle)]
    for _uid, state in sorted(ack.states.items()):
        for keyed in state.keyed:
            files.extend(part.path for part in keyed.parts if isinstance(part, FileHandle))
        for operator in state.operator:
            if isinstance(operator.part, FileHandle):
                files.append(operator.part.path)
    return tuple(dict.fromkeys(files))


def assemble_operators(
    graph: JobGraph, states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]
) -> tuple[OperatorState, ...]:
    """Acknowledged state by operator and subtask, as `_metadata` lists it: stateless operators, too."""
    found: list[OperatorState] = []
    for vertex in graph.vertices:
        tasks = [states.get(SubtaskKey(vertex.vertex_id, subtask), _NOTHING) for subtask in range(vertex.parallelism)]
        for operator in vertex.operators:
            subtasks = tuple([task.get(operator.uid, _STATELESS) for task in tasks])
            sizes = vertex.parallelism, vertex.max_parallelism
            found.append(OperatorState(operator.uid, operator.operator_id, operator.name, *sizes, subtasks))
    return tuple(found)


_NOTHING: Mapping[str, OperatorSubtaskState] = {}
_STATELESS = OperatorSubtaskState()
