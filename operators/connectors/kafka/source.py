"""`hf.KafkaSource`: topics of Kafka as a source, and the reader of its partitions."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.operators.connectors.json_columns import declared_columns, json_records
from holdfast.operators.connectors.kafka.connection import CALL_S, SOURCE_OWNED, Client, Connection, Setting, log
from holdfast.operators.connectors.kafka.partitions import (
    Bounds,
    KafkaPartition,
    Offsets,
    PartitionEnumerator,
    check_offsets,
    made_anew,
    now_ms,
    offsets_at,
    topic_ids,
)
from holdfast.operators.sources.splits import (
    AssignedSplit,
    Position,
    ReaderContext,
    Source,
    SplitReader,
    SplitRecords,
)
from holdfast.statebackends.errors import InvalidConfigError, SourceDataLostError, StorageUnavailableError

FETCH_ROWS = 10_000
"""Records of one fetch, at most."""
WAIT_S = 0.2
RETRY_S = 1.0
DISCOVERY_INTERVAL_MS = 30_000

RAW_COLUMNS = pa.schema([
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("timestamp", pa.timestamp("ms", "UTC")),
    ("key", pa.binary()),
    ("value", pa.binary()),
    ("headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))),
])  # fmt: skip

CONSUMER = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "queued.max.messages.kbytes": 32 << 10,
    "fetch.queue.backoff.ms": 10,
}
"""Defaults, which a user may change as far as `SOURCE_OWNED` goes."""


class KafkaSource(Source[KafkaPartition]):
    """Reads topics of Kafka: committed records, each once. Partitions are found while the job runs, and are its splits.

    bootstrap: `host:port`, several with commas. topics: one, or several.
    schema: columns of JSON objects, as a pa.Schema, {name: type} or a record type. None: raw records, with the columns topic,
    partition, offset, timestamp, key, value and headers. A record that does not fit the schema fails the job, or leaves by
    `hf.DEAD_LETTERS`; skip_tombstones=True leaves out null values.
    start: "earliest", "latest", "group" (offsets of `group`, the beginning without), a time, or {(topic, partition): offset}, the
    beginning of others. It counts once: what a checkpoint says comes first, and partitions that are found later are read from their
    beginning. stop: None; "latest" (when the job starts), "group" (where `group` is then), a time, or offsets: the source then ends
    there. A partition with records that the group has no offset of is refused (InvalidConfigError). At a time to come it ends when
    the workers' clocks have passed it, and what was committed before is read, of partitions that are found until then, too.
    group: its offsets are committed when a checkpoint is complete, for others to see; the job does not read them again.
    discovery_interval_ms: time between two looks for new partitions; None: one look.
    on_data_loss: "fail": records that are gone raise SourceDataLostError; "earliest" or "latest": it reads on from there.
    event_time: records have the time that Kafka has of them. settings: of librdkafka; a secret as `hf.Secret`.

    Raises InvalidConfigError for settings that would break this, or that are out of bounds."""

    split_type = KafkaPartition
    splits_per_reader = 0

    def __init__(
        self,
        bootstrap: str,
        topics: str | Sequence[str],
        *,
        schema: Any = None,
        start: Offsets = "earliest",
        stop: Offsets | None = None,
        group: str = "",
        discovery_interval_ms: int | None = DISCOVERY_INTERVAL_MS,
        on_data_loss: str = "fail",
        skip_tombstones: bool = False,
        event_time: bool = True,
        settings: Mapping[str, Setting] | None = None,
        name: str = "",
    ) -> None:
        named = (topics,) if isinstance(topics, str) else tuple(topics)
        if not named or not all(isinstance(topic, str) and topic for topic in named) or len(set(named)) < len(named):
            raise InvalidConfigError(f"KafkaSource: topics are names, each once, not {topics!r}", setting="topics")
        check_offsets("start", start, ("earliest", "latest", "group"))
        if stop is not None:
            check_offsets("stop", stop, ("latest", "group"))
        for bound, offsets in (("start", start), ("stop", stop)):
            if offsets == "group" and not group:
                raise InvalidConfigError(f'KafkaSource: {bound}="group" needs group=', setting="group")
        if on_data_loss not in ("fail", "earliest", "latest"):
            raise InvalidConfigError(
                f'KafkaSource: on_data_loss is "fail", "earliest" or "latest", not {on_data_loss!r}', setting="on_data_loss"
            )
        if discovery_interval_ms is not None and (not isinstance(discovery_interval_ms, int) or discovery_interval_ms < 10):
            raise InvalidConfigError("KafkaSource: discovery_interval_ms is at least 10, or None", setting="discovery_interval_ms")
        self.name = name or f"kafka {','.join(named)}"
        self._connection = Connection("KafkaSource", bootstrap, dict(settings or {}), SOURCE_OWNED)
        self._connection.check("Consumer", {**CONSUMER, "group.id": "holdfast"})
        self._bounds = Bounds(named, start, stop, group, discovery_interval_ms)
        self._json = schema is not None
        self._schema = RAW_COLUMNS if schema is None else declared_columns(schema, "KafkaSource", self.name)
        self._on_data_loss = on_data_loss
        self._skip_tombstones = skip_tombstones
        self.gives_event_times = event_time

    def __repr__(self) -> str:
        return f"KafkaSource({self._connection.bootstrap!r}, {list(self._bounds.topics)})"

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def with_columns(self, names: Sequence[str]) -> KafkaSource:
        """The same source, of which only these columns are read."""
        narrow = copy.copy(self)
        narrow._schema = pa.schema([self._schema.field(name) for name in names])
        return narrow

    def create_enumerator(self) -> PartitionEnumerator:
        return PartitionEnumerator(self._connection, self._bounds)

    def create_split_reader(self, context: ReaderContext) -> PartitionReader:
        decode: Callable[[str, int, list[Any]], SplitRecords]
        if self._json:
            decode = _JsonRecords(self._schema, skip_tombstones=self._skip_tombstones)
        else:
            decode = _RawRecords(self._schema)
        return PartitionReader(
            self._connection, decode, self._bounds.group or f"holdfast-{context.job_id}", self._on_data_loss,
            commits=bool(self._bounds.group), event_time=self.gives_event_times,
        )  # fmt: skip


class _RawRecords:
    """Messages of one partition as columns: those that somebody reads."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def __call__(self, split: str, first: int, messages: list[Any]) -> SplitRecords:
        arrays = [self._column(name, messages) for name in self._schema.names]
        return SplitRecords(split, pa.RecordBatch.from_arrays(arrays, schema=self._schema), _behind(messages))

    def _column(self, name: str, messages: list[Any]) -> pa.Array:
        kind = self._schema.field(name).type
        match name:
            case "topic":
                return pa.repeat(pa.scalar(messages[0].topic(), kind), len(messages))
            case "partition":
                return pa.repeat(pa.scalar(messages[0].partition(), kind), len(messages))
            case "timestamp":
                return pa.array([message.timestamp()[1] for message in messages], pa.int64()).cast(kind)
            case "headers":
                return pa.array([_headers(message) for message in messages], kind)
            case "value":
                return pa.array([message.value() for message in messages], kind)
            case "key":
                return pa.array([message.key() for message in messages], kind)
            case _:
                return pa.array([message.offset() for message in messages], kind)


class _JsonRecords:
    """Values of one partition as the columns of a declared schema; those that do not fit apart."""

    def __init__(self, schema: pa.Schema, *, skip_tombstones: bool) -> None:
        self._schema = schema
        self._skip_tombstones = skip_tombstones

    def __call__(self, split: str, first: int, messages: list[Any]) -> SplitRecords:
        behind = _behind(messages)
        last = (int(behind[-1]),)
        if self._skip_tombstones:
            kept = [message.value() is not None for message in messages]
            if not all(kept):
                messages = [message for message, keeps in zip(messages, kept, strict=True) if keeps]
                behind = behind[np.array(kept)]
                if not messages:
                    return SplitRecords(split, position=last)
        return replace(json_records(split, [message.value() for message in messages], behind, self._schema), position=last)


def _behind(messages: list[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([message.offset() for message in messages], np.int64) + 1


def _headers(message: Any) -> list[dict[str, Any]] | None:
    found = message.headers()
    return None if found is None else [{"name": name, "value": value} for name, value in found]


class PartitionReader(SplitReader[KafkaPartition]):
    """Reads partitions with one consumer, which is a member of no group: `assign`."""

    def __init__(
        self,
        connection: Connection,
        decode: Callable[[str, int, list[Any]], SplitRecords],
        group: str,
        on_data_loss: str,
        *,
        commits: bool,
        event_time: bool,
    ) -> None:
        self._connection = connection
        self._decode = decode
        self._group = group
        self._on_data_loss = on_data_loss
        self._commits = commits
        self._event_time = event_time
        self._splits: dict[tuple[str, int], KafkaPartition] = {}
        self._topics: set[str] = set()
        """Of all splits so far: of one that has ended there may still be records."""
        self._next: dict[str, int] = {}
        """Split -> offset behind what was given of it."""
        self._due: list[SplitRecords] = []
        """News of splits that need no message."""
        self._stop_look_s = 0.0
        """Monotonic time of the next try to learn where the time to stop is, once it has passed."""
        self._client: Client | None = None

    def open(self) -> None:
        self._client = self._connection.open("Consumer", {**CONSUMER, "group.id": self._group})

    @property
    def _opened(self) -> Client:
        assert self._client is not None
        return self._client

    def add_splits(self, splits: Sequence[AssignedSplit[KafkaPartition]]) -> None:
        client = self._opened
        self._check_topics(splits)
        places = []
        for assigned in splits:
            split = assigned.split
            begin = assigned.position[0] if assigned.position else split.start
            self._next[split.split_id] = begin
            if split.stop is not None and begin >= split.stop:
                self._due.append(SplitRecords(split.split_id, position=(begin,), finished=True))
                continue
            self._splits[split.topic, split.partition] = split
            self._topics.add(split.topic)
            places.append(client.package.TopicPartition(split.topic, split.partition, begin))
        if places:
            client.made.incremental_assign(places)

    def _check_topics(self, splits: Sequence[AssignedSplit[KafkaPartition]]) -> None:
        """Offsets of a topic say nothing of another one with its name."""
        topics = sorted({assigned.split.topic for assigned in splits if assigned.split.topic_id})
        if not topics:
            return
        ids = topic_ids(self._connection.open("AdminClient", {}), topics)
        for assigned in splits:
            split = assigned.split
            if split.topic_id and ids.get(split.topic, split.topic_id) != split.topic_id:
                raise made_anew(split.split_id, assigned.position, split.topic)

    # ------------------------------------------------------------------------------------------------------------- records

    def fetch(self) -> Sequence[SplitRecords]:
        self._look_for_stops()
        if self._due:
            due, self._due = self._due, []
            return due
        consumer = self._opened.made
        messages = consumer.consume(FETCH_ROWS, 0)
        if not messages:
            first = consumer.poll(WAIT_S)
            messages = [] if first is None else [first, *consumer.consume(FETCH_ROWS - 1, 0)]
        if self._opened.news.refusal is not None:
            raise self._opened.error(self._opened.news.refusal, "reading")
        found = []
        news = [message for message in messages if message.error() is not None]
        topic = next(iter(self._topics)) if len(self._topics) == 1 and not news else None
        for place, some in _by_partition(messages, topic).items():
            split = self._splits.get(place)
            if split is not None:
                found += self._given(split, some, has_news=bool(news))
        for message in news:
            if message.topic() is None or message.partition() < 0:
                self._judge(None, message.error())
        return found

    def _look_for_stops(self) -> None:
        """Once the time to stop has passed, the offsets there are settled."""
        now = now_ms()
        passed = [each for each in self._splits.values() if _awaits_stop(each) and (each.stop_ms or 0) <= now]
        if not passed or time.monotonic() < self._stop_look_s:
            return
        try:
            admin = self._connection.open("AdminClient", {})
            stops: dict[str, int] = {}
            for stop_ms in sorted({each.stop_ms for each in passed if each.stop_ms is not None}):
                stops |= offsets_at(admin, [each for each in passed if each.stop_ms == stop_ms], stop_ms)
        except StorageUnavailableError as error:  # as reading, it waits for the brokers
            log.warning("where to stop is not known yet: %s", error)
            self._stop_look_s = time.monotonic() + RETRY_S
            return
        for split in passed:
            split = self._end_at(split, stops[split.split_id])
            if self._next[split.split_id] >= stops[split.split_id]:
                self._due.append(SplitRecords(split.split_id, position=(self._next[split.split_id],), finished=True))
                self._leave(split)

    def _end_at(self, split: KafkaPartition, stop: int) -> KafkaPartition:
        ending = self._splits[split.topic, split.partition] = msgspec.structs.replace(split, stop=stop)
        return ending

    def _given(self, split: KafkaPartition, messages: list[Any], *, has_news: bool) -> list[SplitRecords]:
        """What the messages of one partition are, news of it among them where there are any of some partition."""
        records = messages
        reached: int | None = None
        if has_news:
            records = [message for message in messages if message.error() is None]
            for message in messages:
                if message.error() is not None:
                    offset = self._judge(split, message.error(), message.offset())
                    reached = offset if offset is not None else reached
        found = []
        if records and _awaits_stop(split):
            behind = next((each.offset() for each in records if each.timestamp()[1] >= (split.stop_ms or 0)), None)
            split = split if behind is None else self._end_at(split, behind)
        if records:
            made = self._decode(split.split_id, self._next[split.split_id], records)
            if self._event_time and made.columns is not None:
                made = _timed(made, records)
            self._next[split.split_id] = int(records[-1].offset()) + 1
            found.append(made)
        if reached is not None and reached > self._next[split.split_id]:
            self._next[split.split_id] = reached
            found.append(SplitRecords(split.split_id, position=(reached,)))
        return self._bounded(split, found)

    def _bounded(self, split: KafkaPartition, found: list[SplitRecords]) -> list[SplitRecords]:
        """With the end of a split that has one, and what is known to wait in it."""
        if found:
            found[-1] = _waiting(found[-1], self._opened, split, self._next[split.split_id])
        if split.stop is None:
            return found
        kept = []
        for records in found:
            kept.append(records.until(split.stop))
            if kept[-1].finished:
                self._leave(split)
                break
        return kept

    def _leave(self, split: KafkaPartition) -> None:
        del self._splits[split.topic, split.partition]
        client = self._opened
        client.made.incremental_unassign([client.package.TopicPartition(split.topic, split.partition)])

    def _judge(self, split: KafkaPartition | None, error: Any, offset: int = -1) -> int | None:
        """What an error event means: an offset that is reached, nothing, or what is raised."""
        client = self._opened
        codes = client.package.KafkaError
        if error.code() == codes._PARTITION_EOF:
            return offset
        if split is not None and error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
            return self._lost(split, error.str())
        gone = (codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_PARTITION, codes._UNKNOWN_TOPIC)
        if split is not None and error.code() in gone:
            raise self._data_lost(split, "topic or partition deleted", error.str())
        if error.code() in (codes._TRANSPORT, codes._ALL_BROKERS_DOWN, codes._RESOLVE, codes._TIMED_OUT) or error.retriable():
            return None  # the client goes on by itself
        raise client.error(error, f"reading {'' if split is None else split.split_id}")

    def _lost(self, split: KafkaPartition, said: str) -> int:
        """Records are gone: go on where the policy says."""
        if self._on_data_loss == "fail":
            raise self._data_lost(split, "out of range", said)
        client = self._opened
        place = client.package.TopicPartition(split.topic, split.partition)
        first, end = client.made.get_watermark_offsets(place, timeout=CALL_S)
        begin = first if self._on_data_loss == "earliest" else end
        if self._on_data_loss == "earliest" and begin < self._next[split.split_id]:
            begin = end  # the position is behind the end: there is nothing that was not read
        log.warning("%s: offset %d is gone; read on from %d", split.split_id, self._next[split.split_id], begin)
        client.made.incremental_unassign([place])
        client.made.incremental_assign([client.package.TopicPartition(split.topic, split.partition, begin)])
        if begin <= self._next[split.split_id]:
            self._next[split.split_id] = begin
            self._due.append(SplitRecords(split.split_id, position=(begin,)))
        return int(begin)

    def _data_lost(self, split: KafkaPartition, reason: str, said: str) -> SourceDataLostError:
        position = (self._next[split.split_id],)
        return SourceDataLostError(
            f"KafkaSource: {split.split_id}: records from offset {position[0]} on are gone ({said}); see on_data_loss=",
            connector="KafkaSource",
            split=split.split_id,
            position=position,
            reason=reason,
        )

    # --------------------------------------------------------------------------------------------------------------- control

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        client = self._opened
        by_id = {split.split_id: client.package.TopicPartition(split.topic, split.partition) for split in self._splits.values()}
        paused = [by_id[each] for each in to_pause if each in by_id]
        resumed = [by_id[each] for each in to_resume if each in by_id]
        if paused:
            client.made.pause(paused)
        if resumed:
            client.made.resume(resumed)

    def notify_checkpoint_complete(self, positions: Mapping[str, Position]) -> None:
        if not self._commits:
            return
        client = self._opened
        offsets = []
        for split, position in positions.items():
            topic, _, partition = split.rpartition("[")
            if position:
                offsets.append(client.package.TopicPartition(topic, int(partition[:-1]), position[0]))
        try:
            if offsets:
                client.made.commit(offsets=offsets, asynchronous=False)
        except client.package.KafkaException as raised:
            raise client.error(raised, f"committing offsets of group {self._group}") from None

    def close(self) -> None:
        if self._client is not None:
            self._client.made.close()
            self._client = None


def _awaits_stop(split: KafkaPartition) -> bool:
    """It ends at a time, and no record is known yet to be behind it."""
    return split.stop is None and split.stop_ms is not None


def _by_partition(messages: list[Any], topic: str | None) -> dict[tuple[str, int], list[Any]]:
    """Messages of each (topic, partition), in their order. topic: of all of them; None: each says its own."""
    if not messages:
        return {}
    numbers = np.array([message.partition() for message in messages])
    names = [message.topic() for message in messages] if topic is None else [topic]
    changes = numbers[1:] != numbers[:-1]
    if topic is None:
        several = np.array(names, object)
        changes |= several[1:] != several[:-1]
    found: dict[tuple[str, int], list[Any]] = {}
    for start, stop in itertools.pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(messages)]):
        place = names[0 if topic is not None else start], int(numbers[start])
        found.setdefault(place, []).extend(messages[start:stop])
    return found


def _timed(made: SplitRecords, messages: list[Any]) -> SplitRecords:
    """With the time that Kafka has of each record that became a row."""
    assert made.positions is not None
    stamps = np.array([message.timestamp()[1] for message in messages], np.int64)
    if len(stamps) != len(made.positions):
        stamps = stamps[np.isin(_behind(messages), made.positions)]
    return replace(made, timestamps=stamps)


def _waiting(made: SplitRecords, client: Client, split: KafkaPartition, behind: int) -> SplitRecords:
    """With the number of records that the client knows to wait behind it, in front of the split's stop."""
    place = client.package.TopicPartition(split.topic, split.partition)
    _, end = client.made.get_watermark_offsets(place, cached=True)
    if split.stop is not None and end >= 0:
        end = min(end, split.stop)
    return made if end < 0 else replace(made, pending_records=max(0, end - behind))
