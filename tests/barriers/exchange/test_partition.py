"""Partitioning of batches: what goes where, in which order, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import Batch
from holdfast.barriers.exchange.partition import (
    BroadcastPartitioner,
    CustomPartitioner,
    EdgeTarget,
    ForwardPartitioner,
    KeySelector,
    Partitioner,
    RebalancePartitioner,
    SelectorPartitioner,
    ShufflePartitioner,
    partitioner_of,
    split_by_subtask,
)
from holdfast.barriers.jobgraph import JobEdge, Partitioning
from holdfast.operators.functions.schema import UNDECLARED
from holdfast.operators.functions.selectors import ColumnKeySelector, FunctionKeySelector
from holdfast.statebackends.errors import InvalidConfigError, InvalidKeyError
from holdfast.statebackends.keygroups import subtask_of_key_group
from holdfast.statebackends.serialization.keys import KeyType
from tests.examples import examples

INT = KeyType.parse("int64")
PAIR = KeyType.parse("tuple<utf8,int64>")


def columns(**values: list[Any]) -> Batch:
    return Batch(columns=pa.record_batch({name: pa.array(column) for name, column in values.items()}))


def rows(kind: pa.DataType | None = None, **values: list[Any]) -> Batch:
    """Rows of one declared column, int64 unless told."""
    ((name, column),) = values.items()
    return Batch(rows=[{name: value} for value in column], schema=pa.schema({name: kind or pa.int64()}))


def by_columns(*names: str, key_type: KeyType = INT, parallelism: int = 4) -> SelectorPartitioner:
    return by(ColumnKeySelector(names, key_type), parallelism)


def by(selector: KeySelector, parallelism: int = 4) -> SelectorPartitioner:
    return SelectorPartitioner(selector, parallelism=parallelism, max_parallelism=128, operator="count")


def owner(key_type: KeyType, key: Any, parallelism: int = 4) -> int:
    return subtask_of_key_group(key_type.key_group(key, 128), 128, parallelism)


# -------------------------------------------------------------------------------------------------- what goes wrong


def test_parallelism_above_max_parallelism_is_refused() -> None:
    with pytest.raises(InvalidConfigError):
        by_columns("k", parallelism=129)


@pytest.mark.parametrize("batch", [columns(k=[1, None, 3]), rows(k=[1, None])], ids=["columns", "rows"])
def test_null_key_names_the_operator(batch: Batch) -> None:
    with pytest.raises(InvalidKeyError, match="count"):
        by_columns("k").split(batch)


@pytest.mark.parametrize("batch", [columns(k=[1.5]), rows(pa.float64(), k=[1.5])], ids=["columns", "rows"])
def test_key_of_another_type_names_the_operator(batch: Batch) -> None:
    with pytest.raises(InvalidKeyError, match="count"):
        by_columns("k").split(batch)


def test_hash_edge_without_selector_is_refused() -> None:
    edge = JobEdge(1, "v", "v", "w", 0, Partitioning.HASH, key=("k",), key_type="int64")
    with pytest.raises(InvalidConfigError, match="no selector"):
        partitioner_of(edge, EdgeTarget("count", 2, 128, producer=0, channel_count=2))


# ---------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("parallelism", [2, 3, 10])
def test_rows_go_to_the_owner_of_their_key_group(parallelism: int) -> None:
    keys = list(range(500))
    parts = by_columns("k", parallelism=parallelism).split(columns(k=keys, v=keys))
    for subtask, part in parts:
        values = part.columns().column("k").to_pylist()
        assert {owner(INT, key, parallelism) for key in values} == {subtask}
        assert values == sorted(values)
    assert sum(part.num_rows for _, part in parts) == 500


def test_rows_and_columns_agree() -> None:
    keys, names = [7, 8, 9, 7] * 20, ["a", "b", "c", "d"] * 20
    partitioner = by_columns("n", "k", key_type=PAIR)
    from_columns = partitioner.split(columns(n=names, k=keys))
    as_rows = [{"n": name, "k": key} for name, key in zip(names, keys, strict=True)]
    from_rows = partitioner.split(Batch(rows=as_rows, schema=pa.schema({"n": pa.utf8(), "k": pa.int64()})))
    by_function = by(FunctionKeySelector(lambda row: (row["n"], row["k"]), PAIR, UNDECLARED)).split(Batch(rows=as_rows))
    assert [(s, list(b.rows())) for s, b in from_columns] == [(s, list(b.rows())) for s, b in from_rows]
    assert [(s, list(b.rows())) for s, b in by_function] == [(s, list(b.rows())) for s, b in from_rows]
    assert {s for s, _ in from_rows} == {owner(PAIR, key) for key in zip(names, keys, strict=True)}


def test_key_by_function() -> None:
    text = KeyType.parse("utf8")
    parts = by(FunctionKeySelector(lambda row: row[0], text, UNDECLARED)).split(Batch(rows=["ax", "bx", "ay"]))
    assert sorted(row for _, part in parts for row in part.rows()) == ["ax", "ay", "bx"]
    assert {s for s, part in parts if "ax" in part.rows()} == {owner(text, "a")}


def test_timestamps_travel_with_their_rows() -> None:
    keys = list(range(100))
    batch = columns(k=keys).with_timestamps(np.array(keys, np.int64) * 10)
    for _, part in by_columns("k").split(batch):
        assert part.timestamps is not None
        assert part.timestamps.tolist() == [key * 10 for key in part.columns().column("k").to_pylist()]


def test_one_target_gets_the_batch_itself() -> None:
    batch = columns(k=[5, 5, 5])
    assert by_columns("k", parallelism=1).split(batch) == ((0, batch),)
    assert by_columns("k").split(batch) == ((owner(INT, 5), batch),)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 6), max_size=50))
def test_split_by_subtask_is_a_stable_partition(subtasks: list[int]) -> None:
    batch = Batch(rows=list(enumerate(subtasks)))
    for parallelism in (7, 200):
        parts = split_by_subtask(batch, np.array(subtasks, np.int32), parallelism) if subtasks else []
        assert [(s, list(part.rows())) for s, part in parts] == [
            (s, [(i, t) for i, t in enumerate(subtasks) if t == s]) for s in sorted(set(subtasks))
        ]


def test_parts_of_columns_share_the_size_of_the_whole() -> None:
    batch = columns(k=list(range(1000))).with_timestamps(np.arange(1000))
    assert [part.num_rows for part in batch.cut([250, 0, 750])] == [250, 750]
    assert [part.size for part in batch.cut([250, 0, 750])] == [batch.size // 4, batch.size * 3 // 4]
    assert [part.time_range() for part in batch.cut([250, 0, 750])] == [(0, 249), (250, 999)]


def test_a_batch_with_other_times_has_another_range() -> None:
    batch = columns(k=[1, 2, 3]).with_timestamps(np.array([5, 1, 3]))
    assert batch.time_range() == (1, 5)
    assert batch.with_timestamps(np.array([7, 7, 8])).time_range() == (7, 8)
    assert batch.slice(1).time_range() == (1, 3)
    assert batch.filter(np.array([True, False, False])).time_range() == (5, 5)


# ---------------------------------------------------------------------------------------------------- the other ways


def test_empty_batches_go_nowhere() -> None:
    for partitioner in (ForwardPartitioner(), BroadcastPartitioner(3, producer=0), RebalancePartitioner(3), by_columns("k")):
        assert list(partitioner.split(Batch(rows=[]))) == []


def test_forward_and_broadcast() -> None:
    batch = Batch(rows=[1, 2])
    assert ForwardPartitioner().split(batch) == ((0, batch),)
    assert BroadcastPartitioner(3, producer=5).split(batch) == [(0, batch), (1, batch), (2, batch)]
    assert BroadcastPartitioner(1, producer=0).split(batch) == ((0, batch),)


def test_rebalance_cuts_large_batches_evenly() -> None:
    partitioner = RebalancePartitioner(3, slice_rows_min=10)
    parts = partitioner.split(Batch(rows=list(range(100))))
    assert [(channel, part.num_rows) for channel, part in parts] == [(0, 34), (1, 33), (2, 33)]
    assert [row for _, part in parts for row in part.rows()] == list(range(100))
    assert [part.num_rows for _, part in partitioner.split(Batch(rows=list(range(101))))] == [33, 34, 34]


def test_rebalance_deals_small_batches_in_turn() -> None:
    partitioner = RebalancePartitioner(3)
    assert [partitioner.split(Batch(rows=[1]))[0][0] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 200), max_size=60))
def test_rebalance_is_balanced_by_rows(channel_count: int, sizes: list[int]) -> None:
    partitioner = RebalancePartitioner(channel_count, slice_rows_min=20)
    rows: Counter[int] = Counter()
    for size in sizes:
        parts = partitioner.split(Batch(rows=[None] * size))
        assert sum(part.num_rows for _, part in parts) == size
        for channel, part in parts:
            rows[channel] += part.num_rows
    counts = [rows[channel] for channel in range(channel_count)]
    assert max(counts) - min(counts) <= max([*(size for size in sizes if size < 20 * channel_count), 1])


@pytest.mark.parametrize(
    ("partitioning", "kind"),
    [
        (Partitioning.FORWARD, ForwardPartitioner),
        (Partitioning.REBALANCE, RebalancePartitioner),
        (Partitioning.BROADCAST, BroadcastPartitioner),
        (Partitioning.HASH, SelectorPartitioner),
        (Partitioning.RESCALE, RebalancePartitioner),
        (Partitioning.SHUFFLE, ShufflePartitioner),
        (Partitioning.GLOBAL, ForwardPartitioner),
        (Partitioning.CUSTOM, CustomPartitioner),
    ],
)
def test_partitioner_of_an_edge(partitioning: Partitioning, kind: type[Partitioner]) -> None:
    edge = JobEdge(1, "v", "v", "w", 0, partitioning, key=("k",), key_type="int64")
    selector = ColumnKeySelector(["k"], INT)
    target = EdgeTarget("count", 2, 128, producer=0, channel_count=2)
    assert isinstance(partitioner_of(edge, target, selector=selector, function=Remainder()), kind)


def test_a_custom_edge_needs_its_function() -> None:
    edge = JobEdge(1, "v", "v", "w", 0, Partitioning.CUSTOM)
    with pytest.raises(InvalidConfigError, match="operator 'count': no function for custom edge 1"):
        partitioner_of(edge, EdgeTarget("count", 2, 128, producer=0, channel_count=2))


class Remainder:
    """A function of the user, as the partitioner knows it."""

    def subtasks(self, batch: Batch, *, parallelism: int, operator: str) -> npt.NDArray[np.int32]:
        return np.array([row % parallelism for row in batch.rows()], dtype=np.int32)


def test_custom_follows_the_function() -> None:
    parts = CustomPartitioner(Remainder(), parallelism=3, operator="count").split(Batch(rows=[4, 6, 1, 3, 5]))
    assert [(channel, part.rows()) for channel, part in parts] == [(0, [6, 3]), (1, [4, 1]), (2, [5])]
    assert CustomPartitioner(Remainder(), parallelism=3, operator="count").split(Batch(rows=[])) == ()


def shuffled(sizes: Sequence[int], *, channels: int = 3, seed: int = 7, producer: int = 0) -> list[int]:
    """Channel of each row."""
    partitioner = ShufflePartitioner(channels, seed=seed, producer=producer)
    found, first = {}, 0
    for size in sizes:
        for channel, part in partitioner.split(Batch(rows=list(range(first, first + size)))):
            found.update(dict.fromkeys(part.rows(), channel))
        first += size
    return [found[row] for row in range(first)]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 50), max_size=10), st.integers(1, 20), st.integers(-(2**63), 2**63 - 1), st.integers(0, 9))
def test_shuffle_is_a_matter_of_row_numbers_alone(sizes: list[int], channels: int, seed: int, producer: int) -> None:
    whole = shuffled([sum(sizes)], channels=channels, seed=seed, producer=producer)
    assert shuffled(sizes, channels=channels, seed=seed, producer=producer) == whole
    assert all(0 <= channel < channels for channel in whole)


def test_shuffle_draws_from_splitmix64() -> None:
    state, mask, expected = ShufflePartitioner(3, seed=7, producer=2)._state, 2**64 - 1, []
    for _ in range(20):
        state = (state + 0x9E3779B97F4A7C15) & mask
        value = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        expected.append(((value ^ (value >> 31)) >> 32) * 3 >> 32)
    assert shuffled([20], producer=2) == expected


def test_shuffle_is_the_same_in_every_process_and_differs_by_seed_and_producer() -> None:
    assert shuffled([12]) == [2, 2, 1, 1, 0, 0, 1, 1, 2, 2, 1, 0]
    others = [shuffled([100], seed=8), shuffled([100], producer=1), shuffled([100], seed=-7)]
    assert all(other != shuffled([100]) for other in others)


@pytest.mark.parametrize("channels", [2, 3, 16])
def test_shuffle_is_even(channels: int) -> None:
    rows = 20_000
    counts = Counter(shuffled([rows], channels=channels))
    deviation = sum((counts[channel] - rows / channels) ** 2 for channel in range(channels)) / (rows / channels)
    assert deviation < 3 * channels + 20  # chi-squared, whose mean is channels - 1
