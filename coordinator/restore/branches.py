"""CORE: what a submission must be that starts a branch: another job beside the one of its savepoint, with output elsewhere.

A branch is a job like any other, with an id of its own from its name `<parent>@<branch>`. It starts from a savepoint, which no job
deletes; its first checkpoint is full and shares nothing with it (NO_CLAIM), so the parent is unharmed whatever becomes of it."""

from __future__ import annotations

import re

import msgspec

from holdfast.barriers.jobgraph import BRANCH_MARK, ClaimMode, Submission
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.statebackends.errors import InvalidConfigError, JobExistsError, RestoreError
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def branch_of(submission: Submission) -> str:
    """The branch that a submission is of; empty: it is none."""
    return "" if submission.branch is msgspec.UNSET else submission.branch


def check_branch(job: RecordedJob, submission: Submission) -> None:
    """Raise InvalidConfigError for what no branch can be; JobExistsError for one that is begun again."""
    if submission.branch is msgspec.UNSET:
        return
    branch, name = submission.branch, submission.graph.name
    if _NAME.fullmatch(branch) is None:
        raise InvalidConfigError("the name of a branch is 1..64 letters, digits, '.', '_' and '-'", setting="branch")
    if not name.endswith(f"{BRANCH_MARK}{branch}") or len(name) <= len(branch) + len(BRANCH_MARK):
        message = f"the job of branch {branch!r} is named <parent>{BRANCH_MARK}{branch}, not {name!r}"
        raise InvalidConfigError(message, setting="branch")
    if submission.job_id is not None or submission.fresh or submission.claim_mode is ClaimMode.CLAIM:
        raise InvalidConfigError("branch= excludes job_id=, fresh=True and claim_mode=CLAIM", setting="branch")
    newest = job.newest_submission
    if newest is None and submission.restore is None:
        message = f"branch {branch!r} does not exist: begin it with restore= and the path of a savepoint"
        raise InvalidConfigError(message, setting="restore")
    if newest is not None and submission.restore is not None:
        state = job.result.state if job.result is not None else "UNKNOWN"
        message = f"branch {branch!r} exists already, as job {job.job_id}: take another name, or go on with it without restore="
        raise JobExistsError(message, job_id=job.job_id, state=state)


def check_branch_base(submission: Submission, metadata: SnapshotMetadata, folder: str) -> RestoreError | None:
    """Why a branch can't begin with a snapshot; None: it can, or the submission begins no branch."""
    branch = branch_of(submission)
    if not branch or submission.restore is None:
        return None
    parent = submission.graph.name.removesuffix(f"{BRANCH_MARK}{branch}")
    if metadata.job_name != parent:
        message = f"{folder} is a snapshot of job {metadata.job_name!r}, and the branch is one of {parent!r}"
        return RestoreError(message, path=folder)
    if metadata.kind == "checkpoint":
        return RestoreError(
            f"{folder} is a checkpoint, which its job deletes as it goes on: begin a branch with a savepoint (holdfast savepoint)",
            path=folder,
        )
    return None
