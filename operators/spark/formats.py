"""The format "holdfast" of Spark: what a session registers, and Spark makes in a Python process beside the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from holdfast.operators.spark.output_source import FORMAT, OutputOptions, OutputReader
from holdfast.operators.spark.state_source import register_state_source
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader
    from pyspark.sql.types import StructType


class OutputDataSource(DataSource):  # type: ignore[misc]
    """Registered by `register_formats`; made by Spark, in a Python process beside the driver."""

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
            from holdfast.operators.spark.output_stream import OutputStreamReader
        except ImportError as error:
            raise InvalidConfigError(f"{FORMAT}: a stream of committed rows needs PySpark 4.2", package="pyspark") from error
        return OutputStreamReader(OutputOptions.parse(self.options, streaming=True), to_arrow_schema(schema, timezone="UTC"))


def register_formats(spark: SparkSession) -> None:
    """Register the format "holdfast", and those of `register_state_source`, in a session, and ship our packages to its executors.
    Idempotent."""
    register_state_source(spark)
    spark.dataSource.register(OutputDataSource)
