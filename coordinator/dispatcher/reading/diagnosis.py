"""SHELL: explanations of checkpoints and health of jobs, from the view that a job has published, or from its records.

A checkpoint that is not in memory, as one that an earlier leader took, is looked for in the job's history.

The pure functions of `explain/` judge them on the caller's thread. Workers of missing acknowledgements are asked where they are."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from msgspec.structs import replace

from holdfast.barriers.messages import QuestionKind, SubtaskKey
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.job_drills import JobDrills
from holdfast.coordinator.dispatcher.published import Look
from holdfast.coordinator.dispatcher.reading.queries import view_recorded_checkpoints, view_recorded_job
from holdfast.coordinator.dispatcher.reading.questions import Question, WorkerQuestions
from holdfast.coordinator.dispatcher.reading.recollection import COMPARED_MAX, Recollection
from holdfast.coordinator.dispatcher.reading.source_positions import SourcePositions
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.explain.explanation import choose_checkpoint, explain
from holdfast.coordinator.explain.facts import COMPARED_MIN
from holdfast.coordinator.explain.functions import workers_to_ask
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.records import CutView, Explanation, HealthView, Situation
from holdfast.coordinator.ha.recorded_job import Completed, RecordedJob, derive_config
from holdfast.coordinator.ha.records import SavepointRecord
from holdfast.coordinator.history.remembered import comparable_phases, recall_checkpoints, recall_failures
from holdfast.coordinator.ownership.claims import newest_kept
from holdfast.coordinator.totals import Totals, is_source, records_read
from holdfast.coordinator.views import AnswerView, CheckpointView, Moment
from holdfast.statebackends.errors import HoldfastError, NotFoundError
from holdfast.statebackends.storage import is_absolute_folder

LOOKS, LOOK_INTERVAL_MS = 20, 50
"""How often workers look at their stacks for one explanation, and how long from one look to the next."""
HISTORY_WAIT_S = 5.0
"""How long an explanation waits for what the history has of a checkpoint."""
COMPARED_WAIT_S = 1.0
"""How long it waits for the times of an earlier leader's checkpoints; it goes without if they come later."""
LOOK_WAIT_S = 2.5
"""How long an explanation waits for them; it goes without what comes later."""
HEALTH_MOMENT_MS = 1_000
"""The health of a job of which nothing changes has a new moment this often: a verdict may be about a time that has passed."""


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
    newest, cut = newest_kept(job), None
    if newest is not None:
        timestamp_ms = newest.decision.timestamp_ms if isinstance(newest.decision, Completed | SavepointRecord) else -1
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
        drills: JobDrills,
        recollection: Recollection,
        positions: SourcePositions,
    ) -> None:
        self._calls = calls
        self._questions = questions
        self._root = storage_root
        self._clock = clock
        self._drills = drills
        self._recollection = recollection
        self._positions = positions

    def moment(self, of_view: Moment) -> Moment:
        """Of what `health` tells: the view's, and what is known beside it. A verdict depends on the time, too."""
        beside = f"{of_view.as_of_ms // HEALTH_MOMENT_MS}-{self._drills.changes}-{self._positions.changes}"
        return Moment(of_view.as_of_ms, f"{of_view.tag}-{beside}")

    def health(self, job_id: str) -> HealthView:
        recorded = self._calls.recorded_only(job_id)
        if recorded is not None:
            situation = view_recorded_situation(recorded, self._root, self._clock.wall_ms())
        else:
            situation = view_situation(self._calls.look(job_id), self._root)
        drills = self._drills.remembered(job_id)
        verifications = self._drills.verifications(job_id)
        told = replace(situation, drills=drills or (), are_drills_known=drills is not None, verifications=verifications)
        if situation.cut is not None:
            sources = frozenset(each.uid for vertex in situation.job.graph.vertices for each in vertex.operators if is_source(each))
            has_ended = situation.job.overview.is_terminal
            told = replace(told, positions=self._positions.remembered(job_id, situation.cut, sources, has_ended=has_ended))
        return derive_health(told)

    def explain(self, job_id: str, checkpoint_id: int | None) -> Explanation:
        recorded = self._calls.recorded_only(job_id)
        if recorded is None:
            look = self._calls.look(job_id)
            situation = view_situation(look, self._root)
            number = choose_checkpoint(situation) if checkpoint_id is None else checkpoint_id
            found = look.published.stats.checkpoint(number) if number is not None else None
            if number is None or found is not None:
                return explain(self._asked(_with(self._compared(situation), number, found)))
            return explain(self._recalled(situation, number, None))
        situation = view_recorded_situation(recorded, self._root, self._clock.wall_ms())
        number = choose_checkpoint(situation) if checkpoint_id is None else checkpoint_id
        if number is None:
            return explain(situation)
        found = next((view for view in situation.stats.history if view.checkpoint_id == number), None)
        if found is not None and found.status == "IN_PROGRESS":
            return explain(_with(situation, number, found))
        return explain(self._recalled(situation, number, found))

    def _recalled(self, situation: Situation, number: int, bare: CheckpointView | None) -> Situation:
        """With a checkpoint as the history has it; else with what is known of it without. Raises NotFoundError if nothing is."""
        job = situation.job
        try:
            entries = self._recollection.read(job.overview.job_id, number, HISTORY_WAIT_S)
        except HoldfastError:
            if bare is None:
                raise
            entries = ()
        recorded = recall_checkpoints(entries)
        record = next((each for each in recorded if each.checkpoint.checkpoint_id == number), None)
        if record is None:
            return _with(situation, number, bare)
        before = [each for each in recorded if each.checkpoint.checkpoint_id < number]
        return replace(
            situation,
            job=replace(job, vertices=(), workers=(), exceptions=recall_failures(entries)),
            stats=replace(situation.stats, recent=comparable_phases(before, record.checkpoint.vertices, COMPARED_MAX)),
            checkpoint=record.checkpoint,
            record=record,
        )

    def _compared(self, situation: Situation) -> Situation:
        """With the times of checkpoints under earlier leaders, while this one has too few of its own to compare with."""
        job, recent = situation.job, situation.stats.recent
        if len(recent) >= COMPARED_MIN or job.epoch <= 1 or job.overview.is_terminal:
            return situation
        try:
            recorded = recall_checkpoints(self._recollection.read(job.overview.job_id, None, COMPARED_WAIT_S))
        except HoldfastError:
            return situation
        known = {phases.checkpoint_id for phases in recent}
        earlier = comparable_phases(recorded, (vertex.vertex_id for vertex in job.graph.vertices), COMPARED_MAX)
        phases = [*(each for each in earlier if each.checkpoint_id not in known), *recent]
        return replace(situation, stats=replace(situation.stats, recent=tuple(phases[-COMPARED_MAX:])))

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
    """Raises NotFoundError for an id of which nothing is known."""
    if number is not None and checkpoint is None:
        job_id = situation.job.overview.job_id
        where = f"nor was it found in the job's history: `holdfast history {job_id} --kinds checkpoint` has what there is"
        raise NotFoundError(f"job {job_id} shows no checkpoint {number}, {where}", job=job_id, checkpoint=number)
    return replace(situation, checkpoint=checkpoint)
