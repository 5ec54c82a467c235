"""Increments of keyed state: a base table, and deltas of the rows that changed since.

A backend remembers, for each checkpoint, the files that it stored. A trigger names a base, which is completed, and only that one is
looked up. Unknown files are stored again; files are never recognised by their content.

A state's table is written whole, as a new base, if the trigger's base has no chain of it, if the changes since are unknown, if its
deltas would be too many or too large (a restore reads all of them), or if less than half of a file that it shares with other
tables is still needed. Inline tables are small, and always whole. Bases are shared files or segments of them (docs/adr/0021), and
placeholders where the trigger's base has them (docs/adr/0012). So are deltas, but for small ones: they are inline, with a sum below
the inline threshold, so that acknowledgements don't grow. A row table's new delta takes in those before it where many are of its
size, so that a chain has few (docs/adr/0058).

It does not know how changed rows are found (sources.py), or what a delta holds (deltas.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    PlaceholderHandle,
    SegmentHandle,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.layout import shared_name
from holdfast.statebackends.snapshot.deltas import DELTAS_MAX, StatePart, delta_format, replaced_by
from holdfast.statebackends.snapshot.parts import PartsWriter, WrittenPart
from holdfast.statebackends.snapshot.sources import ChangingSource, write_tables
from holdfast.statebackends.snapshot.tables import encode_keyed_table
from holdfast.statebackends.storage.port import Flow

S = TypeVar("S")

CHECKPOINTS_MAX = 32
"""Checkpoints remembered in addition to the base; a forgotten one that becomes the base costs a full checkpoint."""


class StoredByCheckpoint(Generic[S]):
    """What one backend stored for each checkpoint, by name; a restore adds the files of the restored one.

    Thread-safe: flows use it on pool threads, and notices come on the loop thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, Mapping[str, S]] = {}
        self._base = 0

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Remembered ids, ascending."""
        with self._lock:
            return tuple(sorted(self._files))

    @property
    def base(self) -> int:
        """The newest base that `of_base` was called with; 0 before the first."""
        with self._lock:
            return self._base

    def of_base(self, base: int | None) -> Mapping[str, S]:
        """What a base stored, by name; empty without a base, or for one that is not remembered.

        Forgets lower ids, since later bases are never lower."""
        with self._lock:
            if base is None:
                return {}
            self._base = max(self._base, base)
            for checkpoint_id in [known for known in self._files if known < base]:
                del self._files[checkpoint_id]
            return self._files.get(base, {})

    def remember(self, checkpoint_id: int, files: Mapping[str, S]) -> None:
        """Add a checkpoint that was stored, or restored; the coordinator decides whether it completes."""
        with self._lock:
            self._files[checkpoint_id] = files
            known = sorted(self._files)
            for surplus in known[1 : max(1, len(known) - CHECKPOINTS_MAX)]:
                del self._files[surplus]

    def forget(self, checkpoint_id: int) -> None:
        """Drop a checkpoint that was aborted."""
        with self._lock:
            self._files.pop(checkpoint_id, None)


class StoredFiles(StoredByCheckpoint[FileHandle]):
    """Local name of a database file -> its shared file. A database that a restore cloned numbers its new files higher."""


DELTA_BYTES_MIN = 16 * 1024
"""Bytes that the deltas of a chain may have together, or half of their base if that is more: a bound on what a restore reads."""
TAKEN_IN_MIN = 7
"""Deltas of about one size that a new one takes in: with fewer a restore reads less, with more less is stored again."""
WASTE_MAX = 2
"""A file that several tables share is kept while it has at most so many times the bytes that are still needed of it."""


@dataclass(frozen=True, slots=True)
class DeltaChain:
    """Base and deltas of one state at one checkpoint. Source: Spark's state store, snapshot and delta files."""

    meta: StateMeta
    base: FileHandle
    deltas: tuple[FileHandle | InlineHandle, ...] = ()
    """Oldest first."""
    since: tuple[int | None, ...] = ()
    """Of each delta the checkpoint that it was built upon; None: not known, as of one that was restored."""

    @property
    def files(self) -> list[FileHandle]:
        """The parts that are not inline."""
        return [part for part in (self.base, *self.deltas) if isinstance(part, FileHandle)]

    def parts(self, known: DeltaChain | None) -> tuple[StateHandle, list[StateHandle]]:
        """(base, deltas) as they are acknowledged when the trigger's base has the chain `known`."""
        theirs = set() if known is None else {_place(part) for part in known.files}
        return _acknowledged(self.base, theirs), [_acknowledged(delta, theirs) for delta in self.deltas]

    def extended(self, delta: FileHandle | InlineHandle, since: int | None) -> DeltaChain:
        """With one more delta, which is of the changes since the checkpoint that this chain is of."""
        return DeltaChain(self.meta, self.base, (*self.deltas, delta), (*self.since, since))

    def cut(self, count: int) -> DeltaChain:
        """With the oldest `count` deltas only."""
        return DeltaChain(self.meta, self.base, self.deltas[:count], self.since[:count])

    def kept_beside(self, size: int) -> int:
        """How many deltas stay where a new one has `size` bytes: `TAKEN_IN_MIN` of about its size or less are taken in, and so on
        with what it has then."""
        kept = count = len(self.deltas)
        while count and self.since[count - 1] is not None and self.deltas[count - 1].length <= 2 * size:
            count -= 1
            if kept - count == TAKEN_IN_MIN:
                size += sum(delta.length for delta in self.deltas[count:kept])
                kept = count
        return kept

    def admits(self, size: int) -> bool:
        """Whether a further delta of `size` bytes stays within DELTAS_MAX and the bound on bytes."""
        deltas_size = size + sum(delta.length for delta in self.deltas)
        return len(self.deltas) < DELTAS_MAX and deltas_size <= max(self.base.length // 2, DELTA_BYTES_MIN)


Chains = Mapping[str, DeltaChain]


class ChainsByCheckpoint(StoredByCheckpoint[DeltaChain]):
    """State name -> its chain, per checkpoint."""

    def reach(self, name: str) -> int:
        """The oldest checkpoint that a delta of the state may be built upon."""
        base = self.base
        with self._lock:
            chains = [files[name] for files in self._files.values() if name in files]
        return min((known for chain in chains for known in chain.since if known is not None and known < base), default=base)


def write_chains(
    sources: Sequence[ChangingSource], key_groups: KeyGroupRange, target: SnapshotTarget, stored: ChainsByCheckpoint
) -> Flow[tuple[KeyedStateHandle, ...]]:
    """Write an increment: a handle with the base of each source, and one with the deltas if there are any."""
    known = stored.of_base(target.base)
    going_on = [chain for source in sources if (chain := known.get(source.meta.name)) is not None]
    wasteful = _wasteful(going_on)
    writer = PartsWriter(target)
    writing: list[tuple[ChangingSource, _Extension | None, WrittenPart | None]] = []
    for source in sources:
        before = known.get(source.meta.name)
        if before is not None and not wasteful.isdisjoint(part.path for part in before.files):
            before = None
        extension = _add_changes(source, before, target, writer)
        part = None if extension is None else extension.part
        if extension is None:
            data = encode_keyed_table(source.stream(), "arrow")
            part = writer.add(memoryview(data), f"{source.meta.name}.arrow", is_shared=True)
        writing.append((source, extension, part))
        if writer.is_full:
            yield from writer.store()
    yield from writer.store()

    chains: dict[str, DeltaChain] = {}
    bases: list[StateHandle] = []
    deltas: dict[str, list[tuple[StateMeta, StateHandle]]] = {}
    for source, extension, part in writing:
        chain = _chain(source.meta, extension, part)
        if chain is None:
            assert part is not None
            bases.append(part.handle)
            continue
        chains[source.meta.name] = chain
        base, own_deltas = chain.parts(known.get(source.meta.name))
        bases.append(base)
        if own_deltas:
            deltas.setdefault(delta_format(source.meta), []).extend((source.meta, delta) for delta in own_deltas)
    stored.remember(target.checkpoint_id, chains)
    handles = [KeyedStateHandle(key_groups, "arrow", tuple(source.meta for source in sources), tuple(bases))]
    for form, found in deltas.items():
        handles.append(KeyedStateHandle(key_groups, form, *map(tuple, zip(*found, strict=True))))
    return tuple(handles)


def restored_chains(
    parts: Sequence[StatePart], key_groups: KeyGroupRange, declared: Mapping[str, StateMeta]
) -> dict[str, DeltaChain]:
    """Chains that an increment on a restored checkpoint may extend: those of exactly `key_groups`, and of the declared types."""
    chains = {}
    for part in parts:
        files = [table for table in part.tables if isinstance(table, FileHandle)]
        is_ours = part.key_groups == key_groups and part.handle.format == "arrow" and declared.get(part.meta.name) == part.meta
        if is_ours and isinstance(part.base, FileHandle) and all(shared_name(file.path) is not None for file in files):
            deltas = tuple(delta for delta in part.deltas if isinstance(delta, FileHandle | InlineHandle))
            if len(deltas) == len(part.deltas):
                chains[part.meta.name] = DeltaChain(part.meta, part.base, deltas, (None,) * len(deltas))
    return chains


@dataclass(frozen=True, slots=True)
class _Extension:
    """How the chain of a trigger's base goes on."""

    chain: DeltaChain
    """What stays of it."""
    since: int
    """The checkpoint that it is of then."""
    part: WrittenPart | None
    """The new delta; None: nothing changed."""


def _add_changes(
    source: ChangingSource, before: DeltaChain | None, target: SnapshotTarget, writer: PartsWriter
) -> _Extension | None:
    """The base's chain with a new delta; None: the whole table must be written."""
    if before is None or before.meta != source.meta or target.base is None:
        return None
    delta: pa.Table | None = source.changes(target.base)
    if delta is None:
        return None
    if not delta.num_rows and not replaced_by(delta.schema):
        return _Extension(before, target.base, None)
    since, data = target.base, encode_keyed_table(delta, "arrow")
    if source.takes_in_deltas and (taken := _taking_in(source, before, data.size)) is not None:
        before, since, data = taken
    if not before.admits(data.size):
        return None
    inlined = sum(part.length for part in before.deltas if isinstance(part, InlineHandle))
    threshold = max(0, target.inline_threshold - inlined)
    packs = before.base.length < target.pack_threshold  # a delta in a merged file may have its base written again, which is cheap
    name = f"{source.meta.name}.delta"
    part = writer.add(memoryview(data), name, is_shared=True, packs=packs, inline_threshold=threshold)
    return _Extension(before, since, part)


def _taking_in(source: ChangingSource, before: DeltaChain, size: int) -> tuple[DeltaChain, int, pa.Buffer] | None:
    """(what stays of a chain, the checkpoint that it is of then, a delta with what changed since); None: all of it stays."""
    kept = before.kept_beside(size)
    if kept == len(before.deltas) or (since := before.since[kept]) is None:
        return None
    delta = source.changes(since)
    return None if delta is None else (before.cut(kept), since, encode_keyed_table(delta, "arrow"))


def _chain(meta: StateMeta, extension: _Extension | None, part: WrittenPart | None) -> DeltaChain | None:
    """The chain that later checkpoints may extend; None for an inline table."""
    handle = None if part is None else part.handle
    if extension is not None:
        return extension.chain if handle is None else extension.chain.extended(_stored(handle), extension.since)
    return DeltaChain(meta, handle) if isinstance(handle, FileHandle) else None


def _stored(handle: StateHandle) -> FileHandle | InlineHandle:
    if isinstance(handle, PlaceholderHandle):
        raise InvariantError(f"{handle.path} was written just now, and is no placeholder")
    return handle


def _wasteful(chains: Iterable[DeltaChain]) -> set[str]:
    """Paths of shared files of which less than half is still needed: states with a segment there are written again."""
    needed: dict[str, int] = {}
    lengths: dict[str, int] = {}
    for chain in chains:
        for part in chain.files:
            needed[part.path] = needed.get(part.path, 0) + part.length
            lengths[part.path] = part.file_length
    return {path for path, length in lengths.items() if length > needed[path] * WASTE_MAX}


def _place(part: FileHandle) -> tuple[str, int | None]:
    return part.path, part.offset if isinstance(part, SegmentHandle) else None


def _acknowledged(part: FileHandle | InlineHandle, theirs: set[tuple[str, int | None]]) -> StateHandle:
    if isinstance(part, FileHandle) and (place := _place(part)) in theirs:
        return PlaceholderHandle(part.path, part.length, place[1])
    return part


class TablesSnapshot:
    """Implements `backend.PendingSnapshot` over sources of tables."""

    stalled_s = 0.0

    def __init__(
        self, sources: Sequence[ChangingSource], key_groups: KeyGroupRange, chains: ChainsByCheckpoint | None = None
    ) -> None:
        """`chains`: chains of the backend's checkpoints; None: every checkpoint stores whole tables."""
        self._sources = list(sources)
        self._key_groups = key_groups
        self._chains = chains
        self._released = False

    def flow(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        if not self._sources:
            return ()
        handles: tuple[KeyedStateHandle, ...]
        if self._chains is not None and target.shared_prefix and not target.canonical:
            handles = yield from write_chains(self._sources, self._key_groups, target, self._chains)
        else:
            handles = ((yield from self._write_whole(target)),)
        for source in self._sources:
            source.written()
        return handles

    def _write_whole(self, target: SnapshotTarget) -> Flow[KeyedStateHandle]:
        return write_tables(self._sources, self._key_groups, target)

    def release(self) -> None:
        """Idempotent."""
        if not self._released:
            self._released = True
            for source in self._sources:
                source.release()
