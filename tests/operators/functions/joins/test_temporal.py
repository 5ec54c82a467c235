"""Temporal joins against a plain rule and against DuckDB's ASOF JOIN, with slices, barriers and rescaling in between."""

from __future__ import annotations

from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import MAX_WATERMARK, Batch
from holdfast.operators.functions.joins.sides import StoredSide
from holdfast.operators.functions.joins.temporal import TemporalJoinOperator, temporal_join
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.selectors import key_selector
from holdfast.statebackends.errors import InvalidTimestampError
from holdfast.statebackends.keygroups import subtask_of_key_group
from tests.examples import examples
from tests.operators.harness import HarnessSnapshot, OperatorHarness

LEFT = RowType(pa.schema([("k", pa.string()), ("n", pa.int64())]))
RIGHT = RowType(pa.schema([("k", pa.string()), ("v", pa.string())]))
How = Literal["inner", "left"]


def operator(
    how: How = "inner", rows_per_slice_max: int = 8192, versions_per_slice_max: int = 1 << 15
) -> TemporalJoinOperator:
    made = temporal_join(LEFT, RIGHT, "k", how, None, "op")
    made.rows_per_slice_max, made.versions_per_slice_max = rows_per_slice_max, versions_per_slice_max
    return made


def feed(harness: OperatorHarness, side: int, *rows: tuple[str, int, Any]) -> None:
    """(key, event time, value) of each record."""
    schema, name = (LEFT.schema, "n") if side == 0 else (RIGHT.schema, "v")
    columns = pa.RecordBatch.from_pylist([{"k": key, name: value} for key, _, value in rows], schema=schema)
    harness.operator.process_batch(Batch(columns=columns, timestamps=np.array([at for _, at, _ in rows], np.int64)), side)


def shown(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    """(key, event time, left value, right value) of each row so far."""
    pairs = zip(harness.output.rows(), harness.output.timestamps(), strict=True)
    return [(row["k"], at, row["n"], row["v"]) for row, at in pairs]


def taken(harness: OperatorHarness) -> list[tuple[Any, ...]]:
    found = shown(harness)
    harness.output.clear()
    return found


def versions_kept(harness: OperatorHarness) -> int:
    return int(harness.operator._versions.count())


def test_a_record_takes_the_version_that_was_valid_at_its_time_when_the_watermark_has_passed_it() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        feed(harness, 0, ("a", 15, 1), ("a", 20, 2), ("a", 9, 3))
        feed(harness, 1, ("a", 20, "new"), ("a", 10, "old"), ("b", 1, "other"))
        harness.watermark(14)
        assert taken(harness) == []  # at 9 nothing was valid
        harness.watermark(19)
        assert taken(harness) == [("a", 15, 1, "old")]
        harness.watermark(20)
        assert taken(harness) == [("a", 20, 2, "new")]


def test_a_left_join_keeps_records_without_a_version() -> None:
    with OperatorHarness(operator("left"), key_type="utf8") as harness:
        feed(harness, 0, ("a", 5, 1), ("b", 6, 2))
        feed(harness, 1, ("a", 6, "x"))
        harness.watermark(10)
        assert sorted(taken(harness)) == [("a", 5, 1, None), ("b", 6, 2, None)]


def test_of_versions_of_one_time_the_later_arrival_holds() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        feed(harness, 1, ("a", 5, "first"), ("a", 5, "second"))
        feed(harness, 1, ("a", 5, "third"))
        feed(harness, 0, ("a", 5, 1))
        harness.watermark(5)
        assert taken(harness) == [("a", 5, 1, "third")]
        feed(harness, 1, ("a", 5, "late, and yet the last of its time"))
        feed(harness, 0, ("a", 6, 2))
        harness.watermark(6)
        assert taken(harness) == [("a", 6, 2, "late, and yet the last of its time")]
        assert versions_kept(harness) == 1


def test_late_left_records_are_counted_and_late_versions_hold_for_what_follows() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        feed(harness, 1, ("a", 5, "five"))
        harness.watermark(10)
        feed(harness, 0, ("a", 10, 1), ("a", 11, 2))
        assert harness.context.counters.late_dropped == 1
        feed(harness, 1, ("a", 8, "eight"), ("a", 7, "seven"), ("a", 4, "four"), ("b", 3, "three"))
        assert harness.context.counters.late_dropped == 3
        harness.watermark(11)
        assert taken(harness) == [("a", 11, 2, "eight")]
        assert versions_kept(harness) == 2  # eight of a, three of b


def test_versions_go_when_no_record_can_need_them_and_not_before() -> None:
    with OperatorHarness(operator(rows_per_slice_max=1), key_type="utf8") as harness:
        feed(harness, 1, *(("a", at, str(at)) for at in range(0, 50, 10)), ("b", 0, "b"))
        harness.watermark(29)
        assert versions_kept(harness) == 4  # 20, 30, 40 of a, and that of b
        feed(harness, 0, ("a", 30, 1))
        harness.watermark(30)
        assert taken(harness) == [("a", 30, 1, "30")]
        assert versions_kept(harness) == 3
        harness.watermark(1_000)
        assert versions_kept(harness) == 2
        feed(harness, 0, ("b", 1_001, 2))
        harness.watermark(2_000)
        assert taken(harness) == [("b", 1_001, 2, "b")]


def test_versions_of_one_moment_are_looked_at_in_slices() -> None:
    with OperatorHarness(operator(rows_per_slice_max=4), key_type="utf8") as harness:
        for at in (0, 10):
            feed(harness, 1, *((str(n), at, str(at)) for n in range(40)))
        feed(harness, 1, ("0", 10, "again"), ("x", 11, "x"))
        assert len(list(harness.watermark_slices(1_000))) >= 15
        assert versions_kept(harness) == 41


@pytest.mark.parametrize("cut", [1, 30, 60, 200])
def test_a_key_with_many_versions_of_one_time_takes_many_slices(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at for the records that wait, and go but for the last; a barrier may fall between two slices."""
    looked: list[int] = []
    by_key = StoredSide.by_key

    def counting(self: Any, rows: Any, context: Any) -> Any:
        looked.append(len(rows))
        return by_key(self, rows, context)

    monkeypatch.setattr(StoredSide, "by_key", counting)
    versions = [("a", 5, f"v{n}") for n in range(1_000)]
    with OperatorHarness(operator("left", 20, 20), key_type="utf8") as harness:
        feed(harness, 1, ("a", 3, "old"), *versions[:500], ("b", 5, "b"))
        feed(harness, 1, *versions[500:], ("a", 8, "new"))
        feed(harness, 0, ("a", 9, 1), ("a", 7, 2), ("a", 4, 3), ("a", 2, 4), ("b", 7, 5))
        slices = harness.watermark_slices(20)
        done = sum(1 for _ in zip(range(cut), slices))  # noqa: B905
        emitted, snapshot = shown(harness), harness.snapshot()
    if done == cut:
        with OperatorHarness.restored(operator("left", 20, 20), [snapshot], key_type="utf8") as harness:
            harness.watermark(20)
            emitted += shown(harness)
            assert versions_kept(harness) == 2
    assert max(looked) <= 20
    assert sorted(emitted) == [("a", 2, 4, None), ("a", 4, 3, "old"), ("a", 7, 2, "v999"), ("a", 9, 1, "new"), ("b", 7, 5, "b")]
    assert done == cut or done > 100


def test_a_drain_joins_all_that_waits_and_keeps_the_versions_of_the_future() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        feed(harness, 1, ("a", 0, "zero"), ("a", 100, "hundred"), ("a", 200, "two hundred"))
        feed(harness, 0, ("a", 250, 1))
        harness.watermark(50)
        harness.watermark(MAX_WATERMARK)
        assert taken(harness) == [("a", 250, 1, "two hundred")]
        drained = harness.snapshot()
    with OperatorHarness.restored(operator(), [drained], key_type="utf8") as resumed:
        feed(resumed, 0, ("a", 50, 2), ("a", 51, 3), ("a", 150, 4))
        assert resumed.context.counters.late_dropped == 1
        resumed.watermark(150)
        assert taken(resumed) == [("a", 51, 3, "zero"), ("a", 150, 4, "hundred")]


def test_a_barrier_between_two_slices_loses_nothing_and_repeats_nothing() -> None:
    made = operator("left", rows_per_slice_max=2)
    with OperatorHarness(made, key_type="utf8") as harness:
        feed(harness, 0, *((str(n % 3), n, n) for n in range(12)))
        feed(harness, 1, *((str(n % 3), n, f"v{n}") for n in range(0, 12, 4)))
        slices = harness.watermark_slices(11)
        next(slices)
        next(slices)
        before = shown(harness)
        assert 0 < len(before) < 12
        cut = harness.snapshot()
    with OperatorHarness.restored(made, [cut], key_type="utf8") as harness:
        feed(harness, 1, ("0", -1, "behind the cut"))  # comes before any watermark: what was due must not see it
        rest = shown(harness)
        assert {row[2] for row in before} | {row[2] for row in rest} == set(range(12))
        assert len(before) + len(rest) == 12
        assert "behind the cut" not in {row[3] for row in rest}
        assert harness.context.counters.late_dropped == 1


@pytest.mark.parametrize("slices", [1, 3])
def test_what_a_barrier_found_due_comes_in_slices_before_any_record(slices: int) -> None:
    """Crashes between any two slices, until nothing is left; versions that have been overtaken go, too."""
    made = operator("left", rows_per_slice_max=2)
    with OperatorHarness(made, key_type="utf8") as harness:
        feed(harness, 0, *((str(n % 3), n, n) for n in range(12)))
        feed(harness, 1, *((str(n % 3), n, f"v{n}") for n in range(12)))
        next(harness.watermark_slices(20))
        emitted, snapshot = shown(harness), harness.snapshot()
    for _attempt in range(40):
        with OperatorHarness.restored(made, [snapshot], key_type="utf8") as harness:
            assert harness.operator.uses_processing_time
            assert harness.operator.next_processing_time_ms() <= harness.clock.now_ms
            rest = harness.operator.process_processing_time(harness.clock.now_ms)
            done = sum(1 for _ in zip(range(slices), rest))  # noqa: B905
            assert all(batch.num_rows <= 2 for batch in harness.output.batches)
            emitted += shown(harness)
            snapshot = harness.snapshot()
            if done < slices:
                assert harness.operator.next_processing_time_ms() is None
                break
    assert versions_kept(harness) == 3
    assert sorted(emitted) == sorted((str(n % 3), n, n, f"v{n}") for n in range(12))


def test_a_watermark_looks_at_the_versions_that_it_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness:
        feed(harness, 1, *(("abc"[at % 3], at, str(at)) for at in range(3_000)))
        looked: list[int] = []
        side = type(harness.operator.right)
        by_key = side.by_key

        def counting(self: Any, rows: Any, context: Any) -> Any:
            looked.append(len(rows))
            return by_key(self, rows, context)

        monkeypatch.setattr(side, "by_key", counting)
        monkeypatch.setattr(type(harness.operator._versions), "scan", None)
        for at in range(0, 3_000, 50):
            harness.watermark(at)
        assert max(looked) == 50
        assert sum(looked) == 2_951
        assert versions_kept(harness) == 52


def test_records_without_event_times_are_refused() -> None:
    with OperatorHarness(operator(), key_type="utf8") as harness, pytest.raises(InvalidTimestampError):
        harness.operator.process_batch(Batch(columns=pa.RecordBatch.from_pylist([{"k": "a", "n": 1}], schema=LEFT.schema)), 0)


# ------------------------------------------------------------------------------------------------------- against DuckDB

KEYS = ("a", "b", "c")
LEFTS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-20, 60)), min_size=1, max_size=24)
VERSIONS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(-20, 60)), max_size=16, unique=True)


@settings(max_examples=examples(25), deadline=None)
@given(LEFTS, VERSIONS, st.sampled_from(("inner", "left")), st.data())
def test_results_are_those_of_an_asof_join(
    lefts: list[tuple[str, int]], versions: list[tuple[str, int]], how: How, data: Any
) -> None:
    """Whatever comes first, wherever batches end, and though the job goes on at another parallelism in the middle."""
    rows: list[Any] = [(0, key, at, number) for number, (key, at) in enumerate(lefts)]
    rows += [(1, key, at, None if at % 5 == 0 else f"v{number}") for number, (key, at) in enumerate(versions)]
    order = data.draw(st.permutations(rows), "arrival")
    cut, size = data.draw(st.integers(0, len(order)), "cut"), data.draw(st.sampled_from((1, 3, 100)), "batch")
    slice_rows = data.draw(st.sampled_from((1, 2, 8192)), "slice")
    emitted, snapshots = run(how, slice_rows, order[:cut], order[cut:], size, parallelism=1, restored=[])
    again, _ = run(how, slice_rows, order[cut:], [], size, parallelism=2, restored=snapshots)
    assert sorted(map(str, emitted + again)) == sorted(map(str, of_duckdb(how, rows)))


def run(
    how: How,
    slice_rows: int,
    order: list[Any],
    behind: list[Any],
    size: int,
    *,
    parallelism: int,
    restored: list[HarnessSnapshot],
) -> tuple[list[Any], list[HarnessSnapshot]]:
    """(what is emitted, what is stored): records in this order, and after each batch a watermark before all that follow."""
    emitted: list[Any] = []
    snapshots = []
    for subtask in range(parallelism):
        made = operator(how, slice_rows, slice_rows)
        with OperatorHarness.restored(made, restored, key_type="utf8", parallelism=parallelism, subtask=subtask) as harness:
            for start in range(0, len(order), size):
                here = [row for row in order[start : start + size] if owner(row[1], parallelism) == subtask]
                for side in (0, 1):
                    if some := [row[1:] for row in here if row[0] == side]:
                        feed(harness, side, *some)
                watermark = min([row[2] for row in order[start + size :] + behind], default=1_000) - 1
                harness.watermark(watermark)
            if not behind:
                harness.watermark(MAX_WATERMARK)
                assert harness.operator._waiting.count() == 0
            assert harness.context.counters.late_dropped == 0
            emitted += shown(harness)
            snapshots.append(harness.snapshot())
    return emitted, snapshots


def owner(key: str, parallelism: int) -> int:
    groups = key_selector("k", None, LEFT, "op").key_type.column([pa.array([key])], max_parallelism=128).key_groups
    return subtask_of_key_group(int(groups[0]), 128, parallelism)


def of_duckdb(how: How, rows: list[Any]) -> list[Any]:
    lefts = pa.table([[row[at] for row in rows if row[0] == 0] for at in (1, 2, 3)], names=["k", "at", "n"])  # noqa: F841
    versions = pa.table(  # noqa: F841
        {
            "k": pa.array([row[1] for row in rows if row[0] == 1], pa.string()),
            "at": pa.array([row[2] for row in rows if row[0] == 1], pa.int64()),
            "v": pa.array([row[3] for row in rows if row[0] == 1], pa.string()),
        }
    )
    join = "ASOF LEFT JOIN" if how == "left" else "ASOF JOIN"
    query = f"SELECT l.k, l.at, l.n, r.v FROM lefts l {join} versions r ON l.k = r.k AND l.at >= r.at"
    return duckdb.sql(query).fetchall()
