"""Writing of a canonical savepoint (or an export): a folder claimed by one writer, its files, and the sort of rows.

A conditional create claims the folder, so that two writers never share one. A folder that is not empty is never written into, and
it is no snapshot before its last file exists. A writer that fails deletes its files. Tables are Parquet files. Rows in any order
are sorted by key group first: in memory up to HELD_BYTES_MAX, else through scratch files of some key groups each; on output the
rows of 1/BUCKETS of the key groups are in memory. How rows are checked is for conform.py."""

from __future__ import annotations

import signal
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    HoldfastError,
    InvalidConfigError,
    InvariantError,
    ObjectMissingError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import FileHandle, InlineHandle, KeyGroupRange, OperatorListHandle, StateMeta
from holdfast.statebackends.layout import KEY_GROUP, METADATA_NAME, NAMESPACE, POSITION, UNFINISHED_NAME, file_name
from holdfast.statebackends.serialization.keys import key_columns
from holdfast.statebackends.snapshot.tables import restrict, sort_by_key_group
from holdfast.statebackends.state_processor.conform import StateLayout
from holdfast.statebackends.state_processor.reading import PartReader, scratch_errors
from holdfast.statebackends.storage.flows import delete_files
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    Flow,
    InParallel,
    ListFiles,
    ListFolder,
    PutIfAbsent,
    ReadFile,
    StatFile,
    Storage,
    UploadFile,
    perform,
    run_flow,
)

CLEAR_TRIES_MAX = 6
"""Unclear answers in a row before a writer gives up, and leaves what it wrote."""


class ClaimedFolder:
    """A folder claimed by this writer; made by `claimed_folder`."""

    def __init__(self, storage: Storage, folder: str, purpose: str, nonce: str) -> None:
        self.location = f"{storage.root.rstrip('/')}/{folder}"
        self._storage = storage
        self._folder = folder
        self._claim = msgspec.json.encode({"purpose": purpose, "nonce": nonce})
        self._names: list[str] = []
        self._marks: list[str] = []
        self._entered = self._finished = self._unknown = False

    def upload(self, local: str, name: str, *, expected: tuple[int, str] | None = None) -> int:
        """Copy a local file into the folder; returns its bytes. Any thread. `expected`: its length and checksum.

        Raises StorageUnavailableError, also if other bytes were written than expected."""
        self._names.append(name)
        found: tuple[int, str] = self._storage.execute(UploadFile(local, self._path(name)))
        if expected is not None and found != expected:
            raise StorageUnavailableError(f"{self.location}/{name}: other bytes were written than read", path=self._path(name))
        return found[0]

    def upload_all(self, files: Sequence[tuple[str, str, int]]) -> None:
        """`upload` of several (local file, name, bytes) at one time. Raises StorageUnavailableError."""
        self._names += [name for _, name, _ in files]
        flows = [self._upload(local, name, size) for local, name, size in files]
        perform(InParallel(flows, [size for *_, size in files]), self._storage)

    def _upload(self, local: str, name: str, size: int) -> Flow[None]:
        length, _ = yield UploadFile(local, self._path(name))
        if length != size:
            raise StorageUnavailableError(f"{self.location}/{name}: {length} bytes were written of {size}", path=self._path(name))

    def store(self, local: str, name: str) -> FileHandle:
        """As `upload`; returns the handle of the file."""
        self._names.append(name)
        length, checksum = self._storage.execute(UploadFile(local, self._path(name)))
        return FileHandle(name, length, checksum)

    def expect(self, mark: str) -> None:
        """Expect files of other processes with this mark in their names; those not admitted are deleted in the end.

        A process that lives on may write one later, which no handle names."""
        self._marks.append(mark)

    def admit(self, name: str, length: int, checksum: str) -> FileHandle:
        """Take over a file of an expected mark. Raises StorageUnavailableError if it is missing or has another length."""
        path = self._path(name)
        found: int | None = self._storage.execute(StatFile(path))
        if found != length:
            what = "is not there" if found is None else f"has {found} bytes instead of {length}"
            raise StorageUnavailableError(
                f"{self.location}/{name} {what}: do all processes that write see the same {self.location}?", path=path
            )
        self._names.append(name)
        return FileHandle(name, length, checksum)

    def _sweep(self, kept: Collection[str]) -> None:
        """Delete files of expected marks other than `kept`."""
        if not self._marks:
            return
        names = [path.removeprefix(f"{self._folder}/") for path in self._storage.execute(ListFiles(self._folder))]
        self._delete([name for name in names if name not in kept and any(mark in name for mark in self._marks)])

    def _delete(self, names: Iterable[str]) -> None:
        run_flow(delete_files(self._path(name) for name in names), self._storage)

    def finish(self, name: str, content: bytes) -> None:
        """Delete the claim and create the last file.

        Raises AmbiguousWriteError if storage can't say whether it exists; then nothing is deleted."""
        self._sweep(self._names)
        self._storage.execute(DeleteFile(self._path(UNFINISHED_NAME)))
        self._names.append(name)
        path = self._path(name)
        try:
            created = self._storage.execute(PutIfAbsent(path, content))
        except StorageUnavailableError as error:
            self._unknown = isinstance(error, AmbiguousWriteError)
            if not self._holds(name, content):
                raise
            self._make_durable(path, content)
            created = True
        if not created and not self._holds(name, content):
            self._names.remove(name)
            raise InvalidConfigError(f"{self.location} was written into by somebody else: {name} exists", path=path)
        self._finished = True

    def _make_durable(self, path: str, content: bytes) -> None:
        """A file that is there behind an unclear answer may be taken away by a power loss: only a clear one says that it lasts."""
        for attempt in range(1, CLEAR_TRIES_MAX + 1):
            try:
                self._storage.execute(PutIfAbsent(path, content))
            except AmbiguousWriteError:
                if attempt == CLEAR_TRIES_MAX:
                    raise
            else:
                return

    def _enter(self) -> None:
        self._refuse_used(self._listed())
        try:
            created = self._storage.execute(PutIfAbsent(self._path(UNFINISHED_NAME), self._claim))
        except StorageUnavailableError:
            if not self._holds(UNFINISHED_NAME, self._claim):
                raise
            created = True
        if not created and not self._holds(UNFINISHED_NAME, self._claim):
            self._refuse_used([UNFINISHED_NAME])

    def _refuse_used(self, names: list[str]) -> None:
        if UNFINISHED_NAME in names:
            raise InvalidConfigError(
                f"{self.location} is being written by somebody else, or its writer died: delete it then, or name another folder",
                path=self._folder,
            )
        if names:
            what = "holds a snapshot" if METADATA_NAME in names else f"is not empty ({names[0]})"
            raise InvalidConfigError(f"{self.location} {what}: nothing is overwritten, name a new folder", path=self._folder)

    def abandon(self) -> None:
        """Delete all files of this writer, finished or not; idempotent. Raises StorageUnavailableError."""
        if not self._entered and not self._holds(UNFINISHED_NAME, self._claim):
            return  # not claimed; an interrupted claim may exist, and is deleted below
        self._exit(KeyboardInterrupt())

    def _exit(self, error: BaseException) -> None:
        """Delete this writer's files: the newest first, since it may make the rest a snapshot, and the claim last.

        A failure is added to the message of `error`."""
        if self._unknown:
            return
        try:
            self._sweep(())
            self._delete(self._names[-1:])
            self._delete(reversed(self._names[:-1]))
            self._delete([UNFINISHED_NAME])
            if not self._storage.execute(ListFiles(self._folder)):
                self._storage.execute(DeleteFolder(self._folder))
            self._names.clear()
            self._marks.clear()
            self._entered = False
        except HoldfastError as failure:
            if isinstance(error, HoldfastError):
                error.message += f"; and {self.location} could not be emptied again: {failure}"

    def _listed(self) -> list[str]:
        names: list[str] = self._storage.execute(ListFolder(self._folder))
        return names

    def _holds(self, name: str, content: bytes) -> bool:
        try:
            existing: bytes = self._storage.execute(ReadFile(self._path(name), 0, len(content) + 1))
        except ObjectMissingError:
            return False
        return existing == content

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


@contextmanager
def claimed_folder(storage: Storage, folder: str, purpose: str, nonce: str = "") -> Iterator[ClaimedFolder]:
    """Claim a folder that is new or empty; the block must call `finish`.

    `nonce`: unique to this writer; drawn unless given. Raises InvalidConfigError for a folder in use. If the block raises, the
    folder is as it was before."""
    target = ClaimedFolder(storage, folder, purpose, nonce or uuid.uuid4().hex)
    _newest.append(target)
    try:
        target._enter()
        target._entered = True
        target._refuse_used([name for name in target._listed() if name != UNFINISHED_NAME])  # another writer may just have finished
        yield target
        if not target._finished:
            raise InvariantError(f"{target.location} was not finished")
    except BaseException as error:
        with uninterrupted():
            if target._entered:
                target._exit(error)
            elif not isinstance(error, Exception):
                target.abandon()
        raise


_newest: deque[ClaimedFolder] = deque(maxlen=8)
"""Newest writers of this process, for a command that is interrupted after they finished, and before it has reported that."""


def abandon_newest() -> None:
    """Delete the files of this process's newest writers: for a process that runs one command and ends."""
    while _newest:
        _newest.pop().abandon()


def forget_newest() -> None:
    """Keep the files of the newest writers, whatever happens later in this process."""
    _newest.clear()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C within, so that deletions are completed. Without effect on other threads than the main one, which get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


GROUP_ROWS = 1 << 17
"""Rows of one row group, which is held in memory."""
INLINE_BYTES = 20_480
"""Bytes below which operator state is inline; a job's default."""


def write_table(local: str, schema: pa.Schema, tables: Iterable[pa.Table | pa.RecordBatch]) -> None:
    """Write rows in key-group order to a local Parquet file, with the schema alone if there are none."""
    with scratch_errors(local), pq.ParquetWriter(local, schema, compression="zstd", store_schema=True) as writer:
        held: list[pa.Table] = []
        for rows in tables:
            held.append(rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows], schema))
            if sum(table.num_rows for table in held) >= GROUP_ROWS:
                writer.write_table(pa.concat_tables(held), row_group_size=GROUP_ROWS)
                held = []
        writer.write_table(pa.concat_tables(held) if held else schema.empty_table(), row_group_size=GROUP_ROWS)


class TableFiles:
    """Writer of the files of one savepoint, each with a new name."""

    def __init__(self, target: ClaimedFolder, scratch: PartReader) -> None:
        self._target = target
        self._scratch = scratch
        self._count = 0

    def name(self, operator: str, subtask: int, what: str) -> str:
        """A new file name."""
        self._count += 1
        return f"{file_name(operator)}-{subtask}-{self._count}-{file_name(what)}"

    def write(
        self, operator: str, subtask: int, state: str, schema: pa.Schema, tables: Iterable[pa.Table | pa.RecordBatch]
    ) -> FileHandle:
        """Write one state's share of one subtask, rows in key-group order; a file with the schema alone if there are none."""
        local = self._scratch.new_path("table")
        write_table(local, schema, tables)
        handle = self._target.store(local, self.name(operator, subtask, f"{state}.parquet"))
        self._scratch.discard(local)
        return handle

    def write_list(self, operator: str, subtask: int, meta: StateMeta, entries: Sequence[bytes]) -> OperatorListHandle:
        """Write one operator state's share of one subtask."""
        encoded = msgspec.msgpack.encode(entries)
        if len(encoded) < INLINE_BYTES:
            return OperatorListHandle(meta, InlineHandle(encoded), len(entries))
        local = self._scratch.new_path("list")
        with scratch_errors(local):
            Path(local).write_bytes(encoded)
        handle = self._target.store(local, self.name(operator, subtask, f"list-{meta.name}"))
        self._scratch.discard(local)
        return OperatorListHandle(meta, handle, len(entries))


BUCKETS = 64
HELD_BYTES_MAX = 64 << 20


class KeyGroupSorter:
    """Sort of one state's rows by key group. For one thread. Its files go when the caller's scratch folder is deleted."""

    def __init__(self, layout: StateLayout, new_path: Callable[[str], str], *, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._layout = layout
        self._new_path = new_path
        self._held_bytes_max = held_bytes_max
        self._count = min(BUCKETS, layout.max_parallelism)
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._rows = 0
        self._files: dict[int, tuple[str, pa.NativeFile, pa.ipc.RecordBatchStreamWriter]] = {}
        self._finished = False

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Add rows that `StateLayout.conform` accepts; raises as it does."""
        if batch.num_rows:
            table = self._layout.conform(batch, self._rows)
            self._rows += batch.num_rows
            self._held.append(table)
            self._held_bytes += table.nbytes
            if self._held_bytes > self._held_bytes_max:
                self._spill()

    @property
    def rows(self) -> int:
        return self._rows

    def tables(self, groups: KeyGroupRange) -> Iterator[pa.Table]:
        """The rows of some key groups, in their order; list elements by position, and numbered from 0 again.

        No rows may be added afterwards. Raises InvalidKeyError for two rows of one identity."""
        self._finish()
        for bucket in range(self._count):
            own = self._groups_of(bucket)
            wanted = own.intersection(groups)
            if len(wanted):
                table = restrict(sort_by_key_group(self._load(bucket)), wanted)
                if table.num_rows:
                    self._layout.check_distinct(table)
                    yield self._numbered(table) if self._layout.meta.kind == "list" else table

    def _groups_of(self, bucket: int) -> KeyGroupRange:
        size = self._layout.max_parallelism
        return KeyGroupRange(-(-bucket * size // self._count), -(-(bucket + 1) * size // self._count))

    def _spill(self) -> None:
        table = pa.concat_tables(self._held)
        self._held, self._held_bytes = [], 0
        groups = table.column(KEY_GROUP).to_numpy().astype(np.int64)
        buckets = groups * self._count // self._layout.max_parallelism
        order = np.argsort(buckets, kind="stable")
        table, buckets = table.take(pa.array(order)), buckets[order]
        cuts = np.searchsorted(buckets, np.arange(self._count + 1))
        for bucket in range(self._count):
            part = table.slice(cuts[bucket], cuts[bucket + 1] - cuts[bucket])
            if part.num_rows:
                self._write(bucket, part)

    def _write(self, bucket: int, part: pa.Table) -> None:
        if bucket not in self._files:
            path = self._new_path("sorting")
            with scratch_errors(path):
                sink = pa.OSFile(path, "wb")
                self._files[bucket] = path, sink, pa.ipc.new_stream(sink, self._layout.schema)
        path, _, writer = self._files[bucket]
        with scratch_errors(path):
            writer.write_table(part)

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if self._files and self._held:
            self._spill()
        for path, sink, writer in self._files.values():
            with scratch_errors(path):
                writer.close()
                sink.close()

    def _load(self, bucket: int) -> pa.Table:
        if not self._files:
            table = pa.concat_tables(self._held) if self._held else self._layout.schema.empty_table()
            return restrict(table, self._groups_of(bucket))
        if bucket not in self._files:
            return self._layout.schema.empty_table()
        path, _, _ = self._files[bucket]
        with scratch_errors(path), pa.OSFile(path) as source:
            return pa.ipc.open_stream(source).read_all()

    def _numbered(self, table: pa.Table) -> pa.Table:
        """List elements of one key side by side, numbered from 0."""
        names = [*key_columns(self._layout.key_type), NAMESPACE]
        order = pc.sort_indices(table, [(name, "ascending") for name in (KEY_GROUP, *names, POSITION)])
        table = table.take(order)
        entries = self._layout.lists(table)
        starts = np.fromiter((row == 0 or entries[row] != entries[row - 1] for row in range(len(entries))), bool, len(entries))
        firsts = np.flatnonzero(starts)
        counts = np.diff([*firsts, len(entries)])
        positions = np.arange(len(entries)) - np.repeat(firsts, counts)
        index = table.schema.get_field_index(POSITION)
        return table.set_column(index, self._layout.schema.field(POSITION), pa.array(positions.astype(np.int32)))
