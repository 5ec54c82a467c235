"""What gives a job its time: a clock, a thread that takes its turns, and a pool that drives its flows. Ports, and their threads.

A simulator has its own implementations, all on one thread; these decide nothing either."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from holdfast.statebackends.storage.port import Flow, Storage, run_flow

T = TypeVar("T")


class Clock(Protocol):
    """All the time that a coordinator sees."""

    def monotonic_ms(self) -> int: ...

    def wall_ms(self) -> int:
        """ms since the epoch, UTC."""


class FlowRunner(Protocol):
    """Drives storage flows, each on its own, in any order."""

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        """Never blocks, never raises an error of the flow: `ended(result, None)` or `ended(None, error)` follows, once.

        It may be called from any thread, and is never called when the process dies before. `cleanup` marks deletions, which
        must not hold up a decision."""


class Turns(Protocol):
    """What a job thread drives: `JobMasterRunner`."""

    @property
    def job_id(self) -> str: ...

    @property
    def closed(self) -> bool:
        """No turn will do anything any more."""

    def turn(self) -> bool:
        """Handle one item that is due; False if none was."""

    @property
    def has_waiting(self) -> bool:
        """Something waits for the next turn, whatever the time."""

    def next_deadline_ms(self) -> int | None:
        """When a turn is due though nothing waits, in the clock's monotonic ms."""


class JobThread(Protocol):
    """Takes the turns of one service, one after the other: until one finds nothing, then at the next wake or deadline."""

    def start(self, service: Turns) -> None:
        """Begin; a turn is due."""

    def wake(self) -> None:
        """Something waits. Called from any thread, also during a turn; must not take the turn itself."""

    def join(self) -> None:
        """Return when the service is closed. Never called during a turn of its own."""


class SystemClock:
    """Implements `Clock`."""

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class SystemJobThread:
    """Implements `JobThread` with a system thread that sleeps between turns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, service: Turns) -> None:
        self._thread = threading.Thread(target=self._run, args=(service,), name=f"job-{service.job_id[:8]}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._awake.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, service: Turns) -> None:
        while not service.closed:
            if service.turn():
                continue
            deadline = service.next_deadline_ms()
            wait_s = None if deadline is None else max(0, deadline - self._clock.monotonic_ms()) / 1000
            self._awake.wait(None if wait_s is None else min(wait_s, threading.TIMEOUT_MAX))  # "never" may be any number of ms
            self._awake.clear()  # before the turn that looks: what comes behind the look wakes again


class PoolRunner:
    """Implements `FlowRunner` with two thread pools over one storage."""

    def __init__(self, storage: Storage, *, decision_threads: int, cleanup_threads: int) -> None:
        self._storage = storage
        self._decisions = ThreadPoolExecutor(decision_threads, thread_name_prefix="storage")
        self._cleanup = ThreadPoolExecutor(cleanup_threads, thread_name_prefix="cleanup")

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        (self._cleanup if cleanup else self._decisions).submit(self._drive, flow, ended)

    def close(self) -> None:
        """Returns when every flow has ended."""
        self._decisions.shutdown()
        self._cleanup.shutdown()

    def _drive(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        try:
            result = run_flow(flow, self._storage)
        except BaseException as error:
            ended(None, error)
        else:
            ended(result, None)
