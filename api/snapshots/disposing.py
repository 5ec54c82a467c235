"""`holdfast snapshot dispose`: delete a savepoint that nobody claims, and nothing else."""

from __future__ import annotations

import os
import secrets
import time

from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ownership.claims import dispose_snapshot
from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.state_processor.contents import Location, absolute_location
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import run_flow


def dispose_confined(folder: str) -> str:
    """As `dispose_of`, of a place that was judged in its one form. Raises NotFoundError if a link has taken it since."""
    if "://" not in folder and os.path.realpath(folder) != folder:
        raise NotFoundError(f"{folder} is a link by now: it holds no snapshot of its own", path=folder)
    return dispose_of(folder)


def dispose_of(location: Location) -> str:
    """Delete the savepoint at a path or URL; where it was.

    Raises SnapshotClaimedError where a job owns it, NotFoundError where there is none, StorageUnavailableError."""
    folder = absolute_location(location).rstrip("/").removesuffix("/_metadata")
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
