"""Protocols of working state: what operators see of a backend, and what the runtime asks of it at a barrier.

One subtask of one operator has one keyed backend (if its input is keyed) and one operator-state backend. All calls are
made by the worker's loop thread except `PendingSnapshot.flow`, which runs on a pool thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import msgspec

from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange, OperatorListHandle

if TYPE_CHECKING:
    from holdfast.statebackends.serialization.key_texts import KeyOf
    from holdfast.statebackends.serialization.keys import KeyType
    from holdfast.statebackends.state import (
        ColumnarState,
        ColumnarStateDescriptor,
        KeyColumn,
        RowTable,
        RowTableStateDescriptor,
        StateDescriptor,
    )
    from holdfast.statebackends.storage.port import Flow, Storage


class SnapshotTarget(msgspec.Struct, frozen=True):
    """Where an asynchronous snapshot part puts its bytes, and in which form."""

    checkpoint_id: int
    folder: str
    """Storage-relative folder of the snapshot: `<job>/chk-42` or the savepoint's folder."""
    file_prefix: str
    """`<uid>-<subtask>-<attempt>-<nonce>`: makes every file name unique to its writer."""
    canonical: bool
    """Tables in canonical Parquet, which every backend and other tools read: a savepoint. False: the backend's own format."""
    inline_threshold: int
    """Bytes; parts smaller than this are returned inline. 0 = never inline."""
    shared_prefix: str = ""
    """`<id>-<attempt>-<uid>-<subtask>-<nonce>`: how the names of files begin that later checkpoints may share. Empty: every file
    goes into the snapshot's own folder."""
    base: int | None = None
    """The only checkpoint that an increment may build on; completed, and retained until this one is decided. None: write all."""
    pack_threshold: int = 0
    """Bytes; smaller tables share files. 0 = never."""


class PendingSnapshot(Protocol):
    """The asynchronous part of one snapshot: holds a frozen view that the loop thread no longer changes."""

    @property
    def stalled_s(self) -> float:
        """Once the flow has ended: how long it waited for room in the database of the live state, s. 0 where there is none."""

    def flow(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        """Encode the frozen view and write it. Runs once, on a pool thread."""

    def release(self) -> None:
        """Loop thread: the flow ended, failed or was cancelled; frozen layers may be merged."""


class KeptState(Protocol):
    """State of one backend in memory as it was at one barrier, kept for a later backend of the same process."""

    @property
    def names(self) -> frozenset[str]:
        """Of the states that it has; each whole."""

    def release(self) -> None:
        """Loop thread: nobody takes it over any more."""

    def free(self) -> None:
        """Any thread, behind `release`: free its memory, bit by bit."""


TimerRow: TypeAlias = tuple[int, bytes, bytes, int]
"""(time in ms, canonical key, namespace, key group)."""


class FrozenTimerRows(Protocol):
    """Timers as they were at one barrier."""

    def checkpoint_started(self, barrier: int, base: int) -> None:
        """Loop thread, right after the freeze: note what changed before this barrier. Later calls name no base below `base`."""

    def rows(self) -> Iterator[TimerRow]:
        """Pool thread: all rows, in any order."""

    def changes(self, base: int) -> tuple[list[TimerRow], list[TimerRow]] | None:
        """Pool thread: (rows written since the checkpoint `base`, rows removed since); None if changes since then are unknown."""

    def release(self) -> None:
        """Loop thread: the snapshot no longer reads the rows."""


class TimerRowProvider(Protocol):
    """Owner of timers, which the backend snapshots and restores as keyed state of kind `timers`.

    heap.timers.TimerRows implements it over a CopyOnWriteStateTable whose keys are the rows."""

    def freeze(self) -> FrozenTimerRows:
        """Loop thread, at the barrier: O(1) or O(changed)."""

    def load(self, rows: Sequence[TimerRow]) -> None:
        """Add restored rows of this subtask's key groups; may be called several times."""

    def track_since(self, base: int) -> None:
        """Note changes from now on: the present rows are those of the checkpoint `base`."""

    def erase(self, encoded_key: bytes) -> None:
        """Loop thread: remove all rows of a key. O(rows)."""


class KeyCourse(NamedTuple):
    """How the keys of one batch become current one after the other, without a call for each: whoever assigns the next element of
    each column to the attribute of `target` that has its name (`a.b` is attribute b of its a) makes the next key current. All
    columns are as long as the batch."""

    target: Any
    names: tuple[str, ...]
    columns: tuple[Iterable[Any], ...]


class KeyedStateBackend(Protocol):
    """Keyed state of one subtask of one operator."""

    @property
    def key_groups(self) -> KeyGroupRange: ...

    @property
    def max_parallelism(self) -> int: ...

    @property
    def key_type(self) -> KeyType: ...

    def set_current_key(self, encoded_key: bytes, key_group: int) -> None:
        """Select the key that state access refers to. `encoded_key` is key_type.encode(key), the key's identity."""

    def each_key(self, keys: KeyColumn) -> KeyCourse:
        """Select the keys of a batch one by one, as `set_current_key` of each would. Only one course is under way at a time: the
        next call of this or of `set_current_key` ends it."""

    @property
    def current_key(self) -> tuple[bytes, int]:
        """(encoded key, key group) as last set. Raises InvariantError before the first call of `set_current_key`."""

    @property
    def uses_processing_time(self) -> bool:
        """Whether some state has a TTL."""

    def set_processing_time(self, now_ms: int) -> None:
        """Set the wall clock, ms since the epoch, that every TTL uses until the next call.

        The runtime sets it once for each slice of work, so that all of a slice happens at one time."""

    def get_state(self, descriptor: StateDescriptor, namespace: bytes = b"") -> Any:
        """The state object (ValueState, ListState, MapState, ReducingState, AggregatingState) for a declared descriptor.

        The same object is returned each time for one (name, namespace) and follows the current key.
        Raises UndeclaredStateError for a descriptor that was not declared."""

    def columnar_state(self, descriptor: ColumnarStateDescriptor, key_names: Sequence[str]) -> ColumnarState:
        """The accumulators of a declared columnar descriptor. `key_names`: names of the key columns in the batches it returns.

        Raises UndeclaredStateError, and InvalidConfigError on a wrong number of names."""

    def row_table(self, descriptor: RowTableStateDescriptor, key_names: Sequence[str]) -> RowTable:
        """The rows of a declared row table. `key_names` names the key fields in its batches."""

    def register_timers(self, name: str, provider: TimerRowProvider) -> None:
        """Add `provider`'s rows to every snapshot under `name`, and load the restored rows of that name into it.

        Raises InvalidConfigError if a declared state or another provider has the name."""

    def keys(self, state_name: str, namespace: bytes = b"") -> Iterator[bytes]:
        """Encoded keys that have the state, in no particular order; a view for tests, timers and tools.

        The iterator gives the keys that have the state when it starts; the state may change meanwhile."""

    def erase(self, key: KeyOf, states: frozenset[str] | None = None) -> bool:
        """Remove all rows of one key, of every namespace, from some states; None: from all of them, and its timers. A name that is
        no state's is left out. Whether the key is of this subtask's key groups: else no row was.

        Called right in front of `snapshot`, while no operator works on what it has read. No file of that snapshot, if its target
        is canonical, or of a later one that builds on none before it, has a byte of these rows. It may take as long as a look at
        all rows in memory."""

    def snapshot(self, checkpoint_id: int) -> PendingSnapshot:
        """Synchronous part of a snapshot: freeze the active layers, O(1) or O(changed)."""

    def keep(self) -> KeptState | None:
        """Right behind `snapshot`: the states that a later backend could take over as that snapshot has them. None: none."""

    def take_over(self, kept: KeptState, names: frozenset[str]) -> frozenset[str]:
        """Pool thread, in front of `restore`, which then leaves these states alone: begin with states of an earlier backend of the
        same operator, key groups and types. Returns those that were taken: others may not be what a snapshot would give back.

        After an error this backend is of no use."""

    def restore(
        self, handles: Sequence[KeyedStateHandle], storage: Storage, folder: str, *, checkpoint_id: int | None = None
    ) -> None:
        """Load the rows of this subtask's key groups from the snapshot in the storage-relative `folder`.

        `checkpoint_id`: given for a checkpoint in the job's own directory, which increments may build on.
        Raises CorruptStateError."""

    @property
    def writes_behind(self) -> bool:
        """Whether `write_behind` ever has work."""

    def write_behind(self) -> bool:
        """Do a few milliseconds of work that the next barrier would have to wait for. The idle loop calls it.

        Returns whether work is left. Raises nothing: the barrier that needs the work reports its failure."""

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None: ...

    def state_size(self) -> int:
        """Estimate in bytes, for metrics."""

    def dispose(self) -> None:
        """Release memory, files and native handles; idempotent."""


@dataclass(slots=True)
class OperatorListState:
    """Operator state: a list of opaque entries, which a restore redistributes over the subtasks as the descriptor declares."""

    name: str
    entries: list[bytes] = field(default_factory=list)

    def update(self, entries: Iterable[bytes]) -> None:
        """Replace all entries."""
        self.entries = list(entries)


@dataclass(frozen=True, slots=True)
class RestoredOperatorState:
    """Operator state of one new subtask, after redistribution."""

    lists: dict[str, list[bytes]]
    """State name -> entries."""


class OperatorStateBackend(Protocol):
    """Operator (non-keyed) state of one subtask of one operator."""

    def list_state(self, name: str) -> OperatorListState:
        """Declared operator state. Restored entries: those of this subtask (split), of all subtasks (union), or a copy (broadcast).

        A snapshot stores the list as it is: the owner of union state updates it to this subtask's own entries before the next
        barrier, or entries multiply. Raises UndeclaredStateError."""

    def snapshot(self, checkpoint_id: int) -> PendingOperatorSnapshot: ...

    def restore(self, state: RestoredOperatorState) -> None: ...


class PendingOperatorSnapshot(Protocol):
    """Frozen copy of the lists, which the asynchronous part writes."""

    def flow(self, target: SnapshotTarget) -> Flow[tuple[OperatorListHandle, ...]]: ...
