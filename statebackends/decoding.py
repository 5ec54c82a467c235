"""Bytes that nobody vouches for: decoders of records, and what msgspec raises.

What msgspec knows of a type it builds at the type's first use, and puts it where others find it before it is whole: a second thread
that decodes the type just then, or another one that has it in a field, reads a null pointer, and the process is gone (0.22; one
start in four of eight threads that begin together). So decoders are made one at a time, here, and a type is used through them alone
wherever more than one thread may decode."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from holdfast.statebackends.errors import CorruptStateError, UnsupportedVersionError

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Not the format, or not the type; a text that is not UTF-8; nested deeper than the interpreter's stack."""

T = TypeVar("T")

_making = threading.Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decode_json(content: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """A value of a type from JSON. Raises one of UNDECODABLE."""
    decoder = _json.get(kind)
    if decoder is None:
        with _making:
            decoder = _json.setdefault(kind, msgspec.json.Decoder(kind))
    value: T = decoder.decode(content)
    return value


def decode_msgpack(content: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """A value of a type from msgpack. Raises one of UNDECODABLE."""
    decoder = _msgpack.get(kind)
    if decoder is None:
        with _making:
            decoder = _msgpack.setdefault(kind, msgspec.msgpack.Decoder(kind))
    value: T = decoder.decode(content)
    return value


def decode_versioned(content: bytes, kind: type[T], path: str, *, supported: int, what: str) -> T:
    """A value of a type with a `version`, from the JSON of the file at `path`. `what`: as messages call it, `an input manifest`.

    Raises UnsupportedVersionError for another version than the supported one, CorruptStateError for what is none of these."""
    try:
        version = decode_json(content, dict[str, object]).get("version")
        if version != supported:
            raise UnsupportedVersionError(
                f"{path}: {what} of version {version}, this Holdfast reads {supported}",
                path=path,
                version=version,
                supported=supported,
            )
        return decode_json(content, kind)
    except UNDECODABLE as error:
        raise CorruptStateError(f"{path}: not {what}: {error}", path=path, reason=str(error)) from error
