"""Mistakes of state: memory shared between a snapshot and the running job, and redistribution in a rescale."""

from __future__ import annotations

from typing import Any

import holdfast.coordinator.restore.assign as restore_module
import holdfast.operators.task.rollback as rollback_module
import holdfast.statebackends.redistribute as redistribute_module
from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant, throughout
from holdfast.operators.functions.async_map import AsyncMapOperator
from holdfast.operators.functions.operator_state import BroadcastState
from holdfast.operators.task.timers import Timer, TimerQueue
from holdfast.statebackends.backends.operator import FrozenLists, ListOperatorStateBackend
from holdfast.statebackends.columnar.state import FrozenColumns, FrozenState
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.heap.kept_slots import KeptSlots
from holdfast.statebackends.heap.slot_pages import PAGE_SLOTS, DirtySlots, SlotPages
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.ttl import StateTtl, TableTtl
from holdfast.statebackends.redistribute import NewEntries, OldEntries


def _freezes_nothing(original: Any) -> Any:
    def freeze(self: CopyOnWriteStateTable) -> Any:
        return (self.active, *self.immutable)

    return freeze


def _shares_pages(original: Any) -> Any:
    """A page is marked as written and stays the one that the snapshot reads."""

    def own(self: SlotPages, page: int) -> bytearray:
        marks = self.marks[page] = bytearray(PAGE_SLOTS)
        return marks

    return own


def _marks_nothing(original: Any) -> Any:
    """What is written behind a barrier is noted nowhere, so that the next increment doesn't have it."""

    def close_marks(self: SlotPages, count: int) -> None:
        original(self, count)
        self._frozen = DirtySlots(())

    return close_marks


def _lets_pages_go(original: Any) -> Any:
    """State that is kept for a rollback shares its pages with what is written on."""

    def init(self: KeptSlots, keys: Any, tables: Any, key_groups: Any) -> None:
        original(self, keys, tables, key_groups)
        self.release()

    return init


def _stores_no_requests(original: Any) -> Any:
    def snapshot_state(self: AsyncMapOperator, checkpoint_id: int) -> None:
        original(self, checkpoint_id)
        entries = self.context.operator_state.list_state("requests")
        entries.update(entries.entries[1:])

    return snapshot_state


def _passes_watermarks_at_once(original: Any) -> Any:
    def process_watermark(self: AsyncMapOperator, watermark_ms: int) -> Any:
        if watermark_ms < MAX_WATERMARK:
            self.output.emit_watermark(watermark_ms)
        return iter(())

    return process_watermark


def _stores_lists_as_they_are(original: Any) -> Any:
    """Without a copy, so that what is written behind the barrier is written into the snapshot, too."""

    def snapshot(self: ListOperatorStateBackend, checkpoint_id: int) -> FrozenLists:
        return FrozenLists([(self._metas[name], state.entries) for name, state in self._lists.items()])

    return snapshot


def _writes_at_once(original: Any) -> Any:
    def put(self: BroadcastState[Any, Any], key: Any, value: Any) -> None:
        original(self, key, value)
        self._list.entries[:] = [self._entries[each][1] for each in self._ordered()]

    return put


def _deals_evenly(old: OldEntries[bytes], new_parallelism: int) -> NewEntries[bytes]:
    """Gives every subtask the same number of entries, and loses the rest of the division."""
    dealt: NewEntries[bytes] = [{} for _ in range(new_parallelism)]
    for name, subtasks in sorted(old.items()):
        entries = [entry for subtask in subtasks for entry in subtask]
        size = len(entries) // new_parallelism
        for index in range(new_parallelism):
            dealt[index][name] = entries[index * size : (index + 1) * size]
    return dealt


def _repeats_the_last(original: Any) -> Any:
    """Each chunk begins with the last entry of the one before."""

    def split(old: OldEntries[bytes], new_parallelism: int) -> NewEntries[bytes]:
        dealt: NewEntries[bytes] = original(old, new_parallelism)
        for name in old:
            last: list[bytes] = []
            for subtask in dealt:
                following = subtask[name][-1:]
                subtask[name] = [*last, *subtask[name]]
                last = following
        return dealt

    return split


def _rounds_down(original: Any) -> Any:
    def assign(max_parallelism: int, parallelism: int, subtask_index: int) -> KeyGroupRange:
        start = subtask_index * max_parallelism // parallelism
        return KeyGroupRange(start, (subtask_index + 1) * max_parallelism // parallelism)

    return assign


def _shows_expired(original: Any) -> Any:
    def start(self: TableTtl, state_ttl: StateTtl) -> None:
        original(self, state_ttl)
        self.shows_expired = True

    return start


def _halves_lives(original: Any) -> Any:
    return property(lambda self: self.clock.now_ms - self.duration_ms // 2)


def _shows_for_half(original: Any) -> Any:
    def start(self: TableTtl, state_ttl: StateTtl) -> None:
        original(self, state_ttl)
        self.duration_ms //= 2

    return start


def _keeps_fired(original: Any) -> Any:
    """A fired timer leaves the heap, and stays in later snapshots."""

    def take_due(self: TimerQueue, time_ms: int) -> Timer | None:
        timer = self.head()
        if timer is None or timer[0] > time_ms:
            return None
        self._leave()
        return timer

    return take_due


def _expires_at_the_barrier(original: Any) -> Any:
    def freeze_horizon(self: StateTtl) -> None:
        self.barrier_horizon_ms = self.clock.now_ms

    return freeze_horizon


SABOTAGES = (
    Sabotage(
        "shown_expired",
        "state with a TTL shows what has expired until it is cleaned up",
        ("I1", "I7"),
        (Mutant(TableTtl, "__init__", _shows_expired),),
        workloads=("expiring",),
    ),
    Sabotage(
        "half_a_life",
        "state with a TTL expires in half of its time",
        ("I1", "I7"),
        (Mutant(StateTtl, "horizon_ms", _halves_lives), Mutant(TableTtl, "__init__", _shows_for_half)),
        workloads=("expiring",),
        seeds_max=60,
    ),
    Sabotage(
        "refired_timer",
        "a timer that has fired is stored with the next snapshots, and fires again after a restore",
        ("I3", "I1", "I2", "I5", "I7"),
        (Mutant(TimerQueue, "take_due", _keeps_fired),),
        workloads=("timers",),
    ),
    Sabotage(
        "shared_generation",
        "a snapshot in memory contains later writes of the job",
        ("I7", "I6"),
        (Mutant(CopyOnWriteStateTable, "freeze", _freezes_nothing), Mutant(CopyOnWriteStateTable, "release", constant(None))),
        workloads=("counter", "timers", "ends"),
        kinds=("store_slow",),
        seeds_max=80,
    ),
    Sabotage(
        "shared_page",
        "a page of slots that a snapshot reads is written without being copied",
        ("I7", "I6"),
        (Mutant(SlotPages, "own", _shares_pages),),
        workloads=("counter", "ends"),
        kinds=("store_slow",),
        seeds_max=80,
    ),
    Sabotage(
        "unmarked_page",
        "a page of slots is written and not marked, so that an increment lacks its changes",
        ("I7", "I6"),
        (Mutant(SlotPages, "_close_marks", _marks_nothing),),
        workloads=("counter", "ends"),
        seeds_max=80,
    ),
    Sabotage(
        "aborted_rollback",
        "a restart takes over the newest state in memory, of whatever checkpoint it is",
        ("I5", "I7", "I6"),
        (
            Mutant(rollback_module, "is_restored", constant(True)),
            Mutant(rollback_module, "_is_same", constant(True)),
            Mutant(rollback_module.KeptCheckpoints, "aborted", constant([])),
        ),
        workloads=("timers",),
        plan=(
            Fault("user_error", "reorder", at_ms=449),
            Fault("user_error", "reorder", on="worker.close.", nth=4),
            Fault("user_error", "reorder", on="worker.snapshot.", nth=14),
        ),
        seeds_max=80,
    ),
    Sabotage(
        "unpinned_rollback",
        "state that is kept in memory for a restart contains later writes of the job",
        ("I5", "I7", "I6"),
        (Mutant(KeptSlots, "__init__", _lets_pages_go),),
        workloads=("timers", "sideoutputs"),
        kinds=("user_error",),
        seeds_max=80,
    ),
    Sabotage(
        "shared_columns",
        "columns that a snapshot reads are changed without being copied",
        ("I7", "I6"),
        (Mutant(FrozenColumns, "protect", constant(None)),),
        workloads=("windows",),
        seeds_max=40,
    ),
    Sabotage(
        "shared_panes",
        "a pane that is written before its snapshot has come to it is stored with later records",
        ("I7", "I6"),
        (Mutant(FrozenState, "protect", constant(None)),),
        workloads=("windows",),
        seeds_max=40,
    ),
    Sabotage(
        "lost_request",
        "the first requests in flight are not stored: behind a restore they are never sent again",
        ("I1",),
        (Mutant(AsyncMapOperator, "snapshot_state", _stores_no_requests),),
        workloads=("async",),
    ),
    Sabotage(
        "overtaken_result",
        "a watermark leaves before the results of the rows in front of it",
        ("I34", "I31"),
        (Mutant(AsyncMapOperator, "process_watermark", _passes_watermarks_at_once),),
        workloads=("async",),
    ),
    Sabotage(
        "broadcast_behind_barrier",
        "a broadcast record behind the barrier changes the copy that a snapshot is still writing",
        ("I27",),
        (Mutant(ListOperatorStateBackend, "snapshot", _stores_lists_as_they_are), Mutant(BroadcastState, "put", _writes_at_once)),
        workloads=("rules",),
        plan=(throughout("store_slow", "worker:WriteFile", amount=60),),
    ),
    Sabotage(
        "lost_list_entry",
        "a rescale that doesn't divide evenly loses the odd entries of list state",
        ("I27", "I8"),
        (Mutant(restore_module, "split_redistribute", lambda original: _deals_evenly),),
        kinds=("rescale",),
    ),
    Sabotage(
        "repeated_list_entry",
        "a rescale gives an entry of list state to two subtasks",
        ("I27", "I8"),
        (Mutant(restore_module, "split_redistribute", _repeats_the_last),),
        kinds=("rescale",),
    ),
    Sabotage(
        "key_groups_rounded_down",
        "a rescale looks for keyed state in other key groups than a subtask owns",
        ("I26",),
        (Mutant(redistribute_module, "assign_key_groups", _rounds_down),),
        kinds=("rescale",),
        seeds_max=40,
    ),
    Sabotage(
        "expired_at_the_barrier",
        "a snapshot leaves out state that has still years to live",
        ("I7", "I6"),
        (Mutant(StateTtl, "freeze_horizon", _expires_at_the_barrier),),
        workloads=("states",),
    ),
)
