"""What a workload gives to one run: the job, its input size, and what its committed output must be.

The expectation is computed in plain Python from the input alone, without any code of the product; a pipeline of a user's own
has none, and is compared with its own failure-free run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.chaos.pipelines.rows import Row
from holdfast.operators.base import JobPlan

if TYPE_CHECKING:
    from holdfast.chaos.pipelines.judging import Problem
    from holdfast.chaos.pipelines.rows import UserSink


Positions = Mapping[str, list[bytes]]
"""uid of a source -> its entries as snapshotted, of all subtasks."""


Drained = tuple[Positions, ...]
"""Positions at which the job was drained so far, and went on from."""


@dataclass(frozen=True, slots=True)
class SinkExpectation:
    """One sink and its output at the end of the job."""

    path: str
    """Absolute path of the sink in the simulated store."""
    sink_id: str
    rows: Callable[[], Counter[Row]] | None
    """All rows with their counts; None: `judge` judges."""
    ordered_by: tuple[int, int] | None = None
    """(index of the key column, index of its sequence column): sequences of a key rise, in the order of commits."""
    steps_by_one: bool = False
    """Per key the sequence goes 1, 2, 3 ... without gap or repeat: the step rule (I5)."""
    compared: tuple[int, ...] | None = None
    """Columns that `rows` and `at_cut` are about, when the others depend on the order of arrival; None: all."""
    last_of_key: bool = False
    """Only the last row of each key (`ordered_by`) counts: how many come before it depends on where batches end."""
    at_cut: Callable[[Positions], Counter[Row]] | None = None
    """Rows that are committed with ids up to a completed checkpoint, given its source positions; None: can't be told."""
    after_drains: Callable[[Drained], Counter[Row]] | None = None
    """As `rows`, of a job that was drained on its way; None: they are the same."""
    emitted: Emitted | None = None
    """As `at_cut`, where positions alone do not tell what has been emitted."""
    user: UserSink | None = None
    """Of a user's own pipeline."""
    judge: Callable[[Sequence[Row]], Problem | None] | None = None
    """What is wrong with all of its rows at the end, in the order of commits."""


@dataclass(frozen=True, slots=True)
class Possibly:
    """In a `CutStates`: this value, or nothing at all. What a watermark lets go depends on the path to the cut."""

    value: Any


@dataclass(frozen=True, slots=True)
class Emitted:
    """What an operator has emitted at a cut is what its state does not hold any more: never both, never neither."""

    operator_uid: str
    states: tuple[str, ...]
    rows: Callable[[Positions, Drained, CutStates], Counter[Row]]
    """From the positions at the cut, those of drains before it, and the operator's states as they are there."""


CutStates = Mapping[str, Mapping[Any, Any]]
"""state name -> key -> value, of one operator, over all its subtasks. States that it does not name are not judged.

Of map state the key is (key, map key), of columnar state (key, namespace) with a dict of accumulators, of timers (key, time)
with None; of list state the value is a list. A value may be `Possibly`."""


@dataclass(frozen=True, slots=True)
class CutExpectation:
    """What a completed checkpoint must hold: the state that belongs to exactly the input before its source positions."""

    source_uids: tuple[str, ...]
    operator_uid: str
    expected: Callable[[Positions], CutStates]
    """From the positions of the sources to the operator's keyed state."""
    after_drains: Callable[[Positions, Drained], CutStates] | None = None
    """The same of a job that was drained before; None: `expected`."""


@dataclass(frozen=True, slots=True)
class LateExpectation:
    """Which records a window operator drops because they are late."""

    source_uids: tuple[str, ...]
    operator_uid: str
    behind: Callable[[Positions | None], int]
    """From the positions that an attempt starts with (None: the start) to the records that it drops until the input's end."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job of one seed."""

    plan: Callable[[int | None], JobPlan]
    """The job; with a number, at that parallelism instead of its own (None). Called again for every submission."""
    records: int
    """Input records over all sources."""
    sinks: tuple[SinkExpectation, ...]
    operators: tuple[str, ...]
    """Uids of operators with user code, for faults that hit operators."""
    cuts: tuple[CutExpectation, ...] = ()
    late: LateExpectation | None = None
    """None: nothing of it is judged."""
    may_rescale: bool = True
    may_drain: bool = True
    """The output is the same when the job is drained in the middle, and goes on later; false where that closes windows early."""
    bounded: bool = True
    """The job ends by itself when its input does."""
    user_modules: frozenset[str] = frozenset()
    """Modules of the user's own, of which each simulated worker process gets its own."""
    duration_ms: int = 2_000
    """About how long the job takes when nothing fails, in virtual time: its faults begin before."""


def source_uids(scenario: Scenario) -> tuple[str, ...]:
    """Sources whose positions its cuts are about."""
    return tuple(sorted({uid for cut in scenario.cuts for uid in cut.source_uids}))


@dataclass(frozen=True, slots=True)
class Workload:
    """A family of jobs, from which a seed draws one."""

    name: str
    meaning: str
    make: Callable[[random.Random], Scenario]
    """Draws sizes, rates, parallelism, settings; everything from the stream that it is given."""
