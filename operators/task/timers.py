"""CORE: the timers of one keyed operator of one subtask. Event time and processing time; no clock, no thread.

A timer is (key, namespace, time): registering it twice gives one. Timers are kept in a heap, for the order, and in
a copy-on-write table, which says which of them exist: deleting is lazy in the heap, and a barrier freezes in O(1). Firing is a
generator, a bounded number of callbacks between two yields, so that mail and barriers get in; what has not fired when a
barrier comes is in the snapshot, which the backend takes of the generations (generations.TimerRows). Timers of one
time fire in the order of their canonical keys, on every attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol, TypeAlias

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
_STRETCH_BITS = 10
"""Timers whose times, ms, agree but for so many low bits are in one stretch: about a second."""
_TIME_MIN, _TIME_MAX = -(2**63), 2**63 - 1


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

    Their heap is cut into stretches of time: each is a list until it is the earliest, then a heap. So timers that wait for later
    cost those that fire now nothing."""

    __slots__ = ("_count", "_entries", "_heaps", "_numbers", "_stretches", "table")

    def __init__(self) -> None:
        self._stretches: dict[int, list[Timer]] = {}
        self._numbers: list[int] = []  # of the stretches, as a heap
        self._heaps: set[int] = set()  # stretches that are heaps
        self._entries = 0
        self._count = 0
        self.table = CopyOnWriteStateTable()

    def __len__(self) -> int:
        return self._count

    def add(self, timer: Timer) -> None:
        """Idempotent."""
        table = self.table
        if table.find(timer)[0] is not MISSING:
            return
        table.active[timer] = True
        self._count += 1
        self._put(timer)

    def _put(self, timer: Timer) -> None:
        number = timer[0] >> _STRETCH_BITS
        stretch = self._stretches.get(number)
        self._entries += 1
        if stretch is None:
            self._stretches[number] = [timer]
            heappush(self._numbers, number)
        elif number in self._heaps:
            heappush(stretch, timer)
        else:
            stretch.append(timer)

    def remove(self, timer: Timer) -> bool:
        """Whether the timer existed. Its place in the heap is left behind, and skipped."""
        if self.table.find(timer)[0] is MISSING:
            return False
        self.table.remove(timer)
        self._count -= 1
        return True

    def head(self) -> Timer | None:
        """The earliest timer."""
        find = self.table.find
        while self._numbers:
            number = self._numbers[0]
            stretch = self._stretches[number]
            if number not in self._heaps:
                heapify(stretch)
                self._heaps.add(number)
            while stretch:
                if find(stretch[0])[0] is not MISSING:
                    return stretch[0]
                heappop(stretch)
                self._entries -= 1
            heappop(self._numbers)
            del self._stretches[number]
            self._heaps.discard(number)
        return None

    def take_due(self, time_ms: int) -> Timer | None:
        """Remove and return the earliest timer, if its time is at most `time_ms`."""
        timer = self.head()
        if timer is None or timer[0] > time_ms:
            return None
        self._leave()
        self._count -= 1
        self.table.remove(timer)
        return timer

    def _leave(self) -> None:
        """The head leaves the heap, and not yet the table."""
        heappop(self._stretches[self._numbers[0]])
        self._entries -= 1

    def compact(self) -> None:
        """Rebuild the heap when most of it was deleted; amortised over the deletions."""
        if self._entries > 2 * self._count + _HEAP_SLACK:
            find = self.table.find
            kept = {timer for stretch in self._stretches.values() for timer in stretch if find(timer)[0] is not MISSING}
            self._stretches, self._numbers, self._heaps, self._entries = {}, [], set(), 0
            for timer in kept:
                self._put(timer)

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
        self.event.add(self._timer(timestamp_ms, namespace))

    def delete_event_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None:
        if self.event.remove(self._timer(timestamp_ms, namespace)):
            self.event.compact()

    def register_processing_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None:
        self.processing.add(self._timer(timestamp_ms, namespace))

    def delete_processing_time_timer(self, timestamp_ms: int, namespace: bytes = b"") -> None:
        if self.processing.remove(self._timer(timestamp_ms, namespace)):
            self.processing.compact()

    def _timer(self, timestamp_ms: int, namespace: bytes) -> Timer:
        if not isinstance(timestamp_ms, int) or not _TIME_MIN <= timestamp_ms <= _TIME_MAX:
            raise InvalidConfigError(
                f"operator {self._operator!r}: the time of a timer is int64 ms, not {timestamp_ms!r}", operator=self._operator
            )
        key, group = self._keyed.current_key
        return timestamp_ms, key, namespace, group

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
