"""A table of PostgreSQL as the target of an exactly-once sink: rows and position in one transaction, by compare-and-set.

The position is a row of `holdfast_positions`. `apply` changes it first, from the value that it expects, and so holds its lock until
the transaction ends: whoever opens the target waits for what is in flight, and a transaction whose owner was replaced changes no
row. A session whose owner is paused would hold that lock for ever, so `open` ends the sessions of older owners, which the server
knows by their application names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from holdfast.operators.connectors.postgres.catalog import Table, literal, quote, read_table
from holdfast.operators.connectors.postgres.login import Login, client
from holdfast.operators.connectors.postgres.session import Session, Sql
from holdfast.operators.connectors.postgres.table import TableFit, fit
from holdfast.operators.functions.predicates import Selection, Where, rows_where, selection
from holdfast.operators.functions.schema import RowType
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import (
    FencedError,
    InvalidConfigError,
    InvalidRowError,
    StorageUnavailableError,
)

log = logging.getLogger("holdfast.postgres")

POSITIONS = "holdfast_positions"
TAKES_MAX = 5
"""Times that an `open` begins again since another one was faster."""
_ENDED = "terminating connection due to administrator command"
_STAGE = "holdfast_rows"
_ROW, _DELETED = "holdfast_row", "holdfast_deleted"
_CONFIG_STATES = ("28", "3D000", "3F000", "42")
"""SQLSTATEs, or their classes, of what no other try mends: rights, missing tables and columns."""
_ROW_STATES = ("22", "23")
"""Of rows that the table refuses: a constraint, or a value out of range."""


class PostgresTarget(CommitTarget):
    """Rows into one table. See PostgresSink."""

    def __init__(
        self, login: Login, table: str, *, mode: str, key: tuple[str, ...], delete_when: Where | None, silence_max_ms: int
    ) -> None:
        self._login = login
        self._table = table
        self._mode = mode
        self._key = key
        self._delete_when = delete_when
        self._silence_max_ms = silence_max_ms
        self._rows: pa.Schema | None = None
        self._fit: TableFit | None = None
        self._deletes: Selection | None = None
        self._session: Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    @property
    def place(self) -> str:
        return f"{self._login.place} table {self._table}"

    @property
    def identity(self) -> str:
        return f"PostgreSQL table {self._table}"

    # ------------------------------------------------------------------------------------------------------ before it is open

    def check(self, schema: pa.Schema) -> None:
        """Also that the table is there, has these columns, and may be written to by the user."""
        self._rows = schema
        self._deletes = selection(self._delete_when, RowType(schema), self.place)
        connection = self._login.connect(application_name="holdfast check")
        try:
            with connection.cursor() as cursor:

                def query(statement: str) -> list[tuple[Any, ...]]:
                    cursor.execute(statement)
                    return list(cursor.fetchall())

                table = read_table(query, self._table, self.place)
                self._fit = self._fitting(table)
                self._check_rights(table, query(_RIGHTS % (literal(table.schema), literal(self._positions(table)))))
        except client().Error as error:
            raise self._login.failed(error) from None
        finally:
            connection.close()

    def _fitting(self, table: Table) -> TableFit:
        assert self._rows is not None
        unwritten = self._delete_when if isinstance(self._delete_when, str) else None
        found = fit(self.place, table.schema, table.name, self._rows, table.columns, key=self._key, unwritten=unwritten)
        if self._mode == "upsert" and frozenset(self._key) not in table.unique_keys:
            raise InvalidConfigError(
                f"{self.place}: upsert needs a primary key or a unique index on exactly ({', '.join(self._key)}), neither "
                "deferrable nor partial",
                setting="key",
            )
        return found

    def _check_rights(self, table: Table, rights: list[tuple[Any, ...]]) -> None:
        wanted = {"INSERT"} if self._mode == "append" else {"INSERT", "SELECT", "UPDATE"}
        wanted |= {"DELETE"} if self._delete_when is not None else set()
        missing = [f"{right} on {self._table}" for right in sorted(wanted - table.rights)]
        may_create, may_stage, exists, may_update = rights[0]
        if not exists and not may_create:
            missing.append(f"CREATE on schema {table.schema}, for {POSITIONS}")
        if exists and not may_update:
            missing.append(f"SELECT, INSERT, UPDATE on {table.schema}.{POSITIONS}")
        if self._mode == "upsert" and not may_stage:
            missing.append("TEMPORARY on the database")
        if missing:
            raise InvalidConfigError(f"{self.place}: the user lacks the right of {'; '.join(missing)}", setting="dsn")

    def staged_schema(self, schema: pa.Schema) -> pa.Schema:
        """What COPY takes; of an upsert with deletions also whether a row deletes its key."""
        assert self._fit is not None
        sent = self._fit.sent_schema
        return sent if self._deletes is None else sent.append(pa.field(_DELETED, pa.bool_()))

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        assert self._fit is not None
        if self._deletes is None:
            self._fit.check_rows(columns)
            return self._fit.encode(columns)
        deleted = rows_where(self._deletes, columns, operator=self.place, subtask=None)
        self._fit.check_rows(columns, deleted)
        arrays = [*self._fit.encode(columns, deleted).columns, pa.array(deleted)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.staged_schema(columns.schema))

    # ------------------------------------------------------------------------------------------------------------- ownership

    def open(self, owner: CommitOwner) -> CommitPosition:
        self.close()
        digest = xxhash.xxh3_64_hexdigest(f"{self._table}\0{owner.sink_id}".encode())
        session = Session(self._login, application_name=f"holdfast {digest} opens", silence_max_ms=self._silence_max_ms)
        try:
            position = session.run(lambda sql: self._open(sql, owner, digest))
        except BaseException as error:
            session.close()
            raise self._clear(error, owner.sink_id) from None
        self._session = session
        return position

    def _open(self, sql: Sql, owner: CommitOwner, digest: str) -> CommitPosition:
        table = read_table(sql.rows, self._table, self.place)
        self._fit = self._fitting(table)
        positions = self._positions(table)
        if not sql.rows("SELECT to_regclass($1) IS NOT NULL", positions)[0][0]:
            sql.rows("SELECT pg_advisory_xact_lock($1)", _CREATING)  # two at once would fail on the catalog's own index
            sql.run(_CREATE_POSITIONS % positions)
        sql.commit()
        if self._mode == "upsert":
            sql.run(self._stage_statement(table))
        for _ in range(TAKES_MAX):
            taken = self._take(sql, owner, digest, table)
            if taken is not None:
                return taken
        raise StorageUnavailableError(f"sink {owner.sink_id}: {self.place} is opened by others at the same time", path=self.place)

    def _take(self, sql: Sql, owner: CommitOwner, digest: str, table: Table) -> CommitPosition | None:
        """One try to store the next owner; None: another one came first. What is refused is judged before anything changes."""
        positions, here = self._positions(table), f"{table.schema}.{table.name}"
        stored = self._stored(sql, positions, owner.sink_id, here)
        taken = owner.take(stored)
        sql.rows("SELECT set_config('application_name', $1, false)", f"holdfast {digest} {taken.owner} {owner.sink_id[:20]}")
        sql.commit()
        self._end_sessions(sql, digest, taken.owner)
        if stored is None:
            values = (owner.sink_id, here, taken.encode().decode())
            done = bool(sql.rows(f"INSERT INTO {positions} VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING 1", *values))
        else:
            assert self._fit is not None
            done = self._move(sql, self._fit, stored, taken)
        if not done:
            sql.rollback()
            return None
        sql.commit()
        return taken

    def _end_sessions(self, sql: Sql, digest: str, epoch: int) -> None:
        """Those of older owners, which may be paused with a lock. Of another user's the role may lack the right: they are waited
        for."""
        try:
            ended = sql.rows(_END_SESSIONS, digest, epoch)
            sql.commit()
            if ended:
                log.info("%s: ended %d sessions of older owners", self.place, len(ended))
        except Exception as error:
            log.warning("%s: sessions of older owners were not ended: %s", self.place, self._login.hidden(str(error)))
            sql.rollback()

    def _stored(self, sql: Sql, positions: str, sink_id: str, here: str) -> CommitPosition | None:
        found = sql.rows(f"SELECT position FROM {positions} WHERE sink_id = $1 AND table_name = $2", sink_id, here)
        sql.commit()
        return CommitPosition.decode(found[0][0], positions) if found else None

    @staticmethod
    def _move(sql: Sql, found: TableFit, expected: CommitPosition, position: CommitPosition) -> bool:
        """Compare and set, in the transaction; false if another position is stored. Waits for a transaction that changes it."""
        values = (position.encode().decode(), expected.sink_id, f"{found.schema}.{found.table}", expected.encode().decode())
        return bool(sql.rows(_MOVE % f"{quote(found.schema)}.{quote(POSITIONS)}", *values))

    def _positions(self, table: Table) -> str:
        return f"{quote(table.schema)}.{quote(POSITIONS)}"

    # ------------------------------------------------------------------------------------------------------------------ rows

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        session = self._session
        if session is None:
            raise StorageUnavailableError(f"sink {expected.sink_id}: {self.place} is not open", path=self.place)
        try:
            session.run(lambda sql: self._apply(sql, batches, expected, position))
        except FencedError:
            raise
        except BaseException as error:
            self.close()
            if _ENDED in str(error) and not session.is_committing and self._is_replaced(expected):
                raise self._fenced(expected) from error
            raise self._clear(error, expected.sink_id) from None

    def _apply(
        self, sql: Sql, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition
    ) -> None:
        found = self._fit
        assert found is not None
        if not self._move(sql, found, expected, position):
            sql.rollback()
            raise self._fenced(expected)
        schema = self.staged_schema(found.sent_schema)
        fitting = (self._fitted(batch, schema, expected.sink_id) for batch in batches)
        if self._mode == "append":
            sql.ingest(found.schema, found.table, fitting, schema)
        else:
            numbered = schema.append(pa.field(_ROW, pa.int64()))
            sql.ingest("", _STAGE, _numbered(fitting, numbered), numbered)
            sql.run(_upsert(found, deletes=self._deletes is not None))
        sql.commit()

    def _fenced(self, expected: CommitPosition) -> FencedError:
        return FencedError(f"sink {expected.sink_id}: another owner has taken {self.place}", sink=expected.sink_id)

    def _is_replaced(self, expected: CommitPosition) -> bool:
        """Whether who has ended our session has also taken the output; false if that can't be found out."""
        found = self._fit
        assert found is not None
        session = Session(self._login, application_name="holdfast looks", silence_max_ms=self._silence_max_ms)
        try:
            positions = f"{quote(found.schema)}.{quote(POSITIONS)}"
            stored = session.run(lambda sql: self._stored(sql, positions, expected.sink_id, f"{found.schema}.{found.table}"))
        except Exception as error:
            log.debug("%s: its owner is not known: %r", self.place, error)
            return False
        finally:
            session.close()
        return stored is not None and stored.owner > expected.owner

    def _fitted(self, batch: pa.RecordBatch, schema: pa.Schema, sink_id: str) -> pa.RecordBatch:
        """Staged rows for the table as it is now: it may have changed since they were staged."""
        if batch.schema.equals(schema):
            return batch
        try:
            return batch.select(schema.names).cast(schema)
        except (KeyError, pa.ArrowException) as error:
            raise InvalidConfigError(
                f"sink {sink_id}: {self.place} has changed since rows were staged, which do not fit: {error}", sinks=[sink_id]
            ) from error

    def _stage_statement(self, table: Table) -> str:
        """A table of the session alone, emptied by each commit: made once, since each one is rows in the catalog."""
        assert self._fit is not None
        columns = ", ".join(quote(each.name) for each in self._fit.columns)
        mark = "" if self._deletes is None else f", false AS {_DELETED}"
        return (
            f"CREATE TEMPORARY TABLE {_STAGE} ON COMMIT DELETE ROWS AS "
            f"SELECT {columns}{mark}, 0::int8 AS {_ROW} FROM {table.quoted} WITH NO DATA"
        )

    def _clear(self, error: BaseException, sink_id: str) -> BaseException:
        """Errors of the server that say that nothing was changed, and would come again, by Holdfast's names; others as they are."""
        state = getattr(error, "sqlstate", None)
        if not state:
            return error
        text = self._login.hidden(str(error)).partition("\n\nQuery was:")[0]
        if state.startswith(_ROW_STATES):
            return InvalidRowError(f"sink {sink_id}: {self.place} refuses a row: {text}", reason=text)
        if state.startswith(_CONFIG_STATES):
            return InvalidConfigError(f"sink {sink_id}: {self.place}: {text}", sinks=[sink_id])
        return error

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _numbered(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    first = 0
    for batch in batches:
        numbers = pa.array(np.arange(first, first + batch.num_rows))
        first += batch.num_rows
        yield pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=schema)


def _upsert(found: TableFit, *, deletes: bool) -> str:
    """Of rows with one key the last counts: it is written, or its key is deleted. The two touch different keys, so that one
    statement may do both."""
    table = f"{quote(found.schema)}.{quote(found.table)}"
    key = ", ".join(quote(name) for name in found.key)
    names = [quote(each.name) for each in found.columns]
    columns, others = ", ".join(names), [name for each, name in zip(found.columns, names, strict=True) if not each.is_key]
    same = " AND ".join(f"old.{quote(name)} = last_rows.{quote(name)}" for name in found.key)
    gone = f"gone AS (DELETE FROM {table} AS old USING last_rows WHERE last_rows.{_DELETED} AND {same})"
    changed = ", ".join(f"{name} = EXCLUDED.{name}" for name in others)
    return (
        f"WITH last_rows AS MATERIALIZED (SELECT DISTINCT ON ({key}) * FROM pg_temp.{_STAGE} ORDER BY {key}, {_ROW} DESC)"
        + (f", {gone}" if deletes else "")
        + f" INSERT INTO {table} ({columns}) SELECT {columns} FROM last_rows"
        + (f" WHERE NOT {_DELETED}" if deletes else "")
        + f" ON CONFLICT ({key}) DO {f'UPDATE SET {changed}' if others else 'NOTHING'}"
    )


_CREATING = 0x686F6C6466617374
"""Key of the lock under which the table of positions is made."""

_CREATE_POSITIONS = """
CREATE TABLE IF NOT EXISTS %s (sink_id text, table_name text, position text NOT NULL,
  changed_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (sink_id, table_name)) WITH (fillfactor = 50)
"""

_MOVE = """
UPDATE %s SET position = $1, changed_at = now() WHERE sink_id = $2 AND table_name = $3 AND position = $4 RETURNING 1
"""

_END_SESSIONS = """
SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
  AND CASE WHEN application_name ~ ('^holdfast ' || $1 || ' [0-9]+ ')
    THEN split_part(application_name, ' ', 3)::int8 < $2 ELSE false END
"""

_RIGHTS = """
SELECT has_schema_privilege(%s, 'CREATE'), has_database_privilege(current_database(), 'TEMPORARY'),
  found IS NOT NULL, found IS NOT NULL AND has_table_privilege(found, 'SELECT') AND has_table_privilege(found, 'INSERT')
    AND has_table_privilege(found, 'UPDATE')
FROM (SELECT to_regclass(%s)::oid AS found) AS positions
"""
