"""The simulated cluster of one run: its processes, their starts and deaths, and the effect of each fault on them.

Actions of users are in users.py; world.py decides how long a run lasts."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.barriers.exchange.guarantee import AT_LEAST_ONCE, loose_vertices
from holdfast.barriers.exchange.wiring import name_edges
from holdfast.barriers.jobgraph import ClaimMode, JobConfig, JobGraph
from holdfast.barriers.launches import launch_token
from holdfast.barriers.messages import CheckpointKind, Registered, RegisterWorker, ShutdownWorker, StandbyOrder
from holdfast.chaos.checkers.observations import Impersonated, Lifecycle, Observation, StoreView
from holdfast.chaos.cluster.coordinator_host import CoordinatorHost
from holdfast.chaos.cluster.driver import DriverHost, Order
from holdfast.chaos.cluster.emitted import EmittedRows
from holdfast.chaos.cluster.forgetter import Forgetter
from holdfast.chaos.cluster.member_host import MemberHost, SimHost
from holdfast.chaos.cluster.standby_host import StandbyHost
from holdfast.chaos.cluster.users import Users
from holdfast.chaos.cluster.worker_host import LOCAL_PREFIX, SimPorts, WorkerHost, repeatable
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.faults.local_disk import damage_copies, limited_disk
from holdfast.chaos.pipelines.modules import UserModules, running
from holdfast.chaos.sim.control import Call, ControlNetwork
from holdfast.chaos.sim.datanet import DataNetwork, slot_of
from holdfast.chaos.sim.forgery import forge_registrations
from holdfast.chaos.sim.injector import Injector
from holdfast.chaos.sim.kernel import Kernel, Process, Streams, Trace
from holdfast.chaos.sim.stores import Medium, SimStores
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.records import derive_job_id
from holdfast.operators.base import JobPlan
from holdfast.operators.sinks.committing import TwoPhaseCommitter
from holdfast.operators.spark.handle import TERMINAL_STATES
from holdfast.operators.worker.leader_retrieval import Target
from holdfast.operators.worker.main import WorkerSpec, ordered
from holdfast.statebackends.snapshot.in_flight import EdgeName

STATE_ROOT = "/state"
DEATH_US = (20_000, 250_000)
"""Least and most time from a worker's death to the start of its successor."""
WAKE_US = (200_000, 4_000_000)
"""Least and most time until a worker that hung out of reach wakes, once its task was cancelled."""
IMPERSONATION_US = 400_000
"""Most delay of each forged registration: its worker may be dead by then, and the slot free."""
GUARD_US = 3_000_000
"""Interval of the check that a coordinator leads."""
MEMORY_FOLDER = "/dev/shm"
MEMORY_BYTES_MIN = 1 << 30
"""A container may give it 64 MiB, which RocksDB's preallocation fills."""

OBJECTS_SHARE = 0.35
"""Share of runs on an object store instead of a disk."""

WIRE_SHARE = 0.5
"""Share of these that reach it through the product's S3 shell; in the others whole operations fail."""

OVERTAKING_SHARE = 0.5
"""Of the runs of jobs that may have unaligned checkpoints, those that have them."""
AT_LEAST_ONCE_SHARE = 0.2
"""Share of the submissions that may be at least once."""

COPIES_SHARE = 0.5
"""Share of runs with state on a worker's own disk that keep local copies there, too."""

SHARED_HOST_SHARE = 0.5
"""Of the runs with members, those with all on one host."""

ONE_HOST_SHARE = 0.5
"""Share of the runs in which coordinators see the workers' processes."""

STANDBY_DIES_SHARE = 0.25
"""Share of the deaths of workers in which one that stands by dies, too: before it takes the slot, or while it does."""
STANDBY_DIES_US = (1, 100_000)

SHARED_BYTES_MIN = 512
"""Inline threshold of jobs that write increments: tables of a simulated job are small, and only files can be shared."""


def _overtakable_edges(plan: JobPlan) -> frozenset[tuple[EdgeName, str]]:
    names = name_edges(plan.graph)
    return frozenset((names[edge.edge_id], edge.partitioning.value) for edge in plan.graph.edges if edge.overtakable)


@dataclass(slots=True)
class RunningWorker:
    """A worker process and its driver."""

    host: WorkerHost
    driver: DriverHost
    seat: int
    """Where the driver started it."""
    spawn: int


@dataclass(slots=True)
class StandingWorker:
    """A process that stands by, and its driver."""

    host: StandbyHost
    driver: DriverHost
    seat: int
    spawn: int


class Cluster:
    """All processes of one run."""

    def __init__(
        self,
        streams: Streams,
        trace: Trace,
        kernel: Kernel,
        scenario: Scenario,
        plan: tuple[Fault, ...],
        observe: Callable[[Observation], None],
        emitted: EmittedRows | None = None,
        *,
        begins_as: Medium | None = None,
        holds_sources: bool = False,
    ) -> None:
        """`begins_as`: what is stored at its beginning; None: nothing. `holds_sources`: no source gives a record."""
        self.kernel = kernel
        self.trace = trace
        self.streams = streams
        self.scenario = scenario
        self.observe = observe
        self.random = streams.of("world")
        self.injector = Injector(kernel, plan, FaultActions(self), observe)
        self.stores = self._draw_stores(begins_as)
        self.control = ControlNetwork(kernel, self.injector, observe)
        self.ports = self._draw_ports(emitted, holds_sources=holds_sources)
        self._plans: dict[tuple[int | None, bool], JobPlan] = {}
        self._backend: str | None = None
        self.running_workers: dict[str, RunningWorker] = {}
        self.standing_workers: dict[str, StandingWorker] = {}
        self._coordinators: dict[str, CoordinatorHost] = {}
        shares = scenario.members > 0 and streams.of("members").random() < SHARED_HOST_SHARE
        self._member_host = SimHost() if shares else None
        """The host of all members; None: each has one of its own, or there are none."""
        self.drivers: dict[str, DriverHost] = {}
        self.driver: DriverHost | None = None
        """The newest driver."""
        self.users = Users(self)
        self.pending = 0
        """Changes of the job under way: a driver to come, a stop with its restore."""
        self._counts: dict[str, int] = {}
        self.parallelism: int | None = None
        """Parallelism of the next submission; None: the job's own."""
        self._held_parallelism: int | None = None
        """That of the newest submission that was accepted."""
        self._accepted_edges: set[frozenset[tuple[EdgeName, str]]] = set()
        """Edges that can be overtaken, with their partitioning, of each job that was accepted."""
        self.outcome = ""
        """Terminal state of the job, as its newest driver learned it."""
        self.on_trouble: Callable[[str, str], None] = lambda invariant, message: None
        self.crashes: list[str] = []
        self.hung: set[str] = set()
        """Workers that hang until their task is cancelled."""
        self.out_of_reach: set[str] = set()
        """Those of them that survive the cancellation."""
        self.local_directory = ""
        self.keeps_copies = False
        """Workers keep copies of their state on their own disk."""
        kinds = {fault.kind for fault in plan}
        self._damages = not kinds.isdisjoint({"damage_copies", "local_disk_full"})
        self._rescales = "rescale" in kinds
        self._fills = "local_disk_full" in kinds
        self._local = ExitStack()

    def _draw_stores(self, begins_as: Medium | None) -> SimStores:
        """Files or objects; of the objects some are asked for over S3's protocol."""
        streams = self.streams
        objects = streams.of("stores").random() < OBJECTS_SHARE
        wire = streams.of("wire") if objects and streams.of("wire").random() < WIRE_SHARE else None
        return SimStores(self.kernel, self.injector, self.observe, STATE_ROOT, objects=objects, wire=wire, begins_as=begins_as)

    def _draw_ports(self, emitted: EmittedRows | None, *, holds_sources: bool) -> SimPorts:
        return SimPorts(
            self.kernel,
            self.injector,
            self.control,
            DataNetwork(self.kernel, self.injector),
            self.observe,
            emitted,
            self.scenario.row_costs,
            holds_sources,
            sees_processes=self.streams.of("one host").random() < ONE_HOST_SHARE,
            sight="workers" if self.streams.of("one sight").random() < ONE_HOST_SHARE else "",
        )

    # ------------------------------------------------------------------------------------------------ as checkers see it

    @property
    def now_ms(self) -> int:
        return self.kernel.now_ms

    @property
    def job_id(self) -> str:
        return derive_job_id(self.job_plan(None).graph.name)

    @property
    def state(self) -> StoreView:
        return self.stores.view(STATE_ROOT)

    def store(self, location: str) -> StoreView:
        """The store at an absolute path."""
        return self.stores.view(location)

    def fork_stores(self) -> Medium:
        """All that is stored now, for another world."""
        return self.stores.fork()

    def workers(self) -> list[WorkerHost]:
        return [self.running_workers[name].host for name in sorted(self.running_workers)]

    def coordinators(self) -> list[CoordinatorHost]:
        return [self._coordinators[name] for name in sorted(self._coordinators)]

    @property
    def jobs_live(self) -> bool:
        """The newest submission has no terminal result."""
        submissions = [path.rpartition("/")[2] for path in self.state.paths(f"{self.job_id}/submissions")]
        newest = max(submissions, key=lambda name: int(name.removesuffix(".json")), default=None)
        return newest is not None and self.state.size(f"{self.job_id}/results/{newest}") is None

    @property
    def has_ended(self) -> bool:
        """The job is over, and no change under way will start it again."""
        return bool(self.outcome) and self.pending == 0

    @property
    def is_quiet(self) -> bool:
        """No worker lives, no coordinator has a flow under way or a retry due."""
        return not (self.running_workers or self.standing_workers) and all(host.is_at_rest for host in self._coordinators.values())

    def progress(self) -> str:
        """Live processes and their state, for the report of a run that does not end."""
        workers = " ".join(f"{each.process.name}({each.summary()})" for each in self.workers())
        leaders = " ".join(f"{each.process.name}({each.summary()})" for each in self.coordinators())
        return f"outcome {self.outcome or 'none'}, {self.pending} pending; {leaders or 'no coordinator'}; {workers or 'no worker'}"

    # --------------------------------------------------------------------------------------------------------- set-up

    def use(self, *, backend: str | None) -> None:
        """Settings of this run: a state backend in the place of the workload's."""
        self._backend = backend
        is_opaque = self.job_plan(None).graph.config.state_backend == "rocksdb"
        # columns that a user leaves out of every comparison may hold the time of day
        ignores = any(said.ignore_columns for sink in self.scenario.sinks if sink.user for said in sink.user.expectations)
        self.kernel.opaque = self.kernel.opaque or is_opaque or ignores
        self.keeps_copies = self._damages or (is_opaque and self.streams.of("copies").random() < COPIES_SHARE)
        if is_opaque or self.keeps_copies:
            folder = tempfile.TemporaryDirectory(prefix=LOCAL_PREFIX, dir=_memory_folder())
            self.local_directory = self._local.enter_context(folder)
            if self._fills:
                self._local.enter_context(limited_disk(self.injector.is_local_disk_full, self.local_directory))

    def job_plan(self, parallelism: int | None, *, allow_output_repeat: bool = False) -> JobPlan:
        """The job at a parallelism; None: its own."""
        plan = self._plans.get((parallelism, allow_output_repeat))
        if plan is None:
            with running(None):  # a driver is on its way: the running event's process has other code
                plan = self.scenario.plan(parallelism)
            config = msgspec.structs.replace(plan.graph.config, state_backend=self._backend or plan.graph.config.state_backend)
            if config.rocksdb is not None:
                config = msgspec.structs.replace(config, rocksdb=repeatable(config.rocksdb))
            if self._damages:
                config = msgspec.structs.replace(config, inline_threshold=0)
            config = self._with_overtaking(self._with_mode(plan, config))
            if config.is_incremental:
                config = msgspec.structs.replace(config, inline_threshold=min(config.inline_threshold, SHARED_BYTES_MIN))
            if config != plan.graph.config:
                plan = replace(plan, graph=msgspec.structs.replace(plan.graph, config=config))
            if allow_output_repeat:
                for operator in plan.operators.values():
                    if isinstance(operator, TwoPhaseCommitter):
                        operator.allow_output_repeat = True
            self._plans[parallelism, allow_output_repeat] = plan
        return plan

    def come_after(self, other: Cluster) -> None:
        """Number processes and tasks on from those of the other one. A name says who it is, and so which random numbers it draws:
        the same driver would only repeat its submission, and a worker would give the same names to its files."""
        self._counts.update(other._counts)

    def plan_like(self, graph: JobGraph) -> JobPlan | None:
        """Of the jobs that were submitted, one of the same vertices and edges; None if there is none."""
        for plan in self._plans.values():
            if (plan.graph.vertices, plan.graph.edges) == (graph.vertices, graph.edges):
                return plan
        return None

    def _with_mode(self, plan: JobPlan, config: JobConfig) -> JobConfig:
        """At least once in a share of the runs, where nothing can repeat: no oracle but one knows of repetitions. It depends on the
        parallelism, so that a job changes its mode with it."""
        if config.unaligned_checkpoints:
            return config
        if config.checkpointing_mode == AT_LEAST_ONCE or self.streams.of("mode").random() >= AT_LEAST_ONCE_SHARE:
            return config
        changed = msgspec.structs.replace(config, checkpointing_mode=AT_LEAST_ONCE)
        return config if loose_vertices(msgspec.structs.replace(plan.graph, config=changed)) else changed

    def _with_overtaking(self, config: JobConfig) -> JobConfig:
        """Unaligned checkpoints in a share of the runs, at once or from an age on; at each parallelism by itself, as the mode."""
        if self.scenario.row_costs:  # its modes are its own
            return config
        if self._rescales and not self.scenario.may_rescale_in_flight:
            return config
        rng = self.streams.of("overtaking")
        if rng.random() >= OVERTAKING_SHARE or config.checkpointing_mode == AT_LEAST_ONCE or config.max_concurrent_checkpoints > 1:
            return config
        timeout_ms = rng.choice((0, 0, 5, 40, 1_000))
        return msgspec.structs.replace(config, unaligned_checkpoints=True, aligned_checkpoint_timeout_ms=timeout_ms)

    def begin(self) -> None:
        """Start the coordinator, and a driver that submits the job."""
        for _ in range(max(1, self.scenario.members)):
            self.start_coordinator()
        self.start_driver(None)
        if self.scenario.labels:
            self.users.begin_labelling()
        if self.scenario.forgetting is not None:
            Forgetter(self, self.scenario.forgetting).begin()
        self.kernel.after(GUARD_US, self._guard)

    def close(self) -> None:
        """Release real resources: local folders of RocksDB."""
        for worker in self.running_workers.values():
            worker.host.dispose()
        self._local.close()

    def _process(self, role: str, label: str = "") -> Process:
        name = label or role
        self._counts[name] = self._counts.get(name, 0) + 1
        process = Process(f"{name}.{self._counts[name]}" if label else f"{name}-{self._counts[name]}", role)
        self.tell(process, "started")
        return process

    def tell(self, process: Process, change: str) -> None:
        point = process.last_point if change == "killed" else ""
        self.trace.add(process.name, change, point)
        self.observe(Lifecycle(self.now_ms, process.name, process.role, change, point))

    # ---------------------------------------------------------------------------------------------------- coordinators

    def start_coordinator(self) -> CoordinatorHost:
        """Start another coordinator process; it leads once its recovery is complete."""
        process = self._process("coordinator")
        host = self._host_of(process)
        self._coordinators[process.name] = host
        self.kernel.after(self.random.randrange(1_000, 20_000), host.start, process)
        return host

    def _host_of(self, process: Process) -> CoordinatorHost:
        client = self.stores.client(process)
        if self.scenario.members == 0:
            return CoordinatorHost(self.ports, process, client, lambda ready: None)
        return MemberHost(self.ports, process, client, lambda ready: None, self._member_host)

    def ensure_coordinator(self) -> None:
        """Start a coordinator if the newest one is gone, as a service manager does; older ones may linger, fenced."""
        newest = self._coordinators.get(f"coordinator-{self._counts.get('coordinator', 0)}")
        if newest is None or newest.process.paused:
            self.start_coordinator()

    def _guard(self) -> None:
        """A service manager's health check of the process at the published address: that it lives. Leadership is the coordinators'
        own matter."""
        known = self.control.leader
        host = self._coordinators.get(known.process.name) if known is not None else self.newest_coordinator()
        if host is None:
            self.start_coordinator()
        self.kernel.after(GUARD_US, self._guard)

    def newest_coordinator(self) -> CoordinatorHost | None:
        alive = [host for host in self._coordinators.values() if not host.process.paused]
        return alive[-1] if alive else None

    # --------------------------------------------------------------------------------------------------------- drivers

    def start_driver(self, restore: str | None) -> DriverHost:
        """Start a driver that submits the job; it is the newest from now on."""
        process = self._process("driver")
        mode = ClaimMode.CLAIM if restore in self.users.claims else ClaimMode.NO_CLAIM
        repeat = restore in self.users.rewinds
        if self.driver is not None and self.driver.accepted is not None:
            self._held_parallelism = self.driver.parallelism
            self._accepted_edges.add(_overtakable_edges(self.driver.order.plan))
        plan = self.job_plan(self.parallelism, allow_output_repeat=repeat)
        order = Order(plan, restore, claim_mode=mode, allow_output_repeat=repeat)
        with running(None):
            driver = DriverHost(self.ports, process, order, self, self._driver_ended)
        driver.job_id = self.job_id
        driver.parallelism = self.parallelism
        self.drivers[process.name] = driver
        self.driver = driver
        self.outcome = ""
        self.kernel.after(self.random.randrange(1_000, 30_000), driver.start, process)
        return driver

    def driver_later(self, delay_us: int, restore: str | None = None) -> None:
        self.pending += 1

        def start() -> None:
            self.pending -= 1
            self.start_driver(restore)

        self.kernel.after(delay_us, start)

    def _driver_ended(self, driver: DriverHost, outcome: str) -> None:
        self.trace.add(driver.process.name, "ended", outcome)
        self.drivers.pop(driver.process.name, None)
        driver.process.alive = False
        if driver is not self.driver:
            return
        if outcome in TERMINAL_STATES:
            self.outcome = outcome
            if outcome != "FINISHED":
                self.on_trouble("I30", f"the job ended as {outcome}")
            self.users.job_ended()
        elif outcome == "exists":
            self.outcome = "FINISHED"
            self.users.job_ended()
        elif outcome.startswith("RestoreError") and driver.order.restore == "latest":
            self.outcome = "FINISHED"  # it had ended by itself, and retained nothing
        elif outcome.startswith("InFlightStateError") and self._has_fewer_edges(driver):
            self.parallelism = self._held_parallelism  # an edge is gone, or another one, at the new one: the user goes back
            self._goes_on_without()
        elif outcome.startswith(("OutputMayRepeatError", "SnapshotClaimedError")) or self.users.misses(driver.order.restore):
            # another driver went on meanwhile: to go back takes a flag, and what was claimed, or is old, may be gone
            self._goes_on_without()
        elif outcome in ("superseded", "workers ended") or outcome.startswith(("gave up", "FencedError")):
            self.driver_later(200_000, driver.unanswered_restore)
        else:
            self.on_trouble("I16", f"the job can't be started again: {outcome}")

    def _goes_on_without(self) -> None:
        """The newest driver was refused; the one before it goes on, or another one is started."""
        self.outcome = "" if self.jobs_live else "FINISHED"
        if self.drivers:
            self.driver = next(iter(self.drivers.values()))
        elif not self.outcome:
            self.driver_later(200_000, self.users.say_again())

    def _has_fewer_edges(self, driver: DriverHost) -> bool:
        """Whether the refused job lacks an edge, or has it otherwise, that a barrier may overtake in one that was accepted: two
        steps of the same parallelism are chained, or need no exchange."""
        edges = _overtakable_edges(driver.order.plan)
        return any(not known <= edges for known in self._accepted_edges)

    # --------------------------------------------------------------------------------------------------------- workers

    def spawn(self, driver: DriverHost, slot: int, spawn: int) -> None:
        """As driver.Slots."""
        delay_us = self.random.randrange(*DEATH_US) if spawn > 1 else self.random.randrange(1_000, 40_000)
        self.kernel.after(delay_us, lambda: self._start_worker(driver, slot, spawn), driver.process)

    def cancel(self, driver: DriverHost, slot: int, spawn: int) -> None:
        """As driver.Slots."""
        for worker in list(self.running_workers.values()):
            process = worker.host.process
            if worker.driver is not driver or (worker.seat, worker.spawn) != (slot, spawn):
                continue
            if process.paused:
                self.tell(process, "cancelled")
            if process.name in self.out_of_reach:  # its task is over, and its process is out of reach
                self.tell_driver(worker, None)
                self.kernel.after(self.random.randrange(*WAKE_US), lambda process=process: self.wake(process))  # type: ignore[misc]
            else:
                self.kill(process)
        for standing in list(self.standing_workers.values()):
            if standing.driver is driver and (standing.seat, standing.spawn) == (slot, spawn):
                self.kill(standing.host.process)

    def _start_worker(self, driver: DriverHost, slot: int, spawn: int) -> None:
        accepted = driver.accepted
        if accepted is None or driver.outcome:
            return
        self._counts["tasks"] = self._counts.get("tasks", 0) + 1
        spec = WorkerSpec(
            job_id=accepted.job_id,
            slot=slot,
            submission=accepted.submission,
            task_attempt=self._counts["tasks"],
            coordinator_url="sim://",
            token=None,
            state_directory=accepted.directory,
            plan=driver.plan_bytes,
            local_directory=self.local_directory,
            cancellation_timeout_ms=driver.order.plan.graph.config.cancellation_timeout_ms,
            watch_parent=False,
            spawn=spawn,
            has_slot=slot < accepted.slots,
            launch_token=launch_token(
                driver.launch_key, job_id=accepted.job_id, submission=accepted.submission, slot=slot, spawn=spawn
            ),
        )
        nonce = f"n{self._counts['tasks']:x}"
        if not driver.standbys or (slot < accepted.slots and spawn == 1):
            self._run_worker(driver, spec, nonce, slot, spawn)
            return
        process = self._process("standby", f"standby-{slot}")
        standing = StandbyHost(self.ports, process, spec, nonce, self._was_ordered)
        self.standing_workers[process.name] = StandingWorker(standing, driver, slot, spawn)
        standing.start()

    def _run_worker(self, driver: DriverHost, spec: WorkerSpec, nonce: str, seat: int, spawn: int) -> None:
        """A process with a slot."""
        process = self._process("worker", f"worker-{spec.slot}")
        if self.scenario.user_modules:
            process.modules = UserModules(self.scenario.user_modules)
        storage = self.stores.client(process)
        host = WorkerHost(self.ports, process, spec, storage, nonce, self._worker_left, keeps_copies=self.keeps_copies)
        self.running_workers[process.name] = RunningWorker(host, driver, seat, spawn)
        self.ports.living.add(process.name)
        host.start()

    def _was_ordered(self, host: StandbyHost, order: StandbyOrder | ShutdownWorker | None) -> None:
        """A process that stood by takes a slot, or leaves."""
        standing = self.standing_workers.get(host.process.name)
        if standing is None:
            return
        self._remove(host.process)
        self.tell(host.process, "left")
        if isinstance(order, StandbyOrder):
            self._counts["ordered"] = self._counts.get("ordered", 0) + 1
            self._run_worker(
                standing.driver, ordered(host.spec, order), f"o{self._counts['ordered']:x}", standing.seat, standing.spawn
            )
        else:
            self.tell_driver(standing, order)

    def _worker_left(self, host: WorkerHost, why: ShutdownWorker | None) -> None:
        """A worker ended by itself."""
        worker = self.running_workers.get(host.process.name)
        if worker is None:
            return
        self._remove(host.process)
        self.tell(host.process, "left")
        self.tell_driver(worker, why)

    def tell_driver(self, worker: RunningWorker | StandingWorker, why: ShutdownWorker | None) -> None:
        slot, driver = worker.seat, worker.driver
        delay_us = self.random.randrange(*DEATH_US)
        self.kernel.after(delay_us, lambda: driver.worker_ended(slot, worker.spawn, why, "lost"), driver.process)

    def damage_copies(self, rng: random.Random) -> bool:
        """Damage copies on the workers' host; False if there are none."""
        return self.keeps_copies and damage_copies(self.local_directory, rng) > 0

    def hang(self, process: Process, *, out_of_reach: bool) -> None:
        """The worker hangs until its task is cancelled; out of reach, it wakes after that."""
        self.kernel.pause(process)
        self.tell(process, "paused")
        self.hung.add(process.name)
        if out_of_reach:
            self.out_of_reach.add(process.name)

    def wake(self, process: Process) -> None:
        """A hung worker continues, whatever has become of its slot."""
        self.out_of_reach.discard(process.name)
        self.hung.discard(process.name)
        if process.alive and process.paused:
            self.tell(process, "resumed")
            self.kernel.resume(process)

    def impersonate(self, process: Process, rng: random.Random) -> bool:
        """Strangers with a worker's credentials register for its slot and for others; False without a registered worker."""
        worker, leader = self.running_workers.get(process.name), self.control.leader
        if worker is None or leader is None or not leader.process.alive or worker.driver.accepted is None:
            return False
        for body in forge_registrations(worker.host.session._identity, worker.driver.accepted.slots, rng):
            self._counts["stranger"] = self._counts.get("stranger", 0) + 1
            stranger = Process(f"stranger-{self._counts['stranger']}", "stranger")
            self.kernel.after(rng.randrange(IMPERSONATION_US), lambda body=body, stranger=stranger: self._ask_as(stranger, body))  # type: ignore[misc]
        return True

    def _ask_as(self, stranger: Process, body: RegisterWorker) -> None:
        self.observe(Impersonated(self.now_ms, stranger.name, body.slot))
        call = Call(stranger, "register", body.job_id, body.slot)
        self.control.ask(call, Target(self.control.address), body, Registered, lambda answer: None)

    # ----------------------------------------------------------------------------------------------------------- deaths

    def kill(self, process: Process) -> None:
        """kill -9."""
        if not process.alive:
            return
        self.crashes.append(process.last_point)
        self.tell(process, "killed")
        worker = self.running_workers.get(process.name) or self.standing_workers.get(process.name)
        self._remove(process)
        if worker is not None:
            self.tell_driver(worker, None)

    def _remove(self, process: Process) -> None:
        self.kernel.kill(process)
        self.control.process_gone(process)
        self._coordinators.pop(process.name, None)
        self.drivers.pop(process.name, None)
        self.standing_workers.pop(process.name, None)
        self.ports.living.discard(process.name)
        worker = self.running_workers.pop(process.name, None)
        if worker is not None:
            worker.host.transport.close()
            worker.host.dispose()

    def kill_driver(self, driver: DriverHost, *, orphans: bool) -> None:
        self.kill(driver.process)
        for worker in list(self.running_workers.values()):
            if worker.driver is driver and (not orphans or worker.host.process.name in self.hung):
                self.kill(worker.host.process)
        for standing in list(self.standing_workers.values()):
            if standing.driver is driver:
                self.kill(standing.host.process)

    def kill_everything(self) -> None:
        for host in list(self._coordinators.values()):
            self.kill(host.process)
        for driver in list(self.drivers.values()):
            self.kill(driver.process)
        for worker in list(self.running_workers.values()):
            self.kill(worker.host.process)
        for standing in list(self.standing_workers.values()):
            self.kill(standing.host.process)


class FaultActions:
    """Implements injector.Hands: effects of faults that happen once on the processes, links and clocks of a cluster.

    Faults that last (lost messages, failing storage) are windows of the Injector."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def strike(self, fault: Fault, process: Process | None) -> bool:
        """As injector.Hands."""
        act: Callable[[Fault, Process | None], bool] = getattr(self, f"_strike_{fault.kind}")
        return act(fault, process)

    def _back_in(self, fault: Fault, start: Callable[[], Any]) -> None:
        self._cluster.kernel.after(max(1, fault.amount) * 1000, start)

    def _strike_kill_worker(self, fault: Fault, process: Process | None) -> bool:
        victim = self._worker_of(fault, process)
        if victim is None:
            return False
        self._cluster.kill(victim)
        self._kill_standby(fault)
        return True

    def _kill_standby(self, fault: Fault) -> None:
        """One that stands by may die with the worker that it would replace."""
        rng, standing = self._cluster.streams.of(f"standby/{fault.label}"), self._cluster.standing_workers
        if standing and rng.random() < STANDBY_DIES_SHARE:
            victim = standing[rng.choice(sorted(standing))].host.process
            self._cluster.kernel.after(rng.randrange(*STANDBY_DIES_US), lambda: self._cluster.kill(victim))

    def _strike_damage_copies(self, fault: Fault, process: Process | None) -> bool:
        """The next attempt restores its state, and looks for it on this host first."""
        victim = self._worker_of(fault, process)
        if victim is None or not self._cluster.damage_copies(self._cluster.streams.of(f"copies/{fault.label}")):
            return False
        self._cluster.kill(victim)
        return True

    def _strike_local_disk_full(self, fault: Fault, process: Process | None) -> bool:
        """The worker's successor restores its state to a full disk."""
        return self._strike_kill_worker(fault, process)

    def _worker_of(self, fault: Fault, process: Process | None) -> Process | None:
        """The worker that passed the point, if the fault is for any; else one of its slot, or a drawn one."""
        if process is not None and process.alive and process.role == "worker" and fault.target in ("", "workers"):
            return process
        hosts = [host for host in self._cluster.workers() if fault.target in ("", "workers", f"worker-{host.slot}")]
        if not hosts:
            return None
        return self._cluster.streams.of(f"victim/{fault.label}").choice(hosts).process

    def _coordinator_of(self, process: Process | None) -> Process | None:
        if process is not None and process.alive and process.role == "coordinator":
            return process
        newest = self._cluster.newest_coordinator()
        return newest.process if newest is not None else None

    def _strike_kill_coordinator(self, fault: Fault, process: Process | None) -> bool:
        victim = self._coordinator_of(process)
        if victim is None:
            return False
        self._cluster.kill(victim)
        self._back_in(fault, self._cluster.ensure_coordinator)
        return True

    def _strike_kill_driver(self, fault: Fault, process: Process | None) -> bool:
        driver = self._cluster.driver
        if driver is None or not driver.process.alive:
            return False
        self._cluster.kill_driver(driver, orphans=self._cluster.streams.of(f"orphans/{fault.label}").random() < 0.25)
        self._cluster.driver_later(max(1, fault.amount) * 1000, driver.unanswered_restore)
        return True

    def _strike_kill_all(self, fault: Fault, process: Process | None) -> bool:
        driver = self._cluster.driver if self._cluster.driver is not None and self._cluster.driver.process.alive else None
        self._cluster.kill_everything()
        self._back_in(fault, self._cluster.ensure_coordinator)
        if driver is not None:
            self._cluster.driver_later(max(1, fault.amount) * 1000, driver.unanswered_restore)
        return True

    def _strike_power_loss(self, fault: Fault, process: Process | None) -> bool:
        self._strike_kill_all(fault, process)
        self._cluster.kernel.power_cuts += 1
        self._cluster.stores.power_loss(self._cluster.streams.of(f"power/{fault.label}"))
        self._cluster.trace.add("store", "power loss")
        self._cluster.observe(Lifecycle(self._cluster.now_ms, "store", "store", "power_loss"))
        return True

    def _strike_pause_worker(self, fault: Fault, process: Process | None) -> bool:
        victim = self._worker_of(fault, process)
        if victim is None or victim.paused:
            return False
        self._pause(victim, fault.duration_ms)
        worker = self._cluster.running_workers[victim.name]
        if fault.amount and worker.driver.process.alive:
            delay_us = fault.duration_ms * 300
            self._cluster.kernel.after(delay_us, lambda: self._cluster.tell_driver(worker, None))
        return True

    def _strike_hang_worker(self, fault: Fault, process: Process | None) -> bool:
        victim = self._worker_of(fault, process)
        if victim is None or victim.paused:
            return False
        self._cluster.hang(victim, out_of_reach=fault.amount > 0)
        return True

    def _strike_pause_coordinator(self, fault: Fault, process: Process | None) -> bool:
        victim = self._coordinator_of(process)
        if victim is None or victim.paused:
            return False
        self._pause(victim, fault.duration_ms)
        return True

    def _pause(self, process: Process, duration_ms: int) -> None:
        self._cluster.kernel.pause(process)
        self._cluster.tell(process, "paused")

        def resume() -> None:
            if process.name not in self._cluster.hung:
                self._cluster.wake(process)

        self._cluster.kernel.after(duration_ms * 1000, resume)

    def _strike_second_coordinator(self, fault: Fault, process: Process | None) -> bool:
        first = self._cluster.newest_coordinator()
        if first is None:
            return False
        self._cluster.start_coordinator()
        self._cluster.kernel.after(fault.duration_ms * 1000, lambda: self._cluster.kill(first.process))
        return True

    def _strike_old_leader_wakes(self, fault: Fault, process: Process | None) -> bool:
        victim = self._coordinator_of(process)
        if victim is None or victim.paused:
            return False
        self._pause(victim, fault.duration_ms)
        self._cluster.kernel.after(self._cluster.random.randrange(1_000, 100_000), self._cluster.ensure_coordinator)
        self._cluster.kernel.after(fault.duration_ms * 1000 + 1_500_000, lambda: self._retire(victim))
        return True

    def _retire(self, process: Process) -> None:
        """An old leader ends, unless it is the only one."""
        if len(self._cluster.coordinators()) > 1:
            self._cluster.kill(process)

    def _strike_break_stream(self, fault: Fault, process: Process | None) -> bool:
        hosts = [host for host in self._cluster.workers() if fault.target in ("workers", f"worker-{host.slot}")]
        broken = [self._cluster.control.break_streams(host.process, fault.amount * 1000) for host in hosts]
        return any(broken)

    def _strike_cut_link(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.ports.data.cut(*slot_of(fault.target))

    def _strike_forged_frames(self, fault: Fault, process: Process | None) -> bool:
        victim = self._worker_of(fault, process)
        return victim is not None and self._cluster.ports.data.forge(victim, self._cluster.streams.of(f"forged/{fault.label}"))

    def _strike_forged_registration(self, fault: Fault, process: Process | None) -> bool:
        victim = self._worker_of(fault, process)
        return victim is not None and self._cluster.impersonate(victim, self._cluster.streams.of(f"forged/{fault.label}"))

    def _strike_clock_jump(self, fault: Fault, process: Process | None) -> bool:
        hosts: list[Process] = [host.process for host in self._cluster.coordinators()] if fault.target == "coordinator" else []
        if fault.target == "driver":
            hosts = [driver.process for driver in self._cluster.drivers.values()]
        if fault.target.startswith("worker"):
            hosts = [host.process for host in self._cluster.workers() if fault.target in ("workers", f"worker-{host.slot}")]
        for each in hosts:
            each.wall_offset_ms += fault.amount
        return bool(hosts)

    # ------------------------------------------------------------------------------------------------------------- users

    def _strike_rescale(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.rescale(fault.amount)

    def _strike_checkpoint(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.snapshot(CheckpointKind.CHECKPOINT)

    def _strike_savepoint(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.snapshot(CheckpointKind.SAVEPOINT)

    def _strike_restore(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.restore(drain=False)

    def _strike_retune(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.retune()

    def _strike_rewind(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.rewind()

    def _strike_drain(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.restore(drain=True)


def _memory_folder() -> str | None:
    """A folder in memory for RocksDB's files, which do not outlive the run's process; None: the default temporary folder."""
    if "TMPDIR" in os.environ or not os.access(MEMORY_FOLDER, os.W_OK):
        return None
    return MEMORY_FOLDER if shutil.disk_usage(MEMORY_FOLDER).free >= MEMORY_BYTES_MIN else None
