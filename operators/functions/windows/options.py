"""What `keyed.window(...)` collects before a row function is given, and what building the graph refuses of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.operators.functions.process import KeyedFunction
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.windows.assigners import Global, Sliding, WindowAssigner
from holdfast.operators.functions.windows.evictors import Evictor
from holdfast.operators.functions.windows.row_functions import ProcessWindowFunction, WindowSettings
from holdfast.operators.functions.windows.triggers import EventTimeTrigger, ProcessingTimeTrigger, Trigger
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.serialization.python_types import python_type_of_arrow
from holdfast.statebackends.state import ColumnarStateDescriptor, OperatorListStateDescriptor, StateDescriptor

WINDOWS_PER_ROW_MAX = 10_000
"""Of sliding windows with row functions."""


@dataclass(frozen=True, slots=True)
class RowWindowOptions:
    """Settings of a windowed stream; as given, or absent."""

    trigger: Trigger | None = None
    evictor: Evictor | None = None
    lateness_ms: int = 0
    late_tag: str = ""

    def settings(self, assigner: WindowAssigner) -> WindowSettings:
        """With the trigger that the assigner has by itself. Raises GraphError for a global window without one."""
        trigger = self.trigger
        if trigger is None:
            if isinstance(assigner, Global):
                raise GraphError("operator 'window': a global window never ends: give it a trigger", operator="window")
            trigger = EventTimeTrigger() if assigner.is_event_time else ProcessingTimeTrigger()
        if isinstance(assigner, Sliding) and (windows := assigner.size_ms // assigner.slide_ms) > WINDOWS_PER_ROW_MAX:
            raise GraphError(
                f"operator 'window': a row is in {windows} windows of {assigner!r}, and row functions take at most "
                f"{WINDOWS_PER_ROW_MAX}: take a longer slide, or aggregates over columns",
                operator="window",
            )
        return WindowSettings(assigner, trigger, self.evictor, self.lateness_ms, self.late_tag)


def check_window_function(function: Any, *, merges: bool) -> None:
    """Raises GraphError for what is no window function, or for sessions can't be one."""
    if not isinstance(function, ProcessWindowFunction):
        raise GraphError(f"operator 'window': {function!r} is not a ProcessWindowFunction instance", operator="window")
    name = type(function).__name__
    if type(function).process is ProcessWindowFunction.process:
        raise GraphError(f"operator 'window': {name} must define process", operator="window")
    if type(function).on_timer is not KeyedFunction.on_timer:
        raise GraphError(f"operator 'window': {name} defines on_timer, but timers of a window are its trigger's", operator="window")
    if merges and function.window_states:
        raise GraphError(
            f"operator 'window': {name} declares window_states, which sessions, being merged, can't have: use states",
            operator="window",
        )
    if any(isinstance(state, ColumnarStateDescriptor) for state in function.window_states):
        raise GraphError(f"operator 'window': {name} declares columnar state for its windows: use states", operator="window")


def check_state_names(states: Sequence[StateDescriptor], operator: str) -> None:
    """Raises GraphError for two keyed states of one name: of the window itself, its trigger and its function."""
    seen: set[str] = set()
    for state in states:
        if isinstance(state, OperatorListStateDescriptor):
            continue
        if state.name in seen:
            raise GraphError(
                f"operator {operator!r}: the window, its trigger and its function declare two states called {state.name!r}",
                operator=operator,
                state=state.name,
            )
        seen.add(state.name)


def stored_row_type(rows: RowType, given: Any, operator: str) -> Any:
    """Type of the rows that a window keeps: as given, the record type, or a struct of the declared columns. Raises GraphError."""
    if given is not None:
        return given
    if rows.record is not None:
        return rows.record
    if rows.schema is None:
        raise GraphError(
            f"operator {operator!r} keeps rows in its state, but the rows that reach it have no declared columns: give the "
            "function before it returns=, or give row_type=",
            operator=operator,
        )
    stored = pa.struct(list(rows.schema))
    try:
        python_type_of_arrow(stored)
    except InvalidConfigError as error:
        raise GraphError(f"operator {operator!r} keeps rows in its state: {error}", operator=operator) from error
    return stored  # a TypedDict made here could not be pickled once msgspec has seen it
