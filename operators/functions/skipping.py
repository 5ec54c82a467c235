"""What becomes of a row on which a function raises: the job fails, or the row is left out, counted, and told of, up to a limit.

Only functions of one row have the choice: they leave nothing behind. A function with state is not asked for one row less, since
what it had already put into its state for that row would stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from holdfast.barriers.messages import SKIPPED_REASON_BYTES_MAX, clip, printable
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.operators.task.user_failures import error_line, raise_told, told_error
from holdfast.statebackends.errors import GraphError, HoldfastError, TooManyRowsSkippedError, UserFunctionError

log = logging.getLogger("holdfast.functions")

ON_ERROR = ("fail", "skip")


def is_skipping(on_error: str, operator: str) -> bool:
    """Whether `on_error=` says to leave the row out. Raises GraphError for what is no choice."""
    if on_error not in ON_ERROR:
        choices = " or ".join(map(repr, ON_ERROR))
        message = f"operator {operator!r}: on_error is {on_error!r}, must be {choices}"
        raise GraphError(message, operator=operator, setting="on_error")
    return on_error == "skip"


class SkippedRows:
    """Counts the rows that one operator of one subtask leaves out.

    The limit is for those since the last completed checkpoint: a trickle goes on for ever, and an input of which nothing fits
    ends the job. A restart goes back to that checkpoint, and so does the count."""

    def __init__(self, context: OperatorContext) -> None:
        self._context = context
        self._since_checkpoint = 0

    def skip(self, tell: Callable[[], HoldfastError]) -> None:
        """A row is left out; `tell` makes its story, and is called for the few that are told. Raises TooManyRowsSkippedError."""
        counters, limit = self._context.counters, self._context.skipped_rows_max
        counters.rows_skipped += 1
        self._since_checkpoint += 1
        if limit is not None and self._since_checkpoint > limit:
            error = tell()
            raise self._too_many(limit, error) from error
        if _is_told(counters.rows_skipped):
            self._tell(tell(), counters.rows_skipped)

    def _tell(self, error: HoldfastError, count: int) -> None:
        frames = error.fields.get("frames")
        told = f"{error_line(error)}\n{frames}" if frames else error_line(error)
        log.warning("on_error='skip' left out a row, %d by now: %s", count, told)
        if count == 1:
            self._context.counters.first_skipped = clip(printable(error.message), SKIPPED_REASON_BYTES_MAX)

    def _too_many(self, limit: int, error: HoldfastError) -> TooManyRowsSkippedError:
        context = self._context
        return TooManyRowsSkippedError(
            f"operator {context.uid!r}, subtask {context.subtask}: on_error='skip' has left out {limit} rows since the last "
            f"checkpoint, which is all that skipped_rows_max allows; the next one: {error.message}",
            operator=context.uid,
            subtask=context.subtask,
            limit=limit,
            frames=error.fields.get("frames", ""),
        )

    def checkpoint_completed(self) -> None:
        self._since_checkpoint = 0


class SkippingOperator(Operator):
    """Base of operators of one row at a time, which may leave rows out."""

    skips: bool = False
    _skipped: SkippedRows | None = None

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._skipped = SkippedRows(context) if self.skips else None

    def share_skipped(self, other: SkippingOperator) -> None:
        """Count rows with another function of the same operator, whose limit is for both."""
        self._skipped = other._skipped

    def _refuse(self, tell: Callable[[], HoldfastError], cause: Exception | None = None) -> None:
        """A row can't be taken, for the reason that `tell` makes. Returns if it is left out; else raises that error."""
        if self._skipped is None:
            raise tell() from cause
        self._skipped.skip(tell)

    def _failed(self, error: Exception, function: Callable[[Any], Any], record: Any) -> None:
        """`function` raised on a row. Returns if the row is left out: what is no row's fault never is."""
        where = {"operator": self.context.uid, "subtask": self.context.subtask, "function": function, "record": record}
        if self._skipped is None or (isinstance(error, HoldfastError) and not isinstance(error, UserFunctionError)):
            raise_told(error, **where)
        self._skipped.skip(lambda: told_error(error, **where))

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if self._skipped is not None:
            self._skipped.checkpoint_completed()


def _is_told(count: int) -> bool:
    """The 1st, 10th, 100th ...: a log of each would be as long as the input."""
    return count in _TOLD


_TOLD: frozenset[int] = frozenset(10**exponent for exponent in range(19))

