"""What a workload gives to one run: the job, its input size, and the expectation of its committed output.

The expectation is computed in plain Python from the input alone, without any code of the product; a pipeline of a user's own has
none, and is compared with its own failure-free run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.chaos.pipelines.rows import Row
from holdfast.operators.base import JobPlan

if TYPE_CHECKING:
    from holdfast.chaos.pipelines.judging import Problem
    from holdfast.chaos.pipelines.rows import UserSink


Positions = Mapping[str, list[bytes]]
"""uid of a source -> its entries in a snapshot, over all subtasks."""


InFlightRows = Mapping[int, Sequence[Mapping[str, Any]]]
"""Input of an operator -> rows in flight to it."""


Drained = tuple[Positions, ...]
"""Positions at the job's drains so far, ascending."""


@dataclass(frozen=True, slots=True)
class SinkExpectation:
    """One sink, and its expected output at the end of the job."""

    path: str
    """Absolute path in the simulated store."""
    sink_id: str
    rows: Callable[[], Counter[Row]] | None
    """All rows with their counts; None: `judge` decides."""
    ordered_by: tuple[int, int] | None = None
    """(index of the key column, index of its sequence column): sequences of a key rise, in the order of commits."""
    steps_by_one: bool = False
    """Per key the sequence goes 1, 2, 3 ... without gap or repeat: the step rule (I5)."""
    compared: tuple[int, ...] | None = None
    """Columns that `rows` and `at_cut` compare, where the others depend on the order of arrival; None: all."""
    last_of_key: bool = False
    """Only the last row of each key (`ordered_by`) counts: the number of earlier ones depends on where batches end."""
    at_cut: Callable[[Positions], Counter[Row]] | None = None
    """Rows committed with ids up to a completed checkpoint, given its source positions; None: unknown."""
    after_drains: Callable[[Drained], Counter[Row]] | None = None
    """As `rows`, for a job that was drained on its way; None: the same rows."""
    emitted: Emitted | None = None
    """As `at_cut`, where positions alone do not determine what was emitted."""
    user: UserSink | None = None
    """The sink of a user's own pipeline."""
    judge: Callable[[Sequence[Row]], Problem | None] | None = None
    """The problem in all of its rows at the end, in the order of commits."""


@dataclass(frozen=True, slots=True)
class Possibly:
    """In a `CutStates`: this value or none. What a watermark has fired depends on the path to the cut."""

    value: Any


@dataclass(frozen=True, slots=True)
class Emitted:
    """At a cut, what an operator has emitted is what its state no longer holds: never both, never neither."""

    operator_uid: str
    states: tuple[str, ...]
    rows: Callable[[Positions, Drained, CutStates], Counter[Row]]
    """Rows, given the positions at the cut, those of drains before it, and the operator's states at the cut."""


class RowsInAnyOrder(Counter[Any]):
    """In a `CutStates`: the rows of a row table with their counts, which may have arrived in any order."""

    @classmethod
    def of(cls, rows: Iterable[tuple[tuple[Any, int], Mapping[str, Any]]]) -> RowsInAnyOrder:
        """((key, namespace), columns and time) of each."""
        return cls((key, tuple(sorted(columns.items()))) for key, columns in rows)

    def problem(self, found: Mapping[Any, Mapping[str, Any]]) -> str | None:
        """What is wrong with a table's rows by (key, namespace, order)."""
        held = Counter(((key, namespace), tuple(sorted(row.items()))) for (key, namespace, _), row in found.items())
        wrong = {"missing": self - held, "too many": held - self}
        told = [f"{rows.total()} rows {what}, such as {min(rows, key=repr)}" for what, rows in wrong.items() if rows]
        return " and ".join(told) or None


CutStates = Mapping[str, Mapping[Any, Any]]
"""state name -> key -> value, of one operator, over all its subtasks. States without an entry are not judged.

Keys of map state are (key, map key), of columnar state (key, namespace) with a dict of accumulators, of row tables (key, namespace,
order) with a dict of columns and time, of timers (key, time) with None; values of list state are lists. A value may be `Possibly`,
and a row table as a whole RowsInAnyOrder."""


@dataclass(frozen=True, slots=True)
class Cleanup:
    """State whose time has passed is gone (I35), at any cut."""

    states: tuple[str, ...]
    problem: Callable[[CutStates, int], str | None]
    """What is kept too long, given these states and the watermark that the operator keeps in its list state `watermarks`."""


@dataclass(frozen=True, slots=True)
class CutExpectation:
    """The content of a completed checkpoint: the state that belongs to exactly the input before its source positions."""

    source_uids: tuple[str, ...]
    operator_uid: str
    expected: Callable[[Positions], CutStates]
    """Keyed state of the operator, given the positions of the sources."""
    after_drains: Callable[[Positions, Drained], CutStates] | None = None
    """The same for a job that was drained before; None: `expected`."""
    beside: Callable[[Positions, InFlightRows], CutStates] | None = None
    """As `expected`, while these rows are in flight to the operator: they are in front of the cut, and in no state.

    Raises ValueError if they can't be. None: not known."""
    cleanup: Cleanup | None = None


@dataclass(frozen=True, slots=True)
class LateExpectation:
    """The records that a window operator drops as late."""

    source_uids: tuple[str, ...]
    operator_uid: str
    behind: Callable[[Positions | None], int]
    """Records dropped until the end of the input, given the positions at an attempt's start (None: the beginning)."""


@dataclass(frozen=True, slots=True)
class AccountsExpectation:
    """Where the records of a window operator are at the end, if which of them are late depends on the order of arrival."""

    operator_uid: str
    problem: Callable[[Mapping[str, Sequence[Row]], int], str | None]
    """The problem in the rows of each sink, by its id and in the order of commits, and the number of records that were dropped as
    late; None: each record is in one place."""


class OutsidePort(Protocol):
    """What is beyond the job, as checkers see it."""

    @property
    def journal(self) -> Sequence[Any]:
        """All that took effect, in order; it only grows."""


@dataclass(frozen=True, slots=True)
class OutsideExpectation:
    """A target outside, and its expected rows."""

    sink_id: str
    port: OutsidePort
    rows: Callable[[], Counter[Row]]
    """All rows at the end of the job."""
    rows_at: Callable[[Positions], Counter[Row]]
    """Rows committed with ids up to a completed checkpoint, given its source positions."""
    compared: tuple[int, ...]
    """Columns that these compare."""
    source_uid: str


class BrokerPort(Protocol):
    """Where a source's records come from: what readers tell of complete checkpoints."""

    told: list[tuple[str, int]]
    """Split and position, in this order."""

    def heal(self) -> None:
        """None of its calls fails from now on."""


@dataclass(frozen=True, slots=True)
class SplitsExpectation:
    """A source with an enumerator."""

    uid: str
    broker: BrokerPort


@dataclass(frozen=True, slots=True)
class RepeatExpectation:
    """A sink of an at-least-once job: what is in it at least, and what at most."""

    sink_id: str
    source_uids: tuple[str, ...]
    rows: Callable[[], Counter[Any]]
    """All of its input once, as `measure` counts it."""
    rows_before: Callable[[Positions], Counter[Any]]
    """The same of the input in front of a cut."""
    measure: Callable[[Iterable[Row]], Counter[Any]] = Counter
    """Of committed rows; the more records, the more of it."""
    waits: bool = False
    """Records wait in state: what is committed with a checkpoint is less than what is in front of its cut."""
    is_bounded: bool = True
    """A record that comes again adds to the measure what it added before, at most."""
    fires_again: bool = False
    """A record may be in several results, without any restore."""


@dataclass(frozen=True, slots=True)
class StateExpectation:
    """Value state of an at-least-once job that counts the records of each key."""

    operator_uid: str
    state: str
    counts: Callable[[Positions], Counter[Any]]
    """Key -> records in front of a cut: the least that the state says."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """A key that a user has the job forget, once a checkpoint is complete that is behind all of its records."""

    source_uid: str
    operator_uid: str
    key: int
    rows: int
    """None of its records has this index or a higher one."""
    source_rows: int


@dataclass(frozen=True, slots=True)
class RowCost:
    """Virtual us that an operator takes for each row, in its first subtask and in the others."""

    first_us: int
    others_us: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job of one seed."""

    plan: Callable[[int | None], JobPlan]
    """Builds the job at a parallelism; None: its own. Called for every submission."""
    records: int
    """Input records over all sources."""
    sinks: tuple[SinkExpectation, ...]
    operators: tuple[str, ...]
    """Uids of operators with user code, for their faults."""
    cuts: tuple[CutExpectation, ...] = ()
    late: LateExpectation | None = None
    """None: drops are not judged."""
    outside: OutsideExpectation | None = None
    """None: the job writes to no target."""
    accounts: AccountsExpectation | None = None
    splits: tuple[SplitsExpectation, ...] = ()
    """Sources with an enumerator."""
    repeats: tuple[RepeatExpectation, ...] = ()
    """Sinks of a job that may repeat; their SinkExpectation has no rows."""
    counted: tuple[StateExpectation, ...] = ()
    """States of such a job, of the sources of `repeats`."""
    may_rescale: bool = True
    may_drain: bool = True
    """A drain in the middle leaves the output unchanged; false where it closes windows early."""
    bounded: bool = True
    """The job ends with its input."""
    may_rescale_in_flight: bool = True
    """A late record in flight may be found in time by a rescaled restore; false where the expectation says which are late."""
    user_modules: frozenset[str] = frozenset()
    """Modules of the user's own, of which each simulated worker process imports its own."""
    duration_ms: int = 2_000
    """About how long the job takes without failures, in virtual ms: its faults begin before."""
    members: int = 0
    """Coordinators of which one is active and the others stand by; 0: one that knows of no others."""
    row_costs: Mapping[str, RowCost] = field(default_factory=dict)
    """Uid of an operator -> what a row costs it; the others take no time of their own."""
    labels: bool = False
    """Users label its checkpoints while it runs."""
    forgetting: Forgetting | None = None
    may_rewind: bool = True
    """Users may go back to older snapshots."""


def source_uids(scenario: Scenario) -> tuple[str, ...]:
    """Sources whose positions its cuts, or its rows behind a drain, depend on."""
    if any(sink.after_drains for sink in scenario.sinks):
        return tuple(sorted(scenario.plan(None).sources))
    return tuple(sorted({uid for cut in scenario.cuts for uid in cut.source_uids}))


@dataclass(frozen=True, slots=True)
class Workload:
    """A family of jobs, from which a seed draws one."""

    name: str
    meaning: str
    make: Callable[[random.Random], Scenario]
    """Draws sizes, rates, parallelism and settings, all from the given stream."""
