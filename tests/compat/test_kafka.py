"""What the connectors and their tests take for granted of Kafka, at a real broker: `make compat KAFKA=host:port`.

The same holds of the server in `tests/servers/kafka`, which its own tests ask in more detail. Topics and transactional ids have
names that no other run has; topics are deleted behind it."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.servers.kafka_clients import CLIENTS, TIMEOUT_S, Client, RefusedByBrokerError
from tests.servers.process import wait_until

BOOTSTRAP = os.environ.get("HOLDFAST_KAFKA", "")
pytestmark = [pytest.mark.compat, pytest.mark.skipif(not BOOTSTRAP, reason="no KAFKA=host:port")]
_RUN = uuid.uuid4().hex[:8]
_NUMBERS = itertools.count()


@pytest.fixture
def topic() -> Iterator[str]:
    admin = AdminClient({"bootstrap.servers": BOOTSTRAP})
    name = f"holdfast-{_RUN}-{next(_NUMBERS)}"
    admin.create_topics([NewTopic(name, 1)])[name].result(TIMEOUT_S)
    yield name
    admin.delete_topics([name])[name].result(TIMEOUT_S)


@pytest.fixture(params=list(CLIENTS))
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Client]]:
    made: list[Client] = []

    def make(transactional_id: str) -> Client:
        made.append(CLIENTS[request.param](BOOTSTRAP, transactional_id))
        made[-1].init()
        return made[-1]

    yield make
    for each in made:
        each.close()


def expect(topic: str, committed: list[bytes], everything: list[bytes]) -> None:
    """Both clients see these rows, once the markers of what was decided are written: that is behind its answer."""
    for name, client in CLIENTS.items():

        def seen(committed: bool, client: type[Client] = client) -> list[bytes]:
            return [row.value for row in client.read(BOOTSTRAP, topic, committed=committed)]

        wait_until(lambda: seen(True) == committed, what=f"{name} sees {committed}", timeout_s=TIMEOUT_S)
        assert seen(False) == everything


def test_open_and_aborted_rows_are_hidden(opened: Callable[[str], Client], topic: str) -> None:
    producer = opened(topic)
    producer.transaction(topic, b"a", b"b")
    producer.begin()
    producer.send(topic, b"aborted")
    producer.abort()
    producer.begin()
    producer.send(topic, b"open")
    expect(topic, [b"a", b"b"], [b"a", b"b", b"aborted", b"open"])
    producer.commit()
    expect(topic, [b"a", b"b", b"open"], [b"a", b"b", b"aborted", b"open"])


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_zombie_is_fenced(opened: Callable[[str], Client], topic: str, has_rows: bool) -> None:
    zombie = opened(topic)
    if has_rows:
        zombie.begin()
        zombie.send(topic, b"of the zombie")
    opened(topic).transaction(topic, b"of the successor")
    with pytest.raises(RefusedByBrokerError) as refused:
        zombie.commit() if has_rows else zombie.transaction(topic, b"of the zombie")
    assert refused.value.fenced
    everything = [b"of the zombie"] * has_rows + [b"of the successor"]
    expect(topic, [b"of the successor"], everything)


def test_offsets_move_with_the_transaction(opened: Callable[[str], Client], topic: str) -> None:
    def stores(offset: int) -> bool:
        settings = {"bootstrap.servers": BOOTSTRAP, "group.id": topic, "isolation.level": "read_committed"}
        consumer = confluent_kafka.Consumer(settings)
        try:
            return bool(consumer.committed([confluent_kafka.TopicPartition(topic, 0)], TIMEOUT_S)[0].offset == offset)
        finally:
            consumer.close()

    producer = opened(topic)
    for offset, ends, expected in ((7, producer.abort, confluent_kafka.OFFSET_INVALID), (8, producer.commit, 8)):
        producer.begin()
        producer.send_offset(topic, offset, topic)
        ends()
        wait_until(partial(stores, expected), what=f"offset {expected}", timeout_s=TIMEOUT_S)
