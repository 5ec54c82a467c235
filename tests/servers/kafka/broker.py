"""What one broker holds: its topics, the coordinators, its clock, and who waits for new rows. Handlers of requests act on it.

Folder: `journal.jsonl` (topics, transactions, offsets of groups) and a folder of segments a partition, named by the topic's id, so
that a topic that is made again under its old name begins empty."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.groups import CommittedOffset, GroupCoordinator
from tests.servers.kafka.journal import Journal
from tests.servers.kafka.partition import PartitionLog
from tests.servers.kafka.transactions import Transaction, TransactionCoordinator

NODE_ID = 1
CLUSTER_ID = "holdfast-tests"
PARTITIONS_MAX = 1000
"""Of a topic."""


@dataclass
class Topic:
    name: str
    topic_id: uuid.UUID
    partitions: list[PartitionLog]
    configs: dict[str, str]

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.configs.get("cleanup.policy", "delete")

    @property
    def message_bytes_max(self) -> int:
        return int(self.configs.get("max.message.bytes", 1_048_588))


@dataclass
class Settings:
    """Of a server for its whole life. `users`: passwords by name; none: everybody may connect without one."""

    auto_create_topics: bool = False
    transaction_timeout_ms_max: int = 900_000
    segment_bytes_max: int = 64 << 20
    users: dict[str, str] = field(default_factory=dict)


class Broker:
    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self.settings = settings
        self._journal = Journal(folder / "journal.jsonl")
        self._clock_offset_ms = int(self._journal.facts.get(("clock",), {"offset_ms": 0})["offset_ms"])
        self.topics = {name: self._open_topic(name, fact) for (name,), fact in self._journal.of_kind("topic")}
        self.transactions = TransactionCoordinator(self._journal, timeout_ms_max=settings.transaction_timeout_ms_max)
        self.groups = GroupCoordinator(self._journal)
        self.denied: set[str] = set()
        """Topics that nobody may read or write."""
        self.holds_markers = False
        """Decided transactions wait for their markers: readers don't see them yet, and producers are answered that they are
        concurrent."""
        self.refusal = Code.NONE
        """Of the request that is handled just now."""
        self._waiting: list[asyncio.Future[None]] = []
        self.write_markers()

    def close(self) -> None:
        for topic in self.topics.values():
            for log in topic.partitions:
                log.close()
        self._journal.close()

    # ------------------------------------------------------------------------------------------------------------------- time

    def now_ms(self) -> int:
        return int(time.time() * 1000) + self._clock_offset_ms

    def advance(self, ms: int) -> None:
        """The clock goes forward, for good: a restart finds it there."""
        self._clock_offset_ms += ms
        self._journal.put("clock", offset_ms=self._clock_offset_ms)
        self.expire()

    def next_deadline_ms(self) -> int | None:
        deadlines = (self.transactions.next_deadline_ms(), self.groups.next_deadline_ms())
        return min((each for each in deadlines if each is not None), default=None)

    def expire(self) -> None:
        self.transactions.expire(self.now_ms())
        self.groups.expire(self.now_ms())
        self.write_markers()

    # ------------------------------------------------------------------------------------------------------------------- topics

    def check_refusal(self) -> None:
        """Raises what a fault answers in place of the broker."""
        if self.refusal:
            raise RefusedError(self.refusal, "told by the test")

    def topic(self, name: str) -> Topic:
        self.check_refusal()
        if name in self.denied:
            raise RefusedError(Code.TOPIC_AUTHORIZATION_FAILED, name)
        if name not in self.topics:
            raise RefusedError(Code.UNKNOWN_TOPIC_OR_PARTITION, name)
        return self.topics[name]

    def topic_of_id(self, topic_id: uuid.UUID) -> Topic:
        for topic in self.topics.values():
            if topic.topic_id == topic_id:
                return self.topic(topic.name)
        raise RefusedError(Code.UNKNOWN_TOPIC_ID, str(topic_id))

    def partition(self, name: str, index: int) -> PartitionLog:
        topic = self.topic(name)
        if not 0 <= index < len(topic.partitions):
            raise RefusedError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{name}-{index}")
        return topic.partitions[index]

    def create_topic(self, name: str, count: int, configs: dict[str, str]) -> Topic:
        if name in self.topics:
            raise RefusedError(Code.TOPIC_ALREADY_EXISTS, name)
        if not name or len(name) > 249 or not all(each.isalnum() or each in "._-" for each in name):
            raise RefusedError(Code.INVALID_TOPIC, name)
        if not 0 < count <= PARTITIONS_MAX:
            raise RefusedError(Code.INVALID_PARTITIONS, f"{count} partitions, at most {PARTITIONS_MAX}")
        fact = {"id": str(uuid.uuid4()), "count": count, "configs": configs, "starts": {}}
        self._journal.put("topic", name, **fact)
        self.topics[name] = self._open_topic(name, fact)
        return self.topics[name]

    def delete_topic(self, name: str) -> None:
        topic = self.topic(name)
        self._journal.remove("topic", name)
        self.groups.forget_topic(name)
        del self.topics[name]
        for log in topic.partitions:
            log.close()
        shutil.rmtree(self._folder / str(topic.topic_id), ignore_errors=True)
        self.wake_readers()

    def add_partitions(self, name: str, count: int) -> None:
        topic = self.topic(name)
        if not len(topic.partitions) < count <= PARTITIONS_MAX:
            raise RefusedError(Code.INVALID_PARTITIONS, f"{name} has {len(topic.partitions)}, not {count}")
        self._save_topic(name, count=count)
        topic.partitions += [self._open_partition(topic.topic_id, index, 0) for index in range(len(topic.partitions), count)]

    def configure(self, name: str, configs: dict[str, str]) -> None:
        self.topic(name).configs = configs
        self._save_topic(name, configs=configs)

    def delete_records(self, name: str, index: int, offset: int) -> int:
        """The first offset that is left."""
        log = self.partition(name, index)
        if offset < 0:
            offset = log.end_offset
        if not log.start_offset <= offset <= log.end_offset:
            raise RefusedError(Code.OFFSET_OUT_OF_RANGE, f"{offset}, of {log.start_offset} to {log.end_offset}")
        starts = self._journal.facts["topic", name]["starts"]
        self._save_topic(name, starts={**starts, str(index): offset})
        log.start_offset = offset
        return offset

    def _save_topic(self, name: str, **changed: object) -> None:
        fact = {**self._journal.facts["topic", name], **changed}
        self._journal.put("topic", name, **{key: value for key, value in fact.items() if key not in ("kind", "name")})

    def _open_topic(self, name: str, fact: dict[str, object]) -> Topic:
        topic_id, starts, count = uuid.UUID(str(fact["id"])), fact["starts"], fact["count"]
        assert isinstance(starts, dict)
        assert isinstance(count, int)
        logs = [self._open_partition(topic_id, index, starts.get(str(index), 0)) for index in range(count)]
        configs = fact["configs"]
        assert isinstance(configs, dict)
        return Topic(name, topic_id, logs, configs)

    def _open_partition(self, topic_id: uuid.UUID, index: int, start_offset: int) -> PartitionLog:
        folder = self._folder / str(topic_id) / str(index)
        return PartitionLog(folder, segment_bytes_max=self.settings.segment_bytes_max, start_offset=start_offset)

    # -------------------------------------------------------------------------------------------------------------- transactions

    def write_markers(self) -> None:
        """Of all decided transactions. The order is that of a crash which loses nothing: markers, offsets, then that they are
        there."""
        if self.holds_markers:
            return
        for transaction in self.transactions.prepared():
            for log in self._logs_of(transaction):
                log.end_transaction(transaction.producer_id, transaction.epoch, self.now_ms(), commit=transaction.commits)
            for each in transaction.offsets if transaction.commits else ():
                offset = CommittedOffset(each.offset, each.leader_epoch, each.metadata)
                self.groups.commit(each.group, each.topic, each.partition, offset)
            self.transactions.complete(transaction)
            self.wake_readers()

    def _logs_of(self, transaction: Transaction) -> Iterator[PartitionLog]:
        for name, index in transaction.partitions:
            if name in self.topics and index < len(self.topics[name].partitions):  # else it was deleted meanwhile
                yield self.topics[name].partitions[index]

    # ------------------------------------------------------------------------------------------------------------------- readers

    def wake_readers(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def rows_or(self, timeout_s: float) -> None:
        """Until something was written, at most so long."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            if future in self._waiting:
                self._waiting.remove(future)
