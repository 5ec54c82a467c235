"""Sessions made of panes: namespaces of columnar state that are one gap long.

Two records of a key in one pane are less than the gap apart, so that a row of a pane never holds records of two sessions; and rows
of one key in neighbouring panes are one session if the later one begins before the earlier one ends, or just then. A record updates
one row, as in a tumbling window; rows are merged when a session fires. Rows of panes that only a session's own late records can
reach are folded into those behind them: a session that goes on for long is one row or two. The first two aggregates are its start
and end: the least event time, and the greatest plus the gap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.columnar.panes import empty_accumulator
from holdfast.statebackends.columnar.parts import AccumulatorColumns, Slots
from holdfast.statebackends.state import ColumnAggregate, KeyColumn, Straddling

_NEVER = np.iinfo(np.int64).max
_ALWAYS = np.iinfo(np.int64).min


class SessionStore(Protocol):
    """Where panes are."""

    def namespaces(self, since: int | None = None, until: int | None = None) -> list[int]: ...
    def first_namespace(self, since: int | None = None) -> int | None: ...
    def row_count(self, namespace: int) -> int: ...
    def accumulators(self, namespace: int) -> Sequence[AccumulatorColumns]: ...
    def keys_of(self, namespace: int, slots: Slots) -> KeyColumn: ...
    def slots_of(self, namespace: int, keys: KeyColumn) -> Slots: ...
    def taken(self, keys: KeyColumn, rows: Slots) -> KeyColumn: ...
    def numbered(self, keys: KeyColumn) -> tuple[Slots, KeyColumn]: ...
    def distinct(self, columns: Sequence[KeyColumn]) -> KeyColumn: ...
    def merge_into(self, namespace: int, keys: KeyColumn, accumulators: Sequence[AccumulatorColumns], rows: Slots) -> None: ...
    def keep(self, namespace: int, slots: Slots) -> None: ...
    def remove(self, namespace: int) -> None: ...


class _Near(NamedTuple):
    """Rows of some keys in a pane."""

    there: Slots
    """Which of the keys have one."""
    slots: Slots
    starts: Slots
    ends: Slots


_NOTHING = np.empty(0, np.int64)


class SessionPanes:
    """`state.SessionRows` of one columnar state."""

    def __init__(self, store: SessionStore, aggregates: Sequence[ColumnAggregate], gap_ms: int, operator: str) -> None:
        self._store = store
        self._aggregates = aggregates
        self._gap_ms = gap_ms
        self._operator = operator

    def first_pane(self, late_until: int) -> int:
        """Start of the first pane that a record can be in whose own window ends behind `late_until`."""
        # one ms more than that: a record that is not behind the watermark is never in a pane which another was folded into
        return max(_ALWAYS, (late_until // self._gap_ms - 1) * self._gap_ms)

    def next_end(self, after: int) -> int | None:
        for pane in self._store.namespaces(self._first_open(after)):
            ends = self._ends(pane)
            if len(ends := ends[ends > after]):
                return int(ends.min())
        return None

    def next_closing(self, after: int, until: int) -> int | None:
        pane = self._store.first_namespace(self._first_open(after)) if after < until else None
        return None if pane is None or pane + self._gap_ms > until else pane

    def closing(self, pane: int, after: int, until: int) -> tuple[list[pa.Array], list[pa.Array]] | None:
        ends = self._ends(pane)
        slots = np.flatnonzero((ends > after) & (ends <= until))
        if len(slots):
            slots = slots[~self._goes_on(pane, self._store.keys_of(pane, slots), ends[slots])]
        return self._merged(pane, slots) if len(slots) else None

    def last_end(self, pane: int) -> int:
        return pane + 2 * self._gap_ms - 1

    def _first_open(self, after: int) -> int:
        """Start of the first pane in which a session may end behind a moment."""
        return after + 2 - 2 * self._gap_ms

    def touched(
        self, keys: KeyColumn, panes: npt.NDArray[np.int64], until: int
    ) -> Iterator[tuple[list[pa.Array], list[pa.Array]]]:
        order = np.argsort(panes, kind="stable")
        starts, firsts = np.unique(panes[order], return_index=True)
        rows = np.split(order, firsts[1:])
        waiting = {pane: [self._store.taken(keys, some)] for pane, some in zip(starts.tolist(), rows, strict=True)}
        todo = sorted(waiting)
        while todo:
            pane = heappop(todo)
            some = self._store.distinct(waiting.pop(pane))
            slots = self._store.slots_of(pane, some)
            ends = self._ends(pane)[slots]
            goes_on = self._goes_on(pane, some, ends)
            if goes_on.any():
                behind = pane + self._gap_ms
                if behind not in waiting:
                    heappush(todo, behind)
                waiting.setdefault(behind, []).append(self._store.taken(some, np.flatnonzero(goes_on)))
            fires = ~goes_on & (ends <= until)
            if fires.any():
                yield self._merged(pane, slots[fires])

    def straddling(self, keys: KeyColumn, late_until: int) -> Straddling:
        codes, distinct = self._store.numbered(keys)
        pane = self.first_pane(late_until)
        near, behind = self._near(pane, distinct), self._near(pane + self._gap_ms, distinct)
        starts = np.full(len(distinct), _NEVER)
        starts[behind.there] = np.where(behind.starts <= late_until, behind.starts, _NEVER)
        later = np.full(len(distinct), _NEVER)
        later[behind.there] = behind.starts
        is_alive = (near.ends > late_until) | (later[near.there] <= near.ends)
        starts[near.there[is_alive]] = near.starts[is_alive]
        has_remains = np.zeros(len(distinct), np.bool_)
        has_remains[near.there[~is_alive]] = True
        return Straddling(codes, starts, has_remains)

    def drop_remains(self, late_until: int) -> None:
        pane = self.first_pane(late_until)
        if not self._store.row_count(pane):
            return
        slots, ends = np.arange(self._store.row_count(pane)), self._ends(pane)
        is_alive = (ends > late_until) | self._goes_on(pane, self._store.keys_of(pane, slots), ends)
        if not is_alive.all():
            self._store.keep(pane, slots[is_alive])

    def forget(self, late_until: int) -> bool:
        pane = self._store.first_namespace()
        if pane is None or pane >= self.first_pane(late_until):
            return False
        slots = np.arange(self._store.row_count(pane))
        keys = self._store.keys_of(pane, slots)
        goes_on = np.flatnonzero(self._goes_on(pane, keys, self._ends(pane)))
        if len(goes_on):
            some = self._store.taken(keys, goes_on)
            self._store.merge_into(pane + self._gap_ms, some, self._store.accumulators(pane), slots[goes_on])
        self._store.remove(pane)
        return True

    # ------------------------------------------------------------------------------------------------------------- rows

    def _starts(self, pane: int) -> Slots:
        starts: Slots = self._store.accumulators(pane)[0].columns[0][: self._store.row_count(pane)]
        return starts

    def _ends(self, pane: int) -> Slots:
        ends: Slots = self._store.accumulators(pane)[1].columns[0][: self._store.row_count(pane)]
        return ends

    def _near(self, pane: int, keys: KeyColumn) -> _Near:
        if not self._store.row_count(pane) or not len(keys):
            return _Near(_NOTHING, _NOTHING, _NOTHING, _NOTHING)
        slots = self._store.slots_of(pane, keys)
        there = np.flatnonzero(slots >= 0)
        slots = slots[there]
        return _Near(there, slots, self._starts(pane)[slots], self._ends(pane)[slots])

    def _goes_on(self, pane: int, keys: KeyColumn, ends: Slots) -> npt.NDArray[np.bool_]:
        """Whether the rows of some keys, which end there, are one session with those of the next pane."""
        found = np.zeros(len(ends), np.bool_)
        behind = self._near(pane + self._gap_ms, keys)
        found[behind.there] = behind.starts <= ends[behind.there]
        return found

    def _merged(self, pane: int, slots: Slots) -> tuple[list[pa.Array], list[pa.Array]]:
        """Key arrays, and results, of the sessions whose last rows these are. They are added up from the first row to the last, so
        that it makes no difference which of them were folded before."""
        keys = self._store.keys_of(pane, slots)
        levels = [(np.arange(len(slots)), slots, self._store.accumulators(pane))]
        which, starts, some = np.arange(len(slots)), self._starts(pane)[slots], keys
        while len(which):
            pane -= self._gap_ms
            before = self._near(pane, some)
            joined = before.ends >= starts[before.there]
            there = before.there[joined]
            which, starts, some = which[there], before.starts[joined], self._store.taken(some, there)
            if len(which):
                levels.append((which, before.slots[joined], self._store.accumulators(pane)))
        if len(levels) == 1:
            return list(keys.arrays), [accumulator.result(slots) for accumulator in levels[0][2]]
        return list(keys.arrays), self._added_up(levels, len(slots))

    def _added_up(self, levels: list[tuple[Slots, Slots, Sequence[AccumulatorColumns]]], count: int) -> list[pa.Array]:
        results = []
        for position, aggregate in enumerate(self._aggregates):
            total: Any = empty_accumulator(aggregate, count, self._operator)
            for which, rows, accumulators in reversed(levels):
                total.merge(which, accumulators[position], rows, 0)
            results.append(total.result(np.arange(count)))
        return results
