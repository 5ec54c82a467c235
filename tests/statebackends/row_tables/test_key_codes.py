"""Codes of keys: equal for equal keys, and the order that they give rows."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.row_tables.key_codes import equal_rows, key_codes, key_groups_of_codes, stable_order
from holdfast.statebackends.serialization.keys import KeyType
from tests.examples import examples

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int64": st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3),
    "float64": st.sampled_from([0.0, -0.0, 1.5, float("nan"), -float("nan")]),
    "utf8": st.text(max_size=20) | st.sampled_from(["", "a", "a\0", "a\0\0", "x" * 255, "x" * 256, "x" * 257, "y" * 600]),
    "binary": st.binary(max_size=20),
    "bool": st.booleans(),
    "decimal128(38, 2)": st.integers(-(10**36), 10**36).map(lambda number: Decimal(number).scaleb(-2)),
}


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_codes_are_equal_for_equal_keys_and_rows_just_then(data: st.DataObject) -> None:
    fields = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3))
    key_type = KeyType.parse(f"tuple<{','.join(fields)}>")
    keys = data.draw(st.lists(st.tuples(*(VALUES[field] for field in fields)), min_size=1, max_size=12))
    column = key_type.column_of_values(keys, max_parallelism=128)
    codes, encoded = key_codes(column), column.encoded()
    assert key_groups_of_codes(codes).tolist() == column.key_groups.tolist()
    for one in range(len(keys)):
        rows = column.take([one] * len(keys))
        same = [other == encoded[one] for other in encoded]
        assert equal_rows(rows.arrays, column.arrays).tolist() == same
        assert (codes == codes[one])[same].all()
        if not all(same):
            assert len(set(codes.tolist())) > 1, "these do not collide by chance"
    sliced = key_type.column([array.slice(1) for array in column.arrays], max_parallelism=128)
    assert key_codes(sliced).tolist() == codes[1:].tolist()


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 5) | st.integers(0, 2**64 - 1), max_size=50), st.integers(1, 200_000))
def test_positions_are_sorted_by_code_and_of_one_code_stay(some: list[int], repeated: int) -> None:
    codes = np.resize(np.array(some or [1], np.uint64), min(repeated, 70_000) if repeated % 7 == 0 else len(some))
    order = stable_order(codes)
    assert order.tolist() == np.argsort(codes, kind="stable").tolist()
