"""Export of a snapshot's states as Parquet datasets, which any tool reads: `<folder>/<uid>/<state>/part-00000.parquet`.

Records in flight are a dataset an edge, `<folder>/_in_flight/<edge>/`. `_export.json` is written last and lists the datasets; an
export without it is incomplete. Rows come from rows.py and flights.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.statebackends.layout import file_name
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState
from holdfast.statebackends.state_processor.flights import StoredFlight, flight_batches, flight_schema
from holdfast.statebackends.state_processor.reading import PartReader, scratch_errors
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.state_processor.writing import ClaimedFolder, claimed_folder
from holdfast.statebackends.storage.port import Storage

MANIFEST_NAME = "_export.json"
IN_FLIGHT_FOLDER = "_in_flight"
VERSION = 1
FILE_ROWS_MAX = 1 << 20
"""Rows of one file."""
_GROUP_ROWS = 1 << 17
"""Rows of one row group, which is held in memory."""
WAITING_FILES_MAX = 16
_WAITING_BYTES = 64 << 20
"""Number and bytes of files in the scratch folder at which they are uploaded together."""


@dataclass(frozen=True, slots=True)
class ExportedState:
    """One dataset."""

    operator: str
    state: str
    kind: str
    key_type: str | None
    value_type: str
    folder: str
    """Relative to the export's folder."""
    columns: dict[str, str]
    """Column -> Arrow type, in order."""
    rows: int
    files: tuple[str, ...]
    """Relative to `folder`."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class ExportedFlight:
    """The dataset of one edge's records in flight."""

    source: str
    """As in EdgeName, and so the next four."""
    tag: str | None
    target: str
    input: int
    ordinal: int
    folder: str
    """Relative to the export's folder."""
    columns: dict[str, str]
    """Column -> Arrow type, in order."""
    rows: int
    files: tuple[str, ...]
    """Relative to `folder`."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export."""

    location: str
    states: tuple[ExportedState, ...]
    in_flight: tuple[ExportedFlight, ...] = ()


def export_snapshot(
    source: StoredSnapshot, states: Sequence[StoredState], storage: Storage, folder: str, flights: Sequence[StoredFlight] = ()
) -> ExportReport:
    """Export states and records in flight into a folder of a storage, which must be new or empty.

    Raises CorruptStateError, InvalidConfigError for a folder in use, StorageUnavailableError; the folder is then as it was."""
    exported: list[ExportedState] = []
    with claimed_folder(storage, folder, "export") as target, source.reader() as reader, source.reader() as scratch:
        uploads = _Uploads(scratch, target)
        for _, own in groupby(states, key=lambda state: state.operator.uid):  # files that one operator's states share are read once
            exported += [_export(reader, state, uploads) for state in own]
            reader.forget()
        flown = [_export_flight(reader, *each, uploads) for each in _flight_folders(source, flights)]
        uploads.flush()
        target.finish(MANIFEST_NAME, msgspec.json.format(msgspec.json.encode(_manifest(source, exported, flown)), indent=2))
    return ExportReport(target.location, tuple(exported), tuple(flown))


def _flight_folders(source: StoredSnapshot, flights: Sequence[StoredFlight]) -> list[tuple[StoredFlight, str]]:
    """Each edge with its folder, which no operator and no other edge has."""
    root, taken = IN_FLIGHT_FOLDER, set[str]()
    while root in {file_name(operator.uid) for operator in source.metadata.operators}:
        root += "_"
    found = []
    for flight in flights:
        name = flight.name
        more = [str(name.input + 1)] * (name.input > 0) + [str(name.ordinal + 1)] * (name.ordinal > 0)
        wanted = "-".join([name.source, *([name.tag] if name.tag is not None else []), name.target, *more])
        folder, number = f"{root}/{file_name(wanted)}", 1
        while folder in taken:
            number += 1
            folder = f"{root}/{file_name(f'{wanted}-{number}')}"
        taken.add(folder)
        found.append((flight, folder))
    return found


def _export_flight(reader: PartReader, flight: StoredFlight, folder: str, uploads: _Uploads) -> ExportedFlight:
    schema = flight_schema(reader, flight)
    rows, files, size = _write(flight_batches(reader, flight, schema), schema, folder, uploads)
    columns = {field.name: str(field.type) for field in schema}
    return ExportedFlight(**flight.name._asdict(), folder=folder, columns=columns, rows=rows, files=files, size=size)


def _manifest(
    source: StoredSnapshot, exported: Sequence[ExportedState], flown: Sequence[ExportedFlight]
) -> dict[str, object]:
    metadata = source.metadata
    return {
        "format": "holdfast-export",
        "version": VERSION,
        "snapshot": {
            "location": source.location.encode("utf-8", "backslashreplace").decode("utf-8"),  # a folder's name may be no text
            "job_id": metadata.job_id,
            "job_name": metadata.job_name,
            "checkpoint_id": metadata.checkpoint_id,
            "kind": metadata.kind,
            "trigger_timestamp_ms": metadata.trigger_timestamp_ms,
        },
        "states": list(exported),
        **({"in_flight": list(flown)} if flown else {}),
    }


class _Uploads:
    """Local files to be uploaded, several at one time."""

    def __init__(self, scratch: PartReader, target: ClaimedFolder) -> None:
        self._scratch = scratch
        self._target = target
        self._waiting: list[tuple[str, str, int]] = []

    def new_path(self) -> str:
        return self._scratch.new_path("export")

    def add(self, local: str, name: str) -> int:
        """Add a complete file, and return its bytes. Uploads the waiting files if they are many, or large."""
        with scratch_errors(local):
            size = os.path.getsize(local)
        self._waiting.append((local, name, size))
        if len(self._waiting) == WAITING_FILES_MAX or sum(each[2] for each in self._waiting) >= _WAITING_BYTES:
            self.flush()
        return size

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._target.upload_all(waiting)
        for local, _, _ in waiting:
            self._scratch.discard(local)


def _export(reader: PartReader, state: StoredState, uploads: _Uploads) -> ExportedState:
    schema = state_schema(reader, state)
    dataset = f"{file_name(state.operator.uid)}/{file_name(state.meta.name)}"
    rows, files, size = _write(state_batches(reader, state, schema), schema, dataset, uploads)
    meta = state.meta
    columns = {field.name: str(field.type) for field in schema}
    return ExportedState(
        state.operator.uid, meta.name, meta.kind, meta.key_type, meta.value_type, dataset, columns, rows, files, size
    )


def _write(
    batches: Iterator[pa.RecordBatch], schema: pa.Schema, dataset: str, uploads: _Uploads
) -> tuple[int, tuple[str, ...], int]:
    """(rows, files, bytes) of a dataset."""
    files: list[str] = []
    rows = size = 0
    for tables in _files(batches, schema):
        local = uploads.new_path()
        with scratch_errors(local), pq.ParquetWriter(local, schema, compression="zstd", store_schema=True) as writer:
            for table in tables:
                rows += table.num_rows
                writer.write_table(table, row_group_size=_GROUP_ROWS)
        files.append(f"part-{len(files):05d}.parquet")
        size += uploads.add(local, f"{dataset}/{files[-1]}")
    return rows, tuple(files), size


def _files(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[Iterator[pa.Table]]:
    """The tables of each file, of one at least. An iterator must be exhausted before the next one is taken."""
    groups = _groups(batches, schema)
    first = next(groups, None)
    if first is None:
        first = schema.empty_table()

    def tables() -> Iterator[pa.Table]:
        nonlocal first
        rows, table, first = 0, first, None
        while table is not None:
            rows += table.num_rows
            yield table
            table = next(groups, None)
            if table is not None and rows + table.num_rows > FILE_ROWS_MAX:
                first = table
                return

    while first is not None:
        yield tables()


def _groups(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """The batches as tables of about one row group."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= _GROUP_ROWS:
            yield pa.Table.from_batches(held, schema)
            held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held, schema)
