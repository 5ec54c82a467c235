"""One simulated coordinator process: the real dispatcher, job masters, checkpoint coordinators and storage flows.

It stands for the REST service: requests come from the simulated network, and each job's turns are events of this process."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import msgspec

from holdfast.barriers.erasure import Erasure
from holdfast.barriers.jobgraph import Submission, SubmissionAccepted
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.tunable import AS_CONFIGURED, CheckpointMode, SettingValue
from holdfast.chaos.checkers.observations import Led, Listened
from holdfast.chaos.cluster.hooks import SimHooks
from holdfast.chaos.cluster.worker_host import SimPorts
from holdfast.chaos.sim.gateway import Epoch
from holdfast.chaos.sim.kernel import Process, ProcessClock
from holdfast.chaos.sim.pool import FlowPool
from holdfast.chaos.sim.stores import StoreClient
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.command_stream import Subscription
from holdfast.coordinator.dispatcher.dispatcher import Dispatcher, HostFlow
from holdfast.coordinator.dispatcher.job_runner import JobMasterRunner
from holdfast.coordinator.dispatcher.reading.queries import view_recorded_job
from holdfast.coordinator.dispatcher.submit import identify_job
from holdfast.coordinator.dispatcher.threads import Turns
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.restore.plan import derive_triggers
from holdfast.coordinator.service import LEADERSHIP_ROUNDS, RECOVERY_RETRY_S
from holdfast.coordinator.views import TriggerView, WorkerView
from holdfast.operators.spark.supervisor import SeenWorker, in_seats
from holdfast.statebackends.errors import HoldfastError, NotFoundError, StorageUnavailableError
from holdfast.statebackends.storage.port import Flow, Storage

T = TypeVar("T")

Ended: TypeAlias = Callable[[Any, BaseException | None], None]

TURN_US = (10, 250)
"""Least and most time until a job thread takes its next turn."""
CALL_TIMEOUT_MS = 30_000
HISTORY_SHARE = 0.25
"""Share of coordinators that record histories: nothing that a job does may depend on it."""


class JobStatus(msgspec.Struct, frozen=True):
    """A job's status, as a driver polls it."""

    state: str
    submission: int
    attempt: int
    workers: tuple[SeenWorker, ...]
    failure: str = ""
    completed: int = 0
    """Newest completed checkpoint, 0 for none."""


class UserRequest(msgspec.Struct, frozen=True):
    """A user's request: a snapshot, a stop, or a cancellation."""

    kind: CheckpointKind | None
    """Kind of snapshot; None: cancel, or change settings."""
    trigger_id: str
    target: str | None = None
    drain: bool = False
    native: bool = False
    settings: dict[str, SettingValue] | None = None
    """Settings to change."""
    mode: CheckpointMode = AS_CONFIGURED
    """Of a checkpoint."""
    erasure: Erasure | None = None
    """Of a checkpoint."""


class RequestResult(msgspec.Struct, frozen=True):
    """End of a request, or that it is in progress."""

    in_progress: bool
    location: str = ""
    failure: str = ""
    checkpoint_id: int = 0


class CoordinatorHost:
    """Leads the jobs of the state directory from `start` until its death."""

    def __init__(
        self, ports: SimPorts, process: Process, storage: StoreClient, ready: Callable[[CoordinatorHost], None]
    ) -> None:
        self.process = process
        self.ports = ports
        self._storage = storage
        self._on_ready = ready
        self.is_ready = False
        self.clock = ProcessClock(ports.kernel, process)
        self._routed = RoutedStorage(storage)
        self._decisions = FlowPool(ports.kernel, process, storage, ports.injector, threads=8)
        self._cleanup = FlowPool(ports.kernel, process, storage, ports.injector, threads=2)
        self._records = FlowPool(ports.kernel, process, storage, ports.injector, threads=2)
        self._rng = random.Random(ports.kernel.streams.of(f"coordinator/{process.name}").getrandbits(64))
        self.url = f"sim://{process.name}"
        records = ports.kernel.streams.of(f"history/{process.name}").random() < HISTORY_SHARE
        self._config = ServiceConfig(storage.root, url=self.url, history=records)
        self.host, self._calls = self._make_host()
        self._starting: dict[str, deque[tuple[HostFlow[Any], Ended]]] = {}
        """Job id -> flows that start it or take it over: the first one is under way, the others wait."""
        self._rounds = 0
        process.phase = "recovering"

    def _make_host(self) -> tuple[Dispatcher, JobCalls]:
        """A service that leads nothing yet."""
        host = Dispatcher(
            self._config,
            self._storage.root,
            rng=self._rng,
            clock=self.clock,
            runner=self,
            make_job_thread=lambda: SimJobThread(self),
            draw_secret=lambda: "not drawn: it would shift all that is drawn behind it",
            is_running=self._is_running,
            hooks=SimHooks(self.ports.kernel, self.process, self.ports.observe),
        )
        return host, JobCalls(host.registry, host.recovery, CALL_TIMEOUT_MS, look_for=host.look_for, is_running=self._is_running)

    def _is_running(self, pid: int, fingerprint: str) -> bool:
        """As barriers.processes, of workers whose fingerprint is their name."""
        return self.ports.sees_processes and fingerprint in self.ports.living

    @property
    def services(self) -> list[JobMasterRunner]:
        """Jobs that this process leads or led."""
        return self.host.registry.services()

    def summary(self) -> str:
        """State of its jobs, as text."""
        if not self.is_ready:
            return "recovering"
        return ",".join(
            f"e{each.epoch} {each._master.state.value.lower()} a{each._master.lifecycle.attempt}" for each in self.services
        )

    @property
    def is_at_rest(self) -> bool:
        """No flow is under way, and no job has a deadline."""
        pools = (self._decisions, self._cleanup, self._records)
        idle = all(pool.is_idle for pool in pools) and not (self.host.unrecovered or self.host.astray)
        return idle and all(service.next_deadline_ms() is None for service in self.services)

    def start(self) -> None:
        """Open the state directory, listen, and recover the jobs that live there."""
        self._in_turn("", self.host.open(), self._opened)

    def _opened(self, result: Any, error: BaseException | None) -> None:
        if error is not None:
            self.ports.kernel.trace.add(self.process.name, "can't start", str(error))
            self.ports.kernel.after(200_000, self.start, self.process)
            return
        self.is_ready = True
        self.ports.control.announce(self)
        self.ports.observe(Listened(self.ports.kernel.now_ms, self.process.name))
        self._on_ready(self)
        self._lead_on(None, None)  # one thread: a world has one job
        self._retry()

    def _lead_on(self, result: Any, error: BaseException | None) -> None:
        """Recover one job after another, as a thread of holdfast.coordinator.service."""
        job_id = self.host.recovery.next()
        if job_id is not None:
            self._in_turn(job_id, self.host.lead_on(job_id), self._lead_on)
        elif self.host.recovery.is_over:
            self.process.phase = ""

    def _retry(self) -> None:
        """Look for leaders, and retry jobs whose recovery storage refused, as holdfast.coordinator.service."""
        self._rounds += 1
        if not self._starting:
            if self._rounds % LEADERSHIP_ROUNDS == 0:
                self._in_turn("", self.host.check_leaderships(), _nothing)
            if self.host.astray:
                self._in_turn("", self.host.find_leaders(), _nothing)
            for job_id in sorted(self.host.unrecovered):
                self._in_turn(job_id, self.host.retry_recovery(job_id), _nothing)
        self.ports.kernel.after(int(RECOVERY_RETRY_S * 1e6), self._retry, self.process)

    # --------------------------------------------------------------------------------------------- flows (FlowRunner)

    def run(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None], *, cleanup: bool) -> None:
        """As holdfast.coordinator.dispatcher.threads.FlowRunner."""
        storage: Storage = self._routed
        (self._cleanup if cleanup else self._decisions).drive(flow, ended, storage)

    def record(self, flow: Flow[T], ended: Callable[[T | None, BaseException | None], None]) -> None:
        """As there."""
        storage: Storage = self._routed
        self._records.drive(flow, ended, storage)

    def _in_turn(self, job_id: str, flow: HostFlow[Any], ended: Ended) -> None:
        """Run a job's starts and takeovers one at a time, as its lock does. An empty id: the flow of no single job."""
        waiting = self._starting.setdefault(job_id, deque())
        waiting.append((flow, ended))
        if len(waiting) == 1:
            self._start_next(job_id)

    def _start_next(self, job_id: str) -> None:
        flow, ended = self._starting[job_id][0]

        def done(result: Any, error: BaseException | None) -> None:
            self._flow_ended()
            waiting = self._starting[job_id]
            waiting.popleft()
            if waiting:
                self._start_next(job_id)
            else:
                del self._starting[job_id]
            ended(result, error)

        self._decisions.drive(flow, done, self._routed)

    def _flow_ended(self) -> None:
        """A start or takeover of a job has ended, well or not."""

    # -------------------------------------------------------------------------------------------- requests (Endpoint)

    def serve(self, request: str, job_id: str, body: Any) -> Future[Any]:
        """Answer a request, as the routes of the REST service."""
        try:
            return self._serve(request, job_id, body)
        except HoldfastError as error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return future

    def _serve(self, request: str, job_id: str, body: Any) -> Future[Any]:
        call = self._calls.call_in_session
        match request:
            case "register":
                return self._calls.register(body)
            case "standby":
                return self._calls.stand_by(body)
            case "acks":
                return call(job_id, lambda ticket: job_events.AckBatchReceived(ticket, body))
            case "states":
                return call(job_id, lambda ticket: job_events.StatesReceived(ticket, body))
            case "heartbeat":
                return _then(call(job_id, lambda ticket: job_events.HeartbeatReceived(ticket, body)), Epoch)
            case "submit":
                return self._submit(body)
            case "look":
                return self._job_status(job_id)
            case "wish":
                return self._request(job_id, body)
            case _:
                return self._result(job_id, body)

    def subscribe(self, job_id: str, slot: int, session: str, after: int) -> tuple[Subscription, Future[Any]]:
        """Open a command stream, as its route."""
        return self._calls.led_in_session(job_id).subscribe(slot, session, after)

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        """As the REST service for a request with that epoch."""
        self.host.leader_unreachable(job_id, epoch)

    def _submit(self, submission: Submission) -> Future[Any]:
        future: Future[SubmissionAccepted] = Future()

        def ended(accepted: Any, error: BaseException | None) -> None:
            if error is None:
                future.set_result(accepted)
            else:
                future.set_exception(error)

        self._in_turn(identify_job(submission), self.host.submit(submission), ended)
        return future

    def _job_status(self, job_id: str) -> Future[Any]:
        recorded = self._calls.recorded_only(job_id)
        if recorded is None:
            return self._calls.led(job_id).query(_status_of)
        future: Future[Any] = Future()
        view = view_recorded_job(recorded, self.clock.wall_ms())
        newest = recorded.newest_submission
        future.set_result(JobStatus(view.overview.state, newest.number if newest is not None else 0, view.attempt, ()))
        return future

    def _request(self, job_id: str, request: UserRequest) -> Future[Any]:
        kind, settings = request.kind, request.settings
        if settings is not None:
            return self._calls.call(job_id, lambda ticket: job_events.SettingsRequested(ticket, settings))
        if kind is None:
            return _then(self._calls.call(job_id, job_events.CancelRequested), lambda _: "")
        if kind is not CheckpointKind.CHECKPOINT and request.target is None:
            raise NotFoundError("a savepoint needs a target")
        return self._calls.call(
            job_id,
            lambda ticket: job_events.SnapshotRequested(
                ticket,
                kind,
                request.trigger_id,
                target=request.target,
                drain=request.drain,
                native=request.native,
                mode=request.mode,
                erasure=request.erasure,
            ),
        )

    def _result(self, job_id: str, trigger_id: str) -> Future[Any]:
        recorded = self._calls.recorded_only(job_id)
        if recorded is None:
            return self._calls.led(job_id).query(lambda master: _result_of(master.triggers.get(trigger_id), trigger_id))
        view = next((entry for entry in derive_triggers(recorded) if entry.trigger_id == trigger_id), None)
        future: Future[Any] = Future()
        future.set_result(_result_of(view, trigger_id))
        return future


def _nothing(result: Any, error: BaseException | None) -> None:
    pass


def _status_of(master: JobMaster) -> JobStatus:
    holders = tuple(_seen(each) for each in master.slot_pool.views())
    standbys = tuple(SeenWorker(each.seat, each.spawn, True) for each in master.standbys.views())
    silent = tuple(SeenWorker(each.seat, each.spawn, False, True) for each in master.slot_pool.silent_views())
    workers = in_seats((*holders, *silent), standbys)
    setup = master.setup
    restored = master.lifecycle.restore_point
    completed = restored.checkpoint_id if restored is not None else 0
    return JobStatus(
        master.state.value, setup.submission, master.lifecycle.attempt, workers, master.lifecycle.failure or "", completed
    )


def _seen(view: WorkerView) -> SeenWorker:
    seat, spawn = (view.slot, view.spawn) if view.seat < 0 else (view.seat, view.seat_spawn)
    return SeenWorker(seat, spawn, view.registered, view.timed_out)


def _result_of(view: TriggerView | None, trigger_id: str) -> RequestResult:
    if view is None:
        raise NotFoundError(f"no trigger {trigger_id}")
    return RequestResult(view.in_progress, view.location or "", view.failure or "", view.checkpoint_id or 0)


def _then(future: Future[Any], made: Callable[[Any], Any]) -> Future[Any]:
    """A Future of the value, converted."""
    made_future: Future[Any] = Future()

    def done(ended: Future[Any]) -> None:
        error = ended.exception()
        if error is None:
            made_future.set_result(made(ended.result()))
        else:
            made_future.set_exception(error)

    future.add_done_callback(done)
    return made_future


class SimJobThread:
    """Implements holdfast.coordinator.dispatcher.threads.JobThread: a job's turns as events of its process."""

    def __init__(self, host: CoordinatorHost) -> None:
        self._host = host
        self._kernel = host.ports.kernel
        self._random = self._kernel.streams.of(f"owner/{host.process.name}")
        self._service: Turns | None = None
        self._due_us: int | None = None

    def start(self, service: Turns) -> None:
        self._service = service
        if isinstance(service, JobMasterRunner):
            setup, now_ms, wall_ms = service._master.setup, self._kernel.now_ms, self._host.clock.wall_ms()
            led = Led(now_ms, self._host.process.name, setup.job_id, setup.epoch, setup.submission, setup.graph, wall_ms)
            self._host.ports.observe(led)
            self._kernel.trace.add(self._host.process.name, "leads", f"epoch {setup.epoch} submission {setup.submission}")
        self.wake()

    def wake(self) -> None:
        self._turn_after(self._random.between(*TURN_US))

    def join(self) -> None:
        """Take no turn: on one thread no other could take the rest."""
        service = self._service
        while service is not None and not service.closed:
            if not service.turn():
                raise StorageUnavailableError("a closing job has no turn left")

    def _turn_after(self, delay_us: int) -> None:
        due_us = self._kernel.now_us + delay_us
        if self._due_us is not None and self._due_us <= due_us:
            return
        self._due_us = due_us
        self._kernel.after(delay_us, lambda: self._turn(due_us), self._host.process)

    def _turn(self, due_us: int) -> None:
        service = self._service
        if due_us != self._due_us or service is None or service.closed:
            return
        self._due_us = None
        if service.turn() and service.has_waiting:
            self.wake()
            return
        deadline_ms = service.next_deadline_ms()
        if deadline_ms is not None:
            self._turn_after(max(0, deadline_ms * 1000 - self._kernel.now_us))
