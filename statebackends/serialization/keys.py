"""Key types: the declared type of an operator's key, lossless casts to it, and the canonical bytes that identify a key.

A key is one field or a tuple of fields. Its identity is `encode(key)` in every backend, never Python's `==`; its key group follows
from `hash32(key)` (key hash v1) by keygroups.py. The types of a single field are in key_fields.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin

import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, InvalidKeyError
from holdfast.statebackends.keygroups import key_group_of_hash
from holdfast.statebackends.serialization import key_hash, key_types
from holdfast.statebackends.serialization.key_columns import (
    TUPLE_TAG,
    ArrowKeyColumn,
    arrays_of_exact_tuples,
    arrays_of_tuples,
    cast_field,
)
from holdfast.statebackends.serialization.key_fields import KeyFieldType, TimestampField

T = TypeVar("T")

_REPR_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class KeyType:
    """Declared type of a key. Made by `parse`, `of` or `from_arrow`; equal if the texts are."""

    text: str
    """Canonical text, stored in every snapshot: `int64`, `tuple<utf8,date32>` ..."""
    fields: tuple[KeyFieldType, ...]
    is_tuple: bool

    @staticmethod
    def parse(text: str) -> KeyType:
        """Key type of a canonical text. Raises InvalidConfigError."""
        return _parse(text)

    @staticmethod
    def of(python_type: Any) -> KeyType:
        """Key type of a Python class (int, str, bytes, bool, float, date, datetime, tuple[...]) or an Arrow type.

        Raises InvalidConfigError."""
        if isinstance(python_type, KeyType):
            return python_type
        is_tuple = get_origin(python_type) is tuple
        members = get_args(python_type) if is_tuple else (python_type,)
        return _make([_typed(key_types.field_of_python, member) for member in members], is_tuple=is_tuple)

    @staticmethod
    def from_arrow(data_types: Sequence[pa.DataType]) -> KeyType:
        """Key type of the columns by which a stream is keyed: a scalar for one, a tuple for several.

        Raises InvalidConfigError for a column type that no key type holds without loss."""
        fields = [_typed(key_types.field_of_arrow, data_type) for data_type in data_types]
        return _make(fields, is_tuple=len(fields) != 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_parse, (self.text,))

    @property
    def arrow_types(self) -> list[pa.DataType]:
        """One Arrow type per field."""
        return [field.arrow_type for field in self.fields]

    def check(self, value: Any, *, operator: str | None = None) -> Any:
        """The canonical key equal to `value`: a lossless cast, with NumPy and Arrow scalars unwrapped.

        Raises InvalidKeyError naming the operator for a null, another type (bool is not int, int is not float), a value out of
        range, a naive datetime, a lone surrogate."""
        try:
            if not self.is_tuple:
                return key_types.check_member(self.fields[0], value)
            if not isinstance(value, tuple):
                raise ValueError("the key is null" if value is None else f"{type(value).__name__} is not a tuple")
            if len(value) != len(self.fields):
                raise ValueError(f"the tuple has {len(value)} fields")
            return tuple([key_types.check_member(field, member) for field, member in zip(self.fields, value, strict=True)])
        except ValueError as error:
            raise self._refused(str(error), operator, value=repr(value)[:_REPR_LENGTH_MAX]) from error

    def encode(self, value: Any, *, operator: str | None = None) -> bytes:
        """Canonical bytes of a key, which are its identity; their unsigned order is that of keys. Raises InvalidKeyError."""
        key = self.check(value, operator=operator)
        if not self.is_tuple:
            return self.fields[0].encode(key)
        return TUPLE_TAG + b"".join(
            [field.encode(member, nested=True) for field, member in zip(self.fields, key, strict=True)]
        )

    def decode(self, encoded: bytes) -> Any:
        """Inverse of `encode`. Raises CorruptStateError."""
        if not self.is_tuple:
            value, stop = self.fields[0].decode(encoded, 0)
        else:
            if encoded[:1] != TUPLE_TAG:
                raise self._corrupt(encoded)
            members, stop = [], 1
            for field in self.fields:
                member, stop = field.decode(encoded, stop, nested=True)
                members.append(member)
            value = tuple(members)
        if stop != len(encoded):
            raise self._corrupt(encoded)
        return value

    def hash32(self, value: Any, *, operator: str | None = None) -> int:
        """Key hash v1 of a key, 0..2**32-1. Raises InvalidKeyError."""
        key = self.check(value, operator=operator)
        if not self.is_tuple:
            return self.fields[0].hash32(key)
        return key_hash.hash_fields([field.hash32(member) for field, member in zip(self.fields, key, strict=True)])

    def key_group(self, value: Any, max_parallelism: int, *, operator: str | None = None) -> int:
        """Key group of one key. Raises InvalidKeyError."""
        return key_group_of_hash(self.hash32(value, operator=operator), max_parallelism)

    def column(
        self, arrays: Sequence[pa.Array | pa.ChunkedArray], *, max_parallelism: int, operator: str | None = None
    ) -> ArrowKeyColumn:
        """The keys of one batch from one Arrow array per field, cast without loss.

        Raises InvalidKeyError naming the operator and the row of a null; InvalidConfigError on a wrong number of arrays."""
        if len(arrays) != len(self.fields):
            raise InvalidConfigError(f"a key of type {self.text} needs {len(self.fields)} columns, not {len(arrays)}")
        cast = []
        for field, array in zip(self.fields, arrays, strict=True):
            try:
                cast.append(cast_field(field, array))
            except (ValueError, pa.ArrowException) as error:
                raise self._refused(str(error), operator, value=None) from error
        if any(len(array) != len(cast[0]) for array in cast):
            raise InvalidConfigError("the columns of a key differ in length")
        return ArrowKeyColumn(self.fields, self.is_tuple, cast, max_parallelism, operator)

    def column_of_values(
        self, values: Sequence[Any], *, max_parallelism: int, operator: str | None = None
    ) -> ArrowKeyColumn:
        """The keys of one batch from Python values. Raises InvalidKeyError."""
        arrays = self._exact_arrays(values)
        if arrays is None:
            keys = [self.check(value, operator=operator) for value in values]
            columns = zip(*keys, strict=True) if self.is_tuple and keys else [keys] * len(self.fields)
            arrays = [pa.array(column, field.arrow_type) for field, column in zip(self.fields, columns, strict=True)]
        return ArrowKeyColumn(self.fields, self.is_tuple, arrays, max_parallelism, operator)

    def _exact_arrays(self, values: Sequence[Any]) -> list[pa.Array] | None:
        if self.is_tuple:
            return arrays_of_exact_tuples(self.fields, values)
        array = key_types.array_of_exact(self.fields[0], values)
        return None if array is None else [array]

    def values(self, encoded: Sequence[bytes]) -> list[Any]:
        """`decode` of each key. Raises CorruptStateError."""
        if self.is_tuple or isinstance(self.fields[0], TimestampField):
            return [self.decode(row) for row in encoded]
        decoded: list[Any] = self.fields[0].array_of_encoded(encoded).to_pylist()
        return decoded

    def arrays_of_encoded(self, encoded: Sequence[bytes]) -> list[pa.Array]:
        """One Arrow array per field, from canonical bytes. Raises CorruptStateError."""
        if not self.is_tuple:
            return [self.fields[0].array_of_encoded(encoded)]
        return arrays_of_tuples(self.fields, encoded)

    def _refused(self, reason: str, operator: str | None, *, value: str | None) -> InvalidKeyError:
        where = f"operator {operator!r}: " if operator is not None else ""
        shown = f"key {value}: " if value is not None else ""
        return InvalidKeyError(
            f"{where}{shown}{reason} (the key type is {self.text})", operator=operator, subtask=None, value=value
        )

    def _corrupt(self, encoded: bytes) -> CorruptStateError:
        return CorruptStateError(f"{encoded[:60]!r} is not a key of type {self.text}", reason="key encoding")


def _typed(find: Callable[[T], KeyFieldType], named: T) -> KeyFieldType:
    try:
        return find(named)
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error


def _make(fields: Sequence[KeyFieldType], *, is_tuple: bool) -> KeyType:
    if not fields:
        raise InvalidConfigError("a key needs at least one field")
    text = f"tuple<{','.join(field.text for field in fields)}>" if is_tuple else fields[0].text
    return KeyType(text, tuple(fields), is_tuple)


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> KeyType:
    if not (text.startswith("tuple<") and text.endswith(">")):
        return _make([_typed(key_types.parse_field, text)], is_tuple=False)
    names = key_types.split_arguments(text.removeprefix("tuple<").removesuffix(">"))
    return _make([_typed(key_types.parse_field, name.strip()) for name in names], is_tuple=True)


def key_columns(key_type: KeyType) -> list[str]:
    """Names of a key's columns in tables: `key`, or `key_0`, `key_1` ... for a tuple."""
    return [f"key_{index}" for index in range(len(key_type.fields))] if key_type.is_tuple else ["key"]
