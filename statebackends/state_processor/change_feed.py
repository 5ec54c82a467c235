"""Change feed of one state between two snapshots: a typed row for each key that was added, removed or changed.

Rows are compared as in diff.py: parallelism, backend and format don't matter. Memory holds one key group of each side, or about a
million rows where max parallelism differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import VALUE
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState, states_of
from holdfast.statebackends.state_processor.diff import UNIT_ROWS_MAX, Change, DiffRows, RowUnit, Unit, entries_of, is_comparable
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import JSON
from holdfast.statebackends.state_processor.values import entry_json

CHANGE = "change"
BEFORE, AFTER = "before_", "after_"
"""Prefixes of the names of value columns."""
_FEED_ROWS = 1 << 15
_ENTRIES = pa.schema([pa.field(CHANGE, pa.utf8(), nullable=False), (VALUE, pa.binary()), (JSON, pa.utf8())])


@dataclass(frozen=True, slots=True)
class ChangeFeed:
    """Change feed of one state. Each call opens and reads the snapshots."""

    before: StoredSnapshot
    after: StoredSnapshot
    sides: tuple[StoredState | None, StoredState | None]

    @staticmethod
    def of(before: StoredSnapshot, after: StoredSnapshot, uid: str, name: str) -> ChangeFeed:
        """Feed of a state. Raises NotFoundError if neither snapshot has it; InvalidConfigError if kind or key type differ."""
        found = tuple(_state(snapshot, uid, name) for snapshot in (before, after))
        old, new = found
        if old is None and new is None:
            raise NotFoundError(f"neither snapshot has a state {name!r} of an operator {uid!r}", operator=uid, state=name)
        if old is not None and new is not None and (old.is_keyed or new.is_keyed) and not is_comparable(old, new):
            raise InvalidConfigError(
                f"operator {uid!r}, state {name!r}: {old.meta.kind} state by {old.meta.key_type} before, {new.meta.kind} state by "
                f"{new.meta.key_type} after: nothing of the one can be anything of the other",
                operator=uid,
                state=name,
            )
        return ChangeFeed(before, after, (old, new))

    @property
    def is_keyed(self) -> bool:
        return any(side is not None and side.is_keyed for side in self.sides)

    @property
    def max_parallelism(self) -> int | None:
        """Number of key groups by which the feed can be read in parts; None for operator state, or if the snapshots differ."""
        found = {side.operator.max_parallelism for side in self.sides if side is not None}
        return found.pop() if self.is_keyed and len(found) == 1 else None

    def schema(self) -> pa.Schema:
        """`change`, the identity columns, and each value column before and after. Raises CorruptStateError."""
        if not self.is_keyed:
            return _ENTRIES
        with self.before.reader() as left, self.after.reader() as right:
            return _schema(self._rows((left, right), None))

    def batches(self, key_groups: KeyGroupRange | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, or those of some key groups; in key-group order where both snapshots have the same max parallelism.

        Raises CorruptStateError, StorageUnavailableError; InvalidConfigError for `key_groups` without a common max parallelism."""
        if key_groups is not None and self.max_parallelism is None:
            raise InvalidConfigError("key groups of a feed: the two snapshots have none in common")
        with self.before.reader() as left, self.after.reader() as right:
            if not self.is_keyed:
                yield from _entry_batches(entries_of(left, self.sides[0]), entries_of(right, self.sides[1]))
                return
            sides = self._rows((left, right), key_groups)
            schema = _schema(sides)
            for old, new in _units(sides, by_key_group=self.max_parallelism is not None):
                yield from _unit_rows(old, new, sides, schema)

    def _rows(self, readers: tuple[PartReader, PartReader], key_groups: KeyGroupRange | None) -> _Sides:
        old, new = (
            None if state is None else DiffRows(reader, state, key_groups)
            for reader, state in zip(readers, self.sides, strict=True)
        )
        return old, new


_Sides: TypeAlias = tuple[DiffRows | None, DiffRows | None]


def _state(snapshot: StoredSnapshot, uid: str, name: str) -> StoredState | None:
    operator = next((each for each in snapshot.metadata.operators if each.uid == uid), None)
    return None if operator is None else states_of(operator).get(name)


def _schema(sides: _Sides) -> pa.Schema:
    """Schema of a keyed state's feed; a state in one snapshot only has its columns on both sides."""
    shown = sides[1] or sides[0]
    assert shown is not None
    fields = [pa.field(CHANGE, pa.utf8(), nullable=False), *(shown.schema.field(name) for name in shown.identity_columns)]
    for prefix, side in zip((BEFORE, AFTER), (sides[0] or shown, sides[1] or shown), strict=True):
        fields += [pa.field(f"{prefix}{name}", side.value_type(name)) for name in side.value_columns]
    return pa.schema(fields)


def _units(sides: _Sides, *, by_key_group: bool) -> Iterator[tuple[RowUnit | None, RowUnit | None]]:
    count = None if by_key_group else 1 + max(side.count() for side in sides if side is not None) // UNIT_ROWS_MAX
    left, right = (iter(()) if side is None else side.row_units(count) for side in sides)
    old, new = next(left, None), next(right, None)
    while old is not None or new is not None:
        number = min(unit.number for unit in (old, new) if unit is not None)
        before = old if old is not None and old.number == number else None
        after = new if new is not None and new.number == number else None
        yield before, after
        old = next(left, None) if before is not None else old
        new = next(right, None) if after is not None else new


def _unit_rows(old: RowUnit | None, new: RowUnit | None, sides: _Sides, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    before: Unit = {} if old is None else old.unit
    after: Unit = {} if new is None else new.unit
    removed = [each for each in before if each not in after]
    added = [each for each in after if each not in before]
    changed = [each for each, value in before.items() if each in after and after[each] != value]
    for change, found in ((Change.REMOVED, removed), (Change.ADDED, added), (Change.CHANGED, changed)):
        found.sort()
        for start in range(0, len(found), _FEED_ROWS):
            some = found[start : start + _FEED_ROWS]
            shown = old if change is Change.REMOVED else new
            assert shown is not None
            columns = [pa.array([change.value] * len(some), pa.utf8()), *shown.identities(some)]
            for unit, side, is_there in (
                (old, sides[0] or sides[1], change is not Change.ADDED),
                (new, sides[1] or sides[0], change is not Change.REMOVED),
            ):
                assert side is not None
                if is_there:
                    assert unit is not None
                    columns += unit.values(some)
                else:
                    columns += [pa.nulls(len(some), side.value_type(name)) for name in side.value_columns]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _entry_batches(old: Counter[bytes], new: Counter[bytes]) -> Iterator[pa.RecordBatch]:
    """Feed of operator state, which is a bag of entries."""
    for change, found in ((Change.REMOVED, old - new), (Change.ADDED, new - old)):
        entries = sorted(found.elements())
        for start in range(0, len(entries), _FEED_ROWS):
            some = entries[start : start + _FEED_ROWS]
            columns = [[change.value] * len(some), some, [entry_json(entry) for entry in some]]
            arrays = [pa.array(values, field.type) for values, field in zip(columns, _ENTRIES, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=_ENTRIES)
