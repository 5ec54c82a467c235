"""`format("holdfast")` without Spark: what its readers plan and read; tests/spark has it on a session."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, ReadMaxRows

from holdfast.operators.sinks.files import formats
from holdfast.operators.sinks.files.parquet import FileSink
from holdfast.operators.spark.datasource.batch_read import OutputOptions, OutputReader
from holdfast.operators.spark.datasource.registration import OutputDataSource
from holdfast.operators.spark.datasource.stream_read import OutputStreamReader
from holdfast.statebackends.errors import (
    InvalidConfigError,
    NotFoundError,
    SchemaMismatchError,
    SourceDataLostError,
    UnknownColumnError,
)
from tests.operators.sinks.files.written import Written

SCHEMA = pa.schema([("i", pa.int64()), ("s", pa.string())])


def values(*numbers: int) -> dict[str, list[Any]]:
    return {"i": list(numbers), "s": [f"s{number}" for number in numbers]}


def stream(path: Path, schema: pa.Schema = SCHEMA, **options: str) -> OutputStreamReader:
    return OutputStreamReader(OutputOptions.parse({"path": str(path), **options}, streaming=True), schema)


def rows_of(reader: Any, partitions: Any) -> list[int]:
    return [number for part in partitions for batch in reader.read(part) for number in batch.column(0).to_pylist()]


def batches(reader: OutputStreamReader, start: dict[str, Any], limit: ReadLimit) -> tuple[list[list[int]], dict[str, Any]]:
    """The rows of each batch up to the end, and the last offset."""
    found = []
    while (end := reader.latestOffset(start, limit)) != start:
        found.append(rows_of(reader, reader.partitions(start, end)))
        start = end
    return found, start


def test_committed_rows_alone_are_read(tmp_path: Path) -> None:
    job = Written(tmp_path, SCHEMA)
    job.commit(values(1, 2))
    job.stage(values(3))
    reader = OutputReader(OutputOptions.parse({"PATH": f"file://{tmp_path}"}), SCHEMA)
    assert rows_of(reader, reader.partitions()) == [1, 2]
    job.commit(values(4))
    assert rows_of(reader, reader.partitions()) == [1, 2, 3, 4]


@pytest.mark.parametrize("group_bytes", [1 << 20, 32 << 20])
def test_a_large_file_is_read_in_even_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int) -> None:
    monkeypatch.setattr(formats, "ROW_GROUP_BYTES", group_bytes)
    rows = pa.schema([("i", pa.int64()), ("j", pa.int64())])
    Written(tmp_path, rows).commit({"i": range(300_000), "j": range(300_000)})
    [file] = tmp_path.glob("part-*")
    assert pq.ParquetFile(file).num_row_groups == max(1, -(-300_000 * 16 // group_bytes))
    reader = OutputReader(OutputOptions.parse({"path": str(tmp_path), "partitions": "4"}), rows)
    found = [rows_of(reader, [part]) for part in reader.partitions()]
    assert [len(part) for part in found] == [75_000] * 4
    assert [number for part in found for number in part] == list(range(300_000))


def test_each_row_comes_once_in_batches_of_whole_commits(tmp_path: Path) -> None:
    job = Written(tmp_path, SCHEMA)
    for first in range(0, 12, 2):
        job.commit(values(first, first + 1))
    reader = stream(tmp_path)
    begin = reader.initialOffset()
    assert batches(reader, begin, ReadMaxRows(1))[0] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert batches(reader, begin, ReadMaxFiles(4))[0] == [[*range(8)], [*range(8, 12)]]
    found, end = batches(reader, begin, ReadAllAvailable())
    assert found == [[*range(12)]]
    Written(tmp_path, SCHEMA, job_id="job-a").commit(values(12))  # a takeover, which has no rows
    assert batches(reader, end, ReadAllAvailable())[0] == [[12]]
    assert reader.reportLatestOffset()["sequence"] > end["sequence"]


def test_a_restarted_query_plans_the_batch_that_it_planned(tmp_path: Path) -> None:
    job = Written(tmp_path, SCHEMA)
    job.commit(values(1))
    first = stream(tmp_path)
    start = first.initialOffset()
    end = first.latestOffset(start, ReadAllAvailable())
    job.commit(values(2))
    again = stream(tmp_path)
    assert rows_of(again, again.partitions(start, end)) == [1]
    assert batches(again, end, ReadAllAvailable())[0] == [[2]]
    assert again.partitions(end, end) == []


def test_available_now_ends_at_what_was_there(tmp_path: Path) -> None:
    job = Written(tmp_path, SCHEMA)
    for number in range(4):
        job.commit(values(number))
    reader = stream(tmp_path, maxFilesPerTrigger="3")
    reader.prepareForTriggerAvailableNow()
    job.commit(values(4))
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxFiles(3)
    found, end = batches(reader, reader.initialOffset(), limit)
    assert found == [[0, 1, 2], [3]]
    assert batches(stream(tmp_path), end, ReadAllAvailable())[0] == [[4]]


def test_a_stream_may_begin_at_the_end(tmp_path: Path) -> None:
    job = Written(tmp_path, SCHEMA)
    job.commit(values(1))
    reader = stream(tmp_path, startingOffset="latest")
    start = reader.initialOffset()
    job.commit(values(2))
    assert batches(reader, start, ReadAllAvailable())[0] == [[2]]


def test_a_folder_that_moved_is_the_same_log_and_another_log_is_refused(tmp_path: Path) -> None:
    Written(tmp_path / "a", SCHEMA).commit(values(1))
    reader = stream(tmp_path / "a")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    (tmp_path / "a").rename(tmp_path / "b")
    moved = stream(tmp_path / "b", sink_id="out")
    assert moved.latestOffset(end, ReadAllAvailable()) == end
    Written(tmp_path / "a", SCHEMA, job_id="other").commit(values(1))
    with pytest.raises(SourceDataLostError, match="another entry") as refused:
        stream(tmp_path / "a").latestOffset(end, ReadAllAvailable())
    assert refused.value.fields["split"] == "out"
    with pytest.raises(SourceDataLostError, match="up to entry 2"):
        stream(tmp_path / "a").partitions({"sequence": 0, "entry": ""}, end)
    shutil.rmtree(tmp_path / "b")
    assert moved.reportLatestOffset() == {"sequence": 0, "entry": ""}  # of metrics alone
    with pytest.raises(SourceDataLostError):
        moved.latestOffset(end, ReadAllAvailable())
    with pytest.raises(NotFoundError):
        stream(tmp_path / "b").latestOffset(end, ReadAllAvailable())


@pytest.mark.parametrize("sequence", [None, "1", -1, True, 1.0])
def test_an_offset_of_another_source_is_refused(tmp_path: Path, sequence: object) -> None:
    Written(tmp_path, SCHEMA).commit(values(1))
    with pytest.raises(InvalidConfigError, match="not an offset"):
        stream(tmp_path).latestOffset({"sequence": sequence, "entry": ""}, ReadAllAvailable())
    with pytest.raises(InvalidConfigError, match="not an offset"):
        stream(tmp_path).latestOffset({"index": 1}, ReadAllAvailable())


def test_a_stream_of_a_sink_that_has_not_begun_waits(tmp_path: Path) -> None:
    reader = stream(tmp_path, sink_id="out")
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    Written(tmp_path, SCHEMA).commit(values(1))
    assert batches(reader, start, ReadAllAvailable())[0] == [[1]]


def test_columns_that_came_later_are_null_before_and_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    Written(tmp_path, SCHEMA).commit(values(1))
    wide = pa.schema([("s", pa.string()), ("i", pa.int32()), ("x", pa.float64())])
    Written(tmp_path, wide).commit({**values(2), "x": [0.5]})
    source = OutputDataSource({"path": str(tmp_path)})
    assert source.schema().simpleString() == "struct<s:string,i:int,x:double>"
    reader = source.reader(source.schema())
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert found == [{"s": "s1", "i": 1, "x": None}, {"s": "s2", "i": 2, "x": 0.5}]
    wrong = OutputReader(OutputOptions.parse({"path": str(tmp_path)}), pa.schema([("s", pa.int64())]))
    with pytest.raises(SchemaMismatchError, match="column 's' is string"):
        rows_of(wrong, wrong.partitions())


def test_columns_that_are_asked_for_are_read_alone(tmp_path: Path) -> None:
    Written(tmp_path, SCHEMA).commit(values(1))
    source = OutputDataSource({"path": str(tmp_path), "columns": "s"})
    assert source.schema().simpleString() == "struct<s:string>"
    with pytest.raises(UnknownColumnError, match="it has i, s"):
        OutputDataSource({"path": str(tmp_path), "columns": "s, t"}).schema()


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
@pytest.mark.parametrize("columns", [["i", "s"], ["s"], ["i"], ["x", "s"]])
def test_text_files_and_partitions_give_the_same_rows(tmp_path: Path, format: str, columns: list[str]) -> None:
    rows = pa.schema([pa.field("i", pa.int64(), nullable=False), ("s", pa.string())])  # csv refuses null in an only column
    job = Written(tmp_path, rows, sink=FileSink(tmp_path, format, "out", partition_by=["s"]))
    job.commit({"i": [1, 2, 3], "s": ["a/b", "é", "a/b"]})
    kinds = pa.schema([("i", pa.int64()), ("s", pa.string()), ("x", pa.float64())])
    schema = pa.schema([kinds.field(name) for name in columns])
    reader = OutputReader(OutputOptions.parse({"path": str(tmp_path)}), schema)
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    wanted = [{"i": 1, "s": "a/b", "x": None}, {"i": 3, "s": "a/b", "x": None}, {"i": 2, "s": "é", "x": None}]
    assert sorted(map(repr, found)) == sorted(repr({name: row[name] for name in columns}) for row in wanted)


def test_a_committed_file_that_is_gone_is_named(tmp_path: Path) -> None:
    Written(tmp_path, SCHEMA).commit(values(1))
    reader = OutputReader(OutputOptions.parse({"path": str(tmp_path)}), SCHEMA)
    parts = reader.partitions()
    shutil.rmtree(tmp_path / "_holdfast" / "out" / "data")
    with pytest.raises(SourceDataLostError, match=r"part-out-.* is committed"):
        rows_of(reader, parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'path' is missing"),
        ({"path": "x", "limit": "1"}, "'limit' is unknown"),
        ({"path": "x", "columns": ""}, "names no column"),
        ({"path": "x", "partitions": "0"}, "not a number from 1"),
        ({"path": "x", "maxRowsPerTrigger": "-1"}, "not a number from 1"),
        ({"path": "x", "maxRowsPerTrigger": "٣"}, "not a number from 1"),
        ({"path": "x", "maxRowsPerTrigger": "1", "maxFilesPerTrigger": "1"}, "Spark takes one limit"),
        ({"path": "x", "startingOffset": "7"}, "earliest or latest"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        OutputOptions.parse(options, streaming=True)


def test_options_of_a_stream_are_not_for_a_batch() -> None:
    with pytest.raises(InvalidConfigError, match="maxrowspertrigger"):
        OutputOptions.parse({"path": "x", "maxRowsPerTrigger": "1"})


def test_a_path_without_a_sink_and_one_with_two_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no sink has written"):
        OutputDataSource({"path": str(tmp_path)}).schema()
    with pytest.raises(NotFoundError, match="give a schema"):
        OutputDataSource({"path": str(tmp_path), "sink_id": "out"}).schema()
    for sink_id in ("a", "b"):
        Written(tmp_path, SCHEMA, sink_id=sink_id).commit(values(1))
    with pytest.raises(InvalidConfigError, match="a, b"):
        OutputDataSource({"path": str(tmp_path)}).schema()
