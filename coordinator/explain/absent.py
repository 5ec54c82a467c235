"""Why no checkpoint is triggered: what its schedule waits for. Pure."""

from __future__ import annotations

from holdfast.barriers.messages import TaskState
from holdfast.coordinator.explain.facts import TEXT_BYTES_MAX, Facts, shown
from holdfast.coordinator.explain.failed import failure_cause
from holdfast.coordinator.explain.master_hooks import restore_cause
from holdfast.coordinator.explain.records import Cause, CauseKind
from holdfast.coordinator.explain.slow import Chain
from holdfast.coordinator.figures import duration_text
from holdfast.coordinator.views import ScheduleView

_STATES: dict[str, tuple[CauseKind, str]] = {
    "CREATED": (CauseKind.WAITS_FOR_WORKERS, "the job waits for its workers"),
    "RECONCILING": (CauseKind.RECONCILING, "a new leader waits for the job's workers to register with it"),
    "FAILING": (CauseKind.STOPPED, "the job fails"),
    "CANCELLING": (CauseKind.STOPPED, "the job is being cancelled"),
    "SUSPENDED": (CauseKind.LEADER_CHANGED, "another coordinator leads the job"),
    "UNKNOWN": (CauseKind.STOPPED, "no coordinator that this one knows leads the job"),
}


def explain_absent(facts: Facts) -> Chain | None:
    """The chain; None if none is due yet, and nothing holds the next one up."""
    by_state = _of_state(facts)
    if by_state is not None:
        return by_state
    schedule = facts.situation.schedule
    if schedule is None:
        return Chain([Cause(CauseKind.STOPPED, "nobody schedules checkpoints of this job here")])
    cause = _of_schedule(facts, schedule)
    return Chain([cause]) if cause is not None else None


def _of_state(facts: Facts) -> Chain | None:
    job = facts.job
    state = job.overview.state
    if job.overview.is_terminal:
        why = f": {shown(job.failure, TEXT_BYTES_MAX)}" if job.failure else ""
        return Chain([Cause(CauseKind.STOPPED, f"the job has ended, {state}{why}")])
    if state == "RESTARTING":
        return _restarting(facts)
    hook = restore_cause(facts) if state == "CREATED" else None
    if hook is not None:
        return Chain([hook])
    if state in _STATES:
        kind, text = _STATES[state]
        absent = [worker.slot for worker in job.workers if not worker.registered]
        slots = f"; slots without one: {', '.join(map(str, absent[:10]))}" if absent and state in ("CREATED", "RECONCILING") else ""
        return Chain([Cause(kind, text + slots)])
    return None


def _restarting(facts: Facts) -> Chain:
    job = facts.job
    failure = failure_cause(facts, job.exceptions[0]) if job.exceptions else None
    if job.restarts_at_ms > job.now_ms:
        due = f" in {duration_text(job.restarts_at_ms - job.now_ms)}"
    elif (hook := restore_cause(facts)) is not None:
        why = f", since {failure.text}" if failure is not None else ""
        return Chain([Cause(CauseKind.RESTARTING, f"the job restarts{why}"), hook])
    else:
        due = ", once every slot has a worker"
    chain = Chain([Cause(CauseKind.RESTARTING, f"the job restarts{due}")])
    return chain.add(failure) if failure is not None else chain


def _of_schedule(facts: Facts, schedule: ScheduleView) -> Cause | None:
    if schedule.is_ending:
        return Cause(CauseKind.ENDING, "the checkpoint that ends the job has begun, and none follows it")
    if schedule.tasks_refuse:
        return _not_all_running(facts)
    if schedule.interval_ms is None:
        if facts.config.checkpoint_interval_ms is not None and facts.situation.is_processing_backlog:
            text = "a source processes a backlog, and checkpoint_interval_during_backlog_ms is 0: none is taken meanwhile"
            return Cause(CauseKind.BACKLOG, text)
        return Cause(CauseKind.PAUSED, "checkpoint_interval_ms is none: periodic checkpoints are paused")
    return _held_up(facts, schedule)


def _held_up(facts: Facts, schedule: ScheduleView) -> Cause | None:
    """One is due, or would be but for the pause."""
    due = schedule.next_in_ms is None or schedule.next_in_ms <= 0
    full = schedule.pending >= facts.config.max_concurrent_checkpoints
    if full and schedule.savepoints:
        return Cause(CauseKind.SAVEPOINT_PENDING, "a savepoint is under way, and counts among max_concurrent_checkpoints")
    if schedule.pause_left_ms > 0 and facts.config.min_pause_ms > (schedule.interval_ms or 0):
        text = f"min_pause_ms is {facts.config.min_pause_ms}: the next one is not before {duration_text(schedule.pause_left_ms)}"
        return Cause(CauseKind.MINIMUM_PAUSE, text)
    if full and schedule.pending:
        return Cause(
            CauseKind.CHECKPOINT_PENDING, f"{schedule.pending} under way, which is all that max_concurrent_checkpoints allows"
        )
    if schedule.is_preparing:
        return Cause(CauseKind.CLAIMING, "its id is being claimed in storage") if due else None
    if due and schedule.deleting > facts.config.max_concurrent_checkpoints:
        return Cause(
            CauseKind.DELETIONS, f"{schedule.deleting} dropped checkpoints are still being deleted: storage is slow to delete"
        )
    return None


def _not_all_running(facts: Facts) -> Cause:
    other = [
        (vertex.vertex_id, each)
        for vertex in facts.job.vertices
        for each in vertex.subtasks
        if each.state not in (TaskState.RUNNING, TaskState.FINISHED)
    ]
    if not other:
        return Cause(CauseKind.NOT_ALL_RUNNING, "not all tasks run, or all have finished")
    vertex_id, first = other[0]
    place = facts.place(vertex_id, first.subtask)
    more = f", and {len(other) - 1} more do not run" if len(other) > 1 else ""
    return Cause(CauseKind.NOT_ALL_RUNNING, f"{place} is {first.state.value}{more}", place)
