"""Feeds: what is given, who reads it, in which order, and what a restore replays."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.api.testing.feed import FeedLog, FeedSource
from holdfast.operators.functions.schema import UNDECLARED
from tests.api.testing.pipelines import EVENTS, Reading, readings, totals, windows
from tests.examples import examples


@pytest.fixture
def job() -> Iterator[hf.testing.Job]:
    with hf.testing.Job(parallelism=2) as made:
        yield made


class Placed(hf.RichFunction):
    """Each row with the subtask that reads it."""

    def open(self, ctx: Any) -> None:
        self.subtask = ctx.subtask

    def __call__(self, value: Any) -> Any:
        return (self.subtask, value)


def placed(stream: Any) -> Any:
    return stream.map(Placed())


def numbers(*values: int) -> list[dict[str, Any]]:
    return [{"key": "k", "value": value} for value in values]


def by_subtask(out: hf.testing.Output) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for subtask, value in out.rows():
        found.setdefault(subtask, []).append(value["value"])
    return dict(sorted(found.items()))


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_are_dealt_by_their_number_and_keep_their_order(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(placed(feed.stream))
    feed.add(numbers(0, 1, 2))
    job.start()
    feed.add(numbers(3))
    feed.add(numbers(4, 5))
    assert by_subtask(out) == {0: [0, 2, 4], 1: [1, 3, 5]}


def test_a_row_may_be_given_to_one_subtask(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(placed(feed.stream))
    feed.add(numbers(7), to=1)
    job.start()
    feed.add(numbers(8, 9), to=1)
    assert by_subtask(out) == {1: [7, 8, 9]}
    with pytest.raises(hf.InvalidConfigError, match=r"feed 'events' has subtasks 0\.\.1, not 2"):
        feed.add(numbers(1), to=2)


def test_behind_a_rescale_rows_are_dealt_over_the_new_subtasks(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(placed(feed.stream))
    job.start()
    feed.add(numbers(*range(4)))
    job.checkpoint()
    out.take()
    job.restart(parallelism=3)
    feed.add(numbers(*range(4, 10)))
    assert by_subtask(out) == {0: [6, 9], 1: [4, 7], 2: [5, 8]}
    feed.add(numbers(77), to=2)
    assert by_subtask(out) == {2: [77]}


def test_rows_are_records_dicts_frames_or_anything(job: hf.testing.Job) -> None:
    class Point(NamedTuple):
        x: int
        y: int

    class Named(msgspec.Struct):
        name: str

    made = [job.input(name, types) for name, types in (("a", Reading), ("b", Point), ("c", Named), ("d", None))]
    outs = [job.output(feed.stream) for feed in made]
    job.start()
    given: list[Any] = [[Reading("k", 1), Reading("l", 2)], Point(1, 2), Named("n"), [{1, 2}, (3, 4), None]]
    for feed, rows in zip(made, given, strict=True):
        feed.add(rows, to=0)
    found = [out.rows() for out in outs]
    assert found == [[Reading("k", 1), Reading("l", 2)], [Point(1, 2)], [Named("n")], [{1, 2}, (3, 4), None]]


def test_records_pass_through_functions(job: hf.testing.Job) -> None:
    feed = job.input("readings", Reading)
    out = job.output(readings(feed.stream))
    job.start()
    feed.add(Reading("k", 4), at=10)
    assert out.take() == [(Reading("k", 8), 10)]


@pytest.mark.parametrize(
    "frame",
    [
        pa.RecordBatch.from_pydict({"value": [1, 2], "key": ["a", "b"]}),
        pa.table({"key": ["a", "b"], "value": pa.array([1, 2], pa.int32())}),
        pd.DataFrame({"key": ["a", "b"], "value": [1, 2]}),
    ],
    ids=["batch", "table", "pandas"],
)
def test_a_batch_is_taken_from_any_frame(job: hf.testing.Job, frame: Any) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(feed.stream)
    job.start()
    feed.add_batch(frame, at=[10, 20], to=0)
    assert out.take() == [({"key": "a", "value": 1}, 10), ({"key": "b", "value": 2}, 20)]
    feed.add_batch(frame, at="value", to=0)
    assert [time for _, time in out.take()] == [1, 2]


def test_times_are_milliseconds_or_aware_datetimes(job: hf.testing.Job) -> None:
    feed = job.input("events", {"v": int, "at": datetime})
    out = job.output(feed.stream)
    job.start()
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    feed.add({"v": 1, "at": moment}, at=moment)
    feed.add({"v": 1, "at": moment})
    feed.add_batch(pa.table({"v": [1], "at": pa.array([moment])}), at="at")
    assert [time for _, time in out.take()] == [1_704_067_200_000, None, 1_704_067_200_000]
    feed.watermark(moment)
    assert out.watermark == 1_704_067_200_000


# ------------------------------------------------------------------------------------------------- event time, silence


def test_event_time_is_the_least_over_subtasks(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(windows(feed.stream))
    job.start()
    feed.add(numbers(1), at=100)
    feed.watermark(5_000, to=0)
    assert (out.take(), job.watermark("windows"), job.watermark("events")) == ([], None, None)
    feed.watermark(2_000, to=1)
    assert (len(out.take()), job.watermark("windows"), job.watermark("events")) == (1, 2_000, 2_000)


def test_nobody_waits_for_a_silent_subtask(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(windows(feed.stream))
    job.start()
    feed.add(numbers(1), at=100, to=0)
    feed.watermark(5_000, to=0)
    feed.idle(to=1)
    assert (len(out.take()), out.watermark) == (1, 5_000)
    feed.active(to=1)
    feed.watermark(6_000, to=1)  # it has caught up, and counts from here on
    feed.watermark(9_000, to=0)
    assert out.watermark == 6_000
    feed.watermark(7_000, to=1)
    assert out.watermark == 7_000


def test_a_row_ends_the_silence_of_its_subtask(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(windows(feed.stream))
    job.start()
    feed.idle(to=1)
    feed.watermark(1_000, to=0)
    assert out.watermark == 1_000
    feed.add(numbers(1), at=3_000, to=1)
    feed.watermark(2_000, to=1)
    feed.watermark(8_000, to=0)
    assert out.watermark == 2_000


def test_two_feeds_are_two_inputs_of_a_union(job: hf.testing.Job) -> None:
    one, other = job.input("one", EVENTS), job.input("other", EVENTS)
    out = job.output(windows(one.stream.union(other.stream)))
    job.start()
    one.add(numbers(1), at=10)
    other.add(numbers(2), at=20)
    one.watermark(5_000)
    assert out.take() == []
    other.idle()
    assert [each["total"] for each in out.rows()] == [3]
    one.end()
    assert job.status == "RUNNING"
    other.end()
    assert job.status == "FINISHED"


def test_a_watermark_ends_a_silence_for_a_restore_too(job: hf.testing.Job) -> None:
    one, other = job.input("one", EVENTS), job.input("other", EVENTS)
    out = job.output(windows(one.stream.union(other.stream)))
    job.start()
    one.add(numbers(1), at=10)
    other.idle()
    other.watermark(500)
    one.watermark(5_000)
    assert (out.take(), job.watermark("windows")) == ([], 500)
    job.checkpoint()
    job.restart()
    one.watermark(6_000)
    assert out.take() == [], "it holds the other back, as before"
    other.idle()
    assert [each["total"] for each in out.rows()] == [1]


# --------------------------------------------------------------------------------------------------------------- replay


def test_a_restore_replays_rows_and_marks_behind_the_checkpoint_in_order(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(windows(feed.stream))
    job.start()
    feed.add(numbers(1), at=100)
    job.checkpoint()
    feed.add(numbers(2), at=200)
    feed.watermark(999)
    feed.add(numbers(4), at=300)  # late
    first = [each["total"] for each in out.rows()]
    late = job.progress("windows").late_dropped
    job.restart(parallelism=3)
    assert ([each["total"] for each in out.rows()], first) == ([3], [3])
    assert (late, job.progress("windows").late_dropped) == (1, 1)


def test_a_silence_lasts_over_a_restart_and_event_time_begins_anew(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(windows(feed.stream))
    job.start()
    feed.idle(to=1)
    feed.watermark(1_000, to=0)
    job.checkpoint()
    job.restart()
    assert out.watermark is None
    feed.watermark(2_000, to=0)
    assert out.watermark == 2_000


def test_a_feed_takes_the_place_of_another_source_with_its_uid() -> None:
    with hf.testing.Job(parallelism=2) as job:
        job.output(totals(job.environment.from_collection(numbers(1, 2, 3)).uid("events")))
        job.start()
        path = job.snapshot().location
        with hf.testing.Job(parallelism=3) as later:
            feed = later.input("events", EVENTS)
            out = later.output(totals(feed.stream))
            later.start(from_=path, sinks="fork")
            feed.add(numbers(10, 20), to=1)
            assert [each["total"] for each in out.rows()] == [16, 36]


def test_no_row_is_lost_where_the_source_is_narrower_than_the_job() -> None:
    with hf.testing.Job(parallelism=4) as job:
        feed = job.input("events", EVENTS)
        out = job.output(feed.stream.set_parallelism(2).set_max_parallelism(2))
        feed.add(numbers(*range(8)))
        feed.watermark(5, to=3)
        job.start()
        assert sorted(each["value"] for each in out.rows()) == list(range(8))


def test_many_rows_are_read_one_by_one() -> None:
    with hf.testing.Job(batch_rows=1) as slow:
        feed = slow.input("events", {"value": int})
        out = slow.output(feed.stream)
        slow.start()
        feed.add([{"value": number} for number in range(2_000)])
        assert [each["value"] for each in out.rows()] == list(range(2_000))


def test_an_end_lasts_over_a_restart() -> None:
    with hf.testing.Job() as job:
        one, other = job.input("one", EVENTS), job.input("other", EVENTS)
        out = job.output(windows(one.stream.union(other.stream)))
        job.start()
        one.add(numbers(1), at=10)
        one.end()
        job.checkpoint()
        job.restart()
        other.watermark(5_000)
        assert [each["total"] for each in out.rows()] == [1]
        other.end()
        assert job.status == "FINISHED"


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_every_row_is_read_once_whatever_is_restored_in_between(data: st.DataObject) -> None:
    """Readers of one log, each stopped anywhere, rescaled: what they give is the log, in order for each stripe."""
    log = FeedLog("events", 2)
    source = FeedSource("events", None, log)
    with hf.testing.Job(parallelism=2) as job:
        feed = hf.testing.Feed(source, None, UNDECLARED, check=lambda: None, changed=lambda: None)  # type: ignore[arg-type]
        count = 0
        for size in data.draw(st.lists(st.integers(1, 5), max_size=6)):
            feed.add(list(range(count, count + size)), to=data.draw(st.sampled_from([None, 0, 1])))
            count += size
            feed.watermark(count)
        assert job
    entries: list[bytes] | None = None
    seen: list[int] = []
    for parallelism in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)):
        kept: list[bytes] = []
        for subtask in range(parallelism):
            reader = source.create_reader(subtask, parallelism, 8)
            reader.open(None, None if entries is None else entries[subtask::parallelism])  # type: ignore[arg-type]
            for _ in range(data.draw(st.integers(0, 4))):
                polled = reader.poll(data.draw(st.integers(1, 3)), 0)
                seen += [] if polled.batch is None else list(polled.batch.rows())
            kept += reader.snapshot()
        entries = sorted(kept)
    reader = source.create_reader(0, 1, 8)
    reader.open(None, entries)  # type: ignore[arg-type]
    while (polled := reader.poll(10, 0)).ready_at_ms is None:
        seen += [] if polled.batch is None else list(polled.batch.rows())
    assert sorted(seen) == list(range(count))


# -------------------------------------------------------------------------------------------------------------- bad use


def test_nothing_is_given_behind_the_end(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    other = job.input("other", EVENTS)
    job.output(feed.stream.union(other.stream))
    job.start()
    feed.end()
    for call in (lambda: feed.add(numbers(1)), lambda: feed.watermark(1), feed.idle, feed.active, feed.end):
        with pytest.raises(hf.InvalidConfigError, match="feed 'events' has ended"):
            call()
    other.add(numbers(1))


def test_a_watermark_only_rises(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    feed.watermark(10)
    feed.watermark(10)
    for to in (None, 1):
        with pytest.raises(hf.InvalidConfigError, match="feed 'events': a watermark of 9 behind one of 10"):
            feed.watermark(9, to=to)


@pytest.mark.parametrize(
    ("row", "column"),
    [({"key": "a"}, "value"), ({"key": "a", "value": "x"}, "value"), ({"key": "a", "value": 1, "more": 2}, "more"), (7, "key")],
)
def test_a_row_that_does_not_fit_is_refused_by_name(job: hf.testing.Job, row: Any, column: str) -> None:
    feed = job.input("events", EVENTS)
    with pytest.raises(hf.SchemaMismatchError, match="events") as caught:
        feed.add(row)
    assert (caught.value.operator, caught.value.column) == ("events", column)


def test_a_frame_that_does_not_fit_is_refused_by_name(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    for frame in (pa.table({"key": ["a"]}), pa.table({"key": ["a"], "value": ["x"]})):
        with pytest.raises(hf.SchemaMismatchError, match="feed 'events'"):
            feed.add_batch(frame)
    with pytest.raises(hf.InvalidConfigError, match="feed 'events': list is no table or DataFrame"):
        feed.add_batch([1])
    with pytest.raises(hf.InvalidConfigError, match="feed 'untyped' has rows of undeclared type"):
        job.input("untyped").add_batch(pa.table({"key": ["a"]}))
    with pytest.raises(hf.InvalidConfigError, match="has no column 'when'"):
        feed.add_batch(pa.table({"key": ["a"], "value": [1]}), at="when")


@pytest.mark.parametrize("at", [datetime(2024, 1, 1), "noon", True, 2**62, [1, 2]])
def test_what_is_no_event_time_is_refused_by_name(job: hf.testing.Job, at: Any) -> None:
    feed = job.input("events", EVENTS)
    with pytest.raises(hf.InvalidConfigError, match="feed 'events'"):
        feed.add(numbers(1), at=at)


def test_a_window_over_rows_without_event_times_fails(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    job.output(windows(feed.stream))
    job.start()
    with pytest.raises(hf.InvalidTimestampError, match="without event times"):
        feed.add(numbers(1))


def test_a_feed_tells_what_it_is(job: hf.testing.Job) -> None:
    feed = job.input("events", EVENTS)
    out = job.output(totals(feed.stream))
    assert repr(job) == "<Job 'test': not started; 1 inputs, 1 outputs>"
    job.start()
    feed.add(numbers(1, 2))
    assert (repr(feed), repr(out)) == ("<Feed 'events': 2 rows>", "<Output 'output': 2 rows to take>")
    feed.end()
    assert (repr(feed), repr(job)) == ("<Feed 'events': 2 rows, ended>", "<Job 'test': FINISHED; 1 inputs, 1 outputs>")
