"""Writing tables of keyed state as increments: a base table, and delta runs of what changed since.

The base is written again, as a full table, when there is none that the trigger's base has, when what changed since it is not
known, and when its runs would be too many or too large: a restore reads them all. A table that travels inline is always
whole: it is small. Bases are shared files, placeholders where the trigger's base has them (ADR 12); runs too, but for small
ones, whose sum stays below the inline threshold, so that acknowledgements stay as small as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from statebackends.backend import SnapshotTarget
from statebackends.deltaruns import replaced_by
from statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    PlaceholderHandle,
    StateHandle,
    StateMeta,
)
from statebackends.increments import StoredByCheckpoint
from statebackends.keyedtables import encode_keyed_table
from statebackends.sharedpaths import shared_name
from statebackends.snapshot import write_shared_part
from statebackends.storage.operations import Flow
from statebackends.tablepieces import DELTA_FORMAT, RUNS_MAX, TablePiece
from statebackends.tablesources import ChangingSource

RUN_BYTES_MIN = 16 * 1024
"""Runs may have this many bytes in sum, or half as many as their base: what a restore reads of them is then little."""


@dataclass(frozen=True, slots=True)
class TableChain:
    """The files of one state at one checkpoint."""

    meta: StateMeta
    base: FileHandle
    runs: tuple[FileHandle | InlineHandle, ...] = ()

    def parts(self, known: TableChain | None) -> tuple[StateHandle, list[StateHandle]]:
        """(base, runs) as they are acknowledged when the trigger's base has the chain `known`."""
        theirs = set() if known is None else {part.path for part in (known.base, *known.runs) if isinstance(part, FileHandle)}
        return _acknowledged(self.base, theirs), [_acknowledged(run, theirs) for run in self.runs]

    def admits(self, size: int) -> bool:
        """Whether a further run of `size` bytes costs less than writing the table again would save."""
        runs_size = size + sum(run.length for run in self.runs)
        return len(self.runs) < RUNS_MAX and runs_size <= max(self.base.length // 2, RUN_BYTES_MIN)


Chains = Mapping[str, TableChain]
StoredChains = StoredByCheckpoint[TableChain]
"""State name -> its files, per checkpoint."""


def write_chains(
    sources: Sequence[ChangingSource], key_groups: KeyGroupRange, target: SnapshotTarget, stored: StoredChains
) -> Flow[tuple[KeyedStateHandle, ...]]:
    """One base per source, empty ones included, and a handle with the runs if there are any."""
    known = stored.of_base(target.base)
    chains: dict[str, TableChain] = {}
    bases: list[StateHandle] = []
    run_metas: list[StateMeta] = []
    runs: list[StateHandle] = []
    for source in sources:
        before = known.get(source.meta.name)
        chain = yield from _extended(source, before, target)
        if chain is None:
            data = encode_keyed_table(source.table(), "arrow")
            part: StateHandle = yield from write_shared_part(memoryview(data), f"{source.meta.name}.arrow", target)
            if not isinstance(part, FileHandle):
                bases.append(part)
                continue
            chain = TableChain(source.meta, part)
        chains[source.meta.name] = chain
        base, own_runs = chain.parts(before)
        bases.append(base)
        runs += own_runs
        run_metas += [source.meta] * len(own_runs)
    stored.remember(target.checkpoint_id, chains)
    handles = [KeyedStateHandle(key_groups, "arrow", tuple(source.meta for source in sources), tuple(bases))]
    if runs:
        handles.append(KeyedStateHandle(key_groups, DELTA_FORMAT, tuple(run_metas), tuple(runs)))
    return tuple(handles)


def restored_chains(
    pieces: Sequence[TablePiece], key_groups: KeyGroupRange, declared: Mapping[str, StateMeta]
) -> dict[str, TableChain]:
    """What an increment on a restored checkpoint can build upon: tables of just our key groups and of the declared types."""
    chains = {}
    for piece in pieces:
        files = [part for part in (piece.base, *piece.runs) if isinstance(part, FileHandle)]
        is_ours = piece.key_groups == key_groups and piece.format == "arrow" and declared.get(piece.meta.name) == piece.meta
        if is_ours and isinstance(piece.base, FileHandle) and all(shared_name(file.path) is not None for file in files):
            runs = tuple(run for run in piece.runs if isinstance(run, FileHandle | InlineHandle))
            if len(runs) == len(piece.runs):
                chains[piece.meta.name] = TableChain(piece.meta, piece.base, runs)
    return chains


def _extended(source: ChangingSource, before: TableChain | None, target: SnapshotTarget) -> Flow[TableChain | None]:
    """The chain of the trigger's base with what changed since; None if the table must be written as a whole."""
    if before is None or before.meta != source.meta or target.base is None:
        return None
    run: pa.Table | None = source.changes(target.base)
    if run is None:
        return None
    if not run.num_rows and not replaced_by(run.schema):
        return before
    data = encode_keyed_table(run, "arrow")
    if not before.admits(data.size):
        return None
    inlined = sum(part.length for part in before.runs if isinstance(part, InlineHandle))
    part: StateHandle = yield from write_shared_part(
        memoryview(data), f"{source.meta.name}.delta", target, inline_threshold=max(0, target.inline_threshold - inlined)
    )
    if not isinstance(part, FileHandle | InlineHandle):
        return None
    return TableChain(before.meta, before.base, (*before.runs, part))


def _acknowledged(part: FileHandle | InlineHandle, theirs: set[str]) -> StateHandle:
    if isinstance(part, FileHandle) and part.path in theirs:
        return PlaceholderHandle(part.path, part.length)
    return part
