"""How a database is tuned: tables, filters, write buffers, and when tables are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rocksdict import BlockBasedOptions, DBCompactionStyle, DBCompressionType, Options, UniversalCompactOptions

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
