"""SHELL: threads for blocking work, and the machine's clocks. They decide nothing."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.operators.base import UserCall
from holdfast.operators.task.calls import CallRunner
from holdfast.operators.task.context import CancelToken, Done, FlowCancelledError
from holdfast.statebackends.storage.port import Flow, InParallel, Operation, Storage, perform

POOL_THREADS = 2


class SystemClock:
    """Implements `context.Clock`."""

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    seconds = staticmethod(time.perf_counter)


class RunQueueDelay:
    """Seconds that a thread was ready to run while others had the CPUs, as Linux counts them; 0 where nothing does.

    It is of the thread that calls it first, which is the only one to call it."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._is_known = True

    def __call__(self) -> float:
        if not self._is_known:
            return 0.0
        try:
            if self._file is None:
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these counters
            self._is_known = False
            return 0.0

    def close(self) -> None:
        """Idempotent."""
        self._is_known = False
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ThreadPool:
    """Implements `context.Pool`. Threads are daemons: a stuck upload does not keep a process from ending."""

    def __init__(self, threads: int = POOL_THREADS, name: str = "holdfast-pool") -> None:
        self._calls = CallRunner(name)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True) for index in range(threads)]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        self._tasks.put(lambda: _call(work, ended))

    def run_call(self, call: UserCall, ended: Done) -> None:
        self._calls.run(call, ended)

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        self.run(lambda: drive(flow, storage, token), ended)

    def open_thread(self, name: str) -> OwnThread:
        return OwnThread(name)

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the threads end after the queued work; those that don't in time end with the process."""
        self._calls.close()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class OwnThread:
    """Implements `context.PoolThread`. The thread is a daemon, begins with the first call, and ends behind `close`."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._has_begun = False

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        self._calls.put(lambda: _call(work, ended))
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        self.run(lambda: drive(flow, storage, token), ended)

    def close(self) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _call(work: Callable[[], Any], ended: Done) -> None:
    try:
        result = work()
    except BaseException as error:
        ended(None, error)
    else:
        ended(result, None)


def drive(flow: Flow[Any], storage: Storage, token: CancelToken) -> Any:
    """Drive a flow to its end on this thread; a cancelled token closes it between two operations."""
    try:
        operation = _begin(flow, token)
        while True:
            operation = _next(flow, storage, operation, token)
    except StopIteration as stop:
        return stop.value


def _begin(flow: Flow[Any], token: CancelToken) -> Operation | InParallel:
    _check(flow, token)
    return next(flow)


def _next(
    flow: Flow[Any], storage: Storage, operation: Operation | InParallel, token: CancelToken
) -> Operation | InParallel:
    _check(flow, token)
    try:
        result = perform(operation, storage, lambda: _refuse(token))
    except FlowCancelledError:
        flow.close()
        raise
    except Exception as error:
        return flow.throw(error)
    return flow.send(result)


def _check(flow: Flow[Any], token: CancelToken) -> None:
    if token.cancelled:
        flow.close()
        _refuse(token)


def _refuse(token: CancelToken) -> None:
    if token.cancelled:
        raise FlowCancelledError("the flow was cancelled between two operations")
