"""The rows that tables had, as of one LSN, for a source of their changes: read once, in the order of their keys.

A snapshot of the server belongs to a transaction, and ends with it. What a job has given of it is told by the last key, so that a
restart goes on under a snapshot of its own, at a later LSN. Up to there changes of rows that were given come from the slot, and
those of the others are left out: the later snapshot has them. So each row comes once, as it was at some LSN, and all that changed
behind that LSN follows.

A row whose key an update moves there, without large values that it left as they were, is late: it is as if it had not been given,
and is read by its key from the later snapshot."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from holdfast.operators.connectors.postgres.catalog import Query, Table, literal, quote, read_table
from holdfast.operators.connectors.postgres.change_rows import DELETE, INSERT, META, TRUNCATE, UPDATE, Change, typed
from holdfast.operators.connectors.postgres.login import Login, client
from holdfast.operators.connectors.postgres.pgoutput import UNCHANGED, Value
from holdfast.operators.connectors.postgres.slot import (
    ChunkMarks,
    ChunkRecords,
    Key,
    LateChange,
    LateMarks,
    SnapshotProgress,
    lsn_of,
    lsn_text,
)
from holdfast.operators.sources.splits import DeadLetter
from holdfast.statebackends.errors import InvalidConfigError

log = logging.getLogger("holdfast.postgres")

ROWS_MAX = 8_192
"""Rows of a chunk."""
ROWS_FIRST = 128
"""Of the first one, which shows how long rows are."""
CHUNK_BYTES = 16 << 20
"""Text of a chunk: once it is reached no further row is taken."""
LATE_MAX = 10_000
"""Late rows at a time: their keys are in the job's state."""

LATE_ROWS_MAX = 64
"""Late rows of a chunk."""

_SIZE = "holdfast_size"
_PLAIN = ("text", "varchar", "bpchar", "bytea")
"""Whose sizes the server knows without reading them."""
_SMALL = frozenset(
    (
        *("bool", "int2", "int4", "int8", "float4", "float8", "numeric", "money", "oid", "name", "uuid", "inet", "cidr"),
        *("macaddr", "date", "time", "timetz", "timestamp", "timestamptz", "interval"),
    )
)

OUTPUT = {"datestyle": "ISO", "intervalstyle": "postgres", "extra_float_digits": "3", "timezone": "UTC", "bytea_output": "hex"}
"""Settings that say how values are written; the slot's session has the same."""
_SETTINGS = {
    **OUTPUT,
    "row_security": "off",  # a policy that hides rows is an error
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "tcp_keepalives_idle": "30",
}


MESSAGE = "SELECT pg_logical_emit_message(true, 'holdfast', '')"
"""A transaction in the log that changes nothing."""

HEARTBEAT = "SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_logical_emit_message(true, 'holdfast', '') END"
"""The same; nothing on a standby, which can't write: there the slot moves with the next change."""


@dataclass(frozen=True, slots=True)
class KeyColumn:
    name: str
    type: str
    """As SQL writes it."""
    collation: str
    """As SQL writes it; empty: the type has none."""


def read_key(query: Query, table: Table, place: str) -> tuple[KeyColumn, ...]:
    """The columns by which a table's rows are found in its changes, too. Raises InvalidConfigError for a table without a key, and
    for one that the user may not read."""
    if "SELECT" not in table.rights:
        raise InvalidConfigError(f"{place}: the user may not SELECT from {table.schema}.{table.name}", setting="tables")
    found = tuple(KeyColumn(*row) for row in query(_KEY % table.oid))
    if not found:
        raise InvalidConfigError(
            f"{place}: {table.schema}.{table.name} has no primary key, and no index as REPLICA IDENTITY: behind a restart it would "
            'not be known which of its rows were read. Give it one, or read its changes alone (snapshot="never")',
            setting="snapshot",
        )
    return found


def key_names(query: Query, table: Table) -> tuple[str, ...]:
    """Names of a table's key; empty: it has none."""
    return tuple(row[0] for row in query(_KEY % table.oid))


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as its publication shows it."""

    table: Table
    key: tuple[KeyColumn, ...]
    columns: frozenset[str]
    row_filter: str
    """A condition, as SQL writes it; empty: none."""
    is_partitioned: bool

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.key)

    @property
    def rows(self) -> str:
        """Where its rows are read from."""
        return f"{'' if self.is_partitioned else 'ONLY '}{self.table.quoted}"

    def size_of(self, wanted: Sequence[str]) -> str:
        """About the bytes of a row's large values, in SQL that does not read them; empty: there are none."""
        sizes = []
        for each in self.table.columns:
            if each.name not in wanted or each.labels or each.type in _SMALL:
                continue
            name = quote(each.name)
            size = f"octet_length({name})" if each.type in _PLAIN else f"pg_column_size({name}) * 4"  # compressed, perhaps
            sizes.append(f"coalesce({'2 * ' if each.type == 'bytea' else ''}{size}, 0)::int8")
        return " + ".join(sizes)


class InitialSnapshot:
    """One transaction that reads what is left, at `lsn`: all transactions whose commit is in front of it are seen, and no others.

    Used by one thread."""

    def __init__(
        self, login: Login, place: str, publication: str, columns: pa.Schema, progress: SnapshotProgress, application: str
    ) -> None:
        """columns: of the rows, behind those of `META`; application: name of the session, the same for all attempts of a job."""
        self._login = login
        self._place = place
        self._publication = publication
        self._columns = columns
        self._restored = progress
        self._progress: SnapshotProgress | None = progress
        self._application = application
        self._connection: Any = None
        self._tables: dict[str, PublishedTable] = {}
        self._late = dict.fromkeys(progress.late)
        self._late_changes: list[LateChange] = []
        self._rows_max = ROWS_FIRST
        self._given = 0
        self._taken_us = 0
        self.lsn = 0

    # --------------------------------------------------------------------------------------------------------------- the session

    def open(self) -> None:
        """Waits for transactions that write now, as the making of any slot does.

        A message goes into the log first, so that the slot's session begins with one that is in front of the snapshot: psycopg2
        confirms what it hears of the log as long as none came, and the slot would be beyond the position of a checkpoint.

        The tables are locked against TRUNCATE and ALTER first: a snapshot that is older than one of these sees an empty table."""
        self._connection = self._login.connect(
            application_name=self._application, options=" ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        )
        if self._connection.server_version >= 170_000:
            self._query("SET transaction_timeout = 0")
        self._query(_END_OLDER)
        if self._query("SELECT pg_is_in_recovery()")[0][0]:
            raise InvalidConfigError(
                f'{self._place}: the server is a standby, which gives no snapshot: use the primary, or snapshot="never"',
                setting="snapshot",
            )
        self._query(MESSAGE)
        self._query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for name in self._restored.tables:
            self._lock(name)
        self._import()
        published = {row[0]: row for row in self._query(self._publication_query())}
        for name in self._restored.tables:
            if name not in published:
                raise InvalidConfigError(
                    f"{self._place}: publication {self._publication} does not have {name} any more", setting="publication"
                )
            self._tables[name] = self._described(read_table(self._query, name, self._place), published[name])
        self._check_key()
        self._taken_us = self._query("SELECT (extract(epoch FROM now()) * 1000000)::int8")[0][0]
        log.info("%s: %s are read as of %s", self._place, ", ".join(self._restored.tables), lsn_text(self.lsn))

    def _lock(self, name: str) -> None:
        schema, _, table = name.partition(".")
        try:
            self._query(f"LOCK TABLE {quote(schema)}.{quote(table)} IN ACCESS SHARE MODE")
        except client().Error as error:
            if error.pgcode not in ("42P01", "3F000"):
                raise
            text = self._login.hidden(str(error)).strip()
            message = f"{self._place}: {name} is not read to its end, and is gone: {text}"
            raise InvalidConfigError(message, setting="tables") from None

    def _import(self) -> None:
        """The snapshot of a slot that is made for it alone, and goes with its session."""
        slot = f"holdfast_snapshot_{secrets.token_hex(6)}"
        factory = client().extras.LogicalReplicationConnection
        connection = self._login.connect(application_name=self._application, connection_factory=factory)
        with contextlib.closing(connection), connection.cursor() as cursor:
            try:
                cursor.execute(f"CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT")
            except client().Error as error:
                if error.pgcode != "53400":
                    raise
                text = self._login.hidden(str(error)).strip()
                raise InvalidConfigError(
                    f"{self._place}: the first reading of the tables needs a second slot for a moment: {text}",
                    setting="snapshot",
                ) from None
            _, point, snapshot, _ = cursor.fetchone()
            self._query(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
        self.lsn = lsn_of(point)

    def _publication_query(self) -> str:
        what = "attnames::text[], rowfilter" if self._connection.server_version >= 150_000 else "NULL, NULL"
        return (
            f"SELECT schemaname || '.' || tablename, {what} FROM pg_publication_tables WHERE pubname = {literal(self._publication)}"
        )

    def _described(self, table: Table, published: Sequence[Any]) -> PublishedTable:
        names = published[1] or [each.name for each in table.columns if not each.is_generated]
        partitioned = self._query(f"SELECT relkind = 'p' FROM pg_class WHERE oid = {table.oid}")[0][0]
        key = read_key(self._query, table, self._place)
        return PublishedTable(table, key, frozenset(names), published[2] or "", partitioned)

    def _check_key(self) -> None:
        progress = self._restored
        found = self._tables[progress.tables[0]].key_names
        if progress.key and progress.columns != found:
            raise InvalidConfigError(
                f"{self._place}: {progress.tables[0]} was read up to a key ({', '.join(progress.columns)}), and its key is "
                f"({', '.join(found)}) now: start the job without its state, on a slot of another name",
                setting="snapshot",
            )

    def _query(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description is not None else []

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(client().Error):
                connection.close()

    # ------------------------------------------------------------------------------------------------------------------ the rows

    @property
    def is_read(self) -> bool:
        return self._progress is None

    def read(self, split_id: str) -> ChunkRecords:
        """The next rows, at positions (lsn - 1, number), in front of all changes that they don't have. First those that are late;
        none are left of a table where none come."""
        before = self._progress
        assert before is not None
        if self._late:
            before = before.with_late(tuple(self._late))
        table, text = self._tables[before.tables[0]], _Text()
        with self._connection.cursor() as cursor:
            cursor.copy_expert(self._late_statement(table, before) if before.late else self._statement(table, before), text)
        arrays, count = _parsed(text.content(), len(table.key) + len(self._wanted(table)) + bool(before.late))
        self._rows_max = max(1, min(ROWS_MAX, self._rows_max * 8, CHUNK_BYTES * count // text.size)) if count else ROWS_FIRST
        marks: ChunkMarks | LateMarks
        if before.late:
            marks = self._late_marks(before, arrays.pop(0), is_cut=text.is_cut)
        else:
            marks = self._marks(table, before, arrays[: len(table.key)], count)
        values = dict(zip(self._wanted(table), arrays[len(table.key) :], strict=True))
        batch, rows, letters = self._batch(before.tables[0], values, count)
        positions = np.column_stack([np.full(len(rows), self.lsn - 1), rows + self._given + 1]).astype(np.int64)
        self._given += count
        self._progress = marks.after
        self._late = dict.fromkeys(() if marks.after is None else marks.after.late)
        is_empty = batch.num_rows == 0
        return ChunkRecords(
            split_id,
            None if is_empty else batch,
            None if is_empty else positions,
            position=marks.last,
            dead_letters=letters,
            marks=marks,
        )

    def _marks(self, table: PublishedTable, before: SnapshotProgress, keys: Sequence[pa.Array], count: int) -> ChunkMarks:
        after: SnapshotProgress | None = before.next_table
        if count:
            after = before.behind(table.key_names, tuple(each[-1].as_py().decode() for each in keys))
        last = (self.lsn, 0) if after is None else (self.lsn - 1, self._given + count)
        return ChunkMarks(self.lsn - 1, self._given, before, table.key_names, keys, last, after)

    def _late_marks(self, before: SnapshotProgress, numbers: pa.Array, *, is_cut: bool) -> LateMarks:
        """numbers: of the keys that were asked for, from 1. A row that isn't there is none that the publication shows."""
        counts = [int(each) for each in numbers.to_pylist()]
        done = counts[-1] if is_cut else LATE_ROWS_MAX
        last = (self.lsn - 1, self._given + len(counts))
        return LateMarks(self.lsn - 1, self._given, before, counts, last, before.with_late(before.late[done:]))

    def _wanted(self, table: PublishedTable) -> list[str]:
        return [name for name in self._columns.names if name in table.columns]

    def _statement(self, table: PublishedTable, progress: SnapshotProgress) -> str:
        """Keys, then values. In the texts of the server's own output functions, as the slot sends them.

        Not much beyond CHUNK_BYTES are asked for, by sizes that the server knows without reading large values."""
        keys, wanted = ", ".join(quote(each.name) for each in table.key), self._wanted(table)
        columns = ", ".join([keys, *(quote(name) for name in wanted)])
        conditions = [f"({table.row_filter})"] if table.row_filter else []
        if progress.key:
            conditions.append(f"ROW({keys}) > {_row(table.key, progress.key)}")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        inner = ", ".join(quote(name) for name in dict.fromkeys([*table.key_names, *wanted]))
        select = f"SELECT {inner} FROM {table.rows}{where} ORDER BY {keys} LIMIT {self._rows_max}"
        size = table.size_of(wanted)
        if size:
            summed = f"sum({size}) OVER (ORDER BY {keys} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
            select = f"SELECT *, {summed} AS {_SIZE} FROM ({select}) chunk"
            select = f"SELECT * FROM ({select}) sized WHERE coalesce({_SIZE}, 0) < {CHUNK_BYTES}"
        return f"COPY (SELECT {columns} FROM ({select}) given ORDER BY {keys}) TO STDOUT WITH (FORMAT csv, FORCE_QUOTE *)"

    def _late_statement(self, table: PublishedTable, progress: SnapshotProgress) -> str:
        """The first late keys' rows: which key, the key, and values."""
        asked, wanted = progress.late[:LATE_ROWS_MAX], self._wanted(table)
        columns = ", ".join(f"rows.{quote(name)}" for name in (*table.key_names, *wanted))
        inner = ", ".join(quote(name) for name in dict.fromkeys([*table.key_names, *wanted]))
        where = f" WHERE {table.row_filter}" if table.row_filter else ""
        same = " AND ".join(f"rows.{quote(each.name)} = late.k{index}::{each.type}" for index, each in enumerate(table.key))
        arrays = ", ".join(f"ARRAY[{', '.join(literal(text) for text in texts)}]::text[]" for texts in zip(*asked, strict=True))
        names = ", ".join(f"k{index}" for index in range(len(table.key)))
        return (
            f"COPY (SELECT late.number, {columns} FROM unnest({arrays}) WITH ORDINALITY late({names}, number) "
            f"JOIN (SELECT {inner} FROM {table.rows}{where}) rows ON {same} ORDER BY late.number) "
            "TO STDOUT WITH (FORMAT csv, FORCE_QUOTE *)"
        )

    def _batch(self, table: str, values: Mapping[str, pa.Array], count: int) -> tuple[pa.RecordBatch, Any, list[DeadLetter]]:
        """Rows, which of the chunk's they are, and those that their types lack as letters."""
        rows = np.arange(count, dtype=np.int64)
        try:
            return self._typed(table, values, count), rows, []
        except (pa.ArrowException, ValueError):
            pass
        kept, letters = [], []
        for row in range(count):
            one = {name: each.slice(row, 1) for name, each in values.items()}
            try:
                self._typed(table, one, 1)
                kept.append(row)
            except (pa.ArrowException, ValueError) as error:
                raw = repr({name: each[0].as_py() for name, each in one.items()}).encode()
                at = self._given + row
                position, behind = (self.lsn - 1, at), (self.lsn - 1, at + 1)
                letters.append(DeadLetter(position, behind, f"{table}: {error}", raw, len(kept)))
        readable = {name: each.take(pa.array(kept, pa.int64())) for name, each in values.items()}
        return self._typed(table, readable, len(kept)), np.array(kept, np.int64), letters

    def _typed(self, table: str, values: Mapping[str, pa.Array], count: int) -> pa.RecordBatch:
        schema = pa.schema([*META, *self._columns])
        taken = pa.scalar(self._taken_us).cast(META.field("committed_at").type)
        arrays = [pa.repeat(INSERT, count), pa.repeat(table, count), pa.repeat(taken, count)]
        arrays.append(pa.nulls(count, META.field("unchanged").type))
        for column in self._columns:
            given = values.get(column.name)
            arrays.append(pa.nulls(count, column.type) if given is None else typed(given, column.type))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    # --------------------------------------------------------------------------------------------- changes in front of the snapshot

    def kept(self, changes: Sequence[Change]) -> list[Change]:
        """Those of rows that were given before. The others are in the snapshot, or were deleted in front of it."""
        progress = self._restored
        first, has_begun = progress.tables[0], bool(progress.key)
        asked = [each for each in changes if each.table == first and has_begun and each.op != TRUNCATE]
        now = self._given_before([each.values for each in asked])
        moved = any(each.old is not None for each in asked)
        before = self._given_before([each.values if each.old is None else each.old for each in asked]) if moved else now
        answers = iter(zip(now, before, strict=True))
        kept = []
        for change in changes:
            if change.table not in progress.tables:
                kept.append(change)
            elif change.table != first or not has_begun:
                continue
            elif change.op == TRUNCATE:
                for key in list(self._late):
                    self._note(change, key, is_late=False)
                kept.append(change)
            else:
                kept += [each for each in _on_this_side(change, *next(answers)) if not self._is_late(each)]
        return kept

    def _is_late(self, change: Change) -> bool:
        """Whether a change is of a late row, or makes it one."""
        key = tuple(self._text(change.values, name) for name in self._restored.columns)
        if key in self._late:
            if change.op == DELETE:
                self._note(change, key, is_late=False)
            return True
        missing = [name for name in self._columns.names if change.values.get(name) is UNCHANGED] if change.op == INSERT else []
        if missing:
            if len(self._late) >= LATE_MAX:
                raise InvalidConfigError(
                    f"{self._place}: updates have moved the keys of more than {LATE_MAX} rows of {change.table} while it is read, "
                    f"and the server does not say their values of {', '.join(missing)} (at {lsn_text(change.position[0])}, "
                    f"row {change.position[1]}): ALTER TABLE ... REPLICA IDENTITY FULL, and start the job without its state, on a "
                    "slot of another name",
                    setting="tables",
                )
            self._note(change, key, is_late=True)
        return bool(missing)

    def _note(self, change: Change, key: Key, *, is_late: bool) -> None:
        if is_late:
            self._late[key] = None
        else:
            del self._late[key]
        self._late_changes.append(LateChange(change.position, key, is_late))

    def take_late_changes(self) -> list[LateChange]:
        """Of what `kept` was asked for since the last call."""
        found, self._late_changes = self._late_changes, []
        return found

    def _given_before(self, rows: Sequence[Mapping[str, Value]]) -> list[bool]:
        """Whether the first table's rows with these keys were given; the server compares them, by its own order."""
        if not rows:
            return []
        key, progress = self._tables[self._restored.tables[0]].key, self._restored
        names = [f"k{index}" for index in range(len(key))]
        with self._connection.cursor() as cursor:
            arrays = [
                cursor.mogrify("%s::text[]", ([self._text(row, column.name) for row in rows],)).decode() for column in key
            ]
            theirs = ", ".join(
                f"u.{name}::{column.type}{f' COLLATE {column.collation}' if column.collation else ''}"
                for name, column in zip(names, key, strict=True)
            )
            cursor.execute(
                f"SELECT ROW({theirs}) <= {_row(key, progress.key)} FROM unnest({', '.join(arrays)}) "
                f"WITH ORDINALITY u({', '.join(names)}, number) ORDER BY u.number"
            )
            return [bool(row[0]) for row in cursor.fetchall()]

    def _text(self, row: Mapping[str, Value], column: str) -> str:
        value = row.get(column)
        if value is None or value is UNCHANGED:
            raise InvalidConfigError(
                f"{self._place}: a change of {self._restored.tables[0]} comes without {column}, which is of its key: the table "
                "needs REPLICA IDENTITY DEFAULT, FULL, or the index by which its first reading began",
                setting="snapshot",
            )
        return value.decode()


class _Text:
    """What COPY writes, a row in each call: those behind CHUNK_BYTES are left out, since the server could only be stopped with its
    transaction."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self.size = 0
        self.is_cut = False

    def write(self, row: bytes) -> int:
        if self.size < CHUNK_BYTES:
            self._rows.append(bytes(row))
            self.size += len(row)
        else:
            self.is_cut = True
        return len(row)

    def content(self) -> bytes:
        """Below 2 GiB: a row has no more than 1."""
        content = b"".join(self._rows)
        self._rows.clear()
        return content


def _parsed(text: bytes, count: int) -> tuple[list[pa.Array], int]:
    """So many columns, and their rows."""
    if not text:
        return [pa.array([], pa.binary()) for _ in range(count)], 0
    names = [str(index) for index in range(count)]
    found = pacsv.read_csv(
        pa.BufferReader(text),
        pacsv.ReadOptions(column_names=names, block_size=len(text) + 1, use_threads=False),
        pacsv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        pacsv.ConvertOptions(
            column_types={name: pa.binary() for name in names},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            check_utf8=False,
        ),
    )
    arrays = [column.combine_chunks() for column in found.columns]
    return [each.chunk(0) if isinstance(each, pa.ChunkedArray) else each for each in arrays], found.num_rows


def _on_this_side(change: Change, now: bool, before: bool) -> list[Change]:
    """A change as whoever has the rows up to a key sees it. `before`: the row had a key of this side."""
    if change.old is None or change.op != UPDATE:
        return [change] if now else []
    if now == before:
        return [change] if now else []
    if now:
        return [change._replace(op="insert", old=None)]
    return [change._replace(op="delete", values=change.old, old=None)]


def _row(key: Sequence[KeyColumn], texts: Sequence[str]) -> str:
    return f"ROW({', '.join(f'{literal(text)}::{column.type}' for column, text in zip(key, texts, strict=True))})"


_END_OLDER = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = current_setting('application_name') AND usename = current_user AND pid <> pg_backend_pid()
"""
"""Of older attempts, which would keep the locks."""

_KEY = """
SELECT a.attname::text, format_type(a.atttypid, a.atttypmod),
  coalesce(quote_ident(n.nspname) || '.' || quote_ident(l.collname), '')
FROM pg_class c
JOIN pg_index i ON i.indrelid = c.oid AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY k(number, place)
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
LEFT JOIN pg_collation l ON l.oid = a.attcollation
LEFT JOIN pg_namespace n ON n.oid = l.collnamespace
WHERE c.oid = %d AND k.place <= i.indnkeyatts ORDER BY k.place
"""
