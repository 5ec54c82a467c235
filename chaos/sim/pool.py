"""Blocking work in virtual time: flows that perform one storage operation an event, and calls that take a while.

An operation's request, its effect at the store and its answer are separate events, with deaths possible in between; the effect
belongs to no process, so that it may happen after its caller's death. The class serves a worker's pool
(`holdfast.operators.task.context.Pool`) and a coordinator's flows (`holdfast.coordinator.dispatcher.threads.FlowRunner`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, cast

import msgspec

from holdfast.chaos.sim.injector import Injector
from holdfast.chaos.sim.kernel import Kernel, Process
from holdfast.chaos.sim.stores import StoreClient
from holdfast.coordinator.dispatcher.dispatcher import Await, HostFlow
from holdfast.operators.base import UserCall
from holdfast.operators.sinks.calls import Pause
from holdfast.operators.task.calls import call_and_wait
from holdfast.operators.task.context import CallsInOrder, CancelToken, Done, FlowCancelledError
from holdfast.statebackends.storage.port import Flow, Operation, Storage, one_by_one, path_of

WAY_US = (30, 400)
"""Least and most time of a request to the store, and of its answer back."""
CALL_US = (20, 600)
"""Least and most time of a call on the pool."""


CALLS_UNANSWERED_MAX = 3
"""Calls of users' functions that one process never answers: with one timeout each the job still goes on."""


class _Task(msgspec.Struct, eq=False):
    """A flow or call under way."""

    ended: Done
    storage: Storage
    flow: Generator[Any, Any, Any] | None = None
    call: Callable[[], Any] | None = None
    token: CancelToken | None = None


class FlowPool:
    """A process's threads for blocking work: at most `threads` tasks at once, the others wait in order."""

    def __init__(self, kernel: Kernel, process: Process, storage: StoreClient, injector: Injector, *, threads: int) -> None:
        self._kernel = kernel
        self._process = process
        self._storage = storage
        self._injector = injector
        self._threads = threads
        self._random = kernel.streams.of(f"pool/{process.name}")
        self._waiting: deque[_Task] = deque()
        self._running = 0
        self._unanswered = 0

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return self._running == 0

    # --------------------------------------------------------------------------------------------------- its two ports

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        """As Pool.run."""
        self._add(_Task(ended, self._storage, call=work))

    def run_call(self, call: UserCall, ended: Done) -> None:
        """As Pool.run_call: answers come out of order, some of them late; and a few never."""
        fate = self._random.randrange(100)
        if fate == 0 and self._unanswered < CALLS_UNANSWERED_MAX:
            self._unanswered += 1
            return
        longest_us = 3_000_000 if fate < 3 else 20_000
        self._kernel.after(self._random.between(20, longest_us), lambda: _answer(call, ended), self._process)

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        """As Pool.run_flow. Within a group any flow may run next."""
        self._add(_Task(ended, storage, flow=one_by_one(flow, self._random.randrange), token=token))

    def open_thread(self, name: str) -> CallsInOrder:
        """As Pool.open_thread."""
        return CallsInOrder(self)

    def drive(self, flow: HostFlow[Any], ended: Done, storage: Storage | None = None) -> None:
        """Run a flow that is never cancelled and may wait for a Future. Within a group any flow may run next."""
        plain = one_by_one(cast("Flow[Any]", flow), self._random.randrange)  # Futures that it waits for pass through
        self._add(_Task(ended, storage or self._storage, flow=plain))

    # ------------------------------------------------------------------------------------------------------------ steps

    def _add(self, task: _Task) -> None:
        if self._running >= self._threads:
            self._waiting.append(task)
            return
        self._running += 1
        self._soon(lambda: self._begin(task))

    def _soon(self, act: Callable[[], None]) -> None:
        self._kernel.after(self._random.between(*CALL_US), act, self._process)

    def _begin(self, task: _Task) -> None:
        if task.call is not None:
            try:
                result = task.call()
            except Exception as error:
                self._end(task, None, error)
            else:
                self._end(task, result, None)
            return
        self._advance(task, lambda flow: next(flow))

    def _advance(self, task: _Task, resume: Callable[[Generator[Any, Any, Any]], Any]) -> None:
        """Run the flow to its next operation, or to its end."""
        assert task.flow is not None
        if task.token is not None and task.token.cancelled:
            task.flow.close()
            self._end(task, None, FlowCancelledError("the flow was cancelled between two operations"))
            return
        try:
            wanted = resume(task.flow)
        except StopIteration as stop:
            self._end(task, stop.value, None)
        except Exception as error:
            self._end(task, None, error)
        else:
            self._ask(task, wanted)

    def _ask(self, task: _Task, wanted: Operation | Await | Pause) -> None:
        if isinstance(wanted, Await):
            wanted.future.add_done_callback(lambda future: self._soon(lambda: self._answered(task, *_outcome(future))))
            return
        if isinstance(wanted, Pause):
            self._kernel.after(wanted.delay_ms * 1_000, lambda: self._answered(task, None, None), self._process)
            return
        process = self._process
        point = operation_point(f"{process.role}.{process.phase}" if process.phase else process.role, wanted)
        self._injector.point(point, self._process)
        if not self._process.alive:
            return
        delay_us = self._random.between(*WAY_US) + self._injector.store_delay_us(self._process, wanted)
        cuts = self._kernel.power_cuts
        self._kernel.after(delay_us, lambda: self._perform(task, wanted, point) if cuts == self._kernel.power_cuts else None)

    def _perform(self, task: _Task, operation: Operation, point: str) -> None:
        """Perform the operation at the store, with or without its caller alive."""
        result: Any = None
        error: Exception | None = None
        before_us = self._storage.waited_us()
        try:
            result = task.storage.execute(operation)
        except Exception as raised:
            error = raised
        self._injector.point(f"{point}.done", self._process)
        back_us = self._random.between(*WAY_US) + self._storage.waited_us() - before_us
        self._kernel.after(back_us, lambda: self._answered(task, result, error), self._process)

    def _answered(self, task: _Task, result: Any, error: BaseException | None) -> None:
        if error is None:
            self._advance(task, lambda flow: flow.send(result))
        else:
            self._advance(task, lambda flow: flow.throw(error))

    def _end(self, task: _Task, result: Any, error: BaseException | None) -> None:
        self._running -= 1
        if self._waiting:
            following = self._waiting.popleft()
            self._running += 1
            self._soon(lambda: self._begin(following))
        task.ended(result, error)


def _answer(call: UserCall, ended: Done) -> None:
    try:
        result = call_and_wait(call)
    except Exception as error:
        ended(None, error)
    else:
        ended(result, None)


def _outcome(future: Any) -> tuple[Any, BaseException | None]:
    error = future.exception()
    return (None, error) if error is not None else (future.result(), None)


def operation_point(role: str, operation: Operation) -> str:
    """Name of the point of an operation's request: role, operation, kind of file."""
    return f"{role}.{type(operation).__name__}.{file_kind(path_of(operation))}"


_FOLDERS = ("leader", "attempts", "submissions", "results", "config", "history", "log", "staged", "data", "sources", "shared")


def file_kind(path: str) -> str:
    """Kind of a file, by its path: claim, metadata, attempts, log, staged ... or `state`."""
    parts = path.split("/")
    name = parts[-1]
    if name in ("_claim", "_metadata", "_holdfast"):
        return name.lstrip("_")
    for folder in _FOLDERS:
        if folder in parts[:-1] or name == folder:
            return folder
    if name.startswith("_probe"):
        return "probe"
    if name.startswith("part-"):
        return "published"
    return "folder" if len(parts) == 1 or name.startswith(("chk-", "savepoint-")) else "state"
