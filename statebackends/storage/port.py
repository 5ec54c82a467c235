"""The storage port: operations as records, and flows that yield them.

A *flow* is a generator that yields operations and receives their results; it does no I/O itself. Production drives it on a pool
thread with `run_flow`; the simulator steps it, and may kill it between any two operations. A flow may also yield a group of
independent flows (`InParallel`), which its driver runs at one time or in any order. Paths are relative to the storage root, with
`/`, never starting with `/` and never containing `..`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec

from holdfast.statebackends.storage.transfers import ONE_BY_ONE, TransferPool

Buffer: TypeAlias = bytes | bytearray | memoryview

T = TypeVar("T")
W = TypeVar("W")


class PutIfAbsent(msgspec.Struct, frozen=True):
    """Create `path` with `data`, atomically and durably, unless it exists. Result: bool, True if this call created it.

    Raises AmbiguousWriteError if storage can't say; the caller then reads back and compares."""

    path: str
    data: bytes


class SyncFile(msgspec.Struct, frozen=True):
    """Make the name of a file durable whose writer may have died before it was. Result: bool, False if there is no such file.

    Nothing is created: a file that was deleted meanwhile stays deleted, however long the caller slept since it read it."""

    path: str


class WriteFile(msgspec.Struct, frozen=True):
    """Write a file whose name is this writer's alone; durable when the operation returns. Result: int, bytes written."""

    path: str
    chunks: Sequence[Buffer]


class UploadFile(msgspec.Struct, frozen=True):
    """As `WriteFile`, from a local file. Result: (length, checksum) of the bytes copied."""

    local_path: str
    path: str


class DownloadFile(msgspec.Struct, frozen=True):
    """Copy `path` to a local file. Result: (length, checksum) of the bytes copied. Raises ObjectMissingError."""

    path: str
    local_path: str


class ReadFile(msgspec.Struct, frozen=True):
    """Result: bytes [offset, offset+length) of the file, fewer at its end; without a length all from `offset`.

    Raises ObjectMissingError."""

    path: str
    offset: int = 0
    length: int | None = None


class StatFile(msgspec.Struct, frozen=True):
    """Result: int, size in bytes; None if there is no such file; LINKED if one of its last `own_names` names is a symbolic link."""

    path: str
    own_names: int = 0


LINKED = -1


class ListFiles(msgspec.Struct, frozen=True):
    """Result: sorted list[str] of full paths of all files below the folder `prefix` (recursive). Not for hot paths."""

    prefix: str


class DescribeFiles(msgspec.Struct, frozen=True):
    """Result: list[FileFacts] of all files below the folder `prefix` (recursive), sorted by path. Not for hot paths."""

    prefix: str


class FileFacts(NamedTuple):
    """Facts about one file in a listing."""

    path: str
    """Full path, as in `ListFiles`."""
    size: int
    """Bytes."""
    modified_ms: int
    """Wall clock of the storage, ms since the epoch; never later than the moment at which the file became visible."""


class ListFolder(msgspec.Struct, frozen=True):
    """Result: sorted list[str] of names directly in `prefix`, folders with a trailing '/'. Empty for a missing folder."""

    prefix: str


class LinkFile(msgspec.Struct, frozen=True):
    """Make `target` a second name of `source`, without overwriting; durable when the operation returns. Result: bool, created.

    False if `target` exists with the same content; with another one InvariantError. Raises ObjectMissingError if neither exists."""

    source: str
    target: str


class DeleteFile(msgspec.Struct, frozen=True):
    """Delete a file. Result: bool, False if it did not exist."""

    path: str


class DeleteFolder(msgspec.Struct, frozen=True):
    """Delete a folder and all files below it; it may be missing. Result: int, files deleted."""

    prefix: str


Operation: TypeAlias = (
    PutIfAbsent
    | SyncFile
    | WriteFile
    | UploadFile
    | DownloadFile
    | ReadFile
    | StatFile
    | ListFiles
    | DescribeFiles
    | ListFolder
    | LinkFile
    | DeleteFile
    | DeleteFolder
)


class InParallel(msgspec.Struct, frozen=True):
    """A group of independent flows. Result: list of their results, in their order.

    If one fails, flows that have not begun don't begin, the others end or are closed between two operations, and the first failure
    in order is raised."""

    flows: Sequence[Generator[Operation | InParallel, Any, Any]]
    sizes: Sequence[int]
    """Bytes that each flow transfers, and holds in memory at most."""


Flow: TypeAlias = Generator[Operation | InParallel, Any, T]
PlainFlow: TypeAlias = Generator[Operation, Any, T]
"""A flow without groups, for drivers that perform one operation at a time: see `one_by_one`."""


def path_of(operation: Operation) -> str:
    """The path or folder of an operation; of a link, its target."""
    match operation:
        case ListFiles() | DescribeFiles() | ListFolder() | DeleteFolder():
            return operation.prefix
        case LinkFile():
            return operation.target
        case _:
            return operation.path


_VERBS: dict[type[msgspec.Struct], str] = {
    PutIfAbsent: "creating",
    SyncFile: "syncing",
    WriteFile: "writing",
    UploadFile: "writing",
    DownloadFile: "reading",
    ReadFile: "reading",
    StatFile: "looking for",
    ListFiles: "listing",
    DescribeFiles: "listing",
    ListFolder: "listing",
    LinkFile: "linking",
    DeleteFile: "deleting",
    DeleteFolder: "deleting",
}


def describe(operation: Operation) -> str:
    """What an operation does, in words for users: `creating j/chk-7/_claim`."""
    return f"{_VERBS[type(operation)]} {path_of(operation)}"


class Storage(Protocol):
    """One root of files: a directory, a prefix of a bucket, a simulated disk in a test. Thread-safe."""

    @property
    def root(self) -> str:
        """Printable location, for messages and `_metadata`: a directory's absolute path, or a URL."""

    def at(self, location: str) -> Storage:
        """Storage of another root, with the access of this one. `location`: a path or URL, as for `open_storage`.

        Raises InvalidConfigError for a location that this kind of storage does not reach."""

    def execute(self, operation: Operation) -> Any:
        """Perform one operation; its record describes the result. Raises StorageUnavailableError for I/O errors."""


@runtime_checkable
class ConcurrentStorage(Protocol):
    """Storage that is faster with several operations at one time."""

    @property
    def transfers(self) -> TransferPool:
        """Pool that bounds its operations, shared with other storages."""


@runtime_checkable
class CopyingStorage(Protocol):
    """Storage that may have no second names."""

    @property
    def copies_links(self) -> bool:
        """`LinkFile` copies the content, which takes as long as it is large, and is paid for."""


def copies_links(storage: Storage) -> bool:
    """Whether a second name of a file is a copy of it; False for a storage that is no CopyingStorage."""
    return isinstance(storage, CopyingStorage) and storage.copies_links


class DelegatingStorage:
    """Implements `Storage` over another one: a base for storages that do more with some operations. Storage of another root, and
    without a pool of its own for groups, is the other one's."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def root(self) -> str:
        return self._storage.root

    @property
    def copies_links(self) -> bool:
        return copies_links(self._storage)

    def at(self, location: str) -> Storage:
        return self._storage.at(location)

    def execute(self, operation: Operation) -> Any:
        return self._storage.execute(operation)


class InTurn(DelegatingStorage):
    """Another storage without threads for groups: for several small flows at one time, say, each on a thread of its own."""

    def at(self, location: str) -> Storage:
        return InTurn(self._storage.at(location))


def transfers_of(storage: Storage) -> TransferPool:
    """Pool for the groups of flows on a storage; ONE_BY_ONE for a storage that is no ConcurrentStorage."""
    return storage.transfers if isinstance(storage, ConcurrentStorage) else ONE_BY_ONE


def transfers_between(source: Storage, target: Storage) -> TransferPool:
    """Pool for copies from one storage to another: the larger one, or a pool of one transfer if either storage has such."""
    pools = transfers_of(source), transfers_of(target)
    return min(pools, key=_at_once) if min(map(_at_once, pools)) == 1 else max(pools, key=_at_once)


def _at_once(pool: TransferPool) -> int:
    return pool.transfers_max


def _go_on() -> None:
    pass


def perform(wanted: Operation | InParallel, storage: Storage, check: Callable[[], None] = _go_on) -> Any:
    """The result of an operation or a group. `check` is called before each flow of a group begins, and may raise."""
    if not isinstance(wanted, InParallel):
        return storage.execute(wanted)
    return transfers_of(storage).run([partial(run_flow, flow, storage) for flow in wanted.flows], wanted.sizes, check)


def run_flow(flow: Flow[T], storage: Storage) -> T:
    """Drive a flow to its end on this thread. An operation's error is raised at the flow's `yield`."""
    return drive(flow, lambda wanted: perform(wanted, storage))


def drive(flow: Generator[W, Any, T], fulfil: Callable[[W], Any]) -> T:
    """As `run_flow`, for flows that yield other things too: `fulfil` returns each result, or raises the error for the flow."""
    try:
        wanted = next(flow)
        while True:
            try:
                result = fulfil(wanted)
            except Exception as error:
                wanted = flow.throw(error)
            else:
                wanted = flow.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value


def one_by_one(flow: Flow[T], choose: Callable[[int], int] = lambda count: 0) -> PlainFlow[T]:
    """The flow without groups, for drivers that perform one operation at a time.

    `choose(count)` returns the index, among the `count` unfinished flows of a group, of the one that does the next operation."""
    try:
        wanted = next(flow)
        while True:
            try:
                result = (yield from _in_turns(wanted, choose)) if isinstance(wanted, InParallel) else (yield wanted)
            except Exception as error:
                wanted = flow.throw(error)
            else:
                wanted = flow.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        flow.close()


def _in_turns(group: InParallel, choose: Callable[[int], int]) -> PlainFlow[list[Any]]:
    flows = [one_by_one(flow, choose) for flow in group.flows]
    results: dict[int, Any] = {}
    asked: dict[int, Operation] = {}
    left = list(range(len(flows)))
    try:
        while left:
            index = left[choose(len(left)) if len(left) > 1 else 0]
            flow = flows[index]
            try:
                if index not in asked:
                    asked[index] = next(flow)
                try:
                    result = yield asked[index]
                except Exception as error:
                    asked[index] = flow.throw(error)
                else:
                    asked[index] = flow.send(result)
            except StopIteration as stop:
                results[index] = stop.value
                left.remove(index)
    finally:
        for index in left:
            flows[index].close()
    return [results[index] for index in range(len(flows))]
