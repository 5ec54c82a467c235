"""Increments under leaders killed between any two storage operations, zombies, and storage that fails (I11, I23, I24)."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator.ha.recorded_job import derive_shared_garbage
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.statebackends.layout import JobPaths, writer_of
from tests.coordinator.shared_world import SharedWorld
from tests.coordinator.test_crashes import live, settle
from tests.coordinator.world import JOB, Steps
from tests.examples import seeds

SEEDS = seeds(40)


def world_of(seed: int, **settings: Any) -> SharedWorld:
    return SharedWorld(seed, retained_checkpoints=1 + seed % 3, max_concurrent_checkpoints=1 + seed % 2, **settings)


def check_end(world: SharedWorld) -> None:
    recorded = Steps(read_job(JobPaths(JOB)), world.storage).run()
    assert derive_shared_garbage(recorded) == ()
    assert world.orphans() == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leader_killed_anywhere_leaves_neither_a_hole_nor_an_orphan(seed: int) -> None:
    world = world_of(seed)
    for _ in range(4):
        live(world, world.leaders[-1], world.random.randint(1, 120))
        world.leaders[-1].flows.clear()
        while not world.take_over(steps=world.random.choice([None, None, 3, 8, 15, 25])):
            pass
    settle(world)
    world.take_over()
    check_end(world)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_zombie_leader_deletes_no_file_that_its_successor_needs(seed: int) -> None:
    world = world_of(seed)
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
    world.take_over()
    check_end(world)


@pytest.mark.parametrize("seed", SEEDS)
def test_storage_that_fails_costs_no_shared_file(seed: int) -> None:
    world = world_of(seed, trouble_share=0.08, tolerable_failed_checkpoints=1000)
    for _ in range(3):
        live(world, world.leaders[-1], 150)
        if world.leaders[-1].master.state is JobState.SUSPENDED or world.random.random() < 0.5:
            world.leaders[-1].flows.clear()
            trouble, world.storage.trouble = world.storage.trouble, None
            assert world.take_over()
            world.storage.trouble = trouble
    settle(world)
    world.take_over()
    check_end(world)


def test_a_peaceful_job_stores_only_what_is_new_and_keeps_only_what_is_needed() -> None:
    world = SharedWorld(5)
    for _ in range(600):
        leader = world.leaders[-1]
        if leader.flows:
            world.step_flow(leader)
        else:
            for worker in world.workers:
                if not worker.session:
                    world.register(leader, worker)
            world.pass_time(leader, 5)
    while world.leaders[-1].flows:
        world.step_flow(world.leaders[-1])
    assert world.placeholders > 50
    (newest,) = world.storage.completed(JOB)
    assert newest > 10
    left = [writer_of(path.rpartition("/")[2]) or 0 for path in world.orphans()]
    assert all(number > newest for number in left), "nothing waits for a recovery to be deleted"
