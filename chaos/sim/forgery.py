"""Forged messages to a worker's data port and to a coordinator.

Frames come from strangers, from replaced workers, and from a peer on channels that are not its own; to decode or accept one of them
fails the attempt. Messages to a coordinator are real ones with one falsehood: an acknowledgement that the coordinator can refute
without opening a file, a registration of a process that the job's launcher did not start, or not as that worker."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

import msgspec

from holdfast.barriers.exchange.credits import CreditAnnouncement
from holdfast.barriers.exchange.frames import FRAME_VERSION, ChannelId, FrameKind, Header
from holdfast.barriers.messages import AcknowledgeCheckpoint, RegisterWorker
from holdfast.operators.worker.session_events import WorkerIdentity
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorSubtaskState,
    StateMeta,
)

FAR_ATTEMPT = 1_000_000
FAR_SEQUENCE = 1_000_000
NO_EDGE = 1_000

Message = tuple[str, list[Any]]
"""(sender as its connection proved it, parts)."""


def explode() -> NoReturn:
    """Effect of a forged row that is unpickled."""
    raise InvariantError("rows that a stranger sent were unpickled")


class ForgedRow:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


_ROWS = pickle.dumps([ForgedRow()])
_CREDIT = msgspec.msgpack.encode(CreditAnnouncement(1 << 40, 1 << 20, 1 << 39, 1 << 19))
"""Credit that acknowledges more than was ever sent."""


def forge_messages(
    rng: random.Random,
    *,
    slot: int,
    attempt: int,
    channels: Collection[ChannelId],
    strangers: Sequence[str],
    peers: Sequence[str],
) -> list[Message]:
    """Frames for one worker's port, in any order. `channels` begin or end there; `peers` are of its attempt."""
    ending = sorted(channel for channel in channels if channel.consumer == slot) or [ChannelId(0, slot, slot)]
    beginning = sorted(channel for channel in channels if channel.producer == slot) or [ChannelId(0, slot, slot)]
    messages: list[Message] = []
    for stranger in strangers:
        messages.append((stranger, [b"hello", b"world"]))
        for number in (attempt, attempt + 1, FAR_ATTEMPT):
            messages.append((stranger, _message(FrameKind.ROWS, number, rng.choice(ending), _ROWS)))
            messages.append((stranger, _message(FrameKind.CREDIT, number, rng.choice(beginning), _CREDIT)))
    messages += [(peer, parts) for peer in peers for parts in _of_peer(slot, attempt, rng.choice(ending))]
    rng.shuffle(messages)
    return messages


def _of_peer(slot: int, attempt: int, channel: ChannelId) -> Iterator[list[Any]]:
    yield [b"\xc1"]
    yield _message(FrameKind.ROWS, FAR_ATTEMPT, channel, _ROWS)
    yield _message(FrameKind.ROWS, attempt, ChannelId(NO_EDGE, channel.producer, slot), _ROWS)
    yield _message(FrameKind.ROWS, attempt, ChannelId(channel.edge, slot, slot), _ROWS)


def _message(kind: FrameKind, attempt: int, channel: ChannelId, body: bytes) -> list[Any]:
    return [msgspec.msgpack.encode(Header(FRAME_VERSION, attempt, *channel, FAR_SEQUENCE, kind, len(body))), body]


_Forgery = Callable[[AcknowledgeCheckpoint, random.Random], AcknowledgeCheckpoint | None]
_CHECKSUM = "xxh3_128:" + "0" * 32
_PATHS = ("../../../outside", "/etc/hostname", "a\0b", "_claim", "_metadata", "..", "", "a/b", "x" * 300, "../shared/1-1-op-0-n0-x")


def forge(ack: AcknowledgeCheckpoint, rng: random.Random) -> tuple[AcknowledgeCheckpoint, ...]:
    """Messages in the place of a real acknowledgement: a forged one, with which its checkpoint must not complete.

    Or the real one and a forged one that belongs to no checkpoint of the job, for which nothing may be deleted."""
    if rng.random() < 0.3:
        return _stray(ack, rng), ack
    kinds: list[_Forgery] = [_with_path, _with_groups, _shifted]
    rng.shuffle(kinds)
    forged = (kind(ack, rng) for kind in kinds)
    return (next((each for each in forged if each is not None), None) or msgspec.structs.replace(ack, states={}),)


def forge_registrations(worker: WorkerIdentity, slots: int, rng: random.Random) -> tuple[RegisterWorker, ...]:
    """Registrations with the proof of one worker of a job: for a later spawn, for another slot, and one without a proof for its
    slot."""
    spawn = worker.spawn + rng.randint(1, 3)
    claimed = (
        (worker.slot, spawn, worker.launch_token),
        ((worker.slot + 1) % max(2, slots), worker.spawn + rng.randint(0, 3), worker.launch_token),
        (worker.slot, spawn, rng.choice(("", "0" * 64, "caf\u00e9"))),
    )
    return tuple(
        RegisterWorker(
            job_id=worker.job_id,
            slot=slot,
            submission=worker.submission,
            task_attempt=worker.task_attempt + rng.randint(0, 1_000),
            nonce=f"forged{number}",
            pid=worker.pid,
            host=worker.host,
            data_address=worker.data_address,
            directory_nonce=worker.directory_nonce,
            data_key=worker.data_key,
            spawn=spawn_claimed,
            launch_token=token,
        )
        for number, (slot, spawn_claimed, token) in enumerate(claimed)
    )


def _stray(ack: AcknowledgeCheckpoint, rng: random.Random) -> AcknowledgeCheckpoint:
    """An acknowledgement of an attempt that never was, which names the checkpoint's own records and files of other tasks."""
    part = FileHandle(rng.choice(("_claim", "_metadata", *_files(ack))), 1, _CHECKSUM)
    listed = OperatorListHandle(StateMeta("positions", "operator_list", "bytes"), part, 1)
    uid = min(ack.states, default="")
    states = {uid: OperatorSubtaskState(operator=(listed,))}
    return msgspec.structs.replace(ack, attempt=ack.attempt + 1_000, states=states)


def _files(ack: AcknowledgeCheckpoint) -> list[str]:
    keyed = [part for state in ack.states.values() for handle in state.keyed for part in handle.parts]
    parts = [*keyed, *(handle.part for state in ack.states.values() for handle in state.operator)]
    return sorted({part.path for part in parts if isinstance(part, FileHandle)})


def _with_path(ack: AcknowledgeCheckpoint, rng: random.Random) -> AcknowledgeCheckpoint | None:
    """One part with a path outside of the snapshot, or of a negative length."""
    bad: Any = FileHandle(rng.choice(_PATHS), 5, _CHECKSUM) if rng.random() < 0.7 else FileHandle("v-0-1-n0-x", -5, _CHECKSUM)
    for uid, state in ack.states.items():
        if state.operator:
            first = msgspec.structs.replace(state.operator[0], part=bad)
            return _replaced(ack, uid, msgspec.structs.replace(state, operator=(first, *state.operator[1:])))
        if state.keyed and state.keyed[0].parts:
            keyed = msgspec.structs.replace(state.keyed[0], parts=(bad, *state.keyed[0].parts[1:]))
            return _replaced(ack, uid, msgspec.structs.replace(state, keyed=(keyed, *state.keyed[1:])))
    return None


def _with_groups(ack: AcknowledgeCheckpoint, rng: random.Random) -> AcknowledgeCheckpoint | None:
    """Keyed state with key groups of another subtask, or outside of the operator's."""
    for uid, state in ack.states.items():
        if state.keyed:
            groups = state.keyed[0].key_groups
            other = rng.choice((KeyGroupRange(groups.start + 1, groups.stop + 1), KeyGroupRange(-4, 2), KeyGroupRange(0, 1 << 40)))
            keyed = msgspec.structs.replace(state.keyed[0], key_groups=other)
            return _replaced(ack, uid, msgspec.structs.replace(state, keyed=(keyed, *state.keyed[1:])))
    return None


def _shifted(ack: AcknowledgeCheckpoint, rng: random.Random) -> AcknowledgeCheckpoint | None:
    """The subtask of another slot, or more bytes than any task sends in an acknowledgement."""
    if rng.random() < 0.5:
        return msgspec.structs.replace(ack, subtask=ack.subtask + 1)
    for uid, state in ack.states.items():
        if state.operator:
            first = msgspec.structs.replace(state.operator[0], part=InlineHandle(b"\0" * (2 << 20)))
            return _replaced(ack, uid, msgspec.structs.replace(state, operator=(first, *state.operator[1:])))
    return None


def _replaced(ack: AcknowledgeCheckpoint, uid: str, state: OperatorSubtaskState) -> AcknowledgeCheckpoint:
    return msgspec.structs.replace(ack, states={**ack.states, uid: state})
