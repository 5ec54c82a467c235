"""What a watermark strategy does when no record comes: the subtask goes idle, and event time may follow the clock. CORE.

Its time is *reading time* (`OperatorContext.reading_ms`): ms in which the subtask could read and found nothing. Backpressure, a
pause of watermark alignment, a barrier's alignment and a restore are no silence. A partition goes idle exactly one timeout after
its last record (Flink: between one and two)."""

from __future__ import annotations

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Watermark, WatermarkStatus


class Silence:
    """The silence of one subtask: since when, whether it counts as idle, and when something is due."""

    def __init__(self, *, idle_after_ms: int | None, advance_after_ms: int | None, step_ms: int) -> None:
        """`advance_after_ms`: from then on the watermark follows the clock, every `step_ms`. None: it does not."""
        self.is_idle = False
        self._idle_after_ms = idle_after_ms
        self._advance_after_ms = advance_after_ms
        self._step_ms = step_ms
        self._since_ms = 0
        self._advance_due_ms = advance_after_ms or 0
        self._base_ms = MIN_WATERMARK

    def record(self, reading_ms: int) -> None:
        """Records came: silence begins again."""
        self.is_idle = False
        self._since_ms = reading_ms
        self._advance_due_ms = reading_ms + (self._advance_after_ms or 0)

    def said(self, watermark_ms: int) -> None:
        """The records' own watermark, which the clock goes on from."""
        self._base_ms = max(self._base_ms, watermark_ms)

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
        silent_ms = reading_ms - self._since_ms
        signals: list[Watermark | WatermarkStatus] = []
        if self._advance_after_ms is not None and self._base_ms > MIN_WATERMARK and reading_ms >= self._advance_due_ms:
            self._advance_due_ms = reading_ms + self._step_ms
            signals.append(Watermark(min(self._base_ms + silent_ms, MAX_WATERMARK - 1)))
        if self._idle_after_ms is not None and silent_ms >= self._idle_after_ms:
            if signals or not self.is_idle:
                signals.append(WatermarkStatus(idle=True))
            self.is_idle = True
        return signals
