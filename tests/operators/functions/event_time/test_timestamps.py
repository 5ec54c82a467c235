"""Event times and watermarks (scenario N17), and times that are none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.operators.functions.event_time.timestamps import TIME_MS_MAX, TimestampsOperator
from holdfast.operators.functions.event_time.watermarks import BoundedOutOfOrderness
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.statebackends.errors import InvalidConfigError, InvalidTimestampError, UserFunctionError
from holdfast.statebackends.state import duration_ms
from tests.operators.harness import OperatorHarness

ROWS = RowType(pa.schema([("t", pa.int64())]))


def operator(source: Any = "t", bound_ms: int = 5) -> TimestampsOperator:
    return TimestampsOperator(source, bound_ms, ROWS)


def test_n17_bounded_lateness() -> None:
    """A record exactly 5 ms behind the latest is in time, and a watermark says that nothing at it follows: hence one less."""
    with OperatorHarness(operator()) as harness:
        for time in (10, 7, 20, 3):
            harness.process(pa.record_batch({"t": [time]}))
    assert [e if isinstance(e, int) else e.rows()[0]["t"] for e in harness.output.elements] == [10, 4, 7, 20, 14, 3]
    assert harness.output.timestamps() == [10, 7, 20, 3]


def test_n17_the_start_does_not_underflow_and_no_record_reaches_the_maximum() -> None:
    strategy = BoundedOutOfOrderness(bound_ms=5)
    assert strategy.advance(MIN_WATERMARK + 2) is None
    assert strategy.watermark_ms == MIN_WATERMARK
    assert strategy.advance(MAX_WATERMARK + 100) == MAX_WATERMARK - 1


def test_one_watermark_behind_each_batch_that_raises_it() -> None:
    with OperatorHarness(operator(bound_ms=0)) as harness:
        harness.process(pa.record_batch({"t": [3, 9, 1]}))
        harness.process(pa.record_batch({"t": [9]}))
        harness.process(pa.record_batch({"t": [10]}))
    assert harness.output.watermarks == [8, 9]


def test_n19_upstream_watermarks_are_swallowed() -> None:
    assert not operator().forwards_watermarks
    with OperatorHarness(operator()) as harness:
        harness.watermark(100)
        harness.process(pa.record_batch({"t": [10]}))
    assert harness.output.watermarks == [4]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([-1, 1], pa.int64()), [-1, 1]),
        (pa.array([-1, 1999], pa.timestamp("us", "UTC")), [-1, 1]),
        (pa.array([-1, 2], pa.timestamp("ms", "Europe/Berlin")), [-1, 2]),
        (pa.array([-1, 2], pa.timestamp("s", "UTC")), [-1000, 2000]),
    ],
)
def test_columns_of_every_unit_round_down_to_ms(column: pa.Array, expected: list[int]) -> None:
    with OperatorHarness(operator()) as harness:
        harness.process(pa.record_batch({"t": column}))
    assert harness.output.timestamps() == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        (np.int64(7), 7),
        (datetime(1970, 1, 1, 2, 0, 0, 7999, timezone(timedelta(hours=2))), 7),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), -1),
    ],
)
def test_functions_give_ms_or_aware_datetimes(value: Any, expected: int) -> None:
    with OperatorHarness(operator(lambda row: value)) as harness:
        harness.process([{"t": 0}])
    assert harness.output.timestamps() == [expected]


@pytest.mark.parametrize("value", [None, datetime(2020, 1, 1), 1.5, True, "2020", 2**63, TIME_MS_MAX + 1, -TIME_MS_MAX - 1])
def test_what_is_no_event_time_is_refused_with_its_record(value: Any) -> None:
    with OperatorHarness(operator(lambda row: value if row["t"] else 0), subtask=1, parallelism=2) as harness:
        with pytest.raises(InvalidTimestampError) as caught:
            harness.process([{"t": 0}, {"t": 1}])
        assert (caught.value.operator, caught.value.subtask) == ("op", 1)
        assert value == 2**63 or caught.value.record == "{'t': 1}"


def test_a_null_in_the_column_is_refused_with_its_record() -> None:
    with OperatorHarness(operator()) as harness, pytest.raises(InvalidTimestampError, match=r"column 't' is null; record .*None"):
        harness.process(pa.record_batch({"t": [1, None]}))


def test_nanoseconds_given_as_ms_are_noticed() -> None:
    with OperatorHarness(operator()) as harness, pytest.raises(InvalidTimestampError, match="another unit"):
        harness.process(pa.record_batch({"t": [1_700_000_000_000_000_000]}))


def test_a_function_that_raises_names_the_record() -> None:
    with OperatorHarness(operator(lambda row: row["missing"])) as harness, pytest.raises(UserFunctionError, match="KeyError"):
        harness.process([{"t": 0}])


def test_durations() -> None:
    assert (duration_ms(timedelta(days=1), "d"), duration_ms(5, "d")) == (86_400_000, 5)
    for bad in (1.5, True, None, timedelta(microseconds=1)):
        with pytest.raises(InvalidConfigError):
            duration_ms(bad, "d")  # type: ignore[arg-type]
    assert Tumbling(hours=1, minutes=30).size_ms == Tumbling(timedelta(minutes=90)).size_ms == 5_400_000
    assert Tumbling(10, offset=-3).offset_ms == 7
