"""Delta tables: the kit of connectors, other writers beside, tables that don't fit, and maintenance."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

import holdfast as hf
from holdfast.barriers.sinks.staged import CommitMark
from holdfast.operators.connectors.delta import RETENTION, DeltaTarget
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from tests.s3_server import S3Server
from tests.s3_server import bucket as bucket
from tests.s3_server import connection as connection
from tests.s3_server import server as server

SCHEMA = hf.testing.CHECKED_COLUMNS


def rows_of(table: Path) -> list[tuple[int, str | None]]:
    if not table.exists():
        return []
    rows = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    return sorted((row["id"], row["text"]) for row in rows)


def batches(*ids: int) -> Iterator[pa.RecordBatch]:
    for number in ids:
        yield pa.RecordBatch.from_pydict({"id": [number], "text": [f"row {number}"]}, schema=SCHEMA)


def owner(attempt: int = 1, known: CommitPosition | None = None, restored: int = 0) -> CommitOwner:
    return CommitOwner("orders", "job", attempt, f"nonce{attempt}", known, (), restored)


def target(table: Path, *, schema: pa.Schema = SCHEMA, partition_by: tuple[str, ...] = (), **options: Any) -> DeltaTarget:
    made = DeltaTarget(str(table), partition_by, options, None)
    made.check(schema)
    return made


@pytest.mark.parametrize("scenario", ["owners that wake late", "fails behind call 2, apply", "dies within call 1, apply"])
def test_the_kit(tmp_path: Path, scenario: str) -> None:
    passed = hf.testing.check_sink(
        lambda name: hf.DeltaSink(str(tmp_path / name)), lambda name: rows_of(tmp_path / name), only=scenario
    )
    assert scenario in passed


@pytest.mark.endurance
def test_the_whole_kit(tmp_path: Path) -> None:
    hf.testing.check_sink(lambda name: hf.DeltaSink(str(tmp_path / name)), lambda name: rows_of(tmp_path / name), points="all")


def test_rows_of_others_and_maintenance_change_nothing(tmp_path: Path) -> None:
    table = tmp_path / "table"
    first = target(table)
    position = first.open(owner())
    for checkpoint in (1, 2, 3):
        write_deltalake(str(table), pa.table({"id": [100 + checkpoint], "text": ["theirs"]}, schema=SCHEMA), mode="append")
        first.apply(batches(checkpoint), position, moved := position.moved(checkpoint))
        position = moved
    maintained = DeltaTable(str(table))
    maintained.optimize.compact()
    maintained.create_checkpoint()
    maintained.cleanup_metadata()
    maintained.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)

    again = target(table).open(owner(2, position, 3))
    assert (again.checkpoint_id, again.owner) == (3, position.owner + 1)
    assert [number for number, _ in rows_of(table)] == [1, 2, 3, 101, 102, 103]


def test_an_apply_that_a_takeover_overtakes_commits_nothing(tmp_path: Path) -> None:
    table = tmp_path / "table"
    old, new = target(table), target(table)
    position = old.open(owner())
    taken: list[CommitPosition] = []

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches(1)
        with ThreadPoolExecutor(1) as elsewhere:  # not on the client's own thread, which reads the rows
            taken.append(elsewhere.submit(new.open, owner(2)).result(timeout=30))
        yield from batches(2)

    with pytest.raises(hf.FencedError, match="sink orders"):
        old.apply(rows(), position, position.moved(1))
    assert rows_of(table) == []
    new.apply(batches(1, 2), taken[0], taken[0].moved(1))
    assert [number for number, _ in rows_of(table)] == [1, 2]


def test_errors_of_the_rows_themselves_come_out_as_they_are(tmp_path: Path) -> None:
    made = target(tmp_path / "table")
    position = made.open(owner())

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches(1)
        raise hf.CorruptStateError("a staged file is damaged", operator="orders", reason="")

    with pytest.raises(hf.CorruptStateError, match="a staged file is damaged"):
        made.apply(rows(), position, position.moved(1))
    made.apply(batches(1), position, position.moved(1))
    assert [number for number, _ in rows_of(tmp_path / "table")] == [1]


def test_partitions_times_and_another_order_of_columns(tmp_path: Path) -> None:
    day = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    types = {"at": pa.timestamp("us", "UTC"), "price": pa.decimal128(10, 2), "day": pa.date32(), "shop": pa.string()}
    schema = pa.schema(list(types.items()))
    columns: dict[str, list[Any]] = {"at": [day], "price": [None], "day": [day.date()], "shop": ["a/b c"]}
    existing = pa.table(columns, schema=schema).select(["shop", "day", "price", "at"])
    write_deltalake(str(tmp_path / "t"), existing, partition_by=["day", "shop"])
    made = target(tmp_path / "t", schema=schema)
    position = made.open(owner())
    made.apply(iter([pa.RecordBatch.from_pydict(columns, schema=schema)]), position, position.moved(1))
    stored = DeltaTable(str(tmp_path / "t"))
    assert stored.to_pyarrow_table().to_pylist() == [{name: columns[name][0] for name in ("shop", "day", "price", "at")}] * 2
    assert stored.metadata().partition_columns == ["day", "shop"]


@pytest.mark.parametrize(
    ("existing", "words"),
    [
        (pa.schema([("id", pa.int64())]), "has no column text"),
        (pa.schema([*SCHEMA, ("more", pa.int64())]), "has a column that the rows don't have: more"),
        (pa.schema([("id", pa.int32()), ("text", pa.string())]), "column id is .*integer.*long"),
        (pa.schema([("id", pa.int64()), pa.field("text", pa.string(), nullable=False)]), "column text takes no nulls"),
    ],
)
def test_a_table_with_other_columns_is_refused(tmp_path: Path, existing: pa.Schema, words: str) -> None:
    DeltaTable.create(str(tmp_path / "t"), existing)
    with pytest.raises(hf.InvalidConfigError, match=words) as refused:
        target(tmp_path / "t").open(owner())
    assert str(tmp_path / "t") in str(refused.value)
    assert DeltaTable(str(tmp_path / "t")).version() == 0


def test_what_can_not_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hf.InvalidConfigError, match="no type for column at"):
        target(tmp_path / "a", schema=pa.schema([("at", pa.time64("us"))]))
    with pytest.raises(hf.InvalidConfigError, match="partition_by names day"):
        target(tmp_path / "a", partition_by=("day",))
    with pytest.raises(hf.InvalidConfigError, match=r"the name 'a\\tb' has a control character"):
        target(tmp_path / "a", partition_by=("a\tb",), schema=pa.schema([("a\tb", pa.string()), ("id", pa.int64())]))
    with pytest.raises(hf.InvalidConfigError, match=r"tags is list<item: string>, which names no folder"):
        target(tmp_path / "a", partition_by=("tags",), schema=pa.schema([("tags", pa.list_(pa.string())), ("id", pa.int64())]))
    with pytest.raises(hf.InvalidConfigError, match="partition_by is a sequence"):
        hf.DeltaSink(str(tmp_path / "a"), partition_by="day")
    DeltaTable.create(str(tmp_path / "b"), SCHEMA, configuration={RETENTION: "interval 1 days"})
    with pytest.raises(hf.InvalidConfigError, match="forgets how far"):
        target(tmp_path / "b").open(owner())
    DeltaTable.create(str(tmp_path / "c"), SCHEMA, partition_by=["id"])
    with pytest.raises(hf.InvalidConfigError, match=r"partitioned by \['id'\], not by \['text'\]"):
        target(tmp_path / "c", partition_by=("text",)).open(owner())


TOO_LARGE: list[tuple[pa.Array, str]] = [
    (pa.array([1, None, 128], pa.uint8()), "128"),
    (pa.array([1, None, 2**63], pa.uint64()), str(2**63)),
    (pa.array([0, None, 2**62], pa.timestamp("ms")), "out of bounds"),
    (pa.array([[1], None, [300, 40_000]], pa.list_(pa.uint16())), "40000"),
]


@pytest.mark.parametrize(("values", "told"), TOO_LARGE, ids=[str(values.type) for values, _ in TOO_LARGE])
def test_a_value_that_delta_has_not_is_refused_in_front_of_the_checkpoint(tmp_path: Path, values: pa.Array, told: str) -> None:
    rows = pa.record_batch({"id": pa.array([1, 2, 3]), "v": values})
    made = target(tmp_path / "t", schema=rows.schema)
    with pytest.raises(hf.InvalidRowError, match=r"column v of row \{'id': 3, 'v': ") as refused:
        made.stage(rows)
    assert told in refused.value.reason
    assert made.stage(rows.slice(0, 2)).num_rows == 2, "what a slice leaves out is not looked at"
    good = rows.take(pa.array([0, 1]))
    position = made.open(owner())
    made.apply(iter([good]), position, position.moved(1))
    kept = DeltaTable(str(tmp_path / "t")).to_pyarrow_table().column("v")
    assert kept.cast(values.type).to_pylist() == good.column("v").to_pylist()


def test_a_value_that_names_no_folder_is_refused_in_front_of_the_checkpoint(tmp_path: Path) -> None:
    made = target(tmp_path / "t", partition_by=("text",))
    good = pa.record_batch({"id": [1, 2, 3], "text": ["a", None, "b/c" * 10]}, schema=SCHEMA)
    assert made.stage(good) is good
    for text in ("x" * 200, "é" * 40):
        with pytest.raises(hf.InvalidRowError, match=r"column text of row \{'id': 2, .*: the name of its partition has more th"):
            made.stage(pa.record_batch({"id": [1, 2], "text": ["a", text]}, schema=SCHEMA))


def test_a_time_that_no_reader_takes_for_a_partition_is_refused_in_front_of_the_checkpoint(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("day", pa.date32())])
    made = target(tmp_path / "t", partition_by=("day",), schema=schema)
    good = pa.record_batch({"id": [1, 2], "day": pa.array([1, None], pa.date32())}, schema=schema)
    assert made.stage(good) is good
    with pytest.raises(hf.InvalidRowError, match=r"column day of row \{'id': 2, .*: 2932897 is a date32"):
        made.stage(pa.record_batch({"id": [1, 2], "day": pa.array([1, 2_932_897], pa.date32())}, schema=schema))


def test_what_the_client_fails_of_is_told_though_rows_are_left(tmp_path: Path) -> None:
    """It lets go of its input then: that is no error of the rows."""
    made = target(tmp_path / "t")
    position = made.open(owner())

    def rows() -> Iterator[pa.RecordBatch]:
        yield from batches(1)
        (tmp_path / "t").rename(tmp_path / "gone")
        (tmp_path / "t").write_text("no folder")
        for number in range(10_000):
            yield from batches(number)

    with pytest.raises(Exception, match="t") as failed:
        made.apply(rows(), position, position.moved(1))
    assert "DeltaError" in type(failed.value).__name__ or isinstance(failed.value, OSError)


def test_every_field_of_a_position_is_kept(tmp_path: Path) -> None:
    made = target(tmp_path / "t")
    first = made.open(dataclasses.replace(owner(), line="a state directory"))
    mark = CommitMark(2**40, 3, "0123456789abcdef")
    second = msgspec.structs.replace(first, checkpoint_id=2**40, row=7, tag="fedcba9876543210", repeated=9, reached=mark)
    made.apply(batches(1), first, second)
    assert all(getattr(second, field.name) != field.default for field in msgspec.structs.fields(second))
    made.apply(batches(2), second, second.moved(2**40 + 1, tag="0" * 16))
    with pytest.raises(hf.FencedError):
        made.apply(batches(2), second, second.moved(2**40 + 1, tag="1" * 16))
    assert made._stored("orders") == second.moved(2**40 + 1, tag="0" * 16)


def test_two_sinks_on_one_table_are_two_positions(tmp_path: Path) -> None:
    ours, theirs = target(tmp_path / "t"), target(tmp_path / "t")
    first = ours.open(owner())
    other = theirs.open(CommitOwner("refunds", "other job", 1, "nonce", None, (), 0))
    ours.apply(batches(1), first, first.moved(1))
    theirs.apply(batches(2), other, other.moved(5))
    assert target(tmp_path / "t").open(owner(2, first.moved(1), 1)).checkpoint_id == 1
    assert [number for number, _ in rows_of(tmp_path / "t")] == [1, 2]


def test_a_position_that_can_not_be_read_is_not_guessed(tmp_path: Path) -> None:
    target(tmp_path / "t").open(owner())
    damage = CommitProperties(app_transactions=[Transaction("holdfast-orders/owner texts/0", 7)])
    table = DeltaTable(str(tmp_path / "t"))
    table.create_write_transaction([], "append", table.schema(), commit_properties=damage)
    with pytest.raises(hf.CorruptStateError, match=r"application holdfast-orders/owner texts can't be read"):
        target(tmp_path / "t").open(owner(2))


def test_a_takeover_does_not_disturb_other_writers(tmp_path: Path) -> None:
    first = target(tmp_path / "t").open(owner())
    theirs = DeltaTable(str(tmp_path / "t"))
    target(tmp_path / "t").open(owner(2, first))
    write_deltalake(theirs, pa.table({"id": [7], "text": ["theirs"]}, schema=SCHEMA), mode="append")
    assert rows_of(tmp_path / "t") == [(7, "theirs")]


def test_a_secret_as_plain_text_is_refused_and_not_shown() -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "aws_session_token", "account_key", "proxy_url"):
        with pytest.raises(hf.InvalidConfigError, match=f"give {name} of storage_options as hf.Secret") as refused:
            hf.DeltaSink("s3://shop/orders", storage_options={name: "http://me:s3cret@proxy"})
        assert "s3cret" not in str(refused.value)
    with pytest.raises(hf.InvalidConfigError, match="has a password"):
        hf.DeltaSink("s3://me:s3cret@shop/orders")


def test_a_table_on_s3_whose_options_are_secret(server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TABLE_KEY", "key-of-the-table")
    options: dict[str, Any] = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": hf.Secret("TABLE_KEY"),
    }

    def make() -> DeltaTarget:
        made = DeltaTarget(f"{bucket}/tables/orders", (), options, None)
        made.check(SCHEMA)
        return made

    assert b"key-of-the-table" not in pickle.dumps(make())
    old, new = make(), make()
    first = old.open(owner())
    old.apply(batches(1), first, first.moved(1))
    second = new.open(owner(2, first.moved(1), 1))
    with pytest.raises(hf.FencedError):
        old.apply(batches(2), first.moved(1), first.moved(2))
    new.apply(batches(2), second, second.moved(2))
    resolved = {name: value if isinstance(value, str) else value.resolve() for name, value in options.items()}
    stored = DeltaTable(f"{bucket}/tables/orders", storage_options=resolved)
    assert sorted(stored.to_pyarrow_table().column("id").to_pylist()) == [1, 2]
