"""CORE: PostgreSQL's logical replication messages (`pgoutput`, protocol version 1): bytes to records. Pure.

Source: PostgreSQL's documentation, "Logical Replication Message Formats". Values are texts of the server, or null, or unchanged:
a large value that an update did not touch is not sent."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Unchanged(Enum):
    """A value that was not sent, as the update did not change it."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED
Value: TypeAlias = bytes | Unchanged | None
Values: TypeAlias = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction begins; all of its changes follow, then `Commit`."""

    commit_lsn: int
    """Where its commit is in the log: transactions come in this order."""
    committed_us: int
    """Microseconds since 2000-01-01 UTC."""
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    commit_lsn: int
    end_lsn: int
    """Behind the commit: where to go on."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    name: str
    type_oid: int
    modifier: int
    is_key: bool
    """Of the replica identity."""


@dataclass(frozen=True, slots=True)
class Relation:
    """What a table is like in the changes that follow; comes before its first change, and when it has changed."""

    oid: int
    schema: str
    table: str
    columns: tuple[RelationColumn, ...]

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"


@dataclass(frozen=True, slots=True)
class Insert:
    relation: int
    new: Values


@dataclass(frozen=True, slots=True)
class Update:
    relation: int
    new: Values
    key: Values | None
    """Key columns of the old row, the others null: only where the key has changed."""
    old: Values | None
    """The old row: of tables with REPLICA IDENTITY FULL."""


@dataclass(frozen=True, slots=True)
class Delete:
    relation: int
    old: Values
    """The old row, or of it the key columns, the others null."""


@dataclass(frozen=True, slots=True)
class Truncate:
    relations: tuple[int, ...]


Message: TypeAlias = Begin | Commit | Relation | Insert | Update | Delete | Truncate


class MalformedMessageError(Exception):
    """Bytes that are no message of this protocol."""


_BEGIN, _COMMIT = struct.Struct(">qqi"), struct.Struct(">bqqq")
_COLUMN, _LENGTH = struct.Struct(">ii"), struct.Struct(">i")
_COUNT = struct.Struct(">h")


class _Reader:
    """Fields of one message, one after the other."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 1

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        found = form.unpack_from(self._content, self._position)
        self._position += form.size
        return found

    def number(self, form: struct.Struct) -> int:
        return self.unpack(form)[0]

    def byte(self) -> int:
        self._position += 1
        return self._content[self._position - 1]

    def text(self) -> str:
        end = self._content.index(0, self._position)
        found = self._content[self._position : end].decode()
        self._position = end + 1
        return found

    def values(self) -> Values:
        """One loop: it takes most of the time of a row."""
        content, position = self._content, self._position + 2
        found: list[Value] = []
        for _ in range(self.number(_COUNT)):
            kind = content[position]
            position += 1
            if kind == 0x74:  # t
                (size,) = _LENGTH.unpack_from(content, position)
                start = position + 4
                position = start + size
                if size < 0 or position > len(content):
                    raise MalformedMessageError(f"a value of {size} bytes")
                found.append(content[start:position])
            elif kind == 0x6E:  # n
                found.append(None)
            elif kind == 0x75:  # u
                found.append(UNCHANGED)
            else:
                raise MalformedMessageError(f"a value of kind {chr(kind)!r}")
        self._position = position
        return tuple(found)


def decode(content: bytes) -> Message | None:
    """None: a message without a change of a table, such as a type, an origin, or one of an application.

    Raises MalformedMessageError."""
    try:
        return _decode(chr(content[0]), _Reader(content))
    except (struct.error, ValueError, IndexError) as error:
        raise MalformedMessageError(f"message {content[:40]!r} ...: {error}") from error


def _decode(kind: str, reader: _Reader) -> Message | None:
    match kind:
        case "B":
            return Begin(*reader.unpack(_BEGIN))
        case "C":
            _, commit_lsn, end_lsn, _ = reader.unpack(_COMMIT)
            return Commit(commit_lsn, end_lsn)
        case "R":
            return _relation(reader)
        case "I":
            relation = reader.number(_LENGTH)
            _expect(reader.byte(), "N")
            return Insert(relation, reader.values())
        case "U":
            return _update(reader)
        case "D":
            relation = reader.number(_LENGTH)
            _expect(reader.byte(), "KO")
            return Delete(relation, reader.values())
        case "T":
            count = reader.number(_LENGTH)
            reader.byte()
            return Truncate(tuple(reader.number(_LENGTH) for _ in range(count)))
        case "Y" | "O" | "M":
            return None
        case _:
            raise MalformedMessageError(f"a message of kind {kind!r}")


def _relation(reader: _Reader) -> Relation:
    oid, schema, table = reader.number(_LENGTH), reader.text(), reader.text()
    reader.byte()
    columns = []
    for _ in range(reader.number(_COUNT)):
        is_key = reader.byte() & 1 == 1
        name = reader.text()
        type_oid, modifier = reader.unpack(_COLUMN)
        columns.append(RelationColumn(name, type_oid, modifier, is_key))
    return Relation(oid, schema or "pg_catalog", table, tuple(columns))


def _update(reader: _Reader) -> Update:
    relation, key, old = reader.number(_LENGTH), None, None
    kind = reader.byte()
    if kind == 0x4B:  # K
        key, kind = reader.values(), reader.byte()
    elif kind == 0x4F:  # O
        old, kind = reader.values(), reader.byte()
    _expect(kind, "N")
    return Update(relation, reader.values(), key, old)


def _expect(kind: int, wanted: str) -> None:
    if chr(kind) not in wanted:
        raise MalformedMessageError(f"a row of kind {chr(kind)!r}, expected {wanted}")
