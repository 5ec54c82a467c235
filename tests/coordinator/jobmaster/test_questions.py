"""Questions to workers in the job master: each is answered or refused once, and none holds anything for ever."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import UNSET

from holdfast.barriers.messages import NumberedCommand, QuestionKind, TaskState, WorkerAnswer, WorkerQuestion
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.questions import ANSWER_MS, QUESTIONS_MAX
from holdfast.statebackends.errors import (
    FencedError,
    HoldfastError,
    NotFoundError,
    NotLeaderError,
    QuestionNotKnownError,
    WorkerBusyError,
    WorkerSilentError,
)
from tests.coordinator.doubles import word_count
from tests.coordinator.rig import Rig

KINDS = ("stacks", "log", "stdout")


class Asking(Rig):
    """A job whose workers answer questions."""

    def __init__(self, parallelism: int = 2, *, kinds: tuple[str, ...] = KINDS) -> None:
        self.kinds = kinds
        super().__init__(word_count(parallelism=parallelism))
        self.run()

    def register(self, slot: int, **fields: Any) -> Any:
        fields.setdefault("questions", self.kinds)
        return super().register(slot, **fields)

    def ask(self, slot: int, kind: QuestionKind = QuestionKind.STACKS, *, samples: int = 4, interval_ms: int = 50) -> int:
        """The ticket of the question."""
        self.tickets += 1
        self.feed(job_events.QuestionAsked(self.tickets, slot, kind, samples, interval_ms))
        return self.tickets

    def asked(self, slot: int) -> WorkerQuestion:
        """The newest that was sent to a slot."""
        return [question for line in self.lines(slot) if (question := line.question) is not UNSET][-1]

    def lines(self, slot: int) -> list[NumberedCommand]:
        sent = [action for action in self.actions if isinstance(action, job_actions.Deliver) and action.slot == slot]
        return [line for action in sent for line in action.commands]

    def reply(self, slot: int, asked: WorkerQuestion, /, **fields: Any) -> None:
        fields = {"epoch": self.setup.epoch, "session": self.sessions[slot], "attempt": asked.attempt, **fields}
        answer = WorkerAnswer(slot=slot, **{"question": asked.id, "kind": asked.kind, **fields})
        self.call(lambda ticket: job_events.AnswerReceived(ticket, answer))


def test_a_question_goes_beside_the_commands_and_its_answer_comes_back() -> None:
    rig = Asking()
    ticket = rig.ask(1)
    line = rig.lines(1)[-1]
    assert (line.command, line.number) == (None, len(rig.sent[1])), "as a keep-alive: no number of its own"
    assert ticket not in rig.answers
    question = rig.asked(1)
    assert (question.kind, question.attempt, question.samples, question.interval_ms) == ("stacks", 1, 4, 50)
    rig.reply(1, question)
    assert rig.answers[ticket].question == question.id
    assert rig.master.questions.next_deadline_ms() is None


def test_a_resumed_stream_does_not_bring_it_again() -> None:
    rig = Asking()
    rig.ask(1)
    rig.close_stream(1)
    assert all(line.question is UNSET for line in rig.open_stream(1))


def test_one_question_a_worker_and_a_few_in_all() -> None:
    rig = Asking(parallelism=QUESTIONS_MAX + 1)
    first = rig.ask(0)
    assert isinstance(rig.answers[rig.ask(0, QuestionKind.LOG)], WorkerBusyError)
    for slot in range(1, QUESTIONS_MAX):
        assert rig.ask(slot) not in rig.answers
    assert isinstance(rig.answers[rig.ask(QUESTIONS_MAX)], WorkerBusyError)
    rig.reply(0, rig.asked(0))
    assert not isinstance(rig.answers[first], HoldfastError)
    assert rig.ask(QUESTIONS_MAX) not in rig.answers


@pytest.mark.parametrize(
    ("kinds", "error"), [((), QuestionNotKnownError), (("log",), QuestionNotKnownError), (("stacks", "heap"), None)]
)
def test_a_worker_of_another_version_is_not_asked_what_it_does_not_know(
    kinds: tuple[str, ...], error: type[HoldfastError] | None
) -> None:
    rig = Asking(kinds=kinds)
    answer = rig.answers.get(rig.ask(0))
    assert answer is None if error is None else isinstance(answer, error)
    assert bool([line for line in rig.lines(0) if line.question is not UNSET]) == (error is None)


def test_a_worker_that_says_that_it_does_not_know() -> None:
    rig = Asking()
    ticket = rig.ask(0)
    rig.reply(0, rig.asked(0), known=False)
    assert isinstance(rig.answers[ticket], QuestionNotKnownError)


def test_an_answer_that_never_comes_is_given_up() -> None:
    rig = Asking()
    ticket = rig.ask(0)
    rig.pass_time(200 + ANSWER_MS - 1)
    assert ticket not in rig.answers
    rig.pass_time(1)
    assert isinstance(rig.answers[ticket], WorkerSilentError)
    with pytest.raises(FencedError):
        rig.reply(0, rig.asked(0))
    assert rig.ask(0) not in rig.answers, "the worker can be asked again"


@pytest.mark.parametrize("fields", [{"question": "another"}, {"session": "another"}, {"epoch": 0}])
def test_an_answer_to_nothing_that_was_asked_is_refused(fields: dict[str, Any]) -> None:
    rig = Asking()
    ticket = rig.ask(0)
    with pytest.raises(FencedError):
        rig.reply(0, rig.asked(0), **fields)
    assert ticket not in rig.answers
    rig.reply(0, rig.asked(0))
    assert rig.answers[ticket].slot == 0


def test_an_answer_of_another_attempt_is_refused_at_once() -> None:
    rig = Asking()
    ticket = rig.ask(0)
    with pytest.raises(FencedError, match="runs 7"):
        rig.reply(0, rig.asked(0), attempt=7)
    assert isinstance(rig.answers[ticket], WorkerSilentError)


@pytest.mark.parametrize("kind", [QuestionKind.LOG, QuestionKind.STDOUT])
def test_log_and_output_are_of_the_process_whatever_attempt_it_runs(kind: QuestionKind) -> None:
    rig = Asking()
    ticket = rig.ask(0, kind)
    rig.reply(0, rig.asked(0), attempt=7)
    assert rig.answers[ticket].kind == kind


def test_a_worker_that_registers_again_or_is_replaced_answers_no_more() -> None:
    rig = Asking()
    ticket = rig.ask(0)
    rig.register(0, task_attempt=1)
    assert isinstance(rig.answers[ticket], WorkerSilentError)
    assert rig.master.questions.next_deadline_ms() is None


def test_a_new_attempt_ends_a_question_about_the_old_one() -> None:
    rig = Asking()
    ticket = rig.ask(1)
    rig.report(0, 1, TaskState.FAILED, "Boom: bang")
    rig.pass_time(60_000)
    assert isinstance(rig.answers[ticket], WorkerSilentError)


def test_no_slot_no_worker_and_no_stream() -> None:
    rig = Asking()
    assert isinstance(rig.answers[rig.ask(9)], NotFoundError)
    rig.close_stream(0)
    assert isinstance(rig.answers[rig.ask(0)], WorkerSilentError)
    rig.pass_time(5_000)
    assert isinstance(rig.answers[rig.ask(0)], NotFoundError)


def test_the_end_of_the_job_and_of_the_leadership_ends_questions() -> None:
    rig = Asking()
    ticket = rig.ask(0)
    rig.feed(job_events.LeadershipEnded("the process stops"))
    assert isinstance(rig.answers[ticket], NotLeaderError)
    rig = Asking()
    ticket = rig.ask(0)
    rig.call(job_events.CancelRequested)
    rig.pass_time(60_000)
    assert isinstance(rig.answers[ticket], HoldfastError)
    assert rig.master.state.is_terminal
    assert isinstance(rig.answers[rig.ask(0)], FencedError)


class QuestionMachine(RuleBasedStateMachine):
    """Whatever happens: each question has one answer or refusal, within its time, and what waits is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Asking(parallelism=3)
        self.open: dict[int, int] = {}
        """Ticket -> when it was asked."""

    @rule(slot=st.integers(0, 2), kind=st.sampled_from(QuestionKind), samples=st.integers(-5, 500), interval=st.integers(-5, 9_000))
    def ask(self, slot: int, kind: QuestionKind, samples: int, interval: int) -> None:
        ticket = self.rig.ask(slot, kind, samples=samples, interval_ms=interval)
        self.open[ticket] = self.rig.now

    @rule(slot=st.integers(0, 2), attempt=st.integers(0, 2), known=st.booleans())
    def answer(self, slot: int, attempt: int, known: bool) -> None:
        asked = [line.question for line in self.rig.lines(slot) if line.question is not UNSET]
        for question in asked[-1:]:
            assert question is not UNSET
            with contextlib.suppress(FencedError):
                self.rig.reply(slot, question, attempt=attempt, known=known)

    @rule(slot=st.integers(0, 2), number=st.integers(1, 9))
    def replace(self, slot: int, number: int) -> None:
        with contextlib.suppress(FencedError):
            self.rig.register(slot, task_attempt=number)

    @rule(slot=st.integers(0, 2))
    def cut(self, slot: int) -> None:
        self.rig.close_stream(slot)

    @rule(by_ms=st.integers(1, 9_000))
    def wait(self, by_ms: int) -> None:
        self.rig.pass_time(by_ms)

    @invariant()
    def each_is_answered_once_and_in_time(self) -> None:
        ended = [action.ticket for action in self.rig.actions if isinstance(action, job_actions.Answer | job_actions.Refuse)]
        for ticket, since_ms in list(self.open.items()):
            assert ended.count(ticket) <= 1
            if ended.count(ticket):
                del self.open[ticket]
            else:
                assert self.rig.now - since_ms <= 5_000 + ANSWER_MS
        assert len(self.open) <= 3, "one a slot"


TestQuestions = QuestionMachine.TestCase
TestQuestions.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
