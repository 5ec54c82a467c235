"""Atomic batches of JetStream: many messages that the server stores together, or not at all.

The messages of a batch go out in one piece, without waiting for the server in between: of a batch of a thousand short messages what
takes time is then the server's own work. Source: NATS ADR-50, atomic batch publishing."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.operators.connectors.nats.connection import REQUEST_TIMEOUT_S, JetStreamError, answer_of

BATCH_MESSAGES = 1_000
"""Of an atomic batch, at most: the server's limit."""

PIECE_BYTES = 128 * 1024
"""Of the messages that are written at one time, about."""

UNANSWERED_BYTES_MAX = 16 * 1024 * 1024
"""Of a batch, that are sent without an answer in between, about: a server drops what it can't buffer, 128 MiB of a stream."""

WRITE = "_send_command"
"""nats-py's method that takes encoded commands; it is not public."""

Message = tuple[str, bytes]
"""Subject and content."""


async def publish_batch(
    client: Any, messages: Sequence[Message], last_subject: str, last: bytes, conditions: Mapping[str, str]
) -> int:
    """One atomic batch; the sequence of its last message. conditions: further headers of that one. Raises JetStreamError."""
    if not messages:
        reply = await client.request(last_subject, last, timeout=REQUEST_TIMEOUT_S, headers=dict(conditions))
        return int(answer_of(reply.data)["seq"])
    batch = secrets.token_hex(16)
    inbox = client.new_inbox()
    first_answer = await client.subscribe(inbox)
    try:
        await _send(client, batch, messages, inbox)
        headers = {**_headers(batch, len(messages) + 1), "Nats-Batch-Commit": "1", **conditions}
        reply = await client.request(last_subject, last, timeout=REQUEST_TIMEOUT_S, headers=headers)
        try:
            return int(answer_of(reply.data)["seq"])
        except JetStreamError:
            await _raise_first(first_answer)
            raise
    finally:
        with contextlib.suppress(Exception):  # the connection may be gone
            await first_answer.unsubscribe()


async def _raise_first(answers: Any) -> None:
    """Why the server did not begin the batch, if it says so: to the last message it says only that the others are missing."""
    if answers.pending_msgs:  # sent before the answer that was awaited
        data = (await answers.next_msg(REQUEST_TIMEOUT_S)).data
        if data:
            answer_of(data)


def _headers(batch: str, number: int) -> dict[str, str]:
    return {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}


async def _send(client: Any, batch: str, messages: Sequence[Message], inbox: str) -> None:
    """All but the last message. The server answers to the first one, by `inbox`, and where an answer is awaited."""
    subject, data = messages[0]
    await client.publish(subject, data, reply=inbox, headers=_headers(batch, 1))
    unanswered = len(data)
    for start, stop, size in _pieces(messages):
        await _write(client, batch, messages[start:stop], start + 1)
        unanswered += size
        subject, data = messages[stop]
        headers = _headers(batch, stop + 1)
        if unanswered > UNANSWERED_BYTES_MAX:
            unanswered = 0
            reply = await client.request(subject, data, timeout=REQUEST_TIMEOUT_S, headers=headers)
            if reply.data:
                answer_of(reply.data)
        else:
            await client.publish(subject, data, headers=headers)  # which also sends those before it


def _pieces(messages: Sequence[Message]) -> Iterator[tuple[int, int, int]]:
    """Cut all but the first message into pieces: index of the first and of the last message of each, and its bytes."""
    start, size = 1, 0
    for index in range(1, len(messages)):
        size += len(messages[index][1])
        if size >= PIECE_BYTES or index == len(messages) - 1:
            yield start, index, size
            start, size = index + 1, 0


async def _write(client: Any, batch: str, messages: Sequence[Message], number: int) -> None:
    """Some messages, the first one with this number. nats-py takes five times as long to check and encode each by itself; where it
    takes no encoded commands it gets them one by one."""
    write = getattr(client, WRITE, None)
    if write is None:
        for each, (subject, data) in enumerate(messages, number):
            await client.publish(subject, data, headers=_headers(batch, each))
        return
    await write(b"".join(_command(batch, each, subject, data) for each, (subject, data) in enumerate(messages, number)))


def _command(batch: str, number: int, subject: str, data: bytes) -> bytes:
    """A message as the protocol has it: HPUB, without an address for an answer."""
    headers = b"NATS/1.0\r\nNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n\r\n" % (batch.encode(), number)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject.encode(), len(headers), len(headers) + len(data), headers, data)
