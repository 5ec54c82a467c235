"""CORE: changes of tables as rows: messages in, columns of Arrow out, with the position behind each row. Pure.

A position is (LSN, index): inside a transaction the LSN of its commit and the number of the publication's rows behind us, between
two the end of the last one, and 0. A transaction is sent again as a whole; rows that were passed on are then skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.operators.connectors.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    Truncate,
    Update,
    Value,
    Values,
)
from holdfast.operators.connectors.postgres.published import ReadTable, TableGoneError
from holdfast.operators.connectors.postgres.table import TableColumn
from holdfast.operators.sources.splits import DeadLetter, Position

OP, TABLE, COMMITTED_AT, UNCHANGED_COLUMNS = "op", "table", "committed_at", "unchanged"
INSERT, UPDATE, DELETE, TRUNCATE = "insert", "update", "delete", "truncate"
META = pa.schema(
    [
        pa.field(OP, pa.string(), nullable=False),
        pa.field(TABLE, pa.string(), nullable=False),
        pa.field(COMMITTED_AT, pa.timestamp("us", "UTC"), nullable=False),
        pa.field(UNCHANGED_COLUMNS, pa.list_(pa.string())),
    ]
)
_EPOCH_US = 946_684_800_000_000
"""2000-01-01, where PostgreSQL's time begins."""

_READ: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}


def read_type(column: TableColumn) -> pa.DataType:
    """What a column is read as. Of a type that Arrow does not have: the server's text."""
    if column.labels:
        return pa.string()
    digits = column.digits
    if digits is not None and digits[1] >= 0 and 0 < sum(digits) <= 38:
        return pa.decimal128(sum(digits), digits[1])
    return _READ.get(column.type, pa.string())


class UnknownRelationError(Exception):
    """A change of a table that was not described."""


class Change(NamedTuple):
    """One row, not yet in columns."""

    op: str
    table: str
    committed_us: int
    values: Mapping[str, Value]
    position: Position
    old: Mapping[str, Value] | None = None
    """Of an update in front of a snapshot: the old row, where the server sends it."""


class Coverage(Protocol):
    """A snapshot of the tables that is still to be read."""

    lsn: int
    """Changes of commits in front of it that the snapshot has are left out."""

    def kept(self, changes: Sequence[Change]) -> list[Change]:
        """Those in front of it that are not in the snapshot, as far as it is still to be read."""


class ChangeRows:
    """The changes of some tables, from one position on."""

    def __init__(
        self,
        tables: Sequence[str],
        columns: pa.Schema,
        position: Position,
        keys: Mapping[str, Sequence[str]] | None = None,
        known: Sequence[ReadTable] = (),
    ) -> None:
        """tables: `schema.table` each; columns: of the rows, behind those of `META`; keys: names of the key's columns, by table:
        where a server sends whole old rows it does not say which are the key. known: the tables as the server knows them."""
        self._tables = frozenset(tables)
        self._known = {each.oid: each for each in known}
        self._keys = keys or {}
        self._columns = columns
        self._from = position or (0, 0)
        self._relations: dict[int, tuple[str, tuple[str, ...]]] = {}
        """Oid -> name, and names of the columns."""
        self._begin: Begin | None = None
        self._index = 0
        self._changes: list[Change] = []
        self._snapshot: Coverage | None = None
        self.last_commit_lsn = 0
        """Of the last transaction that came as a whole; 0: none did."""
        self.position: Position = self._from
        """Behind all messages so far."""

    @property
    def is_in_transaction(self) -> bool:
        return self._begin is not None

    @property
    def num_rows(self) -> int:
        return len(self._changes)

    def advance(self, lsn: int) -> None:
        """Nothing comes of what is in front of an LSN; not in a transaction."""
        if self._snapshot is not None:  # its rows come first
            lsn = min(lsn, self._snapshot.lsn - 1)
        if self._begin is None and lsn > self.position[0]:
            self.position = (lsn, 0)

    def begin_snapshot(self, snapshot: Coverage) -> None:
        """In front of all messages: of those in front of the snapshot it says which are kept."""
        self._snapshot = snapshot

    def end_snapshot(self) -> None:
        """All of its rows were given."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            self.advance(snapshot.lsn)

    def take(self, message: Message) -> None:
        """Raises UnknownRelationError, and TableGoneError in front of the first change of a table that is another one now."""
        match message:
            case Begin():
                self._begin, self._index = message, 0
            case Commit():
                self._begin, self.last_commit_lsn = None, message.commit_lsn
                self.advance(message.end_lsn)
            case Relation():
                self._relations[message.oid] = (self._name_of(message), tuple(each.name for each in message.columns))
            case Insert():
                self._add(INSERT, message.relation, message.new)
            case Update():
                self._update(message)
            case Delete():
                self._add(DELETE, message.relation, message.old)
            case Truncate():
                for relation in message.relations:
                    self._add(TRUNCATE, relation, ())
            case _:
                assert_never(message)

    def _name_of(self, relation: Relation) -> str:
        """By which a table is read; empty: it is not, though it had the name of one that is, in front of a snapshot."""
        known = self._known.get(relation.oid)
        if known is not None:
            if relation.name not in known.names:
                raise TableGoneError(f"{known.name} is called {relation.name} from here on: give that as its name in tables=")
            return known.name
        if relation.name not in self._tables or not self._known:
            return relation.name
        if self._snapshot is None:
            raise TableGoneError(f"changes of another table with the name {relation.name} come from here on")
        return ""

    def _update(self, message: Update) -> None:
        """One whose key has changed deletes the old key, and inserts a row: who keeps rows by key then needs nothing else."""
        new = message.new
        if message.old is not None:
            new = tuple(old if value is UNCHANGED else value for value, old in zip(new, message.old, strict=True))
        key = message.old if self._has_moved(message.relation, message.old, new) else message.key
        if key is not None:
            self._add(DELETE, message.relation, key)
        self._add(INSERT if key is not None else UPDATE, message.relation, new, None if key is not None else message.old)

    def _has_moved(self, relation_oid: int, old: Values | None, new: Values) -> bool:
        """Whether an update whose whole old row was sent has changed the key."""
        relation = self._relations.get(relation_oid)
        if old is None or relation is None:
            return False
        table, names = relation
        key = self._keys.get(table, ())
        return any(was != now for name, was, now in zip(names, old, new, strict=False) if name in key)

    def _add(self, op: str, relation_oid: int, values: Values, old: Values | None = None) -> None:
        relation, begin = self._relations.get(relation_oid), self._begin
        if relation is None or begin is None:
            raise UnknownRelationError(f"a change of relation {relation_oid}, which was not described, or outside of a transaction")
        table, names = relation
        self._index += 1  # of other tables, too: a position means the same row when the source reads more tables, or fewer
        if table not in self._tables:
            return
        position = (begin.commit_lsn, self._index)
        if position <= self._from:
            return
        was = None if old is None or self._snapshot is None else dict(zip(names, old, strict=False))
        row = dict(zip(names, values, strict=False))
        self._changes.append(Change(op, table, begin.committed_us + _EPOCH_US, row, position, was))
        self.position = position

    def drain(self) -> tuple[pa.RecordBatch | None, npt.NDArray[np.int64] | None, list[DeadLetter]]:
        """The rows so far, their positions, and rows whose values can't be read."""
        changes, self._changes = self._changes, []
        letters: list[DeadLetter] = []
        if changes and self._snapshot is not None:
            changes = self._snapshot.kept(changes)
        if not changes:
            return None, None, letters
        try:
            batch = self._batch(changes)
        except (pa.ArrowException, ValueError):
            changes, letters = self._readable(changes)
            batch = self._batch(changes)
        return batch, np.array([each.position for each in changes], np.int64).reshape(-1, 2), letters

    def _readable(self, changes: Sequence[Change]) -> tuple[list[Change], list[DeadLetter]]:
        """The rows that can be read; each that can't as a letter."""
        kept: list[Change] = []
        letters = []
        for change in changes:
            try:
                self._batch([change])
            except (pa.ArrowException, ValueError) as error:
                raw = repr({name: value for name, value in change.values.items() if value is not UNCHANGED}).encode()
                lsn, index = change.position
                letters.append(DeadLetter((lsn, index - 1), change.position, f"{change.table}: {error}", raw, len(kept)))
            else:
                kept.append(change)
        return kept, letters

    def _batch(self, changes: Sequence[Change]) -> pa.RecordBatch:
        arrays = [
            pa.array([each.op for each in changes], pa.string()),
            pa.array([each.table for each in changes], pa.string()),
            pa.array([each.committed_us for each in changes], pa.int64()).cast(META.field(COMMITTED_AT).type),
            pa.array([_unchanged(each.values) for each in changes], META.field(UNCHANGED_COLUMNS).type),
        ]
        arrays += [column_of([each.values.get(column.name) for each in changes], column.type) for column in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*META, *self._columns]))


def _unchanged(row: Mapping[str, Value]) -> list[str] | None:
    return [name for name, value in row.items() if value is UNCHANGED] or None


def column_of(values: Sequence[Any], wanted: pa.DataType) -> pa.Array:
    """Texts of the server as values of a type. Raises ArrowException, ValueError for those that it does not have."""
    return typed(pa.array([None if value is UNCHANGED else value for value in values], pa.binary()), wanted)


def typed(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Of an array of binary. Raises as `column_of`."""
    if pa.types.is_binary(wanted):
        return pa.array([None if text is None else bytes.fromhex(text[2:].decode()) for text in texts.to_pylist()], wanted)
    found = texts.cast(pa.string())
    if pa.types.is_boolean(wanted):
        return pc.equal(found, "t")
    if pa.types.is_time(wanted):
        return pc.binary_join_element_wise("1970-01-01", found, " ").cast(pa.timestamp("us")).cast(wanted)
    return found if pa.types.is_string(wanted) else found.cast(wanted)
