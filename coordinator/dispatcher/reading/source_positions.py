"""SHELL: where the sources of jobs stand in their newest snapshots, read from those when somebody asks, behind the caller's back.

What is known is in memory, of the snapshot that was read last; a caller never waits for storage. It harms no job: one thread reads,
one snapshot at a time, of each job now and then, and no more than a bound."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from typing import NamedTuple

from holdfast.coordinator.explain.positions import SnapshotPositions, SourcePlaces, describe_positions
from holdfast.coordinator.explain.records import CutView
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, ObjectMissingError
from holdfast.statebackends.handles import InlineHandle, OperatorListHandle, OperatorState
from holdfast.statebackends.layout import metadata_path
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.storage.port import Flow, StatFile, Storage, run_flow

logger = logging.getLogger(__name__)

JOBS_KEPT = 1_000
READ_INTERVAL_S = 2.0
"""Between two reads for one job: its checkpoints may come faster."""
MISSED_AGAIN_S = 0.1
"""Before another try where the snapshot was gone."""
METADATA_BYTES_MAX = 8 << 20
"""Of a `_metadata` that is read for this; in a larger one, of a job with very many subtasks, nothing is looked for."""
STATE_BYTES_MAX = 4 << 20
"""Of one source's state, over all subtasks."""
PARTS_MAX = 64
"""Files of one source's state; small state lies in `_metadata`."""


def read_positions(
    checkpoint_id: int, folder: str, uids: frozenset[str], known: SnapshotPositions | None = None
) -> Flow[SnapshotPositions]:
    """Where the sources of these uids stand in the snapshot in a folder. `known`: what was read of it before, which holds as
    long as it is there: nothing is read again. Raises CorruptStateError, ObjectMissingError if it is gone."""
    path = metadata_path(folder)
    size: int | None = yield StatFile(path)
    if size is None:
        raise ObjectMissingError(f"there is no snapshot at {folder}", path=path)
    if known is not None:
        return known
    if size > METADATA_BYTES_MAX:
        return SnapshotPositions(checkpoint_id, {})
    metadata = decode_metadata((yield from read_metadata_file(path)), path)
    found: dict[str, SourcePlaces] = {}
    for operator in metadata.operators:
        if operator.uid not in uids:
            continue
        entries = yield from _entries(operator, folder)
        if entries is not None and (places := describe_positions(entries)).splits:
            found[operator.uid] = places
    return SnapshotPositions(checkpoint_id, found)


def _entries(operator: OperatorState, folder: str) -> Flow[list[bytes] | None]:
    """Of a source's state; None: there is too much of it."""
    handles: list[OperatorListHandle] = [handle for subtask in operator.subtasks for handle in subtask.operator]
    files = [handle for handle in handles if not isinstance(handle.part, InlineHandle)]
    if len(files) > PARTS_MAX or sum(handle.size for handle in handles) > STATE_BYTES_MAX:
        return None
    entries: list[bytes] = []
    for handle in handles:
        entries += yield from read_entries(handle, folder, operator=operator.uid)
    return entries


class Wanted(NamedTuple):
    """Whose positions are to be read."""

    cut: CutView
    uids: frozenset[str]
    has_ended: bool
    """The job has."""


class SourcePositions:
    """Of the jobs of one coordinator. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = RoutedStorage(storage)
        self._root = storage.root
        self._lock = threading.Lock()
        self._known: OrderedDict[str, SnapshotPositions] = OrderedDict()
        self._wanted: OrderedDict[str, Wanted] = OrderedDict()
        self._read_s: OrderedDict[str, float] = OrderedDict()
        """When a job's was last read, or tried."""
        self._awake = threading.Event()
        self._stopping = False
        self._changes = 0

    @property
    def changes(self) -> int:
        """Of what `remembered` tells, of all jobs together."""
        return self._changes

    def remembered(self, job_id: str, cut: CutView, uids: frozenset[str], *, has_ended: bool) -> SnapshotPositions | None:
        """What was read last, which may be of an earlier snapshot than `cut`; that one is read soon. None: nothing yet.

        Where the job has ended, no newer snapshot comes in the place of one that somebody deletes: it is looked for anew."""
        with self._lock:
            found = self._known.get(job_id)
            if found is not None and found.checkpoint_id == cut.checkpoint_id and not has_ended:
                return found
            self._wanted[job_id] = Wanted(cut, uids, has_ended)
            while len(self._wanted) > JOBS_KEPT:
                self._wanted.popitem(last=False)
        self._awake.set()
        return found

    def watch(self) -> None:
        """Body of the thread that reads, until `close`."""
        while not self._stopping:
            self._awake.wait(self._pause_s())
            self._awake.clear()
            while not self._stopping and (wanted := self._next()) is not None:
                self._read(*wanted)

    def close(self) -> None:
        """End `watch`. Idempotent."""
        self._stopping = True
        self._awake.set()

    def _pause_s(self) -> float | None:
        """Until something that is wanted may be read; None: nothing is wanted."""
        with self._lock:
            due = [self._read_s.get(job_id, 0.0) + READ_INTERVAL_S for job_id in self._wanted]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _next(self) -> tuple[str, Wanted] | None:
        now_s = time.monotonic()
        with self._lock:
            for job_id, wanted in self._wanted.items():
                if self._read_s.get(job_id, -READ_INTERVAL_S) + READ_INTERVAL_S <= now_s:
                    del self._wanted[job_id]
                    self._read_s[job_id] = now_s
                    self._read_s.move_to_end(job_id)
                    while len(self._read_s) > JOBS_KEPT:
                        self._read_s.popitem(last=False)
                    return job_id, wanted
        return None

    def _read(self, job_id: str, wanted: Wanted) -> None:
        cut = wanted.cut
        folder = cut.location.removeprefix(f"{self._root.rstrip('/')}/")
        with self._lock:
            known = self._known.get(job_id)
        if known is not None and (known.checkpoint_id != cut.checkpoint_id or known.is_gone):
            known = None
        try:
            found = run_flow(read_positions(cut.checkpoint_id, folder, wanted.uids, known), self._storage)
        except CorruptStateError as error:
            logger.info("job %s: the positions of its sources can't be read: %s", job_id, error)
            found = SnapshotPositions(cut.checkpoint_id, {})
        except ObjectMissingError:
            if not wanted.has_ended:  # deleted for a newer one since it was told of: with fast checkpoints not for the last time
                with self._lock:
                    self._read_s[job_id] = time.monotonic() - READ_INTERVAL_S + MISSED_AGAIN_S
                return
            found = SnapshotPositions(cut.checkpoint_id, {}, is_gone=True)
        except HoldfastError as error:  # storage is away: whoever asks again has it read
            logger.debug("job %s: the positions of its sources were not read: %s", job_id, error)
            return
        except Exception:  # the other jobs' are still to be read
            logger.critical("job %s: the positions of its sources failed in a way that no record describes", job_id, exc_info=True)
            return
        with self._lock:
            self._changes += found != self._known.get(job_id)
            self._known[job_id] = found
            self._known.move_to_end(job_id)
            while len(self._known) > JOBS_KEPT:
                self._known.popitem(last=False)
