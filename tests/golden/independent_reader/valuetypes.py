"""Types of values: their texts, and values of columns and of msgpack."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from .errors import require
from .keys import key_json

SCALARS = ("bool", "int", "float", "str", "bytes", "date", "datetime", "decimal")
OPAQUE = ("time", "timedelta", "uuid", "union", "empty", "pickled")


def parse_type(text: str) -> Any:
    """A scalar's name, or a tuple: ("list", member), ("struct", [(name, type, has default), ...]) ..."""
    parsed, stop = parse_at(text, 0)
    require(stop == len(text), f"type {text!r}")
    return parsed


def parse_at(text: str, at: int) -> tuple[Any, int]:
    word = re.compile(r"\w+").match(text, at)
    require(word is not None, f"type {text!r} at {at}")
    assert word is not None
    name, at = word[0], word.end()
    if text[at : at + 1] != "<":
        require(name in SCALARS or name in OPAQUE, f"type {name!r}")
        return name, at
    at += 1
    if name in ("struct", "namedtuple"):
        fields = []
        while text[at] != ">":
            at += 2 if text[at : at + 2] == ", " else 0
            if text[at] == '"':
                field, length = json.JSONDecoder().raw_decode(text[at:])
                at += length
            else:
                name_of_field = re.compile(r"\w+").match(text, at)
                assert name_of_field is not None
                field = name_of_field[0]
                at += len(field)
            member, at = parse_at(text, at + 2)
            default = text.startswith(" = default", at)
            fields.append((field, member, default))
            at += len(" = default") if default else 0
        return (name, fields) if fields else "empty", at + 1
    members = []
    while text[at - 1] != ">":
        if text.startswith("...>", at):
            name, at = "list", at + 4
            break
        member, at = parse_at(text, at)
        members.append(member)
        at += 1
    match name:
        case "optional" | "list" | "dict" | "map" | "ttl":
            return (name, *members), at
        case "set" | "frozenset":
            return ("set", *members), at
        case "tuple":
            return ("tuple", members), at
    require(name == "union", f"type {name!r}")
    return "union", at


def from_arrow(kind: Any, value: Any) -> Any:
    """Plain JSON of a value of a column."""
    match kind:
        case "pickled":
            return {"pickle": value.hex()}
        case "time" | "timedelta" | "uuid" | "union" | "empty":
            return from_msgpack(kind, msgspec.msgpack.decode(value))
        case "decimal":
            return {"decimal": value}
        case str():
            return key_json(value)
        case ("optional", inner):
            return None if value is None else from_arrow(inner, value)
        case ("list", inner):
            return [from_arrow(inner, member) for member in value]
        case ("set", inner):
            return {"set": sorted((from_arrow(inner, member) for member in value), key=json.dumps)}
        case ("tuple", members):
            return {"tuple": [from_arrow(inner, value[str(index)]) for index, inner in enumerate(members)]}
        case ("dict", key, inner):
            return {"dict": [[from_arrow(key, k), from_arrow(inner, member)] for k, member in value]}
    present = [field for field in kind[1] if value[field[0]] is not None or field[1][0] == "optional" or not field[2]]
    return {"struct": {name: from_arrow(inner, value[name]) for name, inner, _ in present}}


def from_msgpack(kind: Any, value: Any) -> Any:
    """Plain JSON of a value that was decoded from msgpack."""
    match kind:
        case "time" | "timedelta" | "uuid":
            return {"text": value}
        case "decimal":
            return {"decimal": value}
        case "date":
            return {"date": value}
        case "float":
            return {"float": repr(float(value))}
        case str():
            return key_json(value)
        case ("optional", inner):
            return None if value is None else from_msgpack(inner, value)
        case ("list", inner):
            return [from_msgpack(inner, member) for member in value]
        case ("set", inner):
            return {"set": sorted((from_msgpack(inner, member) for member in value), key=json.dumps)}
        case ("tuple", members):
            return {"tuple": [from_msgpack(inner, member) for inner, member in zip(members, value, strict=True)]}
        case ("dict", key, inner):
            return {"dict": [[from_msgpack(key, k), from_msgpack(inner, member)] for k, member in value.items()]}
        case ("namedtuple", fields):
            value = dict(zip((name for name, _, _ in fields), value, strict=False))
    present = [(name, inner) for name, inner, default in kind[1] if name in value or not default]
    return {"struct": {name: from_msgpack(inner, value[name]) for name, inner in present}}
