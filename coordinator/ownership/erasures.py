"""What is left of checkpoints before the one at whose barrier a key was erased: it may hold the key. A flow over storage alone, so
that a certificate rests on what is there, and not on what somebody did."""

from __future__ import annotations

from holdfast.coordinator.ha.records import SavepointRecord
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.labels import find_kept
from holdfast.statebackends.layout import JobPaths, parse_checkpoint_name, writer_of
from holdfast.statebackends.storage.port import Flow, ListFiles, ListFolder


def find_older(paths: JobPaths, checkpoint_id: int) -> Flow[dict[str, str]]:
    """Path of a folder of an older checkpoint, or of a file that one has shared -> what keeps it; empty: it is to go.

    Registers of savepoints stay: their state is in folders of their own."""
    job = yield from read_job(paths)
    labelled = yield from find_kept(job)
    names: list[str] = yield ListFolder(job.job_id)
    found: dict[str, str] = {}
    for name in names:
        number = parse_checkpoint_name(name.rstrip("/"))
        if number is None or number >= checkpoint_id:
            continue
        folder, entry = f"{job.job_id}/{name.rstrip('/')}", job.checkpoints.get(number)
        if entry is not None and isinstance(entry.decision, SavepointRecord):
            continue
        files: list[str] = yield ListFiles(folder)
        is_claim_alone = entry is not None and entry.decision is None and all(_is_record(file) for file in files)
        if files and not is_claim_alone:
            is_given = number in job.given or (entry is not None and bool(entry.owner))
            found[folder] = "another job has claimed it" if is_given else "a label keeps it" if number in labelled else ""
    held = "a checkpoint that is kept refers to it" if any(found.values()) else ""
    return found | {f"{paths.shared}/{name}": held for name in job.shared if (writer_of(name) or 0) < checkpoint_id}


def _is_record(path: str) -> bool:
    return path.rpartition("/")[2].startswith("_")
