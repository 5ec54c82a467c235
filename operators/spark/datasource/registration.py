"""The format "holdfast" of Spark: what a session registers, and Spark makes in a Python process beside the driver."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING
from uuid import uuid4
from weakref import WeakKeyDictionary

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from holdfast.operators.spark.datasource.batch_read import FORMAT, OutputOptions, OutputReader
from holdfast.operators.spark.datasource.query_output import QuerySink, check_sink
from holdfast.operators.spark.datasource.state import register_state_source
from holdfast.operators.spark.packaging import modules_by_value, user_modules
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter
    from pyspark.sql.types import StructType

    from holdfast.operators.base import Operator


class OutputDataSource(DataSource):  # type: ignore[misc]
    """Registered by `register_formats`; made by Spark, in a Python process beside the driver."""

    sinks: Mapping[str, QuerySink] = MappingProxyType({})
    """Those of the session, by name."""
    registration = ""
    """Drawn for these sinks."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        options = OutputOptions.parse(self.options, streaming=True)
        return from_arrow_schema(options.open().schema(options.columns).remove_metadata(), prefer_timestamp_ntz=True)

    def reader(self, schema: StructType) -> DataSourceReader:
        return OutputReader(OutputOptions.parse(self.options), to_arrow_schema(schema, timezone="UTC"))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            from holdfast.operators.spark.datasource.stream_read import OutputStreamReader
        except ImportError as error:
            raise InvalidConfigError(f"{FORMAT}: a stream of committed rows needs PySpark 4.2", package="pyspark") from error
        return OutputStreamReader(OutputOptions.parse(self.options, streaming=True), to_arrow_schema(schema, timezone="UTC"))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        try:
            from holdfast.operators.spark.datasource.stream_write import OutputStreamWriter, WriteOptions
        except ImportError as error:
            raise InvalidConfigError(f"{FORMAT}: writing needs PySpark 4.1; hf.write_stream does not", package="pyspark") from error
        if overwrite:
            raise InvalidConfigError(f"{FORMAT}: outputMode complete would replace what is committed", setting="outputMode")
        options = WriteOptions.parse(self.options, self.sinks)
        sink, columns = self.sinks[options.sink], to_arrow_schema(schema, timezone="UTC")
        return OutputStreamWriter(options, sink, columns, self._writer(options.sink, columns))

    def _writer(self, name: str, columns: pa.Schema) -> Operator:
        """The sink's check of columns, which may look at the outside, is made once in a process."""
        key = (self.registration, name, str(columns))
        if key not in _WRITERS:
            _WRITERS.clear()
            _WRITERS[key] = self.sinks[name].create_writer(columns)
        return _WRITERS[key]


_WRITERS: dict[tuple[str, str, str], Operator] = {}
_SINKS: WeakKeyDictionary[SparkSession, dict[str, QuerySink]] = WeakKeyDictionary()


def register_formats(spark: SparkSession, sinks: Mapping[str, QuerySink] | None = None) -> None:
    """Register the format "holdfast", and those of `register_state_source`, in a session, and ship our packages to its executors.
    Idempotent.

    sinks: by names of your own, what `df.writeStream.format("holdfast").option("sink", name)` may write to: StagedSinks and
    FileSinks. A sink without a sink_id gets the name. Those of earlier calls stay; a name that comes again is replaced for queries
    that start from then on. Raises InvalidConfigError for another kind of sink."""
    register_state_source(spark)
    known = _SINKS.setdefault(spark, {})
    for name, sink in (sinks or {}).items():
        if not name:
            raise InvalidConfigError("a sink needs a name", setting="sinks")
        known[name] = check_sink(sink, f"format {FORMAT!r}").renamed(sink.sink_id or name)
    if not known:
        spark.dataSource.register(OutputDataSource)
        return
    # Not a class of this module by its name, so that it is pickled with its sinks.
    held = {"sinks": dict(known), "registration": uuid4().hex}
    with modules_by_value(user_modules()):
        spark.dataSource.register(type("SessionDataSource", (OutputDataSource,), held))
