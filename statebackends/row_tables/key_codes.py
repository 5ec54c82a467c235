"""Key -> 64-bit code, a batch at a time: 15 bits of key group above 49 bits of a hash, so that codes sort by key group.

Two keys may share a code; which rows are of equal keys, `equal_rows` says, as their canonical bytes would. Codes live in the
memory and the working folder of one process: no snapshot holds one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from holdfast.statebackends.columnar.key_words import key_words
from holdfast.statebackends.state import KeyColumn

Codes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

HASH_BITS = 49
CODE_MAX = 2**64 - 1
_LONG_TEXT = 256
"""Bytes beyond which a text is hashed by itself: one vector operation is made for each 8 bytes of the others."""
_A, _B, _C = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(HASH_BITS)
_PACKED_ROWS = 1 << 16
_INDEX_MASK = np.uint64(_PACKED_ROWS - 1)


def key_codes(keys: KeyColumn) -> Codes:
    """The code of each row's key."""
    hashes = np.full(len(keys), 0x243F6A8885A308D3, np.uint64)
    for array in keys.arrays:
        if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
            hashes = _mixed_texts(hashes, array)
        else:
            for words in key_words(array):
                hashes = _mixed(hashes, words)
    groups = keys.key_groups.astype(np.uint64)
    return (groups << _SHIFT) | (_finished(hashes) >> np.uint64(64 - HASH_BITS))


def key_groups_of_codes(codes: Codes) -> npt.NDArray[np.int32]:
    return (codes >> _SHIFT).astype(np.int32)


def equal_rows(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> npt.NDArray[np.bool_]:
    """Whether row i of some key columns is the key of row i of others. Both have the fields' types, and no nulls."""
    equal = np.ones(len(left[0]), np.bool_)
    for one, other in zip(left, right, strict=True):
        if pa.types.is_string(one.type) or pa.types.is_binary(one.type):
            equal &= pc.equal(one, other).to_numpy(zero_copy_only=False)
        else:
            for words, others in zip(key_words(one), key_words(other), strict=True):
                equal &= words == others
    return equal


def stable_order(codes: Codes) -> Positions:
    """Positions by code; rows of one code keep their order. Sorted stretches are merged, not sorted."""
    if len(codes) < 2 or bool((codes[1:] >= codes[:-1]).all()):
        return np.arange(len(codes))
    if len(codes) > _PACKED_ROWS:
        pieces = [stable_order(codes[at : at + _PACKED_ROWS]) + at for at in range(0, len(codes), _PACKED_ROWS)]
        order = np.concatenate(pieces)
        return order[np.argsort(codes[order], kind="stable")]
    # numbers are sorted ten times faster than their positions: the position goes along in place of the lowest bits
    packed = np.sort((codes & ~_INDEX_MASK) | np.arange(len(codes), dtype=np.uint64))
    order = (packed & _INDEX_MASK).astype(np.int64)
    found = codes[order]
    if bool((found[1:] >= found[:-1]).all()):
        return order
    return order[np.argsort(found, kind="stable")]


def merged_order(codes: Codes) -> Positions:
    """As `stable_order`, of a few stretches that are sorted already."""
    return np.argsort(codes, kind="stable")


def _mixed(hashes: Codes, words: Codes) -> Codes:
    mixed = words * _A
    mixed ^= mixed >> np.uint64(32)
    mixed ^= hashes
    mixed *= _B
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _finished(hashes: Codes) -> Codes:
    hashes = hashes ^ (hashes >> np.uint64(33))
    hashes *= _C
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _mixed_texts(hashes: Codes, array: pa.Array) -> Codes:
    """Eight bytes of every text at a time: what is shorter is done sooner."""
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array):
        return hashes
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    base, stop = int(offsets[0]), int(offsets[-1])
    data = np.zeros(stop - base + 8, np.uint8)  # a word may be read behind the last byte
    if stop > base:
        data[: stop - base] = np.frombuffer(data_buffer, np.uint8)[base:stop]
    words: Any = np.ndarray(stop - base + 1, "<u8", data.data, strides=(1,))  # a word begins at every byte
    starts, lengths = offsets[:-1] - base, np.diff(offsets)
    mixed = _mixed(hashes, lengths.view(np.uint64))
    rows = np.flatnonzero((lengths > 0) & (lengths <= _LONG_TEXT))
    at = 0
    while len(rows):
        left = lengths[rows] - at
        found = words[starts[rows] + at].astype(np.uint64)
        unused = np.maximum(8 - left, 0).astype(np.uint64) * np.uint64(8)
        mixed[rows] = _mixed(mixed[rows], (found << unused) >> unused)
        at += 8
        rows = rows[left > 8]
    long = np.flatnonzero(lengths > _LONG_TEXT)
    if len(long):
        view = memoryview(data.data)
        digests = [xxhash.xxh3_64_intdigest(view[starts[row] : starts[row] + lengths[row]]) for row in long.tolist()]
        mixed[long] = _mixed(mixed[long], np.array(digests, np.uint64))
    return mixed


def distinct_keys(keys: KeyColumn) -> Positions:
    """A number for each row, equal for equal keys; exact, and slow."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys.encoded()], np.int64)
