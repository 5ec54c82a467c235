"""A materialised input: its manifest, its paths, and the flows that seal and load it.

The manifest is written once, by put-if-absent, after all chunk files are durable: a chunk file counts only if a manifest names it.
Layout: `<job>/sources/<uid>/<submission>/manifest.json`, with the chunk files in a folder of their writer beside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import pyarrow as pa
import xxhash

from holdfast.statebackends.decoding import decode_versioned
from holdfast.statebackends.errors import AmbiguousWriteError, CorruptStateError, ObjectMissingError
from holdfast.statebackends.layout import INPUT_MANIFEST, JobPaths
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import DeleteFolder, Flow, ListFolder, PutIfAbsent, ReadFile, StatFile

MANIFEST_VERSION = 1


class ChunkFile(msgspec.Struct, frozen=True):
    """One Arrow IPC file: rows [first_row, first_row + rows) of the input."""

    name: str
    """Path relative to the manifest's folder."""
    first_row: int
    rows: int
    length: int
    """Bytes."""
    checksum: str
    """`xxh3_128:<32 hex>` over the whole file."""


class InputManifest(msgspec.Struct, frozen=True):
    """Contents of a materialised input: files in row order, without a gap."""

    version: int
    arrow_schema: str
    """Base64 of the Arrow schema message."""
    rows: int
    files: tuple[ChunkFile, ...]
    writer: str
    """Folder of the writer that sealed it."""

    @property
    def schema(self) -> pa.Schema:
        return schema_from_text(self.arrow_schema)


ManifestT = TypeVar("ManifestT", bound=InputManifest)


def schema_text(schema: pa.Schema) -> str:
    """Base64 of the Arrow schema message, for JSON."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode("ascii")


def schema_from_text(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def checksum_of(data: bytes | memoryview) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def make_manifest(schema: pa.Schema, files: list[ChunkFile], writer: str) -> InputManifest:
    """Make the manifest of these files, in their order; sets first_row."""
    placed: list[ChunkFile] = []
    row = 0
    for file in files:
        placed.append(msgspec.structs.replace(file, first_row=row))
        row += file.rows
    return InputManifest(MANIFEST_VERSION, schema_text(schema), row, tuple(placed), writer)


def decode_manifest(data: bytes, path: str, kind: type[ManifestT]) -> ManifestT:
    """Decode a manifest. Raises CorruptStateError, UnsupportedVersionError."""
    return decode_versioned(data, kind, path, supported=MANIFEST_VERSION, what="an input manifest")


def find_sealed_flow(job_id: str, uid: str) -> Flow[str | None]:
    """Path of a source's newest sealed manifest, or None."""
    folder = JobPaths(job_id).inputs(uid)
    names = yield ListFolder(folder)
    for name in sorted((name for name in names if name.endswith("/")), reverse=True):
        path = f"{folder}/{name}{INPUT_MANIFEST}"
        size = yield StatFile(path)
        if size is not None:
            return path
    return None


def seal_flow(path: str, manifest: ManifestT) -> Flow[ManifestT]:
    """Seal an input, or a batch of one, or adopt the one that another writer sealed first; the chunk files of losers are deleted.

    Returns the manifest in force. Safe to repeat after a crash at any point."""
    data, kind = msgspec.json.encode(manifest), type(manifest)
    folder = path.rsplit("/", 1)[0]
    try:
        created = yield PutIfAbsent(path, data)
    except AmbiguousWriteError:
        created = False
    sealed = manifest
    if not created:
        try:
            sealed = decode_manifest((yield from read_whole(path)), path, kind)
        except ObjectMissingError:
            # The first answer was ambiguous and nothing was written: the second answer counts.
            yield PutIfAbsent(path, data)
            sealed = decode_manifest((yield from read_whole(path)), path, kind)
    for name in (yield ListFolder(folder)):
        if name.endswith("/") and name.rstrip("/") != sealed.writer:
            yield DeleteFolder(f"{folder}/{name.rstrip('/')}")
    return sealed


def load_manifest_flow(path: str, operator: str) -> Flow[InputManifest]:
    """Read a manifest. Raises CorruptStateError naming file and operator."""
    try:
        return decode_manifest((yield from read_whole(path)), path, InputManifest)
    except ObjectMissingError as error:
        raise CorruptStateError(
            f"source {operator}: its materialised input {path} is missing", path=path, operator=operator, reason="missing"
        ) from error


def load_chunk_flow(
    folder: str, file: ChunkFile, schema: pa.Schema, operator: str, columns: Sequence[str] | None = None
) -> Flow[pa.RecordBatch]:
    """Read one chunk as one batch of those of these columns that it has, or of all, checked against the manifest. Raises
    CorruptStateError naming the file."""
    path = f"{folder}/{file.name}"

    def corrupt(reason: str) -> CorruptStateError:
        return CorruptStateError(f"source {operator}: {path}: {reason}", path=path, operator=operator, reason=reason)

    try:
        data = yield ReadFile(path, 0, file.length + 1)
    except ObjectMissingError as error:
        raise corrupt("missing") from error
    if len(data) != file.length:
        raise corrupt(f"{len(data)} bytes, the manifest has {file.length}")
    if checksum_of(data) != file.checksum:
        raise corrupt("checksum differs from the manifest's")
    table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    if table.num_rows != file.rows or not table.schema.equals(schema):
        raise corrupt(f"{table.num_rows} rows of {table.schema.names}, the manifest has {file.rows} of {schema.names}")
    if some := [name for name in columns or () if name in schema.names]:
        table = table.select(some)
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
