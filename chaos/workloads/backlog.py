"""The counter, whose source begins with a backlog: the interval of its checkpoints is another one meanwhile, or there are none."""

from __future__ import annotations

import random

from holdfast.chaos.workloads.counter import KEYS, counted_into_ledger
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.scenario import Scenario, Workload
from holdfast.chaos.workloads.settings import draw_settings


def make(rng: random.Random) -> Scenario:
    """About 900 records in a little more than a second; a quarter to a half of them are the backlog."""
    rows = rng.randint(800, 1_000)
    feed = Feed("numbers", rows, KEYS, first=rng.randrange(1_000), backlog_rows=rng.randint(rows // 4, rows // 2))
    settings = {**draw_settings(rng, interval_ms=(60, 120)), "batch_rows_max": 65_536}
    backlog_ms = settings["checkpoint_interval_ms"] * rng.choice((0, 0, 2, 4))
    settings["checkpoint_interval_during_backlog_ms"] = backlog_ms
    return counted_into_ledger(feed, rng.choice((1, 1, 2)), rng.randint(700, 900), rng.choice((20, 50, 80)), settings)


WORKLOAD = Workload("backlog", "numbers records as the counter does, the first ones being a backlog", make)
