"""One run of one seed: draw a job and its faults, run it, see that it ends, and check everything.

A run has three phases: safety (faults on), liveness (faults off: the job must end within a bound) and quiet (the job has ended:
what is left in the stores is checked)."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.barriers.messages import SubtaskStatus, TaskState
from holdfast.chaos.checkers import make_checkers
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.cut import CutChecker
from holdfast.chaos.checkers.ledger import decision_in
from holdfast.chaos.checkers.observations import Observation, PhaseBegan, Remembered, Reported, Stored
from holdfast.chaos.checkers.oracle import committed
from holdfast.chaos.checkers.output import OutputChecker
from holdfast.chaos.checkers.sometimes import Sometimes
from holdfast.chaos.cluster.cluster import Cluster
from holdfast.chaos.cluster.emitted import EmittedRows
from holdfast.chaos.cluster.results import RunResult, ViolationRecord
from holdfast.chaos.cluster.settling import settle
from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.faults.plan import draw_plan
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.sim.kernel import Kernel, Streams, Trace
from holdfast.chaos.workloads.scenario import Scenario, SinkExpectation
from holdfast.coordinator.ha.recorded_job import Completed
from holdfast.coordinator.ha.records import ClaimRecord, SavepointRecord, decode_record
from holdfast.statebackends.state_processor.writing import forget_newest
from holdfast.statebackends.storage.port import PutIfAbsent

HORIZON_MIN_MS = 500
PATIENCE_MS = 3_600_000
"""Virtual time that a failure-free run of a user's job may take, ms."""
FAILURES_MAX = 5
"""Failed attempts that a failure-free run of a user's job may have: without faults to recover from, more would fail as well."""
LIVENESS_MS = 180_000
"""Virtual time without faults in which the job must end, ms: several of the longest timeouts of the protocols."""
STEPS_MAX = 400_000
"""Events in which it must end."""
QUIET_MS = 15_000
"""Virtual time after the end in which every process must come to rest, ms."""
LOOK_US = 100_000
_COPIES_LOG = logging.getLogger("holdfast.localrecovery")
"""Logger of warnings about damaged copies, which some faults make."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run to be made."""

    seed: int
    workload: str
    kinds: tuple[str, ...] = ()
    """Kinds of faults, or families, that may be drawn; empty: all."""
    plan: tuple[Fault, ...] | None = None
    """The faults; None: drawn from the seed."""
    sabotage: str | None = None
    backend: str | None = None
    """State backend in the place of the workload's."""
    faults: int | None = None
    """Number of drawn faults; None: drawn, too."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run and its trace."""

    result: RunResult
    trace: Trace


@contextlib.contextmanager
def sabotaged(name: str | None) -> Iterator[None]:
    """The product with one of its rules broken; None: unchanged."""
    if name is None:
        yield
        return
    from holdfast.chaos.sabotage import find_sabotage

    with find_sabotage(name).apply():
        yield


class Simulation:
    """One run under way."""

    def __init__(
        self,
        request: RunRequest,
        scenario: Scenario,
        kinds: tuple[str, ...],
        horizon_ms: int,
        *,
        patient: bool = False,
        emitted: EmittedRows | None = None,
        parallelism: int | None = None,
    ) -> None:
        """`horizon_ms`: about how long the job takes. `patient`: that is not known yet. `emitted`: records what operators emit."""
        self._request = request
        self._patient = patient
        self._faults_end_ms = PATIENCE_MS if patient else 3 * horizon_ms
        self._streams = Streams(request.seed)
        self.trace = Trace(lambda: self._kernel.now_us)
        self._kernel = Kernel(self._streams, self.trace)
        self._scenario = scenario
        plan = request.plan
        if plan is None:
            plan = self._drawn(kinds, horizon_ms)
        self._plan = plan
        self._violations: list[ViolationRecord] = []
        self._sometimes = Sometimes()
        self._hearers: dict[type, list[Callable[[Any], None]]] = {
            Stored: [self._note_stored],
            Reported: [self._note_reported],
            Remembered: [self._note_remembered],
        }
        self._completed = 0
        self._attempts: set[int] = set()
        self._failed_attempts: set[int] = set()
        self._cluster = Cluster(self._streams, self.trace, self._kernel, self._scenario, plan, self._observe, emitted)
        self._cluster.parallelism = parallelism
        self._checkers: Sequence[Checker] = ()
        self._cluster.on_trouble = self._report
        self._cluster.use(backend=request.backend)
        self._checkers = make_checkers(self._cluster, self._scenario, self._report)
        for checker in self._checkers:
            for kind in checker.hears:
                self._hearers.setdefault(kind, []).append(checker.observe)
        self._next_look_us = 0
        self._undeclared: dict[str, list[str]] = {}

    def _drawn(self, kinds: tuple[str, ...], horizon_ms: int) -> tuple[Fault, ...]:
        request, graph = self._request, self._scenario.plan(None).graph
        config = msgspec.structs.replace(graph.config, state_backend=request.backend or graph.config.state_backend)
        return draw_plan(
            self._streams.of("plan"),
            kinds,
            self._scenario,
            graph.slots_required,
            faults=request.faults,
            horizon_ms=horizon_ms,
            config=config,
        )

    # ----------------------------------------------------------------------------------------------------- observations

    def _report(self, invariant: str, message: str) -> None:
        self.trace.add("checker", f"VIOLATION {invariant}", message)
        cause_ms = next((each.cause_ms for each in self._checkers if each.cause_ms is not None), None)
        self._violations.append(ViolationRecord(invariant, message, self._kernel.now_ms, cause_ms))

    def _observe(self, observation: Observation) -> None:
        self._sometimes.observe(observation)
        for hear in self._hearers.get(type(observation), ()):
            hear(observation)

    def _note_stored(self, fact: Stored) -> None:
        operation = fact.operation
        if not isinstance(operation, PutIfAbsent) or not fact.added or not operation.path.endswith("/_metadata"):
            return
        decision = decision_in(bytes(operation.data))
        if not isinstance(decision, Completed | SavepointRecord):
            return
        claim = self._cluster.state.peek(operation.path.removesuffix("_metadata") + "_claim")
        if claim is not None:
            self._completed += 1
            record = decode_record(ClaimRecord, claim, operation.path)
            in_flight = isinstance(decision, Completed) and b'"version":2,' in bytes(operation.data[:60])
            self._sometimes.completed(record.kind, record.checkpoint_id, in_flight=in_flight)

    def _note_reported(self, fact: Reported) -> None:
        self._attempts.add(fact.item.attempt)
        if isinstance(fact.item, SubtaskStatus) and fact.item.state is TaskState.FAILED:
            error = fact.item.error
            if error.startswith(("InvariantError", "AssertionError", "KeyError", "AttributeError", "TypeError", "IndexError")):
                self._report("crash", f"{fact.actor}: {error}\n{fact.item.traceback}")
            if "came without credit" in error:
                self._report("I17", f"{fact.actor}: {error}")
            self._failed_attempts.add(fact.item.attempt)
            if self._patient and len(self._failed_attempts) > FAILURES_MAX and not self._violations:
                self._report(
                    "I30", f"without any fault each of {len(self._failed_attempts)} attempts failed, the last one: {error}"
                )

    def _note_remembered(self, fact: Remembered) -> None:
        if self._has_ended or self._kernel.now_us == 0:
            return
        known = self._undeclared.setdefault(fact.uid, [])
        known += [place for place in fact.places if place not in known]

    def undeclared(self) -> dict[str, list[str]]:
        """uid -> memory of its function outside of declared state, lost when its process or its attempt ended."""
        return dict(sorted(self._undeclared.items()))

    @property
    def misjudged(self) -> SinkExpectation | None:
        """Sink of a user's pipeline whose output was found wrong."""
        return next((each.misjudged for each in self._checkers if isinstance(each, OutputChecker)), None)

    # -------------------------------------------------------------------------------------------------------------- run

    def run(self) -> Run:
        """Run all three phases, or up to the first violation."""
        handler = _Alarm(self._report)
        logger = logging.getLogger("holdfast.coordinator")
        propagate, logger.propagate = logger.propagate, False
        level = _COPIES_LOG.level
        _COPIES_LOG.setLevel(logging.ERROR)
        logger.addHandler(handler)
        try:
            self._run()
        except Exception:
            self._report("crash", traceback.format_exc(limit=-12))
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate
            _COPIES_LOG.setLevel(level)
            self._cluster.close()
            forget_newest()  # each keeps its storage, and that this world, whose objects every later collection would visit
        return Run(self._result(), self.trace)

    def committed_rows(self) -> tuple[list[Row], ...]:
        """Committed rows of each sink, in the order of commits."""
        sinks = self._scenario.sinks
        return tuple(
            [row for file in committed(self._cluster.store(sink.path), sink.sink_id) for row in file.rows] for sink in sinks
        )

    def _run(self) -> None:
        self._phase("safety")
        self._cluster.begin()
        self._cluster.injector.start()
        self._steps(self._faults_end_ms, STEPS_MAX, "safety")
        if not self._violations and not self._has_ended:
            self._cluster.injector.stop()
            self._phase("liveness")
            self._steps(self._kernel.now_ms + LIVENESS_MS, STEPS_MAX, "liveness")
            if not self._violations and not self._has_ended:
                self._report("I30", f"the job has not ended {LIVENESS_MS} ms after the last fault: {self._cluster.progress()}")
        if self._violations:
            return
        self._cluster.injector.stop()
        self._phase("quiet")
        self._steps(self._kernel.now_ms + QUIET_MS, STEPS_MAX, "quiet")
        for checker in self._checkers:
            if not self._violations:
                checker.at_end()
        if not self._violations:
            self._settle()

    def _settle(self) -> None:
        """A checkpoint of the run whose records in flight hide what its state is, in another world: this one's trace stays as it
        is, unless something is wrong there."""
        unsettled = next((each.unsettled for each in self._checkers if isinstance(each, CutChecker)), None)
        if unsettled is None:
            return
        self._sometimes.settled()
        problem = settle(self._cluster, unsettled)
        if problem is not None:
            self._report(*problem)

    @property
    def _has_ended(self) -> bool:
        return self._cluster.has_ended

    def _phase(self, phase: str) -> None:
        self.trace.add("world", phase)
        self._observe(PhaseBegan(self._kernel.now_ms, phase))

    def _steps(self, end_ms: int, steps_max: int, phase: str) -> None:
        """Run events up to a time, the end of the job (in phases before it has ended) or the first violation."""
        kernel, cluster, violations = self._kernel, self._cluster, self._violations
        end_us, step, quiet = end_ms * 1000, kernel.step, phase == "quiet"
        for _ in range(steps_max):  # thousands of rounds a run, hence the local names and so little in each
            if violations or kernel.now_us >= end_us:
                return
            if cluster.is_quiet if quiet else cluster.outcome and cluster.has_ended:
                return
            if not step():
                self._report("I30", f"nothing can happen any more: {cluster.progress()}")
                return
            if kernel.now_us >= self._next_look_us:
                self._next_look_us = kernel.now_us + LOOK_US
                for checker in self._checkers:
                    checker.look()
        self._report("I30", f"the {phase} phase has not ended after {steps_max} events: {cluster.progress()}")

    def _result(self) -> RunResult:
        cluster = self._cluster
        return RunResult(
            seed=self._request.seed,
            workload=self._request.workload,
            plan=self._plan,
            violations=tuple(self._violations[:1]),
            faults_hit=tuple(sorted(cluster.injector.hit)),
            crashes=len(cluster.crashes),
            crash_points=tuple(sorted(set(cluster.crashes))),
            checkpoints=self._completed,
            restarts=max(0, len(self._attempts) - 1),
            records=self._scenario.records,
            sometimes=dict(sorted(self._sometimes.visits.items())),
            virtual_ms=self._kernel.now_ms,
            steps=self._kernel.steps,
            trace_digest=self.trace.digest(),
            backend=cluster.job_plan(None).graph.config.state_backend,
            ended=cluster.outcome,
        )


class _Alarm(logging.Handler):
    """An internal error of the coordinator that no fault explains is a violation."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        super().__init__(logging.CRITICAL)
        self._report_violation = report

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1], limit=-8))
        self._report_violation("crash", text)
