"""Storage as one simulated process uses it: the product's port over the shared disk or object store, with faults in between.

An operation gets an actor, a fate drawn by the faults, and witnesses (the trace, the checkers), which see its effect at the store;
the caller's answer may differ. Delays are the pool's."""

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
"""Wall clock of the stores at the start of a run."""

LATE_MS = 50
"""Delay of a request that its sender has given up, unless its fault sets one."""

Outcome: TypeAlias = Literal["ok", "fail", "partial", "lie", "late", "full", "unsynced"]


class StoreDecision(msgspec.Struct, frozen=True):
    """The fate of one operation."""

    outcome: Outcome
    """ok; fail: no effect, and an error; partial: an interrupted effect, and an error; lie: the full effect, and an error; late: an
    error, and the effect afterwards; full: nothing can be written (the rest works); unsynced: a new name that is not durable, and
    an error (where names are durable at once: as lie; operations that make no name are unaffected)."""
    fraction: float = 0.0
    """Share of a partial operation that happens, 0..1."""
    delay_ms: int = 0
    """Delay of a late one, after its sender has given it up; on the wire that of its late request, after the operation's answer."""


OK = StoreDecision("ok")


class StoreFaults(Protocol):
    """Source of decisions."""

    def decide(self, actor: str, role: str, operation: Operation) -> StoreDecision:
        """`actor` and `role` as in Process; called once an operation, in their order."""


class Medium(Protocol):
    """The bytes, shared by all processes: SimDisk, SimObjectStore."""

    before_call: CallHook | None
    power_losses: int
    calls_of_change: int
    """Approximate number of calls for a new file."""

    def storage(self, location: str) -> Storage: ...

    def view(self, location: str) -> StoreView: ...

    def fork(self, now_ms: Callable[[], int]) -> Medium: ...

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
        begins_as: Medium | None = None,
    ) -> None:
        """`objects`: on an object store instead of a disk. `wire`: through the product's S3 shell, with faults drawn from this
        stream. `begins_as`: with what is on this medium, and on one of its kind, whatever the two others say."""

        def wall_ms() -> int:
            return EPOCH_MS + kernel.now_ms

        self.root = root
        """Location of the state directory."""
        wired = SimS3(wall_ms, wire) if wire is not None and begins_as is None else None
        self.medium: Medium = wired or (SimObjectStore(wall_ms) if objects else SimDisk(wall_ms))
        if begins_as is not None:
            self.medium = begins_as.fork(wall_ms)
        self._ports = _StorePorts(kernel, faults, observe, self.medium, wired)
        self._views: dict[str, StoreView] = {}

    def client(self, process: Process | None = None) -> StoreClient:
        """The state directory as a process sees it; None: as the running process does."""
        return StoreClient(self._ports, self.medium.storage(self.root), process)

    def view(self, location: str) -> StoreView:
        view = self._views.get(location)
        if view is None:
            view = self._views[location] = self.medium.view(location)
        return view

    def fork(self) -> Medium:
        """What is stored now; it stays as it is."""
        now_ms = EPOCH_MS + self._ports.kernel.now_ms
        return self.medium.fork(lambda: now_ms)

    def power_loss(self, rng: random.Random) -> None:
        """Storage loses what was not durable; the death of all processes is the caller's matter."""
        self.medium.power_loss(rng)


@dataclass(frozen=True, slots=True)
class _StorePorts:
    """Ports shared by all clients of a world."""

    kernel: Kernel
    faults: StoreFaults
    observe: Callable[[Observation], None]
    medium: Medium
    wire: SimS3 | None
    """The medium, if requests reach it over a simulated wire."""


class StoreClient:
    """Implements `operations.Storage` for one process. A request can be performed after the process's death."""

    def __init__(self, ports: _StorePorts, storage: Storage, process: Process | None = None, home: str | None = None) -> None:
        self._ports = ports
        self._storage = storage
        self._process = process
        self._root = storage.root
        self._shown = "" if home in (None, storage.root) else f"{storage.root.rstrip('/')}/"
        """Prefix of paths in the trace."""
        self._home = home or storage.root
        self._view = ports.medium.view(storage.root)
        self._others: dict[str, StoreClient] = {}

    @property
    def root(self) -> str:
        return self._root

    def at(self, location: str) -> StoreClient:
        """The client of another root for the same process; one client a root."""
        storage = self._storage.at(location)
        if storage.root == self._root:
            return self
        known = self._others.get(storage.root)
        if known is None:
            known = self._others[storage.root] = StoreClient(self._ports, storage, self._process, self._home)
        return known

    def execute(self, operation: Operation) -> Any:
        """Perform one operation, or let the faults fail it. Errors are those of LocalStorage."""
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
        """Perform an operation that makes a name without making it durable; others are performed as usual."""
        if not isinstance(operation, _NAMING):
            return self._perform(actor, operation)
        hook = _Unsynced()
        with self._hooked(hook):
            result = self._perform(actor, operation, "unsynced")
        if result and hook.is_object:
            raise _unclear(self._root, operation)
        return result  # found, and durable now

    def _perform(self, actor: str, operation: Operation, note: str = "") -> Any:
        """Perform the operation; its effect is read off the store, not off its result."""
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
        """Schedule the effect after its caller has given up; an operation that changes nothing just fails."""
        ports, losses = self._ports, self._ports.medium.power_losses
        if not _changes(operation):
            return self._failed(actor, operation, _error(self._root, operation, errno.ETIMEDOUT))
        sent = _as_sent(operation)

        error = _unclear(self._root, operation)

        def arrive() -> None:
            if ports.medium.power_losses != losses:
                return  # it was on its way within the machine
            with suppress(HoldfastError):  # no caller waits for the answer
                self._perform(actor, sent, "late")

        ports.kernel.after(delay_ms * 1000, arrive)
        self._tell(actor, operation, error, self._existing(operation), "postponed")
        return error

    def _on_wire(self, wire: SimS3, actor: str, operation: Operation, decision: StoreDecision) -> Any:
        """Perform the operation through the S3 shell, with faults in its requests; the shell decides what the answer is."""
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
        """Perform one late request of an operation."""
        before = self._existing(operation)
        done: Any = act()
        if isinstance(operation, ops.PutIfAbsent | ops.LinkFile):  # it may be a request about another name: a trial of conditions
            done = self._existing(operation) != before
        self._tell(actor, operation, done, before, "late")

    def waited_us(self) -> int:
        """Sum of all callers' waits on the wire since the world began, us."""
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
        """Of the paths that the operation can add or remove, those that exist."""
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
            return  # a third of all operations, without a witness
        on_wire = ports.wire is not None
        ports.observe(Stored(ports.kernel.now_ms, actor, self._root, operation, result, removed, added, note, on_wire))

    def _described(self, operation: Operation) -> str:
        return f"{type(operation).__name__} {self._shown}{ops.path_of(operation)}"

    def _calls(self, operation: Operation) -> int:
        """Approximate number of the medium's calls for an operation."""
        if isinstance(operation, ops.DeleteFolder):
            return 2 + len(self._view.paths(operation.prefix))
        return self._ports.medium.calls_of_change if _changes(operation) else 1


# ------------------------------------------------------------------------------------------------------------------ trouble

_GROWING = frozenset({"create", "write", "link", "mkdir", "put", "copy"})


class _Stopping:
    """From a call on, each fails; the first one, if it writes, writes a part."""

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
    """The name of a new file exists, and its folder can't be synced."""

    def __init__(self) -> None:
        self.has_linked = False
        self.is_object = False
        """Names are durable at once."""

    def __call__(self, name: str, path: str, size: int) -> int:
        if name == "fsync_folder" and self.has_linked:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        self.has_linked = self.has_linked or name == "link"
        self.is_object = self.is_object or name in ("put", "copy")
        return size


_NAMING = (ops.PutIfAbsent, ops.WriteFile, ops.UploadFile, ops.LinkFile)

_PLAIN_READS = (ops.StatFile, ops.ReadFile, ops.DownloadFile, ops.ListFiles, ops.DescribeFiles)
"""Reads without a witness when they succeed. Listings of folders have one: a checker follows sweeps."""


def _changes(operation: Operation) -> bool:
    return not isinstance(operation, (*_PLAIN_READS, ops.SyncFile, ops.ListFolder))


def _as_sent(operation: Operation) -> Operation:
    """An operation with the bytes of the moment of its request. Raises ObjectMissingError for an upload of a missing file."""
    match operation:
        case ops.WriteFile():
            return ops.WriteFile(operation.path, (b"".join(operation.chunks),))
        case ops.UploadFile():
            return ops.WriteFile(operation.path, (read_local(operation.local_path),))
        case _:
            return operation


def _error(root: str, operation: Operation, code: int) -> HoldfastError:
    """LocalStorage's error for an operation without effect."""
    path = ops.path_of(operation)
    message = f"{type(operation).__name__} {path} in {root}: {os.strerror(code)}"
    return StorageUnavailableError(message, path=path, errno=code)


def _unclear(root: str, operation: Operation) -> HoldfastError:
    """LocalStorage's error for an operation with a possible effect: on a name that may exist now, or on anything else."""
    if isinstance(operation, ops.PutIfAbsent | ops.WriteFile | ops.UploadFile | ops.LinkFile):
        target = f"{root.rstrip('/')}/{ops.path_of(operation)}"
        return AmbiguousWriteError(f"{target}: {os.strerror(errno.ETIMEDOUT)}", path=target)
    return _error(root, operation, errno.ETIMEDOUT)


def _content(operation: Operation) -> str:
    """Digest of the content of a write, so that values that differ from run to run show in the trace.

    Uploaded files are left out: they are RocksDB's own, and hold the time of day."""
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
    """A result in a word, equal in every process: without sizes and content."""
    if isinstance(result, Exception):
        return type(result).__name__
    match operation:
        case ops.PutIfAbsent() | ops.LinkFile():
            return "created" if result else "exists"
        case ops.StatFile():
            return "missing" if result is None else "exists"
        case ops.SyncFile():
            return "durable" if result else "missing"
        case ops.ListFiles() | ops.DescribeFiles() | ops.ListFolder():
            return f"{len(result)} names"
        case ops.DeleteFile():
            return "deleted" if result else "missing"
        case ops.DeleteFolder():
            return f"{result} files"
        case _:
            return "done"
