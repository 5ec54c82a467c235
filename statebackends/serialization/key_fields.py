"""Types of a key field: lossless cast, canonical bytes and hash, each for one value and for a column.

Canonical bytes are a type tag and a body, whose unsigned byte order is the order of the values; in a tuple the body also says where
it ends. `NestedRows` reads many encoded tuples at once, field by field. Values are refused by ValueError; keys.py adds the
operator. The hash functions are in key_hash.py."""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, Inexact, Overflow
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.serialization import key_hash


class NestedRows:
    """Encoded tuples in one buffer, with the position of the next field in each row."""

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self._joined = b"".join(encoded)
        self._bytes = np.frombuffer(self._joined, np.uint8)
        self._stops = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        self._next = np.concatenate([[0], self._stops[:-1]]) if len(encoded) else self._stops
        self._ends: npt.NDArray[np.int64] | None = None

    def skip_tag(self, tag: int) -> None:
        """Check and skip the tag of each row's next field, or of the tuple. Raises CorruptStateError."""
        if (self._next >= self._stops).any() or (self._bytes[self._next] != tag).any():
            raise self.corrupt()
        self._next = self._next + 1

    def fixed(self, width: int) -> npt.NDArray[np.uint8]:
        """Read a body of `width` bytes in each row. Raises CorruptStateError."""
        start = self._next
        self._next = start + width
        if (self._next > self._stops).any():
            raise self.corrupt()
        bodies: npt.NDArray[np.uint8] = self._bytes[start[:, None] + np.arange(width)]
        return bodies

    def varying(self) -> list[bytes]:
        """Read a body that ends at the next 00 without an FF behind it. Raises CorruptStateError."""
        if self._ends is None:
            zero = np.flatnonzero(self._bytes == 0)
            escaped = self._bytes[np.minimum(zero + 1, len(self._bytes) - 1)] == 0xFF
            self._ends = zero[~escaped]
        found = np.searchsorted(self._ends, self._next)
        if (found >= len(self._ends)).any():
            raise self.corrupt()
        starts, stops = self._next.tolist(), self._ends[found]
        self._next = stops + 1
        if (self._next > self._stops).any():
            raise self.corrupt()
        joined = self._joined
        bodies = [joined[start:stop] for start, stop in zip(starts, stops.tolist(), strict=True)]
        return [body.replace(b"\0\xff", b"\0") for body in bodies] if b"\0\xff" in joined else bodies

    def finish(self) -> None:
        """Raises CorruptStateError unless each row was read to its end."""
        if (self._next != self._stops).any():
            raise self.corrupt()

    def corrupt(self) -> CorruptStateError:
        return CorruptStateError(f"{self._joined[:60]!r} ... are not keys of the declared type", reason="key encoding")


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_MICROSECOND = timedelta(microseconds=1)
_MICROSECONDS_MIN = (datetime.min.replace(tzinfo=UTC) - EPOCH) // _MICROSECOND
_MICROSECONDS_MAX = (datetime.max.replace(tzinfo=UTC) - EPOCH) // _MICROSECOND
INT64_SIGN = 1 << 63

_PACKERS = {1: struct.Struct(">BB").pack, 4: struct.Struct(">BI").pack, 8: struct.Struct(">BQ").pack}

Bodies = npt.NDArray[np.uint8]
"""Canonical bodies of fixed width, one row each."""


class KeyFieldType(ABC):
    """One type of key field; stateless, compared by its text."""

    text: str
    """Canonical, as stored in snapshots: `int64`, `decimal128(10, 2)` ..."""
    arrow_type: pa.DataType
    tag: ClassVar[int]
    """First byte of the canonical encoding; can never change."""
    exact: ClassVar[type[Any]]
    """Python class of canonical values."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyFieldType) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    @abstractmethod
    def check(self, value: Any) -> Any:
        """The canonical value equal to `value`, which is unwrapped and not None. Raises ValueError with the reason."""

    @abstractmethod
    def encode(self, value: Any, *, nested: bool = False) -> bytes:
        """Tag and body of a canonical value; `nested`: with a self-delimiting body, for a tuple."""

    @abstractmethod
    def decode(self, encoded: bytes, start: int, *, nested: bool = False) -> tuple[Any, int]:
        """(canonical value at `start`, start of the next field). Raises CorruptStateError."""

    @abstractmethod
    def hash32(self, value: Any) -> int:
        """Key hash v1 of a canonical value, unsigned."""

    @abstractmethod
    def hashes(self, array: pa.Array) -> key_hash.Hashes:
        """`hash32` of each row of an array of `arrow_type` without nulls. Raises ValueError on invalid UTF-8."""

    @abstractmethod
    def encoded(self, array: pa.Array, *, nested: bool = False) -> list[bytes]:
        """`encode` of each row."""

    @abstractmethod
    def array_of_encoded(self, encoded: Sequence[bytes]) -> pa.Array:
        """Inverse of `encoded(nested=False)`. Raises CorruptStateError."""

    @abstractmethod
    def array_of_nested(self, rows: NestedRows) -> pa.Array:
        """This field's column of encoded tuples, read up to this field before. Raises CorruptStateError."""

    def check_column(self, array: pa.Array) -> None:  # noqa: B027 - most types have nothing to add
        """Refuse rows that have no Python value. Raises ValueError."""

    def _corrupt(self, encoded: bytes) -> CorruptStateError:
        return CorruptStateError(f"{encoded[:60]!r} is not a key of type {self.text}", reason="key encoding")


class FixedField(KeyFieldType):
    """A field whose body has a fixed width."""

    width: ClassVar[int]
    """Bytes of the body."""

    @abstractmethod
    def _number(self, value: Any) -> int:
        """Unsigned number of `width` bytes, ordered as the values."""

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
        return key_hash.hash_bool(value)

    def _flags(self, array: pa.Array) -> npt.NDArray[np.bool_]:
        flags: npt.NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
        return flags.astype(np.bool_)

    def hashes(self, array: pa.Array) -> key_hash.Hashes:
        return key_hash.hash_bools(self._flags(array))

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
        """The int64 that stands for a canonical value."""
        number: int = value
        return number

    def _number(self, value: Any) -> int:
        return self._integer(value) + INT64_SIGN

    def _value(self, number: int) -> Any:
        return number - INT64_SIGN

    def hash32(self, value: Any) -> int:
        return key_hash.hash_int64(self._integer(value))

    def hashes(self, array: pa.Array) -> key_hash.Hashes:
        return key_hash.hash_int64s(fixed_values(array, np.int64))

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
        return key_hash.hash_int64(value.toordinal() - _EPOCH_ORDINAL)

    def hashes(self, array: pa.Array) -> key_hash.Hashes:
        return key_hash.hash_int64s(fixed_values(array, np.int32).astype(np.int64))

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
        bits = key_hash.float64_bits(value)
        return bits ^ (INT64_SIGN if bits < INT64_SIGN else (1 << 64) - 1)

    def _value(self, number: int) -> float:
        bits = number ^ (INT64_SIGN if number >= INT64_SIGN else (1 << 64) - 1)
        value: float = struct.unpack(">d", bits.to_bytes(8))[0]
        return value

    def hash32(self, value: float) -> int:
        return key_hash.hash_float64(value)

    def hashes(self, array: pa.Array) -> key_hash.Hashes:
        return key_hash.hash_float64s(fixed_values(array, np.float64))

    def _bodies(self, array: pa.Array) -> Bodies:
        bits = key_hash.canonical_floats(fixed_values(array, np.float64))
        negative = bits >> np.uint64(63) != 0
        return big_endian(np.where(negative, ~bits, bits ^ np.uint64(INT64_SIGN)))

    def _array(self, bodies: Bodies) -> pa.Array:
        numbers = bodies.view(">u8").ravel().astype(np.uint64)
        positive = numbers >> np.uint64(63) != 0
        return pa.array(np.where(positive, numbers ^ np.uint64(INT64_SIGN), ~numbers).view(np.float64))


def kind_of(value: Any) -> str:
    return type(value).__name__


DECIMAL_DIGITS_MAX = 38
_DECIMALS = Context(prec=80, traps=[Overflow, Inexact])


class DecimalField(FixedField):
    """Unscaled 128-bit value of a decimal of fixed precision and scale."""

    exact = Decimal
    tag, width = 8, 16

    def __init__(self, precision: int, scale: int) -> None:
        if not 1 <= precision <= DECIMAL_DIGITS_MAX:
            raise ValueError(f"the precision of a decimal key must be 1..{DECIMAL_DIGITS_MAX}, not {precision}")
        self.scale = scale
        self._limit = 10**precision
        self.text = f"decimal128({precision}, {scale})"
        self.arrow_type = pa.decimal128(precision, scale)

    def check(self, value: Any) -> Decimal:
        if not isinstance(value, Decimal):
            raise ValueError(f"{kind_of(value)} is not decimal")
        if not value.is_finite():
            raise ValueError("a decimal key must be finite")
        return _decimal(self._unscaled(value), self.scale)

    def _unscaled(self, value: Decimal) -> int:
        digits = value.adjusted() + 1 + self.scale
        if not value:
            return 0
        try:
            scaled = _DECIMALS.scaleb(value, self.scale) if digits <= DECIMAL_DIGITS_MAX else None
        except Inexact:  # more digits than the context has, or so small that it would become 0
            scaled = None
        unscaled = int(scaled) if scaled is not None else self._limit
        if abs(unscaled) >= self._limit or unscaled != scaled:
            raise ValueError(f"does not fit {self.text} without loss")
        return unscaled

    def _number(self, value: Decimal) -> int:
        return self._unscaled(value) + (1 << 127)

    def encode(self, value: Any, *, nested: bool = False) -> bytes:
        return ((self.tag << 128) | self._number(value)).to_bytes(self.width + 1)

    def _value(self, number: int) -> Decimal:
        return _decimal(number - (1 << 127), self.scale)

    def hash32(self, value: Decimal) -> int:
        return key_hash.hash_decimal(self._unscaled(value))

    def _halves(self, array: pa.Array) -> npt.NDArray[np.int64]:
        """Column 0: low halves, column 1: high halves."""
        values = fixed_values(array, "V16")
        return values.view(np.int64).reshape(-1, 2)

    def hashes(self, array: pa.Array) -> key_hash.Hashes:
        halves = self._halves(array)
        return key_hash.hash_decimals(halves[:, 0], halves[:, 1])

    def _bodies(self, array: pa.Array) -> Bodies:
        halves = self._halves(array).view(np.uint64)
        high = big_endian(halves[:, 1] ^ np.uint64(INT64_SIGN))
        return np.concatenate([high, big_endian(halves[:, 0])], axis=1)

    def _array(self, bodies: Bodies) -> pa.Array:
        numbers = bodies.view(">u8").astype(np.uint64)
        halves = np.stack([numbers[:, 1], numbers[:, 0] ^ np.uint64(INT64_SIGN)], axis=1)
        return pa.Array.from_buffers(self.arrow_type, len(bodies), [None, pa.py_buffer(halves.tobytes())])


def _decimal(unscaled: int, scale: int) -> Decimal:
    return _DECIMALS.scaleb(Decimal(unscaled), -scale)


class _BytesField(KeyFieldType):
    """A field of varying length. Alone: the bytes; in a tuple: zero bytes escaped as 00 FF, ended by 00."""

    @abstractmethod
    def _to_bytes(self, value: Any) -> bytes: ...

    @abstractmethod
    def _from_bytes(self, body: bytes) -> Any:
        """Raises ValueError."""

    def encode(self, value: Any, *, nested: bool = False) -> bytes:
        body = self._to_bytes(value)
        return bytes((self.tag,)) + (body.replace(b"\0", b"\0\xff") + b"\0" if nested else body)

    def decode(self, encoded: bytes, start: int, *, nested: bool = False) -> tuple[Any, int]:
        if len(encoded) <= start or encoded[start] != self.tag:
            raise self._corrupt(encoded)
        stop = len(encoded)
        body = encoded[start + 1 :]
        if nested:
            stop = self._end(encoded, start + 1)
            body = encoded[start + 1 : stop - 1].replace(b"\0\xff", b"\0")
        try:
            return self._from_bytes(body), stop
        except ValueError as error:
            raise self._corrupt(encoded) from error

    def _end(self, encoded: bytes, start: int) -> int:
        """Position behind the 00 that ends the body."""
        zero = encoded.find(b"\0", start)
        while zero >= 0 and encoded[zero + 1 : zero + 2] == b"\xff":
            zero = encoded.find(b"\0", zero + 2)
        if zero < 0:
            raise self._corrupt(encoded)
        return zero + 1

    def encoded(self, array: pa.Array, *, nested: bool = False) -> list[bytes]:
        tag = bytes((self.tag,))
        data, offsets = _buffers(array)
        body = data.tobytes()
        rows = _slices(body, offsets)
        if not nested:
            return [tag + row for row in rows]
        if b"\0" not in body:
            return [tag + row + b"\0" for row in rows]
        return [tag + row.replace(b"\0", b"\0\xff") + b"\0" for row in rows]

    def array_of_encoded(self, encoded: Sequence[bytes]) -> pa.Array:
        tag = bytes((self.tag,))
        if not all(map(bytes.startswith, encoded, [tag] * len(encoded))):
            raise self._corrupt(b"".join(encoded))
        return self._array([row[1:] for row in encoded])

    def array_of_nested(self, rows: NestedRows) -> pa.Array:
        rows.skip_tag(self.tag)
        return self._array(rows.varying())

    def _array(self, bodies: list[bytes]) -> pa.Array:
        try:
            return pa.array(bodies, pa.binary()).cast(self.arrow_type)
        except pa.ArrowInvalid as error:
            raise self._corrupt(b"".join(bodies)) from error


class Utf8Field(_BytesField):
    exact = str
    text, tag = "utf8", 4
    arrow_type = pa.utf8()

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{kind_of(value)} is not utf8")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("a lone surrogate is not Unicode text") from error
        return value if type(value) is str else str.__str__(value)

    def _to_bytes(self, value: str) -> bytes:
        return value.encode("utf-8")

    def _from_bytes(self, body: bytes) -> str:
        return body.decode("utf-8")

    def hash32(self, value: str) -> int:
        return key_hash.hash_utf8(value)

    def hashes(self, array: pa.Array) -> key_hash.Hashes:
        return key_hash.hash_utf8s(*_buffers(array))


class BinaryField(_BytesField):
    exact = bytes
    text, tag = "binary", 5
    arrow_type = pa.binary()

    def check(self, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray):
            return value if type(value) is bytes else bytes(value)
        raise ValueError(f"{kind_of(value)} is not binary")

    def _to_bytes(self, value: bytes) -> bytes:
        return value

    def _from_bytes(self, body: bytes) -> bytes:
        return body

    def hash32(self, value: bytes) -> int:
        return key_hash.hash_binary(value)

    def hashes(self, array: pa.Array) -> key_hash.Hashes:
        return key_hash.hash_binaries(*_buffers(array))


def _buffers(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(value bytes of these rows, offsets into them, from 0)."""
    if not len(array):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32, len(array) + 1, array.offset * 4).astype(np.int64)
    count = int(offsets[-1] - offsets[0])
    data = np.frombuffer(data_buffer, np.uint8, count, int(offsets[0])) if count else np.empty(0, np.uint8)
    return data, offsets - offsets[0]


def _slices(body: bytes, offsets: npt.NDArray[np.int64]) -> Iterator[bytes]:
    stops = offsets.tolist()
    return (body[start:stop] for start, stop in itertools.pairwise(stops))
