"""Rows in Kafka exactly once, whatever happens at the broker; and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.connectors.kafka import commit_topic
from holdfast.operators.connectors.kafka.at_least_once import KafkaWriterOperator
from holdfast.operators.functions.context import FunctionContext
from holdfast.operators.sinks.calls import TRIES
from holdfast.operators.sinks.targets import committer as target_committer
from tests.operators.connectors.kafka.conftest import objects, read
from tests.servers.kafka import Code, Fault, Harm, KafkaServer
from tests.servers.kafka_clients import Rdkafka
from tests.servers.process import wait_until

COLUMNS = {"id": int, "text": str | None}
NewTopic = Callable[..., str]


@contextlib.contextmanager
def running(sink: Any, columns: Any = None) -> Iterator[tuple[hf.testing.Job, hf.testing.Feed]]:
    with hf.testing.Job() as job:
        feed = job.input("rows", columns or COLUMNS)
        feed.stream.sink_to(sink, uid="out")
        job.start()
        yield job, feed


def give(feed: hf.testing.Feed, *ids: int) -> None:
    feed.add([{"id": number, "text": f"t{number}"} for number in ids])


def ids(kafka: KafkaServer, topic: str, partitions: int = 1) -> list[int]:
    return [row["id"] for row in objects(kafka, topic, partitions)]


def position(kafka: KafkaServer, sink_id: str) -> hf.CommitPosition:
    found = [message.value() for message in read(kafka, "holdfast-positions") if message.key() == sink_id.encode()]
    return hf.CommitPosition.decode(found[-1])


def test_an_output_is_the_same_behind_other_brokers() -> None:
    targets = [hf.KafkaSink(*where).target for where in (("a:9092", "orders"), ("b:9092,c:9092", "orders"), ("a:9092", "other"))]
    assert targets[0].identity == targets[1].identity != targets[2].identity


# --------------------------------------------------------------------------------------------------------------- exactly once


def kit(kafka: KafkaServer, new_topic: NewTopic, only: str | None = None, **options: Any) -> list[str]:
    topics: dict[str, str] = {}

    def make_sink(name: str, port: int = 0) -> hf.KafkaSink:
        """The port is not used: clients connect to what brokers say of themselves. Their faults stand for broken connections."""
        topic = topics.setdefault(name, "") or new_topic()
        topics[name] = topic
        return hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}", key="id")

    def read_rows(name: str) -> list[tuple[int, str | None]]:
        return [(row["id"], row["text"]) for row in objects(kafka, topics[name])] if name in topics else []

    def nothing_open(name: str) -> dict[str, str]:
        """Of all outputs: the kit has one at a time."""
        return kafka.open_transactions()

    options.setdefault("points", "some" if only else "all")
    return hf.testing.check_sink(make_sink, read_rows, only=only, nothing_open=nothing_open, **options)


@pytest.mark.parametrize("only", ["owners that wake late", "fails behind call 2, apply"])
def test_the_kit_at_some_points(only: str, kafka: KafkaServer, new_topic: NewTopic) -> None:
    assert kit(kafka, new_topic, only) == ["nothing fails", only]


@pytest.mark.endurance
def test_the_kit_at_all_points(kafka: KafkaServer, new_topic: NewTopic) -> None:
    assert len(kit(kafka, new_topic)) > 30


@pytest.mark.endurance
@pytest.mark.timeout(1800)
def test_the_broker_may_restart_anywhere(kafka: KafkaServer, new_topic: NewTopic) -> None:
    passed = kit(kafka, new_topic, points="some", server=kafka)
    assert any(each.startswith("server restarts within") for each in passed)


BROKEN = {
    "the commit's answer is lost": Fault(Harm.CLOSE, "EndTxn", before=False),
    "the commit is lost": Fault(Harm.CLOSE, "EndTxn"),
    "rows are lost": Fault(Harm.CLOSE, "Produce"),
    "the answer to rows is lost": Fault(Harm.CLOSE, "Produce", before=False),
    "the coordinator has moved": Fault(Harm.REFUSE, "EndTxn", code=Code.NOT_COORDINATOR),
}


@pytest.mark.parametrize("what", BROKEN)
def test_rows_are_there_once_when(what: str, kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    with running(hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}")) as (job, feed):
        give(feed, 1, 2)
        kafka.plan(BROKEN[what])
        job.checkpoint()
        give(feed, 3)
        job.checkpoint()
        assert ids(kafka, topic) == [1, 2, 3]
    assert kafka.open_transactions() == {}


def restart_when_dead(kafka: KafkaServer) -> None:
    wait_until(lambda: not kafka.is_alive, what="the broker is dead")
    kafka.start()


@pytest.mark.endurance
@pytest.mark.parametrize("before", [True, False])
def test_rows_are_there_once_when_the_broker_dies_in_a_commit(before: bool, kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    with running(hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}")) as (job, feed):
        give(feed, 1, 2)
        kafka.plan(Fault(Harm.KILL, "EndTxn", before=before))
        restarting = Thread(target=restart_when_dead, args=(kafka,))
        restarting.start()
        job.checkpoint()
        restarting.join()
        assert ids(kafka, topic) == [1, 2]


def test_rows_go_where_their_columns_say(kafka: KafkaServer, new_topic: NewTopic) -> None:
    one, two = new_topic(), new_topic(3)
    texts = [(name, pa.string()) for name in ("to", "key", "h")]
    columns = pa.schema([*texts, ("id", pa.int64()), ("at", pa.timestamp("ms"))])
    sink = hf.KafkaSink(
        kafka.bootstrap, sink_id=f"sink-{one}", topic_column="to", key="key", headers={"hop": "h"}, timestamp="at", value=["id"]
    )
    with running(sink, columns) as (job, feed):
        rows = [{"to": one if n % 2 else two, "key": f"k{n % 4}", "id": n, "at": 1_000 + n, "h": "x"} for n in range(8)]
        feed.add(pa.RecordBatch.from_pylist([{**row, "at": row["at"]} for row in rows], schema=columns).to_pylist())
        job.checkpoint()
    assert ids(kafka, one) == [1, 3, 5, 7]
    spread = read(kafka, two, 3)
    assert sorted(json.loads(message.value())["id"] for message in spread) == [0, 2, 4, 6]
    assert {message.key(): message.partition() for message in spread}.keys() == {b"k0", b"k2"}
    assert all(message.timestamp()[1] == 1_000 + json.loads(message.value())["id"] for message in spread)
    assert spread[0].headers() == [("hop", b"x")]


def test_a_transaction_of_another_sink_that_hides_the_position_is_waited_for(
    kafka: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()
    sink = hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}")
    with running(sink) as (job, feed):
        other = Rdkafka(kafka.bootstrap, f"other-{topic}")
        other.init()
        other.begin()
        other.send("holdfast-positions", b"of another sink")
        give(feed, 1)
        job.checkpoint()  # its record is behind that one, and hidden
        monkeypatch.setattr(commit_topic, "STABLE_S", 0.1)
        monkeypatch.setattr(target_committer, "TRIES", replace(TRIES, attempts_max=2))
        with pytest.raises(hf.StorageUnavailableError, match="a transaction is open in commit_topic holdfast-positions"):
            job.restart()
        other.abort()
        monkeypatch.undo()
        job.restart()
        give(feed, 2)
        job.checkpoint()
        assert ids(kafka, topic) == [1, 2]


def test_positions_outlive_compaction(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    with running(hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}")) as (job, feed):
        for number in range(3):
            give(feed, number)
            job.checkpoint()
        kafka.compact("holdfast-positions")
        assert position(kafka, f"sink-{topic}").checkpoint_id == 3
        job.restart()
        give(feed, 3)
        job.checkpoint()
        assert ids(kafka, topic) == [0, 1, 2, 3]


def test_the_newest_position_is_found_behind_those_of_many_others(
    kafka: KafkaServer, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_topic, "WINDOW", 2)
    monkeypatch.setattr(commit_topic, "WINDOW_GROWTH", 2)
    topic = new_topic()
    with running(hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}")) as (job, feed):
        give(feed, 1)
        job.checkpoint()
        other = Rdkafka(kafka.bootstrap, f"other-{topic}")
        other.init()
        for _ in range(20):
            other.transaction("holdfast-positions", b"of another sink")
        job.restart()
        give(feed, 2)
        job.checkpoint()
        assert ids(kafka, topic) == [1, 2]


def test_two_jobs_on_one_sink_are_one_too_many(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    sink = hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}")
    with running(sink) as (job, feed):
        give(feed, 1)
        job.checkpoint()
        kafka.requests()
        with hf.testing.Job("another") as second:
            other = second.input("rows", COLUMNS)
            other.stream.sink_to(hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}"), uid="out")
            with pytest.raises(hf.FencedError, match=f"sink-{topic}"):
                second.start()
        assert "InitProducerId" not in kafka.requests()  # the owner is not disturbed
        give(feed, 2)
        job.checkpoint()
        assert ids(kafka, topic) == [1, 2]


# ------------------------------------------------------------------------------------------------------------- at least once


def test_at_least_once_rows_are_seen_at_once_and_repeated_behind_a_failure(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    with running(hf.KafkaSink(kafka.bootstrap, topic, guarantee="at_least_once")) as (job, feed):
        give(feed, 1)
        job.checkpoint()
        assert ids(kafka, topic) == [1]
        give(feed, 2)
        job.restart()
        job.checkpoint()
        found = ids(kafka, topic)
        assert found[0] == 1
        assert set(found) == {1, 2}


def test_at_least_once_a_call_that_waits_for_brokers_ends_with_its_attempt() -> None:
    schema = pa.schema([("topic", pa.string()), ("text", pa.string())])
    sink = hf.KafkaSink("127.0.0.1:1", topic_column="topic", guarantee="at_least_once", sink_id="out")
    operator = sink.create_writer(schema)
    assert isinstance(operator, KafkaWriterOperator)
    writer = operator._kafka
    writer.open(FunctionContext(SimpleNamespace(subtask=0)))
    writer.write(pa.record_batch([["orders"], ["a"]], schema=schema))
    raised: list[BaseException] = []

    def flush() -> None:
        try:
            writer.flush(end_of_input=False)
        except hf.StorageUnavailableError as error:
            raised.append(error)

    waiting = Thread(target=flush, daemon=True)
    waiting.start()
    writer.end()
    waiting.join(30)
    assert raised
    writer.close()


def test_at_least_once_a_row_that_kafka_would_not_take_names_its_operator(kafka: KafkaServer, new_topic: NewTopic) -> None:
    sink = hf.KafkaSink(kafka.bootstrap, new_topic(), guarantee="at_least_once", key="text")
    with running(sink) as (_, feed), pytest.raises(hf.InvalidRowError) as raised:
        feed.add([{"id": 1, "text": None}])
    assert raised.value.operator == "out"


# ------------------------------------------------------------------------------------------------------------------ bad input


def test_a_topic_that_is_not_there_is_named(kafka: KafkaServer) -> None:
    with pytest.raises(hf.InvalidConfigError, match="KafkaSink: topic no-such-topic at"), running(
        hf.KafkaSink(kafka.bootstrap, "no-such-topic", "sink-nowhere")
    ):
        pass


def test_a_topic_without_rights_is_named(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    kafka.deny(topic)
    with pytest.raises(hf.InvalidConfigError, match=f"{topic}.*[Aa]uthoriz"), running(
        hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}")
    ):
        pass


def test_a_commit_topic_that_forgets_is_refused(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic, forgets = new_topic(), new_topic(cleanup_policy="delete")
    with pytest.raises(hf.InvalidConfigError, match=r"cleanup\.policy=delete") as raised, running(
        hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}", commit_topic=forgets)
    ):
        pass
    assert raised.value.setting == "commit_topic"


def test_a_wrong_password_is_told_and_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_PASSWORD", "wr0ng-one")
    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "ann"}
    with KafkaServer(users={"ann": "right"}) as server:
        sink = hf.KafkaSink(server.bootstrap, "orders", settings={**login, "sasl.password": hf.Secret("HOLDFAST_TEST_PASSWORD")})
        assert "wr0ng-one" not in repr(sink)
        with pytest.raises(hf.InvalidConfigError, match=r"[Aa]uthentication") as raised, running(sink):
            pass
        assert "wr0ng-one" not in repr(raised.value) + str(raised.value.fields)


SETTINGS: dict[str, dict[str, Any]] = {
    "transactional.id can't be set": {"settings": {"transactional.id": "mine"}},
    "acks can't be set": {"settings": {"acks": 1}},
    "bootstrap.servers can't be set": {"settings": {"bootstrap.servers": "other:9092"}},
    'give sasl.password as hf.Secret': {"settings": {"sasl.password": "hunter2"}},
    "is a text, a number or a bool": {"settings": {"error_cb": print}},
    "guarantee is": {"guarantee": "twice"},
    "either topic or topic_column": {"topic_column": "to"},
    "commit_topic is a topic for positions alone": {"commit_topic": "orders"},
    "message.max.bytes is a number": {"settings": {"message.max.bytes": "much"}},
    "rows_per_commit must be": {"rows_per_commit": 0},
}


@pytest.mark.parametrize("reason", SETTINGS)
def test_settings_that_would_break_the_promise_are_refused(reason: str) -> None:
    with pytest.raises(hf.InvalidConfigError, match=reason) as raised:
        hf.KafkaSink("localhost:9092", "orders", **SETTINGS[reason])
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("settings", [{"no.such.setting": 1}, {"linger.ms": "soon"}, {"transaction.timeout.ms": -5}])
def test_settings_that_the_client_does_not_take_are_refused_when_the_graph_is_built(settings: dict[str, Any]) -> None:
    with hf.testing.Job() as job:
        job.input("rows", COLUMNS).stream.sink_to(hf.KafkaSink("localhost:1", "orders", settings=settings))
        with pytest.raises(hf.InvalidConfigError, match="KafkaSink"):
            job.start()


def test_a_row_without_a_key_is_in_no_checkpoint(kafka: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    with running(hf.KafkaSink(kafka.bootstrap, topic, f"sink-{topic}", key="text")) as (_job, feed):
        with pytest.raises(hf.InvalidRowError) as raised:
            feed.add([{"id": 1, "text": None}])
        assert (raised.value.operator, raised.value.column) == ("out", "text")
    assert ids(kafka, topic) == []
