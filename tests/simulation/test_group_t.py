"""Scenario group T: whole jobs under each of its faults at each of its moments, with a fixed seed and a plan that is written down.

The long run (T12) is `holdfast chaos sim --workload long`, part of `make chaos`; T13 is test_determinism.py, T14
test_sabotages.py."""

from __future__ import annotations

from functools import cache, partial

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.results import RunResult
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.faults.faults import Fault
from tests.examples import crossed

COUNTER = ("counter", 1496)
"""Two workers, files of state in the store, ten failed checkpoints tolerated."""
WINDOWS = ("windows", 44)
"""Three workers, channels of two sources into each window task: barriers are aligned."""

kill_worker = partial(Fault, "kill_worker", "workers")
kill_coordinator = partial(Fault, "kill_coordinator", amount=30)


def survive(job: tuple[str, int], *faults: Fault) -> RunResult:
    """Run a job under faults: each of them hits, and the job ends with every invariant held."""
    workload, seed = job
    run = run_seed(RunRequest(seed, workload, plan=faults))
    assert run.result.violations == (), "\n".join(run.trace.lines(30))
    assert run.result.ended == "FINISHED"
    assert run.result.faults_hit == tuple(range(len(faults))), "\n".join(run.trace.lines())
    return run.result


@cache
def undisturbed(job: tuple[str, int]) -> RunResult:
    """The job without faults: a seed gives the same run each time."""
    return survive(job)


T01 = {
    "idle": Fault("kill_worker", "worker-1", at_ms=333),
    "alignment": Fault("kill_worker", "worker-1", on="worker.receive.trigger", nth=4),
    "sync snapshot": kill_worker(on="worker.snapshot.", nth=9),
    "async upload": kill_worker(on="worker.WriteFile.state", nth=5),
    "upload done": kill_worker(on="worker.WriteFile.state.done", nth=5),
    "after ack": Fault("kill_worker", "worker-1", on="coordinator.receive.acks", nth=4),
    "during done": kill_worker(on="worker.receive.complete", nth=4),
    "first phase of a commit": kill_worker(on="worker.WriteFile.staged.done", nth=3),
    "second phase of a commit": kill_worker(on="worker.PutIfAbsent.log.done", nth=3),
}


@pytest.mark.parametrize("moment", T01)
@pytest.mark.parametrize("job", [COUNTER, pytest.param(WINDOWS, marks=pytest.mark.endurance)], ids=str)
def test_t01_worker_dies(job: tuple[str, int], moment: str) -> None:
    result = survive(job, T01[moment])
    assert result.crashes >= 1
    assert result.restarts >= 1


T02 = {
    "after the id is taken": kill_coordinator(on="coordinator.PutIfAbsent.claim.done", nth=2),
    "half of the acks": kill_coordinator(on="coordinator.answer.acks", nth=4),
    "all acks, before the store": kill_coordinator(on="coordinator.PutIfAbsent.metadata", nth=3),
    "after the store, before done": kill_coordinator(on="coordinator.PutIfAbsent.metadata.done", nth=2),
    "half of the dones": kill_coordinator(on="coordinator.send.complete", nth=3),
}


@pytest.mark.parametrize("moment", T02)
@pytest.mark.parametrize("job", [COUNTER, pytest.param(WINDOWS, marks=pytest.mark.endurance)], ids=str)
def test_t02_coordinator_dies(job: tuple[str, int], moment: str) -> None:
    fault = T02[moment]
    assert survive(job, fault).crash_points == (fault.on,)


OPERATIONS = ("PutIfAbsent", "WriteFile", "LinkFile", "DeleteFile", "DeleteFolder")
STORE_FAULTS = ("store_fails", "store_slow", "store_partial", "store_lies", "store_late")
MESSAGES = ("trigger", "acks", "complete", "heartbeat", "register", "deploy", "answer:acks")
MESSAGE_FAULTS = ("drop", "delay", "duplicate", "reorder")


@pytest.mark.parametrize(("kind", "operation"), crossed(STORE_FAULTS, OPERATIONS))
def test_t03_storage_misbehaves(kind: str, operation: str) -> None:
    amount = 60 if kind in ("store_slow", "store_late") else 0
    survive(COUNTER, Fault(kind, operation, at_ms=200, duration_ms=700, probability=0.6, amount=amount))


@pytest.mark.parametrize(("kind", "message"), crossed(MESSAGE_FAULTS, MESSAGES))
def test_t04_messages_misbehave(kind: str, message: str) -> None:
    amount = 40 if kind in ("delay", "reorder") else 0
    probability = 1 if message in ("register", "deploy") else 0.5  # of those there is one for each worker
    survive(COUNTER, Fault(kind, message, at_ms=1, duration_ms=900, probability=probability, amount=amount))


@pytest.mark.parametrize("kind", MESSAGE_FAULTS)
def test_t04_declines_and_aborts_misbehave(kind: str) -> None:
    """Declines travel with the acknowledgements. They, and the notices that a checkpoint is off, take a worker that can't write."""
    amount = 40 if kind in ("delay", "reorder") else 0
    fails = Fault("store_fails", "worker:WriteFile", at_ms=150, duration_ms=500, probability=0.7)
    messages = (Fault(kind, message, at_ms=150, duration_ms=900, probability=0.5, amount=amount) for message in ("acks", "abort"))
    assert survive(COUNTER, fails, *messages).sometimes["checkpoint_declined"] >= 1


def test_t05_zombie_returns() -> None:
    result = survive(COUNTER, Fault("pause_worker", "worker-0", on="worker.receive.trigger", nth=4, duration_ms=4_000, amount=1))
    assert result.sometimes["zombie_refused"] >= 1


@pytest.mark.parametrize("job", [COUNTER, WINDOWS], ids=str)
def test_t06_two_coordinators(job: tuple[str, int]) -> None:
    assert survive(job, Fault("second_coordinator", at_ms=300, duration_ms=30_000)).sometimes["register_lost"] >= 1


@pytest.mark.parametrize(
    ("target", "jump_ms"), crossed(["coordinator", "worker-0", "worker-1", "driver"], [3_600_000, -3_600_000], every=2)
)
def test_t07_clock_jumps(target: str, jump_ms: int) -> None:
    """Pauses and timeouts go by the monotonic clock: no checkpoint is held back, none expires."""
    result = survive(COUNTER, Fault("clock_jump", target, at_ms=400, amount=jump_ms))
    assert result.restarts == 0
    assert result.checkpoints >= undisturbed(COUNTER).checkpoints - 1


@pytest.mark.parametrize("kind", ["store_slow", "store_lies", "store_late"])
def test_t08_sink_answers_late_twice_or_not(kind: str) -> None:
    amount = 0 if kind == "store_lies" else 300
    survive(COUNTER, Fault(kind, "PutIfAbsent/log", at_ms=200, duration_ms=600, probability=0.6, amount=amount))


def test_t09_full_disk_of_a_worker_declines_checkpoints_and_the_job_goes_on() -> None:
    result = survive(COUNTER, Fault("disk_full", "worker:", at_ms=300, duration_ms=300))
    assert result.sometimes["checkpoint_declined"] >= 1
    assert result.restarts == 0


def test_t10_rescales_during_crashes() -> None:
    """4, 2, then 8: all of the key groups."""
    result = survive(
        COUNTER,
        *(Fault("rescale", at_ms=at_ms, amount=parallelism) for at_ms, parallelism in ((200, 4), (600, 2), (1_000, 8))),
        kill_worker(on="worker.restore.", nth=5),
        kill_coordinator(on="coordinator.PutIfAbsent.metadata", nth=3),
    )
    assert result.sometimes["rescaled"] == 3


def test_t11_second_failure_during_recovery_is_counted() -> None:
    result = survive(COUNTER, kill_worker(on="worker.process.", nth=20), Fault("kill_recovering", "worker", at_ms=1))
    assert result.restarts == 2
    assert result.sometimes["crash_while_restoring"] >= 1


def test_t11_failure_in_close_is_one_restart() -> None:
    assert survive(COUNTER, Fault("user_error", "count", on="worker.close.")).restarts == 1
