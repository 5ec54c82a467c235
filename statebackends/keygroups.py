"""Key groups: key hash -> key group -> subtask, and operator uid -> operator id. Pure, the same in every process and version.

It decides which subtask owns a key group. How a key is hashed is for serialization/key_hash.py, what a key is for
serialization/keys.py; the same for columns of hashes is in serialization/key_group_columns.py, so that tools need no numpy."""

from __future__ import annotations

from numbers import Integral

import mmh3

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import KeyGroupRange

KEY_HASH_VERSION = 1
"""Version of the hash of keys, on record in every snapshot."""

MAX_PARALLELISM_LIMIT = 32768
"""Key groups; the largest max parallelism (Flink's bound, kept so that a group fits 16 bits)."""

DEFAULT_MAX_PARALLELISM_FLOOR = 128
"""Key groups; the smallest max parallelism chosen for a job that sets none."""

_MASK = 0xFFFFFFFF
_SIGN = 0x80000000

def spread(h32: int) -> int:
    """Spread a 32-bit hash (signed or unsigned) over 0..2**31-1: one murmur3 block and its finalisation.

    A negative result is negated, and -2**31 becomes 0. Source: Flink, MathUtils.murmurHash; test vectors: scenarios O
    (docs/invariants.md)."""
    # the block and finalisation are those of murmur3 32-bit with seed 0 over the four bytes of the hash
    code = mmh3.hash((h32 & _MASK).to_bytes(4, "little"), 0, False)
    return code if code < _SIGN else -code & (_SIGN - 1)


def key_group_of_hash(h32: int, max_parallelism: int) -> int:
    """Key group, 0..max_parallelism-1, of a key with this 32-bit hash."""
    return spread(h32) % max_parallelism


def check_parallelism(max_parallelism: int, parallelism: int) -> None:
    """Refuse a pair out of bounds: 1 <= parallelism <= max_parallelism <= 32768, whole numbers. Raises InvalidConfigError."""
    given: dict[str, object] = {"max parallelism": max_parallelism, "parallelism": parallelism}
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise InvalidConfigError(f"{name} must be a whole number, not {number!r}", setting=name.replace(" ", "_"))
    if not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT:
        raise InvalidConfigError(
            f"max parallelism must be 1..{MAX_PARALLELISM_LIMIT}, not {max_parallelism}", max_parallelism=max_parallelism
        )
    if parallelism < 1:
        raise InvalidConfigError(f"parallelism must be at least 1, not {parallelism}", parallelism=parallelism)
    if parallelism > max_parallelism:
        raise InvalidConfigError(
            f"parallelism {parallelism} is above max parallelism {max_parallelism}",
            parallelism=parallelism,
            max_parallelism=max_parallelism,
        )


def default_max_parallelism(parallelism: int) -> int:
    """Max parallelism of an operator whose user chose none: 1.5 times the parallelism, up to a power of two, 128..32768.

    Source: Flink, KeyGroupRangeAssignment.computeDefaultMaxParallelism."""
    check_parallelism(MAX_PARALLELISM_LIMIT, parallelism)
    wanted = parallelism + parallelism // 2
    power_of_two = 1 << (wanted - 1).bit_length()
    return min(max(power_of_two, DEFAULT_MAX_PARALLELISM_FLOOR), MAX_PARALLELISM_LIMIT)


def assign_key_groups(max_parallelism: int, parallelism: int, subtask_index: int) -> KeyGroupRange:
    """Key groups of one subtask: contiguous, disjoint over subtasks, complete over the job.

    max_parallelism counts key groups, 1..32768, fixed for the life of the job; 0 <= subtask_index < parallelism <= max_parallelism.
    Returns a half-open range [start, stop), never empty. Raises InvalidConfigError on an argument out of bounds.
    Source: Flink, KeyGroupRangeAssignment.computeKeyGroupRangeForOperatorIndex (its end is inclusive, ours is not)."""
    check_parallelism(max_parallelism, parallelism)
    if not 0 <= subtask_index < parallelism:
        raise InvalidConfigError(
            f"subtask index must be 0..{parallelism - 1}, not {subtask_index}",
            subtask=subtask_index,
            parallelism=parallelism,
        )
    start = (subtask_index * max_parallelism + parallelism - 1) // parallelism
    stop = ((subtask_index + 1) * max_parallelism + parallelism - 1) // parallelism
    return KeyGroupRange(start, stop)


def subtask_of_key_group(group: int, max_parallelism: int, parallelism: int) -> int:
    """Index of the subtask that owns a key group; the inverse of `assign_key_groups`."""
    return group * parallelism // max_parallelism


def operator_id(uid: str) -> str:
    """Operator id of a uid, 32 hex digits: murmur3 128-bit (x64, seed 0) over the UTF-8 bytes, low half first.

    Source: Flink, StreamGraphHasherV2. Raises InvalidConfigError for an empty uid, or one with a lone surrogate."""
    if not uid:
        raise InvalidConfigError("an operator's uid must not be empty")
    try:
        encoded = uid.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidConfigError(f"an operator's uid must be text, not {uid!r}", operator=uid) from error
    return mmh3.mmh3_x64_128_digest(encoded, 0).hex()
