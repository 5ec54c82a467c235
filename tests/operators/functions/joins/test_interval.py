"""Interval joins and regular joins: what comes out, with which time, and what is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from holdfast.operators.functions.joins.buffers import STRETCH_MS_MIN, JoinInterval
from holdfast.operators.functions.joins.interval import IntervalJoinOperator
from holdfast.operators.functions.joins.output import How, join_output, join_sides
from holdfast.operators.functions.schema import RowType
from holdfast.statebackends.errors import CorruptStateError, IncompatibleStateError, UnclaimedStateError
from holdfast.statebackends.serialization.keys import KeyType
from tests.operators.harness import HarnessSnapshot, OperatorHarness

LEFT = RowType(pa.schema([("id", pa.int64()), ("l", pa.int64())]))
RIGHT = RowType(pa.schema([("id", pa.int64()), ("r", pa.int64())]))
Found = list[tuple[Any, ...]]


def operator(how: How = "inner", lower: int = -10, upper: int = 100) -> IntervalJoinOperator:
    sides = join_sides("id", LEFT, RIGHT, "join")
    return IntervalJoinOperator(sides, JoinInterval(lower, upper), how, join_output(*sides, how, None, "join"), ("late", ""))


@pytest.fixture
def full() -> Iterator[OperatorHarness]:
    with OperatorHarness(operator("full"), key_type="int64") as harness:
        yield harness


def left(harness: OperatorHarness, *rows: tuple[int | None, int, int]) -> None:
    """Rows of (id, value, time)."""
    columns = pa.RecordBatch.from_arrays([pa.array([row[at] for row in rows], pa.int64()) for at in (0, 1)], schema=LEFT.schema)
    harness.process(columns, [row[2] for row in rows], input_index=0)


def right(harness: OperatorHarness, *rows: tuple[int | None, int, int]) -> None:
    columns = pa.RecordBatch.from_arrays([pa.array([row[at] for row in rows], pa.int64()) for at in (0, 1)], schema=RIGHT.schema)
    harness.process(columns, [row[2] for row in rows], input_index=1)


def taken(harness: OperatorHarness) -> Found:
    """(id, l, r, time) of what came out since the last call."""
    rows = zip(harness.output.rows(), harness.output.timestamps(), strict=True)
    found = [(row["id"], row["l"], row["r"], time) for row, time in rows]
    harness.output.clear()
    return sorted(found, key=str)


def kept(harness: OperatorHarness) -> dict[str, int]:
    """Rows of each table in a snapshot."""
    harness.snapshot()
    names = [state.name for state in harness.operator.declared_states() if state.kind == "row_table"]
    tables = harness.context.keyed_state._row_tables  # type: ignore[attr-defined]
    return {name: tables[name].count() for name in names if tables[name].count()}


# ---------------------------------------------------------------------------------------------------------------- pairs


def test_a_pair_comes_out_once_whichever_came_first_with_the_later_time(full: OperatorHarness) -> None:
    left(full, (1, 10, 1_000))
    assert taken(full) == []
    right(full, (1, 20, 1_050), (2, 21, 1_000))
    assert taken(full) == [(1, 10, 20, 1_050)]
    left(full, (2, 11, 1_010), (1, 12, 1_010))
    assert taken(full) == [(1, 12, 20, 1_050), (2, 11, 21, 1_010)]


@pytest.mark.parametrize(("offset", "pairs"), [(-11, 0), (-10, 1), (100, 1), (101, 0)])
@pytest.mark.parametrize("is_left_first", [True, False])
def test_both_bounds_are_inclusive(full: OperatorHarness, offset: int, pairs: int, is_left_first: bool) -> None:
    if is_left_first:
        left(full, (1, 10, 1_000))
    right(full, (1, 20, 1_000 + offset))
    if not is_left_first:
        left(full, (1, 10, 1_000))
    assert taken(full) == [(1, 10, 20, max(1_000, 1_000 + offset))] * pairs


def test_pairs_of_two_batches_that_came_as_one_slice_come_once() -> None:
    with OperatorHarness(operator(), key_type="int64") as harness:
        left(harness, *[(1, value, 1_000) for value in range(3)])
        right(harness, *[(1, value, 1_000) for value in range(2)])
        assert Counter(taken(harness)) == Counter((1, one, other, 1_000) for one in range(3) for other in range(2))


def test_a_null_in_the_key_matches_nothing(full: OperatorHarness) -> None:
    left(full, (None, 10, 1_000), (0, 11, 1_000))
    right(full, (None, 20, 1_000), (0, 21, 1_000))
    assert taken(full) == [(0, 11, 21, 1_000)]
    full.watermark(1_009)
    assert taken(full) == []
    full.watermark(1_010)
    assert taken(full) == [(None, None, 20, 1_010)]
    full.watermark(1_100)
    assert taken(full) == [(None, 10, None, 1_100)]
    assert kept(full) == {}


# ----------------------------------------------------------------------------------------------------------- outer rows


def test_a_row_without_a_partner_comes_when_none_can_follow(full: OperatorHarness) -> None:
    left(full, (1, 10, 1_000))
    right(full, (2, 20, 1_000))
    full.watermark(1_009)
    assert taken(full) == []
    full.watermark(1_010)
    assert taken(full) == [(2, None, 20, 1_010)]
    full.watermark(1_099)
    assert taken(full) == []
    full.watermark(1_100)
    assert taken(full) == [(1, 10, None, 1_100)]


def test_a_partner_may_come_in_the_last_millisecond(full: OperatorHarness) -> None:
    left(full, (1, 10, 1_000))
    full.watermark(1_099)
    right(full, (1, 20, 1_100))
    assert taken(full) == [(1, 10, 20, 1_100)]
    full.watermark(5_000)
    assert taken(full) == []


@pytest.mark.parametrize(
    ("how", "lone"), [("inner", []), ("left", [(1, 10, None, 1_100)]), ("right", [(2, None, 20, 1_010)])]
)
def test_how_says_whose_rows_come_out_alone(how: How, lone: Found) -> None:
    with OperatorHarness(operator(how), key_type="int64") as harness:
        left(harness, (1, 10, 1_000), (None, 11, 1_000) if how == "inner" else (3, 11, 5_000))
        right(harness, (2, 20, 1_000))
        harness.watermark(4_000)
        assert taken(harness) == lone


@pytest.mark.parametrize(("lower", "upper"), [(-100, -50), (50, 100)])
def test_bounds_may_lie_on_one_side(lower: int, upper: int) -> None:
    """Where partners are all earlier a row is not before its own time without one, and is not kept for any."""
    with OperatorHarness(operator("full", lower, upper), key_type="int64") as harness:
        left(harness, (1, 10, 1_000), (2, 11, 1_000))
        right(harness, (1, 20, 1_000 + lower), (3, 21, 1_000 + lower))
        assert taken(harness) == [(1, 10, 20, max(1_000, 1_000 + lower))]
        harness.watermark(2_000)
        times = max(1_000, 1_000 + upper), max(1_000 + lower, 1_000)
        assert taken(harness) == [(2, 11, None, times[0]), (3, None, 21, times[1])]
        left(harness, (4, 12, 2_001))
        right(harness, (5, 22, 2_001))
        found = taken(harness)  # for one of them no partner can follow
        harness.watermark(3_000)
        assert sorted([*found, *taken(harness)], key=str) == [
            (4, 12, None, 2_001 + max(0, upper)), (5, None, 22, 2_001 + max(0, -lower))
        ]  # fmt: skip
        assert len(found) == 1
        assert kept(harness) == {}


def test_a_drain_lets_all_rows_out_and_the_job_may_go_on(full: OperatorHarness) -> None:
    left(full, (1, 10, 1_000))
    full.watermark(900)
    full.watermark(2**63 - 1)
    assert taken(full) == [(1, 10, None, 1_100)]
    with OperatorHarness.restored(operator("full"), [full.snapshot()], key_type="int64") as later:
        right(later, (1, 20, 1_000), (1, 21, 900))
        left(later, (1, 11, 1_000))
        assert taken(later) == [(1, 11, 20, 1_000)]
        assert later.context.counters.late_dropped == 1


@pytest.mark.parametrize("side", [0, 1])
def test_a_row_that_a_drain_let_out_alone_gets_no_partner_behind_a_barrier_in_the_drain(side: int) -> None:
    own, other = (right, left) if side else (left, right)
    with OperatorHarness(operator("full", -100), key_type="int64") as harness:
        own(harness, (1, 10, 1_000), (2, 11, 1_010))
        harness.watermark(900)
        harness.operator.rows_per_slice_max = 1
        slices = harness.watermark_slices(2**63 - 1)
        next(slices)
        alone, snapshot = taken(harness), harness.snapshot()
    with OperatorHarness.restored(operator("full", -100), [snapshot], key_type="int64") as later:
        other(later, (1, 20, 1_050), (2, 21, 1_050))
        later.watermark(10_000)
        found = [*alone, *taken(later)]
        assert Counter(row[1 + side] for row in found) == {10: 1, 11: 1, None: 1}
        assert kept(later) == {}


def test_a_barrier_in_a_drain_keeps_no_row_for_which_no_partner_could_follow_before_it(full: OperatorHarness) -> None:
    left(full, (1, 10, 1_000))
    right(full, (1, 20, 1_000), *((n, n, 2_000) for n in range(5, 10)))
    full.watermark(1_500)
    full.operator.rows_per_slice_max = 2
    next(full.watermark_slices(2**63 - 1))
    assert kept(full) == {"right": 3, "right_unmatched": 3}


# ------------------------------------------------------------------------------------------------------- late, and state


def test_late_rows_go_to_the_side_output_or_are_counted(full: OperatorHarness) -> None:
    full.watermark(1_000)
    full.output.sides["late"] = []
    left(full, (1, 10, 1_000), (1, 11, 1_001), (None, 12, 5))
    right(full, (1, 20, 1_000), (1, 21, 1_001))
    assert taken(full) == [(1, 11, 21, 1_001)]
    (late,) = full.output.sides["late"]
    assert late.rows() == [{"id": 1, "l": 10}, {"id": None, "l": 12}]
    assert late.timestamps is not None
    assert late.timestamps.tolist() == [1_000, 5]
    assert (full.context.counters.late_dropped, full.context.counters.late_ms_max) == (1, 0)


def test_state_goes_when_no_partner_can_follow_and_not_before() -> None:
    with OperatorHarness(operator(), key_type="int64") as harness:
        left(harness, (1, 10, 1_000), (1, 11, 1_001))
        right(harness, (2, 20, 1_000))
        assert kept(harness) == {"left": 2, "right": 1}
        harness.watermark(1_009)
        assert kept(harness) == {"left": 2, "right": 1}
        harness.watermark(1_010)
        assert kept(harness) == {"left": 2}
        harness.watermark(1_100)
        assert kept(harness) == {"left": 1}
        harness.watermark(1_101)
        assert kept(harness) == {}


def test_a_large_buffer_loses_whole_stretches_of_time() -> None:
    count = 70_000
    with OperatorHarness(operator(lower=0, upper=64_000), key_type="int64") as harness:
        ids = pa.array(np.arange(count))
        harness.process(pa.RecordBatch.from_arrays([ids, ids], schema=LEFT.schema), list(range(count)))
        harness.watermark(64_000 + 1_998)
        assert kept(harness) == {"left": count - 1_000}


def test_an_interval_that_was_changed_keeps_what_is_there() -> None:
    with OperatorHarness(operator("left", 0, 6_400), key_type="int64") as harness:
        left(harness, (1, 10, 1_000), (2, 11, 9_000))
        harness.watermark(500)
        snapshot = harness.snapshot()
    with OperatorHarness.restored(operator("left", 0, 64), [snapshot], key_type="int64") as shorter:
        shorter.watermark(1_064)
        assert taken(shorter) == [(1, 10, None, 1_064)]
        right(shorter, (2, 20, 9_064))
        assert taken(shorter) == [(2, 11, 20, 9_064)]
        shorter.watermark(20_000)
        assert kept(shorter) == {}


def test_rows_of_an_interval_that_shrank_do_not_come_behind_the_watermark() -> None:
    """Neither at the first watermark, nor when the job is restored again before it."""
    with OperatorHarness(operator("full", -10, 1_000), key_type="int64") as harness:
        left(harness, (1, 10, 1_000), (2, 11, 1_450), (None, 12, 1_000))
        harness.watermark(1_500)
        snapshot = harness.snapshot()
    with OperatorHarness.restored(operator("full", -10, 100), [snapshot], key_type="int64") as shorter:
        snapshot = shorter.snapshot()
    with OperatorHarness.restored(operator("full", -10, 100), [snapshot], key_type="int64") as shorter:
        shorter.watermark(1_520)
        assert taken(shorter) == [(1, 10, None, 1_501), (None, 12, None, 1_501)]
        shorter.watermark(1_600)
        assert taken(shorter) == [(2, 11, None, 1_550)]
        assert kept(shorter) == {}


def test_a_restore_in_the_middle_of_a_firing_changes_no_time() -> None:
    with OperatorHarness(operator("full"), key_type="int64") as harness:
        left(harness, *((n, n, 1_000) for n in range(5)))
        harness.operator.rows_per_slice_max = 2
        next(harness.watermark_slices(1_100))
        found, snapshot = taken(harness), harness.snapshot()
    with OperatorHarness.restored(operator("full"), [snapshot], key_type="int64") as later:
        later.watermark(1_101)
        assert sorted([*found, *taken(later)]) == [(n, n, None, 1_100) for n in range(5)]


@pytest.mark.parametrize(("before", "behind"), [("inner", "left"), ("inner", "full"), ("right", "full")])
def test_rows_that_are_kept_can_not_become_those_of_an_outer_side(before: How, behind: How) -> None:
    with OperatorHarness(operator(before), key_type="int64") as harness:
        left(harness, (1, 10, 1_000))
        snapshot = harness.snapshot()
    with pytest.raises(IncompatibleStateError, match=f"'op'.*how='{before}'.*how='{behind}'") as raised:
        OperatorHarness.restored(operator(behind), [snapshot], key_type="int64").open()
    assert (raised.value.operator, raised.value.stored, raised.value.declared) == ("op", before, behind)
    snapshot.lists.pop("how")  # as it was before
    with OperatorHarness.restored(operator(behind), [snapshot], key_type="int64") as later:
        right(later, (1, 20, 1_000))
        assert taken(later) == [(1, 10, 20, 1_000)]


@pytest.mark.parametrize(
    ("state", "entry"),
    [
        *(("fired", entry) for entry in (b"", b"\xc1", msgspec.msgpack.encode("5"), msgspec.msgpack.encode(2**64 - 1))),
        *(("stretch_ms", msgspec.msgpack.encode(entry)) for entry in (5, [5], [1, 2, 3], ["a", 2], [-1, 2], [1, 2**64 - 1])),
        *(("how", entry) for entry in (b"", b"outer", b"\xff")),
    ],
)
def test_an_entry_of_another_form_is_refused(state: str, entry: bytes) -> None:
    with OperatorHarness(operator("left"), key_type="int64") as harness:
        snapshot = harness.snapshot()
    snapshot.lists[state] = [entry]
    with pytest.raises(CorruptStateError, match=f"operator 'op'.*'{state}'") as raised:
        OperatorHarness.restored(operator("left"), [snapshot], key_type="int64").open()
    assert (raised.value.operator, raised.value.state) == ("op", state)


@pytest.mark.parametrize(("before", "behind"), [("full", "left"), ("right", "inner"), ("left", "right")])
def test_rows_that_wait_to_come_out_alone_are_not_dropped_silently(before: How, behind: How) -> None:
    with OperatorHarness(operator(before), key_type="int64") as harness:
        left(harness, (2, 11, 1_000))
        right(harness, (3, 20, 1_000))
        snapshot = harness.snapshot()
    with pytest.raises(UnclaimedStateError, match="_unmatched"):
        OperatorHarness.restored(operator(behind), [snapshot], key_type="int64")


def test_what_was_due_at_a_barrier_comes_out_behind_the_restore_though_no_watermark_follows() -> None:
    """A null in the key, one that waits alone, and one that has become due since the interval is shorter."""
    with OperatorHarness(operator("full", upper=1_000), key_type="int64") as harness:
        left(harness, (None, 9, 100), *((n, n, 100) for n in range(3)), (7, 7, 1_400))
        harness.operator.rows_per_slice_max = 2
        next(harness.watermark_slices(1_500))
        found, snapshot = taken(harness), harness.snapshot()
        assert len(found) == 2
    with OperatorHarness.restored(operator("full", upper=90), [snapshot], key_type="int64") as later:
        later.operator.rows_per_slice_max = 1
        slices = later.catch_up_slices()
        next(slices)
        assert [len(batch.rows()) for batch in later.output.batches] == [1]
        again = later.snapshot()
        for _ in slices:
            pass
        found += taken(later)
        assert sorted(row[1] for row in found) == [0, 1, 2, 7, 9]
        assert not later.operator.uses_processing_time
        assert kept(later) == {}
    with OperatorHarness.restored(operator("full", upper=90), [again], key_type="int64") as later:
        right(later, (7, 70, 1_600))
        assert len(taken(later)) == 2, "the others, and in front of the record"


@pytest.mark.parametrize(("before", "behind"), [(0, 6_400_000), (6_400_000, 0), (6_400_000, 64_000)])
def test_stretches_follow_the_interval(before: int, behind: int) -> None:
    """An interval that was short has narrow stretches: of a long one there would be millions."""
    count = 2_000
    rows = [(1, n, 10_000 + 1_000 * n) for n in range(count)]
    with OperatorHarness(operator(lower=0, upper=before), key_type="int64") as harness:
        left(harness, *rows)
        snapshot = harness.snapshot()
    with OperatorHarness.restored(operator(lower=0, upper=behind), [snapshot], key_type="int64") as harness:
        table = harness.operator.buffers[0].rows
        assert table.count() == count
        for number in range(0, count, 100):
            harness.watermark(10_000 + 1_000 * number + behind)
            assert table.count() <= count - number + max(before, behind) // 64 // 1_000
        later = 10_000 + 1_000 * count + behind + max(behind, before) // 64
        harness.watermark(later)
        assert table.count() == 0
        later += 1
        left(harness, *((1, n, later + 1_000 * n) for n in range(count)))
        assert len(table.namespaces()) <= max(count * 1_000 // max(STRETCH_MS_MIN, behind // 64) + 1, 64) if behind else count
        snapshot = harness.snapshot()
        assert harness.operator.buffers[0].widest_ms == max(STRETCH_MS_MIN, behind // 64)


@pytest.mark.parametrize(("lower", "upper", "side"), [(-(10**9), 10, 0), (-10, 10**9, 1)])
def test_rows_of_the_side_that_is_kept_for_long_do_not_keep_the_others(lower: int, upper: int, side: int) -> None:
    give = (left, right)[side]
    with OperatorHarness(operator(lower=lower, upper=upper), key_type="int64") as harness:
        tables = [buffer.rows for buffer in harness.operator.buffers]
        for number in range(10):
            begins = 1_000 * number
            give(harness, *((n, n, begins + n) for n in range(1_000)))
            (left, right)[1 - side](harness, (-1, number, begins + 1_000))
            harness.watermark(begins + 999)
            assert tables[side].count() <= 10 + STRETCH_MS_MIN
        assert tables[1 - side].count() == 10
        snapshot = harness.snapshot()
    with OperatorHarness.restored(operator(lower=lower, upper=upper), [snapshot], key_type="int64") as harness:
        give(harness, *((n, n, 10_000 + n) for n in range(1_000)))
        harness.watermark(10_999)
        assert [buffer.rows.count() for buffer in harness.operator.buffers][side] <= 10 + STRETCH_MS_MIN


# --------------------------------------------------------------------------------------------------------------- slices


def restored(how: How, snapshots: list[HarnessSnapshot], parallelism: int) -> list[OperatorHarness]:
    found = []
    for subtask in range(parallelism):
        harness = OperatorHarness.restored(
            operator(how), snapshots, parallelism=parallelism, subtask=subtask, key_type="int64"
        )
        harness.operator.pairs_per_slice_max = 3
        found.append(harness.open())
    return found


@pytest.mark.parametrize("cut", range(9))
def test_pairs_that_wait_are_state_and_a_barrier_may_cut_between_them(cut: int) -> None:
    """7 x 4 pairs and rows without a partner, three candidates a slice: cut anywhere, restored at another parallelism."""
    lone: Found = [(2, 100, None, 1_100), (3, None, 200, 1_010)]
    expected: Counter[tuple[Any, ...]] = Counter([(1, one, other, 1_000) for one in range(7) for other in range(4)])
    expected.update(lone)
    harness = OperatorHarness(operator("full"), key_type="int64").open()
    harness.operator.pairs_per_slice_max = 3
    left(harness, *[(1, value, 1_000) for value in range(7)])
    rows = [(1, 0), (3, 200), (1, 1), (1, 2), (1, 3)]
    columns = pa.RecordBatch.from_arrays([pa.array([row[at] for row in rows], pa.int64()) for at in (0, 1)], schema=RIGHT.schema)
    slices = harness.process_slices(columns, [1_000] * 5, input_index=1)
    for _ in range(cut):
        next(slices)
    assert all(batch.num_rows <= 3 for batch in harness.output.batches)
    found = Counter(taken(harness))
    snapshot = harness.snapshot()
    for _ in slices:
        pass
    assert found + Counter(taken(harness)) == expected - Counter(lone)
    assert "right_pending" not in kept(harness)
    harness.close()
    parts = restored("full", [snapshot], 2)
    for each in parts:
        for _ in each.operator.process_processing_time(0):
            pass
        found.update(taken(each))
    parts = restored("full", [each.snapshot() for each in parts], 1) if cut % 2 else parts
    left(next(each for each in parts if _owns(each, 2)), (2, 100, 1_000))
    for each in parts:
        each.watermark(3_000)
        found.update(taken(each))
    assert found == expected


def _owns(harness: OperatorHarness, key: int) -> bool:
    column = KeyType.of(int).column([pa.array([key])], max_parallelism=128)
    groups = harness.context.keyed_state.key_groups
    return bool(groups.start <= int(column.key_groups[0]) < groups.stop)


def test_an_explosion_of_pairs_is_made_in_bounded_batches() -> None:
    count = 1_200
    with OperatorHarness(operator(), key_type="int64") as harness:
        ones = pa.array(np.ones(count, np.int64))
        harness.process(pa.RecordBatch.from_arrays([ones, pa.array(np.arange(count))], schema=LEFT.schema), [1_000] * count)
        columns = pa.RecordBatch.from_arrays([ones, pa.array(np.arange(count))], schema=RIGHT.schema)
        slices = harness.process_slices(columns, [1_000] * count, input_index=1)
        pairs = 0
        for _ in [None, *slices]:
            sizes = [batch.num_rows for batch in harness.output.batches]
            assert not sizes or max(sizes) <= 1 << 15
            pairs += sum(sizes)
            harness.output.clear()
        assert pairs == count * count
