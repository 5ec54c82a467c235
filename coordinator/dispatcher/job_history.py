"""SHELL: turns what happens to a job into records of its history, and runs the flows that write them.

It decides nothing about the job, and no error of it is the job's: an unexpected one ends the recording, not the leadership."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

import msgspec

from holdfast.coordinator.dispatcher.job_explanations import Explainer, JobExplanations
from holdfast.coordinator.dispatcher.job_log import about
from holdfast.coordinator.dispatcher.threads import Clock, FlowRunner
from holdfast.coordinator.explain.records import Explanation
from holdfast.coordinator.history.feed import FedRecord, HistoryFeed
from holdfast.coordinator.history.recorder import HistoryRecorder, WriteHistory
from holdfast.coordinator.history.records import RecordKind, describe_checkpoint
from holdfast.coordinator.history.store import HistoryWriter
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.notes import (
    AttemptDeployed,
    AttemptFailed,
    AttemptInitialized,
    CheckpointFailed,
    DrillEnded,
    FirstRecords,
    LabelChanged,
    Note,
    RequestEnded,
    StateChanged,
)
from holdfast.coordinator.views import CheckpointView
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import JobPaths

logger = logging.getLogger(__name__)


class JobHistory:
    """The history of one job that this process leads. `post` is called from any thread, all else by the job's turns."""

    def __init__(
        self,
        setup: JobSetup,
        runner: FlowRunner,
        clock: Clock,
        post: Callable[[Callable[[], None]], None],
        offer: Callable[[Callable[[], None]], None],
        feed: HistoryFeed | None = None,
        explainer: Explainer | None = None,
    ) -> None:
        """`post`: has the job's thread call a function in a turn; once no turn follows, nothing calls it. `offer`: likewise, but it
        never waits: where there is no room, nothing calls it. `feed`: gets each record as it is made. `explainer`: explains
        checkpoints when they end; None: nobody does."""
        self._setup = setup
        self._feed = feed
        self._runner = runner
        self._clock = clock
        self._post = post
        self._recorder = HistoryRecorder()
        self._writer = HistoryWriter(JobPaths(setup.job_id), setup.epoch)
        self._is_failing = False
        self._is_broken = False
        self._explanations = JobExplanations(explainer, clock, offer, self._explained) if explainer is not None else None

    def next_deadline_ms(self) -> int | None:
        if self._is_broken:
            return None
        of_probe = self._explanations.next_deadline_ms() if self._explanations is not None else None
        due = [time for time in (self._recorder.next_deadline_ms(), of_probe) if time is not None]
        return min(due, default=None)

    def explanation(self, checkpoint_id: int) -> Explanation | None:
        """Of a checkpoint, from when it ended, if that was kept. From any thread."""
        return self._explanations.kept(checkpoint_id) if self._explanations is not None else None

    def led(self) -> None:
        """This process leads the job from now on."""
        setup = self._setup
        newest = max((entry.checkpoint_id for entry in setup.completed), default=0)
        facts = {"submission": setup.submission, "attempt": setup.attempt, "newest_checkpoint": newest}
        self._guarded(lambda: self._record(RecordKind.LEADER, {**facts, "took_over": not setup.begins}))

    def event_handled(self, master: JobMaster, notes: Sequence[Note]) -> None:
        """Record what the newest event of the job brought."""
        finished = master.coordinator.stats.take_finished()  # also where nothing is recorded: they would wait there
        if self._is_broken:
            return
        if finished or notes:
            self._guarded(lambda: self._take(master, finished, notes))
        if self._explanations is not None and not self._is_broken:
            self._explanations.event_handled(master, finished)

    def _explained(self, facts: Mapping[str, Any]) -> None:
        if not self._is_broken:
            self._guarded(lambda: self._record(RecordKind.EXPLANATION, facts))

    def _take(self, master: JobMaster, finished: Mapping[int, CheckpointView], notes: Sequence[Note]) -> None:
        hosts = master.slot_pool.hosts() if finished else {}
        for view in finished.values():
            is_completed = view.status == "COMPLETED"
            notified = master.coordinator.stats.take_notified(view.checkpoint_id) if is_completed else {}
            self._record(RecordKind.CHECKPOINT, describe_checkpoint(view, hosts, notified))
        for note in notes:
            if not (isinstance(note, CheckpointFailed) and note.checkpoint_id in finished):
                self._record(*describe_note(note))
        if master.state.is_terminal or master.state.value == "SUSPENDED":
            self._recorder.end(self._clock.monotonic_ms())

    def _record(self, kind: str, facts: Mapping[str, Any]) -> None:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        number, line = self._recorder.record(kind, facts, now_ms=now_ms, wall_ms=wall_ms)
        if self._feed is not None:
            self._feed.publish(FedRecord(self._setup.job_id, self._setup.graph.name, self._setup.epoch, number, line))

    def advance(self, master: JobMaster) -> bool:
        """Begin the write that is due, and probe a checkpoint that is about to expire; False if neither is due."""
        if self._is_broken:
            return False
        probed = self._explanations is not None and self._explanations.advance(master)
        action = self._recorder.advance(self._clock.monotonic_ms())
        if action is None:
            return probed
        self._run(action, self._ended)
        return True

    def close(self) -> None:
        """Write what is left; no turn follows."""
        if not self._is_broken:
            for action in self._recorder.take_rest():
                self._run(action, lambda *_: None)

    def _run(self, action: WriteHistory, ended: Callable[[WriteHistory, bool | None, BaseException | None], None]) -> None:
        flow = self._writer.write(action)
        self._guarded(lambda: self._runner.record(flow, lambda stored, error: ended(action, stored, error)))

    def _ended(self, action: WriteHistory, stored: bool | None, error: BaseException | None) -> None:
        """A write has ended. From any thread."""
        self._post(lambda: self._guarded(lambda: self._note_end(action, stored, error)))

    def _note_end(self, action: WriteHistory, stored: bool | None, error: BaseException | None) -> None:
        now_ms = self._clock.monotonic_ms()
        if error is None or not isinstance(error, HoldfastError):
            if error is not None or not stored:
                told = "its file is taken" if error is None else f"{type(error).__name__}: {error}"
                facts = (self._setup.job_id, action.first, told)
                logger.error("job %s: records of its history from %d on are lost: %s", *facts, extra=about(self._setup.job_id))
            self._is_failing = False
            self._recorder.written(action, now_ms)
            return
        is_kept = self._recorder.failed(action, now_ms)
        if not self._is_failing or not is_kept:
            then = "it is tried again" if is_kept else "its last records are lost"
            why = (self._setup.job_id, then, error)
            logger.warning("job %s: its history can't be written, %s: %s", *why, extra=about(self._setup.job_id))
        self._is_failing = True

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            self._is_broken = True
            extra = about(self._setup.job_id)
            logger.critical("job %s: its history is recorded no more", self._setup.job_id, exc_info=True, extra=extra)


def describe_note(note: Note) -> tuple[RecordKind, Mapping[str, Any]]:
    """Kind and facts of a note."""
    facts: dict[str, Any] = msgspec.to_builtins(note)
    match note:
        case StateChanged():
            return RecordKind.STATE, facts
        case AttemptFailed():
            return RecordKind.FAILURE, facts
        case AttemptDeployed():
            return RecordKind.RESTART, facts
        case AttemptInitialized():
            return RecordKind.INITIALIZED, facts
        case FirstRecords():
            return RecordKind.FIRST_RECORD, facts
        case CheckpointFailed():  # before its trigger: nothing is known of its tasks
            told = {"id": note.checkpoint_id, "checkpoint_kind": note.kind.value, "status": "FAILED"}
            return RecordKind.CHECKPOINT, {**told, "reason": note.reason.value, "message": note.message}
        case RequestEnded():
            told = {name: value for name, value in facts.items() if name != "kind"}
            return RecordKind.REQUEST, {**told, "request_kind": note.kind.value}
        case LabelChanged():
            return RecordKind.LABEL, {"id": note.checkpoint_id, "label": note.label, "removed": note.removed}
        case DrillEnded():
            return RecordKind.DRILL, note.facts
        case _:
            assert_never(note)
