"""The asynchronous part of a snapshot that is tables alone: whole ones, or increments where the backend makes them."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.handles import KeyedStateHandle, KeyGroupRange
from holdfast.statebackends.snapshot.sources import ChangingSource, write_tables
from holdfast.statebackends.snapshot.tablechains import StoredChains, write_chains
from holdfast.statebackends.storage.port import Flow


class TablesSnapshot:
    """`backend.PendingSnapshot` of sources alone."""

    def __init__(self, sources: Sequence[ChangingSource], key_groups: KeyGroupRange, chains: StoredChains | None = None) -> None:
        """`chains`: what the backend's checkpoints stored; None: every checkpoint is whole."""
        self._sources = list(sources)
        self._key_groups = key_groups
        self._chains = chains
        self._released = False

    def flow(self, target: SnapshotTarget) -> Flow[tuple[KeyedStateHandle, ...]]:
        if not self._sources:
            return ()
        if self._chains is not None and target.shared_prefix and not target.canonical:
            return (yield from write_chains(self._sources, self._key_groups, target, self._chains))
        handle: KeyedStateHandle = yield from self._write_whole(target)
        return (handle,)

    def _write_whole(self, target: SnapshotTarget) -> Flow[KeyedStateHandle]:
        return write_tables(self._sources, self._key_groups, target)

    def release(self) -> None:
        """Idempotent."""
        if not self._released:
            self._released = True
            for source in self._sources:
                source.release()
