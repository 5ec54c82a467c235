"""Key groups against the vectors of scenarios O, and the vectorised forms against the scalar ones."""

from typing import Any

import numpy as np
import pytest

from holdfast.statebackends import keygroups
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.serialization.key_group_columns import key_groups_of_hashes, subtasks_of_key_groups
from holdfast.statebackends.serialization.key_hash import hash_utf8


@pytest.mark.parametrize(
    ("h32", "spread", "group"),
    [
        (0, 593689054, 94),
        (1, 68075478, 86),
        (2, 1085422463, 127),
        (-1, 1982413648, 80),
        (2**32 - 1, 1982413648, 80),
        (42, 1134849565, 29),
        (97, 1455541201, 81),
        (1000, 3506311, 7),
        (2147483647, 1653689534, 62),
        (-2147483648, 1718298732, 108),
    ],
)
def test_spread_vectors(h32: int, spread: int, group: int) -> None:
    assert keygroups.spread(h32) == spread
    assert keygroups.key_group_of_hash(h32, 128) == group
    assert key_groups_of_hashes(np.array([h32 % 2**32], np.uint32), 128).tolist() == [group]


@pytest.mark.parametrize(
    ("key", "h32", "group", "subtasks", "group_of_4096"),
    [
        ("a", 97, 81, (0, 1, 1, 2, 6), 3025),
        ("b", 98, 22, (0, 0, 0, 0, 1), 1174),
        ("user-1", -836031825, 121, (0, 1, 2, 3, 9), 1657),
        ("user-2", -836031824, 22, (0, 0, 0, 0, 1), 1302),
        ("hello", 99162322, 35, (0, 0, 0, 1, 2), 2723),
        ("", 0, 94, (0, 1, 2, 2, 7), 2526),
        ("键", 38190, 3, (0, 0, 0, 0, 0), 259),
    ],
)
def test_string_key_vectors(key: str, h32: int, group: int, subtasks: tuple[int, ...], group_of_4096: int) -> None:
    assert hash_utf8(key) == h32 % 2**32
    assert keygroups.key_group_of_hash(h32, 128) == group
    assert keygroups.key_group_of_hash(h32, 4096) == group_of_4096
    assert tuple(keygroups.subtask_of_key_group(group, 128, p) for p in (1, 2, 3, 4, 10)) == subtasks


@pytest.mark.parametrize(
    ("max_parallelism", "parallelism", "stops"),
    [
        (128, 3, [43, 86, 128]),
        (128, 10, [13, 26, 39, 52, 64, 77, 90, 103, 116, 128]),
        (10, 7, [2, 3, 5, 6, 8, 9, 10]),
        (4096, 5, [820, 1639, 2458, 3277, 4096]),
    ],
)
def test_range_vectors(max_parallelism: int, parallelism: int, stops: list[int]) -> None:
    ranges = [keygroups.assign_key_groups(max_parallelism, parallelism, i) for i in range(parallelism)]
    assert ranges == [KeyGroupRange(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


@pytest.mark.parametrize(
    ("max_parallelism", "parallelism"),
    [(4, 5), (4, 0), (4, -1), (0, 1), (32769, 1), (8.0, 2), ("8", 2), (8, 1.5), (8, None), (10**30, 1)],
)
def test_parallelism_out_of_bounds_is_refused(max_parallelism: Any, parallelism: Any) -> None:
    with pytest.raises(InvalidConfigError):
        keygroups.check_parallelism(max_parallelism, parallelism)
    with pytest.raises(InvalidConfigError):
        keygroups.assign_key_groups(max_parallelism, parallelism, 0)


@pytest.mark.parametrize("subtask", [-1, 3])
def test_subtask_out_of_bounds_is_refused(subtask: int) -> None:
    with pytest.raises(InvalidConfigError, match="subtask"):
        keygroups.assign_key_groups(128, 3, subtask)


def test_default_max_parallelism_vectors() -> None:
    parallelisms = (1, 85, 86, 170, 171, 172, 200, 1000, 21845, 30000)
    expected = [128, 128, 256, 256, 256, 512, 512, 2048, 32768, 32768]
    assert [keygroups.default_max_parallelism(p) for p in parallelisms] == expected
    for refused in (0, 32769):
        with pytest.raises(InvalidConfigError):
            keygroups.default_max_parallelism(refused)


@pytest.mark.parametrize("max_parallelisms", [range(1, 101), range(299, 301), (32768,)])
def test_ranges_partition_the_groups_and_agree_with_the_owner_formula(max_parallelisms: range) -> None:
    for max_parallelism in max_parallelisms:
        groups = np.arange(max_parallelism, dtype=np.int32)
        for parallelism in (*range(1, min(max_parallelism, 300) + 1), max_parallelism):
            owners = subtasks_of_key_groups(groups, max_parallelism, parallelism)
            ranges = [keygroups.assign_key_groups(max_parallelism, parallelism, i) for i in range(parallelism)]
            assert all(len(r) > 0 for r in ranges)
            assert np.array_equal(owners, np.repeat(np.arange(parallelism), [len(r) for r in ranges]))
        assert keygroups.subtask_of_key_group(max_parallelism - 1, max_parallelism, max_parallelism) == max_parallelism - 1


def test_spread_is_even() -> None:
    groups = key_groups_of_hashes(np.arange(100_000, dtype=np.uint32), 128)
    counts = np.bincount(groups)
    assert (counts.min(), counts.max()) == (699, 845)


@pytest.mark.parametrize("max_parallelism", [1, 10, 128, 1000, 32768])
def test_vectorised_groups_agree(max_parallelism: int) -> None:
    hashes = np.random.default_rng(7).integers(0, 2**32, 2000, dtype=np.uint32)
    hashes[:4] = [0, 1, 2**31, 2**32 - 1]
    groups = key_groups_of_hashes(hashes, max_parallelism)
    assert groups.dtype == np.int32
    assert groups.tolist() == [keygroups.key_group_of_hash(int(h), max_parallelism) for h in hashes]


def test_hash_whose_spread_is_the_smallest_integer_goes_to_group_zero() -> None:
    h32 = _hash_with_code(0x80000000)
    assert keygroups.spread(h32) == 0
    assert key_groups_of_hashes(np.array([h32], np.uint32), 100).tolist() == [0]


def _hash_with_code(code: int) -> int:
    """Invert the spread up to its sign rule."""
    mask = 0xFFFFFFFF

    def unshift(value: int, bits: int) -> int:
        result = value
        for _ in range(32 // bits + 1):
            result = value ^ (result >> bits)
        return result

    def rotate_right(value: int, bits: int) -> int:
        return ((value >> bits) | (value << (32 - bits))) & mask

    code = unshift(code, 16) * pow(0xC2B2AE35, -1, 1 << 32) & mask
    code = unshift(code, 13) * pow(0x85EBCA6B, -1, 1 << 32) & mask
    code = (unshift(code, 16) ^ 4) & mask
    code = rotate_right((code - 0xE6546B64) * pow(5, -1, 1 << 32) & mask, 13)
    code = rotate_right(code * pow(0x1B873593, -1, 1 << 32) & mask, 15)
    return code * pow(0xCC9E2D51, -1, 1 << 32) & mask


@pytest.mark.parametrize(
    ("uid", "expected"),
    [
        ("source", "e5a72f353fc1e6bbf3bd96a41384998c"),
        ("map-1", "cbc42da82d8ff22c85d9a03aa8685856"),
        ("window", "01203aa9a12dc1ec725e03853dd7c8f2"),
        ("sink", "2e588ce1c86a9d46e2e85186773ce4fd"),
    ],
)
def test_operator_id_vectors(uid: str, expected: str) -> None:
    assert keygroups.operator_id(uid) == expected


def test_empty_uid_is_refused() -> None:
    with pytest.raises(InvalidConfigError):
        keygroups.operator_id("")
