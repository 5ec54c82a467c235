"""Who asks the same gets the same answer; what is never answered holds nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import QuestionKind, WorkerAnswer
from holdfast.coordinator.dispatcher.reading import questions
from holdfast.coordinator.dispatcher.reading.questions import (
    CALLERS_MAX,
    FRESH_MS,
    GIVEN_UP_MS,
    UNDER_WAY_MAX,
    Question,
    WorkerQuestions,
)
from holdfast.coordinator.jobmaster.events import QuestionAsked
from holdfast.statebackends.errors import NotFoundError, WorkerBusyError, WorkerSilentError

ASKED = Question("job", 0, QuestionKind.STACKS, 20, 50)
ANSWER = WorkerAnswer(1, 0, "s", 1, "q", "stacks")


class Jobs:
    """In place of `JobCalls`: notes what is asked."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.asked: list[tuple[QuestionAsked, Future[Any]]] = []
        self.of = WorkerQuestions(self, self)  # type: ignore[arg-type]

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return 1_000_000 + self.now_ms

    def led(self, job_id: str) -> Jobs:
        if job_id != "job":
            raise NotFoundError(f"job {job_id} not found")
        return self

    def call(self, make: Callable[[int], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((make(len(self.asked)), future))
        return future


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def test_many_who_ask_the_same_cost_one_question_and_so_do_those_who_come_soon(jobs: Jobs) -> None:
    first, second = jobs.of.ask(ASKED), jobs.of.ask(ASKED)
    (event, future), = jobs.asked
    assert (event.slot, event.kind, event.samples, event.interval_ms) == (0, QuestionKind.STACKS, 20, 50)
    jobs.now_ms = 900
    future.set_result(ANSWER)
    assert first.result(0) == second.result(0)
    assert (first.result(0).answer, first.result(0).as_of_ms) == (ANSWER, 1_000_900)
    jobs.now_ms += FRESH_MS - 1
    assert jobs.of.ask(ASKED).result(0) == first.result(0)
    jobs.now_ms += 1
    assert not jobs.of.ask(ASKED).done()
    assert len(jobs.asked) == 2


def test_another_question_is_another_one(jobs: Jobs) -> None:
    jobs.of.ask(ASKED)
    jobs.of.ask(ASKED._replace(samples=1))
    jobs.of.ask(ASKED._replace(slot=1))
    assert len(jobs.asked) == 3


def test_a_caller_who_leaves_takes_nothing_from_the_others(jobs: Jobs) -> None:
    first, second = jobs.of.ask(ASKED), jobs.of.ask(ASKED)
    assert first.cancel()
    jobs.asked[0][1].set_result(ANSWER)
    assert second.result(0).answer == ANSWER


def test_an_error_is_everybodys_and_is_not_kept(jobs: Jobs) -> None:
    callers = [jobs.of.ask(ASKED), jobs.of.ask(ASKED)]
    jobs.asked[0][1].set_exception(WorkerSilentError("silent", slot=0))
    for caller in callers:
        with pytest.raises(WorkerSilentError):
            caller.result(0)
    assert not jobs.of.ask(ASKED).done()


def test_an_unknown_job_asks_nobody(jobs: Jobs) -> None:
    with pytest.raises(NotFoundError):
        jobs.of.ask(ASKED._replace(job_id="other"))
    assert jobs.asked == []


def test_what_waits_and_who_waits_is_bounded_and_ends(jobs: Jobs) -> None:
    callers = [jobs.of.ask(ASKED) for _ in range(CALLERS_MAX)]
    with pytest.raises(WorkerBusyError):
        jobs.of.ask(ASKED)
    for slot in range(1, UNDER_WAY_MAX):
        jobs.of.ask(ASKED._replace(slot=slot))
    with pytest.raises(WorkerBusyError):
        jobs.of.ask(ASKED._replace(slot=UNDER_WAY_MAX))
    jobs.now_ms = GIVEN_UP_MS
    assert not jobs.of.ask(ASKED).done(), "a job that takes no turns holds nobody up for ever"
    for caller in callers:
        with pytest.raises(WorkerSilentError):
            caller.result(0)
    jobs.asked[0][1].set_result(ANSWER)  # too late for all of them
    jobs.asked[-1][1].set_result(replace(ANSWER, question="second"))
    assert jobs.of.ask(ASKED).result(0).answer.question == "second"


def test_the_newest_answers_alone_are_kept(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "KEPT_MAX", 2)
    for slot in range(3):
        jobs.of.ask(ASKED._replace(slot=slot))
        jobs.asked[-1][1].set_result(replace(ANSWER, slot=slot))
    assert not jobs.of.ask(ASKED._replace(slot=0)).done()
    assert jobs.of.ask(ASKED._replace(slot=2)).done()
