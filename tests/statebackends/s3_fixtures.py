"""Fixtures of tests against an S3 server; imported by the modules that use them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.statebackends.storage.s3 import S3Storage
from holdfast.statebackends.storage.s3_connection import PART_BYTES_MIN, S3Connection
from tests.s3_server import CREDENTIALS, S3Server, SimClock, connect, storage_on


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        server = S3Server()
        yield server
        server.close()


@pytest.fixture(scope="module")
def first(server: S3Server) -> Iterator[S3Connection]:
    """Whose client the others share."""
    connection = connect(server)
    yield connection
    connection.close()


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def connection(server: S3Server, first: S3Connection, clock: SimClock) -> Iterator[S3Connection]:
    connection = connect(server, clock, like=first, part_bytes=PART_BYTES_MIN)
    yield connection
    connection._client = None  # the first one's
    connection.close()
    server.heal()


@pytest.fixture
def storage(server: S3Server, connection: S3Connection) -> S3Storage:
    """Empty; its bucket is known to take conditions."""
    storage = storage_on(server, connection)
    storage.check_conditions()
    server.names()
    return storage
