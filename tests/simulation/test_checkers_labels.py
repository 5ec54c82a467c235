"""I45: what has a label is whole until it is taken back; the checker sees the store alone."""

from __future__ import annotations

from typing import Any

from holdfast.chaos.checkers.labels import LabelsChecker
from holdfast.chaos.checkers.observations import Labelled
from holdfast.coordinator.ha.records import derive_job_id
from holdfast.statebackends.layout import JobPaths

JOB = derive_job_id("labelled")
PATHS = JobPaths(JOB)


class Store:
    def __init__(self, *paths: str) -> None:
        self.files = set(paths)

    def size(self, path: str) -> int | None:
        return 1 if path in self.files else None


class World:
    job_id = JOB

    def __init__(self) -> None:
        self.state = Store(PATHS.claim(7), PATHS.decision(7))


def checker() -> tuple[LabelsChecker, World, list[tuple[str, str]]]:
    world, found = World(), list[tuple[str, str]]()
    made: Any = LabelsChecker(world, None, lambda invariant, message: found.append((invariant, message)), None)
    return made, world, found


def test_a_labelled_checkpoint_that_is_whole_is_fine() -> None:
    each, _, found = checker()
    each.observe(Labelled(5, 7, keeps=True))
    each.look()
    each.at_end()
    assert found == []


def test_a_labelled_checkpoint_that_is_deleted_is_told_once() -> None:
    each, world, found = checker()
    each.observe(Labelled(5, 7, keeps=True))
    world.state.files.discard(PATHS.claim(7))
    each.look()
    each.at_end()
    assert found == [("I45", f"checkpoint 7 has had a label since 5 ms, and {PATHS.claim(7)} was deleted")]


def test_what_lost_its_label_may_go() -> None:
    each, world, found = checker()
    each.observe(Labelled(5, 7, keeps=True))
    each.observe(Labelled(9, 7, keeps=False))
    world.state.files.clear()
    each.at_end()
    assert found == []
