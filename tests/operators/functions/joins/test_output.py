"""Keys and columns of a join, which are judged when the graph is built."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.joins.output import How, JoinOutput, Suffixes, check_how, join_output, join_sides
from holdfast.operators.functions.schema import UNDECLARED, RowType
from holdfast.statebackends.errors import GraphError, UnknownColumnError

ORDERS = RowType(pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("item", pa.string(), nullable=False)]))
PAID = RowType(pa.schema([pa.field("id", pa.int64()), pa.field("amount", pa.float64(), nullable=False)]))


def output(left: RowType, right: RowType, *, on: Any = "id", how: How = "inner", suffixes: Suffixes | None = None) -> JoinOutput:
    sides = join_sides(on, left, right, "paid")
    return join_output(*sides, how, suffixes, "paid")


def fields(found: JoinOutput) -> list[tuple[str, bool]]:
    return [(field.name, field.nullable) for field in found.schema]


def test_the_key_comes_once_then_the_left_then_the_right() -> None:
    assert output(ORDERS, PAID).schema.names == ["id", "item", "amount"]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("inner", [("id", False), ("item", False), ("amount", False)]),
        ("left", [("id", False), ("item", False), ("amount", True)]),
        ("right", [("id", True), ("item", True), ("amount", False)]),
        ("full", [("id", True), ("item", True), ("amount", True)]),
    ],
)
def test_what_an_outer_row_lacks_may_be_null(how: How, expected: list[tuple[str, bool]]) -> None:
    assert fields(output(ORDERS, PAID, how=how)) == expected


def test_on_is_a_column_a_pair_or_several() -> None:
    both = RowType(pa.schema({"a": pa.int64(), "b": pa.string()}))
    other = RowType(pa.schema({"x": pa.int64(), "b": pa.string()}))
    named: list[tuple[Any, RowType, list[str], list[str]]] = [
        ("b", other, ["b"], ["b"]),
        (("a", "x"), other, ["a"], ["x"]),
        (("a", "b"), both, ["a", "b"], ["a", "b"]),
        (["a", "b"], both, ["a", "b"], ["a", "b"]),
        ([("a", "x"), "b"], other, ["a", "b"], ["x", "b"]),
    ]
    for on, right, of_left, of_right in named:
        one, two = join_sides(on, both, right, "paid")
        assert (list(one.selector.names), list(two.selector.names)) == (of_left, of_right)


@pytest.mark.parametrize("on", [(), 7, [7], ["id", ("id", "id", "id")]])
def test_what_on_can_not_be(on: Any) -> None:
    with pytest.raises(GraphError, match="operator 'paid'"):
        join_sides(on, ORDERS, PAID, "paid")


def test_an_unknown_column_is_named() -> None:
    with pytest.raises(UnknownColumnError, match="operator 'paid': there is no column 'nr'"):
        join_sides("nr", ORDERS, PAID, "paid")


def test_keys_of_unequal_types_are_refused() -> None:
    with pytest.raises(GraphError, match="its keys have different types: item of the left is utf8, id of the right int64"):
        join_sides(("item", "id"), ORDERS, PAID, "paid")


def test_undeclared_rows_are_refused() -> None:
    with pytest.raises(GraphError, match="operator 'paid' needs columns"):
        join_sides("id", ORDERS, UNDECLARED, "paid")


def test_clashing_columns_are_named_unless_suffixes_part_them() -> None:
    with pytest.raises(GraphError, match="operator 'paid': its result would have two columns of one name: item") as caught:
        output(ORDERS, ORDERS)
    assert caught.value.columns == ["item"]
    assert output(ORDERS, ORDERS, suffixes=("", "_right")).schema.names == ["id", "item", "item_right"]
    with pytest.raises(GraphError, match="two columns of one name: item"):
        output(ORDERS, ORDERS, suffixes=("", ""))


def test_a_column_of_the_right_called_like_the_key_clashes() -> None:
    right = RowType(pa.schema({"nr": pa.int64(), "id": pa.int64()}))
    with pytest.raises(GraphError, match="two columns of one name: id"):
        output(ORDERS, right, on=("id", "nr"))
    assert output(ORDERS, right, on=("id", "nr"), suffixes=("", "_right")).schema.names == ["id", "item", "id_right"]


def test_how_is_one_of_four() -> None:
    with pytest.raises(GraphError, match="operator 'paid': how is inner, left, right, full, not 'outer'"):
        check_how("outer", "paid")


def test_rows_without_a_partner_get_nulls() -> None:
    found = output(ORDERS, PAID, how="full").batch([pa.array([1, 2])], None, [pa.array([1.5, 2.5])], np.array([10, 20]))
    assert found.rows() == [{"id": 1, "item": None, "amount": 1.5}, {"id": 2, "item": None, "amount": 2.5}]


def test_a_null_is_no_key_and_has_a_place() -> None:
    rows = RowType(pa.schema({"id": pa.int32(), "name": pa.string()}))
    left, _ = join_sides(["id", "name"], rows, rows, "paid")
    columns = pa.RecordBatch.from_arrays([pa.array([1, None, 3], pa.int32()), pa.array(["a", "b", None])], names=["id", "name"])
    batch = Batch(columns=columns)
    found = left.selector.without_key(batch)
    assert found is not None
    assert found.tolist() == [False, True, True]
    assert left.selector.keys(batch, max_parallelism=8, operator="paid").values() == [(1, "a"), (0, "b"), (3, "")]
    assert [array.to_pylist() for array in left.key_values(columns)] == [[1, None, 3], ["a", "b", None]]
