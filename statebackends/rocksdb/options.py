"""Options of RocksDB databases, and the memory that the databases of one process share.

It decides table format, filters, memtables and compaction. Block cache and memtable budget are per process: a worker has one
database for each subtask and operator, and together they stay within one set of bounds."""

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
    """Block cache and memtable budget of a process's databases; lives as long as one of them is open."""

    __slots__ = ("__weakref__", "block_cache", "write_buffers")

    def __init__(self, block_cache_bytes: int, write_buffers_bytes_max: int) -> None:
        self.block_cache = Cache(block_cache_bytes)
        self.write_buffers = WriteBufferManager(write_buffers_bytes_max, False)
        """Above its bound the active memtable is flushed early. Writers don't wait for that, so the bound is soft."""


_shared: WeakValueDictionary[tuple[int, int], RocksMemory] = WeakValueDictionary()
_lock = threading.Lock()


def shared_memory(block_cache_bytes: int, write_buffers_bytes_max: int) -> RocksMemory:
    """This process's RocksMemory of these sizes. A worker runs one job at a time, whose subtasks all have the same sizes."""
    sizes = (block_cache_bytes, write_buffers_bytes_max)
    with _lock:
        memory = _shared.get(sizes)
        if memory is None:
            memory = _shared[sizes] = RocksMemory(*sizes)
        return memory


_RUNS_TO_SLOW_DOWN = 16
"""Sorted runs beyond `runs_max` at which RocksDB slows writes down; at twice as many it stops them."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """When tables are merged: universal compaction. Sources: RocksDB, Universal Compaction.

    The next increment stores merged tables again. Leveled compaction would rewrite nearly all of them for each hundredth of
    scattered changes (measured: an increment is 21 % of the bytes, against 2-4 %)."""

    runs_max: int = 8
    """Sorted runs at which neighbours are merged."""
    space_amplification_percent: int = 200
    """Size of the newer runs, in percent of the oldest, at which all are merged."""
    in_background: bool = True
    """False: merge only in `RocksStore.link_copy`."""


LOADING = Compaction(runs_max=3, space_amplification_percent=50)
"""While a new database is loaded, before its first copy. No checkpoint stores the tables merged then, and the first one finds one
large run and a few small ones; several runs of one size would be merged, and stored again, within a few increments."""


def changeable(compaction: Compaction) -> dict[str, str]:
    """Options of compaction, by name, for `set_options` of an open database."""
    return {
        "level0_file_num_compaction_trigger": str(compaction.runs_max),
        "compaction_options_universal": f"{{max_size_amplification_percent={compaction.space_amplification_percent};}}",
    }


def database_options(write_buffer_bytes: int, cache: Any, compaction: Compaction) -> Any:
    """Options that open a database. `write_buffer_bytes`: size of one memtable; `cache`: its block cache."""
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
