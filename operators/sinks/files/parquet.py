"""The exactly-once sinks of files: their public classes, and readers of the committed output.

`<path>/part-*` are for plain readers; our readers use the log and the files it names, and nothing else."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote

import pyarrow as pa

from holdfast.barriers.messages import has_control_characters
from holdfast.barriers.sinks.log import ROOT_FOLDER, LogEntry, OwnerEntry, SinkPaths
from holdfast.barriers.sinks.reading import current_files, read_log_flow
from holdfast.operators.base import Operator
from holdfast.operators.sinks.files.committer import FileCommitter
from holdfast.operators.sinks.files.formats import check_blank_lines, check_columns, checked_format, decode, format_of
from holdfast.operators.sinks.files.log import MergeSettings, SinkSettings
from holdfast.operators.sinks.files.partitions import check_partitions
from holdfast.operators.sinks.files.writer import ParquetSinkWriter
from holdfast.operators.sources.hive import values_of, with_partition
from holdfast.operators.sources.materialised import schema_from_text, schema_text
from holdfast.statebackends.errors import GraphError, InvalidConfigError, NotFoundError, ObjectMissingError
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFolder, ReadFile, Storage, run_flow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

FILE_SIZE_MAX = 128 * 1024 * 1024
"""Bytes of rows in memory at which a writer closes a file between two checkpoints."""


TARGET_SIZE_MIN, TARGET_SIZE_MAX = 64 << 10, 1 << 30
"""Bytes: files below are not worth a merge, and a merge holds its file in memory."""
MERGED_KEPT_MS = 600_000
DURATION_MS_MAX = 366 * 24 * 3_600_000


class FileSink:
    """Writes rows to files, exactly once: all rows of a checkpoint become visible together when it is complete.

    path: a folder, on a file system that all workers see, or a URL. format: "parquet"; "json", a JSON object on each line, NaN and
    infinities as null; "csv", with a header, text in quotes, null as nothing between commas.
    sink_id: identity of the output over restarts, restores and renamed jobs; "" takes the operator's uid. Two sinks may share a
    path if their ids differ.
    partition_by: columns whose values are the folders of the files, `<column>=<value>/...`, and are not in the files: text,
    integers, booleans, dates. An empty text is written as null.
    file_size_max: bytes of rows in memory at which a writer closes its files between two checkpoints.
    target_file_size: bytes, 64 KiB to 1 GiB. Committed files of less than half of it are merged with their neighbours, in the order
    of their rows, as soon as they have so many together: into files of up to one and a half times that, which are not merged again.
    Readers of the log see the one in place of the others in one step. None: committed files stay as they are. A merge holds its
    file in the committer's memory.
    roll_interval_ms: age of the oldest file that waits, at which it is merged whatever the size; None: it waits. Looked at when a
    checkpoint is complete.
    merged_files_kept_ms: time that replaced files stay, for readers that have listed them, 10 minutes.

    The rows must have a declared schema without nanoseconds; text files hold no binary columns and no durations, and CSV no lists,
    and no null where it has one column.
    Raises InvalidConfigError on a setting out of bounds."""

    needs_columns = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "parquet",
        sink_id: str = "",
        *,
        partition_by: Sequence[str] = (),
        file_size_max: int = FILE_SIZE_MAX,
        target_file_size: int | None = None,
        roll_interval_ms: int | None = None,
        merged_files_kept_ms: int | None = None,
        name: str = "",
        open_storage: Callable[[str], Storage] | None = None,
    ) -> None:
        text = os.fspath(path)
        checked = checked_format(format)
        columns = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        if len(set(columns)) < len(columns) or not all(isinstance(column, str) and column for column in columns):
            raise InvalidConfigError(f"partition_by must be different columns, not {partition_by!r}", setting="partition_by")
        if file_size_max < 1:
            raise InvalidConfigError(f"file_size_max must be at least 1, got {file_size_max}", setting="file_size_max")
        check_sink_path(text)
        self.name = name or checked
        merging = merge_settings(text, target_file_size, roll_interval_ms, merged_files_kept_ms)
        place = text if "://" in text else os.path.abspath(text)
        self._settings = SinkSettings(place, sink_id, file_size_max, open_storage, checked, columns, merging)
        self._schema: pa.Schema | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, sink_id={self.sink_id!r})"

    @property
    def path(self) -> str:
        """Absolute path or URL of the output."""
        return self._settings.path

    def redirected(self, path: str) -> Self:
        """The same sink with its output elsewhere. Raises InvalidConfigError for a path that no sink can have."""
        check_sink_path(path)
        other = copy.copy(self)
        other._settings = replace(self._settings, path=path if "://" in path else os.path.abspath(path))
        return other

    @property
    def schema(self) -> pa.Schema | None:
        """Schema of its rows; None until its job was built."""
        return self._schema

    @property
    def log_path(self) -> str:
        """Folder of its log and output, recorded in the job graph: a restore compares it."""
        return self._settings.path

    @property
    def sink_id(self) -> str:
        """Identity of the output; "" until its job was built, if none was given."""
        return self._settings.sink_id

    @sink_id.setter
    def sink_id(self, value: str) -> None:
        self._settings.sink_id = value

    @property
    def partition_by(self) -> tuple[str, ...]:
        """Columns whose values are the folders of files."""
        return self._settings.partition_by

    @property
    def merges(self) -> bool:
        """Whether committed small files are merged."""
        return self._settings.merging is not None

    def renamed(self, sink_id: str) -> Self:
        """The same sink under another id, with settings of its own."""
        sink = copy.copy(self)
        sink._settings = copy.copy(self._settings)
        sink.sink_id = sink_id
        return sink

    def watched(self, wrap: Callable[[Storage], Storage]) -> Self:
        """The same sink, the storage of its output wrapped: for tests. `wrap` is pickled into the job."""
        sink = self.renamed(self.sink_id)
        sink._settings.open_storage = partial(_open_watched, self._settings.open_storage or open_storage, wrap)
        return sink

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        """Raises GraphError without a schema, or with one that the files do not preserve."""
        if schema is None:
            raise GraphError(f"sink {self.name} at {self.path} needs columns: declare returns= on the function before it")
        check_columns(self._settings.format, schema, self.name)
        check_partitions(self._settings.partition_by, schema, self.name)
        check_blank_lines(self._settings.format, schema, self._settings.partition_by, self.name)
        self._schema = schema.remove_metadata()
        return ParquetSinkWriter(self._settings, self._schema)

    def create_committer(self) -> Operator:
        return FileCommitter(self._settings, "" if self._schema is None else schema_text(self._schema))

    @property
    def storage(self) -> Storage:
        """Storage of the output, opened by the form of its path."""
        return self._settings.storage()

    def committed_files(self) -> list[str]:
        """Absolute paths of the committed files, in the order of their commits."""
        return committed_files(self.storage, self._known_id())

    def _known_id(self) -> str:
        """Sink id; for a sink made to read the output of another program, that of the only sink there."""
        return self.sink_id or only_sink(self.storage, self.path)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """Committed rows only, as of now; also while the job runs. Empty, with the sink's columns, if nothing is committed.

        Of CSV files Spark takes an empty text for null. The sink of another program's job is found by its path, and, where several
        write to it, by `sink_id`, its uid there. Raises NotFoundError when there is none, InvalidConfigError when there are
        several."""
        from pyspark.sql.pandas.types import from_arrow_schema

        storage, sink_id = self.storage, self._known_id()
        entries = read_log(storage, sink_id)
        schema = declared_schema(entries) or self._schema
        if schema is None:
            raise NotFoundError(f"sink {sink_id} at {self.path} has written nothing, and its columns are unknown", sink=sink_id)
        spark_schema = from_arrow_schema(schema, prefer_timestamp_ntz=True)
        files = _files_of(entries, storage, sink_id)
        if not files:
            return spark.createDataFrame([], spark_schema)
        frame = _spark_reader(spark, storage, sink_id, files).schema(spark_schema).load([_uri(file) for file in files])
        # Spark puts the columns of partitions last
        return frame if frame.columns == schema.names else frame.select(*(_quoted(name) for name in schema.names))


def _open_watched(opens: Callable[[str], Storage], wrap: Callable[[Storage], Storage], path: str) -> Storage:
    return wrap(opens(path))


class ParquetSink(FileSink):
    """Writes rows to Parquet files, exactly once: all rows of a checkpoint become visible together when it is complete.

    sink_id: identity of the output over restarts, restores and renamed jobs; "" takes the operator's uid. Two sinks may share a
    path if their ids differ. The rows must have a declared schema without nanoseconds. target_file_size, roll_interval_ms,
    merged_files_kept_ms: as of `FileSink`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        sink_id: str = "",
        *,
        file_size_max: int = FILE_SIZE_MAX,
        target_file_size: int | None = None,
        roll_interval_ms: int | None = None,
        merged_files_kept_ms: int | None = None,
        name: str = "parquet",
        open_storage: Callable[[str], Storage] | None = None,
    ) -> None:
        super().__init__(
            path,
            "parquet",
            sink_id,
            file_size_max=file_size_max,
            target_file_size=target_file_size,
            roll_interval_ms=roll_interval_ms,
            merged_files_kept_ms=merged_files_kept_ms,
            name=name,
            open_storage=open_storage,
        )


def check_sink_path(text: str) -> None:
    """Raise InvalidConfigError for a path that no sink can have."""
    if not text:
        raise InvalidConfigError("a sink needs a path", setting="path")
    if has_control_characters(text) or ("://" in text and ".." in text.split("/")):
        # Staged files below such a path would be refused when a checkpoint names them.
        raise InvalidConfigError(f"a sink's path has no control characters, and no `..` in a URL: {text!r}", setting="path")


def merge_settings(path: str, size: int | None, roll_ms: int | None, kept_ms: int | None) -> MergeSettings | None:
    """Raises InvalidConfigError naming the sink and the setting."""

    def check(setting: str, value: int | None, least: int, most: int) -> None:
        if value is not None and (type(value) is not int or not least <= value <= most):
            message = f"sink at {path}: {setting} is a number from {least:,} to {most:,}, not {value!r}"
            raise InvalidConfigError(message, setting=setting)

    check("target_file_size", size, TARGET_SIZE_MIN, TARGET_SIZE_MAX)
    check("roll_interval_ms", roll_ms, 1, DURATION_MS_MAX)
    check("merged_files_kept_ms", kept_ms, 0, DURATION_MS_MAX)
    if size is not None:
        return MergeSettings(size, roll_ms, MERGED_KEPT_MS if kept_ms is None else kept_ms)
    for setting, value in (("roll_interval_ms", roll_ms), ("merged_files_kept_ms", kept_ms)):
        if value is not None:
            message = f"sink at {path}: {setting} says when committed files are merged, and target_file_size is missing: how large"
            raise InvalidConfigError(message, setting=setting)
    return None


_SPARK_CSV = {"header": "true", "multiLine": "true", "escape": '"', "positiveInf": "inf", "negativeInf": "-inf", "nanValue": "nan"}
"""Spark's options for our CSV files. An empty text is null to it, quoted or not."""


def _spark_reader(spark: SparkSession, storage: Storage, sink_id: str, files: list[str]) -> DataFrameReader:
    """Of committed files, which are of one format; columns of partitions are taken from the names below the sink."""
    formats = {format_of(file) for file in files}
    if len(formats) > 1:
        raise InvalidConfigError(f"sink {sink_id} has files of formats {', '.join(sorted(formats))}: read_committed reads them all")
    reader = spark.read.format(formats.pop())
    if format_of(files[0]) != "parquet":
        reader = reader.option("mode", "FAILFAST").options(**(_SPARK_CSV if format_of(files[0]) == "csv" else {}))
    folder = f"{storage.root.rstrip('/')}/{SinkPaths(sink_id).data('')}"
    return reader.option("basePath", _uri(folder)) if any(values_of(file.removeprefix(folder)) for file in files) else reader


def _quoted(column: str) -> str:
    """A name as Spark's SQL writes it."""
    return "`" + column.replace("`", "``") + "`"


def _uri(file: str) -> str:
    return file if "://" in file else f"file://{file}"


def read_log(storage: Storage, sink_id: str) -> list[LogEntry]:
    """Every takeover and commit of a sink, in order."""
    return run_flow(read_log_flow(SinkPaths(sink_id)), storage)


def committed_files(storage: Storage, sink_id: str) -> list[str]:
    """Absolute paths of the committed files of one sink, in the order of their commits."""
    return _files_of(read_log(storage, sink_id), storage, sink_id)


def sink_ids(storage: Storage) -> list[str]:
    """Ids of the sinks that ever wrote to this path."""
    names = storage.execute(ListFolder(ROOT_FOLDER))
    return [unquote(name.rstrip("/")) for name in names if name.endswith("/")]


def only_sink(storage: Storage, path: str) -> str:
    found = sink_ids(storage)
    if len(found) > 1:
        raise InvalidConfigError(f"{path} holds the sinks {', '.join(found)}: give the sink_id of one", sinks=found)
    if not found:
        raise NotFoundError(f"no sink has written to {path}", path=path)
    return found[0]


def read_committed(
    path: str | os.PathLike[str], sink_id: str | None = None, *, open_storage: Callable[[str], Storage] = open_storage
) -> pa.Table:
    """Read the committed rows of a sink, without Spark. sink_id may be omitted when the path has one sink.

    Raises NotFoundError when there is none, InvalidConfigError when there are several."""
    text = os.fspath(path)
    storage = open_storage(text)
    sink_id = only_sink(storage, text) if sink_id is None else sink_id
    paths = SinkPaths(sink_id)
    entries = read_log(storage, sink_id)
    schema = declared_schema(entries)
    if schema is None:
        raise NotFoundError(f"sink {sink_id} has written nothing to {text}", path=text)
    while True:
        files = current_files(entries)
        try:
            tables = [read_file(file.name, storage.execute(ReadFile(paths.data(file.name))), schema) for file in files]
        except ObjectMissingError:
            entries = read_log(storage, sink_id)
            if current_files(entries) == files:
                raise
            continue  # replaced meanwhile by a merge
        return pa.concat_tables([schema.empty_table(), *tables], promote_options="default").select(schema.names)


def read_file(name: str, data: bytes, schema: pa.Schema) -> pa.Table:
    """Rows of a committed file, with the columns of its partition; schema: the sink's, for what the file itself does not say."""
    partition = values_of(name)
    held = pa.schema([field for field in schema if field.name not in partition])
    return with_partition(decode(format_of(name), data, held), name, schema)


def declared_schema(entries: list[LogEntry]) -> pa.Schema | None:
    """Columns declared by the last owner."""
    texts = [entry.arrow_schema for entry in entries if isinstance(entry, OwnerEntry) and entry.arrow_schema]
    return schema_from_text(texts[-1]) if texts else None


def _files_of(entries: list[LogEntry], storage: Storage, sink_id: str) -> list[str]:
    paths, root = SinkPaths(sink_id), storage.root.rstrip("/")
    return [f"{root}/{paths.data(file.name)}" for file in current_files(entries)]
