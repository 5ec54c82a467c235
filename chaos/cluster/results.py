"""What a run of one seed, and a run of many, came to. Plain records that travel between processes and into JSON."""

from __future__ import annotations

import msgspec

from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.pipelines.judging import Dependence


class ViolationRecord(msgspec.Struct, frozen=True):
    """An invariant that did not hold, and when (virtual ms)."""

    invariant: str
    message: str
    at_ms: int = 0
    cause_ms: int | None = None
    """When what it comes of began, as far as a checker knows: long before it was found, where output is judged at the end."""


class RunResult(msgspec.Struct, frozen=True):
    """One seed."""

    seed: int
    workload: str
    plan: tuple[Fault, ...]
    violations: tuple[ViolationRecord, ...] = ()
    faults_hit: tuple[int, ...] = ()
    """Indexes of the faults of the plan that really hit; a run where none did proves little."""
    crashes: int = 0
    """Processes killed."""
    crash_points: tuple[str, ...] = ()
    """Last point that each killed process had passed, sorted, without repeats."""
    checkpoints: int = 0
    """Completed, savepoints included."""
    restarts: int = 0
    """Attempts beyond the first."""
    records: int = 0
    """Records of input."""
    sometimes: dict[str, int] = {}
    """Dangerous states that were visited: name -> how often."""
    virtual_ms: int = 0
    steps: int = 0
    """Events of the schedule."""
    trace_digest: str = ""
    """Of the whole trace; equal for equal runs."""
    backend: str = ""
    dependences: tuple[Dependence, ...] = ()
    """Of a user's own pipeline: sinks whose output is not the same in two runs without any fault."""
    ended: str = ""
    """How the job ended: FINISHED, or why the run was cut off."""
