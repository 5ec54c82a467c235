"""Event time never goes back within an attempt, and ends only with all input (I10); nothing leaves behind it (I31); late records
are counted (I4, docs/invariants.md).

That a timer fires once over crashes shows in the output of workloads with timers (I2) and in the timers of each cut (I7)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from holdfast.barriers.exchange.wiring import producers_of
from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import CheckpointKind, Deploy, Deployment, Heartbeat, SubtaskStatus
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import (
    DataEnded,
    Delivered,
    EmittedBehind,
    Observation,
    Report,
    Reported,
    Requested,
    Stored,
    WorldView,
)
from holdfast.chaos.checkers.state_reading import SnapshotView
from holdfast.chaos.workloads.scenario import LateExpectation, Positions, Scenario
from holdfast.statebackends.errors import HoldfastError


class EventTimeChecker(Checker):
    """Compares each watermark with the last one of the same subtask and process."""

    invariants: ClassVar[tuple[str, ...]] = ("I10",)
    hears: ClassVar[tuple[type, ...]] = (Requested, Delivered, DataEnded)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._seen: dict[tuple[str, int, str, int], int] = {}
        """(process, attempt, vertex, subtask) -> watermark, ms, in the subtask itself."""
        self._told: dict[tuple[str, int, str, int], int] = {}
        """The same, as of its heartbeats."""

        self._graphs: dict[int, JobGraph] = {}
        """Attempt -> its graph."""
        self._ended: set[tuple[int, str, int]] = set()
        """(attempt, vertex, subtask) of subtasks whose input has ended."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Requested(body=Heartbeat() as beat):
                self._beat(observation.actor, beat)
            case Delivered(command=Deploy(deployment=deployment)):
                self._graphs[deployment.attempt] = deployment.graph
            case DataEnded():
                self._end(observation)
            case _:
                pass

    def _end(self, fact: DataEnded) -> None:
        """A subtask flushes only after all producers: behind a stopped one a restored job reads on."""
        self._ended.add((fact.attempt, fact.vertex, fact.subtask))
        graph = self._graphs[fact.attempt]
        for edge in graph.inputs(fact.vertex):
            for index in producers_of(graph, edge, fact.subtask):
                if (fact.attempt, edge.source, index) not in self._ended:
                    who = f"{fact.vertex} ({fact.subtask}) of attempt {fact.attempt} in {fact.actor}"
                    self.report("I10", f"the data of {who} ends, and that of {edge.source} ({index}), which it reads, has not")
                    return

    def _beat(self, actor: str, beat: Heartbeat) -> None:
        for metrics in beat.metrics:
            if metrics.watermark_ms is not None:
                key = (actor, beat.attempt, metrics.vertex, metrics.subtask)
                self._rises(self._told, key, metrics.watermark_ms)

    def look(self) -> None:
        for host in self.world.workers():
            for each in host.subtasks():
                subtask = each.subtask
                key = (host.process.name, subtask.attempt, subtask.key.vertex, subtask.key.subtask)
                self._rises(self._seen, key, subtask._input.watermark_ms)

    def _rises(self, seen: dict[tuple[str, int, str, int], int], key: tuple[str, int, str, int], watermark_ms: int) -> None:
        last = seen.get(key)
        if last is not None and watermark_ms < last:
            actor, attempt, vertex, index = key
            who = f"{vertex} ({index}) of attempt {attempt} in {actor}"
            self.report("I10", f"the watermark of {who} went from {last} to {watermark_ms}")
        seen[key] = watermark_ms


class ForwardedChecker(Checker):
    """Hears of rows behind a watermark of the operator that emits them."""

    invariants: ClassVar[tuple[str, ...]] = ("I31",)
    hears: ClassVar[tuple[type, ...]] = (EmittedBehind,)

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, EmittedBehind):
            who = f"{observation.uid} ({observation.subtask}) in {observation.actor}"
            behind = f"{observation.timestamp_ms} behind its watermark {observation.watermark_ms}"
            self.report("I31", f"{who} emitted a row of {behind}, and neither a late record nor a timer brought it")


class LateChecker(Checker):
    """An attempt that reads its input to the end drops, and reports, every late record behind the cut that it started with.

    The scenario says which records are late; subtasks report their drops once their input has ended. A record dropped in front of
    the cut is not read again; one behind it counts in each attempt that reads it. The job's own count, kept with each snapshot, has
    each once."""

    invariants: ClassVar[tuple[str, ...]] = ("I4",)
    hears: ClassVar[tuple[type, ...]] = (Delivered, Reported, Stored)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._positions: dict[int, Positions] = {}
        """Completed id -> positions in its snapshot, read while its files exist."""
        self._deployed: dict[int, Deployment] = {}
        self._dropped: dict[tuple[int, str], dict[int, int]] = {}
        """(attempt, vertex) -> subtask whose input has ended -> records dropped."""

    def observe(self, observation: Observation) -> None:
        late = self.scenario.late
        if late is None:
            return
        match observation:
            case Delivered(command=Deploy(deployment=deployment)):
                self._deployed.setdefault(deployment.attempt, deployment)
            case Reported(item=SubtaskStatus(drained=True, metrics=metrics) as status) if metrics is not None:
                self._dropped.setdefault((status.attempt, status.vertex), {})[status.subtask] = sum(
                    each.late_dropped for each in metrics.operators
                )
            case Stored() if observation.added:
                for change in self.ledger.changes(observation):
                    if isinstance(change, Decided) and change.snapshot is not None:
                        self._decided(late, change.snapshot)
            case _:
                pass

    def _decided(self, late: LateExpectation, snapshot: Snapshot) -> None:
        if snapshot.metadata.in_flight:
            return  # what is in flight counts later, whenever that is
        try:
            view = SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata)
            self._positions[snapshot.checkpoint_id] = view.positions(late.source_uids)
        except HoldfastError:
            return  # damage of its files is reported elsewhere
        self._check_count(late, snapshot)
        deployment = self._deployed.get(snapshot.claim.attempt)
        if snapshot.kind is CheckpointKind.FINAL and deployment is not None:
            self._ended(late, deployment)

    def _check_count(self, late: LateExpectation, snapshot: Snapshot) -> None:
        """All records between the submission's start and the cut were read and counted, whatever failed in between."""
        record = self.ledger.submissions.get(snapshot.claim.submission)
        base = record.base.checkpoint_id if record is not None and record.base is not None else 0
        if record is None or (base and base not in self._positions):
            return
        expected = late.behind(self._positions.get(base)) - late.behind(self._positions[snapshot.checkpoint_id])
        counters = msgspec.json.decode(snapshot.metadata.properties.get("counters", "{}"))
        found = counters.get(late.operator_uid, {}).get("late_dropped", 0)
        if found != expected:
            self.report(
                "I4",
                f"checkpoint {snapshot.checkpoint_id} of a submission that began with {base} counts {found} late records of "
                f"{late.operator_uid}; {expected} lie in front of its cut",
            )

    def _ended(self, late: LateExpectation, deployment: Deployment) -> None:
        """The final checkpoint says that the input of all subtasks has ended."""
        restored = deployment.restored_checkpoint_id
        if restored and restored not in self._positions:
            return
        vertex = next(
            each for each in deployment.graph.vertices if late.operator_uid in (operator.uid for operator in each.operators)
        )
        dropped = self._dropped.get((deployment.attempt, vertex.vertex_id), {})
        expected, found = late.behind(self._positions.get(restored)), sum(dropped.values())
        if found != expected:
            self.report(
                "I4",
                f"attempt {deployment.attempt}, from checkpoint {restored}: {late.operator_uid} says that it dropped {found} "
                f"records ({dict(sorted(dropped.items()))} by subtask), {expected} are late",
            )
