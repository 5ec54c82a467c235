"""Decoders of untrusted records, and the exceptions that msgspec raises on malformed input.

Decoders are made here, one at a time, and every type that more than one thread may decode is decoded through them. msgspec (0.22)
publishes what it knows of a type before it is complete: a second thread that decodes the type at its first use, or another type
with it in a field, reads a null pointer and ends the process (measured: one start in four of eight threads that begin together)."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from holdfast.statebackends.errors import CorruptStateError, UnsupportedVersionError

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions on malformed input: not the format or the type, invalid UTF-8, nested deeper than the interpreter's stack."""

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


def decode_versioned(content: bytes, kind: type[T], path: str, *, supported: int | tuple[int, ...], what: str) -> T:
    """A value of a type with a `version`, from the JSON of the file at `path`. `what` names it in errors: `an input manifest`.

    `supported`: its version, or several, ascending. Raises UnsupportedVersionError for another version, CorruptStateError for
    malformed content."""
    versions = (supported,) if isinstance(supported, int) else supported
    try:
        version = decode_json(content, dict[str, object]).get("version")
        if version not in versions:
            raise UnsupportedVersionError(
                f"{path}: {what} of version {version}, this Holdfast reads {versions[-1]}",
                path=path,
                version=version,
                supported=versions[-1],
            )
        return decode_json(content, kind)
    except UNDECODABLE as error:
        raise CorruptStateError(f"{path}: not {what}: {error}", path=path, reason=str(error)) from error
