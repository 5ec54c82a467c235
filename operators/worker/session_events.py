"""What the session core takes and gives: frozen records, the same over HTTP, in the simulator and in a test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, assert_never

import msgspec

from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
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
    clip,
    clip_front,
)
from holdfast.statebackends.handles import InlineHandle, StateHandle


class WorkerIdentity(msgspec.Struct, frozen=True):
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
    data_socket: str = ""
    spawn: int = 0
    launch_token: str = ""
    fingerprint: str = ""


# ------------------------------------------------------------------------------------------------------------- events


class DeadlineReached(msgspec.Struct, frozen=True):
    """Time passed; nothing else happened."""


class RegistrationAnswered(msgspec.Struct, frozen=True):
    registered: Registered


class RequestFailed(msgspec.Struct, frozen=True):
    """A request got no answer, or one that may be better later. `request`: register | stream | acks | states | heartbeat."""

    request: str


class RequestRefused(msgspec.Struct, frozen=True):
    """The coordinator answered 404 or 409: it does not know this epoch or session, or this process is superseded."""

    request: str
    message: str = ""
    superseded: bool = False
    """A registration: a newer submission runs the job."""
    displaced: bool = False
    """A registration: another process holds the slot, or nobody says why not this one."""
    over: bool = False
    """A registration: the job has ended."""
    outdated: bool = False
    """A registration: who answered knows an older submission alone. It slept through ours, and another coordinator leads it."""
    discarded: bool = False
    """Acknowledgements: each is of an attempt that is over. The leader has noted the files that they name, and wants none again."""
    rejected: bool = False
    """No repetition will make it right. A registration: a wrong token, or another state directory. Anything else: what it says is
    not taken (400, 413, 422), or can't be encoded at all."""


def refuse_post(request: str, message: str, fields: Mapping[str, Any]) -> RequestRefused:
    """What a FencedError means for anything but a registration. By its fields: that of an older attempt names the one that runs."""
    return RequestRefused(request, message, discarded=request == "acks" and "attempt" in fields)


def refuse_registration(message: str, fields: Mapping[str, Any], *, submission: int) -> RequestRefused:
    """What a registration's FencedError means for a process of that submission. By the error's fields: a text is only read."""
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
    """Without counters: those of this attempt can't be said, or are not taken."""


class Deliver(msgspec.Struct, frozen=True):
    """Hand a command to the worker's loop, once."""

    command: WorkerCommand


Action: TypeAlias = SendRegister | OpenStream | PostAcks | PostStates | PostHeartbeat | Deliver

BARE_ERROR_BYTES_MAX = 256
"""Of the error of a state that was refused with the whole of it."""

AckKey: TypeAlias = tuple[int, int, str, int]


def ack_key(item: Answerable) -> AckKey:
    return (item.attempt, item.checkpoint_id, item.vertex, item.subtask)


def sendable_item(item: Answerable) -> Answerable:
    """An answer whose text the coordinator takes, whatever it says."""
    return msgspec.structs.replace(item, message=clip(item.message)) if isinstance(item, DeclineCheckpoint) else item


def sendable_status(status: SubtaskStatus) -> SubtaskStatus:
    """A state whose texts the coordinator takes, whatever they say."""
    return msgspec.structs.replace(status, error=clip(status.error), traceback=clip_front(status.traceback))


def declined_for(ack: AcknowledgeCheckpoint, refusal: str) -> DeclineCheckpoint:
    """What is said instead of an acknowledgement that the coordinator does not take."""
    message = clip(f"the coordinator did not take the acknowledgement: {refusal}")
    return DeclineCheckpoint(ack.attempt, ack.checkpoint_id, ack.vertex, ack.subtask, FailureReason.DECLINED, message)


def bare_status(status: SubtaskStatus) -> SubtaskStatus:
    """What is said instead of a state that the coordinator does not take: the state, and the beginning of its error in ASCII."""
    error = clip(status.error, BARE_ERROR_BYTES_MAX).encode("ascii", "replace").decode()
    return msgspec.structs.replace(status, error=error, traceback="", metrics=None)


def _parts(item: Answerable) -> Iterator[StateHandle]:
    """Of all states that an answer brings."""
    for state in item.states.values() if isinstance(item, AcknowledgeCheckpoint) else ():
        for keyed in state.keyed:
            yield from keyed.parts
        yield from (listed.part for listed in state.operator)


def names_files(item: Answerable) -> bool:
    """Whether the leader may learn of files from it, which it deletes if nothing will name them."""
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
    """Of some items the first ones within a bound, perhaps none."""
    batch: list[Answerable] = []
    for item in items:
        bytes_max -= inline_bytes(item)
        if bytes_max < 0:
            break
        batch.append(item)
    return tuple(batch)


def command_key(command: WorkerCommand) -> tuple[str, int, int] | None:
    """What makes two commands the same one; None for a command that is never repeated."""
    match command:
        case Deploy(deployment=deployment):
            return ("deploy", deployment.attempt, 0)
        case CancelTasks(attempt=attempt):
            return ("cancel", attempt, 0)
        case TriggerCheckpoint() | NotifyCheckpointComplete() | NotifyCheckpointAborted() | FinishTasks():
            return (type(command).__name__, command.attempt, command.checkpoint_id)
        case ShutdownWorker():
            return None
        case _:
            assert_never(command)
