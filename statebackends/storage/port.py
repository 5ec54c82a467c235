"""The storage port: operations as records, and flows that yield them.

A *flow* is a generator that yields operations and is sent their results; it does no I/O itself. Production drives it
on a pool thread with `run_flow`, the simulator steps it and may kill it between any two operations. A *grouped* flow may also
yield flows that need nothing of each other; whoever drives it runs them at one time, or in any order. Paths are
relative to the storage root, with `/`, never starting with `/` and never containing `..`."""

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
    """Create `path` with `data`, durable and whole, unless it exists. Result: bool, True if this call created it.

    Raises AmbiguousWriteError when storage can't tell; the caller reads back and compares."""

    path: str
    data: bytes


class WriteFile(msgspec.Struct, frozen=True):
    """Write a file whose name nobody else uses, durable when the operation returns. Result: int, bytes written."""

    path: str
    chunks: Sequence[Buffer]


class UploadFile(msgspec.Struct, frozen=True):
    """Copy a local file to `path`, durable when the operation returns. Result: (length, checksum)."""

    local_path: str
    path: str


class DownloadFile(msgspec.Struct, frozen=True):
    """Copy `path` to a local file. Result: (length, checksum) of the bytes copied. Raises ObjectMissingError."""

    path: str
    local_path: str


class ReadFile(msgspec.Struct, frozen=True):
    """Result: bytes of the file, or of [offset, offset+length). Raises ObjectMissingError."""

    path: str
    offset: int = 0
    length: int | None = None


class StatFile(msgspec.Struct, frozen=True):
    """Result: int, size in bytes, or None if the path does not exist; LINKED for one that leads elsewhere where it must not."""

    path: str
    own_names: int = 0
    """So many of the last names in the path must be no symbolic links."""


LINKED = -1


class ListFiles(msgspec.Struct, frozen=True):
    """Result: sorted list[str] of full paths of all files below the folder `prefix` (recursive). Not for hot paths."""

    prefix: str


class DescribeFiles(msgspec.Struct, frozen=True):
    """Result: list[FileFacts] of all files below the folder `prefix` (recursive), sorted by path. Not for hot paths."""

    prefix: str


class FileFacts(NamedTuple):
    """What a listing says of one file."""

    path: str
    """Full, as `ListFiles` gives it."""
    size: int
    """Bytes."""
    modified_ms: int
    """Wall clock of the storage: never later than the moment at which the file could first be seen."""


class ListFolder(msgspec.Struct, frozen=True):
    """Result: sorted list[str] of names directly in `prefix`, folders with a trailing '/'. Empty when it is missing."""

    prefix: str


class LinkFile(msgspec.Struct, frozen=True):
    """Make `target` a second name of `source` without overwriting; fine if target already is it. Result: bool created.

    Durable when the operation returns. Raises ObjectMissingError if source is missing and target does not exist."""

    source: str
    target: str


class DeleteFile(msgspec.Struct, frozen=True):
    """Result: bool, False if it was not there."""

    path: str


class DeleteFolder(msgspec.Struct, frozen=True):
    """Delete a folder and all below it; fine if missing. Result: int, files deleted."""

    prefix: str


Operation: TypeAlias = (
    PutIfAbsent
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
    """Flows that need nothing of each other. Result: list of their results, in their order.

    If one fails, those that have not begun never do, the others end or are closed between two operations, and the first failure
    in order is raised."""

    flows: Sequence[Generator[Operation | InParallel, Any, Any]]
    sizes: Sequence[int]
    """Bytes that each transfers: so much is in memory at most while it runs."""


Flow: TypeAlias = Generator[Operation | InParallel, Any, T]
PlainFlow: TypeAlias = Generator[Operation, Any, T]
"""Without groups: for whoever performs one operation at a time, see `one_by_one`."""


def path_of(operation: Operation) -> str:
    """The path, or the folder, that an operation is about; of a link, its target."""
    match operation:
        case ListFiles() | DescribeFiles() | ListFolder() | DeleteFolder():
            return operation.prefix
        case LinkFile():
            return operation.target
        case _:
            return operation.path


class Storage(Protocol):
    """One root of files: a directory, a prefix of a bucket, a simulated disk in a test. Thread-safe."""

    @property
    def root(self) -> str:
        """Printable location, for messages and for `_metadata`; a directory's absolute path or a URL."""

    def at(self, location: str) -> Storage:
        """Storage of another root, reached as this one is. `location` is a path or a URL, as in `open_storage`.

        Raises InvalidConfigError for one that this kind of storage does not reach."""

    def execute(self, operation: Operation) -> Any:
        """Perform one operation; its result is described on the record. Raises StorageUnavailableError on I/O errors."""


@runtime_checkable
class ConcurrentStorage(Protocol):
    """Storage that gains by several operations at one time."""

    @property
    def transfers(self) -> TransferPool:
        """The bounds that they share with others."""


class InTurn:
    """Implements `Storage`: another one, for flows whose groups are not worth threads of their own.

    Of several small flows that run at one time, say, each on its own thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def root(self) -> str:
        return self._storage.root

    def at(self, location: str) -> Storage:
        return InTurn(self._storage.at(location))

    def execute(self, operation: Operation) -> Any:
        return self._storage.execute(operation)


def transfers_of(storage: Storage) -> TransferPool:
    """How many operations of a group run at one time on a storage: one, unless it says otherwise."""
    return storage.transfers if isinstance(storage, ConcurrentStorage) else ONE_BY_ONE


def transfers_between(source: Storage, target: Storage) -> TransferPool:
    """How many copies from the one to the other run at one time: one, if either says no more."""
    pools = transfers_of(source), transfers_of(target)
    return min(pools, key=_at_once) if min(map(_at_once, pools)) == 1 else max(pools, key=_at_once)


def _at_once(pool: TransferPool) -> int:
    return pool.transfers_max


def _go_on() -> None:
    pass


def perform(wanted: Operation | InParallel, storage: Storage, check: Callable[[], None] = _go_on) -> Any:
    """The result of an operation, or of a group. `check` is called before each flow of a group begins, and may raise."""
    if not isinstance(wanted, InParallel):
        return storage.execute(wanted)
    return transfers_of(storage).run([partial(run_flow, flow, storage) for flow in wanted.flows], wanted.sizes, check)


def run_flow(flow: Flow[T], storage: Storage) -> T:
    """Drive a flow to its end on this thread; errors of an operation are thrown into the flow at its yield."""
    return drive(flow, lambda wanted: perform(wanted, storage))


def drive(flow: Generator[W, Any, T], fulfil: Callable[[W], Any]) -> T:
    """As `run_flow`, for flows that also yield what is no operation: `fulfil` gives each result, or raises what the flow gets."""
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
    """The same flow without groups, for drivers that perform one operation at a time.

    `choose` says which of so many flows of a group, in their order, goes on by one operation."""
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
