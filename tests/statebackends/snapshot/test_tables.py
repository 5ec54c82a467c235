"""Canonical tables of keyed state: schema, restriction to key groups, tolerance for other tools, refusal of damage."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from holdfast.statebackends.decoding import decode_json
from holdfast.statebackends.errors import CorruptStateError, InvariantError
from holdfast.statebackends.handles import KeyGroupRange, StateMeta
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.snapshot.row_rules import RowRules
from holdfast.statebackends.snapshot.table_file import decode_keyed_table
from holdfast.statebackends.snapshot.tables import (
    encode_keyed_table,
    keyed_table_schema,
    restrict,
    sort_by_key_group,
)

FORMATS = ["arrow", "parquet"]
UTF8 = KeyType.of(str)
META = StateMeta("count", "value", "int", "utf8")
ALL = KeyGroupRange(0, 128)


def table_of(keys: list[Any], key_type: KeyType = UTF8, meta: StateMeta = META) -> pa.Table:
    column = key_type.column_of_values(keys, max_parallelism=128)
    schema = keyed_table_schema(key_type, meta, pa.int64())
    arrays = [pa.array(column.key_groups), *column.arrays, pa.array([b""] * len(keys)), pa.array(range(len(keys)), pa.int64())]
    return sort_by_key_group(pa.Table.from_arrays(arrays, schema=schema))


def judged(table: pa.Table) -> pa.Table:
    """As a restore judges a table of META."""
    key_types = [field.type for field in table.schema if field.name.startswith("key") and field.name != "key_group"]
    key_type = UTF8 if len(key_types) < 2 else KeyType.from_arrow(key_types)
    return RowRules.of(META, key_type, 128).judged(table)


def keys_of(table: pa.Table) -> set[str]:
    return set(table.column("key").to_pylist())


def test_schemas() -> None:
    pair = KeyType.of(tuple[str, datetime])
    assert key_columns(pair) == ["key_0", "key_1"]
    names = keyed_table_schema(pair, META, pa.int64()).names
    assert names == ["key_group", "key_0", "key_1", "namespace", "value"]
    mapped = keyed_table_schema(UTF8, StateMeta("m", "map", "map<str,int>", "utf8"), pa.int64(), map_key=pa.utf8())
    assert mapped.names == ["key_group", "key", "namespace", "map_key", "value"]
    listed = keyed_table_schema(UTF8, StateMeta("l", "list", "int", "utf8"), pa.int64())
    assert listed.names == ["key_group", "key", "namespace", "position", "value"]
    own = [pa.field("n", pa.int64()), pa.field("s", pa.float64())]
    columnar = keyed_table_schema(UTF8, StateMeta("c", "columnar", "", "utf8"), own)
    assert columnar.names == ["key_group", "key", "namespace", "n", "s"]


@pytest.mark.parametrize("table_format", FORMATS)
def test_round_trip_keeps_rows_types_and_meta(table_format: Any) -> None:
    key_type = KeyType.parse("tuple<utf8,timestamp[us, UTC],decimal128(10, 2),int64>")
    moment = datetime(2020, 1, 1, tzinfo=UTC)
    table = table_of([("a", moment, Decimal("1.50"), 3), ("b", moment, Decimal("2.50"), 4)], key_type)
    back = decode_keyed_table(encode_keyed_table(table, table_format), table_format, ALL, judge=judged)
    assert back.equals(table)
    assert back.schema.types == table.schema.types
    assert decode_json(back.schema.metadata[b"holdfast.state"], StateMeta) == META


@pytest.mark.parametrize("wanted", [ALL, KeyGroupRange(0, 1), KeyGroupRange(60, 70)])
@pytest.mark.parametrize("held", [KeyGroupRange(0, 127), KeyGroupRange(1, 128), KeyGroupRange(40, 80)])
@pytest.mark.parametrize("kind", [*FORMATS, "parquet without statistics", "parquet in row groups"])
def test_rows_that_the_handle_does_not_have_are_refused_whatever_is_wanted(
    kind: str, held: KeyGroupRange, wanted: KeyGroupRange
) -> None:
    table = table_of([f"user-{index}" for index in range(3000)])
    table_format: Any = kind.partition(" ")[0]
    data: Any = encode_keyed_table(table, table_format)
    if kind not in FORMATS:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=300 if "groups" in kind else 3000, write_statistics="groups" in kind)
        data = sink.getvalue()
    with pytest.raises(CorruptStateError, match=rf"rows of key groups outside of \[{held.start}, {held.stop}\)"):
        decode_keyed_table(data, table_format, wanted, path="job/a", judge=judged, held=held)
    assert decode_keyed_table(data, table_format, wanted, path="job/a", judge=judged, held=ALL) == restrict(
        table, wanted
    )


@pytest.mark.parametrize("table_format", FORMATS)
def test_restriction_partitions_the_rows(table_format: Any) -> None:
    keys = [f"user-{index}" for index in range(3000)]
    data = encode_keyed_table(table_of(keys), table_format)
    found: list[str] = []
    for start, stop in [(0, 1), (1, 43), (43, 43), (43, 100), (100, 128)]:
        part = decode_keyed_table(data, table_format, KeyGroupRange(start, stop), judge=judged)
        groups = part.column("key_group").to_numpy()
        assert ((groups >= start) & (groups < stop)).all()
        found += part.column("key").to_pylist()
    assert sorted(found) == sorted(keys)


def test_only_row_groups_that_hold_wanted_key_groups_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.statebackends.snapshot.tables._ROW_GROUP_ROWS", 100)
    data = encode_keyed_table(table_of([f"user-{index}" for index in range(1000)]), "parquet")
    read: list[int] = []
    original = pq.ParquetFile.read_row_groups

    def counting(self: Any, groups: list[int], *args: Any, **kwargs: Any) -> pa.Table:
        read.extend(groups)
        return original(self, groups, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counting)
    part = decode_keyed_table(data, "parquet", KeyGroupRange(0, 20))
    assert 0 < len(read) < 5
    assert pc.max(part.column("key_group")).as_py() < 20


def test_rows_are_found_whatever_the_statistics_of_a_parquet_file_say() -> None:
    table = table_of([f"user-{index}" for index in range(1000)]).filter(pc.field("key_group") == 5)
    data = encode_keyed_table(table, "parquet").to_pybytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    true, false = ((group).to_bytes(4, "little") for group in (5, 99))
    lying = data[:footer] + data[footer:].replace(true, false)
    assert pq.ParquetFile(pa.BufferReader(lying)).metadata.row_group(0).column(0).statistics.min == 99
    assert decode_keyed_table(lying, "parquet", KeyGroupRange(0, 10), judge=judged).equals(table)
    with pytest.raises(CorruptStateError, match=r"outside of \[90, 128\)"):
        decode_keyed_table(lying, "parquet", KeyGroupRange(90, 128), held=KeyGroupRange(90, 128), judge=judged)


@pytest.mark.parametrize("table_format", FORMATS)
def test_empty_tables(table_format: Any) -> None:
    data = encode_keyed_table(table_of([]), table_format)
    back = decode_keyed_table(data, table_format, ALL, judge=judged)
    assert back.num_rows == 0
    assert back.schema.names == ["key_group", "key", "namespace", "value"]


def test_restriction_of_sorted_rows_copies_nothing() -> None:
    table = table_of([f"user-{index}" for index in range(100)])
    batch = table.combine_chunks().to_batches()[0]
    part = restrict(batch, KeyGroupRange(40, 80))
    assert part.column(3).buffers()[1].address == batch.column(3).buffers()[1].address


def test_unsorted_rows_are_not_written() -> None:
    table = table_of(["a", "b", "c"])
    backwards = table.take(pa.array([2, 1, 0]))
    with pytest.raises(InvariantError):
        encode_keyed_table(backwards, "arrow")
    assert sort_by_key_group(backwards).column("key_group").equals(table.column("key_group"))


def test_a_table_edited_with_duckdb_is_read(tmp_path: Any) -> None:
    keys = [f"user-{index}" for index in range(500)]
    source, edited = tmp_path / "s.parquet", tmp_path / "e.parquet"
    source.write_bytes(encode_keyed_table(table_of(keys), "parquet"))
    duckdb.sql(
        f"""copy (select value + 1 as value, namespace, key, key_group from '{source}'
                  where value % 2 = 0 order by key desc) to '{edited}'"""
    )
    back = decode_keyed_table(edited.read_bytes(), "parquet", ALL, judge=judged)
    assert keys_of(back) == set(keys[::2])
    assert back.column("key_group").to_pylist() == sorted(back.column("key_group").to_pylist())
    half = decode_keyed_table(edited.read_bytes(), "parquet", KeyGroupRange(0, 64), judge=judged)
    assert 0 < half.num_rows < back.num_rows


@pytest.mark.parametrize("table_format", FORMATS)
def test_wider_types_of_other_tools_are_cast(table_format: Any) -> None:
    table = table_of(["a", "b"])
    wide = table.cast(
        pa.schema([("key_group", pa.int64()), ("key", pa.large_utf8()), ("namespace", pa.large_binary()), ("value", pa.int64())])
    )
    back = decode_keyed_table(encode_keyed_table(wide, table_format), table_format, ALL, judge=judged)
    assert back.schema.types == table.schema.types


@pytest.mark.parametrize("table_format", FORMATS)
def test_damaged_tables_are_corrupt_state(table_format: Any) -> None:
    good = table_of(["a", "b", "c"])
    groups = good.column("key_group").to_numpy()
    tables = [
        good.drop_columns(["key_group"]),
        good.drop_columns(["key"]),
        good.drop_columns(["namespace"]),
        good.set_column(1, "key", pa.array(["a", None, "c"])),
        good.set_column(0, "key_group", pa.array([0, None, 1], pa.int32())),
        good.set_column(0, "key_group", pa.array(["0", "1", "2"])),
        good.set_column(0, "key_group", pa.array(np.sort((groups + 1) % 128))),
    ]
    for table in tables:
        data = write(table, table_format)
        with pytest.raises(CorruptStateError, match="'window': chk-1/f") as caught:
            decode_keyed_table(data, table_format, ALL, path="chk-1/f", operator="window", judge=judged)
        assert caught.value.path == "chk-1/f"
    for data in (b"", b"garbage", encode_keyed_table(good, table_format).to_pybytes()[:-20]):
        with pytest.raises(CorruptStateError):
            decode_keyed_table(data, table_format, ALL)
    with pytest.raises(CorruptStateError):
        decode_keyed_table(b"", "csv", ALL)


def write(table: pa.Table, table_format: str) -> bytes:
    sink = pa.BufferOutputStream()
    if table_format == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
