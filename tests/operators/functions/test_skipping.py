"""Rows on which a function raises may be left out: counted, told of, and up to a limit; what stays is as without them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers import rows as rows_module
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator
from holdfast.operators.functions.rows import FilterOperator, FlatMapOperator, MapOperator
from holdfast.operators.functions.schema import RowType
from holdfast.statebackends.errors import GraphError, TooManyRowsSkippedError, UndeclaredStateError, UserFunctionError
from tests.examples import examples
from tests.operators.ends import NamedSource
from tests.operators.harness import OperatorHarness

ANY = RowType(None)
NUMBERS = RowType(pa.schema([pa.field("n", pa.int64(), nullable=False)]))
TEXTS = ["1", "x", "3", "", "5"]
STAMPS = [10, 20, 30, 40, 50]


def run(operator: Any, rows: list[Any], stamps: list[int] | None = None, limit: int | None = None) -> OperatorHarness:
    with OperatorHarness(operator) as one:
        one.context.skipped_rows_max = limit
        one.process(rows, stamps)
    return one


def number(text: str) -> dict[str, int]:
    return {"n": int(text)}


@pytest.mark.parametrize("stamps", [None, STAMPS])
def test_a_map_leaves_out_the_rows_on_which_it_raises(stamps: list[int] | None) -> None:
    one = run(MapOperator(number, ANY, NUMBERS, skips=True), TEXTS, stamps)
    assert [row["n"] for row in one.output.rows()] == [1, 3, 5]
    assert one.output.timestamps() == ([None] * 3 if stamps is None else [10, 30, 50])
    assert one.context.counters.rows_skipped == 2


@pytest.mark.parametrize("operator", [MapOperator, FilterOperator])
def test_a_stop_iteration_of_the_function_ends_no_batch(operator: Any) -> None:
    """Python takes it for the end of what it iterates over: the rows behind it were lost without a word."""

    def find(row: int) -> int:
        return next(each for each in (1, 3, 4) if each == row)

    with pytest.raises(UserFunctionError, match=r"let a StopIteration out.*; record 2"):
        run(operator(find, ANY, ANY), [1, 2, 3, 4])
    one = run(operator(find, ANY, ANY, skips=True), [1, 2, 3, 4], [10, 20, 30, 40])
    assert (one.output.rows(), one.output.timestamps()) == ([1, 3, 4], [10, 30, 40])
    assert one.context.counters.rows_skipped == 1


def test_rows_that_do_not_fit_the_declared_columns_are_left_out_too() -> None:
    def parse(text: str) -> Any:
        return {"1": {"n": 1}, "x": {"n": "x"}, "3": {"m": 3}, "": None, "5": {"n": 5}}[text]

    one = run(MapOperator(parse, ANY, NUMBERS, skips=True), TEXTS, STAMPS)
    assert [row["n"] for row in one.output.batches[0].columns().to_pylist()] == [1, 5]
    assert (one.output.timestamps(), one.context.counters.rows_skipped) == ([10, 50], 3)


def test_a_filter_leaves_out_rows_also_when_a_verdict_has_no_truth() -> None:
    class Undecided:
        def __bool__(self) -> bool:
            raise ValueError("ambiguous")

    def verdict(text: str) -> Any:
        return Undecided() if text == "" else int(text) > 1

    one = run(FilterOperator(verdict, ANY, ANY, skips=True), TEXTS, STAMPS)
    assert (one.output.rows(), one.output.timestamps(), one.context.counters.rows_skipped) == (["3", "5"], [30, 50], 2)
    with pytest.raises(UserFunctionError, match="ambiguous; record ''"):
        run(FilterOperator(lambda text: Undecided() if text == "" else True, ANY, ANY), TEXTS)


def test_a_flat_map_gives_all_rows_of_one_or_none() -> None:
    def twice(text: str) -> Any:
        yield text
        yield str(int(text))

    one = run(FlatMapOperator(twice, ANY, ANY, skips=True), TEXTS, STAMPS)
    assert one.output.rows() == ["1", "1", "3", "3", "5", "5"]
    assert one.output.timestamps() == [10, 10, 30, 30, 50, 50]


@pytest.mark.parametrize("source", ["at", lambda row: row["at"]])
def test_rows_without_an_event_time_are_left_out(source: Any) -> None:
    declared = RowType(pa.schema([pa.field("at", pa.timestamp("us", "UTC"))]))
    times = [datetime(2026, 1, 1, tzinfo=UTC), None, datetime(2026, 1, 2, tzinfo=UTC)]
    operator = TimestampsOperator(source, 0, declared, skips=True)
    with OperatorHarness(operator) as one:
        one.process([{"at": time} for time in times], schema=declared.schema)
        assert [row["at"] for row in one.output.rows()] == [times[0], times[2]]
        assert one.context.counters.rows_skipped == 1
        one.process([{"at": None}], schema=declared.schema)
        assert len(one.output.rows()) == 2


@pytest.mark.parametrize("kind", [MapOperator, FilterOperator, FlatMapOperator])
def test_a_batch_of_which_every_row_fails_emits_nothing(kind: Any) -> None:
    one = run(kind(lambda row: 1 / 0, ANY, ANY, skips=True), TEXTS, STAMPS)
    assert (one.output.elements, one.context.counters.rows_skipped) == ([], 5)


def test_one_more_than_the_limit_ends_the_job_and_a_checkpoint_counts_anew() -> None:
    operator = MapOperator(number, ANY, NUMBERS, skips=True)
    with OperatorHarness(operator) as one:
        one.context.skipped_rows_max = 2
        one.process(TEXTS)
        one.operator.notify_checkpoint_complete(1)
        one.process(TEXTS)
        assert one.context.counters.rows_skipped == 4
        with pytest.raises(TooManyRowsSkippedError) as caught:
            one.process(["z"])
    assert (caught.value.operator, caught.value.limit) == ("op", 2)
    said = "left out 2 rows since the last checkpoint, the limit of skipped_rows_max; the next one: "
    assert said in str(caught.value)
    assert str(caught.value).endswith("record 'z'")


def test_the_first_the_tenth_and_the_hundredth_are_told_with_the_users_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast.functions"):
        run(MapOperator(number, ANY, NUMBERS, skips=True), ["x"] * 120)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 10, 100]
    assert "number (test_skipping.py:" in caplog.text
    assert 'return {"n": int(text)}' in caplog.text


def test_a_row_that_is_left_out_writes_nothing_to_the_terminal_but_its_text(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(row: str) -> Any:
        raise ValueError(f"{row} is no number")

    with caplog.at_level(logging.WARNING, "holdfast.functions"):
        run(MapOperator(refuse, ANY, NUMBERS, skips=True), ["1\x1b[2J\x9b", '2\n  File "/etc/passwd", line 1, in x'])
        run(MapOperator(lambda row: row, ANY, NUMBERS, skips=True), [{"n": Named("\x1b[2J\n  File \"/etc/passwd\", line 1")}])
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert record.getMessage().replace("\n", "").isprintable()
        assert "\\x1b[2J" in record.getMessage()
        assert '\n  File "/etc/passwd"' not in record.getMessage()


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Untold:
    """A record that counts how often it is shown."""

    shown = 0

    def __repr__(self) -> str:
        Untold.shown += 1
        return "Untold()"


@pytest.mark.parametrize(
    "operator",
    [
        MapOperator(lambda row: 1 / 0, ANY, ANY, skips=True),
        MapOperator(lambda row: None, ANY, NUMBERS, skips=True),
        MapOperator(lambda row: row, ANY, NUMBERS, skips=True),
        TimestampsOperator(lambda row: 1 / 0, 0, ANY, skips=True),
        TimestampsOperator(lambda row: None, 0, ANY, skips=True),
        TimestampsOperator(lambda row: 2**70, 0, ANY, skips=True),
    ],
    ids=["raises", "none", "misfit", "timestamps-raise", "no-timestamp", "beyond"],
)
def test_only_the_rows_that_are_told_have_a_story_made(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Untold, "shown", 0)
    one = run(operator, [Untold() for _ in range(500)])
    assert one.context.counters.rows_skipped == 500
    assert 3 <= Untold.shown <= 6, "the 1st, the 10th, the 100th; one of them may be shown twice"
    assert one.context.counters.first_skipped.startswith("operator 'op'")


SEEN: list[str] = []


def _moment(row: str) -> Any:
    SEEN.append(row)
    return {"3": 2**62, "": "soon", "5": 2**80, "x": None}[row] if row in ("3", "", "5", "x") else int(row) * 10


def test_the_function_of_event_times_is_called_once_for_each_row() -> None:
    SEEN.clear()
    one = run(TimestampsOperator(_moment, 0, ANY, skips=True), ["1", "x", "3", "", "5", "7", "y"])
    assert SEEN == ["1", "x", "3", "", "5", "7", "y"]
    assert (one.output.rows(), one.output.timestamps(), one.context.counters.rows_skipped) == (["1", "7"], [10, 70], 5)


@pytest.mark.parametrize("stamps", [[None, 10, 2**62, 20], [None, None, None, None], [10, 20, 30, 40]])
def test_event_times_of_a_column_are_judged_at_once(stamps: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    declared = RowType(pa.schema([pa.field("at", pa.int64())]))
    with OperatorHarness(TimestampsOperator("at", 0, declared, skips=True)) as one:
        one.process([{"at": stamp} for stamp in stamps], schema=declared.schema)
        kept = [stamp for stamp in stamps if stamp is not None and stamp < 2**60]
        assert one.output.timestamps() == kept
        assert one.context.counters.rows_skipped == len(stamps) - len(kept)


@pytest.mark.parametrize("lost", [[], [0], [499], [3, 250, 251, 400], list(range(500))])
def test_rows_that_fit_no_column_are_found_by_bisection(lost: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = 0
    original = rows_module._arrays

    def count(*arguments: Any, **keywords: Any) -> Any:
        nonlocal conversions
        conversions += 1
        return original(*arguments, **keywords)

    monkeypatch.setattr(rows_module, "_arrays", count)
    rows = [{"n": "x" if number in lost else number} for number in range(500)]
    one = run(MapOperator(lambda row: row, ANY, NUMBERS, skips=True), rows)
    assert [row["n"] for row in one.output.rows()] == [number for number in range(500) if number not in lost]
    assert one.context.counters.rows_skipped == len(lost)
    assert conversions <= 2 + 2 * len(lost) * 9 + 5, "each in so many as 500 can be halved; and stories of some"
    assert all(batch.is_columnar for batch in one.output.batches) or lost, "they are converted once"


@dataclass
class Number:
    n: Any


@pytest.mark.parametrize("record", [None, Number])
@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([Number, lambda n: {"n": n}]), st.sampled_from([1, 2, "x"])), max_size=10), st.data())
def test_which_rows_are_left_out_does_not_depend_on_where_batches_end(record: Any, made: list[Any], data: st.DataObject) -> None:
    """After a replay they end elsewhere, and the output has to be the same."""
    rows = [make(value) for make, value in made]
    operator = MapOperator(lambda row: row, ANY, RowType(NUMBERS.schema, record), skips=True)
    with OperatorHarness(operator) as one:
        left = rows
        while left:
            size = data.draw(st.integers(1, len(left)))
            one.process(left[:size])
            left = left[size:]
    assert one.output.rows() == [row for row, (_, value) in zip(rows, made, strict=True) if value != "x"]
    numbers = [n for batch in one.output.batches for n in batch.columns()["n"].to_pylist()]
    assert numbers == [value for _, value in made if value != "x"]
    assert one.context.counters.rows_skipped == [value for _, value in made].count("x")


def test_a_time_that_no_column_of_ms_holds_is_left_out() -> None:
    class Lost(tzinfo):
        def utcoffset(self, when: datetime | None) -> None:
            return None

        tzname = dst = utcoffset

    one = run(TimestampsOperator(lambda row: row, 0, ANY, skips=True), [1, datetime(2020, 1, 1, tzinfo=Lost()), 3])
    assert (one.output.timestamps(), one.context.counters.rows_skipped) == ([1, 3], 1)
    assert "is naive" in one.context.counters.first_skipped


@pytest.mark.parametrize(
    ("unit", "huge"),
    [(unit, huge) for unit in ("s", "ms", "us") for huge in (2**63 - 1, -(2**63) + 1)] + [("s", 2**64 // 1000), ("s", 2**53)],
)
def test_a_time_of_a_column_that_is_out_of_range_is_left_out(unit: str, huge: int) -> None:
    column = pa.array([0, huge, 5_000_000], pa.timestamp(unit, "UTC"))
    declared = RowType(pa.schema([("t", column.type)]))
    with OperatorHarness(TimestampsOperator("t", 0, declared, skips=True)) as one:
        one.process(pa.record_batch({"t": column}))
    assert len(one.output.timestamps()) == 2
    assert one.context.counters.rows_skipped == 1
    assert f"record {{'t': {huge}}}" in one.context.counters.first_skipped


def test_what_is_no_rows_fault_fails_all_the_same() -> None:
    def ask(row: Any) -> Any:
        raise UndeclaredStateError("no such state", operator="op")

    with pytest.raises(UndeclaredStateError):
        run(MapOperator(ask, ANY, ANY, skips=True), ["1"])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda stream: stream.map(str, on_error="ignore"), "operator 'map': on_error is 'ignore', must be 'fail' or 'skip'"),
        (lambda stream: stream.filter(_forgets), r"'filter': _forgets \(test_skipping.py:\d+\) returns None, whatever it is given"),
        (lambda stream: stream.flat_map(_forgets), "'flat_map': _forgets .* does it lack a `return`"),
        (lambda stream: stream.key_by(_forgets, key_type=str), "_forgets .* does it lack a `return`"),
        (lambda stream: stream.map(_forgets, returns={"n": int}), "'map': _forgets .* does it lack a `return`"),
        (lambda stream: stream.assign_timestamps(_forgets, 0), "'assign_timestamps': _forgets"),
    ],
)
def test_what_is_wrong_is_told_when_the_graph_is_built(build: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        build(Environment("job").from_source(NamedSource()))


def test_functions_that_may_return_something_pass() -> None:
    def sometimes(row: Any) -> Any:
        if row:
            return True
        return None

    def raises(row: Any) -> Any:
        raise ValueError

    def yields(row: Any) -> Any:
        yield row

    stream = Environment("job").from_source(NamedSource())
    for function in (sometimes, raises, yields, lambda row: row, bool):
        stream.filter(function)
    stream.map(_forgets)  # rows of undeclared type may be None


def _forgets(row: Any) -> Any:
    row.get("x")
