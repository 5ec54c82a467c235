"""A split is in one place (I40): with its enumerator or with one reader, in every completed snapshot, whatever was restored.

What a split's position says of its records is the cut's (I7, I8): a split that was lost has records that nobody read."""

from __future__ import annotations

from typing import ClassVar

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import Observation, Report, Stored, WorldView
from holdfast.chaos.checkers.state_reading import SnapshotView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.chaos.workloads.splits import ENUMERATOR_SUFFIX, decode_entry


class SplitsChecker(Checker):
    """Counts the places of each split in completed snapshots, and follows them from one to the next."""

    invariants: ClassVar[tuple[str, ...]] = ("I40",)
    hears: ClassVar[tuple[type, ...]] = (Stored,)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._last: dict[str, tuple[int, dict[str, int], set[str]]] = {}
        """Source -> attempt, places and found splits of its newest snapshot."""

    def observe(self, observation: Observation) -> None:
        if not self.scenario.splits or not isinstance(observation, Stored) or not observation.added:
            return
        for change in self.ledger.changes(observation):
            if isinstance(change, Decided) and change.snapshot is not None:
                for uid in self.scenario.splits:
                    self._check(change.snapshot, uid)

    def _check(self, snapshot: Snapshot, uid: str) -> None:
        where = f"{snapshot.kind} {snapshot.checkpoint_id}: source {uid}"
        seen = SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
        places: dict[str, int] = {}
        found: set[str] = set()
        for entries in seen.positions((uid, uid + ENUMERATOR_SUFFIX)).values():
            for entry in entries:
                decoded = decode_entry(entry)
                if isinstance(decoded, set):
                    found |= decoded
                elif decoded[0] in places:
                    self.report("I40", f"{where}: split {decoded[0]} is in two places")
                else:
                    places[decoded[0]] = decoded[1]
        attempt = snapshot.claim.attempt
        before = self._last.get(uid)
        self._last[uid] = attempt, places, found
        if before is None or before[0] != attempt:
            return  # a restore goes back
        self._compare(where, before[1], before[2], places, found)

    def _compare(self, where: str, old: dict[str, int], known: set[str], places: dict[str, int], found: set[str]) -> None:
        """Within an attempt positions rise, and what has finished stays so."""
        for split_id in sorted(known - set(old)):
            if split_id in places:
                self.report("I40", f"{where}: split {split_id} had finished, and is there again")
        for split_id in sorted(set(old) & set(places)):
            if places[split_id] < old[split_id]:
                self.report("I40", f"{where}: split {split_id} went back from {old[split_id]} to {places[split_id]}")
        if not found >= known:
            self.report("I40", f"{where}: its enumerator has forgotten {sorted(known - found)}")
