"""CORE: what a driver tells its user when it stops waiting for a job, leaves it, or finds it running. Pure texts, a line each."""

from __future__ import annotations

from holdfast.operators.datastream.launcher import Progress


def describe_interrupted(name: str, *, is_scoped: bool, is_submitted: bool) -> str:
    """For who pressed Ctrl-C in `wait`. `is_scoped`: inside of `with`; `is_submitted`: spark-submit gets the same signal from a
    terminal, and Spark ends with it."""
    if is_submitted:
        return f"{name} ends if Ctrl-C ended spark-submit, too: submitted again it goes on from its newest checkpoint"
    until = "its `with` block ends" if is_scoped else "this program ends"
    return f"{name} goes on until {until}: job.wait() waits again, job.stop(folder) or job.cancel() ends it"


def describe_left(name: str, progress: Progress) -> str:
    """For who leaves a job that is not over. A checkpoint may have been completed since the last look."""
    newest = progress.last_checkpoint_id
    where = "where it started, or its first checkpoint" if newest is None else f"its newest checkpoint, {newest} or later"
    return f"{name} is left, and its workers go: execute() goes on from {where}"


def describe_attached(name: str, progress: Progress) -> str:
    """For who executes a job that this program runs already."""
    checkpoint = "" if progress.last_checkpoint_id is None else f", checkpoint {progress.last_checkpoint_id}"
    return f"{name} runs already in this program, with this plan ({progress.state}{checkpoint}): attached to it"


def describe_ending(name: str) -> str:
    """For who executes a job that this program runs, and that was told to end."""
    return f"{name} runs already in this program, and is ending: execute() waits for its end"


def describe_replaced(name: str, difference: str) -> str:
    """For who executes a job that this program runs with another plan."""
    return f"{name} runs already in this program, with another plan: {difference}; the new plan takes over"
