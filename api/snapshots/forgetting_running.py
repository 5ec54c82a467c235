"""Forgets a key of a running job, behind the checkpoint at whose barrier it left the live state: reads that checkpoint whole, waits
until the job's leader has dropped all older ones, deletes savepoints and records as of a stopped job, and gives the certificate.

It deletes no checkpoint: that is the leader's. What is left of older ones makes the certificate incomplete."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from holdfast.api.snapshots.forgetting import NOT_COVERED, Certificate, ForgetCall, audited, judge_states, open_result
from holdfast.api.snapshots.snapshot import open_snapshot
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedJob
from holdfast.coordinator.ha.records import RestorePoint, SavepointRecord
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.erasures import PASSING, find_older
from holdfast.coordinator.ownership.forgotten import read_forgettings
from holdfast.statebackends.errors import CorruptStateError, ForgetError, NotFoundError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.state_processor.contents import Location, StoredSnapshot, absolute_location
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import run_flow

DROPS_SECONDS_MAX = 60.0
"""How long the leader may take to drop older checkpoints, and drills of them to end."""
_POLL_S = 0.2

NOT_COVERED_LIVE = {
    **NOT_COVERED,
    "sources": "what the job reads: a record of the key behind the barrier of checkpoint `erased_at` makes state anew; also the "
    "input that the job keeps in sources/",
    "in_flight": "later checkpoints and savepoints, which hold what came behind the barrier: state of the key that was made anew, "
    "and records in flight",
    "local_copies": "copies on hosts whose worker was killed: living workers delete those of older checkpoints; and files of the "
    "running attempt in working folders, until it ends",
    "late_history": "records of the history that the job's leader had still to write: some seconds, minutes while storage failed; "
    "and what it shows from memory",
    "late_files": "files that a worker was still writing for a checkpoint or savepoint that was aborted: the leader deletes them "
    "when it learns of them, `holdfast snapshot fsck` finds the rest",
}
"""What no forgetting of a running job covers, and why."""


def forget_running(
    state_dir: Location,
    job_id: str,
    states: Sequence[tuple[str, str]],
    key: str,
    checkpoint_id: int,
    *,
    keep_history: bool = False,
    drops_seconds_max: float = DROPS_SECONDS_MAX,
) -> Certificate:
    """The certificate of an erasure at the barrier of a completed checkpoint, which must stay meanwhile.

    Raises ForgetError where that checkpoint is gone or holds the key; NotFoundError, InvalidConfigError for a state that it does
    not have or that can't have the key; CorruptStateError, StorageUnavailableError."""
    root = absolute_location(state_dir)
    wanted = tuple(dict.fromkeys(states))
    return audited(root, _RunningForget(root, job_id, wanted, key, checkpoint_id, drops_seconds_max, keep_history=keep_history))


def judge_running(state_dir: Location, job_id: str, states: Sequence[tuple[str, str]], key: str) -> None:
    """Raise what `forget_running` would of the states and the key, by the newest checkpoint of the job's newest submission: before
    there is an erasure, behind which all older checkpoints go. Where there is none yet, nothing is known, and nothing goes.

    Raises NotFoundError, InvalidConfigError, StorageUnavailableError; ForgetError for a result of an earlier call that can't be
    read."""
    root, paths = absolute_location(state_dir), JobPaths(job_id)
    storage = RoutedStorage(open_storage(root))
    job = run_flow(read_job(paths), storage)
    for record in run_flow(read_forgettings(paths), storage):
        if record.folder:
            with contextlib.suppress(CorruptStateError):  # it is deleted, as it is
                open_result(record.folder, f"{root}/{paths.forgettings}")
    first = job.newest_submission.first_checkpoint_id if job.newest_submission is not None else 0
    points = [each for each in job.with_fact(CheckpointFact.COMPLETED) if each.is_recovery_point and each.checkpoint_id >= first]
    for point in sorted(points, key=lambda each: each.checkpoint_id, reverse=True):
        try:
            found = open_snapshot(point.folder if is_absolute_folder(point.folder) else f"{root}/{point.folder}")
        except (NotFoundError, CorruptStateError):  # retention has deleted it meanwhile, or it will be known by the erasure's own
            continue
        judge_states(found, states, key)
        return


class _RunningForget(ForgetCall):
    def __init__(
        self,
        root: str,
        job_id: str,
        states: tuple[tuple[str, str], ...],
        key: str,
        checkpoint_id: int,
        drops_seconds_max: float,
        *,
        keep_history: bool,
    ) -> None:
        super().__init__(root, job_id, states, key, "", (), (), keep_history=keep_history)
        self._erased_at = checkpoint_id
        self._not_covered = NOT_COVERED_LIVE
        self._drops_seconds_max = drops_seconds_max

    def _run(self, began: Callable[[], None]) -> Certificate:
        job = run_flow(read_job(self._paths), self._storage)
        result = self._erased(job)
        began()
        self._await_drops()
        self._delete_savepoints()
        self._erase_records()
        return self._certificate(result, {})

    def _delete_savepoints(self) -> None:
        """The job is read anew for each: it may have been submitted from one of them meanwhile."""
        looked_at = set[str]()
        while True:
            job = run_flow(read_job(self._paths), self._storage)
            place = next((each for each in self._found(job) if each not in looked_at), None)
            if place is None:
                return
            looked_at.add(place)
            if place == self._needed(job):
                self._kept[place] = "the job was started from it, and has no checkpoint of its own yet: ask again"
            else:
                self._delete_savepoint(place)

    def _needed(self, job: RecordedJob) -> str:
        """Location of what the newest submission would begin from again; empty: its job has completed a checkpoint since."""
        newest = job.newest_submission
        base = newest.base if newest is not None else None
        if newest is None or base is None:
            return ""
        points = job.with_fact(CheckpointFact.COMPLETED)
        if any(each.is_recovery_point and each.checkpoint_id >= newest.first_checkpoint_id for each in points):
            return ""
        return self._absolute(base.folder).rstrip("/")

    def _erased(self, job: RecordedJob) -> StoredSnapshot:
        entry = job.checkpoints.get(self._erased_at)
        found = self._opened(self._location(entry)) if entry is not None and entry.fact is CheckpointFact.COMPLETED else None
        if found is None:
            message = f"checkpoint {self._erased_at} of job {self._job_id} is gone: ask again"
            raise ForgetError(message, job=self._job_id)
        judge_states(found, self._states, self._key)
        if not self._is_clean(found):
            raise ForgetError(f"{found.location} holds the key, or its state is in a form that may: ask again", path=found.location)
        return found

    def _found(self, job: RecordedJob) -> list[str]:
        """Without savepoints that were cut behind the erasure."""
        later = self._later(job)
        return [place for place in super()._found(job) if place not in later]

    def _later(self, job: RecordedJob) -> frozenset[str]:
        """Locations of savepoints that were cut behind the erasure."""
        return frozenset(
            self._absolute(each.decision.folder).rstrip("/")
            for each in job.checkpoints.values()
            if isinstance(each.decision, SavepointRecord) and each.checkpoint_id > self._erased_at
        )

    def _results(self) -> list[StoredSnapshot]:
        """Those on record are found as savepoints are."""
        return []

    def _look_at_records(self, job: RecordedJob) -> None:
        """The leader goes on to write both: what it writes behind this is of later events, but for what `late_history` names."""
        super()._look_at_records(job)
        for folder in (self._paths.drills, self._paths.histories):
            if not (self._keep_history and folder == self._paths.histories):
                self._kept.pop(f"{self._root}/{folder}", None)

        for number, record in sorted(job.submissions.items()):
            if record.first_checkpoint_id > self._erased_at and not self._is_later(job, record.base):
                why = "the job was submitted anew meanwhile, from a snapshot that may hold the key: ask again"
                self._kept[f"{self._root}/{self._paths.submission(number)}"] = why

    def _is_later(self, job: RecordedJob, base: RestorePoint | None) -> bool:
        """Whether a submission starts empty, or from what the job itself made of the state without the key."""
        if base is None or (base.checkpoint_id >= self._erased_at and not is_absolute_folder(base.folder)):
            return True
        return self._absolute(base.folder).rstrip("/") in self._later(job)

    # ------------------------------------------------------------------------------------------------------------ older

    def _await_drops(self) -> None:
        """Until the leader has deleted all older checkpoints, those included that drills read, or the time is up: what is left then
        is named."""
        until_s = time.monotonic() + self._drops_seconds_max
        while left := run_flow(find_older(self._paths, self._erased_at), self._storage):
            if not PASSING.intersection(left.values()) or time.monotonic() >= until_s:
                self._kept |= {f"{self._root}/{path}": why or "it is still there: ask again" for path, why in left.items()}
                return
            time.sleep(_POLL_S)
