"""One server for the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.operators.connectors.postgres.session import Session
from tests.servers.postgres import PASSWORD, PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PG_PASSWORD", PASSWORD)


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that dies in a test stays in this one: its connections are closed behind the test."""
    made: list[Session] = []
    connect = Session._connect

    def noted(session: Session) -> None:
        made.append(session)
        connect(session)

    monkeypatch.setattr(Session, "_connect", noted)
    yield
    for session in made:
        session.close()
