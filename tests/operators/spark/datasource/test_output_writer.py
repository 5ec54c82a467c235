"""What a query that writes with `format("holdfast")` may say, without Spark."""

from __future__ import annotations

import pickle

import cloudpickle
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.spark.datasource.registration import OutputDataSource
from holdfast.operators.spark.datasource.stream_write import WriteOptions

SINKS = {"orders": hf.FileSink("/nowhere", "json", "orders"), "other": hf.ParquetSink("/nowhere", "other")}
GIVEN = {"sink": "orders", "checkpointLocation": "/c"}


@pytest.mark.parametrize(
    ("given", "setting", "words"),
    [
        ({}, "sink", "is missing. Registered are: orders, other"),
        ({**GIVEN, "sink": "order"}, "sink", "names no sink of the session: 'order'"),
        ({"sink": "orders"}, "checkpointLocation", "is missing"),
        ({**GIVEN, "checkpointLocation": "c"}, "checkpointLocation", "is relative"),
        ({**GIVEN, "path": "/out"}, "path", "is unknown"),
    ],
)
def test_options_are_checked_by_name(given: dict[str, str], setting: str, words: str) -> None:
    assert WriteOptions.parse(GIVEN, SINKS) == WriteOptions("orders", "/c")
    with pytest.raises(hf.InvalidConfigError, match=words) as caught:
        WriteOptions.parse(given, SINKS)
    assert caught.value.setting == setting
    with pytest.raises(hf.InvalidConfigError, match="Registered are: none"):
        WriteOptions.parse(GIVEN, {})


def test_the_sinks_of_a_session_travel_with_its_class_and_columns_are_checked_in_time() -> None:
    made = type("SessionDataSource", (OutputDataSource,), {"sinks": SINKS, "registration": "r"})
    found = pickle.loads(cloudpickle.dumps(made))(options=GIVEN)
    from pyspark.sql.types import LongType, StructField, StructType

    writer = found.streamWriter(StructType([StructField("i", LongType())]), False)
    assert writer._schema == pa.schema([("i", pa.int64())])
    assert (writer._sink.path, writer._sink.sink_id) == ("/nowhere", "orders")
    with pytest.raises(hf.InvalidConfigError, match="complete"):
        found.streamWriter(StructType([StructField("i", LongType())]), True)
