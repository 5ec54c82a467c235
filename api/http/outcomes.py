"""SHELL: what jobs' threads answer, for coroutines of one event loop, with one wake-up for all that came while the loop was busy.

`asyncio.wrap_future` wakes the loop for each answer, with a write into a pipe: at thousands of acknowledgements a second that is
more than an answer costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Outcomes:
    """Of one event loop. `of` runs on it; Futures end on any thread."""

    def __init__(self) -> None:
        self._ended: deque[asyncio.Future[None]] = deque()
        self._is_waking = False

    async def of(self, future: Future[T]) -> T:
        """The result of a Future, or its error. If the coroutine is cancelled, so is the Future."""
        if not future.done():
            loop = asyncio.get_running_loop()
            waiting: asyncio.Future[None] = loop.create_future()
            future.add_done_callback(lambda _: self._end(waiting, loop))
            try:
                await waiting
            except asyncio.CancelledError:
                future.cancel()
                raise
        return future.result()

    def _end(self, waiting: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        self._ended.append(waiting)
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, and with it whoever waits
                loop.call_soon_threadsafe(self._land)

    def _land(self) -> None:
        self._is_waking = False  # first: what ends from here on either is seen below or wakes again
        while self._ended:
            waiting = self._ended.popleft()
            if not waiting.done():
                waiting.set_result(None)
