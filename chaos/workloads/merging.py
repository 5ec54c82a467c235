"""The keyed counter with a ledger whose small files are merged while it grows."""

from __future__ import annotations

import random

from holdfast.chaos.workloads.counter import KEYS, counted_into_ledger
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.scenario import Scenario, Workload
from holdfast.chaos.workloads.settings import draw_settings


def make(rng: random.Random) -> Scenario:
    """About 600 records in a second, some ten checkpoints, of which a few are merged each time; replaced files go soon."""
    feed = Feed("numbers", rng.randint(500, 700), KEYS, first=rng.randrange(1_000))
    parallelism = rng.choice((1, 1, 2))
    rows_per_second, step_rows = rng.randint(500, 700), rng.choice((40, 60, 80))
    settings = {**draw_settings(rng, interval_ms=(80, 120)), "batch_rows_max": 65_536}
    sink = {
        "target_file_size": 1 << 16,
        "roll_interval_ms": rng.choice((1, 150, 300)),
        "merged_files_kept_ms": rng.choice((0, 100, 60_000)),
    }
    return counted_into_ledger(feed, parallelism, rows_per_second, step_rows, settings, sink=sink)


WORKLOAD = Workload("merging", "numbers the records of each key into a ledger whose small files are merged", make)
