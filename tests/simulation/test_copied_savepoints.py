"""A simulated user copies the savepoint that a job was stopped with, goes on from the copy, and disposes of another one, while
storage fails: the job's output stays exact, the savepoint as it was (I1, I2, I25), and a run repeats itself."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.faults.faults import Fault

STOP = Fault("restore", at_ms=300)
SEEDS = (5, 21)
"""In which the user copies, and disposes of another copy."""
TROUBLE: dict[str, tuple[Fault, ...]] = {
    "fails": (Fault("store_fails", at_ms=0, duration_ms=60_000, target="user:all", probability=0.1),),
    "partial": (Fault("store_partial", at_ms=0, duration_ms=60_000, target="user:all", probability=0.1),),
    "lies, and comes late": (
        Fault("store_lies", at_ms=0, duration_ms=60_000, target="user:all", probability=0.05),
        Fault("store_late", at_ms=0, duration_ms=60_000, target="user:all", probability=0.08, amount=400),
    ),
    "never": (Fault("disk_full", at_ms=0, duration_ms=60_000, target="user:"),),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_a_job_goes_on_from_a_copy_whatever_storage_does_to_its_user(name: str) -> None:
    visits: Counter[str] = Counter()
    for seed in SEEDS:
        result = run_seed(RunRequest(seed, "counter", plan=(STOP, *TROUBLE[name]))).result
        assert result.violations == (), seed
        assert result.ended == "FINISHED"
        visits.update(result.sometimes)
    assert visits["restored_from_savepoint"] == len(SEEDS)
    assert visits["copy_failed"]
    if name == "never":
        assert not visits["restored_from_copy"], "then it goes on from the savepoint itself"
    else:
        assert visits["restored_from_copy"]
        assert visits["savepoint_disposed"]


def test_a_run_with_a_copy_repeats_itself() -> None:
    request = RunRequest(5, "counter", plan=(STOP, *TROUBLE["lies, and comes late"]))
    assert run_seed(request).result == run_seed(request).result
