"""Two coordinators alive, and clients are sent to the one that does not lead: the job must live all the same."""

from __future__ import annotations

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import Run, RunRequest
from holdfast.chaos.faults.faults import Fault

RECOVERED_MS = 20_000
"""Virtual time in which the job has ended unless somebody waited for a leader to be given up, or for a health check."""


def lived(run: Run) -> str:
    """The trace of a run in which the job ended in time."""
    text = "\n".join(run.trace.lines())
    assert run.result.violations == (), "\n".join(run.trace.lines(30))
    assert run.result.ended == "FINISHED"
    assert run.result.virtual_ms < RECOVERED_MS
    return text


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("point", ["leader", "claim"])
def test_loser_of_a_recovery_whose_address_is_the_newest_sends_clients_to_the_winner(seed: int, point: str) -> None:
    """Both listen, and sleep while they recover: the one that clients are sent to lost the job meanwhile. When it wakes it takes
    no id from the winner, and leads none of the workers that have waited for it."""
    plan = (
        Fault("kill_coordinator", at_ms=500, amount=1),
        Fault("pause_coordinator", on="coordinator.recovering.ReadFile", duration_ms=300),
        Fault("second_coordinator", at_ms=502, duration_ms=9_000),
        Fault("pause_coordinator", on=f"coordinator.recovering.PutIfAbsent.{point}", duration_ms=900),
    )
    text = lived(run_seed(RunRequest(seed, "counter", plan=plan, backend="memory")))
    assert "is led by epoch 3" in text
    assert "leads                  epoch 2" not in text
    assert "claimed checkpoint" not in text
    assert "epoch 4 submission 1" not in text


@pytest.mark.parametrize("seed", [3, 4, 6])
def test_workers_that_wait_for_a_leader_that_slept_are_not_told_of_attempts_of_its_own(seed: int) -> None:
    """It registered them, failed their job over, and cancelled the attempt that the newer leader was about to give them: they did
    nothing from then on, and their leader waited for them for ever."""
    plan = (
        Fault("kill_coordinator", at_ms=500, amount=1),
        Fault("pause_coordinator", on="coordinator.recovering.ReadFile", duration_ms=300),
        Fault("second_coordinator", at_ms=502, duration_ms=9_000),
        Fault("pause_coordinator", on="coordinator.recovering.PutIfAbsent.leader", duration_ms=1_500),
    )
    text = lived(run_seed(RunRequest(seed, "counter", plan=plan, backend="memory")))
    sleeper, newer = "coordinator-2    ", "coordinator-3    "
    story = (
        f"{sleeper}paused",
        f"{newer}leads                  epoch 3",
        f"{sleeper}resumed",
        "worker-0.1       asks register          coordinator-2",
        f"{sleeper}refuses register       worker-0.1: job",
    )
    assert [text.find(step) for step in story] == sorted(text.find(step) for step in story)
    assert all(step in text for step in story)
    asked, refused = (text.index(step) for step in story[3:])
    assert f"{sleeper}store                  ReadFile" in text[asked:refused], "the worker waits while it finds out who leads"
    assert f"{sleeper}sends" not in text, "no command of its own"


@pytest.mark.parametrize("seed", [1, 2])
def test_end_that_was_read_while_another_leader_slept_before_its_submission_is_not_the_last_word(seed: int) -> None:
    """It had taken its epoch, and submitted the job anew when it woke: workers were sent to one that knew the older end only."""
    epoch_taken = "coordinator.PutIfAbsent.leader.done"
    plan = (
        Fault("drain", on="coordinator.PutIfAbsent.metadata.done"),
        Fault("second_coordinator", on=epoch_taken, nth=2, duration_ms=9_000),
        Fault("pause_coordinator", on=epoch_taken, nth=2, duration_ms=300),
    )
    text = lived(run_seed(RunRequest(seed, "counter", plan=plan, backend="memory")))
    sleeper, newer = "coordinator-1    ", "coordinator-2    "
    story = (
        "/leader/2 created",
        f"{sleeper}paused",
        "/results/1.json done",
        f"{sleeper}resumed",
        "/submissions/2.json created",
        f"{sleeper}leads                  epoch 2 submission 2",
        f"{newer}refuses register       worker-0.",
        "is led by epoch 2, at sim://coordinator-1",
    )
    asleep = text.index(f"{sleeper}paused")
    found = [text.find(step, asleep if step.startswith("/results") else 0) for step in story]
    assert -1 not in found
    assert found == sorted(found)
    assert "is newer than 1: another coordinator leads it" in text
