"""Where a job under test keeps its files: a folder that goes with the job, on the real file system, of which nothing is synced.

No test cuts the power, and making each of a job's small files durable would take ten times as long as the job."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref

from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.filesystem import OsFileSystem
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.permissions import PRIVATE

_MEMORY = "/dev/shm"
_MEMORY_BYTES_MIN = 1 << 30
"""A container may give it 64 MiB, which RocksDB's preallocation fills."""


class _UnsyncedFiles(OsFileSystem):
    def __init__(self) -> None:
        super().__init__(PRIVATE)

    def fsync(self, descriptor: int) -> None:
        pass

    def fsync_folder(self, path: str) -> None:
        os.stat(path)  # one that is missing is an error as ever


class JobFolder:
    """A temporary folder, deleted by `delete`, or when nobody holds it any more."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="holdfast-test-", dir=_memory_folder())
        self.delete = weakref.finalize(self, shutil.rmtree, self.path, True)

    def below(self, name: str) -> str:
        """Path of a folder in it, made when something is written."""
        return f"{self.path}/{name}"

    def storage(self) -> LocalStorage:
        """The state directory. Sinks reach their places through it: what lies in the file system is not synced either."""
        return LocalStorage(self.below("state"), file_system=_UnsyncedFiles(), elsewhere=open_storage)


def _memory_folder() -> str | None:
    """A file system in memory where there is a large one; None: where Python puts temporary files."""
    try:
        found = os.statvfs(_MEMORY)
    except OSError:
        return None
    is_large = found.f_bavail * found.f_frsize >= _MEMORY_BYTES_MIN
    return _MEMORY if is_large and os.access(_MEMORY, os.W_OK) else None
