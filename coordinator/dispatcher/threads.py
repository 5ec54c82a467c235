"""SHELL: the ports of a job runner and their system implementations: a clock, a thread for its turns, a pool for its flows.

They decide nothing. The simulator has its own implementations, all on one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from holdfast.statebackends.storage.port import Flow, Storage, run_flow

T = TypeVar("T")


class Clock(Protocol):
    """The clock of a coordinator."""

    def monotonic_ms(self) -> int: ...

    def wall_ms(self) -> int:
        """ms since the epoch, UTC."""


class FlowRunner(Protocol):
    """Drives storage flows, each on its own, in any order."""

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        """Start a flow; never blocks. `ended(result, None)` or `ended(None, error)` follows once, from any thread, unless the
        process dies before. `cleanup` marks deletions: no decision may wait for them."""

    def record(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        """As `run`, for what nothing waits for. No deletion may wait for it either: behind late deletions no periodic checkpoint
        is taken."""


class Turns(Protocol):
    """Turns that a job thread takes: those of `JobMasterRunner`."""

    @property
    def job_id(self) -> str: ...

    @property
    def closed(self) -> bool:
        """Turns have no effect any more."""

    def turn(self) -> bool:
        """Handle one item that is due; False if none was."""

    @property
    def has_waiting(self) -> bool:
        """An event or query waits for the next turn."""

    def next_deadline_ms(self) -> int | None:
        """When the next turn is due if no event comes before, monotonic ms; None for never."""


class JobThread(Protocol):
    """Takes the turns of one runner, one after the other: until nothing is due, then at the next wake or deadline."""

    def start(self, service: Turns) -> None:
        """Start; a turn is due."""

    def wake(self) -> None:
        """A turn is due. Called from any thread, also during a turn; must not take the turn itself."""

    def join(self) -> None:
        """Return once the runner is closed. Never called during one of its turns."""


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
        if not self._awake.is_set():  # the thread clears it before it looks at what was posted until then
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
            self._awake.clear()  # before the turn: what is posted after its look into the inbox wakes again


class PoolRunner:
    """Implements `FlowRunner` with three thread pools over one storage."""

    def __init__(self, storage: Storage, *, decision_threads: int, cleanup_threads: int, record_threads: int) -> None:
        self._storage = storage
        self._decisions = ThreadPoolExecutor(decision_threads, thread_name_prefix="storage")
        self._cleanup = ThreadPoolExecutor(cleanup_threads, thread_name_prefix="cleanup")
        self._records = ThreadPoolExecutor(record_threads, thread_name_prefix="history")

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        (self._cleanup if cleanup else self._decisions).submit(self._drive, flow, ended)

    def record(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        self._records.submit(self._drive, flow, ended)

    def close(self) -> None:
        """Returns when every flow has ended."""
        self._decisions.shutdown()
        self._cleanup.shutdown()
        self._records.shutdown()

    def _drive(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        try:
            result = run_flow(flow, self._storage)
        except BaseException as error:
            ended(None, error)
        else:
            ended(result, None)
