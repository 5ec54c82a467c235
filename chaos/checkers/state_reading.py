"""The content of a completed snapshot: keyed state as Python values by key, and entries of operator lists.

Whole tables are read with Arrow alone, as any other tool would read this open format. Lists, increments and native files are
decoded by the product's own readers; their expected content is not the product's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from holdfast.api.snapshots.rows import Row, read_rows
from holdfast.chaos.checkers.observations import StoreView
from holdfast.chaos.workloads.scenario import Positions
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    OperatorState,
    SegmentHandle,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.layout import KEY_GROUP, MAP_KEY, NAMESPACE, ORDER, POSITION, TIME, VALUE, part_path
from holdfast.statebackends.snapshot.in_flight import EdgeName, edge_name
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.snapshot.parts import read_metadata
from holdfast.statebackends.snapshot.pieces import EVENT_METADATA
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import DownloadFile, Operation, ReadFile, StatFile, Storage, run_flow

_ROWS_MAX = 1_000_000


class StateDoubledError(Exception):
    """Two subtasks of one snapshot hold state of the same key."""


class StoredChannel(NamedTuple):
    """Rows that a snapshot holds in flight of one channel, at one of its ends."""

    edge: EdgeName
    channel: tuple[int, int]
    """(producer, consumer)."""
    rows: list[Row]
    """In order; a timestamp is the column `_timestamp_ms`."""
    events: int
    """Watermarks and statuses among them."""
    side: str
    """End of the channel that stored them: `input` or `output`."""
    elements: int
    """Batches, and events."""


class ViewStorage:
    """A StoreView as a read-only storage: implements `operations.Storage`.

    Raises NotImplementedError for every other operation, which ends the run: a checker would report any other error as damage."""

    def __init__(self, view: StoreView) -> None:
        self._view = view

    @property
    def root(self) -> str:
        return self._view.root

    def at(self, location: str) -> Storage:
        raise NotImplementedError(f"{location} from a view of {self.root}")

    def execute(self, operation: Operation) -> Any:
        match operation:
            case ReadFile(path=path, offset=offset, length=length):
                content = self._content(path)
                return content[offset:] if length is None else content[offset : offset + length]
            case StatFile(path=path):
                return self._view.size(path)
            case DownloadFile(path=path, local_path=local_path):
                content = self._content(path)
                with open(local_path, "wb") as file:
                    file.write(content)
                return len(content), checksum_of(content)
        raise NotImplementedError(f"{type(operation).__name__} on a view")

    def _content(self, path: str) -> bytes:
        content = self._view.peek(path)
        if content is None:
            raise ObjectMissingError(f"{path} is missing", path=path)
        return content


class SnapshotView:
    """One completed snapshot. Raises CorruptStateError for a missing or damaged part."""

    def __init__(self, view: StoreView, folder: str, metadata: SnapshotMetadata | None = None) -> None:
        """`folder`: relative to the root of the view."""
        self._storage = ViewStorage(view)
        self._folder = folder
        self.metadata = run_flow(read_metadata(folder), self._storage) if metadata is None else metadata
        self._operators = {operator.uid: operator for operator in self.metadata.operators}

    def keyed_state(self, uid: str, states: Iterable[str] | None = None) -> dict[str, dict[Any, Any]]:
        """state -> key -> value of one operator, keys as in `scenario.CutStates`; empty if the snapshot lacks the operator.

        `states`: only these. Raises StateDoubledError."""
        operator = self._operators.get(uid)
        if operator is None:
            return {}
        metas = {meta.name: meta for subtask in operator.subtasks for keyed in subtask.keyed for meta in keyed.states}
        wanted = metas if states is None else [state for state in states if state in metas]
        return {name: self._state(operator, metas[name]) for name in wanted}

    def _state(self, operator: OperatorState, meta: StateMeta) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for row in self._rows(operator, meta):
            key, value = _entry(row, meta.kind)
            if meta.kind == "list":
                found.setdefault(key, []).append(value)
            elif key in found:
                raise StateDoubledError(f"operator {operator.uid}: state {meta.name} has {key!r} twice")
            else:
                found[key] = value
        return found

    def _rows(self, operator: OperatorState, meta: StateMeta) -> Iterable[Row]:
        pieces = [keyed for subtask in operator.subtasks for keyed in subtask.keyed]
        if meta.kind == "list" or not all(_is_whole(keyed) for keyed in pieces):
            return read_rows(operator, meta.name, self._storage, self._folder, limit=_ROWS_MAX)
        return self._rows_of_tables(operator.uid, pieces, meta.name)

    def _rows_of_tables(self, uid: str, pieces: list[KeyedStateHandle], name: str) -> Iterator[Row]:
        for keyed in pieces:
            for state, part in zip(keyed.states, keyed.parts, strict=True):
                if state.name != name:
                    continue
                data = part.data if isinstance(part, InlineHandle) else self._content(uid, part)
                try:
                    rows: list[Row] = pa.ipc.open_file(data).read_all().to_pylist()
                except (pa.ArrowException, OSError) as error:
                    raise CorruptStateError(f"operator {uid}: state {name} is no Arrow file: {error}", operator=uid) from error
                yield from rows

    def _content(self, uid: str, part: StateHandle) -> bytes:
        assert isinstance(part, FileHandle)
        path = part_path(self._folder, part.path, operator=uid)
        content: bytes = self._storage.execute(ReadFile(path))
        if checksum_of(content) != part.checksum:  # Arrow itself does not survive all damage
            raise CorruptStateError(f"operator {uid}: {path} is not what was stored", path=path, operator=uid)
        return content

    def list_entries(self, uid: str, state: str) -> list[list[bytes]]:
        """Entries of an operator's list state, by subtask; empty if the snapshot lacks the operator."""
        operator = self._operators.get(uid)
        if operator is None:
            return []
        return [
            [
                entry
                for listed in subtask.operator
                if listed.state.name == state
                for entry in run_flow(read_entries(listed, self._folder, operator=uid), self._storage)
            ]
            for subtask in operator.subtasks
        ]

    def in_flight(self) -> list[StoredChannel]:
        """All that is in flight, of each channel in its order: what its consumer stored before what its producer did."""
        found: list[StoredChannel] = []
        for state in sorted(self.metadata.in_flight, key=lambda each: each.side):
            part = state.part
            data = part.data if isinstance(part, InlineHandle) else self._piece_of_file(state.target, part)
            for piece in state.pieces:
                ends = (piece.peer, state.subtask) if state.side == "input" else (state.subtask, piece.peer)
                try:
                    rows, events, elements = _read_stream(data[piece.offset : piece.offset + piece.length])
                except (pa.ArrowException, OSError) as error:
                    raise CorruptStateError(f"in flight to {state.target}: {error}", operator=state.target) from error
                found.append(StoredChannel(edge_name(state), ends, rows, events, state.side, elements))
        return found

    def _piece_of_file(self, uid: str, part: StateHandle) -> bytes:
        assert isinstance(part, FileHandle | SegmentHandle)
        content: bytes = self._storage.execute(ReadFile(part_path(self._folder, part.path, operator=uid)))
        return content[part.offset : part.offset + part.length]

    def positions(self, source_uids: Iterable[str]) -> Positions:
        """Entries of these sources, over all subtasks."""
        return {uid: [entry for subtask in self.list_entries(uid, "positions") for entry in subtask] for uid in source_uids}


def _read_stream(data: bytes) -> tuple[list[Row], int, int]:
    """Rows, the number of batches that stand for an event, and that of all batches."""
    rows: list[Row] = []
    events = elements = 0
    reader = pa.ipc.open_stream(data)
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return rows, events, elements
        elements += 1
        rows += batch.to_pylist()
        events += metadata is not None and EVENT_METADATA in metadata


def _is_whole(keyed: KeyedStateHandle) -> bool:
    """Whether each state is one Arrow file of its own, or inline."""
    parts = all(type(part) in (InlineHandle, FileHandle) for part in keyed.parts)
    return keyed.format == "arrow" and parts and len({state.name for state in keyed.states}) == len(keyed.parts)


def _entry(row: Row, kind: str) -> tuple[Any, Any]:
    """Key and value of one row of a state's table."""
    rest = {name: value for name, value in row.items() if name not in (KEY_GROUP, NAMESPACE, MAP_KEY, POSITION, VALUE)}
    fields = [name for name in rest if name == "key" or name.startswith("key_")]
    key = rest["key"] if fields == ["key"] else tuple(rest[name] for name in fields)
    match kind:
        case "map":
            return (key, row[MAP_KEY]), row[VALUE]
        case "columnar":
            return (key, row[NAMESPACE]), {name: value for name, value in rest.items() if name not in fields}
        case "timers":
            namespace = row.get(NAMESPACE)  # of a window: two of one key may be due at one time
            return ((key, row[TIME], namespace) if namespace else (key, row[TIME])), None
        case "row_table":
            ours = (*fields, KEY_GROUP, NAMESPACE, ORDER)
            return (key, row[NAMESPACE], row[ORDER]), {name: value for name, value in row.items() if name not in ours}
        case _:
            return key, row[VALUE]
