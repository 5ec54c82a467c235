"""Who leads a job, and whether a state directory is one that others see too.

The higher epoch always wins. Nothing here is a lease or a lock: safety rests on the write-once registers of `store.py`,
which a stale leader loses."""

from __future__ import annotations

from coordinator.records import DIRECTORY_FILE, JobPaths, LeaderRecord, decode_record, encode_record
from coordinator.store import put_once
from statebackends.errors import FencedError
from statebackends.storage.operations import Flow, ListFolder, StatFile

EPOCH_TRIES_MAX = 1_000
"""Epochs that are tried in a row; only as many rivals at one moment could use them up."""


def open_directory(nonce: str) -> Flow[str]:
    """The nonce of the state directory: the one that stands, or the one given if this is its first use."""
    return (yield from put_once(DIRECTORY_FILE, nonce.encode())).decode().strip()


def become_leader(paths: JobPaths, record: LeaderRecord) -> Flow[int]:
    """Take the next epoch of a job, at least `record.epoch`; returns it. Older leaders are fenced from here on."""
    names: list[str] = yield ListFolder(paths.leaders)
    epoch = max([record.epoch - 1, *(int(name) for name in names if name.isdecimal())]) + 1
    for candidate in range(epoch, epoch + EPOCH_TRIES_MAX):
        path = paths.leader(candidate)
        mine = LeaderRecord(candidate, record.nonce, record.url, record.created_ms)
        standing = decode_record(LeaderRecord, (yield from put_once(path, encode_record(mine))), path)
        if standing.nonce == record.nonce:
            return candidate
    raise FencedError(f"no epoch of job {paths.job_id} could be taken", job=paths.job_id, epoch=epoch)


def check_leadership(paths: JobPaths, epoch: int) -> Flow[None]:
    """Raise FencedError if a higher epoch exists. Epochs have no gaps, so one look at the next one is enough."""
    size: int | None = yield StatFile(paths.leader(epoch + 1))
    if size is not None:
        message = f"epoch {epoch + 1} leads job {paths.job_id}, not {epoch}"
        raise FencedError(message, job=paths.job_id, epoch=epoch, newer=epoch + 1)
