"""Who restores records in flight: channels dealt out at any parallelism, and edges that the job has not, or not alike.

Flink lost or refused such data on a rescale where operators had no state or edges were mixed (FLINK-31963, 38267, 35351), and
dropped records as late behind merged channels' watermarks (FLINK-40517)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import Batch, Element, Watermark, WatermarkStatus
from holdfast.barriers.exchange.partition import SelectorPartitioner
from holdfast.barriers.exchange.restored import KeyGroupFilter, restored_elements
from holdfast.barriers.exchange.wiring import name_edges
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, JobVertex, Partitioning
from holdfast.barriers.messages import InFlightRestore, RestoredChannel, RestoredPiece, SubtaskKey
from holdfast.coordinator.restore.in_flight import assign_in_flight, check_in_flight
from holdfast.operators.functions.schema import declared_type
from holdfast.operators.functions.selectors import ColumnKeySelector, FunctionKeySelector
from holdfast.statebackends.errors import CorruptStateError, InFlightStateError, UserFunctionError
from holdfast.statebackends.handles import ChannelPiece, ChannelState, FileHandle, InlineHandle
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.snapshot.in_flight import EdgeName, describe_edge, summarise
from tests.coordinator.doubles import operator, vertex

BY_KEY = ColumnKeySelector(("k",), KeyType.parse("int64"))
COLUMNS = ("k: int64", "n: int64")
SIZES = st.integers(1, 4)


def edge_between(source: JobVertex, target: JobVertex, partitioning: Partitioning, **more: Any) -> JobEdge:
    key: dict[str, Any] = {"key": ("k",), "key_type": "int64"} if partitioning is Partitioning.HASH else {}
    found = JobEdge(0, source.vertex_id, source.operators[0].uid, target.vertex_id, 0, partitioning)
    return msgspec.structs.replace(found, **{"overtakable": True, "columns": COLUMNS, **key, **more})


def graph_of(partitioning: Partitioning, producers: int, consumers: int, max_parallelism: int = 128, **more: Any) -> JobGraph:
    """`in` -> `out`; neither has any state."""
    source = vertex(operator("in", "source"), parallelism=producers)
    target = vertex(operator("out", "map"), parallelism=consumers, max_parallelism=max_parallelism)
    return JobGraph("job", (source, target), (edge_between(source, target, partitioning, **more),), JobConfig())


class Stored:
    """In-flight data of a snapshot, with the elements of each piece beside it."""

    def __init__(self) -> None:
        self.elements: dict[bytes, list[Element]] = {}
        self.channels: list[ChannelState] = []

    def add(self, name: EdgeName, partitioning: str, side: Any, subtask: int, pieces: dict[int, list[Element]]) -> None:
        """`pieces`: by peer."""
        content, stored = b"", []
        for peer, elements in pieces.items():
            data = b"%s/%d/%d/%d;" % (side.encode(), len(self.channels), subtask, peer)
            rows = sum(element.num_rows for element in elements if isinstance(element, Batch))
            stored.append(ChannelPiece(peer, len(content), len(data), rows))
            self.elements[data] = elements
            content += data
        rows = sum(piece.rows for piece in stored)
        state = ChannelState(*name, partitioning, side, subtask, rows, InlineHandle(content), tuple(stored))
        self.channels.append(state)

    def of(self, restore: InFlightRestore, piece: RestoredPiece) -> list[Element]:
        part = restore.parts[piece.part]
        assert isinstance(part, InlineHandle)
        return self.elements[part.data[piece.offset : piece.offset + piece.length]]


def batch(rows: Sequence[tuple[int, int]]) -> Batch:
    keys, numbers = ([row[at] for row in rows] for at in (0, 1))
    columns = pa.record_batch({"k": pa.array(keys, pa.int64()), "n": pa.array(numbers, pa.int64())})
    return Batch(columns=columns, timestamps=np.array(numbers, np.int64))


def numbers(elements: Sequence[Element]) -> list[int]:
    return [row["n"] for element in elements if isinstance(element, Batch) for row in element.rows()]


def restored(
    stored: Stored, graph: JobGraph, key: SubtaskKey, restore: InFlightRestore
) -> Iterator[tuple[RestoredChannel, list[Element]]]:
    """What stands in front of each channel, as a worker makes it."""
    target = graph.vertex(key.vertex)
    key_filter = KeyGroupFilter(
        BY_KEY,
        max_parallelism=target.max_parallelism,
        parallelism=target.parallelism,
        operator="out",
        subtask=key.subtask,
        edge="'in' -> 'out'",
    )
    for channel in restore.channels:
        found: list[Element] = []
        for piece in channel.pieces:
            elements = stored.of(restore, piece)
            mine = key_filter if piece.filtered else None
            found += restored_elements(elements, keeps_events=channel.keeps_events, key_filter=mine)
        yield channel, found


# ----------------------------------------------------------------------------------------------------------- dealt out


@pytest.mark.parametrize("old", list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_channels_without_keys_go_round_whatever_the_parallelism_was(old: tuple[int, int]) -> None:
    name = EdgeName("in", None, "out", 0, 0)
    for new in itertools.product((1, 2, 3, 4), repeat=2):
        partitioning = Partitioning.SHUFFLE if sum(new) % 2 else Partitioning.REBALANCE
        stored = Stored()
        for producer in range(old[0]):
            there: dict[int, list[Element]] = {to: [batch([(0, producer * 10 + to + 100)])] for to in range(old[1])}
            stored.add(name, partitioning, "output", producer, there)
        for consumer in range(old[1]):
            here: dict[int, list[Element]] = {of: [batch([(0, of * 10 + consumer)])] for of in range(old[0])}
            stored.add(name, partitioning, "input", consumer, here)
        before, now = graph_of(partitioning, *old), graph_of(partitioning, *new)
        found = assign_in_flight(stored.channels, msgspec.to_builtins(before), now)
        expected = {
            (heir, front): [
                part + producer * 10 + consumer
                for producer in range(front, old[0], new[0])
                for consumer in range(heir, old[1], new[1])
                for part in (0, 100)
            ]
            for heir in range(min(new[1], old[1]))
            for front in range(min(new[0], old[0]))
        }
        assert {
            (key.subtask, channel.producer): numbers(elements)
            for key, restore in found.items()
            for channel, elements in restored(stored, now, key, restore)
        } == expected


@given(st.tuples(SIZES, SIZES), st.tuples(SIZES, SIZES), st.sampled_from([(128, 128), (7, 7), (128, 64)]), st.data())
@settings(max_examples=30, deadline=None)
def test_each_row_by_key_is_restored_once_and_in_order(
    old: tuple[int, int], new: tuple[int, int], groups: tuple[int, int], data: st.DataObject
) -> None:
    name, count = EdgeName("in", None, "out", 0, 0), itertools.count()
    logs: dict[tuple[int, int], list[Element]] = {}
    deal = SelectorPartitioner(BY_KEY, parallelism=old[1], max_parallelism=groups[0], operator="out")
    for producer in range(old[0]):
        for keys in data.draw(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=6), max_size=4)):
            for consumer, part in deal.split(batch([(key, next(count)) for key in keys])):
                logs.setdefault((producer, consumer), []).append(part)
            for consumer in range(old[1]):
                logs.setdefault((producer, consumer), []).append(Watermark(next(count)))
    stored, cuts = Stored(), {channel: data.draw(st.integers(0, len(log))) for channel, log in logs.items()}
    for consumer in range(old[1]):
        here = {of: logs[of, to][: cuts[of, to]] for of, to in logs if to == consumer}
        stored.add(name, "hash", "input", consumer, here)
    for producer in range(old[0]):
        there = {to: logs[of, to][cuts[of, to] :] for of, to in logs if of == producer}
        stored.add(name, "hash", "output", producer, there)
    before, now = graph_of(Partitioning.HASH, *old, groups[0]), graph_of(Partitioning.HASH, *new, groups[1])
    found = assign_in_flight(stored.channels, msgspec.to_builtins(before), now)
    fronts = {
        (key.subtask, channel.producer): elements
        for key, restore in found.items()
        for channel, elements in restored(stored, now, key, restore)
    }
    everything = Counter(number for log in logs.values() for number in numbers(log))
    assert Counter(number for elements in fronts.values() for number in numbers(elements)) == everything
    unchanged = old == new and groups[0] == groups[1]
    for (consumer, producer), elements in fronts.items():
        mine = assign_key_groups(groups[1], new[1], consumer)
        last: dict[tuple[int, int], int] = {}
        for each in elements:
            if not isinstance(each, Batch):
                assert unchanged
                continue
            owners = BY_KEY.keys(each, max_parallelism=groups[1], operator="out").key_groups
            assert all(int(group) in mine for group in owners)
            assert each.timestamps is not None
            assert each.timestamps.tolist() == numbers([each])
        for number in numbers(elements):
            origin = next(channel for channel, log in logs.items() if number in numbers(log))
            assert origin[0] % new[0] == producer
            assert last.get(origin, -1) < number
            last[origin] = number
        if unchanged:
            assert elements == logs[producer, consumer]


def test_c17_more_consumers_process_each_record_in_flight_once() -> None:
    """Two consumers become three: the records of an old one are offered to each new one that has some of its key groups."""
    name, rows = EdgeName("in", None, "out", 0, 0), [(key, key) for key in range(200)]
    deal = SelectorPartitioner(BY_KEY, parallelism=2, max_parallelism=128, operator="out")
    stored, offered = Stored(), {0: {0, 1}, 1: {1, 2}}
    parts = {consumer: numbers([part]) for consumer, part in deal.split(batch(rows))}
    for consumer, part in deal.split(batch(rows)):
        stored.add(name, "hash", "input", consumer, {1: [part]})
    before, now = graph_of(Partitioning.HASH, 2, 2), graph_of(Partitioning.HASH, 2, 3)
    found = assign_in_flight(stored.channels, msgspec.to_builtins(before), now)
    processed: Counter[int] = Counter()
    for key, restore in found.items():
        whole = {
            number for channel in restore.channels for piece in channel.pieces for number in numbers(stored.of(restore, piece))
        }
        assert whole == {number for old, part in parts.items() if key.subtask in offered[old] for number in part}
        ((_, elements),) = restored(stored, now, key, restore)
        mine = assign_key_groups(128, 3, key.subtask)
        for each in elements:
            assert isinstance(each, Batch)
            assert all(int(group) in mine for group in BY_KEY.keys(each, max_parallelism=128, operator="out").key_groups)
        processed.update(numbers(elements))
    assert processed == Counter(range(200))


def test_a_piece_is_filtered_only_where_others_may_own_its_rows() -> None:
    name = EdgeName("in", None, "out", 0, 0)

    def filtered(old: int, new: int, groups: tuple[int, int] = (128, 128)) -> dict[int, list[tuple[int, bool]]]:
        stored = Stored()
        for consumer in range(old):
            stored.add(name, "hash", "input", consumer, {0: [batch([(consumer, consumer)])]})
        before, now = graph_of(Partitioning.HASH, 1, old, groups[0]), graph_of(Partitioning.HASH, 1, new, groups[1])
        found = assign_in_flight(stored.channels, msgspec.to_builtins(before), now)
        return {
            key.subtask: [(numbers(stored.of(restore, piece))[0], piece.filtered) for piece in restore.channels[0].pieces]
            for key, restore in found.items()
        }

    assert filtered(2, 2) == {0: [(0, False)], 1: [(1, False)]}
    assert filtered(4, 2) == {0: [(0, False), (1, False)], 1: [(2, False), (3, False)]}
    assert filtered(2, 3) == {0: [(0, True)], 1: [(0, True), (1, True)], 2: [(1, True)]}
    assert filtered(3, 1) == {0: [(0, False), (1, False), (2, False)]}
    assert filtered(2, 2, (128, 64)) == {0: [(0, True), (1, True)], 1: [(0, True), (1, True)]}
    assert filtered(2, 1, (128, 64)) == {0: [(0, False), (1, False)]}


def mixed(sizes: tuple[int, int, int]) -> JobGraph:
    """`in` is read by key and in turn by `out`, twice in turn over one input, and by `end` behind it, at one subtask."""
    source = vertex(operator("in", "source"), parallelism=sizes[0])
    target = vertex(operator("out", "co_map"), parallelism=sizes[1])
    end = vertex(operator("end", "map"), parallelism=sizes[2])
    edges = (
        edge_between(source, target, Partitioning.HASH),
        edge_between(source, target, Partitioning.REBALANCE, edge_id=1, input_index=1),
        edge_between(source, target, Partitioning.REBALANCE, edge_id=2, input_index=1),
        edge_between(target, end, Partitioning.GLOBAL, edge_id=3, side_output="late"),
    )
    return JobGraph("job", (source, target, end), edges, JobConfig())


def test_each_edge_is_dealt_out_by_itself() -> None:
    before, now = mixed((2, 2, 2)), mixed((2, 3, 1))
    names = name_edges(before)
    assert list(names.values()) == [
        ("in", None, "out", 0, 0), ("in", None, "out", 1, 0), ("in", None, "out", 1, 1), ("out", "late", "end", 0, 0),
    ]  # fmt: skip
    stored, edges = Stored(), {edge.edge_id: edge for edge in before.edges}
    for number, name in names.items():
        stored.add(name, edges[number].partitioning, "input", 0, {1: [Watermark(5), batch([(3, number)]), WatermarkStatus(True)]})
    found = assign_in_flight(stored.channels, msgspec.to_builtins(before), now)
    out, end = (graph_vertex.vertex_id for graph_vertex in now.vertices[1:])
    assert {
        key: [(each.edge_id, each.producer, each.keeps_events, len(each.pieces)) for each in restore.channels]
        for key, restore in found.items()
    } == {
        SubtaskKey(out, 0): [(0, 1, False, 1), (1, 1, False, 1), (2, 1, False, 1)],
        SubtaskKey(out, 1): [(0, 1, False, 1)],
        SubtaskKey(end, 0): [(3, 1, False, 1)],
    }
    assert [(describe_edge(each.name), each.rows) for each in summarise(stored.channels)] == [
        ("'in' -> 'out'", 1), ("'in' -> 'out' (input 2)", 1), ("'in' -> 'out' (input 2, edge 2)", 1), ("'out' (late) -> 'end'", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("old", list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_mixed_edges_are_dealt_out_at_any_parallelism(old: tuple[int, int]) -> None:
    """FLINK-31963, 38267, 35351: by key, in turn, twice over one input, and a side output to one subtask, in a job. Each row of an
    edge is restored once, by an heir of its consumer, behind those of its channel that were in front of it."""
    before = mixed((old[0], old[1], 3))
    names, edges = name_edges(before), {edge.edge_id: edge for edge in before.edges}
    logs: dict[tuple[int, int, int], list[Element]] = {}
    numbered = itertools.count()
    for edge in before.edges:
        producers, consumers = before.vertex(edge.source).parallelism, before.vertex(edge.target).parallelism
        deal = SelectorPartitioner(BY_KEY, parallelism=consumers, max_parallelism=128, operator="out")
        for producer in range(producers):
            for number in range(6):
                rows = batch([(key * 7 + number, next(numbered)) for key in range(consumers * 2)])
                parts = deal.split(rows) if edge.partitioning is Partitioning.HASH else [(number % consumers, rows)]
                for consumer, part in parts:
                    logs.setdefault((edge.edge_id, producer, consumer), []).append(part)
    stored = Stored()
    for edge_id, name in names.items():
        for side, at in (("input", 2), ("output", 1)):
            for subtask in sorted({channel[at] for channel in logs if channel[0] == edge_id}):
                mine = {channel[3 - at]: log for channel, log in logs.items() if channel[0] == edge_id and channel[at] == subtask}
                halves = {peer: log[: len(log) // 2] if side == "input" else log[len(log) // 2 :] for peer, log in mine.items()}
                stored.add(name, edges[edge_id].partitioning, side, subtask, halves)
    for producers, consumers in itertools.product((1, 2, 3, 4), repeat=2):
        now = mixed((producers, consumers, (producers + consumers) % 3 + 1))
        found = assign_in_flight(stored.channels, msgspec.to_builtins(before), now)
        fronts: dict[tuple[int, int, int], list[int]] = {}
        for key, restore in found.items():
            for channel, elements in restored(stored, now, key, restore):
                fronts[channel.edge_id, channel.producer, key.subtask] = numbers(elements)
        check_fronts(logs, fronts, now)


def check_fronts(
    logs: dict[tuple[int, int, int], list[Element]], fronts: dict[tuple[int, int, int], list[int]], now: JobGraph
) -> None:
    """(edge, producer, consumer) -> what was in flight there, and the numbers of what is restored there."""
    origin = {number: channel for channel, log in logs.items() for number in numbers(log)}
    assert Counter(number for front in fronts.values() for number in front) == Counter(origin.keys())
    edges = {edge.edge_id: edge for edge in now.edges}
    for (edge_id, producer, consumer), front in fronts.items():
        edge = edges[edge_id]
        of_channel: dict[tuple[int, int, int], list[int]] = {}
        for number in front:
            of_channel.setdefault(origin[number], []).append(number)
        for (was_edge, was_producer, was_consumer), its in of_channel.items():
            assert (was_edge, was_producer % now.vertex(edge.source).parallelism) == (edge_id, producer)
            assert its == sorted(its)
            if edge.partitioning is not Partitioning.HASH:
                assert was_consumer % now.vertex(edge.target).parallelism == consumer
                assert its == numbers(logs[was_edge, was_producer, was_consumer])


def test_a_file_is_named_once_and_of_an_inline_part_only_the_own_pieces_travel() -> None:
    name = EdgeName("in", None, "out", 0, 0)
    shared = FileHandle("part-1", 300, "xxh3_128:" + "0" * 32)
    stored = Stored()
    stored.add(name, "rebalance", "output", 0, {to: [batch([(0, to)])] for to in range(4)})
    pieces = tuple(ChannelPiece(to, to * 10, 10, 1) for to in range(4))
    channels = [*stored.channels, ChannelState(*name, "rebalance", "output", 1, 4, shared, pieces)]
    before, now = graph_of(Partitioning.REBALANCE, 2, 4), graph_of(Partitioning.REBALANCE, 2, 2)
    found = assign_in_flight(channels, msgspec.to_builtins(before), now)
    restore = found[SubtaskKey(now.vertices[1].vertex_id, 1)]
    assert restore.parts == (InlineHandle(b"output/0/0/1;"), InlineHandle(b"output/0/0/3;"), shared)
    assert [piece.offset for piece in restore.channels[1].pieces] == [10, 30]
    assert msgspec.json.decode(msgspec.json.encode(restore), type=InFlightRestore) == restore


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (graph_of(Partitioning.REBALANCE, 2, 2), "it was partitioned by hash, and is by rebalance"),
        (graph_of(Partitioning.HASH, 2, 2, key=("n",)), "its key was k (int64), and is n (int64)"),
        (graph_of(Partitioning.HASH, 2, 2, key=None), "its key was k (int64), and is a function (int64)"),
        (
            graph_of(Partitioning.HASH, 2, 2, columns=("k: int64", "m: int64")),
            "its columns are others: without n: int64 and with m: int64",
        ),
        (graph_of(Partitioning.HASH, 2, 2, columns=COLUMNS[::-1]), "its columns are others: in another order"),
        (graph_of(Partitioning.HASH, 2, 2, columns=msgspec.UNSET), "its rows have no declared columns"),
        (graph_of(Partitioning.HASH, 2, 2, side_output="late"), "the job has no such edge"),
        (graph_of(Partitioning.HASH, 2, 2, input_index=1), "the job has no such edge"),
        (msgspec.structs.replace(graph_of(Partitioning.HASH, 2, 2), edges=()), "the job has no such edge"),
    ],
)
def test_records_of_an_edge_that_the_job_has_not_are_refused(now: JobGraph, reason: str) -> None:
    stored, before = Stored(), graph_of(Partitioning.HASH, 2, 2)
    stored.add(EdgeName("in", None, "out", 0, 0), "hash", "input", 1, {0: [batch([(1, 1), (2, 2)])]})
    (error,) = check_in_flight(stored.channels, msgspec.to_builtins(before), now, checkpoint_id=7)
    assert isinstance(error, InFlightStateError)
    assert f"'in' -> 'out' (2 rows, 12 bytes): {reason}." in error.message
    assert "take a savepoint, which holds none, or lose them with without_channel_state=7" in error.message
    assert (error.rows, error.size, error.checkpoint_id) == (2, 12, 7)
    assert [(each["source"], each["target"], each["reason"]) for each in error.edges] == [("in", "out", reason)]
    with pytest.raises(InFlightStateError):
        assign_in_flight(stored.channels, msgspec.to_builtins(before), now)


def test_an_edge_that_is_overtaken_no_more_is_the_same_edge() -> None:
    stored, before = Stored(), graph_of(Partitioning.HASH, 2, 2)
    stored.add(EdgeName("in", None, "out", 0, 0), "hash", "input", 1, {0: [batch([(1, 1)])]})
    now = graph_of(Partitioning.HASH, 2, 2, overtakable=False, edge_id=4)
    assert check_in_flight(stored.channels, msgspec.to_builtins(before), now, checkpoint_id=7) == []
    assert assign_in_flight([], None, now) == {}


@pytest.mark.parametrize(
    ("name", "partitioning", "side", "subtask", "peer", "said"),
    [
        (("in", None, "gone", 0, 0), "hash", "input", 0, 0, "the snapshot's own graph has no such edge"),
        (("in", None, "out", 0, 0), "hash", "input", 3, 0, "the edge had no such channel"),
        (("in", None, "out", 0, 0), "hash", "input", 0, 2, "the edge had no such channel"),
        (("in", None, "out", 0, 0), "hash", "output", 2, 0, "the edge had no such channel"),
        (("in", None, "out", 0, 0), "hash", "output", 0, -1, "the edge had no such channel"),
        (("in", None, "out", 0, 0), "shuffle", "output", 0, 0, "the edge had no such channel"),
    ],
)
def test_channels_that_can_not_have_been_are_damage(
    name: tuple[Any, ...], partitioning: str, side: str, subtask: int, peer: int, said: str
) -> None:
    stored, graph = Stored(), graph_of(Partitioning.HASH, 2, 3)
    stored.add(EdgeName(*name), partitioning, side, subtask, {peer: [batch([(1, 1)])]})
    (error,) = check_in_flight(stored.channels, msgspec.to_builtins(graph), graph, checkpoint_id=7)
    assert isinstance(error, CorruptStateError)
    assert error.message.startswith(f"in-flight records of 'in' -> '{name[2]}', {side} side of subtask {subtask}: ")
    assert error.message.endswith(said)


@pytest.mark.parametrize("stored_graph", [None, {"version": "another"}])
def test_a_snapshot_without_a_graph_does_not_say_what_its_edges_were(stored_graph: dict[str, Any] | None) -> None:
    stored, graph = Stored(), graph_of(Partitioning.HASH, 1, 1)
    stored.add(EdgeName("in", None, "out", 0, 0), "hash", "input", 0, {0: [batch([(1, 1)])]})
    (error,) = check_in_flight(stored.channels, stored_graph, graph, checkpoint_id=7)
    assert "the snapshot does not say what the edge was like" in error.message


def forged(graph: JobGraph) -> Iterator[tuple[str, dict[str, Any]]]:
    """Graphs that a snapshot can't have been taken of, by what is wrong."""
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "an edge from nowhere": ("edges", {"source": "f" * 32}),
        "an edge to nowhere": ("edges", {"target": "f" * 32}),
        "no operators": ("vertices", {"operators": []}),
        "no subtasks": ("vertices", {"parallelism": 0}),
        "more subtasks than key groups": ("vertices", {"parallelism": 129}),
        "more subtasks than any job has": ("vertices", {"parallelism": 10**12, "max_parallelism": 10**12}),
        "no key groups": ("vertices", {"max_parallelism": 0}),
    }
    for what, (field, changed) in changes.items():
        document = msgspec.json.decode(msgspec.json.encode(graph))
        document[field][0].update(changed)
        yield what, document
    document = msgspec.json.decode(msgspec.json.encode(graph))
    yield "an edge twice", {**document, "edges": document["edges"] * 2}
    yield "a vertex twice", {**document, "vertices": document["vertices"] * 2}
    yield "no vertices", {**document, "vertices": []}


def test_a_stored_graph_that_no_job_has_does_not_say_what_its_edges_were() -> None:
    """People write snapshots, too. Such a graph gave errors without a type, or a loop over subtasks without end."""
    stored, graph = Stored(), graph_of(Partitioning.REBALANCE, 1, 1)
    stored.add(EdgeName("in", None, "out", 0, 0), "rebalance", "input", 0, {0: [batch([(1, 1)])]})
    for what, document in forged(graph):
        (error,) = check_in_flight(stored.channels, document, graph, checkpoint_id=7)
        assert "the snapshot does not say what the edge was like" in error.message, what
        with pytest.raises(InFlightStateError):
            assign_in_flight(stored.channels, document, graph)


def test_a_key_function_that_raises_on_a_restored_row_names_operator_edge_and_row() -> None:
    def failing(row: dict[str, int]) -> int:
        return 1 // (row["k"] - 3)

    selector = FunctionKeySelector(failing, KeyType.parse("int64"), declared_type({"k": int, "n": int}, "out"))
    key_filter = KeyGroupFilter(selector, max_parallelism=128, parallelism=2, operator="out", subtask=1, edge="'in' -> 'out'")
    with pytest.raises(UserFunctionError) as caught:
        list(restored_elements([batch([(1, 1), (3, 9)])], keeps_events=False, key_filter=key_filter))
    error = caught.value
    assert error.message.startswith("in-flight records of 'in' -> 'out' can't be dealt out by key: operator 'out', subtask 1: ")
    assert (error.operator, error.subtask, error.edge) == ("out", 1, "'in' -> 'out'")
    assert "'n': 9" in (error.record or "")
