"""CORE, part of the worker's session: one question of the coordinator, from its arrival to its answer.

Events and `now_ms` in, actions out; stacks are sampled, and answers made, by the shell (`answers.py`). One question at a time: a
newer one takes the place of an older, which the coordinator has given up by then. Nothing waits for an answer to be accepted."""

from __future__ import annotations

from holdfast.barriers.messages import SAMPLES_MAX, SAMPLING_MS_MAX, QuestionKind, WorkerQuestion
from holdfast.operators.worker.session_events import AnswerQuestion, TakeSample

INTERVAL_MS_MIN = 10
"""From one look at the stacks to the next, whatever the question says: a look holds the interpreter lock."""


class QuestionUnderWay:
    """The one question that is being answered, or none."""

    def __init__(self) -> None:
        self._question: WorkerQuestion | None = None
        self._left = 0
        self._interval_ms = INTERVAL_MS_MIN
        self._due_ms = 0
        self._until_ms = 0

    def ask(self, question: WorkerQuestion, now_ms: int) -> None:
        """Begin with a question, in place of one that is under way."""
        is_sampled = question.kind == QuestionKind.STACKS
        self._question = question
        self._left = min(SAMPLES_MAX, max(1, question.samples)) if is_sampled else 0
        self._interval_ms = min(SAMPLING_MS_MAX, max(INTERVAL_MS_MIN, question.interval_ms))
        self._due_ms, self._until_ms = now_ms, now_ms + SAMPLING_MS_MAX

    def forget(self) -> None:
        """The session is over: nobody waits for the answer."""
        self._question = None

    def next_deadline_ms(self) -> int | None:
        return self._due_ms if self._question is not None else None

    def advance(self, now_ms: int) -> list[TakeSample | AnswerQuestion]:
        """What is due. Samples that the control thread came too late for are left out, not made up for."""
        question = self._question
        if question is None or now_ms < self._due_ms:
            return []
        out: list[TakeSample | AnswerQuestion] = []
        if self._left:
            out.append(TakeSample(question))
            self._left -= 1
            self._due_ms = now_ms + self._interval_ms
        if not self._left or self._due_ms > self._until_ms:
            self._question = None
            out.append(AnswerQuestion(question))
        return out
