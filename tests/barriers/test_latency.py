"""Histograms of latency: fixed buckets, which add up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers.latency import BOUNDS_MS, BUCKETS, SOURCES_MAX, LatencyHistogram, LatencyStats, merge

SHARES = (0.0, 0.5, 0.99, 1.0)


def histogram(*latencies_ms: int, source: str = "s") -> LatencyHistogram:
    stats = LatencyStats()
    for latency_ms in latencies_ms:
        stats.record(source, latency_ms)
    (found,) = stats.histograms()
    return found


@given(st.lists(st.integers(-5, 10**6), min_size=1, max_size=50), st.sampled_from(SHARES))
def test_a_quantile_lies_in_the_bucket_of_its_rank(latencies_ms: list[int], share: float) -> None:
    found = histogram(*latencies_ms)
    ordered = sorted(max(0, each) for each in latencies_ms)
    exact_ms = ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
    upper_ms = next((bound for bound in BOUNDS_MS if bound >= exact_ms), ordered[-1])
    lower_ms = max((bound for bound in BOUNDS_MS if bound < exact_ms), default=0)
    assert lower_ms <= found.quantile(share) <= min(upper_ms, found.max_ms)
    assert (found.count, found.sum_ms, found.max_ms) == (len(ordered), sum(ordered), ordered[-1])


def test_buckets_include_their_bounds() -> None:
    assert histogram(0, 1).counts[:2] == (2, 0)
    assert histogram(2, 3, 5).counts[:4] == (0, 1, 2, 0)
    assert histogram(500_001, 10**12).counts[-1] == 2
    assert histogram(7).quantile(0.99) == 7, "never above the greatest"


@given(st.lists(st.integers(0, 10**6), max_size=20), st.lists(st.integers(0, 10**6), max_size=20))
def test_histograms_of_subtasks_add_up(some: list[int], others: list[int]) -> None:
    parts = [histogram(*latencies_ms) for latencies_ms in (some, others) if latencies_ms]
    assert merge([*parts, histogram(3, source="other")]) == {
        "other": histogram(3, source="other"),
        **({"s": histogram(*some, *others)} if parts else {}),
    }


def test_a_sum_stays_within_what_a_heartbeat_can_tell() -> None:
    found = histogram(2**62, 2**62, 2**62)
    assert (found.sum_ms, found.max_ms) == (2**63 - 1, 2**62)
    assert msgspec.json.decode(msgspec.json.encode(found), type=LatencyHistogram) == found


def test_sources_are_bounded() -> None:
    stats = LatencyStats()
    for number in range(SOURCES_MAX + 10):
        stats.record(f"s{number}", 1)
    assert len(stats.histograms()) == SOURCES_MAX


def test_a_histogram_with_other_buckets_is_refused() -> None:
    found = msgspec.json.encode(histogram(1, 2, 3))
    assert msgspec.json.decode(found, type=LatencyHistogram) == histogram(1, 2, 3)
    for counts in ((1,) * (BUCKETS - 1), (1,) * (BUCKETS + 1), (-1,) * BUCKETS):
        wrong = msgspec.json.encode({"source": "s", "counts": counts, "sum_ms": 0, "max_ms": 0})
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=LatencyHistogram)
