"""The verdict on the committed output of a user's sink: equal to that of a run without failures, or as the user's expectations say.

Output that depends on the order of arrival, or on time, can't be compared row by row: two runs without failures show it. Only the
user's expectations are judged then: even the number of rows may depend on where batches end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from holdfast.chaos.expectations import Expectation
from holdfast.chaos.pipelines.rows import (
    Difference,
    Row,
    RowSource,
    UserSink,
    difference,
    frozen_rows,
    last_difference,
    named_rows,
)

EXPECT = "expect"
"""Named like an invariant: an expectation of the user does not hold."""
LOST, REPEATED = "I1", "I2"
WHAT = "depends on the order of arrival, or on time"


class Dependence(msgspec.Struct, frozen=True):
    """The output of a sink differs between two runs without faults."""

    sink: str
    operator: str
    """First operator, on the way of the records, that emitted other rows."""
    difference: Difference
    judged: bool
    """The user's expectations were judged all the same."""
    seed: int | None = None
    """Seed of the only orders in which it differs; None: it differs in every order compared."""
    parallelism: int | None = None
    """Parallelism at which it differs; None: the job's own."""
    batches: bool = False
    """The operator is a running aggregate: it emits a row for each key of a batch, and the ends of batches are undefined."""

    def __str__(self) -> str:
        told = self.difference
        if self.batches:
            return (
                f"the output of sink {self.sink!r} {WHAT}: operator {self.operator!r} gives a row for each batch that reaches it, "
                f"and batches may end anywhere; here {told.expected or 'none'} in a run without faults and "
                f"{told.found or 'none'} in this one"
            )
        where = "" if self.parallelism is None else f" (at parallelism {self.parallelism})"
        return (
            f"the output of sink {self.sink!r} {WHAT}: in two runs without any fault{where} operator {self.operator!r} gave "
            f"other rows{f' for {told.key}' if told.key else ''}, {told.expected or 'none'} in one and {told.found or 'none'} "
            "in the other"
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem in a sink's output."""

    invariant: str
    message: str
    place: int | None = None
    """Index of the wrong row among all committed rows."""


class SinkJudge:
    """Judges one sink's output at the end of a run."""

    def __init__(self, sink: UserSink, reference: Sequence[Row] | None) -> None:
        """`reference`: committed rows of a run without failures, in the order of commits; None: rows are not compared."""
        self.sink = sink
        self._reference = None if reference is None else frozen_rows(sink.schema, reference)

    def of_invariants(self) -> SinkJudge:
        """A judge that compares no rows, for output that differs without faults even in the columns that the user wants
        compared."""
        said = tuple(
            replace(each, last_value_per_key=(), ignore_columns=()) for each in self.sink.expectations if each.invariant is not None
        )
        return SinkJudge(replace(self.sink, expectations=said), None)

    def problem(self, rows: Sequence[Row]) -> Problem | None:
        """The first problem in rows in the order of commits; None without one."""
        found = frozen_rows(self.sink.schema, rows)
        if not self.sink.expectations and self._reference is not None:
            return self._compared(difference(self.sink.rows, self._reference, found), "", len(found))
        for said in self.sink.expectations:
            problem = self._expected(said, rows, found)
            if problem is not None:
                return problem
        return None

    def _expected(self, said: Expectation, rows: Sequence[Row], found: list[Row]) -> Problem | None:
        if said.compares and self._reference is not None:
            differs = expected_difference(self.sink.rows, said, self._reference, found)
            if differs is not None:
                return self._compared(differs, _said(said), len(found), EXPECT)
        return None if said.invariant is None else self._holds(said, rows)

    def _compared(self, differs: Difference | None, said: str, found: int, invariant: str = "") -> Problem | None:
        if differs is None or self._reference is None:
            return None
        counts = f"{found:,} of {len(self._reference):,} rows; {differs.missing:,} missing, {differs.extra:,} too many"
        text = f"sink {self.sink.sink_id!r}, operator {self.sink.rows.operator!r}{said}: {differs} ({counts})"
        return Problem(invariant or (LOST if differs.missing else REPEATED), text, differs.place)

    def _holds(self, said: Expectation, rows: Sequence[Row]) -> Problem | None:
        assert said.invariant is not None
        where = f"sink {self.sink.sink_id!r}, operator {self.sink.rows.operator!r}: invariant {_name(said)}"
        try:
            told = said.invariant(named_rows(self.sink.schema, rows))
        except AssertionError as error:
            return Problem(EXPECT, f"{where} does not hold: {error}" if str(error) else f"{where} does not hold")
        except Exception as error:
            return Problem(EXPECT, f"{where} raised {type(error).__name__}: {error}")
        if isinstance(told, str):
            return Problem(EXPECT, f"{where} does not hold: {told}")
        if told is None or told:
            return None
        return Problem(EXPECT, f"{where} does not hold: it returned {told!r}")


def expected_difference(
    source: RowSource, said: Expectation, expected: Sequence[Row], found: Sequence[Row]
) -> Difference | None:
    """The first difference between two outputs, in the columns that an expectation compares."""
    compared = tuple(name for name in source.columns if name not in said.ignore_columns)
    if said.last_value_per_key:
        return last_difference(source, said.last_value_per_key, compared, expected, found)
    places = [source.columns.index(name) for name in compared]
    keys = source.keys if set(source.keys) <= set(compared) else ()
    part = RowSource(source.operator, keys, compared)
    one, other = ([tuple(row[place] for place in places) for row in rows] for rows in (expected, found))
    return difference(part, one, other)


def _said(said: Expectation) -> str:
    if said.last_value_per_key:
        return f", last row of each {', '.join(said.last_value_per_key)}"
    return f", without {', '.join(said.ignore_columns)}"


def _name(said: Expectation) -> str:
    return getattr(said.invariant, "__name__", repr(said.invariant))
