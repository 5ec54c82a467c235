"""Keys: their types, hashes, key groups and canonical bytes."""

from __future__ import annotations

import re
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from .errors import UnreadableError, require

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def key_fields(text: str) -> list[str]:
    if not text.startswith("tuple<"):
        return [text]
    return re.split(r",(?![^(\[]*[)\]])", text[len("tuple<") : -1])


def key_json(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": repr(value)}
        case bytes():
            return {"bytes": value.hex()}
        case datetime():
            return {"us": (value - EPOCH) // MICROSECOND}
        case date():
            return {"date": value.isoformat()}
        case Decimal():
            return {"decimal": str(value)}
    raise UnreadableError(type(value).__name__)


def key_hash(field: str, value: Any) -> int:
    """h32 of one field."""
    if field == "bool":
        return 1231 if value else 1237
    if field == "utf8":
        h = 0
        for (unit,) in struct.iter_unpack("<H", value.encode("utf-16-le")):
            h = (31 * h + unit) & MASK32
        return h
    if field == "binary":
        h = 1
        for byte in value:
            h = (31 * h + byte - (256 if byte > 127 else 0)) & MASK32
        return h
    bits = int64_of(field, value) & MASK64
    return (bits ^ (bits >> 32)) & MASK32


def int64_of(field: str, value: Any) -> int:
    match field:
        case "int64":
            return int(value)
        case "date32":
            return int(value.toordinal() - date(1970, 1, 1).toordinal())
        case "timestamp[us, UTC]":
            return int((value - EPOCH) // MICROSECOND)
        case "float64":
            return 0x7FF8000000000000 if value != value else int(struct.unpack(">Q", struct.pack(">d", value + 0.0))[0])
    scale = re.fullmatch(r"decimal128\(\d+, (-?\d+)\)", field)
    require(scale is not None, f"key field {field!r}")
    assert scale is not None
    unscaled = int(value.scaleb(int(scale[1])))
    return (unscaled >> 64) ^ unscaled


def spread(h: int) -> int:
    """0 .. 2**31 - 1."""
    code = (h & MASK32) * 0xCC9E2D51 & MASK32
    code = ((code << 15 | code >> 17) & MASK32) * 0x1B873593 & MASK32
    code = ((code << 13 | code >> 19) & MASK32) * 5 + 0xE6546B64 & MASK32
    code ^= 4
    code ^= code >> 16
    code = code * 0x85EBCA6B & MASK32
    code ^= code >> 13
    code = code * 0xC2B2AE35 & MASK32
    code ^= code >> 16
    return code if code < 1 << 31 else (1 << 32) - code & 0x7FFFFFFF


def key_group(hashes: list[int], names: list[str], max_parallelism: int) -> int:
    h = hashes[0]
    if names != ["key"]:
        h = 1
        for each in hashes:
            h = (31 * h + each) & MASK32
    return spread(h) % max_parallelism


def decode_key(text: str, data: bytes) -> list[Any]:
    """The fields of canonical key bytes."""
    fields, at, nested = key_fields(text), 0, text.startswith("tuple<")
    if nested:
        require(data[:1] == b"\x09", "tag of a tuple")
        at = 1
    values = []
    for field in fields:
        value, at = decode_field(field, data, at, nested)
        values.append(value)
    require(at == len(data), "bytes after a key")
    return values


def decode_field(field: str, data: bytes, at: int, nested: bool) -> tuple[Any, int]:
    tag, width = KEY_TAGS[field.partition("(")[0]]
    require(data[at] == tag, f"tag of {field}")
    at += 1
    if width == 0:
        end = re.compile(rb"\0(?!\xff)").search(data, at) if nested else None
        require(end is not None or not nested, f"end of {field}")
        stop = len(data) if end is None else end.start()
        body = data[at:stop].replace(b"\0\xff", b"\0") if nested else data[at:]
        return (body.decode("utf-8") if field == "utf8" else body), stop + nested
    number = int.from_bytes(data[at : at + width], "big")
    at += width
    match field:
        case "bool":
            return number != 0, at
        case "int64":
            return number - (1 << 63), at
        case "timestamp[us, UTC]":
            return EPOCH + MICROSECOND * (number - (1 << 63)), at
        case "date32":
            return date.fromordinal(number - (1 << 31) + date(1970, 1, 1).toordinal()), at
        case "float64":
            bits = number ^ (1 << 63) if number >> 63 else number ^ MASK64
            return struct.unpack(">d", bits.to_bytes(8, "big"))[0], at
    scale = int(field.rpartition(", ")[2][:-1])
    return Decimal(number - (1 << 127)).scaleb(-scale), at


KEY_TAGS = {"bool": (1, 1), "int64": (2, 8), "float64": (3, 8), "utf8": (4, 0), "binary": (5, 0), "date32": (6, 4),
            "timestamp[us, UTC]": (7, 8), "decimal128": (8, 16)}  # fmt: skip
