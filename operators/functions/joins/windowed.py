"""Window joins and cogroups: the records of two streams that have one key and one window.

Both sides are row tables. A record of a tumbling or sliding window is kept in each of its windows, in the namespace of the window's
end; one of a session in one namespace for all, since which window it is in is only known when the session has ended. A window fires
when the watermark reaches its last millisecond, in slices of bounded size; what is emitted leaves the state, so that a barrier may
cut between two slices. Source: Flink, JoinedStreams and CoGroupedStreams; what differs is in ADR 66."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.base import OperatorContext, Output
from holdfast.operators.functions.joins.output import (
    How,
    JoinOutput,
    JoinSide,
    On,
    Suffixes,
    check_how,
    join_output,
    join_sides,
)
from holdfast.operators.functions.joins.sides import Mask, Positions, StoredSide, check_kept_columns, rows_between
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import ColumnKeySelector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.bounds import WINDOWS_OF_A_RECORD_MAX, TimeWindow, slide_of
from holdfast.operators.functions.windows.firing import FiringOperator, check_event_times, put_aside
from holdfast.operators.functions.windows.kept_assigner import ASSIGNER, check_lengths, keep_lengths
from holdfast.operators.functions.windows.kept_watermark import WATERMARKS
from holdfast.operators.task.user_failures import Described, check_returns, raise_located, shown
from holdfast.statebackends.errors import GraphError, InvariantError
from holdfast.statebackends.row_tables.key_codes import distinct_keys as numbers_of
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.state import KeyColumn, RowMatches, RowTable, RowTableStateDescriptor, StateDescriptor

ROWS_PER_SLICE_MAX = 8192
"""Rows that are emitted at once."""
EMITTED_ROWS_MAX = 1 << 16
"""Rows that were emitted and are still in the state: they go with their window, or when a barrier comes."""
READ_SHARE_MAX = 4
"""Rows that may be read for each row of a session that has ended, before it is looked for which sessions have."""
_OPEN = MIN_WATERMARK
"""Namespace of the records of sessions; no window ends there."""
_MIN_TIME = MIN_WATERMARK + 1
JoinWindows: TypeAlias = Tumbling | Sliding | Session
CoGroupFunction: TypeAlias = Callable[[Any, TimeWindow, list[Any], list[Any]], Iterable[Any]]
"""(key, window, left rows, right rows) -> rows."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of both sides by group, which is a key and a window."""

    left: RowMatches
    left_groups: Positions
    """Of each row, ascending."""
    right: RowMatches
    right_groups: Positions
    ends: Positions
    """Of each group."""

    def __len__(self) -> int:
        return len(self.ends)

    def counts(self) -> tuple[Positions, Positions]:
        """Left and right rows of each group."""
        return np.bincount(self.left_groups, minlength=len(self)), np.bincount(self.right_groups, minlength=len(self))

    def rows(self, left: Positions, right: Positions) -> Groups:
        """Some rows of all groups."""
        return Groups(self.left.select(left), self.left_groups[left], self.right.select(right), self.right_groups[right], self.ends)

    def between(self, start: int, stop: int) -> Groups:
        """Groups start .. stop - 1."""
        lefts, rights = (np.searchsorted(groups, (start, stop)) for groups in (self.left_groups, self.right_groups))
        left, right = np.arange(*lefts), np.arange(*rights)
        return Groups(
            self.left.select(left),
            self.left_groups[left] - start,
            self.right.select(right),
            self.right_groups[right] - start,
            self.ends[start:stop],
        )

    def of(self, wanted: Mask) -> Groups:
        """Some groups."""
        numbers = np.cumsum(wanted) - 1
        left, right = wanted[self.left_groups], wanted[self.right_groups]
        return Groups(
            self.left.select(left),
            numbers[self.left_groups[left]],
            self.right.select(right),
            numbers[self.right_groups[right]],
            self.ends[wanted],
        )


class WindowedOperator(FiringOperator):
    """Base: records of two inputs by key and window of event time."""

    keeps_right: bool
    """Whether a window without left rows has results."""
    splits_groups: bool
    """Whether the results of one group may be made in several slices."""

    def __init__(
        self, windows: JoinWindows, left: JoinSide, right: JoinSide, late_tags: tuple[str, str] = ("", "")
    ) -> None:
        self.windows = windows
        self.late_tags = late_tags
        by_time = isinstance(windows, Session)
        self.sides = (StoredSide.of(left, "left", by_time=by_time), StoredSide.of(right, "right", by_time=by_time))
        self.rows_per_slice_max = ROWS_PER_SLICE_MAX

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (*(side.table for side in self.sides), WATERMARKS, ASSIGNER)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._emitted: list[tuple[RowTable, RowMatches]] = []
        self._emitted_rows = 0
        self._ended_until = MIN_WATERMARK
        """Of sessions: no record up to this time is the last one of a session that is kept."""
        self._looks_first = False
        """Sessions go on for long: which of them have ended is looked for in their newest rows."""
        self._rows_read = 0
        self._moving: Iterator[None] = iter(())
        """Of sessions that take several slices."""
        self._earliest_end = MIN_WATERMARK
        """No window that is kept ends before it."""

    def initialize_state(self) -> None:
        check_lengths(self.context, self.windows, self.sides[0].table.name)
        super().initialize_state()

    def open(self) -> None:
        self._left: RowTable = self.sides[0].opened(self.context)
        self._right: RowTable = self.sides[1].opened(self.context)

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        keep_lengths(self.context, self.windows)
        for _ in self._moving:
            pass
        self._forget_emitted()

    # ------------------------------------------------------------------------------------------------------------ records

    def _take(self, batch: Batch, stamps: Positions, input_index: int) -> None:
        check_event_times(int(stamps.min()), int(stamps.max()), self.context)
        if isinstance(self.windows, Session):
            self._add_to_sessions(batch, stamps, self.windows.gap_ms, input_index)
        else:
            self._add_to_windows(batch, stamps, self.windows, input_index)

    def _table(self, input_index: int) -> RowTable:
        return self._right if input_index else self._left

    def _add_to_windows(self, batch: Batch, stamps: Positions, windows: Tumbling | Sliding, input_index: int) -> None:
        size, slide, passed = windows.size_ms, slide_of(windows), self._reached.current
        ends = stamps - (stamps - windows.offset_ms) % slide + size
        """Of the last window of each record; before it, where the slide is longer than the size, the record is in none."""
        in_window = ends > stamps
        late = in_window & (ends - 1 <= passed)
        if late.any():
            put_aside(batch.filter(late), self.late_tags[input_index], self, self._reached)
        taken = in_window & ~late
        while taken.any():
            some = batch if taken.all() else batch.filter(taken)
            self._keep(some, ends[taken], input_index)
            ends = ends - slide
            taken &= (ends > stamps) & (ends - 1 > passed)

    def _keep(self, batch: Batch, ends: Positions, input_index: int) -> None:
        """Each record until its window fires; one without a key is in no group."""
        side = self.sides[input_index]
        keyless = side.side.selector.without_key(batch)
        if keyless is not None:
            self._take_keyless(batch.filter(keyless), ends[keyless], side)
            batch, ends = batch.filter(~keyless), ends[~keyless]
        if batch.num_rows:
            self._earliest_end = min(self._earliest_end, int(ends.min()))
            side.append(self._table(input_index), batch, ends, self.context)

    def _add_to_sessions(self, batch: Batch, stamps: Positions, gap_ms: int, input_index: int) -> None:
        side = self.sides[input_index]
        is_past = stamps + (gap_ms - 1) <= self._reached.current
        keyless = side.side.selector.without_key(batch)
        late = np.zeros(len(stamps), np.bool_) if keyless is None else keyless & is_past
        if keyless is not None:
            alone = keyless & ~late
            self._take_keyless(batch.filter(alone), stamps[alone] + gap_ms, side)
            is_past = is_past & ~keyless
        if is_past.any():
            late |= self._late_in_sessions(batch, stamps, is_past, gap_ms, input_index)
        if late.any():
            put_aside(batch.filter(late), self.late_tags[input_index], self, self._reached)
        taken = ~late if keyless is None else ~(late | keyless)
        if taken.any():
            side.append(self._table(input_index), batch if taken.all() else batch.filter(taken), _OPEN, self.context)

    def _late_in_sessions(
        self, batch: Batch, stamps: Positions, is_past: Mask, gap_ms: int, input_index: int
    ) -> Mask:
        """A record whose own window has passed is late unless it belongs to a session that is open, one by one as they came."""
        keys = self.sides[input_index].keys(batch, self.context)
        near = np.zeros(len(stamps), np.bool_)
        past = np.flatnonzero(is_past)
        asked, around = keys.take(past), (stamps[past] - gap_ms, stamps[past] + gap_ms)
        for table in (self._left, self._right):
            near[past[table.rows_of(asked, _OPEN, around).queries]] = True
        late = np.zeros(len(stamps), np.bool_)
        taken: dict[int, list[int]] = {}
        rows = zip(numbers_of(keys).tolist(), stamps.tolist(), (is_past & ~near).tolist(), strict=True)
        for row, (key, stamp, is_alone) in enumerate(rows):
            times = taken.setdefault(key, [])
            at = bisect_left(times, stamp - gap_ms)
            if is_alone and (at == len(times) or times[at] > stamp + gap_ms):
                late[row] = True
            else:
                insort(times, stamp)
        return late

    # ------------------------------------------------------------------------------------------------------------- firing

    def _fire_due(self) -> Iterator[None]:
        if isinstance(self.windows, Session):
            yield from self._fire_sessions(self.windows.gap_ms)
        if self._earliest_end - 1 > self._reached.current:
            return
        ends = sorted({*self._left.namespaces(), *self._right.namespaces()} - {_OPEN})
        for end in ends:
            self._earliest_end = end
            if end - 1 > self._reached.current:
                return
            yield from self._fire_window(end)
        self._earliest_end = MAX_WATERMARK

    def _fire_window(self, end: int) -> Iterator[None]:
        """The window of each key that ends then."""
        scan = self._left.scan(end)
        while (rows := scan.next(self.rows_per_slice_max)) is not None:
            if len(rows):
                keys, groups = self.sides[0].distinct_keys(rows, self.context)
                others = self._right.rows_of(keys, end)
                yield from self._emit_groups(Groups(rows, groups, others, others.queries, np.full(len(keys), end)))
            yield
        if self.keeps_right:
            yield from self._fire_right(end)
        for table in (self._left, self._right):
            table.drop(end)
        self._emitted, self._emitted_rows = [], 0

    def _fire_right(self, end: int) -> Iterator[None]:
        """Keys without left rows: those of the others have been emitted."""
        scan = self._right.scan(end)
        while (rows := scan.next(self.rows_per_slice_max)) is not None:
            if len(rows):
                keys, groups = self.sides[1].distinct_keys(rows, self.context)
                others = self._left.rows_of(keys, end)
                found = Groups(others, others.queries, rows, groups, np.full(len(keys), end))
                yield from self._emit_groups(found.of(found.counts()[0] == 0))
            yield

    def _emit_groups(self, found: Groups) -> Iterator[None]:
        """In slices of about as many results as one may have; groups without results only leave the state."""
        sizes = self._sizes(found)
        start = 0
        while start < len(found):
            total = np.cumsum(sizes[start:])
            stop = start + max(1, int(np.searchsorted(total, self.rows_per_slice_max, side="right")))
            some = found.between(start, stop)
            if self.splits_groups and stop == start + 1 and int(total[0]) > self.rows_per_slice_max:
                yield from self._emit_large(some)
            else:
                for batch in self._results(some):
                    self.output.collect(batch)
                self._forget(some.left, some.right)
                yield
            start = stop

    def _emit_large(self, group: Groups) -> Iterator[None]:
        """One group with more results than a slice, in several."""
        raise InvariantError(f"operator {self.context.uid!r} makes all results of a group at once")

    def _forget(self, left: RowMatches, right: RowMatches) -> None:
        """These rows are emitted."""
        self._emitted += [(self._left, left), (self._right, right)]
        self._emitted_rows += len(left) + len(right)
        if self._emitted_rows >= EMITTED_ROWS_MAX or isinstance(self.windows, Session):
            self._forget_emitted()

    def _forget_emitted(self) -> None:
        for table, rows in self._emitted:
            table.delete(rows)
        self._emitted, self._emitted_rows = [], 0

    # ----------------------------------------------------------------------------------------------------------- sessions

    def _fire_sessions(self, gap_ms: int) -> Iterator[None]:
        """A session has ended with its last record when the watermark is gap - 1 behind it: of the records that the watermark has
        come to be so far behind since the last time, some are the last of their sessions."""
        passed = self._reached.current
        until = passed if passed == MAX_WATERMARK else passed - gap_ms + 1
        since = max(_MIN_TIME, self._ended_until + 1)
        if passed == MIN_WATERMARK or until < since:
            return
        for table, side in zip((self._left, self._right), self.sides, strict=True):
            for rows in rows_between(table, since, until, self.rows_per_slice_max):
                _, keys, _ = side.by_key(rows.select(rows.namespaces == _OPEN), self.context)
                yield from self._fire_ended(keys, int(rows.times[0]), until, gap_ms)
                yield
        self._ended_until = until if passed < MAX_WATERMARK else self._reached.kept - gap_ms + 1

    def _fire_ended(self, keys: ArrowKeyColumn, since: int, until: int, gap_ms: int) -> Iterator[None]:
        """Sessions of these keys whose last record has a time from `since` on. Where most of the rows that were read belonged to
        sessions that go on, only of those that have ended all rows are read."""
        if self._looks_first:
            recent, has_ended = self._ended_sessions(keys, (since, until), gap_ms), np.zeros(len(keys), np.bool_)
            has_ended[recent.left.queries] = has_ended[recent.right.queries] = True
            self._looks_first = 2 * int(has_ended.sum()) < len(keys)
            keys = keys.take(np.flatnonzero(has_ended))
            if not len(keys):
                return
        found = self._ended_sessions(keys, (_MIN_TIME, until), gap_ms)
        self._looks_first |= self._rows_read > READ_SHARE_MAX * (len(found.left) + len(found.right))
        large = self._sizes(found) > self.rows_per_slice_max
        if self.splits_groups and large.any():
            self._moving = self._move(found.of(large))
            found = found.of(~large)
            yield from self._moving
        yield from self._emit_groups(found)

    def _move(self, found: Groups) -> Iterator[None]:
        """Sessions that take several slices get windows of their own: of what is left of them they could not be told any more.

        Nor of what is not moved yet, so that a barrier moves the rest."""
        self._earliest_end = min(self._earliest_end, int(found.ends.min()))
        sides = ((self._left, found.left, found.left_groups), (self._right, found.right, found.right_groups))
        for (table, rows, groups), side in zip(sides, self.sides, strict=True):
            for start in range(0, len(rows), self.rows_per_slice_max):
                moved = np.arange(start, min(start + self.rows_per_slice_max, len(rows)))
                some = rows.select(moved)
                table.append(side.keys_of(some.keys(), self.context), found.ends[groups[moved]], side.values(some), some.times)
                table.delete(some)
                yield

    def _ended_sessions(self, keys: KeyColumn, last_times: tuple[int, int], gap_ms: int) -> Groups:
        """Of these keys the sessions whose last record has one of these times, from the first one on."""
        since, until = last_times
        within = (since, min(until + gap_ms, MAX_WATERMARK))
        left, right = (self._by_time(table.rows_of(keys, _OPEN, within)) for table in (self._left, self._right))
        self._rows_read = len(left) + len(right)
        queries = np.concatenate([left.queries, right.queries])
        times = np.concatenate([left.times, right.times])
        order = np.lexsort((times, queries))
        queries, times = queries[order], times[order]
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (queries[1:] != queries[:-1]) | (times[1:] - times[:-1] > gap_ms)
        sessions = np.empty(len(order), np.int64)
        sessions[order] = np.cumsum(begins) - 1
        last = times[np.append(np.flatnonzero(begins)[1:], len(order)) - 1] if len(order) else times
        found = Groups(left, sessions[: len(left)], right, sessions[len(left) :], last + gap_ms)
        return found.of(last <= until)

    @staticmethod
    def _by_time(rows: RowMatches) -> RowMatches:
        """Rows by key and time, of one time by arrival."""
        return rows.select(np.lexsort((rows.times, rows.queries)))

    # ------------------------------------------------------------------------------------------------------------ results

    def _take_keyless(self, batch: Batch, ends: Positions, side: StoredSide) -> None:
        """Records with a null in their key: a null is equal to nothing, so that no partner can follow."""

    @abstractmethod
    def _sizes(self, found: Groups) -> Positions:
        """Results of each group, or what stands for their number."""

    @abstractmethod
    def _results(self, found: Groups) -> Iterator[Batch]: ...


@dataclass(frozen=True, slots=True)
class _Begun:
    """A left row, the first one left of its key and window, that has made some of its pairs."""

    keys: KeyColumn
    """One."""
    end: int
    after: int
    """Order of the last right row that it was paired with."""


class WindowJoinOperator(WindowedOperator):
    """All pairs of left and right rows of one key and window."""

    splits_groups = True
    begun = RowTableStateDescriptor("begun", pa.schema([("after", pa.int64())]))
    """In the namespace of its window's end: of a key's first left row, the order of the last right row that it was paired with."""

    def __init__(
        self,
        windows: JoinWindows,
        sides: tuple[JoinSide, JoinSide],
        result: JoinOutput,
        how: How,
        late_tags: tuple[str, str],
    ) -> None:
        super().__init__(windows, *sides, late_tags)
        self.result = result
        self.keeps_left = how in ("left", "full")
        self.keeps_right = how in ("right", "full")

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (*super().declared_states(), self.begun)

    def open(self) -> None:
        super().open()
        own = [f"key {position}" for position in range(len(self.sides[0].side.selector.names))]  # a key may be called "after"
        self._begun_table: RowTable = self.context.keyed_state.row_table(self.begun, own)
        self._begun: _Begun | None = None
        self._stored: _Begun | None = None

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        table, begun, stored = self._begun_table, self._begun, self._stored
        if stored is not None:
            table.delete(table.rows_of(stored.keys, stored.end))
        if begun is not None:
            table.append(begun.keys, begun.end, [pa.array([begun.after])])
        self._stored = begun

    def _fire_window(self, end: int) -> Iterator[None]:
        if self._begun_table.count(end):
            yield from self._go_on(end)
            self._forget_emitted()
        yield from super()._fire_window(end)
        self._begun_table.drop(end)

    def _go_on(self, end: int) -> Iterator[None]:
        """The other pairs of rows that a barrier found in the middle of theirs."""
        scan = self._begun_table.scan(end)
        while (rows := scan.next(self.rows_per_slice_max)) is not None:
            afters = rows.take(["after"]).column(0).to_pylist()
            for row, after in enumerate(afters):
                one = rows.select(np.array([row]))
                keys = self.sides[0].keys_of(one.keys(), self.context)
                self._begun_table.delete(one)
                lefts, rights = self._left.rows_of(keys, end), self._right.rows_of(keys, end)
                yield from self._make_pairs(keys, end, lefts, rights, int(np.searchsorted(rights.orders, after, side="right")))

    def _take_keyless(self, batch: Batch, ends: Positions, side: StoredSide) -> None:
        is_left = side is self.sides[0]
        if batch.num_rows and (self.keeps_left if is_left else self.keeps_right):
            columns = batch.columns()
            keys, values = side.side.key_values(columns), side.side.values(columns)
            self.output.collect(
                self.result.batch(keys, values if is_left else None, None if is_left else values, ends - 1)
            )

    def _sizes(self, found: Groups) -> Positions:
        left, right = found.counts()
        pairs = left * right
        if self.keeps_left:
            pairs = np.where(right == 0, left, pairs)
        if self.keeps_right:
            pairs = np.where(left == 0, right, pairs)
        return pairs

    def _emit_large(self, group: Groups) -> Iterator[None]:
        if len(group.left) and len(group.right):
            keys = self.sides[0].keys_of(group.left.select(np.array([0])).keys(), self.context)
            yield from self._make_pairs(keys, int(group.ends[0]), group.left, group.right)
            return
        for start in range(0, max(len(group.left), len(group.right)), self.rows_per_slice_max):
            rows = slice(start, start + self.rows_per_slice_max)
            some = group.rows(np.arange(len(group.left))[rows], np.arange(len(group.right))[rows])
            for batch in self._results(some):
                self.output.collect(batch)
            self._forget(some.left, some.right)
            yield

    def _make_pairs(self, keys: KeyColumn, end: int, left: RowMatches, right: RowMatches, made: int = 0) -> Iterator[None]:
        """All pairs of a key and window but the first `made`, left row by left row. A left row leaves the state with the last of
        its pairs, the right ones with the last of all."""
        count, total = len(right), len(left) * len(right)
        group = Groups(left, np.zeros(len(left), np.int64), right, np.zeros(count, np.int64), np.array([end]))
        for start in range(made, total, self.rows_per_slice_max):
            stop = min(start + self.rows_per_slice_max, total)
            pairs = np.arange(start, stop)
            self.output.collect(self._pairs(group, pairs // count, pairs % count, np.full(len(pairs), end)))
            self._forget(left.select(np.arange(start // count, stop // count)), right if stop == total else right.select(pairs[:0]))
            last = int(right.orders[(stop - 1) % count])
            self._begun = None if stop % count == 0 else _Begun(keys, end, last)
            yield

    def _results(self, found: Groups) -> Iterator[Batch]:
        lefts, rights = found.counts()
        each = rights[found.left_groups]
        """Right rows of each left row."""
        starts = np.cumsum(rights) - rights
        rows = np.repeat(np.arange(len(found.left)), each)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(each) - each, each) + np.repeat(starts[found.left_groups], each)
        ends = found.ends[found.left_groups[rows]]
        for start in range(0, len(rows), self.rows_per_slice_max):
            some = slice(start, start + self.rows_per_slice_max)
            yield self._pairs(found, rows[some], places[some], ends[some])
        if self.keeps_left and (alone := np.flatnonzero(each == 0)).size:
            ends = found.ends[found.left_groups[alone]]
            yield self._pairs(found, alone, None, ends)
        if self.keeps_right and (alone := np.flatnonzero(lefts[found.right_groups] == 0)).size:
            ends = found.ends[found.right_groups[alone]]
            yield self._pairs(found, None, alone, ends)

    def _pairs(self, found: Groups, left: Positions | None, right: Positions | None, ends: Positions) -> Batch:
        """Rows of both sides, side by side; None: they are without a partner there."""
        lefts = found.left.select(left) if left is not None else None
        rights = found.right.select(right) if right is not None else None
        one = None if lefts is None else self.sides[0].values(lefts)
        other = None if rights is None else self.sides[1].values(rights)
        keyed = rights if lefts is None else lefts
        assert keyed is not None
        return self.result.batch(keyed.keys(), one, other, ends - 1)


class CoGroupOperator(WindowedOperator):
    """A row function of the left and right rows of each key and window."""

    keeps_right = True
    splits_groups = False

    def __init__(
        self,
        windows: JoinWindows,
        sides: tuple[JoinSide, JoinSide],
        function: CoGroupFunction,
        output_type: RowType,
        late_tags: tuple[str, str],
    ) -> None:
        super().__init__(windows, *sides, late_tags)
        self.function = function
        self.output_type = output_type
        one, other = (ColumnKeySelector(side.selector.names, side.selector.key_type) for side in sides)
        self.selectors = (one, other)
        """Of its inputs: a null in a key is an error, as of `key_by`."""

    def _take_keyless(self, batch: Batch, ends: Positions, side: StoredSide) -> None:
        context, selector = self.context, self.selectors[self.sides.index(side)]
        selector.keys(batch, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask)

    def _sizes(self, found: Groups) -> Positions:
        left, right = found.counts()
        return left + right

    def _results(self, found: Groups) -> Iterator[Batch]:
        lefts, rights = (self._rows(side, rows) for side, rows in zip(self.sides, (found.left, found.right), strict=True))
        counts = zip(*(count.tolist() for count in found.counts()), strict=True)
        results: list[Any] = []
        made: list[int] = []
        groups = zip(self._keys(found), self._starts(found), found.ends.tolist(), counts, strict=True)
        left = right = 0
        for key, start, end, (left_count, right_count) in groups:
            before = len(results)
            window = TimeWindow(start, end)
            results += self._call(key, window, lefts[left : left + left_count], rights[right : right + right_count])
            left, right = left + left_count, right + right_count
            made.append(len(results) - before)
        stamps = np.repeat(found.ends - 1, made)
        for first in range(0, len(results), self.rows_per_slice_max):
            some = slice(first, first + self.rows_per_slice_max)
            yield Batch(
                rows=results[some],
                schema=self.output_type.schema,
                timestamps=stamps[some],
                row_factory=self.output_type.record,
                producer=self.context.uid,
            )

    @staticmethod
    def _rows(side: StoredSide, rows: RowMatches) -> Sequence[Any]:
        """Rows as they came: dicts by column name, or the declared record type."""
        row_type = side.side.row_type
        return Batch(columns=rows.take(row_type.names)).rows(row_type.record)

    def _keys(self, found: Groups) -> list[Any]:
        """Of each group: of its first left row, or else its first right one."""
        keys: list[Any] = [None] * len(found)
        sides = ((found.right, found.right_groups), (found.left, found.left_groups))
        for (rows, groups), side in zip(sides, reversed(self.sides), strict=True):
            numbers, first = np.unique(groups, return_index=True)
            values = side.keys_of(rows.select(first).keys(), self.context).values()
            for number, value in zip(numbers.tolist(), values, strict=True):
                keys[number] = value
        return keys

    def _starts(self, found: Groups) -> list[int]:
        if not isinstance(self.windows, Session):
            return [end - self.windows.size_ms for end in found.ends.tolist()]
        starts = found.ends.copy()
        np.minimum.at(starts, found.left_groups, found.left.times)
        np.minimum.at(starts, found.right_groups, found.right.times)
        return list(starts.tolist())

    def _call(self, key: Any, window: TimeWindow, left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        context = self.context
        try:
            found = self.function(key, window, list(left), list(right))
            if found is None:
                raise TypeError("it returned None, and must return rows, or yield them; an empty list for none")
            return list(found)
        except Exception as error:
            record = Described(f"window {window.start}..{window.end}, {len(left)} left and {len(right)} right rows")
            raise_located(
                error, operator=context.uid, subtask=context.subtask, function=self.function, record=record, key=shown(key)
            )


def window_join(
    left: RowType,
    right: RowType,
    on: On,
    window: Any,
    how: Any,
    suffixes: Suffixes | None,
    operator: str,
    late_tags: tuple[str, str] = ("", ""),
) -> WindowJoinOperator:
    """The operator of `stream.window_join(other, on, window)`. Raises GraphError naming the operator."""
    windows, how = check_windows(window, operator), check_how(how, operator)
    sides = join_sides(on, left, right, operator)
    check_kept_columns(sides, operator)
    return WindowJoinOperator(windows, sides, join_output(*sides, how, suffixes, operator), how, late_tags)


def cogroup(
    left: RowType,
    right: RowType,
    on: On,
    window: Any,
    function: Any,
    output_type: RowType,
    operator: str,
    late_tags: tuple[str, str] = ("", ""),
) -> CoGroupOperator:
    """The operator of `stream.cogroup(other, function, on, window)`. Raises GraphError naming the operator."""
    windows = check_windows(window, operator)
    check_returns(function, operator)
    for row_type in (left, right):
        row_type.check_rows(operator)
    sides = join_sides(on, left, right, operator)
    check_kept_columns(sides, operator)
    return CoGroupOperator(windows, sides, function, output_type, late_tags)


def check_windows(window: Any, operator: str) -> JoinWindows:
    """Raises GraphError naming the operator for what joins have no windows of."""
    if not isinstance(window, Tumbling | Sliding | Session) or not window.is_event_time:
        raise GraphError(
            f"operator {operator!r}: window is one of event time, hf.Tumbling, hf.Sliding or hf.Session, not {window!r}",
            operator=operator,
        )
    if isinstance(window, Session) and window.gap_of is not None:
        raise GraphError(f"operator {operator!r}: the gap of its sessions is a number of ms, not a function", operator=operator)
    if isinstance(window, Sliding) and window.size_ms > window.slide_ms * WINDOWS_OF_A_RECORD_MAX:
        raise GraphError(
            f"operator {operator!r}: a record of {window!r} is kept in {window.size_ms // window.slide_ms} windows; it may be in "
            f"{WINDOWS_OF_A_RECORD_MAX}: take a longer slide",
            operator=operator,
        )
    return window
