"""Running aggregates per key."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.operators.functions.aggregates import columnar_descriptor, count, max, mean, min, sum
from holdfast.operators.functions.running_aggregates import RunningAggregateOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.statebackends.errors import StateOverflowError
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("k", pa.int64()), ("v", pa.int64())]))


def harness(*, emits_changes: bool = True, **settings: Any) -> OperatorHarness:
    return OperatorHarness(operator(emits_changes=emits_changes), key_type="int64", **settings)


def operator(*, emits_changes: bool = True) -> RunningAggregateOperator:
    aggregates = {"n": count(), "total": sum("v"), "most": max("v")}
    descriptor = columnar_descriptor("aggregates", aggregates, ROWS, ("k",), "op")
    return RunningAggregateOperator(descriptor, key_selector("k", None, ROWS, "op"), ROWS, emits_changes=emits_changes)


def columns(keys: list[int], values: Sequence[int | None]) -> pa.RecordBatch:
    return pa.record_batch({"k": keys, "v": pa.array(values, pa.int64())}, schema=ROWS.schema)


def test_changes_are_the_new_rows_of_the_keys_of_a_batch() -> None:
    with harness() as one:
        one.process(columns([7, 3, 7], [1, 2, 3]), [10, 30, 20])
        one.process(columns([3], [None]))
    assert one.output.rows() == [
        {"k": 7, "n": 2, "total": 4, "most": 3},
        {"k": 3, "n": 1, "total": 2, "most": 2},
        {"k": 3, "n": 2, "total": 2, "most": 2},
    ]
    assert one.output.timestamps() == [30, 30, None]
    assert one.output.batches[0].columns().schema == operator().output_type.schema


def test_nothing_is_emitted_when_nothing_is_asked_for() -> None:
    with harness(emits_changes=False) as one:
        one.process(columns([1], [1]))
        one.process(columns([], []))
    assert one.output.elements == []


def test_restored_at_another_parallelism_it_goes_on_counting() -> None:
    keys = list(range(50))
    with harness() as one:
        one.process(columns(keys, keys))
        snapshot = one.snapshot()
        one.process(columns(keys, keys))
    rows = []
    for subtask in range(3):
        restored = OperatorHarness.restored(operator(), [snapshot], parallelism=3, subtask=subtask, key_type="int64")
        with restored as part:
            owned = part.operator.selector.key_type.column([pa.array(keys)], max_parallelism=128).key_groups * 3 // 128 == subtask
            mine = np.array(keys)[owned].tolist()
            part.process(columns(mine, mine))
            rows += part.output.rows()
    assert sorted((row["k"], row["n"], row["total"]) for row in rows) == [(key, 2, 2 * key) for key in keys]


def test_a_sum_beyond_int64_is_an_error() -> None:
    with harness() as one:
        one.process(columns([1], [2**63 - 1]))
        with pytest.raises(StateOverflowError):
            one.process(columns([1], [1]))


def test_decimals_are_exact_over_a_restore_and_have_the_stated_types() -> None:
    rows = RowType(pa.schema([("k", pa.int64()), ("v", pa.decimal128(20, 2))]))
    aggregates = {"total": sum("v"), "most": max("v"), "least": min("v"), "average": mean("v")}
    descriptor = columnar_descriptor("aggregates", aggregates, rows, ("k",), "op")

    def one_of() -> RunningAggregateOperator:
        return RunningAggregateOperator(descriptor, key_selector("k", None, rows, "op"), rows, emits_changes=True)

    def batch(*values: str | None) -> pa.RecordBatch:
        prices = pa.array([None if value is None else Decimal(value) for value in values], pa.decimal128(20, 2))
        return pa.record_batch({"k": pa.array([7] * len(values), pa.int64()), "v": prices}, schema=rows.schema)

    with OperatorHarness(one_of(), key_type="int64") as one:
        one.process(batch("0.10", None, "123456789012345678.01"))
        snapshot = one.snapshot()
    with OperatorHarness.restored(one_of(), [snapshot], key_type="int64") as one:
        one.process(batch("0.20"))
        last = one.output.batches[-1].columns()
    assert [str(field.type) for field in last.schema][1:] == [
        "decimal128(38, 2)",
        "decimal128(20, 2)",
        "decimal128(20, 2)",
        "decimal128(24, 6)",
    ]
    assert [str(value) for value in list(last.to_pylist()[0].values())[1:]] == [
        "123456789012345678.31",
        "123456789012345678.01",
        "0.10",
        "41152263004115226.103333",
    ]
