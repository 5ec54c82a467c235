"""In-flight data that a task can't have had declines the checkpoint; what it can have had becomes part of the snapshot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, Partitioning
from holdfast.barriers.messages import AcknowledgeCheckpoint, SubtaskKey
from holdfast.coordinator.checkpoints.acknowledgements import AcknowledgementValidator
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint
from holdfast.coordinator.ha.shared_state import SharedStateRegistry
from holdfast.statebackends.handles import ChannelPiece, ChannelState, FileHandle, InlineHandle, OperatorSubtaskState, SegmentHandle
from holdfast.statebackends.layout import exclusive_prefix
from tests.coordinator.doubles import operator, vertex

CHECKSUM = "xxh3_128:" + "0" * 32


def graph_of(*, overtakable: bool = True) -> JobGraph:
    source = msgspec.structs.replace(vertex(operator("source", "source")), parallelism=3)
    count = msgspec.structs.replace(vertex(operator("count", "process")), parallelism=2)
    edge = JobEdge(0, source.vertex_id, "source", count.vertex_id, 0, Partitioning.REBALANCE, overtakable=overtakable)
    return JobGraph("words", (source, count), (edge,), JobConfig(inline_threshold=100))


def channel(**changes: Any) -> ChannelState:
    pieces = (ChannelPiece(0, 0, 30, 2), ChannelPiece(2, 30, 20, 1))
    part = InlineHandle(bytes(50))
    known = ChannelState("source", None, "count", 0, 0, "rebalance", "input", 1, 3, part, pieces)
    return msgspec.structs.replace(known, **changes)


def problem(*found: ChannelState, vertex_index: int = 1, unaligned: bool = True, overtakable: bool = True) -> str | None:
    graph = graph_of(overtakable=overtakable)
    vertex = graph.vertices[vertex_index]
    task = SubtaskKey(vertex.vertex_id, 1)
    request = CheckpointRequest(periodic=True)
    pending = PendingCheckpoint(
        7, request, attempt=1, folder="job/chk-7", tasks=frozenset({task}), finished=(), started_ms=0, deadline_ms=9
    )
    pending.trigger(1, unaligned=unaligned, aligned_timeout_ms=0 if unaligned else None)
    states = {vertex.operators[0].uid: OperatorSubtaskState()}
    ack = AcknowledgeCheckpoint(1, 7, task.vertex, task.subtask, states, channels=found)
    return AcknowledgementValidator(graph, SharedStateRegistry()).problem(ack, pending)


def own_file(name: str = "inflight-0", uid: str = "count", subtask: int = 1) -> FileHandle:
    return FileHandle(f"{exclusive_prefix(uid, subtask, 1)}n0-{name}", 50, CHECKSUM)


@pytest.mark.parametrize(
    "found",
    [
        channel(),
        channel(part=own_file()),
        channel(part=SegmentHandle(own_file().path, 50, CHECKSUM, 100, 4_000)),
    ],
)
def test_what_is_at_its_own_end_of_an_edge_is_taken(found: ChannelState) -> None:
    assert problem(found) is None


def test_a_producer_has_what_its_barrier_overtook_in_its_queues() -> None:
    queued = channel(side="output", pieces=(ChannelPiece(0, 0, 30, 2), ChannelPiece(1, 30, 20, 1)))
    assert problem(queued, vertex_index=0) is None
    assert "on its output side" in str(problem(queued))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": "other"}, "no edge of the task"),
        ({"ordinal": 1}, "no edge of the task"),
        ({"tag": "late"}, "no edge of the task"),
        ({"partitioning": "hash"}, "no edge of the task"),
        ({"side": "output"}, "no edge of the task"),
        ({"subtask": 0}, "of subtask 0"),
        ({"pieces": (ChannelPiece(3, 0, 50, 3),)}, "a channel to subtask 3, which is none"),
        ({"pieces": (ChannelPiece(-1, 0, 50, 3),)}, "a channel to subtask -1, which is none"),
        ({"pieces": (ChannelPiece(0, 1, 49, 3),)}, "a piece of 49 bytes and 3 rows at 1, where 0 is next"),
        ({"pieces": (ChannelPiece(0, 0, 0, 0), ChannelPiece(0, 0, 50, 3))}, "a piece of 0 bytes"),
        ({"pieces": (ChannelPiece(0, 0, 60, 3),)}, "pieces of 60 bytes in a part of 50"),
        ({"pieces": (ChannelPiece(0, 0, 40, 3),)}, "pieces of 40 bytes in a part of 50"),
        ({"pieces": (ChannelPiece(0, 0, 50, -3),)}, "-3 rows at 0"),
        ({"rows": 4}, "4 rows, and 3 in its pieces"),
        ({"pieces": (ChannelPiece(0, 0, 50, 1 << 41),), "rows": 1 << 41}, "a piece of 50 bytes and 2199023255552 rows"),
        ({"pieces": (ChannelPiece(0, 0, 50, 10**4000),), "rows": 10**4000}, "a piece of 50 bytes and 1000"),
        ({"pieces": tuple(ChannelPiece(0, 25 * n, 25, 1 << 40) for n in (0, 1)), "rows": 1 << 41}, "2199023255552 rows, which no"),
        ({"pieces": (ChannelPiece(0, 0, 2**63, 3),)}, "pieces of 9223372036854775808 bytes in a part of 50"),
        ({"pieces": ()}, "pieces of 0 bytes"),
        ({"part": own_file(uid="source")}, "not the name of a file that this task writes"),
        ({"part": own_file(subtask=0)}, "not the name of a file that this task writes"),
        ({"part": FileHandle("../shared/a", 50, CHECKSUM)}, "which is not done here"),
        ({"part": InlineHandle(bytes(100)), "pieces": (ChannelPiece(0, 0, 100, 3),)}, "such parts have fewer than 100"),
    ],
)
def test_what_a_task_can_not_have_in_flight_is_named(changes: dict[str, Any], said: str) -> None:
    assert said in str(problem(channel(**changes)))


def test_nothing_is_in_flight_where_nothing_is_overtaken() -> None:
    assert "overtake nothing" in str(problem(channel(), unaligned=False))
    assert "no edge of the task" in str(problem(channel(), overtakable=False))


def test_one_end_of_an_edge_is_told_of_once() -> None:
    """Told of twice, its rows would be restored twice."""
    assert "twice" in str(problem(channel(), channel()))
