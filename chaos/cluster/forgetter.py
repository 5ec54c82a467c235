"""A user who has a simulated job forget a key: asks when a completed checkpoint is behind its records, asks again when nothing came
of it, and counts on a certificate once nothing is left of older checkpoints.

A leader that died behind the completion has dropped none of them; its successor knows from the claim that it should. A checkpoint
that fails is asked for again, as by the product's own loop (api/snapshots/live_erasure.py)."""

from __future__ import annotations

from typing import Any

from holdfast.barriers.erasure import EVERY_STATE, Erasure
from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.observations import Forgotten
from holdfast.chaos.checkers.state_reading import SnapshotView
from holdfast.chaos.cluster.coordinator_host import RequestResult, UserRequest
from holdfast.chaos.cluster.users import UsedCluster, completed_ids
from holdfast.chaos.sim.control import Call, JobClient
from holdfast.chaos.sim.kernel import Process
from holdfast.chaos.sim.pool import FlowPool
from holdfast.chaos.workloads.feeds import read_before
from holdfast.chaos.workloads.scenario import Forgetting
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ownership.erasures import find_older
from holdfast.statebackends.errors import HoldfastError, NotFoundError
from holdfast.statebackends.layout import JobPaths

POLL_US = 60_000
LOOKS_MAX = 8
"""At what is left of older checkpoints, before it is asked again."""


class Forgetter:
    """One key of one job, until there is a certificate or the job has ended."""

    def __init__(self, cluster: UsedCluster, wanted: Forgetting) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._process = Process("forgetter", "user")
        self._client = JobClient(cluster.control)
        client = cluster.stores.client(self._process)
        self._pool = FlowPool(cluster.kernel, self._process, client, cluster.injector, threads=1)
        self._storage = RoutedStorage(client)
        self._asked = 0

    def begin(self) -> None:
        self._later(self._wait)

    def _later(self, act: Any) -> None:
        if not self._cluster.outcome:
            self._cluster.kernel.after(POLL_US, act, self._process)

    def _wait(self) -> None:
        """Until the key's records are behind a checkpoint: a record that comes later would make state anew."""
        if self._is_behind():
            self._ask()
        else:
            self._later(self._wait)

    def _is_behind(self) -> bool:
        state, job_id = self._cluster.state, self._cluster.job_id
        numbers = completed_ids(state, job_id)
        if not numbers:
            return False
        try:
            positions = SnapshotView(state, f"{job_id}/chk-{max(numbers)}").positions((self._wanted.source_uid,))
        except HoldfastError:
            return False
        read = set(read_before(positions[self._wanted.source_uid], self._wanted.source_rows))
        return read.issuperset(range(self._wanted.rows))

    def _ask(self) -> None:
        self._asked += 1
        trigger_id = f"forget-{self._asked}"
        erasure = Erasure.of([(self._wanted.operator_uid, EVERY_STATE)], str(self._wanted.key))
        request = UserRequest(CheckpointKind.CHECKPOINT, trigger_id, erasure=erasure)
        self._cluster.trace.add("user", "has a key forgotten", trigger_id)

        def asked(answer: Any) -> None:
            if isinstance(answer, HoldfastError):
                self._later(self._ask)
            else:
                self._later(lambda: self._follow(trigger_id))

        self._client.ask(Call(self._process, "wish", self._cluster.job_id), request, str, asked)

    def _follow(self, trigger_id: str) -> None:
        def told(answer: Any) -> None:
            if isinstance(answer, RequestResult) and not answer.in_progress:
                if answer.failure or not answer.checkpoint_id:
                    self._later(self._ask)
                else:
                    self._look(answer.checkpoint_id, LOOKS_MAX)
            elif isinstance(answer, NotFoundError):
                self._later(self._ask)
            else:
                self._later(lambda: self._follow(trigger_id))

        self._client.ask(Call(self._process, "outcome", self._cluster.job_id), trigger_id, RequestResult, told)

    def _look(self, checkpoint_id: int, looks: int) -> None:
        def ended(left: Any, error: BaseException | None) -> None:
            if error is None and not left:
                self._cluster.trace.add("user", "has a certificate", str(checkpoint_id))
                self._cluster.observe(Forgotten(self._cluster.kernel.now_ms, checkpoint_id))
            elif looks > 1:
                self._later(lambda: self._look(checkpoint_id, looks - 1))
            else:
                self._later(self._ask)

        flow = find_older(JobPaths(self._cluster.job_id), checkpoint_id)
        self._pool.drive(flow, ended, self._storage)
