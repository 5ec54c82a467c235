"""The committer of a two-phase file sink: it commits to the sink's log.

log.py decides everything about names and races; `committing` places commits in the life of a subtask.

Once, after the restored commits, an attempt sweeps: it deletes staged files that nothing can refer to any more. Correctness never
depends on it. A file is deleted only if it belongs to this sink and job, to a lower attempt, is not in the restored committables,
and no snapshot other than the restored one can name it. The job's write-once registers answer the last: a snapshot with an id not
below the file's can have it in its committables if it was taken by the file's own attempt, or by one between that and this one,
which may have restored the file and not committed it yet; of such files this attempt's own snapshots have only what it restored. An
id that is undecided or unreadable protects the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.barriers.sinks.log import (
    COMMITTABLES,
    FORK_PROPERTY,
    MARKER_SUFFIX,
    CommitEntry,
    CommitterState,
    LogPosition,
    PendingCheckpoint,
    SinkFork,
    SinkPaths,
    StagedFile,
    decode_committer_state,
)
from holdfast.barriers.sinks.reading import read_log_flow
from holdfast.operators.base import OperatorContext, Output
from holdfast.operators.sinks.committing import TwoPhaseCommitter
from holdfast.operators.sinks.files.log import (
    Claimant,
    Committable,
    FileName,
    OpenLog,
    SinkSettings,
    commit_flow,
    committed_flow,
    end_log_flow,
    job_tag,
    open_log_flow,
    parse_name,
)
from holdfast.operators.sinks.files.merges import Merges
from holdfast.operators.sinks.files.merging import Appended, append_merge_flow
from holdfast.operators.sinks.files.summaries import Summaries
from holdfast.operators.sinks.files.writer import StagedFolder
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError, OutputMayRepeatError, UnsupportedVersionError
from holdfast.statebackends.layout import DecisionTag, JobPaths, decode_claim_attempt, decode_decision_tag, parse_checkpoint_name
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.state import OperatorListStateDescriptor, StateDescriptor
from holdfast.statebackends.storage.flows import delete_files, read_whole
from holdfast.statebackends.storage.port import Flow, ListFiles, ListFolder, Storage, copies_links, run_flow

DECLARED = OperatorListStateDescriptor(COMMITTABLES)


@dataclass(slots=True)
class _Ending:
    """A log of this job at another place, to which commits are still due."""

    known: LogPosition | None = None
    pending: dict[int, list[StagedFile]] = field(default_factory=dict)


class StagedFileCommitter(TwoPhaseCommitter[StagedFile]):
    """What writers send are names of staged files."""

    def _decode(self, committable: bytes) -> tuple[int, tuple[StagedFile, ...]]:
        decoded = decode_committable(committable, self.context.uid)
        return decoded.checkpoint_id, decoded.files

    def _rows_of(self, items: Sequence[StagedFile]) -> int:
        return sum(file.rows for file in items)


class FileCommitter(StagedFileCommitter):
    """Commits staged files to a log beside the published ones."""

    def __init__(self, settings: SinkSettings, arrow_schema: str) -> None:
        self._settings = settings
        self._arrow_schema = arrow_schema

    def check_fresh_start(self, beside: Storage | None = None) -> None:
        """`beside` as in `SinkSettings.storage`."""
        if self.allow_output_repeat:
            return
        settings = self._settings
        entries = run_flow(read_log_flow(SinkPaths(settings.sink_id)), settings.storage(beside))
        committed = [entry.checkpoint_id for entry in entries if isinstance(entry, CommitEntry)]
        if committed:
            raise OutputMayRepeatError(
                f"sink {settings.sink_id} has rows of an earlier run in {settings.path}, and a fresh start would write them again. "
                "Remove that folder or name another one; allow_output_repeat=True adds to it",
                sink=settings.sink_id,
                restored=0,
                committed=max(committed),
            )

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (DECLARED,)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._storage = self._settings.storage(context.storage)
        self._paths = SinkPaths(self._settings.sink_id, in_place=copies_links(self._storage))
        self._settled: dict[int, list[StagedFile]] = {}
        """Files committed in log entries after `_known`: a restore that reads the log from there must recognise them."""
        self._known: LogPosition | None = None
        self._endings: dict[str, _Ending] = {}
        """Place -> commits due there before our own log begins; they stay in state until they are done."""
        self._log: OpenLog | None = None
        self._summaries = Summaries(context, self._paths, self._storage)
        self._merges = Merges(context, self._settings.merging, self._paths, self._storage, self._commit_next)

    @property
    def _is_open(self) -> bool:
        return self._log is not None

    def initialize_state(self) -> None:
        fork = self._fork()
        for entry in self.context.operator_state.list_state(COMMITTABLES).entries:
            restored = decode_committer_state(entry, self.context.uid)
            place = restored.place or (fork.unnamed if fork is not None else "")
            if fork is None or place == self._settings.place:
                # Without a fork the place is not compared: opening the log finds whether it is the same one, moved with its folder.
                # With a fork, an unknown place is not of this log: the coordinator's compatibility check decided so.
                self._known = self._take(restored, self._pending, self._known)
            elif place in fork.ends:
                ending = self._endings.setdefault(place, _Ending())
                ending.known = self._take(restored, ending.pending, ending.known)

    def _fork(self) -> SinkFork | None:
        """Change of place that the coordinator decided; None: this sink goes on with its log."""
        stored = self.context.properties.get(FORK_PROPERTY)
        return None if stored is None else msgspec.convert(stored, SinkFork)

    @staticmethod
    def _take(
        restored: CommitterState, pending: dict[int, list[StagedFile]], known: LogPosition | None
    ) -> LogPosition | None:
        if isinstance(restored, LogPosition):
            return restored
        pending.setdefault(restored.checkpoint_id, []).extend(restored.files)
        return known

    def open(self) -> None:
        if self._endings:
            self._end_next()
            return
        flow = open_log_flow(self._paths, self._known, self._pending_checkpoints(), self._claimant())
        self._start(flow, self._storage, self._log_changed)

    def _end_next(self) -> None:
        """Commit what is due in another log, one log at a time, then open our own."""
        place, ending = next(iter(self._endings.items()))
        settings = self._settings.at(place)
        storage = settings.storage(self.context.storage)
        paths = SinkPaths(settings.sink_id, in_place=copies_links(storage))
        flow = end_log_flow(paths, ending.known, _checkpoints(ending.pending), self._claimant())

        def ended(result: None) -> None:
            del self._endings[place]
            self.open()

        self._start(flow, storage, ended)

    def _claimant(self) -> Claimant:
        context = self.context
        return Claimant(
            job_id=context.job_id,
            attempt=context.attempt,
            nonce=context.nonce,
            restored_checkpoint_id=context.restored_checkpoint_id,
            allow_output_repeat=self.allow_output_repeat,
            arrow_schema=self._arrow_schema,
            now_ms=context.now_ms(),
        )

    def _commit(self, due: tuple[int, ...]) -> None:
        assert self._log is not None
        first = due[0]
        checkpoint = PendingCheckpoint(first, tuple(self._pending[first]))

        def committed(log: OpenLog) -> None:
            self._settled[first] = self._pending.pop(first)
            self._count_commit()
            self._log_changed(log)

        self._start(commit_flow(self._paths, self._log, checkpoint, self._claimant()), self._storage, committed)

    def _commit_next(self) -> None:
        super()._commit_next()
        if self._busy or self._log is None or self._closed:
            return
        merging, merged = self._settings.merging, self._merges.ready(self._log.position.next_sequence)
        if merged is not None and merging is not None:
            flow = append_merge_flow(self._paths, self._log, merged, merging, self._claimant())
            self._start(flow, self._storage, self._merge_appended)
        else:
            self._merges.follow(self._log.position.next_sequence)

    def _merge_appended(self, outcome: Appended) -> None:
        self._merges.appended(outcome)
        self._log_changed(outcome.log)

    def _log_changed(self, log: OpenLog) -> None:
        self._log = log
        pending = {file.name for file in _files(self._pending_checkpoints())}
        if not log.committed & pending:
            # Otherwise the entries that committed them lie before this position: a job restored from a snapshot with both would not
            # read these entries again and would commit the files a second time.
            self._known = log.position
            self._settled.clear()
        self._summaries.follow(log.position.next_sequence)
        self._commit_next()

    def _sweep(self) -> None:
        kept = frozenset(file.name for files in self._pending.values() for file in files)
        stop = 0 if self._log is None else self._log.position.next_sequence

        def committed(first_checkpoint: int) -> Flow[frozenset[str]]:
            return committed_flow(self._paths, self.context.job_id, stop, first_checkpoint)

        has_folders = bool(self._settings.partition_by)
        Orphans(self.context, self._paths, self._storage, kept, has_folders=has_folders, committed=committed).sweep()

    def snapshot_state(self, checkpoint_id: int) -> None:
        entries = _entries(self._settings.place, self._known, {**self._settled, **self._pending})
        for place, ending in self._endings.items():
            entries += _entries(place, ending.known, ending.pending)
        self.context.operator_state.list_state(COMMITTABLES).update(msgspec.msgpack.encode(entry) for entry in entries)

    def _pending_checkpoints(self) -> tuple[PendingCheckpoint, ...]:
        return _checkpoints(self._pending)

    def external_files(self, checkpoint_id: int) -> tuple[str, ...]:
        """Absolute locations, since the sink's path is not below the state directory."""
        found = list(_locations(self._storage, self._paths, self._pending_checkpoints()))
        for place, ending in self._endings.items():
            settings = self._settings.at(place)
            storage = settings.storage(self.context.storage)
            found += _locations(storage, SinkPaths(settings.sink_id), _checkpoints(ending.pending))
        return tuple(found)

    def has_pending_work(self) -> bool:
        return bool(self._endings) or self._merges.is_busy or super().has_pending_work()


def _checkpoints(files: Mapping[int, list[StagedFile]]) -> tuple[PendingCheckpoint, ...]:
    return tuple(PendingCheckpoint(checkpoint, tuple(some)) for checkpoint, some in sorted(files.items()))


def _files(checkpoints: Iterable[PendingCheckpoint]) -> Iterable[StagedFile]:
    return (file for checkpoint in checkpoints for file in checkpoint.files)


def _entries(place: str, known: LogPosition | None, files: Mapping[int, list[StagedFile]]) -> list[CommitterState]:
    """Stored form of one log's state; an entry that names another place is of a log that was moved with its folder."""
    entries: list[CommitterState] = [] if known is None else [known]
    return [replace(entry, place=place) for entry in (*entries, *_checkpoints(files))]


def _locations(storage: Storage, paths: SinkPaths, checkpoints: Iterable[PendingCheckpoint]) -> Iterable[str]:
    root = storage.root.rstrip("/")
    for file in _files(checkpoints):
        # The file is staged now; a later commit leaves it at its final place only.
        yield f"{root}/{paths.staged(file.name)}|{root}/{paths.data(file.name)}"


def decode_committable(encoded: bytes, operator: str) -> Committable:
    committable = decode_msgpack(encoded, Committable)
    if committable.version != 1:
        raise UnsupportedVersionError(
            f"sink {operator}: committable version {committable.version}", version=committable.version, supported=1
        )
    return committable


R = TypeVar("R")


class Orphans:
    """One sweep: three flows, on the sink's storage, on the state directory, and on the sink's storage again."""

    def __init__(
        self,
        context: OperatorContext,
        paths: StagedFolder,
        storage: Storage,
        kept: frozenset[str],
        *,
        has_folders: bool = False,
        committed: Callable[[int], Flow[frozenset[str]]] | None = None,
    ) -> None:
        """`has_folders`: the files are in folders of partitions. `committed`: files that this job committed, of checkpoints from an
        id on; None: no file is where readers find it before it is committed."""
        self._context = context
        self._has_folders = has_folders
        self._committed = committed
        self._paths = paths
        self._storage = storage
        self._kept = kept

    def sweep(self) -> None:
        tag, attempt = job_tag(self._context.job_id), self._context.attempt
        flow = candidates_flow(self._paths, tag, attempt, self._kept, has_folders=self._has_folders)
        self._context.submit_flow(flow, self._storage, self._found)

    def _found(self, candidates: dict[str, FileName] | None, error: BaseException | None) -> None:
        # A failed sweep is repeated by the next attempt; the job goes on.
        if error is not None or not candidates:
            return
        first = min(name.first_checkpoint for name in candidates.values())
        flow = living_snapshots_flow(self._context.job_id, first, self._context.restored_checkpoint_id)

        def found(living: list[tuple[int, int | None]] | None, error: BaseException | None) -> None:
            if error is None and living is not None:
                attempt = self._context.attempt
                doomed = {path: name for path, name in candidates.items() if not is_protected(name, living, attempt)}
                self._context.submit_flow(self._delete(doomed), self._storage, lambda result, error: None)

        self._context.submit_flow(flow, self._context.storage, found)

    def _delete(self, doomed: Mapping[str, FileName]) -> Flow[int]:
        """What a crash left between the commit of a file in place and the deletion of its marker is committed: its marker goes."""
        marked = {path: name.first_checkpoint for path, name in doomed.items() if path.endswith(MARKER_SUFFIX)}
        if marked and self._committed is not None and isinstance(self._paths, SinkPaths):
            committed = yield from self._committed(min(marked.values()))
            names = {path.removesuffix(MARKER_SUFFIX) for path in marked} - committed
            yield from delete_files(self._paths.data(name) for name in sorted(names))
        return (yield from delete_flow(self._paths, doomed))


def candidates_flow(
    paths: StagedFolder, tag: str, attempt: int, kept: frozenset[str], *, has_folders: bool = False
) -> Flow[dict[str, FileName]]:
    """Staged files of lower attempts of this job that the restored state does not hold, and markers of such files."""
    found = {}
    folder = paths.staged_folder
    listed = [path.removeprefix(f"{folder}/") for path in (yield ListFiles(folder))] if has_folders else (yield ListFolder(folder))
    for text in listed:
        file = text.removesuffix(MARKER_SUFFIX)
        name = parse_name(file)
        if name is not None and name.job == tag and name.attempt < attempt and file not in kept:
            found[text] = name
    return found


def living_snapshots_flow(job_id: str, first: int, restored: int) -> Flow[list[tuple[int, int | None]]]:
    """(id, attempt that took it, or None if unknown) of every snapshot from `first` on that is not ABORTED, except the restored
    one."""
    living: list[tuple[int, int | None]] = []
    paths = JobPaths(job_id)
    for folder in (yield ListFolder(job_id)):
        number = parse_checkpoint_name(folder)
        if number is None or number < first or number == restored:
            continue
        if (yield from _read(paths.decision(number), decode_decision_tag, read_metadata_file)) == DecisionTag.ABORTED:
            continue
        living.append((number, (yield from _read(paths.claim(number), decode_claim_attempt))))
    return living


def _read(path: str, decode: Callable[[bytes], R], read: Callable[[str], Flow[bytes]] = read_whole) -> Flow[R | None]:
    """Decoded content of a register's file, or None if it is missing or can't be read."""
    try:
        return decode((yield from read(path)))
    except (ObjectMissingError, CorruptStateError, *UNDECODABLE):
        return None


def is_protected(name: FileName, living: Iterable[tuple[int, int | None]], sweeping: int) -> bool:
    """Whether one of these snapshots can name the file, which the attempt `sweeping` has not restored."""
    return any(
        number >= name.first_checkpoint and (attempt is None or name.attempt <= attempt < sweeping) for number, attempt in living
    )


def delete_flow(paths: StagedFolder, names: Iterable[str]) -> Flow[int]:
    """Delete staged files; returns how many were deleted."""
    return delete_files(paths.staged(name) for name in names)
