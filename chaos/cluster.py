"""The simulated cluster of one run: its processes, who starts and kills them, and what users do to the job.

It assembles the pieces and carries out faults that hit a process; how long a run goes on is decided in world.py."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from barriers.messages import CheckpointKind, ShutdownWorker
from chaos.control import Call, ControlNetwork, Reply
from chaos.coordinatorhost import CoordinatorHost, Outcome, Wish
from chaos.datanet import DataNetwork, slot_of
from chaos.driver import TERMINAL, DriverHost, Order
from chaos.faults import Fault
from chaos.injector import Injector
from chaos.observations import Lifecycle, Observation, StoreView
from chaos.processes import Kernel, Process
from chaos.scenario import Scenario
from chaos.stores import SimStores
from chaos.streams import Streams
from chaos.trace import Trace
from chaos.workerhost import Surroundings, WorkerHost
from coordinator.records import derive_job_id
from operators.base import JobPlan
from operators.worker_main import WorkerSpec
from statebackends.errors import HoldfastError, NotFoundError

STATE_ROOT = "/state"
SAVEPOINTS = "/savepoints"
DEATH_US = (20_000, 250_000)
"""Least and most time until a driver learns of a worker's death and its successor runs."""
GUARD_US = 3_000_000
"""Time between two looks at whether a coordinator leads."""
WISH_TRIES = 40
WISH_POLL_US = 150_000
MEMORY_FOLDER = "/dev/shm"
MEMORY_BYTES_MIN = 1 << 30
"""A container may give it 64 MiB, which RocksDB's preallocation fills."""


@dataclass(slots=True)
class _Held:
    """A worker process and whose it is."""

    host: WorkerHost
    driver: DriverHost
    spawn: int


class Cluster:
    """Everything of one run that has a life."""

    def __init__(
        self,
        streams: Streams,
        trace: Trace,
        kernel: Kernel,
        scenario: Scenario,
        plan: tuple[Fault, ...],
        observe: Callable[[Observation], None],
    ) -> None:
        self.kernel = kernel
        self.trace = trace
        self.streams = streams
        self.scenario = scenario
        self.observe = observe
        self.random = streams.of("world")
        self.injector = Injector(kernel, plan, self, observe)
        self.stores = SimStores(kernel, self.injector, observe, STATE_ROOT, objects=streams.of("stores").random() < 0.35)
        control = ControlNetwork(kernel, self.injector, observe)
        self.around = Surroundings(kernel, self.injector, control, DataNetwork(kernel, self.injector), observe)
        self.control = control
        self._plans: dict[int | None, JobPlan] = {}
        self._backend: str | None = None
        self.held: dict[str, _Held] = {}
        self._coordinators: dict[str, CoordinatorHost] = {}
        self.drivers: dict[str, DriverHost] = {}
        self.driver: DriverHost | None = None
        """The newest one."""
        self.user = Process("user", "user")
        self.pending = 0
        """Things on their way that will change the job: a driver to come, a stop with its restore."""
        self._counts: dict[str, int] = {}
        self._parallelism: int | None = None
        self.outcome = ""
        """How the job ended, as its newest driver learned it."""
        self.on_trouble: Callable[[str, str], None] = lambda invariant, message: None
        self._unsure = False
        """A user asked for a stop and was never told what came of it."""
        self.crashes: list[str] = []
        self.local_directory = ""
        self._local: tempfile.TemporaryDirectory[str] | None = None

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

    def workers(self) -> list[WorkerHost]:
        return [self.held[name].host for name in sorted(self.held)]

    def coordinators(self) -> list[CoordinatorHost]:
        return [self._coordinators[name] for name in sorted(self._coordinators)]

    @property
    def jobs_live(self) -> bool:
        """The newest submission has no terminal result yet."""
        submissions = [path.rpartition("/")[2] for path in self.state.paths(f"{self.job_id}/submissions")]
        newest = max(submissions, key=lambda name: int(name.removesuffix(".json")), default=None)
        return newest is not None and self.state.size(f"{self.job_id}/results/{newest}") is None

    @property
    def has_ended(self) -> bool:
        """The job is over, and nothing on its way will start it again."""
        return bool(self.outcome) and self.pending == 0

    @property
    def is_quiet(self) -> bool:
        """No worker lives, no coordinator has a flow under way, and none will try anything again."""
        return not self.held and all(host.is_at_rest for host in self._coordinators.values())

    def standing(self) -> str:
        """Who lives and what they are about, for the report of a run that does not end."""
        workers = " ".join(f"{each.process.name}({each.summary()})" for each in self.workers())
        leaders = " ".join(f"{each.process.name}({each.summary()})" for each in self.coordinators())
        return f"outcome {self.outcome or 'none'}, {self.pending} pending; {leaders or 'no coordinator'}; {workers or 'no worker'}"

    # --------------------------------------------------------------------------------------------------------- set-up

    def use(self, *, backend: str | None) -> None:
        """Settings of this run: another state backend than the workload's."""
        self._backend = backend
        if self.job_plan(None).graph.config.state_backend == "rocksdb":
            self.kernel.opaque = True
            self._local = tempfile.TemporaryDirectory(prefix="holdfast-sim-", dir=_memory_folder())
            self.local_directory = self._local.name

    def job_plan(self, parallelism: int | None) -> JobPlan:
        """The job at a parallelism, or its own."""
        plan = self._plans.get(parallelism)
        if plan is None:
            plan = self.scenario.plan(parallelism)
            if self._backend is not None:
                config = msgspec.structs.replace(plan.graph.config, state_backend=self._backend)
                graph = msgspec.structs.replace(plan.graph, config=config)
                plan = JobPlan(graph, plan.operators, plan.sources, plan.selectors, plan.schemas)
            self._plans[parallelism] = plan
        return plan

    def begin(self) -> None:
        """The coordinator, and a driver that submits the job."""
        self.start_coordinator()
        self.start_driver(None)
        self.kernel.after(GUARD_US, self._guard)

    def close(self) -> None:
        """Release what is real: local folders of RocksDB."""
        for held in self.held.values():
            held.host.dispose()
        if self._local is not None:
            self._local.cleanup()

    def _process(self, role: str, label: str = "") -> Process:
        name = label or role
        self._counts[name] = self._counts.get(name, 0) + 1
        process = Process(f"{name}.{self._counts[name]}" if label else f"{name}-{self._counts[name]}", role)
        self._tell(process, "started")
        return process

    def _tell(self, process: Process, change: str) -> None:
        point = process.last_point if change == "killed" else ""
        self.trace.add(process.name, change, point)
        self.observe(Lifecycle(self.now_ms, process.name, process.role, change, point))

    # ---------------------------------------------------------------------------------------------------- coordinators

    def start_coordinator(self) -> CoordinatorHost:
        """Another coordinator process; it leads when its recovery is done."""
        process = self._process("coordinator")
        host = CoordinatorHost(self.around, process, self.stores.client(process), lambda ready: None)
        self._coordinators[process.name] = host
        self.kernel.after(self.random.randrange(1_000, 20_000), host.start, process)
        return host

    def _ensure_coordinator(self) -> None:
        """As a service manager does: the newest process is started again when it is gone; older ones may linger, fenced."""
        newest = self._coordinators.get(f"coordinator-{self._counts.get('coordinator', 0)}")
        if newest is None or newest.process.paused:
            self.start_coordinator()

    def _guard(self) -> None:
        """A service manager's health check of what clients are sent to: a fenced leader rightly does not come back by itself."""
        known = self.control.leader
        host = self._coordinators.get(known.process.name) if known is not None else self._newest_coordinator()
        if host is None or host.is_fenced:
            self.start_coordinator()
        self.kernel.after(GUARD_US, self._guard)

    def _newest_coordinator(self) -> CoordinatorHost | None:
        alive = [host for host in self._coordinators.values() if not host.process.paused]
        return alive[-1] if alive else None

    # --------------------------------------------------------------------------------------------------------- drivers

    def start_driver(self, restore: str | None) -> DriverHost:
        """A driver that submits the job; it is the newest from now on."""
        process = self._process("driver")
        driver = DriverHost(self.around, process, Order(self.job_plan(self._parallelism), restore), self, self._driver_ended)
        driver.job_id = self.job_id
        self.drivers[process.name] = driver
        self.driver = driver
        self.outcome = ""
        self.kernel.after(self.random.randrange(1_000, 30_000), driver.start, process)
        return driver

    def _driver_later(self, delay_us: int, restore: str | None = None) -> None:
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
        if outcome in TERMINAL:
            self.outcome = outcome
            if outcome != "FINISHED":
                self.on_trouble("I30", f"the job ended as {outcome}")
            self._go_on_if_unsure()
        elif outcome == "exists":
            self.outcome = "FINISHED"
            self._go_on_if_unsure()
        elif outcome.startswith("RestoreError") and driver.order.restore == "latest":
            self.outcome = "FINISHED"  # it had ended by itself, and kept nothing
        elif outcome.startswith("OutputMayRepeatError"):  # another driver went on meanwhile: to rewind it takes a flag
            self.outcome = "" if self.jobs_live else "FINISHED"
            if self.drivers:
                self.driver = next(iter(self.drivers.values()))
            elif not self.outcome:
                self._driver_later(200_000)
        elif outcome in ("superseded", "workers ended") or outcome.startswith(("gave up", "FencedError")):
            self._driver_later(200_000, driver.unanswered_restore)
        else:
            self.on_trouble("I16", f"the job can't be started again: {outcome}")

    # --------------------------------------------------------------------------------------------------------- workers

    def spawn(self, driver: DriverHost, slot: int, spawn: int) -> None:
        """As driver.Slots."""
        delay_us = self.random.randrange(*DEATH_US) if spawn > 1 else self.random.randrange(1_000, 40_000)
        self.kernel.after(delay_us, lambda: self._start_worker(driver, slot, spawn), driver.process)

    def cancel(self, driver: DriverHost, slot: int, spawn: int) -> None:
        """As driver.Slots."""
        for held in list(self.held.values()):
            if held.driver is driver and (held.host.slot, held.spawn) == (slot, spawn):
                self.kill(held.host.process)

    def _start_worker(self, driver: DriverHost, slot: int, spawn: int) -> None:
        accepted = driver.accepted
        if accepted is None or driver.outcome:
            return
        process = self._process("worker", f"worker-{slot}")
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
        )
        nonce = f"n{self._counts['tasks']:x}"
        host = WorkerHost(self.around, process, spec, self.stores.client(process), nonce, self._worker_left)
        self.held[process.name] = _Held(host, driver, spawn)
        host.start()

    def _worker_left(self, host: WorkerHost, why: ShutdownWorker | None) -> None:
        """It ended by itself."""
        held = self.held.get(host.process.name)
        if held is None:
            return
        self._remove(host.process)
        self._tell(host.process, "left")
        self._tell_driver(held, why)

    def _tell_driver(self, held: _Held, why: ShutdownWorker | None) -> None:
        slot, driver = held.host.slot, held.driver
        delay_us = self.random.randrange(*DEATH_US)
        self.kernel.after(delay_us, lambda: driver.worker_ended(slot, held.spawn, why, "lost"), driver.process)

    # ----------------------------------------------------------------------------------------------------------- deaths

    def kill(self, process: Process) -> None:
        """kill -9."""
        if not process.alive:
            return
        self.crashes.append(process.last_point)
        self._tell(process, "killed")
        held = self.held.get(process.name)
        self._remove(process)
        if held is not None:
            self._tell_driver(held, None)

    def _remove(self, process: Process) -> None:
        self.kernel.kill(process)
        self.control.process_gone(process)
        self._coordinators.pop(process.name, None)
        self.drivers.pop(process.name, None)
        held = self.held.pop(process.name, None)
        if held is not None:
            held.host.transport.close()
            held.host.dispose()

    def _kill_driver(self, driver: DriverHost, *, orphans: bool) -> None:
        self.kill(driver.process)
        for held in list(self.held.values()):
            if held.driver is driver and not orphans:
                self.kill(held.host.process)

    def _kill_everything(self) -> None:
        for host in list(self._coordinators.values()):
            self.kill(host.process)
        for driver in list(self.drivers.values()):
            self.kill(driver.process)
        for held in list(self.held.values()):
            self.kill(held.host.process)

    # ----------------------------------------------------------------------------------------------------------- strikes

    def strike(self, fault: Fault, process: Process | None) -> bool:
        """As injector.Hands."""
        act: Callable[[Fault, Process | None], bool] = getattr(self, f"_strike_{fault.kind}")
        return act(fault, process)

    def _back_in(self, fault: Fault, start: Callable[[], Any]) -> None:
        self.kernel.after(max(1, fault.amount) * 1000, start)

    def _strike_kill_worker(self, fault: Fault, process: Process | None) -> bool:
        victim = self._worker_of(fault, process)
        if victim is None:
            return False
        self.kill(victim)
        return True

    def _worker_of(self, fault: Fault, process: Process | None) -> Process | None:
        """The worker that passed the point, if the fault is for any; else one of its slot, or one drawn."""
        if process is not None and process.role == "worker" and fault.target in ("", "workers"):
            return process
        hosts = [host for host in self.workers() if fault.target in ("", "workers", f"worker-{host.slot}")]
        if not hosts:
            return None
        return self.streams.of(f"victim/{fault.label}").choice(hosts).process

    def _coordinator_of(self, process: Process | None) -> Process | None:
        if process is not None and process.role == "coordinator":
            return process
        newest = self._newest_coordinator()
        return newest.process if newest is not None else None

    def _strike_kill_coordinator(self, fault: Fault, process: Process | None) -> bool:
        victim = self._coordinator_of(process)
        if victim is None:
            return False
        self.kill(victim)
        self._back_in(fault, self._ensure_coordinator)
        return True

    def _strike_kill_driver(self, fault: Fault, process: Process | None) -> bool:
        driver = self.driver
        if driver is None or not driver.process.alive:
            return False
        self._kill_driver(driver, orphans=self.streams.of(f"orphans/{fault.label}").random() < 0.25)
        self._driver_later(max(1, fault.amount) * 1000, driver.unanswered_restore)
        return True

    def _strike_kill_all(self, fault: Fault, process: Process | None) -> bool:
        driver = self.driver if self.driver is not None and self.driver.process.alive else None
        self._kill_everything()
        self._back_in(fault, self._ensure_coordinator)
        if driver is not None:
            self._driver_later(max(1, fault.amount) * 1000, driver.unanswered_restore)
        return True

    def _strike_power_loss(self, fault: Fault, process: Process | None) -> bool:
        self._strike_kill_all(fault, process)
        self.kernel.power_cuts += 1
        self.stores.power_loss(self.streams.of(f"power/{fault.label}"))
        self.trace.add("store", "power loss")
        self.observe(Lifecycle(self.now_ms, "store", "store", "power_loss"))
        return True

    def _strike_pause_worker(self, fault: Fault, process: Process | None) -> bool:
        victim = self._worker_of(fault, process)
        if victim is None or victim.paused:
            return False
        self._pause(victim, fault.duration_ms)
        held = self.held[victim.name]
        if fault.amount and held.driver.process.alive:
            delay_us = fault.duration_ms * 300
            self.kernel.after(delay_us, lambda: self._tell_driver(held, None))
        return True

    def _strike_pause_coordinator(self, fault: Fault, process: Process | None) -> bool:
        victim = self._coordinator_of(process)
        if victim is None or victim.paused:
            return False
        self._pause(victim, fault.duration_ms)
        return True

    def _pause(self, process: Process, duration_ms: int) -> None:
        self.kernel.pause(process)
        self._tell(process, "paused")

        def resume() -> None:
            if process.alive and process.paused:
                self._tell(process, "resumed")
                self.kernel.resume(process)

        self.kernel.after(duration_ms * 1000, resume)

    def _strike_second_coordinator(self, fault: Fault, process: Process | None) -> bool:
        first = self._newest_coordinator()
        if first is None:
            return False
        self.start_coordinator()
        self.kernel.after(fault.duration_ms * 1000, lambda: self.kill(first.process))
        return True

    def _strike_old_leader_wakes(self, fault: Fault, process: Process | None) -> bool:
        victim = self._coordinator_of(process)
        if victim is None or victim.paused:
            return False
        self._pause(victim, fault.duration_ms)
        self.kernel.after(self.random.randrange(1_000, 100_000), self._ensure_coordinator)
        self.kernel.after(fault.duration_ms * 1000 + 1_500_000, lambda: self._retire(victim))
        return True

    def _retire(self, process: Process) -> None:
        """An old leader goes in the end, unless it is the only one."""
        if len(self._coordinators) > 1:
            self.kill(process)

    def _strike_break_stream(self, fault: Fault, process: Process | None) -> bool:
        hosts = [host for host in self.workers() if fault.target in ("workers", f"worker-{host.slot}")]
        broken = [self.control.break_streams(host.process, fault.amount * 1000) for host in hosts]
        return any(broken)

    def _strike_cut_link(self, fault: Fault, process: Process | None) -> bool:
        return self.around.data.cut(*slot_of(fault.target))

    def _strike_clock_jump(self, fault: Fault, process: Process | None) -> bool:
        hosts: list[Process] = [host.process for host in self.coordinators()] if fault.target == "coordinator" else []
        if fault.target == "driver":
            hosts = [driver.process for driver in self.drivers.values()]
        if fault.target.startswith("worker"):
            hosts = [host.process for host in self.workers() if fault.target in ("workers", f"worker-{host.slot}")]
        for each in hosts:
            each.wall_offset_ms += fault.amount
        return bool(hosts)

    # ------------------------------------------------------------------------------------------------- what users do

    def _strike_rescale(self, fault: Fault, process: Process | None) -> bool:
        if self.pending or self.outcome or not self.scenario.may_rescale:
            return False
        self._parallelism = fault.amount
        self.start_driver(self.driver.unanswered_restore if self.driver is not None else None)
        return True

    def _strike_checkpoint(self, fault: Fault, process: Process | None) -> bool:
        return self._wish(Wish(CheckpointKind.CHECKPOINT, self._trigger_id()))

    def _strike_savepoint(self, fault: Fault, process: Process | None) -> bool:
        return self._wish(Wish(CheckpointKind.SAVEPOINT, self._trigger_id(), target=SAVEPOINTS))

    def _trigger_id(self) -> str:
        self._counts["wishes"] = self._counts.get("wishes", 0) + 1
        return f"wish-{self._counts['wishes']}"

    def _wish(self, wish: Wish) -> bool:
        if self.outcome:
            return False
        self.trace.add("user", f"asks for {wish.kind}", wish.trigger_id)
        self._ask("wish", wish, str, lambda answer: None)
        return True

    def _ask(self, request: str, body: Any, kind: Any, reply: Reply) -> None:
        self.control.ask(Call(self.user, request, self.job_id), self.control.leader, body, kind, reply)

    def _strike_restore(self, fault: Fault, process: Process | None) -> bool:
        if self.pending or self.outcome:
            return False
        self.pending += 1
        wish = Wish(CheckpointKind.STOP_SAVEPOINT, self._trigger_id(), target=SAVEPOINTS)
        self.trace.add("user", "stops the job", wish.trigger_id)
        self._stop_job(wish, WISH_TRIES)
        return True

    def _stop_job(self, wish: Wish, tries: int) -> None:
        """Ask until somebody answers, then until it is known how it ended."""

        def asked(answer: Any) -> None:
            if isinstance(answer, HoldfastError):
                self._again(tries, lambda: self._stop_job(wish, tries - 1))
            else:
                self._follow(wish, WISH_TRIES)

        self._ask("wish", wish, str, asked)

    def _again(self, tries: int, act: Callable[[], None]) -> None:
        if tries > 0 and not (self.outcome and self.outcome != "FINISHED"):
            self.kernel.after(WISH_POLL_US, act, self.user)
        else:
            self.pending -= 1
            self.trace.add("user", "gives up")
            self._unsure = True
            if self.outcome:
                self._go_on_if_unsure()

    def _go_on_if_unsure(self) -> None:
        """The job may have been stopped without its user learning of it: who doesn't know goes on from the last checkpoint."""
        if self._unsure:
            self._unsure = False
            self.start_driver("latest")

    def _follow(self, wish: Wish, tries: int) -> None:
        def told(answer: Any) -> None:
            if isinstance(answer, Outcome) and not answer.in_progress:
                if answer.location:
                    self._restore_from(answer.location, WISH_TRIES)
                else:
                    self._again(0, lambda: None)
            elif isinstance(answer, NotFoundError):
                self._again(0, lambda: None)
            else:
                self._again(tries, lambda: self._follow(wish, tries - 1))

        self._ask("outcome", wish.trigger_id, Outcome, told)

    def _restore_from(self, location: str, tries: int) -> None:
        """Once the stopped job has ended, start it again."""
        if not self.outcome:
            self._again(tries, lambda: self._restore_from(location, tries - 1))
            return
        self.pending -= 1
        self.trace.add("user", "restores", location.rpartition("/")[0])
        self.start_driver(location)


def _memory_folder() -> str | None:
    """A file system in memory for what RocksDB writes: a run does not outlive its process. None: wherever temporary files go."""
    if "TMPDIR" in os.environ or not os.access(MEMORY_FOLDER, os.W_OK):
        return None
    return MEMORY_FOLDER if shutil.disk_usage(MEMORY_FOLDER).free >= MEMORY_BYTES_MIN else None
