"""How rows of a user's sink are compared and told, and what `expect` takes and refuses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.chaos.expectations import Expectation, collecting, of_function
from holdfast.chaos.pipelines.judging import SinkJudge
from holdfast.chaos.pipelines.rows import Row, RowSource, UserSink, frozen, named_rows
from holdfast.statebackends.errors import InvalidConfigError

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.float64()), ("at", pa.int64())])
TIMED = pa.schema([("key", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
COLUMNS = tuple(SCHEMA.names)
REFERENCE: list[Row] = [(1, 1.0, 0), (2, 1.0, 0), (1, 3.0, 5)]


def judge(*said: Expectation, reference: list[Row] | None = REFERENCE, keys: tuple[str, ...] = ("key",)) -> SinkJudge:
    return SinkJudge(UserSink("out", RowSource("sum", keys, COLUMNS), SCHEMA, said), reference)


def told(found: list[Row], *said: Expectation, **options: Any) -> tuple[str, str] | None:
    problem = judge(*said, **options).problem(found)
    return None if problem is None else (problem.invariant, problem.message)


def test_the_order_of_rows_is_not_compared() -> None:
    assert told(REFERENCE[::-1]) is None


def test_a_row_in_the_place_of_another_is_told_with_its_key() -> None:
    assert told([(1, 1.0, 0), (2, 7.0, 0), (1, 3.0, 5)]) == (
        "I1",
        "sink 'out', operator 'sum': key=2: {'key': 2, 'n': 7.0, 'at': 0} instead of {'key': 2, 'n': 1.0, 'at': 0} "
        "(3 of 3 rows; 1 missing, 1 too many)",
    )


def test_a_row_that_is_missing_and_one_that_is_too_many() -> None:
    assert told(REFERENCE[:2]) == (
        "I1",
        "sink 'out', operator 'sum': key=1: {'key': 1, 'n': 3.0, 'at': 5} is missing (2 of 3 rows; 1 missing, 0 too many)",
    )
    assert told([*REFERENCE, REFERENCE[0]]) == (
        "I2",
        "sink 'out', operator 'sum': key=1: {'key': 1, 'n': 1.0, 'at': 0} is too many (4 of 3 rows; 0 missing, 1 too many)",
    )


def test_the_place_of_the_wrong_row_is_the_last_of_equal_ones() -> None:
    problem = judge().problem([*REFERENCE, REFERENCE[0]])
    assert problem is not None
    assert problem.place == 3


def test_a_row_without_a_known_key_is_told_alone() -> None:
    problem = judge(keys=()).problem(REFERENCE[:2])
    assert problem is not None
    assert problem.message.startswith("sink 'out', operator 'sum': {'key': 1, 'n': 3.0, 'at': 5} is missing")


def test_the_last_rows_of_keys_are_compared_alone_and_floats_to_nine_digits() -> None:
    said = hf.chaos.expect(last_value_per_key="key")
    assert told([(2, 1.0, 0), (1, 7.0, 7), (1, 3.0 + 1e-10, 5)], said) is None
    assert told([(1, 3.0, 5), (2, 1.0, 0), (1, 2.0, 5)], said) == (
        "expect",
        "sink 'out', operator 'sum', last row of each key: key=1: {'key': 1, 'n': 2.0, 'at': 5} instead of "
        "{'key': 1, 'n': 3.0, 'at': 5} (3 of 3 rows; 1 missing, 1 too many)",
    )
    assert told([(1, 3.0, 5)], said) is not None
    assert told([*REFERENCE, (3, 0.0, 0)], said) is not None


def test_columns_that_are_ignored_are_not_compared() -> None:
    said = hf.chaos.expect(ignore_columns=["at", "n"])
    assert told([(1, 0.0, 9), (1, 0.0, 9), (2, 0.0, 9)], said) is None
    found = told([(1, 0.0, 9), (2, 0.0, 9)], said)
    assert found is not None
    assert found[1].startswith("sink 'out', operator 'sum', without at, n: key=1: {'key': 1} is missing")
    both = hf.chaos.expect(last_value_per_key="key", ignore_columns="at")
    assert told([(1, 7.0, 7), (1, 3.0, 77), (2, 1.0, 78)], both) is None


def test_an_invariant_sees_rows_by_name_in_their_order_with_times() -> None:
    seen: list[Any] = []
    assert told(REFERENCE, hf.chaos.expect(invariant=seen.extend)) is None
    assert [(row["key"], row["n"]) for row in seen] == [(1, 1.0), (2, 1.0), (1, 3.0)]
    assert [row["at"] for row in named_rows(TIMED, [(1, 5)])] == [datetime(1970, 1, 1, 0, 0, 0, 5, UTC)]
    assert named_rows(TIMED, []) == []


def test_times_are_told_as_times() -> None:
    sink = UserSink("out", RowSource("sum", ("key",), ("key", "at")), TIMED)
    problem = SinkJudge(sink, [(1, 5)]).problem([])
    assert problem is not None
    assert "key=1: {'key': 1, 'at': datetime.datetime(1970, 1, 1, 0, 0, 0, 5, tzinfo=" in problem.message


def returns_false(rows: list[dict[str, Any]]) -> bool:
    return False


def returns_text(rows: list[dict[str, Any]]) -> str:
    return f"{len(rows)} rows"


def asserts(rows: list[dict[str, Any]]) -> None:
    raise AssertionError("no total")


def fails(rows: list[dict[str, Any]]) -> None:
    raise KeyError("kee")


@pytest.mark.parametrize(
    ("invariant", "text"),
    [
        (returns_false, "invariant returns_false does not hold: it returned False"),
        (returns_text, "invariant returns_text does not hold: 3 rows"),
        (asserts, "invariant asserts does not hold: no total"),
        (fails, "invariant fails raised KeyError: 'kee'"),
    ],
)
def test_an_invariant_that_does_not_hold_is_told(invariant: Any, text: str) -> None:
    assert told(REFERENCE, hf.chaos.expect(invariant=invariant)) == ("expect", f"sink 'out', operator 'sum': {text}")


def test_all_that_was_said_must_hold_each_by_itself() -> None:
    last, wrong = hf.chaos.expect(last_value_per_key="key"), hf.chaos.expect(invariant=returns_false)
    assert told(REFERENCE, last) is None
    assert told(REFERENCE, last, wrong) is not None
    assert told(REFERENCE, wrong, last) is not None


def test_output_that_differs_without_faults_is_judged_by_invariants_alone() -> None:
    said = hf.chaos.expect(last_value_per_key="key", invariant=returns_false)
    problem = judge(said).of_invariants().problem([(9, 9.0, 9)])
    assert problem is not None
    assert problem.message.endswith("invariant returns_false does not hold: it returned False")
    assert judge(hf.chaos.expect(last_value_per_key="key")).of_invariants().problem([(9, 9.0, 9)]) is None
    assert judge().of_invariants().problem([(9, 9.0, 9)]) is None


def test_nan_is_nan_and_nested_values_can_be_compared() -> None:
    assert frozen((float("nan"), [1, {"b": [2], "a": None}])) == frozen((float("nan"), [1, {"a": None, "b": [2]}]))
    assert len({frozen((1, [2, float("nan")])), frozen((1, [2, float("nan")]))}) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "says nothing"),
        ({"last_value_per_key": []}, "last_value_per_key= takes a column or several"),
        ({"ignore_columns": [3]}, "ignore_columns= takes a column or several"),
        ({"invariant": 3}, "invariant= takes a function"),
        ({"last_value_per_key": "a", "ignore_columns": ["a", "b"]}, "a can't be both a key and ignored"),
    ],
)
def test_what_says_nothing_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfigError, match=reason):
        hf.chaos.expect(**arguments)


def test_a_decorator_belongs_to_its_function_and_a_call_to_the_block() -> None:
    with collecting() as made:

        @hf.chaos.expect(last_value_per_key="key")
        @hf.chaos.expect(ignore_columns="at", sink="out")
        def pipeline(env: Any) -> None: ...

        alone = hf.chaos.expect(invariant=returns_text)
    assert made == [alone]
    assert [(each.sink, each.last_value_per_key, each.ignore_columns) for each in of_function(pipeline)] == [
        (None, ("key",), ()),
        ("out", (), ("at",)),
    ]
    assert of_function(lambda env: None) == ()
    assert hf.chaos.expect(last_value_per_key="key").sink is None  # outside of the simulator nothing comes of it
