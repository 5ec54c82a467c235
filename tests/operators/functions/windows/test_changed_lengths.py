"""Windows of other lengths than those of the snapshot are refused; of the same they go on, also as another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from holdfast import IncompatibleStateError
from holdfast.operators.functions.aggregates import count
from holdfast.operators.functions.joins.windowed import cogroup, window_join
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.tables.top import ranking
from holdfast.operators.functions.tables.window_top import window_top_operator
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.columnar_operators import columnar_window
from holdfast.operators.functions.windows.options import RowWindowOptions
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string())]))
COUNTS = RowType(pa.schema([("n", pa.int64())]))
KEYED = key_selector("k", None, ROWS, "op")
PAIRED = ("", "_right")
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "aggregate": lambda windows: columnar_window(windows, RowWindowOptions(), {"n": count()}, KEYED, ROWS).operator,
    "join": lambda windows: window_join(ROWS, ROWS, "k", windows, "left", PAIRED, "op"),
    "cogroup": lambda windows: cogroup(ROWS, ROWS, "k", windows, lambda *of: [{"n": len(of[2])}], COUNTS, "op"),
    "top": lambda windows: window_top_operator(ranking(2, "k", False, "earlier", "rank"), windows, RowWindowOptions(), KEYED, ROWS),
}


def restored(kind: str, before: Any, after: Any, *, is_old: bool = False) -> OperatorHarness:
    """`is_old`: of a snapshot from before lengths were stored."""
    with OperatorHarness(OPERATORS[kind](before), key_type="utf8") as harness:
        harness.process(pa.RecordBatch.from_pylist([{"k": "a"}, {"k": "a"}], schema=ROWS.schema), [12, 13])
        snapshot = harness.snapshot()
    if is_old:
        del snapshot.lists["assigner"]
    return OperatorHarness.restored(OPERATORS[kind](after), [snapshot], key_type="utf8")


OTHERS = (
    (Tumbling(20), Tumbling(40), "'sliding', 20, 20, 0"),
    (Tumbling(20), Tumbling(20, offset=5), "'sliding', 20, 20, 0"),
    (Tumbling(20), Sliding(20, 10), "'sliding', 20, 20, 0"),
    (Sliding(20, 10), Sliding(30, 10), "'sliding', 20, 10, 0"),
)
OTHER_SESSIONS = ((Session(7), Session(8), "'session', 7"),)
OF_JOINS = (*OTHERS, *OTHER_SESSIONS, (Session(7), Tumbling(7), "'session', 7"))
CASES = {"aggregate": OTHERS + OTHER_SESSIONS, "join": OF_JOINS, "cogroup": OF_JOINS, "top": OTHERS}


@pytest.mark.parametrize(
    ("kind", "before", "after", "stored"),
    [(kind, *case) for kind, cases in CASES.items() for case in cases],
    ids=str,
)
def test_windows_of_other_lengths_are_refused(kind: str, before: Any, after: Any, stored: str) -> None:
    with pytest.raises(IncompatibleStateError, match=stored) as refused:
        restored(kind, before, after).open()
    assert stored in str(refused.value.stored)
    assert refused.value.operator == "op"


@pytest.mark.parametrize(("before", "after"), [(Sliding(20, 10), Sliding(20, 10)), (Tumbling(20), Sliding(20, 20))], ids=repr)
@pytest.mark.parametrize("kind", OPERATORS)
def test_windows_of_the_same_lengths_go_on(kind: str, before: Any, after: Any) -> None:
    with restored(kind, before, after) as harness:
        harness.watermark(100)
        assert _counted(kind, harness) == 2


@pytest.mark.parametrize("kind", OPERATORS)
def test_of_snapshots_without_lengths_nothing_is_compared(kind: str) -> None:
    with restored(kind, Tumbling(20), Tumbling(20), is_old=True) as harness:
        harness.watermark(100)
        assert _counted(kind, harness) == 2
    restored(kind, Tumbling(20), Tumbling(40), is_old=True).open().close()


def _counted(kind: str, harness: OperatorHarness) -> int:
    """Records of the fullest window."""
    rows = harness.output.rows()
    if kind in ("aggregate", "cogroup"):
        return max(row["n"] for row in rows)
    times = harness.output.timestamps()
    return max(times.count(time) for time in times)
