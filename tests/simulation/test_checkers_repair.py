"""A repair that is tried out in a run: what a sound one may do, and one defect of it a test."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.chaos.checkers.observations import Lifecycle, PhaseBegan
from holdfast.chaos.checkers.repair import ENDS, RepairChecker
from holdfast.coordinator.ownership import files as owners
from holdfast.coordinator.ownership import fsck
from holdfast.coordinator.ownership.files import Claims
from tests.simulation.checker_world import JOB, STATE, Story


@pytest.fixture
def story() -> Story:
    story = Story()
    story.begin()
    story.complete(1)
    story.complete(2)
    story.write(f"{JOB}/chk-1/late", b"state")
    return story


def die(story: Story) -> list[str]:
    story.tell(Lifecycle(story.now_ms, "coordinator-1", "coordinator", "killed"))
    return story.broken


def test_a_sound_repair_is_only_tried(story: Story) -> None:
    before = dict(story.files)
    assert die(story) == []
    story.tell(PhaseBegan(story.now_ms, "liveness"))
    assert story.files == before
    assert f"{STATE}/{JOB}/chk-1/late" in story.files


def test_a_repair_that_deletes_what_a_checkpoint_names(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck.Directory, "claims", lambda self: Claims(frozenset(), False))
    assert die(story) == ["I23"]
    assert "which a completed checkpoint names" in story.violations[0][1]


def test_a_repair_that_takes_a_checkpoint_away(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = owners._of_checkpoint

    def wrong(evidence: Any, number: int, name: str, path: str, claims: Claims) -> Any:
        return owners._orphaned("wrong") if name == "_claim" else judge(evidence, number, name, path, claims)

    monkeypatch.setattr(owners, "_of_checkpoint", wrong)
    assert die(story) == ["I29"]


def test_a_repair_that_leaves_orphans(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck, "refusal", lambda evidence, doubt: "not today")
    assert die(story) == ["I24"]


def test_a_repair_that_fails(story: Story) -> None:
    story.files[f"{STATE}/{JOB}/submissions/1.json"] = b"{"
    assert die(story) == ["I29"]


@pytest.mark.parametrize("left", range(ENDS))
def test_one_run_of_three_tries_a_repair_at_its_end(story: Story, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck, "refusal", lambda evidence, doubt: "not today")
    story.now_ms += left - story.now_ms % ENDS
    (checker,) = (each for each in story.checkers if isinstance(each, RepairChecker))
    checker.at_end()
    assert story.broken == (["I24"] if left == 0 else [])
