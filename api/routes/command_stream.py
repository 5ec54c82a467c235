"""The command stream as an HTTP response: lines of JSON, pushed from a subscription without polling.

It decides when to send a keep-alive and when to give up on a reader; the service decides which commands are sent and which stream
is the newest. The subscription is closed however the response ends, from which the service detects a dead worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.barriers import codec
from holdfast.barriers.messages import NumberedCommand
from holdfast.coordinator.interface import CommandSubscription

MEDIA_TYPE = "application/x-ndjson"

SEND_TIMEOUT_S = 30.0
"""Seconds that a reader may leave a full socket unread before its stream ends."""


def encode_lines(commands: list[NumberedCommand]) -> bytes:
    """One line of JSON for each command."""
    return b"".join(codec.encode(command) + b"\n" for command in commands)


async def command_lines(subscription: CommandSubscription, session: str, keep_alive_s: float) -> AsyncIterator[bytes]:
    """Blocks of whole lines until the subscription closes; a keep-alive line after each silent interval."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, and with it the reader
            loop.call_soon_threadsafe(ready.set)

    subscription.add_listener(wake)
    while True:
        ready.clear()
        closed = subscription.closed  # read first: commands that came before the close are taken below
        if commands := subscription.take():
            yield encode_lines(commands)
        if closed:
            return
        try:
            async with asyncio.timeout(keep_alive_s):
                await ready.wait()
        except TimeoutError:
            yield encode_lines([NumberedCommand(subscription.epoch, session, subscription.last_number, None)])


class CommandStream(Response):
    """One open stream. Ends with the subscription, with its reader, or when the reader stops reading."""

    media_type = MEDIA_TYPE

    def __init__(self, subscription: CommandSubscription, session: str, *, keep_alive_s: float) -> None:
        self._subscription = subscription
        self._session = session
        self._keep_alive_s = keep_alive_s
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_lines(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._subscription.close()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_lines(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for lines in command_lines(self._subscription, self._session, self._keep_alive_s):
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": lines, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
