"""Keyed streams: process functions, windows and running aggregates, with state per key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.operators.base import Operator
from holdfast.operators.datastream.graph import StreamEdge
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.aggregates import Aggregate, columnar_descriptor
from holdfast.operators.functions.process import (
    CallableProcessFunction,
    Collector,
    ProcessContext,
    ProcessFunction,
    ProcessOperator,
)
from holdfast.operators.functions.running import RunningAggregateOperator
from holdfast.operators.functions.schema import UNDECLARED, RowType, declared_type, undeclared_error
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.time import Tumbling
from holdfast.operators.functions.window import WINDOW_COLUMNS, TumblingWindowOperator
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.state import StateDescriptor

if TYPE_CHECKING:
    from holdfast.operators.datastream.environment import Environment


class KeyedStream(Stream):
    """A stream whose records are brought together by key. `map`, `filter` and sinks see each key on one subtask."""

    def __init__(
        self, environment: Environment, inputs: tuple[StreamEdge, ...], row_type: RowType, selector: Selector
    ) -> None:
        super().__init__(environment, inputs, row_type)
        self._selector = selector

    def _told(self) -> str:
        return f"by {self._selector!r} ({self._selector.key_type_text}) {super()._told()}"

    def process(
        self,
        function: ProcessFunction | Callable[[Any, ProcessContext, Collector], None],
        *,
        states: Sequence[StateDescriptor] = (),
        returns: Any = None,
    ) -> Stream:
        """Run a ProcessFunction, or a plain function `(value, ctx, out)` with these `states`, on each record of a key."""
        if not isinstance(function, ProcessFunction):
            if isinstance(function, type) or not callable(function):
                raise GraphError(f"operator 'process': {function!r} is neither a ProcessFunction instance nor a function")
            function = CallableProcessFunction(function, tuple(states))
        elif states:
            raise GraphError("operator 'process': a ProcessFunction declares its own states; don't give states=")
        if type(function).process_element is ProcessFunction.process_element and "process_element" not in vars(function):
            raise GraphError(f"operator 'process': {type(function).__name__} must define process_element")
        self._row_type.check_rows("process")
        declared = function.returns if returns is None else returns
        output = UNDECLARED if declared is None else declared_type(declared, "process")
        operator = ProcessOperator(function, self._selector, self._row_type, output)
        stream = self._add_keyed("process", operator, output)
        if operator.uses_timers:
            stream._own("process").properties["timers"] = True
        return stream

    def window(self, windows: Tumbling) -> WindowedStream:
        """Group each key's records into event-time windows."""
        if not isinstance(windows, Tumbling):
            raise GraphError(f"operator 'window': {windows!r} is not a window such as hf.Tumbling(minutes=1)", operator="window")
        if not self._timestamped:
            raise GraphError(
                "operator 'window': event-time windows need event times and watermarks: call assign_timestamps before key_by",
                operator="window",
            )
        return WindowedStream(self, windows)

    def aggregate(self, *, emit: str = "changes", **aggregates: Aggregate) -> Stream:
        """Running aggregates per key. emit: `changes` (after each batch the new rows of its keys) or `none`."""
        if emit not in ("changes", "none"):
            raise GraphError(f"operator 'aggregate': emit must be 'changes' or 'none', not {emit!r}", operator="aggregate")
        self._need_columns("aggregate")
        descriptor = columnar_descriptor("aggregates", aggregates, self._row_type, self._selector.names, "aggregate")
        operator = RunningAggregateOperator(descriptor, self._selector, self._row_type, emits_changes=emit == "changes")
        return self._add_keyed("aggregate", operator, operator.output_type)

    def union(self, *others: Stream) -> Stream:
        """Refused: unite the streams first, then key the union."""
        raise GraphError("a union of keyed streams loses the key: call union before key_by")

    def _add_keyed(self, kind: str, operator: Operator, output: RowType, **properties: Any) -> Stream:
        return self._add(kind, operator, output, selector=self._selector, properties=properties)

    def _need_columns(self, operator: str) -> None:
        if self._row_type.schema is None:
            raise undeclared_error(operator, "columns")


class WindowedStream:
    """Records of each key and window, to be aggregated."""

    def __init__(self, keyed: KeyedStream, windows: Tumbling) -> None:
        self._keyed = keyed
        self._windows = windows

    def __repr__(self) -> str:
        return f"<WindowedStream of {self._windows!r} {self._keyed._told()}>"

    def aggregate(self, **aggregates: Aggregate) -> Stream:
        """One row per key and window: key columns, window_start, window_end (UTC), and the named aggregates."""
        keyed = self._keyed
        keyed._need_columns("window")
        reserved = (*keyed._selector.names, *WINDOW_COLUMNS)
        if len(set(reserved)) != len(reserved):
            raise GraphError(f"operator 'window': a key column is called like a window's: {', '.join(reserved)}", operator="window")
        descriptor = columnar_descriptor("windows", aggregates, keyed._row_type, reserved, "window")
        operator = TumblingWindowOperator(self._windows, descriptor, keyed._selector, keyed._row_type)
        return keyed._add_keyed(
            "window", operator, operator.output_type, size_ms=self._windows.size_ms, offset_ms=self._windows.offset_ms
        )
