"""Interval joins over columns: rows of two streams with equal keys whose event times lie in each other's interval.

A batch is probed at once: it makes the pairs with all rows of the other input that came before it, and waits in turn for those that
come behind it. A row that is to come out without a partner does so when none can follow. A batch may have more pairs than there is
memory: they are made in slices of bounded size, and what was not got to is state, so that a barrier may cut there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Batch
from holdfast.operators.base import OperatorContext, Output
from holdfast.operators.functions.joins.buffers import Arrival, JoinInterval, Numbers, SideBuffer, shifted
from holdfast.operators.functions.joins.late import LateOutputs
from holdfast.operators.functions.joins.output import (
    How,
    JoinOutput,
    JoinSide,
    On,
    Suffixes,
    check_how,
    join_output,
    join_sides,
)
from holdfast.operators.functions.joins.sides import check_kept_columns
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.windows.firing import FiringOperator, put_aside
from holdfast.operators.functions.windows.kept_entries import kept_entries
from holdfast.operators.functions.windows.kept_watermark import WATERMARKS
from holdfast.statebackends.decoding import decode_msgpack
from holdfast.statebackends.errors import GraphError, IncompatibleStateError, InvalidConfigError, InvariantError
from holdfast.statebackends.state import (
    NO_ORDER,
    OperatorListStateDescriptor,
    Redistribution,
    RowMatches,
    StateDescriptor,
    duration_ms,
)

BOUND_MS_MAX = 10**15
"""Of `lower` and `upper`, either way: 31,000 years."""
PAIRS_PER_SLICE_MAX = 1 << 15
"""Rows of the other input that one slice looks at, and at most emits pairs of."""
ROWS_PER_SLICE_MAX = 8192
"""Rows without a partner that one slice emits."""
_STRETCH = OperatorListStateDescriptor("stretch_ms", Redistribution.UNION)
"""One entry a subtask, msgpack: ms of event time that a stretch of the left buffer has at most, and one of the right."""
_FIRED = OperatorListStateDescriptor("fired", Redistribution.UNION, of_event_time=True)
"""One entry a subtask, msgpack: the last watermark behind which all that was due had come out, ms."""
_KEPT = (_STRETCH, _FIRED)
_HOW = OperatorListStateDescriptor("how", Redistribution.UNION)
"""One entry a subtask, text: whose rows without a partner are noted."""
_OUTER: dict[str, set[str]] = {"inner": set(), "left": {"left"}, "right": {"right"}, "full": {"left", "right"}}


def _stretches(entry: bytes) -> tuple[int, int]:
    return decode_msgpack(entry, tuple[int, int])


def _are_lengths(stretches_ms: tuple[int, int]) -> bool:
    return all(0 <= each <= MAX_WATERMARK for each in stretches_ms)


def _moment(entry: bytes) -> int:
    return decode_msgpack(entry, int)


def _is_moment(moment_ms: int) -> bool:
    return moment_ms <= MAX_WATERMARK


class IntervalJoinOperator(FiringOperator):
    """Joins two inputs by key and event time. Result: the key's columns, those of the left, those of the right."""

    def __init__(
        self,
        sides: tuple[JoinSide, JoinSide],
        interval: JoinInterval,
        how: How,
        result: JoinOutput,
        late_tags: tuple[str, str] = ("", ""),
    ) -> None:
        mirrored = JoinInterval(-interval.upper_ms, -interval.lower_ms)
        self.interval = interval
        self.how = how
        self.result = result
        self.output_type = result.row_type
        self.pairs_per_slice_max = PAIRS_PER_SLICE_MAX
        self.rows_per_slice_max = ROWS_PER_SLICE_MAX
        self.buffers = (
            SideBuffer("left", sides[0], interval, is_outer="left" in _OUTER[how], late_tag=late_tags[0]),
            SideBuffer("right", sides[1], mirrored, is_outer="right" in _OUTER[how], late_tag=late_tags[1]),
        )

    def declared_states(self) -> tuple[StateDescriptor, ...]:
        left, right = self.buffers
        return (*left.declared_states(), *right.declared_states(), WATERMARKS, *_KEPT, _HOW)

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._arrivals: deque[Arrival] = deque()
        self._passed = MIN_WATERMARK
        """The watermark behind which rows are no longer kept: the last one whose firing has begun."""
        self._has_stored = False

    def initialize_state(self) -> None:
        super().initialize_state()
        context = self.context
        self._check_how(kept_entries(context, _HOW.name, "whose rows are noted", bytes.decode, _OUTER.__contains__))
        stretches = kept_entries(context, _STRETCH.name, "how long stretches are", _stretches, _are_lengths)
        fired = kept_entries(context, _FIRED.name, "up to where rows have come out", _moment, _is_moment)
        self._restored_stretches_ms = [max((entry[side] for entry in stretches), default=0) for side in (0, 1)]
        self._fired: int = min(fired, default=MIN_WATERMARK)
        self._forwarded_before = self._fired
        """A watermark that an attempt before this one may have forwarded: where the interval was longer then, rows without a
        partner are still here whose time is behind it."""

    def _check_how(self, stored: Sequence[str]) -> None:
        """Of a side that was not outer it is not known which of the kept rows have a partner. Snapshots from before this was stored
        say nothing."""
        for how in stored:
            if _OUTER[self.how] - _OUTER[how]:
                raise IncompatibleStateError(
                    f"operator {self.context.uid!r}: the snapshot is of a join with how={how!r}, which does not "
                    f"note all rows without a partner, and the job declares how={self.how!r}: some would be lost; give the join a "
                    "uid of its own",
                    operator=self.context.uid,
                    state=_HOW.name,
                    stored=how,
                    declared=self.how,
                )

    def open(self) -> None:
        for side, buffer in enumerate(self.buffers):
            buffer.open(self.context, self._restored_stretches_ms[side])
            self._arrivals.extend(buffer.restored_pending(side))
        self._has_stored = bool(self._arrivals)
        self._is_behind |= self._has_stored  # before the first watermark, too: they don't wait for records

    def snapshot_state(self, checkpoint_id: int) -> None:
        super().snapshot_state(checkpoint_id)
        state = self.context.operator_state
        stretches_ms = [buffer.widest_ms for buffer in self.buffers]
        for kept, what in zip(_KEPT, (stretches_ms, self._fired), strict=True):
            state.list_state(kept.name).update([msgspec.msgpack.encode(what)])
        state.list_state(_HOW.name).update([self.how.encode()])
        if self._arrivals or self._has_stored:
            stored = [
                buffer.store_pending([each for each in self._arrivals if each.side == side])
                for side, buffer in enumerate(self.buffers)
            ]
            self._has_stored = any(stored)
        for reached in (self._reached.current, self._reached.kept):  # in a drain, what no partner could follow before it
            if not self._arrivals and not any(buffer.has_due(reached) for buffer in self.buffers):
                for buffer in self.buffers:
                    buffer.clean_exactly(reached)
                break

    # ------------------------------------------------------------------------------------------------------------ records

    def _take(self, batch: Batch, stamps: Numbers, input_index: int) -> None:
        buffer = self.buffers[input_index]
        batch = self._in_time(batch, stamps, buffer)
        if (unkeyed := buffer.side.selector.without_key(batch)) is not None:
            if buffer.is_outer:
                buffer.append_unkeyed(batch.filter(unkeyed))
            batch = batch.filter(~unkeyed)
        if not batch.num_rows:
            return
        assert batch.timestamps is not None
        count, times = batch.num_rows, batch.timestamps
        values = buffer.side.values(batch.columns())
        after, is_matched = np.full(count, NO_ORDER, np.int64), np.zeros(count, np.bool_)
        self._arrivals.append(Arrival(input_index, buffer.keys(batch), values, times, after, is_matched))
        if len(self._arrivals) == 1:
            self._make_pairs()

    def remaining_output(self) -> Iterator[None] | None:
        return self._rest() if self._arrivals else None

    def _in_time(self, batch: Batch, stamps: Numbers, buffer: SideBuffer) -> Batch:
        """The records that are not late; the others go to the late output, or are counted."""
        late = stamps <= self._reached.current
        if not late.any():
            return batch
        put_aside(batch.filter(late), buffer.late_tag, self, self._reached)
        return batch.filter(~late)

    # -------------------------------------------------------------------------------------------------------------- pairs

    def _rest(self) -> Iterator[None]:
        """A slice for some pairs each, until all that came has made its pairs."""
        while self._arrivals:
            self._make_pairs()
            yield

    def _make_pairs(self) -> None:
        """One slice of the oldest arrival."""
        arrival = self._arrivals[0]
        own, other = self.buffers[arrival.side], self.buffers[1 - arrival.side]
        if arrival.probe is None:
            bounds = shifted(arrival.times, own.partners.lower_ms), shifted(arrival.times, own.partners.upper_ms)
            arrival.probe = other.rows.probe(arrival.keys, bounds, arrival.after)
        found = arrival.probe.next(self.pairs_per_slice_max)
        if found is not None and len(found):
            arrival.is_matched[found.queries] = True
            other.found(found)
            self._emit_pairs(arrival, found)
        self._settle(arrival, own, arrival.probe.complete)
        if arrival.settled == len(arrival.times):
            self._arrivals.popleft()

    def _emit_pairs(self, arrival: Arrival, found: RowMatches) -> None:
        queries = found.queries
        rows = pa.array(queries)
        own = [column.take(rows) for column in arrival.values]
        others = self.buffers[1 - arrival.side].values_of(found)
        left, right = (others, own) if arrival.side else (own, others)
        keys = [key.take(rows) for key in arrival.keys.arrays]
        self.output.collect(self.result.batch(keys, left, right, np.maximum(arrival.times[queries], found.times)))

    def _settle(self, arrival: Arrival, own: SideBuffer, until: int) -> None:
        """Rows that have made all of their pairs wait for those that come behind them."""
        keys, values, times, is_matched = arrival.keys, arrival.values, arrival.times, arrival.is_matched
        due = own.is_due(times[arrival.settled : until], self._passed)
        if arrival.settled or until < len(times) or due.any():
            rows = np.arange(arrival.settled, until)
            lone = rows[due & ~is_matched[rows]]
            if own.is_outer and len(lone):
                picked = pa.array(lone)
                arrays = [key.take(picked) for key in keys.arrays]
                self._emit_lone(arrival.side, arrays, [column.take(picked) for column in values], times[lone])
            rows = rows[~due]
            picked = pa.array(rows)
            keys, values = keys.take(picked), [column.take(picked) for column in values]
            times, is_matched = times[rows], is_matched[rows]
        arrival.settled = until
        if len(times):
            own.append(keys, values, times, is_matched)

    # -------------------------------------------------------------------------------------------------------- event time

    def _fire_due(self) -> Iterator[None]:
        yield from self._rest()
        self._passed = self._reached.current
        for side, buffer in enumerate(self.buffers):
            if buffer.is_outer:
                yield from self._emit_unmatched(side, buffer)
        for buffer in self.buffers:
            buffer.clean(self._passed)
        self._fired = self._reached.kept

    def _emit_unmatched(self, side: int, buffer: SideBuffer) -> Iterator[None]:
        """Rows leave the state as they are emitted."""
        until = buffer.due_until(self._passed)
        while len(lone := buffer.unmatched.until(until, self.rows_per_slice_max)):
            rows = buffer.rows.counterparts(lone)
            if len(rows) != len(lone):
                raise InvariantError(f"operator {self.context.uid!r}: {len(lone)} rows wait for a partner, {len(rows)} are kept")
            self._emit_lone(side, rows.keys(), buffer.values_of(rows), rows.times)
            buffer.unmatched.delete(lone)
            if until == MAX_WATERMARK:  # in a job that goes on from a barrier here a partner could follow
                buffer.rows.delete(rows)
            yield
        while buffer.keeps_unkeyed and len(rows := buffer.unkeyed.until(until, self.rows_per_slice_max)):
            arrays = rows.take().columns[len(buffer.side.selector.names) :]
            count = self.result.key_count
            self._emit_lone(side, arrays[:count], arrays[count:], rows.times)
            buffer.unkeyed.delete(rows)
            yield

    def _emit_lone(self, side: int, keys: Sequence[pa.Array], values: Sequence[pa.Array], times: Numbers) -> None:
        left, right = (None, values) if side else (values, None)
        stamps = np.maximum(self.buffers[side].result_times(times), self._forwarded_before + 1)
        self.output.collect(self.result.batch(keys, left, right, stamps))


@dataclass(frozen=True, slots=True)
class PlannedJoin:
    """A join as it is added to the graph."""

    operator: IntervalJoinOperator
    sides: tuple[JoinSide, JoinSide]
    properties: dict[str, Any]


def planned_join(
    inputs: tuple[RowType, RowType],
    late: LateOutputs,
    on: On,
    how: How,
    suffixes: Suffixes | None,
    interval: JoinInterval,
    operator: str,
) -> PlannedJoin:
    """A join of event time. Raises GraphError naming the operator."""
    how = check_how(how, operator)
    sides = join_sides(on, *inputs, operator)
    check_kept_columns(sides, operator)
    result = join_output(*sides, how, suffixes, operator)
    joined = IntervalJoinOperator(sides, interval, how, result, late.tags)
    properties = {"lower_ms": interval.lower_ms, "upper_ms": interval.upper_ms, "how": how}
    return PlannedJoin(joined, sides, properties)


def bound_ms(bound: Any, what: str, operator: str) -> int:
    """ms of a timedelta or of ms. Raises GraphError naming the operator for what is neither, or beyond BOUND_MS_MAX."""
    try:
        found = duration_ms(bound, what)
    except InvalidConfigError as error:
        raise GraphError(f"operator {operator!r}: {error}", operator=operator, setting=what) from error
    if abs(found) > BOUND_MS_MAX:
        raise GraphError(
            f"operator {operator!r}: {what} may be {BOUND_MS_MAX} ms at most, not {found}", operator=operator, setting=what
        )
    return found


def join_interval(
    lower: Any, upper: Any, operator: str, *, lower_exclusive: bool = False, upper_exclusive: bool = False
) -> JoinInterval:
    """Both bounds as ms, inclusive. Raises GraphError naming the operator for what is no interval, or an empty one."""
    found = []
    for name, bound in (("lower", lower), ("upper", upper)):
        if bound is None:
            raise GraphError(
                f"operator {operator!r} has no {name} bound, and would keep its rows for ever: give {name}=, or use "
                "join(retain=)",
                operator=operator,
                setting=name,
            )
        found.append(bound_ms(bound, name, operator))
    interval = JoinInterval(found[0] + bool(lower_exclusive), found[1] - bool(upper_exclusive))
    if interval.lower_ms > interval.upper_ms:
        exclusive = " without its ends" if lower_exclusive or upper_exclusive else ""
        raise GraphError(
            f"operator {operator!r}: no time is in the interval from {found[0]} to {found[1]} ms{exclusive}",
            operator=operator,
            setting="lower",
        )
    return interval
