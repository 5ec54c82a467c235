"""Row functions that carry a value of the key from row to row: running `reduce`, and `map_with_state`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import own_copy
from holdfast.operators.functions.process import Collector, KeyedFunction, KeyedFunctionOperator
from holdfast.operators.functions.read_sets import read_set
from holdfast.operators.functions.row_loops import LoopRows
from holdfast.operators.functions.schema import UNDECLARED, RowType, declared_type
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.windows.options import stored_row_type
from holdfast.operators.task.user_failures import check_returns, returned_none
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.state import StateDescriptor, Ttl, ValueState, ValueStateDescriptor

_STATE = "value"


def expiring(ttl: timedelta | int | None, operator: str) -> Ttl | None:
    """The TTL that a table is given. Raises InvalidConfigError, naming the operator."""
    if ttl is None:
        return None
    try:
        return Ttl(ttl)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"operator {operator!r}: {error}", operator=operator, setting="ttl") from error


def reduce_operator(
    function: Callable[[Any, Any], Any], selector: Selector, rows: RowType, row_type: Any, ttl: timedelta | int | None
) -> ReduceOperator:
    """Raises GraphError, InvalidConfigError."""
    _check(function, "reduce", rows)
    stored = stored_row_type(rows, row_type, "reduce")
    state: ValueStateDescriptor[Any] = ValueStateDescriptor(_STATE, stored, expiring(ttl, "reduce"))
    return ReduceOperator(function, state, selector, rows, rows)


def map_with_state_operator(
    function: Callable[[Any, Any], Any],
    selector: Selector,
    rows: RowType,
    state_type: Any,
    returns: Any,
    ttl: timedelta | int | None,
) -> MapWithStateOperator:
    """Raises GraphError, InvalidConfigError."""
    what = "map_with_state"
    _check(function, what, rows)
    output = UNDECLARED if returns is None else declared_type(returns, what)
    state: ValueStateDescriptor[Any] = ValueStateDescriptor(_STATE, state_type, expiring(ttl, what))
    return MapWithStateOperator(function, state, selector, rows, output)


def _check(function: Any, operator: str, rows: RowType) -> None:
    if not callable(function):
        raise GraphError(f"operator {operator!r}: {function!r} is not a function", operator=operator)
    check_returns(function, operator)
    rows.check_rows(operator)


class _Carries(KeyedFunction):
    """What the runtime opens: it declares the value."""

    def __init__(self, state: ValueStateDescriptor[Any]) -> None:
        self.states = (state,)  # type: ignore[misc]


class CarryingOperator(KeyedFunctionOperator):
    """Base: calls a function of the row and of the key's value."""

    def __init__(
        self,
        call: Callable[[Any, Any], Any],
        state: ValueStateDescriptor[Any],
        selector: Selector,
        input_type: RowType,
        output_type: RowType,
    ) -> None:
        super().__init__(_Carries(state), output_type)
        self.call = call
        self.descriptor = state
        self.selector = selector
        self.input_type = input_type

    def _kept_states(self) -> tuple[StateDescriptor, ...]:
        return ()  # a row that is the value is copied where it is emitted

    def open(self) -> None:
        super().open()
        self._value: ValueState[Any] = self._context.state(self.descriptor)

    def _raise(self, error: Exception, function: Callable[..., Any], record: Any, *, keyed: bool = False) -> NoReturn:
        """What an error names is the user's own function."""
        super()._raise(error, self.call, record, keyed=keyed)


class ReduceOperator(CarryingOperator):
    """Emits, for each record, what the records of its key come to so far."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self._take(batch, self.selector, self.input_type, self._row)

    def _row(self, row: Any, context: Any, collect: Collector) -> None:
        value = self._value.value()
        if value is not None:
            row = self._not_none(self.call(value, row), row)
        self._value.update(row)
        collect(own_copy(row))

    def _not_none(self, result: Any, record: Any) -> Any:
        if result is None:
            context = self.context
            raise returned_none(operator=context.uid, subtask=context.subtask, function=self.call, record=record, wanted="a row")
        return result


class MapWithStateOperator(CarryingOperator):
    """Emits the row that the function returns, if it is not None, and keeps the value that it returns with it."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        rows = LoopRows(batch, self.input_type.record, read_set(self.call))
        self._loop(batch, rows, self.call, self._value, self._course(batch, self.selector), carries=True)
