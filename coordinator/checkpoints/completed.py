"""CORE: the store of completed checkpoints decides which are retained, and which are deleted when. Pure.

Deletions are asynchronous and may fail: an id that can't be deleted is left to the sweep of the next recovery."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import ge

from holdfast.barriers.alignment.handler import ABORTED_IDS_MAX
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.checkpoints.actions import DropCheckpoint
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.ha.retention import Retention
from holdfast.coordinator.ha.shared_state import SharedStateRegistry
from holdfast.statebackends.errors import InvariantError

RECENT_COMPLETED_MAX = 1_000
"""Completed ids remembered, so that a repeated acknowledgement never deletes a completed checkpoint's files."""

DROP_TRIES_MAX = 3
"""Tries of one deletion; then it is left to the next recovery."""

DROP_RETRY_MS = 5_000
"""Delay before a failed deletion is tried again."""


@dataclass(slots=True)
class _Dropping:
    """A deletion that has not ended."""

    action: DropCheckpoint
    checkpoint: CompletedCheckpoint | None
    """None: an aborted id."""
    failures: int = 0
    retry_ms: int | None = None


class CompletedCheckpointStore:
    """Retained checkpoints by id, newest last. Savepoints are user-owned: never counted, never dropped."""

    def __init__(
        self,
        retention: Retention | int,
        completed: Iterable[CompletedCheckpoint] = (),
        aborted: Iterable[int] = (),
        *,
        restored_id: int = 0,
        increment_base: int = 0,
        first_checkpoint_id: int = 1,
        erased_below: int = 0,
    ) -> None:
        """`retention`: as a number, so many of the newest.

        `completed`: every checkpoint and savepoint on record. `aborted`: ids whose claim is still stored.

        `restored_id`: the snapshot that the job was restored from, kept beyond the limit until a newer one completes; 0: none.
        `increment_base`: the same id if it is a checkpoint in this job's own directory, whose files its tasks know; else 0.
        `first_checkpoint_id`: ids from here on are of this submission. `erased_below`: as the property, from
        an earlier leader."""
        self.shared_state = SharedStateRegistry()
        self._retention = retention if isinstance(retention, Retention) else Retention(retention)
        self._is_over = False
        """Nothing is retained any more but for labels."""
        self._is_changed = True
        """What is retained, or held, is not what it was when surplus was looked for."""
        self._restored_id = restored_id
        self._increment_base = increment_base
        self._first_checkpoint_id = first_checkpoint_id
        self._erased_below = erased_below
        """Checkpoints below this id may hold a key that was erased: nothing but a label keeps them."""
        self._bases: frozenset[int] = frozenset()
        self._labelled: set[int] = set()
        """Ids that have labels, as far as it is known: the register beside each tells, when it is deleted."""
        self._retained: list[CompletedCheckpoint] = []
        self._stop_point: CompletedCheckpoint | None = None
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._savepoints: set[int] = set()
        self._aborted: list[int] = sorted(aborted)
        self._deleting: set[int] = set()
        self._dropping: dict[int, _Dropping] = {}
        self._folders: dict[int, str] = {}
        for checkpoint in sorted(completed, key=lambda entry: entry.checkpoint_id):
            self._note(checkpoint)
            if self.is_ours(checkpoint.checkpoint_id):  # an earlier leader of this submission has seen it complete
                self._replace_restored(checkpoint)

    @property
    def retained(self) -> tuple[CompletedCheckpoint, ...]:
        return tuple(self._retained)

    @property
    def deleting(self) -> int:
        """Number of completed checkpoints that are being deleted."""
        return len(self._deleting)

    @property
    def newest(self) -> CompletedCheckpoint | None:
        """The newest checkpoint or stop-savepoint: a recovery starts from it."""
        last, stop = (self._retained[-1] if self._retained else None), self._stop_point
        if stop is None or (last is not None and last.checkpoint_id > stop.checkpoint_id):
            return last
        return stop

    @property
    def newest_left(self) -> CompletedCheckpoint | None:
        """What the end of a job that drops its checkpoints has left: the stop-savepoint of this submission, or the newest
        checkpoint that a label keeps."""
        newest = self.newest
        if newest is None or not newest.is_savepoint or self.is_ours(newest.checkpoint_id):
            return newest
        return self._retained[-1] if self._retained else None

    @property
    def base(self) -> int | None:
        """The checkpoint that an increment may build on now: the newest, if the tasks can have its files.

        None at the start of a submission that began empty, from a savepoint, from another job's snapshot, or from a checkpoint that
        is not the newest."""
        newest = self.newest
        if newest is None or newest.is_savepoint or newest.shared is None:
            return None
        number = newest.checkpoint_id
        return number if number >= self._first_checkpoint_id or number == self._increment_base else None

    @property
    def erased_below(self) -> int:
        """Id of the newest completed checkpoint at whose cut a key was erased, whether it is still there or not; 0: none."""
        return self._erased_below

    def retain_bases(self, bases: frozenset[int]) -> None:
        """Set the bases of the increments under way: they stay beyond the limit."""
        self._is_changed = self._is_changed or bases != self._bases
        self._bases = bases

    @property
    def _retained_max(self) -> int:
        return 0 if self._is_over else self._retention.newest

    def is_completed(self, checkpoint_id: int) -> bool:
        """Whether the id is known as COMPLETED; false for ids so old that they are deleted and forgotten."""
        return checkpoint_id in self._recent or checkpoint_id in self._savepoints or checkpoint_id in self._folders

    def is_ours(self, checkpoint_id: int) -> bool:
        """Whether the id is of this submission. Another job may have claimed what an older submission completed."""
        return checkpoint_id >= self._first_checkpoint_id

    def add(self, checkpoint: CompletedCheckpoint) -> None:
        """Add a completed checkpoint. Raises InvariantError if its id is known already."""
        if self.is_completed(checkpoint.checkpoint_id):
            raise InvariantError(f"checkpoint {checkpoint.checkpoint_id} completed twice")
        self._note(checkpoint)
        self._replace_restored(checkpoint)

    def _replace_restored(self, newer: CompletedCheckpoint) -> None:
        self._is_changed = True
        if newer.kind is not CheckpointKind.SAVEPOINT:
            self._restored_id = 0

    def erased(self, checkpoint_id: int) -> None:
        """A completed checkpoint lacks a key that those before it may hold: these are dropped."""
        self._erased_below = checkpoint_id
        self._is_changed = True

    def aborted(self, checkpoint_id: int) -> None:
        """Note an aborted id: its claim and decision stay in storage until a higher id completes."""
        self._aborted.append(checkpoint_id)

    @property
    def aborted_ids(self) -> tuple[int, ...]:
        """The newest aborted ids that no higher id has completed behind: as many as a task remembers."""
        return tuple(self._aborted[-ABORTED_IDS_MAX:])

    def take_drops(self, wall_ms: int = 0) -> list[DropCheckpoint]:
        """Checkpoints to drop now: those that retention does not keep, and aborted ids below the newest completed one. `wall_ms`:
        ms since the epoch.

        The snapshot that the job was restored from and labelled ones don't count against the limit. Bases of increments under way
        do, and are dropped later."""
        is_erased = bool(self._retained) and self._retained[0].checkpoint_id < self._erased_below
        if len(self._retained) <= self._retained_max and not self._aborted and not is_erased:
            return []
        drops: list[DropCheckpoint] = []
        counted = [
            entry
            for entry in self._retained
            if entry.checkpoint_id != self._restored_id and entry.checkpoint_id not in self._labelled
        ]
        surplus = counted[: max(0, len(counted) - self._retained_max)]
        if surplus and self._retention.kept_max > self._retention.newest and not self._is_over:
            if not self._is_changed:
                surplus = []
            else:
                kept = self._retention.choose(((entry.checkpoint_id, entry.timestamp_ms) for entry in counted), wall_ms)
                surplus = [entry for entry in surplus if entry.checkpoint_id not in kept]
        self._is_changed = False
        if is_erased:
            older = [entry for entry in counted if entry.checkpoint_id < self._erased_below]
            surplus = older + [entry for entry in surplus if entry.checkpoint_id >= self._erased_below]
        for oldest in [entry for entry in surplus if entry.checkpoint_id not in self._bases]:
            self._retained.remove(oldest)
            self._folders.pop(oldest.checkpoint_id, None)
            self._deleting.add(oldest.checkpoint_id)
            drops.append(self._drop(oldest))
        newest = self.newest
        limit = newest.checkpoint_id if newest is not None else 0
        gone = [checkpoint_id for checkpoint_id in self._aborted if checkpoint_id < limit]
        self._aborted = [checkpoint_id for checkpoint_id in self._aborted if checkpoint_id >= limit]
        return drops + [self._drop_aborted(checkpoint_id) for checkpoint_id in gone]

    def take_all(self) -> list[DropCheckpoint]:
        """Drop every checkpoint and every aborted id: the job is over and its result is stored. Labelled ones follow when their
        labels are removed."""
        self._is_over, self._restored_id = True, 0
        leaving = [entry for entry in self._retained if entry.checkpoint_id not in self._labelled]
        self._deleting.update(entry.checkpoint_id for entry in leaving)
        drops = [self._drop(entry) for entry in leaving]
        drops += [self._drop_aborted(checkpoint_id) for checkpoint_id in self._aborted]
        self._retained = [entry for entry in self._retained if entry.checkpoint_id in self._labelled]
        self._aborted = []
        return drops

    def note_labels(self, checkpoint_id: int, *, labelled: bool) -> None:
        """A user changed labels of a checkpoint. Without any it counts against the limit again."""
        self._is_changed = True
        if labelled:
            self._labelled.add(checkpoint_id)
        else:
            self._labelled.discard(checkpoint_id)

    def kept(self, checkpoint_id: int) -> None:
        """A label kept it: nothing of it was deleted, and it is retained again."""
        dropping = self._dropping.get(checkpoint_id)
        self.shared_state.forget(checkpoint_id)
        self._give_up(checkpoint_id)
        if dropping is None or dropping.checkpoint is None:
            return
        self._labelled.add(checkpoint_id)
        self._is_changed = True
        self._retain(dropping.checkpoint)

    def dropped(self, checkpoint_id: int) -> None:
        """Note the end of a deletion."""
        self.shared_state.forget(checkpoint_id)
        self._give_up(checkpoint_id)

    def _give_up(self, checkpoint_id: int) -> None:
        self._deleting.discard(checkpoint_id)
        self._dropping.pop(checkpoint_id, None)

    def drop_failed(self, checkpoint_id: int, now_ms: int) -> None:
        """Note a failed deletion: it is retried, or left to the next recovery. Its shared files count as needed."""
        dropping = self._dropping.get(checkpoint_id)
        if dropping is None or dropping.failures + 1 >= DROP_TRIES_MAX:
            self._give_up(checkpoint_id)
            return
        dropping.failures += 1
        dropping.retry_ms = now_ms + DROP_RETRY_MS

    def take_retries(self, now_ms: int) -> list[DropCheckpoint]:
        """Deletions that are due again."""
        if not self._dropping:
            return []
        due = [entry for _, entry in sorted(self._dropping.items()) if entry.retry_ms is not None and entry.retry_ms <= now_ms]
        for entry in due:
            entry.retry_ms = None
        return [entry.action for entry in due]

    def next_retry_ms(self) -> int | None:
        if not self._dropping:
            return None
        return min((entry.retry_ms for entry in self._dropping.values() if entry.retry_ms is not None), default=None)

    def check(self) -> None:
        """Raise InvariantError if the retained ids are out of order or too many (docs/invariants.md, I16)."""
        ids = [entry.checkpoint_id for entry in self._retained]
        if any(map(ge, ids, ids[1:])):
            raise InvariantError(f"retained ids are out of order: {ids}")
        most = 0 if self._is_over else self._retention.kept_max
        if len(ids) > most + len({self._restored_id, *self._bases, *self._labelled}.intersection(ids)):
            raise InvariantError(f"{len(ids)} checkpoints are retained, the limit is {most}")

    def _drop(self, checkpoint: CompletedCheckpoint) -> DropCheckpoint:
        """Drop a checkpoint. Its exclusive files are deleted; shared files stay while another checkpoint refers to them."""
        return self._begin_drop(checkpoint.checkpoint_id, checkpoint.folder, checkpoint)

    def _drop_aborted(self, checkpoint_id: int) -> DropCheckpoint:
        return self._begin_drop(checkpoint_id, "", None)

    def _begin_drop(self, checkpoint_id: int, folder: str, checkpoint: CompletedCheckpoint | None) -> DropCheckpoint:
        released = self.shared_state.release(checkpoint_id)
        action = DropCheckpoint(checkpoint_id, folder, released.names, released.after)
        self._dropping[checkpoint_id] = _Dropping(action, checkpoint)
        return action

    def _note(self, checkpoint: CompletedCheckpoint) -> None:
        if checkpoint.is_savepoint:
            self._savepoints.add(checkpoint.checkpoint_id)
            if checkpoint.kind is CheckpointKind.STOP_SAVEPOINT:
                self._stop_point = checkpoint
            return
        self._recent[checkpoint.checkpoint_id] = None
        while len(self._recent) > RECENT_COMPLETED_MAX:
            self._recent.popitem(last=False)
        self._retain(checkpoint)

    def _retain(self, checkpoint: CompletedCheckpoint) -> None:
        self._folders[checkpoint.checkpoint_id] = checkpoint.folder
        self.shared_state.register(checkpoint.checkpoint_id, checkpoint.shared)
        self._retained.append(checkpoint)
        self._retained.sort(key=lambda entry: entry.checkpoint_id)
