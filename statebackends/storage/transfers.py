"""Several transfers at one time, within bounds on threads and memory that all groups of a process share.

It knows no storage: what is run is calls. A thread that waits for its group works for it, too, so that no group waits for
another one's threads."""

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
    """Thread-safe. Threads live as long as their group and are daemons: a process that must end waits for no stuck upload."""

    def __init__(self, transfers_max: int, bytes_max: int, transfer_bytes_max: int) -> None:
        """`transfers_max`: of one group at one time; all groups together have one less in threads of their own.
        `bytes_max`: held in memory by all of them; one alone may hold more. `transfer_bytes_max`: what a single one holds at
        most, however large its file is."""
        self.transfers_max = transfers_max
        self.bytes_max = bytes_max
        self._transfer_bytes_max = transfer_bytes_max
        self._changed = threading.Condition()
        self._threads_free = transfers_max - 1
        self._bytes_held = 0
        self._waiting: deque[object] = deque()
        self._mine = threading.local()

    def run(self, calls: Sequence[Callable[[], T]], sizes: Sequence[int], check: Callable[[], None] = _go_on) -> list[T]:
        """Results in the order of the calls. `sizes`: bytes that each transfers. Within a call of another group they run one
        by one, on its thread and its share of the bytes: waiting for more while it holds some could be waiting for itself.

        `check` is called before each begins, on any thread, and may raise. After a failure nothing more begins; what is under
        way ends; then the first failure in order is raised."""
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
                except RuntimeError:  # the system gives us no more: this one does it all
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
        """Wait, first come, first served, until so many bytes may be held."""
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
    """Wait for all, also when interrupted: whoever cleans up must know what they still write. The interrupt, if there was one.

    An interrupt in the start of a thread leaves one that is not among `threads`: what it does is the group's to know."""
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
    """The calls of one group, taken in order by whichever thread is free."""

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
        """Run calls until none is left or one has failed."""
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
        """Nothing more begins."""
        with self._changed:
            self._ended = True

    def wait(self) -> None:
        """Until no other thread has a call."""
        with self._changed:
            while self._active - {threading.get_ident()}:
                self._changed.wait()

    def alone(self) -> list[T]:
        """Run all calls on this thread; nobody else's are waited for."""
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
            # An interrupt is nobody's failure, and must not be lost behind one.
            raise min(self._failures.items(), key=lambda item: (isinstance(item[1], Exception), item[0]))[1]
        return [self._results[index] for index in range(len(self._calls))]


ONE_BY_ONE = TransferPool(1, 1, 1)
"""Everything on the thread that asks, in order."""
