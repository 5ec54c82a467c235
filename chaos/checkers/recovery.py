"""A recovery tried out, twice, when faults end and when the job has ended: I29, and I24 for the files that it leaves
(docs/invariants.md).

A new leader settles what it finds. A second recovery must change nothing that matters, the job continues from its newest completed
checkpoint, and no file is left without an owner. A job's directory may hold
- `leader/`, `submissions/`, `attempts/`, `results/`, `sources/`: records and inputs;
- claim and decision of a claimed id: of every savepoint (its pointer), of every aborted id above the newest completed one, which
  keeps stale leaders from taking it, and of those below it until they are dropped;
- of a completed checkpoint the files that its metadata names, shared ones included, and nothing else."""

from __future__ import annotations

from typing import ClassVar

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.observations import Observation, PhaseBegan, Report, WorldView
from holdfast.chaos.checkers.overlay import OverlayStorage
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.leadership import become_leader
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedJob, derive_recovery_point
from holdfast.coordinator.ha.records import LeaderRecord
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.store import read_job
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import CLAIM_NAME, METADATA_NAME, JobPaths, parse_label_name
from holdfast.statebackends.snapshot.parts import snapshot_files
from holdfast.statebackends.storage.port import Flow, run_flow

_RECORDS = ("leader", "submissions", "attempts", "results", "config", "history", "labels", "sources", "sinks")  # `sinks`: I42
_NONCE = "tried recovery"


class RecoveryChecker(Checker):
    """Runs the product's own recovery on a copy."""

    invariants: ClassVar[tuple[str, ...]] = ("I24", "I29")
    hears: ClassVar[tuple[type, ...]] = (PhaseBegan,)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._paths = JobPaths(world.job_id)

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, PhaseBegan) and observation.phase == "liveness":
            self._try()

    def at_end(self) -> None:
        starts = (f"{self.world.job_id}/chk-", f"{self._paths.shared}/")
        if self.world.jobs_live or any(path.startswith(starts) for path in self.world.state.paths(self.world.job_id)):
            self._try()

    def _try(self) -> None:
        overlay = OverlayStorage(self.world)
        try:
            before = run_flow(read_job(self._paths), overlay)
            if not before.exists:
                return
            once = run_flow(recover(self._paths, self.world.now_ms), overlay)
            twice = run_flow(recover(self._paths, self.world.now_ms), overlay)
            self._check_start(once)
        except HoldfastError as error:
            self.report("I29", f"a recovery from here fails: {type(error).__name__}: {error}")
            return
        stages = [meaning(job) for job in (before, once, twice)]
        if stages[1] != stages[0] or stages[2] != stages[0]:
            self.report("I29", f"a recovery changes what there is: {stages[0]}, then {stages[1]}, then {stages[2]}")
        self._check_owners(twice, overlay)

    def _check_start(self, job: RecordedJob) -> None:
        submission = job.newest_submission
        if submission is None or not job.is_live:
            return
        point = derive_recovery_point(job, submission)
        found, wanted = 0 if point is None else point.checkpoint_id, self.ledger.recovery_point(submission.number)
        if wanted is not None and found != wanted:
            self.report("I29", f"a recovery would begin at checkpoint {found}; the newest one is {wanted}")

    def _check_owners(self, job: RecordedJob, overlay: OverlayStorage) -> None:
        owned = {path for number in job.checkpoints for path in self._owned(number, job)}
        for path in overlay.paths(self._paths.job_id):
            folder = path.split("/")[1]
            if folder not in _RECORDS and path not in owned:
                self.report("I24", f"{path} has no owner, and no recovery takes it away")
                return

    def _owned(self, number: int, job: RecordedJob) -> set[str]:
        """Files that may exist for an id."""
        checkpoint, folder = job.checkpoints[number], self._paths.checkpoint(number)
        if checkpoint.claim is None:
            return set()
        owned = {f"{folder}/{CLAIM_NAME}", f"{folder}/{METADATA_NAME}"}
        snapshot = self.ledger.completed.get(number)
        savepoint = checkpoint.kind.is_savepoint
        if checkpoint.fact is CheckpointFact.COMPLETED and snapshot is not None and not savepoint:
            owned |= {snapshot.path(handle.path) for handle, _, _ in snapshot_files(snapshot.metadata)}
            owned |= {path for path in self.world.state.paths(folder) if parse_label_name(path.rpartition("/")[2]) is not None}
        return owned


def recover(paths: JobPaths, now_ms: int) -> Flow[RecordedJob]:
    """The recovery of a new leader, on a storage."""
    epoch = yield from become_leader(paths, LeaderRecord(1, f"{_NONCE} {now_ms}", "", now_ms))
    return (yield from recover_job(paths, Takeover(epoch, f"{_NONCE} {epoch}", now_ms)))


def meaning(job: RecordedJob) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Facts in a job's directory that a recovery must not change: completed ids, results, the newest attempt."""
    completed = tuple(each.checkpoint_id for each in job.with_fact(CheckpointFact.COMPLETED))
    attempt = job.newest_attempt
    return completed, tuple(sorted(job.results)), 0 if attempt is None else attempt.attempt
