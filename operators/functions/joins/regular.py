"""Regular joins of bounded memory: each row meets those of equal keys that are still retained when it comes, by event time.

That is an interval: a right row may be as much later as left rows are retained, and as much earlier as right rows are."""

from __future__ import annotations

from typing import Any

from holdfast.operators.functions.joins.buffers import JoinInterval
from holdfast.operators.functions.joins.interval import bound_ms
from holdfast.statebackends.errors import GraphError


def retained_interval(retain: Any, operator: str) -> JoinInterval:
    """`retain`: a timedelta or ms for both inputs, or a pair for left and right. Raises GraphError naming the operator."""
    if retain is None:
        raise GraphError(
            f"operator {operator!r} has no bound, and would keep its rows for ever: give retain=, how long rows are kept by event "
            "time, or use interval_join(lower=, upper=)",
            operator=operator,
            setting="retain",
        )
    both = retain if isinstance(retain, tuple) else (retain, retain)
    if len(both) != 2:
        raise GraphError(
            f"operator {operator!r}: retain= is a duration, or a pair of them for left and right, not {retain!r}",
            operator=operator,
            setting="retain",
        )
    left_ms, right_ms = (bound_ms(each, "retain", operator) for each in both)
    shorter_ms = min(left_ms, right_ms)
    if shorter_ms < 0:
        raise GraphError(
            f"operator {operator!r}: retain must be at least 0 ms, not {shorter_ms}", operator=operator, setting="retain"
        )
    return JoinInterval(-right_ms, left_ms)
