"""The conformance kit with a server: PostgreSQL restarted, and connections to it cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.operators.connectors.postgres.session import Session
from tests.servers.postgres import PASSWORD, PostgresServer


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that dies in a test stays in this one: its connections are closed behind the test."""
    monkeypatch.setenv("TEST_PG_PASSWORD", PASSWORD)
    made: list[Session] = []
    connect = Session._connect

    def noted(session: Session) -> None:
        made.append(session)
        connect(session)

    monkeypatch.setattr(Session, "_connect", noted)
    yield
    for session in made:
        session.close()


class Tables:
    """An output is a table."""

    def __init__(self, server: PostgresServer, prefix: str) -> None:
        self.server = server
        self.prefix = prefix

    def make(self, name: str, port: int) -> hf.PostgresSink:
        self.server.execute(f"CREATE TABLE {self.prefix}_{name} (id int8, text text, n int8 GENERATED ALWAYS AS IDENTITY)")
        dsn = self.server.dsn_of(port=port).replace(f":{PASSWORD}@", "@")
        return hf.PostgresSink(dsn, f"{self.prefix}_{name}", password=hf.Secret("TEST_PG_PASSWORD"))

    def read(self, name: str) -> list[tuple[Any, ...]]:
        return self.server.execute(f"SELECT id, text FROM {self.prefix}_{name} ORDER BY n")

    def nothing_open(self, name: str) -> list[tuple[Any, ...]]:
        open_ones = "SELECT pid, state FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()"
        return self.server.execute(open_ones)

    def check(self, **how: Any) -> list[str]:
        return hf.testing.check_sink(self.make, self.read, server=self.server, **how)


FEW = ("connection broken behind chunk 14 to_server", "connection swallowed at chunk 13 to_client")
MORE = (
    "connection broken at chunk 1 to_server",  # in check(), before there is a job
    "server restarts within call 1, apply",
    "connection broken at chunk 12 to_server",
    "SIGSTOP behind row 1 of a process that commits",
)


@pytest.mark.parametrize("scenario", [*FEW, *(pytest.param(each, marks=pytest.mark.endurance) for each in MORE)])
def test_rows_are_exact_whatever_happens_to_the_server_and_its_connections(server: PostgresServer, scenario: str) -> None:
    tables = Tables(server, re.sub(r"\W", "_", scenario).lower()[:40])
    assert scenario in tables.check(only=scenario, nothing_open=tables.nothing_open)


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_every_chunk_of_its_connections_can_be_cut(server: PostgresServer) -> None:
    tables = Tables(server, "all")
    assert len(tables.check(points="all", nothing_open=tables.nothing_open)) > 150
