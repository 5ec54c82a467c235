"""Why a checkpoint failed, by the reason on record. Pure."""

from __future__ import annotations

from holdfast.barriers.messages import FailureReason
from holdfast.coordinator.explain.facts import TEXT_BYTES_MAX, Facts, shown
from holdfast.coordinator.explain.master_hooks import hook_cause
from holdfast.coordinator.explain.pending import explain_missing_acks, missing_subtasks
from holdfast.coordinator.explain.records import Cause, CauseKind
from holdfast.coordinator.explain.slow import Chain
from holdfast.coordinator.figures import duration_text
from holdfast.coordinator.views import CheckpointView, ExceptionView
from holdfast.statebackends.layout import METADATA_NAME

NEAR_MS = 5_000
"""A failure of the job explains a checkpoint that failed so near to it."""

_TEXTS: dict[str, tuple[CauseKind, str]] = {
    FailureReason.LEADER_CHANGED: (
        CauseKind.LEADER_CHANGED,
        "another coordinator leads the job: what was pending under the old leader is aborted; the job runs on",
    ),
    FailureReason.SUBSUMED: (CauseKind.SUBSUMED, "a newer checkpoint was complete first, so this one was not needed any more"),
    FailureReason.END_OF_INPUT: (
        CauseKind.END_OF_INPUT,
        "a subtask came to the end of its input before it acknowledged; the next checkpoint goes without it",
    ),
    FailureReason.SUSPENDED: (CauseKind.NEW_SUBMISSION, "a newer submission took the job over"),
    FailureReason.COORDINATOR_SHUTDOWN: (CauseKind.STOPPED, "the job was cancelled, or has failed"),
    FailureReason.JOB_FINISHING: (CauseKind.ENDING, "the job was about to end"),
    FailureReason.NOT_ALL_TASKS_RUNNING: (CauseKind.NOT_ALL_RUNNING, "not all tasks ran when it was to be triggered"),
    FailureReason.TASK_NOT_READY: (CauseKind.TASK_NOT_READY, "a task was not ready for it: it still restored its state"),
    FailureReason.FINALIZE_FAILURE: (CauseKind.STORAGE_FAILED, f"its {METADATA_NAME} could not be stored"),
    FailureReason.TRIGGER_FAILURE: (CauseKind.STORAGE_FAILED, "its id could not be claimed in storage"),
    FailureReason.IN_FLIGHT_LIMIT: (CauseKind.IN_FLIGHT_LIMIT, "a subtask had more records in flight than one may hold"),
    FailureReason.IO_EXCEPTION: (CauseKind.STORAGE_FAILED, "storage failed"),
}
_FULL = ("No space left", "ENOSPC", "StorageFullError", "Disk quota exceeded")
_STORAGE = (
    "StorageUnavailableError",
    "OSError",
    "IOError",
    "AmbiguousWriteError",
    "ConnectionError",
    "TimeoutError",
    "PermissionError",
)


def explain_failed(facts: Facts, checkpoint: CheckpointView) -> Chain:
    reason, message = checkpoint.failure_reason or "", checkpoint.failure_message or ""
    hook = hook_cause(facts, checkpoint)
    if reason == FailureReason.EXPIRED:
        return _expired(facts, checkpoint, hook)
    if reason == FailureReason.JOB_FAILOVER:
        return _failed_over(facts, checkpoint, message)
    if hook is not None:
        return Chain([hook])
    if reason in (FailureReason.DECLINED, FailureReason.ASYNC_EXCEPTION, FailureReason.IO_EXCEPTION):
        return _declined(reason, message)
    if reason == FailureReason.TRIGGER_FAILURE and checkpoint.num_subtasks:  # it had its id: a record from before hooks were named
        return Chain([Cause(CauseKind.NOT_KNOWN, "its tasks were not triggered" + _quoted(message, reason))])
    kind, text = _TEXTS.get(reason, (CauseKind.NOT_KNOWN, f"its reason is {shown(reason) or 'not known'}"))
    return Chain([Cause(kind, text + _quoted(message, reason))])


def _quoted(message: str, reason: str) -> str:
    """What is on record, if that is more than the reason."""
    return f": {shown(message, TEXT_BYTES_MAX)}" if message and message != reason else ""


def _expired(facts: Facts, checkpoint: CheckpointView, hook: Cause | None) -> Chain:
    """`hook`: what its master hooks did; then no task was triggered, and none is asked why it has not acknowledged."""
    age_ms = checkpoint.failure_ms - checkpoint.trigger_ms
    text = f"it was not complete after {duration_text(age_ms)}; checkpoint_timeout_ms is {facts.config.checkpoint_timeout_ms}"
    if hook is not None:
        return Chain([Cause(CauseKind.EXPIRED, text), hook])
    missing = missing_subtasks(checkpoint)
    if not missing:
        return Chain([Cause(CauseKind.EXPIRED, text + _quoted(checkpoint.failure_message or "", "expired"))])
    if facts.record is not None or _attempt_changed(facts, checkpoint):
        count = max(facts.record.missing, len(missing)) if facts.record is not None else len(missing)
        named = ", ".join(str(facts.place(each.vertex, each.subtask)) for each in missing[:5])
        more = f" and {count - 5} more" if count > 5 else ""
        lost = Cause(CauseKind.MISSING_ACKS, f"{count} of {checkpoint.num_subtasks} acknowledgements were missing: {named}{more}")
        why = "the job has restarted since: what they did then is not known any more"
        if facts.record is not None:
            why = "what they did then is not on record"
        return Chain([Cause(CauseKind.EXPIRED, text), lost, Cause(CauseKind.NOT_KNOWN, why)], missing[0].vertex)
    is_seen_before = facts.job.now_ms < checkpoint.failure_ms  # the figures are of the time in which it was pending
    chain = explain_missing_acks(facts, checkpoint, missing, ended_ms=-1 if is_seen_before else checkpoint.failure_ms)
    chain.causes.insert(0, Cause(CauseKind.EXPIRED, text))
    return chain


def _attempt_changed(facts: Facts, checkpoint: CheckpointView) -> bool:
    """The tasks that run now began after it had failed."""
    starts = [vertex.start_ms for vertex in facts.job.vertices if vertex.start_ms >= 0]
    return bool(starts) and min(starts) > checkpoint.failure_ms


def _declined(reason: str, message: str) -> Chain:
    """`message` names the subtask, and says why."""
    told = shown(message, TEXT_BYTES_MAX)
    head = "a subtask declined it" if reason == FailureReason.DECLINED else "the asynchronous part of a subtask failed"
    if reason == FailureReason.IO_EXCEPTION:
        head = "storage failed"
    if any(word in message for word in _FULL):
        return Chain(
            [Cause(CauseKind.DECLINED, f"{head}: {told}"), Cause(CauseKind.STORAGE_FULL, "there is no space left to store state")]
        )
    if "memory_snapshot_bytes_max" in message:
        text = "the small tables of a subtask have more bytes than memory_snapshot_bytes_max"
        return Chain([Cause(CauseKind.DECLINED, f"{head}: {told}"), Cause(CauseKind.STATE_TOO_LARGE, text)])
    if reason == FailureReason.IO_EXCEPTION or any(word in message for word in _STORAGE):
        return Chain([Cause(CauseKind.STORAGE_FAILED, f"{head}: {told}")])
    return Chain([Cause(CauseKind.DECLINED, f"{head}: {told}")])


def _failed_over(facts: Facts, checkpoint: CheckpointView, message: str) -> Chain:
    """The job failed over while it was pending."""
    chain = Chain([Cause(CauseKind.JOB_FAILED_OVER, "the job failed over while it was pending" + _quoted(message, "job_failure"))])
    failure = nearest_failure(facts, checkpoint.failure_ms)
    if failure is not None:
        return chain.add(failure_cause(facts, failure))
    if message.startswith("WorkerLost"):
        return chain.add(Cause(CauseKind.LOST_WORKER, shown(message, TEXT_BYTES_MAX)))
    return chain


def nearest_failure(facts: Facts, at_ms: int) -> ExceptionView | None:
    near = [each for each in facts.job.exceptions if abs(each.timestamp_ms - at_ms) <= NEAR_MS]
    return min(near, key=lambda each: abs(each.timestamp_ms - at_ms), default=None)


def failure_cause(facts: Facts, failure: ExceptionView) -> Cause:
    """A failure of the job: of a worker, or of a task."""
    told = shown(failure.error, TEXT_BYTES_MAX)
    if failure.error.startswith("WorkerLost"):
        slot = failure.worker.removeprefix("slot-")
        worker = facts.workers.get(int(slot)) if slot.isdecimal() and len(slot) < 10 else None
        host = f" on {shown(worker.host)}" if worker is not None and worker.host else ""
        return Cause(CauseKind.LOST_WORKER, f"the worker in slot {slot}{host} was lost: {told}" if slot else told)
    if failure.vertex:
        place = facts.place(failure.vertex, failure.subtask)
        return Cause(CauseKind.TASK_FAILED, f"{place} failed: {told}", place)
    return Cause(CauseKind.TASK_FAILED, told)
