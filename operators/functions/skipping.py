"""Handling of a row on which a function raises: the job fails, or the row is left out, counted and logged, up to a limit.

Only functions of one row have the choice, as they keep nothing. A function with state has not: its changes to state for that row
would stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from holdfast.barriers.messages import SKIPPED_REASON_BYTES_MAX, clip, printable
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.operators.task.user_failures import error_line, located_error, raise_located
from holdfast.statebackends.errors import GraphError, HoldfastError, TooManyRowsSkippedError, UserFunctionError

log = logging.getLogger("holdfast.functions")

ON_ERROR = ("fail", "skip")


def is_skipping(on_error: str, operator: str) -> bool:
    """Whether `on_error=` asks to leave such rows out. Raises GraphError for an unknown value."""
    if on_error not in ON_ERROR:
        choices = " or ".join(map(repr, ON_ERROR))
        message = f"operator {operator!r}: on_error is {on_error!r}, must be {choices}"
        raise GraphError(message, operator=operator, setting="on_error")
    return on_error == "skip"


class SkippedRows:
    """Counts the rows left out by one operator of one subtask.

    The limit applies to rows since the last completed checkpoint: a few bad rows now and then never reach it, an input in which no
    row fits ends the job. A restart goes back to that checkpoint, and the count to 0."""

    def __init__(self, context: OperatorContext) -> None:
        self._context = context
        self._since_checkpoint = 0

    def skip(self, describe: Callable[[], HoldfastError]) -> None:
        """Count a row that is left out; `describe` makes its error and is called only for rows that are reported. Raises
        TooManyRowsSkippedError beyond the limit."""
        counters, limit = self._context.counters, self._context.skipped_rows_max
        counters.rows_skipped += 1
        self._since_checkpoint += 1
        if limit is not None and self._since_checkpoint > limit:
            error = describe()
            raise self._too_many(limit, error) from error
        if _is_reported(counters.rows_skipped):
            self._report(describe(), counters.rows_skipped)

    def _report(self, error: HoldfastError, count: int) -> None:
        frames = error.fields.get("frames")
        text = f"{error_line(error)}\n{frames}" if frames else error_line(error)
        log.warning("on_error='skip' left out a row, %d by now: %s", count, text)
        if count == 1:
            self._context.counters.first_skipped = clip(printable(error.message), SKIPPED_REASON_BYTES_MAX)

    def _too_many(self, limit: int, error: HoldfastError) -> TooManyRowsSkippedError:
        context = self._context
        return TooManyRowsSkippedError(
            f"operator {context.uid!r}, subtask {context.subtask}: on_error='skip' has left out {limit} rows since the last "
            f"checkpoint, the limit of skipped_rows_max; the next one: {error.message}",
            operator=context.uid,
            subtask=context.subtask,
            limit=limit,
            frames=error.fields.get("frames", ""),
        )

    def checkpoint_completed(self) -> None:
        self._since_checkpoint = 0


class SkippingOperator(Operator):
    """Base class of operators on single rows that can leave rows out."""

    skips: bool = False
    _skipped: SkippedRows | None = None

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._skipped = SkippedRows(context) if self.skips else None

    def share_skipped(self, other: SkippingOperator) -> None:
        """Count rows with another function of the same operator, whose limit is for both."""
        self._skipped = other._skipped

    def _refuse(self, describe: Callable[[], HoldfastError], cause: Exception | None = None) -> None:
        """Leave a row out, or raise the error that `describe` makes if this operator skips none."""
        if self._skipped is None:
            raise describe() from cause
        self._skipped.skip(describe)

    def _failed(self, error: Exception, function: Callable[..., Any], record: Any) -> None:
        """`function` raised on a row: leave the row out, or raise. An error that no row causes is always raised."""
        self._failed_on(error, function, lambda: record)

    def _failed_on(self, error: Exception, function: Callable[..., Any], record: Callable[[], Any]) -> None:
        """`_failed`, of a row that is made for the error, if that is shown."""
        where: dict[str, Any] = {"operator": self.context.uid, "subtask": self.context.subtask, "function": function}
        if self._skipped is None or (isinstance(error, HoldfastError) and not isinstance(error, UserFunctionError)):
            raise_located(error, **where, record=record())
        self._skipped.skip(lambda: located_error(error, **where, record=record()))

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if self._skipped is not None:
            self._skipped.checkpoint_completed()


def _is_reported(count: int) -> bool:
    """True for the 1st, 10th, 100th ... row: a log entry for each would be as long as the input."""
    return count in _REPORTED


_REPORTED: frozenset[int] = frozenset(10**exponent for exponent in range(19))

