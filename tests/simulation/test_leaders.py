"""Two coordinators alive, and clients are sent to the one that does not lead: the job must live all the same."""

from __future__ import annotations

import pytest

from chaos.faults import Fault
from chaos.world import Run, RunRequest, run_seed

RECOVERED_MS = 20_000
"""Virtual time in which the job has ended unless somebody waited for a leader to be given up, or for a health check."""


def lived(run: Run) -> str:
    """The trace of a run in which the job ended in time."""
    text = "\n".join(run.trace.lines())
    assert run.result.violations == (), "\n".join(run.trace.lines(30))
    assert run.result.ended == "FINISHED"
    assert run.result.virtual_ms < RECOVERED_MS
    return text


def test_loser_of_a_recovery_whose_address_is_the_newest_sends_clients_to_the_winner() -> None:
    """Seed 210868 of counter, as it was drawn when it failed: it slept while it recovered, lost the job, and announced itself."""
    plan = (
        Fault("store_slow", "PutIfAbsent/_claim", at_ms=1717, duration_ms=800, probability=0.5, amount=2500),
        Fault("power_loss", at_ms=1855, amount=300),
        Fault("old_leader_wakes", on="coordinator.PutIfAbsent.claim.done", nth=5, duration_ms=200),
        Fault("pause_coordinator", on="coordinator.PutIfAbsent.submissions.done", nth=3, duration_ms=2500),
    )
    text = lived(run_seed(RunRequest(210868, "counter", plan=plan)))
    assert "can't be led on" not in text
    assert "is led by epoch" in text


@pytest.mark.parametrize("seed", [3, 5, 7])
@pytest.mark.parametrize("asleep_ms", [2_550, 2_600, 2_650])
def test_leader_that_loses_an_id_to_one_that_woke_leads_on(seed: int, asleep_ms: int) -> None:
    """The one that woke claims an id before it notices that it is fenced, and its address is the newest."""
    plan = (
        Fault("kill_coordinator", at_ms=500, amount=1),
        Fault("pause_coordinator", on="coordinator.recovering.PutIfAbsent.leader", duration_ms=asleep_ms),
    )
    text = lived(run_seed(RunRequest(seed, "counter", plan=plan, backend="memory")))
    assert "epoch 2 claimed checkpoint" in text
    assert "is led by epoch 3, at sim://coordinator-3" in text
    assert "epoch 4 submission 1" in text


def test_end_that_was_read_while_another_leader_slept_before_its_submission_is_not_the_last_word() -> None:
    """It had taken its epoch, and submitted the job anew when it woke: workers were sent to one that knew the older end only."""
    plan = (
        Fault("second_coordinator", on="coordinator.PutIfAbsent.results.done", duration_ms=800),
        Fault("drain", at_ms=1150),
        Fault("old_leader_wakes", at_ms=1628, duration_ms=800),
        Fault("pause_coordinator", at_ms=1300, duration_ms=2500),
        Fault("restore", at_ms=380),
        Fault("power_loss", on="coordinator.answer.acks", nth=2, amount=1),
    )
    text = lived(run_seed(RunRequest(600355, "ends", plan=plan)))
    assert "submission 4 of job" in text
    assert "is newer than 3: another coordinator leads it" in text
    assert "is led by epoch 4, at sim://coordinator-3" in text
