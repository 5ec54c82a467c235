"""Whether the committed output of a user's sink is what it must be: that of a run without failures, or what the user said of it.

What depends on the order of arrival, or on time, can't be compared row by row: two runs without failures tell. What a user says
must hold is judged all the same, and nothing else is: how many rows there are may depend on where batches end."""

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
"""Named like an invariant where what a user said does not hold."""
LOST, REPEATED = "I1", "I2"
WHAT = "depends on the order of arrival, or on time"


class Dependence(msgspec.Struct, frozen=True):
    """The output of a sink is not the same in two runs without any fault."""

    sink: str
    operator: str
    """The first one, on the way of the records, that gave other rows."""
    difference: Difference
    judged: bool
    """The user said what must hold all the same."""
    seed: int | None = None
    """It differs only in an order that this seed draws, and was compared in others; None: in every one."""
    parallelism: int | None = None
    """At which it differs, if not at the job's own."""
    batches: bool = False
    """The operator is a running aggregate: it gives a row a key for each batch of its input, and where batches end is left open."""

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
    """What is wrong with a sink's output."""

    invariant: str
    message: str
    place: int | None = None
    """Index of the row that is wrong, among all that were committed."""


class SinkJudge:
    """Judges one sink's output at the end of a run."""

    def __init__(self, sink: UserSink, reference: Sequence[Row] | None) -> None:
        """`reference`: what a run without failures has committed, in the order of commits; None: rows are not compared."""
        self.sink = sink
        self._reference = None if reference is None else frozen_rows(sink.schema, reference)

    def of_invariants(self) -> SinkJudge:
        """One that compares nothing, for output that differs without any fault even in what the user wants compared."""
        said = tuple(
            replace(each, last_value_per_key=(), ignore_columns=()) for each in self.sink.expectations if each.invariant is not None
        )
        return SinkJudge(replace(self.sink, expectations=said), None)

    def problem(self, rows: Sequence[Row]) -> Problem | None:
        """The first thing that is wrong with rows in the order of commits; None: nothing is."""
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
    """Between two outputs, in what an expectation compares."""
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
