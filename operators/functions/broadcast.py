"""The broadcast pattern: a stream of rules, say, that every subtask gets in full, and another one whose records it applies to.

Broadcast state is a map. Records of the broadcast stream change it, all subtasks alike; the other side reads it. Barriers cut both
inputs of all subtasks at the same broadcast records, so that copies are equal in every checkpoint, as long as what the function
does with a broadcast record depends neither on the subtask nor on the order in which several arrive. Source: Flink, The Broadcast
State Pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.operator_state import BroadcastStates, broadcast_list
from holdfast.operators.functions.process import (
    Collector,
    FunctionOperator,
    KeyedFunction,
    KeyedFunctionOperator,
    ProcessContext,
    RecordContext,
    StatefulFunction,
)
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.statebackends.errors import InvariantError, UndeclaredStateError
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    AppendingState,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    OperatorListStateDescriptor,
    ReadOnlyMapState,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueState,
    ValueStateDescriptor,
)

K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
OUT = TypeVar("OUT")


class ReadOnlyBroadcastContext(ProcessContext):
    """What a function sees beside a record that was not broadcast, or a timer: broadcast state can be read."""

    __slots__ = ("_broadcast",)

    _broadcast: BroadcastStates

    def broadcast_state(self, state: MapStateDescriptor[K, V]) -> ReadOnlyMapState[K, V]:
        """The copy of this subtask. A value that is changed in place changes no state.

        Raises UndeclaredStateError for a state that was not given to `broadcast(...)`."""
        return cast("ReadOnlyMapState[K, V]", self._broadcast.readable(state))


class BroadcastContext(RecordContext):
    """What a function sees beside a broadcast record: no key is current, and broadcast state can be changed."""

    __slots__ = ("_broadcast", "_keyed")

    _broadcast: BroadcastStates
    _keyed: ProcessContext | None
    """Of the keyed side; None if that has no keys."""

    def broadcast_state(self, state: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """The copy of this subtask. Each subtask must change its own in the same way.

        Raises UndeclaredStateError for a state that was not given to `broadcast(...)`."""
        return cast("MapState[K, V]", self._broadcast.writable(state))

    @overload
    def apply_to_keyed_state(
        self, state: ValueStateDescriptor[V], function: Callable[[Any, ValueState[V]], None]
    ) -> None: ...
    @overload
    def apply_to_keyed_state(self, state: ListStateDescriptor[V], function: Callable[[Any, ListState[V]], None]) -> None: ...
    @overload
    def apply_to_keyed_state(
        self, state: MapStateDescriptor[K, V], function: Callable[[Any, MapState[K, V]], None]
    ) -> None: ...
    @overload
    def apply_to_keyed_state(
        self, state: ReducingStateDescriptor[V], function: Callable[[Any, AppendingState[V, V]], None]
    ) -> None: ...
    @overload
    def apply_to_keyed_state(
        self, state: AggregatingStateDescriptor[IN, OUT], function: Callable[[Any, AppendingState[IN, OUT]], None]
    ) -> None: ...
    def apply_to_keyed_state(self, state: StateDescriptor, function: Callable[[Any, Any], None]) -> None:
        """Call `function(key, state)` for each key of this subtask that has the state, in no particular order.

        The keys are those that have it when the call begins. Raises UndeclaredStateError for a state that is not in the function's
        `states`, and on a stream without keys."""
        context = self._keyed
        if context is None:
            raise UndeclaredStateError(
                f"operator {self._operator.uid!r} is not on a keyed stream, so it has no keyed state: call key_by before connect",
                operator=self._operator.uid,
                state=state.name,
            )
        found: Any = context.state(cast("Any", state))
        backend = self._operator.keyed_state
        key_type, max_parallelism = backend.key_type, backend.max_parallelism
        for encoded in list(backend.keys(state.name)):
            key = key_type.decode(encoded)
            backend.set_current_key(encoded, key_type.key_group(key, max_parallelism))
            function(key, found)


class BroadcastProcessFunction(StatefulFunction):
    """Base of functions of a stream without keys and of a broadcast one.

    A row that was emitted or put into state must not be changed afterwards: emit or store a copy."""

    def process_element(self, value: Any, ctx: ReadOnlyBroadcastContext, out: Collector) -> None:
        """One record of the stream that is not broadcast."""
        raise InvariantError(f"{type(self).__name__} defines no process_element, which building the graph refuses")

    def process_broadcast_element(self, value: Any, ctx: BroadcastContext, out: Collector) -> None:
        """One broadcast record; each subtask gets it. What it emits is emitted once by each."""
        raise InvariantError(f"{type(self).__name__} defines no process_broadcast_element, which building the graph refuses")


class KeyedBroadcastProcessFunction(KeyedFunction):
    """Base of functions of a keyed stream and of a broadcast one.

        LIMITS = hf.MapStateDescriptor("limits", str, int)

        class Limit(hf.KeyedBroadcastProcessFunction):
            spent = hf.ValueStateDescriptor("spent", int)
            states = (spent,)

            def process_element(self, value, ctx, out):
                spent = ctx.state(self.spent).value(0) + value["amount"]
                ctx.state(self.spent).update(spent)
                if spent > ctx.broadcast_state(LIMITS).get(value["shop"], 100):
                    out({"card": ctx.key, "spent": spent})

            def process_broadcast_element(self, value, ctx, out):
                ctx.broadcast_state(LIMITS).put(value["shop"], value["limit"])

        payments.key_by("card").connect(limits.broadcast(LIMITS)).process(Limit())
    """

    def process_element(self, value: Any, ctx: ReadOnlyBroadcastContext, out: Collector) -> None:
        """One record of the keyed stream; its key is current."""
        raise InvariantError(f"{type(self).__name__} defines no process_element, which building the graph refuses")

    def process_broadcast_element(self, value: Any, ctx: BroadcastContext, out: Collector) -> None:
        """One broadcast record; each subtask gets it. What it emits is emitted once by each."""
        raise InvariantError(f"{type(self).__name__} defines no process_broadcast_element, which building the graph refuses")


class _BroadcastSide(FunctionOperator):
    """Broadcast state, and records of the broadcast input, for both operators below."""

    function: BroadcastProcessFunction | KeyedBroadcastProcessFunction

    def __init__(
        self,
        function: BroadcastProcessFunction | KeyedBroadcastProcessFunction,
        input_types: tuple[RowType, RowType],
        states: Sequence[MapStateDescriptor[Any, Any]],
        output_type: RowType,
        side_outputs: Mapping[str, RowType] | None = None,
    ) -> None:
        super().__init__(function, output_type, side_outputs)
        self.input_types = input_types
        self.broadcast_states = tuple(states)
        self._states: BroadcastStates | None = None

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        lists: list[OperatorListStateDescriptor] = [broadcast_list(each) for each in self.broadcast_states]
        return (*super().declared_states(), *lists)

    def initialize_state(self) -> None:
        self._states = BroadcastStates(self.broadcast_states, self.context.operator_state, self.context.uid)

    def _with_states(self, context: ReadOnlyBroadcastContext) -> ReadOnlyBroadcastContext:
        """Also makes the context of the broadcast side."""
        if self._states is None:
            raise InvariantError(f"operator {self.context.uid!r}: opened before its state was restored")
        context._broadcast = self._states
        self._side = BroadcastContext(self.context, tuple(self.function.states), self._sides)
        self._side._broadcast = self._states
        self._side._keyed = context if context._backend is not None else None
        return context

    def _take_broadcast(self, batch: Batch) -> None:
        self._take_plain(batch, self._side, self.input_types[1], self.function.process_broadcast_element)

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        self._side._watermark_ms = watermark_ms
        return super().process_watermark(watermark_ms)

    def snapshot_state(self, checkpoint_id: int) -> None:
        if self._states is not None:
            self._states.store()


class BroadcastProcessOperator(_BroadcastSide):
    """Runs a BroadcastProcessFunction; input 1 is the broadcast one."""

    def _new_context(self) -> ProcessContext:
        states = tuple(self.function.states)
        context = ReadOnlyBroadcastContext(self.context, states, self._sides, uses_timers=False, is_keyed=False)
        return self._with_states(context)

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if input_index:
            self._take_broadcast(batch)
        else:
            self._take_plain(batch, self._context, self.input_types[0], self.function.process_element)


class KeyedBroadcastProcessOperator(_BroadcastSide, KeyedFunctionOperator):
    """Runs a KeyedBroadcastProcessFunction; input 1 is the broadcast one, which has no keys."""

    function: KeyedBroadcastProcessFunction

    def __init__(
        self,
        function: KeyedBroadcastProcessFunction,
        selector: Selector,
        input_types: tuple[RowType, RowType],
        states: Sequence[MapStateDescriptor[Any, Any]],
        output_type: RowType,
        side_outputs: Mapping[str, RowType] | None = None,
    ) -> None:
        super().__init__(function, input_types, states, output_type, side_outputs)
        self.selector = selector

    def _new_context(self) -> ProcessContext:
        context = ReadOnlyBroadcastContext(
            self.context, tuple(self.function.states), self._sides, uses_timers=self.uses_timers
        )
        return self._with_states(context)

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if input_index:
            self._take_broadcast(batch)
        else:
            self._take(batch, self.selector, self.input_types[0], self.function.process_element)
