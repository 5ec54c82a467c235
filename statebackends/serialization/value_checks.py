"""Checks that a state makes of a value before it accepts it: that it is of the declared type.

Without them a wrong value would be found when a checkpoint encodes it, long after the record that it came from. They run for each
record, so they check what is cheap: the class, the range of an int, all fields of a record, and a few members at the ends of a
container, where a new value usually is. The encoding still checks all of a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
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
"""Members of a container that are checked at each end."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of one state. Each raises StateValueError naming the state."""

    value: Check
    """Checks a value, list element or map value."""
    values: Callable[[Sequence[Any]], None]
    """Checks several of them."""
    key: Check
    """Checks a map's key."""
    condition: str = ""
    """Python text of the name `value`, and of those in CONDITION_NAMES, that is true for obviously right values, and for no others;
    empty: there is none. For a state that makes it part of what it does with a value: a call less for each record."""


def checks_of(name: str, kind: str, value: ValueType, key: ValueType | None) -> Checks:
    """`name` and `kind` of the state, for errors."""
    check = _top(value, name, kind)

    def check_all(values: Sequence[Any]) -> None:
        if isinstance(value, ScalarType):
            try:
                value.check_all(values)
                return
            except StateValueError:
                pass  # the loop below names the value at fault
        for each in values:
            check(each)

    return Checks(check, check_all, check if key is None else _top(key, name, "key"), _Condition().of(value, "value"))


def _top(value_type: ValueType, name: str, kind: str) -> Check:
    """A check whose errors name the state. For a scalar, or a dict of them, it is a single call, as it runs for each record."""
    whole = _named(_field_by_field(value_type) if isinstance(value_type, RecordType) else value_type.check, name, kind)
    plain = _plain_dict(value_type, whole) if isinstance(value_type, RecordType) else _scalar(value_type, whole)
    named = plain or _named(_check_of(value_type), name, kind)
    return _compiled(value_type, named) or named


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
    return value_type.check  # a pickled value has no checks


def _scalar(value_type: ValueType, whole: Check) -> Check | None:
    """A check that accepts obviously right scalars in one call and leaves others to `whole`; None for other types."""
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


_MEMBERS_COMPILED_MAX = 32
"""Scalars of nested tuples whose check is one expression; of more, each is checked by a call."""


def _compiled(value_type: ValueType, whole: Check) -> Check | None:
    """A check that accepts tuples of obviously right scalars in one expression, a fifth of the time of a call for each, and leaves
    others to `whole`; None for other types."""
    inner = value_type.inner if isinstance(value_type, OptionalType) else value_type
    condition = _Condition()
    if not isinstance(inner, TupleType) or not (text := condition.of(value_type, "value")):
        return None
    check: Check = eval(f"lambda value: ({text}) or whole(value)", {**CONDITION_NAMES, "whole": whole})
    return check


CONDITION_NAMES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, tuple, date, datetime, Decimal)
} | {"type": type}
"""Globals of what is compiled of a condition."""


class _Condition:
    """Python text that is true for values that are obviously of a type; empty for types that have none."""

    def __init__(self) -> None:
        self._count = 0

    def of(self, value_type: ValueType, value: str, first: str = "") -> str:
        """`value`: the text of a name. `first`: what stands for it where it is read first, and gives it its value."""
        first = first or value
        if isinstance(value_type, OptionalType):
            inner = self.of(value_type.inner, value)
            return inner and f"({first} is None or ({inner}))"
        if isinstance(value_type, TupleType):
            return self._of_tuple(value_type, value, first)
        kind = next((kind for kind, known in SCALARS.items() if known is value_type), None)
        if kind is None:
            return ""
        further = {
            int: f" and -0x8000000000000000 <= {value} <= 0x7FFFFFFFFFFFFFFF",
            str: f" and {value}.isascii()",
            datetime: f" and {value}.tzinfo is not None",
        }
        return f"type({first}) is {kind.__name__}{further.get(kind, '')}"

    def _of_tuple(self, value_type: TupleType, value: str, first: str) -> str:
        conditions = [f"type({first}) is tuple and len({value}) == {len(value_type.children)}"]
        for place, child in enumerate(value_type.children):
            self._count += 1
            member = f"v{self._count}"
            condition = self.of(child, member, f"({member} := {value}[{place}])")
            if not condition or self._count > _MEMBERS_COMPILED_MAX:
                return ""
            conditions.append(condition)
        return " and ".join(conditions)


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
    whole = _field_by_field(value_type)
    return _plain_dict(value_type, whole) or whole


def _plain_dict(value_type: RecordType, whole: Check) -> Check | None:
    """A check that accepts dicts of obviously right scalars in few calls and leaves others to `whole`; None for other types."""
    names = value_type.keys_of_scalars()
    if not names:
        return None
    conditions = [f"type(value) is dict and len(value) == {len(names)}"]
    known: dict[str, Any] = {"whole": whole}
    for place, (name, kind) in enumerate(names.items()):
        known[f"name{place}"], known[f"kind{place}"] = name, kind
        conditions.append(f"type(v{place} := value.get(name{place})) is kind{place}")
        if kind is int:
            conditions.append(f"-0x8000000000000000 <= v{place} <= 0x7FFFFFFFFFFFFFFF")
        elif kind is str:
            conditions.append(f"v{place}.isascii()")
    check: Check = eval(f"lambda value: ({' and '.join(conditions)}) or whole(value)", known)  # one expression, half the time
    return check


def _field_by_field(value_type: RecordType) -> Check:
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
            except StateValueError:
                continue
            if type(value) is not int or -(2**63) <= value < 2**64:
                return
        value_type.check(value)  # encoding decides: members may refuse what the union accepts, and a float is no int there

    return check
