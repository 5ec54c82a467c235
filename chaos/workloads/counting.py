"""Counting per key, record by record: a function that several workloads share, and its expected output."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter

import msgspec

from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.scenario import CutStates
from holdfast.operators.functions.process import Collector, ProcessContext, ProcessFunction
from holdfast.statebackends.state import ValueStateDescriptor


class Counted(msgspec.Struct, frozen=True):
    """State of a key: its records so far, and the sum of their values."""

    count: int
    total: int


class Count(ProcessFunction):
    """Numbers the records of each key in the order of arrival: 1, 2, 3 ..."""

    counted = ValueStateDescriptor("counted", Counted)
    states = (counted,)
    returns = {"key": int, "seq": int, "i": int}  # noqa: RUF012 - the contract's class attribute

    def process_element(self, row: dict[str, int], ctx: ProcessContext, out: Collector) -> None:
        state = ctx.state(self.counted)
        counted = state.value(_NOTHING)
        seq = counted.count + 1
        state.update(Counted(seq, counted.total + row["value"]))
        out({"key": row["key"], "seq": seq, "i": row["i"]})


_NOTHING = Counted(0, 0)


COUNTED_KEY_AND_SEQ = (0, 1)
COUNTED_COMPARED = (0, 2)
"""Columns without the number, which depends on the order of arrival."""


def counted_rows(records: Iterable[tuple[int, int, int]]) -> Counter[Row]:
    """(key, i) of each of these records (i, key, value)."""
    return Counter(map(itemgetter(1, 0), records))


def counted_states(records: Sequence[tuple[int, int, int]]) -> CutStates:
    """State after these records."""
    counts = Counter(map(itemgetter(1), records))
    totals: defaultdict[int, int] = defaultdict(int)
    for _, key, value in records:
        totals[key] += value
    return {"counted": {key: {"count": counts[key], "total": totals[key]} for key in counts}}
