"""`fsck --repair` tried out on a copy: I23, I24, I29 (docs/invariants.md).

It runs when coordinators die, when faults end and, in one run of three, at the end, with a safety age of zero, killed behind some
of its deletions and repeated: every file that a completed checkpoint names stays, a recovery then finds what it would have found,
and no orphan is left."""

from __future__ import annotations

from typing import ClassVar

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.observations import Lifecycle, Observation, PhaseBegan, Report, WorldView
from holdfast.chaos.checkers.overlay import OverlayStorage
from holdfast.chaos.checkers.recovery import meaning, recover
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedJob
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.fsck import FsckReport, FsckRequest, check_directory
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.parts import snapshot_files
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, Flow, one_by_one, run_flow

MOMENTS_MAX = 1
"""Deaths of coordinators in a run at which a repair is tried."""
ENDS = 3
"""One run in so many tries a repair at its end, chosen by the time of the end: the look at an end is the most expensive one, and a
defect of the repair there shows in other runs, too."""


class RepairChecker(Checker):
    """Runs the product's own repair on a copy."""

    invariants: ClassVar[tuple[str, ...]] = ("I23", "I24", "I29")
    hears: ClassVar[tuple[type, ...]] = (PhaseBegan, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._paths = JobPaths(world.job_id)
        self._moments = 0

    def observe(self, observation: Observation) -> None:
        match observation:
            case PhaseBegan(phase="liveness"):
                self._try()
            case Lifecycle(role="coordinator", change="killed") if self._moments < MOMENTS_MAX:
                self._moments += 1
                self._try()

    def at_end(self) -> None:
        if self.world.now_ms % ENDS == 0:
            self._try()

    def _try(self) -> None:
        whole = OverlayStorage(self.world)
        try:
            before = run_flow(read_job(self._paths), whole)
            if not before.exists:
                return
            needed = {path for path in self._needed(before) if self.world.state.peek(path) is not None}
            deletions = self._repaired(whole, None)
            points = sorted({1, deletions // 2, deletions - 1} & set(range(deletions)))
            if points:
                kept = points[self.world.now_ms % len(points)]  # a set of deletions each, since thousands of runs get to each
                killed = OverlayStorage(self.world)
                self._repaired(killed, kept)
                if self._is_broken(before, needed, killed, f"a repair killed behind {kept} of {deletions} deletions"):
                    return
            if self._is_broken(before, needed, whole, "a repair"):
                return
            again: FsckReport = run_flow(self._flow(), whole)
        except HoldfastError as error:
            self.report("I29", f"a repair from here fails: {type(error).__name__}: {error}")
            return
        if again.orphans or again.deleted:
            left = (*again.orphans, *again.deleted)[0]
            self.report("I24", f"a repair leaves {left.path} behind: {left.owner}")

    def _flow(self) -> Flow[FsckReport]:
        request = FsckRequest(job_id=self._paths.job_id, safety_age_ms=0, repair=True, nonce="tried")
        return check_directory(request, self.world.state.root, self.world.now_ms)

    def _repaired(self, overlay: OverlayStorage, deletions_max: int | None) -> int:
        """Run a repair, up to a number of deletions; returns how many it made."""
        flow, deletions = one_by_one(self._flow()), 0
        try:
            operation = next(flow)
            while True:
                if isinstance(operation, DeleteFile | DeleteFolder):
                    if deletions == deletions_max:
                        flow.close()
                        return deletions
                    deletions += 1
                try:
                    result = overlay.execute(operation)
                except HoldfastError as error:
                    operation = flow.throw(error)
                else:
                    operation = flow.send(result)
        except StopIteration:
            return deletions

    def _is_broken(self, before: RecordedJob, needed: set[str], overlay: OverlayStorage, what: str) -> bool:
        missing = sorted(needed - set(overlay.paths(self._paths.job_id)))
        if missing:
            self.report("I23", f"{what} deletes {missing[0]}, which a completed checkpoint names")
            return True
        after = run_flow(recover(self._paths, self.world.now_ms), overlay)
        if meaning(after) == meaning(before):
            return False
        self.report("I29", f"{what} changes what a recovery finds: {meaning(before)}, then {meaning(after)}")
        return True

    def _needed(self, job: RecordedJob) -> set[str]:
        """Files of the completed checkpoints, as of their completion."""
        found: set[str] = set()
        for checkpoint in job.with_fact(CheckpointFact.COMPLETED):
            snapshot = self.ledger.completed.get(checkpoint.checkpoint_id)
            if snapshot is None or checkpoint.kind.is_savepoint:
                continue
            found |= {snapshot.path(handle.path) for handle, _, _ in snapshot_files(snapshot.metadata)}
        return found
