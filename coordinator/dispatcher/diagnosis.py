"""SHELL: explanations of checkpoints and health of jobs, from the view that a job has published, or from its records.

The pure functions of `explain/` judge them on the caller's thread. Workers of missing acknowledgements are asked where they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from msgspec.structs import replace

from holdfast.barriers.messages import QuestionKind, SubtaskKey
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.published import Look
from holdfast.coordinator.dispatcher.queries import view_recorded_checkpoints, view_recorded_job
from holdfast.coordinator.dispatcher.questions import Question, WorkerQuestions
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.drills.records import DrillView
from holdfast.coordinator.explain.explanation import choose_checkpoint, explain
from holdfast.coordinator.explain.functions import workers_to_ask
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.records import CutView, Explanation, HealthView, Situation
from holdfast.coordinator.ha.recorded_job import CheckpointFact, Completed, RecordedJob, derive_config
from holdfast.coordinator.totals import Totals, records_read
from holdfast.coordinator.views import AnswerView, CheckpointView
from holdfast.statebackends.errors import HoldfastError, NotFoundError
from holdfast.statebackends.storage import is_absolute_folder

LOOKS, LOOK_INTERVAL_MS = 20, 50
"""How often workers look at their stacks for one explanation, and how long from one look to the next."""
LOOK_WAIT_S = 2.5
"""How long an explanation waits for them; it goes without what comes later."""


def view_situation(look: Look, root: str) -> Situation:
    """A job that this process leads, without a checkpoint."""
    found = look.published
    job = replace(found.job(), now_ms=look.as_of_ms)
    return Situation(
        job=job,
        config=found.config,
        stats=found.checkpoints(),
        schedule=found.schedule,
        cut=replace(found.cut, location=_locate(found.cut.location, root)) if found.cut is not None else None,
        source_records=records_read(job.graph, job.totals),
        is_processing_backlog=found.is_processing_backlog,
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
        cut = CutView(newest.checkpoint_id, newest.kind, location, timestamp_ms, records_read(submission.graph, totals))
    return Situation(
        job=view_recorded_job(job, now_ms),
        config=derive_config(job, submission),
        stats=view_recorded_checkpoints(job),
        cut=cut,
        source_records=records_read(submission.graph, result.totals) if result is not None else None,
    )


def _locate(folder: str, root: str) -> str:
    return folder if is_absolute_folder(folder) else f"{root.rstrip('/')}/{folder}"


class Diagnosis:
    """The part of `interface.Coordinator` that explains. Thread-safe."""

    def __init__(
        self,
        calls: JobCalls,
        storage_root: str,
        clock: Clock,
        questions: WorkerQuestions,
        drills: Callable[[str], tuple[DrillView, ...]],
    ) -> None:
        self._calls = calls
        self._questions = questions
        self._root = storage_root
        self._clock = clock
        self._drills = drills

    def health(self, job_id: str) -> HealthView:
        recorded = self._calls.recorded_only(job_id)
        if recorded is not None:
            situation = view_recorded_situation(recorded, self._root, self._clock.wall_ms())
        else:
            situation = view_situation(self._calls.look(job_id), self._root)
        return derive_health(replace(situation, drills=self._drills(job_id)))

    def explain(self, job_id: str, checkpoint_id: int | None) -> Explanation:
        recorded = self._calls.recorded_only(job_id)
        if recorded is None:
            look = self._calls.look(job_id)
            situation = view_situation(look, self._root)
            number = choose_checkpoint(situation) if checkpoint_id is None else checkpoint_id
            found = look.published.stats.checkpoint(number) if number is not None else None
            return explain(self._asked(_with(situation, number, found)))
        situation = view_recorded_situation(recorded, self._root, self._clock.wall_ms())
        number = choose_checkpoint(situation) if checkpoint_id is None else checkpoint_id
        found = next((view for view in situation.stats.history if view.checkpoint_id == number), None)
        return explain(_with(situation, number, found))

    def _asked(self, situation: Situation) -> Situation:
        """With what workers of missing acknowledgements see of their stacks, of those that answer in time."""
        job_id, asked = situation.job.overview.job_id, list[tuple[SubtaskKey, Future[AnswerView]]]()
        for key in workers_to_ask(situation):
            try:
                question = Question(job_id, key.subtask, QuestionKind.STACKS, LOOKS, LOOK_INTERVAL_MS)
                asked.append((key, self._questions.ask(question)))
            except HoldfastError:
                continue  # the explanation says what is known without it
        until_s = time.monotonic() + LOOK_WAIT_S
        looks = []
        for key, future in asked:
            try:
                looks.append((key, future.result(max(0.0, until_s - time.monotonic())).answer))
            except (HoldfastError, FutureTimeoutError):
                continue
        return replace(situation, looks=tuple(looks))


def _with(situation: Situation, number: int | None, checkpoint: CheckpointView | None) -> Situation:
    """Raises NotFoundError for an id that is not shown any more, or never was."""
    if number is not None and checkpoint is None:
        job_id = situation.job.overview.job_id
        older = f"`holdfast history {job_id} --kinds checkpoint` has those that are no longer shown, with their phases"
        raise NotFoundError(f"job {job_id} shows no checkpoint {number}: {older}", job=job_id, checkpoint=number)
    return replace(situation, checkpoint=checkpoint)
