"""SHELL: the dispatcher of one coordinator process starts jobs, replaces them, and recovers them after a restart. Its registry has
the jobs that the process leads, remembers, knows to be led elsewhere, or could not lead.

Every step that uses storage, or waits for a job, is a flow that yields its next operation, and may be killed between any two
yields. Threads, locks and timeouts are the driver's: `service.py`, or the simulator. The registry is thread-safe and bounded. What
a job does is decided in its job master."""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from holdfast.barriers.jobgraph import Submission, SubmissionAccepted
from holdfast.barriers.launches import draw_secret
from holdfast.barriers.processes import AskProcess, has_ended
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher.job_explanations import Explainer
from holdfast.coordinator.dispatcher.job_log import TEXT_CHARACTERS_MAX, about, printable
from holdfast.coordinator.dispatcher.job_runner import JobMasterRunner
from holdfast.coordinator.dispatcher.recovery_queue import RecoveryQueue
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.dispatcher.submit import (
    Starter,
    clear_ended,
    identify_job,
    preflight,
    resume_submission,
    start_submission,
)
from holdfast.coordinator.dispatcher.threads import Clock, FlowRunner, JobThread
from holdfast.coordinator.ha.leadership import OtherLeader, find_leader, open_directory
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import RestorePoint, is_job_id
from holdfast.coordinator.ha.store import list_jobs, read_job
from holdfast.coordinator.history.feed import HistoryFeed
from holdfast.coordinator.hooks.calls import HookHost
from holdfast.coordinator.hooks.registry import HookRegistry
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.statebackends.errors import FencedError, HoldfastError, NotFoundError, NotLeaderError, StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import Flow, InParallel, ListFolder, Operation, StatFile, Storage, drive, perform


class JobRegistry:
    """Jobs by state: led here, recorded (it ended before this process started), broken (its directory can't be read), elsewhere
    (another coordinator leads it)."""

    def __init__(self, jobs_max: int) -> None:
        self._jobs_max = jobs_max
        self._lock = threading.Lock()
        self._services: OrderedDict[str, JobMasterRunner] = OrderedDict()
        self._recorded: OrderedDict[str, RecordedJob] = OrderedDict()
        self._broken: dict[str, HoldfastError] = {}
        self._elsewhere: OrderedDict[str, OtherLeader] = OrderedDict()
        self._job_locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        """Each as long as somebody holds it or waits for it: strangers choose the ids."""

    def lock_of(self, job_id: str) -> threading.Lock:
        """Held while a job is started or taken over. The caller's reference keeps it."""
        with self._lock:
            lock = self._job_locks.get(job_id)
            if lock is None:
                lock = self._job_locks[job_id] = threading.Lock()
            return lock

    def find(self, job_id: str) -> JobMasterRunner | None:
        with self._lock:
            return self._services.get(job_id)

    def led(self, job_id: str) -> JobMasterRunner:
        """The runner of a job, also of one that ended here, or that this process no longer leads while its leader is not known.

        Raises NotLeaderError if another coordinator leads it, NotFoundError for an unknown job, StorageUnavailableError for one
        that can't be led."""
        with self._lock:
            service = self._services.get(job_id)
            broken = self._broken.get(job_id)
            other = self._elsewhere.get(job_id)
        if other is not None and (service is None or service.epoch < other.epoch):
            url: dict[str, Any] = {"url": other.url} if other.url else {}
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
        """The other coordinator that leads a job; None: this process knows of none."""
        with self._lock:
            return self._elsewhere.get(job_id)

    @property
    def is_any_elsewhere(self) -> bool:
        """Whether this process knows of a job that another coordinator leads."""
        with self._lock:
            return bool(self._elsewhere)

    def newest_epoch(self, job_id: str) -> int:
        """Highest epoch of a job whose leader this process knows; 0 for none."""
        with self._lock:
            known = (self._services.get(job_id), self._elsewhere.get(job_id))
        return max((each.epoch for each in known if each is not None), default=0)

    def newest_submission(self, job_id: str) -> int:
        """Highest submission number of a job that this process knows; 0 for none."""
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

    def services(self) -> list[JobMasterRunner]:
        with self._lock:
            return list(self._services.values())

    def recorded_jobs(self) -> list[RecordedJob]:
        with self._lock:
            return list(self._recorded.values())

    def broken_jobs(self) -> dict[str, str]:
        """Jobs that nobody leads since they can't be: id -> why."""
        with self._lock:
            broken = {job_id: error for job_id, error in self._broken.items() if not isinstance(error, FencedError)}
            led = {job_id for job_id in broken if (entry := self._services.get(job_id)) is not None and not entry.ended.is_set()}
        return {job_id: str(error) for job_id, error in sorted(broken.items()) if job_id not in led}

    def put(self, service: JobMasterRunner) -> None:
        """Note that this process leads a job; beyond `jobs_max` the ended job that has been here longest is forgotten."""
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
            self._remember(job)

    def retire(self, job: RecordedJob) -> JobMasterRunner | None:
        """Remember a job that has ended by its records alone, unless it was started again since they were read; its runner, for the
        caller to close."""
        with self._lock:
            service = self._services.get(job.job_id)
            if service is not None and service.epoch >= max(job.epochs, default=0):
                return None
            self._services.pop(job.job_id, None)
            self._remember(job)
        return service

    def _remember(self, job: RecordedJob) -> None:
        self._forget(job.job_id)
        self._recorded[job.job_id] = job
        while len(self._recorded) > self._jobs_max:
            self._recorded.popitem(last=False)

    def put_broken(self, job_id: str, error: HoldfastError) -> None:
        with self._lock:
            self._forget(job_id)
            self._broken[job_id] = error

    def put_elsewhere(self, job_id: str, leader: OtherLeader) -> None:
        """Note that another coordinator leads a job. A runner that is still here counts only with a higher epoch."""
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
        """Remove a job from all but the led ones."""
        for known in (self._recorded, self._broken, self._elsewhere):
            known.pop(job_id, None)


logger = logging.getLogger(__name__)

T = TypeVar("T")

RECOVERY_ROUNDS_MAX = 64
"""Highest number of rounds between two tries to recover the same job: each try may write a leader record, which stays."""

UNKNOWN_JOBS_MAX = 16
"""Jobs at a time whose leader is looked up because of a request; further ones wait for the next request."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a Future is done, as long as the driver allows; its result or error is the result of the yield."""

    future: Future[Any]


HostFlow: TypeAlias = Generator[Operation | InParallel | Await, Any, T]


def run_host_flow(flow: HostFlow[T], storage: Storage, wait_for: Callable[[Future[Any]], Any]) -> T:
    """Drive a flow to its end on this thread; errors are thrown into it at its yield."""
    return drive(flow, lambda step: wait_for(step.future) if isinstance(step, Await) else perform(step, storage))


class RecoveryBackoff:
    """Selects the unrecovered jobs that a round tries: each at once, then after 2, 4, ... rounds, at most RECOVERY_ROUNDS_MAX."""

    def __init__(self) -> None:
        self._round = 0
        self._waits: dict[str, tuple[int, int]] = {}
        """Job -> (rounds between its last tries, its next round)."""

    def due(self, unrecovered: Sequence[str]) -> list[str]:
        """Jobs to try in this round. Call once a round, and try each of them."""
        self._round += 1
        waits = {job_id: self._waits.get(job_id, (1, self._round)) for job_id in unrecovered}
        due = [job_id for job_id in unrecovered if waits[job_id][1] <= self._round]
        for job_id in due:
            rounds = min(2 * waits[job_id][0], RECOVERY_ROUNDS_MAX)
            waits[job_id] = (rounds, self._round + rounds)
        self._waits = waits
        return due


class Dispatcher:
    """Jobs of one coordinator. Run `open`, listen, then `recover`. Flows of different jobs may interleave, those of one job must
    not.

    The process listens first, since a job's workers have `reconcile_timeout_ms` from the moment it is led: the coordinator must be
    reachable then, however many jobs there are and however slow storage is."""

    def __init__(
        self,
        config: ServiceConfig,
        root: str,
        *,
        rng: random.Random,
        clock: Clock,
        runner: FlowRunner,
        make_job_thread: Callable[[], JobThread],
        draw_secret: Callable[[], str] = draw_secret,
        hooks: HookHost | None = None,
        has_ended: AskProcess = has_ended,
    ) -> None:
        """`root`: printable root of the storage that drives the flows. `make_job_thread`: called for each job that is led.
        `draw_secret`: draws the secret by which the workers of one attempt know each other; unguessable, unlike `rng`.
        `hooks`: the master hooks that are installed; None: none. `has_ended`: of a process that was seen on this host."""
        self.registry = JobRegistry(config.jobs_max)
        self.root = root
        self.directory_nonce = ""
        """Set by `open`."""
        self.recovery = RecoveryQueue()
        """Jobs that existed at `open` and are not recovered yet."""
        self.unrecovered: set[str] = set()
        """Jobs to recover later: storage failed, or a request named a job that did not exist at `open`, or its leader is given
        up."""
        self.astray: set[str] = set()
        """Jobs that requests named here and that this process does not lead: their leaders are looked up again."""
        self._worked_at: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        """Ended job with an epoch behind the records that were read first -> names in its folder when they were read last: somebody
        works at its snapshots, a forgetting for one, which deletes for hours."""
        self.feed = HistoryFeed()
        """Records of the jobs that are led here, as they are made."""
        self.explainer: Explainer | None = None
        """Explains checkpoints of jobs that are led from then on, when they end; None: nobody does."""
        self._config = config
        self._rng = rng
        self._clock = clock
        self._runner = runner
        self._make_job_thread = make_job_thread
        self._draw_secret = draw_secret
        self._has_ended = has_ended
        self._hooks: HookHost = hooks if hooks is not None else HookRegistry()

    def open(self) -> HostFlow[None]:
        """Open the state directory and list its jobs. Raises StorageUnavailableError if it can't be written."""
        self.directory_nonce = yield from open_directory(self._nonce())
        self.recovery.begin((yield from list_jobs()))

    # ------------------------------------------------------------------------------------------------------ recovery

    def recover(self) -> HostFlow[None]:
        """Recover every job that existed at `open`. A damaged one is left alone, and its error kept. Several of these flows may
        run: they share the jobs."""
        while (job_id := self.recovery.next()) is not None:
            yield from self.lead_on(job_id)

    def lead_on(self, job_id: str) -> HostFlow[None]:
        """Recover one of these jobs, unless that was done."""
        if self.recovery.covers(job_id):
            if self.registry.find(job_id) is None:
                yield from self.recover_job(job_id)
            self.recovery.done(job_id)

    def look_for(self, job_id: str) -> None:
        """A request named a job that this process does not lead: look up its leader later (`find_leaders`, `retry_recovery`).

        An unknown job was started by another coordinator. If that is gone, this process leads the job."""
        wanted = self.astray if self.registry.is_known(job_id) else self.unrecovered
        if len(wanted) < UNKNOWN_JOBS_MAX and is_job_id(job_id):
            wanted.add(job_id)

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        """See `interface.Coordinator`: clients come here, so this process leads the job if its leader can't be reached.

        This is the only reason to take a job from another coordinator: one that was stopped must not take it when it wakes."""
        other = self.registry.elsewhere(job_id)
        if other is not None and other.is_given_up(epoch, self._clock.monotonic_ms()):
            self.unrecovered.add(job_id)

    def check_leaderships(self) -> HostFlow[None]:
        """Stop leading every job that another coordinator leads; to be called now and then.

        A leader that writes is fenced by its write. One that only waits for workers, which have gone to its successor, would keep
        the remaining ones from going there."""
        for service in self.registry.services():
            is_lost = service.suspended and not service.failed and self.registry.elsewhere(service.job_id) is None
            if is_lost or not service.ended.is_set():
                yield from self._find_leader(service.job_id)

    def find_leaders(self) -> HostFlow[None]:
        """Look up the leaders of the jobs in `astray`; to be called now and then.

        A leader that lost an id to a stale one leads no more, and neither does another: this process leads its job again."""
        for job_id in sorted(self.astray):
            self.astray.discard(job_id)
            is_newer = yield from self._find_leader(job_id)
            service = self.registry.find(job_id)
            if is_newer is not False or service is None or not service.suspended or service.failed:
                continue
            if service.epoch == self.registry.newest_epoch(job_id):
                self.unrecovered.add(job_id)

    def _find_leader(self, job_id: str) -> HostFlow[bool | None]:
        """Look for a leader with a higher epoch than any known here; whether there is one, None if storage fails."""
        paths, known = JobPaths(job_id), self.registry.newest_epoch(job_id)
        try:
            recorded = self.registry.recorded(job_id)
            if recorded is not None and not (yield from self._goes_on(paths, recorded)):
                return False
            record = yield from find_leader(paths, newer_than=known)
            if record is not None and not record.url and (yield from self._retire(paths)):
                return False
        except HoldfastError as error:
            told = printable(str(error), TEXT_CHARACTERS_MAX)
            logger.warning("who leads job %s can't be read: %s", job_id, told, extra=about(job_id))
            return None
        if record is None:
            return False
        if record.url != self._config.url:  # else it is our own, or that of an older process at this address
            self.registry.put_elsewhere(job_id, OtherLeader(record.epoch, record.url, self._clock.monotonic_ms()))
        service = self.registry.find(job_id)
        if service is not None and service.epoch < record.epoch and not service.ended.is_set():
            service.post(job_events.LeadershipEnded(f"epoch {record.epoch} leads job {job_id}, not {service.epoch}"))
        return True

    def _goes_on(self, paths: JobPaths, known: RecordedJob) -> HostFlow[bool]:
        """Whether a job goes on whose end was read; a leader may have taken its epoch, and been stopped, before. If it does not,
        its records are read anew where somebody has worked at it since."""
        # Numbers have no gaps, and an ended job goes on only by a new one.
        is_submitted = (yield StatFile(paths.submission(known.last_submission + 1))) is not None
        is_quiet = not is_submitted and paths.job_id not in self._worked_at
        if is_quiet and (yield StatFile(paths.leader(max(known.epochs, default=0) + 1))) is None:
            return False
        recorded = yield from self._read_anew(paths, is_needed=is_submitted)
        if recorded is None:
            return False
        if not recorded.is_live:
            self.registry.put_recorded(recorded)
        return recorded.is_live

    def _read_anew(self, paths: JobPaths, *, is_needed: bool) -> HostFlow[RecordedJob | None]:
        """Records of a job; None, if they are not needed in any case, where its folder has the names that it had when they were
        read last. The names come first: what is deleted meanwhile is seen by the next look."""
        names = tuple((yield ListFolder(paths.job_id)))
        if not is_needed and self._worked_at.get(paths.job_id) == names:
            return None
        recorded = yield from read_job(paths)
        self._worked_at[paths.job_id] = names
        while len(self._worked_at) > self._config.jobs_max:
            self._worked_at.popitem(last=False)
        return recorded

    def _retire(self, paths: JobPaths) -> HostFlow[bool]:
        """Somebody without an address has fenced a job: no coordinator leads it. One that has ended is remembered by its records
        from now on; whether it has."""
        recorded = yield from self._read_anew(paths, is_needed=True)
        if recorded is None or not recorded.exists or recorded.is_live:
            return False
        service = self.registry.retire(recorded)
        if service is not None:
            service.close("the job has ended, and its snapshots are worked at")
        return True

    def retry_recovery(self, job_id: str) -> HostFlow[None]:
        """Recover an unrecovered job, unless it is led here or has another leader by now."""
        service = self.registry.find(job_id)
        if service is not None and not service.suspended:
            self.unrecovered.discard(job_id)
        elif job_id in self.unrecovered:
            is_newer: bool | None = False
            is_known = self.registry.is_known(job_id)
            if service is not None or self.registry.elsewhere(job_id) is not None or not is_known:
                is_newer = yield from self._find_leader(job_id)
            if is_newer and not is_known:  # its clients are referred there; without an address, this process leads it
                other = self.registry.elsewhere(job_id)
                is_newer = other is not None and other.url != ""
            if is_newer:
                self.unrecovered.discard(job_id)
            elif is_newer is False:
                yield from self.recover_job(job_id)

    def recover_job(self, job_id: str) -> HostFlow[None]:
        """Recover one job: lead a live one, remember an ended one, keep the error of a damaged one. Raises no HoldfastError."""
        self.unrecovered.discard(job_id)
        has_ended = False
        try:
            while True:
                recorded = yield from read_job(JobPaths(job_id))
                self._let_go(job_id)
                if not recorded.exists:
                    self.registry.remove(job_id)
                    return
                has_ended = not recorded.is_live
                if has_ended:
                    self.registry.put_recorded(recorded)  # its end is known, even if the deletion of its files fails
                    yield from clear_ended(job_id, self._starter())
                    recorded = yield from read_job(JobPaths(job_id))
                    has_ended = not recorded.is_live
                if has_ended:
                    self.registry.put_recorded(recorded)
                    return
                try:
                    setup = yield from resume_submission(job_id, self._starter(), recorded)
                except NotFoundError:
                    continue  # an older leader ended the job meanwhile: read its record
                self._launch(setup)
                return
        except HoldfastError as error:
            logger.error("job %s can't be led on: %s", job_id, printable(str(error), TEXT_CHARACTERS_MAX), extra=about(job_id))
            if not has_ended:
                self.registry.put_broken(job_id, error)
            if isinstance(error, StorageUnavailableError):
                self.unrecovered.add(job_id)
            elif isinstance(error, FencedError) and not has_ended:
                yield from self._find_leader(job_id)

    def clear(self, job_id: str) -> HostFlow[None]:
        """Delete what a job that has ended keeps no longer. One that goes on, wherever it is led, is left alone. Raises no
        HoldfastError: the next recovery deletes what is left."""
        try:
            recorded = yield from read_job(JobPaths(job_id))
            if recorded.exists and not recorded.is_live and self.registry.recorded(job_id) is not None:
                yield from clear_ended(job_id, self._starter())
                recorded = yield from read_job(JobPaths(job_id))
                if not recorded.is_live:
                    self.registry.put_recorded(recorded)
        except HoldfastError as error:
            told = printable(str(error), TEXT_CHARACTERS_MAX)
            logger.warning("job %s: what it keeps no longer is not deleted yet: %s", job_id, told)

    def _let_go(self, job_id: str) -> None:
        """Close and remove a runner that leads its job no more: from now on storage has the state of the job."""
        service = self.registry.find(job_id)
        if service is not None:
            service.close("another one of this process takes its place")
            self.registry.remove(job_id)

    # ---------------------------------------------------------------------------------------------------- submission

    def preflight(self, submission: Submission) -> Flow[PreflightReport]:
        """Check a submission as a start would now; changes nothing."""
        self._hooks.check(submission.graph.config.master_hooks)
        return preflight(identify_job(submission), submission, now_ms=self._clock.wall_ms())

    def submit(self, submission: Submission) -> HostFlow[SubmissionAccepted]:
        """Start a job, or replace the running submission of its name. Raises as `interface.Coordinator.submit`."""
        job_id = identify_job(submission)
        self._hooks.check(submission.graph.config.master_hooks)
        yield from self.lead_on(job_id)  # a submission that is only repeated must find it led
        current = self.registry.find(job_id)
        recorded = yield from read_job(JobPaths(job_id))
        newest = recorded.newest_submission
        repeated = newest is not None and submission.driver_nonce and newest.submission.driver_nonce == submission.driver_nonce
        if repeated and newest is not None and current is not None and current.submission == newest.number:
            return self._accepted(current, newest.base, newest.notes)
        (yield from preflight(job_id, submission, recorded, now_ms=self._clock.wall_ms())).check()
        if current is not None:
            yield from self._replace(current)
        try:
            setup = yield from start_submission(job_id, submission, self._starter(), verified=True)
        except HoldfastError:
            self.registry.remove(job_id)
            yield from self.recover_job(job_id)
            raise
        service = self._launch(setup)
        return self._accepted(service, setup.base, setup.notes)

    def _replace(self, current: JobMasterRunner) -> HostFlow[None]:
        """Another submission takes over: the older one decides its pending checkpoints, shuts its workers down, and is closed."""
        reason = "superseded by a newer submission"
        if not current.ended.is_set():  # one that lost its leadership, or crashed, decides nothing any more
            yield Await(current.call(lambda ticket: job_events.SuspendRequested(ticket, reason)))
        current.close(reason)

    def _accepted(self, service: JobMasterRunner, base: RestorePoint | None, notes: tuple[str, ...]) -> SubmissionAccepted:
        return SubmissionAccepted(
            job_id=service.job_id,
            submission=service.submission,
            slots=service.slots,
            epoch=service.epoch,
            restored_checkpoint_id=base.checkpoint_id if base is not None else 0,
            directory=self.root,
            directory_nonce=self.directory_nonce,
            notes=notes,
            restored_savepoint=base.folder if base is not None and base.is_savepoint else "",
        )

    # ------------------------------------------------------------------------------------------------------- leading

    def _launch(self, setup: JobSetup) -> JobMasterRunner:
        """Start the runner of a job that this process leads."""
        identity = Identity(
            setup.job_id,
            setup.epoch,
            self._nonce(),
            setup.submission,
            setup.graph,
            setup.started_ms,
            setup.without_channel_state,
        )
        service = JobMasterRunner(
            JobMaster(setup, rng=random.Random(self._rng.getrandbits(64)), draw_secret=self._draw_secret),
            StorageEffects(identity, self._clock.wall_ms),
            clock=self._clock,
            runner=self._runner,
            job_thread=self._make_job_thread(),
            inbox_events_max=self._config.inbox_events_max,
            view_interval_ms=self._config.view_interval_ms,
            history=self._config.history,
            feed=self.feed,
            explainer=self.explainer,
            has_ended=self._has_ended,
            hooks=self._hooks.of_job(setup.job_id, setup.epoch) if setup.graph.config.master_hooks else None,
        )
        service.start()
        self.registry.put(service)
        return service

    def _starter(self) -> Starter:
        return Starter(self._nonce(), self._config.url, self.directory_nonce, self._clock.wall_ms(), self.root)

    def _nonce(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"
