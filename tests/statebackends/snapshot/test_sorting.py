"""Sorting by chunks gives what sorting the whole gives, and an encoded stream what the table gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import KeyGroupRange, StateMeta
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot import sorting as sortedrows
from holdfast.statebackends.snapshot.row_rules import RowRules
from holdfast.statebackends.snapshot.rows import KeyedRows
from holdfast.statebackends.snapshot.sorting import BATCH_ROWS, GroupSort, RowStream
from holdfast.statebackends.snapshot.table_file import TableFile, decode_keyed_table
from holdfast.statebackends.snapshot.tables import encode_keyed_table, keyed_table_pieces
from holdfast.statebackends.state import MapStateDescriptor, Ttl, ValueStateDescriptor

META = StateMeta("s", "value", "str", "utf8")
UTF8 = KeyType.of(str)
ALL = KeyGroupRange(0, 128)


def batch(groups: list[int], first: int) -> pa.RecordBatch:
    """Rows that say in which order they came."""
    return pa.record_batch({"key_group": pa.array(groups, pa.int32()), "row": pa.array(range(first, first + len(groups)))})


@given(st.lists(st.lists(st.integers(0, 9) | st.integers(0, 32_767), max_size=12), max_size=8), st.integers(1, 9))
def test_as_if_all_rows_were_sorted_at_once(groups: list[list[int]], rows: int) -> None:
    sort = GroupSort("key_group")
    expected: list[tuple[int, int]] = []
    for some in groups:
        sort.add(batch(some, len(expected)))
        expected += [(group, len(expected) + index) for index, group in enumerate(some)]
    expected.sort(key=lambda row: row[0])
    for _ in range(2):  # may be asked again
        found = list(sort.batches(rows))
        assert [(row["key_group"], row["row"]) for part in found for row in part.to_pylist()] == expected
        assert all(0 < len(part) <= rows for part in found)


def test_batches_are_full_but_for_the_last() -> None:
    sort = GroupSort("key_group")
    for first in range(0, 100, 10):
        sort.add(batch([first % 7] * 10, first))
    assert [len(part) for part in sort.batches(32)] == [32, 32, 32, 4]


def test_large_rows_come_in_smaller_batches_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sortedrows, "_BATCH_BYTES_MAX", 100)
    sort = GroupSort("key_group")
    for first in (0, 10, 20):
        values = [b"v" * (200 if first + number == 13 else 20) for number in range(10)]
        some = batch([number % 3 for number in range(10)], first)
        sort.add(some.append_column("value", pa.array(values)))
    found = list(sort.batches(8))
    assert [each.num_rows for each in found if each.nbytes > 100] == [1], "the largest row is alone"
    rows = [(row["key_group"], row["row"]) for each in found for row in each.to_pylist()]
    assert rows == sorted((number % 3, first + number) for first in (0, 10, 20) for number in range(10))


@pytest.mark.parametrize("chunk", [1, 7, 1_000, 40_000])
def test_small_and_large_chunks_make_one_table(chunk: int) -> None:
    rows = KeyedRows(KeyType.of(int), 128, "op")
    serializer = StateSerializer.of(ValueStateDescriptor("s", str), rows.key_type)
    count = min(chunk * 300, 45_000)
    keys = [rows.key_type.encode(key) for key in range(count)]
    names = [b"", b"window"]
    values = [f"v{number}" for number in range(count)]
    starts = range(0, count, chunk)
    chunks = [(names[first // chunk % 2], keys[first : first + chunk], values[first : first + chunk]) for first in starts]
    table = rows.table(serializer, chunks)
    groups = table.column("key_group").to_numpy()
    assert (np.diff(groups) >= 0).all()
    assert (rows.groups_of(keys)[np.array(table.column("key").to_pylist())] == groups).all()
    found = {row["key"]: (row["namespace"], row["value"]) for row in table.to_pylist()}
    assert found == {number: (names[number // chunk % 2], f"v{number}") for number in range(count)}
    assert max(len(part) for part in table.to_batches()) <= BATCH_ROWS


@pytest.mark.parametrize(("value_bytes", "batches"), [(10, 1), (1_000, 3)])
def test_values_of_a_batch_are_converted_in_parts(value_bytes: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are one batch again, large ones stay apart; the rows are the same."""
    monkeypatch.setattr("holdfast.statebackends.snapshot.rows.ROWS_PER_BATCH", 1_000)
    monkeypatch.setattr("holdfast.statebackends.snapshot.rows._BATCH_BYTES", 1 << 20)
    added: list[pa.RecordBatch] = []
    add = GroupSort.add

    def noted(self: GroupSort, batch: pa.RecordBatch) -> None:
        added.append(batch)
        add(self, batch)

    monkeypatch.setattr(GroupSort, "add", noted)
    rows = KeyedRows(KeyType.of(int), 128, "op")
    serializer = StateSerializer.of(ValueStateDescriptor("s", str, Ttl(1_000)), rows.key_type)
    keys = [rows.key_type.encode(key) for key in range(2_500)]
    values = [(number, f"{number}".rjust(value_bytes)) for number in range(2_500)]
    table = rows.table(serializer, [(b"w", keys, values)])
    assert len(added) == batches
    assert {row["key"]: (row["ttl_stamp_ms"], row["value"]) for row in table.to_pylist()} == dict(enumerate(values))
    assert (np.diff(table.column("key_group").to_numpy()) >= 0).all()
    assert rows.stream(serializer, [(b"w", keys, values)]).size >= table.nbytes


def test_entries_of_a_key_stay_together_and_batches_bounded() -> None:
    rows = KeyedRows(KeyType.of(int), 128, "op")
    serializer = StateSerializer.of(MapStateDescriptor("s", int, int), rows.key_type)
    keys = [rows.key_type.encode(key) for key in range(300)]
    table = rows.table(serializer, [(b"", keys, [dict.fromkeys(range(500), key) for key in range(300)])])
    assert [len(part) for part in table.to_batches()] == [BATCH_ROWS, 300 * 500 - BATCH_ROWS]
    assert (np.diff(table.column("map_key").to_numpy()) % 500 == 1).all()


def wide_table(count: int) -> pa.Table:
    rows = KeyedRows(UTF8, 128, "op")
    serializer = StateSerializer.of(ValueStateDescriptor("s", str), UTF8)
    keys = [UTF8.encode(f"user-{number}") for number in range(count)]
    return rows.table(serializer, [(b"", keys, [f"{number * 7919 % 10_007}" * 5 for number in range(count)])])


@pytest.mark.parametrize("table_format", ["arrow", "parquet"])
def test_a_buffer_that_was_too_small_changes_nothing(table_format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = wide_table(10_000)
    data = encode_keyed_table(table, table_format)
    monkeypatch.setattr("holdfast.statebackends.snapshot.tables._FILE_BYTES", -table.nbytes)
    assert encode_keyed_table(table, table_format).equals(data)
    assert decode_keyed_table(data, table_format, ALL, judge=RowRules.of(META, UTF8, 128).judged).equals(table)


@pytest.mark.parametrize("table_format", ["arrow", "parquet"])
@pytest.mark.parametrize("compresses", [True, False])
@pytest.mark.parametrize("count", [0, 10, 10_000])
def test_pieces_are_the_bytes_of_the_file(table_format: Any, compresses: bool, count: int) -> None:
    table = wide_table(count)
    stream = RowStream(table.schema, table.nbytes, lambda: iter(table.to_batches(max_chunksize=3_000)))
    pieces = keyed_table_pieces(stream, table_format, compresses=compresses)
    assert b"".join(pieces) == encode_keyed_table(stream, table_format, compresses=compresses).to_pybytes()
    assert (len(pieces) > 1) == (table_format == "arrow" and not compresses and count == 10_000)


def test_pieces_of_rows_that_are_not_sorted_are_refused() -> None:
    table = wide_table(10_000)
    backwards = table.take(pa.array(range(table.num_rows - 1, -1, -1)))
    with pytest.raises(InvariantError):
        keyed_table_pieces(backwards, "arrow", compresses=False)


def test_rows_that_compress_worse_than_their_bound_are_written_all_the_same() -> None:
    """Many small columns: what a file says of each is more than what is in them."""
    fields = [pa.field(f"f{number}", pa.int8()) for number in range(2_000)]
    schema = pa.schema([pa.field("key_group", pa.int32()), *fields])
    table = pa.Table.from_arrays([pa.array([1] * 40, pa.int32()), *([pa.array(range(40), pa.int8())] * 2_000)], schema=schema)
    assert pa.ipc.open_file(encode_keyed_table(table, "arrow")).read_all().equals(table)


@pytest.mark.parametrize("count", [0, 5, 100, 250, 300])
def test_row_groups_are_those_of_a_table_written_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.statebackends.snapshot.tables._ROW_GROUP_ROWS", 100)
    table = wide_table(count)

    def pieces() -> Iterator[pa.RecordBatch]:
        return iter(table.to_batches(max_chunksize=30))

    data = encode_keyed_table(RowStream(table.schema, table.nbytes, pieces), "parquet")
    whole = pa.BufferOutputStream()
    pq.write_table(table, whole, row_group_size=100, compression="zstd", store_schema=True)
    assert data.equals(whole.getvalue())


def test_batches_out_of_order_are_refused() -> None:
    parts = [batch([3, 4], 0), batch([2, 5], 2)]
    with pytest.raises(InvariantError):
        encode_keyed_table(RowStream(parts[0].schema, 100, lambda: iter(parts)), "arrow")


@pytest.mark.parametrize("table_format", ["arrow", "parquet"])
def test_a_file_gives_the_columns_that_are_asked_for(table_format: Any, tmp_path: Path) -> None:
    table = wide_table(40_000)
    path = tmp_path / "table"
    path.write_bytes(encode_keyed_table(table, table_format))
    file = TableFile.open(pa.OSFile(str(path)), table_format)
    assert pa.Table.from_batches(file.batches()).equals(table)
    for columns in (["key_group"], ["namespace", "key"], ["value", "key_group", "key"]):
        found = pa.Table.from_batches(file.batches(columns))
        assert found.equals(table.select(columns).replace_schema_metadata(found.schema.metadata))
    some = pa.Table.from_batches(file.sorted_batches(KeyGroupRange(10, 20), ["value"]))
    groups = table.column("key_group").to_numpy()
    expected = table.filter(pa.array((groups >= 10) & (groups < 20))).select(["key_group", "value"])
    assert some.equals(expected.replace_schema_metadata(some.schema.metadata))
