"""All subtasks of a window operator over columns, driven through firings, barriers in the middle of them, crashes and rescaling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK, Batch
from holdfast.operators.base import Operator
from holdfast.operators.functions.schema import RowType
from holdfast.statebackends.keygroups import subtask_of_key_group
from tests.operators.harness import HarnessSnapshot, OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64())]))
Row = tuple[str, int, int | None]
"""Key, event time, value."""


def columns(rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": key, "v": value} for key, _, value in rows], schema=ROWS.schema)


def batch(rows: list[Row]) -> Batch:
    return Batch(columns=columns(rows), timestamps=np.array([at for _, at, _ in rows], np.int64))


def feed(harness: OperatorHarness, *rows: Row) -> None:
    harness.operator.process_batch(batch(list(rows)), 0)


class Fleet:
    """All subtasks of an operator."""

    def __init__(
        self,
        make: Callable[[], Operator],
        shown: Callable[[OperatorHarness], list[Any]],
        parallelism: int,
        snapshots: list[HarnessSnapshot] | None = None,
    ) -> None:
        self._shown = shown
        self.subtasks = [
            OperatorHarness.restored(
                make(),
                snapshots or [],
                parallelism=parallelism,
                subtask=subtask,
                key_type="utf8",
                max_parallelism=8,
            ).open()
            for subtask in range(parallelism)
        ]
        for harness in self.subtasks:
            harness.output.sides["late"] = []

    def process(self, rows: list[Row]) -> None:
        all_rows = batch(rows)
        groups = self.subtasks[0].operator.selector.keys(all_rows, max_parallelism=8, operator="op").key_groups
        owners = np.array([subtask_of_key_group(group, 8, len(self.subtasks)) for group in groups.tolist()])
        for subtask, harness in enumerate(self.subtasks):
            part = all_rows.filter(owners == subtask)
            if part.num_rows:
                harness.operator.process_batch(part, 0)

    def output(self) -> Counter[Any]:
        """Rows, and late records: (key, time, value)."""
        found = Counter(row for harness in self.subtasks for row in self._shown(harness))
        for some in (some for harness in self.subtasks for some in harness.output.sides["late"]):
            assert some.timestamps is not None
            found.update((row["k"], at, row["v"]) for row, at in zip(some.rows(), some.timestamps.tolist(), strict=True))
        return found

    def clear(self) -> None:
        for harness in self.subtasks:
            harness.output.clear()
            harness.output.sides["late"] = []

    def close(self) -> None:
        for harness in self.subtasks:
            harness.close()


class Model(Protocol):
    """What a run without failures gives: rows as shown, and late records."""

    output: Counter[Any]

    def process(self, rows: list[Row]) -> None: ...
    def advance(self, watermark: int) -> None: ...


RECORDS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(-15, 40), st.none() | st.integers(-3, 3)), min_size=1, max_size=12
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("records"), RECORDS),
        st.tuples(st.just("watermark"), st.integers(-20, 60)),
        st.tuples(st.just("crash"), st.integers(1, 3)),
        st.tuples(st.just("barrier"), st.integers(0, 6), st.integers(-20, 60)),
    ),
    max_size=14,
)


def drive(
    steps: list[Any], make: Callable[[], Operator], shown: Callable[[OperatorHarness], list[Any]], model: Model
) -> None:
    """`barrier` takes a snapshot in the middle of a firing: after so many slices on each subtask. A crash throws away what
    was emitted since the last barrier, and starts again behind it, at another parallelism."""
    fleet = Fleet(make, shown, 2)
    committed: Counter[Any] = Counter()
    kept: tuple[int, list[HarnessSnapshot]] = (0, [harness.snapshot() for harness in fleet.subtasks])
    seen = position = 0
    crashes = Counter(index for index, step in enumerate(steps) if step[0] == "crash")
    while position < len(steps):
        step = steps[position]
        position += 1
        if step[0] == "records":
            fleet.process(step[1])
        elif step[0] == "crash" and crashes[position - 1]:
            crashes[position - 1] = 0
            fleet.close()
            fleet = Fleet(make, shown, step[1], kept[1])
            position = kept[0]
            continue
        elif step[0] != "crash":
            running = [harness.watermark_slices(step[-1]) for harness in fleet.subtasks]
            for index, slices in enumerate(running):
                for _ in range(step[1] + index if step[0] == "barrier" else 0):
                    next(slices, None)
            if step[0] == "barrier":
                kept = (position, [harness.snapshot() for harness in fleet.subtasks])
                committed += fleet.output()
                fleet.clear()
            for slices in running:
                for _ in slices:
                    pass
        if position > seen:
            seen = position
            if step[0] == "records":
                model.process(step[1])
            elif step[0] != "crash":
                model.advance(step[-1])
    for harness in fleet.subtasks:
        harness.watermark(MAX_WATERMARK)
        assert harness.operator._state.namespaces() == [], "at the end no state is left"
    model.advance(MAX_WATERMARK)
    assert committed + fleet.output() == model.output
    fleet.close()


