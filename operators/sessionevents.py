"""What the session core takes and gives: frozen records, the same over HTTP, in the simulator and in a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from barriers.messages import (
    AckAnswers,
    AckBatch,
    Answerable,
    NumberedCommand,
    Registered,
    RegisterWorker,
    StatusBatch,
    SubtaskStatus,
    WorkerCommand,
)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What does not change while the process lives."""

    job_id: str
    slot: int
    submission: int
    task_attempt: int
    nonce: str
    pid: int
    host: str
    data_address: str
    directory_nonce: str
    data_key: str = ""


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """Time passed; nothing else happened."""


@dataclass(frozen=True, slots=True)
class RegistrationAnswered:
    registered: Registered


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request got no answer, or one that may be better later. `request`: register | stream | acks | states | heartbeat."""

    request: str


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The coordinator answered 404 or 409: it does not know this epoch or session, or this process is superseded."""

    request: str
    message: str = ""
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class CommandReceived:
    line: NumberedCommand


@dataclass(frozen=True, slots=True)
class AcksAnswered:
    answers: AckAnswers


@dataclass(frozen=True, slots=True)
class StatesAnswered:
    pass


@dataclass(frozen=True, slots=True)
class HeartbeatAnswered:
    epoch: int


@dataclass(frozen=True, slots=True)
class AnswerReady:
    """The worker acknowledged or declined a checkpoint."""

    item: Answerable


@dataclass(frozen=True, slots=True)
class StatusChanged:
    status: SubtaskStatus


Event: TypeAlias = (
    DeadlineReached
    | RegistrationAnswered
    | RequestFailed
    | RequestRefused
    | CommandReceived
    | AcksAnswered
    | StatesAnswered
    | HeartbeatAnswered
    | AnswerReady
    | StatusChanged
)


# ------------------------------------------------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class SendRegister:
    body: RegisterWorker


@dataclass(frozen=True, slots=True)
class OpenStream:
    epoch: int
    session: str
    after: int


@dataclass(frozen=True, slots=True)
class PostAcks:
    body: AckBatch


@dataclass(frozen=True, slots=True)
class PostStates:
    body: StatusBatch


@dataclass(frozen=True, slots=True)
class PostHeartbeat:
    session: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a command to the worker's loop, once."""

    command: WorkerCommand


Action: TypeAlias = SendRegister | OpenStream | PostAcks | PostStates | PostHeartbeat | Deliver
