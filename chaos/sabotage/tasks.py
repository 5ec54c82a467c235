"""Mistakes of a subtask: order of a snapshot, timers, what is acknowledged before it is durable, and the end."""

from __future__ import annotations

from typing import Any

import msgspec

from barriers.elements import CheckpointBarrier
from barriers.messages import Registered
from chaos.sabotage.base import Mutant, Sabotage, constant
from operators.chain import OperatorChain
from operators.session import Session
from operators.sinks.writer import ParquetSinkWriter
from operators.subtask import Subtask
from statebackends.generationrows import FrozenGenerationRows

_PREPARE = OperatorChain.prepare_snapshot


def _prepares_behind_barrier(original: Any) -> Any:
    def broadcast(self: OperatorChain, event: Any) -> None:
        original(self, event)
        if isinstance(event, CheckpointBarrier):
            _PREPARE(self, event.checkpoint_id)

    return broadcast


def _forgets_one(original: Any) -> Any:
    def rows(self: FrozenGenerationRows) -> Any:
        yield from list(original(self))[1:]

    return rows


def _does_not_wait(original: Any) -> Any:
    def snapshot_work(self: ParquetSinkWriter, checkpoint_id: int) -> None:
        for write in self._writes:
            self.context.submit_flow(write.flow(), self._storage, lambda result, error: None)
        self._writes = []

    return snapshot_work


def _does_not_wait_for_commits(original: Any) -> Any:
    def finish_if_due(self: Subtask) -> bool:
        if not self._finish_id or self._intake.has_work:
            return False
        self._finish()
        return True

    return finish_if_due


def _hears_no_end(original: Any) -> Any:
    def reconcile(self: Session, registered: Registered) -> Any:
        return original(self, msgspec.structs.replace(registered, finish=0))

    return reconcile


SABOTAGES = (
    Sabotage(
        "late_emission",
        "what operators emit on a barrier is sent behind it",
        ("I7", "I9", "I1", "I5", "I19"),
        (
            Mutant(OperatorChain, "prepare_snapshot", constant(None)),
            Mutant(OperatorChain, "broadcast", _prepares_behind_barrier),
        ),
    ),
    Sabotage(
        "forgotten_timer",
        "a snapshot lacks one timer of each subtask",
        ("I7", "I10", "I1"),
        (Mutant(FrozenGenerationRows, "rows", _forgets_one),),
        workloads=("timers",),
    ),
    Sabotage(
        "early_ack",
        "a sink's checkpoint is acknowledged before its files are durable",
        ("I11",),
        (Mutant(ParquetSinkWriter, "snapshot_work", _does_not_wait),),
        kinds=("store_fails", "store_slow", "disk_full"),
        seeds_max=40,
    ),
    Sabotage(
        "finish_before_commit",
        "a task ends although its sink has still to commit",
        ("I1", "I19"),
        (Mutant(Subtask, "_finish_if_due", _does_not_wait_for_commits),),
    ),
    Sabotage(
        "unrepeated_finish",
        "a worker that missed the command to finish is not told again when it comes back",
        ("I30",),
        (Mutant(Session, "_reconcile", _hears_no_end),),
        workloads=("counter", "timers", "ends", "aggregate"),
        kinds=("drop",),
        seeds_max=200,
    ),
)
