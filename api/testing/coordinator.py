"""The coordinator of a job under test: the real dispatcher, job master and checkpoint coordinator, whose turns the caller takes.

What in production are threads (of a job, of storage flows) are here queues that `step` empties; nothing waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from holdfast.api.testing.clock import ManualClock
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.dispatcher import Dispatcher, HostFlow, run_host_flow
from holdfast.coordinator.dispatcher.job_runner import JobMasterRunner
from holdfast.coordinator.dispatcher.threads import Turns
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.operators.base import UserCall
from holdfast.operators.sinks.calls import Pause
from holdfast.operators.task.calls import call_and_wait
from holdfast.operators.task.context import CallsInOrder, CancelToken, Done, FlowCancelledError
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.storage.port import Flow, Storage, drive, perform, run_flow

T = TypeVar("T")


class WorkQueue:
    """Blocking work that waits for its turn. `step` does one piece, drawn from all that wait, as any thread may be first."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._waiting: list[tuple[Callable[[], Any], Done]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Callable[[], Any], ended: Done) -> None:
        self._waiting.append((work, ended))

    def step(self) -> bool:
        """False if nothing waited."""
        if not self._waiting:
            return False
        work, ended = self._waiting.pop(self._random.randrange(len(self._waiting)))
        try:
            result = work()
        except Exception as error:
            ended(None, error)
        else:
            ended(result, None)
        return True

    def clear(self) -> None:
        """Whoever waited for it is gone."""
        self._waiting.clear()


class InlinePool:
    """Implements `holdfast.operators.task.context.Pool` over a queue."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def run(self, work: Callable[[], Any], ended: Done) -> None:
        self._queue.add(work, ended)

    def run_call(self, call: UserCall, ended: Done) -> None:
        self._queue.add(partial(call_and_wait, call), ended)

    def run_flow(self, flow: Flow[Any], storage: Storage, token: CancelToken, ended: Done) -> None:
        self._queue.add(partial(_run_unless_cancelled, flow, storage, token), ended)

    def open_thread(self, name: str) -> CallsInOrder:
        return CallsInOrder(self)


def _run_unless_cancelled(flow: Flow[Any], storage: Storage, token: CancelToken) -> Any:
    """Pauses between tries are over at once: nothing here waits for a clock of the machine."""
    if token.cancelled:
        flow.close()
        raise FlowCancelledError("the flow was cancelled before it began")
    return drive(flow, lambda wanted: None if isinstance(wanted, Pause) else perform(wanted, storage))


class _Flows:
    """Implements `holdfast.coordinator.dispatcher.threads.FlowRunner` over a queue."""

    def __init__(self, queue: WorkQueue, storage: Storage) -> None:
        self._queue, self._storage = queue, storage

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        self._queue.add(lambda: run_flow(flow, self._storage), ended)

    def record(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        self.run(flow, ended, cleanup=False)


class _JobTurns:
    """Implements `holdfast.coordinator.dispatcher.threads.JobThread`: the turns are taken by LocalCoordinator.step."""

    def __init__(self) -> None:
        self.service: Turns | None = None

    def start(self, service: Turns) -> None:
        self.service = service

    def wake(self) -> None:
        pass

    def join(self) -> None:
        while self.service is not None and not self.service.closed:
            if not self.service.turn():
                raise InvariantError("a job that closes has no turn left")

    def step(self) -> bool:
        """Turns until one finds nothing."""
        moved = False
        while self.service is not None and not self.service.closed and self.service.turn():
            moved = True
        return moved


class LocalCoordinator:
    """One coordinator of one state directory."""

    def __init__(self, storage: Storage, clock: ManualClock, queue: WorkQueue, rng: random.Random) -> None:
        self._storage = RoutedStorage(storage)
        self._queue = queue
        self._turns: list[_JobTurns] = []
        self.dispatcher = Dispatcher(
            ServiceConfig(storage.root, url="test://coordinator", history=False),
            storage.root,
            rng=rng,
            clock=clock,
            runner=_Flows(queue, self._storage),
            make_job_thread=self._new_turns,
            draw_secret=lambda: f"{rng.getrandbits(256):064x}",
        )
        dispatcher = self.dispatcher
        self.calls = JobCalls(dispatcher.registry, dispatcher.recovery, 1, look_for=dispatcher.look_for)
        self.perform(dispatcher.open())

    def _new_turns(self) -> _JobTurns:
        """Of the jobs before, those that are over have no turn any more."""
        self._turns = [each for each in self._turns if each.service is not None and not each.service.closed]
        self._turns.append(_JobTurns())
        return self._turns[-1]

    def perform(self, flow: HostFlow[T]) -> T:
        """What a flow gives that starts a job, or takes one over."""
        return run_host_flow(flow, self._storage, self.answer)

    def answer(self, future: Future[T]) -> T:
        """What a call gives, once the coordinator has done all that it takes."""
        while not future.done():
            if not self.step():
                raise InvariantError("the coordinator does not answer, and has nothing to do")
        return future.result()

    def step(self) -> bool:
        """Turns of the jobs, and the work that waits; False if there was nothing to do."""
        moved = False
        while self._queue.step():
            moved = True
        for turns in self._turns:
            moved = turns.step() or moved
        return moved

    def next_deadline_ms(self) -> int | None:
        """Monotonic."""
        services = [turns.service for turns in self._turns if turns.service is not None]
        return min((due for each in services if (due := each.next_deadline_ms()) is not None), default=None)

    def led(self, job_id: str) -> JobMasterRunner:
        """As `JobRegistry.led`."""
        return self.dispatcher.registry.led(job_id)
