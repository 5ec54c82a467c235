"""Flows that plan a submission: its snapshot, whether that fits the graph, which job owns it, and the first checkpoint id.

They only read: a submission that can't run leaves the job as it was. What is found goes into the preflight's report."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.barriers.jobgraph import ClaimMode, JobGraph, Submission, check_job_name, check_restored
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.watermark_alignment import aligned_operators
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.ha.recorded_job import (
    CheckpointFact,
    Completed,
    RecordedCheckpoint,
    RecordedJob,
    Unreadable,
    derive_abandoned_stop,
    derive_config,
    derive_finishing,
)
from holdfast.coordinator.ha.records import AbortRecord, OwnerRecord, RestorePoint, SavepointRecord, SubmissionRecord, decode_nonce
from holdfast.coordinator.ha.snapshots import damage_error, find_missing_external, find_problems, load_snapshot, rebase
from holdfast.coordinator.ha.store import read_optional
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.jobmaster.stopping import derive_cut_off_stops
from holdfast.coordinator.ownership.claims import check_name, check_owner, check_returnable, derive_releases, find_owner, job_folder
from holdfast.coordinator.restore.branches import check_branch, check_branch_base, locate_branch_base, parent_of
from holdfast.coordinator.restore.compatibility import CompatibilityResult, check_compatibility, find_sinks
from holdfast.coordinator.restore.in_flight import give_up_in_flight
from holdfast.coordinator.restore.preflight import (
    PreflightReport,
    Refusal,
    SkippedFinding,
    SnapshotFinding,
    file_finding,
    gravest_first,
)
from holdfast.coordinator.restore.resolve import FALLBACK_HINT, Rewind, deleted_error, find_rewind, is_path, resolve_snapshot
from holdfast.coordinator.restore.sink_forks import SinkCheckResult, check_muted, check_sinks, joined
from holdfast.coordinator.restore.target_forks import check_fresh_start, check_targets
from holdfast.coordinator.views import TriggerView
from holdfast.statebackends.errors import (
    CorruptStateError,
    GraphError,
    HoldfastError,
    InvalidConfigError,
    NotFoundError,
    SnapshotClaimedError,
)
from holdfast.statebackends.keygroups import MAX_PARALLELISM_LIMIT
from holdfast.statebackends.layout import DIRECTORY_FILE, describe_absence, folder_of_snapshot, metadata_path
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.snapshot.parts import SnapshotProblem, snapshot_files
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.port import Flow, ListFolder


@dataclass(frozen=True, slots=True)
class SubmissionPlan:
    """A checked submission; it can run if its report has no refusals."""

    submission: Submission
    """With the snapshot's max parallelism adopted."""
    base: RestorePoint | None
    first_checkpoint_id: int
    report: PreflightReport


def check_graph(graph: JobGraph) -> None:
    """Raise InvalidConfigError or GraphError for a graph that can't run, whatever the snapshot."""
    graph.config.check()
    check_job_name(graph.name)
    aligned_operators(graph)
    if not graph.vertices:
        raise GraphError(f"job {graph.name!r} has no vertices")
    if not all(vertex.operators for vertex in graph.vertices):
        raise GraphError(f"job {graph.name!r} has a vertex without operators")
    known = {vertex.vertex_id for vertex in graph.vertices}
    if len(known) < len(graph.vertices) or not {end for edge in graph.edges for end in (edge.source, edge.target)} <= known:
        raise GraphError(f"the vertices and edges of job {graph.name!r} don't fit together")
    if not any(vertex.is_source for vertex in graph.vertices):
        raise GraphError(f"job {graph.name!r} has no source")
    graph.check_standbys()
    _check_edges(graph)
    seen: set[str] = set()
    for vertex in graph.vertices:
        if not 1 <= vertex.parallelism <= vertex.max_parallelism <= MAX_PARALLELISM_LIMIT:
            raise GraphError(
                f"vertex {vertex.name!r} has parallelism {vertex.parallelism} and max parallelism {vertex.max_parallelism}: "
                f"1 <= parallelism <= max parallelism <= {MAX_PARALLELISM_LIMIT}",
                operator=vertex.operators[0].uid,
            )
        for operator in vertex.operators:
            if not operator.uid or not all(state.name for state in operator.states):
                raise GraphError(
                    f"vertex {vertex.name!r} has an operator without uid, or a state without name", operator=operator.uid
                )
            if operator.uid in seen:
                raise GraphError(f"uid {operator.uid!r} is given twice", operator=operator.uid)
            seen.add(operator.uid)


def _check_edges(graph: JobGraph) -> None:
    """Each edge comes from an operator of its source, and the inputs of each vertex are numbered from 0 on: a worker makes as many
    as the highest says. Raises GraphError."""
    uids = {vertex.vertex_id: {operator.uid for operator in vertex.operators} for vertex in graph.vertices}
    chained = all(set(vertex.chain_side_outputs or ()) <= uids[vertex.vertex_id] for vertex in graph.vertices)
    ids = {edge.edge_id for edge in graph.edges}
    if not chained or len(ids) < len(graph.edges) or any(edge.source_operator not in uids[edge.source] for edge in graph.edges):
        raise GraphError(f"the operators and edges of job {graph.name!r} don't fit together")
    inputs: dict[str, set[int]] = {}
    for edge in graph.edges:
        inputs.setdefault(edge.target, set()).add(edge.input_index)
    for vertex in graph.vertices:
        found = inputs.get(vertex.vertex_id, set())
        if found != set(range(len(found))):
            raise GraphError(f"vertex {vertex.name!r}: its inputs are not numbered from 0 on", operator=vertex.operators[0].uid)


def plan_submission(job: RecordedJob, submission: Submission, *, checksums: bool = True, now_ms: int = 0) -> Flow[SubmissionPlan]:
    """Resolve and check the snapshot that a submission starts from; reads only.

    `checksums`: verify the checksums of a snapshot given by its path; without, lengths alone are compared.

    Raises JobExistsError, NotFoundError, RestoreError and its kinds, CorruptStateError."""
    plan = yield from check_submission(job, submission, checksums=checksums, now_ms=now_ms)
    plan.report.check()
    return plan


def check_submission(
    job: RecordedJob, submission: Submission, *, external: bool = True, checksums: bool = True, now_ms: int = 0
) -> Flow[SubmissionPlan]:
    """As `plan_submission`, but problems of the snapshot are in the report. `external`: relative paths can be looked up.
    `now_ms`: wall clock; without it a claim without a recorded submission counts as made just now.

    Raises InvalidConfigError, JobExistsError, NotFoundError; CorruptStateError and RestoreError if there is no snapshot to check,
    or its `_metadata` can't be read."""
    _check_restore(submission)
    check_branch(job, submission)
    submission = yield from locate_branch_base(submission)
    try:
        resolved = yield from resolve_snapshot(job, submission)
    except CorruptStateError as error:
        raise (yield from _explain_missing(job, submission, error)) from error
    base = resolved.base
    if base is None:
        if submission.without_channel_state is not None:
            raise InvalidConfigError(
                "without_channel_state names a snapshot, and the job starts from none", setting="without_channel_state"
            )
        return _begin_empty(job, submission, (yield from check_fresh_start(job, submission)))
    metadata = yield from _load_base(job, base)
    metadata, lost = give_up_in_flight(metadata, submission.without_channel_state)
    compatibility = check_compatibility(metadata, submission.graph, allow_non_restored_state=submission.allow_non_restored_state)
    forks = left = check_muted(job, submission, metadata)
    problems = yield from find_problems(metadata, base.folder, checksums=checksums and base.explicit, external=False)
    if not problems:
        logs = yield from check_sinks(job, submission, base, metadata, is_directory=external)
        targets = yield from check_targets(job, submission, base, metadata, is_directory=external)
        forks = joined(left, joined(logs, targets))
    if external:
        problems += yield from find_missing_external(entry for entry in metadata.external if entry not in forks.forgone)
    ownership = yield from check_ownership(job, submission, base, metadata, now_ms=now_ms)
    rewind = yield from find_rewind(job, resolved, metadata, submission.graph, moved=[sink.sink_id for sink in forks.moved])
    unfit = check_branch_base(submission, metadata, base.folder)
    checked = _Checked(base, resolved.skipped, metadata, compatibility, forks, tuple(problems), ownership, rewind, lost, unfit)
    report = checked.report(job.job_id, submission, external=external)
    first = max(job.last_checkpoint_id, base.checkpoint_id) + 1
    graph = forks.applied_to(compatibility.graph)
    return SubmissionPlan(msgspec.structs.replace(submission, graph=graph), base, first, report)


def _check_restore(submission: Submission) -> None:
    """Raise InvalidConfigError for options that exclude each other."""
    check_restored(submission.restore, fresh=submission.fresh)
    if submission.claim_mode is ClaimMode.CLAIM and (submission.restore is None or not is_path(submission.restore)):
        raise InvalidConfigError(
            "claim_mode=CLAIM is for restore=PATH: a job owns its own checkpoints anyway", setting="claim_mode"
        )


def _begin_empty(job: RecordedJob, submission: Submission, refusals: Sequence[Refusal]) -> SubmissionPlan:
    report = PreflightReport(
        job_id=job.job_id,
        job_name=submission.graph.name,
        sinks=find_sinks(submission.graph, repeats=[refusal.fields["sink"] for refusal in refusals]),
        refusals=tuple(refusals),
    )
    graph = SinkCheckResult().applied_to(submission.graph)
    return SubmissionPlan(msgspec.structs.replace(submission, graph=graph), None, job.last_checkpoint_id + 1, report)


def _load_base(job: RecordedJob, base: RestorePoint) -> Flow[SnapshotMetadata]:
    """Raises NotFoundError for a snapshot of its user's that was deleted; a checkpoint that is gone is damage."""
    try:
        return (yield from load_snapshot(base.folder))
    except CorruptStateError as error:
        if error.reason != "missing" or not (base.explicit or base.kind.is_savepoint):
            raise
        raise deleted_error(job, base) from error


@dataclass(frozen=True, slots=True)
class _Checked:
    """All findings on the snapshot that a submission starts from."""

    base: RestorePoint
    skipped: tuple[SkippedFinding, ...]
    metadata: SnapshotMetadata
    compatibility: CompatibilityResult
    forks: SinkCheckResult
    problems: tuple[SnapshotProblem, ...]
    ownership: Ownership
    rewind: Rewind | None
    lost: tuple[str, ...]
    """Notes on in-flight records that are given up."""
    unfit_for_branch: HoldfastError | None = None
    """Why no branch can begin with it."""

    def report(self, job_id: str, submission: Submission, *, external: bool) -> PreflightReport:
        refusals, notes = self._verdict(allow_output_repeat=submission.allow_output_repeat)
        repeats = self.rewind.sinks if self.rewind is not None else ()
        return PreflightReport(
            job_id=job_id,
            job_name=submission.graph.name,
            snapshot=self._snapshot(),
            operators=self.compatibility.operators,
            files=tuple(file_finding(problem) for problem in self.problems),
            unchecked=() if external else tuple(entry for entry in self.metadata.external if entry not in self.forks.forgone),
            skipped=self.skipped,
            sinks=find_sinks(submission.graph, repeats=repeats, moved=self.forks.moved),
            refusals=gravest_first(refusals),
            notes=tuple(notes),
        )

    def _verdict(self, *, allow_output_repeat: bool) -> tuple[list[Refusal], list[str]]:
        """(refusals, notes)."""
        unfit = (Refusal.of(self.unfit_for_branch),) if self.unfit_for_branch is not None else ()
        refusals = [*unfit, *self.ownership.refusals, *self.compatibility.refusals, *self.forks.refusals]
        notes = [*self.lost, *self.compatibility.notes, *self.ownership.notes, *self.forks.notes]
        if self.problems:
            hint = "" if self.base.explicit else FALLBACK_HINT
            refusals.append(Refusal.of(damage_error(self.base.folder, self.problems, hint=hint)))
        if self.rewind is not None and allow_output_repeat:
            notes.append(self.rewind.error().message)
        elif self.rewind is not None:
            refusals.append(Refusal.of(self.rewind.error()))
        return refusals, notes

    def _snapshot(self) -> SnapshotFinding:
        metadata = self.metadata
        return SnapshotFinding(
            location=self.base.folder,
            job_id=metadata.job_id,
            job_name=metadata.job_name,
            checkpoint_id=metadata.checkpoint_id,
            kind=metadata.kind,
            size=metadata.size,
            timestamp_ms=metadata.trigger_timestamp_ms,
            owner=self.ownership.owner,
        )


def _explain_missing(job: RecordedJob, submission: Submission, error: CorruptStateError) -> Flow[HoldfastError]:
    """Error for a snapshot that does not exist where its user says. This job may have claimed it, and deleted it once it was
    subsumed."""
    restore = submission.restore or ""
    if error.reason != "missing" or not is_path(restore):
        return error
    folder = folder_of_snapshot(restore)
    if folder in [release.folder for release in derive_releases(job)]:
        return SnapshotClaimedError(
            f"snapshot {folder} was claimed by this job, which deleted it: its own checkpoints had subsumed it. "
            "Use restore='latest'",
            path=folder,
            owner=job.job_id,
        )
    names = yield ListFolder(folder)
    if metadata_path(folder) != error.path:
        reason = f"the savepoint that it points to is gone: {error.message}"
    else:
        reason = describe_absence(folder, names, lambda path: f"restore={path!r}")
    return NotFoundError(f"there is no snapshot at {folder}: {reason}", path=folder)


def derive_setup(job: RecordedJob, record: SubmissionRecord, *, epoch: int, directory_nonce: str) -> JobSetup:
    """Setup of a job master of this epoch, from the directory of a recovered job."""
    attempt = job.newest_attempt
    same = attempt is not None and attempt.submission == record.number
    return JobSetup(
        job_id=job.job_id,
        epoch=epoch,
        submission=record.number,
        graph=record.graph,
        directory_nonce=directory_nonce,
        base=record.base,
        first_checkpoint_id=record.first_checkpoint_id,
        next_checkpoint_id=max(job.last_checkpoint_id + 1, record.first_checkpoint_id),
        attempt=attempt.attempt if attempt is not None else 0,
        restarts=attempt.restarts if attempt is not None and same else 0,
        completed=tuple(_completed(entry) for entry in job.with_fact(CheckpointFact.COMPLETED)),
        aborted=tuple(entry.checkpoint_id for entry in job.with_fact(CheckpointFact.ABORTED)),
        erasing=_newest_erasure(job.checkpoints.values()),
        erased=_erased_below(job),
        begins=record.epoch == epoch,
        reconcile=same,
        fail_over=same and derive_abandoned_stop(job, record),
        finishing=derive_finishing(job, record),
        triggers=derive_triggers(job),
        started_ms=record.created_ms,
        notes=record.notes,
        subsumed=derive_releases(job),
        launch_key=record.submission.launch_key,
        without_channel_state=record.submission.without_channel_state,
        stops=derive_cut_off_stops(job, record) if same else (),
        totals=attempt.totals if attempt is not None and same else {},
        backoff=attempt.backoff if attempt is not None and same else None,
        progressed=attempt is not None and _has_progressed(job, attempt.attempt),
        config=derive_config(job, record),
        last_config=job.last_config,
        branch_of=parent_of(record.submission),
    )


def _newest_erasure(entries: Iterable[RecordedCheckpoint]) -> int:
    return max((each.checkpoint_id for each in entries if each.claim is not None and each.claim.erases), default=0)


def _erased_below(job: RecordedJob) -> int:
    """Checkpoints below this id are to go. Only claims of completed checkpoints that can be read count, and say nothing of ids
    above their own: one is left then that the job can recover from."""
    completed = [
        each
        for each in job.with_fact(CheckpointFact.COMPLETED)
        if isinstance(each.decision, Completed) and each.checkpoint_id not in job.given
    ]
    carried = (min(each.claim.erased_below, each.checkpoint_id) for each in completed if each.claim is not None)
    return max(_newest_erasure(completed), max(carried, default=0))


def _has_progressed(job: RecordedJob, attempt: int) -> bool:
    """Whether a checkpoint that the job recovers from has completed in an attempt."""
    claims = [entry.claim for entry in job.with_fact(CheckpointFact.COMPLETED)]
    return any(each is not None and each.attempt == attempt and each.kind is not CheckpointKind.SAVEPOINT for each in claims)


def derive_triggers(job: RecordedJob) -> tuple[TriggerView, ...]:
    """Outcomes of users' requests that took an id; of a request that took several, that of the newest."""
    newest = {
        job.checkpoints[number].claim.trigger_id: job.checkpoints[number]  # type: ignore[union-attr]
        for number in sorted(job.checkpoints)
        if job.checkpoints[number].claim is not None
    }
    return tuple(_trigger(entry) for trigger_id, entry in newest.items() if trigger_id)


def _completed(entry: RecordedCheckpoint) -> CompletedCheckpoint:
    assert entry.claim is not None
    decision = entry.decision
    timestamp_ms = decision.timestamp_ms if isinstance(decision, Completed | SavepointRecord) else 0
    size = decision.size if isinstance(decision, Completed) else 0
    shared = decision.shared if isinstance(decision, Completed) else None if isinstance(decision, Unreadable) else ()
    totals = decision.totals if isinstance(decision, Completed | SavepointRecord) else {}
    return CompletedCheckpoint(entry.checkpoint_id, entry.claim.kind, entry.claim.folder, timestamp_ms, size, shared, totals)


def _trigger(entry: RecordedCheckpoint) -> TriggerView:
    """Outcome of a request, from its claim and decision."""
    assert entry.claim is not None
    claim, decision = entry.claim, entry.decision
    aborted = decision if isinstance(decision, AbortRecord) else None
    return TriggerView(
        trigger_id=claim.trigger_id,
        kind=claim.kind,
        in_progress=False,
        checkpoint_id=entry.checkpoint_id,
        location=claim.folder if aborted is None else None,
        failure=(aborted.message or aborted.reason.value) if aborted is not None else None,
        failure_reason=aborted.reason.value if aborted is not None else None,
    )


@dataclass(frozen=True, slots=True)
class Ownership:
    """Ownership of a snapshot, as far as it concerns one job."""

    owner: str | None = None
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


def check_ownership(
    job: RecordedJob, submission: Submission, base: RestorePoint, metadata: SnapshotMetadata, *, now_ms: int
) -> Flow[Ownership]:
    """Owner of the snapshot, and whether this job may start from it, and claim it if it asks for that. `now_ms`: wall clock."""
    if not is_absolute_folder(base.folder):
        return Ownership()
    if base.claim:  # claimed by an older submission, and still needed
        return Ownership(job.job_id)
    claims = submission.claim_mode is ClaimMode.CLAIM
    try:
        owner = yield from find_owner(base.folder)
    except CorruptStateError as error:
        if claims:
            return Ownership(refusals=(Refusal.of(error),))
        return Ownership(notes=(f"who owns the snapshot can't be read: {error.message}",))
    directory = yield from _directory_nonce()
    if owner is not None:
        mine = OwnerRecord(job.job_id, directory or owner.directory, "", now_ms)
        return (yield from _check_recorded_owner(owner, mine, base.folder, derive_releases(job), claims=claims))
    if claims:
        yield from _check_foreign(base.folder, job.job_id, directory)
        try:
            yield from check_name(base.folder)
        except SnapshotClaimedError as error:
            return Ownership(refusals=(Refusal.of(error),))
    if claims and metadata.kind == "checkpoint" and any(_leaves_folder(metadata)):
        message = (
            f"snapshot {base.folder} shares files with other checkpoints of its job, and can't be claimed: take a savepoint, "
            "copy it (holdfast snapshot copy), or use claim_mode=NO_CLAIM"
        )
        return Ownership(None, (Refusal.of(SnapshotClaimedError(message, path=base.folder, owner=metadata.job_id)),))
    return Ownership()


def _check_recorded_owner(
    owner: OwnerRecord, mine: OwnerRecord, folder: str, releases: Sequence[RestorePoint], *, claims: bool
) -> Flow[Ownership]:
    if any(owner.nonce == release.claim for release in releases):
        message = f"snapshot {folder} was claimed by this job, whose newer checkpoints have subsumed it: it is being deleted"
        return Ownership(owner.job_id, (Refusal.of(SnapshotClaimedError(message, path=folder, owner=owner.job_id)),))
    try:
        check_owner(owner, mine, folder)
    except SnapshotClaimedError:
        if claims:
            return (yield from _check_claimable(owner, folder, mine.created_ms))
        who = f"job {owner.job_id} owns the snapshot" if owner.job_id else "the snapshot is being deleted by its user"
        return Ownership(owner.job_id, notes=(f"{who}: it may be gone before it is restored",))
    return Ownership(owner.job_id)


def _check_claimable(owner: OwnerRecord, folder: str, now_ms: int) -> Flow[Ownership]:
    """Whether a snapshot that another job owns can be claimed: that job must need it no more."""
    try:
        yield from check_returnable(owner, folder, now_ms)
    except SnapshotClaimedError as error:
        return Ownership(owner.job_id, (Refusal.of(error),))
    note = f"job {owner.job_id}, which had claimed the snapshot, has no checkpoint since and needs it no more: it is given back"
    return Ownership(notes=(note,))


def _directory_nonce() -> Flow[str]:
    """Nonce of the state directory that relative paths are in; empty if they are in none."""
    content = yield from read_optional(DIRECTORY_FILE)
    return "" if content is None else decode_nonce(content)


def _check_foreign(folder: str, job_id: str, directory: str) -> Flow[None]:
    """Raise InvalidConfigError for a checkpoint in this job's own directory, by any name: the job owns it."""
    place = job_folder(folder)
    if place is None or place.job_id != job_id or not directory:
        return
    if (yield from rebase(_directory_nonce(), place.root)) == directory:
        raise InvalidConfigError(
            f"{folder} is a checkpoint of this job, which owns it: restore={str(place.checkpoint_id)!r}, without claim_mode=CLAIM",
            setting="claim_mode",
        )


def _leaves_folder(metadata: SnapshotMetadata) -> Iterator[bool]:
    """For each file, whether it is outside the snapshot's folder."""
    for handle, _, _ in snapshot_files(metadata):
        yield posixpath.normpath(handle.path).startswith("../")
