"""`hf.fsck`: whose every file of a state directory is, what nothing owns, and what it all adds up to; offline.

`holdfast snapshot dispose`: delete a savepoint that nobody claims, and nothing else."""

from __future__ import annotations

import os
import secrets
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

from holdfast.api.directory_guard import without_coordinator
from holdfast.api.settings import state_url
from holdfast.coordinator.ha.records import derive_job_id, is_job_id
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ownership.claims import dispose_snapshot
from holdfast.coordinator.ownership.fsck import FsckReport, FsckRequest, check_directory
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from holdfast.statebackends.layout import DIRECTORY_FILE, folder_of_snapshot
from holdfast.statebackends.state_processor.contents import Location, absolute_location
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


def dispose_confined(folder: str) -> str:
    """As `dispose_of`, of a place that was judged in its one form. Raises NotFoundError if a link has taken it since."""
    if "://" not in folder and os.path.realpath(folder) != folder:
        raise NotFoundError(f"{folder} is a link by now: it holds no snapshot of its own", path=folder)
    return dispose_of(folder)


def dispose_of(location: Location) -> str:
    """Delete the savepoint at a path or URL; where it was.

    Raises SnapshotClaimedError where a job owns it, NotFoundError where there is none, StorageUnavailableError."""
    folder = folder_of_snapshot(absolute_location(location))
    if "://" not in folder:
        # By another name a job's checkpoint would not be known for one, and no link is a folder. The real path of "" is where we
        # happen to be.
        folder = os.path.realpath(folder or "/").rstrip("/")
    parent = folder.rpartition("/")[0]
    if not parent:
        raise NotFoundError(f"{folder or '/'} holds no snapshot", path=folder)
    storage = RoutedStorage(open_storage(parent))
    run_flow(dispose_snapshot(folder, secrets.token_hex(16), time.time_ns() // 1_000_000), storage)
    return folder
