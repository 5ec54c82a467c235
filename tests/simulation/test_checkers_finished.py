"""What a checkpoint says of tasks that have finished: one rule broken a test."""

from __future__ import annotations

import pytest

from holdfast.barriers.messages import AcknowledgeCheckpoint, OperatorMetrics, SubtaskMetrics, SubtaskStatus, TaskState
from holdfast.chaos.checkers.observations import Reported
from tests.simulation.checker_world import Story

COUNT = "count" * 6


@pytest.fixture
def story() -> Story:
    story = Story(parallelism=2)
    story.begin()
    return story


def drained(story: Story, subtask: int, *, rows: int = 0) -> None:
    """A subtask tells of its end, and of what it has emitted."""
    metrics = SubtaskMetrics(COUNT, subtask, operators=(OperatorMetrics("count", records_out=rows),))
    status = SubtaskStatus(story.attempt, COUNT, subtask, TaskState.RUNNING, drained=True, metrics=metrics)
    story.tell(Reported(story.now_ms, f"worker-{subtask}.1", subtask, status))


def complete(story: Story, number: int, *finished: int, told: str | None = None) -> None:
    """A checkpoint that these subtasks acknowledge as finished. `told`: what it says of them; None: the same."""
    story.claim(number)
    story.trigger(number)
    states = story.acknowledge(number)
    for subtask in finished:
        ack = AcknowledgeCheckpoint(story.attempt, number, COUNT, subtask, story.states(number, subtask)[COUNT], finished=True)
        story.tell(Reported(story.now_ms, f"worker-{subtask}.1", subtask, ack))
    text = ",".join(f"{COUNT}:{subtask}" for subtask in finished) if told is None else told
    story.decide(number, story.snapshot(number, states, properties={"finished_tasks": text} if text else {}))
    story.notify(number)


def restored(story: Story, number: int) -> None:
    story.record_attempt(number)
    story.deploy(number)


def test_tasks_that_have_finished_are_named_and_emit_nothing_behind_a_restore(story: Story) -> None:
    for subtask in (0, 1):
        drained(story, subtask, rows=5)
    complete(story, 1, 0, 1)
    restored(story, 1)
    for subtask in (0, 1):
        drained(story, subtask)
    assert story.broken == []


def test_a_task_that_had_finished_is_not_named(story: Story) -> None:
    drained(story, 0)
    complete(story, 1, 0, told="")
    assert story.broken == ["I11"]


def test_a_task_is_named_before_it_has_come_to_its_end(story: Story) -> None:
    drained(story, 0)
    complete(story, 1, 0, 1)
    assert story.broken == ["I11"]


@pytest.mark.parametrize(("finished", "broken"), [((0, 1), ["I8"]), ((0,), [])])
def test_a_task_that_had_finished_emits_again(story: Story, finished: tuple[int, ...], broken: list[str]) -> None:
    for subtask in finished:
        drained(story, subtask)
    complete(story, 1, *finished)
    restored(story, 1)
    drained(story, 0, rows=3)
    assert story.broken == broken, "of a vertex that was partly at its end another subtask may go on with its rows"
