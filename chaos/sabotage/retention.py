"""Mistakes of retention and deletion: which files go, in which order, and which stay behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

import holdfast.coordinator.checkpoints.checkpoint_coordinator as checkpoint_coordinator_module
import holdfast.coordinator.dispatcher.dispatcher as dispatcher_module
import holdfast.coordinator.dispatcher.storage_effects as effects_module
import holdfast.coordinator.ha.recovery as recovery_module
import holdfast.coordinator.ownership.claims as claims_module
from holdfast.barriers.jobgraph import ClaimMode, Submission
from holdfast.barriers.messages import AcknowledgeCheckpoint, AckStatus
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant, throughout
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedJob
from holdfast.coordinator.ha.shared_state import Released, SharedStateRegistry
from holdfast.coordinator.ha.store import discard_shared
from holdfast.coordinator.jobmaster.releases import Release, Releases
from holdfast.statebackends.layout import JobPaths, writer_of
from holdfast.statebackends.storage.port import DeleteFile, Flow, ListFiles


def _looks_for_aborted(original: Any) -> Any:
    """Of unreferenced shared files, those that an aborted checkpoint wrote."""

    def derive_shared_garbage(job: RecordedJob) -> tuple[str, ...]:
        aborted = {each.checkpoint_id for each in job.with_fact(CheckpointFact.ABORTED)}
        return tuple(name for name in original(job) if writer_of(name) in aborted)

    return derive_shared_garbage


def _drops_the_newest(original: Any) -> Any:
    def take_drops(self: CompletedCheckpointStore, wall_ms: int = 0) -> Any:
        drops = []
        while len(self._retained) > self._retained_max:
            victim = self._retained.pop()
            self._folders.pop(victim.checkpoint_id, None)
            self._deleting.add(victim.checkpoint_id)
            drops.append(self._drop(victim))
        return drops + original(self, wall_ms)

    return take_drops


def _discards_repeated(original: Any) -> Any:
    """Deletes the files of every acknowledgement that does not count, repeated ones included."""

    def acknowledge(self: CheckpointCoordinator, ack: AcknowledgeCheckpoint, slot: int) -> AckStatus:
        status: AckStatus = original(self, ack, slot)
        if status is AckStatus.DUPLICATE:
            self._discard_late(ack, self._folder(ack.checkpoint_id))
        return status

    return acknowledge


def _deletes_claim_last(paths: JobPaths, checkpoint_id: int, shared: Sequence[str] = (), after: Sequence[int] = ()) -> Flow[None]:
    files: list[str] = yield ListFiles(paths.checkpoint(checkpoint_id))
    for path in sorted(files, reverse=True):
        yield DeleteFile(path)
    for other in after:
        yield DeleteFile(paths.claim(other))
    yield from discard_shared(paths, shared)


def _deletes_shared_first(original: Any) -> Any:
    def drop_checkpoint(paths: JobPaths, checkpoint_id: int, shared: Sequence[str] = (), after: Sequence[int] = ()) -> Flow[None]:
        yield from discard_shared(paths, shared)
        yield from original(paths, checkpoint_id)

    return drop_checkpoint


def _releases_what_others_need(original: Any) -> Any:
    """Deletes a file with the first checkpoint that refers to it."""

    def release(self: SharedStateRegistry, checkpoint_id: int) -> Released:
        named = {name for name, ids in self.counts().items() if checkpoint_id in ids}
        released: Released = original(self, checkpoint_id)
        return Released(tuple(sorted(named.union(released.names))), released.after)

    return release


def _releases_at_once(original: Any) -> Any:
    """Releases the base as if the job had as many checkpoints of its own as it retains."""

    def advance(self: Releases, own: int, **options: Any) -> list[Release]:
        found: list[Release] = original(self, self.retained_max, **options)
        return found

    return advance


def _takes_the_oldest(original: Any) -> Any:
    def newest(self: CompletedCheckpointStore) -> Any:
        candidates = [*self._retained[:1], *([self._stop_point] if self._stop_point is not None else [])]
        return max(candidates, key=lambda entry: entry.checkpoint_id, default=None)

    return property(newest)


def _holds_no_claim(original: Any) -> Any:
    return staticmethod(lambda base, retained_max, subsumed: Releases(None, retained_max))


def _claims_whatever(original: Any) -> Any:
    def start_submission(job_id: str, submission: Submission, *arguments: Any, **options: Any) -> Flow[Any]:
        if submission.restore is not None and "/" in submission.restore:
            submission = replace(submission, claim_mode=ClaimMode.CLAIM)
        return (yield from original(job_id, submission, *arguments, **options))

    return start_submission


SABOTAGES = (
    Sabotage(
        "newest_dropped",
        "retention drops the newest checkpoint instead of the oldest",
        ("I16",),
        (Mutant(CompletedCheckpointStore, "take_drops", _drops_the_newest),),
    ),
    Sabotage(
        "final_dropped",
        "a job that finishes drops its last checkpoint, though it retains its checkpoints",
        ("I16",),
        (
            Mutant(checkpoint_coordinator_module, "keeps_checkpoints", constant(False)),
            Mutant(claims_module, "keeps_checkpoints", constant(False)),
        ),
        seeds_max=60,
    ),
    Sabotage(
        "repeated_ack_discarded",
        "an acknowledgement that comes twice counts as late, and the files that it names are deleted",
        ("I11",),
        (Mutant(CheckpointCoordinator, "_acknowledge", _discards_repeated),),
        workloads=("windows", "fanout", "ends", "random"),
        kinds=("duplicate",),
        seeds_max=200,
    ),
    Sabotage(
        "claim_deleted_last",
        "the claim of a dropped checkpoint is deleted last, so that a crash leaves an undecided id",
        ("I13", "I11"),
        (
            Mutant(effects_module, "drop_checkpoint", lambda original: _deletes_claim_last),
            Mutant(recovery_module, "drop_checkpoint", lambda original: _deletes_claim_last),
        ),
    ),
    Sabotage(
        "kept_aborted_ids",
        "the coordinator forgets which ids it aborted, and their registers stay for ever",
        ("I24",),
        (Mutant(CompletedCheckpointStore, "aborted", constant(None)),),
        kinds=("store_fails", "disk_full"),
    ),
    Sabotage(
        "unasked_claim",
        "every savepoint that a job starts from is recorded as claimed by it",
        ("I25",),
        (Mutant(dispatcher_module, "start_submission", _claims_whatever),),
        kinds=("restore", "drain"),
        seeds_max=60,
    ),
    Sabotage(
        "claimed_deleted_early",
        "a savepoint that the job claimed is deleted before it has a checkpoint of its own",
        ("I25",),
        (Mutant(Releases, "advance", _releases_at_once),),
        kinds=("restore", "drain"),
        seeds_max=60,
    ),
    Sabotage(
        "needed_claim_given_back",
        "a savepoint that a running job claimed, and has not replaced yet, can be disposed of",
        ("I25",),
        (Mutant(claims_module, "refuse_to_return", constant("")),),
        kinds=("restore", "drain"),
        seeds_max=60,
    ),
    Sabotage(
        "claimed_never_deleted",
        "a savepoint that the job claimed stays when its own checkpoints have replaced it",
        ("I24",),
        (Mutant(Releases, "of", _holds_no_claim),),
        kinds=("restore", "drain"),
        seeds_max=60,
    ),
    Sabotage(
        "unheld_base",
        "retention drops the checkpoint that an increment under way builds on, so that it can't complete",
        ("I15", "I30"),
        (Mutant(CompletedCheckpointStore, "retain_bases", constant(None)),),
        workloads=("timers", "counter", "windows", "aggregate"),
        plan=(throughout("store_slow", "worker:", amount=60, probability=0.2),),
        backend="rocksdb",
        seeds_max=60,
    ),
    Sabotage(
        "needed_shared_file_deleted",
        "a shared file goes with the first checkpoint that refers to it",
        ("I23",),
        (Mutant(SharedStateRegistry, "release", _releases_what_others_need),),
        backend="rocksdb",
    ),
    Sabotage(
        "shared_deleted_first",
        "the shared files of a dropped checkpoint are deleted before its claim, so that a crash leaves a hole",
        ("I23",),
        (Mutant(effects_module, "drop_checkpoint", _deletes_shared_first),),
        backend="rocksdb",
    ),
    Sabotage(
        "half_deleted_left",
        "shared files left by a coordinator that died between two deletions stay for ever",
        ("I24", "I23"),
        (Mutant(recovery_module, "derive_shared_garbage", _looks_for_aborted),),
        workloads=("timers", "counter", "windows", "aggregate"),
        plan=(Fault("kill_coordinator", on="coordinator.DeleteFile.shared", nth=3, amount=1),),
        backend="rocksdb",
    ),
    Sabotage(
        "unswept_shared_files",
        "shared files of an aborted checkpoint are never deleted",
        ("I24",),
        (
            Mutant(effects_module, "sweep_shared", constant(())),
            Mutant(recovery_module, "derive_shared_garbage", constant(())),
        ),
        backend="rocksdb",
    ),
    Sabotage(
        "late_files_left",
        "files of an acknowledgement that follows the abort of its checkpoint are left behind",
        ("I24",),
        (Mutant(CheckpointCoordinator, "_discard_late", constant(None)),),
        workloads=("windows",),
        plan=(
            throughout("store_fails", "worker:", probability=0.03),
            throughout("store_slow", "worker:UploadFile", amount=400, probability=0.5),
            throughout("delay", "abort", amount=2_500),
        ),
        backend="rocksdb",
        seeds_max=100,
    ),
    Sabotage(
        "label_ignored",
        "retention deletes checkpoints without looking for labels",
        ("I45",),
        (Mutant(effects_module, "begin_deletion", constant(())),),
        workloads=("labels",),
    ),
    Sabotage(
        "oldest_restored",
        "a failover goes back to the oldest retained checkpoint",
        ("I16", "I22"),
        (Mutant(CompletedCheckpointStore, "newest", _takes_the_oldest),),
        kinds=("kill_worker", "user_error"),
    ),
)
