"""Questions to workers, from routes: asked beside each other, and waited for without a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from holdfast.coordinator.dispatcher.reading.questions import Question
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.views import AnswerView
from holdfast.statebackends.errors import HoldfastError, WorkerSilentError

WAIT_S = 12.0
"""For all answers of one request: longer than a question may take, if its job takes turns."""


async def ask_workers(service: Coordinator, questions: Sequence[Question]) -> list[AnswerView]:
    """The answers that there are, of some questions of one kind. Raises the first error if there is none."""
    found, errors = list[AnswerView](), list[BaseException]()
    asked = [asyncio.wrap_future(_asked(service, question)) for question in questions]
    try:
        async with asyncio.timeout(WAIT_S):
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                found.append(outcome) if isinstance(outcome, AnswerView) else errors.append(outcome)
    except TimeoutError:
        errors.append(WorkerSilentError("no answer of a worker within the time of the request", slot=questions[0].slot))
    if not found and errors:
        raise errors[0]
    return found


def _asked(service: Coordinator, question: Question) -> Future[AnswerView]:
    try:
        return service.ask_async(question)
    except HoldfastError as error:
        future: Future[AnswerView] = Future()
        future.set_exception(error)
        return future
