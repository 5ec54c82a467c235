"""`PostgresChanges`: the changes of tables as a source, by a replication slot. Each change once, in the order of commits, and in
front of them the rows that the tables had (`initial.py`).

The source has one split, the slot. The server keeps the log from the slot's confirmed position on, which moves when a checkpoint is
complete, and never earlier; it stays in front of the last transaction that came, so that a session begins with a message. So the
slot is behind the position of a restore only if somebody else has moved it, or made it anew: what lies between is lost then."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pyarrow as pa
import xxhash

from holdfast.operators.connectors.postgres.catalog import quote, read_table, split_name
from holdfast.operators.connectors.postgres.change_rows import META, ChangeRows, UnknownRelationError, read_type
from holdfast.operators.connectors.postgres.initial import HEARTBEAT, MESSAGE, OUTPUT, InitialSnapshot, key_names, read_key
from holdfast.operators.connectors.postgres.login import Login, client
from holdfast.operators.connectors.postgres.pgoutput import Begin, MalformedMessageError, Message, decode
from holdfast.operators.connectors.postgres.published import (
    ReadTable,
    TableGoneError,
    find_tables,
    resolve_tables,
    table_problem,
)
from holdfast.operators.connectors.postgres.slot import (
    ChunkRecords,
    ServerIdentity,
    SlotSplit,
    SnapshotMarks,
    SnapshotProgress,
    lsn_of,
    lsn_text,
    timeline_problem,
)
from holdfast.operators.sources.fetching import FetchingReader
from holdfast.operators.sources.splits import (
    AssignedSplit,
    Position,
    ReaderContext,
    Source,
    SourceReader,
    SplitEnumerator,
    SplitReader,
    SplitRecords,
)
from holdfast.statebackends.errors import (
    FencedError,
    HoldfastError,
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
LOOK_S = 10.0
"""Between two looks at whether the tables are still there, and in the publication."""
HEARTBEAT_BYTES = 16 << 20
"""Log of others behind the last message that came, from which on a message of our own lets the slot move on."""


@contextlib.contextmanager
def cursor_of(login: Login, application_name: str) -> Iterator[Any]:
    """Of a connection for a few statements."""
    with contextlib.closing(login.connect(application_name=application_name)) as connection, connection.cursor() as cursor:
        yield cursor


def replication(login: Login, application_name: str) -> Any:
    """A connection for replication."""
    return login.connect(
        application_name=application_name,
        connection_factory=client().extras.LogicalReplicationConnection,
        options=" ".join(f"-c {name}={value}" for name, value in _SETTINGS.items()),
    )


def identify(connection: Any) -> ServerIdentity:
    """Of a connection for replication."""
    with connection.cursor() as cursor:
        cursor.execute("IDENTIFY_SYSTEM")
        system, timeline, *_ = cursor.fetchone()
    return ServerIdentity(str(system), int(timeline))


class PostgresChanges(Source[SlotSplit]):
    """Source of tables of PostgreSQL (14 or newer, `wal_level = logical`) and their changes, by logical replication.

    dsn, password: as of PostgresSink; the user needs the attribute REPLICATION and the right to read the tables.
    tables: one, or several, `table` or `schema.table` each; a column that several have must have one type.
    slot: name of a replication slot, which is created when the job starts first, unless it is there. It stays when the job ends,
    and holds the server's log back: drop it when it is not needed any more. publication: the name of one that has the tables; it
    must be there.
    snapshot: "initial": the rows that the tables have come first, as inserts, each once, and then what changes behind; each table
    needs a primary key, or an index as its replica identity. "never": changes alone, from where the slot is. It counts when the job
    starts empty, and for tables that are added.

    Rows have `op` (insert, update, delete, truncate), `table`, `committed_at`, `unchanged`, and the columns of the tables: new
    values, of a delete those of the replica identity, null otherwise. An update that changes the key is a delete and an insert.
    `unchanged` names columns whose large value an update has not touched, and the server does not send: they are null (none with
    REPLICA IDENTITY FULL). Types that Arrow lacks (numeric without precision, json, uuid, arrays, interval ...) come as the
    server's text.

    A table that is renamed, dropped, or taken out of the publication while the job has it fails the job by name
    (SourceDataLostError), behind its last change; a renamed one goes on under its new name in `tables`. One that is added to
    `tables` of a job with state is read from its beginning, too.

    A checkpoint has the position (LSN, index): each change comes once. A slot that is gone, was invalidated, or was moved beyond
    the position (by others, or since the snapshot is an old one), another server, one that was promoted without all of the log, and
    one whose log ends in front of the position raise SourceDataLostError; a value that its type lacks (an infinite date) is a dead
    letter, or fails the job."""

    split_type = SlotSplit

    def __init__(
        self,
        dsn: str | Secret,
        tables: str | Sequence[str],
        *,
        slot: str,
        publication: str,
        snapshot: str = "initial",
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
        if snapshot not in ("initial", "never"):
            raise InvalidConfigError(f'snapshot is "initial" or "never", not {snapshot!r}', setting="snapshot")
        self.slot, self.publication, self.snapshot = slot, publication, snapshot
        self.keys: dict[str, tuple[str, ...]] = {}
        """Columns of the key, by table; of one without a key none."""
        self.tables, self._columns = self._read_tables(given)

    def _read_tables(self, given: Sequence[str]) -> tuple[tuple[str, ...], pa.Schema]:
        """Names in full, and all columns; the keys are kept. Raises InvalidConfigError."""
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
                if self.snapshot == "initial":
                    read_key(query, table, self.login.place)
                self.keys[names[-1]] = key_names(query, table)
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

    def create_reader(self, context: ReaderContext) -> SourceReader[SlotSplit]:
        return SlotSourceReader(SlotReader(self, job_id=context.job_id, attempt=context.attempt))


def not_published(source: PostgresChanges, missing: Sequence[str]) -> InvalidConfigError:
    """Tables that the publication does not have."""
    return InvalidConfigError(
        f"{source.place}: publication {source.publication} does not have {', '.join(missing)}: CREATE PUBLICATION ... FOR TABLE, "
        "or ALTER PUBLICATION ... ADD TABLE",
        setting="publication",
    )


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
            tables, _ = resolve_tables(source.tables, (), find_tables(cursor, source.publication, source.tables, ()))
        with contextlib.closing(replication(source.login, "holdfast check")) as connection:
            server = identify(connection)
        progress = SnapshotProgress(source.tables) if source.snapshot == "initial" else None
        return [SlotSplit(source.slot, server.system, server.timeline, progress, tables)]

    def _check_publication(self, cursor: Any) -> None:
        source = self._source
        cursor.execute("SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s", (source.publication,))
        missing = sorted(set(source.tables) - {row[0] for row in cursor.fetchall()})
        if missing:
            raise not_published(source, missing)

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
        self._snapshot: InitialSnapshot | None = None
        """What is to be read of the tables; None: nothing."""
        self._held: Message | None = None
        """The first message behind the snapshot: its rows come first."""
        self.begun: SlotSplit | None = None
        """The split as it is read, once it is known that the server has the log in which the position is."""
        self._gone: SourceDataLostError | None = None
        """A table is not there any more, or not in the publication."""
        self._gone_at = 0
        """LSN in front of which all of its changes are."""
        self._looked_at = 0.0
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
            source, split, position = self._source, assigned.split, assigned.position
            self._split = split.split_id
            try:
                self._connection = replication(source.login, f"{self._application} {self._attempt}")
                server = self._check_server(split, position)
                with cursor_of(source.login, "holdfast check") as cursor:
                    self._take_over(cursor, position)
                    tables, progress = self._resolve(cursor, split)
                self._rows = ChangeRows(source.tables, source.columns, position, source.keys, tables)
                self._open_snapshot(progress)
                self._start()
                self.begun = SlotSplit(split.split_id, server.system, server.timeline, progress, tables)
            except client().Error as error:
                raise self._failed(error) from None

    def _resolve(self, cursor: Any, split: SlotSplit) -> tuple[tuple[ReadTable, ...], SnapshotProgress | None]:
        """The tables, and what is still to be read of them: of those that the state does not have, all."""
        source, progress = self._source, split.snapshot
        found = find_tables(cursor, source.publication, source.tables, split.tables)
        tables, added = resolve_tables(source.tables, split.tables, found)
        published = {each.name for each in found if each.entries}
        missing = [name for name in added if name not in published]
        if missing:
            raise not_published(source, missing)
        if added:
            log.info("%s: %s are read, too, which the job's state does not have", source.place, ", ".join(added))
        names = {old: table.name for table in tables for old in table.names}
        left = () if progress is None else tuple(names[each] for each in progress.tables if each in names)
        if progress is not None and left and names.get(progress.tables[0]) == left[0]:
            progress = SnapshotProgress(left, progress.columns, progress.key, progress.late)
        elif left:
            progress = SnapshotProgress(left)
        else:
            progress = None
        if added and source.snapshot == "initial":
            progress = SnapshotProgress(added) if progress is None else msgspec.structs.replace(progress, tables=(*left, *added))
        return tables, progress

    def _check_server(self, split: SlotSplit, position: Position) -> ServerIdentity:
        """A position is one of a server's log: that of another server, or of another line of copies, has other changes there."""
        found = identify(self._connection)
        if split.system and found.system != split.system:
            raise self._lost(position, f"the server is another one (system {found.system}, it was {split.system})")
        if split.timeline and found.timeline != split.timeline and position:
            with self._connection.cursor() as cursor:
                cursor.execute(f"TIMELINE_HISTORY {found.timeline}")
                content = cursor.fetchone()[1]
            history = content if isinstance(content, str) else bytes(content).decode()
            problem = timeline_problem(split.timeline, position[0], found.timeline, history)
            if problem is not None:
                raise self._lost(position, problem)
        return found

    def _open_snapshot(self, progress: SnapshotProgress | None) -> None:
        source = self._source
        if progress is None:
            return
        self._snapshot = InitialSnapshot(
            source.login, source.place, source.publication, source.columns, progress, f"{self._application} snapshot"
        )
        self._snapshot.open()
        self._rows.begin_snapshot(self._snapshot)

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
        source = self._source
        self._cursor = self._connection.cursor()
        options = {"proto_version": "1", "publication_names": quote(source.publication), "messages": "true"}
        self._cursor.start_replication(slot_name=source.slot, decode=False, options=options)
        if self._snapshot is not None:
            self._send("holdfast snapshot", MESSAGE)  # something comes behind it, and shows that all in front of it has

    def _send(self, application_name: str, statement: str) -> None:
        """A message of our own into the log."""
        with cursor_of(self._source.login, application_name) as cursor:
            cursor.execute(statement)

    def _failed(self, error: Exception) -> Exception:
        text = self._source.login.hidden(str(error)).strip()
        if any(known in text for known in _LOST):
            return self._lost(self._rows.position, text)
        if "publication" in text and "does not exist" in text:
            return InvalidConfigError(f"{self._source.place}: {text} (where the slot is in the log)", setting="publication")
        if getattr(error, "pgcode", None) == "42501":
            return InvalidConfigError(f"{self._source.place}: {text}", setting="tables")
        return StorageUnavailableError(f"{self._source.place}: {text}", path=self._source.place)

    def _lost(self, position: Position, reason: str) -> SourceDataLostError:
        place = self._source.place
        at = f" behind {lsn_text(position[0])}" if position else ""
        mend = 'Start the job without its state, on a slot of another name: snapshot="initial" reads the tables anew'
        message = f"{place}: changes{at} are lost: {reason}. {mend}"
        return SourceDataLostError(message, connector=CONNECTOR, split=self._source.slot, position=tuple(position), reason=reason)

    # ---------------------------------------------------------------------------------------------------------------- messages

    def fetch(self) -> Sequence[SplitRecords]:
        split, rows = self._split, self._rows
        if split is None or self._cursor is None:
            return ()
        before = rows.position
        if self._gone is not None and before and before[0] >= self._gone_at:
            raise self._gone
        try:
            self._look()
            if self._held is not None:
                return self._read_snapshot(split, rows)
            self._gather(rows)
            batch, positions, letters = rows.drain()
            self._feed_back()
        except client().Error as error:
            raise self._failed(error) from None
        except (MalformedMessageError, UnknownRelationError) as error:
            raise InvalidRecordError(
                f"{self._source.place}: {error}", operator=self._source.name, split=split, position=rows.position, reason=str(error)
            ) from error
        if rows.position == before and batch is None:
            if self._gone is not None and not rows.is_in_transaction and self._cursor.wal_end >= self._gone_at:
                raise self._gone
            return ()
        late = () if self._snapshot is None else self._snapshot.take_late_changes()
        return [ChunkRecords(split, batch, positions, position=rows.position, dead_letters=letters, late=late)]

    def _read_snapshot(self, split: str, rows: ChangeRows) -> Sequence[SplitRecords]:
        snapshot, held = self._snapshot, self._held
        assert snapshot is not None
        assert held is not None
        records = snapshot.read(split)
        if snapshot.is_read:
            snapshot.close()
            self._snapshot = self._held = None
            rows.end_snapshot()
            rows.take(held)
        self._feed_back()
        return [records]

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
            if self._is_behind_snapshot(decoded):
                self._held = decoded
                return
            try:
                if decoded is not None:
                    rows.take(decoded)
            except TableGoneError as error:
                self._gone, self._gone_at = self._table_gone(str(error)), 0
                return
            if time.monotonic() > deadline and rows.num_rows:
                return

    def _look(self) -> None:
        """Now and then whether the tables are there. One that is not fails the job once all in front of that has come."""
        now, source, begun = time.monotonic(), self._source, self.begun
        if begun is None or self._gone is not None or now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        try:
            with cursor_of(source.login, "holdfast looks") as cursor:
                found = find_tables(cursor, source.publication, source.tables, begun.tables)
                problems = [each for each in (table_problem(table, found) for table in begun.tables) if each is not None]
                if problems:
                    cursor.execute(_END)
                    self._gone_at, self._gone = lsn_of(cursor.fetchone()[0]), self._table_gone("; ".join(problems))
                    cursor.execute(HEARTBEAT)  # something comes behind it
        except (client().Error, HoldfastError) as error:
            log.warning("%s: it is not known whether the tables are there: %s", source.place, source.login.hidden(str(error)))

    def _table_gone(self, reason: str) -> SourceDataLostError:
        place, position = self._source.place, self._rows.position
        mend = (
            "Without it in tables= the job goes on from its state; once a later checkpoint is complete, it can be added again, and "
            'is read from its beginning (snapshot="initial")'
        )
        message = f"{place}: publication {self._source.publication}: {reason}: changes of it are lost. {mend}"
        return SourceDataLostError(message, connector=CONNECTOR, split=self._source.slot, position=tuple(position), reason=reason)

    def _is_behind_snapshot(self, message: Message | None) -> bool:
        return self._snapshot is not None and isinstance(message, Begin) and message.commit_lsn >= self._snapshot.lsn

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
            self._send("holdfast heartbeat", HEARTBEAT)

    def notify_checkpoint_complete(self, positions: Mapping[str, Position]) -> None:
        self._told = max(self._told, *(position[0] for position in positions.values()))
        if self._cursor is not None:
            self._feed_back()

    def close(self) -> None:
        cursor, self._cursor = self._cursor, None
        connection, self._connection = self._connection, None
        snapshot, self._snapshot = self._snapshot, None
        for each in (cursor, connection, snapshot):
            if each is not None:
                with contextlib.suppress(client().Error):
                    each.close()


class SlotSourceReader(FetchingReader[SlotSplit]):
    """Keeps with the slot what a checkpoint's position says of the server, and of the rows that the tables had."""

    def __init__(self, reader: SlotReader) -> None:
        super().__init__(reader, splits_max=1)
        self._slot = reader
        self._marks: SnapshotMarks | None = None

    def poll(self, rows_max: int) -> SplitRecords | int | None:
        records = super().poll(rows_max)
        if isinstance(records, ChunkRecords) and self._slot.begun is not None:
            self._marks_of(self._slot.begun).add(records)
        return records

    def snapshot_state(self, checkpoint_id: int, splits: Sequence[AssignedSplit[SlotSplit]]) -> Sequence[AssignedSplit[SlotSplit]]:
        begun = self._slot.begun
        if begun is None:  # nothing came yet
            return splits
        marks = self._marks_of(begun)
        return [replace(each, split=msgspec.structs.replace(begun, snapshot=marks.at(each.position))) for each in splits]

    def _marks_of(self, begun: SlotSplit) -> SnapshotMarks:
        if self._marks is None:
            self._marks = SnapshotMarks(begun.snapshot)
        return self._marks


_SETTINGS = {
    **OUTPUT,
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

_END = "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END::text"
"""Behind all that was committed before."""
