"""One simulated process that stands by: production's questions (`operators.worker.standby`) over the simulated control plane.

A process that is ordered to take a slot goes on as a worker under another name, so that names say which slot a worker has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.api.errors import status_of
from holdfast.barriers.messages import ShutdownWorker, StandBy, StandbyOrder
from holdfast.chaos.cluster.worker_host import SimPorts
from holdfast.chaos.sim.control import Call
from holdfast.chaos.sim.kernel import Process, ProcessClock
from holdfast.operators.worker.gateway import REJECTED_STATUS
from holdfast.operators.worker.leader_retrieval import Target
from holdfast.operators.worker.main import WorkerSpec
from holdfast.operators.worker.standby import LOOK_MS, LOOKING_MS, Ask, Look, Step, Waiting
from holdfast.statebackends.errors import HoldfastError

READY_US = (5_000, 40_000)
"""Least and most time until a process that takes a slot has made its ports."""

Ended = Callable[["StandbyHost", StandbyOrder | ShutdownWorker | None], None]
"""What it was ordered; None: its lease is over."""


class StandbyHost:
    """Asks until it is ordered to do something."""

    def __init__(self, ports: SimPorts, process: Process, spec: WorkerSpec, nonce: str, ended: Ended) -> None:
        self.process = process
        self.spec = spec
        self._ports = ports
        self._kernel = kernel = ports.kernel
        self._network = ports.control
        self._ended = ended
        self._clock = ProcessClock(kernel, process)
        self._target = Target(self._network.address)
        self._random = kernel.streams.of(f"standby/{process.name}")
        message = StandBy(
            spec.job_id,
            spec.slot,
            spec.submission,
            spec.task_attempt,
            nonce,
            1,
            "sim",
            spec.spawn,
            spec.launch_token,
            process.name,
            ports.sight,
        )
        self._waiting = Waiting(message, self._random, has_slot=spec.has_slot)

    def start(self) -> None:
        self._go_on(self._waiting.begin())

    def _go_on(self, step: Step) -> None:
        since_ms, now_ms = self._waiting.unreachable_since_ms, self._clock.monotonic_ms()
        if isinstance(step, StandbyOrder):
            self._kernel.after(self._random.between(*READY_US), lambda: self._ended(self, step), self.process)
        elif isinstance(step, ShutdownWorker):
            self._ended(self, step)
        elif isinstance(step, Look):
            self._look(step, now_ms + LOOKING_MS)
        elif since_ms is not None and now_ms - since_ms > self.spec.lease_timeout_ms:
            self._ended(self, None)
        else:
            self._kernel.after(step.delay_ms * 1000, lambda: self._ask(step), self.process)

    def _look(self, step: Look, until_ms: int) -> None:
        ended = [each.fingerprint for each in step.looks if each.fingerprint not in self._ports.living]
        if ended or self._clock.monotonic_ms() >= until_ms:
            self._go_on(self._waiting.looked(ended))
        else:
            self._kernel.after(LOOK_MS * 1000, lambda: self._look(step, until_ms), self.process)

    def _ask(self, step: Ask) -> None:
        call = Call(self.process, "standby", self.spec.job_id, self.spec.slot)
        self._network.ask(call, self._target, step.message, StandbyOrder, self._replied)

    def _replied(self, answer: Any) -> None:
        if isinstance(answer, StandbyOrder):
            self._go_on(self._waiting.answered(answer))
            return
        assert isinstance(answer, HoldfastError)
        status, now_ms = status_of(answer), self._clock.monotonic_ms()
        if status in REJECTED_STATUS:
            self._go_on(ShutdownWorker(f"rejected: {answer.message}"))
            return
        if status == 409:
            step = self._waiting.refused(answer.message, answer.fields, now_ms)
        else:
            step = self._waiting.unknown(now_ms) if status == 404 else self._waiting.failed(now_ms)
        if isinstance(step, Ask):
            self._target = self._network.next_target(self._target, answer)
        self._go_on(step)
