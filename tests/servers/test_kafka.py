"""The Kafka server's promises, as both clients see them: what is open or aborted stays hidden, a zombie is fenced, a repeat is
written once, and a restart loses nothing that was answered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, ResourceType

from tests.servers.kafka import Code, Fault, Harm, KafkaServer
from tests.servers.kafka_clients import _QUIET, CLIENTS, TIMEOUT_S, Client, Rdkafka, RefusedByBrokerError
from tests.servers.process import wait_until
from tests.servers.proxy import Break, Cut, Proxy

_NAMES = (f"topic-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server
        assert "Traceback" not in server.log_tail()  # a mistake of the server, which its clients may have got over


@pytest.fixture(autouse=True)
def healed(server: KafkaServer) -> Iterator[None]:
    yield
    if not server.is_alive:
        server.start()
    server.heal()
    server.release()
    server.write_markers()
    server.requests()  # no test waits for one of another's


@pytest.fixture(params=list(CLIENTS))
def client(request: pytest.FixtureRequest) -> type[Client]:
    return CLIENTS[request.param]


@pytest.fixture(scope="module")
def admin(server: KafkaServer) -> AdminClient:
    return AdminClient({"bootstrap.servers": server.bootstrap, "logger": _QUIET, "reconnect.backoff.max.ms": 100})


def new_topic(admin: AdminClient, partitions: int = 1, **config: str) -> str:
    name = next(_NAMES)
    topic = NewTopic(name, partitions, config={key.replace("_", "."): value for key, value in config.items()})
    admin.create_topics([topic])[name].result(TIMEOUT_S)
    return name


@pytest.fixture
def topic(admin: AdminClient) -> str:
    return new_topic(admin)


@pytest.fixture
def opened(server: KafkaServer, client: type[Client]) -> Iterator[Callable[..., Client]]:
    """Makes clients that are closed behind the test."""
    made: list[Client] = []

    def make(transactional_id: str, *, timeout_ms: int = 60_000) -> Client:
        made.append(client(server.bootstrap, transactional_id, timeout_ms=timeout_ms))
        made[-1].init()
        return made[-1]

    yield make
    for each in made:
        each.close()


def values(client: type[Client], server: KafkaServer, topic: str, *, committed: bool = True) -> list[bytes]:
    return [row.value for row in client.read(server.bootstrap, topic, committed=committed)]


# -------------------------------------------------------------------------------------------------------------------- transactions


def test_open_and_aborted_rows_are_hidden(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str
) -> None:
    producer = opened(f"hidden-{topic}")
    producer.transaction(topic, b"a", b"b")
    producer.begin()
    producer.send(topic, b"aborted")
    producer.abort()
    producer.transaction(topic, b"c")
    producer.begin()
    producer.send(topic, b"open")
    for reader in CLIENTS.values():  # what one writes, the other reads
        assert values(reader, server, topic) == [b"a", b"b", b"c"]
        assert values(reader, server, topic, committed=False) == [b"a", b"b", b"aborted", b"c", b"open"]
    assert server.open_transactions() == {f"hidden-{topic}": "Ongoing"}
    producer.commit()
    assert values(client, server, topic) == [b"a", b"b", b"c", b"open"]
    assert server.open_transactions() == {}


def test_a_zombie_is_fenced_and_its_rows_are_hidden(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str
) -> None:
    zombie = opened(f"owner-{topic}")
    zombie.begin()
    zombie.send(topic, b"of the zombie")
    successor = opened(f"owner-{topic}")
    successor.transaction(topic, b"of the successor")
    with pytest.raises(RefusedByBrokerError) as refused:
        zombie.commit()
    assert refused.value.fenced
    assert values(client, server, topic) == [b"of the successor"]
    assert server.open_transactions() == {}


def test_a_zombie_that_had_nothing_open_can_not_begin(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str
) -> None:
    zombie = opened(f"idle-{topic}")
    opened(f"idle-{topic}").transaction(topic, b"of the successor")
    with pytest.raises(RefusedByBrokerError) as refused:
        zombie.transaction(topic, b"of the zombie")
    assert refused.value.fenced
    assert values(client, server, topic, committed=False) == [b"of the successor"]


def test_a_transaction_that_is_open_too_long_is_aborted(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str
) -> None:
    producer = opened(f"slow-{topic}", timeout_ms=50_000)
    producer.begin()
    producer.send(topic, b"late")
    server.advance(49_000)
    assert server.open_transactions() != {}
    server.advance(2_000)
    assert server.open_transactions() == {}
    with pytest.raises(RefusedByBrokerError):
        producer.commit()
    assert values(client, server, topic) == []


def test_time_passes_by_itself(server: KafkaServer, topic: str) -> None:
    producer = Rdkafka(server.bootstrap, f"by-itself-{topic}", timeout_ms=1000)  # the least that librdkafka takes
    producer.init()
    producer.begin()
    with contextlib.suppress(RefusedByBrokerError):  # on a machine that is so busy
        producer.send(topic, b"late")
    wait_until(lambda: server.open_transactions() == {}, what="the transaction is aborted")
    with pytest.raises(RefusedByBrokerError):
        producer.commit()
    producer.close()


def test_offsets_move_with_the_transaction(server: KafkaServer, opened: Callable[..., Client], topic: str) -> None:
    group = f"group-{topic}"
    producer = opened(f"offsets-{topic}")
    producer.begin()
    producer.send(topic, b"a")
    producer.send_offset(topic, 7, group)
    producer.abort()
    assert committed_offset(server, topic, group) == confluent_kafka.OFFSET_INVALID
    producer.begin()
    producer.send(topic, b"a")
    producer.send_offset(topic, 8, group)
    producer.commit()
    assert committed_offset(server, topic, group) == 8


def committed_offset(server: KafkaServer, topic: str, group: str) -> int:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": server.bootstrap, "group.id": group, "logger": _QUIET})
    try:
        (found,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], TIMEOUT_S)
        return int(found.offset)
    finally:
        consumer.close()


def test_a_commit_is_answered_before_its_rows_are_visible(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str
) -> None:
    """Who reads its position at once must wait until the last stable offset has reached the end."""
    server.hold_markers()
    producer = opened(f"early-{topic}")
    producer.transaction(topic, b"a")
    assert values(client, server, topic) == []
    assert stable_and_end(server, topic) == (0, 1)
    server.write_markers()
    assert values(client, server, topic) == [b"a"]
    assert stable_and_end(server, topic) == (2, 2)  # the marker has an offset


def stable_and_end(server: KafkaServer, topic: str) -> tuple[int, int]:
    ends = []
    for isolation in ("read_committed", "read_uncommitted"):
        settings = {"bootstrap.servers": server.bootstrap, "group.id": "ends", "isolation.level": isolation, "logger": _QUIET}
        consumer = confluent_kafka.Consumer(settings)
        ends.append(consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, 0), TIMEOUT_S)[1])
        consumer.close()
    return ends[0], ends[1]


# ------------------------------------------------------------------------------------------ faults, restarts


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("api", ["InitProducerId", "AddPartitionsToTxn", "Produce", "EndTxn"])
def test_a_broken_connection_at_any_request_repeats_nothing(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str, api: str, before: bool
) -> None:
    server.plan(Fault(Harm.CLOSE, api, before=before))
    producer = opened(f"broken-{topic}")
    producer.transaction(topic, b"a", b"b")
    assert values(client, server, topic, committed=False) == [b"a", b"b"]
    assert values(client, server, topic) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("api", "code"),
    [
        ("InitProducerId", Code.COORDINATOR_LOAD_IN_PROGRESS),
        ("AddPartitionsToTxn", Code.NOT_COORDINATOR),
        ("Produce", Code.NOT_LEADER_OR_FOLLOWER),
        ("EndTxn", Code.COORDINATOR_NOT_AVAILABLE),
    ],
)
def test_a_request_that_is_refused_for_a_moment_is_repeated(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str, api: str, code: Code
) -> None:
    server.requests()
    server.plan(Fault(Harm.REFUSE, api, code=code))
    producer = opened(f"refused-{topic}")
    producer.transaction(topic, b"a", b"b")
    assert server.requests().count(api) > 1
    assert values(client, server, topic, committed=False) == [b"a", b"b"]


def test_the_server_forgets_nothing_when_it_is_killed(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str
) -> None:
    committed, waiting, unfinished = (opened(f"{name}-{topic}") for name in ("committed", "waiting", "unfinished"))
    committed.transaction(topic, b"a")
    committed.begin()
    committed.send(topic, b"aborted")
    committed.abort()
    waiting.begin()
    waiting.send(topic, b"b")
    server.hold_markers()
    waiting.commit()  # answered, and its markers are not written
    unfinished.begin()
    unfinished.send(topic, b"open")
    server.restart()
    assert server.open_transactions() == {f"unfinished-{topic}": "Ongoing"}
    assert values(client, server, topic) == [b"a", b"b"]
    unfinished.commit()
    assert values(client, server, topic) == [b"a", b"b", b"open"]


def test_a_commit_whose_answer_dies_with_the_server_is_done(
    server: KafkaServer, client: type[Client], opened: Callable[..., Client], topic: str
) -> None:
    producer = opened(f"dying-{topic}")
    producer.begin()
    producer.send(topic, b"a")
    server.plan(Fault(Harm.KILL, "EndTxn", before=False))
    with ThreadPoolExecutor(1) as pool:
        restarted = pool.submit(start_when_dead, server)
        producer.commit()
        restarted.result()
    assert values(client, server, topic) == [b"a"]


def start_when_dead(server: KafkaServer) -> None:
    wait_until(lambda: not server.is_alive, what="it dies")
    server.start()


def test_a_held_commit_takes_effect_once_its_client_is_gone(server: KafkaServer, topic: str) -> None:
    """It is neither done nor refused for as long as it is on its way; only a fence says what became of it."""
    with Proxy(server.proxied_port) as proxy, ThreadPoolExecutor(1) as pool:
        server.advertise(proxy.port)
        gone = Rdkafka(f"127.0.0.1:{proxy.port}", f"held-{topic}")
        gone.init()
        gone.begin()
        gone.send(topic, b"a")
        server.plan(Fault(Harm.HOLD, "EndTxn"))
        commit = pool.submit(gone.commit)
        wait_until(lambda: "EndTxn" in server.requests(), what="the commit arrives")
        proxy.refuse()
        proxy.break_all()
        assert values(Rdkafka, server, topic) == []
        server.release()
        wait_until(lambda: server.open_transactions() == {}, what="the commit is done")
        assert values(Rdkafka, server, topic) == [b"a"]
        proxy.heal()
        commit.result(TIMEOUT_S)  # its repeat is answered as the first would have been
        gone.close()


def test_a_held_commit_that_a_successor_overtook_is_refused(server: KafkaServer, topic: str) -> None:
    zombie, successor = Rdkafka(server.bootstrap, f"overtaken-{topic}"), Rdkafka(server.bootstrap, f"overtaken-{topic}")
    zombie.init()
    zombie.begin()
    zombie.send(topic, b"of the zombie")
    server.plan(Fault(Harm.HOLD, "EndTxn"))
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(zombie.commit)
        wait_until(lambda: "EndTxn" in server.requests(), what="the commit arrives")
        successor.init()
        server.release()
        with pytest.raises(RefusedByBrokerError):
            commit.result(TIMEOUT_S)
    assert values(Rdkafka, server, topic) == []
    zombie.close()
    successor.close()


def test_a_paused_server_answers_when_it_goes_on(server: KafkaServer, topic: str) -> None:
    producer = Rdkafka(server.bootstrap, f"paused-{topic}")
    producer.init()
    producer.begin()
    producer.send(topic, b"a")
    server.pause()
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(producer.commit)
        server.resume()
        commit.result(TIMEOUT_S)
    assert values(Rdkafka, server, topic) == [b"a"]
    producer.close()


@pytest.mark.parametrize("how", [Break.RESET, Break.SHUTDOWN])
def test_a_proxy_in_front_of_it_breaks_its_clients_connections(server: KafkaServer, topic: str, how: Break) -> None:
    """Clients behind it stay there, for the server names its port to them."""
    with Proxy(server.proxied_port) as proxy:
        server.advertise(proxy.port)
        producer = Rdkafka(f"127.0.0.1:{proxy.port}", f"cut-{topic}")
        producer.init()
        producer.transaction(topic, b"a")
        proxy.cut(None)
        producer.transaction(topic, b"b")
        count = proxy.chunks()
        assert count > 4  # rows, commit, and their answers went through it
        expected = [b"a", b"b"]
        for chunk in range(1, count + 1, 3):
            proxy.cut(Cut(chunk, how=how, delivered=chunk % 2 == 0))
            expected.append(b"%d" % chunk)
            producer.transaction(topic, expected[-1])
        assert values(Rdkafka, server, topic) == expected
        assert values(Rdkafka, server, topic, committed=False) == expected
        producer.close()


@pytest.mark.endurance
@pytest.mark.parametrize("how", list(Break))
def test_transactions_cut_at_every_chunk_are_there_once(server: KafkaServer, topic: str, how: Break) -> None:
    with Proxy(server.proxied_port) as proxy:
        server.advertise(proxy.port)
        producer = Rdkafka(f"127.0.0.1:{proxy.port}", f"every-{topic}", socket_timeout_ms=500)
        producer.init()
        expected: list[bytes] = []
        for chunk in range(1, 13):
            for delivered in (False, True):
                proxy.cut(Cut(chunk, how=how, delivered=delivered))
                expected += [b"%d %d" % (chunk, delivered), b"other"]
                producer.transaction(topic, *expected[-2:])
                proxy.heal()
        for reader in CLIENTS.values():
            assert values(reader, server, topic) == values(reader, server, topic, committed=False) == expected
        producer.close()


# ------------------------------------------------------------------------------------------ topics, offsets, configurations


def consumer_of(server: KafkaServer, group: str, **settings: str | int | bool) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer({"bootstrap.servers": server.bootstrap, "group.id": group, "logger": _QUIET, **settings})


def test_offsets_by_time(server: KafkaServer, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap, "logger": _QUIET, "compression.type": "gzip"})
    for number in range(5):
        producer.produce(topic, b"x" * 100, timestamp=1_000_000 + number * 1000)
    assert producer.flush(TIMEOUT_S) == 0
    consumer = consumer_of(server, "times")
    asked = [1, 1_000_000, 1_002_001, 1_004_000, 9_000_000]
    found = [consumer.offsets_for_times([confluent_kafka.TopicPartition(topic, 0, ms)], TIMEOUT_S)[0].offset for ms in asked]
    assert found == [0, 0, 3, 4, confluent_kafka.OFFSET_END]
    consumer.close()


def test_offsets_of_a_group_without_members_outlive_a_kill(server: KafkaServer, topic: str) -> None:
    consumer = consumer_of(server, f"assigned-{topic}")
    place = confluent_kafka.TopicPartition(topic, 0, 5, "what the reader knows")
    consumer.assign([place])
    consumer.commit(offsets=[place], asynchronous=False)
    server.restart()
    (found,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], TIMEOUT_S)
    assert (found.offset, found.metadata) == (5, "what the reader knows")
    consumer.close()


def test_a_row_that_is_too_long_is_refused(server: KafkaServer, admin: AdminClient) -> None:
    topic = new_topic(admin, max_message_bytes="1000")
    errors: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap, "logger": _QUIET})
    for size in (100, 2000):
        producer.produce(topic, b"x" * size, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(TIMEOUT_S) == 0
    assert errors[0] is None
    assert errors[1].code() == confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE


def test_what_was_deleted_is_out_of_range(server: KafkaServer, admin: AdminClient, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap, "logger": _QUIET})
    for number in range(4):
        producer.produce(topic, b"%d" % number)
    assert producer.flush(TIMEOUT_S) == 0
    (deleted,) = admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 3)]).values()
    assert deleted.result(TIMEOUT_S).low_watermark == 3
    server.restart()
    consumer = consumer_of(server, "deleted", **{"auto.offset.reset": "error"})
    assert consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, 0), TIMEOUT_S) == (3, 4)
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 1)])
    message = consumer.poll(TIMEOUT_S)
    assert message.error().code() == confluent_kafka.KafkaError._AUTO_OFFSET_RESET
    consumer.close()


def test_a_topic_that_is_made_again_begins_empty_under_another_id(server: KafkaServer, admin: AdminClient, topic: str) -> None:
    def topic_id() -> str:
        described = admin.describe_topics(confluent_kafka.TopicCollection([topic]))
        return str(described[topic].result(TIMEOUT_S).topic_id)

    before = topic_id()
    producer = Rdkafka(server.bootstrap, f"again-{topic}")
    producer.init()
    producer.transaction(topic, b"a")
    admin.delete_topics([topic])[topic].result(TIMEOUT_S)
    with pytest.raises(confluent_kafka.KafkaException):
        topic_id()
    admin.create_topics([NewTopic(topic, 1)])[topic].result(TIMEOUT_S)
    assert topic_id() != before
    server.restart()
    assert values(Rdkafka, server, topic, committed=False) == []
    producer.close()


def test_partitions_are_added(server: KafkaServer, admin: AdminClient, topic: str) -> None:
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(TIMEOUT_S)
    server.restart()
    assert sorted(admin.list_topics(topic, TIMEOUT_S).topics[topic].partitions) == [0, 1, 2]
    with pytest.raises(confluent_kafka.KafkaException, match="has 3"):
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(TIMEOUT_S)


def test_refusals(server: KafkaServer, admin: AdminClient, topic: str) -> None:
    for new in (NewTopic(topic, 1), NewTopic("no/name", 1), NewTopic("none", 0), NewTopic("copies", 1, 3)):
        with pytest.raises(confluent_kafka.KafkaException):
            admin.create_topics([new])[new.topic].result(TIMEOUT_S)
    server.deny(topic)
    for name, code in (("missing", "UNKNOWN_TOPIC_OR_PART"), (topic, "TOPIC_AUTHORIZATION_FAILED")):
        error = admin.list_topics(name, TIMEOUT_S).topics[name].error
        assert error.code() == getattr(confluent_kafka.KafkaError, code)
    server.deny()
    assert admin.list_topics(topic, TIMEOUT_S).topics[topic].error is None


def test_a_password_is_asked_for() -> None:
    with KafkaServer(users={"alice": "secret"}, auto_create_topics=True) as server:
        login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "alice"}
        errors: list[confluent_kafka.KafkaError] = []
        settings = {"bootstrap.servers": server.bootstrap, "logger": _QUIET, **login}
        wrong = AdminClient({**settings, "sasl.password": "wrong", "error_cb": errors.append})
        wait_until(lambda: not wrong.poll(0.05) and bool(errors), what="the refusal arrives")
        assert errors[0].code() == confluent_kafka.KafkaError._AUTHENTICATION
        right = confluent_kafka.Producer({**settings, "sasl.password": "secret"})
        right.produce("made-by-use", b"a")
        assert right.flush(TIMEOUT_S) == 0


def test_compaction_keeps_the_last_of_each_key_and_what_is_open(server: KafkaServer, admin: AdminClient) -> None:
    topic = new_topic(admin, cleanup_policy="compact")
    resource = ConfigResource(ResourceType.TOPIC, topic)
    (configs,) = admin.describe_configs([resource]).values()
    assert configs.result(TIMEOUT_S)["cleanup.policy"].value == "compact"
    settings = {"bootstrap.servers": server.bootstrap, "transactional.id": f"compacted-{topic}", "logger": _QUIET}
    producer = confluent_kafka.Producer(settings)
    producer.init_transactions(TIMEOUT_S)
    for number, ends in enumerate(["commit", "commit", "abort", "commit"]):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number, key=b"position")
        producer.produce(topic, b"%d" % number, key=b"other-%d" % number)
        assert producer.flush(TIMEOUT_S) == 0
        getattr(producer, f"{ends}_transaction")(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", key=b"position")
    assert producer.flush(TIMEOUT_S) == 0
    rows = [(9, b"3"), (10, b"3")]  # two rows and a marker a transaction
    for reader in CLIENTS.values():
        before = reader.read(server.bootstrap, topic)
        assert [row for row in before if row.offset >= 9] == rows
    server.compact(topic)
    expected = [(1, b"0"), (4, b"1"), *rows]
    for restarts in (False, True):
        if restarts:
            server.restart()
        for reader in CLIENTS.values():
            assert reader.read(server.bootstrap, topic) == expected
            assert reader.read(server.bootstrap, topic, committed=False) == [*expected, (12, b"open")]
    producer.commit_transaction(TIMEOUT_S)
    assert Rdkafka.read(server.bootstrap, topic) == [*expected, (12, b"open")]


def test_members_of_a_group_share_partitions(server: KafkaServer, admin: AdminClient) -> None:
    topic = new_topic(admin, partitions=4)
    shares: dict[str, list[int]] = {}
    consumers = {}
    for name in ("one", "two"):

        def assigned(_: object, partitions: list[confluent_kafka.TopicPartition], name: str = name) -> None:
            shares[name] = sorted(each.partition for each in partitions)

        consumers[name] = consumer_of(server, f"shared-{topic}", **{"heartbeat.interval.ms": 50})
        consumers[name].subscribe([topic], on_assign=assigned)

    def polled(*names: str) -> bool:
        return all(consumers[name].poll(0.01) is None for name in names)

    wait_until(
        lambda: polled("one", "two") and sorted(itertools.chain(*shares.values())) == [0, 1, 2, 3] and len(shares) == 2,
        what="shares",
    )
    assert {len(each) for each in shares.values()} == {2}
    consumers["one"].commit(offsets=[confluent_kafka.TopicPartition(topic, shares["one"][0], 5)], asynchronous=False)
    consumers["one"].close()
    wait_until(lambda: polled("two") and shares["two"] == [0, 1, 2, 3], what="the other takes all")
    consumers["two"].close()
