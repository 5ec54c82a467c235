"""Canonical files (Arrow IPC, Parquet) as streams of batches in key-group order.

Files written by backends are in order, and pass through. Tables edited with other tools may not be: those are read several
times, each time for as many key groups as fit in memory. Columns come in the state's own order and types."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import KEY_GROUP
from holdfast.statebackends.snapshot.tables import EVERY_KEY_GROUP, check_held, restrict, sort_by_key_group
from holdfast.statebackends.snapshot.unpacking import check_arrow, check_parquet, checked_batch

BATCH_ROWS = 1 << 15
BATCH_BYTES = 32 << 20
"""Of a batch, about: what each of its rows takes on average is known, and not of any single one."""
_READ_BYTES = 1 << 20
"""Of each column at a time: a row group that another tool wrote may be all of a file."""
SORT_ROWS_MAX = 1 << 20
"""Rows of a file out of order that are sorted at a time; more only if they are of one key group."""


class TableFile(ABC):
    """One open file. Errors are pyarrow's and ValueError; the caller names the file."""

    schema: pa.Schema
    held: KeyGroupRange = EVERY_KEY_GROUP
    """The key groups of the file's handle: rows of others are no rows of the snapshot, and refused."""
    _counted: tuple[KeyGroupRange, npt.NDArray[np.int64], bool] | None = None
    """What `_count` found last."""

    @staticmethod
    def open(source: pa.NativeFile, table_format: str, held: KeyGroupRange = EVERY_KEY_GROUP) -> TableFile:
        file = _ParquetFile(source) if table_format == "parquet" else _ArrowFile(source)
        file.held = held
        return file

    @abstractmethod
    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, at most BATCH_ROWS at a time; all columns, or these."""

    def sorted_batches(self, groups: KeyGroupRange, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of some key groups in key-group order; all columns, or those of these that there are, and the key group."""
        counts, in_order = self._count(groups)
        names = None if columns is None else [name for name in self.schema.names if name == KEY_GROUP or name in columns]
        schema = self.schema if names is None else pa.schema([self.schema.field(name) for name in names])
        for part in [groups] if in_order else _slices(counts, groups):
            found = (restrict(batch, part) for batch in self.batches(names))
            if in_order:
                yield from (batch for batch in found if batch.num_rows)
            else:
                table = sort_by_key_group(pa.Table.from_batches(list(found), schema))
                yield from table.to_batches(max_chunksize=BATCH_ROWS)

    def slices(self, groups: KeyGroupRange) -> Iterator[KeyGroupRange]:
        """Consecutive ranges with at most SORT_ROWS_MAX of its rows each, or of one key group."""
        yield from _slices(self._count(groups)[0], groups)

    def _count(self, groups: KeyGroupRange) -> tuple[npt.NDArray[np.int64], bool]:
        """Rows of each key group of the range, and whether all rows are in order."""
        if self._counted is None or self._counted[0] != groups:
            self._counted = (groups, *self._count_rows(groups))
        return self._counted[1:]

    def _count_rows(self, groups: KeyGroupRange) -> tuple[npt.NDArray[np.int64], bool]:
        if self.schema.get_field_index(KEY_GROUP) < 0:
            raise ValueError(f"no column {KEY_GROUP!r}")
        counts = np.zeros(len(groups), np.int64)
        last, in_order = -1, True
        for batch in self.batches([KEY_GROUP]):
            column = batch.column(0)
            if column.null_count or not pa.types.is_integer(column.type):
                raise ValueError(f"column {KEY_GROUP!r} holds nulls or is not an integer")
            found = column.to_numpy(zero_copy_only=False).astype(np.int64)
            if len(found):
                check_held(found, self.held)
                in_order = in_order and int(found[0]) >= last and bool((found[1:] >= found[:-1]).all())
                last = int(found[-1])
                inside = found[(found >= groups.start) & (found < groups.stop)] - groups.start
                counts += np.bincount(inside, minlength=len(groups))
        return counts, in_order


def _slices(counts: npt.NDArray[np.int64], groups: KeyGroupRange) -> Iterator[KeyGroupRange]:
    """Consecutive ranges of at most SORT_ROWS_MAX rows, or of one key group."""
    start, rows = groups.start, 0
    for group, count in enumerate(counts.tolist(), groups.start):
        if rows and rows + count > SORT_ROWS_MAX:
            yield KeyGroupRange(start, group)
            start, rows = group, 0
        rows += count
    if start < groups.stop:
        yield KeyGroupRange(start, groups.stop)


class _ParquetFile(TableFile):
    def __init__(self, source: pa.NativeFile) -> None:
        row_bytes = check_parquet(source)
        self._rows = max(1, BATCH_BYTES // max(1, row_bytes))
        self._file = pq.ParquetFile(source, buffer_size=_READ_BYTES, pre_buffer=False)
        self.schema = self._file.schema_arrow

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        yield from self._file.iter_batches(min(BATCH_ROWS, self._rows), columns=None if columns is None else list(columns))


class _ArrowFile(TableFile):
    def __init__(self, source: pa.NativeFile) -> None:
        self._source = source
        self._unpacked = check_arrow(source)
        self._reader = pa.ipc.open_file(source)
        self.schema = self._reader.schema

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        reader = self._reader if columns is None else self._reader_of(columns)
        unpacked = self._unpacked.copy()
        for index in range(reader.num_record_batches):
            batch = checked_batch(reader.get_batch(index), unpacked)
            if columns is not None:
                batch = batch.select(list(columns))
            rows = min(BATCH_ROWS, max(1, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)

    def _reader_of(self, columns: Sequence[str]) -> pa.ipc.RecordBatchFileReader:
        """One that reads and decompresses nothing else."""
        fields = [index for name in columns if (index := self.schema.get_field_index(name)) >= 0]
        return pa.ipc.open_file(self._source, options=pa.ipc.IpcReadOptions(included_fields=fields))


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a schema, cast. Raises ValueError or pyarrow's errors."""
    if batch.schema.equals(schema):
        return batch
    arrays = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            raise ValueError(f"no column {field.name!r}")
        column = batch.column(index)
        if column.null_count and not field.nullable:
            raise ValueError(f"null in column {field.name!r}")
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
