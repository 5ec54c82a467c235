"""SHELL: answers to questions of the coordinator, made on the control thread of what this process knows of itself."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.barriers.messages import QuestionKind, WorkerAnswer, WorkerQuestion
from holdfast.operators.worker.kept_log import KeptLog
from holdfast.operators.worker.kept_output import KeptOutput
from holdfast.operators.worker.session_events import AnswerQuestion
from holdfast.operators.worker.stacks import StackSampler

QUESTIONS = tuple(kind.value for kind in QuestionKind)
"""Kinds that are answered here."""


class Answering:
    """What a worker says about itself. The control thread alone uses it."""

    def __init__(self, slot: int, sampler: StackSampler, log: KeptLog, output: KeptOutput) -> None:
        self._slot = slot
        self._sampler = sampler
        self._log = log
        self._output = output

    def sample(self, question: WorkerQuestion) -> None:
        """Look at the stacks once more, or for the first time."""
        if self._sampler.question != question.id:
            self._sampler.begin(question.id)
        self._sampler.look()

    def answer(self, action: AnswerQuestion) -> WorkerAnswer:
        """All that is known; of another kind of question, that it is not."""
        question, sampler = action.question, self._sampler
        answer = WorkerAnswer(action.epoch, self._slot, action.session, action.attempt, question.id, question.kind)
        match question.kind:
            case QuestionKind.STACKS:
                code, stacks = sampler.found()
                samples, sampled_ms, left_out = sampler.samples, sampler.sampled_ms, sampler.left_out
                sampler.begin("")
                return replace(answer, samples=samples, sampled_ms=sampled_ms, code=code, stacks=stacks, left_out=left_out)
            case QuestionKind.LOG:
                return replace(answer, log=self._log.read())
            case QuestionKind.STDOUT:
                return replace(answer, log=self._output.read())
            case _:
                return replace(answer, known=False)
