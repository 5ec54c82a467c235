"""One connection that writes, and a watch on its calls: a call whose answer got lost on the way ends, and does not wait for ever.

A call runs on a thread of its own. When nothing comes of it for a while, another connection asks the server what it does: as long
as it works for us, the call goes on, however long that takes; where it waits for us, or is gone, the call is given up, and its
connection with it. It may still have taken effect."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import pyarrow as pa

from holdfast.operators.connectors.postgres.login import CONNECT_TIMEOUT_S, Login, ingest_client

T = TypeVar("T")
log = logging.getLogger("holdfast.postgres")

LOOKS_MAX = 2
"""Looks at the server in a row that find it waiting for us, or don't find it."""

Row = tuple[Any, ...]


class AnswerLostError(Exception):
    """A call did not end, and the server does not work on it: whether it took effect is not known."""


class Sql:
    """The connection as a call uses it: statements of one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        connection = session.connection
        self._connection = connection
        self._cursor = connection.cursor()

    def rows(self, statement: str, *parameters: Any) -> list[Row]:
        """Rows of a query, or of what returns some."""
        self._cursor.execute(statement, parameters or None)
        self._session.progress += 1
        return [tuple(row) for row in self._cursor.fetchall()]

    def run(self, statement: str) -> None:
        self._cursor.execute(statement)
        self._session.progress += 1

    def ingest(self, schema: str, table: str, batches: Iterator[pa.RecordBatch], columns: pa.Schema) -> None:
        """COPY of all batches into a table. `schema`: "" for a temporary table. Raises what the batches raise."""
        feed = _Feed(batches, self._session)
        reader = pa.RecordBatchReader.from_batches(columns, iter(feed))
        options: dict[str, Any] = {"temporary": True} if not schema else {"db_schema_name": schema}
        try:
            self._cursor.adbc_ingest(table, reader, mode="append", **options)
        except Exception:
            if feed.error is not None:
                raise feed.error from None
            raise
        finally:
            reader.close()
        if feed.error is not None:
            raise feed.error

    def commit(self) -> None:
        self._session.is_committing = True
        self._connection.commit()
        self._session.is_committing = False
        self._session.progress += 1

    def rollback(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        """The connection can't be closed before."""
        self._cursor.close()


class _Feed:
    """Batches as they pass through the client, whose own errors would hide theirs."""

    def __init__(self, batches: Iterator[pa.RecordBatch], session: Session) -> None:
        self._batches = batches
        self._session = session
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        session = self._session
        while True:
            session.is_reading = True  # a slow storage is not a lost answer
            try:
                if session.is_given_up:
                    raise AnswerLostError("given up")
                batch = next(self._batches, None)
            except BaseException as error:
                self.error = error
                raise RuntimeError("the rows can't be read") from error
            finally:
                session.is_reading = False
                session.progress += 1
            if batch is None:
                return
            yield batch


class _Call(Generic[T]):
    """A call on its thread."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._act = act
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def start(self) -> _Call[T]:
        threading.Thread(target=self._run, name="holdfast-postgres", daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


class Session:
    """A connection of ADBC, made by the first call. Used by one thread at a time."""

    def __init__(self, login: Login, *, application_name: str, silence_max_ms: int) -> None:
        self._login = login
        self._application_name = application_name
        self._silence_max_ms = silence_max_ms
        self.connection: Any = None
        self.progress = 0
        self.is_reading = False
        """The rows are waited for, not the server."""
        self.is_committing = False
        """A commit is on its way, or its answer did not come."""
        self.is_given_up = False
        self._backend: Row | None = None
        """Process id and start of the server's process."""

    def run(self, act: Callable[[Sql], T]) -> T:
        """`act(sql)`, with its result or error. Raises AnswerLostError when it is given up: the session must not be used then."""
        call = _Call(lambda: self._on_thread(act)).start()
        looks, seen = 0, -1
        connected_by = time.monotonic() + max(CONNECT_TIMEOUT_S, LOOKS_MAX * self._silence_max_ms / 1000)
        while not call.ended.wait(self._silence_max_ms / 1000):
            is_connecting = self._backend is None and time.monotonic() < connected_by
            if is_connecting or self.progress != seen or self.is_reading or self._is_served():
                looks, seen = 0, self.progress
                continue
            looks += 1
            if looks >= LOOKS_MAX:
                self.is_given_up = True
                raise AnswerLostError(f"{self._login.place} does not answer, for {looks} times {self._silence_max_ms} ms")
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def _on_thread(self, act: Callable[[Sql], T]) -> T:
        try:
            if self.connection is None:
                self._connect()
            with contextlib.closing(Sql(self)) as sql:
                return act(sql)
        finally:
            if self.is_given_up:
                self._end()

    def _connect(self) -> None:
        seconds = max(1, self._silence_max_ms // 1000)
        conninfo = self._login.conninfo(
            application_name=self._application_name,
            keepalives_idle=seconds,
            keepalives_interval=max(1, seconds // 3),
            keepalives_count=3,
            tcp_user_timeout=self._silence_max_ms,
            target_session_attrs="read-write",  # of several hosts the one that takes writes
        )
        dbapi = ingest_client()
        try:
            self.connection = dbapi.connect(conninfo, autocommit=False)
        except dbapi.Error as error:
            raise self._login.failed(error) from None
        with contextlib.closing(Sql(self)) as sql:
            self._backend = sql.rows(_SETTINGS, f"{2 * self._silence_max_ms}ms", f"{self._silence_max_ms}ms")[0][:2]
            sql.commit()

    def _is_served(self) -> bool:
        """Whether the server works on our call; asked on a connection of its own, which may fail to get an answer, too."""
        if self._backend is None:
            return False
        look = _Call(self._look).start()
        if not look.ended.wait(CONNECT_TIMEOUT_S):
            return False
        if look.error is not None:
            log.warning("%s: it is not known what the server does: %r", self._login.place, look.error)
        return bool(look.result)

    def _look(self) -> bool:
        assert self._backend is not None
        connection = self._login.connect(application_name="holdfast watch")
        try:
            with connection.cursor() as cursor:
                cursor.execute(_WORKS, self._backend)
                return cursor.fetchone() is not None
        finally:
            connection.close()

    def close(self) -> None:
        """Ends the connection, and the transaction with it. Of one that was given up its thread ends it, should it ever return."""
        if not self.is_given_up:
            self._end()

    def _end(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            try:
                connection.close()
            except Exception as error:
                log.warning("%s: a connection was not closed: %r", self._login.place, error)


_SETTINGS = """
SELECT pg_backend_pid(), (SELECT backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()),
  set_config('idle_in_transaction_session_timeout', $1, false),
  set_config('lock_timeout', $2, false),
  set_config('default_transaction_isolation', 'read committed', false),
  set_config('default_transaction_read_only', 'off', false),
  set_config('synchronous_commit',
    CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false)
"""
"""A position that was confirmed is in the job's state: a crash of the server must not lose it."""

_WORKS = """
SELECT 1 FROM pg_stat_activity
WHERE pid = %s AND backend_start::text = %s AND state = 'active' AND wait_event IS DISTINCT FROM 'ClientRead'
"""
