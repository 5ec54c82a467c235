"""Mistakes of a committer whose target is outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import holdfast.operators.sinks.targets.committer as committer_module
from holdfast.chaos.sabotage.base import Mutant, Sabotage, throughout
from holdfast.operators.sinks.calls import TRIES
from holdfast.operators.sinks.files.formats import encode
from holdfast.operators.sinks.files.writer import _StagedWrite
from holdfast.operators.sinks.targets.committer import TargetCommitter, TargetFlows
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.staging import Step
from holdfast.operators.sinks.targets.target import ApplyRows, FileSlice
from holdfast.statebackends.errors import AmbiguousWriteError
from holdfast.statebackends.storage.port import WriteFile


def _commits_at_barrier(original: Any) -> Any:
    def snapshot_state(self: TargetCommitter, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        self._released = max(self._released, checkpoint_id)
        self._commit_next()

    return snapshot_state


def _fences_nobody(original: Any) -> Any:
    def take(self: CommitOwner, stored: CommitPosition | None) -> CommitPosition:
        taken: CommitPosition = original(self, stored)
        return taken if stored is None or stored.attempt != taken.attempt else stored

    return take


def _takes_from_anybody(original: Any) -> Any:
    def check_owner(self: CommitOwner, stored: CommitPosition) -> None:
        return

    return check_owner


def _takes_silence_for_success(original: Any) -> Any:
    def apply(self: TargetFlows, position: CommitPosition, step: Step) -> Any:
        wanted = position.moved(step.checkpoint_id, step.row, step.tag)
        try:
            yield self._wanted(ApplyRows(self.path, step.slices, position, wanted))
        except Exception:
            taken = yield from self.open(position, again=True)
            return taken.moved(step.checkpoint_id, step.row, step.tag)
        return wanted

    return apply


def _takes_silence_for_failure(original: Any) -> Any:
    def apply(self: TargetFlows, position: CommitPosition, step: Step) -> Any:
        wanted = position.moved(step.checkpoint_id, step.row, step.tag)
        for _ in range(TRIES.attempts_max):
            try:
                yield self._wanted(ApplyRows(self.path, step.slices, position, wanted))
                return wanted
            except Exception:
                position = yield from self.open(position, again=True)
                wanted = position.moved(step.checkpoint_id, step.row, step.tag)
        raise AmbiguousWriteError("no answer, again and again", path=self.path)

    return apply


def _drops_aborted_rows(original: Any) -> Any:
    def notify_checkpoint_aborted(self: TargetCommitter, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        if not self._busy:
            self._pending.pop(checkpoint_id, None)

    return notify_checkpoint_aborted


def _one_row_short(original: Any) -> Any:
    def next_step(position: CommitPosition, due: Any, rows_max: int | None) -> Step | None:
        step: Step | None = original(position, due, rows_max)
        if step is None or len(step.slices) < 2:
            return step
        first = step.slices[0]
        shorter = FileSlice(first.folder, first.name, first.start, first.stop - 1)
        return replace(step, slices=(shorter, *step.slices[1:]))

    return next_step


def _forgets_no_file(original: Any) -> Any:
    def forget_flow(*arguments: Any) -> Any:
        yield from ()

    return forget_flow


def _writes_beside_itself(original: Any) -> Any:
    def flow(self: _StagedWrite) -> Any:
        batches = self._batches
        if not self.durable:
            yield WriteFile(self._path, encode(self._format, batches, self._schema))
            self.durable = True

    return flow


SABOTAGES = (
    Sabotage(
        "outside_before_complete",
        "rows go outside at the barrier, before the checkpoint is complete",
        ("I41",),
        (Mutant(TargetCommitter, "snapshot_state", _commits_at_barrier),),
        workloads=("outside",),
    ),
    Sabotage(
        "target_opened_without_fence",
        "whoever opens a target again leaves the position as good as it was: a call in flight may still take effect",
        ("I39", "I38"),
        (Mutant(CommitOwner, "take", _fences_nobody),),
        workloads=("outside",),
    ),
    Sabotage(
        "target_taken_by_anybody",
        "an attempt that wakes late takes the target from its successor",
        ("I39",),
        (Mutant(CommitOwner, "_check_owner", _takes_from_anybody),),
        workloads=("outside",),
        kinds=("kill_worker", "kill_all", "pause_worker", "user_error"),
        seeds_max=60,
    ),
    Sabotage(
        "silence_taken_for_success",
        "a committer that gets no answer takes its rows for committed",
        ("I38", "I39", "I30"),
        (Mutant(TargetFlows, "_apply", _takes_silence_for_success),),
        workloads=("outside",),
    ),
    Sabotage(
        "silence_taken_for_failure",
        "a committer that gets no answer takes its rows for not committed, and commits them again",
        ("I38",),
        (Mutant(TargetFlows, "_apply", _takes_silence_for_failure),),
        workloads=("outside",),
    ),
    Sabotage(
        "aborted_rows_dropped",
        "the rows of an aborted checkpoint are dropped with it",
        ("I38", "I42", "I30"),
        (Mutant(TargetCommitter, "notify_checkpoint_aborted", _drops_aborted_rows),),
        workloads=("outside",),
        seeds_max=60,
    ),
    Sabotage(
        "step_one_row_short",
        "where a step begins in one file and goes on in the next, a row is left out between them",
        ("I38", "I30"),
        (Mutant(committer_module, "next_step", _one_row_short),),
        workloads=("outside",),
    ),
    Sabotage(
        "staged_rows_left",
        "staged files stay when their rows are outside",
        ("I42",),
        (Mutant(committer_module, "forget_flow", _forgets_no_file),),
        workloads=("outside",),
    ),
    Sabotage(
        "staged_again",
        "two checkpoints write one file at the same time, the second one behind its commit",
        ("I42",),
        (Mutant(_StagedWrite, "flow", _writes_beside_itself),),
        workloads=("outside",),
        plan=(throughout("store_slow", "worker:WriteFile", amount=60),),
    ),
)
