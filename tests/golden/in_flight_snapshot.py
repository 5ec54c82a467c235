"""Writes the golden snapshot with records in flight: `python -m tests.golden.in_flight_snapshot`, once.

Two edges from `in` to `out`, both sides, events between records; one subtask stores files, the others inline parts."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from holdfast.barriers.elements import Batch, Element, Watermark, WatermarkStatus
from holdfast.barriers.exchange.wiring import derive_inputs
from holdfast.barriers.jobgraph import JobGraph, Partitioning
from holdfast.barriers.messages import SubtaskKey
from holdfast.operators.task.inflight import EdgeLog, InFlight, SubtaskEdges
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.handles import ChannelState, OperatorState, OperatorSubtaskState
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.snapshot.metadata import IN_FLIGHT_VERSION, SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent, run_flow
from tests.coordinator.restore.test_in_flight import batch, graph_of

GOLDEN = Path(__file__).parent / "flights" / "v2-inflight"
FOLDER = "chk-7"

Logs = Sequence[tuple[int, int, Sequence[Element]]]
"""(edge, subtask at the other end, elements)."""


def two_edges(producers: int = 2, consumers: int = 2) -> JobGraph:
    graph = graph_of(Partitioning.HASH, producers, consumers)
    late = graph_of(Partitioning.REBALANCE, producers, consumers, side_output="late", input_index=1, edge_id=1)
    return msgspec.structs.replace(graph, edges=(*graph.edges, *late.edges))


def timed(*rows: tuple[int, int]) -> Batch:
    return Batch(columns=batch(list(rows)).columns(), timestamps=np.array([1_000 * number for _, number in rows], np.int64))


STORED: tuple[tuple[str, str, int, int, Logs], ...] = (
    ("out", "input", 0, 0, ((0, 0, (timed((1, 1), (2, 2)), Watermark(1_500), timed((1, 3)))), (0, 1, (timed((3, 4)),)),
                            (1, 1, (batch([(7, 1)]), WatermarkStatus(True))))),
    ("out", "input", 1, 1 << 16, ((0, 0, (Watermark(1_200),)), (0, 1, (timed((4, 5)), batch([(4, 6)]))))),
    ("in", "output", 1, 1 << 16, ((0, 0, (timed((1, 7)),)), (1, 0, (batch([(8, 2), (9, 3)]),)))),
)  # fmt: skip
"""(operator, side, subtask, threshold of inline parts, what is stored)."""


def store(graph: JobGraph, storage: LocalStorage) -> tuple[ChannelState, ...]:
    found: list[ChannelState] = []
    vertices = {vertex.operators[0].uid: vertex.vertex_id for vertex in graph.vertices}
    for uid, side, subtask, threshold, logs in STORED:
        key = SubtaskKey(vertices[uid], subtask)
        flight = InFlight(SubtaskEdges(graph, key), ())
        plan = derive_inputs(graph, key.vertex, subtask)
        indexes = {(each.channel.edge, each.channel.producer): index for index, each in enumerate(plan)}
        inputs = [(indexes[edge, peer], tuple(elements)) for edge, peer, elements in logs] if side == "input" else []
        outputs = [EdgeLog(edge, side, ((peer, tuple(elements)),)) for edge, peer, elements in logs] if side == "output" else []
        flight.take_inputs(inputs)
        flight.take_outputs(outputs)
        found += run_flow(flight.flow(SnapshotTarget(7, FOLDER, f"{uid}-{subtask}-2-4f3a90", False, threshold)), storage)
    return tuple(found)


def shown(elements: Sequence[Element]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for each in elements:
        if isinstance(each, Batch):
            rows = [list(row.values()) for row in each.columns().to_pylist()]
            found.append({"rows": rows, "timestamps": None if each.timestamps is None else each.timestamps.tolist()})
        else:
            found.append({"event": json.loads(msgspec.json.encode(each))})
    return found


def make(root: Path = GOLDEN) -> None:
    """Raises FileExistsError."""
    root.mkdir(parents=True)
    graph = two_edges()
    with tempfile.TemporaryDirectory() as scratch:
        storage = LocalStorage(Path(scratch) / "state")
        channels = store(graph, storage)
        stateless = (OperatorSubtaskState(), OperatorSubtaskState())
        operators = tuple(OperatorState(uid, operator_id(uid), uid, 2, 128, stateless) for uid in ("in", "out"))
        metadata = SnapshotMetadata(
            version=IN_FLIGHT_VERSION, job_id="9f0cde4a7b1e4d0c8a5b6f1e2d3c4b5a", job_name="golden flüge", checkpoint_id=7,
            kind="checkpoint", attempt=2, epoch=3, trigger_timestamp_ms=1_780_000_000_000,
            completion_timestamp_ms=1_780_000_000_250, operators=operators, graph=msgspec.to_builtins(graph), channels=channels,
        )  # fmt: skip
        storage.execute(PutIfAbsent(f"{FOLDER}/_metadata", encode_metadata(metadata)))
        shutil.copytree(Path(scratch) / "state" / FOLDER, root / FOLDER)
    text = json.dumps([[uid, side, subtask, [[edge, peer, shown(elements)] for edge, peer, elements in logs]]
                       for uid, side, subtask, _, logs in STORED], indent=1)  # fmt: skip
    (root / "expected.json").write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    make()
