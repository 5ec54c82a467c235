"""Records so far from the epoch that bounds of windows can't be counted from them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.operators.functions.event_time.timestamps import TIME_MS_MAX
from holdfast.statebackends.errors import InvalidTimestampError
from tests.operators.functions.windows.row_windows import ROWS, SCHEMA, Seen, operator_of
from tests.operators.harness import OperatorHarness

WINDOWS = [hf.Tumbling(10), hf.Sliding(10, slide=5), hf.Session(10)]
BEYOND = [MAX_WATERMARK, TIME_MS_MAX + 1, -TIME_MS_MAX - 1, MIN_WATERMARK]


def refused(operator: Any, at: int) -> None:
    with OperatorHarness(operator, key_type="utf8") as harness:
        with pytest.raises(InvalidTimestampError, match=f"'op'.* event time {at} ms") as caught:
            harness.process(pa.record_batch({"key": ["a", "b"], "at": [5, 6]}, schema=SCHEMA), [5, at])
        assert (caught.value.operator, caught.value.subtask) == ("op", 0)


@pytest.mark.parametrize("at", BEYOND)
@pytest.mark.parametrize("windows", WINDOWS, ids=repr)
def test_windows_refuse_a_time_from_which_no_bounds_can_be_counted(windows: Any, at: int) -> None:
    refused(operator_of(lambda stream: stream.key_by("key").window(windows).aggregate(n=hf.count())), at)
    refused(operator_of(lambda stream: stream.key_by("key").window(windows).process(Seen())), at)


@pytest.mark.parametrize("at", BEYOND)
def test_tops_of_windows_refuse_it_too(at: int) -> None:
    refused(operator_of(lambda stream: stream.key_by("key").window(hf.Tumbling(10)).top(1, by="at")), at)


@pytest.mark.parametrize("at", [TIME_MS_MAX, -TIME_MS_MAX])
@pytest.mark.parametrize("windows", WINDOWS, ids=repr)
def test_the_last_times_that_are_ones_are_in_windows(windows: Any, at: int) -> None:
    made = operator_of(lambda stream: stream.key_by("key").window(windows).aggregate(n=hf.count()))
    with OperatorHarness(made, key_type="utf8") as harness:
        harness.process(pa.record_batch({"key": ["a"], "at": [5]}, schema=SCHEMA), [at])
        harness.watermark(MAX_WATERMARK)
        batches = harness.output.batches
    assert sum(batch.num_rows for batch in batches) == (2 if isinstance(windows, hf.Sliding) else 1)
    columns = batches[-1].columns()
    start, end = (columns.column(name).cast(pa.int64()).to_pylist()[0] // 1000 for name in ("window_start", "window_end"))
    assert start <= at < end


def test_what_fires_when_event_time_ends_enters_no_further_window() -> None:
    with hf.testing.Job() as job:
        feed = job.input("events", ROWS)
        whole = feed.stream.key_by("key").window(hf.Global()).trigger(hf.EventTimeTrigger()).process(Seen()).uid("whole")
        job.output(whole.key_by("key").window(hf.Tumbling(10)).aggregate(n=hf.count()).uid("again"))
        job.start()
        feed.add({"key": "a", "at": 1}, at=1)
        with pytest.raises(hf.HoldfastError, match=f"'again'.* event time {MAX_WATERMARK} ms"):
            feed.end()
