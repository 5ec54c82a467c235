"""Topics of Kafka read exactly once: from where to where, what of them, and what happens where records are gone."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

import holdfast as hf
from holdfast.operators.connectors.kafka import partitions, source
from holdfast.operators.connectors.kafka.partitions import KafkaPartition
from holdfast.operators.sources.splits import AssignedSplit
from tests.servers.kafka import Code, Fault, Harm, KafkaServer
from tests.servers.kafka_clients import _QUIET, TIMEOUT_S, Rdkafka

NewTopic = Callable[..., str]
ORDERS = {"id": int, "item": str | None}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job has one thread, which a fetch holds up; and a broker tells the end of a partition half a second after the last record."""
    monkeypatch.setattr(source, "WAIT_S", 0.01)
    monkeypatch.setitem(source.CONSUMER, "fetch.wait.max.ms", 10)


def send(kafka: KafkaServer, topic: str, *values: bytes | None, partition: int = 0, **parts: Any) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap, "logger": _QUIET, "linger.ms": 0})
    for value in values:
        producer.produce(topic, value, partition=partition, **parts)
    assert producer.flush(TIMEOUT_S) == 0


def orders(*ids: int) -> list[bytes]:
    return [json.dumps({"id": number, "item": f"i{number}"}).encode() for number in ids]


def admin_of(kafka: KafkaServer) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka.bootstrap, "logger": _QUIET})


@contextlib.contextmanager
def reading(made: hf.KafkaSource, *, letters: bool = False) -> Iterator[tuple[hf.testing.Job, Any]]:
    with hf.testing.Job() as job:
        stream = job.environment.from_source(made).uid("in")
        out = job.output(stream.side_output(hf.DEAD_LETTERS) if letters else stream)
        job.start()
        yield job, out


def rows_of(made: hf.KafkaSource, **settings: Any) -> list[dict[str, Any]]:
    """Of a source that ends."""
    with reading(made, **settings) as (job, out):
        advance_until(job, lambda: job.status != "RUNNING")
        return [row for row, _ in out.committed()]


def advance_until(job: hf.testing.Job, condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        job.advance(by_ms=100)
    raise AssertionError("it did not come")


def seen(job: hf.testing.Job, out: Any, count: int) -> list[int]:
    found: list[int] = []

    def has_all() -> bool:
        found.extend(row["id"] for row in out.rows())
        return len(found) >= count

    advance_until(job, has_all)
    return sorted(found)


# ------------------------------------------------------------------------------------------------------------ what is read


def test_raw_records_have_all_that_kafka_has_of_them(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    send(kafka, topic, b"\xff", key=b"k", headers=[("h", b"1"), ("h", None)], timestamp=1_000, partition=1)
    send(kafka, topic, None, timestamp=2_000, partition=1)
    with reading(hf.KafkaSource(kafka.bootstrap, topic, stop="latest")) as (job, out):
        advance_until(job, lambda: job.status != "RUNNING")
        first, second = out.committed()
    assert first == (
        {
            "topic": topic,
            "partition": 1,
            "offset": 0,
            "timestamp": dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC),
            "key": b"k",
            "value": b"\xff",
            "headers": [{"name": "h", "value": b"1"}, {"name": "h", "value": None}],
        },
        1_000,
    )
    assert (second[0]["value"], second[0]["key"], second[0]["headers"], second[1]) == (None, None, None, 2_000)


def test_committed_records_alone_are_read(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    writer = Rdkafka(kafka.bootstrap, f"writer-{topic}")
    writer.init()
    writer.transaction(topic, *orders(1))
    writer.begin()
    writer.send(topic, *orders(2))
    writer.abort()
    writer.transaction(topic, *orders(3))
    assert [row["id"] for row in rows_of(hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, stop="latest"))] == [1, 3]


def test_a_record_that_does_not_fit_fails_the_job_by_name(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    send(kafka, topic, *orders(1), b'{"id":"x"}', *orders(3))
    with pytest.raises(hf.InvalidRecordError) as raised:
        rows_of(hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, stop="latest"))
    assert (raised.value.split, raised.value.position) == (f"{topic}[0]", (1,))


def test_a_record_that_does_not_fit_leaves_by_the_side(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    send(kafka, topic, b"{", *orders(1), b'{"id":"x"}', None)
    found = rows_of(hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, stop="latest"), letters=True)
    assert [(row["position"], row["raw"]) for row in found] == [([0], b"{"), ([2], b'{"id":"x"}'), ([3], None)]
    assert found[2]["error"] == "its value is null"


def test_event_time_is_that_of_the_records(kafka: KafkaServer, new_topic: NewTopic) -> None:
    """A strategy needs no assigner; a source that leaves Kafka's times out needs one."""
    topic = new_topic()
    for at in (1_000, 70_000, 4_000):
        send(kafka, topic, *orders(at), timestamp=at)
    strategy = hf.WatermarkStrategy.for_bounded_out_of_orderness(5_000)
    source = hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, stop="latest")
    with hf.testing.Job() as job:
        stream = job.environment.from_source(source, watermark_strategy=strategy).uid("in")
        out = job.output(stream)
        job.start()
        advance_until(job, lambda: job.status != "RUNNING")
        assert [(row["id"], at) for row, at in out.committed()] == [(1_000, 1_000), (70_000, 70_000), (4_000, 4_000)]
    untimed = hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, event_time=False)
    with pytest.raises(hf.GraphError, match="with_timestamp_assigner"):
        hf.Environment("job").from_source(untimed, watermark_strategy=strategy)


def test_tombstones_can_be_left_out(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    send(kafka, topic, None, *orders(1), None)
    orders_in = hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, stop="latest", skip_tombstones=True)
    assert [row["id"] for row in rows_of(orders_in)] == [1]


# ------------------------------------------------------------------------------------------------------- from where to where


def test_a_bounded_part_of_a_topic(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    for number in range(6):
        send(kafka, topic, *orders(number), timestamp=1_000 * number + 1)

    def ids(**bounds: Any) -> list[int]:
        return [row["id"] for row in rows_of(hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, **bounds))]

    assert ids(stop="latest") == [0, 1, 2, 3, 4, 5]
    assert ids(start={(topic, 0): 2}, stop={(topic, 0): 4}) == [2, 3]
    assert ids(start=2_000, stop=dt.datetime(1970, 1, 1, 0, 0, 4, tzinfo=dt.UTC)) == [2, 3]
    assert ids(start=10_000, stop="latest") == []
    assert ids(start="latest", stop="latest") == []


def test_a_time_to_stop_that_is_to_come_is_waited_for(
    kafka: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 0 has a record behind it, 1 ends by the clock, 2 is found just in time."""
    clock = [1_000]
    for module in (source, partitions):
        monkeypatch.setattr(module, "now_ms", lambda: clock[0])
    topic = new_topic(2)
    send(kafka, topic, *orders(0), timestamp=900)
    orders_in = hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, stop=5_000, discovery_interval_ms=60_000)
    with reading(orders_in) as (job, out):
        assert seen(job, out, 1) == [0]
        send(kafka, topic, *orders(1), timestamp=4_999)
        send(kafka, topic, *orders(2), timestamp=5_000)
        send(kafka, topic, *orders(3), timestamp=4_000)
        send(kafka, topic, *orders(4), timestamp=4_500, partition=1)
        assert seen(job, out, 2) == [1, 4]
        assert job.status == "RUNNING"
        job.checkpoint()
        admin = admin_of(kafka)
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result(TIMEOUT_S)
        send(kafka, topic, *orders(5), timestamp=4_600, partition=2)
        send(kafka, topic, *orders(6), timestamp=5_600, partition=2)
        clock[0] = 5_000
        found: list[int] = []

        def has_ended() -> bool:
            found.extend(row["id"] for row in out.rows())
            return job.status == "FINISHED"

        advance_until(job, has_ended)
        assert found == [5]


def test_offsets_of_the_group_follow_complete_checkpoints(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    send(kafka, topic, *orders(1, 2))
    orders_in = hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, start="group", group=f"group-{topic}")
    with reading(orders_in) as (job, out):
        assert seen(job, out, 2) == [1, 2]
        job.savepoint()
        assert committed(kafka, topic) < 0
        job.checkpoint()
        job.advance(by_ms=100)
        assert committed(kafka, topic) == 2
    send(kafka, topic, *orders(3))
    with reading(orders_in) as (job, out):
        assert seen(job, out, 1) == [3]


@pytest.mark.endurance
def test_a_group_that_refuses_offsets_or_has_others_changes_nothing(kafka: KafkaServer, new_topic: NewTopic) -> None:
    """Q33, Q34: what counts is the snapshot."""
    topic = new_topic()
    send(kafka, topic, *orders(1, 2))
    orders_in = hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, start="group", group=f"group-{topic}")
    with reading(orders_in) as (job, out):
        assert seen(job, out, 2) == [1, 2]
        kafka.plan(Fault(Harm.REFUSE, "OffsetCommit", times=20, code=Code.INVALID_GROUP_ID))
        job.checkpoint()
        job.advance(by_ms=100)
        assert (committed(kafka, topic) < 0, job.status) == (True, "RUNNING")
        kafka.heal()
        commit_elsewhere(kafka, topic, 1)
        send(kafka, topic, *orders(3))
        job.restart()
        assert seen(job, out, 1) == [3]
        job.checkpoint()
        job.advance(by_ms=100)
        assert committed(kafka, topic) == 3


def test_a_source_ends_where_another_consumer_of_the_group_was_at_the_start(kafka: KafkaServer, new_topic: NewTopic) -> None:
    """Partition 1 is empty at first: the group needs no offset there."""
    topic = new_topic(2)
    send(kafka, topic, *orders(1, 2, 3))
    commit_elsewhere(kafka, topic, 2)
    orders_in = partial(hf.KafkaSource, kafka.bootstrap, topic, schema=ORDERS, stop="group")
    enumerator = orders_in(group=f"group-{topic}").create_enumerator()
    assert [(each.start, each.stop) for each in enumerator.discover().partitions] == [(0, 2), (0, 0)]
    send(kafka, topic, *orders(4), partition=1)
    with pytest.raises(hf.InvalidConfigError, match=re.escape(f"group-{topic} has no offset of {topic}[1]")):
        rows_of(orders_in(group=f"group-{topic}"))
    commit_elsewhere(kafka, topic, 0, partition=1)
    assert [row["id"] for row in rows_of(orders_in(group=f"group-{topic}"))] == [1, 2]
    assert rows_of(orders_in(start="group", group=f"group-{topic}")) == []


def test_what_waits_is_in_front_of_the_stop(kafka: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FETCH_ROWS", 2)
    topic = new_topic()
    send(kafka, topic, *orders(*range(9)))
    reader = hf.KafkaSource(kafka.bootstrap, topic).create_split_reader(SimpleNamespace(job_id="job"))
    split = KafkaPartition(f"{topic}[0]", topic, 0, 0, stop=5)
    waiting: list[tuple[int, int | None]] = []
    with contextlib.closing(reader):
        reader.open()
        reader.add_splits([AssignedSplit(split, ())])
        deadline = time.monotonic() + TIMEOUT_S
        while not waiting or waiting[-1][1] is not None:
            assert time.monotonic() < deadline
            waiting += [(each.num_rows, each.pending_records) for each in reader.fetch()]
    assert sum(rows for rows, _ in waiting) == 5
    done = itertools.accumulate(rows for rows, _ in waiting[:-1])
    assert [left for _, left in waiting[:-1]] == [5 - count for count in done]


def commit_elsewhere(kafka: KafkaServer, topic: str, offset: int, partition: int = 0) -> None:
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": f"group-{topic}", "logger": _QUIET}
    with contextlib.closing(confluent_kafka.Consumer(settings)) as consumer:
        consumer.commit(offsets=[confluent_kafka.TopicPartition(topic, partition, offset)], asynchronous=False)


def committed(kafka: KafkaServer, topic: str) -> int:
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": f"group-{topic}", "logger": _QUIET}
    with contextlib.closing(confluent_kafka.Consumer(settings)) as consumer:
        (place,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], timeout=TIMEOUT_S)
        return int(place.offset)


def test_a_partition_that_is_added_is_read_from_its_beginning(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    orders_in = hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, start="latest", discovery_interval_ms=1_000)
    send(kafka, topic, *orders(1))
    with reading(orders_in) as (job, out):
        job.advance(by_ms=100)
        admin = admin_of(kafka)
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(TIMEOUT_S)
        send(kafka, topic, *orders(2), partition=1)
        job.advance(by_ms=1_000)
        assert seen(job, out, 1) == [2]


@pytest.mark.parametrize("points_max", [2, pytest.param(100, marks=[pytest.mark.endurance, pytest.mark.timeout(1800)])])
def test_the_kit(kafka: KafkaServer, new_topic: NewTopic, points_max: int) -> None:
    topic = new_topic(3)
    for number in range(30):
        send(kafka, topic, *orders(number), partition=number % 3)
    hf.testing.check_source(
        lambda: hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, stop="latest"),
        range(30),
        row=lambda row: row["id"],
        points_max=points_max,
    )


@pytest.mark.endurance
@pytest.mark.timeout(1800)
def test_the_broker_may_restart_anywhere(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic(3)
    for number in range(30):
        send(kafka, topic, *orders(number), partition=number % 3)
    hf.testing.check_source(
        lambda: hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, stop="latest"),
        range(30),
        row=lambda row: row["id"],
        points_max=2,
        server=kafka,
    )


# --------------------------------------------------------------------------------------------------------- what can be gone


def delete(kafka: KafkaServer, topic: str, before: int) -> None:
    place = confluent_kafka.TopicPartition(topic, 0, before)
    admin = admin_of(kafka)  # one that nothing refers to drops what it was asked
    admin.delete_records([place])[place].result(TIMEOUT_S)


def test_records_that_were_deleted_before_they_were_read_fail_the_job(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    send(kafka, topic, *orders(0, 1, 2, 3))
    delete(kafka, topic, 2)
    with pytest.raises(hf.SourceDataLostError) as raised:
        rows_of(hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, start={(topic, 0): 1}, stop="latest"))
    assert (raised.value.connector, raised.value.split, raised.value.position) == ("KafkaSource", f"{topic}[0]", (1,))


def test_the_policy_says_where_to_go_on(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    send(kafka, topic, *orders(0, 1, 2, 3))
    delete(kafka, topic, 2)
    orders_in = hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS, start={(topic, 0): 1}, stop="latest", on_data_loss="earliest")
    assert [row["id"] for row in rows_of(orders_in)] == [2, 3]


def test_a_topic_that_was_made_anew_is_another_one(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    send(kafka, topic, *orders(1))
    with reading(hf.KafkaSource(kafka.bootstrap, topic, schema=ORDERS)) as (job, out):
        seen(job, out, 1)
        job.checkpoint()
        admin = admin_of(kafka)
        admin.delete_topics([topic])[topic].result(TIMEOUT_S)
        new_topic(name=topic)
        send(kafka, topic, *orders(5, 6))

        def restarted() -> None:
            job.restart()
            job.advance(by_ms=100)

        with pytest.raises(hf.SourceDataLostError, match="made anew"):
            restarted()


# ------------------------------------------------------------------------------------------------------------------ bad input


def test_a_topic_that_is_not_there_is_named(kafka: KafkaServer) -> None:
    with pytest.raises(hf.InvalidConfigError, match="no-such-topic"), reading(hf.KafkaSource(kafka.bootstrap, "no-such-topic")) as (
        job,
        _,
    ):
        job.advance(by_ms=100)


def test_a_topic_without_rights_is_named(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    kafka.deny(topic)
    with pytest.raises(hf.InvalidConfigError, match=topic), reading(hf.KafkaSource(kafka.bootstrap, topic)) as (job, _):
        job.advance(by_ms=100)


def test_a_wrong_password_is_told_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_PASSWORD", "wr0ng-one")
    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "ann"}
    with KafkaServer(users={"ann": "right"}) as server:
        settings: dict[str, Any] = {**login, "sasl.password": hf.Secret("HOLDFAST_TEST_PASSWORD")}
        source = hf.KafkaSource(server.bootstrap, "orders", settings=settings)
        with pytest.raises(hf.InvalidConfigError, match=r"[Aa]uthentication") as raised, reading(source) as (job, _):
            job.advance(by_ms=100)
        assert "wr0ng-one" not in repr(raised.value) + str(raised.value.fields)


SETTINGS: dict[str, dict[str, Any]] = {
    "topics are names": {"topics": []},
    "start is one of": {"start": "yesterday"},
    "a time without a zone": {"start": dt.datetime(2024, 1, 1)},
    "stop is one of": {"stop": "earliest"},
    r"maps \(topic, partition\)": {"start": {"orders": 5}},
    'start="group" needs group=': {"start": "group"},
    'stop="group" needs group=': {"stop": "group"},
    "on_data_loss is": {"on_data_loss": "ignore"},
    "discovery_interval_ms": {"discovery_interval_ms": 0},
    "isolation.level can't be set": {"settings": {"isolation.level": "read_uncommitted"}},
    "group.id can't be set": {"settings": {"group.id": "g"}},
    "no.such.setting": {"settings": {"no.such.setting": 1}},
    "schema has no columns": {"schema": {}},
}


@pytest.mark.parametrize("reason", SETTINGS)
def test_settings_that_can_not_be(reason: str) -> None:
    with pytest.raises(hf.InvalidConfigError, match=reason):
        hf.KafkaSource("localhost:9092", **{"topics": "orders", **SETTINGS[reason]})


def test_partitions_are_spread_and_stay_where_they_are() -> None:
    made = hf.KafkaSource("localhost:9092", "orders").create_enumerator()
    owners = [made.owner_of(made_partition(number), 3) for number in range(6)]
    assert sorted(owners) == [0, 0, 1, 1, 2, 2]


def made_partition(number: int) -> Any:
    return KafkaPartition(f"orders[{number}]", "orders", number, 0)
