"""State handles: records of where state is stored. Plain data, the same in a message, in `_metadata` and in a test.

No record here can be part of a cycle, so the garbage collector does not look at them (`gc=False`): a coordinator holds those of
every subtask, and looking at them cost more than decoding them. What looks at every part of every acknowledgement asks for
FileHandle first: `isinstance` is quick for the very class alone, since for others msgspec has an abstract base class asked."""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

CheckpointId = NewType("CheckpointId", int)
"""1, 2, 3 ...: strictly increasing for the life of a job, never reused."""

CHECKPOINT_ID_MAX = 10**15
"""Highest id of a snapshot that a job may start from: three digits below what file names and records hold."""

AttemptId = NewType("AttemptId", int)
"""1, 2, 3 ...: a deployment of the whole job; strictly increasing for the life of a job id."""

Uid = NewType("Uid", str)
"""An operator's stable identity, as the user gave it or as generated from its position in the graph."""


class KeyGroupRange(msgspec.Struct, frozen=True, gc=False, order=True):
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


class FileHandle(msgspec.Struct, frozen=True, gc=False, tag="file"):
    """One durable, immutable file. `path` is relative to the snapshot's own folder ("chk-42/", "savepoint-…/").

    A file that checkpoints share lies beside it: `../shared/<name>` (layout.py)."""

    path: str
    length: int
    """Bytes."""
    checksum: str
    """`xxh3_128:<32 hex>` over the whole file."""

    @property
    def file_length(self) -> int:
        """Bytes of the file that holds it."""
        return self.length

    @property
    def offset(self) -> int:
        """Where it begins in that file."""
        return 0


SEGMENT_BYTES_MAX = 64 << 20
"""Longest segment, which is read whole. Merged files have at most an eighth of it, so a longer one was forged."""


class SegmentHandle(FileHandle, frozen=True, gc=False, tag="segment"):
    """A segment of one durable, immutable file that several parts share; `length` and `checksum` are the segment's.

    Source: Flink, FLIP-306 (unified file merging)."""

    offset: int
    file_length: int

    @property
    def is_inside(self) -> bool:
        """Whether the segment lies within its file, and is short enough to be held in memory."""
        return 0 <= self.offset <= self.offset + self.length <= self.file_length and self.length <= SEGMENT_BYTES_MAX


class InlineHandle(msgspec.Struct, frozen=True, gc=False, tag="inline"):
    """State below the inline threshold, which travels in the acknowledgement and is stored in `_metadata`."""

    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)


class PlaceholderHandle(msgspec.Struct, frozen=True, gc=False, tag="placeholder"):
    """A shared file of the increment's base that was not stored again.

    Only in acknowledgements: the coordinator replaces it by the base's FileHandle before a checkpoint completes."""

    path: str
    length: int
    """Bytes; the coordinator compares them with those of the base's file."""
    offset: int | None = None
    """Where the segment begins; None: the whole file."""


StateHandle = FileHandle | SegmentHandle | InlineHandle | PlaceholderHandle


class StateMeta(msgspec.Struct, frozen=True, gc=False):
    """Description of one state, as declared when the graph was built; stored with its snapshots and compared at restore."""

    name: str
    kind: str
    """value | list | map | reducing | aggregating | columnar | row_table | timers |
    operator_list | operator_union | operator_broadcast."""
    value_type: str
    """Canonical text of the declared value type (TypeSerializer.text); for map state `map<K,V>`."""
    key_type: str | None = None
    """Canonical text of the operator's key type; None for operator state."""


TABLE_FORMATS = ("arrow", "parquet")
"""Formats of handles whose parts are whole tables: one a state, rows sorted by key group. Every state backend reads them."""
DELTA_FORMAT = "arrow-delta"
"""Format of a handle whose parts are deltas, oldest first, on the table of the same state and key groups in the handle before it.

A format of its own, so that a reader that doesn't know deltas refuses the snapshot instead of taking the base for all of it."""
SET_DELTA_FORMAT = "arrow-set-delta"
"""As DELTA_FORMAT, of columnar states with sets: a row of a delta may have what sets gained, and not all of them.

A format of its own, so that a reader that takes a row for all of it refuses the snapshot."""
DELTA_FORMATS = (DELTA_FORMAT, SET_DELTA_FORMAT)
NATIVE_FORMAT = "rocksdb"
"""Format of a handle whose parts are files of a RocksDB database, which hold all states. Only the backend `rocksdb` reads them."""


class KeyedStateHandle(msgspec.Struct, frozen=True, gc=False, tag="keyed"):
    """Keyed state of one old subtask, in one format."""

    key_groups: KeyGroupRange
    format: str
    """One of TABLE_FORMATS, DELTA_FORMATS or NATIVE_FORMAT."""
    states: tuple[StateMeta, ...]
    """The states in `parts`: a table or delta parts[i] belongs to states[i]; native files hold all states together."""
    parts: tuple[StateHandle, ...]
    names: tuple[str, ...] = ()
    """Native files only: the local file name of each part."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.length for part in self.parts)

    @property
    def new_size(self) -> int:
        """Bytes stored for this checkpoint: without those of placeholders. For an acknowledgement."""
        return sum(part.length for part in self.parts if not isinstance(part, PlaceholderHandle))


class OperatorListHandle(msgspec.Struct, frozen=True, gc=False, tag="operator_list"):
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
    """Paths at which an external file may be: `a|b` is a file that moves from a to b (a staged sink file, when committed)."""
    return tuple(entry.split("|"))


class OperatorSubtaskState(msgspec.Struct, frozen=True, gc=False):
    """State that one subtask of one operator stored for one checkpoint."""

    keyed: tuple[KeyedStateHandle, ...] = ()
    operator: tuple[OperatorListHandle, ...] = ()
    external: tuple[str, ...] = ()
    """Files outside the snapshot that a restore needs (a source's materialised input, staged sink files): see `external_places`."""

    @property
    def size(self) -> int:
        """Bytes, full."""
        size = 0
        for keyed in self.keyed:
            for part in keyed.parts:
                size += part.length
        for listed in self.operator:
            size += listed.part.length
        return size

    @property
    def new_size(self) -> int:
        """Bytes stored for this checkpoint. For an acknowledgement."""
        return sum(handle.new_size for handle in self.keyed) + sum(handle.size for handle in self.operator)


class OperatorState(msgspec.Struct, frozen=True, gc=False):
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


class ChannelPiece(msgspec.Struct, frozen=True, gc=False):
    """What one end of one channel had stored: consecutive elements, as one Arrow IPC stream."""

    peer: int
    """Subtask at the other end of the channel."""
    offset: int
    """Bytes, in the part."""
    length: int
    """Bytes."""
    rows: int


class ChannelState(msgspec.Struct, frozen=True, gc=False):
    """Records in flight that one subtask stored of the channels of one edge, at one end of them.

    The edge is known by `source`, `tag`, `target`, `input` and `ordinal`, whatever its number in the graph."""

    source: str
    """Uid of the operator that feeds the edge."""
    tag: str | None
    """Of its side output; None: its main output."""
    target: str
    """Uid of the head of the chain that reads it."""
    input: int
    """Which input of the target."""
    ordinal: int
    """Number among edges that are equal in the four above, in the graph's order, from 0."""
    partitioning: str
    side: Literal["input", "output"]
    """input: the consumer stored it, output: the producer. Of one channel, what the consumer stored comes first."""
    subtask: int
    """The one that stored it."""
    rows: int
    part: StateHandle
    pieces: tuple[ChannelPiece, ...]
    """In the order of each channel; a channel may have several."""
