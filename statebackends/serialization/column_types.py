"""Casts of columns in other tools' tables to a state's types: only those that give equal values.

One rule for rows that are restored, read, edited or written from outside: no text becomes a number, no fraction an integer, no flag
a number; numbers widen where nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from holdfast.statebackends.serialization.value_types import DecimalType, OptionalType, ValueType

_KINDS = (
    pa.types.is_integer,
    pa.types.is_floating,
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind),
    lambda kind: (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    ),
    lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None,
    lambda kind: pa.types.is_timestamp(kind) and kind.tz is None,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
)


def loses_nothing(found: pa.DataType, wanted: pa.DataType, value_type: ValueType | None = None) -> bool:
    """Whether a checked cast from one type to another gives equal values.

    `value_type`: value type of the column, where `wanted` does not show it: decimals are stored as texts, and numbers may become
    such texts, but no other texts."""
    types = pa.types
    value_type = value_type.inner if isinstance(value_type, OptionalType) else value_type
    if types.is_null(found):
        return True
    if isinstance(value_type, DecimalType) and (types.is_decimal(found) or types.is_integer(found)):
        return True
    if types.is_integer(found) and types.is_floating(wanted):
        return True  # the cast refuses a number that has no equal one
    if any(same(found) and same(wanted) for same in _KINDS):
        return not (types.is_floating(found) and found.bit_width > wanted.bit_width)
    if _is_list(found) and _is_list(wanted):
        return _fits(found.value_type, wanted.value_type, _members(value_type, 1)[0])
    if types.is_map(found) and types.is_map(wanted):
        key, item = _members(value_type, 2)
        return _fits(found.key_type, wanted.key_type, key) and _fits(found.item_type, wanted.item_type, item)
    if types.is_struct(found) and types.is_struct(wanted):
        if [field.name for field in found] != [field.name for field in wanted]:
            return False
        members = _members(value_type, wanted.num_fields)
        return all(_fits(old.type, new.type, member) for old, new, member in zip(found, wanted, members, strict=True))
    return False


def fitted(array: pa.Array, wanted: pa.DataType, value_type: ValueType | None = None) -> pa.Array:
    """The column cast to type `wanted`. Raises ValueError or pyarrow's errors if its values have no equal ones there."""
    is_numbered = pa.types.is_dictionary(array.type)
    found = array.type.value_type if is_numbered else array.type
    if not _fits(found, wanted, value_type):  # checked before a dictionary is expanded
        raise ValueError(f"it is {array.type} and has to be {wanted}")
    if is_numbered:
        array = array.cast(found)
    return array if found == wanted else array.cast(wanted)


def _fits(found: pa.DataType, wanted: pa.DataType, value_type: ValueType | None) -> bool:
    return bool(found == wanted) or loses_nothing(found, wanted, value_type)


def _members(value_type: ValueType | None, count: int) -> Sequence[ValueType | None]:
    return value_type.children if value_type is not None and len(value_type.children) == count else [None] * count


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
