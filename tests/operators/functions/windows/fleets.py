"""All subtasks of a window operator over columns, driven through firings, barriers in the middle of them, crashes and rescaling;
and what DuckDB says of every aggregate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK, Batch
from holdfast.operators.base import Operator
from holdfast.operators.functions import aggregates as of
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.columnar import ColumnarWindowOperator
from holdfast.statebackends.keygroups import subtask_of_key_group
from tests.operators.harness import HarnessSnapshot, OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64())]))
Row = tuple[str, int, int | None]
"""Key, event time, value."""


AGGREGATES: dict[str, of.Aggregate] = {"n": of.count(), "total": of.sum("v"), "different": of.count_distinct("v")}
Made = TypeVar("Made", bound=ColumnarWindowOperator)


def columnar_operator(
    kind: type[Made],
    windows: Tumbling | Sliding | Session,
    aggregates: dict[str, of.Aggregate] | None = None,
    *,
    rows_per_slice_max: int = 8192,
    lateness_ms: int = 0,
) -> Made:
    """One with a late output, of AGGREGATES unless others are given."""
    descriptor = of.columnar_descriptor("windows", aggregates or AGGREGATES, ROWS, (), "op")
    made = kind(windows, descriptor, key_selector("k", None, ROWS, "op"), ROWS, lateness_ms=lateness_ms, late_tag="late")
    made.rows_per_slice_max = rows_per_slice_max
    return made


def columns(rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"k": key, "v": value} for key, _, value in rows], schema=ROWS.schema)


def batch(rows: list[Row]) -> Batch:
    return Batch(columns=columns(rows), timestamps=np.array([at for _, at, _ in rows], np.int64))


def feed(harness: OperatorHarness, *rows: Row) -> None:
    for _ in harness.take_slices(batch(list(rows))):
        pass


def shown(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    """(key, window start in ms, results ...) of each row."""
    return [
        (row["k"], round(row["window_start"].timestamp() * 1000), *list(row.values())[3:]) for row in harness.output.rows()
    ]


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

    def process(self, rows: list[Row]) -> list[Iterator[None]]:
        """What the batches leave of their output, in slices."""
        all_rows = batch(rows)
        groups = self.subtasks[0].operator.selector.keys(all_rows, max_parallelism=8, operator="op").key_groups
        owners = np.array([subtask_of_key_group(group, 8, len(self.subtasks)) for group in groups.tolist()])
        parts = ((harness, all_rows.filter(owners == subtask)) for subtask, harness in enumerate(self.subtasks))
        return [harness.take_slices(part) for harness, part in parts if part.num_rows]

    def snapshot(self) -> list[HarnessSnapshot]:
        return [harness.snapshot() for harness in self.subtasks]

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

    def drain(self) -> None:
        """All that is there fires, and is gone; event time stays as it is."""


class SlidingModel:
    """What a run of sliding windows without failures gives, with AGGREGATES."""

    def __init__(self, windows: Sliding, lateness_ms: int) -> None:
        self.windows = windows
        self.lateness_ms = lateness_ms
        self.watermark = -(10**6)
        self.rows: dict[tuple[str, int], list[int | None]] = {}
        self.output: Counter[Any] = Counter()

    def process(self, rows: list[Row]) -> None:
        size, slide, offset = self.windows.size_ms, self.windows.slide_ms, self.windows.offset_ms
        again = set()
        for key, at, value in rows:
            starts = list(range(at - (at - offset) % slide, at - size, -slide))
            in_time = [start for start in starts if start + size - 1 + self.lateness_ms > self.watermark]
            for start in in_time:
                self.rows.setdefault((key, start), []).append(value)
                if start + size - 1 <= self.watermark:
                    again.add((key, start))
            if starts and not in_time:
                self.output[key, at, value] += 1
        for key, start in again:
            self._fire(key, start)

    def advance(self, watermark: int) -> None:
        for key, start in self.rows:
            if self.watermark < start + self.windows.size_ms - 1 <= watermark:
                self._fire(key, start)
        self.watermark = np.maximum(self.watermark, watermark)

    def drain(self) -> None:
        watermark = self.watermark
        self.advance(MAX_WATERMARK)
        self.rows, self.watermark = {}, watermark

    def _fire(self, key: str, start: int) -> None:
        values = self.rows[key, start]
        there = [value for value in values if value is not None]
        self.output[key, start, len(values), int(np.sum(there)) if there else None, len(set(there))] += 1


RECORDS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(-15, 40), st.none() | st.integers(-3, 3)), min_size=1, max_size=12
)
_SLICES = st.integers(0, 6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("records"), RECORDS, st.none() | _SLICES),
        st.tuples(st.just("watermark"), st.integers(-20, 60), st.none() | _SLICES),
        st.tuples(st.just("crash"), st.integers(1, 3), _SLICES),
        st.tuples(st.just("drain"), st.integers(1, 3), _SLICES),
    ),
    max_size=14,
)
"""Of records and watermarks the number says behind how many slices of each subtask a barrier falls; None: no barrier.

A crash throws away what was emitted since the last barrier, and starts again behind it, at another parallelism; a drain is cut off
by a barrier, and goes on likewise, with more records. Both catch up for so many slices, and crash there once more, at a barrier."""


def drive(
    steps: list[Any], make: Callable[[], Operator], shown: Callable[[OperatorHarness], list[Any]], model: Model
) -> None:
    """All steps, through all failures: what is committed in the end is what the model has."""
    run = _Run(make, shown)
    seen = position = 0
    crashed = set()
    while position < len(steps):
        kind, what, slices = steps[position]
        position += 1
        if kind == "crash":
            if position not in crashed:
                crashed.add(position)
                run.restart(what, slices)
                position = run.kept_position
            continue
        if kind == "drain":
            running = [harness.watermark_slices(MAX_WATERMARK) for harness in run.fleet.subtasks]
            run.cut(running, slices, position)
            run.restart(what, slices // 2)
        else:
            running = (
                run.fleet.process(what)
                if kind == "records"
                else [harness.watermark_slices(what) for harness in run.fleet.subtasks]
            )
            if slices is not None:
                run.cut(running, slices, position)
            exhaust(running)
        if position > seen:
            seen = position
            if kind == "records":
                model.process(what)
            elif kind == "watermark":
                model.advance(what)
            else:
                model.drain()
    for harness in run.fleet.subtasks:
        harness.watermark(MAX_WATERMARK)
        assert harness.operator._state.namespaces() == [], "at the end no state is left"
    model.advance(MAX_WATERMARK)
    assert run.committed + run.fleet.output() == model.output
    run.fleet.close()


class _Run:
    """A job: its present attempt, and what its last barrier kept."""

    def __init__(self, make: Callable[[], Operator], shown: Callable[[OperatorHarness], list[Any]]) -> None:
        self._make, self._shown = make, shown
        self.fleet = Fleet(make, shown, 2)
        self.committed: Counter[Any] = Counter()
        self.kept_position, self._kept = 0, self.fleet.snapshot()

    def cut(self, running: list[Iterator[None]], slices: int, position: int) -> None:
        """A barrier behind so many slices of each subtask."""
        for index, each in enumerate(running):
            for _ in range(slices + index):
                next(each, None)
        self.kept_position, self._kept = position, self.fleet.snapshot()
        self.committed += self.fleet.output()
        self.fleet.clear()

    def restart(self, parallelism: int, slices: int) -> None:
        """Start again behind the last barrier, and once more behind one in the middle of catching up."""
        for number in (parallelism, 1 + parallelism % 3):
            self.fleet.close()
            self.fleet = Fleet(self._make, self._shown, number, self._kept)
            running = [harness.catch_up_slices() for harness in self.fleet.subtasks]
            self.cut(running, slices, self.kept_position)
        exhaust(running)


def exhaust(running: list[Iterator[None]]) -> None:
    for slices in running:
        for _ in slices:
            pass


EVERY_AGGREGATE: dict[str, of.Aggregate] = {
    "n": of.count(), "total": of.sum("v"), "least": of.min("v"), "most": of.max("v"), "different": of.count_distinct("v"),
    "early": of.first("v"), "late": of.last("v"), "best": of.arg_max("k", "v"), "average": of.mean("v"), "spread": of.stddev("v"),
}  # fmt: skip
SQL_OF_EVERY_AGGREGATE = """count(*), sum(v), min(v), max(v), count(DISTINCT v),
    first(v ORDER BY t, i) FILTER (WHERE v IS NOT NULL), first(v ORDER BY t DESC, i DESC) FILTER (WHERE v IS NOT NULL),
    first(k ORDER BY v DESC, t, i) FILTER (WHERE v IS NOT NULL), avg(v), stddev_samp(v)"""
"""Over columns k, t, v, and i, the order of arrival."""


def assert_as_sql(found: Sequence[tuple[Any, ...]], keys: int, arrived: Sequence[Row], query: str) -> None:
    """Rows of EVERY_AGGREGATE behind so many key columns are those of a query over `records`."""
    ours = {row[:keys]: row[keys:] for row in found}
    assert len(ours) == len(found)
    kinds = {"k": pa.string(), "t": pa.int64(), "v": pa.int64(), "i": pa.int64()}
    records = [(*row, number) for number, row in enumerate(arrived)]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*records, strict=True), kinds.values(), strict=True)]
    with duckdb.connect() as connection:
        connection.register("records", pa.table(columns, list(kinds)))
        expected = connection.sql(query).fetchall()
    assert ours.keys() == {row[:keys] for row in expected}
    for row in expected:
        assert ours[row[:keys]][:-2] == row[keys:-2]
        for one, other in zip(ours[row[:keys]][-2:], row[-2:], strict=True):
            assert one == (None if other is None else pytest.approx(other))
