"""SHELL: `df.writeStream.format("holdfast")`: the rows of a stock Spark query, exactly once in a sink that its session registered.

Spark makes the writer in Python processes: one beside the driver before a batch is run, its tasks, and one beside the driver that
commits. What a process that commits knows is the batch, the options and what tasks told, among it the query and Spark's run of it.
The offsets of the batch lie in the checkpoint folder, which is an option. So the flows are those of `hf.write_stream`, with the run
in the place of the driver's start. Spark may end the process between two batches, or commit in another one.

`abort` may follow a commit that took effect: it deletes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from holdfast.operators.spark.datasource.batch_read import FORMAT
from holdfast.operators.spark.datasource.query_output import (
    FirstBatch,
    QueryCheckpoint,
    QueryOutput,
    QuerySink,
    files_of,
    stage_batch,
)
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    from holdfast.operators.base import Operator

_KNOWN = ("sink", "checkpointlocation")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a query that writes, parsed."""

    sink: str
    """Name under which the session has it."""
    checkpoint: str

    @staticmethod
    def parse(options: Mapping[str, str], registered: Mapping[str, QuerySink]) -> WriteOptions:
        """Raises InvalidConfigError naming the option."""
        given = {name.lower(): value for name, value in options.items()}
        for name in given:
            if name not in _KNOWN:
                raise _wrong(name, "is unknown; a query that writes has sink and checkpointLocation")
        sink, checkpoint = given.get("sink", ""), given.get("checkpointlocation", "")
        if sink not in registered:
            names = ", ".join(sorted(registered)) or "none"
            what = f"names no sink of the session: {sink!r}" if sink else "is missing"
            raise _wrong("sink", f"{what}. Registered are: {names}; hf.register_formats(spark, sinks={{name: sink}}) registers")
        if not checkpoint:
            raise _wrong("checkpointLocation", "is missing: give the query's checkpoint folder as an option, a setting does not do")
        if "://" not in checkpoint and not checkpoint.startswith(("/", "file:/")):
            raise _wrong("checkpointLocation", f"is relative, which each process takes for another folder: {checkpoint!r}")
        return WriteOptions(sink, checkpoint)


def _wrong(name: str, reason: str) -> InvalidConfigError:
    return InvalidConfigError(f"{FORMAT}: option {name!r} {reason}", setting=name)


@dataclass
class StagedRows(WriterCommitMessage):  # type: ignore[misc]
    """What one task has staged."""

    query_id: str
    run_id: str
    partition: int
    committables: tuple[bytes, ...]


class OutputStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """Writes the batches of one query."""

    def __init__(self, options: WriteOptions, sink: QuerySink, schema: pa.Schema, writer: Operator) -> None:
        self._options = options
        self._sink = sink
        self._schema = schema
        self._writer = writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        query_id, run_id, batch_id = (_property(task, name) for name in _PROPERTIES)
        checkpoint = QueryCheckpoint(self._options.checkpoint)
        committables = stage_batch(
            self._writer,
            checkpoint.storage.root,
            (batch.cast(self._schema) for batch in iterator),
            query_id=query_id,
            attempt=0,
            partition=task.partitionId(),
            batch_id=int(batch_id),
        )
        return StagedRows(query_id, run_id, task.partitionId(), tuple(committables))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        staged = sorted((each for each in messages if isinstance(each, StagedRows)), key=lambda each: each.partition)
        if not staged:
            return  # no task, and no row
        checkpoint = QueryCheckpoint(self._options.checkpoint)
        query_id = checkpoint.query_id()
        if staged[0].query_id != query_id:
            raise _wrong("checkpointLocation", f"is of query {query_id}, and this is {staged[0].query_id}")
        plan = checkpoint.plan(batchId)
        output = self._open(checkpoint, FirstBatch(query_id, batchId, plan), staged[0].run_id)
        core = output.core
        try:
            if not output.run(core.look_up(batchId, plan)):
                committables = (each for task in staged for each in task.committables)
                output.run(core.seal(batchId, plan, files_of(committables, self._sink.sink_id)))
            output.run(core.commit(batchId))
        except BaseException:
            _close()
            raise

    def _open(self, checkpoint: QueryCheckpoint, first: FirstBatch, run_id: str) -> QueryOutput:
        """The output as this process has it open, unless another process has committed since."""
        key = (checkpoint.place, self._sink.sink_id, run_id)
        for known, output in _opened:
            if known == key and output.run(output.core.is_current()):
                return output
        _close()
        output = QueryOutput(self._sink, self._schema, checkpoint, first, run_id.replace("-", ""), is_run=True)
        _opened.append((key, output))
        return output

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Staged rows are cleared away behind a later batch; what was committed stays."""


_PROPERTIES = ("sql.streaming.queryId", "spark.jobGroup.id", "streaming.sql.batchId")
"""That Spark gives the tasks of a micro-batch: its query, its run, its number."""

_opened: list[tuple[tuple[str, str, str], QueryOutput]] = []
"""Of this process: one at most."""


def _close() -> None:
    while _opened:
        _opened.pop()[1].close()


def _property(task: object, name: str) -> str:
    value = getattr(task, "getLocalProperty")(name)  # noqa: B009  (PySpark's types lack it)
    if not value:
        raise InvalidConfigError(f"{FORMAT}: Spark did not tell a task {name!r}: only micro-batches can be written", setting=FORMAT)
    return str(value)
