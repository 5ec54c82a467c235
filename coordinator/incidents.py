"""Failures of a job: what is shown of them, and whether the restart strategy allows another attempt. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from barriers.jobgraph import RestartStrategy
from coordinator.views import ExceptionView

EXCEPTIONS_MAX = 50
"""Newest failures kept for users."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Why an attempt failed."""

    error: str
    """`ErrorClass: message`."""
    traceback: str = ""
    vertex: str = ""
    subtask: int = -1
    slot: int = -1


class Incidents:
    """Counts the failovers of one submission and remembers the newest failures."""

    def __init__(self, strategy: RestartStrategy, restarts: int) -> None:
        self._strategy = strategy
        self.restarts = restarts
        self._exceptions: deque[ExceptionView] = deque(maxlen=EXCEPTIONS_MAX)
        self._merged = False
        self._fruitless = 0
        self.newest: Incident | None = None

    def record(self, incident: Incident, attempt: int, wall_ms: int) -> None:
        """Show a failure."""
        self.newest = incident
        self._exceptions.appendleft(
            ExceptionView(
                error=incident.error,
                traceback=incident.traceback,
                timestamp_ms=wall_ms,
                vertex=incident.vertex,
                subtask=incident.subtask,
                worker=f"slot-{incident.slot}" if incident.slot >= 0 else "",
                attempt=attempt,
            )
        )

    def restart_delay_ms(self, *, same_incident: bool) -> int | None:
        """Count a failover; the delay before the next attempt, or None if the strategy allows none.

        A process that died before it ever reported the attempt is the old failure seen again: it is not counted, once."""
        if same_incident and not self._merged:
            self._merged = True
            return 0
        self.restarts += 1
        if self._strategy.kind == "none" or self.restarts > self._strategy.attempts_max:
            return None
        self._fruitless += 1
        return 0 if self._strategy.immediate_first and self._fruitless == 1 else self._strategy.delay_ms

    def progressed(self) -> None:
        """A checkpoint completed: what fails from now on does not fail in the same place for ever."""
        self._fruitless = 0

    def recovered(self) -> None:
        """Every task runs: the next failure is a new one."""
        self._merged = False

    def views(self) -> tuple[ExceptionView, ...]:
        """Newest first."""
        return tuple(self._exceptions)
