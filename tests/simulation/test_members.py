"""Three members around the real election: they die, stand still and are cut from each other, and every invariant holds."""

from __future__ import annotations

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.faults.faults import Fault
from tests.examples import seeds

MISHAPS = (
    *("kill_coordinator", "pause_coordinator", "old_leader_wakes", "partition_members"),
    *("power_loss", "store_fails", "store_late"),
)


def at(ms: int, kind: str, *, duration_ms: int = 0, amount: int = 0) -> Fault:
    return Fault(kind, at_ms=ms, duration_ms=duration_ms, amount=amount)


@pytest.mark.parametrize("seed", seeds(6))
def test_every_invariant_holds_whatever_becomes_of_members(seed: int) -> None:
    run = run_seed(RunRequest(seed, "members", kinds=MISHAPS, faults=6))
    assert [f"{each.invariant}: {each.message}" for each in run.result.violations] == []


@pytest.mark.parametrize(
    ("fault", "takeovers"),
    [
        (at(400, "kill_coordinator", amount=2_000), 1),
        (at(400, "pause_coordinator", duration_ms=2_500), 1),
        (at(400, "partition_members", duration_ms=3_000), 0),
    ],
    ids=["killed", "paused", "cut from each other"],
)
def test_another_member_takes_over_when_the_active_one_is_gone_and_not_when_it_can_not_be_reached(
    fault: Fault, takeovers: int
) -> None:
    for seed in range(4 if takeovers else 1):
        run = run_seed(RunRequest(seed, "members", plan=(fault,)))
        assert run.result.violations == ()
        led = [event for event in run.trace.lines() if " election " in event and event.rstrip().endswith(" Lead")]
        first = led[0].split()
        hit_active = takeovers == 0 or len(led) > 1
        assert len(led) <= 1 + takeovers, led
        if hit_active and takeovers:
            assert led[1].split()[1] != first[1], "another one"
            return
    if takeovers:
        pytest.fail("the active member was never the one that was hit")
