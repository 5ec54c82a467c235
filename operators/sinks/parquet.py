"""The exactly-once Parquet sink: its public class, and readers of the committed output.

`<path>/part-*.parquet` are for plain Parquet readers; our readers use the log and the files it names, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.barriers.messages import has_control_characters
from holdfast.barriers.sinklog import ROOT_FOLDER, CommitEntry, LogEntry, OwnerEntry, SinkPaths
from holdfast.operators.base import Operator
from holdfast.operators.sinks.committer import FileCommitter
from holdfast.operators.sinks.log import SinkSettings, read_log_flow
from holdfast.operators.sinks.writer import ParquetSinkWriter
from holdfast.operators.sources.materialised import schema_from_text, schema_text
from holdfast.statebackends.errors import GraphError, InvalidConfigError, NotFoundError
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFolder, ReadFile, Storage, run_flow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_SIZE_MAX = 128 * 1024 * 1024
"""Bytes of rows in memory at which a writer closes a file between two checkpoints."""


class ParquetSink:
    """Writes rows to Parquet files, exactly once: all rows of a checkpoint become visible together when it is complete.

    sink_id: identity of the output over restarts, restores and renamed jobs; "" takes the operator's uid. Two sinks may share a
    path if their ids differ. The rows must have a declared schema without nanoseconds."""

    needs_columns = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        sink_id: str = "",
        *,
        file_size_max: int = FILE_SIZE_MAX,
        name: str = "parquet",
        open_storage: Callable[[str], Storage] | None = None,
    ) -> None:
        text = os.fspath(path)
        if file_size_max < 1:
            raise InvalidConfigError(f"file_size_max must be at least 1, got {file_size_max}", setting="file_size_max")
        if not text:
            raise InvalidConfigError("a sink needs a path", setting="path")
        if has_control_characters(text) or ("://" in text and ".." in text.split("/")):
            # Staged files below such a path would be refused when a checkpoint names them.
            raise InvalidConfigError(f"a sink's path has no control characters, and no `..` in a URL: {text!r}", setting="path")
        self.name = name
        self._settings = SinkSettings(text if "://" in text else os.path.abspath(text), sink_id, file_size_max, open_storage)
        self._schema: pa.Schema | None = None

    def __repr__(self) -> str:
        return f"ParquetSink({self.path!r}, sink_id={self.sink_id!r})"

    @property
    def path(self) -> str:
        """Absolute path or URL of the output."""
        return self._settings.path

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

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        """Raises GraphError without a schema, or with one that Parquet does not preserve."""
        if schema is None:
            raise GraphError(f"sink {self.name} at {self.path} needs columns: declare returns= on the function before it")
        for field in schema:
            if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
                raise GraphError(f"sink {self.name}: column {field.name} holds nanoseconds, use microseconds", column=field.name)
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
        return self.sink_id or _only_sink(self.storage, self.path)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """Committed rows only, as of now; also while the job runs. Empty, with the sink's columns, if nothing is committed.

        The sink of another program's job is found by its path, and, where several write to it, by `sink_id`, its uid there. Raises
        NotFoundError when there is none, InvalidConfigError when there are several."""
        from pyspark.sql.pandas.types import from_arrow_schema

        storage, sink_id = self.storage, self._known_id()
        entries = read_log(storage, sink_id)
        schema = _schema_of(entries) or self._schema
        if schema is None:
            raise NotFoundError(
                f"sink {sink_id} at {self.path} has written nothing, and its columns are unknown", sink=sink_id
            )
        spark_schema = from_arrow_schema(schema, prefer_timestamp_ntz=True)
        files = _files_of(entries, storage, sink_id)
        if not files:
            return spark.createDataFrame([], spark_schema)
        return spark.read.schema(spark_schema).parquet(*(file if "://" in file else f"file://{file}" for file in files))


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


def _only_sink(storage: Storage, path: str) -> str:
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
    sink_id = _only_sink(storage, text) if sink_id is None else sink_id
    paths = SinkPaths(sink_id)
    entries = read_log(storage, sink_id)
    schema = _schema_of(entries)
    if schema is None:
        raise NotFoundError(f"sink {sink_id} has written nothing to {text}", path=text)
    tables = []
    for entry in entries:
        for file in entry.files if isinstance(entry, CommitEntry) else ():
            data = storage.execute(ReadFile(paths.data(file.name)))
            tables.append(pq.read_table(pa.BufferReader(data), page_checksum_verification=True))
    return pa.concat_tables([schema.empty_table(), *tables], promote_options="default").select(schema.names)


def _schema_of(entries: list[LogEntry]) -> pa.Schema | None:
    """Columns declared by the last owner."""
    texts = [entry.arrow_schema for entry in entries if isinstance(entry, OwnerEntry) and entry.arrow_schema]
    return schema_from_text(texts[-1]) if texts else None


def _files_of(entries: list[LogEntry], storage: Storage, sink_id: str) -> list[str]:
    paths, root = SinkPaths(sink_id), storage.root.rstrip("/")
    return [f"{root}/{paths.data(file.name)}" for entry in entries if isinstance(entry, CommitEntry) for file in entry.files]
