"""Tasks are told of checkpoints that are off: who must tell, by when, and what excuses him."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.barriers.messages import CancelTasks, NotifyCheckpointAborted, Registered
from holdfast.chaos.checkers.notices import NOTICE_MS_MAX, NoticesChecker
from holdfast.chaos.checkers.observations import Answered, Lifecycle
from tests.simulation.checker_world import Story, process


@pytest.fixture
def story() -> Story:
    """Checkpoint 2 was triggered and is aborted. No other checker looks at this coordinator, of which only the slots are there."""
    story = Story()
    story.checkers = [each for each in story.checkers if isinstance(each, NoticesChecker)]
    slots, coordinator = [SimpleNamespace(connected=True, session="s")], SimpleNamespace(pending=[], attempt=1)
    service = SimpleNamespace(_master=SimpleNamespace(slot_pool=SimpleNamespace(slots=slots), coordinator=coordinator))
    story.live_coordinators = [process("coordinator-1", services=[service])]
    story.begin()
    story.live_workers = [worker("s", story.attempt)]
    story.complete(1)
    story.claim(2)
    story.trigger(2)
    story.abort(2)
    return story


def worker(session: str, *attempts: int, slot: int = 0) -> SimpleNamespace:
    """A worker with tasks of these attempts."""
    subtasks = [SimpleNamespace(subtask=SimpleNamespace(attempt=attempt)) for attempt in attempts]
    parts = {"slot": slot, "session": SimpleNamespace(session=session), "hears_commands": True}
    return process(f"worker-{slot}.1", subtasks=lambda: subtasks, **parts)


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


@pytest.fixture
def wide(story: Story) -> Story:
    """Another worker has tasks, too."""
    story.live_workers.append(worker("t", story.attempt, slot=1))
    story.live_coordinators[0].services[0]._master.slot_pool.slots.append(SimpleNamespace(connected=True, session="t"))
    return story


def test_one_is_told_and_another_is_not(wide: Story) -> None:
    decided_ms = wide.now_ms - 1  # when the abort was stored
    wide.command(NotifyCheckpointAborted(wide.attempt, 2), 0)
    assert broken_later(wide) == ["I30"]
    told = f"checkpoint 2 was aborted at {decided_ms} ms, and coordinator-1 has sent no notice to a task in slot 1 of it"
    assert wide.violations == [("I30", told)]


def test_each_is_told(wide: Story) -> None:
    wide.command(NotifyCheckpointAborted(wide.attempt, 2), 0)
    wide.command(NotifyCheckpointAborted(wide.attempt, 2), 1)
    assert broken_later(wide) == []


@pytest.mark.parametrize(("live", "broken"), [((), []), ((2,), ["I30"])])
def test_who_registers_is_told_by_the_answer(wide: Story, live: tuple[int, ...], broken: list[str]) -> None:
    wide.command(NotifyCheckpointAborted(wide.attempt, 2), 0)
    answer = Registered(1, "t", wide.attempt, None, 1, live, 1_000, 5_000)
    wide.tell(Answered(wide.now_ms, "coordinator-1", "worker-1.1", "register", answer))
    assert broken_later(wide) == broken


def test_who_has_no_command_stream_is_told_when_it_is_open_again(wide: Story) -> None:
    """Its reader knows that it broke, and its writer does not yet."""
    wide.command(NotifyCheckpointAborted(wide.attempt, 2), 0)
    wide.live_workers[1].hears_commands = False
    assert broken_later(wide) == []
    wide.live_workers[1].hears_commands = True
    assert broken_later(wide) == ["I30"]


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
    slot = story.live_coordinators[0].services[0]._master.slot_pool.slots[0]
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
