"""What a workload gives to one run: the job, its input size, and what its committed output must be.

The expectation is computed in plain Python from the input alone, without any code of the product; a pipeline of a user's own
has none, and is compared with its own failure-free run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from operators.base import JobPlan

Row = tuple[Any, ...]
"""Values of one output row, in the order of the sink's columns; timestamps as integers (us)."""


@dataclass(frozen=True, slots=True)
class SinkExpectation:
    """One sink and its output at the end of the job."""

    path: str
    """Absolute path of the sink in the simulated store."""
    sink_id: str
    rows: Callable[[], Counter[Row]] | None
    """All rows with their counts; None: whatever a failure-free run of the same job commits."""
    ordered_by: tuple[int, int] | None = None
    """(index of the key column, index of its sequence column): sequences of a key never go back, in the order of commits."""
    steps_by_one: bool = False
    """Per key the sequence goes 1, 2, 3 ... without gap or repeat: the step rule (I5)."""


CutStates = Mapping[str, Mapping[Any, Any]]
"""state name -> key -> value, of one operator, over all its subtasks."""


@dataclass(frozen=True, slots=True)
class CutExpectation:
    """What a completed checkpoint must hold: the state that belongs to exactly the input before its source positions."""

    source_uids: tuple[str, ...]
    operator_uid: str
    expected: Callable[[Mapping[str, list[bytes]]], CutStates]
    """From the positions of the sources (uid -> entries as snapshotted, of all subtasks) to the operator's keyed state."""


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
    may_rescale: bool = True
    bounded: bool = True
    """The job ends by itself when its input does."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A family of jobs, from which a seed draws one."""

    name: str
    meaning: str
    make: Callable[[random.Random], Scenario]
    """Draws sizes, rates, parallelism, settings; everything from the stream that it is given."""
