"""A Spark streaming DataFrame as a rewindable source: its sealed micro-batches, in the order of their ids, as one sequence of rows.

Readers run in workers and need no Spark; the query runs in the driver (stream_query.py). Row i belongs to stripe i mod S, as of a
DataFrame: records keep their order at any parallelism."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorContext, Poll
from holdfast.operators.sources.dataframe import PREFETCH_CHUNKS, WAIT_MS, SparkSource
from holdfast.operators.sources.generator import StripeCursor
from holdfast.operators.sources.materialised import ChunkFile, load_chunk_flow
from holdfast.operators.sources.stream_input import (
    NO_BATCH,
    BatchManifest,
    Look,
    StartRecord,
    StreamBase,
    look_flow,
    say_start_flow,
)
from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import CorruptStateError, InputChangedError, InvalidConfigError
from holdfast.statebackends.layout import StreamPaths
from holdfast.statebackends.state import duration_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LOOK_MS = 20
"""Time between two looks for the next batch; it doubles while there is none, up to LOOK_MS_MAX."""
LOOK_MS_MAX = 200
SMALL_CHUNK_BYTES = 1 << 20
"""Of chunks that are smaller, up to CHUNKS_AHEAD_MAX are held or loaded at a time: a query may make many small batches."""
CHUNKS_AHEAD_MAX = 16
BATCHES_KNOWN_MAX = 64
"""Manifests that a reader holds before it looks for more."""
BACKLOG_BATCHES_MAX = 64
BACKLOG_BYTES_MAX = 1 << 30
OUTPUT_MODES = ("append", "update", "complete")
_UNKNOWN_TOTAL = 2**62


class StreamSource(SparkSource):
    """Source of a streaming DataFrame, with all of Spark's sources before it: see `Environment.from_stream`."""

    def __init__(
        self,
        dataframe: DataFrame,
        *,
        available_now: bool = False,
        trigger_interval: Any = None,
        output_mode: str = "append",
        checkpoint: str | None = None,
        backlog_batches_max: int = BACKLOG_BATCHES_MAX,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
        name: str = "stream",
    ) -> None:
        from holdfast.operators.sources.dataframe_write import arrow_schema_of

        if not dataframe.isStreaming:
            raise InvalidConfigError("this DataFrame is no stream (spark.readStream): use from_dataframe", setting="dataframe")
        for setting, given in (("backlog_batches_max", backlog_batches_max), ("backlog_bytes_max", backlog_bytes_max)):
            if given < 1:
                raise InvalidConfigError(f"{setting} must be at least 1, got {given}", setting=setting)
        if output_mode not in OUTPUT_MODES:
            known = ", ".join(OUTPUT_MODES)
            raise InvalidConfigError(f"output_mode is {output_mode!r}, must be one of {known}", setting="output_mode")
        if available_now and trigger_interval is not None:
            raise InvalidConfigError("available_now takes what is there: there is no trigger_interval", setting="trigger_interval")
        self.name = name
        self.available_now, self.output_mode = available_now, output_mode
        self.trigger_interval_ms = None if trigger_interval is None else duration_ms(trigger_interval, "trigger_interval")
        self.checkpoint = checkpoint
        self.backlog_batches_max, self.backlog_bytes_max = backlog_batches_max, backlog_bytes_max
        self.folder = ""
        """Of the input that the submission begins with, if nothing is restored; set by `begin`, as the next two."""
        self.submission = 0
        self.base: StreamBase | None = None
        """Behind which batch of another input `folder` goes on; set with it."""
        self.follows_base = False
        """The savepoint that is restored says so, and must be of the same row."""
        self.whole_batches = False
        """Barriers fall between batches: for one reader."""
        self._schema = arrow_schema_of(dataframe)
        self._dataframe = dataframe

    @property
    def full_schema(self) -> pa.Schema:
        """Columns of the DataFrame, all of which are stored."""
        return self._schema

    @property
    def dataframe(self) -> DataFrame | None:
        """None in a worker."""
        return self._dataframe

    def as_given(self) -> Self:
        given = copy(self)
        given.folder, given.submission, given.base, given.follows_base = "", 0, None, False
        return given

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> StreamReader:
        if not self.folder:
            raise InvalidConfigError(f"source {self.name} has no input: its job was not deployed by a driver with Spark")
        return StreamReader(self, subtask, parallelism, max_parallelism)


class StreamPosition(msgspec.Struct, frozen=True, array_like=True, tag="stream"):
    """One entry of the source's split state; self-contained, so that any subtask can go on from it."""

    version: int
    stripe_count: int
    stripe: int
    next_index: int
    """Number of the stripe's first unread row, over all batches."""
    input: str
    """Folder of the streaming input."""
    batch_id: int
    """A sealed batch that has the reader's first unread row, or is the last one before it; NO_BATCH: none was read."""


def decode_stream_positions(entries: Iterable[bytes], operator: str) -> list[StreamPosition]:
    """Decode restored entries. Raises CorruptStateError when one can't be read or they are of different inputs."""

    def corrupt(reason: str) -> CorruptStateError:
        return CorruptStateError(f"source {operator}: {reason}", operator=operator, reason=reason)

    try:
        positions = [decode_msgpack(entry, StreamPosition) for entry in entries]
    except UNDECODABLE as error:
        raise corrupt(f"a position can't be read: {error}") from error
    if any(position.version != 1 for position in positions):
        raise corrupt("a position is in a format that this version does not know")
    if len({(position.stripe_count, position.input) for position in positions}) > 1:
        raise corrupt("positions of different inputs are mixed")
    return positions


@dataclass(slots=True)
class _Chunk:
    """One file of rows that are still to be read."""

    file: ChunkFile
    folder: str
    schema: pa.Schema
    rows: pa.RecordBatch | None = None
    is_loading: bool = False

    @property
    def end_row(self) -> int:
        return self.file.first_row + self.file.rows


class StreamReader:
    """SourceReader of a streaming input: merges its stripes by row number, and follows the batches as they are sealed."""

    def __init__(self, source: StreamSource, subtask: int, parallelism: int, max_parallelism: int) -> None:
        self._source = source
        self._input = source.folder
        self._parallelism = parallelism
        self._stripe_count = max_parallelism
        self._owned: Iterable[int] = range(subtask, max_parallelism, parallelism)
        self._batches: deque[BatchManifest] = deque()
        """Known, from the one that the reader is in, or has read to its end."""
        self._chunks: deque[_Chunk] = deque()
        self._first_batch = NO_BATCH
        """What the restored positions name."""
        self._goes_over: StreamBase | None = None
        """The input is this one's, up to there, and then another one."""
        self._is_looking = False
        self._look_at_ms = 0
        self._look_ms = LOOK_MS
        self._error: BaseException | None = None
        self._closed = False

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        self._context = context
        starts: dict[int, int] = {}
        if entries is not None:
            positions = decode_stream_positions(entries, context.uid)
            starts = {position.stripe: position.next_index for position in positions}
            self._owned = starts
            self._input = ""
            if positions:
                self._stripe_count, self._input = positions[0].stripe_count, positions[0].input
                self._first_batch = min(position.batch_id for position in positions)
                self._follow_base(starts, context.uid)
        self._cursor = StripeCursor(self._stripe_count, self._owned, _UNKNOWN_TOTAL, next_indices=starts)
        read = sum((row - stripe) // self._stripe_count for stripe, row in self._cursor.positions())
        start = StartRecord(1, self._source.folder if self._goes_over else self._input, read, self._parallelism)
        flow = say_start_flow(self._source.folder, self._source.submission, context.subtask, start)
        context.submit_flow(flow, context.storage, self._said)

    def _follow_base(self, starts: Mapping[int, int], operator: str) -> None:
        """Rows behind those of the input before are in another one, where a copy of its query goes on. The savepoint may be of an
        earlier row than the copy, where the job had failed over in between: the rows up to there are read where they were."""
        base = self._source.base
        if base is None or self._input != base.input:
            return
        if all(base.rows <= row < base.rows + self._stripe_count for row in starts.values()):
            self._input, self._first_batch = self._source.folder, NO_BATCH
        elif self._parallelism == 1 and min(starts.values()) < base.rows:
            self._goes_over = base
        elif self._source.follows_base:
            first_row = min(starts.values())
            reason = f"the savepoint is of row {first_row}, its copy of the query's checkpoint of row {base.rows}"
            raise CorruptStateError(f"source {operator}: {reason}", path=base.input, operator=operator, reason=reason)

    def _folder(self, batch_id: int) -> str:
        """Of the input that has a batch."""
        return self._source.folder if self._goes_over is not None and batch_id > self._goes_over.batch_id else self._input

    def _said(self, result: None, error: BaseException | None) -> None:
        self._error = self._error or error

    # ------------------------------------------------------------------------------------------------------------- rows

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self._error is not None:
            raise self._error
        row = self._cursor.peek()
        if row is None:
            return Poll(finished=True)
        self._leave_behind(row)
        self._load_ahead()
        if not self._chunks:
            self._look(now_ms)
            return Poll(ready_at_ms=max(now_ms + WAIT_MS, self._look_at_ms))
        if len(self._batches) < BATCHES_KNOWN_MAX // 2:
            self._look(now_ms)
        chunk = self._chunks[0]
        if chunk.rows is None:
            return Poll(ready_at_ms=now_ms + WAIT_MS)
        return Poll(batch=self._read(chunk, chunk.rows, rows_max))

    def _read(self, chunk: _Chunk, rows: pa.RecordBatch, rows_max: int) -> Batch:
        first_row = chunk.file.first_row
        indices = self._cursor.take(rows_max, stop=chunk.end_row)
        first, last = int(indices[0]) - first_row, int(indices[-1]) - first_row
        if last - first + 1 == len(indices):
            return Batch(columns=rows.slice(first, len(indices)))
        return Batch(columns=rows.take(pa.array(indices - np.int64(first_row))))

    def _leave_behind(self, row: int) -> None:
        """Forget what lies before the next row, but for the batch that a snapshot names."""
        while self._chunks and self._chunks[0].end_row <= row:
            self._chunks.popleft()
        while len(self._batches) > 1 and self._batches[1].first_row <= row:
            self._batches.popleft()

    def _load_ahead(self) -> None:
        for index, chunk in enumerate(self._chunks):
            most = CHUNKS_AHEAD_MAX if chunk.file.length < SMALL_CHUNK_BYTES else PREFETCH_CHUNKS
            if index >= most:
                return
            if not chunk.is_loading and chunk.rows is None:
                self._load(chunk)

    def _load(self, chunk: _Chunk) -> None:
        chunk.is_loading = True
        columns = self._source.columns_read
        flow = load_chunk_flow(chunk.folder, chunk.file, chunk.schema, self._context.uid, columns)

        def loaded(rows: pa.RecordBatch | None, error: BaseException | None) -> None:
            chunk.is_loading, chunk.rows = False, rows
            self._error = self._error or error
            self._wake()

        self._context.submit_flow(flow, self._context.storage, loaded)

    # ---------------------------------------------------------------------------------------------------------- batches

    def _look(self, now_ms: int) -> None:
        """Look for further batches, if it is time."""
        if self._is_looking or self._closed or now_ms < self._look_at_ms or len(self._batches) >= BATCHES_KNOWN_MAX:
            return
        self._is_looking = True
        is_known = not self._batches and self._first_batch != NO_BATCH
        next_id = self._batches[-1].batch_id + 1 if self._batches else None if self._first_batch == NO_BATCH else self._first_batch
        folder, last_id = self._input if next_id is None else self._folder(next_id), None
        if self._goes_over is not None and folder != self._source.folder:
            last_id = self._goes_over.batch_id
        end_path = StreamPaths(folder).end(self._context.job_id, self._source.submission)
        flow = look_flow(folder, next_id, end_path, self._context.uid, is_known=is_known, last_id=last_id)
        self._context.submit_flow(flow, self._context.storage, self._looked)

    def _looked(self, look: Look | None, error: BaseException | None) -> None:
        self._is_looking = False
        now_ms = self._context.monotonic_ms()
        if look is None:
            self._error = self._error or error
        elif look.manifests:
            self._look_at_ms, self._look_ms = now_ms, LOOK_MS
            for manifest in look.manifests:
                self._add(manifest)
        else:
            self._look_at_ms, self._look_ms = now_ms + self._look_ms, min(2 * self._look_ms, LOOK_MS_MAX)
            if look.end is not None:
                self._cursor.set_total(look.end.rows)
        self._wake()

    def _add(self, manifest: BatchManifest) -> None:
        if self._error is not None:
            return
        folder = StreamPaths(self._folder(manifest.batch_id)).batch(manifest.batch_id)
        schema = manifest.schema
        if not schema.equals(self._source.full_schema):
            reason = f"its columns are {', '.join(schema.names)}, of other names or types than the query's now"
            message = f"source {self._context.uid}: batch {manifest.batch_id}: {reason}"
            self._error = InputChangedError(message, operator=self._context.uid, path=folder, reason=reason)
            return
        if self._batches and manifest.first_row != self._batches[-1].end_row:
            reason = f"begins with row {manifest.first_row}, the one before it ends with {self._batches[-1].end_row}"
            message = f"source {self._context.uid}: {folder}: {reason}"
            self._error = CorruptStateError(message, path=folder, operator=self._context.uid, reason=reason)
            return
        self._batches.append(manifest)
        self._chunks += (_Chunk(file, folder, schema) for file in manifest.files)

    def _wake(self) -> None:
        if not self._closed:
            self._context.source_is_ready()

    # ------------------------------------------------------------------------------------------------------ checkpoints

    @property
    def may_cut(self) -> bool:
        """Implements CutsAtBoundaries: of whole batches, behind the last row of one."""
        return not (self._source.whole_batches and self._batches) or self._next_row() in self._edges()

    def _next_row(self) -> int:
        return min(row for _, row in self._cursor.positions())

    def _edges(self) -> set[int]:
        return {self._batches[0].first_row, self._batches[0].end_row}

    def snapshot(self) -> list[bytes]:
        count, batch_id = self._stripe_count, self._batch_id()
        folder = self._folder(batch_id)
        positions = (StreamPosition(1, count, stripe, row, folder, batch_id) for stripe, row in self._cursor.positions())
        return [msgspec.msgpack.encode(position) for position in positions]

    def _batch_id(self) -> int:
        return self._batches[0].batch_id if self._batches else self._first_batch

    def external_files(self) -> tuple[str, ...]:
        if not self._input:
            return ()
        batch_id = self._batch_id()
        paths = StreamPaths(self._folder(batch_id))
        return (paths.record if batch_id == NO_BATCH else paths.manifest(batch_id),)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        return

    def close(self) -> None:
        self._closed = True
        self._chunks.clear()
