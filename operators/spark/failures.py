"""What a driver says of a failure of its job: the cause, the user's lines under it, and what changes what follows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.operators.task.frames import with_source_lines

_ROWS = ("UserFunctionError", "SchemaMismatchError", "InvalidKeyError", "InvalidTimestampError", "StateValueError")
"""Kinds of error that are of one row: the restarted job comes to it again."""


def frames_of_failure(error: str, exceptions: Mapping[str, Any]) -> str:
    """The user's frames of a failure `ErrorClass: message`, as lines below it; empty if it has none, or is no longer on record.

    `exceptions`: GET /jobs/:jobid/exceptions. A traceback of ours is for the log and for REST."""
    for entry in exceptions.get("exceptionHistory", {}).get("entries", ()):
        told = str(entry.get("stacktrace") or "")
        if told.startswith(error):
            return with_source_lines(told[len(error) :].strip("\n"))
    return ""


def with_frames(error: str, frames: str) -> str:
    return f"{error}\n{frames}" if frames else error


def restart_hint(error: str, strategy: RestartStrategy) -> str:
    """What follows the failure of a row, and the settings that change it; empty for any other failure."""
    if error.partition(":")[0] not in _ROWS or strategy.kind == "none":
        return ""
    if strategy.kind == "fixed_delay":
        pauses = f"every {_seconds(strategy.delay_ms)}"
    else:
        pauses = f"after {_seconds(strategy.delay_ms)}, then twice as long each time, up to {_seconds(strategy.delay_max_ms)}"
    return (
        f"The job comes to this row again {pauses}. To leave such rows out: on_error=\"skip\" of map, filter, flat_map and "
        'assign_timestamps; to let the job fail: Environment(..., restart="none")'
    )


def _seconds(delay_ms: int) -> str:
    return f"{delay_ms / 1000:g} s"
