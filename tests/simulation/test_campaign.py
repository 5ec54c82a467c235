"""Campaigns over runs that come to what their workload is named after: what is counted, told, and made small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from holdfast.chaos.campaign import campaign as campaigns
from holdfast.chaos.campaign.campaign import Campaign, Finding, Settings, Unwatched, _shown, run_campaign
from holdfast.chaos.campaign.proof import Trial, Verdict, try_all
from holdfast.chaos.campaign.runner import SIMULATOR
from holdfast.chaos.campaign.summary import Tally
from holdfast.chaos.cluster import world
from holdfast.chaos.cluster.results import RunResult, ViolationRecord
from holdfast.chaos.sim.kernel import Trace
from tests.simulation import fakes

SETTINGS = Settings(jobs=2, entry=fakes.ENTRY, limit_s=20.0)


@pytest.fixture(autouse=True)
def fake_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "RunRequest", fakes.FakeRequest)


class Quiet:
    """A watcher that remembers what it was told."""

    def __init__(self, interrupt_at: int = -1) -> None:
        self.seeds: list[int] = []
        self.looks: list[tuple[int, str]] = []
        self.broken: list[tuple[int, str, str]] = []
        self._interrupt_at = interrupt_at

    def ran(self, result: RunResult, tally: Tally) -> None:
        self.seeds.append(result.seed)
        if result.seed == self._interrupt_at:
            raise KeyboardInterrupt

    def broke(self, result: RunResult, violation: ViolationRecord, replay: str) -> None:
        assert self.seeds[-1] == result.seed, "it is told before the next run is"
        self.broken.append((result.seed, violation.invariant, replay))

    def looks_at(self, seed: int, what: str) -> None:
        self.looks.append((seed, what))


def run(campaign: Campaign, settings: Settings = SETTINGS, watcher: Quiet | None = None) -> Finding:
    return run_campaign(campaign, settings, watcher or Quiet(), sometimes=("restored", "rescaled"))


def test_seeds_take_turns_over_the_workloads() -> None:
    campaign = Campaign(5, ("good", "broken"), start=3)
    assert [(request.seed, request.workload) for request in campaign.requests()] == [
        (3, "broken"),
        (4, "good"),
        (5, "broken"),
        (6, "good"),
        (7, "broken"),
    ]


def test_what_ran_is_counted() -> None:
    summary = run(Campaign(20, ("good", "printing"))).summary
    assert (summary.seeds, summary.violations, summary.invariants) == (20, 0, {})
    assert summary.workloads == {"good": 10, "printing": 10}
    assert (summary.checkpoints, summary.restarts, summary.records) == (200, 40, 20_000)
    assert summary.crashes == 16 * 3
    assert summary.crash_points == ("worker.process.0", "worker.process.1", "worker.process.2")
    assert (summary.faults["kill_worker"].planned, summary.faults["kill_worker"].hit) == (120, 48)
    assert (summary.visited, summary.never_visited) == ({"restored": 20}, ("rescaled",))
    assert summary.runs_per_minute > 0
    assert summary.runs_per_minute_per_core <= summary.runs_per_minute


def test_runs_in_which_no_fault_hit_are_reported_as_such() -> None:
    summary = run(Campaign(60, ("good",))).summary
    assert summary.idle == 12
    assert summary.idle_seeds == (0, 5, 10, 15, 20, 25, 30, 35, 40, 45)


def test_a_failure_is_told_at_once_with_the_command_that_replays_it() -> None:
    watcher = Quiet()
    run(Campaign(12, ("broken",)), watcher=watcher)
    assert watcher.seeds == list(range(12))
    assert watcher.broken == [
        (seed, "I5", f"holdfast chaos replay {seed} --workload broken --trace {seed}.trace") for seed in (3, 10)
    ]


def test_a_failure_is_told_with_the_faults_that_it_takes() -> None:
    watcher = Quiet()
    found = run(Campaign(9, ("broken",)), watcher=watcher)
    (failure,) = found.failures
    assert (failure.seed, failure.workload, failure.invariant) == (3, "broken", "I5")
    assert failure.faults == {1: fakes.PLAN[1], 4: fakes.PLAN[4]}
    assert (failure.planned, failure.minimised) == (6, True)
    assert failure.message == "after 2 faults"
    assert failure.replay == "holdfast chaos replay 3 --workload broken --only 1,4 --trace 3.trace"
    assert [event.partition("event ")[2].strip() for event in failure.events] == [
        "broken 3",
        "kill_worker worker-1 at 100 ms",
        "kill_worker worker-4 at 400 ms",
    ]
    assert watcher.looks == [(3, "minimise"), (3, "events")]


def test_without_minimising_every_fault_is_told() -> None:
    (failure,) = run(Campaign(9, ("broken",)), replace(SETTINGS, minimise=False)).failures
    assert tuple(failure.faults.values()) == fakes.PLAN
    assert not failure.minimised
    assert failure.replay == "holdfast chaos replay 3 --workload broken --trace 3.trace"
    assert len(failure.events) == 1 + len(fakes.PLAN)


def test_a_replay_names_all_that_made_the_run() -> None:
    campaign = Campaign(1, ("broken",), start=3, sabotage="forget", backend="memory", options=("--faults", "crashes,drop"))
    (failure,) = run(campaign, replace(SETTINGS, minimise=False)).failures
    assert failure.replay == (
        "holdfast chaos replay 3 --workload broken --faults crashes,drop --sabotage forget --backend memory --trace 3.trace"
    )


def test_a_failure_that_takes_no_fault_says_so() -> None:
    (failure,) = run(Campaign(1, ("always",), start=1)).failures
    assert (failure.faults, failure.minimised, failure.runs) == ({}, True, 1)
    assert "--only none" in failure.replay


def test_the_last_failure_of_a_subtask_is_told_however_early_it_was() -> None:
    (failure,) = run(Campaign(1, ("always",)), replace(SETTINGS, minimise=False, events=2)).failures
    assert failure.task_failure.endswith("worker-1.1       reports failed         UserFunctionError: long before")
    assert len(failure.events) == 2
    (failure,) = run(Campaign(4, ("broken",))).failures
    assert failure.task_failure == ""


def test_events_around_a_cause_leave_out_what_happened_long_after_it() -> None:
    now_us = 0
    trace = Trace(lambda: now_us)
    for at_us, actor, event in (
        (1_000, "worker-0.1", "takes deploy"),
        (2_000, "coordinator-1", "store"),
        (3_000, "fault", "kill_worker"),
        (3_100, "worker-0.1", "killed"),
        (4_500, "worker-0.2", "takes deploy"),
        (5_000, "coordinator-1", "store"),
        (6_000, "worker-0.2", "left"),
        (7_000, "driver-1", "ended"),
        (8_000, "fault", "drop"),
        (8_500, "fault", "drop"),
        (9_000, "checker", "VIOLATION I1"),
        (9_500, "worker-1.1", "left"),
    ):
        now_us = at_us
        trace.add(actor, event)
    lines = trace.lines()
    shown = _shown(lines, ViolationRecord("I1", "", 9, cause_ms=4), 7)
    assert [line.split(None, 2)[1:] for line in shown] == [
        ["fault", "kill_worker"],
        ["worker-0.1", "killed"],
        ["worker-0.2", "takes deploy"],
        ["worker-0.2", "left"],
        ["driver-1", "ended"],
        ["fault", "drop"],
        ["checker", "VIOLATION I1"],
    ]
    assert _shown(lines, ViolationRecord("I1", "", 9), 2) == lines[-2:]


def test_a_run_that_raises_is_told_but_not_minimised() -> None:
    watcher = Quiet()
    found = run(Campaign(9, ("raising",)), watcher=watcher)
    (failure,) = found.failures
    assert failure.invariant == SIMULATOR
    assert failure.replay == "holdfast chaos replay 3 --workload raising --trace 3.trace"
    assert watcher.looks == []
    assert found.summary.seeds == 9


def test_it_stops_after_so_many_failed_runs() -> None:
    found = run(Campaign(1_000, ("always",)), replace(SETTINGS, stop_after=3, minimise=False))
    assert (found.summary.seeds, found.summary.violations) == (3, 3)
    assert [failure.seed for failure in found.failures] == [0, 1, 2]


def test_only_so_many_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "FAILURES_MAX", 2)
    found = run(Campaign(6, ("always",)), replace(SETTINGS, minimise=False))
    assert (found.summary.violations, len(found.failures)) == (6, 2)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_sabotage_is_caught_after_the_same_seeds_with_any_number_of_processes(jobs: int) -> None:
    found = run(Campaign(50, ("broken",), sabotage="forget"), replace(SETTINGS, jobs=jobs, stop_after=1))
    assert (found.summary.caught_after, found.summary.seeds, found.summary.sabotage) == (4, 4, "forget")


def test_a_run_that_raises_does_not_count_as_catching_a_sabotage() -> None:
    found = run(Campaign(12, ("raising",), sabotage="forget"), replace(SETTINGS, stop_after=1))
    assert (found.summary.caught_after, found.summary.seeds, found.summary.violations) == (0, 12, 2)


def test_an_interruption_leaves_what_ran_so_far() -> None:
    watcher = Quiet(interrupt_at=4)
    found = run(Campaign(1_000, ("broken",)), watcher=watcher)
    assert found.summary.interrupted
    assert found.summary.seeds == 5
    assert [failure.seed for failure in found.failures] == [3]
    assert watcher.looks == [(3, "events")]


def test_every_seed_is_checked_for_determinism_when_that_is_wanted() -> None:
    found = run(Campaign(3, ("ordered by hash",)), replace(SETTINGS, check_determinism=True))
    assert found.summary.invariants == {"determinism": 3}
    assert found.failures[1].replay == ("holdfast chaos sim --start 1 --seeds 1 --workload 'ordered by hash' --check-determinism")


def test_a_users_own_workload_is_checked_for_determinism_once() -> None:
    assert run(Campaign(6, ("good", "mine.py:good"))).summary.seeds == 6
    found = run(Campaign(60, ("good", "mine.py:ordered by hash")))
    assert found.summary.invariants == {"determinism": 1}
    assert [failure.seed for failure in found.failures] == [1]
    assert found.summary.seeds == 2  # what its other seeds would break means nothing


def test_every_sabotage_is_tried_until_it_is_caught() -> None:
    trials = [
        Trial("forget", Campaign(20, ("broken",), sabotage="forget"), ("I5",)),
        Trial("harmless", Campaign(4, ("good",), sabotage="harmless"), ("I1", "I2")),
    ]
    brief = replace(SETTINGS, stop_after=1, minimise=False)
    told: list[Verdict] = []
    with brief.runner(2) as runner:
        caught, missed = try_all(trials, lambda campaign: run_campaign(campaign, brief, Unwatched(), runner=runner), told.append)
        assert runner.run_one(fakes.make_task(1)).result.seed == 1
    assert told == [caught, missed]
    assert (caught.sabotage, caught.caught_after, caught.invariant, caught.seeds) == ("forget", 4, "I5", 20)
    assert (missed.sabotage, missed.caught_after, missed.invariant, missed.seeds) == ("harmless", 0, "", 4)


def test_trials_end_when_they_are_interrupted() -> None:
    def interrupted(campaign: Campaign) -> Finding:
        return run(campaign, watcher=Quiet(interrupt_at=0))

    def trials() -> Iterator[Trial]:
        yield Trial("first", Campaign(3, ("good",), sabotage="first"), ())
        pytest.fail("it went on")

    with pytest.raises(KeyboardInterrupt):
        try_all(trials(), interrupted, lambda verdict: None)
