"""Triggers: when a window of row functions fires, and when its contents are purged.

A trigger is asked for every record and at the times for which it has set timers; what it answers the operator does. What it must
remember is state of its own, one value for each key and window. Source of the contracts: Flink, Trigger and its subclasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.operators.base import TimerService
from holdfast.operators.functions.windows.bounds import GLOBAL_WINDOW, TimeWindow
from holdfast.statebackends.backend import KeyedStateBackend
from holdfast.statebackends.errors import GraphError, InvalidConfigError, InvariantError, UndeclaredStateError
from holdfast.statebackends.state import (
    AggregatingStateDescriptor,
    ColumnarStateDescriptor,
    ListStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
    duration_ms,
)

STATES_KEPT_MAX = 1_024
"""State objects that one operator keeps at hand; they are made again when more are in use."""


class TriggerResult(Enum):
    """What is done with a window: it fires, its contents go, both (in this order), or nothing."""

    CONTINUE = (False, False)
    FIRE = (True, False)
    PURGE = (False, True)
    FIRE_AND_PURGE = (True, True)

    def __init__(self, fires: bool, purges: bool) -> None:
        self.fires = fires
        self.purges = purges


CONTINUE, FIRE = TriggerResult.CONTINUE, TriggerResult.FIRE


class NamespacedStates:
    """State objects of the current key by descriptor and namespace; a bounded number is kept at hand."""

    __slots__ = ("_backend", "_found")

    def __init__(self, backend: KeyedStateBackend) -> None:
        self._backend = backend
        self._found: dict[tuple[str, bytes], Any] = {}

    def get(self, descriptor: StateDescriptor, namespace: bytes) -> Any:
        place = (descriptor.name, namespace)
        state = self._found.get(place)
        if state is None:
            if len(self._found) >= STATES_KEPT_MAX:
                self._found.clear()
            state = self._found[place] = self._backend.get_state(descriptor, namespace)
        return state

    def forget(self) -> None:
        """Let go of all, so that the backend can forget namespaces without rows."""
        self._found.clear()


class TriggerContext:
    """What a trigger sees beside the record: times, timers and state, all of the current key and window."""

    __slots__ = (
        *("_declared", "_merged", "_merged_states", "_namespace", "_operator", "_state_namespace", "_states", "_timers"),
        "current_watermark",
    )

    def __init__(
        self, operator: str, declared: tuple[StateDescriptor, ...], states: NamespacedStates, timers: TimerService, watermark: int
    ) -> None:
        self._operator = operator
        self._declared = {descriptor.name: descriptor for descriptor in declared}
        self._states = states
        self._timers = timers
        self._namespace = self._state_namespace = b""
        self._merged: Sequence[bytes] = ()
        self._merged_states: set[str] = set()
        self.current_watermark = watermark
        """Event time that the operator has reached, ms."""

    def enter(self, namespace: bytes, state_namespace: bytes, merged: Sequence[bytes] = ()) -> None:
        """For the operator: what follows is of this window. `merged`: namespaces of the state of the windows it is made of."""
        self._namespace = namespace
        self._state_namespace = state_namespace
        self._merged = merged
        if merged:
            self._merged_states = set()

    @property
    def current_processing_time(self) -> int:
        """Wall clock, ms."""
        return self._timers.current_processing_time

    def register_event_time_timer(self, timestamp_ms: int) -> None:
        self._timers.register_event_time_timer(timestamp_ms, self._namespace)

    def delete_event_time_timer(self, timestamp_ms: int) -> None:
        self._timers.delete_event_time_timer(timestamp_ms, self._namespace)

    def register_processing_time_timer(self, timestamp_ms: int) -> None:
        self._timers.register_processing_time_timer(timestamp_ms, self._namespace)

    def delete_processing_time_timer(self, timestamp_ms: int) -> None:
        self._timers.delete_processing_time_timer(timestamp_ms, self._namespace)

    def state(self, descriptor: StateDescriptor) -> Any:
        """The state of this window. Raises UndeclaredStateError for a descriptor that is not in the trigger's `states`."""
        self._check(descriptor)
        return self._states.get(descriptor, self._state_namespace)

    def merge_state(self, descriptor: StateDescriptor) -> None:
        """In `on_merge`: bring the state of the merged windows into the new one's. Theirs stays until `clear` was called for them.

        Reducing, aggregating and list state only. Raises UndeclaredStateError for a descriptor that was not declared,
        InvariantError for state that can't be merged."""
        self._check(descriptor)
        if descriptor.name in self._merged_states:
            return
        self._merged_states.add(descriptor.name)
        target = self._states.get(descriptor, self._state_namespace)
        for namespace in self._merged:
            merge_states(descriptor, self._states.get(descriptor, namespace), target)

    def _check(self, descriptor: StateDescriptor) -> None:
        if self._declared.get(descriptor.name) != descriptor:
            raise UndeclaredStateError(
                f"operator {self._operator!r}: state {descriptor.name!r} is not among the declared states of the trigger "
                f"({', '.join(self._declared) or 'none'}): add its descriptor to the trigger's `states`",
                operator=self._operator,
                state=descriptor.name,
            )


def merge_states(descriptor: StateDescriptor, source: Any, target: Any) -> None:
    """Add what `source` holds to `target`. Raises InvariantError for a kind that can't be merged."""
    if isinstance(descriptor, ListStateDescriptor):
        target.add_all(source.get())
    elif isinstance(descriptor, ReducingStateDescriptor):
        if (value := source.get()) is not None:
            target.add(value)
    elif isinstance(descriptor, AggregatingStateDescriptor):
        if (accumulator := source.value()) is not None:
            own = target.value()
            target.update(accumulator if own is None else descriptor.aggregate.merge(own, accumulator))
    else:
        raise InvariantError(f"state {descriptor.name!r} is {descriptor.kind} state, which can't be merged")


class Trigger:
    """Base of triggers. One object serves all windows of all keys: what differs between them belongs into `states`.

    class EveryTenth(hf.Trigger):
        seen = hf.ReducingStateDescriptor("seen", int, operator.add)
        states = (seen,)

        def on_element(self, row, timestamp, window, ctx):
            seen = ctx.state(self.seen)
            seen.add(1)
            return hf.TriggerResult.FIRE if seen.get() % 10 == 0 else hf.TriggerResult.CONTINUE

        def clear(self, window, ctx):
            ctx.state(self.seen).clear()
    """

    states: ClassVar[tuple[StateDescriptor, ...]] = ()
    """Descriptors of every state that it asks for."""

    def on_element(self, row: Any, timestamp: int | None, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """A record has come into the window. `timestamp`: its event time, ms; None where there are none."""
        raise InvariantError(f"{type(self).__name__} defines no on_element, which building the graph refuses")

    def on_event_time(self, timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """An event-time timer of the window is due: one that the trigger has set, or the one at which its state goes."""
        return CONTINUE

    def on_processing_time(self, timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        """As `on_event_time`, of processing time."""
        return CONTINUE

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """Windows have become this one: merge their state, set its timers. `clear` is called for each of them afterwards.

        Define it for sessions, which a trigger without it is refused for."""
        raise InvariantError(f"{type(self).__name__} defines no on_merge, which building the graph refuses")

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        """The window goes: clear its state, and delete the timers that were set."""

    @property
    def can_merge(self) -> bool:
        return type(self).on_merge is not Trigger.on_merge

    if TYPE_CHECKING:  # a subclass declares `states` for all its objects, or each for itself

        def __init__(self, *arguments: Any, **options: Any) -> None: ...


def _is_set_too_early(timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> bool:
    """Whether a snapshot of an older release has the timer of the end of a global window 1 ms early; it is set again."""
    if not timestamp_ms == window.end - 1 < window.max_timestamp:
        return False
    ctx.register_event_time_timer(window.max_timestamp)
    return True


class EventTimeTrigger(Trigger):
    """Fires when the watermark reaches the end of the window, and then once for each record that comes in time for its state."""

    def __init__(self) -> None:
        """No settings."""

    def on_element(self, row: Any, timestamp: int | None, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        if window.max_timestamp <= ctx.current_watermark:
            return FIRE
        ctx.register_event_time_timer(window.max_timestamp)
        return CONTINUE

    def on_event_time(self, timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        if _is_set_too_early(timestamp_ms, window, ctx):
            return CONTINUE
        return FIRE if timestamp_ms == window.max_timestamp else CONTINUE

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        if window.max_timestamp > ctx.current_watermark:
            ctx.register_event_time_timer(window.max_timestamp)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.delete_event_time_timer(window.max_timestamp)


class ProcessingTimeTrigger(Trigger):
    """Fires when the wall clock has passed the end of the window."""

    def __init__(self) -> None:
        """No settings."""

    def on_element(self, row: Any, timestamp: int | None, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        ctx.register_processing_time_timer(window.max_timestamp)
        return CONTINUE

    def on_processing_time(self, timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return FIRE if timestamp_ms == window.max_timestamp else CONTINUE

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.register_processing_time_timer(window.max_timestamp)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.delete_processing_time_timer(window.max_timestamp)


def _added(one: int, other: int) -> int:
    return one + other


class CountTrigger(Trigger):
    """Fires when the window has got `count` records since it fired last; of merged windows the counts are added."""

    count_state = ReducingStateDescriptor("trigger_count", int, _added)
    states = (count_state,)

    def __init__(self, count: int) -> None:
        """Raises InvalidConfigError for less than 1."""
        self.count = _at_least_one(count, "count of a CountTrigger")

    def on_element(self, row: Any, timestamp: int | None, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        state = ctx.state(self.count_state)
        state.add(1)
        if state.get() < self.count:
            return CONTINUE
        state.clear()
        return FIRE

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.merge_state(self.count_state)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.state(self.count_state).clear()


class _ContinuousTrigger(Trigger):
    """Fires every interval, at whole multiples of it, and at the end of the window."""

    next_state = ReducingStateDescriptor("trigger_next", int, min)
    states = (next_state,)

    def __init__(self, interval: timedelta | int) -> None:
        """`interval`: a timedelta, or ms. Raises InvalidConfigError for less than 1 ms."""
        self.interval_ms = _at_least_one(duration_ms(interval, "the interval of a trigger"), "interval of a trigger, ms,")

    def _set_next(self, now_ms: int, window: TimeWindow, ctx: TriggerContext, register: Callable[[int], None]) -> None:
        ctx.state(self.next_state).add(now_ms - now_ms % self.interval_ms + self.interval_ms)
        self._register_next(window, ctx, register)

    def _register_next(self, window: TimeWindow, ctx: TriggerContext, register: Callable[[int], None]) -> None:
        """Unless the window ends before: it may grow, and then it is done again."""
        next_ms = ctx.state(self.next_state).get()
        if next_ms is not None and next_ms < window.max_timestamp:
            register(next_ms)

    def _fired(
        self, timestamp_ms: int, now_ms: int, window: TimeWindow, ctx: TriggerContext, register: Callable[[int], None]
    ) -> TriggerResult:
        """A timer fired; the next one is behind `now_ms`. Behind the end of event time there is none."""
        state = ctx.state(self.next_state)
        if state.get() == timestamp_ms:
            state.clear()
            if now_ms < MAX_WATERMARK:
                self._set_next(now_ms, window, ctx, register)
            return FIRE
        return FIRE if timestamp_ms == window.max_timestamp else CONTINUE

    def _cleared(self, window: TimeWindow, ctx: TriggerContext, delete: Callable[[int], None]) -> None:
        state = ctx.state(self.next_state)
        if (next_ms := state.get()) is not None:
            delete(next_ms)
            state.clear()
        delete(window.max_timestamp)


class ContinuousEventTimeTrigger(_ContinuousTrigger):
    """Fires when the watermark has passed a whole multiple of `interval`, and at the end of the window, if it has contents."""

    def on_element(self, row: Any, timestamp: int | None, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        if window.max_timestamp <= ctx.current_watermark:
            return FIRE
        ctx.register_event_time_timer(window.max_timestamp)
        if ctx.state(self.next_state).get() is None and timestamp is not None:
            self._set_next(timestamp, window, ctx, ctx.register_event_time_timer)
        return CONTINUE

    def on_event_time(self, timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        if _is_set_too_early(timestamp_ms, window, ctx):
            return CONTINUE
        is_over = ctx.current_watermark == MAX_WATERMARK  # a global window would fire for ever
        now_ms = MAX_WATERMARK if is_over and window == GLOBAL_WINDOW else timestamp_ms
        return self._fired(timestamp_ms, now_ms, window, ctx, ctx.register_event_time_timer)

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.merge_state(self.next_state)
        self._register_next(window, ctx, ctx.register_event_time_timer)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        self._cleared(window, ctx, ctx.delete_event_time_timer)


class ContinuousProcessingTimeTrigger(_ContinuousTrigger):
    """As ContinuousEventTimeTrigger, by the wall clock; of an event-time window it fires between its records alone."""

    def on_element(self, row: Any, timestamp: int | None, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        if ctx.state(self.next_state).get() is None:
            self._set_next(ctx.current_processing_time, window, ctx, ctx.register_processing_time_timer)
        return CONTINUE

    def on_processing_time(self, timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        now_ms = max(timestamp_ms, ctx.current_processing_time)  # behind a pause it fires once
        return self._fired(timestamp_ms, now_ms, window, ctx, ctx.register_processing_time_timer)

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.merge_state(self.next_state)
        self._register_next(window, ctx, ctx.register_processing_time_timer)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        self._cleared(window, ctx, ctx.delete_processing_time_timer)


class PurgingTrigger(Trigger):
    """Fires as another trigger does, and then purges: what fired is not in the next result."""

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger
        self.states = trigger.states  # type: ignore[misc]

    def on_element(self, row: Any, timestamp: int | None, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return _purging(self.trigger.on_element(row, timestamp, window, ctx))

    def on_event_time(self, timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return _purging(self.trigger.on_event_time(timestamp_ms, window, ctx))

    def on_processing_time(self, timestamp_ms: int, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        return _purging(self.trigger.on_processing_time(timestamp_ms, window, ctx))

    def on_merge(self, window: TimeWindow, ctx: TriggerContext) -> None:
        self.trigger.on_merge(window, ctx)

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        self.trigger.clear(window, ctx)

    @property
    def can_merge(self) -> bool:
        return self.trigger.can_merge


def _purging(result: TriggerResult) -> TriggerResult:
    return TriggerResult.FIRE_AND_PURGE if result.fires else result


class DeltaTrigger(Trigger):
    """Fires when `delta(last, row)` is above `threshold`; `last` is the record that fired last, at first the first one.

    Not for sessions: of merged windows there is no last record."""

    def __init__(self, threshold: float, delta: Callable[[Any, Any], float], row_type: Any) -> None:
        """`row_type`: type of the rows, as of a state descriptor."""
        self.threshold = threshold
        self.delta = delta
        self.last: ValueStateDescriptor[Any] = ValueStateDescriptor("trigger_last", row_type)
        self.states = (self.last,)  # type: ignore[misc]

    def on_element(self, row: Any, timestamp: int | None, window: TimeWindow, ctx: TriggerContext) -> TriggerResult:
        state = ctx.state(self.last)
        last = state.value()
        if last is None:
            state.update(row)
            return CONTINUE
        if self.delta(last, row) <= self.threshold:
            return CONTINUE
        state.update(row)
        return FIRE

    def clear(self, window: TimeWindow, ctx: TriggerContext) -> None:
        ctx.state(self.last).clear()


def check_trigger(trigger: Any, *, merges: bool) -> None:
    """Raises GraphError for what is no trigger, or for sessions can't be one."""
    if not isinstance(trigger, Trigger):
        raise GraphError(f"operator 'window': {trigger!r} is not a trigger such as hf.CountTrigger(10)", operator="window")
    name = type(trigger).__name__
    if type(trigger).on_element is Trigger.on_element:
        raise GraphError(f"operator 'window': {name} must define on_element", operator="window")
    if merges and not trigger.can_merge:
        raise GraphError(
            f"operator 'window': {name} must define on_merge to be a trigger of sessions, which are merged", operator="window"
        )
    if any(isinstance(state, ColumnarStateDescriptor) for state in trigger.states):
        raise GraphError(f"operator 'window': {name} declares columnar state, which a trigger can't use", operator="window")


def _at_least_one(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConfigError(f"the {what} must be at least 1, not {value!r}", setting=what)
    return value
