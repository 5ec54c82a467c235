"""Contents of a snapshot, for tools: its location, its operators and states, and the parts of each state.

Only `_metadata` is read here. It may be forged, since anyone can write one with a right checksum; so it is checked that its records
fit together, and that no path leaves the snapshot. Bytes of parts are for reading.py, rows for rows.py."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from holdfast.statebackends.errors import CorruptStateError, InFlightStateError, InvalidConfigError, NotFoundError
from holdfast.statebackends.handles import (
    CHECKPOINT_ID_MAX,
    DELTA_FORMATS,
    NATIVE_FORMAT,
    TABLE_FORMATS,
    ChannelState,
    InlineHandle,
    KeyedStateHandle,
    OperatorListHandle,
    OperatorState,
    SegmentHandle,
    StateHandle,
    StateMeta,
)
from holdfast.statebackends.keygroups import MAX_PARALLELISM_LIMIT
from holdfast.statebackends.layout import CHECKPOINT_PREFIX, METADATA_NAME, is_file_name, metadata_path, part_path
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import COLUMNAR_KIND, ROW_TABLE_KIND, TIMERS_KIND
from holdfast.statebackends.snapshot.deltas import DELTAS_MAX, StatePart, state_parts
from holdfast.statebackends.snapshot.in_flight import describe_edge, edge_name, problem_of, storing_uid, summarise
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.snapshot.parts import (
    LINK_DETAIL,
    FileEnds,
    ProblemKind,
    file_handles,
    outside_detail,
    own_names,
    wrong_format,
)
from holdfast.statebackends.state import OPERATOR_KINDS
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.storage.directory import folder_of
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import LINKED, StatFile, Storage

Location = str | os.PathLike[str]
"""A path, or a URL that `open_storage` knows."""


class Place(NamedTuple):
    """A folder in a storage."""

    storage: Storage
    folder: str
    """Relative to the storage's root, never empty."""

    @property
    def location(self) -> str:
        return f"{self.storage.root.rstrip('/')}/{self.folder}"


def place_of(location: Location, *, levels: int = 1) -> Place:
    """The folder at a path or URL, in a storage whose root is `levels` folders above it. Raises InvalidConfigError."""
    text = absolute_location(location)
    scheme, mark, path = text.rpartition("://")
    segments = [segment for segment in path.split("/") if segment]
    if mark:  # the first segment of a URL is its host or bucket
        bucket, *segments = segments or [""]
        root = f"{scheme}://{bucket}"
    else:
        root = ""
    if not segments or ".." in segments:
        raise InvalidConfigError(f"{os.fspath(location)!r} is not the folder of a snapshot", path=os.fspath(location))
    above = segments[:-levels]
    return Place(open_storage("/".join([root, *above]) or "/"), "/".join(segments[len(above) :]))


def absolute_location(location: Location) -> str:
    """An absolute path, or a URL; a file:// URL becomes a path."""
    text = os.fspath(location)
    if "://" in text and not text.startswith("file://"):
        return text
    text = folder_of(text)
    return os.path.normpath(Path(os.path.expanduser(text)).absolute())  # Path.expanduser raises for an unknown user


def place_of_snapshot(location: Location) -> Place:
    """Place of a snapshot, given by its folder or its `_metadata`. Raises InvalidConfigError.

    The root of a checkpoint's storage is its state directory, since it shares files with others of its job."""
    text = absolute_location(location)
    text = text if text.endswith("://") else text.rstrip("/") or "/"
    if text.rpartition("/")[2] == METADATA_NAME:
        text = text.rpartition("/")[0] or "/"
    return place_of(text, levels=2 if text.rpartition("/")[2].startswith(CHECKPOINT_PREFIX) else 1)


KEYED_KINDS = frozenset({"value", "list", "map", "reducing", "aggregating", COLUMNAR_KIND, ROW_TABLE_KIND, TIMERS_KIND})
"""Kinds of keyed state in version 1. Another kind is of a newer version, and refused: it would be misread as one of these."""


@dataclass(frozen=True, slots=True)
class ListPart:
    """One operator list state's share of one old subtask."""

    subtask: int
    handle: OperatorListHandle


@dataclass(frozen=True, slots=True)
class StoredState:
    """One state of one operator: keyed parts in key-group order, or list parts in the order of their subtasks."""

    operator: OperatorState
    meta: StateMeta
    keyed: tuple[StatePart, ...]
    lists: tuple[ListPart, ...]

    @property
    def is_keyed(self) -> bool:
        return bool(self.keyed)

    @property
    def format(self) -> str:
        """Format of its parts: `parquet`, `arrow` or `rocksdb`; `list` for operator state."""
        return self.keyed[0].handle.format if self.keyed else "list"

    @property
    def size(self) -> int:
        """Bytes; -1 for native files, which hold all states of their operator."""
        sizes = [part.size for part in self.keyed]
        return -1 if -1 in sizes else sum(sizes) + sum(part.handle.size for part in self.lists)

    @property
    def entries(self) -> int:
        """Entries of operator state; -1 for keyed state, whose rows are counted only by reading them."""
        return -1 if self.keyed else sum(part.handle.count for part in self.lists)

    def key_type(self) -> KeyType:
        """Raises CorruptStateError."""
        if self.meta.key_type is None:
            raise self.corrupt("keyed state without a key type")
        try:
            return KeyType.parse(self.meta.key_type)
        except InvalidConfigError as error:
            raise self.corrupt(f"key type: {error}") from error

    def corrupt(self, reason: str, path: str | None = None) -> CorruptStateError:
        """The error for damage of this state, in the file `path` if given."""
        where = f"{path}: " if path else ""
        uid = self.operator.uid
        return CorruptStateError(
            f"operator {uid!r}, state {self.meta.name!r}: {where}{reason}",
            path=path,
            operator=uid,
            state=self.meta.name,
            reason="state",
        )


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot's metadata, and the location of its files."""

    metadata: SnapshotMetadata
    storage: Storage
    folder: str
    """Relative to the storage's root; of a checkpoint the root is the state directory, below which shared files lie."""

    @property
    def location(self) -> str:
        return posixpath.join(self.storage.root, self.folder)

    @property
    def metadata_path(self) -> str:
        return metadata_path(self.folder)

    @property
    def is_self_contained(self) -> bool:
        """Whether all its files lie in its folder; a checkpoint may share files beside it."""
        return self.metadata.kind != "checkpoint"

    def path_of(self, path: str, *, operator: str | None = None) -> str:
        """Storage path of a file that a handle names. Raises CorruptStateError if the snapshot may not name it."""
        joined = part_path(self.folder, path, operator=operator)
        if self.is_self_contained and not joined.startswith(f"{self.folder}/"):
            raise CorruptStateError(
                f"{f'operator {operator!r}: ' if operator else ''}{path!r} leaves the folder of the savepoint",
                path=path,
                operator=operator,
                reason=ProblemKind.PATH.value,
            )
        names = own_names(joined, path)
        if names and "://" not in self.storage.root and self.storage.execute(StatFile(joined, names)) == LINKED:
            raise CorruptStateError(
                f"{f'operator {operator!r}: ' if operator else ''}{joined}: {LINK_DETAIL}",
                path=joined,
                operator=operator,
                reason=ProblemKind.PATH.value,
            )
        return joined

    def reader(self) -> PartReader:
        """A reader of the snapshot's parts, for one thread and a `with` block."""
        return PartReader(self.storage, self.path_of)

    def operator(self, uid: str) -> OperatorState:
        """One operator. Raises NotFoundError naming the operators of the snapshot."""
        operators = {operator.uid: operator for operator in self.metadata.operators}
        if uid not in operators:
            known = ", ".join(sorted(operators)) or "none"
            raise NotFoundError(f"the snapshot has no operator {uid!r}; it has: {known}", operator=uid)
        return operators[uid]

    def state(self, uid: str, name: str) -> StoredState:
        """One state of an operator. Raises NotFoundError naming the states of the operator."""
        states = states_of(self.operator(uid))
        if name not in states:
            known = ", ".join(states) or "none"
            raise NotFoundError(f"operator {uid!r} has no state {name!r}; it has: {known}", operator=uid, state=name)
        return states[name]

    def states(self, uid: str | None = None, name: str | None = None) -> Iterator[StoredState]:
        """All states, those of one operator, or one; operators in their order, states by name.

        Raises NotFoundError; InvalidConfigError for a name without an operator."""
        if name is not None and uid is None:
            raise InvalidConfigError(f"state {name!r} of which operator?", state=name)
        if uid is not None and name is not None:
            yield self.state(uid, name)
            return
        for operator in self.metadata.operators if uid is None else (self.operator(uid),):
            yield from states_of(operator).values()


def states_of(operator: OperatorState) -> dict[str, StoredState]:
    """The states of an operator, sorted by name. Raises CorruptStateError for a delta without its table."""
    keyed: dict[str, list[StatePart]] = {}
    lists: dict[str, list[ListPart]] = {}
    metas: dict[str, StateMeta] = {}
    for subtask, state in enumerate(operator.subtasks):
        for part in state_parts(state.keyed, operator=operator.uid, subtask=subtask):
            metas.setdefault(part.meta.name, part.meta)
            keyed.setdefault(part.meta.name, []).append(part)
        for listed in state.operator:
            metas.setdefault(listed.state.name, listed.state)
            lists.setdefault(listed.state.name, []).append(ListPart(subtask, listed))
    return {
        name: StoredState(
            operator,
            metas[name],
            tuple(sorted(keyed.get(name, ()), key=lambda part: part.key_groups)),
            tuple(lists.get(name, ())),
        )
        for name in sorted(metas)
    }


def check_contents(snapshot: StoredSnapshot) -> None:
    """Raises CorruptStateError for a `_metadata` whose records don't fit together, though its checksum is right."""
    check_described(snapshot.metadata, snapshot.metadata_path)
    if snapshot.is_self_contained:
        snapshot.path_of(METADATA_NAME)


def check_described(metadata: SnapshotMetadata, path: str) -> None:
    """`check_contents` of the records alone; `path` names the `_metadata` in errors. Raises CorruptStateError."""
    if not 1 <= metadata.checkpoint_id <= CHECKPOINT_ID_MAX:
        # A job that starts from the snapshot takes the ids behind it, and file names must hold them.
        reason = f"checkpoint id {metadata.checkpoint_id} is not in 1..{CHECKPOINT_ID_MAX}"
        raise CorruptStateError(f"{path}: {reason}", path=path, operator=None, reason="contents")
    for operator in metadata.operators:
        if not 1 <= operator.parallelism <= operator.max_parallelism <= MAX_PARALLELISM_LIMIT:
            raise _refused(path, operator, f"parallelism {operator.parallelism} of {operator.max_parallelism}")
        for subtask, state in enumerate(operator.subtasks):
            for handle in state.keyed:
                wrong = _wrong_with(handle, operator.max_parallelism)
                if wrong:
                    raise _refused(path, operator, f"subtask {subtask}: {wrong}")
            for part in file_handles(state):
                if isinstance(part, SegmentHandle) and not part.is_inside:
                    raise _refused(path, operator, f"subtask {subtask}: {part.path}: {outside_detail(part)}")
                if part.length < 0:
                    raise _refused(path, operator, f"subtask {subtask}: {part.path} of {part.length} bytes")
        for stored in states_of(operator).values():
            _check_state(path, stored)
    for channel in metadata.in_flight:
        unfit = _wrong_in_flight(channel)
        if unfit is not None:
            uid, edge = storing_uid(channel), describe_edge(edge_name(channel))
            reason = f"in-flight records of {edge}, {channel.side} side of subtask {channel.subtask}: {unfit}"
            raise CorruptStateError(f"{path}: {reason}", path=path, operator=uid, reason="contents")


def _wrong_in_flight(channel: ChannelState) -> str | None:
    part = channel.part
    if isinstance(part, SegmentHandle) and not part.is_inside:
        return f"{part.path}: {outside_detail(part)}"
    return problem_of(channel)


FLIGHTS_SHOWN_MAX = 8
"""Edges that a refusal lists; the error's fields have all."""


def refuse_in_flight(snapshot: StoredSnapshot) -> None:
    """Raise InFlightStateError for a snapshot with in-flight records: they fit the state as it is, and not an edited one."""
    flights = summarise(snapshot.metadata.in_flight)
    if not flights:
        return
    rows, size = sum(each.rows for each in flights), sum(each.size for each in flights)
    more = f" and {len(flights) - FLIGHTS_SHOWN_MAX} more" if len(flights) > FLIGHTS_SHOWN_MAX else ""
    shown = ", ".join(map(str, flights[:FLIGHTS_SHOWN_MAX]))
    reason = "records in flight fit the state that they were stored with"
    raise InFlightStateError(
        f"{snapshot.location} holds {rows} rows ({size} bytes) in flight on {shown}{more}, and can't be edited: {reason}. Start "
        "the job from it, take a savepoint, which holds none, and edit that",
        edges=[{**each.name._asdict(), "rows": each.rows, "size": each.size, "reason": reason} for each in flights],
        rows=rows,
        size=size,
        checkpoint_id=snapshot.metadata.checkpoint_id,
    )


def _wrong_with(handle: KeyedStateHandle, max_parallelism: int) -> str:
    groups = handle.key_groups
    if not 0 <= groups.start <= groups.stop <= max_parallelism:
        return f"key groups [{groups.start}, {groups.stop}) of {max_parallelism}"
    if handle.format not in (NATIVE_FORMAT, *DELTA_FORMATS, *TABLE_FORMATS):
        return f"unknown format {handle.format!r}"
    if handle.format in DELTA_FORMATS and any(handle.states.count(meta) > DELTAS_MAX for meta in handle.states):
        return f"more than {DELTAS_MAX} deltas on one table"
    if handle.format != NATIVE_FORMAT:
        if len(handle.parts) != len(handle.states):
            return f"{len(handle.parts)} parts of {len(handle.states)} states"
        return next(filter(None, (_wrong_inline(part, handle.format) for part in handle.parts)), "")
    if len(handle.parts) != len(handle.names):
        return f"{len(handle.parts)} parts with {len(handle.names)} names"
    for name in handle.names:
        if not is_file_name(name):
            return f"{name[:100]!r} is not the name of a file"
    return "" if len(set(handle.names)) == len(handle.names) else "two files of one name"


def _wrong_inline(part: StateHandle, table_format: str) -> str:
    """Why an inline part is not a table of the format; "" if it may be one. Files are checked together with their checksums."""
    if not isinstance(part, InlineHandle):
        return ""
    ends = FileEnds()
    ends.add(part.data)
    return wrong_format(table_format, ends)


def _check_state(path: str, stored: StoredState) -> None:
    name = stored.meta.name
    if stored.keyed and stored.lists:
        raise _refused(path, stored.operator, f"state {name!r} is keyed state and operator state at once")
    kinds = KEYED_KINDS if stored.keyed else OPERATOR_KINDS
    if stored.meta.kind not in kinds:
        raise _refused(path, stored.operator, f"state {name!r} is of the unknown kind {stored.meta.kind!r}")
    metas = {part.meta for part in stored.keyed} | {part.handle.state for part in stored.lists}
    if len(metas) > 1:
        raise _refused(path, stored.operator, f"subtasks differ in what state {name!r} is")
    stop = 0
    for part in stored.keyed:
        groups = part.key_groups
        if len(groups) and groups.start < stop:
            raise _refused(path, stored.operator, f"state {name!r} has key group {groups.start} twice")
        stop = max(stop, groups.stop)


def _refused(path: str, operator: OperatorState, reason: str) -> CorruptStateError:
    return CorruptStateError(f"{path}: operator {operator.uid!r}: {reason}", path=path, operator=operator.uid, reason="contents")


SCHEMA = pa.schema(
    [
        pa.field("operator", pa.utf8(), nullable=False),
        pa.field("operator_id", pa.utf8(), nullable=False),
        pa.field("name", pa.utf8(), nullable=False),
        pa.field("parallelism", pa.int32(), nullable=False),
        pa.field("max_parallelism", pa.int32(), nullable=False),
        pa.field("operator_size", pa.int64(), nullable=False),
        pa.field("state", pa.utf8()),
        pa.field("kind", pa.utf8()),
        pa.field("key_type", pa.utf8()),
        pa.field("value_type", pa.utf8()),
        pa.field("format", pa.utf8()),
        pa.field("size", pa.int64()),
        pa.field("entries", pa.int64()),
    ]
)
"""Schema of `metadata_table`. Sizes are bytes. Null: `state` and the columns behind it for an operator without state; `size` of
native files, which hold all states of their operator; `key_type` of operator state; `entries` of keyed state."""


def metadata_table(snapshot: StoredSnapshot) -> pa.Table:
    """Table of a snapshot's states: operators in their order, states by name. Raises CorruptStateError."""
    rows: list[dict[str, Any]] = []
    for operator in snapshot.metadata.operators:
        own = {
            "operator": operator.uid,
            "operator_id": operator.operator_id,
            "name": operator.name,
            "parallelism": operator.parallelism,
            "max_parallelism": operator.max_parallelism,
            "operator_size": operator.size,
        }
        rows += [own | _described(state) for state in states_of(operator).values()] or [own]
    try:
        return pa.Table.from_pylist(rows, SCHEMA)
    except OverflowError as error:
        raise CorruptStateError(
            f"{snapshot.location}: files of more than 2^63 bytes: {error}", path=snapshot.location, reason="contents"
        ) from error


def _described(state: StoredState) -> dict[str, Any]:
    meta = state.meta
    return {
        "state": meta.name,
        "kind": meta.kind,
        "key_type": meta.key_type,
        "value_type": meta.value_type,
        "format": state.format,
        "size": None if state.size < 0 else state.size,
        "entries": None if state.entries < 0 else state.entries,
    }
