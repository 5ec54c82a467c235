"""How many bytes a channel may have in flight: by its consumer's speed, never stuck at a small size."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.exchange.debloat import ALLOCATION_BYTES_MIN, ANNOUNCED_DIFFERENCE, ChannelBudget, DebloatSettings
from holdfast.barriers.jobgraph import JobConfig
from holdfast.statebackends.errors import InvalidConfigError
from tests.examples import examples

KIB = 1024
DEFAULTS = DebloatSettings(target_s=0.2, period_s=0.2, start_bytes=64 * KIB, max_bytes=4096 * KIB)


class Channel:
    """A channel with a budget that a consumer reads, and a clock."""

    def __init__(self, settings: DebloatSettings = DEFAULTS) -> None:
        self.budget = ChannelBudget(settings)
        self.now_s = 1_000.0
        self.announced: list[int] = []

    def read(self, size: int, seconds: float, *, unit_bytes: int = 0, pieces: int = 1) -> None:
        """So many bytes, in so much time in which more could be read; `pieces`: slices that it is done in."""
        self.budget.readable(self.now_s)
        for _ in range(pieces):
            self.now_s += seconds / pieces
            if self.budget.processed(size // pieces, self.now_s, unit_bytes):
                self.announced.append(self.budget.allocated_bytes)

    def starve(self, seconds: float) -> None:
        self.budget.unreadable(self.now_s)
        self.now_s += seconds

    def run(self, bytes_per_s: float, seconds: float, step_s: float = 0.005, unit_bytes: int = 0) -> None:
        """Read without a pause."""
        for _ in range(round(seconds / step_s)):
            self.read(int(bytes_per_s * step_s), step_s, unit_bytes=unit_bytes)


def test_a_job_has_them_by_default_and_can_do_without() -> None:
    assert DebloatSettings.of(JobConfig()) == DEFAULTS
    assert DebloatSettings.of(JobConfig(buffer_debloat=False)) is None
    small = DebloatSettings.of(JobConfig(channel_credit_bytes=100))
    assert small is not None
    assert (small.start_bytes, small.max_bytes) == (100, 100)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("buffer_debloat_target_ms", -1),
        ("buffer_debloat_target_ms", 0),
        ("buffer_debloat_period_ms", -200),
        ("buffer_debloat_period_ms", 0),
        ("channel_credit_bytes_start", 0),
        ("channel_credit_bytes_start", 4 * KIB * KIB + 1),
    ],
)
def test_bad_settings_are_refused_by_name(setting: str, value: int) -> None:
    bad: dict[str, Any] = {setting: value}
    with pytest.raises(InvalidConfigError, match=setting) as caught:
        JobConfig(**bad).check()
    assert caught.value.setting == setting


def test_a_start_as_large_as_the_maximum_is_none_too_large_and_the_default_never_is() -> None:
    JobConfig(channel_credit_bytes=70_000, channel_credit_bytes_start=70_000).check()
    JobConfig(channel_credit_bytes=100).check()


@pytest.mark.parametrize(
    ("bytes_per_s", "allocated"),
    [(64_000, 6_400), (655_360, 65_536), (10_000_000, 1_000_000), (1_000, ALLOCATION_BYTES_MIN), (10**9, 4096 * KIB)],
)
def test_half_of_the_target_is_allocated(bytes_per_s: int, allocated: int) -> None:
    channel = Channel()
    channel.run(bytes_per_s, 2.0)
    assert channel.budget.allocated_bytes == pytest.approx(allocated, rel=0.25)


def test_small_changes_are_not_worth_a_message() -> None:
    channel = Channel()
    channel.run(655_360, 2.0)
    for share in (1.1, 0.9, 1.2, 0.85):
        channel.run(655_360 * share, 1.0)
    assert channel.announced == []


def test_time_with_nothing_to_read_is_none_of_the_consumers() -> None:
    channel = Channel()
    for _ in range(40):
        channel.read(32 * KIB, 0.05)
        channel.starve(10.0)
    assert channel.budget.bytes_per_s == pytest.approx(640 * KIB)
    assert channel.budget.allocated_bytes == 64 * KIB


def test_growth_does_not_wait_for_the_look_and_is_not_taken_back() -> None:
    channel = Channel()
    channel.run(1_000, 5.0)
    assert channel.budget.allocated_bytes == ALLOCATION_BYTES_MIN
    began_s = channel.now_s
    while channel.budget.allocated_bytes < 4096 * KIB and channel.now_s - began_s < DEFAULTS.period_s * 3:
        channel.read(ALLOCATION_BYTES_MIN, 0.00005)
        channel.starve(0.00005)
    assert channel.budget.allocated_bytes == 4096 * KIB
    grown = len(channel.announced)
    channel.run(60_000_000, 2.0)
    assert channel.announced[grown:] == []


def test_a_consumer_that_becomes_slow_shrinks_it_in_a_few_periods() -> None:
    channel = Channel()
    channel.run(10**9, 1.0)
    assert channel.budget.allocated_bytes == 4096 * KIB
    sizes = []
    for _ in range(8):
        channel.run(100_000, DEFAULTS.period_s)
        sizes.append(channel.budget.allocated_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] < 2048 * KIB
    assert sizes[-1] < 64 * KIB


@settings(max_examples=examples(100), deadline=None)
@given(
    slow=st.floats(0.1, 5_000),
    rate=st.floats(100_000, 10**9),
    slow_s=st.floats(0.2, 100),
    target_s=st.sampled_from([0.02, 0.2, 2.0]),
    period_s=st.sampled_from([0.05, 0.2, 1.0]),
    pause_s=st.sampled_from([0.0, 0.001, 0.03]),
)
def test_it_grows_back_from_the_floor_within_five_periods(
    slow: float, rate: float, slow_s: float, target_s: float, period_s: float, pause_s: float
) -> None:
    """FLINK-36555, 24690: buffers that had become tiny stayed so."""
    channel = Channel(DebloatSettings(target_s, period_s, 64 * KIB, 4096 * KIB))
    channel.read(max(1, int(slow * slow_s)), slow_s)
    for _ in range(8):
        channel.read(max(1, int(slow * period_s)), period_s)
    wanted = min(4096 * KIB, max(ALLOCATION_BYTES_MIN, int(rate * target_s / 2)))
    deadline_s = channel.now_s + 5 * period_s
    while channel.now_s < deadline_s:
        size = channel.budget.allocated_bytes  # what the sender may send, before it waits for the answer
        channel.read(size, size / rate, pieces=4)
        channel.starve(pause_s)
        if not pause_s:
            channel.budget.readable(channel.now_s)
    assert channel.budget.allocated_bytes >= 0.75 * wanted


def test_slices_that_cost_much_by_themselves_are_not_made_small() -> None:
    """A call takes 50 ms, whatever it has: with ever fewer rows for each, the consumer would take ever less a second."""
    channel = Channel()
    channel.run(10_000_000, 2.0)
    for _ in range(100):
        frame = channel.budget.allocated_bytes // 4
        channel.read(frame, 0.05, unit_bytes=100_000)
    assert channel.budget.allocated_bytes >= 800_000
    for _ in range(100):
        frame = channel.budget.allocated_bytes // 4
        channel.read(frame, 0.05)
    assert channel.budget.allocated_bytes < 8 * KIB, "what happens without"


@settings(max_examples=examples(100), deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["readable", "unreadable", "read", "jump"]), st.integers(0, 10**8), st.floats(-1e6, 1e6)),
        max_size=60,
    ),
    start=st.integers(1, 4096 * KIB),
    unit_bytes=st.integers(0, 10**7),
)
def test_whatever_the_clock_does_it_stays_within_its_bounds(
    moves: list[tuple[str, int, float]], start: int, unit_bytes: int
) -> None:
    channel = Channel(DebloatSettings(0.2, 0.2, start, 4096 * KIB))
    for move, size, seconds in moves:
        match move:
            case "readable":
                channel.budget.readable(channel.now_s)
            case "unreadable":
                channel.budget.unreadable(channel.now_s)
            case "read":
                channel.read(size, abs(seconds) / 1e6, unit_bytes=unit_bytes)
            case _:
                channel.now_s += seconds
        assert min(start, ALLOCATION_BYTES_MIN) <= channel.budget.allocated_bytes <= 4096 * KIB
        rate = channel.budget.bytes_per_s
        assert rate is None or 0 < rate < math.inf
    channel.run(20_000_000, 2.0)
    assert channel.budget.allocated_bytes == pytest.approx(2_000_000, rel=1 / (1 - ANNOUNCED_DIFFERENCE) - 1)
