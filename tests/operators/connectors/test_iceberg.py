"""Iceberg tables in a catalog of SQLite: the kit of connectors, other writers beside, and tables that don't fit."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import IdentityTransform

import holdfast as hf
from holdfast.operators.connectors.iceberg import IcebergTarget
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition

SCHEMA = hf.testing.CHECKED_COLUMNS


def properties(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}


def test_a_secret_as_plain_text_is_refused_and_not_shown() -> None:
    for name in ("token", "credential", "s3.secret-access-key", "uri"):
        with pytest.raises(hf.InvalidConfigError, match=f"give {name} of properties as hf.Secret") as refused:
            hf.IcebergSink("shop.orders", properties={name: "postgresql://me:s3cret@host/catalog"})
        assert "s3cret" not in str(refused.value)


@contextlib.contextmanager
def catalog(folder: Path) -> Iterator[Catalog]:
    opened = load_catalog("default", **properties(folder))
    try:
        yield opened
    finally:
        opened.close()


def rows_of(folder: Path, table: str) -> list[tuple[int, str | None]]:
    with catalog(folder) as opened:
        try:
            found = opened.load_table(table)
        except NoSuchTableError:
            return []
        return sorted((row["id"], row["text"]) for row in found.scan().to_arrow().to_pylist())


def batches(*ids: int) -> Iterator[pa.RecordBatch]:
    for number in ids:
        yield pa.RecordBatch.from_pydict({"id": [number], "text": [f"row {number}"]}, schema=SCHEMA)


def owner(attempt: int = 1, known: CommitPosition | None = None, restored: int = 0) -> CommitOwner:
    return CommitOwner("orders", "job", attempt, f"nonce{attempt}", known, (), restored)


@contextlib.contextmanager
def target(folder: Path, *, schema: pa.Schema = SCHEMA, table: str = "shop.orders") -> Iterator[IcebergTarget]:
    made = IcebergTarget(table, "default", dict(properties(folder)))
    made.check(schema)
    copy: IcebergTarget = pickle.loads(pickle.dumps(made))
    try:
        yield copy
    finally:
        copy.close()


@pytest.mark.parametrize("scenario", ["owners that wake late", "fails behind call 2, apply"])
def test_the_kit(tmp_path: Path, scenario: str) -> None:
    passed = hf.testing.check_sink(
        lambda name: hf.IcebergSink(f"kit.{name}", properties=properties(tmp_path)),
        lambda name: rows_of(tmp_path, f"kit.{name}"),
        only=scenario,
    )
    assert scenario in passed


@pytest.mark.endurance
def test_the_whole_kit(tmp_path: Path) -> None:
    hf.testing.check_sink(
        lambda name: hf.IcebergSink(f"kit.{name}", properties=properties(tmp_path)),
        lambda name: rows_of(tmp_path, f"kit.{name}"),
        points="all",
    )


def test_who_appends_meanwhile_delays_a_commit_and_nothing_else(tmp_path: Path) -> None:
    with target(tmp_path) as ours:
        position = ours.open(owner())

        def rows() -> Iterator[pa.RecordBatch]:
            yield from batches(1)
            with catalog(tmp_path) as opened:
                opened.load_table("shop.orders").append(pa.Table.from_batches(batches(100)))
            yield from batches(2)

        ours.apply(rows(), position, position.moved(1))
        assert [number for number, _ in rows_of(tmp_path, "shop.orders")] == [1, 2, 100]


def test_an_apply_that_a_takeover_overtakes_commits_nothing(tmp_path: Path) -> None:
    with target(tmp_path) as old, target(tmp_path) as new:
        position = old.open(owner())

        def rows() -> Iterator[pa.RecordBatch]:
            yield from batches(1)
            new.open(owner(2))

        with pytest.raises(hf.FencedError, match=r"sink orders: Iceberg table shop\.orders"):
            old.apply(rows(), position, position.moved(1))
        assert rows_of(tmp_path, "shop.orders") == []


def test_a_partitioned_table_with_another_order_of_columns(tmp_path: Path) -> None:
    with catalog(tmp_path) as opened:
        opened.create_namespace("shop")
        made = opened.create_table("shop.orders", pa.schema([SCHEMA.field("text"), SCHEMA.field("id")]))
        field = PartitionField(made.schema().find_field("text").field_id, 1000, IdentityTransform(), "text")
        opened.drop_table("shop.orders")
        opened.create_table("shop.orders", made.schema(), partition_spec=PartitionSpec(field))
    with target(tmp_path) as ours:
        position = ours.open(owner())
        ours.apply(batches(1, 2, 3), position, position.moved(1))
    assert rows_of(tmp_path, "shop.orders") == [(1, "row 1"), (2, "row 2"), (3, "row 3")]
    with catalog(tmp_path) as opened:
        assert len(list(opened.load_table("shop.orders").scan().plan_files())) == 3


@pytest.mark.parametrize(
    ("existing", "words"),
    [
        (pa.schema([("id", pa.int64())]), "has no column text"),
        (pa.schema([*SCHEMA, ("more", pa.int64())]), "has a column that the rows don't have: more"),
        (pa.schema([("id", pa.int32()), ("text", pa.string())]), "column id is int32, in the rows int64"),
        (pa.schema([("id", pa.int64()), pa.field("text", pa.string(), nullable=False)]), "column text takes no nulls"),
    ],
)
def test_a_table_with_other_columns_is_refused(tmp_path: Path, existing: pa.Schema, words: str) -> None:
    with catalog(tmp_path) as opened:
        opened.create_namespace("shop")
        opened.create_table("shop.orders", existing)
    with target(tmp_path) as ours, pytest.raises(hf.InvalidConfigError, match=words):
        ours.open(owner())


NESTED: list[pa.Array] = [
    pa.array([[1, None], None], pa.list_(pa.int64())),
    pa.array([["x"], []], pa.large_list(pa.field("item", pa.large_string(), nullable=False))),
    pa.array([{"a.b": 1, "c": ["x", None]}, None], pa.struct([("a.b", pa.int64()), ("c", pa.list_(pa.string()))])),
    pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
    pa.array([[[("k", 1)]], None], pa.list_(pa.map_(pa.string(), pa.int64()))),
]


@pytest.mark.parametrize("values", NESTED, ids=[str(values.type) for values in NESTED])
def test_lists_maps_and_structs_are_kept(tmp_path: Path, values: pa.Array) -> None:
    rows = pa.record_batch({"id": pa.array([1, 2]), "v": values})
    with target(tmp_path, schema=rows.schema) as ours:
        position = ours.open(owner())
        ours.apply(iter([rows]), position, position.moved(1))
    with target(tmp_path, schema=rows.schema) as again:
        again.open(owner(2, position.moved(1), 1))
    with catalog(tmp_path) as opened:
        found = opened.load_table("shop.orders").scan().to_arrow().sort_by("id")
    assert found.column("v").to_pylist() == values.to_pylist()


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.struct([("a", pa.int64())])),
        pa.map_(pa.string(), pa.struct([("a", pa.int64())])),
        pa.struct([("l", pa.list_(pa.struct([("a", pa.int64())])))]),
    ],
)
def test_lists_whose_nulls_would_become_empty_are_refused(tmp_path: Path, kind: pa.DataType) -> None:
    with (
        pytest.raises(hf.InvalidConfigError, match="structs that is null as an empty one"),
        target(tmp_path, schema=pa.schema([("v", kind)])),
    ):
        raise AssertionError("not reached")


def test_bad_settings_and_types_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hf.InvalidConfigError, match=r"namespace.table, not to 'orders'"):
        hf.IcebergSink("orders")
    with (
        pytest.raises(hf.InvalidConfigError, match="no type for column n: uint64"),
        target(tmp_path, schema=pa.schema([("n", pa.uint64())])),
    ):
        raise AssertionError("not reached")
    monkeypatch.setenv("CATALOG_URI", properties(tmp_path)["uri"])
    hidden: dict[str, Any] = {**properties(tmp_path), "uri": hf.Secret("CATALOG_URI")}
    made = IcebergTarget("shop.orders", "default", hidden)
    made.check(SCHEMA)
    assert b"catalog.db" not in pickle.dumps(made)
    assert made.open(owner()).owner == 1
    made.close()
