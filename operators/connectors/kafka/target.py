"""Kafka as a target of an exactly-once sink: rows and position in one transaction.

The transactional id follows from the sink's id, so that whoever opens the sink fences its older owners, and ends what they left
open. Between two commits no transaction is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import pyarrow as pa

from holdfast.operators.connectors.kafka.commit_topic import PARTITION, CommitTopic
from holdfast.operators.connectors.kafka.connection import CALL_S, Client, Connection
from holdfast.operators.connectors.kafka.records import RecordFormat
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import CommitPositionLostError, FencedError, InvalidConfigError

INIT_S = 20.0
"""Time in which older owners are fenced, and what they left open is ended."""
TRANSACTION_TIMEOUT_MS = 120_000
QUEUE_WAIT_S = 0.05
"""A full queue of the client is tried again behind so much news, or time."""

PRODUCER = {
    "linger.ms": 20,
    "batch.size": 1 << 20,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 256 << 10,
    "compression.type": "none",
    "partitioner": "murmur2_random",
    "enable.idempotence": True,
    "delivery.report.only.error": True,
}
"""Defaults, which a user may change as far as `SINK_OWNED` goes. Keys go to the partitions to which Java's clients send them."""


@dataclass
class KafkaTarget(CommitTarget):
    """Rows of one sink, in topics of one cluster."""

    connection: Connection
    format: RecordFormat
    commit_topic: str
    _client: Client | None = field(default=None, init=False, repr=False)
    """A producer that has fenced the older ones."""
    _position: CommitPosition | None = field(default=None, init=False, repr=False)
    """What is stored; None where that is not known."""
    _failed: list[tuple[Any, str]] = field(default_factory=list, init=False, repr=False)
    """The error of each record of this transaction that was not taken, and its topic."""

    @property
    def place(self) -> str:
        return f"kafka {self.connection.bootstrap} {self.format.topic or 'topics of ' + self.format.topic_column}"

    @property
    def identity(self) -> str:
        return f"Kafka {self._topics}"

    @property
    def _topics(self) -> str:
        return f"topic {self.format.topic}" if self.format.topic else f"topics of column {self.format.topic_column}"

    def check(self, schema: pa.Schema) -> None:
        self.format.check(schema)
        self.connection.check("Producer", {**PRODUCER, "transactional.id": "holdfast"})

    def staged_schema(self, schema: pa.Schema) -> pa.Schema:
        return self.format.staged_schema

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        return self.format.encode(columns)

    # ------------------------------------------------------------------------------------------------------------------- open

    def open(self, owner: CommitOwner) -> CommitPosition:
        self.close()
        admin = self.connection.open("AdminClient", {})
        stored = CommitTopic(admin, self.commit_topic, owner.sink_id)
        stored.ensure()
        if self.format.topic:  # before rows wait for it
            admin.check_topic(self.format.topic)
        self._judge(owner, stored)
        client = self._producer(owner.sink_id)
        try:
            self._init(client, owner)
            taken = owner.take(stored.read())
            self._transaction(client, owner.sink_id, (), taken)
        except BaseException:
            _leave(client)
            raise
        self._client, self._position = client, taken
        return taken

    def _judge(self, owner: CommitOwner, stored: CommitTopic) -> None:
        """Raise what is certain before anybody is fenced: a job that is refused disturbs nobody. Whether rows are lost is known
        behind the fence only."""
        position, is_newest = stored.peek()
        if is_newest:
            with contextlib.suppress(CommitPositionLostError):
                owner.take(position)

    def _producer(self, sink_id: str) -> Client:
        self._failed = []
        own = {
            **PRODUCER,
            "transactional.id": f"holdfast-{sink_id}",
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "client.id": f"holdfast-{sink_id}",
            "on_delivery": self._note_failure,
        }
        return self.connection.open("Producer", own)

    def _note_failure(self, error: Any, message: Any) -> None:
        if error is not None and len(self._failed) < 10:
            self._failed.append((error, message.topic()))

    def _init(self, client: Client, owner: CommitOwner) -> None:
        """The fence: behind it no older owner commits, and nothing of theirs is open."""
        what = f"fencing older owners of sink {owner.sink_id}"
        try:
            client.repeat(client.made.init_transactions, INIT_S, lambda: client.made.poll(0))
        except client.package.KafkaException as raised:
            raise client.error(raised, what) from None

    # ------------------------------------------------------------------------------------------------------------------ apply

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        client = self._client
        if client is None or self._position != expected:
            stands = f"sink {expected.sink_id} at {self.place} is at {self._position}, not at {expected}"
            raise FencedError(stands, sink=expected.sink_id)
        self._position = None  # unknown until the transaction is over
        self._transaction(client, expected.sink_id, batches, position)
        self._position = position

    def _transaction(
        self, client: Client, sink_id: str, batches: Iterable[pa.RecordBatch], position: CommitPosition
    ) -> None:
        """One transaction: rows and position. What ends before the commit is tried is aborted, and has changed nothing."""
        producer, package = client.made, client.package
        what = f"committing rows of sink {sink_id}"
        self._failed.clear()
        try:
            producer.begin_transaction()
        except package.KafkaException as raised:
            raise client.error(raised, what) from None
        try:
            for batch in batches:
                offer(producer, records_of(batch, self.format))
            offer(producer, [(self.commit_topic, position.encode(), sink_id.encode(), PARTITION)])
        except package.KafkaException as raised:
            raise self._aborted(client, raised, what) from None
        except Exception:
            with contextlib.suppress(package.KafkaException):
                producer.abort_transaction(CALL_S)
            raise
        try:
            client.repeat(producer.commit_transaction, TRANSACTION_TIMEOUT_MS / 1000, lambda: producer.poll(0))
        except package.KafkaException as raised:
            if raised.args[0].txn_requires_abort():
                raise self._aborted(client, raised, what) from None
            failed = client.error(raised, what)
            if isinstance(failed, InvalidConfigError):  # it says that nothing was changed, which is not known here
                raise ConnectionError(failed.message) from None
            raise failed from None

    def _aborted(self, client: Client, raised: Any, what: str) -> Exception:
        """End the transaction; what the user meets of it. Of a record that was not taken, its own error."""
        try:
            client.repeat(client.made.abort_transaction, CALL_S, lambda: client.made.poll(0))
        except client.package.KafkaException as also:
            return client.error(also, f"aborting behind {raised.args[0].str()!r}, {what}")
        if self._failed and not raised.args[0].fatal():
            error, topic = next((each for each in self._failed if not _is_purged(client, each[0])), self._failed[0])
            return client.error(error, f"{what}, to topic {topic},")
        return client.error(raised, what)

    def close(self) -> None:
        client, self._client, self._position = self._client, None, None
        if client is not None:
            _leave(client)


def _leave(client: Client) -> None:
    """Let a producer go without waiting for brokers; what is open is ended by the next owner, or by its time-out."""
    with contextlib.suppress(client.package.KafkaException):
        client.made.purge()
    client.made = None


def _is_purged(client: Client, error: Any) -> bool:
    codes = client.package.KafkaError
    return error.code() in (codes._PURGE_QUEUE, codes._PURGE_INFLIGHT)


def records_of(batch: pa.RecordBatch, record_format: RecordFormat) -> Iterable[tuple[Any, ...]]:
    """Staged rows as positional arguments of `produce`."""
    names = batch.schema.names
    values = batch.column("value").to_pylist()
    topics = batch.column("topic").to_pylist() if "topic" in names else repeat(record_format.topic)
    keys = batch.column("key").to_pylist() if "key" in names else None
    if "headers" not in names and "timestamp" not in names:
        return zip(topics, values, strict=False) if keys is None else zip(topics, values, keys, strict=False)
    none = repeat(None)
    headers: Iterable[Any] = none
    if "headers" in names:
        titles = list(record_format.headers)
        headers = [list(zip(titles, row, strict=True)) for row in batch.column("headers").to_pylist()]
    times = batch.column("timestamp").to_pylist() if "timestamp" in names else repeat(0)
    return zip(topics, values, none if keys is None else keys, repeat(-1), none, none, times, headers, strict=False)


def offer(producer: Any, records: Iterable[tuple[Any, ...]]) -> None:
    """Send records, in their order; waits where the client's queue is full."""
    produce = producer.produce
    left = iter(records)
    held: tuple[Any, ...] = ()
    while True:
        try:
            if held:
                produce(*held)
                held = ()
            for held in left:  # the one that finds the queue full is offered again
                produce(*held)
            return
        except BufferError:
            producer.poll(QUEUE_WAIT_S)
