"""Columns of a row table as text, and back."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.row_tables.type_text import fields_of_text, row_table_text, unkept_column
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import state_meta
from holdfast.statebackends.state import RowTableStateDescriptor

TYPES = [
    pa.int8(), pa.uint64(), pa.float32(), pa.string(), pa.large_string(), pa.binary(7), pa.bool_(), pa.date32(), pa.time64("us"),
    pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.timestamp("s", "Europe/Berlin"), pa.duration("us"), pa.decimal128(38, -2),
    pa.decimal256(50, 3), pa.list_(pa.int64()), pa.large_list(pa.list_(pa.string())), pa.map_(pa.string(), pa.list_(pa.int8())),
    pa.struct([("a b", pa.int64()), ("c", pa.struct([("d", pa.null())]))]), pa.struct([]),
]  # fmt: skip


def test_columns_as_text_and_back() -> None:
    names = [f'column "{number}", é: int64>' if number % 2 else f"c{number}" for number in range(len(TYPES))]
    schema = pa.schema(list(zip(names, TYPES, strict=True)))
    text = row_table_text(schema)
    found = fields_of_text(text)
    assert found is not None
    assert row_table_text(pa.schema(found)) == text
    assert [field.name for field in found] == schema.names
    assert [field.type for field in found] == TYPES
    for broken in (text[:-1], text[1:], f"{text}x", text.replace("int8", "int7"), "rowtable<a int64>"):
        assert fields_of_text(broken) is None


UNREADABLE = [
    pa.string_view(), pa.binary_view(), pa.struct([]), pa.list_(pa.string_view()), pa.large_list(pa.struct([])),
    pa.map_(pa.string(), pa.binary_view()), pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string_view()))]),
]  # fmt: skip
WITHOUT_TEXT = [pa.month_day_nano_interval(), pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.int64(), 3)]


@pytest.mark.parametrize("kind", UNREADABLE, ids=str)
def test_a_column_that_no_snapshot_can_keep_is_refused_where_it_is_declared(kind: pa.DataType) -> None:
    schema = pa.schema([("kept", pa.int64()), ("bad", kind)])
    assert unkept_column(schema) == schema.field("bad")
    with pytest.raises(InvalidConfigError, match=r"state 'rows': column 'bad' is .*cast it") as refused:
        state_meta(RowTableStateDescriptor("rows", schema), KeyType.of(int))
    assert (refused.value.state, refused.value.column) == ("rows", "bad")


@pytest.mark.parametrize("kind", WITHOUT_TEXT, ids=str)
def test_a_type_without_a_text_is_kept_by_row_tables_but_not_by_joins(kind: pa.DataType) -> None:
    schema = pa.schema([("odd", kind)])
    assert state_meta(RowTableStateDescriptor("rows", schema), KeyType.of(int)).name == "rows"
    assert unkept_column(schema) == schema.field("odd")


def test_columns_that_snapshots_keep_are_taken() -> None:
    kept = [kind for kind in TYPES if kind != pa.struct([])]
    assert unkept_column(pa.schema([(f"c{number}", kind) for number, kind in enumerate(kept)])) is None
