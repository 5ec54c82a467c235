"""The keyed counter whose checkpoints a user labels while it runs, with a tool beside the leader (I45)."""

from __future__ import annotations

import random
from dataclasses import replace

from holdfast.chaos.workloads.counter import KEYS, counted_into_ledger
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.scenario import Scenario, Workload
from holdfast.chaos.workloads.settings import draw_settings


def make(rng: random.Random) -> Scenario:
    """As the counter, with more checkpoints, of which few are retained."""
    feed = Feed("numbers", rng.randint(700, 900), KEYS, first=rng.randrange(1_000))
    settings = {
        **draw_settings(rng, interval_ms=(50, 90)),
        "min_pause_ms": 0,
        "retained_checkpoints": rng.choice((1, 1, 2)),
        "retained_hourly": rng.choice((0, 0, 2)),
        "batch_rows_max": 65_536,
    }
    scenario = counted_into_ledger(feed, rng.choice((1, 1, 2)), rng.randint(600, 800), rng.choice((80, 100, 125)), settings)
    return replace(scenario, labels=True)


WORKLOAD = Workload("labels", "the counter, with users who label its checkpoints and take labels back", make)
