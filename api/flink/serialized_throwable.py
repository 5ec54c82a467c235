"""A failure as the Java object from which Flink's clients read it: `org.apache.flink.util.SerializedThrowable`, serialized.

Flink's `failure-cause` has this object's bytes beside its text, and its clients read the bytes alone: without them a client of
Flink 2.3 takes the answer for a lost connection and repeats its request for a minute. Source: Java Object Serialization
Specification, section 6 (Object Serialization Stream Protocol); names, types and serialVersionUIDs as `serialver` and `javap -p`
print them for the classes of Flink 2.3.0 and Java 17. `make compat` lets a JVM read it back."""

from __future__ import annotations

import struct
from dataclasses import dataclass

CHARACTERS_MAX = 16_384
"""Characters of a class name or text, at most; longer ones are cut."""
SHORT_BYTES_MAX = 0xFFFF
"""Bytes of a string whose length has two bytes, at most."""

_HEADER = b"\xac\xed\x00\x05"
"""STREAM_MAGIC and STREAM_VERSION."""
_NULL = b"\x70"
_REFERENCE = b"\x71"
_CLASS = b"\x72"
_OBJECT = b"\x73"
_STRING = b"\x74"
_END_OF_BLOCK = b"\x78"
_LONG_STRING = b"\x7c"
_FIRST_HANDLE = 0x7E0000

_SERIALIZABLE = 0x02
_WITH_WRITE_METHOD = 0x01
"""The class has a `writeObject`, whose data ends with an end of block."""


@dataclass(frozen=True, slots=True)
class _Field:
    """Field of a class; fields are in the stream's order, by name."""

    name: str
    type: str
    """Signature of a reference type: `L...;` or `[...`."""


@dataclass(frozen=True, slots=True)
class _Class:
    name: str
    version: int
    """serialVersionUID of the class."""
    flags: int
    fields: tuple[_Field, ...] = ()


_THROWABLE = _Class(
    "java.lang.Throwable",
    -3042686055658047285,
    _SERIALIZABLE | _WITH_WRITE_METHOD,
    (
        _Field("cause", "Ljava/lang/Throwable;"),
        _Field("detailMessage", "Ljava/lang/String;"),
        _Field("stackTrace", "[Ljava/lang/StackTraceElement;"),
        _Field("suppressedExceptions", "Ljava/util/List;"),
    ),
)
_EXCEPTION = _Class("java.lang.Exception", -3387516993124229948, _SERIALIZABLE)
_SERIALIZED_THROWABLE = _Class(
    "org.apache.flink.util.SerializedThrowable",
    7284183123441947635,
    _SERIALIZABLE,
    (
        _Field("fullStringifiedStackTrace", "Ljava/lang/String;"),
        _Field("originalErrorClassName", "Ljava/lang/String;"),
        _Field("serializedException", "[B"),
    ),
)


class _Stream:
    """Bytes of one stream, with the positions of type names, which later fields refer to."""

    def __init__(self) -> None:
        self._parts = [_HEADER]
        self._handles = 0
        self._types: dict[str, int] = {}

    def put(self, *parts: bytes) -> None:
        self._parts += parts

    def string(self, text: str) -> None:
        """Write a new String object."""
        encoded = modified_utf8(text)
        self._handles += 1
        if len(encoded) <= SHORT_BYTES_MAX:
            self.put(_STRING, struct.pack(">H", len(encoded)), encoded)
        else:
            self.put(_LONG_STRING, struct.pack(">Q", len(encoded)), encoded)

    def describe(self, described: _Class) -> None:
        """Write a class description, up to its superclass."""
        self._handles += 1
        self.put(_CLASS, _utf(described.name), struct.pack(">qBH", described.version, described.flags, len(described.fields)))
        for field in described.fields:
            self.put(field.type[:1].encode(), _utf(field.name))
            self._type(field.type)
        self.put(_END_OF_BLOCK)  # no annotation

    def _type(self, name: str) -> None:
        if name in self._types:
            self.put(_REFERENCE, struct.pack(">I", _FIRST_HANDLE + self._types[name]))
        else:
            self._types[name] = self._handles
            self.string(name)

    def finish(self) -> bytes:
        return b"".join(self._parts)


def modified_utf8(text: str) -> bytes:
    """Java's own UTF-8: a null character takes two bytes, one beyond the basic plane two surrogates of three bytes each."""
    units = text.encode("utf-16-be", "surrogatepass")
    characters = (chr(unit) for (unit,) in struct.iter_unpack(">H", units))
    return b"".join(b"\xc0\x80" if each == "\0" else each.encode("utf-8", "surrogatepass") for each in characters)


def _utf(text: str) -> bytes:
    encoded = modified_utf8(text)
    return struct.pack(">H", len(encoded)) + encoded


def serialize_throwable(class_name: str, text: str) -> bytes:
    """Serialize a SerializedThrowable without cause, frames and original exception: it prints as `class_name: text`.

    Both texts are cut at CHARACTERS_MAX; every character is allowed."""
    class_name, text = class_name[:CHARACTERS_MAX], text[:CHARACTERS_MAX]
    stream = _Stream()
    stream.put(_OBJECT)
    for described in (_SERIALIZED_THROWABLE, _EXCEPTION, _THROWABLE):
        stream.describe(described)
    stream.put(_NULL)  # Object is not serializable: no description of it follows
    # Values follow by class, the topmost first. A null stack trace is an empty one; null suppressed exceptions are none.
    stream.put(_NULL)
    stream.string(text)
    stream.put(_NULL, _NULL, _END_OF_BLOCK)
    stream.string(f"{class_name}: {text}")
    stream.string(class_name)
    stream.put(_NULL)
    return stream.finish()
