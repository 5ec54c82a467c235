"""`hf.NatsSource`: messages of a JetStream stream, each once; a position is the sequence of a message in its stream.

A reader pulls batches from a consumer of its own, from the sequence on at which it stands, so that the server keeps nothing of its
progress. Messages of a work queue are removed when a checkpoint behind them is complete: the stream is purged up to there, under a
consumer that keeps others away from the subject."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
import itertools
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from holdfast.operators.connectors.json_columns import declared_columns, json_records
from holdfast.operators.connectors.nats.connection import (
    JETSTREAM_NOT_FOUND,
    REQUEST_TIMEOUT_S,
    JetStreamError,
    NatsConnection,
    NatsLogin,
    StreamInfo,
    overlaps,
)
from holdfast.operators.sources.splits import (
    AssignedSplit,
    EnumeratorContext,
    Position,
    ReaderContext,
    Source,
    SourceSplit,
    SplitEnumerator,
    SplitReader,
    SplitRecords,
)
from holdfast.statebackends.errors import InvalidConfigError, SourceDataLostError
from holdfast.statebackends.secrets import Secret

T = TypeVar("T")

CONNECTOR = "NatsSource"

BATCH_MESSAGES = 2_000

BATCH_BYTES = 16 * 1024 * 1024

EXPIRES_S = 0.4
"""Time that a request for messages waits at the server."""

LOOK_S = 30.0
"""Time between two looks at how far a stream has no messages of a quiet subject."""

CONSUMER_IDLE_S = 600
"""Time after which a server forgets the consumer of a reader that is gone."""

ACK_WAIT_S = 7 * 24 * 3600
"""Of a work queue: messages are not acknowledged one by one, and must not come again in the meantime."""

RAW_COLUMNS = pa.schema(
    [
        pa.field("subject", pa.string(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
    ]
)

_NANOSECONDS = 1_000_000_000


class NatsSplit(SourceSplit, frozen=True):
    """The messages of one subject of a stream."""

    stream: str
    subject: str
    """With wildcards; empty: all of the stream."""
    created: str
    """Time at which the stream was made, as its server says it: a stream made anew has other messages under the same numbers."""
    start: int
    """Sequence of the first message that is read."""
    stop: int | None = None
    """Sequence in front of which the split ends; None: it doesn't, or it is not known yet."""
    stop_time: str = ""
    """Of a split that ends in front of the first message of a time to come: that time, ISO."""


class NatsSource(Source[NatsSplit]):
    """Reads a JetStream stream by `nats-py` (extra `holdfast[nats]`). The event time is the server's time of a message.

    servers, user, password, token, credentials, ca_file: as of NatsSink.
    schema: columns of JSON objects, as a pa.Schema, {name: type} or a record type. None: raw messages, with the columns subject,
    sequence, timestamp and data. A message that does not fit the schema fails the job, or leaves by `hf.DEAD_LETTERS`.
    subjects: with wildcards, that don't overlap; each is a split, read in order, and all are shared among the readers. Empty: one
    split with the whole stream.
    start: "earliest", "latest", a sequence, or a time (aware datetime): decided once, when the job starts empty.
    stop: None, "latest" (as of the start), a sequence, or a time: the source ends in front of it. At a time to come it ends
    when the server's clock has passed it, and what came before is read.
    on_data_loss: what to do when messages behind the position are gone: "fail" (SourceDataLostError), or "skip" to the oldest there
    is. A stream that was made anew fails the job in any case.

    A stream with retention "workqueue" is read from its first message, under a consumer that no other one may overlap; messages are
    removed when a checkpoint behind them is complete, `start` and `stop` are refused.

    Messages that were deleted one by one, or superseded by `max_msgs_per_subject`, are not missed."""

    split_type = NatsSplit
    gives_event_times = True

    def __init__(
        self,
        servers: str | Secret | Sequence[str | Secret],
        stream: str,
        *,
        schema: Any = None,
        subjects: Sequence[str] = (),
        start: Any = "earliest",
        stop: Any = None,
        on_data_loss: str = "fail",
        user: str | Secret = "",
        password: Secret | None = None,
        token: Secret | None = None,
        credentials: str = "",
        ca_file: str = "",
        name: str = "",
    ) -> None:
        if not isinstance(stream, str) or not stream or any(character in stream for character in " .*>/\\"):
            raise InvalidConfigError(f"NatsSource: {stream!r} is no name of a stream", setting="stream")
        if isinstance(subjects, str) or len(set(subjects)) < len(subjects):
            raise InvalidConfigError(f"NatsSource: subjects are a sequence of different ones, not {subjects!r}", setting="subjects")
        for first, second in itertools.combinations(subjects, 2):
            if overlaps(first, second):
                said = f"{first!r} and {second!r} overlap: their messages would be read twice"
                raise InvalidConfigError(f"NatsSource: subjects {said}", setting="subjects")
        if on_data_loss not in ("fail", "skip"):
            raise InvalidConfigError(f'NatsSource: on_data_loss is "fail" or "skip", not {on_data_loss!r}', setting="on_data_loss")
        self.name = name or f"nats {stream}"
        self.is_json = schema is not None
        self._schema = RAW_COLUMNS if schema is None else declared_columns(schema, CONNECTOR, self.name)
        self.start = _bound(start, "start", ("earliest", "latest"))
        self.stop = None if stop is None else _bound(stop, "stop", ("latest",))
        self.stream = stream
        self.subjects = tuple(subjects) or ("",)
        self.skips_lost = on_data_loss == "skip"
        several = (servers,) if isinstance(servers, str | Secret) else tuple(servers)
        self.login = NatsLogin(several, user, password, token, credentials, ca_file)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def with_columns(self, names: Sequence[str]) -> NatsSource:
        """The same source, of which only these columns are read."""
        narrow = copy.copy(self)
        narrow._schema = pa.schema([self._schema.field(name) for name in names])
        return narrow

    def create_enumerator(self) -> SplitEnumerator[NatsSplit]:
        return NatsEnumerator(self)

    def create_split_reader(self, context: ReaderContext) -> SplitReader[NatsSplit]:
        return NatsReader(self, context)

    @property
    def splits_per_reader(self) -> int:  # type: ignore[override]
        return len(self.subjects)


def _bound(value: Any, setting: str, words: tuple[str, ...]) -> str | int:
    """A word, or a sequence, or a time as ISO text. Raises InvalidConfigError."""
    if value in words:
        return str(value)
    if type(value) is int and value >= 1:
        return value
    if hasattr(value, "tzinfo") and value.tzinfo is not None:
        return "at " + str(value.isoformat())
    raise InvalidConfigError(
        f"NatsSource: {setting} is {' or '.join(map(repr, words))}, a sequence from 1, or a time with its zone, not {value!r}",
        setting=setting,
    )


class NatsEnumerator(SplitEnumerator[NatsSplit]):
    """One discovery: the numbers of the splits are decided by it."""

    def __init__(self, source: NatsSource) -> None:
        self._source = source
        self._parallelism = 1

    def open(self, context: EnumeratorContext) -> None:
        self._parallelism = context.parallelism

    def discover(self) -> list[NatsSplit]:
        source = self._source
        with connected(source.login) as connection:
            info = connection.stream_info(source.stream)
            if is_work_queue(info) and (source.start != "earliest" or source.stop is not None):
                raise InvalidConfigError(
                    f"NatsSource: {source.stream} is a work queue: it has no start and no stop", setting="start"
                )
            stop_time = _time_to_come(info, source.stop)
            has_sequence = source.stop is not None and not stop_time
            return [
                NatsSplit(
                    f"{source.stream}/{subject}",
                    source.stream,
                    subject,
                    info.created,
                    _sequence(connection, info, subject, source.start),
                    _sequence(connection, info, subject, source.stop) if has_sequence else None,
                    stop_time,
                )
                for subject in source.subjects
            ]

    def owner_of(self, split: NatsSplit, parallelism: int) -> int:
        return self._source.subjects.index(split.subject) % parallelism if split.subject in self._source.subjects else 0


def _time_to_come(info: StreamInfo, bound: str | int | None) -> str:
    """The time of a bound in front of which there may be further messages; empty if it is another one."""
    if not isinstance(bound, str) or not bound.startswith("at "):
        return ""
    return bound.removeprefix("at ") if _seconds_until(bound.removeprefix("at "), info) > 0 else ""


def _seconds_until(time_: str, info: StreamInfo) -> float:
    """Of the server's clock."""
    return (datetime.datetime.fromisoformat(time_) - info.complete_until).total_seconds()


def _sequence(connection: NatsConnection, info: StreamInfo, subject: str, bound: str | int | None) -> int:
    """Of the first message at or behind a bound."""
    assert bound is not None
    if isinstance(bound, int):
        return bound
    if bound == "earliest":
        return max(info.first, 1)
    if bound == "latest":
        return info.last + 1
    consumer = connection.request(
        f"CONSUMER.CREATE.{info.name}",
        {
            "stream_name": info.name,
            "config": {
                "deliver_policy": "by_start_time",
                "opt_start_time": bound.removeprefix("at "),
                "ack_policy": "none",
                "inactive_threshold": 10 * _NANOSECONDS,
                **({"filter_subject": subject} if subject else {}),
            },
        },
    )
    name = consumer["name"]
    try:
        return int(consumer["delivered"]["stream_seq"]) + 1
    finally:
        with contextlib.suppress(JetStreamError):
            connection.request(f"CONSUMER.DELETE.{info.name}.{name}", {})


def _nanoseconds(time_: str) -> int:
    """Since the epoch."""
    since = datetime.datetime.fromisoformat(time_) - datetime.datetime.fromtimestamp(0, datetime.UTC)
    return since // datetime.timedelta(microseconds=1) * 1_000


def is_work_queue(info: StreamInfo) -> bool:
    return bool(info.config.get("retention") == "workqueue")


@contextlib.contextmanager
def connected(login: NatsLogin) -> Any:
    connection = NatsConnection(login, CONNECTOR)
    connection.open()
    try:
        yield connection
    finally:
        connection.close()


@dataclass(slots=True)
class _Progress:
    """One split of a reader."""

    split: NatsSplit
    wanted: int
    """Sequence of the next message, or of one in front of it."""
    consumer: str = ""
    """Its name at the server; empty: it has none yet."""
    is_work_queue: bool = False
    look_at_s: float = 0.0
    """Monotonic time of the next look at the stream, while nothing comes."""
    stop_at_s: float = 0.0
    """Monotonic time of the next look at the server's clock, while it is in front of the time to stop."""

    @property
    def awaits_stop(self) -> bool:
        """The split ends at a time, and no message is known yet to be behind it."""
        return bool(self.split.stop_time) and self.split.stop is None


@dataclass(slots=True)
class _Messages:
    """What came for one request."""

    found: list[Any] = field(default_factory=list)
    status: str = ""
    """Of the message that ended the batch."""
    description: str = ""


class NatsReader(SplitReader[NatsSplit]):
    """Asks for batches of its splits in turn."""

    def __init__(self, source: NatsSource, context: ReaderContext) -> None:
        self._source = source
        self._uid = f"{context.job_id}-{context.uid}"
        self._connection = NatsConnection(source.login, CONNECTOR)
        self._splits: dict[str, _Progress] = {}
        self._paused: set[str] = set()
        self._turn = 0
        self._woken = threading.Event()

    def open(self) -> None:
        self._connection.open()

    def close(self) -> None:
        self._connection.close()

    def wake_up(self) -> None:
        self._woken.set()

    def add_splits(self, splits: Sequence[AssignedSplit[NatsSplit]]) -> None:
        for each in splits:
            progress = _Progress(each.split, each.position[0] if each.position else each.split.start)
            self._check_stream(progress)
            self._splits[each.split_id] = progress

    def _check_stream(self, progress: _Progress) -> None:
        """Sequences of a stream say nothing of another one with its name."""
        info = self._connection.stream_info(progress.split.stream)
        progress.is_work_queue = is_work_queue(info)
        if info.created != progress.split.created:
            raise self._data_lost(progress, "the stream was made anew; to read the new one, give the source another uid")
        if info.last + 1 < progress.wanted:
            self._lost(progress, info.last + 1, f"the stream ends at {info.last}")
        self._check_first(progress, info)

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        self._paused |= set(to_pause)
        self._paused -= set(to_resume)

    def notify_checkpoint_complete(self, positions: Mapping[str, Position]) -> None:
        for split_id, position in positions.items():
            progress = self._splits.get(split_id)
            if progress is None or not progress.is_work_queue or not position:
                continue
            if self._connection.stream_info(progress.split.stream).created != progress.split.created:
                continue  # what was acknowledged went with the old stream
            content: dict[str, Any] = {"seq": position[0]}
            if progress.split.subject:
                content["filter"] = progress.split.subject
            self._connection.request(f"STREAM.PURGE.{progress.split.stream}", content)

    def fetch(self) -> Sequence[SplitRecords]:
        active = [each for split_id, each in self._splits.items() if split_id not in self._paused]
        deadline = time.monotonic() + EXPIRES_S
        while active and not self._woken.is_set():
            self._turn += 1
            for index in range(len(active)):
                progress = active[(self._turn + index) % len(active)]
                wait_s = EXPIRES_S if len(active) == 1 else 0.0
                records = self._read(progress, wait_s)
                if records is not None:
                    return [records]
            left = deadline - time.monotonic()
            if left <= 0 or self._woken.wait(min(left, 0.02)):
                break
        self._woken.clear()
        return []

    def _read(self, progress: _Progress, wait_s: float) -> SplitRecords | None:
        """The next messages of a split, or its end."""
        split = progress.split
        if split.stop is not None and progress.wanted >= split.stop:
            return self._finish(progress)
        if not progress.consumer:
            self._create_consumer(progress)
        came = self._connection.run(self._next(progress, wait_s), wait_s + REQUEST_TIMEOUT_S)
        if not came.found and "exceeds maxbytes" in came.description.lower():
            # One message is longer than a batch may be: it comes alone, or nothing would come any more.
            came = self._connection.run(self._next(progress, wait_s, alone=True), wait_s + REQUEST_TIMEOUT_S)
        if came.status == "503" or (came.status == "409" and "max" not in came.description.lower()):
            progress.consumer = ""  # deleted, or forgotten by the server: it is made again, from where we are
        if not came.found:
            return self._at_end(progress)
        return self._records(progress, came.found)

    def _at_end(self, progress: _Progress) -> SplitRecords | None:
        """Nothing came: is it the end? Where only other subjects get messages the position follows them, so that a message of
        theirs that expires is not taken for one of ours.

        The stream is asked before and behind the look for our next message: what was in it before is seen by the look, and what
        was removed meanwhile behind it."""
        if progress.awaits_stop:
            self._look_for_stop(progress)
        split, now_s = progress.split, time.monotonic()
        if split.stop is None and (progress.is_work_queue or not split.subject or now_s < progress.look_at_s):
            return None
        last = self._connection.stream_info(split.stream).last
        if split.stop is not None and last + 1 < split.stop and now_s < progress.look_at_s:
            return None
        progress.look_at_s = now_s + LOOK_S
        following = self._following(progress)
        self._check_first(progress, self._connection.stream_info(split.stream))
        behind = last + 1 if following is None else following
        if split.stop is not None and behind >= split.stop:
            return self._finish(progress)
        if behind <= progress.wanted:
            return None
        progress.wanted = behind
        return SplitRecords(split.split_id, position=(behind,))

    def _look_for_stop(self, progress: _Progress) -> None:
        """Once the server's clock has passed the time to stop, which message is behind it is settled."""
        split, now_s = progress.split, time.monotonic()
        if now_s < progress.stop_at_s:
            return
        info = self._connection.stream_info(split.stream)
        left_s = _seconds_until(split.stop_time, info)
        if left_s > 0:
            progress.stop_at_s = now_s + min(left_s, LOOK_S)
            return
        self._end_at(progress, _sequence(self._connection, info, split.subject, "at " + split.stop_time))

    @staticmethod
    def _end_at(progress: _Progress, sequence: int) -> None:
        progress.split = msgspec.structs.replace(progress.split, stop=sequence)

    def _following(self, progress: _Progress) -> int | None:
        """Sequence of the next message of a split, as the leader of the stream knows it: a consumer's replica may be behind."""
        content = {"seq": progress.wanted, "next_by_subj": progress.split.subject or ">"}
        try:
            return int(self._connection.request(f"STREAM.MSG.GET.{progress.split.stream}", content)["message"]["seq"])
        except JetStreamError as error:
            if error.code == JETSTREAM_NOT_FOUND:
                return None
            raise

    def _finish(self, progress: _Progress) -> SplitRecords:
        self._splits.pop(progress.split.split_id)
        return SplitRecords(progress.split.split_id, position=(progress.wanted,), finished=True)

    def _create_consumer(self, progress: _Progress) -> None:
        self._check_stream(progress)  # the server forgets consumers with their stream
        split = progress.split
        config: dict[str, Any] = {"filter_subject": split.subject} if split.subject else {}
        name = ""
        if progress.is_work_queue:
            # A queue has one consumer, so that of an earlier attempt ends here. A name of its own for each: an attempt that still
            # lives must not take messages from ours, which we would pass over.
            family = f"holdfast-{_plain(self._uid)}-{xxhash.xxh3_64_hexdigest(f'{self._uid} {split.subject}'.encode())}-"
            self._delete_consumers(split.stream, family)
            name = family + secrets.token_hex(4)
            config |= {"durable_name": name, "ack_policy": "explicit", "deliver_policy": "all", "max_ack_pending": -1,
                       "ack_wait": ACK_WAIT_S * _NANOSECONDS}  # fmt: skip
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": progress.wanted, "ack_policy": "none",
                       "inactive_threshold": CONSUMER_IDLE_S * _NANOSECONDS, "mem_storage": True}  # fmt: skip
        subject = f"CONSUMER.DURABLE.CREATE.{split.stream}.{name}" if name else f"CONSUMER.CREATE.{split.stream}"
        progress.consumer = self._connection.request(subject, {"stream_name": split.stream, "config": config})["name"]

    def _delete_consumers(self, stream: str, family: str) -> None:
        """Those whose names begin so."""
        names: list[str] = []
        while True:
            found = self._connection.request(f"CONSUMER.NAMES.{stream}", {"offset": len(names)})
            page = found.get("consumers") or []
            names += page
            if not page or len(names) >= int(found["total"]):
                break
        for name in names:
            if name.startswith(family):
                with contextlib.suppress(JetStreamError):  # somebody else was faster
                    self._connection.request(f"CONSUMER.DELETE.{stream}.{name}", {})

    async def _next(self, progress: _Progress, wait_s: float, *, alone: bool = False) -> _Messages:
        """One batch, or the next message alone, of any length."""
        client, count = self._connection.client, 1 if alone else BATCH_MESSAGES
        came, ended = _Messages(), asyncio.get_running_loop().create_future()

        async def take(message: Any) -> None:
            status = (message.headers or {}).get("Status") if message.headers else None
            if status is None:
                came.found.append(message)
                if len(came.found) < count:
                    return
            else:
                came.status, came.description = str(status), str(message.headers.get("Description", ""))
                if status == "100":  # a heartbeat
                    return
            if not ended.done():
                ended.set_result(None)

        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, cb=take, pending_msgs_limit=-1, pending_bytes_limit=-1)
        try:
            request: dict[str, Any] = {"batch": count} if alone else {"batch": count, "max_bytes": BATCH_BYTES}
            request |= {"expires": int(wait_s * _NANOSECONDS)} if wait_s else {"no_wait": True}
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{progress.split.stream}.{progress.consumer}"
            await client.publish(subject, json.dumps(request).encode(), reply=inbox)
            await asyncio.wait_for(ended, wait_s + REQUEST_TIMEOUT_S)
        finally:
            await subscription.unsubscribe()
        return came

    def _records(self, progress: _Progress, messages: Sequence[Any]) -> SplitRecords | None:
        # $JS.ACK.<stream>.<consumer>.<times>.<stream sequence>.<consumer sequence>.<ns>.<pending>, or with a domain and an account
        # hash in front of the stream: counted from the end.
        fields = [message.reply.split(".") for message in messages]
        shift = 0 if len(fields[0]) == 9 else 2
        sequences = np.array([int(each[5 + shift]) for each in fields], np.int64)
        nanoseconds = np.array([int(each[7 + shift]) for each in fields], np.int64)
        first = int(np.searchsorted(sequences, progress.wanted))
        if first:  # of a work queue whose last acknowledgement was lost
            sequences, nanoseconds, messages = sequences[first:], nanoseconds[first:], messages[first:]
        if not len(sequences):
            return None
        if sequences[0] != progress.wanted or sequences[-1] - sequences[0] != len(sequences) - 1:
            self._check_first(progress, self._connection.stream_info(progress.split.stream))
        if progress.awaits_stop:
            behind = np.flatnonzero(nanoseconds >= _nanoseconds(progress.split.stop_time))
            if len(behind):
                self._end_at(progress, int(sequences[behind[0]]))
        progress.wanted = int(sequences[-1]) + 1
        records = self._columns(progress.split.split_id, messages, sequences, nanoseconds)
        if len(fields[-1]) > 8 + shift:
            waiting, stop = int(fields[-1][8 + shift]), progress.split.stop
            if stop is not None:  # of the subject's messages the server counts those behind it, too
                waiting = min(waiting, max(0, stop - progress.wanted))
            records = replace(records, pending_records=waiting)
        if progress.split.stop is not None:
            records = records.until(progress.split.stop)
            if records.finished:
                self._splits.pop(progress.split.split_id)
        return records

    def _columns(
        self, split_id: str, messages: Sequence[Any], sequences: npt.NDArray[np.int64], nanoseconds: npt.NDArray[np.int64]
    ) -> SplitRecords:
        source, stamps = self._source, nanoseconds // 1_000_000
        if source.is_json:
            records = json_records(split_id, [message.data for message in messages], sequences + 1, source.schema)
            if records.positions is None:
                return records
            return replace(records, timestamps=stamps[np.isin(sequences + 1, records.positions)])
        made = {
            "subject": lambda: pa.array([message.subject for message in messages], pa.string()),
            "sequence": lambda: pa.array(sequences),
            "timestamp": lambda: pa.array(nanoseconds // 1_000).cast(pa.timestamp("us", "UTC")),
            "data": lambda: pa.array([message.data for message in messages], pa.binary()),
        }
        columns = pa.RecordBatch.from_arrays([made[name]() for name in source.schema.names], schema=source.schema)
        return SplitRecords(split_id, columns, sequences + 1, timestamps=stamps)

    def _check_first(self, progress: _Progress, info: StreamInfo) -> None:
        if not progress.is_work_queue and info.first > progress.wanted:
            self._lost(progress, info.first, f"the oldest message is {info.first}")

    def _lost(self, progress: _Progress, first: int, reason: str) -> None:
        """Raises SourceDataLostError, or goes on at `first`."""
        if not self._source.skips_lost:
            raise self._data_lost(progress, reason)
        progress.wanted = max(first, 1)

    @staticmethod
    def _data_lost(progress: _Progress, reason: str) -> SourceDataLostError:
        return SourceDataLostError(
            f"NatsSource: stream {progress.split.stream}, subject {progress.split.subject or '>'}: messages from "
            f"{progress.wanted} on are gone: {reason}",
            connector=CONNECTOR,
            split=progress.split.split_id,
            position=(progress.wanted,),
            reason=reason,
        )


def _plain(text: str) -> str:
    return "".join(character if character.isalnum() or character in "-_" else "_" for character in text)
