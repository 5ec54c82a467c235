"""SHELL: what a job's history has of a checkpoint that this process does not have in memory, read within a time of its own.

Storage that hangs holds up a thread that nobody waits for, and never the one who asks for longer than that time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.history.checkpoints import EXPLAINED_WITHIN_MS, read_checkpoints
from holdfast.coordinator.history.records import HistoryEntry, RecordKind
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import InParallel, Operation, Storage, drive, perform

READERS_MAX = 2
"""Histories that are read at one time."""
FREE_WAIT_S = 0.5
"""How long one waits for another reader to end: those who ask hold threads that all requests share."""
KEPT_MAX = 16
"""Answers that are kept, for pages that ask again and again: what is on record of a checkpoint that has ended does not change, once
its explanation has been recorded, too."""
SETTLED_MS = 60_000
"""By then what was recorded is written, and clocks of leaders don't differ by so much."""
COMPARED_MAX = 20
"""Completed checkpoints in front of one, to compare it with."""


class Recollection:
    """Thread-safe."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._free = threading.BoundedSemaphore(READERS_MAX)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], tuple[HistoryEntry, ...]] = OrderedDict()

    def read(self, job_id: str, checkpoint_id: int | None, wait_s: float) -> tuple[HistoryEntry, ...]:
        """Records of a checkpoint and of those in front of it, or of the newest ones; empty if it is not on record. Raises
        StorageUnavailableError if they did not come within `wait_s`, and HoldfastError as storage does."""
        until_s = time.monotonic() + wait_s
        if checkpoint_id is None:
            return self._ask(job_id, None, wait_s, until_s)
        with self._lock:
            known = self._kept.get((job_id, checkpoint_id))
        if known is not None:
            return known
        entries = self._ask(job_id, checkpoint_id, wait_s, until_s)
        if entries and self._is_whole(entries, checkpoint_id):
            with self._lock:
                self._kept[job_id, checkpoint_id] = entries
                while len(self._kept) > KEPT_MAX:
                    self._kept.popitem(last=False)
        return entries

    def _is_whole(self, entries: tuple[HistoryEntry, ...], checkpoint_id: int) -> bool:
        """Nothing is recorded of the checkpoint any more."""
        ended = (entry.at_ms for entry in entries if entry.kind == RecordKind.CHECKPOINT and entry.facts.get("id") == checkpoint_id)
        ended_ms = max(ended, default=0)
        return self._clock.wall_ms() - ended_ms >= EXPLAINED_WITHIN_MS + SETTLED_MS

    def _ask(self, job_id: str, checkpoint_id: int | None, wait_s: float, until_s: float) -> tuple[HistoryEntry, ...]:
        if not self._free.acquire(timeout=min(wait_s, FREE_WAIT_S)):
            raise StorageUnavailableError(f"{READERS_MAX} histories are being read for other explanations: ask again later")
        found: Future[tuple[HistoryEntry, ...]] = Future()
        thread = threading.Thread(target=self._read, args=(job_id, checkpoint_id, until_s, found), name="recollection", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            self._free.release()
            raise StorageUnavailableError(f"the history of job {job_id} can't be read now: {error}") from error
        try:
            return found.result(max(0.0, until_s - time.monotonic()))
        except FutureTimeoutError as error:
            raise StorageUnavailableError(f"the history of job {job_id} was not read within {wait_s:g} s") from error

    def _read(self, job_id: str, checkpoint_id: int | None, until_s: float, found: Future[tuple[HistoryEntry, ...]]) -> None:
        def fulfil(wanted: Operation | InParallel) -> object:
            if time.monotonic() > until_s:
                raise StorageUnavailableError(f"the history of job {job_id} was not read in time")
            return perform(wanted, self._storage)

        try:
            found.set_result(drive(read_checkpoints(JobPaths(job_id), checkpoint_id, COMPARED_MAX), fulfil))
        except Exception as error:
            found.set_exception(error)
        finally:
            self._free.release()
