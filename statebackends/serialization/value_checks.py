"""What a state asks of a value before it takes it: that it is of the declared type. Without it a wrong value is found when a
checkpoint encodes it, and nobody knows any more which record it came from.

Asked for each record, so it looks at what is cheap: the class, the range of an int, every field of a record, and of a container a
few members at its ends, where a value that was just added is. The encoding still checks all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, TypeAlias

from holdfast.statebackends.errors import StateValueError
from holdfast.statebackends.serialization.shapes import (
    MISSING,
    SCALARS,
    DictType,
    ListType,
    OpaqueType,
    OptionalType,
    RecordType,
    ScalarType,
    TupleType,
    ValueType,
    refused,
)

Check: TypeAlias = Callable[[Any], Any]
"""Raises StateValueError for a value that is not of the type."""

MEMBERS_MAX = 4
"""Of a container, that are looked at on either side."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Of one state. Each raises StateValueError that names the state."""

    value: Check
    """Of what one key has, one element of a list, one value of a map."""
    values: Callable[[Sequence[Any]], None]
    """Of several at once."""
    key: Check
    """Of a map's key."""


def checks_of(name: str, kind: str, value: ValueType, key: ValueType | None) -> Checks:
    """`name` and `kind` of the state, for errors."""
    check = _top(value, name, kind)

    def check_all(values: Sequence[Any]) -> None:
        if isinstance(value, ScalarType):
            try:
                value.check_all(values)
                return
            except StateValueError:
                pass  # the one at fault is named below
        for each in values:
            check(each)

    return Checks(check, check_all, check if key is None else _top(key, name, "key"))


def _top(shape: ValueType, name: str, kind: str) -> Check:
    """Errors name the state. Of a scalar it is one call in all, which is what a record can afford."""
    return _scalar(shape, _named(shape.check, name, kind)) or _named(_check_of(shape), name, kind)


_WHOSE = {
    "reducing": "what its function makes of two values",
    "aggregating": "the accumulator that its function returns",
    "key": "a key of its map",
}


def _named(check: Check, name: str, kind: str) -> Check:
    whose = f", {_WHOSE[kind]}" if kind in _WHOSE else ""

    def named(value: Any) -> None:
        try:
            check(value)
        except StateValueError as error:
            hint = ""
            if value is None:
                hint = ": does it lack a `return`?" if kind in ("reducing", "aggregating") else ": use clear() to forget the value"
            raise StateValueError(f"state {name!r}{whose}: {error.message}{hint}", **error.fields, state=name) from error

    return named


def _check_of(shape: ValueType) -> Check:
    scalar = _scalar(shape, shape.check)
    if scalar is not None:
        return scalar
    if isinstance(shape, OptionalType):
        inner = _check_of(shape.inner)
        return lambda value: None if value is None else inner(value)
    if isinstance(shape, ListType):
        return _container(shape)
    if isinstance(shape, DictType):
        return _dict(shape)
    if isinstance(shape, TupleType):
        return _tuple(shape)
    if isinstance(shape, RecordType):
        return _record(shape)
    if isinstance(shape, OpaqueType) and shape.members:
        return _union(shape, [_check_of(member) for member in shape.members])
    return shape.check  # nothing to ask of what is pickled


def _scalar(shape: ValueType, whole: Check) -> Check | None:
    """One call for what is obviously right; `whole` decides on the rest. None if nothing is obvious about the type."""
    for kind, check in (
        (int, lambda value: (type(value) is int and -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF) or whole(value)),
        (float, lambda value: type(value) is float or whole(value)),
        (str, lambda value: (type(value) is str and value.isascii()) or whole(value)),
        (bool, lambda value: type(value) is bool or whole(value)),
        (bytes, lambda value: type(value) is bytes or whole(value)),
        (datetime, lambda value: (type(value) is datetime and value.tzinfo is not None) or whole(value)),
    ):
        if shape is SCALARS[kind]:
            return check
    return None


def _container(shape: ListType) -> Check:
    inner, container = _check_of(shape.inner), shape.container

    def check(value: Any) -> None:
        if not isinstance(value, container):
            raise refused(value, shape.text)
        if len(value) <= 2 * MEMBERS_MAX:
            for member in value:
                inner(member)
            return
        for member in islice(value, MEMBERS_MAX):
            inner(member)
        if isinstance(value, list | tuple):
            for member in value[-MEMBERS_MAX:]:
                inner(member)

    return check


def _dict(shape: DictType) -> Check:
    check_key, check_value = map(_check_of, shape.children)

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise refused(value, shape.text)
        items = value.items()
        ends = items if len(value) <= 2 * MEMBERS_MAX else [*islice(items, MEMBERS_MAX), *islice(reversed(items), MEMBERS_MAX)]
        for key, member in ends:
            check_key(key)
            check_value(member)

    return check


def _tuple(shape: TupleType) -> Check:
    checks = [_check_of(child) for child in shape.children]

    def check(value: Any) -> None:
        if not isinstance(value, tuple) or len(value) != len(checks):
            raise refused(value, shape.text)
        for member, inner in zip(value, checks, strict=True):
            inner(member)

    return check


def _record(shape: RecordType) -> Check:
    fields = [(field, _check_of(field.shape)) for field in shape.fields]

    def check(value: Any) -> None:
        shape.check_class(value)
        for field, inner in fields:
            member = shape.read(value, field)
            if member is not MISSING:
                try:
                    inner(member)
                except StateValueError as error:
                    raise StateValueError(f"field {field.attribute!r}: {error.message}", **error.fields) from error

    return check


def _union(shape: OpaqueType, members: list[Check]) -> Check:
    def check(value: Any) -> None:
        for inner in members:
            try:
                inner(value)
                return
            except StateValueError:
                continue
        shape.check(value)  # as it is encoded: that alone decides

    return check
