"""Mistakes with barriers that overtake: what is stored in flight, what is restored of it, and what may not be overtaken."""

from __future__ import annotations

from typing import Any

import holdfast.coordinator.restore.in_flight as restore_module
import holdfast.operators.datastream.overtaking as overtaking_module
import holdfast.operators.functions.windows.columnar as columnar_module
import holdfast.operators.functions.windows.kept_watermark as watermark_module
import holdfast.operators.functions.windows.row_functions as rows_module
import holdfast.operators.task.restored_channels as channels_module
from holdfast.barriers.aligner import Aligner
from holdfast.barriers.alignment import AbortCheckpoint
from holdfast.barriers.channels import OutputChannel
from holdfast.barriers.credits import ReceiverCredit
from holdfast.barriers.elements import Batch, Watermark, WatermarkStatus
from holdfast.barriers.gate import InputGate
from holdfast.barriers.restored import KeyGroupFilter
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, throughout
from holdfast.coordinator.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from holdfast.operators.functions.windows.kept_watermark import kept_moments
from holdfast.operators.task.inflight import InFlight
from holdfast.operators.task.input import TaskInput
from holdfast.operators.task.restore import StateLoader
from holdfast.operators.task.snapshots import SubtaskCheckpointCoordinator

BEHIND = 1 << 40
"""Of an element that arrives behind all others."""


def _leaves_the_queue(original: Any) -> Any:
    def collect_queued(self: InputGate, channel: int, collected: Any) -> None:
        original(self, channel, collected)
        collected.elements[channel].clear()

    return collect_queued


def _stores_nothing_overtaken(original: Any) -> Any:
    def overtake(self: OutputChannel, checkpoint_id: int) -> tuple[Any, ...]:
        original(self, checkpoint_id)
        return ()

    return overtake


def _holds_nothing(original: Any) -> Any:
    return lambda self: []


def _leaves_what_comes(original: Any) -> Any:
    def is_taken_out(self: InputGate, channel: int, element: Any, size: int) -> bool:
        collected = self._collected
        known = None if collected is None else list(collected.elements.get(channel, ()))
        taken = bool(original(self, channel, element, size))
        if collected is not None and known is not None:
            collected.elements[channel][:] = known
        return taken

    return is_taken_out


def _goes_on_behind_the_barrier(original: Any) -> Any:
    def collect_queued(self: InputGate, channel: int, collected: Any) -> None:
        queued = [each.element for each in self._queues[channel]]
        original(self, channel, collected)
        rest = queued[len(queued) - len(self._queues[channel]) :] if channel not in collected.awaited else []
        stored = [each for each in queued if isinstance(each, Batch | Watermark | WatermarkStatus)]
        if rest or len(stored) > len(collected.elements[channel]):
            collected.elements[channel][:] = stored

    return collect_queued


def _keeps_all(original: Any) -> Any:
    return lambda self, batch: batch


def _forgets_the_last(original: Any) -> Any:
    def dealt(logs: Any, partitioning: Any, old: Any, new: Any, consumer: int) -> Any:
        known = {channel: log for channel, log in logs.items() if old.producers <= new.producers or channel[0] < new.producers}
        return original(known, partitioning, old, new, consumer)

    return dealt


def _queues_behind(original: Any) -> Any:
    def restore(self: InputGate, channel: int, elements: Any) -> None:
        before, self._arrivals = self._arrivals, self._arrivals + BEHIND
        original(self, channel, elements)
        self._arrivals = before

    return restore


def _keeps_events(original: Any) -> Any:
    def elements(found: Any, *, keeps_events: bool, key_filter: Any = None) -> Any:
        return original(found, keeps_events=True, key_filter=key_filter)

    return elements


def _spares(kind: str) -> Any:
    """Edges of this kind are overtaken, too."""

    def make(original: Any) -> Any:
        def ban(edge: Any, graph: Any, schema: object) -> str | None:
            reason = original(edge, graph, schema)
            return None if reason is not None and kind in reason else reason

        return ban

    return make


def _savepoints_overtake(original: Any) -> Any:
    return lambda self, request: self._config.unaligned_checkpoints


def _does_not_wait(original: Any) -> Any:
    """What was in hand is all."""

    def begin(self: InFlight, edges: Any, held: Any) -> None:
        original(self, edges, held)
        if self.awaits_inputs:
            self.take_inputs(())

    return begin


def _begins_with_leftovers(original: Any) -> Any:
    def collect(self: InputGate, action: Any) -> None:
        left = vars(self).pop("leftovers", {})
        original(self, action)
        for channel, elements in left.items():
            if self._collected is not None and channel in self._collected.elements:
                self._collected.elements[channel][:0] = elements

    return collect


def _leaves_over(original: Any) -> Any:
    def forget(self: InputGate) -> None:
        if self._collected is not None and self._collected.awaited:  # given up
            vars(self)["leftovers"] = self._collected.elements
        original(self)

    return forget


def _enforces_at_once(original: Any) -> Any:
    def consumed(self: ReceiverCredit, size: int, **more: Any) -> None:
        before = self.allocated_bytes
        original(self, size, **more)
        if self.allocated_bytes < before:
            self._bound_bytes = self._consumed_bytes + self.allocated_bytes

    return consumed


def _keeps_announced(original: Any) -> Any:
    def perform(self: InputGate, action: Any) -> None:
        known = dict(self._announced)
        original(self, action)
        if isinstance(action, AbortCheckpoint) and action.checkpoint_id in known:
            self._announced[action.checkpoint_id] = known[action.checkpoint_id]

    return perform


def _claims_again(original: Any) -> Any:
    def claim(self: Aligner, checkpoint_id: int) -> Any:
        return ([], True) if checkpoint_id == self._newest_id and not self.pending else original(self, checkpoint_id)

    return claim


def _admits_again(original: Any) -> Any:
    def admits(self: SubtaskCheckpointCoordinator, checkpoint_id: int) -> bool:
        return (checkpoint_id == self._newest_id and not self._running) or bool(original(self, checkpoint_id))

    return admits


def _takes_all(original: Any) -> Any:
    return lambda self, handles, declared: handles


def _takes_the_highest(original: Any) -> Any:
    return lambda context, state: max(kept_moments(context, state), default=None)


def _without_limit(original: Any) -> Any:
    def outputs_moved(self: SubtaskCheckpointCoordinator, input_bytes: int = 0) -> Any:
        self._inflight_bytes_max = 1 << 60
        return original(self, input_bytes)

    return outputs_moved


_PRESSED = ("pressure",)
_FAILING = (
    *(throughout("slow_link", "all", amount=amount, probability=0.3) for amount in (2, 10)),
    *(Fault("kill_worker", "workers", at_ms=ms) for ms in (250, 500, 800, 1_200)),
)
_RESCALED = (*_FAILING, *(Fault("rescale", at_ms=ms, amount=amount) for ms, amount in ((350, 2), (650, 3), (1_000, 1), (1_500, 4))))


def _pressed(
    name: str, meaning: str, invariants: tuple[str, ...], *mutants: Mutant, plan: tuple[Fault, ...] = _FAILING, seeds_max: int = 60
) -> Sabotage:
    """One that shows where all queues are full."""
    return Sabotage(name, meaning, invariants, mutants, workloads=_PRESSED, plan=plan, seeds_max=seeds_max)


SABOTAGES = (
    _pressed(
        "queue_not_stored",
        "what waits in front of a subtask when a barrier overtakes it is not stored",
        ("I7", "I1"),
        Mutant(InputGate, "_collect_queued", _leaves_the_queue),
    ),
    _pressed(
        "output_not_stored",
        "what waits behind a subtask when a barrier overtakes it is not stored",
        ("I7", "I1"),
        Mutant(OutputChannel, "overtake", _stores_nothing_overtaken),
    ),
    _pressed(
        "remainder_not_stored",
        "the rest of a batch in hand is not stored when a barrier overtakes it",
        ("I7", "I1"),
        Mutant(TaskInput, "in_hand", _holds_nothing),
    ),
    _pressed(
        "wire_not_stored",
        "what comes in front of a barrier that has overtaken on another channel is not stored",
        ("I7", "I1"),
        Mutant(InputGate, "_is_taken_out", _leaves_what_comes),
    ),
    _pressed(
        "stored_behind_barrier",
        "what is queued behind a barrier is stored with what it has overtaken",
        ("I7", "I2", "I5"),
        Mutant(InputGate, "_collect_queued", _goes_on_behind_the_barrier),
    ),
    _pressed(
        "unfiltered_rescale",
        "a subtask restores all rows in flight of the old ones whose keys are partly its own",
        ("I36", "I2", "I26"),
        Mutant(KeyGroupFilter, "apply", _keeps_all),
        plan=_RESCALED,
    ),
    _pressed(
        "forgotten_channel",
        "of fewer producers than before none restores what was in flight from the last ones",
        ("I36", "I1"),
        Mutant(restore_module, "_dealt", _forgets_the_last),
        plan=_RESCALED,
    ),
    _pressed(
        "restored_behind_new",
        "what was in flight is read behind what comes new on other channels",
        ("I36",),
        Mutant(InputGate, "restore", _queues_behind),
    ),
    _pressed(
        "merged_watermarks",
        "watermarks in flight are restored although channels were merged",
        ("I36",),
        Mutant(channels_module, "restored_elements", _keeps_events),
        plan=_RESCALED,
    ),
    Sabotage(
        "overtaken_broadcast",
        "a barrier overtakes broadcast records, of which the copies are not equal then",
        ("I27", "I7", "I1", "I2", "I36"),
        (Mutant(overtaking_module, "_ban", _spares("broadcast")),),
        workloads=("rules",),
        plan=(throughout("slow_link", "all", amount=60, probability=0.5), *_RESCALED),
        seeds_max=60,
    ),
    _pressed(
        "overtaken_committables",
        "a barrier overtakes committables on their way to the committer",
        ("I1", "I18", "I30", "I36"),
        Mutant(overtaking_module, "_ban", _spares("committable")),
    ),
    _pressed(
        "overtaking_savepoint",
        "the barriers of a savepoint overtake",
        ("I16", "I36"),
        Mutant(CheckpointCoordinator, "_may_overtake", _savepoints_overtake),
        plan=tuple(Fault("savepoint", at_ms=ms) for ms in (150, 350, 550)),
    ),
    _pressed(
        "hasty_collection",
        "a subtask stores what waits when a barrier overtakes, and not what comes until the last one",
        ("I7", "I1"),
        Mutant(InFlight, "__init__", _does_not_wait),
    ),
    _pressed(
        "kept_leftovers",
        "what was collected for an aborted checkpoint is stored with the next one",
        ("I7", "I2", "I5"),
        Mutant(InputGate, "_forget_collected", _leaves_over),
        Mutant(InputGate, "_collect", _begins_with_leftovers),
        plan=(throughout("slow_link", "all", amount=2_500, probability=0.1),),
    ),
    _pressed(
        "switch_after_cancel",
        "a checkpoint that was given up overtakes when it is old enough",
        ("I13",),
        Mutant(InputGate, "_perform", _keeps_announced),
        Mutant(Aligner, "_claim", _claims_again),
        Mutant(SubtaskCheckpointCoordinator, "admits", _admits_again),
        plan=(throughout("slow_link", "all", amount=60, probability=0.5), throughout("store_fails", "worker:", probability=0.2)),
    ),
    _pressed(
        "unlimited_in_flight",
        "a checkpoint stores whatever is in flight",
        ("I17",),
        Mutant(SubtaskCheckpointCoordinator, "outputs_moved", _without_limit),
        plan=(),
    ),
    _pressed(
        "event_time_of_another",
        "a subtask that restores records in flight goes on at the event time of the one that was furthest",
        ("I1", "I4", "I7"),
        Mutant(StateLoader, "_with_own_event_time", _takes_all),
        *(Mutant(module, "restored_moment", _takes_the_highest) for module in (watermark_module, columnar_module, rows_module)),
    ),
    _pressed(
        "hasty_shrinking",
        "what may come is bound by a smaller grant before its sender knows of that",
        ("I17",),
        Mutant(ReceiverCredit, "consumed", _enforces_at_once),
        plan=(throughout("slow_link", "all", amount=400, probability=0.3),),
        seeds_max=120,
    ),
)
