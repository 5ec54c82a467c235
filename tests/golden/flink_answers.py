"""What Flink answers, by key and type: the shapes in `flink_answers_2_3.json`, recorded from a real Flink 2.3.0 by `make compat`
(`tests/compat/real_flink.py`); and how an answer of ours is held against one.

A shape is JSON: an object has the shapes of its fields (`name?`: not in every object of a list), or one of `:key` where its keys
are ids or names; a list has that of its items; a scalar is the name of its type, several with bars between."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Shape: TypeAlias = "str | list[Shape] | dict[str, Shape]"

FILE = Path(__file__).with_name("flink_answers_2_3.json")

KEY = ":key"
_ID = re.compile(r"[0-9a-f]{32}")
_NUMBERS_AS_TEXT = ("NaN", "Infinity", "-Infinity")
"""As Flink writes numbers that JSON does not have."""
_BY_STATE = frozenset({"jobs", "status-duration"})
"""Objects with the states that there were."""
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def golden() -> dict[str, dict[str, Any]]:
    """Request, with names for ids -> `status` and `body`."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def shape_of(value: Any) -> Shape:
    if isinstance(value, dict):
        if value and all(_ID.fullmatch(key) for key in value):
            return {KEY: _merged([shape_of(each) for each in value.values()])}
        return {key: _field(key, each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [_merged([shape_of(each) for each in value])] if value else []
    return "number" if value in _NUMBERS_AS_TEXT else _SCALARS[type(value)]


def _field(name: str, value: Any) -> Shape:
    if name in _BY_STATE and isinstance(value, dict) and value:
        return {KEY: _merged([shape_of(each) for each in value.values()])}
    return shape_of(value)


def _merged(shapes: list[Shape]) -> Shape:
    first = shapes[0]
    for other in shapes[1:]:
        first = _both(first, other)
    return first


def _both(one: Shape, other: Shape) -> Shape:
    if isinstance(one, str) and isinstance(other, str):
        return "|".join(sorted({*one.split("|"), *other.split("|")}))
    if isinstance(one, list) and isinstance(other, list):
        return [_merged([*one, *other])] if one or other else []
    if isinstance(one, dict) and isinstance(other, dict):
        return dict(sorted(_fields(one, other)))
    return one if other == "null" else other


def _fields(one: dict[str, Shape], other: dict[str, Shape]) -> Iterator[tuple[str, Shape]]:
    names = {name.removesuffix("?") for name in (*one, *other)}
    for name in names:
        found = [each.get(name, each.get(f"{name}?")) for each in (one, other)]
        known = [each for each in found if each is not None]
        always = all(name in each for each in (one, other))
        yield (name if always else f"{name}?"), _merged(known)


def differences(ours: Any, wanted: Shape, place: str = "") -> Iterator[str]:
    """What a client of Flink would not find as it expects it: a key or a type; nothing of keys that we have beside Flink's."""
    if isinstance(wanted, dict):
        if not isinstance(ours, dict):
            yield f"{place}: {shape_of(ours)}, not an object"
            return
        for name, shape in wanted.items():
            yield from _field_differences(ours, name, shape, place)
    elif isinstance(wanted, list):
        if not isinstance(ours, list):
            yield f"{place}: {shape_of(ours)}, not a list"
            return
        for each in ours if wanted else ():
            yield from differences(each, wanted[0], f"{place}[]")
    else:
        allowed = set(wanted.split("|"))
        allowed |= {"integer"} if "number" in allowed else set()
        told = shape_of(ours)
        if wanted != "null" and (not isinstance(told, str) or told not in allowed):
            yield f"{place}: {told}, not {wanted}"


def _field_differences(ours: dict[str, Any], name: str, shape: Shape, place: str) -> Iterator[str]:
    if name == KEY:
        for key, each in ours.items():
            yield from differences(each, shape, f"{place}.{key}")
        return
    plain = name.removesuffix("?")
    if plain in ours:
        yield from differences(ours[plain], shape, f"{place}.{plain}")
    elif plain == name:
        yield f"{place}.{plain}: missing"
