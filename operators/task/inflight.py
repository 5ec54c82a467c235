"""What one subtask holds of one checkpoint's in-flight data: references while it is collected, then one write.

A channel's in-flight data, in its order, is: (a) of the batch in hand and the element held back, and of its queue, at the
snapshot; (b) what comes in front of its barrier; (c) what its producer had queued when the barrier overtook. The consumer stores
(a) and (b), the producer (c). It decides nothing about barriers: the gate and the output queues say what they overtook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

import msgspec

from holdfast.barriers.alignment.handler import AlignmentMetrics
from holdfast.barriers.alignment.inflight import encode, held_bytes
from holdfast.barriers.elements import Batch, Element
from holdfast.barriers.exchange.wiring import derive_inputs, name_edges
from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import SubtaskKey
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.handles import ChannelPiece, ChannelState
from holdfast.statebackends.snapshot.in_flight import EdgeName
from holdfast.statebackends.snapshot.parts import PartsWriter, WrittenPart
from holdfast.statebackends.storage.port import Flow

FILE_BYTES_MAX = 64 << 20
"""Parts that are smaller share one file; a larger one has its own."""

Elements: TypeAlias = tuple[Element, ...]


class EdgeLog(NamedTuple):
    """Elements of one edge at one end of it: (subtask at the other end, elements in order), of the channels that have any."""

    edge_id: int
    side: str
    """`input` or `output`."""
    channels: tuple[tuple[int, Elements], ...]


class SubtaskEdges:
    """The edges of one subtask as a snapshot knows them."""

    def __init__(self, graph: JobGraph, key: SubtaskKey) -> None:
        self._subtask = key.subtask
        self._names: dict[int, EdgeName] = name_edges(graph)
        self._partitionings = {edge.edge_id: edge.partitioning.value for edge in graph.edges}
        self._channels = [each.channel for each in derive_inputs(graph, key.vertex, key.subtask)]

    def inputs(self, channels: Iterable[tuple[int, Elements]]) -> tuple[EdgeLog, ...]:
        """Elements by index of the channel in the gate -> by edge."""
        found = [(self._channels[index], elements) for index, elements in channels if elements]
        found.sort(key=lambda each: (each[0].edge, each[0].producer))
        return tuple(
            EdgeLog(edge, "input", tuple((channel.producer, elements) for channel, elements in each))
            for edge, each in groupby(found, lambda each: each[0].edge)
        )

    def state(self, log: EdgeLog, part: WrittenPart, pieces: tuple[ChannelPiece, ...]) -> ChannelState:
        """The record of a log that is stored."""
        name = self._names[log.edge_id]
        return ChannelState(
            source=name.source,
            tag=name.tag,
            target=name.target,
            input=name.input,
            ordinal=name.ordinal,
            partitioning=self._partitionings[log.edge_id],
            side="input" if log.side == "input" else "output",
            subtask=self._subtask,
            rows=sum(piece.rows for piece in pieces),
            part=part.handle,
            pieces=pieces,
        )


class InFlight:
    """In-flight data of one checkpoint of one subtask."""

    def __init__(self, edges: SubtaskEdges, held: Sequence[tuple[int, Element]] | None) -> None:
        """`edges`: of the subtask. `held`: what it had in hand, by channel, when the barrier overtook; None: it did not."""
        self._edges = edges
        self._held = held or ()
        self._input_bytes = held_bytes([element for _, element in self._held])
        self._output_bytes = 0
        self._inputs: tuple[EdgeLog, ...] = ()
        self._outputs: tuple[EdgeLog, ...] = ()
        self.awaits_inputs = held is not None
        """Barriers are still to come."""
        self.alignment: AlignmentMetrics | None = None
        """Of a barrier that overtook, once the last one has come."""
        self.awaits_outputs = True
        """The barrier has not left every output."""

    def take_inputs(self, channels: Iterable[tuple[int, Elements]]) -> None:
        """The last barrier has come: what was in front of it in the gate, by index of the channel there."""
        self.awaits_inputs = False
        found: dict[int, list[Element]] = {}
        for channel, element in self._held:
            found.setdefault(channel, []).append(element)
        for channel, elements in channels:
            found.setdefault(channel, []).extend(elements)
        self._inputs = self._edges.inputs((channel, tuple(elements)) for channel, elements in found.items())
        self._input_bytes = _held_bytes_of(self._inputs)

    def take_outputs(self, logs: Iterable[EdgeLog]) -> None:
        """The barrier has left every output queue: (c)."""
        self.awaits_outputs = False
        self._outputs = tuple(logs)
        self._output_bytes = _held_bytes_of(self._outputs)

    @property
    def is_complete(self) -> bool:
        return not self.awaits_inputs and not self.awaits_outputs

    @property
    def size(self) -> int:
        """Bytes that are referred to, events included, without those that the gate still collects."""
        return self._input_bytes + self._output_bytes

    @property
    def is_empty(self) -> bool:
        return not self._inputs and not self._outputs

    def flow(self, target: SnapshotTarget) -> Flow[tuple[ChannelState, ...]]:
        """Pool thread: encode and write all of it, in one file where it is not large."""
        # Beside it the state of the operator merges its tables, with the same target.
        writer = PartsWriter(msgspec.structs.replace(target, pack_threshold=FILE_BYTES_MAX), pack_name="inflight-pack")
        written: list[tuple[EdgeLog, WrittenPart, tuple[ChannelPiece, ...]]] = []
        for log in (*self._inputs, *self._outputs):
            data, pieces = encode_log(log)
            written.append((log, writer.add(data, f"inflight-{len(written)}"), pieces))
        yield from writer.store()
        return tuple(self._edges.state(log, part, pieces) for log, part, pieces in written)


def _held_bytes_of(logs: Iterable[EdgeLog]) -> int:
    return sum(held_bytes(elements) for log in logs for _, elements in log.channels)


def encode_log(log: EdgeLog) -> tuple[bytes, tuple[ChannelPiece, ...]]:
    """The bytes of a part, and the pieces in it. A piece ends where the columns of a channel change."""
    data = bytearray()
    pieces = []
    for peer, elements in log.channels:
        for run in _runs(elements):
            encoded = encode(run)
            rows = sum(element.num_rows for element in run if isinstance(element, Batch))
            pieces.append(ChannelPiece(peer, len(data), len(encoded), rows))
            data += encoded
    return bytes(data), tuple(pieces)


def _runs(elements: Sequence[Element]) -> list[list[Element]]:
    """Runs of one schema, with the events in between."""
    runs: list[list[Element]] = []
    first: Batch | None = None
    for element in elements:
        if isinstance(element, Batch):
            if first is not None and not _alike(first, element):
                runs.append([])
            first = element
        if not runs:
            runs.append([])
        runs[-1].append(element)
    return runs


def _alike(left: Batch, right: Batch) -> bool:
    if (left.timestamps is None) is not (right.timestamps is None):
        return False
    return bool(left.columns().schema.equals(right.columns().schema, check_metadata=True))
