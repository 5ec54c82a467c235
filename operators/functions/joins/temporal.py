"""Temporal joins: each record of the left side with the version of its key that was valid at its event time.

The right side's records are versions: each holds from its event time on, until the next one of its key. A left record waits until
the watermark has passed its time, since a version with an earlier time may come until then. Both sides are row tables. What was
emitted has left the state, so that a barrier may cut between two slices, and the snapshot keeps the watermark: what has fired stays
fired. Source: Flink, TemporalRowTimeJoinOperator; what differs is in ADR 66."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.functions.joins.output import JoinOutput, JoinSide, On, Suffixes, join_output, join_sides
from holdfast.operators.functions.joins.sides import Mask, Positions, StoredSide, check_kept_columns, rows_between
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.windows.firing import FiringOperator
from holdfast.operators.functions.windows.kept_watermark import WATERMARKS
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.row_tables.key_codes import distinct_keys as numbers_of
from holdfast.statebackends.state import KeyColumn, RowMatches, RowTable, StateDescriptor

ROWS_PER_SLICE_MAX = 8192
"""Left rows that are joined at once."""
VERSIONS_PER_SLICE_MAX = 1 << 15
"""Versions that are looked at at once: a key may have any number of them."""
_NAMESPACE = 0
_MIN_TIME = MIN_WATERMARK + 1


class TemporalJoinOperator(FiringOperator):
    """Left records, input 0, with versions, input 1."""

    def __init__(self, left: JoinSide, right: JoinSide, result: JoinOutput, *, keeps_unmatched: bool) -> None:
        self.left = StoredSide.of(left, "waiting", by_time=True)
        self.right = StoredSide.of(right, "versions", by_time=True)
        self.result = result
        self.keeps_unmatched = keeps_unmatched
        self.rows_per_slice_max = ROWS_PER_SLICE_MAX
        self.versions_per_slice_max = VERSIONS_PER_SLICE_MAX

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (self.left.table, self.right.table, WATERMARKS)

    def open(self) -> None:
        self._waiting: RowTable = self.left.opened(self.context)
        self._versions: RowTable = self.right.opened(self.context)
        self._earliest_waiting = MIN_WATERMARK if self._waiting.count() else MAX_WATERMARK
        """No left row waits for an earlier watermark."""
        self._next_version = MIN_WATERMARK if self._versions.count() else MAX_WATERMARK
        """No version before it takes the place of another one that is still kept."""

    # ------------------------------------------------------------------------------------------------------------ records

    def _take(self, batch: Batch, stamps: Positions, input_index: int) -> None:
        if input_index == 0:
            self._wait(batch, stamps)
        else:
            self._take_versions(batch, stamps)

    def _wait(self, batch: Batch, stamps: Positions) -> None:
        late = stamps <= self._reached.current
        if late.any():
            self._reached.count_late(self.context, stamps[late])
            batch, stamps = batch.filter(~late), stamps[~late]
        keyless = self.left.side.selector.without_key(batch)
        if keyless is not None:
            self._emit_keyless(batch.filter(keyless))
            batch, stamps = batch.filter(~keyless), stamps[~keyless]
        if batch.num_rows:
            self.left.append(self._waiting, batch, _NAMESPACE, self.context)
            self._earliest_waiting = min(self._earliest_waiting, int(stamps.min()))

    def _emit_keyless(self, batch: Batch) -> None:
        """A null is equal to nothing: no version can follow."""
        if self.keeps_unmatched and batch.timestamps is not None:
            columns, left = batch.columns(), self.left.side
            self.output.collect(self.result.batch(left.key_values(columns), left.values(columns), None, batch.timestamps))

    def _take_versions(self, batch: Batch, stamps: Positions) -> None:
        keyless = self.right.side.selector.without_key(batch)
        if keyless is not None:
            batch, stamps = batch.filter(~keyless), stamps[~keyless]
        late = stamps <= self._reached.kept
        if late.any():
            self._take_late_versions(batch.filter(late), stamps[late])
            batch, stamps = batch.filter(~late), stamps[~late]
        if batch.num_rows:
            self.right.append(self._versions, batch, _NAMESPACE, self.context)
            self._next_version = min(self._next_version, int(stamps.min()))

    def _take_late_versions(self, late: Batch, stamps: Positions) -> None:
        """One that nothing has taken the place of holds for the left records behind the watermark; no left record can need the
        others. One by one, as if each came in a batch of its own."""
        keys, passed = self.right.keys(late, self.context), self._reached.kept
        _, first, numbers = np.unique(numbers_of(keys), return_index=True, return_inverse=True)
        distinct = keys.take(first)
        known = self._versions.rows_of(distinct, times=(_MIN_TIME, passed))
        newest = np.full(len(first), MIN_WATERMARK)
        np.maximum.at(newest, known.queries, known.times)
        valid = np.zeros(len(stamps), np.bool_)
        for row, (key, stamp) in enumerate(zip(numbers.tolist(), stamps.tolist(), strict=True)):
            if stamp >= newest[key]:
                newest[key], valid[row] = stamp, True
        if not valid.all():
            self._reached.count_late(self.context, stamps[~valid])
        if valid.any():
            self.right.append(self._versions, late.filter(valid), _NAMESPACE, self.context)
            for _ in self._drop_superseded(distinct, passed):  # a few: the others are gone since the watermark passed them
                pass

    # ------------------------------------------------------------------------------------------------------------- firing

    def _fire_due(self) -> Iterator[None]:
        due = self._reached.current
        if self._earliest_waiting <= due:
            while len(rows := self._waiting.until(due, self.rows_per_slice_max)):
                yield from self._emit(rows)
                yield
            self._earliest_waiting = due + 1 if self._waiting.count() else MAX_WATERMARK
        yield from self._clean()

    def _emit(self, due: RowMatches) -> Iterator[None]:
        """A slice for so many versions of their keys; the last one lets them all out."""
        rows, keys, numbers = self.left.by_key(due, self.context)
        times = rows.times
        probe = self._versions.probe(keys, (_MIN_TIME, int(times.max())))
        valid = _Valid(len(rows))
        while (versions := probe.next(self.versions_per_slice_max)) is not None:
            valid.add(versions, *valid_at(numbers, times, versions))
            if probe.complete < len(keys):
                yield
        self._waiting.delete(due)
        found = valid.found
        right = valid.values(self.right, None if self.keeps_unmatched else found)
        if not self.keeps_unmatched and not found.all():
            rows, times = rows.select(found), times[found]
        if len(rows):
            self.output.collect(self.result.batch(rows.keys(), self.left.values(rows), right, times))

    # ----------------------------------------------------------------------------------------------------------- cleaning

    def _clean(self) -> Iterator[None]:
        """Of each key the version that is valid at the watermark stays, and those behind it.

        The maximum of a drain is no moment: a job that goes on may have records between it and the last one."""
        passed = self._reached.kept
        if self._next_version > passed:
            return
        since = max(_MIN_TIME, self._next_version)
        for rows in rows_between(self._versions, since, passed, self.rows_per_slice_max, splits_keys=True):
            _, keys, _ = self.right.by_key(rows, self.context)
            yield from self._drop_superseded(keys, passed)
        self._next_version = passed + 1

    def _drop_superseded(self, keys: KeyColumn, passed: int) -> Iterator[None]:
        """Versions of these keys that another one with a time up to `passed` has taken the place of: a slice for so many."""
        probe = self._versions.probe(keys, (_MIN_TIME, passed))
        last: tuple[int, int, RowMatches] | None = None
        """Key and time of the row that is left of the last key, and the row: more of its versions may come."""
        while (rows := probe.next(self.versions_per_slice_max)) is not None:
            if len(rows):
                last = self._drop_all_but_last(rows, last)
            yield

    def _drop_all_but_last(
        self, rows: RowMatches, before: tuple[int, int, RowMatches] | None
    ) -> tuple[int, int, RowMatches]:
        times, queries = rows.times, rows.queries
        order = np.lexsort((times, queries))  # stable: of equal times by arrival
        ordered = queries[order]
        old = np.zeros(len(order), np.bool_)
        np.equal(ordered[1:], ordered[:-1], out=old[:-1])
        key, moment = int(ordered[-1]), int(times[order[-1]])
        last = key, moment, rows.select(order[-1:])
        if before is not None and before[0] == int(ordered[0]):
            newest = int(np.searchsorted(ordered, before[0], side="right")) - 1
            if times[order[newest]] >= before[1]:
                self._versions.delete(before[2])
            else:
                old[newest] = True
                last = before if before[0] == key else last
        if old.any():
            self._versions.delete(rows.select(order[old]))
        return last


class _Valid:
    """Of each of some rows the version that is valid at its time, among those that were looked at. They come by key and arrival."""

    def __init__(self, count: int) -> None:
        self.found: Mask = np.zeros(count, np.bool_)
        self._times = np.full(count, MIN_WATERMARK)
        self._slices = np.zeros(count, np.int64)
        self._places = np.zeros(count, np.int64)
        self._versions: list[RowMatches] = []

    def add(self, versions: RowMatches, places: Positions, found: Mask) -> None:
        """Of each row the place of the version that is valid among these ones, and whether there is one."""
        rows = np.flatnonzero(found)
        times = versions.times[places[rows]]
        is_later = times >= self._times[rows]
        rows, times = rows[is_later], times[is_later]
        if not len(rows):
            return
        used, at = np.unique(places[rows], return_inverse=True)
        self.found[rows] = True
        self._times[rows], self._slices[rows], self._places[rows] = times, len(self._versions), at
        self._versions.append(versions.select(used))

    def values(self, side: StoredSide, wanted: Mask | None) -> list[pa.Array]:
        """The columns of the versions, of all rows, with nulls for those that have none, or of the wanted ones."""
        picked = np.arange(len(self.found)) if wanted is None else np.flatnonzero(wanted)
        starts = np.cumsum([0, *map(len, self._versions)])
        taken = pa.array(starts[self._slices[picked]] + self._places[picked], mask=~self.found[picked])
        pieces = [side.values(versions) for versions in self._versions]
        if len(pieces) == 1:
            return [column.take(taken) for column in pieces[0]]
        if not pieces:
            return [pa.nulls(len(picked), field.type) for field in side.table.schema]
        return [pa.concat_arrays(columns).take(taken) for columns in zip(*pieces, strict=True)]


def valid_at(keys: Positions, times: Positions, versions: RowMatches) -> tuple[Positions, Mask]:
    """Of each row: the place of the version of its key that is valid at its time, and whether there is one.

    `keys`: the query whose versions are those of the row. Of equal times the version that came later is valid."""
    if not len(versions):
        return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
    moments, ranks = np.unique(versions.times, return_inverse=True)
    width = len(moments) + 1
    numbers = versions.queries * width + ranks + 1
    order = np.argsort(numbers, kind="stable")
    wanted = keys * width + np.searchsorted(moments, times, side="right")
    before = np.searchsorted(numbers[order], wanted, side="right") - 1
    places = order[np.maximum(before, 0)]
    return places, (before >= 0) & (versions.queries[places] == keys)


def temporal_join(
    left: RowType, right: RowType, on: On, how: Any, suffixes: Suffixes | None, operator: str
) -> TemporalJoinOperator:
    """The operator of `stream.temporal_join(versions, on)`. Raises GraphError naming the operator."""
    if how not in ("inner", "left"):
        raise GraphError(
            f"operator {operator!r}: how is 'inner' or 'left', not {how!r}: a version waits for no record, so that there is no "
            "time at which it is without one",
            operator=operator,
        )
    sides = join_sides(on, left, right, operator)
    check_kept_columns(sides, operator)
    return TemporalJoinOperator(*sides, join_output(*sides, how, suffixes, operator), keeps_unmatched=how == "left")
