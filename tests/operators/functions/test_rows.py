"""map, filter, flat_map and map_batches: rows, columns, timestamps, and user code that fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.operators.functions.context import FunctionContext
from holdfast.operators.functions.rows import FilterOperator, FlatMapOperator, MapBatchesOperator, MapOperator
from holdfast.operators.functions.schema import UNDECLARED, RowType
from holdfast.statebackends.errors import HoldfastError, SchemaMismatchError, UndeclaredStateError, UserFunctionError
from tests.operators.harness import OperatorHarness

NUMBERS = RowType(pa.schema([pa.field("n", pa.int64(), nullable=False)]))
COLUMNS = pa.record_batch({"n": [1, 2, 3, 4]})


@dataclass
class Number:
    n: int


RECORDS = RowType(NUMBERS.schema, Number)


def run(operator: Any, data: Any = COLUMNS, timestamps: Any = (10, 20, 30, 40)) -> OperatorHarness:
    with OperatorHarness(operator) as harness:
        harness.process(data, timestamps)
    return harness


def test_map_keeps_timestamps_and_the_declared_schema() -> None:
    output = run(MapOperator(lambda row: {"n": row["n"] * 2}, NUMBERS, NUMBERS)).output
    assert output.rows() == [{"n": 2}, {"n": 4}, {"n": 6}, {"n": 8}]
    assert output.timestamps() == [10, 20, 30, 40]
    assert output.batches[0].columns().schema == NUMBERS.schema


def test_map_takes_and_gives_records() -> None:
    output = run(MapOperator(lambda row: Number(row.n + 1), RECORDS, RECORDS)).output
    assert output.rows() == [Number(2), Number(3), Number(4), Number(5)]
    assert output.batches[0].columns().column("n").to_pylist() == [2, 3, 4, 5]


def test_filter_keeps_columns_columns() -> None:
    output = run(FilterOperator(lambda row: row["n"] % 2, NUMBERS, NUMBERS)).output
    assert output.batches[0].is_columnar
    assert (output.rows(), output.timestamps()) == ([{"n": 1}, {"n": 3}], [10, 30])


def test_a_filter_that_takes_all_hands_the_batch_on_and_one_that_takes_none_is_silent() -> None:
    assert run(FilterOperator(lambda row: 1, NUMBERS, NUMBERS)).output.batches[0].columns() is COLUMNS
    assert run(FilterOperator(lambda row: None, NUMBERS, NUMBERS)).output.elements == []


def test_flat_map_repeats_the_timestamp_of_its_row() -> None:
    output = run(FlatMapOperator(lambda row: ({"n": row["n"]} for _ in range(row["n"] - 1)), NUMBERS, NUMBERS)).output
    assert [row["n"] for row in output.rows()] == [2, 3, 3, 4, 4, 4]
    assert output.timestamps() == [20, 30, 30, 40, 40, 40]
    assert run(FlatMapOperator(lambda row: [], NUMBERS, NUMBERS)).output.elements == []


def test_rows_without_a_schema_are_any_objects() -> None:
    output = run(MapOperator(lambda word: word.upper(), UNDECLARED, UNDECLARED), ["a", "b"], None).output
    assert (output.rows(), output.timestamps()) == (["A", "B"], [None, None])


@pytest.mark.parametrize("kind", [MapOperator, FilterOperator, FlatMapOperator])
def test_an_exception_names_operator_subtask_and_record(kind: Any) -> None:
    def divide(row: dict[str, int]) -> list[float]:
        return [1 / (row["n"] - 3)]

    operator = OperatorHarness(kind(divide, NUMBERS, NUMBERS), subtask=1, parallelism=2)
    with operator, pytest.raises(UserFunctionError) as caught:
        operator.process(COLUMNS)
    error = caught.value
    assert (error.operator, error.subtask, error.record) == ("op", 1, "{'n': 3}")
    assert "ZeroDivisionError" in str(error)
    assert "divide" in (error.function or "")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert operator.output.elements == []


def test_a_long_record_is_cut_and_a_record_without_a_repr_hides_nothing() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    for record, shown in (("x" * 10_000, 500), (Rude(), None)):
        with pytest.raises(UserFunctionError, match="division") as caught:
            run(MapOperator(lambda row: 1 / 0, UNDECLARED, UNDECLARED), [record], None)
        assert shown is None or len(caught.value.record or "") == shown


def test_an_error_of_ours_passes_as_it_is() -> None:
    def ask(row: Any) -> Any:
        raise UndeclaredStateError("no such state", operator="op")

    with pytest.raises(UndeclaredStateError):
        run(MapOperator(ask, NUMBERS, NUMBERS))


def test_a_row_that_does_not_fit_names_the_operator_when_columns_are_needed() -> None:
    output = run(MapOperator(lambda row: {"n": None if row["n"] == 3 else 1}, NUMBERS, NUMBERS)).output
    with pytest.raises(SchemaMismatchError, match=r"'op': row 2 .*'n'"):
        output.batches[0].columns()


def test_map_batches_gives_the_declared_columns() -> None:
    output = run(MapBatchesOperator(lambda columns: columns.filter([True] * 4), NUMBERS, NUMBERS)).output
    assert output.batches[0].columns().schema == NUMBERS.schema
    assert output.timestamps() == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda columns: columns.to_pydict(), "returned dict"),
        (lambda columns: columns.rename_columns(["m"]), r"columns \['m'\]"),
        (lambda columns: pa.record_batch({"n": ["x"] * 4}), "'n'.*returned string"),
        (lambda columns: pa.record_batch({"n": pa.array([None] * 4, pa.int64())}), r"null.* declare it as int \| None"),
        (lambda columns: columns.slice(1), "returned 3 rows for 4"),
        (lambda columns: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_map_batches_refuses_what_was_not_declared(function: Any, problem: str) -> None:
    with pytest.raises(UserFunctionError, match=problem) as caught:
        run(MapBatchesOperator(function, NUMBERS, NUMBERS))
    assert caught.value.operator == "op"


def test_map_batches_may_change_the_number_of_rows_before_event_times_are_assigned() -> None:
    output = run(MapBatchesOperator(lambda columns: columns.slice(1), NUMBERS, NUMBERS), timestamps=None).output
    assert [row["n"] for row in output.rows()] == [2, 3, 4]
    assert run(MapBatchesOperator(lambda columns: columns.slice(4), NUMBERS, NUMBERS), timestamps=None).output.elements == []


@pytest.mark.parametrize(
    "operator",
    [
        MapOperator(lambda row: row, NUMBERS, NUMBERS),
        FilterOperator(bool, NUMBERS, NUMBERS),
        FlatMapOperator(lambda row: [row], NUMBERS, NUMBERS),
        MapBatchesOperator(lambda columns: columns, NUMBERS, NUMBERS),
    ],
)
def test_an_empty_batch_emits_nothing(operator: Any) -> None:
    assert run(operator, COLUMNS.slice(4), []).output.elements == []


def test_errors_survive_pickling() -> None:
    import pickle

    with pytest.raises(HoldfastError) as caught:
        run(MapOperator(lambda row: 1 / 0, NUMBERS, NUMBERS))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.record) == (str(caught.value), "{'n': 1}")


class Lifecycle:
    """Tells what is done to it through what it returns, and, once closed, through a file."""

    def __init__(self, folder: Path, fails_at: str = "") -> None:
        self.folder = folder
        self.fails_at = fails_at

    def open(self, ctx: FunctionContext) -> None:
        self.subtask = ctx.subtask
        if self.fails_at == "open":
            raise ValueError("no model")

    def close(self) -> None:
        (self.folder / f"closed-{getattr(self, 'subtask', None)}").touch(exist_ok=False)
        if self.fails_at == "close":
            raise ValueError("no end")

    def __call__(self, value: Any) -> Any:
        if isinstance(value, pa.RecordBatch):
            return pa.record_batch({"n": [self.subtask] * value.num_rows}, schema=NUMBERS.schema)
        return self.answer(value)

    def answer(self, row: Any) -> Any:
        return {"n": self.subtask}


class Many(Lifecycle):
    def answer(self, row: Any) -> Any:
        return [{"n": self.subtask}]


class Yes(Lifecycle):
    def answer(self, row: Any) -> Any:
        return self.subtask == 3


@pytest.mark.parametrize(
    ("operator", "function"),
    [(MapOperator, Lifecycle), (FlatMapOperator, Many), (FilterOperator, Yes), (MapBatchesOperator, Lifecycle)],
)
def test_an_object_is_opened_before_the_first_row_and_closed_once(operator: Any, function: Any, tmp_path: Path) -> None:
    harness = OperatorHarness(operator(function(tmp_path), NUMBERS, NUMBERS), subtask=3, parallelism=4)
    with harness:
        harness.process(COLUMNS, None)
        assert list(tmp_path.iterdir()) == []
    assert len(harness.output.rows()) == 4
    if operator is not FilterOperator:
        assert {row["n"] for row in harness.output.rows()} == {3}
    harness.operator.close()
    assert [path.name for path in tmp_path.iterdir()] == ["closed-3"]


@pytest.mark.parametrize("fails_at", ["open", "close"])
def test_an_object_that_fails_to_open_or_close_is_named_and_closed(fails_at: str, tmp_path: Path) -> None:
    harness = OperatorHarness(MapOperator(Lifecycle(tmp_path, fails_at), NUMBERS, NUMBERS))
    with pytest.raises(UserFunctionError, match=rf"Lifecycle\.{fails_at} \(test_rows\.py:\d+\) raised ValueError: no "), harness:
        harness.process(COLUMNS, None)
    if fails_at == "open":
        harness.operator.close()
    assert [path.name for path in tmp_path.iterdir()] == ["closed-0"]


def test_a_function_that_is_a_class_is_called_and_not_opened() -> None:
    class Made(dict[str, int]):
        def open(self, ctx: Any) -> None:
            raise AssertionError("the class itself has no beginning")

    assert run(MapOperator(Made, NUMBERS, NUMBERS)).output.rows() == [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]
