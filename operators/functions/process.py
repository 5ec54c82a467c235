"""Processing record by record, with state and timers: the user's ProcessFunction, and the operators that run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import MIN_WATERMARK, Batch
from holdfast.operators.base import Operator, OperatorContext, Output, TimerService
from holdfast.operators.functions.context import FunctionContext
from holdfast.operators.functions.operator_state import OperatorLists
from holdfast.operators.functions.read_sets import read_set
from holdfast.operators.functions.row_loops import LoopRows, LoopShape, course_columns, emitted_copier, row_loop
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.side_outputs import OutputTag, SideOutputDeclarations, SideOutputs
from holdfast.operators.task.timers import InternalTimerService
from holdfast.operators.task.user_failures import NO_RECORD, Described, raise_located, shown
from holdfast.statebackends.backend import KeyCourse, KeyedStateBackend
from holdfast.statebackends.errors import GraphError, InvariantError, UndeclaredStateError
from holdfast.statebackends.serialization.state_serializer import can_change_in_place
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    AppendingState,
    ColumnarState,
    ColumnarStateDescriptor,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    OperatorListStateDescriptor,
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


class RecordContext(FunctionContext):
    """What a function sees beside a record, whether it has a key or not."""

    __slots__ = ("_lists", "_sides", "_watermark_ms", "timestamp")

    def __init__(self, operator: OperatorContext, descriptors: tuple[StateDescriptor, ...], sides: SideOutputs) -> None:
        super().__init__(operator)
        self._sides = sides
        self._lists = OperatorLists(descriptors, lambda: operator.operator_state, operator.uid)
        self._watermark_ms = MIN_WATERMARK
        self.timestamp: int | None = None
        """Event time of the record, or of the timer, in ms; None when no timestamps were assigned."""

    def operator_list_state(self, state: OperatorListStateDescriptor | str) -> ListState[Any]:
        """The operator state of a declared descriptor, or of its name: a list that belongs to this subtask, and to no key.

        After a restore it has the entries that the descriptor's redistribution gives to the subtask; of union state those of all
        subtasks, and `open` must `update` it to its own. Raises UndeclaredStateError for one that is not in `states`."""
        return self._lists.get(state)

    def output(self, tag: OutputTag | str, row: Any) -> None:
        """Emit a row to a declared side output, with the event time of the record or timer at hand.

        Raises UndeclaredOutputError for a tag that is not in the function's `side_outputs`. A row that does not fit the declared
        columns fails the job with a SchemaMismatchError, as one of the main output."""
        self._sides.add(tag, row, self.timestamp)

    @property
    def watermark(self) -> int:
        """Event time that the operator has reached, in ms."""
        return self._watermark_ms

    @property
    def processing_time(self) -> int:
        """Wall clock, ms."""
        return self._operator.now_ms()


class ProcessContext(RecordContext):
    """What a ProcessFunction sees beside the record. `state` and `timers` follow the current key, and need one."""

    __slots__ = ("_backend", "_descriptors", "_states", "_timers")

    def __init__(
        self,
        operator: OperatorContext,
        descriptors: tuple[StateDescriptor, ...],
        sides: SideOutputs,
        *,
        uses_timers: bool,
        is_keyed: bool = True,
    ) -> None:
        super().__init__(operator, descriptors, sides)
        self._backend: KeyedStateBackend | None = operator.keyed_state if is_keyed else None
        self._timers: TimerService | None = operator.timers if uses_timers else None
        self._descriptors = {descriptor.name: descriptor for descriptor in descriptors}
        self._states: dict[str, tuple[StateDescriptor, Any]] = {}

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

        Raises UndeclaredStateError for one that is not in the function's `states`, and on a stream without keys."""
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
        if isinstance(declared, OperatorListStateDescriptor):
            raise UndeclaredStateError(
                f"operator {self._operator.uid!r}: {name!r} is operator state, which has no key: use ctx.operator_list_state",
                operator=self._operator.uid,
                state=name,
            )
        return declared, self._keyed().get_state(declared)

    def _keyed(self, what: str = "keyed state") -> KeyedStateBackend:
        if self._backend is None:
            raise UndeclaredStateError(
                f"operator {self._operator.uid!r} is not on a keyed stream, so it has no {what}: call key_by before process",
                operator=self._operator.uid,
                state=what,
            )
        return self._backend

    @property
    def timers(self) -> TimerService:
        """Raises UndeclaredStateError when the function has no `on_timer`, and on a stream without keys."""
        if self._timers is None:
            self._keyed("timers")
            raise UndeclaredStateError(
                f"operator {self._operator.uid!r}: a timer needs a function that defines on_timer",
                operator=self._operator.uid,
                state="timers",
            )
        return self._timers

    @property
    def watermark(self) -> int:
        return self._watermark_ms if self._backend is None else self._operator.timers.current_watermark

    @property
    def key(self) -> Any:
        """The current key, as a Python value. Raises UndeclaredStateError on a stream without keys."""
        backend = self._keyed("key")
        return backend.key_type.decode(backend.current_key[0])


class StatefulFunction:
    """What all functions with declared state have in common. Everything that must survive a failure belongs into it."""

    states: ClassVar[tuple[StateDescriptor, ...]] = ()
    """Descriptors of every state that the function asks for."""
    returns: ClassVar[Any] = None
    """Type of the rows it emits, as `returns=` of `process`, which comes first."""
    side_outputs: ClassVar[SideOutputDeclarations] = ()
    """Tags of every side output that it emits to, as `side_outputs=` of `process`, which comes first."""

    def open(self, ctx: ProcessContext) -> None:
        """Once per subtask, when the state is there; no key is current yet."""

    def close(self) -> None:
        """Once per subtask, also after a failure."""


class KeyedFunction(StatefulFunction):
    """Of a keyed stream, or of several: it may have timers."""

    def on_timer(self, timestamp_ms: int, ctx: ProcessContext, out: Collector) -> None:
        """A timer of the current key is due. Define it to use timers."""


class ProcessFunction(KeyedFunction):
    """Base of functions of one stream. Everything that must survive a failure belongs into declared state.

    On a stream without keys it has operator state alone (`ctx.operator_list_state`), no keyed state and no timers.

    A row that was emitted or put into state must not be changed afterwards: emit or store a copy.

        class Count(hf.ProcessFunction):
            count = hf.ValueStateDescriptor("count", int)
            states = (count,)

            def process_element(self, value, ctx, out):
                state = ctx.state(self.count)
                state.update(state.value(0) + 1)
                out({"key": ctx.key, "count": state.value()})
    """

    reads: ClassVar[Sequence[str] | None] = None
    """The columns that its rows have; None: all that it may read. What is made of columns for nothing costs time. A function that
    reads `row["price"]` and the like alone is seen through; one that gives the row to others can say what they need."""

    def process_element(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        """One record; its key is current, if the stream has one."""
        raise InvariantError(f"{type(self).__name__} defines no process_element, which building the graph refuses")


def declared_reads(function: ProcessFunction, input_type: RowType, operator: str) -> tuple[str, ...] | None:
    """The columns that a function declares to read. Raises GraphError, UnknownColumnError for one that its input doesn't have."""
    reads = function.reads
    if reads is None:
        return None
    if isinstance(reads, str) or not all(isinstance(name, str) for name in reads) or len(set(reads)) != len(tuple(reads)):
        raise GraphError(f"operator {operator!r}: reads must be the names of distinct columns, not {reads!r}", operator=operator)
    if input_type.record is not None:
        name = getattr(input_type.record, "__name__", repr(input_type.record))
        message = f"operator {operator!r}: reads is for rows that are dicts; its rows are {name}, and have all their fields"
        raise GraphError(message, operator=operator)
    for name in reads:
        input_type.column(name, operator)
    return tuple(reads)


class CallableProcessFunction(ProcessFunction):
    """A plain function `(value, ctx, out)` with its states."""

    def __init__(self, function: Callable[[Any, ProcessContext, Collector], None], states: tuple[StateDescriptor, ...]) -> None:
        self.function = function
        self.states = states  # type: ignore[misc]
        self.process_element = function  # type: ignore[assignment,method-assign]


Element: TypeAlias = Callable[[Any, Any, Collector], None]
"""`process_element` of a function, or its like: (row, context, collector)."""


class FunctionOperator(Operator):
    """Base: opens and closes a function with state, gives it records, and emits what it collects."""

    def __init__(
        self, function: StatefulFunction, output_type: RowType, side_outputs: Mapping[str, RowType] | None = None
    ) -> None:
        self.function = function
        self.output_type = output_type
        self.side_outputs = side_outputs or {}
        self._opened = False

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return tuple(self.function.states)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._rows: list[Any] = []
        self._stamps: list[int | None] = []
        copies = any(map(can_change_in_place, self._kept_states()))
        self._own = emitted_copier(self.output_type) if copies else None
        """A row that is emitted, apart from the state: the next call changes a value that it was given."""
        self._sides = SideOutputs(self.side_outputs, context, output, copies=copies)

    def _kept_states(self) -> Iterable[StateDescriptor]:
        """States whose values the function may emit as they are kept."""
        return self.function.states

    def open(self) -> None:
        self._context = self._new_context()
        self._opened = True
        self._guarded(self.function.open, self._context)
        self._context._lists.check_owned()
        self._sides.begin()

    def _new_context(self) -> ProcessContext:
        return ProcessContext(self.context, self.declared_states(), self._sides, uses_timers=False, is_keyed=False)

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        self._context._watermark_ms = watermark_ms
        return iter(())

    def _take_plain(
        self, batch: Batch, context: RecordContext, input_type: RowType, process: Element, reads: tuple[str, ...] | None = None
    ) -> None:
        """Each record of a batch, without a key; then what was emitted for them. `reads`: columns of a row that are declared."""
        self._run(batch, context, input_type, process, None, reads)

    def _run(
        self,
        batch: Batch,
        context: RecordContext,
        input_type: RowType,
        process: Element,
        course: KeyCourse | None,
        reads: tuple[str, ...] | None,
    ) -> None:
        """Each record of a batch, its key being current if there are any; then what was emitted for them."""
        rows = LoopRows(batch, input_type.record, read_set(process) if reads is None else reads, is_declared=reads is not None)
        context.timestamp = None
        self._loop(batch, rows, process, context, course)

    def _loop(
        self,
        batch: Batch,
        rows: LoopRows,
        process: Callable[..., Any],
        context: Any,
        course: KeyCourse | None,
        *,
        carries: bool = False,
    ) -> None:
        """`context` and `carries` as of a LoopShape."""
        stamps = None if batch.timestamps is None else batch.timestamps.tolist()
        emitted, counts = self._rows, list[int]()
        shape = LoopShape(rows.names, () if course is None else course.names, stamps is not None, carries)

        def failed(error: Exception, row: Any) -> None:
            self._raise(error, process, rows.whole(row), keyed=course is not None)

        target = None if course is None else course.target
        columns = course_columns(rows, course, stamps)
        row_loop(shape)(process, context, self._collector(), emitted, counts, target, failed, columns)
        self._emit(None if batch.timestamps is None else np.repeat(batch.timestamps, np.diff(counts, prepend=0)))
        self._sides.flush()

    # ------------------------------------------------------------------------------------------------------- output

    def _collector(self) -> Collector:
        """What the function emits rows with, until they are emitted."""
        append, own = self._rows.append, self._own
        return append if own is None else lambda row: append(own(row))

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


class KeyedFunctionOperator(FunctionOperator):
    """Base: a function of keyed streams, with keyed state and timers."""

    function: KeyedFunction

    def __init__(
        self, function: KeyedFunction, output_type: RowType, side_outputs: Mapping[str, RowType] | None = None
    ) -> None:
        super().__init__(function, output_type, side_outputs)
        self.uses_timers = type(function).on_timer is not KeyedFunction.on_timer

    def open(self) -> None:
        self._backend = self.context.keyed_state
        super().open()

    def _new_context(self) -> ProcessContext:
        return ProcessContext(self.context, self.declared_states(), self._sides, uses_timers=self.uses_timers)

    def _take(
        self, batch: Batch, selector: Selector, input_type: RowType, process: Element, reads: tuple[str, ...] | None = None
    ) -> None:
        """Each record of a batch, its key being current; then what was emitted for them. `reads` as of `_take_plain`."""
        self._run(batch, self._context, input_type, process, self._course(batch, selector), reads)

    def _course(self, batch: Batch, selector: Selector) -> KeyCourse:
        """The keys of the records of a batch, to be made current one by one."""
        keys = selector.keys(
            batch, max_parallelism=self.context.max_parallelism, operator=self.context.uid, subtask=self.context.subtask
        )
        return self._backend.each_key(keys)

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
            self.function.on_timer(timestamp_ms, self._context, self._collector())
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


class PlainProcessOperator(FunctionOperator):
    """Runs a ProcessFunction on a stream without keys."""

    function: ProcessFunction

    def __init__(
        self,
        function: ProcessFunction,
        input_type: RowType,
        output_type: RowType,
        side_outputs: Mapping[str, RowType] | None = None,
    ) -> None:
        super().__init__(function, output_type, side_outputs)
        self.input_type = input_type
        self.reads = declared_reads(function, input_type, "process")

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self._take_plain(batch, self._context, self.input_type, self.function.process_element, self.reads)


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
        self.reads = declared_reads(function, input_type, "process")

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self._take(batch, self.selector, self.input_type, self.function.process_element, self.reads)
