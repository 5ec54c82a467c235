"""Key indexes against a plain dict: dense slots in order of first arrival, for every kind of key and table."""

from __future__ import annotations

import tracemalloc
from datetime import UTC
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statebackends.columnar.key_index import EncodedKeyIndex, Int64KeyIndex, KeyIndex, WordsKeyIndex, create_key_index
from holdfast.statebackends.serialization.keys import KeyType
from tests.examples import examples


def _index(key_type: KeyType) -> KeyIndex:
    return create_key_index(key_type.arrow_types, lambda arrays: key_type.column(arrays, max_parallelism=128))


def _check(key_type: KeyType, batches: list[list[Any]]) -> KeyIndex:
    index = _index(key_type)
    model: dict[bytes, int] = {}
    firsts: list[Any] = []
    for batch in batches:
        expected = []
        known = [model.get(key_type.encode(key), -1) for key in batch]
        assert index.find(key_type.column_of_values(batch, max_parallelism=128)).tolist() == known
        for key in batch:
            encoded = key_type.encode(key)
            if encoded not in model:
                model[encoded] = len(model)
                firsts.append(key)
            expected.append(model[encoded])
        frozen = index.frozen_keys()
        before = index.count
        slots = index.slots(key_type.column_of_values(batch, max_parallelism=128))
        assert slots.tolist() == expected
        assert index.count == len(model)
        assert len(frozen()[0]) == before
    column = key_type.column(index.key_arrays(0, index.count), max_parallelism=128)
    assert column.encoded() == list(model)
    assert key_type.column(index.frozen_keys()(), max_parallelism=128).encoded() == list(model)
    return index


INT64 = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(0, 300)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.one_of(SMALL, INT64), max_size=60), max_size=6))
def test_int64_slots_are_those_of_a_dict(batches: list[list[int]]) -> None:
    _check(KeyType.of(int), batches)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(st.text(max_size=3), max_size=30), max_size=5))
def test_utf8_slots_are_those_of_a_dict(batches: list[list[str]]) -> None:
    _check(KeyType.of(str), batches)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.booleans()), max_size=30), max_size=5))
def test_tuple_slots_are_those_of_a_dict(batches: list[list[tuple[str, int, bool]]]) -> None:
    _check(KeyType.of(tuple[str, int, bool]), batches)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.5, float("nan"), -float("nan"), -1.0]), max_size=30), max_size=4))
def test_float_slots_follow_the_identity_of_keys_not_of_bits(batches: list[list[float]]) -> None:
    _check(KeyType.of(float), batches)


FIELDS = ["utf8", "binary", "int64", "bool", "float64", "date32", "timestamp[us, UTC]", "decimal128(38, 2)"]
FLOATS = st.sampled_from([0.0, -0.0, 1.5, float("nan"), -float("nan")]) | st.floats()
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "utf8": st.text(max_size=2),
    "binary": st.binary(max_size=2),
    "int64": SMALL | INT64,
    "bool": st.booleans(),
    "float64": FLOATS,
    "date32": st.dates(),
    "timestamp[us, UTC]": st.datetimes(timezones=st.just(UTC)),
    "decimal128(38, 2)": st.integers(-(10**36), 10**36).map(lambda number: Decimal(number).scaleb(-2)),
}


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_slots_of_several_columns_are_those_of_the_dict_path(data: st.DataObject) -> None:
    fields = data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3))
    key_type = KeyType.parse(f"tuple<{','.join(fields)}>")
    pool = data.draw(st.lists(st.tuples(*(VALUES[field] for field in fields)), min_size=1, max_size=20))
    batches = data.draw(st.lists(st.lists(st.sampled_from(pool), max_size=30), max_size=5))
    index = _check(key_type, batches)
    assert isinstance(index, WordsKeyIndex) or fields in (["int64"], ["date32"], ["timestamp[us, UTC]"], ["utf8"], ["binary"])
    by_dict = EncodedKeyIndex(key_type.arrow_types, lambda arrays: key_type.column(arrays, max_parallelism=128))
    for batch in batches:
        keys = key_type.column_of_values(batch, max_parallelism=128)
        assert index.slots(keys).tolist() == by_dict.slots(keys).tolist()
    shown = [repr([array.to_pylist() for array in each.key_arrays(0, each.count)]) for each in (index, by_dict)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("text", ["date32", "timestamp[us, UTC]", "bool", "decimal128(10, 2)", "binary"])
def test_every_key_type_has_an_index(text: str) -> None:
    key_type = KeyType.parse(text)
    arrays = {
        "date32": pa.array([3, -3, 3], pa.int32()).view(pa.date32()),
        "timestamp[us, UTC]": pa.array([3, -3, 3], pa.int64()).view(pa.timestamp("us", "UTC")),
        "bool": pa.array([True, False, True]),
        "decimal128(10, 2)": pa.array(["3.10", "-3.10", "3.10"]).cast(pa.decimal128(10, 2)),
        "binary": pa.array([b"\x00", b"", b"\x00"]),
    }
    index = _index(key_type)
    assert index.slots(key_type.column([arrays[text]], max_parallelism=128)).tolist() == [0, 1, 0]
    assert index.key_arrays(0, 2)[0].equals(arrays[text].slice(0, 2))


@pytest.mark.parametrize("stride", [1, -1, 7, 1_000_003, 1 << 40])
def test_many_keys_over_many_growths(stride: int) -> None:
    generator = np.random.default_rng(stride & 0xFFFF)
    key_type = KeyType.of(int)
    index = _index(key_type)
    seen: dict[int, int] = {}
    for size in (1, 10, 5_000, 20_000, 60_000):
        keys = generator.integers(0, 50_000, size) * stride
        slots = index.slots(key_type.column([pa.array(keys)], max_parallelism=128))
        expected = [seen.setdefault(key, len(seen)) for key in keys.tolist()]
        assert slots.tolist() == expected
    assert index.key_arrays(0, index.count)[0].to_pylist() == list(seen)


def test_an_outlier_turns_a_direct_table_into_a_hashed_one_and_loses_nothing() -> None:
    key_type = KeyType.of(int)
    index = _index(key_type)
    assert isinstance(index, Int64KeyIndex)

    def slots(*keys: int) -> list[int]:
        found: list[int] = index.slots(key_type.column([pa.array(keys, pa.int64())], max_parallelism=128)).tolist()
        return found

    assert slots(5, 6, 5) == [0, 1, 0]
    assert slots(1 << 60, 6, -1) == [2, 1, 3]
    assert slots(5, -1, 1 << 60, 7) == [0, 3, 2, 4]


def test_a_slice_of_a_larger_array_is_looked_up_by_its_own_rows() -> None:
    key_type = KeyType.of(int)
    index = _index(key_type)
    keys = pa.array([9, 8, 7, 8]).slice(1, 3)
    assert index.slots(key_type.column([keys], max_parallelism=128)).tolist() == [0, 1, 0]


def test_pairs_keep_their_slots_while_second_fields_grow_from_few_to_many() -> None:
    batches = [[(key, key * 7 % seconds - 1) for key in range(400)] for seconds in (1, 2, 3, 9, 300)]
    assert _check(KeyType.parse("tuple<int64,int64>"), [*batches, batches[1]]).count > 1_000


def test_a_few_keys_take_little_memory_and_are_found_in_batches_of_any_size() -> None:
    key_type = KeyType.of(int)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        indexes = [_index(key_type) for _ in range(200)]
        for index in indexes:
            assert index.slots(key_type.column([pa.array([7, 5_000_000, 7])], max_parallelism=128)).tolist() == [0, 1, 0]
        each = (tracemalloc.get_traced_memory()[0] - before) / 200
    finally:
        tracemalloc.stop()
    assert each < 1_500, "a job may have a namespace for each second of a day"
    for keys in ([7] * 100, [5_000_000, 7, 1 << 40] * 100, [*range(300), 7]):
        known = dict(zip(index.key_arrays(0, index.count)[0].to_pylist(), range(index.count), strict=True))
        expected = [known.setdefault(key, len(known)) for key in keys]
        assert index.slots(key_type.column([pa.array(keys)], max_parallelism=128)).tolist() == expected
