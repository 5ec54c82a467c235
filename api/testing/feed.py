"""An input whose rows, watermarks and silences a test gives by hand: a log, and a rewindable source that replays it.

Everything given takes a place in the log, 0, 1, 2 ..., and stays there: a restore goes on from its position, as of any source. Each
row belongs to a stripe, of which there are as many as key groups; the subtasks share the stripes, and a rescale deals them again.
Which row, and which mark, goes to which stripe is decided when it is given and never changes."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.api.snapshots.frames import batches_of, is_frame
from holdfast.barriers.elements import MIN_WATERMARK, Batch
from holdfast.barriers.rows import rows_to_columns
from holdfast.operators.base import OperatorContext, Poll
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.event_time.datetimes import datetime_ms, is_naive
from holdfast.operators.functions.event_time.timestamps import TIME_MS_MAX
from holdfast.operators.functions.schema import RowType
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import InvalidConfigError, SchemaMismatchError

NEVER_MS = 2**62
"""When a reader that has nothing is worth a poll: once it is woken."""

Time = int | datetime
"""Event time of a row: ms since the epoch, or an aware datetime."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that were given by one call."""

    start: int
    count: int
    batch: Batch
    stripes: npt.NDArray[np.int64]
    """Of each row."""

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class _Mark:
    """A watermark, the beginning or end of a silence, or the end of the input."""

    start: int
    poll: Poll
    stripe: int | None
    """Of the subtask that it is for; None: all."""

    @property
    def stop(self) -> int:
        return self.start + 1


@dataclass
class FeedLog:
    """All that was given to one input. It outlives every attempt of the job."""

    name: str
    parallelism: int
    """Of the readers that were opened last; of the job, before there are any."""
    entries: list[_Rows | _Mark] = field(default_factory=list)
    owned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Subtask -> its stripes, of these readers."""
    nonce: str = field(default_factory=lambda: uuid4().hex)
    """Tells it from the log of a feed of that name in another test, whose savepoint may be restored here."""

    @property
    def stop(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    def find(self, position: int) -> _Rows | _Mark | None:
        """The entry at a position; None at the end."""
        index = bisect.bisect_right(self.entries, position, key=lambda entry: entry.start) - 1
        return self.entries[index] if index >= 0 and position < self.entries[index].stop else None

    def is_idle(self, stripes: Iterable[int], position: int) -> bool:
        """Whether a subtask with these stripes was silent in front of a position. A watermark ends a silence, as of any source."""
        known = set(stripes)
        for entry in reversed(self.entries):
            if isinstance(entry, _Rows) or entry.start >= position or entry.poll.finished:
                continue
            if entry.stripe is None or entry.stripe in known:
                return entry.poll.idle is True
        return False

    def stripe_of(self, subtask: int) -> int:
        """A stripe that a subtask reads now. Before the job runs, subtask i will have stripe i."""
        return min(self.owned[subtask]) if subtask in self.owned else subtask


class FeedPosition(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the source's split state."""

    version: int
    stripe: int
    next: int
    """Position of the first entry, or row, that the stripe was not read up to."""
    log: str
    """Nonce of the log that it is a position in; none of another log was read."""


@dataclass
class FeedSource:
    """Implements Source. Its log is in the test's process, and is put in place where a worker has unpickled it."""

    name: str
    schema: pa.Schema | None
    log: FeedLog | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "log": None}

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> FeedReader:
        assert self.log is not None
        return FeedReader(self.log, subtask, parallelism, max_parallelism)


class FeedReader:
    """Implements SourceReader: the share of one subtask in the log, in order."""

    def __init__(self, log: FeedLog, subtask: int, parallelism: int, max_parallelism: int) -> None:
        self._log = log
        self._subtask = subtask
        self._parallelism = parallelism
        self._stripe_count = max_parallelism
        self._next = dict.fromkeys(range(subtask, max_parallelism, parallelism), 0)
        self._starts = np.full(max_parallelism, NEVER_MS, np.int64)
        """Of each stripe the first position that is ours to give."""
        self._cursor = 0
        self._entry: _Rows | None = None
        self._mine: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Our rows of that entry which were not given yet."""
        self._says_idle = False

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        """Positions of another source under our uid, or of another test's feed, say nothing of this log: it is read whole."""
        positions = [position for entry in entries or () if (position := _position(entry, self._log.nonce)) is not None]
        if positions:
            self._next = {position.stripe: position.next for position in positions}
        for stripe, start in self._next.items():
            self._starts[stripe] = start
        self._cursor = min(self._next.values())
        self._says_idle = self._log.is_idle(self._next, self._cursor)
        if self._log.parallelism != self._parallelism:
            self._log.parallelism = self._parallelism
            self._log.owned.clear()
        self._log.owned[self._subtask] = tuple(self._next)

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self._says_idle:
            self._says_idle = False
            return Poll(idle=True)
        while (entry := self._log.find(self._cursor)) is not None:
            polled = self._take(entry, rows_max) if isinstance(entry, _Rows) else self._pass(entry)
            if polled is not None:
                return polled
        return Poll(ready_at_ms=NEVER_MS)

    def _take(self, entry: _Rows, rows_max: int) -> Poll | None:
        """The next rows of our stripes."""
        if self._entry is not entry:
            first = self._cursor - entry.start
            starts = self._starts[entry.stripes[first:] % self._stripe_count]
            self._entry, self._mine = entry, first + np.flatnonzero(starts <= np.arange(self._cursor, entry.stop))
        chosen, self._mine = self._mine[:rows_max], self._mine[rows_max:]
        self._cursor = entry.start + int(chosen[-1]) + 1 if len(self._mine) else entry.stop
        if not len(chosen):
            return None
        whole = len(chosen) == entry.count
        return Poll(batch=entry.batch if whole else entry.batch.take(chosen))

    def _pass(self, entry: _Mark) -> Poll | None:
        if entry.poll.finished:
            return entry.poll  # the cursor stays: whoever is restored here has ended, too
        self._cursor = entry.stop
        starts = self._starts if entry.stripe is None else self._starts[[entry.stripe % self._stripe_count]]
        return entry.poll if (starts <= entry.start).any() else None

    def snapshot(self) -> list[bytes]:
        return [
            msgspec.msgpack.encode(FeedPosition(1, stripe, max(start, self._cursor), self._log.nonce))
            for stripe, start in sorted(self._next.items())
        ]

    def external_files(self) -> tuple[str, ...]:
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        return

    def close(self) -> None:
        return


def _position(entry: bytes, nonce: str) -> FeedPosition | None:
    """None for a position in another log."""
    try:
        position = decode_msgpack(entry, FeedPosition)
    except UNDECODABLE:
        return None
    return position if position.log == nonce else None


class Feed:
    """An input of a `Job`. Each call gives the job something, and returns when the job has come to rest.

    Before `start` what is given waits. A restart replays what lies behind the checkpoint, in the same order, also a row over which
    the job failed; event time itself begins anew, as behind any source, and rises with the next watermark."""

    def __init__(
        self,
        source: FeedSource,
        stream: Stream,
        row_type: RowType,
        *,
        check: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        """`check` raises when the job takes nothing. `changed` runs it until nothing moves; raises what happens meanwhile."""
        assert source.log is not None
        self.name = source.name
        self.stream = stream
        """The rows, for the pipeline under test."""
        self._log = source.log
        self._row_type = row_type
        self._check = check
        self._changed = changed
        self._rows = 0
        self._watermarks_ms: dict[int | None, int] = {}
        self._has_idled = False
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<Feed {self.name!r}: {self._rows} rows{', ended' if self._has_ended else ''}>"

    def add(self, rows: Any, *, at: Time | Sequence[Time] | None = None, to: int | None = None) -> None:
        """One row, or several in a list, each a dict by column name or of the declared record type.

        at: event time, of all rows or of each; None: they have none. to: the subtask that reads them; None: row i of the feed goes
        to subtask i mod parallelism. The job reads them as one batch, if its `batch_rows` allow that. Raises SchemaMismatchError
        for a row that does not fit the columns, InvalidConfigError behind the end."""
        given = rows if isinstance(rows, list) else [rows]
        if self._row_type.schema is None:
            batch = Batch(rows=given)
        else:
            batch = Batch(columns=rows_to_columns(given, self._row_type.schema, self.name))
        self._add(batch, _times(at, batch.num_rows, self.name), to)

    def add_batch(self, frame: Any, *, at: Time | Sequence[Time] | str | None = None, to: int | None = None) -> None:
        """The rows of a pyarrow.RecordBatch or Table, or of a DataFrame (pandas, Polars, Spark ...), with the feed's columns.

        at: as of `add`, or the name of a column that holds them: int64 ms, or a timestamp with a zone."""
        schema = self._row_type.schema
        if schema is None:
            raise InvalidConfigError(
                f"feed {self.name!r} has rows of undeclared type: declare its columns to add batches", operator=self.name
            )
        for columns in _fitting(frame, schema, self.name):
            moments = columns.column(at) if isinstance(at, str) and at in schema.names else at
            if isinstance(moments, pa.Array):
                unit = pa.timestamp("ms", "UTC")
                moments = (moments if moments.type == pa.int64() else moments.cast(unit).view(pa.int64())).to_pylist()
            elif isinstance(moments, str):
                raise InvalidConfigError(f"feed {self.name!r} has no column {at!r} to take event times from", column=moments)
            self._add(Batch(columns=columns), _times(moments, columns.num_rows, self.name), to)

    def watermark(self, at: Time, *, to: int | None = None) -> None:
        """No row at or before `at` follows (ms, or an aware datetime). to: of one subtask alone; None: of all.

        Raises InvalidConfigError for one below the last."""
        at_ms = _moment_ms(at, self.name)
        before = max(self._watermarks_ms.get(None, MIN_WATERMARK), self._watermarks_ms.get(to, MIN_WATERMARK))
        if at_ms < before:
            raise InvalidConfigError(
                f"feed {self.name!r}: a watermark of {at_ms} behind one of {before}: watermarks only rise", operator=self.name
            )
        stripe = self._stripe(to)
        self._watermarks_ms[to] = at_ms
        self._give(Poll(watermark_ms=at_ms), stripe)

    def idle(self, *, to: int | None = None) -> None:
        """The input is silent: event time does not wait for it. to: one subtask of it; None: all."""
        self._has_idled = True
        self._give(Poll(idle=True), self._stripe(to))

    def active(self, *, to: int | None = None) -> None:
        """The silence is over; so it is, too, when a row is added, or a watermark given."""
        self._give(Poll(idle=False), self._stripe(to))

    def end(self) -> None:
        """No more rows. When all inputs have ended, windows fire, sinks commit, and the job is FINISHED."""
        self._check_open()
        self._has_ended = True
        self._log.entries.append(_Mark(self._log.stop, Poll(finished=True), None))
        self._changed()

    # -------------------------------------------------------------------------------------------------------- internal

    def _add(self, batch: Batch, times: npt.NDArray[np.int64] | None, to: int | None) -> None:
        self._check_open()
        log, count = self._log, batch.num_rows
        if not count:
            return
        if to is None:
            width = log.parallelism
            numbers = np.arange(self._rows, self._rows + count)
            stripes = np.array([log.stripe_of(subtask) for subtask in range(width)], np.int64)[numbers % width]
        else:
            stripes = np.full(count, self._stripe(to), np.int64)
        if self._has_idled:
            self._come_back(np.unique(stripes).tolist())
        log.entries.append(_Rows(log.stop, count, batch if times is None else batch.with_timestamps(times), stripes))
        self._rows += count
        self._changed()

    def _come_back(self, stripes: list[int]) -> None:
        """Who has a row is silent no more."""
        for stripe in stripes:
            if self._log.is_idle([stripe], self._log.stop):
                self._log.entries.append(_Mark(self._log.stop, Poll(idle=False), stripe))

    def _give(self, poll: Poll, stripe: int | None) -> None:
        self._log.entries.append(_Mark(self._log.stop, poll, stripe))
        self._changed()

    def _check_open(self) -> None:
        if self._has_ended:
            raise InvalidConfigError(f"feed {self.name!r} has ended: nothing can be given to it", operator=self.name)
        self._check()

    def _stripe(self, subtask: int | None) -> int | None:
        """Of a subtask that a call names. Raises InvalidConfigError for one that there is not, and behind the end."""
        self._check_open()
        parallelism = self._log.parallelism
        if subtask is None:
            return None
        if not 0 <= subtask < parallelism:
            raise InvalidConfigError(
                f"feed {self.name!r} has subtasks 0..{parallelism - 1}, not {subtask}", operator=self.name, subtask=subtask
            )
        return self._log.stripe_of(subtask)


def _moment_ms(at: Any, name: str) -> int:
    """Raises InvalidConfigError for what is no event time."""
    if isinstance(at, datetime):
        if is_naive(at):
            raise InvalidConfigError(f"feed {name!r}: {at!r} is naive: give it a time zone", operator=name)
        return datetime_ms(at)
    moment_ms = int(at) if isinstance(at, int | np.integer) and not isinstance(at, bool) else None
    if moment_ms is None or abs(moment_ms) > TIME_MS_MAX:
        raise InvalidConfigError(
            f"feed {name!r}: {at!r} is no event time (ms since the epoch as an int, or an aware datetime)", operator=name
        )
    return moment_ms


def _times(at: Any, count: int, name: str) -> npt.NDArray[np.int64] | None:
    """Event times of so many rows. Raises InvalidConfigError."""
    if at is None:
        return None
    if isinstance(at, int | datetime | np.integer):
        return np.full(count, _moment_ms(at, name), np.int64)
    moments = [_moment_ms(moment, name) for moment in at]
    if len(moments) != count:
        raise InvalidConfigError(f"feed {name!r}: {len(moments)} event times for {count} rows", operator=name)
    return np.array(moments, np.int64)


def _fitting(frame: Any, schema: pa.Schema, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of a frame as columns of the schema. Raises InvalidConfigError for no frame, SchemaMismatchError."""
    if not is_frame(frame):
        raise InvalidConfigError(f"feed {name!r}: {type(frame).__name__} is no table or DataFrame", operator=name)
    for part in batches_of(frame, schema, name, "rows"):
        table = pa.Table.from_batches([part]) if isinstance(part, pa.RecordBatch) else part
        if sorted(table.column_names) != sorted(schema.names):
            raise SchemaMismatchError(
                f"feed {name!r} has the columns {', '.join(schema.names)}; these are {', '.join(table.column_names)}",
                operator=name,
                column=next(iter({*table.column_names} ^ {*schema.names}), None),
            )
        try:
            fitting = table.select(schema.names).cast(schema)
        except (pa.ArrowException, ValueError) as error:
            raise SchemaMismatchError(f"feed {name!r}: {error}", operator=name, column=None) from error
        yield from fitting.combine_chunks().to_batches()
