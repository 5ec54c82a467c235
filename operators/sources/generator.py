"""A source that makes its records from their index: for benchmarks, tests and demonstrations.

With p subtasks, subtask s starts with the records i = j*p + s, so that event time advances together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorContext, Poll
from holdfast.operators.sources.rate import check_rate, rate_of_subtask
from holdfast.operators.sources.stripes import StripeCursor, StripePosition, decode_positions, encode_position, stripe_count_for
from holdfast.operators.task.user_failures import Described, raise_told
from holdfast.statebackends.errors import InvalidConfigError

BATCH_ROWS = 65_536

MakeBatch = Callable[[npt.NDArray[np.int64]], pa.RecordBatch]


@dataclass
class GeneratorSource:
    """`rows` records; `make_batch(indices)` must depend on the indices alone, and be picklable.

    rows_per_second: of the whole source, shared equally by its subtasks; None for full speed. Rows with an index below
    `unpaced_rows` are not paced: a job loads its state at full speed first."""

    make_batch: MakeBatch
    rows: int
    schema: pa.Schema
    rows_per_second: float | None = None
    batch_rows: int = BATCH_ROWS
    name: str = "generator"
    unpaced_rows: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rows_per_second)
        if self.unpaced_rows < 0:
            raise InvalidConfigError(f"unpaced_rows must be at least 0, got {self.unpaced_rows}", setting="unpaced_rows")
        if self.rows < 0 or self.batch_rows < 1:
            raise InvalidConfigError(f"rows must be at least 0 and batch_rows at least 1, got {self.rows} and {self.batch_rows}")

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> GeneratorReader:
        return GeneratorReader(self, subtask, parallelism, max_parallelism)


class GeneratorReader:
    """SourceReader of a GeneratorSource; its position is one entry per stripe."""

    def __init__(self, source: GeneratorSource, subtask: int, parallelism: int, max_parallelism: int) -> None:
        self._source = source
        self._subtask = subtask
        self._parallelism = parallelism
        self._stripe_count = stripe_count_for(parallelism, max_parallelism)
        self._rate = rate_of_subtask(source.rows_per_second, parallelism)
        self._uid = source.name

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        self._uid = context.uid
        if entries is None:
            owned = range(self._subtask, self._stripe_count, self._parallelism)
            self._cursor = StripeCursor(self._stripe_count, owned, self._source.rows)
            return
        positions = decode_positions(entries, context.uid)
        if positions:
            self._stripe_count = positions[0].stripe_count
        starts = {position.stripe: position.next_index for position in positions}
        self._cursor = StripeCursor(self._stripe_count, starts, self._source.rows, next_indices=starts)

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self._source.unpaced_rows:
            indices = self._cursor.take(min(rows_max, self._source.batch_rows), self._source.unpaced_rows)
            if len(indices):
                return Poll(batch=Batch(columns=self._make(indices)))
        count = self._rate.allowed(min(rows_max, self._source.batch_rows), now_ms)
        if count == 0:
            if self._cursor.peek() is None:
                return Poll(finished=True)
            return Poll(ready_at_ms=self._rate.ready_at_ms(now_ms))
        indices = self._cursor.take(count)
        if len(indices) == 0:
            return Poll(finished=True)
        self._rate.spend(len(indices))
        return Poll(batch=Batch(columns=self._make(indices)))

    def _make(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        try:
            columns = self._source.make_batch(indices)
        except Exception as error:
            record = Described(f"indices {indices[0]}..{indices[-1]}")
            raise_told(error, operator=self._uid, subtask=self._subtask, function=self._source.make_batch, record=record)
        if columns is None:
            raise InvalidConfigError(f"source {self._uid}: make_batch returned None, not a record batch", operator=self._uid)
        if columns.num_rows != len(indices) or not columns.schema.equals(self._source.schema):
            raise InvalidConfigError(
                f"source {self._uid}: make_batch gave {columns.num_rows} rows of {columns.schema.names} for {len(indices)} indices "
                f"of {self._source.schema.names}: rows and types must be as declared",
                operator=self._uid,
            )
        return columns

    def snapshot(self) -> list[bytes]:
        count = self._stripe_count
        return [encode_position(StripePosition(1, count, stripe, index)) for stripe, index in self._cursor.positions()]

    def external_files(self) -> tuple[str, ...]:
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        return

    def close(self) -> None:
        return
