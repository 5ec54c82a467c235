"""What operators share that keep rows until a watermark makes them due: the watermark as snapshots keep it, and what was due at a
barrier.

A barrier may cut between two slices of a firing. What had not come out by then is due at once after a restore, in slices again, and
before any record is read, so that no record meets rows that the failed attempt would have emitted before it came."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from holdfast.barriers.elements import MIN_WATERMARK, Batch
from holdfast.operators.base import OVERDUE_MS, Operator, OperatorContext, Output
from holdfast.operators.functions.event_time.timestamps import TIME_MS_MAX
from holdfast.operators.functions.windows.kept_watermark import WATERMARKS, KeptWatermark
from holdfast.statebackends.errors import InvalidTimestampError

Numbers = npt.NDArray[np.int64]


def put_aside(late: Batch, tag: str, operator: Operator, reached: KeptWatermark) -> None:
    """Late rows, at least one, unchanged: to the side output if the job reads it, else they are counted."""
    assert late.timestamps is not None
    if tag and operator.output.has_readers(tag):
        operator.output.collect_side(tag, late)
    else:
        reached.count_late(operator.context, late.timestamps)


def event_times(batch: Batch, context: OperatorContext, what: str = "a join") -> Numbers:
    """Raises InvalidTimestampError for records without event times."""
    if batch.timestamps is None:
        raise InvalidTimestampError(
            f"operator {context.uid!r}: records reach {what} without event times",
            operator=context.uid,
            subtask=context.subtask,
            record=None,
        )
    return batch.timestamps


def check_event_times(earliest: int, latest: int, context: OperatorContext) -> None:
    """Of records that enter windows: bounds that are counted from them fit 64 bits, in microseconds, too.

    Raises InvalidTimestampError for one further than TIME_MS_MAX from the epoch, as the maximum watermark is: the time of
    what fires when event time ends."""
    for moment_ms in (earliest, latest):
        if abs(moment_ms) > TIME_MS_MAX:
            raise InvalidTimestampError(
                f"operator {context.uid!r}, subtask {context.subtask}: a record with event time {moment_ms} ms reaches a window, "
                f"whose bounds are at most {TIME_MS_MAX} ms from the epoch",
                operator=context.uid,
                subtask=context.subtask,
                record=None,
            )


class FiringOperator(Operator):
    """Base: takes records with event times, and emits what a watermark makes due."""

    kind = "a join"

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._reached = KeptWatermark()
        self._is_behind = False
        """What was due at the barrier of the restored snapshot has not all come out yet."""

    def initialize_state(self) -> None:
        self._reached.restore(self.context)
        self._is_behind = self._reached.kept > MIN_WATERMARK

    def snapshot_state(self, checkpoint_id: int) -> None:
        self._reached.store(self.context.operator_state.list_state(WATERMARKS.name))

    def process_batch(self, batch: Batch, input_index: int) -> None:
        stamps = event_times(batch, self.context, self.kind)
        if not batch.num_rows:
            return
        if self._is_behind:  # where the record was held while other work was done
            for _ in self._fire():
                pass
        self._take(batch, stamps, input_index)

    def process_watermark(self, watermark_ms: int) -> Iterator[None]:
        """What is late is decided at once; what is due comes out in slices."""
        self._reached.advance(watermark_ms)
        return self._fire()

    def _fire(self) -> Iterator[None]:
        yield from self._fire_due()
        self._is_behind = False

    @property
    def uses_processing_time(self) -> bool:
        return self._is_behind  # as restored: the runtime asks for timers before it reads

    def next_processing_time_ms(self) -> int | None:
        return OVERDUE_MS if self._is_behind else None

    def process_processing_time(self, now_ms: int) -> Iterator[None]:
        return self._fire()

    @abstractmethod
    def _take(self, batch: Batch, stamps: Numbers, input_index: int) -> None:
        """Records with their event times; at least one."""

    @abstractmethod
    def _fire_due(self) -> Iterator[None]:
        """All that is due at the watermark that was reached; leaves the state consistent at every slice."""
