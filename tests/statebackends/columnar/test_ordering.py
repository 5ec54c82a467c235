"""Which record comes first, and what a columnar state keeps of it, against a plain model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.columnar.ordering import first_of_each, sort_numbers, sorted_rows
from holdfast.statebackends.columnar.state import NumpyColumnarState
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor
from tests.examples import examples

KEY = KeyType.parse("int64")
DESCRIPTOR = ColumnarStateDescriptor(
    "kept", (ColumnAggregate("max", "v", "v", pa.int64()), ColumnAggregate("max", "i", "i", pa.int64()))
)


def keys(values: list[int]) -> Any:
    return KEY.column([pa.array(values, pa.int64())], max_parallelism=128)


def state() -> NumpyColumnarState:
    return NumpyColumnarState(DESCRIPTOR, [pa.int64()], lambda arrays: KEY.column(arrays, max_parallelism=128), "op")


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=20), st.booleans(), st.booleans())
def test_first_of_each(rows: list[tuple[int, int]], latest: bool, greatest: bool) -> None:
    owners = np.array([owner for owner, _ in rows], np.int64)
    numbers = sort_numbers(pa.array([value for _, value in rows], pa.int64()), greatest=greatest)
    sign = -1 if greatest else 1
    expected: dict[int, int] = {}
    for row, (owner, value) in enumerate(rows):
        best = expected.get(owner)
        if best is None or (sign * value, -row * latest) < (sign * rows[best][1], -best * latest):
            expected[owner] = row
    assert first_of_each(owners, numbers, latest=latest).tolist() == sorted(expected.values())


SMALL = st.integers(0, 2)
WIDE = SMALL | st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_sorted_rows(data: st.DataObject) -> None:
    """By the numbers, then by time, then by place; whether they fit into one number or not."""
    is_wide = data.draw(st.lists(st.booleans(), min_size=2, max_size=4))
    is_timed, latest = data.draw(st.booleans()), data.draw(st.booleans())
    rows = data.draw(st.lists(st.tuples(*(WIDE if wide else SMALL for wide in is_wide)), min_size=1, max_size=12))
    moments, *numbers = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    times, sign = (moments if is_timed else None), (-1 if latest else 1)
    expected = sorted(range(len(rows)), key=lambda row: (rows[row][1:], sign * rows[row][0] if is_timed else 0, sign * row))
    assert sorted_rows(numbers, times, latest=latest).tolist() == expected


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3)), max_size=8), max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_a_state_keeps_what_comes_first_and_tells_which_rows_did(
    batches: list[list[tuple[int, int | None]]], latest: bool, greatest: bool
) -> None:
    kept, model, number = state(), dict[int, tuple[int | None, int]](), 0
    for batch in batches:
        before = dict(model)
        for key, value in batch:
            if key not in model or comes_first(value, model[key][0], greatest=greatest, latest=latest):
                model[key] = (value, number)
            number += 1
        columns = [pa.array([value for _, value in batch], pa.int64()), pa.array(range(number - len(batch), number), pa.int64())]
        rows = kept.keep_first(keys([key for key, _ in batch]), 0, columns, [greatest], latest=latest)
        changed = sorted(i for key, (_, i) in model.items() if before.get(key) != model[key])
        assert [row + number - len(batch) for row in rows.tolist()] == changed
    found = {row["key_0"]: (row["v"], row["i"]) for row in kept.read(0).to_pylist()}
    assert found == model
    asked = list(range(7))
    rows, (values, numbers) = kept.find(keys(asked), 0)
    pairs = zip(values.to_pylist(), numbers.to_pylist(), strict=True)
    assert {asked[row]: pair for row, pair in zip(rows, pairs, strict=True)} == model
    assert len(kept.find(keys(asked), 1)[0]) == 0


def comes_first(value: int | None, held: int | None, *, greatest: bool, latest: bool) -> bool:
    if value == held:
        return latest
    if value is None or held is None:
        return held is None
    return value > held if greatest else value < held
