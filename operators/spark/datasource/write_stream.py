"""SHELL: `hf.write_stream`: the rows of a stock Spark query, exactly once in a sink.

Tasks stage a batch with the sink's own writer, the driver commits it. Spark tells a batch of `foreachBatch` as done only when that
returned; whatever fails before is run again, and finds what was sealed and committed (`query_batches`)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa

from holdfast.barriers.sinks.log import StagedFile
from holdfast.operators.base import Operator
from holdfast.operators.sources.dataframe_write import arrow_schema_of, map_in_arrow
from holdfast.operators.spark.access import need_classic
from holdfast.operators.spark.datasource.query_output import (
    FirstBatch,
    QueryCheckpoint,
    QueryOutput,
    QuerySink,
    check_sink,
    files_of,
    stage_batch,
)
from holdfast.operators.spark.packaging import modules_by_value, user_modules
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

_REPORT = "partition int, committable binary"
_REPORT_SCHEMA = pa.schema([("partition", pa.int32()), ("committable", pa.binary())])


def write_stream(
    df: DataFrame,
    sink: QuerySink,
    checkpoint: str | os.PathLike[str],
    *,
    output_mode: str = "append",
    trigger: Mapping[str, Any] | None = None,
    query_name: str = "",
) -> StreamingQuery:
    """Start a query that writes each batch of a streaming DataFrame to a sink, exactly once: its rows and its position in one step.

    sink: a StagedSink, such as those of the connectors, or a FileSink; its sink_id is the query's name, if it has none: by it the
    target knows its output, also when the query begins anew with another checkpoint.
    checkpoint: the query's checkpoint folder, a path or an s3a:// URL that the driver and all executors reach; rows of a StagedSink
    wait below it, those of a FileSink beside its output.
    output_mode, trigger: as of `DataStreamWriter`: `trigger={"availableNow": True}`.

    Raises InvalidConfigError for what it can't write, CorruptStateError for a checkpoint in which the query's id can't be read, and
    what the sink's check of columns does. The query fails with FencedError
    when a later start of it has taken the output, with OutputMayRepeatError when its checkpoint was put back behind what is
    committed."""
    need_classic(df, "write_stream")
    place = _check(df, sink, os.fspath(checkpoint), query_name)
    schema = arrow_schema_of(df)
    batches = _Batches(sink.renamed(sink.sink_id or query_name), schema, place)
    from holdfast.operators.spark.launcher import ship_package

    ship_package(df.sparkSession.sparkContext)
    writer = df.writeStream.outputMode(output_mode).foreachBatch(batches.write).option("checkpointLocation", place)
    if query_name:
        writer = writer.queryName(query_name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    query = writer.start()
    threading.Thread(target=_close_behind, args=(query, batches), name="holdfast-query", daemon=True).start()
    return query


def _check(df: DataFrame, sink: object, checkpoint: str, query_name: str) -> str:
    """The checkpoint folder, which is the same one wherever it is read."""
    if not df.isStreaming:
        raise InvalidConfigError("write_stream writes a streaming DataFrame: this one is a batch", setting="df")
    if not (check_sink(sink, "write_stream").sink_id or query_name):
        raise InvalidConfigError(
            "the sink of a query needs a sink_id, or the query a name: by its id alone a query that begins anew, with another "
            "checkpoint, would be another sink, and repeat all rows",
            setting="sink_id",
        )
    if not checkpoint:
        raise InvalidConfigError("a query needs a checkpoint folder of its own", setting="checkpoint")
    is_relative = "://" not in checkpoint and not checkpoint.startswith(("/", "file:/"))
    place = os.path.abspath(checkpoint) if is_relative else checkpoint
    QueryCheckpoint(place).check_metadata()
    return place


def _close_behind(query: StreamingQuery, batches: _Batches) -> None:
    with contextlib.suppress(Exception):  # its failure is the user's to see, by the query
        query.awaitTermination()
    batches.close()


class _Batches:
    """What `foreachBatch` calls."""

    def __init__(self, sink: QuerySink, schema: pa.Schema, checkpoint: str) -> None:
        self._sink = sink
        self._schema = schema
        self._writer = sink.create_writer(schema)
        self._checkpoint = QueryCheckpoint(checkpoint)
        self._output: QueryOutput | None = None

    def write(self, frame: DataFrame, batch_id: int) -> None:
        plan = self._checkpoint.plan(batch_id)
        output = self._output or self._begin(batch_id, plan)
        if output.run(output.core.look_up(batch_id, plan)):
            # Spark expects that a batch is run: the next one needs the state that its tasks store.
            frame.write.format("noop").mode("overwrite").save()
        else:
            output.run(output.core.seal(batch_id, plan, self._stage(frame, batch_id, output)))
        output.run(output.core.commit(batch_id))

    def _begin(self, batch_id: int, plan: str) -> QueryOutput:
        first = FirstBatch(self._checkpoint.query_id(), batch_id, plan)
        self._output = QueryOutput(self._sink, self._schema.remove_metadata(), self._checkpoint, first, uuid4().hex)
        return self._output

    def _stage(self, frame: DataFrame, batch_id: int, output: QueryOutput) -> tuple[StagedFile, ...]:
        core = output.core
        task = _staging(self._writer, self._schema, self._checkpoint.storage.root, core.paths.job_id, core.attempt, batch_id)
        with modules_by_value(user_modules()):
            rows = map_in_arrow(frame, task, _REPORT).collect()
        reports = sorted(rows, key=lambda row: row.partition)
        return files_of((bytes(row.committable) for row in reports), self._sink.sink_id)

    def close(self) -> None:
        """Does not wait."""
        if self._output is not None:
            self._output.close()


def _staging(
    writer: Operator, schema: pa.Schema, root: str, query_id: str, attempt: int, batch_id: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that runs in Spark's tasks."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        spark = TaskContext.get()
        assert spark is not None
        partition, rows = spark.partitionId(), (batch.cast(schema) for batch in batches)
        staged = stage_batch(writer, root, rows, query_id=query_id, attempt=attempt, partition=partition, batch_id=batch_id)
        for committable in staged:
            report = [pa.array([partition], pa.int32()), pa.array([committable], pa.binary())]
            yield pa.RecordBatch.from_arrays(report, schema=_REPORT_SCHEMA)

    return stage
