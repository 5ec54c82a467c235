"""SHELL: writes a Spark DataFrame once, in its own order, as chunk files below the state directory, and seals it.

One pass: each task writes the chunks of its partition and reports them; the order of partitions is the order of the DataFrame.
Files left by a failed or repeated task are in no manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa

from holdfast.operators.sources.materialised import (
    ChunkFile,
    checksum_of,
    find_sealed_flow,
    make_manifest,
    seal_flow,
)
from holdfast.statebackends.errors import InvalidConfigError, InvariantError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import WriteFile, run_flow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHUNK_ROWS = 65_536
CHUNK_BYTES = 32 * 1024 * 1024
"""A chunk is closed when it reaches CHUNK_ROWS, or this many bytes of uncompressed Arrow."""

_REPORT = "partition int, sequence int, name string, rows bigint, length bigint, checksum string"
_REPORT_SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("sequence", pa.int32()),
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("length", pa.int64()),
        ("checksum", pa.string()),
    ]
)


def arrow_schema_of(dataframe: DataFrame) -> pa.Schema:
    """Arrow schema of a DataFrame, timestamps as us in UTC. Raises InvalidConfigError naming the column."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    names = dataframe.columns
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidConfigError(f"the DataFrame has several columns named {', '.join(repeated)}: rename them", columns=repeated)
    fields = []
    for field in dataframe.schema.fields:
        try:
            fields.append(to_arrow_schema(StructType([field]), timezone="UTC").field(0))
        except PySparkException as error:
            raise InvalidConfigError(
                f"column {field.name} is {field.dataType.simpleString()}, which can't become an Arrow column: cast it in Spark SQL",
                column=field.name,
            ) from error
        if pa.types.is_time64(fields[-1].type) and fields[-1].type.unit == "ns":
            raise InvalidConfigError(f"column {field.name} holds nanoseconds: cast it to a string or a number", column=field.name)
    return pa.schema([field.remove_metadata() for field in fields])


def materialise(
    spark: SparkSession,
    dataframe: DataFrame,
    schema: pa.Schema,
    storage_root: str,
    job_id: str,
    uid: str,
    submission: int,
    *,
    fresh: bool,
) -> str:
    """Return the path of the sealed manifest; writes only when the job has none, or with `fresh`."""
    storage = open_storage(storage_root)
    path = JobPaths(job_id).input_manifest(uid, submission)
    if not fresh:
        sealed = run_flow(find_sealed_flow(job_id, uid), storage)
        if sealed is not None:
            return sealed
    writer = uuid4().hex
    folder = path.rsplit("/", 1)[0]
    chunks = write_chunks(dataframe, schema, storage_root, f"{folder}/{writer}", uid)
    run_flow(seal_flow(path, make_manifest(schema, chunks, writer)), storage)
    return path


def write_chunks(dataframe: DataFrame, schema: pa.Schema, storage_root: str, folder: str, uid: str) -> list[ChunkFile]:
    """Write the rows of a DataFrame below a folder that is their writer's alone; returns its chunks, in the DataFrame's order.

    Their names are relative to the folder above; their first rows are still to be set."""
    rows = map_in_arrow(dataframe, _chunk_writer(storage_root, folder, schema), _REPORT).collect()
    files = sorted(((row.partition, row.sequence), row) for row in rows)
    if len({key for key, _ in files}) != len(files):
        raise InvariantError(f"source {uid}: Spark reported a chunk of its input twice")
    writer = folder.rsplit("/", 1)[1]
    return [ChunkFile(f"{writer}/{row.name}", 0, row.rows, row.length, row.checksum) for _, row in files]


def map_in_arrow(dataframe: DataFrame, function: Callable[[Any], Any], schema: Any) -> DataFrame:
    """DataFrame.mapInArrow without its check for pandas, which is not needed, and with support for dots in column names.

    Of Spark Connect it is its own, which needs pandas anyhow."""
    if not hasattr(dataframe, "_jdf"):
        return dataframe.mapInArrow(function, schema)
    from pyspark.sql import DataFrame as ClassicDataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    udf = UserDefinedFunction(function, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    columns = [dataframe["`" + name.replace("`", "``") + "`"] for name in dataframe.columns]
    return ClassicDataFrame(dataframe._jdf.mapInArrow(udf(*columns)._jc, False, None), dataframe.sparkSession)


def _chunk_writer(
    storage_root: str, folder: str, schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that runs in Spark's tasks."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        storage = open_storage(storage_root)
        for sequence, chunk in enumerate(_chunks(batches, schema)):
            data = _encode(chunk)
            # The attempt id keeps a repeated task from writing to the files of the first.
            name = f"p{partition:06d}-{sequence:06d}-{context.taskAttemptId()}.arrow"
            storage.execute(WriteFile(f"{folder}/{name}", [data]))
            report = [partition, sequence, name, chunk.num_rows, len(data), checksum_of(data)]
            yield pa.RecordBatch.from_arrays(
                [pa.array([value], field.type) for value, field in zip(report, _REPORT_SCHEMA, strict=True)], schema=_REPORT_SCHEMA
            )

    return write


def _chunks(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables of up to CHUNK_ROWS rows and about CHUNK_BYTES bytes, never empty, in order."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        # Spark labels timestamps with the session's zone; the instants are the same.
        rest = batch.cast(schema)
        while rest.num_rows:
            part = rest.slice(0, CHUNK_ROWS - rows)
            rest = rest.slice(part.num_rows)
            held.append(part)
            rows, size = rows + part.num_rows, size + part.nbytes
            if rows >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield pa.Table.from_batches(held, schema)
                held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held, schema)


def _encode(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue())
