"""CORE: lines that a driver prints for its user: failures of a job with the user's frames and a hint, and notices about a job that
the driver attaches to, waits for, replaces or leaves. Pure texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.operators.datastream.launcher import Progress
from holdfast.operators.task.user_failures import with_source_lines

_ROWS = (
    "UserFunctionError",
    "SchemaMismatchError",
    "PartitionOutOfRangeError",
    "InvalidKeyError",
    "InvalidTimestampError",
    "StateValueError",
    "InvalidRecordError",
    "InvalidRowError",
)
"""Kinds of error caused by one row, which the restarted job reads again."""
_LEAVE_OUT = {
    "InvalidRecordError": "To take such records out of the stream: side_output(hf.DEAD_LETTERS) of it",
    "InvalidRowError": "To leave such rows out: filter() in front of what refuses them",
}
_SKIP = 'To leave such rows out: on_error="skip" of map, filter, flat_map and assign_timestamps'


def frames_of_failure(error: str, exceptions: Mapping[str, Any]) -> str:
    """The user's frames of a failure `ErrorClass: message`, as lines; empty if it has none or is no longer on record.

    `exceptions`: GET /jobs/:jobid/exceptions. Tracebacks of Holdfast's own code are left to the log and to REST."""
    for entry in exceptions.get("exceptionHistory", {}).get("entries", ()):
        trace = str(entry.get("stacktrace") or "")
        if trace.startswith(error):
            return with_source_lines(trace[len(error) :].strip("\n"))
    return ""


def with_frames(error: str, frames: str) -> str:
    return f"{error}\n{frames}" if frames else error


def restart_hint(error: str, strategy: RestartStrategy) -> str:
    """Hint after the failure of a row: when it repeats, and the settings that change this; empty for any other failure."""
    kind = error.partition(":")[0]
    if kind not in _ROWS or strategy.kind == "none":
        return ""
    if strategy.kind == "exponential_delay":
        factor = "twice" if strategy.backoff_multiplier == 2 else f"{strategy.backoff_multiplier:g} times"
        pauses = f"after {_seconds(strategy.delay_ms)}, then {factor} as long each time, up to {_seconds(strategy.delay_max_ms)}"
    else:
        pauses = f"every {_seconds(strategy.delay_ms)}"
    if strategy.kind == "failure_rate":
        limit = f"{strategy.failures_per_interval_max} within {_seconds(strategy.failure_rate_interval_ms)}"
        pauses += f", until a failure comes after {limit}"
    leave_out = _LEAVE_OUT.get(kind, _SKIP)
    return f'The job comes to this row again {pauses}. {leave_out}; to let the job fail: Environment(..., restart="none")'


def _seconds(delay_ms: int) -> str:
    return f"{delay_ms / 1000:g} s"


def describe_interrupted(name: str, *, is_scoped: bool, is_submitted: bool) -> str:
    """Printed after Ctrl-C in `wait`. `is_scoped`: inside of `with`; `is_submitted`: spark-submit gets the same signal from a
    terminal, and Spark ends with it."""
    if is_submitted:
        return f"{name} ends if Ctrl-C ended spark-submit, too: submitted again it goes on from its newest checkpoint"
    until = "its `with` block ends" if is_scoped else "this program ends"
    return f"{name} goes on until {until}: job.wait() waits again, job.stop(folder) or job.cancel() ends it"


def describe_left(name: str, progress: Progress) -> str:
    """Printed when a driver leaves a job that is not over. A checkpoint may have been completed since the last poll."""
    newest = progress.last_checkpoint_id
    where = "where it started, or its first checkpoint" if newest is None else f"its newest checkpoint, {newest} or later"
    return f"{name} is left, and its workers go: execute() goes on from {where}"


def describe_attached(name: str, progress: Progress) -> str:
    """Printed when a program executes a job that it runs already."""
    checkpoint = "" if progress.last_checkpoint_id is None else f", checkpoint {progress.last_checkpoint_id}"
    return f"{name} runs already in this program, with this plan ({progress.state}{checkpoint}): attached to it"


def describe_ending(name: str) -> str:
    """Printed when a program executes a job that it runs and has asked to end."""
    return f"{name} runs already in this program, and is ending: execute() waits for its end"


def describe_replaced(name: str, difference: str) -> str:
    """Printed when a program executes a job that it runs with a different plan."""
    return f"{name} runs already in this program, with another plan: {difference}; the new plan takes over"
