"""Flows that check sinks which write elsewhere than the snapshot's job did: which of them begin a new log, and what becomes of the
rows that were staged for the old ones. They only read; committers act on the result.

First rule: a job writes to its own logs alone. Rows that another job staged are that job's to commit, whether it runs or not: if
it runs, a commit by others would end it at its next failure, and its rows would be written twice. Each checkpoint that a snapshot
has still to commit at another place therefore has one of the fates in `Fate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

import msgspec

from holdfast.barriers.jobgraph import JobGraph, OperatorDescription, SinkMode, Submission
from holdfast.barriers.sinks.log import (
    COMMITTABLES,
    COMMITTER_SUFFIX,
    FORK_PROPERTY,
    PLACE_PROPERTY,
    ROOT_FOLDER,
    CommitEntry,
    LogPosition,
    OwnerEntry,
    PendingCheckpoint,
    SinkFork,
    SinkPaths,
    decode_committer_state,
    decode_entry,
    place_of,
    place_of_staged,
    split_place,
)
from holdfast.coordinator.ha.recorded_job import RecordedCheckpoint, RecordedJob
from holdfast.coordinator.ha.records import RestorePoint, SavepointRecord, is_job_id
from holdfast.coordinator.ha.snapshots import find_missing_external, read_lists
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.restore.branches import find_left, muted_writers
from holdfast.coordinator.restore.preflight import Refusal
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import (
    CommittablesLeftError,
    CorruptStateError,
    HoldfastError,
    ObjectMissingError,
    OutputMayRepeatError,
    SinkMovedError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import OperatorState, external_places
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow, ListFolder

FILES_SHOWN_MAX = 20
"""Staged files that a message names; fields have all of them."""


class Fate(StrEnum):
    """Fate of rows that a snapshot has staged for a log that the job no longer writes to."""

    COMMITTED = "committed"
    """They are in that log already."""
    ENDED = "ended"
    """This job itself staged them: it commits them there before it begins the new log."""
    LEFT = "left"
    """Their job has no recorded end: it commits them, or writes them again, if it runs, or once it is started again."""
    REPLACED = "replaced"
    """Their job finished without them: it had failed over to an older checkpoint, and wrote their rows again."""
    ABANDONED = "abandoned"
    """No job is known to commit them."""


@dataclass(frozen=True, slots=True)
class MovedSink:
    """A sink that writes elsewhere than the snapshot's job did."""

    sink_id: str
    operator: str
    path: str
    stored: str | None
    """Path in the snapshot; None: not known."""
    stored_id: str | None = None
    """Sink id in the snapshot; None: not known."""


@dataclass(frozen=True, slots=True)
class SinkCheckResult:
    """Result of `check_sinks`."""

    moved: tuple[MovedSink, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    forks: Mapping[str, SinkFork] = field(default_factory=dict)
    """Uid of a committer -> the logs that it ends before its new one."""
    forgone: frozenset[str] = frozenset()
    """External files of the snapshot that this job does not need."""

    def applied_to(self, graph: JobGraph) -> JobGraph:
        """The graph to deploy: the fork of each committer comes from here alone, never from the submitted graph."""

        def with_fork(operator: OperatorDescription) -> OperatorDescription:
            properties = {name: value for name, value in operator.properties.items() if name != FORK_PROPERTY}
            if operator.uid in self.forks:
                properties[FORK_PROPERTY] = msgspec.to_builtins(self.forks[operator.uid])
            return operator if properties == operator.properties else msgspec.structs.replace(operator, properties=properties)

        return msgspec.structs.replace(
            graph,
            vertices=tuple(
                msgspec.structs.replace(vertex, operators=tuple(with_fork(operator) for operator in vertex.operators))
                for vertex in graph.vertices
            ),
        )


@dataclass(frozen=True, slots=True)
class Restore:
    """The restore whose sinks are checked."""

    job: RecordedJob
    submission: Submission
    base: RestorePoint
    metadata: SnapshotMetadata
    is_directory: bool
    """The storage is the job's state directory: it has the records of other jobs."""


@dataclass(frozen=True, slots=True)
class _Log:
    """State of one log in a snapshot."""

    known: LogPosition | None
    pending: tuple[PendingCheckpoint, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(file.name for each in self.pending for file in each.files)


@dataclass(frozen=True, slots=True)
class _LogContent:
    """Content of a log, read from the position in the snapshot on."""

    committed: frozenset[str] = frozenset()
    """Committed files among those that the snapshot has staged for it."""
    stands: bool = False
    """The log is the snapshot's, and no other file was committed to it since."""
    heir: str = ""
    """Id of the other job that has taken it over since, and alone commits to it; empty: none."""


@dataclass(frozen=True, slots=True)
class LogFates:
    """Fates of the rows staged for one log."""

    by_checkpoint: Mapping[int, Fate] = field(default_factory=dict)
    """Checkpoint id -> fate of its rows."""
    heir: str = ""
    """See `_LogContent`."""


def check_sinks(
    job: RecordedJob, submission: Submission, base: RestorePoint, metadata: SnapshotMetadata, *, is_directory: bool = True
) -> Flow[SinkCheckResult]:
    """Find the sinks of a submission that write elsewhere, and the consequences. Raises StorageUnavailableError."""
    restore = Restore(job, submission, base, metadata, is_directory)
    return (yield from examined(restore, _committers(submission.graph), _examine))


def check_muted(job: RecordedJob, submission: Submission, metadata: SnapshotMetadata) -> SinkCheckResult:
    """The muted sinks of a branch: what the snapshot has of them stays with the job that stored it, staged rows with it, whose
    files this job then does not need. Where that is the branch itself, which wrote before, nobody else commits them:
    refused unless they are to be given up."""
    stored = {operator.uid: operator for operator in metadata.operators}
    result = SinkCheckResult()
    for operator in muted_writers(submission.graph):
        left = [stored[uid] for uid in (operator.uid, operator.uid + COMMITTER_SUFFIX) if uid in stored]
        size, files = sum(each.size for each in left), frozenset[str]().union(*(_external_of(each) for each in left))
        is_own = metadata.job_id == job.job_id and operator.uid + COMMITTER_SUFFIX in stored
        refusals = (Refusal.of(_muted_error(operator)),) if is_own and submission.sinks is not SinkMode.ABANDON else ()
        fate = "given up" if is_own else f"left to job {metadata.job_id} ({metadata.job_name}), which alone commits what is staged"
        notes = (f"sink {operator.sink_id!r} is muted: its state ({size} bytes, {len(files)} staged files) is {fate}",)
        result = joined(result, SinkCheckResult(refusals=refusals, notes=notes if size or files else (), forgone=files))
    return result


def _muted_error(operator: OperatorDescription) -> SinkMovedError:
    return SinkMovedError(
        f"sink {operator.sink_id!r} (operator {operator.uid!r}) is muted, and this branch has written with it: go on as before, or "
        "mute it with sinks='abandon', which never commits what is staged",
        sink=str(operator.sink_id),
        path="",
        stored=None,
    )


def examined(
    restore: Restore,
    committers: Iterable[OperatorDescription],
    examine: Callable[[Restore, OperatorDescription, OperatorState], Flow[SinkCheckResult]],
) -> Flow[SinkCheckResult]:
    """Check each of these that the snapshot has state of."""
    stored = {operator.uid: operator for operator in restore.metadata.operators}
    result = SinkCheckResult()
    for operator in committers:
        if operator.uid in stored:
            try:
                found = yield from examine(restore, operator, stored[operator.uid])
            except CorruptStateError as error:
                found = SinkCheckResult(refusals=(Refusal.of(error),))
            result = joined(result, found)
    return result


def joined(one: SinkCheckResult, other: SinkCheckResult) -> SinkCheckResult:
    return SinkCheckResult(
        moved=one.moved + other.moved,
        refusals=one.refusals + other.refusals,
        notes=one.notes + other.notes,
        forks={**one.forks, **other.forks},
        forgone=one.forgone | other.forgone,
    )


def sink_committers(graph: JobGraph) -> Iterator[OperatorDescription]:
    for vertex in graph.vertices:
        for operator in vertex.operators:
            if operator.kind == "sink_committer" and operator.sink_id:
                yield operator


def _committers(graph: JobGraph) -> Iterator[OperatorDescription]:
    """Committers of sinks that say where they write."""
    return (operator for operator in sink_committers(graph) if operator.properties.get(PLACE_PROPERTY))


def _examine(restore: Restore, operator: OperatorDescription, state: OperatorState) -> Flow[SinkCheckResult]:
    """Check one sink; an empty result unless the snapshot has a log of it elsewhere."""
    path, sink_id = str(operator.properties[PLACE_PROPERTY]), str(operator.sink_id)
    here, unnamed = place_of(path, sink_id), _stored_place(restore.metadata, operator.uid, state)
    logs = yield from _read_logs(restore, operator.uid, state, unnamed)
    elsewhere = {place: log for place, log in logs.items() if place != here}
    begun = here in logs
    if not elsewhere:
        return SinkCheckResult()
    if not begun and (yield from _is_moved_along(here, elsewhere.values())):
        return SinkCheckResult()
    old = next(iter(elsewhere))
    moved = MovedSink(sink_id, operator.uid, path, *(split_place(old) if old else (None, None)))
    if not begun and restore.submission.sinks is SinkMode.KEEP:
        return SinkCheckResult((moved,), (Refusal.of(_moved_error(moved)),), forgone=_external_of(state))
    refusals, notes = [], []
    if not begun:
        notes.append(f"sink {sink_id!r} begins a new log at {path}: no row before checkpoint {restore.base.checkpoint_id} is in it")
        refusals += yield from _why_not_begun(restore, moved)
    ends = []
    for place, log in elsewhere.items():
        fates = yield from _find_fates(restore, place, log)
        if Fate.ENDED in fates.by_checkpoint.values():
            ends.append(place)
        where = split_place(place)[0] if place else "a place that is not known"
        explain(restore, moved, where, log.pending, fates, refusals, notes)
    forgone = _external_of(state, keep=(here, *ends))
    fork = SinkFork(unnamed, tuple(ends))
    return SinkCheckResult((moved,), tuple(Refusal.of(error) for error in refusals), tuple(notes), {operator.uid: fork}, forgone)


# ----------------------------------------------------------------------------------------------- what the snapshot says


def _stored_place(metadata: SnapshotMetadata, uid: str, state: OperatorState) -> str:
    """Place of the log that entries without a place belong to; empty: not known."""
    staged = (place_of_staged(external_places(entry)[0]) for part in state.subtasks for entry in part.external)
    return next(filter(None, staged), "") or _described_place(metadata, uid)


def _described_place(metadata: SnapshotMetadata, uid: str) -> str:
    if metadata.graph is None:
        return ""
    try:
        graph = msgspec.convert(metadata.graph, JobGraph)
    except UNDECODABLE:
        return ""
    found = (place_of(str(each.properties[PLACE_PROPERTY]), str(each.sink_id)) for each in _committers(graph) if each.uid == uid)
    return next(found, "")


def _read_logs(restore: Restore, uid: str, state: OperatorState, unnamed: str) -> Flow[dict[str, _Log]]:
    """Place -> state of the log there, in the order in which the committer stored them."""
    if not any(handle.state.name == COMMITTABLES for part in state.subtasks for handle in part.operator):
        return {}
    known: dict[str, LogPosition] = {}
    pending: dict[str, list[PendingCheckpoint]] = {}
    for entries in (yield from read_lists(state, COMMITTABLES, restore.base.folder)):
        for entry in entries:
            decoded = decode_committer_state(entry, uid)
            _check_place(decoded.place, uid)
            files = pending.setdefault(decoded.place or unnamed, [])
            if isinstance(decoded, LogPosition):
                known[decoded.place or unnamed] = decoded
            else:
                files.append(decoded)
    return {
        place: _Log(known.get(place), tuple(sorted(files, key=lambda each: each.checkpoint_id))) for place, files in pending.items()
    }


def _check_place(place: str, uid: str) -> None:
    """Raise CorruptStateError for a place that no committer writes: a snapshot is not trusted, and its places are read."""
    if place and (not is_absolute_folder(place) or f"/{ROOT_FOLDER}/" not in place or ".." in place.split("/") or "\0" in place):
        raise CorruptStateError(f"operator {uid}: {place!r} is not the place of a sink's log", operator=uid, reason="place")


def find_forgone(metadata: SnapshotMetadata, graph: JobGraph) -> frozenset[str]:
    """External files of a snapshot that a job does not need, by the forks in the graph that was deployed.

    Each attempt reads the decision there: a file that `check_sinks` passed over may be gone, or go at any time."""
    stored = {operator.uid: operator for operator in metadata.operators}
    found: set[str] = set()
    for uid in find_left(graph) & stored.keys():
        found |= _external_of(stored[uid])
    for operator in sink_committers(graph):
        fork = operator.properties.get(FORK_PROPERTY)
        if fork is not None and operator.uid in stored:
            here = place_of(str(operator.properties.get(PLACE_PROPERTY, "")), str(operator.sink_id))
            found |= _external_of(stored[operator.uid], keep=(here, *msgspec.convert(fork, SinkFork).ends))
    return frozenset(found)


def _external_of(state: OperatorState, keep: Iterable[str] = ()) -> frozenset[str]:
    """External files of a committer outside of these places."""
    entries = {entry for part in state.subtasks for entry in part.external}
    return frozenset(entry for entry in entries if place_of_staged(external_places(entry)[0]) not in set(keep))


# ------------------------------------------------------------------------------------------------------ what the logs say


def _log_file(place: str, sequence: int) -> str:
    path, sink_id = split_place(place)
    return f"{path.rstrip('/')}/{SinkPaths(sink_id).log(sequence)}"


def _is_moved_along(here: str, logs: Iterable[_Log]) -> Flow[bool]:
    """Whether one of these logs is now here: its folder was moved, and the sink with it."""
    for log in logs:
        if log.known is not None and (yield from _holds(here, log.known)):
            return True
    return False


def _holds(place: str, known: LogPosition) -> Flow[bool]:
    """Whether the log at a place is the one of a position."""
    if not place or known.next_sequence == 0:
        return False
    path = _log_file(place, known.next_sequence - 1)
    try:
        return bool(decode_entry((yield from read_whole(path)), path).owner_nonce == known.owner_nonce)
    except ObjectMissingError:
        return False


def _why_not_begun(restore: Restore, moved: MovedSink) -> Flow[list[HoldfastError]]:
    """Why no new log can begin at the sink's place; empty if one can."""
    here = place_of(moved.path, moved.sink_id)
    names = sorted(name for name in (yield ListFolder(f"{here}/log")) if name.endswith(".json"))
    if not names:
        return []
    path = f"{here}/log/{names[-1]}"
    last = decode_entry((yield from read_whole(path)), path)
    if last.job_id != restore.job.job_id:
        error: HoldfastError = SinkMovedError(
            f"sink {moved.sink_id!r} can't begin a log at {moved.path}: job {last.job_id} has one there. Give it another path",
            sink=moved.sink_id,
            path=moved.path,
            stored=moved.stored,
            owner=last.job_id,
        )
        return [error]
    has_committed = not isinstance(last, OwnerEntry) or last.sequence + 1 > last.owner
    if not has_committed or restore.submission.allow_output_repeat:
        return []
    return [
        OutputMayRepeatError(
            f"sink {moved.sink_id!r}: {moved.path} has rows of an earlier run of this job, and a new log would begin behind them. "
            "Give it another path, or add to them: allow_output_repeat=True",
            sink=moved.sink_id,
            sinks=[moved.sink_id],
            restored=restore.base.checkpoint_id,
            committed=0 if isinstance(last, OwnerEntry) else last.checkpoint_id,
        )
    ]


def _find_fates(restore: Restore, place: str, log: _Log) -> Flow[LogFates]:
    """Fates of the rows that a snapshot has staged for the log at a place."""
    if not log.pending:
        return LogFates()
    owner = log.known.owner_job if log.known is not None else restore.metadata.job_id
    try:
        found = yield from _read_log(place, log, owner)
    except StorageUnavailableError:
        if restore.submission.sinks is not SinkMode.ABANDON:
            raise
        found = _LogContent()
    left = [each for each in log.pending if not {file.name for file in each.files} <= found.committed]
    fate = Fate.COMMITTED if not left else (yield from _fate_of(restore, place, owner, left, found))
    return LogFates({each.checkpoint_id: fate if each in left else Fate.COMMITTED for each in log.pending}, found.heir)


def _read_log(place: str, log: _Log, owner: str) -> Flow[_LogContent]:
    """Content of the log at a place, which was the job's `owner`.

    Reading ends at a commit of other files: the snapshot's files can't be committed after it. After an entry of another owner they
    can, by that one: it was restored from this snapshot, or from a later one."""
    found: set[str] = set()
    heir = ""
    if not place or (log.known is not None and log.known.next_sequence and not (yield from _holds(place, log.known))):
        return _LogContent()
    sequence = log.known.next_sequence if log.known is not None else 0
    while not log.names <= found:
        path = _log_file(place, sequence)
        try:
            entry = decode_entry((yield from read_whole(path)), path)
        except ObjectMissingError:
            break
        if isinstance(entry, OwnerEntry):
            heir = entry.job_id if entry.job_id != owner else ""
        elif isinstance(entry, CommitEntry):
            committed = {file.name for file in entry.files}
            if not committed <= log.names:
                return _LogContent(frozenset(found), heir=heir)
            found |= committed
        sequence += 1
    return _LogContent(frozenset(found), stands=True, heir=heir)


def _fate_of(restore: Restore, place: str, owner: str, left: list[PendingCheckpoint], found: _LogContent) -> Flow[Fate]:
    """Fate of rows that are not committed, staged for a log that was the job's `owner`."""
    job, metadata = restore.job, restore.metadata
    if found.heir or owner != metadata.job_id or not is_job_id(owner):
        # The heir fences the former owner. Whether the heir will commit them is in no record here.
        return Fate.ABANDONED
    if owner == job.job_id:
        is_own = took(job, restore.base, metadata) and restore.base.checkpoint_id >= job.newest_completed
        return Fate.ENDED if is_own and found.stands and (yield from _are_staged(place, left)) else Fate.ABANDONED
    return (yield from fate_with(restore, owner))


def fate_with(restore: Restore, owner: str) -> Flow[Fate]:
    """Fate of rows, not committed, that another job `owner` had staged when it took the snapshot."""
    try:
        other = yield from read_job(JobPaths(owner))
    except (CorruptStateError, ObjectMissingError):
        return Fate.ABANDONED
    if not took(other, restore.base, restore.metadata):
        return Fate.ABANDONED
    if other.is_live:
        return Fate.LEFT
    return Fate.REPLACED if other.result is not None and other.result.state == "FINISHED" else Fate.ABANDONED


def took(job: RecordedJob, base: RestorePoint, metadata: SnapshotMetadata) -> bool:
    """Whether the job in this state directory took the snapshot, also if that was copied. A job of the same id in another state
    directory, which may run, is another job."""
    recorded: RecordedCheckpoint | None = job.checkpoints.get(base.checkpoint_id)
    if recorded is None or recorded.claim is None or recorded.claim.attempt != metadata.attempt:
        return False
    decision = recorded.decision
    timestamp_ms = getattr(decision, "timestamp_ms", None)
    folder = decision.folder if isinstance(decision, SavepointRecord) else recorded.folder
    return folder.rstrip("/") == base.folder.rstrip("/") or timestamp_ms == metadata.trigger_timestamp_ms


def _are_staged(place: str, left: Iterable[PendingCheckpoint]) -> Flow[bool]:
    path, sink_id = split_place(place)
    root, paths = path.rstrip("/"), SinkPaths(sink_id)
    files = [file.name for each in left for file in each.files]
    missing = yield from find_missing_external(f"{root}/{paths.staged(name)}|{root}/{paths.data(name)}" for name in files)
    return not missing


# -------------------------------------------------------------------------------------------------- refusals and notes


def _moved_error(moved: MovedSink) -> SinkMovedError:
    if moved.stored == split_place(place_of(moved.path, moved.sink_id))[0]:
        where = f"keeps a log of its own at {moved.path}, and the snapshot's is of sink_id {moved.stored_id!r}: name it so again"
    else:
        stored = moved.stored or "another place, which it does not name"
        where = f"writes to {moved.path}, and the snapshot's writes to {stored}: put it back there"
    return SinkMovedError(
        f"sink {moved.sink_id!r} (operator {moved.operator!r}) {where}, or begin a new log where it is with sinks='fork'",
        sink=moved.sink_id,
        path=moved.path,
        stored=moved.stored,
        stored_id=moved.stored_id,
    )


def explain(
    restore: Restore,
    moved: MovedSink,
    where: str,
    pending: Sequence[PendingCheckpoint],
    fates: LogFates,
    refusals: list[HoldfastError],
    notes: list[str],
) -> None:
    """Add refusals and notes on staged rows, fate by fate. `where`: names the place that they were staged for."""
    owner = f"job {restore.metadata.job_name!r} ({restore.metadata.job_id})"
    for fate in Fate:
        some = [each for each in pending if fates.by_checkpoint[each.checkpoint_id] is fate]
        if not some or fate is Fate.COMMITTED:
            continue
        what = f"sink {moved.sink_id!r}: {_counted(some)}, staged at {where}"
        match fate:
            case Fate.ENDED:
                notes.append(f"{what}, are committed there first")
            case Fate.LEFT:
                notes.append(
                    f"{what}, are left to {owner}, which has no end on record: it commits them there, or writes them again, if it "
                    "runs, or once it is started again; whether it runs now is not known here"
                )
            case Fate.REPLACED:
                notes.append(f"{what}, are left: {owner} has finished, and had written them again")
            case Fate.ABANDONED if restore.submission.sinks is SinkMode.ABANDON:
                notes.append(f"{what}, are ABANDONED, no job commits them: {_named(some)}")
            case Fate.ABANDONED if restore.is_directory:
                refusals.append(_left_error(moved, what, owner, where, some, fates.heir))
            case Fate.ABANDONED:
                whose = f"job {fates.heir}, which took that log over," if fates.heir else owner
                notes.append(f"{what}, are not committed: whether {whose} goes on to commit them its state directory tells")
            case _:
                assert_never(fate)


def _left_error(
    moved: MovedSink, what: str, owner: str, where: str, some: list[PendingCheckpoint], heir: str
) -> CommittablesLeftError:
    if heir:
        why = f"job {heir}, which took that log over and alone commits to it, has not yet. Let it run, with the sink at {where}"
        advice = "which commits them, or writes them again"
    else:
        why = f"{owner} is not known to go on and do it. Start that job from this snapshot once more, with the sink at {where}"
        advice = "which commits them"
    return CommittablesLeftError(
        f"{what}, would be lost: they are not committed, and {why}, {advice}; or give them up with sinks='abandon'",
        sink=moved.sink_id,
        path=where,
        rows=sum(each.rows for each in some),
        files=[file.name for each in some for file in each.files],
        checkpoints=[each.checkpoint_id for each in some],
    )


def _counted(some: list[PendingCheckpoint]) -> str:
    """`40 rows in 2 files of checkpoint 7`."""
    files = sum(len(each.files) for each in some)
    ids = ", ".join(str(each.checkpoint_id) for each in some)
    return f"{sum(each.rows for each in some)} rows in {files} file{'s' if files != 1 else ''} of checkpoint {ids}"


def _named(some: list[PendingCheckpoint]) -> str:
    names = [file.name for each in some for file in each.files]
    more = f" and {len(names) - FILES_SHOWN_MAX} more" if len(names) > FILES_SHOWN_MAX else ""
    return ", ".join(names[:FILES_SHOWN_MAX]) + more
