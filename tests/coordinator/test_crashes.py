"""Leaders killed between any two storage operations, zombies beside their successors, storage that fails (I11-I16, I22, I24)."""

from __future__ import annotations

import pytest

from holdfast.coordinator.ha.recorded_job import CheckpointFact
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.statebackends.layout import JobPaths
from tests.coordinator.world import JOB, Leader, Steps, World
from tests.examples import seeds

SEEDS = seeds(60)


def live(world: World, leader: Leader, steps: int) -> None:
    """Let a leader and its workers do whatever comes."""
    for _ in range(steps):
        match world.random.randrange(12):
            case 0:
                world.pass_time(leader, world.random.randint(1, 15))
            case 1:
                worker = world.random.choice(world.workers)
                if worker.epoch < leader.epoch or not worker.session:
                    world.register(leader, worker)
            case 2 if world.random.random() < 0.15:
                world.kill_worker(leader, world.random.randrange(2))
            case _:
                world.step_flow(leader)


def settle(world: World) -> None:
    """Faults stop: a new leader, every worker back, and time."""
    world.storage.trouble = None
    assert world.take_over()
    leader = world.leaders[-1]
    for worker in world.workers:
        world.register(leader, worker)
    before = max(world.storage.completed(JOB), default=0)
    for _ in range(2000):
        if max(world.storage.completed(JOB), default=0) > before + 1 and not leader.flows:
            break
        world.pass_time(leader, 5) if not leader.flows else world.step_flow(leader)
        for worker in world.workers:
            if worker.epoch < leader.epoch:
                world.register(leader, worker)
    assert max(world.storage.completed(JOB)) > before, "a checkpoint completes once faults stop (I30)"
    while leader.flows:
        world.step_flow(leader)


def check_directory(world: World) -> None:
    recorded = Steps(read_job(JobPaths(JOB)), world.storage).run()
    assert not recorded.with_fact(CheckpointFact.ORPHANED)
    assert recorded.last_checkpoint_id >= max(world.claimed), "an id is never handed out again (I12)"
    completed = recorded.with_fact(CheckpointFact.COMPLETED)
    assert len(completed) <= 1, "retention holds (I16)"


@pytest.mark.parametrize("seed", SEEDS)
def test_leader_killed_anywhere_is_succeeded_without_loss(seed: int) -> None:
    world = World(seed)
    for _ in range(4):
        live(world, world.leaders[-1], world.random.randint(1, 120))
        world.leaders[-1].flows.clear()  # kill -9: what was under way never happens
        while not world.take_over(steps=world.random.choice([None, None, 3, 8, 15, 25])):
            pass
    settle(world)
    check_directory(world)
    assert list(world.garbage()) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_zombie_leader_beside_its_successor_completes_and_deletes_nothing_of_its(seed: int) -> None:
    world = World(seed)
    for _ in range(3):
        live(world, world.leaders[-1], world.random.randint(20, 120))
        zombies = list(world.leaders)
        world.take_over()
        for _ in range(60):
            live(world, world.random.choice([*zombies, world.leaders[-1], world.leaders[-1]]), 2)
    settle(world)
    for zombie in world.leaders[:-1]:
        while zombie.flows:
            world.step_flow(zombie)
    world.take_over()  # a late write to an id that was deleted meanwhile is an orphan, which the next recovery sweeps
    check_directory(world)
    assert list(world.garbage()) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_storage_that_fails_and_answers_ambiguously_loses_nothing(seed: int) -> None:
    world = World(seed, trouble_share=0.08, tolerable_failed_checkpoints=1000)
    for _ in range(3):
        live(world, world.leaders[-1], 150)
        if world.leaders[-1].master.state is JobState.SUSPENDED or world.random.random() < 0.5:
            world.leaders[-1].flows.clear()
            trouble, world.storage.trouble = world.storage.trouble, None
            assert world.take_over()
            world.storage.trouble = trouble
    settle(world)
    check_directory(world)


def test_recovery_twice_finds_the_same() -> None:
    world = World(3)
    live(world, world.leaders[-1], 200)
    world.leaders[-1].flows.clear()
    world.take_over()
    first = world.leaders[-1].master.setup
    world.take_over()
    second = world.leaders[-1].master.setup
    assert (first.attempt, first.completed, first.finishing) == (second.attempt, second.completed, second.finishing)
    assert second.next_checkpoint_id == first.next_checkpoint_id + 1, "each takeover fences one id"
