"""Functions of windows that change what they are given, or give away what they keep: each result is that of its own firing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import holdfast as hf

ROWS = {"key": str, "value": int}
NESTED = {"key": str, "value": int, "all": list[int]}
RANKED = {"key": str, "value": int, "rank": int, "start": int}


@dataclass
class Reading:
    key: str
    value: int


class Ranked(hf.ProcessWindowFunction):
    """Its rows, with what they are in this window."""

    returns = RANKED

    def process(self, key: str, ctx: hf.WindowContext, elements: list[Any], out: hf.Collector) -> None:
        elements.sort(key=lambda row: -row["value"])
        for rank, row in enumerate(elements, 1):
            row["rank"], row["start"] = rank, ctx.window.start
            out(row)


class Kept:
    """An accumulator that is the result, too."""

    def create_accumulator(self) -> dict[str, Any]:
        return {"value": 0, "all": []}

    def add(self, value: Any, accumulator: dict[str, Any]) -> dict[str, Any]:
        accumulator["value"] += value["value"]
        accumulator["all"].append(value["value"])
        return accumulator

    def get_result(self, accumulator: dict[str, Any]) -> dict[str, Any]:
        return accumulator

    def merge(self, left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        return {"value": left["value"] + right["value"], "all": left["all"] + right["all"]}


def into_the_first(left: Any, right: Any) -> Any:
    left["value"] += right["value"]
    return left


def into_the_second(left: Any, right: Any) -> Any:
    right["value"] += left["value"]
    return right


def appended(left: Any, right: Any) -> Any:
    left["all"] += right["all"]
    return left


def of_records(left: Reading, right: Reading) -> Reading:
    left.value += right.value
    return left


WINDOWS: dict[str, Any] = {
    "sliding": lambda keyed: keyed.window(hf.Sliding(10, 5)),
    "late": lambda keyed: keyed.window(hf.Tumbling(10)).allowed_lateness(1_000),
    "sliding, late": lambda keyed: keyed.window(hf.Sliding(10, 5)).allowed_lateness(1_000),
    "session, late": lambda keyed: keyed.window(hf.Session(10)).allowed_lateness(1_000),
    "counted": lambda keyed: keyed.window(hf.Global()).trigger(hf.CountTrigger(1)),
    "the last three": lambda keyed: keyed.count_window(3, 1),
    "apart": lambda keyed: keyed.window(hf.Tumbling(10)).trigger(
        hf.DeltaTrigger(1, lambda one, other: other.value - one.value, Reading)
    ),
}
EXPECTED = {
    "sliding": [[1, 2, 4], [1, 2, 4]],
    "late": [[1], [1, 2], [1, 2, 4]],
    "sliding, late": [[1], [1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4]],
    "session, late": [[1], [1, 2], [1, 2, 4]],
    "counted": [[1], [1, 2], [1, 2, 4]],
    "the last three": [[1], [1, 2], [1, 2, 4]],
}
"""Values of the rows of each firing: 1, 2 and 4 come, in one window or in two; late, but for the first."""


def results(made: Any, types: Any, rows: list[Any], case: str, backend: Any) -> list[Any]:
    with hf.testing.Job(state_backend=backend) as job:
        feed = job.input("rows", types)
        out = job.output(made(WINDOWS[case](feed.stream.key_by("key"))).uid("windows"))
        job.start()
        feed.add(rows[:1], at=5)
        if "late" in case:
            feed.watermark(20)
        job.checkpoint()
        feed.add(rows[1:], at=6)
        feed.end()
        return out.rows()


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
@pytest.mark.parametrize("case", EXPECTED)
def test_each_result_is_that_of_its_own_firing(case: str, backend: Any) -> None:
    values = [1, 2, 4]
    rows = [{"key": "a", "value": value} for value in values]
    sums = [sum(seen) for seen in EXPECTED[case]]
    for function in (into_the_first, into_the_second):
        found = results(lambda windowed, reduce=function: windowed.reduce(reduce), ROWS, rows, case, backend)
        assert [row["value"] for row in found] == sums, function.__name__
    found = results(
        lambda windowed: windowed.aggregate(
            Kept(), accumulator_type=dict[str, int | list[int]], returns={"value": int, "all": list[int]}
        ),
        ROWS, rows, case, backend,
    )  # fmt: skip
    assert [row["value"] for row in found] == sums
    assert [row["all"] for row in found] == EXPECTED[case]
    records = [Reading("a", value) for value in values]
    found = results(lambda windowed: windowed.reduce(of_records), Reading, records, case, backend)
    assert [row.value for row in found] == sums
    nested = [{"key": "a", "value": value, "all": [value]} for value in values]
    found = results(lambda windowed: windowed.reduce(appended), NESTED, nested, case, backend)
    assert [row["all"] for row in found] == EXPECTED[case]


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
@pytest.mark.parametrize("case", EXPECTED)
def test_rows_that_a_function_changes_are_its_own(case: str, backend: Any) -> None:
    rows = [{"key": "a", "value": value} for value in (1, 2, 4)]
    found = results(lambda windowed: windowed.process(Ranked()), ROWS, rows, case, backend)
    ranks = [(rank, value) for seen in EXPECTED[case] for rank, value in enumerate(sorted(seen, reverse=True), 1)]
    assert [(row["rank"], row["value"]) for row in found] == ranks
    if case == "sliding":
        assert [row["start"] for row in found] == [0, 0, 0, 5, 5, 5]


def test_a_delta_trigger_compares_with_the_row_as_it_came() -> None:
    records = [Reading("a", value) for value in (1, 2, 2, 3)]
    (found,) = results(lambda windowed: windowed.reduce(of_records), Reading, records, "apart", "memory")
    assert found.value == 8
