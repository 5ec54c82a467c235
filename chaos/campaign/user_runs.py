"""Runs of a user's own pipeline: first without faults, twice, in another order of arrival and at another time of day; then with the
faults of the seed.

Output that differs between the first two depends on order or time. Output that differs only later is compared once more, in orders
that this seed draws: a difference that a run without faults shows is no violation. No run depends on which seeds ran before."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from holdfast.chaos.cluster.emitted import EmittedRows
from holdfast.chaos.cluster.results import RunResult, ViolationRecord
from holdfast.chaos.cluster.world import HORIZON_MIN_MS, PATIENCE_MS, Run, RunRequest, Simulation, sabotaged
from holdfast.chaos.faults.faults import Fault, expand_kinds
from holdfast.chaos.pipelines.judging import Dependence, SinkJudge, expected_difference
from holdfast.chaos.pipelines.rows import Difference, Row, difference, frozen_rows, operator_rows, operators_before
from holdfast.chaos.pipelines.undeclared import hint
from holdfast.chaos.sim.kernel import Streams
from holdfast.chaos.workloads import find_workload
from holdfast.chaos.workloads.scenario import Scenario, SinkExpectation

REFERENCE_SEEDS = (0, 1)
"""Seeds of the two runs without faults that every seed is compared with."""
OTHER_ORDERS = 2
"""Further such runs, for output that differs in a run with faults."""
DAY_MS = 86_400_000
HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Interleaving:
    """An order of events without faults: delays, and a jump of the wall clock."""

    seed: int
    delay_ms: int = 0
    """Delay of one frame or call in a few."""
    jump_ms: int = 0
    """Jump of the workers' wall clock, in the middle of the run."""
    parallelism: int | None = None

    def plan(self, scenario: Scenario, duration_ms: int) -> tuple[Fault, ...]:
        """The order as a plan of delays that kill no process."""
        plan: list[Fault] = []
        if self.delay_ms:
            plan.append(Fault("slow_link", "all", 0, duration_ms=PATIENCE_MS, probability=0.4, amount=self.delay_ms))
            plan += [
                Fault("slow_operator", uid, 0, duration_ms=PATIENCE_MS, probability=0.2, amount=self.delay_ms)
                for uid in scenario.operators
            ]
        if self.jump_ms:
            plan.append(Fault("clock_jump", "workers", duration_ms // 2, amount=self.jump_ms))
        return tuple(plan)


@dataclass(frozen=True, slots=True)
class Reference:
    """Output of a job without failures."""

    rows: tuple[list[Row], ...]
    """Committed rows of each sink, in the order of commits."""
    emitted: EmittedRows
    duration_ms: int
    """Virtual."""


@dataclass(frozen=True, slots=True)
class References:
    """Both runs without faults."""

    first: Reference
    dependences: tuple[Dependence, ...]
    """One for each sink whose output differs in them."""


_known: dict[bytes, References] = {}
_orders: dict[tuple[bytes | int, ...], tuple[Dependence, ...]] = {}
"""Runs in other orders: a failure that is minimised needs the same ones again and again."""
KNOWN_MAX = 16
"""Most pipelines whose references a process keeps."""


def run_user_seed(request: RunRequest, scenario: Scenario, kinds: tuple[str, ...]) -> Run:
    """Run one seed of a user's own pipeline."""
    references = _references(request, scenario)
    if isinstance(references, Run):
        return references
    judges = _judges(scenario, references.first)
    for judge, rows in zip(judges, references.first.rows, strict=True):
        problem = judge.problem(rows)  # its own rows are not compared: only the user's expectations can fail
        if problem is not None:
            return _without_faults(request, scenario, problem.invariant, problem.message)
    horizon_ms = max(HORIZON_MIN_MS, references.first.duration_ms)
    dependences = references.dependences
    for _ in range(len(judges) + 1):  # each round another sink is left out of the comparison
        judged = _with_judges(scenario, judges, dependences)
        with sabotaged(request.sabotage):
            simulation = Simulation(request, judged, kinds, horizon_ms)
            run = simulation.run()
        if simulation.misjudged is None:
            break
        if any(each.sink == simulation.misjudged.sink_id and not each.judged for each in dependences):
            break
        others = _other_orders(request, scenario, references.first, simulation.misjudged, run.result.plan)
        late = next((each for each in others if not each.judged), None)
        late = late or _by_batches(request, judged, references.first, simulation)
        if late is None:
            break
        dependences = (*dependences, late)
    found = msgspec.structs.replace(run.result, dependences=dependences, violations=_hinted(run.result, simulation))
    return Run(found, run.trace)


def _by_batches(request: RunRequest, scenario: Scenario, first: Reference, run: Simulation) -> Dependence | None:
    """The dependence of a misjudged sink behind a running aggregate, without expectations of its user; None otherwise."""
    sink = run.misjudged
    assert sink is not None
    assert sink.user is not None
    graph = scenario.plan(None).graph
    kinds = {operator.uid: operator.kind for vertex in graph.vertices for operator in vertex.operators}
    running = next((uid for uid in operators_before(graph, sink.sink_id) if kinds[uid] == "aggregate"), None)
    if running is None or sink.user.expectations:
        return None
    place = [each.sink_id for each in scenario.sinks].index(sink.sink_id)
    one, other = (frozen_rows(sink.user.schema, rows[place]) for rows in (first.rows, run.committed_rows()))
    told = difference(sink.user.rows, one, other)
    return None if told is None else Dependence(sink.sink_id, running, told, judged=False, seed=request.seed, batches=True)


def _hinted(found: RunResult, simulation: Simulation) -> tuple[ViolationRecord, ...]:
    """The violation with a hint about undeclared memory, where a process or an attempt ended before the job did."""
    if not found.violations or simulation.misjudged is None or not (found.restarts or found.crashes):
        return found.violations
    hints = [hint(operator, places) for operator, places in simulation.undeclared().items()]
    if not hints:
        return found.violations
    first, *rest = found.violations
    return (msgspec.structs.replace(first, message="\n".join([first.message, *hints])), *rest)


# ------------------------------------------------------------------------------------------------------------- references


def _references(request: RunRequest, scenario: Scenario) -> References | Run:
    """References of a pipeline, made once a process; the run itself if it fails."""
    key = _identity(request, scenario)
    known = _known.get(key)
    if known is not None:
        return known
    first = _reference(request, scenario, Interleaving(REFERENCE_SEEDS[0]), 0)
    if isinstance(first, Run):
        return first
    second = _reference(request, scenario, Interleaving(REFERENCE_SEEDS[1], delay_ms=30, jump_ms=HOUR_MS), first.duration_ms)
    if isinstance(second, Run):
        return second
    references = References(first, tuple(_dependences(scenario, first, second)))
    while len(_known) >= KNOWN_MAX:
        del _known[next(iter(_known))]
    _known[key] = references
    return references


def _identity(request: RunRequest, scenario: Scenario) -> bytes:
    """Identity of a pipeline: its name, its graph, and the text of the user's modules."""
    digest = hashlib.blake2b(f"{request.workload} {request.backend}".encode(), digest_size=16)
    digest.update(msgspec.json.encode(scenario.plan(None).graph))
    for name in sorted(scenario.user_modules):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and Path(path).is_file():
            digest.update(Path(path).read_bytes())
    return digest.digest()


def _reference(request: RunRequest, scenario: Scenario, order: Interleaving, duration_ms: int) -> Reference | Run:
    emitted = EmittedRows()
    asked = replace(request, seed=order.seed, plan=order.plan(scenario, duration_ms))
    simulation = Simulation(
        asked, scenario, (), scenario.duration_ms, patient=True, emitted=emitted, parallelism=order.parallelism
    )
    run = simulation.run()
    if run.result.violations:
        result = msgspec.structs.replace(run.result, seed=request.seed, plan=request.plan or ())
        return Run(result, run.trace)
    if run.result.restarts:
        emitted.complete = False  # a failure of its own: some rows were given twice
    return Reference(simulation.committed_rows(), emitted, run.result.virtual_ms)


def _dependences(scenario: Scenario, first: Reference, second: Reference) -> list[Dependence]:
    """Dependences of the sinks whose rows, as a multiset, differ in two runs without faults."""
    found = []
    for sink, one, other in zip(scenario.sinks, first.rows, second.rows, strict=True):
        assert sink.user is not None
        frozen_one, frozen_other = (frozen_rows(sink.user.schema, rows) for rows in (one, other))
        differs = difference(sink.user.rows, frozen_one, frozen_other)
        if differs is not None:
            operator, told = _culprit(scenario, first, second, sink) or (sink.user.rows.operator, differs)
            judged = bool(sink.user.expectations) and not _differs_for_user(sink, frozen_one, frozen_other)
            found.append(Dependence(sink.user.sink_id, operator, told, judged))
    return found


def _differs_for_user(sink: SinkExpectation, one: Sequence[Row], other: Sequence[Row]) -> bool:
    """Whether rows differ in the columns that the user wants compared."""
    assert sink.user is not None
    said = [each for each in sink.user.expectations if each.compares]
    return any(expected_difference(sink.user.rows, each, one, other) is not None for each in said)


def _culprit(
    scenario: Scenario, first: Reference, second: Reference, sink: SinkExpectation
) -> tuple[str, Difference] | None:
    """The first operator, on the way of the records to a sink, that emitted other rows."""
    if not (first.emitted.complete and second.emitted.complete):
        return None
    plan = scenario.plan(None)
    one, other = first.emitted, second.emitted
    for uid in operators_before(plan.graph, sink.sink_id):
        for output in sorted({*one.outputs_of(uid), *other.outputs_of(uid)}):
            if one.counted(output) != other.counted(output):
                source = operator_rows(plan, uid, one.columns.get(output, ()))
                told = difference(source, one.rows.get(output, []), other.rows.get(output, []))
                return None if told is None else (uid, told)
    return None


def _other_orders(
    request: RunRequest, scenario: Scenario, first: Reference, sink: SinkExpectation, plan: tuple[Fault, ...]
) -> list[Dependence]:
    """The dependence of a sink whose rows differ in runs without faults, in orders that this seed draws; None if they do not."""
    rescaled = tuple(fault.amount for fault in plan if fault.kind == "rescale")
    key: tuple[bytes | int, ...] = (_identity(request, scenario), request.seed, *rescaled)
    if key not in _orders:
        while len(_orders) >= KNOWN_MAX:
            del _orders[next(iter(_orders))]
        _orders[key] = _late_dependences(request, scenario, first, rescaled)
    return [each for each in _orders[key] if each.sink == sink.sink_id]


def _late_dependences(
    request: RunRequest, scenario: Scenario, first: Reference, rescaled: tuple[int, ...]
) -> tuple[Dependence, ...]:
    """Rows of every sink, in these orders; one of the runs at the parallelism to which the seed's run was rescaled."""
    found: list[Dependence] = []
    drawn = random.Random(request.seed)
    for number in range(OTHER_ORDERS):
        order = Interleaving(
            drawn.getrandbits(31),
            delay_ms=(100, 600)[number % 2],
            jump_ms=(40 * DAY_MS, -HOUR_MS)[number % 2],
            parallelism=rescaled[0] if rescaled and number == 0 else None,
        )
        other = _reference(request, scenario, order, first.duration_ms)
        if isinstance(other, Run):
            continue
        found += [
            msgspec.structs.replace(each, seed=request.seed, parallelism=order.parallelism)
            for each in _dependences(scenario, first, other)
        ]
    return tuple(found)


# ---------------------------------------------------------------------------------------------------------------- judging


def _judges(scenario: Scenario, reference: Reference) -> list[SinkJudge]:
    return [
        SinkJudge(sink.user, rows)
        for sink, rows in zip(scenario.sinks, reference.rows, strict=True)
        if sink.user is not None
    ]


def _with_judges(scenario: Scenario, judges: list[SinkJudge], dependences: Sequence[Dependence]) -> Scenario:
    """The scenario with sinks that depend on the order of arrival, or on time, judged by their invariants alone."""
    unjudged = {each.sink for each in dependences if not each.judged}
    sinks = []
    for sink, complete in zip(scenario.sinks, judges, strict=True):
        judge = complete.of_invariants() if sink.sink_id in unjudged else complete
        sinks.append(replace(sink, judge=judge.problem))
    return replace(scenario, sinks=tuple(sinks))


def _without_faults(request: RunRequest, scenario: Scenario, invariant: str, message: str) -> Run:
    """The result of a run whose violation needs no fault."""
    simulation = Simulation(replace(request, plan=()), scenario, (), scenario.duration_ms, patient=True)
    run = simulation.run()
    violation = ViolationRecord(invariant, f"without any fault: {message}", run.result.virtual_ms)
    result = msgspec.structs.replace(run.result, plan=(), violations=(violation, *run.result.violations))
    return Run(result, run.trace)


def run_seed(request: RunRequest) -> Run:
    """Run one seed. Raises InvalidConfigError for an unknown workload, fault or sabotage; all else is in the result."""
    workload = find_workload(request.workload)
    kinds = expand_kinds(request.kinds)
    scenario = workload.make(Streams(request.seed).of("workload"))
    if any(sink.user is not None for sink in scenario.sinks):
        return run_user_seed(request, scenario, kinds)
    with sabotaged(request.sabotage):
        return Simulation(request, scenario, kinds, scenario.duration_ms).run()
