"""Which operator aggregates windows over columns, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.operators.functions.aggregates import Aggregate, columnar_descriptor
from holdfast.operators.functions.schema import RowType, undeclared_error
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.assigners import Global, Session, Sliding, Tumbling, WindowAssigner
from holdfast.operators.functions.windows.columnar import WINDOW_COLUMNS, ColumnarWindowOperator, TumblingWindowOperator
from holdfast.operators.functions.windows.columnar_counts import CountWindowOperator, count_window_operator
from holdfast.operators.functions.windows.columnar_sessions import SessionWindowOperator
from holdfast.operators.functions.windows.options import RowWindowOptions
from holdfast.operators.functions.windows.sliding import SlidingWindowOperator
from holdfast.statebackends.errors import GraphError


class ColumnarWindow(NamedTuple):
    """What the graph gets."""

    operator: ColumnarWindowOperator | CountWindowOperator
    properties: Mapping[str, Any]
    side_outputs: Mapping[str, RowType]


def columnar_window(
    windows: WindowAssigner, options: RowWindowOptions, aggregates: Mapping[str, Aggregate], selector: Selector, rows: RowType
) -> ColumnarWindow:
    """The operator of `window(...).aggregate(n=hf.count())`. Raises GraphError and UnknownColumnError, naming the operator."""
    if isinstance(windows, Global):
        if rows.schema is None:
            raise undeclared_error("window", "columns")
        counting = count_window_operator(options, aggregates, selector, rows)
        return ColumnarWindow(counting, {"count": counting.count, "slide": counting.slide}, {})
    windows = _checked(windows, options)
    if rows.schema is None:
        raise undeclared_error("window", "columns")
    reserved = (*selector.names, *WINDOW_COLUMNS)
    if len(set(reserved)) != len(reserved):
        raise GraphError(f"operator 'window': a key column is called like a window's: {', '.join(reserved)}", operator="window")
    descriptor = columnar_descriptor("windows", aggregates, rows, reserved, "window")
    late: dict[str, Any] = {"lateness_ms": options.lateness_ms if windows.is_event_time else 0, "late_tag": options.late_tag}
    operator: ColumnarWindowOperator
    if isinstance(windows, Tumbling) and not late["lateness_ms"]:
        operator = TumblingWindowOperator(windows, descriptor, selector, rows, late_tag=options.late_tag)
    elif isinstance(windows, Session):
        operator = SessionWindowOperator(windows, descriptor, selector, rows, **late)
    else:
        operator = SlidingWindowOperator(_sliding(windows), descriptor, selector, rows, **late)
    return ColumnarWindow(operator, _properties(windows, options), {options.late_tag: rows} if options.late_tag else {})


def _checked(windows: WindowAssigner, options: RowWindowOptions) -> Tumbling | Sliding | Session:
    rows = "give row functions: reduce, process or aggregate(function)"
    is_fixed = not isinstance(windows, Session) or windows.gap_of is None
    if not isinstance(windows, Tumbling | Sliding | Session) or not is_fixed:
        raise GraphError(
            "operator 'window': aggregates over columns take tumbling, sliding and count windows, and sessions with one gap, not "
            f"{windows!r}; {rows}",
            operator="window",
        )
    for what, given in (("trigger", options.trigger), ("evictor", options.evictor)):
        if given is not None:
            raise GraphError(
                f"operator 'window': aggregates over columns take no {what} of their own, such as {given!r}; {rows}",
                operator="window",
            )
    return windows


def _sliding(windows: Tumbling | Sliding) -> Sliding:
    """A tumbling window that takes late records keeps its rows when it has fired: it is one that slides by its own size."""
    return windows if isinstance(windows, Sliding) else Sliding(windows.size_ms, windows.size_ms, offset=windows.offset_ms)


def _properties(windows: Tumbling | Sliding | Session, options: RowWindowOptions) -> dict[str, Any]:
    properties: dict[str, Any]
    if isinstance(windows, Session):
        properties = {"gap_ms": windows.gap_ms}
    else:
        properties = {"size_ms": windows.size_ms, "offset_ms": windows.offset_ms}
    if isinstance(windows, Sliding):
        properties["slide_ms"] = windows.slide_ms
    if not windows.is_event_time:
        properties["time"] = "processing"
    if options.lateness_ms:
        properties["lateness_ms"] = options.lateness_ms
    return properties
