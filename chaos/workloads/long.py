"""The keyed counter for as long as a thousand checkpoints take, which shows what grows with time (scenario T12)."""

from __future__ import annotations

import random

from holdfast.chaos.workloads.counter import KEYS, counted_into_ledger
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.scenario import Scenario, Workload
from holdfast.chaos.workloads.settings import draw_settings

ROWS_PER_SECOND = 250
SECONDS = 45
INTERVAL_MS = (35, 40)


def make(rng: random.Random) -> Scenario:
    """Few records and many checkpoints, of which three are retained."""
    feed = Feed("numbers", ROWS_PER_SECOND * SECONDS, KEYS, first=rng.randrange(1_000))
    settings = {
        **draw_settings(rng, interval_ms=INTERVAL_MS),
        "min_pause_ms": 0,
        "retained_checkpoints": 3,
        "batch_rows_max": 65_536,
    }
    return counted_into_ledger(feed, rng.choice((1, 2)), ROWS_PER_SECOND, 20, settings, duration_ms=SECONDS * 1_000)


WORKLOAD = Workload("long", "the counter over a thousand checkpoints, three retained; only when it is named", make)
