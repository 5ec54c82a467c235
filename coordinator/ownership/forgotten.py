"""Flows over the records of forgettings: where each has put its result. Without them a result in a directory that a later call does
not name is found by nobody, and an older snapshot, with keys that were forgotten, would pass for the job's newest.

A record is created before its result is begun, and goes behind it; so that one may tell of a result that is not there."""

from __future__ import annotations

from functools import partial

from holdfast.coordinator.ha.records import ForgettingRecord, decode_record, encode_record
from holdfast.coordinator.ha.store import put_once, read_optional
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.flows import read_in_group
from holdfast.statebackends.storage.port import DeleteFile, Flow, ListFolder

RESULT_PREFIX = "forgotten-"
"""Of the folders of results, in front of the job's id."""


def is_result_name(name: str, job_id: str) -> bool:
    """Whether a forgetting of a job may have given a folder this name."""
    return name.startswith(f"{RESULT_PREFIX}{job_id}-")


def record_forgetting(paths: JobPaths, record: ForgettingRecord) -> Flow[None]:
    """Store a record under its epoch, which is its call's alone. Raises HoldfastError as storage does."""
    yield from put_once(paths.forgetting(record.epoch), encode_record(record))


def read_forgettings(paths: JobPaths) -> Flow[tuple[ForgettingRecord, ...]]:
    """Records of a job, newest first. Raises CorruptStateError for one that can't be read: it may name the newest snapshot."""
    names: list[str] = yield ListFolder(paths.forgettings)
    numbers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    epochs = sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)
    found = yield from read_in_group([partial(_read, paths, paths.forgetting(epoch)) for epoch in epochs])
    return tuple(record for record in found if record is not None)


def _read(paths: JobPaths, path: str) -> Flow[ForgettingRecord | None]:
    """None: it was removed meanwhile."""
    content = yield from read_optional(path)
    if content is None:
        return None
    record = decode_record(ForgettingRecord, content, path)
    name = record.folder.rstrip("/").rpartition("/")[2]
    if path != paths.forgetting(record.epoch) or (name and not is_result_name(name, paths.job_id)):  # what it names may be deleted
        raise CorruptStateError(f"{path} is no record of a forgetting of this job", path=path)
    return record


def remove_forgetting(paths: JobPaths, epoch: int) -> Flow[None]:
    """Remove the record of a result that was deleted. Idempotent."""
    yield DeleteFile(paths.forgetting(epoch))
