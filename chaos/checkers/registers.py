"""Registers of ids: each id is claimed once, decided once, by its own leader, and dropped only when it is not needed.

I12 and I13; of I15 what stale leaders and attempts must not decide; of I16 and I25 what must not be dropped (docs/invariants.md). A
stale leader may still write into deleted registers: such a claim or decision is an orphan, which counts only once a process acts on
it. A claim may land late, behind newer ones, so order is judged by triggers."""

from __future__ import annotations

from typing import ClassVar, assert_never

from holdfast.barriers.messages import TriggerCheckpoint
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import (
    AttemptRecorded,
    Change,
    ClaimDropped,
    Claimed,
    Decided,
    DecisionDropped,
    EpochTaken,
    JobLedger,
    PowerLost,
    ResultRecorded,
)
from holdfast.chaos.checkers.observations import Commanded, Led, Lifecycle, Observation, Report, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.records import ClaimRecord
from holdfast.statebackends.storage.port import PutIfAbsent


class RegisterChecker(Checker):
    """Checks every change of a register as it happens."""

    invariants: ClassVar[tuple[str, ...]] = ("I12", "I13", "I15", "I16", "I25")
    hears: ClassVar[tuple[type, ...]] = (Stored, Commanded, Led, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._led_epoch = 0
        """Highest epoch whose leader has settled the registers of older ones."""
        self._triggered: dict[int, int] = {}
        """Id -> epoch that first triggered it."""
        self._newest_trigger: dict[int, int] = {}
        """Epoch -> highest id that it triggered."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored() | Lifecycle():
                if isinstance(observation, Stored) and not (observation.added or observation.removed):
                    self._put(observation)
                    return
                for change in self.ledger.changes(observation):
                    self._judge(change)
            case Led(epoch=epoch):
                self._led_epoch = max(self._led_epoch, epoch)
                if epoch == self.ledger.newest_epoch:
                    self._check_settled(epoch)
            case Commanded(command=TriggerCheckpoint() as trigger, epoch=epoch):
                self._trigger(trigger, epoch)
            case _:
                pass

    def _put(self, fact: Stored) -> None:
        """A process whose create is answered as its own did create the record."""
        if fact.result is True and isinstance(fact.operation, PutIfAbsent):
            self.report("I13", f"{fact.actor} created {fact.operation.path}, which existed: its content is lost")

    def _judge(self, change: Change) -> None:
        match change:
            case Claimed():
                self._claimed(change)
            case Decided():
                self._decided(change)
            case ClaimDropped():
                self._dropped(change)
            case DecisionDropped():
                if change.claim is not None and self._is_own(change.checkpoint_id, change.claim):
                    self.report("I13", f"the decision on checkpoint {change.checkpoint_id} was deleted while the id is claimed")
            case EpochTaken() | AttemptRecorded() | ResultRecorded() | PowerLost():
                pass
            case _:
                assert_never(change)

    def _is_own(self, number: int, claim: ClaimRecord) -> bool:
        """Whether this is the id's first claim, and not one that a stale leader wrote into a deleted register."""
        return self.ledger.first_claims.get(number) == claim

    # --------------------------------------------------------------------------------------------------------- claiming

    def _claimed(self, change: Claimed) -> None:
        number, record = change.checkpoint_id, change.record
        if record.checkpoint_id != number:
            self.report("I12", f"the claim of checkpoint {number} is for {record.checkpoint_id}")
        stale = record.epoch < self.ledger.newest_epoch
        if change.before is not None and change.before != record and not stale:
            self.report(
                "I12",
                f"checkpoint {number} is claimed again, by epoch {record.epoch}; epoch {change.before.epoch} had claimed it before",
            )

    def _trigger(self, trigger: TriggerCheckpoint, epoch: int) -> None:
        """An id is durable before its first trigger, and higher than all ids triggered by older leaders.

        Triggers of one leader may be seen out of order: a command stream that was away delivers late."""
        number = trigger.checkpoint_id
        if self._triggered.get(number) == epoch:
            return
        first = self.ledger.first_claims.get(number)
        if first is None or (first.epoch, first.attempt, first.kind) != (epoch, trigger.attempt, trigger.kind):
            self.report("I12", f"epoch {epoch} triggers checkpoint {number} of attempt {trigger.attempt}; its claim is {first}")
        if epoch == self.ledger.newest_epoch:
            highest = max((found for other, found in self._newest_trigger.items() if other < epoch), default=0)
            if number <= highest:
                self.report("I12", f"epoch {epoch} triggers checkpoint {number}; an older one had triggered {highest}")
        self._triggered[number] = epoch
        self._newest_trigger[epoch] = max(self._newest_trigger.get(epoch, 0), number)

    # --------------------------------------------------------------------------------------------------------- deciding

    def _check_settled(self, epoch: int) -> None:
        """Before a leader acts, every id that older leaders claimed is decided."""
        for number, claim in sorted(self.ledger.claims.items()):
            decided = number in self.ledger.completed or number in self.ledger.aborted
            if claim.epoch < epoch and not decided and self._is_own(number, claim):
                self.report("I13", f"epoch {epoch} leads, and checkpoint {number}, which epoch {claim.epoch} claimed, is undecided")

    def _decided(self, change: Decided) -> None:
        number, snapshot = change.checkpoint_id, change.snapshot
        if snapshot is None or change.claim is None:
            return
        if number in self.ledger.aborted:
            self.report("I13", f"checkpoint {number} completed after it was aborted")
        claim, metadata = change.claim, snapshot.metadata
        if metadata.checkpoint_id != number:
            self.report("I13", f"the snapshot of checkpoint {number} says that it is {metadata.checkpoint_id}")
        if (metadata.epoch, metadata.attempt) != (claim.epoch, claim.attempt):
            self.report(
                "I15",
                f"checkpoint {number} was claimed by epoch {claim.epoch} for attempt {claim.attempt} "
                f"and completed by epoch {metadata.epoch} with attempt {metadata.attempt}",
            )
        if metadata.epoch < self._led_epoch:
            self.report("I15", f"epoch {metadata.epoch} completed checkpoint {number} while epoch {self._led_epoch} leads")
        newer = [each.attempt for each in self.ledger.attempts.values() if each.epoch >= metadata.epoch]
        if max(newer, default=0) > metadata.attempt:
            self.report("I15", f"checkpoint {number} of attempt {metadata.attempt} completed after attempt {max(newer)} began")

    # --------------------------------------------------------------------------------------------------------- dropping

    def _dropped(self, change: ClaimDropped) -> None:
        number, claim, snapshot = change.checkpoint_id, change.claim, change.snapshot
        if not self._is_own(number, claim):
            return
        if snapshot is None:
            if number not in self.ledger.aborted and claim.epoch == self.ledger.newest_epoch:
                self.report("I13", f"checkpoint {number} was dropped before it was decided")
            return
        if snapshot.kind.is_savepoint:
            self.report("I25", f"savepoint {number} was dropped: it belongs to its user")
            return
        ledger = self.ledger
        points = [other for other, each in ledger.completed.items() if each.is_recovery_point and ledger.stands(other)]
        results = [result for submission, result in ledger.results.items() if submission >= claim.submission]
        if max(points, default=0) <= number and all(result.state == "FAILED" for result in results):
            self.report("I16", f"checkpoint {number} was dropped, and nothing newer is there to recover from")
