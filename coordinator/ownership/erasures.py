"""What is left of checkpoints before the one at whose barrier a key was erased: it may hold the key. A flow over storage alone, so
that a certificate rests on what is there, and not on what somebody did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import SavepointRecord
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.labels import DRILLED, derive_keeping, find_keeping
from holdfast.statebackends.layout import JobPaths, parse_checkpoint_name, writer_of
from holdfast.statebackends.storage.port import Flow, ListFiles, ListFolder

GIVEN = "another job has claimed it"
HALF_DISPOSED = "its user began to dispose of it: finish that (holdfast snapshot dispose)"
SHARED_BY_DRILLED = "a checkpoint refers to it that a drill reads: ask again when the drill has ended"
PASSING = frozenset({"", DRILLED, SHARED_BY_DRILLED})
"""What `find_older` gives of what goes by itself, soon or when a drill has ended."""


def find_older(paths: JobPaths, checkpoint_id: int) -> Flow[dict[str, str]]:
    """Path of a folder of an older checkpoint, or of a file that one has shared -> what keeps it; empty: it is to go.

    Registers of savepoints stay: their state is in folders of their own."""
    job = yield from read_job(paths)
    labels = yield from find_keeping(job)
    names: list[str] = yield ListFolder(job.job_id)
    files: dict[int, list[str]] = {}
    for name in names:
        number = parse_checkpoint_name(name.rstrip("/"))
        if number is not None and number < checkpoint_id:
            files[number] = yield ListFiles(f"{job.job_id}/{name.rstrip('/')}")
    return derive_older(paths, job, labels, files, checkpoint_id)


def derive_older(
    paths: JobPaths,
    job: RecordedJob,
    labels: Mapping[int, Sequence[str]],
    files: Mapping[int, Sequence[str]],
    checkpoint_id: int,
) -> dict[str, str]:
    """As `find_older`. `labels`: those that keep ids, as `find_keeping` gives them; `files`: those in the folder of each older
    id."""
    found: dict[str, str] = {}
    for number, listed in files.items():
        entry = job.checkpoints.get(number)
        if entry is not None and isinstance(entry.decision, SavepointRecord):
            continue
        is_claim_alone = entry is not None and entry.decision is None and all(map(_is_record, listed))
        if listed and not is_claim_alone:
            labelled = derive_keeping(labels[number]) if number in labels else ""
            found[paths.checkpoint(number)] = _why_given(job, number) or labelled
    kept = set(found.values()) - {""}
    held = "" if not kept else SHARED_BY_DRILLED if kept == {DRILLED} else "a checkpoint that is kept refers to it"
    return found | {f"{paths.shared}/{name}": held for name in job.shared if (writer_of(name) or 0) < checkpoint_id}


def _why_given(job: RecordedJob, number: int) -> str:
    """Empty: the checkpoint is the job's own."""
    owner, entry = job.given.get(number), job.checkpoints.get(number)
    if owner is not None and not owner.job_id:
        return HALF_DISPOSED
    return GIVEN if owner is not None or (entry is not None and entry.owner) else ""


def _is_record(path: str) -> bool:
    return path.rpartition("/")[2].startswith("_")
