"""What a worker says about itself: the core of one question, stacks of real threads, and the kept log."""

from __future__ import annotations

import itertools
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.barriers import codec
from holdfast.barriers.messages import (
    LOG_CHARACTERS_MAX,
    SAMPLES_MAX,
    SAMPLING_MS_MAX,
    STACK_FRAMES_MAX,
    NumberedCommand,
    Registered,
    SampledStack,
    SubtaskKey,
    WorkerAnswer,
    WorkerQuestion,
)
from holdfast.operators.worker.answers import QUESTIONS, Answering
from holdfast.operators.worker.kept_log import MESSAGE_BYTES_MAX, KeptLog, keeping_log
from holdfast.operators.worker.kept_output import KeptOutput
from holdfast.operators.worker.sampling import INTERVAL_MS_MIN, QuestionUnderWay
from holdfast.operators.worker.session import Session
from holdfast.operators.worker.session_events import (
    Action,
    AnswerQuestion,
    CommandReceived,
    DeadlineReached,
    OpenStream,
    PostHeartbeat,
    RegistrationAnswered,
    SendRegister,
    TakeSample,
    WorkerIdentity,
)
from holdfast.operators.worker.stacks import StackSampler
from holdfast.statebackends.secrets import Secret

STACKS = WorkerQuestion("q1", "stacks", 1, 3, 50)
LOG = WorkerQuestion("q2", "log", 1)

# ------------------------------------------------------------------------------------------------------------ the core


def run(question: WorkerQuestion, *, late_ms: int = 0) -> tuple[list[int], int]:
    """When it looks, and when it answers; each time `late_ms` behind what is due."""
    core, now, looks = QuestionUnderWay(), 1_000, []
    core.ask(question, now)
    while (due := core.next_deadline_ms()) is not None:
        now = max(now, due) + late_ms
        for action in core.advance(now):
            looks += [now] if isinstance(action, TakeSample) else []
    return looks, now


def test_stacks_are_looked_at_as_often_as_is_asked_and_then_answered() -> None:
    assert run(STACKS) == ([1_000, 1_050, 1_100], 1_100)


def test_a_log_is_answered_at_once() -> None:
    assert run(LOG) == ([], 1_000)


def test_a_kind_that_is_not_known_is_answered_at_once() -> None:
    assert run(WorkerQuestion("q", "heap of a newer version", 1, 50, 50)) == ([], 1_000)


def test_samples_that_the_thread_came_too_late_for_are_left_out() -> None:
    looks, answered = run(replace(STACKS, samples=100), late_ms=2_000)
    assert len(looks) == 3
    assert answered <= 1_000 + SAMPLING_MS_MAX + 2_050


@given(samples=st.integers(-(2**70), 2**70), interval=st.integers(-(2**70), 2**70), late=st.integers(0, 7_000))
def test_a_question_of_any_numbers_is_bounded(samples: int, interval: int, late: int) -> None:
    looks, answered = run(WorkerQuestion("q", "stacks", 1, samples, interval), late_ms=late)
    assert 1 <= len(looks) <= SAMPLES_MAX
    assert all(later - earlier >= INTERVAL_MS_MIN for earlier, later in itertools.pairwise(looks))
    assert answered <= 1_000 + 2 * SAMPLING_MS_MAX + 2 * late


def test_a_newer_question_takes_the_place_of_an_older() -> None:
    core = QuestionUnderWay()
    core.ask(STACKS, 0)
    core.advance(0)
    core.ask(LOG, 10)
    assert core.advance(10) == [AnswerQuestion(LOG)]
    assert (core.next_deadline_ms(), core.advance(1_000)) == (None, [])


# --------------------------------------------------------------------------------------------------------- the session

IDENTITY = WorkerIdentity("job", 1, 1, 1, "nonce", 1, "host", "tcp://h:1", "dir", questions=QUESTIONS)


class Asked:
    """A session that is registered in attempt 0, and is asked."""

    def __init__(self) -> None:
        self.session = Session(IDENTITY, random.Random(1))
        (sent,) = self.session.handle(DeadlineReached(), now_ms=0)
        assert isinstance(sent, SendRegister)
        assert sent.body.questions == ("stacks", "log", "stdout")
        answer = Registered(1, "s1", 0, None, 0, (), 60_000, 90_000)
        assert [type(each) for each in self.session.handle(RegistrationAnswered(answer), now_ms=0)] == [OpenStream]

    def line(self, question: WorkerQuestion, *, epoch: int = 1, session: str = "s1", number: int = 0) -> list[Action]:
        line = NumberedCommand(epoch, session, number, None, question)
        return self.session.handle(CommandReceived(codec.decode(codec.encode(line), NumberedCommand)), now_ms=10)


def test_a_question_comes_with_a_keep_alive_and_is_answered_in_its_session() -> None:
    asked = Asked()
    assert asked.line(STACKS) == [TakeSample(STACKS)]
    assert asked.session.next_deadline_ms() == 60
    assert asked.session.handle(DeadlineReached(), now_ms=60) == [TakeSample(STACKS)]
    assert asked.session.handle(DeadlineReached(), now_ms=110) == [TakeSample(STACKS), AnswerQuestion(STACKS, 1, "s1", 0)]
    assert asked.session.next_deadline_ms() == 60_000


@pytest.mark.parametrize("other", [{"epoch": 0}, {"session": "s0"}])
def test_a_question_of_another_epoch_or_session_is_not_heard(other: dict[str, int | str]) -> None:
    assert Asked().line(LOG, **other) == []  # type: ignore[arg-type]


def test_a_session_that_is_over_answers_nothing() -> None:
    asked = Asked()
    asked.line(STACKS)
    actions = asked.line(STACKS, epoch=2)
    assert [type(each) for each in actions] == [SendRegister]
    assert asked.session.next_deadline_ms() is None


def test_a_worker_of_before_takes_the_line_for_a_keep_alive() -> None:
    """As `codec` decoded it before there were questions: fields that are not known are left out."""
    text = json.loads(codec.encode(NumberedCommand(1, "s1", 7, None, LOG)))
    assert {name: text[name] for name in ("epoch", "session", "number", "command")} == {
        "epoch": 1,
        "session": "s1",
        "number": 7,
        "command": None,
    }
    assert "question" not in json.loads(codec.encode(NumberedCommand(1, "s1", 7, None)))


def test_heartbeats_go_before_answers() -> None:
    asked = Asked()
    asked.line(replace(STACKS, samples=100))
    actions = asked.session.handle(DeadlineReached(), now_ms=60_000)
    assert [type(each) for each in actions] == [PostHeartbeat, TakeSample, AnswerQuestion]


# ----------------------------------------------------------------------------------------------------- stacks of threads

KEY = SubtaskKey("v", 3)


class Hung:
    """A thread that waits in `hang_here`, `depth` calls further down."""

    def __init__(self, depth: int = 0) -> None:
        self.go_on, self.began = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hang, args=(depth, "a-row-of-a-customer"), name="hung")
        self.thread.start()
        self.began.wait(10)

    def hang(self, depth: int, secret_value: str) -> None:
        if depth:
            self.hang(depth - 1, secret_value)
        else:
            self.hang_here(secret_value)

    def hang_here(self, secret_value: str) -> None:
        self.began.set()
        self.go_on.wait(60)

    def close(self) -> None:
        self.go_on.set()
        self.thread.join(10)


@pytest.fixture
def hung() -> Iterator[Callable[..., Hung]]:
    made: list[Hung] = []

    def make(depth: int = 0) -> Hung:
        made.append(Hung(depth))
        return made[-1]

    yield make
    for each in made:
        each.close()


def stacks_of(sampler: StackSampler, thread: str = "hung") -> tuple[list[SampledStack], list[list[str]]]:
    code, stacks = sampler.found()
    found = [stack for stack in stacks if stack.thread == thread]
    return found, [[code[index].function for index in stack.frames] for stack in found]


def answer_of(sampler: StackSampler) -> bytes:
    code, stacks = sampler.found()
    return codec.encode(WorkerAnswer(1, 0, "s", 1, "q", "stacks", samples=sampler.samples, code=code, stacks=stacks))


def test_a_thread_that_hangs_is_found_where_it_hangs_and_for_whom(hung: Callable[..., Hung]) -> None:
    thread = hung().thread
    assert thread.ident is not None
    sampler = StackSampler(thread.ident, lambda: KEY)
    for _ in range(3):
        sampler.look()
    (stack,), (functions,) = stacks_of(sampler)
    assert functions[-3:] == ["Hung.hang_here", "Event.wait", "Condition.wait"]
    assert (stack.samples, stack.vertex, stack.subtask, stack.on_cpu, stack.idle) == (3, "v", 3, 0, False)
    (here,) = [line for line in sampler.found()[0] if line.function == "Hung.hang_here"]
    assert here.file.endswith("test_questions.py")
    assert here.own is False


def test_stacks_hold_no_values(hung: Callable[..., Hung]) -> None:
    thread = hung().thread
    assert thread.ident is not None
    sampler = StackSampler(thread.ident, lambda: None)
    sampler.look()
    assert b"a-row-of-a-customer" not in answer_of(sampler)


def test_a_thread_that_works_has_a_processor() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in itertools.takewhile(lambda _: not stop.is_set(), itertools.count())])
    thread.start()
    try:
        assert thread.ident is not None
        sampler = StackSampler(thread.ident, lambda: KEY)
        for _ in range(10):
            sampler.look()
            threading.Event().wait(0.02)
        seen = [stack for stack in sampler.found()[1] if stack.vertex]
        assert sum(stack.samples for stack in seen) == 10
        assert sum(stack.on_cpu + stack.off_cpu for stack in seen) in (0, 9), "known of each look but the first, or of none"
    finally:
        stop.set()
        thread.join(10)


def test_a_deep_stack_keeps_its_innermost_frames(hung: Callable[..., Hung]) -> None:
    thread = hung(300).thread
    assert thread.ident is not None
    sampler = StackSampler(thread.ident, lambda: KEY)
    sampler.look()
    (stack,), (functions,) = stacks_of(sampler)
    assert len(stack.frames) == STACK_FRAMES_MAX
    assert functions[-1] == "Condition.wait"


def test_stacks_beyond_the_bounds_are_counted(monkeypatch: pytest.MonkeyPatch, hung: Callable[..., Hung]) -> None:
    thread = hung().thread
    assert thread.ident is not None
    monkeypatch.setattr("holdfast.operators.worker.stacks.STACKS_MAX", 0)
    sampler = StackSampler(thread.ident, lambda: KEY)
    sampler.look()
    assert sampler.found()[1] == ()
    assert sampler.left_out >= 1
    monkeypatch.setattr("holdfast.operators.worker.stacks.CODE_LINES_MAX", 1)
    sampler.begin("next")
    sampler.look()
    assert len(sampler.found()[0]) <= 1
    assert sampler.left_out >= 1


def test_an_answer_decodes_as_it_was_sent_and_the_next_question_starts_over(hung: Callable[..., Hung]) -> None:
    thread = hung().thread
    assert thread.ident is not None
    answering = Answering(0, StackSampler(thread.ident, lambda: KEY), KeptLog(), KeptOutput())
    for expected in (2, 1):
        question = replace(STACKS, id=f"q-{expected}")
        for _ in range(expected):
            answering.sample(question)
        answer = answering.answer(AnswerQuestion(question, 1, "s", 4))
        assert codec.decode(codec.encode(answer), WorkerAnswer) == answer
        assert (answer.samples, answer.attempt, answer.known, answer.question) == (expected, 4, True, question.id)
        assert max(stack.samples for stack in answer.stacks) == expected


def test_log_and_output_are_answered_each_by_its_name() -> None:
    log, output = KeptLog(), KeptOutput()
    log.add(logging.makeLogRecord({"msg": "logged"}))
    output.add("printed\n")
    answering = Answering(0, StackSampler(0, lambda: None), log, output)
    for kind, word in (("log", "logged"), ("stdout", "printed")):
        answer = answering.answer(AnswerQuestion(WorkerQuestion("q", kind, 1), 1, "s", 1))
        assert answer.log is not None
        assert (answer.kind, answer.known, answer.log.text.split()[-1]) == (kind, True, word)


def test_a_question_that_is_not_known_is_answered_so() -> None:
    answering = Answering(0, StackSampler(0, lambda: None), KeptLog(), KeptOutput())
    answer = answering.answer(AnswerQuestion(WorkerQuestion("q", "heap", 1), 1, "s", 1))
    assert (answer.known, answer.kind, answer.stacks, answer.log) == (False, "heap", (), None)


# ---------------------------------------------------------------------------------------------------------- the kept log


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("test-of-kept-log")
    found.setLevel(logging.INFO)
    yield found
    found.setLevel(logging.NOTSET)


def test_what_loggers_let_through_is_kept(logger: logging.Logger) -> None:
    with keeping_log(()) as kept:
        logger.debug("not this")
        logger.info("row %d of %s", 7, "orders")
        logger.warning("late")
    logger.warning("behind the end")
    text = kept.read().text
    assert [line.split(" ", 1)[1] for line in text.splitlines()] == [
        "INFO test-of-kept-log: row 7 of orders",
        "WARNING test-of-kept-log: late",
    ]
    assert kept.read().changed_ms > 0


def test_secrets_are_not_shown(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT_LOG_PASSWORD", "correct-horse-battery")
    with keeping_log(("the-token-of-this-worker", "")) as kept:
        logger.info("x" * (MESSAGE_BYTES_MAX - 10) + "the-token-of-this-worker")
        logger.info("connects with correct-horse-battery")
        Secret("KEPT_LOG_PASSWORD").resolve()
        try:
            raise ValueError("correct-horse-battery is wrong")
        except ValueError:
            logger.exception("the-token-of-this-worker failed")
    text = kept.read().text
    assert "the-token" not in text
    assert "correct-horse" not in text
    assert "ValueError: *** is " in text


def test_a_message_can_not_pass_for_a_line_of_another(logger: logging.Logger) -> None:
    with keeping_log(()) as kept:
        logger.info("one\n2026-01-01T00:00:00.000Z ERROR holdfast.worker: forged\x1b[2J")
    (line,) = kept.read().text.splitlines()
    assert "\\n2026" in line
    assert "\\x1b[2J" in line


class _NoText:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_message_that_has_no_text_is_named_and_logging_goes_on(logger: logging.Logger) -> None:
    with keeping_log(()) as kept:
        logger.disabled = False
        record = logging.getLogRecordFactory()("n", logging.INFO, "f", 1, "%s", (_NoText(),), None)
        assert record.name == "n"
    assert "(a line that can't be shown)" in kept.read().text


def test_the_oldest_lines_go_and_are_counted(logger: logging.Logger) -> None:
    with keeping_log(()) as kept:
        for number in range(1_000):
            logger.info("%d %s", number, "x" * 1_000)
    found = kept.read()
    lines = found.text.splitlines()
    assert len(found.text) <= LOG_CHARACTERS_MAX
    assert len(lines) + found.left_out == 1_000
    assert " 999 x" in lines[-1]


def test_records_from_elsewhere_and_other_factories_are_left_alone(logger: logging.Logger) -> None:
    before = logging.getLogRecordFactory()
    with keeping_log(()) as kept:
        logging.makeLogRecord({"name": "n", "msg": "from elsewhere"})
        mine = logging.getLogRecordFactory()

        def theirs(*args: object, **kwargs: object) -> logging.LogRecord:
            return mine(*args, **kwargs)

        logging.setLogRecordFactory(theirs)
        logger.warning("through both")
    try:
        assert logging.getLogRecordFactory() is theirs
        logger.warning("behind the end")
        assert [line.rpartition(" ")[2] for line in kept.read().text.splitlines()] == ["both"]
    finally:
        logging.setLogRecordFactory(before)


def test_no_handler_is_added(logger: logging.Logger) -> None:
    before = list(logging.root.handlers), list(logging.getLogger("holdfast").handlers)
    with keeping_log(()):
        assert (list(logging.root.handlers), list(logging.getLogger("holdfast").handlers)) == before
