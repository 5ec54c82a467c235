"""Key fields of fixed width as 64-bit words: equal just where the canonical bytes of the keys are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Words = npt.NDArray[np.uint64]

_CANONICAL_NAN = np.uint64(0x7FF8000000000000)


def has_words(kind: pa.DataType) -> bool:
    """Whether values of a field have a fixed width."""
    return not (pa.types.is_string(kind) or pa.types.is_binary(kind))


def key_words(array: pa.Array) -> list[Words]:
    """One word of each row, or two of a decimal. The array is of a key field's type, and has no nulls."""
    kind = array.type
    if pa.types.is_boolean(kind):
        return [array.cast(pa.uint8()).to_numpy(zero_copy_only=False).astype(np.uint64)]
    if pa.types.is_float64(kind):
        values = array.to_numpy(zero_copy_only=False) + 0.0  # one zero
        bits: Words = values.view(np.uint64)
        bits[np.isnan(values)] = _CANONICAL_NAN
        return [bits]
    if pa.types.is_date32(kind):
        return [array.view(pa.int32()).to_numpy().astype(np.int64).view(np.uint64)]
    if pa.types.is_decimal128(kind):
        data = np.frombuffer(array.buffers()[1] or b"", np.uint64)
        words = data[2 * array.offset : 2 * (array.offset + len(array))]
        return [words[0::2], words[1::2]]
    return [array.view(pa.int64()).to_numpy().view(np.uint64)]
