"""Tasks that a checkpoint says to have finished: each had come to its end in front of the cut, and emits nothing behind it.

I11 for what the snapshot says of the tasks that acknowledged; I8 for an attempt that is restored from it (docs/invariants.md)."""

from __future__ import annotations

from typing import ClassVar

from holdfast.barriers.exchange.guarantee import behind_loose
from holdfast.barriers.messages import AcknowledgeCheckpoint, SubtaskKey, SubtaskStatus
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import Observation, Report, Reported, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.statebackends.snapshot.metadata import FINISHED_PROPERTY


class FinishedChecker(Checker):
    """Follows what tasks say of their end, at the workers' loops."""

    invariants: ClassVar[tuple[str, ...]] = ("I8", "I11")
    hears: ClassVar[tuple[type, ...]] = (Stored, Reported)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._ended: set[tuple[int, SubtaskKey]] = set()
        """(attempt, task) that has told of its end."""
        self._finished: dict[tuple[int, int], set[SubtaskKey]] = {}
        """(attempt, checkpoint id) -> tasks that acknowledged it as finished."""
        self._whole: dict[int, frozenset[str]] = {}
        """Completed id -> vertices of which all tasks had finished."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Reported(item=AcknowledgeCheckpoint(finished=True) as ack):
                self._finished.setdefault((ack.attempt, ack.checkpoint_id), set()).add(SubtaskKey(ack.vertex, ack.subtask))
            case Reported(item=SubtaskStatus(drained=True) as status):
                self._ended.add((status.attempt, SubtaskKey(status.vertex, status.subtask)))
                self._check_silent(status)
            case Stored(added=added) if added:
                for change in self.ledger.changes(observation):
                    if isinstance(change, Decided) and change.snapshot is not None:
                        self._check_snapshot(change.snapshot)
            case _:
                pass

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        number, attempt = snapshot.checkpoint_id, snapshot.claim.attempt
        told = self._finished.pop((attempt, number), set())
        text = snapshot.metadata.properties.get(FINISHED_PROPERTY, "")
        names = set(text.split(",")) - {""}
        if missing := {f"{task.vertex}:{task.subtask}" for task in told} - names:
            self.report("I11", f"checkpoint {number} does not say that {sorted(missing)} had finished")
        submission = self.ledger.submissions.get(snapshot.claim.submission)
        if submission is None:
            return
        whole: set[str] = set()
        graph = submission.graph
        loose = behind_loose(graph)
        for vertex in graph.vertices:
            tasks = [SubtaskKey(vertex.vertex_id, index) for index in range(vertex.parallelism)]
            finished = [task for task in tasks if f"{task.vertex}:{task.subtask}" in names]
            if early := [task.subtask for task in finished if (attempt, task) not in self._ended]:
                self.report("I11", f"checkpoint {number} says that {vertex.name} {early} had finished, which had not")
            # at least once an end may lie behind a barrier, and what is in front of it comes again unless those before it had ended
            follows = vertex.vertex_id not in loose or all(edge.source in whole for edge in graph.inputs(vertex.vertex_id))
            if finished == tasks and follows:
                whole.add(vertex.vertex_id)
        self._whole[number] = frozenset(whole)

    def _check_silent(self, status: SubtaskStatus) -> None:
        """What had finished in front of the restored checkpoint has nothing to read and nothing to emit."""
        record = self.ledger.attempts.get(status.attempt)
        if record is None or record.restored is None or status.metrics is None:
            return
        emitted = sum(each.records_in + each.records_out for each in status.metrics.operators)
        if emitted and status.vertex in self._whole.get(record.restored.checkpoint_id, ()):
            number = record.restored.checkpoint_id
            where = f"{status.vertex} ({status.subtask}) of attempt {status.attempt}"
            self.report("I8", f"{where} had finished in front of checkpoint {number}, and reads or emits {emitted} records again")
