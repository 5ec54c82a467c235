"""State in a completed checkpoint against the input in front of its cut: I6, I7, I8, and of I26 that no key has two owners
(docs/invariants.md).

State is right if it belongs to exactly the records before the positions in the same checkpoint, whatever was restored, repeated or
rescaled on the way. Checked once, at completion: the first checkpoint of each attempt, every savepoint, each that ends the job, and
a sample of the rest, since an error in state remains in later checkpoints.
I9 (no output between a barrier and the end of the synchronous snapshot) has no observation of its own: a record in between would be
counted twice (I2) or missing here (I7).
A record in flight is in front of the cut and in no state. Where it is on the last edge to an operator it is taken off what its
state should hold. Where it lies further up, or nothing says what the state is without it, the state of one such checkpoint of a
run is compared at its end, once a copy has settled (settled.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.drains import Drains
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import Observation, Report, SnapshotBegan, Stored, WorldView
from holdfast.chaos.checkers.oracle import compare_states
from holdfast.chaos.checkers.settled import Choice, Unsettled, must_settle, vertex_of
from holdfast.chaos.checkers.state_reading import SnapshotView, StateDoubledError
from holdfast.chaos.workloads.scenario import Cleanup, CutExpectation, CutStates, Drained, Positions, Scenario, source_uids
from holdfast.statebackends.errors import HoldfastError

CHECK_EVERY = 10
"""Periodic checkpoints of an attempt, by id, of which one is checked."""


class CutChecker(Checker):
    """Compares completed checkpoints with the scenario's expectation for their positions."""

    invariants: ClassVar[tuple[str, ...]] = ("I6", "I7", "I8", "I9", "I11", "I26", "I28", "I35")
    hears: ClassVar[tuple[type, ...]] = (Stored, SnapshotBegan)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._attempt = 0
        """Attempt of the last completed checkpoint."""
        self._in_firings: set[int] = set()
        """Ids of which a subtask took its part between two slices of a firing: what that one is to clean up is still there."""
        self._drains = Drains(ledger, source_uids(scenario))
        self._choice = Choice(world, scenario, ledger, self._drains)

    @property
    def unsettled(self) -> Unsettled | None:
        """The checkpoint that is to settle at the end of the run, if there is one."""
        return self._choice.chosen

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, SnapshotBegan) and observation.firing:
            self._in_firings.add(observation.checkpoint_id)
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
        self._choice.consider(snapshot)

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
        wanted = self._without_in_flight(where, seen, cut, positions, drained, expected) if seen.metadata.in_flight else expected
        problem = None if wanted is None else compare_states(wanted, seen.keyed_state(cut.operator_uid, wanted))
        if problem is not None:
            self.report("I7", f"{where}: operator {cut.operator_uid}: {problem}")
        if cut.cleanup is not None and seen.metadata.checkpoint_id not in self._in_firings:
            self._check_cleanup(where, seen, cut.operator_uid, cut.cleanup)

    def _without_in_flight(
        self, where: str, seen: SnapshotView, cut: CutExpectation, positions: Positions, drained: Drained, expected: CutStates
    ) -> CutStates | None:
        """States where rows are in flight on the last edges to the operator alone; None where it must settle."""
        graph = msgspec.convert(seen.metadata.graph, JobGraph)
        if must_settle(seen.metadata, graph, cut, drained):
            return None
        head = vertex_of(graph, cut.operator_uid).operators[0].uid
        rows: dict[int, list[Mapping[str, Any]]] = {}
        for channel in seen.in_flight():
            if channel.rows and channel.edge.target == head:
                rows.setdefault(channel.edge.input, []).extend(channel.rows)
        if not rows or cut.beside is None:
            return expected
        try:
            return cut.beside(positions, rows)
        except ValueError as error:
            self.report("I7", f"{where}: operator {cut.operator_uid}: {error}")
            return None

    def _check_cleanup(self, where: str, seen: SnapshotView, uid: str, cleanup: Cleanup) -> None:
        entries = [entry for subtask in seen.list_entries(uid, "watermarks") for entry in subtask]
        if entries:
            watermark_ms = min(int.from_bytes(entry, "big", signed=True) for entry in entries)
            problem = cleanup.problem(seen.keyed_state(uid, cleanup.states), watermark_ms)
            if problem is not None:
                self.report("I35", f"{where}: operator {uid}: {problem}")
