"""SHELL: `hf.write_stream`: the rows of a stock Spark query, exactly once in a target.

Tasks stage a batch with the sink's own writer, the driver commits it. Spark tells a batch of `foreachBatch` as done only when that
returned; whatever fails before is run again, and finds what was sealed and committed (`query_batches`)."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import cloudpickle
import pyarrow as pa
import xxhash

from holdfast.barriers.elements import Batch
from holdfast.barriers.sinklog import StagedFile
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.operators.sinks.committer import decode_committable
from holdfast.operators.sinks.query_batches import FOLDER, QueryBatches, QueryPaths
from holdfast.operators.sinks.staged import StagedSink
from holdfast.operators.sinks.target import CommitTarget
from holdfast.operators.sinks.target_port import TargetPort
from holdfast.operators.sources.dataframe_write import arrow_schema_of, map_in_arrow
from holdfast.operators.spark.packaging import modules_by_value, user_modules
from holdfast.statebackends.errors import InvalidConfigError, ObjectMissingError
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Flow, ReadFile, Storage, run_flow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

_REPORT = "partition int, committable binary"
_REPORT_SCHEMA = pa.schema([("partition", pa.int32()), ("committable", pa.binary())])
_METADATA_BYTES_MAX = 1 << 20
_OFFSETS_BYTES_MAX = 64 << 20


def write_stream(
    df: DataFrame,
    sink: StagedSink,
    checkpoint: str,
    *,
    output_mode: str = "append",
    trigger: Mapping[str, Any] | None = None,
    query_name: str = "",
) -> StreamingQuery:
    """Start a query that writes each batch of a streaming DataFrame to a sink, exactly once: its rows and its position in one step.

    sink: a StagedSink, such as those of the connectors; its sink_id is the query's name, or its id, if it has none.
    checkpoint: the query's checkpoint folder, a path or an s3a:// URL that the driver and all executors reach; rows wait below it.
    output_mode, trigger: as of `DataStreamWriter`: `trigger={"availableNow": True}`.

    Raises InvalidConfigError for what it can't write, and what the sink's check of columns does. The query fails with FencedError
    when a later start of it has taken the target, with OutputMayRepeatError when its checkpoint was put back behind what is
    committed."""
    _check(df, sink, checkpoint)
    schema = arrow_schema_of(df)
    batches = _Batches(sink.renamed(sink.sink_id or query_name), schema, checkpoint)
    from holdfast.operators.spark.launcher import ship_package

    ship_package(df.sparkSession.sparkContext)
    writer = df.writeStream.outputMode(output_mode).foreachBatch(batches.write).option("checkpointLocation", checkpoint)
    if query_name:
        writer = writer.queryName(query_name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    query = writer.start()
    threading.Thread(target=_close_behind, args=(query, batches), name="holdfast-query", daemon=True).start()
    return query


def _check(df: DataFrame, sink: object, checkpoint: str) -> None:
    if not df.isStreaming:
        raise InvalidConfigError("write_stream writes a streaming DataFrame: this one is a batch", setting="df")
    if not isinstance(sink, StagedSink):
        raise InvalidConfigError(f"write_stream writes to a StagedSink, not to a {type(sink).__name__}", setting="sink")
    if sink.commit_interval_ms:
        raise InvalidConfigError("a query commits each batch: its trigger is the interval", setting="commit_interval_ms")
    if not checkpoint:
        raise InvalidConfigError("a query needs a checkpoint folder of its own", setting="checkpoint")


def _close_behind(query: StreamingQuery, batches: _Batches) -> None:
    with contextlib.suppress(Exception):  # its failure is the user's to see, by the query
        query.awaitTermination()
    batches.close()


class _Batches:
    """What `foreachBatch` calls."""

    def __init__(self, sink: StagedSink, schema: pa.Schema, checkpoint: str) -> None:
        self._sink = sink
        self._schema = schema
        self._writer = sink.create_writer(schema)
        self._place = checkpoint.replace("s3a://", "s3://", 1).removeprefix("file://").rstrip("/")
        self._checkpoint = open_storage(self._place)
        self._storage = open_storage(f"{self._place}/{FOLDER}")
        self._port: TargetPort | None = None
        self._target: CommitTarget | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-query")
        """Calls the target, always: a client may belong to one thread."""
        self._core: QueryBatches | None = None

    def write(self, frame: DataFrame, batch_id: int) -> None:
        core = self._core or self._begin()
        plan = self._plan(batch_id)
        if self._run(core.look_up(batch_id, plan)):
            # Spark expects that a batch is run: the next one needs the state that its tasks store.
            frame.write.format("noop").mode("overwrite").save()
        else:
            self._run(core.seal(batch_id, plan, self._stage(frame, batch_id, core)))
        self._run(core.commit(batch_id))

    def _begin(self) -> QueryBatches:
        query_id = self._query_id()
        if not self._sink.sink_id:
            self._sink.sink_id = query_id
        # A copy: that of the tasks is never opened, and could not be pickled with its connection.
        target: CommitTarget = cloudpickle.loads(cloudpickle.dumps(self._sink.target))
        paths = QueryPaths(query_id, self._sink.sink_id)
        folder = f"{self._storage.root.rstrip('/')}/{paths.staged_folder}"
        core = QueryBatches(paths, folder, uuid4().hex, target.place, self._sink.rows_per_commit)
        self._port, self._target = TargetPort(target, self._storage), target
        self._run(core.begin())
        self._core = core
        return core

    def _run(self, flow: Flow[Any]) -> Any:
        assert self._port is not None
        return self._thread.submit(run_flow, flow, self._port).result()

    def _query_id(self) -> str:
        """Spark stores it before the first batch; it stays the same over restarts."""
        content = self._checkpoint.execute(ReadFile("metadata", 0, _METADATA_BYTES_MAX))
        found = json.loads(content).get("id")
        if not isinstance(found, str) or not found.replace("-", "").isalnum():
            raise InvalidConfigError(f"{self._place}/metadata holds no query id", setting="checkpoint")
        return found

    def _plan(self, batch_id: int) -> str:
        try:
            content = self._checkpoint.execute(ReadFile(f"offsets/{batch_id}", 0, _OFFSETS_BYTES_MAX))
        except ObjectMissingError as error:
            raise InvalidConfigError(
                f"{self._place} holds no offsets of batch {batch_id}: is it the query's checkpoint folder?", setting="checkpoint"
            ) from error
        return xxhash.xxh3_128_hexdigest(content)

    def _stage(self, frame: DataFrame, batch_id: int, core: QueryBatches) -> tuple[StagedFile, ...]:
        task = _staging(self._writer, self._schema, self._storage.root, core.paths.job_id, core.attempt, batch_id)
        with modules_by_value(user_modules()):
            rows = map_in_arrow(frame, task, _REPORT).collect()
        reports = sorted(rows, key=lambda row: row.partition)
        found = (decode_committable(bytes(row.committable), self._sink.sink_id) for row in reports)
        return tuple(file for committable in found for file in committable.files)

    def close(self) -> None:
        """Close the target behind the call under way, if any. Does not wait."""
        if self._target is not None:
            self._thread.submit(self._target.close)
        self._thread.shutdown(wait=False)


class _Task:
    """OperatorContext and Output of a sink's writer within a Spark task: as much of them as it uses."""

    parallelism = max_parallelism = 1
    job_name = uid = name = "write_stream"

    def __init__(self, storage: Storage, job_id: str, attempt: int, subtask: int, checkpoint_id: int) -> None:
        self.storage = storage
        self.job_id = job_id
        self.attempt = attempt
        self.subtask = subtask
        self.nonce = uuid4().hex  # a task that Spark runs twice writes other files
        self.restored_checkpoint_id = checkpoint_id - 1
        self.committables: list[bytes] = []

    def submit_flow(self, flow: Flow[Any], storage: Storage, done: Callable[[Any, BaseException | None], None]) -> None:
        run_flow(flow, storage)

    def collect(self, batch: Batch) -> None:
        self.committables += batch.columns().column("committable").to_pylist()


def _staging(
    writer: Operator, schema: pa.Schema, root: str, job_id: str, attempt: int, batch_id: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the function that runs in Spark's tasks."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        spark = TaskContext.get()
        assert spark is not None
        task = _Task(open_storage(root), job_id, attempt, spark.partitionId(), batch_id + 1)
        stage_rows(writer, task, (batch.cast(schema) for batch in batches), batch_id + 1)
        for committable in task.committables:
            report = [pa.array([spark.partitionId()], pa.int32()), pa.array([committable], pa.binary())]
            yield pa.RecordBatch.from_arrays(report, schema=_REPORT_SCHEMA)

    return stage


def stage_rows(writer: Operator, task: _Task, batches: Iterator[pa.RecordBatch], checkpoint_id: int) -> None:
    """Write rows to staged files; durable when it returns."""
    writer.setup(cast(OperatorContext, task), cast(Output, task))
    for batch in batches:
        writer.process_batch(Batch(columns=batch), 0)
    writer.prepare_snapshot(checkpoint_id)
    work, storage = writer.snapshot_work(checkpoint_id), writer.snapshot_storage()
    if work is not None and storage is not None:
        run_flow(work, storage)
