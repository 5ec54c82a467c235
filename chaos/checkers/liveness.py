"""After the last fault a checkpoint completes and the job ends, within bounds of virtual time (I30, docs/invariants.md).

The bounds are far above the sum of the product's own waits, so that only a job that hangs exceeds them. The world bounds the events
of a run as well."""

from __future__ import annotations

from typing import ClassVar

from holdfast.barriers.messages import AcknowledgeCheckpoint
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger, ResultRecorded
from holdfast.chaos.checkers.observations import Observation, PhaseBegan, Report, Reported, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario

CHECKPOINT_MS_MAX = 120_000
"""From the end of faults to the next completed checkpoint, or the job's result, ms."""
END_MS_MAX = 300_000
"""From the end of faults to the end of a bounded job, ms."""
STEPS_MAX = 600_000
"""Events of a whole run; the world ends a run that reaches it."""


class LivenessChecker(Checker):
    """Measures from the end of faults."""

    invariants: ClassVar[tuple[str, ...]] = ("I30",)
    hears: ClassVar[tuple[type, ...]] = (PhaseBegan, Stored, Reported)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._began_ms: int | None = None
        self._progressed = False
        self._reported = False
        self._acks: dict[int, set[str]] = {}
        """Undecided id -> subtasks that acknowledged it."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case PhaseBegan(phase="liveness"):
                self._began_ms, self._progressed = observation.at_ms, False
            case PhaseBegan():
                self._began_ms = None
            case Reported(item=AcknowledgeCheckpoint() as ack):
                self._acks.setdefault(ack.checkpoint_id, set()).add(f"{ack.vertex[:6]}/{ack.subtask}")
            case Stored() if observation.added:
                for change in self.ledger.changes(observation):
                    if isinstance(change, Decided):
                        self._acks.pop(change.checkpoint_id, None)
                    if isinstance(change, ResultRecorded) or (isinstance(change, Decided) and change.snapshot is not None):
                        self._progressed = True
            case _:
                pass

    def look(self) -> None:
        if self._began_ms is None or self._reported:
            return
        problem = self.overdue(self.world.now_ms)
        if problem is not None:
            self._reported = True
            self.report("I30", problem)

    def overdue(self, now_ms: int) -> str | None:
        """What should have happened by now; None while there is time."""
        if self._began_ms is None:
            return None
        waited_ms = now_ms - self._began_ms
        if waited_ms > CHECKPOINT_MS_MAX and not self._progressed and self.world.jobs_live:
            return f"no checkpoint completed within {waited_ms} ms after the last fault: {self.progress()}"
        if waited_ms > END_MS_MAX and self.scenario.bounded and self.world.jobs_live:
            return f"the job has not ended within {waited_ms} ms after the last fault: {self.progress()}"
        return None

    def progress(self) -> str:
        """Progress of the job for a message: its numbers, and the missing acknowledgements of each undecided id."""
        ledger = self.ledger
        undecided = sorted(number for number in ledger.claims if number not in ledger.completed and number not in ledger.aborted)
        waits = [f"{number} (acknowledged by {', '.join(sorted(self._acks.get(number, ()))) or 'none'})" for number in undecided]
        return (
            f"epoch {ledger.newest_epoch}, attempt {ledger.newest_attempt}, newest completed {ledger.released}, "
            f"undecided {'; '.join(waits) or 'none'}, {len(self.world.coordinators())} coordinators, "
            f"{len(self.world.workers())} workers"
        )
