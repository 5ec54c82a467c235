"""TTL of state: which values have expired, and their incremental cleanup.

Cleanup notes each stamped value in a slice of time, a quarter of the duration long. It checks the values of slices whose end has
expired, so that it never scans live state, and its cost is bounded by what was written. The time is the last one that the runtime
set; there is no clock here. For the loop thread only, but for `barrier_horizon_ms`. Source: Flink, StateTtlConfig and its
incremental cleanup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.statebackends.heap.map_table import CopyOnWriteMapTable
from holdfast.statebackends.heap.state_table import MISSING, CopyOnWriteStateTable
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.state import Ttl

_SLICES_PER_DURATION = 4
"""A value is noted in each slice in which it was stamped: more slices clean up sooner, and take more memory."""
_NEVER_MS = 1 << 62

Item = Any
"""A value that cleanup notes: a key or its slot, or (key or slot, entry) of a map."""


class TtlClock:
    """Processing time of all states of one backend, ms since the epoch."""

    __slots__ = ("now_ms",)

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms


class StateTtl:
    """TTL of one state, in all its namespaces."""

    __slots__ = (
        "_entries",
        "_slices",
        "_width_ms",
        "barrier_horizon_ms",
        "clock",
        "config",
        "due_ms",
        "duration_ms",
        "serializer",
    )

    def __init__(self, serializer: StateSerializer, config: Ttl, clock: TtlClock) -> None:
        self.serializer = serializer
        self.config = config
        self.clock = clock
        self.duration_ms = config.duration_ms
        self.barrier_horizon_ms = -_NEVER_MS
        """`horizon_ms` at the newest barrier or frozen buffer. For pool threads, whose result must not depend on when they run."""
        self._entries = config.cleanup_entries
        self._width_ms = max(1, self.duration_ms // _SLICES_PER_DURATION)
        self._slices: dict[int, dict[Cleanup, dict[Item, None]]] = {}
        self.due_ms = _NEVER_MS
        """From this time on `clean` has values to check."""

    @property
    def horizon_ms(self) -> int:
        """Values stamped at or before it have expired."""
        return self.clock.now_ms - self.duration_ms

    def freeze_horizon(self) -> None:
        self.barrier_horizon_ms = self.horizon_ms

    def slice_of(self, stamp_ms: int) -> tuple[int, int]:
        """[start, stop) of the slice of a stamp."""
        start = stamp_ms - stamp_ms % self._width_ms
        return start, start + self._width_ms

    def noted(self, table: Cleanup, start_ms: int) -> dict[Item, None]:
        """The noted items of a table in a slice; the caller adds to them. Ordered, so that cleanup is deterministic."""
        found = self._slices.get(start_ms)
        if found is None:
            found = self._slices[start_ms] = {}
            self._set_due()
        return found.setdefault(table, {})

    def rename(self, table: Cleanup, renamed: Callable[[Item], Item | None]) -> None:
        """Give the noted items of a table other names; None: it is none any more."""
        for tables in self._slices.values():
            items = tables.get(table)
            if items:
                kept = [new for item in items if (new := renamed(item)) is not None]
                items.clear()
                items.update(dict.fromkeys(kept))

    def clean(self) -> None:
        """Check at most `cleanup_entries` values of expired slices, and drop those that were not stamped since."""
        left = self._entries
        horizon_ms = self.horizon_ms
        while left and self.clock.now_ms >= self.due_ms:
            start = min(self._slices)
            tables = self._slices[start]
            table = next(iter(tables))
            if tables[table]:
                table.drop_expired(tables[table].popitem()[0], horizon_ms)
                left -= 1
                continue
            table.leave()
            del tables[table]
            if not tables:
                del self._slices[start]
                self._set_due()

    def _set_due(self) -> None:
        last = min(self._slices, default=_NEVER_MS) + self._width_ms - 1
        self.due_ms = min(last + self.duration_ms, _NEVER_MS)


class TableTtl:
    """TTL of one (state, namespace), for its state object. Without cleanup: that is done elsewhere, or switched off."""

    __slots__ = ("clock", "duration_ms", "refreshes", "shows_expired")

    def __init__(self, state_ttl: StateTtl) -> None:
        self.clock = state_ttl.clock
        self.duration_ms = state_ttl.duration_ms
        self.refreshes = state_ttl.config.update == "read"
        """Reads set the stamp."""
        self.shows_expired = state_ttl.config.visibility == "until_cleaned"

    def stamped(self, item: Item) -> None:
        """An item was stamped with the current time."""

    def accessed(self) -> None:
        """The state was read or cleared."""

    def load(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Rows were restored, with the stamps that they were stored with."""


class Cleanup(TableTtl):
    """Base: notes stamped items, and checks a few values at each access; for state in memory."""

    __slots__ = ("_items", "_start_ms", "_state_ttl", "_stop_ms")

    def __init__(self, state_ttl: StateTtl) -> None:
        super().__init__(state_ttl)
        self._state_ttl = state_ttl
        self._items: dict[Item, None] = {}
        self._start_ms = self._stop_ms = 0

    def stamped(self, item: Item) -> None:
        now_ms = self.clock.now_ms
        if not self._start_ms <= now_ms < self._stop_ms:
            self._start_ms, self._stop_ms = self._state_ttl.slice_of(now_ms)
            self._items = self._state_ttl.noted(self, self._start_ms)
        self._items[item] = None
        if now_ms >= self._state_ttl.due_ms:
            self._state_ttl.clean()

    def accessed(self) -> None:
        if self.clock.now_ms >= self._state_ttl.due_ms:
            self._state_ttl.clean()

    def leave(self) -> None:
        """A slice of this table is done: the next stamped item begins another."""
        self._start_ms = self._stop_ms = 0

    def load(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        kind, state_ttl = self._state_ttl.serializer.kind, self._state_ttl
        for key, value in zip(keys, values, strict=True):
            for item, stamp_ms in _items(kind, key, value):
                state_ttl.noted(self, state_ttl.slice_of(stamp_ms)[0])[item] = None

    def drop_expired(self, item: Item, horizon_ms: int) -> None:
        """Drop an item if its stamp has expired; of a list, the elements whose stamps have."""
        raise NotImplementedError


class IncrementalCleanup(Cleanup):
    """Notes keys, and (key, entry) of maps."""

    __slots__ = ("_state_table",)

    def __init__(self, state_ttl: StateTtl, state_table: CopyOnWriteStateTable) -> None:
        super().__init__(state_ttl)
        self._state_table = state_table

    def drop_expired(self, item: Item, horizon_ms: int) -> None:
        state_table = self._state_table
        if isinstance(state_table, CopyOnWriteMapTable):
            key, entry = item
            found, _ = state_table.find_entry(key, entry)
            if found is not MISSING and found[0] <= horizon_ms:
                state_table.remove_entry(key, entry)
            return
        found, frozen = state_table.find(item)
        if found is MISSING:
            return
        if self._state_ttl.serializer.kind != "list":
            if found[0] <= horizon_ms:
                state_table.remove(item)
            return
        kept = [element for element in found if element[0] > horizon_ms]
        if not kept:
            state_table.remove(item)
        elif len(kept) < len(found):
            copy = self._state_ttl.serializer.copy
            state_table.active[item] = [copy(element) for element in kept] if frozen and copy is not None else kept


def _items(kind: str, key: Any, value: Any) -> Iterator[tuple[Item, int]]:
    if kind == "map":
        yield from (((key, entry), stamped[0]) for entry, stamped in value.items())
    elif kind == "list":
        yield from ((key, stamped[0]) for stamped in value)
    else:
        yield key, value[0]


