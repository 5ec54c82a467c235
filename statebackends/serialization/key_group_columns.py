"""Columns of key hashes -> key groups -> subtasks: the functions of keygroups.py, vectorised."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# murmur3's 32-bit block and finalisation, and the shifts between them, as numpy scalars
_MULTIPLY_FIRST, _MULTIPLY_SECOND, _ADD = np.uint32(0xCC9E2D51), np.uint32(0x1B873593), np.uint32(0xE6546B64)
_4, _5, _13, _15, _16, _17, _19 = (np.uint32(number) for number in (4, 5, 13, 15, 16, 17, 19))
_FINALISE = ((_16, np.uint32(0x85EBCA6B)), (_13, np.uint32(0xC2B2AE35)))
_POSITIVE = np.uint32(0x7FFFFFFF)


def key_groups_of_hashes(hashes: npt.NDArray[np.uint32], max_parallelism: int) -> npt.NDArray[np.int32]:
    """Key group of each hash: `key_group_of_hash`, vectorised."""
    # Two arrays and numpy constants take half the time of plain expressions, for ten hashes as for a million.
    code = hashes * _MULTIPLY_FIRST
    other = code >> _17
    code <<= _15
    code |= other
    code *= _MULTIPLY_SECOND
    np.right_shift(code, _19, out=other)
    code <<= _13
    code |= other
    code *= _5
    code += _ADD
    code ^= _4
    for shift, multiply in _FINALISE:
        np.right_shift(code, shift, out=other)
        code ^= other
        code *= multiply
    np.right_shift(code, _16, out=other)
    code ^= other
    signed = code.view(np.int32)
    np.abs(signed, out=signed)  # -2**31 stays ...
    code &= _POSITIVE  # ... and becomes 0 here
    if max_parallelism & (max_parallelism - 1):
        code %= np.uint32(max_parallelism)
    else:
        code &= np.uint32(max_parallelism - 1)
    return signed


def subtasks_of_key_groups(groups: npt.NDArray[np.int32], max_parallelism: int, parallelism: int) -> npt.NDArray[np.int32]:
    """Owner of each key group: `subtask_of_key_group`, vectorised."""
    # max parallelism squared is at most 2**30, so the product fits 32 bits
    owners: npt.NDArray[np.int32] = groups * np.int32(parallelism) // np.int32(max_parallelism)
    return owners
