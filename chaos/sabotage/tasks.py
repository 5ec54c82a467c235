"""Mistakes of a subtask: order of a snapshot, timers, acknowledgements before durability, the end; and of a driver: hung
workers."""

from __future__ import annotations

from typing import Any

import msgspec

import holdfast.coordinator.dispatcher.storage_effects as effects_module
from holdfast.barriers.elements import CheckpointBarrier, EndOfData
from holdfast.barriers.messages import Registered
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant
from holdfast.operators.sinks.files.writer import ParquetSinkWriter
from holdfast.operators.spark.supervisor import SlotSupervisor
from holdfast.operators.task.chain import OperatorChain
from holdfast.operators.task.input import TaskInput
from holdfast.operators.task.subtask import Subtask
from holdfast.operators.worker.session import Session
from holdfast.statebackends.heap.timers import FrozenTimerRows

_PREPARE = OperatorChain.prepare_snapshot


def _prepares_behind_barrier(original: Any) -> Any:
    def broadcast(self: OperatorChain, event: Any) -> None:
        original(self, event)
        if isinstance(event, CheckpointBarrier):
            for _ in _PREPARE(self, event.checkpoint_id):
                pass

    return broadcast


def _forgets_one(original: Any) -> Any:
    def rows(self: FrozenTimerRows) -> Any:
        yield from list(original(self))[1:]

    return rows


def _does_not_wait(original: Any) -> Any:
    def snapshot_work(self: ParquetSinkWriter, checkpoint_id: int) -> None:
        for write in self._writes:
            self.context.submit_flow(write.flow(), self._port, lambda result, error: None)
        self._writes = []

    return snapshot_work


def _does_not_wait_for_commits(original: Any) -> Any:
    def finish_if_due(self: Subtask) -> bool:
        if not self._finish_id or self._input.has_work:
            return False
        self._finish()
        return True

    return finish_if_due


def _hears_no_end(original: Any) -> Any:
    def reconcile(self: Session, registered: Registered) -> Any:
        return original(self, msgspec.structs.replace(registered, finish=0))

    return reconcile


def _asks_the_first(original: Any) -> Any:
    """The first of several channels to end decides whether the data of all has ended, or their readers were stopped."""

    def event(self: TaskInput, channel: int, event: Any) -> None:
        if isinstance(event, EndOfData) and self._ended_channels:
            event = EndOfData(self._drains)
        original(self, channel, event)

    return event


def _waits_for_one(original: Any) -> Any:
    def event(self: TaskInput, channel: int, event: Any) -> None:
        if isinstance(event, EndOfData):
            if self._ended_channels:
                return
            assert self._inputs is not None
            self._ended_channels.update(range(len(self._inputs.indexes)))
        original(self, channel, event)

    return event


def _is_finished_with_the_first(original: Any) -> Any:
    def event(self: TaskInput, channel: int, event: Any) -> None:
        original(self, channel, event)
        self.is_finished = self.is_finished or isinstance(event, EndOfData)

    return event


SABOTAGES = (
    Sabotage(
        "revived_timers",
        "a task that had finished fires the timers that its end left behind once it is restored",
        ("I8",),
        (Mutant(effects_module, "find_finished", constant(frozenset())),),
        workloads=("ends",),
        kinds=("user_error", "kill_worker", "restore", "rescale"),
    ),
    Sabotage(
        "finished_early",
        "a task counts as finished once one of its inputs has ended",
        ("I11",),
        (Mutant(TaskInput, "_event", _is_finished_with_the_first),),
        workloads=("ends", "windows", "timers"),
    ),
    Sabotage(
        "hung_for_ever",
        "the supervisor waits for a silent worker's task to end by itself",
        ("I30",),
        (Mutant(SlotSupervisor, "_miss", constant([])),),
        kinds=("hang_worker",),
    ),
    Sabotage(
        "late_emission",
        "what operators emit on a barrier is sent behind it",
        ("I7", "I9", "I1", "I5", "I19"),
        (
            Mutant(OperatorChain, "prepare_snapshot", constant(())),
            Mutant(OperatorChain, "broadcast", _prepares_behind_barrier),
        ),
    ),
    Sabotage(
        "forgotten_timer",
        "a snapshot lacks one timer of each subtask",
        ("I7", "I10", "I1"),
        (Mutant(FrozenTimerRows, "rows", _forgets_one),),
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
        "stopped_is_ended",
        "a subtask of which one input has ended flushes when the others are merely stopped",
        ("I10",),
        (Mutant(TaskInput, "_event", _asks_the_first),),
        workloads=("ends", "random", "windows", "timers"),
        kinds=("restore",),
    ),
    Sabotage(
        "early_end",
        "a subtask ends its data when the first of its inputs has ended",
        ("I10", "I7", "I1"),
        (Mutant(TaskInput, "_event", _waits_for_one),),
        workloads=("ends", "random", "windows", "timers"),
    ),
    Sabotage(
        "unrepeated_finish",
        "a worker that missed the command to finish does not get it when it comes back",
        ("I30",),
        (Mutant(Session, "_reconcile", _hears_no_end),),
        workloads=("counter", "timers", "ends", "aggregate"),
        kinds=("drop",),
        seeds_max=200,
    ),
)
