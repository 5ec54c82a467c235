"""A streaming input: the micro-batches of a Spark query, each sealed once, in the order of their ids. CORE: records and flows.

A batch counts once its manifest is there, which put-if-absent makes the first one: whatever Spark computes for the same batch id
another time is not stored. Rows are numbered over all batches. A batch is dropped when no snapshot of the jobs that own the
input needs it. Layout: `StreamPaths`. ADR 78."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from holdfast.operators.sources.materialised import MANIFEST_VERSION, ChunkFile, InputManifest, decode_manifest, schema_text
from holdfast.statebackends.decoding import UNDECODABLE, decode_versioned
from holdfast.statebackends.errors import AmbiguousWriteError, CorruptStateError, InputChangedError, ObjectMissingError
from holdfast.statebackends.layout import (
    CHECKPOINT_PREFIX,
    DecisionTag,
    JobPaths,
    StreamPaths,
    batch_of_manifest,
    decode_decision_tag,
    decode_savepoint_folder,
    metadata_path,
    parse_checkpoint_name,
    stream_start,
)
from holdfast.statebackends.snapshot.metadata import METADATA_BYTES_MAX, SnapshotMetadata, decode_metadata
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, Flow, ListFolder, PutIfAbsent, StatFile

VERSION = 1
NO_BATCH = -1
"""In place of a batch id: none has been read."""
BATCHES_AHEAD_MAX = 16
"""Manifests that a reader reads at a time."""


class StreamBase(msgspec.Struct, frozen=True):
    """Behind which batch of another input one goes on, with a copy of its query's checkpoint."""

    input: str
    """Folder of the other input."""
    batch_id: int
    rows: int
    """Rows up to there, of both."""
    query_id: str


class StreamRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What makes a folder a streaming input."""

    version: int
    arrow_schema: str
    """Base64 of the Arrow schema message: of all its batches."""
    base: StreamBase | None = None


class BatchManifest(InputManifest, frozen=True):
    """One sealed batch. `first_row` of its files counts from the first row of the input, as `first_row` here."""

    batch_id: int
    first_row: int
    query_id: str
    """Of the query that sealed it: a checkpoint of Spark has one for life."""

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows

    @property
    def size(self) -> int:
        """Bytes stored."""
        return sum(file.length for file in self.files)


class OwnerRecord(msgspec.Struct, frozen=True):
    """Whose query fills the input from here on: the newest owner's."""

    version: int
    job_id: str
    submission: int
    nonce: str


class StartRecord(msgspec.Struct, frozen=True):
    """Where one reader began, in the first attempt of a submission."""

    version: int
    input: str
    """Folder of the input that it reads; empty: it has no rows to read."""
    rows_read: int
    """Rows of its stripes that lie before it."""
    parallelism: int
    """Readers."""


class DroppedRecord(msgspec.Struct, frozen=True):
    """Batches before this one were dropped: a manifest of one that is there was put late, and does not count."""

    version: int
    first_kept: int


class EndRecord(msgspec.Struct, frozen=True):
    """A submission's query has ended behind this many batches and rows."""

    version: int
    batches: int
    rows: int


def make_batch_manifest(
    schema: pa.Schema, files: Sequence[ChunkFile], writer: str, *, batch_id: int, first_row: int, query_id: str
) -> BatchManifest:
    """Make the manifest of these files, in their order; sets the first_row of each."""
    placed: list[ChunkFile] = []
    row = first_row
    for file in files:
        placed.append(msgspec.structs.replace(file, first_row=row))
        row += file.rows
    return BatchManifest(
        MANIFEST_VERSION, schema_text(schema), row - first_row, tuple(placed), writer, batch_id, first_row, query_id
    )


# --------------------------------------------------------------------------------------------------------- the input itself


def find_stream_flow(job_id: str, uid: str) -> Flow[str | None]:
    """Folder of a source's newest streaming input, or None."""
    folder = JobPaths(job_id).inputs(uid)
    names = yield ListFolder(folder)
    for name in sorted((name for name in names if name.endswith("/")), reverse=True):
        found = f"{folder}/{name.rstrip('/')}"
        if (yield StatFile(StreamPaths(found).record)) is not None:
            return found
    return None


def make_stream_flow(folder: str, schema: pa.Schema, operator: str, base: StreamBase | None = None) -> Flow[None]:
    """Make a streaming input, or find it there. Raises InputChangedError if it has other columns."""
    path = StreamPaths(folder).record
    yield from _put(path, StreamRecord(VERSION, schema_text(schema), base))
    record = yield from read_stream_flow(folder)
    if record.arrow_schema != schema_text(schema):
        reason = f"its sealed batches have other columns or types than the query now: {', '.join(schema.names)}"
        raise InputChangedError(f"source {operator}: {folder}: {reason}", operator=operator, path=folder, reason=reason)


def read_stream_flow(folder: str) -> Flow[StreamRecord]:
    """Raises ObjectMissingError."""
    path = StreamPaths(folder).record
    return decode_versioned((yield from read_whole(path)), StreamRecord, path, supported=VERSION, what="a streaming input")


def claim_input_flow(folder: str, job_id: str, submission: int, nonce: str) -> Flow[int]:
    """Become the newest owner; returns the owner's number, which counts from 1. Safe to repeat with the same nonce."""
    paths = StreamPaths(folder)
    while True:
        newest = yield from newest_owner_flow(folder)
        if newest is not None and newest[1].nonce == nonce:
            return newest[0]
        number = 1 if newest is None else newest[0] + 1
        yield from _put(paths.owner(number), OwnerRecord(VERSION, job_id, submission, nonce))


def newest_owner_flow(folder: str) -> Flow[tuple[int, OwnerRecord] | None]:
    """Number and record of the newest owner."""
    names = yield ListFolder(StreamPaths(folder).owners)
    return (len(names), (yield from _owner_flow(folder, max(names)))) if names else None


def owners_flow(folder: str) -> Flow[list[OwnerRecord]]:
    """All owners, oldest first."""
    owners = []
    for name in sorted((yield ListFolder(StreamPaths(folder).owners))):
        owners.append((yield from _owner_flow(folder, name)))
    return owners


def _owner_flow(folder: str, name: str) -> Flow[OwnerRecord]:
    path = f"{StreamPaths(folder).owners}/{name}"
    return decode_versioned(
        (yield from read_whole(path)), OwnerRecord, path, supported=VERSION, what="the owner of a streaming input"
    )


def say_start_flow(folder: str, submission: int, subtask: int, start: StartRecord) -> Flow[None]:
    """A reader says where it begins; what it said first stays. `folder`: the input that the submission would begin with."""
    yield from _put(stream_start(folder, submission, subtask), start)


def read_starts_flow(folder: str, submission: int) -> Flow[list[StartRecord] | None]:
    """Where the readers began; None until all have said so."""
    starts: list[StartRecord] = []
    subtask, readers = 0, 1
    while subtask < readers:
        path = stream_start(folder, submission, subtask)
        try:
            content = yield from read_whole(path)
        except ObjectMissingError:
            return None
        starts.append(decode_versioned(content, StartRecord, path, supported=VERSION, what="the start of a reader"))
        subtask, readers = subtask + 1, starts[0].parallelism
    return starts


def end_stream_flow(folder: str, job_id: str, submission: int, batches: int, rows: int) -> Flow[None]:
    """Say that the submission's query has ended behind so many batches and rows."""
    yield from _put(StreamPaths(folder).end(job_id, submission), EndRecord(VERSION, batches, rows))


def _put(path: str, record: msgspec.Struct) -> Flow[None]:
    """Put-if-absent; whoever reads the record back learns which one is there."""
    data = msgspec.json.encode(record)
    try:
        yield PutIfAbsent(path, data)
    except AmbiguousWriteError:
        yield PutIfAbsent(path, data)


# ---------------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True, slots=True)
class Look:
    """What a reader found behind what it knows."""

    next_id: int
    """The batch that it looked for."""
    manifests: tuple[BatchManifest, ...] = ()
    """Batches with consecutive ids, from that one on."""
    end: EndRecord | None = None
    """The query has ended, and there is no further batch."""


def look_flow(
    folder: str, next_id: int | None, end_path: str, operator: str, *, is_known: bool, last_id: int | None = None
) -> Flow[Look]:
    """Read the manifests of the next batches, up to `last_id`. `next_id`: None for the first one of the input. `is_known`: a
    snapshot says that it is there.

    Raises CorruptStateError if it is not, and if what comes first was dropped."""
    is_first = next_id is None
    if next_id is None:
        base = (yield from read_stream_flow(folder)).base
        next_id = 0 if base is None else base.batch_id + 1
    if (is_first or is_known) and next_id < (yield from first_kept_flow(folder)):
        raise _dropped(folder, next_id, operator)
    manifests = yield from _sealed_from_flow(folder, next_id, last_id)
    if not manifests and is_first and any(found > next_id for found in (yield from batch_ids_flow(folder))):
        # a batch behind it was begun, and the first one sealed before that
        manifests, is_known = (yield from _sealed_from_flow(folder, next_id, last_id)), True
    if manifests:
        return Look(next_id, tuple(manifests))
    if is_known:
        raise _dropped(folder, next_id, operator)
    try:
        content = yield from read_whole(end_path)
    except ObjectMissingError:
        return Look(next_id)
    end = decode_versioned(content, EndRecord, end_path, supported=VERSION, what="the end of a streaming input")
    return Look(next_id, end=end if end.batches == next_id else None)


def _dropped(folder: str, batch_id: int, operator: str) -> CorruptStateError:
    path = StreamPaths(folder).manifest(batch_id)
    reason = "missing: batches that no snapshot of the job needs are dropped"
    return CorruptStateError(f"source {operator}: {path} is {reason}", path=path, operator=operator, reason=reason)


def first_kept_flow(folder: str) -> Flow[int]:
    """Id before which batches were dropped; 0: none were."""
    names: list[str] = yield ListFolder(StreamPaths(folder).dropped)
    return max((int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()), default=0)


def _sealed_from_flow(folder: str, next_id: int, last_id: int | None) -> Flow[list[BatchManifest]]:
    manifests: list[BatchManifest] = []
    while len(manifests) < BATCHES_AHEAD_MAX and (last_id is None or next_id + len(manifests) <= last_id):
        found = yield from batch_flow(folder, next_id + len(manifests))
        if found is None:
            break
        manifests.append(found)
    return manifests


def batch_flow(folder: str, batch_id: int) -> Flow[BatchManifest | None]:
    """The manifest of a batch; None: it is not sealed. Raises CorruptStateError."""
    path = StreamPaths(folder).manifest(batch_id)
    try:
        return decode_manifest((yield from read_whole(path)), path, BatchManifest)
    except ObjectMissingError:
        return None


def batch_ids_flow(folder: str) -> Flow[list[int]]:
    """Ids of batches that have a folder, sealed or not, ascending."""
    names = yield ListFolder(StreamPaths(folder).batches)
    return sorted(int(name.rstrip("/")) for name in names if name.rstrip("/").isdecimal())


def last_batch_flow(folder: str) -> Flow[BatchManifest | None]:
    """The newest sealed batch, or None."""
    for batch_id in reversed((yield from batch_ids_flow(folder))):
        found = yield from batch_flow(folder, batch_id)
        if found is not None:
            return found
    return None


def unread_batches_flow(folder: str, rows_read: int) -> Flow[list[BatchManifest]]:
    """The sealed batches with rows behind the first `rows_read`, ascending."""
    unread: list[BatchManifest] = []
    for batch_id in reversed((yield from batch_ids_flow(folder))):
        found = yield from batch_flow(folder, batch_id)
        if found is None:
            continue
        if found.end_row <= rows_read:
            break
        unread.append(found)
    return unread[::-1]


# --------------------------------------------------------------------------------------------------------------- dropping


def needed_batch_flow(folder: str) -> Flow[int | None]:
    """The first batch that a snapshot of an owner needs; None: not known, so that none may be dropped.

    Checkpoints that don't name the input need all of it, until they are gone; savepoints count as long as they are where they were
    taken. A snapshot that can't be read may need anything, and so may the newest owner before it has a snapshot: what it began with
    may be gone."""
    needed: list[int] = []
    owners = yield from owners_flow(folder)
    for job_id in dict.fromkeys(owner.job_id for owner in owners):
        own = yield from _needed_by_flow(job_id, folder)
        needed += own
        if job_id == owners[-1].job_id and not own:
            return None
    return min(needed, default=None)


def _needed_by_flow(job_id: str, folder: str) -> Flow[list[int]]:
    """What each snapshot of a job needs first."""
    needed: list[int] = []
    for name in (yield ListFolder(job_id)):
        if not name.startswith(CHECKPOINT_PREFIX) or parse_checkpoint_name(name) is None:
            continue
        path = metadata_path(f"{job_id}/{name.rstrip('/')}")
        content = yield from _decision_flow(path)
        tag = None if content is None else decode_decision_tag(content)
        if content is None or tag == DecisionTag.ABORTED:
            continue
        if tag == DecisionTag.SAVEPOINT:
            savepoint = yield from _savepoint_flow(decode_savepoint_folder(content))
            if savepoint is not None:
                needed += _first_needed(savepoint, folder, is_savepoint=True)
        else:
            needed += _first_needed(decode_metadata(content, path), folder, is_savepoint=False)
    return needed


def _first_needed(metadata: SnapshotMetadata, folder: str, *, is_savepoint: bool) -> Iterable[int]:
    record = StreamPaths(folder).record
    named = [batch_of_manifest(entry) for entry in metadata.external]
    ids = [found[1] for found in named if found is not None and found[0] == folder]
    if record in metadata.external or (not ids and not is_savepoint):
        return [0]
    return ids


def _decision_flow(path: str) -> Flow[bytes | None]:
    try:
        return (yield from read_whole(path, METADATA_BYTES_MAX))
    except ObjectMissingError:
        return None


def _savepoint_flow(folder: str) -> Flow[SnapshotMetadata | None]:
    path = metadata_path(folder)
    content = yield from _decision_flow(path)
    return None if content is None else decode_metadata(content, path)


def drop_batches_flow(folder: str) -> Flow[int]:
    """Drop the batches that no snapshot needs; returns their number. Raises an error where that can't be told."""
    try:
        needed = yield from needed_batch_flow(folder)
    except UNDECODABLE as error:
        raise CorruptStateError(f"{folder}: a decision can't be read: {error}", path=folder, reason=str(error)) from error
    if needed is None:
        return 0
    paths = StreamPaths(folder)
    kept = yield from first_kept_flow(folder)
    over = [batch_id for batch_id in (yield from batch_ids_flow(folder)) if batch_id < max(needed, kept)]
    if over and needed > kept:  # said first: a driver that wakes late may still put a manifest
        yield from _put(paths.dropped_before(needed), DroppedRecord(VERSION, needed))
        if kept:
            yield DeleteFile(paths.dropped_before(kept))
    for batch_id in over:
        yield DeleteFile(paths.manifest(batch_id))
        yield DeleteFolder(paths.batch(batch_id))
    return len(over)
