"""`hf.fsck`: whose every file of a state directory is, what nothing owns, and what it all adds up to; offline."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

from holdfast.api.directory_guard import without_coordinator
from holdfast.api.settings import state_url
from holdfast.coordinator.ha.records import DIRECTORY_FILE, derive_job_id, is_job_id
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ownership.fsck import FsckReport, FsckRequest, check_directory
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from holdfast.statebackends.state_processor.contents import Location
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFolder, StatFile, Storage, run_flow

SAFETY_AGE_MS = 3_600_000
REPAIR_AGE_MS_MIN = 60_000
"""No repair deletes younger files: clocks differ, and writers that are slow are not dead."""


def fsck(
    state_dir: Location,
    *,
    job: str | None = None,
    repair: bool = False,
    safety_age_ms: int = SAFETY_AGE_MS,
    checksums: bool = False,
) -> FsckReport:
    """Look at every file of a state directory, or of one job (its id or its name).

    With `repair`, files are deleted that nothing owns and that are older than the safety age, but for jobs whose leader may be
    alive. Raises NotFoundError, InvalidConfigError, StorageUnavailableError."""
    if safety_age_ms < (REPAIR_AGE_MS_MIN if repair else 0):
        least = f"{REPAIR_AGE_MS_MIN} ms for a repair" if repair else "0"
        raise InvalidConfigError(f"the safety age must be at least {least}, not {safety_age_ms}", setting="safety_age_ms")
    storage = open_storage(os.fspath(state_dir))
    job_id = _find_job(storage, job)
    with ExitStack() as held:
        doubt = ""
        if repair:
            url = state_url(os.fspath(state_dir))
            doubt = (
                held.enter_context(without_coordinator(Path(storage.root)))
                if url is None
                else f"coordinators on other machines can't be seen from here, and {url} says nothing of them"
            )
        request = FsckRequest(job_id, safety_age_ms, checksums, repair, doubt, uuid.uuid4().hex)
        return run_flow(check_directory(request, storage.root, int(time.time() * 1_000)), RoutedStorage(storage))


def _find_job(storage: Storage, job: str | None) -> str | None:
    """Raises NotFoundError for a place that is no state directory, or a job that is not there."""
    names: list[str] = storage.execute(ListFolder(""))
    jobs = [name.rstrip("/") for name in names if name.endswith("/") and is_job_id(name.rstrip("/"))]
    if not jobs and storage.execute(StatFile(DIRECTORY_FILE)) is None:
        raise NotFoundError(f"{storage.root} is no state directory: it has no {DIRECTORY_FILE}, and no job", path=storage.root)
    if job is None:
        return None
    for candidate in (job, derive_job_id(job)):
        if candidate in jobs:
            return candidate
    raise NotFoundError(f"{storage.root} has no job {job!r}; it has: {', '.join(jobs) or 'none'}", job=job)
