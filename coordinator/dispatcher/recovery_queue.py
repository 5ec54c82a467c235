"""SHELL: the jobs that are still to be led on after a start: which comes next, and who waits for it.

Thread-safe, and without threads of its own. A job that somebody asks for goes before those that nobody has missed yet, in the
order of asking: its workers run, and are waiting."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future

from holdfast.statebackends.errors import RecoveringError

WAITERS_MAX = 4_096
"""Calls that wait for jobs at one time; the next one is told to come again."""


class RecoveryQueue:
    """A job is waiting, then under way, then done: led, ended, damaged, or left for another try."""

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
        """These are all. Until it is called nothing is over."""
        with self._lock:
            self._is_known = True
            self._others.update(dict.fromkeys(job_ids))
            self._look_around()

    @property
    def is_over(self) -> bool:
        """Every job has been tried."""
        return self._is_over

    def covers(self, job_id: str) -> bool:
        """The job waits, or is under way."""
        with self._lock:
            return self._covers(job_id)

    def next(self) -> str | None:
        """The job to lead on next; None if none waits. Follow it with `done`."""
        with self._lock:
            waiting = self._asked or self._others
            if not waiting:
                return None
            job_id, _ = waiting.popitem(last=False)
            self._under_way.add(job_id)
            return job_id

    def ask(self, job_id: str) -> bool:
        """Somebody misses a job: it is the next after those asked for before. False if it neither waits nor is under way."""
        with self._lock:
            return self._ask(job_id)

    def check(self, job_id: str) -> None:
        """Raise RecoveringError for a job that is still to be led on, and ask for it."""
        if self.ask(job_id):
            raise RecoveringError(f"job {job_id} is being recovered: try again in a moment", job=job_id)

    def check_all(self) -> None:
        """Raise RecoveringError while any job is still to be led on: nobody can tell yet which ones there are."""
        if not self.is_over:
            raise RecoveringError("the coordinator is recovering the jobs of its state directory: try again in a moment")

    def when_done(self, job_id: str) -> Future[None] | None:
        """Ask for a job; a Future that is done with it, None if there is nothing to wait for.

        Raises RecoveringError when too many wait already, and from `close` on."""
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
        """A job has been tried: who waits for it may look."""
        with self._lock:
            self._under_way.discard(job_id)
            self._asked.pop(job_id, None)
            self._others.pop(job_id, None)
            waiters = self._waiters.pop(job_id, [])
            self._look_around()
        for future in waiters:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def close(self) -> None:
        """Nothing more is led on: who waits, or comes to wait, is told to ask elsewhere, or later."""
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

    def _look_around(self) -> None:
        if self._is_known and not (self._asked or self._others or self._under_way):
            self._is_over = True
