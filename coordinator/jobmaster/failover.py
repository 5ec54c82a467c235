"""CORE, part of the job master: the exception history of a job; failures that are final, and failures of the user's code. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from holdfast.coordinator.views import ExceptionView
from holdfast.statebackends import errors

EXCEPTIONS_MAX = 50
"""Newest failures that users see."""

_FINAL_KINDS = (
    errors.InvalidConfigError,
    errors.FencedError,
    errors.CorruptStateError,
    errors.RestoreError,
    errors.CommittableLostError,
    errors.UndeclaredStateError,
    errors.InputChangedError,
    errors.SourceDataLostError,
    errors.TooManyRowsSkippedError,
)
"""With their subclasses: errors that come again in every attempt, or that are for the user to decide."""

_USER_CODE_KINDS = (
    errors.UserFunctionError,
    errors.InvalidKeyError,
    errors.InvalidTimestampError,
    errors.StateValueError,
    errors.StateOverflowError,
    errors.InvalidRecordError,
    errors.InvalidRowError,
)
"""With their subclasses: errors of the job's functions on a row, and of rows that can't be read or written. A restart comes to the
same row again."""


def is_final(error: str) -> bool:
    """Whether no restart can mend a failure, given as `ErrorClass: message`: the job fails at once."""
    return _is_one_of(error, _FINAL_KINDS)


def is_of_user_code(error: str) -> bool:
    """Whether a failure, given as `ErrorClass: message`, is that of a row, in a function or by itself: likely to come again."""
    return _is_one_of(error, _USER_CODE_KINDS)


def _is_one_of(error: str, kinds: tuple[type[errors.HoldfastError], ...]) -> bool:
    kind = errors.ERROR_CLASSES.get(error.partition(":")[0])
    return kind is not None and issubclass(kind, kinds)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed."""

    error: str
    """`ErrorClass: message`."""
    traceback: str = ""
    vertex: str = ""
    subtask: int = -1
    slot: int = -1

    @property
    def is_final(self) -> bool:
        """Whether no restart can mend it. Failures that the coordinator itself detects name no error class, and can be mended."""
        return is_final(self.error)

    @property
    def user_frames(self) -> str:
        """Frames of the user's code below the error, one a line; empty unless the traceback starts with the error."""
        return self.traceback[len(self.error) :].strip("\n") if self.traceback.startswith(self.error) else ""


class ExceptionHistory:
    """The newest failures of one submission."""

    def __init__(self) -> None:
        self._exceptions: deque[ExceptionView] = deque(maxlen=EXCEPTIONS_MAX)
        self.newest: Failure | None = None

    def record(self, failure: Failure, attempt: int, wall_ms: int) -> None:
        """Add a failure to the history."""
        self.newest = failure
        self._exceptions.appendleft(
            ExceptionView(
                error=failure.error,
                traceback=failure.traceback,
                timestamp_ms=wall_ms,
                vertex=failure.vertex,
                subtask=failure.subtask,
                worker=f"slot-{failure.slot}" if failure.slot >= 0 else "",
                attempt=attempt,
            )
        )

    def views(self) -> tuple[ExceptionView, ...]:
        """Newest first."""
        return tuple(self._exceptions)
