"""Mistakes on the way between subtasks: alignment, order behind a barrier, credit, event time."""

from __future__ import annotations

from typing import Any

import holdfast.operators.worker.deploy as deploy_module
from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import InputGate
from holdfast.barriers.alignment.handler import AbortedIds, BlockChannel, UnblockChannels
from holdfast.barriers.alignment.tracker import BarrierTracker
from holdfast.barriers.alignment.valve import MultiInputValve, StatusWatermarkValve
from holdfast.barriers.elements import CheckpointBarrier, EndOfData, Watermark
from holdfast.barriers.exchange.channels import OutputChannel
from holdfast.barriers.exchange.credits import ReceiverCredit, SenderCredit
from holdfast.barriers.exchange.frames import EncodedFrame
from holdfast.barriers.transport.admission import Admission
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, constant, throughout
from holdfast.operators.task.chain import ChainOutput, OperatorChain


def _never_blocks(original: Any) -> Any:
    def perform(self: InputGate, action: Any) -> None:
        if not isinstance(action, BlockChannel | UnblockChannels):
            original(self, action)

    return perform


def _does_not_mind(original: Any) -> Any:
    """Accepts what comes on a channel that should be blocked."""

    def require_open(self: Aligner, channel: int, what: str) -> None:
        if channel not in self._open:
            original(self, channel, what)

    return require_open


def _misses_the_last(original: Any) -> Any:
    def arrived(self: Aligner, channel: int, now_ms: int) -> Any:
        state: Any = self._state
        if len(state.awaited - {channel}) == 1:
            state.awaited.clear()
        return original(self, channel, now_ms)

    return arrived


def _counts_one_short(original: Any) -> Any:
    def arrived(self: BarrierTracker, entry: Any, channel: int, now_ms: int) -> Any:
        if len(entry.awaited - {channel}) == 1:
            entry.awaited.clear()
        return original(self, entry, channel, now_ms)

    return arrived


def _does_not_flush(original: Any) -> Any:
    def add_event(self: OutputChannel, event: Any) -> None:
        if isinstance(event, CheckpointBarrier):
            self._queue.append((event, 0))
        else:
            original(self, event)

    return add_event


def _advances_to_maximum(original: Any) -> Any:
    def advance(self: StatusWatermarkValve) -> Any:
        aligned = [channel.watermark_ms for channel in self._channels if channel.aligned]
        return self._emit(max(aligned)) if aligned else []

    return advance


def _takes_the_fastest_input(original: Any) -> Any:
    def handle(self: MultiInputValve, channel: int, signal: Any) -> list[Any]:
        if len(self._valves) == 1 or not isinstance(signal, Watermark):
            return list(original(self, channel, signal))
        target, position = self._routes[channel]
        passed = self._valves[target].handle(position, signal)
        return [each for time in passed if isinstance(time, Watermark) for each in self._minimum._emit(time.timestamp_ms)]

    return handle


def _keeps_from_side_outputs(original: Any) -> Any:
    """A barrier waits until something else goes to a side output; at the end of the data nothing else does."""

    def broadcast(self: OperatorChain, event: Any) -> None:
        _tell_side_outputs(self)
        if not isinstance(event, CheckpointBarrier) or getattr(self, "ended", False):
            self.ended = isinstance(event, EndOfData)  # type: ignore[attr-defined]
            original(self, event)
            return
        for node in self.nodes:
            main = node.readers.get(None, [])
            for partition in node.partitions:
                if partition in main:
                    partition.broadcast(event)
                else:
                    self.__dict__.setdefault("belated", []).append((partition, event))

    return broadcast


def _tell_side_outputs(chain: OperatorChain) -> None:
    for partition, barrier in chain.__dict__.pop("belated", ()):
        partition.broadcast(barrier)


def _tells_behind_rows(original: Any) -> Any:
    def collect_side(self: ChainOutput, tag: str, batch: Any) -> None:
        original(self, tag, batch)
        _tell_side_outputs(self._chain)

    return collect_side


def _tells_behind_watermarks(original: Any) -> Any:
    def forward(self: OperatorChain, node: Any, timestamp_ms: int) -> Any:
        yield from original(self, node, timestamp_ms)
        _tell_side_outputs(self)

    return forward


def _always_sends(original: Any) -> Any:
    def can_send(self: SenderCredit, size: int) -> bool:
        return self.is_open

    return can_send


def _counts_only(original: Any) -> Any:
    def received(self: ReceiverCredit, size: int) -> None:
        self._received_bytes += size
        self._received_batches += 1

    return received


def _forgets(original: Any) -> Any:
    def take(self: AbortedIds, checkpoint_id: int) -> bool:
        original(self, checkpoint_id)
        return False

    return take


def _asks_nobody(original: Any) -> Any:
    """Accepts frames by the attempt in their header alone; a malformed header fails the attempt."""

    def read(self: Admission, identity: str, parts: Any) -> EncodedFrame | None:
        frame = EncodedFrame.of(parts)
        return frame if self.is_current(frame) else None

    return read


SABOTAGES = (
    Sabotage(
        "unblocked_channel",
        "a channel whose barrier has arrived is still read during the alignment",
        ("I7", "I2", "I5", "I27"),
        (Mutant(InputGate, "_perform", _never_blocks), Mutant(Aligner, "_require_open", _does_not_mind)),
        workloads=("windows", "timers", "ends", "aggregate"),
        kinds=("slow_link",),
    ),
    Sabotage(
        "hasty_alignment",
        "a snapshot is taken when the barrier of one channel has still to come",
        ("I7", "I1", "I5", "I19"),
        (Mutant(Aligner, "_arrived", _misses_the_last),),
        workloads=("windows", "timers", "ends", "aggregate"),
        kinds=("slow_link",),
    ),
    Sabotage(
        "hasty_tracker",
        "at least once: a snapshot is taken when the barrier of one channel has still to come",
        ("I37",),
        (Mutant(BarrierTracker, "_arrived", _counts_one_short),),
        workloads=("at_least_once",),
        kinds=("slow_link",),
        seeds_max=60,
    ),
    Sabotage(
        "broadcast_read_on",
        "at least once: a subtask reads broadcasts, splits and committables on behind a barrier, as it reads records",
        ("I27", "I37", "I18", "I30"),
        (Mutant(deploy_module, "stays_aligned", constant(False)),),
        workloads=("at_least_once",),
        kinds=("slow_link",),
        seeds_max=120,
    ),
    Sabotage(
        "overtaking_barrier",
        "a barrier overtakes the small batches that wait to be merged",
        ("I7", "I1", "I5", "I19"),
        (Mutant(OutputChannel, "add_event", _does_not_flush),),
    ),
    Sabotage(
        "forgotten_abort",
        "a subtask with notice of an abort takes the barrier that comes afterwards",
        ("I13",),
        (Mutant(AbortedIds, "take", _forgets),),
        workloads=("timers",),
        plan=(
            throughout("slow_link", "all", amount=400, probability=0.5),
            throughout("store_fails", "worker:WriteFile", probability=0.1),
        ),
        seeds_max=60,
    ),
    Sabotage(
        "fastest_watermark",
        "event time is that of the fastest channel, not of the slowest",
        ("I7", "I10", "I1", "I2"),
        (Mutant(StatusWatermarkValve, "_advance_to_minimum", _advances_to_maximum),),
        workloads=("windows", "timers"),
    ),
    Sabotage(
        "fastest_input",
        "event time of an operator with two inputs is that of the faster one",
        ("I7", "I10", "I1", "I2"),
        (Mutant(MultiInputValve, "handle", _takes_the_fastest_input),),
        workloads=("connected",),
    ),
    Sabotage(
        "belated_side_barrier",
        "a barrier does not go to side outputs when it goes to the main output, but behind the next of their rows",
        ("I7", "I2", "I5"),
        (
            Mutant(OperatorChain, "broadcast", _keeps_from_side_outputs),
            Mutant(OperatorChain, "_forward", _tells_behind_watermarks),
            Mutant(ChainOutput, "collect_side", _tells_behind_rows),
        ),
        workloads=("sideoutputs",),
    ),
    Sabotage(
        "open_data_port",
        "a data port takes frames of the running attempt from any sender",
        ("I15",),
        (Mutant(Admission, "read", _asks_nobody),),
        plan=(Fault("forged_frames", "workers", at_ms=400),),
    ),
    Sabotage(
        "unlimited_credit",
        "a channel sends without credit",
        ("I17",),
        (Mutant(SenderCredit, "can_send", _always_sends), Mutant(ReceiverCredit, "received", _counts_only)),
        workloads=("windows", "broadcast", "aggregate"),
        kinds=("slow_link",),
    ),
)
