"""SHELL: calls of users' functions that wait for others: coroutines on one event loop, blocking functions on threads of their own.

They may take as long as they like, or never return, so that none of them runs on the threads that snapshots need. asyncio is loaded
for the first coroutine: most jobs have none."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.operators.base import UserCall
from holdfast.operators.task.context import Done

if TYPE_CHECKING:
    import asyncio

CALL_THREADS_MAX = 256
"""Threads for blocking calls of one process; a call beyond waits for one."""


class CallRunner:
    """Event loop and threads of one process. All threads are daemons: a call that never returns keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[UserCall, Done] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: deque[tuple[UserCall, Done]] = deque()
        self._is_woken = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, call: UserCall, ended: Done) -> None:
        """Any thread. `ended(result, error)` is called on a thread of this runner."""
        if call.is_coroutine:
            self._arrived.append((call, ended))
            if not self._is_woken:
                self._is_woken = True
                self._event_loop().call_soon_threadsafe(self._start_arrived)
            return
        with self._lock:
            self._busy += 1
            if self._busy > self._threads and self._threads < CALL_THREADS_MAX:
                self._threads += 1
                threading.Thread(target=self._serve, name=f"{self._name}-call-{self._threads}", daemon=True).start()
        self._calls.put((call, ended))

    def close(self) -> None:
        """Threads end behind the calls in front of them; the event loop ends at once."""
        for _ in range(self._threads):
            self._calls.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    # ----------------------------------------------------------------------------------------------------------- threads

    def _serve(self) -> None:
        while (found := self._calls.get()) is not None:
            call, ended = found
            try:
                if not call.is_abandoned:
                    _answer(call, lambda: call.function(call.argument), ended)  # noqa: B023 - called at once
            finally:
                with self._lock:
                    self._busy -= 1

    # -------------------------------------------------------------------------------------------------------- event loop

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        import asyncio

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run_loop, args=(self._loop,), name=f"{self._name}-loop", daemon=True).start()
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        asyncio.set_event_loop(loop)
        loop.run_forever()
        for task in self._tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        loop.close()

    def _start_arrived(self) -> None:
        self._is_woken = False
        loop = self._loop
        assert loop is not None
        while self._arrived:
            call, ended = self._arrived.popleft()
            if not call.is_abandoned:
                task = loop.create_task(self._awaited(call, ended))
                self._tasks.add(task)
                call.on_abandon = lambda task=task: loop.call_soon_threadsafe(task.cancel)


    async def _awaited(self, call: UserCall, ended: Done) -> None:
        import asyncio

        try:
            result = await call.function(call.argument)
        except asyncio.CancelledError:
            if not call.is_abandoned:
                ended(None, RuntimeError("the function cancelled its own task"))
            raise
        except BaseException as error:
            ended(None, error)
        else:
            ended(result, None)
        finally:
            self._tasks.discard(asyncio.current_task())  # a callback would cost a turn of the loop


def call_and_wait(call: UserCall) -> Any:
    """Make a call on this thread, a coroutine on an event loop of its own: for schedules moved by hand."""
    import asyncio

    result = call.function(call.argument)
    return asyncio.run(result) if call.is_coroutine else result


def _answer(call: UserCall, run: Callable[[], Any], ended: Done) -> None:
    try:
        result = run()
    except BaseException as error:
        ended(None, error)
    else:
        ended(result, None)
