"""Messages that nobody of an attempt sent, as they come to a worker's data port: of strangers, of workers that were replaced,
and of a peer on channels that are not its own. Whoever decodes or believes one of them fails its attempt."""

from __future__ import annotations

import pickle
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import msgspec

from holdfast.barriers.credits import CreditAnnouncement
from holdfast.barriers.frames import FRAME_VERSION, ChannelId, FrameKind, Header
from holdfast.statebackends.errors import InvariantError

FAR_ATTEMPT = 1_000_000
FAR_SEQUENCE = 1_000_000
NO_EDGE = 1_000

Message = tuple[str, list[Any]]
"""(who sent it, as its connection proved, parts)."""


def explode() -> NoReturn:
    """What the forged rows do where they are unpickled."""
    raise InvariantError("rows that a stranger sent were unpickled")


class ForgedRow:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


_ROWS = pickle.dumps([ForgedRow()])
_CREDIT = msgspec.msgpack.encode(CreditAnnouncement(1 << 40, 1 << 20, 1 << 39, 1 << 19))
"""More is consumed than was ever sent."""


def forge_messages(
    rng: random.Random,
    *,
    slot: int,
    attempt: int,
    channels: Collection[ChannelId],
    strangers: Sequence[str],
    peers: Sequence[str],
) -> list[Message]:
    """Messages for one worker's port, in any order. `channels` begin or end there; `peers` are of its attempt."""
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
