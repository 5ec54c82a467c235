"""Offline maintenance of snapshots: `hf.fsck` finds the owner of every file of a state directory, files without owner, and sizes;
`holdfast snapshot dispose` deletes a savepoint that no job has claimed, and nothing else."""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path

from holdfast.api.settings import state_url
from holdfast.coordinator.ha.records import derive_job_id, is_job_id
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.store import list_jobs
from holdfast.coordinator.history.store import HistoryFaults, find_faults
from holdfast.coordinator.ownership.claims import dispose_snapshot
from holdfast.coordinator.ownership.fsck import FsckReport, FsckRequest, check_directory
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from holdfast.statebackends.layout import DIRECTORY_FILE, JobPaths, folder_of_snapshot
from holdfast.statebackends.state_processor.contents import Location, absolute_location
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFolder, StatFile, Storage, run_flow

SAFETY_AGE_MS = 3_600_000
REPAIR_AGE_MS_MIN = 60_000
"""A repair deletes no younger file: clocks differ, and a slow writer is not dead."""


@dataclass(frozen=True)
class DirectoryReport(FsckReport):
    """What `fsck` found, with the histories of jobs."""

    histories: Mapping[str, HistoryFaults] = field(default_factory=dict)
    """Job id -> what is wrong with its history, of jobs where something is. Damage is not clean; a gap is named alone, since a
    leader that is killed, or has to make room, leaves one."""

    @property
    def is_clean(self) -> bool:
        """Every file has an owner, or is young, every retained checkpoint has its files, and every history can be read."""
        return super().is_clean and not any(each.damage for each in self.histories.values())


def fsck(
    state_dir: Location,
    *,
    job: str | None = None,
    repair: bool = False,
    safety_age_ms: int = SAFETY_AGE_MS,
    checksums: bool = False,
) -> DirectoryReport:
    """Check every file of a state directory, or of one job (its id or its name).

    With `repair`, deletes files that have no owner and are older than the safety age, except those of jobs whose leader may be
    alive. Raises NotFoundError, InvalidConfigError, StorageUnavailableError."""
    if safety_age_ms < (REPAIR_AGE_MS_MIN if repair else 0):
        least = f"{REPAIR_AGE_MS_MIN} ms for a repair" if repair else "0"
        raise InvalidConfigError(f"the safety age must be at least {least}, not {safety_age_ms}", setting="safety_age_ms")
    storage = open_storage(os.fspath(state_dir))
    job_id = _find_job(storage, job)
    with ExitStack() as held:
        doubt = ""
        if repair:
            from holdfast.api.directory_guard import without_coordinator  # what leads jobs, which other tools do not load

            url = state_url(os.fspath(state_dir))
            doubt = (
                held.enter_context(without_coordinator(Path(storage.root)))
                if url is None
                else f"coordinators on other machines can't be seen from here, and {url} does not answer for them"
            )
        request = FsckRequest(job_id, safety_age_ms, checksums, repair, doubt, uuid.uuid4().hex)
        routed = RoutedStorage(storage)
        report = run_flow(check_directory(request, storage.root, int(time.time() * 1_000)), routed)
    job_ids = [job_id] if job_id is not None else run_flow(list_jobs(), routed)
    found = {each: run_flow(find_faults(JobPaths(each)), routed) for each in job_ids}
    told = {each: faults for each, faults in found.items() if faults.damage or faults.gaps}
    return DirectoryReport(**{each.name: getattr(report, each.name) for each in fields(report)}, histories=told)


def _find_job(storage: Storage, job: str | None) -> str | None:
    """Id of the job. Raises NotFoundError for a place that is no state directory, or an unknown job."""
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
    """As `dispose_of`, for a resolved and permitted path. Raises NotFoundError if it is a link by now."""
    if "://" not in folder and os.path.realpath(folder) != folder:
        raise NotFoundError(f"{folder} is a link by now: it holds no snapshot of its own", path=folder)
    return dispose_of(folder)


def dispose_of(location: Location) -> str:
    """Delete the savepoint at a path or URL and return its location.

    Raises SnapshotClaimedError where a job owns it, NotFoundError where there is none, StorageUnavailableError."""
    folder = folder_of_snapshot(absolute_location(location))
    if "://" not in folder:
        # Under another name a job's checkpoint would not be recognised, and a link is no folder. The real path of "" is the working
        # directory.
        folder = os.path.realpath(folder or "/").rstrip("/")
    parent = folder.rpartition("/")[0]
    if not parent:
        raise NotFoundError(f"{folder or '/'} holds no snapshot", path=folder)
    storage = RoutedStorage(open_storage(parent))
    run_flow(dispose_snapshot(folder, secrets.token_hex(16), time.time_ns() // 1_000_000), storage)
    return folder
