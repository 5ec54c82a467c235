"""A smaller list of faults that still fails in the same way: faults are dropped as long as the same invariant breaks.

Delta debugging (Zeller and Hildebrandt, 2002), bounded in runs. Faults stay whole: a shorter pause is another fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.chaos.cluster.results import RunResult

RUNS_MAX = 80
"""Most runs for one failure."""


@dataclass(frozen=True, slots=True)
class Minimised:
    """The remaining faults."""

    kept: tuple[int, ...]
    """Indexes in the given plan, ascending."""
    runs: int
    """Runs that it took."""
    complete: bool
    """No single fault can be dropped from `kept`; False if the runs were used up before that was known."""


class _Search:
    """Runs subsets, and remembers their results; beyond the limit every answer is no."""

    def __init__(self, fails: Callable[[tuple[int, ...]], bool], runs_max: int) -> None:
        self._fails = fails
        self._runs_max = runs_max
        self._known: dict[tuple[int, ...], bool] = {}
        self.exhausted = False

    @property
    def runs(self) -> int:
        return len(self._known)

    def fails(self, kept: tuple[int, ...]) -> bool:
        if kept not in self._known:
            if self.runs >= self._runs_max:
                self.exhausted = True
                return False
            self._known[kept] = self._fails(kept)
        return self._known[kept]


def breaks(result: RunResult, invariant: str) -> bool:
    """Whether this run broke that invariant."""
    return any(violation.invariant == invariant for violation in result.violations)


def minimise(
    result: RunResult, invariant: str, run: Callable[[tuple[int, ...]], RunResult], *, runs_max: int = RUNS_MAX
) -> Minimised:
    """The failure of `result` with fewer faults. `run` runs the same request with these faults of its plan alone.

    Faults that never hit are dropped first, then all at once, then ever smaller parts."""
    search = _Search(lambda kept: breaks(run(kept), invariant), runs_max)
    kept = tuple(range(len(result.plan)))
    hit = tuple(sorted(set(result.faults_hit)))
    for fewer in ((), hit):
        if len(fewer) < len(kept) and search.fails(fewer):
            kept = fewer
            break
    kept = _reduce(search, kept)
    return Minimised(kept, search.runs, not search.exhausted)


def _reduce(search: _Search, kept: tuple[int, ...]) -> tuple[int, ...]:
    """Drop parts of `kept`, halves first, until no single fault can go."""
    parts = 2
    while len(kept) > 1 and not search.exhausted:
        parts = min(parts, len(kept))
        fewer = next((rest for rest in _without_a_part(kept, parts) if search.fails(rest)), None)
        if fewer is not None:
            kept, parts = fewer, max(2, parts - 1)
        elif parts == len(kept):
            break
        else:
            parts *= 2
    return kept


def _without_a_part(kept: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """`kept` without each of so many equal parts."""
    bounds = [index * len(kept) // parts for index in range(parts + 1)]
    return [kept[:start] + kept[stop:] for start, stop in itertools.pairwise(bounds)]
