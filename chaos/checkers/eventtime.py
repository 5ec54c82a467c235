"""Event time never runs backwards within an attempt (I10), seen at the subtasks themselves.

That a timer fires once over crashes is seen in the output of workloads with timers (I2) and in the timers of each cut (I7)."""

from __future__ import annotations

from typing import ClassVar

from barriers.messages import Heartbeat
from chaos.checkers.base import Checker
from chaos.observations import Observation, Report, Requested, WorldView
from chaos.scenario import Scenario


class EventTimeChecker(Checker):
    """Remembers the last watermark of every subtask of every process."""

    invariants: ClassVar[tuple[str, ...]] = ("I10",)
    hears: ClassVar[tuple[type, ...]] = (Requested,)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report) -> None:
        super().__init__(world, scenario, report)
        self._seen: dict[tuple[str, int, str, int], int] = {}
        """(process, attempt, vertex, subtask) -> watermark, ms, as the subtask has it."""
        self._told: dict[tuple[str, int, str, int], int] = {}
        """The same, as its heartbeats tell it."""

    def observe(self, observation: Observation) -> None:
        if not isinstance(observation, Requested) or not isinstance(observation.body, Heartbeat):
            return
        beat = observation.body
        for metrics in beat.metrics:
            if metrics.watermark_ms is not None:
                key = (observation.actor, beat.attempt, metrics.vertex, metrics.subtask)
                self._rises(self._told, key, metrics.watermark_ms)

    def look(self) -> None:
        for host in self.world.workers():
            for each in host.subtasks():
                subtask = each.subtask
                key = (host.process.name, subtask.attempt, subtask.key.vertex, subtask.key.subtask)
                self._rises(self._seen, key, subtask._intake.watermark_ms)

    def _rises(self, seen: dict[tuple[str, int, str, int], int], key: tuple[str, int, str, int], watermark_ms: int) -> None:
        last = seen.get(key)
        if last is not None and watermark_ms < last:
            actor, attempt, vertex, index = key
            who = f"{vertex} ({index}) of attempt {attempt} in {actor}"
            self.report("I10", f"the watermark of {who} went from {last} to {watermark_ms}")
        seen[key] = watermark_ms
