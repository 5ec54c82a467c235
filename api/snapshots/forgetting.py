"""Forgets a key of a stopped job: a savepoint without it takes the place of the job's newest snapshot, and all others that may hold
it are deleted, and so are the job's records that quote texts of users: its history and the outcomes of its drills. The result is a
certificate.

Nothing is deleted before that savepoint is complete and was read back. No step is recorded but where the result goes: what is left
to do is derived from what storage holds, so that the same call goes on after a crash at any step. The key is never written, logged
or put into an error; the certificate and the audit log have a keyed hash of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.api.access.audit import Noted
from holdfast.api.access.audit_log import AuditLog
from holdfast.api.snapshots.maintenance import dispose_of
from holdfast.api.snapshots.snapshot import open_snapshot, target_of
from holdfast.api.version import VERSION
from holdfast.coordinator.dispatcher.submit import Starter, check_ended, erase_checkpoints, fence_ended
from holdfast.coordinator.drills.store import erase_drills
from holdfast.coordinator.ha.leadership import check_leadership
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedCheckpoint, RecordedJob
from holdfast.coordinator.ha.records import ForgettingRecord, LabelRecord, SavepointRecord, decode_record
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.history.store import erase_history
from holdfast.coordinator.ownership.claims import find_owner
from holdfast.coordinator.ownership.erasures import find_older
from holdfast.coordinator.ownership.forgotten import (
    RESULT_PREFIX,
    is_result_name,
    read_forgettings,
    record_forgetting,
    remove_forgetting,
)
from holdfast.coordinator.ownership.labels import Mark, remove_passing
from holdfast.statebackends.errors import (
    CorruptStateError,
    FencedError,
    ForgetError,
    HoldfastError,
    InvalidConfigError,
    NotFoundError,
    StorageUnavailableError,
)
from holdfast.statebackends.layout import JobPaths, parse_label_name
from holdfast.statebackends.local_recovery.copies import delete_copies
from holdfast.statebackends.serialization.key_texts import KeyOf
from holdfast.statebackends.snapshot.parts import named_files
from holdfast.statebackends.state_processor.contents import (
    Location,
    Place,
    StoredSnapshot,
    StoredState,
    absolute_location,
    place_of_snapshot,
)
from holdfast.statebackends.state_processor.erase import (
    Count,
    Counts,
    chosen_states,
    count_rows,
    erase_key,
    is_tables,
)
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import DeleteFolder, ListFiles, ListFolder, run_flow

FORMAT = "holdfast-forget-certificate"
"""Of the folder of a savepoint that a forgetting makes: `forgotten-<job>-<checkpoint>-<nonce>`; earlier versions gave the first
8 digits of the job's id."""
_ABOVE_ALL = 1 << 62
"""An id above those of all checkpoints."""

STATES_MAX = 100
AUDIT_SECONDS_MAX = 60.0
"""Longest that a call waits for its lines of the audit log: behind storage that is slow it reads the ends of a hundred chains
first."""

NOT_COVERED = {
    "sources": "what the job reads: a restart behind the snapshot, or an empty one, reads the key again if it is there; "
    "also the input that the job keeps in sources/",
    "output": "what sinks wrote, staged and committed",
    "copies": "copies of snapshots that were made elsewhere, and backups; give savepoints that no record names with --snapshot",
    "other_jobs": "branches of the job, and jobs of other names that were started from its snapshots: they have state of their "
    "own; forget the key there, too",
    "operator_lists": "lists of operators that are not keyed, which the result has as they were: records that wait for answers, "
    "what sinks have staged",
    "local_copies": "copies of state on the disks of workers' hosts, but those below --local here: workers delete them at the "
    "job's end, unless they were killed",
    "object_versions": "older versions of deleted objects, where a bucket keeps versions",
    "master_hooks": "states of master hooks, which only the hooks can read",
    "logs": "logs of processes, events that were sent, and lines of the audit log about earlier requests",
    "late_history": "records of the history that the job's last leader had still to write: some seconds behind the job's end, "
    "minutes while storage failed",
}
"""What no forgetting covers, and why."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased, what was verified, and what is not covered. As JSON it is the certificate."""

    format: str = FORMAT
    version: int = 1
    job_id: str
    states: tuple[tuple[str, str], ...]
    """(uid, state), `*` for all keyed states and timers of an operator."""
    key_hash: str
    """hmac-sha256 of the key's text by `salt`, hex. Who knows the salt can try keys."""
    salt: str
    began_ms: int
    completed_ms: int
    holdfast: str = VERSION
    is_complete: bool
    """Nothing of the job that this call reached holds the key in these states."""
    erased_at: int = 0
    """Id of the checkpoint at whose barrier the key left the running job: what comes behind it is not covered. 0: the job had
    ended."""
    result: str
    """Location of the snapshot to restore from. Of a running job: the checkpoint that was read back, which
    retention deletes as newer ones complete; a restore is from the newest."""
    erased_rows: dict[str, int]
    """`uid/state` -> rows of the key that the newest snapshot had; empty if an earlier call wrote the result."""
    deleted: tuple[str, ...]
    """Snapshots that this call deleted."""
    erased_records: dict[str, int]
    """Folder of the job's records that may quote a key -> files that this call deleted, all that were there; 0: there were none.
    One that is not here was to stay, and is in `kept` if it has files."""
    verified: dict[str, int]
    """Location of each snapshot that is left -> rows that were read of these states, none of them the key's."""
    remaining: tuple[str, ...]
    """`location: uid/state` of other states that hold the key still."""
    kept: dict[str, str]
    """Snapshots and records that could not be deleted, or were to stay -> why."""
    not_covered: dict[str, str]


def forget(
    state_dir: Location,
    job_id: str,
    states: Sequence[tuple[str, str]],
    key: str,
    *,
    to: Location,
    snapshots: Sequence[Location] = (),
    local: Sequence[str] = (),
    keep_history: bool = False,
) -> Certificate:
    """Forget a key of a stopped job. `to`: a directory for the savepoint without it; `snapshots`: further savepoints of the job;
    `local`: local directories of workers on this host, whose copies of the job are deleted, too. `keep_history`: the job's history
    stays, and the certificate is not complete if there is one.

    A coordinator may run beside it: no job that has a recorded end has a leader, and the job is fenced before anything is deleted.
    Of two calls for one job the later one goes on. Raises, with nothing written or deleted, ForgetError where the job has no
    snapshot, or one is another job's; JobExistsError for a job without a recorded end; NotFoundError for a state, or one of
    `snapshots`, that is not there; InvalidConfigError. Later: ForgetError where another call began meanwhile, InFlightStateError,
    CorruptStateError, StorageUnavailableError."""
    if not 1 <= len(states) <= STATES_MAX:
        raise InvalidConfigError(f"1..{STATES_MAX} states can be named, not {len(states)}", setting="state")
    root = absolute_location(state_dir)
    wanted, directory = tuple(dict.fromkeys(states)), absolute_location(to).rstrip("/")
    work = ForgetCall(root, job_id, wanted, key, directory, tuple(snapshots), tuple(local), keep_history=keep_history)
    return audited(root, work)


def audited(root: str, work: ForgetCall) -> Certificate:
    """Do it, with a line of the audit log when it begins, which is stored before anything is deleted, and when it ends."""
    audit = AuditLog(root, prunes=False, writer="a forgetting of a key began")

    def begin() -> None:
        audit.note(work.noted("begun", 202))
        if not audit.store(AUDIT_SECONDS_MAX):
            raise StorageUnavailableError(f"the audit log could not be written within {AUDIT_SECONDS_MAX:g} s: nothing was deleted")

    try:
        certificate = work.run(begin)
        audit.note(work.noted("complete" if certificate.is_complete else "incomplete", 200 if certificate.is_complete else 409))
    finally:
        audit.close(AUDIT_SECONDS_MAX)
    return certificate


class _Candidate(NamedTuple):
    """A snapshot that may be the job's newest; in the order of their age."""

    checkpoint_id: int
    epoch: int
    """Of the forgetting that made it: with the same id, it lacks what that of a lower one lacks. 0: its record is missing, as of
    earlier versions; -1: none has made it."""
    location: str


class ForgetCall:
    """One call. Steps: look, write the result, read it back, delete, look again."""

    def __init__(
        self,
        root: str,
        job_id: str,
        states: tuple[tuple[str, str], ...],
        key: str,
        directory: str,
        given: tuple[Location, ...],
        local: tuple[str, ...],
        *,
        keep_history: bool,
    ) -> None:
        self._root = root
        self._job_id = job_id
        self._states = states
        self._key = key
        self._directory = directory
        self._asked = self._given = tuple(absolute_location(location) for location in given)
        """Further savepoints: as they were named, and once they are judged, where they are."""
        self._local = local
        self._keep_history = keep_history
        self._paths = JobPaths(job_id)
        self._storage = RoutedStorage(open_storage(root))
        self._salt = secrets.token_hex(16)
        self._began_ms = _now_ms()
        self._deleted: list[str] = []
        self._unfinished: list[str] = []
        """Folders of results that another call had begun, and this one has deleted."""
        self._erased_records: dict[str, int] = {}
        self._kept: dict[str, str] = {}
        self._read: dict[str, Counts] = {}
        self._further: dict[str, set[tuple[str, str]]] = {}
        """By location: states with a table that another tool has put more into than rows."""
        self._erased_at = 0
        self._epoch: int | None = None
        """Of a job that has ended: what this call has fenced it with."""
        self._not_covered: Mapping[str, str] = NOT_COVERED

    @property
    def key_hash(self) -> str:
        return hmac.new(bytes.fromhex(self._salt), self._key.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()

    def noted(self, what: str, status: int) -> Noted:
        """Line of the audit log: the key's hash alone."""
        names = ",".join(f"{uid}/{state}" for uid, state in self._states)
        return Noted(f"FORGET {what} {self.key_hash} {names}"[:500], self._job_id, f"uid {os.getuid()}", "", "admin", "", status)

    def run(self, began: Callable[[], None]) -> Certificate:
        """`began`: called once it is known that there is something to do, before any state is written or deleted."""
        try:
            return self._run(began)
        except HoldfastError as error:
            if not self._is_fenced():
                raise
            message = f"another call or coordinator has begun to work on job {self._job_id}; nothing more is deleted: ask again"
            raise ForgetError(message, job=self._job_id) from error

    def _run(self, began: Callable[[], None]) -> Certificate:
        """Whatever is wrong with the request is found before the job is fenced: it must not end a call that has begun."""
        self._judge_places()
        self._look()
        began()
        starter = Starter(secrets.token_hex(16), "", "", _now_ms(), self._root)
        self._epoch = run_flow(fence_ended(self._job_id, starter), self._storage)
        job, source, result = self._look()
        erased: dict[str, int] = {}
        self._delete_unfinished()
        name = f"{RESULT_PREFIX}{self._job_id}-{source.metadata.checkpoint_id}-{secrets.token_hex(4)}" if result is None else ""
        self._record(starter, f"{self._directory}/{name}" if name else "")
        if result is None:
            result, erased = self._written(source, f"{self._directory}/{name}")
        self._delete(job, result, starter)
        self._remove_records(result.location)
        self._erase_records()
        for directory in self._local:
            for folder in delete_copies(directory, self._job_id):
                self._kept[folder] = "its worker lives still, or it can't be deleted"
        certificate = self._certificate(result, erased)
        self._check_alone()
        return certificate

    def _is_fenced(self) -> bool:
        try:
            self._check_alone()
        except HoldfastError as error:
            return isinstance(error, FencedError)
        return False

    def _check_alone(self) -> None:
        """Raise FencedError once another call has begun for a job that has ended: it may have read what this one is about to
        delete, and have written that anew."""
        if self._epoch is not None:
            run_flow(check_leadership(self._paths, self._epoch), self._storage)

    # ------------------------------------------------------------------------------------------------------------ judge

    def _judge_places(self) -> None:
        """Raise a typed error that names a place of the request which is not what it is given for."""
        for place in self._local:
            if not os.path.isdir(place):
                message = f"{place!r} is no folder of this host: give local directories of its workers"
                raise InvalidConfigError(message, setting="local", path=place)
        if "://" not in self._directory and os.path.exists(self._directory) and not os.path.isdir(self._directory):
            message = f"{self._directory} is no folder: the savepoint without the key can't be written there"
            raise InvalidConfigError(message, setting="to", path=self._directory)
        target_of(f"{self._directory}/{RESULT_PREFIX}")
        self._given = tuple(map(self._judged, self._asked))

    def _judged(self, place: str) -> str:
        """Location of a savepoint that was given. Raises for one that is none, unless a call to which it was given has begun: that
        may have deleted it."""
        if any(place in record.snapshots for record in self._records()):
            return place
        found = open_snapshot(place)
        self._check_own(found, place)
        return found.location

    # ------------------------------------------------------------------------------------------------------------- look

    def _look(self) -> tuple[RecordedJob, StoredSnapshot, StoredSnapshot | None]:
        """The job, its newest snapshot, and that one again if it needs no other in its place. Changes nothing."""
        job = run_flow(read_job(self._paths), self._storage)
        check_ended(job)
        source = self._newest(job)
        if source is None:
            message = f"job {self._job_id} has no snapshot, and {self._directory} none that a forgetting made"
            missing = self._missing()
            lost = f"; {', '.join(missing)}, which one made, is not there: if it was moved, give its place with --snapshot"
            raise ForgetError(f"{message}{lost if missing else ''}", job=self._job_id)
        judge_states(source, self._states, self._key)
        is_result = source.metadata.kind != "checkpoint" and self._is_clean(source)
        return job, source, source if is_result else None

    def _found(self, job: RecordedJob) -> list[str]:
        """Locations of the job's savepoints that are recorded or given, each once; results of earlier calls are among them."""
        recorded = [each.decision.folder for each in job.checkpoints.values() if isinstance(each.decision, SavepointRecord)]
        bases = [record.base for record in job.submissions.values() if record.base is not None]
        recorded += [base.folder for base in bases if base.claim and is_absolute_folder(base.folder)]
        recorded += [record.folder for record in self._records() if record.folder]
        places = [self._absolute(folder) for folder in recorded]
        return list(dict.fromkeys(place.rstrip("/") for place in (*places, *self._given)))

    def _records(self) -> tuple[ForgettingRecord, ...]:
        """Of calls for this job, newest first."""
        return run_flow(read_forgettings(self._paths), self._storage)

    def _missing(self) -> list[str]:
        """Results on record that are not where they were, though this call has not deleted them."""
        gone = {*self._deleted, *self._unfinished}
        places = [record.folder for record in self._records() if record.folder and record.folder not in gone]
        return [place for place in places if not self._has_files(place)]

    def _absolute(self, folder: str) -> str:
        return folder if is_absolute_folder(folder) else f"{self._root}/{folder}"

    def _newest(self, job: RecordedJob) -> StoredSnapshot | None:
        """The newest snapshot that is there, savepoints and results of earlier calls included. Raises CorruptStateError where that
        would be a result which has lost files: an older snapshot must not take its place unseen. ForgetError for another job's."""
        broken: StoredSnapshot | None = None
        whole: StoredSnapshot | None = None
        for candidate in sorted(self._candidates(job), reverse=True):
            found = self._opened(candidate.location)
            if found is not None and candidate.epoch >= 0 and not _has_all_files(found):
                broken = broken or found
            elif found is not None:
                whole = found
                break
        if whole is not None and whole.metadata.job_id != self._job_id:
            raise self._foreign(whole, whole.location)  # claimed, and all there is: what is made of it would be the other job's
        if broken is not None and (whole is None or broken.metadata.checkpoint_id > whole.metadata.checkpoint_id):
            raise CorruptStateError(f"{broken.location} is the job's newest snapshot, and lacks files", path=broken.location)
        return whole

    def _candidates(self, job: RecordedJob) -> list[_Candidate]:
        """Not those that another job has claimed. Results and what was given are opened, since no record has their ids."""
        completed = [each for each in job.with_fact(CheckpointFact.COMPLETED) if each.checkpoint_id not in job.given]
        points = [each for each in completed if each.is_recovery_point or isinstance(each.decision, SavepointRecord)]
        ids = {self._location(each).rstrip("/"): each.checkpoint_id for each in points}
        bases = [record.base for record in job.submissions.values() if record.base is not None and record.base.claim]
        ids |= {base.folder.rstrip("/"): base.checkpoint_id for base in bases if is_absolute_folder(base.folder)}
        given = [found for place in self._given if (found := self._opened(place)) is not None]
        ids |= {found.location: found.metadata.checkpoint_id for found in given}
        epochs = {record.folder: record.epoch for record in self._records()}
        results = {found.location: found.metadata.checkpoint_id for found in self._results()}
        others = [_Candidate(number, -1, place) for place, number in ids.items() if place not in results]
        return others + [_Candidate(number, epochs.get(place, 0), place) for place, number in results.items()]

    def _location(self, entry: RecordedCheckpoint) -> str:
        return self._absolute(entry.folder)

    def _opened(self, location: str) -> StoredSnapshot | None:
        """None where there is no snapshot. Raises ForgetError for one of another job."""
        try:
            found = open_snapshot(location)
        except NotFoundError:
            return None
        self._check_own(found, location)
        return found

    def _check_own(self, found: StoredSnapshot, location: str) -> None:
        """Raise ForgetError for another job's snapshot that this job has not claimed."""
        if found.metadata.job_id == self._job_id:
            return
        owner = run_flow(find_owner(found.location), self._storage)
        if owner is None or owner.job_id != self._job_id:
            raise self._foreign(found, location)

    def _foreign(self, found: StoredSnapshot, location: str) -> ForgetError:
        return ForgetError(f"{location} is a snapshot of job {found.metadata.job_id}", path=location, job=self._job_id)

    def _is_clean(self, snapshot: StoredSnapshot) -> bool:
        """Whether no file of a snapshot holds the key in these states, and no label that it has or had quotes it."""
        if self._is_quoted_beside(snapshot):
            return False
        if snapshot.metadata.in_flight or not all(is_tables(snapshot.operator(uid)) for uid in self._uids(snapshot)):
            return False
        chosen = {(state.operator.uid, state.meta.name) for state in self._wanted(snapshot)}
        if any(rows for which, (rows, _) in self._counted(snapshot).items() if which in chosen):
            return False
        return not chosen & self._further[snapshot.location]

    def _counted(self, snapshot: StoredSnapshot, known: Mapping[str, Count] | None = None) -> Counts:
        """Rows of all keyed states of a snapshot that is nobody's to change: every row is read, once in this call; not those of
        files in `known`, which are copies of what was read."""
        if snapshot.location not in self._read:
            states = (each for each in snapshot.states() if each.is_keyed)
            further = self._further[snapshot.location] = set()
            self._read[snapshot.location] = count_rows(snapshot, states, self._key, known or {}, further)
        return self._read[snapshot.location]

    def _is_quoted_beside(self, snapshot: StoredSnapshot) -> bool:
        """Whether a record of its labels quotes the key; removed labels are on record, too."""
        names: list[str] = snapshot.storage.execute(ListFolder(snapshot.folder))
        for path in (f"{snapshot.folder}/{name}" for name in names if parse_label_name(name) is not None):
            content: bytes = run_flow(read_whole(path), snapshot.storage)
            record = decode_record(LabelRecord, content, path)
            if any(_quotes(label, self._key) for label in record.labels):
                return True
        return False

    def _uids(self, snapshot: StoredSnapshot) -> list[str]:
        known = {operator.uid for operator in snapshot.metadata.operators}
        return [uid for uid in dict.fromkeys(uid for uid, _ in self._states) if uid in known]

    def _wanted(self, snapshot: StoredSnapshot) -> list[StoredState]:
        """The chosen states that a snapshot has: an older one may lack some."""
        found: list[StoredState] = []
        for which in self._states:
            try:
                found += chosen_states(snapshot, [which]).values()
            except (NotFoundError, InvalidConfigError):  # it has none of that name, or none that is keyed
                continue
        return found

    # ------------------------------------------------------------------------------------------------------------ write

    def _results(self) -> list[StoredSnapshot]:
        """Results of earlier calls that are there: those on record, wherever they are, and those in the directory of this call."""
        recorded = [record.folder for record in self._records() if record.folder]
        listed = [f"{self._directory}/{name}" for name in self._result_names()]
        found: list[StoredSnapshot] = []
        for place in dict.fromkeys((*recorded, *listed)):
            result = open_result(place, f"{self._root}/{self._paths.forgettings}")
            if result is not None and result.metadata.job_id == self._job_id:
                found.append(result)
        return found

    def _result_names(self) -> list[str]:
        """Folders in which results are, or were to be; those with the short form of the job's id may be another job's."""
        names: list[str] = open_storage(self._directory).execute(ListFolder(""))
        prefixes = (f"{RESULT_PREFIX}{self._job_id}-", f"{RESULT_PREFIX}{self._job_id[:8]}-")
        return [name.rstrip("/") for name in names if name.startswith(prefixes) and name.endswith("/")]

    def _delete_unfinished(self) -> None:
        """Folders without a snapshot, which a call that died has left: nothing reads them, and one that lives is fenced."""
        listed = [f"{self._directory}/{name}" for name in self._result_names() if is_result_name(name, self._job_id)]
        recorded = [record.folder for record in self._records() if record.folder and self._has_files(record.folder)]
        for folder in dict.fromkeys((*listed, *recorded)):
            if self._opened(folder) is None:
                self._check_alone()
                place = target_of(folder)
                place.storage.execute(DeleteFolder(place.folder))
                self._unfinished.append(folder)

    def _record(self, starter: Starter, folder: str) -> None:
        """Say where the result goes, and what was given, before either is touched. A call that came meanwhile has either read this
        or fenced this one, which then writes nothing."""
        assert self._epoch is not None
        if not folder and not self._given:
            return
        given = tuple(dict.fromkeys((*self._asked, *self._given)))
        record = ForgettingRecord(self._epoch, starter.nonce, folder, given, starter.now_ms)
        run_flow(record_forgetting(self._paths, record), self._storage)
        self._check_alone()

    def _written(self, source: StoredSnapshot, location: str) -> tuple[StoredSnapshot, dict[str, int]]:
        """A savepoint without the key, and the rows that it lacks. What is no copy of a table that was read is read back. Raises
        ForgetError if rows are amiss."""
        place: Place = target_of(location)
        written, before, known = erase_key(source, self._states, self._key, place.storage, place.folder)
        after = self._counted(written, known)
        wanted = {which: (0, total - rows) for which, (rows, total) in before.items()}
        wrong = sorted(f"{uid}/{state}" for uid, state in before if after.get((uid, state)) != wanted[uid, state])
        if wrong:
            raise ForgetError(f"{written.location} has not the rows that it must have: {', '.join(wrong)}", path=written.location)
        return written, {f"{uid}/{state}": rows for (uid, state), (rows, _) in before.items() if rows}

    # ----------------------------------------------------------------------------------------------------------- delete

    def _delete(self, job: RecordedJob, result: StoredSnapshot, starter: Starter) -> None:
        """Delete the job's checkpoints, and its savepoints that may hold the key, but the result. What stays is told by what is
        there, not by what was done."""
        assert self._epoch is not None
        completed = [each for each in job.with_fact(CheckpointFact.COMPLETED) if not isinstance(each.decision, SavepointRecord)]
        run_flow(remove_passing(self._paths, job, Mark(starter.nonce, starter.now_ms)), self._storage)
        run_flow(erase_checkpoints(self._job_id, starter, self._epoch), self._storage)
        left = run_flow(find_older(self._paths, _ABOVE_ALL), self._storage)
        self._kept |= {f"{self._root}/{path}": why or "it is there still: ask again" for path, why in left.items()}
        self._deleted += [self._location(each) for each in completed if self._location(each) not in self._kept]
        places = [*self._found(job), *(older.location for older in self._results())]
        for place in dict.fromkeys(places):
            if place != result.location:
                self._delete_savepoint(place)

    def _delete_savepoint(self, place: str) -> None:
        """Delete a savepoint unless it is clean; what a deletion that was cut off has left, too."""
        try:
            found = self._opened(place)
            if found is not None and self._is_clean(found):
                return
            is_there = found is not None or self._has_files(place)
        except CorruptStateError:
            is_there = True
        if not is_there:
            return
        self._check_alone()
        try:
            dispose_of(place)
        except HoldfastError as error:
            why = str(error)
            self._kept[place] = why if not _quotes(why, self._key) else "a label that quotes the key keeps it"
        else:
            self._deleted.append(place)
            if is_result_name(place.rpartition("/")[2], self._job_id):
                self._remove_records()

    def _has_files(self, place: str) -> bool:
        found = place_of_snapshot(place)
        files: list[str] = found.storage.execute(ListFiles(found.folder))
        return bool(files)

    def _remove_records(self, result: str = "") -> None:
        """Remove the records of results that this call has deleted. Behind the deletions, which `result` says, also those of calls
        without one: what they were given this call was given again, or it is nothing that it goes on with."""
        gone = {*self._deleted, *self._unfinished, *([""] if result else [])} - {result}
        for record in self._records():
            if record.epoch != self._epoch and record.folder in gone:
                run_flow(remove_forgetting(self._paths, record.epoch), self._storage)

    def _erase_records(self) -> None:
        """Delete records that quote what users' functions said: texts of failures, problems of drills, names of labels."""
        self._erased_records[f"{self._root}/{self._paths.drills}"] = run_flow(erase_drills(self._paths), self._storage)
        if not self._keep_history:
            self._erased_records[f"{self._root}/{self._paths.histories}"] = run_flow(erase_history(self._paths), self._storage)

    # ------------------------------------------------------------------------------------------------------ certificate

    def _look_at_records(self, job: RecordedJob) -> None:
        """Name the records that are left and may quote the key. Results are registers, which nothing can replace safely."""
        for folder in (self._paths.drills, self._paths.histories):
            if not self._storage.execute(ListFolder(folder)):
                continue
            is_wanted = self._keep_history and folder == self._paths.histories
            why = "it was to stay, and may quote the key in texts of failures"
            self._kept[f"{self._root}/{folder}"] = why if is_wanted else "it was written meanwhile: do it again"
        for number, result in sorted(job.results.items()):
            if _quotes(result.cause, self._key):
                path = f"{self._root}/{self._paths.result(number)}"
                self._kept[path] = 'its text of the failure quotes the key: empty its "cause" while no coordinator runs'

    def _certificate(self, result: StoredSnapshot, erased: dict[str, int]) -> Certificate:
        """Look again: every snapshot that is left is read whole, unless this call has read it before it deleted anything."""
        job = run_flow(read_job(self._paths), self._storage)
        self._look_at_records(job)
        verified: dict[str, int] = {}
        remaining: list[str] = []
        left = [*self._found(job), *(each.location for each in self._results()), result.location]
        for place in dict.fromkeys(left):
            if place in self._kept:
                continue
            if (found := self._opened(place)) is None:
                if place == result.location:
                    self._kept[place] = "it went while it was looked at: nothing is left to start from"
                continue
            chosen = {(state.operator.uid, state.meta.name) for state in self._wanted(found)}
            counts = self._counted(found)
            if any(counts.get(which, (0, 0))[0] for which in chosen):
                self._kept[place] = "it holds the key"
            elif place != result.location and not self._is_clean(found):
                self._kept[place] = "it came meanwhile, and may hold the key in a form that is not read: ask again"
            verified[place] = sum(total for which, (_, total) in counts.items() if which in chosen)
            others = [which for which, (rows, _) in counts.items() if rows and which not in chosen]
            remaining += [f"{place}: {uid}/{state}" for uid, state in others]
        return Certificate(
            job_id=self._job_id,
            states=self._states,
            key_hash=self.key_hash,
            salt=self._salt,
            began_ms=self._began_ms,
            completed_ms=_now_ms(),
            is_complete=not self._kept and bool(verified),
            result=result.location,
            erased_rows=erased,
            deleted=tuple(self._deleted),
            erased_records=self._erased_records,
            verified=verified,
            remaining=tuple(sorted(remaining)),
            kept=self._kept,
            erased_at=self._erased_at,
            not_covered={**self._not_covered, **_foreign_bases(job, self._found(job)), **self._elsewhere()},
        )


    def _elsewhere(self) -> dict[str, str]:
        missing = ", ".join(self._missing())
        what = f"results of earlier calls that are not there: deleted, or never begun; if one was moved, give its place: {missing}"
        return {"results": what} if missing else {}


def open_result(place: str, records: str) -> StoredSnapshot | None:
    """The result of an earlier call; None: it is not there. Raises ForgetError, which names the remedy, where that can't be told,
    since it may be the job's newest snapshot; CorruptStateError. `records`: the folder of the record that names it."""
    try:
        return open_snapshot(place)
    except NotFoundError:
        return None
    except StorageUnavailableError as error:
        raise ForgetError(
            f"{place}, which an earlier forgetting wrote, can't be read: {error.message}; give access to it or, if it is gone for "
            f"good, delete the file in {records} that names it",
            path=place,
        ) from error


def judge_states(snapshot: StoredSnapshot, states: Sequence[tuple[str, str]], key: str) -> None:
    """Raise NotFoundError or InvalidConfigError for a state that the snapshot does not have, that is not keyed, or that can't have
    the key."""
    for state in chosen_states(snapshot, states).values():
        KeyOf.parse(key, state.key_type())


def _has_all_files(snapshot: StoredSnapshot) -> bool:
    """Whether a snapshot has the files in its own folder that it names: two calls of earlier versions could leave one without."""
    names = set(snapshot.storage.execute(ListFolder(snapshot.folder)))
    own = (handle.path for handle, *_ in named_files(snapshot.metadata) if "/" not in handle.path)
    return names.issuperset(own)


def _foreign_bases(job: RecordedJob, own: Sequence[str]) -> dict[str, str]:
    """Snapshots of others that the job was started from: they are not its own."""
    bases = [record.base for record in job.submissions.values() if record.base is not None and not record.base.claim]
    folders = sorted({base.folder for base in bases if is_absolute_folder(base.folder)}.difference(own))
    return {"bases": f"snapshots that the job was started from and does not own: {', '.join(folders)}"} if folders else {}


def _quotes(text: str, key: str) -> bool:
    """Whether a text has the key as a word of its own, as it is or as Python or JSON show it. Of an empty key nothing is found."""
    shown = {key, repr(key)[1:-1], json.dumps(key)[1:-1]} - {""}
    return any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text) for each in shown)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
