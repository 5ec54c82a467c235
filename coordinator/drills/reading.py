"""Reads a whole snapshot as a restore would: every row of every state through the ordinary decoders, and every record in flight.

No user code runs, and nothing is unpickled. Rows are counted, and compared with what is told of them: the entries of operator state
and the records in flight in `_metadata`, the rows of a Parquet table in its own footer. A problem of one state does not keep the
others from being read."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.barriers.sinks.reading import find_replaced
from holdfast.coordinator.drills.records import PROBLEMS_MAX, DrillReport
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.statebackends.errors import CorruptStateError, HoldfastError, InFlightStateError, StateValueError
from holdfast.statebackends.layout import metadata_path
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.snapshot.parts import read_metadata_file
from holdfast.statebackends.state_processor.contents import Location, StoredSnapshot, StoredState, check_contents, place_of_snapshot
from holdfast.statebackends.state_processor.external import check_external
from holdfast.statebackends.state_processor.flights import StoredFlight, flight_batches, flight_schema, flights_of
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.storage.port import run_flow

DAMAGE = (CorruptStateError, InFlightStateError, StateValueError)
"""Errors that are about the snapshot, not about storage or this process."""


class Findings:
    """Counts and problems so far."""

    def __init__(self) -> None:
        self.states = self.rows = self.problem_count = 0
        self.problems: list[str] = []

    def tell(self, problem: str) -> None:
        self.problem_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)

    def count(self, what: str, found: int, told: int) -> None:
        """`told`: -1 if nothing is told of it."""
        self.states += 1
        self.rows += found
        if told >= 0 and found != told:
            self.tell(f"{what}: {found} rows were read, {told} are told of")


def drill_snapshot(location: Location) -> DrillReport:
    """Read the snapshot in a folder. Damage is in the report; raises StorageUnavailableError and what else is not about the
    snapshot."""
    found = Findings()
    place = place_of_snapshot(location)
    try:
        path = metadata_path(place.location)
        content = run_flow(read_metadata_file(metadata_path(place.folder)), place.storage)
        snapshot = StoredSnapshot(decode_metadata(content, path), place.storage, place.folder)
        check_contents(snapshot)
    except DAMAGE as error:
        found.tell(error.message)
        return DrillReport(problem_count=found.problem_count, problems=tuple(found.problems))
    for state in snapshot.states():
        _drill_state(snapshot, state, found)
    for flight in flights_of(snapshot):
        _drill_flight(snapshot, flight, found)
    _drill_external(snapshot, found)
    metadata = snapshot.metadata
    size, problems = metadata.size_in_flight_too, tuple(found.problems)
    return DrillReport(len(metadata.operators), found.states, found.rows, size, found.problem_count, problems)


def _drill_state(snapshot: StoredSnapshot, state: StoredState, found: Findings) -> None:
    name = f"operator {state.operator.uid!r}, state {state.meta.name!r}"
    try:
        with snapshot.reader() as reader:
            told = _rows_told(reader, state)
            schema = state_schema(reader, state)
            rows = _count(state_batches(reader, state, schema))
    except DAMAGE as error:
        found.tell(error.message)
    else:
        found.count(name, rows, told)


def _count(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def _rows_told(reader: PartReader, state: StoredState) -> int:
    """Rows that a state has, as others say than those who decode it; -1: nobody says."""
    if not state.is_keyed:
        return state.entries
    told = 0
    for part in state.keyed:
        if part.is_native or part.deltas or part.handle.format != "parquet":
            return -1
        source = reader.open(part.base, operator=state.operator.uid, subtask=part.subtask)
        try:
            told += int(pq.read_metadata(source).num_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise state.corrupt(f"not a Parquet file: {error}") from error
    return told


def _drill_flight(snapshot: StoredSnapshot, flight: StoredFlight, found: Findings) -> None:
    try:
        with snapshot.reader() as reader:
            rows = _count(flight_batches(reader, flight, flight_schema(reader, flight)))
    except DAMAGE as error:
        found.tell(error.message)
    else:
        told = sum(piece.rows for channel in flight.channels for piece in channel.pieces)
        found.count(f"records in flight of {flight.name}", rows, told)


def _drill_external(snapshot: StoredSnapshot, found: Findings) -> None:
    """Files elsewhere that a restore would look for. What can't be asked is no problem of the snapshot."""
    storage = RoutedStorage(snapshot.storage)
    flow = check_external(snapshot.metadata.external, relative=not snapshot.is_self_contained, find_replaced=find_replaced)
    for problem in run_flow(flow, storage).problems:
        found.tell(str(problem))


def describe_error(error: BaseException) -> str:
    """Why a drill could tell nothing."""
    return error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
