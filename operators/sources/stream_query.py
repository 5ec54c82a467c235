"""SHELL: runs the Spark query of a streaming input in the driver, and seals its micro-batches, as long as the job runs there.

Spark's checkpoint says which batch is next; the input says which batches are sealed. A batch that is sealed stays as it is, even
if Spark asks for it once more. What is written and when it is dropped is in stream_input.py."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

from holdfast.operators.sources.dataframe_write import write_chunks
from holdfast.operators.sources.materialised import seal_flow
from holdfast.operators.sources.spark_checkpoint import METADATA_BYTES_MAX, query_id_of
from holdfast.operators.sources.stream import StreamSource
from holdfast.operators.sources.stream_input import (
    BatchManifest,
    StreamBase,
    claim_input_flow,
    drop_batches_flow,
    end_stream_flow,
    last_batch_flow,
    make_batch_manifest,
    newest_owner_flow,
    read_starts_flow,
    read_stream_flow,
    unread_batches_flow,
)
from holdfast.statebackends.errors import (
    CorruptStateError,
    FencedError,
    HoldfastError,
    InputChangedError,
    InvalidConfigError,
    InvariantError,
    QueryStoppedError,
)
from holdfast.statebackends.layout import StreamPaths
from holdfast.statebackends.storage import is_absolute_folder, resolve_folder
from holdfast.statebackends.storage.directory import folder_of
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Flow, Operation, ReadFile, Storage, run_flow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

log = logging.getLogger("holdfast.sources")

QUERY_FAILURES_MAX = 3
"""Failures of the query in a row, without a batch sealed in between, behind which the driver gives the job up."""
RETRY_S = 1.0
"""Time before a failed query is started again; it doubles."""
POLL_S = 0.25
STARTS_POLL_S = 0.05
ROOM_POLL_S = 0.05
DROP_S = 10.0
"""Time between two looks for batches that can be dropped."""
BATCH_ENDS_S = 5.0
"""Time that a query has to end its batch, when it is to stop."""
STOPPED_S = 10.0
"""Time that `stop` waits for the query to end."""
_FINAL = (CorruptStateError, FencedError, InputChangedError, InvalidConfigError, InvariantError, QueryStoppedError)
"""Errors that another start of the query would meet again."""

T = TypeVar("T")


class JobView(Protocol):
    """The job that reads the input, seen from its driver."""

    @property
    def is_running(self) -> bool:
        """False once it is over, another driver's, or left."""

    def rows_read(self, uid: str) -> int:
        """Rows that the source has read since its submission began, as last reported."""

    def give_up(self, error: str) -> None:
        """The input can't go on: fail those who wait for the job, which the coordinator keeps."""


class _StopQuery(Exception):
    """Ends a batch that is not sealed, since the query is to stop: the next start has it again."""


def local_path(location: str) -> str | None:
    """Path of a location on the local file system; None for any other."""
    return folder_of(location) if location.startswith("file:") or "://" not in location else None


class StorageAnywhere:
    """The state directory, whose reads also reach absolute paths: savepoints."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.root = storage.root

    def at(self, location: str) -> Storage:
        return self._storage.at(location)

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, ReadFile) and is_absolute_folder(operation.path):
            storage, path = resolve_folder(operation.path, self._storage)
            return storage.execute(ReadFile(path, operation.offset, operation.length))
        return self._storage.execute(operation)


class StreamQuery:
    """One query, from the start of a submission's readers to the end of its job, or its own."""

    def __init__(self, source: StreamSource, storage_root: str, job_id: str, uid: str, job: JobView) -> None:
        """Raises InvalidConfigError where Spark can't keep the query's checkpoint beside the input."""
        if source.dataframe is None:
            raise InvariantError(f"source {uid}: the DataFrame stayed in the driver")
        self._source = source
        self._dataframe: DataFrame = source.dataframe
        self._root = storage_root
        self._storage = StorageAnywhere(open_storage(storage_root))
        self._job_id, self._uid, self._job = job_id, uid, job
        self._folder = ""
        self._owner = 0
        self._rows_before = 0
        """Rows that were read when the submission began."""
        self._base: StreamBase | None = None
        self._last: BatchManifest | None = None
        self._unread: deque[BatchManifest] = deque()
        self._query_id = ""
        self._has_id = threading.Event()
        self._failed: BaseException | None = None
        """What ended the batch under way."""
        self._gate = threading.Condition()
        self._holds: set[object] = set()
        """Who holds the query: the next batch waits for all of them, before anything of it is computed."""
        self._is_in_batch = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if source.checkpoint is None and "://" in self._storage.root:
            raise InvalidConfigError(
                f"source {uid}: the state directory is at {self._storage.root}: give from_stream checkpoint=, a location where "
                "Spark can keep the checkpoint of the query",
                setting="checkpoint",
            )

    def start(self) -> None:
        from pyspark import InheritableThread

        self._thread = InheritableThread(target=self._run, name=f"holdfast-stream-{self._uid}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the query, at the latest behind the batch that it is in. Idempotent."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOPPED_S)

    # ----------------------------------------------------------------------------------------------------------- thread

    @property
    def _goes_on(self) -> bool:
        return not self._stopping.is_set() and self._job.is_running

    def _run(self) -> None:
        try:
            if self._take_input():
                self._run_queries()
        except Exception as error:
            if self._goes_on:
                log.error("source %s: its query can't go on: %s", self._uid, error)
                log.debug("source %s", self._uid, exc_info=True)
                self._job.give_up(f"source {self._uid}: {type(error).__name__}: {error}")

    def _take_input(self) -> bool:
        """Learn which input the readers read, and become its owner. False: the job is over, or has read all of it."""
        while (starts := self._flow(read_starts_flow(self._source.folder, self._source.submission))) is None:
            if not self._goes_on:
                return False
            time.sleep(STARTS_POLL_S)
        folders = {start.input for start in starts} - {""}
        if len(folders) > 1:
            raise InvariantError(f"source {self._uid}: its readers read several inputs: {', '.join(sorted(folders))}")
        if not folders:
            return False
        self._folder = folders.pop()
        self._rows_before = sum(start.rows_read for start in starts)
        self._owner = self._flow(claim_input_flow(self._folder, self._job_id, self._source.submission, uuid4().hex))
        self._base = self._flow(read_stream_flow(self._folder)).base
        self._last = self._flow(last_batch_flow(self._folder))
        self._unread.extend(self._flow(unread_batches_flow(self._folder, self._rows_before)))
        return True

    def _run_queries(self) -> None:
        """Until the query ends by itself, or the job does."""
        failures = 0
        while self._goes_on:
            before = self._last
            error = self._run_query()
            if error is None:
                if self._goes_on and self._has_spark:
                    self._flow(end_stream_flow(self._folder, self._job_id, self._source.submission, self._next_id, self._next_row))
                return
            failures = 1 if self._last is not before else failures + 1
            if isinstance(error, _FINAL) or failures >= QUERY_FAILURES_MAX:
                raise error
            log.warning("source %s: its query has failed, and is started again: %s", self._uid, error)
            self._stopping.wait(RETRY_S * 2 ** (failures - 1))

    @property
    def _has_spark(self) -> bool:
        """Else the query has ended with Spark, which says nothing of its input."""
        context = self._dataframe.sparkSession.sparkContext
        return context._jsc is not None and not context._jsc.sc().isStopped()

    def _run_query(self) -> BaseException | None:
        """Run the query to its end; returns what it failed with. A query that was told to stop has not failed.

        Raises CorruptStateError for a checkpoint without an id."""
        from pyspark.errors import PySparkException

        self._failed = None
        self._has_id.clear()
        self._check_metadata()
        query = self._start_query()
        self._query_id = query.id
        self._has_id.set()
        drop_at = time.monotonic() + DROP_S
        try:
            while not query.awaitTermination(POLL_S):
                if not self._goes_on:
                    self._stopping.set()
                    self._await_batch(BATCH_ENDS_S)  # an interrupted batch fills the log with traces
                    query.stop()
                    return None
                if time.monotonic() >= drop_at:
                    self._drop()
                    drop_at = time.monotonic() + DROP_S
        except PySparkException as error:
            failed: BaseException = self._failed or error
            return None if isinstance(failed, _StopQuery) else failed
        return self._stopped(query) if self._goes_on and self._has_spark else None

    def _stopped(self, query: StreamingQuery) -> QueryStoppedError | None:
        """What became of a query that ended without an error, and not because it was told to; None: it took all that was there.

        Spark ends one alone that takes what is available, and only behind a whole batch."""
        if self._source.available_now and self._failed is None and not self._is_in_batch:
            return None
        who = f"query {query.id}" + (f" ({query.name})" if query.name else "")
        return QueryStoppedError(
            f"source {self._uid}: its {who} was stopped by a call of stop(): the job waits, and goes on when it is started again; "
            "stop or cancel the job to end it",
            operator=self._uid,
            query=query.id,
        )

    def _check_metadata(self) -> None:
        """Spark names no file where it can't read the id of a checkpoint."""
        local = self.checkpoint
        if local is None:
            return
        try:
            with open(f"{local}/metadata", "rb") as file:
                content = file.read(METADATA_BYTES_MAX)
        except FileNotFoundError:
            return
        query_id_of(content, f"{local}/metadata")

    def _start_query(self) -> StreamingQuery:
        source, paths = self._source, StreamPaths(self._folder)
        checkpoint = source.checkpoint or f"file://{self._storage.root.rstrip('/')}/{paths.query}"
        writer = self._dataframe.writeStream.outputMode(source.output_mode).option("checkpointLocation", checkpoint)
        if source.available_now:
            writer = writer.trigger(availableNow=True)
        elif source.trigger_interval_ms is not None:
            writer = writer.trigger(processingTime=f"{source.trigger_interval_ms} milliseconds")
        return writer.foreachBatch(self._batch).start()

    def _drop(self) -> None:
        try:
            dropped = self._flow(drop_batches_flow(self._folder))
        except HoldfastError as error:  # nothing is dropped: it costs space, and no more
            log.warning("source %s: which of its batches are needed is not known: %s", self._uid, error)
            return
        if dropped:
            log.debug("source %s: %d batches that no snapshot needs were dropped", self._uid, dropped)

    def _flow(self, flow: Flow[T]) -> T:
        return run_flow(flow, self._storage)

    # ---------------------------------------------------------------------------------------------------------- batches

    def _batch(self, dataframe: DataFrame, batch_id: int) -> None:
        """One micro-batch, on a thread of Spark's."""
        try:
            self._enter_batch()
            try:
                self._seal(dataframe, batch_id)
            finally:
                self._leave_batch()
        except BaseException as error:
            self._failed = error
            raise

    def _enter_batch(self) -> None:
        with self._gate:
            while self._holds:
                self._check_goes_on()
                self._gate.wait(POLL_S)
            self._is_in_batch = True

    def _leave_batch(self) -> None:
        with self._gate:
            self._is_in_batch = False
            self._gate.notify_all()

    def _await_batch(self, timeout_s: float) -> bool:
        """Whether no batch is under way, at the latest behind this time."""
        with self._gate:
            return self._gate.wait_for(lambda: not self._is_in_batch, timeout_s)

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Hold the query at the entry of its next batch. Raises TimeoutError if the one under way does not end."""
        hold = object()
        with self._gate:
            self._holds.add(hold)
        try:
            if not self._await_batch(timeout_s):
                raise TimeoutError(f"source {self._uid}: its batch has not ended within {timeout_s:.0f} s")
            yield
        finally:
            with self._gate:
                self._holds.discard(hold)
                self._gate.notify_all()

    @property
    def storage(self) -> Storage:
        """The state directory."""
        return self._storage

    @property
    def uid(self) -> str:
        return self._uid

    @property
    def has_been_read(self) -> bool:
        """Whether all that is sealed was read, as last reported."""
        return bool(self._folder) and self._rows_before + self._job.rows_read(self._uid) >= self._next_row

    def position(self) -> StreamBase:
        """Of a query that is held: what another input that goes on from here needs to know."""
        return StreamBase(self._folder, self._next_id - 1, self._next_row, self._query_id)

    @property
    def checkpoint(self) -> str | None:
        """Local folder of the query's checkpoint; None: it is elsewhere."""
        if self._source.checkpoint is not None:
            return local_path(self._source.checkpoint)
        return f"{self._storage.root.rstrip('/')}/{StreamPaths(self._folder).query}"

    @property
    def _next_id(self) -> int:
        if self._last is not None:
            return self._last.batch_id + 1
        return 0 if self._base is None else self._base.batch_id + 1

    @property
    def _next_row(self) -> int:
        if self._last is not None:
            return self._last.end_row
        return 0 if self._base is None else self._base.rows

    def _seal(self, dataframe: DataFrame, batch_id: int) -> None:
        while not self._has_id.wait(POLL_S):
            self._check_goes_on()
        self._check_query(batch_id)
        if batch_id < self._next_id:
            # the first one counts; the query's own state and its watermark need the rows once more
            dataframe.write.format("noop").mode("overwrite").save()
            return
        self._await_room()
        path = StreamPaths(self._folder).manifest(batch_id)
        writer = uuid4().hex
        folder = f"{StreamPaths(self._folder).batch(batch_id)}/{writer}"
        files = write_chunks(dataframe, self._source.full_schema, self._root, folder, self._uid)
        manifest = make_batch_manifest(
            self._source.full_schema, files, writer, batch_id=batch_id, first_row=self._next_row, query_id=self._query_id
        )
        self._check_owner()
        sealed = self._flow(seal_flow(path, manifest))
        self._last = sealed
        self._check_query(batch_id)
        self._unread.append(sealed)

    def _check_query(self, batch_id: int) -> None:
        """Raise InputChangedError for a query that did not make the sealed batches, or has gone on elsewhere."""
        reason = None
        last = self._last or self._base
        next_id = self._next_id
        if last is not None and last.query_id != self._query_id:
            reason = f"batch {last.batch_id} is of query {last.query_id}, the checkpoint of the query is one of {self._query_id}"
        elif batch_id > next_id:
            reason = f"batch {next_id} is the next, the checkpoint of the query has gone on to batch {batch_id}"
        if reason is not None:
            message = f"source {self._uid}: {self._folder}: {reason}"
            raise InputChangedError(message, operator=self._uid, path=self._folder, reason=reason)

    def _check_owner(self) -> None:
        newest = self._flow(newest_owner_flow(self._folder))
        if newest is not None and newest[0] != self._owner:
            owner = newest[1]
            message = f"source {self._uid}: job {owner.job_id}, submission {owner.submission}, took its input {self._folder} over"
            raise FencedError(message, job=owner.job_id)

    def _await_room(self) -> None:
        """Wait while too much is sealed and not read."""
        source = self._source
        while True:
            self._check_goes_on()
            read = self._rows_before + self._job.rows_read(self._uid)
            while self._unread and self._unread[0].end_row <= read:
                self._unread.popleft()
            size = sum(manifest.size for manifest in self._unread)
            if len(self._unread) < source.backlog_batches_max and size < source.backlog_bytes_max:
                return
            time.sleep(ROOM_POLL_S)

    def _check_goes_on(self) -> None:
        if not self._goes_on:
            raise _StopQuery("the job has ended, or goes on without this driver")
