"""Errors that Holdfast raises on purpose: one class per thing that the caller does differently.

A class declares its fields as annotations; a field without a default is required, and type checkers hold every `raise` to that.
Errors survive pickling between processes, and the wire. This module knows nothing of HTTP; `api` maps classes to status codes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Self, dataclass_transform


class _Field:
    """A declared field: a typed view of its entry in `HoldfastError.fields`."""

    def __init__(self, name: str, default: Any) -> None:
        self._name = name
        self._default = default

    def __get__(self, error: HoldfastError | None, kind: type[HoldfastError]) -> Any:
        if error is None:
            return self
        found = error.fields.get(self._name, self._default)
        if found is _REQUIRED:  # the wire drops fields that are too long, and an older coordinator does not know every field
            raise AttributeError(f"this {kind.__name__} came without its field {self._name!r}", name=self._name, obj=error)
        return found

    def __set__(self, error: HoldfastError, value: Any) -> None:
        error.fields[self._name] = value


_REQUIRED = object()


@dataclass_transform(eq_default=False, kw_only_default=True)
class _TypedError(Exception):
    """Makes fields of a subclass's annotations. Type checkers allow no others; at run time the constructor takes any, since an
    error that fails while it is raised would hide its cause."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Any] = fields

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        """`kw_only`: False for the base class, which has no fields of its own."""
        super().__init_subclass__()
        if kw_only:
            for name in inspect.get_annotations(cls):
                setattr(cls, name, _Field(name, cls.__dict__.get(name, _REQUIRED)))


class HoldfastError(_TypedError, kw_only=False):
    """Base of all errors. `fields` names the things concerned (operator, file, subtask ...), for programs and logs: each field that
    was given, by its name, including those that only a newer version declares."""

    message: str

    @classmethod
    def of(cls, message: str, fields: Mapping[str, Any]) -> Self:
        """An error with fields that are known at run time only: those of another error, or from the wire."""
        error = cls(message)
        error.fields.update(fields)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[HoldfastError], message: str, fields: dict[str, Any]) -> HoldfastError:
    return kind.of(message, fields)


class InvalidConfigError(HoldfastError):
    """A setting, graph or argument is wrong: fix it and call again."""

    setting: str | None = None
    field: str | None = None
    expected: str | None = None
    package: str | None = None
    path: str | None = None
    url: str | None = None
    bucket: str | None = None
    key: str | None = None
    operator: str | None = None
    state: str | None = None
    column: str | None = None
    columns: Sequence[str] | None = None
    function: str | None = None
    sinks: Sequence[str] | None = None
    job: str | None = None
    slot: int | None = None
    trigger: str | None = None
    parallelism: int | None = None
    max_parallelism: int | None = None
    subtask: int | None = None
    record: str | None = None
    frames: str | None = None


class GraphError(InvalidConfigError):
    """The job graph can't be built: duplicate uid, undeclared schema, forward edge between unequal parallelisms ..."""

    operators: Sequence[str] | None = None
    variable: str | None = None
    expression: str | None = None


class UnknownColumnError(GraphError):
    """A column named in the graph is not in the stream."""

    operator: str
    column: str
    available: Sequence[str]


class NotEnoughSlotsError(InvalidConfigError):
    """The cluster runs fewer tasks at one time than the job needs."""

    required: int
    available: int


class StateDirectoryNotSharedError(InvalidConfigError):
    """A worker can't see the coordinator's state directory."""

    slot: int
    host: str


class StorageUnavailableError(HoldfastError):
    """Storage failed in a way that may pass: retry, or fail the checkpoint. Subclasses name the reason where it is known."""

    path: str | None = None
    bucket: str | None = None
    key: str | None = None
    errno: int | None = None
    job: str | None = None
    operator: str | None = None
    subtask: int | None = None


class AmbiguousWriteError(StorageUnavailableError):
    """A conditional write may or may not have happened: read back before deciding, and delete nothing."""

    path: str


class NotLeaderError(StorageUnavailableError):
    """This process does not lead the job (yet, or any more): ask the leader if the error names one, or try again later."""

    epoch: int | None = None
    """Epoch of the leader; None: not known."""
    url: str | None = None
    """URL of the leader; None: not known."""
    service_epoch: int | None = None
    """The URL is that of the active one of several members, in this epoch of theirs, and says nothing of a job; None: it does."""


class RecoveringError(StorageUnavailableError):
    """This coordinator has just started and has not recovered the job yet: ask it again."""

    slot: int | None = None


class StorageAccessError(StorageUnavailableError):
    """Object storage refuses access until its owner mends that; no job fails for it."""

    path: str
    bucket: str
    key: str
    reason: str
    """credentials | denied | bucket (it does not exist)."""


class StorageThrottledError(StorageUnavailableError):
    """Object storage throttled a request until its retry timeout ended."""

    path: str
    bucket: str
    key: str


class OutOfSpaceError(StorageUnavailableError):
    """A disk, a quota or an object store is full; the work goes on once there is room."""


class TooManyFilesError(StorageUnavailableError):
    """The process or its host has no file descriptors left."""


class PermissionDeniedError(StorageUnavailableError):
    """The system denies access to a file, or the file system is read-only."""


class InputOutputError(StorageUnavailableError):
    """A device failed or is gone."""


class ObjectMissingError(HoldfastError):
    """A file that was to be read does not exist."""

    path: str
    bucket: str | None = None
    key: str | None = None


class FencedError(HoldfastError):
    """A newer leader, attempt or owner exists: stop, change nothing."""

    held: int | None = None
    newer: int | None = None
    job: str | None = None
    job_id: str | None = None
    epoch: int | None = None
    attempt: int | None = None
    slot: int | None = None
    session: str | None = None
    state: str | None = None
    sink: str | None = None
    owner: str | None = None
    path: str | None = None


class CorruptStateError(HoldfastError):
    """A snapshot file is missing, truncated, or does not match its checksum or format. A disk, a limit or a permission that refuses
    a file is a StorageUnavailableError: see storage/failures.py."""

    path: str | None = None
    operator: str | None = None
    reason: str | None = None
    state: str | None = None
    subtask: int | None = None
    problems: Sequence[str] | None = None
    skipped: Sequence[int] | None = None
    others: Sequence[str] | None = None
    """Messages of the other reasons to refuse the job."""


class UnsupportedVersionError(CorruptStateError):
    """A snapshot was written by a newer version."""

    version: object
    """As the file says."""
    supported: int


class RestoreError(HoldfastError):
    """The snapshot is sound, but this job can't start from it. Subclasses say why."""

    operator: str | None = None
    state: str | None = None
    job_id: str | None = None
    path: str | None = None
    others: Sequence[str] | None = None
    """Messages of the other reasons to refuse the job."""


class UnclaimedStateError(RestoreError):
    """The snapshot holds state of an operator that the job lacks."""

    operators: Mapping[str, int]
    """Uid -> bytes of unclaimed state."""
    states: Mapping[str, Sequence[str]] | Sequence[str] | None = None
    renames: Mapping[str, str] | None = None


class MasterHookError(RestoreError):
    """State of a master hook can't be given back: the job names no such hook, or the hook does not know its version, or fails."""

    hooks: Sequence[str]
    stored: int | None = None
    """Version of the stored state."""
    known: Sequence[int] | None = None
    """Versions that the hook knows."""


class ForgetError(HoldfastError):
    """A key can't be forgotten: a coordinator may run, there is no snapshot, or one is of another job."""

    path: str | None = None
    job: str | None = None


class InFlightStateError(RestoreError):
    """The snapshot holds records in flight on an edge that the job does not have, or has otherwise; or which an edit would part
    from the state that lacks their effect."""

    edges: Sequence[Mapping[str, object]]
    """Of each: source, tag, target, input, ordinal, rows, size (bytes), reason."""
    rows: int
    size: int
    """Bytes."""
    checkpoint_id: int
    """For `without_channel_state`, which gives the records up."""


class IncompatibleStateError(RestoreError):
    """A state's declared type, key type or kind differs from the stored one."""

    operator: str
    state: str
    stored: str
    declared: str


class MaxParallelismError(RestoreError):
    """Max parallelism differs from the stored one, or is below the parallelism."""

    operator: str
    stored: int
    requested: int


class BackendMismatchError(RestoreError):
    """The snapshot holds a state backend's own files, and the job runs on another one."""

    operator: str
    stored: str
    requested: str


class SnapshotClaimedError(RestoreError):
    """Another job owns the snapshot; or a newer checkpoint of this job has subsumed it, and it is deleted."""

    path: str
    owner: str


class SnapshotLabelledError(HoldfastError):
    """A label keeps the snapshot from being deleted; or it can't get the label, since its deletion has begun, or another one has
    the label."""

    path: str
    labels: Sequence[str]


class OutputMayRepeatError(RestoreError):
    """The restore would rewind the job below committed output; it needs an explicit flag."""

    restored: int
    committed: int
    sink: str | None = None
    sinks: Sequence[str] | None = None
    skipped: Sequence[int] | None = None


class CommitPositionLostError(RestoreError):
    """The target of a sink has no commit position, or an older one than the job's state knows: committed rows are gone."""

    sink: str
    place: str
    """Where the sink writes; empty: not told."""
    known: int
    """Id of the checkpoint up to which rows were committed, as the job knows."""
    stored: int | None
    """The same, as the target has it; None: it has no position."""


class SinkMovedError(RestoreError):
    """A sink writes elsewhere than the log that the snapshot knows, or to a log of another job."""

    sink: str
    path: str
    stored: str | None
    """Path of the log in the snapshot; None: not known."""
    stored_id: str | None = None
    """Id of the sink in the snapshot; None: not known."""
    owner: str | None = None


class CommittablesLeftError(RestoreError):
    """Rows from before the snapshot were staged for a sink, and no job would commit them."""

    sink: str
    path: str
    rows: int
    files: Sequence[str]
    checkpoints: Sequence[int]


class InvalidKeyError(HoldfastError):
    """A key is null or does not fit the declared key type."""

    operator: str | None = None
    state: str | None = None
    subtask: int | None = None
    row: int | None = None
    value: Any = None
    record: str | None = None
    frames: str | None = None
    edge: str | None = None
    """On which the record was in flight when the snapshot was taken; None: it is new."""


class StateValueError(HoldfastError):
    """A value does not fit its state's declared type."""

    type: str | None = None
    """Canonical text."""
    value: str | None = None
    """repr, truncated."""
    operator: str | None = None
    state: str | None = None
    row: int | None = None
    subtask: int | None = None
    record: str | None = None
    frames: str | None = None


class StateBackendError(HoldfastError):
    """The library under a state backend failed for good (a panic): the working state is lost, the last checkpoint is not."""

    operator: str
    state: str
    """Name; empty if all states are concerned."""
    path: str


class UserFunctionError(HoldfastError):
    """User code raised."""

    operator: str
    subtask: int | None = None
    state: str | None = None
    function: str | None = None
    record: str | None = None
    """repr, truncated to 500 characters."""
    frames: str | None = None
    """Lines of the user's own code, innermost last."""
    edge: str | None = None
    """On which the record was in flight when the snapshot was taken; None: it is new."""


class SchemaMismatchError(UserFunctionError):
    """A row or batch does not fit the schema declared for its operator."""

    column: str | None
    """None: the row as a whole."""


class TooManyRowsSkippedError(HoldfastError):
    """A function with on_error="skip" skipped more rows than `skipped_rows_max` allows."""

    operator: str
    subtask: int
    limit: int
    """`skipped_rows_max`."""
    frames: str | None = None


class InvalidTimestampError(HoldfastError):
    """An event time is null, naive or not a time, or too far from the epoch for windows."""

    operator: str
    subtask: int
    record: str | None = None
    frames: str | None = None


class UndeclaredStateError(HoldfastError):
    """A function asked for a state that it did not declare."""

    operator: str
    state: str | None = None
    subtask: int | None = None
    record: str | None = None
    frames: str | None = None


class PartitionOutOfRangeError(UserFunctionError):
    """The function of `partition_custom` returned no subtask of the operator that follows."""

    returned: str
    """repr of what it returned, truncated to 500 characters."""
    parallelism: int
    """Subtasks of the operator."""


class ReadOnlyStateError(HoldfastError):
    """A function changed state that it may only read: broadcast state, for a record that was not broadcast."""

    operator: str
    state: str
    subtask: int | None = None
    record: str | None = None
    frames: str | None = None


class AsyncTimeoutError(HoldfastError):
    """A call of `async_map` had no answer in time, in none of its attempts."""

    operator: str
    subtask: int
    timeout_ms: int
    record: str | None = None
    frames: str | None = None


class UndeclaredOutputError(InvalidConfigError):
    """A function emitted to a side output that it did not declare, or when it has no record to emit one for."""

    operator: str
    side_output: str


class StateOverflowError(HoldfastError):
    """An integer sum left the range of int64."""

    operator: str
    state: str
    column: str | None
    """None: a count."""
    subtask: int | None = None
    record: str | None = None
    frames: str | None = None


class SnapshotTooLargeError(HoldfastError):
    """The small tables of a `memory` backend's snapshot are too large together to travel to the coordinator."""

    operator: str
    subtask: int
    size: int
    limit: int


class InputChangedError(HoldfastError):
    """A file that a source reads is missing, or is not the one that the source's position refers to."""

    operator: str
    path: str
    reason: str


class QueryStoppedError(HoldfastError):
    """Somebody stopped the Spark query of a streaming input, which had not come to its end: `query.stop()`, or its Spark."""

    operator: str
    query: str
    """Spark's id of the query."""


class InvalidSplitError(HoldfastError):
    """What a source's connector gives does not fit its splits or its columns: a defect of the connector."""

    operator: str
    split: str
    """Id of the split; empty if none is meant."""
    reason: str


class InvalidRecordError(HoldfastError):
    """A record that a source reads can't be read as the source's columns say."""

    operator: str
    split: str
    """Id of the split, such as the path of a file."""
    position: tuple[int, ...]
    """Of the record, or of the block that it is in."""
    reason: str


class InvalidRowError(HoldfastError):
    """A row that can't go on: the target of a sink would never take it, found before it is staged; or it is for another process,
    and can't be sent, or not made anew there. Mend the rows in front of what refuses them."""

    operator: str | None = None
    """The sink, or who made the row that can't be sent."""
    subtask: int | None = None
    receiver: str | None = None
    """Uid of the operator that a row can't be sent to, or that can't take it in; None: a sink refuses it."""
    column: str | None = None
    reason: str
    record: str | None = None
    """repr, truncated."""
    frames: str | None = None


class SourceDataLostError(HoldfastError):
    """Records behind a position are gone from where a source reads them: expired, or what they were in was made anew."""

    connector: str
    split: str
    """Id of the split."""
    position: tuple[int, ...]
    """Where the source would go on; empty: at the beginning of the split."""
    reason: str


class CommittableLostError(HoldfastError):
    """A staged sink file is missing and in no commit manifest: output would be lost."""

    sink: str
    path: str
    checkpoint: int


class JobExistsError(HoldfastError):
    """A job of this name is in a terminal state; say restore= or fresh=True."""

    job_id: str
    state: str


class NotFoundError(HoldfastError):
    """No such job, checkpoint, operator or trigger."""

    job: str | None = None
    checkpoint: int | str | None = None
    """A text where the digits may be too many for a number."""
    vertex: str | None = None
    trigger: str | None = None
    slot: int | None = None
    operator: str | None = None
    state: str | None = None
    sink: str | None = None
    path: str | None = None
    kept: Sequence[int] | None = None


class QuestionNotKnownError(NotFoundError):
    """A worker does not know a kind of question: it is of another version. Nothing is wrong with it."""

    kind: str
    """Value of QuestionKind."""


class WorkerSilentError(StorageUnavailableError):
    """A worker that was asked about itself did not answer: its process or host hangs, it is gone, or its attempt is over."""

    slot: int


class WorkerBusyError(StorageUnavailableError):
    """A worker is being asked already, or many are: ask again."""

    slot: int | None = None


class AuthenticationError(HoldfastError):
    """The bearer token is missing or wrong, or it has expired or was revoked."""

    slot: int | None = None


class AccessDeniedError(HoldfastError):
    """The token is known, and its role or its job does not allow the request."""

    role: str
    needed: str
    """Kind of the request: view, operate, administer or work."""
    job: str | None = None
    """The only job that the token is for."""


class TooManyRequestsError(StorageUnavailableError):
    """The caller asks more often than it may, or more requests wait for a job than it has room for: ask again later."""

    retry_after_ms: int


class TransportSecurityError(HoldfastError):
    """Client and coordinator don't agree on TLS, or the certificate is not trusted: nothing was sent."""

    url: str | None = None
    reason: str
    """untrusted, wrong_name, expired, not_yet_valid, plain_http (the port speaks TLS), no_tls (it does not) or handshake."""


class ProtocolError(HoldfastError):
    """A frame or message can't be decoded, has a gap, or comes out of turn."""

    channel: int | tuple[int, ...] | None = None
    """Its index among the inputs of a subtask, or what names it in the whole job."""
    expected: int | None = None
    got: int | None = None
    message_type: str | None = None
    slot: int | None = None
    subtask: int | None = None
    url: str | None = None


class PeerLostError(HoldfastError):
    """The connection to another worker broke: the attempt is lost."""

    slot: int
    reason: str


class JobFailedError(HoldfastError):
    """The job reached FAILED."""

    job_id: str
    cause: str | None


class InvariantError(HoldfastError):
    """A bug in Holdfast: crash rather than continue."""

    channel: int | tuple[int, ...] | None = None
    """Its index among the inputs of a subtask, or what names it in the whole job."""
    slot: int | None = None
    path: str | None = None


class StillMovingError(HoldfastError):
    """A job under test has not come to rest within the work that one call may take: one of its sources never ends, an operator
    gives work to itself for ever, or the job fails and restarts for ever."""

    rounds: int
    """Of its workers, in this call."""
    rows: int
    """That its sources read meanwhile."""
    moving: Sequence[str]
    """What moved in the last round: subtasks as `uid[subtask]`, `coordinator`, `pool`."""


class CheckpointFailedError(HoldfastError):
    """A requested checkpoint or savepoint was refused or aborted."""

    job_id: str
    reason: str
    """Value of FailureReason."""


ERROR_CLASSES: Mapping[str, type[HoldfastError]] = {
    name: kind for name, kind in list(globals().items()) if isinstance(kind, type) and issubclass(kind, HoldfastError)
}
"""Class name -> class, of every error of this module: for errors that arrive as text, from a worker, a coordinator or a record.

A name that it lacks is that of a newer version, or of no error of Holdfast's."""
