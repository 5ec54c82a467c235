"""Mistakes on the way between subtasks: alignment, order behind a barrier, credit, event time."""

from __future__ import annotations

from typing import Any

from holdfast.barriers.admission import Admission
from holdfast.barriers.aligner import Aligner
from holdfast.barriers.alignment import AbortedIds, BlockChannel, UnblockChannels
from holdfast.barriers.channels import OutputChannel
from holdfast.barriers.credits import ReceiverCredit, SenderCredit
from holdfast.barriers.elements import CheckpointBarrier
from holdfast.barriers.frames import EncodedFrame
from holdfast.barriers.gate import InputGate
from holdfast.barriers.valve import StatusWatermarkValve
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sabotage.base import Mutant, Sabotage, throughout


def _never_blocks(original: Any) -> Any:
    def perform(self: InputGate, action: Any) -> None:
        if not isinstance(action, BlockChannel | UnblockChannels):
            original(self, action)

    return perform


def _does_not_mind(original: Any) -> Any:
    """What comes on a channel that should be blocked is taken."""

    def require_open(self: Aligner, channel: int, what: str) -> None:
        if channel not in self._open:
            original(self, channel, what)

    return require_open


def _misses_the_last(original: Any) -> Any:
    def arrived(self: Aligner, state: Any, channel: int, now_ms: int) -> Any:
        if len(state.awaited - {channel}) == 1:
            state.awaited.clear()
        return original(self, state, channel, now_ms)

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
    """The attempt in the header is all that counts, and who can't write one fails the attempt."""

    def read(self: Admission, identity: str, parts: Any) -> EncodedFrame | None:
        frame = EncodedFrame.of(parts)
        return frame if self.is_current(frame) else None

    return read


SABOTAGES = (
    Sabotage(
        "unblocked_channel",
        "a channel whose barrier has come is read on during the alignment",
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
        "overtaking_barrier",
        "a barrier overtakes the small batches that wait to be merged",
        ("I7", "I1", "I5", "I19"),
        (Mutant(OutputChannel, "add_event", _does_not_flush),),
    ),
    Sabotage(
        "forgotten_abort",
        "a subtask that was told of an abort takes the barrier that comes afterwards",
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
        "open_data_port",
        "a data port takes frames of the running attempt whoever sends them",
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
