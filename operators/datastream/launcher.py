"""Protocols between the DSL, the Spark shell and the REST client, by which a built job is run.

`operators` may not import `api`; `holdfast.api.launch` assembles a launcher from both and hands it to its `Environment`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.barriers.jobgraph import ClaimMode, SinkMode, Submission, SubmissionAccepted, check_branch_name, check_restored
from holdfast.operators.base import JobPlan
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.state_processor.contents import Location


class CoordinatorClient(Protocol):
    """The coordinator's REST service as a driver needs it. Errors are classes of holdfast.statebackends.errors."""

    url: str
    token: str | None
    authorities: str | None
    """Certificates that the client trusts, PEM: its workers do, too. None: those of the system."""

    def submit(self, submission: Submission) -> SubmissionAccepted: ...

    def job(self, job_id: str) -> dict[str, Any]:
        """GET /v1/jobs/:jobid, in the form of Flink's REST API."""

    def job_state(self, job_id: str) -> str:
        """State of the job: RUNNING, RESTARTING, FINISHED ..."""

    def exceptions(self, job_id: str) -> dict[str, Any]:
        """GET /v1/jobs/:jobid/exceptions: the newest failures, each with its stack trace."""

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        """GET /v1/jobs/:jobid/checkpoints."""

    def workers(self, job_id: str) -> dict[str, Any]:
        """GET /v1/jobs/:jobid/workers: {"submission": n, "state": text, "attempt": n, "restarts": n, "failure": text or null,
        "last_failure": text or null, "epoch": n, "late_dropped": n, "rows_skipped": n, "restored_local_bytes": n,
        "restored_remote_bytes": n,
        "operators": [{"uid", "name", "kind", "records_in", "records_out", "late_dropped", "late_ms_max", "counters",
        "rows_skipped", "first_skipped"}],
        "workers": [{"slot", "pid", "nonce", "registered", "spawn", "timed_out", "fingerprint"}]}."""

    def trigger_checkpoint(self, job_id: str, *, unaligned: bool | None = None, timeout_s: float | None = None) -> int:
        """Trigger one checkpoint, wait until it is complete, and return its id. `unaligned`: whether its barriers may overtake;
        None: as the job's settings say. Raises CheckpointFailedError."""

    def savepoint(
        self, job_id: str, target: str | None = None, *, format_type: str = "CANONICAL", timeout_s: float | None = None
    ) -> str:
        """Take a savepoint and return its location."""

    def stop(
        self,
        job_id: str,
        target: str | None = None,
        *,
        drain: bool = False,
        format_type: str = "CANONICAL",
        timeout_s: float | None = None,
    ) -> str:
        """Stop with a savepoint and return its location."""

    def cancel(self, job_id: str) -> None: ...

    def leave(self, job_id: str, submission: int) -> None:
        """Tell that the driver takes its workers away, without retries."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Arguments of `Environment.execute` beside the plan."""

    job_id: str | None = None
    restore: str | None = None
    fresh: bool = False
    claim_mode: ClaimMode = ClaimMode.NO_CLAIM
    sinks: SinkMode = SinkMode.KEEP
    allow_non_restored_state: bool = False
    allow_output_repeat: bool = False
    without_channel_state: int | None = None
    branch: str | None = None
    """The job is a branch of this name; None: it is none."""
    coordinator_url: str | None = None
    """None: a coordinator is embedded in the driver's process."""
    token: str | None = None
    ca: str | os.PathLike[str] | None = None
    """File of the certificates that driver and workers trust, of a coordinator at a URL, PEM; None: HOLDFAST_CA, else those of the
    state directory, else the system's."""
    state_directory: str | os.PathLike[str] | None = None
    """Needed when the coordinator is embedded; a remote coordinator names its own."""
    progress: bool = True

    def check(self) -> None:
        """Raise InvalidConfigError for what no job can be started with, before anything is: looks at sinks, too, would otherwise
        say what follows from it (that output may repeat, of a job that is to forget what it is to restore)."""
        for name in ("fresh", "allow_non_restored_state", "allow_output_repeat"):
            if not isinstance(given := getattr(self, name), bool):
                raise InvalidConfigError(f"{name} must be True or False, got {given!r}", setting=name)
        if self.job_id is not None and not isinstance(self.job_id, str):
            raise InvalidConfigError(f"job_id must be a text of 32 hex digits, got {self.job_id!r}", setting="job_id")
        check_snapshot_id(self.without_channel_state)
        check_restored(self.restore, fresh=self.fresh)
        if self.branch is not None:
            check_branch_name(self.branch)


def check_snapshot_id(without_channel_state: object) -> None:
    """Raise InvalidConfigError unless it is None or can be the id of a snapshot."""
    given, name = without_channel_state, "without_channel_state"
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise InvalidConfigError(f"{name} must be the id of a snapshot, a whole number from 1 on, got {given!r}", setting=name)


@dataclass(frozen=True, slots=True)
class OperatorProgress:
    """Progress of one operator over all of its subtasks; totals as in `Progress`."""

    uid: str
    kind: str
    """`source`, `window`, `process`, `sink_writer` ..."""
    records_in: int = 0
    records_out: int = 0
    late_dropped: int = 0
    """Rows of `records_in` that were dropped as late."""
    late_ms_max: int = 0
    """Largest distance in event time between a late row and the watermark."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counters of the function: `ctx.counter(name)`."""
    rows_skipped: int = 0
    """Rows left out by on_error="skip"."""
    first_skipped: str = ""
    """Reason for the first skipped row."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a job at one moment; rates are over the last seconds.

    Totals are of this submission, from its start over all restarts, as last reported by its workers (every 2 s, and at their end).
    Each record counts once, however often it was read: counters are kept with every checkpoint, and a restart sets them back to
    those of the restored one. The totals of a FINISHED job therefore equal those of a run without failures. A job that was
    submitted again, also with `restore=`, begins at 0."""

    state: str
    records_in: int
    """Total: read by the sources."""
    records_out: int
    """Total: taken by the sinks, over all of them; committed, or to be committed with the next checkpoint."""
    records_in_per_second: float
    records_out_per_second: float
    last_checkpoint_id: int | None
    last_checkpoint_duration_ms: int | None
    restarts: int
    """Failovers since the submission's start, over restarts of the coordinator, too."""
    late_dropped: int = 0
    """Total: dropped as late by windows, over all operators."""
    rows_skipped: int = 0
    """Total: left out by on_error="skip", over all operators."""
    checkpoints: int = 0
    """Completed checkpoints and savepoints since the submission's start, or since this driver began to watch if that is later."""
    seconds: float = 0.0
    """Time from the start of the submission until its end."""
    operators: tuple[OperatorProgress, ...] = ()


class JobHandle(Protocol):
    """A submitted job, seen from its driver."""

    job_id: str
    client: CoordinatorClient

    def wait(self, timeout_s: float | None = None) -> str:
        """Block until a terminal state and return it. Raises JobFailedError on FAILED, TimeoutError on timeout, and FencedError
        when a newer submission took the job over. KeyboardInterrupt ends the wait; the job goes on."""

    def state(self) -> str:
        """State of the job at the coordinator: RUNNING, RESTARTING, FINISHED ..."""

    def progress(self) -> Progress:
        """Progress as last polled; sends no request."""

    def savepoint(self, target: Location | None = None, *, format_type: str = "CANONICAL") -> str:
        """Take a savepoint in a new folder below `target` and return its location. A relative target is below the working
        directory.

        `format_type`: CANONICAL is readable by every state backend, NATIVE has the files of the job's own backend."""

    def stop(self, target: Location | None = None, *, drain: bool = False, format_type: str = "CANONICAL") -> str:
        """Stop with a savepoint, wait for the end, return the savepoint's location."""

    def cancel(self) -> None:
        """Cancel and wait for the end."""

    def close(self) -> None:
        """Release slots, threads and an embedded coordinator; idempotent. The handle is its own context manager.

        A job that is not over is left: the next `execute` goes on from its newest checkpoint."""

    def __enter__(self) -> JobHandle: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...


class Launcher(Protocol):
    """Runs plans: on Spark in production, on local processes in tests and benchmarks."""

    def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle: ...
