"""Failures of a job: what is shown of them, and whether the restart strategy allows another attempt. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.coordinator.views import ExceptionView
from holdfast.statebackends import errors

EXCEPTIONS_MAX = 50
"""Newest failures kept for users."""

_FINAL_KINDS = (
    errors.InvalidConfigError,
    errors.FencedError,
    errors.CorruptStateError,
    errors.RestoreError,
    errors.CommittableLostError,
    errors.UndeclaredStateError,
    errors.InputChangedError,
    errors.TooManyRowsSkippedError,
)
"""With their subclasses: what fails every further attempt in the same way, or is for the user to decide."""

_USER_CODE_KINDS = (
    errors.UserFunctionError,
    errors.InvalidKeyError,
    errors.InvalidTimestampError,
    errors.StateValueError,
    errors.StateOverflowError,
)
"""With their subclasses: what the job's functions make of a row. A restart comes to the same row again."""


def is_final(error: str) -> bool:
    """Whether a failure, given as `ErrorClass: message`, is one that no restart can mend: the job fails at once."""
    return _is_one_of(error, _FINAL_KINDS)


def is_of_user_code(error: str) -> bool:
    """Whether a failure, given as `ErrorClass: message`, is that of a function on a row, which is likely to come again."""
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
        """A task failed in a way that no restart can mend. What the coordinator finds by itself names no error class."""
        return is_final(self.error)

    @property
    def user_frames(self) -> str:
        """What stands below the error in a traceback that tells of the user's code alone."""
        return self.traceback[len(self.error) :].strip("\n") if self.traceback.startswith(self.error) else ""


class ExceptionHistory:
    """Counts the failovers of one submission and remembers the newest failures."""

    def __init__(self, strategy: RestartStrategy, restarts: int) -> None:
        self._strategy = strategy
        self.restarts = restarts
        self._exceptions: deque[ExceptionView] = deque(maxlen=EXCEPTIONS_MAX)
        self._merged = False
        self._is_first = True
        """No failure has come since the last checkpoint."""
        self._delays = 0
        """Restarts since then that were delayed."""
        self.newest: Failure | None = None

    def record(self, failure: Failure, attempt: int, wall_ms: int) -> None:
        """Show a failure."""
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

    def restart_delay_ms(self, failure: Failure, *, same_failure: bool) -> int | None:
        """Count a failover; the delay before the next attempt, or None if the strategy allows none.

        A process that died before it ever reported the attempt is the old failure seen again: it is not counted, once."""
        if same_failure and not self._merged:
            self._merged = True
            return 0
        if self._strategy.kind == "none" or self.restarts >= self._strategy.attempts_max:
            return None
        self.restarts += 1
        is_first, self._is_first = self._is_first, False
        if is_first and self._strategy.immediate_first and not is_of_user_code(failure.error):
            return 0
        self._delays += 1
        return self._strategy.delay_after(self._delays - 1)

    def progressed(self) -> None:
        """A checkpoint completed: what fails from now on does not fail in the same place for ever."""
        self._is_first = True
        self._delays = 0

    def recovered(self) -> None:
        """Every task runs: the next failure is a new one."""
        self._merged = False

    def views(self) -> tuple[ExceptionView, ...]:
        """Newest first."""
        return tuple(self._exceptions)
