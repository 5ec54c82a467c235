"""The other world in which a copy of a checkpoint settles (I7): its stores begin as they were when the checkpoint completed, and
the same job is submitted from it, at its parallelism, by a driver that the run didn't have.

Sources give nothing, nothing fails, rows take no time, and all barriers stay in line: so the first checkpoint has none of what was
in flight in front of it left. What it is compared with, and why that is right, is in chaos/checkers/settled.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from holdfast.barriers.messages import Deploy
from holdfast.chaos.checkers.ledger import Decided, JobLedger, Snapshot
from holdfast.chaos.checkers.observations import Delivered, Observation, Stored
from holdfast.chaos.checkers.settled import Problem, Unsettled
from holdfast.chaos.cluster.cluster import Cluster
from holdfast.chaos.sim.kernel import Kernel, Streams, Trace
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.operators.base import JobPlan
from holdfast.operators.sinks.committing import TwoPhaseCommitter

INTERVAL_MS = 20
"""Between checkpoints: the first one is triggered soon after all subtasks run."""
PATIENCE_MS = 30_000
"""Virtual time in which it must settle, ms: more than a takeover and a restore wait for."""
TIMEOUT_MS = 20_000
"""Of its checkpoints, which wait behind all that was in flight."""


class _World(Cluster):
    """A cluster with one job, which it has as it is."""

    def __init__(
        self,
        unsettled: Unsettled,
        streams: Streams,
        kernel: Kernel,
        scenario: Scenario,
        plan: JobPlan,
        observe: Callable[[Observation], None],
    ) -> None:
        self._job = plan
        begins_as = unsettled.stores
        super().__init__(streams, kernel.trace, kernel, scenario, (), observe, begins_as=begins_as, holds_sources=True)

    def job_plan(self, parallelism: int | None, *, allow_output_repeat: bool = False) -> JobPlan:
        """As it is, whatever is asked for."""
        return self._job


class _Settling:
    """One copy, until its first checkpoint."""

    def __init__(self, run: Cluster, unsettled: Unsettled, plan: JobPlan) -> None:
        """`run`: the cluster in which the checkpoint completed."""
        self._unsettled = unsettled
        streams, scenario = Streams(run.streams.seed), replace(run.scenario, row_costs={})
        self._kernel = Kernel(streams, Trace(lambda: self._kernel.now_us))
        self._kernel.now_us = unsettled.now_ms * 1_000
        self._kernel.opaque = True
        self._cluster = _World(unsettled, streams, self._kernel, scenario, plan, self._observe)
        self._cluster.come_after(run)
        self._cluster.on_trouble = self._trouble
        self._ledger = JobLedger(self._cluster)
        self._troubles: list[str] = []
        self._settled: Snapshot | None = None

    def _trouble(self, invariant: str, message: str) -> None:
        self._troubles.append(message)

    def _observe(self, observation: Observation) -> None:
        number = self._unsettled.snapshot.checkpoint_id
        match observation:
            case Stored():
                for change in self._ledger.changes(observation):
                    if isinstance(change, Decided) and change.snapshot is not None and self._settled is None:
                        self._settled = change.snapshot
            case Delivered(command=Deploy(deployment=deployment)) if deployment.restored_checkpoint_id != number:
                self._troubles.append(f"attempt {deployment.attempt} begins from {deployment.restored_checkpoint_id}")
            case _:
                pass

    def run(self) -> Problem | None:
        """The problem in the settled state, or why it does not settle."""
        cluster, kernel, restore = self._cluster, self._kernel, str(self._unsettled.snapshot.checkpoint_id)
        try:
            cluster.use(backend=None)
            cluster.users.rewinds.add(restore)
            cluster.start_coordinator()
            cluster.start_driver(restore)
            end_us = kernel.now_us + PATIENCE_MS * 1_000
            while self._settled is None and not self._troubles and kernel.now_us < end_us:
                if not kernel.step():
                    break
            if self._settled is not None:
                return self._unsettled.problem(self._settled)
            return "I7", f"{self._unsettled.where}: it does not settle: {', '.join(self._troubles) or cluster.progress()}"
        finally:
            cluster.close()


def settle(cluster: Cluster, unsettled: Unsettled) -> Problem | None:
    """What is wrong with the state of a checkpoint of a run that has ended, once its records in flight have settled."""
    plan = cluster.plan_like(unsettled.graph)
    if plan is None:
        return "I7", f"{unsettled.where}: its graph is of no job that was submitted"
    return _Settling(cluster, unsettled, _in_line(plan)).run()


def _in_line(plan: JobPlan) -> JobPlan:
    """The job with barriers that overtake nothing; its sinks may repeat what they have committed, in stores that are copies."""
    config = msgspec.structs.replace(
        plan.graph.config,
        unaligned_checkpoints=False,
        aligned_checkpoint_timeout_ms=0,
        checkpoint_interval_ms=INTERVAL_MS,
        checkpoint_interval_during_backlog_ms=None,
        checkpoint_timeout_ms=TIMEOUT_MS,
        min_pause_ms=0,
    )
    for operator in plan.operators.values():
        if isinstance(operator, TwoPhaseCommitter):
            operator.allow_output_repeat = True
    return replace(plan, graph=msgspec.structs.replace(plan.graph, config=config))
