"""Rows on their way to RocksDB, many at a time, are what they are one by one."""

from __future__ import annotations

import struct
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.statebackends.errors import StateValueError
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.options import Compaction
from holdfast.statebackends.rocksdb.row_keys import row_key, row_keys, write_order
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.state import ListStateDescriptor, Ttl, ValueStateDescriptor

ROWS = st.lists(st.tuples(st.integers(0, 2**15 - 1), st.binary(min_size=1, max_size=30)), max_size=20)


@given(ROWS, st.integers(0, 2**16 - 1), st.binary(max_size=5))
def test_row_keys_are_those_of_single_rows(rows: list[tuple[int, bytes]], state_id: int, namespace: bytes) -> None:
    groups = np.array([group for group, _ in rows], np.int32)
    keys = [key for _, key in rows]
    assert row_keys(groups, state_id, keys, namespace) == [row_key(group, state_id, key, namespace) for group, key in rows]
    assert sorted(write_order(groups, keys).tolist()) == list(range(len(rows)))


@given(st.lists(st.tuples(st.integers(0, 127), st.integers(-(2**63), 2**63 - 1)), max_size=30))
def test_keys_of_one_number_are_written_in_the_order_of_the_database(rows: list[tuple[int, int]]) -> None:
    groups = np.array([group for group, _ in rows], np.int32)
    keys = [KeyType.of(int).encode(key) for _, key in rows]
    encoded = row_keys(groups, 3, keys, b"window")
    assert [encoded[index] for index in write_order(groups, keys)] == sorted(encoded)


def test_a_namespace_that_is_too_long_is_refused() -> None:
    with pytest.raises(struct.error):
        row_keys(np.zeros(1, np.int32), 0, [b"k"], b"n" * 65_536)


class Whole(int):
    """No plain int, and yet one."""


VALUES: list[tuple[Any, list[Any], list[Any]]] = [
    (bytes, [b"", b"x" * 300], ["x", None]),
    (bool, [True, False], [1]),
    (int, [0, -(2**63), 2**63 - 1, Whole(7)], [2**63, True, "1"]),
    (str, ["", "abc", "é\U0001f600"], ["\ud800", b"a"]),
    (float, [0.5, 2, float("inf")], ["0.5"]),
    (date, [date(2020, 1, 1)], ["2020-01-01"]),
    (dict[str, list[int]], [{}, {"a": [1, 2]}], [{"a": ["b"]}, {1: []}]),
]


@pytest.mark.parametrize(("declared", "good", "bad"), VALUES, ids=[str(declared) for declared, *_ in VALUES])
def test_values_are_encoded_together_as_one_by_one(declared: Any, good: list[Any], bad: list[Any]) -> None:
    serializer = StateSerializer.of(ValueStateDescriptor("v", declared), KeyType.of(int))
    for values in (good, [], good[:1] * 3):
        assert serializer.encode_all(values) == [serializer.encode(value) for value in values]
    for value in bad:
        with pytest.raises(StateValueError) as one:
            serializer.encode(value)
        with pytest.raises(StateValueError) as many:
            serializer.encode_all([*good, value, *good])
        assert str(many.value) == str(one.value)


def test_lists_and_stamped_values_are_encoded_together_as_one_by_one() -> None:
    listed = StateSerializer.of(ListStateDescriptor("l", int), KeyType.of(int))
    assert listed.encode_all([[], [1, 2]]) == [listed.encode([]), listed.encode([1, 2])]
    stamped = StateSerializer.of(ValueStateDescriptor("v", int, ttl=Ttl(1_000)), KeyType.of(int))
    assert stamped.encode_all([(5, 1), (6, 2)]) == [stamped.encode((5, 1)), stamped.encode((6, 2))]


def test_a_piece_writes_and_deletes(tmp_path: Path) -> None:
    store = RocksStore(str(tmp_path / "db"), write_buffer_bytes=1 << 20, block_cache_bytes=1 << 20)
    store.write_batch([b"a", b"b", b"c"], [b"1", b"2", b"3"])
    store.write_batch([b"a", b"b", b"d"], [b"4", None, b"5"])
    assert [store.get(key) for key in (b"a", b"b", b"c", b"d")] == [b"4", None, b"3", b"5"]
    store.close()


def merging_of(folder: Path) -> tuple[str, str]:
    """What an open database has in its newest OPTIONS file: runs at which it merges, and the bound for merging all."""
    newest = max(folder.glob("OPTIONS-*"), key=lambda path: int(path.name.removeprefix("OPTIONS-")))
    options = dict(line.strip().split("=", 1) for line in newest.read_text().splitlines() if "=" in line)
    universal = dict(part.split("=") for part in options["compaction_options_universal"].strip("{}").split(";") if part)
    return options["level0_file_num_compaction_trigger"], universal["max_size_amplification_percent"]


def test_a_new_database_merges_early_until_its_first_copy(tmp_path: Path) -> None:
    db = tmp_path / "db"
    compaction = Compaction(9, 300)
    store = RocksStore(str(db), write_buffer_bytes=1 << 16, block_cache_bytes=1 << 20, compaction=compaction, is_new=True)
    assert merging_of(db) == ("3", "50")
    store.write_batch([b"a"], [b"1"])
    store.link_copy(str(tmp_path / "copy"))
    assert merging_of(db) == ("9", "300")
    store.write_batch([b"b"], [b"2"])
    store.link_copy(str(tmp_path / "second"))
    store.close()
    clone = RocksStore(str(tmp_path / "copy"), write_buffer_bytes=1 << 16, block_cache_bytes=1 << 20, compaction=compaction)
    assert merging_of(tmp_path / "copy") == ("9", "300")
    assert (clone.get(b"a"), clone.get(b"b")) == (b"1", None)
    clone.close()


@pytest.mark.parametrize(("is_new", "in_background"), [(False, True), (True, False)])
def test_others_merge_as_they_are_told(tmp_path: Path, is_new: bool, in_background: bool) -> None:
    compaction = Compaction(9, 300, in_background)
    store = RocksStore(str(tmp_path), write_buffer_bytes=1 << 16, block_cache_bytes=1 << 20, compaction=compaction, is_new=is_new)
    assert merging_of(tmp_path) == ("9", "300")
    store.close()
