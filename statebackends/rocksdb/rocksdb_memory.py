"""What the RocksDB databases of one process share: a block cache, and a soft bound of all memtables.

A worker is one process, so its databases, one for each subtask and operator, stay within what one is given."""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from rocksdict import Cache, WriteBufferManager


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
