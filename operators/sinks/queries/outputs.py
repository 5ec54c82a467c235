"""CORE: where the batches of a stock query go: a `CommitTarget`, by the flows of a job's committer, or the log of a file sink.

Records of the query lie in its checkpoint folder, files and log of a file sink elsewhere: what is for those, is `OnSink`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from holdfast.barriers.sinks.log import MARKER_SUFFIX, SUMMARY_ENTRIES, LogPosition, PendingCheckpoint, SinkPaths
from holdfast.barriers.sinks.staged import POSITION_VERSION, CommitMark, CommitPosition
from holdfast.operators.sinks.files.committer import candidates_flow, delete_flow
from holdfast.operators.sinks.files.log import (
    Claimant,
    OpenLog,
    check_known_flow,
    commit_flow,
    committed_flow,
    job_tag,
    open_log_flow,
    parse_name,
)
from holdfast.operators.sinks.files.summaries import summarise_flow
from holdfast.operators.sinks.queries.batches import BatchSeal, QueryPaths, QueryState, Start
from holdfast.operators.sinks.targets.committer import TargetFlows, begin_flow
from holdfast.operators.sinks.targets.positions import CommitOwner
from holdfast.operators.sinks.targets.target import FindMissing
from holdfast.statebackends.errors import CommitPositionLostError, InvariantError, StorageUnavailableError
from holdfast.statebackends.storage.flows import delete_files
from holdfast.statebackends.storage.port import (
    DelegatingStorage,
    Flow,
    ListFolder,
    Operation,
    StatFile,
    Storage,
    copies_links,
    one_by_one,
)

T = TypeVar("T")


class TargetOutput:
    """Implements BatchOutput: rows are staged below the checkpoint folder."""

    log: LogPosition | None = None

    def __init__(self, paths: QueryPaths, folder: str, place: str, rows_max: int | None) -> None:
        """folder: location of the staged files. rows_max: rows of one step."""
        self._paths = paths
        self._folder = folder
        self._place = place
        self._rows_max = rows_max

    def begin(self, start: Start, state: QueryState) -> Flow[CommitPosition]:
        return (yield from begin_flow(self._paths, self._flows(start, state, ""), state.known))

    def _flows(self, start: Start, state: QueryState, line: str) -> TargetFlows:
        owner = CommitOwner(
            sink_id=self._paths.sink_id,
            job_id=self._paths.job_id,
            attempt=start.attempt,
            nonce=start.nonce,
            known=state.known,
            pending=tuple(CommitMark(seal.batch_id + 1, tag=seal.tag) for seal in state.sealed),
            restored_checkpoint_id=max((seal.batch_id + 1 for seal in state.sealed), default=0),
            place=self._place,
            line=line,
        )
        return TargetFlows(self._paths.target, owner)

    def commit(self, start: Start, state: QueryState, position: CommitPosition, seal: BatchSeal) -> Flow[CommitPosition]:
        flows = self._flows(start, state, position.line)
        return (yield from flows.commit(position, [seal.staged(self._folder)], self._rows_max))

    def has_lost(self, seal: BatchSeal) -> Flow[bool]:
        wanted: Any = FindMissing(self._paths.target, self._folder, tuple(file.name for file in seal.files))
        return bool((yield wanted))

    def clear(self, start: Start, kept: frozenset[str], last: int | None) -> Flow[None]:
        files: list[str] = yield ListFolder(self._paths.staged_folder)
        over = [file for file in files if file not in kept and _is_over(file, start, last)]
        yield from delete_files(self._paths.staged(file) for file in over)


def _is_over(text: str, start: Start, last: int | None) -> bool:
    name = parse_name(text)
    return name is not None and name.attempt <= start.attempt and (last is None or name.first_checkpoint <= last)


class OnSink(msgspec.Struct, frozen=True):
    """An operation on the storage of a file sink."""

    wanted: Operation


class SinkPort(DelegatingStorage):
    """Storage of a query's records, and its sink's beside it."""

    def __init__(self, records: Storage, sink: Storage) -> None:
        super().__init__(records)
        self._sink = sink

    @property
    def copies_links(self) -> bool:
        """Of the sink."""
        return copies_links(self._sink)

    def execute(self, operation: Any) -> Any:
        return self._sink.execute(operation.wanted) if isinstance(operation, OnSink) else super().execute(operation)


def on_sink(flow: Flow[T]) -> Flow[T]:
    """The flow, on the storage of the sink, one operation at a time."""
    plain = one_by_one(flow)
    try:
        wanted: Any = next(plain)
        while True:
            try:
                operation: Any = OnSink(wanted)
                result = yield operation
            except Exception as error:
                wanted = plain.throw(error)
            else:
                wanted = plain.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value


class LogOutput:
    """Implements BatchOutput: rows are staged beside the output, and are committed by an entry of the sink's log. A position has
    the tag of the files that the last entry names."""

    def __init__(
        self,
        paths: QueryPaths,
        sink: SinkPaths,
        place: str,
        arrow_schema: str,
        now_ms: Callable[[], int],
        *,
        has_folders: bool = False,
    ) -> None:
        """place: of the output, for errors. has_folders: files are in folders of partitions."""
        self._paths = paths
        self._sink = sink
        self._place = place
        self._arrow_schema = arrow_schema
        self._now_ms = now_ms
        self._has_folders = has_folders
        self._open: OpenLog | None = None
        self._summarised: frozenset[int] | None = None

    @property
    def log(self) -> LogPosition | None:
        return None if self._open is None else self._open.position

    def begin(self, start: Start, state: QueryState) -> Flow[CommitPosition]:
        known = CommitMark() if state.known is None else state.known.mark
        if state.log is not None and (yield from on_sink(check_known_flow(self._sink, state.log, ()))) is None:
            raise CommitPositionLostError(
                f"sink {self._sink.sink_id} at {self._place}: rows up to batch {known.checkpoint_id - 1} of query "
                f"{self._paths.job_id} were committed, and its log there is another one, or gone. Put it back, or start a query "
                "with a checkpoint of its own",
                sink=self._sink.sink_id,
                place=self._place,
                known=known.checkpoint_id,
                stored=None,
            )
        sealed = state.sealed
        pending = tuple(PendingCheckpoint(seal.batch_id + 1, seal.files) for seal in sealed)
        claimant = self._claimant(start, max((each.checkpoint_id for each in pending), default=0))
        self._open = yield from on_sink(open_log_flow(self._sink, state.log, pending, claimant))
        marks = [CommitMark(seal.batch_id + 1, tag=seal.tag) for seal in sealed if _names(seal) <= self._open.committed]
        mark = max([known, *marks], key=lambda mark: mark.progress)
        owner, sink_id = self._open.position.owner, self._sink.sink_id
        return CommitPosition(
            POSITION_VERSION,
            sink_id,
            owner,
            start.nonce,
            self._paths.job_id,
            start.attempt,
            mark.checkpoint_id,
            mark.row,
            tag=mark.tag,
        )

    def _claimant(self, start: Start, restored: int) -> Claimant:
        return Claimant(
            job_id=self._paths.job_id,
            attempt=start.attempt,
            nonce=start.nonce,
            restored_checkpoint_id=restored,
            allow_output_repeat=False,
            arrow_schema=self._arrow_schema,
            now_ms=self._now_ms(),
            takes_over=True,
        )

    def commit(self, start: Start, state: QueryState, position: CommitPosition, seal: BatchSeal) -> Flow[CommitPosition]:
        if self._open is None:
            raise InvariantError(f"sink {self._sink.sink_id}: its log is not open")
        number, log = seal.batch_id + 1, self._open
        if position.has_all_of(number):  # what is behind the entry may have been left out
            log = replace(log, committed=log.committed | _names(seal))
        claimant = self._claimant(start, number)
        self._open = yield from on_sink(commit_flow(self._sink, log, PendingCheckpoint(number, seal.files), claimant))
        yield from self._summarise(self._open.position.next_sequence)
        return position if position.has_all_of(number) else position.moved(number, tag=seal.tag)

    def _summarise(self, stop: int) -> Flow[None]:
        """Readers do without one."""
        if stop // SUMMARY_ENTRIES > len(self._summarised or ()):
            try:
                self._summarised = yield from on_sink(summarise_flow(self._sink, stop, self._summarised))
            except StorageUnavailableError:
                return

    def has_lost(self, seal: BatchSeal) -> Flow[bool]:
        for file in seal.files:
            for path in (self._sink.staged(file.name), self._sink.data(file.name)):
                size: Any = yield from on_sink(_stat_flow(path))
                if size is not None:
                    break
            else:
                return True
        return False

    def clear(self, start: Start, kept: frozenset[str], last: int | None) -> Flow[None]:
        yield from on_sink(self._clear(start, kept, last))

    def _clear(self, start: Start, kept: frozenset[str], last: int | None) -> Flow[None]:
        """Where bytes are put in place, markers stand for the files: those whose commit was cut off behind its entry stay."""
        tag = job_tag(self._paths.job_id)
        found = yield from candidates_flow(self._sink, tag, start.attempt + 1, kept, has_folders=self._has_folders)
        over = {text: name for text, name in found.items() if last is None or name.first_checkpoint <= last}
        marked = {text.removesuffix(MARKER_SUFFIX): name for text, name in over.items() if text.endswith(MARKER_SUFFIX)}
        if marked and self._open is not None:
            first = min(name.first_checkpoint for name in marked.values())
            stop = self._open.position.next_sequence
            committed = yield from committed_flow(self._sink, self._paths.job_id, stop, first)
            yield from delete_files(self._sink.data(file) for file in sorted(marked.keys() - committed))
        yield from delete_flow(self._sink, over)


def _stat_flow(path: str) -> Flow[Any]:
    return (yield StatFile(path))


def _names(seal: BatchSeal) -> frozenset[str]:
    return frozenset(file.name for file in seal.files)
