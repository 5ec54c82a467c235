"""A snapshot opened where it is; a savepoint's pointer in its job is followed.

Nothing is unpickled and nothing is changed."""

from __future__ import annotations

import os

from holdfast.coordinator.ha.recorded_job import decode_decision
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ownership.claims import check_target
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError, ObjectMissingError
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.snapshot.parts import METADATA_NAME, read_metadata_file
from holdfast.statebackends.state_processor.contents import (
    Location,
    Place,
    StoredSnapshot,
    check_contents,
    place_of,
    place_of_snapshot,
)
from holdfast.statebackends.storage.port import ListFolder, run_flow


def open_snapshot(location: Location, *, follow: bool = True) -> StoredSnapshot:
    """The snapshot in a folder, or whose `_metadata` file `location` is; a savepoint's pointer in its job is followed.

    Raises NotFoundError, CorruptStateError, UnsupportedVersionError, StorageUnavailableError."""
    place = place_of_snapshot(location)
    try:
        content = run_flow(read_metadata_file(f"{place.folder}/{METADATA_NAME}"), place.storage)
    except ObjectMissingError as error:
        raise _no_snapshot(place) from error
    path = f"{place.location}/{METADATA_NAME}"
    match decode_decision(content, path):
        case AbortRecord(checkpoint_id=number, reason=reason, message=message):
            said = f"checkpoint {number} was aborted ({reason}){': ' + message if message else ''}: it has no state"
            raise NotFoundError(said, path=place.location, checkpoint=number)
        case SavepointRecord(folder=pointed) if follow:
            is_whole = "://" in pointed or pointed.startswith("/")
            return open_snapshot(pointed if is_whole else f"{place.storage.root}/{pointed}", follow=False)
        case _:
            snapshot = StoredSnapshot(decode_metadata(content, path), place.storage, place.folder)
            check_contents(snapshot)
            return snapshot


def target_of(location: Location) -> Place:
    """Where something new is to be written. Raises InvalidConfigError for what is no folder, or a job's."""
    place = place_of(location)
    if place.folder == METADATA_NAME:  # by its own path it would be taken for the file of that name in the folder above
        raise InvalidConfigError(f"{place.location} is the name of a snapshot's own file: name another folder", path=place.location)
    real = place.location if "://" in place.location else os.path.realpath(place.location)
    run_flow(check_target(real), RoutedStorage(place.storage))
    return place


def outside_of(source: str, location: Location) -> Place:
    """As `target_of`, for what is made of the snapshot at `source`, in which it must not lie."""
    place = target_of(location)
    if f"{_real(place.location)}/".startswith(f"{_real(source)}/"):
        raise InvalidConfigError(f"{place.location} lies in the snapshot itself", path=place.location)
    return place


def _real(location: str) -> str:
    """Without symbolic links."""
    return location if "://" in location else os.path.realpath(location)


def _no_snapshot(place: Place) -> NotFoundError:
    names = place.storage.execute(ListFolder(place.folder))
    found = f"; it holds {len(names)} other files, as a snapshot that was never completed does" if names else ""
    return NotFoundError(f"{place.location} holds no snapshot: there is no {METADATA_NAME} file{found}", path=place.location)
