"""SHELL: what the files of jobs take, listed at most every 30 s a job.

A dashboard that asks every second would list a job's directory, of some ten thousand files, as often."""

from __future__ import annotations

import threading
from collections import OrderedDict

from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.ownership.cost import Cost, measure_cost
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import Storage, run_flow

KEPT_MS = 30_000
"""How old an answer may be; its `as_of_ms` says how old it is."""
JOBS_KEPT = 100


class Costs:
    """Thread-safe. Two who ask at the same moment may both list."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[int, Cost]] = OrderedDict()
        """With when each was listed, oldest first."""

    def of(self, job_id: str) -> Cost:
        """As `measure_cost`, at most KEPT_MS ago. Nothing is kept of a directory without files: the job may begin now."""
        began_ms = self._clock.monotonic_ms()
        with self._lock:
            listed_ms, known = self._known.get(job_id, (0, None))
        if known is not None and began_ms - listed_ms < KEPT_MS:
            return known
        found = run_flow(measure_cost(JobPaths(job_id), self._clock.wall_ms()), self._storage)
        if found.files:
            with self._lock:
                self._known[job_id] = began_ms, found
                self._known.move_to_end(job_id)
                while len(self._known) > JOBS_KEPT:
                    self._known.popitem(last=False)
        return found
