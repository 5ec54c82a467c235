"""Serializers of a state's declared type: msgpack bytes, typed Arrow columns, and a canonical text stored with snapshots.

A value comes back equal, or is refused when it is written. Pickle is used for `Pickled` alone. Records are identified by their
fields, not by class names, so that classes may move between modules. `copier_of` decides how a value is copied that a snapshot
still reads. Columns of each type are in value_types.py, the types of Python in python_types.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_origin

import msgspec
import pyarrow as pa

from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, StateValueError
from holdfast.statebackends.serialization.evolution import find_changes
from holdfast.statebackends.serialization.key_types import split_arguments
from holdfast.statebackends.serialization.pickled import pickle_value, unpickle_value
from holdfast.statebackends.serialization.python_types import ENCODER, parse_type, python_type_of_arrow, value_type_of
from holdfast.statebackends.serialization.schema_changes import ChangeKind, Compatibility, SchemaChange, worst_verdict
from holdfast.statebackends.serialization.value_types import (
    SCALARS,
    DictType,
    Form,
    ListType,
    OpaqueType,
    OptionalType,
    RecordType,
    TupleType,
    ValueType,
    refused,
)
from holdfast.statebackends.state import Pickled

Copier = Callable[[Any], Any]


def copier_of(serializer: TypeSerializer) -> Copier | None:
    """Copier of a type's values: None if they can't be changed in place, a shallow copy if that is enough, else a round trip."""
    value_type = serializer.value_type
    if _immutable(value_type):
        return None
    inner = value_type.children[0] if isinstance(value_type, OptionalType) else value_type
    if isinstance(inner, ListType | DictType | RecordType) and all(_immutable(child) for child in inner.children):
        return copy.copy
    return lambda value: serializer.decode(serializer.encode(value))


def _immutable(value_type: ValueType) -> bool:
    if isinstance(value_type, OptionalType | TupleType):
        return all(_immutable(child) for child in value_type.children)
    return value_type in SCALARS.values()


T = TypeVar("T")

__all__ = [
    "Compatibility",
    "Pickled",
    "StateValueError",
    "TypeSerializer",
    "compatibility",
    "map_text",
    "migrate",
    "split_map_text",
]


@dataclass(frozen=True, slots=True)
class TypeSerializer:
    """Serializer of one type. Made by `of` or `parse`; equal if the texts are."""

    text: str
    """Canonical text of the type, stored with every snapshot."""
    value_type: ValueType = field(compare=False, repr=False)
    _encode: Callable[[Any], bytes] = field(compare=False, repr=False)
    _decode: Callable[[bytes], Any] = field(compare=False, repr=False)

    @staticmethod
    def of(declared: Any) -> TypeSerializer:
        """Serializer of a Python type, an Arrow type, or `Pickled`. Raises InvalidConfigError naming the supported types."""
        if isinstance(declared, TypeSerializer):
            return declared
        if declared is Pickled or get_origin(declared) is Pickled:
            return _PICKLED
        try:
            return _of(declared)
        except TypeError as error:
            raise InvalidConfigError(f"{declared!r} is not a state type: {error}") from error

    @staticmethod
    def parse(text: str) -> TypeSerializer:
        """Serializer of a stored text, without the user's classes: records are dicts. Raises InvalidConfigError."""
        return _parse(text)

    @property
    def arrow_type(self) -> pa.DataType:
        """Arrow type of a column of values."""
        return self.value_type.arrow_type

    def check(self, value: Any) -> None:
        """Raises StateValueError for a value that would not come back equal."""
        self.value_type.check(value)

    def encode(self, value: Any) -> bytes:
        """Msgpack of one value; its pickle for `Pickled`. Raises StateValueError."""
        self.value_type.check(value)
        try:
            return self._encode(value)
        except OverflowError:  # an int in place of a float that equals it, which is beyond msgpack's ints
            return self._encode_canonical(value)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise refused(value, self.text, str(error)) from error

    def _encode_canonical(self, value: Any) -> bytes:
        """Msgpack of the equal value that Arrow gives back, in which every float is one. Raises StateValueError."""
        (canonical,) = self.from_arrow(self.to_arrow([value]))
        try:
            return self._encode(canonical)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise refused(value, self.text, str(error)) from error

    def encode_as(self, value: Any, form: Form) -> bytes:
        """Msgpack of `form(value)`, for a map's key. Raises StateValueError."""
        self.value_type.check(value)
        try:
            return self._encode(form(value))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise refused(value, self.text, str(error)) from error

    def encode_all(self, values: Sequence[Any]) -> list[bytes]:
        """`encode` of each."""
        self.value_type.check_all(values)
        try:
            return list(map(self._encode, values))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
            return [self.encode(value) for value in values]  # raises for the value at fault

    def decode(self, encoded: bytes) -> Any:
        """Inverse of `encode`. Raises CorruptStateError."""
        try:
            return self._decode(encoded)
        except (*UNDECODABLE, ValueError, TypeError) as error:
            raise CorruptStateError(f"a value of {self.text} can't be decoded: {error}", reason="value encoding") from error

    def decode_all(self, encoded: Sequence[bytes]) -> list[Any]:
        """`decode` of each."""
        try:
            return list(map(self._decode, encoded))
        except (*UNDECODABLE, ValueError, TypeError):
            return [self.decode(each) for each in encoded]  # raises for the value at fault

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        """A column of `arrow_type`. Raises StateValueError."""
        return self.value_type.to_arrow(values)

    def from_arrow(self, array: pa.Array | pa.ChunkedArray) -> list[Any]:
        """The values of a column written for this type, or for one that `compatibility` accepts.

        Raises CorruptStateError; StateValueError for a value without an equal one in the wider type."""
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        try:
            return self.value_type.from_arrow(array)
        except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
            raise CorruptStateError(f"a column of {array.type} is not {self.text}: {error}", reason="column type") from error


_PICKLED_TYPE = OpaqueType("pickled", pickle_value, unpickle_value)
_PICKLED_TYPE.check = lambda value: None  # type: ignore[method-assign]
_PICKLED = TypeSerializer("pickled", _PICKLED_TYPE, pickle_value, unpickle_value)


def _made(declared: Any, value_type: ValueType) -> TypeSerializer:
    return TypeSerializer(value_type.text, value_type, ENCODER.encode, msgspec.msgpack.Decoder(declared).decode)


@functools.lru_cache(maxsize=1024)
def _of(declared: Any) -> TypeSerializer:
    if isinstance(declared, pa.DataType):
        declared = python_type_of_arrow(declared)
    return _made(declared, value_type_of(declared))


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> TypeSerializer:
    if text == _PICKLED.text:
        return _PICKLED
    try:
        declared = parse_type(text)
        serializer = _made(declared, value_type_of(declared, lenient=True))
    except RecursionError as error:  # the text may be of a snapshot from anywhere
        raise InvalidConfigError(f"the type {text[:100]}... is nested too deeply") from error
    if serializer.text != text:
        raise InvalidConfigError(f"{text!r} is not canonical: {serializer.text!r} is")
    return serializer


def compatibility(stored_text: str, declared: TypeSerializer) -> Compatibility:
    """Whether values stored under one type can be read under another; evolution.py has the rules."""
    return worst_verdict(type_changes(stored_text, declared))


def type_changes(stored_text: str, declared: TypeSerializer) -> list[SchemaChange]:
    """Differences between a stored type and the declared one."""
    if stored_text == declared.text:
        return []
    try:
        stored = TypeSerializer.parse(stored_text)
    except InvalidConfigError:
        return [SchemaChange("", ChangeKind.RETYPED, stored_text, declared.text)]
    return list(find_changes(stored.value_type, declared.value_type))


def migrate(stored_text: str, declared: TypeSerializer, encoded: Sequence[bytes]) -> list[bytes]:
    """Rewrite values stored under a type that is COMPATIBLE_AFTER_MIGRATION.

    Raises CorruptStateError; StateValueError for a value without an equal one in the wider type."""
    if stored_text == declared.text:
        return list(encoded)
    stored = TypeSerializer.parse(stored_text)
    column = stored.to_arrow([stored.decode(row) for row in encoded])
    return [declared.encode(value) for value in declared.from_arrow(column)]


def map_text(key_text: str, value_text: str) -> str:
    """Value type text of a map state."""
    return f"map<{key_text},{value_text}>"


def split_map_text(text: str) -> tuple[str, str]:
    """Key and value type texts of a map state. Raises InvalidConfigError."""
    arguments = split_arguments(text.removeprefix("map<").removesuffix(">"))
    if len(arguments) != 2 or not (text.startswith("map<") and text.endswith(">")):
        raise InvalidConfigError(f"{text!r} is not the value type of a map state")
    return arguments[0], arguments[1]
