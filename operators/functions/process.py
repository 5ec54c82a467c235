"""Keyed processing, record by record, with state and timers: the user's ProcessFunction and the operator that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator, OperatorContext, Output, TimerService
from holdfast.operators.functions.context import FunctionContext
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.side_outputs import OutputTag, SideOutputDeclarations, SideOutputs
from holdfast.operators.task.timers import InternalTimerService
from holdfast.operators.task.user_failures import NO_RECORD, Described, raise_located, shown
from holdfast.statebackends.backend import KeyedStateBackend
from holdfast.statebackends.errors import InvariantError, UndeclaredStateError
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    AppendingState,
    ColumnarState,
    ColumnarStateDescriptor,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueState,
    ValueStateDescriptor,
)

K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
OUT = TypeVar("OUT")

Collector: TypeAlias = Callable[[Any], None]
"""Emits one row: `out(row)`."""


class ProcessContext(FunctionContext):
    """What a ProcessFunction sees beside the record. `state` and `timers` follow the current key."""

    __slots__ = ("_backend", "_descriptors", "_sides", "_states", "_timers", "timestamp")

    def __init__(
        self, operator: OperatorContext, descriptors: tuple[StateDescriptor, ...], sides: SideOutputs, *, uses_timers: bool
    ) -> None:
        super().__init__(operator)
        self._sides = sides
        self._backend: KeyedStateBackend = operator.keyed_state
        self._timers: TimerService | None = operator.timers if uses_timers else None
        self._descriptors = {descriptor.name: descriptor for descriptor in descriptors}
        self._states: dict[str, tuple[StateDescriptor, Any]] = {}
        self.timestamp: int | None = None
        """Event time of the record, or of the timer, in ms; None when no timestamps were assigned."""

    @overload
    def state(self, state: ValueStateDescriptor[V]) -> ValueState[V]: ...
    @overload
    def state(self, state: ListStateDescriptor[V]) -> ListState[V]: ...
    @overload
    def state(self, state: MapStateDescriptor[K, V]) -> MapState[K, V]: ...
    @overload
    def state(self, state: ReducingStateDescriptor[V]) -> AppendingState[V, V]: ...
    @overload
    def state(self, state: AggregatingStateDescriptor[IN, OUT]) -> AppendingState[IN, OUT]: ...
    @overload
    def state(self, state: ColumnarStateDescriptor) -> ColumnarState: ...
    @overload
    def state(self, state: str) -> Any: ...
    def state(self, state: StateDescriptor | str) -> Any:
        """The state object of a declared descriptor, or of its name; the same object for every key.

        Raises UndeclaredStateError for one that is not in the function's `states`."""
        name = state if isinstance(state, str) else state.name
        found = self._states.get(name)
        if found is None or not (state is found[0] or state == name or state == found[0]):
            found = self._states[name] = self._declared(state, name)
        return found[1]

    def _declared(self, state: StateDescriptor | str, name: str) -> tuple[StateDescriptor, Any]:
        declared = self._descriptors.get(name)
        if declared is None or not (isinstance(state, str) or state == declared):
            raise UndeclaredStateError(
                f"operator {self._operator.uid!r}: state {name!r} is not among the declared states "
                f"({', '.join(self._descriptors) or 'none'}): add its descriptor to the function's `states`",
                operator=self._operator.uid,
                state=name,
            )
        return declared, self._backend.get_state(declared)

    def output(self, tag: OutputTag | str, row: Any) -> None:
        """Emit a row to a declared side output, with the event time of the record or timer at hand.

        Raises UndeclaredOutputError for a tag that is not in the function's `side_outputs`. A row that does not fit the declared
        columns fails the job with a SchemaMismatchError, as one of the main output."""
        self._sides.add(tag, row, self.timestamp)

    @property
    def timers(self) -> TimerService:
        """Raises UndeclaredStateError when the function has no `on_timer`."""
        if self._timers is None:
            raise UndeclaredStateError(
                f"operator {self._operator.uid!r}: a timer needs a function that defines on_timer",
                operator=self._operator.uid,
                state="timers",
            )
        return self._timers

    @property
    def key(self) -> Any:
        """The current key, as a Python value."""
        return self._backend.key_type.decode(self._backend.current_key[0])

    @property
    def watermark(self) -> int:
        """Event time that the operator has reached, in ms."""
        return self._operator.timers.current_watermark

    @property
    def processing_time(self) -> int:
        """Wall clock, ms."""
        return self._operator.now_ms()


class KeyedFunction:
    """What functions of one and of several keyed streams have in common. Everything that must survive a failure belongs into
    declared state."""

    states: ClassVar[tuple[StateDescriptor, ...]] = ()
    """Descriptors of every state that the function asks for."""
    returns: ClassVar[Any] = None
    """Type of the rows it emits, as `returns=` of `process`, which comes first."""
    side_outputs: ClassVar[SideOutputDeclarations] = ()
    """Tags of every side output that it emits to, as `side_outputs=` of `process`, which comes first."""

    def open(self, ctx: ProcessContext) -> None:
        """Once per subtask, when the state is there; no key is current yet."""

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        """A timer of the current key is due. Define it to use timers."""

    def close(self) -> None:
        """Once per subtask, also after a failure."""


class ProcessFunction(KeyedFunction):
    """Base of keyed functions. Everything that must survive a failure belongs into declared state.

    A row that was emitted or put into state must not be changed afterwards: emit or store a copy.

        class Count(hf.ProcessFunction):
            count = hf.ValueStateDescriptor("count", int)
            states = (count,)

            def process_element(self, value, ctx, out):
                state = ctx.state(self.count)
                state.update(state.value(0) + 1)
                out({"key": ctx.key, "count": state.value()})
    """

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        """One record; its key is current."""
        raise InvariantError(f"{type(self).__name__} defines no process_element, which building the graph refuses")


class CallableProcessFunction(ProcessFunction):
    """A plain function `(value, ctx, out)` with its states."""

    def __init__(self, function: Callable[[Any, ProcessContext, Collector], None], states: tuple[StateDescriptor, ...]) -> None:
        self.function = function
        self.states = states  # type: ignore[misc]
        self.process_element = function  # type: ignore[assignment,method-assign]


Element: TypeAlias = Callable[[Any, ProcessContext, Collector], None]
"""`process_element` of a function, or its like."""


class KeyedFunctionOperator(Operator):
    """Base: opens and closes a keyed function, gives it records and timers, and emits what it collects."""

    def __init__(
        self, function: KeyedFunction, output_type: RowType, side_outputs: Mapping[str, RowType] | None = None
    ) -> None:
        self.function = function
        self.output_type = output_type
        self.side_outputs = side_outputs or {}
        self.uses_timers = type(function).on_timer is not KeyedFunction.on_timer
        self._opened = False

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return tuple(self.function.states)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._rows: list[Any] = []
        self._stamps: list[int] = []
        self._sides = SideOutputs(self.side_outputs, context, output)

    def open(self) -> None:
        self._backend = self.context.keyed_state
        self._context = ProcessContext(self.context, self.declared_states(), self._sides, uses_timers=self.uses_timers)
        self._opened = True
        self._guarded(self.function.open, self._context)
        self._sides.begin()

    def _take(self, batch: Batch, selector: Selector, input_type: RowType, process: Element) -> None:
        """Each record of a batch, its key being current; then what was emitted for them."""
        rows = batch.rows(input_type.record)
        keys = selector.keys(
            batch, max_parallelism=self.context.max_parallelism, operator=self.context.uid, subtask=self.context.subtask
        )
        encoded, groups = keys.encoded(), keys.key_groups.tolist()
        if batch.timestamps is None:
            self._process(rows, encoded, groups, process)
            self._emit(None)
        else:
            counts = self._process_stamped(rows, encoded, groups, batch.timestamps.tolist(), process)
            self._emit(np.repeat(batch.timestamps, np.diff(counts, prepend=0)))
        self._sides.flush()

    def _process(self, rows: Any, encoded: list[bytes], groups: list[int], process: Element) -> None:
        context, set_current_key = self._context, self._backend.set_current_key
        collect = self._rows.append
        context.timestamp = None
        row = None
        try:
            for row, key, group in zip(rows, encoded, groups, strict=True):
                set_current_key(key, group)
                process(row, context, collect)
        except Exception as error:
            self._raise(error, process, row, keyed=True)

    def _process_stamped(
        self, rows: Any, encoded: list[bytes], groups: list[int], stamps: list[int], process: Element
    ) -> list[int]:
        """How many rows had been emitted after each record."""
        context, set_current_key = self._context, self._backend.set_current_key
        emitted = self._rows
        collect = emitted.append
        counts: list[int] = []
        row = None
        try:
            for row, key, group, stamp in zip(rows, encoded, groups, stamps, strict=True):
                set_current_key(key, group)
                context.timestamp = stamp
                process(row, context, collect)
                counts.append(len(emitted))
        except Exception as error:
            self._raise(error, process, row, keyed=True)
        return counts

    # ------------------------------------------------------------------------------------------------------- timers

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        return self._fire(self._timers().advance_watermark(watermark_ms, self._on_timer))

    def next_processing_time_ms(self) -> int | None:
        return self._timers().next_processing_time_ms

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        return self._fire(self._timers().advance_processing_time(now_ms, self._on_timer))

    def _fire(self, slices: Iterator[None]) -> Iterator[None]:
        for _ in slices:
            self._emit_fired()
            yield
        self._emit_fired()

    def _emit_fired(self) -> None:
        stamps, self._stamps = self._stamps, []
        self._emit(np.array(stamps, np.int64))
        self._sides.flush()

    def _on_timer(self, timestamp_ms: int, namespace: bytes) -> None:
        self._context.timestamp = timestamp_ms
        try:
            self.function.on_timer(timestamp_ms, self._context, self._rows.append)
        except Exception as error:
            record = Described(f"timer {timestamp_ms} of key {self._context.key!r}")
            self._raise(error, self.function.on_timer, record)
        missing = len(self._rows) - len(self._stamps)
        if missing:
            self._stamps.extend(repeat(timestamp_ms, missing))

    def _timers(self) -> InternalTimerService:
        timers = self.context.timers
        if not isinstance(timers, InternalTimerService):
            raise InvariantError(f"operator {self.context.uid!r}: the runtime gave it {type(timers).__name__} as timers")
        return timers

    # ------------------------------------------------------------------------------------------------------- output

    def _emit(self, stamps: npt.NDArray[np.int64] | None) -> None:
        """Emit what was collected; the list is a new one, since the batch keeps the old."""
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        self.output.collect(
            Batch(
                rows=rows,
                schema=self.output_type.schema,
                timestamps=stamps,
                row_factory=self.output_type.record,
                producer=self.context.uid,
            )
        )

    def close(self) -> None:
        if self._opened:
            self._opened = False
            self._sides.end()
            self._guarded(self.function.close)

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._raise(error, call, NO_RECORD)

    def _raise(self, error: Exception, function: Callable[..., Any], record: Any, *, keyed: bool = False) -> NoReturn:
        """`keyed`: of a record whose key is current."""
        key = shown(self._context.key) if keyed else ""
        raise_located(
            error, operator=self.context.uid, subtask=self.context.subtask, function=function, record=record, key=key
        )


class ProcessOperator(KeyedFunctionOperator):
    """Runs a ProcessFunction on a keyed stream."""

    function: ProcessFunction

    def __init__(
        self,
        function: ProcessFunction,
        selector: Selector,
        input_type: RowType,
        output_type: RowType,
        side_outputs: Mapping[str, RowType] | None = None,
    ) -> None:
        super().__init__(function, output_type, side_outputs)
        self.selector = selector
        self.input_type = input_type

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self._take(batch, self.selector, self.input_type, self.function.process_element)
