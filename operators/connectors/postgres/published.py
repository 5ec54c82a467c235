"""CORE: whether the tables that a job reads are those that it began with, and still in its publication. Pure but for the query.

A table is its oid: a name can be given to another one. That it was in the publication all the time is told by the publication's own
entries for it, which are made anew when a table is taken out and put back, or when its filter or list of columns is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


class ReadTable(msgspec.Struct, frozen=True, array_like=True):
    """A table that is read."""

    oid: int
    entries: tuple[str, ...]
    """Of the publication, any of which has it in."""
    names: tuple[str, ...]
    """`schema.table`: those by which it was read, the newest last. The log has the one that it had at the time."""

    @property
    def name(self) -> str:
        return self.names[-1]


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table as the catalog has it now."""

    oid: int
    name: str
    entries: tuple[str, ...]
    """None: it is not published."""


class TableGoneError(Exception):
    """A table in the log is not the one that is read any more."""


def find_tables(cursor: Any, publication: str, names: Sequence[str], known: Sequence[ReadTable]) -> list[FoundTable]:
    """Tables with these names, and those that are known by others now. A partitioned table, or a part of one, is in by a parent's
    entry, too."""
    schemas = _SCHEMA_ENTRY if cursor.connection.server_version >= 150_000 else ""
    oids = [each.oid for each in known]
    cursor.execute(_FIND.format(schemas=schemas), {"publication": publication, "names": list(names), "oids": oids})
    return [FoundTable(oid, name, tuple(entries)) for oid, name, entries in cursor.fetchall()]


def resolve_tables(
    names: Sequence[str], known: Sequence[ReadTable], found: Sequence[FoundTable]
) -> tuple[tuple[ReadTable, ...], tuple[str, ...]]:
    """The tables that these names mean, for what was read so far, and which of them are new to it. known: empty: not known; then
    none is new.

    A table that is known by another name was renamed. One that is not there is kept as it was, for `table_problem`."""
    by_oid, by_name = {each.oid: each for each in known}, {each.name: each for each in known}
    now = {each.name: each for each in found}
    tables, added = [], []
    for name in names:
        current = now.get(name)
        before = by_oid.get(current.oid) if current is not None else None
        if current is not None and before is not None:
            goes_on = not before.entries or bool(set(before.entries) & set(current.entries))
            others = tuple(each for each in before.names if each != name)
            tables.append(ReadTable(current.oid, current.entries if goes_on else before.entries, (*others, name)))
        elif name in by_name:
            tables.append(by_name[name])
        else:
            tables.append(ReadTable(0 if current is None else current.oid, () if current is None else current.entries, (name,)))
            if known:
                added.append(name)
    return tuple(tables), tuple(added)


def table_problem(table: ReadTable, found: Sequence[FoundTable]) -> str | None:
    """Why not all changes of a table come; None: they do."""
    now: Mapping[int, FoundTable] = {each.oid: each for each in found}
    current = now.get(table.oid)
    if current is None:
        again = any(each.name == table.name for each in found)
        return f"{table.name} was dropped{', and another table has its name' if again else ''}"
    if current.name != table.name:
        return f"{table.name} is called {current.name} now: give that as its name in tables="
    if not current.entries:
        return f"the publication does not have {table.name} any more"
    if table.entries and not set(table.entries) & set(current.entries):
        return f"{table.name} was taken out of the publication and put back, or its rows or columns in it were changed"
    return None


_SCHEMA_ENTRY = """
    UNION ALL SELECT 'schema ' || s.oid FROM pg_publication p JOIN pg_publication_namespace s ON s.pnpubid = p.oid
      WHERE p.pubname = %(publication)s AND s.pnnspid IN (SELECT o.relnamespace FROM pg_class o JOIN own ON o.oid = own.oid)
"""

_FIND = """
SELECT c.oid::int8, n.nspname || '.' || c.relname,
  CASE WHEN EXISTS (SELECT 1 FROM pg_publication_tables t
      WHERE t.pubname = %(publication)s AND t.schemaname = n.nspname AND t.tablename = c.relname)
    THEN ARRAY(WITH own AS (SELECT c.oid UNION SELECT relid FROM pg_partition_ancestors(c.oid))
      SELECT 'table ' || r.oid FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
        WHERE p.pubname = %(publication)s AND r.prrelid IN (SELECT oid FROM own)
      UNION ALL SELECT 'all ' || p.oid FROM pg_publication p WHERE p.pubname = %(publication)s AND p.puballtables
      {schemas})
    ELSE ARRAY[]::text[] END
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND (n.nspname || '.' || c.relname = ANY (%(names)s) OR c.oid = ANY (%(oids)s::oid[]))
"""
