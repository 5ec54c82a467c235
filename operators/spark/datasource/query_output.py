"""SHELL: the sink of a stock Spark query, as its driver and its tasks use it: for `hf.write_stream` and the format "holdfast"."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast
from uuid import uuid4

import cloudpickle
import pyarrow as pa
import xxhash

from holdfast.barriers.elements import Batch
from holdfast.barriers.sinks.log import SinkPaths, StagedFile
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.operators.sinks.files.committer import decode_committable
from holdfast.operators.sinks.files.parquet import FileSink
from holdfast.operators.sinks.queries.batches import FOLDER, QueryBatches, QueryPaths
from holdfast.operators.sinks.queries.outputs import LogOutput, SinkPort, TargetOutput
from holdfast.operators.sinks.targets.port import TargetPort
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.operators.sources.materialised import schema_text
from holdfast.operators.sources.spark_checkpoint import METADATA_BYTES_MAX, place_of_spark, query_id_of
from holdfast.statebackends.errors import CorruptStateError, FencedError, InvalidConfigError, ObjectMissingError
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Flow, ReadFile, StatFile, Storage, copies_links, run_flow

_OFFSETS_BYTES_MAX = 64 << 20

QuerySink: TypeAlias = StagedSink | FileSink
"""What takes the batches of a query."""

T = TypeVar("T")


def check_sink(sink: object, what: str) -> QuerySink:
    """Raises InvalidConfigError for a sink that a query can't write to. `what`: who would."""
    if not isinstance(sink, StagedSink | FileSink):
        raise InvalidConfigError(f"{what} writes to a StagedSink or a FileSink, not to a {type(sink).__name__}", setting="sink")
    if isinstance(sink, StagedSink) and sink.commit_interval_ms:
        raise InvalidConfigError("a query commits each batch: its trigger is the interval", setting="commit_interval_ms")
    if isinstance(sink, FileSink) and sink.merges:
        raise InvalidConfigError("files of a query are not merged: leave target_file_size out", setting="target_file_size")
    return sink


class QueryCheckpoint:
    """The checkpoint folder of a query, which the driver and all executors reach."""

    def __init__(self, location: str) -> None:
        """location: a path, or a URL such as Spark takes."""
        self.place = place_of_spark(location)
        self._spark = open_storage(self.place)
        self.storage = open_storage(f"{self.place}/{FOLDER}")
        """Of Holdfast's part."""

    def query_id(self) -> str:
        """Spark stores it before the first batch; it stays the same over restarts. Raises CorruptStateError."""
        path = f"{self.place}/metadata"
        try:
            return query_id_of(self._spark.execute(ReadFile("metadata", 0, METADATA_BYTES_MAX)), path)
        except ObjectMissingError as error:
            raise CorruptStateError(f"{path} is missing: Spark keeps the query's id there", path=path, reason="missing") from error

    def plan(self, batch_id: int) -> str:
        """As `BatchSeal.plan`."""
        try:
            content = self._spark.execute(ReadFile(f"offsets/{batch_id}", 0, _OFFSETS_BYTES_MAX))
        except ObjectMissingError as error:
            raise InvalidConfigError(
                f"{self.place} holds no offsets of batch {batch_id}: is it the query's checkpoint folder?", setting="checkpoint"
            ) from error
        return xxhash.xxh3_128_hexdigest(content)

    def check_open(self, batch_id: int) -> None:
        """Raise FencedError for a batch that Spark has stored to be done: another driver runs the query, or has run it on, and this
        one slept meanwhile."""
        if self._spark.execute(StatFile(f"commits/{batch_id}")) is not None:
            raise FencedError(f"{self.place}: batch {batch_id} is done: another driver has gone on with the query", path=self.place)

    def check_metadata(self) -> None:
        """Raise CorruptStateError for a folder in which the query's id can't be read; Spark would name no file. Before the query's
        first start there is none."""
        with contextlib.suppress(ObjectMissingError):
            query_id_of(self._spark.execute(ReadFile("metadata", 0, METADATA_BYTES_MAX)), f"{self.place}/metadata")


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """With which a start of a query begins."""

    query_id: str
    batch_id: int
    plan: str


class QueryOutput:
    """The sink of one start of a query, opened in the driver's place. Calls of its client are made on one thread."""

    def __init__(
        self,
        sink: QuerySink,
        schema: pa.Schema,
        checkpoint: QueryCheckpoint,
        first: FirstBatch,
        nonce: str,
        *,
        is_run: bool = False,
    ) -> None:
        """is_run: as of `QueryBatches`. Raises what its `begin` does, and FencedError for a batch that is done."""
        checkpoint.check_open(first.batch_id)
        paths = QueryPaths(first.query_id, sink.sink_id)
        self._target: CommitTarget | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-query")
        if isinstance(sink, StagedSink):
            # A copy: that of the tasks is never opened, and could not be pickled with its connection.
            self._target = cloudpickle.loads(cloudpickle.dumps(sink.target))
            folder = f"{checkpoint.storage.root.rstrip('/')}/{paths.staged_folder}"
            target = TargetOutput(paths, folder, sink.target.place, sink.rows_per_commit)
            self._port: Storage = TargetPort(cast(CommitTarget, self._target), checkpoint.storage)
            self.core = QueryBatches(paths, nonce, target, is_run=is_run)
        else:
            storage = sink.storage
            files = SinkPaths(sink.sink_id, in_place=copies_links(storage))
            has_folders = bool(sink.partition_by)
            log = LogOutput(paths, files, sink.path, schema_text(schema), _now_ms, has_folders=has_folders)
            self._port = SinkPort(checkpoint.storage, storage)
            self.core = QueryBatches(paths, nonce, log, is_run=is_run)
        try:
            self.run(self.core.begin(first.batch_id, first.plan))
        except BaseException:
            self.close()
            raise

    def run(self, flow: Flow[T]) -> T:
        return self._thread.submit(run_flow, flow, self._port).result()

    def close(self) -> None:
        """Close the client behind the call under way, if any. Does not wait."""
        if self._target is not None:
            self._thread.submit(self._target.close)
        self._thread.shutdown(wait=False)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


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


def stage_batch(
    writer: Operator,
    root: str,
    batches: Iterator[pa.RecordBatch],
    *,
    query_id: str,
    attempt: int,
    partition: int,
    batch_id: int,
) -> list[bytes]:
    """Stage the rows of one task, durably; returns committables. root: of `QueryCheckpoint.storage`."""
    task = _Task(open_storage(root), query_id, attempt, partition, batch_id + 1)
    stage_rows(writer, task, batches, batch_id + 1)
    return task.committables


def stage_rows(writer: Operator, task: _Task, batches: Iterator[pa.RecordBatch], checkpoint_id: int) -> None:
    """Write rows to staged files; durable when it returns."""
    writer.setup(cast(OperatorContext, task), cast(Output, task))
    for batch in batches:
        writer.process_batch(Batch(columns=batch), 0)
    writer.prepare_snapshot(checkpoint_id)
    work, storage = writer.snapshot_work(checkpoint_id), writer.snapshot_storage()
    if work is not None and storage is not None:
        run_flow(work, storage)


def files_of(committables: Iterable[bytes], sink_id: str) -> tuple[StagedFile, ...]:
    """The files that committables name, in their order."""
    return tuple(file for each in committables for file in decode_committable(each, sink_id).files)
