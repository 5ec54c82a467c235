"""Whose a savepoint is: what its user asked for counts, whatever the job has on record."""

from __future__ import annotations

import pytest

from barriers.jobgraph import ClaimMode, Submission
from barriers.messages import CheckpointKind
from chaos.observations import Submitted
from coordinator.records import METADATA, OWNER, RestorePoint
from tests.simulation.checker_world import SAVEPOINTS, Story

FOLDER = f"{SAVEPOINTS}/savepoint-2"


def resumed(mode: ClaimMode, restore: str = FOLDER) -> Story:
    """A job that goes on from its savepoint, and has it on record as given to it."""
    story = Story()
    story.begin()
    story.complete(1)
    story.complete(2, CheckpointKind.STOP_SAVEPOINT)
    story.tell(Submitted(story.now_ms, "driver-2", Submission(story.graph, restore=restore, claim_mode=mode)))
    story.lead()
    base = RestorePoint(2, FOLDER, 0, CheckpointKind.STOP_SAVEPOINT, explicit=True, claim="mine")
    story.submit(2, base, 3, restore=restore)
    story.record_attempt(2, folder=FOLDER)
    story.deploy(2)
    story.complete(3)
    return story


@pytest.mark.parametrize("name", [METADATA, "count-0-1"])
def test_a_savepoint_that_its_user_keeps_is_deleted(name: str) -> None:
    story = resumed(ClaimMode.NO_CLAIM)
    assert story.broken == []
    story.delete(f"savepoint-2/{name}", SAVEPOINTS)
    assert set(story.broken) == {"I25"}


@pytest.mark.parametrize("restore", [FOLDER, f"{FOLDER}/{METADATA}", f"{FOLDER}/"])
def test_a_savepoint_that_its_user_gave_away_is_deleted(restore: str) -> None:
    story = resumed(ClaimMode.CLAIM, restore)
    for name in (METADATA, "count-0-1"):
        story.delete(f"savepoint-2/{name}", SAVEPOINTS)
    assert story.broken == []


def test_a_savepoint_that_its_user_keeps_gets_an_owner() -> None:
    story = resumed(ClaimMode.NO_CLAIM)
    story.put(f"savepoint-2/{OWNER}", b"{}", SAVEPOINTS)
    assert story.broken == ["I25"]
    assert "did not get" in story.violations[0][1]


def test_a_checkpoint_that_needs_a_file_of_a_savepoint() -> None:
    story = resumed(ClaimMode.NO_CLAIM)
    story.claim(4)
    states = story.acknowledge(4)
    counted = states["count"][0].keyed[0]
    handle = counted.parts[0]
    story.files[f"{SAVEPOINTS}/savepoint-2/extra"] = story.files[f"/state/{story.folder(4)}/{handle.path}"]
    borrowed = type(handle)("../../../savepoints/savepoint-2/extra", handle.length, handle.checksum)  # type: ignore[attr-defined, call-arg]
    moved = type(counted)(counted.key_groups, counted.format, counted.states, (borrowed,))
    states["count"] = [type(states["count"][0])(keyed=(moved,))]
    story.decide(4, story.snapshot(4, states))
    assert "I25" in story.broken
