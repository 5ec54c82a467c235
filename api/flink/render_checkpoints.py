"""Checkpoints and triggers in Flink's dialect: pure functions from the coordinator's views to response records.

Nothing is buffered for an alignment beyond what channels may hold: `buffered` is 0, or unknown, throughout, as in Flink."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from msgspec.structs import replace

from holdfast.api.access.quoted_rows import without_rows
from holdfast.api.flink import checkpoint_schemas as schemas
from holdfast.api.flink.schemas import UNKNOWN
from holdfast.api.flink.serialized_throwable import serialize_throwable
from holdfast.api.snapshots.disposals import Disposal
from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.views import (
    CheckpointConfigView,
    CheckpointStatsView,
    CheckpointView,
    Quantiles,
    RestoredView,
    SubtaskCheckpointView,
    TriggerView,
    VertexCheckpointView,
)
from holdfast.statebackends.storage import is_absolute_folder

_CHECKPOINT_TYPES = {
    CheckpointKind.CHECKPOINT: "CHECKPOINT",
    CheckpointKind.FINAL: "CHECKPOINT",
    CheckpointKind.SAVEPOINT: "SAVEPOINT",
    CheckpointKind.STOP_SAVEPOINT: "SYNC_SAVEPOINT",
}

MS_MAX = 2**63 - 1
"""Flink uses Long.MAX_VALUE for "no periodic checkpoints"."""


def checkpoints(view: CheckpointStatsView, directory: str) -> schemas.Checkpoints:
    """`directory`: the state directory, below which checkpoints lie. `tasks` are empty, as in Flink; `checkpoint` has them."""
    counts = view.counts
    return schemas.Checkpoints(
        counts=schemas.CheckpointCounts(
            restored=counts.restored,
            total=counts.total,
            in_progress=counts.in_progress,
            completed=counts.completed,
            failed=counts.failed,
        ),
        summary=schemas.CheckpointSummary(
            **{name: _statistics(view.summary, name) for name in schemas.CheckpointSummary.model_fields}
        ),
        latest=schemas.LatestCheckpoints(
            completed=_completed(_listed(view.latest_completed), directory) if view.latest_completed else None,
            savepoint=_completed(_listed(view.latest_savepoint), directory) if view.latest_savepoint else None,
            failed=_failed(_listed(view.latest_failed)) if view.latest_failed else None,
            restored=_restored(view.latest_restored, directory) if view.latest_restored else None,
        ),
        history=[checkpoint(_listed(each), directory) for each in view.history],
    )


def _listed(view: CheckpointView) -> CheckpointView:
    return replace(view, vertices={})


def checkpoint(view: CheckpointView, directory: str) -> schemas.Checkpoint:
    """One checkpoint with its tasks."""
    if view.status == "COMPLETED":
        return _completed(view, directory)
    if view.status == "FAILED":
        return _failed(view)
    return schemas.PendingCheckpoint.model_validate(_checkpoint_fields(view))


def with_all_vertices(view: CheckpointView, graph: JobGraph) -> CheckpointView:
    """With an entry for each vertex of the job, as Flink has it, whose UI looks for each of them: one that had finished before the
    checkpoint stored nothing, and of a checkpoint that is only on record no vertex is known."""
    parts = {
        vertex.vertex_id: view.vertices.get(vertex.vertex_id) or absent_vertex(view, vertex.vertex_id, vertex.parallelism)
        for vertex in graph.vertices
    }
    return replace(view, vertices={**parts, **view.vertices})


def absent_vertex(view: CheckpointView, vertex_id: str, parallelism: int) -> VertexCheckpointView:
    """A vertex of which a checkpoint has no subtask. It has finished if others took part, or if the checkpoint is complete."""
    is_settled = bool(view.vertices) or view.status == "COMPLETED"
    return VertexCheckpointView(
        vertex=vertex_id,
        status="COMPLETED" if is_settled else view.status,
        latest_ack_ms=UNKNOWN,
        checkpointed_size=0,
        state_size=0,
        end_to_end_ms=UNKNOWN,
        processed_bytes=0,
        num_subtasks=parallelism,
        num_acknowledged_subtasks=parallelism if is_settled else 0,
        subtasks=(),
    )


def _completed(view: CheckpointView, directory: str) -> schemas.CompletedCheckpoint:
    return schemas.CompletedCheckpoint.model_validate(
        {**_checkpoint_fields(view), "external_path": external_path(view.location, directory), "discarded": view.discarded}
    )


def external_path(location: str | None, directory: str) -> str | None:
    """Location in the form that `restore=` and every tool take: a checkpoint's own one is relative to the state directory."""
    if location is None or is_absolute_folder(location):
        return location
    return f"{directory.rstrip('/')}/{location}"


def _failed(view: CheckpointView) -> schemas.FailedCheckpoint:
    reason, message = view.failure_reason, view.failure_message
    text = f"{reason}: {message}" if reason and message else message or reason
    return schemas.FailedCheckpoint.model_validate(
        {**_checkpoint_fields(view), "failure_timestamp": view.failure_ms, "failure_message": text}
    )


def _checkpoint_fields(view: CheckpointView) -> dict[str, object]:
    return {
        "id": view.checkpoint_id,
        "status": view.status,
        "is_savepoint": view.is_savepoint,
        "savepointFormat": view.savepoint_format,
        "trigger_timestamp": view.trigger_ms,
        "latest_ack_timestamp": view.latest_ack_ms,
        "checkpointed_size": view.checkpointed_size,
        "state_size": view.state_size,
        "end_to_end_duration": view.end_to_end_ms,
        "processed_data": view.processed_bytes,
        "persisted_data": view.persisted_bytes,
        "num_subtasks": view.num_subtasks,
        "num_acknowledged_subtasks": view.num_acknowledged_subtasks,
        "checkpoint_type": "UNALIGNED_CHECKPOINT" if view.unaligned else _CHECKPOINT_TYPES[view.kind],
        "tasks": {
            vertex_id: schemas.TaskCheckpoint.model_validate(_task_fields(view.checkpoint_id, vertex))
            for vertex_id, vertex in view.vertices.items()
        },
    }


def _task_fields(checkpoint_id: int, view: VertexCheckpointView) -> dict[str, int | str]:
    return {
        "id": checkpoint_id,
        "status": view.status,
        "latest_ack_timestamp": view.latest_ack_ms,
        "checkpointed_size": view.checkpointed_size,
        "state_size": view.state_size,
        "end_to_end_duration": view.end_to_end_ms,
        "processed_data": view.processed_bytes,
        "persisted_data": view.persisted_bytes,
        "num_subtasks": view.num_subtasks,
        "num_acknowledged_subtasks": view.num_acknowledged_subtasks,
    }


def _restored(view: RestoredView, directory: str) -> schemas.RestoredCheckpoint:
    return schemas.RestoredCheckpoint(
        id=view.checkpoint_id,
        restore_timestamp=view.restore_ms,
        is_savepoint=view.is_savepoint,
        external_path=external_path(view.location, directory),
    )


def _statistics(summary: Mapping[str, Quantiles], name: str) -> schemas.MinMaxAvg:
    numbers = summary.get(name)
    if numbers is None:
        return schemas.MinMaxAvg()
    return schemas.MinMaxAvg(
        min=round(numbers.min),
        max=round(numbers.max),
        avg=round(numbers.avg),
        p50=numbers.p50,
        p90=numbers.p90,
        p95=numbers.p95,
        p99=numbers.p99,
        p999=numbers.p999,
    )


def task_checkpoint(checkpoint_id: int, view: VertexCheckpointView) -> schemas.TaskCheckpointDetails:
    """One vertex of one checkpoint, subtask by subtask."""
    return schemas.TaskCheckpointDetails.model_validate(
        {
            **_task_fields(checkpoint_id, view),
            "summary": _subtask_summary(view.summary),
            "subtasks": [_subtask(each, aborted=view.status == "FAILED") for each in view.subtasks],
        }
    )


def _subtask_summary(summary: Mapping[str, Quantiles]) -> schemas.SubtaskSummary:
    nothing = schemas.MinMaxAvg()
    return schemas.SubtaskSummary(
        checkpointed_size=_statistics(summary, "checkpointed_size"),
        state_size=_statistics(summary, "state_size"),
        end_to_end_duration=_statistics(summary, "end_to_end"),
        checkpoint_duration=schemas.DurationSummary(sync=_statistics(summary, "sync"), async_=_statistics(summary, "async")),
        alignment=schemas.AlignmentSummary(
            buffered=nothing,
            processed=_statistics(summary, "alignment_processed"),
            persisted=_statistics(summary, "alignment_persisted"),
            duration=_statistics(summary, "alignment"),
        ),
        start_delay=_statistics(summary, "start_delay"),
    )


def _subtask(view: SubtaskCheckpointView, *, aborted: bool) -> schemas.SubtaskCheckpoint:
    if not view.acknowledged:
        return schemas.PendingSubtask(index=view.subtask, status="pending_or_failed")
    return schemas.CompletedSubtask(
        index=view.subtask,
        status="completed",
        ack_timestamp=view.ack_ms,
        end_to_end_duration=view.end_to_end_ms,
        checkpointed_size=view.checkpointed_size,
        state_size=view.state_size,
        checkpoint=schemas.SubtaskDurations(sync=view.sync_ms, async_=view.async_ms),
        alignment=schemas.SubtaskAlignment(
            processed=view.alignment_processed, persisted=view.persisted, duration=view.alignment_ms
        ),
        start_delay=view.start_delay_ms,
        unaligned_checkpoint=view.unaligned,
        aborted=aborted,
    )


def checkpoint_config(view: CheckpointConfigView) -> schemas.CheckpointConfig:
    config = view.config
    return schemas.CheckpointConfig(
        mode=config.checkpointing_mode,
        interval=config.checkpoint_interval_ms if config.checkpoint_interval_ms is not None else MS_MAX,
        timeout=config.checkpoint_timeout_ms,
        min_pause=config.min_pause_ms,
        max_concurrent=config.max_concurrent_checkpoints,
        externalization=schemas.Externalization(enabled=True, delete_on_cancellation=config.retention_on_cancel == "delete"),
        state_backend=config.state_backend,
        checkpoint_storage=view.storage,
        unaligned_checkpoints=config.unaligned_checkpoints,
        tolerable_failed_checkpoints=config.tolerable_failed_checkpoints,
        aligned_checkpoint_timeout=config.aligned_checkpoint_timeout_ms,
        checkpoints_after_tasks_finish=False,
        state_changelog_enabled=False,
        changelog_periodic_materialization_interval=UNKNOWN,
        changelog_storage=None,
    )


# -------------------------------------------------------------------------------------------------------- asynchronous


_REASONS: dict[str, str] = {
    FailureReason.NOT_ALL_TASKS_RUNNING: "not all tasks of the job run just now: try again when it is RUNNING",
    FailureReason.JOB_FINISHING: "the job has ended, or is about to: it takes no more snapshots",
    FailureReason.COORDINATOR_SHUTDOWN: "the job was cancelled or has failed: it takes no more snapshots",
    FailureReason.SUSPENDED: "a newer submission took the job over meanwhile: ask again when that one is RUNNING",
    FailureReason.LEADER_CHANGED: "another coordinator leads the job by now: try again when it is RUNNING",
    FailureReason.TASK_NOT_READY: "a task was not ready for it: try again when the job is RUNNING",
    FailureReason.JOB_FAILOVER: "the job failed meanwhile and restarts: try again when it is RUNNING",
    FailureReason.TOO_MANY_REQUESTS: "too many snapshots were asked for and wait: try again later",
    FailureReason.MINIMUM_TIME_BETWEEN: "the last checkpoint ended less than min_pause_ms ago: try again later",
    FailureReason.EXPIRED: "it took longer than checkpoint_timeout_ms",
}
"""Text for users in place of the coordinator's bare reason."""


def _cause(view: TriggerView) -> schemas.FailureCause | None:
    if view.failure is None and view.failure_reason is None:
        return None
    reason = view.failure_reason or "CheckpointFailedError"
    is_bare = view.failure is None or view.failure == view.failure_reason
    text = _REASONS.get(reason, view.failure_reason or "") if is_bare else view.failure or ""
    if view.tries > 1:
        text += f" (the job failed over meanwhile; the stop was tried {view.tries} times)"
    return failure_cause(reason, text)


def failure_cause(kind: str, text: str) -> schemas.FailureCause:
    """A failure for people, and for Flink's clients, whose part quotes no record: nobody can take one out of it for viewers."""
    thrown = base64.b64encode(serialize_throwable(kind, without_rows(text))).decode()
    return schemas.FailureCause(class_=kind, stack_trace=text, serialized_throwable=thrown)


def _status(view: TriggerView) -> schemas.OperationStatus:
    return schemas.OperationStatus(id="IN_PROGRESS" if view.in_progress else "COMPLETED")


def checkpoint_trigger(view: TriggerView) -> schemas.CheckpointTriggerStatus:
    operation = None
    if not view.in_progress:
        cause = _cause(view)
        operation = schemas.CheckpointOperation(checkpointId=None if cause is not None else view.checkpoint_id, failureCause=cause)
    return schemas.CheckpointTriggerStatus(status=_status(view), operation=operation)


def savepoint_trigger(view: TriggerView) -> schemas.SavepointTriggerStatus:
    operation = None
    if not view.in_progress:
        cause = _cause(view)
        operation = schemas.SavepointOperation(location=None if cause is not None else view.location, failure_cause=cause)
    return schemas.SavepointTriggerStatus(status=_status(view), operation=operation)


def disposal(found: Disposal) -> schemas.DisposalStatus:
    if found.in_progress:
        return schemas.DisposalStatus(status=schemas.OperationStatus(id="IN_PROGRESS"), operation=None)
    cause = failure_cause(found.failure_kind, found.failure) if found.failure_kind else None
    return schemas.DisposalStatus(
        status=schemas.OperationStatus(id="COMPLETED"), operation=schemas.DisposalOperation(failure_cause=cause)
    )
