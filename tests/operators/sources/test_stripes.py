from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.operators.sources.generator import (
    RateLimit,
    StripeCursor,
    StripePosition,
    decode_positions,
    encode_position,
    stripe_count_for,
)
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError
from tests.examples import examples


def test_foreign_bytes_are_no_position() -> None:
    with pytest.raises(CorruptStateError) as caught:
        decode_positions([b"\xc1nonsense"], "op")
    assert caught.value.operator == "op"


def test_a_newer_position_is_refused() -> None:
    with pytest.raises(CorruptStateError, match="format 2"):
        decode_positions([encode_position(StripePosition(2, 4, 0, 0))], "op")


def test_positions_of_two_inputs_are_refused() -> None:
    entries = [encode_position(StripePosition(1, 4, 0, 0, "a")), encode_position(StripePosition(1, 4, 1, 1, "b"))]
    with pytest.raises(CorruptStateError, match="mixed"):
        decode_positions(entries, "op")


def test_a_stripe_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidConfigError):
        StripeCursor(4, [4], 100)


def test_the_stripe_count_is_a_multiple_of_the_parallelism() -> None:
    assert [stripe_count_for(p, 128) for p in (1, 2, 3, 100, 128)] == [128, 128, 126, 100, 128]


def test_subtask_reads_its_share_in_order() -> None:
    cursor = StripeCursor(6, [1, 3, 5], 15)
    assert cursor.take(4).tolist() == [1, 3, 5, 7]
    assert cursor.take(100).tolist() == [9, 11, 13]
    assert cursor.peek() is None


def test_take_stops_at_the_end_of_a_chunk() -> None:
    cursor = StripeCursor(4, [0, 1], 100)
    assert cursor.take(100, stop=6).tolist() == [0, 1, 4, 5]
    assert cursor.take(100, stop=8).tolist() == []
    assert cursor.peek() == 8


def test_no_stripes_means_nothing_to_read() -> None:
    cursor = StripeCursor(4, [], 100)
    assert cursor.peek() is None
    assert cursor.positions() == []


@settings(max_examples=examples(150), deadline=None)
@given(
    first=st.integers(0, 5),
    gap=st.sampled_from((1, 2, 3, 6)),
    ahead=st.integers(0, 40),
    total=st.integers(0, 120),
    counts=st.lists(st.tuples(st.integers(0, 30), st.one_of(st.none(), st.integers(0, 130))), max_size=8),
)
def test_stripes_at_one_distance_are_read_as_any_others(
    first: int, gap: int, ahead: int, total: int, counts: list[tuple[int, int | None]]
) -> None:
    owned = range(first % gap, 6, gap)
    starts = {stripe: stripe + 6 * (ahead if stripe == owned[0] else 0) for stripe in owned}
    left = [index for index in range(total) if index % 6 in owned and index >= starts[index % 6]]
    cursor = StripeCursor(6, owned, total, next_indices=starts)
    for count, stop in counts:
        expected = [index for index in left if stop is None or index < stop][:count]
        taken = cursor.take(count, stop=stop).tolist()
        assert taken == expected[: len(taken)]
        assert taken or not expected
        left = left[len(taken) :]
    assert cursor.peek() == (left[0] if left else None)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), total=st.integers(0, 300), stripes=st.integers(1, 12))
def test_every_record_is_read_once_over_rescales(data: st.DataObject, total: int, stripes: int) -> None:
    positions = {stripe: stripe for stripe in range(stripes)}
    seen: list[int] = []
    for _ in range(4):
        parallelism = data.draw(st.integers(1, 4))
        owners = data.draw(st.lists(st.integers(0, parallelism - 1), min_size=stripes, max_size=stripes))
        last = _ == 3
        for subtask in range(parallelism):
            owned = {stripe: positions[stripe] for stripe in range(stripes) if owners[stripe] == subtask}
            cursor = StripeCursor(stripes, owned, total, next_indices=owned)
            taken: list[int] = []
            for _step in range(1000 if last else data.draw(st.integers(0, 5))):
                stop = data.draw(st.integers(0, total)) if not last else None
                indices = cursor.take(data.draw(st.integers(1, 20)) if not last else 50, stop=stop)
                if last and not len(indices):
                    break
                taken += indices.tolist()
            assert all(low < high for low, high in pairwise(taken))
            seen += taken
            positions.update(cursor.positions())
    assert sorted(seen) == list(range(total))


def test_a_wide_gap_between_stripes_is_read_through() -> None:
    cursor = StripeCursor(2, [0, 1], 1_000_000, next_indices={0: 0, 1: 999_999})
    taken = []
    while cursor.peek() is not None:
        taken.append(cursor.take(65_536))
    assert np.concatenate(taken).tolist() == [*range(0, 1_000_000, 2), 999_999]


def test_the_rate_is_kept_and_pauses_earn_a_bounded_burst() -> None:
    rate = RateLimit(1000)
    given_rows = 0
    for now in range(0, 10_000, 5):
        count = rate.allowed(65_536, now)
        rate.spend(count)
        given_rows += count
    assert 9_900 <= given_rows <= 10_100
    assert rate.allowed(65_536, 1_000_000) <= 250


def test_a_slow_rate_says_when_the_next_row_is_due() -> None:
    rate = RateLimit(2)
    assert rate.allowed(10, 0) == 1
    rate.spend(1)
    assert rate.allowed(10, 400) == 0
    assert 495 <= rate.ready_at_ms(400) <= 510
    assert rate.allowed(10, rate.ready_at_ms(400)) == 1


def test_no_rate_is_no_limit() -> None:
    assert RateLimit(None).allowed(7, 0) == 7
