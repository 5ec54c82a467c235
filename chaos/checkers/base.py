"""What a checker is: it hears observations, looks at the world from outside, and reports what must not be."""

from __future__ import annotations

from typing import Any, ClassVar

from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.observations import Observation, Report, WorldView
from holdfast.chaos.workloads.scenario import Scenario


class Checker:
    """One checker of one run. It must not change anything in the world."""

    invariants: ClassVar[tuple[str, ...]] = ()
    """What it reports: I1 ... I30."""
    hears: ClassVar[tuple[type, ...]] = ()
    """Types of observations that it wants."""

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        """`ledger`: the job's records so far, one for all checkers of a run."""
        self.world = world
        self.scenario = scenario
        self.report = report
        self.ledger = ledger
        self.cause_ms: int | None = None
        """When what it reports began, where that is known and long ago."""

    def observe(self, observation: Observation) -> None:
        """A fact of a type in `hears`, right when it happened."""

    def look(self) -> None:
        """Called now and then (every 100 ms of virtual time): bounds of what lives in memory."""

    def at_end(self) -> None:
        """The job has ended, faults are over, every process has done its work."""

    def master_of(self, epoch: int) -> Any:
        """The job master of a leader, if its process lives."""
        for host in self.world.coordinators():
            for service in host.services:
                if service.epoch == epoch:
                    return service._master
        return None
