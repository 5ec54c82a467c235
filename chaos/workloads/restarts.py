"""The keyed counter under restart strategies that count failures, draw jitter or go by time (ADR 57)."""

from __future__ import annotations

import random

from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.chaos.workloads.counter import KEYS, counted_into_ledger
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.scenario import Scenario, Workload
from holdfast.chaos.workloads.settings import draw_settings

STRATEGIES = (
    RestartStrategy(delay_ms=150, delay_max_ms=900, backoff_multiplier=3, jitter_factor=0.4),
    RestartStrategy(delay_ms=100, delay_max_ms=600, jitter_factor=0.2, reset_backoff_threshold_ms=500, immediate_first=False),
    RestartStrategy(delay_ms=100, delay_max_ms=400, backoff_multiplier=1.5, attempts_before_reset_max=100),
    RestartStrategy("failure_rate", delay_ms=100, failures_per_interval_max=8, failure_rate_interval_ms=500),
)
"""None of them ends a job: so many failures do not fit into the interval."""


def make(rng: random.Random) -> Scenario:
    """About 1,000 records in a little more than a second, as the counter."""
    feed = Feed("numbers", rng.randint(900, 1_100), KEYS, first=rng.randrange(1_000))
    settings = {
        **draw_settings(rng, interval_ms=(100, 150)),
        "batch_rows_max": 65_536,
        "restart": rng.choice(STRATEGIES),
    }
    return counted_into_ledger(feed, rng.choice((1, 1, 2)), rng.randint(700, 900), rng.choice((80, 100, 125)), settings)


WORKLOAD = Workload("restarts", "the counter under restart strategies with a rate, jitter, or resets by time", make)
