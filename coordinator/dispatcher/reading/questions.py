"""SHELL: questions of people to workers, between those who ask and the jobs: who asks the same gets the same answer.

An answer is kept for a moment, so that many viewers cost a worker what one does. Whatever becomes of a question, it holds nothing
here for longer than it may take."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from holdfast.barriers.messages import QuestionKind, WorkerAnswer
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.threads import Clock
from holdfast.coordinator.jobmaster.events import QuestionAsked
from holdfast.coordinator.views import AnswerView
from holdfast.statebackends.errors import WorkerBusyError, WorkerSilentError

FRESH_MS = 5_000
"""How long an answer is given again to whoever asks the same."""
KEPT_MAX = 32
"""Answers that are kept; each has a megabyte at most."""
UNDER_WAY_MAX = 32
"""Questions of all jobs that wait for an answer."""
CALLERS_MAX = 64
"""Of one question that is under way."""
GIVEN_UP_MS = 15_000
"""After it a question counts as lost, whatever its job does: longer than any may take."""


class Question(NamedTuple):
    """What is asked of whom."""

    job_id: str
    slot: int
    kind: QuestionKind
    samples: int = 1
    interval_ms: int = 0


@dataclass(slots=True)
class _UnderWay:
    since_ms: int
    callers: list[Future[AnswerView]] = field(default_factory=list)


class WorkerQuestions:
    """Questions of one coordinator. Thread-safe."""

    def __init__(self, calls: JobCalls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[Question, _UnderWay] = {}
        self._kept: OrderedDict[Question, tuple[int, AnswerView]] = OrderedDict()

    def ask(self, question: Question) -> Future[AnswerView]:
        """Ask a worker, unless that was just done. Raises as `JobCalls.led`, and WorkerBusyError; the Future has the errors of
        `jobmaster/questions.py`."""
        future: Future[AnswerView] = Future()
        now_ms = self._clock.monotonic_ms()
        service = self._calls.led(question.job_id)
        with self._lock:
            self._forget(now_ms)
            kept = self._kept.get(question)
            if kept is not None:
                future.set_result(kept[1])
                return future
            running = self._under_way.get(question)
            if running is not None and len(running.callers) < CALLERS_MAX:
                running.callers.append(future)
                return future
            if running is not None or len(self._under_way) >= UNDER_WAY_MAX:
                raise WorkerBusyError("too many questions wait for workers: ask again", slot=question.slot)
            entry = self._under_way[question] = _UnderWay(now_ms, [future])
        made = partial(QuestionAsked, slot=question.slot, kind=question.kind, samples=question.samples)
        asked: Future[WorkerAnswer] = service.call(lambda ticket: made(ticket, interval_ms=question.interval_ms))
        asked.add_done_callback(lambda ended: self._ended(question, entry, ended))
        return future

    def _forget(self, now_ms: int) -> None:
        """Drop what is too old. Called with the lock."""
        for question, (at_ms, _) in list(self._kept.items()):
            if now_ms - at_ms >= FRESH_MS:
                del self._kept[question]
        for question, entry in list(self._under_way.items()):
            if now_ms - entry.since_ms >= GIVEN_UP_MS:
                del self._under_way[question]
                callers, entry.callers = entry.callers, []
                _refuse(callers, WorkerSilentError("the job did not pass the question on in time", slot=question.slot))

    def _ended(self, question: Question, entry: _UnderWay, ended: Future[WorkerAnswer]) -> None:
        """On the thread of the job."""
        error = ended.exception()
        with self._lock:
            if self._under_way.get(question) is entry:
                del self._under_way[question]
            callers, entry.callers = entry.callers, []
            if error is None:
                view = AnswerView(ended.result(), self._clock.wall_ms())
                self._kept[question] = (self._clock.monotonic_ms(), view)
                while len(self._kept) > KEPT_MAX:
                    self._kept.popitem(last=False)
        if error is not None:
            _refuse(callers, error)
            return
        for caller in callers:
            if caller.set_running_or_notify_cancel():
                caller.set_result(view)


def _refuse(callers: list[Future[AnswerView]], error: BaseException) -> None:
    for caller in callers:
        if caller.set_running_or_notify_cancel():
            caller.set_exception(error)
