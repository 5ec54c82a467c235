"""The tasks of the current attempt as the checkpoint coordinator sees them: who must acknowledge, and may we trigger."""

from __future__ import annotations

from holdfast.barriers.messages import FailureReason, SubtaskKey, TaskState
from holdfast.coordinator.totals import Totals


class TaskBoard:
    """Until an attempt starts, and after it is fenced, there are no tasks and nothing can be triggered."""

    def __init__(self) -> None:
        self.attempt: int | None = None
        self.base: Totals = {}
        """The submission's totals at the cut that the newest attempt began with."""
        self._states: dict[SubtaskKey, TaskState] = {}
        self._running = 0

    def start(self, attempt: int, tasks: frozenset[SubtaskKey], base: Totals) -> None:
        self.attempt = attempt
        self.base = base
        self._states = dict.fromkeys(tasks, TaskState.DEPLOYING)
        self._running = 0

    def fence(self) -> None:
        """The attempt is over, whatever its tasks may still report."""
        self.attempt = None
        self._states = {}
        self._running = 0

    def change(self, task: SubtaskKey, state: TaskState) -> bool:
        """Note a task's state; False for a task that is not of this attempt."""
        if task not in self._states:
            return False
        self._running += (state is TaskState.RUNNING) - (self._states[task] is TaskState.RUNNING)
        self._states[task] = state
        return True

    def refusal(self) -> FailureReason | None:
        """Why no checkpoint can be triggered now. Finished tasks take no part; every other one must be RUNNING."""
        if not self._states:
            return FailureReason.NOT_ALL_TASKS_RUNNING
        if self._running == len(self._states):
            return None
        states = set(self._states.values())
        if states == {TaskState.FINISHED}:
            return FailureReason.JOB_FINISHING
        return None if states == {TaskState.RUNNING, TaskState.FINISHED} else FailureReason.NOT_ALL_TASKS_RUNNING

    def finished(self) -> tuple[SubtaskKey, ...]:
        return tuple(sorted(task for task, state in self._states.items() if state is TaskState.FINISHED))

    def unfinished(self) -> frozenset[SubtaskKey]:
        """Who must acknowledge a checkpoint triggered now."""
        return frozenset(task for task, state in self._states.items() if state is not TaskState.FINISHED)
