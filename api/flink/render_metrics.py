"""Metrics of jobs and of the coordinator: pure functions from views to texts by name.

A name is one of Flink's only where its meaning is the same; a number that is not known is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.api.flink.render_checkpoints import external_path
from holdfast.barriers.messages import TaskState
from holdfast.coordinator.totals import derive_job_totals
from holdfast.coordinator.views import CheckpointStatsView, CheckpointView, ClusterView, JobView

_OF_STATES = {
    "INITIALIZING": "initializingTime",
    "CREATED": "createdTime",
    "RUNNING": "runningTime",
    "FAILING": "failingTime",
    "RESTARTING": "restartingTime",
    "CANCELLING": "cancellingTime",
}
"""State -> name of how long the job has been in it now; 0: it is in another."""

_OUTAGES = ("FAILING", "RESTARTING", "RECONCILING", "SUSPENDED")


def job_metrics(view: JobView, checkpoints: CheckpointStatsView, directory: str) -> dict[str, str]:
    """The numbers of one job by their names. `directory`: the state directory, below which checkpoints lie."""
    counts, totals = checkpoints.counts, derive_job_totals(view.graph, view.totals)
    found: dict[str, int] = dict(_times(view))
    found |= {
        "numRestarts": view.restarts,
        "fullRestarts": view.restarts,
        "numberOfInProgressCheckpoints": counts.in_progress,
        "numberOfCompletedCheckpoints": counts.completed,
        "numberOfFailedCheckpoints": counts.failed,
        "totalNumberOfCheckpoints": counts.total,
        "recordsRead": totals.records_in,
        "recordsWritten": totals.records_out,
        "lateRecordsDropped": totals.late_dropped,
        "rowsSkipped": totals.rows_skipped,
    }
    if checkpoints.latest_restored is not None:
        found["lastCheckpointRestoreTimestamp"] = checkpoints.latest_restored.restore_ms
    texts = {name: str(value) for name, value in found.items()}
    if checkpoints.latest_completed is not None:
        texts |= _of_checkpoint(checkpoints.latest_completed, directory)
    return texts


def _of_checkpoint(view: CheckpointView, directory: str) -> dict[str, str]:
    numbers = {
        "lastCompletedCheckpointId": view.checkpoint_id,
        "lastCheckpointDuration": view.end_to_end_ms,
        "lastCheckpointSize": view.checkpointed_size,
        "lastCheckpointFullSize": view.state_size,
        "lastCheckpointProcessedData": view.processed_bytes,
        "lastCheckpointPersistedData": view.persisted_bytes,
        "lastCheckpointCompletedTimestamp": view.latest_ack_ms,
    }
    texts = {name: str(value) for name, value in numbers.items() if value >= 0}
    path = external_path(view.location, directory)
    return texts if path is None else texts | {"lastCheckpointExternalPath": path}


def _times(view: JobView) -> Iterator[tuple[str, int]]:
    state, entered = view.overview.state, view.timestamps
    for each, name in _OF_STATES.items():
        yield name, max(0, view.now_ms - entered[each]) if each == state and each in entered else 0
    yield "allSubTasksRunningOrFinishedTime", _all_running(view)
    yield "uptime", _uptime(view)
    yield "downtime", _downtime(view)


def _all_running(view: JobView) -> int:
    """Since the last subtask began to run, while all run or have finished; else 0."""
    subtasks = [subtask for vertex in view.vertices for subtask in vertex.subtasks]
    if not subtasks or any(each.state not in (TaskState.RUNNING, TaskState.FINISHED) for each in subtasks):
        return 0
    began_ms = max((each.timestamps.get(TaskState.RUNNING, -1) for each in subtasks), default=-1)
    return max(0, view.now_ms - began_ms) if began_ms >= 0 else 0


def _uptime(view: JobView) -> int:
    if view.overview.is_terminal:
        return -1
    return max(0, view.now_ms - view.timestamps.get("RUNNING", view.now_ms)) if view.overview.state == "RUNNING" else 0


def _downtime(view: JobView) -> int:
    """Since the job last left RUNNING; 0 while it runs, or never did."""
    if view.overview.is_terminal:
        return -1
    ran_ms = view.timestamps.get("RUNNING")
    if ran_ms is None or view.overview.state == "RUNNING":
        return 0
    began = [at_ms for state, at_ms in view.timestamps.items() if state in _OUTAGES and at_ms >= ran_ms]
    return max(0, view.now_ms - min(began)) if began else 0


def cluster_metrics(view: ClusterView) -> Mapping[str, str]:
    """Of the coordinator over all jobs."""
    numbers = {
        "numRunningJobs": view.jobs_running,
        "numRegisteredTaskManagers": view.workers,
        "taskSlotsTotal": view.slots_total,
        "taskSlotsAvailable": view.slots_available,
    }
    return {name: str(value) for name, value in numbers.items()}
