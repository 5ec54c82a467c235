"""A Spark DataFrame as a rewindable source: written once per job in its own order, replayed by row index.

Readers run in workers and need no Spark. Row i belongs to stripe i mod S, S = the source's max parallelism at its start.
Q35: docs/invariants.md."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorContext, Poll
from holdfast.operators.sources.generator import (
    StripeCursor,
    StripePosition,
    check_rate,
    decode_positions,
    encode_position,
    rate_of_subtask,
)
from holdfast.operators.sources.materialised import ChunkFile, InputManifest, load_chunk_flow, load_manifest_flow
from holdfast.statebackends.errors import InvalidConfigError, InvariantError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PREFETCH_CHUNKS = 2
"""Most chunks that a reader holds or loads: the current one and the next."""

WAIT_MS = 2
"""Interval at which a reader polls a chunk that is being loaded."""

_UNKNOWN_TOTAL = 2**62


class SparkSource:
    """A source whose rows come from a DataFrame, by way of the state directory. Its job is started by a driver with Spark."""

    columns_read: tuple[str, ...] | None = None
    """None: all."""
    _schema: pa.Schema
    """Columns of the DataFrame, all of which are stored."""
    _dataframe: DataFrame | None
    """None in a worker."""

    @property
    def schema(self) -> pa.Schema:
        names = self.columns_read
        return self._schema if names is None else pa.schema([self._schema.field(name) for name in names])

    def with_columns(self, names: Sequence[str]) -> Self:
        """The same source, whose readers give only these columns. All are written: another version of the job may read them."""
        narrow = copy(self)
        narrow._dataframe, narrow.columns_read = self._dataframe, tuple(names)
        return narrow

    @property
    def session(self) -> SparkSession | None:
        """Session of the DataFrame; None in a worker."""
        return None if self._dataframe is None else self._dataframe.sparkSession

    def as_given(self) -> Self:
        """The source as the user gave it: where a run of it has put the rows says nothing of the plan."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataframe": None}


class DataFrameSource(SparkSource):
    """Source of any Spark DataFrame, with all of Spark SQL before it. rows_per_second is the rate of the whole source."""

    def __init__(self, dataframe: DataFrame, *, rows_per_second: float | None = None, name: str = "dataframe") -> None:
        """Raises InvalidConfigError naming the column for an unsupported type (nanoseconds, intervals) or for duplicate names."""
        from holdfast.operators.sources.dataframe_write import arrow_schema_of

        check_rate(rows_per_second)
        if dataframe.isStreaming:
            raise InvalidConfigError("this DataFrame is a stream (spark.readStream): use from_stream", setting="dataframe")
        self.name = name
        self.rows_per_second = rows_per_second
        self.manifest_path = ""
        """Storage-relative; set by `materialise`, read by a job that starts empty."""
        self._schema = arrow_schema_of(dataframe)
        self._dataframe = dataframe

    def as_given(self) -> Self:
        """All runs of a job read what the first one materialised."""
        given = copy(self)
        given.manifest_path = ""
        return given

    def materialise(
        self, spark: SparkSession | None, storage_root: str, job_id: str, uid: str, *, submission: int = 1, fresh: bool = False
    ) -> str:
        """Write the DataFrame below the state directory, unless the job has it already; returns the manifest's path.

        Sealed input is reused and never rewritten; `fresh` (the job forgets its state) makes a new input beside it."""
        from holdfast.operators.sources.dataframe_write import materialise

        if self._dataframe is None:
            raise InvariantError(f"source {uid}: the DataFrame stayed in the driver")
        self.manifest_path = materialise(
            spark or self._dataframe.sparkSession, self._dataframe, self._schema, storage_root, job_id, uid, submission, fresh=fresh
        )
        return self.manifest_path

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> DataFrameReader:
        if not self.manifest_path:
            raise InvalidConfigError(f"source {self.name} was not materialised before its job was deployed")
        return DataFrameReader(self, subtask, parallelism, max_parallelism)


class DataFrameReader:
    """SourceReader of a sealed input: merges its stripes by row index, and loads chunks ahead on the pool."""

    def __init__(self, source: DataFrameSource, subtask: int, parallelism: int, max_parallelism: int) -> None:
        self._input = source.manifest_path
        self._stripe_count = max_parallelism
        self._owned = range(subtask, max_parallelism, parallelism)
        self._rate = rate_of_subtask(source.rows_per_second, parallelism)
        self._manifest: InputManifest | None = None
        self._columns = source.columns_read
        self._first_rows: list[int] = []
        self._chunks: dict[int, pa.RecordBatch | None] = {}
        """File index -> batch, or None while it is being loaded."""
        self._error: BaseException | None = None
        self._closed = False

    def open(self, context: OperatorContext, entries: list[bytes] | None) -> None:
        self._context = context
        starts: dict[int, int] = {}
        if entries is not None:
            positions = decode_positions(entries, context.uid)
            starts = {position.stripe: position.next_index for position in positions}
            self._owned = range(0)
            if positions:
                self._stripe_count, self._input = positions[0].stripe_count, positions[0].input
        # The number of rows is in the manifest; until it is loaded nothing is read, but positions are known (Q35).
        owned = starts if entries is not None else self._owned
        self._cursor = StripeCursor(self._stripe_count, owned, _UNKNOWN_TOTAL, next_indices=starts)
        context.submit_flow(load_manifest_flow(self._input, context.uid), context.storage, self._manifest_loaded)

    def _manifest_loaded(self, manifest: InputManifest | None, error: BaseException | None) -> None:
        if manifest is None:
            self._error = error
            return
        self._manifest = manifest
        self._first_rows = [file.first_row for file in manifest.files]
        self._cursor.set_total(manifest.rows)
        self._prefetch()

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self._error is not None:
            raise self._error
        if self._manifest is None:
            return Poll(ready_at_ms=now_ms + WAIT_MS)
        row = self._cursor.peek()
        if row is None:
            return Poll(finished=True)
        chunk = self._prefetch()
        if chunk is None:
            return Poll(ready_at_ms=now_ms + WAIT_MS)
        count = self._rate.allowed(rows_max, now_ms)
        if count == 0:
            return Poll(ready_at_ms=self._rate.ready_at_ms(now_ms))
        return Poll(batch=self._read(chunk, self._file_of(row), count))

    def _read(self, chunk: pa.RecordBatch, file: ChunkFile, count: int) -> Batch:
        indices = self._cursor.take(count, stop=file.first_row + file.rows)
        self._rate.spend(len(indices))
        first, last = int(indices[0]) - file.first_row, int(indices[-1]) - file.first_row
        if last - first + 1 == len(indices):
            return Batch(columns=chunk.slice(first, len(indices)))
        return Batch(columns=chunk.take(pa.array(indices - np.int64(file.first_row))))

    def _file_of(self, row: int) -> ChunkFile:
        assert self._manifest is not None
        return self._manifest.files[bisect_right(self._first_rows, row) - 1]

    def _prefetch(self) -> pa.RecordBatch | None:
        """Load the chunk of the next row and those after it; drop earlier ones. Returns the chunk of the next row, if loaded."""
        row = self._cursor.peek()
        if row is None or self._manifest is None or self._closed:
            self._chunks.clear()
            return None
        current = bisect_right(self._first_rows, row) - 1
        self._chunks = {index: chunk for index, chunk in self._chunks.items() if index >= current}
        for index in range(current, min(current + PREFETCH_CHUNKS, len(self._manifest.files))):
            if index not in self._chunks:
                self._load(index)
        return self._chunks[current]

    def _load(self, index: int) -> None:
        assert self._manifest is not None
        self._chunks[index] = None
        folder = self._input.rsplit("/", 1)[0]
        flow = load_chunk_flow(folder, self._manifest.files[index], self._manifest.schema, self._context.uid, self._columns)

        def loaded(chunk: pa.RecordBatch | None, error: BaseException | None) -> None:
            if error is not None:
                self._error = error
            elif index in self._chunks:
                self._chunks[index] = chunk

        self._context.submit_flow(flow, self._context.storage, loaded)

    def snapshot(self) -> list[bytes]:
        count, path = self._stripe_count, self._input
        return [encode_position(StripePosition(1, count, stripe, row, path)) for stripe, row in self._cursor.positions()]

    def external_files(self) -> tuple[str, ...]:
        return (self._input,)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        return

    def close(self) -> None:
        self._closed = True
        self._chunks.clear()
