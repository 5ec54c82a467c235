"""SHELL: what an explanation is made from: a job's view, checkpoints under earlier leaders beside it, and what workers say."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from msgspec.structs import replace

from holdfast.barriers.messages import QuestionKind, SubtaskKey, WorkerAnswer
from holdfast.coordinator.dispatcher.published import Look
from holdfast.coordinator.dispatcher.reading.queries import view_recorded_checkpoints, view_recorded_job
from holdfast.coordinator.dispatcher.reading.questions import Question, WorkerQuestions
from holdfast.coordinator.dispatcher.reading.recollection import COMPARED_MAX, Recollection
from holdfast.coordinator.explain.functions import workers_to_ask
from holdfast.coordinator.explain.records import CutView, Situation
from holdfast.coordinator.explain.usual import COMPARED_MIN
from holdfast.coordinator.ha.recorded_job import Completed, RecordedJob, derive_config
from holdfast.coordinator.ha.records import SavepointRecord
from holdfast.coordinator.history.remembered import comparable_phases, recall_checkpoints
from holdfast.coordinator.ownership.claims import newest_kept
from holdfast.coordinator.totals import Totals, records_read
from holdfast.coordinator.views import AnswerView
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.storage import is_absolute_folder

LOOKS, LOOK_INTERVAL_MS = 20, 50
"""How often workers look at their stacks for one explanation, and how long from one look to the next."""
LOOK_WAIT_S = 2.5
"""How long an explanation waits for them; it goes without what comes later."""
COMPARED_WAIT_S = 1.0
"""How long it waits for the times of an earlier leader's checkpoints; it goes without if they come later."""

Asked = tuple[tuple[SubtaskKey, Future[AnswerView]], ...]
"""Subtasks whose acknowledgements are missing, and what their workers will have said."""


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


def with_earlier_leaders(situation: Situation, recollection: Recollection) -> Situation:
    """With the times of checkpoints under earlier leaders, while this one has too few of its own to compare with."""
    job, recent = situation.job, situation.stats.recent
    if len(recent) >= COMPARED_MIN or job.epoch <= 1 or job.overview.is_terminal:
        return situation
    try:
        recorded = recall_checkpoints(recollection.read(job.overview.job_id, None, COMPARED_WAIT_S))
    except HoldfastError:
        return situation
    known = {phases.checkpoint_id for phases in recent}
    earlier = comparable_phases(recorded, (vertex.vertex_id for vertex in job.graph.vertices), COMPARED_MAX)
    phases = [*(each for each in earlier if each.checkpoint_id not in known), *recent]
    return replace(situation, stats=replace(situation.stats, recent=tuple(phases[-COMPARED_MAX:])))


def ask_for_stacks(questions: WorkerQuestions, situation: Situation, looks: int = LOOKS) -> Asked:
    """Ask workers of missing acknowledgements where they are, of those that can be asked; waits for none."""
    job_id, asked = situation.job.overview.job_id, list[tuple[SubtaskKey, Future[AnswerView]]]()
    for key in workers_to_ask(situation):
        try:
            asked.append((key, questions.ask(Question(job_id, key.subtask, QuestionKind.STACKS, looks, LOOK_INTERVAL_MS))))
        except HoldfastError:
            continue  # the explanation says what is known without it
    return tuple(asked)


def answers_of(asked: Asked, *, attempt: int | None = None) -> tuple[tuple[SubtaskKey, WorkerAnswer], ...]:
    """What workers see of their stacks, of those that answer within LOOK_WAIT_S. `attempt`: what they say of another one is
    dropped; None: of any."""
    until_s = time.monotonic() + LOOK_WAIT_S
    looks = []
    for key, future in asked:
        try:
            answer = future.result(max(0.0, until_s - time.monotonic())).answer
        except (HoldfastError, FutureTimeoutError):
            continue
        if attempt is None or answer.attempt == attempt:
            looks.append((key, answer))
    return tuple(looks)
