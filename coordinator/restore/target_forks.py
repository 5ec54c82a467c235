"""Flows that check sinks of a `CommitTarget`: which of them write elsewhere than the snapshot's job did, what becomes of the rows
that were staged for the old place, and whether a fresh start would write rows again. They only read.

The rules are those of sinks that keep a log (`sink_forks`), with one difference: the old target is not at hand, only its name. So
what is committed there is read off the staged files, which are deleted when they are, and nothing can be committed there first."""

from __future__ import annotations

from holdfast.barriers.jobgraph import OperatorDescription, SinkMode, Submission
from holdfast.barriers.sinks.log import PLACE_PROPERTY, PendingCheckpoint, SinkFork
from holdfast.barriers.sinks.staged import STAGED_CHECKPOINTS, StagedCheckpoint, StagedState, decode_staged_state
from holdfast.coordinator.ha.recorded_job import RecordedJob, derive_latest
from holdfast.coordinator.ha.records import RestorePoint, is_job_id
from holdfast.coordinator.ha.snapshots import load_snapshot, read_lists
from holdfast.coordinator.restore.preflight import Refusal
from holdfast.coordinator.restore.sink_forks import (
    Fate,
    LogFates,
    MovedSink,
    Restore,
    SinkCheckResult,
    examined,
    explain,
    fate_with,
    sink_committers,
)
from holdfast.statebackends.errors import (
    CorruptStateError,
    HoldfastError,
    OutputMayRepeatError,
    SinkMovedError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import OperatorState
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.port import Flow, StatFile


def check_targets(
    job: RecordedJob, submission: Submission, base: RestorePoint, metadata: SnapshotMetadata, *, is_directory: bool = True
) -> Flow[SinkCheckResult]:
    """Find the targets of a submission that write elsewhere, and the consequences. Raises StorageUnavailableError."""
    restore = Restore(job, submission, base, metadata, is_directory)
    return (yield from examined(restore, sink_committers(submission.graph), _examine))


def _read_state(uid: str, state: OperatorState, folder: str) -> Flow[StagedState | None]:
    """None: the snapshot has no state of a target under this uid."""
    if not any(handle.state.name == STAGED_CHECKPOINTS for part in state.subtasks for handle in part.operator):
        return None
    for entries in (yield from read_lists(state, STAGED_CHECKPOINTS, folder)):
        for entry in entries:
            return decode_staged_state(entry, uid)
    return None


def _examine(restore: Restore, operator: OperatorDescription, state: OperatorState) -> Flow[SinkCheckResult]:
    """Check one sink; an empty result unless the snapshot has it elsewhere."""
    found = yield from _read_state(operator.uid, state, restore.base.folder)
    moved = None if found is None else _find_move(operator, found)
    if found is None or moved is None:
        return SinkCheckResult()
    forgone = frozenset(entry for part in state.subtasks for entry in part.external)
    if restore.submission.sinks is SinkMode.KEEP:
        return SinkCheckResult((moved,), (Refusal.of(_moved_error(moved)),), forgone=forgone)
    refusals: list[HoldfastError] = []
    notes = [
        f"sink {moved.sink_id!r} begins anew at {moved.path or moved.sink_id}: no row before checkpoint "
        f"{restore.base.checkpoint_id} is there"
    ]
    pending = [PendingCheckpoint(each.checkpoint_id, each.files) for each in found.checkpoints]
    fates = yield from _find_fates(restore, operator.uid, found)
    explain(restore, moved, found.place or "a place that is not known", pending, fates, refusals, notes)
    return SinkCheckResult(
        (moved,), tuple(Refusal.of(error) for error in refusals), tuple(notes), {operator.uid: SinkFork()}, forgone
    )


def _find_move(operator: OperatorDescription, state: StagedState) -> MovedSink | None:
    """The sink, if it writes elsewhere than that of the state. A target that names no place is where it was."""
    sink_id, path = str(operator.sink_id), str(operator.properties.get(PLACE_PROPERTY) or "")
    stored_id = sink_id if state.position is None else state.position.sink_id
    is_elsewhere = path and state.place and path != state.place
    if not is_elsewhere and stored_id == sink_id:
        return None
    return MovedSink(sink_id, operator.uid, path, state.place or None, stored_id)


def _moved_error(moved: MovedSink) -> SinkMovedError:
    if moved.stored_id != moved.sink_id:
        where = f"has a position of its own, and the snapshot's is of sink_id {moved.stored_id!r}: name it so again"
    else:
        where = f"writes to {moved.path}, and the snapshot's writes to {moved.stored}: put it back there"
    return SinkMovedError(
        f"sink {moved.sink_id!r} (operator {moved.operator!r}) {where}, or begin anew where it is with sinks='fork'",
        sink=moved.sink_id,
        path=moved.path,
        stored=moved.stored,
        stored_id=moved.stored_id,
    )


def _find_fates(restore: Restore, uid: str, state: StagedState) -> Flow[LogFates]:
    """Fates of the rows that a snapshot has staged for the old place."""
    fates: dict[int, Fate] = {}
    for each in state.checkpoints:
        if (yield from _was_committed(uid, each)):
            fates[each.checkpoint_id] = Fate.COMMITTED
        else:
            fates[each.checkpoint_id] = yield from _fate_of(restore)
    return LogFates(fates)


def _fate_of(restore: Restore) -> Flow[Fate]:
    """Fate of rows that are not committed. This job can't commit them: it has the target of the new place."""
    owner = restore.metadata.job_id
    if owner == restore.job.job_id or not is_job_id(owner):
        return Fate.ABANDONED
    return (yield from fate_with(restore, owner))


def _was_committed(uid: str, staged: StagedCheckpoint) -> Flow[bool]:
    """Whether a committer has deleted files of these: it does so once they are committed. Where the marker of their folder is not
    seen either, nothing is known of them."""
    names = [staged.folder, *(file.name for file in staged.files)]
    if not is_absolute_folder(staged.folder) or any(".." in name.split("/") or "\0" in name for name in names):
        raise CorruptStateError(f"operator {uid}: {staged.folder!r} is no folder of staged rows", operator=uid, reason="place")
    if (yield StatFile(f"{staged.folder.rpartition('/')[0]}/staging.json")) is None:
        return False
    for file in staged.files:
        if (yield StatFile(f"{staged.folder}/{file.name}")) is None:
            return True
    return False


# ------------------------------------------------------------------------------------------------------------ fresh start


def check_fresh_start(job: RecordedJob, submission: Submission) -> Flow[tuple[Refusal, ...]]:
    """Why a fresh start would write committed rows again, as far as the newest checkpoint says: it is asked before that is given
    up. Of one that is damaged, the target itself says so, when it is opened. Raises StorageUnavailableError."""
    if not submission.fresh or submission.allow_output_repeat:
        return ()
    refusals: list[Refusal] = []
    try:
        newest = derive_latest(job)
        if newest is None:
            return ()
        metadata = yield from load_snapshot(newest.folder)
        stored = {operator.uid: operator for operator in metadata.operators}
        for operator in sink_committers(submission.graph):
            if operator.uid in stored:
                state = yield from _read_state(operator.uid, stored[operator.uid], newest.folder)
                if state is not None and _find_move(operator, state) is None and _has_output(state):
                    refusals.append(Refusal.of(_repeat_error(operator, state)))
    except StorageUnavailableError:
        raise  # an answer that is late is none: behind it state is given up
    except HoldfastError:
        pass
    return tuple(refusals)


def _has_output(state: StagedState) -> bool:
    """Whether rows are committed, or were released by the checkpoint that this is of."""
    return bool(state.checkpoints) or (state.position is not None and state.position.highest.checkpoint_id > 0)


def _repeat_error(operator: OperatorDescription, state: StagedState) -> OutputMayRepeatError:
    committed = max((each.checkpoint_id for each in state.checkpoints), default=0)
    if state.position is not None:
        committed = max(committed, state.position.highest.checkpoint_id)
    where = f" at {state.place}" if state.place else ""
    return OutputMayRepeatError(
        f"sink {operator.sink_id}{where} has rows of an earlier run of this job, up to checkpoint {committed}, and a fresh start "
        "would write them again. Give it another place; allow_output_repeat=True adds to it",
        sink=operator.sink_id,
        sinks=[str(operator.sink_id)],
        restored=0,
        committed=committed,
    )
