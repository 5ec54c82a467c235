"""The committer of a `CommitTarget`: it opens the target, applies the staged rows of completed checkpoints, and finds out what
became of calls without an answer.

Each flow may stop between any two operations, be run again from restored state, and race with an older self. After an answer that
leaves open what happened, the target is opened again: that fences what is in flight, and says how far the output got. It is never
taken for a success or for a failure before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.barriers.sinks.log import FORK_PROPERTY
from holdfast.barriers.sinks.staged import (
    STATE_VERSION,
    CommitMark,
    CommitPosition,
    StagedCheckpoint,
    StagedState,
    decode_staged_state,
)
from holdfast.operators.base import CallThread, OperatorContext, Output
from holdfast.operators.sinks.calls import TRIES, Pause, close_on, log
from holdfast.operators.sinks.files.committer import Orphans, StagedFileCommitter
from holdfast.operators.sinks.files.log import SinkSettings
from holdfast.operators.sinks.targets.port import TargetPort
from holdfast.operators.sinks.targets.positions import CommitOwner
from holdfast.operators.sinks.targets.staging import STAGED, StagingPaths, Step, line_flow, next_step
from holdfast.operators.sinks.targets.target import ApplyRows, CommitTarget, FindMissing, OpenTarget
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CommittableLostError,
    FencedError,
    HoldfastError,
    InvalidConfigError,
    InvariantError,
    StorageUnavailableError,
)
from holdfast.statebackends.secrets import hide_resolved
from holdfast.statebackends.state import StateDescriptor
from holdfast.statebackends.storage.flows import delete_files
from holdfast.statebackends.storage.port import Flow, Storage

FILES_SHOWN_MAX = 20
"""Staged files that a message names."""


def _is_clear(error: Exception) -> bool:
    """Whether an error says that nothing was changed, and that it would come again."""
    return isinstance(error, HoldfastError) and not isinstance(error, StorageUnavailableError | FencedError)


@dataclass(frozen=True, slots=True)
class TargetFlows:
    """The flows of one committer: on a `TargetPort`, or what stands for one."""

    path: str
    """Names the target in traces."""
    owner: CommitOwner
    """As of the flow's begin; its `known` is replaced by what is known then."""

    def open(self, known: CommitPosition | None, *, again: bool = False) -> Flow[CommitPosition]:
        """Take the target over; again: this committer had done so before. Raises what `CommitOwner.take` does,
        StorageUnavailableError when the target does not answer."""
        owner = replace(self.owner, known=known, reopens=again)
        for attempt in range(1, TRIES.attempts_max + 1):
            try:
                taken: CommitPosition = yield self._wanted(OpenTarget(self.path, owner))
                return self._checked(taken)
            except Exception as error:
                if _is_clear(error) or isinstance(error, FencedError):
                    raise
                if attempt == TRIES.attempts_max:
                    raise StorageUnavailableError(
                        f"sink {self.owner.sink_id}: {self._place} can't be opened, {attempt} times: {_words(error)}",
                        path=self.owner.place,
                    ) from error
            yield self._wanted(Pause(self.path, TRIES.pause_ms(attempt)))
        raise AssertionError

    def commit(
        self, position: CommitPosition, due: Sequence[StagedCheckpoint], rows_max: int | None
    ) -> Flow[CommitPosition]:
        """Apply all rows of these checkpoints that are not committed, once, however often it is called; the position then."""
        if position.repeated:
            due = yield from self._left(position, due)
        while (step := next_step(position, due, rows_max)) is not None:
            position = yield from self._apply(position, step)
        return position

    def _left(self, position: CommitPosition, due: Sequence[StagedCheckpoint]) -> Flow[list[StagedCheckpoint]]:
        """Without those of a snapshot, to which the user went back, that were committed before: files go when that is done."""
        left = []
        for each in due:
            names = tuple(file.name for file in each.files)
            is_old = each.checkpoint_id <= position.repeated
            if is_old and (yield self._wanted(FindMissing(self.path, each.folder, names))):
                log.warning(
                    "sink %s: the %d rows of checkpoint %d are taken for committed before it was gone back to: of its staged "
                    "files some are gone: %s",
                    *(self.owner.sink_id, each.rows, each.checkpoint_id, ", ".join(names[:FILES_SHOWN_MAX])),
                )
            else:
                left.append(each)
        return left

    def _apply(self, position: CommitPosition, step: Step) -> Flow[CommitPosition]:
        """Apply a step; the stored position afterwards. It may be the one before: of a step that has not happened."""
        wanted = position.moved(step.checkpoint_id, step.row, step.tag)
        for attempt in range(1, TRIES.attempts_max + 1):
            try:
                yield self._wanted(ApplyRows(self.path, step.slices, position, wanted))
                return wanted
            except CommittableLostError:
                yield from self.open(position, again=True)  # a successor that has committed the rows may have deleted the file
                raise
            except Exception as error:
                if _is_clear(error):
                    raise
                failed = error
            if attempt > 1:
                yield self._wanted(Pause(self.path, TRIES.pause_ms(attempt - 1)))
            before = position.mark
            position = yield from self.open(position, again=True)
            if position.mark == wanted.mark:
                return position
            if position.mark != before:
                raise InvariantError(
                    f"sink {self.owner.sink_id}: {self._place} is at {position}, between two steps of its only owner: its apply() "
                    "does not store the position with the rows"
                )
            wanted = position.moved(step.checkpoint_id, step.row, step.tag)
        if isinstance(failed, FencedError):
            raise failed
        raise AmbiguousWriteError(
            f"sink {self.owner.sink_id}: {self._place} does not take the rows up to checkpoint {step.checkpoint_id}, "
            f"{TRIES.attempts_max} times: {_words(failed)}",
            path=self.owner.place,
        ) from failed

    def _checked(self, taken: CommitPosition) -> CommitPosition:
        """Raises InvalidConfigError for what `take` has not returned."""
        owner = self.owner
        expected = (owner.nonce, owner.job_id, owner.attempt, owner.sink_id, owner.line)
        found = isinstance(taken, CommitPosition) and (taken.nonce, taken.job_id, taken.attempt, taken.sink_id, taken.line)
        if found != expected:
            raise InvalidConfigError(
                f"sink {owner.sink_id}: open() of its target returned {_shown(taken)}, not what owner.take() has",
                sinks=[owner.sink_id],
            )
        return taken

    @property
    def _place(self) -> str:
        return self.owner.place or "its target"

    @staticmethod
    def _wanted(operation: OpenTarget | ApplyRows | FindMissing | Pause) -> Any:
        """An operation beyond those of storage, which the port performs as well."""
        return operation


def _shown(taken: object) -> str:
    """A position, or the type alone of what may hold a secret."""
    return str(taken) if isinstance(taken, CommitPosition) else type(taken).__name__


def _words(error: Exception) -> str:
    return hide_resolved(f"{type(error).__name__}: {error}")


def begin_flow(paths: StagingPaths, flows: TargetFlows, known: CommitPosition | None) -> Flow[CommitPosition]:
    """The first opening of an attempt."""
    line = yield from line_flow(paths, flows.owner.nonce)
    return (yield from replace(flows, owner=replace(flows.owner, line=line)).open(known))


def forget_flow(paths: StagingPaths, checkpoints: Sequence[StagedCheckpoint], folder: str) -> Flow[None]:
    """Delete the files of committed checkpoints; those of other jobs stay: a savepoint of theirs may name them.

    One that can't be deleted is left for the sweep of the next attempt: its rows are committed, and the job goes on."""
    names = [paths.staged(file.name) for each in checkpoints if each.folder == folder for file in each.files]
    try:
        yield from delete_files(names)
    except StorageUnavailableError as error:
        log.warning("sink %s: staged files of committed rows are left for now: %s", paths.sink_id, error)


class TargetCommitter(StagedFileCommitter):
    """Commits staged rows to a target."""

    def __init__(
        self, target: CommitTarget, settings: SinkSettings, *, rows_per_commit: int | None, commit_interval_ms: int
    ) -> None:
        self._target = target
        self._settings = settings
        self._rows_per_commit = rows_per_commit
        self._commit_interval_ms = commit_interval_ms

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        return (STAGED,)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._paths = StagingPaths(context.job_id, self._settings.sink_id)
        self._folder = f"{context.storage.root.rstrip('/')}/{self._paths.staged_folder}"
        self._port = TargetPort(self._target, context.storage)
        self._thread: CallThread | None = None
        """The target's own; None: it was never called."""
        self._forgetting = 0
        """Deletions under way, of files that are committed."""
        self._elsewhere: dict[int, StagedCheckpoint] = {}
        """Restored checkpoints whose files another job has staged, or this one in another state directory."""
        self._known: CommitPosition | None = None
        self._position: CommitPosition | None = None
        """As the target last confirmed it to this attempt; None: it is not open."""
        self._next_ms: int | None = None
        """Wall clock at which what is due is committed; None: at once."""

    @property
    def _is_open(self) -> bool:
        return self._position is not None

    def initialize_state(self) -> None:
        for entry in self.context.operator_state.list_state(STAGED.name).entries:
            state = decode_staged_state(entry, self.context.uid)
            if FORK_PROPERTY in self.context.properties and self._is_elsewhere(state):
                continue  # the coordinator has decided that this sink begins anew
            self._known = state.position
            for checkpoint in state.checkpoints:
                self._pending[checkpoint.checkpoint_id] = list(checkpoint.files)
                if checkpoint.folder != self._folder:
                    self._elsewhere[checkpoint.checkpoint_id] = checkpoint

    def _is_elsewhere(self, state: StagedState) -> bool:
        """Whether a state is of the sink at another place, or under another id."""
        sink_id = self._settings.sink_id
        return state.place != self._target.identity or (state.position is not None and state.position.sink_id != sink_id)

    def _checkpoints(self, ids: Sequence[int]) -> tuple[StagedCheckpoint, ...]:
        return tuple(
            self._elsewhere.get(number) or StagedCheckpoint(number, self._folder, tuple(self._pending[number])) for number in ids
        )

    def _flows(self) -> TargetFlows:
        context = self.context
        owner = CommitOwner(
            sink_id=self._settings.sink_id,
            job_id=context.job_id,
            attempt=context.attempt,
            nonce=context.nonce,
            known=None,
            pending=tuple(CommitMark(each.checkpoint_id, tag=each.tag) for each in self._checkpoints(sorted(self._pending))),
            restored_checkpoint_id=self._released,
            allow_output_repeat=self.allow_output_repeat,
            place=self._target.place,
            line="" if self._position is None else self._position.line,
        )
        return TargetFlows(self._paths.target, owner)

    def open(self) -> None:
        def opened(position: CommitPosition) -> None:
            self._confirm(position)
            self._commit_next()

        self._thread = self.context.open_thread(f"holdfast-{self.context.uid}")
        self._start(begin_flow(self._paths, self._flows(), self._known), self._port, opened)

    def _submit(self, flow: Flow[Any], storage: Storage, done: Callable[[Any, BaseException | None], None]) -> None:
        assert self._thread is not None
        self._thread.run_flow(flow, storage, done)

    def _confirm(self, position: CommitPosition) -> None:
        self._known = self._position = position

    def _commit_next(self) -> None:
        if self._next_ms is None or not self._due or self.context.now_ms() >= self._next_ms:
            super()._commit_next()

    def _commit(self, due: tuple[int, ...]) -> None:
        assert self._position is not None
        checkpoints = self._checkpoints(due)
        self._next_ms = self.context.now_ms() + self._commit_interval_ms if self._commit_interval_ms else None

        def committed(position: CommitPosition) -> None:
            self._confirm(position)
            for number in due:
                del self._pending[number]
                self._elsewhere.pop(number, None)
            self._count_commit()
            self._forget(checkpoints)
            self._commit_next()

        self._start(self._flows().commit(self._position, checkpoints, self._rows_per_commit), self._port, committed)

    def _forget(self, checkpoints: Sequence[StagedCheckpoint]) -> None:
        """Beside the next commit."""

        def forgotten(nothing: None, error: BaseException | None) -> None:
            self._forgetting -= 1
            if error is not None:
                self.context.fail(error)

        self._forgetting += 1
        self.context.submit_flow(forget_flow(self._paths, checkpoints, self._folder), self.context.storage, forgotten)

    def next_processing_time_ms(self) -> int | None:
        return self._next_ms if self._next_ms is not None and self._due and not self._busy else None

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        self._commit_next()
        return iter(())

    def _sweep(self) -> None:
        kept = frozenset(file.name for files in self._pending.values() for file in files)
        Orphans(self.context, self._paths, self.context.storage, kept).sweep()

    def snapshot_state(self, checkpoint_id: int) -> None:
        state = StagedState(STATE_VERSION, self._known, self._checkpoints(sorted(self._pending)), self._target.identity)
        self.context.operator_state.list_state(STAGED.name).update([msgspec.msgpack.encode(state)])

    def external_files(self, checkpoint_id: int) -> tuple[str, ...]:
        return tuple(entry for checkpoint in self._checkpoints(sorted(self._pending)) for entry in checkpoint.external)

    def has_pending_work(self) -> bool:
        """Asked when the subtask is about to finish: what waits for the end of its interval is due now."""
        if self._next_ms is not None and self._due:
            self._next_ms = None
            self._commit_next()
        return super().has_pending_work() or self._forgetting > 0

    def close(self) -> None:
        """Nothing waits for a call under way: what it may still do is fenced, as that of an attempt which died."""
        super().close()
        thread = getattr(self, "_thread", None)
        if thread is not None:
            self._port.end()
            close_on(thread, self._target.close, f"sink {self._settings.sink_id}: its target")
