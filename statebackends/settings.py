"""Settings of the keyed state backends: their bounds, and the one home of their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.statebackends.errors import InvalidConfigError

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

_MEMORY_SNAPSHOT_BYTES = (_KIB, 2 * _GIB)
_MEMORY_INLINE_BYTES = (0, _MIB)
ROW_TABLE_BYTES_MAX = 256 * _MIB
"""Of a row table of one subtask in memory."""
ROW_TABLE_BYTES = (_MIB, 1 << 40)
"""Bounds of `row_table_bytes_max`."""
_ROCKSDB_BOUNDS: dict[str, tuple[int, int]] = {
    "front_tier_bytes_max": (_MIB, 64 * _GIB),
    "write_behind_rows": (1, 1 << 40),
    "cache_bytes_max": (0, 64 * _GIB),
    "write_buffer_bytes": (_MIB, 4 * _GIB),
    "write_buffers_bytes_max": (_MIB, 1 << 40),
    "block_cache_bytes": (_MIB, 64 * _GIB),
    "sorted_runs_max": (2, 1_000),
    "space_amplification_percent": (1, 10_000),
}


class RocksDBConfig(msgspec.Struct, frozen=True):
    """Settings of the state backend `rocksdb`, of a worker or of a job.

    Sizes in bytes. A subtask has one database for each operator with keyed state."""

    front_tier_bytes_max: int = 64 * 1024 * 1024
    """Per database: bytes of changed state in memory above which it is written to the database between barriers."""
    write_behind_rows: int = 2_000
    """Per database: changed rows from which an idle worker begins to write."""
    cache_bytes_max: int = 32 * 1024 * 1024
    """Per database: recently read or written values, as Python objects."""
    write_buffer_bytes: int = 32 * 1024 * 1024
    """Bytes of one memtable."""
    write_buffers_bytes_max: int = 128 * 1024 * 1024
    """Per worker: bytes of all memtables, approximately."""
    block_cache_bytes: int = 64 * 1024 * 1024
    """Per worker: uncompressed blocks, indexes and filters."""
    sorted_runs_max: int = 8
    """Sorted runs (a checkpoint adds one or more) at which neighbours are merged. More: smaller checkpoints, slower reads."""
    space_amplification_percent: int = 200
    """Size of newer runs, in percent of the oldest, at which all are merged. More: merged less often."""
    background_compaction: bool = True
    """Merge while the job runs; False: only when a checkpoint is made."""

    def check(self) -> None:
        """Raises InvalidConfigError naming the setting that is out of bounds, as rocksdb_<name>."""
        for name in self.__struct_fields__:
            setting, value = f"rocksdb_{name}", getattr(self, name)
            if name in _ROCKSDB_BOUNDS:
                _check_number(setting, value, _ROCKSDB_BOUNDS[name])
            else:
                _check_flag(setting, value)


@dataclass(frozen=True, slots=True)
class StateBackendSettings:
    """A setting of a backend that isn't used is ignored. Raises InvalidConfigError when out of bounds."""

    memory_snapshot_bytes_max: int = 5 * _MIB
    """`memory`: encoded keyed state of one subtask of one operator that is inline; with more a checkpoint fails."""
    memory_inline_bytes: int = 64 * _KIB
    """`memory`: a table below this size travels in the acknowledgement, whatever the job's inline threshold is. The file of a
    larger one costs less than its bytes do in requests, in `_metadata` and in deployments."""
    rocksdb: RocksDBConfig = field(default_factory=RocksDBConfig)
    incremental: bool = True
    """`rocksdb`, `filesystem`: a checkpoint stores only what its base does not have: new files, changed rows."""

    row_table_bytes_max: int = ROW_TABLE_BYTES_MAX
    """Every backend: of one row table of a subtask, what is in memory; rows beyond are in files that are mapped."""

    def __post_init__(self) -> None:
        _check_number("row_table_bytes_max", self.row_table_bytes_max, ROW_TABLE_BYTES)
        _check_number("memory_snapshot_bytes_max", self.memory_snapshot_bytes_max, _MEMORY_SNAPSHOT_BYTES)
        _check_number("memory_inline_bytes", self.memory_inline_bytes, _MEMORY_INLINE_BYTES)
        self.rocksdb.check()
        _check_flag("incremental", self.incremental)


def _check_number(setting: str, value: Any, bounds: tuple[int, int]) -> None:
    lowest, highest = bounds
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise InvalidConfigError(f"{setting} must be a whole number, {lowest}..{highest}, not {value!r}", setting=setting)


def _check_flag(setting: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidConfigError(f"{setting} must be True or False, not {value!r}", setting=setting)
