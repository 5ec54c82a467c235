"""One Kafka server for all tests of the folder, and topics of their own for each."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.servers.kafka import KafkaServer
from tests.servers.kafka_clients import _QUIET, TIMEOUT_S

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


@pytest.fixture
def kafka(kafka_server: KafkaServer) -> Iterator[KafkaServer]:
    """The server; what a test planned is gone behind it."""
    yield kafka_server
    if not kafka_server.is_alive:
        kafka_server.start()
    kafka_server.heal()
    kafka_server.release()
    kafka_server.deny()
    assert "Traceback" not in kafka_server.log_tail()


@pytest.fixture
def new_topic(kafka: KafkaServer) -> Callable[..., str]:
    def make(partitions: int = 1, name: str = "", **config: str) -> str:
        name = name or f"topic-{next(_NUMBERS)}"
        topic = NewTopic(name, partitions, config={key.replace("_", "."): value for key, value in config.items()})
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "logger": _QUIET})
        admin.create_topics([topic])[name].result(TIMEOUT_S)
        return name

    return make


def read(kafka: KafkaServer, topic: str, partitions: int = 1) -> list[confluent_kafka.Message]:
    """All committed records, by partition."""
    settings = {
        "bootstrap.servers": kafka.bootstrap,
        "group.id": "reader",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 10,
        "logger": _QUIET,
    }
    consumer = confluent_kafka.Consumer(settings)
    found = []
    with contextlib.closing(consumer):
        for partition in range(partitions):
            consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
            while (message := consumer.poll(TIMEOUT_S)) is not None and message.error() is None:
                found.append(message)
            assert message is not None, f"{topic} has no end"
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, message.error()
    return found


def objects(kafka: KafkaServer, topic: str, partitions: int = 1) -> list[dict[str, Any]]:
    return [json.loads(message.value()) for message in read(kafka, topic, partitions)]
