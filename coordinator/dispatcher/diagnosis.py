"""SHELL: explanations of checkpoints and health of jobs: a job is read once, on its thread or from its records, and judged.

What is read is a copy, and the pure functions of `explain/` judge it on the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from holdfast.barriers.jobgraph import JobGraph
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.job_runner import wall_clock_ms
from holdfast.coordinator.dispatcher.queries import view_job, view_recorded_checkpoints, view_recorded_job
from holdfast.coordinator.dispatcher.threads import SystemClock
from holdfast.coordinator.explain.explanation import choose_checkpoint, explain
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.records import CutView, Explanation, HealthView, Situation
from holdfast.coordinator.ha.recorded_job import CheckpointFact, Completed, RecordedJob, derive_config
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.totals import Totals
from holdfast.coordinator.views import CheckpointView
from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.storage import is_absolute_folder

_monotonic_ms = SystemClock().monotonic_ms


def view_situation(master: JobMaster, root: str, *, now_ms: int, monotonic_ms: int) -> Situation:
    """A job that this process leads, without a checkpoint. `now_ms`: wall clock; `monotonic_ms`: the clock of its turns."""
    coordinator, lifecycle, graph = master.coordinator, master.lifecycle, master.setup.graph
    point, newest = lifecycle.restore_point, coordinator.newest
    cut = None
    if point is not None and not lifecycle.keeps_nothing:
        is_newest = newest is not None and newest.checkpoint_id == point.checkpoint_id
        totals: Totals = newest.totals if newest is not None and is_newest else {}
        cut = CutView(point.checkpoint_id, point.kind, _locate(point.folder, root), point.timestamp_ms, _read(graph, totals))
    return Situation(
        job=view_job(master, now_ms),
        config=master.settings.config,
        stats=coordinator.stats.view(),
        schedule=coordinator.schedule(monotonic_ms) if not master.state.is_terminal else None,
        cut=cut,
        source_records=_read(graph, lifecycle.totals()),
        is_processing_backlog=coordinator.is_processing_backlog,
    )


def view_recorded_situation(job: RecordedJob, root: str, now_ms: int) -> Situation:
    """A job that has ended, or that another coordinator may lead, from its records."""
    submission, result = job.newest_submission, job.result
    assert submission is not None
    kept = [entry for entry in job.checkpoints.values() if entry.fact is CheckpointFact.COMPLETED and entry.is_recovery_point]
    cut = None
    if kept:
        newest = max(kept, key=lambda entry: entry.checkpoint_id)
        timestamp_ms = newest.decision.timestamp_ms if isinstance(newest.decision, Completed) else -1
        totals: Totals = newest.decision.totals if isinstance(newest.decision, Completed) else {}
        location = _locate(newest.folder, root)
        cut = CutView(newest.checkpoint_id, newest.kind, location, timestamp_ms, _read(submission.graph, totals))
    return Situation(
        job=view_recorded_job(job, now_ms),
        config=derive_config(job, submission),
        stats=view_recorded_checkpoints(job),
        cut=cut,
        source_records=_read(submission.graph, result.totals) if result is not None else None,
    )


def _locate(folder: str, root: str) -> str:
    return folder if is_absolute_folder(folder) else f"{root.rstrip('/')}/{folder}"


def _read(graph: JobGraph, totals: Totals) -> Mapping[str, int]:
    """Records that each source had read."""
    operators = (operator for vertex in graph.vertices for operator in vertex.operators if operator.kind == "source")
    return {operator.uid: totals[operator.uid].records_out for operator in operators if operator.uid in totals}


class Diagnosis:
    """The part of `interface.Coordinator` that explains. Thread-safe."""

    def __init__(self, calls: JobCalls, storage_root: str) -> None:
        self._calls = calls
        self._root = storage_root

    def health(self, job_id: str) -> HealthView:
        recorded = self._calls.recorded_only(job_id)
        if recorded is not None:
            return derive_health(view_recorded_situation(recorded, self._root, wall_clock_ms()))
        return derive_health(self._calls.read(job_id, self._situation))

    def explain(self, job_id: str, checkpoint_id: int | None) -> Explanation:
        recorded = self._calls.recorded_only(job_id)
        if recorded is None:
            return explain(self._calls.read(job_id, lambda master: self._with_checkpoint(master, checkpoint_id)))
        situation = view_recorded_situation(recorded, self._root, wall_clock_ms())
        number = choose_checkpoint(situation) if checkpoint_id is None else checkpoint_id
        history = situation.stats.history
        return explain(_with(situation, number, next((view for view in history if view.checkpoint_id == number), None)))

    def _situation(self, master: JobMaster) -> Situation:
        return view_situation(master, self._root, now_ms=wall_clock_ms(), monotonic_ms=_monotonic_ms())

    def _with_checkpoint(self, master: JobMaster, checkpoint_id: int | None) -> Situation:
        """On the job's thread: the situation and the checkpoint are of one moment."""
        situation = self._situation(master)
        number = choose_checkpoint(situation) if checkpoint_id is None else checkpoint_id
        return _with(situation, number, master.coordinator.stats.checkpoint(number) if number is not None else None)


def _with(situation: Situation, number: int | None, checkpoint: CheckpointView | None) -> Situation:
    """Raises NotFoundError for an id that is not shown any more, or never was."""
    if number is not None and checkpoint is None:
        job_id = situation.job.overview.job_id
        raise NotFoundError(f"job {job_id} shows no checkpoint {number}", job=job_id, checkpoint=number)
    return replace(situation, checkpoint=checkpoint)
