"""What a submission must be that starts a branch: another job beside the one of its savepoint, with output elsewhere. Pure, but for
the flow that finds a savepoint by the parent's own words for it.

A branch is a job like any other, with an id of its own from its name `<parent>@<branch>`. It starts from a savepoint, which no job
deletes; its first checkpoint is full and shares nothing with it (NO_CLAIM), so the parent is unharmed whatever becomes of it."""

from __future__ import annotations

import msgspec

from holdfast.barriers.exchange.guarantee import WRITER_KIND
from holdfast.barriers.jobgraph import (
    BRANCH_MARK,
    ClaimMode,
    JobGraph,
    OperatorDescription,
    Submission,
    check_branch_name,
)
from holdfast.barriers.sinks.log import COMMITTER_SUFFIX, MUTED_PROPERTY
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import derive_job_id
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.restore.resolve import LATEST_READABLE, is_path, resolve_snapshot
from holdfast.statebackends.errors import InvalidConfigError, JobExistsError, NotFoundError, RestoreError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.storage.port import Flow

_NOT_A_CHECKPOINT = (
    "that is its job's to delete, also if a label keeps it now; begin a branch with a savepoint (holdfast savepoint)"
)
"""Why a checkpoint, which a label may keep now, is no base of a branch, and what is."""


def branch_of(submission: Submission) -> str:
    """The branch that a submission is of; empty: it is none."""
    return "" if submission.branch is msgspec.UNSET else submission.branch


def parent_of(submission: Submission) -> str:
    """Name of the job that a submission is a branch of; empty: it is no branch."""
    branch = branch_of(submission)
    return submission.graph.name.removesuffix(f"{BRANCH_MARK}{branch}") if branch else ""


def check_branch(job: RecordedJob, submission: Submission) -> None:
    """Raise InvalidConfigError for what no branch can be, and for muted sinks of what is none; JobExistsError for one that is begun
    again."""
    _check_muted(submission)
    if submission.branch is msgspec.UNSET:
        return
    branch, name = submission.branch, submission.graph.name
    check_branch_name(branch)
    if not name.endswith(f"{BRANCH_MARK}{branch}") or len(name) <= len(branch) + len(BRANCH_MARK):
        message = f"the job of branch {branch!r} is named <parent>{BRANCH_MARK}{branch}, not {name!r}"
        raise InvalidConfigError(message, setting="branch")
    if submission.job_id is not None or submission.fresh or submission.claim_mode is ClaimMode.CLAIM:
        raise InvalidConfigError("branch= excludes job_id=, fresh=True and claim_mode=CLAIM", setting="branch")
    newest = job.newest_submission
    if newest is None and submission.restore is None:
        message = f"branch {branch!r} does not exist: begin it with restore= and a savepoint of its parent"
        raise InvalidConfigError(message, setting="restore")
    if newest is not None and submission.restore is not None:
        state = job.result.state if job.result is not None else "UNKNOWN"
        message = f"branch {branch!r} exists already, as job {job.job_id}: take another name, or go on with it without restore="
        raise JobExistsError(message, job_id=job.job_id, state=state)


def _check_muted(submission: Submission) -> None:
    """A muted sink leaves state of a snapshot aside: that is for writers of sinks, in a branch, and for nothing else."""
    for vertex in submission.graph.vertices:
        for operator in vertex.operators:
            said = operator.properties.get(MUTED_PROPERTY)
            is_muted = said is True and operator.kind == WRITER_KIND and bool(operator.sink_id)
            if said is not None and not (is_muted and branch_of(submission)):
                message = f"operator {operator.uid!r} is said to be muted: only the writer of a sink can be, in a branch"
                raise InvalidConfigError(message, setting="mute", operator=operator.uid)


def muted_writers(graph: JobGraph) -> tuple[OperatorDescription, ...]:
    """Writers of the muted sinks of a branch."""
    return tuple(
        operator for vertex in graph.vertices for operator in vertex.operators if operator.properties.get(MUTED_PROPERTY) is True
    )


def find_left(graph: JobGraph) -> frozenset[str]:
    """Uids of operators whose state in a snapshot is left to the job that stored it: those of muted sinks."""
    return frozenset(uid for writer in muted_writers(graph) for uid in (writer.uid, writer.uid + COMMITTER_SUFFIX))


def check_branch_base(submission: Submission, metadata: SnapshotMetadata, folder: str) -> RestoreError | None:
    """Why a branch can't begin with a snapshot; None: it can, or the submission begins no branch."""
    branch = branch_of(submission)
    if not branch or submission.restore is None:
        return None
    parent = parent_of(submission)
    if metadata.job_name != parent:
        message = f"{folder} is a snapshot of job {metadata.job_name!r}, and the branch is one of {parent!r}"
        return RestoreError(message, path=folder)
    if metadata.kind == "checkpoint":
        return RestoreError(
            f"{folder} is a checkpoint, and {_NOT_A_CHECKPOINT}",
            path=folder,
        )
    return None


def locate_branch_base(submission: Submission) -> Flow[Submission]:
    """The submission with the path of the savepoint that `restore` names by `latest`, an id or a label of the branch's parent; any
    other one as it is. The parent is the job of its name.

    Raises RestoreError where it names a checkpoint, or nothing; NotFoundError, InvalidConfigError, CorruptStateError."""
    restore, parent = submission.restore, parent_of(submission)
    if not parent or restore is None or is_path(restore):
        return submission
    if restore == LATEST_READABLE:
        message = f"a branch begins with a savepoint, and restore={restore!r} looks for a checkpoint: name one, or give its path"
        raise InvalidConfigError(message, setting="restore")
    job = yield from read_job(JobPaths(derive_job_id(parent)))
    if not job.exists:
        message = f"there is no job {parent!r} whose {restore!r} the branch could begin with: give the path of a savepoint"
        raise NotFoundError(message, job=job.job_id)
    graph = msgspec.structs.replace(submission.graph, name=parent)
    base = (yield from resolve_snapshot(job, msgspec.structs.replace(submission, graph=graph, branch=msgspec.UNSET))).base
    assert base is not None  # it was named
    if not base.kind.is_savepoint:
        raise RestoreError(
            f"restore={restore!r} is checkpoint {base.checkpoint_id} of job {parent!r}, and {_NOT_A_CHECKPOINT}",
            job_id=job.job_id,
        )
    return msgspec.structs.replace(submission, restore=base.folder)
