"""Mistakes of a two-phase sink: what it commits, when, how often, and which staged files are swept."""

from __future__ import annotations

from typing import Any

import holdfast.operators.sinks.files.committer as committer_module
import holdfast.operators.sinks.files.log as log_module
import holdfast.operators.sinks.files.merges as merges_module
from holdfast.barriers.sinks.log import LogEntry, MergeEntry
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.operators.sinks.committing import TwoPhaseCommitter
from holdfast.operators.sinks.files.committer import FileCommitter
from holdfast.operators.sinks.files.merging import Runs
from holdfast.statebackends.storage.flows import delete_files


def _commits_notified_only(original: Any) -> Any:
    def commit_next(self: TwoPhaseCommitter[Any]) -> None:
        passed = {checkpoint: self._pending.pop(checkpoint) for checkpoint in sorted(self._pending) if checkpoint < self._released}
        swept, self._swept = self._swept, self._swept or bool(passed)
        try:
            original(self)
        finally:
            self._pending.update(passed)
            self._swept = swept or (self._swept and not passed)

    return commit_next


def _works_for_notified_only(original: Any) -> Any:
    def has_pending_work(self: TwoPhaseCommitter[Any]) -> bool:
        return self._busy or self._released in self._pending

    return has_pending_work


def _takes_restored_for_committed(original: Any) -> Any:
    def commit_next(self: TwoPhaseCommitter[Any]) -> None:
        if not self._busy and self._is_open:
            for checkpoint in [each for each in self._pending if each <= self.context.restored_checkpoint_id]:
                del self._pending[checkpoint]
        original(self)

    return commit_next


def _commits_at_barrier(original: Any) -> Any:
    def snapshot_state(self: FileCommitter, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        self._released = max(self._released, checkpoint_id)
        self._commit_next()

    return snapshot_state


def _sweeps_own_attempt(original: Any) -> Any:
    return lambda paths, tag, attempt, kept, **settings: original(paths, tag, attempt + 1, kept, **settings)


def _sweeps_always(original: Any) -> Any:
    def sweep_once(self: TwoPhaseCommitter[Any]) -> None:
        self._swept = False
        original(self)

    return sweep_once


def _forgets_merges(original: Any) -> Any:
    def follow(self: Runs, entry: LogEntry, sizes: Any) -> None:
        if not isinstance(entry, MergeEntry):
            original(self, entry, sizes)

    return follow


def _deletes_in_front_of_the_entry(original: Any) -> Any:
    def prepare_flow(paths: Any, plan: Any, sources: Any) -> Any:
        prepared = yield from original(paths, plan, sources)
        if prepared.merged is not None:
            yield from delete_files(paths.data(each.file.name) for each in prepared.merged.sources)
        return prepared

    return prepare_flow


SABOTAGES = (
    Sabotage(
        "merged_again",
        "a merge is put without a look at what the log has replaced already",
        ("I43",),
        (Mutant(Runs, "follow", _forgets_merges),),
        workloads=("merging",),
    ),
    Sabotage(
        "merged_files_deleted_early",
        "files are deleted before the log has the entry of the merge",
        ("I20", "I19", "I43"),
        (Mutant(merges_module, "prepare_flow", _deletes_in_front_of_the_entry),),
        workloads=("merging",),
    ),
    Sabotage(
        "exact_commit",
        "a sink commits the notified checkpoint alone, and none below it",
        ("I19", "I1", "I5", "I7", "I24"),
        (
            Mutant(TwoPhaseCommitter, "_commit_next", _commits_notified_only),
            Mutant(TwoPhaseCommitter, "has_pending_work", _works_for_notified_only),
        ),
        kinds=("savepoint",),
    ),
    Sabotage(
        "lost_recommit",
        "a restored sink takes complete checkpoints for committed",
        ("I19", "I20", "I1", "I5"),
        (Mutant(TwoPhaseCommitter, "_commit_next", _takes_restored_for_committed),),
        workloads=("counter", "broadcast", "fanout", "ends"),
        kinds=("kill_worker", "kill_driver", "kill_all"),
    ),
    Sabotage(
        "repeated_commit",
        "a commit doesn't look whether it was done before",
        ("I19", "I2"),
        (Mutant(log_module, "_committed", constant(frozenset())),),
    ),
    Sabotage(
        "early_commit",
        "a sink commits at the barrier, before the checkpoint is complete",
        ("I18",),
        (Mutant(FileCommitter, "snapshot_state", _commits_at_barrier),),
    ),
    Sabotage(
        "unprotected_sweep",
        "a sweep deletes staged files that a savepoint refers to",
        ("I25",),
        (Mutant(committer_module, "is_protected", constant(False)),),
        kinds=("savepoint", "cut_link"),
        seeds_max=200,
    ),
    Sabotage(
        "sweep_of_the_living",
        "a sink sweeps whenever it has nothing to commit, and takes what the running attempt has staged too",
        ("I20",),
        (
            Mutant(committer_module, "candidates_flow", _sweeps_own_attempt),
            Mutant(committer_module, "is_protected", constant(False)),
            Mutant(TwoPhaseCommitter, "_sweep_once", _sweeps_always),
        ),
        kinds=("store_slow",),
        seeds_max=200,
    ),
    Sabotage(
        "no_sweep",
        "staged files of a dead attempt are left behind",
        ("I24",),
        (Mutant(TwoPhaseCommitter, "_sweep_once", constant(None)),),
        workloads=("timers", "fanout", "ends", "random"),
        kinds=("kill_worker", "kill_all", "user_error"),
    ),
)
