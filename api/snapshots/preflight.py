"""A preflight without a coordinator: a job's graph and a snapshot, read from storage; nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from holdfast.api.client import RestClient
from holdfast.api.settings import client_settings
from holdfast.barriers.jobgraph import Submission
from holdfast.coordinator.dispatcher.submit import identify_job, preflight
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.coordinator.restore.resolve import is_path
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.layout import CHECKPOINT_PREFIX, DIRECTORY_FILE, folder_of_snapshot
from holdfast.statebackends.state_processor.contents import Location, absolute_location
from holdfast.statebackends.state_processor.progress import note
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Operation, ReadFile, StatFile, Storage, run_flow


def is_in_directory(restore: str) -> bool:
    """Whether `restore` is `latest` or a checkpoint id, which only the job's own directory resolves."""
    return not is_path(restore)


def named_snapshot(location: Location) -> str:
    """Value of `Submission.restore` for a location: a relative path is resolved against the caller's working directory."""
    text = str(location)
    return text if is_in_directory(text) else absolute_location(location)


def preflight_offline(submission: Submission, state_dir: str | None) -> PreflightReport:
    """Check a submission against storage. Without a state directory the one around a checkpoint is used; a savepoint needs none,
    but then files outside it, and the job's own newer checkpoints, can't be found.

    Raises InvalidConfigError, JobExistsError, NotFoundError, StorageUnavailableError."""
    if state_dir is not None:
        storage = open_storage(state_dir)
        if storage.execute(StatFile(DIRECTORY_FILE)) is None:
            raise InvalidConfigError(f"{state_dir} is no state directory: it has no {DIRECTORY_FILE}", setting="state_dir")
        return _check(submission, storage, external=True)
    if submission.restore is None or is_in_directory(submission.restore):
        raise InvalidConfigError("which job's? Give --state-dir, or the path of the snapshot", setting="state_dir")
    folder = folder_of_snapshot(submission.restore)
    parent, _, name = folder.rpartition("/")
    above = parent.rpartition("/")[0]
    if name.startswith(CHECKPOINT_PREFIX) and open_storage(above or "/").execute(StatFile(DIRECTORY_FILE)) is not None:
        return _check(submission, open_storage(above or "/"), external=True)
    return _check(submission, open_storage(parent or "/"), external=False)


def _check(submission: Submission, storage: Storage, *, external: bool) -> PreflightReport:
    flow = preflight(identify_job(submission), submission, external=external, now_ms=int(time.time() * 1_000))
    return run_flow(flow, _NotedStorage(storage))


class _NotedStorage(RoutedStorage):
    """Reports reads to the tool's progress display: a check reads all files of a snapshot."""

    def execute(self, operation: Operation) -> Any:
        found = super().execute(operation)
        if isinstance(operation, ReadFile):
            note(size=len(found))
        return found


def preflight_online(submission: Submission, environment: Mapping[str, str], url: str, token: str | None) -> PreflightReport:
    """Ask the coordinator at a URL. Raises its errors, and ConnectionLostError."""
    settings = client_settings(environment, url=url, token=token)
    client = RestClient(settings.url, settings.token, authorities=settings.authorities)
    try:
        return client.preflight(submission)
    finally:
        client.close()
