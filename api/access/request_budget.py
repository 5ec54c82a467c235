"""CORE: how many requests a caller may make: a bucket for each credential, and one for all people together.

The worker protocol takes from no bucket: what viewers ask for must never hold up an acknowledgement. Pure: time comes in."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

BURST_S = 2
"""Seconds' worth of requests that may come at once."""
KEYS_MAX = 10_000
"""Credentials that are remembered; the one that asked longest ago is forgotten first."""


@dataclass(slots=True)
class _Bucket:
    level: float
    """Requests that it has room for."""
    at_ms: int


class RequestBudget:
    """Token buckets by key. Constant time a request."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self.refused = 0
        """Since the start."""

    def take(self, key: str, *, per_s: float, now_ms: int, count: int = 1) -> int:
        """Take some requests of a key that may make `per_s` a second, or none of them; 0, or the ms until it may ask for so many
        again, at least 1. More than may come at once are taken of a bucket that lacks one, and are owed."""
        full = max(1.0, per_s * BURST_S)
        needed = min(count, max(1.0, full - 1))
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(full, now_ms)
            if len(self._buckets) > KEYS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        bucket.level = min(full, bucket.level + max(0, now_ms - bucket.at_ms) * per_s / 1000)
        bucket.at_ms = now_ms
        if bucket.level >= needed:
            bucket.level -= count
            return 0
        self.refused += 1
        return max(1, math.ceil((needed - bucket.level) * 1000 / per_s - 1e-6))

    def give_back(self, key: str, count: int) -> None:
        """Undo a `take` of just now: something else refused the requests."""
        if (bucket := self._buckets.get(key)) is not None:
            bucket.level += count

    def __len__(self) -> int:
        return len(self._buckets)
