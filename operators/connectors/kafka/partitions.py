"""Which partitions a Kafka source reads, and from where to where: found once, kept in checkpoints, decided never again."""

from __future__ import annotations

import datetime as dt
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from holdfast.operators.connectors.kafka.connection import CALL_S, Client, Connection
from holdfast.operators.sources.splits import SourceSplit, SplitEnumerator
from holdfast.statebackends.errors import InvalidConfigError, SourceDataLostError

Offsets: TypeAlias = str | int | dt.datetime | Mapping[tuple[str, int], int]
"""A word, a time (ms since 1970, or a datetime with a zone), or an offset for each (topic, partition)."""


class KafkaPartition(SourceSplit, frozen=True):
    """A partition, with id `topic[partition]`."""

    topic: str
    partition: int
    start: int
    """Offset of the first record."""
    stop: int | None = None
    """Offset behind the last record; None: it has no end, or it is not known yet."""
    topic_id: str = ""
    """Of the topic when the partition was found: one that was made anew has another. Empty where brokers have none."""
    stop_ms: int | None = None
    """Of a partition that ends in front of the first record of a time to come: that time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """From where to where a source reads."""

    topics: tuple[str, ...]
    start: Offsets
    stop: Offsets | None
    group: str
    discovery_interval_ms: int | None

    @property
    def stop_ms(self) -> int | None:
        """The time to stop; None: the source does not stop by time."""
        is_time = isinstance(self.stop, int | dt.datetime)
        return _milliseconds(self.stop) if is_time else None  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Found:
    """What a discovery has found."""

    partitions: Sequence[KafkaPartition]
    is_last: bool
    """It began behind the time to stop: what is found later has no record in front of that."""


class PartitionEnumerator(SplitEnumerator[KafkaPartition]):
    """Finds partitions. Those of a topic that grows are read from their beginning."""

    def __init__(self, connection: Connection, bounds: Bounds) -> None:
        self._connection = connection
        self._bounds = bounds
        stops_by_word = bounds.stop is not None and bounds.stop_ms is None
        self.discovery_interval_ms = None if stops_by_word else bounds.discovery_interval_ms
        self._is_last = False
        self._found: dict[str, str] = {}
        """Id of each known split -> that of its topic."""
        self._admin: Client | None = None

    @property
    def finds_more(self) -> bool:
        return self.discovery_interval_ms is not None and not self._is_last

    def discover(self) -> Found:
        stop_ms = self._bounds.stop_ms
        is_to_come = stop_ms is not None and stop_ms > now_ms()
        if self._admin is None:
            self._admin = self._connection.open("AdminClient", {})
        admin = self._admin
        ids = topic_ids(admin, self._bounds.topics)
        found = []
        for topic in self._bounds.topics:
            admin.check_topic(topic)
            for partition in admin.look_up(topic).partitions:
                found.append(KafkaPartition(split_id(topic, partition), topic, partition, 0, None, ids.get(topic, "")))
        new = [each for each in found if each.split_id not in self._found]
        starts = self._offsets(admin, new, "earliest" if self.has_discovered else self._bounds.start)
        stops: Mapping[str, int] = {}
        if self._bounds.stop is not None and not is_to_come:
            stops = self._stops(admin, new, self._bounds.stop)
        awaited = stop_ms if is_to_come else None
        placed = {
            each.split_id: msgspec.structs.replace(
                each, start=starts[each.split_id], stop=stops.get(each.split_id), stop_ms=awaited
            )
            for each in new
        }
        return Found([placed.get(each.split_id, each) for each in found], stop_ms is not None and not is_to_come)

    def handle_discovered(self, found: Found) -> list[KafkaPartition]:
        self._is_last, stop_ms, interval_ms = found.is_last, self._bounds.stop_ms, self._bounds.discovery_interval_ms
        if stop_ms is not None and interval_ms is not None:  # the last look is right behind the time to stop
            self.discovery_interval_ms = min(interval_ms, max(1, stop_ms - now_ms() + 1))
        new = []
        for each in found.partitions:
            known = self._found.get(each.split_id)
            if known is None:
                self._found[each.split_id] = each.topic_id
                new.append(each)
            elif known and each.topic_id and known != each.topic_id:
                raise made_anew(each.split_id, (), each.topic)
        return new

    def owner_of(self, split: KafkaPartition, parallelism: int) -> int:
        """Partitions of one topic to subtasks in turn, from one on that the topic's name says. Source: Flink's KafkaSource."""
        return (zlib.crc32(split.topic.encode()) + split.partition) % parallelism

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return msgspec.msgpack.encode(self._found)

    def restore_state(self, state: bytes) -> None:
        self._found = msgspec.msgpack.decode(state, type=dict[str, str])

    # ---------------------------------------------------------------------------------------------------------------- offsets

    def _offsets(self, admin: Client, splits: Sequence[KafkaPartition], wanted: Offsets) -> dict[str, int]:
        """Offset of each split."""
        if not splits:
            return {}
        if isinstance(wanted, Mapping):
            given = {each: wanted.get((each.topic, each.partition)) for each in splits}
            missing = [each for each, offset in given.items() if offset is None]
            rest = offsets_at(admin, missing, "earliest" if wanted is self._bounds.start else "latest")
            return {**{each.split_id: offset for each, offset in given.items() if offset is not None}, **rest}
        if wanted == "group":
            found = self._committed(splits)
            return {**found, **offsets_at(admin, _without(found, splits), "earliest")}
        return offsets_at(admin, splits, wanted)

    def _stops(self, admin: Client, splits: Sequence[KafkaPartition], wanted: Offsets) -> dict[str, int]:
        """Offset behind the last record of each split. Raises InvalidConfigError for one with records that the group has none of:
        whether it is to read all of them or none is not known."""
        if wanted != "group":
            return self._offsets(admin, splits, wanted)
        found = self._committed(splits)
        rest = _without(found, splits)
        begins, ends = offsets_at(admin, rest, "earliest"), offsets_at(admin, rest, "latest")
        full = sorted(each.split_id for each in rest if begins[each.split_id] < ends[each.split_id])
        if full:
            raise InvalidConfigError(
                f'KafkaSource: stop="group": group {self._bounds.group} has no offset of {", ".join(full)}, where there are '
                "records; give stop= as offsets",
                setting="stop",
            )
        return {**found, **ends}

    def _committed(self, splits: Sequence[KafkaPartition]) -> dict[str, int]:
        """The group's offsets, of splits that it has one of."""
        if not splits:
            return {}
        client = self._connection.open("Consumer", {"group.id": self._bounds.group})
        try:
            places = [client.package.TopicPartition(each.topic, each.partition) for each in splits]
            answers = client.made.committed(places, timeout=CALL_S)
        except client.package.KafkaException as raised:
            raise client.error(raised, f"offsets of group {self._bounds.group}") from None
        finally:
            client.made.close()
        return {split_id(place.topic, place.partition): int(place.offset) for place in answers if place.offset >= 0}


def _without(found: Mapping[str, int], splits: Sequence[KafkaPartition]) -> list[KafkaPartition]:
    return [each for each in splits if each.split_id not in found]


def split_id(topic: str, partition: int) -> str:
    return f"{topic}[{partition}]"


def offsets_at(admin: Client, splits: Sequence[KafkaPartition], wanted: str | int | dt.datetime) -> dict[str, int]:
    """Of the first record at or behind a time (the end, where none is so new), or of the "earliest" one, or the end."""
    if not splits:
        return {}
    spec = admin.package.admin.OffsetSpec
    if isinstance(wanted, str):
        asked = spec.earliest() if wanted == "earliest" else spec.latest()
    else:
        asked = spec.for_timestamp(_milliseconds(wanted))
    found = _list_offsets(admin, splits, asked)
    behind = [each for each in splits if found[each.split_id] < 0]  # no record is so new
    return {**found, **(_list_offsets(admin, behind, spec.latest()) if behind else {})}


def _milliseconds(time_: int | dt.datetime) -> int:
    return int(time_.timestamp() * 1000) if isinstance(time_, dt.datetime) else time_


def now_ms() -> int:
    """By the clock of this machine: brokers tell nobody theirs."""
    return int(time.time() * 1000)


def _list_offsets(admin: Client, splits: Sequence[KafkaPartition], spec: Any) -> dict[str, int]:
    """Of records that readers of committed ones see."""
    package = admin.package
    places = {each: package.TopicPartition(each.topic, each.partition) for each in splits}
    level = package.IsolationLevel.READ_COMMITTED
    try:
        asked = admin.made.list_offsets(dict.fromkeys(places.values(), spec), isolation_level=level, request_timeout=CALL_S)
        return {each.split_id: int(asked[place].result(CALL_S + 1).offset) for each, place in places.items()}
    except package.KafkaException as raised:
        raise admin.error(raised, f"offsets of {', '.join(sorted({each.topic for each in splits}))}") from None


def topic_ids(admin: Client, topics: Sequence[str]) -> dict[str, str]:
    """Ids of topics, as far as the brokers give them (Kafka 2.8 and newer)."""
    admin.look_up(topics[0])  # describe_topics would say of a refused login that a broker did not answer, and take its whole time
    package = admin.package
    found = {}
    asked = admin.made.describe_topics(package.TopicCollection(list(topics)), request_timeout=CALL_S)
    for topic, answer in asked.items():
        try:
            found[topic] = str(answer.result(CALL_S + 1).topic_id)
        except package.KafkaException as raised:
            unknown = (package.KafkaError.UNKNOWN_TOPIC_OR_PART, package.KafkaError._UNSUPPORTED_FEATURE)
            if raised.args[0].code() not in unknown:
                raise admin.error(raised, f"topic {topic}") from None
    return found


def made_anew(split: str, position: tuple[int, ...], topic: str) -> SourceDataLostError:
    return SourceDataLostError(
        f"KafkaSource: topic {topic} was deleted and made anew: what {split} had is gone. To read the new topic from its "
        "beginning, give the source another uid",
        connector="KafkaSource",
        split=split,
        position=position,
        reason="topic made anew",
    )


def check_offsets(name: str, wanted: Any, words: Sequence[str]) -> None:
    """Raises InvalidConfigError."""
    if isinstance(wanted, Mapping):
        for place, offset in wanted.items():
            is_place = isinstance(place, tuple) and len(place) == 2 and isinstance(place[0], str) and isinstance(place[1], int)
            if not is_place or not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
                said = f"{place!r}: {offset!r}"
                raise InvalidConfigError(f"KafkaSource: {name} maps (topic, partition) to offsets, not {said}", setting=name)
        return
    if isinstance(wanted, dt.datetime):
        if wanted.tzinfo is None:
            raise InvalidConfigError(f"KafkaSource: {name} is a time without a zone: {wanted!r}", setting=name)
        return
    is_time = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0
    if not is_time and wanted not in words:
        said = ", ".join(repr(word) for word in words)
        raise InvalidConfigError(
            f"KafkaSource: {name} is one of {said}, a time, or offsets by (topic, partition); not {wanted!r}", setting=name
        )
