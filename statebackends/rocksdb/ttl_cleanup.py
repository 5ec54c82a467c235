"""Cleanup of expired state in RocksDB: behind each snapshot a bounded number of rows is checked, round and round.

rocksdict has no compaction filter that reads the stamps, and its databases with a TTL go by the machine's clock and the time of
writing. So rows are scanned on the snapshot's pool thread: as many as were written since the last scan and a few more, so that
expired rows never outnumber live ones. Rows are deleted if they had expired at the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.heap.ttl import StateTtl
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.row_keys import Row
from holdfast.statebackends.serialization.state_serializer import TtlSerializer

CLEANUP_ROWS_MIN = 20_000
"""Rows checked behind a snapshot, in addition to as many as were written; about 50 ms of processor time."""
CLEANUP_BATCH_ROWS = 2_000
"""Rows checked at a time, under the write buffer's lock."""


class StoredRowCleanup:
    """Walks over the rows of a database's states with a TTL. For one thread at a time, while no other thread writes."""

    def __init__(self, store: RocksStore, state_ttls: Sequence[StateTtl], key_groups: KeyGroupRange) -> None:
        self._store = store
        self._state_ttls = list(state_ttls)
        self._key_groups = key_groups
        self._place = 0
        """Number of the (key group, state) to check next, counted key group by key group."""
        self._after: bytes | None = None
        """Row key of the last row checked there."""
        self.deleted = 0
        """Rows deleted so far, for metrics and tests."""

    def clean(self, rows_max: int) -> int:
        """Check at most `rows_max` rows, and delete those that have expired. Returns `rows_max`, also if there are fewer rows."""
        left = rows_max
        for _ in range(len(self._key_groups) * len(self._state_ttls)):
            left -= self._look(left)
            if left <= 0:
                break
            self._after = None
            self._place += 1
        return rows_max

    def _look(self, rows_max: int) -> int:
        state_ttl, group = self._next()
        serializer, horizon_ms = state_ttl.serializer, state_ttl.barrier_horizon_ms
        state_id = self._store.state_ids.get(serializer.name)
        if state_id is None or not isinstance(serializer, TtlSerializer):
            return 0
        seen, dead = 0, list[Row]()
        for key, value in islice(self._store.rows_after(group, state_id, self._after), rows_max):
            seen, self._after = seen + 1, key
            if serializer.newest_stamp(value) <= horizon_ms:
                dead.append((key, None))
        if dead:
            self._store.write(dead)
            self.deleted += len(dead)
        return seen

    def _next(self) -> tuple[StateTtl, int]:
        self._place %= len(self._key_groups) * len(self._state_ttls)
        group, index = divmod(self._place, len(self._state_ttls))
        return self._state_ttls[index], self._key_groups.start + group
