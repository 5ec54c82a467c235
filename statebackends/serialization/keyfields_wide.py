"""Key fields of decimal, text and binary type: those whose bytes need more than one machine word."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal, Overflow
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.serialization import key_hash as keyhash
from holdfast.statebackends.serialization.key_fields import (
    INT64_SIGN,
    Bodies,
    FieldType,
    FixedField,
    big_endian,
    fixed_values,
    kind_of,
)
from holdfast.statebackends.serialization.nestedrows import NestedRows

DECIMAL_DIGITS_MAX = 38
_DECIMALS = Context(prec=80, traps=[Overflow])


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
        scaled = _DECIMALS.scaleb(value, self.scale) if digits <= DECIMAL_DIGITS_MAX else None
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
        return keyhash.hash_decimal(self._unscaled(value))

    def _halves(self, array: pa.Array) -> npt.NDArray[np.int64]:
        """Column 0: low halves, column 1: high halves."""
        values = fixed_values(array, "V16")
        return values.view(np.int64).reshape(-1, 2)

    def hashes(self, array: pa.Array) -> keyhash.Hashes:
        halves = self._halves(array)
        return keyhash.hash_decimals(halves[:, 0], halves[:, 1])

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


class _BytesField(FieldType):
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
        """Position after the 00 that ends the body."""
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
        return keyhash.hash_utf8(value)

    def hashes(self, array: pa.Array) -> keyhash.Hashes:
        return keyhash.hash_utf8s(*_buffers(array))


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
        return keyhash.hash_binary(value)

    def hashes(self, array: pa.Array) -> keyhash.Hashes:
        return keyhash.hash_binaries(*_buffers(array))


def _buffers(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Value bytes of exactly these rows, and offsets into them that start at 0."""
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
