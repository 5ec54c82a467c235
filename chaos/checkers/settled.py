"""A checkpoint with records in flight further up than the last edge to a state: what its state is once they have settled (I7).

While they are in flight, how far each has come is the product's own account. So a copy of all that was stored when the checkpoint
completed is the beginning of another world: its sources give nothing, nothing fails, and the first checkpoint behind all that was
in flight has the state of any aligned checkpoint at these positions. This module says which checkpoint of a run, and compares; the
other world is chaos/cluster/settling.py.

Nothing depends on the end of the input: a source that is held says no watermark, so event time is as far as the watermarks in
flight bring it, and no window or timer fires that could not have fired at the cut. The clock goes on from the cut."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.barriers.jobgraph import JobGraph, JobVertex
from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.drains import Drains
from holdfast.chaos.checkers.ledger import JobLedger, Snapshot
from holdfast.chaos.checkers.observations import WorldView
from holdfast.chaos.checkers.oracle import compare_states
from holdfast.chaos.checkers.state_reading import SnapshotView, StateDoubledError
from holdfast.chaos.workloads.scenario import CutExpectation, Drained, Positions, Scenario
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata

Problem = tuple[str, str]
"""Invariant and message."""


def heads_above(graph: JobGraph, vertex: JobVertex) -> set[str]:
    """Uids of the first operators of all vertices whose records come to this one."""
    found: set[str] = set()
    waiting = [vertex.vertex_id]
    while waiting:
        for edge in graph.inputs(waiting.pop()):
            head = graph.vertex(edge.source).operators[0].uid
            if head not in found:
                found.add(head)
                waiting.append(edge.source)
    return found


def vertex_of(graph: JobGraph, uid: str) -> JobVertex:
    return next(each for each in graph.vertices if any(operator.uid == uid for operator in each.operators))


def must_settle(metadata: SnapshotMetadata, graph: JobGraph, cut: CutExpectation, drained: Drained) -> bool:
    """Whether rows are in flight to the operator that can't be taken off what its state should hold."""
    targets = {each.target for each in metadata.in_flight if each.rows}
    vertex = vertex_of(graph, cut.operator_uid)
    if targets & heads_above(graph, vertex):
        return True
    head = vertex.operators[0].uid
    is_told = cut.beside is not None and head == cut.operator_uid and not (drained and cut.after_drains is not None)
    return head in targets and not is_told


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A completed checkpoint, and the world at that moment."""

    snapshot: Snapshot
    graph: JobGraph
    cuts: tuple[tuple[CutExpectation, Positions], ...]
    """Those whose states it does not show, and the positions of their sources."""
    drained: Drained
    stores: Any
    """As of WorldView.fork_stores."""
    now_ms: int

    @property
    def where(self) -> str:
        return f"checkpoint {self.snapshot.checkpoint_id}, settled"

    def problem(self, settled: Snapshot) -> Problem | None:
        """What is wrong with the state behind all that was in flight."""
        left = sum(each.rows for each in settled.metadata.in_flight)
        if left:
            return "I7", f"{self.where}: it does not settle: {left} rows are in flight in checkpoint {settled.checkpoint_id}, too"
        seen = SnapshotView(settled.view, settled.folder, settled.metadata)
        try:
            problems = (self._compare(seen, cut, positions) for cut, positions in self.cuts)
            return next((problem for problem in problems if problem is not None), None)
        except StateDoubledError as error:
            return "I26", f"{self.where}: {error}"
        except HoldfastError as error:
            return "I11", f"{self.where}: {error}"

    def _compare(self, seen: SnapshotView, cut: CutExpectation, positions: Positions) -> Problem | None:
        again = cut.after_drains if self.drained else None
        try:
            expected = again(positions, self.drained) if again else cut.expected(positions)
        except ValueError as error:
            return "I8", f"{self.where}: the positions of its sources make no sense: {error}"
        if _sorted(seen.positions(cut.source_uids)) != _sorted(positions):
            return "I8", f"{self.where}: its sources have other positions than those that they were restored at"
        found = compare_states(expected, seen.keyed_state(cut.operator_uid, expected))
        return None if found is None else ("I7", f"{self.where}: operator {cut.operator_uid}: {found}")


class Choice:
    """Chooses one such checkpoint of a run: each is as likely as the others, whatever their number."""

    def __init__(self, world: WorldView, scenario: Scenario, ledger: JobLedger, drains: Drains) -> None:
        self._world = world
        self._scenario = scenario
        self._ledger = ledger
        self._drains = drains
        self._considered = 0
        self._stateless: dict[str, bool] = {}
        """Uid of an operator -> whether a cut says nothing of its state."""
        self.chosen: Unsettled | None = None

    def consider(self, snapshot: Snapshot) -> None:
        """Take a completed checkpoint at the moment of its completion."""
        if not snapshot.metadata.in_flight or not self._may_settle(snapshot):
            return
        graph = msgspec.convert(snapshot.metadata.graph, JobGraph)
        drained = self._drains.before(snapshot.checkpoint_id)
        cuts = tuple(
            cut
            for cut in self._scenario.cuts
            if must_settle(snapshot.metadata, graph, cut, drained) and not self._is_stateless(snapshot, cut)
        )
        if not cuts:
            return
        self._considered += 1
        now_ms = self._world.now_ms
        if random.Random(f"{now_ms} {snapshot.checkpoint_id}").random() * self._considered < 1:  # no stream: those are the run's
            seen = SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
            with suppress(HoldfastError):  # damaged: reported elsewhere
                placed = tuple((cut, seen.positions(cut.source_uids)) for cut in cuts)
                self.chosen = Unsettled(snapshot, graph, placed, drained, self._world.fork_stores(), now_ms)

    def _may_settle(self, snapshot: Snapshot) -> bool:
        """Not where what is outside of the job's stores would change with it, nor behind a newer one: the job goes on from that."""
        has_outside = self._scenario.outside is not None or bool(self._scenario.splits)
        is_newest = snapshot.checkpoint_id == max(self._ledger.completed)
        return not has_outside and is_newest and snapshot.kind is CheckpointKind.CHECKPOINT

    def _is_stateless(self, snapshot: Snapshot, cut: CutExpectation) -> bool:
        known = self._stateless.get(cut.operator_uid)
        if known is None:
            try:
                seen = SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
                known = not cut.expected(seen.positions(cut.source_uids))
            except (HoldfastError, ValueError):
                return True  # damaged: reported elsewhere
            self._stateless[cut.operator_uid] = known
        return known


def _sorted(positions: Positions) -> dict[str, Iterable[bytes]]:
    return {uid: sorted(entries) for uid, entries in positions.items()}
