"""Operator state at a restore (scenarios P06-P08, P10): the list, union and broadcast entries that each new subtask is given."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers.exchange.split_entries import ENUMERATOR_KIND, EnumeratorEntry, SplitEntry
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, Partitioning
from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.ha.snapshots import read_lists
from holdfast.coordinator.restore.assign import assign_state, find_list_states
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.errors import IncompatibleStateError, InvalidSplitError, RestoreError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.serialization.state_serializer import state_meta
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.state import OperatorListStateDescriptor, Redistribution
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import operator, vertex
from tests.harness.restoring import plan_restore
from tests.operators.ports import DictStorage

Lists = dict[str, list[list[bytes]]]
"""State name -> entries of each subtask."""

SPLIT, UNION, BROADCAST = (state_meta(OperatorListStateDescriptor(mode.value, mode), None) for mode in Redistribution)
FOLDER = "job/chk-7"


def graph_of(parallelism: int, *metas: StateMeta) -> JobGraph:
    return JobGraph("job", (vertex(operator("op", "process", *metas), parallelism=parallelism),), (), JobConfig())


def handle_of(meta: StateMeta, entries: list[bytes]) -> OperatorListHandle:
    return OperatorListHandle(meta, InlineHandle(msgspec.msgpack.encode(entries)), len(entries))


def snapshot_of(subtasks: list[tuple[OperatorListHandle, ...]]) -> SnapshotMetadata:
    states = tuple(OperatorSubtaskState(operator=handles) for handles in subtasks)
    stored = OperatorState("op", operator_id("op"), "op", len(states), 128, states)
    return SnapshotMetadata(
        job_id="cd" * 16,
        job_name="job",
        checkpoint_id=7,
        kind="checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=1,
        completion_timestamp_ms=2,
        operators=(stored,),
    )


def stored(lists: Lists, *metas: StateMeta) -> SnapshotMetadata:
    count = len(next(iter(lists.values())))
    return snapshot_of([tuple(handle_of(meta, lists[meta.name][index]) for meta in metas) for index in range(count)])


def assigned(metadata: SnapshotMetadata, graph: JobGraph, storage: DictStorage) -> list[tuple[OperatorListHandle, ...]]:
    """Handles of each new subtask: what the coordinator does between a snapshot and a deployment."""
    plan = plan_restore(metadata, graph)
    found = find_list_states(metadata, plan.graph)
    lists = {(state.uid, name): run_flow(read_lists(state, name, FOLDER), storage) for state, name in found}
    states = assign_state(metadata, plan.graph, lists)
    (only,) = graph.vertices
    parts = [states[SubtaskKey(only.vertex_id, index)].get("op", OperatorSubtaskState()) for index in range(only.parallelism)]
    return [part.operator for part in parts]


def loaded(handles: tuple[OperatorListHandle, ...], storage: DictStorage) -> dict[str, list[bytes]]:
    """Entries as a subtask sees them: handles of one name one after the other."""
    lists: dict[str, list[bytes]] = {}
    for handle in handles:
        lists.setdefault(handle.state.name, []).extend(run_flow(read_entries(handle, FOLDER, operator="op"), storage))
    return lists


def restored(metadata: SnapshotMetadata, parallelism: int, *metas: StateMeta) -> list[dict[str, list[bytes]]]:
    storage = DictStorage()
    return [loaded(handles, storage) for handles in assigned(metadata, graph_of(parallelism, *metas), storage)]


# ------------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("before", [SPLIT, UNION, BROADCAST], ids=lambda meta: meta.kind)
@pytest.mark.parametrize("after", [SPLIT, UNION, BROADCAST], ids=lambda meta: meta.kind)
def test_r11_state_that_is_dealt_out_otherwise_than_it_was_stored_is_refused_with_both_kinds(
    before: StateMeta, after: StateMeta
) -> None:
    was, declared = (msgspec.structs.replace(meta, name="s") for meta in (before, after))
    metadata = stored({"s": [[b"a"], [b"b"]]}, was)
    if before == after:
        assert plan_restore(metadata, graph_of(2, declared)).dropped_states == {}
        return
    message = f"stored as {was.kind} of bytes and is declared as {declared.kind} of bytes"
    with pytest.raises(IncompatibleStateError, match=message) as caught:
        plan_restore(metadata, graph_of(2, declared))
    fields = caught.value.fields
    assert fields == {"operator": "op", "state": "s", "stored": f"{was.kind} of bytes", "declared": f"{declared.kind} of bytes"}


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_a_state_without_entries_may_become_another_kind(parallelism: int) -> None:
    metadata = stored({"s": [[], []]}, msgspec.structs.replace(SPLIT, name="s"))
    subtasks = restored(metadata, parallelism, msgspec.structs.replace(UNION, name="s"))
    assert subtasks == [{"s": []}] * parallelism


def test_p10_a_union_that_lacks_the_entries_of_finished_subtasks_is_refused() -> None:
    metadata = snapshot_of([(handle_of(UNION, [b"a"]),), ()])
    with pytest.raises(RestoreError, match="'union' was stored by 1 of 2 subtasks") as caught:
        plan_restore(metadata, graph_of(2, UNION))
    assert (caught.value.operator, caught.value.state) == ("op", "union")


# ------------------------------------------------------------------------------------------------------------------ dealing


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_p06_p08_union_gives_all_entries_to_each_in_the_order_of_the_old_subtasks(parallelism: int) -> None:
    metadata = stored({"union": [[b"u1"], [b"u2", b"u3"]]}, UNION)
    assert restored(metadata, parallelism, UNION) == [{"union": [b"u1", b"u2", b"u3"]}] * parallelism


@pytest.mark.parametrize(("parallelism", "copies"), [(5, b"01201"), (3, b"012"), (2, b"01"), (1, b"0")])
def test_p07_broadcast_gives_each_the_copy_of_its_index_modulo_the_old_parallelism(parallelism: int, copies: bytes) -> None:
    metadata = stored({"broadcast": [[b"0"], [b"1"], [b"2"]]}, BROADCAST)
    assert restored(metadata, parallelism, BROADCAST) == [{"broadcast": [bytes([copy])]} for copy in copies]


@pytest.mark.parametrize("parallelism", [2, 3, 4])
def test_p10_a_subtask_gets_another_copy_where_the_one_of_its_index_had_finished(parallelism: int) -> None:
    metadata = snapshot_of([(), (handle_of(BROADCAST, [b"1"]),), ()])
    assert restored(metadata, parallelism, BROADCAST) == [{"broadcast": [b"1"]}] * parallelism


def test_p08_split_state_stays_where_it_is_while_its_neighbours_are_copied() -> None:
    lists: Lists = {"split": [[b"a", b"b"], []], "union": [[b"c"], [b"d"]], "broadcast": [[b"e"], [b"e"]]}
    copied = {"union": [b"c", b"d"], "broadcast": [b"e"]}
    subtasks = restored(stored(lists, SPLIT, UNION, BROADCAST), 2, SPLIT, UNION, BROADCAST)
    assert subtasks == [{"split": [b"a", b"b"], **copied}, {"split": [], **copied}]


def test_only_split_state_is_read_to_be_dealt_out() -> None:
    metadata = stored({"split": [[b"a"], []], "union": [[b"c"], []], "broadcast": [[b"e"], [b"e"]]}, SPLIT, UNION, BROADCAST)
    assert [name for _, name in find_list_states(metadata, graph_of(3, SPLIT, UNION, BROADCAST))] == ["split"]
    assert find_list_states(metadata, graph_of(2, SPLIT, UNION, BROADCAST)) == []


def test_files_of_a_union_are_handed_on_as_they_are() -> None:
    storage = DictStorage()
    handles = []
    for index in range(2):
        content = msgspec.msgpack.encode([b"%d" % index])
        storage.files[f"{FOLDER}/list-{index}"] = content
        handles.append(OperatorListHandle(UNION, FileHandle(f"list-{index}", len(content), checksum_of(content)), 1))
    given = assigned(snapshot_of([(handle,) for handle in handles]), graph_of(3, UNION), storage)
    assert given == [tuple(handles)] * 3
    assert loaded(given[2], storage) == {"union": [b"0", b"1"]}


def test_a_new_state_begins_empty_beside_old_ones() -> None:
    assert restored(stored({"union": [[b"a"], []]}, UNION), 1, SPLIT, UNION, BROADCAST) == [{"union": [b"a"]}]


# ------------------------------------------------------------------------------------------------------------------- laws

ENTRIES = st.lists(st.binary(max_size=3), max_size=4)


@st.composite
def mixed(draw: st.DrawFn) -> Lists:
    """One operator's states of all three kinds; copies of broadcast state are equal, as at every cut."""
    count = draw(st.integers(1, 5))
    table = draw(ENTRIES)
    return {
        "split": [draw(ENTRIES) for _ in range(count)],
        "union": [draw(ENTRIES) for _ in range(count)],
        "broadcast": [table] * count,
    }


def flat(subtasks: list[list[bytes]]) -> list[bytes]:
    return [entry for entries in subtasks for entry in entries]


@given(mixed(), st.integers(1, 6))
def test_i27_every_kind_keeps_its_law_at_any_parallelism(lists: Lists, parallelism: int) -> None:
    subtasks = restored(stored(lists, SPLIT, UNION, BROADCAST), parallelism, SPLIT, UNION, BROADCAST)
    assert Counter(flat([subtask["split"] for subtask in subtasks])) == Counter(flat(lists["split"]))
    for subtask in subtasks:
        assert subtask["union"] == flat(lists["union"])
        assert subtask["broadcast"] == lists["broadcast"][0]


@given(mixed(), st.integers(1, 6))
def test_i28_there_and_back_again_keeps_the_contents(lists: Lists, parallelism: int) -> None:
    """Between the two restores each subtask stores what an operator would: of a union, the entries that fall to it."""
    metas = (SPLIT, UNION, BROADCAST)
    there = restored(stored(lists, *metas), parallelism, *metas)
    kept: Lists = {
        "split": [subtask["split"] for subtask in there],
        "union": [subtask["union"][index::parallelism] for index, subtask in enumerate(there)],
        "broadcast": [subtask["broadcast"] for subtask in there],
    }
    count = len(lists["split"])
    back = restored(stored(kept, *metas), count, *metas)
    assert Counter(flat([subtask["split"] for subtask in back])) == Counter(flat(lists["split"]))
    assert [Counter(subtask["union"]) for subtask in back] == [Counter(flat(lists["union"]))] * count
    assert [subtask["broadcast"] for subtask in back] == lists["broadcast"]


# ----------------------------------------------------------------------------------------------------------------- splits


def split_graph(parallelism: int) -> JobGraph:
    """An enumerator, and the readers of its source."""
    enumerator = vertex(operator("in-enumerator", ENUMERATOR_KIND, SPLIT), parallelism=1)
    readers = vertex(operator("in", "source", SPLIT), parallelism=parallelism)
    edge = JobEdge(0, enumerator.vertex_id, "in-enumerator", readers.vertex_id, 0, Partitioning.CUSTOM)
    return JobGraph("job", (enumerator, readers), (edge,), JobConfig())


def split_entry(name: str, position: int = 0) -> bytes:
    split = msgspec.msgpack.encode({"split_id": name, "start": position})
    return msgspec.msgpack.encode(SplitEntry(1, split, (position,)))


def assign_splits(waiting: list[str], held: list[list[str]], parallelism: int) -> None:
    """What readers held, each at a position of its own, and what waited for one, on to this parallelism."""
    enumerator = msgspec.msgpack.encode(EnumeratorEntry(1, True, b""))
    entries = [[split_entry(name, subtask) for name in names] for subtask, names in enumerate(held)]
    readers = tuple(OperatorSubtaskState(operator=(handle_of(SPLIT, each),)) for each in entries)
    waits = (OperatorSubtaskState(operator=(handle_of(SPLIT, [enumerator, *map(split_entry, waiting)]),)),)
    metadata = msgspec.structs.replace(
        snapshot_of([]),
        operators=tuple(
            OperatorState(uid, operator_id(uid), uid, len(subtasks), 128, subtasks)
            for uid, subtasks in (("in-enumerator", waits), ("in", readers))
        ),
    )
    graph = split_graph(parallelism)
    lists = {(state.uid, name): entries for state, name in find_list_states(metadata, graph)}
    assert bool(lists) == (parallelism != len(held))
    assign_state(metadata, graph, lists)


@pytest.mark.parametrize("parallelism", [2, 3], ids=["same parallelism", "rescale"])
@pytest.mark.parametrize(
    ("waiting", "held", "where"),
    [
        ([], [["a", "b"], ["c", "b"]], "in subtask 0 and in subtask 1"),
        (["c", "b"], [["a"], ["b"]], "in subtask 1 and in the enumerator"),
        ([], [["a"], ["b", "b"]], "twice in subtask 1"),
    ],
)
def test_split_that_two_hold_is_refused_by_name(waiting: list[str], held: list[list[str]], where: str, parallelism: int) -> None:
    with pytest.raises(InvalidSplitError, match=f"source in: split 'b': the snapshot has it {where}") as refused:
        assign_splits(waiting, held, parallelism)
    assert (refused.value.operator, refused.value.split) == ("in", "b")


@pytest.mark.parametrize("parallelism", [2, 3])
def test_splits_that_each_have_one_holder_are_assigned(parallelism: int) -> None:
    assign_splits(["d"], [["a", "b"], ["c"]], parallelism)
