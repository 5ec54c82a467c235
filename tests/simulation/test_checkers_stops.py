"""Stops that a failure cut off: tried again, or their user hears why not."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.chaos.checkers.observations import Answered, FaultBegan, Requested
from holdfast.chaos.checkers.stops import RETRY_MS, StopsChecker
from holdfast.chaos.cluster.coordinator_host import UserRequest
from holdfast.coordinator.views import TriggerView
from tests.simulation.checker_world import Story

STOP = CheckpointKind.STOP_SAVEPOINT
CUT_OFF = FailureReason.JOB_FAILOVER


@dataclass
class Told(Story):
    """What the job's leader would answer to whoever asks for a trigger."""

    views: dict[str, TriggerView] = field(default_factory=dict)

    def begin(self) -> None:
        self.checkers = [each for each in self.checkers if isinstance(each, StopsChecker)]
        super().begin()
        self.led_by()

    def led_by(self) -> None:
        """This epoch's leader is the only one that lives."""
        service = SimpleNamespace(epoch=self.epoch, _master=SimpleNamespace(triggers=self.views))
        self.live_coordinators = [SimpleNamespace(services=[service])]

    def view(self, failure: FailureReason | None = None, *, in_progress: bool = False) -> None:
        reason = None if failure is None else failure.value
        self.views["t"] = TriggerView("t", STOP, in_progress, failure=reason, failure_reason=reason)

    def ask(self) -> None:
        self.tell(Requested(self.now_ms, "user", "wish", UserRequest(STOP, "t")))
        self.tell(Answered(self.now_ms, f"coordinator-{self.epoch}", "user", "wish", "t"))

    def cut_off(self, number: int = 2, reason: FailureReason = CUT_OFF) -> None:
        """A try that ends with its attempt."""
        self.claim(number, STOP, trigger_id="t")
        self.abort(number, reason=reason)
        self.fail_over(1)

    def go_on(self, first: int, count: int = 2) -> None:
        """Checkpoints of the job's own."""
        for number in range(first, first + count):
            self.claim(number)
            self.abort(number)


@pytest.fixture
def story() -> Told:
    story = Told()
    story.begin()
    story.complete(1)
    return story


def test_one_that_nobody_tries_again(story: Told) -> None:
    story.view(in_progress=True)
    story.cut_off()
    story.go_on(3)
    said = "stop t was cut off, the job has gone on with 2 checkpoints, and no leader tries it again"
    assert story.violations == [("I30", said)]


def test_one_checkpoint_may_be_on_its_way_when_the_tasks_run_again(story: Told) -> None:
    story.view(in_progress=True)
    story.cut_off()
    story.go_on(3, 1)
    story.claim(4, STOP, trigger_id="t")
    story.go_on(5)
    assert story.broken == []


def test_each_attempt_and_each_leader_may_have_one_on_its_way(story: Told) -> None:
    story.view(in_progress=True)
    story.cut_off()
    story.go_on(3, 1)
    story.fail_over(1)
    story.go_on(4, 1)
    story.lead()
    story.led_by()
    story.go_on(5, 1)
    assert story.broken == []


def test_one_that_its_leader_does_not_know_of(story: Told) -> None:
    story.cut_off(reason=FailureReason.LEADER_CHANGED)
    story.go_on(3)
    assert story.broken == ["I30"]


def test_one_that_was_given_up_with_tries_left(story: Told) -> None:
    story.view(CUT_OFF)
    story.cut_off()
    story.go_on(3)
    assert story.broken == ["I30"]


def test_one_that_was_given_up_for_a_reason_of_its_own(story: Told) -> None:
    """Its next try took no id."""
    story.view(FailureReason.TRIGGER_FAILURE)
    story.cut_off()
    story.go_on(3)
    assert story.broken == []


def test_one_that_failed_by_itself_is_not_tried_again(story: Told) -> None:
    story.cut_off(reason=FailureReason.EXPIRED)
    story.go_on(3)
    assert story.broken == []


def test_one_that_has_had_its_tries(story: Told) -> None:
    story.view(CUT_OFF)
    for number in range(2, 7):
        story.cut_off(number)
    story.go_on(7)
    assert story.broken == []


def test_one_that_has_had_its_time(story: Told) -> None:
    story.view(CUT_OFF)
    story.cut_off()
    story.now_ms += RETRY_MS
    story.go_on(3)
    assert story.broken == []


def test_a_clock_that_jumped_may_take_its_time_from_it(story: Told) -> None:
    story.view(CUT_OFF)
    story.tell(FaultBegan(story.now_ms, 0, "clock_jump"))
    story.cut_off()
    story.go_on(3)
    assert story.broken == []


def test_one_of_an_older_submission_is_nobodys(story: Told) -> None:
    story.cut_off()
    story.submit(2, first=3)
    story.fail_over(0)
    story.go_on(3)
    assert story.broken == []


def test_one_that_was_accepted_and_takes_no_id(story: Told) -> None:
    story.view(in_progress=True)
    story.ask()
    story.go_on(2)
    assert story.broken == ["I30"]


def test_one_that_only_a_dead_leader_knew_of(story: Told) -> None:
    story.ask()
    story.lead()
    story.led_by()
    story.fail_over(1)
    story.go_on(2)
    assert story.broken == []


def test_one_that_was_asked_for_before_anything_ran() -> None:
    """It is refused by name, and nothing cut it off."""
    story = Told()
    story.checkers = [each for each in story.checkers if isinstance(each, StopsChecker)]
    story.lead()
    story.submit()
    story.led_by()
    story.view(FailureReason.NOT_ALL_TASKS_RUNNING)
    story.ask()
    story.record_attempt(0)
    story.deploy()
    story.go_on(1)
    assert story.broken == []


@pytest.mark.parametrize(("leaders", "broken"), [(1, []), (2, ["I30"])])
def test_one_that_is_asked_for_again_is_the_same_one_for_its_leader_alone(leaders: int, broken: list[str]) -> None:
    """The first answer, that nothing runs yet, was lost on its way. Another leader knows of no stop, and accepts it."""
    story = Told()
    story.checkers = [each for each in story.checkers if isinstance(each, StopsChecker)]
    story.lead()
    story.submit()
    story.view(FailureReason.NOT_ALL_TASKS_RUNNING)
    story.led_by()
    story.ask()
    story.record_attempt(0)
    story.deploy()
    if leaders == 2:
        story.lead()
        story.tell_led()
        story.led_by()
    story.ask()
    story.go_on(1)
    assert story.broken == broken


@pytest.mark.parametrize("in_progress", [True, False])
def test_nobody_waits_for_one_of_a_job_that_is_over(story: Told, in_progress: bool) -> None:
    story.view(None if in_progress else CUT_OFF, in_progress=in_progress)
    story.cut_off()
    story.finish(1)
    story.end()
    assert story.broken == (["I30"] if in_progress else [])
