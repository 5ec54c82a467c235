"""Flows that take and check the leadership of a job, and the nonce of a state directory.

The higher epoch always wins. Leadership is neither a lease nor a lock: safety rests on the write-once registers of `store.py`,
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
"""How long clients may fail to reach a new leader: its machine may be busy, or its name about to change."""


@dataclass(frozen=True, slots=True)
class OtherLeader:
    """Leader of a job that this process does not lead, by the newest record that it has read."""

    epoch: int
    url: str
    """Empty if the record has none."""
    since_ms: int
    """When this process read the record first, monotonic."""

    def is_given_up(self, unreachable_epoch: int, now_ms: int) -> bool:
        """Whether this process should lead the job again: a client can't reach that leader, which had LEADER_GRACE_MS to start."""
        return unreachable_epoch >= self.epoch and now_ms - self.since_ms >= LEADER_GRACE_MS


def open_directory(nonce: str) -> Flow[str]:
    """The nonce of the state directory: the stored one, or the given one at its first use. Raises CorruptStateError if the stored
    one is malformed."""
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
    """Raise FencedError if a higher epoch exists. Epochs have no gaps: only the next one is looked up."""
    size: int | None = yield StatFile(paths.leader(epoch + 1))
    if size is not None:
        message = f"epoch {epoch + 1} leads job {paths.job_id}, not {epoch}"
        raise FencedError(message, job=paths.job_id, epoch=epoch, newer=epoch + 1)


def check_newest(job: RecordedJob, epoch: int) -> None:
    """Raise FencedError if a job that was read just now has a higher epoch. A leader that was stopped since it took its own then
    takes no ids from the living leader, and no workers."""
    newest = max(job.epochs, default=0)
    if newest > epoch:
        raise FencedError(f"epoch {newest} leads job {job.job_id}, not {epoch}", job=job.job_id, epoch=epoch, newer=newest)


def find_leader(paths: JobPaths, *, newer_than: int = 0) -> Flow[LeaderRecord | None]:
    """The newest leader's record; None if its epoch is not above `newer_than`, which costs one operation."""
    if newer_than > 0 and (yield StatFile(paths.leader(newer_than + 1))) is None:
        return None
    names: list[str] = yield ListFolder(paths.leaders)
    epoch = max((int(name) for name in names if name.isdecimal()), default=0)
    if epoch <= newer_than:
        return None
    content = yield from read_whole(paths.leader(epoch))
    return decode_record(LeaderRecord, content, paths.leader(epoch))
