"""Checkpoint statistics for users: counts, a bounded history with every subtask, and summaries of completed checkpoints.

They record what the checkpoint coordinator reports; no decision depends on them. Times are wall clock, ms since the epoch."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.barriers.messages import AcknowledgeCheckpoint, CheckpointMetrics, FailureReason, SubtaskKey
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.views import (
    CheckpointCounts,
    CheckpointPhases,
    CheckpointStatsView,
    CheckpointView,
    HookFailureView,
    HookWaitView,
    Quantiles,
    RestoredView,
    SubtaskCheckpointView,
    VertexCheckpointView,
    summarise,
)

HISTORY_MAX = 20
"""Finished checkpoints kept, with their subtasks but for those of earlier leaders; those in progress are kept besides."""

RECENT_MAX = 20
"""Newest completed checkpoints whose phases are kept, savepoints left out."""

SUMMARY_MAX = 1_000
"""Newest completed checkpoints that the summaries cover."""

NOTIFIED_MAX = 2 * RECENT_MAX
"""Completed checkpoints and savepoints for which it is known when their subtasks were told."""

SKEW_TOLERATED_MS = 100
"""How far the clocks of two hosts differ at most while they are kept in step."""

_SUMMARIES = ("checkpointed_size", "state_size", "end_to_end_duration", "alignment_buffered", "processed_data", "persisted_data")


_Ack: TypeAlias = tuple[SubtaskKey, int, CheckpointMetrics]
"""Subtask, when its acknowledgement came, and what it measured: the acknowledgement itself may hold megabytes of state."""


class _Tracked:
    """One checkpoint while it is in progress."""

    def __init__(self, checkpoint_id: int, request: CheckpointRequest, tasks: Sequence[SubtaskKey], trigger_ms: int) -> None:
        self.checkpoint_id = checkpoint_id
        self.request = request
        self.tasks = tasks
        self.trigger_ms = trigger_ms
        self._acked: set[SubtaskKey] = set()
        self._acks: list[_Ack] = []
        """Only appended to: captures share it."""
        self._summed = 0
        """So many of the first of them are in the numbers below: these are needed once a view, not once an acknowledgement."""
        self.latest_ack_ms = -1
        self.checkpointed_size = self.state_size = self.processed_bytes = self.persisted_bytes = 0
        self.unaligned = False
        self.hooks: HookWaitView | None = None

    def acknowledge(self, ack: AcknowledgeCheckpoint, at_ms: int) -> None:
        task = SubtaskKey(ack.vertex, ack.subtask)
        if task not in self._acked:
            self._acked.add(task)
            self._acks.append((task, at_ms, ack.metrics))

    def _sum_up(self) -> None:
        for _task, at_ms, metrics in self._acks[self._summed :]:
            self.latest_ack_ms = max(self.latest_ack_ms, at_ms)
            self.checkpointed_size += metrics.checkpointed_size
            self.state_size += metrics.state_size
            self.processed_bytes += metrics.bytes_processed_during_alignment
            self.persisted_bytes += metrics.bytes_persisted_during_alignment or 0
            self.unaligned = self.unaligned or metrics.unaligned is True
        self._summed = len(self._acks)

    def capture(self, status: str) -> _CapturedCheckpoint:
        self._sum_up()
        return _CapturedCheckpoint(self._overview(status), self.tasks, self._acks, len(self._acks))

    def view(self, status: str) -> CheckpointView:
        """The checkpoint with every vertex and subtask."""
        return self.capture(status).view()

    def _overview(self, status: str) -> CheckpointView:
        """The checkpoint without vertices, as a list of checkpoints has it."""
        return CheckpointView(
            checkpoint_id=self.checkpoint_id,
            kind=self.request.kind,
            status=status,
            trigger_ms=self.trigger_ms,
            latest_ack_ms=self.latest_ack_ms,
            checkpointed_size=self.checkpointed_size,
            state_size=self.state_size,
            end_to_end_ms=max(0, self.latest_ack_ms - self.trigger_ms) if self._acks else -1,
            processed_bytes=self.processed_bytes,
            persisted_bytes=self.persisted_bytes,
            unaligned=self.unaligned,
            num_subtasks=len(self.tasks),
            num_acknowledged_subtasks=len(self._acks),
            vertices={},
            hooks=self.hooks,
            savepoint_format=("NATIVE" if self.request.native else "CANONICAL") if self.request.kind.is_savepoint else None,
        )


class _CapturedCheckpoint:
    """A checkpoint in progress at one moment, for any thread."""

    def __init__(self, overview: CheckpointView, tasks: Sequence[SubtaskKey], acks: Sequence[_Ack], count: int) -> None:
        """`acks`: grows; the first `count` count."""
        self.overview = overview
        self._tasks = tasks
        self._acks = acks
        self._count = count

    def view(self) -> CheckpointView:
        """With every vertex and subtask."""
        trigger_ms = self.overview.trigger_ms
        acked = {task: _acked(task.subtask, at_ms, trigger_ms, metrics) for task, at_ms, metrics in self._acks[: self._count]}
        vertices: dict[str, list[SubtaskCheckpointView]] = {}
        for vertex, tasks in itertools.groupby(self._tasks, attrgetter("vertex")):
            vertices[vertex] = [acked.get(task) or _missing(task.subtask) for task in tasks]
        parts = {vertex: _vertex_view(vertex, self.overview.status, subtasks) for vertex, subtasks in vertices.items()}
        return replace(self.overview, vertices=parts)


def _missing(subtask: int) -> SubtaskCheckpointView:
    return SubtaskCheckpointView(subtask, -1, -1, 0, 0, 0, 0, 0, 0, 0)


def _acked(subtask: int, at_ms: int, trigger_ms: int, metrics: CheckpointMetrics) -> SubtaskCheckpointView:
    """The start delay is from the coordinator's clock to the worker's. No more of it counts than the time until the acknowledgement
    leaves, by the coordinator's clock alone, beside the phases that a worker measures by itself.

    Arguments by position, and no `max`: it is called for every subtask of every checkpoint."""
    took_ms = at_ms - trigger_ms if at_ms > trigger_ms else 0
    alignment_ms, async_ms, unaligned = metrics.alignment_duration_ms, metrics.async_duration_ms, metrics.unaligned is True
    work_ms = metrics.sync_duration_ms + async_ms
    spent_ms = max(alignment_ms, work_ms) if unaligned else alignment_ms + work_ms
    delay_ms = took_ms - spent_ms if took_ms > spent_ms else 0
    return SubtaskCheckpointView(
        subtask,
        at_ms,
        took_ms,
        metrics.checkpointed_size,
        metrics.state_size,
        round(metrics.sync_duration_ms),
        round(async_ms),
        round(alignment_ms),
        metrics.bytes_processed_during_alignment,
        round(metrics.start_delay_ms if metrics.start_delay_ms <= delay_ms else delay_ms),
        metrics.bytes_persisted_during_alignment or 0,
        unaligned,
        -1 if metrics.store_duration_ms is UNSET else round(metrics.store_duration_ms),
        -1 if metrics.new_files is UNSET else metrics.new_files,
        0 if metrics.stalled_duration_ms is UNSET else round(min(metrics.stalled_duration_ms, async_ms)),
    )


def derive_phases(view: CheckpointView) -> CheckpointPhases:
    """Phases of a completed checkpoint with its subtasks; O(subtasks)."""
    longest = [vertex.longest for vertex in view.vertices.values()]
    told = [each for vertex in view.vertices.values() for each in vertex.subtasks if each.ack_ms >= 0 and each.store_ms >= 0]
    stored_ms = sum([each.store_ms for each in told])
    stored_size = sum([each.checkpointed_size for each in told])
    return CheckpointPhases(
        checkpoint_id=view.checkpoint_id,
        end_to_end_ms=view.end_to_end_ms,
        start_delay_ms=max([each.start_delay_ms for each in longest], default=-1),
        alignment_ms=max([each.alignment_ms for each in longest], default=-1),
        sync_ms=max([each.sync_ms for each in longest], default=-1),
        encode_ms=max([each.encode_ms for each in longest], default=-1),
        store_ms=max([each.store_ms for each in longest], default=-1),
        acknowledge_ms=max([each.acknowledge_ms for each in longest], default=-1),
        decide_ms=view.decide_ms,
        notify_ms=view.notify_ms,
        checkpointed_size=view.checkpointed_size,
        state_size=view.state_size,
        store_rate=stored_size * 1000 // stored_ms if stored_ms else -1,
        new_files=sum([each.new_files for each in told]) if told else -1,
    )


def _vertex_view(vertex: str, status: str, subtasks: Sequence[SubtaskCheckpointView]) -> VertexCheckpointView:
    latest_ms = took_ms = -1
    acked = checkpointed_size = state_size = processed = 0
    for subtask in subtasks:
        if subtask.ack_ms < 0:
            continue
        acked += 1
        latest_ms = max(latest_ms, subtask.ack_ms)
        took_ms = max(took_ms, subtask.end_to_end_ms)
        checkpointed_size += subtask.checkpointed_size
        state_size += subtask.state_size
        processed += subtask.alignment_processed
    if status == "IN_PROGRESS" and acked == len(subtasks):
        status = "COMPLETED"
    return VertexCheckpointView(
        vertex=vertex,
        status=status,
        latest_ack_ms=latest_ms,
        checkpointed_size=checkpointed_size,
        state_size=state_size,
        end_to_end_ms=took_ms,
        processed_bytes=processed,
        num_subtasks=len(subtasks),
        num_acknowledged_subtasks=acked,
        subtasks=tuple(subtasks),
    )


def _recalled_view(completed: CompletedCheckpoint) -> CheckpointView:
    """A checkpoint that an earlier leader completed: what its record does not tell is -1."""
    return CheckpointView(
        checkpoint_id=completed.checkpoint_id,
        kind=completed.kind,
        status="COMPLETED",
        trigger_ms=completed.timestamp_ms,
        latest_ack_ms=-1,
        checkpointed_size=-1,
        state_size=-1 if completed.is_savepoint or completed.shared is None else completed.size,
        end_to_end_ms=-1,
        processed_bytes=0,
        persisted_bytes=0,
        num_subtasks=0,
        num_acknowledged_subtasks=0,
        vertices={},
        location=completed.folder,
    )


def _slot_of(view: CheckpointView) -> str:
    """Which of the latest ones a completed checkpoint may be."""
    return "savepoint" if view.is_savepoint else "completed"


class _Summaries:
    """The numbers that the summaries are over, at one moment; summarised by whichever thread shows them first."""

    def __init__(self, numbers: Mapping[str, tuple[float, ...]]) -> None:
        self._numbers = numbers
        self._found: Mapping[str, Quantiles] | None = None

    def view(self) -> Mapping[str, Quantiles]:
        if self._found is None:
            self._found = {name: summarise(values) for name, values in self._numbers.items()}
        return self._found


@dataclass(frozen=True, slots=True)
class CapturedStats:
    """The statistics at one moment, for any thread."""

    counts: CheckpointCounts
    summaries: _Summaries
    in_progress: Mapping[int, _CapturedCheckpoint]
    finished: tuple[CheckpointView, ...]
    latest: Mapping[str, CheckpointView]
    latest_restored: RestoredView | None
    recent: tuple[CheckpointPhases, ...]
    notify_ms: Mapping[int, int]
    """Checkpoint of the history -> time from COMPLETED until the last subtask was told, where any has said."""
    recalled: tuple[CheckpointView, ...] = ()
    """Completed under earlier leaders; without their vertices, and with little else."""
    latest_recalled: Mapping[str, CheckpointView] = field(default_factory=dict)

    def recall(self, checkpoint_id: int) -> CheckpointView | None:
        """One that an earlier leader completed; None if it is none of those that are shown."""
        known = (*self.recalled, *self.latest_recalled.values())
        return next((view for view in known if view.checkpoint_id == checkpoint_id), None)

    def checkpoint(self, checkpoint_id: int) -> CheckpointView | None:
        """One checkpoint of this leader: in progress, of the history, or the latest of its kind, however old; None if it is none of
        these."""
        running = self.in_progress.get(checkpoint_id)
        if running is not None:
            return running.view()
        known = (*self.finished, *self.latest.values())
        found = next((view for view in known if view.checkpoint_id == checkpoint_id), None)
        return replace(found, notify_ms=self.notify_ms.get(checkpoint_id, -1)) if found is not None else None

    def view(self) -> CheckpointStatsView:
        """All statistics. Checkpoints in progress come without their vertices: see `checkpoint`."""
        running = [tracked.overview for tracked in self.in_progress.values()]
        latest = {**self.latest_recalled, **self.latest}
        return CheckpointStatsView(
            counts=self.counts,
            summary=self.summaries.view(),
            history=tuple(sorted([*running, *self.finished, *self.recalled], key=lambda view: -view.checkpoint_id)),
            latest_completed=latest.get("completed"),
            latest_savepoint=latest.get("savepoint"),
            latest_failed=latest.get("failed"),
            latest_restored=self.latest_restored,
            recent=tuple(replace(phases, notify_ms=self.notify_ms.get(phases.checkpoint_id, -1)) for phases in self.recent),
        )


class CheckpointStats:
    """Memory is bounded by HISTORY_MAX finished checkpoints, the pending ones, and SUMMARY_MAX numbers per field."""

    def __init__(self) -> None:
        self._in_progress: dict[int, _Tracked] = {}
        self._finished: OrderedDict[int, CheckpointView] = OrderedDict()
        self._numbers: dict[str, deque[float]] = {name: deque(maxlen=SUMMARY_MAX) for name in _SUMMARIES}
        self._summaries: _Summaries | None = None
        """Of `_numbers` as they are; None: not captured since they changed."""
        self._latest: dict[str, CheckpointView] = {}
        self._recalled: OrderedDict[int, CheckpointView] = OrderedDict()
        self._latest_recalled: dict[str, CheckpointView] = {}
        self._restored: RestoredView | None = None
        self._untaken: OrderedDict[int, CheckpointView] = OrderedDict()
        """Finished ones that `take_finished` has not returned."""
        self._recent: deque[CheckpointPhases] = deque(maxlen=RECENT_MAX)
        self._notified: dict[int, int] = {}
        """Checkpoint of the history -> the longest time from its trigger until a subtask was told that it is complete, ms."""
        self._completed: dict[int, tuple[int, int]] = {}
        """The same checkpoints -> when each was triggered, and how long it took."""
        self._unrecorded: set[int] = set()
        """Those of which `take_notified` has not told."""
        self._counts = {"restored": 0, "total": 0, "completed": 0, "failed": 0}

    def recall(self, completed: Iterable[CompletedCheckpoint]) -> None:
        """Those that earlier leaders completed, and that are kept: a new leader shows them, and counts none. To be called first."""
        for view in map(_recalled_view, sorted(completed, key=attrgetter("checkpoint_id"))):
            self._latest_recalled[_slot_of(view)] = self._recalled[view.checkpoint_id] = view
        self._trim()

    def triggered(self, checkpoint_id: int, request: CheckpointRequest, tasks: Iterable[SubtaskKey], trigger_ms: int) -> None:
        self._counts["total"] += 1
        self._in_progress[checkpoint_id] = _Tracked(checkpoint_id, request, sorted(tasks), trigger_ms)

    def hooks_called(self, checkpoint_id: int, names: Iterable[str]) -> None:
        self._in_progress[checkpoint_id].hooks = HookWaitView(tuple(sorted(names)))

    def hook_answered(self, checkpoint_id: int, name: str, missing: Iterable[str], wall_ms: int) -> None:
        """`missing`: the hooks that have not."""
        tracked = self._in_progress[checkpoint_id]
        tracked.hooks = HookWaitView(tuple(sorted(missing)), name, max(0, wall_ms - tracked.trigger_ms))

    def acknowledged(self, ack: AcknowledgeCheckpoint, wall_ms: int) -> None:
        tracked = self._in_progress.get(ack.checkpoint_id)
        if tracked is not None:
            tracked.acknowledge(ack, wall_ms)
        number, after_ms = ack.metrics.notified_checkpoint, ack.metrics.notified_after_ms
        if number is not UNSET and after_ms is not UNSET and number in self._notified:
            self._told(number, after_ms, wall_ms)

    def _told(self, number: int, after_ms: float, wall_ms: int) -> None:
        """A subtask was told of a completed checkpoint so long after its trigger, by its own clock: before now, by that of the
        coordinator, and not before it was complete. What lies far in front of that is of a wrong clock, and not counted."""
        begun_ms, took_ms = self._completed[number]
        if after_ms + SKEW_TOLERATED_MS >= took_ms:
            self._notified[number] = max(self._notified[number], round(min(after_ms, wall_ms - begun_ms)))

    def completed(self, checkpoint_id: int, location: str, wall_ms: int) -> None:
        tracked = self._in_progress.pop(checkpoint_id)
        duration = max(0, wall_ms - tracked.trigger_ms)
        view = tracked.view("COMPLETED")
        decide_ms = max(0, wall_ms - view.latest_ack_ms) if view.latest_ack_ms >= 0 else -1
        view = replace(view, location=location, end_to_end_ms=duration, decide_ms=decide_ms)
        self._counts["completed"] += 1
        self._latest[_slot_of(view)] = view
        numbers = (view.checkpointed_size, view.state_size, duration, 0, view.processed_bytes, view.persisted_bytes)
        for name, value in zip(_SUMMARIES, numbers, strict=True):
            self._numbers[name].append(value)
        self._summaries = None
        if not view.is_savepoint:
            self._recent.append(derive_phases(view))
        self._notified[checkpoint_id] = -1
        self._unrecorded.add(checkpoint_id)
        self._completed[checkpoint_id] = (tracked.trigger_ms, duration)
        self._keep(view)

    def failed(
        self, checkpoint_id: int, reason: FailureReason, message: str, wall_ms: int, hooks: HookFailureView | None = None
    ) -> None:
        """Note a failed checkpoint. An id that failed before its trigger is not shown. `hooks`: master hooks that it failed for."""
        tracked = self._in_progress.pop(checkpoint_id, None)
        if tracked is None:
            return
        view = replace(
            tracked.view("FAILED"),
            failure_ms=wall_ms,
            failure_reason=reason.value,
            failure_message=message or reason.value,
            hook_failure=hooks,
        )
        self._counts["failed"] += 1
        self._latest["failed"] = view
        self._keep(view)

    def restored(self, view: RestoredView) -> None:
        self._counts["restored"] += 1
        self._restored = view

    def dropped(self, checkpoint_id: int) -> None:
        """Note that a completed checkpoint is no longer retained."""
        self._note_discarded(checkpoint_id, discarded=True)

    def kept(self, checkpoint_id: int) -> None:
        """Note that it is retained after all."""
        self._note_discarded(checkpoint_id, discarded=False)

    def _note_discarded(self, checkpoint_id: int, *, discarded: bool) -> None:
        for views in (self._finished, self._recalled):
            if checkpoint_id in views:
                views[checkpoint_id] = replace(views[checkpoint_id], discarded=discarded)
        for latest in (self._latest, self._latest_recalled):
            for kind, view in latest.items():
                if view.checkpoint_id == checkpoint_id:
                    latest[kind] = replace(view, discarded=discarded)

    def checkpoint(self, checkpoint_id: int) -> CheckpointView | None:
        return self.capture().checkpoint(checkpoint_id)

    def _notify_ms(self) -> Mapping[int, int]:
        known = {phases.checkpoint_id: phases.end_to_end_ms for phases in self._recent}
        known |= {view.checkpoint_id: view.end_to_end_ms for view in (*self._finished.values(), *self._latest.values())}
        return {
            number: max(0, after_ms - known[number])
            for number, after_ms in self._notified.items()
            if after_ms >= 0 and number in known
        }

    @property
    def counts(self) -> CheckpointCounts:
        return CheckpointCounts(in_progress=len(self._in_progress), **self._counts)

    @property
    def recent(self) -> tuple[CheckpointPhases, ...]:
        """As in CheckpointStatsView, but for when subtasks knew."""
        return tuple(self._recent)

    @property
    def latest_completed(self) -> CheckpointView | None:
        """Of an earlier leader, where this one has completed none."""
        return self._latest.get("completed") or self._latest_recalled.get("completed")

    def capture(self) -> CapturedStats:
        """The statistics as they are. O(pending checkpoints); the numbers of the summaries are copied once a completed one."""
        if self._summaries is None:
            self._summaries = _Summaries({name: tuple(values) for name, values in self._numbers.items()})
        return CapturedStats(
            counts=self.counts,
            summaries=self._summaries,
            in_progress={number: tracked.capture("IN_PROGRESS") for number, tracked in self._in_progress.items()},
            finished=tuple(self._finished.values()),
            latest=dict(self._latest),
            latest_restored=self._restored,
            recent=tuple(self._recent),
            notify_ms=self._notify_ms(),
            recalled=tuple(self._recalled.values()),
            latest_recalled=dict(self._latest_recalled),
        )

    def view(self) -> CheckpointStatsView:
        return self.capture().view()

    def take_finished(self) -> Mapping[int, CheckpointView]:
        """The checkpoints that were completed or failed since the last call, HISTORY_MAX at most."""
        if not self._untaken:
            return {}
        taken, self._untaken = self._untaken, OrderedDict()
        return taken

    def take_notified(self, before: int) -> Mapping[int, int]:
        """Completed checkpoints in front of one that is complete -> time until the last subtask knew of them, ms; each once. The
        acknowledgements of that one have told it; a subtask that says it later is not waited for."""
        known = self._notify_ms()
        found = {number: known[number] for number in sorted(self._unrecorded) if number < before and number in known}
        self._unrecorded -= found.keys()
        return found

    def _keep(self, view: CheckpointView) -> None:
        self._untaken[view.checkpoint_id] = view
        while len(self._untaken) > HISTORY_MAX:
            self._untaken.popitem(last=False)
        self._finished[view.checkpoint_id] = view
        self._trim()
        while len(self._notified) > NOTIFIED_MAX:
            oldest = min(self._notified)
            del self._notified[oldest], self._completed[oldest]
            self._unrecorded.discard(oldest)

    def _trim(self) -> None:
        """Keep HISTORY_MAX finished ones, those of earlier leaders included, which go first."""
        for views in (self._recalled, self._finished):
            while views and len(self._recalled) + len(self._finished) > HISTORY_MAX:
                views.popitem(last=False)
