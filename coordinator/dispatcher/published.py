"""SHELL: the view of a job that every GET is answered from. The job's thread captures it between two turns, when a reader finds the
newest one too old; readers show what they need of it.

A capture shares what did not change since the one before, and costs O(changed). Readers never take a turn: however many there are,
there is one capture per `interval_ms` at most, besides those that a user's own request or a new state of the job calls for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.barriers.jobgraph import JobConfig
from holdfast.coordinator.checkpoints.stats import CapturedStats
from holdfast.coordinator.dispatcher.job_log import about
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.explain.records import CutView
from holdfast.coordinator.ha.records import RestorePoint
from holdfast.coordinator.jobmaster.execution import CapturedExecution, Execution
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.jobmaster.series import CapturedSeries
from holdfast.coordinator.totals import Totals, records_read
from holdfast.coordinator.views import (
    SUBTASKS_SHOWN_MAX,
    CheckpointStatsView,
    JobNumbersView,
    JobOverviewView,
    JobView,
    Moment,
    SavepointPlaces,
    ScheduleView,
)
from holdfast.statebackends.errors import NotLeaderError, StorageUnavailableError

logger = logging.getLogger(__name__)

MOMENT_MS = 5_000
"""A job that does not change has a new moment this often: bodies have durations."""


@dataclass(slots=True)
class PublishedJob:
    """One job at one moment, for any thread. It never changes, but for views that are kept once they are made."""

    epoch: int
    changes: int
    """Events that the job master had handled."""
    as_of_ms: int
    """Wall clock."""
    numbers: JobNumbersView
    config: JobConfig
    is_processing_backlog: bool
    stats: CapturedStats
    series: CapturedSeries
    schedule: ScheduleView | None
    """Of a job that has not ended."""
    cut: CutView | None
    """What a restart would restore, or what is left of a job whose end dropped its checkpoints; its location relative to the state
    directory."""
    savepoint_places: SavepointPlaces
    _job: JobView
    """Without vertices."""
    _execution: CapturedExecution
    _shown: JobView | None = None
    _stats_shown: CheckpointStatsView | None = None

    @property
    def overview(self) -> JobOverviewView:
        return self.numbers.overview

    def job(self) -> JobView:
        if self._shown is None:
            self._shown = replace(self._job, vertices=self._execution.views())
        return self._shown

    def checkpoints(self) -> CheckpointStatsView:
        if self._stats_shown is None:
            self._stats_shown = self.stats.view()
        return self._stats_shown


@dataclass(frozen=True, slots=True)
class Look:
    """What a reader found."""

    published: PublishedJob
    as_of_ms: int
    """Until when what it shows is known to have been so, wall clock."""

    @property
    def moment(self) -> Moment:
        found = self.published
        period = 0 if found.overview.is_terminal else self.as_of_ms // MOMENT_MS
        return Moment(self.as_of_ms, f"{found.overview.job_id}-{found.epoch}-{found.changes}-{period}")


class MomentNow(NamedTuple):
    """The moment of one view or several, without waiting for newer ones."""

    moment: Moment | None
    """Of the views that there are; None: there are none yet, or so many that their moment is a thread's to find."""
    coming: Sequence[Future[PublishedJob]] = ()
    """Views that a reader should wait for, VIEW_WAIT_MS at most, and then ask again; empty: these are the newest."""


class JobPublisher:
    """The newest view of one job. `look` is for any thread; all else is for the thread that takes the job's turns."""

    def __init__(self, clock: Clock, interval_ms: int) -> None:
        self._clock = clock
        self._interval_ms = interval_ms
        self._lock = threading.Lock()
        self._newest: PublishedJob | None = None
        self._captured_ms = 0
        self._waiting: Future[PublishedJob] | None = None
        self._changes = 0
        self._outdated = False
        self._closed = False

    def look(self) -> tuple[Look | None, Future[PublishedJob] | None]:
        """The newest view, and the Future of the next one if a reader should have that: the job's thread is to be woken then.

        Raises NotLeaderError if there is none, and none will be."""
        with self._lock:
            found = self._newest
            if found is not None:
                if self._closed or found.changes == self._changes:
                    return Look(found, self._clock.wall_ms()), None
                if not self._outdated and self._clock.monotonic_ms() - self._captured_ms < self._interval_ms:
                    return Look(found, found.as_of_ms), None
            if self._closed:
                raise NotLeaderError("the job ended in this coordinator before it could be shown; its log has the error")
            if self._waiting is None:
                self._waiting = Future()
            return (None if found is None else Look(found, found.as_of_ms)), self._waiting

    @property
    def is_wanted(self) -> bool:
        """A reader waits for a capture."""
        return self._waiting is not None

    def changed(self) -> None:
        """An event is about to be handled."""
        self._changes += 1

    def outdate(self) -> None:
        """What happens next must be seen by readers who come after it: an answer to a user, or a new state of the job."""
        self._outdated = True

    def publish(self, master: JobMaster, *, last: bool = False) -> None:
        """Capture the job. `last`: it does not change any more. A failure is the readers', never the job's."""
        found: PublishedJob | None = None
        error: Exception = StorageUnavailableError("the job could not be shown; the coordinator's log has the error")
        try:
            found = capture(master, self._changes, self._clock.wall_ms(), monotonic_ms=self._clock.monotonic_ms())
        except Exception:
            logger.critical("job %s can't be shown", master.setup.job_id, exc_info=True, extra=about(master.setup.job_id))
        with self._lock:
            waiting, self._waiting = self._waiting, None
            self._captured_ms = self._clock.monotonic_ms()
            self._outdated = False
            self._newest = found if found is not None else self._newest
            self._closed = self._closed or last
        if waiting is None:
            return
        if found is not None:
            waiting.set_result(found)
        else:
            waiting.set_exception(error)


def capture(master: JobMaster, changes: int, wall_ms: int, *, monotonic_ms: int) -> PublishedJob:
    """The job as it is, on its own thread. O(changed tasks + slots + operators)."""
    setup, lifecycle = master.setup, master.lifecycle
    totals = lifecycle.totals()
    execution = lifecycle.execution or Execution(lifecycle.attempt, setup.graph)
    numbers = _numbers(master, totals, wall_ms)
    job = JobView(
        overview=numbers.overview,
        now_ms=wall_ms,
        timestamps=dict(lifecycle.timestamps),
        graph=setup.graph,
        vertices=(),
        workers=master.slot_pool.views(),
        exceptions=lifecycle.exceptions.views(),
        submission=setup.submission,
        attempt=lifecycle.attempt,
        restarts=lifecycle.backoff.restarts,
        epoch=setup.epoch,
        failure=lifecycle.failure,
        totals=totals,
        restarts_at_ms=lifecycle.restarts_at_ms,
        standbys=master.standbys.views(),
        silent=master.slot_pool.silent_views(),
        hook_restore=lifecycle.next.hook_restore,
    )
    return PublishedJob(
        epoch=setup.epoch,
        changes=changes,
        as_of_ms=wall_ms,
        numbers=numbers,
        config=master.settings.config,
        is_processing_backlog=master.coordinator.is_processing_backlog,
        stats=master.coordinator.stats.capture(),
        series=master.series.capture(),
        schedule=master.coordinator.schedule(monotonic_ms) if not master.state.is_terminal else None,
        cut=_cut(master),
        savepoint_places=view_savepoint_places(master),
        _job=job,
        _execution=execution.capture(master.slot_pool.hosts()),
    )


def view_savepoint_places(master: JobMaster) -> SavepointPlaces:
    return SavepointPlaces(savepoint_directories(master.setup.graph.config), master.triggers.savepoints())


def savepoint_directories(config: JobConfig) -> frozenset[str]:
    return frozenset({config.savepoint_directory} if config.savepoint_directory else ())


def _cut(master: JobMaster) -> CutView | None:
    point, newest = master.lifecycle.restore_point, master.coordinator.newest
    if master.lifecycle.keeps_nothing:
        newest = master.coordinator.newest_left
        point = RestorePoint(newest.checkpoint_id, newest.folder, newest.timestamp_ms, newest.kind) if newest is not None else None
    if point is None:
        return None
    is_newest = newest is not None and newest.checkpoint_id == point.checkpoint_id
    totals: Totals = newest.totals if newest is not None and is_newest else {}
    return CutView(point.checkpoint_id, point.kind, point.folder, point.timestamp_ms, records_read(master.setup.graph, totals))


def view_overview(master: JobMaster) -> JobOverviewView:
    setup, lifecycle = master.setup, master.lifecycle
    execution = lifecycle.execution or Execution(0, setup.graph)
    return JobOverviewView(
        job_id=setup.job_id,
        name=setup.graph.name,
        state=master.state.value,
        start_ms=lifecycle.timestamps.get("INITIALIZING", setup.started_ms),
        end_ms=lifecycle.end_wall_ms,
        last_modification_ms=max(lifecycle.timestamps.values(), default=setup.started_ms),
        task_counts=execution.counts(),
        slots_required=setup.graph.slots_required,
        slots_registered=master.slot_pool.registered,
    )


def _numbers(master: JobMaster, totals: Totals, wall_ms: int) -> JobNumbersView:
    lifecycle, stats = master.lifecycle, master.coordinator.stats
    return JobNumbersView(
        overview=view_overview(master),
        attempt=lifecycle.attempt,
        restarts=lifecycle.backoff.restarts,
        counts=stats.counts,
        latest_completed=stats.latest_completed,
        frames_refused=sum(slot.frames_refused for slot in master.slot_pool.slots),
        graph=master.setup.graph,
        totals=totals,
        reached=lifecycle.reached(totals),
        restarts_at_ms=lifecycle.restarts_at_ms,
        subtasks=lifecycle.execution.timeliness(SUBTASKS_SHOWN_MAX) if lifecycle.execution is not None else (),
        as_of_ms=wall_ms,
        subtasks_beyond=max(0, lifecycle.execution.timed_count - SUBTASKS_SHOWN_MAX) if lifecycle.execution is not None else 0,
        branch_of=master.setup.branch_of,
    )


def wait_for_look(
    look: tuple[Look | None, Future[PublishedJob] | None], wait_s: float, wait_for: Callable[[Future[PublishedJob]], PublishedJob]
) -> Look:
    """The next view, if one is due and comes within `wait_s`; else the newest, and `wait_for` the first one."""
    newest, coming = look
    if coming is None:
        assert newest is not None
        return newest
    if newest is None:
        found = wait_for(coming)
        return Look(found, found.as_of_ms)
    try:
        found = coming.result(wait_s)
    except TimeoutError:
        return newest  # the job's thread is held up, and the view says how old it is
    return Look(found, found.as_of_ms)
