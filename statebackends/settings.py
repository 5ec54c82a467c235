"""Settings of the keyed state backends, validated once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from holdfast.statebackends.errors import InvalidConfigError

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

_BOUNDS: dict[str, tuple[int, int]] = {
    "memory_snapshot_bytes_max": (_KIB, 2 * _GIB),
    "rocksdb_front_tier_bytes_max": (_MIB, 64 * _GIB),
    "rocksdb_write_behind_rows": (1, 1 << 40),
    "rocksdb_cache_bytes_max": (0, 64 * _GIB),
    "rocksdb_write_buffer_bytes": (_MIB, 4 * _GIB),
    "rocksdb_write_buffers_bytes_max": (_MIB, 1 << 40),
    "rocksdb_block_cache_bytes": (_MIB, 64 * _GIB),
    "rocksdb_sorted_runs_max": (2, 1_000),
    "rocksdb_space_amplification_percent": (1, 10_000),
}


@dataclass(frozen=True, slots=True)
class StateBackendSettings:
    """Sizes in bytes. A setting of a backend that isn't used is ignored. Raises InvalidConfigError when out of bounds."""

    memory_snapshot_bytes_max: int = 5 * _MIB
    """`memory`: encoded keyed state of one subtask of one operator; a larger checkpoint fails."""
    rocksdb_front_tier_bytes_max: int = 64 * _MIB
    """`rocksdb`, per subtask and operator: live state in memory above this is written to RocksDB between barriers."""
    rocksdb_write_behind_rows: int = 2_000
    """`rocksdb`, per subtask and operator: changed rows that a worker with nothing else to do begins to write. A barrier has no
    more left to write then. Fewer: keys that change all the time are written more often."""
    rocksdb_cache_bytes_max: int = 32 * _MIB
    """`rocksdb`, per subtask and operator: values read or written lately, as Python objects."""
    rocksdb_write_buffer_bytes: int = 32 * _MIB
    """`rocksdb`: one memtable; there are at most two. A checkpoint empties them: only more than this between two fills one."""
    rocksdb_write_buffers_bytes_max: int = 128 * _MIB
    """`rocksdb`, per worker: memtables of all databases together, about: above it, what is written to becomes a table early."""
    rocksdb_block_cache_bytes: int = 64 * _MIB
    """`rocksdb`, per worker: uncompressed blocks, indexes and filters of all databases together."""
    rocksdb_sorted_runs_max: int = 8
    """`rocksdb`: sorted runs (a checkpoint adds one or more) at which neighbours are merged. More: smaller checkpoints, slower
    reads."""
    rocksdb_space_amplification_percent: int = 200
    """`rocksdb`: what newer runs may add to the size of the oldest before all are merged into one. More: this is rarer."""
    rocksdb_background_compaction: bool = True
    """`rocksdb`: merge while the job runs. False: by whoever makes a checkpoint's copy, all runs at once; for repeatable runs."""
    incremental: bool = True
    """`rocksdb`, `filesystem`: a checkpoint stores only what its base does not have: new files, changed rows."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name not in _BOUNDS:
                if not isinstance(value, bool):
                    raise InvalidConfigError(f"{setting.name} must be True or False, not {value!r}", setting=setting.name)
                continue
            lowest, highest = _BOUNDS[setting.name]
            if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
                raise InvalidConfigError(
                    f"{setting.name} must be a whole number, {lowest}..{highest}, not {value!r}", setting=setting.name
                )
