"""SHELL: which jobs this process leads, which it only remembers, which are led elsewhere, and which it could not lead.

Thread-safe and bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict

from holdfast.coordinator.dispatcher.job_runner import JobService
from holdfast.coordinator.ha.leadership import OtherLeader
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.statebackends.errors import FencedError, HoldfastError, NotFoundError, NotLeaderError, StorageUnavailableError


class JobRegistry:
    """A job is led, recorded (it ended before this process started), or broken (its directory can't be understood)."""

    def __init__(self, jobs_max: int) -> None:
        self._jobs_max = jobs_max
        self._lock = threading.Lock()
        self._services: OrderedDict[str, JobService] = OrderedDict()
        self._recorded: OrderedDict[str, RecordedJob] = OrderedDict()
        self._broken: dict[str, HoldfastError] = {}
        self._elsewhere: OrderedDict[str, OtherLeader] = OrderedDict()
        self._job_locks: dict[str, threading.Lock] = {}

    def lock_of(self, job_id: str) -> threading.Lock:
        """Held while a job is started or taken over."""
        with self._lock:
            return self._job_locks.setdefault(job_id, threading.Lock())

    def find(self, job_id: str) -> JobService | None:
        with self._lock:
            return self._services.get(job_id)

    def led(self, job_id: str) -> JobService:
        """Also a job that ended here, or that is not led from here any more while nobody knows by whom.

        Raises NotLeaderError for one that another coordinator leads, NotFoundError for one that is not known, and the error that
        keeps a known one from being led."""
        with self._lock:
            service = self._services.get(job_id)
            broken = self._broken.get(job_id)
            other = self._elsewhere.get(job_id)
        if other is not None and (service is None or service.epoch < other.epoch):
            url = {"url": other.url} if other.url else {}
            message = f"job {job_id} is led by epoch {other.epoch}, at {other.url or 'an address that is not on record'}"
            raise NotLeaderError(message, job=job_id, epoch=other.epoch, **url)
        if service is not None:
            return service
        if isinstance(broken, FencedError):
            raise NotLeaderError(f"job {job_id} is led elsewhere: {broken}", job=job_id) from broken
        if broken is not None:
            raise StorageUnavailableError(f"job {job_id} can't be led: {broken}", job=job_id) from broken
        raise NotFoundError(f"job {job_id} not found", job=job_id)

    def elsewhere(self, job_id: str) -> OtherLeader | None:
        """Who else leads a job, if this process was told."""
        with self._lock:
            return self._elsewhere.get(job_id)

    @property
    def is_any_elsewhere(self) -> bool:
        """Somebody else leads a job, as far as this process was told."""
        with self._lock:
            return bool(self._elsewhere)

    def newest_epoch(self, job_id: str) -> int:
        """Highest epoch of which it is known here who took it to lead a job; 0 for none."""
        with self._lock:
            known = (self._services.get(job_id), self._elsewhere.get(job_id))
        return max((each.epoch for each in known if each is not None), default=0)

    def newest_submission(self, job_id: str) -> int:
        """Highest number of a submission of a job that is known here; 0 for none."""
        with self._lock:
            service, recorded = self._services.get(job_id), self._recorded.get(job_id)
        if service is not None:
            return service.submission
        newest = recorded.newest_submission if recorded is not None else None
        return newest.number if newest is not None else 0

    def is_known(self, job_id: str) -> bool:
        with self._lock:
            return any(job_id in known for known in (self._services, self._recorded, self._elsewhere, self._broken))

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
            self._forget(service.job_id)
            surplus = len(self._services) - self._jobs_max
            forgotten = [entry for entry in self._services.values() if entry.ended.is_set()][: max(0, surplus)]
            for entry in forgotten:
                del self._services[entry.job_id]
        for entry in forgotten:
            entry.close("forgotten: too many jobs ended since")

    def put_recorded(self, job: RecordedJob) -> None:
        with self._lock:
            self._forget(job.job_id)
            self._recorded[job.job_id] = job
            while len(self._recorded) > self._jobs_max:
                self._recorded.popitem(last=False)

    def put_broken(self, job_id: str, error: HoldfastError) -> None:
        with self._lock:
            self._forget(job_id)
            self._broken[job_id] = error

    def put_elsewhere(self, job_id: str, leader: OtherLeader) -> None:
        """Another coordinator leads a job; a service of it that is still here knows better only with a higher epoch."""
        with self._lock:
            self._forget(job_id)
            self._elsewhere[job_id] = leader
            while len(self._elsewhere) > self._jobs_max:
                self._elsewhere.popitem(last=False)

    def remove(self, job_id: str) -> None:
        with self._lock:
            self._services.pop(job_id, None)
            self._forget(job_id)

    def _forget(self, job_id: str) -> None:
        """What was known of a job that is not led from here."""
        for known in (self._recorded, self._broken, self._elsewhere):
            known.pop(job_id, None)
