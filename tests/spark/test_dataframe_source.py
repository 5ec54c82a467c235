from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.operators.sources import dataframe_write
from holdfast.operators.sources.dataframe import DataFrameReader, DataFrameSource
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError
from holdfast.statebackends.storage.directory import LocalStorage
from tests.operators.ports import ManualContext

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def opened(
    source: DataFrameSource, root: Path, subtask: int = 0, parallelism: int = 1, entries: list[bytes] | None = None
) -> tuple[DataFrameReader, ManualContext]:
    context = ManualContext(LocalStorage(root), subtask=subtask, parallelism=parallelism)
    reader = pickle.loads(pickle.dumps(source)).create_reader(subtask, parallelism, 8)
    reader.open(context, entries)
    return reader, context


def read(reader: DataFrameReader, context: ManualContext, rows: int | None = None, rows_max: int = 100) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while rows is None or len(found) < rows:
        context.run_pool()
        poll = reader.poll(rows_max if rows is None else min(rows_max, rows - len(found)), context.time_ms)
        if poll.finished:
            break
        found += [] if poll.batch is None else poll.batch.rows()
        context.time_ms = poll.ready_at_ms or context.time_ms
    return found


def test_columns_that_cant_cross_are_named(spark: SparkSession) -> None:
    with pytest.raises(InvalidConfigError, match="several columns named a"):
        DataFrameSource(spark.sql("select 1 a, 2 a"))
    with pytest.raises(InvalidConfigError) as caught:
        DataFrameSource(spark.sql("select 1 a, make_interval(1) odd"))
    assert caught.value.column == "odd"


def test_order_and_content_are_exact_over_partitions_and_subtasks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = (
        spark.range(0, 2000, 1, 5)
        .selectExpr("id", "(id * 7919) % 2003 as scrambled", "cast(id as string) `te.xt`")
        .orderBy("scrambled")
    )
    source = DataFrameSource(frame)
    path = source.materialise(spark, str(tmp_path), "job-a", "src")
    assert path == "job-a/sources/src/000001/manifest.json"
    expected = [row.asDict() for row in frame.collect()]
    assert read(*opened(source, tmp_path)) == expected
    parts = [read(*opened(source, tmp_path, subtask, 3)) for subtask in range(3)]
    for subtask, part in enumerate(parts):
        assert part == [row for index, row in enumerate(expected) if index % 8 % 3 == subtask]


def test_types_cross_unchanged_in_any_session_time_zone(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.sql(
        "select timestamp'2013-03-10 12:30:00.123456' t, date'2013-01-01' d, cast(1.25 as decimal(10, 2)) x, "
        "binary('ab') b, cast(null as int) n, true f, array(1, 2) l, timestamp_ntz'2013-01-01 00:00:00' z"
    )
    source = DataFrameSource(frame)
    assert str(source.schema.field("t").type) == "timestamp[us, tz=UTC]"
    source.materialise(spark, str(tmp_path), "job-a", "src")
    (row,) = read(*opened(source, tmp_path))
    assert row["t"] == dt.datetime(2013, 3, 10, 16, 30, 0, 123456, dt.UTC)
    assert (row["d"], row["x"], row["b"]) == (dt.date(2013, 1, 1), Decimal("1.25"), b"ab")
    assert (row["n"], row["f"], row["l"], row["z"]) == (None, True, [1, 2], dt.datetime(2013, 1, 1))


def test_an_empty_dataframe_is_finished_at_once(spark: SparkSession, tmp_path: Path) -> None:
    source = DataFrameSource(spark.range(0))
    source.materialise(spark, str(tmp_path), "job-a", "src")
    assert read(*opened(source, tmp_path)) == []


def test_sealed_input_is_reused_and_a_fresh_start_writes_its_own(spark: SparkSession, tmp_path: Path) -> None:
    first = DataFrameSource(spark.range(10))
    path = first.materialise(spark, str(tmp_path), "job-a", "src")
    changed = DataFrameSource(spark.range(99))
    assert changed.materialise(spark, str(tmp_path), "job-a", "src", submission=2) == path
    assert len(read(*opened(changed, tmp_path))) == 10
    assert changed.materialise(spark, str(tmp_path), "job-a", "src", submission=3, fresh=True) != path
    assert len(read(*opened(changed, tmp_path))) == 99


def test_a_crash_before_the_seal_leaves_no_input(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DataFrameSource(spark.range(0, 100, 1, 2))

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dataframe_write, "seal_flow", die)
        with pytest.raises(KeyboardInterrupt):
            source.materialise(spark, str(tmp_path), "job-a", "src")
    assert len(list(tmp_path.rglob("*.arrow"))) == 2
    source.materialise(spark, str(tmp_path), "job-a", "src")
    assert len(read(*opened(source, tmp_path))) == 100
    assert len(list(tmp_path.rglob("*.arrow"))) == 2, "what the crash left is deleted"


@pytest.mark.parametrize("rows", [0, 1, 7, 333])
def test_positions_are_exact_at_another_parallelism_and_under_another_job(spark: SparkSession, tmp_path: Path, rows: int) -> None:
    source = DataFrameSource(spark.range(0, 1000, 1, 3))
    source.materialise(spark, str(tmp_path), "job-a", "src")
    entries, seen = [], []
    for subtask in range(2):
        reader, context = opened(source, tmp_path, subtask, 2)
        seen += read(reader, context, rows * (subtask + 1))
        entries += reader.snapshot()
        assert reader.external_files() == ("job-a/sources/src/000001/manifest.json",)
    heir = DataFrameSource(spark.range(5))
    heir.materialise(spark, str(tmp_path), "job-b", "src")
    for part in (entries[:3], entries[3:6], entries[6:]):
        seen += read(*opened(heir, tmp_path, 0, 3, part))
    assert sorted(row["id"] for row in seen) == list(range(1000))


def test_a_damaged_or_missing_chunk_is_named(spark: SparkSession, tmp_path: Path) -> None:
    source = DataFrameSource(spark.range(0, 100, 1, 1))
    source.materialise(spark, str(tmp_path), "job-a", "src")
    (chunk,) = tmp_path.rglob("*.arrow")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(bytes(data))
    with pytest.raises(CorruptStateError) as caught:
        read(*opened(source, tmp_path))
    assert str(caught.value.path).endswith(chunk.name)
    chunk.unlink()
    with pytest.raises(CorruptStateError, match="missing"):
        read(*opened(source, tmp_path))


def test_snapshot_before_the_manifest_is_loaded_keeps_positions(spark: SparkSession, tmp_path: Path) -> None:
    source = DataFrameSource(spark.range(0, 100, 1, 1))
    source.materialise(spark, str(tmp_path), "job-a", "src")
    reader, context = opened(source, tmp_path)
    read(reader, context, 50)
    again, _ = opened(source, tmp_path, entries=reader.snapshot())
    assert again.snapshot() == reader.snapshot()
