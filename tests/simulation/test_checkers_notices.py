"""Tasks are told of checkpoints that are off: who must tell, by when, and what excuses him."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from barriers.messages import CancelTasks
from chaos.checkers.notices import NOTICE_MS_MAX, NoticesChecker
from chaos.observations import Lifecycle
from tests.simulation.checker_world import Story, process


@pytest.fixture
def story() -> Story:
    """Checkpoint 2 was triggered and is aborted. No other checker looks at this coordinator, of which only the slots are there."""
    story = Story()
    story.checkers = [each for each in story.checkers if isinstance(each, NoticesChecker)]
    slots, coordinator = [SimpleNamespace(connected=True, session="s")], SimpleNamespace(pending=[], attempt=1)
    service = SimpleNamespace(_master=SimpleNamespace(workforce=SimpleNamespace(slots=slots), coordinator=coordinator))
    story.live_coordinators = [process("coordinator-1", services=[service])]
    story.begin()
    story.live_workers = [worker("s", story.attempt)]
    story.complete(1)
    story.claim(2)
    story.trigger(2)
    story.abort(2)
    return story


def worker(session: str, *attempts: int) -> SimpleNamespace:
    """A worker with tasks of these attempts."""
    subtasks = [SimpleNamespace(subtask=SimpleNamespace(attempt=attempt)) for attempt in attempts]
    return process("worker-0.1", session=SimpleNamespace(session=session), subtasks=lambda: subtasks)


def broken_later(story: Story) -> list[str]:
    (checker,) = (each for each in story.checkers if isinstance(each, NoticesChecker))
    checker.look()
    assert story.broken == []
    story.now_ms += NOTICE_MS_MAX + 1
    checker.look()
    return story.broken


def test_nobody_is_told(story: Story) -> None:
    assert broken_later(story) == ["I30"]


def test_everybody_is_told(story: Story) -> None:
    story.notify_aborted(2)
    assert broken_later(story) == []


@pytest.mark.parametrize("change", ["killed", "paused"])
def test_who_should_tell_is_gone(story: Story, change: str) -> None:
    story.tell(Lifecycle(story.now_ms, "coordinator-1", "coordinator", change))
    assert broken_later(story) == []


def test_the_attempt_is_over(story: Story) -> None:
    story.command(CancelTasks(story.attempt))
    assert broken_later(story) == []


def test_another_one_leads(story: Story) -> None:
    story.lead()
    assert broken_later(story) == []


def test_who_can_be_told_later_is_told_later(story: Story) -> None:
    """No command stream is open: the notice waits for one."""
    slot = story.live_coordinators[0].services[0]._master.workforce.slots[0]
    slot.connected = False
    assert broken_later(story) == []
    slot.connected = True
    assert broken_later(story) == ["I30"]


def test_worker_that_replaced_another_has_nothing_to_be_told_of(story: Story) -> None:
    """Its stream is the only one that is open, and it has no task; a newer attempt is none of that checkpoint's either."""
    (asked,) = story.live_workers
    story.live_workers = [worker("s")]
    assert broken_later(story) == []
    story.live_workers = [worker("s", story.attempt + 1)]
    assert broken_later(story) == []
    story.live_workers = [asked]
    assert broken_later(story) == ["I30"]


def test_tasks_of_a_worker_whose_session_is_over_can_not_be_told(story: Story) -> None:
    story.live_workers = [worker("older", story.attempt), worker("s")]
    assert broken_later(story) == []


def test_leader_that_got_no_clear_answer_asks_again_before_it_tells(story: Story) -> None:
    coordinator = story.live_coordinators[0].services[0]._master.coordinator
    coordinator.pending.append(SimpleNamespace(checkpoint_id=2))
    assert broken_later(story) == []
    coordinator.pending.clear()
    assert broken_later(story) == ["I30"]


def test_tasks_that_were_never_asked_need_not_be_told() -> None:
    story = Story()
    story.begin()
    story.claim(1)
    story.abort(1)
    assert broken_later(story) == []


def test_a_leader_that_has_given_up_the_attempt_tells_its_tasks_nothing_more(story: Story) -> None:
    story.live_coordinators[0].services[0]._master.coordinator.attempt = None
    assert broken_later(story) == []
