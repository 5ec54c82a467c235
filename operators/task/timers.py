"""CORE: the timers of one keyed operator of one subtask. Event time and processing time; no clock, no thread.

A timer is (key, namespace, time): registering it twice gives one. Timers are kept in a heap, for the order, and in
a copy-on-write table, which says which of them exist: deleting is lazy in the heap, and a barrier freezes in O(1). Firing is a
generator, a bounded number of callbacks between two yields, so that mail and barriers get in; what has not fired when a
barrier comes is in the snapshot, which the backend takes of the generations (generations.TimerRows). Timers of one
time fire in the order of their canonical keys, on every attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, NoReturn, Protocol, TypeAlias

from holdfast.barriers.elements import MIN_WATERMARK
from holdfast.statebackends.backend import TimerRow
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.heap.state_table import MISSING, CopyOnWriteStateTable
from holdfast.statebackends.serialization.state_serializer import TIMERS_KIND, TIMERS_VALUE_TYPE

Timer: TypeAlias = TimerRow
"""(time in ms, canonical key, namespace, key group): in firing order, and as it is in a snapshot."""
OnTimer: TypeAlias = Callable[[int, bytes], None]
"""Called with time and namespace; the timer's key is current."""

EVENT_TIMERS = "_event_time_timers"
PROCESSING_TIMERS = "_processing_time_timers"
"""Names of the two states that hold timers."""
FIRED_PER_SLICE_MAX = 512
"""Callbacks between two yields."""
_HEAP_SLACK = 1024
"""Deleted entries that the heap may hold beyond as many as there are timers, before it is rebuilt."""
_STRETCH_BITS = 8
"""Timers whose times, ms, agree but for so many low bits are in one stretch: a quarter of a second."""
_SORTED_MAX = 1 << 16
"""Timers of a stretch that are sorted in one step, which takes less than 0.1 s. More become a heap: a tenth of the time for that,
and twice the time for all of them."""
_TIME_MIN, _TIME_MAX = -(2**63), 2**63 - 1
_BEFORE = (_TIME_MIN >> _STRETCH_BITS) - 1
"""Number of a stretch before all times."""


class KeyedContext(Protocol):
    """Whose key is current: the keyed backend."""

    @property
    def current_key(self) -> tuple[bytes, int]:
        """(canonical key, key group)."""

    def set_current_key(self, encoded_key: bytes, key_group: int) -> None: ...


def timer_metas(key_type_text: str) -> tuple[StateMeta, ...]:
    """Stored descriptions of the timers of an operator."""
    return tuple(StateMeta(name, TIMERS_KIND, TIMERS_VALUE_TYPE, key_type_text) for name in (EVENT_TIMERS, PROCESSING_TIMERS))


class TimerQueue:
    """The timers of one kind of time, ordered.

    They lie in stretches of time, each of them a list without order until something of it is due: then it is sorted, and taken from
    its end. So timers that wait for later cost those that fire now nothing. What is added to a sorted stretch, or before it, goes
    into a heap beside it. The earliest timer of a stretch that is not due is asked for by those who wait: that one is a heap."""

    __slots__ = ("_added", "_count", "_deleted", "_due", "_heaps", "_numbers", "_opened", "_stretches", "table")

    def __init__(self) -> None:
        self.table = CopyOnWriteStateTable()
        self._count = 0
        self._clear()

    def _clear(self) -> None:
        self._stretches: dict[int, list[Timer]] = {}
        self._numbers: list[int] = []  # of the stretches, as a heap
        self._heaps: set[int] = set()  # stretches that are heaps
        self._opened = _BEFORE  # number of the stretch that is sorted, and of those before it
        self._due: list[Timer] = []  # of that one, the earliest at the end
        self._added: list[Timer] = []  # to that one, as a heap
        self._deleted = 0  # entries of timers that are not there any more

    def __len__(self) -> int:
        return self._count

    @property
    def _entries(self) -> int:
        return self._count + self._deleted

    def add(self, timer: Timer) -> None:
        """Idempotent."""
        table = self.table
        if not table.layered:
            active = table.active
            before = len(active)
            active[timer] = True
            if len(active) == before:
                return
        elif table.find(timer)[0] is MISSING:
            table.active[timer] = True
        else:
            return
        self._count += 1
        number = timer[0] >> _STRETCH_BITS
        stretch = self._stretches.get(number)
        if stretch is not None and number not in self._heaps:
            stretch.append(timer)
        else:
            self._put(number, timer)

    def add_all(self, timers: Sequence[Timer]) -> None:
        """Several timers of one time, none twice."""
        table = self.table
        if table.layered:
            timers = [timer for timer in timers if table.find(timer)[0] is MISSING]
        else:
            timers = [timer for timer in timers if timer not in table.active]
        if not timers:
            return
        table.active.update(dict.fromkeys(timers, True))
        self._count += len(timers)
        number = timers[0][0] >> _STRETCH_BITS
        self._put(number, timers[0])
        stretch = self._stretches.get(number)
        if stretch is not None and number not in self._heaps:
            stretch.extend(timers[1:])
        else:
            for timer in timers[1:]:
                self._put(number, timer)

    def _put(self, number: int, timer: Timer) -> None:
        if number <= self._opened:
            heappush(self._added, timer)
        elif number in self._heaps:
            heappush(self._stretches[number], timer)
        elif number in self._stretches:
            self._stretches[number].append(timer)
        else:
            self._stretches[number] = [timer]
            heappush(self._numbers, number)

    def remove(self, timer: Timer) -> bool:
        """Whether the timer existed. Its place in the order is left behind, and skipped."""
        if not self._forget(timer):
            return False
        self._count -= 1
        self._deleted += 1
        return True

    def _forget(self, timer: Timer) -> bool:
        table = self.table
        if not table.layered:
            return table.active.pop(timer, MISSING) is not MISSING
        if table.find(timer)[0] is MISSING:
            return False
        table.remove(timer)
        return True

    def head(self) -> Timer | None:
        """The earliest timer."""
        find = self.table.find
        while (timer := self._first()) is not None:
            if find(timer)[0] is not MISSING:
                return timer
            self._leave()
            self._deleted -= 1
        return None

    def _first(self) -> Timer | None:
        """The earliest entry, which may have been deleted."""
        due, added = self._due, self._added
        if added and not (due and due[-1] < added[0]):
            return added[0]
        if due:
            return due[-1]
        if not self._numbers:
            return None
        number = self._numbers[0]
        stretch = self._stretches[number]
        if number not in self._heaps:
            heapify(stretch)
            self._heaps.add(number)
        return stretch[0]

    def _leave(self) -> None:
        """The earliest entry leaves the order, and not yet the table."""
        due, added = self._due, self._added
        if added and not (due and due[-1] < added[0]):
            heappop(added)
        elif due:
            due.pop()
        else:
            stretch = self._stretches[self._numbers[0]]
            heappop(stretch)
            if not stretch:
                self._leave_stretch()

    def _leave_stretch(self) -> list[Timer]:
        number = heappop(self._numbers)
        self._heaps.discard(number)
        return self._stretches.pop(number)

    def take_due(self, time_ms: int) -> Timer | None:
        """Remove and return the earliest timer, if its time is at most `time_ms`."""
        while True:
            due, added = self._due, self._added
            if added and not (due and due[-1] < added[0]):
                if added[0][0] > time_ms:
                    return None
                timer = heappop(added)
            elif due:
                if due[-1][0] > time_ms:
                    return None
                timer = due.pop()
            elif self._open(time_ms):
                continue
            else:
                return None
            table = self.table
            if self._forget(timer) if table.layered else table.active.pop(timer, MISSING) is not MISSING:
                self._count -= 1
                return timer
            self._deleted -= 1

    def _open(self, time_ms: int) -> bool:
        """Make the next stretch ready, if it begins in time: all that was to be taken before it is."""
        if not self._numbers or self._numbers[0] << _STRETCH_BITS > time_ms:
            return False
        self._opened = self._numbers[0]
        stretch = self._leave_stretch()
        if len(stretch) > _SORTED_MAX:
            heapify(stretch)
            self._added = stretch
        else:
            stretch.sort(reverse=True)
            self._due = stretch
        return True

    def compact(self) -> None:
        """Rebuild the order when most of it was deleted; amortised over the deletions."""
        if self._entries > 2 * self._count + _HEAP_SLACK:
            find = self.table.find
            entries = [*self._due, *self._added, *chain.from_iterable(self._stretches.values())]
            self._clear()
            for timer in {timer for timer in entries if find(timer)[0] is not MISSING}:
                self._put(timer[0] >> _STRETCH_BITS, timer)

    def load(self, timers: Iterable[Timer]) -> None:
        """Add restored timers."""
        for timer in timers:
            self.add(timer)


class InternalTimerService:
    """Timers of the current key; implements `base.TimerService`."""

    def __init__(
        self,
        keyed: KeyedContext,
        now_ms: Callable[[], int],
        *,
        operator: str = "",
        fired_per_slice_max: int = FIRED_PER_SLICE_MAX,
    ) -> None:
        """`keyed`: the operator's keyed backend; `now_ms`: wall clock."""
        self._keyed = keyed
        self._now_ms = now_ms
        self._operator = operator
        self._fired_per_slice_max = fired_per_slice_max
        self._watermark = MIN_WATERMARK
        self.event = TimerQueue()
        self.processing = TimerQueue()

    # ------------------------------------------------------------------------------------------------- registration

    def register_event_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None:
        """One at or below the current watermark fires at the next advance (N06)."""
        if not isinstance(timestamp_ms, int) or not _TIME_MIN <= timestamp_ms <= _TIME_MAX:
            self._refuse(timestamp_ms)
        key, group = self._keyed.current_key
        self.event.add((timestamp_ms, key, namespace, group))

    def register_event_time_timers(self, timestamp_ms: int, namespace: bytes, keys: Sequence[tuple[bytes, int]]) -> None:
        """Of several keys, as (canonical key, key group), at one time."""
        self.event.add_all([(timestamp_ms, key, namespace, group) for key, group in keys])

    def delete_event_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None:
        if self.event.remove(self._timer(timestamp_ms, namespace)):
            self.event.compact()

    def register_processing_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None:
        self.processing.add(self._timer(timestamp_ms, namespace))

    def register_processing_time_timers(self, timestamp_ms: int, namespace: bytes, keys: Sequence[tuple[bytes, int]]) -> None:
        """As `register_event_time_timers`."""
        self.processing.add_all([(timestamp_ms, key, namespace, group) for key, group in keys])

    def delete_processing_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None:
        if self.processing.remove(self._timer(timestamp_ms, namespace)):
            self.processing.compact()

    def _timer(self, timestamp_ms: int, namespace: bytes) -> Timer:
        if not isinstance(timestamp_ms, int) or not _TIME_MIN <= timestamp_ms <= _TIME_MAX:
            self._refuse(timestamp_ms)
        key, group = self._keyed.current_key
        return timestamp_ms, key, namespace, group

    def _refuse(self, timestamp_ms: Any) -> NoReturn:
        raise InvalidConfigError(
            f"operator {self._operator!r}: the time of a timer is int64 ms, not {timestamp_ms!r}", operator=self._operator
        )

    # -------------------------------------------------------------------------------------------------------- time

    @property
    def current_watermark(self) -> int:
        return self._watermark

    @property
    def current_processing_time(self) -> int:
        return self._now_ms()

    def advance_watermark(self, watermark_ms: int, on_timer: OnTimer) -> Iterator[None]:
        """Set the watermark at once; the iterator fires every event-time timer at or below it, in slices.

        Timers that a callback registers at or below it fire in the same pass (N04). A watermark that does not rise fires
        nothing."""
        if watermark_ms <= self._watermark:
            return iter(())
        self._watermark = watermark_ms
        return self._fire(self.event, watermark_ms, on_timer)

    @property
    def next_processing_time_ms(self) -> int | None:
        """Wall-clock time at which to call `advance_processing_time`: that of the earliest timer; None: there is none.

        One ms behind the timer, so that its time has passed in full; the delay from now is max(t - now, 0) + 1 (N09)."""
        head = self.processing.head()
        return None if head is None else head[0] + 1

    def advance_processing_time(self, now_ms: int, on_timer: OnTimer) -> Iterator[None]:
        """Fire every processing-time timer before now_ms, in slices; those that a callback registers too."""
        return self._fire(self.processing, now_ms - 1, on_timer)

    def _fire(self, queue: TimerQueue, time_ms: int, on_timer: OnTimer) -> Iterator[None]:
        take, set_current_key, budget = queue.take_due, self._keyed.set_current_key, self._fired_per_slice_max
        fired = 0
        while (timer := take(time_ms)) is not None:
            time, key, namespace, group = timer
            set_current_key(key, group)
            on_timer(time, namespace)
            fired += 1
            if fired == budget:
                fired = 0
                yield
