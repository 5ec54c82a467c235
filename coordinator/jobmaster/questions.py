"""CORE, part of the job master: questions to workers that wait for an answer, at most one a slot and a few in all.

Each is answered, or refused, exactly once: by its answer, by its deadline, when its session or attempt is over, or with the job.
It is sent beside the commands, once: a question that is lost with its stream runs into its deadline. Nothing of the job depends on
one."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.barriers.messages import (
    SAMPLES_MAX,
    SAMPLING_MS_MAX,
    NumberedCommand,
    QuestionKind,
    WorkerAnswer,
    WorkerQuestion,
)
from holdfast.coordinator.jobmaster.actions import Answer, Deliver, Refuse
from holdfast.coordinator.jobmaster.slots import JobTurn, Slot, SlotPool
from holdfast.statebackends.errors import (
    FencedError,
    HoldfastError,
    NotFoundError,
    QuestionNotKnownError,
    WorkerBusyError,
    WorkerSilentError,
)

QUESTIONS_MAX = 16
"""Questions of one job that wait for an answer."""

ANSWER_MS = 3_000
"""Time for an answer, besides that of sampling."""


@dataclass(frozen=True, slots=True)
class _Asked:
    ticket: int
    id: str
    kind: QuestionKind
    session: str
    attempt: int
    deadline_ms: int


class Questions:
    """The questions of one job that wait."""

    def __init__(self, job_id: str, epoch: int, slots: SlotPool, rng: random.Random, turn: JobTurn) -> None:
        self._job_id = job_id
        self._epoch = epoch
        self._slots = slots
        self._rng = rng
        self._turn = turn
        self._asked: dict[int, _Asked] = {}
        """By slot."""

    def ask(self, ticket: int, slot: int, kind: QuestionKind, samples: int, interval_ms: int, attempt: int) -> None:
        """Send a question to the worker in a slot; the ticket is answered later.

        Raises NotFoundError without such a slot, or a worker in it; QuestionNotKnownError for a worker that does not know the kind;
        WorkerBusyError while another question waits for that worker, or too many do in all; WorkerSilentError without a stream."""
        found = self._worker(slot, kind)
        if slot in self._asked or len(self._asked) >= QUESTIONS_MAX:
            text = f"the worker in slot {slot} of job {self._job_id} is being asked already, or many others are: ask again"
            raise WorkerBusyError(text, slot=slot)
        samples = min(SAMPLES_MAX, max(1, samples)) if kind is QuestionKind.STACKS else 0
        sampling_ms = min(SAMPLING_MS_MAX, samples * max(0, interval_ms))
        question = WorkerQuestion(f"{self._rng.getrandbits(64):016x}", kind.value, attempt, samples, interval_ms)
        deadline_ms = self._turn.now_ms + sampling_ms + ANSWER_MS
        self._asked[slot] = _Asked(ticket, question.id, kind, found.session, attempt, deadline_ms)
        assert found.outbox is not None
        line = NumberedCommand(self._epoch, found.session, found.outbox.last_number, None, question)
        self._turn.out.append(Deliver(slot, found.session, (line,)))

    def _worker(self, slot: int, kind: QuestionKind) -> Slot:
        if not 0 <= slot < len(self._slots.slots):
            raise NotFoundError(f"job {self._job_id} has no slot {slot}", job=self._job_id, slot=slot)
        found = self._slots.slots[slot]
        if found.holder is None or found.outbox is None:
            raise NotFoundError(f"no worker is in slot {slot} of job {self._job_id}", job=self._job_id, slot=slot)
        if kind.value not in found.holder.questions:
            text = f"the worker in slot {slot} of job {self._job_id} does not answer questions about its {kind.value}"
            raise QuestionNotKnownError(f"{text}: it is of an older version", job=self._job_id, slot=slot, kind=kind.value)
        if not found.connected:
            raise self._silent(slot, "has no open stream of commands")
        return found

    def answered(self, slot: Slot, answer: WorkerAnswer) -> None:
        """Pass an answer on. Raises FencedError for one that nobody waits for: it came too late, or is of another process or
        attempt."""
        asked, index = self._asked.get(slot.index), slot.index
        if asked is None or (asked.id, asked.session) != (answer.question, answer.session):
            raise FencedError(f"question {answer.question!r} of slot {index} is over", slot=index, session=answer.session)
        del self._asked[index]
        if asked.kind is QuestionKind.STACKS and asked.attempt != answer.attempt:
            text = f"was asked about attempt {asked.attempt}, and runs {answer.attempt}"
            self._refuse(asked, self._silent(index, text))
            raise FencedError(f"the worker in slot {index} {text}", attempt=asked.attempt)
        if answer.known and answer.kind == asked.kind:
            self._turn.out.append(Answer(asked.ticket, answer))
            return
        text = f"the worker in slot {index} of job {self._job_id} does not answer questions about its {asked.kind.value}"
        self._refuse(asked, QuestionNotKnownError(text, job=self._job_id, slot=index, kind=asked.kind.value))

    def settle(self, attempt: int, ended: HoldfastError | None) -> None:
        """Refuse what will not be answered any more. `ended`: why nothing will."""
        for index, asked in list(self._asked.items()) if self._asked else ():
            error = ended or self._over(index, asked, attempt)
            if error is not None:
                del self._asked[index]
                self._refuse(asked, error)

    def _over(self, index: int, asked: _Asked, attempt: int) -> HoldfastError | None:
        if self._slots.slots[index].session != asked.session:
            return self._silent(index, "is gone, or has registered again, before it answered")
        if asked.kind is QuestionKind.STACKS and asked.attempt != attempt:
            return self._silent(index, f"was asked about attempt {asked.attempt}, and attempt {attempt} has begun")
        if self._turn.now_ms >= asked.deadline_ms:
            return self._silent(index, "did not answer in time")
        return None

    def _silent(self, slot: int, why: str) -> WorkerSilentError:
        return WorkerSilentError(f"the worker in slot {slot} of job {self._job_id} {why}", job=self._job_id, slot=slot)

    def _refuse(self, asked: _Asked, error: HoldfastError) -> None:
        self._turn.out.append(Refuse(asked.ticket, error))

    def next_deadline_ms(self) -> int | None:
        return min((asked.deadline_ms for asked in self._asked.values()), default=None)
