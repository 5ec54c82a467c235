"""How a built job gets to run: protocols between the DSL, the Spark shell and the REST client.

`operators` may not import `api`; `holdfast.py` assembles a launcher from both and hands it to `Environment`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from barriers.jobgraph import ClaimMode, Submission, SubmissionAccepted
from operators.base import JobPlan


class CoordinatorClient(Protocol):
    """What a driver needs of the coordinator's REST service. Errors are the typed kinds of statebackends.errors."""

    url: str
    token: str | None

    def submit(self, submission: Submission) -> SubmissionAccepted: ...

    def job(self, job_id: str) -> dict[str, Any]:
        """GET /v1/jobs/:jobid, as Flink's dialect has it."""

    def job_state(self, job_id: str) -> str:
        """RUNNING, RESTARTING, FINISHED ..."""

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        """GET /v1/jobs/:jobid/checkpoints."""

    def workers(self, job_id: str) -> dict[str, Any]:
        """GET /v1/jobs/:jobid/workers: {"submission": n, "state": text, "attempt": n, "restarts": n, "failure": text or null,
        "last_failure": text or null, "late_dropped": n, "restored_local_bytes": n, "restored_remote_bytes": n,
        "workers": [{"slot", "pid", "nonce", "registered", "spawn", "timed_out", "fingerprint"}]}."""

    def trigger_checkpoint(self, job_id: str, *, timeout_s: float | None = None) -> int:
        """Trigger one checkpoint and wait until it is complete; its id. Raises CheckpointFailedError."""

    def savepoint(
        self, job_id: str, target: str | None = None, *, format_type: str = "CANONICAL", timeout_s: float | None = None
    ) -> str:
        """Take a savepoint; its location."""

    def stop(
        self,
        job_id: str,
        target: str | None = None,
        *,
        drain: bool = False,
        format_type: str = "CANONICAL",
        timeout_s: float | None = None,
    ) -> str:
        """Stop with a savepoint; its location."""

    def cancel(self, job_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What `Environment.execute` was asked for, beyond the plan."""

    job_id: str | None = None
    restore: str | None = None
    fresh: bool = False
    claim_mode: ClaimMode = ClaimMode.NO_CLAIM
    allow_non_restored_state: bool = False
    allow_output_repeat: bool = False
    coordinator_url: str | None = None
    """None: a coordinator is embedded in the driver's process."""
    token: str | None = None
    state_directory: str | None = None
    """Needed when the coordinator is embedded; else the coordinator says."""
    progress: bool = True


@dataclass(frozen=True, slots=True)
class Progress:
    """One look at a running job; rates are over the last interval."""

    state: str
    records_in: int
    records_out: int
    records_in_per_second: float
    records_out_per_second: float
    last_checkpoint_id: int | None
    last_checkpoint_duration_ms: int | None
    restarts: int


class JobHandle(Protocol):
    """A submitted job, seen from its driver."""

    job_id: str
    client: CoordinatorClient

    def wait(self, timeout_s: float | None = None) -> str:
        """Block until a terminal state and return it. Raises JobFailedError on FAILED, TimeoutError on timeout, and FencedError
        when a newer submission took the job over. KeyboardInterrupt ends the wait; the job goes on."""

    def state(self) -> str: ...

    def progress(self) -> Progress: ...

    def savepoint(self, target: str | None = None, *, format_type: str = "CANONICAL") -> str:
        """Take a savepoint; its location. `format_type`: CANONICAL for every state backend, NATIVE for this one's own files."""

    def stop(self, target: str | None = None, *, drain: bool = False, format_type: str = "CANONICAL") -> str:
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
