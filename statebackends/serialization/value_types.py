"""Types of state values, each with its canonical text, its Arrow type, and conversions of columns to Arrow and back.

Scalars, collections and records; a record (msgspec.Struct, dataclass, NamedTuple, TypedDict) is an Arrow struct by field name.
Columns are built leaf by leaf, so that a struct or list costs a few calls per field, not one per value. A type refuses values that
would not come back equal (StateValueError), and reads the older forms that evolution.py allows. It also gives the form in which a
map's key is encoded, so that keys that are equal in Python have one encoding (docs/adr/0025). Which Python type has which value
type is for python_types.py."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, StateValueError
from holdfast.statebackends.serialization.key_fields import (
    BinaryField,
    BoolField,
    DateField,
    Int64Field,
    KeyFieldType,
    TimestampField,
    Utf8Field,
)
from holdfast.statebackends.serialization.key_types import unwrap

Form: TypeAlias = Callable[[Any], Any]
"""Maps a map's key to a value that is encoded in its place: equal keys have one form."""

_DECIMAL_ZEROS_MAX = 28
"""Zeros at the end of a map's key that are written out; with more the key keeps its exponent."""


def one_decimal(value: Decimal) -> Decimal:
    """One form for equal decimals: 1.0, 1.00 and 1; 1E+1 and 10."""
    if not value.is_finite():
        return value
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    if not value:
        return Decimal(0)
    zeros = next(count for count, digit in enumerate(reversed(digits)) if digit)
    digits, exponent = digits[: len(digits) - zeros], exponent + zeros
    if 0 < exponent <= _DECIMAL_ZEROS_MAX:
        digits, exponent = digits + (0,) * exponent, 0
    return Decimal((sign, digits, exponent))


def form_of_members(forms: Sequence[Form | None]) -> Form | None:
    """Form of a sequence from those of its members; None for a member, or the result, stands for the value itself."""
    if not any(forms):
        return None
    return lambda value: [member if form is None else form(member) for form, member in zip(forms, value, strict=True)]


_REPR_LENGTH_MAX = 200
_PLAIN_DECIMAL = r"^-?[0-9]+(\.[0-9]*)?(E[+-]?[0-9]{1,9})?$"
"""Texts that need no closer check."""


def refused(value: Any, text: str, reason: str = "") -> StateValueError:
    """The error for a value that is not of the declared type `text`."""
    shown = repr(value)[:_REPR_LENGTH_MAX]
    message = f"{shown} ({type(value).__name__}) is not of the declared type {text}"
    return StateValueError(f"{message}: {reason}" if reason else message, type=text, value=shown)


def _always(value: Any) -> bool:
    return True


class ValueType(ABC):
    """The type of one value; immutable, compared by its text."""

    text: str
    arrow_type: pa.DataType
    children: tuple[ValueType, ...] = ()

    @abstractmethod
    def check(self, value: Any) -> None:
        """Raises StateValueError for a value that would not come back equal from msgpack and from Arrow."""

    def check_all(self, values: Sequence[Any]) -> None:
        """`check` of each value."""
        for value in values:
            self.check(value)

    @abstractmethod
    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        """An array of `arrow_type`. Raises StateValueError."""

    @abstractmethod
    def from_arrow(self, array: pa.Array) -> list[Any]:
        """Inverse of `to_arrow`; also reads the older forms that evolution.py allows. Raises CorruptStateError."""

    def check_column(self, array: pa.Array) -> None:
        """Refuse rows that `from_arrow` can't read, or would read as other values, without making the values.

        `array`: a valid one of `arrow_type`. Raises CorruptStateError, ValueError."""
        self._no_nulls(array)

    def key_form(self) -> Form | None:
        """Form of values as a map's keys; None: the value itself.

        Raises InvalidConfigError for a type whose equal values can't have one form."""
        return None

    def _no_nulls(self, array: pa.Array) -> None:
        if array.null_count:
            raise CorruptStateError(f"null in a column of {self.text}", reason="null value")


class ScalarType(ValueType):
    """int, float, bool, str, bytes, date, datetime: one typed Arrow column."""

    def __init__(
        self, text: str, python_type: type, field: KeyFieldType, obvious: Callable[[Any], bool] = lambda value: False
    ) -> None:
        """`obvious`: True for values of exactly `python_type` that need no further check."""
        self.text, self.arrow_type = text, field.arrow_type
        self.python_type, self._exact = python_type, {python_type}
        self._field, self._obvious = field, obvious

    def canonical(self, value: Any) -> Any:
        """The equal value of the exact Python class. Raises StateValueError."""
        try:
            return self._field.check(unwrap(value))
        except ValueError as error:
            raise refused(value, self.text, str(error)) from error

    def check(self, value: Any) -> None:
        if type(value) is not self.python_type or not self._obvious(value):
            self.canonical(value)

    def check_all(self, values: Sequence[Any]) -> None:
        is_exact = set(map(type, values)) <= self._exact
        if not is_exact or (self._obvious is not _always and not all(map(self._obvious, values))):
            super().check_all(values)

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        if set(map(type, values)) != self._exact:
            values = [self.canonical(value) for value in values]
        try:
            return pa.array(values, self.arrow_type)
        except (OverflowError, UnicodeEncodeError, pa.ArrowException):
            return pa.array([self.canonical(value) for value in values], self.arrow_type)

    def from_arrow(self, array: pa.Array) -> list[Any]:
        self._no_nulls(array)
        if array.type != self.arrow_type:
            array = array.cast(self.arrow_type)
        values: list[Any] = array.to_pylist()
        return values

    def check_column(self, array: pa.Array) -> None:
        self._no_nulls(array)
        self._field.check_column(array)


class TimeType(ScalarType):
    """An aware datetime in microseconds, which comes back in UTC."""

    def __init__(self) -> None:
        super().__init__("datetime", datetime, TimestampField())

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        return pa.array([self.canonical(value) for value in values], self.arrow_type)


class FloatType(ValueType):
    """float. An int with an equal float is accepted, as in Python's typing, and comes back as float."""

    text = "float"
    arrow_type = pa.float64()

    def canonical(self, value: Any) -> float:
        try:
            given = unwrap(value)
            if isinstance(given, float) or (isinstance(given, int) and not isinstance(given, bool) and float(given) == given):
                return float(given)
        except (ValueError, OverflowError) as error:
            raise refused(value, self.text, str(error)) from error
        raise refused(value, self.text)

    def check(self, value: Any) -> None:
        if type(value) is not float:
            self.canonical(value)

    def key_form(self) -> Form:
        return lambda value: self.canonical(value) + 0.0  # one zero, and no int

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        if set(map(type, values)) != {float}:
            values = [self.canonical(value) for value in values]
        return pa.array(values, self.arrow_type, from_pandas=False)

    def from_arrow(self, array: pa.Array) -> list[Any]:
        """Also int64, written before the type was widened. Raises StateValueError for an int that no float equals."""
        self._no_nulls(array)
        if not pa.types.is_integer(array.type):
            values: list[Any] = array.cast(self.arrow_type).to_pylist()
            return values
        return [self.canonical(value) for value in array.to_pylist()]


class DecimalType(ValueType):
    """Decimal of any precision, stored as text, so that exponent and trailing zeros survive."""

    text = "decimal"
    arrow_type = pa.utf8()

    def check(self, value: Any) -> None:
        if not isinstance(value, Decimal):
            raise refused(value, self.text)

    def key_form(self) -> Form:
        return one_decimal

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        for value in values:
            self.check(value)
        return pa.array([str(value) for value in values], self.arrow_type)

    def from_arrow(self, array: pa.Array) -> list[Any]:
        """Also int64, written before the type was widened. Raises CorruptStateError for a text that is no decimal."""
        self._no_nulls(array)
        if not _holds_decimals(array.type):
            raise CorruptStateError(f"{array.type} in a column of {self.text}", reason="value encoding")
        values = array.to_pylist()
        try:
            return [Decimal(value) for value in values]
        except (InvalidOperation, ValueError):
            return [_decimal_of(value) for value in values]  # raises for the value at fault

    def check_column(self, array: pa.Array) -> None:
        self._no_nulls(array)
        unusual = array.filter(pc.invert(pc.match_substring_regex(array, _PLAIN_DECIMAL)))
        for text in unusual.unique().to_pylist():
            _decimal_of(text)


def _holds_decimals(kind: pa.DataType) -> bool:
    types = pa.types
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(is_text or types.is_decimal(kind) or types.is_integer(kind))


def _decimal_of(value: Any) -> Decimal:
    try:
        return Decimal(value)
    except (InvalidOperation, ValueError) as error:
        raise CorruptStateError(f"{repr(value)[:_REPR_LENGTH_MAX]} is no decimal", reason="value encoding") from error


class OpaqueType(ValueType):
    """A value without a single Arrow type (a union, say): a binary column of msgpack."""

    arrow_type = pa.binary()

    def __init__(
        self, text: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], members: tuple[ValueType, ...] = ()
    ) -> None:
        """`members`: types of a union's members."""
        self.text, self.encode, self.decode, self.members = text, encode, decode, members

    def key_form(self) -> None:
        numbers = [value_type.text for value_type in self.members if value_type.text in ("bool", "int")]
        if self.text == "pickled" or len(numbers) > 1 or any(value_type.key_form() is not None for value_type in self.members):
            raise InvalidConfigError(f"{self.text} is not the key type of a map: keys that are equal would be stored differently")

    def check(self, value: Any) -> None:
        try:
            self.decode(self.encode(value))
        except (msgspec.MsgspecError, TypeError, OverflowError, ValueError) as error:
            raise refused(value, self.text, str(error)) from error

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        for value in values:
            self.check(value)
        return pa.array([self.encode(value) for value in values], self.arrow_type)

    def from_arrow(self, array: pa.Array) -> list[Any]:
        self._no_nulls(array)
        try:
            return [self.decode(row) for row in array.to_pylist()]
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise CorruptStateError(f"a value of {self.text} can't be decoded: {error}", reason="value encoding") from error

    def check_column(self, array: pa.Array) -> None:
        self._no_nulls(array)
        if self.text != "pickled":  # only the job itself may load its pickles
            self.from_arrow(array)


class OptionalType(ValueType):
    """A value or None; None is an Arrow null."""

    def __init__(self, inner: ValueType) -> None:
        self.text, self.arrow_type, self.children = f"optional<{inner.text}>", inner.arrow_type, (inner,)
        self.inner = inner

    def check(self, value: Any) -> None:
        if value is not None:
            self.inner.check(value)

    def key_form(self) -> Form | None:
        form = self.inner.key_form()
        return None if form is None else lambda value: None if value is None else form(value)

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        present = [value for value in values if value is not None]
        return scatter(self.inner.to_arrow(present), [value is not None for value in values])

    def from_arrow(self, array: pa.Array) -> list[Any]:
        if not array.null_count:
            return self.inner.from_arrow(array)
        present = iter(self.inner.from_arrow(array.drop_null()))
        return [next(present) if valid else None for valid in array.is_valid().to_pylist()]

    def check_column(self, array: pa.Array) -> None:
        self.inner.check_column(array.drop_null() if array.null_count else array)


def scatter(present: pa.Array, valid: Sequence[bool]) -> pa.Array:
    """An array as long as `valid`: the rows of `present`, in order, where it is True; null elsewhere."""
    if len(present) == len(valid):
        return present
    flags = np.asarray(valid, np.bool_)
    return present.take(pa.array(np.cumsum(flags) - 1, pa.int64(), mask=~flags))


class ListType(ValueType):
    """A list, set, frozenset, or tuple of any length: an Arrow list."""

    def __init__(self, text: str, container: type[Collection[Any]], inner: ValueType) -> None:
        self.text, self.arrow_type, self.children = text, pa.list_(inner.arrow_type), (inner,)
        self.inner = inner
        self._container: Callable[[list[Any]], Any] = container
        self.container = container

    def check(self, value: Any) -> None:
        if not isinstance(value, self.container):
            raise refused(value, self.text)
        for member in value:
            self.inner.check(member)

    def key_form(self) -> Form | None:
        if issubclass(self.container, Set):
            raise InvalidConfigError(f"{self.text} is not the key type of a map: its members have no order")
        form = self.inner.key_form()
        return None if form is None else lambda value: list(map(form, value))

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        for value in values:
            if not isinstance(value, self.container):
                raise refused(value, self.text)
        members = list(itertools.chain.from_iterable(values))
        return pa.ListArray.from_arrays(_offsets(values), self.inner.to_arrow(members))

    def from_arrow(self, array: pa.Array) -> list[Any]:
        self._no_nulls(array)
        members = self.inner.from_arrow(array.flatten())
        build = self._container
        return [build(members[start:stop]) for start, stop in itertools.pairwise(_starts(array))]

    def check_column(self, array: pa.Array) -> None:
        self._no_nulls(array)
        self.inner.check_column(array.flatten())


class DictType(ValueType):
    """A dict: an Arrow map, in the dict's order."""

    def __init__(self, key: ValueType, value: ValueType) -> None:
        self.text = f"dict<{key.text},{value.text}>"
        self.arrow_type, self.children = pa.map_(key.arrow_type, value.arrow_type), (key, value)

    def check(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise refused(value, self.text)
        key_type, value_type = self.children
        for key, member in value.items():
            key_type.check(key)
            value_type.check(member)

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        for value in values:
            if not isinstance(value, dict):
                raise refused(value, self.text)
        key_type, value_type = self.children
        keys = key_type.to_arrow(list(itertools.chain.from_iterable(values)))
        members = value_type.to_arrow([member for value in values for member in value.values()])
        return pa.MapArray.from_arrays(_offsets(values), keys, members)

    def from_arrow(self, array: pa.Array) -> list[Any]:
        self._no_nulls(array)
        key_type, value_type = self.children
        starts, key_array, value_array = _entries(array)
        keys = key_type.from_arrow(key_array)
        members = value_type.from_arrow(value_array)
        return [
            dict(zip(keys[start:stop], members[start:stop], strict=True)) for start, stop in itertools.pairwise(starts)
        ]

    def check_column(self, array: pa.Array) -> None:
        self._no_nulls(array)
        key_type, value_type = self.children
        starts, keys, members = _entries(array)
        key_type.check_column(keys)
        value_type.check_column(members)
        if len(keys) and not (isinstance(key_type, ScalarType) and _are_distinct(starts, keys)):
            values = key_type.from_arrow(keys)
            for start, stop in itertools.pairwise(starts):
                if len(set(values[start:stop])) < stop - start:
                    raise CorruptStateError(f"a {self.text} with a key that it has twice", reason="value encoding")


_NUMBERS: dict[str, type] = {"int": int, "float": float}


class TupleType(ValueType):
    """A tuple of fixed length: an Arrow struct with the fields `0`, `1` ..."""

    def __init__(self, members: tuple[ValueType, ...]) -> None:
        self.text = f"tuple<{','.join(member.text for member in members)}>"
        self.children = members
        self.arrow_type = pa.struct([(str(index), member.arrow_type) for index, member in enumerate(members)])
        kinds = {_NUMBERS.get(member.text) for member in members}
        self._number = kinds.pop() if len(kinds) == 1 else None
        """The class of all members, if that is int or float."""

    def check(self, value: Any) -> None:
        if not isinstance(value, tuple) or len(value) != len(self.children):
            raise refused(value, self.text)
        for member, value_type in zip(value, self.children, strict=True):
            value_type.check(member)

    def key_form(self) -> Form | None:
        return form_of_members([value_type.key_form() for value_type in self.children])

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        if not (set(map(type, values)) <= {tuple} and set(map(len, values)) <= {len(self.children)}):
            for value in values:
                if not isinstance(value, tuple) or len(value) != len(self.children):
                    raise refused(value, self.text)
        numbers = self._numbers(values)
        if numbers is not None:
            arrays = [pa.array(np.ascontiguousarray(numbers[:, place]), from_pandas=False) for place in range(len(self.children))]
            return pa.StructArray.from_arrays(arrays, fields=list(self.arrow_type))
        # not zip(*values): that makes an iterator for each value, which the collector of garbage counts
        columns = [list(map(itemgetter(place), values)) for place in range(len(self.children))]
        arrays = [value_type.to_arrow(column) for value_type, column in zip(self.children, columns, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=list(self.arrow_type))

    def _numbers(self, values: Sequence[tuple[Any, ...]]) -> npt.NDArray[Any] | None:
        """Members of tuples of ints alone, or of floats alone, a row for each tuple; None for others, and for too large ints.
        It takes two thirds of the time of one column after the other."""
        kind = self._number
        if kind is None or not values:
            return None
        members = list(itertools.chain.from_iterable(values))
        if set(map(type, members)) != {kind}:
            return None
        try:
            return np.fromiter(members, np.int64 if kind is int else np.float64, len(members)).reshape(len(values), -1)
        except OverflowError:
            return None

    def from_arrow(self, array: pa.Array) -> list[Any]:
        self._no_nulls(array)
        columns = [value_type.from_arrow(array.field(index)) for index, value_type in enumerate(self.children)]
        return list(zip(*columns, strict=True))

    def check_column(self, array: pa.Array) -> None:
        self._no_nulls(array)
        for index, value_type in enumerate(self.children):
            value_type.check_column(array.field(index))


def _offsets(values: Sequence[Collection[Any]]) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return pa.array(offsets.astype(np.int32))


def _entries(array: pa.Array) -> tuple[list[int], pa.Array, pa.Array]:
    """(`_starts`, keys, values) of an array of maps."""
    starts = _starts(array)
    first = array.offsets[0].as_py() if len(array) else 0
    return starts, array.keys.slice(first, starts[-1]), array.items.slice(first, starts[-1])


def _are_distinct(starts: list[int], keys: pa.Array) -> bool:
    """Whether no map has a key twice, by Arrow's equality."""
    bounds = np.asarray(starts)
    sizes = np.diff(bounds)
    if (sizes <= 1).all():
        return True
    numbers = keys.dictionary_encode()
    owners = np.repeat(np.arange(len(sizes)), sizes)
    places = owners * len(numbers.dictionary) + numbers.indices.to_numpy(zero_copy_only=False)
    return len(np.unique(places)) == len(places)


def _starts(array: pa.Array) -> list[int]:
    """Start of each row's members among the flattened members of all rows, and the end of the last row's."""
    lengths = np.zeros(len(array) + 1, np.int64)
    offsets = array.offsets.to_numpy(zero_copy_only=False) if len(array) else np.zeros(1, np.int32)
    np.subtract(offsets, offsets[0], out=lengths)
    starts: list[int] = lengths.tolist()
    return starts


SCALARS: dict[type, ValueType] = {
    bool: ScalarType("bool", bool, BoolField(), _always),
    int: ScalarType("int", int, Int64Field(), lambda value: -(2**63) <= value < 2**63),
    float: FloatType(),
    str: ScalarType("str", str, Utf8Field(), str.isascii),
    bytes: ScalarType("bytes", bytes, BinaryField(), _always),
    date: ScalarType("date", date, DateField(), _always),
    datetime: TimeType(),
    Decimal: DecimalType(),
}


MISSING: Any = object()
"""Value of an absent key of a TypedDict."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record."""

    attribute: str
    name: str
    """As encoded, and as the Arrow struct names it."""
    value_type: ValueType
    default: Callable[[], Any] | None
    """Makes the value for a record stored without the field; None: the field is required."""

    @property
    def text(self) -> str:
        name = self.name if self.name.isidentifier() else json.dumps(self.name)
        return f"{name}: {self.value_type.text}" + (" = default" if self.default is not None else "")


class RecordType(ValueType):
    """A record: `struct<...>` is encoded as a map by field name, `namedtuple<...>` as an array by position."""

    def __init__(
        self,
        kind: str,
        record_class: Any,
        fields: tuple[RecordField, ...],
        *,
        is_dict: bool = False,
        positional: bool = False,
    ) -> None:
        self.kind, self.fields = kind, fields
        self.text = f"{kind}<{', '.join(field.text for field in fields)}>"
        self.arrow_type = pa.struct([(field.name, field.value_type.arrow_type) for field in fields])
        self.children = tuple(field.value_type for field in fields)
        self._class, self._is_dict, self._positional = record_class, is_dict, positional

    def read(self, value: Any, field: RecordField) -> Any:
        """A field of a record, or MISSING. Raises StateValueError for an absent key that is required."""
        if not self._is_dict:
            return getattr(value, field.attribute)
        member = value.get(field.attribute, MISSING)
        if member is MISSING and field.default is None:
            raise refused(value, self.text, f"{field.attribute!r} is missing")
        return member

    def keys_of_scalars(self) -> dict[str, type]:
        """Key -> class of its values that are not None, for dicts of plain scalars that are all required; else empty."""
        kinds = {id(SCALARS[kind]): kind for kind in (bool, int, float, str, bytes)}
        found: dict[str, type] = {}
        for field in self.fields:
            inner = field.value_type.inner if isinstance(field.value_type, OptionalType) else field.value_type
            kind = kinds.get(id(inner))
            if not self._is_dict or field.default is not None or kind is None:
                return {}
            found[field.attribute] = kind
        return found

    def check_class(self, value: Any) -> None:
        """Raises StateValueError for a value of another class, or a dict with unknown keys; doesn't check fields."""
        if not isinstance(value, self._class):
            raise refused(value, self.text)
        if self._is_dict and not value.keys() <= {field.attribute for field in self.fields}:
            raise refused(value, self.text, "unknown keys")

    def check(self, value: Any) -> None:
        self.check_class(value)
        for field in self.fields:
            member = self.read(value, field)
            if member is not MISSING:
                field.value_type.check(member)

    def key_form(self) -> Form | None:
        forms = [field.value_type.key_form() for field in self.fields]
        if not any(forms):
            return None

        def form(value: Any) -> Any:
            given = zip(self.fields, [self.read(value, field) for field in self.fields], forms, strict=True)
            found = [
                (field.name, member if each is None else each(member))
                for field, member, each in given
                if member is not MISSING
            ]
            return [member for _, member in found] if self.kind == "namedtuple" else dict(found)

        return form

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        columns = self._plain_columns(values)
        if columns is None:
            for value in values:
                self.check_class(value)
            columns = [[self.read(value, field) for value in values] for field in self.fields]
        arrays = [self._column(field, members) for field, members in zip(self.fields, columns, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=list(self.arrow_type))

    def _plain_columns(self, values: Sequence[Any]) -> list[list[Any]] | None:
        """The members of dicts that have all the fields and no others, without a call for each; None for other values."""
        is_plain = self._is_dict and set(map(type, values)) <= {dict} and set(map(len, values)) <= {len(self.fields)}
        if not is_plain:
            return None
        try:
            return [list(map(itemgetter(field.attribute), values)) for field in self.fields]
        except KeyError:
            return None

    def _column(self, field: RecordField, members: list[Any]) -> pa.Array:
        if not self._is_dict or field.default is None:
            return field.value_type.to_arrow(members)
        present = [member for member in members if member is not MISSING]
        return scatter(field.value_type.to_arrow(present), [member is not MISSING for member in members])

    def from_arrow(self, array: pa.Array) -> list[Any]:
        self._no_nulls(array)
        columns = [self._members(field, array) for field in self.fields]
        if self._positional:
            return [self._class(*members) for members in zip(*columns, strict=True)]
        names = [field.attribute for field in self.fields]
        rows = (zip(names, members, strict=True) for members in zip(*columns, strict=True))
        if self._is_dict:
            return [{name: member for name, member in row if member is not MISSING} for row in rows]
        return [self._class(**dict(row)) for row in rows]

    def check_column(self, array: pa.Array) -> None:
        self._no_nulls(array)
        for index, field in enumerate(self.fields):
            column = array.field(index)
            if column.null_count and field.default is not None and not isinstance(field.value_type, OptionalType):
                column = column.drop_null()  # the field is absent
            field.value_type.check_column(column)

    def _members(self, field: RecordField, array: pa.Array) -> list[Any]:
        index = array.type.get_field_index(field.name)
        if index >= 0:
            column = array.field(index)
            if column.null_count and field.default is not None and not isinstance(field.value_type, OptionalType):
                present = iter(field.value_type.from_arrow(column.drop_null()))
                return [next(present) if valid else field.default() for valid in column.is_valid().to_pylist()]
            return field.value_type.from_arrow(column)
        if field.default is not None:
            return [field.default() for _ in range(len(array))]
        if isinstance(field.value_type, OptionalType):
            return [None] * len(array)
        raise CorruptStateError(f"no column {field.name!r} for {self.text}", reason="missing column")
