"""Records that say where a piece of state is; plain data, the same in a message, in `_metadata` and in a test."""

from __future__ import annotations

from typing import NewType

import msgspec

CheckpointId = NewType("CheckpointId", int)
"""1, 2, 3 ...: strictly increasing for the life of a job, never reused."""

CHECKPOINT_ID_MAX = 10**15
"""Highest id of a snapshot that a job starts from: three digits short of what names of files and records can hold."""

AttemptId = NewType("AttemptId", int)
"""1, 2, 3 ...: a deployment of the whole job; strictly increasing for the life of a job id."""

Uid = NewType("Uid", str)
"""An operator's stable identity, as the user gave it or as generated from its position in the graph."""


class KeyGroupRange(msgspec.Struct, frozen=True, order=True):
    """Half-open range [start, stop) of key groups; empty when start == stop."""

    start: int
    stop: int

    def __contains__(self, key_group: int) -> bool:
        return self.start <= key_group < self.stop

    def __len__(self) -> int:
        return self.stop - self.start

    def intersection(self, other: KeyGroupRange) -> KeyGroupRange:
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return KeyGroupRange(start, max(start, stop))


class FileHandle(msgspec.Struct, frozen=True, tag="file"):
    """One durable, immutable file. `path` is relative to the snapshot's own folder ("chk-42/", "savepoint-…/").

    A file that checkpoints share lies beside it: `../shared/<name>` (layout.py)."""

    path: str
    length: int
    """Bytes."""
    checksum: str
    """`xxh3_128:<32 hex>` over the whole file."""

    @property
    def file_length(self) -> int:
        """Bytes of the file that it is in."""
        return self.length

    @property
    def offset(self) -> int:
        """Where it begins in that file."""
        return 0


PIECE_BYTES_MAX = 64 << 20
"""Of a piece, which is read whole: eight times as much as a file with several has. What is longer is somebody's trap."""


class SegmentHandle(FileHandle, frozen=True, tag="segment"):
    """A piece of one durable, immutable file that holds several: `length` and `checksum` are the piece's."""

    offset: int
    file_length: int

    @property
    def is_inside(self) -> bool:
        """Whether such a piece can be in its file, and held in memory by whoever reads it."""
        return 0 <= self.offset <= self.offset + self.length <= self.file_length and self.length <= PIECE_BYTES_MAX


class InlineHandle(msgspec.Struct, frozen=True, tag="inline"):
    """State small enough (below the inline threshold) to travel in the acknowledgement and live in `_metadata`."""

    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)


class PlaceholderHandle(msgspec.Struct, frozen=True, tag="placeholder"):
    """A shared file that the base of an increment has, and that was not stored again. Only in acknowledgements: the coordinator
    puts the base's FileHandle in its place before a checkpoint completes."""

    path: str
    length: int
    """Bytes; compared with the registered file's."""
    offset: int | None = None
    """Of a piece of a file; None: the whole file."""


StateHandle = FileHandle | SegmentHandle | InlineHandle | PlaceholderHandle


class StateMeta(msgspec.Struct, frozen=True):
    """What a state is, as declared when the graph was built; stored with every snapshot of it and compared at restore."""

    name: str
    kind: str
    """value | list | map | reducing | aggregating | columnar | timers | operator_list | operator_union | operator_broadcast."""
    value_type: str
    """Canonical text of the declared value type (serializers.TypeSerializer.text); for map state `map<K,V>`."""
    key_type: str | None = None
    """Canonical text of the operator's key type; None for operator state."""


TABLE_FORMATS = ("arrow", "parquet")
"""Formats of handles whose parts are whole tables: rows sorted by key group, one file a state. Every state backend reads them."""
DELTA_FORMAT = "arrow-delta"
"""Format of a handle whose parts are deltas: several of one state, oldest first, upon the table of the same state and key
groups in the handle before it. Readers that don't know it refuse it, and so never take a base for all there is."""
NATIVE_FORMAT = "rocksdb"
"""Format of a handle whose parts are files of a RocksDB database, all states in all of them. One state backend reads them."""


class KeyedStateHandle(msgspec.Struct, frozen=True, tag="keyed"):
    """A piece of keyed state of one old subtask."""

    key_groups: KeyGroupRange
    format: str
    """One of TABLE_FORMATS, DELTA_FORMAT or NATIVE_FORMAT."""
    states: tuple[StateMeta, ...]
    """The states found in `parts`: of tables and deltas parts[i] belongs to states[i]; in native files all share the parts."""
    parts: tuple[StateHandle, ...]
    names: tuple[str, ...] = ()
    """Native files only: the local file name of each part."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.length for part in self.parts)

    @property
    def new_size(self) -> int:
        """Bytes without those of files that an earlier checkpoint stored; of an acknowledgement."""
        return sum(part.length for part in self.parts if not isinstance(part, PlaceholderHandle))


class OperatorListHandle(msgspec.Struct, frozen=True, tag="operator_list"):
    """Operator state (list, union, broadcast) of one old subtask: msgpack array of opaque entries, one binary each."""

    state: StateMeta
    part: StateHandle
    count: int
    """Entries in the part."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.part.length


def external_places(entry: str) -> tuple[str, ...]:
    """Where an external file may be: `a|b` is a file that moves from a to b (a staged sink file, once it is committed)."""
    return tuple(entry.split("|"))


class OperatorSubtaskState(msgspec.Struct, frozen=True):
    """Everything that one subtask of one operator stored for one checkpoint."""

    keyed: tuple[KeyedStateHandle, ...] = ()
    operator: tuple[OperatorListHandle, ...] = ()
    external: tuple[str, ...] = ()
    """Files outside the snapshot that it needs (a source's materialised input, staged sink files): see `external_places`."""

    @property
    def size(self) -> int:
        """Bytes, full."""
        return sum(handle.size for handle in self.keyed) + sum(handle.size for handle in self.operator)

    @property
    def new_size(self) -> int:
        """Bytes that were stored for it; of an acknowledgement."""
        return sum(handle.new_size for handle in self.keyed) + sum(handle.size for handle in self.operator)


class OperatorState(msgspec.Struct, frozen=True):
    """All subtasks of one operator in one snapshot."""

    uid: str
    operator_id: str
    """32 hex digits: murmur3-128 of the uid."""
    name: str
    parallelism: int
    max_parallelism: int
    subtasks: tuple[OperatorSubtaskState, ...]
    """Length = parallelism; index = subtask."""

    @property
    def size(self) -> int:
        """Bytes, full."""
        return sum(subtask.size for subtask in self.subtasks)
