"""What a subtask is given, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from holdfast.barriers.messages import Answerable, SubtaskStatus, TaskState
from holdfast.operators.task.chain import OperatorChain
from holdfast.operators.task.context import Clock, SubtaskPool
from holdfast.operators.task.input import GateInputs
from holdfast.operators.task.mailbox import Mailbox
from holdfast.operators.task.snapshots import SubtaskSnapshots
from holdfast.statebackends.local_recovery.storage import RestoredBytes

TERMINAL = frozenset({TaskState.FINISHED, TaskState.CANCELED, TaskState.FAILED})


class StepResult(NamedTuple):
    """What one step did. `next_wakeup_ms` is monotonic: when a step is due although nothing arrives."""

    progress: bool
    next_wakeup_ms: int | None = None
    backpressured: bool = False
    has_more: bool = False
    """It stopped before it knew that nothing was left to do: another step is due at once."""


Report: TypeAlias = Callable[[SubtaskStatus | Answerable], None]

Attach: TypeAlias = Callable[[], None]
"""Hands restored backends to the contexts; runs on the loop thread."""


@dataclass(slots=True)
class SubtaskPorts:
    """Everything that a subtask touches."""

    chain: OperatorChain
    mailbox: Mailbox
    pool: SubtaskPool
    clock: Clock
    snapshots: SubtaskSnapshots
    report: Report
    inputs: GateInputs | None = None
    """None for a source."""
    restore: Callable[[], Attach] | None = None
    """Opens backends and reads state; runs on the pool. None: the contexts are complete."""
    restored: RestoredBytes = field(default_factory=RestoredBytes)
    """What `restore` has read."""
