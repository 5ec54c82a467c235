"""Totals: the counts of a submission's operators over all of its attempts. Pure.

Workers count from 0 in each attempt, and report the counts of each cut with their acknowledgement. A completed checkpoint stores
the sums; an attempt that is restored from it goes on from them. Records that are read again after a failure are counted once, and
the totals of a job that ended are those of a run without failures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from holdfast.barriers.jobgraph import JobGraph, OperatorDescription
from holdfast.barriers.messages import COUNTERS_MAX, INT_MAX, Counters, OperatorMetrics, SkippedReason
from holdfast.statebackends.decoding import UNDECODABLE, decode_json

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]

COUNTERS_PROPERTY = "counters"
"""Property of a snapshot's `_metadata`: the totals at its cut, as JSON."""


class OperatorTotals(msgspec.Struct, frozen=True):
    """One operator over all of its subtasks: sums of `OperatorMetrics`, the highest lateness in ms, and the reason of the first row
    that `on_error="skip"` left out."""

    records_in: _Count = 0
    records_out: _Count = 0
    late_dropped: _Count = 0
    late_ms_max: _Count = 0
    counters: Counters = {}
    rows_skipped: _Count = 0
    first_skipped: SkippedReason = ""

    def at_least(self, other: OperatorTotals) -> OperatorTotals:
        """The higher of each two numbers. At most COUNTERS_MAX counters, those of `other` first: both sides may be full, with
        different names."""
        if other == self:
            return self
        names = itertools.islice(dict.fromkeys((*other.counters, *self.counters)), COUNTERS_MAX)
        counters = {name: max(self.counters.get(name, 0), other.counters.get(name, 0)) for name in names}
        return OperatorTotals(
            max(self.records_in, other.records_in),
            max(self.records_out, other.records_out),
            max(self.late_dropped, other.late_dropped),
            max(self.late_ms_max, other.late_ms_max),
            counters,
            max(self.rows_skipped, other.rows_skipped),
            other.first_skipped or self.first_skipped,
        )


Totals: TypeAlias = Mapping[str, OperatorTotals]
"""Operator uid -> counts; operators that counted nothing are left out."""

NOTHING = OperatorTotals()


class Tally:
    """The totals of one attempt: those at the cut that it began with, plus its subtasks' counts since.

    Sums are updated with each report, so that reading them costs O(operators), not O(subtasks)."""

    def __init__(self, graph: JobGraph, base: Totals) -> None:
        self._home = {operator.uid: vertex.vertex_id for vertex in graph.vertices for operator in vertex.operators}
        self._sums = {uid: _Sum(base.get(uid, NOTHING)) for uid in self._home}
        self._reported: dict[tuple[str, int], OperatorMetrics] = {}
        self._uids = {vertex.vertex_id: tuple(operator.uid for operator in vertex.operators) for vertex in graph.vertices}

    def count(self, vertex: str, subtask: int, operators: tuple[OperatorMetrics, ...]) -> tuple[OperatorMetrics, ...]:
        """As `add`. Returns the newest counts of the subtask's operators, in the order of the graph."""
        self.add(vertex, subtask, operators)
        uids = self._uids.get(vertex, ())
        if tuple(entry.operator for entry in operators) == uids:
            return operators  # as every worker reports them
        known = (self._reported.get((uid, subtask)) for uid in uids)
        return tuple(entry for entry in known if entry is not None)

    def add(self, vertex: str, subtask: int, operators: tuple[OperatorMetrics, ...]) -> None:
        """Replace the counts that a subtask reported before. Operators that its vertex does not have are ignored."""
        for entry in operators:
            if self._home.get(entry.operator) == vertex:
                key = entry.operator, subtask
                self._sums[entry.operator].change(self._reported.get(key), entry)
                self._reported[key] = entry

    def totals(self) -> Totals:
        totals = {uid: total.totals() for uid, total in self._sums.items()}
        return {uid: entry for uid, entry in totals.items() if entry != NOTHING}


class _Sum:
    """Sums of one operator; COUNTERS_MAX counters at most, those reported first."""

    __slots__ = ("counters", "first_skipped", "late_dropped", "late_ms_max", "records_in", "records_out", "rows_skipped")

    def __init__(self, base: OperatorTotals) -> None:
        self.records_in, self.records_out = base.records_in, base.records_out
        self.late_dropped, self.late_ms_max = base.late_dropped, base.late_ms_max
        self.rows_skipped, self.first_skipped = base.rows_skipped, base.first_skipped
        self.counters = dict(base.counters)

    def change(self, before: OperatorMetrics | None, now: OperatorMetrics) -> None:
        old = before or _NONE
        self.records_in += now.records_in - old.records_in
        self.records_out += now.records_out - old.records_out
        self.late_dropped += now.late_dropped - old.late_dropped
        self.late_ms_max = max(self.late_ms_max, now.late_ms_max)
        self.rows_skipped += now.rows_skipped - old.rows_skipped
        self.first_skipped = self.first_skipped or now.first_skipped
        for name, count in now.counters.items():
            if name in self.counters or len(self.counters) < COUNTERS_MAX:
                self.counters[name] = self.counters.get(name, 0) + count - old.counters.get(name, 0)

    def totals(self) -> OperatorTotals:
        """The sums, cut to what a record can hold (INT_MAX)."""
        counters = {name: _fit(count) for name, count in self.counters.items()}
        return OperatorTotals(
            _fit(self.records_in),
            _fit(self.records_out),
            _fit(self.late_dropped),
            _fit(self.late_ms_max),
            counters,
            _fit(self.rows_skipped),
            self.first_skipped,
        )


_NONE = OperatorMetrics("")


def _fit(count: int) -> int:
    return min(INT_MAX, count)


class JobTotals(msgspec.Struct, frozen=True):
    """Totals of a whole submission."""

    records_in: int = 0
    """Records that its sources read."""
    records_out: int = 0
    """Records that its sinks took: committed, or to be committed with the next checkpoint."""
    late_dropped: int = 0
    rows_skipped: int = 0


def derive_job_totals(graph: JobGraph, totals: Totals) -> JobTotals:
    read = written = 0
    for vertex in graph.vertices:
        for operator in vertex.operators:
            entry = totals.get(operator.uid, NOTHING)
            read += entry.records_out if operator.kind == "source" else 0
            written += entry.records_in if operator.kind == "sink_writer" else 0
    late = sum(entry.late_dropped for entry in totals.values())
    return JobTotals(read, written, late, sum(entry.rows_skipped for entry in totals.values()))


def reached(before: Totals, now: Totals) -> Totals:
    """Totals for a monitoring system: they stay while records are read again after a failure, and never fall."""
    if not before:
        return now
    return {**before, **{uid: entry.at_least(before.get(uid, NOTHING)) for uid, entry in now.items()}}


def encode_totals(totals: Totals) -> str:
    """JSON, the same for equal totals."""
    return msgspec.json.encode(dict(totals), order="deterministic").decode()


def decode_totals(text: str) -> Totals:
    """Totals of a text; empty for malformed ones: a snapshot without its counts restores like any other."""
    try:
        return decode_json(text.encode(), dict[str, OperatorTotals])
    except UNDECODABLE:
        return {}


def is_source(operator: OperatorDescription) -> bool:
    """Whether it reads input of the job: it has splits, and counts what it has read."""
    return operator.kind == "source"


def records_read(graph: JobGraph, totals: Totals) -> Mapping[str, int]:
    """Source's uid -> records that it had read."""
    operators = (operator for vertex in graph.vertices for operator in vertex.operators if is_source(operator))
    return {operator.uid: totals[operator.uid].records_out for operator in operators if operator.uid in totals}
