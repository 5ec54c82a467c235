"""ASGI middleware: requests that only look are answered a few at a time.

One processor serves all, and its event loop takes whatever is ready in turn: behind twenty requests of viewers an acknowledgement
waits for all of them. Viewers lose little by it, since together they are answered about as fast as before."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.http.origin import SAFE_METHODS

LOOKS_MAX = 4
"""Requests that only look, at one time."""
WAIT_S = 0.25
"""Longest that one waits for its turn: those in front of it may wait for storage or for a job, and take no processor meanwhile."""


class LookInTurn:
    """Runs after the token check. The worker protocol, and what changes something, has no turn to wait for.

    An answer that comes in parts goes as fast as its reader takes it, which may be never: its turn ends with its first part. A turn
    ends once the loop has looked at its sockets again: an answer that waits for nothing would else be followed by all others at
    once, in front of the acknowledgement that came meanwhile."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = asyncio.Semaphore(LOOKS_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in SAFE_METHODS or _has_no_turn(scope["path"]):
            await self._app(scope, receive, send)
            return
        has_turn = await self._wait()

        def give_up() -> None:
            nonlocal has_turn
            if has_turn:
                has_turn = False
                self._turns.release()

        async def tell(message: Message) -> None:
            if message.get("more_body"):
                give_up()
            await send(message)

        try:
            await self._app(scope, receive, tell)
            await asyncio.sleep(0)
        finally:
            give_up()

    async def _wait(self) -> bool:
        if not self._turns.locked():
            return await self._turns.acquire()
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._turns.acquire()
        except TimeoutError:
            return False


def _has_no_turn(path: str) -> bool:
    """Streams, which last, and commands of workers; what monitoring asks for; and the one change by GET."""
    return "/workers/" in path or path.endswith(("/events", "/yarn-cancel", "/healthz", "/readyz", "/leader", "/standby"))
