"""Pool of transfers that run at one time, within bounds on threads and memory shared by all groups of a process.

It runs calls, and knows no storage. A thread that waits for its group also works for it, so that no group waits for the threads of
another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from holdfast.statebackends.errors import InvariantError

T = TypeVar("T")


def _go_on() -> None:
    pass


class TransferPool:
    """Bounds on threads and bytes of transfers. Thread-safe.

    Threads live as long as their group, and are daemons, so that a process can end despite a stuck upload."""

    def __init__(self, transfers_max: int, bytes_max: int, transfer_bytes_max: int) -> None:
        """`transfers_max`: transfers of one group at one time; all groups together have one thread less than that of their own.
        `bytes_max`: bytes in memory of all transfers; a single one may exceed it. `transfer_bytes_max`: bytes that one transfer
        holds at most, however large its file is."""
        self.transfers_max = transfers_max
        self.bytes_max = bytes_max
        self._transfer_bytes_max = transfer_bytes_max
        self._changed = threading.Condition()
        self._threads_free = transfers_max - 1
        self._bytes_held = 0
        self._waiting: deque[object] = deque()
        self._mine = threading.local()

    def run(self, calls: Sequence[Callable[[], T]], sizes: Sequence[int], check: Callable[[], None] = _go_on) -> list[T]:
        """Run the calls and return their results, in order. `sizes`: bytes that each call transfers. `check` is called before each,
        on any thread, and may raise.

        After a failure no further call begins and running ones end; then the first failure in order is raised. A group within a
        call of another group runs one by one, on that call's thread and bytes: waiting for more bytes while it holds some could
        deadlock."""
        if not calls:
            return []
        group = _Group(self, calls, sizes, check)
        if self.transfers_max == 1 or getattr(self._mine, "holds", False):
            return group.alone()
        threads = self._take_threads(min(len(calls), self.transfers_max) - 1)
        started: list[threading.Thread] = []
        try:
            for _ in range(threads):
                thread = threading.Thread(target=group.serve, name="holdfast-transfer", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads: those that started do the work
                    break
                started.append(thread)
            group.serve()
        finally:
            interrupt = _join(group, started)
            self._take_threads(-threads)
            if interrupt is not None:
                raise interrupt
        return group.results()

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Hold `size` bytes, after waiting (first come, first served) until the bound allows it."""
        held, ticket = max(0, min(size, self._transfer_bytes_max)), object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or (self._bytes_held and self._bytes_held + held > self.bytes_max):
                    self._changed.wait()
                self._bytes_held += held
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        self._mine.holds = True
        try:
            yield
        finally:
            self._mine.holds = False
            with self._changed:
                self._bytes_held -= held
                self._changed.notify_all()

    def _take_threads(self, wanted: int) -> int:
        with self._changed:
            taken = min(wanted, self._threads_free)
            self._threads_free -= taken
            return taken


def _join(group: _Group[T], threads: Sequence[threading.Thread]) -> BaseException | None:
    """Wait for all threads, also when interrupted, so that cleanup knows that they have ended. Returns the interrupt, if any.

    An interrupt while a thread starts leaves one that is not in `threads`; `group.wait` waits for its call."""
    interrupt: BaseException | None = None
    while True:  # an interrupt may come between any two steps
        try:
            group.stop()
            for thread in threads:
                thread.join()
            group.wait()
            return interrupt
        except BaseException as error:
            interrupt = error


class _Group(Generic[T]):
    """The calls of one group; each free thread takes the next one."""

    def __init__(
        self, pool: TransferPool, calls: Sequence[Callable[[], T]], sizes: Sequence[int], check: Callable[[], None]
    ) -> None:
        if len(calls) != len(sizes):
            raise InvariantError(f"{len(calls)} transfers have {len(sizes)} sizes")
        self._pool = pool
        self._calls = calls
        self._sizes = sizes
        self._check = check
        self._changed = threading.Condition()
        self._next = 0
        self._active: set[int] = set()  # threads with a call
        self._ended = False
        self._results: dict[int, T] = {}
        self._failures: dict[int, BaseException] = {}

    def serve(self) -> None:
        """Run calls until all are taken or one has failed."""
        while (index := self._take()) is not None:
            try:
                with self._pool.holding(self._sizes[index]):
                    if self._failures:
                        return  # while it waited
                    self._check()
                    self._results[index] = self._calls[index]()
            except BaseException as error:
                self._failures[index] = error
            finally:
                with self._changed:
                    self._active.discard(threading.get_ident())
                    self._changed.notify_all()

    def stop(self) -> None:
        """Begin no further call."""
        with self._changed:
            self._ended = True

    def wait(self) -> None:
        """Wait until no other thread runs a call."""
        with self._changed:
            while self._active - {threading.get_ident()}:
                self._changed.wait()

    def alone(self) -> list[T]:
        """Run all calls on this thread, without waiting for other groups."""
        results = []
        for call in self._calls:
            self._check()
            results.append(call())
        return results

    def _take(self) -> int | None:
        with self._changed:
            if self._ended or self._failures or self._next == len(self._calls):
                return None
            self._active.add(threading.get_ident())
            self._next += 1
            return self._next - 1

    def results(self) -> list[T]:
        if self._failures:
            # An interrupt comes first: a failure must not hide it.
            raise min(self._failures.items(), key=lambda item: (isinstance(item[1], Exception), item[0]))[1]
        return [self._results[index] for index in range(len(self._calls))]


ONE_BY_ONE = TransferPool(1, 1, 1)
"""Runs all calls on the calling thread, in order."""
