"""Who leads a job, and whether a state directory is one that others see too.

The higher epoch always wins. Nothing here is a lease or a lock: safety rests on the write-once registers of `store.py`,
which a stale leader loses."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import LeaderRecord, decode_nonce, decode_record, encode_record
from holdfast.coordinator.ha.store import put_once
from holdfast.statebackends.errors import FencedError
from holdfast.statebackends.layout import DIRECTORY_FILE, JobPaths
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow, ListFolder, StatFile

EPOCH_TRIES_MAX = 1_000
"""Epochs that are tried in a row; only as many rivals at one moment could use them up."""

LEADER_GRACE_MS = 30_000
"""How long a new leader may be out of reach of its clients: on a busy machine, or behind a name that is only just being changed."""


@dataclass(frozen=True, slots=True)
class OtherLeader:
    """Who leads a job that this process does not lead, by the newest record that it has seen."""

    epoch: int
    url: str
    """Empty if the record names none."""
    since_ms: int
    """When this process learned of it, monotonic."""

    def is_given_up(self, unreachable_epoch: int, now_ms: int) -> bool:
        """Whether the job is to be led from here again: a client looked for this leader in vain, and it had time to begin."""
        return unreachable_epoch >= self.epoch and now_ms - self.since_ms >= LEADER_GRACE_MS


def open_directory(nonce: str) -> Flow[str]:
    """The nonce of the state directory: the one that stands, or the one given if this is its first use.

    Raises CorruptStateError if what stands there is none."""
    return decode_nonce((yield from put_once(DIRECTORY_FILE, nonce.encode())))


def become_leader(paths: JobPaths, record: LeaderRecord) -> Flow[int]:
    """Take the next epoch of a job, at least `record.epoch`; returns it. Older leaders are fenced from here on."""
    names: list[str] = yield ListFolder(paths.leaders)
    epoch = max([record.epoch - 1, *(int(name) for name in names if name.isdecimal())]) + 1
    for candidate in range(epoch, epoch + EPOCH_TRIES_MAX):
        path = paths.leader(candidate)
        mine = LeaderRecord(candidate, record.nonce, record.url, record.created_ms)
        existing = decode_record(LeaderRecord, (yield from put_once(path, encode_record(mine))), path)
        if existing.nonce == record.nonce:
            return candidate
    raise FencedError(f"no epoch of job {paths.job_id} could be taken", job=paths.job_id, epoch=epoch)


def check_leadership(paths: JobPaths, epoch: int) -> Flow[None]:
    """Raise FencedError if a higher epoch exists. Epochs have no gaps, so one look at the next one is enough."""
    size: int | None = yield StatFile(paths.leader(epoch + 1))
    if size is not None:
        message = f"epoch {epoch + 1} leads job {paths.job_id}, not {epoch}"
        raise FencedError(message, job=paths.job_id, epoch=epoch, newer=epoch + 1)


def check_newest(job: RecordedJob, epoch: int) -> None:
    """Raise FencedError if a job that was read just now has a higher epoch: who slept since it took its own neither takes ids from
    the leader that lives, nor is taken for it by workers that wait."""
    newest = max(job.epochs, default=0)
    if newest > epoch:
        raise FencedError(f"epoch {newest} leads job {job.job_id}, not {epoch}", job=job.job_id, epoch=epoch, newer=newest)


def find_leader(paths: JobPaths, *, newer_than: int = 0) -> Flow[LeaderRecord | None]:
    """The newest leader's record, or None if its epoch is not above one that is known: that costs a single look."""
    if newer_than > 0 and (yield StatFile(paths.leader(newer_than + 1))) is None:
        return None
    names: list[str] = yield ListFolder(paths.leaders)
    epoch = max((int(name) for name in names if name.isdecimal()), default=0)
    if epoch <= newer_than:
        return None
    content = yield from read_whole(paths.leader(epoch))
    return decode_record(LeaderRecord, content, paths.leader(epoch))
