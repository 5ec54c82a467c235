"""How a database is tuned: tables, filters, write buffers, and when tables are merged.

What the RocksDB databases of one process share: a block cache, and a soft bound of all memtables.

A worker is one process, so its databases, one for each subtask and operator, stay within what one is given."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    UniversalCompactOptions,
    WriteBufferManager,
)


class RocksMemory:
    """Lives as long as a database uses it."""

    __slots__ = ("__weakref__", "block_cache", "write_buffers")

    def __init__(self, block_cache_bytes: int, write_buffers_bytes_max: int) -> None:
        self.block_cache = Cache(block_cache_bytes)
        self.write_buffers = WriteBufferManager(write_buffers_bytes_max, False)
        """Above this the memtable that is written to becomes a table early; nobody waits for that, so it is a soft bound."""


_shared: WeakValueDictionary[tuple[int, int], RocksMemory] = WeakValueDictionary()
_lock = threading.Lock()


def shared_memory(block_cache_bytes: int, write_buffers_bytes_max: int) -> RocksMemory:
    """The one of this process for these sizes; a worker runs one job at a time, and all of it has the same."""
    sizes = (block_cache_bytes, write_buffers_bytes_max)
    with _lock:
        memory = _shared.get(sizes)
        if memory is None:
            memory = _shared[sizes] = RocksMemory(*sizes)
        return memory


_RUNS_TO_SLOW_DOWN = 16
"""Runs beyond those that are merged, at which RocksDB holds writes back; twice as many stop them."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """When tables are merged. What is merged is stored again by the next increment, so it is by size, never by level: with leveled
    compaction each hundredth of scattered changes rewrites all (measured: 21 % of the bytes an increment, against 2-4 %)."""

    runs_max: int = 8
    space_amplification_percent: int = 200
    in_background: bool = True


LOADING = Compaction(runs_max=3, space_amplification_percent=50)
"""Before the first copy is made. What is merged then was stored nowhere yet, and what the first checkpoint finds is one large run
and a few small ones: several of one size would all be merged, and stored again, within a few increments."""


def changeable(compaction: Compaction) -> dict[str, str]:
    """Options of an open database that say when it merges."""
    return {
        "level0_file_num_compaction_trigger": str(compaction.runs_max),
        "compaction_options_universal": f"{{max_size_amplification_percent={compaction.space_amplification_percent};}}",
    }


def database_options(write_buffer_bytes: int, cache: Any, compaction: Compaction) -> Any:
    tables = BlockBasedOptions()
    tables.set_block_cache(cache)
    tables.set_bloom_filter(10.0, False)
    tables.set_cache_index_and_filter_blocks(True)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(tables)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_write_buffer_size(write_buffer_bytes)
    options.set_max_write_buffer_number(2)
    options.set_max_background_jobs(2)
    universal = UniversalCompactOptions()
    universal.max_size_amplification_percent = compaction.space_amplification_percent
    options.set_compaction_style(DBCompactionStyle.universal())
    options.set_universal_compaction_options(universal)
    options.set_level_zero_file_num_compaction_trigger(compaction.runs_max)
    options.set_level_zero_slowdown_writes_trigger(compaction.runs_max + _RUNS_TO_SLOW_DOWN)
    options.set_level_zero_stop_writes_trigger(compaction.runs_max + 2 * _RUNS_TO_SLOW_DOWN)
    options.set_disable_auto_compactions(not compaction.in_background)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options
