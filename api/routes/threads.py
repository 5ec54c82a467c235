"""Which threads a request takes that may wait: for storage, or for a job's turn.

Those that all requests share go to viewers first, as there are most of them. So what an operator does at night has threads of its
own, and what only reads storage has a few, and a deadline: a storage that hangs takes those, and nothing else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio
from anyio import CapacityLimiter, to_thread

from holdfast.statebackends.errors import StorageUnavailableError

P = ParamSpec("P")
T = TypeVar("T")

READERS_MAX = 2
"""Reads of storage at one time; others wait. A page of history may take storage long."""
READ_TIMEOUT_S = 20.0
"""A read that has taken longer, its wait included, is given up: its caller is told so, and the next one begins."""
HUNG_READS_MAX = 16
"""Reads that were given up and have not come back, at most: no further one begins."""
CANCEL_THREADS, COMMAND_THREADS = 4, 8
"""Of cancellations, which touch no storage, and of checkpoints, savepoints, stops, settings, labels and checks of snapshots."""


class StorageReaders:
    """Threads of one app that read storage for people."""

    def __init__(self) -> None:
        self._limiter = CapacityLimiter(READERS_MAX)
        self._lock = threading.Lock()
        self._reading: set[object] = set()
        """Reads that have a place and have not ended, also those that were given up."""
        self._begun: set[object] = set()
        """Of them those that a thread is in."""

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The result of `work`, in a thread. Raises StorageUnavailableError once it takes longer than READ_TIMEOUT_S, or while too
        many others hang; `work` itself goes on then until storage answers, and its result is dropped."""
        with anyio.move_on_after(READ_TIMEOUT_S):
            async with self._limiter:
                with self._lock:
                    if len(self._reading) >= HUNG_READS_MAX:
                        raise StorageUnavailableError(f"storage holds {HUNG_READS_MAX} reads and answers none: ask again later")
                    mark = object()
                    self._reading.add(mark)
                call = functools.partial(self._read, mark, functools.partial(work, *arguments, **named))
                try:
                    return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=CapacityLimiter(1))
                except BaseException:
                    self._forget_unbegun(mark)
                    raise
        raise StorageUnavailableError(f"storage has not answered for {READ_TIMEOUT_S:g} s: ask again later")

    def _forget_unbegun(self, mark: object) -> None:
        """A read that was given up before a thread began it hangs nowhere: its mark would take a place for ever."""
        with self._lock:
            if mark not in self._begun:
                self._reading.discard(mark)

    def _read(self, mark: object, call: Callable[[], T]) -> T:
        with self._lock:
            self._reading.add(mark)  # it may have been given up before its thread came to it
            self._begun.add(mark)
        try:
            return call()
        finally:
            with self._lock:
                self._reading.discard(mark)
                self._begun.discard(mark)


class CommandThreads:
    """Threads of one app for what operators ask for. A flood of viewers does not take them."""

    def __init__(self) -> None:
        self._cancels = CapacityLimiter(CANCEL_THREADS)
        self._commands = CapacityLimiter(COMMAND_THREADS)

    async def cancel(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Work that waits for a job's turn alone: whatever holds the other commands up, a job can be cancelled."""
        return await to_thread.run_sync(functools.partial(work, *arguments, **named), limiter=self._cancels)

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await to_thread.run_sync(functools.partial(work, *arguments, **named), limiter=self._commands)
