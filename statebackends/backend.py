"""Protocols of working state: what operators see of a backend, and what the runtime asks of it at a barrier.

One subtask of one operator has one keyed backend (if its input is keyed) and one operator-state backend. All calls are
made by the worker's loop thread except `PendingSnapshot.flow`, which runs on a pool thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange, OperatorListHandle

if TYPE_CHECKING:
    from holdfast.statebackends.serialization.keys import KeyType
    from holdfast.statebackends.state import ColumnarState, ColumnarStateDescriptor, StateDescriptor
    from holdfast.statebackends.storage.port import Flow, Storage


class SnapshotTarget(msgspec.Struct, frozen=True):
    """Where an asynchronous snapshot part puts its bytes, and in which form."""

    checkpoint_id: int
    folder: str
    """Storage-relative folder of the snapshot: `<job>/chk-42` or the savepoint's folder."""
    file_prefix: str
    """`<uid>-<subtask>-<attempt>-<nonce>`: makes every file name unique to its writer."""
    canonical: bool
    """True for savepoints: canonical Parquet, readable without Holdfast and by every backend."""
    inline_threshold: int
    """Bytes; parts smaller than this are returned inline. 0 = never inline."""
    shared_prefix: str = ""
    """`<id>-<attempt>-<uid>-<subtask>-<nonce>`: names of files that later checkpoints may share begin with it. Empty: everything
    goes into the snapshot's own folder."""
    base: int | None = None
    """The only checkpoint that an increment may build on: it is completed and stays until this one is decided."""
    pack_threshold: int = 0
    """Bytes; tables smaller than this go into files together. 0 = never."""


class PendingSnapshot(Protocol):
    """The asynchronous part of one snapshot: holds a frozen view that the loop thread no longer changes."""

    def flow(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        """Encode and write. Runs once, on a pool thread."""

    def release(self) -> None:
        """Loop thread: the flow ended (well or not) or was cancelled; frozen layers may be merged again."""


TimerRow: TypeAlias = tuple[int, bytes, bytes, int]
"""(time in ms, canonical key, namespace, key group)."""


class FrozenTimerRows(Protocol):
    """Timers as they were at one barrier."""

    def checkpoint_started(self, barrier: int, base: int) -> None:
        """Loop thread, right after the freeze: note what changed before this barrier. No base below `base` will be asked for."""

    def rows(self) -> Iterator[TimerRow]:
        """Pool thread: all rows, in any order."""

    def changes(self, base: int) -> tuple[list[TimerRow], list[TimerRow]] | None:
        """Pool thread: rows that are new since the checkpoint `base` or were written again, and rows that are gone.

        None: that is not known."""

    def release(self) -> None:
        """Loop thread: the rows are not needed any more."""


class TimerRowProvider(Protocol):
    """Keeps timers of its own order, and lets the backend snapshot and restore them as keyed state of kind `timers`.

    heap.timers.TimerRows is one over a CopyOnWriteStateTable whose keys are rows."""

    def freeze(self) -> FrozenTimerRows:
        """Loop thread, at the barrier: O(1) or O(changed)."""

    def load(self, rows: Sequence[TimerRow]) -> None:
        """Add restored rows of our key groups; may be called several times."""

    def track_since(self, base: int) -> None:
        """The rows as they are now are those of the checkpoint `base`: note changes from now on."""


class KeyedStateBackend(Protocol):
    """Keyed state of one subtask of one operator."""

    @property
    def key_groups(self) -> KeyGroupRange: ...

    @property
    def max_parallelism(self) -> int: ...

    @property
    def key_type(self) -> KeyType: ...

    def set_current_key(self, encoded_key: bytes, key_group: int) -> None:
        """Select the key that state access refers to. `encoded_key` = key_type.encode(key): the key's identity."""

    @property
    def current_key(self) -> tuple[bytes, int]:
        """(encoded key, key group) as last set. Raises InvariantError when none was."""

    @property
    def uses_processing_time(self) -> bool:
        """Whether some state has a TTL."""

    def set_processing_time(self, now_ms: int) -> None:
        """The wall clock as every TTL sees it until the next call: said once for each slice of work, so that all of it is at
        one time."""

    def get_state(self, descriptor: StateDescriptor, namespace: bytes = b"") -> Any:
        """The state object (ValueState, ListState, MapState, ReducingState, AggregatingState) for a declared descriptor.

        The same object is returned each time for one (name, namespace) and follows the current key.
        Raises UndeclaredStateError for a descriptor that was not declared."""

    def columnar_state(self, descriptor: ColumnarStateDescriptor, key_names: Sequence[str]) -> ColumnarState:
        """The accumulators of a declared columnar descriptor. `key_names` names the key fields in its batches."""

    def register_timers(self, name: str, provider: TimerRowProvider) -> None:
        """Let `provider`'s rows be part of every snapshot from now on, under `name`; gives it the rows that were restored.

        Raises InvalidConfigError if `name` is that of a declared state or is taken."""

    def keys(self, state_name: str, namespace: bytes = b"") -> Iterator[bytes]:
        """Encoded keys that have the state, in no particular order; a view for tests, timers and tools.

        State may change while it is iterated: those are given that had the state at the first one."""

    def snapshot(self, checkpoint_id: int) -> PendingSnapshot:
        """Synchronous part: freeze the active layers, O(1) or O(changed)."""

    def restore(
        self, handles: Sequence[KeyedStateHandle], storage: Storage, folder: str, *, checkpoint_id: int | None = None
    ) -> None:
        """Load rows of our key groups. `folder`: the snapshot's storage-relative folder. Raises CorruptStateError.

        `checkpoint_id`: of a checkpoint in the job's own directory, which increments may build on."""

    @property
    def writes_behind(self) -> bool:
        """Whether `write_behind` may ever have something to do."""

    def write_behind(self) -> bool:
        """Called when there is nothing else to do: a few milliseconds of what the next barrier would have to wait for.

        Whether there is more. Raises nothing: what fails here is told by the barrier that needs it."""

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None: ...

    def state_size(self) -> int:
        """Estimate in bytes, for metrics."""

    def dispose(self) -> None:
        """Release memory, files and native handles; idempotent."""


@dataclass(slots=True)
class OperatorListState:
    """Operator state: a list of opaque entries that a restore deals out to subtasks as its descriptor says."""

    name: str
    entries: list[bytes] = field(default_factory=list)

    def update(self, entries: Iterable[bytes]) -> None:
        """Replace all entries."""
        self.entries = list(entries)


@dataclass(frozen=True, slots=True)
class RestoredOperatorState:
    """What one new subtask got after redistribution: state name -> entries."""

    lists: dict[str, list[bytes]]


class OperatorStateBackend(Protocol):
    """Operator (non-keyed) state of one subtask of one operator."""

    def list_state(self, name: str) -> OperatorListState:
        """Declared operator state; entries as restored: those of this subtask, of all (union), or a copy (broadcast).

        A snapshot holds what the list holds: with union state, update it to this subtask's own entries before the next one, or the
        entries of all multiply. Raises UndeclaredStateError."""

    def snapshot(self, checkpoint_id: int) -> PendingOperatorSnapshot: ...

    def restore(self, state: RestoredOperatorState) -> None: ...


class PendingOperatorSnapshot(Protocol):
    """Frozen copy of the lists, to be written by the asynchronous part."""

    def flow(self, target: SnapshotTarget) -> Flow[tuple[OperatorListHandle, ...]]: ...
