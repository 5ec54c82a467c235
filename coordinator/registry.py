"""SHELL: which jobs this process leads, which it only remembers, and which it could not lead. Thread-safe and bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict

from coordinator.jobservice import JobService
from coordinator.publication import RecordedJob
from statebackends.errors import HoldfastError, NotFoundError, StorageUnavailableError


class JobRegistry:
    """A job is led, recorded (it ended before this process started), or broken (its directory can't be understood)."""

    def __init__(self, jobs_max: int) -> None:
        self._jobs_max = jobs_max
        self._lock = threading.Lock()
        self._services: OrderedDict[str, JobService] = OrderedDict()
        self._recorded: OrderedDict[str, RecordedJob] = OrderedDict()
        self._broken: dict[str, HoldfastError] = {}
        self._job_locks: dict[str, threading.Lock] = {}

    def lock_of(self, job_id: str) -> threading.Lock:
        """Held while a job is started or taken over."""
        with self._lock:
            return self._job_locks.setdefault(job_id, threading.Lock())

    def find(self, job_id: str) -> JobService | None:
        with self._lock:
            return self._services.get(job_id)

    def led(self, job_id: str) -> JobService:
        """Raises NotFoundError for a job that is not known, and the error that keeps a known one from being led."""
        with self._lock:
            service = self._services.get(job_id)
            broken = self._broken.get(job_id)
        if service is not None:
            return service
        if broken is not None:
            raise StorageUnavailableError(f"job {job_id} can't be led: {broken}", job=job_id) from broken
        raise NotFoundError(f"job {job_id} not found", job=job_id)

    def recorded(self, job_id: str) -> RecordedJob | None:
        with self._lock:
            return self._recorded.get(job_id)

    def services(self) -> list[JobService]:
        with self._lock:
            return list(self._services.values())

    def recorded_jobs(self) -> list[RecordedJob]:
        with self._lock:
            return list(self._recorded.values())

    def put(self, service: JobService) -> None:
        """A job is led from now on; the longest ended one is forgotten when there are too many."""
        with self._lock:
            self._services[service.job_id] = service
            self._services.move_to_end(service.job_id)
            self._recorded.pop(service.job_id, None)
            self._broken.pop(service.job_id, None)
            surplus = len(self._services) - self._jobs_max
            forgotten = [entry for entry in self._services.values() if entry.ended.is_set()][: max(0, surplus)]
            for entry in forgotten:
                del self._services[entry.job_id]
        for entry in forgotten:
            entry.close("forgotten: too many jobs ended since")

    def put_recorded(self, job: RecordedJob) -> None:
        with self._lock:
            self._recorded[job.job_id] = job
            self._broken.pop(job.job_id, None)
            while len(self._recorded) > self._jobs_max:
                self._recorded.popitem(last=False)

    def put_broken(self, job_id: str, error: HoldfastError) -> None:
        with self._lock:
            self._recorded.pop(job_id, None)
            self._broken[job_id] = error

    def remove(self, job_id: str) -> None:
        with self._lock:
            self._services.pop(job_id, None)
            self._recorded.pop(job_id, None)
            self._broken.pop(job_id, None)
