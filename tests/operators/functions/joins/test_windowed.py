"""Window joins and cogroups against DuckDB and against plain rules, with slices, barriers and rescaling in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, get_args

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK, Batch
from holdfast.operators.functions.joins import windowed
from holdfast.operators.functions.joins.output import How
from holdfast.operators.functions.joins.windowed import JoinWindows, WindowedOperator, cogroup, window_join
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.functions.windows.assigners import Session, Sliding, Tumbling
from holdfast.operators.functions.windows.bounds import slide_of
from holdfast.statebackends.errors import InvalidKeyError, UserFunctionError
from holdfast.statebackends.keygroups import subtask_of_key_group
from holdfast.statebackends.row_tables import key_codes
from holdfast.statebackends.row_tables.table import SortedRowTable
from tests.examples import examples
from tests.operators.harness import HarnessSnapshot, OperatorHarness

LEFT = RowType(pa.schema([("k", pa.string()), ("n", pa.int64())]))
RIGHT = RowType(pa.schema([("k", pa.string()), ("v", pa.int64())]))
GROUPED = RowType(pa.schema([("k", pa.string()), ("start", pa.int64()), ("n", pa.list_(pa.int64())), ("v", pa.list_(pa.int64()))]))
Record = tuple[int, str | None, int, int]
"""Side, key, event time, value."""


def joining(window: JoinWindows, how: How = "inner", rows_per_slice_max: int = 8192) -> WindowedOperator:
    made = window_join(LEFT, RIGHT, "k", window, how, None, "op")
    made.rows_per_slice_max = rows_per_slice_max
    return made


def grouped(key: str, window: Any, left: list[Any], right: list[Any]) -> list[dict[str, Any]]:
    numbers = sorted(row["n"] for row in left), sorted(row["v"] for row in right)
    return [{"k": key, "start": window.start, "n": numbers[0], "v": numbers[1]}]


def grouping(window: JoinWindows, rows_per_slice_max: int = 8192) -> WindowedOperator:
    made = cogroup(LEFT, RIGHT, "k", window, grouped, GROUPED, "op")
    made.rows_per_slice_max = rows_per_slice_max
    return made


def feed(harness: OperatorHarness, *records: Record) -> None:
    """Runs of one side are one batch."""
    for side, schema, name in ((0, LEFT.schema, "n"), (1, RIGHT.schema, "v")):
        some = [record for record in records if record[0] == side]
        if some:
            columns = pa.RecordBatch.from_pylist([{"k": key, name: value} for _, key, _, value in some], schema=schema)
            stamps = np.array([at for _, _, at, _ in some], np.int64)
            harness.operator.process_batch(Batch(columns=columns, timestamps=stamps), side)


def taken(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    """(event time, values ...) of each row since the last call, sorted."""
    pairs = zip(harness.output.rows(), harness.output.timestamps(), strict=True)
    found = [(at, *row.values()) for row, at in pairs]
    harness.output.clear()
    return sorted(found, key=str)


def rows_kept(harness: OperatorHarness) -> int:
    return int(harness.operator._left.count() + harness.operator._right.count())


def test_all_pairs_of_a_key_and_window_come_with_its_last_millisecond() -> None:
    with OperatorHarness(joining(Tumbling(10)), key_type="utf8") as harness:
        feed(harness, (0, "a", 1, 1), (0, "a", 9, 2), (0, "b", 3, 3), (0, "a", 10, 4))
        feed(harness, (1, "a", 5, 50), (1, "a", 0, 60), (1, "c", 2, 70))
        harness.watermark(8)
        assert taken(harness) == []
        harness.watermark(9)
        assert taken(harness) == [(9, "a", 1, 50), (9, "a", 1, 60), (9, "a", 2, 50), (9, "a", 2, 60)]
        assert rows_kept(harness) == 1
        harness.watermark(100)
        assert taken(harness) == []
        assert rows_kept(harness) == 0


@pytest.mark.parametrize("rows_per_slice_max", [1, 3, 8192])
def test_a_record_enters_those_of_its_windows_that_have_not_fired(rows_per_slice_max: int) -> None:
    with OperatorHarness(joining(Sliding(10, 5), "full", rows_per_slice_max), key_type="utf8") as harness:
        feed(harness, (0, "a", 7, 1))
        harness.watermark(9)  # [0, 10) fires
        assert taken(harness) == [(9, "a", 1, None)]
        feed(harness, (1, "a", 8, 80), (1, "a", 4, 40))  # the second is late in both of its windows
        assert harness.context.counters.late_dropped == 1
        harness.watermark(14)
        assert taken(harness) == [(14, "a", 1, 80)]


def test_between_two_windows_a_record_is_in_none_and_not_late() -> None:
    with OperatorHarness(joining(Sliding(2, 10), "full"), key_type="utf8") as harness:
        feed(harness, (0, "a", 5, 1), (0, "a", 1, 2))
        harness.watermark(50)
        assert taken(harness) == [(1, "a", 2, None)]
        assert harness.context.counters.late_dropped == 0


def test_records_of_both_sides_make_a_session_and_those_that_touch_are_one() -> None:
    with OperatorHarness(joining(Session(10)), key_type="utf8") as harness:
        feed(harness, (0, "a", 0, 1), (1, "a", 10, 100), (0, "a", 20, 2), (0, "a", 31, 3), (1, "a", 31, 300))
        harness.watermark(28)
        assert taken(harness) == []
        harness.watermark(29)
        assert taken(harness) == [(29, "a", 1, 100), (29, "a", 2, 100)]
        harness.watermark(40)
        assert taken(harness) == [(40, "a", 3, 300)]
        assert rows_kept(harness) == 0


def test_records_of_keys_that_share_a_code_make_their_own_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = key_codes._finished
    monkeypatch.setattr(key_codes, "_finished", lambda hashes: exact(hashes) & np.uint64(0))
    with OperatorHarness(joining(Session(10), "full"), key_type="utf8", max_parallelism=1) as harness:
        feed(harness, (0, "a", 1, 1), (0, "b", 2, 2), (0, "a", 3, 3), (1, "a", 4, 40), (1, "c", 5, 50), (1, "a", 5, 60))
        harness.watermark(100)
        pairs = [(14, "a", n, v) for n in (1, 3) for v in (40, 60)]
        assert taken(harness) == sorted([*pairs, (11, "b", 2, None), (14, "c", None, 50)], key=str)
        assert rows_kept(harness) == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_of_a_session_the_merged_window_counts_for_lateness(at_once: bool) -> None:
    with OperatorHarness(grouping(Session(10)), key_type="utf8") as harness:
        feed(harness, (1, "a", 25, 1))
        harness.watermark(30)
        late = [(0, "a", 20, 2), (0, "a", 11, 3), (0, "a", 5, 4), (0, "a", 0, 5), (0, "b", 20, 6), (0, "b", 25, 7), (0, "b", 20, 8)]
        for records in [late] if at_once else [[record] for record in late]:
            feed(harness, *records)
        # of a all but none: 20 touches 25, 11 touches 20, 5 touches 11, 0 touches 5; of b the first 20 came before 25
        assert harness.context.counters.late_dropped == 1
        harness.watermark(100)
        assert taken(harness) == [(34, "a", 0, [2, 3, 4, 5], [1]), (34, "b", 20, [7, 8], [])]


@pytest.mark.parametrize("window", [Tumbling(10), Sliding(10, 5), Session(10)])
def test_a_null_in_the_key_is_equal_to_nothing(window: JoinWindows) -> None:
    with OperatorHarness(joining(window, "left"), key_type="utf8") as harness:
        feed(harness, (0, None, 12, 1), (1, None, 12, 2), (0, "", 12, 3))
        ends = {"Tumbling": [19], "Sliding": [14, 19], "Session": [21]}[type(window).__name__]
        feed(harness, (0, None, 12, 4))
        assert taken(harness) == sorted([(end, None, n, None) for n in (1, 4) for end in ends], key=str)
        harness.watermark(40)
        assert taken(harness) == [(end, "", 3, None) for end in ends]
        feed(harness, (0, None, 12, 5))
        assert harness.context.counters.late_dropped == 1
    with OperatorHarness(grouping(window), key_type="utf8") as harness, pytest.raises(InvalidKeyError, match="op"):
        feed(harness, (0, None, 12, 1))


def test_results_of_one_group_of_a_cogroup_come_in_bounded_batches() -> None:
    def many(key: str, window: Any, left: list[Any], right: list[Any]) -> Iterable[dict[str, Any]]:
        return [{"k": key, "start": n, "n": [], "v": []} for n in range(len(left) * len(right))]

    made = cogroup(LEFT, RIGHT, "k", Tumbling(10), many, GROUPED, "op")
    made.rows_per_slice_max = 40
    with OperatorHarness(made, key_type="utf8") as harness:
        feed(harness, *((side, "a", 5, n) for side in (0, 1) for n in range(11)))
        harness.watermark(9)
        assert [batch.num_rows for batch in harness.output.batches] == [40, 40, 40, 1]
        assert [row["start"] for row in harness.output.rows()] == list(range(121))
        assert set(harness.output.timestamps()) == {9}


def test_what_a_cogroup_raises_names_operator_key_and_window() -> None:
    def bad(key: Any, window: Any, left: Any, right: Any) -> Any:
        return None if left else []

    with OperatorHarness(cogroup(LEFT, RIGHT, "k", Tumbling(10), bad, GROUPED, "op"), key_type="utf8") as harness:
        feed(harness, (0, "a", 1, 1))
        with pytest.raises(UserFunctionError, match=r"window 0\.\.10, 1 left and 0 right rows") as raised:
            harness.watermark(10)
        assert raised.value.operator == "op"
        assert "'a'" in str(raised.value)


@pytest.mark.parametrize("window", [Tumbling(10), Session(10)])
def test_a_key_with_more_rows_of_one_side_than_a_slice_loses_none(window: JoinWindows) -> None:
    with OperatorHarness(joining(window, "full", rows_per_slice_max=2), key_type="utf8") as harness:
        feed(harness, *((0, "left", 0, n) for n in range(5)), *((1, "right", 0, n) for n in range(5)))
        harness.watermark(10)
        expected = [(9, "left", n, None) for n in range(5)] + [(9, "right", None, n) for n in range(5)]
        assert taken(harness) == sorted(expected, key=str)
        assert rows_kept(harness) == 0


def test_a_key_with_more_pairs_than_a_slice_is_cut_anywhere() -> None:
    made = joining(Session(10), "full", rows_per_slice_max=4)
    lefts = [(0, "a", at, at) for at in range(7)]
    rights = [(1, "a", at, 100 + at) for at in range(3)]
    with OperatorHarness(made, key_type="utf8") as harness:
        feed(harness, *lefts, *rights, (0, "b", 0, 9))
        emitted, steps = [], 0
        snapshot = None
        slices = harness.watermark_slices(100)
        for _ in slices:
            steps += 1
            emitted += taken(harness)
            if len(emitted) > 8:
                snapshot = harness.snapshot()
                break
        assert snapshot is not None
        assert steps > 2
    with OperatorHarness.restored(made, [snapshot], key_type="utf8") as harness:
        feed(harness, (0, "a", 3, 1_000))  # late: what was due fires before it
        emitted += taken(harness)
        assert harness.context.counters.late_dropped == 1
        assert rows_kept(harness) == 0
    expected = [(15, "a", left, 100 + right) for left in range(7) for right in range(3)] + [(9, "b", 9, None)]
    assert sorted(emitted, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("cut", range(1, 6))
def test_the_rows_of_a_large_session_are_set_apart_in_slices(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier sets the rest apart: what is left would be a session of its own."""
    made = joining(Session(10), "full", rows_per_slice_max=3)
    records = [(side, "a", at, 100 * side + at) for side, count in ((0, 8), (1, 4)) for at in range(count)]
    with OperatorHarness(made, key_type="utf8") as harness:
        feed(harness, *records, (0, "b", 0, 9))
        appended: list[int] = []
        append = SortedRowTable.append

        def counting(self: Any, keys: Any, *columns: Any) -> Any:
            appended.append(len(keys))
            return append(self, keys, *columns)

        monkeypatch.setattr(SortedRowTable, "append", counting)
        slices = harness.watermark_slices(100)
        for _ in range(cut):
            next(slices)
        assert max(appended) <= 3
        emitted, snapshot = taken(harness), harness.snapshot()
        for _ in slices:
            pass
        behind = taken(harness)
    with OperatorHarness.restored(made, [snapshot], key_type="utf8") as harness:
        harness.watermark(100)
        assert taken(harness) == behind
        assert rows_kept(harness) == 0
    expected = [(16, "a", left, 100 + right) for left in range(8) for right in range(4)] + [(9, "b", 9, None)]
    assert sorted([*emitted, *behind], key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("window", [Tumbling(10), Session(5)])
@pytest.mark.parametrize("kind", ["join", "cogroup"])
def test_late_rows_go_unchanged_to_the_side_output_or_are_counted(window: JoinWindows, kind: str) -> None:
    if kind == "join":
        made: WindowedOperator = window_join(LEFT, RIGHT, "k", window, "full", None, "op", ("late", ""))
    else:
        made = cogroup(LEFT, RIGHT, "k", window, grouped, GROUPED, "op", ("late", ""))
    with OperatorHarness(made, key_type="utf8") as harness:
        harness.output.sides["late"] = []
        harness.watermark(30)
        feed(harness, (0, "a", 5, 1), (0, "a", 35, 2), (0, "b", 7, 3), (1, "a", 6, 4), (1, "a", 36, 5))
        (late,) = harness.output.sides["late"]
        assert late.rows() == [{"k": "a", "n": 1}, {"k": "b", "n": 3}]
        assert late.timestamps is not None
        assert late.timestamps.tolist() == [5, 7]
        assert (harness.context.counters.late_dropped, harness.context.counters.late_ms_max) == (1, 24)
        harness.watermark(100)
        assert len(taken(harness)) == 1


@pytest.mark.parametrize("window", [Tumbling(10), Session(10)])
@pytest.mark.parametrize("slices", [1, 2, 5])
def test_what_a_barrier_found_due_comes_in_slices_before_any_record(window: JoinWindows, slices: int) -> None:
    """Crashes between any two slices: after so many of them, again and again, until nothing is left."""
    made = joining(window, "full", rows_per_slice_max=4)
    lefts = [(0, "a", at, at) for at in range(3)] + [(0, f"k{n}", 5, n) for n in range(9)]
    rights = [(1, "a", at, 100 + at) for at in range(9)] + [(1, f"r{n}", 5, n) for n in range(6)]
    with OperatorHarness(made, key_type="utf8") as harness:
        feed(harness, *lefts, *rights)
        next(harness.watermark_slices(30))
        emitted, snapshot = taken(harness), harness.snapshot()
    attempts = 0
    while True:
        attempts += 1
        assert attempts < 30
        with OperatorHarness.restored(made, [snapshot], key_type="utf8") as harness:
            assert harness.operator.uses_processing_time
            assert harness.operator.next_processing_time_ms() <= harness.clock.now_ms
            rest = harness.operator.process_processing_time(harness.clock.now_ms)
            done = 0
            for _ in rest:
                assert sum(batch.num_rows for batch in harness.output.batches) <= 4
                some = taken(harness)
                emitted += some
                done += bool(some)  # others only look
                if done == slices:
                    break
            snapshot = harness.snapshot()
            if done < slices:
                assert harness.operator.next_processing_time_ms() is None
                assert rows_kept(harness) == 0
                break
    assert attempts > 10 // slices
    end = {"a": 18, "other": 15} if isinstance(window, Session) else {"a": 10, "other": 10}
    expected: list[Any] = [(end["a"] - 1, "a", left, 100 + right) for left in range(3) for right in range(9)]
    expected += [(end["other"] - 1, f"k{n}", n, None) for n in range(9)] + [(end["other"] - 1, f"r{n}", None, n) for n in range(6)]
    assert sorted(emitted, key=str) == sorted(expected, key=str)


def test_a_key_may_be_called_as_the_state_calls_its_own() -> None:
    left, right = (RowType(pa.schema([("after", pa.int64()), (name, pa.int64())])) for name in ("n", "v"))
    made = window_join(left, right, "after", Tumbling(10), "inner", None, "op")
    made.rows_per_slice_max = 2
    harness = OperatorHarness(made, key_type="int64").open()
    harness.process([{"after": 70, "n": 1}], [5], left.schema)
    harness.process([{"after": 70, "v": n} for n in range(5)], [5] * 5, right.schema, input_index=1)
    next(harness.watermark_slices(9))
    found, snapshot = taken(harness), harness.snapshot()
    harness.close()
    with OperatorHarness.restored(made, [snapshot], key_type="int64") as harness:
        harness.processing_time(0)
        assert [*found, *taken(harness)] == [(9, 70, 1, n) for n in range(5)]


def test_one_left_row_with_more_partners_than_a_slice_takes_several() -> None:
    made = joining(Tumbling(10), rows_per_slice_max=4)
    with OperatorHarness(made, key_type="utf8") as harness:
        feed(harness, (0, "a", 1, 1), (0, "a", 2, 2), *((1, "a", 3, n) for n in range(11)))
        sizes = []
        for _ in harness.watermark_slices(9):
            sizes.append(len(taken(harness)))
        assert max(sizes) == 4
        assert sum(sizes) == 22


def test_a_watermark_looks_at_the_sessions_that_may_have_ended_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that goes on for long is not read again and again."""
    looked: list[int] = []
    with OperatorHarness(joining(Session(10)), key_type="utf8") as harness:
        table = type(harness.operator._left)
        rows_of = table.rows_of

        def counting(self: Any, *arguments: Any, **named: Any) -> Any:
            found = rows_of(self, *arguments, **named)
            looked.append(len(found))
            return found

        monkeypatch.setattr(table, "rows_of", counting)
        monkeypatch.setattr(table, "scan", None)
        for at in range(0, 500, 5):
            feed(harness, (0, "long", at, at), *([(1, "long", at, at)] if at % 100 == 0 else []))
            harness.watermark(at)
        assert max(looked) < 10
        assert taken(harness) == []
        harness.watermark(10_000)
        assert len(taken(harness)) == 100 * 5


# ------------------------------------------------------------------------------------------------------- against DuckDB

RECORDS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(("a", "b", "c", None)), st.integers(-12, 40)), min_size=1, max_size=24
)
WINDOWS = st.sampled_from((Tumbling(10), Tumbling(7, offset=3), Sliding(10, 4), Sliding(4, 6), Session(3), Session(8)))


@settings(max_examples=examples(35), deadline=None)
@given(RECORDS, WINDOWS, st.sampled_from(get_args(How)), st.sampled_from(("join", "cogroup")), st.data())
def test_results_are_those_of_a_join_by_key_and_window(
    drawn: list[tuple[int, str | None, int]], window: JoinWindows, how: How, kind: Literal["join", "cogroup"], data: Any
) -> None:
    """Whatever comes first, wherever batches end, and though the job goes on at another parallelism in the middle."""
    records: list[Record] = [(*record, number) for number, record in enumerate(drawn) if kind == "join" or record[1] is not None]
    order = data.draw(st.permutations(records), "arrival")
    cut, size = data.draw(st.integers(0, len(order)), "cut"), data.draw(st.sampled_from((1, 3, 100)), "batch")
    slice_rows = data.draw(st.sampled_from((1, 2, 8192)), "slice")
    made = joining(window, how, slice_rows) if kind == "join" else grouping(window, slice_rows)
    emitted, snapshots = run(made, order[:cut], order[cut:], size, parallelism=1, restored=[])
    again, _ = run(made, order[cut:], [], size, parallelism=2, restored=snapshots)
    expected = of_duckdb(how, records, window) if kind == "join" else of_groups(records, window)
    assert Counter(map(str, emitted + again)) == Counter(map(str, expected))


BEFORE_MS = 2
"""A session that ends at 31 fires at 30, and would go on with a record at 31: whether it does then depends on which came first, as
with Flink."""


def run(
    made: WindowedOperator,
    order: list[Record],
    behind: list[Record],
    size: int,
    *,
    parallelism: int,
    restored: list[HarnessSnapshot],
) -> tuple[list[Any], list[HarnessSnapshot]]:
    """(what is emitted, what is stored): records in this order, and after each batch a watermark before all that follow."""
    emitted: list[Any] = []
    snapshots = []
    for subtask in range(parallelism):
        with OperatorHarness.restored(made, restored, key_type="utf8", parallelism=parallelism, subtask=subtask) as harness:
            for start in range(0, len(order), size):
                feed(harness, *(each for each in order[start : start + size] if owner(each[1], parallelism) == subtask))
                harness.watermark(min([each[2] for each in order[start + size :] + behind], default=1_000) - BEFORE_MS)
            if not behind:
                harness.watermark(MAX_WATERMARK)
                assert rows_kept(harness) == 0
            assert harness.context.counters.late_dropped == 0
            emitted += taken(harness)
            snapshots.append(harness.snapshot())
    return emitted, snapshots


def owner(key: str | None, parallelism: int) -> int:
    groups = key_selector("k", None, LEFT, "op").key_type.column([pa.array([key or ""])], max_parallelism=128).key_groups
    return subtask_of_key_group(int(groups[0]), 128, parallelism)


def windows_of(records: list[Record], window: JoinWindows) -> list[tuple[Record, int, int]]:
    """Each record with the start and the end of each of its windows."""
    if not isinstance(window, Session):
        slide, size, offset = slide_of(window), window.size_ms, window.offset_ms
        starts = {at: range(at - (at - offset) % slide, at - size, -slide) for _, _, at, _ in records}
        return [(record, start, start + size) for record in records for start in starts[record[2]]]
    found: list[tuple[Record, int, int]] = []
    for key in {record[1] for record in records}:
        session: list[Record] = []
        for record in sorted((each for each in records if each[1] == key), key=lambda each: each[2]):
            if session and (key is None or record[2] - session[-1][2] > window.gap_ms):
                found += _closed(session, window)
                session = []
            session.append(record)
        found += _closed(session, window)
    return found


def _closed(session: list[Record], window: Session) -> Iterable[tuple[Record, int, int]]:
    return [(record, session[0][2], session[-1][2] + window.gap_ms) for record in session]


def of_duckdb(how: How, records: list[Record], window: JoinWindows) -> list[Any]:
    in_windows = windows_of(records, window)
    sides = []
    for side in (0, 1):
        rows = [(record[1], end, record[3]) for record, _, end in in_windows if record[0] == side]
        kinds = (pa.string(), pa.int64(), pa.int64())
        sides.append(pa.table([pa.array([row[at] for row in rows], kinds[at]) for at in range(3)], names=["k", "e", "n"]))
    lefts, rights = sides  # noqa: RUF059
    result = "coalesce(l.e, r.e) - 1, coalesce(l.k, r.k), l.n, r.n"
    return duckdb.sql(f"SELECT {result} FROM lefts l {how} JOIN rights r ON l.k = r.k AND l.e = r.e").fetchall()


def of_groups(records: list[Record], window: JoinWindows) -> list[Any]:
    groups: dict[tuple[str | None, int, int], tuple[list[int], list[int]]] = {}
    for (side, key, _, number), start, end in windows_of(records, window):
        groups.setdefault((key, start, end), ([], []))[side].append(number)
    return [(end - 1, key, start, sorted(left), sorted(right)) for (key, start, end), (left, right) in groups.items()]


def test_rows_that_are_emitted_go_with_their_window_or_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed, "EMITTED_ROWS_MAX", 4)
    with OperatorHarness(joining(Tumbling(10), "full", rows_per_slice_max=1), key_type="utf8") as harness:
        feed(harness, *((side, str(n), n, n) for n in range(10) for side in (0, 1)), (1, "x", 5, 5))
        harness.watermark(9)
        assert taken(harness) == sorted([(9, str(n), n, n) for n in range(10)] + [(9, "x", None, 5)], key=str)
