"""Tasks that fail by what can't be: whose frames those were, if anybody forged some."""

from __future__ import annotations

import pytest

from holdfast.barriers.messages import SubtaskStatus, TaskState
from holdfast.chaos.checkers.attempts import AttemptsChecker
from holdfast.chaos.checkers.observations import FaultBegan, Reported
from tests.simulation.checker_world import Story


@pytest.fixture
def story() -> Story:
    story = Story()
    story.checkers = [each for each in story.checkers if isinstance(each, AttemptsChecker)]
    story.begin()
    return story


def fail(story: Story, error: str) -> list[tuple[str, str]]:
    status = SubtaskStatus(story.attempt, "count" * 6, 0, TaskState.FAILED, error=error)
    story.tell(Reported(story.now_ms, "worker-0.1", 0, status))
    return story.violations


def test_a_task_fails_by_a_frame_that_nobody_of_the_job_sent(story: Story) -> None:
    story.tell(FaultBegan(story.now_ms, 0, "forged_frames"))
    assert fail(story, "ProtocolError: a frame of attempt 9") == [("I15", "worker-0.1 fails by what came to its data port")]


def test_a_task_fails_by_a_mistake_of_its_own(story: Story) -> None:
    story.tell(FaultBegan(story.now_ms, 0, "drop"))
    told = "worker-0.1 fails by what can't be: InvariantError: a timer twice"
    assert fail(story, "InvariantError: a timer twice") == [("I15", told)]


def test_user_code_may_fail(story: Story) -> None:
    assert fail(story, "KeyError: 7") == []
