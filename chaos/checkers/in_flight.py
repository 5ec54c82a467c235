"""What a snapshot holds in flight is what the next attempt restores: once, in order, before anything new (I36, docs/invariants.md).

The snapshot is read with Arrow alone, and each restored row at the gate of the subtask that got it. Which of the old channels goes
where is not repeated here, but for what follows from it: of an edge all rows are restored, none twice, those of an old channel that
come to one subtask come on one channel and in their order, and those of one key to one subtask."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from holdfast.barriers.alignment.inflight import ELEMENT_BYTES
from holdfast.barriers.exchange.wiring import derive_inputs, name_edges
from holdfast.barriers.jobgraph import JobEdge, JobGraph, Partitioning
from holdfast.barriers.messages import CheckpointKind, Deploy, Deployment, SubtaskStatus, TaskState
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import (
    Delivered,
    InFlightRestored,
    Observation,
    Report,
    Reported,
    Stored,
    TakenOutOfTurn,
    WorldView,
)
from holdfast.chaos.checkers.state_reading import SnapshotView, StoredChannel
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.snapshot.in_flight import EdgeName
from holdfast.statebackends.snapshot.pieces import TIMESTAMPS

Rows = list[tuple[Any, ...]]


@dataclass(slots=True)
class _Attempt:
    """An attempt that begins with records in flight."""

    where: str
    graph: JobGraph
    stored: dict[EdgeName, list[StoredChannel]]
    before: JobGraph
    """Of the attempt that stored them."""
    events: Counter[int] = field(default_factory=Counter)
    """Edge id -> watermarks and statuses in front of its channels."""
    restored: dict[int, dict[tuple[int, int], Rows]] = field(default_factory=lambda: defaultdict(dict))
    """Edge id -> (producer, consumer) -> rows in front of that channel."""
    running: set[tuple[str, int]] = field(default_factory=set)
    judged: set[int] = field(default_factory=set)


class InFlightChecker(Checker):
    """Compares what gates restore with the snapshot that their attempt begins from."""

    invariants: ClassVar[tuple[str, ...]] = ("I36", "I17", "I11")
    hears: ClassVar[tuple[type, ...]] = (Stored, Delivered, InFlightRestored, TakenOutOfTurn, Reported)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._newest = 0
        self._attempt: _Attempt | None = None
        """The newest attempt, if it begins with records in flight."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Delivered(command=Deploy(deployment=deployment)) if deployment.attempt > self._newest:
                self._newest = deployment.attempt
                self._attempt = self._begin(deployment)
            case Stored():
                if observation.added:
                    self._stored(observation)
            case InFlightRestored(attempt=attempt):
                if attempt == self._newest:
                    self._restored(observation)
            case TakenOutOfTurn():
                who = f"{observation.vertex} ({observation.subtask}) of attempt {observation.attempt}"
                took = f"took a batch on channel {observation.channel} out of turn"
                self.report("I36", f"{who} {took}: {observation.waiting} restored ones come first")
            case Reported(item=SubtaskStatus(state=TaskState.RUNNING) as status) if status.attempt == self._newest:
                self._runs(status)
            case _:
                pass

    def _stored(self, fact: Stored) -> None:
        for change in self.ledger.changes(fact):
            if not isinstance(change, Decided) or change.snapshot is None or not change.snapshot.metadata.in_flight:
                continue
            where = f"{change.snapshot.kind} {change.checkpoint_id}"
            if change.snapshot.kind is not CheckpointKind.CHECKPOINT:
                self.report("I36", f"{where} holds records in flight")
            self._measure(where, change.snapshot)

    def _measure(self, where: str, snapshot: Snapshot) -> None:
        """What a subtask has stored in flight is within its limit. Numbers have 8 bytes, of anything else 1 is counted, and
        ELEMENT_BYTES of each batch and event."""
        graph = msgspec.convert(snapshot.metadata.graph, JobGraph)
        sizes: Counter[tuple[str, int]] = Counter()
        try:
            for channel in SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata).in_flight():
                uid, subtask = (channel.edge.target, 1) if channel.side == "input" else (channel.edge.source, 0)
                vertex = next(each.vertex_id for each in graph.vertices if any(op.uid == uid for op in each.operators))
                cells = (value for row in channel.rows for name, value in row.items() if name != TIMESTAMPS)
                sizes[vertex, channel.channel[subtask]] += ELEMENT_BYTES * channel.elements
                sizes[vertex, channel.channel[subtask]] += sum(8 if isinstance(value, int | float) else 1 for value in cells)
        except HoldfastError as error:
            self.report("I11", f"{where}: {error}")
        for (vertex, subtask), size in sizes.items():
            if size > graph.config.inflight_bytes_max:
                limit = graph.config.inflight_bytes_max
                self.report("I17", f"{where}: {vertex} ({subtask}) has {size} bytes in flight, of {limit} that it may")

    def _begin(self, deployment: Deployment) -> _Attempt | None:
        snapshot = self.ledger.completed.get(deployment.restored_checkpoint_id)
        if snapshot is None or not snapshot.metadata.in_flight:
            return None
        stored: dict[EdgeName, list[StoredChannel]] = defaultdict(list)
        try:
            for channel in SnapshotView(snapshot.view, snapshot.folder, snapshot.metadata).in_flight():
                stored[channel.edge].append(channel)
        except HoldfastError:
            return None  # damaged or gone: the restore fails, and others say why it may
        before = msgspec.convert(snapshot.metadata.graph, JobGraph)
        return _Attempt(f"attempt {deployment.attempt} from {snapshot.checkpoint_id}", deployment.graph, dict(stored), before)

    def _restored(self, fact: InFlightRestored) -> None:
        attempt = self._attempt
        if attempt is None:
            self.report("I36", f"attempt {fact.attempt}: {fact.vertex} ({fact.subtask}) restores rows in flight of no snapshot")
            return
        channel = derive_inputs(attempt.graph, fact.vertex, fact.subtask)[fact.channel].channel
        rows = attempt.restored[channel.edge].setdefault((channel.producer, channel.consumer), [])
        rows += fact.rows
        attempt.events[channel.edge] += fact.events

    def _runs(self, status: SubtaskStatus) -> None:
        """Once all consumers of an edge run, all that was in flight on it is in front of their channels."""
        attempt = self._attempt
        if attempt is None:
            return
        attempt.running.add((status.vertex, status.subtask))
        names = name_edges(attempt.graph)
        for edge in attempt.graph.inputs(status.vertex):
            count = attempt.graph.vertex(edge.target).parallelism
            if edge.edge_id in attempt.judged or any((edge.target, each) not in attempt.running for each in range(count)):
                continue
            attempt.judged.add(edge.edge_id)
            stored = attempt.stored.get(names[edge.edge_id], [])
            problem = _problem(edge, stored, attempt.restored[edge.edge_id]) or _wrong_events(attempt, edge, stored)
            if problem is not None:
                self.report("I36", f"{attempt.where}: {edge.source_operator} -> {names[edge.edge_id].target}: {problem}")


def _wrong_events(attempt: _Attempt, edge: JobEdge, stored: list[StoredChannel]) -> str | None:
    """Watermarks and statuses stay if the edge is as it was; those of one channel say nothing of another."""
    name = name_edges(attempt.graph)[edge.edge_id]
    old = {name: edge for edge, name in _named(attempt.before)}.get(name)
    is_same = old is not None and _sizes(attempt.before, old) == _sizes(attempt.graph, edge)
    wanted = sum(channel.events for channel in stored) if is_same else 0
    found = attempt.events[edge.edge_id]
    return None if found == wanted else f"{found} watermarks and statuses are restored, not {wanted}"


def _named(graph: JobGraph) -> list[tuple[JobEdge, EdgeName]]:
    names = name_edges(graph)
    return [(edge, names[edge.edge_id]) for edge in graph.edges]


def _sizes(graph: JobGraph, edge: JobEdge) -> list[tuple[int, int]]:
    return [(each.parallelism, each.max_parallelism) for each in (graph.vertex(edge.source), graph.vertex(edge.target))]


def _problem(edge: JobEdge, stored: list[StoredChannel], restored: dict[tuple[int, int], Rows]) -> str | None:
    """What is wrong with the rows of one edge."""
    before = Counter(tuple(row.values()) for channel in stored for row in channel.rows)
    after = Counter(row for rows in restored.values() for row in rows)
    if before != after:
        missing, extra = before - after, after - before
        return f"{missing.total()} rows in flight are not restored, and {extra.total()} that were not, or again: {missing or extra}"
    if edge.partitioning is Partitioning.HASH and edge.key and stored:
        problem = _one_owner(edge.key, stored, restored)
        if problem is not None:
            return problem
    return _in_order(stored, restored, {row for row, count in before.items() if count == 1})


def _one_owner(key: tuple[str, ...], stored: list[StoredChannel], restored: dict[tuple[int, int], Rows]) -> str | None:
    # The rows of one edge may differ in their columns: those that a combiner let go are partial results.
    values: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in (row for channel in stored for row in channel.rows):
        values[tuple(row.values())] = tuple(row[name] for name in key if name in row)
    owners: dict[tuple[Any, ...], int] = {}
    for (_, consumer), rows in restored.items():
        for value in (values[row] for row in rows):
            if value and owners.setdefault(value, consumer) != consumer:
                return f"key {value} is restored by the subtasks {owners[value]} and {consumer}"
    return None


def _in_order(stored: list[StoredChannel], restored: dict[tuple[int, int], Rows], single: set[tuple[Any, ...]]) -> str | None:
    """Rows of which there are several can't be told apart, and are left out."""
    places: dict[tuple[Any, ...], tuple[tuple[int, int], int]] = {}
    counts: Counter[tuple[int, int]] = Counter()
    for channel in stored:
        for each in channel.rows:
            places[tuple(each.values())] = (channel.channel, counts[channel.channel])
            counts[channel.channel] += 1
    used: dict[tuple[tuple[int, int], int], int] = {}
    for (producer, consumer), rows in restored.items():
        last: dict[tuple[int, int], int] = {}
        for row in rows:
            if row not in single:
                continue
            old, at = places[row]
            if at < last.get(old, -1):
                return f"row {row} of channel {old} comes behind one that was behind it"
            last[old] = at
            if used.setdefault((old, consumer), producer) != producer:
                return f"rows of channel {old} come to subtask {consumer} on two channels"
    return None
