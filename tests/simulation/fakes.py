"""Runs that come to what their workload is named after, for tests of everything around runs: `entry` of a SeedRunner."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

from holdfast.chaos.campaign.runner import SeedRunner, Task
from holdfast.chaos.cluster.results import RunResult, ViolationRecord
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.pipelines.judging import Dependence
from holdfast.chaos.pipelines.rows import Difference
from holdfast.chaos.sim.kernel import Trace

ENTRY = "tests.simulation.fakes:run_seed"

PLAN = tuple(Fault("kill_worker", f"worker-{index}", at_ms=100 * index) for index in range(6))
"""Of every seed whose plan is drawn; faults 1 and 4 make `broken` fail, together."""
GUILTY = {PLAN[1], PLAN[4]}

DIFFERENCE = Difference("key=1", "{'key': 1, 'n': 2}", "{'key': 1, 'n': 3}", 1, 1)
DEPENDENCES = {
    "judged": (Dependence("out", "sum", DIFFERENCE, judged=True),),
    "unjudged": (Dependence("out", "sum", DIFFERENCE, judged=False),),
    "unjudged_once": (Dependence("out", "sum", DIFFERENCE, judged=False, seed=2, parallelism=4),),
}
"""Of the third seed of these workloads."""

_runs = 0


@dataclass(frozen=True)
class FakeRequest:
    """holdfast.chaos.cluster.world.RunRequest, without the whole product that every process would have to import."""

    seed: int
    workload: str
    kinds: tuple[str, ...] = ()
    plan: tuple[Fault, ...] | None = None
    sabotage: str | None = None
    backend: str | None = None


@dataclass
class FakeRun:
    """A run that is over, with its trace."""

    result: RunResult
    trace: Trace = field(default_factory=lambda: Trace(lambda: 1_500))


def run_seed(request: FakeRequest) -> FakeRun:
    """What the workload's name says; `broken` and `hanging` only in every seventh seed from 3 on."""
    global _runs
    _runs += 1
    plan = PLAN if request.plan is None else request.plan
    special = request.seed % 7 == 3
    violations: tuple[ViolationRecord, ...] = ()
    events = [f"{request.workload} {request.seed}", *(fault.label for fault in plan)]
    match request.workload.rpartition(":")[2]:
        case "broken" if special and set(plan) >= GUILTY:
            violations = (ViolationRecord("I5", f"after {len(plan)} faults", 420),)
        case "always":
            violations = (ViolationRecord("I1", "as ever"),)
        case "raising" if special:
            raise KeyError("missing")
        case "leaving" if special:
            raise SystemExit(3)
        case "dying" if special:
            os._exit(9)
        case "hanging" if special:
            while True:
                pass
        case "deaf" if special:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            while True:
                pass
        case "ordered by hash":
            events += {"one", "two", "three", "four", "five", "six", "seven"}
        case "remembering":
            events.append(f"run {_runs} of this process")
        case "printing":
            os.write(1, b"printed by a workload\n")
        case _:
            pass
    hit = () if request.seed % 5 == 0 else tuple(range(0, len(plan), 2)) if len(plan) == len(PLAN) else tuple(range(len(plan)))
    run = FakeRun(
        RunResult(
            request.seed,
            request.workload,
            plan,
            violations,
            faults_hit=hit,
            crashes=len(hit),
            crash_points=tuple(sorted({f"worker.process.{index % 3}" for index in hit})),
            checkpoints=10,
            restarts=2,
            records=1_000,
            sometimes={"restored": 1, "rescaled": 0},
            virtual_ms=60_000,
            steps=len(events),
            dependences=DEPENDENCES.get(request.workload.rpartition(":")[2], ()) if request.seed == 2 else (),
            ended="FINISHED",
        )
    )
    if request.workload == "always":
        run.trace.add("worker-1.1", "reports failed", "UserFunctionError: long before")
    for event in events:
        run.trace.add("nobody", "event", event)
    return run


def make_request(seed: int, workload: str = "good", plan: tuple[Fault, ...] | None = None) -> Any:
    return FakeRequest(seed=seed, workload=workload, plan=plan)


def make_task(seed: int, workload: str = "good", events: int | None = 0) -> Task:
    return Task(make_request(seed, workload), events)


def make_runner(jobs: int = 1, limit_s: float = 20.0) -> SeedRunner:
    return SeedRunner(jobs, entry=ENTRY, limit_s=limit_s)


def run_keygroups(request: FakeRequest) -> FakeRun:
    """A run that touches one module of the product."""
    from holdfast.statebackends.keygroups import assign_key_groups

    assign_key_groups(128, 4, request.seed % 4)
    return run_seed(request)
