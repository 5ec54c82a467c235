"""Ports for tests of sources and sinks: storage in a dict, a pool whose work is run by hand, a context over both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.barriers.elements import Batch
from holdfast.operators.base import OperatorCounters, TimerService, UserCall
from holdfast.statebackends.backend import KeyedStateBackend, OperatorListState
from holdfast.statebackends.errors import ObjectMissingError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.directory import storage_from_url


class DictStorage:
    """Storage whose files are a dict that outlives a crash."""

    def __init__(self, files: dict[str, bytes] | None = None, root: str = "memory://") -> None:
        self.files = {} if files is None else files
        self.log: list[ops.Operation] = []
        self._root = root

    @property
    def root(self) -> str:
        return self._root

    def at(self, location: str) -> ops.Storage:
        return storage_from_url(location)

    def execute(self, operation: ops.Operation) -> Any:
        self.log.append(operation)
        files = self.files
        match operation:
            case ops.PutIfAbsent(path, data):
                if path in files:
                    return False
                files[path] = bytes(data)
                return True
            case ops.WriteFile(path, chunks):
                files[path] = b"".join(bytes(chunk) for chunk in chunks)
                return len(files[path])
            case ops.ReadFile(path, offset, length):
                self._need(path)
                return files[path][offset : None if length is None else offset + length]
            case ops.SyncFile(path):
                return path in files
            case ops.StatFile(path):
                return len(files[path]) if path in files else None
            case ops.ListFiles(prefix):
                return sorted(path for path in files if path.startswith(f"{prefix.rstrip('/')}/" if prefix else ""))
            case ops.ListFolder(prefix):
                return self._list(prefix)
            case ops.LinkFile(source, target):
                if target in files:
                    return False
                self._need(source)
                files[target] = files[source]
                return True
            case ops.DeleteFile(path):
                return files.pop(path, None) is not None
            case ops.DeleteFolder(prefix):
                doomed = [path for path in files if path.startswith(f"{prefix}/")]
                for path in doomed:
                    del files[path]
                return len(doomed)
        raise AssertionError(operation)

    def _need(self, path: str) -> None:
        if path not in self.files:
            raise ObjectMissingError(f"{path} is missing", path=path)

    def _list(self, prefix: str) -> list[str]:
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        names = set()
        for path in self.files:
            if path.startswith(start):
                name, slash, _ = path[len(start) :].partition("/")
                names.add(name + slash)
        return sorted(names)


class OperatorLists:
    """OperatorStateBackend of lists only."""

    def __init__(self) -> None:
        self.lists: dict[str, OperatorListState] = {}

    def list_state(self, name: str) -> OperatorListState:
        return self.lists.setdefault(name, OperatorListState(name))


@dataclass
class Collected:
    """An Output that keeps what it gets."""

    batches: list[Batch] = field(default_factory=list)

    def collect(self, batch: Batch) -> None:
        self.batches.append(batch)

    def collect_side(self, tag: str, batch: Batch) -> None:
        raise AssertionError("what is tested here has no side outputs")

    def has_readers(self, tag: str) -> bool:
        return False

    def emit_watermark(self, timestamp_ms: int) -> None:
        raise AssertionError("what is tested here has no watermarks of its own")

    def emit_watermark_now(self, timestamp_ms: int) -> None:
        raise AssertionError("what is tested here has no watermarks of its own")

    def emit_status(self, *, idle: bool) -> None:
        raise AssertionError("what is tested here has no status of its own")


class ManualThread:
    """A thread whose calls run among the tasks of a context, in their order."""

    def __init__(self, context: ManualContext) -> None:
        self._context = context

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._context.submit(work, done)

    def run_flow(self, flow: Any, storage: Any, done: Callable[[Any, BaseException | None], None]) -> None:
        self._context.submit_flow(flow, storage, done)

    def close(self, *, awaited: bool = False) -> None: ...


@dataclass
class ManualContext:
    """OperatorContext whose pool runs when the test says so; `failures` holds what `fail` was called with."""

    storage: Any = field(default_factory=DictStorage)
    job_id: str = "job-a"
    job_name: str = "a"
    skipped_rows_max: int | None = None
    auto_watermark_interval_ms: int = 0
    uid: str = "op"
    name: str = "op"
    subtask: int = 0
    parallelism: int = 1
    max_parallelism: int = 128
    attempt: int = 1
    nonce: str = "n1"
    restored_checkpoint_id: int = 0
    time_ms: int = 0
    counters: OperatorCounters = field(default_factory=OperatorCounters)
    operator_state: Any = field(default_factory=OperatorLists)
    failures: list[BaseException] = field(default_factory=list)
    tasks: list[Callable[[], None]] = field(default_factory=list)
    properties: Mapping[str, Any] = field(default_factory=dict)
    restores_in_flight: bool = False

    @property
    def keyed_state(self) -> KeyedStateBackend:
        raise AssertionError("what is tested here has no keyed state")

    @property
    def timers(self) -> TimerService:
        raise AssertionError("what is tested here has no timers")

    def input_watermark_ms(self, input_index: int) -> int:
        raise AssertionError("what is tested here has one input")

    def now_ms(self) -> int:
        return self.time_ms

    def monotonic_ms(self) -> int:
        return self.time_ms

    def reading_ms(self) -> int:
        return self.time_ms

    def running_ms(self) -> int:
        return self.time_ms

    def submit(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.tasks.append(lambda: _settle(work, done))

    def submit_call(self, call: UserCall, done: Callable[[Any, BaseException | None], None]) -> None:
        self.tasks.append(lambda: _settle(lambda: call.function(call.argument), done))

    def submit_flow(self, flow: Any, storage: Any, done: Callable[[Any, BaseException | None], None]) -> None:
        self.submit(lambda: ops.run_flow(flow, storage), done)

    def open_thread(self, name: str) -> ManualThread:
        return ManualThread(self)

    def source_is_ready(self) -> None:
        """Tests poll by themselves."""

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def run_pool(self) -> None:
        """Run all work, also what it starts."""
        while self.tasks:
            self.tasks.pop(0)()


def _settle(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    try:
        result = work()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)
