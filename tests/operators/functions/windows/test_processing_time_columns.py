"""Windows over columns that go by the clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK
from tests.examples import examples
from tests.operators.functions.windows.row_windows import SCHEMA, operator_of
from tests.operators.harness import OperatorHarness

WINDOWS: dict[str, Any] = {
    "tumbling": hf.Tumbling(1_000, time="processing"),
    "sliding": hf.Sliding(1_000, 500, time="processing"),
    "session": hf.Session(1_000, time="processing"),
}


def ms(moment: Any) -> int:
    return round(moment.timestamp() * 1000)


def counted(job: hf.testing.Job, windows: Any) -> tuple[Any, Any]:
    clicks = job.input("clicks", {"user": str, "page": int})
    windowed = clicks.stream.key_by("user").window(windows)
    return clicks, job.output(windowed.aggregate(n=hf.count(), last=hf.last("page")).uid("window"))


def taken(rows: Any) -> list[tuple[Any, ...]]:
    return [(row["user"], ms(row["window_start"]), ms(row["window_end"]), row["n"], row["last"], at) for row, at in rows.take()]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tumbling", [("a", 0, 1_000, 3, 3, 999)]),
        ("sliding", [("a", -500, 500, 1, 1, 499), ("a", 0, 1_000, 3, 3, 999), ("a", 500, 1_500, 2, 3, 1_499)]),
        ("session", [("a", 100, 1_900, 3, 3, 1_899)]),
    ],
)
def test_the_clock_at_arrival_decides(kind: str, expected: list[Any]) -> None:
    with hf.testing.Job(parallelism=2) as job:
        clicks, rows = counted(job, WINDOWS[kind])
        job.start()
        for at, page in ((100, 1), (600, 2), (900, 3)):
            job.advance(to_ms=at)
            clicks.add({"user": "a", "page": page})
        found = []
        for now_ms in (998, 999, 2_500):
            job.advance(to_ms=now_ms)
            found += taken(rows)
            assert found == [row for row in expected if row[-1] <= now_ms]
        clicks.end()
        assert taken(rows) == []


@pytest.mark.parametrize("kind", sorted(WINDOWS))
def test_what_is_overdue_fires_once_after_a_restore_and_what_is_open_once_at_the_end(kind: str) -> None:
    with hf.testing.Job(parallelism=2) as job:
        clicks, rows = counted(job, WINDOWS[kind])
        job.start()
        job.advance(to_ms=600)
        clicks.add([{"user": "a", "page": 1}, {"user": "b", "page": 2}])
        job.checkpoint()
        job.restart(parallelism=3, state_backend="rocksdb", at_ms=9_700)
        found = taken(rows)
        assert sorted({row[0] for row in found}) == ["a", "b"]
        assert len(found) == (4 if kind == "sliding" else 2)
        assert all(row[3] == 1 for row in found)
        clicks.add({"user": "a", "page": 3})
        assert taken(rows) == []
        clicks.end()
        ends = [row[2] for row in taken(rows)]
        assert ends == {"tumbling": [10_000], "sliding": [10_000, 10_500], "session": [10_700]}[kind]


@settings(max_examples=examples(5), deadline=None)
@given(data=st.data(), kind=st.sampled_from(["tumbling", "session"]))
def test_each_record_is_in_one_window_whatever_happens(data: st.DataObject, kind: str) -> None:
    with hf.testing.Job(parallelism=2) as job:
        clicks, rows = counted(job, WINDOWS[kind])
        job.start()
        given_ = now_ms = 0
        committed = 0
        for step in data.draw(st.lists(st.sampled_from(["add", "advance", "checkpoint", "restart"]), max_size=10)):
            if step == "add":
                clicks.add([{"user": user, "page": 0} for user in "abc"])
                given_ += 3
            elif step == "advance":
                now_ms += data.draw(st.integers(1, 1_500))
                job.advance(to_ms=now_ms)
            elif step == "checkpoint":
                job.checkpoint()
            else:
                job.checkpoint()
                committed += int(np.sum([row[3] for row in taken(rows)]))
                now_ms += data.draw(st.sampled_from([0, 3_000]))
                job.restart(parallelism=data.draw(st.integers(1, 3)), at_ms=now_ms)
        clicks.end()
        assert committed + int(np.sum([row[3] for row in taken(rows)])) == given_


@pytest.mark.parametrize("kind", sorted(WINDOWS))
def test_rows_of_windows_by_the_clock_in_front_of_others_are_in_these_when_input_ends(kind: str) -> None:
    with hf.testing.Job(parallelism=2) as job:
        clicks = job.input("clicks", {"user": str, "page": int})
        first = clicks.stream.key_by("user").window(hf.Tumbling(1_000, time="processing"))
        last_page = first.reduce(lambda _, row: row).uid("pages")
        windowed = last_page.key_by("user").window(WINDOWS[kind])
        rows = job.output(windowed.aggregate(n=hf.count(), last=hf.last("page")).uid("window"))
        job.start()
        clicks.add([{"user": "a", "page": 1}, {"user": "a", "page": 2}, {"user": "b", "page": 3}])
        clicks.end()
        assert {(row[0], *row[3:5]) for row in taken(rows)} == {("a", 1, 2), ("b", 1, 3)}


@pytest.mark.parametrize("kind", sorted(WINDOWS))
def test_rows_that_come_behind_the_end_of_event_time_are_in_windows_too(kind: str) -> None:
    """A timer by the clock in front brings them, when it fires between the end of event time and that of the data."""
    operator = operator_of(lambda stream: stream.key_by("key").window(WINDOWS[kind]).aggregate(n=hf.count()))
    with OperatorHarness(operator, key_type="utf8", now_ms=100) as harness:
        harness.process([{"key": "a", "at": 0}], [0], SCHEMA)
        harness.watermark(MAX_WATERMARK)
        fired = len(harness.output.rows())
        assert fired
        harness.process([{"key": "b", "at": 0}], [0], SCHEMA)
        for _ in harness.operator.finish():
            pass
        assert [row["key"] for row in harness.output.rows()] == ["a"] * fired + ["b"] * fired
