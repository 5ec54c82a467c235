"""SHELL: the queue of jobs to recover after a start, and the calls that wait for them.

Jobs that a request named come first, in the order of the requests: their workers run and wait. Thread-safe, without threads of its
own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future

from holdfast.statebackends.errors import RecoveringError

WAITERS_MAX = 4_096
"""Calls that wait for jobs at one time; further ones raise RecoveringError."""


class RecoveryQueue:
    """Jobs to recover. Each waits, then is under way, then done: led, ended, damaged, or left for another try."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_known = False
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._others: OrderedDict[str, None] = OrderedDict()
        self._under_way: set[str] = set()
        self._waiters: dict[str, list[Future[None]]] = {}
        self._is_over = False
        self._is_closed = False

    def begin(self, job_ids: Iterable[str]) -> None:
        """Set the jobs to recover. Before this call `is_over` is false."""
        with self._lock:
            self._is_known = True
            self._others.update(dict.fromkeys(job_ids))
            self._update_over()

    @property
    def is_over(self) -> bool:
        """Every job has been tried."""
        return self._is_over

    def covers(self, job_id: str) -> bool:
        """Whether the job waits, or is under way."""
        with self._lock:
            return self._covers(job_id)

    def next(self) -> str | None:
        """The next job to recover; None if none waits. Call `done` after it."""
        with self._lock:
            waiting = self._asked or self._others
            if not waiting:
                return None
            job_id, _ = waiting.popitem(last=False)
            self._under_way.add(job_id)
            return job_id

    def ask(self, job_id: str) -> bool:
        """A request named a job: it is next after those named before. False if it neither waits nor is under way."""
        with self._lock:
            return self._ask(job_id)

    def check(self, job_id: str) -> None:
        """As `ask`, and raise RecoveringError for a job that is not recovered yet."""
        if self.ask(job_id):
            raise RecoveringError(f"job {job_id} is being recovered: try again in a moment", job=job_id)

    def check_all(self) -> None:
        """Raise RecoveringError while any job is not recovered yet: a list of jobs would not be complete."""
        if not self.is_over:
            raise RecoveringError("the coordinator is recovering the jobs of its state directory: try again in a moment")

    def when_done(self, job_id: str) -> Future[None] | None:
        """As `ask`; returns a Future that is done with the job, None if there is nothing to wait for.

        Raises RecoveringError beyond WAITERS_MAX, and after `close`."""
        with self._lock:
            if not self._ask(job_id):
                return None
            if self._is_closed:
                raise RecoveringError("the coordinator is stopping", job=job_id)
            if sum(map(len, self._waiters.values())) >= WAITERS_MAX:
                raise RecoveringError(f"job {job_id} is being recovered, and too many wait for theirs: try again", job=job_id)
            future: Future[None] = Future()
            self._waiters.setdefault(job_id, []).append(future)
            return future

    def done(self, job_id: str) -> None:
        """A job has been tried: complete the calls that wait for it."""
        with self._lock:
            self._under_way.discard(job_id)
            self._asked.pop(job_id, None)
            self._others.pop(job_id, None)
            waiters = self._waiters.pop(job_id, [])
            self._update_over()
        for future in waiters:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def close(self) -> None:
        """The coordinator stops: calls that wait, and later ones, raise RecoveringError."""
        with self._lock:
            self._is_closed = True
            waiters = [future for each in self._waiters.values() for future in each]
            self._waiters.clear()
        for future in waiters:
            if future.set_running_or_notify_cancel():
                future.set_exception(RecoveringError("the coordinator is stopping"))

    def _covers(self, job_id: str) -> bool:
        return job_id in self._asked or job_id in self._others or job_id in self._under_way

    def _ask(self, job_id: str) -> bool:
        if job_id in self._others:
            del self._others[job_id]
            self._asked[job_id] = None
        return self._covers(job_id)

    def _update_over(self) -> None:
        if self._is_known and not (self._asked or self._others or self._under_way):
            self._is_over = True
