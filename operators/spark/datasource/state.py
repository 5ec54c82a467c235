"""State and Spark, both ways: `spark.read.format("holdfast-state")`, and the rows of a DataFrame written as files of a savepoint.

Reading gives the rows of one state of a snapshot, a task for each range of key groups, or the changes since another snapshot;
`holdfast-metadata` gives operators and states with types and sizes. Each task opens the snapshot itself and checks the files that
it reads; nothing is unpickled. PySpark does not pass a Python data source the columns of a query, so the columns to read are an
option; it pushes filters down only if the session is configured so, therefore the key groups to read are an option, too.

SHELL: writing happens in Spark's tasks, none of it on the driver, in two passes: one computes the subtask of each row, so that
Spark brings the rows of a subtask together; the other sorts and writes them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from holdfast.operators.sources.dataframe_write import arrow_schema_of, map_in_arrow
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import describe_absence, metadata_path
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.state_processor.bootstrap import SUBTASK_COLUMN, RangeTask, WrittenRange, as_row
from holdfast.statebackends.state_processor.change_feed import ChangeFeed
from holdfast.statebackends.state_processor.contents import SCHEMA as METADATA_SCHEMA
from holdfast.statebackends.state_processor.contents import (
    StoredSnapshot,
    StoredState,
    check_contents,
    metadata_table,
    place_of_snapshot,
)
from holdfast.statebackends.state_processor.rows import choose_columns, state_batches, state_schema
from holdfast.statebackends.storage.port import ListFolder, run_flow

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


FORMAT = "holdfast-state"
DIGITS_MAX = 9
METADATA_FORMAT = "holdfast-metadata"
_OPTIONS = ("path", "uid", "state", "columns", "key_groups", "partitions", "changes_from")


class _Pointer(msgspec.Struct):
    """A `_metadata` file that holds the decision on an id in place of a snapshot."""

    decision: str
    folder: str = ""


def open_for_reading(location: str, *, follow: bool = True) -> StoredSnapshot:
    """Open the snapshot in a folder, following a savepoint's pointer in its job. Raises NotFoundError, CorruptStateError ..."""
    place = place_of_snapshot(location)
    path = metadata_path(place.folder)
    try:
        content = run_flow(read_metadata_file(path), place.storage)
    except ObjectMissingError as error:
        reason = describe_absence(place.location, place.storage.execute(ListFolder(place.folder)))
        raise NotFoundError(f"{place.location} holds no snapshot: {reason}", path=place.location) from error
    try:
        pointer = decode_json(content, _Pointer)
    except UNDECODABLE:
        snapshot = StoredSnapshot(decode_metadata(content, metadata_path(place.location)), place.storage, place.folder)
        check_contents(snapshot)
        return snapshot
    if pointer.decision != "savepoint" or not follow:
        raise NotFoundError(f"{place.location} is {pointer.decision}: it has no state", path=place.location)
    is_whole = "://" in pointer.folder or pointer.folder.startswith("/")
    return open_for_reading(pointer.folder if is_whole else f"{place.storage.root}/{pointer.folder}", follow=False)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a `spark.read`, parsed."""

    path: str
    uid: str
    state: str
    columns: tuple[str, ...] | None = None
    key_groups: KeyGroupRange | None = None
    partitions: int = 0
    """0: one for each subtask that wrote the state."""
    changes_from: str = ""
    """An older snapshot; the changes of the state since then are read in place of the state."""

    @staticmethod
    def parse(options: Mapping[str, str]) -> ReadOptions:
        """Parse options. Raises InvalidConfigError naming the option."""
        for name in options:
            if name.lower() not in _OPTIONS:
                raise _wrong(name, f"is unknown; known are: {', '.join(_OPTIONS)}")
        missing = [name for name in ("path", "uid", "state") if not options.get(name)]
        if missing:
            raise _wrong(missing[0], "is missing")
        columns = options.get("columns")
        if columns is not None and options.get("changes_from"):
            raise _wrong("columns", "is not for changes_from: select the columns from the DataFrame")
        partitions = options.get("partitions", "0")
        if not partitions.isdecimal() or len(partitions) > DIGITS_MAX:
            raise _wrong("partitions", f"{partitions!r} is not a number of at most {DIGITS_MAX} digits")
        return ReadOptions(
            options["path"],
            options["uid"],
            options["state"],
            None if columns is None else tuple(name.strip() for name in columns.split(",")),
            _parse_range(options["key_groups"]) if "key_groups" in options else None,
            int(partitions),
            options.get("changes_from", ""),
        )


def _wrong(name: str, reason: str) -> InvalidConfigError:
    return InvalidConfigError(f"{FORMAT}: option {name!r} {reason}", setting=name)


def _parse_range(text: str) -> KeyGroupRange:
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*:\s*([0-9]{1,9})\s*", text)
    if match is None or int(match[1]) > int(match[2]):
        raise _wrong("key_groups", f"{text!r} is not a range such as 0:16, of which the last is not read")
    return KeyGroupRange(int(match[1]), int(match[2]))


class StateRange(InputPartition):  # type: ignore[misc]
    """Key groups read by one task; None for operator state, which has none."""

    def __init__(self, key_groups: KeyGroupRange | None) -> None:
        super().__init__(key_groups)
        self.key_groups = key_groups


class StateDataSource(DataSource):  # type: ignore[misc]
    """Registered by `register_state_source`; made by Spark, in a Python process beside the driver."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return _spark_schema(StateReader(ReadOptions.parse(self.options)).schema())

    def reader(self, schema: StructType) -> DataSourceReader:
        return StateReader(ReadOptions.parse(self.options), to_arrow_schema(schema, timezone="UTC"))


def _spark_schema(schema: pa.Schema) -> StructType:
    """Convert a schema. Raises InvalidConfigError for a column type that Spark lacks."""
    from pyspark.errors import PySparkException

    for field in schema:
        try:
            from_arrow_schema(pa.schema([field]))
        except PySparkException as error:
            raise InvalidConfigError(
                f"column {field.name!r} is {field.type}, which Spark has no type for: leave it out (option columns)",
                column=field.name,
            ) from error
    return from_arrow_schema(schema.remove_metadata())


class StateReader(DataSourceReader):  # type: ignore[misc]
    """Reads the state that the options name. `arrow_schema`: columns as Spark wants them; None: as stored."""

    def __init__(self, options: ReadOptions, arrow_schema: pa.Schema | None = None) -> None:
        self._options = options
        self._arrow_schema = arrow_schema

    def schema(self) -> pa.Schema:
        """Schema of the rows, as stored."""
        if self._options.changes_from:
            return self._feed().schema()
        snapshot, state = self._open()
        with snapshot.reader() as reader:
            schema = state_schema(reader, state)
        columns = self._options.columns
        return schema if columns is None else choose_columns(state, schema, columns)

    def partitions(self) -> list[InputPartition]:
        """Ranges of key groups: those of the old subtasks, or `partitions` of equal length."""
        if self._options.changes_from:
            feed = self._feed()
            if feed.max_parallelism is None and self._options.key_groups is None:
                return [StateRange(None)]
            state = feed.sides[1] or feed.sides[0]
            assert state is not None
            least = state.operator.parallelism  # a key group of the other side may be in no file of this one
        else:
            _, state = self._open()
            least = 0
        wanted = self._options.key_groups
        if not state.is_keyed:
            if wanted is not None:
                raise _wrong("key_groups", f"is not for operator state, which {state.meta.name!r} is")
            return [StateRange(None)]
        groups = KeyGroupRange(0, state.operator.max_parallelism)
        wanted = groups if wanted is None else groups.intersection(wanted)
        count = min(self._options.partitions or least, len(wanted))
        if count:
            cuts = [wanted.start + len(wanted) * index // count for index in range(count + 1)]
            ranges = [KeyGroupRange(start, stop) for start, stop in itertools.pairwise(cuts)]
        else:
            found = {part.key_groups.intersection(wanted) for part in state.keyed}
            ranges = sorted(each for each in found if len(each))
        return [StateRange(each) for each in ranges] or [StateRange(KeyGroupRange(0, 0))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, StateRange)
        if self._options.changes_from:
            for batch in self._feed().batches(partition.key_groups):
                yield batch if self._arrow_schema is None else batch.cast(self._arrow_schema)
            return
        snapshot, state = self._open()
        with snapshot.reader() as reader:
            schema = state_schema(reader, state)
            columns = self._options.columns
            for batch in state_batches(reader, state, schema, partition.key_groups, columns=columns):
                yield self._converted(batch, state)

    def _converted(self, batch: pa.RecordBatch, state: StoredState) -> pa.RecordBatch:
        if self._arrow_schema is None:
            return batch
        try:
            return batch.cast(self._arrow_schema)
        except (pa.ArrowException, ValueError) as error:
            raise state.corrupt(f"does not fit the columns that were asked for: {error}") from error

    def _feed(self) -> ChangeFeed:
        options = self._options
        return ChangeFeed.of(open_for_reading(options.changes_from), open_for_reading(options.path), options.uid, options.state)

    def _open(self) -> tuple[StoredSnapshot, StoredState]:
        options = self._options
        snapshot = open_for_reading(options.path)
        return snapshot, snapshot.state(options.uid, options.state)


class MetadataDataSource(DataSource):  # type: ignore[misc]
    """Operators and states of a snapshot, from `_metadata`; its one option is `path`."""

    @classmethod
    def name(cls) -> str:
        return METADATA_FORMAT

    def schema(self) -> StructType:
        return _spark_schema(METADATA_SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        unknown = [name for name in self.options if name.lower() != "path"]
        if unknown or not self.options.get("path"):
            wrong = unknown[0] if unknown else "path"
            reason = "is unknown; known is: path" if unknown else "is missing"
            raise InvalidConfigError(f"{METADATA_FORMAT}: option {wrong!r} {reason}", setting=wrong)
        return MetadataReader(self.options["path"])


class MetadataReader(DataSourceReader):  # type: ignore[misc]
    """Reads the one file in one task."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from metadata_table(open_for_reading(self._path)).to_batches()


def register_state_source(spark: SparkSession) -> None:
    """Register the formats "holdfast-state" and "holdfast-metadata" in a session, and ship our packages to its executors.
    Idempotent."""
    from holdfast.operators.spark.access import need_classic
    from holdfast.operators.spark.launcher import ship_package

    need_classic(spark, "register_formats")
    ship_package(spark.sparkContext)
    spark.dataSource.register(StateDataSource)
    spark.dataSource.register(MetadataDataSource)


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
    """Make the function that writes the rows of a frame, whose columns have the state's names, in tasks:
    `bootstrapping.SpreadState.write`.

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
        else:  # before PySpark 4.1: by hash, so that some tasks get rows of several subtasks and others none
            spread = numbered.repartition(task.parallelism, subtasks)
        try:
            rows = map_in_arrow(spread, _writing(task, schema), _REPORT).collect()
        except (PySparkException, Py4JError) as error:  # of Python code, and of Spark itself
            lines = str(error).strip().splitlines() or [type(error).__name__]
            cause = next((line.strip() for line in reversed(lines) if "holdfast.statebackends.errors." in line), lines[0])
            raise StorageUnavailableError(
                f"operator {task.uid!r}, state {task.meta.name!r}: Spark could not write it: {cause}", path=task.location
            ) from error
        return [WrittenRange(**row.asDict()) for row in rows]

    return write


def _ship_once(context: SparkContext) -> None:
    """Ship once: each state of a savepoint calls this, and packing takes half a second."""
    from holdfast.operators.spark.launcher import ship_package

    if context not in _shipped:
        ship_package(context)
        _shipped.add(context)


def _numbering(task: RangeTask, schema: pa.Schema) -> Callable[[_Batches], _Batches]:
    def number(batches: _Batches) -> _Batches:
        for batch in batches:
            # Spark labels timestamps with the session's zone, and expects them so; the instants are the same.
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
        # Task attempt ids are unique over all stages: a repeated or speculative task has another.
        for written in task.write(rows, str(context.taskAttemptId())):
            yield pa.RecordBatch.from_pylist([as_row(written)], schema=_REPORT_SCHEMA)

    return write
