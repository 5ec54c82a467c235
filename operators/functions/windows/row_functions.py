"""Windows of row functions: tumbling, sliding, session and global ones, with triggers and evictors, record by record.

What is late is decided by the watermark that the snapshot keeps. Contents, the trigger's state and timers are keyed state: contents
and state by the namespace of the window, sessions by their numbers (merging.py). The order of steps for a record and for a timer is
that of Flink's WindowOperator. Until a window ends its default trigger does nothing: the records of a batch enter such windows
together, one access to state for each key and window, and its timers are set with its first record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.barriers.rows import own_copy
from holdfast.operators.base import OVERDUE_MS, OperatorContext, Output
from holdfast.operators.functions.process import Collector, KeyedFunction, KeyedFunctionOperator, ProcessContext
from holdfast.operators.functions.row_loops import row_copier
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.side_outputs import SideOutputs
from holdfast.operators.functions.windows.assigners import LENGTH_MS_MAX, Global, Session, Sliding, WindowAssigner
from holdfast.operators.functions.windows.bounds import (
    GLOBAL_WINDOW,
    TimeWindow,
    bounds_of,
    cleanup_time,
    namespace_bounds,
    slide_of,
    window_of,
)
from holdfast.operators.functions.windows.contents import Contents
from holdfast.operators.functions.windows.evictors import Evictor
from holdfast.operators.functions.windows.firing import check_event_times, event_times
from holdfast.operators.functions.windows.grouping import Integers, by_key, place
from holdfast.operators.functions.windows.kept_assigner import ASSIGNER, check_assigner, keep_assigner
from holdfast.operators.functions.windows.kept_watermark import (
    LATE_UNTIL,
    WATERMARKS,
    KeptWatermark,
    keep_moment,
    restored_moment,
)
from holdfast.operators.functions.windows.merging import (
    SESSION_FIELDS,
    SESSIONS,
    KeySessions,
    SessionWindow,
    decode_sessions,
    encode_sessions,
    merge,
    merged_window,
)
from holdfast.operators.functions.windows.triggers import (
    EventTimeTrigger,
    NamespacedStates,
    ProcessingTimeTrigger,
    Trigger,
    TriggerContext,
    merge_states,
)
from holdfast.operators.task.user_failures import Described
from holdfast.statebackends.errors import InvariantError, UndeclaredStateError
from holdfast.statebackends.state import ListStateDescriptor, StateDescriptor

PANES_MAX = 1_024
"""Windows kept at hand; more in use at a time are made again and again."""
SESSIONS_AT_HAND_MAX = 16
"""Numbers of sessions of a key whose contents are kept at hand."""


class WindowContext(ProcessContext):
    """What a ProcessWindowFunction sees beside the elements. `timestamp` is the time of its results."""

    __slots__ = ("_namespace", "_reached", "_window_declared", "_window_states", "window")

    def __init__(
        self,
        operator: OperatorContext,
        function: ProcessWindowFunction,
        sides: SideOutputs,
        states: NamespacedStates,
        reached: KeptWatermark,
    ) -> None:
        super().__init__(operator, tuple(function.states), sides, uses_timers=False)
        self._window_states = states
        self._window_declared = {descriptor.name: descriptor for descriptor in function.window_states}
        self._namespace = b""
        self._reached = reached
        self.window = GLOBAL_WINDOW
        """The window that fires: `start` and `end`, ms."""

    def enter(self, window: TimeWindow, namespace: bytes, timestamp: int | None) -> None:
        """For the operator: what follows is of this window."""
        self.window = window
        self._namespace = namespace
        self.timestamp = timestamp

    def window_state(self, descriptor: Any) -> Any:
        """State of this key and window; it goes with the window. Raises UndeclaredStateError for what is not in `window_states`."""
        if self._window_declared.get(descriptor.name) != descriptor:
            raise UndeclaredStateError(
                f"operator {self._operator.uid!r}: state {descriptor.name!r} is not among the declared states of a window "
                f"({', '.join(self._window_declared) or 'none'}): add its descriptor to the function's `window_states`",
                operator=self._operator.uid,
                state=descriptor.name,
            )
        return self._window_states.get(descriptor, self._namespace)

    def global_state(self, descriptor: Any) -> Any:
        """State of this key, shared by its windows: that of `state`."""
        return self.state(descriptor)

    @property
    def watermark(self) -> int:
        return self._reached.current


class ProcessWindowFunction(KeyedFunction):
    """Base of functions of windows.

    class Median(hf.ProcessWindowFunction):
        returns = {"key": str, "start": int, "median": float}

        def process(self, key, ctx, elements, out):
            out({"key": key, "start": ctx.window.start, "median": statistics.median(row["price"] for row in elements)})
    """

    window_states: ClassVar[tuple[StateDescriptor, ...]] = ()
    """Descriptors of every state of one key and window, for `ctx.window_state`. Not for sessions, which are merged.

    `states` has those of a key, for `ctx.global_state`."""

    def process(self, key: Any, ctx: WindowContext, elements: list[Any], out: Collector) -> None:
        """The window fires with these elements, in the order of arrival (merged sessions: one behind the other); or with the one
        result of `reduce` or `aggregate`."""
        raise InvariantError(f"{type(self).__name__} defines no process, which building the graph refuses")


class PassOn(ProcessWindowFunction):
    """Emits the elements as they are: the result of `reduce` or `aggregate`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        """That of the user, for errors."""

    def process(self, key: Any, ctx: WindowContext, elements: list[Any], out: Collector) -> None:
        for element in elements:
            out(element)


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """Of `keyed.window(...)`."""

    assigner: WindowAssigner
    trigger: Trigger
    evictor: Evictor | None = None
    lateness_ms: int = 0
    late_tag: str = ""


class _Records(NamedTuple):
    """A batch, record by record."""

    rows: Sequence[Any]
    keys: list[bytes]
    groups: list[int]
    stamps: Sequence[int | None]


class _Pane:
    """One window at hand: where its state is, and until when."""

    __slots__ = ("cleanup_ms", "contents", "namespace", "trigger_namespace", "window")

    def __init__(self, window: TimeWindow, contents: Any, trigger_namespace: bytes, cleanup_ms: int) -> None:
        self.window = window
        self.namespace = window.namespace
        self.contents = contents
        self.trigger_namespace = trigger_namespace
        self.cleanup_ms = cleanup_ms
        """Watermark, or wall clock, ms, at which its state goes; of a global window the maximum, which is no moment."""


class WindowOperator(KeyedFunctionOperator):
    """Runs a ProcessWindowFunction, or `reduce` or `aggregate`, on the windows of a keyed stream."""

    function: ProcessWindowFunction
    _context: WindowContext

    def __init__(
        self,
        function: ProcessWindowFunction,
        settings: WindowSettings,
        contents: Contents,
        selector: Selector,
        input_type: RowType,
        output_type: RowType,
        side_outputs: Mapping[str, RowType] | None = None,
    ) -> None:
        super().__init__(function, output_type, side_outputs)
        self.settings = settings
        self.contents = contents
        self.contents_state = contents.descriptor(is_evicting=settings.evictor is not None)
        self.selector = selector
        self.input_type = input_type
        self.uses_timers = True

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        own: list[StateDescriptor] = [self.contents_state, WATERMARKS, LATE_UNTIL, ASSIGNER]
        if isinstance(self.settings.assigner, Session):
            own.append(SESSIONS)
        return (*own, *self.settings.trigger.states, *self.function.states, *self.function.window_states)

    def _kept_states(self) -> tuple[StateDescriptor, ...]:
        return (*self.function.states, *self.function.window_states)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._reached = KeptWatermark()
        self._panes: dict[int, _Pane] = {}
        self._is_event_time = self.settings.assigner.is_event_time
        self._is_global = isinstance(self.settings.assigner, Global)
        self._is_session = isinstance(self.settings.assigner, Session)
        self._gap_ms = self.settings.assigner.gap_ms if isinstance(self.settings.assigner, Session) else 0
        default = EventTimeTrigger if self._is_event_time else ProcessingTimeTrigger
        self._is_default = type(self.settings.trigger) is default and not self._is_global
        """Windows fire at their end, and from then on for each record."""
        self._is_list = isinstance(self.contents_state, ListStateDescriptor)
        self._arrived_ms = 0
        """Wall clock when the batch at hand arrived."""
        self._was_late_until = self._late_until = MIN_WATERMARK
        """Windows whose last ms is up to it are late: as restored, and now."""
        self._overdue: Iterator[None] = iter(())
        overlaps = isinstance(self.settings.assigner, Sliding) and self.settings.assigner.size_ms > self.settings.assigner.slide_ms
        self._hands_copies = overlaps or self.settings.lateness_ms > 0 or not self._is_default
        """What a window has got is looked at again behind a firing, or by another window, or by the trigger: what the function does
        to its rows, or one behind it, must not be seen there."""
        self._takes_copies = self.contents.reduce is not None and not self._is_list and (overlaps or not self._is_default)
        """A row may be the value of several windows, each of which `reduce` may change in place."""
        self._own_row = row_copier(self.input_type)
        self._is_plain_session = self._is_session and self._is_default and self._is_event_time and not self.settings.lateness_ms
        """Sessions fire once, at their end, and are gone."""
        if self._is_plain_session:
            self._on_event_timer = self._on_session_timer
        elif self._is_default and self._is_event_time and not self._is_session:
            self._on_event_timer = self._on_aligned_timer
        else:
            self._on_event_timer = self._on_event_time
        self._contents_at: dict[int, Any] = {}
        self._fired_pane: _Pane | None = None
        """The window of the last timer: those of one end come together."""

    # -------------------------------------------------------------------------------------------------------- state

    def initialize_state(self) -> None:
        """Windows keep their bounds, so that lengths may change; what they fire by, and how they are merged, may not."""
        advice = "give windows of another kind a uid of their own"
        check_assigner(self.context, self._kind_of_windows(), self.contents_state.name, "kind, time", advice)
        self._reached.restore(self.context)
        was_late_until = restored_moment(self.context, LATE_UNTIL)
        self._was_late_until = MIN_WATERMARK if was_late_until is None else was_late_until
        self._late_until = self._late_at(self._reached.current)

    def _kind_of_windows(self) -> list[str]:
        kind = "session" if self._is_session else "global" if self._is_global else "aligned"
        return [kind, "event" if self._is_event_time else "processing"]

    def open(self) -> None:
        self._window_states = NamespacedStates(self.context.keyed_state)
        self._timer_service = self._timers()
        if self._is_session:
            self._session_lists = self.context.keyed_state.get_state(SESSIONS)
        self._trigger_context = TriggerContext(
            self.context.uid, tuple(self.settings.trigger.states), self._window_states, self._timer_service, self._reached.current
        )
        super().open()

    def _new_context(self) -> WindowContext:
        return WindowContext(self.context, self.function, self._sides, self._window_states, self._reached)

    def snapshot_state(self, checkpoint_id: int) -> None:
        state = self.context.operator_state
        self._reached.store(state.list_state(WATERMARKS.name))
        keep_moment(state.list_state(LATE_UNTIL.name), self._late_at(self._reached.kept))
        keep_assigner(self.context, self._kind_of_windows())
        self._panes.clear()  # what the backend finds in use it can't forget
        self._fired_pane = None
        self._contents_at.clear()
        self._window_states.forget()

    def _contents_of(self, namespace: bytes) -> Any:
        return self._window_states.get(self.contents_state, namespace)

    def _session_contents(self, number: int) -> Any:
        """What a session has got, by the number of its contents."""
        found = self._contents_at.get(number)
        if found is None:
            found = self._contents_of(b"c%d" % number)
            if number < SESSIONS_AT_HAND_MAX:
                self._contents_at[number] = found
        return found

    def _pane(self, window: TimeWindow) -> _Pane:
        """Of a window that is not merged, kept at hand."""
        if len(self._panes) >= PANES_MAX:
            self._panes.clear()
        pane = self._panes[window.start] = self._new_pane(window)
        return pane

    def _new_pane(self, window: TimeWindow) -> _Pane:
        namespace = window.namespace
        return _Pane(window, self._contents_of(namespace), namespace, self._cleanup_time(window))

    def _session_pane(self, session: SessionWindow) -> _Pane:
        window = session.window
        contents = self._session_contents(session.contents)
        return _Pane(window, contents, b"t%d" % session.trigger, self._cleanup_time(window))

    def _cleanup_time(self, window: TimeWindow) -> int:
        if self._is_global:
            return MAX_WATERMARK
        return cleanup_time(window, self.settings.lateness_ms if self._is_event_time else 0)

    def _sessions(self) -> list[SessionWindow]:
        return decode_sessions(self._session_lists.value(()))

    def _store_sessions(self, sessions: Sequence[SessionWindow]) -> None:
        if sessions:
            self._session_lists.store(encode_sessions(sessions))
        else:
            self._session_lists.clear()

    # ------------------------------------------------------------------------------------------------------ records

    def process_batch(self, batch: Batch, input_index: int) -> None:
        for _ in self._catch_up():
            pass
        if self._is_event_time and len(event_times(batch, self.context, "a window")):
            check_event_times(*batch.time_range(), self.context)
        self._arrived_ms = self.context.now_ms()
        records = self._records(batch)
        if self._is_default and not self._is_session:
            self._take_aligned(records, batch.timestamps if self._is_event_time else None)
        elif self._is_plain_session:
            self._take_sessions(records)
        else:
            self._take_each(records, range(len(records.rows)), self._adding())
        self._emit_fired()

    def _records(self, batch: Batch) -> _Records:
        keys = self.selector.keys(
            batch, max_parallelism=self.context.max_parallelism, operator=self.context.uid, subtask=self.context.subtask
        )
        stamps = [None] * batch.num_rows if batch.timestamps is None else batch.timestamps.tolist()
        return _Records(batch.rows(self.input_type.record), keys.encoded(), keys.key_groups.tolist(), stamps)

    def _take_each(self, records: _Records, numbers: Iterable[int], add: Callable[[Any, int | None], bool]) -> None:
        """These records, one by one. `add` puts one into its windows; False if all of them are late."""
        rows, keys, groups, stamps = records
        set_current_key, context = self._backend.set_current_key, self._context
        row = None
        try:
            for number in numbers:
                row, stamp = rows[number], stamps[number]
                set_current_key(keys[number], groups[number])
                context.timestamp = stamp
                if not add(row, stamp):
                    self._take_late(row, stamp)
        except Exception as error:
            self._raise(error, self._blamed, row, keyed=True)

    def _take_aligned(self, records: _Records, stamps: Integers | None) -> None:
        """`stamps`: event times; None: the records are of the time at which they arrive."""
        assigner = self.settings.assigner
        if isinstance(assigner, Session | Global):
            raise InvariantError(f"operator {self.context.uid!r}: windows of {assigner!r} are not aligned")
        ended_at = MIN_WATERMARK if stamps is None else self._reached.current
        times = np.full(len(records.rows), self._arrived_ms, np.int64) if stamps is None else stamps
        placed = place(times, assigner, ended_at)
        whole: dict[bytes, list[int]] = {}
        for start, numbers in placed.open:
            pane = self._panes.get(start) or self._pane(TimeWindow(start, start + assigner.size_ms))
            if len(numbers) < len(records.rows):
                self._put_into(pane, records, by_key(records.keys, numbers))
            else:  # of sliding windows most have all records of the batch
                whole = whole or by_key(records.keys, numbers)
                self._put_into(pane, records, whole)
        self._take_each(records, placed.behind, self._add_to_ended)

    def _put_into(self, pane: _Pane, records: _Records, numbers_of: dict[bytes, list[int]]) -> None:
        """Records by key into a window that has not ended. It gets its timers with its first record."""
        opened: list[tuple[bytes, int]] = []
        if self._takes_copies:
            records = self._copied(records, numbers_of)
        if self.contents.reduce is not None and not self._is_list:
            self._reduce_into(pane.contents, records, numbers_of, self.contents.reduce, opened)
        else:
            groups, set_current_key, put, state = records.groups, self._backend.set_current_key, self._put, pane.contents
            for key, own in numbers_of.items():
                group = groups[own[0]]
                set_current_key(key, group)
                if put(state, records, own):
                    opened.append((key, group))
        if opened:
            self._set_timers_of(opened, pane)

    def _copied(self, records: _Records, numbers_of: Mapping[bytes, list[int]]) -> _Records:
        rows, own = list(records.rows), self._own_row
        for number in chain.from_iterable(numbers_of.values()):
            rows[number] = own(rows[number])
        return records._replace(rows=rows)

    def _reduce_into(
        self,
        state: Any,
        records: _Records,
        numbers_of: dict[bytes, list[int]],
        reduce: Callable[[Any, Any], Any],
        opened: list[tuple[bytes, int]],
    ) -> None:
        """`_put` for many keys, of what is called most. `opened` gets the keys that had no records."""
        rows, groups, set_current_key = records.rows, records.groups, self._backend.set_current_key
        value, update, row = state.value, state.update, None
        try:
            for key, own in numbers_of.items():
                group = groups[own[0]]
                set_current_key(key, group)
                found = value()
                if found is None:
                    opened.append((key, group))
                for number in own:
                    row = rows[number]
                    found = row if found is None else reduce(found, row)
                    if found is None:
                        break  # which the state refuses
                update(found)
        except Exception as error:
            self._raise(error, self._blamed, row, keyed=True)

    def _put(self, state: Any, records: _Records, numbers: list[int]) -> bool:
        """Records of the current key into a window that has not ended; whether it had none."""
        rows, reduce, row = records.rows, self.contents.reduce, None
        try:
            if self._is_list:
                return self._put_all(state, records, numbers)
            found = state.value()
            is_new = found is None
            if reduce is not None:
                for number in numbers:
                    row = rows[number]
                    found = row if found is None else reduce(found, row)
                    if found is None:
                        break  # which the state refuses
            elif (aggregate := self.contents.aggregate) is not None:
                for number in numbers:
                    row = rows[number]
                    found = aggregate.add(row, aggregate.create_accumulator() if found is None else found)
                    if found is None:
                        break
            state.update(found)
        except Exception as error:
            self._raise(error, self._blamed, row, keyed=True)
        return is_new

    def _put_all(self, state: Any, records: _Records, numbers: list[int]) -> bool:
        rows = [records.rows[number] for number in numbers]
        if self.settings.evictor is not None:
            rows = [self.contents.stamped(records.stamps[number], row) for number, row in zip(numbers, rows, strict=True)]
        was_empty: bool = state.extend(rows)
        return was_empty

    @property
    def _blamed(self) -> Callable[..., Any]:
        """Whose line an error names."""
        return self.function.function if isinstance(self.function, PassOn) else self.function.process

    def _adding(self) -> Callable[[Any, int | None], bool]:
        """Puts a record into its windows; False if all of them are late."""
        if self._is_global:
            return self._add_to_global
        return self._add_to_session if self._is_session else self._add_to_aligned

    def _add_to_global(self, row: Any, stamp: int | None) -> bool:
        self._add(self._panes.get(GLOBAL_WINDOW.start) or self._pane(GLOBAL_WINDOW), row, stamp)
        return True

    def _time_of(self, stamp: int | None) -> int:
        return stamp if self._is_event_time and stamp is not None else self._arrived_ms

    def _add_to_ended(self, row: Any, stamp: int | None) -> bool:
        """As `_add_to_aligned`, but for windows that have not ended: it is in these."""
        return self._add_to_aligned(row, stamp, ended_at=self._reached.current)

    def _add_to_aligned(self, row: Any, stamp: int | None, *, ended_at: int = MAX_WATERMARK) -> bool:
        assigner, time = self.settings.assigner, self._time_of(stamp)
        step_ms: int = slide_of(assigner)  # type: ignore[arg-type]
        size_ms: int = assigner.size_ms  # type: ignore[union-attr]
        start = time - (time - assigner.offset_ms) % step_ms  # type: ignore[union-attr]
        oldest = time - size_ms
        late_until = self._late_until
        panes = self._panes
        in_time = start <= oldest  # between two windows: in none, and not late
        while start > oldest:
            last = start + size_ms - 1
            if last > late_until:
                in_time = True
                if last <= ended_at:
                    self._add(panes.get(start) or self._pane(TimeWindow(start, start + size_ms)), row, stamp)
            start -= step_ms
        return in_time

    def _late_at(self, watermark_ms: int) -> int:
        """Up to where windows are late at a watermark."""
        if not self._is_event_time:
            return MIN_WATERMARK
        if watermark_ms == MAX_WATERMARK:
            return MAX_WATERMARK
        return max(self._was_late_until, watermark_ms - self.settings.lateness_ms)

    def _add_to_session(self, row: Any, stamp: int | None) -> bool:
        start = self._time_of(stamp)
        sessions = self._sessions()
        window = merged_window(sessions, start, start + self._gap(row))
        if self._is_event_time and window.end - 1 <= self._late_until:
            return False
        merged = merge(sessions, window)
        pane = self._session_pane(merged.session)
        if merged.sessions is not sessions:
            self._merge(pane, merged.merged)
            self._store_sessions(merged.sessions)
        self._add(pane, row, stamp)
        return True

    def _take_sessions(self, records: _Records) -> None:
        """Records of event-time sessions that fire once, at their end, and are gone."""
        late: list[int] = []
        set_current_key, groups, grow = self._backend.set_current_key, records.groups, self._grow
        for key, numbers in by_key(records.keys, range(len(records.keys))).items():
            set_current_key(key, groups[numbers[0]])
            taken = grow(records, numbers)
            if taken < len(numbers):
                late += self._add_to_sessions(records, numbers[taken:] if taken else numbers)
        for number in sorted(late):
            self._take_late(records.rows[number], records.stamps[number])

    def _grow(self, records: _Records, numbers: list[int]) -> int:
        """The first of these records that open the only session of the current key, or join it behind its start: how many."""
        gap_ms, stamps, lists = self._gap_ms, records.stamps, self._session_lists
        stored = lists.value()
        if not gap_ms or (stored is not None and len(stored) > SESSION_FIELDS):
            return 0
        first: int = stamps[numbers[0]]  # type: ignore[assignment]
        start, end, contents, trigger = stored or (first, first, 0, 0)
        before, taken = end, 0
        for number in numbers:
            at: int = stamps[number]  # type: ignore[assignment]
            grown = max(end, at + gap_ms)
            if not start <= at <= end or grown - 1 <= self._late_until:
                break
            end = grown
            taken += 1
        if not taken:
            return 0
        self._put(self._session_contents(contents), records, numbers if taken == len(numbers) else numbers[:taken])
        if end != before:
            lists.store([start, end, contents, trigger])
        if stored is None:
            self._set_session_timer(start, end)
        return taken

    def _add_to_sessions(self, records: _Records, numbers: list[int]) -> list[int]:
        """Records of the current key; returns those that are late."""
        found = KeySessions(self._sessions())
        late: list[int] = []
        waiting: dict[int, list[int]] = {}
        for number in numbers:
            start = self._time_of(records.stamps[number])
            joined = found.join(start, start + self._gap_of(records, number), self._late_until)
            if joined is None:
                late.append(number)
                continue
            for absorbed in joined.absorbed:
                self._absorb(records, joined.contents, absorbed, waiting)
            waiting.setdefault(joined.contents, []).append(number)
        for contents, own in waiting.items():
            self._put(self._session_contents(contents), records, own)
        if found.has_changed:
            self._store_sessions(found.sessions)
        for session in found.opened():
            self._set_session_timer(session.start, session.end)
        return late

    def _absorb(self, records: _Records, into: int, absorbed: int, waiting: dict[int, list[int]]) -> None:
        """The contents of one session behind those of another, as they would be had each record come by itself."""
        for contents in (into, absorbed):
            if own := waiting.pop(contents, None):
                self._put(self._session_contents(contents), records, own)
        source = self._session_contents(absorbed)
        merge_states(self.contents_state, source, self._session_contents(into))
        source.clear()

    def _gap_of(self, records: _Records, number: int) -> int:
        try:
            return self._gap(records.rows[number])
        except Exception as error:
            self._raise(error, self._blamed, records.rows[number], keyed=True)

    def _gap(self, row: Any) -> int:
        assigner = self.settings.assigner
        if not isinstance(assigner, Session):
            raise InvariantError(f"operator {self.context.uid!r}: {assigner!r} has no gap")
        if assigner.gap_of is None:
            return assigner.gap_ms
        gap_ms = assigner.gap_of(row)
        if isinstance(gap_ms, bool) or not isinstance(gap_ms, int) or not 1 <= gap_ms <= LENGTH_MS_MAX:
            bounds = f"at least 1 and at most {LENGTH_MS_MAX}"
            raise ValueError(f"the gap of a session must be a whole number of ms, {bounds}, not {gap_ms!r}")
        return gap_ms

    def _merge(self, pane: _Pane, merged: tuple[SessionWindow, ...]) -> None:
        """Timers, the trigger's state and contents of the merged windows become those of the new one."""
        if not merged:
            return
        context = self._trigger_context
        old = [self._session_pane(session) for session in merged]
        context.enter(pane.namespace, pane.trigger_namespace, [one.trigger_namespace for one in old])
        self.settings.trigger.on_merge(pane.window, context)
        for one in old:
            self._clear_trigger(one)
            self._delete_cleanup_timer(one)
        for one in old[1:]:  # the contents of the first stay where they are
            merge_states(self.contents_state, one.contents, pane.contents)
            one.contents.clear()

    def _add(self, pane: _Pane, row: Any, stamp: int | None) -> None:
        if self.settings.evictor is not None:
            pane.contents.add(self.contents.stamped(stamp, row))
        else:
            pane.contents.add(self._own_row(row) if self._takes_copies else row)
        context = self._trigger_context
        context.enter(pane.namespace, pane.trigger_namespace)
        result = self.settings.trigger.on_element(row, stamp, pane.window, context)
        if result.fires:
            self._fire_window(pane, stamp)
        if result.purges:
            pane.contents.clear()
        self._register_cleanup_timer(pane)

    def _take_late(self, row: Any, stamp: int | None) -> None:
        if stamp is None:
            raise InvariantError(f"operator {self.context.uid!r}: a record without a time can't be late")
        if self.settings.late_tag and self.output.has_readers(self.settings.late_tag):
            self._sides.add(self.settings.late_tag, row, stamp)
            return
        counters = self.context.counters
        counters.late_dropped += 1
        counters.late_ms_max = max(counters.late_ms_max, self._reached.behind(stamp))

    # ------------------------------------------------------------------------------------------------------- timers

    def _set_timers_of(self, keys: list[tuple[bytes, int]], pane: _Pane) -> None:
        """All that a window with the default trigger needs, of several keys."""
        timers, end_ms = self._timer_service, pane.window.end - 1
        register = timers.register_event_time_timers if self._is_event_time else timers.register_processing_time_timers
        register(end_ms, pane.namespace, keys)
        if self._is_event_time and self.settings.lateness_ms:
            register(pane.cleanup_ms, pane.namespace, keys)

    def _set_session_timer(self, start: int, end: int) -> None:
        """Of a session of the current key that fires once, at its end."""
        self._timer_service.register_event_time_timer(end - 1, bounds_of(start, end))

    def _set_timers(self, pane: _Pane) -> None:
        """The same of the current key."""
        if not self._is_event_time:
            self._timer_service.register_processing_time_timer(pane.window.end - 1, pane.namespace)
            return
        self._timer_service.register_event_time_timer(pane.window.end - 1, pane.namespace)
        if self.settings.lateness_ms:
            self._register_cleanup_timer(pane)

    def _register_cleanup_timer(self, pane: _Pane) -> None:
        if self._is_global:
            return
        timers = self._timer_service
        if self._is_event_time:
            timers.register_event_time_timer(pane.cleanup_ms, pane.namespace)
        else:
            timers.register_processing_time_timer(pane.cleanup_ms, pane.namespace)

    def _delete_cleanup_timer(self, pane: _Pane) -> None:
        timers = self._timer_service
        if self._is_event_time:
            timers.delete_event_time_timer(pane.cleanup_ms, pane.namespace)
        else:
            timers.delete_processing_time_timer(pane.cleanup_ms, pane.namespace)

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        self._reached.advance(watermark_ms)
        self._late_until = self._late_at(self._reached.current)
        self._trigger_context.current_watermark = self._reached.current
        fired = self._fire(self._timer_service.advance_watermark(self._reached.current, self._on_event_timer))
        return fired if watermark_ms < MAX_WATERMARK else chain(fired, self._fire_open())

    def _catch_up(self) -> Iterator[None]:
        """What was due at the cut, in slices: it fires before the first record behind it, as it did before the failure."""
        if self._is_behind:
            self._overdue = self._fire(self._timer_service.advance_watermark(self._reached.current, self._on_event_timer))
        return self._overdue

    @property
    def _is_behind(self) -> bool:
        """After a restore: event time has come further than its timers know."""
        return self._timer_service.current_watermark < self._reached.current

    def next_processing_time_ms(self) -> int | None:
        """Overdue if something was due at the cut: the runtime asks before it reads, and lets barriers in between slices."""
        return OVERDUE_MS if self._is_behind else super().next_processing_time_ms()

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        yield from self._catch_up()
        yield from self._fire(self._timer_service.advance_processing_time(now_ms, self._on_processing_time))

    def finish(self) -> Iterator[None]:
        """Windows by the clock of records that came behind the end of event time: timers by the clock bring them."""
        return self._fire_open()

    def _fire_open(self) -> Iterator[None]:
        """Windows by the clock that are open when event time ends fire once; timers of triggers don't. Behind the maximum watermark
        their results would be late for those who read them."""
        if self._is_event_time or self._is_global:
            return iter(())
        return self._fire(self._timer_service.advance_processing_time(MAX_WATERMARK, self._on_end))

    def _on_event_time(self, timestamp_ms: int, namespace: bytes) -> None:
        self._on_window_timer(timestamp_ms, namespace, self.settings.trigger.on_event_time, is_event_time=True)

    def _on_aligned_timer(self, timestamp_ms: int, namespace: bytes) -> None:
        """`_on_event_time` where the default trigger need not be asked, and windows are not merged."""
        pane = self._fired_pane
        if pane is None or pane.namespace != namespace:
            pane = self._fired_pane = self._new_pane(window_of(namespace))
        try:
            if timestamp_ms == pane.window.end - 1:
                self._fire_window(pane, timestamp_ms)
            # In a drain the window goes as it fires: rows behind a barrier in it open the window again, with its timer.
            is_drained = self._late_until == MAX_WATERMARK and timestamp_ms >= pane.window.end - 1
            if timestamp_ms >= pane.cleanup_ms or is_drained:
                self._clear(pane)
            else:  # it is there, unless the lateness was smaller at the last restore
                self._register_cleanup_timer(pane)
        except Exception as error:
            self._raise(error, self._blamed, self._described(timestamp_ms))

    def _on_session_timer(self, timestamp_ms: int, namespace: bytes) -> None:
        """`_on_event_time` of a session that fires once: if it has grown since, its timer is set again."""
        stored = self._session_lists.value(())
        if len(stored) != SESSION_FIELDS:
            self._on_event_time(timestamp_ms, namespace)
            return
        start, end, contents, _ = stored
        first, last = namespace_bounds(namespace)
        if start > first or last > end:
            return
        if timestamp_ms < end - 1:
            self._set_session_timer(start, end)
            return
        pane = _Pane(TimeWindow(start, end), self._session_contents(contents), b"", end - 1)
        try:
            if timestamp_ms == end - 1:
                self._fire_window(pane, timestamp_ms)
            pane.contents.clear()
            self._session_lists.clear()
        except Exception as error:
            self._raise(error, self._blamed, self._described(timestamp_ms))

    def _on_processing_time(self, timestamp_ms: int, namespace: bytes) -> None:
        self._on_window_timer(timestamp_ms, namespace, self.settings.trigger.on_processing_time, is_event_time=False)

    def _on_window_timer(
        self, timestamp_ms: int, namespace: bytes, ask: Callable[[int, TimeWindow, TriggerContext], Any], *, is_event_time: bool
    ) -> None:
        pane = self._pane_of(namespace)
        if pane is None:
            return
        if pane.namespace != namespace:  # a session that has grown since, by the default trigger, which may be another one now
            if timestamp_ms < pane.window.end:
                self._set_timers(pane)
            return
        try:
            self._trigger_context.enter(pane.namespace, pane.trigger_namespace)
            result = ask(timestamp_ms, pane.window, self._trigger_context)
            if result.fires:
                self._fire_window(pane, timestamp_ms)
            if result.purges:
                pane.contents.clear()
            if is_event_time != self._is_event_time or self._is_global:
                return
            if timestamp_ms >= pane.cleanup_ms:
                self._clear(pane)
            elif result.fires or timestamp_ms >= pane.window.end:
                self._register_cleanup_timer(pane)  # it is there, unless the lateness was smaller at the last restore
        except Exception as error:
            self._raise(error, self._blamed, self._described(timestamp_ms))

    def _on_end(self, timestamp_ms: int, namespace: bytes) -> None:
        pane = self._pane_of(namespace)
        if pane is None or pane.namespace != namespace or timestamp_ms != pane.cleanup_ms:
            return
        try:
            self._fire_window(pane, timestamp_ms)
            self._clear(pane)
        except Exception as error:
            self._raise(error, self._blamed, self._described(timestamp_ms))

    def _described(self, timestamp_ms: int) -> Described:
        return Described(f"timer {timestamp_ms} of key {self._context.key!r}")

    def _pane_of(self, namespace: bytes) -> _Pane | None:
        """The window of a timer, or the session that it has become part of; None if it is gone."""
        window = window_of(namespace)
        if not self._is_session:
            pane = self._panes.get(window.start)
            return pane if pane is not None and pane.window == window else self._new_pane(window)
        for session in self._sessions():
            if session.start <= window.start and window.end <= session.end:
                return self._session_pane(session)
        return None

    def _clear(self, pane: _Pane) -> None:
        """The state of a window goes."""
        pane.contents.clear()
        if not self._is_default:  # which has no state, and whose timer has fired
            self._clear_trigger(pane)
        for descriptor in self.function.window_states:
            self._window_states.get(descriptor, pane.namespace).clear()
        if self._is_session:
            self._store_sessions([session for session in self._sessions() if session.window != pane.window])

    def _clear_trigger(self, pane: _Pane) -> None:
        """Its own `clear`, and then its state, whose namespace another session may get."""
        trigger, context = self.settings.trigger, self._trigger_context
        context.enter(pane.namespace, pane.trigger_namespace)
        trigger.clear(pane.window, context)
        for descriptor in trigger.states:
            context.state(descriptor).clear()

    # ------------------------------------------------------------------------------------------------------- firing

    def _fire_window(self, pane: _Pane, moment_ms: int | None) -> None:
        """`moment_ms`: time of the record or timer, which the results of a global window have."""
        stamp = moment_ms if self._is_global else pane.window.end - 1
        self._context.enter(pane.window, pane.namespace, stamp)
        if self.settings.evictor is not None:
            self._fire_evicting(pane, self.settings.evictor)
        else:
            found = pane.contents.get()
            if self._is_list:
                if found:
                    self._call(list(map(self._own_row, found)) if self._hands_copies else found)
            elif found is not None:
                self._call([own_copy(found) if self._hands_copies else found])
        missing = len(self._rows) - len(self._stamps)
        if missing:
            self._stamps.extend(repeat(stamp, missing))

    def _fire_evicting(self, pane: _Pane, evictor: Evictor) -> None:
        stored = pane.contents.get()
        if not stored:
            return
        kept = evictor.evict_before([self.contents.unstamped(element) for element in stored], pane.window)
        result = self.contents.result([self._own_row(element.value) for element in kept])
        if result or self.contents.reduce is None:
            self._call(result)
        kept = evictor.evict_after(kept, pane.window)
        if len(kept) < len(stored):
            pane.contents.update([self.contents.stamped(*element) for element in kept])

    def _call(self, elements: list[Any]) -> None:
        if isinstance(self.function, PassOn):
            self._rows.extend(elements)
        else:
            self.function.process(self._context.key, self._context, elements, self._collector())

    def _emit_fired(self) -> None:
        stamps, self._stamps = self._stamps, []
        self._emit(None if stamps and stamps[0] is None else np.array(stamps, np.int64))
        self._sides.flush()
