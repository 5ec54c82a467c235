"""Whose a savepoint is: what its user asked for counts, whatever the job has on record."""

from __future__ import annotations

import pytest

from holdfast.barriers.jobgraph import ClaimMode, Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.observations import Submitted
from holdfast.coordinator.ha.records import RestorePoint
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.layout import METADATA_NAME, OWNER_NAME
from tests.simulation.checker_world import SAVEPOINTS, Story

FOLDER = f"{SAVEPOINTS}/savepoint-2"


def ask(story: Story, driver: str, mode: ClaimMode, restore: str = FOLDER) -> None:
    """A driver submits the job from the savepoint."""
    submission = Submission(story.graph, restore=restore, claim_mode=mode, driver_nonce=driver)
    story.tell(Submitted(story.now_ms, driver, submission))


def resumed(mode: ClaimMode, restore: str = FOLDER, *, checkpoint: bool = True) -> Story:
    """A job that goes on from its savepoint, and has it on record as given to it."""
    story = Story()
    story.begin()
    story.complete(1)
    story.complete(2, CheckpointKind.STOP_SAVEPOINT)
    ask(story, "driver-2", mode, restore)
    story.lead()
    base = RestorePoint(2, FOLDER, 0, CheckpointKind.STOP_SAVEPOINT, explicit=True, claim="mine")
    story.submit(2, base, 3, restore=restore, driver="driver-2")
    story.record_attempt(2, folder=FOLDER)
    story.deploy(2)
    if checkpoint:
        story.complete(3)
    return story


@pytest.mark.parametrize("name", [METADATA_NAME, "count-0-1"])
def test_a_savepoint_that_its_user_keeps_is_deleted(name: str) -> None:
    story = resumed(ClaimMode.NO_CLAIM)
    assert story.broken == []
    story.delete(f"savepoint-2/{name}", SAVEPOINTS)
    assert set(story.broken) == {"I25"}


@pytest.mark.parametrize("restore", [FOLDER, f"{FOLDER}/{METADATA_NAME}", f"{FOLDER}/"])
def test_a_savepoint_that_its_user_gave_away_is_deleted(restore: str) -> None:
    story = resumed(ClaimMode.CLAIM, restore)
    for name in (METADATA_NAME, "count-0-1"):
        story.delete(f"savepoint-2/{name}", SAVEPOINTS)
    assert story.broken == []


def test_a_savepoint_that_its_user_keeps_gets_an_owner() -> None:
    story = resumed(ClaimMode.NO_CLAIM)
    story.put(f"savepoint-2/{OWNER_NAME}", b"{}", SAVEPOINTS)
    assert story.broken == ["I25"]
    assert "did not get" in story.violations[0][1]


def test_a_checkpoint_that_needs_a_file_of_a_savepoint() -> None:
    story = resumed(ClaimMode.NO_CLAIM)
    story.claim(4)
    states = story.acknowledge(4)
    counted = states["count"][0].keyed[0]
    handle = counted.parts[0]
    assert isinstance(handle, FileHandle)
    story.files[f"{SAVEPOINTS}/savepoint-2/extra"] = story.files[f"/state/{story.folder(4)}/{handle.path}"]
    borrowed = FileHandle("../../../savepoints/savepoint-2/extra", handle.length, handle.checksum)
    moved = type(counted)(counted.key_groups, counted.format, counted.states, (borrowed,))
    states["count"] = [type(states["count"][0])(keyed=(moved,))]
    story.decide(4, story.snapshot(4, states))
    assert "I25" in story.broken


def test_a_savepoint_that_its_user_gave_away_outlives_the_job() -> None:
    story = resumed(ClaimMode.CLAIM)
    story.finish(3)
    story.end()
    assert story.broken == ["I24"]
    assert "which it had claimed" in story.violations[0][1]


def test_a_savepoint_that_the_job_refused_to_take_stays() -> None:
    """It goes on from it; another driver would give it away, and is refused."""
    story = resumed(ClaimMode.NO_CLAIM)
    ask(story, "driver-3", ClaimMode.CLAIM)
    story.finish(3)
    story.end()
    assert story.broken == []


def test_a_savepoint_that_an_older_submission_took_outlives_the_job() -> None:
    """The newest one goes on from it too, since the older one has completed nothing, and names no snapshot."""
    story = Story()
    story.begin()
    story.complete(1)
    story.complete(2, CheckpointKind.STOP_SAVEPOINT)
    ask(story, "driver-2", ClaimMode.CLAIM)
    base = RestorePoint(2, FOLDER, 0, CheckpointKind.STOP_SAVEPOINT, explicit=True, claim="theirs")
    for number, driver in ((2, "driver-2"), (3, "driver-3")):
        story.lead()
        story.submit(number, base, 3, restore=FOLDER if number == 2 else None, driver=driver)
        story.record_attempt(2, folder=FOLDER)
        story.deploy(2)
    story.complete(3)
    story.finish(3)
    story.end()
    assert story.broken == ["I24"]


@pytest.mark.parametrize(("replaced", "broken"), [(False, ["I25"]), (True, [])])
def test_a_user_deletes_what_the_job_was_given(replaced: bool, broken: list[str]) -> None:
    story = resumed(ClaimMode.CLAIM) if replaced else resumed(ClaimMode.CLAIM, checkpoint=False)
    story.delete(f"savepoint-2/{METADATA_NAME}", SAVEPOINTS, actor="user")
    assert sorted(set(story.broken)) == broken
    assert any("had not replaced" in text or "has not replaced" in text for _, text in story.violations) is not replaced
