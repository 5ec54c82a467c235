"""SHELL: queries of jobs: answered from the view that each job publishes, or derived from the records of an ended job.

`view_...` are pure: the view of the records of a job that ended before this coordinator started. `Queries` looks at the jobs and
joins the answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.dispatcher import JobRegistry
from holdfast.coordinator.dispatcher.job_runner import JobMasterRunner
from holdfast.coordinator.dispatcher.published import Look, MomentNow, savepoint_directories, view_savepoint_places
from holdfast.coordinator.dispatcher.recovery_queue import RecoveryQueue
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.ha.recorded_job import CheckpointFact, Completed, RecordedCheckpoint, RecordedJob, derive_config
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord
from holdfast.coordinator.jobmaster.execution import Execution
from holdfast.coordinator.jobmaster.series import METRICS, RESOLUTIONS_MS, CapturedSeries
from holdfast.coordinator.restore.branches import parent_of
from holdfast.coordinator.views import (
    CheckpointConfigView,
    CheckpointCounts,
    CheckpointStatsView,
    CheckpointView,
    ClusterView,
    JobNumbersView,
    JobOverviewView,
    JobView,
    Moment,
    Quantiles,
    SavepointPlaces,
    SeriesView,
    WholeJobView,
)
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError

SUBTASKS_SERIES_MAX = 100
"""Subtasks of a vertex whose series are shown one by one without being named."""

JOBS_AT_ONCE_MAX = 256
"""Jobs whose moment is found without a thread: 5 us each. Of those on record CHECKPOINTS_A_JOB count as another one."""
CHECKPOINTS_A_JOB = 8

UNKNOWN_STATE = "UNKNOWN"
"""State of a job without a recorded end, read from its directory alone: it may be running."""


def view_recorded_numbers(job: RecordedJob) -> JobNumbersView:
    """View of a job in a terminal state, from its records."""
    attempt, stats = job.newest_attempt, view_recorded_checkpoints(job)
    result, record = job.result, job.newest_submission
    assert result is not None
    assert record is not None
    return JobNumbersView(
        overview=view_recorded_job(job, 0).overview,
        attempt=attempt.attempt if attempt is not None else 0,
        restarts=attempt.restarts if attempt is not None else 0,
        counts=stats.counts,
        latest_completed=stats.latest_completed,
        frames_refused=0,
        graph=record.graph,
        totals=result.totals,
        reached=result.totals,
        branch_of=parent_of(record.submission),
    )


def view_recorded_job(job: RecordedJob, now_ms: int) -> JobView:
    """A job in a terminal state, from its directory: without tasks and workers."""
    record, result = job.newest_submission, job.result
    assert record is not None
    assert result is not None
    execution = Execution(0, record.graph)
    execution.measure(result.metrics)
    attempt = job.newest_attempt
    return JobView(
        overview=view_recorded_overview(job),
        now_ms=now_ms,
        timestamps={"INITIALIZING": record.created_ms, result.state: result.created_ms},
        graph=record.graph,
        vertices=execution.views({}),
        workers=(),
        exceptions=(),
        submission=record.number,
        attempt=attempt.attempt if attempt is not None else 0,
        restarts=attempt.restarts if attempt is not None else 0,
        epoch=result.epoch,
        failure=result.cause or None,
        totals=result.totals,
    )


def view_recorded_overview(job: RecordedJob) -> JobOverviewView:
    """A submitted job, from its directory. Without a recorded end it may be running, or wait for a coordinator: its state is
    UNKNOWN, and its last modification that of the newest record."""
    record, result = job.newest_submission, job.result
    assert record is not None
    execution = Execution(0, record.graph)
    if result is not None:
        execution.measure(result.metrics)
    return JobOverviewView(
        job_id=job.job_id,
        name=record.graph.name,
        state=result.state if result is not None else UNKNOWN_STATE,
        start_ms=(result.started_ms if result is not None else 0) or record.created_ms,
        end_ms=result.created_ms if result is not None else -1,
        last_modification_ms=result.created_ms if result is not None else _last_written_ms(job),
        task_counts=execution.counts(),
        slots_required=record.graph.slots_required,
        slots_registered=0,
    )


def _last_written_ms(job: RecordedJob) -> int:
    times = [record.created_ms for record in (job.newest_submission, job.newest_attempt) if record is not None]
    times += [entry.claim.created_ms for entry in job.checkpoints.values() if entry.claim is not None]
    times += [entry.decision.timestamp_ms for entry in job.checkpoints.values() if isinstance(entry.decision, Completed)]
    return max(times, default=-1)


def view_recorded_savepoint_places(job: RecordedJob) -> SavepointPlaces:
    decisions = [checkpoint.decision for checkpoint in job.checkpoints.values()]
    folders = frozenset(decision.folder for decision in decisions if isinstance(decision, SavepointRecord))
    record = job.newest_submission
    return SavepointPlaces(savepoint_directories(record.graph.config) if record is not None else frozenset(), folders)


def view_recorded_checkpoints(job: RecordedJob) -> CheckpointStatsView:
    """Checkpoints of a job that are still on record. Undecided ones of the newest leader of a job without a recorded end count as
    in progress; those of older leaders nobody completes any more. How often it was restored no record tells: -1, as are sizes of
    what is no readable checkpoint: a savepoint's are in its own folder. An id that a new leader took only so that the one before
    it could not is no checkpoint that failed."""
    entries = [job.checkpoints[number] for number in sorted(job.checkpoints)]
    entries = [entry for entry in entries if entry.claim is None or entry.claim.submission > 0]
    newest_epoch = max(job.epochs, default=0)
    views = [
        _recorded(entry, is_live=job.is_live, newest_epoch=newest_epoch)
        for entry in entries
        if entry.fact is not CheckpointFact.ORPHANED
    ]
    completed = [view for view in views if view.status == "COMPLETED"]
    failed = [view for view in views if view.status == "FAILED"]
    pending = len(views) - len(completed) - len(failed)
    return CheckpointStatsView(
        counts=CheckpointCounts(restored=-1, total=len(views), in_progress=pending, completed=len(completed), failed=len(failed)),
        summary=dict.fromkeys(
            ("checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data", "persisted_data"),
            Quantiles(),
        ),
        history=tuple(sorted(views, key=lambda view: -view.checkpoint_id)),
        latest_completed=next((view for view in reversed(completed) if not view.is_savepoint), None),
        latest_savepoint=next((view for view in reversed(completed) if view.is_savepoint), None),
        latest_failed=failed[-1] if failed else None,
        latest_restored=None,
    )


def _recorded(entry: RecordedCheckpoint, *, is_live: bool, newest_epoch: int) -> CheckpointView:
    claim, decision = entry.claim, entry.decision
    completed = isinstance(decision, Completed | SavepointRecord)
    undecided = is_live and entry.fact is CheckpointFact.UNDECIDED
    left = undecided and claim is not None and claim.epoch < newest_epoch
    pending = undecided and not left
    aborted = decision if isinstance(decision, AbortRecord) else None
    trigger_ms = decision.timestamp_ms if isinstance(decision, Completed | SavepointRecord) else -1
    in_flight_size = decision.in_flight_size if isinstance(decision, Completed) else 0
    return CheckpointView(
        checkpoint_id=entry.checkpoint_id,
        kind=claim.kind if claim is not None else CheckpointKind.CHECKPOINT,
        status="COMPLETED" if completed else "IN_PROGRESS" if pending else "FAILED",
        trigger_ms=trigger_ms if claim is None or trigger_ms >= 0 else claim.created_ms,
        latest_ack_ms=-1,
        checkpointed_size=decision.new_size if isinstance(decision, Completed) else -1,
        state_size=decision.size if isinstance(decision, Completed) else -1,
        end_to_end_ms=-1,
        processed_bytes=0,
        persisted_bytes=in_flight_size,
        unaligned=in_flight_size > 0,
        num_subtasks=0,
        num_acknowledged_subtasks=0,
        vertices={},
        location=claim.folder if completed and claim is not None else None,
        failure_ms=aborted.created_ms if aborted is not None else -1,
        failure_reason=aborted.reason.value if aborted is not None else FailureReason.LEADER_CHANGED.value if left else None,
        failure_message=(
            (aborted.message or aborted.reason.value) if aborted is not None else f"epoch {newest_epoch} leads" if left else None
        ),
    )


def _whole(look: Look) -> WholeJobView:
    return WholeJobView(replace(look.published.job(), now_ms=look.as_of_ms), look.published.checkpoints())


class Queries:
    """The part of `interface.Coordinator` that changes nothing."""

    def __init__(
        self, calls: JobCalls, registry: JobRegistry, recovery: RecoveryQueue, storage_root: str, clock: Clock
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._registry = registry
        self._recovery = recovery
        self._storage_root = storage_root
        self._recorded_numbers = _RecordedNumbers()

    def moment(self, job_id: str | None) -> Moment:
        """Of one job's view, or of all jobs'. Read the view after its moment: its tag is never newer then."""
        if job_id is not None:
            recorded = self._calls.recorded_only(job_id)
            return self._recorded_moment(recorded) if recorded is not None else self._calls.look(job_id).moment
        services = self._registry.services()
        return self._moment_of_all(services, *self._calls.looks_of_all(services))

    def moment_now(self, job_id: str | None) -> MomentNow:
        """As `moment`, of the views that there are."""
        if job_id is not None:
            recorded = self._calls.recorded_only(job_id)
            if recorded is not None:
                return MomentNow(self._recorded_moment(recorded))
            newest, coming = self._calls.led(job_id).look()
            return MomentNow(newest.moment if newest is not None else None, (coming,) if coming is not None else ())
        services = self._registry.services()
        on_record = sum(1 + len(entry.checkpoints) // CHECKPOINTS_A_JOB for entry in self._registry.recorded_jobs())
        if len(services) + on_record > JOBS_AT_ONCE_MAX:
            return MomentNow(None)
        found, unseen = self._calls.looks_now(services)
        looks = [newest for _, (newest, _) in found if newest is not None]
        awaited = tuple(coming for _, (_, coming) in found if coming is not None)
        return MomentNow(self._moment_of_all(services, looks, unseen) if len(looks) == len(found) else None, awaited)

    def _moment_of_all(
        self, services: Sequence[JobMasterRunner], looks: Sequence[Look], unseen: Sequence[JobMasterRunner]
    ) -> Moment:
        """Of jobs that are led here, with and without a view, and of those on record."""
        moments = [look.moment for look in looks]
        moments += [Moment(self._clock.wall_ms(), f"{service.job_id}-unseen-{service.state}") for service in unseen]
        known = {service.job_id for service in services}
        moments += [self._recorded_moment(entry) for entry in self._registry.recorded_jobs() if entry.job_id not in known]
        moments += [Moment(self._clock.wall_ms(), f"{job_id}-broken-{why}") for job_id, why in self._registry.broken_jobs().items()]
        as_of_ms = min((moment.as_of_ms for moment in moments), default=self._clock.wall_ms())
        return Moment(as_of_ms, "/".join(sorted(moment.tag for moment in moments)))

    def _recorded_moment(self, job: RecordedJob) -> Moment:
        """The records of an ended job change only with its checkpoints."""
        result = job.result
        end = f"{result.epoch}-{result.created_ms}" if result is not None else "open"
        ids = ",".join(f"{number}:{entry.fact.value}" for number, entry in sorted(job.checkpoints.items()))
        tag = f"{job.job_id}-recorded-{job.last_submission}-{max(job.epochs, default=0)}-{end}-{ids}"
        return Moment(self._clock.wall_ms(), tag)

    def jobs(self) -> tuple[JobOverviewView, ...]:
        self._recovery.check_all()  # a job that is missing in a list would be taken for gone
        looks, unseen = self._calls.looks_of_all(self._registry.services())
        led = [*(look.published.overview for look in looks), *(service.bare_overview() for service in unseen)]
        known = {view.job_id for view in led}
        ended = [view_recorded_overview(entry) for entry in self._registry.recorded_jobs() if entry.job_id not in known]
        return tuple(sorted([*ended, *led], key=lambda view: (view.start_ms, view.job_id)))

    def numbers(self) -> tuple[JobNumbersView, ...]:
        looks, unseen = self._calls.looks_of_all(self._registry.services())
        led = [replace(look.published.numbers, as_of_ms=look.as_of_ms) for look in looks]
        known = {view.overview.job_id for view in led} | {service.job_id for service in unseen}
        recorded = [job for job in self._registry.recorded_jobs() if job.job_id not in known]
        now_ms = self._clock.wall_ms()
        return (*led, *(replace(view, as_of_ms=now_ms) for view in self._recorded_numbers.of(recorded)))

    def job(self, job_id: str) -> JobView:
        recorded = self._calls.recorded_only(job_id)
        if recorded is not None:
            return view_recorded_job(recorded, self._clock.wall_ms())
        look = self._calls.look(job_id)
        return replace(look.published.job(), now_ms=look.as_of_ms)

    def whole_job(self, job_id: str) -> WholeJobView:
        recorded = self._calls.recorded_only(job_id)
        return self._whole_recorded(recorded) if recorded is not None else _whole(self._calls.look(job_id))

    def whole_jobs(self, job_ids: Collection[str] | None = None, *, live_only: bool = False) -> tuple[WholeJobView, ...]:
        self._recovery.check_all()
        services = self._registry.services()
        known = {service.job_id for service in services}
        chosen = [service for service in services if job_ids is None or service.job_id in job_ids]
        found = [_whole(look) for look in self._calls.looks_of_all(chosen)[0]]
        if not live_only:
            ended = [job for job in self._registry.recorded_jobs() if job.job_id not in known]
            found += [self._whole_recorded(job) for job in ended if job_ids is None or job.job_id in job_ids]
        wanted = [each for each in found if not (live_only and each.job.overview.is_terminal)]
        return tuple(sorted(wanted, key=lambda each: (-each.job.overview.start_ms, each.job.overview.job_id)))

    def _whole_recorded(self, job: RecordedJob) -> WholeJobView:
        return WholeJobView(view_recorded_job(job, self._clock.wall_ms()), view_recorded_checkpoints(job))

    def checkpoints(self, job_id: str) -> CheckpointStatsView:
        recorded = self._calls.recorded_only(job_id)
        if recorded is not None:
            return view_recorded_checkpoints(recorded)
        return self._calls.look(job_id).published.checkpoints()

    def checkpoint(self, job_id: str, checkpoint_id: int) -> CheckpointView:
        recorded = self._calls.recorded_only(job_id)
        view: CheckpointView | None
        if recorded is not None:
            history = view_recorded_checkpoints(recorded).history
            view = next((entry for entry in history if entry.checkpoint_id == checkpoint_id), None)
        else:
            stats = self._calls.look(job_id).published.stats
            view = stats.checkpoint(checkpoint_id) or stats.recall(checkpoint_id)
        if view is None:
            raise NotFoundError(f"job {job_id} shows no checkpoint {checkpoint_id}", job=job_id, checkpoint=checkpoint_id)
        return view

    def series(self, job_id: str, vertex: str | None, metric: str, subtasks: Sequence[int]) -> tuple[SeriesView, ...]:
        if metric not in METRICS:
            raise InvalidConfigError(f"there is no series {metric!r}; there are {', '.join(METRICS)}", setting="metric")
        recorded = self._calls.recorded_only(job_id)
        if recorded is not None:
            record = recorded.newest_submission
            sizes = {each.vertex_id: each.parallelism for each in record.graph.vertices} if record is not None else {}
            found = CapturedSeries(RESOLUTIONS_MS[0], dict.fromkeys(sizes, ()), sizes)
            as_of_ms = self._clock.wall_ms()
        else:
            look = self._calls.look(job_id)
            found, as_of_ms = look.published.series, look.as_of_ms
        if vertex is None:
            return tuple(found.view(each, metric, (), as_of_ms) for each in found.vertices)
        if vertex not in found.vertices:
            raise NotFoundError(f"job {job_id} has no vertex {vertex}", job=job_id, vertex=vertex)
        chosen = subtasks or (range(found.parallelism(vertex)) if found.parallelism(vertex) <= SUBTASKS_SERIES_MAX else ())
        return (found.view(vertex, metric, chosen, as_of_ms),)

    def checkpoint_config(self, job_id: str) -> CheckpointConfigView:
        recorded = self._calls.recorded_only(job_id)
        if recorded is not None and recorded.newest_submission is not None:
            config = derive_config(recorded, recorded.newest_submission)
            return CheckpointConfigView(config, self._storage_root, as_of_ms=self._clock.wall_ms())
        look = self._calls.look(job_id)
        found = look.published
        return CheckpointConfigView(found.config, self._storage_root, found.is_processing_backlog, look.as_of_ms)

    def savepoint_places(self) -> SavepointPlaces:
        self._recovery.check_all()  # savepoints in a place that is missing here would be taken for unused ones
        services = self._registry.services()
        futures = [service.query(view_savepoint_places) for service in services]
        return self._places(services, [self._calls.wait_for(future) for future in futures])

    def published_savepoint_places(self) -> SavepointPlaces:
        self._recovery.check_all()
        services = self._registry.services()
        looks, _ = self._calls.looks_of_all(services)
        return self._places(services, [look.published.savepoint_places for look in looks])

    def _places(self, services: Sequence[JobMasterRunner], of_led: Sequence[SavepointPlaces]) -> SavepointPlaces:
        """Of these jobs, which are led here, and of those on record."""
        known = {service.job_id for service in services}
        places = [view_recorded_savepoint_places(job) for job in self._registry.recorded_jobs() if job.job_id not in known]
        places += of_led
        return SavepointPlaces(
            directories=frozenset().union(*(place.directories for place in places)),
            folders=frozenset().union(*(place.folders for place in places)),
        )

    def cluster(self) -> ClusterView:
        jobs = self.jobs()
        states = [view.state for view in jobs]
        workers = sum(view.slots_registered for view in jobs)
        busy = sum(view.slots_registered for view in jobs if view.state in ("RUNNING", "RECONCILING"))
        return ClusterView(
            slots_total=sum(view.slots_required for view in jobs if not view.is_terminal),
            slots_available=workers - busy,
            jobs_running=sum(not view.is_terminal for view in jobs),
            jobs_finished=states.count("FINISHED"),
            jobs_canceled=states.count("CANCELED"),
            jobs_failed=states.count("FAILED"),
            workers=workers,
        )


class _RecordedNumbers:
    """Cached numbers of ended jobs, which change only with the job's record. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[RecordedJob, JobNumbersView]] = {}

    def of(self, jobs: Sequence[RecordedJob]) -> list[JobNumbersView]:
        """Numbers of these jobs; those of other jobs are forgotten."""
        before, known = self._known, {}
        for job in jobs:
            found = before.get(job.job_id)
            known[job.job_id] = found if found is not None and found[0] is job else (job, view_recorded_numbers(job))
        self._known = known
        return [numbers for _, numbers in known.values()]
