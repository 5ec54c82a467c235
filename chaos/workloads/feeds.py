"""Records as pure functions of their index, twice: as columns for the source, and one by one in plain Python for the expectation.

The source gives them in steps, at its pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.scenario import CutStates, Drained, Positions
from holdfast.operators.base import Poll
from holdfast.operators.sources.generator import GeneratorReader, GeneratorSource

SCHEMA = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("i", "key", "value")])
TIMED_SCHEMA = SCHEMA.append(pa.field("at", pa.int64(), nullable=False))

_FACTOR, _MASK = 2_654_435_761, 0xFFFF_FFFF
_VALUES = 1_000


@dataclass(frozen=True, slots=True)
class Feed:
    """Records of one source; columns `i`, `key`, `value`, and `at` (event time, ms) if the feed has event time."""

    uid: str
    rows: int
    keys: int
    """Keys are 0 .. keys - 1."""
    first: int = 0
    """`i` of the first record; sources that meet share no `i`."""
    start_ms: int = 0
    step_ms: int = 0
    """Event time between two records; 0: the feed has no event time."""
    disorder_ms: int = 0
    """Most that a record's event time may lie off its turn, ms."""
    backlog_rows: int = 0
    """Records that the source calls a backlog: the first ones. They come at the same pace."""

    @property
    def schema(self) -> pa.Schema:
        return TIMED_SCHEMA if self.step_ms else SCHEMA

    # -------------------------------------------------------------------------------------------- one by one, in Python

    def _mixed(self, index: int) -> int:
        return (self.first + index + 1) * _FACTOR & _MASK

    def key(self, index: int) -> int:
        return (self._mixed(index) >> 12) % self.keys

    def value(self, index: int) -> int:
        return (self._mixed(index) >> 5) % _VALUES

    def at(self, index: int) -> int:
        return self.start_ms + index * self.step_ms + (self._mixed(index) >> 9) % (self.disorder_ms + 1)

    # -------------------------------------------------------------------------------------------------------- as columns

    def make_batch(self, indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Records of these indices."""
        mixed = (indices + (self.first + 1)) * _FACTOR & _MASK
        columns = [indices + self.first, (mixed >> 12) % self.keys, (mixed >> 5) % _VALUES]
        if self.step_ms:
            columns.append(indices * self.step_ms + self.start_ms + (mixed >> 9) % (self.disorder_ms + 1))
        # pa.array takes three times as long for a few rows
        arrays = [pa.Array.from_buffers(pa.int64(), len(column), [None, pa.py_buffer(column)]) for column in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def source(self, rows_per_second: float, step_rows: int) -> PacedSource:
        """The source of this feed."""
        backlog = self.backlog_rows
        return PacedSource(self.make_batch, self.rows, self.schema, rows_per_second, step_rows, name=self.uid, unpaced_rows=backlog)


class PacedSource(GeneratorSource):
    """A GeneratorSource that gives `batch_rows` at a time, evenly: one poll a batch.

    Every subtask keeps a timetable of its own, from its start: what was due while it was held up comes as soon as possible."""

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> PacedReader:
        return PacedReader(self, subtask, parallelism, max_parallelism)


class PacedReader(GeneratorReader):
    def __init__(self, source: PacedSource, subtask: int, parallelism: int, max_parallelism: int) -> None:
        unpaced = GeneratorSource(
            source.make_batch,
            source.rows,
            source.schema,
            batch_rows=source.batch_rows,
            name=source.name,
            unpaced_rows=source.unpaced_rows,
        )
        super().__init__(unpaced, subtask, parallelism, max_parallelism)
        assert source.rows_per_second is not None
        self._ms_per_row = 1_000 * parallelism / source.rows_per_second
        self._began_ms: int | None = None
        self._given = 0

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self._began_ms is None:
            self._began_ms = now_ms
        due_ms = self._began_ms + int(self._given * self._ms_per_row)
        if now_ms < due_ms:
            return Poll(ready_at_ms=due_ms)
        polled = super().poll(rows_max, now_ms)
        if polled.batch is not None:
            self._given += polled.batch.num_rows
        return polled


# ------------------------------------------------------------------------------------------------------------- positions


class _Position(msgspec.Struct, array_like=True):
    """One entry of a source's state, as far as a cut depends on it: the stripe's first unread record."""

    version: int
    stripe_count: int
    stripe: int
    next_index: int


_POSITION = msgspec.msgpack.Decoder(_Position)


def read_before(entries: Iterable[bytes], rows: int) -> Iterator[int]:
    """Indices of the records in front of a cut, stripe by stripe, out of `rows`. Raises ValueError for missing or doubled stripes:
    a position that was lost or kept twice."""
    positions = [_POSITION.decode(entry) for entry in entries]
    found = sorted(position.stripe for position in positions)
    count = positions[0].stripe_count if positions else 0
    if not positions or found != list(range(count)) or any(position.stripe_count != count for position in positions):
        raise ValueError(f"the positions of a source are of the stripes {found} of {count}")
    for position in positions:
        if position.next_index % count != position.stripe:
            raise ValueError(f"record {position.next_index} is not of the stripe {position.stripe} of {count}")
        yield from range(position.stripe, min(position.next_index, rows), count)


def in_segments(feeds: Iterable[Feed], drained: Drained, positions: Positions | None = None) -> list[dict[str, list[int]]]:
    """uid -> indices of the records between two drains, segment by segment; the last segment ends at `positions`, or with all
    records.

    Raises ValueError as `read_before`."""
    feeds = tuple(feeds)
    segments: list[dict[str, list[int]]] = []
    passed: dict[str, set[int]] = {feed.uid: set() for feed in feeds}
    for end in (*drained, positions):
        segment = {}
        for feed in feeds:
            indices = range(feed.rows) if end is None else read_before(end[feed.uid], feed.rows)
            segment[feed.uid] = [index for index in indices if index not in passed[feed.uid]]
            passed[feed.uid].update(segment[feed.uid])
        segments.append(segment)
    return segments


def joined_row(feeds: tuple[Feed, Feed], left: int | None, right: int | None) -> Row:
    """The key, and the other columns of a record of each feed, given by their indices; None: there is none."""
    own: list[int | None] = []
    key: int | None = None
    for feed, index in zip(feeds, (left, right), strict=True):
        if index is None:
            own += [None, None, None]
        else:
            key = feed.key(index)
            own += [feed.first + index, feed.value(index), feed.at(index)]
    return (key, *own)


def no_states(feeds: Iterable[Feed], positions: Positions) -> CutStates:
    """States of a cut without keyed state, where only positions can be wrong. Raises ValueError as `read_before`."""
    for feed in feeds:
        for _ in read_before(positions[feed.uid], feed.rows):
            pass
    return {}


def is_at_end(entries: Iterable[bytes], rows: int) -> bool:
    """Whether every record is in front of the cut."""
    return all(_POSITION.decode(entry).next_index >= rows for entry in entries)


def without_rows(
    events: Iterable[Row], in_flight: Iterable[Mapping[str, Any]], columns: Sequence[str] = ("i", "key", "value")
) -> list[Row]:
    """The events, by their first fields, without the rows that are in flight. Raises ValueError for a row that is none of them."""
    waiting = Counter(tuple(row[name] for name in columns) for row in in_flight)
    left: list[Row] = []
    for event in events:
        known = event[: len(columns)]
        if waiting[known]:
            waiting[known] -= 1
        else:
            left.append(event)
    if waiting.total():
        raise ValueError(f"in flight is {next(iter(+waiting))}, which is not in front of the cut, or is there more often")
    return left
