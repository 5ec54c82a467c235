"""The keyed counter under members: three coordinators, of which one is active; they die, stand still, are cut from each other."""

from __future__ import annotations

import random
from dataclasses import replace

from holdfast.chaos.workloads import counter
from holdfast.chaos.workloads.scenario import Scenario, Workload

MEMBERS = 3


def make(rng: random.Random) -> Scenario:
    """As the counter."""
    return replace(counter.make(rng), members=MEMBERS)


WORKLOAD = Workload("members", "the counter under three members, of which one is active; only when it is named", make)
