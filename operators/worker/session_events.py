"""Events and actions of the session core: frozen records, the same over HTTP, in the simulator and in a test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, assert_never

import msgspec

from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AlignWatermarks,
    Answerable,
    CancelTasks,
    DeclineCheckpoint,
    Deploy,
    FailureReason,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NumberedCommand,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskStatus,
    TriggerCheckpoint,
    WorkerCommand,
    WorkerQuestion,
    clip,
    clip_front,
)
from holdfast.statebackends.handles import InlineHandle, StateHandle

BACKOFF_MAX_MS = 1_000


class WorkerIdentity(msgspec.Struct, frozen=True):
    """Facts that stay constant while the process lives."""

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
    data_socket: str = ""
    spawn: int = 0
    launch_token: str = ""
    fingerprint: str = ""
    questions: tuple[str, ...] = ()
    """Kinds of questions that its shell answers."""
    seat: int = -1
    """As in RegisterWorker."""
    seat_spawn: int = 0
    sight: str = ""


# ------------------------------------------------------------------------------------------------------------- events


class DeadlineReached(msgspec.Struct, frozen=True):
    """Time passed; nothing else happened."""


class RegistrationAnswered(msgspec.Struct, frozen=True):
    registered: Registered


class RequestFailed(msgspec.Struct, frozen=True):
    """A request got no answer, or one that a repetition may improve. `request`: register | stream | acks | states | heartbeat."""

    request: str
    pause_max_ms: int = BACKOFF_MAX_MS
    """Longest pause before it is repeated. 0: the repetition goes to a coordinator that was not asked yet."""


class RequestRefused(msgspec.Struct, frozen=True):
    """The coordinator answered 404 or 409: it does not know this epoch or session, or this process is superseded."""

    request: str
    message: str = ""
    superseded: bool = False
    """A registration: a newer submission runs the job."""
    displaced: bool = False
    """A registration: another process holds the slot, or the answer gives no reason that ends this one for good."""
    over: bool = False
    """A registration: the job has ended."""
    outdated: bool = False
    """A registration: the coordinator that answered knows only an older submission. It slept through ours, which another one
    leads."""
    discarded: bool = False
    """Acknowledgements: each is of an attempt that is over. The leader has noted the files that they name, and needs no
    repetition."""
    rejected: bool = False
    """Every repetition will be refused. A registration: a wrong token, or another state directory. Any other request: its content
    is not accepted (400, 413, 422), or can't be encoded."""


def refuse_post(request: str, message: str, fields: Mapping[str, Any]) -> RequestRefused:
    """Interpret a FencedError for any request but a registration, by its fields: one for an older attempt names the current one."""
    return RequestRefused(request, message, discarded=request == "acks" and "attempt" in fields)


def refuse_registration(message: str, fields: Mapping[str, Any], *, submission: int) -> RequestRefused:
    """Interpret a FencedError for a registration of a process of that submission, by its fields and not by its text."""
    newer = fields.get("newer")
    if isinstance(newer, int) and newer > submission and "slot" not in fields:
        return RequestRefused("register", message, superseded=True)
    if "state" in fields:
        return RequestRefused("register", message, over=True)
    if isinstance(newer, int) and newer < submission and "slot" not in fields:
        return RequestRefused("register", message, outdated=True)
    return RequestRefused("register", message, displaced=True)


class CommandReceived(msgspec.Struct, frozen=True):
    line: NumberedCommand


class AcksAnswered(msgspec.Struct, frozen=True):
    answers: AckAnswers


class StatesAnswered(msgspec.Struct, frozen=True):
    pass


class HeartbeatAnswered(msgspec.Struct, frozen=True):
    epoch: int


class AnswerReady(msgspec.Struct, frozen=True):
    """The worker acknowledged or declined a checkpoint."""

    item: Answerable


class StatusChanged(msgspec.Struct, frozen=True):
    status: SubtaskStatus


class ReportsReady(msgspec.Struct, frozen=True):
    """Several of these at one time, in order: what is sent for them is sent together."""

    reports: tuple[AnswerReady | StatusChanged, ...]


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
    | ReportsReady
    | StatusChanged
)


# ------------------------------------------------------------------------------------------------------------ actions


class SendRegister(msgspec.Struct, frozen=True):
    body: RegisterWorker


class OpenStream(msgspec.Struct, frozen=True):
    epoch: int
    session: str
    after: int


class PostAcks(msgspec.Struct, frozen=True):
    body: AckBatch


class PostStates(msgspec.Struct, frozen=True):
    body: StatusBatch


class PostHeartbeat(msgspec.Struct, frozen=True):
    session: str
    attempt: int
    bare: bool = False
    """Without counters: those of this attempt can't be encoded, or are not accepted."""


class Deliver(msgspec.Struct, frozen=True):
    """Hand a command to the worker's loop, once."""

    command: WorkerCommand


class TakeSample(msgspec.Struct, frozen=True):
    """Look at the stacks of all threads once, for a question."""

    question: WorkerQuestion


class AnswerQuestion(msgspec.Struct, frozen=True):
    """Send what is known about a question, once: an answer that is lost is not repeated, and a refusal changes nothing."""

    question: WorkerQuestion
    epoch: int = 0
    session: str = ""
    attempt: int = 0


Action: TypeAlias = (
    SendRegister | OpenStream | PostAcks | PostStates | PostHeartbeat | Deliver | TakeSample | AnswerQuestion
)

BARE_ERROR_BYTES_MAX = 256
"""Most bytes of the error of a state that was refused with the full text."""

AckKey: TypeAlias = tuple[int, int, str, int]


def ack_key(item: Answerable) -> AckKey:
    return (item.attempt, item.checkpoint_id, item.vertex, item.subtask)


def sendable_item(item: Answerable) -> Answerable:
    """The answer with texts that the coordinator accepts, whatever they contain."""
    return msgspec.structs.replace(item, message=clip(item.message)) if isinstance(item, DeclineCheckpoint) else item


def sendable_status(status: SubtaskStatus) -> SubtaskStatus:
    """The state with texts that the coordinator accepts, whatever they contain."""
    return msgspec.structs.replace(status, error=clip(status.error), traceback=clip_front(status.traceback))


def declined_for(ack: AcknowledgeCheckpoint, refusal: str) -> DeclineCheckpoint:
    """Decline sent in place of an acknowledgement that the coordinator does not accept."""
    message = clip(f"the coordinator did not take the acknowledgement: {refusal}")
    return DeclineCheckpoint(ack.attempt, ack.checkpoint_id, ack.vertex, ack.subtask, FailureReason.DECLINED, message)


def bare_status(status: SubtaskStatus) -> SubtaskStatus:
    """Status sent in place of one that the coordinator does not accept: the state, and the beginning of its error in ASCII."""
    error = clip(status.error, BARE_ERROR_BYTES_MAX).encode("ascii", "replace").decode()
    return msgspec.structs.replace(status, error=error, traceback="", metrics=None)


def _parts(item: Answerable) -> Iterator[StateHandle]:
    """Handles of all states in an answer."""
    for state in item.states.values() if isinstance(item, AcknowledgeCheckpoint) else ():
        for keyed in state.keyed:
            yield from keyed.parts
        yield from (listed.part for listed in state.operator)


def names_files(item: Answerable) -> bool:
    """Whether the leader may learn of files from it, and delete them if no checkpoint will name them."""
    return any(not isinstance(part, InlineHandle) for part in _parts(item))


def inline_bytes(item: Answerable) -> int:
    """Bytes of state that travel in an acknowledgement."""
    return sum(part.length for part in _parts(item) if isinstance(part, InlineHandle))


def first_batch(items: Iterable[Answerable], items_max: int, bytes_max: int) -> tuple[Answerable, ...]:
    """The first of some items, at least one, within both bounds."""
    batch: list[Answerable] = []
    size = 0
    for item in items:
        size += inline_bytes(item)
        if batch and (len(batch) == items_max or size > bytes_max):
            break
        batch.append(item)
    return tuple(batch)


def small_items(items: Iterable[Answerable], bytes_max: int) -> tuple[Answerable, ...]:
    """The first of some items within a bound, perhaps none."""
    batch: list[Answerable] = []
    for item in items:
        bytes_max -= inline_bytes(item)
        if bytes_max < 0:
            break
        batch.append(item)
    return tuple(batch)


def command_key(command: WorkerCommand) -> tuple[str, int, int] | None:
    """Identity by which a repeated command is recognised; None for a command that is never repeated."""
    match command:
        case Deploy(deployment=deployment):
            return ("deploy", deployment.attempt, 0)
        case CancelTasks(attempt=attempt):
            return ("cancel", attempt, 0)
        case TriggerCheckpoint() | NotifyCheckpointComplete() | NotifyCheckpointAborted() | FinishTasks():
            return (type(command).__name__, command.attempt, command.checkpoint_id)
        case ShutdownWorker() | AlignWatermarks():
            return None
        case _:
            assert_never(command)
