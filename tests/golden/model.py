"""How the contents of golden snapshots are written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import (
    ColumnarStateDescriptor,
    OperatorListStateDescriptor,
    Redistribution,
    RowTableStateDescriptor,
    StateDescriptor,
)

MAX_PARALLELISM = 128
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Key = Any
Rows = Sequence[tuple[Key, bytes, Any]]
"""(key, namespace, value): a value, the elements of a list, the entries of a map, what was added to a reducing state."""


@dataclass(frozen=True)
class Held:
    """A keyed state and its rows."""

    descriptor: Any
    rows: Rows = ()
    value_type: str = ""
    """As `_metadata` says it; written by hand."""
    stamps: Sequence[int] = ()
    """State with a TTL: when each row was written, ms. Several rows of a key are written one after the other."""


Updates = Sequence[tuple[int, Sequence[tuple[Key, int | None, float | None]]]]
"""(start of the window, rows of one batch)."""


Appended = Sequence[tuple[Key, int, int | None, Mapping[str, Any]]]
"""(key, namespace, event time or None, columns): rows of a row table, in the order in which they came."""


@dataclass(frozen=True)
class Contents:
    """One operator."""

    uid: str
    key_type: str | None = None
    held: Sequence[Held] = ()
    columnar: ColumnarStateDescriptor | None = None
    columnar_type: str = ""
    """As `_metadata` says it; written by hand."""
    updates: Updates = ()
    """Those of earlier checkpoints first."""
    dropped_windows: tuple[int, ...] = ()
    """Removed after the updates."""
    row_table: RowTableStateDescriptor | None = None
    row_table_type: str = ""
    """As `_metadata` says it; written by hand."""
    appended: Appended = ()
    """Rows of earlier checkpoints first: orders are the positions of their keys' rows in a subtask."""
    deleted: Callable[[Key, int, Mapping[str, Any]], bool] = lambda key, namespace, row: False
    """Which rows are not there any more."""
    dropped: tuple[int, ...] = ()
    """Namespaces that were dropped, when there were so many rows:"""
    dropped_before: int = 0
    timers: Mapping[str, Sequence[tuple[Key, bytes, int]]] = field(default_factory=dict)
    lists: Mapping[OperatorListStateDescriptor, Sequence[bytes]] = field(default_factory=dict)
    now_ms: int | None = None
    """State with a TTL: the time of the snapshot."""
    external: tuple[str, ...] = ()
    """Only a savepoint has it here: the files of a checkpoint are looked for."""

    @property
    def key(self) -> KeyType:
        assert self.key_type is not None
        return KeyType.parse(self.key_type)

    @property
    def descriptors(self) -> tuple[StateDescriptor, ...]:
        columnar = () if self.columnar is None else (self.columnar,)
        rows = () if self.row_table is None else (self.row_table,)
        return (*(held.descriptor for held in self.held), *columnar, *rows, *self.lists)


def entries_of(descriptor: OperatorListStateDescriptor, entries: Sequence[bytes], subtask: int, parallelism: int) -> list[bytes]:
    """What one subtask stores: its share, or its copy of a broadcast state."""
    return list(entries) if descriptor.redistribution is Redistribution.BROADCAST else list(entries[subtask::parallelism])
