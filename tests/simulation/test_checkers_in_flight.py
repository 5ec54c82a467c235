"""I36: what a snapshot holds in flight is what its attempt restores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast.barriers.alignment.inflight import encode
from holdfast.barriers.elements import Batch, Element, Watermark
from holdfast.barriers.jobgraph import JobConfig, JobEdge, JobGraph, Partitioning
from holdfast.barriers.messages import CheckpointKind, Deploy, Deployment, SubtaskStatus, TaskState
from holdfast.chaos.checkers.in_flight import InFlightChecker
from holdfast.chaos.checkers.ledger import Decided
from holdfast.chaos.checkers.observations import Delivered, InFlightRestored, Reported, Stored, TakenOutOfTurn
from holdfast.statebackends.handles import ChannelPiece, ChannelState, InlineHandle
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.simulation.checker_world import DictView, graph

Rows = list[tuple[int, int]]
IN_FLIGHT: dict[tuple[int, int], Rows] = {(0, 0): [(1, 7), (2, 8)], (1, 0): [(3, 7)]}
"""(producer, consumer) -> rows (i, key)."""


def job(parallelism: int, limit: int = 1 << 28) -> JobGraph:
    source, count = (vertex.vertex_id for vertex in graph().vertices)
    edge = JobEdge(0, source, "source", count, 0, Partitioning.HASH, key=("key",), overtakable=True)
    config = JobConfig(unaligned_checkpoints=True, inflight_bytes_max=limit)
    return msgspec.structs.replace(graph(parallelism), edges=(edge,), config=config)


def stored(channel: tuple[int, int], elements: list[Element]) -> ChannelState:
    data = encode(elements)
    rows = sum(element.num_rows for element in elements if isinstance(element, Batch))
    piece = ChannelPiece(channel[0], 0, len(data), rows)
    return ChannelState("source", None, "count", 0, 0, "hash", "input", channel[1], rows, InlineHandle(data), (piece,))


def batch(rows: Rows) -> Batch:
    columns = pa.RecordBatch.from_pylist([{"i": i, "key": key} for i, key in rows])
    return Batch(columns=columns)


class Checked:
    """A checker that has seen an attempt begin from checkpoint 3 with `IN_FLIGHT`."""

    def __init__(self, parallelism: int = 2, kind: CheckpointKind = CheckpointKind.CHECKPOINT, limit: int = 1 << 28) -> None:
        channels = tuple(stored(channel, [batch(rows), Watermark(5)]) for channel, rows in IN_FLIGHT.items())
        metadata = SnapshotMetadata(
            version=2,
            job_id="5" * 32,
            job_name="job",
            checkpoint_id=3,
            kind="checkpoint",
            attempt=1,
            epoch=1,
            trigger_timestamp_ms=0,
            completion_timestamp_ms=1,
            graph=msgspec.to_builtins(job(2, limit)),
            channels=channels,
        )
        snapshot: Any = SimpleNamespace(checkpoint_id=3, kind=kind, metadata=metadata, view=DictView({}, "/state"), folder="chk-3")
        ledger: Any = SimpleNamespace(completed={3: snapshot}, changes=lambda fact: (Decided(3, None, snapshot),))
        self.found: list[tuple[str, str]] = []
        nothing: Any = None
        self.checker = InFlightChecker(nothing, nothing, lambda invariant, text: self.found.append((invariant, text)), ledger)
        self.graph = job(parallelism)
        self.vertex = self.graph.vertices[1].vertex_id
        deployment = Deployment(2, self.graph, (), {}, restored_checkpoint_id=3)
        self.checker.observe(Delivered(0, "worker-0.1", 0, Deploy(deployment)))

    def store(self) -> list[tuple[str, str]]:
        self.checker.observe(Stored(0, "coordinator-1", "/state", PutIfAbsent("x", b""), True, added=("x",)))
        return self.found

    def restore(self, channels: dict[tuple[int, int], Rows], *, events: int = 2) -> list[tuple[str, str]]:
        """All consumers run, with these rows in front of their channels."""
        at = (0, "worker-0.1", 2, self.vertex)
        for place, ((producer, consumer), rows) in enumerate(channels.items()):
            fact = InFlightRestored(*at, consumer, producer, tuple(rows), events if place == 0 else 0)
            self.checker.observe(fact)
        for subtask in range(self.graph.vertices[1].parallelism):
            self.checker.observe(Reported(0, "worker-0.1", 0, SubtaskStatus(2, self.vertex, subtask, TaskState.RUNNING)))
        return self.found


def test_what_was_stored_is_restored() -> None:
    assert Checked().restore(IN_FLIGHT) == []


def test_a_rescaled_edge_drops_its_events_and_deals_rows_out_by_key() -> None:
    assert Checked(parallelism=3).restore({(0, 0): [(1, 7)], (1, 0): [(3, 7)], (0, 2): [(2, 8)]}, events=0) == []


@pytest.mark.parametrize(
    ("channels", "events", "says"),
    [
        ({(0, 0): [(1, 7), (2, 8)]}, 2, "1 rows in flight are not restored"),
        ({**IN_FLIGHT, (0, 1): [(2, 8)]}, 2, "1 that were not, or again"),
        ({(0, 0): [(2, 8), (1, 7)], (1, 0): [(3, 7)]}, 2, "comes behind one that was behind it"),
        ({(0, 0): [(1, 7)], (1, 0): [(2, 8), (3, 7)]}, 2, "on two channels"),
        ({(0, 0): [(1, 7), (2, 8)], (1, 1): [(3, 7)]}, 2, "key (7,) is restored by the subtasks 0 and 1"),
        (IN_FLIGHT, 1, "1 watermarks and statuses are restored, not 2"),
    ],
)
def test_a_restore_that_differs(channels: dict[tuple[int, int], Rows], events: int, says: str) -> None:
    [(invariant, text)] = Checked().restore(channels, events=events)
    assert invariant == "I36"
    assert says in text


def test_new_rows_are_not_read_before_restored_ones() -> None:
    checked = Checked()
    checked.checker.observe(TakenOutOfTurn(0, "worker-0.1", 2, checked.vertex, 0, 1, 3))
    assert [invariant for invariant, _ in checked.found] == ["I36"]


def test_a_savepoint_holds_none() -> None:
    assert Checked().store() == []
    assert Checked(kind=CheckpointKind.SAVEPOINT).store() == [("I36", "savepoint 3 holds records in flight")]


def test_a_subtask_stores_no_more_than_it_may() -> None:
    [(invariant, text)] = Checked(limit=1_071).store()
    assert invariant == "I17"
    assert Checked(limit=1_072).store() == []
    assert "1072 bytes in flight, of 1071" in text
