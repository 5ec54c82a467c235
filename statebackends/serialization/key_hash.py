"""Key hash v1: the 32-bit hash of a key field, for one value and vectorised over buffers, with equal results.

It can't change, since it decides the key group of every key; snapshots record it as `key_hash_version`. Hashes are unsigned 32-bit
numbers: Java's signed hash modulo 2**32. It takes canonical values; the casts are in key_fields.py."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from holdfast.statebackends.keygroups import KEY_HASH_VERSION as KEY_HASH_VERSION

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_TRUE, _FALSE = 1231, 1237
_CANONICAL_NAN = 0x7FF8000000000000
_INVERSE_31 = pow(31, -1, 1 << 32)
_BLOCK_BYTES = 1 << 16
"""Units hashed at a time, few enough for the temporaries to stay in the processor's cache."""

Hashes = npt.NDArray[np.uint32]


def hash_bool(value: bool) -> int:
    return _TRUE if value else _FALSE


def hash_int64(value: int) -> int:
    """low32(v ^ v >>> 32) of a signed 64-bit number; also for dates (days) and timestamps (microseconds). Source: Long.hashCode."""
    bits = value & _MASK64
    return (bits ^ (bits >> 32)) & _MASK32


def float64_bits(value: float) -> int:
    """IEEE bits, unsigned, of the canonical float: -0.0 is 0.0, and there is one NaN."""
    if value != value:
        return _CANONICAL_NAN
    bits: int = struct.unpack(">Q", struct.pack(">d", value + 0.0))[0]
    return bits


def hash_float64(value: float) -> int:
    return hash_int64(float64_bits(value))


def hash_utf8(value: str) -> int:
    """Sum of powers of 31 over UTF-16 units, as Java's String.hashCode; without normalisation. No lone surrogates."""
    h = 0
    if value.isascii():
        for unit in value.encode("ascii"):
            h = (31 * h + unit) & _MASK32
        return h
    for unit in memoryview(value.encode("utf-16-le")).cast("H"):
        h = (31 * h + unit) & _MASK32
    return h


def hash_binary(value: bytes) -> int:
    """h = 1, then 31 h + signed byte, as Java's Arrays.hashCode(byte[])."""
    h = 1
    for byte in value:
        h = (31 * h + byte - ((byte & 0x80) << 1)) & _MASK32
    return h


def hash_decimal(unscaled: int) -> int:
    """The 128-bit unscaled value folded to 64 bits (high ^ low), then as int64."""
    return hash_int64((unscaled >> 64) ^ unscaled)


def hash_fields(hashes: list[int]) -> int:
    """Hash of a tuple from those of its fields: h = 1, then 31 h + h32(field)."""
    h = 1
    for field_hash in hashes:
        h = (31 * h + field_hash) & _MASK32
    return h


def hash_bools(values: npt.NDArray[np.bool_]) -> Hashes:
    return np.where(values, np.uint32(_TRUE), np.uint32(_FALSE))


def hash_int64s(values: npt.NDArray[np.int64]) -> Hashes:
    halves = np.ascontiguousarray(values).view(np.uint32)
    return halves[0::2] ^ halves[1::2]


def canonical_floats(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    """IEEE bits of canonical floats: `float64_bits`, vectorised."""
    bits = (values + 0.0).view(np.uint64)
    bits[np.isnan(values)] = _CANONICAL_NAN
    return bits


def hash_float64s(values: npt.NDArray[np.float64]) -> Hashes:
    return hash_int64s(canonical_floats(values).view(np.int64))


def hash_decimals(low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> Hashes:
    """`low`, `high`: the 64-bit halves of each 128-bit unscaled value."""
    return hash_int64s(low ^ high)


def hash_utf8s(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> Hashes:
    """`data`: UTF-8 bytes; row i is data[offsets[i]:offsets[i+1]], offsets[0] == 0, offsets[-1] == len(data).

    Raises UnicodeDecodeError for a row that isn't UTF-8, one with a lone surrogate included."""
    if not len(data) or data.max() < 0x80:
        return _polynomials(data, offsets)
    continuation = (data & 0xC0) == 0x80
    starts = offsets[:-1][offsets[:-1] < offsets[1:]]
    if continuation[starts].any():
        # rows that are invalid alone can be valid when joined: decode each, so that the invalid one raises
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            data[start:stop].tobytes().decode("utf-8")
    units = np.frombuffer(data.tobytes().decode("utf-8").encode("utf-16-le"), np.uint16)
    # a lead byte gives one UTF-16 unit, that of a four-byte sequence two
    units_before = np.zeros(len(data) + 1, np.int64)
    np.cumsum((~continuation).astype(np.int8) + (data >= 0xF0), out=units_before[1:])
    return _polynomials(units, units_before[offsets])


def hash_binaries(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> Hashes:
    """As `hash_utf8s`, for binary values: 31**length + the polynomial over signed bytes."""
    sums = _polynomials(data.view(np.int8), offsets)
    lengths = np.diff(offsets)
    powers = _powers_of_31(int(lengths.max(initial=0)))
    return sums + powers[lengths]


def hash_columns(columns: list[Hashes]) -> Hashes:
    """`hash_fields`, vectorised; columns[i][row] is the hash of field i."""
    h = np.ones(len(columns[0]), np.uint32)
    for column in columns:
        h = h * np.uint32(31) + column
    return h


def _powers_of_31(highest: int) -> Hashes:
    powers = np.full(highest + 1, 31, np.uint32)
    powers[0] = 1
    return np.multiply.accumulate(powers, dtype=np.uint32)


def _weights(count: int) -> Hashes:
    """31 ** -j modulo 2**32, for j in 0..count-1."""
    weights = np.full(count, _INVERSE_31, np.uint32)
    weights[0] = 1
    return np.multiply.accumulate(weights, dtype=np.uint32)


_BLOCK_WEIGHTS = _weights(_BLOCK_BYTES)
_BLOCK_POWERS = _powers_of_31(_BLOCK_BYTES)


def _polynomials(
    units: npt.NDArray[np.uint8] | npt.NDArray[np.int8] | npt.NDArray[np.uint16], offsets: npt.NDArray[np.int64]
) -> Hashes:
    """sum(unit[i] * 31 ** (length - 1 - i)) of each row, modulo 2**32.

    31 is odd, so it has an inverse modulo 2**32: with prefix sums P of unit[j] * 31**-j over the whole buffer, a row
    [a, b) is (P[b] - P[a]) * 31**(b - 1). That is a constant number of passes, however the lengths vary."""
    rows = len(offsets) - 1
    hashes = np.zeros(rows, np.uint32)
    row = 0
    while row < rows:
        base = int(offsets[row])
        stop_row = max(row + 1, int(np.searchsorted(offsets, base + _BLOCK_BYTES, side="right")) - 1)
        local = offsets[row : stop_row + 1] - base
        count = int(local[-1])
        if count:
            weights = _BLOCK_WEIGHTS if count <= _BLOCK_BYTES else _weights(count)
            powers = _BLOCK_POWERS if count <= _BLOCK_BYTES else _powers_of_31(count)
            terms = units[base : base + count].astype(np.int32).view(np.uint32) * weights[:count]
            prefix = np.zeros(count + 1, np.uint32)
            np.cumsum(terms, out=prefix[1:], dtype=np.uint32)
            starts, stops = local[:-1], local[1:]
            # an empty row multiplies a zero difference, whatever the power
            hashes[row:stop_row] = (prefix[stops] - prefix[starts]) * powers[np.maximum(stops - 1, 0)]
        row = stop_row
    return hashes
