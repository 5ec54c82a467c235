"""A savepoint of a window operator whose watermark was split list state opens with the present operator, at any parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast.operators.functions.aggregates import columnar_descriptor, count, sum
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.functions.windows.columnar import TumblingWindowOperator
from holdfast.statebackends.backend import RestoredOperatorState
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.handles import OperatorSubtaskState
from holdfast.statebackends.state import OperatorListStateDescriptor
from holdfast.statebackends.storage.port import run_flow
from tests.golden.contents_window_v1 import SIZE_MS, WATERMARK_MS, WINDOWED
from tests.golden.goldens import folder_of
from tests.golden.model import MAX_PARALLELISM
from tests.golden.restoring import Restored
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("airline", pa.string()), ("seats", pa.int32())]))


def operator() -> TumblingWindowOperator:
    descriptor = columnar_descriptor("windows", {"flights": count(), "seats": sum("seats")}, ROWS, (), "days")
    return TumblingWindowOperator(Tumbling(SIZE_MS), descriptor, key_selector("airline", None, ROWS, "days"), ROWS)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
def test_what_had_fired_stays_fired(parallelism: int, tmp_path: Path) -> None:
    lists = {state: () for state in operator().declared_states() if isinstance(state, OperatorListStateDescriptor)}
    job = (replace(WINDOWED, lists=lists),)
    restored = Restored(folder_of("v1-window-savepoint"), "memory", {"days": parallelism}, tmp_path, job)
    found = [_after_a_restore(restored, state, parallelism, subtask) for subtask, state in enumerate(restored.states["days"])]
    rows = [row for rows, _ in found for row in rows]
    assert sorted((row["airline"], _ms(row["window_start"]), row["flights"], row["seats"]) for row in rows) == [
        ("AA", 20_000, 2, 2), ("UA", 10_000, 1, 5), ("UA", 20_000, 1, 3), ("WN", 20_000, 1, 7)
    ]  # fmt: skip
    stored = [lists for _, lists in found]
    assert [lists.pop("watermarks") for lists in stored] == [[WATERMARK_MS.to_bytes(8, "big", signed=True)]] * parallelism
    assert [lists.pop("assigner") for lists in stored] == [[msgspec.msgpack.encode(["sliding", SIZE_MS, SIZE_MS, 0])]] * parallelism
    assert stored == [{"watermark": [], "fired_until": []}] * parallelism, "neither the old form is written, nor a drain"


def _after_a_restore(restored: Restored, state: OperatorSubtaskState, parallelism: int, subtask: int) -> tuple[list[Any], Any]:
    """The rows of the windows that had not fired, and the lists that the next snapshot stores. A late record is dropped."""
    settings: dict[str, Any] = {"parallelism": parallelism, "subtask": subtask, "max_parallelism": MAX_PARALLELISM}
    harness = OperatorHarness(operator(), key_type="utf8", **settings)
    lists: dict[str, list[bytes]] = {}
    for handle in state.operator:
        entries = run_flow(read_entries(handle, restored.folder, operator="days"), restored.storage)
        lists.setdefault(handle.state.name, []).extend(entries)
    harness._lists.restore(RestoredOperatorState(lists))
    assert harness._keyed is not None
    harness._keyed.restore(state.keyed, restored.storage, restored.folder)
    with harness:
        late = pa.RecordBatch.from_pylist([{"airline": "AA", "seats": 1}], schema=ROWS.schema)
        harness.process(late, [WATERMARK_MS])
        assert harness.context.counters.late_dropped == 1
        stored = harness.snapshot().lists
        harness.watermark(30_000)
        return harness.output.rows(), stored


def _ms(moment: Any) -> int:
    return round(moment.timestamp() * 1000)
