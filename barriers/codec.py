"""Control messages <-> JSON bytes, both directions: the only codec of the worker protocol.

Strict: a wrong type, a missing field or an unknown tag is a ProtocolError that names the message. Unknown fields are
ignored, so that a newer peer may say more."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from statebackends.decoding import decode_json
from statebackends.errors import ProtocolError

T = TypeVar("T")

_encoder = msgspec.json.Encoder()


def encode(message: Any) -> bytes:
    """JSON of a record of messages.py or jobgraph.py, one line. Raises ProtocolError."""
    try:
        return _encoder.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a {type(message).__name__} can't be encoded: {error}", message_type=type(message).__name__) from error


def decode(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """The record that the bytes say. `kind` is a record type or a union of tagged ones. Raises ProtocolError naming it."""
    try:
        return decode_json(data, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise ProtocolError(f"not a valid {name}: {error}", message_type=name) from error
