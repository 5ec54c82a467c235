"""State in a completed checkpoint against the input in front of its cut: I6, I7, I8, and of I26 that no key has two owners
(docs/invariants.md).

State is right if it belongs to exactly the records before the positions in the same checkpoint, whatever was restored, repeated or
rescaled on the way. Checked once, at completion: the first checkpoint of each attempt, every savepoint, each that ends the job, and
a sample of the rest, since an error in state remains in later checkpoints.
I9 (no output between a barrier and the end of the synchronous snapshot) has no observation of its own: a record in between would be
counted twice (I2) or missing here (I7)."""

from __future__ import annotations

from typing import ClassVar

from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.drains import Drains
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import Observation, Report, Stored, WorldView
from holdfast.chaos.checkers.oracle import compare_states
from holdfast.chaos.checkers.state_reading import SnapshotView, StateDoubledError
from holdfast.chaos.workloads.scenario import Cleanup, CutExpectation, Drained, Scenario, source_uids
from holdfast.statebackends.errors import HoldfastError

CHECK_EVERY = 10
"""Periodic checkpoints of an attempt, by id, of which one is checked."""


class CutChecker(Checker):
    """Compares completed checkpoints with the scenario's expectation for their positions."""

    invariants: ClassVar[tuple[str, ...]] = ("I6", "I7", "I8", "I9", "I11", "I26", "I28", "I35")
    hears: ClassVar[tuple[type, ...]] = (Stored,)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._attempt = 0
        """Attempt of the last completed checkpoint."""
        self._drains = Drains(ledger, source_uids(scenario))

    def observe(self, observation: Observation) -> None:
        if not self.scenario.cuts or not isinstance(observation, Stored) or not observation.added:
            return
        for change in self.ledger.changes(observation):
            # A drain ends event time in front of its snapshot: what fires then does not depend on positions.
            if isinstance(change, Decided) and change.snapshot is not None:
                if change.snapshot.claim.drain:
                    self._drains.note(change.snapshot)
                else:
                    self._look_at(change.snapshot)

    def _look_at(self, snapshot: Snapshot) -> None:
        claim = snapshot.claim
        first, self._attempt = claim.attempt != self._attempt, claim.attempt
        if first or claim.kind is not CheckpointKind.CHECKPOINT or claim.checkpoint_id % CHECK_EVERY == 0:
            self._check(snapshot)

    def _check(self, snapshot: Snapshot) -> None:
        where = f"{snapshot.kind} {snapshot.checkpoint_id}"
        seen = SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
        drained = self._drains.before(snapshot.checkpoint_id)
        for cut in self.scenario.cuts:
            try:
                self._compare(where, seen, cut, drained)
            except StateDoubledError as error:
                self.report("I26", f"{where}: {error}")
            except HoldfastError as error:
                self.report("I11", f"{where}: {error}")

    def _compare(self, where: str, seen: SnapshotView, cut: CutExpectation, drained: Drained) -> None:
        positions = seen.positions(cut.source_uids)
        try:
            again = drained and cut.after_drains
            expected = again(positions, drained) if again else cut.expected(positions)
        except ValueError as error:
            self.report("I8", f"{where}: the positions of its sources make no sense: {error}")
            return
        problem = compare_states(expected, seen.keyed_state(cut.operator_uid, expected))
        if problem is not None and not seen.metadata.in_flight:  # what is in flight is in no state
            self.report("I7", f"{where}: operator {cut.operator_uid}: {problem}")
        if cut.cleanup is not None:
            self._check_cleanup(where, seen, cut.operator_uid, cut.cleanup)

    def _check_cleanup(self, where: str, seen: SnapshotView, uid: str, cleanup: Cleanup) -> None:
        entries = [entry for subtask in seen.list_entries(uid, "watermarks") for entry in subtask]
        if entries:
            watermark_ms = min(int.from_bytes(entry, "big", signed=True) for entry in entries)
            problem = cleanup.problem(seen.keyed_state(uid, cleanup.states), watermark_ms)
            if problem is not None:
                self.report("I35", f"{where}: operator {uid}: {problem}")
