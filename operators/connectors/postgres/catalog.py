"""What a server's catalog says of the table that a sink writes to: its columns, its unique keys, and what the user may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.operators.connectors.postgres.table import TableColumn
from holdfast.statebackends.errors import InvalidConfigError

Query = Callable[[str], list[tuple[Any, ...]]]
"""Rows of a statement without parameters."""


def quote(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as SQL writes it; `E''` means the same whatever standard_conforming_strings says."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def quoted(table: str) -> str:
    """`schema.table`, or `table`, of which each part is a name as it is: no part is folded to lower case."""
    return ".".join(quote(part) for part in split_name(table))


def split_name(table: str) -> list[str]:
    """Raises InvalidConfigError for what is no name of a table."""
    parts = table.split(".") if isinstance(table, str) else []
    if not 1 <= len(parts) <= 2 or not all(parts) or "\0" in table:
        raise InvalidConfigError(f"{table!r} is no name of a table: table, or schema.table", setting="table")
    return parts


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the server has it."""

    oid: int
    schema: str
    name: str
    columns: tuple[TableColumn, ...]
    unique_keys: tuple[frozenset[str], ...]
    """Columns of each index that ON CONFLICT can name."""
    rights: frozenset[str]
    """Of this user: INSERT, SELECT ..."""

    @property
    def quoted(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"


_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def read_table(query: Query, name: str, place: str) -> Table:
    """Raises InvalidConfigError for a table that is not there, or can't take rows in a transaction."""
    wanted = literal(quoted(name))
    found = query(
        "SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relkind::text, "
        + ", ".join(f"has_table_privilege(c.oid, '{each}')" for each in _RIGHTS)
        + f" FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass({wanted})"
    )
    if not found:
        raise InvalidConfigError(f"{place}: there is no table {name}, or the user may not use its schema", setting="table")
    oid, schema, table, kind, *rights = found[0]
    if kind not in ("r", "p"):
        raise InvalidConfigError(f"{place}: {name} is no table of this server (a view, or a foreign table)", setting="table")
    return Table(
        oid,
        schema,
        table,
        tuple(_column(row) for row in query(_COLUMNS % oid)),
        tuple(frozenset(msgspec.json.decode(row[0])) for row in query(_UNIQUE_KEYS % oid)),
        frozenset(right for right, has in zip(_RIGHTS, rights, strict=True) if has),
    )


def _column(row: Sequence[Any]) -> TableColumn:
    name, type_name, shown, modifier, not_null, has_default, generated, labels = row
    return TableColumn(name, type_name, shown, modifier, not_null, has_default, generated, tuple(msgspec.json.decode(labels)))


_COLUMNS = """
SELECT a.attname::text, coalesce(b.typname, t.typname)::text, format_type(a.atttypid, a.atttypmod),
  (CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END)::int8,
  a.attnotnull OR t.typnotnull, a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL,
  a.attgenerated <> '',
  coalesce((SELECT json_agg(e.enumlabel ORDER BY e.enumsortorder)::text FROM pg_enum e
    WHERE e.enumtypid = coalesce(b.oid, t.oid)), '[]')
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype
WHERE a.attrelid = %d AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

_UNIQUE_KEYS = """
SELECT (SELECT json_agg(a.attname)::text FROM pg_attribute a
  WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))
FROM pg_index i WHERE i.indrelid = %d AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL
"""
