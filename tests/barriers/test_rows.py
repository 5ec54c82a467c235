"""Rows <-> columns: exact values, and misfits that are named."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import columns_to_rows, fitting_columns, misfits, rows_to_columns
from holdfast.statebackends.errors import InvalidConfigError, InvalidRowError, SchemaMismatchError
from tests.examples import examples

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("s", pa.string())])


@dataclass
class Point:
    n: int
    s: str | None


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        ({"n": 1}, "s", "it has no 's'"),
        ({"n": None, "s": "x"}, "n", "null in a column that was declared without nulls; where one may come, declare it as int | N"),
        ({"n": "one", "s": "x"}, "n", "int64"),
        ({"n": True, "s": "x"}, "n", "bool"),
        ({"n": 2**63, "s": "x"}, "n", "large"),
        ({"n": 1.5, "s": "x"}, "n", "float"),
        ({"n": 1.0, "s": "x"}, "n", "float"),
        ({"n": 1, "s": 5}, "s", "string"),
        ({"n": 1, "s": b"x"}, "s", "bytes"),
        ({"n": 1, "s": "x", "extra": 0}, "extra", "not declared"),
    ],
)
def test_the_first_misfit_is_named(row: dict[str, Any], column: str, reason: str) -> None:
    good = {"n": 1, "s": None}
    with pytest.raises(SchemaMismatchError) as caught:
        rows_to_columns([good, good, row, row], SCHEMA, "enrich")
    assert (caught.value.operator, caught.value.column) == ("enrich", column)
    assert "row 2 " in str(caught.value)
    assert reason in str(caught.value)
    assert repr(row) in (caught.value.record or "")


LOSSY: list[tuple[Any, pa.DataType, str]] = [
    ([1, 1.5], pa.list_(pa.int64()), "float is not int64"),
    ((None, b"x"), pa.large_list(pa.string()), "bytes is not string"),
    ("ab", pa.list_(pa.string()), "str is not list"),
    (np.array([1.5, 2.0]), pa.list_(pa.int64()), "float is not int64"),
    ([datetime(2020, 1, 1, 5)], pa.list_(pa.date32()), "datetime is not date32"),
    ([datetime(2020, 1, 1)], pa.list_(pa.timestamp("us", "UTC")), "a naive datetime"),
    ({"x": 1.5}, pa.struct([("x", pa.int64())]), "float is not int64"),
    ({"x": {"y": [True]}}, pa.struct([("x", pa.struct([("y", pa.list_(pa.int8()))]))]), "bool is not int8"),
    ({"k": 1.5}, pa.map_(pa.string(), pa.int64()), "float is not int64"),
    ([("k", b"x")], pa.map_(pa.string(), pa.string()), "bytes is not string"),
    ({b"k": 1}, pa.map_(pa.string(), pa.int64()), "bytes is not string"),
    ({"x": 1.5, "y": 2}, pa.struct([("x", pa.float64())]), "it has 'y', which is no field of struct"),
    ({"y": 2}, pa.struct([("x", pa.float64())]), "it has 'y', which is no field of struct"),
    ([{"k": {"x": 1}}, {"k": {"y": 1}}], pa.list_(pa.map_(pa.string(), pa.struct([("x", pa.int8())]))), "it has 'y'"),
    (Decimal("0E-999999999"), pa.decimal128(10, 2), "an exponent below"),
    ([{"k": Decimal("1E-20000")}], pa.list_(pa.map_(pa.string(), pa.decimal256(60, 2))), "an exponent below"),
    (1e39, pa.float32(), "too large for float"),
    (np.float64(-1e39), pa.float32(), "too large for float"),
    (65_520.0, pa.float16(), "too large for halffloat"),
    ([float("inf"), 1e39], pa.list_(pa.float32()), "too large for list"),
    (np.array([1e39]), pa.list_(pa.float32()), "too large for list"),
    ({"x": [{"y": -1e39}]}, pa.struct([("x", pa.list_(pa.struct([("y", pa.float32())])))]), "too large for struct"),
    ({"k": 1e39}, pa.map_(pa.string(), pa.float32()), "too large for map"),
]


@pytest.mark.parametrize(("value", "kind", "told"), LOSSY, ids=[f"{value!r} as {kind}" for value, kind, _ in LOSSY])
def test_what_would_be_lost_within_lists_maps_and_structs_is_refused(value: Any, kind: pa.DataType, told: str) -> None:
    schema = pa.schema([("n", kind)])
    with pytest.raises(SchemaMismatchError, match=r"row 1 .*column 'n'") as caught:
        rows_to_columns([{"n": None}, {"n": value}], schema)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([1, None, np.int64(2)], pa.list_(pa.int64())),
        (np.array([1, 2], np.int32), pa.list_(pa.int64())),
        (np.array([1.5, 2.5], np.float32), pa.list_(pa.float32())),
        (np.array(["a", None], object), pa.list_(pa.string())),
        ({1, 2}, pa.list_(pa.int64())),
        ([[1], None], pa.list_(pa.list_(pa.float64()))),
        ([1, 2.5], pa.list_(pa.float64())),
        ({"x": None, "y": [1]}, pa.struct([("x", pa.int64()), ("y", pa.list_(pa.int32()))])),
        ({"k": None}, pa.map_(pa.string(), pa.struct([("x", pa.int64())]))),
        ({}, pa.struct([("x", pa.int64())])),
        (float("inf"), pa.float32()),
        (3.4028235e38, pa.float32()),
        (np.array([np.inf, 1], np.float32), pa.list_(pa.float32())),
        ([float("-inf"), None, 1e38], pa.list_(pa.float32(), 3)),
        ([{"y": float("inf")}], pa.list_(pa.struct([("y", pa.float16())]))),
    ],
)
def test_what_fits_within_lists_maps_and_structs_is_taken(value: Any, kind: pa.DataType) -> None:
    taken = rows_to_columns([{"n": value}, {"n": None}], pa.schema([("n", kind)])).column("n")
    assert taken.to_pylist() == pa.array([value, None], kind).to_pylist()


def test_a_naive_datetime_is_refused_where_a_zone_is_declared() -> None:
    schema = pa.schema([("at", pa.timestamp("us", tz="UTC"))])
    with pytest.raises(SchemaMismatchError, match="naive"):
        rows_to_columns([{"at": datetime(2020, 1, 1)}], schema)
    berlin = datetime(2020, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert columns_to_rows(rows_to_columns([{"at": berlin}], schema)) == [{"at": datetime(2020, 1, 1, tzinfo=UTC)}]


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        (True, pa.float64()),
        (np.bool_(True), pa.float64()),
        ("x", pa.binary()),
        (datetime(2020, 1, 1), pa.date32()),
        (datetime(2020, 1, 1, tzinfo=UTC), pa.timestamp("us")),
        (date(2020, 1, 1), pa.timestamp("us")),
    ],
)
def test_nothing_is_converted_in_silence(value: Any, declared: pa.DataType) -> None:
    with pytest.raises(SchemaMismatchError):
        rows_to_columns([{"v": None}, {"v": value}], pa.schema([("v", declared)]))


def test_numpy_numbers_and_subclasses_are_taken() -> None:
    schema = pa.schema([("i", pa.int64()), ("f", pa.float64())])
    rows = [{"i": np.int32(1), "f": np.float32(0.5)}, {"i": 2, "f": 2}]
    assert columns_to_rows(rows_to_columns(rows, schema)) == [{"i": 1, "f": 0.5}, {"i": 2, "f": 2.0}]


def test_a_record_that_lacks_a_field_is_named() -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        rows_to_columns([Point(1, "a"), Point(2, 7)], SCHEMA, "p")  # type: ignore[arg-type]
    assert (caught.value.column, "row 1 " in str(caught.value)) == ("s", True)


def test_rows_that_are_no_rows_at_all_are_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="'p'"):
        rows_to_columns([3, 4], SCHEMA, "p")


FORMS = pa.schema(
    [pa.field("n", pa.int64(), nullable=False), ("p", pa.struct([("x", pa.int64())])), ("m", pa.map_("string", "int64"))]
)


class Indexed:
    """An object that answers as a dict does, and is none."""

    def __getitem__(self, name: str) -> Any:
        return {"n": 1, "p": None, "m": None}[name]

    def __len__(self) -> int:
        return 3


@dataclass
class Formed:
    n: Any
    p: Any
    m: Any


PARTS = st.sampled_from([None, {"x": 1}, {"x": "1"}, [("x", 1)], (("x", 1),), (1,), (), [], 5])
MAPS = st.sampled_from(
    [None, {"a": 1}, [("a", 1)], [["a", 1]], [{"key": "a", "value": 1}], [[("key", "a"), ("value", 1)]], [(("a", 1),)], 5]
)
ROWS_OF_ALL_FORMS = st.one_of(
    st.builds(Formed, st.sampled_from([1, 2, None]), PARTS, MAPS),
    st.builds(lambda n, p, m: {"n": n, "p": p, "m": m}, st.sampled_from([1, 2, "x"]), PARTS, MAPS),
    st.sampled_from([Indexed(), {"n": 1, "p": None}, {"n": 1, "p": None, "m": None, "extra": 1}, None]),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(ROWS_OF_ALL_FORMS, max_size=12))
def test_a_row_is_judged_by_itself_alone(rows: list[Any]) -> None:
    alone = [fitting_columns([row], FORMS) for row in rows]
    found = set(misfits(rows, FORMS))
    assert found == {index for index, columns in enumerate(alone) if columns is None}
    together = rows_to_columns([row for index, row in enumerate(rows) if index not in found], FORMS)
    assert together.to_pylist() == [row for columns in alone if columns is not None for row in columns.to_pylist()]
    assert (fitting_columns(rows, FORMS) is None) == bool(found)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.list_(FORMS.field("p").type), [[{"x": 1}], [[("x", 1)]], [()], None]),
        (pa.struct([("p", FORMS.field("p").type)]), [{"p": {"x": 1}}, {"p": [("x", 1)]}, {"p": ()}, {}, None]),
        (pa.map_("string", FORMS.field("p").type), [{"a": {"x": 1}}, [("a", {"x": 2})], {"a": [("x", 1)]}, {"a": ()}, None]),
        (pa.map_("string", "int64"), [[("a", 1)], {"a": 1}, [{"key": "a", "value": 1}], [], [("a",)]]),
    ],
)
def test_a_struct_inside_another_value_takes_no_form_from_its_neighbours(kind: pa.DataType, values: list[Any]) -> None:
    schema = pa.schema([("v", kind)])
    rows = [{"v": value} for value in values]
    for order in (rows, rows[::-1]):
        alone = [fitting_columns([row], schema) for row in order]
        lost = [index for index, columns in enumerate(alone) if columns is None]
        assert list(misfits(order, schema)) == lost
        kept = [row for index, row in enumerate(order) if index not in lost]
        wanted = [row for columns in alone if columns is not None for row in columns.to_pylist()]
        assert rows_to_columns(kept, schema).to_pylist() == wanted


def test_dicts_and_records_of_one_batch_are_each_taken_in_their_form() -> None:
    columns = rows_to_columns([{"n": 1, "s": None}, Point(2, "b"), {"n": 3, "s": "c"}], SCHEMA, "p")
    assert columns.to_pydict() == {"n": [1, 2, 3], "s": [None, "b", "c"]}


def test_a_dict_that_makes_up_a_column_does_not_hide_another_that_was_not_declared() -> None:
    class Default(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            return None

    rows = [Default(n=1), {"n": 1, "s": "x", "extra": 0}]
    assert list(misfits(rows, SCHEMA)) == [0, 1]
    with pytest.raises(SchemaMismatchError, match="not the declared ones"):
        rows_to_columns(rows, SCHEMA)


def test_nanoseconds_have_no_python_value() -> None:
    with pytest.raises(InvalidConfigError, match="nanoseconds"):
        columns_to_rows(pa.record_batch({"t": pa.array([1], pa.timestamp("ns"))}))


BEYOND = [
    (pa.array([0, None, 10**18], pa.timestamp("us")), "33658-09-27T01:46:40"),
    (pa.array([0, None, 10**18], pa.timestamp("us", "UTC")), "33658-09-27T01:46:40"),
    (pa.array([0, -(10**17)], pa.timestamp("us", "UTC")), "-1199-0"),
    (pa.array([0, 10**18], pa.timestamp("us", "Europe/Berlin")), "33658-09-27T01:46:40"),
    (pa.array([0, 10**18], pa.timestamp("ms", "UTC")), "out of bounds"),
    (pa.array([0, 10**9], pa.int32()).cast(pa.date32()), "2739877-"),
    (pa.array([[10**18]], pa.list_(pa.timestamp("us"))), "out of range"),
    (pa.array([10**18], pa.duration("s")), "too large"),
]


@pytest.mark.parametrize(("column", "told"), BEYOND, ids=[str(column.type) for column, _ in BEYOND])
def test_a_time_that_python_does_not_have_is_no_number(column: pa.Array, told: str) -> None:
    with pytest.raises(InvalidRowError, match="column 'at': ") as caught:
        columns_to_rows(pa.record_batch({"id": pa.array(range(len(column))), "at": column}))
    assert told in str(caught.value)
    assert caught.value.column == "at"


def test_the_first_and_the_last_moment_are_pythons_own() -> None:
    ends = [datetime.min, None, datetime.max]
    naive = pa.array(ends, pa.timestamp("us"))
    columns = pa.record_batch({"naive": naive, "utc": naive.cast(pa.timestamp("us", "UTC")), "day": naive.cast(pa.date32())})
    wanted = [{"naive": end, "utc": end and end.replace(tzinfo=UTC), "day": end and end.date()} for end in ends]
    assert columns_to_rows(columns) == wanted
    assert columns_to_rows(columns.slice(0, 0)) == []


def test_values_are_pythons_own() -> None:
    moment = datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    row = {
        "i": 1, "f": 0.5, "s": "x", "b": b"y", "t": True, "d": date(1960, 2, 29), "m": moment, "naive": moment.replace(tzinfo=None),
        "x": Decimal("1.50"), "l": [1, None], "z": None, "32": 7,
    }  # fmt: skip
    columns = pa.record_batch(
        {
            "i": pa.array([1, None]), "f": pa.array([0.5, None]), "s": pa.array(["x", None]), "b": pa.array([b"y", None]),
            "t": pa.array([True, None]), "d": pa.array([date(1960, 2, 29), None]),
            "m": pa.array([moment, None], pa.timestamp("us", "UTC")), "naive": pa.array([moment.replace(tzinfo=None), None]),
            "x": pa.array([Decimal("1.50"), None]), "l": pa.array([[1, None], None]), "z": pa.array([None, None], pa.int64()),
            "32": pa.array([7, None], pa.int32()),
        }
    )  # fmt: skip
    rows = columns_to_rows(columns)
    assert rows == [row, dict.fromkeys(row)]
    assert [type(value) for value in rows[0].values()] == [type(value) for value in row.values()]
    assert rows_to_columns(rows, columns.schema).equals(columns)


def test_a_row_factory_makes_records_and_no_columns_make_empty_rows() -> None:
    columns = pa.record_batch({"n": [1], "s": ["a"]})
    assert columns_to_rows(columns, Point) == [Point(1, "a")]
    empty = pa.RecordBatch.from_arrays([], schema=pa.schema([])).slice(0, 0)
    assert columns_to_rows(empty) == []


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.fixed_dictionaries({"n": st.integers(-(2**63), 2**63 - 1), "s": st.none() | st.text()}), max_size=20))
def test_round_trip(rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if row["s"] is None or row["s"].isprintable()]
    assert columns_to_rows(rows_to_columns(rows, SCHEMA)) == rows


def test_filter_keeps_both_representations_without_a_conversion() -> None:
    columns = pa.record_batch({"n": [1, 2, 3]})
    batch = Batch(columns=columns, timestamps=np.array([10, 20, 30]))
    rows = batch.rows()
    kept = batch.filter(np.array([True, False, True]))
    assert kept.is_columnar
    assert kept.rows() == [{"n": 1}, {"n": 3}]
    assert kept.rows()[0] is rows[0]
    assert kept.timestamps is not None
    assert kept.timestamps.tolist() == [10, 30]


def test_a_batch_names_the_producer_of_a_bad_row() -> None:
    batch = Batch(rows=[{"n": "x", "s": None}], schema=SCHEMA, producer="parse").slice(0, 1)
    with pytest.raises(SchemaMismatchError, match="'parse'"):
        batch.columns()


@pytest.mark.parametrize(
    "batch", [Batch(rows=[{"n": 1, "s": "a"}], schema=SCHEMA), Batch(rows=[{"n": 1}]), Batch(rows=[Point(1, "a")])]
)
def test_an_unshared_batch_has_rows_of_its_own(batch: Batch) -> None:
    other = batch.unshared()
    before = repr(batch.rows())
    row = other.rows()[0]
    if isinstance(row, dict):
        row["n"] = 2
    else:
        row.n = 2
    assert repr(batch.rows()) == before == repr(batch.unshared().rows())
    assert repr(other.rows()) != before


def test_an_unshared_batch_of_rows_without_columns_shares_no_lists_either() -> None:
    batch = Batch(rows=[{"tags": ["a"]}, [1, [2]]])
    first, second = batch.unshared().rows()
    first["tags"].append("b")
    second[1].append(3)
    assert batch.rows() == [{"tags": ["a"]}, [1, [2]]]


def test_what_can_not_be_copied_is_shared_and_its_row_is_not() -> None:
    lock = threading.Lock()
    batch = Batch(rows=[{"lock": lock}])
    (row,) = batch.unshared().rows()
    row["n"] = 1
    assert row["lock"] is lock
    assert batch.rows() == [{"lock": lock}]
