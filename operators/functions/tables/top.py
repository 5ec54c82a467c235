"""The n first rows of each key: `keyed.top(10, by="price")`. Rows are in a row table; updates of ranks are emitted.

A batch is sorted together with what the table holds of its keys. A row that can't be among the first of its key is dropped before
that, by the key's *threshold*: what its n-th row is compared by. Thresholds are no state: without one a row is compared with the
table, so that a restore needs none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator, OperatorContext
from holdfast.operators.functions.schema import RowType, undeclared_error
from holdfast.operators.functions.selectors import Selector
from holdfast.operators.functions.tables.ordering import ordered_column, plain, plain_type
from holdfast.statebackends.columnar.key_index import KeyIndex, create_key_index
from holdfast.statebackends.columnar.ordering import LAST, is_lasting, sort_numbers, sorted_rows
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn
from holdfast.statebackends.state import NO_TIME, RowMatches, RowTable, RowTableStateDescriptor, StateDescriptor

Numbers = npt.NDArray[np.int64]

ROWS_MAX = 1 << 20
"""Largest n of `top`."""
THRESHOLDS_MAX = 1 << 21
"""Keys of one subtask whose thresholds are known: beyond, all are forgotten, and learned again. 24 bytes of each, and its index."""
_PRODUCT_MAX = 2**62
WINDOW_THRESHOLDS_MAX = 1 << 23
"""Thresholds of one subtask, a place for each of these keys in each open window: beyond, the same. 24 bytes of each."""
_WIDTH_MIN = 1024
_STATE = "rows"


@dataclass(frozen=True, slots=True)
class Ranking:
    """How the rows of a key are ranked."""

    count: int
    columns: tuple[str, ...]
    greatest: tuple[bool, ...]
    """Of each column: the greatest value first, else the least; null last."""
    latest: bool
    """Of equals the latest first, by event time and then by arrival, else the earliest."""
    rank_column: str


def ranking(n: int, by: str | Sequence[str], descending: bool | Sequence[bool], ties: str, rank_column: str) -> Ranking:
    """What `top` is given. Raises GraphError."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= ROWS_MAX:
        raise _refused(f"n must be 1 .. {ROWS_MAX:,}, not {n!r}")
    columns = (by,) if isinstance(by, str) else tuple(by)
    if not columns or len(set(columns)) != len(columns):
        raise _refused(f"by must name distinct columns, not {list(columns)}")
    greatest = (descending,) * len(columns) if isinstance(descending, bool) else tuple(descending)
    if len(greatest) != len(columns) or any(not isinstance(each, bool) for each in greatest):
        raise _refused(f"descending must be a boolean, or one for each column of by, not {descending!r}")
    if ties not in ("earlier", "later"):
        raise _refused(f"ties must be 'earlier' or 'later', not {ties!r}")
    if not isinstance(rank_column, str) or not rank_column:
        raise _refused(f"rank_column must be the name of a column, not {rank_column!r}")
    return Ranking(n, columns, greatest, ties == "later", rank_column)


def top_operator(ranking: Ranking, selector: Selector, input_type: RowType) -> TopOperator:
    """Raises GraphError, UnknownColumnError."""
    check_ordered(ranking, input_type, "top")
    operator = TopOperator(ranking, selector, input_type)
    check_distinct_columns(operator.output_type, _refused)
    return operator


def check_ordered(ranking: Ranking, input_type: RowType, operator: str) -> None:
    """Raises GraphError, UnknownColumnError for rows that it can't rank."""
    if input_type.schema is None:
        raise undeclared_error(operator, "columns")
    for column in ranking.columns:
        ordered_column(column, input_type, operator)


def check_distinct_columns(output_type: RowType, refused: Callable[[str], GraphError]) -> None:
    """`refused`: the error of a reason."""
    names = output_type.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise refused(f"two columns of its rows are called {', '.join(map(repr, repeated))}: give rank_column=, or rename them")


def _refused(reason: str) -> GraphError:
    return GraphError(f"operator 'top': {reason}", operator="top")


class RankedRows:
    """The first rows of keys as state. A template until `open`."""

    def __init__(self, ranking: Ranking, selector: Selector, input_type: RowType) -> None:
        assert input_type.schema is not None
        self.ranking = ranking
        self.selector = selector
        keys = list(zip(selector.names, selector.key_type.arrow_types, strict=True))
        self.fields = [pa.field(field.name, plain_type(field.type), field.nullable) for field in input_type.schema]
        """The rows' columns, as they come out."""
        named = selector.columns or ()
        self._from_key = {
            name: place
            for place, (name, data_type) in enumerate(keys)
            if name in named and _is_exact(data_type) and pa.field(name, data_type, False) in _not_null(self.fields)
        }
        """Columns that the table has as its key -> field of the key."""
        self.descriptor = RowTableStateDescriptor(
            _STATE, pa.schema([field.with_nullable(True) for field in self.fields if field.name not in self._from_key])
        )
        self.key_fields = [] if selector.columns is not None else [pa.field(name, kind, nullable=False) for name, kind in keys]
        """In front of the rows' columns: of a key that a function computes."""

    def open(self, context: OperatorContext) -> None:
        self._context = context
        prefix = "key"
        while any(name.startswith(prefix) for name in self.descriptor.schema.names):  # columns are taken by name
            prefix = f"_{prefix}"
        names = [f"{prefix}_{place}" for place in range(len(self.selector.key_type.fields))]
        self.table: RowTable = context.keyed_state.row_table(self.descriptor, names)

    def new_thresholds(self) -> Thresholds:
        first = self.ranking.columns[0]
        lasting = is_lasting(next(field.type for field in self.fields if field.name == first))
        return Thresholds(self.ranking, lambda: create_key_index(self.selector.key_type.arrow_types, self._column_of), lasting)

    def _column_of(self, arrays: list[pa.Array]) -> ArrowKeyColumn:
        context = self._context
        return self.selector.key_type.column(arrays, max_parallelism=context.max_parallelism, operator=context.uid)

    def keys(self, batch: Batch) -> ArrowKeyColumn:
        context = self._context
        return self.selector.keys(
            batch, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask
        )

    def offer(self, batch: Batch, keys: ArrowKeyColumn, thresholds: Thresholds) -> Entered | None:
        """The table has the first rows of what it had and of a batch. None: no row entered."""
        columns, times = batch.columns(), batch.timestamps
        slots = thresholds.slots(keys)
        rows = thresholds.candidates(slots, thresholds.numbers_of(self._first_of(columns)), times)
        if not len(rows):
            return None
        if len(rows) < batch.num_rows:
            slots, keys = slots[rows], keys.take(rows)
        return self._enter(Offered(slots, None, keys, columns, rows, None if times is None else times[rows]), thresholds)

    def offer_in(self, entries: Iterable[Entries], batch: Batch, keys: ArrowKeyColumn, thresholds: Thresholds) -> None:
        """The same in namespaces. The table is read and changed once for each of `entries`."""
        columns, stamps = batch.columns(), batch.timestamps
        assert stamps is not None
        slots, numbers = thresholds.slots(keys), thresholds.numbers_of(self._first_of(columns))
        for some in entries:
            behind = None if numbers is None else thresholds.behind_in_all(slots[some.rows], numbers[some.rows], some)
            some = some if behind is None else some.of(~behind)
            if not len(some.rows):
                continue
            rows, entered = some.each()
            spaces = thresholds.spaces(some.distinct())
            owners = spaces.owners(slots[rows], entered)
            times = stamps[rows]
            if spaces.is_known and numbers is not None:
                kept = thresholds.candidates(owners, numbers[rows], times)
                owners, rows, times = owners[kept], rows[kept], times[kept]
            if len(rows):
                self._enter(Offered(owners, spaces, keys.take(rows), columns, rows, times), thresholds)

    def _first_of(self, columns: pa.RecordBatch) -> pa.Array:
        return plain(columns.column(self.ranking.columns[0]))

    def _enter(self, offered: Offered, thresholds: Thresholds) -> Entered | None:
        spaces = offered.spaces
        owners, first_rows, numbers = thresholds.distinct(offered.owners, spaces)
        held, held_numbers = self._held(offered, owners, first_rows)
        ranked = Ranked(self.ranking, offered, np.concatenate([held_numbers, numbers]), held, self._compared(offered, held))
        if spaces is None or spaces.is_known:
            thresholds.learn(owners, ranked)
        if not len(ranked.added):
            return None
        self.table.delete(held.select(ranked.removed))
        keys, added = offered.keys.take(ranked.added), offered.columns.take(pa.array(offered.rows[ranked.added]))
        stored = [plain(added.column(field.name)) for field in self.descriptor.schema]
        namespaces = 0 if spaces is None else spaces.of(offered.owners[ranked.added])
        self.table.append(keys, namespaces, stored, None if offered.times is None else offered.times[ranked.added])
        return Entered(keys.arrays, added, held.select(ranked.moved), ranked)

    def _held(self, offered: Offered, owners: Numbers, first_rows: Numbers) -> tuple[RowMatches, Numbers]:
        """Rows of the table, and the place of each one's owner in `owners`.

        A key is asked for once, not once for each namespace: that would look at all of its rows each time."""
        spaces = offered.spaces
        if spaces is None or len(spaces.values) == 1:
            held = self.table.rows_of(offered.keys.take(first_rows), None if spaces is None else int(spaces.values[0]))
            return held, held.queries
        slots, firsts = np.unique(owners % spaces.width, return_index=True)
        held = self.table.rows_of(offered.keys.take(first_rows[firsts]))
        wanted = np.flatnonzero(np.isin(held.namespaces, spaces.values))
        numbers = spaces.owners(slots[held.queries[wanted]], held.namespaces[wanted])
        order = np.argsort(owners)
        places = order[np.minimum(np.searchsorted(owners, numbers, sorter=order), len(owners) - 1)]
        is_owned = owners[places] == numbers
        return held.select(wanted[is_owned]), places[is_owned]

    def _compared(self, offered: Offered, held: RowMatches) -> list[pa.Array]:
        """What rows are compared by, those that are held first."""
        taken = pa.array(offered.rows)
        new = [plain(offered.columns.column(name)).take(taken) for name in self.ranking.columns]
        return [pa.concat_arrays(both) for both in zip(self._of_held(held, self.ranking.columns), new, strict=True)]

    def _of_held(self, held: RowMatches, names: Sequence[str]) -> list[pa.Array]:
        """Some columns of rows of the table."""
        stored = held.take([name for name in names if name not in self._from_key])
        keys = held.keys() if self._from_key.keys() & set(names) else []
        return [keys[self._from_key[name]] if name in self._from_key else stored.column(name) for name in names]

    def arrays_of(self, held: RowMatches) -> list[pa.Array]:
        """Key and columns, as they come out, of rows of the table."""
        columns = self._of_held(held, [field.name for field in self.fields])
        return [*held.keys(), *columns] if self.key_fields else columns

    def ranked(self, rows: RowMatches) -> Ranked:
        """Rows of the table, all of their keys."""
        nothing = np.empty(0, np.int64)
        offered = Offered(nothing, None, self._column_of(rows.keys()), pa.record_batch([], names=[]), nothing, nothing)
        return Ranked(self.ranking, offered, rows.queries, rows, self._of_held(rows, self.ranking.columns))


class TopOperator(Operator):
    """Emits, after each batch, the row of each rank that changed: the key if it is computed, the row's columns, the rank."""

    def __init__(self, ranking: Ranking, selector: Selector, input_type: RowType) -> None:
        self.rows = RankedRows(ranking, selector, input_type)
        fields = [*self.rows.key_fields, *self.rows.fields]
        self.output_type = RowType(pa.schema([*fields, pa.field(ranking.rank_column, pa.int64(), nullable=False)]))

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (self.rows.descriptor,)

    def open(self) -> None:
        self.rows.open(self.context)
        self._thresholds = self.rows.new_thresholds()

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        entered = self.rows.offer(batch, self.rows.keys(batch), self._thresholds)
        if entered is not None:
            self.output.collect(self._updates(entered))

    def _updates(self, entered: Entered) -> Batch:
        """The rows that entered, in order of arrival, then those whose rank changed, by key and rank."""
        new = [*entered.keys, *(plain(entered.rows.column(field.name)) for field in self.rows.fields)]
        new = new if self.rows.key_fields else new[len(entered.keys) :]
        arrays = [pa.concat_arrays(both) for both in zip(new, self.rows.arrays_of(entered.moved), strict=True)]
        arrays.append(pa.array(entered.ranked.update_ranks))
        columns = pa.RecordBatch.from_arrays(arrays, schema=self.output_type.schema)
        return Batch(columns=columns, timestamps=entered.ranked.update_times)


@dataclass(frozen=True, slots=True)
class Entered:
    """What a batch brought into the first rows of its keys."""

    keys: Sequence[pa.Array]
    rows: pa.RecordBatch
    """Those that entered, in order of arrival."""
    moved: RowMatches
    """Rows of the table that have another rank now."""
    ranked: Ranked


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows of a batch, ascending, that enter namespaces: from their last one back, in steps."""

    rows: Numbers
    lasts: Numbers
    counts: Numbers
    """Of namespaces, each 1 or more."""
    step: int

    def of(self, wanted: npt.NDArray[np.bool_]) -> Entries:
        """Some rows."""
        return Entries(self.rows[wanted], self.lasts[wanted], self.counts[wanted], self.step)

    def distinct(self) -> Numbers:
        """The namespaces that some row enters, ascending."""
        if self.counts.max() == 1:
            return self.lasts[:1] if bool((self.lasts == self.lasts[0]).all()) else np.unique(self.lasts)
        lasts, numbers = np.unique(self.lasts, return_inverse=True)
        most = np.zeros(len(lasts), np.int64)
        np.maximum.at(most, numbers, self.counts)
        return np.unique(Entries(lasts, lasts, most, self.step).each()[1])

    def each(self) -> tuple[Numbers, Numbers]:
        """A row for each of its namespaces, and the namespace."""
        if not len(self.rows) or self.counts.max() == 1:
            return self.rows, self.lasts
        totals = np.cumsum(self.counts)
        before = np.arange(totals[-1]) - np.repeat(totals - self.counts, self.counts)
        return np.repeat(self.rows, self.counts), np.repeat(self.lasts, self.counts) - before * self.step


@dataclass(frozen=True, slots=True)
class Spaces:
    """Some namespaces. An owner is a key in one of them; its number is that of the namespace's first owner, and the key's slot."""

    values: Numbers
    """Distinct, ascending."""
    starts: Numbers
    """Number of the first owner of each: multiples of `width`, each its own."""
    width: int
    """Above all slots."""
    is_known: bool
    """Whether the numbers are places of thresholds."""

    def owners(self, slots: Numbers, namespaces: Numbers) -> Numbers:
        """Of keys in these namespaces, which are among `values`."""
        places = 0 if len(self.values) == 1 else np.searchsorted(self.values, namespaces)
        found: Numbers = self.starts[places] + slots
        return found

    def of(self, owners: Numbers) -> Numbers:
        """The namespace of each owner."""
        by_start = np.argsort(self.starts)
        places = np.searchsorted(self.starts[by_start], owners, side="right") - 1
        return self.values[by_start[places]]


@dataclass(frozen=True, slots=True)
class Offered:
    """Rows of a batch that may be among the first of their owners."""

    owners: Numbers
    """Of each: the slot of its key, or a number of `spaces`."""
    spaces: Spaces | None
    """None: the table has one namespace."""
    keys: ArrowKeyColumn
    columns: pa.RecordBatch
    """Of the whole batch."""
    rows: Numbers
    """Which of them."""
    times: Numbers | None


class Ranked:
    """Rows that are held and rows that are offered, sorted together: `order` has their numbers, those held first."""

    def __init__(
        self, ranking: Ranking, offered: Offered, all_owners: Numbers, held: RowMatches, compared: Sequence[pa.Array]
    ) -> None:
        """`all_owners`: of each row that is held, then of each that is offered, a number of whom it belongs to, from 0."""
        held_count = len(held)
        self.times: Numbers | None = None
        numbers = [
            each
            for array, greatest in zip(compared, ranking.greatest, strict=True)
            for each in sort_numbers(array, greatest=greatest)
        ]
        is_null = len(numbers) > 1 and compared[0].null_count
        self.primary: Numbers = np.where(numbers[0] == 1, LAST, numbers[1]) if is_null else numbers[0]
        if offered.times is not None:
            self.times = np.concatenate([held.times, offered.times])
        self.order: Numbers = sorted_rows([all_owners, *numbers], self.times, latest=ranking.latest)
        self.owners: Numbers = all_owners[self.order]
        is_first = np.append(True, self.owners[1:] != self.owners[:-1])
        starts = np.flatnonzero(is_first)
        counts = np.diff(starts, append=len(self.owners))
        self.positions: Numbers = np.arange(len(all_owners)) - np.repeat(starts, counts)
        """From 0, within the key."""
        self._starts, self._counts = starts, counts
        is_held = self.order < held_count
        kept = self.positions < ranking.count
        before: Numbers = np.cumsum(is_held) - is_held
        was: Numbers = before - np.repeat(before[starts], counts)
        is_removed, is_moved = is_held & ~kept, is_held & kept & (was != self.positions)
        self.removed: Numbers = self.order[is_removed]
        """Of the rows held."""
        self.moved: Numbers = self.order[is_moved]
        """Of the rows held: they have another rank."""
        entered = np.flatnonzero(~is_held & kept)
        entered = entered[np.argsort(self.order[entered])]
        self.added: Numbers = self.order[entered] - held_count
        """Of the rows offered, in order of arrival, which is the table's."""
        self._updates: Numbers = np.concatenate([entered, np.flatnonzero(is_moved)])
        self._limit = ranking.count

    def last_rows(self) -> tuple[Numbers, Numbers]:
        """(keys with as many rows as there are ranks, their row of the last rank)."""
        full = self._counts >= self._limit
        places = self._starts[full] + self._limit - 1
        return self.owners[places], self.order[places]

    @property
    def update_ranks(self) -> Numbers:
        """From 1, of what was added and moved."""
        return self.positions[self._updates] + 1

    @property
    def update_times(self) -> Numbers | None:
        """Event time of each: the latest of the rows up to its rank, of which one moved it there."""
        if self.times is None:
            return None
        times = self.times[self.order]
        first, last = int(times.min()), int(times.max())
        if (last - first + 1) * len(self.owners) < _PRODUCT_MAX:
            found: Numbers = _highest(times - first, last - first + 1, self.owners)[self._updates] + first
            return found
        values, places = np.unique(times, return_inverse=True)
        found = values[_highest(places, len(values), self.owners)[self._updates]]
        return found


class Thresholds:
    """What the last of the first n rows of an owner is compared by, of owners that have so many."""

    def __init__(self, ranking: Ranking, new_index: Any, is_lasting: bool) -> None:
        """`is_lasting`: numbers of one batch compare with those of another; else nothing is learned."""
        self._greatest = ranking.greatest[0]
        self._breaks_ties = len(ranking.columns) == 1 and not ranking.latest
        self._new_index = new_index
        self._is_lasting = is_lasting
        self._forget()

    def _forget(self) -> None:
        self._index: KeyIndex = self._new_index()
        self._width = _WIDTH_MIN
        self._lines: dict[int, int] = {}
        """Namespace -> which stretch of `_width` thresholds is its; none if the table has one namespace."""
        self._free_lines = [0]
        self._numbers: Numbers = np.full(self._width, LAST)
        self._times: Numbers = np.full(self._width, LAST)
        self._scratch: Numbers = np.empty(0, np.int64)
        self._is_full = False

    def slots(self, keys: ArrowKeyColumn) -> Numbers:
        """A number for each key, until the next call: that of its owner, if there are no namespaces."""
        if self._index.count > THRESHOLDS_MAX or self._is_full or not self._is_lasting:
            self._forget()
        slots = self._index.slots(keys)
        if self._index.count > self._width:
            self._widen(max(self._index.count, 2 * self._width))
        return slots

    def _widen(self, width: int) -> None:
        lines = len(self._numbers) // self._width
        if lines * width > max(width, WINDOW_THRESHOLDS_MAX):
            self._lines, self._free_lines, lines = {}, [0], 0
        self._numbers, self._times = (
            _extended(array[: lines * self._width], (max(1, lines), width), self._width) for array in (self._numbers, self._times)
        )
        self._width = width

    def spaces(self, namespaces: Numbers) -> Spaces:
        """Of these ones, distinct and ascending, until the next call of `slots`. Where thresholds take too much room, all are
        forgotten with that call."""
        lines = self._lines_of(namespaces.tolist()) if self._is_lasting else None
        starts = np.arange(len(namespaces)) if lines is None else np.array(lines)
        return Spaces(namespaces, starts * self._width, self._width, lines is not None)

    def _lines_of(self, namespaces: list[int]) -> list[int] | None:
        new = [namespace for namespace in namespaces if namespace not in self._lines]
        count = len(self._numbers) // self._width
        missing = len(new) - len(self._free_lines)
        if missing > 0:
            if (count + missing) * self._width > WINDOW_THRESHOLDS_MAX:
                self._is_full = True
                return None
            added = min(max(missing, count), WINDOW_THRESHOLDS_MAX // self._width - count)
            self._numbers, self._times = (
                _extended(array, (count + added, self._width), self._width) for array in (self._numbers, self._times)
            )
            self._free_lines += range(count, count + added)
        for namespace in new:
            self._lines[namespace] = self._free_lines.pop()
        return [self._lines[namespace] for namespace in namespaces]

    def behind_in_all(self, slots: Numbers, numbers: Numbers, entries: Entries) -> npt.NDArray[np.bool_] | None:
        """Which rows are known to be behind the last rank of their key in all namespaces that they enter. None: it is cheaper to
        look at each."""
        width, most, total = self._index.count, int(entries.counts.max()), int(entries.counts.sum())
        if most == 1 or width * most > total:
            return None
        lasts = np.unique(entries.lasts)
        if len(lasts) * width * most > total:
            return None
        lines = self._numbers.reshape(-1, self._width)
        behind = np.zeros(len(slots), np.bool_)
        for last in lasts.tolist():
            some = np.flatnonzero(entries.lasts == last)
            entered = range(last, last - int(entries.counts[some].max()) * entries.step, -entries.step)
            found = [self._lines.get(namespace, -1) for namespace in entered]
            if min(found) >= 0:
                behind[some] = numbers[some] > lines[np.array(found), :width].max(axis=0)[slots[some]]
        return behind

    def drop(self, namespace: int) -> None:
        """Forget those of a namespace."""
        line = self._lines.pop(namespace, None)
        if line is not None:
            self._numbers[line * self._width : (line + 1) * self._width] = LAST
            self._free_lines.append(line)

    def distinct(self, owners: Numbers, spaces: Spaces | None) -> tuple[Numbers, Numbers, Numbers]:
        """(the owners, each once; the first row of each; the place of each row's owner among them)."""
        if spaces is not None and not spaces.is_known:
            return np.unique(owners, return_index=True, return_inverse=True)
        if len(self._scratch) < len(self._numbers):
            self._scratch = np.empty(len(self._numbers), np.int64)
        found, rows = self._scratch, np.arange(len(owners))
        found[owners[::-1]] = rows[::-1]  # of several rows of an owner the first is written last
        first_rows = np.flatnonzero(found[owners] == rows)
        distinct = owners[first_rows]
        found[distinct] = rows[: len(distinct)]
        return distinct, first_rows, found[owners]

    def numbers_of(self, column: pa.Array) -> Numbers | None:
        """What rows are compared by with thresholds: their first column. None: there are no thresholds."""
        if not self._is_lasting:
            return None
        *nulls, numbers = sort_numbers(column, greatest=self._greatest)
        for is_null in nulls:
            numbers = np.where(is_null == 1, LAST, numbers)
        return numbers

    def candidates(self, owners: Numbers, numbers: Numbers | None, times: Numbers | None) -> Numbers:
        """Rows that are not known to be behind the last rank of their owner."""
        if numbers is None:
            return np.arange(len(owners))
        limits = self._numbers[owners]
        behind = numbers > limits
        if self._breaks_ties:  # what is held came earlier
            is_later = True if times is None else times >= self._times[owners]
            behind |= (numbers == limits) & (limits != LAST) & is_later
        return np.flatnonzero(~behind)

    def learn(self, owners: Numbers, ranked: Ranked) -> None:
        """`owners` that were ranked."""
        if self._is_lasting:
            places, rows = ranked.last_rows()
            self._numbers[owners[places]] = ranked.primary[rows]
            self._times[owners[places]] = NO_TIME if ranked.times is None else ranked.times[rows]


def _highest(numbers: Numbers, bound: int, owners: Numbers) -> Numbers:
    """The greatest number up to each row of those of its owner. Numbers are below `bound`; owners ascend."""
    bases = owners * bound
    found: Numbers = np.maximum.accumulate(numbers + bases) - bases
    return found


def _extended(array: Numbers, shape: tuple[int, int], width: int) -> Numbers:
    """More lines, or longer ones, were `width`."""
    bigger = np.full(shape, LAST)
    lines = array.reshape(-1, width)
    bigger[: len(lines), :width] = lines
    return bigger.reshape(-1)


def _is_exact(data_type: pa.DataType) -> bool:
    """Whether a key's field has the very value of its column: of floats -0.0 and 0.0 are one key."""
    return not pa.types.is_floating(data_type)


def _not_null(fields: Sequence[pa.Field]) -> list[pa.Field]:
    return [field.with_nullable(False) for field in fields]
