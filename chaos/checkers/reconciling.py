"""The time that a new leader waits for workers that still run (of I16 and I30, docs/invariants.md).

A worker can return only to a coordinator that listens and leads its job. No attempt may be given up for a missing slot before both
have lasted `reconcile_timeout_ms`: all its workers may be alive, and looking for their leader."""

from __future__ import annotations

from typing import ClassVar

from holdfast.barriers.jobgraph import JobConfig
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import AttemptRecorded, JobLedger
from holdfast.chaos.checkers.observations import Led, Listened, Observation, Report, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.records import AttemptRecord
from holdfast.coordinator.jobmaster.lifecycle import NOT_BACK


class ReconcilingChecker(Checker):
    """Checks each attempt that follows one whose workers did not return."""

    invariants: ClassVar[tuple[str, ...]] = ("I16",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Led, Listened)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._listening: dict[str, int] = {}
        """Coordinator -> since when it is reachable, ms."""
        self._led: dict[int, tuple[str, int, JobConfig]] = {}
        """Epoch -> (process, since when it leads in ms, job configuration)."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored(added=()):
                pass
            case Stored():
                for change in self.ledger.changes(observation):
                    if isinstance(change, AttemptRecorded):
                        self._began(change.record, observation.at_ms)
            case Led(epoch=epoch, actor=actor, at_ms=at_ms, graph=graph):
                self._led[epoch] = (actor, at_ms, graph.config)
            case Listened(actor=actor, at_ms=at_ms):
                self._listening[actor] = at_ms
            case _:
                pass

    def _began(self, record: AttemptRecord, at_ms: int) -> None:
        """The previous attempt was given up some time before the record of this one."""
        master = self.master_of(record.epoch)
        failure = master.lifecycle.exceptions.newest if master is not None else None
        if failure is None or NOT_BACK not in failure.error or record.epoch not in self._led:
            return
        actor, led_ms, config = self._led[record.epoch]
        listening_ms = self._listening.get(actor)
        story = f"attempt {record.attempt} follows one whose workers did not come back"
        if listening_ms is None:
            self.report("I16", f"{story}; {actor} does not even listen yet")
        elif at_ms - max(led_ms, listening_ms) < config.reconcile_timeout_ms:
            waited_ms = at_ms - max(led_ms, listening_ms)
            self.report("I16", f"{story} within {waited_ms} ms; they have {config.reconcile_timeout_ms} ms")
