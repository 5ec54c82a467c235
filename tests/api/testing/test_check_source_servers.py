"""The conformance check of sources with a server whose connections break, or are swallowed, at a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

import holdfast as hf
from tests.api.testing.test_check_source import ALL, PartSource
from tests.operators.connectors.nats.conftest import create_stream
from tests.operators.connectors.nats.test_nats_source import publish
from tests.servers.nats import NatsServer


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


def messages(server: NatsServer, name: str) -> tuple[Callable[[int], hf.NatsSource], list[bytes]]:
    """A source of a stream of its own, by the port of a proxy, and what is there."""
    create_stream(server.url, name)
    rows = [b"%d" % number for number in range(12)]
    publish(server.url, f"{name.lower()}.a", rows)
    return lambda port: hf.NatsSource(server.url_behind(port), name, subjects=[f"{name.lower()}.a"], stop="latest"), rows


@pytest.mark.parametrize("cut", ["connection broken behind chunk 4 to_client", "connection swallowed at chunk 4 to_server"])
@pytest.mark.endurance
def test_messages_come_once_though_a_connection_is_cut(nats: NatsServer, cut: str) -> None:
    make, rows = messages(nats, f"ONE{len(cut)}")
    name = f"{cut}, parallelism 2, batch_rows 1"
    hf.testing.check_source(make, rows, row=lambda row: row["data"], points_max=400, server=nats, only=name)


def test_a_port_needs_a_server_and_a_connection() -> None:
    with pytest.raises(hf.InvalidConfigError, match="needs server="):
        hf.testing.check_source(lambda port: hf.NatsSource(f"nats://127.0.0.1:{port}", "S"), [])
    with pytest.raises(hf.InvalidConfigError, match="nothing went through the proxy"):
        hf.testing.check_source(lambda port: PartSource(), ALL, server=SimpleNamespace(port=1, restart=lambda: None))
