"""`hf.Snapshot`: a checkpoint or savepoint as an object, without a coordinator and without user code.

A snapshot is opened in place; a savepoint's pointer in its job is followed. Nothing in it is changed or unpickled. Paths may be
URLs wherever a storage for them exists."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.api.snapshots.frames import change_of
from holdfast.api.snapshots.row_pages import RowPage, RowPosition, read_page
from holdfast.api.snapshots.rows import Row, rows_of
from holdfast.barriers.sinks.reading import find_replaced
from holdfast.coordinator.ha.recorded_job import decode_decision
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord, is_job_id
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ownership.claims import check_target
from holdfast.coordinator.ownership.labels import RESTORE_PREFIX, find_label, read_labels
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError, ObjectMissingError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import METADATA_NAME, JobPaths, describe_absence, metadata_path
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.state_processor.change_feed import ChangeFeed
from holdfast.statebackends.state_processor.contents import (
    Location,
    Place,
    StoredSnapshot,
    StoredState,
    absolute_location,
    check_contents,
    metadata_table,
    place_of,
    place_of_snapshot,
    states_of,
)
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import SnapshotDiff, diff_snapshots
from holdfast.statebackends.state_processor.edit import edit_snapshot
from holdfast.statebackends.state_processor.export import ExportReport, export_snapshot
from holdfast.statebackends.state_processor.flights import flights_of
from holdfast.statebackends.state_processor.rows import choose_columns, state_batches, state_schema
from holdfast.statebackends.state_processor.verify import VerifyReport, verify_files
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.directory import check_no_file
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFolder, run_flow


def open_snapshot(location: Location, *, follow: bool = True) -> StoredSnapshot:
    """Open the snapshot in a folder, or by its `_metadata` file; a savepoint's pointer in its job is followed, and `label:NAME` in
    a job's directory names the snapshot with that label.

    Raises NotFoundError, CorruptStateError, UnsupportedVersionError, StorageUnavailableError."""
    labelled = _labelled(location)
    if labelled is not None:
        return open_snapshot(labelled)
    place = place_of_snapshot(location)
    try:
        content = run_flow(read_metadata_file(metadata_path(place.folder)), place.storage)
    except ObjectMissingError as error:
        raise _no_snapshot(place) from error
    path = metadata_path(place.location)
    match decode_decision(content, path):
        case AbortRecord(checkpoint_id=number, reason=reason, message=message):
            text = f"checkpoint {number} was aborted ({reason}){': ' + message if message else ''}: it has no state"
            raise NotFoundError(text, path=place.location, checkpoint=number)
        case SavepointRecord(folder=pointed) if follow:
            is_whole = "://" in pointed or pointed.startswith("/")
            return open_snapshot(pointed if is_whole else f"{place.storage.root}/{pointed}", follow=False)
        case _:
            snapshot = StoredSnapshot(decode_metadata(content, path), place.storage, place.folder)
            check_contents(snapshot)
            return snapshot


def _labelled(location: Location) -> str | None:
    """Location of the snapshot that `<state-dir>/<job>/label:NAME` names; None for any other location. Raises NotFoundError."""
    parent, _, name = os.fspath(location).rstrip("/").rpartition("/")
    root, _, job_id = parent.rpartition("/")
    if not name.startswith(RESTORE_PREFIX) or not is_job_id(job_id):
        return None
    directory = root or ("/" if parent.startswith("/") else ".")
    storage = RoutedStorage(open_storage(absolute_location(directory)))
    found = find_label(job_id, run_flow(read_labels(JobPaths(job_id)), storage), name.removeprefix(RESTORE_PREFIX))
    return found.folder if is_absolute_folder(found.folder) else f"{storage.root.rstrip('/')}/{found.folder}"


def target_of(location: Location) -> Place:
    """Place of a new snapshot or export. Raises InvalidConfigError for a location that is no folder, or a job's."""
    place = place_of(location)
    if place.folder == METADATA_NAME:  # its path would be taken for the file of that name in the folder above
        raise InvalidConfigError(f"{place.location} is the name of a snapshot's own file: name another folder", path=place.location)
    real = place.location if "://" in place.location else os.path.realpath(place.location)
    if real.startswith("/"):
        check_no_file(real)
    run_flow(check_target(real), RoutedStorage(place.storage))
    return place


def outside_of(source: str, location: Location) -> Place:
    """As `target_of`, for output made of the snapshot at `source`, which must not lie inside it."""
    place = target_of(location)
    if f"{_real(place.location)}/".startswith(f"{_real(source)}/"):
        raise InvalidConfigError(f"{place.location} lies in the snapshot itself", path=place.location)
    return place


def _real(location: str) -> str:
    """Path without symbolic links."""
    return location if "://" in location else os.path.realpath(location)


def _no_snapshot(place: Place) -> NotFoundError:
    names = place.storage.execute(ListFolder(place.folder))
    return NotFoundError(f"{place.location} holds no snapshot: {describe_absence(place.location, names)}", path=place.location)


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """One state of an operator, as described in the snapshot."""

    name: str
    kind: str
    """value | list | map | reducing | aggregating | columnar | row_table | timers |
    operator_list | operator_union | operator_broadcast."""
    value_type: str
    key_type: str | None
    """None for operator state."""
    format: str
    """`parquet`, `arrow`, `rocksdb` (native files), or `list` for operator state."""
    size: int
    """Bytes; -1 for native files, which contain all states of their operator."""
    entries: int
    """Entries of operator state; -1 for keyed state."""


@dataclass(frozen=True, slots=True)
class SnapshotOperator:
    """One operator."""

    uid: str
    name: str
    parallelism: int
    max_parallelism: int
    size: int
    """Bytes, full."""
    states: dict[str, SnapshotState]


class Snapshot:
    """A snapshot in a folder; opening it reads and checks `_metadata` alone."""

    def __init__(self, location: Location) -> None:
        """`location`: path or URL of the folder of a checkpoint or savepoint, or of its `_metadata`.

        Raises NotFoundError, CorruptStateError, UnsupportedVersionError, StorageUnavailableError, InvalidConfigError."""
        self._stored = open_snapshot(location)

    @classmethod
    def _of(cls, stored: StoredSnapshot) -> Snapshot:
        snapshot = cls.__new__(cls)
        snapshot._stored = stored
        return snapshot

    def __repr__(self) -> str:
        return f"Snapshot({self.location!r})"

    @property
    def location(self) -> str:
        """Absolute path or URL of its folder; of the snapshot itself, where a pointer was followed."""
        return self._stored.location

    @property
    def metadata(self) -> SnapshotMetadata:
        """Content of `_metadata`: job, checkpoint id, kind, times, handles."""
        return self._stored.metadata

    @property
    def operators(self) -> dict[str, SnapshotOperator]:
        """Operators by uid, with their states."""
        return {
            operator.uid: SnapshotOperator(
                operator.uid,
                operator.name,
                operator.parallelism,
                operator.max_parallelism,
                operator.size,
                {name: _described(state) for name, state in states_of(operator).items()},
            )
            for operator in self._stored.metadata.operators
        }

    def states(self, uid: str) -> dict[str, SnapshotState]:
        """States of one operator by name. Raises NotFoundError naming the operators that exist."""
        return {name: _described(state) for name, state in states_of(self._stored.operator(uid)).items()}

    def schema(self, uid: str, state: str) -> pa.Schema:
        """Columns of `table`. Raises NotFoundError, CorruptStateError."""
        with self._stored.reader() as reader:
            return state_schema(reader, self._stored.state(uid, state))

    def table(
        self, uid: str, state: str, *, key_groups: range | None = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader:
        """The rows of a state, or those of some key groups, as a stream in bounded memory, in key-group order.

        `columns`: only these, in this order.

        Each file is checked before its first row is returned: reading raises CorruptStateError. Raises NotFoundError."""
        stored = self._stored.state(uid, state)
        schema = self.schema(uid, state)
        chosen = schema if columns is None else choose_columns(stored, schema, columns)
        if key_groups is not None and (key_groups.step != 1 or key_groups.start < 0 or not stored.is_keyed):
            raise InvalidConfigError(f"{key_groups} are not key groups of state {state!r}", operator=uid, state=state)
        wanted = None if key_groups is None else KeyGroupRange(key_groups.start, max(key_groups.start, key_groups.stop))
        return pa.RecordBatchReader.from_batches(chosen, self._batches(stored, schema, wanted, columns))

    def _batches(
        self, stored: StoredState, schema: pa.Schema, wanted: KeyGroupRange | None, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        with self._stored.reader() as reader:
            yield from state_batches(reader, stored, schema, wanted, columns=columns)

    def rows(self, uid: str, state: str) -> Iterator[Row]:
        """The rows of a state as dicts, a few at a time; entries of operator state as plain values. Raises as `table` does."""
        stored = self._stored.state(uid, state)
        with self._stored.reader() as reader:
            yield from rows_of(reader, stored)

    def row_page(self, uid: str, state: str, *, after: str = "", limit: int = 50) -> RowPage:
        """At most `limit` rows of a state, 500 at most, as texts, behind the page whose `next` is `after`: bounded work and memory.

        Raises NotFoundError, CorruptStateError, and InvalidConfigError for a share of a subtask that is too large for it."""
        return read_page(self._stored, uid, state, RowPosition.parse(after), limit)

    def verify(self) -> VerifyReport:
        """Check length and checksum of every file; a damaged file is in the report, and never raises.

        Files outside its folder are read from the storage that their path names."""
        return run_flow(verify_files(self._stored, find_replaced=find_replaced), RoutedStorage(self._stored.storage))

    def diff(self, other: Snapshot, *, uid: str | None = None, state: str | None = None, keys_max: int = 10) -> SnapshotDiff:
        """Compare this snapshot with another, at any parallelism and backend.

        `keys_max`: differing keys that are listed for each state. Raises NotFoundError, CorruptStateError."""
        return diff_snapshots(self._stored, other._stored, uid, state, keys_max=keys_max)

    def changes(self, other: Snapshot, uid: str, state: str) -> pa.RecordBatchReader:
        """The change feed of a state from this snapshot to another: one row for each key that was added, removed or changed.

        Columns: `change` (`added`, `removed`, `changed`), the row's identity (`key`, `namespace`, `map_key`, `time`), and the value
        before and after (`before_value`, `after_value`; null where there was none; a list is one value). For operator state
        `change`, `value` and `json` of each entry. Raises NotFoundError, InvalidConfigError if the state is of another kind or key
        type in the other; reading raises CorruptStateError."""
        feed = ChangeFeed.of(self._stored, other._stored, uid, state)
        return pa.RecordBatchReader.from_batches(feed.schema(), feed.batches())

    def metadata_table(self) -> pa.Table:
        """Operators and states with their types and sizes, one row for each state; `to_pandas()` gives a DataFrame."""
        return metadata_table(self._stored)

    def export(self, folder: Location, *, uid: str | None = None, state: str | None = None) -> ExportReport:
        """Write one Parquet dataset for each state into a new folder; all states, those of one operator, or one. Records in flight
        are a dataset for each edge: of all edges, of those of the operator, or of none with `state`.

        Raises InvalidConfigError for a folder in use, NotFoundError, CorruptStateError, StorageUnavailableError. On an error the
        folder is left as it was."""
        states = list(self._stored.states(uid, state))
        place = outside_of(self.location, folder)
        flights = flights_of(self._stored, uid) if state is None else ()
        return export_snapshot(self._stored, states, place.storage, place.folder, flights)

    def copy(self, target: Location) -> Snapshot:
        """Write an independent savepoint with the same content into a new folder, checking every file, and return it.

        Raises as `export` does."""
        place = outside_of(self.location, target)
        return Snapshot._of(copy_snapshot(self._stored, place.storage, place.folder))

    def edit(
        self,
        target: Location,
        changes: Mapping[tuple[str, str], Any] | None = None,
        *,
        uid: str | None = None,
        state: str | None = None,
        function: Any = None,
    ) -> Snapshot:
        """Write a canonical savepoint with some states replaced and all others as they are, and return it.

        Each change, by (uid, state) or as the one `function` for `uid` and `state`, is a function or a frame. A function is called
        with each batch of rows (`pyarrow.RecordBatch`, as from `table`) and returns the rows that replace them, or None for none. A
        frame (Arrow, pandas, Polars, Spark) has all rows of the new state. Raises NotFoundError, InvalidKeyError, StateValueError,
        InvalidConfigError and UserFunctionError naming operator, state and row, or as `export`. On an error the folder is left as
        it was."""
        wanted = dict(changes or {})
        if function is not None:
            if uid is None or state is None:
                raise InvalidConfigError("which state is to be edited? Give uid and state", operator=uid, state=state)
            wanted[uid, state] = function
        if not wanted:
            raise InvalidConfigError("nothing to edit: give a function, or changes", operator=uid, state=state)
        place = outside_of(self.location, target)
        made = {(operator, name): change_of(operator, name, each) for (operator, name), each in wanted.items()}
        return Snapshot._of(edit_snapshot(self._stored, made, place.storage, place.folder, now_ms=int(time.time() * 1_000)))


def _described(state: StoredState) -> SnapshotState:
    meta = state.meta
    return SnapshotState(meta.name, meta.kind, meta.value_type, meta.key_type, state.format, state.size, state.entries)
