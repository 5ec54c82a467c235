"""Reading a canonical table of keyed state, whole or as a stream of batches: for restores and for tools.

A table is Arrow IPC or Parquet. What it unpacks to is bounded before it is unpacked (unpacking.py). Tables of a backend are sorted
by key group and pass through. A table that another tool edited may not be: it is sorted, in a stream by reading it several times,
each time for as many key groups as fit in memory. What a row must be is decided in row_rules.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError, InvalidKeyError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.keygroups import MAX_PARALLELISM_LIMIT
from holdfast.statebackends.layout import KEY_GROUP
from holdfast.statebackends.snapshot.sorting import LARGE_POOL
from holdfast.statebackends.snapshot.tables import key_groups_of, restrict, sort_by_key_group
from holdfast.statebackends.snapshot.unpacking import check_arrow, check_parquet, checked_batch
from holdfast.statebackends.storage.failures import refusal

if TYPE_CHECKING:
    import pyarrow.parquet as pq

Judge: TypeAlias = Callable[[pa.Table], pa.Table]
"""Returns the rows in canonical types. Raises ValueError, CorruptStateError or pyarrow's errors for rows that break a rule."""

EVERY_KEY_GROUP = KeyGroupRange(0, MAX_PARALLELISM_LIMIT)
"""Key groups of a table without a known handle."""

BATCH_ROWS = 1 << 15
BATCH_BYTES = 32 << 20
"""Bytes of a batch, roughly: only the average row is known."""
_READ_BYTES = 1 << 20
"""Bytes of a column that are read at a time: a row group of another tool may be a whole file."""
SORT_ROWS_MAX = 1 << 20
"""Rows of an unsorted file that are sorted at a time; more only if they are of one key group."""


def check_held(groups: npt.NDArray[Any], held: KeyGroupRange) -> None:
    """Raises ValueError for rows of key groups outside of `held`, those of the table's handle."""
    if len(groups) and not (held.start <= groups.min() and groups.max() < held.stop):
        wrong = groups[(groups < held.start) | (groups >= held.stop)]
        raise ValueError(f"{len(wrong)} rows of key groups outside of [{held.start}, {held.stop}), the first of {wrong[0]}")


class TableFile(ABC):
    """One open table. Raises pyarrow's errors and ValueError; the caller names the file."""

    schema: pa.Schema
    held: KeyGroupRange = EVERY_KEY_GROUP
    """Key groups of the file's handle; rows of others are refused."""
    _counted: tuple[KeyGroupRange, npt.NDArray[np.int64], bool] | None = None
    """Last result of `_count`, with its key groups."""

    @staticmethod
    def open(source: pa.NativeFile, table_format: str, held: KeyGroupRange = EVERY_KEY_GROUP) -> TableFile:
        """Raises ValueError for an unknown format."""
        file: TableFile
        match table_format:
            case "parquet":
                file = _ParquetFile(source)
            case "arrow":
                file = _ArrowFile(source)
            case _:
                raise ValueError(f"unknown format {table_format!r}")
        file.held = held
        return file

    @abstractmethod
    def read(self, groups: KeyGroupRange) -> pa.Table:
        """The rows of some key groups at one time, sorted, with all columns."""

    @abstractmethod
    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, at most BATCH_ROWS at a time, with all columns or those in `columns`."""

    def sorted_batches(self, groups: KeyGroupRange, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of some key groups in key-group order, with all columns, or the key group and those in `columns` that exist."""
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
        """Consecutive ranges of key groups with at most SORT_ROWS_MAX rows of the file each, or of one key group."""
        yield from _slices(self._count(groups)[0], groups)

    def _count(self, groups: KeyGroupRange) -> tuple[npt.NDArray[np.int64], bool]:
        """(rows of each key group of the range, whether all rows are in order)."""
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
        import pyarrow.parquet as pq

        self._source = source
        row_bytes = check_parquet(source)
        self._rows = max(1, BATCH_BYTES // max(1, row_bytes))
        self._file = pq.ParquetFile(source, buffer_size=_READ_BYTES, pre_buffer=False)
        self.schema = self._file.schema_arrow

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        yield from self._file.iter_batches(min(BATCH_ROWS, self._rows), columns=None if columns is None else list(columns))

    def read(self, groups: KeyGroupRange) -> pa.Table:
        import pyarrow.parquet as pq

        if self.schema.get_field_index(KEY_GROUP) < 0:
            raise ValueError(f"no column {KEY_GROUP!r}")
        file = pq.ParquetFile(self._source)
        wanted = [index for index in range(file.num_row_groups) if self._has_rows(file, index, groups)]
        return restrict(file.read_row_groups(wanted), groups)

    def _has_rows(self, file: pq.ParquetFile, row_group: int, groups: KeyGroupRange) -> bool:
        """Whether a row group has rows of some key groups.

        The rows say it and not the statistics, which another tool may have written wrongly."""
        found = key_groups_of(file.read_row_group(row_group, columns=[KEY_GROUP]))
        check_held(found, self.held)
        return bool(((found >= groups.start) & (found < groups.stop)).any())


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

    def read(self, groups: KeyGroupRange) -> pa.Table:
        reader = pa.ipc.open_file(self._source, memory_pool=LARGE_POOL)
        unpacked = self._unpacked.copy()
        batches = []
        for index in range(reader.num_record_batches):
            batch = checked_batch(reader.get_batch(index), unpacked)
            check_held(key_groups_of(batch), self.held)
            found = restrict(batch, groups)
            if len(found):
                batches.append(found)
        return pa.Table.from_batches(batches, reader.schema)

    def _reader_of(self, columns: Sequence[str]) -> pa.ipc.RecordBatchFileReader:
        """A reader that reads and decompresses these columns alone."""
        fields = [index for name in columns if (index := self.schema.get_field_index(name)) >= 0]
        return pa.ipc.open_file(self._source, options=pa.ipc.IpcReadOptions(included_fields=fields))


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns of a schema, cast. Raises ValueError or pyarrow's errors."""
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


def decode_keyed_table(
    data: bytes | pa.Buffer,
    table_format: str,
    key_groups: KeyGroupRange,
    *,
    path: str = "",
    operator: str | None = None,
    held: KeyGroupRange = EVERY_KEY_GROUP,
    judge: Judge | None = None,
) -> pa.Table:
    """The rows of some key groups, sorted.

    Tables that other tools edited are read too: rows and columns in any order, large or dictionary types. `held`: key groups of the
    table's handle; rows of others are refused, since only some parallelisms would find them. `judge` applies further rules to the
    rows (row_rules.py). Raises CorruptStateError naming file and operator."""
    try:
        table = TableFile.open(pa.BufferReader(data), table_format, held).read(key_groups)
        if judge is not None:
            table = judge(table)
    except (pa.ArrowException, InvalidKeyError, ValueError, TypeError, KeyError, OSError, OverflowError) as error:
        owner = f"operator {operator!r}: " if operator else ""
        if (refused := refusal(error, f"{owner}{path}", path=path, operator=operator)) is not None:
            raise refused from error
        raise CorruptStateError(
            f"{owner}{path}: not a table of keyed state: {error}", path=path, operator=operator, reason="table"
        ) from error
    return table
