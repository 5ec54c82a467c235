"""Facts of a situation that several explanations use: places by name, phases beside what is usual, silence as text. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import UNSET

from holdfast.barriers.messages import CheckpointKind, SubtaskKey, TaskState, clip, printable
from holdfast.coordinator.explain.records import CutView, Phase, PhaseView, Place, Situation
from holdfast.coordinator.explain.usual import Usual, is_unusual, median_of_known
from holdfast.coordinator.figures import duration_text
from holdfast.coordinator.views import CheckpointPhases, CheckpointView, SubtaskCheckpointView, SubtaskView

NAME_BYTES_MAX = 120
TEXT_BYTES_MAX = 400
"""Of a foreign text within one of ours."""


def shown(text: str, bytes_max: int = NAME_BYTES_MAX) -> str:
    """A foreign text on one line, of bounded length."""
    return clip(printable(" ".join(clip(text, 4 * bytes_max).split())), bytes_max)


def snapshot_name(cut: CutView) -> str:
    return f"{cut.kind.value.replace('_', '-')} {cut.checkpoint_id}"


def silence_text(slot: int, silent_ms: int) -> str:
    """Of a worker that is not heard of."""
    return f"nothing was heard from the worker in slot {slot} for {duration_text(silent_ms)}"


Reader = Callable[[SubtaskCheckpointView], int]
_READERS: dict[Phase, Reader] = {
    Phase.START_DELAY: attrgetter("start_delay_ms"),
    Phase.ALIGNMENT: attrgetter("alignment_ms"),
    Phase.SYNC: attrgetter("sync_ms"),
    Phase.ENCODE: attrgetter("encode_ms"),
    Phase.STORE: attrgetter("store_ms"),
    Phase.ACKNOWLEDGE: attrgetter("acknowledge_ms"),
}


def phase_of(subtask: SubtaskCheckpointView, phase: Phase) -> int:
    """Where its worker does not split the asynchronous part, all of it counts as `store`."""
    value = _READERS[phase](subtask)
    if value < 0 and phase in (Phase.ENCODE, Phase.STORE):
        return subtask.async_ms if phase is Phase.STORE else 0
    return value


def phases_of(subtask: SubtaskCheckpointView) -> dict[Phase, int]:
    """Those of one subtask."""
    return {phase: phase_of(subtask, phase) for phase in _READERS}


class Load(NamedTuple):
    """What a running subtask told of its last second, as shares."""

    view: SubtaskView
    busy: float
    backpressured: float

    @property
    def nearness(self) -> float:
        """To its limit."""
        return max(self.busy, self.backpressured)


class Facts:
    """A situation, indexed; O(subtasks) once."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.job, self.config, self.stats = situation.job, situation.config, situation.stats
        self.record = situation.record
        schedule = situation.schedule
        interval_ms = schedule.interval_ms if schedule is not None else self.config.checkpoint_interval_ms
        self.usual = Usual(self.config, interval_ms, self.stats.recent)
        self.graph = self.job.graph
        self.views = {vertex.vertex_id: vertex for vertex in self.job.vertices}
        self.workers = {worker.slot: worker for worker in self.job.workers}
        self.order = {vertex.vertex_id: index for index, vertex in enumerate(self.graph.vertices)}
        self.inputs: dict[str, list[str]] = {vertex: [] for vertex in self.order}
        self.outputs: dict[str, list[str]] = {vertex: [] for vertex in self.order}
        self._loads: dict[str, list[Load]] = {}
        self._acked: dict[str, list[SubtaskCheckpointView]] = {}
        for edge in self.graph.edges:
            self.inputs[edge.target].append(edge.source)
            self.outputs[edge.source].append(edge.target)

    # ------------------------------------------------------------------------------------------------------- places

    def place(self, vertex_id: str, subtask: int = -1) -> Place:
        index = self.order.get(vertex_id)
        if index is None:
            return Place(shown(vertex_id), shown(vertex_id), subtask)
        vertex = self.graph.vertices[index]
        return Place(shown(vertex.name), shown(vertex.operators[0].uid), subtask, self.host(vertex_id, subtask))

    def host(self, vertex_id: str, subtask: int) -> str:
        if self.record is not None:
            return shown(self.record.hosts.get(SubtaskKey(vertex_id, subtask), ""))
        found = self.subtask(vertex_id, subtask)
        return shown(found.host) if found is not None else ""

    def subtask(self, vertex_id: str, subtask: int) -> SubtaskView | None:
        view = self.views.get(vertex_id)
        if view is None or not 0 <= subtask < len(view.subtasks):
            return None
        return view.subtasks[subtask]

    def running(self, vertex_id: str) -> list[SubtaskView]:
        """Subtasks of a vertex whose figures are of now."""
        view = self.views.get(vertex_id)
        return [each for each in view.subtasks if each.state is TaskState.RUNNING] if view is not None else []

    def loads(self, vertex_id: str) -> list[Load]:
        """Of the running subtasks of a vertex that have told it."""
        if vertex_id not in self._loads:
            self._loads[vertex_id] = [
                Load(each, (metrics.busy_ms_per_second or 0) / 1000, metrics.backpressured_ms_per_second / 1000)
                for each in self.running(vertex_id)
                if (metrics := each.metrics).backpressured_ms_per_second is not UNSET
            ]
        return self._loads[vertex_id]

    def acked(self, checkpoint: CheckpointView) -> dict[str, list[SubtaskCheckpointView]]:
        """Subtasks that acknowledged the checkpoint of the situation, by vertex."""
        if not self._acked:
            self._acked = {
                vertex: [each for each in view.subtasks if each.ack_ms >= 0] for vertex, view in checkpoint.vertices.items()
            }
        return self._acked

    @property
    def takes_checkpoint(self) -> bool:
        """What is explained is a checkpoint, and neither a savepoint nor the last one: barriers of these never overtake."""
        checkpoint = self.situation.checkpoint
        return checkpoint is None or checkpoint.kind is CheckpointKind.CHECKPOINT

    # ---------------------------------------------------------------------------------------------- what is usual

    @property
    def interval_ms(self) -> int | None:
        return self.usual.interval_ms

    def before(self, checkpoint_id: int) -> list[CheckpointPhases]:
        """Completed checkpoints to compare one with: all recent ones but itself; none for a savepoint, which stores everything."""
        explained = self.situation.checkpoint
        return [] if explained is not None and explained.is_savepoint else self.usual.before(checkpoint_id)

    def median(self, checkpoint_id: int, read: Callable[[CheckpointPhases], float]) -> float:
        """-1 with fewer than COMPARED_MIN known values."""
        return median_of_known(self.before(checkpoint_id), read)

    def is_slow(self, checkpoint: CheckpointView, duration_ms: int) -> bool:
        """As `Usual.is_slow`."""
        return self.usual.is_slow(checkpoint, duration_ms)

    def is_chronic(self, duration_ms: int) -> bool:
        """As `Usual.is_chronic`."""
        return self.usual.is_chronic(duration_ms)

    def phases(self, checkpoint: CheckpointView) -> tuple[PhaseView, ...]:
        """The longest time of each phase, beside its median; of a pending checkpoint as far as it has got."""
        longest: dict[Phase, tuple[int, str, int]] = {}
        for vertex, subtasks in self.acked(checkpoint).items():
            for phase, read in _READERS.items() if subtasks else ():
                slowest = max(subtasks, key=read)
                value = read(slowest)
                if value >= 0 and value > longest.get(phase, (-1, "", 0))[0]:
                    longest[phase] = value, vertex, slowest.subtask
        for name, (value, vertex) in self.record.longest.items() if self.record is not None else ():
            if value > longest.get(Phase(name), (-1, "", 0))[0]:
                longest[Phase(name)] = value, vertex, -1
        found = [
            self.phase(checkpoint, phase, value, self.place(vertex, subtask))
            for phase, (value, vertex, subtask) in longest.items()
        ]
        if checkpoint.decide_ms >= 0:
            found.append(self.phase(checkpoint, Phase.DECIDE, checkpoint.decide_ms, None))
        if checkpoint.notify_ms >= 0:
            found.append(self.phase(checkpoint, Phase.NOTIFY, checkpoint.notify_ms, None))
        return tuple(sorted(found, key=lambda view: list(Phase).index(view.phase)))

    def phase(self, checkpoint: CheckpointView, phase: Phase, value_ms: int, place: Place | None) -> PhaseView:
        """A time beside what is usual."""
        median_ms = self.phase_median(checkpoint.checkpoint_id, phase)
        return PhaseView(phase, value_ms, round(median_ms), is_unusual(value_ms, median_ms, self.usual.slack_ms), place)

    def phase_median(self, checkpoint_id: int, phase: Phase) -> float:
        return self.median(checkpoint_id, lambda phases: getattr(phases, f"{phase.value}_ms"))


def median_of(values: Sequence[float]) -> float:
    """0 of none."""
    return statistics.median(values) if values else 0.0
