"""Kafka in and out beside confluent-kafka, both at the Kafka server of `tests/servers`, which is one process of Python.

In: records of one topic, whose values are read; the raw client consumes batches with the source's settings, and takes values.
Out: exactly once; the raw client sends the same records, in transactions of about a second of them, with the sink's settings."""

from __future__ import annotations

from typing import Any

import holdfast as hf
from benchmarks.connectors.measuring import (
    Row,
    Timed,
    all_values,
    alternating,
    check_numbers,
    compared,
    job_into,
    numbers_of,
    timed,
    timed_job,
)
from benchmarks.harness import Bench
from benchmarks.jobs import environment
from holdfast.operators.connectors.kafka.source import CONSUMER
from holdfast.operators.connectors.kafka.target import PRODUCER

IN_ROWS, OUT_ROWS = 3_000_000, 8_000_000
"""Some seconds: what a job pays once, and the second in front of its first checkpoint, is in its figure. Nothing goes out in
that second, so there are more rows that way."""
ROWS_PER_TRANSACTION = 300_000
PARTITIONS = 4
CALL_S = 60.0
HOW = "server: tests/servers/kafka (Python), 4 partitions, 100 B"


def measure(bench: Bench, scale: float) -> list[Row]:
    """In, out exactly once, and exactly : at least once."""
    from tests.servers.kafka import KafkaServer

    sizes = [max(10_000, int(rows * scale)) for rows in (IN_ROWS, OUT_ROWS)]
    with KafkaServer() as server:
        return [*_in(bench, server, sizes[0]), *_out(bench, server, sizes[1])]


def _in(bench: Bench, server: Any, rows: int) -> list[Row]:
    topic = make_topic(server, "in")
    send(server, topic, all_values(rows))
    ways = {
        "raw": lambda turn: timed(rows, lambda: _consume(server, topic, rows, keeps=False)),
        "job": lambda turn: timed_job(bench, _reading(server, topic), rows),
    }
    found = alternating(ways)
    check_numbers(numbers_of(_consume(server, topic, rows)), rows, "Kafka in")
    beside = "confluent-kafka, consume and value()"
    return [compared("Kafka in", found["job"], found["raw"], ratio_min=0.8, speed_min=300_000, beside=beside, how=HOW)]


def _reading(server: Any, topic: str) -> hf.Environment:
    env = environment("kafka-in", 1, "memory", 1_000)
    records = env.from_source(hf.KafkaSource(server.bootstrap, topic, stop="latest")).uid("in")
    records.select("value").uid("values").sink_to(hf.Blackhole()).uid("out")
    return env


def _consume(server: Any, topic: str, rows: int, *, keeps: bool = True) -> list[bytes]:
    """Values of all records; keeps=False: of the last batch."""
    import confluent_kafka

    settings = {**CONSUMER, "bootstrap.servers": server.bootstrap, "group.id": "raw", "enable.partition.eof": False}
    consumer = confluent_kafka.Consumer(settings)
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    found: list[bytes] = []
    count = 0
    while count < rows:
        messages = consumer.consume(10_000, 1.0)
        assert messages, f"{topic}: {count} records of {rows}"
        some = [message.value() for message in messages]  # of an error it would be the error's text: the count is then wrong
        count += len(some)
        if not keeps:
            found.clear()
        found += some
    assert count == rows, f"{topic}: {count} records of {rows}"
    consumer.close()
    return found


def _out(bench: Bench, server: Any, rows: int) -> list[Row]:
    content = all_values(rows)

    def raw(turn: int) -> Timed:
        topic = make_topic(server, f"raw-{turn}")
        found = timed(rows, lambda: send(server, topic, content))
        _delete_topic(server, topic)
        return found

    def job(guarantee: str, turn: int) -> Timed:
        topic = make_topic(server, f"{guarantee}-{turn}")
        sink = hf.KafkaSink(server.bootstrap, topic, sink_id=topic, value="value", guarantee=guarantee)
        found = timed_job(bench, job_into("kafka-out", sink, rows), rows)
        if turn == 0:
            check_numbers(numbers_of(_consume(server, topic, rows)), rows, f"Kafka out, {guarantee}")
        _delete_topic(server, topic)
        return found

    ways = {
        "raw": raw,
        "exactly_once": lambda turn: job("exactly_once", turn),
        "at_least_once": lambda turn: job("at_least_once", turn),
    }
    found = alternating(ways)
    exactly, raws, least = found["exactly_once"], found["raw"], found["at_least_once"]
    beside = "confluent-kafka, transactions"
    return [
        compared("Kafka out, exactly once", exactly, raws, ratio_min=0.7, speed_min=300_000, beside=beside, how=HOW),
        compared("Kafka out, exactly : at least once", exactly, least, ratio_min=0.85, beside="KafkaSink", how=HOW),
    ]


def make_topic(server: Any, name: str, partitions: int = PARTITIONS) -> str:
    """An empty one."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": server.bootstrap})  # which has to live until the answer
    admin.create_topics([NewTopic(name, partitions)])[name].result(CALL_S)
    return name


def _delete_topic(server: Any, name: str) -> None:
    """The server's files of several runs would fill a disk."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": server.bootstrap})
    admin.delete_topics([name])[name].result(CALL_S)


def send(server: Any, topic: str, content: list[bytes]) -> None:
    """In transactions."""
    import confluent_kafka

    producer = confluent_kafka.Producer({**PRODUCER, "bootstrap.servers": server.bootstrap, "transactional.id": f"raw-{topic}"})
    producer.init_transactions(CALL_S)
    produce = producer.produce
    for start in range(0, len(content), ROWS_PER_TRANSACTION):
        producer.begin_transaction()
        for value in content[start : start + ROWS_PER_TRANSACTION]:
            while True:
                try:
                    produce(topic, value)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.commit_transaction(CALL_S)
