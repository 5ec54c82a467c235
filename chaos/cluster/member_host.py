"""One simulated coordinator process of several members: the real election and its storage flows, around the real service.

Time, storage, the lock of the host and the probes between members are the simulated world's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, assert_never

from holdfast.chaos.checkers.observations import Claimed, SignFailed
from holdfast.chaos.cluster.coordinator_host import CoordinatorHost
from holdfast.chaos.cluster.worker_host import SimPorts
from holdfast.chaos.sim.kernel import Process
from holdfast.chaos.sim.pool import FlowPool
from holdfast.chaos.sim.stores import StoreClient
from holdfast.coordinator.dispatcher.command_stream import Subscription
from holdfast.coordinator.dispatcher.dispatcher import Dispatcher
from holdfast.coordinator.standby import election as on
from holdfast.coordinator.standby.election import Election, ElectionConfig, Role
from holdfast.coordinator.standby.records import ActiveRecord, Observation, SignOfLife
from holdfast.coordinator.standby.store import claim, give_sign, observe
from holdfast.statebackends.errors import NotLeaderError, StorageUnavailableError
from holdfast.statebackends.storage.port import Flow

TAKEOVER_AFTER_MS = 300
LOCK_ROUND_US = 20_000
LOCK = "of the only host"


class SimHost:
    """What members of one run share: their host's lock, which its kernel frees when the holder dies."""

    def __init__(self) -> None:
        self._holder: Process | None = None

    def take(self, process: Process) -> bool:
        """Whether the lock became the process's by this call."""
        if self._holder is not None and self._holder.alive:
            return False
        self._holder = process
        return True

    def is_held_by(self, process: Process) -> bool:
        return self._holder is process

    def release(self, process: Process) -> None:
        if self._holder is process:
            self._holder = None


class MemberHost(CoordinatorHost):
    """Stands by from `start` on, and leads the jobs of the state directory while it is the active member."""

    def __init__(
        self,
        ports: SimPorts,
        process: Process,
        storage: StoreClient,
        ready: Callable[[CoordinatorHost], None],
        host: SimHost | None,
    ) -> None:
        """`host`: None, the members are on different ones, without a lock in common."""
        super().__init__(ports, process, storage, ready)
        process.phase = ""
        self.member = f"{process.name.rpartition('-')[2]:0>32}"
        self._shared = host
        self._election_flows = FlowPool(ports.kernel, process, storage, ports.injector, threads=3)
        now_ms = ports.kernel.now_ms
        self.election = Election(self.member, ElectionConfig(TAKEOVER_AFTER_MS), lock=LOCK if host else "", now_ms=now_ms)
        self._seen = Observation()
        self._beat = 0
        self._due_us: int | None = None
        self._retired: list[Dispatcher] = []
        self._looks_ms = (0, 0)
        """First and last of the looks that saw what it sees now, ms."""
        self._probe_ms = -1
        """When it sent the last probe; -1: none yet."""
        self._probe_failed = False
        self._signs_failed = 0
        """In a row, while it is the active one."""

    def start(self) -> None:
        """Listen and take part."""
        self.ports.control.listen(self)
        self._wake()
        self._try_lock()

    def summary(self) -> str:
        return f"{self.election.role.value} {self.election.epoch} {super().summary()}"

    # ----------------------------------------------------------------------------------------------------------- events

    def _handle(self, event: on.Event) -> None:
        for action in self.election.handle(event, now_ms=self.clock.monotonic_ms()):
            self.ports.kernel.trace.add(self.process.name, "election", type(action).__name__)
            self._perform(action)
        self._wake()

    def _wake(self) -> None:
        due_ms = self.election.next_deadline_ms()
        if due_ms is None:
            return
        kernel = self.ports.kernel
        due_us = max(kernel.now_us, due_ms * 1000)
        if self._due_us is None or due_us < self._due_us:
            self._due_us = due_us
            kernel.after(due_us - kernel.now_us, lambda: self._deadline(due_us), self.process)

    def _deadline(self, due_us: int) -> None:
        if due_us == self._due_us:
            self._due_us = None
            self._handle(on.DeadlineReached())

    def _try_lock(self) -> None:
        shared = self._shared
        if shared is None:
            return
        if self.election.wants_lock and not shared.is_held_by(self.process) and shared.take(self.process):
            self._handle(on.LockTaken())
        self.ports.kernel.after(LOCK_ROUND_US, self._try_lock, self.process)

    # ---------------------------------------------------------------------------------------------------------- actions

    def _perform(self, action: on.Action) -> None:
        match action:
            case on.Observe():
                self._drive(observe(self._seen), self._observed, on.ObservationFailed())
            case on.Probe():
                self._probe(action)
            case on.Claim():
                self._observe_claim(action.epoch)
                mine = ActiveRecord(action.epoch, self.member, self.url)
                self._drive(claim(mine), on.ClaimAnswered, on.ClaimFailed(action.epoch))
            case on.Lead():
                self.process.phase = "recovering"
                CoordinatorHost.start(self)
            case on.StopLeading():
                self._stop_leading()
            case on.GiveSign():
                self._give_sign(action)
            case on.ReleaseLock():
                if self._shared is not None:
                    self._shared.release(self.process)
            case _:
                assert_never(action)

    def _drive(self, flow: Flow[Any], made: Callable[[Any], on.Event], failed: on.Event) -> None:
        def ended(result: Any, error: BaseException | None) -> None:
            self._handle(made(result) if error is None else failed)

        self._election_flows.drive(flow, ended, self._routed)

    def _give_sign(self, action: on.GiveSign) -> None:
        def ended(_: Any, error: BaseException | None) -> None:
            self._handle(on.SignGiven(is_stored=error is None))
            is_active = self.election.role is Role.ACTIVE and self.election.epoch == action.epoch
            self._signs_failed = self._signs_failed + 1 if error is not None and is_active else 0
            if self._signs_failed:
                config = ElectionConfig(TAKEOVER_AFTER_MS)
                fitting = config.give_up_after_ms // config.beat_interval_ms
                self.ports.observe(SignFailed(self.ports.kernel.now_ms, self.process.name, self._signs_failed, fitting))

        self._election_flows.drive(give_sign(self._sign(action)), ended, self._routed)

    def _observed(self, seen: Observation) -> on.Event:
        now_ms, sign = self.ports.kernel.now_ms, seen.active_sign
        is_same = seen.active == self._seen.active and (sign is None or sign == self._seen.active_sign)
        self._looks_ms = (self._looks_ms[0] if is_same else now_ms, now_ms)
        self._seen = seen
        return on.Observed(seen)

    def _observe_claim(self, epoch: int) -> None:
        """Told by what went through its ports, whatever the election makes of it."""
        active, sign, (first_ms, last_ms) = self._seen.active, self._seen.active_sign, self._looks_ms
        if active is None or epoch == 1:
            return
        is_guarded = sign is not None and sign.epoch == active.epoch and sign.holds_lock
        claimed = Claimed(
            self.ports.kernel.now_ms,
            self.process.name,
            epoch,
            has_left=sign is not None and (sign.is_leaving or sign.gave_up >= active.epoch),
            unchanged_ms=last_ms - first_ms,
            probed_ms=self._probe_ms - first_ms,
            probe_failed=self._probe_failed,
            has_lock=is_guarded and self._shared is not None and self._shared.is_held_by(self.process),
            takeover_after_ms=TAKEOVER_AFTER_MS,
        )
        self.ports.observe(claimed)

    def _sign(self, action: on.GiveSign) -> SignOfLife:
        self._beat += 1
        holds = self._shared is not None and self._shared.is_held_by(self.process)
        return SignOfLife(
            self.member,
            self._beat,
            self.url,
            epoch=action.epoch,
            lock=LOCK if self._shared is not None else "",
            holds_lock=holds and not action.is_leaving,
            is_leaving=action.is_leaving,
            gave_up=action.gave_up,
        )

    def _probe(self, action: on.Probe) -> None:
        """A dead process refuses, one that stands still or is cut off does not answer in time."""
        kernel, control, injector = self.ports.kernel, self.ports.control, self.ports.injector
        timeout_us = ElectionConfig(TAKEOVER_AFTER_MS).probe_timeout_ms * 1000
        asked = control.at(action.url)
        self._probe_ms, self._probe_failed = kernel.now_ms, False

        def heard(is_active: bool) -> None:
            self._probe_failed = not is_active
            self._handle(on.ProbeAnswered(action.number, is_active))

        def answer(delay_us: int, *, is_active: bool) -> None:
            kernel.after(delay_us, lambda: heard(is_active), self.process)

        def arrive() -> None:
            if not isinstance(asked, MemberHost) or not asked.process.alive:
                answer(control.way_us(), is_active=False)
            elif asked.process.paused or injector.are_members_cut():
                answer(timeout_us, is_active=False)
            else:
                is_active = asked.member == action.member and asked.election.role is Role.ACTIVE
                answer(control.way_us(), is_active=is_active)

        kernel.after(control.way_us(), arrive)

    def _stop_leading(self) -> None:
        """As holdfast.coordinator.service.CoordinatorService.close: what is being recovered now is closed when it is led."""
        self.is_ready = False
        self.process.phase = ""
        self._retired.append(self.host)
        self.host, self._calls = self._make_host()
        self._close_retired()

    def _flow_ended(self) -> None:
        self._close_retired()

    def _close_retired(self) -> None:
        for host in self._retired:
            for service in host.registry.services():
                if not service.closed:
                    service.close("the coordinator stops")

    # -------------------------------------------------------------------------------------------- requests (Endpoint)

    def _serve(self, request: str, job_id: str, body: Any) -> Future[Any]:
        self._check_active()
        return super()._serve(request, job_id, body)

    def subscribe(self, job_id: str, slot: int, session: str, after: int) -> tuple[Subscription, Future[Any]]:
        self._check_active()
        return super().subscribe(job_id, slot, session, after)

    def leader_unreachable(self, job_id: str, epoch: int) -> None:
        if self.is_ready:
            super().leader_unreachable(job_id, epoch)

    def _check_active(self) -> None:
        """As holdfast.api.members.membership.Membership.led."""
        if self.is_ready:
            return
        active = self.election.active
        if self.election.role is Role.ACTIVE or active is None:
            raise StorageUnavailableError("no member leads yet")
        raise NotLeaderError("this member stands by", url=active.url, service_epoch=active.epoch)
