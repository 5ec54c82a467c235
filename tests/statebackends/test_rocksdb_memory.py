"""What the databases of one process share, and the settings that say how much it is."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.barriers import jobgraph
from holdfast.barriers.jobgraph import JobConfig
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.options import shared_memory
from holdfast.statebackends.settings import RocksDBConfig, StateBackendSettings
from holdfast.statebackends.state import ValueStateDescriptor
from tests.statebackends.backend_harness import Cluster, use

BLOB = ValueStateDescriptor("blob", bytes)


def write(store: RocksStore, rows: int) -> None:
    store.write((b"%08d" % number, bytes(1_000)) for number in range(rows))


def tables(store: RocksStore) -> int:
    return sum(name.endswith(".sst") for name in os.listdir(store.folder))


def test_memtables_of_all_databases_together_are_bounded(tmp_path: Path) -> None:
    """Each alone is far below its own bound. That of all is soft: nobody waits for memtables that are being written."""
    memory = shared_memory(1 << 20, 16 << 20)
    stores = [RocksStore(str(tmp_path / f"db-{number}"), write_buffer_bytes=64 << 20, memory=memory) for number in range(4)]
    for _ in range(10):
        for store in stores:
            write(store, 1_500)
    deadline = time.monotonic() + 30
    while memory.write_buffers.get_usage() >= 2 * (16 << 20):  # of 60 MB; a slow disk has some left to write
        assert time.monotonic() < deadline, memory.write_buffers.get_usage()
        time.sleep(0.01)
    assert sum(map(tables, stores)) > 0
    for store in stores:
        assert store.get(b"%08d" % 1_499) == bytes(1_000)
        store.close()
    alone = RocksStore(str(tmp_path / "alone"), write_buffer_bytes=64 << 20)
    write(alone, 40_000)
    assert tables(alone) == 0
    alone.close()


def test_sizes_name_what_is_shared_and_nobody_keeps_it(tmp_path: Path) -> None:
    memory = shared_memory(1 << 20, 2 << 20)
    assert shared_memory(1 << 20, 2 << 20) is memory
    assert shared_memory(1 << 20, 3 << 20) is not memory
    store = RocksStore(str(tmp_path), write_buffer_bytes=1 << 20, memory=memory)
    identity = id(memory)
    del memory
    gc.collect()
    assert id(shared_memory(1 << 20, 2 << 20)) == identity, "the store uses it"
    store.close()


def test_subtasks_of_a_worker_share_one_block_cache(tmp_path: Path) -> None:
    settings = StateBackendSettings(
        rocksdb=RocksDBConfig(block_cache_bytes=3 << 20, front_tier_bytes_max=1 << 20, cache_bytes_max=0)
    )
    cluster = Cluster(tmp_path, "rocksdb", settings)
    backends: list[Any] = [cluster.backend([BLOB], parallelism=2, subtask=subtask) for subtask in range(2)]
    assert backends[0].write_buffer.store._memory is backends[1].write_buffer.store._memory
    for backend in backends:
        for number in range(6_000):
            use(backend, f"k{number}")
            backend.get_state(BLOB).update(os.urandom(1_000))
        cluster.take(backend)
        for number in range(6_000):
            use(backend, f"k{number}")
            assert len(backend.get_state(BLOB).value()) == 1_000
    cache = backends[0].write_buffer.store._memory.block_cache
    assert 0 < cache.get_usage() < 4 << 20
    cluster.close()


def test_the_settings_of_a_job_are_the_record_of_its_backends() -> None:
    """The one record is a setting of workers and of jobs: stored graphs and the facade know it by its old name."""
    assert jobgraph.RocksDBConfig is hf.RocksDBConfig is RocksDBConfig
    assert StateBackendSettings().rocksdb == RocksDBConfig()


@pytest.mark.parametrize("name", RocksDBConfig.__struct_fields__)
def test_a_setting_out_of_bounds_is_named_before_a_job_starts(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"rocksdb_{name}"):
        JobConfig(rocksdb=msgspec.structs.replace(RocksDBConfig(), **{name: -1})).check()


def test_a_job_without_settings_of_its_own_is_what_it_was() -> None:
    """Graphs that were stored before there were any."""
    assert msgspec.json.decode(b"{}", type=JobConfig).rocksdb is None
    config = JobConfig(rocksdb=RocksDBConfig(block_cache_bytes=1 << 20))
    assert msgspec.json.decode(msgspec.json.encode(config), type=JobConfig) == config
