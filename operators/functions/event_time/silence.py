"""What a watermark strategy does when no record comes: the subtask goes idle, and event time may follow the clock. CORE.

Its time is *reading time* (`OperatorContext.reading_ms`): ms in which the subtask could read and found nothing. Backpressure, a
pause of watermark alignment, a barrier's alignment and a restore are no silence. A partition goes idle exactly one timeout after
its last record (Flink: between one and two).

Where event time follows the clock, a restore goes on where the snapshot was: silence in front of it counts. Idleness begins
again."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Watermark, WatermarkStatus
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution

QUIET = OperatorListStateDescriptor("quiet", Redistribution.UNION)
"""One entry a subtask, msgpack of Quiet; none of one that has ended, or is idle and never had a watermark: it holds nobody."""


class Quiet(msgspec.Struct, frozen=True, array_like=True):
    """Event time of a subtask at a cut."""

    subtask: int
    parallelism: int
    base_ms: int
    """Watermark of its records; the minimum before there is one."""
    silent_ms: int
    """Reading time since the last of them."""
    reached_ms: int
    """The watermark that it has emitted."""


_DECODER = msgspec.msgpack.Decoder(Quiet)


def find_quiet(entries: Iterable[bytes], subtask: int, parallelism: int) -> Quiet | None:
    """What a subtask goes on from: its own entry; at another parallelism the one that is least far, so that nothing comes late."""
    found = [_DECODER.decode(entry) for entry in entries]
    own = [each for each in found if (each.subtask, each.parallelism) == (subtask, parallelism)]
    return min(own or found, key=lambda each: each.reached_ms, default=None)


class Silence:
    """The silence of one subtask: since when, whether it counts as idle, and when something is due."""

    def __init__(self, *, idle_after_ms: int | None, advance_after_ms: int | None, step_ms: int) -> None:
        """`advance_after_ms`: from then on the watermark follows the clock, every `step_ms`. None: it does not."""
        self.is_idle = False
        self._idle_after_ms = idle_after_ms
        self._advance_after_ms = advance_after_ms
        self._step_ms = step_ms
        self._since_ms = 0
        self._quiet_since_ms = 0
        """As `_since_ms`, over restores: below 0 by the silence in front of the snapshot."""
        self._advance_due_ms = advance_after_ms or 0
        self._base_ms = MIN_WATERMARK

    def record(self, reading_ms: int) -> None:
        """Records came: silence begins again."""
        self.is_idle = False
        self._since_ms = self._quiet_since_ms = reading_ms
        self._advance_due_ms = reading_ms + (self._advance_after_ms or 0)

    def wake(self, reading_ms: int) -> None:
        """There is something to wait for again, though no record came."""
        self.is_idle = False
        self._since_ms = reading_ms

    def said(self, watermark_ms: int) -> None:
        """The records' own watermark, which the clock goes on from."""
        self._base_ms = max(self._base_ms, watermark_ms)

    def quiet(self, reading_ms: int) -> tuple[int, int] | None:
        """(watermark of the records, time since the last of them), for a snapshot; None of one that holds nobody."""
        if self.is_idle and self._base_ms == MIN_WATERMARK:
            return None
        return self._base_ms, reading_ms - self._quiet_since_ms

    def resume(self, quiet: Quiet) -> None:
        """Go on from a snapshot in which there was a watermark."""
        self._base_ms = quiet.base_ms
        self._quiet_since_ms = -quiet.silent_ms
        self._advance_due_ms = max(0, (self._advance_after_ms or 0) - quiet.silent_ms)

    @property
    def next_ms(self) -> int | None:
        """Reading time at which something is due, if no record comes before."""
        times: list[int] = []
        if self._idle_after_ms is not None and not self.is_idle:
            times.append(self._since_ms + self._idle_after_ms)
        if self._advance_after_ms is not None and self._base_ms > MIN_WATERMARK:
            times.append(self._advance_due_ms)
        return min(times, default=None)

    def due(self, reading_ms: int) -> list[Watermark | WatermarkStatus]:
        """What is to be emitted now, in order. The watermark never rises by more than has passed since the last record.

        An idle subtask comes back for the watermark alone: so it moves event time where everything is idle, and holds nobody."""
        signals: list[Watermark | WatermarkStatus] = []
        if self._advance_after_ms is not None and self._base_ms > MIN_WATERMARK and reading_ms >= self._advance_due_ms:
            self._advance_due_ms = reading_ms + self._step_ms
            signals.append(Watermark(min(self._base_ms + reading_ms - self._quiet_since_ms, MAX_WATERMARK - 1)))
        if self._idle_after_ms is not None and reading_ms - self._since_ms >= self._idle_after_ms:
            if signals or not self.is_idle:
                signals.append(WatermarkStatus(idle=True))
            self.is_idle = True
        return signals
