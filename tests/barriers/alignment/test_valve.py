"""The watermark valve beyond group M of the scenarios: laws over random input, and several logical inputs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.alignment.valve import MultiInputValve, StatusWatermarkValve, TimeSignal
from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, Watermark, WatermarkStatus
from holdfast.statebackends.errors import InvalidConfigError
from tests.examples import examples

IDLE, ACTIVE = WatermarkStatus(idle=True), WatermarkStatus(idle=False)


def test_no_channels_is_refused() -> None:
    with pytest.raises(InvalidConfigError):
        StatusWatermarkValve(0)


@pytest.mark.parametrize("inputs", [[], [1], [0, 2]])
def test_every_input_needs_a_channel(inputs: list[int]) -> None:
    with pytest.raises(InvalidConfigError):
        MultiInputValve(inputs)


def test_the_smallest_watermark_is_no_progress() -> None:
    valve = StatusWatermarkValve(1)
    assert valve.handle(0, Watermark(MIN_WATERMARK)) == []
    assert valve.watermark_ms == MIN_WATERMARK


SIGNALS = st.one_of(st.integers(-20, 20).map(Watermark), st.booleans().map(lambda idle: WatermarkStatus(idle=idle)))


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), SIGNALS), max_size=60))
def test_laws(channel_count: int, steps: list[tuple[int, TimeSignal]]) -> None:
    """Watermarks rise strictly, statuses alternate from active, nothing leaves while idle, and the output never passes an
    aligned active channel."""
    valve = StatusWatermarkValve(channel_count)
    seen = [MIN_WATERMARK] * channel_count
    idle = [False] * channel_count
    last, output_idle = MIN_WATERMARK, False
    for number, signal in steps:
        channel = number % channel_count
        for left in valve.handle(channel, signal):
            if isinstance(left, Watermark):
                assert left.timestamp_ms > last
                assert not output_idle
                last = left.timestamp_ms
            else:
                assert left.idle != output_idle
                output_idle = left.idle
        if isinstance(signal, WatermarkStatus):
            idle[channel] = signal.idle
        elif not idle[channel]:
            seen[channel] = max(seen[channel], signal.timestamp_ms)
        assert output_idle == all(idle) == valve.is_idle
        assert valve.watermark_ms == last <= max(seen)
        if not any(idle) and all(value >= last for value in seen):
            assert last == min(seen)


def test_minimum_over_inputs() -> None:
    valve = MultiInputValve([0, 0, 1])
    assert valve.handle(0, Watermark(10)) == []
    assert valve.handle(1, Watermark(7)) == []
    assert valve.input_watermark_ms(0) == 7
    assert valve.handle(2, Watermark(20)) == [Watermark(7)]
    assert valve.handle(1, Watermark(30)) == [Watermark(10)]
    assert not valve.is_at_end


def test_an_idle_input_does_not_hold_the_other_back() -> None:
    valve = MultiInputValve([0, 1, 1])
    assert valve.handle(0, Watermark(10)) == []
    assert valve.handle(1, IDLE) == []
    assert valve.handle(2, IDLE) == [Watermark(10)]
    assert valve.handle(0, IDLE) == [IDLE]
    assert valve.is_idle
    assert valve.handle(1, ACTIVE) == [ACTIVE]


def test_the_end_of_all_inputs_is_the_end() -> None:
    valve = MultiInputValve([0, 1])
    assert valve.handle(0, Watermark(MAX_WATERMARK)) == []
    assert valve.handle(1, Watermark(MAX_WATERMARK)) == [Watermark(MAX_WATERMARK)]
    assert valve.is_at_end


def test_event_time_does_not_end_while_an_input_that_has_not_ended_is_idle() -> None:
    valve = MultiInputValve([0, 1])
    assert valve.handle(0, Watermark(10)) == []
    assert valve.handle(1, IDLE) == [Watermark(10)]
    assert valve.handle(0, Watermark(MAX_WATERMARK)) == [IDLE]
    assert valve.handle(1, ACTIVE) == [ACTIVE]
    assert valve.handle(1, Watermark(12)) == [Watermark(12)]
    assert valve.handle(1, Watermark(MAX_WATERMARK)) == [Watermark(MAX_WATERMARK)]


def test_an_ended_channel_holds_nobody() -> None:
    valve = MultiInputValve([0, 0, 1])
    assert valve.handle(2, Watermark(30)) == []
    assert valve.handle(1, Watermark(20)) == []
    assert valve.handle(0, Watermark(MAX_WATERMARK)) == [Watermark(20)]
    assert valve.handle(0, ACTIVE) == valve.handle(0, Watermark(5)) == []
    assert valve.handle(1, IDLE) == [Watermark(30)]
    assert valve.handle(2, IDLE) == [IDLE]
