"""Restore of in-flight data: from a deployment's handles to the elements that stand in front of a subtask's channels.

`load` blocks and runs on the pool. Who gets what was decided by the coordinator; here pieces are read and decoded, and rows of
others left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.barriers.alignment.inflight import decode
from holdfast.barriers.elements import Batch, Element
from holdfast.barriers.exchange.partition import ROWS_METADATA, KeySelector
from holdfast.barriers.exchange.restored import KeyGroupFilter, restored_elements
from holdfast.barriers.exchange.wiring import derive_inputs
from holdfast.barriers.jobgraph import JobEdge, JobGraph
from holdfast.barriers.messages import Deployment, InFlightRestore, RestoredChannel, RestoredPiece, SubtaskDeployment
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.layout import part_path
from holdfast.statebackends.local_recovery.copies import LocalCopies
from holdfast.statebackends.local_recovery.storage import RecoveringStorage, RestoredBytes
from holdfast.statebackends.snapshot.parts import read_parts
from holdfast.statebackends.storage import resolve_folder
from holdfast.statebackends.storage.port import Storage, run_flow


class ChannelLoader:
    """Reads what one subtask restores of its input channels. `selectors`: of its vertex, by input."""

    def __init__(self, wanted: SubtaskDeployment, deployment: Deployment, selectors: Mapping[int, KeySelector]) -> None:
        self._restore: InFlightRestore = wanted.in_flight
        self._folder = deployment.restored_folder
        self._graph: JobGraph = deployment.graph
        self._subtask = wanted.subtask
        self._vertex = deployment.graph.vertex(wanted.vertex)
        self._selectors = selectors
        plan = derive_inputs(deployment.graph, wanted.vertex, wanted.subtask)
        self._indexes = {(each.channel.edge, each.channel.producer): index for index, each in enumerate(plan)}

    def load(
        self, storage: Storage, restored: RestoredBytes, copies: LocalCopies | None, keep_for: int | None
    ) -> list[tuple[int, list[Element]]]:
        """Pool thread: (channel of the gate, what stands in front of it). `restored`, `copies`, `keep_for`: as of StateLoader.

        Raises CorruptStateError, and the errors of key functions, which name operator and edge."""
        if not self._restore.channels:
            return []
        uid = self._vertex.operators[0].uid
        storage, folder = resolve_folder(self._folder, storage)
        files = [part for part in self._restore.parts if isinstance(part, FileHandle)]
        wanted = {(part_path(folder, part.path, operator=uid), part.offset): part for part in files}
        if wanted:
            storage = RecoveringStorage(storage, wanted, restored, copies, keep_for=keep_for)
        parts = run_flow(read_parts(self._restore.parts, folder, operator=uid), storage)
        return [self._channel(channel, parts) for channel in self._restore.channels]

    def _channel(self, channel: RestoredChannel, parts: Sequence[bytes]) -> tuple[int, list[Element]]:
        edge = next(each for each in self._graph.edges if each.edge_id == channel.edge_id)
        index = self._indexes[(channel.edge_id, channel.producer)]
        elements: list[Element] = []
        for piece in channel.pieces:
            key_filter = self._filter(edge) if piece.filtered else None
            decoded = self._decoded(edge, piece, parts[piece.part])
            elements += restored_elements(decoded, keeps_events=channel.keeps_events, key_filter=key_filter)
        return index, elements

    def _decoded(self, edge: JobEdge, piece: RestoredPiece, part: bytes) -> list[Element]:
        stop = piece.offset + piece.length
        try:
            if not 0 <= piece.offset <= stop <= len(part):
                raise CorruptStateError(f"bytes {piece.offset}..{stop} of a part of {len(part)}")
            elements = decode(memoryview(part)[piece.offset : stop], rows=piece.rows)
            _check_columns(edge, elements)
            return elements
        except CorruptStateError as error:
            uid = self._vertex.operators[0].uid
            message = f"in-flight records of {self._named(edge)}, subtask {self._subtask}, can't be read: {error.message}"
            raise CorruptStateError(message, operator=uid, subtask=self._subtask) from error

    def _filter(self, edge: JobEdge) -> KeyGroupFilter:
        vertex = self._vertex
        return KeyGroupFilter(
            self._selectors[edge.input_index],
            max_parallelism=vertex.max_parallelism,
            parallelism=vertex.parallelism,
            operator=vertex.operators[0].uid,
            subtask=self._subtask,
            edge=self._named(edge),
        )

    def _named(self, edge: JobEdge) -> str:
        return f"{edge.source_operator!r} -> {self._vertex.operators[0].uid!r}"


def _check_columns(edge: JobEdge, elements: Sequence[Element]) -> None:
    """Raises CorruptStateError unless the records have the columns that the edge names; they may have others, too. An operator that
    misses one would fail in the middle of its work, as if its function were wrong."""
    first = next((element for element in elements if isinstance(element, Batch)), None)
    if first is None or edge.columns is msgspec.UNSET:
        return
    schema = first.columns().schema  # one for all of a piece
    if schema.metadata is not None and ROWS_METADATA in schema.metadata:
        return
    missing = [column for column in edge.columns if not any(column.startswith(f"{name}: ") for name in schema.names)]
    if missing:
        raise CorruptStateError(f"records with the columns {', '.join(schema.names)}, without {', '.join(missing)}")
