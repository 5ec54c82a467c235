"""Columnar accumulators: SQL semantics, exact integers, and rows that stay as they were while they are frozen."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.columnar import decimals
from holdfast.statebackends.columnar import state as columnar
from holdfast.statebackends.columnar.accumulators import check_descriptor, value_type_text
from holdfast.statebackends.columnar.state import CHUNK_ROWS, NumpyColumnarState
from holdfast.statebackends.errors import InvalidConfigError, InvariantError, StateOverflowError
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import state_meta
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor
from tests.examples import examples

KEY = KeyType.of(int)


def _descriptor(source: pa.DataType) -> ColumnarStateDescriptor:
    return ColumnarStateDescriptor(
        "totals",
        (
            ColumnAggregate("count", None, "rows"),
            ColumnAggregate("count", "v", "values", source),
            ColumnAggregate("sum", "v", "total", source),
            ColumnAggregate("min", "v", "lowest", source),
            ColumnAggregate("max", "v", "highest", source),
            ColumnAggregate("mean", "v", "average", source),
        ),
    )


def _state(descriptor: ColumnarStateDescriptor) -> NumpyColumnarState:
    def column_of(arrays: list[pa.Array]) -> Any:
        return KEY.column(arrays, max_parallelism=128)

    return NumpyColumnarState(descriptor, KEY.arrow_types, column_of, "op")


def _keys(keys: Sequence[int]) -> Any:
    return KEY.column([pa.array(keys, pa.int64())], max_parallelism=128)


def _sum_state(source: pa.DataType) -> NumpyColumnarState:
    return _state(ColumnarStateDescriptor("sums", (ColumnAggregate("sum", "v", "total", source),)))


def _reload(state: NumpyColumnarState) -> NumpyColumnarState:
    """What a restore gives: the snapshot's columns through load."""
    frozen = state.freeze()
    keys, namespaces, parts = frozen.columns()
    frozen.release()
    loaded = _state(state.descriptor)
    loaded.load(KEY.column(keys, max_parallelism=128), namespaces.to_numpy(), parts)
    return loaded


def _model(rows: list[tuple[int, int, Any]]) -> dict[tuple[int, int], list[Any]]:
    groups: dict[tuple[int, int], list[Any]] = {}
    for namespace, key, value in rows:
        groups.setdefault((namespace, key), []).append(value)
    expected = {}
    for group, values in groups.items():
        present = [value for value in values if value is not None]
        total = sum(present) if present else None
        expected[group] = [
            len(values),
            len(present),
            total,
            min(present, default=None),
            max(present, default=None),
            sum(present) / len(present) if present else None,
        ]
    return expected


def _contents(state: NumpyColumnarState) -> dict[tuple[int, int], list[Any]]:
    found = {}
    for namespace in state.namespaces():
        for row in state.read(namespace).to_pylist():
            key = row.pop("key_0")
            found[namespace, key] = list(row.values())
    return found


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 5), st.none() | st.integers(-(2**40), 2**40)), max_size=20),
        max_size=5,
    )
)
def test_results_are_those_of_sql_over_all_batches(batches: list[list[tuple[int, int, int | None]]]) -> None:
    state = _state(_descriptor(pa.int64()))
    for batch in batches:
        values = pa.array([row[2] for row in batch], pa.int64())
        namespaces = np.array([row[0] for row in batch], np.int64)
        state.update(_keys([row[1] for row in batch]), namespaces, [None, values, values, values, values, values])
        if len(batch) % 2:
            state = _reload(state)
    assert _contents(state) == _model([row for batch in batches for row in batch])


PRICE = pa.decimal128(36, 4)
_PRICES = st.integers(-(10**36) + 1, 10**36 - 1) | st.integers(-(2**70), 2**70) | st.integers(-5, 5)


def _mean(values: list[Decimal], scale: int) -> Decimal:
    """Half away from zero, as SQL rounds."""
    with localcontext(prec=200):
        return (sum(values, Decimal(0)) / len(values)).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 5), st.none() | _PRICES), max_size=12), max_size=5))
def test_results_of_decimals_are_exact(batches: list[list[tuple[int, int, int | None]]]) -> None:
    state = _state(_descriptor(PRICE))
    rows = []
    for batch in batches:
        prices = [None if row[2] is None else Decimal((row[2] < 0, tuple(map(int, str(abs(row[2])))), -4)) for row in batch]
        rows += [(row[0], row[1], price) for row, price in zip(batch, prices, strict=True)]
        values = pa.array([None, *prices], PRICE).slice(1)
        namespaces = np.array([row[0] for row in batch], np.int64)
        state.update(_keys([row[1] for row in batch]), namespaces, [None, values, values, values, values, values])
        if len(batch) % 2:
            state = _reload(state)
    with localcontext(prec=200):
        expected = _model(rows)
    for group, row in expected.items():
        present = [price for namespace, key, price in rows if (namespace, key) == group and price is not None]
        row[5] = _mean(present, 6) if present else None
    assert _contents(state) == expected


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-(10**38) + 1, 10**38 - 1) | st.integers(-3, 3), st.integers(0, 3) | st.integers(1, 2**62)),
        max_size=8,
    ),
    st.integers(0, 4),
)
def test_means_of_any_sums_and_counts_are_exact(totals: list[tuple[int, int]], more: int) -> None:
    column = pa.decimal128(38 - more, 0)
    bound = 10 ** (38 - more) - 1
    kept = [(max(-bound * max(count, 1), min(bound * max(count, 1), total)), count) for total, count in totals]
    sums = np.array([(total % 2**64, total // 2**64) for total, _ in kept], decimals.DECIMAL)
    found = decimals.means(sums, np.array([count for _, count in kept], np.int64), column)
    with localcontext(prec=200):
        expected = [
            (Decimal(total) / count).quantize(Decimal(1).scaleb(-more), ROUND_HALF_UP) if count else None for total, count in kept
        ]
    assert found.to_pylist() == expected
    assert found.type == decimals.mean_type(column)


def test_results_of_decimals_have_the_types_that_are_stated() -> None:
    state = _state(_descriptor(pa.decimal128(12, 2)))
    values = pa.array([Decimal("1.10"), Decimal("2.25"), None, Decimal("-7.00")], pa.decimal128(12, 2))
    state.update(_keys([1, 1, 1, 1]), 0, [None, *[values] * 5])
    batch = _reload(state).read(0)
    assert [str(field.type) for field in batch.schema][3:] == [
        "decimal128(38, 2)",
        "decimal128(12, 2)",
        "decimal128(12, 2)",
        "decimal128(16, 6)",
    ]
    row = batch.to_pylist()[0]
    expected = {"key_0": 1, "rows": 4, "values": 3, "total": "-3.65", "lowest": "-7.00", "highest": "2.25", "average": "-1.216667"}
    assert {name: value if isinstance(value, int) else str(value) for name, value in row.items()} == expected
    widest = _state(_descriptor(pa.decimal128(38, 2)))
    assert str(widest.read(0).schema.field("average").type) == "decimal128(38, 2)"


def test_a_sum_of_decimals_beyond_38_digits_is_an_error_and_one_at_the_edge_is_exact() -> None:
    most = pa.decimal128(38, 0)
    for sign in (1, -1):
        state = _sum_state(most)
        edge = Decimal(sign * (10**38 - 2))
        state.update(_keys([1, 1, 2]), 0, [pa.array([edge, Decimal(sign), Decimal(sign)], most)])
        state = _reload(state)
        with pytest.raises(StateOverflowError, match=r"sum\(v\) is beyond 38 digits") as raised:
            state.update(_keys([2, 1]), 0, [pa.array([Decimal(sign), Decimal(sign)], most)])
        assert raised.value.fields == {"operator": "op", "state": "sums", "column": "v"}
        assert state.read(0).column("total").to_pylist() == [Decimal(sign * (10**38 - 1)), Decimal(sign)]
        with pytest.raises(StateOverflowError):
            state.update(_keys([2] * 5), 0, [pa.array([Decimal(sign * (10**38 - 1))] * 5, most)])


def test_a_key_with_nulls_only_has_null_results_and_zero_counts() -> None:
    state = _state(_descriptor(pa.float64()))
    nothing = pa.array([None, None], pa.float64())
    state.update(_keys([1, 1]), 0, [None, *[nothing] * 5])
    assert state.read(0).to_pylist() == [
        {"key_0": 1, "rows": 2, "values": 0, "total": None, "lowest": None, "highest": None, "average": None}
    ]


def test_masked_numpy_rows_are_nulls() -> None:
    state = _sum_state(pa.int64())
    state.update(_keys([1, 1, 2]), 0, [np.ma.MaskedArray([5, 7, 9], mask=[False, True, True])])
    assert state.read(0).column("total").to_pylist() == [5, None]


def test_nan_is_the_largest_number() -> None:
    state = _state(_descriptor(pa.float64()))
    values = pa.array([1.0, math.nan, math.nan, -math.inf])
    state.update(_keys([1, 1, 2, 3]), 0, [None, *[values] * 5])
    lowest, highest = state.read(0).column("lowest").to_pylist(), state.read(0).column("highest").to_pylist()
    assert lowest[0] == 1.0
    assert math.isnan(lowest[1])
    assert lowest[2] == -math.inf
    assert [math.isnan(value) for value in highest] == [True, True, False]
    assert _reload(state).read(0).column("lowest").to_pylist()[0] == 1.0


@pytest.mark.parametrize("source", [pa.int8(), pa.int32(), pa.uint16(), pa.uint64(), pa.float32()])
def test_min_and_max_keep_the_type_and_sums_widen(source: pa.DataType) -> None:
    state = _state(_descriptor(source))
    values = pa.array([3, 100, 7], source)
    state.update(_keys([1, 1, 1]), 0, [None, *[values] * 5])
    batch = _reload(state).read(0)
    assert batch.schema.field("lowest").type == source
    assert batch.schema.field("total").type == (pa.float64() if pa.types.is_floating(source) else pa.int64())
    assert batch.to_pylist() == [
        {"key_0": 1, "rows": 3, "values": 3, "total": 110, "lowest": 3, "highest": 100, "average": 110 / 3}
    ]


@pytest.mark.parametrize(
    ("values", "exact"),
    [([2**62, 2**62], None), ([-(2**62), -(2**62), -1], None), ([2**62, 2**62 - 1], 2**63 - 1), ([-(2**63)], -(2**63))],
)
def test_a_sum_beyond_int64_is_an_error_and_one_at_the_edge_is_exact(values: list[int], exact: int | None) -> None:
    state = _sum_state(pa.int64())
    keys = _keys([1] * len(values))
    if exact is None:
        with pytest.raises(StateOverflowError) as raised:
            state.update(keys, 0, [pa.array(values)])
        assert raised.value.fields == {"operator": "op", "state": "sums", "column": "v"}
    else:
        state.update(keys, 0, [pa.array(values)])
        assert state.read(0).column("total").to_pylist() == [exact]


def test_overflow_is_seen_across_batches_and_after_a_restore() -> None:
    state = _sum_state(pa.int64())
    for _ in range(3):
        state.update(_keys([1, 2]), 0, [pa.array([2**61, -(2**61)])])
    state = _reload(state)
    with pytest.raises(StateOverflowError):
        state.update(_keys([1, 1]), 0, [pa.array([2**61, 2**61])])


def test_large_sums_that_cancel_out_don_t_overflow() -> None:
    state = _sum_state(pa.int64())
    for _ in range(10):
        state.update(_keys([1, 1]), 0, [pa.array([2**62, -(2**62)])])
    assert state.read(0).column("total").to_pylist() == [0]


def test_namespaces_are_apart_and_removed_alone() -> None:
    state = _sum_state(pa.int64())
    state.update(_keys([1, 2, 1]), np.array([10, 20, 20]), [pa.array([1, 2, 3])])
    state.update(_keys([3]), 5, [pa.array([4])])
    assert state.namespaces() == [5, 10, 20]
    assert [state.row_count(namespace) for namespace in (5, 10, 20, 30)] == [1, 1, 2, 0]
    state.remove(20)
    state.remove(20)
    assert state.namespaces() == [5, 10]
    assert state.read(20).num_rows == 0
    assert state.read(20).schema == state.read(10).schema


def test_many_namespaces_in_one_batch() -> None:
    state = _sum_state(pa.int64())
    namespaces = np.arange(1000, dtype=np.int64)[::-1] % 500
    state.update(_keys([7] * 1000), namespaces, [pa.array(np.ones(1000, np.int64))])
    assert state.namespaces() == list(range(500))
    assert state.read(499).column("total").to_pylist() == [2]


@pytest.mark.parametrize("namespaces", [[5, 5, 5], [5, 5, 9], [-9, 0, 5, 5, 5, 2**62], [9, 5, 9], [5, 5, 2, 5], [2, 5, 5, 2]])
def test_rows_of_a_batch_go_to_their_namespaces_in_any_order(namespaces: list[int]) -> None:
    state = _sum_state(pa.int64())
    values = pa.array([None, *(10**number for number in range(len(namespaces)))]).slice(1)
    state.update(_keys([7] * len(namespaces)), np.array(namespaces), [values])
    for namespace in set(namespaces):
        total = sum(10**number for number, one in enumerate(namespaces) if one == namespace)
        assert state.read(namespace).column("total").to_pylist() == [total]


def test_reading_is_paged_and_what_was_read_doesn_t_change() -> None:
    state = _sum_state(pa.int64())
    state.update(_keys([5, 6, 7]), 0, [pa.array([1, 2, 3])])
    page = state.read(0, 1, 5)
    assert page.to_pylist() == [{"key_0": 6, "total": 2}, {"key_0": 7, "total": 3}]
    state.update(_keys([6]), 0, [pa.array([100])])
    assert page.to_pylist()[0] == {"key_0": 6, "total": 2}
    assert state.read(0, 3).num_rows == 0
    assert state.read(0, 9, 1).num_rows == 0


_OF_EACH_TYPE: list[list[Any]] = [[1, 2, 3], [1.0, 2.0, 3.0], ["1", "2", "3"], [Decimal(1), Decimal(2), Decimal(3)]]
_ONE_OF_MANY = ["first", "last", "arg_max", "arg_min", "min", "max", "count_distinct"]


@pytest.mark.parametrize("numbers", _OF_EACH_TYPE, ids=repr)
@pytest.mark.parametrize("function", [*_ONE_OF_MANY, "sum", "mean", "stddev"])
def test_what_was_read_does_not_change_with_any_aggregate(function: Any, numbers: list[Any]) -> None:
    """Arrow shares a numpy view: a window's row that had been emitted got the value of a late record."""
    values = pa.array(numbers)
    if function not in _ONE_OF_MANY and values.type == pa.string():
        return
    by = {"by": "v", "by_type": values.type} if function.startswith("arg_") else {}
    state = _state(ColumnarStateDescriptor("read", (ColumnAggregate(function, "v", "result", values.type, **by),)))
    read = before = None
    for row in (1, 2, 0):
        value = values.slice(row, 1)
        taken: Any = (value, value) if by else value
        state.update(_keys([7]), 0, [taken], np.array([row]))
        read = state.read(0) if read is None else read
        before = read.to_pylist() if before is None else before
        assert read.to_pylist() == before


def test_rows_of_gives_each_key_once_as_read_does() -> None:
    state = _state(_descriptor(pa.int64()))
    values = pa.array([1, 2, 3, 4])
    state.update(_keys([7, 8, 9, 7]), 0, [None, *[values] * 5])
    assert state.rows_of(_keys([9, 7, 9]), 0).to_pylist() == [state.read(0).to_pylist()[0], state.read(0).to_pylist()[2]]
    with pytest.raises(InvariantError):
        state.rows_of(_keys([10]), 0)


def test_rows_of_text_keys() -> None:
    key_type = KeyType.of(str)
    descriptor = ColumnarStateDescriptor("sums", (ColumnAggregate("sum", "v", "total", pa.int64()),))
    state = NumpyColumnarState(descriptor, key_type.arrow_types, lambda arrays: key_type.column(arrays, max_parallelism=128), "op")
    for _ in range(3):
        for key in ("a", "b", "c"):
            state.update(key_type.column([pa.array([key])], max_parallelism=128), 0, [pa.array([1])])
    rows = state.rows_of(key_type.column([pa.array(["c", "a"])], max_parallelism=128), 0)
    assert rows.to_pylist() == [{"key_0": "a", "total": 3}, {"key_0": "c", "total": 3}]


def test_dropped_rows_are_in_no_later_read_or_snapshot_but_in_earlier_ones() -> None:
    state = _sum_state(pa.int64())
    state.update(_keys([5, 6, 7]), 3, [pa.array([1, 2, 3])])
    before = state.freeze()
    state.drop_front(3, 2)
    assert state.row_count(3) == 1
    assert state.read(3).to_pylist() == [{"key_0": 7, "total": 3}]
    after = state.freeze()
    state.drop_front(3, 1)
    assert state.namespaces() == []
    assert state.read(3).num_rows == 0
    with pytest.raises(InvariantError):
        state.drop_front(3, 1)
    assert _frozen_totals(after) == {(3, 7): 3}
    assert _frozen_totals(before) == {(3, 5): 1, (3, 6): 2, (3, 7): 3}
    assert _reload(state).namespaces() == []


def test_an_empty_batch_changes_nothing() -> None:
    state = _sum_state(pa.int64())
    state.update(_keys([]), 0, [pa.array([], pa.int64())])
    state.update(_keys([]), np.array([], np.int64), [pa.array([], pa.int64())])
    assert state.namespaces() == []
    assert _reload(state).namespaces() == []


def _frozen_totals(frozen: Any) -> dict[tuple[int, int], int]:
    keys, namespaces, parts = frozen.columns()
    groups = zip(namespaces.to_pylist(), keys[0].to_pylist(), strict=True)
    return dict(zip(groups, parts[0].to_pylist(), strict=True))


def test_two_freezes_see_two_different_moments_whatever_is_read_first() -> None:
    state = _sum_state(pa.int64())
    keys = list(range(3 * CHUNK_ROWS))
    ones = pa.array(np.ones(len(keys), np.int64))
    state.update(_keys(keys), 0, [ones])
    first = state.freeze()
    state.update(_keys(keys[: CHUNK_ROWS + 5]), 0, [ones.slice(0, CHUNK_ROWS + 5)])
    second = state.freeze()
    state.update(_keys([*keys, 10**6]), 0, [pa.array([1] * (len(keys) + 1))])
    state.remove(0)
    assert set(_frozen_totals(second).values()) == {1, 2}
    assert set(_frozen_totals(first).values()) == {1}
    first.release()
    second.release()


def test_growth_while_frozen_leaves_the_frozen_rows_alone() -> None:
    state = _sum_state(pa.int64())
    state.update(_keys([1, 2]), 0, [pa.array([1, 2])])
    frozen = state.freeze()
    keys = list(range(100_000))
    state.update(_keys(keys), 0, [pa.array(keys)])
    state.update(_keys(keys), 0, [pa.array(keys)])
    assert _frozen_totals(frozen) == {(0, 1): 1, (0, 2): 2}


def test_nulls_first_seen_while_frozen_don_t_reach_the_frozen_rows() -> None:
    state = _sum_state(pa.int64())
    state.update(_keys([1]), 0, [pa.array([1])])
    frozen = state.freeze()
    state.update(_keys([2, 1]), 0, [pa.array([None, 5], pa.int64())])
    assert _frozen_totals(frozen) == {(0, 1): 1}
    assert state.read(0).column("total").to_pylist() == [6, None]


def test_a_reader_on_another_thread_never_sees_a_later_write() -> None:
    state = _sum_state(pa.int64())
    keys = np.arange(200_000)
    column = KEY.column([pa.array(keys)], max_parallelism=128)
    ones = np.ones(len(keys), np.int64)
    state.update(column, 0, [ones])
    generator = np.random.default_rng(1)
    for expected in range(1, 6):
        frozen = state.freeze()
        seen: list[set[int]] = []
        reader = threading.Thread(target=lambda frozen=frozen, seen=seen: seen.append(set(_frozen_totals(frozen).values())))
        reader.start()
        for rows in np.array_split(generator.permutation(len(keys)), 40):
            state.update(KEY.column([pa.array(keys[rows])], max_parallelism=128), 0, [ones[rows]])
        reader.join(30)
        frozen.release()
        assert seen == [{expected}]


def test_a_reader_on_another_thread_never_sees_a_later_write_of_any_namespace() -> None:
    state = _sum_state(pa.int64())
    namespaces = np.arange(300)
    ones = np.ones(len(namespaces), np.int64)
    for small_and_large in (namespaces, np.zeros(2 * CHUNK_ROWS, np.int64)):
        keys = _keys(list(range(len(small_and_large))))
        state.update(keys, small_and_large, [np.ones(len(keys), np.int64)])
    generator = np.random.default_rng(1)
    for _ in range(3):
        expected = {place: row[0] for place, row in _contents(state).items()}
        frozen = state.freeze()
        seen: list[dict[tuple[int, int], int]] = []
        reader = threading.Thread(target=lambda frozen=frozen, seen=seen: seen.append(_frozen_totals(frozen)))
        reader.start()
        for rows in np.array_split(generator.permutation(len(namespaces)), 8):
            state.update(_keys(rows.tolist()), namespaces[rows], [ones[rows]])
            state.remove(int(rows[0]))
            state.update(_keys([7]), int(rows[0]), [ones[:1]])
        reader.join(30)
        frozen.release()
        assert seen == [expected]


def test_a_freeze_does_nothing_for_a_namespace_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(columnar.FrozenColumns):
        def __init__(self, columns: Any, count: int) -> None:
            made.append(count)
            super().__init__(columns, count)

    monkeypatch.setattr(columnar, "FrozenColumns", Counted)
    state = _sum_state(pa.int64())
    state.update(_keys([7] * 100), np.arange(100), [np.ones(100, np.int64)])
    first, second = state.freeze(), state.freeze()
    first_changes, _ = state.checkpoint_started(1, 0), state.checkpoint_started(2, 1)
    assert not made
    for _ in range(2):
        state.update(_keys([7, 8]), np.array([3, 5]), [np.ones(2, np.int64)])
    assert made == [1] * 4
    second.release()
    state.drop_front(9, 1)
    assert made == [1] * 5
    assert _frozen_totals(first) == {(namespace, 7): 1 for namespace in range(100)}
    assert first.changed_columns(first_changes, 0) is None
    first.release()
    third = state.freeze()
    found = third.changed_columns(state.checkpoint_started(3, 2), 2)
    assert found is not None
    assert found[0] == [9]
    assert sorted(found[1][1].to_pylist()) == [3, 5]
    assert made[5 + 97 :] == [1, 2]


_PLACES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), min_size=1, max_size=12)
_STEPS = st.one_of(
    st.tuples(st.just("update"), _PLACES),
    st.tuples(st.just("remove"), st.integers(0, 11)),
    st.tuples(st.just("drop"), st.integers(0, 11)),
    st.tuples(st.just("freeze"), st.just(0)),
    st.tuples(st.just("read"), st.integers(0, 3)),
    st.tuples(st.just("abandon"), st.integers(0, 3)),
)


class _Barriers:
    """Columnar state beside a plain dict, with freezes that are read in any order, whole and as what changed since each before."""

    def __init__(self) -> None:
        self.state = _sum_state(pa.int64())
        self.model: dict[tuple[int, int], int] = {}
        self.firing: set[int] = set()
        self.frozen: list[tuple[int, Any, Any, dict[tuple[int, int], int]]] = []
        self.at_barrier: dict[int, dict[tuple[int, int], int]] = {}

    def update(self, places: list[tuple[int, int]]) -> None:
        for namespace in {namespace for namespace, _ in places} & self.firing:
            self.remove(namespace)  # a window that has begun to fire gets no more rows
        namespaces = np.array([namespace for namespace, _ in places], np.int64)
        self.state.update(_keys([key for _, key in places]), namespaces, [np.ones(len(places), np.int64)])
        for place in places:
            self.model[place] = self.model.get(place, 0) + 1

    def remove(self, namespace: int) -> None:
        self.firing.discard(namespace)
        self.state.remove(namespace)
        self.model = {place: value for place, value in self.model.items() if place[0] != namespace}

    def drop(self, namespace: int) -> None:
        if self.state.row_count(namespace):
            del self.model[namespace, self.state.read(namespace, 0, 1).column("key_0")[0].as_py()]
            self.state.drop_front(namespace, 1)
            self.firing.add(namespace)

    def freeze(self, _: int) -> None:
        barrier = len(self.at_barrier) + 1
        frozen = self.state.freeze()
        self.frozen.append((barrier, frozen, self.state.checkpoint_started(barrier, 0), dict(self.model)))
        self.at_barrier[barrier] = dict(self.model)

    def read(self, which: int) -> None:
        if not self.frozen:
            return
        barrier, frozen, changes, expected = self.frozen.pop(which % len(self.frozen))
        for base in range(1, barrier):
            replaced, (keys, namespaces, parts) = frozen.changed_columns(changes, base)
            found = {place: value for place, value in self.at_barrier[base].items() if place[0] not in replaced}
            places = zip(namespaces.to_pylist(), keys[0].to_pylist(), strict=True)
            assert found | dict(zip(places, parts[0].to_pylist(), strict=True)) == expected
        assert _frozen_totals(frozen) == expected
        frozen.release()

    def abandon(self, which: int) -> None:
        if self.frozen:
            self.frozen.pop(which % len(self.frozen))[1].release()


@settings(max_examples=examples(30), deadline=None)
@given(_PLACES, st.lists(_STEPS, max_size=30))
def test_a_freeze_is_what_was_there_whichever_namespaces_are_written_behind_it(
    places: list[tuple[int, int]], steps: list[tuple[str, Any]]
) -> None:
    barriers = _Barriers()
    barriers.update(places)
    barriers.freeze(0)
    for step, argument in steps:
        getattr(barriers, step)(argument)
    while barriers.frozen:
        barriers.read(0)
    assert {place: row[0] for place, row in _contents(barriers.state).items()} == barriers.model


@pytest.mark.parametrize(
    "aggregates",
    [
        (ColumnAggregate("median", "v", "m", pa.int64()),),
        (ColumnAggregate("sum", "v", "m", pa.string()),),
        (ColumnAggregate("sum", "v", "m"),),
        (ColumnAggregate("count", None, "m"), ColumnAggregate("sum", "v", "m", pa.int64())),
        (ColumnAggregate("count", None, "namespace"),),
        (ColumnAggregate("count", None, "m.sum"), ColumnAggregate("mean", "v", "m", pa.int64())),
    ],
)
def test_invalid_aggregates_are_refused(aggregates: tuple[ColumnAggregate, ...]) -> None:
    with pytest.raises(InvalidConfigError):
        check_descriptor(ColumnarStateDescriptor("s", aggregates))


@pytest.mark.parametrize(
    ("taken", "key_type", "free_with"),
    [("key", "utf8", "tuple<utf8>"), ("key_1", "tuple<utf8,int64>", "tuple<utf8>")],
)
def test_an_aggregate_named_as_a_key_column_of_its_table_is_refused(taken: str, key_type: str, free_with: str) -> None:
    descriptor = ColumnarStateDescriptor("s", (ColumnAggregate("count", None, taken),))
    with pytest.raises(InvalidConfigError, match=f"column named {taken} .its tables have key_group, namespace, key"):
        state_meta(descriptor, KeyType.parse(key_type))
    assert state_meta(descriptor, KeyType.parse(free_with)).value_type == f"columnar<{taken}=count>"


def test_the_type_text_names_functions_outputs_and_types() -> None:
    assert value_type_text(_descriptor(pa.int32())) == (
        "columnar<rows=count,values=count(int32),total=sum(int32),lowest=min(int32),highest=max(int32),average=mean(int32)>"
    )
