"""The rows that tables had, as of one LSN, for a source of their changes: read once, in the order of their keys.

A snapshot of the server belongs to a transaction, and ends with it. What a job has given of it is told by the last key, so that a
restart goes on under a snapshot of its own, at a later LSN. Up to there changes of rows that were given come from the slot, and
those of the others are left out: the later snapshot has them. So each row comes once, as it was at some LSN, and all that changed
behind that LSN follows."""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from holdfast.operators.connectors.postgres.catalog import Query, Table, literal, quote, read_table
from holdfast.operators.connectors.postgres.change_rows import INSERT, META, TRUNCATE, UPDATE, Change, typed
from holdfast.operators.connectors.postgres.login import Login, client
from holdfast.operators.connectors.postgres.pgoutput import UNCHANGED, Value
from holdfast.operators.connectors.postgres.slot import ChunkMarks, ChunkRecords, SnapshotProgress, lsn_of, lsn_text
from holdfast.operators.sources.splits import DeadLetter
from holdfast.statebackends.errors import InvalidConfigError

log = logging.getLogger("holdfast.postgres")

ROWS_MAX = 8_192
"""Rows of a chunk."""
ROWS_FIRST = 128
"""Of the first one, which shows how long rows are."""
CHUNK_BYTES = 16 << 20
"""Text of a chunk, about."""

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
            schema, _, table = name.partition(".")
            self._query(f"LOCK TABLE {quote(schema)}.{quote(table)} IN ACCESS SHARE MODE")
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
        """The next rows; at the position (lsn - 1, number), in front of all changes that they don't have."""
        before = self._progress
        assert before is not None
        table = self._tables[before.tables[0]]
        buffer = io.BytesIO()
        with self._connection.cursor() as cursor:
            cursor.copy_expert(self._statement(table, before), buffer)
        keys, values, count = self._parsed(table, buffer.getbuffer())
        is_whole = count < self._rows_max
        if count:
            self._rows_max = max(1, min(ROWS_MAX, self._rows_max * 8, CHUNK_BYTES * count // buffer.tell()))
        after: SnapshotProgress | None = before.next_table
        if not is_whole:
            after = before.behind(table.key_names, tuple(each[-1].as_py().decode() for each in keys))
        last = (self.lsn, 0) if after is None else (self.lsn - 1, self._given + count)
        marks = ChunkMarks(self.lsn - 1, self._given, before, table.key_names, keys, last, after)
        batch, rows, letters = self._batch(before.tables[0], values, count)
        positions = np.column_stack([np.full(len(rows), self.lsn - 1), rows + self._given + 1]).astype(np.int64)
        self._given += count
        self._progress = after
        is_empty = batch.num_rows == 0
        return ChunkRecords(
            split_id,
            None if is_empty else batch,
            None if is_empty else positions,
            position=last,
            dead_letters=letters,
            marks=marks,
        )

    def _statement(self, table: PublishedTable, progress: SnapshotProgress) -> str:
        """Keys, then values. In the texts of the server's own output functions, as the slot sends them."""
        keys = ", ".join(quote(each.name) for each in table.key)
        wanted = [name for name in self._columns.names if name in table.columns]
        columns = ", ".join([keys, *(quote(name) for name in wanted)])
        conditions = [f"({table.row_filter})"] if table.row_filter else []
        if progress.key:
            conditions.append(f"ROW({keys}) > {_row(table.key, progress.key)}")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        only = "" if table.is_partitioned else "ONLY "
        select = f"SELECT {columns} FROM {only}{table.table.quoted}{where} ORDER BY {keys} LIMIT {self._rows_max}"
        return f"COPY ({select}) TO STDOUT WITH (FORMAT csv, FORCE_QUOTE *)"

    def _parsed(self, table: PublishedTable, text: memoryview) -> tuple[list[pa.Array], dict[str, pa.Array], int]:
        """Texts of the key's columns, and of the others by name."""
        wanted = [name for name in self._columns.names if name in table.columns]
        names = [str(index) for index in range(len(table.key) + len(wanted))]
        if not text.nbytes:
            return [pa.array([], pa.binary()) for _ in table.key], {}, 0
        found = pacsv.read_csv(
            pa.BufferReader(text),
            pacsv.ReadOptions(column_names=names, block_size=text.nbytes + 1, use_threads=False),
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
        arrays = [each.chunk(0) if isinstance(each, pa.ChunkedArray) else each for each in arrays]
        keys = arrays[: len(table.key)]
        return keys, dict(zip(wanted, arrays[len(table.key) :], strict=True)), found.num_rows

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
                kept.append(change)
            else:
                kept += _on_this_side(change, *next(answers))
        return kept

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
