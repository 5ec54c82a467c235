"""Redistribution of operator and keyed state against scenarios P and O08-O09, and its laws on random input."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorSubtaskState
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.redistribute import broadcast_redistribute, keyed_redistribute, split_redistribute, union_redistribute

OLD = st.integers(1, 6).flatmap(
    lambda p: st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=p, max_size=p), max_size=4
    )
)


def test_split_deals_contiguous_chunks() -> None:
    new = split_redistribute({"off": [["p0", "p1", "p2"], ["p3", "p4"]]}, 3)
    assert [subtask["off"] for subtask in new] == [["p0", "p1"], ["p2", "p3"], ["p4"]]


def test_split_rotates_the_remainder_over_sorted_names() -> None:
    new = split_redistribute({"y": [["y1", "y2", "y3", "y4"]], "x": [["x1", "x2", "x3", "x4"]]}, 3)
    assert [subtask["x"] for subtask in new] == [["x1", "x2"], ["x3"], ["x4"]]
    assert [subtask["y"] for subtask in new] == [["y4"], ["y1", "y2"], ["y3"]]


def test_split_of_fewer_entries_than_subtasks() -> None:
    assert split_redistribute({"x": [["x1", "x2"]]}, 4) == [{"x": ["x1"]}, {"x": ["x2"]}, {"x": []}, {"x": []}]


def test_union_gives_all_to_all() -> None:
    assert union_redistribute({"u": [["u1"], ["u2", "u3"]]}, 3) == [{"u": ["u1", "u2", "u3"]}] * 3
    assert union_redistribute({"u": [["u1"], ["u2", "u3"]]}, 2) == [{"u": ["u1", "u2", "u3"]}] * 2


def test_broadcast_copies_by_index_modulo_old_parallelism() -> None:
    old = {"b": [["0"], ["1"], ["2"]]}
    assert broadcast_redistribute(old, 5) == [{"b": [copy]} for copy in "01201"]
    assert broadcast_redistribute(old, 2) == [{"b": [copy]} for copy in "01"]


def test_broadcast_passes_over_a_copy_that_is_missing() -> None:
    assert broadcast_redistribute({"b": [[], ["1"], []]}, 4) == [{"b": ["1"]}] * 4
    assert broadcast_redistribute({"b": [[], []]}, 3) == [{"b": []}] * 3


def test_equal_parallelism_keeps_split_state() -> None:
    assert split_redistribute({"x": [["a", "b", "c"], []]}, 2) == [{"x": ["a", "b", "c"]}, {"x": []}]


def test_finished_subtasks_have_no_entries_to_give() -> None:
    assert split_redistribute({"x": [[], ["a", "b"], []]}, 2) == [{"x": ["a"]}, {"x": ["b"]}]


def test_no_state_gives_empty_subtasks() -> None:
    assert split_redistribute({}, 2) == [{}, {}]


@pytest.mark.parametrize("redistribute", [split_redistribute, union_redistribute, broadcast_redistribute])
def test_bad_input_is_refused(redistribute) -> None:  # type: ignore[no-untyped-def]
    for old, parallelism in (({"x": [[]]}, 0), ({"x": [[]], "y": [[], []]}, 2), ({"x": []}, 1)):
        with pytest.raises(InvalidConfigError):
            redistribute(old, parallelism)


@given(OLD, st.integers(1, 8))
def test_laws(old: dict[str, list[list[int]]], parallelism: int) -> None:
    equal = {len(subtasks) for subtasks in old.values()} == {parallelism}
    split = split_redistribute(old, parallelism)
    union = union_redistribute(old, parallelism)
    for name, subtasks in old.items():
        entries = Counter(entry for subtask in subtasks for entry in subtask)
        assert Counter(entry for subtask in split for entry in subtask[name]) == entries
        sizes = [len(subtask[name]) for subtask in split]
        assert equal or max(sizes) - min(sizes) <= 1
        assert all(Counter(subtask[name]) == entries for subtask in union)
    if not equal:
        totals = [sum(map(len, subtask.values())) for subtask in split]
        assert max(totals) - min(totals) <= 1, "extras rotate over the names"


def _handle(index: int, key_groups: KeyGroupRange) -> OperatorSubtaskState:
    part = InlineHandle(str(index).encode())
    return OperatorSubtaskState(keyed=(KeyedStateHandle(key_groups, "arrow", (), (part,)),))


@pytest.mark.parametrize(
    ("max_parallelism", "old", "new", "reads"),
    [
        (128, 2, 3, [[0], [0, 1], [1]]),
        (128, 3, 2, [[0, 1], [1, 2]]),
        (10, 3, 5, [[0], [0], [1], [1, 2], [2]]),
        (128, 2, 2, [[0], [1]]),
    ],
)
def test_keyed_handles_go_to_every_intersecting_subtask(
    max_parallelism: int, old: int, new: int, reads: list[list[int]]
) -> None:
    states = [_handle(i, assign_key_groups(max_parallelism, old, i)) for i in range(old)]
    shares = keyed_redistribute(states, max_parallelism, new)
    found = [[int(share.handle.parts[0].data) for share in subtask] for subtask in shares]  # type: ignore[union-attr]
    assert found == reads
    for index, subtask in enumerate(shares):
        groups = [group for share in subtask for group in range(share.key_groups.start, share.key_groups.stop)]
        wanted = assign_key_groups(max_parallelism, new, index)
        assert groups == list(range(wanted.start, wanted.stop))
        assert all(len(share.key_groups.intersection(share.handle.key_groups)) == len(share.key_groups) for share in subtask)


def test_key_groups_without_state_give_no_share() -> None:
    assert keyed_redistribute([OperatorSubtaskState()], 128, 2) == [[], []]
    with pytest.raises(InvalidConfigError):
        keyed_redistribute([], 4, 5)
