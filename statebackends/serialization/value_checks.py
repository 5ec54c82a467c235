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
from holdfast.statebackends.serialization.value_types import (
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


def _top(value_type: ValueType, name: str, kind: str) -> Check:
    """Errors name the state. Of a scalar it is one call in all, which is what a record can afford."""
    return _scalar(value_type, _named(value_type.check, name, kind)) or _named(_check_of(value_type), name, kind)


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


def _check_of(value_type: ValueType) -> Check:
    scalar = _scalar(value_type, value_type.check)
    if scalar is not None:
        return scalar
    if isinstance(value_type, OptionalType):
        inner = _check_of(value_type.inner)
        return lambda value: None if value is None else inner(value)
    if isinstance(value_type, ListType):
        return _container(value_type)
    if isinstance(value_type, DictType):
        return _dict(value_type)
    if isinstance(value_type, TupleType):
        return _tuple(value_type)
    if isinstance(value_type, RecordType):
        return _record(value_type)
    if isinstance(value_type, OpaqueType) and value_type.members:
        return _union(value_type, [_check_of(member) for member in value_type.members])
    return value_type.check  # nothing to ask of what is pickled


def _scalar(value_type: ValueType, whole: Check) -> Check | None:
    """One call for what is obviously right; `whole` decides on the rest. None if nothing is obvious about the type."""
    for kind, check in (
        (int, lambda value: (type(value) is int and -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF) or whole(value)),
        (float, lambda value: type(value) is float or whole(value)),
        (str, lambda value: (type(value) is str and value.isascii()) or whole(value)),
        (bool, lambda value: type(value) is bool or whole(value)),
        (bytes, lambda value: type(value) is bytes or whole(value)),
        (datetime, lambda value: (type(value) is datetime and value.tzinfo is not None) or whole(value)),
    ):
        if value_type is SCALARS[kind]:
            return check
    return None


def _container(value_type: ListType) -> Check:
    inner, container = _check_of(value_type.inner), value_type.container

    def check(value: Any) -> None:
        if not isinstance(value, container):
            raise refused(value, value_type.text)
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


def _dict(value_type: DictType) -> Check:
    check_key, check_value = map(_check_of, value_type.children)

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise refused(value, value_type.text)
        items = value.items()
        ends = items if len(value) <= 2 * MEMBERS_MAX else [*islice(items, MEMBERS_MAX), *islice(reversed(items), MEMBERS_MAX)]
        for key, member in ends:
            check_key(key)
            check_value(member)

    return check


def _tuple(value_type: TupleType) -> Check:
    checks = [_check_of(child) for child in value_type.children]

    def check(value: Any) -> None:
        if not isinstance(value, tuple) or len(value) != len(checks):
            raise refused(value, value_type.text)
        for member, inner in zip(value, checks, strict=True):
            inner(member)

    return check


def _record(value_type: RecordType) -> Check:
    fields = [(field, _check_of(field.value_type)) for field in value_type.fields]

    def check(value: Any) -> None:
        value_type.check_class(value)
        for field, inner in fields:
            member = value_type.read(value, field)
            if member is not MISSING:
                try:
                    inner(member)
                except StateValueError as error:
                    raise StateValueError(f"field {field.attribute!r}: {error.message}", **error.fields) from error

    return check


def _union(value_type: OpaqueType, members: list[Check]) -> Check:
    def check(value: Any) -> None:
        for inner in members:
            try:
                inner(value)
                return
            except StateValueError:
                continue
        value_type.check(value)  # as it is encoded: that alone decides

    return check
