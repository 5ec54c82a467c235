"""Latency as a subtask measures it by the markers of sources: histograms with fixed buckets, which add up over subtasks.

The clock of the source stamps a marker, and that of the reader is compared with it: between hosts the numbers are as good as their
clocks agree. A marker that seems to come from the future counts as 0 ms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec

BOUNDS_MS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
"""Upper bounds, inclusive, of all buckets but the last: 1 ms to 500 s."""
BUCKETS = len(BOUNDS_MS) + 1

SOURCES_MAX = 64
"""Source vertices of which one subtask keeps a histogram: those whose markers come first."""

_COUNT_MAX = 2**63 - 1
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_COUNT_MAX)]


class LatencyHistogram(msgspec.Struct, frozen=True):
    """Markers of one source vertex, since the attempt began."""

    source: str
    """Id of the vertex."""
    counts: Annotated[tuple[_Count, ...], msgspec.Meta(min_length=BUCKETS, max_length=BUCKETS)]
    """Markers in each bucket."""
    sum_ms: _Count
    max_ms: _Count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """ms below which `share` (0..1) of the markers lie, evenly spread within a bucket; never above the greatest. 0 of none."""
        rank, before = share * self.count, 0
        lower_ms = 0
        for count, upper_ms in zip(self.counts, (*BOUNDS_MS, self.max_ms), strict=True):
            if count and before + count >= rank:
                return float(min(self.max_ms, lower_ms + (upper_ms - lower_ms) * (rank - before) / count))
            before += count
            lower_ms = upper_ms
        return float(self.max_ms)


Latencies: TypeAlias = Annotated[tuple[LatencyHistogram, ...], msgspec.Meta(max_length=SOURCES_MAX)]


def merge(histograms: Iterable[LatencyHistogram]) -> dict[str, LatencyHistogram]:
    """One histogram for each source."""
    merged: dict[str, LatencyHistogram] = {}
    for each in histograms:
        before = merged.get(each.source)
        if before is not None:
            counts = tuple(map(sum, zip(before.counts, each.counts, strict=True)))
            each = LatencyHistogram(each.source, counts, before.sum_ms + each.sum_ms, max(before.max_ms, each.max_ms))
        merged[each.source] = each
    return merged


class LatencyStats:
    """The histograms of one subtask."""

    __slots__ = ("_counts", "_max_ms", "_sum_ms")

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sum_ms: dict[str, int] = {}
        self._max_ms: dict[str, int] = {}

    def record(self, source: str, latency_ms: int) -> None:
        counts = self._counts.get(source)
        if counts is None:
            if len(self._counts) >= SOURCES_MAX:
                return
            counts = self._counts[source] = [0] * BUCKETS
            self._sum_ms[source] = self._max_ms[source] = 0
        latency_ms = max(0, latency_ms)
        counts[bisect_left(BOUNDS_MS, latency_ms)] += 1
        self._sum_ms[source] = min(self._sum_ms[source] + latency_ms, _COUNT_MAX)
        self._max_ms[source] = max(self._max_ms[source], latency_ms)

    def histograms(self) -> Latencies:
        return tuple(
            LatencyHistogram(source, tuple(counts), self._sum_ms[source], self._max_ms[source])
            for source, counts in sorted(self._counts.items())
        )
