"""What goes between a coordinator and the process of a master hook: length-prefixed MessagePack, each frame bounded."""

from __future__ import annotations

import struct

import msgspec

from holdfast.coordinator.hooks.calls import HookCallKind, HookVerdict
from holdfast.statebackends.snapshot.metadata import HOOK_STATE_BYTES_MAX

FRAME_BYTES_MAX = HOOK_STATE_BYTES_MAX + 65_536
PREFIX = struct.Struct(">I")


class HookRequest(msgspec.Struct, frozen=True):
    """One call, on its way to the hook."""

    number: int
    """Of the call in its process, from 1."""
    kind: HookCallKind
    job_id: str
    epoch: int
    checkpoint_id: int
    timestamp_ms: int
    version: int = 0
    state: bytes | None = None


class HookAnswer(msgspec.Struct, frozen=True):
    """The answer. It repeats what was asked: any other answer ends the process."""

    number: int
    epoch: int
    checkpoint_id: int
    verdict: HookVerdict = HookVerdict.DONE
    version: int = 0
    state: bytes | None = None
    message: str = ""
    known: tuple[int, ...] = ()


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(HookRequest).decode
decode_answer = msgspec.msgpack.Decoder(HookAnswer).decode


def frame(record: HookRequest | HookAnswer) -> bytes:
    """The bytes to send."""
    content = encode(record)
    return PREFIX.pack(len(content)) + content
