"""The seeds that every test run repeats, each one that has failed once. The first one of each workload test_determinism.py runs."""

from __future__ import annotations

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
from tests.simulation.listed import ListedSeed, first_seeds, listed_seeds

LISTED = listed_seeds()
FIRST = first_seeds(LISTED).values()


@pytest.mark.parametrize("listed", [each for each in LISTED if each not in FIRST], ids=str)
def test_listed_seed_does_as_it_should(listed: ListedSeed) -> None:
    """Without a sabotage it holds; with one it must fail."""
    run = run_seed(RunRequest(listed.seed, listed.workload, sabotage=listed.sabotage))
    assert bool(run.result.violations) == (listed.sabotage is not None), "\n".join(run.trace.lines(40))
