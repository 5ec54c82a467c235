"""Whether a checkpoint failed, waits or took long for the job's master hooks, or an attempt waits for them, and for which. Pure.

Hooks are called before any task is triggered: while they are, no subtask, host or storage is to blame. What they do is not known
here; which one it was, and whether it failed or gave no answer, is."""

from __future__ import annotations

from holdfast.coordinator.explain.facts import TEXT_BYTES_MAX, Facts, shown
from holdfast.coordinator.explain.records import Cause, CauseKind
from holdfast.coordinator.explain.slow import MOST, Chain
from holdfast.coordinator.figures import duration_text
from holdfast.coordinator.views import CheckpointView


def hook_cause(facts: Facts, checkpoint: CheckpointView) -> Cause | None:
    """What is known of the master hooks that a checkpoint failed for; None if it did not, or nothing on record says so."""
    failure = checkpoint.hook_failure
    if failure is None:
        return None
    told = shown(checkpoint.failure_message or "", TEXT_BYTES_MAX)
    if failure.timed_out:
        text = f"{told}; no task was triggered, and master_hook_timeout_ms is {facts.config.master_hook_timeout_ms}"
        return Cause(CauseKind.MASTER_HOOK_TIMEOUT, text)
    return Cause(CauseKind.MASTER_HOOK_FAILED, f"{told}; no task was triggered")


def explain_awaited_hooks(facts: Facts, checkpoint: CheckpointView) -> Chain | None:
    """Of a checkpoint in progress; None if it does not wait for master hooks."""
    hooks = checkpoint.hooks
    if hooks is None or not hooks.missing:
        return None
    waited = duration_text(max(0, facts.job.now_ms - checkpoint.trigger_ms))
    text = f"master hook {_names(hooks.missing)} has not answered for {waited}, and no task is triggered before"
    return Chain([Cause(CauseKind.SLOW_MASTER_HOOK, f"{text}; master_hook_timeout_ms is {facts.config.master_hook_timeout_ms}")])


def explain_slow_hooks(checkpoint: CheckpointView) -> Chain | None:
    """Of a completed one that took long; None if its master hooks did not take most of its time."""
    hooks = checkpoint.hooks
    if hooks is None or hooks.took_ms <= MOST * max(0, checkpoint.end_to_end_ms):
        return None
    text = f"its master hooks took {duration_text(hooks.took_ms)} of that, before any task was triggered; {_names((hooks.last,))}"
    return Chain([Cause(CauseKind.SLOW_MASTER_HOOK, f"{text} answered last")])


def restore_cause(facts: Facts) -> Cause | None:
    """Of an attempt that is not deployed; None if it does not wait for master hooks, or for workers first."""
    waits = facts.job.hook_restore
    if waits is None or not all(worker.registered for worker in facts.job.workers):
        return None
    waited = duration_text(max(0, facts.job.now_ms - waits.since_ms))
    text = f"master hook {_names(waits.missing)} is not back at the checkpoint after {waited}, and no task is deployed before"
    tries = f" ({waits.failed_tries} calls of hooks have failed)" if waits.failed_tries else ""
    bound = f"; master_hook_timeout_ms is {facts.config.master_hook_timeout_ms}"
    return Cause(CauseKind.WAITS_FOR_MASTER_HOOK, text + tries + bound)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(repr(shown(name)) for name in names)
