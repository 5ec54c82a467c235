"""What a fault does to the processes, links and clocks of a cluster, at the moment at which it strikes.

Faults that last (lost messages, failing storage) are windows of injector.py; this is about those that happen once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.observations import Lifecycle
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.sim.datanet import slot_of
from holdfast.chaos.sim.kernel import Process

if TYPE_CHECKING:
    from holdfast.chaos.cluster.cluster import Cluster


class FaultActions:
    """Implements injector.Hands."""

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
        return True

    def _strike_damage_copies(self, fault: Fault, process: Process | None) -> bool:
        """The attempt that follows restores its state, and looks for it on this host first."""
        victim = self._worker_of(fault, process)
        if victim is None or not self._cluster.damage_copies(self._cluster.streams.of(f"copies/{fault.label}")):
            return False
        self._cluster.kill(victim)
        return True

    def _strike_local_disk_full(self, fault: Fault, process: Process | None) -> bool:
        """Whoever comes after it restores its state to the disk that is full."""
        return self._strike_kill_worker(fault, process)

    def _worker_of(self, fault: Fault, process: Process | None) -> Process | None:
        """The worker that passed the point, if the fault is for any; else one of its slot, or one drawn."""
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
        held = self._cluster.held[victim.name]
        if fault.amount and held.driver.process.alive:
            delay_us = fault.duration_ms * 300
            self._cluster.kernel.after(delay_us, lambda: self._cluster.tell_driver(held, None))
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
        """An old leader goes in the end, unless it is the only one."""
        if len(self._cluster.coordinators()) > 1:
            self._cluster.kill(process)

    def _strike_break_stream(self, fault: Fault, process: Process | None) -> bool:
        hosts = [host for host in self._cluster.workers() if fault.target in ("workers", f"worker-{host.slot}")]
        broken = [self._cluster.control.break_streams(host.process, fault.amount * 1000) for host in hosts]
        return any(broken)

    def _strike_cut_link(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.around.data.cut(*slot_of(fault.target))

    def _strike_forged_frames(self, fault: Fault, process: Process | None) -> bool:
        victim = self._worker_of(fault, process)
        return victim is not None and self._cluster.around.data.forge(victim, self._cluster.streams.of(f"forged/{fault.label}"))

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

    def _strike_rewind(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.rewind()

    def _strike_drain(self, fault: Fault, process: Process | None) -> bool:
        return self._cluster.users.restore(drain=True)
