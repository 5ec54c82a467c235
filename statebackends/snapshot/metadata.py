"""`_metadata`, the file that makes a folder a snapshot: JSON in an envelope that shows any damage.

    {"format":"holdfast-snapshot","version":1,"length":<bytes>,"checksum":"xxh3_128:<hex>","snapshot":{...}}

is one JSON document; length and checksum are those of the inner object's bytes. The format is described in docs/snapshot-format.md.
This module knows records, not storage."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, InvalidConfigError, UnsupportedVersionError
from holdfast.statebackends.handles import ChannelState, FileHandle, OperatorState, OperatorSubtaskState, PlaceholderHandle
from holdfast.statebackends.keygroups import KEY_HASH_VERSION
from holdfast.statebackends.snapshot.in_flight import describe_edge, edge_name, repeated_end
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.flows import RECORD_BYTES_MAX

FORMAT = "holdfast-snapshot"
VERSION = 1
"""The version of a snapshot without in-flight records."""

IN_FLIGHT_VERSION = 2
"""That of one with such records, which a reader of version 1 would lose."""

HOOKS_VERSION = 3
"""That of one with states of master hooks, with or without such records: a reader of an earlier version would lose them."""

HOOK_STATE_BYTES_MAX = 262_144
"""State of one master hook."""

FINISHED_PROPERTY = "finished_tasks"
"""Property of `_metadata`: subtasks that had come to the end of their input, `vertex:subtask,...`."""

NATIVE_PROPERTY = "native_backend"
"""Property of a savepoint in the format NATIVE: the state backend whose own files it holds."""

_HEADER = re.compile(
    rb'\{"format":"holdfast-snapshot","version":(\d{1,9}),"length":(\d{1,18}),"checksum":"(xxh3_128:[0-9a-f]{32})","snapshot":'
)
_HEADER_START = b'{"format":"holdfast-snapshot","version":'
HEADER_BYTES_MAX = 200
METADATA_BYTES_MAX = 1 << 30
"""Longest `_metadata` that is read; a longer file is not a snapshot's."""
_TRAILER = b"}\n"


class HookState(msgspec.Struct, frozen=True):
    """State that a master hook gave for one checkpoint."""

    name: str
    version: int
    """Of the state's format, as its hook numbers them; at least 0."""
    state: bytes
    """At most HOOK_STATE_BYTES_MAX; base64 in JSON."""


class SnapshotMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one completed snapshot. File paths in it are relative to the snapshot's folder."""

    format: Literal["holdfast-snapshot"] = "holdfast-snapshot"
    version: int = VERSION
    job_id: str
    job_name: str
    checkpoint_id: int
    kind: Literal["checkpoint", "savepoint", "stop_savepoint"]
    attempt: int
    """Attempt of the job that took the snapshot."""
    epoch: int
    """Epoch of the leader that completed it."""
    trigger_timestamp_ms: int
    completion_timestamp_ms: int
    key_hash_version: int = KEY_HASH_VERSION
    operators: tuple[OperatorState, ...] = ()
    external: tuple[str, ...] = ()
    """Storage paths outside the folder that a restore needs (a source's materialised input, staged sink files)."""
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    graph: dict[str, Any] | None = None
    """JSON of the job graph, for tools and preflight; None: not known."""
    channels: tuple[ChannelState, ...] | msgspec.UnsetType = msgspec.UNSET
    """In-flight records; never empty, unset in a snapshot of version 1, and there is no version 2 without."""
    master_hooks: tuple[HookState, ...] | msgspec.UnsetType = msgspec.UNSET
    """States of master hooks, by name; never empty, unset in snapshots of versions 1 and 2, and there is no version 3 without."""

    @property
    def in_flight(self) -> tuple[ChannelState, ...]:
        """In-flight records, by edge and subtask."""
        return () if self.channels is msgspec.UNSET else self.channels

    @property
    def hooks(self) -> tuple[HookState, ...]:
        """States of master hooks, by name."""
        return () if self.master_hooks is msgspec.UNSET else self.master_hooks

    def without_in_flight(self) -> SnapshotMetadata:
        """The same snapshot without in-flight records."""
        return msgspec.structs.replace(self, channels=msgspec.UNSET, version=version_of(in_flight=False, hooks=bool(self.hooks)))

    @property
    def size(self) -> int:
        """Bytes of state, full."""
        return sum(operator.size for operator in self.operators)

    @property
    def size_in_flight_too(self) -> int:
        """Bytes of state and of records in flight, inline or in files."""
        return self.size + sum(channel.part.length for channel in self.in_flight)


def version_of(*, in_flight: bool, hooks: bool) -> int:
    """The format version of a snapshot: the lowest that says all that is in it."""
    if hooks:
        return HOOKS_VERSION
    return IN_FLIGHT_VERSION if in_flight else VERSION


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(SnapshotMetadata)


def encode_metadata(metadata: SnapshotMetadata, graph: msgspec.Raw | None = None) -> bytes:
    """The bytes of `_metadata`. Raises InvalidConfigError for records that don't fit together, such as an empty or repeated uid.

    `graph`: the JSON of `metadata.graph`, from a caller who has many snapshots of one graph; None: it is encoded here."""
    _validate(metadata, InvalidConfigError)
    body = _ENCODER.encode(metadata if graph is None else msgspec.structs.replace(metadata, graph=graph))
    header = _HEADER_START + b'%d,"length":%d,"checksum":"%s","snapshot":' % (
        metadata.version,
        len(body),
        checksum_of(body).encode("ascii"),
    )
    return b"".join((header, body, _TRAILER))


def decode_metadata(data: bytes, path: str) -> SnapshotMetadata:
    """The snapshot that the bytes of `_metadata` describe. `path` names the file in errors.

    Raises UnsupportedVersionError for another version of the format or the key hash, CorruptStateError for other bytes than
    `encode_metadata` gives."""
    version, body = _open_envelope(data, path)
    try:
        metadata = _DECODER.decode(body)
    except UNDECODABLE as error:
        raise _corrupt(path, len(data) - len(body) - len(_TRAILER), f"not a snapshot of version {version}: {error}") from error
    if metadata.key_hash_version != KEY_HASH_VERSION:
        raise UnsupportedVersionError(
            f"{path}: key hash version {metadata.key_hash_version} is not known; this Holdfast knows {KEY_HASH_VERSION}",
            path=path,
            version=metadata.key_hash_version,
            supported=KEY_HASH_VERSION,
        )
    metadata = msgspec.structs.replace(metadata, version=version)
    _validate(metadata, lambda reason: _corrupt(path, 0, reason))
    return metadata


def promised_length(head: bytes) -> int:
    """Bytes that a `_metadata` with this beginning has at most: as its header says; without a header, those of a record."""
    header = _HEADER.match(head[:HEADER_BYTES_MAX])
    return RECORD_BYTES_MAX if header is None else min(header.end() + int(header[2]) + len(_TRAILER), METADATA_BYTES_MAX)


def _open_envelope(data: bytes, path: str) -> tuple[int, memoryview]:
    """(version, body)."""
    header = _HEADER.match(data[:HEADER_BYTES_MAX])
    if header is None:
        raise _corrupt(path, _header_damage(data), "no snapshot header" if data else "the file is empty")
    version, length = int(header[1]), int(header[2])
    if version not in (VERSION, IN_FLIGHT_VERSION, HOOKS_VERSION):
        raise UnsupportedVersionError(
            f"{path}: snapshot format version {version} is not supported; this Holdfast reads up to version {HOOKS_VERSION}",
            path=path,
            version=version,
            supported=HOOKS_VERSION,
        )
    expected = header.end() + length + len(_TRAILER)
    if len(data) < expected:
        raise _corrupt(path, len(data), f"truncated: {expected} bytes expected")
    body = memoryview(data)[header.end() : header.end() + length]
    if data[header.end() + length :] != _TRAILER:
        raise _corrupt(path, header.end() + length, "does not end where its header says")
    if checksum_of(body) != header[3].decode("ascii"):
        raise _corrupt(path, header.end(), "the checksum does not match")
    return version, body


def _header_damage(data: bytes) -> int:
    """About where a header that doesn't parse is damaged, for the message."""
    common = min(len(data), len(_HEADER_START))
    same = next((at for at in range(common) if data[at] != _HEADER_START[at]), common)
    return same if same < len(_HEADER_START) else min(len(data), HEADER_BYTES_MAX)


def _corrupt(path: str, position: int, reason: str) -> CorruptStateError:
    return CorruptStateError(f"{path}: corrupt at {position}: {reason}", path=path, operator=None, reason=reason)


def _validate(metadata: SnapshotMetadata, error: Callable[[str], HoldfastError]) -> None:
    if not metadata.job_id or not metadata.job_name:
        raise error("the job's id or name is empty")
    if metadata.version != version_of(in_flight=bool(metadata.in_flight), hooks=bool(metadata.hooks)):
        holds = f"in-flight records of {len(metadata.in_flight)} channels' ends and {len(metadata.hooks)} states of master hooks"
        raise error(f"version {metadata.version} with {holds}")
    _validate_hooks(metadata.hooks, error)
    for channel in metadata.in_flight:
        if isinstance(channel.part, PlaceholderHandle):
            raise error(f"in-flight records of {channel.source!r}: {channel.part.path} is a placeholder that was never resolved")
    again = repeated_end(metadata.in_flight)
    if again is not None:
        edge = describe_edge(edge_name(again))
        raise error(f"in-flight records of {edge}, {again.side} side of subtask {again.subtask}, are in the snapshot twice")
    uids: set[str] = set()
    for operator in metadata.operators:
        if not operator.uid or not operator.name or not operator.operator_id:
            raise error(f"an operator's uid, name or id is empty: {operator.uid!r}, {operator.name!r}")
        if operator.uid in uids:
            raise error(f"operator {operator.uid!r} is in the snapshot twice")
        uids.add(operator.uid)
        if len(operator.subtasks) != operator.parallelism:
            raise error(f"operator {operator.uid!r} has {len(operator.subtasks)} subtasks at parallelism {operator.parallelism}")
        for subtask in operator.subtasks:
            problem = _problem_of(subtask)
            if problem is not None:
                raise error(f"operator {operator.uid!r}{problem}")


def _problem_of(subtask: OperatorSubtaskState) -> str | None:
    """What is wrong with the state of a subtask, to follow the operator's uid. In plain loops: it is asked of every subtask of
    every checkpoint, and comprehensions took three times as long."""
    for keyed in subtask.keyed:
        for state in keyed.states:
            if not state.name:
                return _NAMELESS
    for listed in subtask.operator:
        if not listed.state.name:
            return _NAMELESS
    for keyed in subtask.keyed:
        for part in keyed.parts:
            if not isinstance(part, FileHandle) and isinstance(part, PlaceholderHandle):
                return _unresolved(part)
    for listed in subtask.operator:
        if isinstance(listed.part, PlaceholderHandle):
            return _unresolved(listed.part)
    return None


_NAMELESS = " has a state with an empty name"


def _unresolved(part: PlaceholderHandle) -> str:
    return f": {part.path} is a placeholder that was never resolved"


def _validate_hooks(hooks: tuple[HookState, ...], error: Callable[[str], HoldfastError]) -> None:
    names = [hook.name for hook in hooks]
    if "" in names or names != sorted(set(names)):
        raise error(f"the names of master hooks are empty, repeated or out of order: {', '.join(map(repr, names))[:200]}")
    for hook in hooks:
        if len(hook.state) > HOOK_STATE_BYTES_MAX or hook.version < 0:
            raise error(f"master hook {hook.name!r}: {len(hook.state)} bytes of version {hook.version} can't be its state")
