"""SHELL: how a streaming input begins, and what a savepoint has of its query: the checkpoint, copied while the query is held, and
out again into a new folder.

`<savepoint>/queries/group.json` is written last, and says behind which batch each copy is; the copies lie beside it. A copy may
have the plan of the next batch, or lack the mark that the last one is done: both are then computed as after a crash."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from holdfast.operators.sources.spark_checkpoint import frozen_settings
from holdfast.operators.sources.stream import StreamSource
from holdfast.operators.sources.stream_input import StreamBase, find_stream_flow, make_stream_flow, read_stream_flow
from holdfast.operators.sources.stream_query import StreamQuery
from holdfast.statebackends.decoding import decode_versioned
from holdfast.statebackends.errors import InvalidConfigError, ObjectMissingError
from holdfast.statebackends.layout import JobPaths, StreamPaths, file_name, folder_of_snapshot
from holdfast.statebackends.storage import is_absolute_folder, resolve_folder
from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import DownloadFile, ListFiles, ListFolder, PutIfAbsent, Storage, UploadFile, run_flow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION = 1
_ID_FILE = "metadata"
_FIRST = "offsets"
"""Copied in front of the rest: what an offset refers to was written before it, and is copied after it."""


class GroupRecord(msgspec.Struct, frozen=True):
    """The queries of which a savepoint has the checkpoints."""

    version: int
    queries: dict[str, StreamBase]
    """By uid of the source."""


def begin_stream(
    source: StreamSource,
    storage_root: str,
    job_id: str,
    uid: str,
    submission: int,
    *,
    fresh: bool,
    restore: str | None = None,
    goes_on_from: str = "",
) -> None:
    """Find or make the input that a submission begins with, unless it restores positions in another one. Where the savepoint that
    it restores has a copy of the query's checkpoint, the input is a new one that goes on from there. goes_on_from: the savepoint
    that an earlier submission named, whose driver may have died before it made that input.

    Raises InputChangedError if its batches have other columns, and as `saved_query`."""
    storage = open_storage(storage_root)
    newest = None if fresh else run_flow(find_stream_flow(job_id, uid), storage)
    if restore is None and not fresh and _is_left(newest, uid, goes_on_from, storage):
        restore = goes_on_from
    base = saved_query(source, uid, restore, storage)
    folder = None if base is not None else newest
    source.folder = folder or JobPaths(job_id).input_folder(uid, submission)
    source.submission, source.follows_base = submission, base is not None
    if base is not None:
        base = msgspec.structs.replace(base, query_id=str(uuid4()))
        _restore_query(uid, restore, storage, source.folder, base.query_id)
    run_flow(make_stream_flow(source.folder, source.full_schema, uid, base), storage)
    source.base = run_flow(read_stream_flow(source.folder), storage).base


def _is_left(newest: str | None, uid: str, savepoint: str, storage: Storage) -> bool:
    """Whether a submission named a savepoint with a copy of the query, and no input goes on from there. `newest`: input of the
    source; that of which the savepoint is goes on itself."""
    found = _saved(uid, savepoint or None, storage)
    if found is None or newest == found[0].input:
        return False
    made = None if newest is None else run_flow(read_stream_flow(newest), storage).base
    return made is None or (made.input, made.batch_id) != (found[0].input, found[0].batch_id)


def check_saved_queries(sources: Mapping[str, object], restore: str | None) -> None:
    """Raise as `saved_query` for any source of a job, before it is submitted."""
    if restore is not None and is_absolute_folder(restore):
        for uid, source in sources.items():
            if isinstance(source, StreamSource):
                saved_query(source, uid, restore, open_storage(restore))


def save_queries(location: str, queries: Sequence[StreamQuery]) -> None:
    """Copy the checkpoints of queries that are held, and have been read, into the savepoint at a location."""
    target, folder = resolve_folder(location, queries[0].storage)
    for query in queries:
        local = query.checkpoint
        if local is None:
            raise _elsewhere(query.uid)
        for path in _files(local):
            with contextlib.suppress(ObjectMissingError):  # Spark clears away what is of batches long ago, also of a held query
                target.execute(UploadFile(f"{local}/{path}", f"{_copy(folder, query.uid)}/{path}"))
    record = GroupRecord(VERSION, {query.uid: query.position() for query in queries})
    target.execute(PutIfAbsent(_record(folder), msgspec.json.encode(record)))


def check_saveable(queries: Sequence[StreamQuery]) -> None:
    """Raise InvalidConfigError for a query whose checkpoint can't be copied."""
    for query in queries:
        if query.checkpoint is None:
            raise _elsewhere(query.uid)


def _elsewhere(uid: str) -> InvalidConfigError:
    message = f"source {uid}: the checkpoint of its query is not on a local or mounted file system, and can't be copied"
    return InvalidConfigError(message, setting="checkpoint")


def _files(local: str) -> Iterator[str]:
    """Files below a folder, without those that Hadoop hides (checksums, half-written ones)."""
    found = []
    for folder, _, names in os.walk(local):
        relative = os.path.relpath(folder, local)
        found += [os.path.normpath(f"{relative}/{name}") for name in names if not name.startswith(".")]
    return iter(sorted(found, key=lambda path: (not path.startswith(f"{_FIRST}/"), path)))


def saved_query(source: StreamSource, uid: str, restore: str | None, storage: Storage) -> StreamBase | None:
    """Where the query of a source stood in the savepoint that a job starts from; None: it has no copy of its checkpoint.

    Raises InvalidConfigError for a session whose settings are not those that the query has kept since its first batch."""
    found = _saved(uid, restore, storage)
    if found is None:
        return None
    if source.checkpoint is not None:
        message = f"source {uid}: the savepoint has the checkpoint of its query: leave checkpoint= out"
        raise InvalidConfigError(message, setting="checkpoint")
    base, place, folder = found
    if source.session is not None:
        _check_settings(uid, source.session, place, folder)
    return base


def _restore_query(uid: str, restore: str | None, storage: Storage, folder: str, query_id: str) -> None:
    """Copy the checkpoint of a query out of a savepoint, into the input at a folder of a local state directory. It gets an id of
    its own: the query that it was copied from may be running."""
    found = _saved(uid, restore, storage)
    assert found is not None
    _, place, copy = found
    local = f"{storage.root.rstrip('/')}/{StreamPaths(folder).query}"
    os.makedirs(local, exist_ok=True)  # a query that had not begun has no file
    for path in place.execute(ListFiles(copy)):
        target = f"{local}/{path.removeprefix(f'{copy}/')}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        place.execute(DownloadFile(path, target))
    with open(f"{local}/{_ID_FILE}", "w", encoding="utf-8") as file:
        file.write(json.dumps({"id": query_id}))


def _saved(uid: str, restore: str | None, storage: Storage) -> tuple[StreamBase, Storage, str] | None:
    if restore is None or not is_absolute_folder(restore):
        return None
    place, folder = resolve_folder(folder_of_snapshot(restore), storage)
    path = _record(folder)
    try:
        content = run_flow(read_whole(path), place)
    except ObjectMissingError:
        return None
    record = decode_versioned(content, GroupRecord, path, supported=VERSION, what="the queries of a savepoint")
    base = record.queries.get(uid)
    return None if base is None else (base, place, _copy(folder, uid))


def _record(folder: str) -> str:
    return f"{folder}/queries/group.json"


def _copy(folder: str, uid: str) -> str:
    return f"{folder}/queries/{file_name(uid)}"


def _check_settings(uid: str, session: SparkSession, place: Storage, copy: str) -> None:
    names = [name for name in place.execute(ListFolder(f"{copy}/{_FIRST}")) if name.isdecimal()]
    if not names:
        return  # it has had no batch
    path = f"{copy}/{_FIRST}/{max(names, key=int)}"
    frozen = frozen_settings(run_flow(read_whole(path), place), path, uid)
    for setting, kept in sorted(frozen.items()):
        now = session.conf.get(setting, kept)
        if now != kept:
            message = f"source {uid}: its query has {setting}={kept} since its first batch, the session has {now}"
            raise InvalidConfigError(message, setting=setting)
