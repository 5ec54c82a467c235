"""Values that come back from a snapshot as the same values of the same classes, not merely as equal ones.

A snapshot gives back `3` for a NumPy 3, and UTC for another zone of the same instant: equal, and yet not what was put in. Where an
object takes the place of what a snapshot would give back, it has to be of a type, and of exactly the classes, that make no such
difference, and that nobody can have changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from operator import itemgetter
from typing import Any

from holdfast.statebackends.serialization.value_types import SCALARS, OptionalType, TupleType, ValueType

_EXACT = {id(SCALARS[kind]): kind for kind in (bool, int, float, str, bytes, date)}
"""Scalars whose values of exactly the class come back bit for bit. Not datetime, which comes back in UTC, and not Decimal."""


def may_be_exact(value_type: ValueType) -> bool:
    """Whether values of the type come back as they are, if they are of exactly its classes."""
    if isinstance(value_type, OptionalType | TupleType):
        return all(may_be_exact(child) for child in value_type.children)
    return id(value_type) in _EXACT


def are_exact(value_type: ValueType, values: Sequence[Any]) -> bool:
    """Whether all values, which were accepted for a type that `may_be_exact`, are of exactly its classes. A few ns a scalar."""
    if isinstance(value_type, OptionalType):
        return are_exact(value_type.children[0], [value for value in values if value is not None])
    if isinstance(value_type, TupleType):
        children = value_type.children
        if not set(map(type, values)) <= {tuple} or not set(map(len, values)) <= {len(children)}:
            return False
        return all(are_exact(child, list(map(itemgetter(place), values))) for place, child in enumerate(children))
    return set(map(type, values)) <= {_EXACT.get(id(value_type))}
