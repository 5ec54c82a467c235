"""`PostgresChanges`: the changes of tables as a source, by a replication slot. Each change once, in the order of commits.

The source has one split, the slot. The server keeps the log from the slot's confirmed position on, which moves when a checkpoint is
complete, and never earlier; it stays in front of the last transaction that came, so that a session begins with a message. So the
slot is behind the position of a restore only if somebody else has moved it, or made it anew: what lies between is lost then."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import xxhash

from holdfast.operators.connectors.postgres.catalog import quote, read_table, split_name
from holdfast.operators.connectors.postgres.change_rows import META, ChangeRows, UnknownRelationError, read_type
from holdfast.operators.connectors.postgres.login import Login, client
from holdfast.operators.connectors.postgres.pgoutput import MalformedMessageError, decode
from holdfast.operators.sources.splits import (
    AssignedSplit,
    Position,
    ReaderContext,
    Source,
    SourceSplit,
    SplitEnumerator,
    SplitReader,
    SplitRecords,
)
from holdfast.statebackends.errors import (
    FencedError,
    InvalidConfigError,
    InvalidRecordError,
    SourceDataLostError,
    StorageUnavailableError,
)
from holdfast.statebackends.secrets import Secret

log = logging.getLogger("holdfast.postgres")

CONNECTOR = "postgres"
ROWS_MAX = 8_192
"""Rows of one fetch, about."""
FETCH_MAX_S = 0.2
WAIT_S = 0.3
"""For a message, in a fetch that has none yet."""
MORE_S = 0.005
"""For a further one: fewer and larger batches."""
FEEDBACK_S = 5.0
"""Between two signs of life: the server ends a session behind `wal_sender_timeout`, 60 s by default."""
TAKEOVER_MAX_S = 30.0
HEARTBEAT_BYTES = 16 << 20
"""Log of others behind the last message that came, from which on a message of our own lets the slot move on."""


class SlotSplit(SourceSplit, frozen=True):
    """A replication slot; `split_id` is its name."""


def lsn_of(text: str) -> int:
    """`16/B374D848` as a number."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


@contextlib.contextmanager
def cursor_of(login: Login, application_name: str) -> Iterator[Any]:
    """Of a connection for a few statements."""
    with contextlib.closing(login.connect(application_name=application_name)) as connection, connection.cursor() as cursor:
        yield cursor


class PostgresChanges(Source[SlotSplit]):
    """Source of the changes of tables of PostgreSQL (14 or newer, `wal_level = logical`), by logical replication.

    dsn, password: as of PostgresSink; the user needs the attribute REPLICATION and the right to read the tables.
    tables: one, or several, `table` or `schema.table` each; a column that several have must have one type.
    slot: name of a replication slot, which is created when the job starts first, unless it is there: changes are read from there
    on. Rows that the tables have by then are not. It stays when the job ends, and holds the server's log back: drop it when it is
    not needed any more. publication: the name of one that has the tables; it must be there.

    Rows have `op` (insert, update, delete, truncate), `table`, `committed_at`, `unchanged`, and the columns of the tables: new
    values, of a delete those of the replica identity, null otherwise. An update that changes the key is a delete and an insert.
    `unchanged` names columns whose large value an update has not touched, and the server does not send: they are null (none with
    REPLICA IDENTITY FULL). Types that Arrow lacks (numeric without precision, json, uuid, arrays, interval ...) come as the
    server's text.

    A checkpoint has the position (LSN, index): each change comes once. A slot that is gone, was invalidated, or was moved beyond
    the position (by others, or since the snapshot is an old one), and a server whose log ends in front of it raise
    SourceDataLostError; a value that its type lacks (an
    infinite date) is a dead letter, or fails the job."""

    split_type = SlotSplit

    def __init__(
        self,
        dsn: str | Secret,
        tables: str | Sequence[str],
        *,
        slot: str,
        publication: str,
        password: Secret | None = None,
        name: str = "postgres changes",
    ) -> None:
        self.name = name
        self.login = Login(dsn, password)
        given = [tables] if isinstance(tables, str) else list(tables)
        if not given or len(set(given)) != len(given):
            raise InvalidConfigError(f"tables names at least one table, each once, not {tables!r}", setting="tables")
        if not isinstance(slot, str) or not slot or len(slot) > 63 or not set(slot) <= set("abcdefghijklmnopqrstuvwxyz0123456789_"):
            raise InvalidConfigError(f"slot has 1..63 of a-z, 0-9 and _, not {slot!r}", setting="slot")
        if not isinstance(publication, str) or not publication:
            raise InvalidConfigError("publication names one", setting="publication")
        self.slot, self.publication = slot, publication
        self.tables, self._columns = self._read_tables(given)

    def _read_tables(self, given: Sequence[str]) -> tuple[tuple[str, ...], pa.Schema]:
        """Names in full, and all columns. Raises InvalidConfigError."""
        for each in given:
            split_name(each)
        names, columns = [], {each.name: each for each in META}
        with cursor_of(self.login, "holdfast check") as cursor:

            def query(statement: str) -> list[tuple[Any, ...]]:
                cursor.execute(statement)
                return list(cursor.fetchall())

            for each in given:
                table = read_table(query, each, self.login.place)
                names.append(f"{table.schema}.{table.name}")
                for column in table.columns:
                    wanted = pa.field(column.name, read_type(column))
                    if columns.setdefault(column.name, wanted) != wanted:
                        raise InvalidConfigError(
                            f"{self.login.place}: column {column.name} of {each} ({column.shown}) has the name of another one, of "
                            f"type {columns[column.name].type}: read the tables by sources of their own",
                            column=column.name,
                        )
        return tuple(names), pa.schema([each for name, each in columns.items() if name not in META.names])

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*META, *self._columns])

    @property
    def columns(self) -> pa.Schema:
        """Of the tables."""
        return self._columns

    @property
    def place(self) -> str:
        return f"{self.login.place} slot {self.slot}"

    def create_enumerator(self) -> SplitEnumerator[SlotSplit]:
        return SlotEnumerator(self)

    def create_split_reader(self, context: ReaderContext) -> SplitReader[SlotSplit]:
        return SlotReader(self, job_id=context.job_id, attempt=context.attempt)


class SlotEnumerator(SplitEnumerator[SlotSplit]):
    """Finds the one split, and makes the slot that it is."""

    def __init__(self, source: PostgresChanges) -> None:
        self._source = source

    def discover(self) -> list[SlotSplit]:
        source = self._source
        with cursor_of(source.login, "holdfast check") as cursor:
            self._check_publication(cursor)
            cursor.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", (source.slot,))
            if cursor.fetchone() is None:
                self._create_slot(cursor)
        return [SlotSplit(source.slot)]

    def _check_publication(self, cursor: Any) -> None:
        source = self._source
        cursor.execute("SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s", (source.publication,))
        missing = sorted(set(source.tables) - {row[0] for row in cursor.fetchall()})
        if missing:
            raise InvalidConfigError(
                f"{source.place}: publication {source.publication} does not have {', '.join(missing)}: CREATE PUBLICATION ... FOR "
                "TABLE, or ALTER PUBLICATION ... ADD TABLE",
                setting="publication",
            )

    def _create_slot(self, cursor: Any) -> None:
        source = self._source
        try:
            cursor.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (source.slot,))
        except client().Error as error:
            text = source.login.hidden(str(error)).strip()
            if error.pgcode in ("55000", "42501", "53400"):  # wal_level, rights, max_replication_slots
                raise InvalidConfigError(f"{source.place} can't be created: {text}", setting="slot") from None
            raise StorageUnavailableError(f"{source.place} can't be created: {text}", path=source.place) from None
        log.info("%s: created", source.place)


class SlotReader(SplitReader[SlotSplit]):
    """Reads one slot. Its session is the only one that the slot can have: an older attempt's is ended."""

    def __init__(self, source: PostgresChanges, *, job_id: str, attempt: int) -> None:
        self._source = source
        self._attempt = attempt
        self._application = f"holdfast {xxhash.xxh3_64_hexdigest(f'{job_id} {source.slot}'.encode())}"
        self._split: str | None = None
        self._rows = ChangeRows((), pa.schema([]), ())
        self._connection: Any = None
        self._cursor: Any = None
        self._told = 0
        """LSN up to which a complete checkpoint has all."""
        self._flushed = 0
        """What the server knows of it."""
        self._fed_back = 0.0
        self._heartbeat_at = 0

    # ------------------------------------------------------------------------------------------------------------ the session

    def add_splits(self, splits: Sequence[AssignedSplit[SlotSplit]]) -> None:
        for assigned in splits:
            source = self._source
            self._split = assigned.split_id
            self._rows = ChangeRows(source.tables, source.columns, assigned.position)
            try:
                with cursor_of(source.login, "holdfast check") as cursor:
                    self._take_over(cursor, assigned.position)
                self._start()
            except client().Error as error:
                raise self._failed(error) from None

    def _take_over(self, cursor: Any, position: Position) -> None:
        """Ends the session of an older attempt, and looks at the slot. Raises FencedError, InvalidConfigError, SourceDataLostError,
        StorageUnavailableError."""
        source = self._source
        deadline = time.monotonic() + TAKEOVER_MAX_S
        while True:
            cursor.execute(_SLOT, (source.slot,))
            found = cursor.fetchone()
            if found is None:
                raise self._lost(position, "the slot is not there any more")
            plugin, is_here, confirmed, wal_status, active_pid, application, end = found
            if plugin != "pgoutput" or not is_here:
                what = "of another database" if plugin == "pgoutput" else f"of plugin {plugin}, not pgoutput"
                raise InvalidConfigError(f"{source.place} is {what}", setting="slot")
            if wal_status == "lost" or confirmed is None:
                raise self._lost(position, "the server has invalidated the slot (max_slot_wal_keep_size, or idle for too long)")
            if position and lsn_of(confirmed) > position[0]:
                why = "a later checkpoint or another client has moved it, or it was made anew"
                raise self._lost(position, f"the slot is at {confirmed}: {why}")
            if position and end is not None and lsn_of(end) < position[0]:
                raise self._lost(position, f"the server's log ends at {end}: it is another one, or was restored from a backup")
            if active_pid is None:
                return
            self._end(cursor, active_pid, application or "")
            if time.monotonic() > deadline:
                raise StorageUnavailableError(f"{source.place} stays in use by session {active_pid}", path=source.place)
            time.sleep(0.05)

    def _end(self, cursor: Any, pid: int, application: str) -> None:
        """An older attempt's session, or a former one of ours; no other's."""
        ours, _, attempt = application.rpartition(" ")
        if ours != self._application or not attempt.isdigit():
            raise InvalidConfigError(
                f"{self._source.place} is in use by another client (session {pid}, {application!r}): give each job its own slot",
                setting="slot",
            )
        if int(attempt) > self._attempt:
            raise FencedError(f"{self._source.place} is read by attempt {attempt}, this is {self._attempt}", held=self._attempt)
        cursor.execute("SELECT pg_terminate_backend(%s)", (pid,))

    def _start(self) -> None:
        """From where the slot is: it is never behind our position, and what we have is skipped."""
        source, psycopg2 = self._source, client()
        self._connection = source.login.connect(
            application_name=f"{self._application} {self._attempt}",
            connection_factory=psycopg2.extras.LogicalReplicationConnection,
            options=" ".join(f"-c {name}={value}" for name, value in _SETTINGS.items()),
        )
        self._cursor = self._connection.cursor()
        options = {"proto_version": "1", "publication_names": quote(source.publication), "messages": "true"}
        self._cursor.start_replication(slot_name=source.slot, decode=False, options=options)

    def _failed(self, error: Exception) -> Exception:
        text = self._source.login.hidden(str(error)).strip()
        if any(known in text for known in _LOST):
            return self._lost(self._rows.position, text)
        return StorageUnavailableError(f"{self._source.place}: {text}", path=self._source.place)

    def _lost(self, position: Position, reason: str) -> SourceDataLostError:
        place = self._source.place
        at = f" behind {lsn_text(position[0])}" if position else ""
        mend = "Start the job without its state, on a slot of another name, and fill in what it has from the tables"
        message = f"{place}: changes{at} are lost: {reason}. {mend}"
        return SourceDataLostError(message, connector=CONNECTOR, split=self._source.slot, position=tuple(position), reason=reason)

    # ---------------------------------------------------------------------------------------------------------------- messages

    def fetch(self) -> Sequence[SplitRecords]:
        split, rows = self._split, self._rows
        if split is None or self._cursor is None:
            return ()
        before = rows.position
        try:
            self._gather(rows)
            self._feed_back()
        except client().Error as error:
            raise self._failed(error) from None
        except (MalformedMessageError, UnknownRelationError) as error:
            raise InvalidRecordError(
                f"{self._source.place}: {error}", operator=self._source.name, split=split, position=rows.position, reason=str(error)
            ) from error
        batch, positions, letters = rows.drain()
        if rows.position == before:
            return ()
        return [SplitRecords(split, batch, positions, position=rows.position, dead_letters=letters)]

    def _gather(self, rows: ChangeRows) -> None:
        """Messages that are there, or that come soon; about ROWS_MAX rows of them, at most."""
        deadline = time.monotonic() + FETCH_MAX_S
        while rows.num_rows < ROWS_MAX:
            message = self._cursor.read_message()
            if message is None:
                if rows.last_commit_lsn and not rows.is_in_transaction:
                    rows.advance(self._cursor.wal_end)  # all in front of it was sent
                wait_s = MORE_S if rows.num_rows else WAIT_S
                if not select.select([self._cursor], [], [], wait_s)[0] or time.monotonic() > deadline + WAIT_S:
                    return
                continue
            decoded = decode(message.payload)
            if decoded is not None:
                rows.take(decoded)
            if time.monotonic() > deadline and rows.num_rows:
                return

    def _feed_back(self) -> None:
        """Tells the server that we live, and what need not be kept.

        Never the last transaction: psycopg2 confirms by itself what it hears of the log, beyond our checkpoint, as long as the last
        message that came is confirmed, or none came."""
        flush, now = max(self._flushed, min(self._told, self._rows.last_commit_lsn)), time.monotonic()
        if flush > self._flushed or now >= self._fed_back + FEEDBACK_S:
            self._flushed, self._fed_back = flush, now
            self._cursor.send_feedback(flush_lsn=flush, force=True)
        self._beat()

    def _beat(self) -> None:
        """Where only others write, a message of our own lets the slot follow the log."""
        last, end = self._rows.last_commit_lsn, self._cursor.wal_end
        if end > max(last, self._heartbeat_at) + HEARTBEAT_BYTES:
            self._heartbeat_at = end
            with cursor_of(self._source.login, "holdfast heartbeat") as cursor:
                cursor.execute("SELECT pg_logical_emit_message(true, 'holdfast', '')")

    def notify_checkpoint_complete(self, positions: Mapping[str, Position]) -> None:
        self._told = max(self._told, *(position[0] for position in positions.values()))
        if self._cursor is not None:
            self._feed_back()

    def close(self) -> None:
        cursor, self._cursor = self._cursor, None
        connection, self._connection = self._connection, None
        for each in (cursor, connection):
            if each is not None:
                with contextlib.suppress(client().Error):
                    each.close()


_SETTINGS = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "timezone": "UTC",
    "bytea_output": "hex",
    "wal_sender_timeout": "3600000",  # a job that is held up does not fetch; who takes the slot over ends the session
    "tcp_keepalives_idle": "30",
}

_LOST = ("requested WAL segment", "can no longer get changes", "can no longer access replication slot", "has been invalidated")
"""Of the server's messages."""

_SLOT = """
SELECT s.plugin::text, s.database = current_database(), s.confirmed_flush_lsn::text, s.wal_status, s.active_pid, a.application_name,
  CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_flush_lsn()::text END
FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = %s
"""
