"""Read sets: functions that use their row in every way get what they need of it, and can't tell it from the whole row."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import sys
import weakref
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace
from typing import Any, TypedDict

import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import Batch
from holdfast.barriers.rows import columns_to_rows, own_copy
from holdfast.operators.functions.process import CallableProcessFunction, PlainProcessOperator, ProcessFunction, ProcessOperator
from holdfast.operators.functions.read_sets import read_set
from holdfast.operators.functions.rows import FilterOperator, FlatMapOperator, MapOperator
from holdfast.operators.functions.schema import UNDECLARED, RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.tables.carried import map_with_state_operator
from holdfast.statebackends.errors import GraphError, SchemaMismatchError, UnknownColumnError, UserFunctionError
from tests.examples import examples
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("k", pa.string()), ("v", pa.int64()), ("w", pa.float64()), ("t", pa.string())]))
KEPT: list[Any] = []


def by_name(row: Any, ctx: Any, out: Any) -> None:
    out(row["v"] + 1)


def by_names(row: Any, ctx: Any, out: Any) -> None:
    if row["v"] > 1 or row["w"] < 0:
        out((row["v"], row["t"]))


def by_get(row: Any, ctx: Any, out: Any) -> None:
    out((row.get("v"), row.get("nothing"), row.get("nothing", 7)))


def missing(row: Any, ctx: Any, out: Any) -> None:
    try:
        out(row["nothing"])
    except KeyError as error:
        out(str(error))


def nothing(row: Any, ctx: Any, out: Any) -> None:
    out(1)


def chosen(row: Any, ctx: Any, out: Any) -> None:
    out((row if ctx else {"v": 0})["v"])


def otherwise(row: Any, ctx: Any, out: Any) -> None:
    out(({"v": 0} if ctx is None else row)["v"])


def computed(row: Any, ctx: Any, out: Any) -> None:
    out([row[name] for name in ("v", "t")])


def computed_get(row: Any, ctx: Any, out: Any) -> None:
    out(row.get("v" if row["v"] > 1 else "t"))


def default_of_row(row: Any, ctx: Any, out: Any) -> None:
    out(row.get("nothing", row))


def method_kept(row: Any, ctx: Any, out: Any) -> None:
    get = row.get
    out(get("w"))


def spread(row: Any, ctx: Any, out: Any) -> None:
    out({**row, "v": 0})


def spread_call(row: Any, ctx: Any, out: Any) -> None:
    out(dict(**row))


def iterated(row: Any, ctx: Any, out: Any) -> None:
    out([*row, len(row), *row.items()])


def compared(row: Any, ctx: Any, out: Any) -> None:
    out(("w" in row, row == {"v": 1}))


def kept(row: Any, ctx: Any, out: Any) -> None:
    KEPT.append(row)
    out(row)


def changed(row: Any, ctx: Any, out: Any) -> None:
    row["v"] = 0
    out(json.dumps(row))


def added(row: Any, ctx: Any, out: Any) -> None:
    row["x"] = row["v"]
    out(copy.copy(row))


def deleted(row: Any, ctx: Any, out: Any) -> None:
    del row["v"]
    out(sorted(row))


def renamed(row: Any, ctx: Any, out: Any) -> None:
    other = row
    out(other["w"])


def assigned(row: Any, ctx: Any, out: Any) -> None:
    row = {"v": row["v"]}
    out(row)


def captured(row: Any, ctx: Any, out: Any) -> None:
    out((lambda: row["w"])())


def in_comprehension(row: Any, ctx: Any, out: Any) -> None:
    out([row for _ in range(1)])


def own_locals(row: Any, ctx: Any, out: Any) -> None:
    out(len(locals()["row"]))


def seen_from_within(row: Any, ctx: Any, out: Any) -> None:
    def caller() -> Any:
        return sys._getframe(1).f_locals["row"]

    out(caller()["w"])


def seen_by_a_query(row: Any, ctx: Any, out: Any) -> None:
    frame = pandas.DataFrame({"v": [row["v"], row["v"] + 1]})
    out(len(frame.query("v == @row['v'] and @row['w'] == @row['w']")))


def passed_on(row: Any, ctx: Any, out: Any) -> None:
    by_name(row, ctx, out)


def matched(row: Any, ctx: Any, out: Any) -> None:
    match row:
        case {"v": 1, **rest}:
            out(rest)
        case _:
            out(row["t"])


def by_keyword(*args: Any, **kwargs: Any) -> None:
    args[2](args[0]["w"])


NARROW: dict[Callable[..., None], set[str]] = {
    by_name: {"v"},
    by_names: {"v", "w", "t"},
    by_get: {"v", "nothing"},
    missing: {"nothing"},
    nothing: set(),
}
WHOLE: list[Callable[..., None]] = [
    chosen, computed, computed_get, default_of_row, method_kept, spread, spread_call, iterated, compared, kept, changed, added,
    deleted, renamed, assigned, captured, in_comprehension, own_locals,
    seen_from_within, seen_by_a_query, passed_on, matched, by_keyword,
]  # fmt: skip

FAST = [function for function in WHOLE if function is not seen_by_a_query]


@pytest.mark.parametrize("function", NARROW, ids=lambda function: function.__name__)
def test_reads_by_names_in_the_code_are_found(function: Any) -> None:
    assert read_set(function) == NARROW[function]


@pytest.mark.parametrize("function", WHOLE, ids=lambda function: function.__name__)
def test_every_other_use_of_a_row_needs_all_of_it(function: Any) -> None:
    assert read_set(function) is None


def test_a_function_does_not_outlive_its_task() -> None:
    """A worker loads it anew with each attempt, with the model that it holds."""

    class Model:
        pass

    def load() -> tuple[Any, Any]:
        model = Model()

        def judge(row: Any, ctx: Any, out: Any) -> None:
            out((row["v"], model))

        return judge, weakref.ref(model)

    function, model = load()
    assert read_set(function) == {"v"}
    assert read_set(load()[0]) == {"v"}
    del function
    gc.collect()
    assert model() is None


def test_code_that_is_replaced_is_read_anew() -> None:
    def function(row: Any, ctx: Any, out: Any) -> None:
        out(row["v"])

    assert read_set(function) == {"v"}
    function.__code__ = by_names.__code__
    assert read_set(function) == {"v", "w", "t"}


def test_a_row_that_may_be_another_is_seen_through_if_both_are_only_read() -> None:
    assert read_set(otherwise) in (None, {"v"})


def test_methods_count_from_their_own_arguments() -> None:
    class Reads(ProcessFunction):
        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            out(value["v"])

    class Callable_:
        def __call__(self, value: Any, ctx: Any, out: Any) -> None:
            out(value["v"])

    assert read_set(Reads().process_element) == {"v"}
    class Static:
        @staticmethod
        def __call__(value: Any, ctx: Any, out: Any) -> None:
            out(ctx["v"])

    class Inherits(Callable_):
        pass

    class Bound:
        __call__ = Reads().process_element

    assert read_set(Callable_()) == read_set(Inherits()) == {"v"}
    assert read_set(Static()) is None
    assert read_set(Bound()) is None
    assert read_set(Callable_) is None
    assert read_set(functools.partial(by_name)) == read_set(functools.partial(Callable_())) == {"v"}
    assert read_set(functools.partial(Reads().process_element, ctx=1)) == {"v"}
    assert read_set(functools.partial(lambda model, row: (model, row["w"]), object())) == {"w"}
    assert read_set(functools.partial(lambda row, other: (row, other["w"]), object())) == {"w"}
    assert read_set(functools.partial(print, 1)) is None
    assert read_set(functools.lru_cache(by_name)) is None
    assert read_set(print) is None
    assert read_set(by_name, 1) == set()  # the context is never used
    assert read_set(by_name, 5) is None


def test_every_opcode_that_takes_a_variable_is_known() -> None:
    """Another Python may have new ones: then whole rows are made, and this test says so."""
    import dis

    known = ("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_CLOSURE", "LOAD_DEREF", "MAKE_CELL")
    local = [dis.opname[code] for code in dis.haslocal]
    assert all(name.startswith(known) for name in local), local


VALUES = st.fixed_dictionaries(
    {"k": st.text(max_size=3), "v": st.integers(-5, 5), "w": st.floats(allow_nan=False), "t": st.sampled_from("ab")}
)


@pytest.mark.parametrize("stamped", [False, True])
@pytest.mark.parametrize("function", [*NARROW, *FAST, otherwise], ids=lambda function: function.__name__)
@settings(max_examples=examples(8))
@given(rows=st.lists(VALUES, min_size=1, max_size=4))
def test_columns_and_rows_at_hand_give_the_same(function: Any, stamped: bool, rows: list[dict[str, Any]]) -> None:
    stamps = list(range(len(rows))) if stamped else None
    columns = Batch(rows=rows, schema=ROWS.schema).columns()
    rows = columns_to_rows(columns)  # their order is that of columns
    check_alike(function, rows, columns, stamps)


def test_a_query_that_sees_the_row_gets_it_whole() -> None:
    """Once: pandas looks through all frames of the stack."""
    rows = [{"k": "a", "v": 1, "w": 0.5, "t": "x"}]
    check_alike(seen_by_a_query, rows, Batch(rows=rows, schema=ROWS.schema).columns(), None)


def check_alike(function: Any, rows: list[dict[str, Any]], columns: pa.RecordBatch, stamps: list[int] | None) -> None:
    found: list[Any] = []
    for data in (rows, columns):
        KEPT.clear()
        process = CallableProcessFunction(function, ())
        keyed = ProcessOperator(process, key_selector("k", None, ROWS, "op"), ROWS, UNDECLARED)
        for operator, key_type in ((keyed, "utf8"), (PlainProcessOperator(process, ROWS, UNDECLARED), None)):
            with OperatorHarness(operator, key_type=key_type) as harness:
                harness.process(data, stamps, schema=ROWS.schema)
                found.append((harness.output.rows(), harness.output.timestamps()))
    assert found[0] == found[1] == found[2] == found[3]


def test_a_row_that_is_kept_is_its_own() -> None:
    seen: list[Any] = []

    def keeps(row: Any, ctx: Any, out: Any) -> None:
        if seen:
            seen[-1]["v"] = "changed later"
        seen.append(row)
        out(row)

    columns = pa.record_batch([["a", "b", "c"], [1, 2, 3], [0.5] * 3, ["x"] * 3], schema=ROWS.schema)
    with OperatorHarness(PlainProcessOperator(CallableProcessFunction(keeps, ()), ROWS, UNDECLARED)) as harness:
        harness.process(columns)
    assert [row["v"] for row in harness.output.rows()] == ["changed later", "changed later", 3]
    assert columns.column("v").to_pylist() == [1, 2, 3]


@pytest.mark.parametrize("function", [by_name, nothing, spread], ids=lambda function: function.__name__)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_error_shows_the_whole_row_and_the_key(function: Any, place: int) -> None:
    def fails(row: Any, ctx: Any, out: Any) -> None:
        out(10 // row["v"])

    def fails_blindly(row: Any, ctx: Any, out: Any) -> None:
        counted.append(1)
        if len(counted) == place + 1:
            raise ZeroDivisionError

    def fails_wholly(row: Any, ctx: Any, out: Any) -> None:
        out({**row, "x": 10 // row["v"]})

    counted: list[int] = []
    used = {by_name: fails, nothing: fails_blindly, spread: fails_wholly}[function]
    values = [0 if number == place else 1 for number in range(5)]
    columns = pa.record_batch([list("abcde"), values, [0.5] * 5, list("vwxyz")], schema=ROWS.schema)
    operator = ProcessOperator(CallableProcessFunction(used, ()), key_selector("k", None, ROWS, "op"), ROWS, UNDECLARED)
    with OperatorHarness(operator, key_type="utf8") as harness, pytest.raises(UserFunctionError) as raised:
        harness.process(columns)
    row = {"k": "abcde"[place], "v": 0, "w": 0.5, "t": "vwxyz"[place]}
    assert raised.value.record == repr(row)
    assert f"key {'abcde'[place]!r}" in str(raised.value)
    assert raised.value.operator == "op"


# --------------------------------------------------------------------------------------------- functions of one row alone


class Scores:
    def __call__(self, row: Any) -> Any:
        return [row["v"] * 2, row.get("t")]


def made_one_by_one(row: Any) -> Any:
    for number in range(abs(row["v"])):
        yield {"n": number, "t": row["t"]}


def sees_its_frame(row: Any) -> Any:
    yield sys._getframe().f_locals["row"]["w"]


def itself(row: Any) -> Any:
    return [row]


def changes(row: Any) -> Any:
    row["v"] += 1
    return [dict(row)]


def given_on(row: Any) -> Any:
    return [len(row), *sorted(row)]


def of_nothing(row: Any) -> Any:
    return [1]


def of_some(row: Any) -> Any:
    return [row["w"]] if row["v"] > 0 else []


def of_a_loop(row: Any) -> Any:
    return [(number, row["t"]) for number in range(2)]


ONE: dict[Any, set[str] | None] = {
    Scores(): {"v", "t"}, functools.partial(Scores()): {"v", "t"}, made_one_by_one: {"v", "t"}, sees_its_frame: None, itself: None,
    changes: None, given_on: None, of_nothing: set(), of_some: {"v", "w"}, of_a_loop: None,
}  # fmt: skip


@pytest.mark.parametrize("function", ONE, ids=lambda function: getattr(function, "__name__", "object"))
def test_reads_of_functions_of_one_row_are_found(function: Any) -> None:
    assert read_set(function, is_consumed=True) == ONE[function]
    if inspect.isgeneratorfunction(function):
        assert read_set(function) is None, "who has the generator sees its frame"


def harness_of(operator: Any, data: Any, stamps: Any = None, key_type: str | None = None) -> OperatorHarness:
    with OperatorHarness(operator, key_type=key_type) as harness:
        harness.process(data, stamps, schema=ROWS.schema)
    return harness


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", [MapOperator, FilterOperator, FlatMapOperator])
@pytest.mark.parametrize("function", ONE, ids=lambda function: getattr(function, "__name__", "object"))
@settings(max_examples=examples(5))
@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_functions_of_one_row_give_the_same_of_columns_and_of_rows(
    function: Any, kind: Any, skips: bool, values: list[dict[str, Any]]
) -> None:
    columns = Batch(rows=values, schema=ROWS.schema).columns()
    found = []
    for data in (columns_to_rows(columns), columns):
        output = ROWS if kind is FilterOperator else UNDECLARED
        harness = harness_of(kind(function, ROWS, output, skips=skips), data, range(len(values)))
        rows = harness.output.rows()
        if kind is MapOperator and inspect.isgeneratorfunction(function):
            rows = [list(row) for row in rows]
        found.append((rows, harness.output.timestamps()))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [MapOperator, FilterOperator, FlatMapOperator])
@pytest.mark.parametrize("data", ["rows", "columns"])
@pytest.mark.parametrize("fails", [{0}, {2}, {4}, {0, 1, 4}, {0, 1, 2, 3, 4}])
def test_an_error_of_a_function_of_one_row_shows_it_whole_and_the_rest_goes_on(kind: Any, data: str, fails: set[int]) -> None:
    def inverse(row: Any) -> Any:
        return [10 // row["v"]]

    def stops(row: Any) -> Any:
        return [next(iter([1] * row["v"]))]

    rows = [{"k": "a", "v": int(number not in fails), "w": 0.5, "t": "vwxyz"[number]} for number in range(5)]
    given = rows if data == "rows" else Batch(rows=rows, schema=ROWS.schema).columns()
    for function in (inverse, stops):
        with pytest.raises(UserFunctionError) as raised:
            harness_of(kind(function, ROWS, UNDECLARED), given)
        assert raised.value.record == repr(rows[min(fails)])
        harness = harness_of(kind(function, ROWS, UNDECLARED, skips=True), given, range(5))
        assert harness.context.counters.rows_skipped == len(fails)
        assert harness.output.timestamps() == sorted({0, 1, 2, 3, 4} - fails)
        assert (repr(rows[min(fails)]) in harness.context.counters.first_skipped) is True


def test_an_error_is_the_function_s_own_where_an_unread_column_has_no_python_values() -> None:
    schema = pa.schema([("v", pa.int64()), ("at", pa.timestamp("ns"))])
    columns = pa.record_batch([[1, 0], [1, 2]], schema=schema)
    for kind, function in ((MapOperator, lambda row: 1 // row["v"]), (FlatMapOperator, lambda row: [1 // row["v"]])):
        with pytest.raises(UserFunctionError, match="ZeroDivisionError") as raised:
            harness_of(kind(function, RowType(schema), UNDECLARED), columns)
        assert raised.value.record == "{'v': 0}"
    with pytest.raises(UserFunctionError, match=r"returned None, not .*'v': 0"):
        harness_of(MapOperator(lambda row: {"v": 1} if row["v"] else None, RowType(schema), RowType(schema.remove(1))), columns)


def test_none_in_place_of_a_row_shows_the_row_whole() -> None:
    columns = Batch(rows=[{"k": "a", "v": 1, "w": 0.5, "t": "x"}], schema=ROWS.schema).columns()
    for kind in (MapOperator, FlatMapOperator):
        with pytest.raises(UserFunctionError, match=r"returned None, not .*'w': 0.5, 't': 'x'"):
            harness_of(kind(lambda row: None if row["v"] else [], ROWS, ROWS), columns)


def test_a_filter_that_sees_through_rows_leaves_columns_and_one_that_does_not_leaves_rows() -> None:
    columns = Batch(rows=[{"k": "a", "v": 1, "w": 0.5, "t": "x"}], schema=ROWS.schema).columns()
    for function, has_rows in ((lambda row: row["v"], False), (lambda row: len(row), True)):
        batch = harness_of(FilterOperator(function, ROWS, ROWS), columns).output.batches[0]
        assert (batch.has_rows, batch.is_columnar, batch.rows()) == (has_rows, True, [{"k": "a", "v": 1, "w": 0.5, "t": "x"}])


def carries_sums(row: Any, value: Any) -> Any:
    total = (value or 0) + row["v"]
    return ({"t": row["t"], "total": total} if total != 3 else None), total if total < 6 else None


def carries_rows(row: Any, value: Any) -> Any:
    return {**row, "before": value}, len(row)


@pytest.mark.parametrize("stamped", [False, True])
@pytest.mark.parametrize("function", [carries_sums, carries_rows])
@settings(max_examples=examples(10))
@given(values=st.lists(VALUES, min_size=1, max_size=12))
def test_map_with_state_gives_the_same_of_columns_and_of_rows(function: Any, stamped: bool, values: list[dict[str, Any]]) -> None:
    columns = Batch(rows=values, schema=ROWS.schema).columns()
    found = []
    for data in (columns_to_rows(columns), columns):
        operator = map_with_state_operator(function, key_selector("t", None, ROWS, "op"), ROWS, int, None, None)
        harness = harness_of(operator, data, list(range(len(values))) if stamped else None, "utf8")
        found.append((harness.output.rows(), harness.output.timestamps()))
    assert found[0] == found[1]
    held: dict[Any, Any] = {}
    expected = []
    for place, row in enumerate(columns_to_rows(columns)):
        made, held[row["t"]] = function(row, held.get(row["t"]))
        expected += [] if made is None else [(made, place if stamped else None)]
    assert list(zip(*found[0], strict=True)) == expected


class Sum(TypedDict):
    t: str
    total: int
    parts: list[int]


def carries_what_it_changes(row: Any, value: Any) -> Any:
    kept = value or {"t": row["t"], "total": 0, "parts": []}
    kept["total"] += row["v"]
    kept["parts"].append(row["v"])
    return kept, kept


def test_a_row_that_map_with_state_emits_and_keeps_is_emitted_as_its_own() -> None:
    """The next call changes the value, and whoever is behind may change the row."""
    columns = pa.record_batch([list("abc"), [1, 2, 3], [0.5] * 3, ["x"] * 3], schema=ROWS.schema)
    operator = map_with_state_operator(carries_what_it_changes, key_selector("t", None, ROWS, "op"), ROWS, Sum, None, None)
    with OperatorHarness(operator, key_type="utf8") as harness:
        harness.process(columns)
        assert [(row["total"], row["parts"]) for row in harness.output.rows()] == [(1, [1]), (3, [1, 2]), (6, [1, 2, 3])]
        harness.output.rows()[-1]["total"] = -100
        harness.output.rows()[-1]["parts"].clear()
        harness.process(columns.slice(0, 1))
        assert harness.output.rows()[-1] == {"t": "x", "total": 7, "parts": [1, 2, 3, 1]}


@pytest.mark.parametrize("value", [bytearray(b"a"), ([1], 2), np.array([1, 2]), [1], {"a": [1]}], ids=lambda it: type(it).__name__)
def test_what_can_be_changed_in_place_is_the_copys_own(value: Any) -> None:
    row = {"n": 1, "at": datetime(2026, 1, 1), "value": value}
    copied = own_copy(row)
    assert repr(copied) == repr(row)
    assert copied["value"] is not value
    assert own_copy({"text": "a", "n": 1}) == {"text": "a", "n": 1}


def test_an_error_of_map_with_state_shows_the_row_whole_and_the_key() -> None:
    columns = Batch(rows=[{"k": "a", "v": 0, "w": 0.5, "t": "x"}], schema=ROWS.schema).columns()
    functions = {"ZeroDivisionError": lambda row, value: 1 // row["v"], "return a pair": lambda row, value: row["v"]}
    for reason, function in functions.items():
        operator = map_with_state_operator(function, key_selector("t", None, ROWS, "op"), ROWS, int, None, None)
        with pytest.raises(UserFunctionError, match=f"{reason}.*key 'x', record") as raised:
            harness_of(operator, columns, key_type="utf8")
        assert raised.value.record == "{'k': 'a', 'v': 0, 'w': 0.5, 't': 'x'}"


# ------------------------------------------------------------------------------------------------------------- declared


class Passes(ProcessFunction):
    reads = ("v", "t")

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        out({**value, "given": sorted(value)})


def test_a_declared_read_set_is_all_that_rows_have() -> None:
    rows = [{"k": "a", "v": 1, "w": 0.5, "t": "x"}]
    for data in (rows, Batch(rows=rows, schema=ROWS.schema).columns()):
        operator = ProcessOperator(Passes(), key_selector("k", None, ROWS, "op"), ROWS, UNDECLARED)
        with OperatorHarness(operator, key_type="utf8") as harness:
            harness.process(data, schema=ROWS.schema)
        assert harness.output.rows() == [{"v": 1, "t": "x", "given": ["t", "v"]}]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("row", [{"k": "b", "v": 1, "w": 0.5}, None], ids=["without it", "none"])
def test_a_row_that_lacks_a_declared_column_is_the_error_of_the_function_that_made_it(place: int, row: Any) -> None:
    rows: list[Any] = [{"k": "a", "v": 1, "w": 0.5, "t": "x"}]
    rows.insert(place, row)
    with OperatorHarness(PlainProcessOperator(Passes(), ROWS, UNDECLARED)) as harness:
        with pytest.raises(SchemaMismatchError, match=f"operator 'before': row {place} of a batch") as raised:
            harness.operator.process_batch(Batch(rows=rows, schema=ROWS.schema, producer="before"), 0)
        assert harness.output.rows() == []
    assert (raised.value.operator, raised.value.column) == ("before", row and "t")


def test_declared_columns_come_in_the_order_of_the_columns_and_objects_have_them_too() -> None:
    class Lists(ProcessFunction):
        reads = ("t", "k")

        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            out(list(value.items()))

    row = {"t": "x", "w": 0.5, "v": 1, "k": "a"}
    for data in ([row], [SimpleNamespace(**row)], Batch(rows=[row], schema=ROWS.schema).columns()):
        with OperatorHarness(PlainProcessOperator(Lists(), ROWS, UNDECLARED)) as harness:
            harness.process(data, schema=ROWS.schema)
        assert harness.output.rows() == [[("k", "a"), ("t", "x")]]


def test_an_error_shows_the_columns_that_are_not_declared() -> None:
    class Fails(Passes):
        def process_element(self, value: Any, ctx: Any, out: Any) -> None:
            raise ValueError(len(value))

    rows = [{"k": "a", "v": 1, "w": 0.5, "t": "x"}]
    for data in (rows, Batch(rows=rows, schema=ROWS.schema).columns()):
        operator = PlainProcessOperator(Fails(), ROWS, UNDECLARED)
        with OperatorHarness(operator) as harness, pytest.raises(UserFunctionError) as raised:
            harness.process(data, schema=ROWS.schema)
        assert raised.value.record == repr(rows[0])


def test_a_read_set_without_such_a_column_is_refused_when_the_graph_is_built() -> None:
    class Reads(Passes):
        reads = ("v", "price")

    with pytest.raises(UnknownColumnError, match="'process': there is no column 'price'; available: k, v, w, t") as raised:
        PlainProcessOperator(Reads(), ROWS, UNDECLARED)
    assert (raised.value.operator, raised.value.column) == ("process", "price")


@pytest.mark.parametrize("names", ["v", ("v", "v"), ("v", 1)])
def test_a_read_set_that_is_none_is_refused(names: Any) -> None:
    given = Passes()
    given.reads = names  # type: ignore[misc]
    with pytest.raises(GraphError, match="reads must be the names of distinct columns"):
        PlainProcessOperator(given, ROWS, UNDECLARED)


def test_records_have_all_their_fields() -> None:
    with pytest.raises(GraphError, match="have all their fields"):
        PlainProcessOperator(Passes(), RowType(ROWS.schema, inspect.Parameter), UNDECLARED)
    with pytest.raises(GraphError, match="no declared columns"):
        PlainProcessOperator(Passes(), UNDECLARED, UNDECLARED)
