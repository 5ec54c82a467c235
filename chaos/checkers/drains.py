"""Where a job was drained: event time ended there, and began anew with whoever went on from it."""

from __future__ import annotations

import math

from holdfast.chaos.checkers.descent import Descent
from holdfast.chaos.checkers.ledger import JobLedger, Snapshot
from holdfast.chaos.checkers.state_reading import SnapshotView
from holdfast.chaos.workloads.scenario import Drained, Positions
from holdfast.statebackends.errors import HoldfastError


class Drains:
    """The drained snapshots of the line that the newest submission goes on with."""

    def __init__(self, ledger: JobLedger, sources: tuple[str, ...]) -> None:
        """`sources`: uids of those whose positions are wanted."""
        self._ledger = ledger
        self._sources = sources
        self._descent = Descent(ledger)
        self._positions: dict[int, Positions] = {}

    def note(self, snapshot: Snapshot) -> None:
        """A snapshot is complete: its positions are read while it is there."""
        if not snapshot.claim.drain or not self._sources:
            return
        try:
            view = SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
            self._positions[snapshot.checkpoint_id] = view.positions(self._sources)
        except HoldfastError:
            pass  # what is wrong with its files is reported elsewhere

    def before(self, number: float = math.inf) -> Drained:
        """Positions of each drain in front of an id, in their order."""
        if not self._positions:
            return ()
        self._descent.follow()
        known = self._ledger.completed
        return tuple(
            self._positions[drain]
            for drain in sorted(self._positions)
            if drain < number and drain in known and self._descent.holds(drain)
        )
