"""Value type of a declared Python type, and plain Python type of a value type's text.

A declared type whose values would not come back equal is refused when the graph is built. A type made from a text needs none of the
user's classes, so that tools read any snapshot. How values are converted is for value_types.py."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NotRequired, get_args, get_origin
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.serialization.value_types import (
    MISSING,
    SCALARS,
    DictType,
    ListType,
    OpaqueType,
    OptionalType,
    RecordField,
    RecordType,
    TupleType,
    ValueType,
)

_OPAQUE_NAMES: dict[Any, str] = {time: "time", timedelta: "timedelta", UUID: "uuid"}
_COLLECTIONS: dict[Any, str] = {list: "list", set: "set", frozenset: "frozenset"}
_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz")
_HINT = (
    "use int, float, bool, str, bytes, date, datetime, Decimal, list[...], dict[...], tuple[...], set[...], "
    "X | None, a msgspec.Struct, dataclass, NamedTuple or TypedDict; or Pickled, to opt into pickle"
)


def encode_unusual(value: Any) -> Any:
    """Plain value, for msgpack, of an object that ValueType.check accepts: a NumPy or Arrow scalar, or one of a subclass."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, pa.Scalar):
        return value.as_py()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, datetime):
        return datetime.fromisoformat(value.isoformat())
    if isinstance(value, date):
        return date(value.year, value.month, value.day)
    if isinstance(value, list | tuple | set | frozenset | dict):
        return next(base for base in (list, tuple, set, frozenset, dict) if isinstance(value, base))(value)
    raise TypeError(f"{type(value).__name__} can't be stored")


ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_unusual)


def value_type_of(python_type: Any, *, lenient: bool = False) -> ValueType:
    """The value type of a declared type. Raises InvalidConfigError.

    `lenient`: accept records in which an absent key and None look alike; tools read such, but they can't be declared."""
    return _Builder(lenient).build(python_type)


class _Builder:
    """Walk over one type, which remembers the records around it to refuse recursive ones."""

    def __init__(self, lenient: bool) -> None:
        self._lenient = lenient
        self._open: list[Any] = []

    def build(self, declared: Any) -> ValueType:
        if get_origin(declared) is typing.Annotated:
            return self._annotated(*get_args(declared))
        scalar = SCALARS.get(declared) if isinstance(declared, type) else None
        if scalar is not None:
            return scalar
        if declared in _OPAQUE_NAMES:
            return _opaque(_OPAQUE_NAMES[declared], declared)
        origin, arguments = get_origin(declared), get_args(declared)
        if origin in (typing.Union, types.UnionType):
            return self._union(declared, arguments)
        if origin in _COLLECTIONS and len(arguments) == 1:
            inner = self.build(arguments[0])
            return ListType(f"{_COLLECTIONS[origin]}<{inner.text}>", origin, inner)
        if origin is dict and len(arguments) == 2:
            return DictType(self._dict_key(arguments[0]), self.build(arguments[1]))
        if origin is tuple and arguments:
            return self._tuple(arguments)
        if isinstance(declared, type) and origin is None:
            return self._record(declared)
        raise _refused(declared)

    def _annotated(self, declared: Any, *notes: Any) -> ValueType:
        for note in notes:
            if isinstance(note, msgspec.Meta):
                found = [name for name in _CONSTRAINTS if getattr(note, name) is not None]
                if found:
                    raise InvalidConfigError(
                        f"{declared!r} has a constraint ({', '.join(found)}), which would be checked when a value is read back"
                    )
        return self.build(declared)

    def _dict_key(self, declared: Any) -> ValueType:
        key = self.build(declared)
        if not _hashable(key):
            raise InvalidConfigError(f"{key.text} is not the key type of a dict: use a scalar or a tuple of scalars")
        return key

    def _tuple(self, arguments: tuple[Any, ...]) -> ValueType:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            inner = self.build(arguments[0])
            return ListType(f"tuple<{inner.text},...>", tuple, inner)
        return TupleType(tuple(self.build(argument) for argument in arguments))

    def _union(self, declared: Any, arguments: tuple[Any, ...]) -> ValueType:
        members = [argument for argument in arguments if argument is not type(None)]
        if len(members) == 1:
            return OptionalType(self.build(members[0]))
        value_types = [self.build(member) for member in members]
        text = f"union<{','.join(sorted(value_type.text for value_type in value_types))}>"
        value_type = _opaque(text, typing.Union[tuple(members)], tuple(value_types))  # noqa: UP007 - made from a list
        return OptionalType(value_type) if len(members) < len(arguments) else value_type

    def _record(self, declared: type) -> ValueType:
        if declared in self._open:
            raise InvalidConfigError(f"{declared.__name__} contains itself, which no column can hold; use Pickled")
        self._open.append(declared)
        try:
            value_type = self._open_record(declared)
        finally:
            self._open.pop()
        return value_type if value_type.fields else _opaque(value_type.text, declared)

    def _open_record(self, declared: type) -> RecordType:
        if issubclass(declared, msgspec.Struct):
            return self._struct(declared)
        if dataclasses.is_dataclass(declared):
            return self._dataclass(declared)
        if issubclass(declared, tuple) and hasattr(declared, "_fields"):
            hints, defaults = _hints(declared), declared._field_defaults  # type: ignore[attr-defined]
            fields = [self._field(name, name, hints.get(name), _constant(defaults, name)) for name in declared._fields]
            return RecordType("namedtuple", declared, tuple(fields), positional=True)
        if typing.is_typeddict(declared):
            return self._typed_dict(declared)
        raise _refused(declared)

    def _struct(self, declared: type[msgspec.Struct]) -> RecordType:
        config = declared.__struct_config__
        if config.tag is not None:
            raise InvalidConfigError(f"{declared.__name__}: a tagged struct is not supported as a state type")
        if config.omit_defaults:
            raise InvalidConfigError(
                f"{declared.__name__} has omit_defaults=True: stored values would change with the defaults of a later version"
            )
        fields = []
        for field in msgspec.structs.fields(declared):
            default: Any = None
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory
            elif field.default is not msgspec.NODEFAULT:
                default = _constant({"value": field.default}, "value")
            fields.append(self._field(field.name, field.encode_name, field.type, default))
        names = tuple(field.attribute for field in fields)
        kind = "namedtuple" if config.array_like else "struct"
        return RecordType(kind, declared, tuple(fields), positional=getattr(declared, "__match_args__", None) == names)

    def _dataclass(self, declared: Any) -> RecordType:
        hints, fields = _hints(declared), []
        for field in dataclasses.fields(declared):
            if not field.init:
                raise InvalidConfigError(f"{declared.__name__}.{field.name} has init=False: it can't be restored")
            default: Any = None
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory
            elif field.default is not dataclasses.MISSING:
                default = _constant({"value": field.default}, "value")
            fields.append(self._field(field.name, field.name, hints[field.name], default))
        names = tuple(field.attribute for field in fields)
        return RecordType("struct", declared, tuple(fields), positional=getattr(declared, "__match_args__", None) == names)

    def _typed_dict(self, declared: Any) -> RecordType:
        hints, fields = _hints(declared), []
        for name, hint in hints.items():
            mark = get_origin(hint)
            inner = get_args(hint)[0] if mark in (NotRequired, typing.Required) else hint
            # `__required_keys__` ignores marks in annotations that are texts (`from __future__ import annotations`)
            required = mark is typing.Required or (mark is not NotRequired and name in declared.__required_keys__)
            field = self._field(name, name, inner, None if required else (lambda: MISSING))
            if not required and isinstance(field.value_type, OptionalType) and not self._lenient:
                raise InvalidConfigError(f"{declared.__name__}[{name!r}] may be absent or None: a column has one null")
            fields.append(field)
        return RecordType("struct", dict, tuple(fields), is_dict=True)

    def _field(self, attribute: str, name: str, declared: Any, default: Any) -> RecordField:
        try:
            value_type = self.build(declared)
        except InvalidConfigError as error:
            raise InvalidConfigError(f"field {attribute!r}: {error}") from error
        return RecordField(attribute, name, value_type, default)


def _constant(defaults: dict[str, Any], name: str) -> Any:
    return (lambda: defaults[name]) if name in defaults else None


def _opaque(text: str, declared: Any, members: tuple[ValueType, ...] = ()) -> ValueType:
    return OpaqueType(text, ENCODER.encode, msgspec.msgpack.Decoder(declared).decode, members)


def _hashable(value_type: ValueType) -> bool:
    if isinstance(value_type, TupleType):
        return all(map(_hashable, value_type.children))
    return value_type in SCALARS.values()


def _hints(declared: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(declared, include_extras=True)
    except NameError as error:
        raise InvalidConfigError(f"{declared.__name__}: {error}") from error


def _refused(declared: Any) -> InvalidConfigError:
    return InvalidConfigError(f"{declared!r} is not a state type: {_HINT}")


def python_type_of_arrow(data_type: pa.DataType) -> Any:
    """Python type to declare for values of an Arrow type; structs become TypedDicts. Raises InvalidConfigError."""
    arrow = pa.types
    if arrow.is_dictionary(data_type):
        return python_type_of_arrow(data_type.value_type)
    if arrow.is_list(data_type) or arrow.is_large_list(data_type) or arrow.is_fixed_size_list(data_type):
        return list[python_type_of_arrow(data_type.value_type)]  # type: ignore[misc]
    if arrow.is_map(data_type):
        return dict[python_type_of_arrow(data_type.key_type), python_type_of_arrow(data_type.item_type)]  # type: ignore[misc]
    if arrow.is_struct(data_type):
        members = {field.name: python_type_of_arrow(field.type) for field in data_type}
        nullable = {field.name for field in data_type if field.nullable}
        return typing.TypedDict(  # type: ignore[operator]
            "Row", {name: member | None if name in nullable else member for name, member in members.items()}
        )
    if arrow.is_timestamp(data_type) and (data_type.tz is None or data_type.unit == "ns"):
        raise InvalidConfigError(f"{data_type} is refused: use timestamp[us, UTC]")
    for accepts, python_type in _ARROW_SCALARS:
        if accepts(data_type):
            return python_type
    raise InvalidConfigError(f"Arrow type {data_type} is not a state type")


_ARROW_SCALARS: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_boolean, bool),
    (lambda t: pa.types.is_integer(t) and not pa.types.is_uint64(t), int),
    (pa.types.is_floating, float),
    (lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t), str),
    (lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t), bytes),
    (pa.types.is_date32, date),
    (pa.types.is_timestamp, datetime),
    (pa.types.is_decimal, Decimal),
)


_NAMES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes,
    "date": date,
    "datetime": datetime,
    "decimal": Decimal,
    "time": time,
    "timedelta": timedelta,
    "uuid": UUID,
}
_NAMED_COLLECTIONS: dict[str, Any] = {"list": list, "set": set, "frozenset": frozenset}


def parse_type(text: str) -> Any:
    """The Python type whose value type has this text; structs become TypedDicts. Raises InvalidConfigError."""
    parser = _Parser(text)
    parsed = parser.type()
    if parser.rest():
        raise parser.error()
    return parsed


class _Parser:
    """Recursive-descent parser of one text."""

    def __init__(self, text: str) -> None:
        self._text, self._position = text, 0

    def rest(self) -> str:
        return self._text[self._position :]

    def error(self) -> InvalidConfigError:
        return InvalidConfigError(f"{self._text!r} is not the text of a state type (at {self._position})")

    def type(self) -> Any:
        name = self._word()
        if not self._take("<"):
            if name not in _NAMES:
                raise self.error()
            return _NAMES[name]
        if name in ("struct", "namedtuple"):
            parsed = self._record(name)
        else:
            parsed = self._generic(name, self._arguments())
        self._expect(">")
        return parsed

    def _arguments(self) -> list[Any]:
        arguments = [self.type()]
        while self._take(","):
            arguments.append(Ellipsis if self._take("...") else self.type())
        return arguments

    def _generic(self, name: str, arguments: list[Any]) -> Any:
        if name == "tuple":
            return tuple.__class_getitem__(tuple(arguments))
        if name == "union":
            return typing.Union[tuple(arguments)]  # noqa: UP007 - made from a list
        if name == "dict" and len(arguments) == 2:
            return dict.__class_getitem__(tuple(arguments))
        if len(arguments) == 1 and name == "optional":
            return arguments[0] | None
        if len(arguments) == 1 and name in _NAMED_COLLECTIONS:
            return _NAMED_COLLECTIONS[name][arguments[0]]
        raise self.error()

    def _record(self, kind: str) -> Any:
        members: dict[str, Any] = {}
        optional: set[str] = set()
        while not self.rest().startswith(">"):
            if members:
                self._expect(", ")
            name = self._field_name()
            self._expect(": ")
            members[name] = self.type()
            if self._take(" = default"):
                optional.add(name)
        if kind == "namedtuple":
            record: Any = typing.NamedTuple("Row", list(members.items()))  # type: ignore[misc]
            # the default is not stored, and not needed: every stored row has the field
            record.__new__.__defaults__ = (None,) * len(optional)
            record._field_defaults = dict.fromkeys((n for n in members if n in optional), None)
            return record
        fields = {name: NotRequired[member] if name in optional else member for name, member in members.items()}
        return typing.TypedDict("Row", fields)  # type: ignore[operator]

    def _field_name(self) -> str:
        if not self.rest().startswith('"'):
            return self._word()
        try:
            name, length = json.JSONDecoder().raw_decode(self.rest())
        except ValueError as error:
            raise self.error() from error
        self._position += length
        return str(name)

    def _word(self) -> str:
        start = self._position
        while self._position < len(self._text) and (self._text[self._position] == "_" or self._text[self._position].isalnum()):
            self._position += 1
        if start == self._position:
            raise self.error()
        return self._text[start : self._position]

    def _take(self, literal: str) -> bool:
        if not self._text.startswith(literal, self._position):
            return False
        self._position += len(literal)
        return True

    def _expect(self, literal: str) -> None:
        if not self._take(literal):
            raise self.error()
