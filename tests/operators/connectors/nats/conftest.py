from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import nats
import pytest
from nats.js.errors import NotFoundError

from tests.servers.nats import NatsServer

_NAMES = itertools.count(1)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


Make = Callable[..., str]


def create_stream(url: str, name: str, **config: Any) -> str:
    """A stream with subjects `<name>.>` in lower case; its name."""

    async def create() -> None:
        client = await nats.connect(url)
        settings = {"name": name, "subjects": [f"{name.lower()}.>"], "allow_atomic": True, "allow_direct": True, **config}
        await client.jetstream().add_stream(**settings)
        await client.close()

    asyncio.run(create())
    return name


def messages_of(url: str, name: str, subject: str) -> list[bytes]:
    """All messages of a subject, in order."""

    async def read() -> list[bytes]:
        client = await nats.connect(url)
        found, sequence = [], 1
        try:
            while True:
                message = await client.jetstream().get_msg(name, seq=sequence, subject=subject, next=True, direct=True)
                found.append(message.data or b"")
                sequence = (message.seq or 0) + 1
        except NotFoundError:
            return found
        finally:
            await client.close()

    return asyncio.run(read())


@pytest.fixture
def stream(nats_server: NatsServer) -> str:
    return create_stream(nats_server.url, f"ORDERS{next(_NAMES)}")
