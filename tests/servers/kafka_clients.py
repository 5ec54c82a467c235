"""librdkafka and kafka-python by the same few calls, so that a test asks both: they judge what a broker says by code of their
own."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import confluent_kafka
import kafka
from kafka.errors import KafkaError

TIMEOUT_S = 30.0
_QUIET = logging.getLogger("tests.servers.kafka_clients")
_QUIET.addHandler(logging.NullHandler())
_QUIET.propagate = False


class Row(NamedTuple):
    offset: int
    value: bytes


class RefusedByBrokerError(Exception):
    """`fenced`: another producer has taken the transactional id over."""

    def __init__(self, text: str, *, fenced: bool) -> None:
        super().__init__(text)
        self.fenced = fenced


class Client(ABC):
    """Transactions of one transactional id, in one topic of one partition at a time. RefusedByBrokerError by all."""

    def __init__(self, bootstrap: str, transactional_id: str, *, timeout_ms: int = 60_000) -> None:
        self.bootstrap = bootstrap

    @abstractmethod
    def init(self) -> None: ...

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def send(self, topic: str, *values: bytes) -> None:
        """Returns when the broker has them."""

    @abstractmethod
    def send_offset(self, topic: str, offset: int, group: str) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @staticmethod
    @abstractmethod
    def read(bootstrap: str, topic: str, *, committed: bool = True) -> list[Row]:
        """All that is there."""

    def transaction(self, topic: str, *values: bytes) -> None:
        self.begin()
        self.send(topic, *values)
        self.commit()


@contextlib.contextmanager
def _rdkafka_errors() -> Iterator[None]:
    try:
        yield
    except confluent_kafka.KafkaException as raised:
        error: confluent_kafka.KafkaError = raised.args[0]
        fenced = error.code() in (confluent_kafka.KafkaError._FENCED, confluent_kafka.KafkaError.INVALID_PRODUCER_EPOCH)
        raise RefusedByBrokerError(str(error), fenced=fenced) from raised


def _repeated(call: Callable[[float], object]) -> None:
    """Until it succeeds, or fails for good: after an answer that did not come, librdkafka has its caller ask again."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            call(max(1.0, deadline - time.monotonic()))
        except confluent_kafka.KafkaException as raised:
            if not raised.args[0].retriable() or time.monotonic() > deadline:
                raise
        else:
            return


class Rdkafka(Client):
    """`socket_timeout_ms`: patience with a connection that is silent."""

    def __init__(self, bootstrap: str, transactional_id: str, *, timeout_ms: int = 60_000, socket_timeout_ms: int = 30_000) -> None:
        super().__init__(bootstrap, transactional_id)
        settings = {
            "bootstrap.servers": bootstrap,
            "client.id": f"rdkafka-{transactional_id}",
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "socket.timeout.ms": min(socket_timeout_ms, timeout_ms),
            "linger.ms": 0,
            "retry.backoff.ms": 20,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 100,
            "logger": _QUIET,
        }
        self._producer = confluent_kafka.Producer(settings)

    def init(self) -> None:
        with _rdkafka_errors():
            _repeated(self._producer.init_transactions)

    def begin(self) -> None:
        with _rdkafka_errors():
            self._producer.begin_transaction()

    def send(self, topic: str, *values: bytes) -> None:
        failed: list[Any] = []
        with _rdkafka_errors():
            for value in values:
                self._producer.produce(topic, value, on_delivery=lambda error, _: failed.append(error) if error else None)
            assert self._producer.flush(TIMEOUT_S) == 0
            if failed:
                raise confluent_kafka.KafkaException(failed[0])

    def send_offset(self, topic: str, offset: int, group: str) -> None:
        consumer = confluent_kafka.Consumer({"bootstrap.servers": self.bootstrap, "group.id": group, "logger": _QUIET})
        try:
            with _rdkafka_errors():
                place = confluent_kafka.TopicPartition(topic, 0, offset)
                self._producer.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), TIMEOUT_S)
        finally:
            consumer.close()

    def commit(self) -> None:
        with _rdkafka_errors():
            _repeated(self._producer.commit_transaction)

    def abort(self) -> None:
        with _rdkafka_errors():
            _repeated(self._producer.abort_transaction)

    def close(self) -> None:
        """Open transactions stay open: the process is gone, as far as the broker knows."""
        self._producer.purge()

    @staticmethod
    def read(bootstrap: str, topic: str, *, committed: bool = True) -> list[Row]:
        settings = {
            "bootstrap.servers": bootstrap,
            "client.id": "reader",
            "group.id": "reader",
            "enable.auto.commit": False,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "check.crcs": True,
            "logger": _QUIET,
        }
        consumer = confluent_kafka.Consumer(settings)
        rows: list[Row] = []
        try:
            consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
            while True:
                message = consumer.poll(TIMEOUT_S)
                assert message is not None, f"{topic} has no end after {len(rows)} rows"
                error = message.error()
                if error is not None:
                    assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                    return rows
                rows.append(Row(message.offset(), message.value()))
        finally:
            consumer.close()


@contextlib.contextmanager
def _python_errors() -> Iterator[None]:
    try:
        yield
    except KafkaError as error:
        fenced = isinstance(error, kafka.errors.ProducerFencedError | kafka.errors.InvalidProducerEpochError)
        raise RefusedByBrokerError(str(error), fenced=fenced) from error


class PythonClient(Client):
    def __init__(self, bootstrap: str, transactional_id: str, *, timeout_ms: int = 60_000) -> None:
        super().__init__(bootstrap, transactional_id)
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap,
            client_id=f"python-{transactional_id}",
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            retry_backoff_ms=20,
            metrics_enabled=False,
        )

    def init(self) -> None:
        with _python_errors():
            self._producer.init_transactions()

    def begin(self) -> None:
        with _python_errors():
            self._producer.begin_transaction()

    def send(self, topic: str, *values: bytes) -> None:
        with _python_errors():
            sent = [self._producer.send(topic, value) for value in values]
            self._producer.flush(TIMEOUT_S)
            for each in sent:
                each.get(TIMEOUT_S)

    def send_offset(self, topic: str, offset: int, group: str) -> None:
        with _python_errors():
            place = kafka.TopicPartition(topic, 0)
            self._producer.send_offsets_to_transaction({place: kafka.OffsetAndMetadata(offset, "", -1)}, group)

    def commit(self) -> None:
        with _python_errors():
            self._producer.commit_transaction()

    def abort(self) -> None:
        with _python_errors():
            self._producer.abort_transaction()

    def close(self) -> None:
        self._producer.close(timeout=0)

    @staticmethod
    def read(bootstrap: str, topic: str, *, committed: bool = True) -> list[Row]:
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=bootstrap,
            client_id="reader",
            group_id=None,
            isolation_level="read_committed" if committed else "read_uncommitted",
            fetch_max_wait_ms=10,
            metrics_enabled=False,
        )
        place = kafka.TopicPartition(topic, 0)
        rows: list[Row] = []
        try:
            consumer.assign([place])
            consumer.seek_to_beginning(place)
            end = consumer.end_offsets([place])[place]
            while consumer.position(place) < end:
                for records in consumer.poll(timeout_ms=1000).values():
                    rows += [Row(record.offset, record.value) for record in records]
            return rows
        finally:
            consumer.close(autocommit=False)


CLIENTS: dict[str, type[Client]] = {"librdkafka": Rdkafka, "kafka-python": PythonClient}
