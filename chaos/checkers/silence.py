"""A source that is silent for its timeout is told to be idle, and none before; idle channels hold nobody (I33).

Silence is measured from outside, between two looks: for how long a subtask gave no record while it could have, at least and at
most. What a look sees is of the end of the newest step. Slow user code puts that ahead of the simulator's clock, for all subtasks
of its worker that step behind it: a source that was read then has had that time to give a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.barriers.alignment.valve import MultiInputValve, StatusWatermarkValve
from holdfast.barriers.elements import MAX_WATERMARK
from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import INT_MAX, AlignWatermarks, Deploy, Heartbeat, TaskState
from holdfast.barriers.watermark_alignment import aligned_operators
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.observations import Delivered, Observation, Report, Requested, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator
from holdfast.operators.task.chain import ChainNode
from holdfast.operators.task.subtask import Subtask

SLACK_S = 0.3
"""How much later than its timeout a subtask that is stepped may go idle: what passes unseen between two looks."""
UNKNOWN_S = 1e9
ROUNDING_S = 0.005


@dataclass(slots=True)
class _Watched:
    """One strategy of one subtask, as it was at the last look."""

    looked_s: float
    """Time of what it saw."""
    records: int
    backpressured_s: float
    was_held: bool
    maximum_ms: int | None = None
    """Of its watermark group, where it was above it."""
    silent_min_s: float = 0.0
    silent_max_s: float = UNKNOWN_S


class SilenceChecker(Checker):
    """Looks at the watermark strategies of sources, and at what the readers of several channels make of them."""

    invariants: ClassVar[tuple[str, ...]] = ("I33",)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._watched: dict[tuple[str, int, str, int, str], _Watched] = {}

    def look(self) -> None:
        for host in self.world.workers():
            for each in host.subtasks():
                subtask = each.subtask
                if subtask.state is not TaskState.RUNNING:
                    continue
                inputs = subtask._ports.inputs
                if inputs is not None:
                    self._check_valves(subtask, inputs.valve)
                else:
                    for node in subtask.chain.nodes:
                        if isinstance(node.operator, TimestampsOperator):
                            self._check_source(host.process.name, subtask, node, node.operator)

    def _check_source(self, process: str, subtask: Subtask, node: ChainNode, operator: TimestampsOperator) -> None:
        timeout_ms = operator.strategy.idle_after_ms
        if timeout_ms is None or subtask.is_drained:
            return
        key = (process, subtask.attempt, subtask.key.vertex, subtask.key.subtask, node.uid)
        watched = self._measure(key, subtask, node)
        timeout_s = timeout_ms / 1000
        since_step_s = watched.looked_s - subtask._times.last_end_s
        if node.idle and watched.silent_max_s + ROUNDING_S < timeout_s:
            seen = f"{watched.silent_max_s * 1000:.0f} ms in which it could read"
            self.report("I33", f"{node.uid} ({subtask.key.subtask}) of {process} is idle after {seen}, before its {timeout_ms} ms")
        if not node.idle and watched.silent_min_s - since_step_s > timeout_s + SLACK_S:
            seen = f"{watched.silent_min_s * 1000:.0f} ms without a record"
            self.report("I33", f"{node.uid} ({subtask.key.subtask}) of {process} is active after {seen}; it has {timeout_ms} ms")

    def _measure(self, key: tuple[str, int, str, int, str], subtask: Subtask, node: ChainNode) -> _Watched:
        clock_s, records = subtask._clock.seconds(), node.context.counters.records_in
        now_s = max(clock_s, subtask._times.last_end_s)
        held = subtask.last_step.backpressured or subtask._input.is_paused
        watched = self._watched.get(key)
        self._check_pause(subtask, node, watched, records)
        if watched is None:
            watched = self._watched[key] = _Watched(now_s, records, subtask._times.held_s, held, _passed(subtask, node))
            return watched
        gap_s = now_s - watched.looked_s
        if records != watched.records:
            watched.silent_min_s, watched.silent_max_s = 0.0, gap_s
        else:
            is_under_way = clock_s < now_s
            free = not is_under_way and not held and not watched.was_held and subtask._times.held_s == watched.backpressured_s
            watched.silent_min_s += gap_s if free else 0.0
            watched.silent_max_s += 0.0 if held and watched.was_held else gap_s
        watched.looked_s, watched.records, watched.was_held = now_s, records, held
        watched.maximum_ms = _passed(subtask, node)
        watched.backpressured_s = subtask._times.held_s
        return watched

    def _check_pause(self, subtask: Subtask, node: ChainNode, before: _Watched | None, records: int) -> None:
        maximum_ms = _passed(subtask, node)
        if before is not None and maximum_ms is not None and before.maximum_ms == maximum_ms and records != before.records:
            who = f"{node.uid} ({subtask.key.subtask})"
            self.report("I33", f"{who} read on at {node.watermark_ms}, above its watermark group's {maximum_ms}")

    def _check_valves(self, subtask: Subtask, valves: MultiInputValve) -> None:
        for valve in (*valves._valves, valves._minimum):
            self._check_valve(subtask, valve)

    def _check_valve(self, subtask: Subtask, valve: StatusWatermarkValve) -> None:
        """Event time is the minimum over channels that are neither idle nor ended, and have caught up."""
        going = [channel.watermark_ms for channel in valve._channels if not channel.idle and channel.watermark_ms < MAX_WATERMARK]
        least = min(going, default=None)
        if least is not None and least > valve.watermark_ms:
            who = f"{subtask.key.vertex} ({subtask.key.subtask})"
            self.report("I33", f"event time of {who} is {valve.watermark_ms}, while all that are not idle have reached {least}")


def _passed(subtask: Subtask, node: ChainNode) -> int | None:
    """The maximum of its watermark group that a source has passed; None: it has passed none."""
    for group, aligned in subtask.chain.aligned:
        maximum_ms = subtask._input._maximum_ms.get(group, MAX_WATERMARK)
        if aligned is node and node.watermark_ms > maximum_ms:
            return maximum_ms
    return None


class AlignmentChecker(Checker):
    """What sources are told follows from what all of the group have reported in the same attempt, as seen on the wire."""

    invariants: ClassVar[tuple[str, ...]] = ("I33",)
    hears: ClassVar[tuple[type, ...]] = (Requested, Delivered)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._graphs: dict[int, JobGraph] = {}
        self._highest: dict[tuple[int, str, int], int] = {}
        """(attempt, operator, subtask) -> the highest watermark that it has reported; INT_MAX once it had none that counts."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Requested(body=Heartbeat() as beat):
                for metrics in beat.metrics:
                    for uid, watermark_ms in (metrics.aligned or {}).items() if isinstance(metrics.aligned, dict) else ():
                        key = (beat.attempt, uid, metrics.subtask)
                        reported = INT_MAX if watermark_ms is None else watermark_ms
                        self._highest[key] = max(self._highest.get(key, -INT_MAX), reported)
            case Delivered(command=Deploy(deployment=deployment)):
                self._graphs[deployment.attempt] = deployment.graph
            case Delivered(command=AlignWatermarks() as command):
                self._told(command)
            case _:
                pass

    def _told(self, command: AlignWatermarks) -> None:
        graph = self._graphs.get(command.attempt)
        if graph is None:
            return
        bounds: dict[str, int] = {}
        for uid, (vertex_id, alignment) in aligned_operators(graph).items():
            for subtask in range(graph.vertex(vertex_id).parallelism):
                reported = self._highest.get((command.attempt, uid, subtask), -INT_MAX)
                bound = min(INT_MAX, reported + alignment.max_drift_ms)
                bounds[alignment.group] = min(bounds.get(alignment.group, INT_MAX), bound)
        for group, maximum_ms in command.maximum_ms.items():
            if maximum_ms > bounds.get(group, -INT_MAX):
                self.report("I33", f"group {group!r} of attempt {command.attempt} goes to {maximum_ms}, beyond {bounds}")
