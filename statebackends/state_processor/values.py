"""Values of stored states, without the user's classes: bytes by which they compare, and operators' entries as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, InvalidConfigError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.serialization.state_serializer import (
    CODED_KINDS,
    StateSerializer,
    has_stamps,
    serializer_of_meta,
    stored_type,
    value_texts,
)
from holdfast.statebackends.serialization.value_types import DictType, ListType, OptionalType, RecordType, TupleType, ValueType
from holdfast.statebackends.state_processor.contents import StoredState

Normaliser = Callable[[Any], Any]

_NO_TIME_OF_PYTHON = (ValueError, OverflowError, KeyError)
"""Raised by pyarrow for a time that Python has none for: behind the year 9999, of nanoseconds, of a zone that this host lacks."""


def _nanoseconds(value: Any) -> str:
    """Text of a time of nanoseconds, which pyarrow gives as an object of pandas where that is installed."""
    if isinstance(value, datetime | timedelta):
        return str(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_encode = msgspec.msgpack.Encoder(enc_hook=_nanoseconds).encode


def python_values(column: pa.Array) -> list[Any]:
    """The values of a column as Python's objects; one with a time that Python can't have has the numbers of its times instead.

    Columns of joins, windows and row tables hold whatever times the records had. Raises pyarrow's errors, ValueError."""
    try:
        values: list[Any] = column.to_pylist()
    except _NO_TIME_OF_PYTHON:
        return [_python_value(column.slice(row, 1)) for row in range(len(column))]
    return values


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch as dicts of `python_values`."""
    columns = [python_values(column) for column in batch.columns]
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] if names else [{}] * batch.num_rows


def _python_value(one: pa.Array) -> Any:
    try:
        return one.to_pylist()[0]
    except _NO_TIME_OF_PYTHON:
        return one.cast(_numbered(one.type)).to_pylist()[0]


def _numbered(kind: pa.DataType) -> pa.DataType:
    """The type with integers in place of times, at any depth."""
    types = pa.types
    if types.is_date32(kind) or types.is_time32(kind):
        return pa.int32()
    if types.is_temporal(kind):
        return pa.int64()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_numbered(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_numbered(kind.key_type), _numbered(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_numbered(kind.value_type), kind.list_size)
    if types.is_list(kind):
        return pa.list_(_numbered(kind.value_type))
    if types.is_large_list(kind):
        return pa.large_list(_numbered(kind.value_type))
    return kind


def _same(value: Any) -> Any:
    return value


def stored_serializer(state: StoredState) -> StateSerializer | None:
    """Serializer of a keyed state; None for kinds with columns of their own. Raises CorruptStateError."""
    try:
        return serializer_of_meta(state.meta)
    except (InvalidConfigError, RecursionError) as error:
        raise state.corrupt(f"type: {error}") from error


class Comparer:
    """Encoder of values, as read from Arrow, to bytes that are equal if the values are.

    The encoding is that of stored values, with sets and dicts put into order first."""

    def __init__(self, meta: StateMeta) -> None:
        self._normalise: Normaliser = _same
        self._stamped = False
        if meta.kind in CODED_KINDS:
            self._normalise = _normaliser(stored_type(value_texts(meta)[1]).value_type)
            self._stamped = has_stamps(meta)

    def encode(self, columns: Sequence[Sequence[Any]]) -> list[bytes]:
        """Encoding of each row of these value columns; a value with a TTL compares with its stamp. Raises CorruptStateError."""
        try:
            if self._stamped:
                values, stamps = columns
                return [_encode([self._normalise(value), stamp]) for value, stamp in zip(values, stamps, strict=True)]
            if len(columns) != 1:
                return [_encode(row) for row in zip(*columns, strict=True)]
            if self._normalise is _same:
                return [_encode(value) for value in columns[0]]
            return [_encode(self._normalise(value)) for value in columns[0]]
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise CorruptStateError(f"a value can't be encoded: {error}", reason="value encoding") from error


def _normaliser(value_type: ValueType) -> Normaliser:
    """Function that puts a value's sets and dicts into order; `_same` for a type without them."""
    inner = [_normaliser(child) for child in value_type.children]
    match value_type:
        case ListType():
            unordered = value_type.text.startswith(("set<", "frozenset<"))
            return _of_members(inner[0], unordered=unordered) if unordered or inner[0] is not _same else _same
        case DictType():
            return _of_entries(*inner)
        case _ if all(each is _same for each in inner):
            return _same
        case OptionalType():
            return lambda value: None if value is None else inner[0](value)
        case RecordType() | TupleType():
            names = [field.name for field in value_type.arrow_type]
            pairs = list(zip(names, inner, strict=True))
            return lambda value: None if value is None else {name: each(value[name]) for name, each in pairs}
    return _same


def _of_members(inner: Normaliser, *, unordered: bool) -> Normaliser:
    def normalise(value: Any) -> Any:
        if value is None:
            return None
        members = [inner(member) for member in value]
        return sorted(members, key=_encode) if unordered else members

    return normalise


def _of_entries(key: Normaliser, member: Normaliser) -> Normaliser:
    def normalise(value: Any) -> Any:
        if value is None:
            return None
        return sorted(((key(k), member(v)) for k, v in value), key=lambda entry: _encode(entry[0]))

    return normalise


def plain_entry(entry: bytes) -> Any:
    """The value of an operator's list entry if it is msgpack, as most are; else its bytes."""
    try:
        return msgspec.msgpack.decode(entry)
    except (*UNDECODABLE, ValueError):
        return entry


def entry_json(entry: bytes) -> str | None:
    """JSON text of an operator's list entry; None unless it is msgpack of a value that JSON has."""
    value = plain_entry(entry)
    if isinstance(value, bytes):
        return None
    try:
        return msgspec.json.encode(value).decode("utf-8")
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return None


def named(error: HoldfastError, state: StoredState, path: str | None = None) -> CorruptStateError:
    """An error about a value or key, naming operator and state."""
    return state.corrupt(error.message, path)
