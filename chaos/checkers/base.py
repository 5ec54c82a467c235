"""The contract of a checker: observations in, violations out. It reads the world and changes nothing in it."""

from __future__ import annotations

from typing import Any, ClassVar

from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.observations import Observation, Report, WorldView
from holdfast.chaos.workloads.scenario import Scenario


class Checker:
    """One checker of one run."""

    invariants: ClassVar[tuple[str, ...]] = ()
    """Invariants that it can report, such as `I11`."""
    hears: ClassVar[tuple[type, ...]] = ()
    """Types of observations that it receives."""

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        """`ledger`: the job's records so far, shared by all checkers of a run."""
        self.world = world
        self.scenario = scenario
        self.report = report
        self.ledger = ledger
        self.cause_ms: int | None = None
        """Virtual ms at which the cause of what it reports began; None: at the report itself."""

    def observe(self, observation: Observation) -> None:
        """Take an observation of a type in `hears`, at the moment at which it happens."""

    def look(self) -> None:
        """Compare lengths and waits with their bounds; called every 100 ms of virtual time."""

    def at_end(self) -> None:
        """Check what is left: the job has ended, faults are off, every process is at rest."""

    def master_of(self, epoch: int) -> Any:
        """The job master of a leader; None if its process is dead."""
        for host in self.world.coordinators():
            for service in host.services:
                if service.epoch == epoch:
                    return service._master
        return None
