"""Settings that users change while the job runs, and the schedule of checkpoints during a backlog (of I16, docs/invariants.md).

A change that was answered is on record, and every later leader of its submission holds to it, or to what was changed since. A
checkpoint's barriers overtake as these settings say, or as its user did; those of savepoints and of the last one never do. While
the leader knows of a backlog, periodic checkpoints begin at the interval of a backlog, or not at all; that is judged where every
record of the submission says the same, since which of them holds at a moment is the leader's to know."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import CheckpointKind, RegisterWorker, StatusBatch, TriggerCheckpoint
from holdfast.barriers.tunable import AS_CONFIGURED, CheckpointMode
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.observations import Answered, Commanded, Led, Observation, Report, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.statebackends.errors import HoldfastError


@dataclass(slots=True)
class _Backlog:
    """What one leader knows of the backlog of one attempt."""

    tasks: dict[tuple[str, int], int] = field(default_factory=dict)
    """As in SubtaskStatus."""
    since_ms: int | None = None
    """None: there is none."""
    begun: int = 0
    """Periodic checkpoints since then."""


class SettingsChecker(Checker):
    """Checks each answer to a user, every leader now and then, and each first trigger of an id."""

    invariants: ClassVar[tuple[str, ...]] = ("I16",)
    hears: ClassVar[tuple[type, ...]] = (Stored, Answered, Commanded, Led)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._led: dict[str, Led] = {}
        """Process -> the job as it leads it."""
        self._answered: dict[int, int] = {}
        """Submission -> number of the newest record that a user has an answer of; 0: its settings are as submitted."""
        self._backlogs: dict[tuple[str, int], _Backlog] = {}
        """(process, attempt) -> what it knows."""
        self._triggered: set[int] = set()
        self._modes: dict[str, CheckpointMode] = {}
        """Trigger id -> the mode that its user wants."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored():
                self.ledger.changes(observation)
            case Led():
                self._led[observation.actor] = observation
            case Answered(answer=HoldfastError()):
                pass
            case Answered(request="wish", answer=JobConfig() as config):
                self._changed(observation.actor, config)
            case Answered(request="wish", answer=str() as trigger_id, body=body) if body is not None:
                self._modes.setdefault(trigger_id, body.mode)
            case Answered(request="states" | "register", body=StatusBatch() | RegisterWorker()):
                self._reported(observation)
            case Commanded(command=TriggerCheckpoint() as trigger):
                if trigger.checkpoint_id not in self._triggered:
                    self._triggered.add(trigger.checkpoint_id)
                    self._check_mode(trigger, observation)
                    self._check_pace(trigger, observation)
            case _:
                pass

    # --------------------------------------------------------------------------------------------------------- settings

    def _changed(self, actor: str, config: JobConfig) -> None:
        led = self._led.get(actor)
        if led is None:
            return
        known = self.ledger.configs_of(led.submission, led.graph.config)
        numbers = [number for number, each in known.items() if each == config]
        if not numbers:
            self.report("I16", f"{actor} answered that settings are changed, and no record of submission {led.submission} says so")
            return
        self._answered[led.submission] = max(self._answered.get(led.submission, 0), max(numbers))

    def look(self) -> None:
        if not self._answered:
            return
        for host in self.world.coordinators():
            for service in host.services:
                if service.closed or service.epoch != self.ledger.newest_epoch or service._master.state is JobState.SUSPENDED:
                    continue
                setup, config = service._master.setup, service._master.settings.config
                answered = self._answered.get(setup.submission)
                if answered is None:
                    continue
                known = self.ledger.configs_of(setup.submission, setup.graph.config)
                if not any(number >= answered and each == config for number, each in known.items()):
                    text = f"epoch {service.epoch} leads submission {setup.submission} without settings that a user has changed"
                    self.report("I16", f"{text}: record {answered}")

    def _check_mode(self, trigger: TriggerCheckpoint, fact: Commanded) -> None:
        """Which of the settings on record holds is the leader's to know: any of them will do."""
        led, claim = self._leader(fact.epoch), self.ledger.first_claims.get(trigger.checkpoint_id)
        if led is None or claim is None:
            return
        may: set[tuple[bool, int | None]] = {(False, None)}
        mode = AS_CONFIGURED
        if trigger.kind is CheckpointKind.CHECKPOINT and trigger.erasure is msgspec.UNSET:
            if claim.trigger_id:
                if claim.trigger_id not in self._modes:
                    return
                mode = self._modes[claim.trigger_id]
            may = _modes_of(mode, self.ledger.configs_of(led.submission, led.graph.config).values())
        found = (trigger.unaligned, trigger.aligned_timeout_ms)
        if found not in may:
            which = f"{trigger.kind} {trigger.checkpoint_id} of request {claim.trigger_id or 'none'}"
            self.report("I16", f"{which} is triggered with (unaligned, timeout) {found}, and may be {sorted(may, key=str)}")

    def _leader(self, epoch: int) -> Led | None:
        return next((each for each in self._led.values() if each.epoch == epoch), None)

    # ---------------------------------------------------------------------------------------------------------- backlog

    def _reported(self, fact: Answered) -> None:
        for status in fact.body.subtasks:
            known = self._backlogs.setdefault((fact.actor, status.attempt), _Backlog())
            task = (status.vertex, status.subtask)
            known.tasks[task] = max(known.tasks.get(task, 0), status.backlog)
            if not any(number % 2 for number in known.tasks.values()):
                known.since_ms = None
            elif known.since_ms is None:
                known.since_ms, known.begun = fact.at_ms, 0

    def _check_pace(self, trigger: TriggerCheckpoint, fact: Commanded) -> None:
        led = self._leader(fact.epoch)
        master: Any = self.master_of(fact.epoch)
        if led is None or master is None:
            return
        pending = next((each for each in master.coordinator.pending if each.checkpoint_id == trigger.checkpoint_id), None)
        known = self._backlogs.get((led.actor, trigger.attempt))
        configs = self.ledger.configs_of(led.submission, led.graph.config).values()
        intervals = {each.checkpoint_interval_during_backlog_ms for each in configs}
        if pending is None or not pending.request.periodic or known is None or known.since_ms is None or len(intervals) > 1:
            return
        (interval,) = intervals
        if interval is None or pending.started_ms <= known.since_ms:
            return
        known.begun += 1
        most = 0 if interval == 0 else (pending.started_ms - known.since_ms) // interval + 2
        if known.begun > most:
            begun = f"{known.begun} checkpoints, {trigger.checkpoint_id} the last, began in a backlog of "
            self.report("I16", f"{begun}{pending.started_ms - known.since_ms} ms; its interval is {interval} ms")


def _modes_of(mode: CheckpointMode, configs: Collection[JobConfig]) -> set[tuple[bool, int | None]]:
    """(unaligned, aligned_timeout_ms) that a trigger may have."""
    wanted = {each.unaligned_checkpoints if mode.unaligned is None else mode.unaligned for each in configs}
    own_ms = mode.aligned_timeout_ms
    times = {each.aligned_checkpoint_timeout_ms if own_ms is None else own_ms for each in configs}
    found: set[tuple[bool, int | None]] = {(True, time_ms) for time_ms in times} if True in wanted else set()
    return found | {(False, None)} if False in wanted else found
