"""SHELL: drills of jobs' snapshots, asked for by users and by the clock: each is a process of its own, bounded in time, and what it
found is remembered and told to the job's leader for its history.

A drill harms no job: it runs at a lower priority than anything else, one at a time, reads alone, and one that hangs or dies is an
outcome like any other. It decides nothing about a job. A label keeps a checkpoint from being deleted meanwhile; one that is left
over, since this process died, is removed when the job is led again, or at the next drill."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.confined import ConfinedProcess, Ended, ProcessEnd
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.dispatcher import JobRegistry
from holdfast.coordinator.dispatcher.job_labels import JobLabels
from holdfast.coordinator.dispatcher.job_log import about, printable
from holdfast.coordinator.dispatcher.job_runner import JobMasterRunner
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.drills.records import DrillReport, DrillState, DrillView, Verification, is_due, mark_of, told_due_ms
from holdfast.coordinator.drills.scratch import DrillRequest
from holdfast.coordinator.drills.store import DRILLS_KEPT, keep_drill, read_drills
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedCheckpoint
from holdfast.coordinator.ha.store import read_checkpoint
from holdfast.coordinator.jobmaster.events import DrillNoted
from holdfast.coordinator.ownership.claims import newest_kept
from holdfast.coordinator.ownership.labels import DRILLING_LABEL
from holdfast.coordinator.views import DrillMark
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import HoldfastError, NotFoundError, StorageUnavailableError
from holdfast.statebackends.layout import JobPaths, claim_path, is_checkpoint_folder, metadata_path
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.port import StatFile, Storage, run_flow

logger = logging.getLogger(__name__)

JOBS_KEPT = 1_000
LOOK_INTERVAL_S = 5.0
"""How often scheduled drills are looked for."""
OUTPUT_BYTES_MAX = 1 << 20
DELETED = "it was deleted while it was read: a label keeps it (holdfast label JOB ID NAME), or retained_checkpoints keeps more"
KEEP_ATTEMPTS = 3
"""How often the newest checkpoint is looked for: one that is superseded at once may go before it has a label."""

Command = Callable[[], list[str]]


def _scratch() -> list[str]:
    return [sys.executable, "-m", "holdfast.coordinator.drills.scratch"]


class JobDrills:
    """Drills of one coordinator. Thread-safe."""

    def __init__(
        self,
        calls: JobCalls,
        registry: JobRegistry,
        storage: Storage,
        clock: Clock,
        draw_id: Callable[[], str],
        *,
        seconds_max: float,
        labels: JobLabels,
        command: Command = _scratch,
    ) -> None:
        """`seconds_max`: a drill that takes longer is ended. `command`: of the process."""
        self._calls = calls
        self._registry = registry
        self._storage = storage
        self._clock = clock
        self._draw_id = draw_id
        self._seconds_max = seconds_max
        self._labels = labels
        self._command = command
        self._lock = threading.Lock()
        self._known: OrderedDict[str, deque[DrillView]] = OrderedDict()
        self._verified: OrderedDict[str, deque[Verification]] = OrderedDict()
        self._changes = 0
        self._process: ConfinedProcess | None = None
        self._thread: threading.Thread | None = None
        """Of the newest drill."""
        self._is_busy = False
        """A drill is under way, or is about to be."""
        self._pin = ""
        """Its label, until it has ended."""
        self._seen_ms: dict[str, int] = {}
        self._due_ms: dict[str, int] = {}
        """When something should be known of the newest checkpoints of jobs."""
        self._unread: OrderedDict[str, None] = OrderedDict()
        """Jobs whose drills on record somebody would like to know."""
        self._preloaded: set[str] = set()
        self._stopping = threading.Event()
        self._awake = threading.Event()

    # ------------------------------------------------------------------------------------------------------- requests

    def begin(self, job_id: str, checkpoint_id: int | None = None, *, by: str = "user") -> DrillView:
        """Begin a drill of a snapshot, of the newest one if none is named. Raises NotFoundError, StorageUnavailableError while
        another one is under way."""
        drill_id = self._draw_id()
        with self._lock:
            if self._is_busy or self._stopping.is_set():
                raise StorageUnavailableError("a drill is under way: one runs at a time; ask again later")
            self._is_busy = True
        try:
            self._load(job_id)
            labelled = self._remove_pins(job_id)
            pin = self._pin = f"drilling{drill_id[:16]}"
            number, kind, location = self._pinned(job_id, checkpoint_id, pin, labelled)
        except BaseException:
            with self._lock:
                self._is_busy, self._pin = False, ""
            raise
        view = DrillView(drill_id, number, kind, location, DrillState.RUNNING, by, self._clock.wall_ms())
        thread = threading.Thread(target=self._run, args=(job_id, view, pin), name=f"drill-{drill_id[:8]}", daemon=True)
        with self._lock:
            self._keep(job_id, view)
            self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._end(job_id, view, DrillReport(error=str(error)), pin)
            raise StorageUnavailableError(f"no drill can be begun now: {error}") from error
        return view

    def _pinned(
        self, job_id: str, checkpoint_id: int | None, pin: str, labelled: frozenset[int]
    ) -> tuple[int, CheckpointKind, str]:
        """Id, kind and location of the snapshot to drill. One that a job may delete has a label now, unless none can be given: then
        it is read all the same. `labelled`: those that users' labels keep. Raises NotFoundError, also for one that is gone."""
        for _ in range(KEEP_ATTEMPTS):
            found = self._find(job_id, checkpoint_id)
            if found[0] in labelled or found[1].is_savepoint or self._registry.find(job_id) is None:
                break
            try:
                self._labels.add(job_id, found[0], pin)
                break
            except HoldfastError as error:
                logger.info("job %s: checkpoint %d is drilled without a label: %s", job_id, found[0], printable(str(error)))
                if checkpoint_id is not None:
                    break
        number, kind, location = found
        if not self._is_there(kind, location):
            named = f"{kind.value.replace('_', '-')} {number} of job {job_id}"
            raise NotFoundError(f"{named} can't be drilled: {location} was deleted or moved", job=job_id, checkpoint=number)
        return found

    def _unpin(self, job_id: str, pin: str) -> None:
        """Errors are left to the next drill, which removes the label."""
        try:
            self._labels.remove(job_id, pin)
        except NotFoundError:
            return  # it has none
        except HoldfastError as error:
            logger.info("job %s: the label %s is left over: %s", job_id, pin, printable(str(error)))

    def _remove_pins(self, job_id: str) -> frozenset[int]:
        """Those that are left over, not that of the drill under way. Returns ids that have other labels."""
        labelled = set()
        try:
            for view in self._labels.list(job_id).labels:
                if DRILLING_LABEL.fullmatch(view.label) is None:
                    labelled.add(view.checkpoint_id)
                elif view.label != self._pin:
                    self._labels.remove(job_id, view.label, view.checkpoint_id)
        except HoldfastError as error:
            logger.info("job %s: labels that drills left over stay: %s", job_id, printable(str(error)))
        return frozenset(labelled)

    def drills(self, job_id: str) -> tuple[DrillView, ...]:
        """Newest first. Raises NotFoundError."""
        self._runner(job_id)
        return self.known(job_id)

    @property
    def changes(self) -> int:
        """Of what `remembered` and `verifications` tell, of all jobs together."""
        return self._changes

    def remembered(self, job_id: str) -> tuple[DrillView, ...] | None:
        """Drills of any job that are in memory, newest first; None: those on record have not been read, and are soon. Never touches
        storage on the caller's thread."""
        with self._lock:
            found = self._known.get(job_id)
            if found is not None:
                return tuple(found)
            self._unread[job_id] = None
            while len(self._unread) > JOBS_KEPT:
                self._unread.popitem(last=False)
        self._awake.set()
        return None

    def note_verified(self, job_id: str, location: str, found: Verification) -> None:
        """As `interface.Coordinator`. A snapshot that says that it is of a job may be anybody's: what counts is its place. One that
        was deleted while it was read is no damaged one."""
        _, kind, place = self._find(job_id, found.checkpoint_id)
        if _real(place) != _real(location):
            return
        if found.problem_count and not self._is_there(kind, place):
            return
        with self._lock:
            self._changes += 1
            self._verified.setdefault(job_id, deque(maxlen=DRILLS_KEPT)).appendleft(found)
            self._verified.move_to_end(job_id)
            while len(self._verified) > JOBS_KEPT:
                self._verified.popitem(last=False)

    def verifications(self, job_id: str) -> tuple[Verification, ...]:
        """Of a job's snapshots since this process began, newest first."""
        with self._lock:
            return tuple(self._verified.get(job_id, ()))

    def mark(self, job_id: str) -> DrillMark:
        """What metrics tell of a job's drills, from memory alone."""
        with self._lock:
            known = tuple(self._known.get(job_id, ()))
            due_ms = self._due_ms.get(job_id)
            is_scheduled = job_id in self._seen_ms
        overdue_ms = max(0, self._clock.wall_ms() - due_ms) if due_ms is not None else 0
        return mark_of(known, overdue_ms if is_scheduled else -1)

    def known(self, job_id: str) -> tuple[DrillView, ...]:
        """As `drills`, of any job; without those on record if storage does not give them."""
        self._load(job_id)
        with self._lock:
            return tuple(self._known.get(job_id, ()))

    def close(self) -> None:
        """End the drill under way. Idempotent."""
        self._stopping.set()
        self._awake.set()
        with self._lock:
            process, thread = self._process, self._thread
        if process is not None:
            process.kill()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(10)

    # ------------------------------------------------------------------------------------------------------- schedule

    def watch(self) -> None:
        """Body of the thread that reads drills on record and begins scheduled ones, until `close`."""
        looked_s = time.monotonic()
        while not self._stopping.is_set():
            self._awake.wait(max(0.0, looked_s + LOOK_INTERVAL_S - time.monotonic()))
            self._awake.clear()
            self.read()
            if not self._stopping.is_set() and time.monotonic() >= looked_s + LOOK_INTERVAL_S:
                looked_s = time.monotonic()
                self.look()

    def read(self) -> None:
        """Read the drills on record of the jobs that were asked for; those that storage does not give are asked for again."""
        while not self._stopping.is_set():
            with self._lock:
                job_id = next(iter(self._unread), None)
                if job_id is None:
                    return
                del self._unread[job_id]
            self._load(job_id)

    def look(self) -> None:
        """Read what is on record of jobs that are led since a moment, and begin the drill that is due, if one is."""
        services = [service for service in self._registry.services() if not service.ended.is_set()]
        led = {service.job_id for service in services}
        self._preloaded &= led
        for job_id in led - self._preloaded:
            if self._stopping.is_set() or len(self._preloaded) >= JOBS_KEPT:
                break
            self._load(job_id)
            self._preloaded.add(job_id)
            self._remove_pins(job_id)
        for job_id in self._seen_ms.keys() - {each.job_id for each in services if each.drill_interval_ms is not None}:
            del self._seen_ms[job_id]
            self._due_ms.pop(job_id, None)
        for service in services:
            if service.drill_interval_ms is not None and not self._stopping.is_set():
                self._look_at(service, service.drill_interval_ms)

    def _look_at(self, service: JobMasterRunner, interval_ms: int) -> None:
        job_id = service.job_id
        try:
            now_ms = self._clock.wall_ms()
            published = self._calls.look(job_id).published
            # of the job and not of this process: one that is started anew each night would never come to a daily drill
            began_ms = published.overview.start_ms if published.overview.start_ms >= 0 else now_ms
            started_ms = min(self._seen_ms.get(job_id, began_ms), began_ms, now_ms)
            self._seen_ms[job_id] = started_ms  # a clock that went back
            newest_id = published.cut.checkpoint_id if published.cut is not None else -1
            known = self.known(job_id)
            if not self._is_loaded(job_id):
                return  # it may have been drilled an hour ago
            due_ms = told_due_ms(interval_ms, newest_id, known, started_ms)
            if due_ms is not None:
                self._due_ms[job_id] = due_ms
            else:
                self._due_ms.pop(job_id, None)
            if is_due(interval_ms, newest_id, known, started_ms, now_ms):
                self.begin(job_id, by="schedule")
        except HoldfastError as error:
            logger.info("job %s: no drill is begun: %s", job_id, printable(str(error)))
        except Exception:  # the other jobs' are still due
            logger.critical("job %s: its drills failed in a way that no record describes", job_id, exc_info=True)

    # ----------------------------------------------------------------------------------------------------- the process

    def _run(self, job_id: str, view: DrillView, pin: str) -> None:
        try:
            report = self._judged(view, self._execute(view.location))
        except Exception as error:
            logger.exception("the drill of %s failed", printable(view.location))
            report = DrillReport(error=f"internal error: {type(error).__name__}")
        self._end(job_id, view, report, pin)

    def _execute(self, location: str) -> DrillReport:
        request = msgspec.json.encode(DrillRequest(location, max(1, int(self._seconds_max))))
        process = ConfinedProcess(seconds_max=self._seconds_max, output_bytes_max=OUTPUT_BYTES_MAX)
        with self._lock:
            self._process = process
        if self._stopping.is_set():
            process.kill()
        try:
            return _reported(process.run(self._command(), request))
        finally:
            with self._lock:
                self._process = None

    def _judged(self, view: DrillView, report: DrillReport) -> DrillReport:
        """A snapshot that was deleted while it was read is no damaged one."""
        if not (report.problem_count or report.error) or self._is_there(view.kind, view.location):
            return report
        return DrillReport(error=DELETED)

    def _is_there(self, kind: CheckpointKind, location: str) -> bool:
        """True also where storage does not say."""
        paths = [metadata_path(location)]
        if is_checkpoint_folder(location) and not kind.is_savepoint:
            paths.append(claim_path(location))
        try:
            return all(self._storage.execute(StatFile(path)) is not None for path in paths)
        except HoldfastError:
            return True

    def _end(self, job_id: str, view: DrillView, report: DrillReport, pin: str) -> None:
        """The label goes last: who forgets a key waits for it, and then erases outcomes, which may quote the key."""
        ended = view.ended(report, self._clock.wall_ms())
        try:
            self._store(job_id, ended)
            self._unpin(job_id, pin)
        finally:
            self._ended(job_id, ended)
        runner = self._registry.find(job_id)
        if runner is not None and not self._stopping.is_set():
            runner.post(DrillNoted(ended))

    def _ended(self, job_id: str, ended: DrillView) -> None:
        with self._lock:
            self._is_busy, self._pin = False, ""
            known = self._known.get(job_id)
            if known is not None:
                kept = [ended if each.drill_id == ended.drill_id else each for each in known]
                self._known[job_id] = deque(kept, DRILLS_KEPT)
                self._changes += 1

    # --------------------------------------------------------------------------------------------------------- records

    def _keep(self, job_id: str, view: DrillView) -> None:
        self._changes += 1
        self._known.setdefault(job_id, deque(maxlen=DRILLS_KEPT)).appendleft(view)
        self._known.move_to_end(job_id)
        while len(self._known) > JOBS_KEPT:
            self._known.popitem(last=False)

    def _store(self, job_id: str, ended: DrillView) -> None:
        """For the next coordinator. One that ends with this one has told nothing."""
        if self._stopping.is_set():
            return
        try:
            run_flow(keep_drill(JobPaths(job_id), ended), self._storage)
        except HoldfastError as error:
            why = printable(str(error))
            logger.warning("job %s: the outcome of a drill is not on record: %s", job_id, why, extra=about(job_id))

    def _is_loaded(self, job_id: str) -> bool:
        with self._lock:
            return job_id in self._known

    def _load(self, job_id: str) -> None:
        """Drills on record, read once."""
        if self._is_loaded(job_id):
            return
        try:
            found, damage = run_flow(read_drills(JobPaths(job_id)), self._storage)
        except HoldfastError:
            return  # read again the next time
        for path in damage:
            logger.warning("job %s: %s can't be read, and is left out", job_id, printable(path), extra=about(job_id))
        with self._lock:
            if job_id not in self._known:
                for view in reversed(found):
                    self._keep(job_id, view)
                self._known.setdefault(job_id, deque(maxlen=DRILLS_KEPT))
                self._changes += 1

    def _runner(self, job_id: str) -> JobMasterRunner | None:
        recorded = self._calls.recorded_only(job_id)
        return None if recorded is not None else self._calls.led(job_id)

    def _find(self, job_id: str, checkpoint_id: int | None) -> tuple[int, CheckpointKind, str]:
        """Id, kind and location of a completed snapshot. Raises NotFoundError."""
        runner = self._runner(job_id)
        found: RecordedCheckpoint | None = None
        if checkpoint_id is not None:
            found = run_flow(read_checkpoint(JobPaths(job_id), checkpoint_id), self._storage)
        elif runner is not None:
            cut = self._calls.look(job_id).published.cut
            if cut is not None:
                return cut.checkpoint_id, cut.kind, self._located(cut.location)
        else:
            recorded = self._calls.recorded_only(job_id)
            found = newest_kept(recorded) if recorded is not None else None
        if found is None or found.fact is not CheckpointFact.COMPLETED:
            which = f"checkpoint {checkpoint_id}" if checkpoint_id is not None else "completed checkpoint"
            raise NotFoundError(f"job {job_id} has no {which} to drill", job=job_id, checkpoint=checkpoint_id)
        return found.checkpoint_id, found.kind, self._located(found.folder)

    def _located(self, folder: str) -> str:
        return folder if is_absolute_folder(folder) else f"{self._storage.root.rstrip('/')}/{folder}"


def _real(location: str) -> str:
    """Without symbolic links, of a directory."""
    return location if "://" in location else os.path.realpath(location)


def _reported(ended: Ended) -> DrillReport:
    if ended.end is not ProcessEnd.EXITED:
        return DrillReport(error=ended.detail)
    try:
        return decode_json(ended.output.strip(), DrillReport)
    except UNDECODABLE:
        why = "it may have reached its bound of memory or of processor time"
        return DrillReport(error=f"its process died ({ended.how}) without a word; {why}")
