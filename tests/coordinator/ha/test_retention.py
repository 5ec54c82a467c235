"""Which checkpoints retention keeps (ADR 106): a pure function, and the store of completed checkpoints that goes by it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.jobgraph import RETAINED_MAX, JobConfig
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.checkpoints.checkpoint import CompletedCheckpoint
from holdfast.coordinator.checkpoints.completed import CompletedCheckpointStore
from holdfast.coordinator.ha.retention import DAY_MS, HOUR_MS, Retention
from holdfast.statebackends.errors import InvalidConfigError
from tests.examples import examples

HOUR = HOUR_MS
TABLE: dict[str, tuple[Retention, list[tuple[int, int]], int, set[int]]] = {
    "nothing": (Retention(1), [], 0, set()),
    "newest alone": (Retention(1), [(1, 0), (2, 10)], 10, {2}),
    "newest three": (Retention(3), [(1, 0), (2, 1), (3, 2), (4, 3)], 3, {2, 3, 4}),
    "one an hour": (Retention(1, hourly=2), [(1, 0), (2, 10), (3, HOUR), (4, HOUR + 1), (5, 2 * HOUR)], 2 * HOUR, {4, 5}),
    "hours without one don't count": (Retention(1, hourly=2), [(1, 0), (2, 9 * HOUR)], 9 * HOUR, {1, 2}),
    "the newest of its hour, not the oldest": (Retention(1, hourly=3), [(1, 1), (2, 2), (3, HOUR + 5)], HOUR + 5, {2, 3}),
    "one a day": (Retention(1, daily=2), [(1, 0), (2, DAY_MS - 1), (3, DAY_MS), (4, 2 * DAY_MS)], 2 * DAY_MS, {3, 4}),
    "hours and days": (
        Retention(1, hourly=1, daily=3),
        [(1, 5), (2, DAY_MS + 5), (3, 2 * DAY_MS), (4, 2 * DAY_MS + HOUR)],
        2 * DAY_MS + HOUR,
        {1, 2, 4},
    ),
    "within": (Retention(1, within_ms=100), [(1, 0), (2, 99), (3, 100), (4, 200)], 200, {3, 4}),
    "a clock that went back": (Retention(1, within_ms=100), [(1, 10_000), (2, 50)], 60, {1, 2}),
    "the newest by id, whatever its time": (Retention(1, hourly=1), [(1, 5 * HOUR), (2, 0)], 5 * HOUR, {2}),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_kept(name: str) -> None:
    retention, completed, now_ms, kept = TABLE[name]
    assert retention.choose(completed, now_ms) == kept


@settings(max_examples=examples(150), deadline=None)
@given(
    times=st.lists(st.integers(0, 40 * DAY_MS), max_size=40),
    newest=st.integers(1, 5),
    hourly=st.integers(0, 30),
    daily=st.integers(0, 10),
    within_ms=st.integers(0, 5 * DAY_MS),
    now_ms=st.integers(0, 41 * DAY_MS),
)
def test_rules_of_what_is_kept(
    times: list[int], newest: int, hourly: int, daily: int, within_ms: int, now_ms: int
) -> None:
    completed = [(number, time) for number, time in enumerate(sorted(times), 1)]
    retention = Retention(newest, hourly, daily, within_ms)
    kept = retention.choose(completed, now_ms)
    assert {number for number, _ in completed[-newest:]} <= kept, "the newest are never dropped"
    assert len(kept) <= retention.kept_max
    assert {number for number, time in completed if within_ms and time >= now_ms - within_ms} <= kept
    assert kept <= Retention(newest + 1, hourly, daily, within_ms).choose(completed, now_ms), "to keep more drops nothing"
    again = retention.choose([each for each in completed if each[0] in kept], now_ms)
    assert again == kept, "what was kept once is kept, as long as nothing comes"


def completed(number: int, timestamp_ms: int) -> CompletedCheckpoint:
    return CompletedCheckpoint(number, CheckpointKind.CHECKPOINT, f"j/chk-{number}", timestamp_ms)


def run(store: CompletedCheckpointStore, times: list[int]) -> list[int]:
    dropped = []
    for number, time in enumerate(times, 1):
        store.add(completed(number, time))
        dropped += [each.checkpoint_id for each in store.take_drops(time)]
        store.check()
    return dropped


def test_the_store_keeps_hours_as_they_pass() -> None:
    store = CompletedCheckpointStore(Retention(2, hourly=3))
    run(store, [minute * 60_000 for minute in range(0, 300, 10)])
    assert [each.timestamp_ms // 60_000 for each in store.retained] == [170, 230, 280, 290]


def test_labels_and_the_restored_snapshot_stay_beside_what_retention_keeps() -> None:
    store = CompletedCheckpointStore(Retention(1, hourly=2), [completed(1, 0), completed(2, 1)], restored_id=1)
    store.note_labels(2, labelled=True)
    assert store.take_drops(1) == []
    store.add(completed(3, 2))
    store.add(completed(4, HOUR))
    assert [each.checkpoint_id for each in store.take_drops(HOUR)] == [1], "a newer one has replaced what it was restored from"
    assert [each.checkpoint_id for each in store.retained] == [2, 3, 4]
    store.note_labels(2, labelled=False)
    assert [each.checkpoint_id for each in store.take_drops(HOUR)] == [2]


def test_a_base_that_retention_does_not_keep_goes_when_it_is_none_any_more() -> None:
    store = CompletedCheckpointStore(Retention(1, hourly=1))
    store.add(completed(1, 0))
    store.retain_bases(frozenset({1}))
    store.add(completed(2, 1))
    assert store.take_drops(1) == []
    store.retain_bases(frozenset())
    assert [each.checkpoint_id for each in store.take_drops(1)] == [1]


def test_no_more_is_kept_than_the_bound() -> None:
    retention = Retention(3, within_ms=10**9)
    kept = retention.choose([(number, number) for number in range(1, 2_000)], 2_000)
    assert len(kept) == retention.kept_max == RETAINED_MAX + 3
    assert min(kept) == 1_999 - RETAINED_MAX - 2


def test_a_long_time_within_does_not_push_out_those_of_days() -> None:
    """At 10 s a day has 8,640 of them."""
    times = range(0, 3 * DAY_MS, 10_000)
    retention = Retention(1, daily=3, within_ms=DAY_MS)
    kept = retention.choose(list(enumerate(times, 1)), times[-1])
    assert {8_640, 2 * 8_640, 3 * 8_640} <= kept
    assert len(kept) == retention.kept_max


@pytest.mark.parametrize(
    "setting",
    [
        {"retained_hourly": -1},
        {"retained_hourly": RETAINED_MAX + 1},
        {"retained_daily": -1},
        {"retained_within_ms": -1},
        {"retained_within_ms": 2**62},
        {"drill_interval_ms": 59_999},
        {"drill_interval_ms": 0},
    ],
)
def test_settings_out_of_bounds_are_named(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        JobConfig(**setting).check()
    assert caught.value.setting == next(iter(setting))
