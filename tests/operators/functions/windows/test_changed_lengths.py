"""Columnar windows of other lengths than those of the snapshot are refused; of the same they go on, also as another kind."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from holdfast import IncompatibleStateError
from holdfast.operators.functions.aggregates import count
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.columnar_operators import columnar_window
from holdfast.operators.functions.windows.options import RowWindowOptions
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string())]))


def operator(windows: Any) -> Any:
    return columnar_window(windows, RowWindowOptions(), {"n": count()}, key_selector("k", None, ROWS, "op"), ROWS).operator


def restored(before: Any, after: Any) -> OperatorHarness:
    harness = OperatorHarness(operator(before), key_type="utf8").open()
    harness.process(pa.RecordBatch.from_pylist([{"k": "a"}, {"k": "a"}], schema=ROWS.schema), [12, 13])
    return OperatorHarness.restored(operator(after), [harness.snapshot()], key_type="utf8")


@pytest.mark.parametrize(
    ("before", "after", "stored"),
    [
        (Tumbling(20), Tumbling(40), "'sliding', 20, 20, 0"),
        (Tumbling(20), Tumbling(20, offset=5), "'sliding', 20, 20, 0"),
        (Tumbling(20), Sliding(20, 10), "'sliding', 20, 20, 0"),
        (Sliding(20, 10), Sliding(30, 10), "'sliding', 20, 10, 0"),
        (Session(7), Session(8), "'session', 7"),
    ],
    ids=repr,
)
def test_windows_of_other_lengths_are_refused(before: Any, after: Any, stored: str) -> None:
    with pytest.raises(IncompatibleStateError, match=stored) as refused:
        restored(before, after).open()
    assert stored in str(refused.value.stored)


@pytest.mark.parametrize(("before", "after"), [(Sliding(20, 10), Sliding(20, 10)), (Tumbling(20), Sliding(20, 20))], ids=repr)
def test_windows_of_the_same_lengths_go_on(before: Any, after: Any) -> None:
    harness = restored(before, after).open()
    harness.watermark(100)
    assert {row["n"] for row in harness.output.rows()} == {2}
