"""Whole runs: a job without faults, each kind of fault alone, a plan that is written down, and what can't be run."""

from __future__ import annotations

from functools import cache

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.worker_host import WorkerHost
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.faults.faults import KINDS, Fault, check_plan, decode_plan, encode_plan
from holdfast.chaos.sim.kernel import Kernel, Process, ProcessClock, Streams, Trace
from holdfast.chaos.workloads import find_workload
from holdfast.statebackends.errors import InvalidConfigError
from tests.examples import crossed

MOMENTS: dict[str, Fault] = {
    "kill_worker": Fault("kill_worker", "workers", on="worker.process.", nth=20),
    "kill_coordinator": Fault("kill_coordinator", on="coordinator.PutIfAbsent.metadata.done", nth=2, amount=50),
    "kill_driver": Fault("kill_driver", at_ms=500, amount=50),
    "kill_all": Fault("kill_all", at_ms=500, amount=50),
    "power_loss": Fault("power_loss", on="worker.WriteFile.", nth=4, amount=50),
    "damage_copies": Fault("damage_copies", "workers", at_ms=700),
    "local_disk_full": Fault("local_disk_full", "workers", at_ms=500, duration_ms=400),
    "kill_recovering": Fault("kill_recovering", "worker", at_ms=1),
    "pause_worker": Fault("pause_worker", "worker-0", at_ms=400, duration_ms=2_500, amount=1),
    "hang_worker": Fault("hang_worker", "worker-0", at_ms=400, amount=1),
    "pause_coordinator": Fault("pause_coordinator", at_ms=400, duration_ms=800),
    "second_coordinator": Fault("second_coordinator", at_ms=400, duration_ms=300),
    "old_leader_wakes": Fault("old_leader_wakes", on="coordinator.PutIfAbsent.metadata", nth=3, duration_ms=400),
    "drop": Fault("drop", "trigger", at_ms=100, duration_ms=600),
    "delay": Fault("delay", "acks", at_ms=100, duration_ms=600, amount=40),
    "duplicate": Fault("duplicate", "all", at_ms=100, duration_ms=600),
    "reorder": Fault("reorder", "all", at_ms=100, duration_ms=600, amount=20),
    "partition": Fault("partition", "workers", at_ms=300, duration_ms=200),
    "partition_members": Fault("partition_members", at_ms=300, duration_ms=1_500),
    "forged_ack": Fault("forged_ack", "workers", at_ms=100, duration_ms=600, probability=0.3),
    "forged_registration": Fault("forged_registration", "workers", at_ms=400),
    "break_stream": Fault("break_stream", "workers", at_ms=400, amount=100),
    "cut_link": Fault("cut_link", "0-1", at_ms=400),
    "forged_frames": Fault("forged_frames", "workers", at_ms=400),
    "slow_link": Fault("slow_link", "all", at_ms=100, duration_ms=600, amount=5),
    "store_fails": Fault("store_fails", "PutIfAbsent", at_ms=300, duration_ms=300, probability=0.5),
    "store_slow": Fault("store_slow", "all", at_ms=300, duration_ms=300, amount=20),
    "store_partial": Fault("store_partial", "all", at_ms=300, duration_ms=300, probability=0.2),
    "store_lies": Fault("store_lies", "PutIfAbsent", at_ms=300, duration_ms=300, probability=0.5),
    "store_unsynced": Fault("store_unsynced", "PutIfAbsent", at_ms=300, duration_ms=600, probability=0.5),
    "store_late": Fault("store_late", "PutIfAbsent", at_ms=300, duration_ms=300, probability=0.5, amount=400),
    "disk_full": Fault("disk_full", "all", at_ms=300, duration_ms=200),
    "clock_jump": Fault("clock_jump", "coordinator", at_ms=300, amount=-3_600_000),
    "slow_operator": Fault("slow_operator", "all", at_ms=100, duration_ms=500, amount=5),
    "blocked_operator": Fault("blocked_operator", "all", at_ms=300, amount=400),
    "user_error": Fault("user_error", "all", on="worker.snapshot.", nth=3),
    "checkpoint": Fault("checkpoint", at_ms=300),
    "savepoint": Fault("savepoint", at_ms=300),
    "retune": Fault("retune", at_ms=300),
    "restore": Fault("restore", at_ms=300),
    "drain": Fault("drain", at_ms=300),
    "rewind": Fault("rewind", at_ms=700),
    "rescale": Fault("rescale", at_ms=400, amount=3),
}


@cache
def seed_of_two_workers() -> int:
    workload = find_workload("counter")
    scenarios = ((seed, workload.make(Streams(seed).of("workload"))) for seed in range(100))
    return next(seed for seed, scenario in scenarios if scenario.plan(None).graph.slots_required == 2)


def test_job_without_faults_ends_as_it_should() -> None:
    result = run_seed(RunRequest(5, "counter", plan=(), backend="memory")).result
    assert (result.violations, result.ended, result.crashes, result.restarts) == ((), "FINISHED", 0, 0)
    assert result.checkpoints >= 5


def test_every_kind_of_fault_is_written_down_here() -> None:
    assert set(MOMENTS) == set(KINDS)
    check_plan(tuple(MOMENTS.values()))


@pytest.mark.parametrize("kind", crossed(sorted(MOMENTS), every=2))
def test_fault_hits_and_the_job_survives_it(kind: str) -> None:
    plan: tuple[Fault, ...] = (MOMENTS[kind],)
    workload = "counter"
    if kind == "partition_members":  # members speak to each other when one has no sign of life of another
        plan, workload = (*plan, Fault("store_fails", "coordinator:WriteFile/members", at_ms=300, duration_ms=1_000)), "members"
    run = run_seed(RunRequest(seed_of_two_workers(), workload, plan=plan, backend="memory"))
    assert run.result.violations == (), "\n".join(run.trace.lines(30))
    assert 0 in run.result.faults_hit
    assert len(run.result.faults_hit) == len(plan)
    assert run.result.ended == "FINISHED"


def test_two_faults_at_one_point_hit_two_workers() -> None:
    """The first one kills whoever passes it; the second finds somebody who lives."""
    plan = (
        Fault("kill_worker", "workers", on="worker.receive.trigger", nth=4),
        Fault("pause_worker", "workers", on="worker.receive.trigger", nth=4, duration_ms=300, amount=1),
    )
    run = run_seed(RunRequest(seed_of_two_workers(), "counter", plan=plan, backend="memory"))
    assert run.result.violations == ()
    assert run.result.faults_hit == (0, 1)
    killed, paused = (next(line for line in run.trace.lines() if f" {change}" in line) for change in ("killed", "paused"))
    assert killed.split()[1] != paused.split()[1]


def test_plan_survives_its_json() -> None:
    plan = tuple(MOMENTS.values())
    assert decode_plan(encode_plan(plan), "here") == plan


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not a plan"),
        (b'[{"kind": "earthquake", "at_ms": 1}]', "kill_worker"),
        (b'[{"kind": "kill_worker"}]', "at_ms or on"),
        (b'[{"kind": "kill_worker", "at_ms": 1, "on": "worker."}]', "one of them"),
        (b'[{"kind": "drop", "at_ms": 1}]', "duration_ms"),
        (b'[{"kind": "drop", "at_ms": 1, "duration_ms": 5, "probability": 2}]', "probability"),
        (b'[{"kind": "kill_worker", "at_ms": 1, "wehn": 3}]', "wehn"),
        (b'[{"kind": "kill_worker", "at_ms": "soon"}]', "at_ms"),
    ],
)
def test_malformed_plan_is_refused_by_name(content: bytes, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        decode_plan(content, "plan.json")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (RunRequest(1, "earthquake"), "counter"),
        (RunRequest(1, "counter", kinds=("earthquake",)), "kill_worker"),
        (RunRequest(1, "counter", sabotage="earthquake"), "unblocked_channel"),
    ],
)
def test_unknown_names_are_refused_with_the_choices(request_: RunRequest, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        run_seed(request_)


# ------------------------------------------------------------------------------------------------------------ the kernel


def kernel(seed: int = 1) -> Kernel:
    streams = Streams(seed)
    return Kernel(streams, Trace(lambda: 0))


def test_what_belongs_to_a_dead_process_never_happens() -> None:
    happened: list[str] = []
    world, process = kernel(), Process("worker-0.1", "worker")
    world.after(10, lambda: happened.append("its"), process)
    world.after(10, lambda: happened.append("nobody's"))
    world.kill(process)
    while world.step():
        pass
    assert happened == ["nobody's"]


def test_what_comes_due_during_a_pause_happens_in_order_when_it_is_over() -> None:
    happened: list[int] = []
    world, process = kernel(), Process("worker-0.1", "worker")
    for number in range(3):
        world.after(10 * (number + 1), lambda number=number: happened.append(number), process)  # type: ignore[misc]
    world.pause(process)
    world.after(1_000, lambda: world.resume(process))
    while world.step():
        assert not happened or world.now_us >= 1_000
    assert happened == [0, 1, 2]


def test_order_of_one_moment_is_the_seeds() -> None:
    def order(seed: int) -> list[int]:
        happened: list[int] = []
        world = kernel(seed)
        for number in range(6):
            world.after(5, lambda number=number: happened.append(number))  # type: ignore[misc]
        while world.step():
            pass
        return happened

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_streams_do_not_disturb_each_other() -> None:
    one, other = Streams(7), Streams(7)
    one.of("faults").random()
    assert one.of("order").random() == other.of("order").random()
    assert Streams(7).of("order").random() != Streams(8).of("order").random()


class LoopOfLongTurns:
    """The loop of a worker, as its host sees it: the first turn is long, and wakes the loop in the midst of it."""

    has_left = False

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self.began_us: list[int] = []

    def run_once(self) -> bool:
        self.began_us.append(self._host._kernel.now_us)
        if len(self.began_us) == 1:
            self._host.wake()
            self._host.clock.spent_us += 2_500_000
        return False

    def prepare_wait(self) -> int:
        return 60_000


def test_loop_that_is_woken_in_the_midst_of_a_long_turn_goes_on_when_it_has_ended() -> None:
    world, host = kernel(), object.__new__(WorkerHost)
    host.process = Process("worker-0.1", "worker")
    host.clock = ProcessClock(world, host.process)
    host._kernel, host._random, host._due_us, host._busy_until_us = world, world.streams.of("worker"), None, 0
    host.worker = loop = LoopOfLongTurns(host)  # type: ignore[assignment]
    host._turn_after(0)
    while len(loop.began_us) < 2 and world.step():
        pass
    assert loop.began_us == [0, 2_500_000]
