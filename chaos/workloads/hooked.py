"""The counter, whose checkpoints master hooks take part in: they are late, fail and hang, and no checkpoint is without them."""

from __future__ import annotations

import random
from collections.abc import Iterable

from holdfast.chaos.workloads.counter import KEYS, counted_into_ledger
from holdfast.chaos.workloads.feeds import Feed
from holdfast.chaos.workloads.scenario import Scenario, Workload
from holdfast.chaos.workloads.settings import draw_settings
from holdfast.statebackends.snapshot.metadata import HookState

STATEFUL = "ledger"
HOOKS = (STATEFUL, "watch")
"""Of these `ledger` alone has state: the id of its checkpoint. chaos/cluster/hooks.py plays them."""


def hook_states(names: Iterable[str], checkpoint_id: int) -> tuple[HookState, ...]:
    """The states of hooks in a checkpoint; a hook of another name has none."""
    return tuple(HookState(name, 1, b"%d" % checkpoint_id) for name in names if name == STATEFUL)


def make(rng: random.Random) -> Scenario:
    """About 900 records in a little more than a second."""
    feed = Feed("numbers", rng.randint(800, 1_000), KEYS, first=rng.randrange(1_000))
    settings = {**draw_settings(rng, interval_ms=(60, 120)), "batch_rows_max": 65_536}
    settings["master_hooks"] = HOOKS
    settings["master_hook_timeout_ms"] = rng.choice((20, 60, 200))
    return counted_into_ledger(feed, rng.choice((1, 1, 2)), rng.randint(700, 900), rng.choice((20, 50, 80)), settings)


WORKLOAD = Workload("hooked", "numbers records as the counter does; master hooks take part in its checkpoints", make)
