"""Every error that Holdfast raises on purpose: one class per thing that the caller does differently.

Fields are typed attributes, and every error survives pickling between processes. It knows nothing of HTTP;
`api` maps kinds to status codes."""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """Base of all kinds. `fields` names the things concerned (operator, file, subtask ...), for machines and logs."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Any] = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[HoldfastError], message: str, fields: dict[str, Any]) -> HoldfastError:
    return kind(message, **fields)


class InvalidConfigError(HoldfastError):
    """A setting, graph or argument is wrong: fix it and call again."""


class GraphError(InvalidConfigError):
    """The job graph can't be built: duplicate uid, undeclared schema, forward edge between unequal parallelisms ..."""


class UnknownColumnError(GraphError):
    """A column named in the graph is not in the stream. Fields: operator, column, available."""


class NotEnoughSlotsError(InvalidConfigError):
    """The cluster runs fewer concurrent tasks than the job needs. Fields: required, available."""


class StateDirectoryNotSharedError(InvalidConfigError):
    """A worker can't see the coordinator's state directory. Fields: directory, slot."""


class StorageUnavailableError(HoldfastError):
    """Storage failed in a way that may pass: retry, or fail the checkpoint. Subclasses name the reason where it is known.
    Fields: path."""


class AmbiguousWriteError(StorageUnavailableError):
    """A conditional write may or may not have happened: read back before deciding, delete nothing. Fields: path."""


class NotLeaderError(StorageUnavailableError):
    """This process does not lead the job, not yet, or not any more: ask the leader if it names one, or again later.
    Fields: job, and epoch and url of the leader where they are known."""


class RecoveringError(StorageUnavailableError):
    """This coordinator began a moment ago, and has not come to the job yet: ask it again. Fields: job."""


class StorageAccessError(StorageUnavailableError):
    """Object storage refuses us until somebody mends access to it; no job is to fail for that.

    Fields: path, bucket, key, reason (credentials, denied, bucket: there is none)."""


class StorageThrottledError(StorageUnavailableError):
    """Object storage asked us to slow down until our patience ended. Fields: path, bucket, key."""


class OutOfSpaceError(StorageUnavailableError):
    """A disk, a quota or an object store is full: it goes on once there is room. Fields: path; errno or bucket and key."""


class TooManyFilesError(StorageUnavailableError):
    """The process or its host has no file descriptors left. Fields: path, errno."""


class PermissionDeniedError(StorageUnavailableError):
    """The system refuses us a file, or its file system is read-only, until somebody mends that. Fields: path, errno."""


class InputOutputError(StorageUnavailableError):
    """A device failed or is gone. Fields: path, errno."""


class ObjectMissingError(HoldfastError):
    """A path that was read does not exist. Fields: path."""


class FencedError(HoldfastError):
    """A newer leader, attempt or owner exists: stop, change nothing. Fields say what was held and what is newer."""


class CorruptStateError(HoldfastError):
    """A snapshot file is missing, truncated, or does not match its checksum or its format. Never what a disk, a limit or a right
    refuses, which passes: see storage/system_failures.py. Fields: path, operator, reason."""


class UnsupportedVersionError(CorruptStateError):
    """A snapshot was written by a newer version. Fields: path, version, supported."""


class RestoreError(HoldfastError):
    """A snapshot is sound, but this job can't start from it. Subclasses say why."""


class UnclaimedStateError(RestoreError):
    """The snapshot holds state of an operator that the job lacks. Fields: operators (uid -> bytes)."""


class IncompatibleStateError(RestoreError):
    """A state's declared type, key type or kind differs from the stored one. Fields: operator, state, stored, declared."""


class MaxParallelismError(RestoreError):
    """Max parallelism differs from the stored one, or is below the parallelism. Fields: operator, stored, requested."""


class BackendMismatchError(RestoreError):
    """The snapshot holds a state backend's own files, and the job runs on another one. Fields: operator, stored, requested."""


class SnapshotClaimedError(RestoreError):
    """Another job owns the snapshot, or a newer checkpoint of this one has subsumed it: it is deleted. Fields: path, owner."""


class OutputMayRepeatError(RestoreError):
    """Restoring here rewinds below committed output; an explicit flag is needed. Fields: restored, committed."""


class SinkMovedError(RestoreError):
    """A sink writes elsewhere than the log that the snapshot knows, or to a log of another job. Fields: sink, path, stored and
    stored_id (path and sink id in the snapshot; None if not known)."""


class CommittablesLeftError(RestoreError):
    """Rows before the snapshot were staged for a sink and are committed by nobody. Fields: sink, path, rows, files, checkpoints."""


class InvalidKeyError(HoldfastError):
    """A key is null or does not fit the declared key type. Fields: operator, subtask, value."""


class StateValueError(HoldfastError):
    """A value does not fit its state's declared type. Fields: type (canonical text), value (repr, truncated)."""


class StateBackendError(HoldfastError):
    """The library under a state backend gave up (a panic): its working state is lost, the last checkpoint is not. Fields: operator,
    state (empty if all of them are concerned), path."""


class UserFunctionError(HoldfastError):
    """User code raised. Fields: operator, subtask, record (repr, truncated to 500 characters), function."""


class SchemaMismatchError(UserFunctionError):
    """A row or batch does not fit the schema declared for its operator. Fields: operator, column, record."""


class TooManyRowsSkippedError(HoldfastError):
    """A function with on_error="skip" left out more rows than `skipped_rows_max` allows. Fields: operator, subtask, limit."""


class InvalidTimestampError(HoldfastError):
    """An event time is null, naive or not a time. Fields: operator, subtask, record."""


class UndeclaredStateError(HoldfastError):
    """A function asked for a state that it did not declare. Fields: operator, state."""


class StateOverflowError(HoldfastError):
    """An integer sum left the range of int64. Fields: operator, state, column."""


class SnapshotTooLargeError(HoldfastError):
    """A `memory` backend's snapshot is too large to travel to the coordinator. Fields: operator, subtask, size, limit."""


class InputChangedError(HoldfastError):
    """A file that a source reads is missing or is no longer what its position refers to. Fields: operator, path, reason."""


class CommittableLostError(HoldfastError):
    """A staged sink file is missing and in no commit manifest: output would be lost. Fields: sink, path, checkpoint."""


class JobExistsError(HoldfastError):
    """A job of this name is in a terminal state; say restore= or fresh=True. Fields: job_id, state."""


class NotFoundError(HoldfastError):
    """No such job, checkpoint, operator or trigger. Fields name it."""


class AuthenticationError(HoldfastError):
    """The bearer token is missing or wrong."""


class ProtocolError(HoldfastError):
    """A frame or message can't be decoded, has a gap, or comes out of turn. Fields: channel, expected, got."""


class PeerLostError(HoldfastError):
    """The connection to another worker broke: the attempt is lost. Fields: slot, reason."""


class JobFailedError(HoldfastError):
    """The job reached FAILED. Fields: job_id, cause."""


class InvariantError(HoldfastError):
    """A bug in Holdfast: crash rather than continue."""


class CheckpointFailedError(HoldfastError):
    """A requested checkpoint or savepoint was refused or aborted. Fields: reason (FailureReason value), checkpoint_id."""
