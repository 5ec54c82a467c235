"""A split is in one place (I40): with its enumerator or with one reader, in every completed snapshot, whatever was restored. Its
position is told to where it comes from, which may then forget what is in front of it, only when a checkpoint has it (I41).

What a split's position says of its records is the cut's (I7, I8): a split that was lost has records that nobody read."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import Observation, Report, Stored, WorldView
from holdfast.chaos.checkers.state_reading import SnapshotView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.chaos.workloads.splits import ENUMERATOR_SUFFIX, decode_entry

SNAPSHOTS_KEPT_MAX = 40


class Seen(NamedTuple):
    """What a snapshot has of a source."""

    where: str
    places: dict[str, int]
    """Split -> position."""
    found: set[str]
    """By the enumerator."""


class SplitsChecker(Checker):
    """Counts the places of each split in completed snapshots, and follows them from one to the next."""

    invariants: ClassVar[tuple[str, ...]] = ("I40", "I41")
    hears: ClassVar[tuple[type, ...]] = (Stored,)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._taken: dict[str, tuple[int, dict[int, Seen]]] = {}
        """Source -> its newest attempt, and by id what the newest snapshots of that have."""
        self._followed: dict[str, int] = {}
        """Source -> what was judged of all that was told."""
        self._reached: dict[tuple[str, str], float] = {}
        """Source and split -> its furthest position in a complete checkpoint; infinite for one that has finished."""
        self._saved: dict[int, dict[tuple[str, str], float]] = {}
        """Plain savepoint -> the same, which counts when a submission starts from it."""

    def observe(self, observation: Observation) -> None:
        if not self.scenario.splits or not isinstance(observation, Stored) or not observation.added:
            return
        self.look()  # what was told before is judged by what was on record before
        for change in self.ledger.changes(observation):
            if isinstance(change, Decided) and change.snapshot is not None:
                for source in self.scenario.splits:
                    self._check(change.snapshot, source.uid)

    def look(self) -> None:
        for source in self.scenario.splits:
            begun = self._followed.get(source.uid, 0)
            told = source.broker.told[begun:]
            self._followed[source.uid] = begun + len(told)
            for split_id, position in told:
                if position > self._known((source.uid, split_id)):
                    where = f"source {source.uid}: split {split_id}"
                    self.report("I41", f"{where}: position {position} was told, which no complete checkpoint has")

    def at_end(self) -> None:
        self.look()

    def _known(self, split: tuple[str, str]) -> float:
        bases = [record.base.checkpoint_id for record in self.ledger.submissions.values() if record.base is not None]
        saved = [self._saved.get(number, {}).get(split, 0) for number in bases]
        return max(self._reached.get(split, 0), *saved, 0)

    def _note(self, snapshot: Snapshot, uid: str, places: dict[str, int], found: set[str]) -> None:
        reached = {(uid, split_id): float(places.get(split_id, "inf")) for split_id in found | set(places)}
        if snapshot.is_recovery_point:
            self._reached.update({split: max(at, self._reached.get(split, 0)) for split, at in reached.items()})
        else:
            self._saved.setdefault(snapshot.checkpoint_id, {}).update(reached)

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
        self._note(snapshot, uid, places, found)
        attempt = snapshot.claim.attempt
        last, taken = self._taken.get(uid, (0, {}))
        if attempt < last:
            return
        if attempt > last:  # a restore goes back
            taken = {}
        number = snapshot.checkpoint_id
        before, behind = [each for each in taken if each < number], [each for each in taken if each > number]
        taken[number] = Seen(where, places, found)
        if before:
            self._compare(taken[max(before)], taken[number])
        if behind:  # a slow savepoint is complete behind checkpoints that began after it
            self._compare(taken[number], taken[min(behind)])
        self._taken[uid] = attempt, {each: taken[each] for each in sorted(taken)[-SNAPSHOTS_KEPT_MAX:]}

    def _compare(self, earlier: Seen, later: Seen) -> None:
        """Within an attempt positions rise from one id to the next, and what has finished stays so."""
        where, (_, old, known), (_, places, found) = later.where, earlier, later
        for split_id in sorted(known - set(old)):
            if split_id in places:
                self.report("I40", f"{where}: split {split_id} had finished, and is there again")
        for split_id in sorted(set(old) & set(places)):
            if places[split_id] < old[split_id]:
                self.report("I40", f"{where}: split {split_id} went back from {old[split_id]} to {places[split_id]}")
        if not found >= known:
            self.report("I40", f"{where}: its enumerator has forgotten {sorted(known - found)}")
