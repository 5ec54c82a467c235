"""The seeds that are repeated for ever, each one that has failed once: the first failed one of each workload by `make test`, all by
`make chaos`. The first one of each workload, which never failed, test_determinism.py runs."""

from __future__ import annotations

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
from tests.simulation.listed import ListedSeed, first_seeds, listed_seeds

LISTED = listed_seeds()
FAILED = [each for each in LISTED if each not in first_seeds(LISTED).values()]
TRIED = first_seeds(FAILED).values()
SHOWN = [pytest.param(each, marks=() if each in TRIED else pytest.mark.endurance, id=str(each)) for each in FAILED]


@pytest.mark.parametrize("listed", SHOWN)
def test_listed_seed_does_as_it_should(listed: ListedSeed) -> None:
    """Without a sabotage it holds; with one it must fail."""
    run = run_seed(RunRequest(listed.seed, listed.workload, sabotage=listed.sabotage))
    assert bool(run.result.violations) == (listed.sabotage is not None), "\n".join(run.trace.lines(40))
