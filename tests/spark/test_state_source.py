"""`spark.read.format("holdfast-state")` on a real session, against DuckDB over exported Parquet."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
from pyspark.errors import PySparkException

import holdfast as hf
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.records import SavepointRecord, encode_record
from holdfast.statebackends.errors import StateValueError
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.statebackends.snapshot_harness import SOME, UID, Contents, write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

MANY = Contents(
    count={f"key-{number}": number for number in range(500)},
    tags={f"key-{number}": {"a": number, "b": -number} for number in range(0, 500, 7)},
    windows={(f"key-{number}", 60 * (number % 3)): number for number in range(0, 500, 3)},
    timers={(f"key-{number}", number) for number in range(0, 500, 5)},
    positions=[[f"{number}.parquet", number] for number in range(9)],
)


@pytest.fixture(scope="module")
def registered(spark: SparkSession) -> SparkSession:
    hf.register_state_source(spark)
    hf.register_state_source(spark)
    return spark


def read(spark: SparkSession, path: Path | str, state: str, **options: Any) -> DataFrame:
    reader = spark.read.format("holdfast-state").option("path", str(path)).option("uid", UID).option("state", state)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def duck(folder: Path, state: str, query: str) -> list[Any]:
    return duckdb.sql(query.format(f"'{folder}/{UID}/{state}/*.parquet'")).fetchall()


@pytest.mark.parametrize(
    ("kind", "canonical"), [("memory", True), pytest.param("filesystem", False, marks=pytest.mark.endurance), ("rocksdb", False)]
)
def test_spark_and_duckdb_see_the_same(registered: SparkSession, tmp_path: Path, kind: Any, canonical: bool) -> None:
    folder = "savepoint-7" if canonical else "job/chk-7"
    source = write(tmp_path, folder, MANY, kind=kind, parallelism=3, max_parallelism=16, canonical=canonical)
    exported = tmp_path / "exported"
    hf.Snapshot(source.location).export(exported)
    frame = read(registered, source.location, "count")
    assert frame.rdd.getNumPartitions() == 3
    assert frame.columns == ["key_group", "key", "namespace", "value"]
    wanted = duck(exported, "count", "select key_group, key, namespace, value from {} order by key")
    assert [tuple(row) for row in frame.orderBy("key").collect()] == wanted
    assert len(wanted) == 500
    tags = read(registered, source.location, "tags").groupBy("map_key").sum("value").orderBy("map_key").collect()
    assert [tuple(row) for row in tags] == duck(exported, "tags", "select map_key, sum(value) from {} group by 1 order by 1")
    windows = read(registered, source.location, "windows").groupBy("namespace").sum("sum_v").orderBy("namespace").collect()
    assert [tuple(row) for row in windows] == duck(
        exported, "windows", "select namespace, sum(sum_v) from {} group by 1 order by 1"
    )
    timers = read(registered, source.location, "_timers").orderBy("key").collect()
    assert [tuple(row) for row in timers] == duck(exported, "_timers", "select * from {} order by key")
    lists = read(registered, source.location, "positions").orderBy("subtask", "position").collect()
    assert [tuple(row) for row in lists] == duck(exported, "positions", "select * from {} order by subtask, position")


def test_nested_values_cross_as_spark_has_them(registered: SparkSession, tmp_path: Path) -> None:
    source = write(tmp_path, "savepoint-7", SOME, canonical=True)
    rows = read(registered, source.location, "labels").orderBy("key").collect()
    assert [(row["key"], {k: sorted(v) for k, v in row["value"].items()}) for row in rows] == [
        ("AA", {"x": ["a", "b"]}),
        ("UA", {}),
    ]
    assert [(row["key"], row["position"], row["value"]) for row in read(registered, source.location, "seen").collect()] == [
        (row["key"], row["position"], row["value"]) for row in hf.Snapshot(source.location).rows(UID, "seen")
    ]


def test_ranges_of_key_groups_partition_what_is_read(registered: SparkSession, tmp_path: Path) -> None:
    source = write(tmp_path, "savepoint-7", MANY, parallelism=2, max_parallelism=16, canonical=True)
    frame = read(registered, source.location, "count", partitions=5)
    parts = frame.rdd.glom().collect()
    assert len(parts) == 5
    groups = [{row["key_group"] for row in part} for part in parts]
    assert all(left.isdisjoint(right) for left, right in pairwise(groups))
    assert {row["key"]: row["value"] for part in parts for row in part} == MANY.count
    some = read(registered, source.location, "count", key_groups="3:9")
    assert {row["key_group"] for row in some.collect()} == set(range(3, 9))
    assert some.count() == frame.where("key_group >= 3 and key_group < 9").count()
    assert read(registered, source.location, "count", key_groups="4:4").count() == 0


def test_only_the_columns_that_are_named_are_read(registered: SparkSession, tmp_path: Path) -> None:
    source = write(tmp_path, "savepoint-7", MANY, canonical=True)
    frame = read(registered, source.location, "count", columns="value, key")
    assert frame.columns == ["value", "key"]
    assert {row["key"]: row["value"] for row in frame.collect()} == MANY.count


def test_a_savepoint_is_found_through_its_pointer(registered: SparkSession, tmp_path: Path) -> None:
    source = write(tmp_path, "savepoint-7", SOME, canonical=True)
    record = SavepointRecord(7, source.location, CheckpointKind.SAVEPOINT, 0, 1, "n")
    LocalStorage(tmp_path / "state").execute(PutIfAbsent("job/chk-7/_metadata", encode_record(record)))
    assert read(registered, tmp_path / "state" / "job" / "chk-7", "count").count() == 3


def fails(spark: SparkSession, path: Path | str, state: str, match: str, **options: Any) -> None:
    with pytest.raises(PySparkException, match=match):
        read(spark, path, state, **options).collect()


def test_what_cant_be_read_is_named(registered: SparkSession, tmp_path: Path) -> None:
    source = write(tmp_path, "savepoint-7", SOME, kind="filesystem", canonical=True)

    fails(registered, source.location, "cuont", "NotFoundError: operator 'totals' has no state 'cuont'; it has: ")
    fails(registered, source.location, "count", "InvalidConfigError: .*'9:3' is not a range", key_groups="9:3")
    part = next(Path(source.location).glob("*count*"))
    part.write_bytes(part.read_bytes()[:-1])
    fails(registered, source.location, "count", "CorruptStateError: operator 'totals' subtask 0: .*count.*bytes instead of")


@pytest.mark.endurance  # Spark starts a process for each
def test_what_else_cant_be_read_is_named_too(registered: SparkSession, tmp_path: Path) -> None:
    source = write(tmp_path, "savepoint-7", SOME, kind="filesystem", canonical=True)
    fails(registered, tmp_path / "none", "count", "NotFoundError: .*none holds no snapshot")
    fails(registered, source.location, "count", "InvalidConfigError: .*option 'colour' is unknown", colour="red")
    fails(registered, source.location, "count", "InvalidConfigError: .*no column 'colour'", columns="key,colour")
    fails(registered, source.location, "count", "InvalidConfigError: .*is not a number of at most 9 digits", partitions="9" * 5000)
    fails(registered, source.location, "rules", "InvalidConfigError: .*'rules' is", key_groups="0:3")
    (Path(source.location) / "_metadata").write_bytes(b"{")
    fails(registered, source.location, "count", "CorruptStateError")


def test_a_dataframe_becomes_the_state_of_a_new_savepoint(registered: SparkSession, tmp_path: Path) -> None:
    source = hf.Snapshot(write(tmp_path, "savepoint-7", MANY, parallelism=2, max_parallelism=16, canonical=True).location)
    state = read(registered, source.location, "count")
    edited = source.edit(
        tmp_path / "edited",
        {
            (UID, "count"): state.where("value >= 100").selectExpr("key", "value * 10 value"),
            (UID, "tags"): read(registered, source.location, "tags").where("map_key = 'a'"),
        },
    )
    assert {row["key"]: row["value"] for row in edited.rows(UID, "count")} == {
        key: 10 * value for key, value in MANY.count.items() if value >= 100
    }
    changes = {each.state: (each.added, each.removed, each.changed) for each in source.diff(edited).states}
    assert changes["count"] == (0, 100, 400)
    assert changes["tags"] == (0, len(MANY.tags), 0)
    assert all(change == (0, 0, 0) for name, change in changes.items() if name not in ("count", "tags"))
    with pytest.raises(StateValueError, match="state 'count', row 0: column 'value' is string and has to be int64"):
        source.edit(tmp_path / "wrong", {(UID, "count"): state.selectExpr("key", "cast(value as string) value")})


@pytest.mark.parametrize("groups", [16, 32])
def test_what_changed_since_another_snapshot(registered: SparkSession, tmp_path: Path, groups: int) -> None:
    old = write(tmp_path, "job/chk-7", MANY, kind="rocksdb", parallelism=3, max_parallelism=16)
    counts = {key: value + value % 2 for key, value in MANY.count.items() if value > 50} | {"new": 1}
    new = write(tmp_path, "savepoint-8", Contents(count=counts), parallelism=2, max_parallelism=groups, canonical=True)
    frame = read(registered, new.location, "count", changes_from=old.location)
    assert frame.rdd.getNumPartitions() == (2 if groups == 16 else 1)
    feed = hf.Snapshot(old.location).changes(hf.Snapshot(new.location), UID, "count").read_all()
    assert frame.columns == feed.schema.names
    found = {(row["change"], row["key"], row["before_value"], row["after_value"]) for row in frame.collect()}
    assert found == {(row["change"], row["key"], row["before_value"], row["after_value"]) for row in feed.to_pylist()}
    assert {row.change: row["count"] for row in frame.groupBy("change").count().collect()} == {
        "added": 1,
        "removed": 51,
        "changed": 225,
    }
    windows = read(registered, new.location, "windows", changes_from=old.location)
    assert {row.change for row in windows.collect()} == {"removed"}
    entries = read(registered, new.location, "positions", changes_from=old.location)
    assert {(row.change, row.json) for row in entries.collect()} == {("removed", f'["{n}.parquet",{n}]') for n in range(9)}
    with pytest.raises(PySparkException, match="columns"):
        read(registered, new.location, "count", changes_from=old.location, columns="key").collect()


def test_metadata_as_a_dataframe(registered: SparkSession, tmp_path: Path) -> None:
    source = write(tmp_path, "savepoint-7", MANY, parallelism=3, max_parallelism=16, canonical=True)
    frame = registered.read.format("holdfast-metadata").option("path", source.location).load()
    assert [row.asDict() for row in frame.collect()] == hf.Snapshot(source.location).metadata_table().to_pylist()
    assert frame.where("kind = 'map'").select("state", "max_parallelism").collect()[0].asDict() == {
        "state": "tags",
        "max_parallelism": 16,
    }
    with pytest.raises(PySparkException, match="'uid' is unknown; known is: path"):
        registered.read.format("holdfast-metadata").option("path", source.location).option("uid", "x").load().collect()
