"""A source that makes its records from their index, and the pace and order that it shares with other sources.

CORE, except for the reader: a token bucket paces a source, time in, rows out; a cursor decides which records of a totally ordered
input a subtask reads next. Record i belongs to stripe i mod S. A subtask owns whole stripes and merges them by i, so that its own
records keep the total order whatever the parallelism is or was, and event time advances together. The cursor knows neither files
nor rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorContext, Poll
from holdfast.operators.task.user_failures import Described, raise_located
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError

BURST_MS = 250
"""Longest period of unused tokens that is kept: bounds the burst of a subtask after a pause."""


class RateLimit:
    """Token bucket: at most `rows_per_second` rows, evenly spread; None means no limit."""

    def __init__(self, rows_per_second: float | None) -> None:
        self._rate = rows_per_second
        self._tokens = 0.0
        self._filled_ms: int | None = None

    def allowed(self, rows_max: int, now_ms: int) -> int:
        """Rows that may be emitted now, 0..rows_max; call `spend` with the number emitted."""
        if self._rate is None:
            return rows_max
        if self._filled_ms is None:
            self._filled_ms = now_ms
            self._tokens = 1.0
        elapsed_ms = max(0, now_ms - self._filled_ms)
        bound = max(1.0, self._rate * BURST_MS / 1000)
        self._tokens = min(bound, self._tokens + self._rate * elapsed_ms / 1000)
        self._filled_ms = max(self._filled_ms, now_ms)
        return min(rows_max, int(self._tokens))

    def spend(self, rows: int) -> None:
        if self._rate is not None:
            self._tokens -= rows

    def ready_at_ms(self, now_ms: int) -> int:
        """Time at which polling again is worthwhile: for at least one row, and for some 10 ms of rows at high rates."""
        if self._rate is None:
            return now_ms
        wanted = max(1.0, self._rate / 100)
        return now_ms + max(1, int((wanted - self._tokens) * 1000 / self._rate) + 1)


def rate_of_subtask(rows_per_second: float | None, parallelism: int) -> RateLimit:
    """Equal share of one subtask in the rate of the whole source, so that a rescale keeps the job's rate."""
    return RateLimit(None if rows_per_second is None else rows_per_second / parallelism)


def check_rate(rows_per_second: float | None) -> None:
    """Raise InvalidConfigError unless the rate is None or above 0."""
    if rows_per_second is not None and not rows_per_second > 0:
        raise InvalidConfigError(f"rows_per_second must be above 0, got {rows_per_second}", setting="rows_per_second")


Indices = npt.NDArray[np.int64]


class StripePosition(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a striped source's split state; self-contained, so that any subtask can go on from it."""

    version: int
    stripe_count: int
    stripe: int
    next_index: int
    """Global index of the stripe's first unread record: congruent to `stripe` mod `stripe_count`."""
    input: str = ""
    """Storage-relative path of the input's manifest; empty for a generator."""


def encode_position(position: StripePosition) -> bytes:
    """Encode one entry as msgpack."""
    return msgspec.msgpack.encode(position)


def decode_positions(entries: Iterable[bytes], operator: str) -> list[StripePosition]:
    """Decode restored entries. Raises CorruptStateError when one can't be read or they are of different inputs."""
    try:
        positions = [decode_msgpack(entry, StripePosition) for entry in entries]
    except UNDECODABLE as error:
        raise CorruptStateError(
            f"source {operator}: a position can't be read: {error}", operator=operator, reason=str(error)
        ) from error
    for position in positions:
        if position.version != 1:
            reason = f"position format {position.version} is not known to this version (1)"
            raise CorruptStateError(f"source {operator}: {reason}", operator=operator, reason=reason)
    if len({(position.stripe_count, position.input) for position in positions}) > 1:
        reason = "positions of different inputs are mixed"
        raise CorruptStateError(f"source {operator}: {reason}", operator=operator, reason=reason)
    return positions


def stripe_count_for(parallelism: int, max_parallelism: int) -> int:
    """Largest multiple of `parallelism` up to `max_parallelism`: subtask s then reads exactly the records i = s mod p."""
    return parallelism * max(1, max_parallelism // parallelism)


def gap_of(owned: Indices, stripe_count: int) -> int:
    """The distance of the indices of these stripes (ascending), if it is the same for all: they are one range then. Else 0."""
    if not len(owned) or stripe_count % len(owned):
        return 0
    gap = stripe_count // len(owned)
    return gap if bool((np.diff(owned) == gap).all()) else 0


class StripeCursor:
    """Yields the next records of the stripes that one subtask owns, in global order, out of `total` records."""

    def __init__(self, stripe_count: int, owned: Iterable[int], total: int, *, next_indices: dict[int, int] | None = None) -> None:
        """`next_indices`: stripe -> first unread index, for restored stripes; any other stripe starts at its first record."""
        self.stripe_count = stripe_count
        self._owned: Indices = np.array(sorted(owned), dtype=np.int64)
        if len(self._owned) and not 0 <= self._owned[0] <= self._owned[-1] < stripe_count:
            raise InvalidConfigError(f"stripes must be in 0..{stripe_count - 1}, got {self._owned.tolist()}")
        self._total = total
        starts = next_indices or {}
        self._next: Indices = np.array([starts.get(int(stripe), int(stripe)) for stripe in self._owned], dtype=np.int64)
        self._cursor = int(self._next.min()) if len(self._next) else total
        # From this index on every stripe is read; before it some stripes are ahead, as another subtask read them further.
        self._even_from = int(self._next.max()) if len(self._next) else total
        self._gap = gap_of(self._owned, stripe_count)

    def set_total(self, total: int) -> None:
        """Set the number of records in the input once it is known, before anything is taken."""
        self._total = total

    def peek(self) -> int | None:
        """Global index of the next record, or None at the end."""
        indices = self._window(1, self._total)
        if len(indices) == 0:
            self._cursor = self._total
            return None
        self._cursor = int(indices[0])
        return self._cursor

    def take(self, count: int, stop: int | None = None) -> Indices:
        """Take up to `count` next indices, ascending, all below `stop`; the cursor moves behind them. Empty at `stop` or the
        end."""
        if count <= 0:
            return np.empty(0, dtype=np.int64)
        limit = self._total if stop is None else min(stop, self._total)
        indices = self._window(count, limit)
        self._cursor = int(indices[-1]) + 1 if len(indices) else max(self._cursor, limit)
        return indices

    def _window(self, count: int, limit: int) -> Indices:
        """The next `count` owned indices in [cursor, limit), without moving."""
        if self._cursor >= limit or not len(self._owned):
            return np.empty(0, dtype=np.int64)
        if self._gap and self._cursor >= self._even_from:
            first = self._cursor + (int(self._owned[0]) - self._cursor) % self._gap
            return np.arange(first, min(limit, first + count * self._gap), self._gap, dtype=np.int64)
        step, owned = self.stripe_count, self._owned
        first = self._cursor // step
        while first * step < limit:
            rounds = min(count // len(owned) + 2, (limit - 1) // step + 1 - first)
            indices = (np.arange(first, first + rounds, dtype=np.int64)[:, None] * step + owned).ravel()
            # Only the first and the last round can reach outside.
            low, high = np.searchsorted(indices, (self._cursor, limit))
            indices = indices[low:high]
            if self._cursor < self._even_from:
                indices = indices[indices >= np.tile(self._next, rounds)[low:high]]
            if len(indices):
                return indices[:count]
            first += rounds
        return np.empty(0, dtype=np.int64)

    def positions(self) -> list[tuple[int, int]]:
        """(stripe, first unread index) of every owned stripe, ended or not."""
        behind = (self._owned - self._cursor) % self.stripe_count
        unread = np.maximum(self._next, self._cursor + behind)
        return list(zip(self._owned.tolist(), unread.tolist(), strict=True))


BATCH_ROWS = 65_536

MakeBatch = Callable[..., pa.RecordBatch]
"""Of indices, and with `takes_columns` of names."""


@dataclass
class GeneratorSource:
    """Generates `rows` records; `make_batch(indices)` must depend on the indices alone, and be picklable.

    rows_per_second: of the whole source, shared equally by its subtasks; None for full speed. Rows with an index below
    `unpaced_rows` are not paced, so that a job can load its state at full speed first: they are its backlog. With `takes_columns`
    the function is called `make_batch(indices, names)`, and makes these columns alone: those that the job reads."""

    make_batch: MakeBatch
    rows: int
    schema: pa.Schema
    rows_per_second: float | None = None
    batch_rows: int = BATCH_ROWS
    name: str = "generator"
    unpaced_rows: int = 0
    takes_columns: bool = False

    def __post_init__(self) -> None:
        check_rate(self.rows_per_second)
        if self.unpaced_rows < 0:
            raise InvalidConfigError(f"unpaced_rows must be at least 0, got {self.unpaced_rows}", setting="unpaced_rows")
        if self.rows < 0 or self.batch_rows < 1:
            raise InvalidConfigError(f"rows must be at least 0 and batch_rows at least 1, got {self.rows} and {self.batch_rows}")

    def with_columns(self, names: Sequence[str]) -> GeneratorSource:
        """The same source, which makes only these columns if its function can."""
        if not self.takes_columns:
            return self
        return replace(self, schema=pa.schema([self.schema.field(name) for name in names]))

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
        self._has_backlog = source.unpaced_rows > 0
        """It only becomes false."""

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

    @property
    def is_processing_backlog(self) -> bool:
        """Whether rows are left that are not paced."""
        if self._has_backlog:
            index = self._cursor.peek()
            self._has_backlog = index is not None and index < self._source.unpaced_rows
        return self._has_backlog

    def _make(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        try:
            source = self._source
            columns = source.make_batch(indices, source.schema.names) if source.takes_columns else source.make_batch(indices)
        except Exception as error:
            record = Described(f"indices {indices[0]}..{indices[-1]}")
            raise_located(error, operator=self._uid, subtask=self._subtask, function=self._source.make_batch, record=record)
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
