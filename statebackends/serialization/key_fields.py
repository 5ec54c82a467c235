"""The types that one key field can have: lossless cast, canonical bytes and hash, for one value and for a column.

Canonical bytes are a type tag and a body whose unsigned byte order is the order of the values; a body inside a tuple
also says where it ends. Reasons for refusing a value are ValueErrors here; keys.py names the operator."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.serialization import key_hash as keyhash
from holdfast.statebackends.serialization.nestedrows import NestedRows

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_MICROSECOND = timedelta(microseconds=1)
_MICROSECONDS_MIN = (datetime.min.replace(tzinfo=UTC) - EPOCH) // _MICROSECOND
_MICROSECONDS_MAX = (datetime.max.replace(tzinfo=UTC) - EPOCH) // _MICROSECOND
INT64_SIGN = 1 << 63

_PACKERS = {1: struct.Struct(">BB").pack, 4: struct.Struct(">BI").pack, 8: struct.Struct(">BQ").pack}

Bodies = npt.NDArray[np.uint8]
"""Canonical bodies of fixed width, one row each."""


class FieldType(ABC):
    """One type of key field; stateless, compared by its text."""

    text: str
    """Canonical, as stored in snapshots: `int64`, `decimal128(10, 2)` ..."""
    arrow_type: pa.DataType
    tag: ClassVar[int]
    """First byte of the canonical encoding: fixed for ever."""
    exact: ClassVar[type[Any]]
    """Python class of canonical values."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FieldType) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    @abstractmethod
    def check(self, value: Any) -> Any:
        """The canonical value equal to `value` (already unwrapped, never None). Raises ValueError with the reason."""

    @abstractmethod
    def encode(self, value: Any, *, nested: bool = False) -> bytes:
        """Tag and body of a canonical value; `nested`: self-delimiting, for a tuple."""

    @abstractmethod
    def decode(self, encoded: bytes, start: int, *, nested: bool = False) -> tuple[Any, int]:
        """The canonical value at `start` and where the next field starts. Raises CorruptStateError."""

    @abstractmethod
    def hash32(self, value: Any) -> int:
        """Key hash v1 of a canonical value, unsigned."""

    @abstractmethod
    def hashes(self, array: pa.Array) -> keyhash.Hashes:
        """`hash32` of each row of an array of `arrow_type` without nulls. Raises ValueError on invalid UTF-8."""

    @abstractmethod
    def encoded(self, array: pa.Array, *, nested: bool = False) -> list[bytes]:
        """`encode` of each row."""

    @abstractmethod
    def array_of_encoded(self, encoded: Sequence[bytes]) -> pa.Array:
        """The inverse of `encoded(nested=False)`. Raises CorruptStateError."""

    @abstractmethod
    def array_of_nested(self, rows: NestedRows) -> pa.Array:
        """The column of this field of encoded tuples, which are read up to it. Raises CorruptStateError."""

    def check_column(self, array: pa.Array) -> None:  # noqa: B027 - most types have nothing to add
        """Refuse rows that have no Python value. Raises ValueError."""

    def _corrupt(self, encoded: bytes) -> CorruptStateError:
        return CorruptStateError(f"{encoded[:60]!r} is not a key of type {self.text}", reason="key encoding")


class FixedField(FieldType):
    """A field whose body has a fixed width."""

    width: ClassVar[int]
    """Bytes of the body."""

    @abstractmethod
    def _number(self, value: Any) -> int:
        """Unsigned number of `width` bytes, in value order."""

    @abstractmethod
    def _value(self, number: int) -> Any: ...

    @abstractmethod
    def _bodies(self, array: pa.Array) -> Bodies: ...

    @abstractmethod
    def _array(self, bodies: Bodies) -> pa.Array: ...

    def encode(self, value: Any, *, nested: bool = False) -> bytes:
        return _PACKERS[self.width](self.tag, self._number(value))

    def decode(self, encoded: bytes, start: int, *, nested: bool = False) -> tuple[Any, int]:
        stop = start + self.width + 1
        if len(encoded) < stop or encoded[start] != self.tag:
            raise self._corrupt(encoded)
        try:
            return self._value(int.from_bytes(encoded[start + 1 : stop])), stop
        except (ValueError, OverflowError) as error:
            raise self._corrupt(encoded) from error

    def encoded(self, array: pa.Array, *, nested: bool = False) -> list[bytes]:
        rows = np.empty((len(array), self.width + 1), np.uint8)
        rows[:, 0] = self.tag
        rows[:, 1:] = self._bodies(array)
        values: list[bytes] = rows.view(f"V{self.width + 1}").ravel().tolist()
        return values

    def array_of_encoded(self, encoded: Sequence[bytes]) -> pa.Array:
        joined = b"".join(encoded)
        if len(joined) != len(encoded) * (self.width + 1):
            raise self._corrupt(joined)
        rows = np.frombuffer(joined, np.uint8).reshape(len(encoded), self.width + 1)
        if (rows[:, 0] != self.tag).any():
            raise self._corrupt(joined)
        return self._array(np.ascontiguousarray(rows[:, 1:]))

    def array_of_nested(self, rows: NestedRows) -> pa.Array:
        rows.skip_tag(self.tag)
        return self._array(rows.fixed(self.width))


def fixed_values(array: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    """The value buffer of a primitive array, as numpy; no copy."""
    itemsize = np.dtype(dtype).itemsize
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * itemsize)


def big_endian(numbers: npt.NDArray[Any]) -> Bodies:
    width = numbers.dtype.itemsize
    return numbers.astype(f">u{width}").view(np.uint8).reshape(len(numbers), width)


class BoolField(FixedField):
    exact = bool
    text, tag, width = "bool", 1, 1
    arrow_type = pa.bool_()

    def check(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{kind_of(value)} is not bool")

    def _number(self, value: Any) -> int:
        return int(value)

    def _value(self, number: int) -> bool:
        return number != 0

    def hash32(self, value: bool) -> int:
        return keyhash.hash_bool(value)

    def _flags(self, array: pa.Array) -> npt.NDArray[np.bool_]:
        flags: npt.NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
        return flags.astype(np.bool_)

    def hashes(self, array: pa.Array) -> keyhash.Hashes:
        return keyhash.hash_bools(self._flags(array))

    def _bodies(self, array: pa.Array) -> Bodies:
        return self._flags(array).view(np.uint8).reshape(-1, 1)

    def _array(self, bodies: Bodies) -> pa.Array:
        return pa.array(bodies[:, 0] != 0)


class Int64Field(FixedField):
    exact: ClassVar[type[Any]] = int
    text, tag, width = "int64", 2, 8
    arrow_type = pa.int64()

    def check(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if -INT64_SIGN <= value < INT64_SIGN:
                return int(value)
            raise ValueError("out of the range of int64")
        raise ValueError(f"{kind_of(value)} is not int64")

    def _integer(self, value: Any) -> int:
        """The int64 behind a canonical value."""
        number: int = value
        return number

    def _number(self, value: Any) -> int:
        return self._integer(value) + INT64_SIGN

    def _value(self, number: int) -> Any:
        return number - INT64_SIGN

    def hash32(self, value: Any) -> int:
        return keyhash.hash_int64(self._integer(value))

    def hashes(self, array: pa.Array) -> keyhash.Hashes:
        return keyhash.hash_int64s(fixed_values(array, np.int64))

    def _bodies(self, array: pa.Array) -> Bodies:
        return big_endian(fixed_values(array, np.uint64) ^ np.uint64(INT64_SIGN))

    def _array(self, bodies: Bodies) -> pa.Array:
        numbers = bodies.view(">u8").ravel().astype(np.uint64) ^ np.uint64(INT64_SIGN)
        return pa.array(numbers.view(np.int64)).view(self.arrow_type)


class TimestampField(Int64Field):
    """Microseconds since the epoch, UTC."""

    exact = datetime
    text, tag = "timestamp[us, UTC]", 7
    arrow_type = pa.timestamp("us", "UTC")

    def check(self, value: Any) -> datetime:
        if not isinstance(value, datetime):
            raise ValueError(f"{kind_of(value)} is not a timestamp")
        if value.tzinfo is None or value.utcoffset() is None:
            raise ValueError("a naive datetime is refused: give it a time zone")
        if getattr(value, "nanosecond", 0):
            raise ValueError("nanoseconds are refused")
        try:
            return EPOCH + timedelta(microseconds=(value - EPOCH) // _MICROSECOND)
        except OverflowError as error:
            raise ValueError("out of the range of datetime in UTC") from error

    def _integer(self, value: Any) -> int:
        microseconds: int = (value - EPOCH) // _MICROSECOND
        return microseconds

    def _value(self, number: int) -> datetime:
        return EPOCH + timedelta(microseconds=number - INT64_SIGN)

    def check_column(self, array: pa.Array) -> None:
        values = fixed_values(array, np.int64)
        if len(values) and (values.min() < _MICROSECONDS_MIN or values.max() > _MICROSECONDS_MAX):
            raise ValueError("a timestamp outside of the years 1..9999")


class DateField(FixedField):
    """Days since the epoch."""

    exact = date
    text, tag, width = "date32", 6, 4
    arrow_type = pa.date32()

    def check(self, value: Any) -> date:
        if isinstance(value, date) and not isinstance(value, datetime):
            return value
        raise ValueError(f"{kind_of(value)} is not a date")

    def _number(self, value: Any) -> int:
        days: int = value.toordinal() - _EPOCH_ORDINAL
        return days + (1 << 31)

    def _value(self, number: int) -> date:
        return date.fromordinal(number - (1 << 31) + _EPOCH_ORDINAL)

    def hash32(self, value: date) -> int:
        return keyhash.hash_int64(value.toordinal() - _EPOCH_ORDINAL)

    def hashes(self, array: pa.Array) -> keyhash.Hashes:
        return keyhash.hash_int64s(fixed_values(array, np.int32).astype(np.int64))

    def _bodies(self, array: pa.Array) -> Bodies:
        return big_endian(fixed_values(array, np.uint32) ^ np.uint32(1 << 31))

    def _array(self, bodies: Bodies) -> pa.Array:
        numbers = bodies.view(">u4").ravel().astype(np.uint32) ^ np.uint32(1 << 31)
        return pa.array(numbers.view(np.int32)).view(self.arrow_type)

    def check_column(self, array: pa.Array) -> None:
        days = fixed_values(array, np.int32)
        if len(days) and (days.min() < 1 - _EPOCH_ORDINAL or days.max() > date.max.toordinal() - _EPOCH_ORDINAL):
            raise ValueError("a date outside of the years 1..9999")


class FloatField(FixedField):
    exact = float
    text, tag, width = "float64", 3, 8
    arrow_type = pa.float64()

    def check(self, value: Any) -> float:
        if isinstance(value, float):
            return float(value) + 0.0  # one zero
        raise ValueError(f"{kind_of(value)} is not float64")

    def _number(self, value: float) -> int:
        bits = keyhash.float64_bits(value)
        return bits ^ (INT64_SIGN if bits < INT64_SIGN else (1 << 64) - 1)

    def _value(self, number: int) -> float:
        bits = number ^ (INT64_SIGN if number >= INT64_SIGN else (1 << 64) - 1)
        value: float = struct.unpack(">d", bits.to_bytes(8))[0]
        return value

    def hash32(self, value: float) -> int:
        return keyhash.hash_float64(value)

    def hashes(self, array: pa.Array) -> keyhash.Hashes:
        return keyhash.hash_float64s(fixed_values(array, np.float64))

    def _bodies(self, array: pa.Array) -> Bodies:
        bits = keyhash.canonical_floats(fixed_values(array, np.float64))
        negative = bits >> np.uint64(63) != 0
        return big_endian(np.where(negative, ~bits, bits ^ np.uint64(INT64_SIGN)))

    def _array(self, bodies: Bodies) -> pa.Array:
        numbers = bodies.view(">u8").ravel().astype(np.uint64)
        positive = numbers >> np.uint64(63) != 0
        return pa.array(np.where(positive, numbers ^ np.uint64(INT64_SIGN), ~numbers).view(np.float64))


def kind_of(value: Any) -> str:
    return type(value).__name__
