"""What runs inside a Spark task: one worker, for as long as its job lives. Imported by Spark's Python workers from the zip."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.operators.worker.main import WorkerSpec, run_worker
from holdfast.operators.worker.working_folders import root_of_user

ROOT_NAME = "holdfast-workers"


@dataclass(frozen=True)
class WorkerTemplate:
    """A WorkerSpec without what only the task knows."""

    job_id: str
    submission: int
    coordinator_url: str
    token: str | None
    state_directory: str
    plan: bytes
    cancellation_timeout_ms: int
    advertised_host: str | None = None
    directory_nonce: str = ""
    spawn: int = 0
    launch_token: str = ""


@dataclass(frozen=True)
class WorkerReport:
    """What a task returns when its worker left by itself."""

    reason: str
    respawn: bool
    superseded: bool = False
    """A newer submission runs the job."""


def worker_task(template: WorkerTemplate, slot: int) -> Callable[[Iterator[int]], Iterator[WorkerReport]]:
    """The function of a one-partition Spark job. The slot travels in the closure: the partition's number is always 0."""

    def run(_: Iterator[int]) -> Iterator[WorkerReport]:
        from pyspark import TaskContext

        context = TaskContext.get()
        spec = WorkerSpec(
            job_id=template.job_id,
            slot=slot,
            submission=template.submission,
            task_attempt=0 if context is None else int(context.taskAttemptId()),
            coordinator_url=template.coordinator_url,
            token=template.token,
            state_directory=template.state_directory,
            plan=template.plan,
            local_directory=local_directory(),
            cancellation_timeout_ms=template.cancellation_timeout_ms,
            advertised_host=template.advertised_host,
            directory_nonce=template.directory_nonce,
            spawn=template.spawn,
            launch_token=template.launch_token,
        )
        left = run_worker(spec)
        yield WorkerReport(left.reason, left.respawn, left.superseded)

    return run


def local_directory() -> str:
    """I/O. Local disk of this executor: Spark's own, which it deletes when the executor ends, else the system's. Raises OSError."""
    folders = [folder for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if folder]
    return os.path.join(folders[0], ROOT_NAME) if folders else root_of_user(tempfile.gettempdir(), ROOT_NAME)
