"""What changed between two snapshots: keys added, removed and changed, for each operator and state.

Parallelism, backend and format don't matter: keys compare by their canonical bytes, values by their encoding, operator state
as a bag of entries. Memory is one key group of both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

import msgspec

from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.state import Redistribution
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState, states_of
from holdfast.statebackends.state_processor.diffrows import UNIT_ROWS_MAX, DiffRows, Identity, Unit
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import fetched_lists
from holdfast.statebackends.state_processor.values import plain_entry


class Change(StrEnum):
    """What became of one key."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """One key that differs; for operator state one entry."""

    change: Change
    key: Any
    """None for operator state."""
    namespace: Any
    entry: Any
    """Key of a map's entry, or time of a timer; else None."""
    before: Any
    """Plain value; None if there was none."""
    after: Any


@dataclass(frozen=True, slots=True)
class StateDiff:
    """One state of one operator. Rows are counted: keys, entries of a map, timers, entries of operator state."""

    operator: str
    state: str
    before: StateMeta | None
    """None: the state is only in the second snapshot."""
    after: StateMeta | None
    added: int
    removed: int
    changed: int
    same: int
    keys: tuple[KeyDifference, ...]
    """The first ones, in the order of key groups and keys."""

    @property
    def is_same(self) -> bool:
        return self.before == self.after and not (self.added or self.removed or self.changed)


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """Two snapshots compared."""

    states: tuple[StateDiff, ...]
    operators_added: tuple[str, ...]
    operators_removed: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        return not self.operators_added and not self.operators_removed and all(state.is_same for state in self.states)


def diff_snapshots(
    before: StoredSnapshot, after: StoredSnapshot, uid: str | None = None, name: str | None = None, *, keys_max: int = 0
) -> SnapshotDiff:
    """Compare all states, those of one operator, or one. `keys_max`: differing keys to keep of each state.

    Raises CorruptStateError; NotFoundError if neither snapshot has the operator or state."""
    sides = before, after
    operators = [{operator.uid: operator for operator in side.metadata.operators} for side in sides]
    uids = [each for each in dict.fromkeys((*operators[0], *operators[1])) if uid in (None, each)]
    if uid is not None and not uids:
        raise NotFoundError(f"neither snapshot has an operator {uid!r}", operator=uid)
    found: list[StateDiff] = []
    for each in uids:
        states = [states_of(side[each]) if each in side else {} for side in operators]
        names = [state for state in sorted({*states[0], *states[1]}) if name in (None, state)]
        if name is not None and not names:
            raise NotFoundError(f"operator {each!r} has no state {name!r} in either snapshot", operator=each, state=name)
        with before.reader() as left, after.reader() as right:
            found += [_diff_state(left, right, states[0].get(state), states[1].get(state), keys_max) for state in names]
    return SnapshotDiff(
        tuple(found),
        tuple(each for each in uids if each not in operators[0]),
        tuple(each for each in uids if each not in operators[1]),
    )


def _diff_state(
    left: PartReader, right: PartReader, before: StoredState | None, after: StoredState | None, keys_max: int
) -> StateDiff:
    shown = before or after
    assert shown is not None
    tally = _Tally(keys_max)
    if not shown.is_keyed and (before is None or after is None or not after.is_keyed):
        _compare_entries(entries_of(left, before), entries_of(right, after), tally)
    elif before is not None and after is not None and is_comparable(before, after):
        _compare_rows(DiffRows(left, before), DiffRows(right, after), tally, by_key_group=_has_same_groups(before, after))
    else:  # nothing of the one can be anything of the other
        tally.removed += _count(left, before)
        tally.added += _count(right, after)
    return StateDiff(
        operator=shown.operator.uid,
        state=shown.meta.name,
        before=None if before is None else before.meta,
        after=None if after is None else after.meta,
        added=tally.added,
        removed=tally.removed,
        changed=tally.changed,
        same=tally.same,
        keys=tuple(tally.keys),
    )


def is_comparable(before: StoredState, after: StoredState) -> bool:
    """Whether a row of the one can be one of the other."""
    return (before.meta.kind, before.meta.key_type) == (after.meta.kind, after.meta.key_type)


def _has_same_groups(before: StoredState, after: StoredState) -> bool:
    return before.operator.max_parallelism == after.operator.max_parallelism


class _Tally:
    """Counts, and the first keys that differ."""

    def __init__(self, keys_max: int) -> None:
        self.added = self.removed = self.changed = self.same = 0
        self.keys: list[KeyDifference] = []
        self._keys_max = keys_max

    @property
    def wanted(self) -> int:
        return self._keys_max - len(self.keys)


# ------------------------------------------------------------------------------------------------------------ keyed state


def _compare_rows(before: DiffRows, after: DiffRows, tally: _Tally, *, by_key_group: bool) -> None:
    if by_key_group:
        units = _merged(before.by_key_group(), after.by_key_group())
    else:
        count = 1 + max(before.count(), after.count()) // UNIT_ROWS_MAX
        units = _merged(before.by_hash(count), after.by_hash(count))
    for old, new in units:
        _compare_units(old, new, before, after, tally)


def _merged(before: Iterator[tuple[int, Unit]], after: Iterator[tuple[int, Unit]]) -> Iterator[tuple[Unit, Unit]]:
    """Units of the same number side by side; both streams are ascending."""
    left, right = next(before, None), next(after, None)
    while left is not None or right is not None:
        number = min(each[0] for each in (left, right) if each is not None)
        old: Unit = {}
        new: Unit = {}
        if left is not None and left[0] == number:
            old, left = left[1], None
        if right is not None and right[0] == number:
            new, right = right[1], None
        yield old, new
        left, right = left or next(before, None), right or next(after, None)


def _compare_units(old: Unit, new: Unit, before: DiffRows, after: DiffRows, tally: _Tally) -> None:
    if old == new:
        tally.same += len(old)
        return
    removed = [each for each in old if each not in new]
    added = [each for each in new if each not in old]
    changed = [each for each, value in old.items() if each in new and new[each] != value]
    tally.removed += len(removed)
    tally.added += len(added)
    tally.changed += len(changed)
    tally.same += len(old) - len(removed) - len(changed)
    if tally.wanted <= 0 or not (removed or added or changed):
        return
    changes = [(each, Change.REMOVED) for each in removed]
    changes += [(each, Change.ADDED) for each in added] + [(each, Change.CHANGED) for each in changed]
    for identity, change in sorted(changes)[: tally.wanted]:
        key, entry = (before if identity in old else after).shown(identity)
        values = _shown(old, identity), _shown(new, identity)
        tally.keys.append(KeyDifference(change, key, identity[1], entry, *values))


def _shown(unit: Unit, identity: Identity) -> Any:
    encoded = unit.get(identity)
    return msgspec.msgpack.decode(encoded) if encoded else None


def _count(reader: PartReader, state: StoredState | None) -> int:
    if state is None:
        return 0
    return DiffRows(reader, state).count() if state.is_keyed else state.entries


# --------------------------------------------------------------------------------------------------------- operator state


def entries_of(reader: PartReader, state: StoredState | None) -> Counter[bytes]:
    """The entries of all subtasks; of a broadcast state, whose subtasks hold copies, those of the fullest copy of each entry."""
    found: Counter[bytes] = Counter()
    if state is None:
        return found
    is_copied = state.meta.kind == Redistribution.BROADCAST.kind
    for _, listed in fetched_lists(reader, state):
        entries = Counter(listed)
        found = found | entries if is_copied else found + entries
    return found


def _compare_entries(old: Counter[bytes], new: Counter[bytes], tally: _Tally) -> None:
    removed, added = old - new, new - old
    tally.removed += removed.total()
    tally.added += added.total()
    tally.same += (old & new).total()
    for change, entries in ((Change.REMOVED, removed), (Change.ADDED, added)):
        for entry in islice(_sorted(entries), max(tally.wanted, 0)):
            value = plain_entry(entry)
            values = (value, None) if change is Change.REMOVED else (None, value)
            tally.keys.append(KeyDifference(change, None, None, None, *values))


def _sorted(entries: Counter[bytes]) -> Sequence[bytes]:
    return sorted(entries.elements())
