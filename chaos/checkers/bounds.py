"""Bounds of memory (I17, docs/invariants.md): queues against their credit, sets and histories against the product's own limits.

It reads the processes themselves at intervals, since no message says how much a process holds."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, ClassVar

from holdfast.barriers.alignment.gate import QUEUED_ELEMENTS_MAX
from holdfast.barriers.alignment.handler import ABORTED_IDS_MAX
from holdfast.barriers.elements import Batch
from holdfast.barriers.exchange.channels import HIGH_WATER_ELEMENTS
from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.observations import Report, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.checkpoints.checkpoint_coordinator import ABORTED_FOLDERS_MAX
from holdfast.coordinator.checkpoints.completed import RECENT_COMPLETED_MAX
from holdfast.coordinator.checkpoints.failures import COUNTED_IDS_MAX
from holdfast.coordinator.checkpoints.pending import PendingStatus
from holdfast.coordinator.checkpoints.requests import QUEUED_REQUESTS_MAX
from holdfast.coordinator.checkpoints.stats import HISTORY_MAX
from holdfast.coordinator.jobmaster.failover import EXCEPTIONS_MAX
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.coordinator.jobmaster.jobmaster import TRIGGERS_MAX
from holdfast.coordinator.jobmaster.slots import OUTBOX_COMMANDS_MAX
from holdfast.operators.worker.session import REMEMBERED_COMMANDS_MAX, UNANSWERED_MAX

OVERSHOOT = 2
"""Factor over a high-water mark: a step starts below it, and its output comes on top."""
EXPIRY_MS_MAX = 150
"""Time in which a coordinator that is awake must abort an expired checkpoint, ms."""
MAILS_MAX = 10_000
"""Mails of one subtask that may wait for its next step."""


class BoundsChecker(Checker):
    """Compares lengths with their limits."""

    invariants: ClassVar[tuple[str, ...]] = ("I17",)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._overdue: dict[tuple[str, int, int], int] = {}
        """(coordinator, epoch, id) of an expired checkpoint -> when it was first seen expired, ms."""

    def look(self) -> None:
        for host in self.world.workers():
            self._look_at_session(host.process.name, host.session)
            for each in host.subtasks():
                self._look_at_subtask(host.process.name, each)
        for host in self.world.coordinators():
            for service in host.services:
                self._look_at_job(host.process.name, service)
                if not service.closed and service._master.state is not JobState.SUSPENDED:
                    self._look_at_times(host, service)

    def _at_most(self, where: str, what: str, held: Sized | int, limit: int) -> None:
        count = held if isinstance(held, int) else len(held)
        if count > limit:
            self.report("I17", f"{where} holds {count} {what}, at most {limit} are allowed")

    # ---------------------------------------------------------------------------------------------------------- workers

    def _look_at_session(self, name: str, session: Any) -> None:
        self._at_most(name, "unanswered acknowledgements", session.unanswered_count, UNANSWERED_MAX)
        self._at_most(name, "commands that it has seen", session._seen, REMEMBERED_COMMANDS_MAX)

    def _look_at_subtask(self, name: str, each: Any) -> None:
        subtask = each.subtask
        where = f"{name} {subtask.key.vertex[:6]} ({subtask.key.subtask})"
        self._at_most(where, "mails", len(subtask.mailbox), MAILS_MAX)
        self._at_most(where, "aborted ids", subtask._checkpoints._aborted, ABORTED_IDS_MAX)
        if each.gate is not None:
            self._look_at_gate(where, each.gate)
        for output in each.outputs:
            waiting = max((channel.pending_count for channel in output._channels), default=0)
            self._at_most(where, "elements for one channel", waiting, OVERSHOOT * HIGH_WATER_ELEMENTS)
            for channel in output._channels:
                self._look_at_credit(where, channel._credit)

    def _look_at_credit(self, where: str, credit: Any) -> None:
        """Bytes sent and not consumed stay within what was ever granted, plus one batch of any size. A smaller grant takes nothing
        back."""
        granted, batches = credit._granted, credit.batches_in_flight
        if granted is not None and batches > 1:
            self._at_most(where, "batches in flight on one channel", batches, granted.allocated_batches)
            self._at_most(where, "bytes in flight on one channel", credit.bytes_in_flight, credit.bytes_in_flight_max)

    def _look_at_gate(self, where: str, gate: Any) -> None:
        """A channel holds at most what its receiver ever granted, plus one batch of any size; its grant is within the settings.
        What it inherits from a snapshot takes no credit and counts for neither."""
        for inherited, credit in zip(gate._queues, gate._credits, strict=True):
            queue = [queued for queued in inherited if not queued.is_restored]
            self._at_most(where, "queued elements of one channel", queue, QUEUED_ELEMENTS_MAX)
            sizes = [queued.size for queued in queue if isinstance(queued.element, Batch)]
            if len(sizes) > 1:
                self._at_most(where, "queued batches of one channel", sizes, credit.allocated_batches)
                self._at_most(where, "queued bytes of one channel", sum(sizes), credit.bytes_held_max)
            if credit.budget is not None:
                self._at_most(where, "bytes granted to one channel", credit.allocated_bytes, credit.budget.bytes_max)

    # ----------------------------------------------------------------------------------------------------- coordinators

    def _look_at_job(self, name: str, service: Any) -> None:
        master = service._master
        coordinator = master.coordinator
        config = master.setup.graph.config
        checkpoints = [entry for entry in coordinator.pending if entry.request.kind is CheckpointKind.CHECKPOINT]
        self._at_most(name, "pending checkpoints", checkpoints, config.max_concurrent_checkpoints)
        self._at_most(name, "queued requests", coordinator._queue, QUEUED_REQUESTS_MAX)
        self._at_most(name, "completed ids", coordinator._completed._recent, RECENT_COMPLETED_MAX)
        self._at_most(name, "folders of aborted savepoints", coordinator._aborted_folders, ABORTED_FOLDERS_MAX)
        self._at_most(name, "counted failures", coordinator.failures._failed, COUNTED_IDS_MAX)
        self._at_most(name, "finished checkpoints with their subtasks", coordinator.stats._finished, HISTORY_MAX)
        self._at_most(name, "exceptions", master.lifecycle.exceptions._exceptions, EXCEPTIONS_MAX)
        self._at_most(name, "trigger ids", master.triggers._triggers, TRIGGERS_MAX)
        for slot in master.slot_pool.slots:
            if slot.outbox is not None:
                self._at_most(name, f"commands for slot {slot.index}", slot.outbox._commands, OUTBOX_COMMANDS_MAX)

    def _look_at_times(self, host: Any, service: Any) -> None:
        """A coordinator that is awake aborts an expired checkpoint at its next turn."""
        setup = service._master.setup
        configs = self.ledger.configs_of(setup.submission, setup.graph.config).values()  # a user may have changed it
        timeout_ms = max(each.checkpoint_timeout_ms for each in configs)
        now_ms = host.clock.monotonic_ms()
        for entry in service._master.coordinator.pending:
            place = (host.process.name, service.epoch, entry.checkpoint_id)
            is_waiting = entry.status is PendingStatus.AWAITING_ACKS and not host.process.paused
            if not is_waiting or now_ms - entry.started_ms <= timeout_ms:
                self._overdue.pop(place, None)
            elif now_ms - self._overdue.setdefault(place, now_ms) > EXPIRY_MS_MAX:
                late_ms = now_ms - entry.started_ms - timeout_ms
                self.report("I17", f"{place[0]} waits for checkpoint {entry.checkpoint_id} {late_ms} ms beyond its timeout")
