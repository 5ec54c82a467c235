"""Results of one run and of many: plain records that travel between processes and into JSON."""

from __future__ import annotations

import msgspec

from holdfast.chaos.faults.faults import Fault
from holdfast.chaos.pipelines.judging import Dependence


class ViolationRecord(msgspec.Struct, frozen=True):
    """A violated invariant, and when (virtual ms)."""

    invariant: str
    message: str
    at_ms: int = 0
    cause_ms: int | None = None
    """When its cause began, as far as a checker knows: long before the report, where output is judged at the end."""


class RunResult(msgspec.Struct, frozen=True):
    """One seed."""

    seed: int
    workload: str
    plan: tuple[Fault, ...]
    violations: tuple[ViolationRecord, ...] = ()
    faults_hit: tuple[int, ...] = ()
    """Indexes of the faults of the plan that hit; a run without any proves little."""
    crashes: int = 0
    """Killed processes."""
    crash_points: tuple[str, ...] = ()
    """Last point of each killed process, sorted, without repeats."""
    checkpoints: int = 0
    """Completed checkpoints, savepoints included."""
    restarts: int = 0
    """Attempts beyond the first."""
    records: int = 0
    """Input records."""
    sometimes: dict[str, int] = {}
    """Dangerous state -> visits."""
    virtual_ms: int = 0
    steps: int = 0
    """Events of the schedule."""
    trace_digest: str = ""
    """Digest of the whole trace; equal for equal runs."""
    backend: str = ""
    dependences: tuple[Dependence, ...] = ()
    """Sinks of a user's own pipeline whose output differs between two runs without faults."""
    ended: str = ""
    """FINISHED, or why the run ended without."""
