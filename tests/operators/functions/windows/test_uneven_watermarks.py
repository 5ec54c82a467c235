"""A cut at which one subtask had gone further in event time than another, as behind an input that returned from idleness: after the
restore nothing fires twice, and nothing that had not fired is lost."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from holdfast.operators.functions.aggregates import count, sum
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.columnar_operators import columnar_window
from holdfast.operators.functions.windows.options import RowWindowOptions
from holdfast.statebackends.keygroups import subtask_of_key_group
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64())]))
MAX_PARALLELISM = 8
FAR, NEAR = 19, 14
"""Watermarks of the two subtasks."""


def operator(windows: Any) -> Any:
    selector = key_selector("k", None, ROWS, "op")
    return columnar_window(windows, RowWindowOptions(), {"n": count(), "total": sum("v")}, selector, ROWS).operator


def owned_by(subtask: int) -> str:
    """A key of one of two subtasks."""
    selector = key_selector("k", None, ROWS, "op")
    for number in range(100):
        key = f"k{number}"
        (group,) = selector.key_type.column([pa.array([key])], max_parallelism=MAX_PARALLELISM, operator="op").key_groups.tolist()
        if subtask_of_key_group(group, MAX_PARALLELISM, 2) == subtask:
            return key
    raise AssertionError("no key")


def batch(key: str, *values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": key, "v": value} for value in values], schema=ROWS.schema)


def shown(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    rows = [(row["k"], round(row["window_end"].timestamp() * 1000), row["n"], row["total"]) for row in harness.output.rows()]
    harness.output.elements.clear()
    return sorted(rows)


@pytest.mark.parametrize("windows", [Tumbling(20), Sliding(20, 20), Sliding(20, 10), Session(7)], ids=repr)
def test_what_one_subtask_fired_stays_fired_and_what_the_other_had_not_fires(windows: Any) -> None:
    keys, snapshots, before = [owned_by(0), owned_by(1)], [], []
    for subtask, (key, watermark) in enumerate(zip(keys, (FAR, NEAR), strict=True)):
        harness = OperatorHarness(
            operator(windows), key_type="utf8", parallelism=2, subtask=subtask, max_parallelism=MAX_PARALLELISM
        ).open()
        harness.process(batch(key, 1, 2), [12, 12])
        harness.watermark(watermark)
        before += shown(harness)
        snapshots.append(harness.snapshot())
    assert (keys[0], 19 if isinstance(windows, Session) else 20, 2, 3) in before
    assert not [row for row in before if row[0] == keys[1]]
    restored = OperatorHarness.restored(
        operator(windows), snapshots, parallelism=1, subtask=0, key_type="utf8", max_parallelism=MAX_PARALLELISM
    ).open()
    restored.snapshot()  # at once: what is due is kept
    restored.process(batch(keys[0], 5), [11])  # was late
    restored.watermark(FAR)
    after = shown(restored)
    assert [row for row in after if row[0] == keys[0]] == []
    assert (keys[1], 19 if isinstance(windows, Session) else 20, 2, 3) in after
    restored.watermark(100)
    total = before + after + shown(restored)
    assert len({row[:2] for row in total}) == len(total), "each window of a key once"
