"""CORE, part of the job master: watermark alignment over workers. Reports of an attempt in, each group's greatest watermark out.

Nothing is said before every subtask of a group has reported, so that a new leader, or a new attempt, holds nobody by half of the
truth. A subtask without a watermark, idle or ended has none that counts. A report that is lost or late is made up for by the next;
what an older attempt reports is not heard. The subtask with the least watermark is always within the bound: nobody hangs."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import INT_MAX, AlignWatermarks, SubtaskKey, SubtaskMetrics
from holdfast.barriers.watermark_alignment import WatermarkAlignment, aligned_operators


class _Group:
    """The subtasks of one group, and the newest watermark that each has reported."""

    def __init__(self, alignment: WatermarkAlignment) -> None:
        self.alignment = alignment
        self.members: set[tuple[str, SubtaskKey]] = set()
        self.reported: dict[tuple[str, SubtaskKey], int | None] = {}

    def maximum_ms(self) -> int | None:
        """The greatest watermark that a source may go on at; None while a report is missing. INT_MAX: no watermark counts."""
        if len(self.reported) < len(self.members):
            return None
        least = min((watermark for watermark in self.reported.values() if watermark is not None), default=INT_MAX)
        return min(INT_MAX, least + self.alignment.max_drift_ms)


class WatermarkGroups:
    """The groups of one job. A job without any has no deadline and says nothing."""

    def __init__(self, graph: JobGraph) -> None:
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}
        self._attempt = 0
        self._said: dict[int, dict[str, int]] = {}
        """Slot -> what its process was told last."""
        self._slots = 0
        self._due_ms: int | None = None
        for uid, (vertex_id, alignment) in aligned_operators(graph).items():
            group = self._groups.setdefault(alignment.group, _Group(alignment))
            parallelism = graph.vertex(vertex_id).parallelism
            group.members |= {(uid, SubtaskKey(vertex_id, subtask)) for subtask in range(parallelism)}
            self._group_of[uid] = alignment.group
            self._slots = max(self._slots, parallelism)
        intervals = [group.alignment.update_interval_ms for group in self._groups.values()]
        self._interval_ms: int | None = min(intervals, default=None)

    def heartbeat_interval_ms(self, configured_ms: int) -> int:
        """Reports travel with heartbeats, which are as frequent as the groups need."""
        return configured_ms if self._interval_ms is None else min(configured_ms, self._interval_ms)

    def next_deadline_ms(self) -> int | None:
        return self._due_ms

    def report(self, attempt: int, metrics: Iterable[SubtaskMetrics], now_ms: int) -> None:
        """A heartbeat of the attempt that runs. What it says of operators that are in no group is ignored."""
        if self._interval_ms is None:
            return
        self._begin(attempt)
        for entry in metrics:
            key = SubtaskKey(entry.vertex, entry.subtask)
            aligned = entry.aligned if isinstance(entry.aligned, dict) else {}
            for uid, watermark_ms in aligned.items():
                group = self._groups.get(self._group_of.get(uid, ""))
                if group is not None and (uid, key) in group.members:
                    group.reported[uid, key] = watermark_ms
        if self._due_ms is None:
            self._due_ms = now_ms

    def forget(self, slot: int) -> None:
        """A process registered in the slot: whatever was said before may not have come to it."""
        self._said.pop(slot, None)

    def advance(self, attempt: int, now_ms: int) -> list[tuple[int, AlignWatermarks]]:
        """(slot, command) for each that is to be told now: at most one in an interval, and only what is new to it."""
        if self._interval_ms is None or self._due_ms is None or now_ms < self._due_ms:
            return []
        self._begin(attempt)
        self._due_ms = None
        maxima = {name: group.maximum_ms() for name, group in self._groups.items()}
        known = {name: maximum for name, maximum in maxima.items() if maximum is not None}
        behind = [slot for slot in range(self._slots) if known and self._said.get(slot) != known]
        if behind:
            self._due_ms = now_ms + self._interval_ms
        for slot in behind:
            self._said[slot] = known
        return [(slot, AlignWatermarks(attempt, dict(known))) for slot in behind]

    def _begin(self, attempt: int) -> None:
        if attempt != self._attempt:
            self._attempt = attempt
            self._said.clear()
            self._due_ms = None
            for group in self._groups.values():
                group.reported.clear()
