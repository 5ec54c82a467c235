"""SHELL: the rows of a Spark DataFrame become the files of a savepoint in Spark's tasks, none of them on the driver.

Two passes: one says whose subtask each row is, and Spark brings the rows of a subtask together; the other sorts and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import pyarrow as pa

from holdfast.operators.sources.dataframe_write import arrow_schema_of, map_in_arrow
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.state_processor.bootstrap import SUBTASK_COLUMN, RangeTask, WrittenRange, as_row

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

_REPORT = "subtask int, name string, length bigint, checksum string, error string, message string, fields string"
_REPORT_SCHEMA = pa.schema(
    [
        ("subtask", pa.int32()),
        ("name", pa.string()),
        ("length", pa.int64()),
        ("checksum", pa.string()),
        ("error", pa.string()),
        ("message", pa.string()),
        ("fields", pa.string()),
    ]
)

_Batches = Iterator[pa.RecordBatch]

_shipped: WeakSet[SparkContext] = WeakSet()


def spread_over_tasks(frame: DataFrame) -> Callable[[RangeTask], list[WrittenRange]]:
    """What has the rows of a frame, whose columns have the state's names, written by tasks: `bootstrapping.SpreadState.write`.

    It raises StorageUnavailableError when Spark gives up."""

    def write(task: RangeTask) -> list[WrittenRange]:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql.types import IntegerType, StructField, StructType

        _ship_once(frame.sparkSession.sparkContext)
        schema = arrow_schema_of(frame)
        numbered_type = StructType([*frame.schema.fields, StructField(SUBTASK_COLUMN, IntegerType(), False)])
        numbered = map_in_arrow(frame, _numbering(task, schema), numbered_type)
        subtasks = numbered[SUBTASK_COLUMN]
        if hasattr(numbered, "repartitionById"):
            spread = numbered.repartitionById(task.parallelism, subtasks)
        else:  # before PySpark 4.1: by hash, so that some tasks get the rows of several subtasks and others none
            spread = numbered.repartition(task.parallelism, subtasks)
        try:
            rows = map_in_arrow(spread, _writing(task, schema), _REPORT).collect()
        except (PySparkException, Py4JError) as error:  # of Python code, and of what Spark itself meets
            told = str(error).strip().splitlines() or [type(error).__name__]
            cause = next((line.strip() for line in reversed(told) if "holdfast.statebackends.errors." in line), told[0])
            raise StorageUnavailableError(
                f"operator {task.uid!r}, state {task.meta.name!r}: Spark could not write it: {cause}", path=task.location
            ) from error
        return [WrittenRange(**row.asDict()) for row in rows]

    return write


def _ship_once(context: SparkContext) -> None:
    """Each state of a savepoint asks; packing takes half a second."""
    from holdfast.operators.spark.launcher import ship_package

    if context not in _shipped:
        ship_package(context)
        _shipped.add(context)


def _numbering(task: RangeTask, schema: pa.Schema) -> Callable[[_Batches], _Batches]:
    def number(batches: _Batches) -> _Batches:
        for batch in batches:
            # Spark labels timestamps with the session's zone, and wants them back so; the instants are the same.
            for numbered in task.numbered([batch.cast(schema)]):
                yield batch.append_column(SUBTASK_COLUMN, numbered.column(SUBTASK_COLUMN))

    return number


def _writing(task: RangeTask, schema: pa.Schema) -> Callable[[_Batches], _Batches]:
    def write(batches: _Batches) -> _Batches:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        wanted = schema.append(pa.field(SUBTASK_COLUMN, pa.int32(), nullable=False))
        rows: Iterator[Any] = (batch.cast(wanted) for batch in batches)
        # The id is that of this try, of all stages: a repeated or speculative one has another.
        for written in task.write(rows, str(context.taskAttemptId())):
            yield pa.RecordBatch.from_pylist([as_row(written)], schema=_REPORT_SCHEMA)

    return write
