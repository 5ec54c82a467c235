"""Codec of the worker protocol: control messages <-> JSON or msgpack bytes, and the HTTP headers beside them.

It is strict: a wrong type, a missing field or an unknown tag is a ProtocolError that names the message. Unknown fields are ignored,
so that newer peers can add some."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE, decode_json, decode_msgpack
from holdfast.statebackends.errors import ProtocolError

T = TypeVar("T")

COMMAS_MAX = 2_000_000
"""In one large message. State travels as base64, which has none: they count the values, and so the time that decoding takes."""

PIECE_COMMAS_MAX = 250_000
"""In one of its pieces, which is decoded in one go: some 0.1 s at most, with the interpreter lock held throughout."""

PIECES_MAX = 16_384

_WINDOW_BYTES = 1 << 20
"""Looked at, or decoded, before another thread may have the interpreter lock."""

JSON_TYPE = "application/json"
MSGPACK_TYPE = "application/msgpack"
"""Content types of bodies. Msgpack has no base64: it is for acknowledgements, which may have state within."""

MSGPACK_BYTES_MAX = 1024 * 1024
"""Of a message as msgpack, whose values nothing counts before it is decoded. Larger ones are JSON, and decoded in pieces."""

_encoder = msgspec.json.Encoder()
_packer = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """JSON of a record of messages.py or jobgraph.py, one line. Raises ProtocolError."""
    try:
        return _encoder.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a {type(message).__name__} can't be encoded: {error}", message_type=type(message).__name__) from error


def decode(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """The record in the bytes. `kind` is a record type or a union of tagged ones. Raises ProtocolError that names it."""
    try:
        return decode_json(data, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise ProtocolError(f"not a valid {name}: {error}", message_type=name) from error


def encode_msgpack(message: Any) -> bytes | None:
    """As `encode`, as msgpack; None: it is larger than MSGPACK_BYTES_MAX, or must be refused as JSON would be. Raises nothing."""
    try:
        body = _packer.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return None
    return body if len(body) <= MSGPACK_BYTES_MAX else None


def decode_packed(data: bytes | bytearray, kind: type[T]) -> T:
    """As `decode`, of msgpack. Raises ProtocolError, for more bytes than MSGPACK_BYTES_MAX before they are decoded.

    Lengths that a body declares, and does not have, cost nothing; nesting is bounded by the interpreter's stack, as of JSON."""
    name = kind.__name__
    if len(data) > MSGPACK_BYTES_MAX:
        raise ProtocolError(f"not a valid {name}: more than {MSGPACK_BYTES_MAX} bytes of msgpack", message_type=name)
    try:
        return decode_msgpack(data, kind)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a valid {name}: {error}", message_type=name) from error


def decode_large(data: bytes | bytearray, kind: type[T], pieces: str | None = None) -> T:
    """As `decode`, for a message of many megabytes, and not on an event loop's thread: msgspec holds the interpreter lock while it
    decodes. `pieces` names a field that is a tuple: its items are decoded one by one, and other threads run in between.

    Raises ProtocolError for more values than COMMAS_MAX, PIECE_COMMAS_MAX and PIECES_MAX allow, before they are decoded."""
    name = kind.__name__
    _count(data, COMMAS_MAX if pieces else PIECE_COMMAS_MAX, name)
    if pieces is None:
        return decode(data, kind)
    envelope = decode(data, _envelope(cast(Any, kind), pieces))
    raw = getattr(envelope, pieces)
    if len(raw) > PIECES_MAX:
        raise ProtocolError(f"not a valid {name}: more than {PIECES_MAX} {pieces}", message_type=name)
    item = get_args(get_type_hints(kind)[pieces])[0]
    fields = {field: getattr(envelope, field) for field in envelope.__struct_fields__}
    return kind(**{**fields, pieces: tuple(_decode_pieces(raw, item, f"{name}.{pieces}"))})


def _count(data: bytes | bytearray, commas_max: int, name: str) -> None:
    commas = 0
    for start in range(0, len(data), _WINDOW_BYTES):
        commas += data.count(b",", start, start + _WINDOW_BYTES)
        if commas > commas_max:
            raise ProtocolError(f"not a valid {name}: more than {commas_max} values", message_type=name)


@cache
def _envelope(kind: type[msgspec.Struct], pieces: str) -> Any:
    """The same record with the pieces as they came."""
    fields: list[Any] = [
        (field.name, list[msgspec.Raw] if field.name == pieces else field.type, *_default(field, pieces))
        for field in msgspec.structs.fields(kind)
    ]
    config = kind.__struct_config__
    return msgspec.defstruct(kind.__name__, fields, tag=config.tag, tag_field=config.tag_field, frozen=True)


def _default(field: msgspec.structs.FieldInfo, pieces: str) -> tuple[Any, ...]:
    if field.required:
        return ()
    return ([],) if field.name == pieces else (field.default,)


def _decode_pieces(raw: list[msgspec.Raw], item: Any, name: str) -> list[Any]:
    values, since = [], 0
    for index, piece in enumerate(raw):
        data = bytes(piece)
        _count(data, PIECE_COMMAS_MAX, name)
        try:
            values.append(decode_json(data, item))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a valid {name}[{index}]: {error}", message_type=name) from error
        since += len(data)
        if since >= _WINDOW_BYTES:
            since = 0
            time.sleep(0)
    return values


# ---------------------------------------------------------------------------------------------------------- headers

ERROR_HEADER = "X-Holdfast-Error"
"""Name of the error's class."""

FIELDS_HEADER = "X-Holdfast-Fields"
"""The error's fields as one JSON object in ASCII."""

UNREACHABLE_HEADER = "X-Holdfast-Unreachable"
"""On a request: epoch of a leader that the client was referred to and could not reach."""


def decode_fields(text: str | None) -> dict[str, Any]:
    """An error's fields by name, from its FIELDS_HEADER; empty for a text that is no JSON object."""
    try:
        fields = json.loads(text or "{}")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
