"""`hf.NatsSink`: rows as messages of a JetStream stream, exactly once.

Rows and position are one atomic batch: the server stores all of its messages, or none. The last one is the position, on a subject
of its own in the same stream, and the server takes it only if the last message of that subject is still the one that was there."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.operators.connectors.nats.batches import BATCH_MESSAGES, Message, publish_batch
from holdfast.operators.connectors.nats.connection import (
    JETSTREAM_NOT_FOUND,
    REQUEST_TIMEOUT_S,
    JetStreamError,
    NatsConnection,
    NatsLogin,
    StreamInfo,
    covers,
)
from holdfast.operators.sinks.files.json_rows import check_json, is_bytes, is_text, json_objects
from holdfast.operators.sinks.files.parquet import FILE_SIZE_MAX
from holdfast.operators.sinks.refused_rows import shown_row
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import FencedError, InvalidConfigError, InvalidRowError
from holdfast.statebackends.secrets import Secret

log = logging.getLogger("holdfast.nats")

MESSAGE_BYTES_MAX = 1_000_000
"""Default of the server's `max_payload`, about: where the driver can't ask the server."""

HEADER_BYTES = 128
"""Of a message in a batch, at most: the server's limits are of both."""

SUBJECT_BYTES_MAX = 3_500
"""A server closes the connection of who sends a longer line than `max_control_line`, by default 4,096 bytes, of which the subject
is the most."""

TAKEOVERS_MAX = 20

POSITIONS_KEPT = 256
"""Messages with older positions, about: they are purged behind so many commits."""

WRONG_LAST_SEQUENCE = (10071, 10164)
"""JetStream's error codes: another message is the last of the subject; 10164 where the server says no number."""

CONNECTOR = "NatsSink"


class NatsSink(StagedSink):
    """Appends rows to a JetStream stream, exactly once, by `nats-py` (extra `holdfast[nats]`); NATS 2.12 or newer.

    servers: URL or URLs, `nats://host:4222`; one with a login in it has to be an `hf.Secret`.
    stream: it has to be there, with `allow_atomic`, and with subjects that take those of the rows and of the positions.
    subject: of all messages; or subject_column: the column with each row's.
    value: a column of text or bytes as it is; a list of columns: a JSON object of them; None: of all but subject_column.
    sink_id: identity of the output. positions: subject of its positions; `<stream, in lower case>.holdfast.<sink id>` if not given,
    with `%2F` for `/`, and so on.
    user, password, token, credentials, ca_file: login; password and token are `hf.Secret`, user may be.
    message_bytes_max: bytes of a message; a longer row is an InvalidRowError before its checkpoint. None: what the server and the
    stream take, which the driver asks when the job is built; 1,000,000 where it does not reach them.
    rows_per_commit: at most 999, which is the default: readers see a checkpoint with more rows in several steps.
    commit_interval_ms, file_size_max: as of StagedSink.

    A row whose subject the stream does not take, or is one of positions (`<stream>.holdfast.>`), is an InvalidRowError, too.

    Raises InvalidConfigError for settings, and for a stream that can't take batches or would forget the position: a `max_age`
    without `allow_msg_ttl`, or retention by interest."""

    def __init__(
        self,
        servers: str | Secret | Sequence[str | Secret],
        stream: str,
        sink_id: str = "",
        *,
        subject: str = "",
        subject_column: str = "",
        value: str | Sequence[str] | None = None,
        positions: str = "",
        user: str | Secret = "",
        password: Secret | None = None,
        token: Secret | None = None,
        credentials: str = "",
        ca_file: str = "",
        message_bytes_max: int | None = None,
        rows_per_commit: int = BATCH_MESSAGES - 1,
        commit_interval_ms: int = 0,
        file_size_max: int = FILE_SIZE_MAX,
        name: str = "",
    ) -> None:
        if bool(subject) == bool(subject_column):
            raise InvalidConfigError("NatsSink: give either subject or subject_column", setting="subject")
        if subject and not _is_subject(subject):
            raise InvalidConfigError(f"NatsSink: {subject!r} is no subject to publish to", setting="subject")
        if not stream or any(character in stream for character in " .*>/\\"):
            raise InvalidConfigError(f"NatsSink: {stream!r} is no name of a stream", setting="stream")
        if positions and not _is_subject(positions):
            raise InvalidConfigError(f"NatsSink: {positions!r} is no subject for positions", setting="positions")
        if subject and (subject == positions or subject.startswith(_reserved(stream))):
            raise InvalidConfigError(
                f"NatsSink: {subject} is a subject of positions of sinks: rows there would be taken for them", setting="subject"
            )
        if message_bytes_max is not None and (type(message_bytes_max) is not int or message_bytes_max < 1):
            raise InvalidConfigError(
                f"NatsSink: message_bytes_max is a number from 1, not {message_bytes_max!r}", setting="message_bytes_max"
            )
        if type(rows_per_commit) is not int or not 1 <= rows_per_commit < BATCH_MESSAGES:
            raise InvalidConfigError(
                f"NatsSink: rows_per_commit is a number from 1 to {BATCH_MESSAGES - 1}, not {rows_per_commit!r}: rows and their "
                f"position are one batch, and a server takes {BATCH_MESSAGES} messages",
                setting="rows_per_commit",
            )
        several = (servers,) if isinstance(servers, str | Secret) else tuple(servers)
        login = NatsLogin(several, user, password, token, credentials, ca_file)
        columns = value if isinstance(value, str) or value is None else tuple(value)
        super().__init__(
            NatsTarget(login, stream, subject, subject_column, columns, positions, message_bytes_max),
            sink_id,
            rows_per_commit=rows_per_commit,
            commit_interval_ms=commit_interval_ms,
            file_size_max=file_size_max,
            name=name or f"nats {stream}",
        )


class NatsTarget(CommitTarget):
    """See `NatsSink`."""

    def __init__(
        self,
        login: NatsLogin,
        stream: str,
        subject: str,
        subject_column: str,
        value: str | tuple[str, ...] | None,
        positions: str,
        message_bytes_max: int | None,
    ) -> None:
        self._login = login
        self._stream = stream
        self._subject = subject
        self._subject_column = subject_column
        self._value = value
        self._positions = positions
        self._message_bytes_max = message_bytes_max or MESSAGE_BYTES_MAX
        self._takes_what_fits = message_bytes_max is None
        self._taken: tuple[str, ...] = ()
        """Subjects of the stream, as the driver has seen them; empty: it has not."""
        self._connection: NatsConnection | None = None
        self._positions_at = ""
        """Subject of the positions; empty: it was never opened."""
        self._position_headers: dict[str, str] = {}
        self._stored: tuple[int, CommitPosition] | None = None
        """Sequence of the last position, and the position, as far as this target knows."""
        self._commits = 0

    @property
    def place(self) -> str:
        return f"stream {self._stream} of NATS at {self._login.place}"

    @property
    def identity(self) -> str:
        return f"NATS stream {self._stream}"

    # ------------------------------------------------------------------------------------------------------------------ rows

    def check(self, schema: pa.Schema) -> None:
        named = (self._value,) if isinstance(self._value, str) else self._value or ()
        for column in (*named, *filter(None, [self._subject_column])):
            if column not in schema.names:
                raise InvalidConfigError(f"NatsSink: {column!r} is no column of the rows: {schema.names}", column=column)
        if self._subject_column and not is_text(schema.field(self._subject_column).type):
            raise InvalidConfigError("NatsSink: subject_column holds no text", column=self._subject_column)
        self._check_value(schema)
        self._ask_stream()

    def _check_value(self, schema: pa.Schema) -> None:
        if isinstance(self._value, str):
            kind = schema.field(self._value).type
            if not (is_text(kind) or is_bytes(kind)):
                raise InvalidConfigError(
                    f"NatsSink: value={self._value!r} holds {kind}: give text or bytes, or a list of columns for JSON",
                    column=self._value,
                )
            return
        columns = self._json_columns(schema)
        if not columns:
            raise InvalidConfigError("NatsSink: no column is left for the messages", setting="value")
        check_json("NatsSink", schema, columns)

    def _ask_stream(self) -> None:
        """What the stream takes, for the writers, which don't connect. A driver that can't reach it leaves that to `open`."""
        if not self._login.is_known_here:
            return
        connection = NatsConnection(self._login, CONNECTOR)
        try:
            connection.open()
            stream = connection.stream_info(self._stream)
            limit = self._limit(connection, stream)
        except InvalidConfigError:
            raise
        except Exception as error:  # nats-py's own, and those of sockets
            said = type(error).__name__
            log.warning("%s is not reached from here: what it takes is checked when the job runs (%s)", self.place, said)
            return
        finally:
            connection.close()
        self._message_bytes_max = limit if self._takes_what_fits else min(limit, self._message_bytes_max)
        self._taken = tuple(stream.subjects)
        self._check_subject(stream, self._subject)

    def _limit(self, connection: NatsConnection, stream: StreamInfo) -> int:
        """Bytes of the longest message that the server and the stream take in a batch."""
        limit = int(connection.client.max_payload)
        size_max = int(stream.config.get("max_msg_size") or -1)
        limit = (min(limit, size_max) if size_max > 0 else limit) - HEADER_BYTES
        if limit < 1:
            raise InvalidConfigError(
                f"NatsSink: {self.place} takes messages of {limit + HEADER_BYTES} bytes, headers included: that is too little",
                setting="max_msg_size",
            )
        return limit

    def _json_columns(self, schema: pa.Schema) -> list[str]:
        return [name for name in (self._value or schema.names) if name != self._subject_column or self._value]

    def staged_schema(self, schema: pa.Schema) -> pa.Schema:
        fields = [pa.field("data", pa.binary(), nullable=False)]
        return pa.schema([*fields, pa.field("subject", pa.string(), nullable=False)] if self._subject_column else fields)

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        if isinstance(self._value, str):
            data = pc.fill_null(columns.column(self._value).cast(pa.binary()), b"")
        else:
            data = json_objects(columns.select(self._json_columns(columns.schema)))
        lengths = pc.binary_length(data)
        longest = pc.max(lengths).as_py() or 0
        if longest > self._message_bytes_max:
            row = int(pc.index(lengths, longest).as_py())
            reason = f"its message has {longest} bytes, {self._message_bytes_max} are allowed (message_bytes_max)"
            raise self._refused(columns, row, None, reason)
        arrays = [data]
        if self._subject_column:
            arrays.append(self._subjects(columns))
        return pa.RecordBatch.from_arrays(arrays, schema=self.staged_schema(columns.schema))

    def _subjects(self, columns: pa.RecordBatch) -> pa.Array:
        """Of the rows. Raises InvalidRowError."""
        subjects = columns.column(self._subject_column).cast(pa.string())

        def expect(holds: pa.Array, reason: str) -> None:
            if not pc.all(holds).as_py():
                row = int(pc.index(holds, False).as_py())
                raise self._refused(columns, row, self._subject_column, f"{subjects[row].as_py()!r:.100} {reason}")

        # A message whose subject has the character 127 is stored, and never found by its subject.
        legal = pc.match_substring_regex(subjects, r"^[^\s.*>\x7f]+(\.[^\s.*>\x7f]+)*$")
        expect(pc.fill_null(legal, False), "is no subject to publish to")
        short = pc.less_equal(pc.binary_length(subjects), SUBJECT_BYTES_MAX)
        expect(short, f"has more than {SUBJECT_BYTES_MAX} bytes, which no server takes for a subject")
        of_positions = pc.or_(pc.starts_with(subjects, _reserved(self._stream)), pc.equal(subjects, self._positions))
        expect(pc.invert(of_positions), "is a subject of positions of sinks: rows there would be taken for them")
        if self._taken:
            taken = pc.match_substring_regex(subjects, _expression(self._taken))
            expect(taken, f"is none that the stream took when the job was built: {', '.join(self._taken)}")
        return subjects

    def _refused(self, rows: pa.RecordBatch, row: int, column: str | None, reason: str) -> InvalidRowError:
        record = shown_row(rows, row)
        return InvalidRowError(f"NatsSink to {self._stream}: row {record}: {reason}", column=column, reason=reason, record=record)

    # --------------------------------------------------------------------------------------------------------------- commits

    def open(self, owner: CommitOwner) -> CommitPosition:
        self.close()
        connection = self._connection = NatsConnection(self._login, CONNECTOR)
        connection.open()
        stream = connection.stream_info(self._stream)
        subject = self._positions_at = self._find_positions(connection, owner.sink_id)
        self._check_stream(stream, subject)
        if (limit := self._limit(connection, stream)) < self._message_bytes_max:
            raise InvalidConfigError(
                f"NatsSink {owner.sink_id}: {self.place} takes messages of {limit} bytes, and rows of up to "
                f"{self._message_bytes_max} could be staged for it: set message_bytes_max, or raise max_msg_size",
                setting="message_bytes_max",
            )
        refused: Exception
        for _ in range(TAKEOVERS_MAX):
            sequence, stored = self._read(connection, subject)
            position = owner.take(stored)
            try:
                self._stored = self._publish(connection, [], sequence, position), position
            except JetStreamError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
                refused = error
                continue
            self._purge(connection, subject)
            return position
        raise refused

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        connection = self._connection
        assert connection is not None
        if self._stored is None or self._stored[1] != expected:
            self._stored = self._expect(connection, expected)
        messages: list[Message] = []
        for batch in batches:
            subjects = batch.column("subject").to_pylist() if self._subject_column else [self._subject] * batch.num_rows
            messages += zip(subjects, batch.column("data").to_pylist(), strict=True)
        sequence, self._stored = self._stored[0], None  # unknown, until the server has answered
        try:
            self._stored = self._publish(connection, messages, sequence, position), position
        except JetStreamError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                self._expect(connection, expected)
            raise
        self._commits += 1
        if self._commits % POSITIONS_KEPT == 0:
            self._purge(connection, self._positions_at)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _find_positions(self, connection: NatsConnection, sink_id: str) -> str:
        """Subject of a sink's positions: its own. Where an earlier version has put them on one that other ids share, it stays: who
        still holds it by that version is fenced there."""
        if self._positions:
            return self._positions
        subject, shared = position_subject(self._stream, sink_id), _shared_subject(self._stream, sink_id)
        if shared != subject:
            _, stored = self._read(connection, shared)
            if stored is not None and stored.sink_id == sink_id:
                return shared
        return subject

    def _check_stream(self, stream: StreamInfo, positions: str) -> None:
        """Raises InvalidConfigError when the stream would not take the messages as a batch, or would forget the position."""
        where = f"NatsSink: {self.place}"
        config = stream.config
        if not config.get("allow_atomic"):
            raise InvalidConfigError(f"{where} takes no atomic batches: set allow_atomic", setting="allow_atomic")
        for subject in (self._subject, positions):
            self._check_subject(stream, subject)
        if config.get("retention") == "interest":
            raise InvalidConfigError(
                f"{where} keeps only what consumers wait for: it would lose the position", setting="retention"
            )
        if config.get("max_age") and not config.get("allow_msg_ttl"):
            raise InvalidConfigError(
                f"{where} deletes messages by age, the position too: set allow_msg_ttl, by which a position stays",
                setting="max_age",
            )
        self._position_headers = {"Nats-TTL": "never"} if config.get("allow_msg_ttl") else {}

    def _check_subject(self, stream: StreamInfo, subject: str) -> None:
        if subject and not any(covers(pattern, subject) for pattern in stream.subjects):
            raise InvalidConfigError(
                f"NatsSink: {self.place} does not take subject {subject}, its subjects are {', '.join(stream.subjects)}",
                setting="subject",
            )

    def _read(self, connection: NatsConnection, subject: str) -> tuple[int, CommitPosition | None]:
        """From the leader of the stream: a replica may be behind. Sequence 0: there is no position."""
        try:
            message = connection.request(f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": subject})["message"]
        except JetStreamError as error:
            if error.code == JETSTREAM_NOT_FOUND:
                return 0, None
            raise
        data = base64.b64decode(message.get("data", ""))
        return int(message["seq"]), CommitPosition.decode(data, f"{self.place}, subject {subject}")

    def _expect(self, connection: NatsConnection, expected: CommitPosition) -> tuple[int, CommitPosition]:
        """Sequence of the stored position. Raises FencedError when it is another one."""
        sequence, stored = self._read(connection, self._positions_at)
        if stored != expected:
            raise FencedError(
                f"sink {expected.sink_id}: {self.place} is at {stored}, not at {expected}",
                sink=expected.sink_id,
                owner=expected.job_id if stored is None else stored.job_id,
                job_id=expected.job_id,
                held=expected.attempt,
                newer=0 if stored is None else stored.attempt,
            )
        return sequence, expected

    def _publish(
        self, connection: NatsConnection, messages: Sequence[Message], expected: int, position: CommitPosition
    ) -> int:
        """Store all messages and the position, or nothing; the position's sequence. Raises JetStreamError."""
        conditions = {"Nats-Expected-Last-Subject-Sequence": str(expected), **self._position_headers}
        work = publish_batch(connection.client, messages, self._positions_at, position.encode(), conditions)
        return connection.run(work, REQUEST_TIMEOUT_S * 2)

    def _purge(self, connection: NatsConnection, subject: str) -> None:
        """Older positions. A stream may refuse it, and keeps them."""
        try:
            connection.request(f"STREAM.PURGE.{self._stream}", {"filter": subject, "keep": 1})
        except JetStreamError:
            return


def position_subject(stream: str, sink_id: str) -> str:
    """Subject of a sink's positions in a stream: no two ids have the same."""
    return _reserved(stream) + "".join(each if _is_plain(each) else _escaped(each) for each in sink_id)


def _shared_subject(stream: str, sink_id: str) -> str:
    """Of earlier versions: `a.b` and `a_b` had the same."""
    return _reserved(stream) + "".join(each if _is_plain(each) else "_" for each in sink_id)


def _is_plain(character: str) -> bool:
    return character.isalnum() or character in "-_"


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


def _reserved(stream: str) -> str:
    """What subjects of positions begin with."""
    return f"{stream.lower()}.holdfast."


def _expression(patterns: Sequence[str]) -> str:
    """A regular expression of the subjects that a stream takes."""
    words = {"*": r"[^.]+", ">": r".+"}
    each = (r"\.".join(words.get(token) or re.escape(token) for token in pattern.split(".")) for pattern in patterns)
    return f"^({'|'.join(each)})$"


def _is_subject(subject: str) -> bool:
    return bool(subject) and all(token and not any(c in token for c in "*> \t\r\n") for token in subject.split("."))
