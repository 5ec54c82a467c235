"""How a value of a declared type is copied, so that changing the copy leaves the original as it was.

Needed where a value is still being read by a snapshot. Scalars and tuples of them need no copy at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from holdfast.statebackends.serialization.recordshapes import RecordShape
from holdfast.statebackends.serialization.shapes import SCALARS, DictShape, ListShape, OptionalShape, Shape, TupleShape
from holdfast.statebackends.serialization.type_serializer import TypeSpec

Copier = Callable[[Any], Any]


def copier_of(spec: TypeSpec) -> Copier | None:
    """None when values can't be changed in place; a shallow copy when that is deep enough; else a round trip."""
    shape = spec.shape
    if _immutable(shape):
        return None
    inner = shape.children[0] if isinstance(shape, OptionalShape) else shape
    if isinstance(inner, ListShape | DictShape | RecordShape) and all(_immutable(child) for child in inner.children):
        return copy.copy
    return lambda value: spec.decode(spec.encode(value))


def _immutable(shape: Shape) -> bool:
    if isinstance(shape, OptionalShape | TupleShape):
        return all(_immutable(child) for child in shape.children)
    return shape in SCALARS.values()
