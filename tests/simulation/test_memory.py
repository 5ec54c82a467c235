"""What a run leaves in its process: nothing, so that thousands of them can follow each other."""

from __future__ import annotations

import gc

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.cluster import Cluster
from holdfast.chaos.cluster.world import RunRequest

COPIES_A_SAVEPOINT = 5
"""A seed whose user copies a savepoint, which the snapshot tools remember for a command that is interrupted."""


def worlds() -> int:
    gc.collect()
    return sum(isinstance(each, Cluster) for each in gc.get_objects())


def test_no_world_outlives_its_run() -> None:
    before = worlds()
    run = run_seed(RunRequest(COPIES_A_SAVEPOINT, "counter", faults=3))
    assert run.result.sometimes.get("savepoint_copied"), "the seed no longer shows it: choose another one"
    del run
    assert worlds() <= before
