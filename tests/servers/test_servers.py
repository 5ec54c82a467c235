"""PostgreSQL and NATS as tests start them: what they promise to the kit of connectors, and the ends that a server can meet."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import nats
import psycopg2
import psycopg2.extras
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.servers.kafka_clients import CLIENTS, TIMEOUT_S
from tests.servers.nats import NatsServer
from tests.servers.postgres import VERSIONS, PostgresServer
from tests.servers.process import HOST, ReservedPort, ServerProcess
from tests.servers.proxy import Break, Cut, Direction, Proxy
from tests.servers.tansu import TansuServer


def test_a_port_stays_reserved_and_refuses_while_no_server_listens() -> None:
    reserved = ReservedPort()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, reserved.number), timeout=5)
    with socket.create_server((HOST, reserved.number)) as server, socket.create_connection((HOST, reserved.number)):
        assert server.getsockname()[1] == reserved.number
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, reserved.number), timeout=5)
    reserved.close()


class Broken(ServerProcess):
    name = "broken"

    def _command(self) -> list[str]:
        return ["/bin/sh", "-c", "echo it is broken >&2; exit 3"]

    def _is_ready(self) -> bool:
        return False


def test_a_server_that_ends_as_it_starts_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended as it started") as raised, Broken(tmp_path):
        pass
    assert "it is broken" in "".join(raised.value.__notes__)


# ---------------------------------------------------------------------------------------------------------------------- PostgreSQL


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.mark.parametrize("version", [pytest.param(each, marks=pytest.mark.endurance) for each in VERSIONS if each != 18])
def test_each_version_starts(version: int) -> None:
    with PostgresServer(version) as server:
        assert str(server.execute("SHOW server_version")[0][0]).startswith(str(version))


def test_what_is_committed_outlives_a_kill(postgres: PostgresServer) -> None:
    postgres.execute("CREATE TABLE kept (number int)")
    postgres.execute("INSERT INTO kept VALUES (%s)", 1)
    connection = psycopg2.connect(postgres.dsn)
    connection.cursor().execute("INSERT INTO kept VALUES (2)")
    postgres.restart()
    with pytest.raises(psycopg2.OperationalError):
        connection.commit()
    connection.close()
    assert postgres.execute("SELECT number FROM kept") == [(1,)]


def test_changes_are_decoded_behind_a_slot(postgres: PostgresServer) -> None:
    postgres.execute("CREATE TABLE changed (number int)")
    postgres.execute("CREATE PUBLICATION changes FOR TABLE changed")
    connection = psycopg2.connect(postgres.dsn, connection_factory=psycopg2.extras.LogicalReplicationConnection)
    cursor = connection.cursor()
    cursor.create_replication_slot("changes", output_plugin="pgoutput")
    connection.close()
    postgres.execute("INSERT INTO changed VALUES (1)")
    options = "'proto_version', '1', 'publication_names', 'changes'"
    statement = f"SELECT count(*) FROM pg_logical_slot_peek_binary_changes('changes', NULL, NULL, {options})"
    assert postgres.execute(statement) == [(4,)]  # begin, relation, insert, commit
    postgres.execute("SELECT pg_drop_replication_slot('changes')")


def test_a_password_is_asked_for(postgres: PostgresServer) -> None:
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        psycopg2.connect(postgres.dsn_of(password="wrong"))


def test_a_transaction_cut_at_any_chunk_is_there_whole_or_not(postgres: PostgresServer) -> None:
    postgres.execute("CREATE TABLE cut (number int, part int)")

    def write(number: int, port: int) -> bool:
        """Whether the commit was answered."""
        try:
            connection = psycopg2.connect(postgres.dsn_of(port=port))
        except psycopg2.OperationalError:
            return False
        try:
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO cut VALUES (%s, 1)", (number,))
                cursor.execute("INSERT INTO cut VALUES (%s, 2)", (number,))
            connection.commit()
        except psycopg2.OperationalError:
            return False
        finally:
            connection.close()
        return True

    with Proxy(postgres.port) as proxy:
        assert write(0, proxy.port)
        count = proxy.chunks()
        answered = {0}
        for chunk in range(1, count + 1):
            proxy.cut(Cut(chunk, Direction.EITHER, Break.SHUTDOWN if chunk % 2 else Break.RESET, delivered=chunk % 3 == 0))
            if write(chunk, proxy.port):
                answered.add(chunk)
    found = dict(postgres.execute("SELECT number, count(*) FROM cut GROUP BY number"))
    assert set(found.values()) == {2}
    assert answered <= set(found)
    assert set(range(count)) - set(found), "no cut undid a transaction"


# ---------------------------------------------------------------------------------------------------------------------------- NATS


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    with NatsServer(user="user", password="secret") as server:
        yield server


async def connected(url: str) -> Any:
    async def quiet(_: Exception) -> None: ...

    return await nats.connect(url, allow_reconnect=False, connect_timeout=10, error_cb=quiet)


def test_atomic_batches_compare_and_outlive_a_kill(nats_server: NatsServer) -> None:
    async def publish(batch_id: str, values: list[bytes], expected: int) -> dict[str, Any]:
        """Answer to the last message of a batch, which is stored if the last of its subject has a sequence."""
        client = await connected(nats_server.url)
        for number, value in enumerate(values, 1):
            headers = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
            if number < len(values):
                await client.request("rows.a", value, headers=headers, timeout=10)
                continue
            headers |= {"Nats-Batch-Commit": "1", "Nats-Expected-Last-Subject-Sequence": str(expected)}
            answer = await client.request("rows.position", value, headers=headers, timeout=10)
        await client.close()
        found: dict[str, Any] = json.loads(answer.data)
        return found

    async def create() -> None:
        client = await connected(nats_server.url)
        config = b'{"name": "rows", "subjects": ["rows.*"], "storage": "file", "allow_atomic": true}'
        answer = await client.request("$JS.API.STREAM.CREATE.rows", config, timeout=10)
        assert b'"error"' not in answer.data, answer.data
        await client.close()

    async def count() -> int:
        client = await connected(nats_server.url)
        state = (await client.jetstream().stream_info("rows")).state
        await client.close()
        return int(state.messages)

    asyncio.run(create())
    assert asyncio.run(publish("one", [b"a", b"b", b"position 1"], 0))["seq"] == 3
    refused = asyncio.run(publish("two", [b"a", b"b", b"position 1"], 0))
    assert refused["error"]["err_code"] == 10071
    nats_server.restart()
    assert asyncio.run(count()) == 3
    assert asyncio.run(publish("three", [b"c", b"position 2"], 3))["seq"] == 5


def test_nats_asks_for_a_password(nats_server: NatsServer) -> None:
    with socket.create_connection((HOST, nats_server.port), timeout=10) as connection, connection.makefile("rb") as lines:
        assert lines.readline().startswith(b"INFO ")
        connection.sendall(b'CONNECT {"user": "user", "pass": "wrong", "verbose": false}\r\nPING\r\n')
        assert lines.readline() == b"-ERR 'Authorization Violation'\r\n"


# --------------------------------------------------------------------------------------------------------------------------- Tansu


@pytest.mark.parametrize("client", list(CLIENTS))
def test_tansu_takes_rows_and_gives_them_back(client: str) -> None:
    with TansuServer() as server:
        admin = AdminClient({"bootstrap.servers": server.bootstrap})
        admin.create_topics([NewTopic("rows", 1)])["rows"].result(TIMEOUT_S)
        producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap})
        for number in range(100):
            producer.produce("rows", b"%d" % number)
        assert producer.flush(TIMEOUT_S) == 0
        settings = {"bootstrap.servers": server.bootstrap, "group.id": "readers", "enable.auto.commit": False}
        if client == "librdkafka":
            consumer = confluent_kafka.Consumer(settings)
            consumer.assign([confluent_kafka.TopicPartition("rows", 0, 0)])
            found: list[bytes] = []
            while len(found) < 100:
                found += [message.value() for message in consumer.consume(100, 1.0) if message.error() is None]
            place = confluent_kafka.TopicPartition("rows", 0, 50)
            consumer.commit(offsets=[place], asynchronous=False)
            assert consumer.committed([confluent_kafka.TopicPartition("rows", 0)], TIMEOUT_S)[0].offset == 50
            consumer.close()
        else:
            found = [row.value for row in CLIENTS[client].read(server.bootstrap, "rows", committed=False)]
        assert found == [b"%d" % number for number in range(len(found))]
        assert found
