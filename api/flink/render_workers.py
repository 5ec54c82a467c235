"""Worker processes as Flink's task managers: pure functions from the coordinator's views to response records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from holdfast.api.flink import schemas
from holdfast.api.flink import worker_schemas as shapes
from holdfast.api.flink.render_vertices import worker_id
from holdfast.barriers.messages import TaskState
from holdfast.coordinator.views import JobView, WorkerView
from holdfast.statebackends.errors import NotFoundError

_ID = re.compile(r"([0-9a-f]{32})_slot-(0|[1-9][0-9]{0,4})")

_ENDED = frozenset({TaskState.FINISHED, TaskState.CANCELED, TaskState.FAILED, TaskState.CREATED, TaskState.SCHEDULED})
"""States of tasks that no worker has, or has any more."""


def parse_worker_id(text: str) -> tuple[str, int]:
    """Job id and slot. Raises NotFoundError for what can be no worker."""
    found = _ID.fullmatch(text)
    if found is None:
        raise NotFoundError(f"there is no task manager {text[:100]!r}: an id is <job id>_slot-<number>")
    return found[1], int(found[2])


def workers_of(view: JobView) -> Iterator[WorkerView]:
    """Those that hold a slot now."""
    return (worker for worker in view.workers if worker.registered)


def task_manager(view: JobView, worker: WorkerView) -> shapes.TaskManager:
    tasks = _tasks(view, worker.slot)
    return shapes.TaskManager(
        id=worker_id(view.overview.job_id, worker.slot),
        path=worker.data_address,
        dataPort=_port(worker.data_address),
        timeSinceLastHeartbeat=worker.last_seen_ms,
        freeSlots=0 if tasks else 1,
        assignedTasks=tasks,
    )


def _tasks(view: JobView, slot: int) -> int:
    return sum(each.subtask == slot and each.state not in _ENDED for vertex in view.vertices for each in vertex.subtasks)


def _port(address: str) -> int:
    try:
        return urlsplit(address).port or schemas.UNKNOWN
    except ValueError:
        return schemas.UNKNOWN


def worker_of(view: JobView, slot: int) -> WorkerView:
    """Raises NotFoundError if no process holds the slot now."""
    found = next((worker for worker in workers_of(view) if worker.slot == slot), None)
    if found is None:
        job_id = view.overview.job_id
        raise NotFoundError(f"no worker holds slot {slot} of job {job_id} now", job=job_id, slot=slot)
    return found


def task_manager_details(view: JobView, slot: int) -> shapes.TaskManagerDetails:
    """Raises NotFoundError if no process holds the slot now."""
    told = task_manager(view, worker_of(view, slot))
    slots = [shapes.AllocatedSlot(jobId=view.overview.job_id, assignedTasks=told.assignedTasks)] if told.assignedTasks else []
    return shapes.TaskManagerDetails(**dict(told), allocatedSlots=slots)


def worker_metrics(view: JobView, worker: WorkerView) -> dict[str, str]:
    """Numbers of one worker by their names; of its subtasks' queues the sums over those that have told them."""
    found = {"framesRefused": worker.frames_refused, "assignedTasks": _tasks(view, worker.slot)}
    told = [each.metrics for vertex in view.vertices for each in vertex.subtasks if each.subtask == worker.slot]
    for name, field in (("queuedInputBytes", "queued_in_bytes"), ("queuedOutputBytes", "queued_out_bytes")):
        known = [value for each in told if isinstance(value := getattr(each, field), int)]
        if known:
            found[name] = sum(known)
    return {name: str(value) for name, value in found.items()}
