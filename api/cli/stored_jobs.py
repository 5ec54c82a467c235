"""Jobs and checkpoints of a state directory, read from its records: no coordinator is asked, and nothing is written.

The reader never leads, so it may run beside a coordinator, on any machine that sees the directory. Records don't have what only a
leader knows (which tasks run, how long a checkpoint took), nor whether a job without a recorded end still runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from holdfast.api.client import unreadable_job
from holdfast.api.flink import render_checkpoints, render_jobs
from holdfast.api.routes.history import history_query
from holdfast.coordinator.dispatcher.reading.queries import UNKNOWN_STATE, view_recorded_checkpoints, view_recorded_overview
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.store import list_jobs, read_job
from holdfast.coordinator.history.store import read_history
from holdfast.coordinator.ownership.cost import measure_cost
from holdfast.coordinator.ownership.labels import LabelView, Mark, add_label, check_users_label, read_labels, remove_label
from holdfast.coordinator.restore.branches import parent_of
from holdfast.coordinator.totals import derive_job_totals
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, InvalidConfigError, NotFoundError, ObjectMissingError
from holdfast.statebackends.layout import DIRECTORY_FILE, JobPaths
from holdfast.statebackends.state_processor.contents import absolute_location
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Flow, InParallel, StatFile, run_flow

READ_TRIES_MAX = 4
"""A coordinator beside us may delete what was listed just before; each try lists again."""


class StoredJobs:
    """Jobs of one state directory, each read once; the reading half of RestClient, with the same answers."""

    def __init__(self, state_dir: str | Path) -> None:
        """Raises InvalidConfigError for a place that is no state directory, StorageUnavailableError."""
        location = absolute_location(str(state_dir))
        storage = open_storage(location)
        if storage.execute(StatFile(DIRECTORY_FILE)) is None:
            message = f"{location} is no state directory: it has no {DIRECTORY_FILE}, and `holdfast serve` never ran on it"
            raise InvalidConfigError(message, setting="state_dir")
        self.location = storage.root
        self._storage = RoutedStorage(storage)

    def __repr__(self) -> str:
        return f"StoredJobs({self.location!r})"

    @cached_property
    def _found(self) -> dict[str, RecordedJob | HoldfastError]:
        return run_flow(_read_all(), self._storage)

    def jobs(self) -> list[dict[str, Any]]:
        """As in GET /v1/jobs/overview, newest first, with `failure` (cause of the failed end, or of the unreadable record) and
        `restarts`.

        The state of a job without a recorded end is UNKNOWN, that of one with damaged records UNREADABLE."""
        found = self._found
        answers = [
            unreadable_job(job_id, str(each)) if isinstance(each, HoldfastError) else _entry(each)
            for job_id, each in found.items()
        ]
        return sorted(answers, key=lambda job: (-int(job["start-time"]), str(job["jid"])))

    def unreadable(self) -> list[dict[str, Any]]:
        """None: they are among the jobs."""
        return []

    def totals(self) -> dict[str, dict[str, Any]]:
        """Rows that each ended job read, wrote and dropped as late, by job id, as recorded in its result."""
        found = {job_id: each for job_id, each in self._found.items() if isinstance(each, RecordedJob) and each.result is not None}
        return {job_id: _totals(job) for job_id, job in found.items()}

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        """As in GET /v1/jobs/:id/checkpoints. Raises NotFoundError, CorruptStateError."""
        job = run_flow(_read(job_id), self._storage)
        if not job.exists:
            raise NotFoundError(f"{self.location} has no job {job_id}", job=job_id)
        view = render_checkpoints.checkpoints(view_recorded_checkpoints(job), self.location)
        return view.model_dump(mode="json", by_alias=True)

    def cost(self, job_id: str) -> dict[str, Any]:
        """As GET /v1/jobs/:id/cost, without money."""
        found: dict[str, Any] = msgspec.to_builtins(
            run_flow(measure_cost(JobPaths(job_id), time.time_ns() // 1_000_000), self._storage)
        )
        return found

    def labels(self, job_id: str) -> dict[str, Any]:
        """As in GET /v1/jobs/:id/labels."""
        as_of_ms = time.time_ns() // 1_000_000
        found = run_flow(read_labels(JobPaths(job_id)), self._storage)
        return {"labels": [self._label(view) for view in found.labels], "damage": list(found.damage), "as_of_ms": as_of_ms}

    def add_label(self, job_id: str, checkpoint_id: int, label: str) -> dict[str, Any]:
        """As PUT /v1/jobs/:id/labels/:label, safe beside a coordinator, which finds the label when it would delete the snapshot."""
        flow = add_label(JobPaths(job_id), checkpoint_id, check_users_label(label), self._mark())
        return self._label(run_flow(flow, self._storage))

    def remove_label(self, job_id: str, label: str, checkpoint_id: int | None = None) -> list[dict[str, Any]]:
        """As DELETE /v1/jobs/:id/labels/:label; a coordinator's next recovery of the job deletes what is kept no longer."""
        removed = run_flow(remove_label(JobPaths(job_id), label, self._mark(), checkpoint_id), self._storage)
        return [self._label(view) for view in removed]

    def _mark(self) -> Mark:
        return Mark(secrets.token_hex(16), time.time_ns() // 1_000_000)

    def _label(self, view: LabelView) -> dict[str, Any]:
        location = view.folder if is_absolute_folder(view.folder) else f"{self.location.rstrip('/')}/{view.folder}"
        return {
            "label": view.label,
            "checkpoint_id": view.checkpoint_id,
            "kind": view.kind.value,
            "location": location,
            "created_ms": view.created_ms,
        }

    def history(
        self, job_id: str, *, after: str = "", kinds: Iterable[str] = (), limit: int = 100, newest: bool = False, before: str = ""
    ) -> dict[str, Any]:
        """As in GET /v1/jobs/:id/history. Raises NotFoundError."""
        query = history_query(after, ",".join(kinds), limit, newest=newest, before=before)
        page = run_flow(read_history(JobPaths(job_id), query, time.time_ns() // 1_000_000), self._storage)
        if not page.next and not run_flow(_read(job_id), self._storage).exists:
            raise NotFoundError(f"{self.location} has no job {job_id}", job=job_id)
        found: dict[str, Any] = msgspec.to_builtins(page)
        return {"records": found.pop("entries"), **found}


def _read_all() -> Flow[dict[str, RecordedJob | HoldfastError]]:
    job_ids = yield from list_jobs()
    found: Iterable[RecordedJob | HoldfastError] = yield InParallel([_try(job_id) for job_id in job_ids], [0] * len(job_ids))
    pairs = zip(job_ids, found, strict=True)
    return {job_id: each for job_id, each in pairs if isinstance(each, HoldfastError) or each.exists}


def _try(job_id: str) -> Flow[RecordedJob | HoldfastError]:
    try:
        return (yield from _read(job_id))
    except CorruptStateError as error:
        return error


def _read(job_id: str) -> Flow[RecordedJob]:
    for _ in range(READ_TRIES_MAX - 1):
        try:
            return (yield from read_job(JobPaths(job_id)))
        except ObjectMissingError:
            continue
    return (yield from read_job(JobPaths(job_id)))


def _entry(job: RecordedJob) -> dict[str, Any]:
    view = view_recorded_overview(job)
    is_over = view.state != UNKNOWN_STATE
    rendered = render_jobs.job_overview(view, now_ms=view.end_ms if is_over else view.last_modification_ms)
    attempt = job.newest_attempt
    return {
        **rendered.model_dump(mode="json", by_alias=True),
        "failure": (job.result.cause or None) if job.result is not None else None,
        "restarts": attempt.restarts if attempt is not None else 0,
    }


def _totals(job: RecordedJob) -> dict[str, Any]:
    record, result, attempt = job.newest_submission, job.result, job.newest_attempt
    assert record is not None
    assert result is not None
    return {
        "jid": job.job_id,
        "restarts": attempt.restarts if attempt is not None else 0,
        "restart_strategy": record.graph.config.restart.describe(),
        "restarts_at": -1,
        "backpressure": None,
        "branch_of": parent_of(record.submission),
        **msgspec.structs.asdict(derive_job_totals(record.graph, result.totals)),
    }
