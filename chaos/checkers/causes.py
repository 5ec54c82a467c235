"""Checkpoints and savepoints that fail without a cause (of I30, docs/invariants.md).

The stored reason names a worker or the leader; whether anything failed there is read off the stores. A checkpoint that completes
first, or a job that ends, is no reason to abort a savepoint."""

from __future__ import annotations

from typing import Any, ClassVar

from holdfast.barriers.messages import DeclineCheckpoint, FailureReason
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Claimed, Decided, JobLedger
from holdfast.chaos.checkers.observations import HookFailing, Observation, Report, Reported, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.records import AbortRecord
from holdfast.statebackends.errors import StorageUnavailableError

_OF_LEADER = (FailureReason.IO_EXCEPTION, FailureReason.FINALIZE_FAILURE, FailureReason.TRIGGER_FAILURE)
"""Reasons of a leader whose calls of the store fail, or have an unclear answer."""


class CausesChecker(Checker):
    """Judges each aborted id by the failures since its claim."""

    invariants: ClassVar[tuple[str, ...]] = ("I30",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Reported, HookFailing)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._claimed_ms: dict[int, int] = {}
        self._last_claimed_ms: dict[int, int] = {}
        """Epoch -> when its leader claimed its newest id, ms. Until then the next id has not begun."""
        self._not_begun_ms: dict[int, int] = {}
        """Id -> last time at which its leader had certainly not begun it, ms."""
        self._trouble_ms: dict[str, int] = {}
        """Process -> last time at which a call of the store failed, or was answered as failed, ms."""
        self._declines: dict[tuple[int, int, FailureReason], dict[str, str]] = {}
        """(attempt, id, reason) -> process and text of the decline."""
        self._hooked: set[tuple[str, int]] = set()
        """Coordinator processes, and ids whose master hooks failed there."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored():
                told_wrongly = observation.fate and not observation.on_wire  # on the wire the S3 shell finds out
                if told_wrongly or isinstance(observation.result, StorageUnavailableError):
                    self._trouble_ms[observation.actor] = observation.at_ms
                if observation.added:
                    self._stored(observation)
            case Reported(item=DeclineCheckpoint() as decline, actor=actor):
                key = (decline.attempt, decline.checkpoint_id, decline.reason)
                self._declines.setdefault(key, {})[actor] = decline.message
            case HookFailing():
                self._hooked.add((observation.actor, observation.checkpoint_id))
            case _:
                pass

    def _stored(self, fact: Stored) -> None:
        for change in self.ledger.changes(fact):
            if isinstance(change, Claimed):
                self._claimed(change, fact)
            elif isinstance(change, Decided) and change.claim is not None and change.snapshot is None:
                record = self.ledger.abort_record(change.checkpoint_id)
                if record is not None and change.checkpoint_id in self.ledger.aborted:
                    self._aborted(change.claim, record, fact.actor)

    def _aborted(self, claim: Any, record: AbortRecord, leader: str) -> None:
        number, kind, reason = claim.checkpoint_id, claim.kind.value, record.reason
        declines = self._declines.get((claim.attempt, number, reason), {})
        if reason is FailureReason.SUBSUMED and claim.kind.is_savepoint and not declines:
            self.report("I30", f"{kind} {number} was given up because of another one: {record.message}")
        elif reason is FailureReason.END_OF_INPUT and claim.kind.is_savepoint and not declines:
            self.report("I30", f"{kind} {number} was given up because the job ended: {record.message}")
        elif reason is FailureReason.ASYNC_EXCEPTION:
            well = {actor: why for actor, why in declines.items() if not self._is_explained(actor, number)}
            if well:
                actor, why = next(iter(well.items()))
                self.report("I30", f"{kind} {number} failed in {actor}, of whose calls none did: {why}")
        elif reason in _OF_LEADER and not self._is_explained(leader, number) and record.epoch == self.ledger.newest_epoch:
            self.report(
                "I30", f"{kind} {number} is aborted as {reason.value} by {leader}, of whose calls none failed: {record.message}"
            )
        elif reason is FailureReason.EXPIRED:
            self._expired(number, kind, record.epoch)

    def _is_explained(self, actor: str, number: int) -> bool:
        return self._trouble_ms.get(actor, -1) >= self._claimed_ms.get(number, 0) or (actor, number) in self._hooked

    def _claimed(self, change: Claimed, fact: Stored) -> None:
        number, epoch = change.checkpoint_id, change.record.epoch
        if number in self._claimed_ms:
            return
        self._claimed_ms[number] = fact.at_ms
        if fact.fate != "late":  # its leader may have continued long before
            if epoch in self._last_claimed_ms:
                self._not_begun_ms[number] = self._last_claimed_ms[epoch]
            self._last_claimed_ms[epoch] = fact.at_ms

    def _expired(self, number: int, kind: str, epoch: int) -> None:
        """The timeout was over. It begins before the claim is stored, and after the claim of the leader's previous id; the exact
        time is the leader's, which is believed only where it proves the leader wrong."""
        begun_ms = [self._not_begun_ms[number]] if number in self._not_begun_ms else []
        limits_ms = []
        for host in self.world.coordinators():
            for service in (each for each in host.services if each.epoch == epoch):
                setup = service._master.setup
                configs = self.ledger.configs_of(setup.submission, setup.graph.config).values()  # a user may have changed it
                limits_ms.append(min(each.checkpoint_timeout_ms for each in configs))
                begun_ms += [each.started_ms for each in service._master.coordinator.pending if each.checkpoint_id == number]
        lasted_ms = self.world.now_ms - max(begun_ms, default=0)
        if limits_ms and begun_ms and lasted_ms < limits_ms[0]:
            self.report("I30", f"{kind} {number} expired after {lasted_ms} ms or less; it has {limits_ms[0]} ms")
