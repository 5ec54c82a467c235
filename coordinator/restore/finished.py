"""CORE: finds what had finished in front of a snapshot. Pure.

A task has finished when its input had ended in front of the cut: all that it emits is in front of it, too. Its state stays, and is
restored as any other; only its timers must not fire again (docs/order.md, ADR 74)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import SubtaskKey
from holdfast.statebackends.snapshot.metadata import FINISHED_PROPERTY, SnapshotMetadata

_ENTRY = re.compile(r"([^,]+):([0-9]{1,5})")


def encode_finished(tasks: Iterable[SubtaskKey]) -> str:
    """The property of `_metadata`: `vertex:subtask,...`."""
    return ",".join(f"{task.vertex}:{task.subtask}" for task in sorted(tasks))


def decode_finished(text: str) -> frozenset[SubtaskKey]:
    """The tasks that a property names. What has another form names none: people write properties, too."""
    entries = (_ENTRY.fullmatch(entry) for entry in text.split(","))
    return frozenset(SubtaskKey(entry[1], int(entry[2])) for entry in entries if entry is not None)


def find_finished(metadata: SnapshotMetadata, graph: JobGraph) -> frozenset[str]:
    """Vertices of a job's graph that begin as finished: all of their subtasks had, and so had all vertices in front of them.

    One that a new source feeds goes on, with its timers: a live run may follow a backfill."""
    tasks = decode_finished(metadata.properties.get(FINISHED_PROPERTY, ""))
    parallelism = {operator.operator_id: operator.parallelism for operator in metadata.operators}
    found: set[str] = set()
    for vertex in graph.vertices:  # those in front of a vertex come first
        name = vertex.vertex_id
        subtasks = range(parallelism.get(name, 0))
        ended = bool(subtasks) and all(SubtaskKey(name, subtask) in tasks for subtask in subtasks)
        if ended and all(edge.source in found for edge in graph.inputs(name)):
            found.add(name)
    return frozenset(found)
