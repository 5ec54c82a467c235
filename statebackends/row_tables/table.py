"""`state.RowTable` of one descriptor: a head of appended batches, runs below it, and what merges them (ADR 58).

It decides when batches become a run, which runs are merged, and what a barrier notes. It lives in memory, or in mapped files of the
working folder, in every backend; snapshots are tables (key group, key, namespace, order, time, columns)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, InvariantError, StateValueError
from holdfast.statebackends.row_tables.frozen import FrozenRows, RowChanges, Rows, Tombstones, head_alive
from holdfast.statebackends.row_tables.key_codes import Codes, Positions, key_codes, stable_order
from holdfast.statebackends.row_tables.merge import Merge, places_of
from holdfast.statebackends.row_tables.probe import MatchFilter, Probe, matches_in
from holdfast.statebackends.row_tables.run import Mask, Matches, Numbers, RowColumns, Run, RunContents, namespaces_of
from holdfast.statebackends.row_tables.scan import Scan
from holdfast.statebackends.row_tables.time_order import TimeOrder
from holdfast.statebackends.row_tables.type_text import unreadable_column
from holdfast.statebackends.state import NO_TIME, KeyColumn, RowMatches, RowTableStateDescriptor
from holdfast.statebackends.storage.failures import refusal

HEAD_ROWS_MAX = 1 << 15
HEAD_BYTES_MAX = 32 << 20
RUNS_PER_TIER = 4
"""Runs of about one size, before they are merged; each tier is so many times as large as the one below. See RARELY_READ_ROWS."""
RARELY_READ_ROWS = 4
"""Where more rows than so many are appended for each key or row that is looked up, a tier has twice as many runs: a row is
written again less often, and one is looked for in more runs."""
_RECENT_MAX = 1 << 18
"""Rows appended, and keys and rows looked up, beyond which the older half counts half."""
_TIER_ROWS = 1 << 10
_SMALL_SHARE = 8
"""Runs of less than this share of `bytes_max` stay in memory: all of them together are less than half of it."""
_WORK_PER_ROW = 2
"""Rows that merges look at for each row that is appended or deleted, and for each merge under way: so one has ended long before as
many rows have come as it has."""
_IDLE_ROWS = 1 << 15
"""Rows that merges look at when there is nothing else to do: a few milliseconds."""
REMOVED_MAX = 1 << 16
"""Namespaces dropped since the base, before the next snapshot is full instead."""
TOMBSTONES_MIN = 4_096
"""Tombstones since the base may be so many, or half as many as there are rows; beyond, the next snapshot is full instead."""
ORDER_MAX = 2**62
"""Above all orders: at ten million rows a second it is reached in 14,000 years."""
KeyColumnOf = Callable[[list[pa.Array]], KeyColumn]


class SortedRowTable:
    """The rows of one subtask."""

    def __init__(
        self,
        descriptor: RowTableStateDescriptor,
        field_types: Sequence[pa.DataType],
        column_of: KeyColumnOf,
        operator: str,
        *,
        bytes_max: int,
        folder: str,
    ) -> None:
        """`field_types`: Arrow types of the key's fields. `bytes_max`: of rows in memory; what is more is mapped from files in
        `folder`, which is the table's own and is made when it is needed."""
        self.descriptor = descriptor
        self.field_types = list(field_types)
        self._column_of = column_of
        self._operator = operator
        self._bytes_max = bytes_max
        self._folder = folder
        self._files = 0
        fields = [pa.field(f"key_{position}", field) for position, field in enumerate(field_types)]
        self._schema = pa.schema([*fields, *(pa.field(field.name, field.type) for field in descriptor.schema)])
        self._columns = RowColumns(self._schema, len(fields))
        self._runs: list[Run] = []
        self._merges: list[Merge] = []
        self._head: list[Rows] = []
        self._head_rows = 0
        self._head_bytes = 0
        self._head_dropped: dict[int, int] = {}
        self._appended, self._asked = 0, 0  # of late, see RARELY_READ_ROWS
        self._next_order = 0
        self._counts: dict[int, int] = {}  # namespace -> rows that are alive
        self._first_orders: dict[int, int] = {}  # namespace -> order of its first row, dead ones included, since it was empty
        self._total = 0
        self._epoch: int | None = None  # from 1; None: changes are not noted
        self._marks: dict[int, tuple[int, int]] = {}
        self._removed: dict[int, int] = {}
        self._tombstones: list[Tombstones] = []
        self._tombstone_rows = 0
        self._stored_before = 0  # no checkpoint has an order from here on

    def name_keys(self, names: Sequence[str]) -> None:
        """What the key's fields are called in what is read from now on."""
        named = [pa.field(name, field.type) for name, field in zip(names, self._schema, strict=False)]
        self._columns = RowColumns(pa.schema([*named, *list(self._schema)[len(named) :]]), len(named))

    # ------------------------------------------------------------------------------------------------------------ changes

    def append(
        self,
        keys: KeyColumn,
        namespaces: Numbers | int,
        columns: Sequence[pa.Array],
        times: Numbers | None = None,
        orders: Numbers | None = None,
    ) -> Numbers:
        count = len(keys)
        if not count:
            return np.empty(0, np.int64)
        batch = pa.RecordBatch.from_arrays([*keys.arrays, *self._checked(columns, count)], schema=self._schema)
        orders = self._orders(orders, count)
        if isinstance(namespaces, int):
            numbers = np.full(count, namespaces, np.int64)
        else:
            numbers = self._whole(namespaces, count, "namespaces")
        stamps = np.full(count, NO_TIME) if times is None else self._whole(times, count, "times")
        self._next_order = int(orders[-1]) + 1
        self._count(numbers, orders)
        self._head.append(Rows(key_codes(keys), orders, numbers, stamps, batch))
        self._head_rows += count
        self._head_bytes += batch.nbytes
        self._note_use(appended=count)
        if self._head_rows >= HEAD_ROWS_MAX or self._head_bytes >= HEAD_BYTES_MAX:
            self._seal()
        self._work(_WORK_PER_ROW * count * len(self._merges))
        return orders

    def _orders(self, orders: Numbers | None, count: int) -> Numbers:
        if orders is None:
            return np.arange(self._next_order, self._next_order + count)
        orders = self._whole(orders, count, "orders")
        if orders[0] < self._next_order or not bool((orders[1:] > orders[:-1]).all()):
            raise InvariantError(f"orders of rows ascend, and begin at {self._next_order}: they can't be {orders[:3]} ...")
        return orders

    def drop(self, namespace: int) -> None:
        if namespace in self._counts:
            self._drop([namespace])

    def drop_until(self, namespace: int) -> None:
        gone = sorted(each for each in self._counts if each <= namespace)
        if not gone:
            return
        ahead = [rows for rows in self._head if int(rows.namespaces.max()) > namespace]
        if len(ahead) < len(self._head):  # what has come and gone is never sorted
            self._head = ahead
            self._head_rows, self._head_bytes = sum(map(len, ahead)), sum(rows.batch.nbytes for rows in ahead)
        self._drop(gone)

    def _drop(self, namespaces: list[int]) -> None:
        """Namespaces that hold rows, ascending."""
        for namespace in namespaces:
            self._total -= self._counts.pop(namespace)
            if self._first_orders.pop(namespace) < self._stored_before and self._epoch is not None:
                self._removed[namespace] = self._epoch
        if self._head:
            self._head_dropped.update(dict.fromkeys(namespaces, self._next_order))
        for run in self._runs:
            run.drop(namespaces)
        if len(self._removed) > REMOVED_MAX:
            self._forget_changes()
        self._plan()

    def delete(self, rows: RowMatches) -> int:
        if not isinstance(rows, Matches):
            raise InvariantError(f"{type(rows).__name__}: rows of a row table are deleted as it gave them")
        deleted = 0
        for run, where in rows.by_run():
            positions = np.unique(rows.positions[where])
            if run.is_current:
                deleted += self._delete(run, positions)
                continue
            codes, orders = run.codes[positions], run.orders[positions]
            for other in self._runs:
                found, _ = places_of(other.codes, other.orders, codes, orders)
                deleted += self._delete(other, np.unique(found))
        if deleted:
            self._plan()
            self._work(_WORK_PER_ROW * deleted * len(self._merges))
        return deleted

    def _delete(self, run: Run, positions: Positions) -> int:
        dead = run.dead_among(positions)
        if dead is not None:
            positions = positions[~dead]
        if not len(positions):
            return 0
        for namespace, count in zip(*map(np.ndarray.tolist, namespaces_of(run.namespaces[positions])), strict=True):
            left = self._counts[namespace] - count
            if left:
                self._counts[namespace] = left
            else:
                del self._counts[namespace], self._first_orders[namespace]
        self._total -= len(positions)
        self._note_deleted(run, positions)
        run.mark_dead(positions)
        if run.merge is not None:
            run.merge.delete(run, positions)
        return len(positions)

    # -------------------------------------------------------------------------------------------------------------- reads

    def count(self, namespace: int | None = None) -> int:
        return self._total if namespace is None else self._counts.get(namespace, 0)

    def namespaces(self) -> list[int]:
        return sorted(self._counts)

    def rows_of(
        self,
        keys: KeyColumn,
        namespaces: Numbers | int | None = None,
        times: tuple[Numbers | int, Numbers | int] | None = None,
    ) -> Matches:
        self._note_use(asked=len(keys))
        self._seal()
        return matches_in(self._runs, keys, MatchFilter(namespaces, times), self._columns)

    def probe(self, keys: KeyColumn, times: tuple[Numbers | int, Numbers | int], after: Numbers | None = None) -> Probe:
        self._note_use(asked=len(keys))
        self._seal()
        return Probe(list(self._runs), keys, MatchFilter(None, times), after, self._columns)

    def until(self, moment: int, rows_max: int, after: int = NO_TIME) -> Matches:
        if not self.descriptor.by_time:
            raise InvariantError(f"state {self.descriptor.name!r}: its rows are not asked for by time")
        self._seal()
        found = [(number, run.until(moment, rows_max, after)) for number, run in enumerate(self._runs)]
        origins = np.repeat([number for number, _ in found], [len(rows) for _, rows in found]).astype(np.int64)
        positions = np.concatenate([np.empty(0, np.int64), *(rows for _, rows in found)])
        rows = Matches(list(self._runs), origins, positions, positions, self._columns)
        rows = rows.select(np.argsort(rows.times, kind="stable")[:rows_max])
        return Matches(rows.runs, rows.origins, rows.positions, np.arange(len(rows)), self._columns)

    def counterparts(self, rows: RowMatches) -> Matches:
        if not isinstance(rows, Matches):
            raise InvariantError(f"{type(rows).__name__}: rows are compared with those of a row table")
        self._note_use(asked=len(rows))
        self._seal()
        codes, orders = rows.codes, rows.orders
        found: list[tuple[Positions, Positions]] = []
        for run in self._runs:
            positions, is_there = places_of(run.codes, run.orders, codes, orders)
            queries = np.flatnonzero(is_there)
            dead = run.dead_among(positions)
            found.append((positions, queries) if dead is None else (positions[~dead], queries[~dead]))
        origins = np.repeat(np.arange(len(found)), [len(queries) for _, queries in found])
        positions = np.concatenate([np.empty(0, np.int64), *(positions for positions, _ in found)])
        queries = np.concatenate([np.empty(0, np.int64), *(queries for _, queries in found)])
        order = np.argsort(queries, kind="stable")
        return Matches(list(self._runs), origins[order], positions[order], queries[order], self._columns)

    def scan(
        self, namespace: int | None = None, times: tuple[int, int] | None = None, *, splits_keys: bool = False
    ) -> Scan:
        return Scan(self._sealed, namespace, self._columns, self._column_of, times, splits_keys=splits_keys)

    def _note_use(self, *, appended: int = 0, asked: int = 0) -> None:
        self._appended += appended
        self._asked += asked
        if self._appended + self._asked > _RECENT_MAX:
            self._appended, self._asked = self._appended // 2, self._asked // 2

    def _sealed(self) -> Sequence[Run]:
        self._seal()
        return self._runs

    @property
    def run_count(self) -> int:
        """Runs, for tests and metrics."""
        return len(self._runs)

    @property
    def is_mapped(self) -> bool:
        """Whether some run is mapped from a file."""
        return any(run.is_mapped for run in self._runs)

    def size(self) -> int:
        """Bytes in memory, estimated."""
        return self._head_bytes + sum(run.nbytes for run in self._runs)

    # -------------------------------------------------------------------------------------------------------- maintenance

    @property
    def has_work(self) -> bool:
        return bool(self._merges)

    def work(self) -> bool:
        """A few milliseconds of merging. Whether there is more."""
        self._work(_IDLE_ROWS)
        return bool(self._merges)

    def dispose(self) -> None:
        """Delete the files. Idempotent."""
        for merge in self._merges:
            merge.abandon()
        for run in self._runs:
            run.discard()
        self._merges, self._runs, self._head = [], [], []

    def _seal(self) -> None:
        """The head becomes a run."""
        if not self._head:
            return
        living = head_alive(self._head, self._head_dropped)
        rows = [piece if alive is None else piece.take(alive) for piece, alive in zip(self._head, living, strict=True)]
        self._head, self._head_rows, self._head_bytes, self._head_dropped = [], 0, 0, {}
        run = sorted_run(rows, self._schema, len(self.field_types), by_time=self.descriptor.by_time)
        if run is not None:
            self._runs.append(run)
        self._plan()

    def _plan(self) -> None:
        """Begin the merges that are due, and forget runs without a row. O(runs)."""
        for run in self._runs:
            if run.merge is None and run.is_all_dead:
                run.discard()
        self._runs = [run for run in self._runs if run.is_current]
        while runs := self._due():
            is_large = sum(run.nbytes for run in runs) >= self._bytes_max // _SMALL_SHARE
            is_mapped = any(run.is_mapped for run in runs) or (is_large and self.size() > self._bytes_max)
            path = self._path() if is_mapped else None
            self._merges.append(self._guarded(partial(Merge, runs, len(self.field_types), path, by_time=self.descriptor.by_time)))

    def _due(self) -> list[Run]:
        """Neighbours that are to be merged next; empty: none."""
        free: list[Run] = []
        for run in reversed(self._runs):
            if run.merge is not None:
                break
            free.append(run)
        is_rarely_read = self._appended > RARELY_READ_ROWS * self._asked
        per_tier = 2 * RUNS_PER_TIER if is_rarely_read else RUNS_PER_TIER
        found = _full_tier([_tier(run, per_tier) for run in free], per_tier)
        if found:
            return free[:found][::-1]
        mostly_dead = next((run for run in self._runs if run.merge is None and run.is_mostly_dead), None)
        if mostly_dead is not None:
            return [mostly_dead]
        if self.size() > self._bytes_max and not any(merge.is_mapped for merge in self._merges):
            candidates = [run for run in self._runs if run.merge is None and run.nbytes >= self._bytes_max // _SMALL_SHARE]
            return [max(candidates, key=lambda run: run.nbytes)] if candidates else []
        return []

    def _work(self, rows: int) -> None:
        while rows > 0 and self._merges:
            merge = min(self._merges, key=lambda merge: merge.rows)
            rows -= self._guarded(merge.step)
            if merge.is_done:
                self._finish(merge)

    def _finish(self, merge: Merge) -> None:
        self._merges.remove(merge)
        run = self._guarded(merge.finish)
        at = self._runs.index(merge.runs[0])
        self._runs[at : at + len(merge.runs)] = [] if run is None else [run]
        for old in merge.runs:
            old.discard()
        self._plan()

    def _path(self) -> str:
        self._files += 1
        return os.path.join(self._folder, f"run-{self._files}")

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Raises StorageUnavailableError for what the system refuses: the disk is full."""
        try:
            return call()
        except (OSError, MemoryError) as error:
            doing = f"operator {self._operator!r}: state {self.descriptor.name!r}: {self._folder}"
            if (refused := refusal(error, doing, path=self._folder, operator=self._operator)) is not None:
                raise refused from error
            raise

    # --------------------------------------------------------------------------------------------------------- snapshots

    def freeze(self) -> FrozenRows:
        """O(runs): the rows as they are now, for another thread."""
        return FrozenRows(self._runs, self._head, self._head_dropped)

    def track_since(self, base: int) -> None:
        """Note changes from now on: the rows are those of the checkpoint `base`."""
        self._forget_changes()
        self._epoch, self._marks = 1, {base: (0, self._next_order)}
        self._stored_before = self._next_order

    def checkpoint_started(self, barrier: int, base: int) -> RowChanges:
        """Right after `freeze`: what is known of changes before this barrier; the first call begins to note them.

        No base below `base` will ever be asked for. O(barriers and namespaces since the base)."""
        if self._epoch is None:
            self.track_since(barrier)
            return RowChanges({}, {}, ())
        self._marks = {known: mark for known, mark in self._marks.items() if known >= base}
        oldest = min((epoch for epoch, _ in self._marks.values()), default=self._epoch)
        self._removed = {namespace: epoch for namespace, epoch in self._removed.items() if epoch > oldest}
        self._tombstones = [each for each in self._tombstones if each.epoch > oldest]
        self._tombstone_rows = sum(len(each.codes) for each in self._tombstones)
        changes = RowChanges(dict(self._marks), dict(self._removed), tuple(self._tombstones))
        self._marks[barrier] = (self._epoch, self._next_order)
        self._stored_before = self._next_order
        self._epoch += 1
        return changes

    def _note_deleted(self, run: Run, positions: Positions) -> None:
        """Rows that some checkpoint may have: what came after the last barrier is in none."""
        if self._epoch is None:
            return
        if run.order_max >= self._stored_before:
            positions = positions[run.orders[positions] < self._stored_before]
        if not len(positions):
            return
        rows = Matches.of_run(run, positions, self._columns)
        self._tombstones.append(Tombstones(self._epoch, rows.codes, rows.orders, rows.namespaces, rows.keys()))
        self._tombstone_rows += len(positions)
        if self._tombstone_rows > max(TOMBSTONES_MIN, self._total // 2):
            self._forget_changes()

    def _forget_changes(self) -> None:
        """No base is known any more, so that the next snapshot is full."""
        self._marks, self._removed, self._tombstones, self._tombstone_rows = {}, {}, [], 0

    # ---------------------------------------------------------------------------------------------------------- restoring

    def load(self, base: Rows, deltas: Sequence[tuple[Rows, Mask, Sequence[int]]] = ()) -> None:
        """Add the rows of a snapshot's table and of the delta runs upon it: (rows, which are tombstones, namespaces replaced).

        May be called for several tables, whose key groups are disjoint. Raises CorruptStateError."""
        runs = [run] if (run := self._loaded_run(base)) is not None else []
        for rows, tombstones, replaced in deltas:
            for run in runs:
                run.drop(sorted(replaced))
                gone = np.flatnonzero(tombstones)
                positions, _ = places_of(run.codes, run.orders, rows.codes[gone], rows.orders[gone])
                dead = run.dead_among(positions)
                positions = np.unique(positions if dead is None else positions[~dead])
                if len(positions):
                    run.mark_dead(positions)
            added = self._loaded_run(rows.take(np.flatnonzero(~tombstones)))
            runs += [] if added is None else [added]
        for run in runs:
            alive = run.alive_at(len(run.log), len(run.dropped))
            picked = slice(None) if alive is None else alive
            self._count(run.namespaces[picked], run.orders[picked])
            self._next_order = max(self._next_order, run.order_max + 1)
        self._runs += runs
        self._plan()

    def _loaded_run(self, rows: Rows) -> Run | None:
        if not len(rows):
            return None
        in_order = np.argsort(rows.orders, kind="stable")
        run = sorted_run([rows.take(in_order)], self._schema, len(self.field_types), by_time=self.descriptor.by_time)
        if run is not None and bool(((run.codes[1:] == run.codes[:-1]) & (run.orders[1:] == run.orders[:-1])).any()):
            raise CorruptStateError("two rows of a key have one order", reason="table")
        return run

    def rows_from(self, keys: KeyColumn, orders: Numbers, namespaces: Numbers, times: Numbers, columns: list[pa.Array]) -> Rows:
        """What `load` takes, of a table's columns in the declared types."""
        batch = pa.RecordBatch.from_arrays([*keys.arrays, *columns], schema=self._schema)
        return Rows(key_codes(keys), orders, namespaces, times, batch)

    # ------------------------------------------------------------------------------------------------------------- checks

    def _count(self, namespaces: Numbers, orders: Numbers) -> None:
        if not len(namespaces):
            return
        if bool((namespaces[1:] < namespaces[:-1]).any()):
            order = np.argsort(namespaces, kind="stable")
            namespaces, orders = namespaces[order], orders[order]
        starts = np.flatnonzero(np.concatenate(([True], namespaces[1:] != namespaces[:-1])))
        counts, firsts = np.diff(starts, append=len(namespaces)), np.minimum.reduceat(orders, starts)
        for namespace, count, first in zip(namespaces[starts].tolist(), counts.tolist(), firsts.tolist(), strict=True):
            self._counts[namespace] = self._counts.get(namespace, 0) + count
            self._first_orders[namespace] = min(first, self._first_orders.get(namespace, first))
        self._total += len(namespaces)

    def _checked(self, columns: Sequence[pa.Array], count: int) -> list[pa.Array]:
        schema = self.descriptor.schema
        if len(columns) != len(schema):
            raise self._refused(f"{len(columns)} columns were given, and {len(schema)} are declared")
        for column, field in zip(columns, schema, strict=True):
            if column.type != field.type:
                raise self._refused(f"column {field.name!r} is {column.type}, and {field.type} is declared", str(field.type))
            if len(column) != count:
                raise InvariantError(f"column {field.name!r} has {len(column)} rows for {count} keys")
        return [column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column for column in columns]

    def _refused(self, reason: str, declared: str | None = None) -> StateValueError:
        message = f"operator {self._operator!r}: state {self.descriptor.name!r}: {reason}"
        return StateValueError(message, type=declared, operator=self._operator, state=self.descriptor.name)

    def _whole(self, numbers: npt.NDArray[Any], count: int, what: str) -> Numbers:
        if len(numbers) != count or numbers.dtype != np.int64:
            raise InvariantError(f"{len(numbers)} {what} of {numbers.dtype} for {count} keys")
        return numbers


def check_row_table(descriptor: RowTableStateDescriptor) -> None:
    """Raises InvalidConfigError for columns that can't be told apart, or whose rows no snapshot could keep."""
    names = descriptor.schema.names if isinstance(descriptor.schema, pa.Schema) else None
    if names is None:
        raise InvalidConfigError(f"state {descriptor.name!r}: its schema is no pyarrow.Schema", state=descriptor.name)
    for name in names:
        if not name or names.count(name) > 1:
            raise InvalidConfigError(f"state {descriptor.name!r}: column {name!r} is empty or there twice", state=descriptor.name)
    if (column := unreadable_column(descriptor.schema)) is not None:
        raise InvalidConfigError(
            f"state {descriptor.name!r}: column {column.name!r} is {column.type}, which a row table can't keep: cast it",
            state=descriptor.name,
            column=column.name,
        )


def sorted_run(pieces: Sequence[Rows], schema: pa.Schema, key_fields: int, *, by_time: bool = False) -> Run | None:
    """Rows, whose orders ascend, as a run; None if there are none. `by_time`: it is asked for rows by time."""
    codes: Codes = np.concatenate([piece.codes for piece in pieces])
    if not len(codes):
        return None
    order = stable_order(codes)
    taken = pa.array(order)
    table = pa.Table.from_batches([piece.batch for piece in pieces], schema).combine_chunks().take(taken)
    orders, namespaces, times = (
        np.concatenate([getattr(piece, name) for piece in pieces])[order] for name in ("orders", "namespaces", "times")
    )
    numbers, blocks = (codes[order], orders, namespaces, times), table.to_batches()
    time_order = TimeOrder(times, np.empty(len(times), np.uint16)) if by_time else None
    return Run(numbers, blocks, RunContents.of(numbers, blocks, key_fields), by_time=time_order)


def _tier(run: Run, per_tier: int) -> int:
    tier, rows = 0, len(run) // _TIER_ROWS
    while rows >= per_tier:
        tier, rows = tier + 1, rows // per_tier
    return tier


def _full_tier(tiers: Sequence[int], per_tier: int) -> int:
    """How many of the newest runs are to be merged: up to the last of a tier that is full, and nothing larger; 0: none is."""
    for tier in sorted(set(tiers), reverse=True):
        reach = next((at for at, other in enumerate(tiers) if other > tier), len(tiers))
        if tiers[:reach].count(tier) >= per_tier:
            return reach
    return 0
