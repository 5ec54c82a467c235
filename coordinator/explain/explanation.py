"""The explanation of one checkpoint: which one, how it went, why, and what to change. Pure: no I/O, clock or logger.

A healthy checkpoint is explained, too, and raises no alarm. The cost is O(subtasks)."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.barriers.messages import CheckpointKind, SubtaskKey
from holdfast.coordinator.explain.absent import explain_absent
from holdfast.coordinator.explain.advice import advise
from holdfast.coordinator.explain.facts import Facts, shown, snapshot_name
from holdfast.coordinator.explain.failed import explain_failed
from holdfast.coordinator.explain.functions import explain_function
from holdfast.coordinator.explain.kept import show_kept
from holdfast.coordinator.explain.master_hooks import explain_slow_hooks
from holdfast.coordinator.explain.pending import explain_pending, missing_subtasks
from holdfast.coordinator.explain.records import Cause, CauseKind, Explanation, SettingChange, Situation
from holdfast.coordinator.explain.slow import Chain, explain_slow, last_acknowledged
from holdfast.coordinator.figures import duration_text
from holdfast.coordinator.views import CheckpointView

_EXPECTED = frozenset({CauseKind.SUBSUMED, CauseKind.END_OF_INPUT, CauseKind.ENDING, CauseKind.NEW_SUBMISSION, CauseKind.STOPPED})
"""First causes that are no fault, of checkpoints that failed or that are missing, unless the job has failed."""
_MORE_TIME_IS_IN_VAIN = frozenset(
    {
        CauseKind.LOST_WORKER,
        CauseKind.HUNG_WORKER,
        CauseKind.TASK_NOT_RUNNING,
        CauseKind.OUTSIDE,
        CauseKind.LONG_CALL,
        CauseKind.NOT_KNOWN,
        CauseKind.NO_LONGER_SEEN,
    }
)
"""First causes with which a longer timeout is not known to help."""
_FAILED = ("FAILED", "FAILING", "UNKNOWN")


def choose_checkpoint(situation: Situation) -> int | None:
    """Id of what is worth an explanation now: a late pending checkpoint; None for one that is missing and held up; the newest that
    ended; a pending one; None for none yet. `situation.checkpoint` is not looked at."""
    facts = Facts(situation)
    pending = [view for view in situation.stats.history if view.status == "IN_PROGRESS"]
    ended = [view for view in situation.stats.history if view.status != "IN_PROGRESS"]
    late = [view for view in pending if facts.is_slow(view, facts.job.now_ms - view.trigger_ms)]
    if late:
        return min(view.checkpoint_id for view in late)
    if not pending and explain_absent(facts) is not None:
        return None
    shown_ids = [view.checkpoint_id for view in (ended or pending)]
    return max(shown_ids, default=None)


def explain(situation: Situation) -> Explanation:
    """Explain `situation.checkpoint`, or why there is none; as it was explained when it ended, if that was kept."""
    facts, checkpoint = Facts(situation), situation.checkpoint
    if situation.kept is not None:
        return show_kept(facts, situation.kept)
    if checkpoint is None:
        return _absent(facts)
    if checkpoint.status == "FAILED":
        return _failed(facts, checkpoint)
    if checkpoint.status == "IN_PROGRESS":
        return _pending(facts, checkpoint)
    return _completed(facts, checkpoint)


def _absent(facts: Facts) -> Explanation:
    schedule, chain = facts.situation.schedule, explain_absent(facts)
    if chain is None:
        due = schedule.next_in_ms if schedule is not None else None
        when = f"in {duration_text(due)}" if due is not None and due > 0 else "at once"
        text = f"nothing holds it up: it is due {when}"
        return _explanation(facts, None, "missing", "the next checkpoint is not due yet", Chain([Cause(CauseKind.USUAL, text)]))
    summary = "no checkpoint is triggered"
    cut = facts.situation.cut  # as health has it: the newest on record may be deleted, as of a job that was stopped
    if cut is not None:
        name = cut.checkpoint_id if cut.kind is CheckpointKind.CHECKPOINT else snapshot_name(cut)
        summary += f"; the newest completed one, {name}, began {duration_text(max(0, facts.job.now_ms - cut.timestamp_ms))} ago"
    return _explanation(facts, None, "missing", summary, chain, advise(facts, chain.causes[-1].kind))


def _failed(facts: Facts, checkpoint: CheckpointView) -> Explanation:
    chain = explain_failed(facts, checkpoint)
    name, after_ms = _name(checkpoint), checkpoint.failure_ms - checkpoint.trigger_ms
    after = f" after {duration_text(after_ms)}" if checkpoint.failure_ms >= 0 and after_ms >= 0 else ""
    summary = f"{name} failed{after}: {shown(checkpoint.failure_reason or 'no reason is on record')}"
    setting = advise(facts, chain.causes[-1].kind, vertex_id=chain.vertex_id, duration_ms=max(0, after_ms))
    if setting is None and chain.causes[0].kind is CauseKind.EXPIRED and _only_takes_long(chain):
        setting = advise(facts, CauseKind.EXPIRED)
    if chain.causes[0].kind is CauseKind.EXPIRED:
        chain = _with_function(facts, chain, missing_subtasks(checkpoint))
    return _explanation(facts, checkpoint, "failed", summary, chain, setting)


def _with_function(facts: Facts, chain: Chain, asked_about: Collection[SubtaskKey]) -> Chain:
    """With the function in which one of these subtasks was, if its worker was asked."""
    function = explain_function(facts, asked_about)
    return chain.add(function) if function is not None else chain


def _only_takes_long(chain: Chain) -> bool:
    """More time would help: why it was late is known, and nothing is gone that it would wait for."""
    return chain.causes[-1].kind not in _MORE_TIME_IS_IN_VAIN


def _pending(facts: Facts, checkpoint: CheckpointView) -> Explanation:
    age_ms = max(0, facts.job.now_ms - checkpoint.trigger_ms)
    acks = f"{checkpoint.num_acknowledged_subtasks} of {checkpoint.num_subtasks} subtasks have acknowledged"
    summary = f"{_name(checkpoint)} has been in progress for {duration_text(age_ms)}; {acks}"
    if not facts.is_slow(checkpoint, age_ms):
        return _explanation(facts, checkpoint, "pending", summary, _usual(facts, checkpoint))
    chain = explain_pending(facts, checkpoint)
    setting = advise(facts, chain.causes[-1].kind, vertex_id=chain.vertex_id, duration_ms=age_ms)
    return _explanation(facts, checkpoint, "pending", summary, _with_function(facts, chain, missing_subtasks(checkpoint)), setting)


def _completed(facts: Facts, checkpoint: CheckpointView) -> Explanation:
    duration_ms = checkpoint.end_to_end_ms
    summary = f"{_name(checkpoint)} completed" + (f" in {duration_text(duration_ms)}" if duration_ms >= 0 else "")
    median_ms = facts.median(checkpoint.checkpoint_id, lambda phases: phases.end_to_end_ms)
    if median_ms >= 0:
        summary += f"; usually it takes {duration_text(median_ms)}"
    if not facts.is_slow(checkpoint, duration_ms):
        return _explanation(facts, checkpoint, "completed", summary, _usual(facts, checkpoint))
    chain = explain_slow_hooks(checkpoint) or explain_slow(facts, checkpoint)
    setting = advise(facts, chain.causes[-1].kind, vertex_id=chain.vertex_id, duration_ms=duration_ms)
    last = last_acknowledged(facts, checkpoint)
    chain = _with_function(facts, chain, [last] if last is not None else [])
    return _explanation(facts, checkpoint, "completed", summary, chain, setting)


def _usual(facts: Facts, checkpoint: CheckpointView) -> Chain:
    if checkpoint.end_to_end_ms < 0 and checkpoint.status == "COMPLETED":
        text = "it is complete; its phases are neither known here nor in the job's history"
        return Chain([Cause(CauseKind.USUAL, text)])
    if checkpoint.is_savepoint:
        return Chain([Cause(CauseKind.USUAL, "nothing is wrong with it; savepoints are not compared, since they store everything")])
    count = len(facts.before(checkpoint.checkpoint_id))
    compared = f", beside {count} others that completed" if count >= 3 else "; too few have completed to compare it with"
    return Chain([Cause(CauseKind.USUAL, f"within its usual range{compared}")])


def _name(checkpoint: CheckpointView) -> str:
    return f"{'savepoint' if checkpoint.is_savepoint else 'checkpoint'} {checkpoint.checkpoint_id}"


def _explanation(
    facts: Facts,
    checkpoint: CheckpointView | None,
    subject: str,
    summary: str,
    chain: Chain,
    setting: SettingChange | None = None,
) -> Explanation:
    first = chain.causes[-1].kind
    number = checkpoint.checkpoint_id if checkpoint is not None else -1
    return Explanation(
        job_id=facts.job.overview.job_id,
        job_name=shown(facts.job.overview.name, 255),
        checkpoint_id=number,
        subject=subject,
        is_usual=first is CauseKind.USUAL or (first in _EXPECTED and facts.job.overview.state not in _FAILED),
        summary=summary,
        phases=facts.phases(checkpoint) if checkpoint is not None else (),
        causes=tuple(chain.causes),
        setting=setting,
        compared=len(facts.before(number)),
    )
