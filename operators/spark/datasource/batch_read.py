"""`spark.read.format("holdfast")`: the committed rows of a file sink, for any Spark session.

Spark makes the source in Python processes beside the driver, which read the sink's log; tasks read the committed files that it
names, and nothing else. PySpark does not pass a Python data source the columns of a query: those of a schema that is given, or of
the option `columns`, are read alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSourceReader, InputPartition

from holdfast.barriers.sinks.log import LogEntry, SinkPaths
from holdfast.barriers.sinks.reading import replaced_in
from holdfast.operators.sinks.files.committed import FileRows, rows_of, shared
from holdfast.operators.sinks.files.formats import format_of
from holdfast.operators.sinks.files.parquet import declared_schema, only_sink, read_file, read_log
from holdfast.operators.sources.hive import values_of, with_partition
from holdfast.operators.sources.spark_checkpoint import place_of_spark
from holdfast.statebackends.errors import (
    InvalidConfigError,
    NotFoundError,
    ObjectMissingError,
    SchemaMismatchError,
    SourceDataLostError,
    UnknownColumnError,
)
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ReadFile, Storage

FORMAT = "holdfast"
BATCH_ROWS = 65_536
_DIGITS_MAX = 9
_EARLIEST, _LATEST = "earliest", "latest"
_READING = ("path", "sink_id", "columns", "partitions")
_STREAMING = ("maxfilespertrigger", "maxrowspertrigger", "startingoffset")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of a read, parsed."""

    path: str
    sink_id: str
    """Empty: that of the only sink there."""
    columns: tuple[str, ...] | None
    partitions: int
    """About how many tasks read a batch; 0: by the rows."""
    files_max: int | None = None
    """Files of a batch of a stream, at most."""
    rows_max: int | None = None
    starts_latest: bool = False

    @staticmethod
    def parse(options: Mapping[str, str], *, streaming: bool = False) -> OutputOptions:
        """Raises InvalidConfigError naming the option."""
        given = {name.lower(): value for name, value in options.items()}
        known = (*_READING, *_STREAMING) if streaming else _READING
        for name in given:
            if name not in known:
                raise _wrong(name, f"is unknown; known are: {', '.join(known)}")
        path = given.get("path", "")
        if not path:
            raise _wrong("path", "is missing: the path of a ParquetSink")
        if given.get("columns") == "":
            raise _wrong("columns", "names no column")
        start = given.get("startingoffset", _EARLIEST).lower()
        if start not in (_EARLIEST, _LATEST):
            raise _wrong("startingOffset", f"is {_EARLIEST} or {_LATEST}, not {start!r}")
        files_max, rows_max = _number(given, "maxFilesPerTrigger"), _number(given, "maxRowsPerTrigger")
        if files_max is not None and rows_max is not None:
            raise _wrong("maxRowsPerTrigger", "is there beside maxFilesPerTrigger: Spark takes one limit")
        return OutputOptions(
            path=_absolute(path),
            sink_id=given.get("sink_id", ""),
            columns=tuple(name.strip() for name in given["columns"].split(",")) if "columns" in given else None,
            partitions=_number(given, "partitions") or 0,
            files_max=files_max,
            rows_max=rows_max,
            starts_latest=start == _LATEST,
        )

    def open(self) -> Output:
        """Find the sink. Raises NotFoundError when there is none, InvalidConfigError when there are several."""
        storage = open_storage(self.path)
        return Output(self.path, self.sink_id or only_sink(storage, self.path), storage)


def _absolute(path: str) -> str:
    place = place_of_spark(path)
    return place if "://" in place else os.path.abspath(place)


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX and int(text)):
        raise _wrong(name, f"{text!r} is not a number from 1, of at most {_DIGITS_MAX} digits")
    return int(text)


def _wrong(name: str, reason: str) -> InvalidConfigError:
    return InvalidConfigError(f"{FORMAT}: option {name!r} {reason}", setting=name)


@dataclass(frozen=True, slots=True)
class Output:
    """A sink's output, found."""

    path: str
    sink_id: str
    storage: Storage

    def schema(self, columns: tuple[str, ...] | None) -> pa.Schema:
        """Columns declared by the sink's last owner, all or some. Raises NotFoundError, UnknownColumnError."""
        declared = declared_schema(read_log(self.storage, self.sink_id))
        if declared is None:
            raise NotFoundError(
                f"sink {self.sink_id} at {self.path} has written nothing, and its columns are unknown: give a schema",
                sink=self.sink_id,
            )
        if columns is None:
            return declared
        for name in columns:
            if name not in declared.names:
                raise UnknownColumnError(
                    f"sink {self.sink_id} has no column {name!r}, it has {', '.join(declared.names)}",
                    operator=self.sink_id,
                    column=name,
                    available=declared.names,
                )
        return pa.schema([declared.field(name) for name in columns])


class CommittedFiles(InputPartition):  # type: ignore[misc]
    """Committed rows read by one task."""

    def __init__(self, sink_id: str, pieces: Sequence[FileRows]) -> None:
        super().__init__(None)
        self.sink_id = sink_id
        self.pieces = tuple(pieces)


def partitions_of(
    storage: Storage, entries: Sequence[LogEntry], sink_id: str, tasks: int, behind: Sequence[LogEntry] = ()
) -> list[InputPartition]:
    """A partition for each task. Empty if the entries commit no row. `behind`: entries that follow them, and may replace files."""
    pieces = rows_of(entries, replaced_in([*entries, *behind]))
    # a task reads files as a whole: out of a bucket, each of a file's tasks would fetch it again
    may_cut = _by_row_groups if "://" not in storage.root else lambda name: False
    return [CommittedFiles(sink_id, some) for some in shared(pieces, tasks, may_cut=may_cut)]


def _by_row_groups(name: str) -> bool:
    """Whether a file is read by row groups: text is read as a whole, and so are partitions."""
    return format_of(name) == "parquet" and not values_of(name)


def read_rows(options: OutputOptions, partition: InputPartition, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, with these columns: null where a file is of a time before a column. Runs in a task.

    Raises SourceDataLostError when a committed file is gone, SchemaMismatchError for values that a column can't hold."""
    assert isinstance(partition, CommittedFiles)
    storage, paths = open_storage(options.path), SinkPaths(partition.sink_id)
    for piece in partition.pieces:
        (name, start, stop), content = _content(storage, paths, piece)
        for batch in _batches(name, content, start, stop, schema):
            yield _fitted(batch, schema, partition.sink_id, name)


def _content(storage: Storage, paths: SinkPaths, piece: FileRows) -> tuple[FileRows, bytes]:
    """A file and the rows of it that are wanted: those of a merged one, where the file was merged behind the plan, and is gone."""
    name, start, stop = piece
    try:
        return piece, storage.execute(ReadFile(paths.data(name)))
    except ObjectMissingError as error:
        place = replaced_in(read_log(storage, paths.sink_id)).get(name)
        if place is not None:
            return _content(storage, paths, FileRows(place.name, place.start + start, place.start + stop))
        raise SourceDataLostError(
            f"sink {paths.sink_id}: {name} is committed, and is not in {storage.root.rstrip('/')}/{paths.folder}/data any more",
            connector=FORMAT,
            split=paths.sink_id,
            position=(),
            reason="missing file",
        ) from error


def _batches(name: str, content: bytes, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows [start, stop) of a file, of the wanted columns that it has."""
    partition, position = values_of(name), 0
    if _by_row_groups(name):
        file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
        names = [column for column in schema.names if column in file.schema_arrow.names]
        groups, position = _groups(file.metadata, start, stop)
        batches = file.iter_batches(BATCH_ROWS, row_groups=groups, columns=names)
    else:
        known = pa.schema([*schema, *(pa.field(column, pa.string()) for column in partition if column not in schema.names)])
        if set(known.names) == set(partition):  # nothing of the file itself is wanted
            rows = with_partition(pa.table({"": pa.nulls(stop)}), name, known)
        else:
            rows = read_file(name, content, known)
        batches = iter(rows.to_batches(BATCH_ROWS))
    for batch in batches:
        if position >= stop:
            return
        first, last = max(start - position, 0), min(stop - position, batch.num_rows)
        position += batch.num_rows
        if first < last:
            yield batch.slice(first, last - first)


def _groups(metadata: pq.FileMetaData, start: int, stop: int) -> tuple[list[int], int]:
    """Row groups with any of the rows [start, stop), and the first row of the first of them."""
    ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
    begins = [0, *ends][:-1]
    groups = [group for group, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < stop and end > start]
    return groups, begins[groups[0]] if groups else 0


def _fitted(batch: pa.RecordBatch, schema: pa.Schema, sink_id: str, name: str) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        try:
            columns.append(batch.column(field.name).cast(field.type))
        except (pa.ArrowException, ValueError) as error:
            raise SchemaMismatchError(
                f"sink {sink_id}, file {name}: column {field.name!r} is {batch.schema.field(field.name).type}, and does not fit "
                f"{field.type}: {error}",
                operator=sink_id,
                column=field.name,
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([field.with_nullable(True) for field in schema]))


class OutputReader(DataSourceReader):  # type: ignore[misc]
    """Reads what is committed when the query is planned."""

    def __init__(self, options: OutputOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        output = self._options.open()
        entries = read_log(output.storage, output.sink_id)
        return partitions_of(output.storage, entries, output.sink_id, self._options.partitions) or [
            CommittedFiles(output.sink_id, ())
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_rows(self._options, partition, self._schema)
