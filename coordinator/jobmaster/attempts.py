"""Part of the job master: the next attempt, from its number to its deployments. Prepared once, deployed once."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import Deployment, SubtaskDeployment, SubtaskKey
from holdfast.coordinator.ha.records import RestorePoint
from holdfast.coordinator.jobmaster import events as job
from holdfast.coordinator.jobmaster.workforce import DataPorts, JobTurn
from holdfast.coordinator.totals import Totals
from holdfast.statebackends.errors import InvariantError
from holdfast.statebackends.handles import OperatorSubtaskState

PREPARE_RETRY_MS = 500
PREPARE_TRIES_MAX = 60
"""Tries of one attempt against storage that fails; then the job fails with its words."""


class NextAttempt:
    """`number` is the job's attempt from the moment the older one is fenced: workers are told of it before it is deployed."""

    def __init__(self, graph: JobGraph, number: int, turn: JobTurn, base: Totals | None = None) -> None:
        """`base`: of an attempt that runs already."""
        self._graph = graph
        self._turn = turn
        self.number = number
        self.restore: RestorePoint | None = None
        self.base: Totals = base or {}
        """What the submission's operators had counted at the cut that it begins with."""
        self._states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]] | None = None
        self._under_way = False
        self._retry_ms: int | None = None
        self._tries = 0
        self.deployments: dict[int, Deployment] = {}
        """Slot -> what it was given; empty until deployed."""

    @property
    def is_prepared(self) -> bool:
        return self._states is not None

    @property
    def retry_ms(self) -> int | None:
        """When preparation is tried again."""
        return self._retry_ms

    def prepare(self, restore: RestorePoint | None, restarts: int, base: Totals) -> None:
        """Ask for the preparation, unless it is under way, done, or waits for its next try."""
        waiting = self._retry_ms is not None and self._turn.now_ms < self._retry_ms
        if self._under_way or self.is_prepared or waiting:
            return
        self._under_way, self._retry_ms = True, None
        self.restore, self.base = restore, base
        self._turn.out.append(job.PrepareAttempt(self.number, restore, restarts, base))

    def prepared(self, event: job.AttemptPrepared) -> None:
        if event.attempt == self.number:
            self._under_way = False
            self._states = event.states

    def taken(self, event: job.AttemptTaken) -> None:
        """The number is an older leader's: take the next one."""
        if event.attempt == self.number:
            self._under_way = False
            self.number += 1

    def delayed(self, event: job.AttemptDelayed) -> bool:
        """Storage failed; False when it has failed too often."""
        if event.attempt != self.number:
            return True
        self._under_way = False
        self._tries += 1
        self._retry_ms = self._turn.now_ms + PREPARE_RETRY_MS
        return self._tries < PREPARE_TRIES_MAX

    def deploy(self, ports: DataPorts, secret: str) -> Mapping[int, Deployment]:
        """One deployment per slot, with the data ports of the processes that hold the slots now, and what lets only them in."""
        if self._states is None:
            raise InvariantError(f"attempt {self.number} is deployed before it is prepared")
        states, nothing = self._states, dict[str, OperatorSubtaskState]()
        self.deployments = {
            slot: Deployment(
                attempt=self.number,
                graph=self._graph,
                subtasks=tuple(
                    SubtaskDeployment(vertex.vertex_id, slot, dict(states.get(SubtaskKey(vertex.vertex_id, slot), nothing)))
                    for vertex in self._graph.vertices
                    if slot < vertex.parallelism
                ),
                addresses=dict(ports.addresses),
                data_keys=dict(ports.keys),
                data_sockets=dict(ports.sockets),
                data_secret=secret,
                restored_checkpoint_id=self.restore.checkpoint_id if self.restore is not None else 0,
                restored_folder=self.restore.folder if self.restore is not None else "",
                restored_from=self.restore.timestamp_ms if self.restore is not None else 0,
            )
            for slot in sorted(ports.addresses)
        }
        return self.deployments
