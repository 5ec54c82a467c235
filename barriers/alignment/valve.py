"""CORE: combines watermarks and idleness of many channels, and decides when event time advances.

It does not see records and does not fire timers. Source: Flink, StatusWatermarkValve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Watermark, WatermarkStatus
from holdfast.statebackends.errors import InvalidConfigError

TimeSignal: TypeAlias = Watermark | WatermarkStatus


@dataclass(slots=True)
class _ChannelTime:
    watermark_ms: int = MIN_WATERMARK
    idle: bool = False
    aligned: bool = True
    """False while idle, and after a return until the channel has caught up with the output."""


class StatusWatermarkValve:
    """Output = minimum over the aligned active channels, strictly rising; IDLE when all channels are, ACTIVE when one returns.

    A channel at the maximum has ended and counts no more; the maximum leaves when all have. So event time does not end while an
    idle channel may return (Flink's does), and a valve of ended and idle channels is idle."""

    def __init__(self, channel_count: int) -> None:
        if channel_count < 1:
            raise InvalidConfigError(f"a valve needs at least one channel, got {channel_count}")
        self._channels = [_ChannelTime() for _ in range(channel_count)]
        self._idle = False
        self._output_ms = MIN_WATERMARK

    @property
    def watermark_ms(self) -> int:
        """The last watermark that left, or MIN_WATERMARK."""
        return self._output_ms

    @property
    def is_idle(self) -> bool:
        return self._idle

    def handle(self, channel: int, signal: TimeSignal) -> list[TimeSignal]:
        """Take one signal of one channel; returns what leaves, in order."""
        if isinstance(signal, Watermark):
            return self._watermark(self._channels[channel], signal.timestamp_ms)
        state = self._channels[channel]
        if signal.idle == state.idle:
            return []
        return self._went_idle(state) if signal.idle else self._came_back(state)

    def _watermark(self, channel: _ChannelTime, timestamp_ms: int) -> list[TimeSignal]:
        if channel.idle or timestamp_ms <= channel.watermark_ms:
            return []
        channel.watermark_ms = timestamp_ms
        if not channel.aligned and timestamp_ms >= self._output_ms:
            channel.aligned = True
        if timestamp_ms == MAX_WATERMARK:
            return self._ended()
        return self._advance_to_minimum() if channel.aligned else []

    def _ended(self) -> list[TimeSignal]:
        """A channel has ended: those that are left decide."""
        going = [channel for channel in self._channels if channel.watermark_ms < MAX_WATERMARK]
        if not going:
            return self._emit(MAX_WATERMARK)
        return self._all_idle() if all(channel.idle for channel in going) else self._advance_to_minimum()

    def _all_idle(self) -> list[TimeSignal]:
        """Nobody is left to wait for: what the channels had reached is flushed before everything is idle."""
        flushed = self._emit(max(channel.watermark_ms for channel in self._channels if channel.watermark_ms < MAX_WATERMARK))
        self._idle = True
        return [*flushed, WatermarkStatus(idle=True)]

    def _went_idle(self, channel: _ChannelTime) -> list[TimeSignal]:
        channel.idle = True
        channel.aligned = False
        held_output = channel.watermark_ms == self._output_ms
        if any(not other.idle and other.watermark_ms < MAX_WATERMARK for other in self._channels):
            return self._advance_to_minimum() if held_output else []
        if held_output:
            return self._all_idle()
        self._idle = True
        return [WatermarkStatus(idle=True)]

    def _came_back(self, channel: _ChannelTime) -> list[TimeSignal]:
        channel.idle = False
        channel.aligned = channel.watermark_ms >= self._output_ms
        if not self._idle:
            return []
        self._idle = False
        return [WatermarkStatus(idle=False)]

    def _advance_to_minimum(self) -> list[TimeSignal]:
        least = min([channel.watermark_ms for channel in self._channels if channel.aligned], default=MAX_WATERMARK)
        return self._emit(least) if least < MAX_WATERMARK else []

    def _emit(self, timestamp_ms: int) -> list[TimeSignal]:
        if timestamp_ms <= self._output_ms:
            return []
        self._output_ms = timestamp_ms
        return [Watermark(timestamp_ms)]


class MultiInputValve:
    """Valves of several logical inputs, and the minimum over them: an operator's one event time.

    `inputs[channel]` is the logical input of a channel, counted from 0; union merges several edges into one input."""

    def __init__(self, inputs: Sequence[int]) -> None:
        count = max(inputs, default=-1) + 1
        if sorted(set(inputs)) != list(range(count)) or count == 0:
            raise InvalidConfigError(f"every input from 0 on needs a channel, got {list(inputs)}")
        self._routes: list[tuple[int, int]] = []
        sizes = [0] * count
        for target in inputs:
            self._routes.append((target, sizes[target]))
            sizes[target] += 1
        self._valves = [StatusWatermarkValve(size) for size in sizes]
        self._minimum = StatusWatermarkValve(count)

    @property
    def watermark_ms(self) -> int:
        return self._minimum.watermark_ms

    @property
    def input_count(self) -> int:
        """Logical inputs."""
        return len(self._valves)

    def input_watermark_ms(self, index: int) -> int:
        """Event time of one logical input."""
        return self._valves[index].watermark_ms

    @property
    def is_idle(self) -> bool:
        return self._minimum.is_idle

    @property
    def is_at_end(self) -> bool:
        """True after the maximum watermark left."""
        return self.watermark_ms == MAX_WATERMARK

    def handle(self, channel: int, signal: TimeSignal) -> list[TimeSignal]:
        """Take one signal of one channel; returns what leaves, in order."""
        target, position = self._routes[channel]
        leaving: list[TimeSignal] = []
        for passed in self._valves[target].handle(position, signal):
            leaving += self._minimum.handle(target, passed)
        return leaving
