"""Flows of the storage actions: each action becomes one flow, whose result is the event with the outcome.

Storage errors become outcomes here alone; what follows from an outcome is decided in the cores. The flows run on a pool thread in
the service and step by step in the simulator, over a `RoutedStorage`, since a savepoint may be at any location."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, assert_never

import msgspec

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import CheckpointKind, FailureReason, InFlightRestore, SubtaskKey
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.pending import assemble_operators
from holdfast.coordinator.ha.leadership import check_leadership
from holdfast.coordinator.ha.records import (
    AbortRecord,
    AttemptRecord,
    ClaimRecord,
    ConfigRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    hash_graph,
)
from holdfast.coordinator.ha.snapshots import check_files, load_snapshot, read_lists
from holdfast.coordinator.ha.store import (
    abort_checkpoint,
    claim_checkpoint,
    complete_savepoint,
    decide_checkpoint,
    discard_folder,
    drop_checkpoint,
    probe_folder,
    sweep_shared,
    write_attempt,
    write_config,
    write_result,
)
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.releases import Release
from holdfast.coordinator.ownership.claims import release_snapshot
from holdfast.coordinator.ownership.labels import Mark, begin_deletion
from holdfast.coordinator.restore.assign import assign_state, find_list_states
from holdfast.coordinator.restore.finished import encode_finished, find_finished
from holdfast.coordinator.restore.in_flight import assign_in_flight
from holdfast.coordinator.restore.sink_forks import find_forgone
from holdfast.coordinator.totals import COUNTERS_PROPERTY, encode_totals
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CorruptStateError,
    FencedError,
    HoldfastError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import OperatorSubtaskState
from holdfast.statebackends.layout import JobPaths, part_path
from holdfast.statebackends.snapshot.metadata import (
    FINISHED_PROPERTY,
    NATIVE_PROPERTY,
    SnapshotMetadata,
    encode_metadata,
    version_of,
)
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.flows import delete_files
from holdfast.statebackends.storage.port import DeleteFolder, Flow, StatFile

StorageAction: TypeAlias = (
    actions.WriteClaim
    | actions.WriteMetadata
    | actions.WriteAborted
    | actions.DiscardState
    | actions.DropCheckpoint
    | job_actions.PrepareAttempt
    | job_actions.WriteResult
    | job_actions.WriteConfig
    | Release
)

AssignedState: TypeAlias = dict[SubtaskKey, dict[str, OperatorSubtaskState]]


@dataclass(frozen=True, slots=True)
class Identity:
    """The writer of records: one leader of one submission."""

    job_id: str
    epoch: int
    nonce: str
    submission: int
    graph: JobGraph
    started_ms: int = 0
    without_channel_state: int | None = None
    """As of Submission."""


class StorageEffects:
    """Flows of one job. Keeps the newest snapshot's metadata, which a failover would otherwise read again."""

    def __init__(self, identity: Identity, wall_ms: Callable[[], int]) -> None:
        self._identity = identity
        self._paths = JobPaths(identity.job_id)
        self._wall_ms = wall_ms
        self._graph_hash = hash_graph(identity.graph)
        self._graph: dict[str, Any] = msgspec.to_builtins(identity.graph)
        self._graph_json = msgspec.Raw(msgspec.json.encode(self._graph))
        """The same, as every `_metadata` of the job has it."""
        self._newest: tuple[str, SnapshotMetadata] | None = None
        self._attempt = 0

    def flow(self, action: StorageAction) -> Flow[job_events.Event | None]:
        """The flow of an action; its result is the event to post, None if the outcome changes nothing."""
        match action:
            case actions.WriteClaim():
                return self._claim(action)
            case actions.WriteMetadata():
                return self._complete(action)
            case actions.WriteAborted():
                return self._abort(action)
            case actions.DiscardState():
                return self._discard(action)
            case actions.DropCheckpoint():
                return self._drop(action)
            case job_actions.PrepareAttempt():
                return self._prepare(action)
            case job_actions.WriteResult():
                return self._end(action)
            case job_actions.WriteConfig():
                return self._configure(action)
            case Release():
                return self._release(action)
            case _:
                assert_never(action)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def _claim(self, action: actions.WriteClaim) -> Flow[job_events.Event | None]:
        number, request = action.checkpoint_id, action.request
        record = ClaimRecord(
            checkpoint_id=number,
            epoch=self._identity.epoch,
            submission=self._identity.submission,
            attempt=action.attempt,
            kind=request.kind,
            folder=action.folder,
            nonce=self._identity.nonce,
            drain=request.drain,
            trigger_id=request.trigger_id,
            created_ms=self._wall_ms(),
            native=request.native,
            erases=request.erasure is not None,
            erased_below=action.erased_below,
        )
        try:
            if request.is_savepoint:
                yield from probe_folder(action.folder, self._identity.nonce)
            existing = yield from claim_checkpoint(self._paths, record)
        except AmbiguousWriteError as error:
            return events.ClaimFailed(number, str(error), ambiguous=True)
        except HoldfastError as error:
            return events.ClaimFailed(number, str(error), ambiguous=False)
        if existing == record:
            unsure = events.ClaimFailed(number, "the job's leader can't be read", ambiguous=True)
            return (yield from self._confirm(events.ClaimWritten(number), unsure))
        if existing.nonce == record.nonce:
            return events.ClaimFailed(number, "the id has an earlier claim of this leader", ambiguous=True)
        return events.ClaimTaken(number, existing)

    def _complete(self, action: actions.WriteMetadata) -> Flow[job_events.Event | None]:
        number = action.checkpoint_id
        try:
            metadata = self._metadata(action)
            content = encode_metadata(metadata, self._graph_json)
            if action.kind.is_savepoint:
                record = SavepointRecord(
                    checkpoint_id=number,
                    folder=action.folder,
                    kind=action.kind,
                    timestamp_ms=action.timestamp_ms,
                    epoch=self._identity.epoch,
                    nonce=self._identity.nonce,
                    created_ms=metadata.completion_timestamp_ms,
                    totals=action.totals,
                )
                other = yield from complete_savepoint(self._paths, record, content)
            else:
                other = yield from decide_checkpoint(self._paths, number, content)
        except AmbiguousWriteError as error:
            return events.MetadataAmbiguous(number, str(error))
        except StorageUnavailableError as error:
            return events.MetadataFailed(number, FailureReason.IO_EXCEPTION, str(error))
        except HoldfastError as error:
            return events.MetadataFailed(number, FailureReason.FINALIZE_FAILURE, str(error))
        if other is not None:
            return events.MetadataLost(number, other)
        if action.kind is not CheckpointKind.SAVEPOINT:
            self._newest = (action.folder, metadata)
        unsure = events.MetadataAmbiguous(number, "the job's leader can't be read")
        return (yield from self._confirm(events.MetadataWritten(number), unsure))

    def _confirm(self, outcome: job_events.Event, unsure: job_events.Event) -> Flow[job_events.Event | None]:
        """The outcome of a write to an id's register, unless there is another leader by now.

        Another leader may have decided the id, gone on and deleted it: its register is then empty, and a write to it proves
        nothing. If there is none after the write, every later leader reads the write before it acts."""
        try:
            yield from check_leadership(self._paths, self._identity.epoch)
        except FencedError as error:
            return job_events.LeadershipEnded(str(error))
        except HoldfastError:
            return unsure
        return outcome

    def _metadata(self, action: actions.WriteMetadata) -> SnapshotMetadata:
        identity = self._identity
        external = {path for task in action.states.values() for state in task.values() for path in state.external}
        kinds: dict[CheckpointKind, Literal["savepoint", "stop_savepoint"]] = {
            CheckpointKind.SAVEPOINT: "savepoint",
            CheckpointKind.STOP_SAVEPOINT: "stop_savepoint",
        }
        properties: dict[str, str] = {}
        if action.finished:
            properties[FINISHED_PROPERTY] = encode_finished(action.finished)
        if action.totals:
            properties[COUNTERS_PROPERTY] = encode_totals(action.totals)
        if action.native:
            properties[NATIVE_PROPERTY] = identity.graph.config.state_backend
        return SnapshotMetadata(
            job_id=identity.job_id,
            job_name=identity.graph.name,
            checkpoint_id=action.checkpoint_id,
            kind=kinds.get(action.kind, "checkpoint"),
            attempt=action.attempt,
            epoch=identity.epoch,
            trigger_timestamp_ms=action.timestamp_ms,
            completion_timestamp_ms=self._wall_ms(),
            operators=assemble_operators(identity.graph, action.states),
            external=tuple(sorted(external)),
            properties=properties,
            graph=self._graph,
            version=version_of(in_flight=bool(action.channels), hooks=bool(action.hooks)),
            channels=action.channels or msgspec.UNSET,
            master_hooks=action.hooks or msgspec.UNSET,
        )

    def _abort(self, action: actions.WriteAborted) -> Flow[job_events.Event | None]:
        number = action.checkpoint_id
        record = AbortRecord(
            checkpoint_id=number,
            reason=action.reason,
            epoch=self._identity.epoch,
            nonce=self._identity.nonce,
            message=action.message,
            created_ms=self._wall_ms(),
        )
        try:
            other = yield from abort_checkpoint(self._paths, record)
        except HoldfastError as error:
            return events.AbortFailed(number, str(error))
        if other is None or (isinstance(other, AbortRecord) and other.nonce == record.nonce):
            outcome: job_events.Event = events.AbortWritten(number)
        else:
            outcome = events.AbortLost(number, other)
        return (yield from self._confirm(outcome, events.AbortFailed(number, "the job's leader can't be read")))

    def _discard(self, action: actions.DiscardState) -> Flow[job_events.Event | None]:
        """Delete state of an aborted id; the next recovery sweeps files that can't be deleted. For the files of a late
        acknowledgement leadership is checked: a successor may have counted them."""
        try:
            if action.files is not None:
                yield from check_leadership(self._paths, self._identity.epoch)
                yield from delete_files(_locations(action.folder, action.files))
            elif is_absolute_folder(action.folder):
                yield DeleteFolder(action.folder)
            else:
                yield from discard_folder(action.folder)
                if self._identity.graph.config.is_incremental:
                    yield from sweep_shared(self._paths, action.checkpoint_id)
        except FencedError as error:
            return job_events.LeadershipEnded(str(error))
        except HoldfastError:
            return None
        return None

    def _drop(self, action: actions.DropCheckpoint) -> Flow[job_events.Event | None]:
        try:
            yield from check_leadership(self._paths, self._identity.epoch)
            if action.folder and (yield from self._is_labelled(action.checkpoint_id)):
                return events.CheckpointKept(action.checkpoint_id)
            shared, after = action.shared, action.after
            for other in after:
                # A record of labels in a folder that is deleted already would stay there.
                if (yield from self._has_claim(other)) and (yield from self._is_labelled(other)):
                    shared, after = (), ()  # it stays, with the files that it shares
                    break
            yield from drop_checkpoint(self._paths, action.checkpoint_id, shared, after)
            if not action.folder and self._identity.graph.config.is_incremental:
                yield from sweep_shared(self._paths, action.checkpoint_id)
        except FencedError as error:
            return job_events.LeadershipEnded(str(error))
        except HoldfastError as error:
            return events.DropFailed(action.checkpoint_id, str(error))
        return events.CheckpointDropped(action.checkpoint_id)

    def _is_labelled(self, checkpoint_id: int) -> Flow[bool]:
        """Begin the deletion of a completed checkpoint, unless it has a label."""
        mark = Mark(self._identity.nonce, self._wall_ms())
        return bool((yield from begin_deletion(self._paths.checkpoint(checkpoint_id), mark)))

    def _has_claim(self, checkpoint_id: int) -> Flow[bool]:
        """Whether no deletion has got beyond the claim of a checkpoint."""
        return (yield StatFile(self._paths.claim(checkpoint_id))) is not None

    def _release(self, action: Release) -> Flow[job_events.Event | None]:
        """Delete a snapshot that the job claimed, if it is still its own."""
        try:
            yield from check_leadership(self._paths, self._identity.epoch)
            yield from release_snapshot(action.folder, action.claim, self._wall_ms())
        except FencedError as error:
            return job_events.LeadershipEnded(str(error))
        except HoldfastError as error:
            return job_events.ReleaseEnded(action, str(error))
        return job_events.ReleaseEnded(action)

    # -------------------------------------------------------------------------------------------------------- attempts

    def _prepare(self, action: job_actions.PrepareAttempt) -> Flow[job_events.Event | None]:
        identity, restore = self._identity, action.restore
        record = AttemptRecord(
            attempt=action.attempt,
            epoch=identity.epoch,
            submission=identity.submission,
            graph_hash=self._graph_hash,
            slots=identity.graph.slots_required,
            restored=restore,
            restarts=action.restarts,
            nonce=identity.nonce,
            created_ms=self._wall_ms(),
            totals=action.totals,
            backoff=action.backoff,
        )
        try:
            existing = yield from write_attempt(self._paths, record)
            yield from check_leadership(self._paths, identity.epoch)
            if existing.nonce != record.nonce:
                is_same = existing.submission == identity.submission
                return job_events.AttemptTaken(action.attempt, existing.restarts if is_same else 0)
            states: AssignedState = {}
            finished: frozenset[str] = frozenset()
            in_flight: dict[SubtaskKey, InFlightRestore] = {}
            if restore is not None:
                states, finished, in_flight = yield from self._restore(restore)
        except FencedError as error:
            return job_events.LeadershipEnded(str(error))
        except StorageUnavailableError as error:
            return job_events.AttemptDelayed(action.attempt, str(error))
        except CorruptStateError as error:
            return job_events.AttemptImpossible(action.attempt, _explained(error, restore))
        except HoldfastError as error:
            return job_events.AttemptImpossible(action.attempt, error)
        hooks = self._newest[1].hooks if restore is not None and self._newest is not None else ()
        return job_events.AttemptPrepared(action.attempt, states, finished, in_flight, hooks)

    def _restore(self, restore: RestorePoint) -> Flow[tuple[AssignedState, frozenset[str], dict[SubtaskKey, InFlightRestore]]]:
        """Verify the snapshot's files, then assign its state and in-flight records to subtasks; with them the vertices that begin
        as finished."""
        known = self._newest
        if known is not None and known[0] == restore.folder:
            metadata = known[1]
        else:
            metadata = yield from load_snapshot(restore.folder)
        graph = self._identity.graph
        yield from check_files(metadata, restore.folder, checksums=False, forgone=find_forgone(metadata, graph))
        lists: dict[tuple[str, str], list[list[bytes]]] = {}
        for operator, name in find_list_states(metadata, graph):
            lists[operator.uid, name] = yield from read_lists(operator, name, restore.folder)
        self._newest = (restore.folder, metadata)
        given_up = metadata.checkpoint_id == self._identity.without_channel_state
        in_flight = {} if given_up else assign_in_flight(metadata.in_flight, metadata.graph, graph)
        return assign_state(metadata, graph, lists), find_finished(metadata, graph), in_flight

    def _end(self, action: job_actions.WriteResult) -> Flow[job_events.Event | None]:
        record = ResultRecord(
            submission=self._identity.submission,
            state=action.state.value,
            epoch=self._identity.epoch,
            nonce=self._identity.nonce,
            last_checkpoint_id=action.last_checkpoint_id,
            newest_completed=action.newest_completed,
            cause=action.cause,
            started_ms=self._identity.started_ms,
            created_ms=self._wall_ms(),
            metrics=action.metrics,
            totals=action.totals,
        )
        try:
            yield from check_leadership(self._paths, self._identity.epoch)
            existing = yield from write_result(self._paths, record)
            # A newer leader either reads this result or is found here: no checkpoint is deleted that it may be restoring.
            yield from check_leadership(self._paths, self._identity.epoch)
        except FencedError as error:
            return job_events.LeadershipEnded(str(error))
        except HoldfastError as error:
            return job_events.ResultFailed(str(error))
        return job_events.ResultWritten(existing)


    def _configure(self, action: job_actions.WriteConfig) -> Flow[job_events.Event | None]:
        """Store changed settings. A newer leader either reads the record, or is found behind the write: then it does not count."""
        identity, number = self._identity, action.number
        record = ConfigRecord(
            number=number,
            epoch=identity.epoch,
            submission=identity.submission,
            settings=dict(action.settings),
            nonce=identity.nonce,
            created_ms=self._wall_ms(),
        )
        is_stored = False
        try:
            yield from check_leadership(self._paths, identity.epoch)
            existing = yield from write_config(self._paths, record)
            is_stored = True
            yield from check_leadership(self._paths, identity.epoch)
        except FencedError as error:
            return job_events.LeadershipEnded(str(error))
        except AmbiguousWriteError as error:
            return job_events.ConfigFailed(number, str(error), ambiguous=True)
        except HoldfastError as error:
            return job_events.ConfigFailed(number, str(error), ambiguous=is_stored)
        if existing.nonce == record.nonce:
            return job_events.ConfigWritten(number)
        if existing.epoch > identity.epoch:
            return job_events.LeadershipEnded(f"epoch {existing.epoch} changed settings of job {identity.job_id}")
        return job_events.ConfigTaken(number)


def _locations(folder: str, paths: Sequence[str]) -> list[str]:
    """Paths of the files of an acknowledgement; without those outside of the snapshot, which must not be deleted."""
    if is_absolute_folder(folder):
        return [f"{folder}/{path}" for path in paths]  # in a savepoint's own folder, or the storage refuses it
    found = []
    for path in paths:
        with contextlib.suppress(CorruptStateError):
            found.append(part_path(folder, path))
    return found


def _explained(error: CorruptStateError, restore: RestorePoint | None) -> CorruptStateError:
    """The error with a hint, for a snapshot of a user or of another job: this job still needs it."""
    if restore is None or not is_absolute_folder(restore.folder) or restore.claim:
        return error
    message = (
        f"{error.message}. The job was started from {restore.folder} and has no completed checkpoint of its own yet: until then "
        "it needs that snapshot, which it neither changes nor deletes (claim_mode=NO_CLAIM). Put it back, or start from another one"
    )
    return type(error).of(message, error.fields)
