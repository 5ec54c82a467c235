"""CORE, part of the job master: the tasks of the running attempt, and the next attempt.

`Execution` applies reports on tasks (states, timestamps, metrics) and answers queries; it decides nothing. `NextAttempt` is
prepared once and deployed once. Both know nothing of processes: a slot is a number."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.barriers.jobgraph import JobGraph, JobVertex
from holdfast.barriers.messages import (
    Deployment,
    InFlightRestore,
    OperatorCounts,
    SubtaskDeployment,
    SubtaskKey,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
)
from holdfast.coordinator.ha.records import BackoffRecord, RestorePoint
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.slots import DataPorts, JobTurn
from holdfast.coordinator.totals import Tally, Totals
from holdfast.coordinator.views import HookRestoreView, SubtaskView, VertexView
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import HookState

_RANK = {
    TaskState.CREATED: 0,
    TaskState.SCHEDULED: 1,
    TaskState.DEPLOYING: 2,
    TaskState.INITIALIZING: 3,
    TaskState.RUNNING: 4,
    TaskState.CANCELING: 5,
    TaskState.FINISHED: 6,
    TaskState.CANCELED: 6,
    TaskState.FAILED: 6,
}
"""The rank of a task's state only rises: a report that a later one overtook changes nothing."""

_TERMINAL = frozenset({TaskState.FINISHED, TaskState.CANCELED, TaskState.FAILED})


class _Task:
    __slots__ = ("_changed", "backlog", "drained", "finished", "key", "metrics", "operators", "state", "timestamps")

    def __init__(self, key: SubtaskKey, changed: set[int]) -> None:
        """`changed`: subtasks of its vertex that changed since the newest capture."""
        self.key = key
        self._changed = changed
        self.state = TaskState.CREATED
        self.drained = False
        self.backlog = 0
        """See SubtaskStatus."""
        self.finished = False
        """All that it emits is in a completed checkpoint. It goes on to pass barriers on, and its process may still fail."""
        self.timestamps: Mapping[TaskState, int] = {}
        """Replaced, never changed: captures share it."""
        self.metrics = SubtaskMetrics(key.vertex, key.subtask)
        self.operators: OperatorCounts = ()
        """As the tally has them."""

    def touch(self) -> None:
        """Note a change of what users see."""
        self._changed.add(self.key.subtask)

    @property
    def shown(self) -> TaskState:
        """The state that users see."""
        return TaskState.FINISHED if self.finished and self.state is not TaskState.FAILED else self.state


class CapturedTask:
    """One task at one moment. Only its view is added later, by whichever thread shows it first."""

    __slots__ = ("_view", "drained", "metrics", "operators", "shown", "timestamps")

    def __init__(self, task: _Task) -> None:
        self.shown = task.shown
        self.timestamps = task.timestamps
        self.drained = task.drained
        self.metrics = task.metrics
        self.operators = task.operators
        self._view: SubtaskView | None = None

    def view(self, vertex: str, subtask: int, attempt: int, host: str) -> SubtaskView:
        known = self._view
        if known is not None and known.host == host:
            return known
        self._view = view = SubtaskView(
            vertex=vertex,
            subtask=subtask,
            state=self.shown,
            attempt=attempt,
            host=host,
            start_ms=self.timestamps.get(TaskState.DEPLOYING, -1),
            end_ms=self.timestamps.get(self.shown, -1) if self.shown in _TERMINAL else -1,
            timestamps=self.timestamps,
            drained=self.drained,
            metrics=msgspec.structs.replace(self.metrics, operators=self.operators),
        )
        return view


class ShownVertex(NamedTuple):
    """The newest view of a vertex, and what it is of."""

    tasks: tuple[CapturedTask, ...]
    hosts: Mapping[int, str]
    view: VertexView


class CapturedExecution:
    """The tasks of one attempt at one moment, for any thread. What was not changed between two captures is shared by them."""

    def __init__(
        self,
        attempt: int,
        graph: JobGraph,
        tasks: Mapping[str, tuple[CapturedTask, ...]],
        hosts: Mapping[int, str],
        shown: dict[str, ShownVertex],
    ) -> None:
        """`tasks`: of each vertex, by subtask. `shown`: what captures of the attempt have shown last, by vertex; shared by them."""
        self._attempt = attempt
        self._graph = graph
        self._tasks = tasks
        self._hosts = hosts
        self._shown = shown

    def views(self) -> tuple[VertexView, ...]:
        return tuple(self._view(vertex) for vertex in self._graph.vertices)

    def _view(self, vertex: JobVertex) -> VertexView:
        tasks, hosts = self._tasks[vertex.vertex_id], self._hosts
        known = self._shown.get(vertex.vertex_id)
        if known is not None and known.tasks is tasks and known.hosts == hosts:
            return known.view
        view = self._new_view(vertex, tasks)
        self._shown[vertex.vertex_id] = ShownVertex(tasks, hosts, view)
        return view

    def _new_view(self, vertex: JobVertex, tasks: Sequence[CapturedTask]) -> VertexView:
        vertex_id, hosts = vertex.vertex_id, self._hosts
        numbered = enumerate(tasks)
        subtasks = tuple(task.view(vertex_id, subtask, self._attempt, hosts.get(subtask, "")) for subtask, task in numbered)
        states = [subtask.state for subtask in subtasks]
        state = TaskState.FAILED if TaskState.FAILED in states else min(states, key=lambda entry: _RANK[entry])
        starts = [subtask.start_ms for subtask in subtasks if subtask.start_ms >= 0]
        ended = all(entry in _TERMINAL for entry in states)
        return VertexView(
            vertex_id=vertex_id,
            name=vertex.name,
            parallelism=vertex.parallelism,
            max_parallelism=vertex.max_parallelism,
            state=state,
            start_ms=min(starts, default=-1),
            end_ms=max((subtask.end_ms for subtask in subtasks), default=-1) if ended else -1,
            task_counts=Counter(states),
            subtasks=subtasks,
        )


class _VertexTasks:
    """Tasks of one vertex, and what the newest capture has of them."""

    __slots__ = ("_captured", "_changed", "_tuple", "tasks")

    def __init__(self, vertex_id: str, parallelism: int) -> None:
        self._changed: set[int] = set()
        self.tasks = tuple(_Task(SubtaskKey(vertex_id, subtask), self._changed) for subtask in range(parallelism))
        self._captured: list[CapturedTask] = []
        self._tuple: tuple[CapturedTask, ...] = ()

    def capture(self) -> tuple[CapturedTask, ...]:
        """O(changed), and a copy of one pointer a task."""
        if not self._captured:
            self._captured = [CapturedTask(task) for task in self.tasks]
        elif self._changed:
            for subtask in self._changed:
                self._captured[subtask] = CapturedTask(self.tasks[subtask])
        else:
            return self._tuple
        self._changed.clear()
        self._tuple = tuple(self._captured)
        return self._tuple


class Execution:
    """The tasks of one attempt. Subtask i of every vertex runs in slot i."""

    def __init__(self, attempt: int, graph: JobGraph, base: Totals | None = None) -> None:
        """`base`: the submission's totals at the cut that the attempt begins with; None: no counts yet."""
        self.attempt = attempt
        self._graph = graph
        self._tally = Tally(graph, base or {})
        self._vertices = {vertex.vertex_id: _VertexTasks(vertex.vertex_id, vertex.parallelism) for vertex in graph.vertices}
        self._tasks = {
            SubtaskKey(vertex_id, subtask): task
            for vertex_id, vertex in self._vertices.items()
            for subtask, task in enumerate(vertex.tasks)
        }
        self._counts = Counter({TaskState.CREATED: len(self._tasks)})
        """As users see them."""
        self._in_state = Counter(self._counts)
        """As they are. Whether all tasks run is asked with each event: looking at each took a third of the job's thread."""
        self._backlogged: set[SubtaskKey] = set()
        """Tasks that said last that they process a backlog."""
        self._timed: dict[SubtaskKey, _Task] = {}
        """Tasks that tell where their time goes, event time or latency."""
        self._shown = dict[str, ShownVertex]()
        self._untold = set(self._tasks)
        """Tasks whose states `take_states` has not given yet."""

    @property
    def tasks(self) -> frozenset[SubtaskKey]:
        return frozenset(self._tasks)

    def take_states(self) -> tuple[tuple[SubtaskKey, TaskState], ...]:
        """States of tasks that changed since the last call, in order; of all at the first. A start of thousands of tasks is told by
        hundreds of reports, and telling all states with each took seconds of the job's thread."""
        untold, self._untold = sorted(self._untold), set()
        return tuple((key, self._tasks[key].state) for key in untold)

    def enter_all(self, state: TaskState, wall_ms: int) -> None:
        for task in self._tasks.values():
            self._enter(task, state, wall_ms)

    def apply(self, status: SubtaskStatus, wall_ms: int) -> bool:
        """Apply a report; False if it changes nothing (another attempt, unknown task, repeated, or overtaken)."""
        task = self._tasks.get(SubtaskKey(status.vertex, status.subtask))
        if task is None or status.attempt != self.attempt:
            return False
        counters = status.metrics
        is_own = counters is not None and (counters.vertex, counters.subtask) == (status.vertex, status.subtask)
        if counters is not None and is_own and task.state not in _TERMINAL:
            self._measure(task, counters)
        drained = status.drained and not task.drained
        if drained:
            task.drained = True
            task.touch()
        backlog = status.backlog > task.backlog
        if backlog:
            task.backlog = status.backlog
            (self._backlogged.add if task.backlog % 2 else self._backlogged.discard)(task.key)
        return self._enter(task, status.state, wall_ms) or drained or backlog

    def finish(self, tasks: Iterable[SubtaskKey], wall_ms: int) -> None:
        """These tasks had come to their end in front of a checkpoint that is complete now: users see them as FINISHED."""
        for key in tasks:
            task = self._tasks.get(key)
            if task is not None and task.state is TaskState.RUNNING and not task.finished:
                before, task.finished = task.shown, True
                task.timestamps = {**task.timestamps, TaskState.FINISHED: wall_ms}
                task.touch()
                self._count(before, task.shown)

    def lose(self, slot: int, wall_ms: int) -> None:
        """The process of a slot is gone: its tasks count as CANCELED, since they never report again."""
        for key, task in self._tasks.items():
            if key.subtask == slot:
                self._enter(task, TaskState.CANCELED, wall_ms)

    def measure(self, metrics: Iterable[SubtaskMetrics]) -> None:
        """Apply the counters of a heartbeat. Counters of a task that ended came with its last state, and stay."""
        for entry in metrics:
            task = self._tasks.get(SubtaskKey(entry.vertex, entry.subtask))
            if task is not None and task.state not in _TERMINAL:
                self._measure(task, entry)

    def _measure(self, task: _Task, metrics: SubtaskMetrics) -> None:
        task.operators = self._tally.count(metrics.vertex, metrics.subtask, metrics.operators)
        task.touch()
        task.metrics = msgspec.structs.replace(metrics, operators=())  # the tally has the operators' counts
        if metrics.latencies:
            own = tuple(each for each in metrics.latencies if each.source in self._vertices)
            task.metrics = msgspec.structs.replace(task.metrics, latencies=own)
        if _tells_time(metrics):
            self._timed[SubtaskKey(metrics.vertex, metrics.subtask)] = task

    def totals(self) -> Totals:
        """Totals of the submission, as far as its workers have reported."""
        return self._tally.totals()

    def timeliness(self, count_max: int) -> tuple[SubtaskMetrics, ...]:
        """Newest metrics of subtasks that tell where their time goes, event time or latency, of `count_max` at most: those that
        told it first."""
        timed = itertools.islice(self._timed.values(), count_max)
        return tuple(task.metrics for task in timed if task.state is TaskState.RUNNING and not task.drained)

    @property
    def timed_count(self) -> int:
        """Subtasks that told such metrics."""
        return len(self._timed)

    def metrics(self) -> tuple[SubtaskMetrics, ...]:
        return tuple(task.metrics for _, task in sorted(self._tasks.items()))

    @property
    def is_processing_backlog(self) -> bool:
        """Whether any source has said so last."""
        return any(self._tasks[key].state is TaskState.RUNNING for key in self._backlogged)

    @property
    def all_running(self) -> bool:
        return self._in_state[TaskState.RUNNING] == len(self._tasks)

    @property
    def all_up(self) -> bool:
        """Every task is RUNNING or FINISHED: an older leader may have let some of them finish."""
        return self._in_state[TaskState.RUNNING] + self._in_state[TaskState.FINISHED] == len(self._tasks)

    @property
    def all_finished(self) -> bool:
        return self._in_state[TaskState.FINISHED] == len(self._tasks)

    @property
    def all_drained(self) -> bool:
        return all(task.drained and task.state is TaskState.RUNNING for task in self._tasks.values())

    @property
    def all_terminal(self) -> bool:
        return all(task.state in _TERMINAL for task in self._tasks.values())

    def counts(self) -> Mapping[TaskState, int]:
        """Number of tasks in each state that occurs, as users see it. Counted at each change: a scrape costs O(states)."""
        return +self._counts

    def capture(self, hosts: Mapping[int, str]) -> CapturedExecution:
        """The tasks as they are. `hosts`: of the slots; it must not change any more."""
        tasks = {vertex_id: vertex.capture() for vertex_id, vertex in self._vertices.items()}
        return CapturedExecution(self.attempt, self._graph, tasks, hosts, self._shown)

    def views(self, hosts: Mapping[int, str]) -> tuple[VertexView, ...]:
        return self.capture(hosts).views()

    def _enter(self, task: _Task, state: TaskState, wall_ms: int) -> bool:
        if _RANK[state] <= _RANK[task.state]:
            return False
        self._in_state[task.state] -= 1
        self._in_state[state] += 1
        before, task.state = task.shown, state
        self._untold.add(task.key)
        task.timestamps = {**task.timestamps, state: task.timestamps.get(state, wall_ms)}
        task.touch()
        self._count(before, task.shown)
        return True

    def _count(self, before: TaskState, after: TaskState) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1


def _tells_time(metrics: SubtaskMetrics) -> bool:
    told = (metrics.busy_ms_per_second, metrics.watermark_lag_ms, metrics.emit_lag_ms, metrics.source_idle_ms, metrics.latencies)
    return any(entry is not msgspec.UNSET for entry in told)


PREPARE_RETRY_MS = 500
"""Delay before a preparation that failed on storage is tried again."""

PREPARE_TRIES_MAX = 60
"""Tries to prepare one attempt while storage fails; then the job fails with the storage's error."""

HOOKS_GRACE_MS = 5_000
"""Time behind the end of a hook's call in which its answer may still come: that is measured where the call is made, from a little
later on, and turns may be late."""

HOOK_TRIES_MAX = 5
"""Tries to take a master hook back to the checkpoint of one attempt; then the job fails with the hook's error."""


class NextAttempt:
    """The attempt that is prepared and deployed next. `number` is the job's attempt from the moment the older one is fenced."""

    def __init__(self, graph: JobGraph, number: int, turn: JobTurn, base: Totals | None = None) -> None:
        """`base`: the totals at the cut that an attempt, which runs already, began with."""
        self._graph = graph
        self._turn = turn
        self.number = number
        self.restore: RestorePoint | None = None
        self.base: Totals = base or {}
        """Counts of the submission's operators at the cut that it begins with."""
        self._states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]] | None = None
        self._finished: frozenset[str] = frozenset()
        self._in_flight: Mapping[SubtaskKey, InFlightRestore] = {}
        self._under_way = False
        self._retry_ms: int | None = None
        self._tries = 0
        self._hook_try = 0
        """Number of the newest call of its hooks."""
        self._hook_tries_failed = 0
        self._hooks_missing: frozenset[str] = frozenset()
        """Master hooks that are not back at its checkpoint."""
        self._hooks_since_ms = -1
        """When they were called first, wall clock."""
        self._hooks_until_ms = -1
        """When the newest call is over for those that are missing."""
        self._hooks_failed: frozenset[str] = frozenset()
        """Those that failed or were late, while another try waits."""
        self.deployments: dict[int, Deployment] = {}
        """Deployments by slot; empty until deployed."""

    @property
    def is_prepared(self) -> bool:
        return self._states is not None and not self._hooks_missing

    @property
    def hook_restore(self) -> HookRestoreView | None:
        """What it waits for of its master hooks; None: for none."""
        missing = self._hooks_missing or self._hooks_failed
        return HookRestoreView(tuple(sorted(missing)), self._hooks_since_ms, self._hook_tries_failed) if missing else None

    @property
    def hooks_until_ms(self) -> int | None:
        """When hooks that are missing are late; None: none is missing."""
        return self._hooks_until_ms if self._hooks_missing else None

    @property
    def late_hooks(self) -> frozenset[str]:
        """Master hooks whose time is over. The port answers for them by itself, but that must not be all that a job waits for."""
        return self._hooks_missing if self._turn.now_ms >= self._hooks_until_ms else frozenset()

    @property
    def retry_ms(self) -> int | None:
        """When the preparation is tried again."""
        return self._retry_ms

    def prepare(self, restore: RestorePoint | None, restarts: int, base: Totals, backoff: BackoffRecord | None = None) -> None:
        """Request the preparation, unless it is under way, done, or waits for its retry."""
        waiting = self._retry_ms is not None and self._turn.now_ms < self._retry_ms
        if self._under_way or self.is_prepared or waiting:
            return
        self._under_way, self._retry_ms = True, None
        self.restore, self.base = restore, base
        self._turn.out.append(job_actions.PrepareAttempt(self.number, restore, restarts, base, backoff))

    def prepared(self, event: job_events.AttemptPrepared) -> None:
        if event.attempt == self.number:
            self._under_way = False
            self._states, self._finished, self._in_flight = event.states, event.finished, event.in_flight
            self._restore_hooks({state.name: state for state in event.hooks})

    def _restore_hooks(self, stored: Mapping[str, HookState]) -> None:
        """Take the job's master hooks back to the checkpoint, before any task is deployed. States of others are dropped."""
        config = self._graph.config
        self._hooks_missing, self._hooks_failed = frozenset(config.master_hooks), frozenset()
        if self._hooks_since_ms < 0:
            self._hooks_since_ms = self._turn.wall_ms
        self._under_way = bool(self._hooks_missing)
        self._hook_try += 1
        found, timeout_ms = self.restore, config.master_hook_timeout_ms
        self._hooks_until_ms = self._turn.now_ms + timeout_ms + HOOKS_GRACE_MS
        checkpoint_id, at_ms = (found.checkpoint_id, found.timestamp_ms) if found is not None else (0, 0)
        self._turn.out += [
            job_actions.RestoreHook(self.number, self._hook_try, name, checkpoint_id, at_ms, stored.get(name), timeout_ms)
            for name in sorted(self._hooks_missing)
        ]

    def awaits(self, event: job_events.HookRestored | job_events.HookNotRestored) -> bool:
        """Whether the outcome is of the newest call of a hook. That of an earlier one comes when its hook has yet to do its work
        again, which must not run beside tasks."""
        return (event.attempt, event.try_number) == (self.number, self._hook_try) and event.name in self._hooks_missing

    def hook_restored(self, event: job_events.HookRestored) -> None:
        if self.awaits(event):
            self._hooks_missing -= {event.name}
            self._under_way = bool(self._hooks_missing)

    def hooks_failed(self, names: frozenset[str]) -> bool:
        """Awaited hooks failed, or are late: prepare anew later; False after HOOK_TRIES_MAX."""
        self._states, self._hooks_missing, self._under_way = None, frozenset(), False
        self._hooks_failed = names
        self._hook_tries_failed += 1
        self._retry_ms = self._turn.now_ms + PREPARE_RETRY_MS
        return self._hook_tries_failed < HOOK_TRIES_MAX

    def taken(self, event: job_events.AttemptTaken) -> None:
        """An older leader has recorded the number: go on with the next one."""
        if event.attempt == self.number:
            self._under_way = False
            self.number += 1

    def delayed(self, event: job_events.AttemptDelayed) -> bool:
        """Storage failed: retry later; False after PREPARE_TRIES_MAX."""
        if event.attempt != self.number:
            return True
        self._under_way = False
        self._tries += 1
        self._retry_ms = self._turn.now_ms + PREPARE_RETRY_MS
        return self._tries < PREPARE_TRIES_MAX

    def deploy(self, ports: DataPorts, secret: str) -> Mapping[int, Deployment]:
        """One deployment per slot. `ports`: of the processes that hold the slots now; `secret`: lets these alone connect.

        Raises InvariantError before the attempt is prepared."""
        if self._states is None:
            raise InvariantError(f"attempt {self.number} is deployed before it is prepared")
        states, finished, nothing = self._states, self._finished, dict[str, OperatorSubtaskState]()
        self.deployments = {
            slot: Deployment(
                attempt=self.number,
                graph=self._graph,
                subtasks=tuple(
                    SubtaskDeployment(
                        vertex.vertex_id,
                        slot,
                        dict(states.get(SubtaskKey(vertex.vertex_id, slot), nothing)),
                        finished=vertex.vertex_id in finished,
                        in_flight=self._in_flight.get(SubtaskKey(vertex.vertex_id, slot), InFlightRestore()),
                    )
                    for vertex in self._graph.vertices
                    if slot < vertex.parallelism
                ),
                addresses=dict(ports.addresses),
                data_keys=dict(ports.keys),
                data_sockets=dict(ports.sockets),
                data_secret=secret,
                restores_in_flight=bool(self._in_flight),
                restored_checkpoint_id=self.restore.checkpoint_id if self.restore is not None else 0,
                restored_folder=self.restore.folder if self.restore is not None else "",
                restored_from=self.restore.timestamp_ms if self.restore is not None else 0,
            )
            for slot in sorted(ports.addresses)
        }
        return self.deployments
