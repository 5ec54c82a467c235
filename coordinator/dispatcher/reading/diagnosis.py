"""SHELL: explanations of checkpoints and health of jobs, from the view that a job has published, or from its records.

A checkpoint that is not in memory, as one that an earlier leader took, is looked for in the job's history. One that was explained
when it ended is shown so.

The pure functions of `explain/` judge them on the caller's thread. Workers of missing acknowledgements are asked where they are."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.job_drills import JobDrills
from holdfast.coordinator.dispatcher.reading.questions import WorkerQuestions
from holdfast.coordinator.dispatcher.reading.recollection import COMPARED_MAX, Recollection
from holdfast.coordinator.dispatcher.reading.situations import (
    answers_of,
    ask_for_stacks,
    view_recorded_situation,
    view_situation,
    with_earlier_leaders,
)
from holdfast.coordinator.dispatcher.reading.source_positions import SourcePositions
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.explain.explanation import choose_checkpoint, explain
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.kept import recall_explanation
from holdfast.coordinator.explain.records import Explanation, HealthView, Situation
from holdfast.coordinator.history.records import HistoryEntry, RecordKind
from holdfast.coordinator.history.remembered import comparable_phases, recall_checkpoints, recall_failures
from holdfast.coordinator.totals import is_source
from holdfast.coordinator.views import CheckpointView, Moment
from holdfast.statebackends.errors import HoldfastError, NotFoundError

HISTORY_WAIT_S = 5.0
"""How long an explanation waits for what the history has of a checkpoint."""
HEALTH_MOMENT_MS = 1_000
"""The health of a job of which nothing changes has a new moment this often: a verdict may be about a time that has passed."""


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
                return explain(self._seen(_with(situation, number, found)))
            return explain(self._recalled(situation, number, look.published.stats.recall(number)))
        situation = view_recorded_situation(recorded, self._root, self._clock.wall_ms())
        number = choose_checkpoint(situation) if checkpoint_id is None else checkpoint_id
        if number is None:
            return explain(situation)
        found = next((view for view in situation.stats.history if view.checkpoint_id == number), None)
        if found is not None and found.status == "IN_PROGRESS":
            return explain(_with(situation, number, found))
        return explain(self._recalled(situation, number, found))

    def _seen(self, situation: Situation) -> Situation:
        """Of a checkpoint in memory: with its explanation from when it ended, and else with what workers say now."""
        job_id, checkpoint = situation.job.overview.job_id, situation.checkpoint
        kept = self._calls.led(job_id).explanation(checkpoint.checkpoint_id) if checkpoint is not None else None
        if kept is not None:
            return replace(situation, kept=kept)
        compared = with_earlier_leaders(situation, self._recollection)
        return replace(compared, looks=answers_of(ask_for_stacks(self._questions, compared)))

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
            kept=_kept(entries, number),
        )


def _kept(entries: Sequence[HistoryEntry], number: int) -> Explanation | None:
    """Its explanation among the records of a history, of the leader that recorded how it ended."""
    epochs = {entry.epoch for entry in entries if entry.kind == RecordKind.CHECKPOINT and entry.facts.get("id") == number}
    kept = (entry.facts for entry in entries if entry.kind == RecordKind.EXPLANATION and entry.epoch in epochs)
    return next((each for each in map(recall_explanation, kept) if each is not None and each.checkpoint_id == number), None)


def _with(situation: Situation, number: int | None, checkpoint: CheckpointView | None) -> Situation:
    """Raises NotFoundError for an id of which nothing is known."""
    if number is not None and checkpoint is None:
        job_id = situation.job.overview.job_id
        where = f"nor was it found in the job's history: `holdfast history {job_id} --kinds checkpoint` has what there is"
        raise NotFoundError(f"job {job_id} shows no checkpoint {number}, {where}", job=job_id, checkpoint=number)
    return replace(situation, checkpoint=checkpoint)
