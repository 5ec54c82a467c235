"""The source of NATS at a real server: positions at any row, work queues, lost data, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import nats
import pytest

import holdfast as hf
from holdfast.operators.connectors.nats import source
from tests.operators.connectors.nats.conftest import create_stream
from tests.servers.nats import NatsServer


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a job under test stands still while a reader waits for messages."""
    monkeypatch.setattr(source, "EXPIRES_S", 0.005)


def publish(url: str, subject: str, payloads: Iterable[bytes]) -> None:
    async def send() -> None:
        client = await nats.connect(url)
        for payload in payloads:
            await client.jetstream().publish(subject, payload)
        await client.close()

    asyncio.run(send())


def administer(url: str, act: Any) -> Any:
    async def call() -> Any:
        client = await nats.connect(url)
        try:
            return await act(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(call())


def count(url: str, stream: str) -> int:
    return int(administer(url, lambda jetstream: jetstream.stream_info(stream)).state.messages)


def filled(server: NatsServer, stream: str, numbers: Iterable[int], subject: str = "rows") -> list[tuple[str, bytes]]:
    """What is read of it."""
    low = stream.lower()
    payloads = [b"message %d" % number for number in numbers]
    publish(server.url, f"{low}.{subject}", payloads)
    return [(f"{low}.{subject}", payload) for payload in payloads]


def as_read(row: dict[str, Any]) -> tuple[str, bytes]:
    return row["subject"], row["data"]


def read_all(messages: hf.NatsSource) -> list[bytes]:
    """Of a source that ends."""
    with hf.testing.Job("read") as job:
        output = job.output(job.environment.from_source(messages).uid("messages"))
        job.start()
        if job.status == "RUNNING":
            job.advance(by_ms=1_000)
        assert job.status == "FINISHED"
        return [row["data"] for row in output.rows()]


def test_each_message_is_read_once_at_any_cut(nats_server: NatsServer, stream: str) -> None:
    expected = [*filled(nats_server, stream, range(8), "a.eu"), *filled(nats_server, stream, range(5), "b")]
    low = stream.lower()

    def make() -> hf.NatsSource:
        return hf.NatsSource(nats_server.url, stream, subjects=[f"{low}.a.*", f"{low}.b"], stop="latest")

    hf.testing.check_source(make, expected, row=as_read)


@pytest.mark.endurance
@pytest.mark.timeout(1800)
def test_the_server_may_restart_anywhere(nats_server: NatsServer, stream: str) -> None:
    expected = [*filled(nats_server, stream, range(8), "a"), *filled(nats_server, stream, range(5), "b")]
    low = stream.lower()

    def make() -> hf.NatsSource:
        return hf.NatsSource(nats_server.url, stream, subjects=[f"{low}.a", f"{low}.b"], stop="latest")

    hf.testing.check_source(make, expected, row=as_read, points_max=3, server=nats_server)


def test_json_becomes_columns_and_what_does_not_fit_leaves_by_the_dead_letters(nats_server: NatsServer, stream: str) -> None:
    low = stream.lower()
    good = [b'{"id": %d, "item": "i%d"}' % (number, number) for number in range(4)]
    sent = [good[0], b"no json", good[1], b'{"id": "x"}', b'{"item": "no id"}', b"", good[2], good[3], b"[]"]
    publish(nats_server.url, f"{low}.rows", sent)
    messages = hf.NatsSource(nats_server.url, stream, schema={"id": int, "item": str | None}, stop="latest")
    with hf.testing.Job("read", batch_rows=2) as job:
        rows = job.environment.from_source(messages).uid("messages")
        output, letters = job.output(rows), job.output(rows.side_output(hf.DEAD_LETTERS))
        job.start()
        if job.status == "RUNNING":
            job.advance(by_ms=1_000)
        assert output.rows() == [{"id": number, "item": f"i{number}"} for number in range(4)]
        found = [(row["position"], row["raw"]) for row in letters.rows()]
        assert found == [([sequence], sent[sequence - 1]) for sequence in (2, 4, 5, 6, 9)]
    with pytest.raises(hf.InvalidRecordError, match="2"):
        read_all(messages)
    with pytest.raises(hf.InvalidConfigError, match="NatsSource: schema has no columns"):
        hf.NatsSource(nats_server.url, stream, schema={})


def test_bounds_are_decided_once(nats_server: NatsServer, stream: str) -> None:
    filled(nats_server, stream, range(5))
    between = datetime.datetime.now(datetime.UTC)
    filled(nats_server, stream, range(5, 10))
    url = nats_server.url
    assert read_all(hf.NatsSource(url, stream, stop="latest")) == [b"message %d" % number for number in range(10)]
    assert read_all(hf.NatsSource(url, stream, start=between, stop="latest")) == [b"message %d" % number for number in range(5, 10)]
    assert read_all(hf.NatsSource(url, stream, stop=between)) == [b"message %d" % number for number in range(5)]
    assert read_all(hf.NatsSource(url, stream, start=3, stop=5)) == [b"message 2", b"message 3"]
    assert read_all(hf.NatsSource(url, stream, start="latest", stop="latest")) == []


def test_a_time_to_stop_that_is_to_come_is_waited_for_on_an_idle_stream_too(nats_server: NatsServer, stream: str) -> None:
    filled(nats_server, stream, range(3), "busy")
    stop = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.8)
    low = stream.lower()
    messages = hf.NatsSource(nats_server.url, stream, subjects=[f"{low}.busy", f"{low}.idle"], stop=stop)
    with hf.testing.Job("read") as job:
        output = job.output(job.environment.from_source(messages).uid("messages"))
        job.start()
        job.advance(by_ms=100)
        job.checkpoint()
        filled(nats_server, stream, range(3, 5), "busy")
        job.fail()
        until(lambda: job.status == "FINISHED", job)
        assert datetime.datetime.now(datetime.UTC) >= stop
        assert [row["data"] for row in output.rows()] == [b"message %d" % number for number in range(5)]


def until(holds: Callable[[], bool], job: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        if job.status == "RUNNING":
            job.advance(by_ms=100)


def test_the_first_message_behind_a_time_to_stop_ends_the_split(nats_server: NatsServer, stream: str) -> None:
    stop = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.3)
    messages = hf.NatsSource(nats_server.url, stream, stop=stop)
    (split,) = messages.create_enumerator().discover()
    assert split.stop is None
    filled(nats_server, stream, range(3))
    while datetime.datetime.now(datetime.UTC) < stop:
        administer(nats_server.url, lambda jetstream: jetstream.stream_info(stream))
    filled(nats_server, stream, range(3, 6))
    reader = reader_of(messages)
    reader.open()
    try:
        reader.add_splits([hf.AssignedSplit(split)])
        (records,) = reader.fetch()
        assert (records.num_rows, records.finished, records.position) == (3, True, (4,))
    finally:
        reader.close()


def test_messages_that_come_later_are_read_and_the_start_is_not_decided_again(nats_server: NatsServer, stream: str) -> None:
    filled(nats_server, stream, range(5))
    with hf.testing.Job("read") as job:
        output = job.output(job.environment.from_source(hf.NatsSource(nats_server.url, stream, start="latest")).uid("messages"))
        job.start()
        job.checkpoint()
        filled(nats_server, stream, range(5, 8))
        job.fail()
        job.advance(by_ms=2_000)
        assert [row["data"] for row in output.rows()] == [b"message 5", b"message 6", b"message 7"]


def test_a_work_queue_loses_a_message_when_a_checkpoint_behind_it_is_complete(nats_server: NatsServer) -> None:
    stream = create_stream(nats_server.url, "QUEUE", retention="workqueue")
    filled(nats_server, stream, range(6))
    with hf.testing.Job("read") as job:
        output = job.output(job.environment.from_source(hf.NatsSource(nats_server.url, stream)).uid("messages"))
        job.start()
        job.advance(by_ms=1_000)
        assert len(output.take()) == 6
        assert count(nats_server.url, stream) == 6, "a message was acknowledged before its checkpoint"
        job.fail()
        job.advance(by_ms=1_000)
        assert len(output.take()) == 6
        job.savepoint()
        assert count(nats_server.url, stream) == 6, "a plain savepoint acknowledges nothing"
        job.checkpoint()
        job.advance(by_ms=1_000)
        assert count(nats_server.url, stream) == 0
        filled(nats_server, stream, range(6, 9))
        job.fail()
        job.advance(by_ms=1_000)
        assert [row["data"] for row, _ in output.take()] == [b"message 6", b"message 7", b"message 8"]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_messages_that_are_gone_are_missed_or_skipped_by_name(nats_server: NatsServer, stream: str, policy: str) -> None:
    filled(nats_server, stream, range(10))
    with hf.testing.Job("read", restart="none") as job:
        messages = hf.NatsSource(nats_server.url, stream, start=1, on_data_loss=policy)
        output = job.output(job.environment.from_source(messages).uid("messages"))
        administer(nats_server.url, lambda jetstream: jetstream.purge_stream(stream, seq=5))
        if policy == "fail":
            with pytest.raises(hf.SourceDataLostError, match="messages from 1 on are gone: the oldest message is 5"):
                job.start()
            return
        job.start()
        job.advance(by_ms=1_000)
        assert [row["data"] for row in output.rows()] == [b"message %d" % number for number in range(4, 10)]


def test_a_stream_that_was_made_anew_is_told_from_the_old_one(nats_server: NatsServer) -> None:
    stream = create_stream(nats_server.url, "ANEW")
    filled(nats_server, stream, range(3))
    with hf.testing.Job("read") as job:
        job.output(job.environment.from_source(hf.NatsSource(nats_server.url, stream)).uid("messages"))
        job.start()
        job.advance(by_ms=1_000)
        job.checkpoint()
        administer(nats_server.url, lambda jetstream: jetstream.delete_stream(stream))
        create_stream(nats_server.url, "ANEW")
        filled(nats_server, stream, range(20))
        with pytest.raises(hf.SourceDataLostError, match="the stream was made anew"):
            job.fail()


def test_a_consumer_that_the_server_has_lost_is_made_again(nats_server: NatsServer, stream: str) -> None:
    filled(nats_server, stream, range(3))
    with hf.testing.Job("read") as job:
        output = job.output(job.environment.from_source(hf.NatsSource(nats_server.url, stream)).uid("messages"))
        job.start()
        job.advance(by_ms=1_000)

        async def forget(jetstream: Any) -> None:
            for consumer in await jetstream.consumers_info(stream):
                await jetstream.delete_consumer(stream, consumer.name)

        administer(nats_server.url, forget)
        filled(nats_server, stream, range(3, 6))
        job.advance(by_ms=1_500)
        assert [row["data"] for row in output.rows()] == [b"message %d" % number for number in range(6)]


def test_bad_settings_are_named(nats_server: NatsServer) -> None:
    url = nats_server.url
    with pytest.raises(hf.InvalidConfigError, match=r"start is 'earliest' or 'latest', a sequence from 1, or a time with its zone"):
        hf.NatsSource(url, "ORDERS", start="first")
    with pytest.raises(hf.InvalidConfigError, match="a time with its zone"):
        hf.NatsSource(url, "ORDERS", start=datetime.datetime(2026, 1, 1))
    with pytest.raises(hf.InvalidConfigError, match="is no name of a stream"):
        hf.NatsSource(url, "or ders")
    with pytest.raises(hf.InvalidConfigError, match="there is no stream NOWHERE"):
        read_all(hf.NatsSource(url, "NOWHERE"))
    stream = create_stream(url, "QUEUE2", retention="workqueue")
    with pytest.raises(hf.InvalidConfigError, match="is a work queue: it has no start"):
        read_all(hf.NatsSource(url, stream, stop="latest"))


def reader_of(messages: hf.NatsSource, attempt: int = 1) -> Any:
    return messages.create_split_reader(SimpleNamespace(job_id="job", uid="messages", subtask=0, attempt=attempt))


def fetched(reader: Any, rows: int) -> list[bytes]:
    """What comes until there are so many rows, or until a second has passed without one."""
    found: list[bytes] = []
    deadline = time.monotonic() + 1.0
    while len(found) < rows and time.monotonic() < deadline:
        for records in reader.fetch():
            found += records.columns.column("data").to_pylist()
            deadline = time.monotonic() + 1.0
    return found


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_a_stream_that_is_made_anew_under_a_reader_is_not_read_on(nats_server: NatsServer, policy: str, retention: str) -> None:
    stream = create_stream(nats_server.url, f"UNDER-{policy}-{retention}", retention=retention)
    filled(nats_server, stream, range(5))
    messages = hf.NatsSource(nats_server.url, stream, on_data_loss=policy)
    (split,) = messages.create_enumerator().discover()
    reader = reader_of(messages)
    reader.open()
    try:
        reader.add_splits([hf.AssignedSplit(split)])
        assert len(fetched(reader, 5)) == 5
        administer(nats_server.url, lambda jetstream: jetstream.delete_stream(stream))
        create_stream(nats_server.url, stream, retention=retention)
        filled(nats_server, stream, range(100, 107))
        reader.notify_checkpoint_complete({split.split_id: (6,)})
        assert count(nats_server.url, stream) == 7, "messages of the new stream were acknowledged"
        with pytest.raises(hf.SourceDataLostError, match="messages from 6 on are gone: the stream was made anew"):
            fetched(reader, 7)
    finally:
        reader.close()


def test_an_owner_that_wakes_late_takes_nothing_of_its_successors_queue(nats_server: NatsServer) -> None:
    stream = create_stream(nats_server.url, "LATE", retention="workqueue")
    messages = hf.NatsSource(nats_server.url, stream)
    (split,) = messages.create_enumerator().discover()
    late, successor = reader_of(messages), reader_of(messages, 2)
    for reader in (late, successor):
        reader.open()
        reader.add_splits([hf.AssignedSplit(split)])
        assert not reader.fetch()
    try:
        expected = [payload for _, payload in filled(nats_server, stream, range(10))]
        fetched(late, 10)
        assert fetched(successor, 10) == expected
    finally:
        late.close()
        successor.close()


def test_a_stream_that_ends_in_front_of_the_position_is_not_read_again(nats_server: NatsServer, stream: str) -> None:
    filled(nats_server, stream, range(5))
    messages = hf.NatsSource(nats_server.url, stream, on_data_loss="skip")
    (split,) = messages.create_enumerator().discover()
    reader = reader_of(messages)
    reader.open()
    try:
        reader.add_splits([hf.AssignedSplit(split, (50,))])
        filled(nats_server, stream, range(5, 7))
        assert fetched(reader, 2) == [b"message 5", b"message 6"]
    finally:
        reader.close()


def test_a_quiet_subject_has_lost_nothing_when_messages_of_others_expire(nats_server: NatsServer, stream: str) -> None:
    low = stream.lower()
    filled(nats_server, stream, range(1), "quiet")
    messages = hf.NatsSource(nats_server.url, stream, subjects=[f"{low}.quiet"])
    (split,) = messages.create_enumerator().discover()
    reader = reader_of(messages)
    reader.open()
    try:
        reader.add_splits([hf.AssignedSplit(split)])
        assert fetched(reader, 1) == [b"message 0"]
        filled(nats_server, stream, range(9), "busy")
        (news,) = reader.fetch()
        assert (news.num_rows, news.position) == (0, (11,))
        administer(nats_server.url, lambda jetstream: jetstream.purge_stream(stream, seq=8))
        filled(nats_server, stream, range(1, 2), "quiet")
        assert fetched(reader, 1) == [b"message 1"]
    finally:
        reader.close()


def test_what_comes_behind_an_empty_batch_is_in_front_of_the_end(
    nats_server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = hf.NatsSource(nats_server.url, stream, stop=4)
    (split,) = messages.create_enumerator().discover()
    reader = reader_of(messages)
    reader.open()
    ask = reader._connection.stream_info

    def publish_first(name: str) -> Any:
        if reader._splits[split.split_id].consumer and count(nats_server.url, stream) == 0:
            filled(nats_server, stream, range(3))
        return ask(name)

    try:
        reader.add_splits([hf.AssignedSplit(split)])
        monkeypatch.setattr(reader._connection, "stream_info", publish_first)
        assert fetched(reader, 3) == [b"message 0", b"message 1", b"message 2"]
    finally:
        reader.close()


def test_a_message_that_is_longer_than_a_batch_comes_alone(
    nats_server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BATCH_BYTES", 2_000)
    payloads = [b"first", b"x" * 5_000, b"last"]
    publish(nats_server.url, f"{stream.lower()}.rows", payloads)
    assert read_all(hf.NatsSource(nats_server.url, stream, stop="latest")) == payloads


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [("a.*", "a.b", True), ("a.>", "a.b.c", True), ("*.b", "a.*", True), (">", "a", True),
     ("a.*", "a.b.c", False), ("a.b", "a.c", False), ("a", "a.>", False)],
)  # fmt: skip
def test_subjects_that_overlap_are_refused(first: str, second: str, both: bool) -> None:
    with pytest.raises(hf.InvalidConfigError, match="overlap") if both else contextlib.nullcontext():
        hf.NatsSource("nats://nowhere", "ORDERS", subjects=[first, second])
