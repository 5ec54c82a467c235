"""The snapshots at which a job was drained: event time ended there, and began again with the submission restored from it."""

from __future__ import annotations

import math

from holdfast.chaos.checkers.descent import Descent
from holdfast.chaos.checkers.ledger import JobLedger, Snapshot
from holdfast.chaos.checkers.state_reading import SnapshotView
from holdfast.chaos.workloads.scenario import Drained, Positions
from holdfast.statebackends.errors import HoldfastError


class Drains:
    """Drained snapshots on the line of the newest submission."""

    def __init__(self, ledger: JobLedger, sources: tuple[str, ...]) -> None:
        """`sources`: uids of the sources whose positions are kept."""
        self._ledger = ledger
        self._sources = sources
        self._descent = Descent(ledger)
        self._positions: dict[int, Positions] = {}

    def note(self, snapshot: Snapshot) -> None:
        """Take a completed snapshot, and read its positions while its files exist."""
        if not snapshot.claim.drain or not self._sources:
            return
        try:
            view = SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
            self._positions[snapshot.checkpoint_id] = view.positions(self._sources)
        except HoldfastError:
            pass  # damage of its files is reported elsewhere

    def before(self, number: float = math.inf) -> Drained:
        """Positions of each drain in front of an id, ascending."""
        if not self._positions:
            return ()
        self._descent.follow()
        known = self._ledger.completed
        return tuple(
            self._positions[drain]
            for drain in sorted(self._positions)
            if drain < number and drain in known and self._descent.holds(drain)
        )
