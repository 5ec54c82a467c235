"""Difference of two snapshots: keys added, removed and changed, for each operator and state.

Parallelism, backend and format don't matter: keys compare by their canonical bytes, values by their encoding, operator state as a
bag of entries. Keyed rows are compared a unit at a time, and a key is in the same unit on both sides. With equal max parallelism a
unit is a key group; otherwise it is a share of the keys by another hash, and the state is read once for each unit. One unit of each
side is in memory. Rows come from rows.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from holdfast.statebackends.errors import CorruptStateError, InvalidKeyError, NotFoundError
from holdfast.statebackends.handles import KeyGroupRange, StateMeta
from holdfast.statebackends.layout import KEY_GROUP, MAP_KEY, NAMESPACE, POSITION
from holdfast.statebackends.serialization.keys import key_columns
from holdfast.statebackends.snapshot.deltas import own_keys_of
from holdfast.statebackends.snapshot.in_flight import EdgeName
from holdfast.statebackends.state import Redistribution
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState, states_of
from holdfast.statebackends.state_processor.flights import StoredFlight, flight_rows, flights_of
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import fetched_lists, state_batches, state_schema
from holdfast.statebackends.state_processor.values import Comparer, named, plain_entry, python_values, stored_serializer

UNIT_ROWS_MAX = 1 << 20
"""Rows of a unit that isn't a key group."""


Identity: TypeAlias = tuple[bytes, Any, Any]
"""Identity of a row, ordered as keys: (canonical key; namespace, bytes or int; encoded key of a map's entry, time of a timer, or
b""). A plain tuple, since each row has one."""

Unit = dict[Identity, bytes]
"""Identity -> encoded value; the elements of a list are one value."""


class DiffRows:
    """One side of a comparison of keyed state."""

    def __init__(self, reader: PartReader, state: StoredState, key_groups: KeyGroupRange | None = None) -> None:
        """`key_groups`: those to compare; None: all. Raises CorruptStateError."""
        self._reader, self._state, self._key_groups = reader, state, key_groups
        self._key_type = state.key_type()
        self._schema = state_schema(reader, state)
        self._comparer = Comparer(state.meta)
        serializer = stored_serializer(state)
        self._serializer = serializer
        self._map_key = None if serializer is None else serializer.map_key
        self.is_list = state.meta.kind == "list"
        taken = {KEY_GROUP, NAMESPACE, MAP_KEY, POSITION, *key_columns(self._key_type)}
        self._own_key = next(iter(own_keys_of(state.meta.kind)), None)
        if self._own_key is not None:
            taken.add(self._own_key)
        self._value_columns = [name for name in self._schema.names if name not in taken]
        self.identity_columns = [name for name in self._schema.names if name in taken - {KEY_GROUP, POSITION}]

    def count(self) -> int:
        """Number of rows, which reads all of them."""
        return sum(batch.num_rows for batch in self._batches())

    def by_key_group(self) -> Iterator[tuple[int, Unit]]:
        """(key group, its rows) of key groups with rows, ascending."""
        group, unit = -1, _UnitBuilder(self._state, is_list=self.is_list)
        for batch in self._batches():
            groups = batch.column(0).to_numpy()
            bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
            identities, positions, values = self._rows(batch)
            for start, stop in pairwise(bounds):
                if groups[start] != group:
                    if unit.rows:
                        yield group, unit.build()
                    group, unit = int(groups[start]), _UnitBuilder(self._state, is_list=self.is_list)
                unit.add(identities[start:stop], positions[start:stop], values[start:stop])
        if unit.rows:
            yield group, unit.build()

    def by_hash(self, units: int) -> Iterator[tuple[int, Unit]]:
        """(number, rows) of each of `units` shares of the keys; each reads the whole state."""
        for number in range(units):
            unit = _UnitBuilder(self._state, is_list=self.is_list)
            for batch in self._batches():
                identities, positions, values = self._rows(batch)
                ours = [row for row, each in enumerate(identities) if xxhash.xxh3_64_intdigest(each[0]) % units == number]
                unit.add([identities[row] for row in ours], [positions[row] for row in ours], [values[row] for row in ours])
            yield number, unit.build()

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def value_columns(self) -> Sequence[str]:
        return self._value_columns

    def value_type(self, column: str) -> pa.DataType:
        """Arrow type of one key's value in a value column; for a list that of all its elements."""
        own = self._schema.field(column).type
        return pa.list_(own) if self.is_list else own

    def row_units(self, units: int | None) -> Iterator[RowUnit]:
        """As `by_key_group` (None) or `by_hash`, with the rows themselves."""
        if units is None:
            yield from self._row_key_groups()
            return
        for number in range(units):
            kept = []
            for batch in self._batches():
                identities, _, _ = self._rows(batch)
                ours = [row for row, each in enumerate(identities) if xxhash.xxh3_64_intdigest(each[0]) % units == number]
                kept.append(batch.take(pa.array(ours, pa.int64())))
            yield self._row_unit(number, kept)

    def _row_key_groups(self) -> Iterator[RowUnit]:
        group, kept = -1, list[pa.RecordBatch]()
        for batch in self._batches():
            groups = batch.column(0).to_numpy()
            bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
            for start, stop in pairwise(bounds):
                if start == stop:
                    continue
                if groups[start] != group and kept:
                    yield self._row_unit(group, kept)
                    kept = []
                group = int(groups[start])
                kept.append(batch.slice(start, stop - start))
        if kept:
            yield self._row_unit(group, kept)

    def _row_unit(self, number: int, batches: list[pa.RecordBatch]) -> RowUnit:
        builder = _UnitBuilder(self._state, is_list=self.is_list)
        places: dict[Identity, list[tuple[int, int]]] = {}
        first = 0
        for batch in batches:
            identities, positions, values = self._rows(batch)
            builder.add(identities, positions, values)
            for row, (identity, position) in enumerate(zip(identities, positions, strict=True), first):
                places.setdefault(identity, []).append((position, row))
            first += batch.num_rows
        rows = {identity: [row for _, row in sorted(each)] for identity, each in places.items()}
        return RowUnit(number, builder.build(), rows, pa.Table.from_batches(batches, self._schema), self)

    def shown(self, identity: Identity) -> tuple[Any, Any]:
        """(key, map key or time, or None) of an identity, as plain values."""
        key, _, rest = identity
        if self._map_key is not None:
            rest = self._map_key.decode(rest)
        elif rest == b"":
            rest = None
        return self._key_type.decode(key), rest

    def _batches(self) -> Iterator[pa.RecordBatch]:
        return state_batches(self._reader, self._state, self._schema, self._key_groups)

    def _rows(self, batch: pa.RecordBatch) -> tuple[list[Identity], list[int], list[bytes]]:
        """(identity, position in a list, encoded value) of each row."""
        count = batch.num_rows
        try:
            arrays = [batch.column(name) for name in key_columns(self._key_type)]
            keys = self._key_type.column(arrays, max_parallelism=self._state.operator.max_parallelism).encoded()
            rest: list[Any] = [b""] * count
            if self._map_key is not None:
                rest = self._entries(batch.column(MAP_KEY))
            elif self._own_key is not None:
                rest = batch.column(self._own_key).to_pylist()
            columns = [python_values(batch.column(name)) for name in self._value_columns]
            values = self._comparer.encode(columns) if columns else [b""] * count
        except (CorruptStateError, InvalidKeyError) as error:
            raise named(error, self._state) from error
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise self._state.corrupt(f"rows that can't be read: {error}") from error
        positions = batch.column(POSITION).to_pylist() if self.is_list else [0] * count
        return list(zip(keys, batch.column(NAMESPACE).to_pylist(), rest, strict=True)), positions, values

    def _entries(self, column: pa.Array) -> list[bytes]:
        """Encoded map keys, the same for equal keys: of those, backends keep different ones."""
        assert self._serializer is not None
        assert self._map_key is not None
        return [self._serializer.encode_entry(each) for each in self._map_key.from_arrow(column)]


@dataclass(frozen=True, slots=True)
class RowUnit:
    """One unit with its rows."""

    number: int
    unit: Unit
    rows: dict[Identity, list[int]]
    """Identity -> its rows of the table: one, or the elements of a list in their order."""
    table: pa.Table
    side: DiffRows

    def identities(self, wanted: Sequence[Identity]) -> list[pa.Array]:
        """Identity columns of these identities."""
        firsts = self.table.take(pa.array([self.rows[each][0] for each in wanted], pa.int64()))
        return [_whole(firsts.column(name)) for name in self.side.identity_columns]

    def values(self, wanted: Sequence[Identity]) -> list[pa.Array]:
        """Value columns of these identities."""
        places = [self.rows[each] for each in wanted]
        taken = self.table.take(pa.array([row for rows in places for row in rows], pa.int64()))
        columns = [_whole(taken.column(name)) for name in self.side.value_columns]
        if self.side.is_list:
            offsets = pa.array(np.cumsum([0, *map(len, places)]), pa.int32())
            return [
                pa.ListArray.from_arrays(offsets, column, self.side.value_type(name))
                for name, column in zip(self.side.value_columns, columns, strict=True)
            ]
        return columns


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


class _UnitBuilder:
    """Builder of one unit, from rows."""

    def __init__(self, state: StoredState, *, is_list: bool) -> None:
        self.rows = 0
        self._state = state
        self._unit: Unit = {}
        self._elements: dict[Identity, list[tuple[int, bytes]]] | None = {} if is_list else None

    def add(self, identities: list[Identity], positions: list[int], values: list[bytes]) -> None:
        self.rows += len(identities)
        if self._elements is None:
            self._unit.update(zip(identities, values, strict=True))
            return
        for identity, position, value in zip(identities, positions, values, strict=True):
            self._elements.setdefault(identity, []).append((position, value))

    def build(self) -> Unit:
        """The unit. Raises CorruptStateError for a repeated identity."""
        if self._elements is not None:
            return {each: _joined(elements) for each, elements in self._elements.items()}
        if len(self._unit) != self.rows:
            raise self._state.corrupt(f"{self.rows - len(self._unit)} keys are there twice")
        return self._unit


def _joined(elements: list[tuple[int, bytes]]) -> bytes:
    """A list's elements as one msgpack array."""
    elements.sort(key=lambda element: element[0])
    count = len(elements)
    head = bytes([0x90 | count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(value for _, value in elements)


class Change(StrEnum):
    """How one key differs."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """One key that differs, or one entry of operator state."""

    change: Change
    key: Any
    """None for operator state."""
    namespace: Any
    entry: Any
    """Key of a map's entry, or time of a timer; else None."""
    before: Any
    """Plain value; None if there is none, as in `after`."""
    after: Any


@dataclass(frozen=True, slots=True)
class StateDiff:
    """Difference of one state of one operator. Counts are of rows: keys, entries of maps, timers, entries of operator state."""

    operator: str
    state: str
    before: StateMeta | None
    """None: the state is only in the other snapshot; so in `after`."""
    after: StateMeta | None
    added: int
    removed: int
    changed: int
    same: int
    keys: tuple[KeyDifference, ...]
    """The first differing keys, in the order of key groups and keys."""

    @property
    def is_same(self) -> bool:
        return self.before == self.after and not (self.added or self.removed or self.changed)


@dataclass(frozen=True, slots=True)
class FlightDiff:
    """Difference of the records in flight on one edge, as a bag of rows with their timestamps: not of their order, nor of which
    channel they were on."""

    edge: EdgeName
    added: int
    removed: int
    same: int

    @property
    def is_same(self) -> bool:
        return not self.added and not self.removed


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """Difference of two snapshots."""

    states: tuple[StateDiff, ...]
    operators_added: tuple[str, ...]
    operators_removed: tuple[str, ...]
    in_flight: tuple[FlightDiff, ...] = ()
    """Of edges on which either had records in flight."""

    @property
    def is_same(self) -> bool:
        if self.operators_added or self.operators_removed:
            return False
        return all(state.is_same for state in self.states) and all(each.is_same for each in self.in_flight)


def diff_snapshots(
    before: StoredSnapshot, after: StoredSnapshot, uid: str | None = None, name: str | None = None, *, keys_max: int = 0
) -> SnapshotDiff:
    """Compare all states and what is in flight, those of one operator, or one state. `keys_max`: differing keys to return of each
    state.

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
    flights = [flights_of(side, uid) if name is None else () for side in sides]
    with before.reader() as left, after.reader() as right:
        flown = _diff_flights(left, right, *flights)
    return SnapshotDiff(
        tuple(found),
        tuple(each for each in uids if each not in operators[0]),
        tuple(each for each in uids if each not in operators[1]),
        tuple(flown),
    )


def _diff_flights(
    left: PartReader, right: PartReader, before: Sequence[StoredFlight], after: Sequence[StoredFlight]
) -> list[FlightDiff]:
    """Edge by edge; the records of one edge, 16 bytes each, are in memory."""
    sides = [{flight.name: flight for flight in side} for side in (before, after)]
    found = []
    for edge in dict.fromkeys((*sides[0], *sides[1])):
        old, new = flight_rows(left, sides[0].get(edge)), flight_rows(right, sides[1].get(edge))
        found.append(FlightDiff(edge, (new - old).total(), (old - new).total(), (old & new).total()))
    return found


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
    else:  # no row of the one can be a row of the other
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
    """Whether rows of the two states can be equal: kind and key type are."""
    return (before.meta.kind, before.meta.key_type) == (after.meta.kind, after.meta.key_type)


def _has_same_groups(before: StoredState, after: StoredState) -> bool:
    return before.operator.max_parallelism == after.operator.max_parallelism


class _Tally:
    """Counts of one state, and the first keys that differ."""

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
    """Units of equal number side by side; both streams are ascending."""
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
    """Entries of all subtasks, with counts; of broadcast state, whose subtasks hold copies, the highest count of each entry."""
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
