"""Flows over the drills of a job: a small file each, so that the newest are found at once, however long the job's history is,
whoever leads the job, and of jobs that nobody leads.

A file is created once and never changes; one that can't be read is named and left out. Nothing trusts them for safety."""

from __future__ import annotations

import msgspec

from holdfast.coordinator.drills.records import DrillView
from holdfast.coordinator.ha.store import put_once
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import ObjectMissingError
from holdfast.statebackends.layout import JobPaths, is_drill_name
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, Flow, ListFolder, ReadFile

DRILLS_KEPT = 20
"""Drills of one job that are kept, the newest."""
RECORD_BYTES_MAX = 64 << 10


def keep_drill(paths: JobPaths, view: DrillView) -> Flow[None]:
    """Store a drill that has ended, and delete the oldest beyond DRILLS_KEPT. Raises HoldfastError as storage does."""
    yield from put_once(paths.drill(view.started_ms, view.drill_id), msgspec.json.encode(view.facts()))
    for name in (yield from _names(paths))[DRILLS_KEPT:]:
        yield DeleteFile(f"{paths.drills}/{name}")


def read_drills(paths: JobPaths) -> Flow[tuple[tuple[DrillView, ...], tuple[str, ...]]]:
    """The drills of a job, newest first, and the paths of files that can't be read. Raises HoldfastError as storage does."""
    found: list[DrillView] = []
    damage: list[str] = []
    for name in (yield from _names(paths))[:DRILLS_KEPT]:
        path = f"{paths.drills}/{name}"
        try:
            content: bytes = yield ReadFile(path, 0, RECORD_BYTES_MAX + 1)
            view = decode_json(content, DrillView)
        except ObjectMissingError:
            continue  # deleted meanwhile, being the oldest
        except UNDECODABLE:
            damage.append(path)
            continue
        if paths.drill(view.started_ms, view.drill_id) == path:
            found.append(view)
        else:
            damage.append(path)
    return tuple(found), tuple(damage)


def erase_drills(paths: JobPaths) -> Flow[int]:
    """Delete every drill of a job on record, unreadable ones too; how many files went. Idempotent. Raises HoldfastError as storage
    does."""
    count: int = yield DeleteFolder(paths.drills)
    return count


def _names(paths: JobPaths) -> Flow[list[str]]:
    """Newest first: a name begins with the time, in as many digits as all times have."""
    names: list[str] = yield ListFolder(paths.drills)
    return sorted(filter(is_drill_name, names), reverse=True)
