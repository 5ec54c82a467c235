"""The summary of many runs: counts, dangerous states visited and not visited, failures. Plain records that go into JSON as they
are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.chaos.cluster.results import RunResult
from holdfast.chaos.faults.faults import KINDS, Fault
from holdfast.chaos.pipelines.judging import Dependence

IDLE_SEEDS_MAX = 10
"""Most seeds listed of runs in which no fault hit."""


class FaultCount(msgspec.Struct, frozen=True):
    """Faults of one kind, over all runs."""

    planned: int
    hit: int


class Failure(msgspec.Struct, frozen=True):
    """One run that broke an invariant."""

    seed: int
    workload: str
    invariant: str
    message: str
    replay: str
    """The command that repeats it with these faults and options."""
    at_ms: int = 0
    """Virtual time."""
    faults: dict[int, Fault] = {}
    """Index in the plan -> fault, of the faults that it takes."""
    planned: int = 0
    """Faults of the whole plan."""
    minimised: bool = False
    """Each of `faults` is needed for this failure."""
    runs: int = 0
    """Runs that minimising took."""
    events: tuple[str, ...] = ()
    """Last events of the run with these faults, or those around the cause."""
    around_cause: bool = False
    task_failure: str = ""
    """The last event in it in which a subtask failed."""


class CoverageReport(msgspec.Struct, frozen=True):
    """Branches of the product that ran in some of the runs. Percentages 0..100."""

    runs: int = 0
    branches_percent: float = 0.0
    packages: dict[str, float] = {}
    never_ran: tuple[str, ...] = ()
    """Modules with functions of which none ran."""
    unavailable: str = ""
    """Why there are no figures."""


class Summary(msgspec.Struct, frozen=True):
    """Sums over all runs, in the order of their seeds."""

    seeds: int
    start: int
    workloads: dict[str, int]
    """Workload -> runs."""
    violations: int
    """Runs that broke an invariant."""
    invariants: dict[str, int]
    """Invariant -> runs that broke it."""
    seconds: float
    runs_per_minute: float
    runs_per_minute_per_core: float
    crashes: int
    crash_points: tuple[str, ...]
    checkpoints: int
    restarts: int
    records: int
    virtual_ms: int
    kinds: tuple[int, ...]
    """The first seed of each workload on each state backend."""
    faults: dict[str, FaultCount]
    """Kind -> counts, in the order of the catalogue."""
    idle: int
    """Runs in which no fault hit: they prove little."""
    idle_seeds: tuple[int, ...]
    """Seeds of the first of them."""
    visited: dict[str, int]
    """Dangerous state -> runs that visited it."""
    never_visited: tuple[str, ...]
    dependences: dict[str, tuple[Dependence, ...]] = {}
    """Workload -> sinks whose output differs between two runs without faults."""
    sabotage: str = ""
    caught_after: int = 0
    """With a sabotage: seeds up to the one whose checker caught it, inclusive; 0 if none did."""
    interrupted: bool = False

    @property
    def unjudged(self) -> bool:
        """Whether the output of some sink was not compared."""
        return any(not each.judged for found in self.dependences.values() for each in found)


class Tally:
    """Adds up results; its size is bounded by the names that it counts, not by the number of runs."""

    def __init__(self, sometimes: Iterable[str]) -> None:
        """`sometimes`: every dangerous state that a run can visit."""
        self.seeds = 0
        self.violations = 0
        self._sums: Counter[str] = Counter()
        self._workloads: Counter[str] = Counter()
        self._invariants: Counter[str] = Counter()
        self._planned: Counter[str] = Counter()
        self._hit: Counter[str] = Counter()
        self._visited: Counter[str] = Counter(dict.fromkeys(sometimes, 0))
        self._crash_points: set[str] = set()
        self._kinds: dict[tuple[str, str], int] = {}
        self._dependences: dict[str, dict[str, Dependence]] = {}
        self._idle = 0
        self._idle_seeds: list[int] = []

    def add(self, result: RunResult) -> None:
        """Add one run."""
        self.seeds += 1
        self._workloads[result.workload] += 1
        self._kinds.setdefault((result.workload, result.backend), result.seed)
        for name in ("crashes", "checkpoints", "restarts", "records", "virtual_ms"):
            self._sums[name] += getattr(result, name)
        self._crash_points.update(result.crash_points)
        self._visited.update(name for name, count in result.sometimes.items() if count)
        self._planned.update(fault.kind for fault in result.plan)
        self._hit.update(result.plan[index].kind for index in sorted(set(result.faults_hit)))
        if result.violations:
            self.violations += 1
            self._invariants.update({violation.invariant for violation in result.violations})
        for each in result.dependences:
            known = self._dependences.setdefault(result.workload, {})
            if each.sink not in known or (known[each.sink].judged, known[each.sink].seed is not None) > (
                each.judged,
                each.seed is not None,
            ):
                known[each.sink] = each
        if not result.faults_hit:
            self._idle += 1
            if len(self._idle_seeds) < IDLE_SEEDS_MAX:
                self._idle_seeds.append(result.seed)

    def summary(
        self, *, start: int, seconds: float, cores: int, sabotage: str = "", caught_after: int = 0, interrupted: bool = False
    ) -> Summary:
        """The summary. `seconds` of real time, on so many cores."""
        per_minute = 60 * self.seeds / seconds if seconds > 0 else 0.0
        return Summary(
            seeds=self.seeds,
            start=start,
            workloads=_sorted(self._workloads),
            violations=self.violations,
            invariants=_sorted(self._invariants),
            seconds=round(seconds, 1),
            runs_per_minute=round(per_minute, 1),
            runs_per_minute_per_core=round(per_minute / max(1, cores), 1),
            crashes=self._sums["crashes"],
            crash_points=tuple(sorted(self._crash_points)),
            checkpoints=self._sums["checkpoints"],
            restarts=self._sums["restarts"],
            records=self._sums["records"],
            virtual_ms=self._sums["virtual_ms"],
            kinds=tuple(self._kinds.values()),
            faults={kind: FaultCount(self._planned[kind], self._hit[kind]) for kind in KINDS if self._planned[kind]},
            idle=self._idle,
            idle_seeds=tuple(self._idle_seeds),
            visited={name: count for name, count in _sorted(self._visited).items() if count},
            never_visited=tuple(name for name, count in _sorted(self._visited).items() if not count),
            dependences={name: tuple(found.values()) for name, found in sorted(self._dependences.items())},
            sabotage=sabotage,
            caught_after=caught_after,
            interrupted=interrupted,
        )


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
