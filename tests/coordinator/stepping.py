"""One coordinator process on the test's own thread: its clock, turns and flows move only when they are told to."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.barriers.jobgraph import Submission, SubmissionAccepted
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher.dispatcher import Dispatcher, HostFlow, run_host_flow
from holdfast.coordinator.dispatcher.job_runner import JobMasterRunner
from holdfast.coordinator.dispatcher.threads import Turns
from holdfast.statebackends.storage.port import Flow, Operation, Storage
from tests.coordinator.world import DictStorage, Steps

T = TypeVar("T")


class Killed(BaseException):
    """The process is gone: no code of it runs any more."""


class SteppedClock:
    def __init__(self) -> None:
        self.now_ms = 0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return 1_000_000 + self.now_ms


class SteppedJobThread:
    """Implements `running.Owner`. Takes turns only when it was woken or a deadline has passed, as a thread would."""

    def __init__(self, clock: SteppedClock) -> None:
        self._clock = clock
        self._service: Turns | None = None
        self._awake = True

    def start(self, service: Turns) -> None:
        self._service = service

    def wake(self) -> None:
        self._awake = True

    def join(self) -> None:
        while self.turn():
            pass

    def turn(self) -> bool:
        if self._service is None:
            return False
        if not self._awake:
            deadline = self._service.next_deadline_ms()
            if deadline is None or deadline > self._clock.now_ms:
                return False
        self._awake = self._service.turn()
        return self._awake


def retry_recoveries(host: Dispatcher) -> HostFlow[None]:
    """A round of trying again with jobs that storage kept from being recovered."""
    for job_id in sorted(host.unrecovered):
        yield from host.retry_recovery(job_id)


@dataclass
class Running:
    flow: Flow[Any]
    ended: Callable[[Any, BaseException | None], None]
    steps: Steps | None = None


class SteppedRunner:
    """Implements `running.FlowRunner`: flows wait in order, each is driven one operation at a time."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.flows: list[Running] = []

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        self.flows.append(Running(flow, ended))

    def record(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        self.run(flow, ended, cleanup=False)

    def step(self) -> bool:
        """Up to the next operation of the oldest flow; False if there is none."""
        if not self.flows:
            return False
        running = self.flows[0]
        try:
            if running.steps is None:
                running.steps = Steps(running.flow, self._storage)
            else:
                running.steps.step()
        except Exception as error:
            del self.flows[0]
            running.ended(None, error)
        else:
            if running.steps.done:
                del self.flows[0]
                running.ended(running.steps.value, None)
        return True


class Process:
    """Implements `operations.Storage` for its flows; dies after `operations_max` operations, before a flow hears of the last."""

    def __init__(
        self,
        storage: DictStorage,
        *,
        seed: int = 0,
        operations_max: int | None = None,
        url: str = "",
        inbox_events_max: int = 10_000,
    ) -> None:
        self.storage = storage
        self.operations: list[Operation] = []
        self.operations_max = operations_max
        self.clock = SteppedClock()
        self.runner = SteppedRunner(self)
        self.job_threads: list[SteppedJobThread] = []
        self.root = storage.root
        self.host = Dispatcher(
            ServiceConfig(storage.root, url=url, inbox_events_max=inbox_events_max),
            storage.root,
            rng=random.Random(seed),
            clock=self.clock,
            runner=self.runner,
            make_job_thread=self._make_job_thread,
        )

    def begin(self) -> Process:
        """Open the directory and lead its jobs on."""
        self.drive(self.host.open())
        self.drive(self.host.recover())
        return self

    def submit(self, submission: Submission) -> SubmissionAccepted:
        return self.drive(self.host.submit(submission))

    def service(self, job_id: str) -> JobMasterRunner:
        return self.host.registry.led(job_id)

    def call(self, job_id: str, make: Callable[[int], Any]) -> Any:
        return self.wait_for(self.service(job_id).call(make))

    def drive(self, flow: HostFlow[T]) -> T:
        """To its end; the jobs move on only while it waits for one."""
        return run_host_flow(flow, self, self.wait_for)

    def wait_for(self, future: Future[T]) -> T:
        while not future.done():
            assert self.turn() or self.runner.step(), "nobody is going to answer"
        return future.result()

    def settle(self) -> None:
        """Until nothing is due at this time."""
        while self.turn() or self.runner.step():
            pass

    def pass_time(self, by_ms: int) -> None:
        self.clock.now_ms += by_ms
        self.settle()

    def turn(self) -> bool:
        return any(job_thread.turn() for job_thread in self.job_threads)

    def at(self, location: str) -> Storage:
        return self.storage.at(location)

    def execute(self, operation: Operation) -> Any:
        self.operations.append(operation)
        result = self.storage.execute(operation)
        if len(self.operations) == self.operations_max:
            raise Killed
        return result

    def _make_job_thread(self) -> SteppedJobThread:
        self.job_threads.append(SteppedJobThread(self.clock))
        return self.job_threads[-1]
