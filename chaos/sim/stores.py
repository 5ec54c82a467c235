"""What one simulated process sees of storage: the product's port over the shared disk or object store, with faults in between.

Here an operation gets a name to it (who asked), a fate (what the faults make of it), and witnesses (the trace, the checkers):
they hear what happened at the store, which is not always what the caller is told. It takes no time; that is the pool's."""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, assert_never

import msgspec

from holdfast.chaos.checkers.observations import Observation, Stored, StoreView
from holdfast.chaos.sim.disk import CallHook, SimDisk
from holdfast.chaos.sim.kernel import Kernel, Process
from holdfast.chaos.sim.objectstore import SimObjectStore, read_local
from holdfast.chaos.sim.wire import SimS3
from holdfast.statebackends.errors import AmbiguousWriteError, HoldfastError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.port import Operation, Storage

EPOCH_MS = 1_700_000_000_000
"""Wall clock of the stores when a run begins."""

LATE_MS = 50
"""After how long a request arrives that its sender has given up, unless its fault says."""

Outcome: TypeAlias = Literal["ok", "fail", "partial", "lie", "late", "full", "unsynced"]


class StoreDecision(msgspec.Struct, frozen=True):
    """What becomes of one operation."""

    outcome: Outcome
    """ok; fail: nothing happens, and an error; partial: it stops on its way, leaving behind what it did; lie: it happens, and
    an error; late: an error, and it happens afterwards; full: nothing can be written (the rest works); unsynced: a new name is
    there and not durable, and an error (where names are durable at once: as lie, and what makes no name just happens)."""
    fraction: float = 0.0
    """Of a partial one: how far it gets, 0..1."""
    delay_ms: int = 0
    """Of a late one: after its sender has given it up. On the wire of its late request: after the operation has its answer."""


OK = StoreDecision("ok")


class StoreFaults(Protocol):
    """Whoever decides what goes wrong."""

    def decide(self, actor: str, role: str, operation: Operation) -> StoreDecision:
        """`actor` and `role` as in Process; asked once an operation, in their order."""


class Medium(Protocol):
    """What holds the bytes, shared by all processes: SimDisk, SimObjectStore."""

    before_call: CallHook | None
    power_losses: int
    calls_of_change: int
    """About how many calls the writing of a file takes."""

    def storage(self, location: str) -> Storage: ...

    def view(self, location: str) -> StoreView: ...

    def power_loss(self, rng: random.Random) -> None: ...


class SimStores:
    """The storage of a world: one medium, any number of roots."""

    def __init__(
        self,
        kernel: Kernel,
        faults: StoreFaults,
        observe: Callable[[Observation], None],
        root: str,
        *,
        objects: bool,
        wire: random.Random | None = None,
    ) -> None:
        """`objects`: on an object store instead of a disk; `wire`: through the product's S3 shell, faults drawn from here."""

        def wall_ms() -> int:
            return EPOCH_MS + kernel.now_ms

        self.root = root
        """Location of the state directory."""
        wired = SimS3(wall_ms, wire) if wire is not None else None
        self.medium: Medium = wired or (SimObjectStore(wall_ms) if objects else SimDisk(wall_ms))
        self._ports = _StorePorts(kernel, faults, observe, self.medium, wired)
        self._views: dict[str, StoreView] = {}

    def client(self, process: Process | None = None) -> StoreClient:
        """The state directory as a process sees it; None: whichever process runs."""
        return StoreClient(self._ports, self.medium.storage(self.root), process)

    def view(self, location: str) -> StoreView:
        view = self._views.get(location)
        if view is None:
            view = self._views[location] = self.medium.view(location)
        return view

    def power_loss(self, rng: random.Random) -> None:
        """Storage loses what was not durable; that every process dies of it is the caller's doing."""
        self.medium.power_loss(rng)


@dataclass(frozen=True, slots=True)
class _StorePorts:
    """What all clients of a world share."""

    kernel: Kernel
    faults: StoreFaults
    observe: Callable[[Observation], None]
    medium: Medium
    wire: SimS3 | None
    """The medium, if there is a wire in front of it."""


class StoreClient:
    """Implements `operations.Storage` for one process. What was asked for can be performed when the process is dead."""

    def __init__(self, ports: _StorePorts, storage: Storage, process: Process | None = None, home: str | None = None) -> None:
        self._ports = ports
        self._storage = storage
        self._process = process
        self._root = storage.root
        self._shown = "" if home in (None, storage.root) else f"{storage.root.rstrip('/')}/"
        """In front of paths in the trace."""
        self._home = home or storage.root
        self._view = ports.medium.view(storage.root)
        self._others: dict[str, StoreClient] = {}

    @property
    def root(self) -> str:
        return self._root

    def at(self, location: str) -> StoreClient:
        """Another root, for the same process; the same client for the same root."""
        storage = self._storage.at(location)
        if storage.root == self._root:
            return self
        known = self._others.get(storage.root)
        if known is None:
            known = self._others[storage.root] = StoreClient(self._ports, storage, self._process, self._home)
        return known

    def execute(self, operation: Operation) -> Any:
        """Perform one operation, or let it fail as the faults have it. Errors are those of LocalStorage."""
        ports = self._ports
        process = self._process or ports.kernel.current
        actor, role = ("nobody", "") if process is None else (process.name, process.role)
        decision = ports.faults.decide(actor, role, operation)
        if decision.outcome != "ok" and ports.wire is not None:
            return self._on_wire(ports.wire, actor, operation, decision)
        match decision.outcome:
            case "ok":
                return self._perform(actor, operation)
            case "fail":
                raise self._failed(actor, operation, _error(self._root, operation, errno.EIO))
            case "partial":
                with self._hooked(_Stopping(decision.fraction, self._calls(operation))):
                    return self._perform(actor, operation, "partial")
            case "full":
                with self._hooked(_full):
                    return self._perform(actor, operation, "full")
            case "unsynced":
                return self._unsynced(actor, operation)
            case "lie":
                self._perform(actor, operation, "lie")
                raise _unclear(self._root, operation)
            case "late":
                raise self._postponed(actor, operation, decision.delay_ms)
            case _:
                assert_never(decision.outcome)

    def _unsynced(self, actor: str, operation: Operation) -> Any:
        """Of what makes a name; all else happens as ever."""
        if not isinstance(operation, _NAMING):
            return self._perform(actor, operation)
        hook = _Unsynced()
        with self._hooked(hook):
            result = self._perform(actor, operation, "unsynced")
        if result and hook.is_object:
            raise _unclear(self._root, operation)
        return result  # it was found, and is durable now

    def _perform(self, actor: str, operation: Operation, note: str = "") -> Any:
        """At the store; what it did is read off the store, not off its result."""
        before = self._existing(operation)
        try:
            result = self._storage.execute(operation)
        except HoldfastError as error:
            self._tell(actor, operation, error, before, note)
            raise
        self._tell(actor, operation, result, before, note)
        return result

    def _failed(self, actor: str, operation: Operation, error: HoldfastError) -> HoldfastError:
        self._tell(actor, operation, error, self._existing(operation), "fail")
        return error

    def _postponed(self, actor: str, operation: Operation, delay_ms: int) -> HoldfastError:
        """Let it happen once its caller has given up; an operation that changes nothing just fails."""
        ports, losses = self._ports, self._ports.medium.power_losses
        if not _changes(operation):
            return self._failed(actor, operation, _error(self._root, operation, errno.ETIMEDOUT))
        sent = _as_sent(operation)

        error = _unclear(self._root, operation)

        def arrive() -> None:
            if ports.medium.power_losses != losses:
                return  # it was on its way within the machine
            with suppress(HoldfastError):  # nobody waits for the answer
                self._perform(actor, sent, "late")

        ports.kernel.after(delay_ms * 1000, arrive)
        self._tell(actor, operation, error, self._existing(operation), "postponed")
        return error

    def _on_wire(self, wire: SimS3, actor: str, operation: Operation, decision: StoreDecision) -> Any:
        """The requests of the operation go astray; what comes of it is up to the shell that sends them."""
        sent = _as_sent(operation) if decision.outcome == "late" else operation
        if decision.outcome == "unsynced":  # an object is durable with its name
            decision = msgspec.structs.replace(decision, outcome="lie")

        late: list[Callable[[], Any]] = []
        began_ms = wire.waited_ms
        try:
            with wire.troubled(decision.outcome, decision.fraction, late.append):
                return self._perform(actor, operation, "postponed" if decision.outcome == "late" else decision.outcome)
        finally:  # until then its sender waits, and asks again at this very moment of the schedule
            gone_us = int((wire.waited_ms - began_ms + decision.delay_ms) * 1_000)
            for act in late:
                self._ports.kernel.after(gone_us, partial(self._arrive, actor, sent, act))

    def _arrive(self, actor: str, operation: Operation, act: Callable[[], Any]) -> None:
        """One late request of an operation."""
        before = self._existing(operation)
        done: Any = act()
        if isinstance(operation, ops.PutIfAbsent | ops.LinkFile):  # it may be a request about another name: a trial of conditions
            done = self._existing(operation) != before
        self._tell(actor, operation, done, before, "late")

    def waited_us(self) -> int:
        """How long all callers together have waited on the wire, since the world began."""
        return 0 if self._ports.wire is None else int(self._ports.wire.waited_ms * 1_000)

    @contextmanager
    def _hooked(self, hook: CallHook) -> Iterator[None]:
        medium = self._ports.medium
        before, medium.before_call = medium.before_call, hook
        try:
            yield
        finally:
            medium.before_call = before

    # --------------------------------------------------------------------------------------------------------- witnesses

    def _existing(self, operation: Operation) -> tuple[str, ...]:
        """Those of the paths that the operation can add or remove which exist now."""
        match operation:
            case ops.PutIfAbsent() | ops.WriteFile() | ops.UploadFile() | ops.DeleteFile():
                path = operation.path
            case ops.LinkFile():
                path = operation.target
            case ops.DeleteFolder():
                return tuple(self._view.paths(operation.prefix))
            case _:
                return ()
        return () if self._view.size(path) is None else (path,)

    def _tell(self, actor: str, operation: Operation, result: Any, before: tuple[str, ...], note: str) -> None:
        ports = self._ports
        after = self._existing(operation)
        removed = tuple(path for path in before if self._view.size(path) is None) if before else before
        added = tuple(path for path in after if path not in before) if after else after
        said = f"{self._described(operation)} {_short(operation, result)}{'' if ports.kernel.opaque else _content(operation)}"
        ports.kernel.trace.add(actor, "store", f"{said} ({note})" if note else said)
        if isinstance(operation, _PLAIN_READS) and not note and not isinstance(result, Exception):
            return  # no news, and a third of all operations
        on_wire = ports.wire is not None
        ports.observe(Stored(ports.kernel.now_ms, actor, self._root, operation, result, removed, added, note, on_wire))

    def _described(self, operation: Operation) -> str:
        return f"{type(operation).__name__} {self._shown}{ops.path_of(operation)}"

    def _calls(self, operation: Operation) -> int:
        """About how many calls of the medium an operation makes."""
        if isinstance(operation, ops.DeleteFolder):
            return 2 + len(self._view.paths(operation.prefix))
        return self._ports.medium.calls_of_change if _changes(operation) else 1


# ------------------------------------------------------------------------------------------------------------------ trouble

_GROWING = frozenset({"create", "write", "link", "mkdir", "put", "copy"})


class _Stopping:
    """From a call on, each fails; the first one, if it writes, takes a part."""

    def __init__(self, fraction: float, calls: int) -> None:
        self._fraction = fraction
        self._left = int(fraction * calls)

    def __call__(self, name: str, path: str, size: int) -> int:
        self._left -= 1
        if self._left >= 0:
            return size
        if self._left == -1 and name == "write" and (part := int(self._fraction * size)):
            return part
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def _full(name: str, path: str, size: int) -> int:
    if name in _GROWING:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    return size


class _Unsynced:
    """The name of a new file is there, and its folder can't be synced."""

    def __init__(self) -> None:
        self.has_linked = False
        self.is_object = False
        """It is durable with its name."""

    def __call__(self, name: str, path: str, size: int) -> int:
        if name == "fsync_folder" and self.has_linked:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        self.has_linked = self.has_linked or name == "link"
        self.is_object = self.is_object or name in ("put", "copy")
        return size


_NAMING = (ops.PutIfAbsent, ops.WriteFile, ops.UploadFile, ops.LinkFile)

_PLAIN_READS = (ops.StatFile, ops.ReadFile, ops.DownloadFile, ops.ListFiles, ops.DescribeFiles)
"""What nobody wants to hear of when it went well: of folders that are listed one checker learns who looks there."""


def _changes(operation: Operation) -> bool:
    return not isinstance(
        operation, ops.DownloadFile | ops.ReadFile | ops.StatFile | ops.ListFiles | ops.DescribeFiles | ops.ListFolder
    )


def _as_sent(operation: Operation) -> Operation:
    """An operation with its bytes as they are now. Raises ObjectMissingError for an upload of nothing."""
    match operation:
        case ops.WriteFile():
            return ops.WriteFile(operation.path, (b"".join(operation.chunks),))
        case ops.UploadFile():
            return ops.WriteFile(operation.path, (read_local(operation.local_path),))
        case _:
            return operation


def _error(root: str, operation: Operation, code: int) -> HoldfastError:
    """As LocalStorage says that nothing happened."""
    path = ops.path_of(operation)
    message = f"{type(operation).__name__} {path} in {root}: {os.strerror(code)}"
    return StorageUnavailableError(message, path=path, errno=code)


def _unclear(root: str, operation: Operation) -> HoldfastError:
    """As LocalStorage says that something may have happened: of a name that may exist now, or of anything else."""
    if isinstance(operation, ops.PutIfAbsent | ops.WriteFile | ops.UploadFile | ops.LinkFile):
        target = f"{root.rstrip('/')}/{ops.path_of(operation)}"
        return AmbiguousWriteError(f"{target}: {os.strerror(errno.ETIMEDOUT)}", path=target)
    return _error(root, operation, errno.ETIMEDOUT)


def _content(operation: Operation) -> str:
    """What the bytes of a write add up to: a job whose values differ from run to run shows in its trace.

    Not of uploaded files, which are RocksDB's own and hold the time of day."""
    match operation:
        case ops.PutIfAbsent():
            return f" {zlib.crc32(operation.data):08x}"
        case ops.WriteFile():
            total = 0
            for chunk in operation.chunks:
                total = zlib.crc32(chunk, total)
            return f" {total:08x}"
        case _:
            return ""


def _short(operation: Operation, result: Any) -> str:
    """A result in a word: the same in every process, so no sizes and no content."""
    if isinstance(result, Exception):
        return type(result).__name__
    match operation:
        case ops.PutIfAbsent() | ops.LinkFile():
            return "created" if result else "exists"
        case ops.StatFile():
            return "missing" if result is None else "exists"
        case ops.ListFiles() | ops.DescribeFiles() | ops.ListFolder():
            return f"{len(result)} names"
        case ops.DeleteFile():
            return "deleted" if result else "missing"
        case ops.DeleteFolder():
            return f"{result} files"
        case _:
            return "done"
